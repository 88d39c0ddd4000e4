"""What is said of a task function once, and of each task at enqueue; checked where it is said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypedDict

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
)

from rebalanser.errors import InvalidTask
from rebalanser.tasks.model import HIGHEST_PRIORITY, ID_DIGITS, LOWEST_PRIORITY, AfterFailure, TaskId

MAX_SECONDS: Final = 315_576_000.0
"""Maximum of a delay, a pause and a time limit: ten years. No thread can wait for much longer."""
MAX_AFTER: Final = 1000
"""Maximum number of tasks that one task waits for. For more, let tasks between collect them."""
FAR_FUTURE_S: Final = 31_557_600.0
"""Seconds that the time in a given id may be ahead of the clock: a year.

A task with such an id would never be old enough to be collected, and would wait behind all others.
"""
_HEX = frozenset("0123456789abcdef")


def _check_id(text: str) -> str:
    if len(text) != ID_DIGITS or not _HEX.issuperset(text):
        raise ValueError(f"a task id is {ID_DIGITS} hexadecimal digits in lower case")
    return text


def _listed(given: Any) -> Any:
    """A single one is a list of one."""
    return (given,) if isinstance(given, str | type) else given


def problems_of(error: ValidationError) -> str:
    """What pydantic refuses, in one line: each problem with its place."""
    return "; ".join(
        f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)
    )


Id = Annotated[TaskId, AfterValidator(_check_id)]
Priority = Annotated[int, Field(ge=LOWEST_PRIORITY, le=HIGHEST_PRIORITY)]
PositiveSeconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
Errors = Annotated[tuple[type[Exception], ...], Field(min_length=1), BeforeValidator(_listed)]
Ids = Annotated[tuple[Id, ...], FailFast(), Field(max_length=MAX_AFTER), BeforeValidator(_listed)]


class TaskOptions(BaseModel):
    """How the tasks of one function are tried (SK-15)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    priority: Priority = 0
    """Higher first (SK-2)."""
    retries: Annotated[int, Field(ge=0, le=1_000_000)] = 3
    """How often a task is tried again after a try that failed, or whose worker died."""
    timeout_s: PositiveSeconds | None = None
    """How long one try may take; None for any time."""
    retry_on: Errors | None = None
    """The exceptions after which a task is tried again: after any other it is dead at once. None for all."""
    backoff_s: PositiveSeconds | Callable[[int], float] = 1.0
    """Seconds before the first retry, doubled each time; or a function that gives them for N failures."""
    max_backoff_s: PositiveSeconds = 600.0
    """Maximum seconds before a retry, before :attr:`jitter` is added."""
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.25
    """The part of the wait up to which more is added at random, so that retries don't come together."""


class EnqueueOptions(BaseModel):
    """What one task differs in from others of its function."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    delay_s: Seconds = 0.0
    """How many seconds from now it waits at least, up to :data:`MAX_SECONDS`."""
    after: Ids = ()
    """Tasks of the same queue that must be complete first, at most :data:`MAX_AFTER`, or the only one."""
    after_failure: AfterFailure = AfterFailure.WAIT
    """What the task does once one of ``after`` is dead or cancelled: ``wait``, ``run`` or ``fail``."""
    priority: Priority | None = None
    """Instead of the function's."""
    task_id: Id | None = None
    """An id from ``new_id``, for enqueueing it again to be harmless (SK-3); a new one where it is None."""
    waits_for_unknown: bool = False
    """Whether ``after`` may name tasks that don't exist yet."""


class GivenOptions(TypedDict, total=False):
    """The fields of :class:`EnqueueOptions` as a caller may give them."""

    delay_s: float
    after: TaskId | Sequence[TaskId]
    after_failure: Literal["wait", "run", "fail"] | AfterFailure
    priority: int | None
    task_id: TaskId | None
    waits_for_unknown: bool


def chosen_options(name: str, given: Mapping[str, Any]) -> EnqueueOptions:
    """The options of a task of the function ``name``.

    Raises:
        InvalidTask: an option is unknown or out of range.
    """
    try:
        return EnqueueOptions(**given)
    except ValidationError as error:
        raise InvalidTask(f"{name}: {problems_of(error)}") from error


NO_OPTIONS: Final = EnqueueOptions()
