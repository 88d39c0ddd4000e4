"""Writes to a store of tasks, their answers, and what it reports (``tasks.engine``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rebalanser.core.tasks.model import (
    ClaimTerm,
    EnqueueAnswer,
    Enqueued,
    Head,
    LimitId,
    RateMark,
    Status,
    Stored,
    Task,
    TaskId,
    TaskState,
    Update,
)
from rebalanser.errors import InternalError, TaskExists, UnknownTask


def enqueued(enqueue: Enqueue, answer: Answer) -> Enqueued[Any]:
    """Return the task of an enqueue: the new one, or the one of which it is a duplicate (SK-23).

    Raises:
        TaskExists: the id is taken by other content.
        UnknownTask: it is to come after a task that does not exist.
    """
    head = enqueue.task.head
    match answer:
        case Applied():
            pass
        case Duplicate(id=task):
            return Enqueued(task, EnqueueAnswer.DUPLICATE)
        case Exists(stored=stored, payload=payload):
            if stored.head != head or payload != enqueue.task.payload:
                raise TaskExists(f"task {head.id} exists with other content; an id names one task for ever")
        case Unknown(ids=ids):
            raise UnknownTask(f"task {head.id} is to come after {', '.join(ids)}, which does not exist")
        case _:
            raise InternalError(f"an enqueue was answered {answer!r}")
    return Enqueued(head.id)


@dataclass(frozen=True, slots=True)
class OwnerEpoch:
    """Fencing token of a partition's owner, which alone may claim there (SK-13)."""

    partition: int
    token: int


@dataclass(frozen=True, slots=True)
class Forwarded:
    """An entry of an outbox: the ``number``-th, counted from 1 (SK-4)."""

    outbox: str
    number: int


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Add a task with its first state (SK-3).

    Answered ``Applied``; ``Exists`` where the id is taken, whatever it is taken by;
    ``Duplicate`` if it has a unique key and is a duplicate of the last task of its queue and its name
    that was enqueued with that key and is not deleted, which keeps new tasks out while it is open, and for
    its ``unique_for_s`` seconds by the times of the ids (``is_duplicate``); or
    ``Unknown`` if a task of the queue that it depends on does not exist at that moment, unless
    ``waits_for_unknown``.

    With ``forwarded`` only if that is the entry after the outbox's tally, which then counts it (SK-4). If it
    was counted before, it is answered ``Taken``; if one before it was not, ``WriteConflict``. An entry
    that is answered ``Exists``, ``Duplicate`` or ``Unknown`` is not counted: ``Skip`` it,
    once its refusal is noted where it cannot be lost.
    """

    task: Task
    partition: int
    state: TaskState = field(default_factory=TaskState)
    waits_for_unknown: bool = False
    forwarded: Forwarded | None = None


@dataclass(frozen=True, slots=True)
class EnqueueAll:
    """Add tasks of one queue, all or none, as if each was enqueued after those before it.

    Each has another id, none has a unique key, and none is forwarded. Answered ``Applied``; or what
    refuses the first that can't be added: ``Exists`` or ``Unknown``.
    """

    enqueues: tuple[Enqueue, ...]
    """At least one."""

    def __post_init__(self) -> None:
        if any(each.task.head.unique_key for each in self.enqueues):
            raise InternalError("a task with a unique key is never enqueued together with others")


@dataclass(frozen=True, slots=True)
class Skip:
    """Count an entry of an outbox and make no task of it (SK-4).

    ``Applied`` also if it was skipped before; ``Taken`` if it was counted otherwise, or one after
    it was; ``WriteConflict`` if one before it was not.
    """

    queue: str
    entry: Forwarded


@dataclass(frozen=True, slots=True)
class RateStart:
    """A start that counts for a rate limit, whose mark is ``mark`` from then on (SK-23).

    ``before`` is the revision of the mark before it, 0 for none.
    """

    limit: LimitId
    before: int
    mark: RateMark


@dataclass(frozen=True, slots=True)
class Move:
    """Put a task's next state in place of the one of ``revision``, with an update where there is one.

    With an ``epoch`` only if that is still the partition's (SK-13), and the queue is not paused (SK-23): then
    it is a claim. With a ``slot`` only if that is still free: it is used by the same write (SK-20). With a
    ``start`` only if the mark of its rate limit is still the one before it, which it replaces. Answered
    ``Applied``, ``SlotGone`` where the slot is not free any more, whatever else holds,
    ``Paused`` where the queue is paused, ``RateMoved`` where the mark is another, or
    ``WriteConflict``.
    """

    id: TaskId
    queue: str
    partition: int
    revision: int
    state: TaskState
    epoch: OwnerEpoch | None = None
    update: Update | None = None
    head: Head | None = None
    """Head of the task, if the caller has it, for an engine that would have to read it."""
    slot: FreeSlot | None = None
    """Slot for which the move claims; only for an engine that ``SharesSlots``."""
    start: RateStart | None = None
    """Start of a rate limit by a claim; only for an engine without ``ClaimsFromIndex``."""
    with_payload: bool = False
    """True if the answer should have the task's payload, where the engine can read it along."""


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Make ``epoch`` the partition's, unless it has had that one or a greater one (SK-13).

    Taking over again with the same token is ``Applied``; an older token is a ``WriteConflict``.
    """

    queue: str
    epoch: OwnerEpoch


@dataclass(frozen=True, slots=True)
class Collect:
    """Delete these tasks, with their states and logs, if every state is still that of its revision (SK-14).

    And only if no task beside them depends on one of them: a task enqueued since they were read would else
    wait for one that is gone. All or none of them. Answered ``Applied`` or ``WriteConflict``; that also
    if one of very many is open. Reads may see some of very many as they were until it is answered.
    """

    queue: str
    tasks: Mapping[TaskId, tuple[int, int]]
    """Partition and revision of each task."""


Write: TypeAlias = Enqueue | EnqueueAll | Skip | Move | TakeOver | Collect


@dataclass(frozen=True, slots=True)
class Applied:
    """The write took effect, at this revision."""

    revision: int
    payload: bytes | None = None
    """The task's payload, if a move asked for it and the engine read it along."""


