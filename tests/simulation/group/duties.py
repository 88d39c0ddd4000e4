"""Checks of a process's decisions against the events that it received.

The ``oracle`` sees what reaches the registry and the application. Some rules say *when* or *why* a node
does something: it stops only what leaves it, waits before it joins again, sends heartbeats while a handler
runs. For those ``Duties`` follows the events that a process is given and the effects that come of them.
It never asks the node what it believes, and shares no code with it.

``Promptness`` judges what must happen soon: by a watch, not by a heartbeat. Only where nothing is slow
can "soon" be told from "late", so a scenario says whether it applies (``prompt_within_s``).
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from typing import TYPE_CHECKING, Protocol

from rebalanser.core.group.leading import RESIGN_AFTER
from rebalanser.core.group.messages import (
    Accept,
    Acknowledge,
    Acknowledged,
    AddBarriers,
    Alive,
    Answered,
    AskStop,
    BarriersAdded,
    CallStart,
    CallStop,
    Campaign,
    Command,
    Conflict,
    Effect,
    Elected,
    Event,
    FactKind,
    Failed,
    GroupRead,
    Guard,
    Handler,
    HandlerReturned,
    Heartbeat,
    Join,
    Joined,
    Lane,
    Left,
    Noticed,
    Outcome,
    Perform,
    PlanMade,
    Publish,
    Published,
    ReadGroup,
    RecordReleases,
    Release,
    Report,
    Resign,
    Resigned,
    SessionLost,
    ShareRead,
    Stop,
)
from rebalanser.core.group.types import Mode, TopicKind
from simulation.group.labels import LabelChecks, LabelWorld
from simulation.group.oracle import Judged
from simulation.group.placing import PlacingWorld, PlanChecks
from simulation.kernel.reports import Violation

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from rebalanser.core.group.types import (
        Group,
        Leadership,
        Member,
        NodeId,
        Plan,
        Resource,
        Session,
        Share,
        Token,
    )
    from simulation.group.oracle import Oracle
    from simulation.group.scenario import Scenario
    from simulation.kernel.scheduler import Scheduler

_EPSILON_S = 1e-4
_NEVER = float("-inf")


class Dutiful(Judged, Protocol):
    """A process that has duties."""

    tokens: dict[Resource, Token]
    duties: Duties

    @property
    def world(self) -> DutyWorld:
        """Its world."""
        ...


class DutyWorld(PlacingWorld, LabelWorld, Protocol):
    """The world of a process that has duties."""

    scenario: Scenario
    scheduler: Scheduler
    oracle: Oracle

    @property
    def promptness(self) -> Promptness | None:
        """Checks of reaction times, if nothing is slow."""
        ...


class PromptWorld(DutyWorld, Protocol):
    """A world in which nothing is slow."""

    @property
    def running(self) -> Iterator[Dutiful]:
        """The processes that live and have not finished."""
        ...


class Duties:
    """Obligations of one process. All times are seconds of its own clock."""

    def __init__(self, process: Dutiful) -> None:
        self._process = process
        self._timings = process.world.scenario.timings
        self._session: Session | None = None
        self._last_session: Session | None = None
        self._stop_asked = False
        self._leaving = False
        self._failed_since_stop = False
        self._proven_at = 0.0
        self._beat_sent_at = 0.0
        self._beat_before = 0.0
        self._beat_due = 0.0
        self._beating = False
        self._missed = False
        self._running: Handler | None = None
        self._called: Handler | None = None
        self._ran_since = 0.0
        self._returned_at = _NEVER
        self._reported = False
        """True if the latest call is known to have overrun its limit."""
        self._killed_for_overrun = False
        self._stuck = False
        """True if OnStop raised: what it should have stopped may go on as long as the process does."""
        self._failures = 0
        self._failed_at = _NEVER
        self._answered_at = _NEVER
        """When the latest command was answered that Join would have to wait for."""
        self._ended_at = _NEVER
        """When its latest session ended."""
        self._share: Share | None = None
        self._asked: set[Resource] = set()
        self._stopping: frozenset[Resource] = frozenset()
        self._started: dict[Resource, int] = {}
        """Started resources, with the version of the share that started them."""
        self._starting: Mapping[Resource, int] = {}
        self.released: dict[Resource, float] = {}
        """What the application gave up, and until when."""
        self._registered: Member | None = None
        self._releases_changed_at = _NEVER
        self.blocked: set[Resource] = set()
        """Resources reported as held by another node."""
        self.history_lost_at = _NEVER
        """True time (seconds) of the last lost history that a watch reported."""
        self._group: Group | None = None
        self._read_revision = self._acknowledgements_read = 0
        self._published_at = _NEVER
        self.published_version = 0
        """The latest allocation that it knows to have published, with all that this deletes."""
        self._changed_at: float | None = None
        """When a change, or what may have to be read besides, was told first since the last reading."""
        self._changed_revision = 0.0
        """Revision of the latest change that was told since the last reading: all of them have to settle. A
        leader may read for a better balance if it has read this one."""
        self._tries = 0
        self._term = 0
        self._resigned: Leadership | None = None
        """The term that it resigned from, while it knows of no other."""
        self._resigned_at = _NEVER
        self.plans = PlanChecks(process)
        self._labels = LabelChecks(process)

    @property
    def _now(self) -> float:
        return self._process.now

    @property
    def group_revision(self) -> int:
        """The revision at which it read the group last."""
        return self._read_revision

    @property
    def leaving(self) -> bool:
        """True if it is leaving the group, or not in it."""
        return self._leaving or self._session is None

    @property
    def _giving_up(self) -> bool:
        """True if it must stop everything."""
        return self.leaving or self._out_of_touch

    @property
    def _out_of_touch(self) -> bool:
        return self._now >= self._proven_at + self._timings.detect_s - _EPSILON_S

    def hears(self, event: Event) -> None:
        """Note what the process is told, before it acts on it."""
        match event:
            case Stop():
                self._stop_asked = self._leaving = True
            case Answered():
                self._answered(event.command, event.outcome)
            case HandlerReturned():
                self._returned(event)
            case Noticed():
                self._noticed(event)
            case PlanMade(plan=None):
                self._tries = 0
            case Release(resource=resource, token=token, for_s=for_s):
                called = self._starting if self._running is Handler.START else {}
                if token in (self._process.tokens.get(resource), called.get(resource)):
                    until = math.inf if for_s is None else self._now + for_s
                    self.released[resource] = max(until, self.released.get(resource, _NEVER))
                    self._releases_changed()
            case Accept(resource=resource):
                self.released.pop(resource, None)
                self._releases_changed()
            case _:
                pass

    def _noticed(self, event: Noticed) -> None:
        if event.topic.kind is TopicKind.GROUP:
            self._may_have_changed(event.revision)
        elif event.topic.kind is TopicKind.ACKNOWLEDGEMENTS:
            self._may_read()
        elif event.topic.kind is TopicKind.LEADERSHIP:
            self._learns_of_term(event.revision)

    def _releases_changed(self) -> None:
        self._releases_changed_at = self._now
        promptness = self._process.world.promptness
        if promptness is not None:
            promptness.releases_changed(self._process)

    @property
    def released_since(self) -> float:
        """When its releases changed last, or it became a member."""
        ended = (until for until in self.released.values() if until <= self._now)
        return max(self._releases_changed_at, *ended, _NEVER)

    def released_now(self) -> frozenset[Resource]:
        """The resources that the process has released and not accepted."""
        return frozenset(resource for resource, until in self.released.items() if until > self._now)

    def _check_record(self, member: Member) -> None:
        """A node's record names what its application gave up, for as long as that and no longer."""
        if member.released != self.released_now():
            raise Violation(
                "RB-2",
                f"{self._label} says that it has released {sorted(member.released)}, not "
                f"{sorted(self.released_now())}",
            )

    def _check_registered(self, member: Member) -> None:
        """What one incarnation registers as is the same each time that it tries."""
        before, self._registered = self._registered, member
        if before is None or before.node != member.node:
            self._check_record(member)
        elif before != member:
            raise Violation("RB-4", f"{self._label} registers as {before}, then as {member}")

    def _answered(self, command: Command, outcome: Outcome) -> None:
        if command.lane is Lane.MEMBER:
            self._answered_at = self._now
        if isinstance(command, Heartbeat):
            self._beating = False
        if isinstance(outcome, Failed):
            self._failed_since_stop = self._failed_since_stop or self._stop_asked
        if isinstance(command, Join):
            self._join_answered(outcome)
        elif command.session == self._session:
            self._told(command, outcome)

    def _join_answered(self, outcome: Outcome) -> None:
        if not isinstance(outcome, Joined):
            self._fail()
            return
        self._session = self._last_session = outcome.session
        self._releases_changed_at = self._now
        self._leaving = self._stop_asked
        self._proven_at = outcome.proven_at
        self._beat_due = outcome.proven_at + self._timings.heartbeat_interval_s
        self._missed = False
        self._share = None
        self._started.clear()
        self._begin_term()

    def _begin_term(self) -> None:
        self._group = None
        self._published_at, self._changed_at = _NEVER, None
        self._changed_revision = 0.0
        self.published_version = 0
        self._tries = 0

    def _end_session(self) -> None:
        self._session, self._ended_at = None, self._now
        self._resigned = None
        self.blocked.clear()

    def _learns_of_term(self, revision: int) -> None:
        if self._resigned is not None and revision > self._resigned.revision:
            self._resigned = None

    def _fail(self) -> None:
        self._failures += 1
        self._failed_at = self._now

    def _told(self, command: Command, outcome: Outcome) -> None:
        match outcome:
            case SessionLost() | Left():
                self._end_session()
            case Alive():
                self._learns_of_term(outcome.leadership_revision)
                self._proven_at = max(self._proven_at, self._beat_sent_at)
                self._missed = False
                self._seen(outcome)
            case ShareRead(share=share) if share is not None:
                if self._share is None or share.version > self._share.version:
                    self._share = share
                self.blocked &= share.resources
            case BarriersAdded():
                self.blocked -= outcome.added.keys()
                self.blocked |= outcome.blocked.keys()
            case Acknowledged(version=version) if isinstance(command, Acknowledge):
                if version == command.version:
                    self._failures = 0
            case Failed() if isinstance(command, Heartbeat):
                self._missed = True
                # Without effect it renewed nothing, as if it had not been sent.
                self._beat_sent_at = self._beat_sent_at if outcome.unknown else self._beat_before
            case _:
                self._told_as_leader(command, outcome)

    def _seen(self, alive: Alive) -> None:
        """Compare the fingerprint in a heartbeat with the group that was read."""
        seen = alive.fingerprint
        if seen is None:
            return
        if self._group is not None and seen != self._group.fingerprint:
            self._may_have_changed(alive.revision)
        elif alive.revision > self.group_revision or seen.acknowledgements[1] > self._acknowledgements_read:
            self._may_read()

    def _told_as_leader(self, command: Command, outcome: Outcome) -> None:
        match outcome:
            case Elected(leadership=leadership):
                if leadership.term == self._term:
                    raise Violation("RB-28", f"{self._label} gave up term {self._term}, which it still led")
                self._term = leadership.term
                self.plans.elected()
                self._labels.elected()
                self._begin_term()
            case Resigned(leadership=leadership):
                self._resigned, self._resigned_at = leadership, self._now
            case GroupRead(group=group):
                self._group = group
                self.plans.read(group)
                self._labels.read(group)
                self._read_revision = group.revision
                if isinstance(command, ReadGroup) and (
                    command.known is None or command.reread_acknowledgements
                ):
                    self._acknowledgements_read = group.revision
            case Published():
                self._tries = 0
                self._published_at = self._now
                self.published_version = outcome.header.version
            case Failed() | Conflict() if isinstance(command, ReadGroup | Publish):
                self._tries += 1
                self._may_have_changed(math.inf)
            case _:
                pass

    def _may_have_changed(self, revision: float) -> None:
        self._changed_revision = max(self._changed_revision, revision)
        self._may_read()

    def _may_read(self) -> None:
        """Note that the group may be read, once this has settled; not for acknowledgements alone."""
        if self._changed_at is None:
            self._changed_at = self._now

    def _returned(self, event: HandlerReturned) -> None:
        self._running, self._returned_at = None, self._now
        if event.refused:
            self._ended(self._starting)
        elif event.handler is Handler.STOP and event.error is None:
            self._ended(self._stopping)
        if event.error is not None:
            self._stuck = self._stuck or event.handler is Handler.STOP
            self._leaving = True
            self._fail()

    def _ended(self, resources: Iterable[Resource]) -> None:
        for resource in resources:
            self._started.pop(resource, None)
            self._asked.discard(resource)

    def decides(self, effects: Sequence[Effect]) -> None:
        """Judge what the process is about to do."""
        self._check_reported(effects)
        for effect in effects:
            match effect:
                case Perform(command=command):
                    self._performs(command)
                case CallStart(owned=owned):
                    self._calls_start(owned)
                case CallStop(resources=resources):
                    self._check_reason(resources)
                    self._calls(Handler.STOP)
                    self._stopping = resources
                case AskStop(resources=resources):
                    self._check_reason(resources)
                    self._asked |= resources
                case Report(fact=fact) if fact.kind is FactKind.LEFT and self._session is not None:
                    self._check_lapsed()
                    self._end_session()
                case Guard(deadline=deadline) if deadline is not None and deadline <= self._now:
                    self._check_overran()
                    self._killed_for_overrun = True
                case _:
                    pass
        self._check_heartbeat()

    def _check_reported(self, effects: Sequence[Effect]) -> None:
        """An OnStop that outlasts the time in which access must end is reported while it runs."""
        if any(isinstance(e, Report) and e.fact.kind is FactKind.HANDLER_OVERRAN for e in effects):
            self._reported = True
        # The renewal was sent at the end of the turn that decided on it.
        ends_at = self._proven_at + self._process.world.scenario.turn_s + self._timings.access_s
        runs = self._running is not None or self._returned_at == self._now
        if self._session is None or self._called is not Handler.STOP or self._reported or not runs:
            return
        if self._ran_since < ends_at < self._now - _EPSILON_S:
            raise Violation("RB-25", f"{self._label} does not report that OnStop outlasts its access")

    def _calls(self, handler: Handler) -> None:
        self._reported = False
        self._running = self._called = handler
        self._ran_since = self._now

    def _calls_start(self, owned: Mapping[Resource, int]) -> None:
        version = self._share.version if self._share is not None else 0
        plan = self._process.plan
        if plan.mode is Mode.EAGER:
            old = sorted(r for r, since in self._started.items() if since != version)
            if old:
                raise Violation("RB-17", f"{self._label} starts in eager mode and goes on with {old}")
        missing = self._share.resources - self._started.keys() - owned.keys() if self._share else frozenset()
        if plan.mode is Mode.COOPERATIVE:
            missing -= self.released_now()
            if released := self.released_now() & owned.keys():
                raise Violation("RB-2", f"{self._label} starts what it has released: {sorted(released)}")
        if missing and (plan.mode is Mode.EAGER or not plan.start_in_batches):
            raise Violation("RB-17", f"{self._label} starts a part of its share, without {sorted(missing)}")
        self._calls(Handler.START)
        self._starting = owned
        self._started.update(dict.fromkeys(owned, version))

    def _check_reason(self, resources: Collection[Resource]) -> None:
        """OnStop is called only for what leaves, or was asked to stop; for all of it only in trouble."""
        if self._giving_up:
            return
        kept = {r for r in resources if r not in self._asked}
        if self._share is not None:
            kept &= self._share.resources
            if self._process.plan.mode is Mode.EAGER:
                kept = {r for r in kept if self._started.get(r) == self._share.version}
        if kept:
            when = " after a brief loss" if self._missed else ""
            raise Violation(
                "RB-21" if self._missed else "RB-17", f"{self._label} stops its own {sorted(kept)}{when}"
            )

    def _performs(self, command: Command) -> None:
        match command:
            case Join(member=member):
                self._check_delay()
                self._check_registered(member)
            case RecordReleases(member=member):
                self._check_record(member)
            case Heartbeat():
                self._beating = True
                self._beat_before, self._beat_sent_at = self._beat_sent_at, self._now
                self._beat_due = self._now + self._timings.heartbeat_interval_s
            case AddBarriers():
                self.blocked -= command.resources
            case ReadGroup():
                self._check_tries()
                self._check_pace()
                self._changed_at, self._changed_revision = None, 0.0
            case Publish(plan=plan):
                self._check_tries()
                self._check_moves(plan)
                self._check_eager(plan)
            case Resign():
                if self._tries < RESIGN_AFTER:
                    raise Violation("RB-43", f"{self._label} resigns after {self._tries} failures in a row")
            case Campaign():
                self._check_rest()
            case _:
                pass

    def _check_delay(self) -> None:
        """After a failure a node waits before it joins again, twice as long as after the one before."""
        timings = self._timings
        delay_s = min(timings.rejoin_initial_s * 2.0 ** (self._failures - 1), timings.rejoin_max_s)
        if not self._failures:
            delay_s = 0.0
        elif self._now < self._failed_at + delay_s - _EPSILON_S:
            raise Violation(
                "RB-24",
                f"{self._label} joins {self._now - self._failed_at:.3f} s after failure {self._failures}, "
                f"not {delay_s:.3f} s",
            )
        since = max(self._failed_at, self._ended_at, self._returned_at, self._answered_at)
        late_s = self._now - since - delay_s
        allowed_s = timings.retry_max_s + self._process.world.oracle.latency_s
        if since > _NEVER and late_s > allowed_s and not self._was_paused(since):
            raise Violation("RB-24", f"{self._label} joins {late_s:.3f} s later than it should")

    def _was_paused(self, since: float) -> bool:
        conduct = self._process.world.oracle.conduct(self._process)
        return conduct.paused.ever(self._process.clock.true(since))

    def _check_lapsed(self) -> None:
        """A session that is left to lapse has ended when it is left, unless the process stops for good."""
        if self._stop_asked:
            return
        lasts_s = max(self._proven_at, self._beat_sent_at) + self._timings.lease_ttl_s - self._now
        if lasts_s > _EPSILON_S:
            raise Violation(
                "RB-24", f"{self._label} treats its lease as ended up to {lasts_s:.3f} s too early"
            )

    def _check_rest(self) -> None:
        """A node that resigned waits for one lease before it campaigns, unless it knows of another leader."""
        if self._resigned is None:
            return
        rested_s = self._now - self._resigned_at
        if rested_s < self._timings.lease_ttl_s - _EPSILON_S:
            raise Violation("RB-43", f"{self._label} campaigns {rested_s:.3f} s after it resigned")

    def _check_heartbeat(self) -> None:
        """A member renews its lease on time, also while a handler runs and until it has left."""
        lets_it_end = self._session is None or self._stuck or (self._leaving and self._out_of_touch)
        if lets_it_end or self._beating or self._now <= self._beat_due + _EPSILON_S:
            return
        while_running = f" while {self._running} runs" if self._running else ""
        raise Violation(
            "RB-25" if self._running else "RB-21", f"{self._label} sends no heartbeat{while_running}"
        )

    def _check_tries(self) -> None:
        if self._tries >= RESIGN_AFTER:
            raise Violation("RB-43", f"{self._label} leads on after {self._tries} failures in a row")

    def _check_pace(self) -> None:
        """Changes are coalesced, and rebalances kept apart."""
        timings = self._timings
        if self._now < self._published_at + timings.min_rebalance_interval_s - _EPSILON_S:
            raise Violation("RB-8", f"{self._label} rebalances sooner than min_rebalance_interval_s")
        if self._group is None or self._changed_at is None:
            return
        if self._changed_revision <= self.group_revision:
            return
        if self._now < self._changed_at + timings.settle_time_s - _EPSILON_S:
            raise Violation("RB-8", f"{self._label} rebalances sooner than settle_time_s after a change")

    def _check_moves(self, plan: Plan) -> None:
        """A plan moves as few resources as balance allows, if counts decide."""
        group = self._group
        if group is None:
            raise Violation("RB-9", f"{self._label} publishes without having read the group")
        before = {node: share.resources for node, share in group.shares.items()}
        after = {node: plan.changed.get(node, before.get(node, frozenset())) for node in plan.shares}
        active = sorted(n for n, member in group.members.items() if member.label not in group.drained)
        owners = {resource: node for node in active for resource in after.get(node, ())}
        held = {resource: node for node in active for resource in before.get(node, ())}
        oracle = self._process.world.oracle
        for node, resources in after.items():
            if released := resources & oracle.released_at(node, self._read_revision):
                raise Violation(
                    "RB-2",
                    f"version {plan.version} gives {node} what it has released: {sorted(released)}",
                )
        if self._process.world.scenario.placement:
            self.plans.publishes(plan, group)
            return
        group, active, inherited = self._labels.publishes(plan, group)
        owners = {resource: node for node in active for resource in after.get(node, ())}
        held = {resource: node for node in active for resource in before.get(node, ())} | inherited
        if len({spec.weight for spec in group.resources.values()}) > 1:
            return
        if any(group.members[node].released for node in active):
            wrong = not_best(group, active, held, owners)
            if wrong is not None:
                raise Violation("RB-10", f"version {plan.version} of {self._label}: {wrong}")
            return
        moves = sum(owners.get(resource, node) != node for resource, node in held.items())
        least = least_moves(group, active, held, inherited)
        if moves != least:
            raise Violation(
                "RB-10", f"version {plan.version} of {self._label} moves {moves} resources, not {least}"
            )

    def _check_eager(self, plan: Plan) -> None:
        """A plan that changes anything is a new one for every node in eager mode."""
        group = self._group
        if group is None or not plan.changed:
            return
        eager = {node for node, member in group.members.items() if member.mode is Mode.EAGER}
        passed_over = sorted(eager - plan.changed.keys())
        if passed_over:
            raise Violation("RB-17", f"version {plan.version} lets {passed_over} go on in eager mode")

    def killed(self) -> None:
        """Judge its death: a switch kills only who is out of touch, or overran, or can't stop access."""
        if not self._out_of_time and not self._killed_for_overrun and not self._stuck:
            raise Violation("RB-34", f"{self._label} is killed although it is well")

    @property
    def _out_of_time(self) -> bool:
        return self._now >= self._proven_at + self._timings.access_s - _EPSILON_S

    def _check_overran(self) -> None:
        """A call that is said to have overrun its limit runs, or returns just now, and has overrun it."""
        timings, ran_s = self._timings, self._now - self._ran_since + _EPSILON_S
        if self._out_of_time:
            return
        limit_s = timings.stop_timeout_s
        if self._called is Handler.START:
            limit_s = min(limit_s, timings.start_timeout_s) if self._giving_up else timings.start_timeout_s
        runs = self._running is not None or self._returned_at == self._now
        if not runs or ran_s < limit_s:
            raise Violation("RB-34", f"{self._label} is killed after {ran_s:.3f} s of {self._called}")

    def finishes(self) -> None:
        """A process that stopped gracefully leaves nothing behind that others would have to wait for."""
        session, oracle = self._last_session, self._process.world.oracle
        failed = self._failed_since_stop or self._stuck
        if session is None or failed or self._now >= self._proven_at + self._timings.lease_ttl_s:
            return
        held = sorted(r for r, barrier in oracle.barriers.items() if barrier.node == session.node)
        if held or oracle.members.get(session.node) == session.created:
            raise Violation("RB-26", f"{self._label} has stopped and left {session.node} with {held} behind")

    @property
    def _label(self) -> str:
        return self._process.label


