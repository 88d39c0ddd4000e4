"""One process that takes part in a group: the real core, driven as the runtime drives it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from rebalanser.core.group.messages import (
    Accept,
    Acknowledge,
    Answered,
    AskStop,
    CallStart,
    CallStop,
    Command,
    Effect,
    Event,
    Fact,
    FactKind,
    Failed,
    Finished,
    Guard,
    Handler,
    HandlerReturned,
    Join,
    Joined,
    MakePlan,
    Noticed,
    Outcome,
    Perform,
    Release,
    Report,
    SessionLost,
    Start,
    Stop,
    Wakeup,
    Watch,
)
from rebalanser.core.group.node import Node
from rebalanser.errors import InternalError, RebalanserError, RegistryUnavailable
from rebalanser.registry.contract import HistoryLost, Reply, Request
from rebalanser.registry.script import Answer, Script, failure
from simulation.group.coverage import answer_name
from simulation.group.duties import Duties, DutyWorld
from simulation.group.faults import FaultKind
from simulation.group.machine import Machine
from simulation.group.network import no_answer
from simulation.kernel.clock import LocalClock
from simulation.kernel.trace import listed, text

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from random import Random

    from rebalanser.core.group.types import Resource, Session, Token, Topic
    from rebalanser.registry.contract import Watch as Stream
    from rebalanser.registry.contract import WatchEvent
    from rebalanser.registry.translation import Translation
    from rebalanser.testing.memory import MemoryStore
    from simulation.group.network import Link, Network
    from simulation.group.scenario import HostPlan, Scenario
    from simulation.kernel.trace import Trace

ResultT = TypeVar("ResultT")
_TIMER_SLACK_S = 1e-6


@dataclass(slots=True)
class Call:
    """A call of a handler that has been asked for."""

    handler: Handler
    resources: tuple[Resource, ...]
    owned: Mapping[Resource, Token]
    not_after: float


class CallerWorld(Protocol):
    """The world of a caller."""

    scenario: Scenario
    network: Network
    commands: Counter[str]


class ProcessWorld(CallerWorld, DutyWorld, Protocol):
    """The world of a process."""

    random: Random
    trace: Trace
    translation: Translation
    met: Counter[str]

    @property
    def store(self) -> MemoryStore:
        """The registry's store."""
        ...

    @property
    def now(self) -> float:
        """True time in seconds."""
        ...

    def make_node(self, plan: HostPlan, stem: str) -> Node:
        """Return the core of a new process."""
        ...

    def handler_latency(self) -> float:
        """Return the seconds until a handler's thread runs."""
        ...

    def say(self, where: str, sentence: str) -> None:
        """Write a line to the trace."""

    def hit(self, kind: FaultKind, sentence: str) -> None:
        """Count a fault that took effect."""

    def report(self, process: Process, fact: Fact) -> None:
        """Take in a fact."""

    def finished(self, process: Process) -> None:
        """A process has stopped gracefully, and exits."""

    def crash(self, host: Host) -> None:
        """Kill the process of a host."""

    def start_soon(self, host: Host) -> None:
        """Start what was killed again."""

    def revoke_soon(self, host: Host, session: Session) -> None:
        """End the lease of a session after a while, if an operator is to."""


class Caller(Protocol):
    """Sends requests to the registry: a process or an operator."""

    label: str
    clock: LocalClock

    @property
    def world(self) -> CallerWorld:
        """Its world."""
        ...

    @property
    def now(self) -> float:
        """Seconds of its monotonic clock."""

    @property
    def link(self) -> Link:
        """Its way to the registry."""

    def post(self, at: float, action: Callable[..., None], *arguments: Any) -> None:
        """Let something reach it at a true time."""


