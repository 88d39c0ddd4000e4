"""Times at which something is to be looked at, one for each task."""

from __future__ import annotations

import heapq
from typing import Final

from rebalanser.tasks.model import TaskId

_MIN_GARBAGE: Final = 64


class Timers:
    """The task whose time comes first, in logarithmic time. A time may be put off without a cost.

    The heap holds entries that no longer count, never more than the tasks and a few: an entry that comes too
    early goes back with the time that holds now, one whose task is gone is dropped.
    """

    __slots__ = ("_heap", "_times")

    def __init__(self) -> None:
        self._times: dict[TaskId, float] = {}
        self._heap: list[tuple[float, TaskId]] = []

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, task: TaskId) -> bool:
        return task in self._times

    def __getitem__(self, task: TaskId) -> float:
        return self._times[task]

    def set(self, task: TaskId, at: float) -> None:
        """Look at a task at this time, in place of an earlier or later one."""
        before = self._times.get(task)
        self._times[task] = at
        if before is None or at < before:
            heapq.heappush(self._heap, (at, task))
            self._clean()

    def drop(self, task: TaskId) -> None:
        """A task needs no look any more; it may have none."""
        if self._times.pop(task, None) is not None:
            self._clean()

    def pop_due(self, now: float) -> list[TaskId]:
        """The tasks whose time has come, the earliest first; they have no time any more."""
        due = []
        while (first := self.next()) is not None and first <= now:
            _, task = heapq.heappop(self._heap)
            del self._times[task]
            due.append(task)
        return due

    def next(self) -> float | None:
        """The first time, None where there is none."""
        heap, times = self._heap, self._times
        while heap:
            at, task = heap[0]
            holds = times.get(task)
            if holds == at:
                return at
            if holds is None or holds < at:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (holds, task))
        return None

    def _clean(self) -> None:
        if len(self._heap) > 2 * len(self._times) + _MIN_GARBAGE:
            self._heap = [(at, task) for task, at in self._times.items()]
            heapq.heapify(self._heap)
