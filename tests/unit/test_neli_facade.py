"""``Neli`` as a host application meets it, over elections that are decided by the test."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import rebalanser.neli
from rebalanser.core.neli.messages import CallFenced, CallInduced, CallLapsed, Fact, FactKind
from rebalanser.core.neli.roles import Role, Roles
from rebalanser.core.neli.settings import GroupProtocol, Mode, NeliSettings
from rebalanser.errors import (
    Fenced,
    InvalidHandlers,
    InvalidName,
    InvalidSettings,
    InvalidState,
    InvalidUrl,
    MissingExtra,
    NotSettled,
    RebalanserError,
    UnknownScheme,
)
from rebalanser.history import MemorySink, Record, read_records
from rebalanser.neli import AsyncNeli, Neli
from rebalanser.neli.contract import Candidacy, Candidate, Elections, OnCall, OnFact
from rebalanser.neli.description import GroupDescription
from rebalanser.neli.facts import FactReporter
from rebalanser.neli.history import LeadershipHistory
from rebalanser.registry.urls import RegistryUrl
from rebalanser.testing.waiting import PATIENCE_S


@dataclass
class Puppet(Candidate):
    """A candidate that does what the test says."""

    candidacy: Candidacy
    on_call: OnCall
    on_fact: OnFact
    tokens: dict[Role, int] = field(default_factory=dict)
    failure: RebalanserError | None = None
    asked: int = 0
    ends: bool = True
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def process(self) -> str:
        return "puppet"

    def leads(self, role: Role) -> bool:
        return role in self.tokens

    def token(self, role: Role) -> int | None:
        return self.tokens.get(role)

    def held(self) -> dict[Role, int]:
        return dict(self.tokens)

    def why_not(self, role: Role) -> str | None:
        return None if role in self.tokens else "the puppet says no"

    def wait_leader(self, role: Role, timeout_s: float) -> bool:
        return role in self.tokens

    def set_roles(self, roles: Roles) -> None:
        self.tokens = dict.fromkeys(roles, 1)

    def stop(self) -> None:
        self.asked += 1
        if self.ends:
            self.ended.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        ended = self.ended.wait(timeout_s)
        if ended and self.failure:
            raise self.failure
        return ended


class Stage(Elections):
    """Elections whose candidates are puppets."""

    def __init__(self) -> None:
        self.puppets: list[Puppet] = []

    def __call__(self, _url: RegistryUrl, _timeout_s: float) -> Stage:
        return self

    def stand(self, candidacy: Candidacy, on_call: OnCall, on_fact: OnFact) -> Puppet:
        self.puppets.append(Puppet(candidacy, on_call, on_fact))
        return self.puppets[-1]

    def describe(self, candidacy: Candidacy) -> GroupDescription:
        raise NotImplementedError

    @property
    def puppet(self) -> Puppet:
        return self.puppets[-1]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage()
    monkeypatch.setattr("rebalanser.neli.contract.load_opener", lambda _scheme, _group: stage)
    return stage


@pytest.fixture
def neli(stage: Stage) -> Neli:
    return Neli("roles", "office", ["a", "b", 3], kafka="127.0.0.1:1")


def test_the_package_names_its_facade_and_nothing_else() -> None:
    assert rebalanser.neli.Neli is Neli
    with pytest.raises(AttributeError, match="no attribute 'Leader'"):
        _ = rebalanser.core.neli.Leader


def test_where_kafka_is_must_be_said(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    monkeypatch.delenv("REBALANSER_KAFKA", raising=False)
    with pytest.raises(InvalidUrl, match="REBALANSER_KAFKA"):
        Neli("roles", "office", ["a"])
    monkeypatch.setenv("REBALANSER_KAFKA", "127.0.0.1:1")
    Neli("roles", "office", ["a"]).start()
    assert stage.puppet.candidacy.topic == "roles"


def test_a_scheme_that_nobody_has_is_refused() -> None:
    with pytest.raises(UnknownScheme, match="etcd"):
        Neli("roles", "office", ["a"], kafka="etcd://127.0.0.1:1").start()


def test_a_missing_client_is_named(
    monkeypatch: pytest.MonkeyPatch, forget_modules: Callable[[str], None]
) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    forget_modules("rebalanser_kafka")
    with pytest.raises(MissingExtra, match=r"pip install 'rebalanser\[kafka\]'"):
        Neli("roles", "office", ["a"], kafka="127.0.0.1:1").start()


@pytest.mark.rule("NE-11")
def test_a_topic_that_kafka_would_refuse_is_refused_before_anything_is_sent(stage: Stage) -> None:
    with pytest.raises(InvalidName, match="'a/b' cannot name a topic"):
        Neli("a/b", "office", ["a"], kafka="127.0.0.1:1")
    assert not stage.puppets


@pytest.mark.parametrize(
    ("topic", "group", "words"),
    [
        (5, "office", "a topic name is text, not int"),
        ("roles", 5, "a consumer group name is text, not int"),
        ("roles", "", "a consumer group name must not be empty"),
    ],
)
def test_names_that_are_none_are_refused(topic: str, group: str, words: str) -> None:
    with pytest.raises(InvalidName, match=words):
        Neli(topic, group, ["a"], kafka="127.0.0.1:1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "quick"}, "'quick' is no mode; known are non-exclusive, exclusive, fast"),
        ({"settings": NeliSettings(protocol="newest")}, "'newest' is no group protocol"),  # type: ignore[arg-type]
        ({"settings": NeliSettings(deadline_s=9.0)}, "deadline_s 9 must be at most a third"),
        ({"partitions": 0}, "0 partitions"),
        ({"roles": [1.5]}, "1.5 is no role"),
        ({"partitions": "2"}, "partitions is '2': give a whole number"),
        ({"settings": {"mode": "fast"}}, r"settings must be rebalanser.neli.NeliSettings\(…\), not dict"),
        ({"settings": NeliSettings(deadline_s="10")}, "deadline_s is '10', it must be a number"),  # type: ignore[arg-type]
        ({"settings": NeliSettings(groups=None)}, "groups is None, it must be a number"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_contradict_the_mode_are_refused_before_anything_is_sent(
    stage: Stage, options: dict[str, object], words: str
) -> None:
    given = {"roles": ["a"], "kafka": "127.0.0.1:1", **options}
    with pytest.raises(InvalidSettings, match=words):
        Neli("roles", "office", **given)  # type: ignore[arg-type]
    assert not stage.puppets


def test_names_given_as_text_mean_the_same(stage: Stage) -> None:
    settings = NeliSettings(protocol="consumer")  # type: ignore[arg-type]
    neli = Neli("roles", "office", ["a"], kafka="127.0.0.1:1", mode="exclusive", settings=settings)
    assert neli.settings.mode is Mode.EXCLUSIVE
    assert neli.settings.protocol is GroupProtocol.CONSUMER
    assert repr(neli) == "Neli('roles', 'office', mode='exclusive')"


@pytest.mark.rule("NE-16")
def test_what_the_candidate_says_is_what_the_application_hears(neli: Neli, stage: Stage) -> None:
    assert not neli.is_leader("a")
    assert neli.token("a") is None
    assert neli.roles_held() == {}
    assert neli.why_not("a") == "it does not take part"
    with neli:
        stage.puppet.tokens = {"a": 7}
        assert neli.is_leader("a")
        assert not neli.is_leader("b")
        assert neli.token("a") == 7
        assert neli.roles_held() == {"a": 7}
        assert neli.why_not("b") == "the puppet says no"
        assert neli.wait_leader("a", PATIENCE_S)
        neli.set_roles(["c"])
        assert neli.is_leader("c")
    assert not neli.is_leader("c")
    neli.start()
    assert set(stage.puppet.candidacy.roles) == {"c"}, "they are kept"


@pytest.mark.rule("NE-1")
def test_roles_named_while_it_starts_count(neli: Neli, stage: Stage) -> None:
    def stand(candidacy: Candidacy, on_call: OnCall, on_fact: OnFact) -> Puppet:
        neli.set_roles(["late"])
        return Stage.stand(stage, candidacy, on_call, on_fact)

    stage.stand = stand  # type: ignore[method-assign]
    with neli:
        assert neli.roles_held().keys() == {"late"}


@pytest.mark.rule("NE-16")
def test_handlers_are_called_for_each_role_with_its_token(neli: Neli, stage: Stage) -> None:
    calls: list[tuple[str, Role, int]] = []

    @neli.on_induced
    def induced(role: Role, token: int) -> None:
        calls.append(("induced", role, token))

    @neli.on_lapsed
    def lapsed(role: Role, token: int) -> None:
        calls.append(("lapsed", role, token))
        if role == "a":
            raise ValueError("it will not end")

    with neli:
        stage.puppet.on_call(CallInduced(0, frozenset({"a", 3}), 5))
        with pytest.raises(ValueError, match="it will not end"):
            stage.puppet.on_call(CallLapsed(0, frozenset({"b", "a"}), 5, 1.0))
        stage.puppet.on_call(CallFenced(0, frozenset({"a"}), 5, "nobody listens"))
    assert calls == [("induced", 3, 5), ("induced", "a", 5), ("lapsed", "a", 5), ("lapsed", "b", 5)]


def test_handlers_that_can_not_be_called_are_refused(neli: Neli) -> None:
    async def coroutine(_role: Role, _token: int) -> None: ...

    def plain(_role: Role, _token: int) -> None: ...

    name = "test_handlers_that_can_not_be_called_are_refused.<locals>.coroutine"
    for handler in (coroutine, functools.partial(coroutine)):
        with pytest.raises(InvalidHandlers, match=rf"^{name} is a coroutine function: use AsyncNeli$"):
            neli.on_induced(handler)  # type: ignore[type-var]
    neli.on_fenced(plain)
    with pytest.raises(InvalidHandlers, match="on_fenced is registered already"):
        neli.on_fenced(plain)
    with neli, pytest.raises(InvalidState, match="before the start"):
        neli.on_induced(plain)


@pytest.mark.parametrize("kind", [Neli, AsyncNeli])
def test_a_handler_that_takes_something_else_is_refused_at_once(kind: type[Neli]) -> None:
    neli = kind("roles", "office", ["a"], kafka="127.0.0.1:1")
    for register in (neli.on_induced, neli.on_lapsed, neli.on_fenced):
        with pytest.raises(InvalidHandlers, match=r"^5 is no function$"):
            register(5)  # type: ignore[type-var]
        with pytest.raises(
            InvalidHandlers, match=r"a role and a fencing token, and .*<lambda> can't be: too"
        ):
            register(lambda _role: None)  # type: ignore[type-var]
        register(print)


def test_stopping(neli: Neli, stage: Stage) -> None:
    neli.stop()
    with pytest.raises(InvalidState, match="has not been started"):
        neli.wait_leader("a")
    neli.start()
    with pytest.raises(InvalidState, match="takes part already"):
        neli.start()
    stage.puppet.ends = False
    with pytest.raises(NotSettled, match="has not stopped within 0 s"):
        neli.stop(0)
    stage.puppet.ended.set()
    neli.stop()
    neli.start()
    assert len(stage.puppets) == 2


def test_a_handler_can_not_wait_for_itself(neli: Neli, stage: Stage) -> None:
    @neli.on_induced
    def induced(_role: Role, _token: int) -> None:
        with pytest.raises(InvalidState, match="request_stop"):
            neli.stop()
        neli.request_stop()

    neli.start()
    thread = threading.Thread(target=stage.puppet.on_call, args=(CallInduced(0, frozenset({"a"}), 5),))
    thread.start()
    assert neli.wait_stopped(PATIENCE_S)
    thread.join()
    assert stage.puppet.asked == 1


def test_what_ended_it_is_raised_and_it_may_begin_again(neli: Neli, stage: Stage) -> None:
    neli.start()
    stage.puppet.failure = Fenced("another process has this instance")
    stage.puppet.ended.set()
    with pytest.raises(Fenced):
        neli.wait_stopped()
    neli.start()
    assert len(stage.puppets) == 2
    neli.stop()


def test_run_waits_for_a_stop(neli: Neli, stage: Stage) -> None:
    @neli.on_induced
    def induced(_role: Role, _token: int) -> None:
        neli.request_stop()

    def stand(candidacy: Candidacy, on_call: OnCall, on_fact: OnFact) -> Puppet:
        puppet = Stage.stand(stage, candidacy, on_call, on_fact)
        threading.Thread(target=on_call, args=(CallInduced(0, frozenset({"a"}), 5),)).start()
        return puppet

    stage.stand = stand  # type: ignore[method-assign]
    neli.run()
    assert stage.puppet.ended.is_set()

    raised: list[Exception] = []

    def elsewhere() -> None:
        try:
            neli.run()
        except InvalidState as error:
            raised.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


def test_facts_reach_the_hooks_and_no_hook_holds_up_another() -> None:
    heard: list[Fact] = []

    def broken(_fact: Fact) -> None:
        raise ValueError("no")

    teller = FactReporter("office", [broken, heard.append])
    facts = [Fact(FactKind.ASSIGNED, 0), Fact(FactKind.INDUCED, 0, 5), Fact(FactKind.LEFT)]
    for fact in facts:
        teller.tell(fact)
    teller.close()
    assert heard == facts


@pytest.mark.rule("NE-16")
def test_asyncio_handlers_run_in_the_loop_and_stop_with_a_signal_or_a_request(stage: Stage) -> None:
    async def live() -> list[str]:
        neli = AsyncNeli("roles", "office", ["a"], kafka="127.0.0.1:1")
        told: list[str] = []
        loop = asyncio.get_running_loop()

        @neli.on_induced
        async def induced(role: Role, token: int) -> None:
            assert asyncio.get_running_loop() is loop
            with pytest.raises(InvalidState):
                await neli.stop()
            told.append(f"{role} {token}")

        @neli.on_fenced
        def fenced(role: Role, token: int) -> None:
            told.append(f"fenced {role} {token}")
            neli.request_stop()

        running = asyncio.ensure_future(neli.run())
        while not stage.puppets:
            await asyncio.sleep(0)
        calls: list[Callable[[], None]] = [
            lambda: stage.puppet.on_call(CallInduced(0, frozenset({"a"}), 5)),
            lambda: stage.puppet.on_call(CallFenced(0, frozenset({"a"}), 5, "why not")),
        ]
        for call in calls:
            await asyncio.to_thread(call)
        await running
        return told

    assert asyncio.run(live()) == ["a 5", "fenced a 5"]


class StoppedClock:
    """A clock that stands where the test puts it."""

    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at + 1_700_000_000.0


@pytest.mark.rule("AU-3", "NE-4", "NE-6")
def test_the_history_has_the_times_of_the_facts_and_waits_for_the_name_of_the_process() -> None:
    sink, clock = MemorySink(), StoppedClock()
    settings = NeliSettings(mode=Mode.NON_EXCLUSIVE, session_timeout_s=10.0, deadline_s=16.0)
    history = LeadershipHistory(Candidacy("roles", "office", settings=settings), sink, clock)
    history.tell(Fact(FactKind.ASSIGNED, 3, at=1000.0))
    assert not sink.records, "nobody knows yet whose record it is"
    clock.at = 1010.0
    history.begin("host-1-abc")
    history.tell(Fact(FactKind.INDUCED, 3, 41, 1010.0, {"roles": "mail"}))
    clock.at = 1090.0
    history.tell(Fact(FactKind.FENCED, 3, 41, 1026.0, {"late_s": 64.0}))
    told = [(r.sequence, r.kind, r.resource, r.token, r.overlap_limit_s) for r in sink.records]
    assert told == [
        (0, "assigned", "3", None, None),
        (1, "induced", "3", 41, 6.0),
        (2, "fenced", "3", 41, None),
    ]
    assert [record.monotonic_time for record in sink.records] == [1000.0, 1010.0, 1026.0]
    assert [record.wall_time - 1_700_000_000.0 for record in sink.records] == [1000.0, 1010.0, 1026.0]
    assert {(r.group, r.process, r.node) for r in sink.records} == {
        ("roles/office", "host-1-abc", "host-1-abc")
    }
    history.close()
    assert sink.closed


@pytest.mark.rule("AU-1")
@pytest.mark.parametrize("in_environment", [False, True])
def test_a_history_is_written_where_it_is_wanted(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_environment: bool
) -> None:
    if in_environment:
        monkeypatch.setenv("REBALANSER_HISTORY_DIR", str(tmp_path))
    folder = None if in_environment else tmp_path
    neli = Neli("roles", "office", ["a"], kafka="127.0.0.1:1", instance="desk-1", history_dir=folder)
    neli.start()
    stage.puppet.on_fact(Fact(FactKind.INDUCED, 0, 5))
    neli.stop()
    (record,) = read_records(tmp_path)
    assert isinstance(record, Record)
    assert (record.label, record.process, record.kind, record.token) == ("desk-1", "puppet", "induced", 5)


def test_a_history_that_can_not_be_is_refused_at_the_start(stage: Stage) -> None:
    neli = Neli("roles", "office", ["a"], kafka="127.0.0.1:1", history_topic="nowhere")
    with pytest.raises(InvalidUrl):
        neli.start()
    assert not stage.puppets
