"""The asyncio twin of ``Group``: the same names, awaited."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

from rebalanser.errors import InvalidHandlers
from rebalanser.group import Group, check_takes_one
from rebalanser.runtime.loop_bridge import AsyncTwin, awaited, forwarded, with_parameters_of
from rebalanser.runtime.owned import Owned
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


class AsyncGroup(AsyncTwin[Group]):
    """A ``Group`` whose handlers run in the event loop and whose calls are awaited.

    Handlers may be coroutine functions or plain ones; both are called in the loop that ``start`` was
    awaited in. Heartbeats do not depend on the loop: one that is blocked loses no lease.
    """

    @with_parameters_of(Group.__init__)
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(Group(*arguments, **named))
        self._tasks: WorkerTasks | None = None
        self._handled = False

    @property
    def name(self) -> str:
        """The group's name."""
        return self._sync.name

    @property
    def node(self) -> str:
        """This node's label."""
        return self._sync.node

    @property
    def settings(self) -> Settings:
        """The settings of this node."""
        return self._sync.settings

    def on_start(self, handler: HandlerT) -> HandlerT:
        """Register what to do with resources that arrive; see ``Group.on_start``."""
        self._refuse_beside_worker()
        check_takes_one(handler, "on_start", "a list of owned resources")
        self._sync.on_start(self._in_loop(handler))
        self._handled = True
        return handler

    def on_stop(self, handler: HandlerT) -> HandlerT:
        """Register what to do with resources that leave; see ``Group.on_stop``."""
        self._refuse_beside_worker()
        check_takes_one(handler, "on_stop", "a list of owned resources")
        self._sync.on_stop(self._in_loop(handler))
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
        self._sync.on_start(self._in_loop(tasks.start))
        self._sync.on_stop(self._in_loop(tasks.stop))
        self._tasks = tasks
        return function

    on_fact = forwarded(Group.on_fact)
    accept = forwarded(Group.accept)
    narrate = forwarded(Group.narrate)
    wait_settled = awaited(Group.wait_settled)
    wait_stopped = awaited(Group.wait_stopped)

    def _is_called_by_handler(self) -> bool:
        return super()._is_called_by_handler() or (
            self._tasks is not None and self._tasks.includes(asyncio.current_task())
        )

    async def run(self) -> None:
        self.narrate()
        await super().run()

    @property
    def released(self) -> frozenset[str]:
        """The resources that this node has released and not accepted since."""
        return self._sync.released

    @property
    def resources(self) -> Mapping[str, Owned]:
        """The owned resources now: a copy, by resource."""
        return self._sync.resources

    @property
    def is_leader(self) -> bool:
        """True if this node leads its group, as far as it knows. Never base exclusion on it."""
        return self._sync.is_leader
