"""Faults of released etcd versions, with their harm here and the countermeasures.

From etcd's changelogs of 3.4 to 3.7; docs/how-to/etcd.md has them as a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final


@dataclass(frozen=True, slots=True)
class KnownBug:
    """One fault, as a sentence without its subject."""

    sentence: str
    fixed: Mapping[tuple[int, int], int]
    """For each release line that had the fault, the first patch version without it."""
    breaks: str
    """The harm to a group, and the countermeasure."""
    survived: bool = False
    """True if it weakens no promise, so that there is no warning."""
    since: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """For each release line whose first version did not have the fault, the version that introduced it."""

    def concerns(self, version: tuple[int, int, int]) -> bool:
        """Return True if a server of this version has the fault."""
        major, minor, patch = version
        line = (major, minor)
        return self.since.get(line, 0) <= patch < self.fixed.get(line, 0)


NEVER: Final = 1_000_000
"""Stands for a fix in a version after the last one of a release line."""

KNOWN_BUGS: Final = (
    KnownBug(
        "may answer reads with old data after it was paused, or while leaders change",
        {(3, 4): 42, (3, 5): 28, (3, 6): 9},
        "The read that proves life: a node may believe in a lease that has ended, so that only receivers of "
        "fencing tokens are safe. A read from before what the same connection has seen is refused.",
    ),
    KnownBug(
        "may revoke live leases through a member that no longer leads",
        {(3, 4): 31, (3, 5): 13},
        "A lease ends early, before its node knows: only receivers of fencing tokens are safe.",
    ),
    KnownBug(
        "may carry out only a part of a transaction",
        {(3, 5): 17},
        "A barrier or a term may change without what belongs to it.",
    ),
    KnownBug(
        "may end up with members whose data differ",
        {(3, 5): 3},
        "Two members may each show another owner.",
    ),
    KnownBug(
        "may end up with members whose revisions differ if one crashes while it is defragmented",
        {(3, 5): 6},
        "Fencing tokens may differ between members.",
    ),
    KnownBug(
        "may damage a member's data if it is defragmented while it takes in a snapshot",
        {(3, 4): 38, (3, 5): 23, (3, 6): 5},
        "That member may show another owner than the others.",
    ),
    KnownBug(
        "may go back to an earlier revision after a crash during a compaction",
        {(3, 4): 32, (3, 5): 14},
        "Fencing tokens may go back. Open connections refuse to go on; new ones can't know.",
    ),
    KnownBug(
        "may lose answered writes of a single member in a crash",
        {(3, 4): 21, (3, 5): 5},
        "A barrier or a term may be forgotten, and given out again.",
    ),
    KnownBug(
        "may apply requests differently on members restored from a snapshot, with authentication",
        {(3, 4): 22, (3, 5): 6},
        "Two members may each show another owner.",
    ),
    KnownBug(
        "may never end leases after a member took in a snapshot, with authentication",
        {(3, 4): 19, (3, 5): 5},
        "Resources of a node that died stay without an owner.",
    ),
    KnownBug(
        "may lose watch events after a compaction",
        {(3, 4): 36, (3, 5): 18},
        "A change is noticed with a later heartbeat, and not at once.",
        survived=True,
    ),
    KnownBug(
        "refuses reads too while it is over its quota",
        {(3, 4): 20, (3, 5): 7},
        "Nodes can't prove life and stop, where later versions only let nobody join.",
    ),
    KnownBug(
        "may crash on a read transaction that is cancelled",
        {(3, 4): 23, (3, 5): 7},
        "An outage of that member, which a request that timed out can cause.",
    ),
    KnownBug(
        "may answer a keep-alive of a revoked lease as if it lived",
        {(3, 4): 38, (3, 5): 23, (3, 6): 5},
        "Nothing: an answered keep-alive proves nothing, only the read after it does.",
        survived=True,
    ),
    KnownBug(
        "may answer a keep-alive of a lease that is just being granted",
        {(3, 4): 20, (3, 5): 3},
        "Nothing: a lease is renewed only after its grant was answered.",
        survived=True,
    ),
    KnownBug(
        "may report to watchers an event twice, old events, or progress ahead of events",
        {(3, 4): 38, (3, 5): 22, (3, 6): 2},
        "Nothing: a watch is only a wake-up, and its progress is not used.",
        survived=True,
    ),
    KnownBug(
        "may hold different data after transactions that read at a stated revision",
        {(3, 4): NEVER, (3, 5): NEVER, (3, 6): NEVER},
        "Nothing: no transaction here reads at a stated revision.",
        survived=True,
    ),
    KnownBug(
        "shows its status only to administrators",
        {(3, 4): NEVER, (3, 5): 32, (3, 6): 12},
        "Nothing: a read takes its place. The version is unknown then, and a warning says so.",
        survived=True,
        since={(3, 4): 42, (3, 5): 28, (3, 6): 9},
    ),
    KnownBug(
        "lets users do or see more than they were granted",
        {(3, 4): 44, (3, 5): 33, (3, 6): 14, (3, 7): 1},
        "Nothing in a group, but a role with few rights may do more.",
        survived=True,
    ),
)


def parse_version(text: str) -> tuple[int, int, int] | None:
    """Parse ``3.6.16`` or ``3.7.0-rc.0`` to numbers; None if it is neither."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def unsafe_reasons(versions: Iterable[str]) -> tuple[str, ...]:
    """Return a sentence for each fault of these server versions that weakens a promise."""
    return _unsafe_reasons(tuple(sorted(set(versions))))


@lru_cache(maxsize=16)
def _unsafe_reasons(versions: tuple[str, ...]) -> tuple[str, ...]:
    reasons = []
    for text in versions:
        version = parse_version(text)
        if version is None:
            reasons.append(f"etcd reports an unknown version ({text!r})")
        elif version < (3, 4, 0):
            reasons.append(f"etcd {text} is older than 3.4, the oldest that is tested")
        else:
            reasons += [
                f"etcd {text} {fault.sentence}"
                for fault in KNOWN_BUGS
                if fault.concerns(version) and not fault.survived
            ]
    return tuple(reasons)
