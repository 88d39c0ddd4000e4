"""The history on a disk that fills up, goes away, or whose writer is killed."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

from rebalanser.core.group.messages import FactKind
from rebalanser.history import (
    GAP,
    Author,
    Event,
    JsonlSink,
    Record,
    UnreadableLine,
    UnreadableReason,
    read_records,
)
from rebalanser.history import Protocol as HistoryProtocol
from rebalanser.testing.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


def record(sequence: int) -> Record:
    event = Event(FactKind.BARRIER_ADDED, "w-1", resource=f"partition-{sequence}", token=sequence)
    author = Author(HistoryProtocol.GROUP, "orders", "w", "w")
    return Record.of(author, event, sequence=sequence, wall=1.5e9, monotonic=sequence)


def readable(folder: Path) -> list[Record]:
    items = list(read_records(folder))
    assert all(isinstance(item, Record) for item in items), items
    return [item for item in items if isinstance(item, Record)]


def accounted(records: list[Record]) -> list[int]:
    """The sequence numbers that the records and the gaps among them stand for."""
    numbers: list[int] = []
    for item in records:
        if item.kind == GAP:
            first, last = item.detail["first"], item.detail["last"]
            assert isinstance(first, int)
            assert isinstance(last, int)
            assert item.detail["dropped"] == last - first + 1
            numbers += range(first, last + 1)
        else:
            numbers.append(item.sequence)
    return numbers


class FullDisk(Protocol):
    """A folder whose disk can be full."""

    folder: Path

    def fill(self) -> None:
        """From now on nothing more fits."""

    def free(self) -> None:
        """Now it does again."""


class SmallDisk:
    """A tmpfs of 256 KiB and a file that fills it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Write until nothing more fits."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 1024)

    def free(self) -> None:
        """Delete it."""
        self._filler.unlink()


class SmallFiles:
    """A limit on the size of this process's files, which needs no privilege."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        """Allow no file to grow over what the first records took."""
        size = max(path.stat().st_size for path in self.folder.iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, self._limits[1]))

    def free(self) -> None:
        """Allow what was allowed."""
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)


@pytest.fixture(params=["tmpfs", "rlimit"])
def full_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FullDisk]:
    """A disk that is not full yet."""
    if request.param == "rlimit":
        limited = SmallFiles(tmp_path)
        yield limited
        limited.free()
        return
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs root; the same is tested with a limit on file sizes")
    yield SmallDisk(tmp_path)
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_stops_nobody_and_once_there_is_room_everything_is_accounted_for(
    full_disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    sink = JsonlSink(full_disk.folder, "orders", "w", queue_size=50, flush_interval_s=0)
    sequence = 0
    for sequence in range(20):
        sink.write(record(sequence))
    wait_until(lambda: len(readable(full_disk.folder)) == 20)
    full_disk.fill()
    with caplog.at_level("WARNING", "rebalanser.history"):
        while sink.dropped < 30:
            sequence += 1
            sink.write(record(sequence))
    full_disk.free()
    sink.close(PATIENCE_S)
    written = readable(full_disk.folder)
    assert accounted(written) == list(range(sequence + 1))
    gaps = [item for item in written if item.kind == GAP]
    assert sum(int(item.detail["dropped"] or 0) for item in gaps) == sink.dropped


def test_a_record_that_waited_out_a_full_disk_is_not_lost(
    full_disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    sink = JsonlSink(full_disk.folder, "orders", "w", flush_interval_s=0)
    sink.write(record(0))
    wait_until(lambda: len(readable(full_disk.folder)) == 1)
    full_disk.fill()
    for sequence in range(1, 200):
        sink.write(record(sequence))
    wait_until(lambda: "can't be written" in caplog.text)
    assert len(readable(full_disk.folder)) < 200
    full_disk.free()
    wait_until(lambda: len(readable(full_disk.folder)) == 200)
    sink.close(PATIENCE_S)
    assert readable(full_disk.folder) == [record(sequence) for sequence in range(200)]
    assert sink.dropped == 0


def test_a_folder_deleted_under_a_writer_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    sink = JsonlSink(folder, "orders", "w", flush_interval_s=0)
    sink.write(record(0))
    wait_until(lambda: folder.exists() and len(readable(folder)) == 1)
    shutil.rmtree(folder)
    sink.write(record(1))
    sink.write(record(2))
    wait_until(lambda: folder.exists() and len(readable(folder)) == 2)
    sink.close(PATIENCE_S)
    assert readable(folder) == [record(1), record(2)]


def test_a_folder_that_is_a_file_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "history"
    folder.write_text("in the way")
    sink = JsonlSink(folder, "orders", "w", flush_interval_s=0)
    sink.write(record(0))
    wait_until(lambda: "EEXIST" in caplog.text)
    folder.unlink()
    wait_until(lambda: folder.is_dir() and len(readable(folder)) == 1)
    sink.close(PATIENCE_S)
    failures = [line for line in caplog.records if line.__dict__.get("action") == "history_failing"]
    assert len(failures) == 1, "told once, however often it is tried"


def test_records_are_in_their_file_while_the_process_lives(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path, "orders", "w")
    sink.write(record(0))
    wait_until(lambda: readable(tmp_path) == [record(0)])
    sink.close(PATIENCE_S)


WRITER = textwrap.dedent("""
    import sys, time
    from rebalanser.history import Author, Event, JsonlSink, Protocol, Record

    sink = JsonlSink(sys.argv[1], "orders", "w", flush_interval_s=0)
    for sequence in range(10**9):
        event = Event("barrier_added", "w-1", resource="partition", detail={"error": "x" * 500})
        author = Author(Protocol.GROUP, "orders", "w", "w")
        sink.write(Record.of(author, event, sequence=sequence, wall=1.5e9, monotonic=1.0))
        if sequence % 100 == 0:
            time.sleep(0.001)
""")


def _written(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.jsonl"))


def test_kill_9_leaves_whole_lines_but_for_the_last_and_its_file_alone(tmp_path: Path) -> None:
    before: dict[Path, bytes] = {}
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
        try:
            size = _written(tmp_path)
            wait_until(lambda size=size: _written(tmp_path) > size + 500_000)  # type: ignore[misc]
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait(PATIENCE_S)
        assert {path: path.read_bytes() for path in before} == before
        (new,) = set(tmp_path.glob("*.jsonl")) - set(before)
        before[new] = new.read_bytes()
        *whole, last = read_records(new)
        if isinstance(last, Record):
            whole.append(last)
        else:
            assert isinstance(last, UnreadableLine)
            assert last.reason is UnreadableReason.TORN
        records = [item for item in whole if isinstance(item, Record)]
        assert len(records) == len(whole) > 500
        assert accounted(records) == list(range(len(accounted(records))))
