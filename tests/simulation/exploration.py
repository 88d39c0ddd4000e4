"""Bounded exhaustive exploration: every order of events of a small group, instead of orders drawn by chance.

Two hosts and two resources. What runs is the real ``Node``, the real
``Translation`` and the real store of
``testing.memory``; only what lies around them is modelled here.

**A state** is the two hosts, the registry, what is accessed, and the time. A host has a process or none, with
its node, a script in each lane, a plan that is being worked out, a handler under way, and watch notices on
their way. It also has late requests: nobody waits for their replies any more, and each may still take effect.

**A step** is one of ``Kind``: a request is carried out, a reply arrives, either is given up (the outcome
is unknown to the node, and the request may still be carried out later), a handler is entered, returns or
raises, a plan is ready, a notice arrives or is lost, a process crashes, is asked to stop or starts anew, a
lease ends, or time passes to the next instant at which something is due.

**Time** passes only in steps of its own, on one clock, to the next wake-up of a node, end of a lease or limit
of a handler. Nodes whose wake-up has come are woken in the same step: what one node does without a message
commutes with everything else. No process is paused, no clock drifts, and no handler outlasts its limit. A
lease may be found over arbitrarily late, and a request may take any time. Within these bounds RB-1 has no
exception.

**What is merged.** Two states are one if they differ only in the absolute numbers of revisions and instants.
Revisions begin at a million and instants at 1,024 s, far above every other number, so that each is recognized
by its size wherever it is. The code compares revisions, adds 1 to them and takes new ones above all others;
their order is kept, and the gaps between them up to 2. It compares instants and adds durations to them; their
distances from the present are kept, exactly, as all durations are sums of powers of two. Nothing else is
merged: not ids, since the jitter of heartbeats depends on them, nor versions, terms or leases. Left out is
what can't matter: what was told between two changes of one key before a watch began, late requests that only
read, and late requests that depend on a lease or revision that is gone.

**What is explored.** The roots are the states of ``STORIES``, in which only what the story is about
fails. Every sequence of up to ``depth`` steps from every root is tried, breadth first, so that a broken rule
is shown by as few steps as possible. After that the search goes on depth first from states at the rim, an
equal share of the remaining states for each of them, in random order and faults put off.

Safety is judged in every step. From a sample of the states nothing fails any more; then both nodes must
settle, and every resource must have an owner (RB-3).
"""

from __future__ import annotations

import math
import struct
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from random import Random
from typing import Annotated, Any, Final, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rebalanser.core.allocation import solve
from rebalanser.core.group.inflight import Inflight
from rebalanser.core.group.leading import Leading
from rebalanser.core.group.messages import (
    Answered,
    AskStop,
    CallStart,
    CallStop,
    Command,
    Event,
    Finished,
    Handler,
    HandlerReturned,
    Join,
    Lane,
    MakePlan,
    Noticed,
    Outcome,
    Perform,
    SessionLost,
    Start,
    Stop,
    Wakeup,
    Watch,
)
from rebalanser.core.group.node import Node
from rebalanser.core.group.rebalancing import Rebalancing, Releases
from rebalanser.core.group.types import (
    Group,
    Header,
    Member,
    Plan,
    Resource,
    ResourceSpec,
    Session,
    Share,
    Timings,
    Token,
    Topic,
)
from rebalanser.errors import InternalError, OutcomeUnknown, RebalanserError
from rebalanser.registry import values
from rebalanser.registry.contract import (
    Absent,
    Changed,
    Created,
    Guard,
    KeepAlive,
    KeyValue,
    Put,
    Reply,
    Request,
    Revoke,
    Transaction,
    Unchanged,
)
from rebalanser.registry.contract import Outcome as Replied
from rebalanser.registry.keys import GroupKeys
from rebalanser.registry.script import Answer, failure
from rebalanser.registry.translation import Translation
from rebalanser.testing.memory import MEMORY_CAPABILITIES, MemoryStore
from simulation.kernel.reports import Violation
from simulation.kernel.trace import listed, reply_sentence, request_sentence, text

TIMINGS: Final = Timings(
    lease_ttl_s=8.0,
    heartbeat_interval_s=2.0,
    stop_timeout_s=1.0,
    start_timeout_s=1.0,
    safety_margin_s=0.25,
    clock_drift_ratio=1 / 64,
    settle_time_s=0.0,
    min_rebalance_interval_s=0.0,
    retry_initial_s=0.25,
    retry_max_s=1.0,
    rejoin_initial_s=0.5,
    rejoin_max_s=2.0,
)
LABELS: Final = ("a", "b")
RESOURCES: Final = ("r0", "r1")
SAMPLES: Final = 2000
"""States from which the group must settle once nothing fails any more."""
FIRST_REVISION: Final = 1_000_000
FIRST_INSTANT: Final = 1024.0
_MAX_STEPS: Final = 1000
"""Steps within which the group must settle."""
_MAX_MEMORY: Final = 200_000
"""Steps of one host or of the registry that are remembered, not to be worked out twice."""
_MAX_DEPTH: Final = 100
_LEAST_SHARE: Final = 200
"""States for each state from which the search goes on depth first, at least."""
_FAULTS_COME_LAST: Final = 0.5
"""Depth first, a step that is a fault is put off more often than others; 1.0 would make no difference."""
_PARTS: Final = (Node, Inflight, Rebalancing, Releases, Leading)
_CONSTANT: Final = frozenset({"_effects", "_timings", "_options", "_solve", "_member"})


class Kind(StrEnum):
    """What a step can be."""

    REPLY = "reply arrives"
    EXECUTE = "request carried out"
    ENTER = "handler entered"
    RETURN = "handler returns"
    PLAN = "plan ready"
    NOTICE = "notice arrives"
    START = "process starts"
    LEASE_ENDS = "lease ends"
    TIME = "time passes"
    GIVE_UP = "request given up"
    LOSE_REPLY = "reply lost"
    LATE = "late request carried out"
    LOSE_NOTICE = "notice lost"
    RAISE = "handler raises"
    STOP = "stop asked"
    CRASH = "process crashes"
    NOTHING_FAILS = "from now on nothing fails"


_FAULTS: Final = frozenset(
    {Kind.GIVE_UP, Kind.LOSE_REPLY, Kind.LATE, Kind.LOSE_NOTICE, Kind.RAISE, Kind.STOP, Kind.CRASH}
)


class Action(NamedTuple):
    """A step that can be taken: its kind, the host, and which lane, notice, late request or lease."""

    kind: Kind
    host: int = -1
    which: int = 0


class Form(NamedTuple):
    """What something is, but for the revisions and instants in it, and those in order."""

    template: bytes
    revisions: tuple[int, ...]
    instants: tuple[float, ...]


