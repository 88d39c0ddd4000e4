"""Nouns of tasks: small, frozen and comparable."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final, Generic, Self, TypeAlias, TypeGuard, TypeVar, cast

TaskId: TypeAlias = str
"""A flake (SK-1) as 40 hexadecimal digits: their order is the order of time."""
ID_DIGITS: Final = 40
LOWEST_PRIORITY: Final = -(2**31)
HIGHEST_PRIORITY: Final = 2**31 - 1
MAX_FILL_S: Final = 86_400.0
"""Maximum seconds in which a rate limit allows as many starts as its burst."""
_RATE: Final = re.compile(r"([1-9][0-9]{0,5})/([smh])(?: burst ([1-9][0-9]{0,5}))?")
_PERIODS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Status(StrEnum):
    """Status of a task."""

    WAITING = "waiting"
    """The task waits for its time, its dependencies, or a worker."""
    CLAIMED = "claimed"
    COMPLETED = "completed"
    """The task is complete for good (SK-10)."""
    DEAD = "dead"
    """The last try failed: an operator may requeue the task (SK-15)."""
    CANCELLED = "cancelled"
    """An operator or the application has cancelled the task; it may be requeued."""


OPEN: Final = frozenset({Status.WAITING, Status.CLAIMED})
"""Statuses of open tasks, which an owner indexes."""
CLOSED_UNDONE: Final = frozenset({Status.DEAD, Status.CANCELLED})
"""Statuses that count as failed for dependents."""


class AfterFailure(StrEnum):
    """Reaction of a task to a dependency that is dead or cancelled."""

    WAIT = "wait"
    """Wait until the dependency is requeued and complete."""
    RUN = "run"
    """Run without the dependency."""
    FAIL = "fail"
    """Become dead too."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate limit: one start each ``every_s`` seconds, after a rest up to ``burst`` at once (SK-23).

    So in any time of w seconds there are at most ``burst + w / every_s`` starts.
    """

    every_s: float
    burst: int = 1


@lru_cache(maxsize=1024)
def rate_of(text: str) -> Rate:
    """Return the rate of a text such as ``10/s`` or ``100/m burst 20``: per second, minute or hour.

    Raises:
        ValueError: the text is invalid, or its burst takes more than ``MAX_FILL_S`` to come again.
    """
    found = _RATE.fullmatch(text)
    if found is None:
        raise ValueError(
            f"invalid rate {text!r}: use a number per s, m or h, as in '10/s' or '100/m burst 20'"
        )
    starts, period, burst = found.groups(default="1")
    rate = Rate(_PERIODS_S[period] / int(starts), int(burst))
    if rate.burst * rate.every_s > MAX_FILL_S:
        raise ValueError(f"the burst of {text!r} takes more than a day to come again: use a smaller one")
    return rate


LimitId: TypeAlias = tuple[str, str]
"""A limit: the function, and the key, which is empty for the limit of all its tasks."""


@dataclass(frozen=True, slots=True)
class RateMark:
    """The state of a rate limit after its last start (SK-23).

    The limit allows its whole burst again ``debt_s`` seconds after ``at_s`` of the clock ``clock``, or at
    ``wall``, in seconds since 1970, which is for people only. ``revision`` is that of the last start.
    """

    debt_s: float
    clock: str
    at_s: float
    wall: float
    revision: int = 0


@dataclass(frozen=True, slots=True)
class LimitRoom:
    """Room that the limit of a waiting task leaves, for people: ``running`` tasks of it are claimed.

    Its rate lets the next one start ``at`` seconds since 1970, by the wall clock of the host of the last
    start; 0 for now.
    """

    running: int
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Head:
    """All of a task but its payload; nothing of it ever changes (SK-2).

    ``name`` is the function that works on the payload. ``after`` are the tasks that must be complete first.
    ``retries`` is the maximum number of retries, after tries that failed or were cut off. ``timeout_s`` is
    the maximum seconds of one try, None for no limit. ``after_failure`` is the reaction to a dead or
    cancelled task of ``after``, as long as the task was never claimed. A task with a ``unique_key`` keeps out
    others of its name with that key while it is open, and for ``unique_for_s`` seconds after it was enqueued
    (SK-23). Of the tasks of a name with the same ``limit_key`` at most ``max_running`` are claimed at once, 0
    for no limit. ``rate_limit`` is their maximum rate (``rate_of``), empty for no limit.
    """

    id: TaskId
    queue: str
    name: str
    priority: int = 0
    after: tuple[TaskId, ...] = ()
    retries: int = 0
    timeout_s: float | None = None
    after_failure: AfterFailure = AfterFailure.WAIT
    unique_key: str = ""
    unique_for_s: float = 0.0
    limit_key: str = ""
    max_running: int = 0
    rate_limit: str = ""

    @property
    def is_limited(self) -> bool:
        """True if claims of it are limited (SK-23)."""
        return bool(self.max_running or self.rate_limit)

    @property
    def limit(self) -> LimitId:
        """The limit that it counts for, if it is limited."""
        return self.name, self.limit_key


@dataclass(frozen=True, slots=True)
class Task:
    """A task as enqueued (SK-2)."""

    head: Head
    payload: bytes


@dataclass(frozen=True, slots=True)
class ClaimTerm:
    """Time for which a claim lasts: ``ttl_s`` seconds, which end at ``ends_at_s`` of the clock ``clock``.

    ``clock`` names one boot of one host. Processes on it compare directly; all others count ``ttl_s`` from
    when they read this.
    """

    ttl_s: float
    clock: str
    ends_at_s: float


@dataclass(frozen=True, slots=True)
class ClaimState:
    """The last claim of a task: the ``number``-th, counted from 0, never reused (SK-6).

    ``holder`` is unique to the attempt that made the claim, ``worker`` a label for people. ``updates`` is the
    number of its updates, which is the number of the next one (SK-9).
    """

    number: int
    holder: str
    worker: str
    term: ClaimTerm
    updates: int = 0


@dataclass(frozen=True, slots=True)
class TaskState:
    """State of a task.

    ``claim`` is the last claim, also after it has ended. ``due`` is the wall time (seconds since 1970) before
    which the task waits, 0 if it may run at once. ``failures`` counts the tries that failed or were cut off
    since it was enqueued or requeued, and ``error`` is the error of the last one.
    """

    status: Status = Status.WAITING
    claim: ClaimState | None = None
    due: float = 0.0
    failures: int = 0
    error: str = ""
    result: bytes | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """A task as the engine holds it, its payload aside; ``revision`` is that of its state's last change.

    ``partition`` is that of the task (SK-2).
    """

    head: Head
    state: TaskState
    revision: int
    partition: int


@dataclass(frozen=True, slots=True)
class Update:
    """One entry of a claim's log (SK-9)."""

    claim: int
    sequence: int
    content: bytes


