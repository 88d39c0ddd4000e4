"""Claims from the engine's index, as SQLite has it: no process owns a partition (SK-5, SK-13, SK-20).

Each process has its own engine object, which notes when it first saw claims and marks of other clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from rebalanser.core.tasks import rules
from rebalanser.core.tasks.claims import ClaimBest, IndexRequest, IndexRequests, ReadQueuePause
from rebalanser.core.tasks.clocks import ForeignTerms, full_at
from rebalanser.core.tasks.model import ClaimState, Head, LimitId, RateMark, Status, Stored, TaskId, rate_of
from rebalanser.core.tasks.rules import FailedDependency, Refused
from rebalanser.core.tasks.slots import Rooms
from rebalanser.core.tasks.store import ClaimAnswer, ClaimQuery
from rebalanser.tasks.pauses import QUEUE as QUEUE_PAUSE
from simulation.kernel.reports import Violation
from simulation.tasks.claiming import ClaimingProcess
from simulation.tasks.engine import SimulatedEngine
from simulation.tasks.owning import QUEUE
from simulation.tasks.process import Script
from simulation.tasks.scenario import BUFFER_S
from simulation.tasks.writing import driven


class IndexedEngine:
    """The engine object of one process: it reads without a lock, then claims in one transaction."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._foreign = ForeignTerms[TaskId]()
        self._marks: dict[LimitId, tuple[RateMark, float]] = {}
        """Marks of rate limits of other clocks, each with the time at which it was first seen."""
        self._next_room: float | None = None

    def claim(self, query: ClaimQuery, write: Callable[[Callable[[], ClaimAnswer]], object]) -> object:
        """Look for ready tasks, claim the best by ``write``, which may refuse, and return the answer.

        A look that finds nothing writes nothing, so it succeeds while the store takes no writes.
        """
        engine, clock = self._engine, query.term.clock
        pause = engine.pauses.get(QUEUE_PAUSE)
        if pause is not None:
            return ClaimAnswer((), pause=pause)
        now = query.clock()
        over = self._foreign_over(clock, now, query.buffer_s)
        own = [each for each in self._running() if _claim_of(each).term.clock == clock]
        over += [each for each in own if _claim_of(each).term.ends_at_s + query.buffer_s <= now]
        self._next_room = None
        is_ready = any(self._is_wanted(each, query, now) for each in [*self._open(), *over])
        if is_ready:
            return write(lambda: self._claim(query, over))
        return self._answer(query, ())

    def ready_names(self) -> Collection[str]:
        """Read the functions that have ready tasks."""
        return {each.head.name for each in self._open() if self._is_free(each)}

    def _open(self) -> list[Stored]:
        """Return the tasks that wait, or whose claim is known to be over."""
        return [
            each
            for each in self._engine.tasks.values()
            if each.state.status is Status.WAITING
            or (each.state.status is Status.CLAIMED and self._is_known_over(each))
        ]

    def _running(self) -> list[Stored]:
        """Return the claimed tasks whose claim is not known to be over."""
        return [
            each
            for each in self._engine.tasks.values()
            if each.state.status is Status.CLAIMED and not self._is_known_over(each)
        ]

    def _is_known_over(self, stored: Stored) -> bool:
        """True if this very claim was found to be over; one that was renewed since is not."""
        return self._engine.over.get(stored.head.id) == stored.revision

    def _foreign_over(self, clock: str, now: float, buffer_s: float) -> list[Stored]:
        """Return the claims of other clocks that are over, as far as this process knows."""
        if self._foreign.skips(now):
            return []
        found = {each.head.id: each for each in self._running() if _claim_of(each).term.clock != clock}
        claims = {task: _claim_of(each) for task, each in found.items()}
        return [found[task] for task in self._foreign.learn(claims, now, buffer_s)]

    def _is_free(self, stored: Stored) -> bool:
        """True if only time and limits prevent that a task is claimed, or becomes dead."""
        head, state = stored.head, stored.state
        if state.claim is not None or self._failed(head) is not None:
            return True
        statuses = [self._status(needed) for needed in head.after]
        return all(rules.settles(status, head.after_failure) for status in statuses)

    def _status(self, task: TaskId) -> Status | None:
        stored = self._engine.tasks.get(task)
        return None if stored is None else stored.state.status

    def _failed(self, head: Head) -> FailedDependency | None:
        for needed in head.after:
            status = self._status(needed)
            if status is not None and rules.fails(status, head.after_failure):
                return FailedDependency(needed, status)
        return None

    def _is_wanted(self, stored: Stored, query: ClaimQuery, now: float) -> bool:
        """True if a task can be claimed now, or becomes dead instead."""
        head, state = stored.head, stored.state
        is_due = state.status is Status.CLAIMED or state.due <= query.wall
        is_named = query.names is None or head.name in query.names
        if not (is_due and is_named and self._is_free(stored)):
            return False
        return self._has_place(stored) and self._has_rate(head, query.term.clock, now)

    def _has_place(self, stored: Stored) -> bool:
        """True if its limit has room; its own claim does not count, as it is replaced."""
        head = stored.head
        if not head.max_running or stored.state.status is Status.CLAIMED:
            return True
        claimed = [each for each in self._engine.tasks.values() if each.state.status is Status.CLAIMED]
        return sum(each.head.limit == head.limit for each in claimed) < head.max_running

    def _has_rate(self, head: Head, clock: str, now: float) -> bool:
        """True if its rate limit allows a start now; else note the time of the next one (SK-23)."""
        if not head.rate_limit:
            return True
        rate = rate_of(head.rate_limit)
        room_at = self._full_at(head.limit, clock, now) - (rate.burst - 1) * rate.every_s
        if room_at <= now:
            return True
        self._next_room = room_at if self._next_room is None else min(room_at, self._next_room)
        return False

    def _full_at(self, limit: LimitId, clock: str, now: float) -> float:
        mark, learnt_at = self._engine.rates.get(limit), now
        if mark is not None and mark.clock != clock:
            known, learnt_at = self._marks.get(limit, (None, now))
            if known != mark:
                learnt_at = now
                self._marks[limit] = mark, now
        return max(now, full_at(mark, learnt_at, clock))

    def _claim(self, query: ClaimQuery, over: Collection[Stored]) -> ClaimAnswer:
        """Mark the claims that are over, then claim the best ready tasks: one transaction."""
        engine = self._engine
        for each in over:
            engine.over[each.head.id] = each.revision
        now, self._next_room = query.clock(), None
        holders = list(query.holders)
        claimed: list[tuple[Stored, bytes | None]] = []
        while holders:
            ready = [each for each in self._open() if self._is_wanted(each, query, now)]
            if len(holders) <= query.ahead:
                ready = [each for each in ready if not each.head.rate_limit]
            if not ready:
                break
            stored = self._claimed(min(ready, key=_rank), holders[0], query, now)
            if stored.state.status is Status.CLAIMED:
                claimed.append((stored, engine.payloads[stored.head.id] if len(claimed) % 2 else None))
                del holders[0]
        return self._answer(query, claimed)

    def _claimed(self, before: Stored, holder: str, query: ClaimQuery, now: float) -> Stored:
        engine, head = self._engine, before.head
        is_over = before.state.status is Status.CLAIMED
        state = rules.claim(
            head, before.state, holder, query.worker, query.term, over=is_over, failed=self._failed(head)
        )
        if isinstance(state, Refused):
            raise Violation("SK-5", f"a ready task is refused: {state.reason}")
        if state.status is Status.CLAIMED:
            engine.oracle.used(head.id, holder)
            if head.rate_limit:
                clock = query.term.clock
                debt_s = self._full_at(head.limit, clock, now) + rate_of(head.rate_limit).every_s - now
                engine.rates[head.limit] = RateMark(debt_s, clock, now, query.wall + debt_s)
        return engine.decided(before, state)

    def _answer(self, query: ClaimQuery, claimed: Collection[tuple[Stored, bytes | None]]) -> ClaimAnswer:
        now = query.clock()
        due = [each.state.due for each in self._open() if each.state.due > query.wall]
        ends = [
            _claim_of(each).term.ends_at_s + query.buffer_s
            for each in self._running()
            if _claim_of(each).term.clock == query.term.clock
        ]
        times = [*ends, self._foreign.next_over(), self._next_room]
        next_over = min((each for each in times if each is not None and each > now), default=None)
        others_ready = any(self._is_free(each) for each in self._open())
        return ClaimAnswer([*claimed], min(due, default=None), next_over, others_ready=others_ready)


