"""Reads, each of one snapshot, on a connection of their own."""

from __future__ import annotations

import math
import threading
from collections import Counter
from contextlib import contextmanager
from functools import cached_property
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from rebalanser.core.tasks.ids import is_task_id, ready_since
from rebalanser.core.tasks.model import (
    ID_DIGITS,
    ClaimState,
    ClaimTerm,
    LimitId,
    RateMark,
    Status,
    Stored,
    TaskId,
    Update,
)
from rebalanser.core.tasks.store import Page, QueueNote
from rebalanser.errors import RegistryUnavailable, UnusableStore
from rebalanser_sqlite.store import Deadline, Store
from rebalanser_sqlite.tasks.rows import (
    COLUMNS,
    MARK,
    NEXT_ROOM,
    READY,
    RUNNING,
    Row,
    code_of,
    counts_since,
    id_bytes,
    latest,
    mask_of,
    revision_of,
    stored_of,
)
from rebalanser_sqlite.tasks.schema import ADMITTED, CLAIMED, FEW, STATUSES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

_QUEUE = "SELECT number, partitions FROM skuld_queues WHERE name = ?"
_QUEUES = "SELECT name, partitions FROM skuld_queues ORDER BY name"
_TASK = f"SELECT {COLUMNS} FROM skuld_tasks WHERE queue = ? AND id = ?"  # noqa: S608
_NUMBER = "(SELECT number FROM skuld_tasks WHERE queue = ? AND id = ?)"
_PAYLOAD = (
    "SELECT coalesce(payload, (SELECT payload FROM skuld_contents WHERE task = number)) "
    "FROM skuld_tasks WHERE queue = ? AND id = ?"
)
_ALL = f"SELECT {COLUMNS} FROM skuld_tasks WHERE queue = ? AND id > ? ORDER BY id LIMIT ?"  # noqa: S608
_OF_STATUS = {
    status: f"SELECT {COLUMNS} FROM skuld_tasks INDEXED BY skuld_tasks_by_status "  # noqa: S608
    f"WHERE status IN (3, 4) AND queue = ? AND status = {code_of(status)} AND id > ? "
    "AND (? IS NULL OR partition = ?) ORDER BY id LIMIT ?"
    for status in FEW
}
_END_OF_SCAN = "SELECT id FROM skuld_tasks WHERE queue = ? AND id > ? ORDER BY id LIMIT 1 OFFSET ?"
_SCANNED = (
    f"SELECT {COLUMNS} FROM skuld_tasks INDEXED BY skuld_tasks_by_id "  # noqa: S608
    "WHERE queue = ? AND id > ? AND id <= ? AND (? >> status) & 1 AND (? IS NULL OR partition = ?) "
    "ORDER BY id LIMIT ?"
)
_AFTER_ALL = b"\xff" * (ID_DIGITS // 2)
_LOG = (
    "SELECT claim, sequence, content FROM skuld_updates "  # noqa: S608
    f"WHERE task = {_NUMBER} ORDER BY claim, sequence LIMIT ?"
)
_LOG_OF_CLAIM = (
    "SELECT claim, sequence, content FROM skuld_updates "  # noqa: S608
    f"WHERE task = {_NUMBER} AND claim = ? AND sequence >= ? ORDER BY sequence LIMIT ?"
)
_COUNTS = "SELECT status, tasks FROM skuld_counts WHERE queue = ?"
_ENQUEUED = (
    f"SELECT {COLUMNS} FROM skuld_tasks "  # noqa: S608
    "WHERE number > ? AND number <= ? AND queue = ? AND revision = number"
)
_CHANGED = (
    f"SELECT {COLUMNS.replace('revision, status', 'skuld_tasks.revision, skuld_tasks.status')} "  # noqa: S608
    "FROM skuld_changes CROSS JOIN skuld_tasks ON number = task "
    "WHERE skuld_changes.revision > ? AND skuld_changes.revision <= ? AND skuld_tasks.queue = ? "
    "AND skuld_tasks.revision = skuld_changes.revision"
)
_CHANGED_TO = f"{_CHANGED} AND (? >> skuld_changes.status) & 1"
_READY = f"SELECT 1 FROM skuld_tasks {READY} AND name = ? LIMIT 1"  # noqa: S608
_NEXT_NAME = f"SELECT name FROM skuld_tasks {READY} AND name > ? ORDER BY name LIMIT 1"  # noqa: S608
_PAUSE = "SELECT pause FROM skuld_pauses WHERE queue = ? AND schedule = ''"
_PAUSES = "SELECT schedule, pause FROM skuld_pauses WHERE queue = ?"
_WORKERS = "SELECT process, note FROM skuld_workers WHERE queue = ?"
_OLDEST = f"SELECT priority, id, due FROM skuld_tasks {READY} AND name = ?"  # noqa: S608
_OLDEST_OF_ANY = f"{_OLDEST} ORDER BY priority DESC, id LIMIT 1"
_OLDEST_BELOW = f"{_OLDEST} AND priority < ? ORDER BY priority DESC, id LIMIT 1"
_NEXT_DUE = (
    "SELECT timer FROM skuld_tasks INDEXED BY skuld_tasks_timed "
    "WHERE queue = ? AND timer IS NOT NULL ORDER BY timer LIMIT 1"
)
_NEXT_END = f"SELECT ends_at_s FROM skuld_tasks {RUNNING} AND clock = ? ORDER BY ends_at_s LIMIT 1"  # noqa: S608
_FOREIGN = tuple(
    f"SELECT number, revision, claim, holder, ttl_s, clock, ends_at_s FROM skuld_tasks {RUNNING} "  # noqa: S608
    f"AND clock {side} ?"
    for side in "<>="
)
_RUNNING_OF_LIMIT = (
    "SELECT count(*) FROM skuld_tasks INDEXED BY skuld_tasks_admitted "  # noqa: S608
    f"WHERE {ADMITTED} AND queue = ? AND name = ? AND limit_key = ? AND status = {CLAIMED}"
)
_WAIT_ELSEWHERE = tuple(
    "SELECT 1 FROM skuld_rates INDEXED BY skuld_rates_waiting "  # noqa: S608
    f"WHERE waits_until IS NOT NULL AND queue = ? AND waits_clock {side} ? LIMIT 1"
    for side in "<>"
)
MAX_PRIORITIES = 100
"""Maximum number of a function's priorities that are searched for the oldest ready task."""
_HAS_SETTLED = "SELECT 1 FROM skuld_settled LIMIT 1"
_NOTE = "SELECT content, version FROM skuld_notes WHERE queue = ?"
SCAN = 5000
"""Maximum number of tasks that are read for a page of statuses that most tasks have."""


class Reader:
    """Answers reads; its methods may be called from any thread. ``close`` closes its store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Close the connection. Closing twice does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._store.close()

    @contextmanager
    def snapshot(self, deadline: Deadline, at_least: int = 0) -> Iterator[TaskSnapshot]:
        """Return a snapshot of the committed state.

        Raises:
            RegistryUnavailable: other threads were reading until the deadline, or it is closed.
            UnusableStore: the store does not have the revision ``at_least``.
        """
        if not self._lock.acquire(timeout=deadline.left_s):
            raise RegistryUnavailable(
                f"other threads kept {self._store.path} busy until the timeout; try again"
            )
        try:
            if self._closed:
                raise RegistryUnavailable("this engine is closed")
            with self._store.reading(deadline):
                snapshot = TaskSnapshot(self._store)
                if at_least and snapshot.revision < at_least:
                    raise UnusableStore(
                        f"{self._store.path} is at revision {snapshot.revision} and {at_least} was seen "
                        "in it before: it was restored to an earlier state"
                    )
                yield snapshot
        finally:
            self._lock.release()


class ClaimedRow(NamedTuple):
    """A claimed task by its number, at a revision."""

    task: int
    revision: int


class TaskSnapshot:
    """State as of ``revision``, valid as long as the transaction of the snapshot."""

    def __init__(self, store: Store) -> None:
        self._connection = store.connection
        self._queues: dict[str, tuple[int, int]] = {}

    @cached_property
    def _latest(self) -> tuple[int, int, int]:
        return latest(self._connection)

    @property
    def revision(self) -> int:
        """The latest revision."""
        return self._latest[0]

    @property
    def forgotten(self) -> int:
        """The last revision whose changes are deleted."""
        return self._latest[2]

    def _queue(self, name: str) -> tuple[int, int]:
        """Return the queue's number, 0 for none, and its partitions."""
        found = self._queues.get(name)
        if found is None:
            row = self._connection.execute(_QUEUE, (name,)).fetchone()
            found = self._queues[name] = row or (0, 0)
        return found

    def queues(self) -> Mapping[str, int]:
        """Read all queues and their numbers of partitions."""
        return dict(self._connection.execute(_QUEUES))

    def tasks(self, queue: str, ids: Iterable[TaskId]) -> Mapping[TaskId, Stored]:
        """Read tasks; the result has only existing ones."""
        number, _ = self._queue(queue)
        rows = (
            (task, self._connection.execute(_TASK, (number, id_bytes(task))).fetchone())
            for task in ids
            if is_task_id(task)
        )
        return {task: stored_of(queue, row) for task, row in rows if row is not None}

    def payloads(self, queue: str, ids: Iterable[TaskId]) -> Mapping[TaskId, bytes]:
        """Return the payloads of the existing ones of these tasks."""
        number, _ = self._queue(queue)
        rows = (
            (task, self._connection.execute(_PAYLOAD, (number, id_bytes(task))).fetchone())
            for task in ids
            if is_task_id(task)
        )
        return {task: row[0] for task, row in rows if row is not None and row[0] is not None}

    def page(
        self,
        queue: str,
        partition: int | None,
        statuses: frozenset[Status] | None,
        after: TaskId | None,
        limit: int,
    ) -> Page:
        """Return tasks by their ids."""
        number, _ = self._queue(queue)
        start = b"" if after is None else id_bytes(after)
        where = (partition, partition, limit + 1)
        end: bytes | None = None
        rows: Iterable[Row]
        if partition is None and statuses is None:
            rows = self._connection.execute(_ALL, (number, start, limit + 1))
        elif statuses is not None and statuses <= FEW:
            ranges = (
                self._connection.execute(_OF_STATUS[each], (number, start, *where)) for each in statuses
            )
            rows = islice(merge(*ranges, key=itemgetter(0)), limit + 1)
        else:
            row = self._connection.execute(_END_OF_SCAN, (number, start, SCAN - 1)).fetchone()
            end = None if row is None else row[0]
            mask = mask_of(Status if statuses is None else statuses)
            bounds = (number, start, _AFTER_ALL if end is None else end)
            rows = self._connection.execute(_SCANNED, (*bounds, mask, *where))
        found = [stored_of(queue, row) for row in rows]
        items = tuple(found[:limit])
        if len(found) > limit:
            return Page(items, items[-1].head.id, self.revision)
        return Page(items, None if end is None else end.hex(), self.revision)

    def updates(
        self, queue: str, task: TaskId, claim: int | None, first: int, limit: int
    ) -> Sequence[Update]:
        """Return a task's log."""
        if not is_task_id(task):
            return []
        key = (self._queue(queue)[0], id_bytes(task))
        rows = (
            self._connection.execute(_LOG, (*key, limit))
            if claim is None
            else self._connection.execute(_LOG_OF_CLAIM, (*key, claim, first, limit))
        )
        return [Update(*row) for row in rows]

    def counts(self, queue: str) -> Mapping[Status, int]:
        """Count the tasks in each status."""
        number, _ = self._queue(queue)
        counts = Counter(dict(self._connection.execute(_COUNTS, (number,))))
        for (of_queue, status), more in counts_since(self._connection, self._latest[1]).items():
            if of_queue == number:
                counts[status] += more
        return {STATUSES[status]: tasks for status, tasks in counts.items() if tasks > 0}

    def note(self, queue: str) -> QueueNote:
        """Return the note of a queue."""
        number, _ = self._queue(queue)
        row = self._connection.execute(_NOTE, (number,)).fetchone()
        return QueueNote() if row is None else QueueNote(*row)

    def pauses(self, queue: str) -> dict[str, bytes]:
        """Read the pauses of a queue: its own under an empty name, its schedules' by name."""
        return dict(self._connection.execute(_PAUSES, (self._queue(queue)[0],)))

    def pause(self, queue: str) -> bytes | None:
        """Return the pause of a queue; None if it is not paused."""
        row = self._connection.execute(_PAUSE, (self._queue(queue)[0],)).fetchone()
        return None if row is None else row[0]

    def changed(
        self, queue: str, after_revision: int, up_to: int, statuses: Collection[Status] | None = None
    ) -> list[Row]:
        """Return the rows of the tasks whose last change has one of these revisions, the earliest first.

        With ``statuses`` return only tasks in one of these, and no new ones.
        """
        number, _ = self._queue(queue)
        bounds = (after_revision, up_to, number)
        if statuses is not None:
            return self._connection.execute(_CHANGED_TO, (*bounds, mask_of(statuses))).fetchall()
        found = [row for sql in (_ENQUEUED, _CHANGED) for row in self._connection.execute(sql, bounds)]
        return sorted(found, key=revision_of)

    def ready_names(self, queue: str) -> list[str]:
        """Return the functions that have ready tasks, by one look at the index for each."""
        number, _ = self._queue(queue)
        names: list[str] = []
        while row := self._connection.execute(_NEXT_NAME, (number, names[-1] if names else "")).fetchone():
            names.append(row[0])
        return names

    def is_ready(self, queue: str, names: Collection[str] | None) -> bool:
        """True if there are ready tasks of these functions; None for any."""
        number, _ = self._queue(queue)
        if names is None:
            return self._connection.execute(_NEXT_NAME, (number, "")).fetchone() is not None
        return any(self._connection.execute(_READY, (number, name)).fetchone() for name in names)

    def has_settled(self) -> bool:
        """True if dependents of settled tasks have not been notified yet."""
        return self._connection.execute(_HAS_SETTLED).fetchone() is not None

    def ready_since(self, queue: str, wall: float) -> float | None:
        """Return the time since which the oldest ready task waits: one index look-up for each function and
        priority."""
        number, _ = self._queue(queue)
        due = self.next_due(queue)
        times = [] if due is None or due > wall else [due]
        for name in self.ready_names(queue):
            row = self._connection.execute(_OLDEST_OF_ANY, (number, name)).fetchone()
            for _ in range(MAX_PRIORITIES):
                if row is None:
                    break
                times.append(ready_since(row[1].hex(), row[2], wall))
                row = self._connection.execute(_OLDEST_BELOW, (number, name, row[0])).fetchone()
        return min(times, default=None)

    def workers(self, queue: str) -> dict[str, bytes]:
        """Return the notes of the queue's workers."""
        return dict(self._connection.execute(_WORKERS, (self._queue(queue)[0],)))

    def next_due(self, queue: str) -> float | None:
        """Return the first time, by the wall clock, at which a task that is not ready yet is due."""
        row = self._connection.execute(_NEXT_DUE, (self._queue(queue)[0],)).fetchone()
        return None if row is None else row[0]

    def next_end(self, queue: str, clock: str) -> float | None:
        """Return the first end of a claim that is counted on this clock."""
        row = self._connection.execute(_NEXT_END, (self._queue(queue)[0], clock)).fetchone()
        return None if row is None else row[0]

    def next_room(self, queue: str, clock: str) -> float | None:
        """Return the first time at which a rate limit has room for a task that waits for it; None if none
        waits.

        It is minus infinity if some tasks wait by another clock: a claim must check them.
        """
        key = (self._queue(queue)[0], clock)
        if any(self._connection.execute(each, key).fetchone() for each in _WAIT_ELSEWHERE):
            return -math.inf
        row = self._connection.execute(NEXT_ROOM, key).fetchone()
        return None if row is None else row[0]

    def rates(self, queue: str, limits: Collection[LimitId]) -> dict[LimitId, RateMark]:
        """Return the marks of rate limits."""
        number, _ = self._queue(queue)
        found = {limit: self._connection.execute(MARK, (number, *limit)).fetchone() for limit in limits}
        return {limit: RateMark(*row) for limit, row in found.items() if row is not None}

    def running(self, queue: str, limits: Collection[LimitId]) -> dict[LimitId, int]:
        """Count the claimed tasks of limits, from the index."""
        number, _ = self._queue(queue)
        execute = self._connection.execute
        return {limit: execute(_RUNNING_OF_LIMIT, (number, *limit)).fetchone()[0] for limit in limits}

    def foreign_claims(self, queue: str, clock: str) -> list[tuple[ClaimedRow, ClaimState]]:
        """Return the running claims that are counted on other clocks; a clock without a name is one."""
        number, _ = self._queue(queue)
        statements = _FOREIGN[:2] if clock else _FOREIGN
        rows = (row for sql in statements for row in self._connection.execute(sql, (number, clock)))
        return [
            (ClaimedRow(task, revision), ClaimState(claim, holder, "", ClaimTerm(*term)))
            for task, revision, claim, holder, *term in rows
        ]
