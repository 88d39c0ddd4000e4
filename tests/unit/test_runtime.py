"""The engine and its parts, on a clock that moves only when it is told to."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rebalanser import Settings
from rebalanser.core.allocation import Allocation, AllocationProblem, solve
from rebalanser.core.group import (
    Accept,
    Answered,
    CallStart,
    CallStop,
    Fact,
    FactKind,
    Handler,
    HandlerReturned,
    MakePlan,
    Member,
    Node,
    Noticed,
    OnOverrun,
    PlanMade,
    Release,
    Report,
    ResourceSpec,
    Topic,
    TopicKind,
    Wakeup,
)
from rebalanser.core.group.messages import Alive, Failed, Heartbeat
from rebalanser.core.group.types import Fingerprint, Group, Session
from rebalanser.errors import InternalError, InvalidLoad
from rebalanser.observer import Observer
from rebalanser.registry import RegistryCoordinator
from rebalanser.runtime.command_thread import CommandThread
from rebalanser.runtime.handlers import MANY, HandlerRunner
from rebalanser.runtime.node_runner import Inbox, NodeRunner
from rebalanser.runtime.owned import AccessDeadline, Owned
from rebalanser.testing import FakeClock, MemoryRegistry, MemoryStore
from rebalanser.testing.waiting import PATIENCE_S

if TYPE_CHECKING:
    from rebalanser.core.group import Command
    from rebalanser.core.group.messages import Outcome

SETTINGS = Settings(lease_ttl_s=10.0, min_rebalance_interval_s=0.0)
BEAT = Heartbeat(Session("n", 1, 2))


class Clock(FakeClock):
    """A fake clock whose time is that of ``time.monotonic()`` too."""

    def to_monotonic(self, instant: float) -> float:
        return instant


class Story:
    """What happened, in order; lets a test wait for it."""

    def __init__(self) -> None:
        self.lines: list[object] = []
        self._more = threading.Condition()

    def add(self, line: object) -> None:
        with self._more:
            self.lines.append(line)
            self._more.notify_all()

    def wait_for(self, line: object, times: int = 1) -> None:
        with self._more:
            assert self._more.wait_for(lambda: self.lines.count(line) >= times, PATIENCE_S), self.lines[-20:]


class Handlers:
    """Handlers that are held until the test lets them go."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self.may_return = {name: threading.Event() for name in Handler}
        for event in self.may_return.values():
            event.set()
        self.owned: list[Owned] = []

    def start(self, owned: list[Owned]) -> None:
        self.owned = owned
        self._call(Handler.START, owned)

    def stop(self, owned: list[Owned]) -> None:
        self._call(Handler.STOP, owned)

    def _call(self, handler: Handler, owned: list[Owned]) -> None:
        self._story.add((handler, tuple(each.resource for each in owned)))
        assert self.may_return[handler].wait(PATIENCE_S)


class Severed(RegistryCoordinator):
    """A coordinator whose connection can be cut."""

    story: Story
    cut = False

    def perform(self, command: Command) -> Outcome:
        outcome = Failed("cut off") if self.cut else super().perform(command)
        self.story.add(type(outcome))
        return outcome


class FakeSwitch:
    """A dead man's switch that only remembers."""

    def __init__(self, story: Story) -> None:
        self.deadline: float | None = None
        self.closed = False
        self._story = story

    def arm(self, deadline: float) -> None:
        self.deadline = deadline
        self._story.add("armed")

    def disarm(self) -> None:
        self.deadline = None

    def close(self) -> None:
        self.disarm()
        self.closed = True