class _Describing:
    """Takes a value apart, into words that are equal for equal values."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.revisions: list[int] = []
        self.instants: list[float] = []

    def describe(self, value: object) -> None:
        """Add the words of a value."""
        kind = type(value)
        way = _WAYS.get(kind)
        if way is None:
            way = _WAYS[kind] = _way_of(kind)
        way(self, value)

    def text(self, value: str) -> None:
        """Add a text, or a member of an enumeration of texts."""
        self.words.append(f"'{value}")

    def plain(self, value: object) -> None:
        """Add a value in which there is no revision and no instant."""
        self.words.append(repr(value))

    def integer(self, value: int) -> None:
        """Add a number that may be a revision."""
        if value >= FIRST_REVISION:
            self.revisions.append(value)
            self.words.append("N")
        else:
            self.words.append(str(value))

    def real(self, value: float) -> None:
        """Add a number that may be an instant."""
        if FIRST_INSTANT <= value < math.inf:
            self.instants.append(value)
            self.words.append("T")
        else:
            self.words.append(repr(value))

    def form(self, value: Form) -> None:
        """Add what was taken apart before."""
        self.words.append(value.template.hex())
        self.revisions += value.revisions
        self.instants += value.instants

    def sequence(self, value: Sequence[object]) -> None:
        """Add parts in their order."""
        self.words.append("[")
        for part in value:
            self.describe(part)
        self.words.append("]")

    def unordered(self, value: Iterable[object]) -> None:
        """Add parts that have no order."""
        self.sequence(sorted(value, key=repr))

    def mapping(self, value: Mapping[Any, object]) -> None:
        """Add what has keys, in the order of those."""
        self.words.append("{")
        for key in sorted(value) if all(type(key) is str for key in value) else sorted(value, key=repr):
            self.describe(key)
            self.describe(value[key])
        self.words.append("}")

    def error(self, value: Exception) -> None:
        """Add an error."""
        self.words += (type(value).__name__, *map(str, value.args))

    def remembered(self, value: Any) -> None:
        """Add a large value that never changes."""
        known = _REMEMBERED.get(id(value))
        if known is None:
            if len(_REMEMBERED) >= _MAX_MEMORY:
                _REMEMBERED.clear()
            taken = _Describing()
            _fields_of(type(value))(taken, value)
            known = _REMEMBERED[id(value)] = value, taken.taken()
        self.form(known[1])

    def taken(self) -> Form:
        """The form of all that was added."""
        template = blake2b("\0".join(self.words).encode(), digest_size=16).digest()
        return Form(template, tuple(self.revisions), tuple(self.instants))


_Way: TypeAlias = Callable[[_Describing, Any], None]
_WAYS: dict[type, _Way] = {
    str: _Describing.text,
    bytes: _Describing.plain,
    bool: _Describing.plain,
    type(None): _Describing.plain,
    int: _Describing.integer,
    float: _Describing.real,
    Form: _Describing.form,
    tuple: _Describing.sequence,
    list: _Describing.sequence,
    set: _Describing.unordered,
    frozenset: _Describing.unordered,
    **dict.fromkeys((Group, Header, KeyValue, Plan, Share, Transaction, Replied), _Describing.remembered),
}
_REMEMBERED: dict[int, tuple[object, Form]] = {}


def _way_of(kind: type) -> _Way:
    if issubclass(kind, str):
        return _Describing.text
    if issubclass(kind, tuple):
        return _Describing.sequence
    if issubclass(kind, Mapping):
        return _Describing.mapping
    if issubclass(kind, Exception):
        return _Describing.error
    if kind in _PARTS or is_dataclass(kind):
        return _fields_of(kind)
    raise InternalError(f"no state holds a {kind.__name__}")


def _fields_of(kind: type) -> _Way:
    """Add the type's name, and its attributes in a fixed order."""
    names = () if kind in _PARTS else tuple(each.name for each in fields(kind))

    def describe(describing: _Describing, value: Any) -> None:
        describing.words.append(kind.__name__)
        for name in sorted(vars(value).keys() - _CONSTANT) if kind in _PARTS else names:
            describing.describe(getattr(value, name))

    return describe


def form_of(value: object) -> Form:
    """The form of a value that a state is made of."""
    describing = _Describing()
    describing.describe(value)
    return describing.taken()


def clone(original: Any) -> Any:
    """Copy a node, with all of it that can change."""
    copy = object.__new__(type(original))
    attributes = vars(copy)
    for name, value in vars(original).items():
        kind = type(value)
        if kind in (dict, set, list):
            attributes[name] = kind(value)
        else:
            attributes[name] = clone(value) if kind in _PARTS else value
    return copy


@dataclass(frozen=True, slots=True)
class RunningScript:
    """A command's script: what it was given so far, the request that it waits for, and the reply."""

    command: Command
    given: tuple[Answer | RebalanserError, ...]
    request: Request
    sent_at: float
    reply: Reply | RebalanserError | None
    asked: Form
    """All but the reply."""
    form: Form

    @property
    def origin(self) -> str:
        """The incarnation that the command is for."""
        command = self.command
        return command.member.node if isinstance(command, Join) else command.session.node


@dataclass(frozen=True, slots=True)
class Late:
    """A request that nobody waits for any more."""

    origin: str
    request: Transaction | Any
    form: Form


@dataclass(frozen=True, slots=True)
class Call:
    """A handler that was called: by when it returns, and whether it has been entered."""

    handler: Handler
    owned: Mapping[Resource, Token]
    limit: float
    not_after: float = 0.0
    entered: bool = False
    asked: bool = False
    """OnStop was asked for before it was entered, so that it is not entered."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Host:
    """A host and its process; never changed once it is part of a state."""

    label: str
    generation: int = 0
    node: Node | None = None
    node_form: Form | None = None
    lanes: dict[Lane, RunningScript] = field(default_factory=dict)
    planning: MakePlan | None = None
    call: Call | None = None
    stop_by: float = math.inf
    """By when access has ended: while its node is out of touch and had a handler under way since."""
    watched: frozenset[Topic] = frozenset()
    notices: tuple[Noticed, ...] = ()
    late: tuple[Late, ...] = ()
    form: Form | None = None

    @property
    def stem(self) -> str:
        """What the ids of the process's incarnations begin with."""
        return f"{self.label}.{self.generation}"

    def copy(self) -> Host:
        """A host to be changed."""
        return replace(self, lanes=dict(self.lanes), form=None)

    def describe(self) -> Form:
        """The form of all that it is made of."""
        return form_of(
            (
                self.label,
                self.generation,
                self.node_form,
                [self.lanes[lane].form for lane in Lane if lane in self.lanes],
                self.planning is not None,
                self.call,
                self.stop_by,
                sorted(map(repr, self.watched)),
                self.notices,
                [late.form for late in self.late],
            )
        )


@dataclass(slots=True, eq=False, weakref_slot=True)
class Stored:
    """What the registry holds; never changed once it is part of a state."""

    items: Mapping[str, KeyValue]
    leases: Mapping[int, Any]
    revision: int
    last_lease: int
    gone: Mapping[str, int]
    """The revisions at which keys were deleted that a watch may ask for."""
    form: Form | None = None

    def describe(self) -> Form:
        """The form of all that it is made of."""
        leases = {lease: held.ends_at for lease, held in self.leases.items()}
        return form_of((self.items, leases, self.revision, self.last_lease, self.gone))


class Access(NamedTuple):
    """One process's access to a resource. ``stuck``: OnStop raised, so it lasts until the lease ends."""

    resource: Resource
    host: int
    token: Token
    stuck: bool = False


