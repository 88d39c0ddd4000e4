"""The tasks of a partition that may be claimed now: the best first, by function (SK-5)."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import Final, TypeAlias

from rebalanser.tasks.model import Head, TaskId

_MIN_GARBAGE: Final = 64


class Ready:
    """Highest priority first, then the oldest, which is the smallest id; each step in logarithmic time.

    There is a heap of ids for each priority in use. A task that is taken out stays in its heap until it comes
    to the top, or until more than half of all entries are such.
    """

    __slots__ = ("_entries", "_heaps", "_priorities", "_tasks")

    def __init__(self) -> None:
        self._tasks: dict[TaskId, int] = {}
        self._heaps: dict[int, list[TaskId]] = {}
        self._priorities: list[int] = []
        self._entries = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: TaskId, priority: int) -> None:
        """A task is ready; adding it again does nothing."""
        if task in self._tasks:
            return
        self._tasks[task] = priority
        self._push(task, priority)
        self._clean()

    def drop(self, task: TaskId) -> None:
        """A task is not ready any more; it may not have been."""
        if self._tasks.pop(task, None) is not None:
            self._clean()

    def best(self) -> tuple[TaskId, int] | None:
        """The best task and its priority; None where there is none."""
        while self._priorities:
            priority = -self._priorities[0]
            heap = self._heaps[priority]
            while heap:
                if heap[0] in self._tasks:
                    return heap[0], priority
                heapq.heappop(heap)
                self._entries -= 1
            heapq.heappop(self._priorities)
            del self._heaps[priority]
        return None

    def oldest(self) -> TaskId | None:
        """The smallest id of any priority; None where there is none. Takes time with their number only."""
        oldest: TaskId | None = None
        for heap in self._heaps.values():
            while heap and heap[0] not in self._tasks:
                heapq.heappop(heap)
                self._entries -= 1
            if heap and (oldest is None or heap[0] < oldest):
                oldest = heap[0]
        return oldest

    def _push(self, task: TaskId, priority: int) -> None:
        heap = self._heaps.get(priority)
        if heap is None:
            heap = self._heaps[priority] = []
            heapq.heappush(self._priorities, -priority)
        heapq.heappush(heap, task)
        self._entries += 1

    def _clean(self) -> None:
        if self._entries <= 2 * len(self._tasks) + _MIN_GARBAGE:
            return
        self._heaps.clear()
        self._priorities.clear()
        self._entries = 0
        for task, priority in self._tasks.items():
            self._push(task, priority)


Rank: TypeAlias = tuple[int, TaskId]
"""What orders tasks, the smallest first: the priority with its sign changed, and the id."""


class Shelves:
    """A :class:`~rebalanser.tasks.ready_index.Ready` for each name: what nobody asks for is in nobody's way.

    The best task of several names is taken in time that grows with their number.
    """

    __slots__ = ("_shelves",)

    def __init__(self) -> None:
        self._shelves: dict[str, Ready] = {}

    def names(self) -> list[str]:
        """The names of which there are tasks."""
        return list(self._shelves)

    def has(self, names: Collection[str] | None) -> bool:
        """Whether there is a task of one of these names, None being all."""
        return bool(self._shelves) if names is None else any(name in self._shelves for name in names)

    def add(self, head: Head) -> None:
        """A task is ready; adding it again does nothing."""
        shelf = self._shelves.get(head.name)
        if shelf is None:
            shelf = self._shelves[head.name] = Ready()
        shelf.add(head.id, head.priority)

    def drop(self, head: Head) -> None:
        """A task is not ready any more; it may not have been."""
        shelf = self._shelves.get(head.name)
        if shelf is not None:
            shelf.drop(head.id)
            if not shelf:
                del self._shelves[head.name]

    def oldest(self) -> TaskId | None:
        """The task with the smallest id; None where there is none."""
        found = (shelf.oldest() for shelf in self._shelves.values())
        return min((task for task in found if task is not None), default=None)

    def best(self, names: Collection[str] | None = None) -> Rank | None:
        """The best task of these names, None being all; None where there is none."""
        best: Rank | None = None
        for name in self._shelves if names is None else names:
            shelf = self._shelves.get(name)
            found = None if shelf is None else shelf.best()
            if found is not None and (best is None or (-found[1], found[0]) < best):
                best = (-found[1], found[0])
        return best


class Limit:
    """The tasks of one limit: those that count as claimed, and those that wait and are ready (SK-23).

    Of the latter only the best one is offered, and only while there is room.
    """

    __slots__ = ("counted", "heads", "offered", "ready")

    def __init__(self) -> None:
        self.counted: set[TaskId] = set()
        self.ready = Ready()
        self.heads: dict[TaskId, Head] = {}
        self.offered: Head | None = None


class Offers(Shelves):
    """The tasks that may be claimed, without those that a limit holds back: these are in nobody's way."""

    __slots__ = ("_is_open", "_limits")

    def __init__(self) -> None:
        super().__init__()
        self._limits: dict[tuple[str, str], Limit] = {}
        self._is_open = False

    def open(self) -> None:
        """Offer limited tasks from now on: all that are claimed are counted."""
        self._is_open = True
        for limit in self._limits.values():
            self._offer(limit)

    def counted(self) -> list[TaskId]:
        """The limited tasks that count as claimed."""
        return [task for limit in self._limits.values() for task in limit.counted]

    def count(self, head: Head) -> None:
        """Count a task as claimed, or as one that may be; counting it again does nothing."""
        if head.max_running:
            limit = self._limit_of(head)
            limit.counted.add(head.id)
            self._offer(limit)

    def uncount(self, head: Head) -> bool:
        """Count a task no more; True if another one of its limit is offered then."""
        limit = self._limits.get((head.name, head.limit_key)) if head.max_running else None
        if limit is None:
            return False
        limit.counted.discard(head.id)
        self._offer(limit)
        self._clean(head, limit)
        return limit.offered is not None

    def add(self, head: Head) -> None:
        """A task waits and is ready; adding it again does nothing."""
        if not head.max_running:
            super().add(head)
            return
        limit = self._limit_of(head)
        limit.heads[head.id] = head
        limit.ready.add(head.id, head.priority)
        self._offer(limit)

    def add_claimed(self, head: Head) -> None:
        """A task is claimed, and its claim is over: it is counted, and may be claimed anew."""
        super().add(head)

    def drop(self, head: Head) -> None:
        """A task is not ready any more; it may not have been."""
        super().drop(head)
        limit = self._limits.get((head.name, head.limit_key)) if head.max_running else None
        if limit is None:
            return
        limit.ready.drop(head.id)
        limit.heads.pop(head.id, None)
        if limit.offered is not None and limit.offered.id == head.id:
            limit.offered = None
        self._offer(limit)
        self._clean(head, limit)

    def _limit_of(self, head: Head) -> Limit:
        return self._limits.setdefault((head.name, head.limit_key), Limit())

    def _offer(self, limit: Limit) -> None:
        """Offer the best task of a limit that has room, and no other one."""
        best = limit.ready.best()
        head = None if best is None else limit.heads[best[0]]
        if head is not None and (not self._is_open or len(limit.counted) >= head.max_running):
            head = None
        if head is limit.offered:
            return
        if limit.offered is not None:
            super().drop(limit.offered)
        if head is not None:
            super().add(head)
        limit.offered = head

    def _clean(self, head: Head, limit: Limit) -> None:
        if not limit.counted and not limit.heads:
            self._limits.pop((head.name, head.limit_key), None)
