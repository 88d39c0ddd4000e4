"""The member: events in, effects out. Leadership is computed at each request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import assert_never

from rebalanser.core.neli.messages import (
    AskPartitionCount,
    Assigned,
    CallFenced,
    CallInduced,
    CallLapsed,
    ClientEvent,
    Commit,
    CommitAnswered,
    Committing,
    Effect,
    Event,
    Fact,
    FactKind,
    Fail,
    HandlerReturned,
    HeartbeatRead,
    HostEvent,
    LastCommit,
    Leave,
    LetGo,
    Lost,
    Partition,
    PartitionCount,
    Polled,
    PublishHeartbeats,
    Report,
    Revoked,
    RolesChanged,
    Stop,
    Wakeup,
)
from rebalanser.core.neli.records import LeadershipClaim, Stamp
from rebalanser.core.neli.roles import Role, RoleMap, Roles
from rebalanser.core.neli.settings import Mode, NeliSettings
from rebalanser.core.neli.states import PARTITION, PartitionState, Turn
from rebalanser.core.neli.tenure import Tenure
from rebalanser.core.neli.vector import Vector
from rebalanser.errors import FixConfiguration, InvalidSettings


@dataclass(frozen=True, slots=True)
class _LastCall:
    """Last call of the handlers for a partition that is led."""

    roles: frozenset[Role]
    token: int


class NeliMember:
    """One process of a NELI group.

    ``process`` is the id of this incarnation, never used again by any process. ``partitions`` is the
    topic's partition count, asked for no earlier than ``now`` (monotonic seconds, as everywhere).
    ``settings`` have passed ``check``.
    """

    def __init__(
        self,
        group: str,
        process: str,
        partitions: int,
        roles: Roles,
        settings: NeliSettings,
        now: float,
    ) -> None:
        self._group = group
        self._process = process
        self._partitions = partitions
        self._settings = settings
        self._roles = RoleMap(roles, partitions)
        self._vector = Vector(partitions)
        self._tenures: dict[Partition, Tenure] = {}
        self._states: dict[Partition, PartitionState] = {}
        self._last_calls: dict[Partition, _LastCall] = {}
        self._led: dict[Partition, int] = {}
        self._running: set[Partition] = set()
        self._ended: dict[Partition, str] = {}
        self._tenure_count = 0
        self._sequence = 0
        self._commits = 0
        self._unanswered: Commit | None = None
        self._commit_sent_at: float | None = None
        self._publish_at = now
        self._ask_at = now + settings.base_interval_s
        self._counted_at = now
        self._handled_at = now
        self._clock_off = False
        self._stopping = False
        self._left = False
        self._error: FixConfiguration | None = None
        self._effects: list[Effect] = []

    @property
    def error(self) -> FixConfiguration | None:
        """Error that this member has failed with; None while it has not."""
        return self._error

    @property
    def partitions(self) -> int:
        """Number of partitions among which roles are divided."""
        return self._partitions

    def partition_of(self, role: Role) -> Partition | None:
        """Return the partition of a role (NE-5); None for a role that is unknown here."""
        return self._roles.partition_of(role)

    def state_of(self, partition: Partition) -> PartitionState:
        """Return the state of a partition as last reported to the handlers; never a proof of leadership."""
        return self._states.get(partition, PartitionState.FOREIGN)

    def leads(self, role: Role, now: float) -> bool:
        """True if this process leads ``role`` now (NE-4).

        Time passes between the answer and the action. If two processes must not act, send the token along, to
        a store that checks it (NE-15).
        """
        return self.token(role, now) is not None

    def token(self, role: Role, now: float) -> int | None:
        """Return the fencing token of a role that is led now, greater than all earlier ones; else None."""
        partition = self._roles.partition_of(role)
        return None if partition is None else self.token_of(partition, now)

    def token_of(self, partition: Partition, now: float) -> int | None:
        """Return the fencing token of a partition that is led now; None if it is not."""
        tenure = self._tenures.get(partition)
        if tenure is None or self._why_not(tenure, now) is not None:
            return None
        return tenure.token

    def held(self, now: float) -> dict[Role, int]:
        """Return the roles led now, each with its fencing token."""
        tokens = {partition: self.token_of(partition, now) for partition in self._tenures}
        return {
            role: token
            for partition, token in tokens.items()
            if token is not None
            for role in self._roles.roles_of(partition)
        }

    def why_not(self, role: Role, now: float) -> str | None:
        """Return the reason why this process does not lead ``role`` now, as a sentence; None if it does."""
        partition = self._roles.partition_of(role)
        if partition is None:
            return "the role is not known here"
        tenure = self._tenures.get(partition)
        return self._why_not(tenure, now) if tenure else f"partition {partition} is not assigned here"

    @property
    def next_wakeup(self) -> float | None:
        """Latest time for a ``Wakeup``; None once it has left or failed."""
        if self._left or self._error:
            return None
        times = [self._ask_at]
        if not self._stopping and self._to_publish():
            times.append(self._publish_at)
        for partition, tenure in self._tenures.items():
            if tenure.let_go_by is not None:
                times.append(tenure.let_go_by)
            elif partition in self._led:
                times.append(self._fresh_until(tenure))
            elif not tenure.succession.is_over(self._handled_at):
                times.append(tenure.succession.until)
        return min(times)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle one event; return the effects, in order."""
        self._effects = []
        since, self._handled_at = self._handled_at, now
        self._report_leadership(since)
        if isinstance(event, RolesChanged | HandlerReturned | Stop | Wakeup):
            self._handle_host_event(event, now)
        else:
            self._handle_client_event(event, now)
        self._report_leadership(now)
        for partition in sorted(self._tenures.keys() | self._last_calls.keys()):
            self._notify(partition, now)
        self._let_go_of_lapsed(now)
        if not (self._left or self._error):
            self._do_what_is_due(now)
        return self._effects

    def _handle_client_event(self, event: ClientEvent, now: float) -> None:
        match event:
            case Assigned(partitions=partitions):
                self._assigned(partitions, now)
            case Revoked(partitions=partitions):
                self._revoked(partitions, now)
            case Lost(partitions=partitions):
                self._lost(partitions, "lost")
            case Polled():
                self._commit(now)
            case HeartbeatRead():
                self._heartbeat_read(event, now)
            case CommitAnswered():
                self._commit_answered(event)
            case PartitionCount():
                self._counted(event)
            case _:
                assert_never(event)

    def _handle_host_event(self, event: HostEvent, now: float) -> None:
        match event:
            case RolesChanged(roles=roles):
                self._roles = RoleMap(roles, self._partitions)
            case HandlerReturned():
                self._handler_returned(event)
            case Stop():
                self._stopping = True
                self._lapse(self._tenures.values(), now)
            case Wakeup():
                pass
            case _:
                assert_never(event)

    def _assigned(self, partitions: Mapping[Partition, LastCommit | None], now: float) -> None:
        if self._stopping or self._error:
            return
        beyond = max(partitions, default=-1)
        if beyond >= self._partitions:
            self._fail(self._count_changed(beyond + 1))
            return
        self._lost(partitions.keys() & self._tenures.keys(), "assigned anew")
        for partition, last in sorted(partitions.items()):
            self._tenure_count += 1
            stamp = self._stamp(self._tenure_count, 0)
            self._tenures[partition] = Tenure(stamp, partition, last, self._settings, now)
            self._move(partition, Turn.ASSIGNED)
            self._report(FactKind.ASSIGNED, partition, tenure=self._tenure_count)
        self._publish_at = now

    def _revoked(self, partitions: frozenset[Partition], now: float) -> None:
        known = [self._tenures[partition] for partition in sorted(partitions & self._tenures.keys())]
        for tenure in known:
            tenure.asked_back = True
            self._report(FactKind.REVOKED, tenure.partition)
        self._lapse(known, now)
        unknown = partitions - self._tenures.keys()
        if unknown:
            self._effects.append(LetGo(frozenset(unknown)))

    def _lapse(self, tenures: Iterable[Tenure], now: float) -> None:
        for tenure in tenures:
            if not tenure.is_lapsing:
                tenure.let_go_by = now + self._settings.lapse_s
                self._move(tenure.partition, Turn.REVOKED)
                if tenure.partition in self._led:
                    self._report(FactKind.LAPSED, tenure.partition, self._led[tenure.partition])

    def _lost(self, partitions: Iterable[Partition], reason: str) -> None:
        lost = [partition for partition in sorted(partitions) if partition in self._tenures]
        for partition in lost:
            del self._tenures[partition]
            self._ended[partition] = reason
            self._move(partition, Turn.LOST)
            self._report_end(partition, FactKind.FENCED, reason=reason)
        if lost:
            self._report(FactKind.LOST, reason=reason, partitions=", ".join(map(str, lost)))

    def _fail(self, error: FixConfiguration) -> None:
        self._error = error
        asked_back = [tenure.partition for tenure in self._tenures.values() if tenure.asked_back]
        self._lost(list(self._tenures), str(error))
        if asked_back:
            self._effects.append(LetGo(frozenset(asked_back)))
        self._report(FactKind.FAILED, error=str(error))
        self._effects.append(Fail(error))

    def _count_changed(self, partitions: int) -> InvalidSettings:
        return InvalidSettings(
            f"the topic has {partitions} partitions and had {self._partitions} when this process started: "
            "roles would belong to other partitions; stop every process of the group, then start them again"
        )

    def _heartbeat_read(self, record: HeartbeatRead, now: float) -> None:
        tenure = self._tenures.get(record.partition)
        if tenure is None:
            return
        if self._settings.mode is Mode.EXCLUSIVE and not record.log_append_time:
            self._fail(
                InvalidSettings(
                    "mode exclusive needs the broker's timestamps: set message.timestamp.type=LogAppendTime "
                    "on the topic, records have CreateTime (NE-7)"
                )
            )
            return
        self._hear(record, now)
        if tenure.read(record, now):
            self._report(FactKind.SUCCEEDS, record.partition)
        stamp = record.stamp
        if stamp and stamp.group == self._group and stamp.partitions != self._partitions:
            self._ask_at = min(self._ask_at, now)

    def _hear(self, record: HeartbeatRead, now: float) -> None:
        """Update V: by the time of receipt, or by the record's age on both wall clocks (NE-6, NE-7)."""
        age_s = 0.0
        if self._settings.mode is Mode.EXCLUSIVE:
            age_s = (record.wall_ms - record.timestamp_ms) / 1000
            was_off, self._clock_off = self._clock_off, age_s < -self._settings.clock_error_s
            if self._clock_off:
                if not was_off:
                    self._report(FactKind.CLOCK_OFF, record.partition, behind_s=-age_s)
                return
        self._vector.hear(record.partition, now - max(0.0, age_s))

    def _commit_answered(self, answer: CommitAnswered) -> None:
        commit = answer.commit
        if self._unanswered and self._unanswered.number == commit.number:
            self._unanswered = None
        for partition, part in commit.offsets.items():
            tenure = self._tenures.get(partition)
            if tenure is None or tenure.number != part.note.tenure:
                continue
            if partition in answer.failed:
                error = answer.failed[partition]
                self._report(FactKind.COMMIT_FAILED, partition, error=error, fenced=answer.fenced)
            elif tenure.release != commit.number:
                tenure.committed(part.offset, commit.sent_at)
            else:
                self._report(FactKind.RELEASED, partition, tenure.token)
            if tenure.release == commit.number:
                self._end(tenure)
        if answer.fenced:
            for tenure in self._tenures.values():
                tenure.fenced = True

    def _counted(self, answer: PartitionCount) -> None:
        if answer.partitions == self._partitions:
            self._counted_at = max(self._counted_at, answer.question.asked_at)
        elif self._error is None:
            self._fail(self._count_changed(answer.partitions))

    def _handler_returned(self, returned: HandlerReturned) -> None:
        self._running.discard(returned.partition)
        if returned.error is not None:
            self._report(FactKind.HANDLER_FAILED, returned.partition, error=returned.error)

    def _why_not(self, tenure: Tenure, now: float) -> str | None:
        """Return why an assigned partition is not led; None if it is. Each condition is a safeguard."""
        if self._error or tenure.is_lapsing:
            return "it is being handed over"
        if tenure.fenced:
            return "the broker says that this process is no member any more"
        if not self._is_counted(now):
            return "the partition count was not confirmed within the deadline"
        if not self._is_heard(tenure, now):
            return "no heartbeat came back within the deadline"
        if not self._is_confirmed(tenure, now):
            return "the broker accepted no commit within the deadline"
        if tenure.token is None:
            return "no heartbeat of its own is confirmed as fencing token yet"
        if not tenure.succession.is_over(now):
            return "a predecessor may still lead"
        return None

    def _report_leadership(self, since: float) -> None:
        """Report leaderships that began or ended by time alone, between ``since`` and now.

        The handlers may be called later, one call at a time.
        """
        now = self._handled_at
        for partition, tenure in sorted(self._tenures.items()):
            if tenure.is_lapsing:
                continue
            begin = max(since, tenure.succession.until)
            begins = partition not in self._led and begin <= now and self._why_not(tenure, begin) is None
            if begins and tenure.token is not None:
                self._led[partition] = tenure.token
                roles = ", ".join(sorted(map(str, self._roles.roles_of(partition))))
                self._report(FactKind.INDUCED, partition, tenure.token, begin, roles=roles)
            if partition in self._led and (reason := self._why_not(tenure, now)):
                ended_at = min(now, max(since, self._fresh_until(tenure)))
                self._report_end(partition, FactKind.FENCED, ended_at, reason=reason)

    def _report_end(
        self, partition: Partition, kind: FactKind, at: float | None = None, **detail: str
    ) -> None:
        """Report the end of a leadership, once; no-op if there was none."""
        token = self._led.pop(partition, None)
        if token is not None:
            self._report(kind, partition, token, at, **detail)

    def _is_counted(self, now: float) -> bool:
        return now - self._counted_at < self._settings.limit_s

    def _is_heard(self, tenure: Tenure, now: float) -> bool:
        heard_at = self._heard_at(tenure)
        return heard_at is not None and now - heard_at < self._settings.limit_s

    def _is_confirmed(self, tenure: Tenure, now: float) -> bool:
        return tenure.committed_at is not None and now - tenure.committed_at < self._settings.limit_s

    def _heard_at(self, tenure: Tenure) -> float | None:
        """Return the time of the mode's evidence: the own heartbeat in ``fast`` (NE-9), else V (NE-3)."""
        if self._settings.mode is Mode.FAST:
            return tenure.heard_at
        return self._vector.heard_at(tenure.partition)

    def _fresh_until(self, tenure: Tenure) -> float:
        """Return the time at which the oldest evidence of a partition that is led is too old."""
        evidence = (self._counted_at, self._heard_at(tenure), tenure.committed_at)
        return min(at for at in evidence if at is not None) + self._settings.limit_s

    def _notify(self, partition: Partition, now: float) -> None:
        """Call the handlers about changes of leadership, one call at a time in each partition."""
        if partition in self._running:
            return
        tenure = self._tenures.get(partition)
        reason = self._why_not(tenure, now) if tenure else self._ended.get(partition, "lost")
        last = self._last_calls.get(partition)
        token = tenure.token if tenure and reason is None else None
        if last and last.token != token:
            del self._last_calls[partition]
            self._notify_end(partition, last, tenure, reason or "assigned anew")
            last = None
        if token is not None and partition not in self._running:
            self._notify_roles(partition, last, token, now)

    def _notify_roles(self, partition: Partition, last: _LastCall | None, token: int, now: float) -> None:
        roles = self._roles.roles_of(partition)
        known = last.roles if last else frozenset()
        if last is None:
            self._move(partition, Turn.INDUCED)
        if known - roles:
            self._last_calls[partition] = _LastCall(known & roles, token)
            limit = now + self._settings.lapse_s
            self._call(CallLapsed(partition, known - roles, token, limit))
        else:
            self._last_calls[partition] = _LastCall(roles, token)
            if roles - known:
                self._call(CallInduced(partition, roles - known, token))

    def _notify_end(self, partition: Partition, last: _LastCall, tenure: Tenure | None, reason: str) -> None:
        if tenure is not None and tenure.let_go_by is not None:
            if last.roles:
                self._call(CallLapsed(partition, last.roles, last.token, tenure.let_go_by))
            return
        if self.state_of(partition) is PartitionState.LED:
            self._move(partition, Turn.FENCED)
        if last.roles:
            self._call(CallFenced(partition, last.roles, last.token, reason))

    def _call(self, call: CallInduced | CallLapsed | CallFenced) -> None:
        self._running.add(call.partition)
        self._effects.append(call)

    def _let_go_of_lapsed(self, now: float) -> None:
        """Release what the handlers have ended their work on, or have overrun their limit for."""
        release: list[Tenure] = []
        for tenure in [tenure for tenure in self._tenures.values() if tenure.is_lapsing]:
            busy = tenure.partition in self._running or tenure.partition in self._last_calls
            if tenure.let_go_by is not None and now >= tenure.let_go_by:
                if busy:
                    reason = self._ended[tenure.partition] = "its handler overran the limit"
                    self._report(FactKind.HANDLER_OVERRAN, tenure.partition, tenure.token)
                    self._report_end(tenure.partition, FactKind.FENCED, reason=reason)
                self._end(tenure)
            elif not busy and tenure.release is None:
                self._report_end(tenure.partition, FactKind.ENDED)
                if tenure.may_release(now):
                    release.append(tenure)
                else:
                    self._end(tenure)
        if release:
            commit = self._send(release, LeadershipClaim.RELEASED, now)
            for tenure in release:
                tenure.release = commit.number
        if self._stopping and not self._left and not self._tenures and not self._running:
            self._left = True
            self._report(FactKind.LEFT)
            self._effects.append(Leave())

    def _end(self, tenure: Tenure) -> None:
        """End a tenure: the partition may go to others now."""
        self._report_end(tenure.partition, FactKind.ENDED)
        del self._tenures[tenure.partition]
        self._move(tenure.partition, Turn.LET_GO)
        if tenure.asked_back:
            self._effects.append(LetGo(frozenset({tenure.partition})))

    def _do_what_is_due(self, now: float) -> None:
        if now >= self._publish_at and not self._stopping:
            self._publish(self._to_publish(), now)
            self._publish_at = now + self._settings.interval_s
        if now >= self._ask_at:
            self._ask_at = now + self._settings.base_interval_s
            self._effects.append(AskPartitionCount(now))

    def _to_publish(self) -> Iterable[Partition]:
        """Return all partitions in the classic modes (NE-2), and the assigned ones in ``fast`` (NE-9)."""
        if self._settings.mode is not Mode.FAST:
            return range(self._partitions)
        return [partition for partition, tenure in self._tenures.items() if not tenure.is_lapsing]

    def _publish(self, partitions: Iterable[Partition], now: float) -> None:
        heartbeats: dict[Partition, Stamp] = {}
        for partition in sorted(partitions):
            self._sequence += 1
            tenure = self._tenures.get(partition)
            heartbeats[partition] = self._stamp(tenure.number if tenure else 0, self._sequence)
            if tenure:
                tenure.sending(self._sequence, now)
        if heartbeats:
            self._effects.append(PublishHeartbeats(heartbeats))

    def _stamp(self, tenure: int, sequence: int) -> Stamp:
        return Stamp(self._group, self._process, tenure, sequence, self._partitions)

    def _commit(self, now: float) -> None:
        """Commit, right after a poll: a stuck process renews nothing, and all that came is known (NE-10)."""
        ready = [
            tenure
            for tenure in self._tenures.values()
            if tenure.position is not None and not tenure.is_lapsing and not tenure.fenced
        ]
        sent_at = self._commit_sent_at
        due = sent_at is None or now - sent_at >= self._settings.base_interval_s
        urgent = self._unanswered is None and any(tenure.needs_commit for tenure in ready)
        if ready and (due or urgent):
            self._unanswered = self._send(ready, LeadershipClaim.HELD, now)
            self._commit_sent_at = now

    def _send(self, tenures: Iterable[Tenure], claim: LeadershipClaim, now: float) -> Commit:
        self._commits += 1
        offsets = {
            tenure.partition: Committing(tenure.position, tenure.note(claim, now))
            for tenure in tenures
            if tenure.position is not None
        }
        commit = Commit(self._commits, now, offsets)
        self._effects.append(commit)
        return commit

    def _move(self, partition: Partition, turn: Turn) -> None:
        state = PARTITION.move(self.state_of(partition), turn)
        if state is PartitionState.FOREIGN:
            del self._states[partition]
        else:
            self._states[partition] = state

    def _report(
        self,
        kind: FactKind,
        partition: Partition | None = None,
        token: int | None = None,
        at: float | None = None,
        **detail: str | float | bool | None,
    ) -> None:
        """Report a fact; one of an earlier time ``at`` also says how late it is reported."""
        when = self._handled_at if at is None else at
        if when < self._handled_at:
            detail["late_s"] = self._handled_at - when
        self._effects.append(Report(Fact(kind, partition, token, when, detail)))
