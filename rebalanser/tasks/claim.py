"""What a task's body holds: the claim, its token, its deadline and its log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rebalanser.errors import Fenced, InternalError
from rebalanser.history import SkuldKind
from rebalanser.tasks import rules
from rebalanser.tasks.asks import MoveAsk
from rebalanser.tasks.model import Stored, Update
from rebalanser.tasks.rules import Decision, Held, Reason, Refused

if TYPE_CHECKING:
    import sqlite3

    from rebalanser.tasks.context import Context

_GONE: dict[Reason, str] = {
    Reason.SUPERSEDED: "another worker has claimed it since",
    Reason.ENDED: "the claim has ended: it failed, was given back, or the task was cancelled",
    Reason.FINISHED: "the task is complete",
    Reason.GONE: "the task was collected",
}


@dataclass(slots=True)
class _Life:
    """Until when the claim lasts, in seconds of the clock that leases are counted on; why it has ended."""

    deadline: float
    ended: Reason | None = None


class Claim:
    """One try at a task, from the claim to its end. May be used from any thread of the body.

    Give ``token`` along with every write to the outside, and have the receiver refuse a smaller one: it grows
    from claim to claim of a task (SK-6).
    """

    def __init__(self, stored: Stored, held: Held, deadline: float, context: Context) -> None:
        self.task_id = stored.head.id
        """The task's id."""
        self.queue = stored.head.queue
        self.name = stored.head.name
        """The name of the task's function."""
        self.number = held.number
        """How many claims of the task there were before this one."""
        self.failures = stored.state.failures
        """How many tries have failed so far."""
        self.token = stored.revision
        """The fencing token: the revision of the store at which this claim was made."""
        self.stop_requested = threading.Event()
        """Set once the body should end early: the claim has ended, its time is up, or the worker stops."""
        self._held = held
        self._context = context
        self._life = _Life(deadline)
        self._stored = stored
        self._lock = threading.Lock()

    @property
    def deadline(self) -> float:
        """Until when the claim lasts unless it is renewed, in seconds of ``time.monotonic()`` (SK-8).

        Counted from before the request was sent. The worker renews it as long as the body runs.
        """
        if self._life.ended is not None:
            return 0.0
        return time.monotonic() + self._life.deadline - self._context.clock.now()

    def still_mine(self) -> bool:
        """Whether the claim lasts, as far as this process knows.

        There is always a moment between this answer and what is done with it; only a receiver that checks the
        token closes that gap.
        """
        return self._life.ended is None and self._context.clock.now() < self._life.deadline

    def update(self, content: bytes) -> int:
        """Add to the claim's log, durably; the number of the update, from 0 (SK-9).

        Raises:
            Fenced: the claim has ended; the body must stop.
            RequestTooLarge: the content is over the engine's limit.
            OutcomeUnknown: the engine did not answer in time: it may stand in the log, now or later.
            RegistryUnavailable: the engine is away; nothing was written.
        """
        with self._lock:
            while True:
                sequence = self._sequence()
                rule = partial(self._updated, sequence=sequence, content=content)
                settled = self._ask(rule, Update(self.number, sequence, content))
                if not isinstance(settled, Refused):
                    self.tell(SkuldKind.UPDATED, settled.revision, sequence)
                    return sequence
                # An update whose outcome was never known took the number: the next one is free.
                self._stored = self._context.read([self.task_id])[self.task_id]

    def _sequence(self) -> int:
        claim = self._stored.state.claim
        if claim is None:
            raise InternalError(f"the task {self.task_id} is held without a claim")
        return claim.updates

    def _updated(self, stored: Stored, sequence: int, content: bytes) -> Decision:
        claim = stored.state.claim
        is_written = claim is not None and claim.number == self.number and claim.updates > sequence
        written = self._context.updated_as(self.task_id, self._held, sequence) if is_written else None
        return rules.update(stored.state, self._held, sequence, content, written)

    def log(self, claim: int | None = None) -> Sequence[Update]:
        """What was written so far, by one claim or by all of them: earlier tries leave their updates behind.

        Raises:
            RegistryUnavailable: the engine did not answer in time.
        """
        return self._context.updates(self.task_id, claim)

    def complete_in(self, connection: sqlite3.Connection, result: bytes | None = None) -> None:
        """Complete the task in a transaction that was begun on a connection to the queue's own SQLite file.

        So a task's output and its completion commit together, or neither does.

        Raises:
            Fenced: the claim has ended; roll back.
            InvalidState: the queue's engine is not SQLite.
        """
        with self._lock:
            decision = self._context.complete_in(connection, self._stored, self._held, result)
        if isinstance(decision, Refused):
            self.end(decision.reason)
            raise Fenced(self._message(decision.reason))

    def renew(self) -> bool:
        """Let it last for its whole time from now; whether it is still this claim's. Called by the worker.

        Raises:
            RetryLater: the engine did not answer in time.
        """
        sent = self._context.clock.now()
        term = self._context.term()
        with self._lock:
            if self._life.ended is not None:
                return False
            try:
                self._ask(lambda stored: rules.renew(stored.state, self._held, term))
            except Fenced:
                return False
        self._life.deadline = sent + term.ttl_s
        self.tell(SkuldKind.CLAIM_RENEWED)
        return True

    def settle(self, rule: Callable[[Stored], Decision]) -> Future[Stored | Refused]:
        """End it by a rule. It is not this worker's any more from now on, whatever the outcome."""
        with self._lock:
            self.end(Reason.ENDED)
            return self._context.submit(MoveAsk(self._stored, rule))

    def end(self, reason: Reason) -> None:
        """It lasts no longer, for whatever reason; the first one stays."""
        if self._life.ended is None:
            self._life.ended = reason
        self.stop_requested.set()

    @property
    def is_over(self) -> bool:
        """Whether the claim has ended, as far as this process knows."""
        return self._life.ended is not None

    @property
    def held(self) -> Held:
        """The name by which the claim asks."""
        return self._held

    def _ask(self, rule: Callable[[Stored], Decision], update: Update | None = None) -> Stored | Refused:
        """Write what the rule gives; refused only where another update has the number."""
        if self._life.ended is not None:
            raise Fenced(self._message(self._life.ended))
        settled = self._context.submit(MoveAsk(self._stored, rule, update=update)).result()
        if not isinstance(settled, Refused):
            self._stored = settled
        elif settled.reason is not Reason.OTHER_CONTENT:
            self.end(settled.reason)
            self.tell(SkuldKind.FENCED)
            raise Fenced(self._message(settled.reason))
        return settled

    def tell(self, kind: SkuldKind, revision: int | None = None, value: int | None = None) -> None:
        """Write down what became of it. Called by the worker."""
        self._context.history.write(kind, self.task_id, self.token, revision=revision, value=value)

    def _message(self, reason: Reason) -> str:
        return f"claim {self.number} of task {self.task_id} ({self.name}): {_GONE.get(reason, reason.value)}"

    def __repr__(self) -> str:
        mine = "mine" if self.still_mine() else "not mine"
        return f"Claim({self.name!r}, {self.task_id}, number={self.number}, token={self.token}, {mine})"
