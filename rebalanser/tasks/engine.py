"""The contract of an engine: a store of tasks.

**Atomicity.** Each ``Write`` is all or nothing and linearizable, by itself: a batch is one call
for speed, not one transaction, and a write of it that is refused leaves the others alone. Writes of one
batch take effect in their order. A write that is answered is durable as the engine's capabilities say:
fsynced, on a quorum where there is one.

**Order.** A write that changes something gets a revision, greater than that of every earlier write
of the engine; writes answered by one commit may share one. Revisions never go back, not even after a
restart.

**Outcomes.** ``Engine.apply`` returns an answer for each write, or raises: an
``OutcomeUnknown`` says that each of them took effect, or will a little later, or
never, and not all alike; any other error that none did or will.

**Reads** see every write answered before they were sent (SK-11). A read that is given ``at_least`` refuses to
answer from a store that has not seen that revision, such as one put back from a backup: it raises
``UnusableStore``.

**Outboxes** (SK-4) forward what a producer has spooled, entry by entry. Of each outbox an engine keeps a
*tally* for each queue: the number of the last entry taken, 0 before the first. The tally is counted up by
the very write that makes the entry's task, and by no other, so that an entry is taken once, however often it
is sent, and whatever happened to its task since: collections keep the tallies.

**Watches** report changed states in the order of revisions, each at least once, or ``Lost``, which means
"read again". A state that was replaced before it was reported may be left out; its successor is reported. A
watch is a wake-up, never a proof. The conformance suite for all of this is
``rebalanser.testing.engine_suite``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from rebalanser.errors import InternalError, TaskExists, UnknownTask
from rebalanser.tasks.index.free_slots import FreeSlot, SlotNews, UsedSlot
from rebalanser.tasks.model import (
    EnqueueAnswer,
    Enqueued,
    Head,
    LimitId,
    RateMark,
    State,
    Status,
    Stored,
    Task,
    TaskId,
    Term,
    Update,
)

if TYPE_CHECKING:
    import sqlite3


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
class EngineCapabilities:
    """Capabilities of an engine, and its limits in bytes."""

    max_payload_bytes: int
    max_update_bytes: int
    """Maximum bytes of an update, and of a result."""
    shared_between_hosts: bool
    durable: str
    """Failures that an answered write survives, as a phrase for people."""
    unsafe_reasons: tuple[str, ...] = ()
    """Known weaknesses of its promises, one sentence each; shown when a queue is opened."""
    max_in_flight: int = 1
    """Maximum useful number of calls of ``apply`` at the same time from one process."""


@dataclass(frozen=True, slots=True)
class Epoch:
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
    was counted before, it is answered ``Taken``; if one before it was not, ``Conflict``. An entry
    that is answered ``Exists``, ``Duplicate`` or ``Unknown`` is not counted: ``Skip`` it,
    once its refusal is noted where it cannot be lost.
    """

    task: Task
    partition: int
    state: State = field(default_factory=State)
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
    it was; ``Conflict`` if one before it was not.
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
    ``Conflict``.
    """

    id: TaskId
    queue: str
    partition: int
    revision: int
    state: State
    epoch: Epoch | None = None
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

    Taking over again with the same token is ``Applied``; an older token is a ``Conflict``.
    """

    queue: str
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Collect:
    """Delete these tasks, with their states and logs, if every state is still that of its revision (SK-14).

    And only if no task beside them depends on one of them: a task enqueued since they were read would else
    wait for one that is gone. All or none of them. Answered ``Applied`` or ``Conflict``; that also
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
class Conflict:
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


Answer: TypeAlias = Applied | Conflict | Exists | Duplicate | Unknown | Taken | SlotGone | Paused | RateMoved


@dataclass(frozen=True, slots=True)
class Tally:
    """The number of the last entry of an outbox that was taken, and True if it was skipped (SK-4)."""

    number: int = 0
    skipped: bool = False

    def refusal(self, entry: Forwarded) -> Taken | Conflict | None:
        """Return the answer that refuses to count an entry; None if it is the next one."""
        if entry.number <= self.number:
            return Taken()
        return Conflict() if entry.number > self.number + 1 else None

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
class Lost:
    """Changes up to this revision may be missing: read again."""

    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """Change of a task's state, as far as it is known without reading the task."""

    task: TaskId
    partition: int
    status: Status
    revision: int


class Watch(Protocol):
    """A running watch."""

    def close(self) -> None:
        """Stop the watch. Closing twice does nothing."""


Sink: TypeAlias = Callable[[Sequence[Stored] | Lost], None]
"""Called from a thread of the engine's, one call at a time; it must return soon and not raise."""
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