def least_moves(
    group: Group,
    active: Collection[NodeId],
    held: Mapping[Resource, NodeId],
    inherited: Mapping[Resource, NodeId],
) -> int:
    """The fewest resources that can leave an active node for another, counted one resource at a time.

    What is ``inherited`` is where it must be, and not a resource of the group.

    Each free resource is poured onto a node with the least load, and there onto one that has some of its own
    left to keep if there is such a node: so none that could be kept is counted as moved.
    """
    labels = {node: group.members[node].label for node in active}
    pins = {
        resource: min((node for node in active if labels[node] == spec.pin), default="")
        for resource, spec in group.resources.items()
        if spec.pin is not None
    }
    loads = {node: sum(pin == node for pin in pins.values()) for node in active}
    for node in inherited.values():
        loads[node] += 1
    own = dict.fromkeys(active, 0)
    forced = 0
    for resource, node in held.items():
        if resource in pins:
            forced += pins[resource] not in {"", node}
        elif resource in group.resources:
            own[node] += 1
    moved = sum(own.values())
    for _ in range(len(group.resources.keys() - pins.keys()) if active else 0):
        node = min(active, key=lambda each: (loads[each], -own[each]))
        loads[node] += 1
        if own[node]:
            own[node] -= 1
            moved -= 1
    return forced + moved


