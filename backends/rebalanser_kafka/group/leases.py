"""Lease counting, and the choice of the node that writes the end of a lease.

A log has no clock, so the end of a lease is a record like any other: ``Expire(lease, renewal)``. A connection
may write it once it has counted the lease's time to live on its own monotonic clock since it *read* the
renewal. The record takes effect only if that renewal is still the last one.

**The holder's access ends before the lease (RB-21).** The holder counts its access from *before it sent* the
renewal, for less than the time to live (clock drift and margin taken off). The writer of the end has read
that renewal, so it began to count after the renewal was appended, and so after it was sent; and it counts all
of the time to live. If the holder renewed again meanwhile, the record names a renewal that is not the last
one, and has no effect. So a connection that was paused, lags behind or was cut off does no harm when it wakes
up and believes that every lease is over. A connection that reads old records, on opening or from a snapshot,
begins to count when it reads them: it can only be too late.

**The writer of the end.** All members count. Each waits a little longer than those that joined before it, so
that not all of them write at once; connections without a member wait longest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rebalanser.registry.contract import LeaseAge
from rebalanser_kafka.group.records import Expire
from rebalanser_kafka.group.replica import LogLease

STAGGER_S: Final = 0.05
MAX_RANK: Final = 8
"""Maximum number of ``STAGGER_S`` after the end of a lease until the last in turn writes ``Expire``."""
REPEAT_S: Final = 1.0
"""Seconds until an ``Expire`` without effect is written again."""


@dataclass(slots=True)
class _Count:
    renewal: int
    ttl_s: float
    since: float
    said_at: float | None = None

    @property
    def ends_at(self) -> float:
        return self.since + self.ttl_s


class LeaseCounter:
    """Counts every lease of a group on one clock (seconds)."""

    def __init__(self) -> None:
        self._counts: dict[int, _Count] = {}

    def observe(self, leases: Mapping[int, LogLease], now: float) -> None:
        """Take in leases with their renewals, as read by ``now``."""
        for lease, held in leases.items():
            count = self._counts.get(lease)
            if count is None or count.renewal != held.renewal:
                self._counts[lease] = _Count(held.renewal, held.ttl_s, now)
        for lease in self._counts.keys() - leases.keys():
            del self._counts[lease]

    def forget(self) -> None:
        """Count all leases anew from the next observation."""
        self._counts.clear()

    def age(self, lease: int, now: float) -> LeaseAge | None:
        """Seconds since the last renewal of a lease was read, if it is counted and not over."""
        count = self._counts.get(lease)
        return LeaseAge(now - count.since, count.ttl_s) if count and now < count.ends_at else None

    def due(self, now: float, members: Callable[[], Sequence[int]], own: int | None) -> list[Expire]:
        """Return the ends to write now. ``members`` returns the members' leases in the order of joining,
        which gives the turns.

        ``own`` is the lease of this connection's member. An end without effect is due again after a while.
        """
        over = {lease for lease, count in self._counts.items() if count.ends_at <= now}
        if not over:
            return []
        waiting_s = STAGGER_S * rank([lease for lease in members() if lease not in over], own)
        said = []
        for lease in sorted(over):
            count = self._counts[lease]
            turn = count.ends_at + waiting_s if count.said_at is None else count.said_at + REPEAT_S
            if turn <= now:
                count.said_at = now
                said.append(Expire(lease, count.renewal))
        return said

    def next_look(self, now: float) -> float | None:
        """Seconds from ``now`` until an end may be due; None without leases."""
        ends = [count.ends_at for count in self._counts.values()]
        if not ends:
            return None
        first = min(ends)
        return first - now if first > now else STAGGER_S


def rank(members: Sequence[int], own: int | None) -> int:
    """Return this member's turn: the number of living members that joined before it; the last turn if it is
    no member."""
    position = members.index(own) if own in members else len(members) and MAX_RANK
    return min(position, MAX_RANK)
