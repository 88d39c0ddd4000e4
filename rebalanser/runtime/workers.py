"""``@worker``: one call per owned resource, in a thread or task of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from tenacity import AsyncRetrying, RetryCallState, Retrying, retry_if_exception, retry_if_result
from tenacity.nap import sleep_using_event
from tenacity.stop import stop_when_event_set

from rebalanser.core.clock import RESTART_INITIAL_S, GrowingDelay
from rebalanser.core.group import FactKind
from rebalanser.runtime.logs import get_logger, log_aside
from rebalanser.runtime.owned import Owned

RELEASED_PAUSE_S = 5.0
"""Minimum seconds before a worker is called again that has released its resource: another node takes it."""

_log = get_logger()


def _give_up(_state: RetryCallState) -> None:
    """Return None: the resource has left, so there is no further call."""


def _is_of_worker(error: BaseException) -> bool:
    """Return True if a worker raised the error, and False if it is meant to end the worker's task.

    ``sys.exit()`` in a thread ends only the thread. A coroutine also raises CancelledError if something that
    it awaits was cancelled, while its own task was not.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return True
    if isinstance(error, asyncio.CancelledError):
        return task is None or not task.cancelling()
    return isinstance(error, Exception)


class _Calls:
    """The retry policy of a worker for one resource; reports calls that ended early."""

    def __init__(self, owned: Owned) -> None:
        self._owned = owned
        self._delay = GrowingDelay()
        self._began = 0.0
        self.options: dict[str, Any] = {
            "retry": retry_if_exception(_is_of_worker) | retry_if_result(lambda again: again),
            "stop": stop_when_event_set(owned.stop_requested),
            "wait": self._wait_s,
            "after": self._report,
            "retry_error_callback": _give_up,
        }

    def begins(self) -> bool:
        """Return True if a call is due: the pause before it ends early when the resource leaves."""
        self._began = time.monotonic()
        return not self.over

    @property
    def over(self) -> bool:
        """True if the resource has to be given up."""
        return self._owned.stop_requested.is_set()

    def _wait_s(self, _state: RetryCallState) -> float:
        delay_s = self._delay.after(time.monotonic() - self._began)
        return max(delay_s, min(RELEASED_PAUSE_S, self._owned.released_s))

    def _report(self, state: RetryCallState) -> None:
        owned, error = self._owned, state.outcome.exception() if state.outcome else None
        known = {"resource": owned.resource, "token": owned.token, "attempt": state.attempt_number}
        if error is not None:
            owned.report_worker(FactKind.WORKER_FAILED, error, attempt=state.attempt_number)
            log_aside(
                "a worker raised; it is called again unless its resource has left",
                error,
                action="worker_failed",
                **known,
            )
        elif owned.still_mine() and not owned.released_s:
            owned.report_worker(FactKind.WORKER_RETURNED, None, attempt=state.attempt_number)
            with contextlib.suppress(Exception):  # a log that raises must not end the thread of a worker
                _log.warning(
                    "a worker returned while it owns its resource; it is called again unless that has left",
                    action="worker_returned",
                    **known,
                )


class WorkerThreads:
    """Handlers that run a function in a thread for each owned resource.

    If the function raises or returns while its resource is owned, it is called again after a growing delay
    (0.5 s to 30 s), and after at least 5 s if it has released the resource. OnStop returns when the functions
    of all leaving resources have returned.
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
        """Wait for the threads of these resources, whose stop was requested."""
        for each in owned:
            thread = self._threads.get(each.resource)
            if thread is not None:
                thread.join()
                del self._threads[each.resource]

    def includes(self, thread: threading.Thread) -> bool:
        """Return True if ``stop`` would wait for this thread."""
        return thread in self._threads.copy().values()

    def _run(self, owned: Owned) -> None:
        calls = _Calls(owned)
        Retrying(**calls.options, sleep=sleep_using_event(owned.stop_requested))(self._call, owned, calls)

    def _call(self, owned: Owned, calls: _Calls) -> bool:
        if calls.begins():
            self._function(owned)
        return not calls.over


class WorkerTasks:
    """Like ``WorkerThreads``, with a task of the event loop for each owned resource.

    A task that still runs ``grace_s`` seconds after the stop request is cancelled. If other code cancels one,
    that is reported, and another task follows.
    """

    def __init__(self, function: Callable[[Owned], Awaitable[None]], grace_s: float) -> None:
        self._function = function
        self._grace_s = grace_s
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, owned: list[Owned]) -> None:
        """Start a task for each resource."""
        for each in owned:
            self._begin(each)

    async def stop(self, owned: list[Owned]) -> None:
        """Wait for the tasks of these resources, whose stop was requested; cancel late ones."""
        asked = {self._tasks[each.resource] for each in owned if each.resource in self._tasks}
        if asked:
            _, late = await asyncio.wait(asked, timeout=self._grace_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        for each in owned:
            self._tasks.pop(each.resource, None)

    def includes(self, task: asyncio.Task[Any] | None) -> bool:
        """Return True if ``stop`` would wait for this task."""
        return task in self._tasks.values()

    async def _run(self, owned: Owned) -> None:
        async def pause(seconds: float) -> None:
            try:
                await asyncio.wait_for(owned.until_stop_requested(), seconds)
            except TimeoutError:
                return

        calls = _Calls(owned)
        await AsyncRetrying(**calls.options, sleep=pause)(self._call, owned, calls)

    def _begin(self, owned: Owned) -> None:
        task = asyncio.create_task(self._run(owned), name=f"rebalanser-worker-{owned.resource}")
        self._tasks[owned.resource] = task
        task.add_done_callback(partial(self._ended, owned))

    def _ended(self, owned: Owned, task: asyncio.Task[None]) -> None:
        """Begin again after a pause if other code cancelled the task; not in a loop that closes."""
        if task.cancelled() and owned.still_mine():
            task.get_loop().call_later(RESTART_INITIAL_S, self._begin_again, owned)

    def _begin_again(self, owned: Owned) -> None:
        """Report that the task was cancelled, unless its resource has left since, and begin another one."""
        if not owned.still_mine():
            return
        error = asyncio.CancelledError("the task of the worker was cancelled")
        owned.report_worker(FactKind.WORKER_FAILED, error)
        log_aside(
            "the task of a worker was cancelled; another one follows",
            error,
            action="worker_failed",
            resource=owned.resource,
            token=owned.token,
        )
        self._begin(owned)

    async def _call(self, owned: Owned, calls: _Calls) -> bool:
        if calls.begins():
            await self._function(owned)
        return not calls.over
