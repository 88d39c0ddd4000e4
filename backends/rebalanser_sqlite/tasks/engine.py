"""The engine in an SQLite file; see ``rebalanser_sqlite.tasks`` for how it works."""

from __future__ import annotations

import secrets
import sqlite3
import threading
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from rebalanser.core.tasks.clocks import ForeignTerms
from rebalanser.core.tasks.store import (
    Answer,
    ChangeFilter,
    ClaimAnswer,
    Collect,
    Move,
    Page,
    QueueNote,
    Write,
)
from rebalanser.errors import OutcomeUnknown
from rebalanser.registry.keys import check_name
from rebalanser.tasks.engine import (
    ClaimsFromIndex,
    Engine,
    EngineCapabilities,
    EngineWatch,
    MovesInTransactions,
    Sink,
)
from rebalanser_sqlite.clock import HostClock, host_boot_id
from rebalanser_sqlite.failures import failure
from rebalanser_sqlite.location import file_mode_from, file_of
from rebalanser_sqlite.store import Deadline, Store
from rebalanser_sqlite.tasks import external_transaction, schema
from rebalanser_sqlite.tasks.change_feed import ChangeFeed
from rebalanser_sqlite.tasks.claims import Claims, Rates
from rebalanser_sqlite.tasks.collection import collect
from rebalanser_sqlite.tasks.group_commit import Action, Committer, chunks
from rebalanser_sqlite.tasks.reader import ClaimedRow, Reader
from rebalanser_sqlite.tasks.writer import STEP, Writing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from rebalanser.core.tasks.model import ClaimState, LimitId, RateMark, Status, Stored, TaskId, Update
    from rebalanser.core.tasks.store import ClaimQuery
    from rebalanser.registry.urls import RegistryUrl

CAPABILITIES = EngineCapabilities(
    max_payload_bytes=16 << 20,
    max_update_bytes=4 << 20,
    shared_between_hosts=False,
    durable="fsynced on the disk of this host: survives the end of any process and a power failure",
)
OPEN_TIMEOUT_S = 10.0


def open_engine(url: RegistryUrl, timeout_s: float) -> Engine:
    """Open the tasks in the file of ``sqlite:///relative`` or ``sqlite:////absolute``; create it if it is
    new.

    Raises:
        InvalidUrl: the URL names no file, or has an unknown option.
        UnusableStore: the place can't have tasks; the message says why and what to do.
        QuotaExceeded: the disk is full.
        RegistryUnavailable: other processes kept the file locked for ``timeout_s`` seconds.
    """
    return SqliteEngine(file_of(url), timeout_s, file_mode=file_mode_from(url))


