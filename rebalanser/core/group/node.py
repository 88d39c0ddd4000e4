"""The node: events in, effects out."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import assert_never
from zlib import crc32

from rebalanser.core.group.inflight import Inflight
from rebalanser.core.group.leading import Leading, Solve
from rebalanser.core.group.messages import (
    OUTCOMES,
    Accept,
    Acknowledge,
    Acknowledged,
    AddBarriers,
    Alive,
    Answered,
    AskStop,
    BarriersAdded,
    BarriersRead,
    BarriersRemoved,
    CallStart,
    CallStop,
    Campaign,
    Command,
    Conflict,
    Deposed,
    Effect,
    Elected,
    Event,
    Fact,
    FactKind,
    Failed,
    Finished,
    Follows,
    GroupRead,
    Guard,
    Handler,
    HandlerReturned,
    Heartbeat,
    Join,
    Joined,
    Lane,
    Leave,
    Left,
    MakePlan,
    Noticed,
    Outcome,
    Perform,
    PlanMade,
    Publish,
    Published,
    ReadBarriers,
    ReadGroup,
    ReadShare,
    RecordReleases,
    Release,
    ReleasesRecorded,
    RemoveBarriers,
    Report,
    Resign,
    Resigned,
    SessionLost,
    ShareRead,
    Start,
    Stop,
    Wakeup,
    Watch,
)
from rebalanser.core.group.rebalancing import Rebalancing, Releases
from rebalanser.core.group.states import MEMBERSHIP, Life, Membership, Role, Step
from rebalanser.core.group.types import (
    Header,
    Leadership,
    Member,
    NodeId,
    OnOverrun,
    Resource,
    Session,
    Timings,
    Token,
    Topic,
    TopicKind,
)
from rebalanser.errors import InternalError

_COMMIT = Topic(TopicKind.COMMIT)
_IN_SESSION = frozenset({Membership.MEMBER, Membership.LEAVING})
_RESTING = frozenset({Membership.BACKOFF, Membership.LAPSING})


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Options of a node, beside its timings."""

    start_in_batches: bool = True
    on_overrun: OnOverrun = OnOverrun.REPORT


