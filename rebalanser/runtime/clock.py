"""The clock that leases and deadlines are counted on.

``time.monotonic()`` stands still on Linux while the host is suspended, a lease does not. So the time of this
clock goes on during a suspend wherever the system has such a clock.
"""

from __future__ import annotations

import time
from typing import Final, Protocol

_BOOTTIME: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)


class Clock(Protocol):
    """Where the runtime gets its time from; tests give it a fake one."""

    def now(self) -> float:
        """Seconds since some fixed instant, also while the host is suspended; never goes back."""

    def wall(self) -> float:
        """Seconds since 1970 as the host believes; may jump. For people and records only."""


class SystemClock:
    """The host's own clocks: CLOCK_BOOTTIME where there is one, else ``time.monotonic()``."""

    def now(self) -> float:
        """Seconds since some fixed instant, also while the host is suspended; never goes back."""
        return time.monotonic() if _BOOTTIME is None else time.clock_gettime(_BOOTTIME)

    def wall(self) -> float:
        """Seconds since 1970 as the host believes; may jump. For people and records only."""
        return time.time()

    def to_monotonic(self, instant: float) -> float:
        """An ``instant`` of this clock in seconds of ``time.monotonic()``, valid until the next suspend.

        The error, some microseconds, makes the result too early and never too late, as deadlines need it.
        """
        monotonic = time.monotonic()
        return instant - self.now() + monotonic
