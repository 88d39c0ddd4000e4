"""Claims that are held over HTTP: the requests of their holders, and their history (AU-4).

Clients write no history, so the server does. A client may send its requests to any server of the queue. Each
server records the requests that it accepts, with the claim's token, which is part of the holder that the
client sends. An access must begin and end in one history, so the server that made the claim also records its
end: when the claim is settled there, when a watch reports that it was settled elsewhere, or when its time is
over, as the holder must stop by then. If an operator cancels the task, the access lasts until the holder
stops.

That end must be recorded before the next claim of the task begins, which another server may make. So a server
that fails or releases a claim of another server makes the task wait for ``HISTORY_DELAY_S`` seconds.

The history has the numbers of updates while the server that made the claim has accepted all of them. Once
another server has accepted one, later ones have no number: if that server's history were cut off, the log
would seem to have a gap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from rebalanser.core.tasks import rules
from rebalanser.core.tasks.claims import Claimed
from rebalanser.core.tasks.clocks import Timers
from rebalanser.core.tasks.model import ClaimTerm, Status, Stored, TaskId, TaskState, Update
from rebalanser.core.tasks.rules import ClaimKey, Reason, Refused
from rebalanser.core.tasks.store import Change, ChangesLost
from rebalanser.core.tasks.writes import Decide, PendingMove
from rebalanser.errors import Fenced, RetryLater
from rebalanser.history import SkuldKind
from rebalanser.tasks.context import Context
from rebalanser.tasks.engine import EngineWatch
from rebalanser.tasks.http.problems import FENCED, UNKNOWN, UPDATE_CONFLICT, ProblemRaised
from rebalanser.tasks.metrics import claim_outcome
from rebalanser.tasks.queue import Queue

HISTORY_DELAY_S: Final = 1.0
"""Seconds; more than the watch of a working engine takes to report a change."""
_SEPARATOR: Final = "."
_MAX_DIGITS: Final = 18


@dataclass(slots=True)
class _OpenClaim:
    """A claim that this server made and that has not ended here."""

    holder: str
    token: int
    number: int
    term: ClaimTerm | None
    """Its last known term."""
    updates: int | None = 0
    """Number of its updates; None if another server may have accepted some."""
    completes_here: bool = False


def holder_with_token(claimed: Claimed) -> str:
    """Return the holder that the client gets, with the claim's token."""
    return f"{claimed.held.holder}{_SEPARATOR}{claimed.stored.revision}"


def parse_holder(number: int, holder: str) -> tuple[ClaimKey, int | None]:
    """Return the claim that a holder names, and its token, None if the name has none."""
    name, _, token = holder.partition(_SEPARATOR)
    is_token = token.isascii() and token.isdecimal() and len(token) <= _MAX_DIGITS
    return ClaimKey(number, name), int(token) if is_token else None


