"""The simulated world: hosts with processes, a network, the registry, and an operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from math import inf
from random import Random
from typing import TypeAlias

from rebalanser.core.allocation import Allocation, AllocationProblem, solve
from rebalanser.core.clock import Clock
from rebalanser.core.group.messages import Fact, FactKind
from rebalanser.core.group.node import Node, NodeOptions
from rebalanser.core.group.states import Membership, Role
from rebalanser.core.group.types import (
    POLICY_FIELDS,
    SPEC_FIELDS,
    Group,
    Member,
    NodeId,
    OnOverrun,
    Policy,
    Resource,
    ResourceSpec,
    Session,
)
from rebalanser.errors import RebalanserError
from rebalanser.registry.contract import (
    Grant,
    Granted,
    KeepAlive,
    KeyValue,
    Reply,
    Request,
    Revoke,
    Target,
    WatchEvent,
)
from rebalanser.registry.keys import GroupKeys
from rebalanser.registry.script import Answer
from rebalanser.registry.translation import Translation
from rebalanser.testing.memory import MemoryStore
from simulation.group.duties import Promptness
from simulation.group.faults import FaultKind
from simulation.group.labels import replaced
from simulation.group.network import Network
from simulation.group.operators import Change, Operations, Operator
from simulation.group.oracle import OPERATOR, Judged, Oracle
from simulation.group.process import Host, Process
from simulation.group.scenario import HostPlan, Scenario
from simulation.kernel.reports import Violation
from simulation.kernel.scheduler import Scheduler
from simulation.kernel.trace import Trace, listed, reply_sentence, request_sentence, text
from support.allocation_checker import check

OnFact: TypeAlias = Callable[[str, Fact, float, float], None]
"""Called with the host's label, the fact, wall-clock seconds, and the host's monotonic seconds."""

GROUP = "group"
NEIGHBOUR = "group/nodes"
"""The name of the other group, whose keys would be among those of the first if it were not quoted."""
_TICK_S = 1e-6
_MOVES_OF_A_STEP = 2
"""The most resources that one step to a better balance moves: an exchange moves two."""
_TRIES_AGAIN = 0.5
"""Probability that an operator makes a request again that failed."""


class SimulatedStore(MemoryStore):
    """The memory store of a scenario, whose leases may be found over a little later than they are."""

    late_until = 0.0
    serving: World | None = None
    """The group whose request is being carried out."""

    def __init__(self, clock: Clock, scenario: Scenario) -> None:
        super().__init__(clock, scenario.capabilities)
        self.proves_renewals = scenario.proves_renewals

    def expire(self) -> None:
        """End the leases that are over, unless the registry is late just now."""
        if self._clock.now() >= self.late_until:
            super().expire()


class World:
    """Everything of one run. What is done to it by name can be done by a script or by chance."""

    translation_class: type[Translation] = Translation

    def __init__(
        self,
        scenario: Scenario,
        random: Random,
        trace: Trace,
        on_fact: OnFact | None = None,
        beside: World | None = None,
    ) -> None:
        self.scenario = scenario
        self.random = random
        self.trace = trace
        self._on_fact = on_fact
        self.groups: list[World] = beside.groups if beside else []
        """This one, and the other group in the same registry."""
        self.groups.append(self)
        self.scheduler: Scheduler = beside.scheduler if beside else Scheduler()
        self.store: SimulatedStore = (
            beside.store if beside else SimulatedStore(self.scheduler.clock, scenario)
        )
        self.keys: GroupKeys = GroupKeys("sim", NEIGHBOUR if beside else GROUP)
        self.translation = self.translation_class(self.keys, self.store.capabilities)
        self.hits: Counter[FaultKind] = Counter()
        self.facts: Counter[FactKind] = Counter()
        self.commands: Counter[str] = Counter()
        self.met: Counter[str] = Counter()
        """How often each command ended with each outcome, by ``answer_name``."""
        self.completed_version = 0
        self.oracle = Oracle(self)
        within_s = scenario.prompt_within_s
        self.promptness = Promptness(self, within_s) if within_s is not None else None
        self.network: Network = Network(self.scheduler, random, self._deliver, self.hit, scenario.late_s)
        self.hosts: list[Host] = []
        for index, plan in enumerate(scenario.hosts):
            known = any(host.name == plan.label for host in self.hosts)
            name = f"{plan.label}#{index}" if known else plan.label
            self.hosts.append(Host(self, plan, name, start=1000.0 * (index + 1)))
        self.operations = Operations(self)
        self.operators = [Operator(self, f"{OPERATOR}-{index}") for index in range(scenario.operators)]
        self.reacts: Callable[[Process, Fact], None] | None = None
        self.records: Callable[[Process, Fact], None] | None = None
        """Told each fact as it happens, to write it down; it must not change the run."""
        self._lease_timer = False
        self.store.watch(Target(self.keys.prefix, prefix=True), 1, self._changed)
        names = [f"r{index}" for index in range(scenario.resources)]
        specs = tuple(scenario.draw_spec(name, random) for name in names)
        first = Change(f"adds {listed(names)}", put=specs)
        self.scheduler.at(self.now, self._change_at_once, first)
        if scenario.placement:
            policy = Change("sets a policy", policy=scenario.draw_policy(random), fields=POLICY_FIELDS)
            self.scheduler.at(self.now, self._change_at_once, policy)

    def _changed(self, events: Sequence[WatchEvent]) -> None:
        self.oracle.changed(events)
        self.operations.changed(events, self.oracle.actor)

    @property
    def resources(self) -> Mapping[Resource, ResourceSpec]:
        """The resources, as the registry has them."""
        return self.operations.specs

    @property
    def drained(self) -> AbstractSet[str]:
        """The drained labels, as the registry has them."""
        return self.operations.drained

    @property
    def now(self) -> float:
        """True time in seconds."""
        return self.scheduler.now

    @property
    def running(self) -> Iterator[Process]:
        """The processes that live and have not finished."""
        return (host.running for host in self.hosts if host.running is not None)

    @property
    def is_serving(self) -> bool:
        """True while a request of one of the groups is carried out."""
        return self.store.serving is not None

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        self.scheduler.run_until(self.now + seconds)

    def say(self, where: str, sentence: str) -> None:
        """Write a line to the trace."""
        self.trace.line(self.now, where if self is self.groups[0] else f"neighbour's {where}", sentence)

    def hit(self, kind: FaultKind, sentence: str) -> None:
        """A fault took effect."""
        self.hits[kind] += 1
        if self.trace:
            self.say("fault", sentence)

    def make_node(self, plan: HostPlan, stem: str) -> Node:
        """The core of a new process."""
        return Node(
            Member(
                node=stem,
                label=plan.label,
                mode=plan.mode,
                may_lead=plan.may_lead,
                host=plan.label,
                capacity=plan.capacity,
                tags=plan.tags,
                zone=plan.zone,
                rejoin_grace_s=plan.rejoin_grace_s,
            ),
            self.scenario.timings,
            self._solve,
            NodeOptions(
                start_in_batches=plan.start_in_batches,
                on_overrun=OnOverrun.KILL if plan.kills else OnOverrun.REPORT,
            ),
        )

    @staticmethod
    def _solve(problem: AllocationProblem) -> Allocation:
        allocation = solve(problem)
        try:
            check(problem, allocation)
        except AssertionError as wrong:
            raise Violation(*str(wrong).partition(": ")[::2]) from wrong
        return allocation

    def stored(self, key: str) -> KeyValue:
        """Return a key's entry in the registry."""
        entry = self.store.get(key)
        if entry is None:
            raise KeyError(key)
        return entry

    def acknowledged(self, node: str) -> int:
        """The version that a member has acknowledged, as the registry has it; 0 where it has none."""
        entry = self.store.get(self.keys.ack(node))
        return int(entry.value) if entry is not None else 0

    def handler_latency(self) -> float:
        """How long (seconds) it takes until the handler's thread runs."""
        return self.random.random() * 0.001

    def report(self, process: Process, fact: Fact) -> None:
        """A process tells what happened to it."""
        self.facts[fact.kind] += 1
        if fact.kind is FactKind.REBALANCE_COMPLETED:
            version = int(str(fact.detail["completed_version"]))
            self.completed_version = max(self.completed_version, version)
            self.oracle.told_completed(process, version)
        if self._on_fact is not None:
            self._on_fact(process.label, fact, self.scheduler.clock.wall(), process.now)
        if self.records is not None:
            self.records(process, fact)
        if self.trace:
            self.say(process.label, _fact_sentence(fact))
        if self.reacts is not None:
            self.reacts(process, fact)

    def finished(self, process: Process) -> None:
        """A process has stopped gracefully, and exits."""
        if self.trace:
            self.say(process.label, "exits")
        process.die()
        self.oracle.died(process)

    def changed_versions(self) -> None:
        """A new version of the allocation is committed; its shares are looked at when all is written."""
        leader, header = self.oracle.leader, self.oracle.header
        for process in self.running:
            if header is not None and process.is_incarnation(leader):
                process.duties.plans.committed(header.version)
        self.scheduler.at(self.now, self.oracle.check_shares)

    def _deliver(self, request: Request, origin: str) -> Reply | RebalanserError:
        self.store.expire()
        self.store.serving = self
        self.oracle.delivering(request, origin)
        try:
            reply = self.store.carry_out(request)
        except RebalanserError as error:
            self._say_request(request, origin, error)
            return error
        finally:
            self.oracle.delivered()
            self.store.serving = None
        self._say_request(request, origin, reply)
        if isinstance(request, KeepAlive):
            self.oracle.renewed(request.lease, self.scenario.timings.lease_ttl_s)
        elif isinstance(request, Grant) and isinstance(reply, Granted):
            self.oracle.renewed(reply.lease, reply.ttl_s)
            self._time_leases()
        return reply

    def _say_request(self, request: Request, origin: str, reply: Reply | RebalanserError) -> None:
        if self.trace:
            sentence = request_sentence(request, self.keys.prefix)
            self.say("registry", f"{origin}: {sentence} → {reply_sentence(reply)}")

    def _time_leases(self) -> None:
        if self._lease_timer:
            return
        following = self.store.next_expiry()
        if following is None:
            return
        self._lease_timer = True
        self.scheduler.at(max(following, self.store.late_until) + _TICK_S, self._end_leases)

    def _end_leases(self) -> None:
        self._lease_timer = False
        self.store.expire()
        self._time_leases()

    def start(self, host: Host, stopped: bool = False) -> Process:
        """Start a process where none runs; ``stopped``: it is asked to stop before it takes part."""
        host.generation += 1
        process = Process(self, host, f"{host.name}.{host.generation}")
        host.process = process
        host.handler_faults.clear()
        host.pause_at_entry_s = 0.0
        if self.trace:
            self.say(host.name, f"starts as {process.stem}")
        if stopped:
            process.ask_stop()
        else:
            process.begin()
        return process

    def start_soon(self, host: Host) -> None:
        """A supervisor starts what was killed again."""

        def start() -> None:
            if host.running is None:
                self.start(host)

        self.scheduler.at(self.now + 0.5, start)

    def stop(self, host: Host) -> None:
        """Stop a process gracefully."""
        process = host.running
        if process is not None and not process.stopping:
            self.hit(FaultKind.GRACEFUL_STOP, f"{host.name}: is asked to stop")
            process.ask_stop()

    def crash(self, host: Host) -> None:
        """Kill a process."""
        process = host.running
        if process is not None:
            if self.trace:
                self.say(host.name, "dies")
            process.die()
            self.oracle.died(process)

    def pause(self, host: Host, seconds: float, kind: FaultKind) -> None:
        """Stop a process for a while (SIGSTOP)."""
        process = host.running
        if process is None or process.paused:
            return
        self.hit(kind, f"{host.name}: is stopped for {seconds:.3f} s")
        self.oracle.conduct(process).paused.begin(self.now)
        process.pause()
        self.scheduler.at(self.now + seconds, lambda: self.resume(process))

    def resume(self, process: Process) -> None:
        """Let a stopped process go on."""
        if process.alive and process.paused:
            self.oracle.conduct(process).paused.end(self.now)
            if self.trace:
                self.say(process.label, "goes on")
            process.resume()

    def cut(self, host: Host, seconds: float, refuses: bool) -> None:
        """Cut a host off from the registry for a while."""
        if host.link.cut is not None:
            return
        self.hit(FaultKind.PARTITION, f"{host.name}: is cut off for {seconds:.3f} s")
        host.link.cut, host.link.refuses = FaultKind.PARTITION, refuses
        self.scheduler.at(self.now + seconds, lambda: self.join(host))

    def join(self, host: Host) -> None:
        """Connect a host with the registry again."""
        if host.link.cut is not None:
            host.link.cut = None
            if self.trace:
                self.say(host.name, "is connected again")
            if host.running is not None:
                host.running.reconnected()

    def drift(self, host: Host, rate: float, kind: FaultKind) -> None:
        """Let a host's clock run at another rate."""
        self.hit(kind, f"{host.name}: clock runs at {rate:.4f}")
        self._run_clock(host, rate)

    def _run_clock(self, host: Host, rate: float) -> None:
        host.clock.run_at(rate, self.now)
        if host.running is not None:
            host.running.clock_changed()

    def restart_registry(self) -> None:
        """The registry comes back from a restart."""
        self.hit(FaultKind.REGISTRY_RESTART, "the registry restarts")
        for group in self.groups:
            group.oracle.leases_renewed_by_restart(group.scenario.timings.lease_ttl_s)
        self.store.restart()

    def compact(self) -> None:
        """The registry forgets its history."""
        self.hit(FaultKind.COMPACTION, "the registry's history is compacted")
        self.store.compact(self.store.revision + 1)

    def end_leases_late(self, seconds: float) -> None:
        """For a while the registry does not notice that leases are over."""
        self.hit(FaultKind.LEASES_LATE, f"leases are found over {seconds:.3f} s late")
        self.store.late_until = self.now + seconds
        self.scheduler.at(self.store.late_until + _TICK_S, self.store.expire)

    def revoke_soon(self, host: Host, session: Session) -> None:
        """An operator ends a lease by mistake: of a node that holds nothing, so that nobody is in danger."""
        after_s, host.revoked_in_s = host.revoked_in_s, None
        if after_s is None:
            return

        def revoke() -> None:
            holders = {barrier.node for barrier in self.oracle.barriers.values()}
            if session.node in self.oracle.members and session.node not in holders:
                self.hit(FaultKind.LEASE_REVOKED, f"{host.name}: its lease is revoked")
                self.store.execute(Revoke(session.lease))

        self.scheduler.at(self.now + after_s, revoke)

    def change(self, change: Change) -> None:
        """An operator asks for a change: through the network if the scenario has operators, else at once."""
        if not self.operators:
            self._change_at_once(change)
            return
        operator = self.random.choice(self.operators)

        def try_again() -> None:
            if self.reacts is not None and self.random.random() < _TRIES_AGAIN:
                self.scheduler.at(self.now + self.random.random(), lambda: operator.ask(change))

        operator.ask(change, try_again)

    def _change_at_once(self, change: Change) -> None:
        if self.trace:
            self.say(OPERATOR, change.sentence)
        request = self.operations.begin(change)
        script = change.script(self.translation)
        try:
            sent = next(script)
            while True:
                reply = self._deliver(sent, request.origin)
                if isinstance(reply, RebalanserError):
                    raise reply
                sent = script.send(Answer(reply, self.now))
        except StopIteration:
            self.operations.ended(request, None)

    def add(self, names: Sequence[str], pin: str | None = None, fields: frozenset[str] = SPEC_FIELDS) -> None:
        """Add resources, or change what they are pinned to."""
        sentence = f"adds {listed(names)}" + (f", pinned to {pin}" if pin else "")
        specs = tuple(self.scenario.draw_spec(name, self.random, pin) for name in names)
        self.change(Change(sentence, put=specs, fields=fields))

    def weigh(self, weights: Mapping[Resource, float]) -> None:
        """Change the weights of resources."""
        self.change(Change(f"weighs {listed(weights)}", weights=weights))

    def remove(self, names: Sequence[str]) -> None:
        """Remove resources."""
        self.change(Change(f"removes {listed(names)}", removed=tuple(names)))

    def set_drained(self, label: str, drained: bool) -> None:
        """Drain a label, or give its nodes work again."""
        self.change(Change(f"{'drains' if drained else 'undrains'} {label}", drain=(label, drained)))

    def set_policy(self, policy: Policy, fields: frozenset[str]) -> None:
        """Change fields of the policy."""
        said = {name: getattr(policy, name) for name in sorted(fields)}
        self.change(Change(f"sets {listed(said)}", policy=policy, fields=fields))

    def check_alive(self, within_s: float) -> None:
        """Check that a healthy node soon works on what it keeps, whatever else changes (RB-41).

        For profiles whose faults leave the network, the clocks and the handlers alone.
        """
        processes = {
            process.node.session.node: process
            for host in self.hosts
            if (process := host.running) is not None and process.node.session is not None
        }
        for resource, (node, since) in self.oracle.given.items():
            process = processes.get(node)
            idle_s = self.now - max(since, self.oracle.last_worked.get(resource, 0.0))
            if process is None or process.stopping or idle_s <= within_s:
                continue
            if process.stem not in self.oracle.accesses.get(resource, {}):
                raise Violation("RB-41", f"{node} has not worked on {resource} for {idle_s:.1f} s")

    def unsettled(self) -> str | None:
        """The rule and what is not yet as it must be once nothing fails any more; None where all is well.

        A rebalance that is not complete breaks RB-3. What is wrong though the nodes take it for complete
        breaks a rule of its own.
        """
        live = [process for host in self.hosts if (process := host.running) is not None]
        if self.operations.under_way:
            return "RB-3: an operator waits"
        for process in live:
            if process.stopping:
                return f"RB-26: {process.label} has not stopped"
            if process.call is not None:
                return f"RB-3: a handler of {process.label} runs"
            if process.node.membership is not Membership.MEMBER:
                return f"RB-3: {process.label} is no member"
        wrong = self._unsettled_group(live)
        if wrong is not None:
            return wrong
        undone = self._unacknowledged()
        wrong = self._unsettled_process(live) or self._unrecorded(live) or self._unowned(live)
        if undone is not None:
            return f"RB-3: {wrong.partition(': ')[2] if wrong else undone}"
        return wrong

    def _unsettled_process(self, live: Collection[Process]) -> str | None:
        for process in live:
            if process.failed_to_start & process.tokens.keys():
                return f"RB-24: {process.label} did not stop {listed(process.failed_to_start)}, which failed"
            if process.asked & process.tokens.keys():
                return f"RB-41: {process.label} was asked to stop {listed(process.asked)} and not called"
            if not process.tokens and not process.told_of_nothing:
                return f"RB-18: {process.label} owns nothing and was not told"
        return None

    def _unrecorded(self, live: Collection[Process]) -> str | None:
        for process in live:
            if any(process.now < until < inf for until in process.duties.released.values()):
                return f"RB-3: {process.label} has released something for a while yet"
            told, due = self.oracle.released_at(_node_id(process)), process.duties.released_now()
            if told != due:
                return f"RB-2: the record of {process.label} names {listed(told)}, not {listed(due)}"
        return None

    def _unsettled_group(self, live: Collection[Process]) -> str | None:
        oracle = self.oracle
        sessions = {process.node.session.node for process in live if process.node.session is not None}
        if oracle.members.keys() != sessions:
            return f"RB-20: members are {listed(oracle.members)}, not {listed(sessions)}"
        left_over = {
            self.keys.name(entry.key, prefix)
            for prefix in (self.keys.acks, self.keys.removals)
            for entry in self.store.items(prefix)
        } - sessions
        if left_over:
            return f"RB-20: keys of {listed(left_over)} are left over"
        if oracle.leader not in sessions:
            return f"RB-23: {oracle.leader} leads, which is gone"
        if oracle.header is None or oracle.allocation.keys() != sessions:
            return "RB-7: the allocation is for other members"
        obsolete = oracle.obsolete_parts()
        if obsolete and any(each.duties.published_version == oracle.header.version for each in live):
            return f"RB-9: {listed(obsolete)} are left behind"
        for process in live:
            if process.node.role is Role.LEADER and not process.is_incarnation(oracle.leader):
                return f"RB-6: {process.label} takes itself for the leader, which is {oracle.leader}"
        return None

    def plan_of(self, node: NodeId) -> HostPlan:
        """Return the plan of the host that a node runs on."""
        return next(host.plan for host in self.hosts if node.startswith(f"{host.name}."))

    def _member(self, node: NodeId) -> Member:
        """A node as its host describes it."""
        plan = self.plan_of(node)
        return Member(node, plan.label, capacity=plan.capacity, tags=plan.tags, zone=plan.zone)

    def problem_at(self, group: Group) -> AllocationProblem:
        """Return what a plan has to solve, as it really was when a group was read."""
        nodes = {node: self._member(node) for node in sorted(group.members)}
        nodes = {node: member for node, member in nodes.items() if member.label not in group.drained}
        specs = self.operations.specs_at(group.revision)
        by_label = {member.label: node for node, member in reversed(nodes.items())}
        return AllocationProblem(
            nodes,
            specs,
            {node: share.resources for node, share in group.shares.items()},
            self.operations.policy_at(group.revision),
            {name: by_label.get(spec.pin, "") for name, spec in specs.items() if spec.pin is not None},
        )

    def _unowned(self, live: Collection[Process]) -> str | None:
        owners: dict[NodeId, set[Resource]] = {_node_id(process): set() for process in live}
        for resource, accesses in self.oracle.accesses.items():
            if accesses and resource not in self.resources:
                return f"RB-7: {resource} is removed and still accessed"
            for access in accesses.values():
                owners[_node_id(access.process)].add(resource)
        plans = {_node_id(process): process.host.plan for process in live}
        superseded = replaced(plans, plans, self.oracle.members)
        active = [
            process
            for process in live
            if process.host.plan.label not in self.drained and _node_id(process) not in superseded
        ]
        problem = AllocationProblem(
            {_node_id(process): self._member(_node_id(process)) for process in active},
            self.resources,
            {node: frozenset(owned) for node, owned in owners.items()},
            self._lasting_policy(),
            self._pinned(active),
            self._releasers(active),
        )
        expected = self._solve(problem).shares
        for node, owned in owners.items():
            wrong = owned ^ set(expected.get(node, ()))
            if wrong:
                rule = "RB-36" if self.scenario.placement else "RB-2"
                rule = "RB-29" if wrong & problem.pinned.keys() else rule
                rule = "RB-30" if node not in problem.nodes else rule
                label = node.partition(".")[0]
                return f"{rule}: {label} accesses {listed(owned)}, not {listed(expected.get(node, ()))}"
        barriers = self.oracle.barriers.keys()
        held = set().union(*owners.values()) if owners else set()
        if barriers != held:
            return f"RB-14: barriers of {listed(barriers ^ held)} belong to nobody who started"
        return None

    def _lasting_policy(self) -> Policy:
        """The policy without limits that only put moves off.

        A limit of no moves forbids each move for ever, and a limit of one each exchange.
        """
        policy = self.operations.policy
        forbids = policy.max_moves is not None and policy.max_moves < _MOVES_OF_A_STEP
        return policy if forbids else replace(policy, max_moves=None)

    def improves_within_s(self) -> float:
        """Seconds within which moves for a better balance are over, however the policy spaces them."""
        policy, timings = self.operations.policy, self.scenario.timings
        spaced_s = policy.move_interval_s + policy.cooldown_s
        if not policy.max_moves and not spaced_s:
            return 0.0
        rebalance_s = spaced_s + timings.min_rebalance_interval_s + timings.stop_timeout_s
        return 2 * len(self.resources) * rebalance_s / (policy.max_moves or 1)

    def _pinned(self, active: Collection[Process]) -> dict[Resource, NodeId]:
        """The process that each pinned resource may be on: the first by its id that has not released it."""
        pinned = {}
        for spec in self.resources.values():
            alike = [process for process in active if process.host.plan.label == spec.pin]
            willing = [process for process in alike if spec.resource not in process.duties.released_now()]
            if spec.pin is not None:
                first = min(willing or alike, key=_node_id, default=None)
                pinned[spec.resource] = _node_id(first) if first is not None else ""
        return pinned

    def _releasers(self, active: Collection[Process]) -> dict[Resource, frozenset[NodeId]]:
        """The processes that have released each resource, where any has."""
        releasers: dict[Resource, set[NodeId]] = {}
        for process in active:
            for resource in process.duties.released_now():
                releasers.setdefault(resource, set()).add(_node_id(process))
        return {resource: frozenset(nodes) for resource, nodes in releasers.items()}

    def _unacknowledged(self) -> str | None:
        header = self.oracle.header
        if header is None:
            return "there is no allocation"
        for node, version in self.oracle.allocation.items():
            if self.acknowledged(node) != version:
                return f"{node} has not acknowledged version {version}"
        if self.completed_version != header.version:
            return f"the leader has not seen that version {header.version} is complete"
        return None

    def heal(self) -> None:
        """End every fault; start something on hosts where nothing can go on by itself."""
        self.reacts = None
        self.store.late_until = 0.0
        for operator in self.operators:
            operator.link.clear()
        for host in self.hosts:
            host.handler_faults.clear()
            host.pause_at_entry_s = 0.0
            self.join(host)
            host.link.clear()
            if host.clock.rate != 1.0:
                self._run_clock(host, 1.0)
            if host.running is not None and host.running.hung:
                self.crash(host)
            if host.running is not None:
                self.resume(host.running)
        if self.trace:
            self.say("world", "everything is healed")


def _node_id(process: Judged) -> NodeId:
    return process.node.session.node if process.node.session is not None else ""


def _fact_sentence(fact: Fact) -> str:
    named = {"resource": fact.resource, "token": fact.token, "revision": fact.revision, **fact.detail}
    about = ", ".join(f"{name} {text(value)}" for name, value in named.items() if value is not None)
    return f"{fact.kind.value.replace('_', ' ')}{': ' if about else ''}{about} ({fact.node})"
