"""The clock for leases and deadlines.

On Linux ``time.monotonic()`` stops while the host is suspended, but leases do not. So this clock also counts
the time of a suspend where the system has such a clock.
"""

from __future__ import annotations

import time
from typing import Final

_BOOTTIME: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)


class SystemClock:
    """The host's own clocks: CLOCK_BOOTTIME if available, else ``time.monotonic()``."""

    def now(self) -> float:
        """Seconds since some fixed instant, also while the host is suspended; never goes back."""
        return time.monotonic() if _BOOTTIME is None else time.clock_gettime(_BOOTTIME)

    def wall(self) -> float:
        """Seconds since 1970 as the host believes; may jump. For people and records only."""
        return time.time()

    def to_monotonic(self, instant: float) -> float:
        """Convert an ``instant`` of this clock to ``time.monotonic()``; valid until the next suspend.

        The result is a few microseconds too early, never too late, as deadlines require.
        """
        monotonic = time.monotonic()
        return instant - self.now() + monotonic
