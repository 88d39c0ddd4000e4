"""Journal of one process: numbers each event, adds its times, and passes it to a sink."""

from __future__ import annotations

import contextlib
import platform
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from rebalanser.boot_id import boot_id
from rebalanser.history.kinds import Protocol
from rebalanser.history.records import Author, Event, Record
from rebalanser.history.sinks import HistorySink

_CLOCK_OFFSETS: Final = Path("/proc/self/timens_offsets")


@cache
def boot() -> str | None:
    """The name of this run of this host's kernel; None if the system gives none.

    A container with a clock offset has a name of its own: its times are of another clock.
    """
    try:
        return f"{boot_id()}{_clock_offset()}"
    except OSError:
        return None


def _clock_offset() -> str:
    """Offset (seconds, nanoseconds) of the clock in its time namespace; empty if there is none."""
    with contextlib.suppress(OSError):
        for line in _CLOCK_OFFSETS.read_text().splitlines():
            name, *offset = line.split()
            if name == "boottime" and any(int(part) for part in offset):
                return "+" + ".".join(offset)
    return ""


def author_here(protocol: Protocol, group: str, process: str, label: str) -> Author:
    """The author on this host. ``process`` is a name that no other process of any group has or ever had."""
    return Author(protocol, group, process, label, platform.node() or None, boot())


@dataclass(frozen=True, slots=True)
class Moment:
    """Time of some events, and the numbers of their records."""

    sequences: range
    wall: float
    monotonic: float


class Journal:
    """The records of one ``Author``. May be called from any thread.

    ``wall`` returns seconds since 1970, ``monotonic`` seconds of the clock that leases are counted on.
    """

    def __init__(
        self, author: Author, sink: HistorySink, *, wall: Callable[[], float], monotonic: Callable[[], float]
    ) -> None:
        self._author = author
        self._sink = sink
        self._wall = wall
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._sequence = 0

    def write(self, event: Event) -> None:
        """Write an event with the present time. Never waits outside of this process, and never raises."""
        with self._writing:
            self._write(self.moment(1), (event,))

    def moment(self, records: int) -> Moment:
        """Return the present moment for that number of records, which ``write_at`` writes later.

        Never waits for a write. Unused numbers show as lost records.
        """
        with self._lock:
            return self._moment(records)

    def write_at(self, moment: Moment, events: Iterable[Event]) -> None:
        """Write the events of a moment; to be called in the order of the moments."""
        with self._writing:
            self._write(moment, events)

    def _moment(self, records: int) -> Moment:
        first, self._sequence = self._sequence, self._sequence + records
        return Moment(range(first, self._sequence), self._wall(), self._monotonic())

    def _write(self, moment: Moment, events: Iterable[Event]) -> None:
        for sequence, event in zip(moment.sequences, events, strict=True):
            with contextlib.suppress(Exception):
                self._sink.write(
                    Record.of(
                        self._author,
                        event,
                        sequence=sequence,
                        wall=moment.wall,
                        monotonic=moment.monotonic,
                    )
                )

    def close(self, timeout_s: float) -> None:
        """Flush all records, waiting at most ``timeout_s`` seconds."""
        self._sink.close(timeout_s)
