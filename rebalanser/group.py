"""The group: what a host application holds. Two handlers, or one worker function; and ``run()``."""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from rebalanser import errors, forks
from rebalanser.core.allocation import solve
from rebalanser.core.group import Fact, Member, Membership, Node, OnOverrun, ResourceSpec, Role
from rebalanser.errors import (
    FixConfiguration,
    Forked,
    HandlerFailed,
    InvalidArgument,
    InvalidHandlers,
    InvalidSettings,
    InvalidState,
    NotSettled,
    RegistryUnavailable,
    RetryLater,
)
from rebalanser.observer import Observer, TroubleNotes
from rebalanser.registry import Coordinator, GroupStore, RegistryCoordinator, open_backend, parse_url
from rebalanser.registry.keys import check_name
from rebalanser.registry.urls import url_or_default
from rebalanser.runtime.clock import SystemClock
from rebalanser.runtime.dead_man import DeadMansSwitch
from rebalanser.runtime.handlers import Handlers, name_of
from rebalanser.runtime.logs import get_logger
from rebalanser.runtime.narration import Narrator
from rebalanser.runtime.node_runner import NodeRunner
from rebalanser.runtime.owned import AccessDeadline, Owned
from rebalanser.runtime.participant import run_until_stopped
from rebalanser.runtime.workers import WorkerThreads
from rebalanser.settings import Settings, check_timeout

OwnedHandler = Callable[[list[Owned]], None]
Worker = Callable[[Owned], None]
HandlerT = TypeVar("HandlerT", bound=OwnedHandler)
WorkerT = TypeVar("WorkerT", bound=Worker)

_log = get_logger()


class _TwoHandlers:
    """The handlers of an application that wrote OnStart and OnStop."""

    def __init__(self, on_start: OwnedHandler, on_stop: OwnedHandler) -> None:
        self.start = on_start
        self.stop = on_stop


def _refuse_coroutine(handler: object) -> None:
    if not callable(handler):
        raise InvalidHandlers(f"{handler!r} is no function")
    if inspect.iscoroutinefunction(handler):
        raise InvalidHandlers(f"{name_of(handler)} is a coroutine function: use AsyncGroup")


def check_takes_one(handler: Callable[..., object], what: str, argument: str) -> None:
    """Check that a handler can be called with one argument, where its signature tells.

    Raises:
        InvalidHandlers: it can't.
    """
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise InvalidHandlers(
            f"{what} is called with {argument}, and {name_of(handler)} can't be: {error}"
        ) from None


def default_label() -> str:
    """A node's name where the user gives none: host, process, and a random part.

    Host and process id alone come again where a container is replaced, and with them a drain that was meant
    for the process before (RB-30).
    """
    return f"{socket.gethostname()}:{os.getpid()}-{_random_part(os.getpid())}"


@functools.cache
def _random_part(_pid: int) -> str:
    return uuid.uuid4().hex[:6]


def open_coordinator(
    name: str, url: str, settings: Settings, clock: SystemClock, *, create: bool = True
) -> Coordinator:
    """Open the registry at ``url`` and check that the settings hold there.

    Without ``create`` a store that keeps a log for each group makes none.

    Raises:
        UnknownGroup: without ``create`` only: such a store has no log of the group.
        FixConfiguration: the URL, the settings or the registry have to be changed by a person.
        RegistryUnavailable: the registry did not answer within ``connect_timeout_s``.
    """
    check_name(name, "group")
    parsed = parse_url(url)
    opened = open_backend(parsed, settings.connect_timeout_s)
    shortest_s = opened.capabilities.min_lease_ttl_s
    if settings.lease_ttl_s < shortest_s:
        opened.close()
        raise InvalidSettings(
            f"lease_ttl_s {settings.lease_ttl_s:g} is below the {shortest_s:g} s that {parsed} allows"
        )
    if isinstance(opened, GroupStore):
        with closing(opened):
            return opened.open_group(
                name, clock.now, settings.registry_timeout_s, settings.connect_timeout_s, create=create
            )
    return RegistryCoordinator(opened, parsed.root, name, clock.now, settings.registry_timeout_s)


@dataclass(slots=True)
class _Run:
    """Parts of one run, from start to stop; the next run may begin before all of them are closed."""

    engine: NodeRunner
    observer: Observer
    tenure: AccessDeadline
    closing: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False

    def close(self) -> None:
        """Write down what is still to be written; whoever comes second waits for that."""
        with self.closing:
            if not self.closed:
                self.closed = True
                self.observer.close()


