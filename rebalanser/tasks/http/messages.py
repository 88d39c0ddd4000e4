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

from rebalanser.core.tasks.model import AfterFailure, EnqueueAnswer, Status
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
        raise ValueError("it is not base64 of the standard alphabet, with padding") from error


Base64 = Annotated[bytes, BeforeValidator(_decoded), WithJsonSchema({"type": "string", "format": "base64"})]


def _json_of(value: Any) -> bytes:
    """Encode a value as JSON that every reader of it can decode."""
    try:
        content = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("the value has half a surrogate pair, which is not Unicode text") from error
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error
    except ValueError as error:
        raise ValueError("the value has a number that JSON can't represent") from error
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

    name: Label = Field(description="Function that runs it.")
    payload: GivenContent = Field(
        description="Payload; a Python function takes its arguments from the fields of an object."
    )
    id: Id | None = Field(
        default=None,
        description="Id from `POST …/ids`, which makes a repeated enqueue harmless (SK-3); null for any.",
    )
    priority: Priority = Field(default=0, description="Higher first.")
    after: Ids = Field(default=(), description="Tasks of the queue that must be complete first.")
    after_failure: AfterFailure = Field(
        default=AfterFailure.WAIT,
        description="Reaction once one of `after` is dead or cancelled: `wait` until that is requeued "
        "and complete, `run`, or `fail`, that is, become dead too.",
    )
    waits_for_unknown: Flag = Field(
        default=False, description="True if `after` may name tasks that don't exist yet."
    )
    results: Results = Field(
        default={},
        description="Fields of the payload's object that get results: that of a task, or a list of those of "
        "several. It comes after these tasks, and its claim has the results in the payload (SK-5).",
    )
    delay_s: Seconds = Field(default=0.0, description="Minimum seconds from now before it is claimed.")
    retries: Retries = Field(
        default=3, description="Maximum number of retries, after tries that failed or whose worker died."
    )
    timeout_s: PositiveSeconds | None = Field(
        default=None, description="Maximum seconds of one try; the worker enforces it."
    )
    unique_key: Key | None = Field(
        default=None,
        description="While a task of this name with this key is waiting or claimed, enqueueing makes no "
        "other one and answers that one's id (SK-23).",
    )
    unique_for_s: Seconds | None = Field(
        default=None,
        description="Seconds after it is enqueued in which it keeps others out too; without a key, the "
        "payload is the key.",
    )
    key: Key | None = Field(default=None, description="Key that limits per key count by.")
    max_running: MaxRunning | None = Field(
        default=None, description="Maximum number of tasks of this name that are claimed at once (SK-23)."
    )
    max_running_per_key: MaxRunning | None = Field(
        default=None, description="The same for tasks with its `key`; not together with limits by name."
    )
    rate_limit: RateLimit | None = Field(
        default=None,
        description="Maximum rate at which tasks of this name are claimed, such as `10/s` or "
        "`100/m burst 20` (SK-23).",
    )
    rate_limit_per_key: RateLimit | None = Field(
        default=None, description="The same for tasks with its `key`; not together with limits by name."
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

    id: Id = Field(description="Id of the task, or, of a `duplicate`, of the earlier one.")
    answer: EnqueueAnswer = Field(
        description="Where it is: in the store, on the server's disk so far, or a duplicate."
    )


class EnqueuedTasks(BaseModel):
    """Tasks are stored for good, or in the server's outbox (SK-4), in the order in which they were given."""

    ids: tuple[Id, ...] = Field(description="Ids of the tasks, or, of a `duplicate`, of the earlier one.")
    answers: tuple[EnqueueAnswer, ...] = Field(
        description="For each, where it is, or that it is a duplicate."
    )


class NewIds(BaseModel):
    """Ids for tasks to come, the smallest first (SK-1)."""

    ids: tuple[Id, ...]


class ClaimRequest(RequestBody):
    """Request claims of tasks (SK-5)."""

    worker: Label = Field(description="Label of the worker, for people.")
    limit: Annotated[int, Field(strict=True, ge=1, le=MAX_CLAIMED)] = Field(
        default=1, description="Maximum number of claims."
    )
    names: Annotated[tuple[Label, ...], Field(min_length=1, max_length=MAX_NAMES)] | None = Field(
        default=None, description="Only tasks of these functions; null for any."
    )
    wait_s: Annotated[float, Field(strict=True, ge=0, le=MAX_WAIT_S)] = Field(
        default=0.0, description="Seconds to wait for a task if there is none."
    )


class ClaimedTask(BaseModel):
    """A claim (SK-6): the worker may work on the task until the claim's time is over (SK-8).

    The worker counts ``waited_s + ttl_s`` seconds from when it sent its request, on a monotonic clock of its
    own, and stops then unless it has renewed the claim.
    """

    task: Id
    name: str
    payload: Content = Field(description="Payload. Fields that get results of other tasks have these.")
    number: int = Field(description="Number of earlier claims of the task; part of the claim's name.")
    holder: str = Field(description="Secret of this claim; part of the claim's name.")
    token: int = Field(description="Fencing token for other systems; it grows from claim to claim.")
    ttl_s: float = Field(description="Seconds that the claim lasts unless it is renewed.")
    waited_s: float = Field(
        description="Seconds until the server requested the claim; below 0 if that was before."
    )
    failures: int = Field(description="Number of failed tries so far.")
    retries: int
    timeout_s: float | None = Field(description="Maximum seconds of the try; null for no limit.")


class ClaimedTasks(BaseModel):
    """The claims that were made; none if there was no task in the given time."""

    claims: tuple[ClaimedTask, ...]


class HolderRequest(RequestBody):
    """Request that names the holder of a claim; the path has its task and its number."""

    holder: Label = Field(description="Holder from the answer with the claim.")


class NewUpdate(HolderRequest):
    """Add to a claim's log (SK-9). Sending it again is harmless."""

    sequence: Annotated[int, Field(strict=True, ge=0)] = Field(
        description="Number of earlier updates of the claim: 0, 1, 2…"
    )
    content: GivenContent


class Completion(HolderRequest):
    """Complete a task for good (SK-10). Sending it again is harmless: the first result stays."""

    result: GivenContent | None = Field(default=None, description="Result to store, if any.")


class Failure(HolderRequest):
    """The try has failed (SK-15)."""

    error: Annotated[str, Field(max_length=4000)] = Field(description="Error, for people.")
    delay_s: Seconds = Field(default=0.0, description="Minimum seconds before the next try.")
    give_up: Flag = Field(default=False, description="True if no further try can help.")


class Settled(BaseModel):
    """Status of the task after the request."""

    task: Id
    status: Status
    revision: int = Field(description="Revision of the store, for `at_least` of later reads (SK-11).")


class Renewed(Settled):
    """The claim lasts ``ttl_s`` seconds from when the worker sent the request (SK-8)."""

    ttl_s: float


class Selection(RequestBody):
    """Selection of tasks to change: those that match all given fields, at least one of three."""

    status: Annotated[tuple[Status, ...], Field(min_length=1, max_length=len(Status))] | None = Field(
        default=None, description="Only tasks in one of these; if null, all that can be changed."
    )
    name: Label | None = Field(default=None, description="Only tasks of this function.")
    older_than_s: Seconds = Field(
        default=0.0, description="Only tasks that were enqueued more than this many seconds ago."
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
    """Number of tasks in each status (SK-12)."""

    queue: str
    counts: dict[Status, int]


class Health(BaseModel):
    """The server answers."""

    queue: str
    partitions: int = Field(description="Number of partitions whose claims it hands out.")
    troubles: tuple[str, ...] = Field(
        description="Failures that are retried now, such as `claims: outage`; the log has the reasons."
    )
    paused_since: float | None = Field(
        default=None,
        description="Time of the pause of the queue, in seconds since 1970, as far as this server knows; "
        "null if it is not paused. `GET …/pauses` has its author and reason.",
    )


class NewPause(BaseModel):
    """Request to pause a queue or a schedule (SK-23). An existing pause stays as it is."""

    model_config = ConfigDict(extra="forbid")

    reason: PauseText = Field(default="", description="Reason, for people.")
    by: PauseText | None = Field(default=None, description="Author of the pause; null for the server.")


class Resumed(BaseModel):
    """The pause that has ended; null if there was none."""

    pause: Pause | None