def not_best(
    group: Group, active: Sequence[NodeId], held: Mapping[Resource, NodeId], owners: Mapping[Resource, NodeId]
) -> str | None:
    """Why an allocation with releases is not as even as it could be with as few moves; None if it is.

    Resources that are handed on, one from each node of a chain to the next, lower the load of its first node
    and raise that of its last; in a ring they change none. An allocation is the best if no chain makes the
    loads more even, and neither a ring nor a chain that keeps them as even saves a move.
    """
    labels = {node: group.members[node].label for node in active}
    steps = dict.fromkeys(product(active, active), math.inf)
    for resource, spec in group.resources.items():
        open_to = [n for n in active if resource not in group.members[n].released]
        if spec.pin is not None:
            open_to = sorted(node for node in open_to if labels[node] == spec.pin)[:1]
        owner = owners.get(resource)
        if owner is None and not open_to:
            continue
        if owner is None or owner not in open_to:
            return f"{resource} is {owner}'s and may be on {open_to}"
        holder = held.get(resource)
        for node in open_to:
            saved = (holder in open_to and holder != owner) - (holder in open_to and holder != node)
            steps[owner, node] = min(steps[owner, node], -saved)
    for between, first, last in product(active, repeat=3):
        steps[first, last] = min(steps[first, last], steps[first, between] + steps[between, last])
    loads = Counter(owners.values())
    for (first, last), cost in steps.items():
        spared = loads[first] - loads[last]
        if first != last and cost < math.inf and spared > 1:
            return f"{first} has {spared} more than {last}"
        if cost < 0 and (first == last or spared == 1):
            return f"resources of {first} could stay where they were"
    return None


