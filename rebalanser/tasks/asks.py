"""What is asked of the store on behalf of somebody who waits: one write, made again until it is settled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Generic, TypeAlias, TypeVar

from rebalanser.errors import InternalError, RegistryUnavailable
from rebalanser.tasks.engine import (
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
    SlotGone,
    TakeOver,
    Unknown,
    Write,
)
from rebalanser.tasks.free_slots import FreeSlot
from rebalanser.tasks.model import State, Status, Stored, TaskId, Update
from rebalanser.tasks.rules import Decision, Reason, Refused

Decide: TypeAlias = Callable[[Stored], Decision]
"""A rule of :mod:`~rebalanser.tasks.rules` with all that it needs but the task."""
ResultT = TypeVar("ResultT")


class Ask(ABC, Generic[ResultT]):
    """One write about one task. ``future`` gets its result.

    Written with :meth:`write`, then told the answer by :meth:`answered`; or, where that was lost or the
    condition did not hold, told what is there now by :meth:`found`, and written again. One that is
    ``lasting`` is kept for as long as the engine is away: nobody could ask again.
    """

    after: Sequence[TaskId] = ()
    """Tasks about which all earlier asks must be settled before this one is written."""

    def __init__(self, task: TaskId, *, lasting: bool = False) -> None:
        self.task = task
        self.lasting = lasting
        self.future: Future[ResultT] = Future()

    @property
    def settled(self) -> bool:
        """Whether there is nothing more to do."""
        return self.future.done()

    def fail(self, error: BaseException) -> None:
        """Raise this from the future, unless it is settled."""
        if not self.settled:
            with suppress(InvalidStateError):  # whoever waited has cancelled it meanwhile
                self.future.set_exception(error)

    @abstractmethod
    def write(self) -> Write | None:
        """What to write now; None if that has settled it."""

    @abstractmethod
    def answered(self, answer: Answer) -> None:
        """Take the answer; unless that settles it, :meth:`found` must come before the next write."""

    @abstractmethod
    def found(self, stored: Stored | None) -> None:
        """Take what is there now."""


class MoveAsk(Ask["Stored | Refused"]):
    """The next state of a task, by a rule: the result is the task with it, or why it is refused.

    With an ``epoch`` only while that is the partition's and the queue is not paused, ``update`` being written
    with it. With a ``slot`` a claim is made for it or not at all: it is refused once the slot is gone.
    """

    def __init__(
        self,
        stored: Stored,
        decide: Decide,
        *,
        epoch: Epoch | None = None,
        update: Update | None = None,
        slot: FreeSlot | None = None,
        lasting: bool = False,
    ) -> None:
        super().__init__(stored.head.id, lasting=lasting)
        self._stored = stored
        self._decide = decide
        self._epoch = epoch
        self._update = update
        self._slot = slot
        self._prevented: Reason | None = None
        """Why it was refused at the revision that it was written for, beside that revision."""
        self._next: State | None = None
        self._refused: list[int] = []
        """The revisions at which the condition did not hold."""

    def write(self) -> Move | None:
        """The move to the state that the rule gives."""
        stored = self._stored
        decision = self._decide(stored)
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
        )

    def answered(self, answer: Answer) -> None:
        """Settled if it was applied."""
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
        else:
            raise InternalError(f"a move was answered {answer!r}")

    def found(self, stored: Stored | None) -> None:
        """Go on from there; what was refused twice at one revision was refused for its epoch.

        Once is not enough: an engine may refuse a write for a collection that was cut off, and undo that.
        """
        if stored is None:
            self.future.set_result(Refused(Reason.GONE))
        elif self._prevented is not None and stored.revision == self._stored.revision:
            self.future.set_result(Refused(self._prevented))
        elif self._epoch is not None and self._refused.count(stored.revision) > 1:
            self.future.set_result(Refused(Reason.DEPOSED))
        else:
            self._stored = stored


class EnqueueAsk(Ask[Answer]):
    """A new task, or several: the result is the answer; one that was lost is asked for once more (SK-3)."""

    def __init__(self, enqueue: Enqueue | EnqueueAll) -> None:
        enqueues = enqueue.enqueues if isinstance(enqueue, EnqueueAll) else (enqueue,)
        super().__init__(enqueues[0].task.head.id)
        self.after = tuple(task for each in enqueues for task in each.task.head.after)
        self._enqueue = enqueue

    def write(self) -> Enqueue | EnqueueAll:
        """The same each time."""
        return self._enqueue

    def answered(self, answer: Answer) -> None:
        """Settled by any answer; a task that is there with this content was enqueued by an earlier try."""
        if isinstance(answer, Conflict):
            raise InternalError(f"an enqueue was answered {answer!r}")
        assert isinstance(answer, Applied | Exists | Duplicate | Unknown)
        self.future.set_result(answer)

    def found(self, stored: Stored | None) -> None:
        """Nothing to learn from: enqueueing again tells."""


class TakeOverAsk(Ask[None]):
    """A partition's new epoch (SK-13); the future raises if a newer one stands there."""

    def __init__(self, take_over: TakeOver) -> None:
        super().__init__(f"{take_over.queue} {take_over.epoch.partition}")
        self._take_over = take_over

    def write(self) -> TakeOver:
        """The same each time."""
        return self._take_over

    def answered(self, answer: Answer) -> None:
        """Settled by any answer."""
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
        """Nothing to learn from: taking over again tells."""
