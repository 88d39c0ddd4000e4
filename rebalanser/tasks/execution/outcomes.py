"""Outcomes of a task's body, and the exceptions by which a body chooses one."""

from __future__ import annotations

import asyncio
import re
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias

import pydantic
from pydantic_core import from_json, to_json

from rebalanser.core.tasks.failures import MAX_SUMMARY, storable, summary_of
from rebalanser.core.tasks.model import MAX_SECONDS, is_seconds
from rebalanser.errors import InvalidArgument, InvalidTask
from rebalanser.tasks.functions import TaskBody

MAX_ERROR: Final = 4000
"""Maximum characters of an error that are stored with a task."""
MAX_MESSAGE: Final = 1000
"""Maximum characters of the message of an error that is too long to be stored whole."""
PUBLIC: Final = "rebalanser.tasks"
"""Module from which users import the exceptions of this one; stored errors and ``error_type`` name it."""
_TYPE_AND_MESSAGE: Final = re.compile(r"([^\W\d][\w.<>]*)(?:: (.*))?")
_BEFORE_AN_ERROR: Final = re.compile(
    r"^ {0,2}(?:\+ Exception Group )?Traceback \(most recent call last\):\n"
    r"|^The above exception was the direct cause of the following exception:\n"
    r"|^During handling of the above exception, another exception occurred:\n",
    re.MULTILINE,
)
"""Line before an error's frames; if it has none, the line between it and its cause or context."""
_MARGIN: Final = re.compile(r" {0,2}\| ")
"""Margin of the lines of an exception group."""
_NOT_THE_USERS: Final = tuple(
    f"{folder}/"
    for folder in (
        Path(__file__).resolve().parents[1],
        *(Path(package.__path__[0]).resolve() for package in (asyncio, pydantic)),
    )
)
"""Folders of frames above the body, which say nothing about its error."""


class Retry(Exception):
    """Raised by a body: this try failed, and the next one begins after ``delay_s`` seconds at the earliest.

    Raises:
        InvalidArgument: ``delay_s`` is no number of seconds from 0 to ten years.
    """

    __module__ = PUBLIC

    def __init__(self, message: str = "the task asks to be tried again", *, delay_s: float) -> None:
        super().__init__(message)
        given: object = delay_s
        if not is_seconds(given) or given > MAX_SECONDS:
            raise InvalidArgument(
                f"delay_s is {delay_s!r}; it must be a number of seconds from 0 to {MAX_SECONDS:.0f}"
            )
        self.delay_s = delay_s

    def __reduce__(self) -> tuple[Any, ...]:
        return _retry, (str(self), self.delay_s)


def _retry(message: str, delay_s: float) -> Retry:
    return Retry(message, delay_s=delay_s)


class GiveUp(Exception):
    """Raised by a body: no further try can help. The task is dead, for an operator to look at."""

    __module__ = PUBLIC


class BodyLost(Exception):
    """The process of a body ended, or could not go on, before the body had returned."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The body has returned ``result``, as JSON; None if it returned None."""

    result: bytes | None


@dataclass(frozen=True, slots=True)
class Raised:
    """The body has raised ``error``; ``text`` is stored: the error with its traceback.

    ``types`` are the names of its type and base types (``name_of_type``): ``error`` itself may be a
    stand-in for an error of another process.
    """

    error: BaseException
    text: str
    types: frozenset[str]

    def is_retried(self, retry_on: Sequence[type[Exception]] | None) -> bool:
        """True unless the body has raised an exception that is of none of these types.

        The end of its process and its cancellation are no exceptions of the body: they are retried.
        """
        if retry_on is None or _EXCEPTION not in self.types or _BODY_LOST in self.types:
            return True
        return not self.types.isdisjoint(map(name_of_type, retry_on))


