"""Reads, each of one snapshot, on a connection of their own."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING

from rebalanser.errors import RegistryUnavailable, UnusableStore
from rebalanser.tasks.engine import Page
from rebalanser.tasks.model import Status, Stored, TaskId, Update
from rebalanser_sqlite.store import Deadline, Store
from rebalanser_sqlite.tasks.rows import COLUMNS, Row, id_bytes, stored_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_REVISION = "SELECT revision FROM skuld_meta"
_QUEUE = "SELECT number, partitions FROM skuld_queues WHERE name = ?"
_QUEUES = "SELECT name, partitions FROM skuld_queues ORDER BY name"
_TASK = f"SELECT {COLUMNS} FROM skuld_tasks WHERE queue = ? AND id = ?"  # noqa: S608
_NUMBER = "(SELECT number FROM skuld_tasks WHERE queue = ? AND id = ?)"
_PAYLOAD = f"SELECT payload FROM skuld_contents WHERE task = {_NUMBER}"  # noqa: S608
_ALL = f"SELECT {COLUMNS} FROM skuld_tasks WHERE queue = ? AND id > ? ORDER BY id LIMIT ?"  # noqa: S608
_SOME = (
    f"SELECT {COLUMNS} FROM skuld_tasks INDEXED BY skuld_tasks_by_status "  # noqa: S608
    "WHERE queue = ? AND partition = ? AND status = ? AND id > ? ORDER BY id LIMIT ?"
)
_LOG = (
    "SELECT claim, sequence, content FROM skuld_updates "  # noqa: S608
    f"WHERE task = {_NUMBER} ORDER BY claim, sequence LIMIT ?"
)
_LOG_OF_CLAIM = (
    "SELECT claim, sequence, content FROM skuld_updates "  # noqa: S608
    f"WHERE task = {_NUMBER} AND claim = ? AND sequence >= ? ORDER BY sequence LIMIT ?"
)
_COUNTS = "SELECT status, tasks FROM skuld_counts WHERE queue = ? AND tasks > 0"
_CHANGED = (
    f"SELECT {COLUMNS} FROM skuld_tasks INDEXED BY skuld_tasks_by_revision "  # noqa: S608
    "WHERE queue = ? AND revision > ? ORDER BY revision LIMIT ?"
)


class Reader:
    """Answers reads; its methods may be called from any thread. It closes its store in the end."""

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
    def snapshot(self, deadline: Deadline, at_least: int = 0) -> Iterator[Snapshot]:
        """What is committed now.

        Raises:
            RegistryUnavailable: other threads were reading until the deadline, or it is closed.
            UnusableStore: the store has not seen the revision ``at_least``.
        """
        if not self._lock.acquire(timeout=deadline.left_s):
            raise RegistryUnavailable(
                f"other threads kept {self._store.path} busy until the time was up; try again"
            )
        try:
            if self._closed:
                raise RegistryUnavailable("this engine is closed")
            with self._store.reading(deadline):
                snapshot = Snapshot(self._store)
                if snapshot.revision < at_least:
                    raise UnusableStore(
                        f"{self._store.path} is at revision {snapshot.revision} and {at_least} was seen "
                        "in it before: it was put back to an earlier state"
                    )
                yield snapshot
        finally:
            self._lock.release()


class Snapshot:
    """What was committed up to ``revision``; lives as long as the transaction it was made in."""

    def __init__(self, store: Store) -> None:
        self._connection = store.connection
        (self.revision,) = self._connection.execute(_REVISION).fetchone()

    def _queue(self, name: str) -> tuple[int, int]:
        """The queue's number, 0 for none, and its partitions."""
        return self._connection.execute(_QUEUE, (name,)).fetchone() or (0, 0)

    def queues(self) -> Mapping[str, int]:
        """All queues and their partitions."""
        return dict(self._connection.execute(_QUEUES))

    def tasks(self, queue: str, ids: Iterable[TaskId]) -> Mapping[TaskId, Stored]:
        """Those of the tasks that exist."""
        number, _ = self._queue(queue)
        rows = ((task, self._connection.execute(_TASK, (number, id_bytes(task))).fetchone()) for task in ids)
        return {task: stored_of(queue, row) for task, row in rows if row is not None}

    def payloads(self, queue: str, ids: Iterable[TaskId]) -> Mapping[TaskId, bytes]:
        """The payloads of those of the tasks that exist."""
        number, _ = self._queue(queue)
        rows = (
            (task, self._connection.execute(_PAYLOAD, (number, id_bytes(task))).fetchone()) for task in ids
        )
        return {task: row[0] for task, row in rows if row is not None}

    def page(
        self,
        queue: str,
        partition: int | None,
        statuses: frozenset[Status] | None,
        after: TaskId | None,
        limit: int,
    ) -> Page:
        """Tasks by their ids."""
        number, partitions = self._queue(queue)
        start = b"" if after is None else id_bytes(after)
        rows: Iterable[Row]
        if partition is None and statuses is None:
            rows = self._connection.execute(_ALL, (number, start, limit + 1))
        else:
            places = range(partitions) if partition is None else (partition,)
            ranges = [
                self._connection.execute(_SOME, (number, place, status.value, start, limit + 1))
                for place in places
                for status in sorted(Status if statuses is None else statuses)
            ]
            rows = merge(*ranges, key=itemgetter(0))
        found = [stored_of(queue, row) for row in islice(rows, limit + 1)]
        items = tuple(found[:limit])
        return Page(items, items[-1].head.id if len(found) > limit else None, self.revision)

    def updates(
        self, queue: str, task: TaskId, claim: int | None, first: int, limit: int
    ) -> Sequence[Update]:
        """A task's log."""
        key = (self._queue(queue)[0], id_bytes(task))
        rows = (
            self._connection.execute(_LOG, (*key, limit))
            if claim is None
            else self._connection.execute(_LOG_OF_CLAIM, (*key, claim, first, limit))
        )
        return [Update(*row) for row in rows]

    def counts(self, queue: str) -> Mapping[Status, int]:
        """How many tasks are in each status."""
        rows = self._connection.execute(_COUNTS, (self._queue(queue)[0],))
        return {Status(status): tasks for status, tasks in rows}

    def changed(self, queue: str, after_revision: int, limit: int) -> list[Row]:
        """The rows of the tasks whose states changed after a revision, the earliest change first."""
        number, _ = self._queue(queue)
        return self._connection.execute(_CHANGED, (number, after_revision, limit)).fetchall()
