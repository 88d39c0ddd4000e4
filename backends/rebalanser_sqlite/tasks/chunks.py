"""Writes in portions that one transaction takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rebalanser.errors import RequestTooLarge
from rebalanser.tasks.engine import Answer, Collect, EngineCapabilities, Enqueue, Move, Write

if TYPE_CHECKING:
    from rebalanser_sqlite.tasks.writing import Writing

CHUNK_WEIGHT = 500
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """Writes that are carried out together. ``weight`` is about how many rows they change, ``size`` their
    bytes."""

    writes: Sequence[Write]
    weight: int
    size: int

    def carry_out(self, writing: Writing) -> list[Answer]:
        """Do them all, in order."""
        return [writing.carry_out(write) for write in self.writes]


def chunks(writes: Sequence[Write], capabilities: EngineCapabilities) -> list[Chunk]:
    """The writes, in order, in portions; a write that is larger than a portion is one by itself.

    Raises:
        RequestTooLarge: a payload, an update or a result is over its limit.
    """
    return list(_chunks(writes, [_size(write, capabilities) for write in writes]))


def _chunks(writes: Sequence[Write], sizes: Sequence[int]) -> Iterator[Chunk]:
    start = weight = size = 0
    for index, write in enumerate(writes):
        next_weight, next_size = _weight(write), sizes[index]
        if index > start and (weight + next_weight > CHUNK_WEIGHT or size + next_size > CHUNK_BYTES):
            yield Chunk(writes[start:index], weight, size)
            start, weight, size = index, 0, 0
        weight += next_weight
        size += next_size
    if start < len(writes):
        yield Chunk(writes[start:], weight, size)


def _weight(write: Write) -> int:
    match write:
        case Enqueue():
            return 1 + len(write.task.head.after)
        case Collect():
            return len(write.tasks)
        case _:
            return 1


def _size(write: Write, capabilities: EngineCapabilities) -> int:
    if isinstance(write, Enqueue):
        payload = len(write.task.payload)
        _check("payload", payload, capabilities.max_payload_bytes)
        return payload + _result_size(write, capabilities)
    if isinstance(write, Move):
        update = 0 if write.update is None else len(write.update.content)
        _check("update", update, capabilities.max_update_bytes)
        return update + _result_size(write, capabilities)
    return 0


def _result_size(write: Enqueue | Move, capabilities: EngineCapabilities) -> int:
    size = 0 if write.state.result is None else len(write.state.result)
    _check("result", size, capabilities.max_update_bytes)
    return size


def _check(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise RequestTooLarge(f"a {what} has {size} bytes; the limit is {limit}")
