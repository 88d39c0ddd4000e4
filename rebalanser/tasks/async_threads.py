"""The threads in which an event loop has done what would block it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

from rebalanser.errors import InvalidState

THREADS: Final = 32
"""So many calls may wait for the engine at a time; the ledger writes theirs together."""
P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """Threads of one queue's own, so that it waits for nobody else's. For any event loop."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="rebalanser-tasks-async")
        self._closed = False

    async def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a function in a thread and wait; raises what that does, and what :meth:`submit` does."""
        return await self.submit(function, *arguments, **named)

    def submit(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> asyncio.Future[T]:
        """Have a function called in a thread; one that has begun is not ended by a cancellation.

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
