"""Writes of the contract as SQL, inside a transaction of the caller.

Every statement is a constant, so that SQLite reuses its prepared form.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TypeAlias

from rebalanser.core.tasks.model import OPEN, AfterFailure, Status
from rebalanser.core.tasks.rules import FailedDependency, fails, is_duplicate, settles
from rebalanser.core.tasks.store import (
    Answer,
    Applied,
    Collect,
    Duplicate,
    Enqueue,
    EnqueueAll,
    Exists,
    Forwarded,
    Move,
    OutboxTally,
    Paused,
    Skip,
    TakeOver,
    Unknown,
    Write,
    WriteConflict,
)
from rebalanser.errors import InvalidState
from rebalanser_sqlite.tasks.rows import (
    COLUMNS,
    counts_since,
    held_back,
    id_bytes,
    ids_bytes,
    ids_of,
    is_new,
    latest,
    place,
    state_row,
    stored_of,
)
from rebalanser_sqlite.tasks.schema import ADMITTED, CHOICES, FAIL, HELD, INLINE_BYTES, STATUSES, WAITING

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Container, Iterable, Sequence

    from rebalanser.core.tasks.model import Head, TaskId

    Known: TypeAlias = tuple[int, dict[str, int]]

_COUNT = (
    "INSERT INTO skuld_counts (queue, status, tasks) VALUES (?, ?, ?) "
    "ON CONFLICT (queue, status) DO UPDATE SET tasks = tasks + excluded.tasks"
)
_COUNTED = "UPDATE skuld_meta SET counted = ?, forgotten_to = ?"
_FORGET_CHANGES = "DELETE FROM skuld_changes WHERE revision > ? AND revision <= ?"
_CHANGES = (
    "INSERT INTO skuld_changes (revision, queue, task, before, status) "
    "SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'), "
    "json_extract(value, '$[3]'), json_extract(value, '$[4]') FROM json_each(?)"
)
"""One statement for all tasks: between two statements another thread may keep the interpreter."""
_QUEUE = "SELECT number FROM skuld_queues WHERE name = ?"
_PARTITIONS = "SELECT partitions FROM skuld_queues WHERE name = ?"
_DEFINE = "INSERT INTO skuld_queues (name, partitions) VALUES (?, ?) ON CONFLICT (name) DO NOTHING"
_STATUS = "SELECT number, status FROM skuld_tasks WHERE queue = ? AND id = ?"
_COLLECTED = (
    "SELECT decided FROM skuld_collections WHERE EXISTS (SELECT 1 FROM skuld_collected WHERE task = ?)"
)
_GIVE_UP_COLLECTION = "DELETE FROM skuld_collections"
_STORED = f"SELECT {COLUMNS} FROM skuld_tasks WHERE queue = ? AND id = ?"  # noqa: S608
_LAST_OF_KEY = (
    "SELECT id, unique_for_s, status FROM skuld_tasks INDEXED BY skuld_tasks_unique "
    "WHERE queue = ? AND name = ? AND unique_key = ? ORDER BY number DESC LIMIT 1"
)
_PAYLOAD = (
    "SELECT coalesce(payload, (SELECT payload FROM skuld_contents WHERE task = number)) "
    "FROM skuld_tasks WHERE queue = ? AND id = ?"
)
_ADD = (
    "INSERT INTO skuld_tasks (number, queue, id, partition, name, priority, dependencies, retries, "
    "timeout_s, payload, revision, status, claim, holder, worker, ttl_s, clock, ends_at_s, updates, due, "
    "failures, error, result, blocked, ready, timer, after_failure, unique_key, unique_for_s, "
    "limit_key, max_running, rate_limit) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (queue, id) DO NOTHING"
)
_ADD_PLAIN = (
    "INSERT INTO skuld_tasks (number, queue, id, partition, name, priority, dependencies, retries, "  # noqa: S608
    "timeout_s, payload, revision, status, due, failures, error, blocked, ready, timer, after_failure) "
    f"VALUES (?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?, {WAITING}, ?, 0, '', 0, ?, ?, ?) "
    "ON CONFLICT (queue, id) DO NOTHING"
)
"""Adds a task without dependencies and limits that was never tried, with a third of the values to bind."""
_ADD_CONTENT = "INSERT INTO skuld_contents (task, after, payload) VALUES (?, ?, ?)"
_ADD_DEPENDENT = "INSERT OR IGNORE INTO skuld_dependents (queue, id, task) VALUES (?, ?, ?)"
_FIND = (
    "SELECT number, status, blocked, after_failure, name, limit_key FROM skuld_tasks "
    "WHERE queue = ? AND id = ? AND partition = ? AND revision = ?"
)
MOVE = (
    "UPDATE skuld_tasks SET status = ?, claim = ?, holder = ?, worker = ?, ttl_s = ?, clock = ?, "
    "ends_at_s = ?, updates = ?, due = ?, failures = ?, error = ?, result = ?, ready = ?, timer = ?, "
    "revision = ? WHERE number = ?"
)
_ADD_UPDATE = "INSERT OR REPLACE INTO skuld_updates (task, claim, sequence, content) VALUES (?, ?, ?, ?)"
_NEW_NOTE = (
    "INSERT INTO skuld_notes (queue, content, version) VALUES (?, ?, 1) ON CONFLICT (queue) DO NOTHING"
)
_NEXT_NOTE = "UPDATE skuld_notes SET content = ?, version = version + 1 WHERE queue = ? AND version = ?"
_PAUSE = "SELECT pause FROM skuld_pauses WHERE queue = ? AND schedule = ''"
_PUT_PAUSE = "INSERT OR REPLACE INTO skuld_pauses (queue, schedule, pause) VALUES (?, ?, ?)"
_END_PAUSE = "DELETE FROM skuld_pauses WHERE queue = ? AND schedule = ?"
_HAS_DEPENDENTS = "SELECT 1 FROM skuld_dependents WHERE queue = ? LIMIT 1"
_NEXT_DEPENDENTS = (
    "SELECT task FROM skuld_dependents WHERE queue = ? AND id = ? AND task > ? AND task <= ? "
    "ORDER BY task LIMIT ?"
)
_OF_DEPENDENTS = (
    "number IN (SELECT task FROM skuld_dependents WHERE queue = ? AND id = ? AND task > ? AND task <= ?) "
    "AND (? >> after_failure) & 1"
)
_SETTLED = "SELECT queue, id, freed, offered, told, last FROM skuld_settled"
_SETTLED_FIRST = f"{_SETTLED} LIMIT 1"
_SETTLED_ONE = f"{_SETTLED} WHERE queue = ? AND id = ?"
_PUT_SETTLED = (
    "INSERT OR REPLACE INTO skuld_settled (queue, id, freed, offered, told, last) VALUES (?, ?, ?, ?, ?, ?)"
)
_DELETE_SETTLED = "DELETE FROM skuld_settled WHERE queue = ? AND id = ?"
_FREE = (
    "UPDATE skuld_tasks SET blocked = blocked - 1, "  # noqa: S608
    f"ready = CASE WHEN blocked = 1 AND status = {WAITING} AND timer IS NULL AND ready IS NOT 1 "
    f"THEN CASE WHEN limit_key IS NULL THEN 1 ELSE {HELD} END ELSE ready END "
    f"WHERE blocked > 0 AND {_OF_DEPENDENTS} RETURNING name, limit_key"
)
_BLOCK = (
    f"UPDATE skuld_tasks SET blocked = blocked + 1 WHERE {_OF_DEPENDENTS} "  # noqa: S608
    "RETURNING name, limit_key"
)
_OF_LIMIT = f"WHERE {ADMITTED} AND queue = ? AND name = ? AND limit_key = ?"
_HELD_BEST = (
    "SELECT number, max_running, rate_limit, priority, id FROM skuld_tasks INDEXED BY skuld_tasks_held "  # noqa: S608
    f"WHERE ready = {HELD} AND queue = ? AND name = ? AND limit_key = ? ORDER BY priority DESC, id LIMIT 1"
)
_ADMITTED = f"SELECT count(*) FROM skuld_tasks INDEXED BY skuld_tasks_admitted {_OF_LIMIT}"  # noqa: S608
_ADMITTED_WORST = (
    "SELECT number, priority, id FROM skuld_tasks INDEXED BY skuld_tasks_admitted "  # noqa: S608
    f"{_OF_LIMIT} AND status = {WAITING} ORDER BY priority, id DESC LIMIT 1"
)
_SET_READY = "UPDATE skuld_tasks SET ready = ? WHERE number = ?"
_OFFER = (
    f"UPDATE skuld_tasks SET ready = CASE WHEN limit_key IS NULL OR ready = 1 THEN 1 ELSE {HELD} END "  # noqa: S608
    f"WHERE status = {WAITING} AND timer IS NULL AND claim IS NULL AND {_OF_DEPENDENTS} "
    "RETURNING name, limit_key"
)
_OWNER = "SELECT token FROM skuld_owners WHERE queue = ? AND partition = ?"
_OWN = (
    "INSERT INTO skuld_owners (queue, partition, token) VALUES (?, ?, ?) "
    "ON CONFLICT (queue, partition) DO UPDATE SET token = excluded.token"
)
_NOTE = "INSERT OR REPLACE INTO skuld_workers (queue, process, note) VALUES (?, ?, ?)"
_DELETE_NOTE = "DELETE FROM skuld_workers WHERE queue = ? AND process = ?"
_TALLY = "SELECT number, skipped FROM skuld_outboxes WHERE queue = ? AND outbox = ?"
_COUNT_ENTRY = (
    "INSERT INTO skuld_outboxes (queue, outbox, number, skipped) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (queue, outbox) DO UPDATE SET number = excluded.number, skipped = excluded.skipped"
)
_DEPENDENTS = "SELECT task FROM skuld_dependents WHERE queue = ? AND id = ?"
_AFTER = "SELECT after FROM skuld_contents WHERE task = ?"
_FORGET_DEPENDENT = "DELETE FROM skuld_dependents WHERE queue = ? AND id = ? AND task = ?"
_FORGET = (
    "DELETE FROM skuld_collected WHERE task = ?",
    "DELETE FROM skuld_updates WHERE task = ?",
    "DELETE FROM skuld_contents WHERE task = ?",
    "DELETE FROM skuld_tasks WHERE number = ?",
)


def _mask(choices: Iterable[AfterFailure]) -> int:
    """Return choices as a set of bits."""
    return sum(1 << CHOICES.index(each) for each in choices)


def _masks(before: Status | None, status: Status) -> tuple[int, int, int]:
    """Return the choices for which a dependency is settled now, is no longer settled, and has failed."""
    freed = (each for each in CHOICES if settles(status, each) and not settles(before, each))
    blocked = (each for each in CHOICES if settles(before, each) and not settles(status, each))
    failed = (each for each in CHOICES if fails(status, each) and not fails(before, each))
    return _mask(freed), _mask(blocked), _mask(failed)


_MASKS = {(before, status): _masks(before, status) for before in (None, *STATUSES) for status in STATUSES}
STEP = 500
"""Maximum number of dependents, or of collected tasks, that one transaction changes."""
COUNT_EVERY = 128
"""Maximum number of changes that each read of the counts adds up."""
KEPT_CHANGES = 20_000
"""Number of changes that are kept; a watch that is farther behind reports a loss."""
FORGET_STEP = 1_000
"""Number of changes that are deleted at once, so that most transactions delete none."""


def _is_plain(write: Enqueue) -> bool:
    """True if only the task's own row is to be written."""
    head = write.task.head
    return (
        not (head.after or head.unique_key or head.max_running or head.rate_limit)
        and len(write.task.payload) <= INLINE_BYTES
        and is_new(write.state)
    )


