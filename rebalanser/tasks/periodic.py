"""Tasks that come again and again, by a cron expression (SK-15): each tick is enqueued once, whoever does it.

The id of a tick's task follows from the queue, the function and the tick alone, and enqueueing an id twice
makes one task (SK-3). So the owner of the partition in which it lies enqueues it, and where that owner
changes, the next one enqueues the ticks of the last minute once more, in case they are not there.

A schedule is new if none of its ticks of late is in the store. It has nothing to make up for: its first tick
is the next one that is due.
"""

from __future__ import annotations

import datetime
import hashlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from croniter import CroniterBadCronError, CroniterBadDateError, croniter

from rebalanser.errors import InvalidTask, TaskExists
from rebalanser.runtime.clock import Clock
from rebalanser.tasks.loops import ErrorKind, ErrorPolicy, Loop, kind_of
from rebalanser.tasks.model import TaskId

LOOK_S: Final = 1.0
"""The longest time between two looks at the clock, which may jump."""
CATCH_UP_S: Final = 60.0
"""How late a tick may still be enqueued; one that is missed by more is left out."""
KEPT_S: Final = 86_400.0
"""Age up to which the task of a tick counts as not collected yet: that of a collection unless it is told."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """When the tasks of one function come: at the ticks of a cron expression, in UTC.

    Raises:
        InvalidTask: the expression is none, or never comes true.
    """

    queue: str
    name: str
    expression: str

    def __post_init__(self) -> None:
        """See that there is a tick."""
        self.last_tick(0.0)

    def last_tick(self, wall: float) -> int:
        """The last tick at ``wall`` or before, in seconds since 1970."""
        return next(self._ticks_before(wall))

    def next_tick(self, wall: float) -> float:
        """The first tick after ``wall``, in seconds since 1970."""
        after = datetime.datetime.fromtimestamp(wall, datetime.UTC)
        return float(croniter(self.expression, after).get_next(float))

    def ticks(self, wall: float) -> list[int]:
        """The ticks that are due at ``wall`` and not left out by then, the earliest first."""
        return self.recent(wall)[1:]

    def recent(self, wall: float) -> list[int]:
        """The ticks that are due at ``wall``, and the one before them, the earliest first."""
        ticks: list[int] = []
        for tick in self._ticks_before(wall):
            ticks.insert(0, tick)
            if wall - tick > CATCH_UP_S:
                break
        return ticks

    def _ticks_before(self, wall: float) -> Iterator[int]:
        """Back from ``wall`` on."""
        # A tick at this very second counts, and croniter gives the one before.
        after = datetime.datetime.fromtimestamp(int(wall) + 1, datetime.UTC)
        try:
            ticks = croniter(self.expression, after)
            while True:
                yield int(ticks.get_prev(float))
        except (CroniterBadCronError, CroniterBadDateError) as error:
            raise InvalidTask(f"{self.name}: {self.expression!r} is no cron expression: {error}") from error

    def task_id(self, tick: int) -> TaskId:
        """The id of the task of a tick: its milliseconds, then a hash of the queue and the name (SK-1)."""
        named = hashlib.blake2b(f"{self.queue}\0{self.name}".encode(), digest_size=12).hexdigest()
        return f"{tick * 1000:016x}{named}"


class Ticker:
    """Enqueues the ticks of the schedules that this process is responsible for.

    ``is_mine(task_id)`` says whether it is, ``exists(task_ids)`` which of those are stored,
    ``enqueue(name, task_id)`` enqueues one, ``errors`` says what follows from errors. A tick that can't be
    enqueued, ever, is left out and keeps no other from coming.
    """

    def __init__(
        self,
        schedules: Sequence[Schedule],
        clock: Clock,
        is_mine: Callable[[TaskId], bool],
        exists: Callable[[Sequence[TaskId]], Collection[TaskId]],
        enqueue: Callable[[str, TaskId], object],
        errors: ErrorPolicy,
    ) -> None:
        self._schedules = tuple(schedules)
        self._clock = clock
        self._is_mine = is_mine
        self._exists = exists
        self._enqueue = enqueue
        self._errors = errors
        self._began = clock.wall()
        self._since: dict[Schedule, float] = {}
        """When the ticks of each schedule begin to count, as far as it is known."""
        self._done: set[TaskId] = set()
        self._ending = threading.Event()
        self._loop = Loop("ticks", self._look, errors)

    def start(self) -> None:
        """Begin; a thread looks at the clock once a second."""
        self._loop.start()

    def stop(self) -> None:
        """End it."""
        self._ending.set()
        self._loop.hurry()
        self._loop.join()

    def pause_s(self, longest_s: float) -> float:
        """Seconds until the next tick of a schedule, at most ``longest_s``."""
        wall = self._clock.wall()
        return min((each.next_tick(wall) - wall for each in self._schedules), default=longest_s)

    def tick(self) -> None:
        """Enqueue what has become due.

        Raises:
            RebalanserError: the engine is away or takes nothing; the next look tries again.
        """
        wall = self._clock.wall()
        due: dict[TaskId, str] = {}
        for each in self._schedules:
            since = self._counts_since(each, wall)
            due.update((each.task_id(tick), each.name) for tick in each.ticks(wall) if tick > since)
        self._done &= due.keys()
        for task_id, name in due.items():
            if task_id not in self._done and self._is_mine(task_id):
                self._enqueue_once(name, task_id)
                self._done.add(task_id)

    def _counts_since(self, schedule: Schedule, wall: float) -> float:
        """When the ticks of a schedule begin to count; also a clock that was set back has ticks."""
        if schedule not in self._since:
            self._since[schedule] = self._learn_since(schedule)
        if wall < self._since[schedule]:
            self._since[schedule] = wall - LOOK_S
        return self._since[schedule]

    def _learn_since(self, schedule: Schedule) -> float:
        """The first tick of late that is in the store; the start of this ticker if the schedule is new."""
        ticks = {schedule.task_id(tick): tick for tick in schedule.recent(self._began)}
        first = min(ticks.values())
        if len(ticks) == 1:
            return self._began
        if found := [ticks[task] for task in self._exists(list(ticks))]:
            return min(found)
        # What is collected can't be told from what never was: it is better to run once too often.
        return float(first) if self._began - first >= KEPT_S else self._began

    def _enqueue_once(self, name: str, task_id: TaskId) -> None:
        try:
            self._enqueue(name, task_id)
        except TaskExists:
            # By an owner before this one, where the function had other options or other defaults.
            return
        except Exception as error:
            if kind_of(error) is ErrorKind.OUTAGE:
                raise
            self._errors.ignored(f"a tick of {name}", error)

    def _look(self) -> bool:
        if self._ending.wait(self._pause_s()):
            return False
        self.tick()
        return True

    def _pause_s(self) -> float:
        """Until the next full second, at which ticks are."""
        return LOOK_S - self._clock.wall() % LOOK_S
