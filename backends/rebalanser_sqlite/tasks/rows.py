"""A task as a row and back."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from rebalanser.tasks.engine import Change
from rebalanser.tasks.model import ID_DIGITS, ClaimState, Head, State, Status, Stored, TaskId, Term

Row: TypeAlias = tuple[Any, ...]

COLUMNS: Final = (
    "id, partition, name, priority, retries, timeout_s, "
    "CASE dependencies WHEN 0 THEN x'' ELSE "
    "(SELECT after FROM skuld_contents WHERE task = skuld_tasks.number) END, "
    "revision, status, claim, holder, worker, ttl_s, clock, ends_at_s, updates, due, failures, error, result"
)
"""What :func:`stored_of` makes a task of; the first one is its id."""

_REVISION: Final = 7
_STATUS: Final = 8
_NO_CLAIM: Final = (None,) * 7
_STATUSES: Final = {status.value: status for status in Status}


def id_bytes(task: TaskId) -> bytes:
    """An id as it is stored, in half the space and the same order."""
    return bytes.fromhex(task)


def ids_bytes(tasks: tuple[TaskId, ...]) -> bytes:
    """Ids as they are stored, one after the other."""
    return bytes.fromhex("".join(tasks))


def ids_of(stored: bytes) -> tuple[TaskId, ...]:
    """The ids that were stored so."""
    if not stored:
        return ()
    text = stored.hex()
    return tuple(text[start : start + ID_DIGITS] for start in range(0, len(text), ID_DIGITS))


def state_row(state: State) -> Row:
    """The columns from ``status`` to ``result``."""
    claim = state.claim
    if claim is None:
        claimed: Row = _NO_CLAIM
    else:
        term = claim.term
        claimed = (
            *(claim.number, claim.holder, claim.worker),
            *(term.ttl_s, term.clock, term.ends_at_s, claim.updates),
        )
    return (state.status.value, *claimed, state.due, state.failures, _storable(state.error), state.result)


def _storable(text: str) -> str:
    """The text of an error, which may name a file whose name is no Unicode: that must not keep it from being
    written."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def revision_of(row: Row) -> int:
    """The revision of a row of ``COLUMNS``."""
    revision: int = row[_REVISION]
    return revision


def change_of(row: Row) -> Change:
    """What a row of ``COLUMNS`` tells of the task's last change."""
    return Change(row[0].hex(), row[1], _STATUSES[row[_STATUS]], row[_REVISION])


def stored_of(queue: str, row: Row) -> Stored:
    """The task of a row of ``COLUMNS``."""
    task, partition, name, priority, retries, timeout_s, after, revision, *state = row
    status, number, holder, worker, ttl_s, clock, ends_at_s, updates, due, failures, error, result = state
    claim = None
    if number is not None:
        claim = ClaimState(number, holder, worker, Term(ttl_s, clock, ends_at_s), updates)
    head = Head(task.hex(), queue, name, priority, ids_of(after), retries, timeout_s)
    return Stored(head, State(_STATUSES[status], claim, due, failures, error, result), revision, partition)
