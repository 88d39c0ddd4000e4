"""Ancestors of tasks: finds cycles, and dead or cancelled tasks that others wait for.

Only tasks that wait for unknown ones make a cycle possible.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, TypeAlias

from rebalanser.core.tasks.model import CLOSED_UNDONE, Head, Status, Stored, TaskId
from rebalanser.core.tasks.rules import settles
from rebalanser.errors import DependencyCycle

MAX_ANCESTORS: Final = 10_000
"""Maximum number of ancestors that are searched for a cycle."""
MAX_READS: Final = 100
"""Maximum number of reads of the store for one new task; each goes one step further back."""
MAX_REMEMBERED: Final = 100_000
"""Maximum number of tasks whose dependencies are cached."""

MAX_BLOCKERS: Final = 10
"""Maximum number of dead or cancelled tasks that are reported for one that waits for them."""
_PAGE: Final = 500

Read: TypeAlias = Callable[[Sequence[TaskId]], Mapping[TaskId, Stored]]
"""Reads tasks; the answer has those that exist."""


class Ancestry:
    """Checks the ancestors of new tasks. May be used from any thread.

    The dependencies of a task never change, so they are read once. If all ancestors of a task exist, no new
    task can be among them, so it is not searched again.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._settled: set[TaskId] = set()
        self._known: dict[TaskId, tuple[TaskId, ...]] = {}

    def refuse_cycle(self, head: Head, coming: Mapping[TaskId, Head] | None = None) -> None:
        """Refuse a new task that waits for itself.

        ``coming`` are tasks that are enqueued together with it, before it. The search ends after
        ``MAX_READS`` reads; the next task with the same dependencies continues there.

        Raises:
            DependencyCycle: a dependency waits for the new task.
        """
        if not head.after:
            return
        coming = coming or {}
        seen: set[TaskId] = set()
        all_exist = True
        ahead = self._unsettled(head.after)
        reads = 0
        while ahead and len(seen) < MAX_ANCESTORS and reads < MAX_READS:
            if head.id in ahead:
                raise DependencyCycle(f"task {head.id} would wait for itself")
            seen |= ahead
            after = {task: coming[task].after for task in ahead & coming.keys()}
            all_exist = all_exist and not after
            after.update(self._remembered(ahead - after.keys()))
            if unread := sorted(ahead - after.keys()):
                reads += 1
                found = {task: each.head.after for task, each in self._read(unread).items()}
                all_exist = all_exist and len(found) == len(unread)
                self._remember(found)
                after.update(found)
            ahead = self._unsettled(task for tasks in after.values() for task in tasks) - seen
        if all_exist and not ahead:
            self._settle(seen)

    def _unsettled(self, tasks: Iterable[TaskId]) -> set[TaskId]:
        with self._lock:
            return {task for task in tasks if task not in self._settled}

    def _settle(self, tasks: set[TaskId]) -> None:
        with self._lock:
            if len(self._settled) > MAX_REMEMBERED:
                self._settled.clear()
            self._settled |= tasks
            for task in tasks:
                self._known.pop(task, None)

    def _remembered(self, tasks: Iterable[TaskId]) -> dict[TaskId, tuple[TaskId, ...]]:
        with self._lock:
            return {task: self._known[task] for task in tasks if task in self._known}

    def _remember(self, after: Mapping[TaskId, tuple[TaskId, ...]]) -> None:
        with self._lock:
            if len(self._known) > MAX_REMEMBERED:
                self._known.clear()
            self._known.update(after)


def with_blockers(tasks: Iterable[Stored], read: Read) -> Iterator[tuple[Stored, tuple[Stored, ...]]]:
    """Iterate over tasks, each with the dead and cancelled tasks that it waits for, directly or not.

    Tasks are read in pages of 500, with at most ``MAX_ANCESTORS`` ancestors for a page. Each task comes
    with at most ``MAX_BLOCKERS``.
    """
    left = iter(tasks)
    while page := list(islice(left, _PAGE)):
        known = _ancestors(page, read)
        for each in page:
            yield each, _blockers(each, known)


def _ancestors(tasks: Sequence[Stored], read: Read) -> dict[TaskId, Stored]:
    """Read the ancestors of tasks."""
    known: dict[TaskId, Stored] = {}
    asked: set[TaskId] = set()
    ahead = {needed for each in tasks for needed in _awaited(each)}
    while ahead and len(asked) < MAX_ANCESTORS:
        some = sorted(ahead)[:_PAGE]
        found = read(some)
        known.update(found)
        asked.update(some)
        ahead |= {needed for each in found.values() for needed in _awaited(each)}
        ahead -= asked
    return known


def _blockers(task: Stored, known: Mapping[TaskId, Stored]) -> tuple[Stored, ...]:
    blockers: list[Stored] = []
    seen: set[TaskId] = set()
    ahead = [(needed, task.head.after_failure) for needed in _awaited(task)]
    while ahead and len(blockers) < MAX_BLOCKERS and len(seen) < _PAGE:
        needed, after_failure = ahead.pop()
        found = known.get(needed)
        if found is None or needed in seen or settles(found.state.status, after_failure):
            continue
        seen.add(needed)
        if found.state.status in CLOSED_UNDONE:
            blockers.append(found)
        ahead += [(each, found.head.after_failure) for each in _awaited(found)]
    return tuple(blockers)


def _awaited(task: Stored) -> tuple[TaskId, ...]:
    """Return the dependencies that a task may still wait for; none once it was claimed."""
    waits = task.state.status is Status.WAITING and task.state.claim is None
    return task.head.after if waits else ()
