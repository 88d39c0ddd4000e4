"""Index of the ready tasks of a partition, by function, the best first (SK-5)."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import Final, TypeAlias

from rebalanser.tasks.model import Head, TaskId

_MIN_GARBAGE: Final = 64


class Ready:
    """Ready tasks of one function: highest priority first, then oldest, that is smallest id.

    Each priority in use has a heap of ids, so a step takes logarithmic time. A dropped task stays in its heap
    until it comes to the top, or until most entries are dropped tasks.
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
        """Add a ready task; adding it again does nothing."""
        if task in self._tasks:
            return
        self._tasks[task] = priority
        self._push(task, priority)
        self._clean()

    def drop(self, task: TaskId) -> None:
        """Remove a task, if it is there."""
        if self._tasks.pop(task, None) is not None:
            self._clean()

    def best(self) -> tuple[TaskId, int] | None:
        """Return the best task and its priority; None if there is none."""
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
        """Return the smallest id; None if there is none. Time grows with the number of priorities only."""
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
"""Sort key of tasks, the best first: the negated priority, and the id."""


class ReadyByName:
    """Ready tasks by function, so that tasks that no worker here knows delay no others.

    The time to find the best task of several functions grows with their number.
    """

    __slots__ = ("_by_name",)

    def __init__(self) -> None:
        self._by_name: dict[str, Ready] = {}

    def names(self) -> list[str]:
        """Return the functions that have ready tasks."""
        return list(self._by_name)

    def has(self, names: Collection[str] | None) -> bool:
        """True if a task of these functions is ready; None for all functions."""
        return bool(self._by_name) if names is None else any(name in self._by_name for name in names)

    def add(self, head: Head) -> None:
        """Add a ready task; adding it again does nothing."""
        ready = self._by_name.get(head.name)
        if ready is None:
            ready = self._by_name[head.name] = Ready()
        ready.add(head.id, head.priority)

    def drop(self, head: Head) -> None:
        """Remove a task, if it is there."""
        ready = self._by_name.get(head.name)
        if ready is not None:
            ready.drop(head.id)
            if not ready:
                del self._by_name[head.name]

    def oldest(self) -> TaskId | None:
        """Return the task with the smallest id; None if there is none."""
        found = (ready.oldest() for ready in self._by_name.values())
        return min((task for task in found if task is not None), default=None)

    def best(self, names: Collection[str] | None = None) -> Rank | None:
        """Return the best task of these functions, None for all; None if there is none."""
        best: Rank | None = None
        for name in self._by_name if names is None else names:
            ready = self._by_name.get(name)
            found = None if ready is None else ready.best()
            if found is not None and (best is None or (-found[1], found[0]) < best):
                best = (-found[1], found[0])
        return best


class Limit:
    """Tasks of one limit: those that count as claimed, and those that are ready (SK-23).

    Only the best ready task is offered, and only while the limit has room.
    """

    __slots__ = ("counted", "heads", "offered", "ready")

    def __init__(self) -> None:
        self.counted: set[TaskId] = set()
        self.ready = Ready()
        self.heads: dict[TaskId, Head] = {}
        self.offered: Head | None = None


class Offers(ReadyByName):
    """Tasks that may be claimed, without those that a limit holds back."""

    __slots__ = ("_is_open", "_limits")

    def __init__(self) -> None:
        super().__init__()
        self._limits: dict[tuple[str, str], Limit] = {}
        self._is_open = False

    def open(self) -> None:
        """Offer limited tasks from now on, as all claimed ones are counted."""
        self._is_open = True
        for limit in self._limits.values():
            self._offer(limit)

    def counted(self) -> list[TaskId]:
        """Return the limited tasks that count as claimed."""
        return [task for limit in self._limits.values() for task in limit.counted]

    def count(self, head: Head) -> None:
        """Count a task as claimed or possibly claimed; counting it again does nothing."""
        if head.max_running:
            limit = self._limit_of(head)
            limit.counted.add(head.id)
            self._offer(limit)

    def uncount(self, head: Head) -> bool:
        """Stop counting a task; True if another one of its limit is then offered."""
        limit = self._limits.get((head.name, head.limit_key)) if head.max_running else None
        if limit is None:
            return False
        limit.counted.discard(head.id)
        self._offer(limit)
        self._clean(head, limit)
        return limit.offered is not None

    def add(self, head: Head) -> None:
        """Add a ready task that waits; adding it again does nothing."""
        if not head.max_running:
            super().add(head)
            return
        limit = self._limit_of(head)
        limit.heads[head.id] = head
        limit.ready.add(head.id, head.priority)
        self._offer(limit)

    def add_claimed(self, head: Head) -> None:
        """Add a task whose claim is over: it still counts as claimed, and may be claimed again."""
        super().add(head)

    def drop(self, head: Head) -> None:
        """Remove a task, if it is there."""
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
        """Offer only the best task of a limit that has room."""
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
