"""The simulated world: hosts, a broker, the group of leaders, and clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import TypeAlias

from rebalanser.core.shiva.changes import DocumentChain
from rebalanser.core.shiva.leader import Leader
from rebalanser.core.shiva.messages import Fact, FactKind
from rebalanser.core.shiva.records import AssignmentDocument, DocumentChange
from rebalanser.core.shiva.safeguards import Safeguards
from rebalanser.core.shiva.types import ApplicationId, CommandId, Epoch, Mode
from rebalanser.core.shiva.worker import Worker
from simulation.kernel.scheduler import Scheduler
from simulation.kernel.trace import Trace
from simulation.shiva.clients import Clients
from simulation.shiva.events import size_bytes
from simulation.shiva.faults import Fault
from simulation.shiva.group import LeaderGroup
from simulation.shiva.host import Machine
from simulation.shiva.leading import LeaderProcess
from simulation.shiva.log import Broker, Record, Write
from simulation.shiva.oracle import Oracle
from simulation.shiva.process import Process
from simulation.shiva.running import ApplicationProcess, Behaviour
from simulation.shiva.scenario import DRIFT_RATIO, Scenario
from simulation.shiva.working import WorkerProcess

Host: TypeAlias = Machine[LeaderProcess, WorkerProcess, ApplicationProcess]
"""A machine with a leader, a worker or both."""
OnFact: TypeAlias = Callable[[str, Fact], None]
_CLEANS_EVERY_S = 1.0


class World:
    """Everything of one run. What is done to it by name can be done by a script or by chance."""

    leader_class: type[Leader] = Leader
    worker_class: type[Worker] = Worker
    guards_class: type[Safeguards] = Safeguards
    kills_at_deadline = True
    """Whether the supervisor beside each worker keeps to deadlines; a test of the tests says no."""

    def __init__(
        self, scenario: Scenario, random: Random, trace: Trace, on_fact: OnFact | None = None
    ) -> None:
        self.scenario = scenario
        self.random = random
        self.trace = trace
        self._on_fact = on_fact
        self.scheduler = Scheduler()
        self.hits: Counter[Fault] = Counter()
        self.facts: Counter[FactKind] = Counter()
        options = scenario.options
        self.broker = Broker(int(options.retention_s * 1000), options.retention_bytes, random)
        self.group = LeaderGroup[LeaderProcess](self.scheduler, random, scenario.session_s)
        self.behaviours: dict[CommandId, Behaviour] = {}
        self.oracle = Oracle(self)
        self.clients = Clients(self)
        self.hosts = [Host(self, plan, 1000.0 * (n + 1)) for n, plan in enumerate(scenario.hosts)]
        self.kept = 0
        self.cleans_often = False
        self.faulty_applications = False
        """Whether processes or files may fail although their archives are good."""
        self._forges_next = False
        self.loses_next_change = False
        """Whether no worker gets to see the next change of a document."""
        self.reacts: Callable[[Process, Fact], None] | None = None
        self._led_since: float | None = None
        self.after(_CLEANS_EVERY_S, self._clean)

    @property
    def now(self) -> float:
        """True time in seconds."""
        return self.scheduler.now

    @property
    def deadline_s(self) -> float:
        """For how long a pong that was heard lets a worker run what is exclusive."""
        return self.scenario.options.permission_s

    @property
    def workers(self) -> Iterator[WorkerProcess]:
        """The workers that live."""
        return (host.worker for host in self.hosts if host.worker is not None and host.worker.alive)

    @property
    def leader(self) -> LeaderProcess | None:
        """Who leads, as the group has it."""
        holder = self.group.holder
        return holder if holder is not None and holder.leads else None

    def host(self, name: str) -> Host:
        """The host of a name."""
        return next(host for host in self.hosts if host.plan.name == name)

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        self.scheduler.run_until(self.now + seconds)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something after true ``seconds``."""
        self.scheduler.at(self.now + seconds, action)

    def latency(self) -> float:
        """How long a message takes, in seconds."""
        return 0.001 + 0.009 * self.random.random()

    def say(self, where: str, sentence: str) -> None:
        """Tell the trace."""
        self.trace.line(self.now, where, sentence)

    def hit(self, kind: Fault, sentence: str) -> None:
        """A fault took effect."""
        self.hits[kind] += 1
        if self.trace:
            self.say("fault", sentence)

    def report(self, process: Process, fact: Fact) -> None:
        """A machine tells what happened to it."""
        self.facts[fact.kind] += 1
        if self._on_fact is not None:
            self._on_fact(process.name, fact)
        if self.trace:
            about = f" {fact.application}" if fact.application else ""
            detail = ", ".join(f"{name}={value}" for name, value in sorted(fact.detail.items()))
            self.say(
                process.name, f"{fact.kind.value.replace('_', ' ')}{about} {fact.worker} {detail}".rstrip()
            )
        if self.reacts is not None:
            self.reacts(process, fact)

    def make_leader(self, name: str) -> Leader:
        """The machine of a new term."""
        return self.leader_class(name, self.scenario.options, self.guards_class())

    def make_worker(self, process: WorkerProcess) -> Worker:
        """The machine of a new incarnation."""
        plan = process.host.plan
        options = self.scenario.worker_options(plan, process.incarnation.number)
        return self.worker_class(process.id, process.incarnation, plan.name, options)

    def group_allows(self, generation: int | None) -> bool:
        """Whether offsets may be committed with a transaction in this generation."""
        return generation is not None and self.group.is_current(generation)

    def status(self) -> AssignmentDocument | None:
        """What a reader of ASSIGNEMENT, and of nothing else, takes for the state of the cluster."""
        return self.last_document().document

    def last_document(self) -> DocumentChain:
        """What all of ASSIGNEMENT says, put together."""
        chain = DocumentChain()
        for record in self.broker.assignement.read(0)[0]:
            if isinstance(record.value, AssignmentDocument | DocumentChange):
                chain.read(record.value)
        return chain

    def start(self, host: Host) -> None:
        """Start what is to run on a host; a worker waits for its folder's lock."""
        if host.up:
            return
        if host.processes:
            host.waits_for_lock = True
            return
        host.waits_for_lock = host.paused = host.stopping = False
        if self.trace:
            self.say(host.plan.name, "starts")
        if host.plan.leads:
            host.leader = LeaderProcess(self, host)
            host.leader.begin()
        if host.plan.worker is not None:
            host.worker = WorkerProcess(self, host)
            host.worker.begin()
        self._reached(host)

    def lock_released(self, host: Host) -> None:
        """The last process of an incarnation has ended: the folder can be opened again."""
        if host.waits_for_lock and not host.processes:
            host.waits_for_lock = False
            self.start(host)

    def crash(self, host: Host) -> None:
        """Kill what runs on a host."""
        if self.trace:
            self.say(host.plan.name, "dies")
        host.waits_for_lock = host.paused = False
        for process in list(host.roles):
            process.end()
            if isinstance(process, LeaderProcess):
                self.group.died(process)
        if not host.cut:
            host.disturbed.end(self.now)

    def exited(self, process: Process) -> None:
        """A process has stopped gracefully."""
        if self.trace:
            process.say("exits")
        process.end()
        if process is process.host.worker and process.host.stopping:
            self._stop_leader(process.host)

    def stop(self, host: Host) -> None:
        """Ask what runs on a host to stop: a daemon's worker first, its leader once that has left."""
        host.stopping = True
        worker = host.worker
        if worker is not None and worker.alive:
            worker.do("stop", worker.ask_stop)
        else:
            self._stop_leader(host)

    def _stop_leader(self, host: Host) -> None:
        leader = host.leader
        if leader is not None and leader.alive:
            leader.do("stop", leader.ask_stop)

    def pause(self, host: Host, seconds: float, kind: Fault) -> None:
        """Stop the processes of a host for a while (SIGSTOP), its applications excepted."""
        if host.paused or not any(True for _ in host.roles):
            return
        self.hit(kind, f"{host.plan.name}: is stopped for {seconds:.3f} s")
        host.paused = True
        self._lost(host)
        paused = list(host.roles)

        def resume() -> None:
            if any(process.alive for process in paused):
                self.resume(host)

        self.after(seconds, resume)

    def resume(self, host: Host) -> None:
        """Let stopped processes go on."""
        if not host.paused:
            return
        host.paused = False
        self._reached(host)
        if self.trace:
            self.say(host.plan.name, "goes on")
        for process in list(host.roles):
            process.go_on()

    def cut(self, host: Host, seconds: float) -> None:
        """Cut a host off from the broker for a while."""
        if host.cut:
            return
        self.hit(Fault.CUT, f"{host.plan.name}: is cut off for {seconds:.3f} s")
        host.cut = True
        self._lost(host)
        self.after(seconds, lambda: self.join(host))

    def join(self, host: Host) -> None:
        """Connect a host with the broker again."""
        if not host.cut:
            return
        host.cut = False
        self._reached(host)
        if self.trace:
            self.say(host.plan.name, "is connected again")
        for process in list(host.roles):
            process.reconnected()

    def _lost(self, host: Host) -> None:
        host.disturbed.begin(self.now)
        leader = host.leader
        if leader is not None and leader.alive and leader.unreachable_since is None:
            leader.unreachable_since = self.now
            self.group.watch(leader)

    def _reached(self, host: Host) -> None:
        if not host.paused and not host.cut:
            host.disturbed.end(self.now)
            if host.leader is not None:
                host.leader.unreachable_since = None

    def take_broker_down(self, seconds: float) -> None:
        """Stop the broker for a while: sessions begin anew, open transactions are kept."""
        if self.broker.down:
            return
        self.hit(Fault.BROKER_DOWN, f"the broker is down for {seconds:.3f} s")
        self.broker.down = True
        for host in self.hosts:
            host.disturbed.begin(self.now)
        self.after(seconds, self.bring_broker_up)

    def bring_broker_up(self) -> None:
        """Start the broker again."""
        if not self.broker.down:
            return
        self.broker.down = False
        for host in self.hosts:
            if not host.paused and not host.cut:
                host.disturbed.end(self.now)
            for process in list(host.roles):
                process.reconnected()

    def lag(self, host: Host, topic: str, lag_s: float, seconds: float) -> None:
        """Let a host read one topic slowly for a while."""
        self.hit(Fault.LAG, f"{host.plan.name}: reads {topic} {lag_s:.3f} s late for {seconds:.3f} s")
        host.lag_s[topic] = lag_s

        def end() -> None:
            host.lag_s.pop(topic, None)

        self.after(seconds, end)

    def drift(self, host: Host, rate: float, kind: Fault) -> None:
        """Let a host's clock run at another rate."""
        self.hit(kind, f"{host.plan.name}: clock runs at {rate:.4f}")
        self.run_clock(host, rate)

    def run_clock(self, host: Host, rate: float) -> None:
        """Let a host's clock run at a rate."""
        host.off_clock.end(self.now)
        if abs(rate - 1) > DRIFT_RATIO / 2:
            host.off_clock.begin(self.now)
        host.clock.run_at(rate, self.now)
        for process in host.roles:
            process.clock_changed()
        for running in host.processes:
            running.clock_changed()

    def forge(self) -> None:
        """Let a deposed leader's document come onto COMMAND as if no broker had fenced it (SH-7).

        Where the present leader has published one already, it comes once the next leader announces itself.
        """
        document = self.status()
        self._forges_next = document is None or document.epoch.term >= self._announced()
        if document is None or self._forges_next:
            return
        forged = Epoch(document.epoch.term, document.epoch.number + 100 + len(self.oracle.forged))
        self.oracle.forged.add(forged)
        entries = {
            application: replace(entry, worker=self.random.choice(sorted(document.workers)), leaving=None)
            for application, entry in document.applications.items()
            if document.workers
        }
        late = replace(document, epoch=forged, applications=entries)
        self.hit(Fault.ZOMBIE_DOCUMENT, f"document {forged} of a deposed leader")
        self.broker.append(self.now, Write(self.broker.command, "assignement", late, size_bytes(late)))

    def leader_announced(self) -> None:
        """A leader has announced itself on COMMAND and has published nothing yet."""
        if self._forges_next:
            self.forge()

    def _drop_forged(self) -> None:
        """What no broker would have taken shall not outlast the announcement that overrules it."""
        forged, topic = self.oracle.forged, self.broker.command
        kept = [r for r in topic.records if getattr(r.value, "epoch", None) not in forged]
        if len(kept) < len(topic.records):
            topic.drop(kept)

    def _announced(self) -> int:
        record = self.broker.command.last("leader")
        return record.offset if record is not None else -1

    def _clean(self) -> None:
        self.after(_CLEANS_EVERY_S, self._clean)
        if self.leader is None:
            self._led_since = None
        elif self._led_since is None:
            self._led_since = self.now
        self.broker.abort_open(self.now - self.scenario.transaction_timeout_s)
        if self._led_since is None or self.now - self._led_since < 2 * self.scenario.options.round_s:
            return
        gone = self.broker.retain(self.now)
        if gone:
            self._drop_forged()
            self.hits[Fault.RETENTION] += gone
            if self.trace:
                self.say("broker", f"retention drops {gone} records")

    def lose_change(self, records: Sequence[Record]) -> None:
        """Drop a document or change that was just written to COMMAND, if one is to be lost."""
        command = self.broker.command
        documents = (AssignmentDocument, DocumentChange)
        lost = {record.offset for record in records if isinstance(record.value, documents)}
        kept = [record for record in command.records if record.offset not in lost]
        if self.loses_next_change and len(kept) < len(command.records):
            self.loses_next_change = False
            self.hit(Fault.CHANGE_LOST, f"a document or change at {min(lost)} is lost")
            command.drop(kept)

    def compact(self) -> None:
        """Let the cleaner compact all topics."""
        self._drop_forged()
        gone = self.broker.compact()
        self.hit(Fault.COMPACTION, f"compaction drops {gone} records")

    def heal(self) -> None:
        """End all faults."""
        self.say("world", "everything is healed")
        self.reacts = None
        self.bring_broker_up()
        self.clients.fails_next = self.clients.doubles_next = self._forges_next = False
        self.loses_next_change = False
        for host in self.hosts:
            host.armed.clear()
            host.lag_s.clear()
            self.run_clock(host, 1.0)
            self.resume(host)
            self.join(host)
            for process in host.roles:
                for feed in process.feeds:
                    feed.hurry()

    def application(self, number: int) -> ApplicationId:
        """One of a few applications."""
        return ApplicationId("t", "c", f"a{number}")

    def mode(self) -> Mode:
        """A mode as chance will have it."""
        return Mode.EXCLUSIVE if self.random.random() < self.scenario.exclusive else Mode.AVAILABLE