class Writing:
    """The writes of one transaction: each in turn, then ``finish``.

    The connection of ``cursor`` holds the write lock. ``known`` has a revision, and the numbers of queues
    that were committed by then: they are read again if the file has gone back since.
    """

    def __init__(self, cursor: sqlite3.Cursor, known: Known | None = None) -> None:
        self.cursor = cursor
        self._before, self._counted, self._forgotten = latest(cursor)
        self._revision = self._before
        self._queues = dict(known[1]) if known is not None and known[0] <= self._before else {}
        self._tokens: dict[tuple[int, int], int | None] = {}
        self._with_dependents: dict[int, bool] = {}
        self._changes: list[tuple[int, int, int, int | None, int | None]] = []

    @property
    def known(self) -> Known:
        """Revision and queue numbers to pass to the next transaction, once this one is committed."""
        return self._revision, self._queues

    @property
    def changed(self) -> bool:
        """True if any write took effect."""
        return self._revision > self._before

    @property
    def next_revision(self) -> int:
        """The revision that the next change takes."""
        return self._revision + 1

    def define(self, queue: str, partitions: int) -> int:
        """Define a queue if it is new, and return its number of partitions."""
        self.cursor.execute(_DEFINE, (queue, partitions))
        (defined,) = self.cursor.execute(_PARTITIONS, (queue,)).fetchone()
        return int(defined)

    def note_worker(self, queue: str, process: str, note: bytes | None) -> None:
        """Store a process's note; None deletes it.

        Raises:
            InvalidState: the queue was never defined.
        """
        if note is None:
            self.cursor.execute(_DELETE_NOTE, (self.queue(queue), process))
        else:
            self.cursor.execute(_NOTE, (self.queue(queue), process, note))

    def carry_out(self, write: Write) -> Answer:
        """Execute one write, if its condition holds.

        Raises:
            InvalidState: its queue was never defined.
        """
        match write:
            case Move():
                return self._move(write)
            case Enqueue():
                return self._enqueue(write)
            case EnqueueAll():
                return self._enqueue_all(write.enqueues)
            case Skip():
                return self._skip(self.queue(write.queue), write.entry)
            case TakeOver():
                return self._take_over(write)
            case Collect():
                return self._collect(write)

    def put_note(self, queue: str, content: bytes, version: int) -> bool:
        """Store the note of a queue, if the present one is of this version; True if so."""
        if version:
            self.cursor.execute(_NEXT_NOTE, (content, self.queue(queue), version))
        else:
            self.cursor.execute(_NEW_NOTE, (self.queue(queue), content))
        return self.cursor.rowcount > 0

    def put_pause(self, queue: str, schedule: str, pause: bytes | None) -> None:
        """Set the pause of a schedule, or of the queue if the name is empty; None deletes it.

        It takes a revision, so that watches of commits are notified.
        """
        if pause is None:
            self.cursor.execute(_END_PAUSE, (self.queue(queue), schedule))
        else:
            self.cursor.execute(_PUT_PAUSE, (self.queue(queue), schedule, pause))
        self.changes(self.queue(queue))

    def is_paused(self, queue: int) -> bool:
        """True if no task of a queue may be claimed (SK-23)."""
        return self.cursor.execute(_PAUSE, (queue,)).fetchone() is not None

    def finish(self) -> None:
        """Write the rows that all writes share; the caller commits next."""
        if self._changes:
            self.cursor.execute(_CHANGES, (json.dumps(self._changes),))
        if self._revision - self._counted < COUNT_EVERY:
            return
        for (queue, status), difference in counts_since(self.cursor, self._counted).items():
            if difference:
                self.cursor.execute(_COUNT, (queue, status, difference))
        forgotten = self._forgotten
        if self._revision - forgotten >= KEPT_CHANGES + FORGET_STEP:
            forgotten = self._revision - KEPT_CHANGES
            self.cursor.execute(_FORGET_CHANGES, (self._forgotten, forgotten))
        self.cursor.execute(_COUNTED, (self._revision, forgotten))

    def changes(self, queue: int, task: int = 0, before: int | None = None, status: int | None = None) -> int:
        """Take the next revision and record its changes, for watches and counts."""
        self._revision += 1
        self._changes.append((self._revision, queue, task, before, status))
        return self._revision

    def queue(self, name: str) -> int:
        """Return the number of a queue.

        Raises:
            InvalidState: it was never defined.
        """
        number = self._queues.get(name)
        if number is None:
            row = self.cursor.execute(_QUEUE, (name,)).fetchone()
            if row is None:
                raise InvalidState(f"there is no queue {name!r} yet: define it first")
            number = self._queues[name] = row[0]
        return number

    def _enqueue(self, write: Enqueue) -> Answer:
        queue, entry = self.queue(write.task.head.queue), write.forwarded
        if entry is None:
            return self._add(queue, write)
        answer = self._tally(queue, entry).refusal(entry) or self._add(queue, write)
        if isinstance(answer, Applied):
            self._count_entry(queue, entry, skipped=False)
        return answer

    def _enqueue_all(self, enqueues: Sequence[Enqueue]) -> Answer:
        """Check all tasks before adding the first: a refusal must have no effect."""
        queue = self.queue(enqueues[0].task.head.queue)
        added: set[TaskId] = set()
        for each in enqueues:
            head = each.task.head
            if self._status(queue, head.id) is not None:
                return self._exists(queue, each)
            after = () if each.waits_for_unknown else dict.fromkeys(head.after)
            unknown = tuple(task for task in after if task not in added and self._status(queue, task) is None)
            if unknown:
                return Unknown(unknown)
            added.add(head.id)
        return [self._add(queue, each) for each in enqueues][-1]

    def _skip(self, queue: int, entry: Forwarded) -> Answer:
        tally = self._tally(queue, entry)
        if not tally.has_skipped(entry):
            refusal = tally.refusal(entry)
            if refusal is not None:
                return refusal
            self._count_entry(queue, entry, skipped=True)
        return Applied(self.changes(queue))

    def _tally(self, queue: int, entry: Forwarded) -> OutboxTally:
        row = self.cursor.execute(_TALLY, (queue, entry.outbox)).fetchone()
        return OutboxTally() if row is None else OutboxTally(row[0], bool(row[1]))

    def _count_entry(self, queue: int, entry: Forwarded, *, skipped: bool) -> None:
        self.cursor.execute(_COUNT_ENTRY, (queue, entry.outbox, entry.number, skipped))

    def _add(self, queue: int, write: Enqueue) -> Answer:
        return self._add_plain(queue, write) if _is_plain(write) else self._add_related(queue, write)

    def _add_related(self, queue: int, write: Enqueue) -> Answer:
        head, state, payload = write.task.head, write.state, write.task.payload
        duplicate = self._duplicate(queue, head) if head.unique_key else None
        if duplicate is not None:
            return duplicate
        found = [(task, self._status(queue, task)) for task in dict.fromkeys(head.after)]
        if head.after and not write.waits_for_unknown:
            if self._status(queue, head.id) is not None:
                return self._exists(queue, write)
            unknown = tuple(task for task, status in found if status is None)
            if unknown:
                return Unknown(unknown)
        number, is_large = self._revision + 1, len(payload) > INLINE_BYTES
        choice = head.after_failure
        blocked = sum(not settles(status, choice) for _, status in found)
        waits = blocked > 0 and state.claim is None and not any(fails(status, choice) for _, status in found)
        row = state_row(state)
        where = place(row[0], state.due, blocked=waits)
        where = held_back(where) if head.is_limited else where
        self.cursor.execute(
            _ADD,
            (
                *(number, queue, id_bytes(head.id), write.partition, head.name, head.priority),
                *(len(head.after), head.retries, head.timeout_s, None if is_large else payload, number),
                *(*row, blocked, *where, CHOICES.index(choice)),
                *((head.unique_key, head.unique_for_s) if head.unique_key else (None, None)),
                *(
                    (head.limit_key, head.max_running, head.rate_limit or None)
                    if head.is_limited
                    else (None, None, None)
                ),
            ),
        )
        if not self.cursor.rowcount:
            return self._refused(queue, write)
        self._revision = number
        if head.after or is_large:
            self.cursor.execute(_ADD_CONTENT, (number, ids_bytes(head.after), payload if is_large else None))
        if head.after:
            self._with_dependents[queue] = True
            dependents = ((queue, id_bytes(task), number) for task, _ in found)
            self.cursor.executemany(_ADD_DEPENDENT, dependents)
        if state.status not in OPEN:
            self.changed_to(queue, head.id, None, state.status)
        if head.is_limited:
            self.admit(queue, [(head.name, head.limit_key)])
        return Applied(number)

    def _add_plain(self, queue: int, write: Enqueue) -> Answer:
        head, due, number = write.task.head, write.state.due, self._revision + 1
        where = place(WAITING, due, blocked=False)
        self.cursor.execute(
            _ADD_PLAIN,
            (
                *(number, queue, id_bytes(head.id), write.partition, head.name, head.priority, head.retries),
                *(head.timeout_s, write.task.payload, number, due, *where, CHOICES.index(head.after_failure)),
            ),
        )
        if not self.cursor.rowcount:
            return self._refused(queue, write)
        self._revision = number
        return Applied(number)

    def _refused(self, queue: int, write: Enqueue) -> Answer:
        """Return the answer to an enqueue whose id is taken; add it if that task is to be deleted."""
        is_gone = self._status(queue, write.task.head.id) is None
        return self._add(queue, write) if is_gone else self._exists(queue, write)

    def _duplicate(self, queue: int, head: Head) -> Duplicate | None:
        """Return the answer for a new task that is a duplicate; None if it is not."""
        if self._status(queue, head.id) is not None:
            return None
        key = (queue, head.name, head.unique_key)
        row = self.cursor.execute(_LAST_OF_KEY, key).fetchone()
        while row is not None and self._status(queue, row[0].hex()) is None:
            row = self.cursor.execute(_LAST_OF_KEY, key).fetchone()
        if row is None or not is_duplicate(head.id, row[0].hex(), row[1], STATUSES[row[2]]):
            return None
        return Duplicate(row[0].hex())

    def _status(self, queue: int, task: TaskId) -> Status | None:
        row = self.cursor.execute(_STATUS, (queue, id_bytes(task))).fetchone()
        return None if row is None or self._is_collected(queue, *row) else STATUSES[row[1]]

    def _is_collected(self, queue: int, number: int, status: int) -> bool:
        """Delete a task that a collection has decided to delete; True if so (SK-14).

        An undecided collection is given up: one of its tasks is needed.
        """
        if STATUSES[status] in OPEN:
            return False
        row = self.cursor.execute(_COLLECTED, (number,)).fetchone()
        if row is None:
            return False
        if not row[0]:
            self.cursor.execute(_GIVE_UP_COLLECTION)
            return False
        self.forget(queue, number, status)
        return True

    def failed_dependency(self, queue: int, head: Head) -> FailedDependency | None:
        """Return the first failed dependency that makes this task fail; None if there is none."""
        for task in head.after:
            status = self._status(queue, task)
            if status is not None and fails(status, head.after_failure):
                return FailedDependency(task, status)
        return None

    def changed_to(self, queue: int, task: TaskId, before: Status | None, status: Status) -> None:
        """Update the dependents of a task whose status has changed; ``before`` is None if it is new.

        If there are many, update the first of them here, and the others later in ``tell_dependents``. But all
        are blocked at once: a claim must not find a task ready that depends on an open one.
        """
        freed, blocked, offered = _MASKS[before, status]
        if not freed | blocked | offered:
            return
        has_dependents = self._with_dependents.get(queue)
        if has_dependents is None:
            has_dependents = self.cursor.execute(_HAS_DEPENDENTS, (queue,)).fetchone() is not None
            self._with_dependents[queue] = has_dependents
        if not has_dependents:
            return
        key = (queue, id_bytes(task))
        if before is not None:  # also an open one: a process of schema 4 may have requeued it meanwhile
            while settled := self.cursor.execute(_SETTLED_ONE, key).fetchone():
                self._tell_next(*settled)
        if blocked:
            self._tell(_BLOCK, blocked, key, 0, self._revision)
        if freed | offered:
            self._tell_next(*key, freed, offered, 0, self._revision)

    def tell_dependents(self) -> None:
        """Update the next dependents of a settled task that still has some to notify, if any."""
        settled = self.cursor.execute(_SETTLED_FIRST).fetchone()
        if settled is not None:
            self._tell_next(*settled)
            self.changes(settled[0])

    def _tell_next(self, queue: int, task: bytes, freed: int, offered: int, told: int, last: int) -> None:
        """Update the first dependents numbered after ``told`` up to ``last``; store that there are more."""
        found = self.cursor.execute(_NEXT_DEPENDENTS, (queue, task, told, last, STEP + 1)).fetchall()
        if len(found) > STEP:
            now_told = found[STEP - 1][0]
            self.cursor.execute(_PUT_SETTLED, (queue, task, freed, offered, now_told, last))
        else:
            now_told = last
            if told:
                self.cursor.execute(_DELETE_SETTLED, (queue, task))
        for statement, choices in ((_FREE, freed), (_OFFER, offered)):
            self._tell(statement, choices, (queue, task), told, now_told)

    def _tell(self, statement: str, choices: int, task: tuple[int, bytes], told: int, last: int) -> None:
        if choices:
            self.admit(task[0], self.cursor.execute(statement, (*task, told, last, choices)).fetchall())

    def admit(self, queue: int, limits: Iterable[tuple[str, str | None]]) -> None:
        """Make held tasks of changed limits ready, as far as the limits have room (SK-23).

        Each limit is the name of a function and a key; a key of None stands for no limit.
        """
        for name, limit_key in set(limits):
            while limit_key is not None and self._admits(queue, name, limit_key):
                pass

    def _admits(self, queue: int, name: str, limit_key: str) -> bool:
        """Admit the best held task of a limit; True if there may be another one to admit."""
        key = (queue, name, limit_key)
        best = self.cursor.execute(_HELD_BEST, key).fetchone()
        if best is None:
            return False
        number, max_running, rate_limit, priority, task = best
        (admitted,) = self.cursor.execute(_ADMITTED, key).fetchone()
        worst = self.cursor.execute(_ADMITTED_WORST, key).fetchone()
        is_full = bool(max_running) and admitted >= max_running
        if is_full or (rate_limit is not None and worst is not None):
            if worst is None or (-worst[1], worst[2]) < (-priority, task):
                return False
            self.cursor.execute(_SET_READY, (HELD, worst[0]))
            if max_running and admitted > max_running:
                return True
        self.cursor.execute(_SET_READY, (1, number))
        return True

    def _exists(self, queue: int, write: Enqueue) -> Exists:
        head = write.task.head
        key = (queue, id_bytes(head.id))
        stored = stored_of(head.queue, self.cursor.execute(_STORED, key).fetchone())
        (payload,) = self.cursor.execute(_PAYLOAD, key).fetchone()
        return Exists(stored, payload)

    def _move(self, write: Move) -> Answer:
        queue = self.queue(write.queue)
        epoch = write.epoch
        if epoch is not None and self._token(queue, epoch.partition) != epoch.token:
            return WriteConflict()
        if epoch is not None and self.is_paused(queue):
            return Paused()
        key = (queue, id_bytes(write.id), write.partition, write.revision)
        found = self.cursor.execute(_FIND, key).fetchone()
        if found is None:
            return WriteConflict()
        number, before, blocked, choice, name, limit_key = found
        if self._is_collected(queue, number, before):
            return WriteConflict()
        row = state_row(write.state)
        waits = blocked > 0 and write.state.claim is None and choice != FAIL
        where = place(row[0], write.state.due, blocked=waits)
        where = where if limit_key is None else held_back(where)
        revision = self.changes(queue, number, before, row[0])
        self.cursor.execute(MOVE, (*row, *where, revision, number))
        if write.update is not None:
            update = write.update
            self.cursor.execute(_ADD_UPDATE, (number, update.claim, update.sequence, update.content))
        if row[0] != before:
            self.changed_to(queue, write.id, STATUSES[before], write.state.status)
        if limit_key is not None:
            self.admit(queue, [(name, limit_key)])
        return Applied(revision)

    def _token(self, queue: int, partition: int) -> int | None:
        """Return the token of a partition's owner, None if it has had none yet."""
        key = (queue, partition)
        if key not in self._tokens:
            row = self.cursor.execute(_OWNER, key).fetchone()
            self._tokens[key] = None if row is None else row[0]
        return self._tokens[key]

    def _take_over(self, write: TakeOver) -> Answer:
        queue, epoch = self.queue(write.queue), write.epoch
        present = self._token(queue, epoch.partition)
        if present is not None and present > epoch.token:
            return WriteConflict()
        if present != epoch.token:
            self.cursor.execute(_OWN, (queue, epoch.partition, epoch.token))
            self._tokens[queue, epoch.partition] = epoch.token
        return Applied(self.changes(queue))

    def _collect(self, write: Collect) -> Answer:
        queue = self.queue(write.queue)
        found: dict[int, tuple[TaskId, int]] = {}
        for task, (partition, revision) in write.tasks.items():
            row = self.cursor.execute(_FIND, (queue, id_bytes(task), partition, revision)).fetchone()
            if row is not None and not self._is_collected(queue, *row[:2]):  # also what else is to be deleted
                found[row[0]] = (task, row[1])
        if len(found) < len(write.tasks):
            return WriteConflict()
        if any(self.others_depend(queue, task, found) for task, _ in found.values()):
            return WriteConflict()
        for number, (_, status) in found.items():
            self.forget(queue, number, status)
        return Applied(self._revision)

    def others_depend(self, queue: int, task: TaskId, numbers: Container[int]) -> bool:
        """True if a task of another number than these depends on this one."""
        dependents = self.cursor.execute(_DEPENDENTS, (queue, id_bytes(task)))
        return any(dependent not in numbers for (dependent,) in dependents)

    def forget(self, queue: int, number: int, status: int) -> None:
        """Delete a task with all its rows; ``status`` is its code."""
        self.changes(queue, number, status)
        row = self.cursor.execute(_AFTER, (number,)).fetchone()
        for dependency in ids_of(b"" if row is None else row[0]):
            self.cursor.execute(_FORGET_DEPENDENT, (queue, id_bytes(dependency), number))
        for statement in _FORGET:
            self.cursor.execute(statement, (number,))
