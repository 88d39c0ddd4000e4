"""Retention: the closed tasks that may be deleted, and the times at which they were closed (SK-14, SK-22).
See ``tasks.retention``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final, TypeAlias

from rebalanser.core.tasks.model import OPEN, Status, Stored, TaskId, is_seconds
from rebalanser.errors import InvalidArgument

StoredAt: TypeAlias = tuple[int, int]
"""Partition and revision of a task."""


class Components:
    """Connected components of a queue's tasks, which are added one by one in any order.

    Of each task only its partition, its revision and its component are kept.
    """

    def __init__(self) -> None:
        self._parents: dict[TaskId, TaskId] = {}
        self._closed: dict[TaskId, StoredAt] = {}
        self._kept: set[TaskId] = set()

    def add(self, stored: Stored, *, keep: bool = False) -> None:
        """Add a task; an open one, or one to ``keep``, keeps its whole component from collection."""
        task = stored.head.id
        if stored.state.status not in OPEN and not keep:
            self._closed[task] = (stored.partition, stored.revision)
        else:
            self._kept.add(task)
        for needed in stored.head.after:
            self._join(task, needed)

    def collectable(self) -> Iterator[dict[TaskId, StoredAt]]:
        """Iterate over the components of which no task is kept: the partition and revision of each task.

        A dependency that was not added does not exist. If its dependent is closed, it was collected before.
        """
        kept = {self._root(task) for task in self._kept}
        groups: dict[TaskId, dict[TaskId, StoredAt]] = {}
        for task, where in self._closed.items():
            root = self._root(task)
            if root not in kept:
                groups.setdefault(root, {})[task] = where
        yield from groups.values()

    def _join(self, task: TaskId, other: TaskId) -> None:
        self._parents[self._root(task)] = self._root(other)

    def _root(self, task: TaskId) -> TaskId:
        parents = self._parents
        root = task
        while (parent := parents.get(root, root)) != root:
            root = parent
        while (parent := parents.get(task, root)) != root:
            parents[task], task = root, parent
        return root


@dataclass(frozen=True, slots=True)
class Collected:
    """Counts of a collection: tasks that were deleted, and those that could have changed meanwhile.

    ``dead`` and ``cancelled`` count the deleted ones with that status; the others were complete.
    ``looked_at`` is the number of tasks that were read.
    """

    tasks: int = 0
    changed: int = 0
    dead: int = 0
    cancelled: int = 0
    looked_at: int = 0

    def __add__(self, other: Collected) -> Collected:
        return Collected(
            self.tasks + other.tasks,
            self.changed + other.changed,
            self.dead + other.dead,
            self.cancelled + other.cancelled,
            self.looked_at + other.looked_at,
        )


DAY_S: Final = 86_400.0
DELAY_RATIO: Final = 0.1
"""Maximum delay of a deletion, relative to the time for which the task is kept."""
SHORTEST_INTERVAL_S: Final = 1.0
"""Minimum seconds between two sweeps."""
LONGEST_INTERVAL_S: Final = 600.0
"""Maximum seconds between two sweeps that delete little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Seconds for which closed tasks are kept, by their status; None keeps them for ever (SK-22).

    A task is deleted after that time, at most a tenth of it later while a worker runs, and no sooner than
    5 minutes after it was enqueued, nor before its ``unique_for_s`` is over. It goes together with all tasks
    that it is connected to by dependencies, once each of them may go: open tasks, and what they depend on,
    are never deleted.

    Raises:
        InvalidArgument: a time is negative or no number.
    """

    completed_s: float | None = 7 * DAY_S
    dead_s: float | None = 30 * DAY_S
    cancelled_s: float | None = 7 * DAY_S

    def __post_init__(self) -> None:
        """Refuse invalid times."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not is_seconds(value):
                raise InvalidArgument(f"{each.name} is {value!r}: give seconds of 0 or more, or None")

    def seconds(self, status: Status) -> float | None:
        """Seconds for which a task of this status is kept; None for ever, as for open tasks."""
        match status:
            case Status.COMPLETED:
                return self.completed_s
            case Status.DEAD:
                return self.dead_s
            case Status.CANCELLED:
                return self.cancelled_s
            case _:
                return None

    @property
    def shortest_s(self) -> float | None:
        """The shortest of the times; None if nothing is ever deleted."""
        return min(self._times(), default=None)

    @property
    def longest_s(self) -> float:
        """The longest of the times; 0 if nothing is ever deleted."""
        return max(self._times(), default=0.0)

    def _times(self) -> list[float]:
        times = (self.completed_s, self.dead_s, self.cancelled_s)
        return [each for each in times if each is not None]

    @property
    def interval_s(self) -> float:
        """Seconds between two sweeps."""
        assert self.shortest_s is not None
        return min(max(self.shortest_s * DELAY_RATIO / 2, SHORTEST_INTERVAL_S), LONGEST_INTERVAL_S)


@dataclass(frozen=True, slots=True)
class Mark:
    """A revision of the store as of ``wall`` (seconds since 1970)."""

    wall: float
    revision: int


class Marks(tuple[Mark, ...]):
    """Marks, the earliest first; both of their numbers grow."""

    __slots__ = ()

    def closed_at(self, revision: int) -> float | None:
        """Return the latest time at which a state of this revision was written; None if not known yet."""
        index = bisect_left(self, revision, key=lambda mark: mark.revision)
        return self[index].wall if index < len(self) else None

    def with_mark(self, new: Mark, longest_s: float) -> Marks:
        """Return the marks with a new one, and without those that are no longer needed.

        Two neighbours may be apart by a tenth of the age of the later one. If a clock or a store was set
        back, later marks are dropped.
        """
        known = [each for each in self if each.wall < new.wall and each.revision <= new.revision]
        if not known or known[-1].revision < new.revision:
            known.append(new)
        kept: list[Mark] = []
        for mark in known:
            age_s = new.wall - mark.wall
            if age_s >= longest_s:
                kept.clear()
            while len(kept) > 1 and mark.wall - kept[-2].wall <= age_s * DELAY_RATIO:
                kept.pop()
            kept.append(mark)
        return Marks(kept)
