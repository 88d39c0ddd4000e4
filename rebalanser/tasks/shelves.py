"""The tasks that may be claimed now, by the names of their functions: who asks may know only some (SK-5)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

from rebalanser.tasks.model import Head, TaskId
from rebalanser.tasks.ready import Ready

Rank: TypeAlias = tuple[int, TaskId]
"""What orders tasks, the smallest first: the priority with its sign changed, and the id."""


class Shelves:
    """A :class:`~rebalanser.tasks.ready.Ready` for each name: what nobody asks for is in nobody's way.

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