class ClaimHistory:
    """History of the claims that one server made or accepted requests of. May be used from any thread.

    No-op if no history is written. ``wake`` wakes the thread that calls ``end_over``.
    """

    def __init__(self, context: Context, wake: Callable[[], None]) -> None:
        self._context = context
        self._wake = wake
        self._lock = threading.Lock()
        self._open: dict[TaskId, _OpenClaim] = {}
        self._ends = Timers()
        self._watch: EngineWatch | None = None
        self._must_read = False

    def follow(self) -> None:
        """Watch the claimed tasks.

        Raises:
            RegistryUnavailable: the engine did not answer in time.
        """
        if not self._context.history.is_written:
            return
        self._watch = self._context.watch(self._receive, self._is_open)

    def close(self) -> None:
        """Stop watching. Closing twice does nothing."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def claimed(self, claimed: Claimed) -> None:
        """Write that a claim was made for a client."""
        if not self._context.history.is_written:
            return
        stored = claimed.stored
        task, token = stored.head.id, stored.revision
        with self._lock:
            self._end(task)
            made = stored.state.claim
            self._open[task] = _OpenClaim(
                claimed.held.holder, token, claimed.held.number, None if made is None else made.term
            )
            self._ends.set(task, claimed.sent_at + self._context.ttl_s)
            self._write(SkuldKind.CLAIMED, task, token, token, claimed.held.number)

    def renewed(self, task: TaskId, held: ClaimKey, token: int | None, ends_at: float) -> None:
        """Write that a claim was renewed: it lasts until ``ends_at``, in seconds of the context's clock."""
        with self._lock:
            if self._open_claim(task, held) is not None:
                self._ends.set(task, ends_at)
            self._write(SkuldKind.CLAIM_RENEWED, task, token)

    def updated(self, stored: Stored, held: ClaimKey, token: int | None, sequence: int) -> None:
        """Write that an update was accepted, now or before."""
        task, number = stored.head.id, None
        with self._lock:
            known = self._open_claim(task, held)
            if known is not None and known.updates is not None:
                if sequence < known.updates:
                    return
                number = sequence if sequence == known.updates else None
                known.updates = None if number is None else number + 1
            self._write(SkuldKind.UPDATED, task, token, stored.revision, number)

    def completing(self, task: TaskId, held: ClaimKey) -> None:
        """Note that a claim is about to be completed here: its completion is written before its end."""
        with self._lock:
            known = self._open_claim(task, held)
            if known is not None:
                known.completes_here = True

    def completed(self, stored: Stored, held: ClaimKey, token: int | None) -> None:
        """Write that the claim has completed its task."""
        task = stored.head.id
        with self._lock:
            self._write(SkuldKind.COMPLETED, task, token, stored.revision)
            if self._open_claim(task, held) is not None:
                self._end(task)

    def ended(self, task: TaskId, held: ClaimKey) -> None:
        """Write that a claim has failed, was given back, or reached no client."""
        with self._lock:
            if self._open_claim(task, held) is not None:
                self._end(task)

    def fenced(self, task: TaskId, held: ClaimKey, token: int | None) -> None:
        """Write that a request of its holder was refused: the holder must stop."""
        with self._lock:
            self._write(SkuldKind.FENCED, task, token)
            if self._open_claim(task, held) is not None:
                self._end(task)

    def due_after(self, task: TaskId, held: ClaimKey) -> float:
        """Return the wall time until which a task waits after its claim is ended here; 0 for no wait.

        By then the server that made the claim, if it is another one, knows of its end.
        """
        with self._lock:
            is_known = not self._context.history.is_written or self._open_claim(task, held) is not None
        return 0.0 if is_known else self._context.clock.wall() + HISTORY_DELAY_S

    def end_over(self) -> float | None:
        """Write the end of claims that are over; return the end of the next one, None if there is none."""
        self._read_again()
        now = self._context.clock.now()
        with self._lock:
            for task in list(self._ends.pop_due(now)):
                self._end(task)
            return self._ends.next()

    def _is_open(self, change: Change) -> bool:
        with self._lock:
            return change.task in self._open

    def _receive(self, news: Sequence[Stored] | ChangesLost) -> None:
        if isinstance(news, ChangesLost):
            self._must_read = True
            self._wake()
            return
        with self._lock:
            for stored in news:
                self._learn(stored.head.id, stored.state)

    def _read_again(self) -> None:
        """Read the claimed tasks again if the watch may have missed changes."""
        if not self._must_read:
            return
        with self._lock:
            known = dict(self._open)
        try:
            found = self._context.read(list(known))
        except RetryLater:
            return
        self._must_read = False
        with self._lock:
            for task, each in known.items():
                if task in found:
                    self._learn(task, found[task].state)
                elif self._open.get(task) is each:
                    self._end(task)

    def _learn(self, task: TaskId, state: TaskState) -> None:
        """Take the state of a task: a claim made here may have been renewed or ended elsewhere."""
        known, claim = self._open.get(task), state.claim
        if known is None or claim is None or state.status is Status.CANCELLED:
            return
        if state.status is Status.COMPLETED and known.completes_here:
            return
        if state.status is Status.CLAIMED and claim.holder == known.holder:
            if claim.term != known.term:
                known.term = claim.term
                self._ends.set(task, self._ends_at(claim.term))
        elif claim.number >= known.number:
            self._end(task)

    def _ends_at(self, term: ClaimTerm) -> float:
        """Return the latest end of a claim whose term is learnt now."""
        latest = self._context.clock.now() + term.ttl_s
        return min(latest, term.ends_at_s) if term.clock == self._context.clock_name else latest

    def _open_claim(self, task: TaskId, held: ClaimKey) -> _OpenClaim | None:
        """Return the claim, if this server made it and it has not ended here."""
        known = self._open.get(task)
        return known if known is not None and known.holder == held.holder else None

    def _end(self, task: TaskId) -> None:
        self._ends.drop(task)
        known = self._open.pop(task, None)
        if known is not None:
            self._write(SkuldKind.CLAIM_ENDED, task, known.token)

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


