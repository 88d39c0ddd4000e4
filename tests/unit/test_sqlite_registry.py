"""What the SQLite registry promises beyond the contract: across restarts, boots, limits and failures."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sqlite3
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rebalanser.core.group import Member
from rebalanser.core.group.messages import Alive, Heartbeat, Join, Joined
from rebalanser.errors import (
    InternalError,
    LeaseNotFound,
    OutcomeUnknown,
    QuotaExceeded,
    RebalanserError,
    RegistryUnavailable,
    RequestTooLarge,
    UnusableStore,
)
from rebalanser.registry import RegistryCoordinator
from rebalanser.registry.contract import (
    Absent,
    Changed,
    Created,
    Delete,
    Done,
    Get,
    Grant,
    Granted,
    HistoryLost,
    KeepAlive,
    KeyValue,
    Outcome,
    Put,
    Range,
    Reply,
    Revoke,
    Stat,
    Stats,
    Target,
    Transaction,
)
from rebalanser.registry.urls import open_registry
from rebalanser.testing import FakeClock
from rebalanser.testing.registry_suite import EventRecorder
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_sqlite import SqliteRegistry, history, location, store, transactions, watcher
from rebalanser_sqlite import file_notifier as notifier
from rebalanser_sqlite.failures import commit_failure, failure
from rebalanser_sqlite.tasks.engine import SqliteEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rebalanser.registry.contract import Guard, Operation


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "groups.db"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def registry(path: Path, clock: FakeClock) -> Iterator[SqliteRegistry]:
    with contextlib.closing(SqliteRegistry(path, clock=clock, boot_id="this boot")) as opened:
        yield opened


def commit(registry: SqliteRegistry, *then: Operation, guards: tuple[Guard, ...] = ()) -> Outcome:
    outcome = registry.execute(Transaction(guards, then), PATIENCE_S)
    assert isinstance(outcome, Outcome)
    return outcome


def grant(registry: SqliteRegistry, ttl_s: float = 10.0) -> int:
    granted = registry.execute(Grant(ttl_s), PATIENCE_S)
    assert isinstance(granted, Granted)
    return granted.lease


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("as SQLite says")
    error.sqlite_errorcode = code
    return error


def test_the_url_opens_it(path: Path) -> None:
    with contextlib.closing(open_registry(f"sqlite:///{path}")) as opened:
        assert isinstance(opened, SqliteRegistry)
        assert opened.capabilities.survives_process
        assert not opened.capabilities.shared_between_hosts


@pytest.mark.rule("RB-28")
@pytest.mark.parametrize("kind", [SqliteRegistry, SqliteEngine])
def test_a_sqlite_that_is_too_old_is_said_before_a_file_is_made(
    kind: type[SqliteRegistry | SqliteEngine], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version", "3.32.3")
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 32, 3))
    with pytest.raises(UnusableStore, match=r"needs SQLite 3\.33 or later, and this Python has 3\.32\.3: "):
        kind(path)
    assert not path.exists()
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 33, 0))
    kind(path).close()


def test_revisions_and_lease_ids_go_on_after_a_restart(path: Path, clock: FakeClock) -> None:
    seen: list[tuple[int, int]] = []
    for _ in range(3):
        with contextlib.closing(SqliteRegistry(path, clock=clock, boot_id="this boot")) as registry:
            lease = grant(registry)
            commit(registry, Put("k", b"", lease))
            seen.append((commit(registry, Delete("k")).revision, lease))
    assert seen == [(2, 1), (4, 2), (6, 3)]


@pytest.mark.rule("RB-28")
def test_a_watch_tells_what_came_before_the_restart(path: Path) -> None:
    with contextlib.closing(SqliteRegistry(path)) as registry:
        commit(registry, Put("k", b"before"))
    recorder = EventRecorder(PATIENCE_S)
    with contextlib.closing(SqliteRegistry(path)) as registry:
        registry.watch(Target("k"), 1, recorder)
        commit(registry, Put("k", b"after"))
        recorder.wait_for(Changed("k", 1, b"before"), Changed("k", 2, b"after"))


@pytest.mark.rule("RB-20")
def test_a_lease_of_another_boot_is_over(path: Path, clock: FakeClock, registry: SqliteRegistry) -> None:
    lease = grant(registry, 1e9)
    created = commit(registry, Put("node", b"", lease)).revision
    with contextlib.closing(SqliteRegistry(path, clock=clock, boot_id="next boot")) as later:
        assert not commit(later, guards=(Created("node", created),)).succeeded
        with pytest.raises(LeaseNotFound):
            later.execute(KeepAlive(lease), PATIENCE_S)
        assert grant(later) > lease


@pytest.mark.rule("RB-20")
def test_no_read_sees_a_key_of_a_lease_that_is_over(registry: SqliteRegistry, clock: FakeClock) -> None:
    created = commit(registry, Put("node", b"", grant(registry, 10))).revision
    clock.advance(9.99)
    assert commit(registry, guards=(Created("node", created),)).succeeded
    clock.advance(0.02)
    outcome = commit(registry, Get("node"), Range("n"), Stat("n"), guards=(Absent("node"),))
    assert outcome == Outcome(True, created + 1, (None, (), Stats(0, 0)))


def test_a_request_refused_for_its_lease_still_ends_the_lease(
    registry: SqliteRegistry, clock: FakeClock
) -> None:
    lease = grant(registry, 10)
    created = commit(registry, Put("node", b"", lease)).revision
    clock.advance(11)
    with pytest.raises(LeaseNotFound):
        commit(registry, Put("other", b"", lease))
    assert registry._store.revision() == created + 1
    assert commit(registry, Range("")).results == ((),)


@pytest.mark.rule("RB-33")
@pytest.mark.parametrize(
    "request_",
    [
        Transaction(then=(Put("", b""),)),
        Transaction(then=(Put("tab\t", b""),)),
        Transaction(then=(Get("ü"),)),
        Transaction(guards=(Absent("\n"),)),
        Transaction(then=(Put("k", b"1"), Delete("k"))),
        Transaction(then=(Transaction(then=(Transaction(),)),)),
    ],
    ids=["empty", "unprintable", "not-ascii", "guard", "twice", "too-deep"],
)
def test_a_request_that_is_not_well_formed(registry: SqliteRegistry, request_: Transaction) -> None:
    with pytest.raises(InternalError):
        registry.execute(request_, PATIENCE_S)
    assert commit(registry).revision == 0


def test_time_over_before_the_commit_has_no_effect(
    registry: SqliteRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = store.Deadline.after

    def over_soon(seconds: float) -> store.Deadline:
        return before(0.0 if seconds == 1.0 else seconds)

    monkeypatch.setattr(store.Deadline, "after", over_soon)
    with pytest.raises(RegistryUnavailable, match="no effect"):
        registry.execute(Transaction(then=(Put("k", b""),)), 1.0)
    assert commit(registry, Get("k")) == Outcome(True, 0, (None,))


def test_a_thread_waits_for_another_no_longer_than_its_time(registry: SqliteRegistry) -> None:
    with registry._lock, pytest.raises(RegistryUnavailable, match="other threads"):
        registry.execute(Grant(1), 0.0)


@pytest.mark.rule("RB-21")
def test_a_heartbeat_is_one_transaction(registry: SqliteRegistry, clock: FakeClock) -> None:
    group = RegistryCoordinator(registry, "root", "group", clock.now, PATIENCE_S)
    joined = group.perform(Join(Member("n-0", "n"), 10.0))
    assert isinstance(joined, Joined)
    statements: list[str] = []
    registry._store.connection.set_trace_callback(statements.append)
    for leading in (False, True):
        assert isinstance(group.perform(Heartbeat(joined.session, read_fingerprint=leading)), Alive)
    assert [each for each in statements if not each.startswith(("SELECT", "UPDATE leases"))] == [
        "BEGIN IMMEDIATE",
        "COMMIT",
    ] * 2


@pytest.mark.rule("RB-21")
def test_a_heartbeat_waits_for_no_long_range(
    registry: SqliteRegistry, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, brief = grant(registry), grant(registry, 1.0)
    created = commit(registry, Put("node", b"", lease)).revision
    commit(registry, Put("other", b"", brief))
    begun, over, real = threading.Event(), threading.Event(), transactions.answer
    outcomes: list[Reply] = []

    def long(connection: sqlite3.Connection, chosen: transactions.Chosen, revision: int) -> Outcome:
        if isinstance(chosen.operations[0], Range):
            begun.set()
            assert over.wait(PATIENCE_S)
        return real(connection, chosen, revision)

    monkeypatch.setattr(transactions, "answer", long)
    clock.advance(2.0)
    read = Transaction(guards=(Created("node", created),), then=(Range(""),))
    reader = threading.Thread(target=lambda: outcomes.append(registry.execute(read, PATIENCE_S)))
    reader.start()
    assert begun.wait(PATIENCE_S)
    with contextlib.closing(SqliteRegistry(registry._path, clock=clock, boot_id="this boot")) as elsewhere:
        proof = Transaction((Created("node", created),), (Stat("node"),))
        for beating in (registry, elsewhere):
            proven = beating.execute(KeepAlive(lease, proof), 1.0)
            assert proven == Outcome(True, created + 2, (Stats(1, created),))
            assert commit(beating, Get("other"), guards=(Created("node", created),)).succeeded
    over.set()
    reader.join()
    assert outcomes == [Outcome(True, created + 2, ((KeyValue("node", b"", created, created, lease),),))]


@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
def test_a_file_replaced_while_in_use_is_noticed(
    path: Path, registry: SqliteRegistry, *, write: bool
) -> None:
    commit(registry, Put("k", b"old world"))
    path.rename(path.with_suffix(".old"))
    with pytest.raises(UnusableStore, match="removed or replaced"):
        commit(registry, Put("k", b"") if write else Get("k"))
    path.touch()
    with pytest.raises(UnusableStore, match="removed or replaced"):
        commit(registry, Put("k", b"") if write else Get("k"))


@pytest.mark.rule("RB-1")
@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
def test_a_log_removed_while_in_use_is_noticed(
    path: Path, registry: SqliteRegistry, suffix: str, *, write: bool
) -> None:
    commit(registry, Put("k", b"seen by none who opens it now"))
    beside = path.with_name(f"groups.db{suffix}")
    beside.unlink()
    with pytest.raises(
        UnusableStore, match=f"groups.db{suffix} was removed or replaced while in use; stop all"
    ):
        commit(registry, Put("k", b"") if write else Get("k"))
    beside.touch()
    with pytest.raises(UnusableStore, match="removed or replaced"):
        registry.execute(KeepAlive(1) if write else Transaction(), PATIENCE_S)


@pytest.mark.rule("RB-1")
@pytest.mark.parametrize("suffixes", [("-wal", "-shm"), ("-wal",), ("-shm",)], ids=["both", "log", "memory"])
def test_nobody_opens_a_file_whose_users_have_lost_its_log(path: Path, suffixes: tuple[str, ...]) -> None:
    with contextlib.closing(SqliteRegistry(path)) as first:
        commit(first, Put("k", b"1"))
        for suffix in suffixes:
            path.with_name(f"groups.db{suffix}").unlink()
        with pytest.raises(UnusableStore, match=f"has {path} open, but {path}{suffixes[0]}"):
            SqliteRegistry(path, 0.0)
        with pytest.raises(UnusableStore):
            commit(first, Get("k"))
    with contextlib.closing(SqliteRegistry(path)) as later:
        assert commit(later, Put("k", b"2")).revision > 0


def test_a_log_that_a_crash_left_without_shared_memory_is_taken_over(path: Path) -> None:
    with contextlib.closing(SqliteRegistry(path)) as first:
        commit(first, Put("k", b"1"))
        kept = [(file, file.read_bytes()) for file in (path, path.with_name("groups.db-wal"))]
    for file, content in kept:
        file.write_bytes(content)
    with contextlib.closing(SqliteRegistry(path)) as later:
        assert commit(later, Get("k")).results == (KeyValue("k", b"1", 1, 1),)


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let this process open ``count`` more files only."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    listed = [int(descriptor.name) for descriptor in Path("/proc/self/fd").iterdir()]
    used = {number for number in listed if Path(f"/proc/self/fd/{number}").exists()}
    free = [number for number in range(max(used) + count + 1) if number not in used]
    fillers = [os.open(os.devnull, os.O_RDONLY) for _ in free[: -count or None]]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + count + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


def test_a_file_that_can_be_opened_later_is_not_refused(path: Path) -> None:
    with contextlib.closing(SqliteRegistry(path)) as opened:
        commit(opened, Put("k", b"1"))
    for count in range(3):
        with (
            descriptors_left(count),
            pytest.raises(RegistryUnavailable, match=r"no file descriptor left; try again"),
        ):
            SqliteRegistry(path)
    with descriptors_left(8):
        SqliteRegistry(path).close()


def test_watches_need_no_more_descriptors(path: Path, registry: SqliteRegistry) -> None:
    recorder = EventRecorder(PATIENCE_S)
    with contextlib.closing(SqliteRegistry(path)) as watching:
        with descriptors_left(0):
            watching.watch(Target("k"), 1, recorder)
            commit(registry, Put("k", b"1"))
        recorder.wait_for(Changed("k", 1, b"1"))


def test_a_closed_registry(path: Path) -> None:
    registry = SqliteRegistry(path)
    registry.close()
    registry.close()
    with pytest.raises(RegistryUnavailable, match="closed"):
        commit(registry)
    with pytest.raises(RegistryUnavailable, match="closed"):
        registry.watch(Target("k"), 1, EventRecorder(PATIENCE_S))


def open_files_below(folder: Path) -> list[str]:
    """The open files of this process in ``folder``; others come and go with whatever else it runs."""
    targets = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            targets.append(str(descriptor.readlink()))
    return [target for target in targets if target.startswith(str(folder))]


def test_closing_gives_back_threads_and_descriptors(path: Path) -> None:
    threads = set(threading.enumerate())
    registry, recorder = SqliteRegistry(path), EventRecorder(PATIENCE_S)
    registry.watch(Target("k"), 1, recorder)
    commit(registry, Put("k", b""))
    recorder.wait_for(Changed("k", 1, b""))
    assert open_files_below(path.parent)
    registry.close()
    assert open_files_below(path.parent) == []
    assert set(threading.enumerate()) <= threads
    assert not path.with_name("groups.db-wal").exists()


@pytest.mark.rule("RB-28")
def test_history_is_bounded_by_revisions(registry: SqliteRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_REVISIONS", 20)
    monkeypatch.setattr(history, "FORGET_STEP", 5)
    for _ in range(100):
        commit(registry, Put("k", b"v"))
    extent = history.extent(registry._store)
    assert 20 <= extent.latest - extent.forgotten < 25
    (rows, size) = registry._store.connection.execute(
        "SELECT count(*), sum(length(key) + length(value)) FROM changes"
    ).fetchone()
    assert rows == extent.latest - extent.forgotten
    assert registry._store.connection.execute("SELECT history_bytes FROM meta").fetchone() == (size,)
    recorder = EventRecorder(PATIENCE_S)
    registry.watch(Target("k"), 1, recorder)
    recorder.wait_for(Changed("k", 100, b"v"))
    assert recorder.told[0] == HistoryLost(extent.forgotten)
    assert recorder.changes == [Changed("k", n, b"v") for n in range(extent.forgotten + 1, 101)]


def test_history_is_bounded_by_bytes(registry: SqliteRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_BYTES", 10_000)
    for number in range(100):
        commit(registry, Put("k", bytes(1000)), Delete(f"{number}"))
        (size,) = registry._store.connection.execute(
            "SELECT sum(length(key) + coalesce(length(value), 0)) FROM changes"
        ).fetchone()
        assert size <= 10_000
    (kept,) = registry._store.connection.execute("SELECT count(*) FROM changes").fetchone()
    assert kept > 3


def test_the_log_is_kept_short_by_checkpoints(path: Path, registry: SqliteRegistry) -> None:
    for number in range(20 * store.COMMITS_PER_CHECKPOINT):
        commit(registry, Put(f"k/{number % 50}", b"x" * 100))
    pages = path.with_name("groups.db-wal").stat().st_size / 4096
    assert pages < 20 * store.COMMITS_PER_CHECKPOINT
    assert not registry._store.connection.in_transaction


def test_nothing_is_left_open_that_would_keep_the_log_from_shrinking(
    path: Path, registry: SqliteRegistry
) -> None:
    recorder = EventRecorder(PATIENCE_S)
    registry.watch(Target("k"), 1, recorder)
    commit(registry, Put("k", b""), Get("other"))
    commit(registry, Get("k"))
    recorder.wait_for(Changed("k", 1, b""))
    with contextlib.closing(sqlite3.connect(path, timeout=PATIENCE_S)) as other:
        busy, _, _ = other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    assert busy == 0


def test_a_full_database_is_refused_and_survived(registry: SqliteRegistry) -> None:
    connection = registry._store.connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(QuotaExceeded, match="free space"):
        commit(registry, Put("big", bytes(1_000_000)))
    assert commit(registry, Range("")) == Outcome(True, 0, ((),))
    connection.execute("PRAGMA max_page_count = 1000000")
    assert commit(registry, Put("big", bytes(1_000_000))).revision == 1


def test_a_log_that_a_reader_keeps_from_being_emptied_is_warned_about(
    path: Path,
    registry: SqliteRegistry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(store, "LOG_WARNING_BYTES", 1 << 20)

    def write_megabytes(count: int) -> int:
        caplog.clear()
        for _ in range(count):
            commit(registry, Put("k", bytes(1 << 20)))
            registry._store.checkpoint()
        return caplog.text.count("-wal can't be emptied of")

    assert write_megabytes(4) == 0
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as reader:
        for _ in range(2):
            reader.execute("BEGIN")
            reader.execute("SELECT revision FROM meta").fetchone()
            assert 2 <= write_megabytes(9) <= 4, "at each doubling"
            assert f"fuser {path} shows" in caplog.text
            reader.execute("COMMIT")
            assert write_megabytes(4) == 0


@pytest.mark.rule("RB-28")
def test_history_makes_room_in_a_full_database(registry: SqliteRegistry) -> None:
    for number in range(40):
        commit(registry, Put(f"k/{number % 4}", bytes(3000)))
    connection = registry._store.connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    recorder = EventRecorder(PATIENCE_S)
    for number in range(40):
        commit(registry, Put(f"k/{number % 4}", bytes(3000)))
    kept = history.extent(registry._store)
    assert 0 < kept.forgotten < kept.latest == 80
    registry.watch(Target("k/0"), 1, recorder)
    recorder.wait_for(Changed("k/0", 77, bytes(3000)))
    assert recorder.told[0] == HistoryLost(kept.forgotten)


@pytest.mark.rule("RB-21")
def test_the_last_room_on_the_disk_is_for_heartbeats(
    registry: SqliteRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = grant(registry)
    revision = commit(registry, Put("node", b"", lease)).revision
    monkeypatch.setattr(store, "RESERVE_BYTES", 1 << 62)
    with pytest.raises(QuotaExceeded, match=r"nearly full, and the last .* MB are left for heartbeats"):
        commit(registry, Put("big", bytes(1_000_000)))
    assert registry.execute(KeepAlive(lease), PATIENCE_S) == Done()
    assert commit(registry, Get("big")) == Outcome(True, revision, (None,))
    assert commit(registry, Put("node", b"small", lease)).succeeded
    registry.execute(Revoke(lease), PATIENCE_S)
    assert commit(registry, Range("")).results == ((),)


@pytest.mark.parametrize(
    ("code", "before_commit", "at_commit"),
    [
        (sqlite3.SQLITE_BUSY, RegistryUnavailable, RegistryUnavailable),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, RegistryUnavailable, RegistryUnavailable),
        (sqlite3.SQLITE_FULL, QuotaExceeded, QuotaExceeded),
        (sqlite3.SQLITE_IOERR_WRITE, RegistryUnavailable, RegistryUnavailable),
        (sqlite3.SQLITE_IOERR_SHMSIZE, RegistryUnavailable, OutcomeUnknown),
        (sqlite3.SQLITE_IOERR_FSYNC, RegistryUnavailable, OutcomeUnknown),
        (sqlite3.SQLITE_NOMEM, RegistryUnavailable, OutcomeUnknown),
        (sqlite3.SQLITE_READONLY, UnusableStore, OutcomeUnknown),
        (sqlite3.SQLITE_CORRUPT, UnusableStore, OutcomeUnknown),
        (sqlite3.SQLITE_MISUSE, InternalError, OutcomeUnknown),
    ],
)
def test_what_an_error_of_sqlite_means(
    path: Path, code: int, before_commit: type[RebalanserError], at_commit: type[RebalanserError]
) -> None:
    assert type(failure(sqlite_error(code), path)) is before_commit
    assert type(commit_failure(sqlite_error(code), path)) is at_commit


def test_a_value_that_sqlite_does_not_take_is_too_large(registry: SqliteRegistry) -> None:
    registry._store.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1_000)
    with pytest.raises(RequestTooLarge, match="larger than SQLite allows"):
        commit(registry, Put("k", bytes(2_000)))
    assert commit(registry, Get("k")) == Outcome(True, 0, (None,))


@pytest.mark.parametrize("failing", [errno.EIO, errno.EMFILE])
def test_a_disk_that_does_not_say_how_full_it_is_takes_nothing_that_grows(
    registry: SqliteRegistry, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    def fail(_: object) -> os.statvfs_result:
        raise OSError(failing, os.strerror(failing))

    monkeypatch.setattr(os, "statvfs", fail)
    with pytest.raises(RegistryUnavailable, match=os.strerror(failing)):
        commit(registry, Put("big", bytes(1_000_000)))
    assert commit(registry, Get("big")) == Outcome(True, 0, (None,))


@pytest.mark.rule("RB-1")
@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
def test_a_log_removed_while_the_file_is_opened_is_noticed(
    path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    prepare = store.Store._prepare

    def prepare_and_lose(opened: store.Store) -> None:
        prepare(opened)
        path.with_name(f"groups.db{suffix}").unlink()

    monkeypatch.setattr(store.Store, "_prepare", prepare_and_lose)
    with pytest.raises(UnusableStore, match=f"groups.db{suffix} was removed or replaced while in use"):
        SqliteRegistry(path)


def test_an_error_of_the_disk_is_not_called_a_lack_of_space(path: Path) -> None:
    said = str(failure(sqlite_error(sqlite3.SQLITE_IOERR_WRITE), path))
    assert "its disk fails, a quota is used up, or a limit on the size of files is reached" in said


def test_without_inotify_changes_are_polled_for(
    path: Path, registry: SqliteRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("inotify_simple.INotify", exhausted)
    monkeypatch.setattr(watcher, "LOOK_S", 1e6)
    recorder = EventRecorder(PATIENCE_S)
    with contextlib.closing(SqliteRegistry(path)) as polling:
        polling.watch(Target("k"), 1, recorder)
        assert isinstance(polling._watcher._notifier, notifier.PollingNotifier)
        commit(registry, Put("k", b""))
        recorder.wait_for(Changed("k", 1, b""))


def test_the_notifier_alone_wakes_a_watch(
    path: Path, registry: SqliteRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "LOOK_S", 1e6)
    recorder = EventRecorder(PATIENCE_S)
    with contextlib.closing(SqliteRegistry(path)) as watching:
        watching.watch(Target("k"), 1, recorder)
        for number in range(1, 20):
            commit(registry, Put("k", b"%d" % number))
            recorder.wait_for(Changed("k", number, b"%d" % number))


@pytest.mark.skipif(sys.platform != "linux", reason="the notifier is heard by inotify")
def test_the_notifier_changes_nothing_on_the_disk_and_is_heard_at_a_new_log(
    path: Path, registry: SqliteRegistry
) -> None:
    """The last connection removes the log, as before a fork: who listens then hears of the next one."""
    with contextlib.closing(notifier.InotifyNotifier(path)) as heard:
        before = path.stat()
        registry._store.ring()
        assert heard._poll.poll(0)
        assert path.stat() == before
        registry._store._suspend()
        registry._bulk._suspend()
        assert not location.log_of(path).exists()
        for _ in range(3):
            heard.wait(0.0)
        assert heard._is_deaf
        commit(registry, Put("k", b""))
        heard.wait(None)
        assert not heard._is_deaf
        assert not heard._poll.poll(0)
        registry._store.ring()
        assert heard._poll.poll(0)


def test_a_sink_that_raises_does_not_end_the_others(registry: SqliteRegistry) -> None:
    def broken(_: object) -> None:
        raise ValueError("a broken sink")

    recorder = EventRecorder(PATIENCE_S)
    registry.watch(Target("k"), 1, broken)
    registry.watch(Target("k"), 1, recorder)
    for number in (1, 2):
        commit(registry, Put("k", b""))
        recorder.wait_for(Changed("k", number, b""))


def test_a_sink_may_close_the_registry(registry: SqliteRegistry) -> None:
    closed = threading.Event()

    def sink(_: object) -> None:
        registry.close()
        closed.set()

    registry.watch(Target("k"), 1, sink)
    commit(registry, Put("k", b""))
    assert closed.wait(PATIENCE_S)


def test_watches_go_on_when_the_file_could_not_be_read_for_a_while(
    registry: SqliteRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()
    extent = history.extent

    def failing_once(of: store.Store) -> history.Extent:
        if not failed.is_set():
            failed.set()
            raise sqlite_error(sqlite3.SQLITE_IOERR_READ)
        return extent(of)

    monkeypatch.setattr(history, "extent", failing_once)
    recorder = EventRecorder(PATIENCE_S)
    registry.watch(Target("k"), 1, recorder)
    assert failed.wait(PATIENCE_S)
    commit(registry, Put("k", b""))
    recorder.wait_for(Changed("k", 1, b""))


def test_ranges_and_leases_are_looked_up_by_index(registry: SqliteRegistry) -> None:
    plans = [
        row[3]
        for sql in (
            "SELECT key FROM kv WHERE key >= 'a' AND key < 'b' ORDER BY key",
            "SELECT key FROM kv WHERE lease = 1 AND lease <> 0",
            "SELECT key FROM changes WHERE revision >= 1 AND revision <= 2 ORDER BY revision, key",
        )
        for row in registry._store.connection.execute(f"EXPLAIN QUERY PLAN {sql}")
    ]
    assert len(plans) == 3
    assert all(plan.startswith("SEARCH") for plan in plans), plans
