"""Ticks of schedules: the ones to enqueue, and their times (SK-15, SK-23)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from rebalanser.core.tasks.failures import ErrorKind, kind_of
from rebalanser.core.tasks.model import TaskId
from rebalanser.core.tasks.writes import ResultT
from rebalanser.errors import TaskExists

LOOK_S: Final = 1.0
"""Maximum seconds between two looks at the clock, which may jump."""
CATCH_UP_S: Final = 60.0
"""Maximum seconds after a tick in which it may still be enqueued."""
KEPT_S: Final = 86_400.0
"""Age up to which the task of a tick counts as not collected yet, unless retention is shorter: that of a
collection by default."""


@dataclass(frozen=True, slots=True)
class FindTicks:
    """Find which of these tasks are stored; the answer has their ids."""

    ids: Sequence[TaskId]


@dataclass(frozen=True, slots=True)
class ReadPauses:
    """Read the last pause of each schedule; the answer has them by function."""


@dataclass(frozen=True, slots=True)
class EnqueueTick:
    """Enqueue the task of a tick of the function ``name``, due after ``delay_s`` seconds."""

    name: str
    task: TaskId
    delay_s: float


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """Report that a tick of the function ``name`` is left out, as it can't be enqueued."""

    name: str
    error: Exception


TickRequest: TypeAlias = FindTicks | ReadPauses | EnqueueTick | LeaveOut
TickScript: TypeAlias = Generator[TickRequest, Any, ResultT]


class Ticks(Protocol):
    """The schedule of one function. Times are seconds since 1970."""

    @property
    def name(self) -> str:
        """The function."""

    def next_tick(self, wall: float) -> int:
        """Return the first tick after ``wall``."""

    def ticks(self, wall: float) -> list[int]:
        """Return the ticks that are due at ``wall`` and may still be enqueued, the earliest first."""

    def recent(self, wall: float) -> list[int]:
        """Return the ticks that are due at ``wall`` and the one before them, the earliest first."""

    def delay_s(self, task: TaskId) -> float:
        """Return the seconds from its tick until a task is due."""

    def task_id(self, tick: int) -> TaskId:
        """Return the id of a tick's task."""


class TickPause(Protocol):
    """The last pause of a schedule."""

    def covers(self, tick: float) -> bool:
        """True if a tick at this time is missed."""


class Ticking:
    """Decides about ticks of schedules: the ones to enqueue, and their times. Pure.

    ``wall`` returns seconds since 1970. ``is_mine(task_id)`` is True if this process is responsible for the
    task. The task of a tick is kept for ``kept_s`` seconds at least.
    """

    def __init__(
        self,
        schedules: Sequence[Ticks],
        wall: Callable[[], float],
        is_mine: Callable[[TaskId], bool],
        kept_s: float = KEPT_S,
    ) -> None:
        self._schedules = tuple(schedules)
        self._wall = wall
        self._is_mine = is_mine
        self._kept_s = kept_s
        self._began = wall()
        self._since: dict[Ticks, float] = {}
        """Time from which the ticks of each schedule count, as far as it is known."""
        self._done: set[TaskId] = set()

    def pause_s(self, longest_s: float) -> float:
        """Return the seconds until the next tick of a schedule, at most ``longest_s``."""
        wall = self._wall()
        return min((each.next_tick(wall) - wall for each in self._schedules), default=longest_s)

    def tick(self) -> TickScript[None]:
        """Enqueue the ticks that are due; raises what a request does, and the next look retries."""
        wall = self._wall()
        due: dict[TaskId, tuple[str, int, float]] = {}
        for each in self._schedules:
            since = yield from self._counts_since(each, wall)
            for tick in each.ticks(wall):
                if tick > since:
                    task_id = each.task_id(tick)
                    due[task_id] = each.name, tick, max(0.0, tick + each.delay_s(task_id) - wall)
        self._done &= due.keys()
        mine = [task_id for task_id in due if task_id not in self._done and self._is_mine(task_id)]
        pauses: Mapping[str, TickPause] = (yield ReadPauses()) if mine else {}
        for task_id in mine:
            name, tick, delay_s = due[task_id]
            if name not in pauses or not pauses[name].covers(tick):
                yield from self._enqueue_once(name, task_id, delay_s)
            self._done.add(task_id)

    def _counts_since(self, schedule: Ticks, wall: float) -> TickScript[float]:
        """Return the time from which the ticks of a schedule count, also after a clock was set back."""
        if schedule not in self._since:
            self._since[schedule] = yield from self._learn_since(schedule)
        if wall < self._since[schedule]:
            self._since[schedule] = wall - LOOK_S
        return self._since[schedule]

    def _learn_since(self, schedule: Ticks) -> TickScript[float]:
        """Return the first recent tick in the store, or the start of this ticker if the schedule is new."""
        ticks = {schedule.task_id(tick): tick for tick in schedule.recent(self._began)}
        first = min(ticks.values())
        if len(ticks) == 1:
            return self._began
        stored: Collection[TaskId] = yield FindTicks(list(ticks))
        if found := [ticks[task] for task in stored]:
            return min(found)
        # A collected task looks like one that never existed: it is better to run once too often.
        return float(first) if self._began - first >= self._kept_s else self._began

    def _enqueue_once(self, name: str, task_id: TaskId, delay_s: float) -> TickScript[None]:
        try:
            yield EnqueueTick(name, task_id, delay_s)
        except TaskExists:
            # An earlier owner enqueued it, with other options or defaults of the function.
            return
        except Exception as error:
            if kind_of(error) is ErrorKind.OUTAGE:
                raise
            yield LeaveOut(name, error)
