"""One connection to the registry's file: opening, transactions and checkpoints."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tenacity import Retrying, retry_if_exception, stop_before_delay, wait_random_exponential

from rebalanser import forks
from rebalanser.errors import QuotaExceeded, RegistryUnavailable, UnusableStore
from rebalanser.folders import make_file
from rebalanser_sqlite.failures import commit_failure, failure, is_busy
from rebalanser_sqlite.location import check_place, log_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from rebalanser_sqlite.clock import MonotonicClock

APPLICATION_ID = 0x5242_4C31
SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE meta (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    revision INTEGER NOT NULL,
    forgotten_revision INTEGER NOT NULL,
    history_bytes INTEGER NOT NULL,
    last_lease INTEGER NOT NULL
);
INSERT INTO meta VALUES (1, 0, 0, 0, 0);
CREATE TABLE kv (
    key TEXT NOT NULL COLLATE BINARY PRIMARY KEY,
    value BLOB NOT NULL,
    create_revision INTEGER NOT NULL,
    mod_revision INTEGER NOT NULL,
    lease INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX kv_of_lease ON kv (lease) WHERE lease <> 0;
CREATE TABLE leases (
    id INTEGER PRIMARY KEY,
    ttl_s REAL NOT NULL,
    ends_at_s REAL NOT NULL,
    boot_id TEXT NOT NULL
);
CREATE TABLE changes (
    revision INTEGER NOT NULL,
    key TEXT NOT NULL COLLATE BINARY,
    value BLOB,
    PRIMARY KEY (revision, key)
) WITHOUT ROWID;
"""
OLDEST = (3, 33)
"""The first SQLite with UPDATE FROM, by which workers claim many tasks in one statement."""
SETTINGS = (
    "PRAGMA page_size = 2048",
    "PRAGMA synchronous = FULL",
    "PRAGMA wal_autocheckpoint = 0",
    "PRAGMA journal_size_limit = 16777216",
    "PRAGMA secure_delete = OFF",
)
COMMITS_PER_CHECKPOINT = 100
"""Commits between two checkpoints, so that the write-ahead log has about 1,000 pages, SQLite's default."""

RESERVE_BYTES = 4 << 20
"""Bytes on the disk that are reserved for heartbeats, which need them for the log.

A database that can't grow keeps the log from being emptied, and a log that can't grow refuses every write.
"""
LOG_WARNING_BYTES = 64 << 20
"""Minimum size of a write-ahead log that causes a warning, if no checkpoint can empty it."""
SCARCE_BYTES = 16 * RESERVE_BYTES
"""With less room, the file grows at once and not with a later checkpoint, when others may have taken it."""

