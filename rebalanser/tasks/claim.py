"""Claim of a task, as its body holds it: token, deadline and log."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rebalanser.core.tasks.model import TaskId, Update
from rebalanser.errors import InvalidArgument, RequestTooLarge

if TYPE_CHECKING:
    import sqlite3


LOG_PAGE: Final = 100
"""Maximum number of updates of a log that are in memory at once."""


def read_log(
    page: Callable[[int | None, int], Sequence[Update]], claims: int, claim: int | None = None
) -> Iterator[Update]:
    """Iterate over the updates of one claim, or of the first ``claims``, the earliest first (SK-9).

    ``page`` reads some, of one claim from a number on or of all from the first; none if there are no more.
    """
    found = page(claim, 0)
    while found:
        yield from found
        last = found[-1]
        found = page(last.claim, last.sequence + 1)
        number = last.claim + 1
        while not found and claim is None and number < claims:
            found = page(number, 0)
            number += 1


def check_content(what: str, content: object, max_bytes: int) -> bytes:
    """Check the content of an update or a result before it is queued; return it as bytes.

    Raises:
        InvalidArgument: it is not bytes.
        RequestTooLarge: it is over the engine's limit.
    """
    if not isinstance(content, bytes | bytearray | memoryview):
        raise InvalidArgument(f"{what} is of type {type(content).__name__}; it must be bytes")
    stored = bytes(content)
    if len(stored) > max_bytes:
        raise RequestTooLarge(f"{what} has {len(stored)} bytes; the limit is {max_bytes}")
    return stored


@dataclass(frozen=True, slots=True)
class ClaimFacts:
    """Constant facts of a claim; ``Claim`` explains the fields."""

    task_id: TaskId
    queue: str
    name: str
    number: int
    failures: int
    token: int


class Claim(ABC):
    """One try at a task, from the claim to its end. May be used from any thread of the body.

    Send ``token`` with every write to a fenced resource, which refuses a smaller one: it grows from claim to
    claim of a task (SK-6).
    """

    def __init__(self, facts: ClaimFacts, stop_requested: threading.Event) -> None:
        self.task_id = facts.task_id
        """The task's id."""
        self.queue = facts.queue
        self.name = facts.name
        """The name of the task's function."""
        self.number = facts.number
        """Number of earlier claims of the task."""
        self.failures = facts.failures
        """Number of tries that have failed so far."""
        self.token = facts.token
        """The fencing token: the revision of the store at which this claim was made."""
        self.stop_requested = stop_requested
        """Set once the body should end early: the claim has ended, its time is up, or the worker stops."""
        self.facts = facts
        """Facts of the claim that never change."""

    @property
    @abstractmethod
    def deadline(self) -> float:
        """End of the claim unless it is renewed, in seconds of ``time.monotonic()`` (SK-8).

        Counted from before the request was sent. The worker renews it as long as the body runs.
        """

    @abstractmethod
    def still_mine(self) -> bool:
        """True if the claim lasts, as far as this process knows.

        There is always a moment between this answer and what is done with it; only a receiver that checks the
        token closes that gap.
        """

    @abstractmethod
    def update(self, content: bytes) -> int:
        """Add to the claim's log, durably; return the number of the update, from 0 (SK-9).

        Raises:
            Fenced: the claim has ended; the body must stop.
            InvalidArgument: the content is no bytes; nothing was written.
            RequestTooLarge: the content is over the engine's limit; nothing was written.
            OutcomeUnknown: the engine did not answer in time: it may be in the log, now or later.
            RegistryUnavailable: the engine is away; nothing was written.
        """

    def log(self, claim: int | None = None) -> Iterator[Update]:
        """Iterate over all updates so far, of one claim or of all: earlier tries leave their updates behind.

        The earliest come first. They are read page by page, while they are taken from the iterator.

        Raises:
            RegistryUnavailable: the engine did not answer in time.
        """
        return read_log(self.log_page, self.number + 1, claim)

    @abstractmethod
    def log_page(self, claim: int | None, first: int) -> Sequence[Update]:
        """Read at most ``LOG_PAGE`` updates, of a claim from number ``first`` on; None for all claims.

        Raises:
            RegistryUnavailable: the engine did not answer in time.
        """

    @abstractmethod
    def complete_in(self, connection: sqlite3.Connection, result: bytes | None = None) -> None:
        """Complete the task in a transaction that was begun on a connection to the queue's own SQLite file.

        So a task's output and its completion commit together, or neither does.

        Raises:
            Fenced: the claim has ended; roll back.
            InvalidArgument: the result is no bytes.
            InvalidTask: the result does not fit the function's return type.
            RequestTooLarge: the result is over the engine's limit.
            InvalidState: the queue's engine is not SQLite, or the body runs in a process of its own.
        """

    @abstractmethod
    def renew(self) -> bool:
        """Renew the claim for its whole time from now; False if it has ended. Called by the worker.

        Raises:
            RetryLater: the engine did not answer in time.
        """

    def __repr__(self) -> str:
        mine = "mine" if self.still_mine() else "not mine"
        return f"Claim({self.name!r}, {self.task_id}, number={self.number}, token={self.token}, {mine})"
