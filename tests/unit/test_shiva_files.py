"""The threads that work on a worker's files, and the archives that they read from COMMAND when needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from rebalanser.core.shiva.changes import change_between
from rebalanser.core.shiva.messages import ChangeRead, CommandEvent, DocumentRead, RecordMetadata, StopRead
from rebalanser.core.shiva.records import AssignmentDocument, StopCommand
from rebalanser.core.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationState,
    Archive,
    Epoch,
    Incarnation,
    Mode,
)
from rebalanser.core.shiva.worker import Worker
from rebalanser.errors import InvalidArchive, RegistryUnavailable
from rebalanser.shiva.data_folder import DataFolder, folder_name
from rebalanser.testing.waiting import PATIENCE_S, wait_until
from rebalanser_kafka.log import LogReader, LogRecord, LogTruncated
from rebalanser_kafka.shiva import parts
from rebalanser_kafka.shiva.parts import ArchiveReader, FileThreads, PartIndex, PartsMissing
from rebalanser_kafka.shiva.wire import PartKey
from rebalanser_kafka.shiva.worker import KafkaWorker

A, B = (ApplicationId("t", "c", name) for name in "AB")
SHA = "a" * 64


class Bench:
    """File threads with a log of what was done, and work that hangs until it may go on."""

    def __init__(self) -> None:
        self.threads = FileThreads("files", threads=2, max_waiting=3)
        self.done: list[str] = []
        self.may_go_on = threading.Event()

    def do(self, folder: str, what: str) -> None:
        self.threads.submit(folder, partial(self.done.append, what))

    def hang(self, folder: str) -> None:
        begun = threading.Event()

        def work() -> None:
            begun.set()
            self.may_go_on.wait(PATIENCE_S)

        self.threads.submit(folder, work)
        assert begun.wait(PATIENCE_S)

    def until_done(self, *folders: str) -> None:
        for folder in folders:
            done = threading.Event()
            self.threads.submit(folder, done.set)
            assert done.wait(PATIENCE_S)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.may_go_on.set()
    bench.threads.close()


def test_one_application_does_not_hold_up_another_and_keeps_its_order(bench: Bench) -> None:
    bench.hang("slow")
    for what in ("slow 1", "slow 2", "slow 3"):
        bench.do("slow", what)
    bench.do("quick", "quick 1")
    bench.do("quick", "quick 2")
    bench.until_done("quick")
    assert bench.done == ["quick 1", "quick 2"]
    bench.may_go_on.set()
    bench.until_done("slow")
    assert bench.done[2:] == ["slow 1", "slow 2", "slow 3"]


def test_reading_goes_on_until_too_much_work_waits(bench: Bench) -> None:
    bench.hang("slow")
    told: list[str] = []
    bench.do("slow", "second")
    bench.do("slow", "third")
    bench.threads.when_room(partial(told.append, "first"))
    assert told == ["first"]
    bench.do("slow", "fourth")
    bench.threads.when_room(partial(told.append, "second"))
    assert told == ["first"]
    bench.may_go_on.set()
    bench.until_done("slow")
    assert told == ["first", "second"]


def test_work_that_raises_is_told_and_ends_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError("no disk")

    bench.threads.submit("a", fail)
    bench.do("a", "next")
    bench.until_done("a")
    assert bench.done == ["next"]
    assert "work on files failed" in caplog.text


def test_nothing_begins_after_the_end(bench: Bench) -> None:
    bench.hang("slow")
    bench.do("slow", "waits")
    closer = threading.Thread(target=bench.threads.close)
    closer.start()
    bench.may_go_on.set()
    closer.join(PATIENCE_S)
    bench.do("other", "late")
    assert bench.done in ([], ["waits"])


@dataclass
class Log:
    """COMMAND, with readers of it that count what they fetch."""

    records: dict[int, LogRecord] = field(default_factory=dict)
    start: int = 0
    now: float = 0.0
    silent: bool = False
    opened: int = 0
    closed: int = 0
    polled: list[int] = field(default_factory=list)
    index: PartIndex = field(default_factory=PartIndex)

    def __post_init__(self) -> None:
        self.archives = ArchiveReader(self.open, self.index, lambda: self.now)

    def open(self, offset: int) -> LogReader:
        self.opened += 1
        return cast("LogReader", Reader(self, offset))

    def write(self, offset: int, number: int, value: bytes | None, application: ApplicationId = A) -> None:
        key = PartKey(application, SHA, number)
        self.records[offset] = LogRecord(offset, 0, True, str(key).encode(), value)
        self.index.note(key, None if value is None else offset)

    def read(self, size_bytes: int, count: int) -> bytes:
        return self.archives.read(A, Archive(SHA, size_bytes, count))


@dataclass
class Reader:
    """A reader of the log, two records at a time."""

    log: Log
    position: int
    trouble: str | None = None

    def move_to(self, offset: int) -> None:
        self.position = offset

    def poll(self, timeout_s: float) -> list[LogRecord]:
        if self.position < self.log.start:
            raise LogTruncated("command", self.position)
        if self.log.silent:
            self.log.now += timeout_s
            self.trouble = "the broker is away"
            return []
        found = [self.log.records[o] for o in sorted(self.log.records) if o >= self.position][:2]
        self.log.polled += [record.offset for record in found]
        self.position = found[-1].offset + 1 if found else max(self.log.records) + 1
        return found

    def close(self) -> None:
        self.log.closed += 1


@pytest.mark.rule("SH-4", "SH-16")
class TestArchives:
    def test_an_archive_is_put_together_from_where_its_parts_stand(self) -> None:
        log = Log()
        for offset in range(50):
            log.write(offset, offset, b"other", B)
        log.write(20, 1, b"cd")
        log.write(21, 0, b"ab")
        log.write(24, 2, b"e")
        assert log.read(5, 3) == b"abcde"
        assert min(log.polled) == 20, "nothing before it is read"
        assert max(log.polled) <= 25, "nor what stands behind it"
        assert log.read(0, 0) == b""

    def test_the_last_copy_of_a_part_counts(self) -> None:
        log = Log()
        log.write(3, 0, b"ab")
        log.write(9, 0, b"ab")
        del log.records[3]
        assert log.read(2, 1) == b"ab"

    @pytest.mark.parametrize("gone", ["never written", "dropped", "compacted", "replaced", "truncated"])
    def test_parts_that_are_not_there_are_missing(self, gone: str) -> None:
        log = Log()
        log.write(3, 0, b"ab")
        if gone != "never written":
            log.write(4, 1, b"cd")
        log.write(5, 7, b"?", B)
        match gone:
            case "dropped":
                log.write(6, 1, None)
            case "compacted":
                del log.records[4]
            case "replaced":
                log.records[4] = LogRecord(4, 0, True, b"cmd:t/c/A", b"{}")
            case "truncated":
                log.start = 5
        with pytest.raises(PartsMissing):
            log.read(4, 2)
        log.write(8, 0, b"ab")
        log.write(9, 1, b"cd")
        assert log.read(4, 2) == b"abcd"

    @pytest.mark.parametrize("size_bytes", [3, 5])
    def test_an_archive_of_another_size_is_refused(self, size_bytes: int) -> None:
        log = Log()
        for number in range(2):
            log.write(number, number, b"ab")
        with pytest.raises(InvalidArchive, match=r"the archive's parts have"):
            log.read(size_bytes, 2)

    def test_one_that_says_that_it_is_over_the_limit_is_not_even_read(self) -> None:
        log = Log()
        log.write(0, 0, b"ab")
        with pytest.raises(InvalidArchive, match="are allowed"):
            log.read(10**12, 1)
        assert not log.opened

    def test_parts_beyond_the_announced_size_are_not_gathered(self) -> None:
        log = Log()
        for number in range(100):
            log.write(number, number, b"ab")
        with pytest.raises(InvalidArchive, match="more than 6 bytes"):
            log.read(6, 100)
        assert len(log.polled) <= 5

    def test_a_silent_broker_is_given_up_for_the_time_being(self) -> None:
        log = Log(silent=True)
        log.write(0, 0, b"ab")
        with pytest.raises(RegistryUnavailable, match="the broker is away"):
            log.read(2, 1)
        assert parts.PATIENCE_S < log.now < parts.PATIENCE_S + 1
        assert log.opened == log.closed
        log.silent = False
        assert log.read(2, 1) == b"ab"

    def test_a_worker_that_ends_waits_for_no_archive(self) -> None:
        log = Log(silent=True)
        log.write(0, 0, b"ab")
        log.archives.close()
        with pytest.raises(RegistryUnavailable, match="this process ends"):
            log.read(2, 1)

    @pytest.mark.rule("SH-15")
    def test_parts_of_many_archives_are_read_in_one_pass(self) -> None:
        """A leader writes them again; each poll counts as progress, however long all of it takes."""
        log = Log()
        b, gone = ApplicationId("t", "c", "b"), ApplicationId("t", "c", "gone")
        for offset, (application, number) in enumerate([(A, 0), (b, 0), (A, 1), (gone, 1), (b, 1)]):
            log.write(offset, number, f"{application.application}{number}".encode(), application)
        archives = [(application, Archive(SHA, 4, 2)) for application in (A, b, gone)]
        assert log.archives.parts(archives) == {
            PartKey(application, SHA, number): f"{application.application}{number}".encode()
            for application in (A, b)
            for number in range(2)
        }
        assert log.polled == sorted(set(log.polled))
        assert (log.opened, log.closed, log.archives.progress) == (1, 1, 3)

    @pytest.mark.rule("SH-15")
    def test_parts_before_the_logs_begin_end_the_reading_of_many(self) -> None:
        """The leader reads COMMAND anew rather than take all of them for gone."""
        log = Log(start=5)
        for offset, application in ((1, A), (9, ApplicationId("t", "c", "b"))):
            log.write(offset, 0, b"ab", application)
        with pytest.raises(LogTruncated):
            log.archives.parts([(a, Archive(SHA, 2, 1)) for a in (A, ApplicationId("t", "c", "b"))])
        assert log.opened == log.closed

    def test_requests_that_overlap_share_a_reader(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log = Log()
        for number in range(4):
            log.write(10 * number, 0, b"ab", ApplicationId("t", "c", f"a{number}"))
        may_go_on, begun = threading.Event(), threading.Event()
        poll = Reader.poll

        def hold(reader: Reader, timeout_s: float) -> list[LogRecord]:
            begun.set()
            may_go_on.wait(PATIENCE_S)
            return poll(reader, timeout_s)

        monkeypatch.setattr(Reader, "poll", hold)
        read: dict[int, bytes] = {}

        def fetch(number: int) -> None:
            application = ApplicationId("t", "c", f"a{number}")
            read[number] = log.archives.read(application, Archive(SHA, 2, 1))

        threads = [threading.Thread(target=fetch, args=(number,)) for number in range(4)]
        threads[0].start()
        assert begun.wait(PATIENCE_S)
        for thread in threads[1:]:
            thread.start()
        wait_until(lambda: log.archives._requests == 4, "all wait")
        may_go_on.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert read == dict.fromkeys(range(4), b"ab")
        assert (log.opened, log.closed) == (1, 1)


@pytest.mark.rule("SH-5", "SH-24")
@pytest.mark.parametrize("changed", [False, True], ids=["whole", "change"])
@pytest.mark.parametrize(("stopped_at", "is_leftover"), [(3, False), (9, True)], ids=["before", "after"])
def test_a_document_that_is_told_late_does_not_bring_back_what_was_stopped_after_it(
    stopped_at: int, is_leftover: bool, changed: bool
) -> None:
    """Documents wait while COMMAND is replayed; files of what a later stop ended are leftovers anyway."""
    application = ApplicationId("t", "c", "a")
    entry = ApplicationEntry("c1", ApplicationState.RUNNING, Mode.AVAILABLE, Archive("0" * 64, 1, 1))
    base = AssignmentDocument(Epoch(1, 1), "l", 0, 1.0)
    document = replace(base, epoch=Epoch(1, 2), applications={application: entry})
    at = RecordMetadata(5, 0, 1)
    told = ChangeRead(at, change_between(base, document)) if changed else DocumentRead(at, document)
    worker = object.__new__(KafkaWorker)
    worker._mentioned, worker._keeping, worker._stopped_at = set(), set(), {}
    worker._note_mentioned(StopRead(RecordMetadata(stopped_at, 0, 1), StopCommand(application, "c2")))
    worker._note_mentioned(told)
    assert (application not in worker._mentioned) == is_leftover


@pytest.mark.rule("SH-5", "SH-24")
@pytest.mark.parametrize("lost", [False, True], ids=["read", "lost"])
def test_without_the_last_document_only_the_folders_of_what_was_stopped_are_leftovers(
    lost: bool, tmp_path: Path
) -> None:
    """What has finished may be in that document alone, and keeps its data until it is stopped."""
    finished, stopped, gone = (ApplicationId("t", "c", name) for name in ("finished", "stopped", "gone"))
    entry = ApplicationEntry("c1", ApplicationState.FINISHED, Mode.AVAILABLE, Archive("0" * 64, 1, 1))
    base = AssignmentDocument(Epoch(1, 1), "l", 0, 1.0, applications={finished: entry})
    events: list[CommandEvent] = [
        StopRead(RecordMetadata(6, 0, 1), StopCommand(stopped, "c2")),
        ChangeRead(
            RecordMetadata(7, 0, 1), change_between(base, replace(base, epoch=Epoch(1, 2), consumed=6))
        ),
    ]
    if not lost:
        events.insert(0, DocumentRead(RecordMetadata(5, 0, 1), base))
    for application in (finished, stopped, gone):
        (tmp_path / "applications" / folder_name(str(application))).mkdir(parents=True)
    worker = object.__new__(KafkaWorker)
    worker._mentioned, worker._keeping, worker._stopped_at = set(), set(), {}
    worker._machine = Worker("w", Incarnation("folder", 1))
    with DataFolder.open(tmp_path) as worker._data:
        for event in events:
            worker._note_mentioned(event)
            worker._machine.handle(event, 0.0)
        left = {folder_name(str(application)) for application in ((stopped,) if lost else (stopped, gone))}
        assert worker._leftovers() == left
