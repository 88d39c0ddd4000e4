"""The handler runner: calls the host application's handlers in a thread of its own."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import Protocol

from rebalanser.core.clock import Clock
from rebalanser.core.group import (
    CallStart,
    CallStop,
    FactKind,
    Handler,
    HandlerReturned,
    Release,
    ResourceSpec,
)
from rebalanser.runtime.logs import log_aside
from rebalanser.runtime.owned import AccessDeadline, Detail, Owned


def name_of(handler: object) -> str:
    """Return the name of a function, or of the type of another object, without an address."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    name: str = getattr(handler, "__qualname__", type(handler).__qualname__)
    return name


class Handlers(Protocol):
    """The host application's handlers for resources that arrive and leave."""

    def start(self, owned: list[Owned]) -> None:
        """Begin to access these resources."""

    def stop(self, owned: list[Owned]) -> None:
        """End all access to these resources before returning."""


class ReportFact(Protocol):
    """Reports what happened to resources; the time it takes does not depend on their number."""

    def __call__(self, kind: FactKind, tokens: Mapping[str, int], *, detail: Detail = ...) -> None:
        """Report one fact about all these resources; ``tokens`` are their fencing tokens."""


MAX_LOADS_AT_ONCE = 1000
"""Maximum number of loads in one turn, so that they never delay more important reports."""

MANY = 1000
"""Number of resources above which stop requests are set in another thread."""

MAX_WAITING = 3
"""Queue size: a handler that is not entered yet, OnStop of an engine that gives up, and the end marker."""

_EVERYTHING = CallStop(frozenset())


