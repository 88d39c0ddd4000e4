"""Periodic tasks: each tick once, whoever enqueues it, whatever the clock does."""

from __future__ import annotations

import calendar
import datetime
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from rebalanser.core.tasks.ids import is_task_id
from rebalanser.core.tasks.ticking import CATCH_UP_S
from rebalanser.errors import InvalidTask, QuotaExceeded, RegistryUnavailable, TaskExists
from rebalanser.tasks.loops import ErrorPolicy
from rebalanser.tasks.periodic import Schedule, Ticker

NOON = float(calendar.timegm((2026, 3, 29, 12, 0, 0)))


class Wall:
    """A clock that a test sets."""

    def __init__(self, at: float) -> None:
        self.at = at

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at


class Stand:
    """A ticker, and what it has enqueued."""

    def __init__(self, expression: str = "*/5 * * * *", at: float = NOON, *, is_new: bool = False) -> None:
        self.clock = Wall(at)
        self.mine = True
        self.is_new = is_new
        """Whether none of the ticks before is stored."""
        self.enqueued: list[tuple[str, str]] = []
        self.refusals: list[Exception] = []
        """Raised by the next who enqueue."""
        self.away: list[Exception] = []
        """Raised by the next who read."""
        self.errors = ErrorPolicy("mail", self.clock, lambda: None)
        self.schedule = Schedule("mail", "sweep", expression)
        self.ticker = self.another()

    def another(self) -> Ticker:
        return Ticker(
            [self.schedule],
            self.clock,
            lambda _task: self.mine,
            self._exist,
            self._enqueue,
            self.errors,
        )

    def _exist(self, tasks: Sequence[str]) -> Collection[str]:
        if self.away:
            raise self.away.pop(0)
        stored = {task for _, task in self.enqueued}
        return [task for task in tasks if task in stored or not self.is_new]

    def _enqueue(self, name: str, task: str, delay_s: float) -> None:
        assert 0 <= delay_s <= self.schedule.jitter_s
        if self.refusals:
            raise self.refusals.pop(0)
        self.enqueued.append((name, task))

    def look(self, at: float) -> int:
        """How many were enqueued by then."""
        self.clock.at = at
        self.ticker.tick()
        return len(self.enqueued)


@pytest.mark.rule("SK-15")
def test_each_tick_is_enqueued_once() -> None:
    stand = Stand()
    counts = [stand.look(NOON + second) for second in (0, 0.5, 1, 59, 299.9, 300, 301, 600)]
    assert counts == [1, 1, 1, 1, 1, 2, 2, 3]
    assert len(set(stand.enqueued)) == 3


@pytest.mark.rule("SK-3", "SK-15")
def test_two_processes_and_a_clock_that_steps_back_give_the_same_ids() -> None:
    stand = Stand()
    stand.look(NOON + 1)
    stand.ticker = stand.another()
    stand.look(NOON + 2)
    stand.look(NOON - 1)
    stand.look(NOON + 3)
    assert len({task for _, task in stand.enqueued if task == stand.schedule.task_id(int(NOON))}) == 1
    assert set(stand.enqueued) == {("sweep", stand.schedule.task_id(int(NOON)))}


def test_who_is_not_responsible_enqueues_nothing_until_it_becomes_so() -> None:
    stand = Stand()
    stand.mine = False
    assert stand.look(NOON + 1) == 0
    stand.mine = True
    assert stand.look(NOON + 2) == 1


def test_a_tick_that_was_missed_for_long_is_left_out() -> None:
    stand = Stand("0 12 * * *")
    assert stand.look(NOON + CATCH_UP_S + 1) == 0
    assert stand.look(NOON + 86_400 + CATCH_UP_S) == 1


@pytest.mark.rule("SK-15")
def test_who_becomes_responsible_enqueues_all_ticks_of_the_last_minute_in_their_order() -> None:
    stand = Stand("* * * * * */10")
    stand.mine = False
    assert stand.look(NOON + 95) == 0
    stand.mine = True
    assert stand.look(NOON + 96) == 6
    ticks = [int(NOON) + second for second in range(40, 100, 10)]
    assert [task for _, task in stand.enqueued] == [stand.schedule.task_id(tick) for tick in ticks]
    assert stand.look(NOON + 97) == 6
    assert stand.look(NOON + 100) == 7


