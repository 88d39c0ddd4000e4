"""Runs ready tasks in the calling thread, one after another: the worker of a test.

It has the same claim sources and rules as ``execution.worker``. It renews nothing and
cuts nothing off: a body runs until it returns.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Final, Protocol, runtime_checkable

from rebalanser.core.tasks.claims import Claimed
from rebalanser.errors import InternalError, InvalidState
from rebalanser.history import SkuldKind
from rebalanser.tasks.context import Context
from rebalanser.tasks.execution.bodies import Bodies
from rebalanser.tasks.execution.claim_source import ClaimSource
from rebalanser.tasks.execution.worker_claim import WorkerClaim
from rebalanser.tasks.periodic import Ticker
from rebalanser.tasks.waiting import WaitingBodies

SHORTEST_STEP_S: Final = 1e-6
"""Minimum seconds by which the clock is moved: a smaller step may change no float."""
MAX_LOOKS: Final = 10_000
"""Maximum number of claims in a row that find nothing although the source has something to look at."""


@runtime_checkable
class MovableClock(Protocol):
    """A clock that a test moves forward."""

    def advance(self, seconds: float, /) -> None:
        """Let ``seconds`` pass."""


class InlineWorker:
    """Runs the tasks of ``source`` in the calling thread, and the ticks of ``ticker`` as they become due.

    ``settle`` waits until the source has seen all writes.
    """

    def __init__(
        self,
        context: Context,
        source: ClaimSource,
        bodies: Bodies,
        ticker: Ticker,
        settle: Callable[[], None],
    ) -> None:
        self._context = context
        self._source = source
        self._bodies = bodies
        self._ticker = ticker
        self._settle = settle

    def run(self, advance_s: float) -> int:
        """Run tasks that are ready now or within ``advance_s`` seconds; return the number of tries.

        Raises:
            InvalidState: the clock can't be moved, or tasks are ready and the queue is paused.
        """
        clock = self._context.clock
        tries = self._run_ready()
        if not advance_s:
            return tries
        if not isinstance(clock, MovableClock):
            raise InvalidState(
                "the queue has no clock that can be moved, such as rebalanser.testing.FakeClock"
            )
        ends_at = clock.now() + advance_s
        while (left_s := ends_at - clock.now()) > 0.0:
            clock.advance(min(left_s, max(self._pause_s(left_s), SHORTEST_STEP_S)))
            tries += self._run_ready()
        return tries

    def _pause_s(self, longest_s: float) -> float:
        """Return the seconds until something becomes due, at most ``longest_s``."""
        wakeup = self._source.next_wakeup(self._bodies.names())
        until_claim = longest_s if wakeup is None else wakeup - self._context.clock.now()
        return min(longest_s, until_claim, self._ticker.pause_s(longest_s))

    def _run_ready(self) -> int:
        tries = looks = 0
        self._ticker.tick()
        while looks < MAX_LOOKS:
            self._settle()
            claimed = self._source.claim(1, self._bodies.names())
            for each in claimed:
                self._run(each)
            tries += len(claimed)
            looks = 0 if claimed else looks + 1
            wakeup = self._source.next_wakeup(self._bodies.names())
            if not claimed and (wakeup is None or wakeup > self._context.clock.now()):
                break
        self._refuse_pause()
        self._source.report_unknown(self._bodies.names())
        return tries

    def _refuse_pause(self) -> None:
        """Raise if ready tasks are left because the queue is paused."""
        pause, wall = self._source.pause, self._context.clock.wall()
        if pause is not None and self._source.ready_since(wall) is not None:
            raise InvalidState(f"tasks are ready and the queue is {pause.describe(wall)}; resume() it")

    def _run(self, claimed: Claimed) -> None:
        stored = claimed.stored
        claim = WorkerClaim(stored, claimed.held, claimed.sent_at + self._context.ttl_s, self._context)
        claim.record(SkuldKind.CLAIMED, stored.revision, claimed.held.number)
        payload = self._source.payloads([claimed]).get(stored.head.id)
        if payload is None:
            self._bodies.fail(claim, stored.head, InternalError("the task's payload is not in the store"))
        else:
            contextvars.copy_context().run(self._work, claim, claimed, payload)
        self._context.batcher.flush()
        claim.record(SkuldKind.CLAIM_ENDED)

    def _work(self, claim: WorkerClaim, claimed: Claimed, payload: bytes) -> None:
        WaitingBodies(self._context.queue, 1, self._context.clock).enter()
        ended = self._bodies.work(claim, claimed.stored.head, payload)
        if ended is not None:
            ended.result()
