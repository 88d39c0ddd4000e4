"""Sinks of the history: names, rotation, bounds and gaps, without waiting for anything."""

from __future__ import annotations

import fcntl
import threading
from collections import deque
from pathlib import Path

import pytest

from rebalanser.core.group.messages import FactKind
from rebalanser.errors import InvalidSettings
from rebalanser.history import (
    GAP,
    Author,
    Event,
    HistorySink,
    JsonlSink,
    MemorySink,
    NullSink,
    Protocol,
    Record,
    read_records,
)
from rebalanser.history.files import RotatingFiles, encoded
from rebalanser.testing.waiting import PATIENCE_S

WALL = 1_700_000_000.0
NAME = "orders.w.20231114T221320000000Z"


def record(sequence: int, group: str = "orders") -> Record:
    author = Author(Protocol.GROUP, group, "w", "w")
    return Record.of(
        author, Event(FactKind.JOINED, "w-1"), sequence=sequence, wall=WALL + sequence, monotonic=sequence
    )


def readable(folder: Path) -> list[Record]:
    items = list(read_records(folder))
    assert all(isinstance(item, Record) for item in items), items
    return [item for item in items if isinstance(item, Record)]


def rotating(
    folder: Path, *, wall: float = WALL, max_bytes: int = 1 << 20, max_files: int = 8
) -> RotatingFiles:
    return RotatingFiles(folder, "orders", "w", wall=wall, max_file_bytes=max_bytes, max_files=max_files)


def test_every_sink_keeps_the_contract(tmp_path: Path) -> None:
    memory = MemorySink()
    sinks: list[HistorySink] = [NullSink(), memory, JsonlSink(tmp_path, "orders", "w")]
    for sink in sinks:
        sink.write(record(0))
        sink.close(PATIENCE_S)
        sink.write(record(1))
        sink.close(PATIENCE_S)
    assert memory.records == [record(0)]
    assert readable(tmp_path) == [record(0)]


def test_close_leaves_everything_on_disk_in_order(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "not" / "there", "orders", "w")
    for sequence in range(3000):
        sink.write(record(sequence))
    sink.close(PATIENCE_S)
    assert [item.sequence for item in readable(tmp_path / "not" / "there")] == list(range(3000))
    assert sink.dropped == 0


def test_a_record_after_close_is_counted(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path, "orders", "w")
    sink.close(PATIENCE_S)
    sink.write(record(0))
    assert sink.dropped == 1
    assert not list(tmp_path.iterdir()), "nothing was written, so there is no file"


@pytest.mark.parametrize("limit", ["max_file_bytes", "max_files", "queue_size"])
def test_a_limit_of_nothing_is_refused(tmp_path: Path, limit: str) -> None:
    with pytest.raises(InvalidSettings, match=f"{limit}.*not 0"):
        JsonlSink(tmp_path, "orders", "w", **{limit: 0})


def test_files_are_named_so_that_a_dot_only_separates(tmp_path: Path) -> None:
    files = RotatingFiles(tmp_path, "a.b/ü", "..", wall=WALL, max_file_bytes=99, max_files=2)
    files.append(deque([b"x\n"]))
    assert [path.name for path in tmp_path.iterdir()] == [
        "a%2Eb%2F%C3%BC.%2E%2E.20231114T221320000000Z.000000.jsonl"
    ]
    files.close()


@pytest.mark.rule("AU-1")
@pytest.mark.parametrize(("name", "part"), [("_x_y", "%5Fx_y"), (".x", "%2Ex"), ("__", "%5F_"), ("x_", "x_")])
def test_no_file_is_hidden_to_spark(name: str, part: str) -> None:
    """It leaves out files whose names begin with an underscore or a dot."""
    assert encoded(name) == part
    assert encoded(part) != part or name == part


