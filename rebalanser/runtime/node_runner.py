"""The engine: runs one node of a group. It carries out the effects of the protocol core, in order.

Threads: the *loop* owns the core and never calls a handler nor waits for the registry. Three *lanes* wait for
the registry: one sends heartbeats only, and the leader's also computes plans. The *handler runner* calls the
application. So neither a slow handler nor a slow request delays a heartbeat (RB-25).
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Protocol

from rebalanser.core.clock import Clock
from rebalanser.core.group import (
    Accept,
    Answered,
    AskStop,
    CallStart,
    CallStop,
    Effect,
    Event,
    Fact,
    FactKind,
    Finished,
    Guard,
    Lane,
    MakePlan,
    Membership,
    Node,
    Noticed,
    Perform,
    Release,
    Report,
    Role,
    Start,
    Stop,
    Topic,
    Wakeup,
    Watch,
)
from rebalanser.errors import InternalError, InvalidState, RebalanserError
from rebalanser.registry import Coordinator
from rebalanser.runtime.command_thread import CommandThread
from rebalanser.runtime.handlers import HandlerRunner, Handlers
from rebalanser.runtime.logs import log_aside
from rebalanser.runtime.owned import AccessDeadline, Detail, Owned

CLOSE_TIMEOUT_S = 5.0
LOOK_AT_CLOCK_S = 0.5
REPORT_LOADS_S = 1.0
MAX_RELEASED: Final = 1_000
"""Maximum number of resources that a node has released at once: its member key names them all."""
MAX_RELEASED_BYTES: Final = 400_000
"""Maximum size of their names in that key: with a larger value the node could neither release nor join."""
_NO_DETAIL: Final[Detail] = MappingProxyType({})


@lru_cache(maxsize=2 * MAX_RELEASED)
def _written_bytes(name: str) -> int:
    """Return the size of a name and its comma in a list in JSON."""
    return len(json.dumps(name, ensure_ascii=False).encode()) + 1


class Switch(Protocol):
    """The dead man's switch: kills the process at a deadline unless it is armed again before (RB-34)."""

    def arm(self, deadline: float) -> None:
        """Kill this process at ``deadline`` (seconds of the clock)."""

    def disarm(self) -> None:
        """Cancel the deadline."""

    def close(self) -> None:
        """Delete the timer."""


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """State of the node after its latest event."""

    membership: Membership
    role: Role
    settled: bool
    isolated: bool
    node: str
    term: int
    version: int
    blocked: Mapping[str, str]
    released: frozenset[str]


