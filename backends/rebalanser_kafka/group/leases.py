"""Counting leases, and who says that one has ended.

A log has no clock, so the end of a lease is a record like any other: ``Expire(lease, renewal)``. Any
connection may write it that has counted the lease's time to live on its own monotonic clock since it *read*
the renewal, and it takes effect only if that renewal is still the last one.

**Why its holder's access ends before (RB-21).** The holder counts its access from *before it sent* the
renewal, for less than the time to live (clock drift and margin taken off). Whoever writes the end has read
that renewal, so he began to count after it was appended, and so after it was sent; and he counts all of the
time to live. If the holder renewed again meanwhile, the record names a renewal that is not the last one, and
nothing happens: so a connection that was paused, lags behind or was cut off does no harm when it wakes up
and believes that every lease is over. A connection that reads old records, on opening or from a snapshot,
begins to count when it reads them: it can only be too late.

**Who writes it.** All members count. So that not all of them write at once, each waits a little longer than
those that joined before it; whoever is no member waits longest.
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
LATEST_S: Final = STAGGER_S * MAX_RANK
"""How long after its end the last one of all, still within its turn, says that a lease has ended."""
REPEAT_S: Final = 1.0
"""How long after saying so without effect it is said again."""


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
        """These leases, with these renewals, had been read by ``now``."""
        for lease, held in leases.items():
            count = self._counts.get(lease)
            if count is None or count.renewal != held.renewal:
                self._counts[lease] = _Count(held.renewal, held.ttl_s, now)
        for lease in self._counts.keys() - leases.keys():
            del self._counts[lease]

    def forget(self) -> None:
        """Count anew whatever is observed next."""
        self._counts.clear()

    def age(self, lease: int, now: float) -> LeaseAge | None:
        """Seconds since the last renewal of a lease was read, if it is counted and not over."""
        count = self._counts.get(lease)
        return LeaseAge(now - count.since, count.ttl_s) if count and now < count.ends_at else None

    def due(self, now: float, members: Callable[[], Sequence[int]], own: int | None) -> list[Expire]:
        """What to say now. ``members`` answers with their leases as they joined, which says whose turn it is.

        ``own`` is the lease of this connection's member. Saying it again is due after a while.
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
        """How many seconds from ``now`` something may be due, None without leases."""
        ends = [count.ends_at for count in self._counts.values()]
        if not ends:
            return None
        first = min(ends)
        return first - now if first > now else STAGGER_S


def rank(members: Sequence[int], own: int | None) -> int:
    """Whose turn it is: how many living members come before this one; last of all where it is no member."""
    position = members.index(own) if own in members else len(members) and MAX_RANK
    return min(position, MAX_RANK)