class Running:
    """An engine on a fake clock and a memory registry."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.clock = Clock()
        self.story = Story()
        self.handlers = Handlers(self.story)
        self.switch = FakeSwitch(self.story)
        self.settings = settings
        self.store = MemoryStore(self.clock)
        self.coordinator = Severed(MemoryRegistry(self.store), "root", "group", self.clock.now, 1.0)
        self.coordinator.story = self.story
        self.coordinator.put_resources([ResourceSpec("a")], lambda _done: None)
        self.facts: list[Fact] = []
        self.may_plan = threading.Event()
        self.may_plan.set()
        self.adopting_s = 0.0
        self.engine = NodeRunner(
            name="group",
            node=Node(Member("stem", "label"), settings.timings, self._solve, settings.node_options),
            coordinator=self.coordinator,
            handlers=self.handlers,
            clock=self.clock,
            tenure=AccessDeadline(self.clock),  # type: ignore[arg-type]
            observe=self._observe,
            switch=self.switch,
        )
        self.engine.start()

    def _solve(self, problem: AllocationProblem) -> Allocation:
        self.story.add("planning")
        self.may_plan.wait(PATIENCE_S)
        return solve(problem)

    def _observe(self, report: Report) -> None:
        for fact in report.facts():
            if fact.kind is FactKind.ALLOCATION_ADOPTED:
                self.clock.advance(self.adopting_s)
            self.facts.append(fact)
            self.story.add(fact.kind)

    def settle(self) -> None:
        """Wait until everything is done that there is to do, the acknowledgement too."""
        assert self.engine.wait(lambda snapshot: snapshot.settled, PATIENCE_S), self.story.lines
        self.story.wait_for(FactKind.ACKNOWLEDGED)

    def pass_s(self, seconds: float) -> None:
        """Let time pass, and have the engine notice."""
        self.clock.advance(seconds)
        self.engine._inbox.put(Wakeup())

    def beat(self) -> None:
        """Let one heartbeat pass and be answered."""
        before = self.story.lines.count(Alive)
        self.pass_s(self.settings.heartbeat_interval_s)
        self.story.wait_for(Alive, before + 1)

    def end(self) -> None:
        self.may_plan.set()
        self.coordinator.cut = False
        for event in self.handlers.may_return.values():
            event.set()
        self.engine.stop()
        assert self.engine.wait_finished(PATIENCE_S)


@pytest.fixture
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    made = Running(getattr(request, "param", SETTINGS))
    yield made
    made.end()


@pytest.mark.rule("RB-21", "RB-25")
def test_heartbeats_go_on_while_a_plan_is_made(running: Running) -> None:
    running.settle()
    running.may_plan.clear()
    planned = running.story.lines.count("planning")
    running.coordinator.put_resources([ResourceSpec("b")], lambda _done: None)
    running.story.wait_for("planning", planned + 1)
    for _ in range(4):
        running.beat()
    assert FactKind.ISOLATED not in running.story.lines
    running.may_plan.set()
    running.story.wait_for((Handler.START, ("b",)))


@pytest.mark.rule("RB-21")
@pytest.mark.parametrize("tenths", [0.99, 1.01])
def test_a_turn_of_over_a_tenth_of_the_margin_is_told_with_its_cause(running: Running, tenths: float) -> None:
    running.settle()
    limit_s = running.settings.timings.safety_margin_s / 10
    running.adopting_s = tenths * limit_s
    running.coordinator.put_resources([ResourceSpec("b")], lambda _done: None)
    running.story.wait_for((Handler.START, ("b",)))
    running.beat()
    slow = [fact for fact in running.facts if fact.kind is FactKind.LOOP_SLOW]
    assert len(slow) == (tenths > 1)
    for fact in slow:
        assert fact.value == pytest.approx(tenths * limit_s)
        assert fact.detail["cause"] == "Answered ReadShare ShareRead"
        assert fact.detail["limit_s"] == limit_s
        assert fact.detail["cpu_s"]


@pytest.mark.rule("RB-25")
@pytest.mark.lesson(5)
@pytest.mark.parametrize("running", [SETTINGS.model_copy(update={"start_timeout_s": 12.0})], indirect=True)
def test_heartbeats_go_on_while_a_handler_runs(running: Running) -> None:
    running.handlers.may_return[Handler.START].clear()
    running.story.wait_for((Handler.START, ("a",)))
    for _ in range(8):
        assert FactKind.HANDLER_OVERRAN not in running.story.lines
        running.beat()
    running.story.wait_for(FactKind.HANDLER_OVERRAN)
    (overran,) = (fact for fact in running.facts if fact.kind is FactKind.HANDLER_OVERRAN)
    assert overran.detail == {"handler": "on_start", "limit_s": 12.0}
    assert running.coordinator.read().holdings[0].resource == "a"
    assert running.handlers.owned[0].still_mine()
    assert FactKind.ISOLATED not in running.story.lines


@pytest.mark.rule("AU-7")
def test_of_the_loads_reported_within_a_second_the_latest_is_told(running: Running) -> None:
    running.settle()
    (owned,) = running.handlers.owned
    for load in (1, 2.5):
        owned.report_load(load)
    running.pass_s(1.0)
    running.story.wait_for(FactKind.LOAD_REPORTED)
    owned.report_load(3)
    running.pass_s(0.5)
    owned.report_load(0)
    running.pass_s(0.5)
    running.story.wait_for(FactKind.LOAD_REPORTED, 2)
    told = [fact for fact in running.facts if fact.kind is FactKind.LOAD_REPORTED]
    assert [(fact.resource, fact.token, fact.node, fact.value) for fact in told] == [
        ("a", owned.token, "stem-0", 2.5),
        ("a", owned.token, "stem-0", 0.0),
    ]
    assert all(fact.version == 1 and fact.term == 1 for fact in told)


@pytest.mark.rule("AU-7")
def test_a_load_of_what_was_given_up_is_not_told(running: Running) -> None:
    running.settle()
    (owned,) = running.handlers.owned
    running.coordinator.remove_resources(["a"], lambda _done: None)
    running.story.wait_for(FactKind.STOP_RETURNED)
    running.story.wait_for(FactKind.BARRIER_REMOVED)
    owned.report_load(1)
    assert running.engine._runner.taken_loads() == []


@pytest.mark.rule("AU-7")
@pytest.mark.parametrize("load", [-1, -0.001, float("nan"), float("inf")])
def test_a_load_that_is_none_is_refused(load: float) -> None:
    with pytest.raises(InvalidLoad, match="load of 'a' must be a number from 0 on, not"):
        owned_until(None, Clock()).report_load(load)


@pytest.mark.rule("AU-7")
def test_more_loads_than_fit_at_once_are_told_in_turns(runner: Runner) -> None:
    names = [f"r{number:04}" for number in range(1, 1502)]
    runner.runner.call(CallStart(dict.fromkeys(names, 7), not_after=runner.clock.now() + 1))
    runner.story.wait_for(HandlerReturned(Handler.START))
    for number, owned in enumerate(runner.handlers.owned):
        owned.report_load(number)
    first, second = runner.runner.taken_loads(), runner.runner.taken_loads()
    assert [owned.resource for owned, _ in first] == names[:1000]
    assert [(owned.resource, load) for owned, load in second] == [
        (name, 1000.0 + index) for index, name in enumerate(names[1000:])
    ]
    assert runner.runner.taken_loads() == []


@pytest.mark.rule("RB-21")
@pytest.mark.lesson(5)
def test_who_hears_nothing_stops_in_time_and_starts_again_once_it_does(running: Running) -> None:
    running.settle()
    (owned,) = running.handlers.owned
    token, deadline = owned.token, owned.deadline
    running.coordinator.cut = True
    running.handlers.may_return[Handler.STOP].clear()
    running.pass_s(running.settings.timings.detect_s)
    running.story.wait_for((Handler.STOP, ("a",)))
    assert running.clock.now() + running.settings.stop_timeout_s <= deadline
    assert owned.stop_requested.is_set()
    assert not owned.still_mine()
    running.handlers.may_return[Handler.STOP].set()
    running.story.wait_for(FactKind.STOP_RETURNED)
    running.story.wait_for(FactKind.COMMAND_FAILED)
    running.coordinator.cut = False
    running.pass_s(running.settings.retry_max_s)
    running.story.wait_for((Handler.START, ("a",)), 2)
    running.settle()
    assert running.handlers.owned[0].token == token
    assert running.handlers.owned[0] is not owned


@pytest.mark.rule("RB-20", "RB-22")
def test_who_lost_its_lease_stops_once_and_joins_again(running: Running) -> None:
    running.settle()
    (owned,) = running.handlers.owned
    running.clock.advance(running.settings.lease_ttl_s)
    running.store.expire()
    assert not owned.still_mine()
    running.pass_s(0)
    running.story.wait_for((Handler.START, ("a",)), 2)
    running.settle()
    calls = [line for line in running.story.lines if isinstance(line, tuple)]
    assert calls == [(Handler.START, ("a",)), (Handler.STOP, ("a",)), (Handler.START, ("a",))]
    assert running.handlers.owned[0].token > owned.token


def test_a_deadline_comes(running: Running) -> None:
    running.settle()
    (owned,) = running.handlers.owned
    timings = running.settings.timings
    assert owned.deadline == pytest.approx(running.clock.now() + timings.access_s)
    running.clock.advance(timings.access_s - 0.01)
    assert owned.still_mine()
    running.clock.advance(0.01)
    assert not owned.still_mine()


@pytest.mark.rule("RB-34")
def test_the_switch_follows_every_proof_of_life(running: Running) -> None:
    running.settle()
    timings = running.settings.timings
    assert running.switch.deadline == pytest.approx(running.clock.now() + timings.access_s)
    running.beat()
    moved = pytest.approx(running.clock.now() + timings.access_s)
    assert running.engine.wait(lambda _snapshot: running.switch.deadline == moved, PATIENCE_S)
    assert running.handlers.owned[0].deadline == moved
    running.end()
    assert running.switch.closed


@pytest.mark.rule("RB-34")
@pytest.mark.parametrize(
    "running", [SETTINGS.model_copy(update={"on_overrun": OnOverrun.KILL})], indirect=True
)
def test_the_switch_fires_when_a_handler_overruns(running: Running) -> None:
    running.settle()
    running.handlers.may_return[Handler.STOP].clear()
    running.coordinator.set_drained("label", drained=True)
    running.story.wait_for((Handler.STOP, ("a",)))
    entered = running.clock.now()
    for _ in range(3):
        running.beat()
    assert running.switch.deadline is not None
    assert running.switch.deadline <= entered + running.settings.lease_ttl_s


@pytest.mark.parametrize(
    "running", [SETTINGS.model_copy(update={"on_overrun": OnOverrun.KILL})], indirect=True
)
def test_the_switch_stays_armed_over_what_could_not_be_stopped(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.settle()

    def stop(_owned: list[Owned]) -> None:
        raise OSError("busy")

    monkeypatch.setattr(running.handlers, "stop", stop)
    running.end()
    assert isinstance(running.engine.stop_error, OSError)
    assert not running.switch.closed
    assert running.switch.deadline is not None


def test_a_stop_request_comes_while_a_handler_runs(running: Running) -> None:
    running.handlers.may_return[Handler.START].clear()
    running.story.wait_for((Handler.START, ("a",)))
    (owned,) = running.handlers.owned
    assert not owned.stop_requested.is_set()
    running.coordinator.remove_resources(["a"], lambda _done: None)
    assert owned.stop_requested.wait(PATIENCE_S)
    assert running.story.lines[-1] != (Handler.STOP, ("a",))


def test_the_loop_is_told_of_a_release_once_until_something_else_is_said(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.settle()
    (owned,) = running.handlers.owned
    told: list[object] = []
    with monkeypatch.context() as loop_is_busy:
        loop_is_busy.setattr(running.engine._inbox, "put", told.append)
        for for_s in (5.0, 3.0, 5.0, None, 9.0, None):
            owned.release(for_s)
        running.engine.accept("a")
        owned.release(3.0)
    token = owned.token
    assert told == [
        Release("a", token, 5.0),
        Release("a", token, None),
        Accept("a"),
        Release("a", token, 3.0),
    ]


def test_a_fault_of_the_library_ends_access(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running()
    running.settle()
    (owned,) = running.handlers.owned

    def fail(_command: Command) -> Outcome:
        raise RuntimeError("a bug")

    monkeypatch.setattr(running.coordinator, "perform", fail)
    running.pass_s(running.settings.heartbeat_interval_s)
    with pytest.raises(InternalError, match="the engine of group failed") as raised:
        running.engine.wait_finished(PATIENCE_S)
    assert str(raised.value.__cause__) == "a bug"
    assert running.story.lines.count((Handler.STOP, ("a",))) == 1
    assert not owned.still_mine()
    assert running.switch.closed


# -- the handler runner


class Runner:
    """A handler runner and what came of its calls."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.story = Story()
        self.handlers = Handlers(self.story)
        self.tenure = AccessDeadline(self.clock)  # type: ignore[arg-type]
        self.tenure.deadline = self.clock.now() + 10
        self.runner = HandlerRunner(
            "handlers",
            self.handlers,
            self.clock,
            self.tenure,
            self.story.add,
            self._tell,
            ResourceSpec,
            self.story.add,
        )

    def _tell(self, kind: FactKind, tokens: Mapping[str, int], *, detail: object = None) -> None:
        for resource in sorted(tokens):
            self.story.add((kind, resource))

    def close(self) -> None:
        for event in self.handlers.may_return.values():
            event.set()
        self.runner.close(PATIENCE_S)