R_co = TypeVar("R_co", covariant=True)


class EnqueueAnswer(StrEnum):
    """Answer to an enqueue: the place of the task (SK-4), or that it existed before (SK-23)."""

    COMMITTED = "committed"
    """The task is in the engine, for good."""
    SPOOLED = "spooled"
    """The task is in the outbox, synced to the disk of this host, until the engine is back."""
    DUPLICATE = "duplicate"
    """An earlier task has the same unique key; no other task was made."""


class Result:
    """Placeholder, among arguments, of the result of a task, or of a planned call ``of`` a function."""

    __slots__ = ("of",)

    def __init__(self, of: object) -> None:
        self.of = of

    def __repr__(self) -> str:
        return f"Result({self.of!r})"


class Enqueued(str, Generic[R_co]):
    """A task's id; ``answer`` is the place of the task (SK-4), or that it is an earlier one (SK-23).

    ``R_co`` is what its function returns, for ``wait``.
    """

    answer: EnqueueAnswer

    @property
    def result(self) -> R_co:
        """Placeholder of the body's result, as an argument of another task, alone or in a list.

        Type checkers take it for that value. A task that gets it waits for this one.
        """
        return cast("R_co", Result(self))

    def __new__(cls, task: TaskId, answer: EnqueueAnswer = EnqueueAnswer.COMMITTED) -> Self:
        """Make the id of a stored task."""
        enqueued = super().__new__(cls, task)
        enqueued.answer = answer
        return enqueued


MAX_RESULTS_BYTES: Final = 16 << 20
"""Maximum bytes of all results that one task gets."""


MAX_SECONDS: Final = 315_576_000.0
"""Maximum of a delay, a pause and a time limit: ten years. Threads can't wait much longer."""


def is_seconds(value: object) -> TypeGuard[int | float]:
    """True for a finite number from 0."""
    return is_number(value) and 0 <= value < math.inf


def is_number(value: object) -> TypeGuard[int | float]:
    """True for a number, which True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