def _claim_of(stored: Stored) -> ClaimState:
    claim = stored.state.claim
    assert claim is not None
    return claim


def _rank(stored: Stored) -> tuple[int, TaskId]:
    return -stored.head.priority, stored.head.id


class IndexSource:
    """Claims from the engine's index; the product decides what to request, and when."""

    def __init__(self, process: ClaimingProcess) -> None:
        self.process = process
        self.requests = IndexRequests(
            QUEUE,
            process.name,
            process.name,
            process.clock.now,
            process.clock.wall,
            process.term,
            BUFFER_S,
        )
        self._engine = IndexedEngine(process.world.engine)
        self._told: tuple[bytes | None] | None = None
        """The pause in the answer to the last claim; None before one."""
        process.world.engine.followers.append(self._follow)
        process.world.engine.pause_followers.append(self._wake_later)

    @property
    def is_paused(self) -> bool:
        """True if the queue is paused, as far as this process knows."""
        return self.requests.pause is not None

    def claim(
        self, limit: int, names: Collection[str] | None, worker: str | None = None, ahead: int = 0
    ) -> Script:
        """Claim the best tasks."""
        self._told = None
        claimed = yield from driven(self.requests.claim(limit, names, worker, ahead), self._perform)
        if self._told != (self.requests.pause,):
            raise Violation("SK-23", f"{self.process.name} does not know the pause as the store has told it")
        return claimed

    def claim_for_others(self) -> Script:
        """Read the pause: any process claims for itself."""
        yield from driven(self.requests.read_pause(), self._perform)

    def _perform(self, request: IndexRequest) -> Script:
        process, network = self.process, self.process.world.network
        match request:
            case ClaimBest(query=query):
                wish = network.claim(process, lambda write: self._engine.claim(query, write))
                answer: ClaimAnswer = yield from process.answered(wish)
                self._told = (answer.pause,)
                return answer
            case ReadQueuePause():
                pauses = process.world.engine.pauses
                self._told = yield from process.asked(lambda: (pauses.get(QUEUE_PAUSE),))
                return self._told[0]

    def next_s(self, names: Collection[str] | None) -> float | None:
        """Return the seconds until there may be a task to claim; None if only a commit can bring it."""
        at = self.requests.next_wakeup(names)
        return None if at is None else at - self.process.now

    def report_unknown(self) -> Script:
        """Read the functions of ready tasks, unless the last claim found none."""
        if self.requests.others_ready:
            yield from self.process.asked(self._engine.ready_names)

    def offer(self, rooms: Rooms) -> None:
        """No-op: the store hands out all claims."""

    def hurry(self) -> None:
        """No-op: nothing is offered."""

    def retire(self) -> Script:
        """No-op: nothing is claimed for other processes."""
        yield from ()

    def lost(self) -> None:
        """Look for tasks again, as a commit may have been missed."""
        self.process.wake()

    def _follow(self, _: Stored) -> None:
        self._wake_later()

    def _wake_later(self) -> None:
        """Report a commit, late while the watch is broken."""
        process, world = self.process, self.process.world
        if process.alive:
            late_s = max(world.scenario.latency_s, process.drops_until - world.now)
            world.after(late_s, lambda: process.received(process.wake))