@pytest.fixture
def runner() -> Iterator[Runner]:
    with closing(Runner()) as made:
        yield made


def test_facts_enclose_access(runner: Runner) -> None:
    runner.runner.call(CallStart({"a": 7}, not_after=runner.clock.now() + 1))
    runner.story.wait_for(HandlerReturned(Handler.START))
    runner.runner.call(CallStop(frozenset("a")))
    runner.story.wait_for(HandlerReturned(Handler.STOP))
    assert runner.story.lines == [
        (FactKind.START_ENTERED, "a"),
        (Handler.START, ("a",)),
        (FactKind.START_RETURNED, "a"),
        HandlerReturned(Handler.START),
        (FactKind.STOP_ENTERED, "a"),
        (Handler.STOP, ("a",)),
        (FactKind.STOP_RETURNED, "a"),
        HandlerReturned(Handler.STOP),
    ]


@pytest.mark.rule("RB-21")
def test_a_start_that_comes_too_late_is_not_entered(runner: Runner) -> None:
    runner.runner.call(CallStart({"a": 7}, not_after=runner.clock.now()))
    runner.story.wait_for(HandlerReturned(Handler.START, refused=True))
    assert runner.story.lines[0] == (FactKind.START_REFUSED, "a")
    assert runner.runner.owned() == {}


