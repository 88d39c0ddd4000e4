"""Periodic tasks by a cron expression (SK-15): each tick is enqueued once, by any worker.

The id of a tick's task follows from the queue, the function and the tick, and enqueueing an id twice makes
one task (SK-3). The owner of the id's partition enqueues it. After a change of owners, the new one enqueues
the ticks of the last minute again, in case they are missing.

A schedule is new if none of its recent ticks is in the store. Its first tick is the next one that is due.

The ticks of a schedule that lie within its last pause are missed (SK-23).
"""

from __future__ import annotations

import datetime
import hashlib
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from croniter import CroniterBadCronError, CroniterBadDateError, croniter

from rebalanser.core.clock import Clock
from rebalanser.core.tasks.model import MAX_SECONDS, TaskId, is_seconds
from rebalanser.core.tasks.ticking import (
    CATCH_UP_S,
    KEPT_S,
    LOOK_S,
    EnqueueTick,
    FindTicks,
    LeaveOut,
    ReadPauses,
    Ticking,
    TickRequest,
)
from rebalanser.core.tasks.writes import run_script
from rebalanser.errors import InvalidTask
from rebalanser.tasks.loops import ErrorPolicy, Loop

if TYPE_CHECKING:
    from rebalanser.tasks.pauses import Pause

