"""The asyncio twin of ``Group``: the same names, awaited."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from rebalanser.core.group import Fact
from rebalanser.errors import InvalidHandlers, InvalidState
from rebalanser.group import Group, check_takes_one
from rebalanser.runtime.loop_bridge import LoopBridge
from rebalanser.runtime.owned import Owned
from rebalanser.runtime.running import in_own_thread, run_in_loop_until_stopped
from rebalanser.runtime.workers import WorkerTasks
from rebalanser.settings import Settings

AsyncOwnedHandler = Callable[[list[Owned]], Awaitable[None] | None]
AsyncWorker = Callable[[Owned], Coroutine[Any, Any, None]]
CANCEL_SHARE: Final = 0.5
"""The part of ``stop_timeout_s`` after which a worker that was asked to stop is cancelled."""
HandlerT = TypeVar("HandlerT", bound=AsyncOwnedHandler)
WorkerT = TypeVar("WorkerT", bound=AsyncWorker)


def _returns_coroutine(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object may be called like a coroutine function
    )


class AsyncGroup:
    """A ``Group`` whose handlers run in the event loop and whose calls are awaited.

    Handlers may be coroutine functions or plain ones; both are called in the loop that ``start`` was
    awaited in. Heartbeats do not depend on the loop: one that is blocked loses no lease.
    """

    def __init__(
        self,
        name: str,
        url: str | None = None,
        *,
        node: str | None = None,
        settings: Settings | None = None,
        resources: Iterable[str] = (),
    ) -> None:
        self._group = Group(name, url, node=node, settings=settings, resources=resources)
        self._bridge = LoopBridge(self._group)
        self._tasks: WorkerTasks | None = None
        self._handled = False

    def __repr__(self) -> str:
        return f"Async{self._group!r}"

    @property
    def name(self) -> str:
        """The group's name."""
        return self._group.name

    @property
    def node(self) -> str:
        """This node's label."""
        return self._group.node

    @property
    def settings(self) -> Settings:
        """The settings of this node."""
        return self._group.settings

    def on_start(self, handler: HandlerT) -> HandlerT:
        """Register what to do with resources that arrive; see ``Group.on_start``."""
        self._refuse_beside_worker()
        check_takes_one(handler, "on_start", "a list of owned resources")
        self._group.on_start(self._bridge.in_loop(handler))
        self._handled = True
        return handler

    def on_stop(self, handler: HandlerT) -> HandlerT:
        """Register what to do with resources that leave; see ``Group.on_stop``."""
        self._refuse_beside_worker()
        check_takes_one(handler, "on_stop", "a list of owned resources")
        self._group.on_stop(self._bridge.in_loop(handler))
        self._handled = True
        return handler

    def _refuse_beside_worker(self) -> None:
        if self._tasks is not None:
            raise InvalidHandlers("register either a worker, or on_start and on_stop; not both")

    def worker(self, function: WorkerT) -> WorkerT:
        """Register a coroutine function that runs as a task for each owned resource.

        It should return soon once ``owned.still_mine()`` says no, or ``await owned.until_stop_requested()``
        returns; OnStop returns when it has. One that has not returned half of ``stop_timeout_s`` after that
        is cancelled.

        Raises:
            InvalidHandlers: it is no coroutine function, or a handler is registered already.
        """
        if self._tasks is not None:
            raise InvalidHandlers("worker is registered already")
        if self._handled:
            raise InvalidHandlers("register either a worker, or on_start and on_stop; not both")
        if not _returns_coroutine(function):
            raise InvalidHandlers("the worker of an AsyncGroup is a coroutine function (async def)")
        check_takes_one(function, "worker", "one owned resource")
        tasks = WorkerTasks(function, CANCEL_SHARE * self.settings.stop_timeout_s)
        self._group.on_start(self._bridge.in_loop(tasks.start))
        self._group.on_stop(self._bridge.in_loop(tasks.stop))
        self._tasks = tasks
        return function

    def on_fact(self, hook: Callable[[Fact], None]) -> Callable[[Fact], None]:
        """Register a hook that is told everything that happens; see ``Group.on_fact``."""
        return self._group.on_fact(hook)

    async def start(self) -> None:
        """Join the group, and return once the node is registered; raises what ``Group.start`` does.

        ``asyncio.run`` stops a group that was not stopped, and waits for that as ``stop`` does.
        """
        await self._bridge.start()

    async def stop(self, timeout_s: float | None = None) -> None:
        """Leave gracefully and wait until that is done; raises what ``Group.stop`` does."""
        if self._bridge.is_called_by_handler or (
            self._tasks is not None and self._tasks.includes(asyncio.current_task())
        ):
            raise InvalidState("stop() was called from a handler; call request_stop() there")
        await self._bridge.stop(timeout_s)

    def request_stop(self) -> None:
        """Begin a graceful stop and return at once."""
        self._group.request_stop()

    def accept(self, resource: str) -> None:
        """Take a resource again that was released here; see ``Group.accept``."""
        self._group.accept(resource)

    @property
    def released(self) -> frozenset[str]:
        """The resources that this node has released and not accepted since."""
        return self._group.released

    async def run(self) -> None:
        """Take part until SIGINT, SIGTERM or SIGHUP, or until ``request_stop``; then stop gracefully.

        A second SIGINT has its usual effect. Several may run in one loop; a signal stops them all. Raises
        what ``Group.run`` does.
        """
        self._group.narrate()
        await run_in_loop_until_stopped(self, self._group.wait_stopped)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def resources(self) -> Mapping[str, Owned]:
        """The owned resources now: a copy, by resource."""
        return self._group.resources

    @property
    def is_leader(self) -> bool:
        """True if this node leads its group, as far as it knows. Never base exclusion on it."""
        return self._group.is_leader

    async def wait_settled(self, timeout_s: float = 30.0) -> None:
        """Wait until this node owns exactly its share; raises what ``Group.wait_settled`` does."""
        await in_own_thread(self._group.wait_settled, timeout_s)