class Group:
    """One node's membership in a group whose resources are shared out, each to exactly one owner.

    ``name`` is the group's name and ``url`` its registry's, by default ``REBALANSER_REGISTRY``. ``node`` is a
    label for people, by default host, process and a random part; the node's identity is made anew for each
    incarnation (RB-4). Register either ``on_start`` and ``on_stop`` or one ``worker``, then
    ``run``, or ``start`` and ``stop``, or ``with group:``. Those of ``resources`` that the group
    has not yet are added at each start; none is removed.

    Raises:
        InvalidName: the name of the group, the node or a resource cannot be stored.
        InvalidArgument: ``resources`` is no list of names.
        InvalidUrl: the URL is none, or there is none.
        InvalidSettings: ``settings`` is of another type, or has ``rejoin_grace_s`` and no ``node`` is given.
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
        self.name = check_name(name, "group")
        self.node = check_name(node, "node") if node is not None else default_label()
        self.settings = Settings.of(settings)
        if node is None and self.settings.rejoin_grace_s:
            raise InvalidSettings(
                "rejoin_grace_s keeps a share for a name that comes back: give the node one, as in "
                'Group(..., node="worker-1")'
            )
        self._url_text = url_or_default(url)
        self._url = parse_url(self._url_text)
        self._resources = [check_name(resource, "resource") for resource in _listed(resources)]
        self._on_start: OwnedHandler | None = None
        self._on_stop: OwnedHandler | None = None
        self._worker: Worker | None = None
        self._run: _Run | None = None
        self._beginning = threading.Lock()
        self._stop_asked = False
        """True if the group was asked to stop since its latest start began."""
        self._connecting: Future[Coordinator] | None = None
        """The connection that a start waits for; a request to stop cancels it."""
        self._fact_hooks: list[Callable[[Fact], None]] = []
        self._workers: WorkerThreads | None = None
        self._narrator: Narrator | None = None
        self._forked = False
        forks.in_child(self._after_fork_in_child)

    def __repr__(self) -> str:
        return f"Group({self.name!r}, {str(self._url)!r}, node={self.node!r})"

    def on_start(self, handler: HandlerT) -> HandlerT:
        """Register what to do with resources that arrive; in eager mode it gets all that is owned.

        It is called with an empty list when the node is to own nothing (RB-18). If it raises, OnStop is
        called, and the node leaves and joins again after a growing delay (RB-24).
        """
        self._refuse_second(self._on_start, "on_start")
        _refuse_coroutine(handler)
        check_takes_one(handler, "on_start", "a list of owned resources")
        self._on_start = handler
        return handler

    def on_stop(self, handler: HandlerT) -> HandlerT:
        """Register what to do with resources that leave. Access has ended when it returns.

        If it raises, access is taken as not ended: the barriers stay until the lease ends (RB-24).
        """
        self._refuse_second(self._on_stop, "on_stop")
        _refuse_coroutine(handler)
        check_takes_one(handler, "on_stop", "a list of owned resources")
        self._on_stop = handler
        return handler

    def worker(self, function: WorkerT) -> WorkerT:
        """Register a function that is called for each owned resource, in a thread of its own.

        It should return soon once ``owned.still_mine()`` says no; OnStop returns when it has. If it raises or
        returns earlier, that is reported, and it is called again after a growing delay (0.5 s to 30 s). One
        that has called ``owned.release()`` may return at once.
        """
        self._refuse_second(self._worker, "worker")
        _refuse_coroutine(function)
        check_takes_one(function, "worker", "one owned resource")
        self._worker = function
        return function

    def on_fact(self, hook: Callable[[Fact], None]) -> Callable[[Fact], None]:
        """Register a hook that is told everything that happens on this node, for metrics.

        It is called in the threads of the group: it must not block, and what it raises is ignored.
        """
        _refuse_coroutine(hook)
        check_takes_one(hook, "on_fact", "a fact")
        self._fact_hooks.append(hook)
        return hook

    def _refuse_second(self, present: object, what: str) -> None:
        self._refuse_fork()
        if present is not None:
            raise InvalidHandlers(f"{what} is registered already")
        if self._run is not None:
            raise InvalidState("handlers must be registered before the group starts")

    def _handlers(self) -> Handlers:
        if self._worker is not None:
            if self._on_start is not None or self._on_stop is not None:
                raise InvalidHandlers("register either a worker, or on_start and on_stop; not both")
            self._workers = WorkerThreads(self._worker)
            return self._workers
        if self._on_start is None or self._on_stop is None:
            missing = " and ".join(
                name
                for name, handler in (("on_start", self._on_start), ("on_stop", self._on_stop))
                if handler is None
            )
            raise InvalidHandlers(
                f"no handler registered for {missing}: register on_start and on_stop, or worker"
            )
        return _TwoHandlers(self._on_start, self._on_stop)

    def start(self) -> None:
        """Join the group, and return once the node is registered. Handlers are called from then on.

        If a stop is requested meanwhile, also by another thread or a signal handler, it returns soon, and the
        node has left or never joined.

        Raises:
            InvalidHandlers: no handler is registered, or handlers that exclude each other are.
            InvalidState: the group runs already.
            FixConfiguration: the settings or the registry have to be changed by a person.
            RegistryUnavailable: the registry did not answer within ``connect_timeout_s``.
        """
        self._refuse_fork()
        with nullcontext() if self._narrator is None else self._narrator.connecting():
            run = self._begun()
            if run is not None:
                self._wait_joined(run)

    def _begun(self) -> _Run | None:
        """A run that has begun to join; None if a stop was requested before there was a connection."""
        if not self._beginning.acquire(blocking=False):
            raise InvalidState(f"group {self.name!r} is being started on node {self.node!r}")
        with ExitStack() as undo:
            undo.callback(self._beginning.release)
            if self._run is not None:
                if not self._run.engine.finished:
                    raise InvalidState(f"group {self.name!r} runs already on node {self.node!r}")
                self._clean_up(self._run)
            self._stop_asked = False
            try:
                run = self._run = self._made()
            except CancelledError:
                return None
            atexit.register(self._warn_unstopped)
            try:
                run.engine.start()
            except BaseException:
                self._clean_up(run)
                raise
            if self._stop_asked:
                run.engine.stop()
        return run

    def _warn_unstopped(self) -> None:
        """Warn, as the program ends, of a node that still takes part."""
        if self._run is None or self._run.engine.finished or self._forked:
            return
        _log.warning(
            "the program ended without stop(): others get its resources once its lease has ended; "
            "run() takes part until a signal",
            action="not_stopped",
            group=self.name,
            node=self.node,
        )

    def narrate(self) -> None:
        """Say on standard error what happens, in a line each, unless the program has configured logging.

        ``run`` does so.
        """
        self._narrator = Narrator(self.name, self.node, str(self._url))

    def _made(self) -> _Run:
        """A run that has not begun; nothing stays open if it can't be made."""
        handlers = self._handlers()
        clock = SystemClock()
        stem = uuid.uuid4().hex
        with ExitStack() as undo:
            switch = DeadMansSwitch() if self.settings.on_overrun is OnOverrun.KILL else None
            if switch is not None:
                undo.callback(switch.close)
            coordinator = self._connected(clock)
            undo.callback(coordinator.close)
            observer = Observer(
                self.name,
                self.node,
                stem,
                self.settings,
                clock,
                self._fact_hooks,
                self._narrator,
                TroubleNotes(self.node, coordinator.note_trouble, self.settings.rejoin_max_s),
            )
            undo.callback(observer.close)
            observer.warn_of(coordinator.capabilities.unsafe_reasons)
            tenure = AccessDeadline(clock)
            engine = NodeRunner(
                name=self.name,
                node=Node(self._member(stem), self.settings.timings, solve, self.settings.node_options),
                coordinator=coordinator,
                handlers=handlers,
                clock=clock,
                tenure=tenure,
                observe=observer.observe,
                switch=switch,
            )
            undo.pop_all()
        return _Run(engine, observer, tenure)

    def _connected(self, clock: SystemClock) -> Coordinator:
        """Return a connection to the group, which has the fixed set of resources.

        It is made in a thread, and closed there if it comes too late.

        Raises:
            CancelledError: a stop was requested first.
        """
        connecting = self._connecting = Future[Coordinator]()

        def connect() -> None:
            with ExitStack() as undo:
                try:
                    coordinator = open_coordinator(self.name, self._url_text, self.settings, clock)
                    undo.callback(coordinator.close)
                    self._add_resources(coordinator, connecting)
                    connecting.set_result(coordinator)
                    undo.pop_all()
                except InvalidStateError:
                    return
                except BaseException as error:
                    with suppress(InvalidStateError):
                        connecting.set_exception(error)

        try:
            threading.Thread(target=connect, name="rebalanser-connecting", daemon=True).start()
            if self._stop_asked:
                connecting.cancel()
            return connecting.result()
        except BaseException:
            if not connecting.cancel() and connecting.exception() is None:
                connecting.result().close()
            raise
        finally:
            self._connecting = None

    def _add_resources(self, coordinator: Coordinator, connecting: Future[Coordinator]) -> None:
        """Add those of the fixed set that are not there; what is said of the others stays."""
        if not self._resources:
            return
        attempts = Retrying(
            retry=retry_if_exception(lambda e: isinstance(e, RetryLater) and not connecting.cancelled()),
            stop=stop_after_delay(self.settings.connect_timeout_s),
            wait=wait_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        )
        specs = [ResourceSpec(resource) for resource in self._resources]
        attempts(coordinator.put_resources, specs, lambda _done: None, frozenset())

    def _member(self, stem: str) -> Member:
        return Member(
            node=stem,
            label=self.node,
            mode=self.settings.mode,
            may_lead=self.settings.may_lead,
            host=socket.gethostname(),
            pid=os.getpid(),
            attributes=self.settings.attributes,
            capacity=self.settings.capacity,
            tags=self.settings.tags,
            zone=self.settings.zone,
            rejoin_grace_s=self.settings.rejoin_grace_s,
        )

    def _wait_joined(self, run: _Run) -> None:
        engine = run.engine
        try:
            engine.wait(
                lambda s: s.membership is Membership.MEMBER or (engine.join_error or ("", False))[1],
                self.settings.connect_timeout_s,
            )
        except BaseException:
            self._end(run, None)
            raise
        error, fatal = engine.join_error or ("no answer", False)
        was_stopped = engine.finished and (engine.join_error is None or (self._stop_asked and not fatal))
        if engine.snapshot.membership is Membership.MEMBER or was_stopped:
            return
        self._end(run, self.settings.connect_timeout_s)
        if fatal:
            raise _refused(f"cannot join group {self.name!r}", error)
        raise RegistryUnavailable(
            f"cannot join group {self.name!r} at {self._url} within "
            f"{self.settings.connect_timeout_s:g} s: {error}"
        )

    def stop(self, timeout_s: float | None = None) -> None:
        """Leave gracefully: OnStop, barriers removed, lease revoked and the node with it (RB-26).

        Waits until that is done, or for ``timeout_s`` seconds at most. Stopping twice does nothing.

        Raises:
            InvalidState: called from a handler, which would wait for itself.
            NotSettled: it was not done in time; it goes on.
            HandlerFailed: OnStop raised; its barriers stay until the lease ends (RB-24).
        """
        self._refuse_fork()
        self._give_up_start()
        if self._run is None and self._beginning.locked():
            if not self._beginning.acquire(timeout=-1 if timeout_s is None else timeout_s):
                raise NotSettled(f"group {self.name!r} has not begun within {timeout_s:g} s, and stops then")
            self._beginning.release()
        run = self._run
        if run is None:
            return
        engine = run.engine
        if self._is_called_by_handler(engine):
            raise InvalidState("stop() was called from a handler; call request_stop() there")
        if not self._end(run, timeout_s):
            lately = _lately(engine.latest_error)
            raise NotSettled(
                f"group {self.name!r} has not stopped within {timeout_s:g} s{lately}"
            ) from engine.latest_error
        if engine.stop_error is not None:
            raise HandlerFailed(
                f"OnStop raised {engine.stop_error!r}: barriers stay until the lease ends"
            ) from engine.stop_error

    def _is_called_by_handler(self, engine: NodeRunner) -> bool:
        thread = threading.current_thread()
        return thread is engine.handler_thread or (
            self._workers is not None and self._workers.includes(thread)
        )

    def request_stop(self) -> None:
        """Begin a graceful stop and return at once; may be called from handlers and signal handlers.

        A group that is being started stops as soon as it can. One that does not run is left as it is.
        """
        self._refuse_fork()
        self._give_up_start()
        run = self._run
        if run is not None:
            run.engine.stop()

    def _give_up_start(self) -> None:
        """Have a start that is under way end as soon as it can."""
        self._stop_asked = True
        connecting = self._connecting
        if connecting is not None:
            connecting.cancel()

    def accept(self, resource: str) -> None:
        """Take a resource again that was released here (``Owned.release``), before its time is over.

        From then on the node may be given it again. It does nothing for other resources, and returns at once;
        may be called from handlers.

        Raises:
            InvalidName: no resource has such a name.
        """
        self._refuse_fork()
        check_name(resource, "resource")
        if self._run is not None:
            self._run.engine.accept(resource)

    @property
    def released(self) -> frozenset[str]:
        """The resources that this node has released and not accepted since."""
        self._refuse_fork()
        return self._run.engine.snapshot.released if self._run is not None else frozenset()

    def _end(self, run: _Run, timeout_s: float | None) -> bool:
        run.engine.stop()
        try:
            return run.engine.wait_finished(timeout_s)
        finally:
            if run.engine.finished:
                self._clean_up(run)

    def _clean_up(self, run: _Run) -> None:
        run.close()
        if self._run is run:
            self._run = None
            atexit.unregister(self._warn_unstopped)

    def run(self) -> None:
        """Take part until SIGINT, SIGTERM or SIGHUP, or until ``request_stop``; then stop gracefully.

        A second SIGINT has its usual effect, unless it comes with the first one; further ones of the others
        are ignored, as some supervisors send several. If the program has not configured logging, standard
        error says in a line each what happens.

        Raises:
            InvalidState: it was not called in the main thread, which alone gets signals.
            RebalanserError: what ``start`` and ``stop`` raise.
        """
        self.narrate()
        run_until_stopped(self)

    def wait_stopped(self, timeout_s: float | None = None) -> bool:
        """Wait until the node has stopped, for ``timeout_s`` seconds at most; True if it has."""
        self._refuse_fork()
        check_timeout(timeout_s)
        return self._run is None or self._run.engine.wait_finished(timeout_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def resources(self) -> Mapping[str, Owned]:
        """The owned resources now: a copy, by resource."""
        self._refuse_fork()
        return self._run.engine.owned if self._run is not None else {}

    @property
    def is_leader(self) -> bool:
        """True if this node leads its group, as far as it knows. Never base exclusion on it."""
        self._refuse_fork()
        return self._run is not None and self._run.engine.snapshot.role is Role.LEADER

    def wait_settled(self, timeout_s: float = 30.0) -> None:
        """Wait until this node owns exactly its share of the latest allocation and OnStart has returned.

        Raises:
            NotSettled: it is not so within ``timeout_s`` seconds; the message says what it waits for, and its
                cause is what a handler raised last.
            InvalidState: the group does not run.
        """
        self._refuse_fork()
        check_timeout(timeout_s)
        if self._run is None:
            raise InvalidState(f"group {self.name!r} does not run")
        engine = self._run.engine
        if engine.wait(lambda s: s.settled, timeout_s):
            return
        snapshot = engine.snapshot
        waiting = ", ".join(f"{r} held by {n}" for r, n in sorted(snapshot.blocked.items()))
        raise NotSettled(
            f"group {self.name!r} has not settled within {timeout_s:g} s: "
            f"the node is {snapshot.membership.value}"
            + (f", waiting for {waiting}" if waiting else "")
            + _lately(engine.latest_error)
        ) from engine.latest_error

    def _refuse_fork(self) -> None:
        if self._forked:
            raise Forked(
                f"group {self.name!r} was started in the parent of this process; make a new one here"
            )

    def _after_fork_in_child(self) -> None:
        """Nothing of the group lives in a child: it owns nothing and must not be used."""
        if self._run is None:
            return
        self._forked = True
        self._run.tenure.ended = True


def _listed(resources: Iterable[str]) -> list[str]:
    """The resources, each once.

    Raises:
        InvalidArgument: it is no list, or one text, whose letters would be resources.
    """
    if isinstance(resources, (str, bytes)) or not isinstance(resources, Iterable):
        raise InvalidArgument(f"resources: a list of names, such as ['a', 'b'] (got {resources!r})")
    return list(dict.fromkeys(resources))


def leader(
    name: str, url: str | None = None, *, node: str | None = None, settings: Settings | None = None
) -> Group:
    """A group in which exactly one process at a time does the work: its one resource is named like the group.

    Register a ``Group.worker`` and ``Group.run`` it in each process; ``owned.token`` fences the work
    of a leader before. Raises what ``Group`` does.
    """
    return Group(name, url, node=node, settings=settings, resources=[name])


def _lately(error: BaseException | None) -> str:
    return "" if error is None else f"; the application raised {error!r}"


def _refused(what: str, error: str) -> FixConfiguration:
    """The error of the type that an outcome's text begins with (``rebalanser.registry.failure``)."""
    name, _, reason = error.partition(": ")
    kind = vars(errors).get(name)
    if isinstance(kind, type) and issubclass(kind, FixConfiguration):
        return kind(f"{what}: {reason}")
    return FixConfiguration(f"{what}: {error}")
