"""An owned resource with its fencing token and deadline, as handlers get it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol, TypeAlias

from rebalanser.core.group import FactKind, ResourceSpec
from rebalanser.errors import InvalidArgument, InvalidLoad
from rebalanser.runtime.clock import SystemClock

_making = threading.Lock()
Detail: TypeAlias = Mapping[str, str | float | bool | None]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class StopRequest(threading.Event):
    """An event that both threads and coroutines can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._callbacks_lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []

    def set(self) -> None:
        """Set the event and wake up all waiters."""
        super().set()
        with self._callbacks_lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def call_when_set(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once when the event is set, or now if it is set already."""
        with self._callbacks_lock:
            if not self.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def forget(self, callback: Callable[[], object]) -> None:
        """Do not call ``callback`` any more."""
        with self._callbacks_lock:
            self._callbacks = [waiting for waiting in self._callbacks if waiting is not callback]

    async def until_set(self) -> None:
        """Wait, in a coroutine, until the event is set."""
        loop = asyncio.get_running_loop()
        asked = loop.create_future()

        def wake() -> None:
            if not asked.done():
                asked.set_result(None)

        def wake_in_loop() -> None:
            # The loop of an abandoned coroutine may be closed by now.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(wake)

        self.call_when_set(wake_in_loop)
        try:
            await asked
        finally:
            self.forget(wake_in_loop)


class AccessDeadline:
    """The deadline of access, shared by all resources of a node; every proof of life extends it."""

    def __init__(self, clock: SystemClock) -> None:
        self.clock = clock
        self.deadline: float | None = None
        self.ended = False

    def lasts(self) -> bool:
        """Return True until the deadline (seconds of the clock)."""
        deadline = self.deadline
        return not self.ended and deadline is not None and self.clock.now() < deadline


class OwnedCallbacks(Protocol):
    """The node's side of an owned resource."""

    def take_load(self, owned: Owned, load: float) -> None:
        """Keep the latest load of a resource."""

    def spec_of(self, owned: Owned) -> ResourceSpec | None:
        """Read a resource's weight and attributes from the registry; None if it was removed."""

    def release(self, owned: Owned, for_s: float | None) -> bool:
        """Release a resource for ``for_s`` seconds, or until accepted; False if it is not owned."""

    def report_worker(
        self, owned: Owned, kind: FactKind, raised: BaseException | None, detail: Detail
    ) -> None:
        """Report what happened to the worker of a resource, and what it raised."""


class Owned:
    """One resource that this node owns, from OnStart to OnStop.

    Send ``token`` with every write to the outside, and let the receiver refuse smaller tokens: then a former
    owner can't write, whatever happens to its process (RB-12, RB-27).
    """

    __slots__ = (
        "_asked",
        "_callbacks",
        "_released_until",
        "_spec",
        "_stop_request",
        "_tenure",
        "resource",
        "token",
    )

    def __init__(
        self,
        resource: str,
        token: int,
        tenure: AccessDeadline,
        callbacks: OwnedCallbacks | None = None,
    ) -> None:
        self.resource = resource
        """The resource's name."""
        self.token = token
        """The fencing token: it grows from owner to owner."""
        self._asked = False
        self._released_until = -math.inf
        self._stop_request: StopRequest | None = None
        self._tenure = tenure
        self._callbacks = callbacks
        self._spec: ResourceSpec | None = None

    @property
    def stop_requested(self) -> StopRequest:
        """Event that is set as soon as the resource has to be given up, before OnStop is called."""
        # Created on first use: creating and setting 100,000 events takes longer than OnStop can wait.
        if self._stop_request is None:
            with _making:
                if self._stop_request is None:
                    self._stop_request = StopRequest()
            if self._asked:
                self._stop_request.set()
        return self._stop_request

    def ask_to_stop(self) -> None:
        """Set ``stop_requested``, for the group; an event that is created later is set at once."""
        self._asked = True
        if self._stop_request is not None:
            self._stop_request.set()

    @property
    def weight(self) -> float:
        """The weight given to ``Admin.add``, 1 by default; it is read like ``attributes``."""
        return self._said.weight

    @property
    def attributes(self) -> Mapping[str, str]:
        """The attributes given to ``Admin.add(attributes=…)``.

        The first use of this or ``weight`` reads the registry; later uses return the same values, and
        only the next owner sees a later change. In a coroutine use ``asyncio.to_thread(lambda: …)``.

        Raises:
            RetryLater: the registry could not be read now.
        """
        return MappingProxyType(dict(self._said.attributes))

    @property
    def _said(self) -> ResourceSpec:
        if self._spec is None:
            known = None if self._callbacks is None else self._callbacks.spec_of(self)
            self._spec = ResourceSpec(self.resource) if known is None else known
        return self._spec

    @property
    def deadline(self) -> float:
        """Time by which access must have ended, in seconds of ``time.monotonic()``.

        Every proof of life extends it. It is in the past once the resource has to be given up.
        """
        deadline = self._tenure.deadline
        if deadline is None or self._tenure.ended:
            return 0.0
        return self._tenure.clock.to_monotonic(deadline)

    def still_mine(self) -> bool:
        """Return True while the resource may be accessed: no stop was requested, the deadline is ahead.

        There is always a gap between this answer and the access that follows it; only a receiver that checks
        the token closes it.
        """
        asked = self._asked or (self._stop_request is not None and self._stop_request.is_set())
        return not asked and self._tenure.lasts()

    def report_load(self, load: float) -> None:
        """Report the load of the resource, in any unit that the whole group shares (AU-7).

        The history records it, and the audit computes weights from it. May be called from any thread or
        coroutine, at any rate, and never blocks. The latest load of each resource is recorded at most once a
        second; the last one before the group stops may be lost. Does nothing once the resource was given up.

        Raises:
            InvalidLoad: the load is negative, infinite or not a number.
        """
        if not 0 <= load < math.inf:
            raise InvalidLoad(f"the load of {self.resource!r} must be a number from 0 on, not {load!r}")
        if self._callbacks is not None and not self._tenure.ended:
            self._callbacks.take_load(self, float(load))

    def release(self, for_s: float | None = None) -> None:
        """Release this resource: for ``for_s`` seconds leaders give it to other nodes only.

        Without a time it stays away until ``Group.accept``. It leaves as in any rebalance: work continues
        until ``stop_requested`` is set, OnStop is called, and only then the next owner starts. If every node
        has released the resource, it has no owner, and ``status`` says so.

        May be called from any thread or coroutine, and never blocks. Of two releases the longer one counts.
        Does nothing once the resource was given up. A release survives the loss of the lease, and ends when
        the group is stopped.

        Raises:
            InvalidArgument: the time is not a positive number of seconds.
            InvalidState: this node has released the maximum of 1,000 resources, or 400 kB of names.
        """
        if for_s is not None and not (_is_number(for_s) and 0.0 < for_s < math.inf):
            raise InvalidArgument(f"for_s must be a positive number of seconds, or None (got {for_s!r})")
        if self._callbacks is None or self._tenure.ended or not self._callbacks.release(self, for_s):
            return
        until = math.inf if for_s is None else self._tenure.clock.now() + for_s
        self._released_until = max(self._released_until, until)

    def accepted(self) -> None:
        """Forget a release, after ``Group.accept``."""
        self._released_until = -math.inf

    @property
    def released_s(self) -> float:
        """Seconds that a ``release`` still lasts; 0 without one."""
        return max(0.0, self._released_until - self._tenure.clock.now())

    def report_worker(
        self, kind: FactKind, raised: BaseException | None, **detail: str | float | bool | None
    ) -> None:
        """Report what happened to the worker of this resource, and what it raised, for the group."""
        if self._callbacks is not None:
            self._callbacks.report_worker(self, kind, raised, detail)

    async def until_stop_requested(self) -> None:
        """Wait, in a coroutine, until ``stop_requested`` is set."""
        await self.stop_requested.until_set()

    def __repr__(self) -> str:
        state = "mine" if self.still_mine() else "not mine"
        return f"Owned({self.resource!r}, token={self.token}, {state}, deadline in {self._left_s():.1f} s)"

    def _left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())