@pytest.mark.rule("RB-21", "RB-42")
def test_the_clock_is_read_after_all_that_takes_longer_for_many_resources(runner: Runner) -> None:
    class Slow(str):
        __slots__ = ()

        def __lt__(self, other: str) -> bool:
            runner.clock.advance(1)
            return str.__lt__(self, other)

    many = {Slow("a"): 7, Slow("b"): 7}
    runner.runner.call(CallStart(many, not_after=runner.clock.now() + 1))
    runner.story.wait_for(HandlerReturned(Handler.START, refused=True))
    assert (Handler.START, ("a", "b")) not in runner.story.lines
    assert runner.runner.owned() == {}


@pytest.mark.rule("RB-21")
def test_what_is_asked_to_stop_before_onstart_is_entered_is_not_started(runner: Runner) -> None:
    runner.handlers.may_return[Handler.START].clear()
    runner.runner.call(CallStart({"b": 7}, not_after=runner.clock.now() + 1))
    runner.story.wait_for((Handler.START, ("b",)))
    runner.runner.call(CallStart({"a": 8}, not_after=runner.clock.now() + 1))
    runner.runner.ask_to_stop(["a"])
    runner.handlers.may_return[Handler.START].set()
    runner.story.wait_for(HandlerReturned(Handler.START, refused=True))
    assert (Handler.START, ("a",)) not in runner.story.lines
    assert set(runner.runner.owned()) == {"b"}


