"""Dependencies between tasks (SK-5), until they are settled (``settles``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from rebalanser.core.tasks.model import CLOSED_UNDONE, AfterFailure, Status, TaskId
from rebalanser.core.tasks.rules import fails, settles

MAX_COMPLETIONS: Final = 65_536
"""Maximum number of completions remembered for later tasks; others are read again."""


@dataclass(slots=True)
class _Choice:
    """A task that does not wait for dead or cancelled dependencies.

    ``since`` is its number in the order of such tasks. ``passed`` are the dependencies that it did not wait
    for.
    """

    after_failure: AfterFailure
    since: int
    passed: set[TaskId] = field(default_factory=set)


class Completions:
    """The tasks that were completed last, in all partitions that a process owns."""

    __slots__ = ("_known", "_order")

    def __init__(self) -> None:
        self._known: set[TaskId] = set()
        self._order: deque[TaskId] = deque(maxlen=MAX_COMPLETIONS)

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, task: TaskId) -> bool:
        return task in self._known

    def add(self, task: TaskId) -> None:
        """Remember a completed task, in place of the oldest one if there are too many."""
        if task in self._known:
            return
        if len(self._order) == self._order.maxlen:
            self._known.remove(self._order[0])
        self._order.append(task)
        self._known.add(task)


class Dependencies:
    """Waiting tasks, and the known statuses of their dependencies.

    Dependencies may be in other partitions. A completed task stays complete (SK-10), so it is read once. A
    dead or cancelled task may be requeued, so news of that is only a reason to read it. The answer then
    counts only for tasks that waited when the read began, and only if nothing has changed since.
    """

    __slots__ = (
        "_asked",
        "_choices",
        "_chosen",
        "_complete",
        "_missing",
        "_unknown",
        "_waiting",
    )

    def __init__(self, complete: Completions | None = None) -> None:
        """``complete`` has the completed tasks that others have learnt too."""
        self._missing: dict[TaskId, set[TaskId]] = {}
        self._waiting: dict[TaskId, set[TaskId]] = {}
        self._unknown: dict[TaskId, None] = {}
        self._choices: dict[TaskId, _Choice] = {}
        self._chosen = 0
        self._asked: dict[TaskId, int] = {}
        """Dependencies that are being read, each with the number of the last choice when the read began."""
        self._complete = Completions() if complete is None else complete

    def __len__(self) -> int:
        return len(self._missing)

    def __contains__(self, task: TaskId) -> bool:
        return task in self._missing

    def add(
        self, task: TaskId, after: Iterable[TaskId], after_failure: AfterFailure = AfterFailure.WAIT
    ) -> bool:
        """Let a task wait for dependencies that are not known to be complete; False if there are none."""
        missing = {needed for needed in after if needed not in self._complete}
        if not missing:
            return False
        self._missing[task] = missing
        chooses = after_failure is not AfterFailure.WAIT
        if chooses:
            self._chosen += 1
            self._choices[task] = _Choice(after_failure, self._chosen)
        for needed in sorted(missing):
            if chooses or needed not in self._waiting:
                self._unknown[needed] = None
            self._waiting.setdefault(needed, set()).add(task)
        return True

    def drop(self, task: TaskId) -> None:
        """Stop waiting for a task, for any other reason; no-op if it does not wait."""
        if task not in self._missing and task not in self._choices:  # as most tasks
            return
        choice = self._choices.pop(task, None)
        for needed in (*self._missing.pop(task, ()), *(choice.passed if choice else ())):
            waiting = self._waiting[needed]
            waiting.discard(task)
            if not waiting:
                del self._waiting[needed]
                self._unknown.pop(needed, None)
                self._asked.pop(needed, None)

    def completed(self, needed: TaskId) -> list[TaskId]:
        """Learn that a task is complete; return the tasks that wait no more, oldest first."""
        self._complete.add(needed)
        if needed not in self._waiting:
            return []
        self._unknown.pop(needed, None)
        self._asked.pop(needed, None)
        freed = []
        for task in self._waiting.pop(needed):
            missing = self._missing[task]
            missing.discard(needed)
            if task in self._choices:
                self._choices[task].passed.discard(needed)
            if not missing:
                freed.append(task)
        for task in freed:
            self.drop(task)
        return sorted(freed)

    def answered(self, needed: TaskId, status: Status | None) -> list[TaskId]:
        """Learn a status that was read, None if there is no such task; return the tasks that wait no more."""
        if status is Status.COMPLETED:
            return self.completed(needed)
        asked = self._asked.pop(needed, 0)
        choosing = self._choosing(needed)
        known = [task for task in choosing if self._choices[task].since <= asked]
        if len(known) == len(choosing):
            self._unknown.pop(needed, None)
        freed = [task for task in known if self._waits_no_more(task, needed, status)]
        for task in freed:
            self.drop(task)
        return sorted(freed)

    def learn_unfinished(self, needed: TaskId, status: Status) -> bool:
        """Take news of a task that is not complete; True if it must be read again."""
        choosing = self._choosing(needed)
        if not choosing:
            return False
        is_reopened = False
        if status not in CLOSED_UNDONE:
            for task in choosing:
                passed = self._choices[task].passed
                if needed in passed:
                    passed.remove(needed)
                    self._missing[task].add(needed)
                    is_reopened = True
        if is_reopened or status in CLOSED_UNDONE or needed in self._asked:
            self._asked.pop(needed, None)
            self._unknown[needed] = None
            return True
        return False

    @property
    def awaited(self) -> Container[TaskId]:
        """The tasks that others wait for; a live view."""
        return self._waiting

    def unknown(self, limit: int | None = None) -> list[TaskId]:
        """List the unknown dependencies, the longest needed first, at most ``limit``."""
        return list(islice(self._unknown, limit))

    def ask(self, limit: int | None = None) -> list[TaskId]:
        """List ``unknown`` dependencies for a read that begins now."""
        asked = self.unknown(limit)
        if self._choices:
            self._asked.update(dict.fromkeys(asked, self._chosen))
        return asked

    def doubt(self) -> None:
        """Mark all dependencies as unknown, as changes may have been missed."""
        self._asked.clear()
        self._unknown.update(dict.fromkeys(self._waiting))

    def _choosing(self, needed: TaskId) -> list[TaskId]:
        """Return the tasks with a choice that wait for this one, or would if it had not failed."""
        waiting = self._waiting.get(needed, ()) if self._choices else ()
        return [task for task in waiting if task in self._choices]

    def _waits_no_more(self, task: TaskId, needed: TaskId, status: Status | None) -> bool:
        choice, missing = self._choices[task], self._missing[task]
        if settles(status, choice.after_failure):
            missing.discard(needed)
            choice.passed.add(needed)
        elif needed in choice.passed:
            choice.passed.remove(needed)
            missing.add(needed)
        return not missing or fails(status, choice.after_failure)
