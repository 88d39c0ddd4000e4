"""Records of NELI: the stamp in the header of a heartbeat, and the note in the metadata of a commit.

Both are short JSON arrays with a version first. A reader ignores one that it can't read: a
heartbeat without a stamp is foreign, and a commit without a note promises nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

HEADER = "neli"
"""The header that carries a heartbeat's stamp; key and value of the record are null (NE-2)."""
_VERSION = 1


def _dump(*parts: object) -> str:
    return json.dumps([_VERSION, *parts], separators=(",", ":"))


def _load(text: str | bytes | None, *kinds: type) -> list[Any] | None:
    try:
        version, *parts = json.loads(text or "")
    except (ValueError, TypeError):
        return None
    if version != _VERSION or len(parts) != len(kinds):
        return None
    sound = all(type(part) is kind for part, kind in zip(parts, kinds, strict=True))
    return parts if sound else None


@dataclass(frozen=True, slots=True)
class Stamp:
    """Sender of a heartbeat.

    ``process`` is the id of one incarnation of one process, never used again; ``tenure`` counts its
    tenures (0: the partition was not assigned to it), ``sequence`` its heartbeats. ``partitions`` is the
    partition count that it knows.
    """

    group: str
    process: str
    tenure: int
    sequence: int
    partitions: int

    def encode(self) -> bytes:
        """Return the header's value."""
        return _dump(self.group, self.process, self.tenure, self.sequence, self.partitions).encode()

    @classmethod
    def decode(cls, value: bytes | None) -> Stamp | None:
        """Return the stamp in a header's value; None if it is invalid."""
        parts = _load(value, str, str, int, int, int)
        return cls(*parts) if parts else None


class LeadershipClaim(StrEnum):
    """State of a partition by its committed offset."""

    HELD = "held"
    """The process that committed may lead."""
    RELEASED = "released"
    """The process that committed has ended its leadership, and no earlier one leads any more."""


@dataclass(frozen=True, slots=True)
class Note:
    """The metadata of a committed offset: who committed, and how long a successor must wait.

    ``wait_s`` is the maximum seconds for which the process that committed, or a predecessor that it had not
    waited out yet, may lead after the partition was assigned to another one.
    """

    claim: LeadershipClaim
    process: str
    tenure: int
    wait_s: float
    partitions: int

    def encode(self) -> str:
        """Return the commit's metadata."""
        return _dump(self.claim.value, self.process, self.tenure, float(self.wait_s), self.partitions)

    @classmethod
    def decode(cls, metadata: str | None) -> Note | None:
        """Return the note in a commit's metadata; None if it is invalid."""
        parts = _load(metadata, str, str, int, float, int)
        if not parts or parts[0] not in set(LeadershipClaim):
            return None
        return cls(LeadershipClaim(parts[0]), *parts[1:])
