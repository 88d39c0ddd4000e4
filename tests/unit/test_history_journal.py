"""The journal: numbers, times, and the promise that writing harms nobody."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rebalanser.history import Author, Event, Journal, MemorySink, Protocol, Record, author_here
from rebalanser.history import journal as module
from rebalanser.observer import _HistoryWriter
from rebalanser.settings import Settings
from rebalanser.testing.waiting import PATIENCE_S

AUTHOR = Author(Protocol.NELI, "roles", "p-1", "worker", "alpha", "boot")


class Times:
    """Clocks of which every look takes a second."""

    def __init__(self) -> None:
        self.wall_s = 1_700_000_000.0
        self.monotonic_s = 0.0

    def wall(self) -> float:
        self.wall_s += 1
        return self.wall_s

    def monotonic(self) -> float:
        self.monotonic_s += 1
        return self.monotonic_s


def journal(sink: MemorySink, author: Author = AUTHOR) -> Journal:
    times = Times()
    return Journal(author, sink, wall=times.wall, monotonic=times.monotonic)


@pytest.mark.rule("AU-2")
def test_records_are_numbered_from_0_and_have_the_times_of_both_clocks() -> None:
    sink = MemorySink()
    writes = journal(sink)
    writes.write(Event("waits", "w-1", resource="3"))
    writes.write(Event("induced", "w-1", incarnation=4, token=9))
    first, second = sink.records
    assert (first.sequence, first.wall_time, first.monotonic_time) == (0, 1_700_000_001.0, 1.0)
    assert (second.sequence, second.wall_time, second.monotonic_time) == (1, 1_700_000_002.0, 2.0)
    assert (first.protocol, first.process, first.label, first.host) == ("neli", "p-1", "worker", "alpha")
    assert (second.kind, second.node, second.incarnation, second.token) == ("induced", "w-1", 4, 9)


@pytest.mark.rule("AU-2")
def test_what_cannot_be_written_raises_nothing_and_leaves_its_number_missing() -> None:
    sink = MemorySink()
    writes = journal(sink)
    writes.write(Event("no such word", "w-1"))
    writes.write(Event("left", "w-1"))
    assert [(record.sequence, record.kind) for record in sink.records] == [(1, "left")]


def test_a_sink_that_raises_harms_nobody() -> None:
    class Broken(MemorySink):
        def write(self, record: Record) -> None:
            raise OSError(record.kind)

    journal(Broken()).write(Event("left", "w-1"))


@pytest.mark.rule("RB-42")
def test_a_moment_is_taken_while_many_events_are_written() -> None:
    taken: list[int] = []

    class Slow(MemorySink):
        def write(self, record: Record) -> None:
            other = threading.Thread(target=lambda: taken.extend(writes.moment(1).sequences), daemon=True)
            other.start()
            other.join(PATIENCE_S)
            super().write(record)

    writes = journal(Slow())
    writes.write_at(writes.moment(1), [Event("left", "w-1")])
    assert taken == [1]


def test_threads_share_one_sequence() -> None:
    sink = MemorySink()
    writes = journal(sink)

    def work() -> None:
        for _ in range(200):
            writes.write(Event("waits", "w-1"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [record.sequence for record in sink.records] == list(range(800))


def test_closing_closes_the_sink() -> None:
    sink = MemorySink()
    journal(sink).close(1)
    assert sink.closed


class Kernel:
    """What the kernel tells of itself."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.boot_id, self.offsets = folder / "boot_id", folder / "timens_offsets"
        monkeypatch.setattr("rebalanser.boot_id.LINUX", self.boot_id)
        monkeypatch.setattr(module, "_CLOCK_OFFSETS", self.offsets)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(tmp_path, monkeypatch)


def boot() -> str | None:
    return module.boot.__wrapped__()


@pytest.mark.rule("AU-5")
def test_a_boot_is_named_by_the_kernel(kernel: Kernel) -> None:
    assert boot() is None
    kernel.boot_id.write_text("\n")
    assert boot() is None
    kernel.boot_id.write_text("1b4e28ba\n")
    assert boot() == "1b4e28ba"


@pytest.mark.rule("AU-5")
@pytest.mark.parametrize(
    ("offsets", "name"),
    [
        ("monotonic 0 0\nboottime 0 0\n", "1b4e28ba"),
        ("monotonic 5 0\nboottime 0 0\n", "1b4e28ba"),
        ("monotonic 0 0\nboottime -7 250\n", "1b4e28ba+-7.250"),
    ],
)
def test_a_clock_that_is_set_off_is_another_clock(kernel: Kernel, offsets: str, name: str) -> None:
    kernel.boot_id.write_text("1b4e28ba\n")
    kernel.offsets.write_text(offsets)
    assert boot() == name


def test_an_author_here_says_which_host_and_boot_this_is() -> None:
    author = author_here(Protocol.SHIVA, "cluster", "p", "worker")
    assert author == Author(Protocol.SHIVA, "cluster", "p", "worker", author.host, module.boot())
    assert author.host


@pytest.mark.rule("AU-2")
@pytest.mark.parametrize("taken", [3, 0])
def test_a_history_is_written_to_its_end_for_as_long_as_it_goes_on(taken: int) -> None:
    """A thread that writes one record between two looks is waited for; one that writes nothing is not."""
    writer = _HistoryWriter("g", journal(MemorySink()), Settings())

    class Slow:
        joined = 0

        def is_alive(self) -> bool:
            return taken == 0 or self.joined < taken

        def join(self, _timeout_s: float) -> None:
            self.joined += 1
            writer._written += bool(taken)

    real, slow = writer._thread, Slow()
    writer._thread = slow  # type: ignore[assignment]
    writer.close()
    assert slow.joined == (taken or 1)
    real.join(PATIENCE_S)