class Cut(StrEnum):
    """Reason for which a worker ended a body, or did not begin it."""

    TIMED_OUT = "timed_out"
    """The try took longer than its function's ``timeout_s`` (SK-15)."""
    LOST = "lost"
    """The claim has ended, or its time was up before it was renewed (SK-8)."""
    STOPPED = "stopped"
    """The worker stops, or could not begin: the try is not counted."""


BodyOutcome: TypeAlias = Returned | Raised | Cut


def raised(error: BaseException) -> Raised:
    """Return the outcome of a body that raised this error."""
    try:
        text = _shortened(_without_callers(traceback.TracebackException.from_exception(error)))
    except Exception:  # whatever a class does when it is shown
        text = summary_of(error)
    return Raised(error, storable(text), frozenset(map(name_of_type, type(error).__mro__)))


def name_of_type(kind: type) -> str:
    """Return the name of a type with its module; types of a script have one name in all processes."""
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    return f"{module}.{kind.__qualname__}"


_EXCEPTION: Final = name_of_type(Exception)
_BODY_LOST: Final = name_of_type(BodyLost)


def _shortened(shown: traceback.TracebackException) -> str:
    """Return an error as text, with as many of its last frames as fit."""
    text = "".join(shown.format()).strip()
    last = "".join(shown.format_exception_only()).strip()
    frames = text.removesuffix(last)
    if len(text) <= MAX_ERROR or frames == text:  # of a group the type comes before its errors
        return text[:MAX_ERROR]
    last = last[:MAX_MESSAGE]
    kept = frames[-(MAX_ERROR - len(last)) :]
    return (frames if kept == frames else kept.partition("\n")[2]) + last


def split_error(text: str) -> tuple[str, str]:
    """Return the type name of a stored error, and the first line of its message.

    The name is empty if no body has raised it.
    """
    lines = [_MARGIN.sub("", line, 1) for line in _BEFORE_AN_ERROR.split(text)[-1].splitlines()]
    first = next((line for line in lines if line and not line[0].isspace()), text.strip().partition("\n")[0])
    found = _TYPE_AND_MESSAGE.fullmatch(first)
    kind, message = (found[1], found[2] or "") if found else ("", first)
    return kind, message[:MAX_SUMMARY]


def _without_callers(shown: traceback.TracebackException) -> traceback.TracebackException:
    """Keep only the user's frames of an error, its causes and its contexts."""
    left: list[traceback.TracebackException | None] = [shown]
    while left:
        each = left.pop()
        if each is not None:
            frames = [frame for frame in each.stack if not frame.filename.startswith(_NOT_THE_USERS)]
            each.stack = traceback.StackSummary.from_list(frames)
            left += (each.__cause__, each.__context__, *(each.exceptions or ()))
    return shown


def returned(value: object, body: TaskBody | None = None) -> Returned | Raised:
    """Return the outcome of a body that returned this.

    A value that is no valid JSON, or that does not fit the return type of ``body``, fails the task.
    """
    outcome = (
        Returned(None) if value is None else _written(value, to_json if body is None else body.write_result)
    )
    if body is None or isinstance(outcome, Raised):
        return outcome
    try:
        body.refuse_result(outcome.result)
    except InvalidTask as error:
        return raised(GiveUp(str(error)))
    except Exception as error:  # a validator may raise anything
        return raised(GiveUp(f"{body.name}: the result can't be checked: {summary_of(error)}"))
    return outcome


def _written(value: object, write: Callable[[object], bytes]) -> Returned | Raised:
    """Write a result as JSON."""
    try:
        result = write(value)
    except Exception as error:  # whatever a class does when it is serialized
        return raised(GiveUp(f"the result is not JSON: {summary_of(error)}"))
    try:
        from_json(result, allow_inf_nan=False)
    except ValueError as error:
        reason = f" that can be read again: {error}"
        with suppress(ValueError):
            from_json(result)
            reason = ", which can't represent NaN and infinities"
        return raised(GiveUp(f"the result is not JSON{reason}"))
    return Returned(result)
