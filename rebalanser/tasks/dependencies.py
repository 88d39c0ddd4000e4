"""Which tasks wait for which others to be complete (SK-5)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from rebalanser.tasks.model import TaskId

REMEMBERED: Final = 65_536
"""How many completions are kept in mind for tasks that come later; others are asked for again."""


class Dependencies:
    """The tasks that wait, and what is known of those that they wait for.

    What they wait for may lie in other partitions. What is complete stays so (SK-10): it is asked for once.
    """

    __slots__ = ("_complete", "_missing", "_remembered", "_unknown", "_waiting")

    def __init__(self) -> None:
        self._missing: dict[TaskId, set[TaskId]] = {}
        self._waiting: dict[TaskId, set[TaskId]] = {}
        self._unknown: dict[TaskId, None] = {}
        self._complete: set[TaskId] = set()
        self._remembered: deque[TaskId] = deque(maxlen=REMEMBERED)

    def __len__(self) -> int:
        return len(self._missing)

    def __contains__(self, task: TaskId) -> bool:
        return task in self._missing

    def add(self, task: TaskId, after: Iterable[TaskId]) -> bool:
        """Let a task wait for what is not known to be complete; False where there is nothing to wait for."""
        missing = {needed for needed in after if needed not in self._complete}
        if not missing:
            return False
        self._missing[task] = missing
        for needed in sorted(missing):
            if needed not in self._waiting:
                self._waiting[needed] = set()
                self._unknown[needed] = None
            self._waiting[needed].add(task)
        return True

    def drop(self, task: TaskId) -> None:
        """A task waits no more, for another reason; it may not have waited."""
        for needed in self._missing.pop(task, ()):
            waiting = self._waiting[needed]
            waiting.discard(task)
            if not waiting:
                del self._waiting[needed]
                self._unknown.pop(needed, None)

    def learn(self, needed: TaskId, *, complete: bool) -> list[TaskId]:
        """Learn whether a task is complete; those come back that wait for nothing any more, oldest first."""
        self._unknown.pop(needed, None)
        if not complete:
            return []
        self._remember(needed)
        freed = []
        for task in self._waiting.pop(needed, ()):
            missing = self._missing[task]
            missing.discard(needed)
            if not missing:
                del self._missing[task]
                freed.append(task)
        return sorted(freed)

    def is_awaited(self, needed: TaskId) -> bool:
        """Whether a task waits for this one."""
        return needed in self._waiting

    def unknown(self, limit: int | None = None) -> list[TaskId]:
        """What must be asked for, in the order of becoming needed, at most ``limit``."""
        if limit is None or len(self._unknown) <= limit:
            return list(self._unknown)
        return [task for task, _ in zip(self._unknown, range(limit), strict=False)]

    def doubt(self) -> None:
        """Changes may have been missed: everything that is waited for must be asked for again."""
        self._unknown.update(dict.fromkeys(self._waiting))

    def _remember(self, needed: TaskId) -> None:
        if needed in self._complete:
            return
        if len(self._remembered) == self._remembered.maxlen:
            self._complete.remove(self._remembered[0])
        self._remembered.append(needed)
        self._complete.add(needed)
