"""Selects the pending writes of the next batch, and settles each of them. Pure.

A write that the engine can't take fails alone: a refused batch is split in halves until it is found. A write
whose answer was lost is read back, then repeated if it is not in the store. While the engine is away, or
takes nothing, a pending write fails after ``timeout_s``. A *lasting* write, such as the end of a claim, keeps
its place instead until it can be written.

Tasks that are enqueued together are one write. If some of them exist, the others are written, all or none.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeVar

from rebalanser.core.clock import GrowingDelay
from rebalanser.core.tasks.model import Stored, TaskId
from rebalanser.core.tasks.store import Answer, Enqueue, EnqueueAll, Exists, Unknown, Write, enqueued
from rebalanser.errors import InvalidTask, OutcomeUnknown, RebalanserError, RegistryUnavailable
from rebalanser.tasks.functions import concerning
from rebalanser.tasks.loops import ErrorKind, kind_of
from rebalanser.tasks.writes.pending import PendingEnqueue, PendingWrite
from rebalanser.tasks.writes.script import (
    Apply,
    Await,
    ReadPayloads,
    ReadTasks,
    Request,
    Script,
    Sleep,
    Submit,
)

MAX_BATCH: Final = 512
"""Maximum pending writes of one batch."""
MAX_ROUNDS: Final = 50
"""Maximum rounds of writing a batch and reading it back before its pending writes fail."""
MAX_QUICK_RETRIES: Final = 3
"""Lost answers that are retried even after the timeout, as a broken connection is replaced at once."""
_SHORTEST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.5

ResultT = TypeVar("ResultT")


class Batches:
    """The pending writes of a process that wait or are being written. Not thread-safe.

    At most ``max_in_flight`` batches are written at the same time, and never two with one task.
    """

    def __init__(self, max_in_flight: int = 1) -> None:
        self.flushes = 0
        """Number of callers that wait until all is settled. Nothing is kept while there are any."""
        self.is_closing = False
        self._max_in_flight = max_in_flight
        self._waiting: deque[PendingWrite[object]] = deque()
        self._in_flight: list[list[PendingWrite[object]]] = []
        self._busy: set[str] = set()
        """Tasks of the batches in flight."""

    @property
    def has_waiting(self) -> bool:
        """True if pending writes wait."""
        return bool(self._waiting)

    @property
    def can_take(self) -> bool:
        """True if pending writes wait, and another batch may be written now."""
        return bool(self._waiting) and len(self._in_flight) < self._max_in_flight

    @property
    def are_in_flight(self) -> bool:
        """True if a batch is being written."""
        return bool(self._in_flight)

    def unsettled(self) -> Iterator[PendingWrite[object]]:
        """Iterate over the pending writes that wait or are being written."""
        return chain(*self._in_flight, self._waiting)

    def add(self, pending_writes: Sequence[PendingWrite[ResultT]]) -> None:
        """Append pending writes to those that wait."""
        self._waiting.extend(pending_writes)  # type: ignore[arg-type] # results are not looked at here

    def take(self, batch: list[PendingWrite[object]]) -> bool:
        """Fill the next batch, if one may be written now; False if there is nothing for it.

        A batch has at most one pending write of each task. It has none of a task that is in flight, or that
        comes after one in flight. The other pending writes keep their places.
        """
        if not self._waiting or len(self._in_flight) >= self._max_in_flight:
            return False
        self._in_flight.append(batch)
        taken: set[str] = set()
        kept: deque[PendingWrite[object]] = deque()
        blocked = self._busy.copy()
        while self._waiting and len(batch) < MAX_BATCH:
            pending = self._waiting.popleft()
            if (
                pending.task in taken
                or pending.task in blocked
                or (blocked and not blocked.isdisjoint(pending.after))
            ):
                kept.append(pending)
                blocked.add(pending.task)
            else:
                batch.append(pending)
                taken.add(pending.task)
        self._waiting.extendleft(reversed(kept))
        self._busy |= taken
        if not batch:
            self._in_flight.pop()
        return bool(batch)

    def take_alone(self, pending: PendingWrite[ResultT], batch: list[PendingWrite[Any]]) -> bool:
        """Fill a batch with a pending write that was not added, unless others wait or are being written."""
        if self._waiting or self._in_flight:
            return False
        self._in_flight.append(batch)
        batch.append(pending)
        self._busy.add(pending.task)
        return True

    def land(self, batch: list[PendingWrite[object]]) -> None:
        """Allow further writes of the tasks of a batch; no-op if it is not in flight.

        May be called again if it was interrupted.
        """
        others = [each for each in self._in_flight if each is not batch]
        if len(others) < len(self._in_flight):
            self._busy.difference_update(pending.task for pending in batch)
            self._in_flight = others

    def keep(self, batch: Sequence[PendingWrite[object]], error: BaseException) -> list[PendingWrite[object]]:
        """Put back, in their places, the lasting writes of a batch that ended with an error."""
        if self.is_closing or self.flushes or kind_of(error) is ErrorKind.POISON:
            return []
        kept = [pending for pending in batch if pending.lasting and not pending.settled]
        self._waiting.extendleft(reversed(kept))
        return kept

    def forget_flights(self) -> None:
        """Forget what is in flight: the parent of this process writes it."""
        self._in_flight = []


@dataclass(frozen=True, slots=True)
class FirstError:
    """Error of a first request, made before the script, and the time at which that request began."""

    error: Exception
    began_at: float


class Settlement:
    """Writes a batch until each of its pending writes is settled. ``now`` gives seconds of a monotonic clock.

    Requests are retried for ``timeout_s`` seconds while the engine is away.
    """

    def __init__(
        self, pending_writes: Sequence[PendingWrite[object]], timeout_s: float, now: Callable[[], float]
    ) -> None:
        self._pending = pending_writes
        self._timeout_s = timeout_s
        self._now = now

    def script(self, failed: FirstError | None = None) -> Script[None]:
        """Write all pending writes, and read back the unsettled ones, until all are settled.

        If the first request was made already, it goes on after its error.

        Raises:
            OutcomeUnknown: answers were lost until the time was up.
            RegistryUnavailable: the engine stayed away, or others changed the task each time; no effect.
        """
        pending_writes = self._pending
        gives_up_at = self._gives_up_at(failed)
        delay = GrowingDelay(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S)
        losses = 0
        lost: OutcomeUnknown | None = None
        for _ in range(MAX_ROUNDS):
            writes = _writes_of(pending_writes, lost)
            if not writes:
                return
            try:
                newly_lost = yield from self._write(writes, failed)
            except RebalanserError as error:
                raise lost or error from error
            failed = None
            lost = newly_lost or lost
            pending_writes = [pending for pending, _ in writes if not pending.settled]
            if not pending_writes:
                return
            yield from self._read_back(pending_writes, lost)
            pending_writes = [pending for pending in pending_writes if not pending.settled]
            if pending_writes and newly_lost is not None:
                losses += 1
                if losses > MAX_QUICK_RETRIES and self._now() >= gives_up_at:
                    break
                yield Sleep(delay.after(0.0))
        if pending_writes:
            # A write that may take effect must not be reported as one without effect.
            raise lost or RegistryUnavailable("others changed the task again and again; try again")

    def _write(
        self, writes: Sequence[tuple[PendingWrite[object], Write]], failed: FirstError | None = None
    ) -> Script[OutcomeUnknown | None]:
        """Write once; return the error if the outcome is unknown."""
        request = Apply([write for _, write in writes])
        try:
            answers: Sequence[Answer] = yield from self._patiently(request, failed)
        except OutcomeUnknown as error:
            return error
        except Exception as error:
            if kind_of(error) is ErrorKind.OUTAGE:
                raise
            return (yield from self._write_apart(writes, error))
        for (pending, _), answer in zip(writes, answers, strict=True):
            try:
                pending.answered(answer)
            except Exception as error:
                _fail(pending, error)
        return None

    def _write_apart(
        self, writes: Sequence[tuple[PendingWrite[object], Write]], error: Exception
    ) -> Script[OutcomeUnknown | None]:
        """Write a refused batch in halves, to find the pending write that the engine can't take."""
        if len(writes) == 1:
            fail_all([pending for pending, _ in writes], error)
            return None
        middle = len(writes) // 2
        first = yield from self._write(writes[:middle])
        try:
            second = yield from self._write(writes[middle:])
        except RebalanserError as outage:
            raise first or outage from outage
        return first or second

    def _read_back(
        self, pending_writes: Sequence[PendingWrite[object]], lost: OutcomeUnknown | None
    ) -> Script[None]:
        try:
            found: Mapping[TaskId, Stored] = yield from self._patiently(
                ReadTasks([pending.task for pending in pending_writes])
            )
        except RegistryUnavailable as error:
            raise lost or error from error
        for pending in pending_writes:
            try:
                pending.found(found.get(pending.task))
            except Exception as error:
                _fail(pending, error)

    def _gives_up_at(self, failed: FirstError | None) -> float:
        return (self._now() if failed is None else failed.began_at) + self._timeout_s

    def _patiently(self, request: Request, failed: FirstError | None = None) -> Script[Any]:
        """Make a request; retry it while the engine is away."""
        gives_up_at = self._gives_up_at(failed)
        delay: GrowingDelay | None = None
        while True:
            try:
                if failed is not None:
                    error, failed = failed.error, None
                    raise error
                return (yield request)
            except RegistryUnavailable:
                if self._now() >= gives_up_at:
                    raise
            delay = delay or GrowingDelay(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S)
            yield Sleep(delay.after(0.0))


