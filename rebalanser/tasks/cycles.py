"""Whether a new task would wait for itself. Only tasks that wait for unknown ones make that possible."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from rebalanser.errors import DependencyCycle
from rebalanser.tasks.model import Head, Stored, TaskId

MAX_ANCESTORS: Final = 10_000
"""How many tasks are looked at to see that a new one does not wait for itself."""
MAX_SETTLED: Final = 100_000
"""How many tasks it is remembered of that all they wait for exists."""


class Ancestry:
    """Looks at what new tasks wait for. May be used from any thread.

    A task never changes what it waits for. So where all that it waits for exists, and all that that waits
    for, no task to come can ever be among it: that need not be looked at again.
    """

    def __init__(self, read: Callable[[Sequence[TaskId]], Mapping[TaskId, Stored]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._settled: set[TaskId] = set()

    def refuse_cycle(self, head: Head, coming: Mapping[TaskId, Head] | None = None) -> None:
        """See that none of the tasks that a new one waits for waits for it.

        ``coming`` are tasks that are enqueued together with it, before it.

        Raises:
            DependencyCycle: one of them does.
        """
        coming = coming or {}
        seen: set[TaskId] = set()
        all_exist = True
        ahead = self._unsettled(head.after)
        while ahead and len(seen) < MAX_ANCESTORS:
            if head.id in ahead:
                raise DependencyCycle(f"task {head.id} would wait for itself")
            seen |= ahead
            there = sorted(ahead - coming.keys())
            stored = self._read(there) if there else {}
            all_exist = all_exist and len(stored) == len(ahead)
            heads = [each.head for each in stored.values()]
            heads += [coming[task] for task in ahead & coming.keys()]
            ahead = self._unsettled(task for each in heads for task in each.after) - seen
        if all_exist and not ahead:
            self._settle(seen)

    def _unsettled(self, tasks: Iterable[TaskId]) -> set[TaskId]:
        with self._lock:
            return {task for task in tasks if task not in self._settled}

    def _settle(self, tasks: set[TaskId]) -> None:
        with self._lock:
            if len(self._settled) > MAX_SETTLED:
                self._settled.clear()
            self._settled |= tasks
