"""What enqueueing answers: the task's id, and where the task is."""

from __future__ import annotations

from enum import StrEnum
from typing import Generic, Self, TypeVar

from rebalanser.tasks.model import TaskId

R_co = TypeVar("R_co", covariant=True)


class EnqueueAnswer(StrEnum):
    """Where a task is that was enqueued (SK-4)."""

    COMMITTED = "committed"
    """In the engine, for good."""
    SPOOLED = "spooled"
    """In the outbox, synced to the disk of this host; it is forwarded when the engine is back."""


class Enqueued(str, Generic[R_co]):
    """A task's id, which says in ``answer`` where the task is (SK-4).

    ``R_co`` is what its function returns, for ``wait``.
    """

    answer: EnqueueAnswer

    def __new__(cls, task: TaskId, answer: EnqueueAnswer = EnqueueAnswer.COMMITTED) -> Self:
        """The id of a task that is there."""
        enqueued = super().__new__(cls, task)
        enqueued.answer = answer
        return enqueued
