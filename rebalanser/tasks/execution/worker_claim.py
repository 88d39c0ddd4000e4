"""Claims that a worker of this process holds: it renews and ends them, and their bodies write by them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rebalanser.core.tasks.model import Head, Status, Stored, Update
from rebalanser.core.tasks.rules import ClaimKey, Decision, Reason, Refused
from rebalanser.core.tasks.worker import ClaimLife, RenewalRule
from rebalanser.core.tasks.writes import PendingMove, WriteFuture
from rebalanser.errors import Fenced, InternalError
from rebalanser.history import SkuldKind
from rebalanser.runtime.owned import StopRequest
from rebalanser.tasks.batcher import on_settled
from rebalanser.tasks.claim import Claim, ClaimFacts
from rebalanser.tasks.metrics import claim_outcome
from rebalanser.tasks.results import FilledPayload, fill_results

if TYPE_CHECKING:
    import sqlite3

    from rebalanser.tasks.context import Context
    from rebalanser.tasks.functions import TaskBody

_GONE: dict[Reason, str] = {
    Reason.SUPERSEDED: "another worker has claimed it since",
    Reason.ENDED: "the claim has ended: it failed, was given back, or the task was cancelled",
    Reason.FINISHED: "the task is complete",
    Reason.GONE: "the task was collected",
}


@dataclass(frozen=True, slots=True)
class Renewal:
    """A renewal of a claim: its pending write; ``outcome`` is True if the claim still lasts."""

    pending: PendingMove
    outcome: Future[bool]


class WorkerClaim(Claim):
    """A claim that this process made. May be used from any thread."""

    stop_requested: StopRequest

    def __init__(self, stored: Stored, held: ClaimKey, deadline: float, context: Context) -> None:
        head, state = stored.head, stored.state
        super().__init__(
            ClaimFacts(head.id, head.queue, head.name, held.number, state.failures, stored.revision),
            StopRequest(),
        )
        self.body: TaskBody | None = None
        """Function of the body that runs under it, once known."""
        self.is_completed_within = False
        """True once a transaction of the body has completed the task, whether it commits or not."""
        self._context = context
        self._life = ClaimLife(stored, held, deadline)
        self.error_before = state.error
        """The error of the task as it was claimed."""
        # Guards _life. Never held during a request to the store.
        self._lock = threading.Lock()
        self._updating = threading.Lock()

    @property
    def deadline(self) -> float:
        """See ``Claim.deadline``; 0 once the claim has ended."""
        if self._life.ended is not None:
            return 0.0
        return time.monotonic() + self._life.deadline - self._context.clock.now()

    def still_mine(self) -> bool:
        """See ``Claim.still_mine``."""
        return self._life.lasts(self._context.clock.now()) and not self._context.is_inherited

    def update(self, content: bytes) -> int:
        """See ``Claim.update``."""
        self._context.refuse_fork()
        content = self._context.check("an update", content)
        with self._updating:
            while True:
                sequence = self._sequence()
                rule = partial(
                    self._context.decide_update, held=self.held, sequence=sequence, content=content
                )
                settled = self._write(rule, Update(self.number, sequence, content))
                if not isinstance(settled, Refused):
                    self.record(SkuldKind.UPDATED, settled.revision, sequence)
                    return sequence
                # An update whose outcome was unknown took the number: the next one is free.
                self._know(self._context.read([self.task_id])[self.task_id])

    def _sequence(self) -> int:
        claim = self._life.stored.state.claim
        if claim is None:
            raise InternalError(f"the task {self.task_id} is held without a claim")
        return claim.updates

    def log_page(self, claim: int | None, first: int) -> Sequence[Update]:
        """See ``Claim.log_page``."""
        return self._context.updates(self.task_id, claim, first)

    @property
    def max_bytes(self) -> int:
        """The engine's limit of an update, and of a result."""
        return self._context.max_bytes

    def complete_in(self, connection: sqlite3.Connection, result: bytes | None = None) -> None:
        """See ``Claim.complete_in``."""
        self._context.refuse_fork()
        if result is not None:
            result = self.check_result(result)
            if self.body is not None:
                self.body.refuse_result(result)
        decision = self._context.complete_in(connection, self._life.stored, self.held, result)
        if isinstance(decision, Refused):
            if self.end(decision.reason):
                self._count(decision)
            raise Fenced(self._message(decision.reason))
        self.is_completed_within = True

    def renew(self) -> bool:
        """See ``Claim.renew``."""
        self._context.refuse_fork()
        renewal = self.renewal()
        if renewal is None:
            return False
        self._context.submit(renewal.pending)
        return renewal.outcome.result()

    def renewal(self) -> Renewal | None:
        """Return a renewal to submit; None if the claim is over.

        Its time counts from when it is written, not from now: it may wait for a store that is away.
        """
        if self._life.ended is not None:
            return None
        context = self._context
        rule = RenewalRule(self.held, context.clock.now, context.term)
        renewal = Renewal(PendingMove(self._life.stored, rule), Future())

        def settle(settled: WriteFuture[Stored | Refused]) -> None:
            error = settled.exception()
            if error is None:
                renewal.outcome.set_result(self._renewed(settled.result(), rule.written_at))
            else:
                renewal.outcome.set_exception(error)

        on_settled(renewal.pending.future, settle)
        return renewal

    def _renewed(self, settled: Stored | Refused, sent: float) -> bool:
        if isinstance(settled, Refused):
            self.lose(settled.reason)
            return False
        with self._lock:
            if not self._life.renewed(settled, sent, self._context.ttl_s):
                return False
            self.record(SkuldKind.CLAIM_RENEWED)
        return True

    def _know(self, stored: Stored) -> None:
        """Keep the newest state of the task."""
        with self._lock:
            self._life.learn(stored)

    def fill_results(self, head: Head, payload: bytes) -> FilledPayload:
        """Fill in the results that a payload gets; see ``fill_results``."""
        return fill_results(head, payload, self._context.read)

    def learn_status(self, status: Status, revision: int) -> None:
        """Take the status of the task at a revision, from a watch: the claim may be over."""
        if self._life.is_ended_by(status, revision):
            self.lose(Reason.ENDED)

    def check_result(self, result: bytes) -> bytes:
        """Return the result as it is to be stored; raises what ``complete_in`` does if it can't be."""
        return self._context.check("a result", result)

    def settle(self, rule: Callable[[Stored], Decision]) -> WriteFuture[Stored | Refused]:
        """End it by a rule. It is over for this worker from now on, whatever the outcome.

        The write is kept while the engine is away: a result is stored unless another claim is made meanwhile.
        """
        self.end(Reason.ENDED)
        return self._context.submit(PendingMove(self._life.stored, rule, lasting=True))

    def end(self, reason: Reason) -> bool:
        """End the claim, unless it is over; True if it was not. The first reason is kept."""
        with self._lock:
            is_new = self._life.end(reason)
        self.stop_requested.set()
        return is_new

    def lose(self, reason: Reason) -> None:
        """End the claim, as the store has ended it; the history gets that unless it was over before."""
        if self.end(reason):
            # This claim has completed the task, in a transaction of the body's whose end was not seen here.
            self.record(SkuldKind.COMPLETED if reason is Reason.FINISHED else SkuldKind.FENCED)
            self._count(Refused(reason))

    def _count(self, refused: Refused) -> None:
        self._context.metrics.ended(self.name, claim_outcome(refused, self.failures))

    @property
    def is_over(self) -> bool:
        """True if the claim has ended, as far as this process knows."""
        return self._life.ended is not None

    @property
    def held(self) -> ClaimKey:
        """Number and holder of the claim, which every write of it names."""
        return self._life.held

    def _write(self, rule: Callable[[Stored], Decision], update: Update | None = None) -> Stored | Refused:
        """Write the next state; return a refusal only if another update has the number."""
        if self._life.ended is not None:
            raise Fenced(self._message(self._life.ended))
        settled = self._context.write(PendingMove(self._life.stored, rule, update=update))
        if not isinstance(settled, Refused):
            self._know(settled)
        elif settled.reason is not Reason.OTHER_CONTENT:
            self.lose(settled.reason)
            raise Fenced(self._message(settled.reason))
        return settled

    def record(self, kind: SkuldKind, revision: int | None = None, value: int | None = None) -> None:
        """Write an event of the claim to the history; its completion once."""
        if kind is SkuldKind.COMPLETED:
            if self._life.is_completed:
                return
            self._life.is_completed = True
        self._context.history.write(kind, self.task_id, self.token, revision=revision, value=value)

    def _message(self, reason: Reason) -> str:
        return f"claim {self.number} of task {self.task_id} ({self.name}): {_GONE.get(reason, reason.value)}"