@pytest.mark.rule("RB-33")
def test_names_of_any_length_stay_apart_and_fit() -> None:
    names = [*"a.~/% ", "ü" * 512, "ü" * 511 + "a", "\udcff", "a" * 90, "a" * 91, "a" * 92, "a%2E"]
    parts = [encoded(name) for name in names]
    assert len(set(parts)) == len(names)
    assert all(0 < len(part) <= 90 and part.isascii() and not set(part) & set("./") for part in parts)


def test_a_file_is_rotated_before_it_grows_over_its_limit(tmp_path: Path) -> None:
    files = rotating(tmp_path, max_bytes=10)
    files.append(deque([b"1234\n", b"1234\n", b"12345678901234\n", b"1\n"]))
    files.append(deque([b"12345678\n"]))
    files.close()
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == [
        b"1234\n1234\n",
        b"12345678901234\n",
        b"1\n",
        b"12345678\n",
    ]


def test_disk_use_is_bounded_and_the_newest_are_kept(tmp_path: Path) -> None:
    size = len(record(10).to_line())
    sink = JsonlSink(tmp_path, "orders", "w", max_file_bytes=2 * size, max_files=3)
    for sequence in range(10, 30):
        sink.write(record(sequence))
    sink.close(PATIENCE_S)
    assert len(list(tmp_path.iterdir())) == 3
    assert [item.sequence for item in readable(tmp_path)] == [24, 25, 26, 27, 28, 29]


def test_files_of_earlier_processes_count_and_those_of_others_do_not(tmp_path: Path) -> None:
    others = [tmp_path / "orders.w2.20200101T000000000000Z.000000.jsonl", tmp_path / "notes.jsonl"]
    for path in others:
        path.write_bytes(b"x\n")
    for start in range(5):
        files = rotating(tmp_path, wall=WALL + start, max_files=2)
        files.append(deque([b"%d\n" % start]))
        files.close()
    mine = sorted(set(tmp_path.iterdir()) - set(others))
    assert [path.read_bytes() for path in mine] == [b"3\n", b"4\n"]
    assert all(path.exists() for path in others)


def test_a_file_that_a_living_process_writes_is_never_deleted(tmp_path: Path) -> None:
    alive = rotating(tmp_path, wall=WALL - 100, max_files=1)
    alive.append(deque([b"alive\n"]))
    other = rotating(tmp_path, max_files=1)
    other.append(deque([b"other\n"]))
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == [b"alive\n", b"other\n"]
    alive.close()
    other.close()
    rotating(tmp_path, wall=WALL + 1, max_files=1).append(deque([b"next\n"]))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"next\n"]


def test_a_torn_line_of_a_predecessor_is_never_appended_to(tmp_path: Path) -> None:
    torn = tmp_path / f"{NAME}.000000.jsonl"
    torn.write_bytes(record(0).to_line()[:-9])
    files = rotating(tmp_path)
    files.append(deque([record(1).to_line()]))
    files.close()
    assert torn.read_bytes() == record(0).to_line()[:-9]
    assert readable(tmp_path / f"{NAME}.000001.jsonl") == [record(1)]


