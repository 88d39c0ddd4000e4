"""A group as a host application holds it, in this process on the memory registry."""

from __future__ import annotations

import logging
import math
import operator
import os
import platform
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint, distribution
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from rebalanser import Admin, AsyncGroup, Group, Settings, leader, observer
from rebalanser import group as group_module
from rebalanser.cli.lines import plain
from rebalanser.core.clock import GrowingDelay
from rebalanser.core.group import FactKind, Mode, OnOverrun
from rebalanser.core.group.messages import Failed
from rebalanser.errors import (
    Forked,
    HandlerFailed,
    InternalError,
    InvalidArgument,
    InvalidHandlers,
    InvalidName,
    InvalidSettings,
    InvalidState,
    InvalidUrl,
    MissingExtra,
    NotARegistry,
    NotSettled,
    QuotaExceeded,
    RegistryUnavailable,
    UnknownScheme,
)
from rebalanser.group import _random_part
from rebalanser.history import Record, read_records
from rebalanser.registry import (
    GroupKeys,
    GroupStore,
    RegistryCoordinator,
    Translation,
    open_backend,
    open_registry,
    put_if_owned,
)
from rebalanser.registry.contract import Get, Grant, Granted, Transaction
from rebalanser.registry.keys import MAX_NAME_BYTES
from rebalanser.runtime import workers
from rebalanser.runtime.node_runner import MAX_RELEASED_BYTES
from rebalanser.testing import MEMORY_CAPABILITIES, MemoryRegistry, open_memory
from rebalanser.testing.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

    from rebalanser import Owned
    from rebalanser.core.group import Fact
    from rebalanser.registry import Coordinator
    from rebalanser.registry.contract import Reply, Request

QUICK = Settings(min_rebalance_interval_s=0.0, rejoin_initial_s=0.01, connect_timeout_s=PATIENCE_S)