_FIELDS: Final = (
    ("minute", "0 to 59"),
    ("hour", "0 to 23"),
    ("day of the month", "1 to 31"),
    ("month", "1 to 12"),
    ("day of the week", "0 to 7 or sun to sat"),
    ("second", "0 to 59"),
    ("year", "1970 to 2099"),
)
"""The fields of a cron expression and their values; the last two may be missing."""
_RANDOM: Final = re.compile(r"(?<![a-z])r(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Schedule of one function: the ticks of a cron expression, by the clocks of ``time_zone``.

    Where these clocks are put forward, a tick at a time that is left out comes as they are. Where they are
    put back, a tick at a time that comes twice comes the first time. An expression for every hour follows the
    hours as they pass. The task of a tick is due up to ``jitter_s`` seconds after it, as follows from its id.

    Raises:
        InvalidTask: the expression, the time zone or the jitter is invalid, or the expression has no tick.
    """

    queue: str
    name: str
    expression: str
    time_zone: str = "UTC"
    jitter_s: float = 0.0

    def __post_init__(self) -> None:
        """Check that the schedule has a tick."""
        if not is_seconds(self.jitter_s) or self.jitter_s > MAX_SECONDS:
            raise InvalidTask(
                f"{self.name}: jitter_s is {self.jitter_s!r}; it must be seconds from 0 to {MAX_SECONDS:.0f}"
            )
        try:
            ZoneInfo(self.time_zone)
        except (OSError, TypeError, ValueError, ZoneInfoNotFoundError) as error:
            raise InvalidTask(
                f"{self.name}: unknown time zone {self.time_zone!r}: use one such as Europe/Rome; "
                "a host without time zones needs the package tzdata"
            ) from error
        if _RANDOM.search(self.expression):
            raise InvalidTask(
                f"{self.name}: {self.expression!r} has a random part, which each worker would choose anew"
            )
        self.last_tick(0.0)

    def last_tick(self, wall: float) -> int:
        """Return the last tick at ``wall`` or before, in seconds since 1970."""
        return next(self._ticks_before(wall))

    def next_tick(self, wall: float) -> int:
        """Return the first tick after ``wall``, in seconds since 1970."""
        ticks, is_hourly = self._cron(int(wall))
        return next(tick for tick in _each(ticks.get_next) if self._counts(tick, is_hourly=is_hourly))

    def ticks(self, wall: float) -> list[int]:
        """Return the ticks that are due at ``wall`` and may still be enqueued, the earliest first."""
        return self.recent(wall)[1:]

    def recent(self, wall: float) -> list[int]:
        """Return the ticks that are due at ``wall`` and the one before them, the earliest first."""
        ticks: list[int] = []
        for tick in self._ticks_before(wall):
            ticks.insert(0, tick)
            if wall - tick > CATCH_UP_S:
                break
        return ticks

    def delay_s(self, task: TaskId) -> float:
        """Return the seconds from its tick until a task is due, less than ``jitter_s``."""
        digest = hashlib.blake2b(task.encode(), digest_size=6).digest()
        return self.jitter_s * int.from_bytes(digest) / (1 << 48)

    def _ticks_before(self, wall: float) -> Iterator[int]:
        """Iterate over the ticks at ``wall`` or before, the latest first."""
        # A tick at this very second counts, and croniter gives the one before.
        ticks, is_hourly = self._cron(int(wall) + 1)
        try:
            yield from (tick for tick in _each(ticks.get_prev) if self._counts(tick, is_hourly=is_hourly))
        except CroniterBadDateError as error:
            raise self._invalid(error) from error

    def _cron(self, wall: int) -> tuple[croniter, bool]:
        """Return the expression from ``wall`` on, and True if it is for every hour."""
        try:
            ticks = croniter(self.expression, datetime.datetime.fromtimestamp(wall, ZoneInfo(self.time_zone)))
        except CroniterBadCronError as error:
            raise self._invalid(error) from error
        return ticks, ticks.expanded[1] == ["*"]

    def _invalid(self, error: Exception) -> InvalidTask:
        problem = _problem_of(self.expression, has_ticks=not isinstance(error, CroniterBadDateError))
        return InvalidTask(f"{self.name}: {self.expression!r} is no cron expression: {problem}")

    def _counts(self, tick: int, *, is_hourly: bool) -> bool:
        """False if the local clocks show this time for the second time, after they were put back."""
        return is_hourly or not datetime.datetime.fromtimestamp(tick, ZoneInfo(self.time_zone)).fold

    def task_id(self, tick: int) -> TaskId:
        """Return the id of a tick's task: its milliseconds and a hash of the queue and the name (SK-1)."""
        named = hashlib.blake2b(f"{self.queue}\0{self.name}".encode(), digest_size=12).hexdigest()
        return f"{tick * 1000:016x}{named}"


def _problem_of(expression: str, *, has_ticks: bool) -> str:
    """Describe the error of a cron expression, and the correct form."""
    fields = expression.split()
    if not has_ticks:
        return "no date ever matches it"
    if len(fields) not in {5, 6, 7}:
        names = ", ".join(name for name, _ in _FIELDS[:5])
        return f"it has {len(fields)} field{'' if len(fields) == 1 else 's'}; give 5: {names}"
    for number, (field, (name, values)) in enumerate(zip(fields, _FIELDS, strict=False)):
        others = ["*"] * len(fields)
        if not croniter.is_valid(" ".join([*others[:number], field, *others[number + 1 :]])):
            return f"the {name} is {field!r}; give {values}, a list 1,2, a range 1-5, a step */2, or *"
    return "its fields don't fit together"


def _each(tick: Callable[[type[float]], float]) -> Iterator[int]:
    """Iterate over the ticks that croniter gives."""
    while True:
        yield int(tick(float))


class Ticker:
    """Enqueues the ticks of the schedules that this process is responsible for.

    ``is_mine(task_id)`` is True if this process enqueues the task, ``exists(task_ids)`` returns the stored
    ones, ``enqueue(name, task_id, delay_s)`` enqueues one that is due after that delay. ``errors`` is the
    policy for errors, ``kept_s`` the minimum seconds for which the task of a tick is kept. ``pauses()``
    returns the last pause of each schedule by function. A tick that can't be enqueued is left out and delays
    no other.
    """

    def __init__(
        self,
        schedules: Sequence[Schedule],
        clock: Clock,
        is_mine: Callable[[TaskId], bool],
        exists: Callable[[Sequence[TaskId]], Collection[TaskId]],
        enqueue: Callable[[str, TaskId, float], object],
        errors: ErrorPolicy,
        kept_s: float = KEPT_S,
        pauses: Callable[[], Mapping[str, Pause]] = dict,
    ) -> None:
        self._ticking = Ticking(schedules, clock.wall, is_mine, kept_s)
        self._clock = clock
        self._exists = exists
        self._enqueue = enqueue
        self._pauses = pauses
        self._errors = errors
        self._ending = threading.Event()
        self._loop = Loop("ticks", self._look, errors)

    def start(self) -> None:
        """Start the thread, which looks at the clock once a second."""
        self._loop.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._ending.set()
        self._loop.end_soon()
        self._loop.join()

    def pause_s(self, longest_s: float) -> float:
        """Return the seconds until the next tick of a schedule, at most ``longest_s``."""
        return self._ticking.pause_s(longest_s)

    def tick(self) -> None:
        """Enqueue the ticks that have become due.

        Raises:
            RebalanserError: the engine is away or takes nothing; the next look tries again.
        """
        run_script(self._ticking.tick(), self._perform)

    def _perform(self, request: TickRequest) -> object:
        match request:
            case FindTicks(ids=ids):
                return self._exists(ids)
            case ReadPauses():
                return self._pauses()
            case EnqueueTick(name=name, task=task, delay_s=delay_s):
                return self._enqueue(name, task, delay_s)
            case LeaveOut(name=name, error=error):
                self._errors.ignored(f"a tick of {name}", error)
                return None

    def _look(self) -> bool:
        if self._ending.wait(self._pause_s()):
            return False
        self.tick()
        return True

    def _pause_s(self) -> float:
        """Return the seconds until the next full second, at which ticks are."""
        return LOOK_S - self._clock.wall() % LOOK_S