@dataclass(frozen=True, slots=True)
class WriteConflict:
    """The condition did not hold; nothing was changed. Read again."""


@dataclass(frozen=True, slots=True)
class Exists:
    """The id is taken by this task: the same one, or another with the same id (SK-3)."""

    stored: Stored
    payload: bytes


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A task with the same unique key keeps the new one out; nothing was changed (SK-23)."""

    id: TaskId


@dataclass(frozen=True, slots=True)
class Unknown:
    """The task depends on these, which do not exist."""

    ids: tuple[TaskId, ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """The entry of the outbox was counted before; nothing was changed (SK-4)."""


@dataclass(frozen=True, slots=True)
class SlotGone:
    """The slot is used, withdrawn or ended; nothing was changed (SK-20)."""


@dataclass(frozen=True, slots=True)
class Paused:
    """The queue is paused, so that nothing is claimed; nothing was changed (SK-23)."""


@dataclass(frozen=True, slots=True)
class RateMoved:
    """The mark of the rate limit is not the one that was read; nothing was changed (SK-23)."""


Answer: TypeAlias = (
    Applied | WriteConflict | Exists | Duplicate | Unknown | Taken | SlotGone | Paused | RateMoved
)


@dataclass(frozen=True, slots=True)
class OutboxTally:
    """The number of the last entry of an outbox that was taken, and True if it was skipped (SK-4)."""

    number: int = 0
    skipped: bool = False

    def refusal(self, entry: Forwarded) -> Taken | WriteConflict | None:
        """Return the answer that refuses to count an entry; None if it is the next one."""
        if entry.number <= self.number:
            return Taken()
        return WriteConflict() if entry.number > self.number + 1 else None

    def has_skipped(self, entry: Forwarded) -> bool:
        """True if this very entry was skipped."""
        return self.skipped and entry.number == self.number


@dataclass(frozen=True, slots=True)
class Page:
    """Some tasks in the order of their ids; the following page begins ``after`` the id ``next``, if any.

    ``revision`` is one that the whole page has seen: a watch from there reports the changes after it.
    """

    items: tuple[Stored, ...]
    next: TaskId | None
    revision: int


@dataclass(frozen=True, slots=True)
class QueueNote:
    """The note of a queue, at most 64 KiB that its workers share; ``version`` grows with each one put."""

    content: bytes = b""
    version: int = 0
    """0 if none was put yet."""


@dataclass(frozen=True, slots=True)
class ChangesLost:
    """Changes up to this revision may be missing: read again."""

    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """Change of a task's state, as far as it is known without reading the task."""

    task: TaskId
    partition: int
    status: Status
    revision: int


