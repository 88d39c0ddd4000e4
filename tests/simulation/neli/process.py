"""A simulated process: the product's member, under a client that polls, and a host application."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol

from rebalanser.core.neli.member import NeliMember
from rebalanser.core.neli.messages import (
    AskPartitionCount,
    Assigned,
    CallFenced,
    CallInduced,
    CallLapsed,
    Commit,
    CommitAnswered,
    Committing,
    Effect,
    Event,
    Fact,
    Fail,
    HandlerReturned,
    HeartbeatRead,
    LastCommit,
    Leave,
    LetGo,
    Lost,
    PartitionCount,
    Polled,
    PublishHeartbeats,
    Report,
    Revoked,
    Stop,
    Wakeup,
)
from rebalanser.core.neli.records import Stamp
from rebalanser.core.neli.settings import GroupProtocol, NeliSettings
from simulation.kernel.scheduler import Scheduler
from simulation.neli.coordinator import NONE, Answer, Partitions, Verdict
from simulation.neli.log import Record, Topic
from simulation.neli.scenario import Fault, Scenario

_RECORDS_PER_POLL = 12
_FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class _Callback:
    """What the client has to tell the application in its next poll."""

    kind: type[Assigned | Revoked | Lost]
    partitions: Partitions


class Judge(Protocol):
    """Judges processes by what they would answer."""

    def look(self, process: Process) -> None:
        """Judge a process after an event."""

    def left_in_order(self, process: Process) -> None:
        """Judge a process that leaves."""


class Surroundings(Protocol):
    """The world of a process: true time, the broker and the network to it."""

    scenario: Scenario
    random: Random
    scheduler: Scheduler
    topic: Topic

    @property
    def now(self) -> float:
        """True time, in seconds."""
        ...

    @property
    def oracle(self) -> Judge:
        """Judge of what the process does."""
        ...

    def report(self, process: Process, fact: Fact) -> None:
        """Take in a fact."""

    def is_log_cut(self, process: Process) -> bool:
        """True if the process can't reach the partitions' leader."""
        ...

    def readable(self, partition: int, offset: int, limit: int) -> list[Record]:
        """Fetch records."""
        ...

    def last_commit(self, process: Process, partition: int) -> LastCommit | None:
        """Read a committed offset; None without an answer."""
        ...

    def produce(self, process: Process, heartbeats: dict[int, Stamp]) -> None:
        """Send records to the log."""

    def ask_count(self, process: Process, reply: Callable[[int], None]) -> None:
        """Ask for the number of partitions."""

    def commit(
        self,
        process: Process,
        client: str,
        epoch: int,
        offsets: Mapping[int, Committing],
        reply: Callable[[Verdict | None], None],
    ) -> None:
        """Commit offsets."""

    def say_alive(
        self,
        process: Process,
        client: str,
        epoch: int,
        owned: Partitions,
        reply: Callable[[Answer | None], None],
    ) -> None:
        """Send a heartbeat to the coordinator."""

    def join(
        self, process: Process, client: str, owned: Partitions, reply: Callable[[Answer | None], None]
    ) -> None:
        """Join the group, or a rebalance."""

    def leave(self, process: Process, client: str) -> None:
        """Leave the group."""


class Process:
    """One incarnation of a process, from its start to its end."""

    def __init__(
        self, world: Surroundings, name: str, settings: NeliSettings, rate: float, wall_error_s: float
    ) -> None:
        self.world = world
        self.name = name
        self.settings = settings
        self._rate = rate
        self._wall_error_s = wall_error_s
        self._born_at = world.now
        self.alive = True
        self.resumes_at = 0.0
        self.stuck_until = 0.0
        self.cut_coordinator_until = 0.0
        self.cut_log_until = 0.0
        self.heartbeats_lost_until = 0.0
        self.slow_handlers = 0
        self.lapsing: dict[int, tuple[float, str]] = {}
        """Partitions whose lapsed handlers run: their limit, and as which member of the group."""
        self.owned: Partitions = NONE
        self.positions: dict[int, int] = {}
        self._incarnation = 0
        self.client = self._next_client()
        self._epoch = 0
        self._is_member = False
        self._joining = False
        self._leaving = False
        self._owes_rejoin = False
        self._callbacks: deque[_Callback] = deque()
        self._blocked: set[int] = set()
        self._wakes_at = _FOREVER
        self._polled_at = self.now
        self._answered_at = self.now
        roles = range(world.scenario.roles)
        self.member = NeliMember("group", name, world.topic.partitions, roles, settings, self.now)
        self._after(0.0, self._poll)
        self._after(0.0, self._heartbeat)
        self.tell(Wakeup())

    @property
    def now(self) -> float:
        """This process's monotonic clock."""
        return 100.0 + (self.world.now - self._born_at) * self._rate

    @property
    def is_paused(self) -> bool:
        """Whether the process is stopped (SIGSTOP)."""
        return self.world.now < self.resumes_at

    @property
    def is_joining(self) -> bool:
        """Whether it is no member of the group as far as it knows, or takes part in a rebalance."""
        return not self._is_member or self._joining or self._owes_rejoin

    def leads(self, partition: int) -> bool:
        """Whether the member leads a partition now."""
        return self.member.token_of(partition, self.now) is not None

    def _next_client(self) -> str:
        self._incarnation += 1
        return f"{self.name}/{self._incarnation}"

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do it when ``seconds`` of the own clock are over, or the process goes on."""
        self._at(self.world.now + seconds / self._rate, action)

    def _at(self, due: float, action: Callable[[], None]) -> None:
        def run() -> None:
            if not self.alive:
                return
            if self.is_paused:
                self._at(self.resumes_at, action)
            else:
                action()

        self.world.scheduler.at(due, run)

    def received(self, action: Callable[[], None]) -> None:
        """Something arrived from the network now."""
        self._at(self.world.now, action)

    def tell(self, event: Event) -> None:
        """Hand an event to the member, and do what it says."""
        for effect in self.member.handle(event, self.now):
            self._do(effect)
        self.world.oracle.look(self)
        self._arm()

    def _arm(self) -> None:
        due = self.member.next_wakeup
        if due is None or not self.alive or due >= self._wakes_at:
            return
        self._wakes_at = due

        def wake() -> None:
            if self._wakes_at == due:
                self._wakes_at = _FOREVER
                self.tell(Wakeup())

        self._after(max(0.0, due - self.now) + 1e-6, wake)

    def _do(self, effect: Effect) -> None:
        match effect:
            case PublishHeartbeats(heartbeats=heartbeats):
                self.world.produce(self, dict(heartbeats))
            case Commit():
                self._commit(effect)
            case AskPartitionCount():
                self.world.ask_count(
                    self, lambda count: self.tell(PartitionCount(effect, count)) if count else None
                )
            case CallInduced() | CallLapsed() | CallFenced():
                self._call(effect)
            case LetGo(partitions=partitions):
                self._let_go(partitions)
            case Leave() | Fail():
                self._close(effect)
            case Report(fact=fact):
                self.world.report(self, fact)

    def _call(self, call: CallInduced | CallLapsed | CallFenced) -> None:
        duration_s = self.world.random.uniform(0.0, 0.15)
        if self.slow_handlers and not isinstance(call, CallFenced):
            self.slow_handlers -= 1
            duration_s = self.world.random.uniform(0.5, 1.3) * self.settings.max_poll_interval_s
        if isinstance(call, CallLapsed):
            self.lapsing[call.partition] = (call.limit, self.client)

        def returned() -> None:
            self.lapsing.pop(call.partition, None)
            self.tell(HandlerReturned(call.partition))

        self._after(duration_s, returned)

    def _commit(self, commit: Commit) -> None:
        client, epoch = self.client, self._epoch

        def answered(verdict: Verdict | None) -> None:
            if verdict is Verdict.OK:
                self.tell(CommitAnswered(commit))
            else:
                why = str(verdict or "no answer")
                failed = dict.fromkeys(commit.offsets, why)
                self.tell(CommitAnswered(commit, failed, fenced=verdict is Verdict.UNKNOWN))

        self.world.commit(self, client, epoch, commit.offsets, answered)

    def stop(self) -> None:
        """The host application wants to leave in order."""
        if not self._leaving:
            self._leaving = True
            self.tell(Stop())

    def _close(self, effect: Leave | Fail) -> None:
        if isinstance(effect, Leave):
            self.world.oracle.left_in_order(self)
        self.alive = False
        self.world.leave(self, self.client)

    def kill(self) -> None:
        """``kill -9``."""
        self.alive = False

    def _poll(self) -> None:
        if self.world.now < self.stuck_until:
            self._at(self.stuck_until, self._poll)
            return
        self._polled_at = self.now
        while self._callbacks and not self._blocked:
            self._serve(self._callbacks.popleft())
        if self._blocked or not self.alive:
            return
        self._read()
        if self.alive:
            self.tell(Polled())
            self._after(self.world.scenario.poll_s, self._poll)

    def _serve(self, callback: _Callback) -> None:
        partitions = callback.partitions
        if callback.kind is Assigned:
            found = {p: self.world.last_commit(self, p) for p in sorted(partitions)}
            for partition, last in found.items():
                known = last.offset if last else None
                end = self.world.topic.end(partition)
                self.positions[partition] = end if known is None else known
            self.owned |= partitions
            self.tell(Assigned(found))
        elif callback.kind is Lost:
            self.owned -= partitions
            self.tell(Lost(partitions))
        elif self.owned & partitions:
            self._blocked = set(self.owned & partitions)
            self.tell(Revoked(frozenset(self._blocked)))

    def _let_go(self, partitions: Partitions) -> None:
        done = self._blocked & partitions
        if not done:
            return
        self._blocked -= partitions
        self.owned -= done
        if not self._blocked:
            self._after(0.0, self._poll)
            if self.settings.protocol is GroupProtocol.CONSUMER:
                self._after(0.0, self._say_alive)

    def _read(self) -> None:
        if self.world.is_log_cut(self):
            return
        for partition in sorted(self.owned):
            offset = self.positions[partition]
            for record in self.world.readable(partition, offset, _RECORDS_PER_POLL):
                self.positions[partition] = offset + 1
                self.tell(
                    HeartbeatRead(
                        partition,
                        offset,
                        record.stamp,
                        int(record.appended_at * 1000),
                        True,
                        (self.world.now + self._wall_error_s) * 1000,
                    )
                )
                offset += 1
                if not self.alive:
                    return

    def _heartbeat(self) -> None:
        """The client's own thread: it goes on while the application does not poll."""
        settings = self.settings
        if self._is_member and self.now - self._polled_at > settings.max_poll_interval_s:
            self.world.leave(self, self.client)
            self._lose_membership()
        silent_s = self.now - self._answered_at
        is_classic = settings.protocol is GroupProtocol.CLASSIC
        if is_classic and self._is_member and silent_s > settings.session_timeout_s:
            self._lose_membership()
        self._say_alive()
        self._after(settings.alive_interval_s, self._heartbeat)

    def _say_alive(self) -> None:
        is_busy = bool(self._callbacks or self._blocked)
        if not self._is_member or (self._owes_rejoin and not is_busy):
            self._join()
        elif not self._joining:
            client, told = self.client, self.owned | self._to_come()
            self.world.say_alive(
                self, client, self._epoch, told, lambda answer: self._alive_answered(client, answer)
            )

    def _to_come(self) -> Partitions:
        return NONE.union(*(c.partitions for c in self._callbacks if c.kind is Assigned))

    def _join(self) -> None:
        is_busy = bool(self._callbacks or self._blocked)
        recently = self.now - self._polled_at < self.settings.max_poll_interval_s
        if self._joining or is_busy or not recently:
            return
        client = self.client
        self._joining = True

        def answered(answer: Answer | None) -> None:
            if client != self.client:
                return
            self._joining = False
            if answer is None:
                return
            if answer.verdict is Verdict.UNKNOWN:
                self._lose_membership()
                return
            self._is_member, self._owes_rejoin = True, False
            self._take(answer)

        self.world.join(self, client, self.owned, answered)

    def _alive_answered(self, client: str, answer: Answer | None) -> None:
        if client != self.client or answer is None:
            return
        self._answered_at = self.now
        match answer.verdict:
            case Verdict.UNKNOWN:
                self._lose_membership()
            case Verdict.REBALANCE:
                self._join()
            case _:
                if answer.partitions is not None:
                    self._take(answer)

    def _take(self, answer: Answer) -> None:
        self._answered_at = self.now
        self._epoch = answer.epoch
        has = self.owned | self._to_come()
        going = NONE.union(*(c.partitions for c in self._callbacks if c.kind is Revoked)) | self._blocked
        wanted = answer.partitions or NONE
        if (has - going) - wanted:
            self._callbacks.append(_Callback(Revoked, (has - going) - wanted))
        if wanted - has:
            self._callbacks.append(_Callback(Assigned, wanted - has))
        if (has - going) - wanted and self.settings.protocol is GroupProtocol.CLASSIC:
            self._owes_rejoin = True
            self._after(0.0, self._rejoin_when_idle)

    def _rejoin_when_idle(self) -> None:
        """Cooperative: once what was asked back is given up, take part in the rebalance that gives it on."""
        if not self._is_member or not self._owes_rejoin:
            return
        if self._callbacks or self._blocked:
            self._after(self.world.scenario.poll_s / 2, self._rejoin_when_idle)
        else:
            self._join()

    def _lose_membership(self) -> None:
        self.client = self._next_client()
        self._is_member = self._joining = self._owes_rejoin = False
        self._answered_at = self.now
        has = self.owned | self._to_come()
        self._callbacks.clear()
        if has:
            self._callbacks.append(_Callback(Lost, has))

    def suffers(self, fault: Fault, until: float) -> None:
        """Something befalls the process, until a true time."""
        match fault:
            case Fault.PAUSE_SHORT | Fault.PAUSE_LONG:
                self.resumes_at = max(self.resumes_at, until)
            case Fault.STUCK:
                self.stuck_until = max(self.stuck_until, until)
            case Fault.HEARTBEATS_LOST:
                self.heartbeats_lost_until = max(self.heartbeats_lost_until, until)
            case Fault.SLOW_HANDLER:
                self.slow_handlers += 1
            case _:
                if fault in (Fault.CUT_COORDINATOR, Fault.CUT_BOTH):
                    self.cut_coordinator_until = max(self.cut_coordinator_until, until)
                if fault in (Fault.CUT_LOG, Fault.CUT_BOTH):
                    self.cut_log_until = max(self.cut_log_until, until)

    def heal(self) -> None:
        """Nothing ails it any more; a process that is stopped goes on."""
        self.resumes_at = self.stuck_until = self.heartbeats_lost_until = 0.0
        self.cut_coordinator_until = self.cut_log_until = 0.0
        self.slow_handlers = 0
