"""True time: what happens next, and nothing else happens."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Final

WALL_AT_START_S: Final = 1_700_000_000.0


class TrueClock:
    """A ``Clock`` that shows a scheduler's time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def now(self) -> float:
        """Seconds since the run began."""
        return self._scheduler.now

    def wall(self) -> float:
        """Seconds since 1970."""
        return WALL_AT_START_S + self._scheduler.now


class Scheduler:
    """Runs actions in the order of their times, those of one time in the order of being asked for."""

    def __init__(self) -> None:
        self.clock = TrueClock(self)
        self.now = 0.0
        self.events = 0
        self._waiting: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, due: float, action: Callable[..., object], *arguments: Any) -> None:
        """Call ``action`` at true time ``due`` (seconds), or now where that is over."""
        self._asked += 1
        now = self.now
        heappush(self._waiting, (max(now, due), self._asked, action, arguments))

    def run_until(self, end: float) -> None:
        """Run everything that is due before ``end`` (seconds), and let the time come to it."""
        waiting = self._waiting
        while waiting and waiting[0][0] <= end:
            self.now, _, action, arguments = heappop(waiting)
            self.events += 1
            action(*arguments)
        self.now = max(self.now, end)