class State(NamedTuple):
    """A state of the group, with what the oracle knows: accesses, and who entered each resource last."""

    now: float
    hosts: tuple[Host, ...]
    stored: Stored
    accesses: tuple[Access, ...] = ()
    entered: tuple[tuple[Resource, Token, str], ...] = ()


class _Store(MemoryStore):
    """The memory store; a lease ends when a step says so.

    A renewal and its proof are two steps, so that others come between them.
    """

    proves_renewals = False

    def __init__(self, clock: _Clock) -> None:
        super().__init__(clock, max_history=1)
        self.changes: list[Changed] = []

    def expire(self) -> None:
        """Leave the leases alone: that one is over may be noticed late."""

    def _committed(self, changes: tuple[Changed, ...]) -> None:
        self.changes += changes

    def put_back(self, stored: Stored) -> None:
        """Hold this, and forget what else there was."""
        self.changes.clear()
        self._last_lease = stored.last_lease
        self.load(stored.items.values(), _without_keys(stored.leases), stored.revision)

    def taken(self, gone: Mapping[str, int]) -> Stored:
        """What is held."""
        items = {item.key: item for item in self.items()}
        return Stored(items, _without_keys(self._leases), self._revision, self._last_lease, gone)


def _without_keys(leases: Mapping[int, Any]) -> dict[int, Any]:
    return {lease: replace(held, keys=set()) for lease, held in leases.items()}


class _Clock:
    """The time of the step that is being taken."""

    def __init__(self) -> None:
        self.at = FIRST_INSTANT

    def now(self) -> float:
        """Seconds."""
        return self.at

    wall = now


class _Moved(NamedTuple):
    """What a step made of a host, and what it concerns beside the host."""

    host: Host
    opened: Mapping[Topic, int]
    lost: Session | None
    """The session of which the node was told that it is gone."""


class _Executed(NamedTuple):
    stored: Stored
    reply: Reply | RebalanserError
    changes: tuple[Changed, ...]


class _Moving:
    """One host's step: events given to the node, and what its effects change."""

    def __init__(self, model: Model, host: Host, now: float) -> None:
        self._model = model
        self.host = host.copy()
        self._now = now
        self._events: list[Event] = []
        self.opened: dict[Topic, int] = {}
        self.lost: Session | None = None
        if host.node is not None:
            self.host.node = clone(host.node)

    def moved(self) -> _Moved:
        """The host as the step leaves it."""
        host = self.host
        if host.node is not None:
            host.node_form = form_of(host.node)
        return _Moved(self._model.known(host), self.opened, self.lost)

    def begin(self) -> None:
        """A process starts."""
        host = self.host
        host.generation += 1
        host.node = self._model.make_node(host)
        self.handle(Start())

    def end(self) -> None:
        """The process is no more; what it sent may still be carried out."""
        host = self.host
        for running in host.lanes.values():
            if running.reply is None:
                self.come_late(running)
        host.lanes.clear()
        host.node = host.node_form = host.planning = host.call = None
        host.stop_by, host.watched, host.notices = math.inf, frozenset(), ()
        self.opened.clear()

    def come_late(self, running: RunningScript) -> None:
        """Nobody waits for a request any more. What only reads has no effect then."""
        request = running.request
        if isinstance(request, KeepAlive):
            request = KeepAlive(request.lease)
        if isinstance(request, Transaction) and not request.writes:
            return
        form = form_of((running.origin, request))
        late = (*self.host.late, Late(running.origin, request, form))
        self.host.late = tuple(sorted(late, key=lambda each: each.form.template))

    def handle(self, event: Event) -> None:
        """Give the node an event, and carry out all that comes of it."""
        self._events.append(event)
        while self._events and self.host.node is not None:
            for effect in self.host.node.handle(self._events.pop(0), self._now):
                match effect:
                    case Perform(command):
                        self.run_script(command, ())
                    case MakePlan():
                        self.host.planning = effect
                    case CallStart() | CallStop():
                        self._call(effect)
                    case AskStop(resources):
                        self._ask(resources)
                    case Watch(topics):
                        self._watch(topics)
                    case Finished():
                        self.end()
                        return
                    case _:
                        pass
            self._bound_handlers(self.host.node)

    def run_script(
        self, command: Command, given: tuple[Answer | RebalanserError, ...], known: Form | None = None
    ) -> None:
        """Go on with a script, given all that it was given so far; ``known`` is the form of those."""
        came = self._model.go_on(command, given)
        if isinstance(came, _Ended):
            self.host.lanes.pop(command.lane, None)
            if isinstance(came.outcome, SessionLost) and not isinstance(command, Join):
                self.lost = command.session
            self._events.append(Answered(command, came.outcome))
        else:
            form = form_of((known or command, self._now))
            self.host.lanes[command.lane] = RunningScript(command, given, came, self._now, None, form, form)

    def go_on(self, running: RunningScript, answer: Answer | RebalanserError) -> None:
        """Give a script its next answer."""
        lost = isinstance(answer, OutcomeUnknown)
        known = form_of((running.asked, "lost")) if lost else running.form
        self.run_script(running.command, (*running.given, answer), known)
        if self._events:
            self.handle(self._events.pop())

    def _call(self, effect: CallStart | CallStop) -> None:
        if self.host.call is not None:
            raise InternalError(f"{effect} while {self.host.call} is under way")
        if isinstance(effect, CallStart):
            limit = self._now + TIMINGS.start_timeout_s
            self.host.call = Call(Handler.START, effect.owned, limit, effect.not_after)
        else:
            limit = self._now + TIMINGS.stop_timeout_s
            self.host.call = Call(Handler.STOP, dict.fromkeys(effect.resources, 0), limit, entered=True)

    def _ask(self, resources: frozenset[Resource]) -> None:
        call = self.host.call
        if call is not None and not call.entered and not resources.isdisjoint(call.owned):
            self.host.call = replace(call, asked=True)

    def _bound_handlers(self, node: Node) -> None:
        """Out of touch, what runs and the OnStop that follows have one limit together (RB-21)."""
        host = self.host
        if not node.isolated:
            host.stop_by = math.inf
        elif host.call is not None and host.stop_by == math.inf:
            host.stop_by = self._now + TIMINGS.stop_timeout_s

    def call_ends(self, error: str | None = None, refused: bool = False) -> None:
        """A handler returns, raises, or is not entered."""
        call, self.host.call = self.host.call, None
        if call is None:
            raise InternalError("no handler is under way")
        self.handle(HandlerReturned(call.handler, error, refused))

    def _watch(self, topics: Mapping[Topic, int]) -> None:
        self.opened = {topic: since for topic, since in self.opened.items() if topic in topics}
        self.opened |= {topic: since for topic, since in topics.items() if topic not in self.host.watched}
        self.host.watched = frozenset(topics)


class _Ended(NamedTuple):
    outcome: Outcome


