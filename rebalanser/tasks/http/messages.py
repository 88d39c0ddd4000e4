"""Requests and answers over HTTP. Times are in seconds."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Annotated, Any, Final, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import from_json

from rebalanser.tasks.documents import Content
from rebalanser.tasks.functions import (
    MAX_AFTER,
    Flag,
    Id,
    Ids,
    Key,
    MaxRunning,
    PositiveSeconds,
    Priority,
    RateLimit,
    Retries,
    Seconds,
)
from rebalanser.tasks.model import AfterFailure, EnqueueAnswer, Status
from rebalanser.tasks.pauses import Pause, PauseText

MAX_BATCH: Final = 1000
MAX_WAIT_S: Final = 60.0
MAX_CLAIMED: Final = 256
MAX_NAMES: Final = 256
_MAX_LABEL: Final = 512
_MAX_UNKNOWN: Final = 10

Label = Annotated[str, Field(min_length=1, max_length=_MAX_LABEL)]


def _decoded(text: Any) -> bytes:
    """Decode base64 that may be broken into lines, and nothing that is not base64."""
    try:
        return b64decode("".join(text.split()), validate=True)
    except (AttributeError, ValueError) as error:
        raise ValueError("it is no base64 of the standard alphabet, with padding") from error


Base64 = Annotated[bytes, BeforeValidator(_decoded), WithJsonSchema({"type": "string", "format": "base64"})]


def _json_of(value: Any) -> bytes:
    """Encode a value as JSON that every reader of it can decode."""
    try:
        content = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("the value has half a surrogate pair, which is no Unicode text") from error
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error
    except ValueError as error:
        raise ValueError("the value has a number that JSON has no word for") from error
    try:
        from_json(content)
    except ValueError as error:
        raise ValueError("the value is nested too deeply") from error
    return content


class RequestBody(BaseModel):
    """Base of request bodies: unknown fields are refused.

    If there are too many, the error names the known ones instead, so that no refusal takes seconds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_unknown(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > len(cls.model_fields) + _MAX_UNKNOWN:
            raise ValueError(f"it has {len(given)} fields; the known ones are {', '.join(cls.model_fields)}")
        return given


class GivenContent(RequestBody):
    """Bytes to store: a value as JSON, or any bytes in base64, not both."""

    value: Any = Field(default=None, description="Stored as JSON (UTF-8); at most 200 levels deep.")
    base64: Base64 | None = Field(default=None, description="Stored as it is.")
    _content: bytes = PrivateAttr()

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.value is not None and self.base64 is not None:
            raise ValueError("give a value or base64, not both")
        self._content = _json_of(self.value) if self.base64 is None else self.base64
        return self

    def content(self) -> bytes:
        """Return the bytes to store."""
        return self._content


def _few_results(given: Any) -> Any:
    """Refuse more ids than a task may wait for, before each of them is checked."""
    if isinstance(given, dict):
        ids = sum(len(each) if isinstance(each, list) else 1 for each in given.values())
        if ids > MAX_AFTER:
            raise ValueError(f"it gets {ids} results; the maximum is {MAX_AFTER}")
    return given


Results = Annotated[dict[Label, Id | tuple[Id, ...]], BeforeValidator(_few_results)]


class NewTask(RequestBody):
    """A task to enqueue (SK-2)."""

    name: Label = Field(description="The function that is to work on it.")
    payload: GivenContent = Field(
        description="What it is to work on; a Python function takes its arguments from an object's fields."
    )
    id: Id | None = Field(
        default=None,
        description="An id got before: enqueueing it more than once is harmless (SK-3). Else it gets one.",
    )
    priority: Priority = Field(default=0, description="Higher first.")
    after: Ids = Field(default=(), description="Tasks of the queue that must be complete first.")
    after_failure: AfterFailure = Field(
        default=AfterFailure.WAIT,
        description="What it does once one of `after` is dead or cancelled: `wait` until that is requeued "
        "and complete, `run`, or `fail`, that is, become dead itself.",
    )
    waits_for_unknown: Flag = Field(
        default=False, description="Whether `after` may name tasks that don't exist yet."
    )
    results: Results = Field(
        default={},
        description="Fields of the payload's object that get results: that of a task, or a list of those of "
        "several. It comes after these tasks, and its claim has the results in the payload (SK-5).",
    )
    delay_s: Seconds = Field(default=0.0, description="How many seconds from now it waits at least.")
    retries: Retries = Field(
        default=3, description="How often it is tried again after a try that failed, or whose worker died."
    )
    timeout_s: PositiveSeconds | None = Field(
        default=None, description="How many seconds one try may take; its worker has to see to it."
    )
    unique_key: Key | None = Field(
        default=None,
        description="While a task of this name with this key is waiting or claimed, enqueueing makes no "
        "other one and answers that one's id (SK-23).",
    )
    unique_for_s: Seconds | None = Field(
        default=None,
        description="And for this many seconds from when it was enqueued; without a key, the payload is it.",
    )
    key: Key | None = Field(default=None, description="By what limits per key count.")
    max_running: MaxRunning | None = Field(
        default=None, description="How many tasks of this name with such a limit are claimed at once (SK-23)."
    )
    max_running_per_key: MaxRunning | None = Field(
        default=None, description="How many of those with its `key` are; not together with limits by name."
    )
    rate_limit: RateLimit | None = Field(
        default=None,
        description="How often tasks of this name with such a limit are claimed, as `10/s` or "
        "`100/m burst 20` (SK-23).",
    )
    rate_limit_per_key: RateLimit | None = Field(
        default=None, description="How often those with its `key` are; not together with limits by name."
    )


class NewTasks(RequestBody):
    """Tasks to enqueue in few transactions: each alone, or all or none."""

    tasks: Annotated[tuple[NewTask, ...], Field(min_length=1, max_length=MAX_BATCH)]
    together: Flag = Field(
        default=False,
        description="All or none, at most 100, in one transaction; with ids got before, one may depend on "
        "those before it.",
    )


class EnqueuedTask(BaseModel):
    """A task is stored for good, or in the server's outbox (SK-4), or an earlier one keeps it out (SK-23)."""

    id: Id = Field(description="The task's, or of a `duplicate` that of the earlier one.")
    answer: EnqueueAnswer = Field(
        description="Whether the store has it, or so far the server's disk only, or it is a duplicate."
    )


class EnqueuedTasks(BaseModel):
    """Tasks are stored for good, or in the server's outbox (SK-4), in the order in which they were given."""

    ids: tuple[Id, ...] = Field(description="The tasks', or of a `duplicate` that of the earlier one.")
    answers: tuple[EnqueueAnswer, ...] = Field(
        description="Of each, whether the store has it yet, or it is a duplicate."
    )


class NewIds(BaseModel):
    """Ids for tasks to come, the smallest first (SK-1)."""

    ids: tuple[Id, ...]


class ClaimRequest(RequestBody):
    """Ask for tasks to work on (SK-5)."""

    worker: Label = Field(description="Who asks, a label for people.")
    limit: Annotated[int, Field(strict=True, ge=1, le=MAX_CLAIMED)] = Field(
        default=1, description="At most so many."
    )
    names: Annotated[tuple[Label, ...], Field(min_length=1, max_length=MAX_NAMES)] | None = Field(
        default=None, description="Those of these functions only; null for any. The others stay as they are."
    )
    wait_s: Annotated[float, Field(strict=True, ge=0, le=MAX_WAIT_S)] = Field(
        default=0.0, description="For how many seconds to wait for a task where there is none."
    )


class ClaimedTask(BaseModel):
    """A claim (SK-6): the worker may work on the task until the claim's time is over (SK-8).

    The worker counts ``waited_s + ttl_s`` seconds from when it sent its request, on a monotonic clock of its
    own, and stops then unless it has renewed the claim.
    """

    task: Id
    name: str
    payload: Content = Field(
        description="What it is to work on. Fields that get results of other tasks have these."
    )
    number: int = Field(
        description="How many claims of the task there were before; part of the claim's name."
    )
    holder: str = Field(description="A secret that is this claim's alone; part of the claim's name.")
    token: int = Field(description="The fencing token, for the outside world: it grows from claim to claim.")
    ttl_s: float = Field(description="How many seconds the claim lasts unless it is renewed.")
    waited_s: float = Field(
        description="How many seconds passed here until the claim was asked for; below 0 if it was before."
    )
    failures: int = Field(description="How many tries have failed so far.")
    retries: int
    timeout_s: float | None = Field(description="How many seconds the try may take; null for any time.")


class ClaimedTasks(BaseModel):
    """The claims made; none where there was nothing to do in the time given."""

    claims: tuple[ClaimedTask, ...]


class HolderRequest(RequestBody):
    """Request that names the holder of a claim; the path has its task and its number."""

    holder: Label = Field(description="The claim's, as it was answered.")


class NewUpdate(HolderRequest):
    """Add to a claim's log (SK-9). Sending it again is harmless."""

    sequence: Annotated[int, Field(strict=True, ge=0)] = Field(
        description="How many updates the claim has written before: 0, 1, 2…"
    )
    content: GivenContent


class Completion(HolderRequest):
    """Complete a task for good (SK-10). Sending it again is harmless: the first result stays."""

    result: GivenContent | None = Field(default=None, description="What it came to, if it is to be kept.")


class Failure(HolderRequest):
    """The try has failed (SK-15)."""

    error: Annotated[str, Field(max_length=4000)] = Field(description="What happened, for people.")
    delay_s: Seconds = Field(default=0.0, description="How many seconds the next try waits at least.")
    give_up: Flag = Field(default=False, description="Whether no further try can help.")


class Settled(BaseModel):
    """Status of the task after the request."""

    task: Id
    status: Status
    revision: int = Field(description="The store's, for reads that are not to be older (SK-11).")


class Renewed(Settled):
    """The claim lasts ``ttl_s`` seconds from when the worker sent the request (SK-8)."""

    ttl_s: float


class Selection(RequestBody):
    """Selection of tasks to change: those that match all given fields, at least one of three."""

    status: Annotated[tuple[Status, ...], Field(min_length=1, max_length=len(Status))] | None = Field(
        default=None, description="Those in one of these only; if null, those that it can be done to."
    )
    name: Label | None = Field(default=None, description="Those of this function only.")
    older_than_s: Seconds = Field(
        default=0.0, description="Those that were enqueued more than so many seconds ago only."
    )
    dry_run: Flag = Field(default=False, description="Count them, and change nothing.")

    @model_validator(mode="after")
    def _is_some(self) -> Self:
        if not self.model_fields_set & {"status", "name", "older_than_s"}:
            raise ValueError("give a status, a name or older_than_s; an older_than_s of 0 selects all")
        return self


class ChangedCounts(BaseModel):
    """Numbers of tasks that matched, and of those that were changed; the others are unchanged."""

    queue: str
    matched: int
    changed: int = Field(description="0 for a dry run.")


class Counts(BaseModel):
    """Count the tasks in each status (SK-12)."""

    queue: str
    counts: dict[Status, int]


class Health(BaseModel):
    """The server answers."""

    queue: str
    partitions: int = Field(description="How many of the queue's partitions it hands out claims of.")
    troubles: tuple[str, ...] = Field(
        description="What fails and is retried now, as `claims: outage`; the log says why."
    )
    paused_since: float | None = Field(
        default=None,
        description="Since when the queue is paused, in seconds since 1970, as far as this server knows; "
        "null: it is not. `GET …/pauses` says by whom and why.",
    )


class NewPause(BaseModel):
    """Request to pause a queue or a schedule (SK-23). An existing pause stays as it is."""

    model_config = ConfigDict(extra="forbid")

    reason: PauseText = Field(default="", description="Why, for people.")
    by: PauseText | None = Field(default=None, description="Who asks for it; null: the server.")


class Resumed(BaseModel):
    """The pause that has ended; null if there was none."""

    pause: Pause | None
