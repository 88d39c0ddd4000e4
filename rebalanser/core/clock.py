"""Time as the decisions see it: a source of times, and delays that grow."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Source of time for the runtime; tests pass a fake one."""

    def now(self) -> float:
        """Seconds since some fixed instant, also while the host is suspended; never goes back."""

    def wall(self) -> float:
        """Seconds since 1970 as the host believes; may jump. For people and records only."""


RESTART_INITIAL_S = 0.5
RESTART_MAX_S = 30.0
RESTART_RESET_S = 10.0
"""Minimum length of a run, in seconds, that resets the delay to the initial one."""


class GrowingDelay:
    """Seconds before the next run: ``initial_s``, doubled with each short run in a row, up to ``max_s``."""

    def __init__(self, initial_s: float = RESTART_INITIAL_S, max_s: float = RESTART_MAX_S) -> None:
        self._initial_s = initial_s
        self._max_s = max_s
        self._short_runs = 0

    def after(self, lasted_s: float) -> float:
        """Return the delay, in seconds, after a run that lasted ``lasted_s``."""
        self._short_runs = 1 if lasted_s >= RESTART_RESET_S else self._short_runs + 1
        delay_s = self._initial_s
        for _ in range(1, self._short_runs):
            if delay_s >= self._max_s:
                break
            delay_s = min(self._max_s, 2 * delay_s)
        return delay_s
