"""True time: what happens next, and nothing else happens."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TypeAlias

from rebalanser.testing.clock import FakeClock

Action: TypeAlias = Callable[[], None]


class Scheduler:
    """Runs actions in the order of their times, those of one time in the order of being asked for."""

    def __init__(self) -> None:
        self.clock = FakeClock(start=0.0)
        self.now = 0.0
        self.events = 0
        self._waiting: list[tuple[float, int, Action]] = []
        self._asked = 0

    def at(self, due: float, action: Action) -> None:
        """Run ``action`` at true time ``due`` (seconds), or now where that is over."""
        self._asked += 1
        heapq.heappush(self._waiting, (max(due, self.now), self._asked, action))

    def run_until(self, end: float) -> None:
        """Run everything that is due before ``end`` (seconds), and let the time come to it."""
        waiting = self._waiting
        while waiting and waiting[0][0] <= end:
            due, _, action = heapq.heappop(waiting)
            self._pass(due)
            self.events += 1
            action()
        self._pass(end)

    def _pass(self, to: float) -> None:
        if to > self.now:
            self.clock.advance(to - self.now)
            self.now = to