_REFUSALS = {
    Reason.GAP: UPDATE_CONFLICT,
    Reason.OTHER_CONTENT: UPDATE_CONFLICT,
    Reason.GONE: UNKNOWN,
}


class ClientClaim:
    """One claim of a task, as its holder names it. Every method returns the task as it is then.

    ``claim_history`` records its events.

    Every method raises ``UnknownTask`` if there is no such task,
    ``Fenced`` or ``ProblemRaised`` if a rule
    refuses it, ``RequestTooLarge`` or
    ``RegistryUnavailable`` if nothing was done, and
    ``OutcomeUnknown`` if the outcome is unknown.
    """

    def __init__(
        self, queue: Queue, claim_history: ClaimHistory, task: TaskId, number: int, holder: str
    ) -> None:
        self._queue = queue
        self._context: Context = queue.context
        self._claim_history = claim_history
        self._task = task
        self._held, self._token = parse_holder(number, holder)

    def renew(self) -> Stored:
        """Let the claim last for its whole time from now (SK-7)."""
        term = self._context.term()
        stored = self._settled(lambda stored: rules.renew(stored.state, self._held, term))
        self._claim_history.renewed(self._task, self._held, self._token, term.ends_at_s)
        return stored

    def update(self, sequence: int, content: bytes) -> Stored:
        """Add to the claim's log (SK-9)."""
        content = self._context.check("an update", content)
        rule = partial(self._context.decide_update, held=self._held, sequence=sequence, content=content)
        stored = self._settled(rule, Update(self._held.number, sequence, content))
        self._claim_history.updated(stored, self._held, self._token, sequence)
        return stored

    def complete(self, result: bytes | None) -> Stored:
        """Complete the task for good (SK-10).

        If this process has the task's function, the result is checked by its return type.

        Raises:
            InvalidTask: the result does not fit it; nothing was written.
        """
        result = None if result is None else self._context.check("a result", result)
        if self._queue.functions:
            body = self._queue.functions.get(self._queue.get(self._task).head.name)
            if body is not None:
                body.refuse_result(result)
        self._claim_history.completing(self._task, self._held)
        stored = self._settled(lambda stored: rules.complete(stored.state, self._held, result), ends=True)
        self._claim_history.completed(stored, self._held, self._token)
        return stored

    def fail(self, error: str, delay_s: float | None) -> Stored:
        """Fail the try: the next one waits ``delay_s`` seconds, None for no further try (SK-15)."""
        not_before = self._claim_history.due_after(self._task, self._held)
        due = None if delay_s is None else max(self._context.clock.wall() + delay_s, not_before)
        return self._ended(lambda stored: rules.fail(stored.head, stored.state, self._held, error, due))

    def release(self) -> Stored:
        """Give the claim back unworked."""
        due = self._claim_history.due_after(self._task, self._held)
        return self._ended(lambda stored: rules.release(stored.state, self._held, due))

    def _ended(self, rule: Decide) -> Stored:
        # Recorded before the write: after it another claim may begin at any moment.
        self._claim_history.ended(self._task, self._held)
        return self._settled(rule, ends=True)

    def _settled(self, rule: Decide, update: Update | None = None, *, ends: bool = False) -> Stored:
        stored = self._queue.get(self._task)
        settled = self._context.write(PendingMove(stored, rule, update=update))
        if not isinstance(settled, Refused):
            if ends and stored.state.status is Status.CLAIMED:  # else it was sent again
                self._context.metrics.ended(stored.head.name, claim_outcome(settled, stored.state.failures))
            return settled
        detail = f"claim {self._held.number} of task {self._task}: {settled.reason.value}"
        kind = _REFUSALS.get(settled.reason, FENCED)
        if kind is FENCED:
            self._claim_history.fenced(self._task, self._held, self._token)
            raise Fenced(detail)
        raise ProblemRaised(kind, detail)
