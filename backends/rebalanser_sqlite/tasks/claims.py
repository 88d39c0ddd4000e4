"""Claims from the index of ready tasks, in one transaction (SK-5, SK-6)."""

from __future__ import annotations

import json
import logging
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Final

from rebalanser.errors import InternalError
from rebalanser.tasks import rules
from rebalanser.tasks.model import State, Status, Stored
from rebalanser_sqlite.tasks.rows import COLUMNS, READY, RUNNING, Row, code_of, state_row, stored_of
from rebalanser_sqlite.tasks.schema import CLAIMED, FAIL, HELD
from rebalanser_sqlite.tasks.writing import MOVE, Writing

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from rebalanser.tasks.engine import ClaimRequest
    from rebalanser_sqlite.tasks.reading import Running

MADE_READY: Final = 500
"""Maximum number of tasks whose time has come that one transaction makes ready."""
ASIDE_S: Final = 60.0
"""Seconds before a task that could not be claimed is offered again."""
_MAKE_DUE = (
    "UPDATE skuld_tasks SET timer = NULL, "  # noqa: S608
    f"ready = CASE WHEN blocked = 0 OR claim IS NOT NULL OR after_failure = {FAIL} "
    f"THEN CASE WHEN limit_key IS NULL OR status = {CLAIMED} THEN 1 ELSE {HELD} END END "
    "WHERE number IN (SELECT number FROM skuld_tasks INDEXED BY skuld_tasks_timed "
    f"WHERE queue = ? AND timer IS NOT NULL AND timer <= ? ORDER BY timer LIMIT {MADE_READY}) "
    "RETURNING name, limit_key"
)
_MAKE_OVER = (
    "UPDATE skuld_tasks SET ready = 1 WHERE number IN (SELECT number FROM skuld_tasks "  # noqa: S608
    f"{RUNNING} AND clock = ? AND ends_at_s <= ? ORDER BY ends_at_s LIMIT {MADE_READY})"
)
_MAKE_FOREIGN_OVER = "UPDATE skuld_tasks SET ready = 1 WHERE number = ? AND revision = ?"
_CLAIM = (
    f"UPDATE skuld_tasks SET status = {CLAIMED}, claim = new.claim, holder = new.holder, worker = ?, "  # noqa: S608
    "ttl_s = ?, clock = ?, ends_at_s = ?, updates = 0, due = 0.0, ready = NULL, revision = new.revision "
    "FROM (SELECT json_extract(value, '$[0]') AS number, json_extract(value, '$[1]') AS claim, "
    "json_extract(value, '$[2]') AS holder, json_extract(value, '$[3]') AS revision "
    "FROM json_each(?)) AS new WHERE skuld_tasks.number = new.number"
)
"""Claims all waiting tasks in one statement: between two, another thread may hold the interpreter."""
_WAITS = "UPDATE skuld_tasks SET ready = NULL WHERE number = ?"
_SET_ASIDE = "UPDATE skuld_tasks SET ready = 0, timer = ? WHERE number = ?"
_LIMIT_OF = "SELECT name, limit_key FROM skuld_tasks WHERE number = ?"
_NEXT_NAME = f"SELECT name FROM skuld_tasks {READY} AND name > ? ORDER BY name LIMIT 1"  # noqa: S608
_BEST = (
    f"SELECT priority, number, payload, blocked, {COLUMNS} FROM skuld_tasks {READY} "  # noqa: S608
    "AND name = ? ORDER BY priority DESC, id LIMIT ?"
)
_ID: Final = 4
_log = logging.getLogger("rebalanser.sqlite")


