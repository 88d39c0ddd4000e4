"""The vector V of the classic modes: when each partition was last heard (NE-3)."""

from __future__ import annotations


class Vector:
    """One time per partition, in seconds of this process's monotonic clock; "zero" is: never heard."""

    def __init__(self, partitions: int) -> None:
        self._heard_at: list[float | None] = [None] * partitions

    def __len__(self) -> int:
        return len(self._heard_at)

    def hear(self, partition: int, at: float) -> None:
        """A record of ``partition`` was received, or timestamped by the broker, at ``at``. V only grows."""
        known = self._heard_at[partition]
        self._heard_at[partition] = at if known is None else max(known, at)

    def heard_at(self, partition: int) -> float | None:
        """The time of the last record of ``partition``, whoever published it; None if there was none."""
        return self._heard_at[partition]
