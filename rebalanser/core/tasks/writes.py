"""The writes of a process: pending writes, the scripts that make requests of the store, and batches.

A pending write is retried until it is settled. A *script* is a generator: it yields a request, receives the
store's answer or its error, and returns a result. It does no I/O and takes no lock, so that threads and the
simulator run the same code. Threads run it by ``run_script``.

**Batches.** A write that the engine can't take fails alone: a refused batch is split in halves until it is
found. A write whose answer was lost is read back, then repeated if it is not in the store. While the engine
is away, or takes nothing, a pending write fails after ``timeout_s``. A *lasting* write, such as the end of a
claim, keeps its place instead until it can be written.

Tasks that are enqueued together are one write. If some of them exist, the others are written, all or none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast

from rebalanser.core.clock import GrowingDelay
from rebalanser.core.tasks.failures import ErrorKind, concerning, kind_of
from rebalanser.core.tasks.model import LimitId, Status, Stored, TaskId, TaskState, Update
from rebalanser.core.tasks.rules import Decision, Reason, Refused
from rebalanser.core.tasks.store import (
    Answer,
    Applied,
    Duplicate,
    Enqueue,
    EnqueueAll,
    Exists,
    FreeSlot,
    Move,
    OwnerEpoch,
    Paused,
    RateMoved,
    RateStart,
    SlotGone,
    TakeOver,
    Unknown,
    Write,
    WriteConflict,
    enqueued,
)
from rebalanser.errors import InternalError, InvalidTask, OutcomeUnknown, RebalanserError, RegistryUnavailable

Decide: TypeAlias = Callable[[Stored], Decision]
"""A rule of ``core.tasks.rules`` with all its arguments but the task."""
RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


class WriteFuture(Generic[ResultT]):
    """The result of a pending write, or its error, once it is settled. One thread settles it; any may look.

    As with an ``asyncio.Future``, a look does not wait. It needs no lock: each operation on the list of
    callbacks is atomic.
    """

    __slots__ = ("_callbacks", "_error", "_is_done", "_result")

    def __init__(self) -> None:
        self._is_done = False
        self._result: ResultT | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[WriteFuture[ResultT]], object]] = []

    def done(self) -> bool:
        """True if it has a result or an error."""
        return self._is_done

    def result(self) -> ResultT:
        """Return the result, or raise the error."""
        if (error := self.exception()) is None:
            return cast("ResultT", self._result)
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame

    def exception(self) -> BaseException | None:
        """Return the error, None if there is a result."""
        if not self._is_done:
            raise InternalError("a pending write is not settled yet")
        return self._error

    def set_result(self, result: ResultT) -> None:
        """Set the result, and call the callbacks."""
        self._settle(result, None)

    def set_exception(self, error: BaseException) -> None:
        """Set the error, and call the callbacks."""
        self._settle(None, error)

    def add_done_callback(self, callback: Callable[[WriteFuture[ResultT]], object]) -> None:
        """Call ``callback``, which must not raise, once it is done, in the thread that settles it."""
        self._callbacks.append(callback)
        if self._is_done:
            try:
                self._callbacks.remove(callback)
            except ValueError:  # the thread that settles it calls it
                return
            callback(self)

    def _settle(self, result: ResultT | None, error: BaseException | None) -> None:
        if self._is_done:
            raise InternalError("a pending write is settled twice")
        self._result, self._error = result, error
        self._is_done = True
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # the thread that added it calls it
                return
            callback(self)


class PendingWrite(ABC, Generic[ResultT]):
    """One write of one task. ``future`` gets its result.

    ``write`` returns the write, and ``answered`` takes the answer. If that was lost or the condition
    failed, ``found`` takes the stored task before the next write. A ``lasting`` pending write is kept
    while the engine is away, as no caller could repeat it.
    """

    after: Sequence[TaskId] = ()
    """Tasks whose earlier pending writes must be settled before this one is written."""

    def __init__(self, task: TaskId, *, lasting: bool = False) -> None:
        self.task = task
        self.lasting = lasting
        self.future: WriteFuture[ResultT] = WriteFuture()

    @property
    def settled(self) -> bool:
        """True if it has a result or an error."""
        return self.future.done()

    def fail(self, error: BaseException) -> None:
        """Set an error on the future, unless it is settled."""
        if not self.settled:
            self.future.set_exception(error)

    @abstractmethod
    def write(self) -> Write | None:
        """Return the next write; None if the pending write is settled instead."""

    @abstractmethod
    def answered(self, answer: Answer) -> None:
        """Take the answer; unless that settles it, ``found`` must come before the next write."""

    @abstractmethod
    def found(self, stored: Stored | None) -> None:
        """Take the task as it is stored now, None if it does not exist."""


class PendingMove(PendingWrite["Stored | Refused"]):
    """Moves a task to its next state by a rule. The result is the moved task, or why it is refused.

    ``update`` is written with the move. With an ``epoch`` the move needs that epoch to be the partition's and
    the queue not to be paused. With a ``slot`` a claim is refused once the slot is gone, and with a ``start``
    once the mark of its rate limit is another. A subclass may decide itself: see ``decision``.
    """

    def __init__(
        self,
        stored: Stored,
        decide: Decide | None,
        *,
        epoch: OwnerEpoch | None = None,
        update: Update | None = None,
        slot: FreeSlot | None = None,
        start: RateStart | None = None,
        lasting: bool = False,
    ) -> None:
        super().__init__(stored.head.id, lasting=lasting)
        self._stored = stored
        self._decide = decide
        self._epoch = epoch
        self._update = update
        self._slot = slot
        self._start = start
        self._prevented: Reason | None = None
        """Reason of a refusal other than the task's revision."""
        self.with_payload = False
        """True if the answer should have the payload, which saves a read."""
        self._next: TaskState | None = None
        self._refused: list[int] = []
        """Revisions at which the condition failed."""

    def decision(self, stored: Stored) -> Decision:
        """Return the next state of a task, or why it is refused."""
        if self._decide is None:
            raise InternalError("a move has no rule")
        return self._decide(stored)

    def write(self) -> Move | None:
        """Return the move to the state that the rule gives."""
        stored = self._stored
        decision = self.decision(stored)
        if isinstance(decision, Refused) or decision == stored.state:
            self.future.set_result(decision if isinstance(decision, Refused) else stored)
            return None
        self._next = decision
        return Move(
            stored.head.id,
            stored.head.queue,
            stored.partition,
            stored.revision,
            decision,
            self._epoch,
            self._update,
            stored.head,
            self._slot if decision.status is Status.CLAIMED else None,
            self._start if decision.status is Status.CLAIMED else None,
            self.with_payload and decision.status is Status.CLAIMED,
        )

    def answered(self, answer: Answer) -> None:
        """Settle the pending write if the move was applied."""
        if isinstance(answer, Applied):
            assert self._next is not None
            before = self._stored
            self.future.set_result(Stored(before.head, self._next, answer.revision, before.partition))
        elif isinstance(answer, WriteConflict):
            self._refused.append(self._stored.revision)
        elif isinstance(answer, SlotGone):
            self._prevented = Reason.NO_SLOT
        elif isinstance(answer, Paused):
            self._prevented = Reason.PAUSED
        elif isinstance(answer, RateMoved):
            self._prevented = Reason.RATE_MOVED
        else:
            raise InternalError(f"a move was answered {answer!r}")

    def found(self, stored: Stored | None) -> None:
        """Continue from the stored task; two refusals at one revision mean that the epoch is over.

        One is not enough: an engine may refuse a write because of an interrupted collection, which it undoes.
        """
        if stored is None:
            self.future.set_result(Refused(Reason.GONE))
        elif self._prevented is not None and stored.revision == self._stored.revision:
            self.future.set_result(Refused(self._prevented))
        elif self._epoch is not None and self._refused.count(stored.revision) > 1:
            self.future.set_result(Refused(Reason.DEPOSED))
        else:
            self._stored = stored


