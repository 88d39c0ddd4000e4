"""Groups of real processes on real registries: killed, paused, cut off, stuck and told to stop."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rebalanser import Admin, Group, Settings
from rebalanser.core.group import FactKind
from rebalanser.errors import InvalidSettings, RegistryUnavailable
from rebalanser.runtime.dead_man import DeadMansSwitch
from rebalanser.testing.etcd_server import EtcdCluster, free_ports
from rebalanser.testing.kafka_server import KafkaCluster
from rebalanser.testing.pausing import pause
from rebalanser.testing.waiting import PATIENCE_S, patience_ratio, wait_until
from rebalanser.testing.witness import Witness
from support.proxy import TcpProxy

if TYPE_CHECKING:
    from rebalanser.core.group import Fact

RESOURCES = tuple(f"r{number}" for number in range(4))
SLACK_S = 3.0 * patience_ratio()
"""How much later than at best a process of a busy machine may do something."""
SEEN_LATE_S = 0.1
"""How much later than it is a death is seen: memory is freed first, and who waits for it needs a CPU."""
LONG_TTL_S = 120.0
"""A lease so long that nothing in a test waits for its end."""
PROCESS = Path(__file__).with_name("group_process.py")

Event = dict[str, Any]


class Place(ABC):
    """A registry of this test, and power over the way to it."""

    ttl_s: float
    detection_s: float
    """How long after its end a lease may still be seen."""
    ends_leases_while_cut = True
    """Whether a lease ends though nobody gets through to say so."""

    @property
    @abstractmethod
    def url(self) -> str:
        """How to get there, come what may."""

    @property
    @abstractmethod
    def breakable_url(self) -> str:
        """How to get there on the way that ``cut`` breaks."""

    @abstractmethod
    def cut(self) -> None:
        """Let nobody through."""

    @abstractmethod
    def heal(self) -> None:
        """Let everybody through again."""

    def close(self) -> None:
        """Tidy up."""
        self.heal()


class SqlitePlace(Place):
    """A file; another process that holds its lock cuts everybody off."""

    ttl_s = 2.0
    detection_s = 0.05

    def __init__(self, folder: Path) -> None:
        self._path = folder / "groups.db"
        self._holder: sqlite3.Connection | None = None

    @property
    def url(self) -> str:
        return f"sqlite:///{self._path}"

    @property
    def breakable_url(self) -> str:
        return self.url

    def cut(self) -> None:
        self._holder = sqlite3.connect(self._path, timeout=PATIENCE_S, isolation_level=None)
        self._holder.execute("BEGIN EXCLUSIVE")

    def heal(self) -> None:
        if self._holder is not None:
            self._holder.rollback()
            self._holder.close()
            self._holder = None


class EtcdPlace(Place):
    """A server, and a proxy before it."""

    ttl_s = 2.0
    detection_s = 1.0

    def __init__(self, server: EtcdCluster, stall: bool = False) -> None:
        self._server = server
        self._prefix = f"faults/{uuid.uuid4().hex}"
        self._stall = stall
        self._proxy = TcpProxy(server.endpoints[0])

    @property
    def url(self) -> str:
        return self._server.url(self._prefix)

    @property
    def breakable_url(self) -> str:
        return self._server.url(self._prefix, [self._proxy.address])

    def cut(self) -> None:
        if self._stall:
            self._proxy.stall()
        else:
            self._proxy.cut()

    def heal(self) -> None:
        self._proxy.heal()

    def close(self) -> None:
        self._proxy.close()


class KafkaPlace(Place):
    """A broker; while it is stopped everybody is cut off."""

    ttl_s = 2.0
    detection_s = 1.0
    ends_leases_while_cut = False

    def __init__(self, broker: KafkaCluster) -> None:
        self._broker = broker
        self._cluster = f"faults-{uuid.uuid4().hex}"
        self._paused = False

    @property
    def url(self) -> str:
        return self._broker.url(self._cluster)

    @property
    def breakable_url(self) -> str:
        return self.url

    def cut(self) -> None:
        self._broker.pause(0)
        self._paused = True

    def heal(self) -> None:
        if self._paused:
            self._broker.resume(0)
            self._paused = False


class Process:
    """One node in a process of its own, and what it has told so far."""

    def __init__(self, order: Event) -> None:
        self.node: str = order["node"]
        self._shared: list[str] = [order["url"]]
        if "sink" in order:
            self._shared.append(f"sqlite:///{order['sink']}")
        self.events: list[Event] = []
        self.died_at: float | None = None
        self._witness = Witness(order["witness"])
        self._more = threading.Condition()
        self.popen = subprocess.Popen(
            [sys.executable, str(PROCESS), json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._readers = [threading.Thread(target=each, daemon=True) for each in (self._read, self._bury)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._more:
                self.events.append(json.loads(line))
                self._more.notify_all()

    def _bury(self) -> None:
        self.popen.wait()
        with self._more:
            self.died_at = time.monotonic()
            self._more.notify_all()
        self._witness.died(self.popen.pid)

    def obey(self, line: str) -> None:
        """Have it do something."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    def signal(self, number: signal.Signals) -> float:
        """Send a signal; when."""
        at = time.monotonic()
        self.popen.send_signal(number)
        return at

    def pause(self) -> None:
        """Stop it (SIGSTOP), and nobody else."""
        pause(self.popen, *self._shared)

    def wait_for_death(self) -> float:
        """When it died."""
        with self._more:
            assert self._more.wait_for(lambda: self.died_at is not None, PATIENCE_S), self.events[-10:]
        for reader in self._readers:
            reader.join()
        assert self.died_at is not None
        return self.died_at

    def wait_for(self, event: str, since: float = 0.0, **fields: Any) -> Event:
        """The first such event at ``since`` or later."""

        def found() -> list[Event]:
            return self.of(event, since, **fields)

        with self._more:
            assert self._more.wait_for(found, PATIENCE_S), (self.node, event, fields, self.events[-20:])
            return found()[0]

    def of(self, event: str, since: float = 0.0, **fields: Any) -> list[Event]:
        """All such events so far."""
        return [
            each
            for each in list(self.events)
            if each["event"] == event
            and each["at"] >= since
            and all(each[name] == value for name, value in fields.items())
        ]

    @property
    def owned(self) -> dict[str, int]:
        """What it has access to, by what it told."""
        owned: dict[str, int] = {}
        for each in list(self.events):
            if each["event"] == "start":
                owned.update(each["owned"])
            elif each["event"] == "stopped":
                owned = {name: token for name, token in owned.items() if name not in each["owned"]}
        return owned

    def wait_until_owning(self, resources: set[str]) -> None:
        """Block until it has access to just these."""
        with self._more:
            assert self._more.wait_for(lambda: set(self.owned) == resources, PATIENCE_S), self.events[-20:]

    def close(self) -> None:
        """Kill it if it lives, and take its pipes down."""
        self.popen.kill()
        self.wait_for_death()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


