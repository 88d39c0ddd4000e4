"""Records of NELI: the stamp in the header of a heartbeat, and the note in the metadata of a commit.

Both are short JSON arrays with a version first. A reader that can't make sense of one takes it for none: a
heartbeat without a stamp is somebody else's, a commit without a note promises nothing.
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
    """Whose heartbeat a record is.

    ``process`` is the id of one incarnation of one process, never used again; ``tenure`` counts what was
    assigned to it (0: the partition was not its own), ``sequence`` what it published. ``partitions`` is
    the partition count that it goes by.
    """

    group: str
    process: str
    tenure: int
    sequence: int
    partitions: int

    def encode(self) -> bytes:
        """The header's value."""
        return _dump(self.group, self.process, self.tenure, self.sequence, self.partitions).encode()

    @classmethod
    def decode(cls, value: bytes | None) -> Stamp | None:
        """The stamp in a header's value; None where it is none."""
        parts = _load(value, str, str, int, int, int)
        return cls(*parts) if parts else None


class LeadershipClaim(StrEnum):
    """State of a partition by its committed offset."""

    HELD = "held"
    """The one who committed may lead."""
    RELEASED = "released"
    """The one who committed has ended its leadership, and nobody before it leads any more."""


@dataclass(frozen=True, slots=True)
class Note:
    """The metadata of a committed offset: who committed, and how long a successor must wait.

    ``wait_s`` is how long the one who committed, or a predecessor it had not waited out yet, may go on
    leading after the partition was assigned to another.
    """

    claim: LeadershipClaim
    process: str
    tenure: int
    wait_s: float
    partitions: int

    def encode(self) -> str:
        """The commit's metadata."""
        return _dump(self.claim.value, self.process, self.tenure, float(self.wait_s), self.partitions)

    @classmethod
    def decode(cls, metadata: str | None) -> Note | None:
        """The note in a commit's metadata; None where it is none."""
        parts = _load(metadata, str, str, int, float, int)
        if not parts or parts[0] not in set(LeadershipClaim):
            return None
        return cls(LeadershipClaim(parts[0]), *parts[1:])
