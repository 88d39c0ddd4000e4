"""The asyncio twin of ``Neli``: the same names, awaited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

from rebalanser.core.neli.roles import Role, Roles
from rebalanser.core.neli.settings import Mode, NeliSettings
from rebalanser.errors import InvalidState
from rebalanser.neli.contract import PARTITIONS
from rebalanser.neli.facade import CONNECT_TIMEOUT_S, FactHook, Neli
from rebalanser.runtime.loop_bridge import LoopBridge
from rebalanser.runtime.running import in_own_thread, run_in_loop_until_stopped

AsyncRoleHandler: TypeAlias = Callable[[Role, int], Awaitable[None] | None]
HandlerT = TypeVar("HandlerT", bound=AsyncRoleHandler)


class AsyncNeli:
    """A ``Neli`` whose handlers run in the event loop and whose calls are
    awaited. Asking (``is_leader``, ``token``, ``roles_held``) needs no await: it does no I/O.

    Handlers may be coroutine functions or plain ones. Leadership does not depend on the loop: one that is
    blocked loses none, and one that is blocked while a role is asked back holds up its successor.
    """

    def __init__(
        self,
        topic: str,
        group: str,
        roles: Roles,
        *,
        kafka: str | None = None,
        mode: Mode | str | None = None,
        settings: NeliSettings | None = None,
        partitions: int = PARTITIONS,
        instance: str | None = None,
        history_dir: Path | str | None = None,
        history_topic: str | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self._neli = Neli(
            topic,
            group,
            roles,
            kafka=kafka,
            mode=mode,
            settings=settings,
            partitions=partitions,
            instance=instance,
            history_dir=history_dir,
            history_topic=history_topic,
            connect_timeout_s=connect_timeout_s,
        )
        self._bridge = LoopBridge(self._neli)

    def __repr__(self) -> str:
        return f"Async{self._neli!r}"

    @property
    def topic(self) -> str:
        """The topic of the group's heartbeats."""
        return self._neli.topic

    @property
    def group(self) -> str:
        """The consumer group's id."""
        return self._neli.group

    @property
    def settings(self) -> NeliSettings:
        """The mode and the times."""
        return self._neli.settings

    def on_induced(self, handler: HandlerT) -> HandlerT:
        """Register what to do when this process begins to lead a role; see ``Neli.on_induced``."""
        self._neli.on_induced(self._bridge.in_loop(handler))
        return handler

    def on_lapsed(self, handler: HandlerT) -> HandlerT:
        """Register what to do when a role is handed over, in order; see ``Neli.on_lapsed``."""
        self._neli.on_lapsed(self._bridge.in_loop(handler))
        return handler

    def on_fenced(self, handler: HandlerT) -> HandlerT:
        """Register what to do when leadership ended out of order; see ``Neli.on_fenced``."""
        self._neli.on_fenced(self._bridge.in_loop(handler))
        return handler

    def on_fact(self, hook: FactHook) -> FactHook:
        """Register a hook that is told everything that happens; see ``Neli.on_fact``."""
        return self._neli.on_fact(hook)

    async def start(self) -> None:
        """Begin to take part; raises what ``Neli.start`` does.

        ``asyncio.run`` stops a candidate that was not stopped, and waits for that as ``stop`` does.
        """
        await self._bridge.start()

    async def stop(self, timeout_s: float | None = None) -> None:
        """Hand over everything and leave the group; raises what ``Neli.stop`` does."""
        if self._bridge.is_called_by_handler:
            raise InvalidState("stop() was called from a handler; call request_stop() there")
        await self._bridge.stop(timeout_s)

    def request_stop(self) -> None:
        """Begin to hand over and leave; returns at once."""
        self._neli.request_stop()

    async def run(self) -> None:
        """Take part until SIGINT, SIGTERM or SIGHUP, or until ``request_stop``; then hand over and leave.

        A second SIGINT has its usual effect. Raises what ``Neli.run`` does.
        """
        await run_in_loop_until_stopped(self, self._neli.wait_stopped)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    def is_leader(self, role: Role) -> bool:
        """Whether this process leads ``role`` now, worked out at this moment (NE-4)."""
        return self._neli.is_leader(role)

    def token(self, role: Role) -> int | None:
        """The fencing token of a role that is led now; else None (NE-15)."""
        return self._neli.token(role)

    def roles_held(self) -> dict[Role, int]:
        """The roles led now, each with its fencing token."""
        return self._neli.roles_held()

    def why_not(self, role: Role) -> str | None:
        """Why this process does not lead ``role`` now, in a sentence; None if it does."""
        return self._neli.why_not(role)

    async def wait_leader(self, role: Role, timeout_s: float = 30.0) -> bool:
        """Wait until this process leads ``role``, at most ``timeout_s`` seconds; whether it does."""
        return await in_own_thread(self._neli.wait_leader, role, timeout_s)

    def set_roles(self, roles: Roles) -> None:
        """Name other roles, at any time; see ``Neli.set_roles``."""
        self._neli.set_roles(roles)