class Stage:
    """Starts processes of one group, and keeps the witness."""

    def __init__(self, place: Place, folder: Path, stack: ExitStack) -> None:
        self.place = place
        self.folder = folder
        self.witness = Witness(folder / "witness.jsonl")
        self._stack = stack
        self._started = 0

    def admin(self, group: str = "group") -> Admin:
        return self._stack.enter_context(Admin(group, self.place.url, timeout_s=PATIENCE_S))

    def start(self, breakable: bool = False, settings: dict[str, Any] | None = None, **order: Any) -> Process:
        """Start a node; it has joined once it tells so."""
        self._started += 1
        whole = {
            "group": "group",
            "url": self.place.breakable_url if breakable else self.place.url,
            "node": f"n{self._started}",
            "settings": {
                "lease_ttl_s": self.place.ttl_s,
                "min_rebalance_interval_s": 0.0,
                **(settings or {}),
            },
            "witness": str(self.folder / "witness.jsonl"),
            **order,
        }
        process = Process(whole)
        self._stack.callback(process.close)
        return process

    def start_alone(self, breakable: bool = False, **order: Any) -> tuple[Admin, Process]:
        """Start a node that leads and owns all resources."""
        admin = self.admin()
        admin.add(RESOURCES)
        process = self.start(breakable, **order)
        process.wait_until_owning(set(RESOURCES))
        admin.wait_balanced(PATIENCE_S)
        return admin, process

    def overlaps(self) -> list[str]:
        return [str(overlap) for overlap in self.witness.check().overlaps]