def _is_void(request: Request, stored: Stored) -> bool:
    """True if a late request will never have an effect: what it depends on is gone, and never comes back."""
    match request:
        case KeepAlive(lease) | Revoke(lease):
            return lease not in stored.leases
        case Transaction(guards, _, otherwise):
            return any(_is_past(guard, stored) for guard in guards) and not Transaction((), otherwise).writes
        case _:
            return False


def _is_past(guard: Guard, stored: Stored) -> bool:
    entry = stored.items.get(guard.key)
    match guard:
        case Created(revision=revision):
            return entry is None or entry.create_revision != revision
        case Unchanged(revision=revision):
            return entry is None or entry.mod_revision != revision
        case Absent():
            return False


def _first_of_each(each: Sequence[object]) -> list[int]:
    """Where each of these is for the first time."""
    return [number for number, value in enumerate(each) if value not in each[:number]]


class Model:
    """The steps that can be taken in each state, and what each of them makes of it."""

    def __init__(self) -> None:
        self.keys = GroupKeys("explored", "group")
        self.translation = Translation(self.keys, MEMORY_CAPABILITIES)
        self._clock = _Clock()
        self._store = _Store(self._clock)
        self._hosts: WeakValueDictionary[Form, Host] = WeakValueDictionary()
        self._contents: WeakValueDictionary[Form, Stored] = WeakValueDictionary()
        self._moves: dict[Any, Any] = {}
        self._targets: dict[Topic, Any] = {}

    def first(self) -> State:
        """Two resources, and no process."""
        empty = Stored({}, {}, FIRST_REVISION, 0, {})
        puts = [Put(self.keys.resource(name), values.dump_resource(ResourceSpec(name))) for name in RESOURCES]
        executed = self._carry_out(empty, Transaction(then=tuple(puts)), FIRST_INSTANT)
        hosts = (self.known(Host(LABELS[0])), self.known(Host(LABELS[1])))
        return State(FIRST_INSTANT, hosts, executed.stored)

    def make_node(self, host: Host) -> Node:
        """The core of a new process."""
        return Node(Member(node=host.stem, label=host.label), TIMINGS, solve)

    def known(self, host: Host) -> Host:
        """The one host object of this form."""
        host.form = form = host.describe()
        return self._hosts.setdefault(form, host)

    def _known_contents(self, stored: Stored) -> Stored:
        stored.form = form = stored.describe()
        return self._contents.setdefault(form, stored)

    def digest(self, state: State) -> bytes:
        """What is equal for states with the same future; see the module's documentation."""
        parts = [host.form or host.describe() for host in state.hosts]
        parts.append(state.stored.form or state.stored.describe())
        parts.append(self._once((state.accesses, state.entered), lambda: form_of(state[3:])))
        revisions = [revision for part in parts for revision in part.revisions]
        ranks: dict[int, int] = {}
        rank, before = 0, 0
        for revision in sorted(set(revisions)):
            rank += min(revision - before, 2)
            ranks[revision] = rank
            before = revision
        instants = [instant - state.now for part in parts for instant in part.instants]
        digest = blake2b(b"".join(part.template for part in parts), digest_size=16)
        digest.update(struct.pack(f"{len(revisions)}I", *map(ranks.__getitem__, revisions)))
        digest.update(struct.pack(f"{len(instants)}d", *instants))
        return digest.digest()

    def go_on(self, command: Command, given: Sequence[Answer | RebalanserError]) -> Request | _Ended:
        """Replay a command's script: its next request, or what came of it."""
        script = self.translation.script(command)
        try:
            request = next(script)
            for answer in given:
                if isinstance(answer, RebalanserError):
                    request = script.throw(type(answer)(*answer.args))
                else:
                    request = script.send(answer)
        except StopIteration as stop:
            return _Ended(stop.value)
        except InternalError:
            raise
        except RebalanserError as error:
            return _Ended(failure(error))
        return request

    def actions(self, state: State, faults: bool = True) -> list[Action]:
        """The steps that can be taken, in an order that is always the same."""
        found = [action for host in range(len(state.hosts)) for action in self._of_host(state, host, faults)]
        for lease, held in state.stored.leases.items():
            if held.ends_at <= state.now:
                found.append(Action(Kind.LEASE_ENDS, which=lease))
        if self._next_instant(state) is not None:
            found.append(Action(Kind.TIME))
        return found

    def _of_host(self, state: State, index: int, faults: bool) -> Iterator[Action]:
        host = state.hosts[index]
        if host.node is None:
            yield Action(Kind.START, index)
        for number, lane in enumerate(Lane):
            if lane in host.lanes:
                sent = host.lanes[lane].reply is None
                yield Action(Kind.EXECUTE if sent else Kind.REPLY, index, number)
        if host.call is not None:
            yield Action(Kind.RETURN if host.call.entered else Kind.ENTER, index)
        if host.planning is not None:
            yield Action(Kind.PLAN, index)
        for number in _first_of_each([notice.topic for notice in host.notices]):
            yield Action(Kind.NOTICE, index, number)
        if faults:
            yield from self._faults_of_host(host, index)

    def _faults_of_host(self, host: Host, index: int) -> Iterator[Action]:
        for number, lane in enumerate(Lane):
            if lane in host.lanes:
                sent = host.lanes[lane].reply is None
                yield Action(Kind.GIVE_UP if sent else Kind.LOSE_REPLY, index, number)
        if host.call is not None and host.call.entered and host.call.owned:
            yield Action(Kind.RAISE, index)
        for number in _first_of_each([notice.topic for notice in host.notices]):
            yield Action(Kind.LOSE_NOTICE, index, number)
        for number in _first_of_each([late.form for late in host.late]):
            yield Action(Kind.LATE, index, number)
        if host.node is not None:
            yield Action(Kind.STOP, index)
            yield Action(Kind.CRASH, index)

    def _next_instant(self, state: State) -> float | None:
        """The next instant at which something is due; None while a handler has to end first."""
        limits = [min(host.call.limit, host.stop_by) for host in state.hosts if host.call is not None]
        if any(limit <= state.now for limit in limits):
            return None
        wakeups = [host.node.next_wakeup for host in state.hosts if host.node is not None]
        leases = [held.ends_at for held in state.stored.leases.values() if held.ends_at > state.now]
        due = [*limits, *leases, *(max(at, state.now) for at in wakeups if at is not None)]
        return min(due, default=None)

    def after(self, state: State, action: Action) -> State:
        """The state that a step leads to.

        Raises:
            Violation: the step breaks a rule.
        """
        try:
            if action.kind is Kind.TIME:
                return self._passed(state)
            if action.kind is Kind.LEASE_ENDS:
                return self._lease_ended(state, action.which)
            if action.kind in (Kind.EXECUTE, Kind.LATE):
                return self._executed(state, action)
            return self._moved(state, action)
        except InternalError as error:
            raise Violation("internal", str(error)) from error

    def _once(self, key: Any, work_out: Callable[[], Any]) -> Any:
        """Work out what a step makes of one host or of the registry, unless that is remembered."""
        if key not in self._moves:
            if len(self._moves) >= _MAX_MEMORY:
                self._moves.clear()
            self._moves[key] = work_out()
        return self._moves[key]

    def _passed(self, state: State) -> State:
        now = self._next_instant(state)
        if now is None:
            raise InternalError("time cannot pass")
        state = state._replace(now=now)
        for index, host in enumerate(state.hosts):
            wakeup = host.node.next_wakeup if host.node is not None else None
            if wakeup is not None and wakeup <= now:
                state = self._with_moved(state, index, self._move(host, Action(Kind.TIME), now))
        return state

    def _move(self, host: Host, action: Action, now: float) -> _Moved:
        key = (host, action.kind, action.which, now)
        moved: _Moved = self._once(key, lambda: self._work_out(host, action, now))
        return moved

    def _work_out(self, host: Host, action: Action, now: float) -> _Moved:
        moving = _Moving(self, host, now)
        match action.kind:
            case Kind.START:
                moving.begin()
            case Kind.CRASH:
                moving.end()
            case Kind.TIME | Kind.STOP:
                moving.handle(Wakeup() if action.kind is Kind.TIME else Stop())
            case Kind.RETURN:
                moving.call_ends()
            case Kind.RAISE:
                moving.call_ends(error="the application raised")
            case Kind.ENTER:
                self._enter(moving, host, now)
            case Kind.PLAN if host.node is not None and host.planning is not None:
                moving.host.planning = None
                moving.handle(host.node.make_plan(host.planning))
            case Kind.NOTICE | Kind.LOSE_NOTICE:
                notices = host.notices
                moving.host.notices = (*notices[: action.which], *notices[action.which + 1 :])
                if action.kind is Kind.NOTICE:
                    moving.handle(notices[action.which])
            case _:
                self._answer(moving, host, action)
        return moving.moved()

    def _enter(self, moving: _Moving, host: Host, now: float) -> None:
        if self.refuses(host, now):
            moving.call_ends(refused=True)
        elif host.call is not None:
            moving.host.call = replace(host.call, entered=True)

    @staticmethod
    def refuses(host: Host, now: float) -> bool:
        """True if it is too late to enter OnStart, or OnStop was asked for meanwhile."""
        return host.call is not None and (host.call.asked or now >= host.call.not_after)

    def _answer(self, moving: _Moving, host: Host, action: Action) -> None:
        running = host.lanes[tuple(Lane)[action.which]]
        reply: Reply | RebalanserError | None = running.reply
        if reply is None:
            moving.come_late(running)
        if reply is None or action.kind is Kind.LOSE_REPLY:
            reply = OutcomeUnknown("no answer in time")
        moving.go_on(
            running,
            reply if isinstance(reply, RebalanserError) else Answer(reply, running.sent_at),
        )

    def _moved(self, state: State, action: Action) -> State:
        index, host = action.host, state.hosts[action.host]
        moved = self._move(host, action, state.now)
        state = self._judge_move(state, action)
        return self._with_moved(state, index, moved)

    def _with_moved(self, state: State, index: int, moved: _Moved) -> State:
        host = moved.host
        if moved.lost is not None:
            node = state.stored.items.get(self.keys.node(moved.lost.node))
            if node is not None and node.create_revision == moved.lost.created:
                raise Violation("RB-22", f"{moved.lost.node} is told that its session is gone, which lives")
        if moved.opened:
            notices = [n for topic, since in moved.opened.items() for n in self._past(state, topic, since)]
            if notices:
                host = self._noticing(host, notices)
        if host.node is None:
            accesses = tuple(access for access in state.accesses if access.host != index)
            state = state._replace(accesses=accesses)
        hosts = (host, state.hosts[1]) if index == 0 else (state.hosts[0], host)
        state = state._replace(hosts=hosts)
        self._judge_deadline(state, host)
        return state

    def _past(self, state: State, topic: Topic, since: int) -> list[Noticed]:
        """What a watch that begins now is told of what changed since a revision."""
        stored = state.stored
        changes = [Changed(i.key, i.mod_revision, i.value) for i in stored.items.values()]
        changes += [Changed(key, revision, None) for key, revision in stored.gone.items()]
        return self._notices(topic, [change for change in changes if change.revision >= since])

    def _notices(self, topic: Topic, changes: Iterable[Changed]) -> list[Noticed]:
        if topic not in self._targets:
            self._targets[topic] = self.translation.targets(topic)
        targets = self._targets[topic]
        covered = [change for change in changes if any(target.covers(change.key) for target in targets)]
        return self.translation.notices(topic, covered) if covered else []

    def _noticing(self, host: Host, notices: Iterable[Noticed]) -> Host:
        host = host.copy()
        host.notices = tuple(sorted((*host.notices, *notices), key=lambda notice: repr(notice.topic)))
        return self.known(host)

    def _told(self, host: Host, changes: tuple[Changed, ...]) -> Host:
        """A host whose watches are told what changed."""

        def tell() -> Host:
            topics = sorted(host.watched, key=repr)
            notices = [notice for topic in topics for notice in self._notices(topic, changes)]
            return self._noticing(host, notices) if notices else host

        told: Host = self._once((host, changes), tell) if host.watched and changes else host
        return told

    def _without_void(self, host: Host, stored: Stored) -> Host:
        kept = tuple(late for late in host.late if not _is_void(late.request, stored))
        if kept == host.late:
            return host
        host = host.copy()
        host.late = kept
        return self.known(host)

    def _carry_out(self, stored: Stored, request: Request, now: float) -> _Executed:
        self._clock.at = now
        self._store.put_back(stored)
        reply: Reply | RebalanserError
        try:
            reply = self._store.execute(request)
        except InternalError:
            raise
        except RebalanserError as error:
            reply = error
        return self._taken(stored, reply)

    def _taken(self, before: Stored, reply: Reply | RebalanserError) -> _Executed:
        changes = tuple(self._store.changes)
        watched = (self.keys.nodes, self.keys.removals, self.keys.acks)
        gone = {c.key: c.revision for c in changes if c.value is None and c.key.startswith(watched)}
        stored = self._known_contents(self._store.taken({**before.gone, **gone}))
        return _Executed(stored, reply, changes)

    def _executed(self, state: State, action: Action) -> State:
        host = state.hosts[action.host]
        key = (state.stored, host, action, state.now)
        running = None
        if action.kind is Kind.LATE:
            late = host.late[action.which]
            origin, request = late.origin, late.request
        else:
            running = host.lanes[tuple(Lane)[action.which]]
            origin, request = running.origin, running.request

        def execute() -> tuple[_Executed, Host]:
            executed = self._carry_out(state.stored, request, state.now)
            after = host.copy()
            if running is None:
                after.late = (*host.late[: action.which], *host.late[action.which + 1 :])
            else:
                form = form_of((running.asked, executed.reply))
                after.lanes[running.command.lane] = replace(running, reply=executed.reply, form=form)
            return executed, self.known(after)

        executed, after = self._once(key, execute)
        return self._changed(state, executed, {action.host: after}, origin)

    def _lease_ended(self, state: State, lease: int) -> State:
        def end() -> _Executed:
            self._store.put_back(state.stored)
            self._store.end(lease)
            return self._taken(state.stored, InternalError("nobody is answered"))

        executed = self._once((state.stored, lease), end)
        return self._changed(state, executed, {}, None)

    def _changed(
        self,
        state: State,
        executed: _Executed,
        changed: Mapping[int, Host],
        origin: str | None,
    ) -> State:
        """The registry is changed by a request, or by the end of a lease."""
        hosts = [changed.get(index, host) for index, host in enumerate(state.hosts)]
        after = state._replace(
            hosts=(self._told(hosts[0], executed.changes), self._told(hosts[1], executed.changes)),
            stored=executed.stored,
        )
        after = after._replace(hosts=tuple(self._without_void(host, after.stored) for host in after.hosts))
        return self._judge_changes(state, after, executed.changes, origin) if executed.changes else after

    def _judge_changes(
        self, before: State, after: State, changes: tuple[Changed, ...], origin: str | None
    ) -> State:
        keys, stored = self.keys, before.stored
        for change in changes:
            entry = stored.items.get(change.key)
            if change.key.startswith(keys.barriers):
                resource = keys.resource_of_barrier(change.key)
                after = self._judge_barrier(after, resource, entry, change, origin)
            elif change.key.startswith(keys.nodes):
                node = keys.name(change.key, keys.nodes)
                if change.value is not None and entry is not None:
                    raise Violation("RB-4", f"{node} was registered over itself")
                if change.value is None and origin not in (None, node):
                    raise Violation("RB-4", f"{origin} removed the member {node}")
            elif change.key == keys.term:
                self._judge_term(stored, entry, after.stored.items[change.key], origin)
        if any(c.key == keys.header or c.key.startswith(keys.shares) for c in changes):
            self._judge_header(stored, after.stored, origin)
        return after

    def _judge_barrier(
        self, state: State, resource: Resource, entry: KeyValue | None, change: Changed, origin: str | None
    ) -> State:
        if change.value is not None:
            if entry is not None:
                raise Violation("RB-1", f"the barrier of {resource} was overwritten by {origin}")
            if change.value.decode() != origin:
                raise Violation("RB-15", f"{origin} added a barrier of {resource} for another node")
            return state
        if entry is None:
            raise InternalError(f"{change.key} was deleted and was not there")
        holder = entry.value.decode()
        if origin not in (None, holder):
            raise Violation("RB-15", f"{origin} removed the barrier of {resource}, which was {holder}'s")
        for access in state.accesses:
            if (access.resource, access.token) != (resource, entry.create_revision):
                continue
            if origin is not None:
                raise Violation("RB-11", f"{holder} removed the barrier of {resource} while it accessed it")
            if not access.stuck:
                raise Violation("RB-21", f"{holder} accesses {resource} and its lease has ended")
            state = state._replace(accesses=tuple(each for each in state.accesses if each != access))
        return state

    def _judge_term(self, stored: Stored, before: KeyValue | None, now: KeyValue, origin: str | None) -> None:
        leadership = values.load_leadership(now)
        known = values.load_leadership(before) if before is not None else None
        term, leader = (known.term, known.leader) if known is not None else (0, "")
        if not leadership.leader and (origin, leadership.term) == (leader, term):
            return
        if leadership.term != term + 1 or leadership.leader != origin:
            raise Violation("RB-5", f"{origin} began term {leadership.term} after term {term}")
        if self.keys.node(leader) in stored.items:
            raise Violation("RB-5", f"{origin} took the term from {leader}, which lives")

    def _judge_header(self, before: Stored, now: Stored, origin: str | None) -> None:
        entry, known = now.items.get(self.keys.header), before.items.get(self.keys.header)
        if entry is None:
            return
        header = values.load_header(entry)
        if known != entry:
            leadership = values.load_leadership(now.items[self.keys.term])
            if (origin, header.term) != (leadership.leader, leadership.term):
                raise Violation(
                    "RB-6",
                    f"{origin} published version {header.version} in term {header.term}; "
                    f"{leadership.leader or 'nobody'} leads term {leadership.term}",
                )
            if known is not None and header.version <= values.load_header(known).version:
                raise Violation("RB-9", f"version {header.version} was published twice")
        self._judge_commit(before, now, header)
        self._judge_shares(now, header)

    def _judge_commit(self, before: Stored, now: Stored, header: Header) -> None:
        """Only a new header changes what members are to own, and only to shares of its own version."""
        entry = before.items.get(self.keys.header)
        known = self._allocated(before, values.load_header(entry)) if entry is not None else {}
        allowed = {header.version} if entry != now.items[self.keys.header] else set()
        for node, version in self._allocated(now, header).items():
            if version != known.get(node) and version not in allowed:
                raise Violation("RB-9", f"{node} has the share of version {version}, by no header")

    def _allocated(self, stored: Stored, header: Header) -> dict[str, int]:
        """Since which version the share of each member stands."""
        latest: dict[str, int] = {}
        for key in stored.items:
            if key.startswith(self.keys.shares):
                part = self.keys.share_part(key)
                if header.is_committed(part.version) and self.keys.node(part.node) in stored.items:
                    latest[part.node] = max(part.version, latest.get(part.node, 0))
        return latest

    def _judge_shares(self, stored: Stored, header: Header) -> None:
        owners: dict[Resource, str] = {}
        for node, version in self._allocated(stored, header).items():
            prefix = f"{self.keys.shares_of(node)}{version}/"
            parts = [item for key, item in sorted(stored.items.items()) if key.startswith(prefix)]
            for resource in values.load_share(version, parts).resources:
                if resource in owners:
                    raise Violation("RB-9", f"{resource} is given to {owners[resource]} and to {node}")
                owners[resource] = node

    def _judge_move(self, state: State, action: Action) -> State:
        host, call = state.hosts[action.host], state.hosts[action.host].call
        if call is None or action.kind not in (Kind.ENTER, Kind.RETURN, Kind.RAISE):
            return state
        if call.handler is Handler.START:
            if action.kind is Kind.ENTER and not self.refuses(host, state.now):
                for resource, token in sorted(call.owned.items()):
                    state = self._judge_start(state, action.host, resource, token)
            return state
        mine = [a for a in state.accesses if a.host == action.host and a.resource in call.owned]
        if len(mine) != len(call.owned):
            raise Violation("RB-22", f"{host.stem} stops {listed(call.owned)}, not all of which it started")
        kept = [access for access in state.accesses if access not in mine]
        if action.kind is Kind.RAISE:
            kept += [access._replace(stuck=True) for access in mine if self._holds(state, access)]
        return state._replace(accesses=tuple(sorted(kept)))

    def _holds(self, state: State, access: Access) -> bool:
        barrier = state.stored.items.get(self.keys.barrier(access.resource))
        return barrier is not None and barrier.create_revision == access.token

    def _judge_start(self, state: State, index: int, resource: Resource, token: Token) -> State:
        stem, access = state.hosts[index].stem, Access(resource, index, token)
        for other in state.accesses:
            if other.resource == resource:
                accessing = state.hosts[other.host].stem
                raise Violation("RB-1", f"{stem} starts {resource} while {accessing} accesses it")
        barrier = state.stored.items.get(self.keys.barrier(resource))
        if not self._holds(state, access) or barrier is None or not barrier.value.decode().startswith(stem):
            raise Violation("RB-12", f"{stem} starts {resource} without a barrier of its own")
        known = {name: (last, by) for name, last, by in state.entered}
        last, entered_by = known.get(resource, (0, ""))
        if token < last or (token == last and entered_by != stem):
            raise Violation("RB-12", f"{stem} starts {resource} with token {token} after {last}")
        return state._replace(
            accesses=tuple(sorted((*state.accesses, access))),
            entered=tuple((name, *told) for name, told in sorted({**known, resource: (token, stem)}.items())),
        )

    def _judge_deadline(self, state: State, host: Host) -> None:
        """A node counts on its lease for no longer than the registry keeps it."""
        node = host.node
        if node is None or node.deadline is None or node.session is None:
            return
        lease = state.stored.leases.get(node.session.lease)
        ends_at = lease.ends_at if lease is not None else state.now
        if node.deadline > max(ends_at, state.now):
            late_s = node.deadline - ends_at
            raise Violation("RB-21", f"{node.session.node} counts on its lease for {late_s:g} s too long")

    def settled(self, state: State) -> bool:
        """True if both nodes are settled and own their fair share of the resources."""
        owners = Counter(access.host for access in state.accesses)
        return (
            all(host.node is not None and host.node.settled for host in state.hosts)
            and sorted(access.resource for access in state.accesses) == sorted(RESOURCES)
            and all(owners[index] == 1 for index in range(len(LABELS)))
        )

    def fair_steps(
        self, state: State, until: Callable[[State], bool] | None = None, idle: int = -1, cut_off: int = -1
    ) -> Iterator[Action]:
        """Steps none of which is a fault, each before it is taken, until ``until`` holds.

        Without ``until`` what is late is carried out first, and they go on until the group has settled. No
        process starts on the host ``idle``; what the host ``cut_off`` asks the registry for is given up.

        Raises:
            Violation: a rule is broken, or it doesn't come to that.
        """
        for _ in range(_MAX_STEPS):
            late = [] if until else [index for index, host in enumerate(state.hosts) if host.late]
            if not late and (until or self.settled)(state):
                return
            actions = self.actions(state, faults=False)
            action = next(action for action in actions if action != Action(Kind.START, idle))
            if late:
                action = Action(Kind.LATE, late[0])
            elif action.kind is Kind.EXECUTE and action.host == cut_off:
                action = action._replace(kind=Kind.GIVE_UP)
            yield action
            state = self.after(state, action)
        raise Violation("RB-3", f"the group has not settled after {_MAX_STEPS} steps without a fault")


