"""The SQLite engine beside its contract: group commit, moves in a caller's transaction, files, plans."""

from __future__ import annotations

import gc
import sqlite3
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from rebalanser import forks
from rebalanser.core.tasks.model import (
    ID_DIGITS,
    AfterFailure,
    ClaimState,
    ClaimTerm,
    Head,
    Status,
    Stored,
    Task,
    TaskState,
    Update,
)
from rebalanser.core.tasks.store import (
    Applied,
    ChangesLost,
    ClaimAnswer,
    ClaimQuery,
    Collect,
    Duplicate,
    Enqueue,
    Forwarded,
    Move,
    QueueNote,
    StatusFilter,
    Taken,
    Unknown,
    WriteConflict,
)
from rebalanser.errors import (
    InvalidState,
    OutcomeUnknown,
    QuotaExceeded,
    RegistryUnavailable,
    RequestTooLarge,
    UnusableStore,
)
from rebalanser.registry.contract import Put, Transaction
from rebalanser.registry.urls import parse_url
from rebalanser.tasks import Claim, Queue
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_sqlite import SqliteRegistry, history, location, store
from rebalanser_sqlite.tasks import (
    SqliteEngine,
    claims,
    collection,
    group_commit,
    open_engine,
    reader,
    rows,
    writer,
)
from rebalanser_sqlite.tasks.change_feed import ChangeFeed
from rebalanser_sqlite.tasks.schema import CHOICES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from types import FrameType

    from rebalanser.core.tasks.store import Answer, Write

QUEUE = "mail"
CLAIM = ClaimState(0, "holder", "worker", ClaimTerm(30.0, "boot", 1.0), 1)
COMPLETED = TaskState(Status.COMPLETED, CLAIM, result=b"done")


FIRST_SCHEMA = """
CREATE TABLE skuld_meta (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    version INTEGER NOT NULL,
    revision INTEGER NOT NULL
);
CREATE TABLE skuld_queues (
    number INTEGER PRIMARY KEY,
    name TEXT NOT NULL COLLATE BINARY UNIQUE,
    partitions INTEGER NOT NULL
);
CREATE TABLE skuld_owners (
    queue INTEGER NOT NULL,
    partition INTEGER NOT NULL,
    token INTEGER NOT NULL,
    PRIMARY KEY (queue, partition)
) WITHOUT ROWID;
CREATE TABLE skuld_tasks (
    number INTEGER PRIMARY KEY,
    queue INTEGER NOT NULL,
    id BLOB NOT NULL,
    partition INTEGER NOT NULL,
    name TEXT NOT NULL,
    priority INTEGER NOT NULL,
    dependencies INTEGER NOT NULL,
    retries INTEGER NOT NULL,
    timeout_s REAL,
    revision INTEGER NOT NULL,
    status TEXT NOT NULL,
    claim INTEGER,
    holder TEXT,
    worker TEXT,
    ttl_s REAL,
    clock TEXT,
    ends_at_s REAL,
    updates INTEGER,
    due REAL NOT NULL,
    failures INTEGER NOT NULL,
    error TEXT NOT NULL,
    result BLOB
);
CREATE UNIQUE INDEX skuld_tasks_by_id ON skuld_tasks (queue, id);
CREATE INDEX skuld_tasks_by_status ON skuld_tasks (queue, partition, status, id);
CREATE INDEX skuld_tasks_by_revision ON skuld_tasks (queue, revision);
CREATE TABLE skuld_contents (
    task INTEGER PRIMARY KEY,
    after BLOB NOT NULL,
    payload BLOB NOT NULL
);
CREATE TABLE skuld_dependents (
    queue INTEGER NOT NULL,
    id BLOB NOT NULL,
    task INTEGER NOT NULL,
    PRIMARY KEY (queue, id, task)
) WITHOUT ROWID;
CREATE TABLE skuld_updates (
    task INTEGER NOT NULL,
    claim INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (task, claim, sequence)
);
CREATE TABLE skuld_counts (
    queue INTEGER NOT NULL,
    status TEXT NOT NULL,
    tasks INTEGER NOT NULL,
    PRIMARY KEY (queue, status)
) WITHOUT ROWID;
"""
"""The tables of version 1; outboxes came later, and were added where they were missing."""


def task_id(number: int) -> str:
    return f"{number:0{ID_DIGITS}x}"


