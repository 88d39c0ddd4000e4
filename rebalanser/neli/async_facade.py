"""The asyncio twin of ``Neli``: the same names, awaited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

from rebalanser.core.neli.roles import Role
from rebalanser.core.neli.settings import NeliSettings
from rebalanser.neli.facade import Neli, check_takes_role
from rebalanser.runtime.loop_bridge import AsyncTwin, awaited, forwarded, with_parameters_of

AsyncRoleHandler: TypeAlias = Callable[[Role, int], Awaitable[None] | None]
HandlerT = TypeVar("HandlerT", bound=AsyncRoleHandler)


class AsyncNeli(AsyncTwin[Neli]):
    """A ``Neli`` whose handlers run in the event loop and whose calls are awaited.

    It takes what ``Neli`` takes. ``is_leader``, ``token`` and ``roles_held`` need no await: they do no I/O.

    Handlers may be coroutine functions or plain ones. Leadership does not depend on the loop: a blocked loop
    loses no role, but delays the successor of a role that is asked back.
    """

    @with_parameters_of(Neli.__init__)
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(Neli(*arguments, **named))

    @property
    def topic(self) -> str:
        """The topic of the group's heartbeats."""
        return self._sync.topic

    @property
    def group(self) -> str:
        """The consumer group's id."""
        return self._sync.group

    @property
    def settings(self) -> NeliSettings:
        """The mode and the times."""
        return self._sync.settings

    def on_induced(self, handler: HandlerT) -> HandlerT:
        """Register a handler for the start of a leadership; see ``Neli.on_induced``."""
        check_takes_role(handler, "on_induced")
        self._sync.on_induced(self._in_loop(handler))
        return handler

    def on_lapsed(self, handler: HandlerT) -> HandlerT:
        """Register a handler for an orderly handover; see ``Neli.on_lapsed``."""
        check_takes_role(handler, "on_lapsed")
        self._sync.on_lapsed(self._in_loop(handler))
        return handler

    def on_fenced(self, handler: HandlerT) -> HandlerT:
        """Register a handler for a leadership that ended out of order; see ``Neli.on_fenced``."""
        check_takes_role(handler, "on_fenced")
        self._sync.on_fenced(self._in_loop(handler))
        return handler

    on_fact = forwarded(Neli.on_fact)
    is_leader = forwarded(Neli.is_leader)
    token = forwarded(Neli.token)
    roles_held = forwarded(Neli.roles_held)
    why_not = forwarded(Neli.why_not)
    set_roles = forwarded(Neli.set_roles)
    wait_leader = awaited(Neli.wait_leader)
    wait_stopped = awaited(Neli.wait_stopped)
