"""NELI's processes killed, paused, stuck and cut off, and its broker too: never two leaders of a role."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from rebalanser.core.neli.settings import GroupProtocol, Mode, NeliSettings
from rebalanser.errors import AccessDenied
from rebalanser.neli import Neli
from rebalanser.testing.kafka_server import KafkaCluster
from rebalanser.testing.waiting import PATIENCE_S, wait_until
from support.proxy import TcpProxy

PROGRAM = Path(__file__).with_name("neli_process.py")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "neli_roles.py"
SPAN = struct.Struct("dd")
SESSION_S = 2.0
LONG_SESSION_S = 30.0
"""A session so long that a handover shows that nothing waits for its end."""
SLACK_S = 1.0
"""How late a thread of a busy machine may be."""
SAFE_MODES = [pytest.param(mode, id=mode.value) for mode in (Mode.FAST, Mode.EXCLUSIVE)]
PROTOCOLS = [pytest.param(protocol, id=protocol.value) for protocol in GroupProtocol]


@dataclass(frozen=True)
class Led:
    """For how long a process answered that it leads."""

    since: float
    until: float


class Process:
    """One process of the group, and what it has told."""

    def __init__(self, order: dict[str, Any], span: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self._span = span
        self._popen = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps({**order, "span": str(span)})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self.events.append(json.loads(line))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events if each["event"] == event]

    def expect(self, event: str, count: int = 1) -> dict[str, Any]:
        """Wait until it has told this so often; what it told then."""
        wait_until(lambda: len(self.of(event)) >= count)
        return self.of(event)[count - 1]

    def tell(self, line: str) -> float:
        assert self._popen.stdin is not None
        at = time.monotonic()
        self._popen.stdin.write(line.encode() + b"\n")
        self._popen.stdin.flush()
        return at

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self._thread.join()
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        self._popen.stdout.close()

    @property
    def leads(self) -> Led | None:
        """The span of leadership that has not ended yet, or that ended with the process."""
        if not self._span.exists() or len(content := self._span.read_bytes()) < SPAN.size:
            return None
        since, until = SPAN.unpack(content)
        return Led(since, until) if since else None

    @property
    def led(self) -> list[Led]:
        spans = [Led(each["since"], each["until"]) for each in self.of("led")]
        return [*spans, self.leads] if self.leads else spans


class Cast:
    """The processes of one test, in one group of its own."""

    def __init__(self, kafka: str, folder: Path) -> None:
        self.kafka = kafka
        self.folder = folder
        self.topic = f"neli-{uuid.uuid4().hex}"
        self.processes: list[Process] = []

    def join(self, mode: Mode, protocol: GroupProtocol = GroupProtocol.CLASSIC, **options: Any) -> Process:
        settings = {"session_timeout_s": SESSION_S, "max_poll_interval_s": 10.0, "protocol": protocol}
        order = {
            "topic": self.topic,
            "group": f"{self.topic}-group",
            "role": "only",
            "kafka": self.kafka,
            "mode": mode,
            "settings": settings | options.pop("settings", {}),
            **options,
        }
        process = Process(order, self.folder / f"span-{len(self.processes)}")
        self.processes.append(process)
        return process

    def pair(self, *given: Any, **options: Any) -> tuple[Process, Process]:
        """A leader, and one that waits to become it."""
        leader = self.join(*given, **options)
        leader.expect("induced")
        successor = self.join(*given, **options)
        # With one partition, joining is all that can be waited for: it brings the successor nothing.
        wait_until(lambda: successor.leads is None and successor._span.exists())
        return leader, successor

    def spans(self) -> list[Led]:
        """Every time that somebody led, in the order of their beginnings, as far as it has been written."""
        spans = sorted((led for each in self.processes for led in each.led), key=lambda led: led.since)
        return [led for led in spans if led.until >= led.since]

    def overlap_s(self) -> float:
        """The longest time with two leaders; below 0 where there was none."""
        wait_until(lambda: len(self.spans()) >= 2)
        spans = self.spans()
        return max(earlier.until - later.since for earlier, later in pairwise(spans))

    def tokens(self) -> list[int]:
        induced = [each for process in self.processes for each in process.of("induced")]
        return [each["token"] for each in sorted(induced, key=lambda each: each["at"])]


@pytest.fixture
def cast(kafka_address: str, tmp_path: Path) -> Iterator[Cast]:
    cast = Cast(kafka_address, tmp_path)
    yield cast
    for process in cast.processes:
        process.close()


@pytest.mark.rule("NE-8", "NE-9", "NE-15")
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("mode", SAFE_MODES)
def test_a_successor_of_a_killed_leader(cast: Cast, mode: Mode, protocol: GroupProtocol) -> None:
    leader, successor = cast.pair(mode, protocol)
    leader.send(signal.SIGKILL)
    successor.expect("induced")
    wait_until(lambda: successor.leads)
    assert cast.overlap_s() < 0
    # A busy machine may end a lead: its deadline, which keeps the token, or fencing, which does not.
    earlier, later = ([each["token"] for each in process.of("induced")] for process in (leader, successor))
    assert earlier == sorted(earlier)
    assert later == sorted(later)
    assert max(earlier) < min(later)


@pytest.mark.rule("NE-6")
def test_non_exclusive_leaders_overlap_by_no_more_than_is_said(cast: Cast) -> None:
    leader, successor = cast.pair(Mode.NON_EXCLUSIVE)
    leader.send(signal.SIGSTOP)
    successor.expect("induced")
    leader.send(signal.SIGCONT)
    leader.expect("led")
    deadline_s = NeliSettings(mode=Mode.NON_EXCLUSIVE, session_timeout_s=SESSION_S).limit_s
    assert cast.overlap_s() <= deadline_s - SESSION_S + SLACK_S


@pytest.mark.rule("NE-9", "NE-10")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_process_that_is_stuck_lapses_long_before_it_is_expelled(
    cast: Cast, protocol: GroupProtocol
) -> None:
    poll_s = 3.0
    settings = {"max_poll_interval_s": poll_s}
    leader, successor = cast.pair(Mode.FAST, protocol, settings=settings)
    stuck_at = leader.tell("get stuck")
    led = leader.expect("led")
    deadline_s = NeliSettings(session_timeout_s=SESSION_S).limit_s
    assert led["until"] - stuck_at <= deadline_s + SLACK_S
    assert successor.expect("induced")["at"] - stuck_at >= poll_s - SLACK_S
    leader.tell("go on")
    wait_until(lambda: "lost" in {each["kind"] for each in leader.of("fact")})
    assert successor.leads
    assert cast.overlap_s() < 0


@pytest.mark.rule("NE-7", "NE-9")
@pytest.mark.parametrize("mode", SAFE_MODES)
def test_a_process_paused_past_its_session_drains_a_backlog_and_leads_nothing(cast: Cast, mode: Mode) -> None:
    leader, successor = cast.pair(mode)
    before = len(leader.led)
    leader.send(signal.SIGSTOP)
    successor.expect("induced")
    began = wait_until(lambda: successor.leads).since
    wait_until(lambda: time.monotonic() > began + 1)  # a backlog of the successor's heartbeats
    leader.send(signal.SIGCONT)
    leader.expect("led")
    leader.expect("fenced")
    wait_until(lambda: "lost" in {each["kind"] for each in leader.of("fact")})
    assert successor.leads
    assert len(leader.led) == before, "not again after it was paused"
    assert cast.overlap_s() < 0


@pytest.mark.rule("NE-15")
def test_a_sink_that_keeps_the_greatest_token_refuses_a_paused_ex_leader(cast: Cast, tmp_path: Path) -> None:
    leader, successor = cast.pair(Mode.FAST, sink=str(tmp_path / "sink.db"))
    leader.send(signal.SIGSTOP)
    newer = successor.expect("induced")["token"]
    leader.send(signal.SIGCONT)
    refused = leader.expect("refused")
    assert refused["token"] < newer
    assert not successor.of("refused")


@pytest.mark.rule("NE-9")
def test_a_signal_hands_over_without_a_wait(cast: Cast) -> None:
    settings = {"session_timeout_s": LONG_SESSION_S, "max_poll_interval_s": 2 * LONG_SESSION_S}
    leader, successor = cast.pair(Mode.FAST, settings=settings)
    leader.send(signal.SIGTERM)
    lapsed = leader.expect("lapsed")
    leader.expect("end")
    induced = successor.expect("induced")
    assert induced["at"] - lapsed["at"] < LONG_SESSION_S
    wait_until(lambda: "succeeds" in {each["kind"] for each in successor.of("fact")})
    assert cast.overlap_s() < 0


@pytest.mark.rule("NE-9", "NE-10")
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("way", ["cut", "stall"])
def test_without_a_broker_nobody_leads_beyond_the_deadline(
    tmp_path: Path, protocol: GroupProtocol, way: str
) -> None:
    deadline_s = NeliSettings(session_timeout_s=SESSION_S).limit_s
    with ExitStack() as stack:
        cluster = KafkaCluster(1, data_folder=tmp_path / "kafka")
        proxy = TcpProxy(cluster.addresses[0])
        stack.callback(proxy.close)
        cluster.advertise([proxy.address])
        stack.enter_context(cluster)
        cast = Cast(proxy.address, tmp_path)
        leader = cast.join(Mode.FAST, protocol)
        stack.callback(leader.close)
        leader.expect("induced")
        cut_at = time.monotonic()
        getattr(proxy, way)()
        # On a busy machine it may have been fenced before the cut, and lead again since.
        wait_until(lambda: leader.of("fenced") and leader.leads is None, "it leads no more")
        assert max(each.until for each in leader.led) - cut_at <= deadline_s + SLACK_S
        before = len(leader.of("induced"))
        proxy.heal()
        leader.expect("induced", before + 1)


@pytest.mark.rule("NE-10")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_who_hears_its_heartbeats_and_not_its_coordinator_leads_nothing(
    tmp_path: Path, protocol: GroupProtocol
) -> None:
    settings = NeliSettings(session_timeout_s=4.0, protocol=protocol)
    with ExitStack() as stack:
        cluster = KafkaCluster(3, data_folder=tmp_path / "kafka")
        proxies = [TcpProxy(address) for address in cluster.addresses]
        for proxy in proxies:
            stack.callback(proxy.close)
        cluster.advertise([proxy.address for proxy in proxies])
        stack.enter_context(cluster)
        topic = f"neli-{uuid.uuid4().hex}"
        neli = Neli(
            topic, f"{topic}-group", range(3), kafka=cluster.bootstrap, settings=settings, partitions=3
        )
        stack.enter_context(neli)
        wait_until(lambda: len(neli.roles_held()) == 3)
        admin = AdminClient({**cluster.client_settings})
        group = admin.describe_consumer_groups([neli.group])[neli.group].result(PATIENCE_S)
        coordinator = group.coordinator.id
        partitions = admin.list_topics(topic, timeout=PATIENCE_S).topics[topic].partitions
        elsewhere = [role for role, partition in partitions.items() if partition.leader != coordinator]
        assert elsewhere, "the brokers share out the leadership of the partitions"
        stack.callback(proxies[coordinator].heal)
        proxies[coordinator].cut()
        cut_at = time.monotonic()
        wait_until(lambda: not neli.roles_held())
        assert time.monotonic() - cut_at <= settings.limit_s + SLACK_S
        assert all(neli.why_not(role) for role in elsewhere)
        proxies[coordinator].heal()
        wait_until(lambda: len(neli.roles_held()) == 3)


@pytest.mark.rule("NE-9", "NE-15")
def test_a_broker_that_restarts_brings_no_second_leader(kafka: KafkaCluster, tmp_path: Path) -> None:
    cast = Cast(kafka.bootstrap, tmp_path)
    with ExitStack() as stack:
        for process in cast.pair(Mode.FAST):
            stack.callback(process.close)
        kafka.kill(0)
        cast.processes[0].expect("fenced")
        kafka.restart(0)
        wait_until(lambda: len(cast.spans()) >= 2)
        assert cast.overlap_s() < 0
        tokens = cast.tokens()
        assert tokens == sorted(tokens)


class Program:
    """Any program in a process of its own, and the lines that it has printed."""

    def __init__(self, *arguments: str) -> None:
        self.lines: list[str] = []
        self._popen = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        self.lines += (line for line in self._popen.stdout)

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait until it has printed a line of this pattern."""

        def found() -> re.Match[str] | None:
            return next((match for line in [*self.lines] if (match := re.match(pattern, line))), None)

        match = wait_until(found)
        assert isinstance(match, re.Match)
        return match

    def end(self, number: signal.Signals) -> int:
        self._popen.send_signal(number)
        code = self._popen.wait(PATIENCE_S)
        self._thread.join()
        return code

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self._thread.join()
        assert self._popen.stdout is not None
        self._popen.stdout.close()


