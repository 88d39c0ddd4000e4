"""Values larger than a record may be: cut into parts, and put together again or not at all.

Every part says which value it belongs to (the value's length and sha256), how many parts there are and which
one it is, so that parts of two values under one key are never mixed. Nothing here knows of topics or keys.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from rebalanser.errors import InvalidSettings, RequestTooLarge

_HEADER: Final = struct.Struct(">4sIIQ32s")
_MAGIC: Final = b"RBc1"
HEADER_BYTES: Final = _HEADER.size
MAX_PARTS: Final = 2**20


class BadPart(ValueError):
    """The bytes are no part of a value, or contradict the parts of the same value seen before."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part: which of how many, of which value, and its bytes."""

    index: int
    count: int
    value_bytes: int
    sha256: bytes
    body: bytes


def split(value: bytes, limit_bytes: int) -> list[bytes]:
    """Cut ``value`` into parts of at most ``limit_bytes`` bytes each, header included; at least one part.

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
    """Take a part made by ``split`` apart.

    Raises:
        BadPart: these bytes are no part.
    """
    if len(raw) < HEADER_BYTES or not raw.startswith(_MAGIC):
        raise BadPart(f"{len(raw)} bytes that do not begin as a part does")
    _, index, count, value_bytes, digest = _HEADER.unpack_from(raw)
    body = raw[HEADER_BYTES:]
    if not 0 < count <= MAX_PARTS or index >= count or len(body) > value_bytes:
        raise BadPart(f"part {index} of {count} with {len(body)} of {value_bytes} bytes makes no sense")
    return Part(index, count, value_bytes, digest, body)


@dataclass(slots=True)
class _Unfinished:
    count: int
    value_bytes: int
    bodies: dict[int, bytes] = field(default_factory=dict)
    held_bytes: int = 0


class Assembler:
    """Puts the parts of several values together, in any order and with repeats.

    It holds at most ``max_values`` unfinished values and ``max_bytes`` bytes of them: what was touched
    longest ago is dropped first, and its other parts then begin it anew. One thread at a time.
    """

    def __init__(self, max_values: int, max_bytes: int) -> None:
        self._max_values = max_values
        self._max_bytes = max_bytes
        self._unfinished: OrderedDict[bytes, _Unfinished] = OrderedDict()
        self._held_bytes = 0

    @property
    def unfinished(self) -> int:
        """How many values are waiting for further parts."""
        return len(self._unfinished)

    @property
    def held_bytes(self) -> int:
        """The bytes of all parts that are waiting."""
        return self._held_bytes

    def add(self, raw: bytes) -> bytes | None:
        """Take one part; answer the whole value once its last missing part has come, else None.

        Raises:
            BadPart: no part, one that contradicts the others of its value, or a value whose bytes do not
                give its sha256; the value is then forgotten.
            RequestTooLarge: the value alone is over ``max_bytes``, with the numbers.
        """
        part = read_part(raw)
        if part.value_bytes > self._max_bytes:
            raise RequestTooLarge(
                f"a value of {part.value_bytes} bytes in parts; at most {self._max_bytes} are put together"
            )
        value = self._unfinished.setdefault(part.sha256, _Unfinished(part.count, part.value_bytes))
        self._unfinished.move_to_end(part.sha256)
        self._keep(part, value)
        if len(value.bodies) == value.count:
            return self._finish(part.sha256, value)
        while len(self._unfinished) > self._max_values or self._held_bytes > self._max_bytes:
            self._forget(next(iter(self._unfinished)))
        return None

    def _keep(self, part: Part, value: _Unfinished) -> None:
        same_shape = (part.count, part.value_bytes) == (value.count, value.value_bytes)
        if not same_shape or value.bodies.get(part.index, part.body) != part.body:
            self._forget(part.sha256)
            raise BadPart(f"part {part.index} of {part.count} contradicts an earlier part of its value")
        if part.index not in value.bodies:
            value.bodies[part.index] = part.body
            value.held_bytes += len(part.body)
            self._held_bytes += len(part.body)
        if value.held_bytes > value.value_bytes:
            self._forget(part.sha256)
            raise BadPart(f"the parts of a value of {value.value_bytes} bytes hold more than that")

    def _finish(self, sha256: bytes, value: _Unfinished) -> bytes:
        self._forget(sha256)
        whole = b"".join(value.bodies[index] for index in range(value.count))
        if len(whole) != value.value_bytes or hashlib.sha256(whole).digest() != sha256:
            raise BadPart(f"{value.count} parts of {len(whole)} bytes do not give the sha256 of their value")
        return whole

    def _forget(self, sha256: bytes) -> None:
        self._held_bytes -= self._unfinished.pop(sha256).held_bytes
