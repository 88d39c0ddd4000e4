"""A claim for tests that call the body of a task directly."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from rebalanser.core.tasks.model import ID_DIGITS, Update
from rebalanser.errors import Fenced
from rebalanser.runtime.owned import StopRequest
from rebalanser.tasks.async_claim import AsyncClaim, Threads
from rebalanser.tasks.claim import LOG_PAGE, Claim, ClaimFacts, check_content

if TYPE_CHECKING:
    import sqlite3

P = ParamSpec("P")
T = TypeVar("T")
LASTS_S: Final = 3600.0
"""Seconds that a fake claim lasts."""
MAX_BYTES: Final = 1 << 20
"""Maximum size of an update or a result."""


class FakeClaim(Claim):
    """A claim without a queue: it records what a body does with it. May be used from any thread.

    ``earlier`` are the updates of earlier tries, one sequence for each try, which ``log`` gives to the body.
    ``failures`` is the number of them that failed, all if None.
    """

    stop_requested: StopRequest

    def __init__(
        self,
        name: str = "task",
        *,
        earlier: Sequence[Sequence[bytes]] = (),
        failures: int | None = None,
        token: int = 1,
        task_id: str = "0" * ID_DIGITS,
        queue: str = "tasks",
    ) -> None:
        failed = len(earlier) if failures is None else failures
        super().__init__(ClaimFacts(task_id, queue, name, len(earlier), failed, token), StopRequest())
        self._log = [
            Update(claim, sequence, content)
            for claim, contents in enumerate(earlier)
            for sequence, content in enumerate(contents)
        ]
        self._lasts_until = time.monotonic() + LASTS_S
        self._is_over = False
        self.updates: list[bytes] = []
        """Updates that the body has written, the first one first."""
        self.is_completed = False
        """True once the body has called ``complete_in``."""
        self.result: bytes | None = None
        """The result that the body gave to ``complete_in``."""

    def as_async(self) -> AsyncClaim:
        """The same claim for a coroutine function."""
        return AsyncClaim(self, self.stop_requested, _InCaller(self.name))

    def lose(self) -> None:
        """End the claim, as if another worker had the task now: later writes of the body are refused."""
        self._is_over = True
        self.stop_requested.set()

    @property
    def deadline(self) -> float:
        """An hour after the claim was made; 0 once it has ended."""
        return 0.0 if self._is_over else self._lasts_until

    def still_mine(self) -> bool:
        """True until the claim has ended."""
        return not self._is_over

    def update(self, content: bytes) -> int:
        """Record an update; raises what ``Claim.update`` does."""
        checked = check_content("an update", content, MAX_BYTES)
        self._refuse_ended()
        self.updates.append(checked)
        return len(self.updates) - 1

    def log_page(self, claim: int | None, first: int) -> Sequence[Update]:
        """See ``Claim.log_page``."""
        written = [Update(self.number, sequence, content) for sequence, content in enumerate(self.updates)]
        every = [*self._log, *written]
        if claim is None:
            return every[first : first + LOG_PAGE]
        return [each for each in every if each.claim == claim and each.sequence >= first][:LOG_PAGE]

    def complete_in(self, connection: sqlite3.Connection, result: bytes | None = None) -> None:  # noqa: ARG002
        """Record the completion and end the claim; the connection is not used."""
        checked = None if result is None else check_content("a result", result, MAX_BYTES)
        self._refuse_ended()
        self.result, self.is_completed, self._is_over = checked, True, True

    def renew(self) -> bool:
        """See ``Claim.renew``."""
        return not self._is_over

    def _refuse_ended(self) -> None:
        if self._is_over:
            raise Fenced(f"claim {self.number} of task {self.task_id} ({self.name}) has ended")


class _InCaller(Threads):
    """Calls everything in the calling thread: a fake claim blocks nothing."""

    async def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        return function(*arguments, **named)
