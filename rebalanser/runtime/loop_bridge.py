"""A bridge from an event loop to a participant that runs in threads."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec

from rebalanser.errors import InvalidState
from rebalanser.runtime.running import Participant, begin_in_own_thread, in_own_thread

P = ParamSpec("P")


class LoopBridge:
    """Starts a participant without blocking the event loop, and runs its handlers in the loop.

    The participant stops with the loop, without which its handlers can't run: ``asyncio.run`` cancels all
    tasks at its end, among them one that stops the participant and waits for that.
    """

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._stopping_at_end: asyncio.Task[None] | None = None

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
        starting = begin_in_own_thread(self._participant.start)
        try:
            await asyncio.shield(starting)
            self._forget_end()
            self._stopping_at_end = asyncio.create_task(self._stop_at_end(), name="rebalanser-stop-at-end")
            await asyncio.sleep(0)  # a task that is cancelled before it began does nothing
        except InvalidState:
            self._loop = before
            raise
        except asyncio.CancelledError:
            # The thread can't be cancelled: stop what it starts, however often this task is cancelled.
            await _until_done(starting)
            if starting.exception() is None:
                await _until_done(begin_in_own_thread(self._participant.stop))
                self._forget_end()
            raise

    async def stop(self, timeout_s: float | None = None) -> None:
        """Stop the participant, and wait for that in a thread; raises what its ``stop`` does."""
        await in_own_thread(self._participant.stop, timeout_s)
        self._forget_end()

    def _forget_end(self) -> None:
        task, self._stopping_at_end = self._stopping_at_end, None
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            task.cancel()

    async def _stop_at_end(self) -> None:
        """Wait for the end of the loop, which cancels this task, and stop what was started last in it."""
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            if self._stopping_at_end is asyncio.current_task():
                stopping = begin_in_own_thread(self._participant.stop)
                await _until_done(stopping)
                stopping.result()
            raise


async def _until_done(work: asyncio.Future[Any]) -> None:
    """Wait for a future, even if the waiting task is cancelled."""
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([work])
