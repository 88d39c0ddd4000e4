"""Pending writes on behalf of waiting callers, each retried until it is settled."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar, cast

from rebalanser.core.tasks.model import State, Status, Stored, TaskId, Update
from rebalanser.core.tasks.rules import Decision, Reason, Refused
from rebalanser.core.tasks.slots import FreeSlot
from rebalanser.core.tasks.store import (
    Answer,
    Applied,
    Conflict,
    Duplicate,
    Enqueue,
    EnqueueAll,
    Epoch,
    Exists,
    Move,
    Paused,
    RateMoved,
    RateStart,
    SlotGone,
    TakeOver,
    Unknown,
    Write,
)
from rebalanser.errors import InternalError, RegistryUnavailable
from rebalanser.runtime.logs import get_logger

Decide: TypeAlias = Callable[[Stored], Decision]
"""A rule of ``core.tasks.rules`` with all that it needs but the task."""
ResultT = TypeVar("ResultT")
_log = get_logger()


class WriteFuture(Generic[ResultT]):
    """The result of a pending write, or its error, once it is settled. May be used from any thread.

    It is used as a ``concurrent.futures.Future``, but can't be cancelled. That one makes a condition,
    and takes it at each look; a worker has two futures for each task.
    """

    __slots__ = ("_callbacks", "_error", "_is_done", "_lock", "_result")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_done = False
        self._result: ResultT | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[WriteFuture[ResultT]], object]] = []

    def done(self) -> bool:
        """True if it has a result or an error."""
        return self._is_done

    def result(self, timeout: float | None = None) -> ResultT:
        """Return the result, or raise the error; waits for it, at most ``timeout`` seconds.

        Raises:
            TimeoutError: it has none in time.
        """
        if (error := self.exception(timeout)) is None:
            return cast("ResultT", self._result)
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error, None if there is a result; waits as ``result`` does."""
        if not self._is_done:
            self._await(timeout)
        return self._error

    def set_result(self, result: ResultT) -> None:
        """Set the result, and call the callbacks."""
        self._settle(result, None)

    def set_exception(self, error: BaseException) -> None:
        """Set the error, and call the callbacks."""
        self._settle(None, error)

    def add_done_callback(self, callback: Callable[[WriteFuture[ResultT]], object]) -> None:
        """Call ``callback`` once it is done, in the thread that settles it; now if it is."""
        with self._lock:
            if not self._is_done:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def _settle(self, result: ResultT | None, error: BaseException | None) -> None:
        with self._lock:
            if self._is_done:
                raise InternalError("a pending write is settled twice")
            self._result, self._error = result, error
            self._is_done = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[WriteFuture[ResultT]], object]) -> None:
        try:
            callback(self)
        except Exception as error:  # the other writes of its batch go on
            _log.error("a callback of a write raised", action="write_callback_failed", exc_info=error)

    def _await(self, timeout: float | None) -> None:
        settled = threading.Lock()
        settled.acquire()
        self.add_done_callback(lambda _: settled.release())
        if not settled.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            raise TimeoutError(f"a write was not settled within {timeout:g} s")


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


def await_all(pending_writes: Sequence[PendingWrite[Any]]) -> None:
    """Wait until all pending writes are settled, also those that fail."""
    for pending in reversed(pending_writes):  # once the last of a batch is settled, so are the others
        pending.future.exception()


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
        epoch: Epoch | None = None,
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
        self._next: State | None = None
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
        elif isinstance(answer, Conflict):
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
        if isinstance(answer, Conflict):
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