class Engine(ABC):
    """A store of tasks. All methods may be called from any thread; times are in seconds.

    Every method raises ``RegistryUnavailable`` if the store could not be reached (no
    effect), ``UnusableStore`` if it is of a newer version or not a store of tasks.
    """

    @property
    @abstractmethod
    def capabilities(self) -> EngineCapabilities:
        """Capabilities and limits of this engine."""

    @abstractmethod
    def define(self, queue: str, partitions: int, timeout_s: float) -> int:
        """Define a queue; return its number of partitions: the given one if it is new, else the one it has.

        A queue is defined before anything is written to it.

        Raises:
            InvalidName: the queue's name can't be stored (RB-33).
        """

    @abstractmethod
    def apply(self, writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        """Carry out writes in few transactions, each with its own outcome; return the answers in order.

        Raises:
            OutcomeUnknown: each of them took effect, or will, or never.
            RequestTooLarge: a payload or update is over the limit; nothing was written.
            QuotaExceeded: the store is full.
        """

    @abstractmethod
    def read(
        self, queue: str, ids: Sequence[TaskId], timeout_s: float, *, at_least: int = 0
    ) -> Mapping[TaskId, Stored]:
        """Read tasks; the result has those that exist."""

    @abstractmethod
    def payloads(self, queue: str, ids: Sequence[TaskId], timeout_s: float) -> Mapping[TaskId, bytes]:
        """Read payloads; the result has those of tasks that exist."""

    @abstractmethod
    def page(
        self,
        queue: str,
        timeout_s: float,
        *,
        partition: int | None = None,
        statuses: frozenset[Status] | None = None,
        after: TaskId | None = None,
        limit: int = 1000,
        at_least: int = 0,
    ) -> Page:
        """Read at most ``limit`` tasks with ids greater than ``after``, in the order of their ids (SK-12).

        They are of a partition, or of the whole queue if it is None. A page may have fewer than ``limit``
        tasks, or none, before the end, where ``next`` is None.
        """

    @abstractmethod
    def updates(
        self, queue: str, task: TaskId, timeout_s: float, *, claim: int | None = None, first: int = 0,
        limit: int = 1000,
    ) -> Sequence[Update]:  # fmt: skip
        """Read a task's log by claim and number, of one claim from number ``first`` on or of all (SK-9)."""

    @abstractmethod
    def count(self, queue: str, timeout_s: float) -> Mapping[Status, int]:
        """Count the tasks of a queue in each status, without holding them in memory (SK-12).

        A status that no task is in may be missing.
        """

    @abstractmethod
    def ready_since(self, queue: str, wall: float, timeout_s: float) -> float | None:
        """Find since when the oldest ready task of a queue waits, in seconds since 1970; None if none is.

        A task is ready at ``wall`` if it is due and waits for nothing but a worker. The time is that of its
        id (``ready_since``): too late if a task with a smaller id became due later.
        """

    @abstractmethod
    def note_worker(self, queue: str, process: str, note: bytes | None, timeout_s: float) -> None:
        """Put a worker process's note in place of the one before; None deletes it.

        Notes are for people: nothing that the engine does depends on one.
        """

    @abstractmethod
    def workers(self, queue: str, timeout_s: float) -> Mapping[str, bytes]:
        """Read the notes of a queue's workers, by process."""

    @abstractmethod
    def queues(self, timeout_s: float) -> Mapping[str, int]:
        """Read the names of all queues, with their numbers of partitions."""

    @abstractmethod
    def note(self, queue: str, timeout_s: float) -> QueueNote:
        """Read the note of a queue; an empty one of version 0 if none was put yet."""

    @abstractmethod
    def put_note(self, queue: str, content: bytes, version: int, timeout_s: float) -> bool:
        """Replace the note of ``version``; False if that is not the present one.

        It is no change of a task: no watch reports it.

        Raises:
            OutcomeUnknown: it took effect, or will, or never.
            QuotaExceeded: the store is full.
        """

    @abstractmethod
    def pauses(self, queue: str, timeout_s: float) -> Mapping[str, bytes]:
        """Read the pauses of a queue: its own under an empty name, its schedules' by name."""

    @abstractmethod
    def put_pause(self, queue: str, schedule: str, pause: bytes | None, timeout_s: float) -> None:
        """Put a pause of a schedule, or of the queue if the name is empty; None deletes it.

        A queue with a pause of its own hands out no claim that is written after this was answered (SK-23).
        What the pause of a schedule means is up to its reader.

        Raises:
            OutcomeUnknown: it took effect, or will, or never.
            QuotaExceeded: the store is full.
        """

    @abstractmethod
    def rates(self, queue: str, limits: Collection[LimitId], timeout_s: float) -> Mapping[LimitId, RateMark]:
        """Read the marks of rate limits; one whose debt is long over may be missing (SK-23)."""

    @abstractmethod
    def running(self, queue: str, limits: Collection[LimitId], timeout_s: float) -> Mapping[LimitId, int]:
        """Count the claimed tasks of limits, for people; one that takes long to count may be missing."""

    @abstractmethod
    def watch_pauses(self, queue: str, from_revision: int, wake: Callable[[], None]) -> Watch:
        """Call ``wake``, from a thread of the engine's, soon after a pause changed after ``from_revision``.

        It may be called more often. It must return soon and not raise.
        """

    @abstractmethod
    def watch(self, queue: str, from_revision: int, sink: Sink, wants: ChangeFilter | None = None) -> Watch:
        """Report to ``sink`` all states written after ``from_revision``, also the first of new tasks.

        With ``wants`` only those that it wants, so that the others need not be read. It is called once for
        each report.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the store. Closing twice does nothing."""


SlotSink: TypeAlias = Callable[[Sequence[SlotNews] | Lost], None]
"""Called from a thread of the engine's, one call at a time; it must return soon and not raise."""


class SharesSlots(ABC):
    """An engine in which workers publish free slots, for which the owners of partitions claim (SK-20).

    A slot lives under a lease of its worker, which ends with it, soon after the worker no longer keeps it. A
    holder is published once. Every method raises what those of ``Engine`` do.
    """

    @abstractmethod
    def grant_slots(self, ttl_s: float, timeout_s: float) -> int:
        """Grant a lease, which ends with its slots ``ttl_s`` seconds after it was kept last."""

    @abstractmethod
    def keep_slots(self, lease: int, timeout_s: float) -> None:
        """Keep a lease; raises ``LeaseNotFound`` if it has ended."""

    @abstractmethod
    def end_slots(self, lease: int, timeout_s: float) -> None:
        """End a lease with its slots now."""

    @abstractmethod
    def publish_slots(
        self, queue: str, slots: Sequence[FreeSlot], used: Sequence[UsedSlot], timeout_s: float
    ) -> None:
        """Publish free slots, and delete used ones that their worker has taken.

        Raises:
            LeaseNotFound: the lease of a slot has ended; nothing was changed.
            OutcomeUnknown: it took effect, or will a little later, or never.
        """

    @abstractmethod
    def withdraw_slots(
        self, queue: str, process: str, holders: Collection[str] | None, timeout_s: float
    ) -> Sequence[UsedSlot]:
        """Delete the free slots of a process, of these holders or of all (None); return the used ones.

        From then on nothing is claimed for the deleted ones.
        """

    @abstractmethod
    def slots(self, queue: str, timeout_s: float) -> tuple[Sequence[SlotNews], int]:
        """Read all free and used slots, and the revision of the read."""

    @abstractmethod
    def watch_slots(self, queue: str, from_revision: int, sink: SlotSink) -> Watch:
        """Report to ``sink`` all slots published, used or deleted after ``from_revision``."""


class MovesInTransactions(ABC):
    """An engine whose moves can be part of a transaction that the host application has begun."""

    @abstractmethod
    def move_in(self, connection: sqlite3.Connection, move: Move) -> Answer:
        """Carry out a move within the transaction that ``connection``, to the engine's own file, has begun.

        It takes effect if and when that transaction commits. Answered ``Applied`` or ``Conflict``.
        """


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
    term: Term
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


class ClaimsFromIndex(ABC):
    """An engine that hands out claims itself, so that its tasks need no owners of partitions.

    One claim is one write, as a ``Move`` is, decided by ``rebalanser.tasks.rules.claim``. A task can
    be claimed from the commit on that makes it ready: by which it is enqueued, or the last task that it
    depends on becomes complete, or is settled otherwise (``rebalanser.tasks.rules.settles``). Time makes
    ready what is due, and what is claimed and over: where the claim's time was counted on the clock of the
    request, at its end; else ``ttl_s`` after this engine object first saw the term. In both cases
    ``buffer_s`` comes on top. Nothing is held in memory of a task that waits.

    Of the tasks of a name with one ``limit_key`` at most ``max_running`` are claimed at once; a claim that is
    over counts until its task is claimed anew. Claims of a ``rate_limit`` are made as
    ``Rate`` says, those made again too. Its mark is written by the same
    transaction, and read as ``full_at`` says, from when this engine object, or
    another of its clock, first saw it. The best ones come first, and what is held back keeps no other task
    waiting (SK-23).
    """

    @abstractmethod
    def claim(self, request: ClaimQuery, timeout_s: float) -> ClaimAnswer:
        """Claim the best tasks that are ready: the highest priority first, then the lowest id (SK-5).

        A task whose last try was cut off becomes dead on the way, and serves no holder (SK-15). A task that
        fails with a dependency (``AfterFailure``) becomes dead on the way, too.

        Raises:
            OutcomeUnknown: all of the claims were made, or none.
        """

    @abstractmethod
    def ready_names(self, queue: str, timeout_s: float) -> Collection[str]:
        """Read the functions that have ready tasks."""

    @abstractmethod
    def watch_commits(self, wake: Callable[[], None]) -> Watch:
        """Call ``wake``, from a thread of the engine's, soon after each commit, whoever makes it.

        Commits that follow each other quickly may share a call. It must return soon and not raise.
        """