@pytest.mark.rule("SK-1")
def test_ids_are_flakes_in_the_order_of_their_ticks() -> None:
    schedule = Schedule("mail", "sweep", "* * * * *")
    ids = [schedule.task_id(int(NOON) + 60 * minute) for minute in range(3)]
    assert ids == sorted(ids)
    assert all(is_task_id(each) for each in ids)
    assert schedule.task_id(0) != Schedule("mail", "other", "* * * * *").task_id(0)


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("", r"it has 0 fields; give 5: minute, hour, day of the month, month, day of the week$"),
        ("every", "it has 1 field; give 5"),
        ("61 * * * *", "the minute is '61'; give 0 to 59, a list 1,2, a range 1-5, a step "),
        ("*/0 * * * *", "the minute is '\\*/0'; give 0 to 59"),
        ("0 0 * mox *", "the month is 'mox'; give 1 to 12"),
        ("0 0 * * MOX", "the day of the week is 'MOX'; give 0 to 7 or sun to sat"),
        ("* * * * * 99", "the second is '99'; give 0 to 59"),
        ("0 0 31 2 *", "no date ever matches it$"),
    ],
)
def test_what_is_no_expression_is_refused_at_once(expression: str, told: str) -> None:
    with pytest.raises(InvalidTask, match=f"^sweep: .* is no cron expression: {told}"):
        Schedule("mail", "sweep", expression)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"time_zone": None}, "sweep: unknown time zone None: use one such as"),
        ({"time_zone": 5}, "sweep: unknown time zone 5: use one such as"),
        ({"jitter_s": None}, "sweep: jitter_s is None; it must be seconds from 0 to 315576000"),
        ({"jitter_s": "5"}, "sweep: jitter_s is '5'; it must be seconds from 0"),
    ],
)
def test_options_of_a_schedule_of_a_wrong_type_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidTask, match=told):
        Schedule("mail", "sweep", "* * * * *", **options)


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("expression", ["R R * * *", "0 R(0-5) * * *", "r 3 * * *"])
def test_a_random_expression_is_refused(expression: str) -> None:
    """Its ticks would be others in each worker, and after each look."""
    with pytest.raises(InvalidTask, match=r"sweep: .* has a random part"):
        Schedule("mail", "sweep", expression)
    Schedule("mail", "sweep", "0 0 * mar,apr fri,thu")


def utc(*instant: int) -> float:
    return float(calendar.timegm((*instant, 0, 0, 0)[:6]))


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize(
    ("expression", "begin", "ticks"),
    [
        # In Rome the clocks go from 2:00 to 3:00 on 29 March 2026, and from 3:00 to 2:00 on 25 October.
        ("30 2 * * *", (2026, 3, 28), [(2026, 3, 28, 1, 30), (2026, 3, 29, 1, 0), (2026, 3, 30, 0, 30)]),
        ("30 2 * * *", (2026, 10, 24), [(2026, 10, 24, 0, 30), (2026, 10, 25, 0, 30), (2026, 10, 26, 1, 30)]),
        ("0 3 * * *", (2026, 10, 24), [(2026, 10, 24, 1, 0), (2026, 10, 25, 2, 0), (2026, 10, 26, 2, 0)]),
        ("0 * * * *", (2026, 3, 29), [(2026, 3, 29, hour, 0) for hour in range(1, 24)]),
        ("0 * * * *", (2026, 10, 25), [(2026, 10, 25, hour, 0) for hour in range(1, 24)]),
        ("30 2 1 1 *", (2026, 1, 1), [(year, 1, 1, 1, 30) for year in range(2026, 2030)]),
    ],
)
def test_ticks_are_by_the_clocks_of_their_time_zone(
    expression: str, begin: tuple[int, int, int], ticks: list[tuple[int, ...]]
) -> None:
    schedule = Schedule("mail", "sweep", expression, "Europe/Rome")
    expected = [utc(*each) for each in ticks]
    forward, at = [], utc(*begin, 0, 0)
    for _ in expected:
        at = schedule.next_tick(at)
        forward.append(at)
    assert forward == expected
    backward, at = [], expected[-1]
    for _ in expected:
        backward.append(schedule.last_tick(at))
        at = backward[-1] - 1
    assert backward[::-1] == expected


