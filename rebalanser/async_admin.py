"""The asyncio twin of ``Admin``: the same names, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Self, TypeVar

from rebalanser.admin import UNCHANGED, Admin, Owner, Unchanged
from rebalanser.runtime.running import in_own_thread
from rebalanser.settings import Settings

if TYPE_CHECKING:
    from rebalanser.state import GroupState, ResourceState

P = ParamSpec("P")
T = TypeVar("T")


class AsyncAdmin:
    """An ``Admin`` whose calls are awaited; the event loop goes on meanwhile.

    It connects with the first call, or as ``async with``, which closes it too. Every method raises what that
    of ``Admin`` does, and those that connect what ``Admin`` itself does.
    """

    def __init__(
        self,
        name: str,
        url: str | None = None,
        *,
        settings: Settings | None = None,
        timeout_s: float = 30.0,
        create: bool = True,
    ) -> None:
        self.name = name
        self._connect = lambda: Admin(name, url, settings=settings, timeout_s=timeout_s, create=create)
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
        self, method: Callable[Concatenate[Admin, P], T], *arguments: P.args, **named: P.kwargs
    ) -> T:
        return await in_own_thread(method, await self._connected(), *arguments, **named)

    async def close(self) -> None:
        """Close the connection. Closing twice does nothing."""
        async with self._connecting:
            if self._admin is not None:
                await in_own_thread(self._admin.close)

    async def add(
        self,
        *resources: str | Iterable[str],
        weight: float | Unchanged = UNCHANGED,
        pin: str | Unchanged | None = UNCHANGED,
        attributes: Mapping[str, str] | Unchanged = UNCHANGED,
    ) -> int:
        """Add resources, or change what is said of them; see ``Admin.add``."""
        return await self._call(Admin.add, *resources, weight=weight, pin=pin, attributes=attributes)

    async def weigh(self, weights: Mapping[str, float]) -> int:
        """Change the weights of resources; see ``Admin.weigh``."""
        return await self._call(Admin.weigh, weights)

    async def remove(self, *resources: str | Iterable[str]) -> int:
        """Remove resources; see ``Admin.remove``."""
        return await self._call(Admin.remove, *resources)

    async def resources(self) -> list[ResourceState]:
        """All resources with their owners, by name."""
        return await self._call(Admin.resources)

    async def owners(self) -> dict[str, Owner]:
        """The present owners, by resource; see ``rebalanser.Owners`` for a cache."""
        return await self._call(Admin.owners)

    async def drain(self, node: str) -> None:
        """Move all resources away from the nodes with this label; see ``Admin.drain``."""
        await self._call(Admin.drain, node)

    async def undrain(self, node: str) -> None:
        """Let the nodes with this label own resources again."""
        await self._call(Admin.undrain, node)

    async def exists(self) -> bool:
        """Return True if anything is known of the group."""
        return await self._call(Admin.exists)

    async def state(self) -> GroupState:
        """The group at one revision; see ``Admin.state``."""
        return await self._call(Admin.state)

    async def wait_balanced(self, timeout_s: float = 30.0) -> GroupState:
        """Wait until every resource that can be placed has its owner; see ``Admin.wait_balanced``."""
        return await self._call(Admin.wait_balanced, timeout_s)
