"""The spool of an outbox: enqueued tasks that the engine may not have yet, in an SQLite file.

Every commit is synced to the disk before it is answered. Entries are numbered 1, 2, 3… by
``AUTOINCREMENT``: an entry that was rolled back takes no number, and one that was deleted never gives its
number back. The number under which the engine counts an entry is its number less the spool's ``base``.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self, TypeAlias

from pydantic import BaseModel, ConfigDict
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from rebalanser import forks
from rebalanser.core.tasks.model import Head, Task, TaskId, TaskState
from rebalanser.core.tasks.store import Enqueue, Forwarded
from rebalanser.errors import (
    OutcomeUnknown,
    RebalanserError,
    RegistryUnavailable,
    UnusableFolder,
    UnusableStore,
)
from rebalanser.folders import make_file, sync_folder

VERSION: Final = 1
SUFFIX: Final = ".spool"
PAGE_BYTES: Final = 4 << 20
"""Approximate maximum bytes of a spool in memory at once."""
UNPLACED: Final = -1
"""Partition of a spooled task, which gets its own when it is forwarded."""
SCHEMA: Final = """
CREATE TABLE spool (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    version INTEGER NOT NULL,
    queue TEXT NOT NULL,
    engine TEXT NOT NULL,
    id TEXT NOT NULL,
    base INTEGER NOT NULL
);
CREATE TABLE entries (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    content BLOB NOT NULL,
    payload BLOB NOT NULL,
    kind TEXT,
    reason TEXT
);
CREATE TABLE refused (
    number INTEGER PRIMARY KEY,
    content BLOB NOT NULL,
    payload BLOB NOT NULL,
    kind TEXT NOT NULL,
    reason TEXT NOT NULL
);
"""
DUPLICATE: Final = "Duplicate"
"""Kind of a refusal whose reason is the id of the task that keeps the entry out (SK-23)."""
KEPT_DUPLICATES: Final = 1000
"""Entries after which a duplicate is deleted: until then a process may wait for its outcome, and later
entries may depend on it."""
_SETTINGS: Final = ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL")
_IS_MADE: Final = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'spool'"
_ADD: Final = "INSERT INTO entries (content, payload) VALUES (?, ?)"
_FIRST: Final = "SELECT number, content, payload, kind, reason FROM entries ORDER BY number LIMIT ?"
_NEXT: Final = (
    "SELECT number, content, payload, kind, reason FROM entries WHERE number > ? ORDER BY number LIMIT ?"
)
_REFUSED: Final = (
    "SELECT number, content, payload, kind, reason FROM refused "  # noqa: S608 - of a constant
    f"WHERE number > ? AND kind <> '{DUPLICATE}' ORDER BY number LIMIT ?"
)
_COUNTS: Final = (
    "SELECT (SELECT count(*) FROM entries), "  # noqa: S608 - of a constant
    f"(SELECT count(*) FROM refused WHERE kind <> '{DUPLICATE}')"
)
_DUPLICATES: Final = (
    "SELECT json_extract(CAST(content AS TEXT), '$.head.id'), reason FROM refused "  # noqa: S608 - of a constant
    f"WHERE kind = '{DUPLICATE}'"
)
_FORGET_DUPLICATES: Final = "DELETE FROM refused WHERE kind = ? AND number <= ?"
_FORWARDED: Final = "DELETE FROM entries WHERE number BETWEEN ? AND ?"
_REFUSE: Final = "UPDATE entries SET kind = ?, reason = ? WHERE number = ?"
_KEEP: Final = (
    "INSERT INTO refused (number, content, payload, kind, reason) "
    "SELECT number, content, payload, kind, reason FROM entries WHERE number = ?"
)
_RENEW: Final = "UPDATE spool SET id = ?, base = ?"
_NO_EFFECT_AT_COMMIT: Final = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
)
_PRIMARY: Final = 0xFF
_PAGE: Final = 500

Row: TypeAlias = tuple[int, bytes, bytes, str | None, str | None]


class SpooledContent(BaseModel):
    """An entry without its payload."""

    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")

    head: Head
    state: TaskState
    waits_for_unknown: bool


@dataclass(frozen=True, slots=True)
class SpoolRefusal:
    """Reason for which an engine refuses an entry for good: the name of the error, and its message."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class SpoolEntry:
    """A task in the spool. One with a ``refusal`` is to be skipped."""

    number: int
    enqueue: Enqueue
    refusal: SpoolRefusal | None

    @property
    def head(self) -> Head:
        """Head of the task."""
        return self.enqueue.task.head


@dataclass(frozen=True, slots=True)
class SpoolName:
    """Name of a spool: queue and engine as people know them; ``key`` names the file."""

    queue: str
    engine: str
    key: str

    @classmethod
    def of(cls, queue: str, engine: str) -> Self:
        """Return the name of the spool for a queue and an engine."""
        digest = hashlib.blake2b(f"{queue}\n{engine}".encode(), digest_size=8).hexdigest()
        readable = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in queue[:40])
        return cls(queue, engine, f"{readable}-{digest}")

    def file_in(self, folder: Path) -> Path:
        """Path of the spool in a folder."""
        return folder / f"{self.key}{SUFFIX}"