def fail_all(pending_writes: Iterable[PendingWrite[object]], error: BaseException) -> None:
    """Set an error on the futures of all unsettled pending writes."""
    for pending in pending_writes:
        pending.fail(error)


def _writes_of(
    pending_writes: Iterable[PendingWrite[object]], lost: OutcomeUnknown | None
) -> list[tuple[PendingWrite[object], Write]]:
    writes: list[tuple[PendingWrite[object], Write]] = []
    for pending in pending_writes:
        try:
            write = pending.write()
        except Exception as error:
            _fail(pending, error, lost)
        else:
            if write is not None:
                writes.append((pending, write))
    return writes


def _fail(pending: PendingWrite[object], error: Exception, lost: OutcomeUnknown | None = None) -> None:
    """Fail a pending write whose own code raised an error; the others of its batch go on.

    If the error is an outage, it fails with ``lost``, as its earlier write may take effect.
    """
    unknown = lost if kind_of(error) is ErrorKind.OUTAGE else None
    pending.fail(unknown or error)


def enqueue_together(tasks: Sequence[Enqueue], places: Sequence[str] = ()) -> Script[None]:
    """Enqueue tasks, all or none of those that do not exist (SK-3).

    An error of one of them names its place, if there are ``places``.

    Raises:
        InvalidTask: two of them have one id.
        TaskExists: an id is taken by other content.
        UnknownTask: one is to come after a task that does not exist.
        RegistryUnavailable: the engine is away, or their ids are made and deleted again and again.
    """
    left = {each.task.head.id: each for each in tasks}
    if len(left) < len(tasks):
        twice = Counter(each.task.head.id for each in tasks).most_common(1)[0][0]
        raise InvalidTask(f"two of the tasks that are enqueued together have one id, {twice}")
    place_of = dict(zip(left, places, strict=False))
    for _ in range(len(tasks) + 1):
        if not left:
            return
        pending = PendingEnqueue(EnqueueAll(tuple(left.values())))
        yield Submit([pending])
        yield Await([pending])
        match pending.future.result():
            case Exists():
                found: Mapping[TaskId, Stored] = yield ReadTasks(list(left))
                payloads: Mapping[TaskId, bytes] = yield ReadPayloads(list(left))
                present = found.keys() & payloads.keys()
                for task in present:
                    with concerning(place_of.get(task, "")):
                        enqueued(left[task], Exists(found[task], payloads[task]))
                left = {task: each for task, each in left.items() if task not in present}
            case Unknown(ids=ids) as answer:
                waits = (each for each in left.values() if not set(ids).isdisjoint(each.task.head.after))
                refused = next(waits)
                with concerning(place_of.get(refused.task.head.id, "")):
                    enqueued(refused, answer)
            case _:
                return
    raise RegistryUnavailable("tasks with these ids came and went again and again; try again")