T = TypeVar("T")
_log = logging.getLogger("rebalanser.sqlite")


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time limit of a request, on this process's monotonic clock."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline of a request that begins now."""
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Return the seconds left, 0 if it has passed."""
        return max(0.0, self.at - time.monotonic())


def patiently(action: Callable[[], T], deadline: Deadline) -> T:
    """Call a function; retry until the deadline while another connection holds its lock."""
    try:
        return action()  # nearly always the only try: to set up the others takes longer than SQLite takes
    except sqlite3.Error as error:
        if not is_busy(error):
            raise
    return Retrying(
        retry=retry_if_exception(is_busy),
        wait=wait_random_exponential(multiplier=0.0005, max=0.008),
        stop=stop_before_delay(deadline.left_s),
        reraise=True,
    )(action)


class _WriteTransaction:
    """Context manager of ``Store.writing``; a generator would take a tenth of a small transaction."""

    __slots__ = ("_ends", "_ends_within_s", "_store")

    def __init__(self, store: Store, ends: Deadline, ends_within_s: float | None) -> None:
        self._store = store
        self._ends = ends
        self._ends_within_s = ends_within_s

    def __enter__(self) -> None:
        self._ends = self._store.begin_write(self._ends, self._ends_within_s)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._store.end_write(self._ends, error)


class Store:
    """One connection. The caller ensures that one thread at a time uses it.

    It is closed while this process is forked, and opened again at its next use, here and in the child; see
    ``rebalanser.forks``.

    Args:
        path: the file; created if it does not exist.
        clock: the clock for leases.
        boot_id: the id of the clock's run; leases of another run are over.
        deadline: time limit for waiting while other processes open or write it.
        file_mode: the mode of the file, if it is created, and of those that SQLite keeps beside it.

    Raises:
        UnusableStore: the place can't have a registry; the message says why and what to do.
        QuotaExceeded: the disk is full.
        RegistryUnavailable: other processes kept it locked.
        Forked: the parent was busy with it when this process was forked.
    """

    def __init__(
        self, path: Path, clock: MonotonicClock, boot_id: str, deadline: Deadline, file_mode: int = 0o600
    ) -> None:
        if sqlite3.sqlite_version_info < OLDEST:
            raise UnusableStore(
                f"{path} needs SQLite {'.'.join(map(str, OLDEST))} or later, and this Python has "
                f"{sqlite3.sqlite_version}: use a newer Python, or a newer libsqlite3 of the system"
            )
        self.unsafe_reasons = check_place(path)
        """Warnings about the file's place, one sentence each."""
        self.path = path
        self._log = log_of(path)
        self._beside = (self._log, self._log.with_name(f"{path.resolve().name}-shm"))
        self.boot_id = boot_id
        self.clock = clock
        self._commits = 0
        self._log_warned_bytes = 0
        self._checkpointer: sqlite3.Connection | None = None
        self._identities: dict[str, tuple[int, int]] = {}
        self._page_bytes = 0
        self._pages_left = 0
        """The pages that the last transaction left; 0 if these must be counted before the next one."""
        self._pages_before = 0
        self._pages_now = 0
        self._is_scarce = False
        """True if the disk had little room when the database last grew."""
        self._settings = list(SETTINGS)
        self._is_suspended = False
        self._is_closed = False
        self._is_writing = False
        with forks.postponed:
            make_file(path, file_mode)
            self._open(deadline)
            forks.before_fork(self._suspend)
            forks.in_child(self._keep_inherited)

    def set(self, pragma: str) -> None:
        """Execute a PRAGMA of the connection, also when it is opened again."""
        with forks.postponed:
            self._settings.append(pragma)
            self.connection.execute(pragma)

    def _open(self, deadline: Deadline) -> None:
        forks.refuse_inherited(self.path)
        self._see_that_none_is_cut_off(deadline)
        with self._failures():
            self.connection = self._connect()
        try:
            with self._failures():
                patiently(self._prepare, deadline)
            self._pages_left = 0
            self._identities = {str(file): self._identity(str(file)) for file in (self.path, *self._beside)}
            self._check_identity()
        except BaseException:
            self.connection.close()
            raise

    def _suspend(self) -> None:
        """Close the connections, as the process is about to be forked."""
        if not self._is_closed:
            self._is_suspended = True
            self._close_connections()
            # The files beside it may go with the last connection of the host; the file itself may not.
            path = str(self.path)
            self._identities = {path: self._identities.get(path, (0, 0))}

    def _resume(self, deadline: Deadline) -> None:
        """Open the connection again, if it was suspended."""
        if not self._is_suspended:
            return
        self._check_identity()
        opened = self._identities
        try:
            self._open(deadline)
        except BaseException:
            self._identities = opened
            raise
        self._is_suspended = False

    def _keep_inherited(self) -> None:
        if not self._is_suspended and not self._is_closed:
            forks.keep_inherited(self.path, self.connection, self._checkpointer)
            self._is_suspended = True

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self.path, timeout=0, isolation_level=None, check_same_thread=False, cached_statements=64
        )

    def _prepare(self) -> None:
        try:
            for setting in self._settings:
                self.connection.execute(setting)
            if self._is_new():
                self._create()
            if self.connection.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
                raise UnusableStore(f"{self.path} is on a filesystem without shared memory; use a local disk")
            self._begin_reading()  # opens the log and the shared memory, if nothing before has
        finally:
            self._roll_back()

    def _is_new(self) -> bool:
        """Return True if the database is empty; raise UnusableStore if it is another program's."""
        self.connection.execute("BEGIN")
        ((application_id,), (version,), (objects,)) = (
            self.connection.execute(sql).fetchone()
            for sql in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
        )
        self.connection.execute("COMMIT")
        if application_id == 0 and version == 0 and objects == 0:
            return True
        if application_id != APPLICATION_ID:
            raise UnusableStore(f"{self.path} is the database of another program; name another file")
        if version != SCHEMA_VERSION:
            raise UnusableStore(
                f"{self.path} has schema {version} and this version of rebalanser knows {SCHEMA_VERSION}; "
                "upgrade rebalanser on this host"
            )
        return False

    def _create(self) -> None:
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("BEGIN IMMEDIATE")
        if self.connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
            for statement in SCHEMA.split(";"):
                self.connection.execute(statement)
            self.connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self.connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self.connection.execute("COMMIT")

    def _see_that_none_is_cut_off(self, deadline: Deadline) -> None:
        """Refuse a file that another process has open with a log or shared memory that is not beside it.

        That log was removed, or the process has the file by another name, as in another container. SQLite
        would create new files beside this name. Then neither process would see the other's writes, and each
        would own all resources.
        """
        try:
            patiently(self._see_that_none_has_it_open, deadline)
        except sqlite3.Error as error:
            if not is_busy(error):
                raise failure(error, self.path) from error
            missing = " and ".join(str(file) for file in self._beside if not file.exists())
            raise UnusableStore(
                f"another process has {self.path} open, but {missing or 'its log'} is not there: it was "
                "removed, or that process has the file by another name; stop all processes that use it, "
                "then start them again"
            ) from error

    def _see_that_none_has_it_open(self) -> None:
        """Lock the whole file if one beside it is missing; fails while a process has it open."""
        is_new = not self.path.exists() or not self.path.stat().st_size
        if is_new or all(file.exists() for file in self._beside):
            return
        with closing(self._connect()) as alone:
            try:
                # In this mode SQLite keeps the log's index in its own memory and creates no shared memory.
                alone.execute("PRAGMA locking_mode = EXCLUSIVE")
                alone.execute("BEGIN EXCLUSIVE")
                alone.execute("ROLLBACK")
            except sqlite3.Error as error:
                if is_busy(error):
                    raise
                raise failure(error, self.path) from error

    @staticmethod
    def _identity(file: str) -> tuple[int, int]:
        try:
            found = os.stat(file)  # noqa: PTH116 - as below
        except OSError:
            return 0, 0
        return found.st_dev, found.st_ino

    def _check_identity(self) -> None:
        """Refuse to continue if the file or one beside it is not the one that was opened.

        Another file has another history: two sets of processes would each own all resources.
        """
        for file, opened in self._identities.items():
            try:
                found = os.stat(file)  # noqa: PTH116 - half the time of Path.stat, three times a transaction
                is_other = (found.st_dev, found.st_ino) != opened
            except OSError:
                is_other = True
            if is_other:
                raise UnusableStore(
                    f"{file} was removed or replaced while in use; stop all processes that use {self.path}, "
                    "then start them again"
                )

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise failure(error, self.path) from error

    @contextmanager
    def reading(self, deadline: Deadline) -> Iterator[int]:
        """Take a snapshot and return its revision. Neither waits for a writer nor blocks one."""
        with forks.postponed:
            self._resume(deadline)
            self._check_identity()
            with self._failures(), self._rolled_back_at_end():
                yield patiently(self._begin_reading, deadline)

    def _begin_reading(self) -> int:
        # Roll back first: a busy SELECT leaves the BEGIN open, and a second BEGIN would fail.
        self._roll_back()
        self.connection.execute("BEGIN")
        return self.revision()

    def writing(self, deadline: Deadline, ends_within_s: float | None = None) -> AbstractContextManager[None]:
        """Run the only write transaction of the host; commit at the end, or roll back on an error.

        It begins before the deadline, and commits before that too, or ``ends_within_s`` seconds after it has
        begun.

        Raises:
            RegistryUnavailable: the deadline passed before the commit; no effect.
            OutcomeUnknown: the disk failed during the commit.
        """
        return _WriteTransaction(self, deadline, ends_within_s)

    def begin_write(self, deadline: Deadline, ends_within_s: float | None) -> Deadline:
        """Begin a write transaction, and return when it must end. No thread forks until it has ended."""
        forks.postponed.__enter__()
        self._is_writing = True
        try:
            self._resume(deadline)
            self._pages_before, self._pages_left, self._pages_now = self._pages_left, 0, 0
            patiently(self._begin_writing, deadline)
            self._check_identity()
            return deadline if ends_within_s is None else Deadline.after(ends_within_s)
        except sqlite3.Error as error:
            self.abandon_write()
            raise failure(error, self.path) from error
        except BaseException:
            self.abandon_write()
            raise

    def end_write(self, ends: Deadline, error: BaseException | None) -> None:
        """Commit a write transaction, or roll it back after an error."""
        try:
            if isinstance(error, sqlite3.Error):
                raise failure(error, self.path) from error
            if error is None:
                self._commit(ends)
        finally:
            self.abandon_write()
        if error is None:
            self._commits += 1
            self._pages_left = self._pages_now

    def abandon_write(self) -> None:
        """Roll back a write transaction that this thread has begun, unless it has ended.

        A thread that is interrupted on the way into ``end_write``, or into this, calls this.
        """
        if self._is_writing:
            try:
                if not self._is_suspended:
                    self._roll_back()
            finally:
                forks.postponed.__exit__()
                self._is_writing = False

    def _begin_writing(self) -> None:
        self.connection.execute("BEGIN IMMEDIATE")

    def _commit(self, ends: Deadline) -> None:
        if not ends.left_s:
            raise RegistryUnavailable(f"timed out before {self.path} could commit; no effect, try again")
        try:
            self.connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise commit_failure(error, self.path) from error

    @contextmanager
    def _rolled_back_at_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._roll_back()

    def _roll_back(self) -> None:
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def revision(self) -> int:
        """Return the latest revision, as this transaction sees it."""
        (revision,) = self.connection.execute("SELECT revision FROM meta").fetchone()
        return int(revision)

    def pages(self) -> int:
        """Return the number of the database's pages, as this transaction sees it."""
        (pages,) = self.connection.execute("PRAGMA page_count").fetchone()
        return int(pages)

    def pages_before(self) -> int:
        """Return the number of pages before this transaction has changed anything.

        While the disk has room it is the number after the last transaction of this connection: if others have
        added pages meanwhile, this transaction counts as one that does.
        """
        return self._pages_before or self.pages()

    def check_room(self, pages_before: int) -> None:
        """Refuse a transaction that enlarges the database when the disk has room only for heartbeats.

        Raises:
            QuotaExceeded: the disk is nearly full.
            RegistryUnavailable: the free space can't be read.
        """
        pages = self.pages()
        if pages <= pages_before:
            self._pages_now = 0 if self._is_scarce else pages
            return
        if not self._page_bytes:
            (self._page_bytes,) = self.connection.execute("PRAGMA page_size").fetchone()
        page_bytes = self._page_bytes
        try:
            disk, file_bytes = os.statvfs(self.path), os.stat(self.path).st_size  # noqa: PTH116
        except OSError as error:
            raise RegistryUnavailable(
                f"the disk of {self.path} does not report its free space: {error.strerror}; try again"
            ) from error
        not_yet_in_the_file = pages * page_bytes - file_bytes
        free = disk.f_bavail * disk.f_frsize - not_yet_in_the_file
        self._is_scarce = free < SCARCE_BYTES
        if self._is_scarce:
            self._commits = COMMITS_PER_CHECKPOINT
        else:
            self._pages_now = pages
        if free < RESERVE_BYTES:
            raise QuotaExceeded(
                f"the disk of {self.path} is nearly full, and the last {RESERVE_BYTES >> 20} MB are left for "
                "heartbeats; free space on its disk"
            )

    def checkpoint_if_due(self) -> None:
        """Make a checkpoint every ``COMMITS_PER_CHECKPOINT`` commits."""
        if self._commits < COMMITS_PER_CHECKPOINT:
            return
        with forks.postponed:
            if not self._is_suspended:
                self.checkpoint()

    def checkpoint(self) -> None:
        """Copy the write-ahead log into the database, so that the next commit starts the log again.

        A second connection does this while this one holds the write lock, so that no commit can reset the log
        meanwhile. If the lock is not free now, or the disk fails, a later commit tries again.
        """
        pinned = None
        with suppress(sqlite3.Error), self._rolled_back_at_end():
            if self._checkpointer is None:
                self._checkpointer = self._connect()
                for setting in SETTINGS:
                    self._checkpointer.execute(setting)
            self.connection.execute("BEGIN IMMEDIATE")
            _, pages, copied = self._checkpointer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            (page_bytes,) = self._checkpointer.execute("PRAGMA page_size").fetchone()
            pinned = (pages - copied) * page_bytes
            self._commits = 0
        if pinned is not None:
            self._warn_of_log(pinned)

    def _warn_of_log(self, kept_bytes: int) -> None:
        """Warn of a log that grows because a reader never ends; again whenever its size has doubled.

        No other process can end that read: its process was stopped, or a person began it by hand.
        """
        if kept_bytes < LOG_WARNING_BYTES:
            self._log_warned_bytes = 0
        elif kept_bytes >= 2 * self._log_warned_bytes:
            self._log_warned_bytes = kept_bytes
            _log.warning(
                "%s-wal can't be emptied of %d MB: a process has been reading since they were written; "
                "end or continue it (fuser %s shows all that have it open)",
                self.path,
                kept_bytes >> 20,
                self.path,
                extra={"action": "log_pinned"},
            )

    def ring(self) -> None:
        """Wake up the watchers of all processes after a commit; see ``rebalanser_sqlite.file_notifier``."""
        with suppress(OSError):
            os.close(os.open(self._log, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Close the connection; the host's last one also empties the write-ahead log."""
        with forks.postponed:
            if not self._is_suspended:
                self._close_connections()
            self._is_suspended, self._is_closed = False, True

    def _close_connections(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None
        self.connection.close()