class Spool:
    """One connection to a spool's file, which many processes may share. May be used from any thread.

    ``timeout_s`` is the maximum seconds to wait for others that write it.

    Raises:
        UnusableFolder: the file can't be made or written, or is no database.
        UnusableStore: it is of a newer version.
        RegistryUnavailable: other processes kept it locked.
    """

    def __init__(self, path: Path, name: SpoolName | None, timeout_s: float) -> None:
        """Without a ``name`` the spool must exist."""
        self.path = path
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._is_suspended = self._is_closed = False
        with forks.postponed:
            if name is not None:
                make_file(path)
            self._open()
            forks.before_fork(self._suspend)
            forks.in_child(self._keep_inherited)
        try:
            Retrying(
                retry=retry_if_exception_type(RegistryUnavailable),
                wait=wait_random_exponential(multiplier=0.005, max=0.1),
                stop=stop_after_delay(timeout_s),
                reraise=True,
            )(self._prepare, name)
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        forks.refuse_inherited(self.path)
        with self._failures():
            self._connection = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?mode=rw",
                uri=True,
                timeout=self._timeout_s,
                isolation_level=None,
                check_same_thread=False,
            )

    def _set(self) -> None:
        with self._failures():
            for setting in _SETTINGS:
                self._connection.execute(setting)

    def _suspend(self) -> None:
        """Close the connection, as the process is about to be forked."""
        if not self._is_closed:
            self._is_suspended = True
            self._connection.close()

    def _resume(self) -> None:
        self._open()
        try:
            self._set()
        except BaseException:
            self._connection.close()
            raise
        self._is_suspended = False

    def _keep_inherited(self) -> None:
        if not self._is_suspended and not self._is_closed:
            forks.keep_inherited(self.path, self._connection)
            self._is_suspended = True

    def add(self, tasks: Sequence[Enqueue]) -> range:
        """Spool tasks, all or none, synced to the disk (SK-4); return their numbers.

        Raises:
            UnusableFolder: they can't be written; none was spooled.
            OutcomeUnknown: the disk failed while they were synced.
        """
        rows = [(_dump(each), each.task.payload) for each in tasks]
        with self._writing() as cursor:
            for row in rows:
                cursor.execute(_ADD, row)
            last = cursor.lastrowid or 0
        return range(last - len(rows) + 1, last + 1)

    def first(self, limit: int) -> list[SpoolEntry]:
        """Return the entries to forward next, in their order."""
        return self._entries(_FIRST, limit)

    def identity(self) -> tuple[str, int]:
        """Return the outbox's id, and its ``base``, which is subtracted from the numbers of entries."""
        with self._reading() as cursor:
            (found,) = cursor.execute("SELECT id, base FROM spool").fetchall()
        return str(found[0]), int(found[1])

    def name(self) -> SpoolName:
        """Return the queue and the engine of the spool."""
        with self._reading() as cursor:
            ((queue, engine),) = cursor.execute("SELECT queue, engine FROM spool").fetchall()
        return SpoolName(queue, engine, self.path.name.removesuffix(SUFFIX))

    def waiting(self) -> Iterator[SpoolEntry]:
        """Iterate over the entries that wait, read page by page."""
        return self._all(_NEXT)

    def refused(self) -> Iterator[SpoolEntry]:
        """Iterate over the refused entries without duplicates, read page by page."""
        return self._all(_REFUSED)

    def left(self, first: int, last: int) -> set[int]:
        """Return the entries of these numbers that are still to be forwarded."""
        with self._reading() as cursor:
            found = cursor.execute("SELECT number FROM entries WHERE number BETWEEN ? AND ?", (first, last))
            return {number for (number,) in found}

    def refusal(self, number: int) -> SpoolRefusal | None:
        """Return the reason for which an entry was refused for good, if it was."""
        with self._reading() as cursor:
            row = cursor.execute("SELECT kind, reason FROM refused WHERE number = ?", (number,)).fetchone()
        return None if row is None else SpoolRefusal(*row)

    def duplicates(self) -> dict[TaskId, TaskId]:
        """Return the tasks that were dropped lately as duplicates, each with the existing task."""
        with self._reading() as cursor:
            return dict(cursor.execute(_DUPLICATES).fetchall())

    def counts(self) -> tuple[int, int]:
        """Count waiting and refused entries, without duplicates."""
        with self._reading() as cursor:
            ((waiting, refused),) = cursor.execute(_COUNTS).fetchall()
        return int(waiting), int(refused)

    def forward(self, first: int, last: int) -> None:
        """Delete entries that are in the engine."""
        with self._writing() as cursor:
            cursor.execute(_FORWARDED, (first, last))

    def refuse(self, number: int, refusal: SpoolRefusal) -> None:
        """Note that an entry can never be taken, before it is skipped."""
        with self._writing() as cursor:
            cursor.execute(_REFUSE, (refusal.kind, refusal.reason, number))

    def keep(self, number: int) -> None:
        """Keep a refused and skipped entry for an operator, as no caller waited for it.

        A duplicate is kept for a while, for a process that waits for it.
        """
        with self._writing() as cursor:
            cursor.execute(_KEEP, (number,))
            cursor.execute(_FORGET_DUPLICATES, (DUPLICATE, number - KEPT_DUPLICATES))
            cursor.execute(_FORWARDED, (number, number))

    def forget(self, number: int) -> None:
        """Delete a refused entry that was dealt with."""
        with self._writing() as cursor:
            cursor.execute("DELETE FROM refused WHERE number = ?", (number,))

    def renew(self, first: int) -> None:
        """Begin a new outbox with the entry of this number, as the engine has lost its tally."""
        with self._writing() as cursor:
            cursor.execute(_RENEW, (uuid.uuid4().hex, first - 1))

    def close(self) -> None:
        """Close the file. Closing twice does nothing."""
        with forks.postponed, self._lock:
            if not self._is_suspended:
                self._connection.close()
            self._is_suspended, self._is_closed = False, True

    def _all(self, statement: str) -> Iterator[SpoolEntry]:
        last = 0
        while page := self._entries(statement, last, _PAGE):
            yield from page
            last = page[-1].number

    def _entries(self, statement: str, *values: int) -> list[SpoolEntry]:
        """Return some entries: fewer if they are large, but at least one if there is any."""
        entries: list[SpoolEntry] = []
        size = 0
        with self._reading() as cursor:
            for row in cursor.execute(statement, values):
                entries.append(_entry(row))
                size += len(row[1]) + len(row[2])
                if size > PAGE_BYTES:
                    break
        return entries

    def _prepare(self, name: SpoolName | None) -> None:
        with forks.postponed, self._lock:
            self._set()
        if name is not None:
            self._make(name)
        with self._reading() as cursor:
            if cursor.execute(_IS_MADE).fetchone() is None:
                raise UnusableFolder(f"{self.path} is no spool of an outbox; move it away")
            (version,) = cursor.execute("SELECT version FROM spool").fetchone()
        if version != VERSION:
            raise UnusableStore(
                f"{self.path} is of version {version} and this rebalanser knows {VERSION}: upgrade it"
            )

    def _make(self, name: SpoolName) -> None:
        with self._writing() as cursor:
            if cursor.execute("SELECT 1 FROM sqlite_master").fetchone() is not None:
                return
            for statement in SCHEMA.split(";"):
                cursor.execute(statement)
            row = (VERSION, name.queue, name.engine, uuid.uuid4().hex)
            cursor.execute("INSERT INTO spool VALUES (1, ?, ?, ?, ?, 0)", row)
        sync_folder(self.path.parent)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Cursor]:
        with forks.postponed, self._lock:
            if self._is_suspended:
                self._resume()
            with self._failures(), closing(self._connection.cursor()) as cursor:
                yield cursor

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Cursor]:
        """Run a transaction: at the end all of it is on the disk, or none."""
        with self._reading() as cursor:
            cursor.execute("BEGIN IMMEDIATE")
            try:
                yield cursor
            except BaseException:
                self._roll_back()
                raise
            self._commit(cursor)

    def _commit(self, cursor: sqlite3.Cursor) -> None:
        try:
            cursor.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            code = _code_of(error)
            if code in _NO_EFFECT_AT_COMMIT or code & _PRIMARY in _NO_EFFECT_AT_COMMIT:
                raise
            raise OutcomeUnknown(
                f"the disk failed while {self.path} was synced ({error}): look with rebalanser tasks outbox"
            ) from error

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _failure(error, self.path) from error


