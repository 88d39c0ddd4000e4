"""Ids of tasks: their order is the order of time (SK-1).

An id is 160 bits, written as 40 lower-case hexadecimal digits, big-endian::

    milliseconds since 1970   64 bits   never less than in the id before
    counter                   32 bits   0 in a new millisecond, else one more
    host                      48 bits   see rebalanser.tasks.id_files
    process                   16 bits   the process' slot on its host

Pure: the caller gives the time, and keeps what must survive a restart (``tasks.id_files``).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import Final

from rebalanser.core.tasks.model import ID_DIGITS, Head, LimitId, TaskId

MAX_HOST: Final = 2**48 - 1
MAX_PROCESS: Final = 2**16 - 1
_MAX_MS: Final = 2**64 - 1
_MAX_COUNTER: Final = 2**32 - 1
_MS_DIGITS: Final = 16
_FIRST_S: Final = 1_577_836_800.0
"""The year 2020: an id with an earlier time was not made by a clock."""
_TASK_ID: Final = re.compile(f"[0-9a-f]{{{ID_DIGITS}}}")


class Generator:
    """Makes strictly increasing ids, also when ``wall_ms`` steps back. For one thread at a time.

    ``wall_ms`` returns milliseconds since 1970. No id has fewer than ``floor`` milliseconds. Before an id
    reaches ``ceiling`` milliseconds, ``reserve`` is called with the id's milliseconds and returns a higher
    ceiling. If it raises, the generator is unchanged.
    """

    __slots__ = ("_ceiling", "_counter", "_ms", "_reserve", "_suffix", "_wall_ms")

    def __init__(
        self,
        wall_ms: Callable[[], int],
        host: int,
        process: int,
        floor: int = 0,
        *,
        ceiling: int = _MAX_MS + 1,
        reserve: Callable[[int], int] | None = None,
    ) -> None:
        if not 0 <= host <= MAX_HOST or not 0 <= process <= MAX_PROCESS:
            raise ValueError(f"host {host} or process {process} does not fit into an id")
        self._wall_ms = wall_ms
        self._suffix = f"{host:012x}{process:04x}"
        self._ms = floor - 1
        self._counter = _MAX_COUNTER
        self._ceiling = ceiling
        self._reserve = reserve

    def next(self) -> TaskId:
        """Return an id greater than all earlier ones."""
        ms = self._wall_ms()
        counter = 0
        if ms <= self._ms:
            ms, counter = self._ms, self._counter + 1
            if counter > _MAX_COUNTER:
                ms, counter = ms + 1, 0
        if ms >= self._ceiling and self._reserve is not None:
            self._ceiling = self._reserve(ms)
        self._ms, self._counter = ms, counter
        return f"{ms:016x}{counter:08x}{self._suffix}"

    @property
    def floor(self) -> int:
        """Minimum milliseconds of the ids of a generator that follows this one."""
        return self._ms + 1


def is_task_id(text: str) -> bool:
    """True if the text has the format of an id."""
    return _TASK_ID.fullmatch(text) is not None


def created_at(task: TaskId) -> float:
    """Return when an id was made, in seconds since 1970, by the clock of its host."""
    return int(task[:_MS_DIGITS], 16) / 1000


def ready_since(task: TaskId, due: float, wall: float) -> float:
    """Return since when a ready task waits, in seconds since 1970: since its id was made or it was due.

    Never later than ``wall``. Ids with an impossible time are ignored.
    """
    created = created_at(task)
    return min(wall, max(created if created >= _FIRST_S else wall, due))


def lowest_id_at(wall: float) -> TaskId:
    """Return the lowest id of a time, in seconds since 1970."""
    return f"{max(0, int(wall * 1000)):0{_MS_DIGITS}x}".ljust(ID_DIGITS, "0")


def partition_of_task(head: Head, partitions: int) -> int:
    """Return the partition of a task (SK-2): by its id, or by its limit if it has one.

    So all tasks of one limit have one owner, which knows those that are claimed (SK-23).
    """
    return (
        partition_of_limit(head.limit, partitions)
        if head.is_limited
        else partition_of_id(head.id, partitions)
    )


def partition_of_limit(limit: LimitId, partitions: int) -> int:
    """Return the partition of all tasks of a limit."""
    return zlib.crc32("\0".join(limit).encode()) % partitions


def partition_of_id(task: TaskId, partitions: int) -> int:
    """Return the partition of an id, counted from 0 (SK-2). It never changes.

    It is the CRC-32 (of zlib, gzip and PNG) of the id's 20 bytes, modulo the number of partitions.
    """
    return zlib.crc32(bytes.fromhex(task)) % partitions
