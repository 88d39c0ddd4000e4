"""Conversion of a task to a row and back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rebalanser.core.tasks.model import (
    ID_DIGITS,
    ClaimState,
    ClaimTerm,
    Head,
    Status,
    Stored,
    TaskId,
    TaskState,
)
from rebalanser.core.tasks.store import Change
from rebalanser_sqlite.tasks.schema import CHOICES, CLAIMED, HELD, STATUSES, WAITING

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

Row: TypeAlias = tuple[Any, ...]

COLUMNS: Final = (
    "id, partition, name, priority, retries, timeout_s, after_failure, "
    "CASE dependencies WHEN 0 THEN x'' ELSE "
    "(SELECT after FROM skuld_contents WHERE task = skuld_tasks.number) END, "
    "revision, status, claim, holder, worker, ttl_s, clock, ends_at_s, updates, due, failures, error, "
    "result, coalesce(unique_key, limit_key) IS NOT NULL, unique_key, unique_for_s, limit_key, max_running, "
    "rate_limit"
)
"""Columns for ``stored_of``; the first is the task's id."""

READY: Final = "INDEXED BY skuld_tasks_ready WHERE ready = 1 AND queue = ?"
RUNNING: Final = f"INDEXED BY skuld_tasks_running WHERE status = {CLAIMED} AND ready IS NULL AND queue = ?"
MARK: Final = (
    "SELECT debt_s, clock, at_s, wall, revision FROM skuld_rates "
    "WHERE queue = ? AND name = ? AND limit_key = ?"
)
"""The fields of a ``RateMark``."""
NEXT_ROOM: Final = (
    "SELECT waits_until FROM skuld_rates INDEXED BY skuld_rates_waiting "
    "WHERE waits_until IS NOT NULL AND queue = ? AND waits_clock = ? ORDER BY waits_until LIMIT 1"
)
"""The first time at which a rate limit has room for a task that waits for it, by one clock."""
_REVISION: Final = 8
_STATUS: Final = 9
_NO_CLAIM: Final = (None,) * 7
_CODES: Final = {status: code for code, status in enumerate(STATUSES)}
_LATEST = (
    "SELECT max(counted, coalesce((SELECT max(number) FROM skuld_tasks), 0), "
    "coalesce((SELECT max(revision) FROM skuld_changes), 0)), counted, forgotten_to FROM skuld_meta"
)
_NEW = "SELECT queue, status FROM skuld_tasks WHERE number > ?"
_CHANGES = "SELECT queue, before, status FROM skuld_changes WHERE revision > ? AND task BETWEEN 1 AND ?"


def id_bytes(task: TaskId) -> bytes:
    """Return an id as it is stored, in half the space and the same order."""
    return bytes.fromhex(task)


def ids_bytes(tasks: tuple[TaskId, ...]) -> bytes:
    """Return ids as they are stored, one after the other."""
    return bytes.fromhex("".join(tasks))


def ids_of(stored: bytes) -> tuple[TaskId, ...]:
    """Return the ids that are stored so."""
    if not stored:
        return ()
    text = stored.hex()
    return tuple(text[start : start + ID_DIGITS] for start in range(0, len(text), ID_DIGITS))


def code_of(status: Status) -> int:
    """Return a status as it is stored."""
    return _CODES[status]


def mask_of(statuses: Iterable[Status]) -> int:
    """Return statuses as a set of bits."""
    return sum(1 << _CODES[each] for each in statuses)


def latest(connection: sqlite3.Connection | sqlite3.Cursor) -> tuple[int, int, int]:
    """Return the latest revision, that of the counts, and the last one whose changes are deleted."""
    revision, counted, forgotten = connection.execute(_LATEST).fetchone()
    return revision, counted, forgotten


def counts_since(connection: sqlite3.Connection | sqlite3.Cursor, counted: int) -> Counter[tuple[int, int]]:
    """Return the change in the number of tasks of each queue and status since the revision ``counted``."""
    counts: Counter[tuple[int, int]] = Counter(connection.execute(_NEW, (counted,)).fetchall())
    for queue, before, status in connection.execute(_CHANGES, (counted, counted)):
        counts[queue, before] -= 1
        if status is not None:
            counts[queue, status] += 1
    return counts


def place(status: int, due: float, *, blocked: bool) -> tuple[int | None, float | None]:
    """Return the columns ``ready`` and ``timer`` of a task; see ``rebalanser_sqlite.tasks.schema``."""
    if status != WAITING:
        return None, None
    return (None, due) if due > 0 else (None if blocked else 1, None)


def held_back(where: tuple[int | None, float | None]) -> tuple[int | None, float | None]:
    """Return the same columns for a limited task, which is ready once its limit admits it."""
    ready, timer = where
    return (HELD if ready == 1 else ready), timer


def is_new(state: TaskState) -> bool:
    """True if the task waits and was never tried."""
    return (
        state.status is Status.WAITING
        and state.claim is None
        and not state.failures
        and not state.error
        and state.result is None
    )


def state_row(state: TaskState) -> Row:
    """Return the columns from ``status`` to ``result``."""
    claim = state.claim
    if claim is None:
        claimed: Row = _NO_CLAIM
    else:
        term = claim.term
        claimed = (
            *(claim.number, claim.holder, claim.worker),
            *(term.ttl_s, term.clock, term.ends_at_s, claim.updates),
        )
    return (_CODES[state.status], *claimed, state.due, state.failures, _storable(state.error), state.result)


def _storable(text: str) -> str:
    """Return the text of an error in a form that can be stored: it may have a file name that is not
    Unicode."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def revision_of(row: Row) -> int:
    """Return the revision of a row of ``COLUMNS``."""
    revision: int = row[_REVISION]
    return revision


def change_of(row: Row) -> Change:
    """Return the task's last change from a row of ``COLUMNS``."""
    return Change(row[0].hex(), row[1], STATUSES[row[_STATUS]], row[_REVISION])


def stored_of(queue: str, row: Row) -> Stored:
    """Return the task of a row of ``COLUMNS``."""
    task, partition, name, priority, retries, timeout_s, choice, after, revision, *state = row
    status, number, holder, worker, ttl_s, clock, ends_at_s, updates, due, failures, error, *more = state
    result, is_limited, *limits = more
    claim = None
    if number is not None:
        claim = ClaimState(number, holder, worker, ClaimTerm(ttl_s, clock, ends_at_s), updates)
    head = Head(task.hex(), queue, name, priority, ids_of(after), retries, timeout_s, CHOICES[choice])
    if is_limited:
        unique_key, unique_for_s, limit_key, max_running, rate_limit = limits
        head = replace(
            head,
            unique_key=unique_key or "",
            unique_for_s=unique_for_s or 0.0,
            limit_key=limit_key or "",
            max_running=max_running or 0,
            rate_limit=rate_limit or "",
        )
    return Stored(head, TaskState(STATUSES[status], claim, due, failures, error, result), revision, partition)
