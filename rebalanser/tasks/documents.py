"""Tasks as documents, for the command line and for other languages. Times are in seconds."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from rebalanser.core.fields import fields_for
from rebalanser.core.tasks.model import AfterFailure, ClaimState, LimitRoom, Status, Stored, Task, Update
from rebalanser.errors import InvalidTask
from rebalanser.tasks.results import sources_in, without_sources


class Content(BaseModel):
    """Stored bytes: as JSON if they are JSON that can be encoded again, else in base64.

    JSON of more than 200 levels, or with half a surrogate pair, is not encoded again.
    """

    model_config = ConfigDict(frozen=True)

    value: Any = Field(default=None, description="The decoded JSON; null if the bytes are no JSON.")
    base64: str | None = Field(
        default=None, description="The bytes, if they are no JSON, or too deeply nested."
    )

    @classmethod
    def of(cls, content: bytes) -> Self:
        """Return the document of these bytes."""
        try:
            return cls(value=from_json(content, allow_inf_nan=False))
        except ValueError:
            return cls(base64=base64.b64encode(content).decode())


class ClaimDocument(BaseModel):
    """A task's last claim, also after it has ended."""

    model_config = ConfigDict(frozen=True)

    number: int = Field(description="Number of earlier claims of the task (SK-6).")
    worker: str = Field(description="Label of the worker that made it, for people.")
    ttl_s: float = Field(description="Seconds that it lasts from when it was made or renewed.")
    updates: int = Field(description="Number of its updates (SK-9).")

    @classmethod
    def of(cls, claim: ClaimState) -> Self:
        """Return the document of a claim, without the holder, which is a secret."""
        return cls(number=claim.number, worker=claim.worker, ttl_s=claim.term.ttl_s, updates=claim.updates)


class BlockerDocument(BaseModel):
    """A dead or cancelled task that another one waits for."""

    model_config = ConfigDict(frozen=True)

    id: str
    name: str = Field(description="Its function.")
    status: Status = Field(description="`dead` or `cancelled`.")

    @classmethod
    def of(cls, stored: Stored) -> Self:
        """Return the document of a task."""
        return cls(id=stored.head.id, name=stored.head.name, status=stored.state.status)


class RoomDocument(BaseModel):
    """The room that the limit of a waiting task leaves."""

    model_config = ConfigDict(frozen=True)

    running: int = Field(description="Number of claimed tasks of its limit.")
    at: float = Field(
        description="Seconds since 1970 from which its rate lets the next one start, by the clock of the "
        "host of the last one; 0 for now."
    )

    @classmethod
    def of(cls, room: LimitRoom) -> Self:
        """Return the document of a room."""
        return cls(**fields_for(cls, room))


class TaskDocument(BaseModel):
    """A task with its state, without its payload."""

    model_config = ConfigDict(frozen=True)

    id: str
    queue: str
    name: str = Field(description="Function that runs it.")
    status: Status
    priority: int = Field(description="Higher first.")
    after: tuple[str, ...] = Field(description="Tasks that must be complete first.")
    after_failure: AfterFailure = Field(
        description="Reaction once one of `after` is dead or cancelled: wait, run, or fail."
    )
    retries: int = Field(description="Maximum number of retries.")
    timeout_s: float | None = Field(description="Maximum seconds of one try; null for no limit.")
    unique_key: str = Field(
        description="Key that keeps out other tasks of its name while it is open; empty for none."
    )
    unique_for_s: float = Field(description="Seconds after it was enqueued in which it keeps them out too.")
    limit_key: str = Field(description="Key that its limits count by; empty for limits by name.")
    max_running: int = Field(
        description="Maximum number of these tasks that are claimed at once; 0 for no limit."
    )
    rate_limit: str = Field(
        description="Maximum rate of claims, such as `10/s` or `100/m burst 20`; empty for no limit."
    )
    due: float = Field(description="Seconds since 1970 before which it is not claimed; 0 for none.")
    failures: int = Field(description="Number of failed tries since it was enqueued or requeued.")
    error: str = Field(description="Error of the last try that failed.")
    claim: ClaimDocument | None
    result: Content | None = Field(description="Result, once it is complete.")
    partition: int
    revision: int = Field(description="The store's revision at its last change (SK-11).")
    blocked_by: tuple[BlockerDocument, ...] = Field(
        description="Dead and cancelled tasks that it waits for, directly or not; at most 10. "
        "It waits until those are requeued and complete."
    )
    room: RoomDocument | None = Field(
        description="Room that its limits leave now; null if it does not wait, has none, or it is not known."
    )

    @classmethod
    def of(cls, stored: Stored, blockers: Sequence[Stored] = (), room: LimitRoom | None = None) -> Self:
        """Return the document of a task, with its blockers and the room that its limits leave."""
        head, state = stored.head, stored.state
        fields = fields_for(cls, head) | fields_for(cls, state) | fields_for(cls, stored)
        fields["claim"] = None if state.claim is None else ClaimDocument.of(state.claim)
        fields["result"] = None if state.result is None else Content.of(state.result)
        return cls(
            **fields,
            blocked_by=tuple(map(BlockerDocument.of, blockers)),
            room=None if room is None else RoomDocument.of(room),
        )


class FullTaskDocument(TaskDocument):
    """A task with its payload."""

    payload: Content = Field(description="Payload as enqueued, without the fields that get results.")
    results: dict[str, str | tuple[str, ...]] = Field(
        description="Fields of the payload that get results, each with a task or a list of tasks."
    )

    @classmethod
    def with_payload(
        cls, stored: Stored, payload: bytes, blockers: Sequence[Stored] = (), room: LimitRoom | None = None
    ) -> Self:
        """Return the document of a task with its payload; see ``of``."""
        try:
            results = sources_in(payload)
        except InvalidTask:  # then the payload is shown as it is
            results = {}
        shown = Content.of(without_sources(payload) if results else payload)
        return cls(**dict(TaskDocument.of(stored, blockers, room)), payload=shown, results=results)


class SpooledDocument(BaseModel):
    """A task in an outbox."""

    model_config = ConfigDict(frozen=True)

    id: str
    queue: str
    name: str = Field(description="Function that runs it.")
    status: Literal["spooled", "refused"]
    kind: str = Field(description="Error that the engine refused it with; empty while it waits.")
    reason: str = Field(description="Message of that error.")
    payload: Content

    @classmethod
    def of(cls, task: Task, kind: str, reason: str) -> Self:
        """Return the document of a task that waits, or that was refused for a reason."""
        head = task.head
        return cls(
            id=head.id,
            queue=head.queue,
            name=head.name,
            status="refused" if kind else "spooled",
            kind=kind,
            reason=reason,
            payload=Content.of(task.payload),
        )


class SpoolDocument(BaseModel):
    """Contents of an outbox for one queue."""

    model_config = ConfigDict(frozen=True)

    queue: str
    engine: str = Field(description="URL of the queue, without credentials.")
    waiting: int
    refused: int


class UpdateDocument(BaseModel):
    """One entry of a claim's log (SK-9)."""

    model_config = ConfigDict(frozen=True)

    claim: int
    sequence: int = Field(description="Number within the claim, from 0.")
    content: Content

    @classmethod
    def of(cls, update: Update) -> Self:
        """Return the document of an update."""
        return cls(claim=update.claim, sequence=update.sequence, content=Content.of(update.content))