@pytest.fixture(params=["sqlite", "etcd", "kafka"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    made: Place
    if request.param == "sqlite":
        made = SqlitePlace(tmp_path)
    elif request.param == "kafka":
        made = KafkaPlace(request.getfixturevalue("kafka"))
    else:
        made = EtcdPlace(request.getfixturevalue("etcd"), stall=request.param == "etcd, stalled")
    with closing(made):
        yield made


@pytest.fixture
def stage(place: Place, tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(place, tmp_path, stack)


also_stalled = pytest.mark.parametrize("place", ["sqlite", "etcd", "etcd, stalled", "kafka"], indirect=True)
on_sqlite = pytest.mark.parametrize("place", ["sqlite"], indirect=True)
on_etcd = pytest.mark.parametrize("place", ["etcd"], indirect=True)
needs_switch = pytest.mark.skipif(
    DeadMansSwitch.available() is not None, reason=DeadMansSwitch.available() or "it is available"
)


def highest_tokens(sink: str) -> dict[str, int]:
    """The fences that a sink has put up."""
    with closing(sqlite3.connect(sink, timeout=PATIENCE_S)) as connection:
        return dict(connection.execute("SELECT resource, token FROM sink"))


def waited_out(stage: Stage) -> float:
    """The least time from the last moment of a node's life to the end of its lease."""
    settings = Settings(lease_ttl_s=stage.place.ttl_s)
    return settings.lease_ttl_s - settings.heartbeat_interval_s - settings.registry_timeout_s


# -- processes that die or are paused


@pytest.mark.rule("RB-20", "RB-23")
@pytest.mark.parametrize("victim", ["leader", "follower"])
def test_a_killed_owner_is_replaced_after_its_lease(stage: Stage, victim: str) -> None:
    admin, leader = stage.start_alone()
    follower, third = stage.start(), stage.start()
    for each in (follower, third):
        each.wait_for("started")
    admin.wait_balanced(PATIENCE_S)
    killed = leader if victim == "leader" else follower
    survivors = [each for each in (leader, follower, third) if each is not killed]
    lost = set(killed.owned)
    assert lost
    at = killed.signal(signal.SIGKILL)
    killed.wait_for_death()
    wait_until(lambda: {name for each in survivors for name in each.owned} == set(RESOURCES))
    state = admin.wait_balanced(PATIENCE_S)
    assert {each.label for each in state.nodes} == {each.node for each in survivors}
    arrivals = [event for each in survivors for event in each.of("start", at)]
    assert {name for event in arrivals for name in event["owned"]} == lost
    first, last = min(e["at"] for e in arrivals), max(e["at"] for e in arrivals)
    assert first >= at + waited_out(stage)
    assert last <= at + stage.place.ttl_s + stage.place.detection_s + SLACK_S
    assert stage.overlaps() == []
    assert stage.witness.check().disorders == ()


@pytest.mark.rule("RB-1", "RB-12", "RB-22", "RB-27")
@pytest.mark.lesson(3, 13)
def test_a_paused_owner_is_fenced_and_stops_at_once(stage: Stage) -> None:
    sink = str(stage.folder / "sink.db")
    admin, paused = stage.start_alone(sink=sink, stop_s=1.0)
    waiting = stage.start(sink=sink)
    waiting.wait_for("started")
    admin.wait_balanced(PATIENCE_S)
    wait_until(lambda: len(paused.owned) == len(waiting.owned) == len(RESOURCES) // 2)
    joined = [event["node"] for event in paused.of("fact", kind="joined")]
    paused.pause()
    waiting.wait_until_owning(set(RESOURCES))
    mine = paused.owned
    wait_until(lambda: all(highest_tokens(sink)[name] > token for name, token in mine.items()))
    resumed_at = paused.signal(signal.SIGCONT)
    stop = paused.wait_for("stop", resumed_at)
    assert stop["at"] <= resumed_at + SLACK_S
    assert stop["owned"] == mine
    paused.wait_for("stopped", resumed_at)
    refused = {event["resource"]: event["token"] for event in paused.of("refused", resumed_at)}
    assert refused == mine
    assert waiting.of("refused") == []
    assert paused.wait_for("fact", resumed_at, kind="joined")["node"] not in joined
    verdict = stage.witness.check()
    assert {overlap.first.resource for overlap in verdict.overlaps} == set(mine), "what the tokens are for"
    assert verdict.unfenced_overlaps == ()
    assert verdict.disorders == ()


@needs_switch
@pytest.mark.rule("RB-34")
@pytest.mark.parametrize("hang", ["SIGSTOP", "the interpreter's lock is held", "OnStop never returns"])
def test_with_kill_what_hangs_is_dead_before_its_lease_ends(stage: Stage, hang: str) -> None:
    admin, hanging = stage.start_alone(settings={"on_overrun": "kill"})
    waiting = stage.start()
    waiting.wait_for("started")
    admin.wait_balanced(PATIENCE_S)
    lost = set(hanging.owned)
    at = time.monotonic()
    if hang == "SIGSTOP":
        hanging.signal(signal.SIGSTOP)
    elif hang == "OnStop never returns":
        hanging.obey("get stuck")
        hanging.wait_for("obeys")
        at = time.monotonic()
        admin.drain(hanging.node)
    else:
        hanging.obey("hold the interpreter's lock")
    died_at = hanging.wait_for_death()
    assert hanging.popen.returncode == -signal.SIGKILL
    assert died_at <= at + stage.place.ttl_s + SLACK_S
    waiting.wait_until_owning(set(RESOURCES))
    taken_at = min(e["at"] for e in waiting.of("start", at) if lost & e["owned"].keys())
    assert died_at < taken_at + SEEN_LATE_S * patience_ratio()
    assert stage.overlaps() == []


# -- graceful stops


@pytest.mark.rule("RB-11", "RB-26")
@pytest.mark.lesson(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_leader_that_stops_keeps_its_barriers_until_on_stop_has_returned(
    stage: Stage, number: signal.Signals
) -> None:
    admin, leader = stage.start_alone(settings={"lease_ttl_s": LONG_TTL_S}, stop_s=0.5)
    other = stage.start(settings={"lease_ttl_s": LONG_TTL_S})
    other.wait_for("started")
    admin.wait_balanced(PATIENCE_S)
    at = leader.signal(number)
    stop = leader.wait_for("stop", at)
    assert {each.label for each in admin.state().nodes} == {"n1", "n2"}
    assert {r.owner for r in admin.resources() if r.resource in stop["owned"]} == {"n1"}
    leader.wait_for_death()
    assert leader.popen.returncode == 0
    assert leader.events[-1]["event"] == "end"
    stopped = leader.wait_for("stopped", at)
    other.wait_until_owning(set(RESOURCES))
    taken_at = max(event["at"] for event in other.of("start", at))
    assert stopped["at"] <= min(event["at"] for event in other.of("start", at))
    assert taken_at <= stopped["at"] + LONG_TTL_S / 2, "nobody waits for a lease to end"
    assert stage.overlaps() == []


def test_a_second_interrupt_has_its_usual_effect_and_a_second_sigterm_none(stage: Stage) -> None:
    _, process = stage.start_alone(stop_s=0.1)
    process.obey("get stuck")
    process.wait_for("obeys")
    at = process.signal(signal.SIGTERM)
    process.wait_for("stop", at)
    for _ in range(5):
        time.sleep(0.1)
        process.signal(signal.SIGTERM)
    assert process.popen.poll() is None
    process.signal(signal.SIGINT)
    time.sleep(0.5)
    process.signal(signal.SIGINT)
    process.wait_for_death()
    assert process.popen.returncode not in {0, -signal.SIGTERM}


@pytest.mark.rule("RB-1")
def test_a_child_of_fork_owns_nothing_and_its_parent_goes_on(stage: Stage) -> None:
    _, process = stage.start_alone()
    process.obey("fork")
    child = process.wait_for("child")
    assert child["still_mine"] == [False] * len(RESOURCES)
    assert child["refused"] == ["stop", "start", "wait_settled"]
    forked = process.wait_for("forked")
    assert forked["status"] == 0
    time.sleep(stage.place.ttl_s)
    process.obey("look")
    assert process.wait_for("looks")["mine"] == dict.fromkeys(RESOURCES, True)
    assert process.of("stop") == []


# -- registries that can't be reached


@pytest.mark.rule("RB-21", "RB-22")
@pytest.mark.lesson(5)
@also_stalled
def test_who_is_cut_off_stops_before_its_lease_can_end(stage: Stage) -> None:
    _, lonely = stage.start_alone(breakable=True, stop_s=stage.place.ttl_s * 0.2)
    joined = lonely.wait_for("fact", kind="joined")
    stage.place.cut()
    cut_at = time.monotonic()
    stopped = lonely.wait_for("stopped", cut_at)
    assert set(stopped["owned"]) == set(RESOURCES)
    assert stopped["at"] < stopped["deadline"], "the deadline is before the end of the lease"
    assert stopped["at"] < cut_at + stage.place.ttl_s
    lonely.wait_for("fact", cut_at, kind="isolated")
    time.sleep(max(0.0, cut_at + stage.place.ttl_s + 2 * stage.place.detection_s - time.monotonic()))
    healed_at = time.monotonic()
    stage.place.heal()
    again = lonely.wait_for("start", healed_at)
    lonely.wait_until_owning(set(RESOURCES))
    if again["owned"] == stopped["owned"] and not stage.place.ends_leases_while_cut:
        assert lonely.wait_for("fact", healed_at, kind="reconnected")["node"] == joined["node"]
    else:
        assert lonely.wait_for("fact", healed_at, kind="joined")["node"] != joined["node"]
        assert min(again["owned"].values()) > max(stopped["owned"].values())
    assert stage.overlaps() == []


@on_etcd
@pytest.mark.rule("RB-1", "RB-21")
@pytest.mark.parametrize("kind", ["cut", "stall"])
def test_others_take_over_from_who_is_cut_off_once_it_has_stopped(
    stage: Stage, etcd: EtcdCluster, kind: str
) -> None:
    stage.place.close()
    with closing(EtcdPlace(etcd, stall=kind == "stall")) as stage.place:
        admin, lonely = stage.start_alone(breakable=True)
        other = stage.start()
        other.wait_for("started")
        admin.wait_balanced(PATIENCE_S)
        stage.place.cut()
        other.wait_until_owning(set(RESOURCES))
        assert lonely.owned == {}
        assert stage.overlaps() == []
        stage.place.heal()
        lonely.wait_for("start", other.events[-1]["at"])
        admin.wait_balanced(PATIENCE_S)
        assert stage.overlaps() == []


@pytest.mark.rule("RB-21")
@also_stalled
def test_a_brief_loss_stops_nothing(stage: Stage) -> None:
    settings = Settings(lease_ttl_s=12.0)
    _, process = stage.start_alone(breakable=True, settings={"lease_ttl_s": settings.lease_ttl_s})
    joined = process.of("fact", kind="joined")
    stage.place.cut()
    time.sleep(settings.timings.detect_s / 2)
    stage.place.heal()
    healed_at = time.monotonic()
    time.sleep(settings.heartbeat_interval_s * 1.5)
    process.obey("look")
    assert process.wait_for("looks", healed_at)["mine"] == dict.fromkeys(RESOURCES, True)
    assert process.of("stop") == []
    assert process.of("fact", kind="isolated") == []
    assert process.of("fact", kind="joined") == joined


# -- handlers that take their time


@pytest.mark.rule("RB-25")
@pytest.mark.lesson(15)
def test_a_slow_handler_is_reported_and_loses_no_lease(stage: Stage) -> None:
    slow_s = 4.0 * stage.place.ttl_s
    admin = stage.admin()
    admin.add(RESOURCES)
    slow = stage.start(start_s=slow_s, settings={"start_timeout_s": 0.3})
    entered = slow.wait_for("start")
    overran = slow.wait_for("fact", entered["at"], kind="handler_overran")
    assert overran["at"] < entered["at"] + 0.3 + SLACK_S
    assert overran["detail"] == {"handler": "on_start", "limit_s": 0.3}
    other = stage.start()
    time.sleep(max(0.0, entered["at"] + 2.0 * stage.place.ttl_s - time.monotonic()))
    assert slow.of("started") == []
    assert {resource.owner for resource in admin.resources()} == {slow.node}
    admin.wait_balanced(PATIENCE_S)
    started = slow.wait_for("started")
    assert len(slow.of("fact", kind="joined")) == 1
    assert slow.of("fact", kind="isolated") == []
    wait_until(lambda: bool(other.owned))
    assert min(event["at"] for event in other.of("start") if event["owned"]) > started["at"]
    assert stage.overlaps() == []


@pytest.mark.rule("RB-16")
@pytest.mark.lesson(7, 10)
def test_a_resource_removed_and_added_while_owned_lets_nobody_in(stage: Stage) -> None:
    admin, first = stage.start_alone(stop_s=0.3)
    first_token = first.owned["r0"]
    admin.drain(first.node)
    other = stage.start()
    for _ in range(3):
        admin.remove("r0")
        admin.add("r0")
    other.wait_until_owning(set(RESOURCES))
    assert other.owned["r0"] > first_token
    assert stage.overlaps() == []


@pytest.mark.rule("RB-33")
def test_two_groups_in_one_registry_do_not_touch_each_other(stage: Stage) -> None:
    admin, bystander = stage.start_alone()
    token = bystander.owned["r0"]
    neighbours = stage.admin("group/r0")
    neighbours.add(RESOURCES)
    folder = stage.folder / "neighbours.jsonl"
    nodes = [stage.start(group="group/r0", witness=str(folder)) for _ in range(2)]
    for each in nodes:
        each.wait_for("started")
    neighbours.wait_balanced(PATIENCE_S)
    killed_at = nodes[0].signal(signal.SIGKILL)
    nodes[1].wait_until_owning(set(RESOURCES))
    neighbours.remove(RESOURCES)
    nodes[1].wait_until_owning(set())
    assert {r.resource: r.owner for r in admin.resources()} == dict.fromkeys(RESOURCES, bystander.node)
    assert bystander.owned["r0"] == token
    assert [e for e in bystander.events if e["at"] > killed_at and e["event"] in {"start", "stop"}] == []


# -- faults of etcd itself


class Watched:
    """A node in this process, and the facts it told."""

    def __init__(self, url: str, name: str = "group") -> None:
        self.facts: list[Fact] = []
        self.group = Group(name, url, settings=Settings(lease_ttl_s=6.0))
        self.group.on_start(lambda _owned: None)
        self.group.on_stop(lambda _owned: None)
        self.group.on_fact(self.facts.append)

    def kinds(self) -> set[FactKind]:
        return {fact.kind for fact in self.facts}


@pytest.fixture
def members(etcd_cluster: EtcdCluster) -> Iterator[EtcdCluster]:
    """Three healthy members, made whole again after the test."""
    yield etcd_cluster
    restart_all(etcd_cluster)


def restart_all(members: EtcdCluster) -> None:
    """A quorum is needed before any one is healthy, so all come back at once."""
    with ThreadPoolExecutor(members.members) as pool:
        list(pool.map(members.restart, range(members.members)))


def fault_restart(members: EtcdCluster) -> None:
    for member in range(members.members):
        members.kill(member)
    restart_all(members)


def fault_leader(members: EtcdCluster) -> None:
    leader = members.wait_leader()
    members.kill(leader)


@pytest.mark.rule("RB-28", "RB-7")
@pytest.mark.parametrize("fault", [fault_restart, fault_leader])
def test_no_change_is_lost_when_etcd_fails(
    members: EtcdCluster, fault: Callable[[EtcdCluster], None]
) -> None:
    url = members.url(f"faults/{uuid.uuid4().hex}")
    nodes = [Watched(url), Watched(url)]
    with ExitStack() as stack:
        admin = stack.enter_context(Admin("group", url, timeout_s=PATIENCE_S))
        admin.add("a", "b")
        for node in nodes:
            stack.enter_context(node.group)
        admin.wait_balanced(PATIENCE_S)
        fault(members)
        admin.add("c", "d")
        admin.remove("a")
        state = admin.wait_balanced(PATIENCE_S)
        assert {resource.resource for resource in state.resources} == {"b", "c", "d"}
        assert [each.held for each in state.nodes] in ([1, 2], [2, 1])
        for node in nodes:
            node.group.wait_settled(PATIENCE_S)
        assert sorted(name for node in nodes for name in node.group.resources) == ["b", "c", "d"]


@pytest.mark.rule("RB-28", "RB-8")
def test_no_change_is_lost_when_history_is_compacted_while_cut_off(etcd: EtcdCluster) -> None:
    with ExitStack() as stack:
        place = stack.enter_context(closing(EtcdPlace(etcd)))
        admin = stack.enter_context(Admin("group", place.url, timeout_s=PATIENCE_S))
        admin.add("a")
        node = Watched(place.breakable_url)
        stack.enter_context(node.group)
        node.group.wait_settled(PATIENCE_S)
        place.cut()
        admin.add("b")
        admin.remove("a")
        revision = etcd.call("/v3/kv/range", {"key": "MA=="})["header"]["revision"]
        etcd.call("/v3/kv/compaction", {"revision": revision, "physical": True})
        place.heal()
        admin.wait_balanced(PATIENCE_S)
        assert list(node.group.resources) == ["b"]


# -- what can't be


def test_a_lease_below_what_etcd_allows_is_refused(etcd: EtcdCluster) -> None:
    group = Group("group", etcd.url("faults/short"), settings=Settings(lease_ttl_s=0.3))
    group.worker(lambda _owned: None)
    with pytest.raises(InvalidSettings, match=r"lease_ttl_s 0.3 is below the 1 s that etcd://"):
        group.start()


@pytest.mark.lesson(20)
def test_a_lease_below_the_servers_election_timeout_is_refused(tmp_path: Path) -> None:
    with EtcdCluster(1, data_folder=tmp_path, heartbeat_ms=100, election_ms=1500) as slow:
        url = slow.url("faults/short")
        group = Group("group", url, settings=Settings(lease_ttl_s=1.2))
        group.worker(lambda _owned: None)
        with pytest.raises(InvalidSettings, match=r"lease_ttl_s 1.2 is below .* it grants 3 s"):
            group.start()
        with Admin("group", url, timeout_s=PATIENCE_S) as admin:
            assert admin.state().nodes == ()


def test_an_etcd_that_is_not_there_is_told_without_the_password() -> None:
    (port,) = free_ports(1)
    url = f"etcd://root:geheim@127.0.0.1:{port}/x"
    settings = Settings(lease_ttl_s=2.0, connect_timeout_s=0.5)
    group = Group("group", url, settings=settings)
    group.worker(lambda _owned: None)
    began = time.monotonic()
    with pytest.raises(RegistryUnavailable, match=f"127.0.0.1:{port}") as raised:
        group.start()
    assert time.monotonic() - began < settings.connect_timeout_s + 2 * SLACK_S
    assert "geheim" not in str(raised.value)
    assert re.search(r"for \d+\.\d* s", str(raised.value))
