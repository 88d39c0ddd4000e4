"""What the answer to an enqueue means to whoever enqueued."""

from __future__ import annotations

from rebalanser.errors import InternalError, TaskExists, UnknownTask
from rebalanser.tasks.engine import Answer, Applied, Enqueue, Exists, Unknown


def check_answer(enqueue: Enqueue, answer: Answer) -> None:
    """Raise what an answer means that is not good.

    Raises:
        TaskExists: the id is taken by other content.
        UnknownTask: it is to come after a task that does not exist.
    """
    head = enqueue.task.head
    match answer:
        case Applied():
            return
        case Exists(stored=stored, payload=payload):
            if stored.head != head or payload != enqueue.task.payload:
                raise TaskExists(f"task {head.id} exists with other content; an id names one task for ever")
        case Unknown(ids=ids):
            raise UnknownTask(f"task {head.id} is to come after {', '.join(ids)}, which does not exist")
        case _:
            raise InternalError(f"an enqueue was answered {answer!r}")
