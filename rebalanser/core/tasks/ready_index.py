"""Index of the ready tasks of a partition, by function, the best first (SK-5)."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from itertools import islice
from typing import Final, TypeAlias

from rebalanser.core.tasks.clocks import Timers, full_at
from rebalanser.core.tasks.model import Head, LimitId, Rate, RateMark, TaskId, rate_of
from rebalanser.core.tasks.store import RateStart

_MIN_GARBAGE: Final = 64


class ReadyTasks:
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
        self._by_name: dict[str, ReadyTasks] = {}

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
            ready = self._by_name[head.name] = ReadyTasks()
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


class RateState:
    """The rate of one limit: when a start of it may be claimed (SK-23). Pure.

    One start is written at a time, on the condition that the mark in the store is the one known here. So
    however late a write takes effect, each start has counted those before it.
    """

    __slots__ = ("_before", "_full_at", "pending")

    def __init__(self) -> None:
        self._full_at: float | None = None
        self._before = 0
        self.pending: TaskId | None = None
        """The task whose start is being written."""

    @property
    def is_known(self) -> bool:
        """True if the mark in the store is known, or will be by what is being written."""
        return self._full_at is not None

    def learn(self, mark: RateMark | None, now: float, clock: str) -> None:
        """Take the stored mark, None if there is none, as read not later than ``now``."""
        self._full_at = full_at(mark, now, clock)
        self._before = 0 if mark is None else mark.revision

    def room_at(self, rate: Rate) -> float | None:
        """Return when the next start may be claimed; None while the mark is not known."""
        return None if self._full_at is None else self._full_at - (rate.burst - 1) * rate.every_s

    def start(self, head: Head, now: float, clock: str, wall: float) -> RateStart:
        """Count a start whose claim is requested ``now``."""
        full = max(now if self._full_at is None else self._full_at, now) + rate_of(head.rate_limit).every_s
        self._full_at, self.pending = full, head.id
        debt_s = full - now
        return RateStart(head.limit, self._before, RateMark(debt_s, clock, now, wall + debt_s))

    def ended(self, revision: int | None) -> None:
        """End a start: it was written at this revision, or None if the mark must be read to know."""
        self.pending = None
        if revision is None:
            self._full_at = None
        else:
            self._before = revision


class Limit:
    """Tasks of one limit: those that count as claimed, and those that are ready (SK-23).

    Only the best ready task is offered, and only while the limit has room. ``over`` are tasks with a rate
    whose claims are over: they count as claimed, and wait for the rate only.
    """

    __slots__ = ("counted", "heads", "offered", "over", "pace", "ready")

    def __init__(self) -> None:
        self.counted: set[TaskId] = set()
        self.ready = ReadyTasks()
        self.over = ReadyTasks()
        self.heads: dict[TaskId, Head] = {}
        self.offered: Head | None = None
        self.pace = RateState()


class ClaimableTasks(ReadyByName):
    """Tasks that may be claimed, without those that a limit holds back.

    ``clock`` names the clock of ``now``; see ``PartitionOwner``.
    """

    __slots__ = ("_clock", "_is_open", "_limits", "_now", "_rooms", "_unread")

    def __init__(self, clock: str = "") -> None:
        super().__init__()
        self._clock = clock
        self._now = float("-inf")
        self._limits: dict[LimitId, Limit] = {}
        self._is_open = False
        self._rooms = Timers()
        """Time at which a rate has room again, by the text of the limit."""
        self._unread: dict[LimitId, None] = {}
        """Limits with ready tasks whose marks must be read."""

    def open(self) -> None:
        """Offer limited tasks from now on, as all claimed ones are counted."""
        self._is_open = True
        for limit in self._limits.values():
            self._offer(limit)

    def wake(self, now: float) -> None:
        """Offer what rates allow ``now``."""
        self._now = now
        for text in self._rooms.pop_due(now):
            name, _, limit_key = text.partition("\0")
            limit = self._limits.get((name, limit_key))
            if limit is not None:
                self._offer(limit)

    def next_room(self) -> float | None:
        """Return when a rate has room for a task that it holds back; None if none holds one back."""
        return self._rooms.next()

    def unread_rates(self, limit: int) -> list[LimitId]:
        """List limits whose marks must be read, at most ``limit``."""
        return list(islice(self._unread, limit))

    def learn_rate(self, limit: LimitId, mark: RateMark | None) -> None:
        """Take the stored mark of a limit, None if there is none."""
        self._unread.pop(limit, None)
        found = self._limits.get(limit)
        if found is not None and not found.pace.is_known:
            found.pace.learn(mark, self._now, self._clock)
            self._offer(found)

    def start(self, head: Head, wall: float) -> RateStart | None:
        """Count a start of a task that is claimed now; None if it has no rate."""
        if not head.rate_limit:
            return None
        limit = self._limit_of(head)
        start = limit.pace.start(head, self._now, self._clock, wall)
        self._offer(limit)
        return start

    def start_ended(self, head: Head, revision: int | None) -> None:
        """End a start: its claim was written at this revision, or None if the stored mark must be read."""
        limit = self._limits.get(head.limit)
        if limit is not None and limit.pace.pending == head.id:
            limit.pace.ended(revision)
            self._offer(limit)
            self._clean(head, limit)

    def counted(self) -> list[TaskId]:
        """Return the limited tasks that count as claimed."""
        return [task for limit in self._limits.values() for task in limit.counted]

    def count(self, head: Head) -> None:
        """Count a task as claimed or possibly claimed; counting it again does nothing."""
        if head.is_limited:
            limit = self._limit_of(head)
            limit.counted.add(head.id)
            self._offer(limit)

    def uncount(self, head: Head) -> bool:
        """Stop counting a task; True if another one of its limit is then offered."""
        limit = self._limits.get(head.limit) if head.is_limited else None
        if limit is None:
            return False
        limit.counted.discard(head.id)
        self._offer(limit)
        self._clean(head, limit)
        return limit.offered is not None

    def add(self, head: Head) -> None:
        """Add a ready task that waits; adding it again does nothing."""
        if not head.is_limited:
            super().add(head)
            return
        self._add_to(self._limit_of(head), head, is_over=False)

    def add_claimed(self, head: Head) -> None:
        """Add a task whose claim is over: it still counts as claimed, and may be claimed again."""
        if head.rate_limit:
            self._add_to(self._limit_of(head), head, is_over=True)
        else:
            super().add(head)

    def drop(self, head: Head) -> None:
        """Remove a task, if it is there."""
        super().drop(head)
        limit = self._limits.get(head.limit) if head.is_limited else None
        if limit is None:
            return
        limit.ready.drop(head.id)
        limit.over.drop(head.id)
        limit.heads.pop(head.id, None)
        if limit.offered is not None and limit.offered.id == head.id:
            limit.offered = None
        self._offer(limit)
        self._clean(head, limit)

    def _limit_of(self, head: Head) -> Limit:
        return self._limits.setdefault(head.limit, Limit())

    def _add_to(self, limit: Limit, head: Head, *, is_over: bool) -> None:
        limit.heads[head.id] = head
        (limit.over if is_over else limit.ready).add(head.id, head.priority)
        self._offer(limit)

    def _offer(self, limit: Limit) -> None:
        """Offer only the best task of a limit that has room."""
        head = self._best_of(limit) if self._is_open else None
        if head is not None and head.rate_limit and not self._rate_has_room(limit.pace, head):
            head = None
        if head is limit.offered:
            return
        if limit.offered is not None:
            super().drop(limit.offered)
        if head is not None:
            super().add(head)
        limit.offered = head

    @staticmethod
    def _best_of(limit: Limit) -> Head | None:
        """Return the best task for which the number of claims leaves room."""
        best = limit.ready.best()
        waiting = None if best is None else limit.heads[best[0]]
        if waiting is not None and waiting.max_running and len(limit.counted) >= waiting.max_running:
            waiting = None
        best = limit.over.best()
        over = None if best is None else limit.heads[best[0]]
        if waiting is None or over is None:
            return waiting or over
        return min(waiting, over, key=lambda head: (-head.priority, head.id))

    def _rate_has_room(self, pace: RateState, head: Head) -> bool:
        """True if a start may be claimed now; else note what must be read, or when there is room."""
        if pace.pending is not None:
            return False
        room_at = pace.room_at(rate_of(head.rate_limit))
        if room_at is None:
            self._unread[head.limit] = None
        elif room_at > self._now:
            self._rooms.set("\0".join(head.limit), room_at)
        return room_at is not None and room_at <= self._now

    def _clean(self, head: Head, limit: Limit) -> None:
        if not limit.counted and not limit.heads and limit.pace.pending is None:
            self._limits.pop(head.limit, None)
            self._unread.pop(head.limit, None)
            self._rooms.drop("\0".join(head.limit))
