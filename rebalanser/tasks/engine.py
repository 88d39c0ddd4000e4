"""The contract of an engine: a store of tasks. Its writes and their answers are in ``core.tasks.store``.

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

**Watches** report changed states in the order of revisions, each at least once, or ``ChangesLost``, which
means "read again". A state that was replaced before it was reported may be left out; its successor is
reported. A watch is a wake-up, never a proof. The conformance suite for all of this is
``rebalanser.testing.engine_suite``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from rebalanser.core.tasks.model import LimitId, RateMark, Status, Stored, TaskId, Update
from rebalanser.core.tasks.store import (
    Answer,
    ChangeFilter,
    ChangesLost,
    ClaimAnswer,
    ClaimQuery,
    FreeSlot,
    Move,
    Page,
    QueueNote,
    SlotNews,
    UsedSlot,
    Write,
)

if TYPE_CHECKING:
    import sqlite3


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


class EngineWatch(Protocol):
    """A running watch."""

    def close(self) -> None:
        """Stop the watch. Closing twice does nothing."""


Sink: TypeAlias = Callable[[Sequence[Stored] | ChangesLost], None]
"""Called from a thread of the engine's, one call at a time; it must return soon and not raise."""


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
    def watch_pauses(self, queue: str, from_revision: int, wake: Callable[[], None]) -> EngineWatch:
        """Call ``wake``, from a thread of the engine's, soon after a pause changed after ``from_revision``.

        It may be called more often. It must return soon and not raise.
        """

    @abstractmethod
    def watch(
        self, queue: str, from_revision: int, sink: Sink, wants: ChangeFilter | None = None
    ) -> EngineWatch:
        """Report to ``sink`` all states written after ``from_revision``, also the first of new tasks.

        With ``wants`` only those that it wants, so that the others need not be read. It is called once for
        each report.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the store. Closing twice does nothing."""


SlotSink: TypeAlias = Callable[[Sequence[SlotNews] | ChangesLost], None]
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
    def watch_slots(self, queue: str, from_revision: int, sink: SlotSink) -> EngineWatch:
        """Report to ``sink`` all slots published, used or deleted after ``from_revision``."""


class MovesInTransactions(ABC):
    """An engine whose moves can be part of a transaction that the host application has begun."""

    @abstractmethod
    def move_in(self, connection: sqlite3.Connection, move: Move) -> Answer:
        """Carry out a move within the transaction that ``connection``, to the engine's own file, has begun.

        It takes effect if and when that transaction commits. Answered ``Applied`` or ``WriteConflict``.
        """


class ClaimsFromIndex(ABC):
    """An engine that hands out claims itself, so that its tasks need no owners of partitions.

    One claim is one write, as a ``Move`` is, decided by ``rebalanser.core.tasks.rules.claim``. A task can
    be claimed from the commit on that makes it ready: by which it is enqueued, or the last task that it
    depends on becomes complete, or is settled otherwise (``rebalanser.core.tasks.rules.settles``). Time makes
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
    def watch_commits(self, wake: Callable[[], None]) -> EngineWatch:
        """Call ``wake``, from a thread of the engine's, soon after each commit of any process.

        Commits that follow each other quickly may share a call. It must return soon and not raise.
        """
