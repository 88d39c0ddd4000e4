"""Requests over the message limit, as several records that take effect at the last one.

The parts of a value (``rebalanser_kafka.chunks``) are in order in the log, between records of others. All of
them must be among the last ``REACH`` records. A value whose first part is further back is dropped, by each
replica at the same record, wherever it began to read the log, and whatever the parts of other values are.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final

from rebalanser_kafka.chunks import BadPart, read_part, split

REACH: Final = 1000
"""Records between the first part of a value and its last, at most."""


def in_parts(value: bytes, max_bytes: int) -> list[bytes]:
    """The value itself where it fits into a record, else its parts."""
    return [value] if len(value) <= max_bytes else split(value, max_bytes)


@dataclass(slots=True)
class _Unfinished:
    first: int
    bodies: list[bytes] = field(default_factory=list)


class OrderedAssembler:
    """Puts the parts of a log's values together again, record by record."""

    def __init__(self) -> None:
        self._unfinished: dict[bytes, _Unfinished] = {}

    def add(self, offset: int, raw: bytes) -> bytes | None:
        """What the part at ``offset`` makes whole, None while there is more to come.

        Raises:
            BadPart: it is no part, or does not follow the one before.
        """
        for name in [n for n, each in self._unfinished.items() if each.first <= offset - REACH]:
            del self._unfinished[name]
        part = read_part(raw)
        if part.index == 0:
            self._unfinished[part.sha256] = _Unfinished(offset)
        value = self._unfinished.get(part.sha256)
        if value is None or len(value.bodies) != part.index:
            self._unfinished.pop(part.sha256, None)
            raise BadPart(f"part {part.index} of {part.count} does not follow the one before")
        value.bodies.append(part.body)
        if len(value.bodies) < part.count:
            return None
        del self._unfinished[part.sha256]
        whole = b"".join(value.bodies)
        if hashlib.sha256(whole).digest() != part.sha256:
            raise BadPart(f"{part.count} parts do not give the sha256 of their value")
        return whole

    def oldest_needed(self, following: int) -> int:
        """The offset from which on records are needed to go on, ``following`` being the next one."""
        live = [each.first for each in self._unfinished.values() if each.first > following - REACH]
        return min(live, default=following)