class PendingEnqueue(PendingWrite[Answer]):
    """Enqueues one task or several. The result is the answer; after a lost one it is repeated (SK-3)."""

    def __init__(self, enqueue: Enqueue | EnqueueAll) -> None:
        if isinstance(enqueue, EnqueueAll):
            super().__init__(enqueue.enqueues[0].task.head.id)
            self.after = tuple(task for each in enqueue.enqueues for task in each.task.head.after)
        else:
            super().__init__(enqueue.task.head.id)
            self.after = enqueue.task.head.after
        self._enqueue = enqueue

    def write(self) -> Enqueue | EnqueueAll:
        """Return the same write each time."""
        return self._enqueue

    def answered(self, answer: Answer) -> None:
        """Settle the pending write. An existing task with this content was enqueued by an earlier try."""
        if isinstance(answer, WriteConflict):
            raise InternalError(f"an enqueue was answered {answer!r}")
        assert isinstance(answer, Applied | Exists | Duplicate | Unknown)
        self.future.set_result(answer)

    def found(self, stored: Stored | None) -> None:
        """Do nothing: the repeated enqueue has the answer."""


class PendingTakeOver(PendingWrite[None]):
    """Stores a partition's new epoch (SK-13); the future raises if a newer one is stored."""

    def __init__(self, take_over: TakeOver) -> None:
        super().__init__(f"{take_over.queue} {take_over.epoch.partition}")
        self._take_over = take_over

    def write(self) -> TakeOver:
        """Return the same write each time."""
        return self._take_over

    def answered(self, answer: Answer) -> None:
        """Settle the pending write."""
        if isinstance(answer, Applied):
            self.future.set_result(None)
        else:
            epoch = self._take_over.epoch
            self.future.set_exception(
                RegistryUnavailable(
                    f"partition {epoch.partition} has a newer owner than that of {epoch.token}"
                )
            )

    def found(self, stored: Stored | None) -> None:
        """Do nothing: the repeated write has the answer."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Carry out writes; the answer has one for each, as of ``apply``."""

    writes: Sequence[Write]


