"""Bounded buffer that all sinks share: a gap record takes the place of records that did not fit."""

from __future__ import annotations

import threading
from typing import Final

from rebalanser.history.records import Record

TOO_SLOW: Final = "records came faster than they could be written"
"""Reason for drops while nothing else is wrong."""


class RecordBuffer:
    """The records that wait for the writer, at most ``size``, and the count of dropped ones.

    The writer takes all of them at once. So after a drop the queue stays full until it is emptied, and all
    dropped records belong right behind it: the gap record goes there.
    """

    def __init__(self, size: int) -> None:
        self.dropped = 0
        """Number of records dropped so far."""
        self.reason = TOO_SLOW
        """Reason for drops at present, if there are any; set by the writer."""
        self._size = size
        self._lock = threading.Lock()
        self._records: list[Record] = []
        self._gap: _Gap | None = None
        self._closed = False

    def put(self, record: Record) -> None:
        """Add a record, or drop and count it. Never waits, and never raises."""
        with self._lock:
            if len(self._records) < self._size and not self._closed:
                self._records.append(record)
                return
            self.dropped += 1
            if self._gap is None:
                self._gap = _Gap(record, self.reason)
            self._gap.add(record)

    def take(self, *, last: bool) -> list[Record]:
        """Take all waiting records, then the gap if there is one; after the ``last`` time drop all others."""
        with self._lock:
            records, self._records = self._records, []
            gap, self._gap = self._gap, None
            self._closed = self._closed or last
        return [*records, gap.record()] if gap else records

    def drop_for_good(self, count: int) -> None:
        """Count taken records that could not be written before the sink was closed."""
        with self._lock:
            self.dropped += count


class _Gap:
    """Consecutive records that were dropped."""

    def __init__(self, first: Record, reason: str) -> None:
        self._first = first
        self._last = first
        self._reason = reason
        self._dropped = 0

    def add(self, record: Record) -> None:
        self._last = record
        self._dropped += 1

    def record(self) -> Record:
        return Record.gap(self._first, self._last, dropped=self._dropped, reason=self._reason)