@pytest.mark.rule("NE-15", "NE-16")
def test_the_example_hands_roles_over_and_fences_its_output(kafka_address: str, tmp_path: Path) -> None:
    database = tmp_path / "output.db"
    own = uuid.uuid4().hex
    arguments = (
        str(EXAMPLE), kafka_address, "--topic", f"roles-{own}", "--group", f"office-{own}",
        "--database", str(database), "--session-timeout", "10",
    )  # fmt: skip
    with ExitStack() as stack:
        first = Program(*arguments)
        stack.callback(first.close)
        for role in ("prices", "invoices", "newsletter"):
            first.expect(f"leads {role} ")
        second = Program(*arguments)
        stack.callback(second.close)
        assert first.end(signal.SIGTERM) == 0
        assert any(line.startswith("handed over ") for line in first.lines)
        tokens = {
            role: int(second.expect(rf"leads {role} token=(\d+)")[1]) for role in ("prices", "invoices")
        }

        def written() -> bool:
            with closing(sqlite3.connect(database)) as connection:
                found = dict(connection.execute("SELECT role, token FROM output WHERE runs > 1"))
            return all(found.get(role) == token for role, token in tokens.items())

        wait_until(written)
        assert second.end(signal.SIGTERM) == 0


def test_a_broker_without_kip_848_is_told_of_in_one_line() -> None:
    with KafkaCluster(settings={"group.coordinator.rebalance.protocols": "classic"}) as cluster:
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "rebalanser", "neli", "run", "roles", "office", "--roles", "billing"),
                *("--protocol", "consumer", "--session-timeout", "2", "--kafka", cluster.bootstrap),
            ],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert ended.returncode == 3
    assert ended.stdout == "taking part in group office on roles; Ctrl-C stops it\n"
    assert ended.stderr == (
        "error: this broker has no KIP-848 consumer groups (Kafka 4.0 or later, switched on); "
        "use the classic protocol (--protocol classic)\n"
    )


