"""Faults of released etcd versions that weaken a promise of the registry's contract."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; ``fixed`` has, for each release line, the first patch version without it."""

    sentence: str
    fixed: Mapping[tuple[int, int], int]

    def concerns(self, version: tuple[int, int, int]) -> bool:
        """Whether a server of this version has the fault."""
        major, minor, patch = version
        return patch < self.fixed.get((major, minor), 0)


FAULTS: Final = (
    Fault("may revoke live leases through a member that no longer leads", {(3, 4): 31, (3, 5): 13}),
    Fault("may lose watch events after a compaction", {(3, 4): 31, (3, 5): 13}),
    Fault("may answer a keep-alive of a revoked lease as if it lived", {(3, 4): 38, (3, 5): 24, (3, 6): 5}),
    Fault("may answer reads with old data after it was paused", {(3, 4): 42}),
    Fault("may end up with members whose data differ", {(3, 5): 3}),
    Fault("refuses reads too while it is over its quota", {(3, 4): 20, (3, 5): 7}),
    Fault("may lose answered writes of a single member in a crash", {(3, 4): 21, (3, 5): 5}),
)


def parse_version(text: str) -> tuple[int, int, int] | None:
    """``3.6.16`` or ``3.7.0-rc.0`` as numbers; None where it is neither."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def unsafe_reasons(versions: Iterable[str]) -> tuple[str, ...]:
    """One sentence for each fault of each server version."""
    reasons = []
    for text in sorted(set(versions)):
        version = parse_version(text)
        if version is None:
            reasons.append(f"etcd tells no version that is known ({text!r})")
        elif version < (3, 4, 0):
            reasons.append(f"etcd {text} is older than 3.4, the oldest that is tested")
        else:
            reasons += [f"etcd {text} {fault.sentence}" for fault in FAULTS if fault.concerns(version)]
    return tuple(reasons)