def enqueue(number: int, queue: str = QUEUE, after: tuple[str, ...] = ()) -> Enqueue:
    return Enqueue(Task(Head(task_id(number), queue, "send", after=after), b"payload"), 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mail.db"


@pytest.fixture
def engine(path: Path) -> Iterator[SqliteEngine]:
    with closing(SqliteEngine(path)) as engine:
        engine.define(QUEUE, 1, PATIENCE_S)
        yield engine


@pytest.fixture
def own(engine: SqliteEngine, path: Path) -> Iterator[sqlite3.Connection]:
    """The application's own connection to the engine's file, with a table of its own."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as connection:
        connection.execute("CREATE TABLE outputs (content TEXT)")
        yield connection


def present(engine: SqliteEngine, number: int) -> Stored:
    return engine.read(QUEUE, [task_id(number)], PATIENCE_S)[task_id(number)]


def completion(of: Stored) -> Move:
    return Move(of.head.id, QUEUE, of.partition, of.revision, COMPLETED, update=Update(0, 0, b"log"))


def outputs(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT count(*) FROM outputs").fetchone()[0])


# -- moves in a caller's transaction


@pytest.mark.rule("SK-10")
def test_a_task_is_completed_with_what_it_wrote(engine: SqliteEngine, own: sqlite3.Connection) -> None:
    (enqueued,) = engine.apply([enqueue(1)], PATIENCE_S)
    assert isinstance(enqueued, Applied)
    before = present(engine, 1)
    own.execute("BEGIN IMMEDIATE")
    own.execute("INSERT INTO outputs VALUES ('sent')")
    answer = engine.move_in(own, completion(before))
    assert answer == Applied(enqueued.revision + 1)
    assert present(engine, 1) == before, "seen before it was committed"
    own.execute("COMMIT")
    assert present(engine, 1).state == COMPLETED
    assert list(engine.updates(QUEUE, task_id(1), PATIENCE_S)) == [Update(0, 0, b"log")]
    assert engine.count(QUEUE, PATIENCE_S) == {Status.COMPLETED: 1}
    assert engine.apply([enqueue(2)], PATIENCE_S) == [Applied(enqueued.revision + 2)]
    assert outputs(own) == 1


@pytest.mark.rule("SK-10")
def test_a_task_is_not_completed_when_the_transaction_is_rolled_back(
    engine: SqliteEngine, own: sqlite3.Connection
) -> None:
    engine.apply([enqueue(1)], PATIENCE_S)
    before = present(engine, 1)
    own.execute("BEGIN IMMEDIATE")
    own.execute("INSERT INTO outputs VALUES ('sent')")
    assert isinstance(engine.move_in(own, completion(before)), Applied)
    own.execute("ROLLBACK")
    assert present(engine, 1) == before
    assert engine.count(QUEUE, PATIENCE_S) == {Status.WAITING: 1}
    assert outputs(own) == 0


@pytest.mark.rule("SK-6", "SK-10")
def test_a_fenced_move_changes_nothing_in_the_transaction(
    engine: SqliteEngine, own: sqlite3.Connection
) -> None:
    engine.apply([enqueue(1)], PATIENCE_S)
    stale = present(engine, 1)
    engine.apply(
        [Move(stale.head.id, QUEUE, 0, stale.revision, TaskState(Status.CLAIMED, CLAIM))], PATIENCE_S
    )
    claimed = present(engine, 1)
    own.execute("BEGIN")
    assert engine.move_in(own, completion(stale)) == WriteConflict()
    own.execute("COMMIT")
    assert present(engine, 1) == claimed
    assert list(engine.updates(QUEUE, task_id(1), PATIENCE_S)) == []


@pytest.mark.rule("SK-10")
def test_the_connection_may_have_factories_of_its_own(engine: SqliteEngine, own: sqlite3.Connection) -> None:
    engine.apply([enqueue(1)], PATIENCE_S)
    own.row_factory = lambda cursor, row: {
        column[0]: value for column, value in zip(cursor.description, row, strict=True)
    }
    own.text_factory = bytes
    own.execute("BEGIN IMMEDIATE")
    assert isinstance(engine.move_in(own, completion(present(engine, 1))), Applied)
    own.execute("COMMIT")
    assert engine.count(QUEUE, PATIENCE_S) == {Status.COMPLETED: 1}


@pytest.mark.rule("SK-10")
def test_a_connection_that_cannot_take_a_move_is_refused(
    engine: SqliteEngine, own: sqlite3.Connection, tmp_path: Path
) -> None:
    engine.apply([enqueue(1)], PATIENCE_S)
    move = completion(present(engine, 1))
    with pytest.raises(InvalidState, match="no transaction"):
        engine.move_in(own, move)
    for other in (":memory:", str(tmp_path / "other.db")):
        with closing(sqlite3.connect(other, isolation_level=None)) as elsewhere:
            elsewhere.execute("BEGIN")
            with pytest.raises(InvalidState, match="the connection is to"):
                engine.move_in(elsewhere, move)
    own.execute("PRAGMA synchronous = NORMAL")
    own.execute("BEGIN")
    with pytest.raises(InvalidState, match="fsync"):
        engine.move_in(own, move)
    own.execute("ROLLBACK")
    assert present(engine, 1).state == TaskState()


@pytest.mark.rule("SK-10")
def test_an_error_leaves_the_transaction_as_it_was(
    engine: SqliteEngine, own: sqlite3.Connection, path: Path
) -> None:
    engine.apply([enqueue(1)], PATIENCE_S)
    move = completion(present(engine, 1))
    own.execute("BEGIN IMMEDIATE")
    own.execute("INSERT INTO outputs VALUES ('kept')")
    too_large = Update(0, 0, bytes(engine.capabilities.max_update_bytes + 1))
    with pytest.raises(RequestTooLarge):
        engine.move_in(own, Move(move.id, QUEUE, 0, move.revision, COMPLETED, update=too_large))
    with pytest.raises(InvalidState, match="define it first"):
        engine.move_in(own, Move(move.id, "unknown", 0, move.revision, COMPLETED))
    assert own.in_transaction
    own.execute("COMMIT")
    assert outputs(own) == 1
    own.execute(f"PRAGMA max_page_count = {own.execute('PRAGMA page_count').fetchone()[0]}")
    own.execute("BEGIN IMMEDIATE")
    with pytest.raises(QuotaExceeded):
        engine.move_in(
            own, Move(move.id, QUEUE, 0, move.revision, COMPLETED, update=Update(0, 0, bytes(100_000)))
        )
    if own.in_transaction:
        own.execute("COMMIT")
    assert present(engine, 1).state == TaskState()
    assert list(engine.updates(QUEUE, task_id(1), PATIENCE_S)) == []
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as reader:
        own.execute("BEGIN IMMEDIATE")
        reader.execute("BEGIN")
        with pytest.raises(RegistryUnavailable):
            engine.move_in(reader, move)
        own.execute("ROLLBACK")


@pytest.mark.rule("RB-21")
def test_tasks_leave_the_last_room_on_the_disk_to_heartbeats(
    engine: SqliteEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group's registry may be in the same file."""
    engine.apply([enqueue(1), enqueue(2)], PATIENCE_S)
    monkeypatch.setattr(store, "RESERVE_BYTES", 1 << 62)
    large = replace(enqueue(3), task=replace(enqueue(3).task, payload=bytes(1_000_000)))
    with pytest.raises(QuotaExceeded, match="left for heartbeats"):
        engine.apply([large], PATIENCE_S)
    claimed = replace(completion(present(engine, 1)), update=None)
    assert isinstance(engine.apply([claimed], PATIENCE_S)[0], Applied)
    assert engine.count(QUEUE, PATIENCE_S) == {Status.WAITING: 1, Status.COMPLETED: 1}
    monkeypatch.undo()
    assert isinstance(engine.apply([large], PATIENCE_S)[0], Applied)


@pytest.mark.rule("RB-21")
def test_pages_that_others_have_added_are_not_taken_for_ones_own(
    engine: SqliteEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages before a transaction are those after the last one, unless it could matter."""
    engine.apply([enqueue(number) for number in range(1, 100)], PATIENCE_S)
    known = engine._committer._store._pages_left
    with closing(SqliteEngine(path)) as other:
        large = replace(enqueue(100), task=replace(enqueue(100).task, payload=bytes(1_000_000)))
        assert isinstance(other.apply([large], PATIENCE_S)[0], Applied)
    assert 0 < known < engine._committer._store.pages()
    monkeypatch.setattr(store, "RESERVE_BYTES", 1 << 62)
    claimed = replace(completion(present(engine, 1)), update=None)
    with monkeypatch.context() as patch:
        patch.setattr(history, "_forget_some", lambda *_: pytest.fail("the history is trimmed for nothing"))
        assert isinstance(engine.apply([claimed], PATIENCE_S)[0], Applied)
    larger = replace(enqueue(101), task=replace(enqueue(101).task, payload=bytes(1_000_000)))
    with pytest.raises(QuotaExceeded, match="left for heartbeats"):
        engine.apply([larger], PATIENCE_S)


def test_a_lone_enqueue_takes_five_statements(engine: SqliteEngine) -> None:
    """Each one more would take longer than all that Python does for it."""
    engine.apply([enqueue(number) for number in range(1, 10)], PATIENCE_S)
    statements: list[str] = []
    engine._committer._store.connection.set_trace_callback(statements.append)
    engine.apply([enqueue(10)], PATIENCE_S)
    first_words = [each.split()[0] for each in statements]
    assert first_words == ["BEGIN", "SELECT", "INSERT", "PRAGMA", "COMMIT"]


def test_the_numbers_of_queues_are_read_again_once_the_file_has_gone_back(
    engine: SqliteEngine, path: Path
) -> None:
    engine.define("other", 1, PATIENCE_S)
    engine.apply([enqueue(1), enqueue(2, "other")], PATIENCE_S)
    with closing(sqlite3.connect(path)) as restored, restored:  # a backup in which they have other numbers
        for table in ("tasks", "changes", "counts"):
            restored.execute(f"DELETE FROM skuld_{table}")
        restored.execute("UPDATE skuld_meta SET counted = 0, forgotten_to = 0")
        restored.execute("UPDATE skuld_queues SET number = 10 - number")
    engine.apply([enqueue(3), enqueue(4, "other")], PATIENCE_S)
    assert list(engine.read(QUEUE, [task_id(3), task_id(4)], PATIENCE_S)) == [task_id(3)]
    assert list(engine.read("other", [task_id(3), task_id(4)], PATIENCE_S)) == [task_id(4)]


@pytest.mark.rule("RB-28")
def test_tasks_make_room_in_the_history_of_a_registry_in_their_file(engine: SqliteEngine, path: Path) -> None:
    with closing(SqliteRegistry(path)) as registry:
        for number in range(40):
            registry.execute(Transaction(then=(Put(f"k/{number % 4}", bytes(30_000)),)), PATIENCE_S)
        connection = engine._committer._store.connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        large = replace(enqueue(1), task=replace(enqueue(1).task, payload=bytes(200_000)))
        assert isinstance(engine.apply([large], PATIENCE_S)[0], Applied)
        kept = history.extent(registry._store)
        assert 0 < kept.forgotten < kept.latest == 40


def test_tasks_on_an_unknown_filesystem_are_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"me {tmp_path} fuse.newfs rw 0 0\n")
    monkeypatch.setattr(location, "MOUNTS", mounts)
    for create in (True, False):
        with Queue(QUEUE, f"sqlite:///{tmp_path}/mail.db", create=create) as queue:
            (reason,) = queue.context.engine.capabilities.unsafe_reasons
            assert "is on an unknown filesystem (fuse.newfs)" in reason
    assert caplog.text.count("is on an unknown filesystem (fuse.newfs)") == 1


@pytest.mark.rule("SK-11")
def test_watches_hear_of_a_move_once_it_is_rung_for(engine: SqliteEngine, own: sqlite3.Connection) -> None:
    told: list[Sequence[Stored] | ChangesLost] = []
    more = threading.Event()

    def sink(items: Sequence[Stored] | ChangesLost) -> None:
        told.append(items)
        more.set()

    (enqueued,) = engine.apply([enqueue(1)], PATIENCE_S)
    assert isinstance(enqueued, Applied)
    engine.watch(QUEUE, enqueued.revision, sink)
    own.execute("BEGIN IMMEDIATE")
    engine.move_in(own, completion(present(engine, 1)))
    own.execute("COMMIT")
    engine.ring()
    assert more.wait(PATIENCE_S)
    assert told == [[present(engine, 1)]]


# -- group commit


class Contention:
    """Threads that write while another connection holds the write lock."""

    def __init__(self, engine: SqliteEngine, path: Path) -> None:
        self.engine = engine
        self.lock = sqlite3.connect(path, isolation_level=None, timeout=0, check_same_thread=False)
        self.commits = 0
        engine._committer._store.connection.set_trace_callback(self._count)

    def _count(self, statement: str) -> None:
        self.commits += statement == "COMMIT"

    def run(self, batches: Sequence[Sequence[Write]]) -> list[Sequence[Answer] | Exception]:
        """Apply each batch from a thread of its own, all of them while the lock is held; then release it."""
        self.lock.execute("BEGIN IMMEDIATE")
        with ThreadPoolExecutor(len(batches)) as pool:
            asked = [pool.submit(self.engine.apply, batch, PATIENCE_S) for batch in batches]
            committer = self.engine._committer
            pause = threading.Event()
            for _ in range(2000):
                if len(committer._waiting) == len(batches):
                    break
                pause.wait(0.01)
            assert len(committer._waiting) == len(batches), "they do not wait"
            self.lock.execute("ROLLBACK")
            return [future.exception(PATIENCE_S) or future.result() for future in asked]  # type: ignore[misc]


@pytest.fixture
def contention(engine: SqliteEngine, path: Path) -> Iterator[Contention]:
    contention = Contention(engine, path)
    with closing(contention.lock):
        yield contention


@pytest.mark.rule("SK-12")
def test_writes_of_many_threads_are_one_commit(engine: SqliteEngine, contention: Contention) -> None:
    answers = contention.run([[enqueue(2 * number), enqueue(2 * number + 1)] for number in range(20)])
    assert contention.commits == 1
    revisions = []
    for answer in answers:
        assert not isinstance(answer, Exception)
        one, two = answer
        assert isinstance(one, Applied)
        assert isinstance(two, Applied)
        assert two.revision == one.revision + 1, "the writes of a batch follow each other"
        revisions += [one.revision, two.revision]
    assert sorted(revisions) == list(range(1, 41))
    for number, revision in enumerate(revisions):
        assert present(engine, number).revision == revision


@pytest.mark.rule("SK-12")
def test_no_thread_fails_for_the_fault_of_another(engine: SqliteEngine, contention: Contention) -> None:
    batches: list[list[Write]] = [[enqueue(number)] for number in range(8)]
    batches[3] = [enqueue(3), enqueue(100, queue="unknown")]
    answers = contention.run(batches)
    assert isinstance(answers[3], InvalidState)
    assert all(isinstance(answer, list) for number, answer in enumerate(answers) if number != 3)
    found = engine.page(QUEUE, PATIENCE_S).items
    assert [item.head.id for item in found] == [task_id(number) for number in range(8) if number != 3]
    assert engine.count(QUEUE, PATIENCE_S) == {Status.WAITING: 7}


@pytest.mark.rule("SK-12")
def test_who_is_not_begun_in_time_has_written_nothing(engine: SqliteEngine, contention: Contention) -> None:
    contention.lock.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(engine.apply, [enqueue(number)], 0.05) for number in range(4)]
        failures = [future.exception(PATIENCE_S) for future in asked]
    assert all(isinstance(failure, RegistryUnavailable) for failure in failures)
    contention.lock.execute("ROLLBACK")
    assert engine.apply([enqueue(9)], PATIENCE_S) == [Applied(1)]
    assert [item.head.id for item in engine.page(QUEUE, PATIENCE_S).items] == [task_id(9)]


@pytest.mark.rule("SK-12")
def test_a_batch_that_fails_in_its_middle_is_of_unknown_outcome(engine: SqliteEngine) -> None:
    writes = [*(enqueue(number) for number in range(1200)), enqueue(5000, queue="unknown")]
    with pytest.raises(OutcomeUnknown, match="first 1000 of 1201"):
        engine.apply(writes, PATIENCE_S)
    assert engine.count(QUEUE, PATIENCE_S) == {Status.WAITING: 1000}
    with pytest.raises(InvalidState):
        engine.apply(writes[-1:], PATIENCE_S)


@pytest.mark.rule("SK-12")
def test_closing_refuses_what_waits(engine: SqliteEngine, contention: Contention) -> None:
    contention.lock.execute("BEGIN IMMEDIATE")
    committer, pause = engine._committer, threading.Event()
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(engine.apply, [enqueue(number)], PATIENCE_S) for number in range(3)]
        for _ in range(2000):
            if len(committer._waiting) == 3:
                break
            pause.wait(0.01)
        closing_ = pool.submit(engine.close)
        for _ in range(2000):
            if len(committer._waiting) == 1:
                break
            pause.wait(0.01)
        contention.lock.execute("ROLLBACK")
        closing_.result(PATIENCE_S)
        outcomes = [future.exception(PATIENCE_S) for future in asked]
    assert [type(outcome) for outcome in outcomes].count(RegistryUnavailable) == 2
    assert outcomes.count(None) == 1, "the one that led was done"


@pytest.mark.rule("SK-12")
@pytest.mark.parametrize("leads", [False, True], ids=["while it waits", "as it is to lead"])
def test_a_thread_that_is_interrupted_keeps_nobody_from_committing(
    engine: SqliteEngine, monkeypatch: pytest.MonkeyPatch, *, leads: bool
) -> None:
    """Were the lead handed to a thread that is gone, nobody could write any more."""
    begun, may = threading.Event(), threading.Event()
    waits = group_commit._Job.woken

    def slow(_: object) -> None:
        begun.set()
        may.wait(PATIENCE_S)

    def interrupted(job: group_commit._Job[Any], timeout_s: float) -> bool:
        if leads:
            may.set()
            assert waits(job, timeout_s)
        raise KeyboardInterrupt

    committer, deadline = engine._committer, store.Deadline.after(PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(committer.submit, group_commit.Action(slow), deadline)
        assert begun.wait(PATIENCE_S)
        with monkeypatch.context() as patch:
            patch.setattr(group_commit._Job, "woken", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.apply([enqueue(1)], PATIENCE_S)
        may.set()
        first.result(PATIENCE_S)
    assert engine.apply([enqueue(2)], PATIENCE_S) == [Applied(1)]
    assert engine.read(QUEUE, [task_id(1)], PATIENCE_S) == {}


def interrupted_in_call(number: int, action: Callable[[], object]) -> bool:
    """Do an action with a Ctrl-C as its call of this number begins; False if it makes fewer calls."""
    calls = count(1)

    def trace(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "rebalanser" in frame.f_globals.get("__name__", "") and next(calls) == number:
            raise KeyboardInterrupt

    before = sys.gettrace()
    gc.disable()  # an interrupt of a callback that it calls would be lost
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        gc.enable()
    return False


@pytest.mark.rule("SK-12")
@pytest.mark.parametrize("together", [False, True], ids=["alone", "in a batch"])
def test_an_enqueue_may_be_interrupted_anywhere(
    path: Path, own: sqlite3.Connection, *, together: bool
) -> None:
    """Neither a lock of the file nor one of the process is kept: who catches the interrupt may go on."""
    with Queue(QUEUE, f"sqlite:///{path}") as queue, ThreadPoolExecutor(1) as pool:

        @queue.task
        def send(claim: Claim) -> None: ...

        def act() -> None:
            if together:
                send.enqueue_many([((), {})] * 2)
            else:
                send.enqueue()

        own.execute(f"PRAGMA busy_timeout = {PATIENCE_S * 1000:.0f}")
        act()
        number = 1
        while interrupted_in_call(number, act):
            own.execute("BEGIN IMMEDIATE")
            own.execute("ROLLBACK")
            queue.context.batcher.flush()
            assert not forks.postponed._inside, number
            assert pool.submit(send.enqueue).result(PATIENCE_S)
            number += 1
        assert number > 50


# -- files


@pytest.mark.rule("SK-12")
def test_a_registry_and_tables_of_the_application_may_be_in_the_file(
    engine: SqliteEngine, own: sqlite3.Connection, path: Path
) -> None:
    engine.apply([enqueue(1)], PATIENCE_S)
    with closing(SqliteRegistry(path)) as registry:
        registry.execute(Transaction(then=(Put("key", b"value"),)), PATIENCE_S)
    with closing(SqliteEngine(path)) as again:
        assert len(again.page(QUEUE, PATIENCE_S).items) == 1
    assert own.execute("PRAGMA user_version").fetchone() == (1,)
    assert outputs(own) == 0
    tables = {
        name for (name,) in own.execute("SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")
    }
    registrys = {"meta", "kv", "kv_of_lease", "leases", "changes"}
    assert {name for name in tables if not name.startswith("skuld_")} == registrys | {"outputs"}


def test_a_file_of_a_registry_gets_the_tables(path: Path) -> None:
    SqliteRegistry(path).close()
    with closing(open_engine(parse_url(f"sqlite:///{path}"), PATIENCE_S)) as engine:
        assert engine.queues(PATIENCE_S) == {}


def first_version(path: Path, *, outbox: bool) -> dict[int, tuple[Stored, bytes]]:
    """Make a file as version 1 of the schema had it; its tasks with their payloads, by number."""
    SqliteRegistry(path).close()
    term, waits_for = ClaimTerm(30.0, "boot", 99.0), (task_id(1), task_id(2))
    states: dict[int, tuple[TaskState, tuple[str, ...], bytes]] = {
        1: (TaskState(Status.COMPLETED, ClaimState(1, "h", "w", term, 2), result=b"42"), (), b"small"),
        2: (TaskState(), (), bytes(5000)),
        3: (TaskState(), waits_for, b"blocked"),
        4: (TaskState(), (task_id(1),), b"free, as what it waits for is complete"),
        5: (TaskState(due=5.0), (), b"timed"),
        6: (TaskState(Status.CLAIMED, ClaimState(0, "h", "w", term)), (), b"running"),
        7: (TaskState(Status.DEAD, ClaimState(3, "h", "w", term), 0.0, 4, "it failed"), (), b""),
        8: (TaskState(Status.CANCELLED), (), b"cancelled"),
    }
    tasks: dict[int, tuple[Stored, bytes]] = {}
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        for statement in FIRST_SCHEMA.split(";"):
            old.execute(statement)
        old.execute("INSERT INTO skuld_meta VALUES (1, 1, 108)")
        old.execute("INSERT INTO skuld_queues VALUES (1, 'mail', 4)")
        old.execute("INSERT INTO skuld_owners VALUES (1, 2, 77)")
        for number, (state, after, payload) in states.items():
            head = Head(task_id(number), QUEUE, "send", number % 3, after, 4, 1.5)
            tasks[number] = Stored(head, state, 100 + number, number % 4), payload
            key, made = bytes.fromhex(head.id), state.claim
            claim: tuple[object, ...] = (None,) * 7
            if made is not None:
                claim = (made.number, made.holder, made.worker, 30.0, "boot", 99.0, made.updates)
            fixed = (number, 1, key, number % 4, head.name, head.priority, len(after), 4, 1.5, 100 + number)
            row = (*fixed, state.status.value, *claim, state.due, state.failures, state.error, state.result)
            old.execute(f"INSERT INTO skuld_tasks VALUES ({', '.join('?' * len(row))})", row)
            content = (number, bytes.fromhex("".join(after)), payload)
            old.execute("INSERT INTO skuld_contents VALUES (?, ?, ?)", content)
            for needed in after:
                old.execute("INSERT INTO skuld_dependents VALUES (1, ?, ?)", (bytes.fromhex(needed), number))
        old.execute("INSERT INTO skuld_updates VALUES (1, 0, 0, x'aa'), (1, 1, 0, x'bb'), (1, 1, 1, x'cc')")
        old.execute("INSERT INTO skuld_counts SELECT 1, status, count(*) FROM skuld_tasks GROUP BY status")
        if outbox:
            old.execute(
                "CREATE TABLE skuld_outboxes (queue INTEGER NOT NULL, outbox TEXT NOT NULL, "
                "number INTEGER NOT NULL, skipped INTEGER NOT NULL, PRIMARY KEY (queue, outbox)) "
                "WITHOUT ROWID"
            )
            old.execute("INSERT INTO skuld_outboxes VALUES (1, 'outbox', 1, 0)")
    return tasks


@pytest.mark.rule("SK-2", "SK-4", "SK-5", "SK-9", "SK-11", "SK-12")
@pytest.mark.parametrize("outbox", [True, False])
def test_a_file_of_the_first_version_is_turned_into_one_of_this(path: Path, *, outbox: bool) -> None:
    tasks = first_version(path, outbox=outbox)
    ids = [task_id(number) for number in tasks]
    with closing(SqliteEngine(path)) as engine:
        assert engine.queues(PATIENCE_S) == {QUEUE: 4}
        assert engine.page(QUEUE, PATIENCE_S).items == tuple(stored for stored, _ in tasks.values())
        assert engine.payloads(QUEUE, ids, PATIENCE_S) == {
            stored.head.id: payload for stored, payload in tasks.values()
        }
        assert engine.count(QUEUE, PATIENCE_S) == {
            Status.COMPLETED: 1,
            Status.WAITING: 4,
            Status.CLAIMED: 1,
            Status.DEAD: 1,
            Status.CANCELLED: 1,
        }
        for status in Status:
            found = engine.page(QUEUE, PATIENCE_S, statuses=frozenset({status})).items
            assert found == tuple(stored for stored, _ in tasks.values() if stored.state.status is status)
        assert list(engine.updates(QUEUE, task_id(1), PATIENCE_S)) == [
            Update(0, 0, b"\xaa"),
            Update(1, 0, b"\xbb"),
            Update(1, 1, b"\xcc"),
        ]
        (answer,) = engine.apply([replace(enqueue(9), forwarded=Forwarded("outbox", 1))], PATIENCE_S)
        assert answer == (Taken() if outbox else Applied(109))

        term = ClaimTerm(300.0, "boot", 300.0)
        request = ClaimQuery(QUEUE, ["a", "b"], "w", term, {"send"}, lambda: 0.0, 0.0, 1.0)
        first = engine.claim(request, PATIENCE_S)
        assert [stored.head.id for stored, _ in first.claimed] == [task_id(2), task_id(4)]
        assert (first.next_due, first.next_over) == (5.0, 100.0)
        engine.apply([completion(first.claimed[0][0])], PATIENCE_S)
        later = replace(request, holders=list("cdef"), clock=lambda: 100.0, wall=5.0)
        second = [stored.head.id for stored, _ in engine.claim(later, PATIENCE_S).claimed]
        assert second == [task_id(number) for number in ([5, 3, 6] if outbox else [5, 3, 6, 9])]
    with closing(SqliteEngine(path)) as again:
        assert len(again.page(QUEUE, PATIENCE_S).items) == 8 + (not outbox)


@pytest.mark.rule("SK-6")
def test_a_process_of_the_first_version_can_write_no_more(path: Path) -> None:
    """It would not know where a task is, and could claim one that is claimed."""
    first_version(path, outbox=True)
    begin = "SELECT revision FROM skuld_meta"
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        assert old.execute(begin).fetchone() == (108,)
        SqliteEngine(path).close()
        with pytest.raises(sqlite3.OperationalError, match="no such column"):
            old.execute(begin)


def turn_into_fourth_version(connection: sqlite3.Connection) -> None:
    for table in ("collections", "collected", "settled", "rates"):
        connection.execute(f"DROP TABLE skuld_{table}")
    connection.execute("ALTER TABLE skuld_tasks DROP COLUMN rate_limit")
    connection.execute("DROP INDEX skuld_tasks_admitted")
    connection.execute(
        "CREATE INDEX skuld_tasks_admitted ON skuld_tasks "
        f"(queue, name, limit_key, status, priority, id DESC) WHERE {ADMITTED_OF_FOURTH_VERSION}"
    )
    connection.execute("UPDATE skuld_meta SET version = 4")


ADMITTED_OF_FOURTH_VERSION = "limit_key IS NOT NULL AND (ready = 1 OR status = 1)"


def turn_into_third_version(connection: sqlite3.Connection) -> None:
    turn_into_fourth_version(connection)
    connection.execute("DROP INDEX skuld_tasks_unique")
    connection.execute("ALTER TABLE skuld_tasks DROP COLUMN unique_key")
    connection.execute("ALTER TABLE skuld_tasks DROP COLUMN unique_for_s")
    connection.execute("DROP TABLE skuld_pauses")
    connection.execute("DROP INDEX skuld_tasks_held")
    connection.execute("DROP INDEX skuld_tasks_admitted")
    connection.execute("ALTER TABLE skuld_tasks DROP COLUMN limit_key")
    connection.execute("ALTER TABLE skuld_tasks DROP COLUMN max_running")
    connection.execute("UPDATE skuld_meta SET version = 3")


def turn_into_second_version(connection: sqlite3.Connection) -> None:
    turn_into_third_version(connection)
    connection.execute("ALTER TABLE skuld_tasks DROP COLUMN after_failure")
    connection.execute("ALTER TABLE skuld_meta RENAME COLUMN forgotten_to TO forgotten")
    connection.execute("DROP TABLE skuld_notes")
    connection.execute("DROP TABLE skuld_workers")
    connection.execute("UPDATE skuld_meta SET version = 2")


@pytest.mark.rule("SK-5")
def test_a_file_of_the_second_version_is_turned_into_one_of_this(
    engine: SqliteEngine, own: sqlite3.Connection, path: Path
) -> None:
    """A process of that version would let tasks wait for ever, and run those that must fail."""
    engine.apply([enqueue(1), Enqueue(enqueue(2, after=(task_id(1),)).task, 0)], PATIENCE_S)
    before = engine.page(QUEUE, PATIENCE_S).items
    engine.close()
    schema = "SELECT name, sql FROM sqlite_master WHERE name LIKE 'skuld%' AND name != 'skuld_tasks'"
    tables = set(own.execute(schema))
    turn_into_second_version(own)
    assert own.execute("SELECT forgotten FROM skuld_meta").fetchone() == (0,)
    with closing(SqliteEngine(path)) as again:
        with pytest.raises(sqlite3.OperationalError, match="no such column"):
            own.execute("SELECT forgotten FROM skuld_meta")
        assert set(own.execute(schema)) == tables
        assert again.page(QUEUE, PATIENCE_S).items == before
        head = Head(task_id(3), QUEUE, "send", after=(task_id(1),), after_failure=AfterFailure.RUN)
        again.apply([Enqueue(Task(head, b""), 0)], PATIENCE_S)
        assert again.read(QUEUE, [task_id(3)], PATIENCE_S)[task_id(3)].head == head


@pytest.mark.rule("SK-23")
def test_a_file_of_the_third_version_is_turned_into_one_of_this(
    engine: SqliteEngine, own: sqlite3.Connection, path: Path
) -> None:
    engine.apply([enqueue(1), enqueue(2)], PATIENCE_S)
    before = engine.page(QUEUE, PATIENCE_S).items
    engine.close()
    schema = "SELECT name, sql FROM sqlite_master WHERE name LIKE 'skuld%' AND name != 'skuld_tasks'"
    tables = set(own.execute(schema))
    turn_into_third_version(own)
    with closing(SqliteEngine(path)) as again:
        assert set(own.execute(schema)) == tables
        assert again.page(QUEUE, PATIENCE_S).items == before
        heads = [Head(task_id(number), QUEUE, "send", unique_key="k") for number in (3, 4)]
        answers = again.apply([Enqueue(Task(head, b""), 0) for head in heads], PATIENCE_S)
        assert answers[1] == Duplicate(task_id(3))


@pytest.mark.rule("SK-19", "SK-23")
def test_a_process_of_the_fourth_version_goes_on_with_limits(
    engine: SqliteEngine, own: sqlite3.Connection, path: Path
) -> None:
    """It names the index: SQLite refuses its query where it can't prove that all it asks for is there."""
    heads = [Head(task_id(number), QUEUE, "send", limit_key="k", max_running=1) for number in (1, 2)]
    engine.apply([Enqueue(Task(head, b""), 0) for head in heads], PATIENCE_S)
    engine.close()
    turn_into_fourth_version(own)
    admitted = (
        "SELECT count(*) FROM skuld_tasks INDEXED BY skuld_tasks_admitted "
        f"WHERE {ADMITTED_OF_FOURTH_VERSION} AND queue = 1 AND name = 'send' AND limit_key = 'k'"
    )
    assert own.execute(admitted).fetchone() == (1,)
    SqliteEngine(path).close()
    assert own.execute(admitted).fetchone() == (1,)
    own.execute("UPDATE skuld_tasks SET ready = 3 WHERE ready = 1")
    assert own.execute(admitted).fetchone() == (0,), "what waits for a rate is in the index too"


@pytest.mark.rule("SK-23", "SK-24")
def test_one_task_of_a_rate_limit_is_looked_at_and_old_marks_are_deleted(
    engine: SqliteEngine, own: sqlite3.Connection
) -> None:
    """By counting, so that neither a claim nor the file grows with what waits or was done."""
    term = ClaimTerm(300.0, "boot", 300.0)
    request = ClaimQuery(QUEUE, ["a", "b", "c"], "w", term, {"send"}, lambda: 0.0, 0.0, 1.0)
    tasks = [replace(enqueue(number).task.head, rate_limit="1/s") for number in range(1, 101)]
    engine.apply([Enqueue(Task(head, b""), 0) for head in tasks], PATIENCE_S)
    assert len(engine.claim(request, PATIENCE_S).claimed) == 1
    assert engine.claim(request, PATIENCE_S) == ClaimAnswer((), None, 1.0, others_ready=False)
    places = "SELECT ready, count(*) FROM skuld_tasks WHERE status = 0 GROUP BY ready ORDER BY ready"
    assert own.execute(places).fetchall() == [(2, 98), (3, 1)]
    keyed = [replace(head, id=task_id(200 + n), limit_key=str(n)) for n, head in enumerate(tasks[:50])]
    engine.apply([Enqueue(Task(head, b""), 0) for head in keyed], PATIENCE_S)
    many = replace(request, holders=[f"h{number}" for number in range(60)])
    assert len(engine.claim(many, PATIENCE_S).claimed) == 50
    marks = "SELECT count(*) FROM skuld_rates"
    assert own.execute(marks).fetchone() == (51,)
    for number in range(30):
        later = 10.0 + number
        engine.claim(
            replace(request, holders=[f"l{number}"], clock=lambda: later, wall=200_000.0),  # noqa: B023
            PATIENCE_S,
        )
    assert own.execute(marks).fetchone() == (1,)


@pytest.mark.rule("SK-23")
def test_a_file_of_the_fourth_version_is_turned_into_one_of_this(
    engine: SqliteEngine, own: sqlite3.Connection, path: Path
) -> None:
    engine.apply([enqueue(1), enqueue(2)], PATIENCE_S)
    before = engine.page(QUEUE, PATIENCE_S).items
    engine.close()
    schema = "SELECT name, sql FROM sqlite_master WHERE name LIKE 'skuld%' AND name != 'skuld_tasks'"
    tables = set(own.execute(schema))
    turn_into_fourth_version(own)
    own.execute("DROP INDEX skuld_tasks_admitted")
    own.execute(
        "CREATE INDEX skuld_tasks_admitted ON skuld_tasks "
        "(queue, name, limit_key, status, priority, id DESC) "
        "WHERE limit_key IS NOT NULL AND (ready = 1 OR status = 1)"
    )
    with closing(SqliteEngine(path)) as again:
        assert set(own.execute(schema)) == tables
        assert again.page(QUEUE, PATIENCE_S).items == before
        head = Head(task_id(3), QUEUE, "send", limit_key="k", rate_limit="1/h")
        again.apply([Enqueue(Task(head, b""), 0)], PATIENCE_S)
        assert again.read(QUEUE, [task_id(3)], PATIENCE_S)[task_id(3)].head == head


@pytest.mark.rule("SK-17", "SK-19")
@pytest.mark.parametrize(
    "turn", [turn_into_second_version, turn_into_third_version, turn_into_fourth_version]
)
def test_a_disk_that_is_full_in_the_midst_of_a_migration_leaves_the_earlier_version(
    engine: SqliteEngine,
    own: sqlite3.Connection,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    turn: Callable[[sqlite3.Connection], None],
) -> None:
    """Wherever in the midst that is; once there is room they are turned into those of this version."""
    engine.apply([enqueue(number) for number in range(1, 50)], PATIENCE_S)
    items = engine.page(QUEUE, PATIENCE_S).items
    engine.close()
    turn(own)
    own.execute("VACUUM")
    before = [*own.iterdump()]
    (pages,) = own.execute("PRAGMA page_count").fetchone()
    settings, refused = store.SETTINGS, 0
    while True:
        room = f"PRAGMA max_page_count = {pages + refused}"
        monkeypatch.setattr(store, "SETTINGS", (*settings, room))
        try:
            again = SqliteEngine(path)
        except QuotaExceeded:
            refused += 1
            assert [*own.iterdump()] == before
        else:
            break
    again.close()
    assert refused > 2
    monkeypatch.setattr(store, "SETTINGS", settings)
    with closing(SqliteEngine(path)) as again:
        assert again.page(QUEUE, PATIENCE_S).items == items
        assert own.execute("SELECT version FROM skuld_meta").fetchone() == (5,)
        assert len(claim_all(again)) == len(items)


def test_tasks_of_a_newer_version_are_refused(
    engine: SqliteEngine, own: sqlite3.Connection, path: Path
) -> None:
    own.execute("UPDATE skuld_meta SET version = 6")
    with pytest.raises(UnusableStore, match=r"schema 6 .* upgrade rebalanser"):
        SqliteEngine(path)


def test_the_database_of_another_program_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE theirs (x)")
    with pytest.raises(UnusableStore, match="another program"):
        SqliteEngine(path)


def test_a_file_that_was_replaced_is_refused(engine: SqliteEngine, path: Path) -> None:
    path.rename(path.with_name("moved.db"))
    SqliteRegistry(path).close()
    with pytest.raises(UnusableStore, match="replaced"):
        engine.apply([enqueue(1)], PATIENCE_S)
    with pytest.raises(UnusableStore, match="replaced"):
        engine.read(QUEUE, [task_id(1)], PATIENCE_S)


@pytest.mark.rule("SK-11")
def test_a_watch_of_a_store_that_was_put_back_is_told_of_a_loss(engine: SqliteEngine) -> None:
    told: list[Sequence[Stored] | ChangesLost] = []
    lost, more = threading.Event(), threading.Event()

    def sink(items: Sequence[Stored] | ChangesLost) -> None:
        told.append(items)
        (lost if isinstance(items, ChangesLost) else more).set()

    (answer,) = engine.apply([enqueue(1)], PATIENCE_S)
    assert isinstance(answer, Applied)
    engine.watch(QUEUE, answer.revision + 100, sink)
    assert lost.wait(PATIENCE_S)
    engine.apply([enqueue(2)], PATIENCE_S)
    assert more.wait(PATIENCE_S)
    assert told == [ChangesLost(answer.revision), [present(engine, 2)]]


@pytest.mark.rule("SK-11")
def test_changes_are_kept_for_watches_that_are_not_too_far_behind(
    engine: SqliteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "KEPT_CHANGES", 200)
    monkeypatch.setattr(writer, "FORGET_STEP", 100)
    engine.apply([enqueue(number) for number in range(300)], PATIENCE_S)
    for _ in range(3):
        tasks = engine.page(QUEUE, PATIENCE_S).items
        moves = [
            Move(each.head.id, QUEUE, 0, each.revision, TaskState(Status.CLAIMED, CLAIM)) for each in tasks
        ]
        engine.apply(moves, PATIENCE_S)
    revision = engine.page(QUEUE, PATIENCE_S, limit=1).revision
    kept = engine._committer._store.connection.execute("SELECT count(*) FROM skuld_changes").fetchone()[0]
    assert 200 <= kept < 900
    told: list[Sequence[Stored] | ChangesLost] = []
    more = threading.Event()

    def sink(items: Sequence[Stored] | ChangesLost) -> None:
        told.append(items)
        more.set()

    for behind, news in (
        (900, ChangesLost(revision)),
        (150, list(engine.page(QUEUE, PATIENCE_S).items[150:])),
    ):
        more.clear()
        with closing(engine.watch(QUEUE, revision - behind, sink)):
            assert more.wait(PATIENCE_S)
        assert told.pop() == news
    assert engine.count(QUEUE, PATIENCE_S) == {Status.CLAIMED: 300}


@pytest.mark.rule("SK-11")
def test_a_sink_that_raises_harms_no_other_watch(
    engine: SqliteEngine, caplog: pytest.LogCaptureFixture
) -> None:
    more = threading.Event()

    def broken(_: Sequence[Stored] | ChangesLost) -> None:
        raise ValueError("broken")

    engine.watch(QUEUE, 0, broken)
    engine.watch(QUEUE, 0, lambda _: more.set())
    for number in range(2):
        more.clear()
        engine.apply([enqueue(number)], PATIENCE_S)
        assert more.wait(PATIENCE_S)
    assert "a change listener raised for queue mail" in caplog.text


@pytest.mark.rule("SK-11")
def test_watches_go_on_after_an_error_that_nobody_foresaw(
    engine: SqliteEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their thread is the only one that hears of tasks: without it a worker would idle and look healthy."""
    faults, news, told = [KeyError("a bug")], ChangeFeed._news, threading.Event()

    def fault(*arguments: Any) -> Any:
        if faults:
            raise faults.pop()
        return news(*arguments)

    monkeypatch.setattr(ChangeFeed, "_news", staticmethod(fault))
    engine.watch(QUEUE, 0, lambda _: told.set())
    engine.apply([enqueue(1)], PATIENCE_S)
    assert told.wait(PATIENCE_S)
    assert not faults
    assert "KeyError: 'a bug'" in caplog.text


# -- what a statement looks at


@pytest.mark.rule("SK-12")
@pytest.mark.parametrize(
    "module", [claims, collection, reader, rows, writer], ids=lambda module: module.__name__
)
def test_no_statement_looks_at_all_tasks(
    engine: SqliteEngine, own: sqlite3.Connection, module: object
) -> None:
    found = [
        statement
        for value in vars(module).values()
        for statement in (
            value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
        )
        if isinstance(statement, str) and statement.startswith(("SELECT", "UPDATE", "DELETE", "INSERT"))
    ]
    assert len(found) >= 3
    small = {"skuld_meta", "skuld_queues", "json_each", "sqlite_master", "skuld_collections"}
    small |= {"skuld_settled", "skuld_collected"}  # of which only the first rows are read
    engine.note_worker(QUEUE, "process", b"makes the table", PATIENCE_S)
    for statement in found:
        plan = own.execute(f"EXPLAIN QUERY PLAN {statement}", (None,) * statement.count("?")).fetchall()
        for *_, detail in plan:
            assert not detail.startswith("SCAN") or detail.split()[1] in small, (statement, detail)
            assert "TEMP B-TREE" not in detail, (statement, detail)


# -- what takes more than one transaction


STEP = 5
MANY = 2 * STEP + 1


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("writer.STEP", "collection.STEP", "engine.STEP", "group_commit.CHUNK_WEIGHT"):
        monkeypatch.setattr(f"rebalanser_sqlite.tasks.{name}", STEP)


class Crash(BaseException):
    """The process was killed."""


class Commits:
    """Counts the transactions that an engine writes from now on, and crashes instead of one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, crash_at: int = -1) -> None:
        self.weights: list[int] = []
        commit = group_commit.Committer.submit

        def submit(committer: Any, action: group_commit.Action[Any], deadline: store.Deadline) -> Any:
            if len(self.weights) == crash_at:
                raise Crash
            self.weights.append(action.weight)
            return commit(committer, action, deadline)

        monkeypatch.setattr(group_commit.Committer, "submit", submit)


def component(engine: SqliteEngine, status: Status = Status.COMPLETED) -> Collect:
    """Enqueue very many tasks that depend on the first one, all closed, and return their collection."""
    first = replace(enqueue(1), state=TaskState(status))
    others = [
        replace(enqueue(number, after=(task_id(1),)), state=TaskState(status))
        for number in range(2, MANY + 1)
    ]
    engine.apply([first, *others], PATIENCE_S)
    return collection_of(engine)


def collection_of(engine: SqliteEngine) -> Collect:
    items = engine.page(QUEUE, PATIENCE_S, limit=2 * MANY).items
    return Collect(QUEUE, {each.head.id: (each.partition, each.revision) for each in items})


def requeue(engine: SqliteEngine, number: int) -> Answer:
    task = present(engine, number)
    (answer,) = engine.apply([Move(task.head.id, QUEUE, 0, task.revision, TaskState())], PATIENCE_S)
    return answer


@pytest.mark.usefixtures("small_steps")
@pytest.mark.rule("SK-14", "SK-24")
def test_very_many_tasks_are_collected_in_steps(
    engine: SqliteEngine, own: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = component(engine)
    commits = Commits(monkeypatch)
    (answer,) = engine.apply([write], PATIENCE_S)
    assert isinstance(answer, Applied)
    assert max(commits.weights) <= STEP
    assert len(commits.weights) > 3 * MANY // STEP
    assert engine.page(QUEUE, PATIENCE_S).items == ()
    assert not any(engine.count(QUEUE, PATIENCE_S).values())
    for table in ("tasks", "contents", "dependents", "collections", "collected"):
        assert own.execute(f"SELECT count(*) FROM skuld_{table}").fetchone() == (0,), table


@pytest.mark.usefixtures("small_steps")
@pytest.mark.rule("SK-14", "SK-17")
@pytest.mark.parametrize("crash_at", range(11))
def test_a_collection_that_is_killed_between_two_steps_is_none_or_is_ended(
    engine: SqliteEngine, path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int
) -> None:
    write = component(engine, Status.DEAD)
    with pytest.MonkeyPatch.context() as crashing:
        Commits(crashing, crash_at)
        with pytest.raises(Crash):
            engine.apply([write], PATIENCE_S)
    engine.close()
    with closing(SqliteEngine(path)) as again:
        is_decided = len(again.page(QUEUE, PATIENCE_S, limit=2 * MANY).items) < MANY
        if not is_decided:
            first = present(again, 1)
            (answer,) = again.apply([enqueue(MANY + 1, after=(task_id(1),))], PATIENCE_S)
            is_decided = isinstance(answer, Unknown)
            assert is_decided or present(again, 1) == first
        if not is_decided:
            assert again.apply([write], PATIENCE_S) == [WriteConflict()], (
                "another task depends on one of these"
            )
            assert len(again.page(QUEUE, PATIENCE_S, limit=2 * MANY).items) == MANY + 1
            assert isinstance(requeue(again, 2), Applied)
            again.apply([replace(completion(present(again, 2)), update=None)], PATIENCE_S)
            again.apply([replace(completion(present(again, MANY + 1)), update=None)], PATIENCE_S)
            (answer,) = again.apply([collection_of(again)], PATIENCE_S)
            assert isinstance(answer, Applied)
        else:
            if MANY in {int(task.head.id, 16) for task in again.page(QUEUE, PATIENCE_S, limit=MANY).items}:
                assert requeue(again, MANY) == WriteConflict(), "the task is deleted"
            again.apply([enqueue(2)], PATIENCE_S)
            assert present(again, 2).state == TaskState(), "a new task of a deleted id"
            assert again.apply([write], PATIENCE_S) == [WriteConflict()]
            assert again.page(QUEUE, PATIENCE_S).items == (present(again, 2),)
            again.apply([collection_of(again)], PATIENCE_S)
        assert again.page(QUEUE, PATIENCE_S).items == ()
        assert not any(again.count(QUEUE, PATIENCE_S).values())


@pytest.mark.rule("SK-14", "SK-17")
def test_what_a_killed_collection_has_left_goes_with_the_next_one(
    engine: SqliteEngine, own: sqlite3.Connection
) -> None:
    """All of it, though so little is left that this takes one step."""
    write = component(engine)
    own.execute("INSERT INTO skuld_collections (number, decided) VALUES (1, 1)")
    own.execute("INSERT INTO skuld_collected SELECT number FROM skuld_tasks")
    assert engine.apply([write], PATIENCE_S) == [WriteConflict()], "these are deleted already"
    assert engine.page(QUEUE, PATIENCE_S).items == ()
    assert own.execute("SELECT count(*) FROM skuld_collected").fetchone() == (0,)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.rule("SK-14", "SK-23")
@pytest.mark.parametrize(("crash_at", "is_decided"), [(7, False), (8, True), (9, True)])
def test_a_task_that_is_as_good_as_deleted_keeps_no_key(
    engine: SqliteEngine, crash_at: int, *, is_decided: bool
) -> None:
    component(engine)
    head = Head(task_id(MANY + 1), QUEUE, "send", unique_key="k", unique_for_s=1e6, after=(task_id(1),))
    engine.apply([Enqueue(Task(head, b""), 0, TaskState(Status.COMPLETED))], PATIENCE_S)
    with pytest.MonkeyPatch.context() as crashing:
        Commits(crashing, crash_at)
        with pytest.raises(Crash):
            engine.apply([collection_of(engine)], PATIENCE_S)
    new = replace(head, id=task_id(MANY + 2), after=())
    (answer,) = engine.apply([Enqueue(Task(new, b""), 0)], PATIENCE_S)
    assert isinstance(answer, Applied) if is_decided else answer == Duplicate(head.id)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.rule("SK-14")
@pytest.mark.parametrize("needed", ["changed", "depended on", "collected", "another"])
def test_a_collection_is_given_up_for_a_task_that_is_needed(
    engine: SqliteEngine, path: Path, needed: str
) -> None:
    """Whatever comes between the marks and the decision."""
    write = component(engine, Status.DEAD)
    with closing(SqliteEngine(path)) as other:
        commits: list[Any] = []
        submit = other._committer.submit

        def interrupted(action: Any, deadline: Any) -> Any:
            commits.append(action)
            if len(commits) == 2 + MANY // STEP + 1:  # all are marked
                if needed == "changed":
                    assert isinstance(requeue(engine, 2), Applied)
                elif needed == "depended on":
                    engine.apply([enqueue(MANY + 1, after=(task_id(MANY),))], PATIENCE_S)
                elif needed == "collected":
                    engine.apply([Collect(QUEUE, dict([next(iter(write.tasks.items()))]))], PATIENCE_S)
                    engine.apply([enqueue(MANY + 1)], PATIENCE_S)
                else:
                    (answer,) = engine.apply([write], PATIENCE_S)
                    assert isinstance(answer, Applied)
            return submit(action, deadline)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(other._committer, "submit", interrupted)
            answers = other.apply([write], PATIENCE_S)
    assert answers == [WriteConflict()] or needed == "collected"
    left = {"changed": MANY, "depended on": MANY + 1, "another": 0}
    if needed in left:
        assert len(engine.page(QUEUE, PATIENCE_S, limit=2 * MANY).items) == left[needed]


@pytest.mark.rule("SK-14")
def test_a_collection_that_another_one_has_ended_marks_no_more(engine: SqliteEngine) -> None:
    """The other would delete what is marked now."""
    write = component(engine)
    commit = partial(engine._committer.submit, deadline=store.Deadline.after(PATIENCE_S))
    first, second = (
        commit(group_commit.Action(lambda writing: collection._begin(writing, QUEUE))) for _ in "ab"
    )
    for number, marked in ((first, None), (second, MANY)):
        assert number is not None
        tasks = list(write.tasks.items())
        action = group_commit.Action(partial(collection._mark, number=number, queue=QUEUE, tasks=tasks))
        found = commit(action)
        assert marked == (None if found is None else len(found))


@pytest.mark.usefixtures("small_steps")
@pytest.mark.rule("SK-14")
def test_very_many_tasks_of_which_one_has_changed_stay(engine: SqliteEngine) -> None:
    write = component(engine, Status.DEAD)
    assert isinstance(requeue(engine, MANY), Applied)
    assert engine.apply([write], PATIENCE_S) == [WriteConflict()]
    assert engine.apply([collection_of(engine)], PATIENCE_S) == [WriteConflict()], "one of them is open"
    assert len(engine.page(QUEUE, PATIENCE_S, limit=2 * MANY).items) == MANY


@pytest.mark.usefixtures("small_steps")
@pytest.mark.rule("SK-14")
def test_a_collection_whose_end_fails_is_of_unknown_outcome(
    engine: SqliteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = component(engine)

    def fail(*_: object) -> bool:
        raise RegistryUnavailable("locked")

    monkeypatch.setattr(collection, "_sweep", fail)
    with pytest.raises(OutcomeUnknown, match="not all is deleted yet: locked"):
        engine.apply([write], PATIENCE_S)


def claim_all(engine: SqliteEngine, at_once: int = 2) -> list[int]:
    """Claim until nothing is ready; the numbers of the tasks."""
    claimed: list[int] = []
    holders = tuple(str(number) for number in range(at_once))
    while found := engine.claim(claim_request(holders), PATIENCE_S).claimed:
        claimed += [int(stored.head.id, 16) for stored, _ in found]
    return claimed


def claim_request(holders: tuple[str, ...]) -> ClaimQuery:
    return ClaimQuery(QUEUE, holders, "worker", ClaimTerm(30.0, "boot", 1e9), None, lambda: 0.0, 0.0, 0.0)


def fan_out(
    engine: SqliteEngine, choice: AfterFailure = AfterFailure.WAIT, also: tuple[str, ...] = ()
) -> None:
    """Enqueue very many tasks that depend on task 1, and on others."""
    after = (task_id(1), *also)
    heads = [Head(task_id(n), QUEUE, "send", after=after, after_failure=choice) for n in range(10, 10 + MANY)]
    waiting = [Enqueue(Task(head, b""), 0, waits_for_unknown=True) for head in heads]
    engine.apply([enqueue(1), *waiting], PATIENCE_S)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.rule("SK-5", "SK-24")
def test_very_many_dependents_become_ready_in_steps(engine: SqliteEngine, path: Path) -> None:
    fan_out(engine)
    (answer,) = engine.apply([completion(present(engine, 1))], PATIENCE_S)
    assert isinstance(answer, Applied)
    ready = "SELECT count(*) FROM skuld_tasks WHERE ready = 1"
    with closing(sqlite3.connect(path)) as own:
        assert own.execute(ready).fetchone() == (STEP,)
        engine.close()  # as if it was killed; the rest is stored
        with closing(SqliteEngine(path)) as again:
            again.apply([enqueue(900, after=(task_id(1),))], PATIENCE_S)
            again.apply([enqueue(901, after=(task_id(1), task_id(900)))], PATIENCE_S)
            assert claim_all(again) == [*range(10, 10 + MANY), 900]
            again.apply([replace(completion(present(again, 900)), update=None)], PATIENCE_S)
            assert claim_all(again) == [901], "freed by another task, and by that once"
        assert own.execute("SELECT count(*) FROM skuld_settled").fetchone() == (0,)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.rule("SK-5")
def test_dependents_that_are_told_later_wait_for_other_tasks_and_are_looked_for_until_one_is_ready(
    engine: SqliteEngine,
) -> None:
    fan_out(engine, also=(task_id(2),))
    engine.apply([enqueue(2), enqueue(900, after=(task_id(1),))], PATIENCE_S)
    assert engine.claim(claim_request(("a", "b")), PATIENCE_S).claimed[1][0].head.id == task_id(2)
    engine.apply([completion(present(engine, 1))], PATIENCE_S)
    assert claim_all(engine) == [900], "it comes last of the dependents"
    engine.apply([completion(present(engine, 2))], PATIENCE_S)
    assert claim_all(engine) == [*range(10, 10 + MANY)]


@pytest.mark.usefixtures("small_steps")
@pytest.mark.rule("SK-5", "SK-22")
@pytest.mark.parametrize("is_claimed", [False, True])
def test_a_task_that_is_requeued_blocks_all_that_were_told_or_were_not(
    engine: SqliteEngine, *, is_claimed: bool
) -> None:
    fan_out(engine, AfterFailure.RUN)
    task = present(engine, 1)
    engine.apply([Move(task.head.id, QUEUE, 0, task.revision, TaskState(Status.DEAD))], PATIENCE_S)
    assert isinstance(requeue(engine, 1), Applied)
    if is_claimed:
        assert claim_all(engine) == [1]
    engine.apply([completion(present(engine, 1))], PATIENCE_S)
    assert claim_all(engine) == [*range(10, 10 + MANY)]


STATEMENTS_OF_FOURTH_VERSION = (
    "UPDATE skuld_tasks SET status = 0, failures = 0, due = 0.0, ready = 1, revision = :new WHERE id = :id",
    """UPDATE skuld_tasks SET blocked = blocked + 1 WHERE number IN
    (SELECT task FROM skuld_dependents WHERE queue = 1 AND id = :id) AND (:choices >> after_failure) & 1""",
    """INSERT INTO skuld_changes (revision, queue, task, before, status)
    SELECT :new, 1, number, 3, 0 FROM skuld_tasks WHERE id = :id""",
)
"""The requeue of a dead task by a process that knows nothing of dependents that are told later."""


@pytest.mark.usefixtures("small_steps")
@pytest.mark.rule("SK-5", "SK-22")
@pytest.mark.parametrize("end", [Status.COMPLETED, Status.DEAD, Status.CANCELLED])
@pytest.mark.parametrize("told", [0, 2])
def test_no_dependent_is_lost_if_a_process_of_the_fourth_version_requeues_meanwhile(
    engine: SqliteEngine, own: sqlite3.Connection, end: Status, told: int
) -> None:
    """The rest of the first end is told after the requeue; all wait for the second end, and none for ever."""
    fan_out(engine, AfterFailure.RUN)
    task = present(engine, 1)
    engine.apply([Move(task.head.id, QUEUE, 0, task.revision, TaskState(Status.DEAD))], PATIENCE_S)
    (new,) = own.execute("SELECT max(revision) + 1 FROM skuld_changes").fetchone()
    choices = 1 << CHOICES.index(AfterFailure.RUN)
    named = {"new": new, "id": bytes.fromhex(task_id(1)), "choices": choices}
    with own:
        for statement in STATEMENTS_OF_FOURTH_VERSION:
            own.execute(statement, named)
    for _ in range(told):
        claimed = engine.claim(replace(claim_request(("a",)), names={"other"}), PATIENCE_S).claimed
        assert claimed == ()
    if told == 2:
        assert claim_all(engine) == [1], "nothing runs before it, though some were ready once"
    task = present(engine, 1)
    engine.apply([Move(task.head.id, QUEUE, 0, task.revision, replace(COMPLETED, status=end))], PATIENCE_S)
    assert claim_all(engine) == [*range(10, 10 + MANY)]
    assert own.execute("SELECT count(*) FROM skuld_settled").fetchone() == (0,)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.rule("SK-22")
def test_very_many_tasks_fail_with_what_they_depend_on(engine: SqliteEngine) -> None:
    fan_out(engine, AfterFailure.FAIL)
    task = present(engine, 1)
    engine.apply([Move(task.head.id, QUEUE, 0, task.revision, TaskState(Status.DEAD))], PATIENCE_S)
    assert claim_all(engine) == []
    assert engine.count(QUEUE, PATIENCE_S)[Status.DEAD] == MANY + 1


def _each(value: object) -> Iterable[object]:
    """The constants of a module that may be several statements, one by one."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, tuple) else (value,)


def steps(connection: sqlite3.Connection, action: Callable[[], object]) -> int:
    """How many instructions of SQLite's machine an action takes on a connection."""
    taken = [0]

    def count() -> int:
        taken[0] += 1
        return 0

    connection.set_progress_handler(count, 1)
    action()
    connection.set_progress_handler(None, 1)
    return taken[0]


@pytest.mark.rule("SK-12", "SK-24")
def test_the_cost_of_a_task_is_the_same_whatever_was_done_and_whatever_waits(engine: SqliteEngine) -> None:
    """Counted in instructions: enqueueing, claiming and completing one task, and looking for one in vain."""
    writer, reader = engine._committer._store.connection, engine._reader._store.connection
    request = ClaimQuery(QUEUE, ["h"], "w", ClaimTerm(30.0, "boot", 30.0), {"send"}, lambda: 0.0, 1.0, 3.0)

    def claim() -> Stored:
        ((task, _),) = engine.claim(request, PATIENCE_S).claimed
        return task

    def cost(number: int) -> tuple[int, ...]:
        """The least of three, as now and then the changes so far are counted."""
        found = []
        for more in range(3):
            enqueued = steps(writer, lambda: engine.apply([enqueue(number + more)], PATIENCE_S))  # noqa: B023
            looked = steps(reader, lambda: engine.claim(replace(request, names={"other"}), PATIENCE_S))
            claimed = steps(writer, lambda: done.append(claim()))
            completed = steps(writer, lambda: engine.apply([completion(done[-1])], PATIENCE_S))
            found.append((enqueued, looked, claimed, completed))
        return tuple(map(min, zip(*found, strict=True)))

    done: list[Stored] = []
    engine.apply([enqueue(number) for number in range(10)], PATIENCE_S)
    few = cost(10)
    engine.apply([enqueue(number) for number in range(100, 4100)], PATIENCE_S)
    tasks = engine.claim(replace(request, holders=[f"h{n}" for n in range(2000)]), PATIENCE_S).claimed
    engine.apply([completion(task) for task, _ in tasks], PATIENCE_S)
    assert engine.count(QUEUE, PATIENCE_S)[Status.COMPLETED] == 2003
    many = cost(5000)
    assert all(abs(each - before) < 10 for each, before in zip(many, few, strict=True)), (many, few)
    assert all(500 > each > 100 for each in few), f"they are not counted: {few}"


@pytest.mark.rule("SK-5", "SK-24")
def test_tasks_that_time_makes_ready_are_made_so_a_part_at_a_time(engine: SqliteEngine) -> None:
    later = [replace(enqueue(number), state=TaskState(due=5.0)) for number in range(1200)]
    engine.apply(later, PATIENCE_S)
    connection = engine._committer._store.connection
    request = ClaimQuery(QUEUE, ["h"], "w", ClaimTerm(30.0, "boot", 30.0), {"other"}, lambda: 0.0, 5.0, 3.0)
    for ready in (500, 1000, 1200, 1200):
        answer = engine.claim(request, PATIENCE_S)
        (counted,) = connection.execute("SELECT count(*) FROM skuld_tasks WHERE ready = 1").fetchone()
        assert counted == ready
    assert answer.next_due is None


@pytest.mark.rule("SK-23", "SK-24")
def test_a_claim_looks_at_very_many_tasks_a_part_at_a_time(
    engine: SqliteEngine, own: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By counting: meanwhile nobody else can write."""
    monkeypatch.setattr(claims, "MAX_LEFT", 50)
    reads: list[list[int]] = []
    best, carry_out = claims.Claims._best, claims.Claims.carry_out

    def counted(*arguments: Any) -> list[rows.Row]:
        found = best(*arguments)
        reads[-1].append(len(found))
        return found

    def begun(claiming: claims.Claims, writing: Any) -> Any:
        reads.append([])
        return carry_out(claiming, writing)

    monkeypatch.setattr(claims.Claims, "_best", staticmethod(counted))
    monkeypatch.setattr(claims.Claims, "carry_out", begun)
    heads = [
        Head(task_id(number), QUEUE, "send", limit_key=str(number % 120), rate_limit="1/s")
        for number in range(240)
    ]
    engine.apply([Enqueue(Task(head, b""), 0) for head in heads], PATIENCE_S)
    term, holders = ClaimTerm(300.0, "boot", 300.0), [f"h{number}" for number in range(60)]
    request = ClaimQuery(QUEUE, holders, "w", term, {"send"}, lambda: 0.0, 0.0, 1.0)
    started = [len(engine.claim(request, PATIENCE_S).claimed) for _ in range(2)]
    assert started == [60, 60]
    assert max(map(sum, reads)) <= 60 + 60 * claims.FEW_AHEAD, "most is not read again after each start"

    del reads[:]
    assert not engine.claim(replace(request, holders=["h"]), PATIENCE_S).claimed
    places = "SELECT ready, count(*) FROM skuld_tasks WHERE status = 0 GROUP BY ready"
    assert own.execute(places).fetchall() == [(3, 120)]
    assert [sum(each) for each in reads] == [50, 50, 20]


@pytest.mark.rule("SK-8", "SK-15")
def test_an_over_claim_that_can_not_be_read_is_tried_once_a_minute(
    engine: SqliteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not with each claim, about a thousand times a second."""
    now, wall = [0.0], 100.0
    request = ClaimQuery(
        QUEUE, ["h"], "w", ClaimTerm(30.0, "boot", 30.0), {"send"}, lambda: now[0], wall, 3.0
    )
    engine.apply([enqueue(1)], PATIENCE_S)
    assert len(engine.claim(request, PATIENCE_S).claimed) == 1
    tried: list[float] = []

    def unreadable(_queue: str, _row: rows.Row) -> Stored:
        tried.append(now[0])
        raise ValueError("of a newer version")

    now[0] = 40.0
    with monkeypatch.context() as patch:
        patch.setattr(claims, "stored_of", unreadable)
        for _ in range(3):
            answer = engine.claim(request, PATIENCE_S)
            now[0] += 1.0
    assert tried == [40.0]
    answer = engine.claim(request, PATIENCE_S)
    assert (list(answer.claimed), answer.next_due, answer.next_over) == ([], wall + claims.ASIDE_S, None)
    engine.claim(replace(request, holders=["i"], wall=wall + claims.ASIDE_S), PATIENCE_S)
    assert present(engine, 1).state.status is Status.DEAD, "as its only try was cut off"


@pytest.mark.rule("SK-12")
def test_pages_of_some_statuses_step_over_no_other_tasks(engine: SqliteEngine) -> None:
    engine.apply([enqueue(number) for number in range(3000)], PATIENCE_S)
    connection = engine._reader._store.connection

    def cost(action: Callable[[], object]) -> int:
        return steps(connection, action)

    dead = frozenset({Status.DEAD})
    assert cost(lambda: engine.page(QUEUE, PATIENCE_S, statuses=dead)) < 200
    assert cost(lambda: engine.page(QUEUE, PATIENCE_S, partition=0, statuses=dead)) < 200
    assert cost(lambda: engine.count(QUEUE, PATIENCE_S)) < 200
    assert cost(lambda: engine.page(QUEUE, PATIENCE_S, limit=5)) < 1000
    assert cost(lambda: engine.page(QUEUE, PATIENCE_S)) > 1000, "the steps are not counted"


@pytest.mark.rule("SK-15")
def test_an_error_that_is_no_unicode_is_written(engine: SqliteEngine) -> None:
    engine.apply([enqueue(1)], PATIENCE_S)
    before = present(engine, 1)
    dead = TaskState(Status.DEAD, CLAIM, error="no file größe\udcff")
    answers = engine.apply([Move(before.head.id, QUEUE, 0, before.revision, dead)], PATIENCE_S)
    assert isinstance(answers[0], Applied)
    assert present(engine, 1).state.error == r"no file größe\udcff"


def test_columns_are_those_of_a_task(engine: SqliteEngine) -> None:
    after = (task_id(7), task_id(3))
    write = Enqueue(enqueue(1, after=after).task, 0, waits_for_unknown=True)
    engine.apply([write], PATIENCE_S)
    assert present(engine, 1).head.after == after
    assert rows.ids_of(rows.ids_bytes(after)) == after


@pytest.mark.rule("SK-6")
def test_a_claim_that_was_begun_before_a_pause_is_refused(
    engine: SqliteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause is committed between the look at the index and the write."""
    engine.apply([enqueue(1)], PATIENCE_S)
    engine.put_pause(QUEUE, "", b"{}", PATIENCE_S)
    monkeypatch.setattr(reader.TaskSnapshot, "pause", lambda *_: None)
    request = ClaimQuery(QUEUE, ["h"], "w", ClaimTerm(30.0, "boot", 30.0), None, lambda: 0.0, 1.0, 3.0)
    assert not engine.claim(request, PATIENCE_S).claimed
    engine.put_pause(QUEUE, "", None, PATIENCE_S)
    assert len(engine.claim(request, PATIENCE_S).claimed) == 1


@pytest.mark.rule("SK-22")
def test_a_file_that_was_made_before_there_were_notes_gets_one(tmp_path: Path) -> None:
    path = tmp_path / "tasks.db"
    SqliteEngine(path).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        turn_into_second_version(connection)
    with closing(SqliteEngine(path)) as engine:
        engine.define("work", 1, 10)
        assert engine.note("work", 10) == QueueNote()
        assert engine.put_note("work", b"note", 0, 10)
        assert engine.note("work", 10) == QueueNote(b"note", 1)


@pytest.mark.rule("SK-11")
def test_a_watch_of_statuses_reads_no_task_that_has_another(
    engine: SqliteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's own claims and completions, and new tasks, cost its watch nothing."""
    seen: list[tuple[set[Status] | None, list[Status]]] = []
    changed = reader.TaskSnapshot.changed

    def counted(
        self: reader.TaskSnapshot, queue: str, after: int, up_to: int, statuses: set[Status] | None = None
    ) -> list[rows.Row]:
        found = changed(self, queue, after, up_to, statuses)
        seen.append((statuses, [rows.change_of(row).status for row in found]))
        return found

    monkeypatch.setattr(reader.TaskSnapshot, "changed", counted)
    heard = threading.Event()
    ends = StatusFilter(frozenset({Status.DEAD}), lambda _: True)
    with closing(engine.watch(QUEUE, 0, lambda _: heard.set(), ends)):
        engine.apply([enqueue(number) for number in range(3)], PATIENCE_S)
        for number, status in enumerate((Status.CLAIMED, Status.COMPLETED, Status.DEAD)):
            task = present(engine, number)
            engine.apply([Move(task.head.id, QUEUE, 0, task.revision, TaskState(status, CLAIM))], PATIENCE_S)
        assert heard.wait(PATIENCE_S)
    assert all(statuses == {Status.DEAD} for statuses, _ in seen)
    assert [status for _, found in seen for status in found] == [Status.DEAD]