def test_who_may_not_publish_is_told_what_to_be_granted() -> None:
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",  # the broker itself, on its internal listener
        "allow.everyone.if.no.acl.found": "true",
    }
    topic = (ResourceType.TOPIC, "roles", ResourcePatternType.LITERAL, "User:ann", "*")
    rules = [
        AclBinding(*topic, AclOperation.ALL, AclPermissionType.ALLOW),
        AclBinding(*topic, AclOperation.WRITE, AclPermissionType.DENY),
    ]
    with KafkaCluster(sasl=("ann", "open-sesame"), settings=settings) as cluster:
        admin = AdminClient({**cluster.client_settings})
        for made in admin.create_acls(rules).values():
            made.result(PATIENCE_S)
        security = "security.protocol=SASL_PLAINTEXT&sasl.mechanism=PLAIN"
        url = f"kafka://ann:open-sesame@{cluster.bootstrap}?{security}"
        neli = Neli("roles", "office", ["billing"], kafka=url)
        neli.start()
        with pytest.raises(AccessDenied, match=r"grant the user .* WRITE on the topic.*the user is 'ann'"):
            neli.wait_stopped(PATIENCE_S)
        with pytest.raises(AccessDenied):
            neli.stop(PATIENCE_S)


@pytest.mark.rule("NE-16")
def test_the_command_line_tells_who_leads(kafka_address: str) -> None:
    own = uuid.uuid4().hex
    group = (f"roles-{own}", f"office-{own}", "--roles", "billing,7", "--kafka", kafka_address)
    with ExitStack() as stack:
        running = Program("-m", "rebalanser", "neli", "run", *group, "--session-timeout", "10", "--json")
        stack.callback(running.close)
        told = json.loads(running.expect(r'.*"induced", "role": "billing".*')[0])
        assert told["token"] >= 0

        def held() -> re.Match[str] | None:
            asked = subprocess.run(
                [sys.executable, "-m", "rebalanser", "neli", "status", *group],
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=True,
            )
            return re.search(
                r"^billing: partition \d+, assigned to \S+ at 127.0.0.1, last commit held",
                asked.stdout,
                re.MULTILINE,
            )

        def last_event() -> str:
            printed = [json.loads(line) for line in [*running.lines]]
            return [line["event"] for line in printed if line.get("role") == "billing"][-1]

        match = wait_until(held)
        assert isinstance(match, re.Match)
        assert re.search(r"^7: partition 7, ", match.string, re.MULTILINE)
        # On a busy machine it may have been fenced meanwhile; only a role that it leads can lapse.
        wait_until(lambda: last_event() == "induced")
        assert running.end(signal.SIGTERM) == 0
        assert last_event() == "lapsed"
