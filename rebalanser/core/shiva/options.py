"""Options of a Shiva leader, checked against each other."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final

from rebalanser.core.shiva.records import CHANGE_KEYS
from rebalanser.errors import InvalidSettings

_APPLICATIONS_PER_INTERVAL: Final = 1000


@dataclass(frozen=True, slots=True)
class LeaderOptions:
    """Options of a leader. Leaders of one cluster may differ at any time."""

    round_s: float = 30.0
    """Seconds from ping to ping (SH-8)."""
    missed_rounds: int = 1
    """Number of full rounds that a worker may be silent before it is removed (SH-8)."""
    stalled_s: float = 120.0
    """Seconds that a worker may answer and not follow the assignment before it counts as gone (SH-8).

    They begin in the round that finds it stalled, which is logged as a warning.
    """
    away_grace_s: float = 0.0
    """Seconds that the applications of a worker that left or is missing wait for it (SH-26).

    They begin when it is removed, or when a leader takes over.
    """
    retry_initial_s: float = 30.0
    """Seconds from an application's last failure to its next try where it failed (SH-17)."""
    retry_max_s: float = 300.0
    """Maximum of these seconds, which double with each failure after a retry."""
    deadline_s: float | None = None
    """Seconds for which a pong that was heard lets a worker run exclusive applications (SH-14).

    Default: two rounds more than may be missed.
    """
    session_timeout_s: float = 10.0
    """Seconds without a heartbeat after which Kafka gives COMMAND's partition to another leader."""
    settle_time_s: float = 0.05
    """Seconds from a first change to its document, which collects further changes."""
    min_publish_interval_s: float = 0.1
    """Minimum seconds between two documents of up to 1,000 applications; grows with their number."""
    snapshot_changes: int = CHANGE_KEYS - 1
    """Maximum changes before the next whole document; 0 for whole documents only (SH-24).

    A whole document also follows once changes have four times as many entries as it has. All are whole while
    a worker is known that reads no changes.
    """
    snapshot_s: float = 3600.0
    """Seconds after a whole document from which the next document is whole again."""
    retention_s: float = 15 * 24 * 3600.0
    """Seconds for which COMMAND keeps a record (SH-1)."""
    retention_bytes: int = 100_000_000
    """Bytes beyond which COMMAND drops its oldest records (SH-1)."""
    budget_ratio: float = 0.4
    """Share of ``retention_bytes`` that the applications that are to run may take (SH-15)."""
    keep_ratio: float = 0.5
    """Share of COMMAND's retention, in time or bytes, at which a start command is written again (SH-15)."""
    keep_batch_bytes: int = 8_000_000
    """Bytes that are written again in one transaction, unless one application alone is larger."""
    drop_after_s: float = 600.0
    """Seconds that an archive must be unused, and no part of it written, before it is dropped."""
    max_set_aside: int = 20
    """Maximum records set aside that a document shows (SH-16)."""
    set_aside_s: float = 86_400.0
    """Seconds that a document shows such a record, unless a later command makes it irrelevant (SH-20).

    A record that each round repeats is shown until it has been missing for the deadline.
    """

    def check(self) -> None:
        """Refuse options that cannot keep the rules.

        Raises:
            InvalidSettings: a number is out of range, or contradicts the others; with the numbers.
        """
        self._check_ranges()
        removed_s = (self.missed_rounds + 1) * self.round_s
        if self.permission_s <= removed_s:
            raise InvalidSettings(
                f"deadline_s {self.permission_s:g} must be over (missed_rounds {self.missed_rounds} + 1) x "
                f"round_s {self.round_s:g} = {removed_s:g} s: exclusive applications would stop while their "
                "worker is still waited for"
            )
        if self.retry_initial_s > self.retry_max_s:
            raise InvalidSettings(
                f"retry_initial_s {self.retry_initial_s:g} is over retry_max_s {self.retry_max_s:g}"
            )
        if self.snapshot_changes >= CHANGE_KEYS:
            raise InvalidSettings(
                f"snapshot_changes {self.snapshot_changes} must be below the {CHANGE_KEYS} keys of changes"
            )
        if self.budget_ratio + self.keep_ratio >= 1:
            raise InvalidSettings(
                f"budget_ratio {self.budget_ratio:g} + keep_ratio {self.keep_ratio:g} must be below 1: what "
                "is written again would push out what has not been written again yet"
            )

    def _check_ranges(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            floor = 0 if field.name in _MAY_BE_ZERO else math.nextafter(0, 1)
            if value is not None and not (math.isfinite(value) and value >= floor):
                least = "0 or more" if floor == 0 else "more than 0"
                raise InvalidSettings(f"{field.name} is {value:g}, and must be {least}")

    @property
    def permission_s(self) -> float:
        """The deadline in force, in seconds: ``deadline_s``, or its default from the rounds."""
        return (self.missed_rounds + 2) * self.round_s if self.deadline_s is None else self.deadline_s

    @property
    def budget_bytes(self) -> int:
        """Maximum bytes of the start commands and archives of all applications that are to run (SH-15)."""
        return int(self.retention_bytes * self.budget_ratio)

    def publish_interval_s(self, applications: int) -> float:
        """Return the minimum seconds between two documents of N applications."""
        return self.min_publish_interval_s * max(1.0, applications / _APPLICATIONS_PER_INTERVAL)


_MAY_BE_ZERO: Final = frozenset(
    {
        "away_grace_s",
        "settle_time_s",
        "min_publish_interval_s",
        "drop_after_s",
        "max_set_aside",
        "snapshot_changes",
        "snapshot_s",
    }
)
