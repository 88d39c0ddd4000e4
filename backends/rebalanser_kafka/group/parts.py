"""Values over the message limit, as several records that take effect at the last one.

Each part has the length and the sha256 of its value, the number of parts and its own number. The parts of a
value are in order in the log, between records of others. All of them must be among the last ``REACH``
records. A value whose first part is further back is dropped, by each replica at the same record, wherever it
began to read the log, and whatever the parts of other values are.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import Final

from rebalanser.errors import InvalidSettings, RequestTooLarge

_HEADER: Final = struct.Struct(">4sIIQ32s")
_MAGIC: Final = b"RBc1"
HEADER_BYTES: Final = _HEADER.size
MAX_PARTS: Final = 2**20
REACH: Final = 1000
"""Maximum records from the first part of a value to its last."""


class BadPart(ValueError):
    """The bytes are no part of a value, or contradict the parts of the same value seen before."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a value."""

    index: int
    count: int
    value_bytes: int
    sha256: bytes
    body: bytes


def in_parts(value: bytes, max_bytes: int) -> list[bytes]:
    """Return the value itself if it fits into a record, else its parts."""
    return [value] if len(value) <= max_bytes else split(value, max_bytes)


def split(value: bytes, limit_bytes: int) -> list[bytes]:
    """Split a value into parts of at most ``limit_bytes`` bytes each, header included; at least one part.

    Raises:
        InvalidSettings: the limit leaves no room beside a part's header.
        RequestTooLarge: the value would need more than 2**20 parts.
    """
    room_bytes = limit_bytes - HEADER_BYTES
    if room_bytes < 1:
        raise InvalidSettings(
            f"parts of {limit_bytes} bytes leave no room beside their header of {HEADER_BYTES}"
        )
    count = max(1, -(-len(value) // room_bytes))
    if count > MAX_PARTS:
        raise RequestTooLarge(
            f"{len(value)} bytes in parts of {limit_bytes} are {count} parts; at most {MAX_PARTS} are allowed"
        )
    digest = hashlib.sha256(value).digest()
    return [
        _HEADER.pack(_MAGIC, index, count, len(value), digest)
        + value[index * room_bytes : (index + 1) * room_bytes]
        for index in range(count)
    ]


def read_part(raw: bytes) -> Part:
    """Parse a part made by ``split``.

    Raises:
        BadPart: these bytes are no part.
    """
    if len(raw) < HEADER_BYTES or not raw.startswith(_MAGIC):
        raise BadPart(f"{len(raw)} bytes that do not begin as a part does")
    _, index, count, value_bytes, digest = _HEADER.unpack_from(raw)
    body = raw[HEADER_BYTES:]
    if not 0 < count <= MAX_PARTS or index >= count or len(body) > value_bytes:
        raise BadPart(f"part {index} of {count} with {len(body)} of {value_bytes} bytes is invalid")
    return Part(index, count, value_bytes, digest, body)


@dataclass(slots=True)
class _Unfinished:
    first: int
    bodies: list[bytes] = field(default_factory=list)


class OrderedAssembler:
    """Reassembles a log's values from their parts, record by record."""

    def __init__(self) -> None:
        self._unfinished: dict[bytes, _Unfinished] = {}

    def add(self, offset: int, raw: bytes) -> bytes | None:
        """Add the part at ``offset``; return the value if this was its last part, else None.

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
        """Return the first offset that unfinished values still need; ``following`` if there are none."""
        live = [each.first for each in self._unfinished.values() if each.first > following - REACH]
        return min(live, default=following)
