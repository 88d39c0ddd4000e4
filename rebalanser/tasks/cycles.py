"""Whether a new task would wait for itself. Only tasks that wait for unknown ones make that possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rebalanser.errors import DependencyCycle
from rebalanser.tasks.model import Head, Stored, TaskId

MAX_ANCESTORS: Final = 10_000
"""How many tasks are looked at to see that a new one does not wait for itself."""


def refuse_cycle(
    head: Head,
    read: Callable[[Sequence[TaskId]], Mapping[TaskId, Stored]],
    coming: Mapping[TaskId, Head] | None = None,
) -> None:
    """See that none of the tasks that a new one waits for waits for it.

    ``coming`` are tasks that are enqueued together with it, before it.

    Raises:
        DependencyCycle: one of them does.
    """
    seen: set[TaskId] = set()
    ahead = list(head.after)
    while ahead and len(seen) < MAX_ANCESTORS:
        if head.id in ahead:
            raise DependencyCycle(f"task {head.id} would wait for itself")
        seen.update(ahead)
        heads = [coming[task] for task in ahead if coming and task in coming]
        heads += [stored.head for stored in read(ahead).values()]
        ahead = [task for each in heads for task in each.after if task not in seen]
