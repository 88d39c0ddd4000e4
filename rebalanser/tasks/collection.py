"""Collection: what is closed, with all that it is connected to by dependencies, may go (SK-14, SK-22).

The tasks of a queue are read page by page, once for their dependencies and once for their states. Those that
neither wait for others nor are waited for are collected as they are met; of the others the connections are
kept in mind until the end, so that the memory it takes grows with the number of dependencies, not of tasks.
The store has the last word: it refuses to delete a task whose state has changed since, or that one more task
has come to wait for.
"""

from __future__ import annotations

import base64
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from rebalanser.errors import UnusableFolder
from rebalanser.folders import make_file
from rebalanser.tasks.context import Context
from rebalanser.tasks.engine import Applied, Collect
from rebalanser.tasks.model import CLOSED_UNDONE, OPEN, Status, Stored, TaskId


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


PAGE: Final = 500
Place = tuple[int, int]
"""The partition and the revision of a task."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Counts of a collection: tasks that were deleted, and those that could have changed meanwhile.

    ``dead`` and ``cancelled`` of the deleted ones were that; the others were complete. ``looked_at`` is how
    many tasks were read.
    """

    tasks: int = 0
    changed: int = 0
    dead: int = 0
    cancelled: int = 0
    looked_at: int = 0

    def __add__(self, other: Collected) -> Collected:
        return Collected(
            self.tasks + other.tasks,
            self.changed + other.changed,
            self.dead + other.dead,
            self.cancelled + other.cancelled,
            self.looked_at + other.looked_at,
        )


def collect(
    context: Context,
    tasks: Callable[[], Iterator[Stored]],
    may_go: Callable[[Stored], bool],
    archive: Archive | None = None,
    at_once: int = PAGE,
) -> Iterator[Collected]:
    """Collect the closed tasks that may go; what was done, after each step that reads or deletes ``at_once``.

    ``tasks`` reads tasks of the queue, each time anew: all of which one could depend on another that may go.
    With an ``archive`` each is written there first.

    Raises:
        RetryLater: the engine was away; what was collected stays so, and collecting again goes on.
    """
    connected: set[TaskId] = set()
    for page in _pages(tasks(), at_once):
        for stored in page:
            if stored.head.after:
                connected.update((stored.head.id, *stored.head.after))
        yield Collected(looked_at=len(page))
    components = Components()
    undone: dict[TaskId, Status] = {}
    """Those of the connected tasks that were dead or cancelled."""
    for page in _pages(tasks(), at_once):
        going = {each.head.id for each in page if each.state.status not in OPEN and may_go(each)}
        for stored in (each for each in page if each.head.id in connected):
            components.add(stored, keep=stored.head.id not in going)
        undone |= _undone(each for each in page if each.head.id in going and each.head.id in connected)
        alone = [each for each in page if each.head.id in going and each.head.id not in connected]
        yield _delete(context, [_place_of(each) for each in alone], _undone(alone), archive)
    for parts in _filled(components.collectable(), at_once):
        yield _delete(context, parts, undone, archive)


def _pages(tasks: Iterator[Stored], size: int) -> Iterator[list[Stored]]:
    while page := list(islice(tasks, size)):
        yield page


def _filled(parts: Iterator[dict[TaskId, Place]], size: int) -> Iterator[list[dict[TaskId, Place]]]:
    """Parts in lists of about ``size`` tasks; a larger part is by itself."""
    filled: list[dict[TaskId, Place]] = []
    tasks = 0
    for part in parts:
        if filled and tasks + len(part) > size:
            yield filled
            filled, tasks = [], 0
        filled.append(part)
        tasks += len(part)
    if filled:
        yield filled


def _undone(tasks: Iterable[Stored]) -> dict[TaskId, Status]:
    return {each.head.id: each.state.status for each in tasks if each.state.status in CLOSED_UNDONE}


def _place_of(stored: Stored) -> dict[TaskId, Place]:
    return {stored.head.id: (stored.partition, stored.revision)}


class Archive:
    """A file of collected tasks, one JSON object a line: the task, its state, its payload and its log.

    A task that could not be deleted after it was written stands there again once it is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, context: Context, ids: Sequence[TaskId]) -> None:
        """Append these tasks, and see to it that they are on the disk before anybody deletes them.

        Raises:
            UnusableFolder: they can't be written there.
        """
        found = context.read(ids)
        payloads = context.engine.payloads(context.queue, ids, context.timeout_s)
        present = [task for task in ids if task in found and task in payloads]
        lines = [json.dumps(_document(context, found[task], payloads[task])) for task in present]
        make_file(self._path)
        try:
            with self._path.open("a") as file:
                file.writelines(line + "\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UnusableFolder(
                f"collected tasks can't be written to {self._path}: {error.strerror}"
            ) from error


def _document(context: Context, stored: Stored, payload: bytes) -> Mapping[str, Any]:
    claims = 0 if stored.state.claim is None else stored.state.claim.number + 1
    log = [asdict(update) for update in context.log(stored.head.id, claims)]
    document = asdict(stored) | {"payload": payload, "log": log}
    return json.loads(json.dumps(document, default=_as_text))  # type: ignore[no-any-return]


def _as_text(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{value!r} has no place in a line of JSON")


def _delete(
    context: Context,
    parts: Sequence[dict[TaskId, Place]],
    undone: Mapping[TaskId, Status],
    archive: Archive | None,
) -> Collected:
    """Delete each part as a whole, or not at all where anything of it has changed."""
    if not parts:
        return Collected()
    if archive is not None:
        archive.write(context, [task for part in parts for task in part])
    answers = context.engine.apply([Collect(context.queue, part) for part in parts], context.timeout_s)
    gone = [
        task
        for part, answer in zip(parts, answers, strict=True)
        if isinstance(answer, Applied)
        for task in part
    ]
    were = Counter(undone[task] for task in gone if task in undone)
    changed = sum(map(len, parts)) - len(gone)
    return Collected(len(gone), changed, were[Status.DEAD], were[Status.CANCELLED])