class Promptness:
    """Checks of reaction times, in a world where nothing is slow."""

    def __init__(self, world: PromptWorld, within_s: float) -> None:
        self._world = world
        self._within_s = within_s
        self._free_since: dict[Resource, float] = {}

    @property
    def _now(self) -> float:
        return self._world.scheduler.now

    def allocated(self) -> None:
        """An allocation is published."""
        for resource, (_, since) in self._world.oracle.given.items():
            if since == self._now:
                self._look_later(resource)

    def freed(self, resource: Resource) -> None:
        """A barrier is gone."""
        self._free_since[resource] = self._now
        self._look_later(resource)

    def _look_later(self, resource: Resource) -> None:
        self._world.scheduler.at(self._now + self._within_s, lambda: self._look(resource))

    def _look(self, resource: Resource) -> None:
        """Check that its owner soon takes a free resource: by a watch, not a heartbeat (RB-13, RB-28)."""
        oracle = self._world.oracle
        if resource in oracle.barriers or resource not in oracle.given:
            return
        node, given = oracle.given[resource]
        since = max(given, self._free_since.get(resource, 0.0))
        process = self._healthy(node)
        if process is None or self._now < since + self._within_s - _EPSILON_S:
            return
        waits = resource in process.duties.blocked
        raise Violation(
            self._rule(process, since, "RB-13" if waits else "RB-3"),
            f"{resource} is {node}'s and free, which does not take it within {self._within_s:g} s",
        )

    def releases_changed(self, process: Dutiful) -> None:
        """A process released something, or accepted it again: its record soon says so."""

        def look() -> None:
            session, duties = process.node.session, process.duties
            if session is None or self._healthy(session.node) is not process:
                return
            told, due = self._world.oracle.released_at(session.node), duties.released_now()
            if told != due and duties.released_since <= process.now - self._within_s + _EPSILON_S:
                raise Violation(
                    "RB-7", f"the record of {session.node} names {sorted(told)}, not {sorted(due)}"
                )

        ends = [process.clock.true(until) for until in process.duties.released.values() if until < math.inf]
        for at in (self._now, *(end for end in ends if end > self._now)):
            self._world.scheduler.at(at + self._within_s, look)

    def changed(self, revision: int) -> None:
        """A member, a resource or a drain changed."""
        oracle, timings = self._world.oracle, self._world.scenario.timings
        term, leader, since = oracle.term, oracle.leader, self._now

        def look() -> None:
            process = self._healthy(leader)
            if oracle.term != term or process is None or process.duties.group_revision >= revision:
                return
            raise Violation(
                self._rule(process, since, "RB-7"), f"{leader} does not read the group soon after a change"
            )

        held_back_s = timings.settle_time_s + timings.min_rebalance_interval_s
        self._world.scheduler.at(self._now + held_back_s + self._within_s, look)

    def _healthy(self, node: NodeId) -> Dutiful | None:
        process = next((each for each in self._world.running if each.is_incarnation(node)), None)
        if process is None or process.duties.leaving or node not in self._world.oracle.members:
            return None
        return process

    @staticmethod
    def _rule(process: Dutiful, since: float, otherwise: str) -> str:
        """RB-28 where a watch was lost that would have told of a change since then, or a little before."""
        return "RB-28" if process.duties.history_lost_at >= since - 0.1 else otherwise
