"""Which tasks may be collected: those connected by dependencies, all of which are closed (SK-14, SK-22)."""

from __future__ import annotations

from collections.abc import Iterator

from rebalanser.tasks.model import OPEN, Stored, TaskId


class Components:
    """Tasks of one queue, told one by one in any order, put together by what they depend on.

    Of each task only what is needed is kept: where it lies, its revision, and with whom it goes.
    """

    def __init__(self) -> None:
        self._parents: dict[TaskId, TaskId] = {}
        self._closed: dict[TaskId, tuple[int, int]] = {}
        self._kept: set[TaskId] = set()

    def add(self, stored: Stored, *, keep: bool = False) -> None:
        """Tell of a task; one that is open, or to ``keep``, is not collected, nor is what goes with it."""
        task = stored.head.id
        if stored.state.status not in OPEN and not keep:
            self._closed[task] = (stored.partition, stored.revision)
        else:
            self._kept.add(task)
        for needed in stored.head.after:
            self._join(task, needed)

    def collectable(self) -> Iterator[dict[TaskId, tuple[int, int]]]:
        """Each component of which no task is kept: the partition and revision of its tasks.

        A task that others depend on and that was not told of has been collected, or never was: where one that
        depends on it is closed, it is the former.
        """
        kept = {self._root(task) for task in self._kept}
        groups: dict[TaskId, dict[TaskId, tuple[int, int]]] = {}
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
