"""The asyncio twin of ``Claim``, and the calls of coroutine functions in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from rebalanser.core.tasks.clocks import Timers
from rebalanser.core.tasks.model import Update
from rebalanser.errors import InvalidState
from rebalanser.runtime.logs import get_logger
from rebalanser.runtime.owned import StopRequest
from rebalanser.tasks.claim import LOG_PAGE, Claim
from rebalanser.tasks.execution.bodies import BodyCall, ThreadCaller, cut_of
from rebalanser.tasks.execution.outcomes import BodyOutcome, Cut, raised
from rebalanser.tasks.functions import TaskBody
from rebalanser.tasks.loops import ErrorPolicy, Loop

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


CANCEL_S: Final = 2.0
"""Seconds in which a cancelled body may end; then its claim is ended anyway."""
END_THREADS: Final = 4
"""Threads that end the claims of coroutines, and call the middleware's hooks."""
_log = get_logger()


class LoopCaller:
    """Calls coroutine functions as tasks of ``loop``, which can be cancelled, and others in their thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: Threads, errors: ErrorPolicy) -> None:
        self._loop = loop
        self._threads = threads
        self._plain = ThreadCaller()
        self._supervisor = BodySupervisor(errors)
        self._tasks: set[asyncio.Task[Any]] = set()

    def open(self) -> None:
        """Start the thread that ends bodies."""
        self._supervisor.start()

    def call(self, job: BodyCall) -> BodyOutcome:
        """Call a body that is no coroutine function."""
        return self._plain.call(job)

    def begin(self, job: BodyCall) -> Future[BodyOutcome] | None:
        """Begin a coroutine in the loop; give its task back if the loop is closed."""
        if not job.body.is_coroutine:
            return None
        call = _Call(job, self._threads, self._tasks)
        if not self._soon(call.begin):
            stopped: Future[BodyOutcome] = Future()
            stopped.set_result(Cut.STOPPED)
            return stopped
        return self._supervisor.follow(job, call.ended, lambda: self._soon(call.cancel))

    def takes_thread(self, body: TaskBody, /) -> bool:
        """True for functions that are no coroutines."""
        return not body.is_coroutine

    def can_end(self, body: TaskBody, /) -> bool:
        """True for coroutines, which end unless they suppress that they are cancelled."""
        return body.is_coroutine

    def cut_off(self) -> None:
        """Cancel all coroutines."""
        self._supervisor.cut_off()

    def close(self) -> None:
        """End the threads; the loop goes on."""
        self._supervisor.close()

    def includes(self, task: asyncio.Task[Any] | None) -> bool:
        """True if a task of the loop is a body."""
        return task in self._tasks

    def _soon(self, callback: Any) -> bool:
        """Schedule a call in the loop; False if the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)
            return True
        return False


@dataclass(slots=True, eq=False)
class _Followed:
    """A running body, and the call that ends it."""

    job: BodyCall
    cancel: Callable[[], object]
    ends_at: float | None
    wake: Callable[[], None] = lambda: None
    outcome: Future[BodyOutcome] = field(default_factory=Future)
    cut: Cut | None = None
    """Reason for which it was cancelled; None if it was not."""
    given_up_at: float = math.inf
    """Time at which its claim ends anyway."""


