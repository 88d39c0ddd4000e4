"""The asyncio twin of ``Claim``: the same names, awaited."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from rebalanser.core.tasks.model import Update
from rebalanser.errors import InvalidState
from rebalanser.runtime.owned import StopRequest
from rebalanser.tasks.claim import LOG_PAGE, Claim

if TYPE_CHECKING:
    import sqlite3

THREADS: Final = 32
"""Maximum number of calls that wait for the engine at a time; the batcher writes them together."""
P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """Threads of one queue, which wait for no other queue. May be used from any event loop."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="rebalanser-tasks-async")
        self._closed = False

    async def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a function in a thread and wait; raises what that does, and what ``submit`` does."""
        return await self.submit(function, *arguments, **named)

    def submit(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> asyncio.Future[T]:
        """Call a function in a thread; cancelling does not end one that has begun.

        Raises:
            InvalidState: the queue is closed.
        """
        if self._closed:
            raise InvalidState(f"the queue {self._queue!r} is closed")
        context = contextvars.copy_context()
        call = partial(context.run, function, *arguments, **named)
        return asyncio.get_running_loop().run_in_executor(self._executor, call)

    def close(self) -> None:
        """Take no more calls; those that have begun go on."""
        self._closed = True
        self._executor.shutdown(wait=False)


class AsyncClaim:
    """A ``Claim`` for a body in an event loop, which it never blocks.

    ``token`` is the fencing token for fenced resources, as that of a claim (SK-6).
    """

    def __init__(self, claim: Claim, stop_requested: StopRequest, threads: Threads) -> None:
        self.task_id = claim.task_id
        """The task's id."""
        self.queue = claim.queue
        self.name = claim.name
        """The name of the task's function."""
        self.number = claim.number
        """Number of earlier claims of the task."""
        self.failures = claim.failures
        """Number of tries that have failed so far."""
        self.token = claim.token
        """The fencing token: the revision of the store at which this claim was made."""
        self.stop_requested = stop_requested
        """Set once the body should end early, just before it is cancelled. Check it; don't wait for it."""
        self._claim = claim
        self._threads = threads

    def __repr__(self) -> str:
        return f"Async{self._claim!r}"

    @property
    def deadline(self) -> float:
        """End of the claim; see ``Claim.deadline``. Seconds of ``time.monotonic()``."""
        return self._claim.deadline

    def still_mine(self) -> bool:
        """True if the claim lasts, as far as this process knows; see ``Claim.still_mine``."""
        return self._claim.still_mine()

    async def until_stop_requested(self) -> None:
        """Wait until the body should end; a body that does not wait for this is cancelled."""
        await self.stop_requested.until_set()

    async def update(self, content: bytes) -> int:
        """Add to the claim's log, durably; raises what ``Claim.update`` does (SK-9).

        If the body is cancelled meanwhile, the update may be in the log, now or later.
        """
        return await self._threads.run(self._claim.update, content)

    async def log(self, claim: int | None = None) -> AsyncIterator[Update]:
        """Iterate over all updates so far, the earliest first, read page by page; see ``Claim.log``."""
        found = self._claim.log(claim)
        while page := await self._threads.run(lambda: list(islice(found, LOG_PAGE))):
            for each in page:
                yield each

    async def complete_in(self, connection: sqlite3.Connection, result: bytes | None = None) -> None:
        """Complete the task in a transaction; raises what ``Claim.complete_in`` does.

        The connection is used in another thread: it must be opened with ``check_same_thread=False``.
        """
        await self._threads.run(self._claim.complete_in, connection, result)

    async def renew(self) -> bool:
        """Renew the claim; see ``Claim.renew``. The worker does so by itself."""
        return await self._threads.run(self._claim.renew)
