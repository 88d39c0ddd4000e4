"""Which ids of tasks show that a host's clock is far off, and which only that they come late (SK-18)."""

from __future__ import annotations

import itertools

import pytest

from rebalanser.core.tasks.clocks import (
    MAX_HOSTS,
    MAX_SKEW_S,
    MAX_SPREAD_S,
    MIN_SPAN_S,
    WARNING_INTERVAL_S,
    ClockSkewDetector,
    SkewedClock,
)

NOON = 1_800_000_000.0
_counter = itertools.count()


def flake(born: float, host: int = 1, process: int = 2) -> str:
    return f"{round(born * 1000):016x}{next(_counter):08x}{host:012x}{process:04x}"


class Stand:
    """What one process is told, and what it says of it."""

    def __init__(self) -> None:
        self.clocks = ClockSkewDetector()

    def told(self, at: float, late_s: float, host: int = 1) -> float | None:
        """Tell of a new task ``at`` seconds after noon; by how much its host is said to be ahead."""
        return self._ahead_s(self.clocks.check(flake(NOON + at - late_s, host), at, NOON + at, is_new=True))

    def read(self, at: float, late_s: float) -> float | None:
        return self._ahead_s(self.clocks.check(flake(NOON + at - late_s), at, NOON + at, is_new=False))

    def _ahead_s(self, found: SkewedClock | None) -> float | None:
        return None if found is None else round(found.ahead_s, 3)


@pytest.mark.rule("SK-18")
def test_an_id_from_the_future_is_of_a_clock_that_is_ahead() -> None:
    assert Stand().told(0, -3600) == 3600
    assert Stand().read(0, -3600) == 3600
    assert Stand().told(0, -MAX_SKEW_S + 1) is None
    task = flake(NOON + 3600, host=0xABC, process=7)
    found = ClockSkewDetector().check(task, 0, NOON, is_new=True)
    assert found == SkewedClock(task, f"{0xABC:012x}", "0007", 3600.0)


@pytest.mark.rule("SK-18")
def test_a_host_is_told_of_once_in_a_while() -> None:
    stand = Stand()
    found = [
        stand.told(at, -3600)
        for at in (0, 1, WARNING_INTERVAL_S - 1, WARNING_INTERVAL_S, WARNING_INTERVAL_S + 1)
    ]
    assert found == [3600, None, None, 3600, None]
    assert stand.told(2, -3600, host=9) == 3600, "another host"


@pytest.mark.rule("SK-18")
def test_ids_that_come_late_by_the_same_time_again_and_again_are_of_a_clock_that_is_behind() -> None:
    stand = Stand()
    found = [stand.told(at, 3600 + jitter) for at, jitter in ((0, 0), (10, 1), (20, MAX_SPREAD_S - 1))]
    assert found == [None] * 3
    assert stand.told(MIN_SPAN_S + MAX_SPREAD_S, 3600) == -3600


@pytest.mark.rule("SK-18")
@pytest.mark.parametrize(
    "late_s",
    [
        [3600.0] * 2,  # one burst, long ago
        [3600.0 - 59 * second for second in range(60)],  # a backlog that is worked off
        [3600.0 if second % 2 else 0.1 for second in range(120)],  # ids made beforehand among others
        [0.5 * second for second in range(120)],  # an engine that becomes slower and slower
        [MAX_SKEW_S - 1] * 120,
    ],
)
def test_ids_that_only_come_late_prove_nothing(late_s: list[float]) -> None:
    stand = Stand()
    assert [stand.told(second, each) for second, each in enumerate(late_s)] == [None] * len(late_s)


@pytest.mark.rule("SK-18")
def test_what_is_read_and_not_told_says_nothing_of_a_clock_that_is_behind() -> None:
    stand = Stand()
    assert [stand.read(at, 3600) for at in range(120)] == [None] * 120


def test_what_is_no_flake_says_nothing() -> None:
    assert ClockSkewDetector().check("no flake", 0, NOON, is_new=True) is None


def test_no_more_than_so_many_hosts_are_kept_in_mind() -> None:
    stand = Stand()
    for host in range(MAX_HOSTS + 1):
        assert stand.told(0, -3600, host) == 3600
        assert stand.told(1, 3600, host) is None
    assert len(stand.clocks._reported_at) == len(stand.clocks._late) == MAX_HOSTS
    assert stand.told(2, -3600, 0) == 3600, "the oldest was forgotten"