@pytest.mark.rule("SK-15")
def instants(hours: Sequence[int], minutes: Sequence[int], zone: ZoneInfo, begin: float) -> list[int]:
    """When these local times come on three days: the first time, or when the clocks pass over them."""
    found: set[int] = set()
    day = datetime.datetime.fromtimestamp(begin, zone).date()
    for number in range(-1, 5):
        for hour in hours:
            for minute in minutes:
                local = datetime.datetime.combine(
                    day + datetime.timedelta(days=number), datetime.time(hour, minute)
                )
                at = int(local.replace(tzinfo=zone).timestamp())
                if datetime.datetime.fromtimestamp(at, zone).replace(tzinfo=None) != local:
                    seconds = range(at - 86_400 - at % 60, at + 86_400, 60)
                    at = next(
                        each
                        for each in seconds
                        if datetime.datetime.fromtimestamp(each, zone).replace(tzinfo=None) > local
                    )
                found.add(at)
    return sorted(each for each in found if begin < each < begin + 3 * 86_400)


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize(
    ("time_zone", "begin"),
    [
        ("Europe/Rome", (2026, 3, 28)),
        ("Europe/Rome", (2026, 10, 24)),
        ("Australia/Lord_Howe", (2026, 10, 3)),  # by half an hour
        ("Australia/Lord_Howe", (2026, 4, 4)),
        ("Antarctica/Troll", (2026, 3, 28)),  # by two hours
        ("America/Havana", (2026, 3, 7)),  # at midnight
        ("America/Havana", (2026, 10, 31)),
        ("Pacific/Apia", (2011, 12, 29)),  # by a day
        ("America/Caracas", (2007, 12, 8)),  # for good
    ],
)
@pytest.mark.parametrize(
    ("expression", "hours", "minutes"),
    [
        ("30 2 * * *", [2], [30]),
        ("0 0 * * *", [0], [0]),
        ("*/30 0-4 * * *", range(5), [0, 30]),
        ("15 0,12 * * *", [0, 12], [15]),
    ],
)
def test_ticks_are_at_their_local_times_wherever_clocks_are_changed(
    time_zone: str,
    begin: tuple[int, int, int],
    expression: str,
    hours: Sequence[int],
    minutes: Sequence[int],
) -> None:
    schedule, at = Schedule("mail", "sweep", expression, time_zone), utc(*begin)
    expected = instants(hours, minutes, ZoneInfo(time_zone), at)
    ticks, tick = [], at
    while (tick := schedule.next_tick(tick)) < at + 3 * 86_400:
        ticks.append(tick)
    assert ticks == expected
    for before, after in pairwise(expected):
        assert schedule.last_tick(after - 1) == before
        assert schedule.last_tick(after) == after


@pytest.mark.parametrize("time_zone", ["Europe/Nowhere", "", "../etc/passwd", "Europe"])
def test_an_unknown_time_zone_is_refused(time_zone: str) -> None:
    with pytest.raises(InvalidTask, match="unknown time zone"):
        Schedule("mail", "sweep", "0 * * * *", time_zone)


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("jitter_s", [-1.0, float("nan"), float("inf")])
def test_a_jitter_that_is_none_is_refused(jitter_s: float) -> None:
    with pytest.raises(InvalidTask, match="jitter_s"):
        Schedule("mail", "sweep", "0 * * * *", jitter_s=jitter_s)


