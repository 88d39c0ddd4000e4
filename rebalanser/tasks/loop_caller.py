"""Calls coroutine functions in an event loop, where they can be cancelled; others in the thread that asks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from concurrent.futures import Future
from typing import Any, Final

from rebalanser.runtime.logs import get_logger
from rebalanser.tasks.async_claim import AsyncClaim
from rebalanser.tasks.async_threads import Threads
from rebalanser.tasks.calling import Job, ThreadCaller, Watch
from rebalanser.tasks.functions import TaskBody
from rebalanser.tasks.outcomes import Cut, Outcome, raised, returned

CANCEL_S: Final = 2.0
"""How long a body may take to end after it was cancelled, before its claim is ended in spite of it."""
_log = get_logger()


class LoopCaller:
    """Calls bodies that are coroutine functions as tasks of ``loop``, which is cancelled to end one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: Threads) -> None:
        self._loop = loop
        self._threads = threads
        self._plain = ThreadCaller()
        self._watch = Watch()
        self._tasks: set[asyncio.Task[Any]] = set()

    def open(self) -> None:
        """Nothing to do."""

    def call(self, job: Job) -> Outcome:
        """Call a body in the loop and wait in this thread; one of a loop that is closed is given back."""
        if not job.body.is_coroutine:
            return self._plain.call(job)
        call = _Call(job, self._threads, self._tasks)
        if not self._soon(call.begin):
            return Cut.STOPPED
        cut = self._watch.until(job, call.ended, job.head.timeout_s)
        if cut is None:
            return call.ended.result()
        self._soon(call.cancel)
        concurrent.futures.wait([call.ended], CANCEL_S)
        if not call.ended.done():
            _log.warning(
                "the body of a task does not end though it was cancelled; what it writes is refused",
                action="task_not_cancelled",
                queue=job.claim.queue,
                task=job.claim.task_id,
                name=job.claim.name,
            )
        return cut

    def can_end(self, body: TaskBody, /) -> bool:
        """It can end coroutines, unless they suppress that they are cancelled."""
        return body.is_coroutine

    def cut_off(self) -> None:
        """Cancel all coroutines, each by the thread that waits for it."""
        self._watch.stop()

    def close(self) -> None:
        """Nothing to do: the loop is not its own."""

    def includes(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether a task of the loop is a body."""
        return task in self._tasks

    def _soon(self, callback: Any) -> bool:
        """Have it called in the loop; whether the loop is open."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)
            return True
        return False


class _Call:
    """A body in the loop; all but ``ended`` belongs to the loop."""

    def __init__(self, job: Job, threads: Threads, tasks: set[asyncio.Task[Any]]) -> None:
        self.ended: Future[Outcome] = Future()
        self._job = job
        self._threads = threads
        self._tasks = tasks
        self._task: asyncio.Task[Outcome] | None = None

    def begin(self) -> None:
        """Make a task of the body."""
        name = f"{self._job.body.name} {self._job.claim.task_id}"
        self._task = asyncio.get_running_loop().create_task(self._run(), name=name)
        self._tasks.add(self._task)
        self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        """Cancel the body."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> Outcome:
        claim = AsyncClaim(self._job.claim, self._threads)
        try:
            return returned(await self._job.body.function(claim, **self._job.arguments))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a body's wish to exit, or to be cancelled, is its failure
            return raised(error)

    def _done(self, task: asyncio.Task[Outcome]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self.ended.set_result(raised(asyncio.CancelledError("cancelled before it began")))
        elif (error := task.exception()) is not None:
            self.ended.set_result(raised(error))
        else:
            self.ended.set_result(task.result())
