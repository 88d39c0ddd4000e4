"""The bridge from an event loop to objects that block or run in threads.

The asyncio twin of a class has the methods of that class with the same parameters, which stand in one place:
``awaited`` makes a coroutine method of a blocking one, ``forwarded`` passes on one that does no I/O, and
``with_parameters_of`` gives a constructor the parameters of the other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from rebalanser.errors import InvalidState
from rebalanser.runtime.participant import (
    Participant,
    begin_in_own_thread,
    in_own_thread,
    run_in_loop_until_stopped,
)

P = ParamSpec("P")
T = TypeVar("T")
SyncT = TypeVar("SyncT")
Sync_co = TypeVar("Sync_co", covariant=True)
ParticipantT = TypeVar("ParticipantT", bound=Participant)


class CallsInThread(Protocol[Sync_co]):
    """A twin that calls methods of the blocking object in a thread."""

    async def _call(
        self, method: Callable[Concatenate[Sync_co, P], T], /, *arguments: P.args, **named: P.kwargs
    ) -> T:
        """Call a method of the blocking object in a thread, and return or raise what it does."""


def awaited(
    method: Callable[Concatenate[SyncT, P], T],
) -> Callable[Concatenate[CallsInThread[SyncT], P], Coroutine[Any, Any, T]]:
    """Return the coroutine method of a twin that calls a blocking method in a thread."""

    @functools.wraps(method)
    async def call(twin: CallsInThread[SyncT], /, *arguments: P.args, **named: P.kwargs) -> T:
        return await twin._call(method, *arguments, **named)  # noqa: SLF001 - of its own kind

    return call


def forwarded(
    method: Callable[Concatenate[ParticipantT, P], T],
) -> Callable[Concatenate[AsyncTwin[ParticipantT], P], T]:
    """Return the method of a twin that calls a method which does no I/O."""

    @functools.wraps(method)
    def call(twin: AsyncTwin[ParticipantT], /, *arguments: P.args, **named: P.kwargs) -> T:
        return method(twin._sync, *arguments, **named)  # noqa: SLF001 - of its own kind

    return call


def with_parameters_of(
    constructor: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give the constructor of a twin, or of a subclass, the parameters of another constructor.

    Other arguments are refused at once, in the name of its own class.
    """
    signature = inspect.signature(constructor)

    def give(own: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        @functools.wraps(constructor, assigned=("__doc__", "__annotations__"))
        def construct(twin: Any, /, *arguments: P.args, **named: P.kwargs) -> None:
            try:
                signature.bind(twin, *arguments, **named)
            except TypeError as error:
                raise TypeError(f"{own.__qualname__}() {error}") from None
            own(twin, *arguments, **named)

        for name in ("__module__", "__name__", "__qualname__"):
            setattr(construct, name, getattr(own, name))
        return construct

    return give


class AsyncTwin(Generic[ParticipantT]):
    """Base of the asyncio twins of participants: starts one without blocking the event loop, and stops it.

    Handlers run in the loop that ``start`` was awaited in. The participant stops with that loop: at its end
    ``asyncio.run`` cancels all tasks, among them one that stops the participant and waits for that.
    """

    def __init__(self, participant: ParticipantT) -> None:
        self._sync = participant
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._stopping_at_end: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Async{self._sync!r}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Begin to take part; raises what ``start`` of the blocking class does.

        ``asyncio.run`` stops it at its end if it was not stopped, and waits for that as ``stop`` does.
        """
        before, self._loop = self._loop, asyncio.get_running_loop()
        starting = begin_in_own_thread(self._sync.start)
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
                await _until_done(begin_in_own_thread(self._sync.stop))
                self._forget_end()
            raise

    async def stop(self, timeout_s: float | None = None) -> None:
        """Leave gracefully and wait until that is done; raises what ``stop`` of the blocking class does."""
        if self._is_called_by_handler():
            raise InvalidState("stop() was called from a handler; call request_stop() there")
        await in_own_thread(self._sync.stop, timeout_s)
        self._forget_end()

    def request_stop(self) -> None:
        """Begin a graceful stop and return at once."""
        self._sync.request_stop()

    async def run(self) -> None:
        """Take part until SIGINT, SIGTERM or SIGHUP, or until ``request_stop``; then stop gracefully.

        A second SIGINT has its usual effect. Several may run in one loop; a signal stops them all. Raises
        what ``run`` of the blocking class does.
        """
        await run_in_loop_until_stopped(self, self._sync.wait_stopped)

    async def _call(
        self, method: Callable[Concatenate[ParticipantT, P], T], /, *arguments: P.args, **named: P.kwargs
    ) -> T:
        return await in_own_thread(method, self._sync, *arguments, **named)

    def _is_called_by_handler(self) -> bool:
        return asyncio.current_task() in self._calls

    def _in_loop(self, handler: Callable[P, Awaitable[None] | None]) -> Callable[P, None]:
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
                stopping = begin_in_own_thread(self._sync.stop)
                await _until_done(stopping)
                stopping.result()
            raise


async def _until_done(work: asyncio.Future[Any]) -> None:
    """Wait for a future, even if the waiting task is cancelled."""
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([work])
