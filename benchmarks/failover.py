"""Fail-overs over Kafka: Shiva, ``kafka://`` groups and NELI, beside plain consumer groups.

``python benchmarks/failover.py [--count 20] [--session 6] [--only 'neli.*kill']``. One broker serves all. Its
times and limits are Kafka's defaults, except that KIP-848 groups may have sessions and heartbeats as short as
the others: by default they have at least 45 s and 5 s. Each fail-over ends a process by ``kill -9``, or lets
it leave in order, and takes the time until another one has taken over, on the clock of the one host. Each
kind shares its fail-overs among several groups, and several groups run at once: they mostly wait. Nothing is
asserted here.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import re
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import tenacity
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)
from processes import Crew
from rich.console import Console
from rich.table import Table
from shiva import WORKERS, Site

import rebalanser
from rebalanser.core.neli.settings import GroupProtocol, NeliSettings
from rebalanser.core.neli.settings import Mode as NeliMode
from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.records import AssignmentDocument, DocumentChange, Ping
from rebalanser.core.shiva.types import Mode
from rebalanser.testing.kafka_server import KafkaCluster
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_kafka.shiva.wire import decode

MEMBER = Path(__file__).resolve().parent.parent / "tests" / "faults" / "neli_process.py"
SPAN = struct.Struct("dd")
END_S = 5.0
SAMPLE_EVERY_S = 0.01
APPLICATIONS = 6
RESOURCES = 12
BROKERS_SESSION_S = 45.0
KILL, LEAVE = signal.SIGKILL, signal.SIGTERM
console = Console()


@dataclass
class Found:
    """Seconds that fail-overs of one kind took, by the event that ended them."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    overlap_s: float | None = None
    """The longest time with two leaders; None where that was not looked at."""

    def add(self, other: Found) -> None:
        """Take in those of another group."""
        for what, seconds in other.seconds.items():
            self.seconds[what] += seconds
        if other.overlap_s is not None:
            self.overlap_s = max(self.overlap_s or 0.0, other.overlap_s)