def _owns_all(host: int) -> Callable[[State], bool]:
    return lambda state: [access.host for access in state.accesses] == [host] * len(RESOURCES)


@dataclass(frozen=True, slots=True)
class Story:
    """A run in which nothing fails but what it is about: both join, and more from when they have settled."""

    name: str
    begins: tuple[Action, ...] = ()
    idle: int = -1
    cut_off: int = -1

    def steps(self, model: Model) -> Iterator[Action]:
        """Its steps from ``Model.first`` on, each before it is taken.

        Raises:
            Violation: a rule is broken.
        """
        state = model.first()
        away = max(self.idle, self.cut_off)
        parts: list[Callable[[State], Iterable[Action]]] = [model.fair_steps]
        if away >= 0:
            parts += [
                lambda _: self.begins,
                lambda at: model.fair_steps(at, _owns_all(1 - away), self.idle, self.cut_off),
                model.fair_steps,
            ]
        for part in parts:
            for action in part(state):
                yield action
                state = model.after(state, action)


STORIES: Final = (
    Story("both join"),
    Story("the leader dies", (Action(Kind.CRASH, 0),), idle=0),
    Story("the follower dies", (Action(Kind.CRASH, 1),), idle=1),
    Story("the leader is stopped", (Action(Kind.STOP, 0),), idle=0),
    Story("the follower is stopped", (Action(Kind.STOP, 1),), idle=1),
    Story("the leader is cut off", cut_off=0),
    Story("the follower is cut off", cut_off=1),
)
"""Where the search begins: in every state of these."""