@pytest.mark.rule("RB-21")
def test_whoever_asks_very_many_to_stop_does_not_wait_for_them(runner: Runner) -> None:
    many = {f"r{number:04}": 7 for number in range(MANY + 1)}
    runner.runner.call(CallStart(many, not_after=runner.clock.now() + 1))
    runner.story.wait_for(HandlerReturned(Handler.START))
    owned = runner.runner.owned()
    may_go, asked = threading.Event(), threading.Event()
    owned["r0000"].stop_requested.call_when_set(lambda: may_go.wait(PATIENCE_S))
    for each in owned.values():
        each.stop_requested.call_when_set(
            lambda: asked.set() if all(one.stop_requested.is_set() for one in owned.values()) else None
        )
    runner.runner.ask_to_stop(frozenset(many))
    assert not asked.is_set()
    may_go.set()
    assert asked.wait(PATIENCE_S)


@pytest.mark.rule("RB-18", "RB-21")
def test_a_late_request_to_stop_is_not_for_who_owns_the_resource_anew(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {f"r{number:04}": 7 for number in range(MANY + 1)}
    late: list[Callable[[], None]] = []

    class Late(threading.Thread):
        def start(self) -> None:
            late.append(self.run)

    runner.runner.call(CallStart(many, not_after=runner.clock.now() + 1))
    runner.story.wait_for(HandlerReturned(Handler.START))
    monkeypatch.setattr("rebalanser.runtime.handlers.threading.Thread", Late)
    runner.runner.ask_to_stop(frozenset(many))
    runner.runner.call(CallStop(frozenset(many)))
    runner.story.wait_for(HandlerReturned(Handler.STOP))
    runner.story.lines.clear()
    runner.runner.call(CallStart({"r0000": 8}, not_after=runner.clock.now() + 1))
    runner.story.wait_for(HandlerReturned(Handler.START))
    for ask in late:
        ask()
    assert not runner.runner.owned()["r0000"].stop_requested.is_set()


@pytest.mark.rule("RB-25")
def test_a_hook_that_blocks_holds_nobody_up() -> None:
    may_go, story = threading.Event(), Story()

    def block(fact: Fact) -> None:
        assert may_go.wait(PATIENCE_S)
        story.add(fact.kind)

    observer = Observer("g", "n", "n", SETTINGS, Clock(), [block])
    for _ in range(20_000):
        observer.observe(Report(Fact(FactKind.ISOLATED, "n-0")))
    assert story.lines == []
    may_go.set()
    story.wait_for(FactKind.ISOLATED)
    observer.close()
    observer._thread.join(PATIENCE_S)
    assert not observer._thread.is_alive(), "what it still logged would be in other tests' logs"


@pytest.mark.rule("RB-21", "RB-25")
def test_a_report_of_many_resources_costs_the_reporter_no_more_than_one(tmp_path: Path) -> None:
    may_go, facts, all_told = threading.Event(), list[Fact](), threading.Event()

    class Many(dict[str, int]):
        def __iter__(self) -> Iterator[str]:
            assert may_go.wait(PATIENCE_S)
            return super().__iter__()

    def hear(fact: Fact) -> None:
        facts.append(fact)
        if fact.resource == "b":
            all_told.set()

    settings = SETTINGS.model_copy(update={"history_dir": tmp_path})
    observer = Observer("g", "n", "n", settings, Clock(), [hear])
    many = Many(b=8, a=7)
    observer.observe(Report(Fact(FactKind.BARRIER_ADDED, "n-0", 1, 2), many, many, revisions=many))
    assert not facts
    may_go.set()
    assert all_told.wait(PATIENCE_S)
    observer.close()
    assert [(fact.resource, fact.token, fact.revision) for fact in facts] == [("a", 7, 7), ("b", 8, 8)]
    records = [
        json.loads(line) for file in tmp_path.rglob("*.jsonl") for line in file.read_text().splitlines()
    ]
    assert [(record["sequence"], record["resource"]) for record in records] == [(0, "a"), (1, "b")]


def test_a_log_and_a_hook_that_raise_harm_nobody() -> None:
    def fail(*_: object, **__: object) -> None:
        raise SystemExit

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError(record.getMessage())

    broken, story = Broken(), Story()
    library = logging.getLogger("rebalanser")
    library.addHandler(broken)
    try:
        observer = Observer("g", "n", "n", SETTINGS, Clock(), [fail, lambda fact: story.add(fact.kind)])
        for kind in (FactKind.SESSION_LOST, FactKind.LEFT):
            observer.observe(Report(Fact(kind, "n-0")))
            story.wait_for(kind)
        observer.close()
    finally:
        library.removeHandler(broken)


@pytest.mark.rule("RB-24")
def test_an_error_that_has_no_text_is_told_by_its_type(runner: Runner) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    def fail(_owned: list[Owned]) -> None:
        raise Mute

    runner.handlers.start = fail  # type: ignore[method-assign]
    runner.runner.call(CallStart({"a": 7}, not_after=runner.clock.now() + 1))
    runner.story.wait_for(HandlerReturned(Handler.START, "Mute"))


@pytest.mark.rule("RB-24")
@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_a_handler_raises_is_told(runner: Runner, error: BaseException) -> None:
    def fail(_owned: list[Owned]) -> None:
        raise error

    runner.runner.call(CallStart({"a": 7}, not_after=runner.clock.now() + 1))
    runner.story.wait_for(HandlerReturned(Handler.START))
    runner.handlers.stop = fail  # type: ignore[method-assign]
    runner.runner.call(CallStop(frozenset("a")))
    runner.story.wait_for(HandlerReturned(Handler.STOP, f"{type(error).__name__}: {error}"))
    assert runner.runner.stop_error is error
    assert list(runner.runner.owned()) == ["a"], "access is taken as not stopped"
    runner.runner.abandon()
    assert runner.runner.owned() == {}


def test_giving_up_stops_what_is_owned_once_the_handler_has_returned(runner: Runner) -> None:
    runner.handlers.may_return[Handler.START].clear()
    runner.runner.call(CallStart({"a": 7, "b": 8}, not_after=runner.clock.now() + 1))
    runner.story.wait_for((Handler.START, ("a", "b")))
    runner.runner.give_up()
    assert all(owned.stop_requested.is_set() for owned in runner.handlers.owned)
    assert (Handler.STOP, ("a", "b")) not in runner.story.lines
    runner.handlers.may_return[Handler.START].set()
    runner.story.wait_for((Handler.STOP, ("a", "b")))


# -- inbox and lanes


def test_the_inbox_keeps_the_order_of_events() -> None:
    inbox = Inbox()
    events = [Answered(BEAT, Failed(str(number))) for number in range(3)]
    for event in events:
        inbox.put(event)
    assert inbox.take(0) == events
    assert inbox.take(0) == []


def test_the_inbox_folds_notices_of_one_topic() -> None:
    inbox, group, leadership = Inbox(), Topic(TopicKind.GROUP), Topic(TopicKind.LEADERSHIP)
    for revision in (3, 5, 4):
        inbox.notice([Noticed(group, revision), Noticed(leadership, revision + 10)])
    inbox.put(Wakeup())
    assert inbox.take(0) == [Wakeup(), Noticed(group, 5), Noticed(leadership, 15)]


@pytest.mark.rule("RB-28")
def test_notices_that_are_folded_keep_the_keys_of_all() -> None:
    inbox, group, leadership = Inbox(), Topic(TopicKind.GROUP), Topic(TopicKind.LEADERSHIP)
    for revision, key, lost in ((3, "a", False), (5, "b", True), (4, "c", False)):
        inbox.notice([Noticed(group, revision, keys=frozenset({key}), lost=lost)])
    inbox.notice([Noticed(leadership, 3, lost=True)])
    inbox.notice([Noticed(leadership, 4)])
    assert inbox.take(0) == [
        Noticed(group, 5, lost=True, keys=frozenset("abc")),
        Noticed(leadership, 4),
    ]


def test_the_inbox_wakes_whoever_waits() -> None:
    inbox = Inbox()
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.extend(inbox.take(PATIENCE_S)))
    thread.start()
    inbox.put(Wakeup())
    thread.join(PATIENCE_S)
    assert taken == [Wakeup()]


