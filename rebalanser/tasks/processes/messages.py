"""Messages between a worker and a body's child process, pickled, over a pipe of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rebalanser.errors import RebalanserError
from rebalanser.tasks.claim import Facts
from rebalanser.tasks.outcomes import Returned


@dataclass(frozen=True, slots=True)
class Begin:
    """To the child, first: what ``multiprocessing.spawn.prepare`` takes, and where each function is."""

    preparation: Mapping[str, Any]
    references: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ready:
    """From the child: its functions are imported; or what went wrong."""

    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """To the child, which is idle: a body to call. ``deadline`` is that of the claim.

    ``max_bytes`` is the limit of an update, of a result, and of an error that is sent back.
    """

    facts: Facts
    deadline: float
    payload: bytes
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    """From the child: the body has raised; the error is pickled, None where it can't be or is too large.

    ``types`` are those of :class:`~rebalanser.tasks.outcomes.Raised`.
    """

    told: str
    types: frozenset[str]
    summary: str
    error: bytes | None


@dataclass(frozen=True, slots=True)
class Done:
    """From the child: how the body has ended, and that it is idle."""

    outcome: Returned | Failed


@dataclass(frozen=True, slots=True)
class AskUpdate:
    """An update of the claim's log."""

    content: bytes


@dataclass(frozen=True, slots=True)
class AskLog:
    """A page of the log, of one claim from a number on or of all."""

    claim: int | None
    first: int


@dataclass(frozen=True, slots=True)
class AskRenewal:
    """A renewal of the claim."""


@dataclass(frozen=True, slots=True)
class AskDeadline:
    """Question for the end of the claim."""


ChildAsk: TypeAlias = AskUpdate | AskLog | AskRenewal | AskDeadline


@dataclass(frozen=True, slots=True)
class Question:
    """From the child: something that is asked of the claim; the answer has its number."""

    number: int
    ask: ChildAsk


@dataclass(frozen=True, slots=True)
class Answered:
    """To the child: what was asked for, or the error that was raised."""

    number: int
    value: Any = None
    error: RebalanserError | None = None
