"""A broker that is away for an hour takes some lines of the log, and not thousands."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest

from rebalanser_kafka.shiva.throttled_warning import LONGEST_GAP_S, ThrottledWarning


@dataclass
class Bench:
    """An outage, and a clock that moves by hand."""

    caplog: pytest.LogCaptureFixture
    now: float = 1000.0
    outage: ThrottledWarning = field(init=False)

    def __post_init__(self) -> None:
        self.outage = ThrottledWarning("topic_unreadable", {"topic": "t"}, lambda: self.now)

    @property
    def actions(self) -> list[str]:
        return [record.__dict__["action"] for record in self.caplog.records]

    def fail_for(self, seconds: float, every_s: float = 0.25) -> list[float]:
        """When it was told, from when it began."""
        began, told = self.now, []
        while self.now < began + seconds:
            before = len(self.actions)
            self.outage.failed("1/1 brokers are down")
            if len(self.actions) > before:
                told.append(self.now - began)
            self.now += every_s
        return told


@pytest.fixture
def bench(caplog: pytest.LogCaptureFixture) -> Bench:
    caplog.set_level(logging.WARNING, "rebalanser.shiva")
    return Bench(caplog)


def test_it_is_told_when_it_begins_and_at_gaps_that_double_up_to_a_minute(bench: Bench) -> None:
    assert bench.fail_for(200) == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    line = bench.caplog.records[0]
    assert line.getMessage() == "1/1 brokers are down action=topic_unreadable topic=t"
    assert line.levelno == logging.WARNING


def test_its_end_is_told_once_and_only_if_its_beginning_was(bench: Bench) -> None:
    bench.outage.works("reading again")
    assert bench.actions == []
    bench.outage.failed("away")
    bench.outage.works("reading again")
    bench.outage.works("reading again")
    bench.outage.failed("away once more, at once")
    bench.outage.works("reading again")
    assert bench.actions == ["topic_unreadable", "topic_unreadable_over"]


def test_one_that_comes_and_goes_is_told_at_the_same_gaps(bench: Bench) -> None:
    for _ in range(400):
        bench.outage.failed("away")
        bench.outage.works("reading again")
        bench.now += 0.5
    assert bench.actions == ["topic_unreadable", "topic_unreadable_over"] * 9


def test_after_a_minute_without_any_the_gaps_are_short_again(bench: Bench) -> None:
    bench.fail_for(100)
    bench.outage.works("reading again")
    bench.now += 2 * LONGEST_GAP_S
    assert bench.fail_for(4) == [0, 1, 3]


def test_sources_that_fail_together_are_told_of_once(bench: Bench) -> None:
    leader, worker = object(), object()
    bench.outage.failed("away (after 0 ms)", leader)
    bench.now += 1.5
    bench.outage.failed("away (after 1 ms)", worker)
    bench.outage.works("reading again", leader)
    bench.outage.failed("away in another way", worker)
    bench.outage.works("reading again", worker)
    assert bench.actions == ["topic_unreadable", "topic_unreadable", "topic_unreadable_over"]
    assert "away in another way" in bench.caplog.records[1].getMessage()


def test_a_source_that_is_no_more_holds_up_no_end(bench: Bench) -> None:
    leader, worker = object(), object()
    bench.outage.failed("away", leader)
    bench.outage.failed("away", worker)
    bench.outage.leave(leader)
    bench.outage.works("reading again", worker)
    assert bench.actions == ["topic_unreadable", "topic_unreadable_over"]


def test_equal_lines_are_shared_within_a_process() -> None:
    first = ThrottledWarning.shared("host:1", "topic_unreadable", {"cluster": "c", "topic": "t"})
    assert ThrottledWarning.shared("host:1", "topic_unreadable", {"topic": "t", "cluster": "c"}) is first
    assert ThrottledWarning.shared("host:2", "topic_unreadable", {"cluster": "c", "topic": "t"}) is not first
    assert ThrottledWarning.shared("host:1", "topic_unreadable", {"cluster": "c", "topic": "u"}) is not first