class Claims:
    """Carries out one claim request, in a transaction that holds the write lock.

    ``now`` is a time of the request's clock. ``over`` are claims that count on other clocks and are over.
    """

    def __init__(self, request: ClaimRequest, now: float, over: Sequence[Running]) -> None:
        self._request = request
        self._now = now
        self._over = over

    def carry_out(self, writing: Writing) -> Sequence[tuple[Stored, bytes | None]]:
        """Make tasks ready whose time has come, then claim the best; nothing while the queue is paused."""
        request, queue = self._request, writing.queue(self._request.queue)
        if writing.is_paused(queue):
            return []
        cursor = writing.cursor
        writing.admit(queue, cursor.execute(_MAKE_DUE, (queue, request.wall)).fetchall())
        if request.term.clock:
            cursor.execute(_MAKE_OVER, (queue, request.term.clock, self._now - request.buffer_s))
        if self._over:
            cursor.executemany(_MAKE_FOREIGN_OVER, self._over)
        names = self._ready_names(writing, queue) if request.names is None else set(request.names)
        claimed: list[tuple[Stored, bytes | None]] = []
        while True:
            wanted = len(request.holders) - len(claimed)
            best = self._best(writing, queue, names, wanted)
            made = self._claim(writing, queue, best, request.holders[len(claimed) :])
            claimed += made
            if len(made) == wanted or len(made) == len(best) < wanted:
                break  # else a task became dead, which may have made others ready
        return claimed

    @staticmethod
    def _ready_names(writing: Writing, queue: int) -> list[str]:
        names: list[str] = []
        while row := writing.cursor.execute(_NEXT_NAME, (queue, names[-1] if names else "")).fetchone():
            names.append(row[0])
        return names

    @staticmethod
    def _best(writing: Writing, queue: int, names: Collection[str], limit: int) -> list[Row]:
        connection = writing.cursor.connection
        ranges: list[Iterator[Row]] = [connection.execute(_BEST, (queue, name, limit)) for name in names]
        best = ranges[0] if len(ranges) == 1 else merge(*ranges, key=lambda row: (-row[0], row[_ID]))
        return list(islice(best, limit))

    def _claim(
        self, writing: Writing, queue: int, best: Sequence[Row], holders: Sequence[str]
    ) -> list[tuple[Stored, bytes | None]]:
        """Claim these tasks; those that become dead, or wait again, use no holder."""
        request = self._request
        claimed: list[tuple[Stored, bytes | None]] = []
        moves: list[Row] = []
        dead: list[Stored] = []
        left: list[int] = []
        """Numbers of tasks that are neither ready any more nor claimed."""
        waited: list[tuple[int, int, str, int]] = []
        for _, number, payload, blocked, *row in best:
            try:
                stored = stored_of(request.queue, tuple(row))
                failed = None
                if blocked and stored.state.claim is None:
                    failed = writing.failed_dependency(queue, stored.head)
                    if failed is None:
                        writing.cursor.execute(_WAITS, (number,))
                        left.append(number)
                        continue
                state = self._decided(stored, holders[len(claimed)], failed)
            except Exception:  # a bug, which must not keep all other tasks from being claimed
                _log.exception(
                    "a task can't be claimed and is left aside", extra={"action": "task_set_aside"}
                )
                writing.cursor.execute(_SET_ASIDE, (request.wall + ASIDE_S, number))
                left.append(number)
                continue
            before = code_of(stored.state.status)
            revision = writing.changes(queue, number, before, code_of(state.status))
            if before == CLAIMED or state.claim is None:
                moves.append((*state_row(state), None, None, revision, number))
            else:
                waited.append((number, state.claim.number, state.claim.holder, revision))
            if state.status is Status.CLAIMED:
                claimed.append((Stored(stored.head, state, revision, stored.partition), payload))
            else:
                dead.append(stored)
                left.append(number)
        writing.cursor.executemany(MOVE, moves)
        if waited:
            term = request.term
            given = (request.worker, term.ttl_s, term.clock, term.ends_at_s, json.dumps(waited))
            writing.cursor.execute(_CLAIM, given)
        for each in dead:
            writing.changed_to(queue, each.head.id, each.state.status, Status.DEAD)
        # Only now: a task that is being claimed must not be held back in favour of another.
        for number in left:
            writing.admit(queue, writing.cursor.execute(_LIMIT_OF, (number,)).fetchall())
        return claimed

    def _decided(self, stored: Stored, holder: str, failed: rules.FailedDependency | None) -> State:
        """The next state of a ready task."""
        request = self._request
        is_over = stored.state.status is Status.CLAIMED
        state = rules.claim(
            stored.head, stored.state, holder, request.worker, request.term, over=is_over, failed=failed
        )
        if isinstance(state, rules.Refused):
            raise InternalError(f"a ready task is refused to a new holder: {state.reason}")
        return state
