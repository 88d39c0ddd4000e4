"""The asyncio twin of ``Queue``: the same names, awaited."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from itertools import islice
from types import TracebackType
from typing import (
    Any,
    Concatenate,
    Final,
    Generic,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from rebalanser import forks
from rebalanser.core.clock import Clock
from rebalanser.core.tasks.failures import LoopFailure
from rebalanser.core.tasks.model import Enqueued, LimitRoom, Stored, TaskId
from rebalanser.errors import InvalidState
from rebalanser.registry.keys import check_name
from rebalanser.runtime.loop_bridge import awaited, with_parameters_of
from rebalanser.runtime.participant import in_own_thread, run_in_loop_until_stopped
from rebalanser.tasks import waiting
from rebalanser.tasks.async_claim import AsyncClaim, LoopCaller, Threads
from rebalanser.tasks.calls import PlannedCall, call_places, given_calls, sort_by_dependency
from rebalanser.tasks.claim import Claim
from rebalanser.tasks.context import too_slow
from rebalanser.tasks.execution.worker import SharedConcurrency
from rebalanser.tasks.functions import (
    NO_OPTIONS,
    EnqueueOptions,
    GivenOptions,
    GivenTaskOptions,
    TaskBody,
    TaskOptions,
    chosen_options,
    is_coroutine_function,
    register_body,
    require_claim,
    require_function,
)
from rebalanser.tasks.metrics import Measurement
from rebalanser.tasks.open_queue import IN_MEMORY, name_and_url, refuse_options
from rebalanser.tasks.periodic import Schedule
from rebalanser.tasks.producer import TaskRegistry
from rebalanser.tasks.queue import Queue, refuse_mixed, require_concurrency, require_grace

PAGE = 1000
Tasks: TypeAlias = Iterable[Stored] | AsyncIterable[Stored]
"""Tasks that a call takes: a list, or what ``AsyncQueue.tasks`` returns."""
_PARAMETERS: Final = inspect.signature(Queue.__init__)
P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")


class AsyncTaskFunction(Generic[P, R]):
    """A function whose calls can be enqueued; calling it calls the function itself, with a claim.

    ``P`` are its parameters after the claim, ``R`` is what it returns, or its coroutine.
    """

    def __init__(self, queue: AsyncQueue, body: TaskBody, options: EnqueueOptions = NO_OPTIONS) -> None:
        self._queue = queue
        self._options = options
        self.body = body
        """The function itself, and how its arguments are stored."""
        self.name = body.name
        """The name under which its tasks are stored."""

    def __call__(self, claim: AsyncClaim | Claim, *arguments: P.args, **named: P.kwargs) -> Any:
        """Call the function, as in a test: a coroutine function gives a coroutine.

        Raises:
            InvalidArgument: ``claim`` is an argument of the task instead.
        """
        require_claim(self.name, claim)
        return self.body.function(claim, *arguments, **named)

    def options(self, **options: Unpack[GivenOptions]) -> AsyncTaskFunction[P, R]:
        """Return it with options for the tasks that it enqueues; as ``TaskFunction.options``."""
        return AsyncTaskFunction(self._queue, self.body, chosen_options(self.name, options))

    def call(self, *arguments: P.args, **named: P.kwargs) -> AsyncCall[R]:
        """Return a call that is not enqueued yet; as ``TaskFunction.call``."""
        return AsyncCall(self._queue, self.body, self._options, arguments, named)

    async def enqueue(self, *arguments: P.args, **named: P.kwargs) -> Enqueued[R]:
        """Enqueue a call with these arguments; return the task's id, as ``TaskFunction.enqueue`` does.

        If it is cancelled meanwhile, the task may have been enqueued.
        """
        return await self._queue.enqueue_call(self.body, arguments, named, self._options)

    async def enqueue_many(
        self, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
    ) -> list[Enqueued[R]]:
        """Enqueue many calls in few transactions; as ``TaskFunction.enqueue_many``."""
        return await self._queue.enqueue_calls(self.body, calls, self._options)


class AsyncCall(PlannedCall[R]):
    """A planned call of a function, for one task; as ``Call``, awaited."""

    def then(
        self,
        function: AsyncTaskFunction[Concatenate[R, Q], S],
        /,
        *arguments: Q.args,
        **named: Q.kwargs,
    ) -> AsyncCall[S]:
        """Return a call of another function, whose first argument is this result; as ``Call.then``."""
        require_function(function, AsyncTaskFunction)
        return function.call(self.result, *arguments, **named)

    async def enqueue(self) -> Enqueued[R]:
        """Enqueue it and all calls whose results it gets; as ``Call.enqueue``.

        If it is cancelled meanwhile, all or none are enqueued: enqueue it again.
        """
        await cast("AsyncQueue", self.queue).enqueue_ordered([self])
        return cast("Enqueued[R]", self.enqueued)


class AsyncTaskDecorator(Protocol):
    """The decorator that registers a function as a task."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTaskFunction[P, R]: ...

    @overload
    def __call__(self, function: Callable[Concatenate[Any, P], R], /) -> AsyncTaskFunction[P, R]: ...