def test_a_lane_answers_in_order_and_tells_of_faults() -> None:
    answers, failures = Story(), Story()

    class Coordinator:
        outcomes = iter([Failed("one"), Failed("two")])

        def perform(self, _command: Command) -> Outcome:
            return next(self.outcomes)

    def plan(asked: MakePlan) -> PlanMade:
        return PlanMade(asked, None)

    asked = MakePlan(Group(3, {}, {}, frozenset(), None, {}, frozenset(), {}, Fingerprint()), 1, False)
    lane = CommandThread("lane", Coordinator(), plan, answers.add, failures.add)  # type: ignore[arg-type]
    for outcome in (Failed("one"), Failed("two")):
        lane.perform(BEAT)
        lane.make_plan(asked)
        answers.wait_for(Answered(BEAT, outcome))
    answers.wait_for(PlanMade(asked, None))
    lane.perform(BEAT)
    lane.close(PATIENCE_S)
    assert [type(error) for error in failures.lines] == [StopIteration]


# -- what a handler gets


def owned_until(deadline: float | None, clock: Clock) -> Owned:
    tenure = AccessDeadline(clock)  # type: ignore[arg-type]
    tenure.deadline = deadline
    return Owned("a", 7, tenure)


def test_nothing_is_owned_without_a_deadline() -> None:
    owned = owned_until(None, Clock())
    assert not owned.still_mine()
    assert owned.deadline == 0.0
    assert repr(owned) == "Owned('a', token=7, not mine, deadline in 0.0 s)"