class Process:
    """A child that tells events as lines of JSON."""

    def __init__(self, *arguments: str, span: Path | None = None) -> None:
        self.span = span
        self.led: list[tuple[float, float]] = []
        self._ended = False
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._popen = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            event = json.loads(line)
            if event["event"] == "led":
                self.led.append((event["since"], event["until"]))
            elif event["event"] == "induced":
                self._events.put(event)

    def wait_induced(self) -> float:
        """When it said that it leads, or was assigned the partition."""
        at: float = self._events.get(timeout=PATIENCE_S)["at"]
        return at

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def end(self) -> None:
        """Wait until it has ended, kill it if that takes long, and take what it has not told any more."""
        if self._ended:
            return
        self._ended = True
        try:
            self._popen.wait(END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._reader.join()
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        self._popen.stdout.close()
        if self.span is not None and len(content := self.span.read_bytes()) == SPAN.size:
            since, until = SPAN.unpack(content)
            if since:
                self.led.append((since, until))


def wait_members(admin: AdminClient, group: str, count: int) -> None:
    """Wait until a consumer group is stable and has this number of members."""

    def settled() -> bool:
        found = admin.describe_consumer_groups([group])[group].result(PATIENCE_S)
        return len(found.members) == count and found.state.name == "STABLE"

    tenacity.Retrying(
        # A coordinator that has just been chosen may still be loading.
        retry=tenacity.retry_if_result(lambda found: not found)
        | tenacity.retry_if_exception_type(KafkaException),
        stop=tenacity.stop_after_delay(PATIENCE_S),
        wait=tenacity.wait_fixed(0.2),
    )(settled)


class Stage:
    """One consumer group with one partition, in which owners follow one another."""

    what = "the successor leads"

    def __init__(self, kafka: str, folder: Path) -> None:
        self._kafka = kafka
        self._folder = folder
        self.topic = f"bench-{uuid4().hex}"
        self.group = f"{self.topic}-group"
        self.admin = AdminClient({"bootstrap.servers": kafka})

    def process(self) -> Process:
        """Start one more member."""
        raise NotImplementedError

    def run(self, count: int, number: signal.Signals) -> Found:
        """Let ``count`` owners end, one after the other, each beside one process that waits."""
        found = Found()
        with ExitStack() as stack:

            def started() -> Process:
                process = self.process()
                stack.callback(process.end)
                return process

            processes = [started()]
            processes[0].wait_induced()
            for _ in range(count):
                leader, successor = processes[-1], started()
                processes.append(successor)
                wait_members(self.admin, self.group, 2)
                pass_a_moment()
                at = time.monotonic()
                leader.send(number)
                found.seconds[self.what].append(successor.wait_induced() - at)
                leader.end()
            processes[-1].send(LEAVE)
            processes[-1].end()
        found.overlap_s = _overlap_s(processes)
        return found


def pass_a_moment() -> None:
    """Let a part of a heartbeat's interval pass, so that kills fall anywhere between two heartbeats."""
    time.sleep(random.random() * 1.5)


def _overlap_s(processes: Sequence[Process]) -> float | None:
    """The longest time with two leaders; 0 where there was none, None where no process looked."""
    if all(process.span is None for process in processes):
        return None
    spans = sorted(span for process in processes for span in process.led if span[1] >= span[0])
    return max(0.0, *(earlier[1] - later[0] for earlier, later in pairwise(spans)))


class NeliStage(Stage):
    """One NELI group. Leadership is sampled a hundred times a second, so that two leaders would be seen."""

    def __init__(self, kafka: str, folder: Path, settings: NeliSettings) -> None:
        super().__init__(kafka, folder)
        self._settings = settings

    def process(self) -> Process:
        """Start one more member."""
        span = self._folder / uuid4().hex
        order = {
            "topic": self.topic,
            "group": self.group,
            "role": "only",
            "kafka": self._kafka,
            "mode": self._settings.mode,
            "settings": {
                "session_timeout_s": self._settings.session_timeout_s,
                "max_poll_interval_s": self._settings.max_poll_interval_s,
                "protocol": self._settings.protocol,
            },
            "span": str(span),
            "sample_every_s": SAMPLE_EVERY_S,
        }
        return Process(str(MEMBER), json.dumps(order), span=span)


class PlainStage(Stage):
    """One group of plain consumers. Of a KIP-848 group ``settings`` are the group's, else the consumers'."""

    what = "the successor is assigned the partition"

    def __init__(
        self, kafka: str, folder: Path, protocol: GroupProtocol, settings: Mapping[str, int]
    ) -> None:
        super().__init__(kafka, folder)
        for future in self.admin.create_topics([NewTopic(self.topic, 1, 1)]).values():
            future.result(PATIENCE_S)
        self._consumer: dict[str, str | int] = {
            "bootstrap.servers": kafka,
            "group.id": self.group,
            "group.protocol": protocol.value,
        }
        if protocol is GroupProtocol.CLASSIC:
            self._consumer |= {"partition.assignment.strategy": "cooperative-sticky", **settings}
            return
        entries = [
            ConfigEntry(f"consumer.{name}", str(value), incremental_operation=AlterConfigOpType.SET)
            for name, value in settings.items()
        ]
        if entries:
            resource = ConfigResource(ResourceType.GROUP, self.group, incremental_configs=entries)
            for future in self.admin.incremental_alter_configs([resource]).values():
                future.result(PATIENCE_S)

    def process(self) -> Process:
        """Start one more member."""
        return Process(__file__, "--plain", json.dumps([self.topic, self._consumer]))


def plain_member(topic: str, config: dict[str, str | int]) -> None:
    """A plain consumer, told when it is assigned the partition; runs until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    consumer = Consumer(config)

    def assigned(_consumer: Consumer, partitions: Sequence[object]) -> None:
        if partitions:
            print(json.dumps({"event": "induced", "at": time.monotonic()}), flush=True)

    consumer.subscribe([topic], on_assign=assigned)
    while not stop.is_set():
        consumer.poll(0.05)
    consumer.close()


class Heard:
    """Times at which the first ping and the first document of each later leader of a Shiva were read."""

    def __init__(self, kafka: str, cluster: str) -> None:
        self._consumer = Consumer(
            {"bootstrap.servers": kafka, "group.id": uuid4().hex, "enable.auto.commit": False}
        )
        topics = [TopicPartition(f"{cluster}-{name}", 0) for name in ("control", "assignement")]
        for each in topics:
            each.offset = self._consumer.get_watermark_offsets(each, timeout=PATIENCE_S)[1]
        self._consumer.assign(topics)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._consumer.close()

    def first_of_next(self, term: int) -> tuple[float, float]:
        """When the first ping and the first document of a later term came, by the broker's time of day."""
        deadline = time.monotonic() + PATIENCE_S
        ping = document = 0.0
        while not (ping and document):
            message = self._consumer.poll(1.0)
            if time.monotonic() > deadline:
                raise TimeoutError("no other leader was heard")
            value = message.value() if message is not None and message.error() is None else None
            if message is None or value is None:
                continue
            at = message.timestamp()[1] / 1000
            match decode(message.key(), value):
                case Ping(term=found) if found > term:
                    ping = ping or at
                case AssignmentDocument(epoch=epoch) | DocumentChange(epoch=epoch) if epoch.term > term:
                    document = document or at
        return ping, document


def shiva_options(session_s: float) -> list[str]:
    """Options of leaders: a silent worker is removed after a session at most, as a silent leader is."""
    return ["--round", f"{session_s / 2:g}", "--session-timeout", f"{session_s:g}"]


def shiva_leader(kafka: str, folder: Path, session_s: float, count: int, number: signal.Signals) -> Found:
    """End the leading one of three daemons, again and again."""
    found = Found()
    admin = AdminClient({"bootstrap.servers": kafka})
    with Site(kafka, folder, daemons=True, options=shiva_options(session_s)) as site:
        for n in range(APPLICATIONS):
            site.start(f"application-{n}")
        for _ in range(count):
            site.settle(APPLICATIONS)
            wait_members(admin, f"{site.name}-leader", len(WORKERS))
            pass_a_moment()
            document = site.document()
            concerned = site.on(document.leader)
            with Heard(kafka, site.name) as heard:
                at = site.end(document.leader, number)
                ping, published = heard.first_of_next(document.epoch.term)
            found.seconds["the next leader's first ping"].append(ping - at)
            found.seconds["the next leader's first document"].append(published - at)
            what = "the last application of that daemon runs elsewhere"
            found.seconds[what].append(site.last_begun(concerned, at) - at)
            site.hire(document.leader)
    return found


def shiva_worker(kafka: str, folder: Path, session_s: float, count: int, number: signal.Signals) -> Found:
    """End one of three workers, again and again."""
    found = Found()
    with Site(kafka, folder, options=shiva_options(session_s)) as site:
        for mode in Mode:
            for n in range(APPLICATIONS):
                site.start(f"{mode.value}-{n}", mode)
        for _ in range(count):
            site.settle(APPLICATIONS * len(Mode))
            pass_a_moment()
            victim = WORKERS[0]
            concerned = site.on(victim)
            at = site.end(victim, number)
            for mode in Mode:
                names = [name for name in concerned if name.startswith(mode.value)]
                if names:
                    what = f"the last {mode.value} application runs elsewhere"
                    found.seconds[what].append(site.last_begun(names, at) - at)
            site.hire(victim)
    return found


def group_node(
    kafka: str, folder: Path, session_s: float, count: int, number: signal.Signals, *, leads: bool
) -> Found:
    """End one of three nodes of a ``kafka://`` group, the one that leads or another, again and again."""
    url, name = f"kafka://{kafka}/bench-{uuid4().hex[:8]}", folder.name
    found = Found()
    with rebalanser.Admin(name, url) as admin, Crew(url, name, session_s) as crew:
        admin.add(f"resource-{n:02}" for n in range(RESOURCES))
        nodes = [f"node-{n}" for n in range(3)]
        for node in nodes:
            crew.hire(node)
            crew.tell(node, "start")
        for n in range(3, 3 + count):
            crew.await_all_owned(RESOURCES, 3)
            admin.wait_balanced(timeout_s=PATIENCE_S)
            pass_a_moment()
            leader = admin.state().leader
            victim = next(node for node in nodes if (node == leader) is leads)
            nodes.remove(victim)
            if number is KILL:
                at = crew.kill(victim)
            else:
                crew.tell(victim, "stop")
                at = crew.await_event(victim, "stopping")["at"]

            def published(at: float = at) -> list[float]:
                times = (crew.latest.get((node, "published"), {"at": 0.0})["at"] for node in nodes)
                return [found for found in times if found > at]

            crew.await_until(lambda: bool(published()))
            whose = "the next leader's" if leads else "the leader's"
            found.seconds[f"{whose} first allocation"].append(min(published()) - at)
            owned_at = crew.await_all_owned(RESOURCES, 2)
            found.seconds["the last resource is started elsewhere"].append(owned_at - at)
            nodes.append(f"node-{n}")
            crew.hire(nodes[-1])
            crew.tell(nodes[-1], "start")
    return found


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of fail-over. ``limits_s`` are for what has these words in its name."""

    name: str
    number: signal.Signals
    run: Callable[[int], Found]
    limit_s: float
    limits_s: Mapping[str, float] = field(default_factory=dict)
    groups: int = 4

    @property
    def ends(self) -> str:
        """Name of the signal that ends the process."""
        return "kill -9" if self.number is KILL else "SIGTERM"

    def limit_of(self, what: str) -> float:
        """The seconds within which this is to happen."""
        return next((limit_s for words, limit_s in self.limits_s.items() if words in what), self.limit_s)


def kinds(kafka: str, folder: Path, session_s: float) -> Iterator[Kind]:
    """All kinds; those that wait longest come first."""

    def own_folder() -> Path:
        return Path(tempfile.mkdtemp(dir=folder))

    def staged(make: Callable[[str, Path], Stage], number: signal.Signals) -> Callable[[int], Found]:
        return lambda count: make(kafka, own_folder()).run(count, number)

    def with_folder(run: Callable[..., Found], number: signal.Signals) -> Callable[[int], Found]:
        return lambda count: run(kafka, own_folder(), session_s, count, number)

    nothing_set = partial(PlainStage, protocol=GroupProtocol.CONSUMER, settings={})
    yield Kind(
        "plain, KIP-848, nothing set", KILL, staged(nothing_set, KILL), BROKERS_SESSION_S + 1, groups=10
    )
    for number, limit_s in ((KILL, session_s + 1), (LEAVE, 1.0)):
        leaders = LeaderOptions(round_s=session_s / 2)
        exclusive_s = {f"{Mode.EXCLUSIVE.value} application": session_s + leaders.permission_s}
        # A leader that has just begun removes a silent worker in its second round (SH-9).
        of_daemon_s = {"application of that daemon": limit_s + leaders.round_s}
        for name, run, limits_s in (
            ("Shiva, a worker", shiva_worker, exclusive_s if number is KILL else {}),
            ("Shiva, the leading daemon", shiva_leader, of_daemon_s if number is KILL else {}),
            ("kafka:// group, its leader", partial(group_node, leads=True), {}),
            ("kafka:// group, another node", partial(group_node, leads=False), {}),
        ):
            yield Kind(name, number, with_folder(run, number), limit_s, limits_s)
        for name, make, waits_s in stages(session_s):
            handed_over = number is LEAVE and not name.startswith(f"NELI, {NeliMode.EXCLUSIVE.value}")
            most_s = limit_s if handed_over or not waits_s else limit_s - 1 + waits_s
            yield Kind(name, number, staged(make, number), most_s)


def stages(session_s: float) -> Iterator[tuple[str, Callable[[str, Path], Stage], float]]:
    """The kinds of consumer groups, and for how long a successor waits for its predecessor's deadline."""
    session_ms = int(session_s * 1000)
    both = {"session.timeout.ms": session_ms, "heartbeat.interval.ms": session_ms // 6}
    for name, protocol, settings in (
        ("plain, classic", GroupProtocol.CLASSIC, both),
        ("plain, KIP-848", GroupProtocol.CONSUMER, both),
        ("plain, KIP-848, heartbeat of 5 s", GroupProtocol.CONSUMER, {"session.timeout.ms": session_ms}),
    ):
        yield name, partial(PlainStage, protocol=protocol, settings=settings), 0.0
    for protocol in GroupProtocol:
        for mode in NeliMode if protocol is GroupProtocol.CLASSIC else (NeliMode.FAST,):
            of = NeliSettings(mode=mode, session_timeout_s=session_s, protocol=protocol)
            suffix = "" if protocol is GroupProtocol.CLASSIC else ", KIP-848"
            waits_s = 0.0 if mode is NeliMode.NON_EXCLUSIVE else of.limit_s
            yield f"NELI, {mode.value}{suffix}", partial(NeliStage, settings=of), waits_s


def measure(chosen: Sequence[Kind], count: int, at_once: int) -> dict[Kind, Found]:
    """Run all kinds, kills before orderly ends, several groups at once."""
    results: dict[Kind, Found] = {}
    for number, groups in ((KILL, at_once), (LEAVE, (at_once + 1) // 2)):
        began = time.monotonic()
        with ThreadPoolExecutor(groups) as pool:
            jobs = []
            for kind in (each for each in chosen if each.number is number):
                each, more = divmod(count, kind.groups)
                counts = [each + (group < more) for group in range(kind.groups)]
                jobs += [(kind, pool.submit(kind.run, share)) for share in counts if share]
            for kind, job in jobs:
                if error := job.exception():
                    console.print(f"{kind.name}, {kind.ends}: a group was not measured to the end: {error!r}")
                else:
                    results.setdefault(kind, Found()).add(job.result())
        console.print(f"{number.name}: {time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}")
    return results


def table_of(results: Mapping[Kind, Found], title: str) -> Table:
    """The table of all that was measured."""
    table = Table(title=title, title_justify="left")
    for column in (
        "what",
        "ends by",
        "until",
        "n",
        "min s",
        "p50 s",
        "p90 s",
        "max s",
        "wanted",
        "two leaders",
    ):
        words = column in {"what", "ends by", "until"}
        table.add_column(column, justify="left" if words else "right", overflow="fold")
    for kind, found in sorted(results.items(), key=lambda item: item[0].name):
        for what, seconds in found.seconds.items():
            p90 = (
                statistics.quantiles(seconds, n=10, method="inclusive")[8] if len(seconds) > 1 else seconds[0]
            )
            values = (min(seconds), statistics.median(seconds), p90, max(seconds))
            overlap = "" if found.overlap_s is None else f"{found.overlap_s:.2f}"
            times = (f"{value:.2f}" for value in values)
            wanted = f"{kind.limit_of(what):.1f}{'' if p90 <= kind.limit_of(what) else ' !'}"
            table.add_row(kind.name, kind.ends, what, str(len(seconds)), *times, wanted, overlap)
    return table


def main() -> None:
    """Run what is asked for and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="fail-overs of each kind")
    parser.add_argument("--at-once", type=int, default=12, help="groups that run at once")
    parser.add_argument("--session", type=float, default=6.0, help="session timeout, or lease, in seconds")
    parser.add_argument("--only", default="", help="a regular expression, such as 'shiva.*kill'")
    parser.add_argument("--plain", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plain:
        plain_member(*json.loads(given.plain))
        return
    limits = {
        "group.consumer.min.session.timeout.ms": "6000",
        "group.consumer.min.heartbeat.interval.ms": "1000",
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broker = KafkaCluster(1, data_folder=folder / "kafka", quick=False, settings=limits)
        kafka = stack.enter_context(broker).bootstrap
        chosen = [
            kind
            for kind in kinds(kafka, folder, given.session)
            if re.search(given.only, f"{kind.name}, {kind.ends}", re.IGNORECASE)
        ]
        loads = [os.getloadavg()[0]]
        results = measure(chosen, given.count, given.at_once)
        loads.append(os.getloadavg()[0])
    load = " to ".join(f"{each:.1f}" for each in loads)
    title = f"Fail-overs, sessions of {given.session:g} s, {given.at_once} groups at once, load {load}"
    Console(width=max(150, console.width)).print(table_of(results, title))


if __name__ == "__main__":
    main()
