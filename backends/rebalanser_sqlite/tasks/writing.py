"""Writes of the contract as SQL, inside a transaction that somebody else has begun and ends.

Every statement is a constant, so that SQLite's prepared form is used again.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rebalanser.errors import InvalidState
from rebalanser.tasks.engine import (
    Answer,
    Applied,
    Collect,
    Conflict,
    Enqueue,
    Exists,
    Forwarded,
    Move,
    Skip,
    TakeOver,
    Tally,
    Unknown,
    Write,
)
from rebalanser_sqlite.tasks.rows import COLUMNS, id_bytes, ids_bytes, ids_of, state_row, stored_of

if TYPE_CHECKING:
    import sqlite3

    from rebalanser.tasks.model import TaskId

_REVISION = "SELECT revision FROM skuld_meta"
_ADVANCE = "UPDATE skuld_meta SET revision = ?"
_COUNT = (
    "INSERT INTO skuld_counts (queue, status, tasks) VALUES (?, ?, ?) "
    "ON CONFLICT (queue, status) DO UPDATE SET tasks = tasks + excluded.tasks"
)
_QUEUE = "SELECT number FROM skuld_queues WHERE name = ?"
_PARTITIONS = "SELECT partitions FROM skuld_queues WHERE name = ?"
_DEFINE = "INSERT INTO skuld_queues (name, partitions) VALUES (?, ?) ON CONFLICT (name) DO NOTHING"
_IS_THERE = "SELECT 1 FROM skuld_tasks WHERE queue = ? AND id = ?"
_STORED = f"SELECT {COLUMNS} FROM skuld_tasks WHERE queue = ? AND id = ?"  # noqa: S608
_PAYLOAD = (
    "SELECT payload FROM skuld_contents "
    "WHERE task = (SELECT number FROM skuld_tasks WHERE queue = ? AND id = ?)"
)
_ADD = (
    "INSERT INTO skuld_tasks (queue, id, partition, name, priority, dependencies, retries, timeout_s, "
    "revision, status, claim, holder, worker, ttl_s, clock, ends_at_s, updates, due, failures, error, "
    "result) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (queue, id) DO NOTHING"
)
_ADD_CONTENT = "INSERT INTO skuld_contents (task, after, payload) VALUES (?, ?, ?)"
_ADD_DEPENDENT = "INSERT OR IGNORE INTO skuld_dependents (queue, id, task) VALUES (?, ?, ?)"
_FIND = "SELECT number, status FROM skuld_tasks WHERE queue = ? AND id = ? AND partition = ? AND revision = ?"
_MOVE = (
    "UPDATE skuld_tasks SET status = ?, claim = ?, holder = ?, worker = ?, ttl_s = ?, clock = ?, "
    "ends_at_s = ?, updates = ?, due = ?, failures = ?, error = ?, result = ?, revision = ? WHERE number = ?"
)
_ADD_UPDATE = "INSERT OR REPLACE INTO skuld_updates (task, claim, sequence, content) VALUES (?, ?, ?, ?)"
_OWNER = "SELECT token FROM skuld_owners WHERE queue = ? AND partition = ?"
_OWN = (
    "INSERT INTO skuld_owners (queue, partition, token) VALUES (?, ?, ?) "
    "ON CONFLICT (queue, partition) DO UPDATE SET token = excluded.token"
)
_TALLY = "SELECT number, skipped FROM skuld_outboxes WHERE queue = ? AND outbox = ?"
_COUNT_ENTRY = (
    "INSERT INTO skuld_outboxes (queue, outbox, number, skipped) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (queue, outbox) DO UPDATE SET number = excluded.number, skipped = excluded.skipped"
)
_DEPENDENTS = "SELECT task FROM skuld_dependents WHERE queue = ? AND id = ?"
_AFTER = "SELECT after FROM skuld_contents WHERE task = ?"
_FORGET_DEPENDENT = "DELETE FROM skuld_dependents WHERE queue = ? AND id = ? AND task = ?"
_FORGET = (
    "DELETE FROM skuld_updates WHERE task = ?",
    "DELETE FROM skuld_contents WHERE task = ?",
    "DELETE FROM skuld_tasks WHERE number = ?",
)


class Writing:
    """What one transaction writes: each write in turn, then :meth:`finish`.

    ``cursor`` is of a connection that holds the write lock.
    """

    def __init__(self, cursor: sqlite3.Cursor) -> None:
        self._cursor = cursor
        self._before = int(cursor.execute(_REVISION).fetchone()[0])
        self._revision = self._before
        self._queues: dict[str, int] = {}
        self._tokens: dict[tuple[int, int], int | None] = {}
        self._counts: Counter[tuple[int, str]] = Counter()

    @property
    def changed(self) -> bool:
        """Whether any write took effect."""
        return self._revision > self._before

    def define(self, queue: str, partitions: int) -> int:
        """How many partitions the queue has, which these are if it is new."""
        self._cursor.execute(_DEFINE, (queue, partitions))
        (defined,) = self._cursor.execute(_PARTITIONS, (queue,)).fetchone()
        return int(defined)

    def carry_out(self, write: Write) -> Answer:
        """Do one write, if its condition holds.

        Raises:
            InvalidState: its queue was never defined.
        """
        match write:
            case Move():
                return self._move(write)
            case Enqueue():
                return self._enqueue(write)
            case Skip():
                return self._skip(self._queue(write.queue), write.entry)
            case TakeOver():
                return self._take_over(write)
            case Collect():
                return self._collect(write)

    def finish(self) -> None:
        """Write what belongs to all writes together; to be committed next."""
        if not self.changed:
            return
        self._cursor.execute(_ADVANCE, (self._revision,))
        for (queue, status), difference in self._counts.items():
            if difference:
                self._cursor.execute(_COUNT, (queue, status, difference))

    def _next_revision(self) -> int:
        self._revision += 1
        return self._revision

    def _queue(self, name: str) -> int:
        number = self._queues.get(name)
        if number is None:
            row = self._cursor.execute(_QUEUE, (name,)).fetchone()
            if row is None:
                raise InvalidState(f"there is no queue {name!r} yet: define it first")
            number = self._queues[name] = row[0]
        return number

    def _enqueue(self, write: Enqueue) -> Answer:
        queue, entry = self._queue(write.task.head.queue), write.forwarded
        if entry is None:
            return self._add(queue, write)
        answer = self._tally(queue, entry).refusal(entry) or self._add(queue, write)
        if isinstance(answer, Applied):
            self._count_entry(queue, entry, skipped=False)
        return answer

    def _skip(self, queue: int, entry: Forwarded) -> Answer:
        tally = self._tally(queue, entry)
        if not tally.has_skipped(entry):
            refusal = tally.refusal(entry)
            if refusal is not None:
                return refusal
            self._count_entry(queue, entry, skipped=True)
        return Applied(self._next_revision())

    def _tally(self, queue: int, entry: Forwarded) -> Tally:
        row = self._cursor.execute(_TALLY, (queue, entry.outbox)).fetchone()
        return Tally() if row is None else Tally(row[0], bool(row[1]))

    def _count_entry(self, queue: int, entry: Forwarded, *, skipped: bool) -> None:
        self._cursor.execute(_COUNT_ENTRY, (queue, entry.outbox, entry.number, skipped))

    def _add(self, queue: int, write: Enqueue) -> Answer:
        head, state = write.task.head, write.state
        task = id_bytes(head.id)
        if head.after and not write.waits_for_unknown:
            refusal = self._refusal(queue, head.after, write)
            if refusal is not None:
                return refusal
        fixed = (queue, task, write.partition, head.name, head.priority, len(head.after))
        row = (*fixed, head.retries, head.timeout_s, self._revision + 1, *state_row(state))
        self._cursor.execute(_ADD, row)
        if not self._cursor.rowcount:
            return self._exists(queue, write)
        number = self._cursor.lastrowid
        self._cursor.execute(_ADD_CONTENT, (number, ids_bytes(head.after), write.task.payload))
        for dependency in head.after:
            self._cursor.execute(_ADD_DEPENDENT, (queue, id_bytes(dependency), number))
        self._counts[queue, state.status.value] += 1
        return Applied(self._next_revision())

    def _refusal(self, queue: int, after: tuple[TaskId, ...], write: Enqueue) -> Exists | Unknown | None:
        if self._is_there(queue, write.task.head.id):
            return self._exists(queue, write)
        unknown = tuple(task for task in after if not self._is_there(queue, task))
        return Unknown(unknown) if unknown else None

    def _is_there(self, queue: int, task: TaskId) -> bool:
        return self._cursor.execute(_IS_THERE, (queue, id_bytes(task))).fetchone() is not None

    def _exists(self, queue: int, write: Enqueue) -> Exists:
        head = write.task.head
        key = (queue, id_bytes(head.id))
        stored = stored_of(head.queue, self._cursor.execute(_STORED, key).fetchone())
        (payload,) = self._cursor.execute(_PAYLOAD, key).fetchone()
        return Exists(stored, payload)

    def _move(self, write: Move) -> Answer:
        queue = self._queue(write.queue)
        epoch = write.epoch
        if epoch is not None and self._token(queue, epoch.partition) != epoch.token:
            return Conflict()
        key = (queue, id_bytes(write.id), write.partition, write.revision)
        found = self._cursor.execute(_FIND, key).fetchone()
        if found is None:
            return Conflict()
        number, before = found
        revision = self._next_revision()
        row = state_row(write.state)
        self._cursor.execute(_MOVE, (*row, revision, number))
        if write.update is not None:
            update = write.update
            self._cursor.execute(_ADD_UPDATE, (number, update.claim, update.sequence, update.content))
        if row[0] != before:
            self._counts[queue, before] -= 1
            self._counts[queue, row[0]] += 1
        return Applied(revision)

    def _token(self, queue: int, partition: int) -> int | None:
        """The token of a partition's owner, None if it has had none yet."""
        key = (queue, partition)
        if key not in self._tokens:
            row = self._cursor.execute(_OWNER, key).fetchone()
            self._tokens[key] = None if row is None else row[0]
        return self._tokens[key]

    def _take_over(self, write: TakeOver) -> Answer:
        queue, epoch = self._queue(write.queue), write.epoch
        present = self._token(queue, epoch.partition)
        if present is not None and present > epoch.token:
            return Conflict()
        if present != epoch.token:
            self._cursor.execute(_OWN, (queue, epoch.partition, epoch.token))
            self._tokens[queue, epoch.partition] = epoch.token
        return Applied(self._next_revision())

    def _collect(self, write: Collect) -> Answer:
        queue = self._queue(write.queue)
        found: dict[int, tuple[TaskId, str]] = {}
        for task, (partition, revision) in write.tasks.items():
            row = self._cursor.execute(_FIND, (queue, id_bytes(task), partition, revision)).fetchone()
            if row is None:
                return Conflict()
            found[row[0]] = (task, row[1])
        for task, _ in found.values():
            dependents = self._cursor.execute(_DEPENDENTS, (queue, id_bytes(task)))
            if any(dependent not in found for (dependent,) in dependents):
                return Conflict()
        for number, (_, status) in found.items():
            self._forget(queue, number)
            self._counts[queue, status] -= 1
        return Applied(self._next_revision())

    def _forget(self, queue: int, number: int) -> None:
        (after,) = self._cursor.execute(_AFTER, (number,)).fetchone()
        for dependency in ids_of(after):
            self._cursor.execute(_FORGET_DEPENDENT, (queue, id_bytes(dependency), number))
        for statement in _FORGET:
            self._cursor.execute(statement, (number,))