def test_coroutines_wait_for_a_stop_request() -> None:
    clock = Clock()
    owned = owned_until(clock.now() + 10, clock)

    async def wait() -> list[bool]:
        waiting = [asyncio.create_task(owned.until_stop_requested()) for _ in range(2)]
        await asyncio.sleep(0)
        before = [task.done() for task in waiting]
        waiting[0].cancel()
        threading.Thread(target=owned.stop_requested.set).start()
        await asyncio.wait_for(waiting[1], PATIENCE_S)
        await asyncio.wait_for(owned.until_stop_requested(), PATIENCE_S)
        return before

    assert asyncio.run(wait()) == [False, False]
    assert owned.stop_requested._callbacks == []


def test_who_stopped_waiting_is_forgotten() -> None:
    clock = Clock()
    owned = owned_until(clock.now() + 10, clock)

    async def give_up() -> None:
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(owned.until_stop_requested(), 0)
            waiting = asyncio.create_task(owned.until_stop_requested())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait({waiting})

    asyncio.run(give_up())
    assert owned.stop_requested._callbacks == []


def test_a_stop_request_reaches_nobody_in_a_closed_loop() -> None:
    clock = Clock()
    owned = owned_until(clock.now() + 10, clock)
    loop = asyncio.new_event_loop()
    waiting: list[Callable[[], object]] = []
    owned.stop_requested.call_when_set(lambda: waiting.append(lambda: None))
    coroutine = owned.until_stop_requested()
    task = loop.create_task(coroutine)
    loop.call_soon(loop.stop)
    loop.run_forever()
    owned.stop_requested.set()
    loop.run_until_complete(task)
    loop.close()
    assert len(waiting) == 1