ChangeFilter: TypeAlias = Callable[[Change], bool]
"""Called from the same thread, in the same order; True if the sink is to get the task of a change."""


@dataclass(frozen=True, slots=True)
class StatusFilter:
    """A ``ChangeFilter`` of tasks that were there before and have one of these statuses now.

    An engine need not call it for other changes, nor read those.
    """

    statuses: frozenset[Status]
    wants: ChangeFilter

    def __call__(self, change: Change) -> bool:
        return change.status in self.statuses and self.wants(change)


@dataclass(frozen=True, slots=True)
class ClaimQuery:
    """A request for claims of the best tasks of a queue, one for each of ``holders``, which are new names.

    ``names`` are the functions whose tasks are wanted, None for any. ``term`` was made before the request is
    sent; ``clock`` gives the seconds of the clock that it names, and ``wall`` is seconds since 1970. A claim
    is over ``buffer_s`` seconds after its time (SK-8). The last ``ahead`` of the holders have no thread yet:
    they get no task with a ``rate_limit`` (SK-23).
    """

    queue: str
    holders: Sequence[str]
    worker: str
    term: ClaimTerm
    names: Collection[str] | None
    clock: Callable[[], float]
    wall: float
    buffer_s: float
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """The claims that were made, each with the payload, or None if that must be read.

    ``next_due`` is the first time (seconds since 1970) at which another task is due, ``next_over`` the first
    one (seconds of the request's ``clock``) at which a claim may be over; None where only a commit can bring
    something to claim. Both may be too early.
    """

    claimed: Sequence[tuple[Stored, bytes | None]]
    next_due: float | None = None
    next_over: float | None = None
    pause: bytes | None = None
    """The pause of the queue if it is paused: then there is nothing to claim until a commit ends it."""
    others_ready: bool = True
    """False if there is certainly no ready task of any function."""


Names: TypeAlias = frozenset[str] | None
"""The functions of a slot; None for any, for example if a client over HTTP names none."""


@dataclass(frozen=True, slots=True)
class FreeSlot:
    """An idle thread of the process ``process``, published at ``revision``.

    ``worker`` is a label for people. ``names`` are the functions that it knows, None for any. ``ttl_s`` is
    the seconds that a claim lasts. ``lease`` is the lease whose end deletes the slot. A slot that is
    ``ahead`` has no idle thread yet.
    """

    holder: str
    process: str
    worker: str
    names: Names
    ttl_s: float
    lease: int
    ahead: bool = False
    revision: int = 0


@dataclass(frozen=True, slots=True)
class UsedSlot:
    """A slot for which a task was claimed."""

    holder: str
    process: str
    task: TaskId


@dataclass(frozen=True, slots=True)
class GoneSlot:
    """A slot that was deleted: withdrawn, used and forgotten, or ended with its lease."""

    holder: str
    process: str


SlotNews: TypeAlias = FreeSlot | UsedSlot | GoneSlot
