"""Writes what becomes of claims that are held over HTTP into the server's history (AU-4).

Whoever holds such a claim writes no history, so the server does it in his place. He may ask any server of
the queue; what each accepts it writes with the claim's token, which he is given as a part of the claim's
holder and gives back with all that he asks. The server that made the claim also writes its end: when it was
settled there, or when its time is over without having been renewed there, as the holder has to stop by then.

Updates have their numbers in the history as long as the server that made the claim has accepted all of them.
One that comes after another server has accepted some has none, as a history that was cut off with that server
would look like a gap in the log.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

from rebalanser.history import SkuldKind
from rebalanser.tasks.context import Context
from rebalanser.tasks.model import Stored, TaskId
from rebalanser.tasks.partitions import Claimed
from rebalanser.tasks.rules import Held
from rebalanser.tasks.timers import Timers

_SEPARATOR: Final = "."
_MAX_DIGITS: Final = 18


@dataclass(slots=True)
class _Lent:
    """A claim that this server made and that has not ended here."""

    holder: str
    token: int
    updates: int | None = 0
    """How many updates it has, None where another server may have accepted some."""


def named(claimed: Claimed) -> str:
    """The holder as it is told to whoever holds the claim, its token with it."""
    return f"{claimed.held.holder}{_SEPARATOR}{claimed.stored.revision}"


def parsed(number: int, holder: str) -> tuple[Held, int | None]:
    """The claim that a holder names, and its token, None where the name has none."""
    name, _, token = holder.partition(_SEPARATOR)
    is_token = token.isascii() and token.isdecimal() and len(token) <= _MAX_DIGITS
    return Held(number, name), int(token) if is_token else None


class Telling:
    """What one server writes of the claims that it made or was asked about. May be used from any thread.

    Without a place for a history it does nothing.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._lent: dict[TaskId, _Lent] = {}
        self._ends = Timers()

    def claimed(self, claimed: Claimed) -> None:
        """A claim was made, and somebody is to be told of it."""
        if not self._context.history.is_written:
            return
        stored = claimed.stored
        task, token = stored.head.id, stored.revision
        with self._lock:
            self._end(task)
            self._lent[task] = _Lent(claimed.held.holder, token)
            self._ends.set(task, claimed.sent_at + self._context.ttl_s)
            self._write(SkuldKind.CLAIMED, task, token, token, claimed.held.number)

    def renewed(self, task: TaskId, held: Held, token: int | None, ends_at: float) -> None:
        """It lasts until ``ends_at``, seconds of the context's clock."""
        with self._lock:
            if self._lent_to(task, held) is not None:
                self._ends.set(task, ends_at)
            self._write(SkuldKind.CLAIM_RENEWED, task, token)

    def updated(self, stored: Stored, held: Held, token: int | None, sequence: int) -> None:
        """An update was accepted, or stood there already."""
        task, number = stored.head.id, None
        with self._lock:
            lent = self._lent_to(task, held)
            if lent is not None and lent.updates is not None:
                if sequence < lent.updates:
                    return
                number = sequence if sequence == lent.updates else None
                lent.updates = None if number is None else number + 1
            self._write(SkuldKind.UPDATED, task, token, stored.revision, number)

    def completed(self, stored: Stored, held: Held, token: int | None) -> None:
        """The task is complete by this claim."""
        task = stored.head.id
        with self._lock:
            self._write(SkuldKind.COMPLETED, task, token, stored.revision)
            if self._lent_to(task, held) is not None:
                self._end(task)

    def ended(self, task: TaskId, held: Held) -> None:
        """It has failed or was given back, or nobody was told of it."""
        with self._lock:
            if self._lent_to(task, held) is not None:
                self._end(task)

    def fenced(self, task: TaskId, held: Held, token: int | None) -> None:
        """Something that its holder asked was refused: he has to stop."""
        with self._lock:
            self._write(SkuldKind.FENCED, task, token)
            if self._lent_to(task, held) is not None:
                self._end(task)

    def end_over(self) -> float | None:
        """Write the end of claims whose time is over; when the next one's is, None where there is none."""
        now = self._context.clock.now()
        with self._lock:
            for task in list(self._ends.pop_due(now)):
                self._end(task)
            return self._ends.next()

    def _lent_to(self, task: TaskId, held: Held) -> _Lent | None:
        """The claim, if this server made it and it has not ended here."""
        lent = self._lent.get(task)
        return lent if lent is not None and lent.holder == held.holder else None

    def _end(self, task: TaskId) -> None:
        self._ends.drop(task)
        lent = self._lent.pop(task, None)
        if lent is not None:
            self._write(SkuldKind.CLAIM_ENDED, task, lent.token)

    def _write(
        self,
        kind: SkuldKind,
        task: TaskId,
        token: int | None,
        revision: int | None = None,
        value: int | None = None,
    ) -> None:
        if token is not None:
            self._context.history.write(kind, task, token, revision=revision, value=value)