@pytest.mark.rule("SK-15")
def test_the_task_of_a_tick_is_due_within_the_jitter_as_its_id_says() -> None:
    schedule = Schedule("mail", "sweep", "* * * * *", jitter_s=40.0)

    def delays(late_s: float) -> dict[str, float]:
        told: dict[str, float] = {}
        clock = Wall(NOON + late_s)
        errors = ErrorPolicy("mail", clock, lambda: None)
        ticker = Ticker([schedule], clock, lambda _: True, list, lambda _, *each: told.update([each]), errors)
        for _ in range(100):
            ticker.tick()
            clock.at += 60.0
        return told

    prompt, late = delays(0.0), delays(30.0)
    both = prompt.keys() & late.keys()
    assert len(both) >= 99
    assert all(0 <= delay_s < 40.0 for delay_s in prompt.values())
    assert max(prompt.values()) - min(prompt.values()) > 20.0
    assert {task: late[task] for task in both} == {task: max(0.0, prompt[task] - 30.0) for task in both}


@pytest.mark.rule("SK-15")
def test_a_tick_that_was_enqueued_with_other_options_is_done() -> None:
    """As by the release before, where the function had fewer retries."""
    stand = Stand("* * * * * */10")
    stand.refusals = [TaskExists("with other content")]
    assert stand.look(NOON) == 6
    assert stand.look(NOON + 1) == 6
    assert stand.look(NOON + 10) == 7


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("error", [InvalidTask("no argument"), KeyError("sweep"), ZeroDivisionError()])
def test_a_tick_that_can_not_be_enqueued_keeps_no_other_from_coming(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    stand = Stand("* * * * * */10")
    stand.refusals = [error]
    assert stand.look(NOON) == 6
    assert stand.look(NOON + 10) == 7
    (told,) = caplog.records
    assert "a tick of sweep" in told.getMessage()


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("error", [RegistryUnavailable("away"), QuotaExceeded("full")])
def test_a_tick_waits_for_an_engine_that_takes_nothing(error: Exception) -> None:
    stand = Stand("* * * * * */10")
    stand.refusals = [error] * 2
    for _ in range(2):
        with pytest.raises(type(error)):
            stand.look(NOON)
    assert stand.look(NOON + 1) == 6


@pytest.mark.rule("SK-15")
def test_the_first_tick_of_a_new_schedule_is_the_next_one() -> None:
    """And not those of the minute before, all at once."""
    stand = Stand("* * * * * *", NOON + 0.5, is_new=True)
    assert [stand.look(NOON + second) for second in (0.6, 1, 2, 5)] == [0, 1, 2, 5]
    later = Stand(at=NOON + 20, is_new=True)
    assert [later.look(NOON + second) for second in (21, 299, 300)] == [0, 0, 1]


@pytest.mark.rule("SK-15")
def test_a_worker_that_comes_to_a_schedule_makes_up_for_what_is_missing_of_it() -> None:
    stand = Stand("* * * * * *", NOON, is_new=True)
    stand.look(NOON + 2)
    del stand.enqueued[-1]
    stand.clock.at = NOON + 5
    stand.ticker = stand.another()
    stand.look(NOON + 5)
    ticks = [stand.schedule.task_id(int(NOON) + second) for second in (1, 2, 3, 4, 5)]
    assert [task for _, task in stand.enqueued] == ticks


@pytest.mark.rule("SK-15")
def test_a_tick_during_a_restart_comes_also_where_those_before_are_collected() -> None:
    """As of a task a day: whether it is new can't be told then."""
    daily, hourly = Stand("0 12 * * *", NOON + 30, is_new=True), Stand("0 * * * *", NOON + 30, is_new=True)
    assert daily.look(NOON + 31) == 1
    assert hourly.look(NOON + 31) == 0


@pytest.mark.rule("SK-15")
def test_a_clock_that_was_set_back_holds_no_schedule_up() -> None:
    stand = Stand("* * * * * *", NOON, is_new=True)
    stand.look(NOON + 0.5)
    assert [stand.look(NOON - 3600 + second) for second in (0, 1, 2)] == [1, 2, 3]


@pytest.mark.rule("SK-15")
def test_whether_a_schedule_is_new_is_asked_until_the_store_answers() -> None:
    stand = Stand("* * * * * */10", NOON - 1, is_new=True)
    stand.away = [RegistryUnavailable("away")] * 2
    for second in (0, 10):
        with pytest.raises(RegistryUnavailable):
            stand.look(NOON + second)
    assert stand.look(NOON + 11) == 2, "what was due since the start"