class HandlerRunner:
    """Calls one handler at a time, in its own thread, and keeps the owned resources.

    A resource is owned from just before OnStart is entered until OnStop has returned. If OnStop raises, it
    stays owned until the session ends (RB-24).
    """

    def __init__(
        self,
        name: str,
        handlers: Handlers,
        clock: Clock,
        tenure: AccessDeadline,
        returned: Callable[[HandlerReturned], None],
        report: ReportFact,
        spec_of: Callable[[str], ResourceSpec | None],
        release: Callable[[Release], None],
    ) -> None:
        self._spec_of = spec_of
        self._release = release
        self._handlers = handlers
        self._clock = clock
        self._tenure = tenure
        self._returned = returned
        self._report = report
        self._lock = threading.Lock()
        self._owned: dict[str, Owned] = {}
        self._arriving: Mapping[str, int] = {}
        self._asked: set[str] = set()
        self._loads: dict[str, tuple[Owned, float]] = {}
        self._stop_error: BaseException | None = None
        self._latest_error: BaseException | None = None
        self._waiting: queue.Queue[CallStart | CallStop | None] = queue.Queue(maxsize=MAX_WAITING)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def call(self, effect: CallStart | CallStop) -> None:
        """Call a handler as soon as the previous one has returned."""
        if isinstance(effect, CallStart):
            with self._lock:
                self._arriving = effect.owned
                self._asked.clear()
        self._waiting.put_nowait(effect)

    def close(self, timeout_s: float) -> None:
        """Stop after the running handler; wait at most ``timeout_s`` seconds for that."""
        self._waiting.put_nowait(None)
        if threading.current_thread() is not self.thread:
            self.thread.join(timeout_s)

    @property
    def stop_error(self) -> BaseException | None:
        """The error of OnStop in this session; None once OnStop has returned since."""
        return self._stop_error

    @property
    def latest_error(self) -> BaseException | None:
        """The last error of a handler or worker; None once OnStart has returned since."""
        return self._latest_error

    def forget_error(self) -> None:
        """Forget the error of OnStop: in a new session its barriers are gone."""
        self._stop_error = None

    def owned(self) -> Mapping[str, Owned]:
        """Return a copy of the owned resources, by name."""
        with self._lock:
            return dict(self._owned)

    def take_load(self, owned: Owned, load: float) -> None:
        """Keep the latest load of a resource, while it is owned."""
        with self._lock:
            if self._owned.get(owned.resource) is owned:
                self._loads[owned.resource] = (owned, load)

    def spec_of(self, owned: Owned) -> ResourceSpec | None:
        """Read a resource's weight and attributes from the registry; None if it was removed."""
        return self._spec_of(owned.resource)

    def release(self, owned: Owned, for_s: float | None) -> bool:
        """Give a resource up. Return False if it is not owned any more."""
        with self._lock:
            if self._owned.get(owned.resource) is not owned:
                return False
        self._release(Release(owned.resource, owned.token, for_s))
        return True

    def accept(self, resource: str) -> None:
        """Keep a released resource that has not left yet."""
        with self._lock:
            owned = self._owned.get(resource)
        if owned is not None:
            owned.accepted()

    def report_worker(
        self, owned: Owned, kind: FactKind, raised: BaseException | None, detail: Detail
    ) -> None:
        """Report what happened to the worker of a resource, and what it raised."""
        if raised is not None:
            self._latest_error = raised
            detail = {**detail, "error": _text(raised), "raised_at": _place(raised)}
        self._report(kind, {owned.resource: owned.token}, detail=detail)

    def taken_loads(self) -> list[tuple[Owned, float]]:
        """Take the latest loads that were not taken yet, in the order of their first report."""
        if not self._loads:
            return []
        with self._lock:
            resources = list(islice(self._loads, MAX_LOADS_AT_ONCE))
            return [self._loads.pop(resource) for resource in resources]

    def ask_to_stop(self, resources: Collection[str]) -> None:
        """Request the workers of these resources to stop; do not enter an OnStart that has any of them."""
        with self._lock:
            self._asked.update(self._arriving.keys() & resources)
            owned = dict(self._owned)
        self._ask(resources, owned)

    def _ask(self, resources: Collection[str], owned: Mapping[str, Owned]) -> None:
        """Set the stop events of these resources; of many in another thread, as the loop must not wait.

        ``owned`` are the resources owned at the request, as one may be owned again before its turn.
        """

        def ask() -> None:
            for resource in resources:
                if resource in owned:
                    owned[resource].ask_to_stop()

        if len(resources) > MANY:
            with contextlib.suppress(RuntimeError):  # the system has no room for another thread
                threading.Thread(target=ask, name=f"{self.thread.name}-ask", daemon=True).start()
                return
        ask()

    def give_up(self) -> None:
        """Stop all owned resources once the running handler has returned; enter no other OnStart."""
        with self._lock:
            resources = {*self._arriving, *self._owned}
        self.ask_to_stop(resources)
        self._waiting.put_nowait(_EVERYTHING)

    def abandon(self) -> None:
        """Forget resources that could not be stopped: their session is over."""
        if not self._owned:
            return
        with self._lock:
            abandoned, self._owned = self._owned, {}
        self._ask(abandoned, abandoned)

    def _run(self) -> None:
        while (effect := self._waiting.get()) is not None:
            if isinstance(effect, CallStart):
                self._start(effect)
            elif effect is not _EVERYTHING:
                self._stop(effect)
            elif owned := self.owned():
                self._stop(CallStop(frozenset(owned)))

    def _start(self, effect: CallStart) -> None:
        arriving = [
            Owned(resource, token, self._tenure, self) for resource, token in sorted(effect.owned.items())
        ]
        entering = {owned.resource: owned for owned in arriving}
        with self._lock:
            refused = bool(self._asked)
            self._arriving = {}
            self._owned.update(entering)
        # Between this look at the clock and the handler, nothing may take longer for more resources.
        if refused or self._clock.now() >= effect.not_after or self._tenure.ended:
            self._disown(arriving)
            self._report(FactKind.START_REFUSED, effect.owned)
            self._returned(HandlerReturned(Handler.START, refused=True))
            return
        self._report(FactKind.START_ENTERED, effect.owned)
        error = self._call(Handler.START, self._handlers.start, arriving)
        if error is None:
            self._latest_error = None
            self._report(FactKind.START_RETURNED, effect.owned)
        self._returned(HandlerReturned(Handler.START, _text(error)))

    def _stop(self, effect: CallStop) -> None:
        with self._lock:
            leaving = [self._owned[r] for r in sorted(effect.resources) if r in self._owned]
        for owned in leaving:
            owned.ask_to_stop()
        tokens = {owned.resource: owned.token for owned in leaving}
        self._report(FactKind.STOP_ENTERED, tokens)
        error = self._call(Handler.STOP, self._handlers.stop, leaving)
        self._stop_error = error
        if error is None:
            self._report(FactKind.STOP_RETURNED, tokens)
            self._disown(leaving)
        self._returned(HandlerReturned(Handler.STOP, _text(error)))

    def _disown(self, gone: Iterable[Owned]) -> None:
        with self._lock:
            for owned in gone:
                self._owned.pop(owned.resource, None)

    def _call(
        self, name: Handler, handler: Callable[[list[Owned]], None], owned: list[Owned]
    ) -> BaseException | None:
        try:
            handler(list(owned))
        except BaseException as error:
            self._latest_error = error
            log_aside("a handler raised", error, action="handler_raised", handler=name.value)
            return error
        return None


def _place(error: BaseException) -> str | None:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def _text(error: BaseException | None) -> str | None:
    if error is None:
        return None
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