@dataclass(frozen=True, slots=True)
class ReadTasks:
    """Read tasks; the answer has those that exist, by id."""

    ids: Sequence[TaskId]


@dataclass(frozen=True, slots=True)
class ReadPage:
    """Read open tasks of a partition; the answer is a ``Page``."""

    partition: int
    after: TaskId | None
    limit: int


@dataclass(frozen=True, slots=True)
class ReadPayloads:
    """Read payloads; the answer has those that could be read, by id."""

    ids: Sequence[TaskId]


@dataclass(frozen=True, slots=True)
class ReadRates:
    """Read the marks of rate limits; the answer has those that exist, by limit."""

    limits: Sequence[LimitId]


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit pending writes to the batcher; answered at once."""

    pending_writes: Sequence[PendingWrite[Any]]


@dataclass(frozen=True, slots=True)
class WriteHere(Submit):
    """Submit pending writes and, if nothing else is to be written, write them before the answer."""


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until all pending writes are settled, also those that fail."""

    pending_writes: Sequence[PendingWrite[Any]]


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait before the next request."""

    seconds: float


Request: TypeAlias = Apply | ReadTasks | ReadPage | ReadPayloads | ReadRates | Submit | Await | Sleep
Script: TypeAlias = Generator[Request, Any, ResultT]


def run_script(
    script: Generator[RequestT, Any, ResultT],
    perform: Callable[[RequestT], Any],
    lock: AbstractContextManager[object] | None = None,
) -> ResultT:
    """Run a script, and return its result; errors of requests are thrown into it.

    ``lock`` is held while the script runs, and released during requests.
    """
    send: Callable[[Any], RequestT] = script.send
    throw: Callable[[Any], RequestT] = script.throw
    if lock is not None:
        send, throw = _within(lock, send), _within(lock, throw)
    try:
        request = send(None)
        while True:
            try:
                answer = perform(request)
            except BaseException as error:
                request = throw(error)
            else:
                request = send(answer)
    except StopIteration as ended:
        result: ResultT = ended.value
        return result


def _within(
    lock: AbstractContextManager[object], advance: Callable[[Any], RequestT]
) -> Callable[[Any], RequestT]:
    def locked(answer: Any) -> RequestT:
        with lock:
            return advance(answer)

    return locked


MAX_BATCH: Final = 512
"""Maximum pending writes of one batch."""
MAX_ROUNDS: Final = 50
"""Maximum rounds of writing a batch and reading it back before its pending writes fail."""
MAX_QUICK_RETRIES: Final = 3
"""Lost answers that are retried even after the timeout, as a broken connection is replaced at once."""
_SHORTEST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.5


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

        If the first request was made already, the script continues after its error.

        Raises:
            OutcomeUnknown: answers were lost until the timeout.
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
