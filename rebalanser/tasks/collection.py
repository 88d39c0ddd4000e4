"""Collection: what is complete, with all that it is connected to by dependencies, may go (SK-14).

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rebalanser.errors import UnusableFolder
from rebalanser.folders import make_file
from rebalanser.tasks.components import Components
from rebalanser.tasks.context import Context
from rebalanser.tasks.engine import Applied, Collect
from rebalanser.tasks.flakes import born_at
from rebalanser.tasks.model import Status, Stored, TaskId

PAGE: Final = 500
Place = tuple[int, int]
"""The partition and the revision of a task."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection has done: how many tasks went, and how many that could have changed meanwhile."""

    tasks: int = 0
    changed: int = 0

    def __add__(self, other: Collected) -> Collected:
        return Collected(self.tasks + other.tasks, self.changed + other.changed)


def collect(
    context: Context,
    tasks: Callable[[], Iterator[Stored]],
    older_than_s: float,
    archive: Archive | None = None,
) -> Collected:
    """Collect what was enqueued longer ago than ``older_than_s`` seconds and may go; what was done.

    Where that is 0 all that is complete may go, also with an id whose time is yet to come.

    ``tasks`` reads all tasks of the queue, each time anew. With an ``archive`` each is written there first.

    Raises:
        RetryLater: the engine was away; what was collected stays so, and collecting again goes on.
    """
    before = context.clock.wall() - older_than_s
    connected: set[TaskId] = set()
    for stored in tasks():
        if stored.head.after:
            connected.update((stored.head.id, *stored.head.after))
    components = Components()
    done = Collected()
    alone: list[Stored] = []
    for stored in tasks():
        is_young = older_than_s > 0 and born_at(stored.head.id) > before
        if stored.head.id in connected:
            components.add(stored, keep=is_young)
        elif stored.state.status is Status.COMPLETED and not is_young:
            alone.append(stored)
            if len(alone) == PAGE:
                done += _delete(context, [_place_of(each) for each in alone], archive)
                alone.clear()
    done += _delete(context, [_place_of(each) for each in alone], archive)
    for component in components.collectable():
        done += _delete(context, [component], archive)
    return done


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


def _place_of(stored: Stored) -> dict[TaskId, Place]:
    return {stored.head.id: (stored.partition, stored.revision)}


def _delete(context: Context, parts: Sequence[dict[TaskId, Place]], archive: Archive | None) -> Collected:
    """Delete each part as a whole, or not at all where anything of it has changed."""
    if not parts:
        return Collected()
    if archive is not None:
        archive.write(context, [task for part in parts for task in part])
    answers = context.engine.apply([Collect(context.queue, part) for part in parts], context.timeout_s)
    gone = [isinstance(answer, Applied) for answer in answers]
    tasks = sum(len(part) for part, is_gone in zip(parts, gone, strict=True) if is_gone)
    return Collected(tasks, sum(map(len, parts)) - tasks)