def test_a_failed_write_leaves_no_part_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(descriptor: int, data: bytes) -> None:
        os_write(descriptor, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    from os import write as os_write

    files = rotating(tmp_path)
    files.append(deque([b"before\n"]))
    lines = deque([b"first\n", b"second\n"])
    with monkeypatch.context() as broken:
        broken.setattr("rebalanser.history.files._write_all", half)
        with pytest.raises(OSError, match="No space"):
            files.append(lines)
    assert list(lines) == [b"first\n", b"second\n"]
    files.append(lines)
    assert not lines
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before\nfirst\nsecond\n"]
    files.close()


def test_a_failed_sync_begins_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    files = rotating(tmp_path)
    files.append(deque([b"first\n"]))
    with monkeypatch.context() as broken:
        broken.setattr("rebalanser.history.files.os.fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            files.sync()
    files.append(deque([b"second\n"]))
    files.sync()
    assert not files.unsynced
    assert len(list(tmp_path.iterdir())) == 2
    files.close()


class Disk:
    """Stands in front of the files and lets nothing through until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = threading.Event()
        self.works = threading.Event()
        self._append = RotatingFiles.append
        monkeypatch.setattr(RotatingFiles, "append", lambda files, lines: self.append(files, lines))

    def append(self, files: RotatingFiles, lines: deque[bytes]) -> None:
        if lines:
            self.asked.set()
            assert self.works.wait(PATIENCE_S)
        self._append(files, lines)


def test_while_the_disk_is_stuck_writes_return_and_what_is_dropped_shows_as_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    sink = JsonlSink(tmp_path, "orders", "w", queue_size=10, flush_interval_s=0)
    sink.write(record(0))
    assert disk.asked.wait(PATIENCE_S), "the writer is stuck with record 0 in its hand"
    for sequence in range(1, 41):
        sink.write(record(sequence))
    assert sink.dropped == 30, "each write returned though the writer never moved"
    assert not list(tmp_path.iterdir())
    disk.works.set()
    sink.close(PATIENCE_S)
    sink.write(record(41))
    written = readable(tmp_path)
    assert [item.sequence for item in written] == list(range(12))
    assert written[:11] == [record(sequence) for sequence in range(11)]
    assert written[11].kind == GAP
    assert written[11].detail == {
        "dropped": 30,
        "first": 11,
        "last": 40,
        "reason": "records came faster than they could be written",
    }


def test_close_gives_up_in_time_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(monkeypatch)
    sink = JsonlSink(tmp_path, "orders", "w", flush_interval_s=0)
    sink.write(record(0))
    assert disk.asked.wait(PATIENCE_S)
    sink.close(0)
    assert [line.__dict__["action"] for line in caplog.records] == ["history_incomplete"]
    disk.works.set()
    sink.close(PATIENCE_S)
    assert readable(tmp_path) == [record(0)]


def test_a_disk_that_fails_until_the_end_is_told_once_and_what_is_lost_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = 0
    second = threading.Event()

    def fail(_files: RotatingFiles, lines: deque[bytes]) -> None:
        nonlocal attempts
        if lines:
            attempts += 1
            if attempts == 2:
                second.set()
            raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr(RotatingFiles, "append", fail)
    sink = JsonlSink(tmp_path, "orders", "w", flush_interval_s=0)
    sink.write(record(0))
    assert second.wait(PATIENCE_S)
    sink.close(PATIENCE_S)
    assert sink.dropped == 1
    assert [(line.__dict__["action"], line.levelname) for line in caplog.records] == [
        ("history_failing", "WARNING"),
        ("history_lost", "ERROR"),
    ]
    assert "ENOSPC: No space left on device" in caplog.text


def test_an_attempt_that_began_before_the_sink_was_closed_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room may have come while it was under way."""
    under_way, may_fail = threading.Event(), threading.Event()
    append = RotatingFiles.append

    def fail_once(files: RotatingFiles, lines: deque[bytes]) -> None:
        if lines and not may_fail.is_set():
            under_way.set()
            assert may_fail.wait(PATIENCE_S)
            raise OSError(28, "No space left on device")
        append(files, lines)

    monkeypatch.setattr(RotatingFiles, "append", fail_once)
    sink = JsonlSink(tmp_path, "orders", "w", flush_interval_s=0)
    sink.write(record(0))
    assert under_way.wait(PATIENCE_S)
    sink.close(0.0)
    may_fail.set()
    sink.close(PATIENCE_S)
    assert readable(tmp_path) == [record(0)]


def test_the_present_file_is_locked(tmp_path: Path) -> None:
    files = rotating(tmp_path)
    files.append(deque([b"x\n"]))
    (path,) = tmp_path.iterdir()
    with path.open("rb") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    files.close()
