"""Rules of task states: a state and a request give the next state, or a refusal.

Pure: no clock, no store, no randomness. The next state is written only if the state is still the one that the
rule was given, so a rule decides for all hosts at once.

===========  =====================================  =====================================================
rule         from                                   to
===========  =====================================  =====================================================
claim        waiting; claimed, its time being over  claimed, by the next number
claim        claimed, over, and it was the last try dead
claim        waiting, and it fails with a dependency dead, the try not counted
renew        claimed, by this claim                 claimed, for longer
update       claimed, by this claim                 claimed, one update more
complete     claimed, by this claim                 completed
fail         claimed, by this claim                 waiting until it is due; dead, if no try is left
release      claimed, by this claim                 waiting, the try not counted
cancel       waiting, claimed, dead                 cancelled
requeue      dead, cancelled                        waiting, with all its tries
===========  =====================================  =====================================================
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from rebalanser.core.tasks.ids import created_at
from rebalanser.core.tasks.model import (
    CLOSED_UNDONE,
    OPEN,
    AfterFailure,
    ClaimState,
    ClaimTerm,
    Head,
    Status,
    TaskId,
    TaskState,
)


class Reason(StrEnum):
    """Reason for which a request is refused."""

    SUPERSEDED = "superseded"
    """A later claim exists (SK-10)."""
    ENDED = "ended"
    """The claim was given back, failed or cancelled: there is no current one."""
    FINISHED = "finished"
    """The task is complete for good (SK-10)."""
    HELD = "held"
    """Another claim is current and its time is not over (SK-6)."""
    NOT_OPEN = "not_open"
    """The task is dead or cancelled."""
    NOT_CLOSED = "not_closed"
    """The task is open: only a dead or cancelled one is requeued."""
    GAP = "gap"
    """The update is not the next one (SK-9)."""
    OTHER_CONTENT = "other_content"
    """Another update has this number (SK-9)."""
    DEPOSED = "deposed"
    """Another owner has taken over the partition (SK-13)."""
    NO_SLOT = "no_slot"
    """The slot of the claim is no longer free (SK-20)."""
    PAUSED = "paused"
    """The queue is paused: nothing is claimed (SK-23)."""
    RATE_MOVED = "rate_moved"
    """The mark of its rate limit is not the one that was read (SK-23)."""
    GONE = "gone"
    """There is no such task, or it was collected (SK-14)."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A refusal: nothing is written."""

    reason: Reason


Decision: TypeAlias = TaskState | Refused


@dataclass(frozen=True, slots=True)
class ClaimKey:
    """Key of a claim, which every write of its holder names."""

    number: int
    holder: str


@dataclass(frozen=True, slots=True)
class FailedDependency:
    """A dead or cancelled dependency of a task that fails with it."""

    id: TaskId
    status: Status


def settles(status: Status | None, after_failure: AfterFailure) -> bool:
    """True if a dependency of this status is waited for no more (SK-5); None if it does not exist."""
    return status is Status.COMPLETED or (after_failure is AfterFailure.RUN and status in CLOSED_UNDONE)


def fails(status: Status | None, after_failure: AfterFailure) -> bool:
    """True if a dependency of this status makes the task dead (SK-5); None if it does not exist."""
    return after_failure is AfterFailure.FAIL and status in CLOSED_UNDONE


def is_duplicate(task: TaskId, other: TaskId, unique_for_s: float, status: Status | None) -> bool:
    """True if a new task is a duplicate of the last one that was enqueued with its unique key (SK-23).

    That is the ``other`` one: it keeps new tasks out while it is open, and for ``unique_for_s`` seconds after
    it was enqueued, in any ``status``; None if it is not known to be open. Times are those of the ids, so a
    repeated enqueue of a task gives the same answer.
    """
    return status in OPEN or created_at(task) < created_at(other) + unique_for_s


def claim(
    head: Head,
    state: TaskState,
    holder: str,
    worker: str,
    term: ClaimTerm,
    *,
    over: bool,
    failed: FailedDependency | None = None,
) -> Decision:
    """Claim a task (SK-5, SK-6); ``over`` says that the present claim's time and buffer have passed (SK-8).

    With a ``failed`` dependency a task that was never claimed becomes dead instead; no try of it is counted.

    A repeated request of the same ``holder``, whose answer was lost, changes nothing. A claim whose time is
    over counts as a failed try, so that a task whose body kills its process each time becomes dead (SK-15).
    The owner has checked that the task is due and its dependencies are complete; the rule does not
    (``owner``).
    """
    before = state.claim
    if before is not None and before.holder == holder:
        return state if state.status is Status.CLAIMED else Refused(_why_not_open(state))
    if state.status not in OPEN:
        return Refused(_why_not_open(state))
    if failed is not None and before is None:
        error = f"it depends on {failed.id}, which is {failed.status}"
        return replace(state, status=Status.DEAD, error=error)
    if state.status is Status.CLAIMED and before is not None:
        if not over:
            return Refused(Reason.HELD)
        state = _cut_off(head, state, before)
        if state.status is Status.DEAD:
            return state
    number = 0 if before is None else before.number + 1
    # Not by replace(), which takes four times as long: this is done for each task.
    claim_state = ClaimState(number, holder, worker, term)
    return TaskState(Status.CLAIMED, claim_state, 0.0, state.failures, state.error, state.result)