class SqliteEngine(Engine, MovesInTransactions, ClaimsFromIndex):
    """Tasks in one file, shared by the processes of one host; a group's registry may be in the same file.

    Args:
        path: the file; made if it does not exist. Its folder must exist.
        timeout_s: how many seconds to wait for others that hold it locked.
        file_mode: the mode of the file, if it is made, and of those beside it.

    Raises:
        UnusableStore: the place can't have tasks; the message says why and what to do.
        QuotaExceeded: the disk is full.
        RegistryUnavailable: other processes kept the file locked.
    """

    def __init__(self, path: Path, timeout_s: float = OPEN_TIMEOUT_S, *, file_mode: int = 0o600) -> None:
        self._path = path.absolute()
        self._file_mode = file_mode
        deadline = Deadline.after(timeout_s)
        with ExitStack() as stack:
            store = self._open(deadline)
            self._capabilities = replace(CAPABILITIES, unsafe_reasons=store.unsafe_reasons)
            self._committer = Committer(store)
            stack.callback(self._committer.close)
            self._reader = Reader(self._open(deadline))
            stack.pop_all()
        self._foreign: defaultdict[tuple[str, str], ForeignTerms[int]] = defaultdict(ForeignTerms)
        """Claims that are counted on other clocks, by queue and clock, then by task."""
        self._foreign_lock = threading.Lock()
        self._nameless_clock = secrets.token_hex(8)
        """Name for a clock without one: for rates, that of this object."""
        self._rates: dict[str, Rates] = {}
        self._follower = ChangeFeed(self._path, lambda: self._open(Deadline.after(OPEN_TIMEOUT_S)))

    def _open(self, deadline: Deadline) -> Store:
        store = Store(self._path, HostClock(), host_boot_id(), deadline, self._file_mode)
        try:
            schema.prepare(store, deadline)
        except BaseException:
            store.close()
            raise
        return store

    @property
    def capabilities(self) -> EngineCapabilities:
        """Abilities of this engine, with warnings about its place."""
        return self._capabilities

    def define(self, queue: str, partitions: int, timeout_s: float) -> int:
        """Return the queue's number of partitions; see ``rebalanser.tasks.engine.Engine.define``.

        Raises:
            InvalidName: the queue's name can't be stored (RB-33).
        """
        check_name(queue, "queue")
        deadline = Deadline.after(timeout_s)
        with self._reader.snapshot(deadline) as snapshot:
            defined = snapshot.queues().get(queue)
        if defined is not None:
            return defined
        return self._committer.submit(Action(lambda writing: writing.define(queue, partitions)), deadline)

    def apply(self, writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        """Carry out writes; see ``rebalanser.tasks.engine.Engine.apply``.

        Raises:
            OutcomeUnknown: the disk failed during a commit, or after one that took some of the writes.
            RegistryUnavailable: other processes kept the file locked until the time limit, or the engine is
                closed; no effect.
            RequestTooLarge: a payload, an update or a result is over the limit; no effect.
            QuotaExceeded: the disk is full; no effect.
            UnusableStore: the file was removed, replaced or damaged while in use; no effect.
            InvalidState: a queue was never defined; no effect.
        """
        deadline = Deadline.after(timeout_s)
        answers: list[Answer] = []
        for chunk in chunks(writes, CAPABILITIES):
            try:
                large = chunk.large_collection
                if large is not None:
                    answers.append(self._collect(large, timeout_s))
                    continue
                answers += self._committer.submit(Action(chunk.carry_out, chunk.weight, chunk.size), deadline)
            except Exception as error:
                if not answers:
                    raise
                raise OutcomeUnknown(
                    f"the first {len(answers)} of {len(writes)} writes are done, and then it failed: {error}"
                ) from error
        return answers

    def _collect(self, write: Collect, timeout_s: float) -> Answer:
        """Collect tasks in many transactions, each of which has the whole time limit."""

        def commit(step: Callable[[Writing], Any]) -> Any:
            return self._committer.submit(Action(step, weight=STEP), Deadline.after(timeout_s))

        return collect(write, commit)

    def move_in(self, connection: sqlite3.Connection, move: Move) -> Answer:
        """Make a move in the caller's own transaction, so that it commits with the caller's other writes, or
        not at all (SK-10).

        ``connection`` is to the same file, in a transaction that was begun, preferably with
        ``BEGIN IMMEDIATE``. The transaction has the move if the answer is ``Applied``. After any other
        answer, or an error, it is as before, and its owner rolls back the writes that belong to the move. The
        owner calls ``ring`` after its commit; otherwise watches report it up to 250 ms later. From now on the
        connection makes no checkpoints; the commits of this engine do (see ``rebalanser_sqlite``).

        Raises:
            InvalidState: the connection is to another file, in no transaction, or does not fsync its commits.
            RegistryUnavailable: another connection holds the write lock; begin the transaction again.
            RequestTooLarge: an update or a result is over the limit.
            QuotaExceeded: the disk is full; SQLite may have rolled the whole transaction back.
        """
        chunks([move], CAPABILITIES)
        try:
            return external_transaction.carry_out(connection, self._path, move)
        except sqlite3.Error as error:
            raise failure(error, self._path) from error

    def ring(self) -> None:
        """Wake all watches of the file, in every process, after a commit on another connection."""
        self._committer.ring()

    def read(
        self, queue: str, ids: Sequence[TaskId], timeout_s: float, *, at_least: int = 0
    ) -> Mapping[TaskId, Stored]:
        """Read tasks; the result has only existing ones."""
        with self._reader.snapshot(Deadline.after(timeout_s), at_least) as snapshot:
            return snapshot.tasks(queue, ids)

    def payloads(self, queue: str, ids: Sequence[TaskId], timeout_s: float) -> Mapping[TaskId, bytes]:
        """Return the payloads of the existing ones of these tasks."""
        with self._reader.snapshot(Deadline.after(timeout_s)) as snapshot:
            return snapshot.payloads(queue, ids)

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
        """Return tasks in the order of their ids (SK-12); see ``rebalanser.tasks.engine.Engine.page``."""
        with self._reader.snapshot(Deadline.after(timeout_s), at_least) as snapshot:
            return snapshot.page(queue, partition, statuses, after, limit)

    def updates(
        self,
        queue: str,
        task: TaskId,
        timeout_s: float,
        *,
        claim: int | None = None,
        first: int = 0,
        limit: int = 1000,
    ) -> Sequence[Update]:
        """Return a task's log by claim and number (SK-9)."""
        with self._reader.snapshot(Deadline.after(timeout_s)) as snapshot:
            return snapshot.updates(queue, task, claim, first, limit)

    def count(self, queue: str, timeout_s: float) -> Mapping[Status, int]:
        """Return the number of tasks of a queue in each status, read from a few rows (SK-12)."""
        with self._reader.snapshot(Deadline.after(timeout_s)) as snapshot:
            return snapshot.counts(queue)

    def ready_since(self, queue: str, wall: float, timeout_s: float) -> float | None:
        """Return the time since which the oldest ready task waits, from the index; see the contract."""
        with self._reader.snapshot(Deadline.after(timeout_s)) as snapshot:
            return snapshot.ready_since(queue, wall)

    def note_worker(self, queue: str, process: str, note: bytes | None, timeout_s: float) -> None:
        """Store a process's note; see the contract."""
        action = Action(lambda writing: writing.note_worker(queue, process, note))
        self._committer.submit(action, Deadline.after(timeout_s))

    def workers(self, queue: str, timeout_s: float) -> Mapping[str, bytes]:
        """Return the notes of a queue's workers, by process."""
        with self._reader.snapshot(Deadline.after(timeout_s)) as snapshot:
            return snapshot.workers(queue)

    def queues(self, timeout_s: float) -> Mapping[str, int]:
        """Return all queues with their partitions."""
        with self._reader.snapshot(Deadline.after(timeout_s)) as snapshot:
            return snapshot.queues()

    def note(self, queue: str, timeout_s: float) -> QueueNote:
        """Return the note of a queue; an empty one of version 0 before the first."""
        with self._reader.snapshot(Deadline.after(timeout_s)) as snapshot:
            return snapshot.note(queue)

    def put_note(self, queue: str, content: bytes, version: int, timeout_s: float) -> bool:
        """Replace the note of ``version``; False if that is not the present one.

        Raises:
            OutcomeUnknown: the disk failed during the commit.
            RegistryUnavailable: other processes kept the file locked until the time limit; no effect.
            QuotaExceeded: the disk is full; no effect.
        """
        action = Action(lambda writing: writing.put_note(queue, content, version), size=len(content))
        return self._committer.submit(action, Deadline.after(timeout_s))

    def pauses(self, queue: str, timeout_s: float) -> Mapping[str, bytes]:
        """Return the pauses of a queue: its own under an empty name, those of its schedules by name."""
        with self._reader.snapshot(Deadline.after(timeout_s)) as snapshot:
            return snapshot.pauses(queue)

    def put_pause(self, queue: str, schedule: str, pause: bytes | None, timeout_s: float) -> None:
        """Set a pause; None deletes it. Claims read it while they hold the write lock.

        Raises:
            OutcomeUnknown: the disk failed during the commit.
            RegistryUnavailable: other processes kept the file locked until the time limit; no effect.
            QuotaExceeded: the disk is full; no effect.
        """
        action = Action(lambda writing: writing.put_pause(queue, schedule, pause))
        self._committer.submit(action, Deadline.after(timeout_s))

    def rates(self, queue: str, limits: Collection[LimitId], timeout_s: float) -> Mapping[LimitId, RateMark]:
        """Return the marks of rate limits; see the contract."""
        with self._reader.snapshot(Deadline.after(timeout_s)) as snapshot:
            return snapshot.rates(queue, limits)

    def running(self, queue: str, limits: Collection[LimitId], timeout_s: float) -> Mapping[LimitId, int]:
        """Count the claimed tasks of limits; see the contract."""
        with self._reader.snapshot(Deadline.after(timeout_s)) as snapshot:
            return snapshot.running(queue, limits)

    def watch_pauses(
        self,
        queue: str,  # noqa: ARG002
        from_revision: int,  # noqa: ARG002
        wake: Callable[[], None],
    ) -> EngineWatch:
        """Call ``wake`` soon after each commit to the file: pauses have no revisions of their own."""
        return self._follower.add_commits(wake)

    def watch(
        self, queue: str, from_revision: int, sink: Sink, wants: ChangeFilter | None = None
    ) -> EngineWatch:
        """Report every state that changes after ``from_revision`` to ``sink``, from the engine's thread."""
        return self._follower.add(queue, from_revision, sink, wants)

    def claim(self, request: ClaimQuery, timeout_s: float) -> ClaimAnswer:
        """Claim the best ready tasks; see ``rebalanser.tasks.engine.ClaimsFromIndex.claim``.

        It looks first without a lock, so that a claim that finds nothing blocks no writer.

        Raises:
            OutcomeUnknown: the disk failed during the commit.
            RegistryUnavailable: other processes kept the file locked until the time limit, or the engine is
                closed; no effect.
            QuotaExceeded: the disk is full; no effect.
            UnusableStore: the file was removed, replaced or damaged while in use; no effect.
            InvalidState: the queue was never defined; no effect.
        """
        deadline = Deadline.after(timeout_s)
        while (answer := self._claim(request, deadline)) is None:
            pass
        return answer

    def _claim(self, request: ClaimQuery, deadline: Deadline) -> ClaimAnswer | None:
        """Claim tasks; None if none was, but others may be ready: it left many, or notified dependents."""
        clock = request.term.clock
        with self._foreign_lock:
            foreign = self._foreign[request.queue, clock]
            with self._reader.snapshot(deadline) as snapshot:
                pause = snapshot.pause(request.queue)
                is_ready = snapshot.is_ready(request.queue, request.names)
                others_ready = is_ready or snapshot.is_ready(request.queue, None)
                next_due = snapshot.next_due(request.queue)
                next_end = snapshot.next_end(request.queue, clock) if clock else None
                has_settled = snapshot.has_settled()
                rates = self._rates_of(clock)
                next_room = snapshot.next_room(request.queue, rates.clock)
                found: Mapping[int, tuple[ClaimedRow, ClaimState]] = {}
                reads_foreign = not foreign.skips(request.clock())
                if reads_foreign:
                    found = {
                        each.task: (each, claim)
                        for each, claim in snapshot.foreign_claims(request.queue, clock)
                    }
            now = request.clock()
            over: list[ClaimedRow] = []
            if reads_foreign:
                claims = {task: claim for task, (_, claim) in found.items()}
                over = [found[task][0] for task in foreign.learn(claims, now, request.buffer_s)]
            next_foreign = foreign.next_over()
        ends = [] if next_end is None else [next_end + request.buffer_s]
        is_due = next_due is not None and next_due <= request.wall
        claimed: Sequence[tuple[Stored, bytes | None]] = ()
        if pause is not None:
            return ClaimAnswer((), pause=pause)
        if has_settled:
            self._committer.submit(Action(Writing.tell_dependents, weight=STEP), deadline)
        has_room, looks_again = next_room is not None and next_room <= now, False
        if is_ready or is_due or over or has_room or (ends and ends[0] <= now):
            claiming = Claims(request, now, over, rates)
            action = Action(claiming.carry_out, weight=len(request.holders))
            claimed = self._committer.submit(action, deadline)
            next_room = claiming.next_room
            others_ready = True  # it may have made some ready
            looks_again = claiming.may_have_more
        if (has_settled or looks_again) and not claimed:
            return None
        times = [each for each in (next_foreign, next_room) if each is not None]
        next_over = min([*ends, *times], default=None)
        return ClaimAnswer(claimed, next_due, next_over, others_ready=others_ready)

    def _rates_of(self, clock: str) -> Rates:
        name = clock or self._nameless_clock
        return self._rates.setdefault(name, Rates(name))

    def ready_names(self, queue: str, timeout_s: float) -> Collection[str]:
        """Return the functions that have ready tasks."""
        with self._reader.snapshot(Deadline.after(timeout_s)) as snapshot:
            return snapshot.ready_names(queue)

    def watch_commits(self, wake: Callable[[], None]) -> EngineWatch:
        """Call ``wake``, from the engine's thread, soon after each commit to the file."""
        return self._follower.add_commits(wake)

    def close(self) -> None:
        """Close the file and all watches. Closing twice does nothing."""
        self._follower.close()
        self._committer.close()
        self._reader.close()
