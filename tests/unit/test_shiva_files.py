"""The threads that work on a worker's files: a slow disk or a long unpacking holds up nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest
from rebalanser_kafka.shiva.parts import LEAST_WORK_BYTES, FileThreads

from rebalanser.testing.waiting import PATIENCE_S


class Bench:
    """File threads with a log of what was done, and work that hangs until it may go on."""

    def __init__(self) -> None:
        self.threads = FileThreads("files", threads=2, max_waiting_bytes=10_000)
        self.done: list[str] = []
        self.may_go_on = threading.Event()

    def do(self, folder: str, what: str, size_bytes: int = 0) -> None:
        self.threads.submit(folder, partial(self.done.append, what), size_bytes)

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


def test_reading_goes_on_until_too_much_waits_to_be_written(bench: Bench) -> None:
    bench.hang("slow")
    told: list[str] = []
    bench.do("slow", "a part", 8_000)
    bench.threads.when_room(partial(told.append, "first"))
    assert told == ["first"]
    bench.do("slow", "a part", 2_000)
    bench.threads.when_room(partial(told.append, "second"))
    assert told == ["first"]
    bench.may_go_on.set()
    bench.until_done("slow")
    assert told == ["first", "second"]


def test_the_amount_of_work_is_bounded_too(bench: Bench) -> None:
    bench.hang("slow")
    told: list[str] = []
    for _ in range(10_000 // LEAST_WORK_BYTES):
        bench.do("slow", "small")
    bench.threads.when_room(partial(told.append, "room"))
    assert told == []


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