def _code_of(error: sqlite3.Error) -> int:
    code = getattr(error, "sqlite_errorcode", None)
    return code if isinstance(code, int) else 0


def _failure(error: sqlite3.Error, path: Path) -> RebalanserError:
    if _code_of(error) & _PRIMARY in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
        return RegistryUnavailable(f"{path} stayed locked by another process; nothing was spooled, try again")
    return UnusableFolder(
        f"the outbox {path} can't be used ({error}): see to the space, the disk and the permissions there"
    )


def forwarded(entry: SpoolEntry, identity: tuple[str, int]) -> Forwarded:
    """Identify an entry of the outbox with this identity to the engine."""
    outbox, base = identity
    return Forwarded(outbox, entry.number - base)


def _dump(enqueue: Enqueue) -> bytes:
    content = SpooledContent(
        head=enqueue.task.head, state=enqueue.state, waits_for_unknown=enqueue.waits_for_unknown
    )
    return content.model_dump_json().encode()


def _entry(row: Row) -> SpoolEntry:
    number, text, payload, kind, reason = row
    content = SpooledContent.model_validate_json(text)
    enqueue = Enqueue(Task(content.head, payload), UNPLACED, content.state, content.waits_for_unknown)
    return SpoolEntry(number, enqueue, None if kind is None else SpoolRefusal(kind, reason or ""))


def placed(entry: SpoolEntry, partition: int, identity: tuple[str, int]) -> Enqueue:
    """Return the write that forwards an entry."""
    return replace(entry.enqueue, partition=partition, forwarded=forwarded(entry, identity))
