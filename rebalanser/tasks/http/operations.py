"""What producers and operators ask over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from pydantic import BaseModel

from rebalanser.tasks.documents import FullTaskDocument, TaskDocument, UpdateDocument
from rebalanser.tasks.engine import Enqueue
from rebalanser.tasks.functions import EnqueueOptions
from rebalanser.tasks.http.messages import NewTask
from rebalanser.tasks.model import Enqueued, Status, TaskId
from rebalanser.tasks.queue import Queue


def enqueue(queue: Queue, tasks: Sequence[NewTask]) -> list[Enqueued[Any]]:
    """Store tasks for good, or in the outbox of the queue; their ids.

    Raises:
        InvalidName, TaskExists, UnknownTask, DependencyCycle, RequestTooLarge: as Queue.commit does.
    """
    return queue.commit([_made(queue, each) for each in tasks])


def _made(queue: Queue, task: NewTask) -> Enqueue:
    options = EnqueueOptions(
        delay_s=task.delay_s,
        after=task.after,
        after_failure=task.after_failure,
        priority=task.priority,
        task_id=task.id,
        waits_for_unknown=task.waits_for_unknown,
    )
    return queue.made_raw(
        task.name, task.payload.content(), options, retries=task.retries, timeout_s=task.timeout_s
    )


def full(queue: Queue, task: TaskId, at_least: int = 0) -> FullTaskDocument:
    """A task with its payload, not older than revision ``at_least`` (SK-11)."""
    ((stored, blockers),) = queue.with_blockers([queue.get(task, at_least=at_least)])
    return FullTaskDocument.with_payload(stored, queue.payload(task), blockers)


def listed(
    queue: Queue,
    statuses: frozenset[Status] | None,
    *,
    after: TaskId | None,
    limit: int | None,
    at_least: int = 0,
) -> Iterator[TaskDocument]:
    """Tasks in the order of their ids, read page by page, at most ``limit`` (SK-12)."""
    page = 1000 if limit is None else min(limit, 1000)
    tasks = islice(queue.tasks(statuses, page=page, after=after, at_least=at_least), limit)
    for stored, blockers in queue.with_blockers(tasks):
        yield TaskDocument.of(stored, blockers)


def logged(queue: Queue, task: TaskId) -> Iterator[UpdateDocument]:
    """What the claims of a task wrote, read page by page."""
    return (UpdateDocument.of(each) for each in queue.log(task))


def lines(documents: Iterator[BaseModel]) -> Iterator[bytes]:
    """Documents as lines of JSON. The first is read at once, so that its errors are raised here."""
    first = next(documents, None)
    return _lines(first, documents)


def _lines(first: BaseModel | None, rest: Iterator[BaseModel]) -> Iterator[bytes]:
    if first is not None:
        yield _line(first)
    for each in rest:
        yield _line(each)


def _line(document: BaseModel) -> bytes:
    return document.model_dump_json().encode() + b"\n"