@dataclass(frozen=True, slots=True)
class Found:
    """A broken rule, and the steps to it from a state of a story."""

    rule: str
    sentence: str
    steps: tuple[Action, ...]
    lines: tuple[str, ...]
    """What happened, to be read."""


@dataclass(slots=True)
class Report:
    """What a search has tried, and what it found."""

    roots: int = 0
    states: int = 0
    steps: int = 0
    complete: int = 0
    """Every sequence of this many steps from every root was tried."""
    deepest: int = 0
    settled: int = 0
    """States from which the group was seen to settle."""
    kinds: Counter[Kind] = field(default_factory=Counter)
    found: Found | None = None


class Search:
    """Looks for a broken rule, breadth first to a depth and then depth first, until there are enough states.

    ``stories`` are where it begins. The group must settle from about ``samples`` of the states.
    """

    def __init__(
        self,
        states: int,
        depth: int,
        stories: Sequence[Story] = STORIES,
        samples: int = SAMPLES,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._states = states
        self._depth = depth
        self._stories = stories
        self._sampled = max(1, states // max(1, samples))
        self._progress = progress
        self._model = Model()
        self._random = Random(0)
        self._seen: set[bytes] = set()
        self._roots: list[tuple[Story, int, State]] = []
        self._parents = array("L")
        self._which = array("H")
        self.report = Report()

    def run(self) -> Report:
        """Search, and say what was tried."""
        try:
            rim = self._breadth_first(self._begin())
            self._depth_first(rim)
        except _Broken as broken:
            self.report.found = broken.found
        self.report.states = len(self._seen)
        return self.report

    def _begin(self) -> list[_Reached]:
        """The states of the stories."""
        rim: list[_Reached] = []
        for story in self._stories:
            state, taken = self._model.first(), []
            try:
                self._note_root(story, 0, state, rim)
                for number, action in enumerate(story.steps(self._model), start=1):
                    taken.append(action)
                    state = self._model.after(state, action)
                    self._note_root(story, number, state, rim)
            except Violation as violation:
                raise _Broken(self._found(0, taken, violation)) from violation
        self.report.roots = len(rim)
        return rim

    def _note_root(self, story: Story, number: int, state: State, rim: list[_Reached]) -> None:
        digest = self._model.digest(state)
        if digest not in self._seen:
            self._seen.add(digest)
            rim.append(_Reached(state, len(self._parents), False))
            self._parents.append(len(self._parents))
            self._which.append(0)
            self._roots.append((story, number, state))

    def _breadth_first(self, rim: list[_Reached]) -> list[_Reached]:
        for depth in range(1, self._depth + 1):
            beyond: list[_Reached] = []
            for reached in rim:
                beyond += self._expand(reached)
                if len(self._seen) >= self._states:
                    return beyond
            rim = beyond
            self.report.complete = self.report.deepest = depth
        return rim

    def _depth_first(self, rim: list[_Reached]) -> None:
        self._random.shuffle(rim)
        starts = rim[: max(1, (self._states - len(self._seen)) // _LEAST_SHARE)]
        for number, start in enumerate(starts):
            ends = len(self._seen) + (self._states - len(self._seen)) // (len(starts) - number)
            stack = [(start, self.report.complete)]
            while stack and len(self._seen) < ends:
                reached, depth = stack.pop()
                if depth < _MAX_DEPTH:
                    self.report.deepest = max(self.report.deepest, depth + 1)
                    beyond = sorted(self._expand(reached), key=self._preference)
                    stack += [(each, depth + 1) for each in beyond]

    def _preference(self, reached: _Reached) -> float:
        return self._random.random() * (_FAULTS_COME_LAST if reached.by_fault else 1.0)

    def _expand(self, reached: _Reached) -> list[_Reached]:
        """Take every step from a state; the states that were not seen before."""
        model, report, beyond = self._model, self.report, []
        for number, action in enumerate(model.actions(reached.state)):
            report.steps += 1
            report.kinds[action.kind] += 1
            taken = [action]
            try:
                after = model.after(reached.state, action)
                digest = model.digest(after)
                if digest in self._seen:
                    continue
                self._seen.add(digest)
                if int.from_bytes(digest[:8], "big") % self._sampled == 0:
                    taken += [Action(Kind.NOTHING_FAILS)]
                    for step in model.fair_steps(after):
                        taken.append(step)
                    report.settled += 1
            except Violation as violation:
                raise _Broken(self._found(reached.number, taken, violation)) from violation
            beyond.append(_Reached(after, len(self._parents), action.kind in _FAULTS))
            self._parents.append(reached.number)
            self._which.append(number)
        self._progress(len(self._seen))
        return beyond

    def _found(self, index: int, last: list[Action], violation: Violation) -> Found:
        """The steps to a broken rule, from a state of a story."""
        numbers = []
        while index >= len(self._roots):
            numbers.append(self._which[index])
            index = self._parents[index]
        story, at, first = self._roots[index]
        steps, state = [], first
        for number in reversed(numbers):
            steps.append(self._model.actions(state)[number])
            state = self._model.after(state, steps[-1])
        steps += last
        lines = [f"story: {story.name}, after {at} steps", *tell(self._model, first, steps), str(violation)]
        return Found(violation.rule, str(violation), tuple(steps), tuple(lines))


class _Reached(NamedTuple):
    state: State
    number: int
    by_fault: bool


class _Broken(Exception):
    """Ends a search."""

    def __init__(self, found: Found) -> None:
        super().__init__(found.sentence)
        self.found = found


def tell(model: Model, state: State, steps: Iterable[Action]) -> Iterator[str]:
    """What is under way in a state, and what happens in steps from there: a line each, to be read.

    The last step may break a rule.
    """
    for host in state.hosts:
        yield _line(state, host.stem, _under_way(state, host))
    for action in steps:
        where = state.hosts[action.host].stem if action.host >= 0 else ""
        yield _line(state, where, _sentence(model, state, action))
        if action.kind is Kind.NOTHING_FAILS:
            continue
        try:
            after = model.after(state, action)
        except Violation:
            return
        for before, now in zip(state.hosts, after.hosts, strict=True):
            for consequence in _consequences(before, now):
                yield _line(after, now.stem, f"  {consequence}")
        state = after


def _line(state: State, where: str, sentence: str) -> str:
    return f"{state.now - FIRST_INSTANT:9.4f}  {where:<8}  {sentence}"


def _under_way(state: State, host: Host) -> str:
    if host.node is None:
        return "does not run"
    index = state.hosts.index(host)
    accessed = listed(access.resource for access in state.accesses if access.host == index)
    parts = [f"{host.node.membership}, {host.node.role}, accesses {accessed}"]
    for running in host.lanes.values():
        waits = "its request" if running.reply is None else "a reply"
        parts.append(f"{type(running.command).__name__} ({waits} is on the way)")
    if host.call is not None:
        parts.append(_called(host.call))
    if host.planning is not None:
        parts.append("plans")
    parts += [f"notice of {text(notice.topic)} on the way" for notice in host.notices]
    return "; ".join(parts)


def _called(call: Call) -> str:
    return f"{call.handler}({listed(call.owned)}) {'runs' if call.entered else 'is called'}"


def _consequences(before: Host, now: Host) -> Iterator[str]:
    for lane, running in now.lanes.items():
        earlier = before.lanes.get(lane)
        if earlier is None or earlier.command != running.command:
            yield f"sends {type(running.command).__name__}"
    if now.call is not None and (before.call is None or before.call.handler is not now.call.handler):
        yield _called(now.call)


def _sentence(model: Model, state: State, action: Action) -> str:
    prefix = model.keys.prefix
    if action.host < 0:
        return f"{action.kind}: lease {action.which}" if action.kind is Kind.LEASE_ENDS else str(action.kind)
    host = state.hosts[action.host]
    match action.kind:
        case Kind.EXECUTE | Kind.REPLY | Kind.GIVE_UP | Kind.LOSE_REPLY:
            running = host.lanes[tuple(Lane)[action.which]]
            sentence = f"{action.kind}: {type(running.command).__name__}"
            if action.kind is Kind.REPLY and running.reply is not None:
                return f"{sentence}: {reply_sentence(running.reply)}"
            return f"{sentence}: {request_sentence(running.request, prefix)}"
        case Kind.LATE:
            late = host.late[action.which]
            return f"{action.kind}, of {late.origin}: {request_sentence(late.request, prefix)}"
        case Kind.NOTICE | Kind.LOSE_NOTICE:
            return f"{action.kind}: {text(host.notices[action.which])}"
        case Kind.ENTER if model.refuses(host, state.now):
            return "on_start is not entered: too late"
        case Kind.ENTER | Kind.RETURN | Kind.RAISE if host.call is not None:
            return f"{action.kind}: {host.call.handler}({listed(host.call.owned)})"
        case _:
            return str(action.kind)


def _table(report: Report, seconds: float) -> Table:
    table = Table(title="exploration", show_header=False)
    rows = {
        "states of stories": report.roots,
        "distinct states": report.states,
        "steps": report.steps,
        "depth complete": report.complete,
        "deepest": report.deepest,
        "settled": report.settled,
        **{f"step: {kind}": report.kinds[kind] for kind in Kind if report.kinds[kind]},
        "states a second": round(report.states / max(seconds, 1e-9)),
        "violations": 0 if report.found is None else 1,
    }
    for name, value in rows.items():
        table.add_row(name, f"{value:,}")
    return table


def main(
    states: Annotated[int, typer.Option(min=1, help="How many distinct states to reach.")] = 1_000_000,
    depth: Annotated[int, typer.Option(min=0, help="How many steps from each root to try all of.")] = 4,
) -> None:
    """Try every order of events of two nodes with two resources, and check the rules in every step."""
    console = Console()
    columns = (TextColumn("states"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    began_at = time.monotonic()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("states", total=states)
        report = Search(states, depth, progress=lambda seen: bar.update(task, completed=seen)).run()
    console.print(_table(report, time.monotonic() - began_at))
    if report.found is not None:
        for line in report.found.lines:
            console.print(line, soft_wrap=True, markup=False, highlight=False)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
