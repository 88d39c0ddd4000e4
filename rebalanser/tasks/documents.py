"""Tasks as documents, for the command line and for other languages. Times are in seconds."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from rebalanser.errors import InvalidTask
from rebalanser.tasks.model import AfterFailure, ClaimState, Room, Status, Stored, Task, Update
from rebalanser.tasks.results import sources_in, without_sources


class Content(BaseModel):
    """Bytes that somebody stored: as JSON where they are JSON that can be written again, else in base64.

    JSON of more than 200 levels, or with half a pair of surrogates, can be read by some and written by few.
    """

    model_config = ConfigDict(frozen=True)

    value: Any = Field(default=None, description="What the JSON says; null where the bytes are no JSON.")
    base64: str | None = Field(default=None, description="The bytes, if they are no JSON, or a too deep one.")

    @classmethod
    def of(cls, content: bytes) -> Self:
        """The document of these bytes."""
        try:
            return cls(value=from_json(content, allow_inf_nan=False))
        except ValueError:
            return cls(base64=base64.b64encode(content).decode())


class ClaimDocument(BaseModel):
    """A task's last claim, also after it has ended."""

    model_config = ConfigDict(frozen=True)

    number: int = Field(description="How many claims of the task there were before it (SK-6).")
    worker: str = Field(description="Who made it, a label for people.")
    ttl_s: float = Field(description="For how many seconds it lasted when it was made or renewed.")
    updates: int = Field(description="How many updates it has written (SK-9).")

    @classmethod
    def of(cls, claim: ClaimState) -> Self:
        """The document of a claim; its holder's name stays with the holder."""
        return cls(number=claim.number, worker=claim.worker, ttl_s=claim.term.ttl_s, updates=claim.updates)


class BlockerDocument(BaseModel):
    """A task that another waits for in vain."""

    model_config = ConfigDict(frozen=True)

    id: str
    name: str = Field(description="Its function.")
    status: Status = Field(description="It is dead or cancelled.")

    @classmethod
    def of(cls, stored: Stored) -> Self:
        """The document of such a task."""
        return cls(id=stored.head.id, name=stored.head.name, status=stored.state.status)


class RoomDocument(BaseModel):
    """The room that the limit of a waiting task leaves."""

    model_config = ConfigDict(frozen=True)

    running: int = Field(description="How many tasks of its limit are claimed.")
    at: float = Field(
        description="Seconds since 1970 from which its rate lets the next one start, by the clock of the "
        "host of the last one; 0 for now."
    )

    @classmethod
    def of(cls, room: Room) -> Self:
        """The document of a room."""
        return cls(running=room.running, at=room.at)


class TaskDocument(BaseModel):
    """A task and what has become of it, its payload aside."""

    model_config = ConfigDict(frozen=True)

    id: str
    queue: str
    name: str = Field(description="The function that works on it.")
    status: Status
    priority: int = Field(description="Higher first.")
    after: tuple[str, ...] = Field(description="The tasks that must be complete first.")
    after_failure: AfterFailure = Field(
        description="What it does once one of `after` is dead or cancelled: wait, run, or fail."
    )
    retries: int = Field(description="How often it is tried again after a try that failed.")
    timeout_s: float | None = Field(description="How many seconds one try may take; null for any time.")
    unique_key: str = Field(
        description="While it is open, no other task of its name with this key is; empty for no such key."
    )
    unique_for_s: float = Field(description="Nor for this many seconds from when it was enqueued.")
    limit_key: str = Field(description="The key by which its limits count; empty for all of its name.")
    max_running: int = Field(
        description="How many of these are claimed at once, while others are held back; 0 for any number."
    )
    rate_limit: str = Field(
        description="How often these are claimed, as `10/s` or `100/m burst 20`; empty for any rate."
    )
    due: float = Field(description="Seconds since 1970 before which it waits; 0 for no time.")
    failures: int = Field(description="Tries that failed since it was enqueued or requeued.")
    error: str = Field(description="How the last try that failed ended.")
    claim: ClaimDocument | None
    result: Content | None = Field(description="What it came to, once it is complete.")
    partition: int
    revision: int = Field(description="The store's revision at its last change (SK-11).")
    blocked_by: tuple[BlockerDocument, ...] = Field(
        description="Dead and cancelled tasks that it waits for, also by way of others; at most 10. "
        "It waits until those are requeued and complete."
    )
    room: RoomDocument | None = Field(
        description="What its limits leave now; null if it does not wait, has none, or that is not known."
    )

    @classmethod
    def of(cls, stored: Stored, blockers: Sequence[Stored] = (), room: Room | None = None) -> Self:
        """The document of a task, of what it waits for in vain, and of the room that its limits leave."""
        head, state = stored.head, stored.state
        return cls(
            id=head.id,
            queue=head.queue,
            name=head.name,
            status=state.status,
            priority=head.priority,
            after=head.after,
            after_failure=head.after_failure,
            retries=head.retries,
            timeout_s=head.timeout_s,
            unique_key=head.unique_key,
            unique_for_s=head.unique_for_s,
            limit_key=head.limit_key,
            max_running=head.max_running,
            rate_limit=head.rate_limit,
            due=state.due,
            failures=state.failures,
            error=state.error,
            claim=None if state.claim is None else ClaimDocument.of(state.claim),
            result=None if state.result is None else Content.of(state.result),
            partition=stored.partition,
            revision=stored.revision,
            blocked_by=tuple(map(BlockerDocument.of, blockers)),
            room=None if room is None else RoomDocument.of(room),
        )


class FullTaskDocument(TaskDocument):
    """A task with its payload."""

    payload: Content = Field(description="As it was enqueued, but for the fields that get results.")
    results: dict[str, str | tuple[str, ...]] = Field(
        description="Fields of the payload that get results: that of a task, or those of several."
    )

    @classmethod
    def with_payload(
        cls, stored: Stored, payload: bytes, blockers: Sequence[Stored] = (), room: Room | None = None
    ) -> Self:
        """The document of a task, its payload, and what :meth:`of` says."""
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
    name: str = Field(description="The function that is to work on it.")
    status: Literal["spooled", "refused"]
    kind: str = Field(description="Which error the engine refused it with; empty where it waits.")
    reason: str = Field(description="The error's message.")
    payload: Content

    @classmethod
    def of(cls, task: Task, kind: str, reason: str) -> Self:
        """The document of a task that waits, or that was refused for a reason."""
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
    engine: str = Field(description="Where the queue is, without credentials.")
    waiting: int
    refused: int


class UpdateDocument(BaseModel):
    """One entry of a claim's log (SK-9)."""

    model_config = ConfigDict(frozen=True)

    claim: int
    sequence: int = Field(description="Counted from 0 within the claim.")
    content: Content

    @classmethod
    def of(cls, update: Update) -> Self:
        """The document of an update."""
        return cls(claim=update.claim, sequence=update.sequence, content=Content.of(update.content))