def renew(state: TaskState, held: ClaimKey, term: ClaimTerm) -> Decision:
    """Extend a claim (SK-7), even after its time, while there is no other.

    A renewal that comes late, after one that lasts longer, changes nothing.
    """
    current = _current(state, held)
    if isinstance(current, Refused):
        return current
    if current.term.clock == term.clock and current.term.ends_at_s >= term.ends_at_s:
        return state
    return replace(state, claim=replace(current, term=term))


def update(
    state: TaskState, held: ClaimKey, sequence: int, content: bytes, written: bytes | None
) -> Decision:
    """Add to a claim's log (SK-9); ``written`` is the logged update of this number, if any.

    A repeated update changes nothing: the given state is returned.
    """
    current = _current(state, held)
    if isinstance(current, Refused):
        return current
    if not 0 <= sequence <= current.updates:
        return Refused(Reason.GAP)
    if sequence < current.updates:
        return state if written == content else Refused(Reason.OTHER_CONTENT)
    return replace(state, claim=replace(current, updates=sequence + 1))


def complete(state: TaskState, held: ClaimKey, result: bytes | None) -> Decision:
    """Complete a task for good (SK-10). A repeated request of the same claim changes nothing: the first
    result stays."""
    if state.status is Status.COMPLETED and _is_of(state, held):
        return state
    current = _current(state, held)
    if isinstance(current, Refused):
        return current
    return TaskState(Status.COMPLETED, state.claim, state.due, state.failures, "", result)


def fail(head: Head, state: TaskState, held: ClaimKey, error: str, due: float | None) -> Decision:
    """End a failed try: the task is retried from ``due`` on, or never if that is None (SK-15).

    A repeated request is refused, as the claim has ended: a failure counts once.
    """
    current = _current(state, held)
    if isinstance(current, Refused):
        return current
    failures = state.failures + 1
    if due is None or failures > head.retries:
        return replace(state, status=Status.DEAD, failures=failures, error=error)
    return replace(state, status=Status.WAITING, failures=failures, error=error, due=due)


def release(state: TaskState, held: ClaimKey, due: float = 0.0, reason: str | None = None) -> Decision:
    """Give a claim back unworked, as a worker does that shuts down; the task waits until it is due.

    A ``reason``, as of a worker that can't read the arguments, replaces the last error.
    """
    current = _current(state, held)
    if isinstance(current, Refused):
        return current
    error = state.error if reason is None else reason
    return replace(state, status=Status.WAITING, due=due, error=error)


def cancel(state: TaskState) -> Decision:
    """Cancel a task. A claim of it is over: writes of its holder are refused."""
    if state.status is Status.COMPLETED:
        return Refused(Reason.FINISHED)
    return state if state.status is Status.CANCELLED else replace(state, status=Status.CANCELLED)


def requeue(state: TaskState) -> Decision:
    """Requeue a dead or cancelled task (SK-15), with all its tries."""
    if state.status is Status.COMPLETED:
        return Refused(Reason.FINISHED)
    if state.status in OPEN:
        return Refused(Reason.NOT_CLOSED)
    return replace(state, status=Status.WAITING, failures=0, due=0.0)


def _cut_off(head: Head, state: TaskState, claim: ClaimState) -> TaskState:
    """Return the state of a task whose claim has expired: the try has failed."""
    failures = state.failures + 1
    return replace(
        state,
        status=Status.WAITING if failures <= head.retries else Status.DEAD,
        failures=failures,
        error=f"claim {claim.number} of {claim.worker} ended without a word",
    )


def _why_not_open(state: TaskState) -> Reason:
    match state.status:
        case Status.COMPLETED:
            return Reason.FINISHED
        case Status.DEAD | Status.CANCELLED:
            return Reason.NOT_OPEN
        case _:
            return Reason.ENDED


def _is_of(state: TaskState, held: ClaimKey) -> bool:
    return state.claim is not None and ClaimKey(state.claim.number, state.claim.holder) == held


def _current(state: TaskState, held: ClaimKey) -> ClaimState | Refused:
    """Return the claim that ``held`` names, if it is the current one of the task; else a refusal."""
    if state.status is Status.COMPLETED:
        return Refused(Reason.FINISHED if _is_of(state, held) else Reason.SUPERSEDED)
    if state.claim is None or not _is_of(state, held):
        return Refused(Reason.SUPERSEDED)
    return state.claim if state.status is Status.CLAIMED else Refused(Reason.ENDED)
