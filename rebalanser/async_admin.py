"""The asyncio twin of ``Admin``: the same names, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from rebalanser.admin import Admin
from rebalanser.runtime.loop_bridge import awaited, with_parameters_of
from rebalanser.runtime.participant import in_own_thread

P = ParamSpec("P")
T = TypeVar("T")


class AsyncAdmin:
    """An ``Admin`` whose calls are awaited; the event loop goes on meanwhile.

    It takes what ``Admin`` takes. It connects with the first call, or as ``async with``, which closes it too.
    Every method raises what that of ``Admin`` does, and those that connect what ``Admin`` itself does.
    """

    @with_parameters_of(Admin.__init__)
    def __init__(self, name: str, *arguments: Any, **named: Any) -> None:
        self.name = name
        self._connect = lambda: Admin(name, *arguments, **named)
        self._connecting = asyncio.Lock()
        self._admin: Admin | None = None

    async def __aenter__(self) -> Self:
        await self._connected()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _connected(self) -> Admin:
        async with self._connecting:
            if self._admin is None:
                self._admin = await in_own_thread(self._connect)
            return self._admin

    async def _call(
        self, method: Callable[Concatenate[Admin, P], T], /, *arguments: P.args, **named: P.kwargs
    ) -> T:
        return await in_own_thread(method, await self._connected(), *arguments, **named)

    async def close(self) -> None:
        """Close the connection. Closing twice does nothing."""
        async with self._connecting:
            if self._admin is not None:
                await in_own_thread(self._admin.close)

    add = awaited(Admin.add)
    add_each = awaited(Admin.add_each)
    weigh = awaited(Admin.weigh)
    remove = awaited(Admin.remove)
    resources = awaited(Admin.resources)
    owners = awaited(Admin.owners)
    drain = awaited(Admin.drain)
    undrain = awaited(Admin.undrain)
    policy = awaited(Admin.policy)
    configure = awaited(Admin.configure)
    exists = awaited(Admin.exists)
    plan = awaited(Admin.plan)
    explain = awaited(Admin.explain)
    state = awaited(Admin.state)
    wait_balanced = awaited(Admin.wait_balanced)
