"""The topic: records in partitions, appended by anybody, with the broker's time on each."""

from __future__ import annotations

from dataclasses import dataclass

from rebalanser.core.neli.records import Stamp


@dataclass(frozen=True, slots=True)
class Record:
    """A record as the broker keeps it; its offset is its place in the partition."""

    stamp: Stamp
    appended_at: float


class Topic:
    """The log, which loses nothing that it took."""

    def __init__(self, partitions: int) -> None:
        self._records: list[list[Record]] = [[] for _ in range(partitions)]
        self._last_of: dict[tuple[str, int], float] = {}

    @property
    def partitions(self) -> int:
        """How many partitions there are now."""
        return len(self._records)

    def grow(self) -> None:
        """Add a partition."""
        self._records.append([])

    def append(self, partition: int, stamp: Stamp, now: float) -> None:
        """Write a record."""
        self._records[partition].append(Record(stamp, now))
        self._last_of[stamp.process, partition] = now

    def last_of_process(self, process: str, partition: int) -> float:
        """When the last heartbeat of a process was appended; minus infinity if there is none."""
        return self._last_of.get((process, partition), float("-inf"))

    def end(self, partition: int) -> int:
        """The offset after the last record."""
        return len(self._records[partition])

    def read(self, partition: int, offset: int, limit: int) -> list[Record]:
        """Records from ``offset`` on."""
        return self._records[partition][offset : offset + limit]

    def appended_at(self, partition: int, offset: int) -> float:
        """When the record at ``offset`` was appended."""
        return self._records[partition][offset].appended_at
