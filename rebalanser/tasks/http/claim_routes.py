"""Requests of a claim's holder: the store alone decides, so any server of the queue can answer."""

from __future__ import annotations

from functools import partial

from rebalanser.errors import Fenced
from rebalanser.tasks import rules
from rebalanser.tasks.asks import Decide, MoveAsk
from rebalanser.tasks.context import Context
from rebalanser.tasks.http.claim_history import Telling, parsed
from rebalanser.tasks.http.problems import FENCED, UNKNOWN, UPDATE_CONFLICT, Refusal
from rebalanser.tasks.metrics import outcome_of
from rebalanser.tasks.model import Status, Stored, TaskId, Update
from rebalanser.tasks.queue import Queue
from rebalanser.tasks.rules import Decision, Reason, Refused

_REFUSALS = {
    Reason.GAP: UPDATE_CONFLICT,
    Reason.OTHER_CONTENT: UPDATE_CONFLICT,
    Reason.GONE: UNKNOWN,
}


class Holding:
    """One claim of a task, as its holder names it. Every method answers the task as it is then.

    ``telling`` writes down what becomes of it.

    Every method raises :class:`~rebalanser.errors.UnknownTask` where there is no such task,
    :class:`~rebalanser.tasks.http.problems.Refusal` where a rule refuses it,
    :class:`~rebalanser.errors.RequestTooLarge` or :class:`~rebalanser.errors.RegistryUnavailable` where
    nothing was done, and :class:`~rebalanser.errors.OutcomeUnknown` where nobody knows.
    """

    def __init__(self, queue: Queue, telling: Telling, task: TaskId, number: int, holder: str) -> None:
        self._queue = queue
        self._context: Context = queue.context
        self._telling = telling
        self._task = task
        self._held, self._token = parsed(number, holder)

    def renew(self) -> Stored:
        """Let the claim last for its whole time from now (SK-7)."""
        term = self._context.term()
        stored = self._settled(lambda stored: rules.renew(stored.state, self._held, term))
        self._telling.renewed(self._task, self._held, self._token, term.ends_at_s)
        return stored

    def update(self, sequence: int, content: bytes) -> Stored:
        """Add to the claim's log (SK-9)."""
        content = self._context.check("an update", content)
        rule = partial(self._updated, sequence=sequence, content=content)
        stored = self._settled(rule, Update(self._held.number, sequence, content))
        self._telling.updated(stored, self._held, self._token, sequence)
        return stored

    def _updated(self, stored: Stored, sequence: int, content: bytes) -> Decision:
        claim = stored.state.claim
        is_written = claim is not None and claim.number == self._held.number and claim.updates > sequence
        written = self._context.updated_as(self._task, self._held, sequence) if is_written else None
        return rules.update(stored.state, self._held, sequence, content, written)

    def complete(self, result: bytes | None) -> Stored:
        """Complete the task for good (SK-10)."""
        result = None if result is None else self._context.check("a result", result)
        self._telling.completing(self._task, self._held)
        stored = self._settled(lambda stored: rules.complete(stored.state, self._held, result), ends=True)
        self._telling.completed(stored, self._held, self._token)
        return stored

    def fail(self, error: str, delay_s: float | None) -> Stored:
        """The try has failed: the next one waits ``delay_s`` seconds, None for no further try (SK-15)."""
        not_before = self._telling.due_after(self._task, self._held)
        due = None if delay_s is None else max(self._context.clock.wall() + delay_s, not_before)
        return self._ended(lambda stored: rules.fail(stored.head, stored.state, self._held, error, due))

    def release(self) -> Stored:
        """Give the claim back unworked."""
        due = self._telling.due_after(self._task, self._held)
        return self._ended(lambda stored: rules.release(stored.state, self._held, due))

    def _ended(self, rule: Decide) -> Stored:
        # Told before: once it is written another claim may begin at any moment.
        self._telling.ended(self._task, self._held)
        return self._settled(rule, ends=True)

    def _settled(self, rule: Decide, update: Update | None = None, *, ends: bool = False) -> Stored:
        stored = self._queue.get(self._task)
        settled = self._context.write(MoveAsk(stored, rule, update=update))
        if not isinstance(settled, Refused):
            if ends and stored.state.status is Status.CLAIMED:  # else it was sent again
                self._context.metrics.ended(stored.head.name, outcome_of(settled, stored.state.failures))
            return settled
        told = f"claim {self._held.number} of task {self._task}: {settled.reason.value}"
        kind = _REFUSALS.get(settled.reason, FENCED)
        if kind is FENCED:
            self._telling.fenced(self._task, self._held, self._token)
            raise Fenced(told)
        raise Refusal(kind, told)
