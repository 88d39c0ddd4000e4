"""The vector V of the classic modes: when each partition was last heard (NE-3)."""

from __future__ import annotations


class Vector:
    """One time per partition, in seconds of this process's monotonic clock; None before any record."""

    def __init__(self, partitions: int) -> None:
        self._heard_at: list[float | None] = [None] * partitions

    def __len__(self) -> int:
        return len(self._heard_at)

    def hear(self, partition: int, at: float) -> None:
        """Note a record of ``partition``: ``at`` is when it came, or the broker's timestamp. V only grows."""
        known = self._heard_at[partition]
        self._heard_at[partition] = at if known is None else max(known, at)

    def heard_at(self, partition: int) -> float | None:
        """Return the time of the last record of ``partition``, of any process; None if there was none."""
        return self._heard_at[partition]
