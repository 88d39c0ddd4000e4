"""A bridge from an event loop to a participant that runs in threads."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec

from rebalanser.errors import InvalidState
from rebalanser.runtime.running import Participant, in_own_thread

P = ParamSpec("P")


class LoopBridge:
    """Starts a participant without blocking the event loop, and runs its handlers in the loop."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    @property
    def is_called_by_handler(self) -> bool:
        """True if the current task runs a handler."""
        return asyncio.current_task() in self._calls

    def in_loop(self, handler: Callable[P, Awaitable[None] | None]) -> Callable[P, None]:
        """Return a function for the participant's threads that runs a handler in the loop and waits."""

        async def call(*args: P.args, **kwargs: P.kwargs) -> None:
            task = asyncio.current_task()
            if task is not None:
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)
            result = handler(*args, **kwargs)
            if inspect.isawaitable(result):
                await result

        def called_from_thread(*args: P.args, **kwargs: P.kwargs) -> None:
            if self._loop is None or self._loop.is_closed():
                raise InvalidState("the event loop that it was started in is closed")
            asyncio.run_coroutine_threadsafe(call(*args, **kwargs), self._loop).result()

        return called_from_thread

    async def start(self) -> None:
        """Start the participant; its handlers run in the current event loop."""
        before, self._loop = self._loop, asyncio.get_running_loop()
        starting = asyncio.ensure_future(in_own_thread(self._participant.start))
        try:
            await asyncio.shield(starting)
        except InvalidState:
            self._loop = before
            raise
        except asyncio.CancelledError:
            # The thread can't be cancelled: stop what it starts, however often this task is cancelled.
            await _until_done(starting)
            if starting.exception() is None:
                await _until_done(asyncio.ensure_future(in_own_thread(self._participant.stop)))
            raise


async def _until_done(work: asyncio.Future[Any]) -> None:
    """Wait for a future, even if the waiting task is cancelled."""
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([work])
