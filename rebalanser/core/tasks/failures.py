"""Kinds of errors of background loops: of workers, tickers, writers, outboxes and servers.

======  =======================================================  ============================================
kind    errors                                                   consequence
======  =======================================================  ============================================
poison  of one task: too large, of a wrong type, no JSON         that task's step ends, and nothing else
outage  of the store: away, full, read-only, locked              retried with backoff, for as long as it takes
bug     all others: unforeseen                                   logged with the traceback and retried; once
                                                                 they persist the process ends
======  =======================================================  ============================================
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Final

from rebalanser.core.clock import GrowingDelay
from rebalanser.core.fields import fields_for
from rebalanser.errors import (
    InvalidArgument,
    InvalidTask,
    RegistryRefused,
    RequestTooLarge,
    RetryLater,
    UnusableFolder,
)

MAX_SUMMARY: Final = 500
"""Maximum characters of an error in one line."""


def summary_of(error: BaseException) -> str:
    """Return an error's type and message in one line, even if its class can't show it."""
    try:
        summary = repr(error)
    except Exception:  # whatever a class does when it is shown
        summary = type(error).__name__
    return storable(summary[:MAX_SUMMARY])


def storable(text: str) -> str:
    """Escape lone surrogates, as in some file names, which have no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


SHORTEST_PAUSE_S: Final = 0.05
"""Seconds between the first error of a loop and its next step."""
LONGEST_PAUSE_S: Final = 2.0
"""Maximum seconds between two tries, and so between the end of an outage and the next step."""
REPORT_S: Final = 30.0
"""Seconds between two log lines about one loop that keeps failing."""
PERSISTS_S: Final = 60.0
"""Seconds after which bugs of a loop that has done nothing else meanwhile end the process."""
PERSISTS_ATTEMPTS: Final = 10
"""Minimum number of such bugs: a loop with little to do is not given up for two in an hour."""


class ErrorKind(StrEnum):
    """Kind of an error, by what follows from it."""

    POISON = "poison"
    """An error of one task, which comes again at each try of it."""
    OUTAGE = "outage"
    """The store is away or takes nothing now: the same step succeeds later."""
    BUG = "bug"
    """An unforeseen error."""


def kind_of(error: BaseException) -> ErrorKind:
    """Return the kind of an error that a step, or a part of one, has raised."""
    match error:
        case RequestTooLarge() | InvalidTask() | InvalidArgument():
            return ErrorKind.POISON
        case RetryLater() | RegistryRefused() | UnusableFolder() | OSError():
            return ErrorKind.OUTAGE
        case _:
            return ErrorKind.BUG


@dataclass(frozen=True, slots=True)
class LoopFailure:
    """A loop that fails now: its error, the first one's time (seconds since 1970), the attempts in a row.

    Under the name ``task NAME`` it is a function whose tasks this worker can't read (SK-21), and their
    number.
    """

    loop: str
    kind: ErrorKind
    error: str
    since: float
    attempts: int


@dataclass(slots=True)
class _Failing:
    """A loop's errors since its last step that succeeded."""

    delay: GrowingDelay
    began: float
    since: float
    reported: float
    kind: ErrorKind = ErrorKind.OUTAGE
    error: str = ""
    attempts: int = 0
    bug_since: float | None = None
    bugs: int = 0


@dataclass(frozen=True, slots=True)
class FailedStep:
    """Consequence of an error of a loop's step."""

    pause_s: float
    """Seconds before the next step."""
    kind: ErrorKind
    attempts: int
    is_due: bool
    """True if it is time to report it."""
    gives_up: str
    """Reason why the process ends; empty if it continues."""


class LoopFailures:
    """The failing loops of a process, and the consequences. Pure.

    ``now`` is in seconds of a monotonic clock, ``wall`` in seconds since 1970.
    """

    def __init__(self) -> None:
        self._failing: dict[str, _Failing] = {}

    def __contains__(self, loop: str) -> bool:
        return loop in self._failing

    def troubles(self) -> list[LoopFailure]:
        """Return the loops that fail now."""
        return [
            LoopFailure(loop, **fields_for(LoopFailure, each)) for loop, each in sorted(self._failing.items())
        ]

    def failed(
        self, loop: str, error: BaseException, now: float, wall: float, *, ends_process: bool = True
    ) -> FailedStep:
        """Note an error. Bugs that persist end the process only if ``ends_process``."""
        kind = kind_of(error)
        failing = self._failing.get(loop)
        is_due = failing is None or failing.kind is not kind or now - failing.reported >= REPORT_S
        if failing is None:
            delay = GrowingDelay(SHORTEST_PAUSE_S, LONGEST_PAUSE_S)
            failing = self._failing[loop] = _Failing(delay, now, wall, now)
        failing.kind, failing.error = kind, summary_of(error)
        failing.attempts += 1
        if kind is ErrorKind.BUG:
            failing.bug_since = now if failing.bug_since is None else failing.bug_since
            failing.bugs += 1
        else:
            failing.bug_since, failing.bugs = None, 0
        if is_due:
            failing.reported = now
        lasted_s = 0.0 if failing.bug_since is None else now - failing.bug_since
        persists = ends_process and lasted_s >= PERSISTS_S and failing.bugs >= PERSISTS_ATTEMPTS
        gives_up = f"{loop} has failed for {lasted_s:.0f} s: {failing.error}" if persists else ""
        return FailedStep(failing.delay.after(0.0), kind, failing.attempts, is_due, gives_up)

    def ended(self, loop: str) -> tuple[int, float] | None:
        """Forget a loop's failures; return their number and the time of the first, None if there are none."""
        failing = self._failing.pop(loop, None)
        return None if failing is None else (failing.attempts, failing.began)


class concerning:  # noqa: N801 - named as a context manager is
    """Context manager: errors of one of several calls begin with its place, unless that is empty.

    It is a class, since a generator would take as long as the rest of an enqueue's checks.
    """

    __slots__ = ("_place",)

    def __init__(self, place: str) -> None:
        self._place = place

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._place and isinstance(error, InvalidTask | RequestTooLarge):
            placed = copy.copy(error)  # another caller may have the error too
            placed.args = (f"{self._place}: {error}",)
            raise placed from error
