"""Claims from the index of ready tasks, in one transaction (SK-5, SK-6)."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Final

from rebalanser.core.tasks import rules
from rebalanser.core.tasks.clocks import full_at
from rebalanser.core.tasks.model import (
    MAX_FILL_S,
    Head,
    LimitId,
    RateMark,
    Status,
    Stored,
    TaskState,
    rate_of,
)
from rebalanser.errors import InternalError
from rebalanser_sqlite.tasks.rows import (
    COLUMNS,
    MARK,
    NEXT_ROOM,
    READY,
    RUNNING,
    Row,
    code_of,
    state_row,
    stored_of,
)
from rebalanser_sqlite.tasks.schema import ADMITTED, CLAIMED, FAIL, HELD, PACED
from rebalanser_sqlite.tasks.writer import MOVE, Writing

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from rebalanser.core.tasks.store import ClaimQuery
    from rebalanser_sqlite.tasks.reader import ClaimedRow

MADE_READY: Final = 500
"""Maximum number of due tasks that one transaction makes ready."""
MAX_LEFT: Final = 500
"""Maximum number of ready tasks that one transaction leaves unclaimed, as it blocks all other writers."""
FEW_AHEAD: Final = 4
"""Number of ready tasks that are read after one of a rate limit, as the next one of it may be better."""
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
_PUT_MARK = (
    "INSERT INTO skuld_rates (queue, name, limit_key, debt_s, clock, at_s, wall, revision) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (queue, name, limit_key) DO UPDATE SET "
    "debt_s = excluded.debt_s, clock = excluded.clock, at_s = excluded.at_s, wall = excluded.wall, "
    "revision = excluded.revision, waits_clock = NULL, waits_until = NULL"
)
_FORGET_MARKS = (
    "DELETE FROM skuld_rates WHERE rowid IN (SELECT rowid FROM skuld_rates INDEXED BY skuld_rates_old "
    "WHERE wall < ? AND NOT (clock = ? AND at_s + debt_s > ?) AND waits_until IS NULL ORDER BY wall LIMIT 2)"
)
"""Deletes at most two old marks with each start, so that their number does not grow: each start adds at most
one."""
_PACE = f"UPDATE skuld_tasks SET ready = {PACED} WHERE number = ?"  # noqa: S608
_COUNT_HERE = (
    "UPDATE skuld_rates SET debt_s = ?, clock = ?, at_s = ? WHERE queue = ? AND name = ? AND limit_key = ?"
)
"""Lets a mark of another boot count on this clock, so that it ends whichever process survives."""
_WAIT_FOR_RATE = (
    "UPDATE skuld_rates SET waits_clock = ?, waits_until = ? WHERE queue = ? AND name = ? AND limit_key = ?"
)
_HAVE_ROOM = (
    "UPDATE skuld_rates SET waits_clock = NULL, waits_until = NULL WHERE rowid IN (SELECT rowid "  # noqa: S608
    "FROM skuld_rates INDEXED BY skuld_rates_waiting WHERE queue = ? AND waits_until IS NOT NULL "
    "AND (waits_clock < ? OR waits_clock > ? OR (waits_clock = ? AND waits_until <= ?)) "
    f"LIMIT {MADE_READY}) RETURNING name, limit_key"
)
_END_PACE = (
    f"UPDATE skuld_tasks SET ready = CASE status WHEN {CLAIMED} THEN 1 ELSE {HELD} END "  # noqa: S608
    f"WHERE {ADMITTED} AND queue = ? AND name = ? AND limit_key = ? AND ready = {PACED}"
)
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


MAX_SEEN: Final = 10_000
"""Maximum number of marks of other clocks that are remembered: a forgotten one counts anew."""


class Rates:
    """Rate limits as seen by one engine object, on the clock of this name (SK-23).

    A mark of another clock counts from its first sight here. One thread at a time.
    """

    def __init__(self, clock: str) -> None:
        self.clock = clock
        self._seen: OrderedDict[tuple[int, LimitId], tuple[RateMark, float]] = OrderedDict()

    def full_at(self, queue: int, limit: LimitId, mark: RateMark | None, now: float) -> float:
        """Return the time at which a limit allows its whole burst again; ``mark`` is the stored one as of
        ``now``."""
        if mark is None or mark.clock == self.clock:
            return full_at(mark, now, self.clock)
        seen, seen_at = self._seen.get((queue, limit), (None, now))
        if seen != mark:
            seen_at = now
            self._seen[queue, limit] = (mark, now)
            self._seen.move_to_end((queue, limit))
            if len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)
        return full_at(mark, seen_at, self.clock)


class Claims:
    """Carries out one claim request, in a transaction that holds the write lock.

    ``clock`` gives the times of the request's clock. ``over`` are ended claims that count on other clocks, as
    seen at ``now``.
    """

    def __init__(self, request: ClaimQuery, now: float, over: Sequence[ClaimedRow], rates: Rates) -> None:
        self._request = request
        self._now = now
        self._over = over
        self._rates = rates
        self._has_more = False
        """True if a claim may have made others ready."""
        self._left = 0
        self.next_room: float | None = None
        """First time at which a rate limit has room for a paced task; known after ``carry_out``."""

    @property
    def may_have_more(self) -> bool:
        """True if it has left the maximum number of tasks of one transaction."""
        return self._left >= MAX_LEFT

    def carry_out(self, writing: Writing) -> Sequence[tuple[Stored, bytes | None]]:
        """Make due tasks ready, then claim the best; nothing while the queue is paused."""
        self._left = 0
        request, queue = self._request, writing.queue(self._request.queue)
        if writing.is_paused(queue):
            return []
        cursor = writing.cursor
        writing.admit(queue, cursor.execute(_MAKE_DUE, (queue, request.wall)).fetchall())
        if request.term.clock:
            cursor.execute(_MAKE_OVER, (queue, request.term.clock, self._now - request.buffer_s))
        if self._over:
            cursor.executemany(_MAKE_FOREIGN_OVER, self._over)
        clock, self._now = self._rates.clock, request.clock()  # what starts counts from when the lock is held
        for name, limit_key in cursor.execute(_HAVE_ROOM, (queue, *[clock] * 3, self._now)).fetchall():
            cursor.execute(_END_PACE, (queue, name, limit_key))
            writing.admit(queue, [(name, limit_key)])
        names = self._ready_names(writing, queue) if request.names is None else set(request.names)
        claimed: list[tuple[Stored, bytes | None]] = []
        ahead = len(request.holders)
        while len(claimed) < len(request.holders) and not self.may_have_more:
            asked = min(ahead, len(request.holders) - len(claimed), MAX_LEFT - self._left)
            threads = len(request.holders) - request.ahead - len(claimed)
            best = _for_threads(self._best(writing, queue, names, asked), threads)
            self._has_more = False
            made = self._claim(writing, queue, best, request.holders[len(claimed) :])
            claimed += made
            if len(made) == len(best) < asked and not self._has_more:
                break  # else a task became dead or started, which may have made others ready
            ahead = FEW_AHEAD if self._has_more else 2 * ahead
        row = cursor.execute(NEXT_ROOM, (queue, clock)).fetchone()
        self.next_room = None if row is None else row[0]
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
        """Numbers of tasks that are no longer ready, and were not claimed."""
        waited: list[tuple[int, int, str, int]] = []
        for _, number, payload, blocked, *row in best:
            try:
                stored = stored_of(request.queue, tuple(row))
                state = self._decided(
                    writing, queue, number, stored, holders[len(claimed)], blocked=bool(blocked)
                )
                if state is None:
                    left.append(number)
                    continue
            except Exception:  # a bug, which must not keep all other tasks from being claimed
                _log.exception("a task can't be claimed and is skipped", extra={"action": "task_set_aside"})
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
                if stored.head.rate_limit:
                    break  # the next one of its limit may be better than the rest
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
        started = [stored.head.limit for stored, _ in claimed if stored.head.rate_limit]
        writing.admit(queue, started)
        self._has_more = bool(started)
        self._left += len(left)
        for number in left:
            writing.admit(queue, writing.cursor.execute(_LIMIT_OF, (number,)).fetchall())
        return claimed

    def _starts(self, writing: Writing, queue: int, number: int, head: Head) -> bool:
        """Count a start for its rate limit (SK-23); False if there is no room yet: then the task is paced."""
        key = (queue, *head.limit)
        row = writing.cursor.execute(MARK, key).fetchone()
        mark = None if row is None else RateMark(*row)
        now, rate, clock = self._now, rate_of(head.rate_limit), self._rates.clock
        full = max(now, self._rates.full_at(queue, head.limit, mark, now))
        room_at = full - (rate.burst - 1) * rate.every_s
        if room_at > now:
            writing.cursor.execute(_PACE, (number,))
            writing.cursor.execute(_WAIT_FOR_RATE, (clock, room_at, *key))
            if mark is not None and mark.clock != clock and self._request.term.clock:
                writing.cursor.execute(_COUNT_HERE, (full - now, clock, now, *key))
            return False
        debt_s = full + rate.every_s - now
        wall = self._request.wall
        writing.cursor.execute(_FORGET_MARKS, (wall - MAX_FILL_S, clock, now))
        writing.cursor.execute(_PUT_MARK, (*key, debt_s, clock, now, wall + debt_s, writing.next_revision))
        return True

    def _decided(
        self, writing: Writing, queue: int, number: int, stored: Stored, holder: str, *, blocked: bool
    ) -> TaskState | None:
        """The next state of a ready task; None if it waits again, or for its rate limit."""
        request, failed = self._request, None
        if blocked and stored.state.claim is None:
            failed = writing.failed_dependency(queue, stored.head)
            if failed is None:
                writing.cursor.execute(_WAITS, (number,))
                return None
        is_over = stored.state.status is Status.CLAIMED
        state = rules.claim(
            stored.head, stored.state, holder, request.worker, request.term, over=is_over, failed=failed
        )
        if isinstance(state, rules.Refused):
            raise InternalError(f"a ready task is refused to a new holder: {state.reason}")
        is_start = stored.head.rate_limit and state.status is Status.CLAIMED
        return state if not is_start or self._starts(writing, queue, number, stored.head) else None


def _for_threads(best: Sequence[Row], threads: int) -> Sequence[Row]:
    """Return the tasks before the first one of a rate limit for which no thread is free (SK-23).

    Such a task would count as a start, even if it was given back before it began.
    """
    for place, row in enumerate(best):
        if place >= threads and row[-1] is not None:
            return best[:place]
    return best