class Journal:
    """What a node was called with and what happened on it; lets a test wait for it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.facts: list[Fact] = []
        self.owned: dict[str, Owned] = {}
        self._more = threading.Condition()

    def start(self, owned: list[Owned]) -> None:
        self.owned.update((each.resource, each) for each in owned)
        self._note("start", owned)

    def stop(self, owned: list[Owned]) -> None:
        self._note("stop", owned)

    def fact(self, fact: Fact) -> None:
        with self._more:
            self.facts.append(fact)
            self._more.notify_all()

    def _note(self, call: str, owned: list[Owned]) -> None:
        with self._more:
            self.calls.append((call, tuple(each.resource for each in owned)))
            self._more.notify_all()

    def wait_until(self, reached: Callable[[], object]) -> None:
        with self._more:
            assert self._more.wait_for(reached, PATIENCE_S), (self.calls, self.facts[-20:])

    def wait_for_call(self, *call: object) -> None:
        self.wait_until(lambda: tuple(call) in self.calls)

    def wait_for_fact(self, kind: FactKind) -> None:
        self.wait_until(lambda: any(fact.kind is kind for fact in self.facts))


class Nodes:
    """Nodes of groups in one registry of this test."""

    def __init__(self, stack: ExitStack) -> None:
        self.url = f"memory://{uuid.uuid4().hex}"
        self._stack = stack

    def group(self, name: str = "group", settings: Settings = QUICK, node: str | None = None) -> Group:
        group = Group(name, self.url, settings=settings, node=node)
        self._stack.callback(group.stop)
        return group

    def journaled(
        self, name: str = "group", settings: Settings = QUICK, node: str | None = None
    ) -> tuple[Group, Journal]:
        group, journal = self.group(name, settings, node), Journal()
        group.on_start(journal.start)
        group.on_stop(journal.stop)
        group.on_fact(journal.fact)
        return group, journal

    def admin(self, name: str = "group") -> Admin:
        return self._stack.enter_context(Admin(name, self.url))


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(stack)


# -- handlers


def test_no_handler_is_refused(nodes: Nodes) -> None:
    group = nodes.group()
    with pytest.raises(InvalidHandlers, match="on_start and on_stop"):
        group.start()


@pytest.mark.parametrize(("given", "missing"), [("on_start", "on_stop"), ("on_stop", "on_start")])
def test_half_of_the_handlers_is_refused(nodes: Nodes, given: str, missing: str) -> None:
    group = nodes.group()
    getattr(group, given)(lambda _owned: None)
    with pytest.raises(InvalidHandlers, match=f"no handler registered for {missing}:"):
        group.start()


@pytest.mark.parametrize("handler", ["on_start", "on_stop"])
def test_a_worker_beside_handlers_is_refused(nodes: Nodes, handler: str) -> None:
    group = nodes.group()
    group.worker(lambda _owned: None)
    getattr(group, handler)(lambda _owned: None)
    with pytest.raises(InvalidHandlers, match="not both"):
        group.start()


@pytest.mark.parametrize("what", ["on_start", "on_stop", "worker"])
def test_a_second_handler_is_refused(nodes: Nodes, what: str) -> None:
    register = getattr(nodes.group(), what)

    def handler(_owned: object) -> None:
        """Does nothing."""

    assert register(handler) is handler
    with pytest.raises(InvalidHandlers, match=f"{what} is registered already"):
        register(handler)


def test_a_handler_comes_before_the_start(nodes: Nodes) -> None:
    group, _ = nodes.journaled()
    group.start()
    with pytest.raises(InvalidState, match="before the group starts"):
        group.worker(lambda _owned: None)


# -- owning


@pytest.mark.rule("RB-12")
def test_owns_what_it_was_started_with(nodes: Nodes) -> None:
    nodes.admin().add("a", "b")
    group, journal = nodes.journaled()
    group.start()
    group.wait_settled(PATIENCE_S)
    assert journal.calls == [("start", ("a", "b"))]
    resources = group.resources
    assert sorted(resources) == ["a", "b"]
    for name, owned in resources.items():
        assert owned is journal.owned[name]
        assert owned.resource == name
        assert owned.token > 0
        assert owned.still_mine()
        assert owned.deadline > time.monotonic()
        assert f"{name!r}, token={owned.token}, mine" in repr(owned)
    group.stop()
    assert group.resources == {}
    assert journal.calls[1:] == [("stop", ("a", "b"))]
    for owned in resources.values():
        assert owned.stop_requested.is_set()
        assert not owned.still_mine()
        assert owned.deadline < time.monotonic()


@pytest.mark.rule("RB-18")
@pytest.mark.lesson(8)
def test_an_empty_allocation_is_told(nodes: Nodes) -> None:
    group, journal = nodes.journaled()
    group.start()
    group.wait_settled(PATIENCE_S)
    assert journal.calls == [("start", ())]
    assert group.resources == {}
    admin = nodes.admin()
    admin.add("only")
    journal.wait_for_call("start", ("only",))
    admin.remove("only")
    journal.wait_until(lambda: journal.calls[-1] == ("start", ()))
    assert journal.calls[-2:] == [("stop", ("only",)), ("start", ())]


@pytest.mark.rule("RB-17")
@pytest.mark.lesson(11)
def test_cooperative_mode_stops_only_what_leaves(nodes: Nodes) -> None:
    admin = nodes.admin()
    admin.add("a", "b")
    first, journal = nodes.journaled()
    first.start()
    first.wait_settled(PATIENCE_S)
    second, arriving = nodes.journaled()
    second.start()
    admin.wait_balanced(PATIENCE_S)
    (kept,), (moved,) = first.resources, second.resources
    assert {kept, moved} == {"a", "b"}
    assert journal.calls == [("start", ("a", "b")), ("stop", (moved,))]
    assert arriving.calls == [("start", (moved,))]
    assert arriving.owned[moved].token > journal.owned[moved].token


@pytest.mark.rule("RB-17")
def test_eager_mode_stops_and_starts_everything(nodes: Nodes) -> None:
    admin = nodes.admin()
    admin.add("a", "b")
    eager = QUICK.model_copy(update={"mode": Mode.EAGER})
    first, journal = nodes.journaled(settings=eager)
    first.start()
    first.wait_settled(PATIENCE_S)
    nodes.journaled(settings=eager)[0].start()
    admin.wait_balanced(PATIENCE_S)
    (kept,) = first.resources
    assert journal.calls == [("start", ("a", "b")), ("stop", ("a", "b")), ("start", (kept,))]


@pytest.mark.rule("RB-33")
def test_two_groups_and_two_nodes_in_one_process(nodes: Nodes) -> None:
    nodes.admin("a").add("r1", "r2")
    nodes.admin("a/b").add("r1")
    groups = [nodes.journaled(name)[0] for name in ("a", "a", "a/b")]
    for group in groups:
        group.start()
    assert [s.balanced for s in (nodes.admin(n).wait_balanced(PATIENCE_S) for n in ("a", "a/b"))] == [
        True
    ] * 2
    assert sorted(resource for group in groups[:2] for resource in group.resources) == ["r1", "r2"]
    assert list(groups[2].resources) == ["r1"]
    assert [groups[0].is_leader, groups[1].is_leader, groups[2].is_leader].count(True) == 2


# -- a handler that raises


@pytest.mark.rule("RB-24")
@pytest.mark.lesson(9)
def test_on_start_that_raises_is_stopped_and_tried_again(nodes: Nodes) -> None:
    nodes.admin().add("a")
    group, journal = nodes.group(), Journal()

    @group.on_start
    def start(owned: list[Owned]) -> None:
        journal.start(owned)
        if len(journal.calls) == 1:
            raise ValueError("not yet")

    group.on_stop(journal.stop)
    group.on_fact(journal.fact)
    group.start()
    journal.wait_until(lambda: len(journal.calls) == 3)
    assert journal.calls == [("start", ("a",)), ("stop", ("a",)), ("start", ("a",))]
    journal.wait_for_fact(FactKind.START_FAILED)
    (failed,) = (fact for fact in journal.facts if fact.kind is FactKind.START_FAILED)
    assert failed.detail["error"] == "ValueError: not yet"

    def joined() -> set[str | None]:
        return {fact.node for fact in journal.facts if fact.kind is FactKind.JOINED}

    journal.wait_until(lambda: len(joined()) == 2)  # as another incarnation


@pytest.mark.rule("RB-24")
def test_on_stop_that_raises_keeps_its_barriers(nodes: Nodes) -> None:
    admin = nodes.admin()
    admin.add("a")
    group, journal = nodes.group(), Journal()
    group.on_start(journal.start)
    error = OSError("device busy")

    @group.on_stop
    def stop(owned: list[Owned]) -> None:
        raise error

    group.start()
    group.wait_settled(PATIENCE_S)
    with pytest.raises(HandlerFailed, match=r"device busy.*barriers stay until the lease ends") as raised:
        group.stop()
    assert raised.value.__cause__ is error
    (resource,) = admin.resources()
    assert resource.held_by is not None
    assert not journal.owned["a"].still_mine()
    group.stop()


def test_the_traceback_of_a_handler_is_logged(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    nodes.admin().add("a")
    group, journal = nodes.group(), Journal()

    @group.on_start
    def start(owned: list[Owned]) -> None:
        if not journal.calls:
            journal.start(owned)
            raise ValueError("password=geheim")

    group.on_stop(journal.stop)
    group.start()
    journal.wait_for_call("stop", ("a",))
    group.stop()
    (record,) = (r for r in caplog.records if getattr(r, "action", "") == "handler_raised")
    assert "Traceback" in record.getMessage()
    assert "geheim" not in caplog.text


# -- stopping


@pytest.mark.rule("RB-26")
def test_a_graceful_stop_leaves_nothing(nodes: Nodes) -> None:
    admin = nodes.admin()
    admin.add("a")
    seen_by_on_stop = []
    group = nodes.group()
    group.on_start(lambda _owned: None)
    group.on_stop(lambda _owned: seen_by_on_stop.append(admin.resources()[0].held_by))
    group.start()
    group.wait_settled(PATIENCE_S)
    group.stop()
    state = admin.state()
    assert state.nodes == ()
    assert state.resources[0].held_by is None
    assert seen_by_on_stop != [None], "the barrier was held while OnStop ran"


def test_stopping_twice_is_stopping_once(nodes: Nodes) -> None:
    group, journal = nodes.journaled()
    group.stop()
    group.start()
    group.stop()
    group.stop()
    assert group.wait_stopped(0)
    assert sum(fact.kind is FactKind.LEFT for fact in journal.facts) == 1


def test_starting_twice_is_refused(nodes: Nodes) -> None:
    group, journal = nodes.journaled()
    group.start()
    with pytest.raises(InvalidState, match="runs already"):
        group.start()
    group.stop(PATIENCE_S)
    assert sum(fact.kind is FactKind.JOINED for fact in journal.facts) == 1


def test_starts_again_after_a_stop(nodes: Nodes) -> None:
    nodes.admin().add("a")
    group, journal = nodes.journaled()
    for _ in range(2):
        with group:
            group.wait_settled(PATIENCE_S)
            assert list(group.resources) == ["a"]
    assert journal.calls == [("start", ("a",)), ("stop", ("a",))] * 2


@pytest.mark.rule("AU-1", "AU-2")
def test_each_start_writes_the_history_of_a_new_process(nodes: Nodes, tmp_path: Path) -> None:
    nodes.admin().add("a", "b")
    settings = QUICK.model_copy(update={"history_dir": tmp_path, "fenced": True})
    group, _ = nodes.journaled(settings=settings, node="worker")
    for _ in range(2):
        group.start()
        group.wait_settled(PATIENCE_S)
        group.stop()
    records = [item for item in read_records(tmp_path) if isinstance(item, Record)]
    processes = list(dict.fromkeys(record.process for record in records))
    assert len(processes) == 2
    for process in processes:
        mine = [record for record in records if record.process == process]
        assert [record.sequence for record in mine] == list(range(len(mine)))
        assert {(record.protocol, record.group, record.label) for record in mine} == {
            ("group", "group", "worker")
        }
        assert {record.node for record in mine} == {f"{process}-0"}
        assert {record.host for record in mine} == {platform.node()}
        assert [(record.resource, record.fenced) for record in mine if record.kind == "start_entered"] == [
            ("a", True),
            ("b", True),
        ]
        (published,) = (record for record in mine if record.kind == "allocation_published")
        assert published.detail == {
            "published_version": published.value,
            "moves": 0,
            "least_moves": 0,
            "nodes": 1,
            "resources": 2,
        }


def _made_slowly(group: Group, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Let a start wait in its middle: it sets the first event, and goes on once the second is set."""
    being_made, may_go_on = threading.Event(), threading.Event()
    made = group._made

    def slowly() -> object:
        being_made.set()
        assert may_go_on.wait(PATIENCE_S)
        return made()

    monkeypatch.setattr(group, "_made", slowly)
    return being_made, may_go_on