class ScriptRunner(Generic[ResultT]):
    """Drives one script, as ``RegistryCoordinator`` does, without blocking.

    ``command`` and ``origin`` tell the network what it carries and for whom. ``ended`` is called with the
    result, or with the error that the script ended with.
    """

    def __init__(
        self,
        caller: Caller,
        command: str,
        origin: str,
        script: Script[ResultT],
        ended: Callable[[ResultT | RebalanserError], None],
    ) -> None:
        self._caller = caller
        self._command = command
        self._origin = origin
        self._script = script
        self._ended = ended
        self._sent_at = 0.0
        self._waiting_for = 0

    def begin(self) -> None:
        """Send the first request."""
        self._caller.world.commands[self._command] += 1
        self._step(self._script.send, None)

    def _step(self, advance: Callable[[Any], Request], given: Answer | RebalanserError | None) -> None:
        try:
            request = advance(given)
        except StopIteration as stop:
            self._ended(stop.value)
        except InternalError:
            raise
        except RebalanserError as error:
            self._ended(error)
        else:
            self._send(request)

    def _send(self, request: Request) -> None:
        caller = self._caller
        self._waiting_for += 1
        attempt = self._waiting_for
        self._sent_at = caller.now
        soon = caller.world.network.send(
            caller.link,
            caller.label,
            self._command,
            self._origin,
            request,
            lambda at, reply: caller.post(at, self._receive, attempt, reply),
        )
        if not soon:
            self._give_up_in_time(attempt)

    def _give_up_in_time(self, attempt: int) -> None:
        caller = self._caller
        gives_up = caller.clock.true(self._sent_at + caller.world.scenario.request_timeout_s)
        caller.post(gives_up, self._resume, attempt, no_answer())

    def _receive(self, attempt: int, reply: Reply | RebalanserError) -> None:
        if self._caller.link.cut is not None and not isinstance(reply, RegistryUnavailable):
            self._give_up_in_time(attempt)
        else:
            self._resume(attempt, reply)

    def _resume(self, attempt: int, reply: Reply | RebalanserError) -> None:
        if attempt != self._waiting_for:
            return
        self._waiting_for += 1
        if isinstance(reply, RebalanserError):
            self._step(self._script.throw, reply)
        else:
            self._step(self._script.send, Answer(reply, self._sent_at))


