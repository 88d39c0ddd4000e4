"""Dependencies between tasks (SK-5); :func:`~rebalanser.tasks.rules.settles` says until when."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Final

from rebalanser.tasks.model import CLOSED_UNDONE, AfterFailure, Status, TaskId
from rebalanser.tasks.rules import fails, settles

REMEMBERED: Final = 65_536
"""Maximum number of completions remembered for later tasks; others are read again."""


@dataclass(slots=True)
class _Choice:
    """A task that does not wait for what is dead or cancelled.

    ``since`` is its number in the order of such tasks. ``passed`` are those that it would wait for otherwise.
    """

    after_failure: AfterFailure
    since: int
    passed: set[TaskId] = field(default_factory=set)


class Completions:
    """The tasks that were completed last; those of all partitions that a process owns are the same."""

    __slots__ = ("_known", "_order")

    def __init__(self) -> None:
        self._known: set[TaskId] = set()
        self._order: deque[TaskId] = deque(maxlen=REMEMBERED)

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
    """The tasks that wait, and what is known of those that they wait for.

    What they wait for may lie in other partitions. What is complete stays so (SK-10): it is asked for once.
    What is dead or cancelled may be requeued. So news of that are only a reason to ask, and an answer counts
    only for the tasks that waited when the question was asked, and only if nothing has changed since.
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
        """``complete`` is what others have learnt too."""
        self._missing: dict[TaskId, set[TaskId]] = {}
        self._waiting: dict[TaskId, set[TaskId]] = {}
        self._unknown: dict[TaskId, None] = {}
        self._choices: dict[TaskId, _Choice] = {}
        self._chosen = 0
        self._asked: dict[TaskId, int] = {}
        """The number of the last choice when a question was asked that is not answered."""
        self._complete = Completions() if complete is None else complete

    def __len__(self) -> int:
        return len(self._missing)

    def __contains__(self, task: TaskId) -> bool:
        return task in self._missing

    def add(
        self, task: TaskId, after: Iterable[TaskId], after_failure: AfterFailure = AfterFailure.WAIT
    ) -> bool:
        """Let a task wait for what is not known to be complete; False where there is nothing to wait for."""
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
        """A task waits no more, for another reason; it may not have waited."""
        choice = self._choices.pop(task, None)
        for needed in (*self._missing.pop(task, ()), *(choice.passed if choice else ())):
            waiting = self._waiting[needed]
            waiting.discard(task)
            if not waiting:
                del self._waiting[needed]
                self._unknown.pop(needed, None)
                self._asked.pop(needed, None)

    def completed(self, needed: TaskId) -> list[TaskId]:
        """Learn that a task is complete; those come back that wait for nothing any more, oldest first."""
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
        """Learn what a task is, None if there is none; those that wait no more come back, oldest first."""
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

    def heard(self, needed: TaskId, status: Status) -> bool:
        """Take news of a task that is not complete; True if it must be asked for, as that may matter."""
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
        """The tasks that others wait for; it follows every change."""
        return self._waiting

    def unknown(self, limit: int | None = None) -> list[TaskId]:
        """List the unknown dependencies, the longest needed first, at most ``limit``."""
        if limit is None or len(self._unknown) <= limit:
            return list(self._unknown)
        return [task for task, _ in zip(self._unknown, range(limit), strict=False)]

    def ask(self, limit: int | None = None) -> list[TaskId]:
        """As :meth:`unknown`, for a read that is sent from now on."""
        asked = self.unknown(limit)
        if self._choices:
            self._asked.update(dict.fromkeys(asked, self._chosen))
        return asked

    def doubt(self) -> None:
        """Changes may have been missed: everything that is waited for must be asked for again."""
        self._asked.clear()
        self._unknown.update(dict.fromkeys(self._waiting))

    def _choosing(self, needed: TaskId) -> list[TaskId]:
        """The tasks with a choice that wait for this one, or would if it were not dead or cancelled."""
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
