"""What a handler gets: one owned resource, with its fencing token and its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol, TypeAlias

from rebalanser.errors import InvalidArgument, InvalidLoad
from rebalanser.protocol import FactKind, ResourceSpec
from rebalanser.runtime.clock import SystemClock

_making = threading.Lock()
Detail: TypeAlias = Mapping[str, str | float | bool | None]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class StopRequest(threading.Event):
    """An event that threads wait for and coroutines can wait for too."""

    def __init__(self) -> None:
        super().__init__()
        self._callbacks_lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []

    def set(self) -> None:
        """Set the event and wake up all that wait for it."""
        super().set()
        with self._callbacks_lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def call_when_set(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once when the event is set, or now if it is."""
        with self._callbacks_lock:
            if not self.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def forget(self, callback: Callable[[], object]) -> None:
        """Do not call ``callback`` any more."""
        with self._callbacks_lock:
            self._callbacks = [waiting for waiting in self._callbacks if waiting is not callback]


class Tenure:
    """Until when access may last: shared by all that one group owns, moved by every proof of life."""

    def __init__(self, clock: SystemClock) -> None:
        self.clock = clock
        self.deadline: float | None = None
        self.ended = False

    def lasts(self) -> bool:
        """Whether the deadline (seconds of the clock) has not come yet."""
        deadline = self.deadline
        return not self.ended and deadline is not None and self.clock.now() < deadline


class Keeper(Protocol):
    """What an owned resource tells to the node that owns it."""

    def take_load(self, owned: Owned, load: float) -> None:
        """Keep the latest load of a resource."""

    def spec_of(self, owned: Owned) -> ResourceSpec | None:
        """Read what an operator said of a resource; None if it is there no more."""

    def release(self, owned: Owned, for_s: float | None) -> bool:
        """Give a resource up for ``for_s`` seconds, or until it is accepted; False if it is not owned."""

    def tell_of(self, owned: Owned, kind: FactKind, raised: BaseException | None, detail: Detail) -> None:
        """Report what happened to the worker of a resource, and what it raised."""