@pytest.mark.rule("RB-26")
def test_two_threads_that_start_a_group_start_one_node(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    group, _ = nodes.journaled()
    being_made, may_go_on = _made_slowly(group, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(group.start)
        assert being_made.wait(PATIENCE_S)
        with pytest.raises(InvalidState, match="is being started"):
            group.start()
        may_go_on.set()
        first.result(PATIENCE_S)
    with pytest.raises(InvalidState, match="runs already"):
        group.start()
    assert len(nodes.admin().state().nodes) == 1
    group.stop()


@pytest.mark.rule("RB-26")
@pytest.mark.parametrize("ask", ["request_stop", "stop"])
def test_a_group_that_is_asked_to_stop_while_it_starts_stops(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    group, _ = nodes.journaled()
    being_made, may_go_on = _made_slowly(group, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        starting = pool.submit(group.start)
        assert being_made.wait(PATIENCE_S)
        if ask == "stop":
            with pytest.raises(NotSettled, match="has not begun"):
                group.stop(0.0)
        else:
            group.request_stop()
        may_go_on.set()
        starting.result(PATIENCE_S)
    assert group.wait_stopped(PATIENCE_S)
    assert nodes.admin().state().nodes == ()
    group.stop()


class SlowAnswer:
    """A registry whose first answer a test gives; knows when its connection was asked for and closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.may_answer, self.closed = (threading.Event() for _ in range(3))
        self.on_asked: Callable[[], object] = lambda: None
        self._open = group_module.open_coordinator
        monkeypatch.setattr(group_module, "open_coordinator", self._opened)

    def _opened(self, *arguments: Any) -> Coordinator:
        self.asked.set()
        self.on_asked()
        assert self.may_answer.wait(PATIENCE_S)
        coordinator = self._open(*arguments)
        close = coordinator.close

        def closed() -> None:
            close()
            self.closed.set()

        coordinator.close = closed  # type: ignore[method-assign]
        return coordinator


@pytest.mark.rule("RB-26")
@pytest.mark.parametrize("ask", ["request_stop", "stop"])
def test_a_group_that_is_asked_to_stop_while_it_connects_waits_for_no_answer(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    group, _ = nodes.journaled()
    registry = SlowAnswer(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(group.start)
        assert registry.asked.wait(PATIENCE_S)
        getattr(group, ask)()
        starting.result(PATIENCE_S)
    assert group.wait_stopped(0.0)
    assert not registry.closed.is_set()
    registry.may_answer.set()
    assert registry.closed.wait(PATIENCE_S), "a connection that comes too late is closed"
    monkeypatch.undo()
    assert nodes.admin().state().nodes == ()
    group.start()
    group.wait_settled(PATIENCE_S)
    group.stop()


@pytest.mark.rule("RB-26")
@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_returns_at_a_signal_while_it_connects(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    group, _ = nodes.journaled()
    registry = SlowAnswer(monkeypatch)
    registry.on_asked = lambda: os.kill(os.getpid(), number)
    group.run()
    registry.may_answer.set()
    assert registry.closed.wait(PATIENCE_S)


@pytest.mark.rule("RB-26")
def test_what_interrupts_a_start_that_connects_leaves_nothing_open(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, _ = nodes.journaled()
    registry = SlowAnswer(monkeypatch)
    registry.on_asked = lambda: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        group.start()
    registry.may_answer.set()
    assert registry.closed.wait(PATIENCE_S)


@pytest.mark.rule("RB-26")
def test_a_group_that_can_not_join_and_is_asked_to_stop_says_no_more_why(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, _ = nodes.journaled()
    tried = threading.Event()

    def away(_coordinator: RegistryCoordinator, _command: object) -> Failed:
        tried.set()
        return Failed("RegistryUnavailable: away")

    monkeypatch.setattr(RegistryCoordinator, "perform", away)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(group.start)
        assert tried.wait(PATIENCE_S)
        group.request_stop()
        starting.result(PATIENCE_S)
    assert group.wait_stopped(PATIENCE_S)


@pytest.mark.rule("RB-26")
@pytest.mark.parametrize("thread", ["rebalanser-loop", "rebalanser-handlers", "rebalanser-leader"])
def test_a_group_whose_threads_can_not_be_started_leaves_none_and_may_start_again(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    group, _ = nodes.journaled()
    before = set(threading.enumerate())
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if self.name.startswith(thread):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start"):
        group.start()
    left = {each.name for each in set(threading.enumerate()) - before}
    assert not {name for name in left if "memory" not in name}
    monkeypatch.undo()
    group.start()
    group.stop()


@pytest.mark.rule("AU-1")
def test_a_start_while_an_earlier_stop_still_cleans_up_has_its_whole_history(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, _ = nodes.journaled(settings=QUICK.model_copy(update={"history_dir": tmp_path}))
    group.start()
    assert group._run is not None
    engine, cleaned = group._run.engine, threading.Event()
    clean_up = group._clean_up

    def late(run: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert cleaned.wait(PATIENCE_S)
        clean_up(run)

    monkeypatch.setattr(group, "_clean_up", late)
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(group.stop)
        assert engine.wait_finished(PATIENCE_S)
        group.start()
        cleaned.set()
        stopping.result(PATIENCE_S)
    group.wait_settled(PATIENCE_S)
    group.stop()
    records = [item for item in read_records(tmp_path) if isinstance(item, Record)]
    assert Counter(record.kind for record in records)["left"] == 2


def test_a_history_that_goes_nowhere_is_refused_at_start(nodes: Nodes) -> None:
    settings = QUICK.model_copy(update={"history_topic": "pulsar://h:6650/history"})
    group, _ = nodes.journaled(settings=settings)
    with pytest.raises(UnknownScheme, match="pulsar://"):
        group.start()
    assert group.resources == {}


def test_starts_again_after_a_requested_stop(nodes: Nodes) -> None:
    group, journal = nodes.journaled()
    group.start()
    group.request_stop()
    assert group.wait_stopped(PATIENCE_S)
    group.start()
    group.stop(PATIENCE_S)
    assert sum(fact.kind is FactKind.JOINED for fact in journal.facts) == 2


def test_stop_in_a_handler_is_refused_and_a_request_is_not(nodes: Nodes) -> None:
    group, journal, refusals = nodes.group(), Journal(), []

    @group.on_start
    def start(owned: list[Owned]) -> None:
        try:
            group.stop()
        except InvalidState as error:
            refusals.append(str(error))
        group.request_stop()

    group.on_stop(journal.stop)
    group.start()
    assert group.wait_stopped(PATIENCE_S)
    assert refusals == ["stop() was called from a handler; call request_stop() there"]


def test_stop_in_a_worker_is_refused(nodes: Nodes) -> None:
    nodes.admin().add("a")
    group, refusals = nodes.group(), []

    @group.worker
    def work(owned: Owned) -> None:
        try:
            group.stop()
        except InvalidState as error:
            refusals.append(str(error))
        group.request_stop()

    group.start()
    assert group.wait_stopped(PATIENCE_S)
    assert refusals == ["stop() was called from a handler; call request_stop() there"]


def test_a_stop_that_takes_too_long_goes_on(nodes: Nodes) -> None:
    nodes.admin().add("a")
    group, may_return = nodes.group(), threading.Event()
    group.on_start(lambda _owned: None)
    group.on_stop(lambda _owned: may_return.wait(PATIENCE_S) and None)
    group.start()
    group.wait_settled(PATIENCE_S)
    with pytest.raises(NotSettled, match="has not stopped within 0 s"):
        group.stop(timeout_s=0)
    may_return.set()
    group.stop()
    assert group.wait_stopped(0)


def test_run_belongs_in_the_main_thread(nodes: Nodes) -> None:
    group, _ = nodes.journaled()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            group.run()
        except InvalidState as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


def test_run_ends_on_request(nodes: Nodes) -> None:
    group, journal = nodes.journaled()
    group.on_fact(lambda fact: group.request_stop() if fact.kind is FactKind.ACKNOWLEDGED else None)
    group.run()
    assert journal.facts[-1].kind is FactKind.LEFT


# -- waiting


def test_waiting_says_what_for(nodes: Nodes) -> None:
    admin = nodes.admin()
    admin.add("a")
    may_return = threading.Event()
    slow = nodes.group(node="slow")
    slow.on_start(lambda _owned: None)
    slow.on_stop(lambda _owned: may_return.wait(PATIENCE_S) and None)
    slow.start()
    slow.wait_settled(PATIENCE_S)
    waiting, journal = nodes.journaled()
    waiting.start()
    admin.drain("slow")
    journal.wait_for_fact(FactKind.BARRIER_BLOCKED)
    assert waiting._run is not None
    assert waiting._run.engine.wait(lambda snapshot: bool(snapshot.blocked), PATIENCE_S)
    with pytest.raises(
        NotSettled, match=r"not settled within 0 s: the node is member, waiting for a held by"
    ):
        waiting.wait_settled(0)
    may_return.set()
    waiting.wait_settled(PATIENCE_S)
    assert list(waiting.resources) == ["a"]


def test_waiting_for_a_group_that_does_not_run_is_refused(nodes: Nodes) -> None:
    with pytest.raises(InvalidState, match="does not run"):
        nodes.group().wait_settled(0)


def test_a_hook_that_raises_is_ignored(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    group, journal = nodes.journaled()

    @group.on_fact
    def hook(_fact: Fact) -> None:
        raise RuntimeError("metrics are down")

    group.start()
    group.wait_settled(PATIENCE_S)
    group.stop()
    assert journal.facts[-1].kind is FactKind.LEFT
    assert "hook_failed" in {getattr(record, "action", "") for record in caplog.records}


# -- workers


@pytest.mark.rule("RB-11")
def test_a_worker_has_a_thread_for_each_resource(nodes: Nodes) -> None:
    admin = nodes.admin()
    admin.add("a", "b")
    group, running, barrier = nodes.group(), {}, threading.Barrier(3)

    @group.worker
    def work(owned: Owned) -> None:
        running[owned.resource] = threading.current_thread()
        barrier.wait(PATIENCE_S)
        owned.stop_requested.wait(PATIENCE_S)
        assert not owned.still_mine()
        del running[owned.resource]

    group.start()
    barrier.wait(PATIENCE_S)
    assert len(set(running.values())) == 2
    group.stop()
    assert running == {}


def test_a_worker_that_raises_is_called_again(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "RESTART_INITIAL_S", 0.001)
    nodes.admin().add("a")
    group, calls, enough = nodes.group(), [], threading.Event()

    @group.worker
    def work(owned: Owned) -> None:
        calls.append(owned)
        if len(calls) < 4:
            raise OSError("connection reset")
        enough.set()
        owned.stop_requested.wait(PATIENCE_S)

    group.start()
    assert enough.wait(PATIENCE_S)
    group.stop()
    assert len(calls) == 4
    assert len({id(owned) for owned in calls}) == 1
    failures = [r for r in caplog.records if getattr(r, "action", "") == "worker_failed"]
    assert [record.fields["attempt"] for record in failures] == [1, 2, 3]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "log_works"), [(SystemExit(3), True), (CancelledError(), True), (OSError("reset"), False)]
)
def test_no_error_ends_the_thread_of_a_worker_for_good(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, error: BaseException, log_works: bool
) -> None:
    monkeypatch.setattr(GrowingDelay, "after", lambda _self, _lasted_s: 0.001)
    if not log_works:
        monkeypatch.setattr(logging.Handler, "handle", Mock(side_effect=OSError("no space left")))
    nodes.admin().add("a")
    group, journal, called_again = nodes.group(), Journal(), threading.Event()
    group.on_fact(journal.fact)
    ends = iter([error, None])

    @group.worker
    def work(owned: Owned) -> None:
        raised = next(ends, called_again)
        if isinstance(raised, BaseException):
            raise raised
        if raised is called_again:
            called_again.set()
            owned.stop_requested.wait(PATIENCE_S)

    group.start()
    assert called_again.wait(PATIENCE_S)
    group.stop()
    assert {FactKind.WORKER_FAILED, FactKind.WORKER_RETURNED} <= {fact.kind for fact in journal.facts}


def test_a_worker_is_not_called_again_once_its_resource_leaves(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "GrowingDelay", partial(GrowingDelay, 1000.0, 1000.0))
    nodes.admin().add("a")
    group, calls, called = nodes.group(), [], threading.Event()

    @group.worker
    def work(owned: Owned) -> None:
        calls.append(owned.still_mine())
        called.set()
        raise OSError("connection reset")

    group.start()
    assert called.wait(PATIENCE_S)
    group.stop(PATIENCE_S)
    assert calls == [True]


def noted_troubles(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[str | None]:
    """Get each trouble once it is in the registry."""
    noted: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    note = RegistryCoordinator.note_trouble

    def note_and_tell(coordinator: RegistryCoordinator, label: str, error: str | None, for_s: float) -> None:
        note(coordinator, label, error, for_s)
        noted.put(error)

    monkeypatch.setattr(RegistryCoordinator, "note_trouble", note_and_tell)
    return noted


def test_a_worker_that_raises_is_seen_by_hooks_history_and_all_who_look(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    noted = noted_troubles(monkeypatch)
    nodes.admin().add("a")
    group, journal = nodes.group(settings=QUICK.model_copy(update={"history_dir": tmp_path})), Journal()
    group.on_fact(journal.fact)

    @group.worker
    def work(_owned: Owned) -> None:
        raise OSError("connection reset")

    group.start()
    journal.wait_for_fact(FactKind.WORKER_FAILED)
    (fact, *_) = (fact for fact in journal.facts if fact.kind is FactKind.WORKER_FAILED)
    assert (fact.resource, fact.detail["error"], fact.detail["attempt"]) == (
        "a",
        "OSError: connection reset",
        1,
    )
    assert str(fact.detail["raised_at"]).startswith(__file__)
    assert noted.get(timeout=PATIENCE_S) == "the worker of a raised OSError: connection reset"
    state = nodes.admin().state()
    assert state.troubles == {group.node: "the worker of a raised OSError: connection reset"}
    assert any(f"lately on {group.node}: the worker of a raised" in line for line in plain(state))
    group.stop()
    kinds = [record.kind for record in read_records(next(tmp_path.glob("*.jsonl")))]
    assert FactKind.WORKER_FAILED in kinds


def test_a_worker_that_returns_early_is_reported_and_called_again(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "RESTART_INITIAL_S", 0.001)
    noted = noted_troubles(monkeypatch)
    nodes.admin().add("a")
    group, journal, calls, enough = nodes.group(), Journal(), [], threading.Event()
    group.on_fact(journal.fact)

    @group.worker
    def work(owned: Owned) -> None:
        calls.append(owned)
        if len(calls) == 3:
            enough.set()
            owned.stop_requested.wait(PATIENCE_S)

    group.start()
    assert enough.wait(PATIENCE_S)
    assert noted.get(timeout=PATIENCE_S) == "the worker of a returned too early"
    group.stop()
    assert len(calls) == 3, "one that returns when it is asked to is left alone"
    returned = [fact.resource for fact in journal.facts if fact.kind is FactKind.WORKER_RETURNED]
    assert returned == ["a", "a"]
    logged = [r.levelname for r in caplog.records if getattr(r, "action", "") == "worker_returned"]
    assert logged == ["WARNING", "WARNING"]


def test_why_nobody_takes_part_is_known_where_on_start_always_raises(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, admin = noted_troubles(monkeypatch), nodes.admin()
    admin.add("a")
    patient = QUICK.model_copy(update={"rejoin_initial_s": 1000.0, "rejoin_max_s": 1000.0})
    group, journal = nodes.group(settings=patient, node="n"), Journal()
    error = OSError("no such device")

    @group.on_start
    def start(_owned: list[Owned]) -> None:
        raise error

    group.on_stop(journal.stop)
    group.on_fact(journal.fact)
    group.start()
    assert noted.get(timeout=PATIENCE_S) == "OnStart raised OSError: no such device"
    journal.wait_for_fact(FactKind.LEFT)
    (resource,) = admin.resources()
    assert resource.reason == "no node takes part; lately on n: OnStart raised OSError: no such device"
    with pytest.raises(NotSettled, match="it has no nodes; lately on n: OnStart raised OSError"):
        admin.wait_balanced(0)
    with pytest.raises(NotSettled, match="no such device") as raised:
        group.wait_settled(0)
    assert raised.value.__cause__ is error


def test_a_trouble_is_forgotten_once_on_start_returns(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "NOTE_PAUSE_S", 0.001)
    noted, may_start = noted_troubles(monkeypatch), threading.Event()
    nodes.admin().add("a")
    group, journal = nodes.group(), Journal()

    @group.on_start
    def start(_owned: list[Owned]) -> None:
        if not may_start.is_set():
            raise OSError("no such device")

    group.on_stop(journal.stop)
    group.start()
    assert noted.get(timeout=PATIENCE_S) == "OnStart raised OSError: no such device"
    may_start.set()
    while noted.get(timeout=PATIENCE_S) is not None:
        """It is noted again for each try."""
    assert nodes.admin().state().troubles == {}


def test_what_weakens_the_registry_is_a_fact(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    unsafe = replace(MEMORY_CAPABILITIES, unsafe_reasons=("it forgets",))
    monkeypatch.setattr(RegistryCoordinator, "capabilities", property(lambda _self: unsafe))
    group, journal = nodes.journaled()
    group.start()
    journal.wait_for_fact(FactKind.UNSAFE_REGISTRY)
    assert journal.facts[0].detail == {"reason": "it forgets"}


def test_what_ends_the_engine_is_a_fact(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("broken")

    group, journal = nodes.journaled()
    monkeypatch.setattr(RegistryCoordinator, "perform", broken)
    with pytest.raises(InternalError):
        group.start()
    journal.wait_for_fact(FactKind.ENGINE_FAILED)
    (failed, *_) = (fact for fact in journal.facts if fact.kind is FactKind.ENGINE_FAILED)
    assert failed.detail == {"error": "ValueError: broken"}


@pytest.mark.parametrize("what", ["on_start", "on_stop", "worker", "on_fact"])
@pytest.mark.parametrize("handler", [lambda: None, lambda _a, _b: None, lambda *, _a: None])
def test_a_handler_that_cannot_be_called_is_refused_at_once(
    nodes: Nodes, what: str, handler: Callable[..., None]
) -> None:
    with pytest.raises(InvalidHandlers, match=f"{what} is called with .*, and <lambda> can't be: "):
        getattr(nodes.group(), what)(handler)


def test_a_handler_that_is_refused_is_named_without_its_address(nodes: Nodes) -> None:
    class Called:
        def __call__(self) -> None: ...

    async def later(_owned: object) -> None: ...

    def nothing() -> None: ...

    for handler, name in (
        (later, r"\S*later is a coroutine"),
        (partial(nothing), r"\S*nothing can't be: "),
        (Called(), r"\S*Called can't be: "),
    ):
        with pytest.raises(InvalidHandlers, match=name) as raised:
            nodes.group().worker(handler)  # type: ignore[arg-type]
        assert " at 0x" not in str(raised.value)


@pytest.mark.parametrize("handler", [print, lambda *_a: None, lambda _a, _b=1: None, partial(print, "x")])
def test_a_handler_that_takes_one_argument_is_accepted(nodes: Nodes, handler: Callable[..., None]) -> None:
    nodes.group().worker(handler)


@pytest.mark.rule("RB-29")
def test_what_an_operator_said_of_a_resource_is_read_when_it_is_looked_at(nodes: Nodes) -> None:
    admin = nodes.admin()
    admin.add("a", weight=2.5, attributes={"topic": "t"})
    admin.add("b")
    group, journal = nodes.journaled()
    group.start()
    group.wait_settled(PATIENCE_S)
    said, plain_one = journal.owned["a"], journal.owned["b"]
    admin.add("a", attributes={"topic": "u"})
    assert (said.weight, said.attributes) == (2.5, {"topic": "u"})
    admin.add("a", weight=7)
    assert said.weight == 2.5, "what was looked at is kept"
    assert (plain_one.weight, plain_one.attributes) == (1.0, {})
    with pytest.raises(TypeError):
        said.attributes["topic"] = "x"  # type: ignore[index]


# -- giving up single resources


@pytest.mark.rule("RB-1", "RB-2", "RB-11")
def test_what_is_released_starts_elsewhere_once_onstop_has_returned(nodes: Nodes) -> None:
    admin = nodes.admin()
    admin.add("a", pin="one")
    one, (two, second) = nodes.group(node="one"), nodes.journaled(node="two")
    first, stopping, may_stop = Journal(), threading.Event(), threading.Event()
    one.on_start(first.start)
    one.on_fact(first.fact)

    @one.on_stop
    def stop(owned: list[Owned]) -> None:
        stopping.set()
        assert may_stop.wait(PATIENCE_S)
        first.stop(owned)

    one.start()
    two.start()
    first.wait_for_call("start", ("a",))
    admin.add("a", pin=None)
    admin.wait_balanced(PATIENCE_S)
    owned = first.owned["a"]
    assert owned.still_mine()
    owned.release()
    first.wait_for_fact(FactKind.RELEASED)
    assert stopping.wait(PATIENCE_S)
    assert not owned.still_mine()
    assert second.calls == [("start", ())]
    may_stop.set()
    second.wait_for_call("start", ("a",))
    admin.wait_balanced(PATIENCE_S)
    assert second.owned["a"].token > owned.token
    assert ("stop", ("a",)) in first.calls
    assert one.released == {"a"}


@pytest.mark.rule("RB-2", "RB-19")
def test_what_every_node_has_released_is_on_none_and_status_says_why(nodes: Nodes) -> None:
    admin = nodes.admin()
    admin.add("a", "b")
    group, journal = nodes.journaled(node="one")
    group.start()
    journal.wait_for_call("start", ("a", "b"))
    journal.owned["a"].release()
    journal.wait_for_call("stop", ("a",))
    state = admin.wait_balanced(PATIENCE_S)
    assert [each.reason for each in state.resources] == ["every node has released it", None]
    assert [node.released for node in state.nodes] == [("a",)]
    assert not state.all_owned
    assert "  one has released a" in plain(state)
    assert "  nobody owns a: every node has released it" in plain(state)
    admin.add("a", pin="one")
    assert admin.wait_balanced(PATIENCE_S).resources[0].reason == "pinned to one, which has released it"
    group.accept("a")
    admin.add("a", pin=None)
    journal.wait_for_call("start", ("a",))
    assert group.released == frozenset()
    assert admin.wait_balanced(PATIENCE_S).all_owned


@pytest.mark.rule("RB-2")
def test_what_is_released_for_a_time_comes_back_after_it(nodes: Nodes) -> None:
    nodes.admin().add("a")
    group, journal = nodes.journaled(node="one")
    group.start()
    journal.wait_for_call("start", ("a",))
    began_at = time.monotonic()
    journal.owned["a"].release(for_s=0.3)
    journal.wait_for_call("stop", ("a",))
    journal.wait_until(lambda: journal.calls.count(("start", ("a",))) == 2)
    assert time.monotonic() >= began_at + 0.3
    (released,) = (fact for fact in journal.facts if fact.kind is FactKind.RELEASED)
    assert (released.resource, released.value) == ("a", 0.3)


def test_a_release_after_ownership_has_ended_does_nothing(nodes: Nodes) -> None:
    admin = nodes.admin()
    admin.add("a", "b")
    group, journal = nodes.journaled()
    group.accept("a")
    group.start()
    journal.wait_for_call("start", ("a", "b"))
    former = journal.owned["a"]
    admin.remove("a")
    journal.wait_for_call("stop", ("a",))
    admin.add("a")
    journal.wait_for_call("start", ("a",))
    former.release()
    group.wait_settled(PATIENCE_S)
    assert group.released == frozenset()
    group.stop()
    former.release()
    journal.owned["a"].release()
    group.accept("a")
    assert FactKind.RELEASED not in {fact.kind for fact in journal.facts}


@pytest.mark.parametrize("for_s", [0, -1.0, float("inf"), float("nan"), "60", True])
def test_a_time_that_is_none_is_refused(nodes: Nodes, for_s: Any) -> None:
    nodes.admin().add("a")
    group, journal = nodes.journaled()
    group.start()
    journal.wait_for_call("start", ("a",))
    with pytest.raises(InvalidArgument, match="for_s must be a positive number of seconds, or None"):
        journal.owned["a"].release(for_s)
    with pytest.raises(InvalidName):
        group.accept("")


@pytest.mark.rule("RB-42")
def test_a_node_releases_a_thousand_resources_at_once_and_no_more(nodes: Nodes) -> None:
    admin, names = nodes.admin(), [f"r{number:04}" for number in range(1_002)]
    admin.add(*names)
    group, journal = nodes.journaled()
    group.start()
    group.wait_settled(PATIENCE_S)
    owned = journal.owned
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: [owned[name].release() for _ in range(2)], names[:1_000]))
        for name in names[1_000:]:
            with pytest.raises(InvalidState, match=r"has released 1,000 resources, the maximum at once"):
                owned[name].release()
    owned[names[0]].release()
    journal.wait_until(lambda: set(names[:1_000]) == group.released)
    group.accept(names[0])
    journal.wait_until(lambda: names[0] not in group.released)
    owned[names[1_001]].release()
    admin.wait_balanced(PATIENCE_S)
    assert admin.state().unowned == 1_000


@pytest.mark.rule("RB-42", "RB-2")
def test_what_a_node_releases_fits_into_its_member_key(nodes: Nodes) -> None:
    admin, longest = nodes.admin(), '"' * (MAX_NAME_BYTES - 3)
    names = [f"{number:03}{longest}" for number in range(MAX_RELEASED_BYTES // (2 * MAX_NAME_BYTES) + 1)]
    admin.add(names)
    group, journal = nodes.journaled()
    group.start()
    group.wait_settled(PATIENCE_S)
    *released, last = (journal.owned[name] for name in names)
    for owned in released:
        owned.release()
    with pytest.raises(InvalidState, match="would take more than 400,000 bytes"):
        last.release()
    admin.wait_balanced(PATIENCE_S)
    journal.wait_until(lambda: group.resources.keys() == {names[-1]})


@pytest.mark.rule("RB-2")
def test_a_worker_may_release_its_resource_and_return(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "RESTART_INITIAL_S", 0.001)
    admin = nodes.admin()
    admin.add("a", pin="one")
    calls: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    one, two = nodes.group(node="one"), nodes.group(node="two")

    @one.worker
    def give_up(owned: Owned) -> None:
        calls.put(("one", owned.token))
        owned.release(for_s=1_000.0)

    @two.worker
    def work(owned: Owned) -> None:
        calls.put(("two", owned.token))
        owned.stop_requested.wait(PATIENCE_S)

    two.start()
    one.start()
    _, token = calls.get(timeout=PATIENCE_S)
    admin.add("a", pin=None)
    node, later = calls.get(timeout=PATIENCE_S)
    assert (node, later > token) == ("two", True), "it is called once, however soon it returned"
    assert "worker_returned" not in {getattr(record, "action", "") for record in caplog.records}


def test_what_is_accepted_at_once_is_not_released_any_more(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "RESTART_INITIAL_S", 0.001)
    monkeypatch.setattr(workers, "RELEASED_PAUSE_S", 10 * PATIENCE_S)
    nodes.admin().add("a")
    calls: queue.SimpleQueue[Owned] = queue.SimpleQueue()
    group = nodes.group(node="one")

    @group.worker
    def change_its_mind(owned: Owned) -> None:
        owned.release()
        assert owned.released_s == math.inf
        group.accept("a")
        assert owned.released_s == 0.0
        calls.put(owned)

    group.start()
    first, _ = calls.get(timeout=PATIENCE_S), calls.get(timeout=PATIENCE_S)
    group.stop()
    first.release()
    assert first.released_s == 0.0, "it is owned no more"
    assert "worker_returned" in {getattr(record, "action", "") for record in caplog.records}


@pytest.mark.rule("RB-29")
def test_a_fixed_set_is_there_from_the_start_and_keeps_what_was_said(nodes: Nodes) -> None:
    admin = nodes.admin()
    admin.add("a", weight=2.0, pin="n")
    admin.add("z")
    group = Group("group", nodes.url, node="n", settings=QUICK, resources=["a", "b", "a"])
    journal = Journal()
    group.on_start(journal.start)
    group.on_stop(journal.stop)
    for _ in range(2):
        with group:
            group.wait_settled(PATIENCE_S)
            admin.wait_balanced(PATIENCE_S)
            assert sorted(group.resources) == ["a", "b", "z"]
    assert [(r.resource, r.weight, r.pin) for r in admin.resources()] == [
        *(("a", 2.0, "n"), ("b", 1.0, None), ("z", 1.0, None)),
    ]


def test_a_set_that_is_one_text_is_refused(nodes: Nodes) -> None:
    for given in ("abc", b"abc", 3, None):
        with pytest.raises(InvalidArgument, match=rf"resources: a list of names.*got {given!r}\)"):
            Group("group", nodes.url, resources=given)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"timeout_s: .* \(got '1'\)"):
        Group("group", nodes.url).wait_settled("1")  # type: ignore[arg-type]
    with pytest.raises(InvalidName, match="resource name must not be empty"):
        Group("group", nodes.url, resources=[""])


def test_a_registry_that_is_away_for_a_moment_gets_the_fixed_set_too(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, tries = RegistryCoordinator.put_resources, []

    def away_at_first(*arguments: Any) -> int:
        tries.append(arguments)
        if len(tries) == 1:
            raise RegistryUnavailable("away")
        return put(*arguments)

    monkeypatch.setattr(RegistryCoordinator, "put_resources", away_at_first)
    group = Group("group", nodes.url, settings=QUICK, resources=["a"])
    group.worker(lambda owned: owned.stop_requested.wait(PATIENCE_S) and None)
    with group:
        group.wait_settled(PATIENCE_S)
    assert len(tries) == 2


@pytest.mark.rule("RB-1")
def test_exactly_one_leads(nodes: Nodes) -> None:
    leading: queue.SimpleQueue[str] = queue.SimpleQueue()

    def member(node: str) -> Group:
        made = leader("cron", nodes.url, node=node, settings=QUICK)

        @made.worker
        def lead(owned: Owned) -> None:
            leading.put(f"{node} leads {owned.resource}")
            owned.stop_requested.wait(PATIENCE_S)
            leading.put(f"{node} ends")

        return made

    with member("b") as second:
        with member("a") as first:
            nodes.admin("cron").wait_balanced(PATIENCE_S)
            assert len({*first.resources, *second.resources}) == 1
            assert len([*first.resources, *second.resources]) == 1
        nodes.admin("cron").wait_balanced(PATIENCE_S)
        assert list(second.resources) == ["cron"]
    told = [leading.get(timeout=PATIENCE_S) for _ in range(leading.qsize())]
    assert [each.split()[1] for each in told] == ["leads", "ends"] * (len(told) // 2), told


@pytest.mark.rule("RB-27")
def test_a_key_beside_the_group_is_written_by_the_owner_alone(nodes: Nodes) -> None:
    nodes.admin().add("a")
    group, _ = nodes.journaled()
    with closing(open_registry(nodes.url)) as registry:

        def put(value: bytes) -> bool:
            return put_if_owned(registry, nodes.url, "group", owned, "offsets/a", value)

        with group:
            group.wait_settled(PATIENCE_S)
            owned = group.resources["a"]
            assert put(b"1")
            stale = SimpleNamespace(resource="a", token=owned.token - 1)
            assert not put_if_owned(registry, nodes.url, "group", stale, "offsets/a", b"0")
            with pytest.raises(InvalidName, match="among those of the groups, below 'rebalanser'"):
                put_if_owned(registry, nodes.url, "group", owned, "rebalanser/group/term", b"")
        assert not put(b"2"), "nobody owns it"
        with group:
            group.wait_settled(PATIENCE_S)
            assert not put(b"3"), "another incarnation owns it"
        found = registry.execute(Transaction(then=(Get("offsets/a"),)), PATIENCE_S)
        assert [entry.value for entry in found.results] == [b"1"]  # type: ignore[union-attr]


# -- what can't be


@pytest.mark.rule("RB-33")
@pytest.mark.parametrize("name", ["", "line\nbreak", "\x00", "x" * 513, "\ud800", 7])
def test_a_name_that_can_not_be_stored_is_refused(name: str) -> None:
    with pytest.raises(InvalidName, match=r"group name|a group name"):
        Group(name, "memory://x")
    with pytest.raises(InvalidName, match=r"node name|a node name"):
        Group("group", "memory://x", node=name)


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidUrl, match="is not a registry URL"):
        Group("group", "groups.db")


@pytest.mark.parametrize("made", [Group, AsyncGroup, Admin])
def test_the_environment_names_the_registry_where_the_program_does_not(
    made: type[Group | AsyncGroup | Admin], nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REBALANSER_REGISTRY", nodes.url)
    named = made("group")
    assert named.name == "group"
    if isinstance(named, Admin):
        named.close()
    else:
        assert nodes.url in repr(named)


@pytest.mark.parametrize("made", [Group, AsyncGroup, Admin])
def test_a_registry_that_nobody_names_is_asked_for(
    made: type[Group | AsyncGroup | Admin], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REBALANSER_REGISTRY", raising=False)
    with pytest.raises(InvalidUrl, match=r"no registry is named: .* set REBALANSER_REGISTRY"):
        made("group", None)


@pytest.mark.parametrize("made", [Group, AsyncGroup, Admin])
def test_arguments_of_another_type_are_refused_in_words(
    made: Callable[..., object], nodes: Nodes, tmp_path: Path
) -> None:
    with pytest.raises(InvalidUrl, match=r"is text such as sqlite:///groups\.db, not PosixPath"):
        made("group", tmp_path)
    with pytest.raises(InvalidSettings, match=r"must be a rebalanser.Settings, not dict: write"):
        made("group", nodes.url, settings={"lease_ttl_s": 5})


def test_an_unknown_scheme_is_refused_with_the_known_ones() -> None:
    group = Group("group", "redis://localhost:6379/")
    group.worker(lambda _owned: None)
    known = r"etcd, etcd\+srv, etcd\+tls, etcd\+tls\+srv, kafka, memory, sqlite"
    with pytest.raises(UnknownScheme, match=rf"redis://; known: {known}"):
        group.start()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_package:open_far", None),
        ("no_such_package:open_far [fast,tls]", r"far:// needs .*; pip install 'rebalanser\[fast,tls\]'"),
    ],
)
def test_the_extra_of_a_backend_is_named_by_its_entry_point(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str | None
) -> None:
    """A backend of another distribution is found, and installed, by what its entry point says."""
    point = EntryPoint("far", value, "rebalanser.backends")
    vars(point).update(dist=distribution("rebalanser"))
    monkeypatch.setattr("rebalanser.registry.urls.known_schemes", lambda _group: {"far": point})
    with pytest.raises(ImportError if message is None else MissingExtra, match=message):
        open_backend("far://127.0.0.1")


def test_what_keeps_groups_but_no_keys_is_no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    class Groups(GroupStore):
        capabilities = MEMORY_CAPABILITIES

        def look(self, timeout_s: float) -> None:
            """It answers."""

        def open_group(
            self,
            group: str,
            now: Callable[[], float],
            timeout_s: float,
            connect_timeout_s: float,
            *,
            create: bool = True,
        ) -> Coordinator:
            raise NotImplementedError

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(
        "rebalanser.registry.urls.load_opener", lambda _scheme: lambda _url, _timeout_s: Groups()
    )
    with pytest.raises(NotARegistry, match="keeps groups, but no keys"):
        open_registry("kafka://127.0.0.1:1/c")
    assert closed == [True]


def test_no_password_is_shown() -> None:
    group = Group("group", "etcd://root:geheim@127.0.0.1:2379/prefix")
    assert repr(group).startswith("Group('group', 'etcd://root:***@127.0.0.1:2379/prefix', node=")
    assert "geheim" not in str(vars(group) | {"_url_text": ""})


class Strange(MemoryRegistry):
    """Answers grants in its own way."""

    answer: Callable[[Granted], Granted]

    def execute(self, request: Request, timeout_s: float) -> Reply:
        reply = super().execute(request, timeout_s)
        if isinstance(request, Grant) and isinstance(reply, Granted):
            return type(self).answer(reply)
        return reply


def strange(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Granted], Granted]) -> list[MemoryRegistry]:
    """Open memory registries that answer grants so."""
    opened: list[MemoryRegistry] = []

    def open_strange(url: object, timeout_s: float) -> MemoryRegistry:
        registry = open_memory(url, timeout_s)  # type: ignore[arg-type]
        assert isinstance(registry, MemoryRegistry)
        kind = type("Strange", (Strange,), {"answer": staticmethod(answer)})
        opened.append(kind(registry._store, registry.close))
        return opened[-1]

    monkeypatch.setattr("rebalanser.group.open_backend", open_strange)
    return opened


def test_a_full_registry_refuses_the_start(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_granted: Granted) -> Granted:
        raise QuotaExceeded("the server is over its quota: free space and disarm its alarm")

    (*_,) = opened = strange(monkeypatch, refuse)
    group, _ = nodes.journaled()
    with pytest.raises(QuotaExceeded, match=r"cannot join group 'group': the server is over its quota"):
        group.start()
    assert opened[0]._closed
    assert group.wait_stopped(0)


def test_a_lease_that_is_made_longer_is_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    strange(monkeypatch, lambda granted: Granted(granted.lease, 30.0))
    group, _ = nodes.journaled()
    with pytest.raises(InvalidSettings, match=r"lease_ttl_s 10 is below .* it grants 30 s"):
        group.start()
    state = nodes.admin().state()
    assert state.nodes == ()


def test_a_lease_below_the_smallest_is_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = strange(monkeypatch, lambda granted: granted)
    group, _ = nodes.journaled(settings=Settings(lease_ttl_s=1e-9))
    with pytest.raises(InvalidSettings, match=r"lease_ttl_s 1e-09 is below the .* s that memory://"):
        group.start()
    assert opened[0]._closed


def test_a_registry_that_never_answers_is_unavailable(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_granted: Granted) -> Granted:
        raise RegistryUnavailable("connection refused")

    strange(monkeypatch, fail)
    group, journal = nodes.journaled(settings=QUICK.model_copy(update={"connect_timeout_s": 0.01}))
    with pytest.raises(RegistryUnavailable, match=r"cannot join group 'group' at memory://\w+ within 0.01 s"):
        group.start()
    assert group.wait_stopped(PATIENCE_S)
    assert FactKind.JOINED not in {fact.kind for fact in journal.facts}


def test_a_stop_during_the_start_is_no_error(nodes: Nodes) -> None:
    group, _ = nodes.journaled()
    group.on_fact(lambda fact: group.request_stop() if fact.kind is FactKind.JOINING else None)
    group.start()
    assert group.wait_stopped(PATIENCE_S)
    assert nodes.admin().state().nodes == ()


class BrokenTranslation(Translation):
    """Breaks an invariant when barriers are to be removed."""

    def _remove_barriers(self, command: object) -> object:  # type: ignore[override]
        raise InternalError("a broken invariant")
        yield Transaction()


class NoLogThread(threading.Thread):
    """A host that starts no thread for a log, as at its limit of threads."""

    def start(self) -> None:
        if self.name == "rebalanser-log":
            raise RuntimeError("can't start new thread")
        super().start()


@pytest.mark.parametrize("thread", [threading.Thread, NoLogThread])
def test_a_broken_invariant_ends_all_access(
    nodes: Nodes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    thread: type[threading.Thread],
) -> None:
    monkeypatch.setattr(threading, "Thread", thread)
    admin = nodes.admin()
    admin.add("a", "b")
    group, journal = nodes.journaled()

    class Broken(RegistryCoordinator):
        def __init__(self, registry: MemoryRegistry, root: str, name: str, *rest: object) -> None:
            super().__init__(registry, root, name, *rest)  # type: ignore[arg-type]
            self._translation = BrokenTranslation(GroupKeys(root, name), registry.capabilities)

    with monkeypatch.context() as patch:
        patch.setattr("rebalanser.group.RegistryCoordinator", Broken)
        group.start()
    group.wait_settled(PATIENCE_S)
    admin.remove("a")
    with pytest.raises(InternalError, match="a broken invariant"):
        group.wait_stopped(PATIENCE_S)
    assert journal.calls == [("start", ("a", "b")), ("stop", ("a",)), ("stop", ("b",))]
    assert not any(owned.still_mine() for owned in journal.owned.values())
    if thread is NoLogThread:
        assert "ERROR rebalanser: the engine failed" in capsys.readouterr().err
    else:
        assert "engine_failed" in {getattr(record, "action", "") for record in caplog.records}
    with pytest.raises(InternalError):
        group.stop()
    group.stop()
    assert admin.state().nodes[0].held == 2, "its lease has to end by itself"


@pytest.mark.rule("RB-34")
def test_a_switch_that_can_not_be_had_is_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise InvalidSettings("on_overrun='kill' can't be had here")

    monkeypatch.setattr("rebalanser.group.DeadMansSwitch", refuse)
    group, journal = nodes.journaled(settings=QUICK.model_copy(update={"on_overrun": OnOverrun.KILL}))
    with pytest.raises(InvalidSettings, match="can't be had here"):
        group.start()
    assert journal.facts == []


@pytest.mark.parametrize(
    "use", ["start", "stop", "request_stop", "wait_settled", "wait_stopped", "resources"]
)
def test_a_group_is_of_no_use_in_a_child(nodes: Nodes, use: str) -> None:
    nodes.admin().add("a")
    group, journal = nodes.journaled()
    group.start()
    group.wait_settled(PATIENCE_S)
    group._after_fork_in_child()
    assert not journal.owned["a"].still_mine()
    with pytest.raises(Forked, match="make a new one here"):
        operator.methodcaller(use)(group)
    group._forked = False


@pytest.mark.rule("RB-30")
def test_default_labels_name_the_process_and_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later one may have the same host and process id, as in a container that is replaced."""
    label = Group("group", "memory://x").node
    assert label.startswith(f"{socket.gethostname()}:{os.getpid()}-")
    assert Group("other", "memory://x").node == label
    _random_part.cache_clear()
    later = Group("group", "memory://x").node
    assert later != label
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert Group("group", "memory://x").node.rpartition("-")[2] != later.rpartition("-")[2], (
        "a fork has its own"
    )


def test_what_a_group_cannot_call_is_refused(nodes: Nodes) -> None:
    async def coroutine(_owned: object) -> None:
        """Never awaited by a group that knows no event loop."""

    for register in (nodes.group().on_start, nodes.group().on_stop, nodes.group().worker):
        with pytest.raises(InvalidHandlers, match="AsyncGroup"):
            register(coroutine)  # type: ignore[type-var]
        with pytest.raises(InvalidHandlers, match="no function"):
            register(3)  # type: ignore[type-var]


def test_a_url_whose_brackets_do_not_close_is_refused() -> None:
    with pytest.raises(InvalidUrl):
        Group("g", "etcd://[::1:2379")


PROGRAM_THAT_ENDS = """
import os, sys
from rebalanser import Group

def main():
    group = Group("orders", "memory://ends", node="n", resources=["a"])
    group.worker(lambda owned: owned.stop_requested.wait())
    group.start()
    group.wait_settled()
    {}

main()
"""


@pytest.mark.parametrize(
    ("last", "warnings"),
    [
        ("pass", 1),
        ("sys.exit(0)", 1),
        ("group.stop()", 0),
        ("group.stop(); group.start(); group.stop()", 0),
        ("group.stop(); group.start()", 1),
        ("group.request_stop(); group.wait_stopped()", 0),
        ("if os.fork() == 0: sys.exit(0)\n    os.wait(); group.stop()", 0),
    ],
)
@pytest.mark.rule("RB-26")
def test_a_program_that_ends_without_stop_is_told_so(last: str, warnings: int) -> None:
    program = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM_THAT_ENDS.format(last)]
    ended = subprocess.run(program, check=True, capture_output=True, text=True)
    line = (
        "WARNING rebalanser: the program ended without stop(): others get its resources once its lease has "
        "ended; run() takes part until a signal action=not_stopped group=orders node=n\n"
    )
    told = [each for each in ended.stderr.splitlines(keepends=True) if "action=loop_slow" not in each]
    assert told == [line] * warnings, "and on a busy machine that its loop is slow"
