"""Rate-limits warnings while a broker is unreachable."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import ClassVar, Final
from weakref import WeakValueDictionary

from rebalanser.runtime.logs import get_logger

FIRST_GAP_S: Final = 1.0
LONGEST_GAP_S: Final = 60.0

_log = get_logger("rebalanser.shiva")


class ThrottledWarning:
    """Logs a failure, again at doubling intervals while it lasts, and its end. Thread-safe.

    A failure that comes and goes is logged at these intervals, too; they are short again after a minute
    without a failure.

    Several sources, each with a ``source``, may share one object: the failure of a further source is not
    logged, and the end is logged once all of them work again.
    """

    _shared: ClassVar[WeakValueDictionary[tuple[object, ...], ThrottledWarning]] = WeakValueDictionary()
    _sharing: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def shared(cls, servers: str, action: str, fields: Mapping[str, str]) -> ThrottledWarning:
        """Return the process's object for these brokers and lines, so that no line is logged twice."""
        key = (servers, action, *sorted(fields.items()))
        with cls._sharing:
            outage = cls._shared.get(key)
            if outage is None:
                outage = cls._shared[key] = cls(action, fields)
            return outage

    def __init__(
        self, action: str, fields: Mapping[str, str], now: Callable[[], float] = time.monotonic
    ) -> None:
        """``action`` and the fields are those of its lines; ``now`` returns monotonic seconds."""
        self._action = action
        self._now = now
        self._fields = fields
        self._lock = threading.Lock()
        self._told = False
        self._failing: set[object] = set()
        self._silent_until = now()
        self._gap_s = FIRST_GAP_S

    def failed(self, reason: str, source: object = None) -> None:
        """Note a failure with its reason; log it if it is time."""
        if self._is_due(source):
            _log.warning(reason, action=self._action, **self._fields)

    def leave(self, source: object) -> None:
        """Forget a source; nothing is logged."""
        with self._lock:
            self._failing.discard(source)

    def works(self, text: str, source: object = None) -> None:
        """Note success; log the text if the failure was logged and no other source fails."""
        with self._lock:
            self._failing.discard(source)
            if self._failing:
                return
            told, self._told = self._told, False
        if told:
            _log.warning(text, action=f"{self._action}_over", **self._fields)

    def _is_due(self, source: object) -> bool:
        with self._lock:
            now = self._now()
            joins = bool(self._failing) and source not in self._failing
            self._failing.add(source)
            if joins and self._told:
                return False
            if now < self._silent_until:
                return False
            if now >= self._silent_until + LONGEST_GAP_S:
                self._gap_s = FIRST_GAP_S
            self._silent_until = now + self._gap_s
            self._gap_s = min(2 * self._gap_s, LONGEST_GAP_S)
            self._told = True
            return True
