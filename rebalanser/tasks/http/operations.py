"""Requests of producers and operators over HTTP."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Final

from pydantic import BaseModel

from rebalanser.core.fields import fields_for
from rebalanser.core.tasks.failures import concerning
from rebalanser.core.tasks.model import OPEN, Enqueued, Status, Stored, TaskId
from rebalanser.core.tasks.store import Enqueue
from rebalanser.tasks.documents import FullTaskDocument, TaskDocument, UpdateDocument
from rebalanser.tasks.functions import EnqueueOptions, TaskOptions
from rebalanser.tasks.http.messages import ChangedCounts, NewTask, Selection
from rebalanser.tasks.http.problems import INVALID, ProblemRaised
from rebalanser.tasks.operator import MAX_ROOMS
from rebalanser.tasks.queue import Queue
from rebalanser.tasks.results import with_sources

PAGE: Final = 1000
"""Maximum number of tasks that are read at once."""


def enqueue(queue: Queue, task: NewTask) -> Enqueued[Any]:
    """Store a task for good, or in the outbox of the queue; return its id.

    Raises:
        InvalidName, InvalidTask, TaskExists, UnknownTask, DependencyCycle, RequestTooLarge: as Queue.commit
            does.
    """
    return queue.commit_one(_made(queue, task))


def enqueue_batch(queue: Queue, tasks: Sequence[NewTask], *, together: bool) -> list[Enqueued[Any]]:
    """Store tasks, ``together`` all or none, as ``enqueue``; an error of one names its place."""
    places = [f"body.tasks.{number}" for number in range(len(tasks))]
    made: list[Enqueue] = []
    for place, each in zip(places, tasks, strict=True):
        with concerning(place):
            made.append(_made(queue, each))
    return queue.commit(made, together=together, places=places)


def _made(queue: Queue, task: NewTask) -> Enqueue:
    options = EnqueueOptions(**fields_for(EnqueueOptions, task), task_id=task.id)
    return queue.build_raw_enqueue(
        task.name,
        with_sources(task.payload.content(), task.results),
        options,
        **fields_for(TaskOptions, task),
    )


def full_document(queue: Queue, task: TaskId, at_least: int = 0) -> FullTaskDocument:
    """Return a task with its payload, not older than revision ``at_least`` (SK-11)."""
    ((stored, blockers),) = queue.with_blockers([queue.get(task, at_least=at_least)])
    room = queue.rooms([stored]).get(task)
    return FullTaskDocument.with_payload(stored, queue.payload(task), blockers, room)


def task_documents(
    queue: Queue,
    statuses: frozenset[Status] | None,
    *,
    after: TaskId | None,
    limit: int | None,
    at_least: int = 0,
    name: str | None = None,
    older_than_s: float = 0.0,
) -> Iterator[TaskDocument]:
    """Iterate over at most ``limit`` tasks in the order of their ids, read page by page (SK-12)."""
    page = PAGE if limit is None or name is not None else min(limit, PAGE)
    tasks = queue.tasks(
        statuses, page=page, after=after, at_least=at_least, name=name, older_than_s=older_than_s
    )
    return _documents(queue, islice(tasks, limit))


def newest_documents(
    queue: Queue,
    statuses: frozenset[Status] | None,
    *,
    after: TaskId | None,
    limit: int | None,
    at_least: int,
    name: str | None,
    older_than_s: float,
) -> Iterator[TaskDocument]:
    """Read at most ``limit`` tasks, the newest first.

    Raises:
        ProblemRaised: the limit is above ``PAGE``, or ``after`` or ``at_least`` is given.
    """
    limit = PAGE if limit is None else limit
    if after is not None or at_least or limit > PAGE:
        detail = f"newest goes with a limit of {PAGE} at most, and with neither after nor at_least"
        raise ProblemRaised(INVALID, detail)
    return _documents(queue, queue.newest(limit, statuses, name=name, older_than_s=older_than_s))


def _documents(queue: Queue, tasks: Iterable[Stored]) -> Iterator[TaskDocument]:
    left = iter(tasks)
    first = list(islice(left, MAX_ROOMS))
    rooms = queue.rooms(first)
    for stored, blockers in queue.with_blockers(chain(first, left)):
        yield TaskDocument.of(stored, blockers, rooms.get(stored.head.id))


def cancel(queue: Queue, selected: Selection) -> ChangedCounts:
    """Cancel tasks: open ones unless a status is given."""
    return _change(queue, selected, OPEN, queue.cancel_all)


def requeue(queue: Queue, selected: Selection) -> ChangedCounts:
    """Requeue tasks: dead ones unless a status is given."""
    return _change(queue, selected, frozenset({Status.DEAD}), queue.requeue_all)


def delete(queue: Queue, selected: Selection) -> ChangedCounts:
    """Delete tasks: closed ones unless a status is given.

    Raises:
        ProblemRaised: an open status is given.
    """
    if selected.status and not OPEN.isdisjoint(selected.status):
        raise ProblemRaised(INVALID, "open tasks can't be deleted: cancel them first")
    closed = frozenset(Status) - OPEN

    def collect(tasks: Iterable[Stored]) -> int:
        deque(tasks, maxlen=0)  # counts them
        statuses = frozenset(selected.status or closed)
        return queue.collect(selected.older_than_s, statuses=statuses, name=selected.name).tasks

    return _change(queue, selected, closed, collect)


def _change(
    queue: Queue,
    selected: Selection,
    statuses: frozenset[Status],
    change: Callable[[Iterable[Stored]], int],
) -> ChangedCounts:
    """Change the selected tasks, page by page; or only count them."""
    matched = 0

    def each() -> Iterator[Stored]:
        nonlocal matched
        chosen = frozenset(selected.status or statuses)
        for stored in queue.tasks(chosen, name=selected.name, older_than_s=selected.older_than_s):
            matched += 1
            yield stored

    if selected.dry_run:
        deque(each(), maxlen=0)
        changed = 0
    else:
        changed = change(each())
    return ChangedCounts(queue=queue.name, matched=matched, changed=changed)


def update_documents(queue: Queue, task: TaskId) -> Iterator[UpdateDocument]:
    """Read the updates of a task's claims, page by page."""
    return (UpdateDocument.of(each) for each in queue.log(task))


def lines(documents: Iterator[BaseModel]) -> Iterator[bytes]:
    """Iterate over documents as lines of JSON. The first is read at once, to raise its errors here."""
    first = next(documents, None)
    return _lines(first, documents)


def _lines(first: BaseModel | None, rest: Iterator[BaseModel]) -> Iterator[bytes]:
    if first is not None:
        yield _line(first)
    for each in rest:
        yield _line(each)


def _line(document: BaseModel) -> bytes:
    return document.model_dump_json().encode() + b"\n"