class Watching:
    """One watched topic: its streams, and what becomes of their events on the way."""

    def __init__(self, process: Process, topic: Topic, from_revision: int) -> None:
        self._process = process
        self._topic = topic
        self._streams: list[Stream] = []
        self._told_at = 0.0
        self._closed = False
        self._missed = False
        world = process.world
        world.scheduler.at(world.scheduler.now + world.network.latency(), self._open, from_revision)

    def close(self) -> None:
        """Stop watching. Events on their way still arrive."""
        self._closed = True
        self._close_streams()

    def _close_streams(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams.clear()

    def _open(self, from_revision: int) -> None:
        if self._closed:
            return
        world = self._process.world
        self._streams = [
            world.store.watch(target, from_revision, self._sink)
            for target in world.translation.targets(self._topic)
        ]

    def _sink(self, events: Sequence[WatchEvent]) -> None:
        link, world = self._process.host.link, self._process.world
        if link.cut is not None:
            self._missed = True
            return
        if link.watch_silent:
            world.hit(FaultKind.WATCH_SILENT, f"{self._process.label}: a watch event is dropped")
            return
        if link.watch_lag_s:
            world.hit(FaultKind.WATCH_SLOW, f"{self._process.label}: a watch event is late")
        arrives = world.scheduler.now + world.network.latency() + link.watch_lag_s
        self._told_at = max(self._told_at, arrives)
        world.network.late_until = max(world.network.late_until, self._told_at)
        self._process.post(self._told_at, self._tell, events)

    def _tell(self, events: Sequence[WatchEvent]) -> None:
        if any(isinstance(event, HistoryLost) for event in events):
            self._process.duties.history_lost_at = self._process.world.now
        for notice in self._process.world.translation.notices(self._topic, events):
            self._process.handle(notice)

    def lose(self) -> None:
        """The stream breaks, and comes back without what happened meanwhile."""
        self._close_streams()
        world = self._process.world

        def reopen() -> None:
            if not self._closed and self._process.alive:
                self._open(world.store.revision + 1)
                self._sink((HistoryLost(world.store.revision),))

        world.scheduler.at(world.scheduler.now + 10 * world.network.latency(), reopen)

    def reconnected(self) -> None:
        """The link is whole again: what was missed while it was cut is told as lost history."""
        if self._missed and not self._closed:
            self._missed = False
            self._sink((HistoryLost(self._process.world.store.revision),))


class Process:
    """A process on a host: mailbox, timers, handlers and watches around one ``Node``."""

    def __init__(self, world: ProcessWorld, host: Host, stem: str) -> None:
        self.world = world
        self.host = host
        self.label = host.name
        self.stem = stem
        self.clock = host.clock
        self.alive = True
        self.finished = False
        self.stopping = False
        self.paused = False
        self.call: Call | None = None
        self.entered = False
        self.hung = False
        self.told_of_nothing = False
        """True if the last OnStart reported that this process owns nothing (RB-18)."""
        self.tokens: dict[Resource, Token] = {}
        self.former_tokens: dict[Resource, Token] = {}
        """The tokens with which it owned what it owns no more, or with another token."""
        self.asked: set[Resource] = set()
        """What is owned, or arrives just now, and was asked to stop: nobody works on it any more."""
        self.failed_to_start: set[Resource] = set()
        """What OnStart raised for, until OnStop is called for it (RB-24)."""
        self.node: Node = world.make_node(host.plan, stem)
        self.duties = Duties(self)
        self._mailbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._in_turn = False
        self._events: list[Event] = []
        """Events that wait while the loop is in a turn."""
        self._watching: dict[Topic, Watching] = {}
        self._wakes_at = float("inf")
        self._guard: float | None = None
        self._first_on_resume: Callable[[], None] | None = None
        self._last_node = stem

    @property
    def now(self) -> float:
        """This process's monotonic time in seconds."""
        return self.clock.local(self.world.scheduler.now)

    @property
    def plan(self) -> HostPlan:
        """The host's plan."""
        return self.host.plan

    @property
    def link(self) -> Link:
        """The host's way to the registry."""
        return self.host.link

    def is_incarnation(self, node: str) -> bool:
        """Whether a member is, or was, this process."""
        return node.rpartition("-")[0] == self.stem

    def post(self, at: float, action: Callable[..., None], *arguments: Any) -> None:
        """Let something reach this process at a true time; it waits while the process is stopped."""
        self.world.scheduler.at(at, self._arrive, action, *arguments)

    def _arrive(self, action: Callable[..., None], *arguments: Any) -> None:
        if not self.alive:
            return
        if self.paused:
            self._mailbox.append((action, arguments))
        else:
            action(*arguments)

    def begin(self) -> None:
        """Take part."""
        self.handle(Start())

    def ask_stop(self) -> None:
        """SIGTERM: stop gracefully."""
        self.stopping = True
        self._arrive(self.handle, Stop())

    def release(self, resource: Resource, token: Token, for_s: float | None) -> None:
        """The application gives up what it owns, or owned, with this token."""
        self._arrive(self.handle, Release(resource, token, for_s))

    def accept(self, resource: Resource) -> None:
        """The application takes back what it gave up."""
        self._arrive(self.handle, Accept(resource))

    def pause(self) -> None:
        """SIGSTOP: from now on nothing of this process runs."""
        self.paused = True

    def resume(self) -> None:
        """SIGCONT: the application goes on where it was, then all that waited is worked off."""
        self.paused = False
        self.write_something()
        first, self._first_on_resume = self._first_on_resume, None
        if first is not None:
            first()
        while self._mailbox and self.alive and not self.paused:
            action, arguments = self._mailbox.popleft()
            action(*arguments)

    def die(self) -> None:
        """SIGKILL."""
        self.alive = False
        self._mailbox.clear()
        self._close_watches()

    def handle(self, event: Event) -> None:
        """Give the core an event and carry out what it says, once the loop's turn has taken its time."""
        if not self.alive:
            return
        if self._in_turn:
            self._queue(event)
            return
        self.duties.hears(event)
        effects = self.node.handle(event, self.now)
        self.duties.decides(effects)
        turn_s = self.turn_s()
        if not turn_s:
            self._end_turn(effects)
            return
        self._in_turn = True
        self.post(self.world.scheduler.now + turn_s, self._end_turn_late, effects)

    def turn_s(self) -> float:
        """Draw the seconds that the loop takes for one event."""
        longest_s = self.world.scenario.turn_s
        return self.world.random.random() * longest_s if longest_s else 0.0

    def _queue(self, event: Event) -> None:
        """Let an event wait as the runtime's inbox does: of each topic the latest notice."""
        if isinstance(event, Noticed):
            for place, waiting in enumerate(self._events):
                if isinstance(waiting, Noticed) and waiting.topic == event.topic:
                    self._events[place] = waiting.folded(event)
                    return
        self._events.append(event)

    def _end_turn(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            self._carry_out(effect)
        if self.node.session is not None:
            self._last_node = self.node.session.node
        if not self.node.started:
            self.asked.clear()
        self._set_timer()

    def _end_turn_late(self, effects: Iterable[Effect]) -> None:
        self._in_turn = False
        self._end_turn(effects)
        if self._events and not self._in_turn:
            waiting, self._events = self._events, []
            for event in waiting:
                self.handle(event)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Report():
                self._report(effect)
            case Perform(command=command):
                if isinstance(command, Acknowledge):
                    self.world.oracle.acknowledging(self, command)
                self._run_script(command)
            case CallStart(owned=owned, not_after=not_after):
                self.asked -= owned.keys()
                self._ask_call(Call(Handler.START, tuple(sorted(owned)), dict(owned), not_after))
            case CallStop(resources=resources):
                self._ask_call(Call(Handler.STOP, tuple(sorted(resources)), {}, 0.0))
            case AskStop(resources=resources):
                arriving = self.call.owned if self.call is not None else {}
                self.asked |= resources & (self.tokens.keys() | arriving.keys())
            case Guard(deadline=deadline):
                self._arm(deadline)
            case Watch(topics=topics):
                self._watch(topics)
            case Finished() | MakePlan():
                self._carry_out_aside(effect)

    def _carry_out_aside(self, effect: Finished | MakePlan) -> None:
        match effect:
            case MakePlan():
                planned_at = self.world.scheduler.now + self.world.handler_latency()
                self.post(planned_at, lambda: self.handle(self.node.make_plan(effect)))
            case Finished():
                self.duties.finishes()
                self.finished = True
                self.world.finished(self)

    def _report(self, report: Report) -> None:
        for fact in report.facts():
            self.world.report(self, fact)

    def _run_script(self, command: Command) -> None:
        node = command.member.node if isinstance(command, Join) else command.session.node

        def ended(result: Outcome | RebalanserError) -> None:
            self.answered(command, failure(result) if isinstance(result, RebalanserError) else result)

        ScriptRunner(
            self, type(command).__name__, node, self.world.translation.script(command), ended
        ).begin()

    def answered(self, command: Command, outcome: Outcome) -> None:
        """A command has ended."""
        if isinstance(outcome, SessionLost) and not isinstance(command, Join):
            self.world.oracle.told_session_lost(self, command.session)
        elif isinstance(outcome, Joined):
            self.world.oracle.told_joined(outcome.session)
            self.world.revoke_soon(self.host, outcome.session)
        if self.world.trace:
            self.world.say(self.label, f"{type(command).__name__} → {text(outcome)}")
        unknown = isinstance(outcome, Failed) and outcome.unknown
        self.world.met[answer_name(type(command), type(outcome), unknown)] += 1
        self.handle(Answered(command, outcome))

    def _set_timer(self) -> None:
        wakeup = self.node.next_wakeup
        if wakeup is None or not self.alive:
            return
        due = self.clock.true(wakeup) + _TIMER_SLACK_S
        if due < self._wakes_at:
            self._wakes_at = due
            self.post(due, self._wake, due)

    def clock_changed(self) -> None:
        """The clock runs at another rate: timers are set anew."""
        self._wakes_at = float("inf")
        self._set_timer()
        if self._guard is not None:
            self._arm(self._guard)

    def _wake(self, due: float) -> None:
        if due != self._wakes_at:
            return
        self._wakes_at = float("inf")
        wakeup = self.node.next_wakeup
        if wakeup is not None and wakeup <= self.now:
            self.handle(Wakeup())
            if self.tokens and self.world.random.random() < self.world.scenario.writes:
                self.write_something()
        else:
            self._set_timer()

    def _arm(self, deadline: float | None) -> None:
        self._guard = deadline
        if deadline is None:
            return
        self.world.oracle.guarded(self, self.clock.true(deadline))
        if self.host.plan.kills:
            self.world.scheduler.at(self.clock.true(deadline), self._fire, deadline)

    def _fire(self, deadline: float) -> None:
        if self.alive and self._guard == deadline and self.now >= deadline - _TIMER_SLACK_S:
            self.duties.killed()
            self.world.hit(FaultKind.KILLED_BY_GUARD, f"{self.label}: killed by its dead man's switch")
            self.world.crash(self.host)
            self.world.start_soon(self.host)

    def _watch(self, topics: Mapping[Topic, int]) -> None:
        for topic in [topic for topic in self._watching if topic not in topics]:
            self._watching.pop(topic).close()
        for topic, revision in topics.items():
            if topic not in self._watching:
                self._watching[topic] = Watching(self, topic, revision)

    def _close_watches(self) -> None:
        for watching in self._watching.values():
            watching.close()
        self._watching.clear()

    def lose_watches(self) -> None:
        """Every watch stream of this process breaks."""
        for watching in list(self._watching.values()):
            watching.lose()

    def reconnected(self) -> None:
        """The link to the registry is whole again."""
        for watching in list(self._watching.values()):
            watching.reconnected()

    def _ask_call(self, call: Call) -> None:
        if self.call is not None:
            raise InternalError(f"{call} was asked for while {self.call} runs")
        self.call = call
        self.post(self.world.scheduler.now + self.world.handler_latency(), self._enter, call)

    def _enter(self, call: Call) -> None:
        if call.handler is Handler.STOP:
            self._run(call)
        elif self.refuses(call.not_after) or self.asked & call.owned.keys():
            self.call = None
            self._fact(FactKind.START_REFUSED, call)
            self.handle(HandlerReturned(Handler.START, refused=True))
        elif call.resources and self.host.pauses_at_entry():
            self._first_on_resume = lambda: self._run(call, late=True)
        else:
            self._run(call)

    def refuses(self, not_after: float) -> bool:
        """Whether it is too late to enter OnStart."""
        return self.now >= not_after

    def _run(self, call: Call, late: bool = False) -> None:
        world = self.world
        if call.handler is Handler.START:
            world.oracle.start_entered(self, call.owned, late)
            self.told_of_nothing = not call.owned
            self.tokens.update(call.owned)
            self._fact(FactKind.START_ENTERED, call)
            if world.random.random() < world.scenario.writes:
                self.write(call.resources)
        else:
            world.oracle.stop_entered(self, call.resources)
            self.failed_to_start.difference_update(call.resources)
            self._fact(FactKind.STOP_ENTERED, call)
        duration_s, error = self.host.behaviour(call.handler, bool(call.resources))
        if world.trace:
            world.say(self.label, f"{call.handler} entered for {listed(call.resources)}")
        if duration_s is None:
            self.hung = True
            return
        self.post(world.scheduler.now + duration_s, self._return, call, error)

    def _return(self, call: Call, error: str | None) -> None:
        world = self.world
        if call.handler is Handler.STOP and world.random.random() < world.scenario.writes:
            self.write(call.resources)
        self.call = None
        if call.handler is Handler.STOP:
            world.oracle.stop_returned(self, call.resources, error)
        else:
            world.oracle.start_returned(self)
            self.failed_to_start.update(call.resources if error else ())
        if world.trace:
            world.say(self.label, f"{call.handler} {error or 'returned'}: {listed(call.resources)}")
        if error is None:
            self._fact(
                FactKind.STOP_RETURNED if call.handler is Handler.STOP else FactKind.START_RETURNED, call
            )
            if call.handler is Handler.STOP:
                for resource in call.resources:
                    self.former_tokens[resource] = self.tokens.pop(resource)
                    self.asked.discard(resource)
        self.handle(HandlerReturned(call.handler, error))

    def _fact(self, kind: FactKind, call: Call) -> None:
        leadership, header = self.node.leadership, self.node.header
        for resource in call.resources:
            self.world.report(
                self,
                Fact(
                    kind,
                    self._last_node,
                    leadership.term if leadership else 0,
                    header.version if header else 0,
                    resource=resource,
                    token=call.owned.get(resource, self.tokens.get(resource)),
                ),
            )

    def write_something(self) -> None:
        """The application writes to a fenced store, wherever it believes to have access."""
        if self.tokens:
            self.write(tuple(self.tokens))

    def write(self, resources: Sequence[Resource]) -> None:
        """Write to some fenced resources, each with the token that OnStart was given."""
        for resource in resources:
            token = self.tokens.get(resource)
            if token is not None:
                self.world.oracle.write(self, resource, token)


Host: TypeAlias = Machine[Process]
"""A machine, with the process that runs on it."""