class Owned:
    """One resource that this node owns, from OnStart to OnStop.

    Give ``token`` along with every write to the outside, and have the receiver refuse a smaller one: that
    makes a second owner impossible whatever happens to this process (RB-12, RB-27).
    """

    __slots__ = (
        "_asked",
        "_keeper",
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
        tenure: Tenure,
        keeper: Keeper | None = None,
    ) -> None:
        self.resource = resource
        """The resource's name."""
        self.token = token
        """The fencing token: it grows from owner to owner."""
        self._asked = False
        self._released_until = -math.inf
        self._stop_request: StopRequest | None = None
        self._tenure = tenure
        self._keeper = keeper
        self._spec: ResourceSpec | None = None

    @property
    def stop_requested(self) -> StopRequest:
        """Set as soon as the resource has to be given up, before OnStop is called."""
        # Made when it is first looked at: 100,000 events take longer to make and to set than OnStop can wait.
        if self._stop_request is None:
            with _making:
                if self._stop_request is None:
                    self._stop_request = StopRequest()
            if self._asked:
                self._stop_request.set()
        return self._stop_request

    def ask_to_stop(self) -> None:
        """Set :attr:`stop_requested`, for the group; an event that is made later is set at once."""
        self._asked = True
        if self._stop_request is not None:
            self._stop_request.set()

    @property
    def weight(self) -> float:
        """How much of a node the resource takes, as an operator said; groups do not place by it yet.

        It is read as :attr:`attributes` are.
        """
        return self._said.weight

    @property
    def attributes(self) -> Mapping[str, str]:
        """What an operator said of the resource with ``Admin.add(attributes=…)``.

        It is read from the registry when it or :attr:`weight` is first looked at, and kept: what is said
        later is seen by the next owner. A coroutine looks in a thread: ``asyncio.to_thread(lambda: …)``.

        Raises:
            RetryLater: the registry could not be read now.
        """
        return MappingProxyType(dict(self._said.attributes))

    @property
    def _said(self) -> ResourceSpec:
        if self._spec is None:
            known = None if self._keeper is None else self._keeper.spec_of(self)
            self._spec = ResourceSpec(self.resource) if known is None else known
        return self._spec

    @property
    def deadline(self) -> float:
        """When access must have ended unless life is proven again, in seconds of ``time.monotonic()``.

        It moves on with every proof of life. Once the resource has to be given up it lies in the past.
        """
        deadline = self._tenure.deadline
        if deadline is None or self._tenure.ended:
            return 0.0
        return self._tenure.clock.to_monotonic(deadline)

    def still_mine(self) -> bool:
        """Whether the resource may still be accessed: no stop was requested and the deadline has not come.

        There is always a moment between this answer and what is done with it; only a receiver that checks
        the token closes that gap.
        """
        asked = self._asked or (self._stop_request is not None and self._stop_request.is_set())
        return not asked and self._tenure.lasts()

    def report_load(self, load: float) -> None:
        """Tell how much work the resource is, in any unit that is the same for all of the group (AU-7).

        The history keeps it, for the audit to compute weights from. May be called from any thread or
        coroutine, as often as one likes: it never waits, and at most once a second the latest load of each
        resource is written down; one that is not the latest any more is forgotten, and so is one of the
        last second before the group stops. Once the resource was given up it does nothing.

        Raises:
            InvalidLoad: the load is negative, infinite or no number.
        """
        if not 0 <= load < math.inf:
            raise InvalidLoad(f"the load of {self.resource!r} must be a number from 0 on, not {load!r}")
        if self._keeper is not None and not self._tenure.ended:
            self._keeper.take_load(self, float(load))

    def release(self, for_s: float | None = None) -> None:
        """Give this resource up for ``for_s`` seconds: another node is to own it meanwhile.

        Without a time it does not come back until :meth:`Group.accept` asks for it. It leaves as any resource
        does that goes to another node: work goes on until :attr:`stop_requested` is set, OnStop is called,
        and only then another node starts. What every node has released is on none, and ``status`` says so.

        May be called from any thread or coroutine, and never waits. Of two calls the one that lasts longer
        counts. Once the resource has been given up it does nothing. A node remembers what it released when
        it loses its lease and joins again, until the group is stopped.

        Raises:
            InvalidArgument: the time is no positive number of seconds.
            InvalidState: this node has released as many resources as it may at once.
        """
        if for_s is not None and not (_is_number(for_s) and 0.0 < for_s < math.inf):
            raise InvalidArgument(f"for_s: a positive number of seconds, or None (got {for_s!r})")
        if self._keeper is None or self._tenure.ended or not self._keeper.release(self, for_s):
            return
        until = math.inf if for_s is None else self._tenure.clock.now() + for_s
        self._released_until = max(self._released_until, until)

    def accepted(self) -> None:
        """Forget a release: the group was asked to take the resource again."""
        self._released_until = -math.inf

    @property
    def released_s(self) -> float:
        """Seconds for which :meth:`release` still gives the resource up; 0 if it was not called."""
        return max(0.0, self._released_until - self._tenure.clock.now())

    def tell(self, kind: FactKind, raised: BaseException | None, **detail: str | float | bool | None) -> None:
        """Report what happened to the worker of this resource, and what it raised, for the group."""
        if self._keeper is not None:
            self._keeper.tell_of(self, kind, raised, detail)

    async def until_stop_requested(self) -> None:
        """Wait, in a coroutine, until the resource has to be given up."""
        loop = asyncio.get_running_loop()
        asked = loop.create_future()

        def wake() -> None:
            if not asked.done():
                asked.set_result(None)

        def wake_in_loop() -> None:
            # The loop of a coroutine that was abandoned may be closed by now.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(wake)

        self.stop_requested.call_when_set(wake_in_loop)
        try:
            await asked
        finally:
            self.stop_requested.forget(wake_in_loop)

    def __repr__(self) -> str:
        state = "mine" if self.still_mine() else "not mine"
        return f"Owned({self.resource!r}, token={self.token}, {state}, deadline in {self._left_s():.1f} s)"

    def _left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())