class BodySupervisor:
    """A thread that ends bodies which are out of time or whose claims are over.

    May be used from any thread.
    """

    def __init__(self, errors: ErrorPolicy) -> None:
        self._changed = threading.Condition()
        self._followed: dict[str, _Followed] = {}
        self._looks = Timers()
        self._stopped = False
        self._closed = False
        self._loop = Loop("bodies", self._step, errors)
        self._ends = ThreadPoolExecutor(END_THREADS, thread_name_prefix="rebalanser-tasks-ends")

    def start(self) -> None:
        """Start the thread."""
        self._loop.start()

    def close(self) -> None:
        """End the threads. Closing twice does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._loop.end_soon()
        self._loop.join()
        self._ends.shutdown(wait=False)

    def cut_off(self) -> None:
        """End all bodies, now and from now on."""
        with self._changed:
            self._stopped = True
            for holder in self._followed:
                self._looks.set(holder, 0.0)
            self._changed.notify()

    def follow(
        self, job: BodyCall, ended: Future[BodyOutcome], cancel: Callable[[], object]
    ) -> Future[BodyOutcome]:
        """Call ``cancel`` once a body must be ended; return the future of its outcome.

        That is the outcome of ``ended``, or the reason for which it was cancelled. A body that does not end
        within ``CANCEL_S`` seconds after that counts as ended.
        """
        holder = job.claim.held.holder
        limit_s = job.head.timeout_s
        each = _Followed(job, cancel, None if limit_s is None else time.monotonic() + limit_s)
        each.wake = partial(self._wake, holder)
        with self._changed:
            self._followed[holder] = each
        self._wake(holder)
        job.claim.stop_requested.call_when_set(each.wake)
        ended.add_done_callback(lambda done: self._end(holder, done.result()))
        return each.outcome

    def _wake(self, holder: str) -> None:
        with self._changed:
            if holder in self._followed:
                self._looks.set(holder, 0.0)
                self._changed.notify()

    def _step(self) -> bool:
        with self._changed:
            while not (due := self._looks.pop_due(time.monotonic())) and not self._closed:
                at = self._looks.next()
                self._changed.wait(None if at is None else max(0.0, at - time.monotonic()))
            followed = [(holder, self._followed[holder]) for holder in due if holder in self._followed]
        for holder, each in followed:
            self._look(holder, each)
        return not self._closed

    def _look(self, holder: str, each: _Followed) -> None:
        """Cancel a body that must be ended, or schedule the next look at it."""
        now = time.monotonic()
        if each.cut is None:
            each.cut = Cut.STOPPED if self._stopped else cut_of(each.job, each.ends_at, now)
            if each.cut is not None:
                each.given_up_at = now + CANCEL_S
                each.cancel()
        elif each.given_up_at <= now:
            _log.warning(
                "the body of a task still runs although it was cancelled; its writes are refused",
                action="task_not_cancelled",
                queue=each.job.claim.queue,
                task=each.job.claim.task_id,
                name=each.job.claim.name,
            )
            self._end(holder, each.cut)
            return
        at = each.given_up_at
        if each.cut is None:
            deadline = each.job.claim.deadline
            at = deadline if each.ends_at is None else min(deadline, each.ends_at)
        with self._changed:
            # If there is a time already, a look was requested meanwhile.
            if holder in self._followed and holder not in self._looks:
                self._looks.set(holder, at)

    def _end(self, holder: str, outcome: BodyOutcome) -> None:
        with self._changed:
            each = self._followed.pop(holder, None)
            self._looks.drop(holder)
        if each is None:
            return
        each.job.claim.stop_requested.forget(each.wake)
        final = outcome if each.cut is None else each.cut
        try:
            self._ends.submit(each.outcome.set_result, final)
        except RuntimeError:  # closed
            each.outcome.set_result(final)


class _Call:
    """A body in the loop; all but ``ended`` belongs to the loop."""

    def __init__(self, job: BodyCall, threads: Threads, tasks: set[asyncio.Task[Any]]) -> None:
        self.ended: Future[BodyOutcome] = Future()
        self._job = job
        self._threads = threads
        self._tasks = tasks
        self._task: asyncio.Task[BodyOutcome] | None = None

    def begin(self) -> None:
        """Create the task of the body."""
        name = f"{self._job.body.name} {self._job.claim.task_id}"
        self._task = asyncio.get_running_loop().create_task(self._run(), name=name)
        self._tasks.add(self._task)
        self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        """Cancel the body."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> BodyOutcome:
        claim = AsyncClaim(self._job.claim, self._job.claim.stop_requested, self._threads)
        try:
            return self._job.returned(await self._job.body.function(claim, **self._job.arguments))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit and a cancellation by the body itself are failures
            return raised(error)

    def _done(self, task: asyncio.Task[BodyOutcome]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self.ended.set_result(raised(asyncio.CancelledError("cancelled before it began")))
        elif (error := task.exception()) is not None:
            self.ended.set_result(raised(error))
        else:
            self.ended.set_result(task.result())
