"""``@worker``: one call per owned resource, each in a thread, or a task, of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from tenacity import AsyncRetrying, RetryCallState, Retrying, retry_if_exception_type
from tenacity.nap import sleep_using_event
from tenacity.stop import stop_when_event_set
from tenacity.wait import wait_exponential

from rebalanser.runtime.logs import get_logger
from rebalanser.runtime.owned import Owned

RESTART_INITIAL_S = 0.5
RESTART_MAX_S = 30.0

_log = get_logger()


def _give_up(_state: RetryCallState) -> None:
    """The resource has left: there is nothing more to call."""


def _reporter(owned: Owned) -> Callable[[RetryCallState], None]:
    def report(state: RetryCallState) -> None:
        _log.error(
            "a worker raised; it is called again unless its resource has left",
            action="worker_failed",
            resource=owned.resource,
            token=owned.token,
            attempt=state.attempt_number,
            exc_info=state.outcome.exception() if state.outcome else None,
        )

    return report


class WorkerThreads:
    """Handlers that run a function in a thread for each owned resource.

    A function that raises is called again after a growing delay (0.5 s to 30 s) while the resource is still
    owned; one that returns early is left alone. OnStop returns when all that were asked to stop have.
    """

    def __init__(self, function: Callable[[Owned], None]) -> None:
        self._function = function
        self._threads: dict[str, threading.Thread] = {}

    def start(self, owned: list[Owned]) -> None:
        """Start a thread for each resource."""
        for each in owned:
            name = f"rebalanser-worker-{each.resource}"
            thread = threading.Thread(target=self._run, args=(each,), name=name, daemon=True)
            self._threads[each.resource] = thread
            try:
                thread.start()
            except RuntimeError:
                del self._threads[each.resource]
                raise

    def stop(self, owned: list[Owned]) -> None:
        """Wait for the threads of these resources, which have been asked to stop."""
        for each in owned:
            thread = self._threads.get(each.resource)
            if thread is not None:
                thread.join()
                del self._threads[each.resource]

    def includes(self, thread: threading.Thread) -> bool:
        """Whether this is one of the threads that :meth:`stop` would wait for."""
        return thread in self._threads.copy().values()

    def _run(self, owned: Owned) -> None:
        attempts = Retrying(
            retry=retry_if_exception_type(Exception),
            stop=stop_when_event_set(owned.stop_requested),
            wait=wait_exponential(multiplier=RESTART_INITIAL_S, max=RESTART_MAX_S),
            sleep=sleep_using_event(owned.stop_requested),
            after=_reporter(owned),
            retry_error_callback=_give_up,
        )
        attempts(self._call, owned)

    def _call(self, owned: Owned) -> None:
        """The pause before a further call ends early when the resource leaves: then there is no call."""
        if not owned.stop_requested.is_set():
            self._function(owned)


class WorkerTasks:
    """Like :class:`WorkerThreads`, with a task of the event loop for each owned resource."""

    def __init__(self, function: Callable[[Owned], Awaitable[None]]) -> None:
        self._function = function
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, owned: list[Owned]) -> None:
        """Start a task for each resource."""
        for each in owned:
            name = f"rebalanser-worker-{each.resource}"
            self._tasks[each.resource] = asyncio.create_task(self._run(each), name=name)

    async def stop(self, owned: list[Owned]) -> None:
        """Wait for the tasks of these resources, which have been asked to stop."""
        for each in owned:
            task = self._tasks.get(each.resource)
            if task is not None:
                await asyncio.wait({task})
                del self._tasks[each.resource]

    def includes(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether this is one of the tasks that :meth:`stop` would wait for."""
        return task in self._tasks.values()

    async def _run(self, owned: Owned) -> None:
        async def pause(seconds: float) -> None:
            try:
                await asyncio.wait_for(owned.until_stop_requested(), seconds)
            except TimeoutError:
                return

        attempts = AsyncRetrying(
            retry=retry_if_exception_type(Exception),
            stop=stop_when_event_set(owned.stop_requested),
            wait=wait_exponential(multiplier=RESTART_INITIAL_S, max=RESTART_MAX_S),
            sleep=pause,
            after=_reporter(owned),
            retry_error_callback=_give_up,
        )
        await attempts(self._call, owned)

    async def _call(self, owned: Owned) -> None:
        if not owned.stop_requested.is_set():
            await self._function(owned)