def _iterated(
    method: Callable[Concatenate[Queue, P], Iterator[T]],
) -> Callable[Concatenate[AsyncQueue, P], AsyncIterator[T]]:
    """Return the method that iterates over the items of a blocking iterator, read page by page."""

    @functools.wraps(method)
    async def iterate(twin: AsyncQueue, /, *arguments: P.args, **named: P.kwargs) -> AsyncIterator[T]:
        items = await twin._call(method, *arguments, **named)  # noqa: SLF001 - of its own kind
        page: Any = named.get("page", PAGE)
        while batch := await twin._call(lambda _queue: list(islice(items, page))):  # noqa: SLF001
            for each in batch:
                yield each

    return iterate


class AsyncQueue(TaskRegistry[AsyncTaskDecorator]):
    """A ``Queue`` whose calls are awaited, and whose bodies may run in the loop.

    It takes what ``Queue`` takes. The engine is opened by the first call that
    needs it, by ``open``, or by ``async with``; these raise what ``Queue``
    does. Nothing blocks the loop, and a loop that is blocked loses no claim.

    Raises:
        InvalidName: the queue's name can't be stored.
        InvalidArgument: an option is of a wrong type, or a time is out of range.
    """

    @with_parameters_of(Queue.__init__)
    def __init__(self, *arguments: Any, **named: Any) -> None:
        given = _PARAMETERS.bind(self, *arguments, **named)
        given.apply_defaults()
        options = given.kwargs
        refuse_options(**options)
        _, name, url = given.args
        retention = options.pop("retention")
        name, url = name_and_url(name, url)
        self.name = check_name(name, "queue")
        self.retention = retention
        """Retention of closed tasks; may be set until the engine is opened (SK-22)."""
        self.functions: dict[str, TaskBody] = {}
        """The functions that are registered, by name."""
        self._url = url
        self._make = partial(Queue, name, url, **options)
        self._schedules: list[Schedule] = []
        self._queue: Queue | None = None
        self._is_closed = False
        self._begin()
        forks.in_child(self._forked)

    def _begin(self) -> None:
        self._threads = Threads(self.name)
        self._opening = threading.Lock()
        self._caller: LoopCaller | None = None

    def _forked(self) -> None:
        """Forget the parent's threads in a forked child; the inner queue does so by itself."""
        if not self._is_closed:
            self._begin()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncQueue({self.name!r}, {self._url!r})"

    @overload
    def task(
        self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTaskFunction[P, R]: ...

    @overload
    def task(self, function: Callable[Concatenate[Any, P], R], /) -> AsyncTaskFunction[P, R]: ...

    @overload
    def task(self, name: str | None = None, **options: Unpack[GivenTaskOptions]) -> AsyncTaskDecorator: ...

    def task(self, name: str | Callable[..., Any] | None = None, **options: Unpack[GivenTaskOptions]) -> Any:
        """Register a function for tasks, under its own name or another; ``options`` as in TaskOptions.

        Without arguments ``@queue.task`` is enough.

        A coroutine function is called in the event loop with an ``AsyncClaim``, and cancelled once it is
        out of time, or its claim is lost. Any other is called in a thread with a
        ``Claim``.

        Raises:
            InvalidHandlers: the function can't be called with stored arguments, or the name is taken.
            InvalidTask: an option is unknown or out of range.
        """
        return self._registering(name, options)

    def _bound(
        self, function: Callable[..., Any], name: str, options: TaskOptions
    ) -> AsyncTaskFunction[..., Any]:
        claim = AsyncClaim if is_coroutine_function(function) else Claim
        body = TaskBody(function, name, options, claim)
        return AsyncTaskFunction(self, register_body(self.functions, body))

    @contextlib.asynccontextmanager
    async def in_memory(self, clock: Clock | None = None) -> AsyncIterator[Self]:
        """Make it an empty queue in memory within a context, as a test does; as ``Queue.in_memory``."""
        if self._caller is not None:
            raise InvalidState(f"the queue {self.name!r} is worked on already by this process")
        before = vars(self).copy()
        _, url = name_and_url(self.name, IN_MEMORY)
        self._make = partial(Queue, self.name, url, **{**self._make.keywords, "outbox": None, "clock": clock})
        self._queue = None
        self._begin()
        try:
            yield self
        finally:
            await self.close()
            vars(self).update(before)

    async def open(self) -> None:
        """Open the engine, unless it is open. Raises what ``Queue`` does."""
        await self._opened()

    new_id = awaited(Queue.new_id)
    enqueue_call = awaited(Queue.enqueue_call)
    enqueue_calls = awaited(Queue.enqueue_calls)
    status = awaited(Queue.status)
    count = awaited(Queue.count)
    get = awaited(Queue.get)
    payload = awaited(Queue.payload)
    newest = awaited(Queue.newest)
    log = _iterated(Queue.log)
    tasks = _iterated(Queue.tasks)
    cancel = awaited(Queue.cancel)
    requeue = awaited(Queue.requeue)
    pause = awaited(Queue.pause)
    resume = awaited(Queue.resume)
    pauses = awaited(Queue.pauses)
    collect = awaited(Queue.collect)
    retained = awaited(Queue.retained)

    async def enqueue_all(self, calls: Sequence[PlannedCall[R]]) -> list[Enqueued[R]]:
        """Enqueue calls, with all whose results they get, all or none; as ``Queue.enqueue_all``."""
        given = given_calls(calls)
        await self.enqueue_ordered(given, call_places(len(given)))
        return [call.enqueued for call in given if call.enqueued is not None]

    async def enqueue_ordered(self, calls: Sequence[PlannedCall[Any]], places: Sequence[str] = ()) -> None:
        """Enqueue calls, with all whose results they get, all or none; errors name their ``places``."""
        ordered = sort_by_dependency(calls, self)
        queue = await self._opened()
        await self._threads.run(queue.enqueue_ordered, ordered, places)

    @property
    def url(self) -> str:
        """The URL of its registry."""
        return self._url

    @property
    def troubles(self) -> tuple[LoopFailure, ...]:
        """Failures in this process that are retried now; as ``Queue.troubles``."""
        return () if self._queue is None else self._queue.troubles

    def measure(self) -> Measurement:
        """Measure this process; as ``Queue.measure``. On SQLite it reads the store: call it in a thread.

        Raises:
            InvalidState: the queue is not open yet.
        """
        if self._queue is None:
            raise InvalidState("the queue is not open yet")
        return self._queue.measure()

    async def rooms(self, tasks: Tasks) -> dict[TaskId, LimitRoom]:
        """Find the room that limits leave to those of these tasks that wait; as ``Queue.rooms``."""
        queue = await self._opened()
        rooms: dict[TaskId, LimitRoom] = {}
        async for some in _batches(tasks):
            rooms |= await self._threads.run(queue.rooms, some)
        return rooms

    async def with_blockers(self, tasks: Tasks) -> list[tuple[Stored, tuple[Stored, ...]]]:
        """Pair tasks with the dead and cancelled ones that they wait for; as ``Queue.with_blockers``."""
        queue = await self._opened()
        pairs: list[tuple[Stored, tuple[Stored, ...]]] = []
        async for some in _batches(tasks):
            pairs += await self._threads.run(lambda given: list(queue.with_blockers(given)), some)
        return pairs

    async def cancel_all(self, tasks: Tasks) -> int:
        """Cancel tasks, many at once; as ``Queue.cancel_all``."""
        queue = await self._opened()
        return sum([await self._threads.run(queue.cancel_all, some) async for some in _batches(tasks)])

    async def requeue_all(self, tasks: Tasks) -> int:
        """Requeue tasks, many at once; as ``Queue.requeue_all``."""
        queue = await self._opened()
        return sum([await self._threads.run(queue.requeue_all, some) async for some in _batches(tasks)])

    @overload
    async def wait(self, task: Enqueued[R], timeout_s: float = 60.0) -> R: ...

    @overload
    async def wait(self, task: TaskId, timeout_s: float = 60.0) -> Any: ...

    async def wait(self, task: TaskId, timeout_s: float = 60.0) -> Any:
        """Wait until a task is complete; return its result, as ``Queue.wait`` does.

        It takes no thread while it waits. Raises what ``Queue.wait`` does.
        """
        waiting.refuse_wait(task, timeout_s)
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        deadline = loop.time() + timeout_s
        queue, limit = await self._wait_limit(timeout_s)

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits
                loop.call_soon_threadsafe(changed.set)

        def read() -> Stored | None:
            return queue.find_within(limit.request_s, task)

        async with self._watching(queue, task, notify, limit):
            with waiting.waiting_for(self.name) as hint:
                stored = await self._threads.run(read)
                if stored is not None:
                    await self._threads.run(queue.pause_hint, stored, limit, logs=True)
                while stored is None or stored.state.status not in waiting.CLOSED:
                    why = "" if stored is None else hint(stored)
                    try:
                        async with asyncio.timeout_at(deadline):
                            await changed.wait()
                    except TimeoutError:
                        if stored is None:
                            raise waiting.still_spooled(task, timeout_s) from None
                        why += await self._threads.run(queue.pause_hint, stored, limit)
                        raise waiting.not_settled(stored, timeout_s, why) from None
                    changed.clear()
                    stored = await self._threads.run(read)
        return waiting.value_of(stored, self.functions)

    async def _wait_limit(self, timeout_s: float) -> tuple[Queue, waiting.WaitLimit]:
        """Open the engine within the time of a wait that begins now; return the queue and that limit."""
        try:
            async with asyncio.timeout(timeout_s + waiting.SLACK_S):
                queue = await self._opened()
        except TimeoutError:
            raise too_slow(timeout_s) from None
        return queue, await self._threads.run(queue.wait_limit, timeout_s)

    async def run(self, concurrency: int = 1) -> None:
        """Work on tasks until SIGINT, SIGTERM or SIGHUP, or until ``request_stop``; then stop gracefully.

        A second SIGINT has its usual effect.

        Raises:
            InvalidState: not called in the main thread.
        """
        queue = await self._opened()
        await run_in_loop_until_stopped(_RunningAsyncQueues(self, concurrency), queue.wait_stopped)

    async def run_until_idle(self, *, advance_s: float = 0.0) -> int:
        """Run all tasks that are ready, one after another, as a test does; as ``Queue.run_until_idle``.

        Coroutine functions run in the loop that awaits this, others in a thread.
        """
        queue = await self._opened()
        caller = LoopCaller(asyncio.get_running_loop(), self._threads, queue.errors)
        return await self._threads.run(queue.run_inline, caller, advance_s)

    async def start(self, concurrency: int = 1) -> None:
        """Join the queue's workers and begin to run tasks, ``concurrency`` at a time; as ``Queue.start``.

        Coroutine functions run in the loop that awaits this, others in threads.
        """
        await self.start_sharing(concurrency, None)

    async def start_sharing(self, concurrency: int, shared: SharedConcurrency | None) -> None:
        """``start``, with places that it shares with other queues."""
        require_concurrency(concurrency)
        queue = await self._opened()
        caller = LoopCaller(asyncio.get_running_loop(), self._threads, queue.errors)
        # A body may begin before this returns.
        before, self._caller = self._caller, caller
        starting = self._threads.submit(queue.start_with, caller, concurrency, shared)
        try:
            await asyncio.shield(starting)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                # The thread can't be cancelled: stop what it starts.
                await asyncio.wait([starting])
                if starting.exception() is None:
                    await self._threads.run(queue.stop, 0.0)
            self._caller = before
            raise

    def request_stop(self) -> None:
        """Begin to stop, and return at once."""
        if self._queue is not None:
            self._queue.request_stop()

    async def wait_stopped(self, timeout_s: float | None = None) -> bool:
        """Wait until a stop is requested; True if so."""
        return await in_own_thread((await self._opened()).wait_stopped, timeout_s)

    async def stop(self, grace_s: float | None = None) -> None:
        """Claim no more, let the bodies that run end within ``grace_s`` seconds (30 where None), and leave.

        Coroutines that have not ended by then are cancelled and given back. Stopping twice does nothing.

        Raises:
            InvalidState: called by a body, which it would wait for.
        """
        self._refuse_body("stop()")
        require_grace(grace_s)
        if self._queue is not None:
            await self._threads.run(self._queue.stop, grace_s)

    async def close(self) -> None:
        """Stop, finish pending writes, and close the engine. Closing twice does nothing.

        Raises:
            InvalidState: called by a body, which it would wait for.
        """
        self._refuse_body("close()")
        self._is_closed = True
        queue, self._queue = self._queue, None
        if queue is not None:
            await self._threads.run(queue.close)
        self._threads.close()

    def _refuse_body(self, call: str) -> None:
        if self._caller is not None and self._caller.includes(asyncio.current_task()):
            raise InvalidState(f"{call} was called by a body; call request_stop() there")

    async def _call(
        self, method: Callable[Concatenate[Queue, P], T], /, *arguments: P.args, **named: P.kwargs
    ) -> T:
        return await self._threads.run(method, await self._opened(), *arguments, **named)

    async def _opened(self) -> Queue:
        queue = self._queue
        return await self._threads.run(self._open) if queue is None else queue

    def _open(self) -> Queue:
        with self._opening:
            queue = self._queue
            if queue is None:
                queue = self._make(retention=self.retention)
                queue.adopt(self.functions, self._schedules)
                self._queue = queue
                if self._is_closed:  # meanwhile: the caller did not wait for this
                    self._queue = None
                    queue.close()
                    raise InvalidState(f"the queue {self.name!r} is closed")
            return queue

    @contextlib.asynccontextmanager
    async def _watching(
        self, queue: Queue, task: TaskId, changed: Callable[[], None], limit: waiting.WaitLimit
    ) -> AsyncIterator[None]:
        listening = self._threads.submit(queue.notifier.listen, task, changed, limit.request_s)
        try:
            await asyncio.shield(listening)
            yield
        finally:
            await asyncio.wait([listening])
            if listening.exception() is None:
                await self._threads.run(queue.notifier.leave, task, changed)


async def _batches(tasks: Tasks) -> AsyncIterator[Iterable[Stored]]:
    """Iterate over tasks in lists of ``PAGE``; what is no asynchronous iterator is given as it is."""
    if not isinstance(tasks, AsyncIterable):
        yield tasks
        return
    batch: list[Stored] = []
    async for each in tasks:
        batch.append(each)
        if len(batch) == PAGE:
            yield batch
            batch = []
    yield batch


class AsyncQueues:
    """Several queues that one process works on; as ``Queues``, awaited."""

    def __init__(self, *queues: AsyncQueue) -> None:
        refuse_mixed(queues, AsyncQueue)
        self._queues = queues
        self._stopped = threading.Event()

    async def run(self, concurrency: int = 1) -> None:
        """Work on tasks until a signal or a stop; as ``AsyncQueue.run``."""
        await run_in_loop_until_stopped(_RunningAsyncQueues(self, concurrency), self._wait_stopped)

    async def start(self, concurrency: int = 1) -> None:
        """Begin to run tasks, ``concurrency`` in all; as ``AsyncQueue.start``."""
        shared = SharedConcurrency(concurrency)
        before, self._stopped = self._stopped, shared.stopped
        started: list[AsyncQueue] = []
        try:
            for each in self._queues:
                await each.start_sharing(concurrency, shared)
                started.append(each)
        except BaseException:
            self._stopped = before
            for each in started:
                await each.stop(0.0)
            raise

    async def wait_stopped(self, timeout_s: float | None = None) -> bool:
        """Wait until a stop of any of the queues is requested; True if so."""
        return await in_own_thread(self._wait_stopped, timeout_s)

    def _wait_stopped(self, timeout_s: float | None = None) -> bool:
        return self._stopped.wait(timeout_s)

    def request_stop(self) -> None:
        """Begin to stop, and return at once."""
        self._stopped.set()

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop all queues at the same time, as ``AsyncQueue.stop`` does; they stay open."""
        self._stopped.set()
        stopping = [each.stop(grace_s) for each in self._queues]
        for error in await asyncio.gather(*stopping, return_exceptions=True):
            if error is not None:
                raise error


class _RunningAsyncQueues:
    """Queues that are worked on, for ``run_in_loop_until_stopped``."""

    def __init__(self, queue: AsyncQueue | AsyncQueues, concurrency: int) -> None:
        self._queue = queue
        self._concurrency = concurrency

    async def start(self) -> None:
        await self._queue.start(self._concurrency)

    def request_stop(self) -> None:
        self._queue.request_stop()

    async def stop(self, timeout_s: float | None = None) -> None:
        await self._queue.stop(timeout_s)
