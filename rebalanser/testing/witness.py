"""An observer outside of the protocol that records accesses of processes to resources.

Processes on one host record the begin and the end of their access, each line in one append to a common file,
on the one clock that all of them share. The group under test takes no part in it, so that a fault of the
group cannot hide itself here. A process that is killed writes nothing any more; its killer reports it with
``Witness.died``.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from rebalanser.core.clock import Clock
from rebalanser.runtime.clock import SystemClock


class Sight(StrEnum):
    """Observations of a process."""

    ENTERED = "entered"
    RETURNED = "returned"
    DIED = "died"


@dataclass(frozen=True, slots=True)
class Sighting:
    """One line of the witness's file; ``at`` in seconds of the host's CLOCK_BOOTTIME."""

    sight: Sight
    at: float
    pid: int
    resource: str = ""
    node: str = ""
    token: int = 0


@dataclass(frozen=True, slots=True)
class Access:
    """One node's access to a resource, from ``began`` to ``ended`` (infinite if it has not ended)."""

    resource: str
    node: str
    token: int
    pid: int
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two accesses to one resource at once; ``first`` began no later than ``second``."""

    first: Access
    second: Access

    @property
    def duration_s(self) -> float:
        """Seconds for which both had access."""
        return min(self.first.ended, self.second.ended) - self.second.began

    @property
    def fenced(self) -> bool:
        """True if a resource that checks tokens refuses the first of the two after the second has come."""
        return self.first.token < self.second.token

    def __str__(self) -> str:
        first, second = self.first, self.second
        return (
            f"{first.resource}: {first.node} (pid {first.pid}, token {first.token}) and "
            f"{second.node} (pid {second.pid}, token {second.token}) for {self.duration_s:.3f} s"
        )


@dataclass(frozen=True, slots=True)
class WitnessVerdict:
    """Conclusion of the witness."""

    accesses: tuple[Access, ...]
    """All accesses, by when they began."""
    overlaps: tuple[Overlap, ...]
    """Accesses of two at once: none unless something was paused beyond its lease (RB-1)."""
    disorders: tuple[tuple[Access, Access], ...]
    """Successive accesses to one resource whose tokens do not grow: never (RB-12).

    A node that stops and starts anew under the barrier that it still holds keeps its token (RB-41).
    """

    @property
    def unfenced_overlaps(self) -> tuple[Overlap, ...]:
        """The overlaps that a resource does not survive even if it checks tokens: never (RB-1)."""
        return tuple(overlap for overlap in self.overlaps if not overlap.fenced)


class Witness:
    """Records accesses in the file at ``path``, which many processes and threads may share."""

    def __init__(self, path: Path | str, clock: Clock | None = None) -> None:
        self._path = Path(path)
        self._clock = clock or SystemClock()

    def entered(self, resource: str, node: str, token: int) -> None:
        """Record that this process has access from now on. Call it first in the handler."""
        self._append(Sighting(Sight.ENTERED, self._clock.now(), os.getpid(), resource, node, token))

    def returned(self, resource: str, node: str, token: int) -> None:
        """Record that this process has no access any more. Call it last in the handler."""
        self._append(Sighting(Sight.RETURNED, self._clock.now(), os.getpid(), resource, node, token))

    @contextmanager
    def watching(self, resource: str, node: str, token: int) -> Iterator[None]:
        """Record an access that lasts as long as the context."""
        self.entered(resource, node, token)
        try:
            yield
        finally:
            self.returned(resource, node, token)

    def died(self, pid: int, at: float | None = None) -> None:
        """Record that process ``pid`` was dead at ``at`` (seconds of CLOCK_BOOTTIME, default now)."""
        self._append(Sighting(Sight.DIED, self._clock.now() if at is None else at, pid))

    def _append(self, sighting: Sighting) -> None:
        """Append a line in one write: lines of several processes never mix."""
        line = json.dumps(asdict(sighting)).encode() + b"\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            if os.write(descriptor, line) != len(line):
                raise OSError(f"{self._path}: a line was written in part")
        finally:
            os.close(descriptor)

    def check(self) -> WitnessVerdict:
        """Compare all accesses so far with each other.

        Raises:
            ValueError: a line can't be read, or ends an access that never began.
        """
        accesses = _accesses(self._sightings())
        by_resource: dict[str, list[Access]] = defaultdict(list)
        for access in accesses:
            by_resource[access.resource].append(access)
        return WitnessVerdict(
            accesses=accesses,
            overlaps=tuple(overlap for each in by_resource.values() for overlap in _overlaps(each)),
            disorders=tuple(
                (before, after)
                for each in by_resource.values()
                for before, after in pairwise(each)
                if after.token < before.token
                or (after.token == before.token and not _same_owner(before, after))
            ),
        )

    def _sightings(self) -> Iterator[Sighting]:
        if not self._path.exists():
            return
        with self._path.open() as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield _sighting(json.loads(line))
                except (TypeError, ValueError, KeyError) as error:
                    raise ValueError(f"{self._path}, line {number}: {error}") from error


def _sighting(fields: Mapping[str, Any]) -> Sighting:
    return Sighting(**{**fields, "sight": Sight(fields["sight"])})


def _accesses(sightings: Iterable[Sighting]) -> tuple[Access, ...]:
    """Pair each beginning with its end, which is the death of its process if that came first."""
    begun: dict[tuple[int, str, str, int], float] = {}
    done: list[Access] = []

    def end(key: tuple[int, str, str, int], at: float) -> None:
        pid, resource, node, token = key
        done.append(Access(resource, node, token, pid, begun.pop(key), at))

    for seen in sorted(sightings, key=lambda seen: seen.at):
        key = (seen.pid, seen.resource, seen.node, seen.token)
        match seen.sight:
            case Sight.ENTERED:
                if key in begun:
                    raise ValueError(f"{seen} begins an access that has begun already")
                begun[key] = seen.at
            case Sight.RETURNED:
                if key not in begun:
                    raise ValueError(f"{seen} ends an access that never began")
                end(key, seen.at)
            case Sight.DIED:
                for own in [key for key in begun if key[0] == seen.pid]:
                    end(own, seen.at)
    for key in list(begun):
        end(key, inf)
    return tuple(sorted(done, key=lambda access: (access.began, access.ended)))


def _same_owner(before: Access, after: Access) -> bool:
    return (before.pid, before.node) == (after.pid, after.node) and before.ended <= after.began


def _overlaps(accesses: Iterable[Access]) -> Iterator[Overlap]:
    """All pairs of accesses to one resource, given in the order in which they began, that overlap."""
    open_ones: list[Access] = []
    for access in accesses:
        open_ones = [earlier for earlier in open_ones if earlier.ended > access.began]
        yield from (Overlap(earlier, access) for earlier in open_ones)
        open_ones.append(access)
