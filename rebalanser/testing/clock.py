"""A clock that moves only by ``advance``."""

from __future__ import annotations

import threading


class FakeClock:
    """A ``Clock`` for tests. May be used from any thread."""

    def __init__(self, start: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._lock = threading.Lock()
        self._start = start
        self._wall = wall
        self._passed = 0.0

    def now(self) -> float:
        """Seconds: ``start`` and all advances."""
        with self._lock:
            return self._start + self._passed

    def wall(self) -> float:
        """Seconds since 1970: the first ``wall`` and all advances."""
        with self._lock:
            return self._wall + self._passed

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass.

        Raises:
            ValueError: time does not go back.
        """
        if not seconds >= 0:
            raise ValueError(f"time does not go back: {seconds}")
        with self._lock:
            self._passed += seconds