class NodeRunner:
    """Runs one node until it is stopped. ``observe`` gets each report; it must neither block nor raise."""

    def __init__(
        self,
        name: str,
        node: Node,
        coordinator: Coordinator,
        handlers: Handlers,
        clock: Clock,
        tenure: AccessDeadline,
        observe: Callable[[Report], None],
        switch: Switch | None = None,
    ) -> None:
        self._name = name
        self._node = node
        self._coordinator = coordinator
        self._clock = clock
        self._tenure = tenure
        self._observe = observe
        self._switch = switch
        self._inbox = Inbox()
        self._changed = threading.Condition()
        self._releasing_lock = threading.Lock()
        self._releasing: dict[tuple[str, int], float] = {}
        """Seconds of each release that the loop has not handled yet, by resource and token."""
        self._deadline: float | None = None
        self._loads_reported_at = -math.inf
        self._stopped = False
        self._finished = False
        self._last_node = ""
        self._failure: BaseException | None = None
        self._join_error: tuple[str, bool] | None = None
        self._snapshot = self._taken()
        self._lanes: dict[Lane, CommandThread] = {}
        with ExitStack() as undo:
            for lane in Lane:
                self._lanes[lane] = CommandThread(
                    f"rebalanser-{lane.value}-{name}",
                    coordinator,
                    node.make_plan,
                    self._inbox.put,
                    self._fail,
                )
                undo.callback(self._lanes[lane].close, CLOSE_TIMEOUT_S)
            self._runner = HandlerRunner(
                f"rebalanser-handlers-{name}",
                handlers,
                clock,
                tenure,
                self._inbox.put,
                self._report_each,
                coordinator.resource,
                self._release,
            )
            undo.pop_all()
        self._thread = threading.Thread(target=self._run, name=f"rebalanser-loop-{name}", daemon=True)

    def start(self) -> None:
        """Start the threads and join the group."""
        self._inbox.put(Start())
        try:
            self._thread.start()
        except BaseException:
            self._end()
            raise

    def stop(self) -> None:
        """Begin a graceful stop (RB-26)."""
        self._inbox.put(Stop())

    def _release(self, release: Release) -> None:
        """Give up a resource. Ignore the release if one that lasts as long waits for the loop already.

        Raises:
            InvalidState: the node has released as many resources as it can at once.
        """
        key = (release.resource, release.token)
        for_s = math.inf if release.for_s is None else release.for_s
        with self._releasing_lock:
            known = {resource for resource, _ in self._releasing} | self._snapshot.released
            if release.resource not in known and len(known) >= MAX_RELEASED:
                raise InvalidState(
                    f"{release.resource!r} can't be released: this node has released {MAX_RELEASED:,} "
                    "resources, the maximum at once; accept some of them, or stop the group"
                )
            if sum(map(_written_bytes, known | {release.resource})) > MAX_RELEASED_BYTES:
                raise InvalidState(
                    f"{release.resource!r} can't be released: the names of all that this node has released "
                    f"would take more than {MAX_RELEASED_BYTES:,} bytes; accept some, or stop the group"
                )
            if for_s > self._releasing.get(key, 0.0):
                self._releasing[key] = for_s
                self._inbox.put(release)

    def accept(self, resource: str) -> None:
        """Allow a released resource to return."""
        with self._releasing_lock:
            for key in [key for key in self._releasing if key[0] == resource]:
                del self._releasing[key]  # a later release is news again
            self._inbox.put(Accept(resource))
        self._runner.accept(resource)

    @property
    def snapshot(self) -> NodeSnapshot:
        """The node's present state."""
        return self._snapshot

    @property
    def owned(self) -> Mapping[str, Owned]:
        """A copy of the owned resources, by name."""
        return self._runner.owned()

    @property
    def handler_thread(self) -> threading.Thread:
        """The thread that calls the handlers."""
        return self._runner.thread

    @property
    def stop_error(self) -> BaseException | None:
        """The error of the last OnStop, if it raised (RB-24)."""
        return self._runner.stop_error

    @property
    def latest_error(self) -> BaseException | None:
        """The last error of a handler or worker; None once OnStart has returned since."""
        return self._runner.latest_error

    @property
    def finished(self) -> bool:
        """True if the node has stopped for good."""
        return self._finished

    def wait(self, reached: Callable[[NodeSnapshot], bool], timeout_s: float | None) -> bool:
        """Wait until ``reached`` holds or the node has stopped. Return True if it holds.

        Raises:
            InternalError: the engine has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._finished or reached(self._snapshot), timeout_s)
        self._raise_failure()
        return reached(self._snapshot)

    def wait_finished(self, timeout_s: float | None) -> bool:
        """Wait until the node has stopped for good. Return False on a timeout.

        Raises:
            InternalError: the engine has failed.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: self._finished, timeout_s)
        self._raise_failure()
        return done

    def _raise_failure(self) -> None:
        if self._failure is None:
            return
        if isinstance(self._failure, RebalanserError):
            raise self._failure
        raise InternalError(f"the engine of {self._name} failed") from self._failure

    def _report_each(
        self,
        kind: FactKind,
        tokens: Mapping[str, int],
        value: float | None = None,
        detail: Detail = _NO_DETAIL,
    ) -> None:
        """Report one fact about all these resources, if there are any."""
        if tokens:
            snapshot = self._snapshot
            fact = Fact(kind, snapshot.node, snapshot.term, snapshot.version, value=value, detail=detail)
            self._observe(Report(fact, tokens, tokens))

    def _report_loads(self) -> None:
        """Report the application's loads once a second; the loop wakes up more often than that."""
        now = self._clock.now()
        if now - self._loads_reported_at < REPORT_LOADS_S:
            return
        self._loads_reported_at = now
        for owned, load in self._runner.taken_loads():
            self._report_each(FactKind.LOAD_REPORTED, {owned.resource: owned.token}, load)

    def _fail(self, error: BaseException) -> None:
        """Stop access and let the lease end: an error has occurred that no outcome can express."""
        with self._changed:
            if self._failure is None:
                self._failure = error
        self._inbox.put(Wakeup())
        snapshot, detail = self._snapshot, {"error": f"{type(error).__name__}: {error}"}
        fact = Fact(FactKind.ENGINE_FAILED, snapshot.node, snapshot.term, snapshot.version, detail=detail)
        self._observe(Report(fact))
        log_aside(
            "the engine failed: access ends, and the lease ends by itself",
            error,
            action="engine_failed",
            group=self._name,
        )

    def _run(self) -> None:
        try:
            while not self._stopped and self._failure is None:
                for event in self._next_events():
                    self._handle(event)
                self._report_loads()
        except BaseException as error:
            self._fail(error)
        try:
            if self._failure is not None:
                self._give_up()
        except BaseException as error:
            self._fail(error)
        try:
            self._end()
        except BaseException as error:
            self._fail(error)

    def _end(self) -> None:
        """End all threads and wake up those that wait for the end."""
        try:
            self._close()
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()

    def _next_events(self) -> list[Event]:
        wakeup = self._node.next_wakeup
        timeout_s = None if wakeup is None else max(0.0, wakeup - self._clock.now())
        if self._deadline is not None:
            # A wait does not count the time of a suspend, but leases do.
            timeout_s = LOOK_AT_CLOCK_S if timeout_s is None else min(timeout_s, LOOK_AT_CLOCK_S)
        return self._inbox.take(timeout_s) or [Wakeup()]

    def _handle(self, event: Event) -> None:
        if self._stopped:
            return
        began_at, cpu_began_s = self._clock.now(), time.thread_time()
        for effect in self._node.handle(event, began_at):
            self._carry_out(effect)
        if not self._node.started:
            self._runner.abandon()
        with self._changed:
            self._snapshot = self._taken()
            self._changed.notify_all()
        if isinstance(event, Release):
            with self._releasing_lock:
                self._releasing.pop((event.resource, event.token), None)
        self._report_if_slow(event, self._clock.now() - began_at, time.thread_time() - cpu_began_s)

    def _report_if_slow(self, event: Event, took_s: float, cpu_s: float) -> None:
        limit_s = self._node.slow_turn_s
        if took_s <= limit_s:
            return
        words = [type(event).__name__]
        if isinstance(event, Answered):
            words += [type(event.command).__name__, type(event.outcome).__name__]
        detail: dict[str, str | float | bool | None] = {
            "cause": " ".join(words),
            "cpu_s": cpu_s,
            "limit_s": limit_s,
        }
        snapshot = self._snapshot
        fact = Fact(
            FactKind.LOOP_SLOW, snapshot.node, snapshot.term, snapshot.version, value=took_s, detail=detail
        )
        self._observe(Report(fact))

    def _taken(self) -> NodeSnapshot:
        node = self._node
        leadership, header = node.leadership, node.header
        if node.session is not None:
            self._last_node = node.session.node
        return NodeSnapshot(
            membership=node.membership,
            role=node.role,
            settled=node.settled,
            isolated=node.isolated,
            node=self._last_node,
            term=leadership.term if leadership else 0,
            version=header.version if header else 0,
            blocked=node.blocked,
            released=node.released,
        )

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Perform(command):
                self._lanes[command.lane].perform(command)
            case MakePlan():
                self._lanes[Lane.LEADER].make_plan(effect)
            case CallStart() | CallStop():
                self._runner.call(effect)
            case AskStop(resources):
                self._runner.ask_to_stop(resources)
            case Guard(deadline):
                self._guard(deadline)
            case Watch(topics):
                self._coordinator.watch(
                    self._node.session.node if self._node.session else "", topics, self._inbox.notice
                )
            case Report():
                self._report(effect)
            case Finished():
                self._stopped = True

    def _guard(self, deadline: float | None) -> None:
        self._tenure.deadline = self._deadline = deadline
        if self._switch is None:
            return
        if deadline is None:
            self._switch.disarm()
        else:
            self._switch.arm(deadline)

    def _report(self, report: Report) -> None:
        fact = report.fact
        if fact.kind is FactKind.JOIN_FAILED:
            self._join_error = (str(fact.detail.get("error")), bool(fact.detail.get("fatal")))
        elif fact.kind is FactKind.JOINED:
            self._join_error = None
            self._runner.forget_error()
        self._observe(report)

    @property
    def join_error(self) -> tuple[str, bool] | None:
        """Error of the latest registration, and True if a person must change something first."""
        return self._join_error

    def _give_up(self) -> None:
        """End all access without the core, which can't be trusted any more. The lease ends by itself."""
        self._tenure.ended = True
        self._runner.give_up()

    def _close(self) -> None:
        """End all threads. Keep the dead man's switch armed while a resource may still be accessed."""
        for lane in self._lanes.values():
            lane.close(CLOSE_TIMEOUT_S)
        self._runner.close(CLOSE_TIMEOUT_S)
        self._coordinator.close()
        self._tenure.ended = True
        accessed = self._deadline is not None if self._failure is None else bool(self._runner.owned())
        if self._switch is not None and not accessed:
            self._switch.close()


class Inbox:
    """Events for one loop.

    It can't grow without bound. A node has at most one command per lane and one handler under way, and is
    started and stopped once. There is at most one notice for each watched topic. A release that says nothing
    new about its resource is not added.
    """

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._events: list[Event] = []
        self._notices: dict[Topic, Noticed] = {}

    def put(self, event: Event) -> None:
        """Add an event and wake the loop up."""
        with self._arrived:
            self._events.append(event)
            self._arrived.notify()

    def notice(self, notices: Sequence[Noticed]) -> None:
        """Add notices; a later one of a topic replaces an earlier one that still waits.

        It keeps the keys of both: a leader reads the keys in the notice and takes the others as unchanged.
        """
        with self._arrived:
            for notice in notices:
                waiting = self._notices.get(notice.topic)
                self._notices[notice.topic] = notice if waiting is None else waiting.folded(notice)
            self._arrived.notify()

    def take(self, timeout_s: float | None) -> list[Event]:
        """Take all events; wait at most ``timeout_s`` seconds for the first. Empty on a timeout."""
        with self._arrived:
            if not self._events and not self._notices:
                self._arrived.wait(timeout_s)
            taken = [*self._events, *self._notices.values()]
            self._events.clear()
            self._notices.clear()
            return taken