class Node:
    """One node of a group, through all its incarnations.

    ``member`` describes the node to the group; its ``node`` is the prefix of the incarnations' ids and must
    be unique in the world. ``solve`` computes allocations while this node leads.
    """

    def __init__(
        self,
        member: Member,
        timings: Timings,
        solve: Solve,
        options: NodeOptions = NodeOptions(),
    ) -> None:
        self._stem = member.node
        self._member = member
        self._timings = timings
        self._detect_s = timings.detect_s
        self._options = options
        self._incarnation = 0
        self._membership = MEMBERSHIP.first
        self._stop_asked = False
        self._session: Session | None = None
        self._leave_sent = False
        self._proven_at = 0.0
        self._heartbeat_at = 0.0
        self._failed_heartbeats = 0
        self._renewal_sent_at = 0.0
        self._renewed_before = 0.0
        self._removal_sent_at = 0.0
        self._isolated = False
        self._failures = 0
        self._wait_until = 0.0
        self._handler_began = 0.0
        self._handler_limit_s = 0.0
        self._handler_ends = 0.0
        self._abandoned = False
        self._overran = False
        self._guard: float | None = None
        self._watched: frozenset[Topic] = frozenset()
        self._lanes = Inflight(timings.retry_initial_s, timings.retry_max_s)
        self._releases = Releases()
        self._rebalancing = Rebalancing(member.mode, options.start_in_batches, self._releases)
        self._record: Member | None = None
        """The record with which the present incarnation registers, in each of its attempts."""
        self._leading = Leading(member.may_lead, timings, solve)
        self._effects: list[Effect] = []
        self._next_wakeup: float | None = None

    @property
    def membership(self) -> Membership:
        """The stage of the node's life."""
        return self._membership

    @property
    def role(self) -> Role:
        """The node's role in its group."""
        return self._leading.role

    @property
    def leadership(self) -> Leadership | None:
        """The leadership, as far as this node knows."""
        return self._leading.leadership

    @property
    def session(self) -> Session | None:
        """The membership of the present incarnation."""
        return self._session

    @property
    def step(self) -> Step:
        """The step of a rebalance that the node is in."""
        return self._rebalancing.step

    @property
    def started(self) -> Mapping[Resource, Token]:
        """The resources that are accessed, from just before OnStart is entered to the return of OnStop."""
        return self._rebalancing.started

    @property
    def held(self) -> Mapping[Resource, Token]:
        """The barriers that the node holds, as far as it knows."""
        return self._rebalancing.held

    @property
    def blocked(self) -> Mapping[Resource, NodeId]:
        """Some of the resources that the node waits for, with their holders."""
        return self._rebalancing.blocked

    @property
    def released(self) -> frozenset[Resource]:
        """The resources that the application has released and not accepted again."""
        return self._releases.resources

    @property
    def header(self) -> Header | None:
        """The latest allocation that the node has read, or committed as a leader."""
        known = [header for header in (self._rebalancing.header, self._leading.header) if header is not None]
        return max(known, key=lambda header: header.version, default=None)

    @property
    def isolated(self) -> bool:
        """True if the last proof of life is so old that the node must stop access (RB-21)."""
        return self._isolated

    @property
    def settled(self) -> bool:
        """True if the node owns exactly its share, and its handlers have returned."""
        return (
            self._membership is Membership.MEMBER
            and not self._isolated
            and not self._rebalancing.must_read
            and self._rebalancing.completed
        )

    @property
    def deadline(self) -> float | None:
        """The time at which access must have ended unless life is proven again; None if nothing is owned."""
        return self._guard

    @property
    def next_wakeup(self) -> float | None:
        """The latest time for a ``Wakeup``, if no other event comes before."""
        return self._next_wakeup

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle one event at monotonic time ``now`` (seconds). Return the effects, in order.

        Raises:
            InternalError: an invariant is broken; the node must not be used any more.
        """
        self._effects = []
        self._watch_clock(now)
        match event:
            case Answered():
                self._answered(event.command, event.outcome, now)
            case Wakeup():
                pass
            case Noticed():
                self._noticed(event, now)
            case Start():
                self._move(Life.START)
            case Stop():
                self._stop()
            case HandlerReturned():
                self._handler_returned(event)
            case PlanMade():
                self._leading.plan_made(event, now)
            case Release():
                self._release(event, now)
            case Accept(resource):
                self._releases.accept(resource)
            case _:
                assert_never(event)
        self._watch_clock(now)
        self._advance(now)
        self._next_wakeup = self._earliest_wakeup(now)
        return self._effects

    @property
    def slow_turn_s(self) -> float:
        """Seconds above which handling one event is too slow: a tenth of the safety margin (RB-21)."""
        return self._timings.safety_margin_s / 10.0

    def make_plan(self, asked: MakePlan) -> PlanMade:
        """Compute a plan, for the caller to ``handle``; any thread may call this at any time."""
        return self._leading.make_plan(asked)

    def _report(
        self,
        kind: FactKind,
        *,
        revision: int | None = None,
        value: float | None = None,
        **detail: str | float | bool | None,
    ) -> None:
        self._effects.append(Report(self._fact(kind, revision, value, detail)))

    def _report_each(
        self,
        kind: FactKind,
        each: Collection[Resource],
        tokens: Mapping[Resource, Token],
        *,
        revisions: Mapping[Resource, int] | None = None,
        value: float | None = None,
        **detail: str | float | bool | None,
    ) -> None:
        """Report the same of each of these resources, if there are any."""
        if each:
            fact = self._fact(kind, None, value, detail)
            self._effects.append(Report(fact, each, tokens, revisions or {}))

    def _fact(
        self,
        kind: FactKind,
        revision: int | None,
        value: float | None,
        detail: Mapping[str, str | float | bool | None],
    ) -> Fact:
        header = self.header
        return Fact(
            kind=kind,
            node=self._session.node if self._session else self._node_id,
            term=self._leading.term,
            version=header.version if header else 0,
            revision=revision,
            value=value,
            detail=detail,
        )

    @property
    def _node_id(self) -> NodeId:
        return f"{self._stem}-{self._incarnation}"

    def _move(self, trigger: Life) -> None:
        self._membership = MEMBERSHIP.move(self._membership, trigger)

    def _stop(self) -> None:
        self._stop_asked = True
        if (self._membership, Life.STOP) not in MEMBERSHIP.rows:
            return
        self._move(Life.STOP)
        self._report(FactKind.LEAVING)
        if self._membership is Membership.STOPPED:
            self._finish()

    @property
    def _giving_up(self) -> bool:
        return self._isolated or self._membership is not Membership.MEMBER

    def _watch_clock(self, now: float) -> None:
        """Notice isolation, an overrun, and the end of a delay, which come with time alone."""
        in_session = self._membership in _IN_SESSION
        out_of_touch = in_session and now >= self._proven_at + self._detect_s
        if out_of_touch and not self._isolated:
            self._report(FactKind.ISOLATED, last_proof_s=round(now - self._proven_at, 3))
        elif self._isolated and in_session and not out_of_touch:
            self._report(FactKind.RECONNECTED)
        self._isolated = out_of_touch
        if self._membership is Membership.BACKOFF and now >= self._wait_until:
            self._move(Life.ELAPSED)
        self._releases.expire(now)
        self._watch_handler(now)

    def _watch_handler(self, now: float) -> None:
        running = self._rebalancing.running
        if running is None or self._overran or now < self._handler_ends:
            return
        self._overran = True
        self._report(FactKind.HANDLER_OVERRAN, handler=running.value, limit_s=round(self._handler_limit_s, 3))
        if self._options.on_overrun is OnOverrun.KILL:
            self._effects.append(Guard(now))

    def _answered(self, command: Command, outcome: Outcome, now: float) -> None:
        if type(outcome) not in OUTCOMES[type(command)]:
            raise InternalError(f"{outcome!r} does not answer {command!r}")
        self._lanes.answered(command)
        if isinstance(command, Join):
            self._join_answered(outcome, now)
            return
        if command.session != self._session:
            return
        match outcome:
            case Failed():
                self._failed(command, outcome, now)
            case SessionLost() if self._leave_sent:
                self._left(now)  # a command beside the Leave saw what that did
            case SessionLost():
                self._session_lost(now)
            case _:
                self._lanes.succeeded(command.lane)
                self._succeeded(command, outcome, now)

    def _join_answered(self, outcome: Outcome, now: float) -> None:
        match outcome:
            case Joined():
                self._lanes.succeeded(Lane.MEMBER)
                self._session = outcome.session
                self._proven_at = self._renewal_sent_at = outcome.proven_at
                self._heartbeat_at = outcome.proven_at + self._timings.heartbeat_interval_s
                self._move(Life.JOINED)
                self._rebalancing.stale_revision = outcome.session.created
                self._rebalancing.acknowledged_revision = outcome.session.created
                self._releases.revision = outcome.session.created
                grace_s = self._member.rejoin_grace_s
                detail = {"rejoin_grace_s": grace_s} if grace_s else {}
                self._report(FactKind.JOINED, revision=outcome.session.created, **detail)
            case Failed():
                self._report(FactKind.JOIN_FAILED, error=outcome.error, fatal=outcome.fatal)
                self._move(Life.JOIN_FAILED)
                self._failures += 1
                self._wait_until = now + self._rejoin_delay(self._failures)
                if self._membership is Membership.STOPPED:
                    self._finish()
            case _:
                raise InternalError(f"{outcome!r} answers no registration")

    def _beat_delay(self, failures: int) -> float:
        """Seconds until the next heartbeat after this many failed ones; nodes differ by up to a half."""
        timings = self._timings
        limit_s = min(timings.retry_max_s, timings.heartbeat_interval_s)
        delay_s = min(timings.retry_initial_s * 2.0 ** min(failures - 1, 32), limit_s)
        return delay_s * (1.0 - crc32(f"{self._node_id} {failures}".encode()) / 2**33)

    def _rejoin_delay(self, failures: int) -> float:
        if failures == 0:
            return 0.0
        return min(self._timings.rejoin_initial_s * 2.0 ** min(failures - 1, 32), self._timings.rejoin_max_s)

    def _failed(self, command: Command, outcome: Failed, now: float) -> None:
        self._report(
            FactKind.COMMAND_FAILED,
            command=type(command).__name__,
            error=outcome.error,
            unknown=outcome.unknown,
        )
        match command:
            case Heartbeat():
                if not outcome.unknown:  # nothing was renewed, as if it had not been sent
                    self._renewal_sent_at = self._renewed_before
                self._failed_heartbeats += 1
                self._heartbeat_at = min(self._heartbeat_at, now + self._beat_delay(self._failed_heartbeats))
                return
            case AddBarriers() if outcome.unknown:
                self._rebalancing.barriers_unknown(command.resources)
            case RemoveBarriers() if outcome.unknown:
                self._rebalancing.removal_unknown(command.barriers)
            case RecordReleases() if outcome.unknown:
                self._releases.recorded = None
            case ReadShare():
                self._rebalancing.stale_revision = max(
                    self._rebalancing.stale_revision, self._rebalancing.read_revision + 1
                )
            case ReadGroup() | Publish():
                if isinstance(command, Publish) and outcome.unknown:
                    self._leading.publish_unknown(command.plan, command.leadership.term)
                self._leading.failed(outcome.error, now)
            case _:
                pass
        self._lanes.failed(command.lane, now)

    def _session_lost(self, now: float) -> None:
        self._report(FactKind.SESSION_LOST)
        self._move(Life.SESSION_LOST)
        self._wait_until = now
        self._forget()

    def _forget(self) -> None:
        """Forget role, barriers and tokens: they ended with the session (RB-22)."""
        self._session = None
        self._leave_sent = False
        self._isolated = False
        self._leading.session_ended()
        self._rebalancing.forget()

    def _succeeded(self, command: Command, outcome: Outcome, now: float) -> None:
        match outcome:
            case Alive():
                self._alive(outcome, now)
            case Left():
                self._left(now)
            case Elected() | Follows() | Resigned() | Deposed() | GroupRead() | Published() | Conflict():
                self._leading_answered(command, outcome, now)
            case _:
                self._barriers_answered(command, outcome, now)

    def _barriers_answered(self, command: Command, outcome: Outcome, now: float) -> None:
        match command, outcome:
            case ReadShare(), ShareRead():
                self._share_read(outcome)
            case AddBarriers(), BarriersAdded():
                self._barriers_added(outcome)
            case ReadBarriers(), BarriersRead():
                found = self._rebalancing.barriers_read(command.resources, outcome.mine)
                self._report_added(found)
            case RemoveBarriers(), BarriersRemoved():
                self._rebalancing.barriers_removed(outcome.resources)
                self._report_each(
                    FactKind.BARRIER_REMOVED,
                    outcome.resources,
                    command.barriers,
                    revisions=outcome.removed_at,
                    value=now - self._removal_sent_at,
                )
            case Acknowledge(), Acknowledged():
                self._rebalancing.acknowledged = outcome.version
                self._rebalancing.acknowledged_revision = outcome.revision
                if outcome.version == command.version:
                    self._failures = 0
                    self._report(
                        FactKind.ACKNOWLEDGED, revision=outcome.revision, share_version=command.version
                    )
            case RecordReleases(), ReleasesRecorded():
                self._releases.recorded, self._releases.revision = outcome.resources, outcome.revision
            case _:
                raise InternalError(f"{outcome!r} does not answer {command!r}")

    def _leading_answered(self, command: Command, outcome: Outcome, now: float) -> None:
        match outcome:
            case Elected(leadership):
                self._leading.elected(leadership, now)
                self._report(FactKind.ELECTED, revision=leadership.revision)
            case Follows(leadership, revision):
                self._leading.follows(leadership, revision)
                self._report(FactKind.FOLLOWS, leader=leadership.leader)
            case Resigned(leadership):
                self._report(FactKind.RESIGNED, revision=leadership.revision)
                self._leading.resigned(leadership, now)
            case Deposed():
                self._deposed()
            case GroupRead(group=group) if isinstance(command, ReadGroup):
                # Reported before this reading: the commit comes from an earlier one.
                self._report_published(group.header)
                asked = self._leading.group_read(command, outcome, now)
                self._report(
                    FactKind.GROUP_READ,
                    revision=group.revision,
                    members=len(group.members),
                    resources=len(group.resources),
                )
                if self._leading.newly_unreadable(group):
                    first = min(group.unreadable)
                    self._report(
                        FactKind.UNREADABLE, value=len(group.unreadable), why=group.unreadable[first]
                    )
                self._effects.append(asked)
            case Published(header, shares):
                self._report_published(header)
                self._leading.published(header, shares, now)
            case Conflict():
                self._leading.failed("the allocation that the plan was based on had changed", now)
            case _:
                raise InternalError(f"{outcome!r} does not answer {command!r}")

    def _report_published(self, header: Header | None) -> None:
        """Report once each allocation that this leader is known to have committed."""
        if header is None or not self._leading.learn_own(header):
            return
        effort = self._leading.efforts.get(header.version)
        self._report(
            FactKind.ALLOCATION_PUBLISHED,
            revision=header.revision,
            value=header.version,
            published_version=header.version,
            **(asdict(effort) if effort is not None else {}),
        )

    def _alive(self, alive: Alive, now: float) -> None:
        self._proven_at = max(self._proven_at, alive.proven_at)
        self._failed_heartbeats = 0
        self._make_good(alive, now)

    def _make_good(self, alive: Alive, now: float) -> None:
        """Make up for lost notices."""
        rebalancing = self._rebalancing
        seen = max(alive.share_revision, alive.header_revision if rebalancing.pending else 0)
        if seen > rebalancing.read_revision:
            rebalancing.noticed(seen, None)
        if self._leading.leadership_changed(alive.leadership_revision):
            self._deposed()
        self._leading.seen_alive(alive, now)
        for holder, revision in alive.removals.items():
            rebalancing.unblocked(holder, revision or alive.revision)

    def _deposed(self) -> None:
        if self._leading.role is Role.LEADER:
            self._report(FactKind.DEPOSED)
            self._leading.deposed()

    def _share_read(self, read: ShareRead) -> None:
        if read.leadership is not None and not self._member.may_lead:
            self._leading.follows(read.leadership, read.revision)
        if self._rebalancing.adopt(read) and read.share is not None:
            self._report(
                FactKind.ALLOCATION_ADOPTED,
                revision=read.header.revision if read.header else None,
                share_version=read.share.version,
                resources=len(read.share.resources),
            )

    def _barriers_added(self, outcome: BarriersAdded) -> None:
        self._rebalancing.barriers_added(outcome)
        self._report_added(outcome.added)
        if outcome.blocked:
            fact = self._fact(FactKind.BARRIER_BLOCKED, outcome.revision, None, {})
            self._effects.append(Report(fact, outcome.blocked, holders=outcome.blocked))

    def _report_added(self, barriers: Mapping[Resource, Token]) -> None:
        self._report_each(FactKind.BARRIER_ADDED, barriers, barriers, revisions=barriers)

    def _left(self, now: float) -> None:
        self._report(FactKind.LEFT)
        self._depart(now)

    def _depart(self, now: float) -> None:
        """The session is over with nothing of it left: rest, or stop for good."""
        self._abandoned = self._abandoned or bool(self._rebalancing.stuck)
        self._rebalancing.abandon()
        if self._session is not None:
            self._forget()
        self._incarnation += 1
        self._record = None
        self._wait_until = now + self._rejoin_delay(self._failures)
        self._move(Life.LEFT_FOR_GOOD if self._stop_asked else Life.LEFT)
        if self._membership is Membership.STOPPED:
            self._finish()

    def _finish(self) -> None:
        self._update_watches()
        self._update_guard()
        self._effects.append(Finished())

    def _noticed(self, noticed: Noticed, now: float) -> None:
        topic = noticed.topic
        if self._session is None or topic.kind is TopicKind.BARRIERS:
            return
        match topic.kind:
            case TopicKind.ALLOCATION | TopicKind.COMMIT:
                if topic.node in ("", self._session.node):
                    self._rebalancing.noticed(noticed.revision, noticed.version)
            case TopicKind.LEADERSHIP:
                if self._leading.leadership_changed(noticed.revision, noticed.lost):
                    self._deposed()
            case TopicKind.NODE:
                self._leading.node_gone(topic.node, noticed.revision)
            case TopicKind.REMOVALS:
                self._rebalancing.unblocked(topic.node, noticed.revision)
            case TopicKind.GROUP:
                self._leading.group_noticed(noticed, now)
            case TopicKind.ACKNOWLEDGEMENTS:
                self._leading.acknowledged(topic.node, noticed.version, now)
            case _:
                assert_never(topic.kind)

    def _handler_returned(self, event: HandlerReturned) -> None:
        rebalancing = self._rebalancing
        if rebalancing.running is not event.handler:
            raise InternalError(f"{event.handler} returned while {rebalancing.running} runs")
        self._overran = False
        stopping = rebalancing.stopping
        if event.handler is Handler.STOP:
            rebalancing.stop_returned(failed=event.error is not None)
        else:
            rebalancing.start_returned(entered=not event.refused)
        if event.error is None:
            return
        if event.handler is Handler.STOP:
            started = dict(rebalancing.started)
            self._report_each(FactKind.STOP_FAILED, stopping, started, error=event.error)
        else:
            self._report(FactKind.START_FAILED, error=event.error)
        self._failures += 1
        if self._membership is Membership.MEMBER:
            self._move(Life.HANDLER_FAILED)
            self._report(FactKind.LEAVING)

    def _release(self, event: Release, now: float) -> None:
        """Release a resource, if it is still accessed with that token."""
        tokens = {event.resource: event.token}
        if self._rebalancing.started.get(event.resource) != event.token:
            return
        if self._releases.release(event.resource, math.inf if event.for_s is None else now + event.for_s):
            self._report_each(FactKind.RELEASED, tokens, tokens, value=event.for_s)

    def _advance(self, now: float) -> None:
        """Do whatever is the next thing to do, in each lane and for the handlers."""
        self._advance_life(now)
        if self._session is not None:
            self._send_heartbeat(now)
            self._advance_leading(now)
        self._advance_handlers(now)
        if self._session is not None:
            self._advance_barriers(now)
        self._rebalancing.observe_step(self._giving_up)
        if self._membership is not Membership.STOPPED:
            self._update_watches()
            self._update_guard()

    def _advance_life(self, now: float) -> None:
        if self._membership is Membership.LOST and self._idle:
            self._depart(now)
            self._watch_clock(now)
        if self._membership is Membership.WITHDRAWING and self._lanes.under_way(Lane.MEMBER) is None:
            self._move(Life.JOIN_FAILED)
            self._finish()
        if self._membership is Membership.LEAVING and self._idle and now >= self._lapses_at:
            self._left(now)
        if self._membership is Membership.LAPSING and (self._stop_asked or now >= self._wait_until):
            self._left(now)
        if self._membership is Membership.JOINING and self._lanes.ready(Lane.MEMBER, now):
            self._report(FactKind.JOINING)
            if self._record is None:
                self._record = replace(self._member, node=self._node_id, released=self._releases.resources)
                self._releases.recorded = self._record.released
            self._perform(Join(self._record, self._timings.lease_ttl_s))

    @property
    def _idle(self) -> bool:
        """True if nothing is accessed any more, except for what OnStop failed to stop."""
        return (
            self._rebalancing.running is None and self._rebalancing.started.keys() <= self._rebalancing.stuck
        )

    @property
    def _wants_lease(self) -> bool:
        """True if the lease is to be renewed: an isolated node that leaves has nothing left to protect."""
        if self._membership is Membership.LEAVING:
            return not (self._isolated and self._idle)
        return self._membership is Membership.MEMBER

    @property
    def _lapses_at(self) -> float:
        """The time at which the lease has ended if it is renewed no more, whatever the drift of the clocks.

        Counted from the latest renewal that may have taken effect, not from the latest that was proven.
        """
        latest = max(self._proven_at, self._renewal_sent_at)
        ttl_s = self._timings.lease_ttl_s * (1 + self._timings.clock_drift_ratio)
        return latest + ttl_s + self._timings.safety_margin_s

    def _perform(self, command: Command) -> None:
        self._lanes.send(command)
        self._effects.append(Perform(command))

    def _send_heartbeat(self, now: float) -> None:
        session = self._session
        if (
            session is None
            or not self._wants_lease
            or now < self._heartbeat_at
            or not self._lanes.ready(Lane.HEARTBEAT, now)
        ):
            return
        self._heartbeat_at = now + self._timings.heartbeat_interval_s
        self._renewed_before = self._renewal_sent_at
        self._renewal_sent_at = now
        leadership = self._leading.leadership
        follower = self._leading.role is Role.FOLLOWER and self._member.may_lead
        self._perform(
            Heartbeat(
                session=session,
                leader=leadership.leader if leadership is not None and follower else None,
                blockers=frozenset(self._rebalancing.blocked_since),
                read_fingerprint=self._leading.next_beat_reads_fingerprint(),
            )
        )

    def _advance_leading(self, now: float) -> None:
        session, leading = self._session, self._leading
        if session is None or self._membership not in _IN_SESSION:
            return
        completed = leading.newly_completed()
        if completed is not None:
            self._report(FactKind.REBALANCE_COMPLETED, value=completed, completed_version=completed)
        if not self._lanes.ready(Lane.LEADER, now):
            return
        if leading.role is Role.LEADER and leading.leadership is not None:
            if leading.asked is not None:
                return
            if leading.must_resign:
                self._perform(Resign(session, leading.leadership, leading.last_error))
            elif leading.plan is not None:
                self._perform(Publish(session, leading.leadership, leading.plan))
            elif leading.rebalance_at is not None and now >= leading.rebalance_at:
                self._perform(leading.reading_group(session, leading.leadership))
        elif leading.campaign_due(now) and self._membership is Membership.MEMBER and not self._isolated:
            self._perform(Campaign(session))

    def _advance_handlers(self, now: float) -> None:
        rebalancing = self._rebalancing
        if rebalancing.running is not None:
            asked = rebalancing.to_ask(self._giving_up)
            if asked:
                rebalancing.ask(asked)
                self._effects.append(AskStop(asked))
            self._hurry(now)
            return
        to_stop = rebalancing.to_stop(self._giving_up)
        if to_stop:
            rebalancing.calling_stop(to_stop)
            self._handler_began = now
            self._limit_handler(now, self._stop_limit_s)
            self._effects.append(CallStop(to_stop))
        elif self._may_start:
            owned = rebalancing.to_start()
            if owned is not None:
                rebalancing.calling_start(owned)
                self._handler_began = now
                self._limit_handler(now, self._timings.start_timeout_s)
                self._update_guard()
                self._effects.append(CallStart(owned, self._proven_at + self._detect_s))

    def _limit_handler(self, now: float, limit_s: float) -> None:
        self._handler_limit_s = limit_s
        self._handler_ends = now + limit_s

    @property
    def _stop_limit_s(self) -> float:
        """Limit of OnStop in seconds: out of touch, the time left until access must have ended."""
        limit_s = self._timings.stop_timeout_s
        left_s = self._proven_at + self._timings.access_s - self._handler_began
        return min(left_s, limit_s) if self._isolated and left_s > 0.0 else limit_s

    def _hurry(self, now: float) -> None:
        """Limit an OnStart that still runs while everything is given up: it uses up OnStop's time (RB-21).

        Back in touch each handler has its own time again.
        """
        if self._rebalancing.running is None or self._overran:
            return
        limit_s = self._timings.stop_timeout_s
        if self._rebalancing.running is Handler.STOP:
            self._limit_handler(self._handler_began, self._stop_limit_s)
        elif not self._giving_up:
            self._limit_handler(self._handler_began, self._timings.start_timeout_s)
        elif now + limit_s < self._handler_ends:
            self._limit_handler(now, limit_s)

    @property
    def _may_start(self) -> bool:
        """Step 4 comes after steps 1 to 3; what step 3 still waits for may come in a later batch."""
        rebalancing = self._rebalancing
        return not self._giving_up and not (
            rebalancing.to_remove(everything=False) or rebalancing.to_find_out(everything=False)
        )

    def _advance_barriers(self, now: float) -> None:
        session, out_of_touch = self._session, self._isolated and self._membership is Membership.MEMBER
        if session is None or self._membership not in _IN_SESSION or out_of_touch:
            return
        if not self._lanes.ready(Lane.MEMBER, now):
            return
        command = self._next_barrier_command(session) or self._next_record(session)
        if isinstance(command, RemoveBarriers):
            self._removal_sent_at = now
        if command is not None:
            self._perform(command)

    def _next_barrier_command(self, session: Session) -> Command | None:
        rebalancing, leaving = self._rebalancing, self._membership is Membership.LEAVING
        if rebalancing.must_read and not leaving:
            return ReadShare(session)
        if self._stops_first:
            return None
        to_find_out = rebalancing.to_find_out(leaving)
        if to_find_out:
            return ReadBarriers(session, to_find_out)
        to_remove = rebalancing.to_remove(leaving)
        if to_remove:
            return RemoveBarriers(session, to_remove)
        if leaving:
            return self._leave(session)
        to_add, share = rebalancing.to_add(), rebalancing.share
        if to_add and share is not None:
            return AddBarriers(session, share.version, share.revision, to_add)
        if share is not None and rebalancing.completed and rebalancing.acknowledged < share.version:
            return Acknowledge(session, share.version, rebalancing.acknowledged_revision)
        return None

    def _next_record(self, session: Session) -> Command | None:
        """Rewrite the node's record once nothing else is to be done: if that fails it holds up nothing."""
        releases = self._releases
        if not releases.unrecorded or self._membership is not Membership.MEMBER or self._record is None:
            return None
        return RecordReleases(session, replace(self._record, released=releases.resources), releases.revision)

    @property
    def _stops_first(self) -> bool:
        """True if step 1 has to end before barriers are changed (RB-11)."""
        running = self._rebalancing.running
        return running is Handler.STOP or bool(self._rebalancing.to_stop(self._giving_up))

    def _leave(self, session: Session) -> Command | None:
        if self._rebalancing.running is not None:
            return None
        if not self._rebalancing.stuck:
            self._leave_sent = True
            return Leave(session)
        self._move(Life.STUCK)
        self._wait_until = self._lapses_at
        self._report(FactKind.LAPSING, resources=len(self._rebalancing.stuck))
        return None

    def _update_watches(self) -> None:
        topics: dict[Topic, int] = {}
        if self._session is not None and self._membership in _IN_SESSION:
            topics = self._leading.topics()
            if self._rebalancing.read_revision >= 0:
                topics[Topic(TopicKind.ALLOCATION, self._session.node)] = self._rebalancing.read_revision + 1
                if self._rebalancing.pending:
                    topics[_COMMIT] = self._rebalancing.read_revision + 1
            for holder, since in self._rebalancing.blocked_since.items():
                topics[Topic(TopicKind.REMOVALS, holder)] = since + 1
        if topics.keys() != self._watched:
            self._watched = frozenset(topics)
            self._effects.append(Watch(topics))

    def _update_guard(self) -> None:
        """Set until when access may last. Once it may have outlived its limit, the switch stays as it is."""
        if (self._overran or self._abandoned) and self._options.on_overrun is OnOverrun.KILL:
            return
        deadline = self._guard
        if not self._rebalancing.started:
            deadline = None
        elif self._session is not None and self._membership in _IN_SESSION:
            deadline = self._proven_at + self._timings.access_s
        if deadline != self._guard:
            self._guard = deadline
            self._effects.append(Guard(deadline))

    def _earliest_wakeup(self, now: float) -> float | None:
        times = self._lanes.retries(now)
        if self._membership in _IN_SESSION:
            if self._wants_lease and self._lanes.under_way(Lane.HEARTBEAT) is None:
                times.append(self._heartbeat_at)
            if not self._isolated:
                times.append(self._proven_at + self._detect_s)
            rebalance_at = self._leading.rebalance_at
            if rebalance_at is not None and rebalance_at > now:
                times.append(rebalance_at)
            if self._releases.next_end < math.inf:
                times.append(self._releases.next_end)
        if self._membership is Membership.LEAVING and self._idle:
            times.append(self._lapses_at)
        if self._membership in _RESTING:
            times.append(now if self._stop_asked else self._wait_until)
        running = self._rebalancing.running
        if running is not None and not self._overran:
            times.append(self._handler_ends)
        return min(times, default=None)
