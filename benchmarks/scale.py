"""Large groups: 4 nodes and 1,000 nodes with 100,000 resources; prints what is measured beside the aims.

The 4 nodes are real groups, a process each. The 1,000 are bare protocol drivers, many in a process, on a few
connections to the registry, whose handlers return at once: they show the cost of the protocol and not that of
threads. Nothing is asserted here.
"""

from __future__ import annotations

import argparse
import heapq
import os
import platform
import queue
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn
from uuid import uuid4

from node import Heartbeats, cpu_s, tell
from processes import Crew
from rich.console import Console
from rich.table import Table

import rebalanser
from rebalanser.core.allocation import solve
from rebalanser.core.group import (
    Answered,
    CallStart,
    CallStop,
    Effect,
    Event,
    FactKind,
    Handler,
    HandlerReturned,
    Lane,
    MakePlan,
    Member,
    Membership,
    Node,
    Noticed,
    Perform,
    Report,
    Start,
    Topic,
    Wakeup,
    Watch,
)
from rebalanser.core.group.messages import Campaign
from rebalanser.registry import Coordinator, RegistryCoordinator, open_registry, parse_url
from rebalanser.testing.etcd_server import EtcdCluster

TABLES = ["few", "many"]
REPEATS = 5
LOAD_S = 20.0
"""Seconds over which the traffic of a settled group is counted."""
CONNECTIONS = 4
"""Connections to the registry of a process with many nodes."""
WAITING_THREADS = {Lane.HEARTBEAT: 4, Lane.MEMBER: 8, Lane.LEADER: 1}
FOLLOWER_PROCESSES = 2
SQLITE_LEASE_TTL_S = 600.0
"""1,000 nodes are no use of SQLite: only what an operator reads of them is measured there."""
console = Console()


class Swarm:
    """Many nodes in one loop; the calls of all wait for the registry in a few threads.

    Campaigns wait until they are told to go on. So a group begins with one leader that meets all nodes at
    once, and not with a leader for each order of joining.
    """

    def __init__(self, url: str, group: str, labels: Sequence[str], settings: rebalanser.Settings) -> None:
        self._inbox: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._waiting: dict[Lane, queue.SimpleQueue[tuple[int, Perform | MakePlan]]] = {
            lane: queue.SimpleQueue() for lane in Lane
        }
        self._wakeups: list[tuple[float, int]] = []
        self._campaigns: list[tuple[int, Perform]] | None = []
        root = parse_url(url).root
        registries = [open_registry(url) for _ in range(min(CONNECTIONS, len(labels)))]
        self._coordinators: list[Coordinator] = [
            RegistryCoordinator(
                registries[index % len(registries)],
                root,
                group,
                time.monotonic,
                settings.registry_timeout_s,
            )
            for index in range(len(labels))
        ]
        self._nodes = [
            Node(
                Member(f"{label}-{uuid4().hex[:8]}", label),
                settings.timings,
                solve,
                settings.node_options,
            )
            for label in labels
        ]
        self._settled = [False] * len(labels)
        self._joined = [False] * len(labels)
        self._asked = 0
        self.failed: Counter[str] = Counter()
        """Number of commands that failed, by command and error."""
        self._last_told: tuple[int, int, int] | None = None
        for lane, threads in WAITING_THREADS.items():
            for _ in range(threads):
                threading.Thread(target=self._wait, args=(lane,), daemon=True).start()
        threading.Thread(target=self._run, daemon=True).start()

    def start(self, indexes: Sequence[int]) -> None:
        """Have these nodes join."""
        self._asked += len(indexes)
        for index in indexes:
            self._inbox.put((index, Start()))

    def release_campaigns(self) -> None:
        """Have nodes campaign from now on, and those that wait for it at once."""
        held, self._campaigns = self._campaigns or [], None
        for index, effect in held:
            self._waiting[Lane.LEADER].put((index, effect))

    def _wait(self, lane: Lane) -> None:
        while True:
            index, effect = self._waiting[lane].get()
            if isinstance(effect, MakePlan):
                self._inbox.put((index, self._nodes[index].make_plan(effect)))
            else:
                outcome = self._coordinators[index].perform(effect.command)
                self._inbox.put((index, Answered(effect.command, outcome)))

    def _run(self) -> None:
        while True:
            for index, event in self._next():
                self._handle(index, event)

    def _next(self) -> Iterator[tuple[int, Event]]:
        now = time.monotonic()
        due = []
        while self._wakeups and self._wakeups[0][0] <= now:
            at, index = heapq.heappop(self._wakeups)
            if self._nodes[index].next_wakeup == at:
                due.append((index, Wakeup()))
        if due:
            yield from due
            return
        timeout_s = self._wakeups[0][0] - now if self._wakeups else None
        try:
            yield self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return

    def _handle(self, index: int, event: Event) -> None:
        node = self._nodes[index]
        before = node.next_wakeup
        for effect in node.handle(event, time.monotonic()):
            self._carry_out(index, effect)
        if node.next_wakeup is not None and node.next_wakeup != before:
            heapq.heappush(self._wakeups, (node.next_wakeup, index))
        self._tell_progress(index, node)

    def _carry_out(self, index: int, effect: Effect) -> None:
        match effect:
            case Perform(Campaign()) if self._campaigns is not None:
                self._campaigns.append((index, effect))
            case Perform(command):
                self._waiting[command.lane].put((index, effect))
            case MakePlan():
                self._waiting[Lane.LEADER].put((index, effect))
            case CallStart():
                self._inbox.put((index, HandlerReturned(Handler.START)))
            case CallStop():
                self._inbox.put((index, HandlerReturned(Handler.STOP)))
            case Watch(topics):
                self._watch(index, topics)
            case Report(fact) if fact.kind in {FactKind.REBALANCE_COMPLETED, FactKind.ELECTED}:
                tell(fact.kind.value, node=fact.node, value=fact.value)
            case Report(fact) if fact.kind is FactKind.COMMAND_FAILED:
                self.failed.update([f"{fact.detail['command']}: {fact.detail['error']}"[:160]])
            case _:
                pass

    def _watch(self, index: int, topics: Mapping[Topic, int]) -> None:
        def listen(notices: Sequence[Noticed]) -> None:
            for notice in notices:
                self._inbox.put((index, notice))

        session = self._nodes[index].session
        self._coordinators[index].watch(session.node if session else "", topics, listen)

    def _tell_progress(self, index: int, node: Node) -> None:
        """Tell once all nodes that were asked to have joined, and whenever all of them have settled."""
        joined = node.membership is Membership.MEMBER
        if joined != self._joined[index]:
            self._joined[index] = joined
            if sum(self._joined) == self._asked:
                tell("joined")
        if node.settled != self._settled[index]:
            self._settled[index] = node.settled
        elif not node.settled:
            return
        if node.settled and sum(self._settled) == self._asked:
            owned = sum(len(each.started) for each in self._nodes)
            version = max(each.header.version if each.header else 0 for each in self._nodes)
            told = (self._asked, owned, version)
            if told != self._last_told:
                self._last_told = told
                tell("settled", nodes=self._asked, owned=owned, version=version)


def drive(arguments: Sequence[str]) -> None:
    """Run many nodes of a group as told on standard input."""
    url, group, first, lease_ttl_s, count = arguments
    heartbeats = Heartbeats()
    labels = [f"{first}-{number:04}" for number in range(int(count))]
    swarm = Swarm(url, group, labels, rebalanser.Settings(lease_ttl_s=float(lease_ttl_s)))
    tell("ready", pid=os.getpid())
    for line in sys.stdin:
        match line.split():
            case ["start"]:
                swarm.start(range(len(labels)))
            case ["start", number]:
                swarm.start([int(number)])
            case ["campaign"]:
                swarm.release_campaigns()
            case ["usage"]:
                tell("usage", cpu_s=cpu_s(), failed=swarm.failed, **heartbeats.taken())
            case _:
                raise ValueError(line)


class Results:
    """Rows of a table, each with what it should be."""

    def __init__(self, title: str) -> None:
        self._table = Table(title=title, title_justify="left")
        for column in ("what", "registry", "measured", "aim"):
            self._table.add_column(column, justify="left" if column in {"what", "registry"} else "right")

    def add(self, what: str, registry: str, measured: str, aim: str = "") -> None:
        """Add a row, and print it at once for those who wait."""
        console.print(f"  {what}, {registry}: {measured}{f' (aim {aim})' if aim else ''}", style="dim")
        self._table.add_row(what, registry, measured, aim)

    def print(self) -> None:
        """Print the table, if anything is in it."""
        if self._table.row_count:
            console.print(self._table)


def filled(url: str, count: int) -> tuple[str, float]:
    """A new group with ``count`` resources: its name, and how many seconds it took to add them."""
    name = f"scale-{uuid4().hex[:8]}"
    began = time.monotonic()
    with rebalanser.Admin(name, url) as admin:
        admin.add(f"tenant/partition-{number:06}" for number in range(count))
    return name, time.monotonic() - began


def usage(crew: Crew, labels: Sequence[str]) -> tuple[float, float, float]:
    """Processor seconds of these processes; the longest seconds between heartbeats, and of a turn."""
    cpu = gap = turn = 0.0
    for label in labels:
        crew.tell(label, "usage")
        told = crew.await_event(label, "usage")
        cpu, gap, turn = cpu + told["cpu_s"], max(gap, told["gap_s"]), max(turn, told["turn_s"])
    return cpu, gap, turn


def late(settings: rebalanser.Settings) -> str:
    """The longest time between two proofs of life of which none is late."""
    return f"<= {settings.heartbeat_interval_s + settings.registry_timeout_s:.2f} s"


def few_nodes(url: str, registry: str, nodes: int, count: int, results: Results) -> None:
    """Real groups, a process each: first settle, a join, one resource more."""
    settings = rebalanser.Settings()
    group, added_s = filled(url, count)
    results.add(f"add {count:,} resources", registry, f"{added_s:.1f} s")
    with Crew(url, group, settings.lease_ttl_s) as crew, rebalanser.Admin(group, url) as admin:
        labels = [f"n{number}" for number in range(nodes + 1)]
        *first, last = labels
        for label in labels:
            crew.hire(label)
        began = time.monotonic()
        for label in first:
            crew.tell(label, "start")
        seconds = crew.await_all_owned(count, nodes) - began
        results.add(f"first settle of {nodes} nodes", registry, f"{seconds:.2f} s", "<= 10 s")
        crew.tell(last, "start")
        began = crew.await_event(last, "starting")["at"]
        seconds = crew.await_all_owned(count, nodes + 1) - began
        results.add(f"join of node {nodes + 1}", registry, f"{seconds:.2f} s", "<= 4 s")
        time.sleep(settings.heartbeat_interval_s)
        singles = []
        for number in range(REPEATS):
            began = time.monotonic()
            admin.add(f"one-{number}")
            singles.append(crew.await_all_owned(count + number + 1, nodes + 1) - began)
            time.sleep(0.5)
        results.add(
            "one resource added is owned",
            registry,
            f"{statistics.median(singles) * 1000:.0f} ms (max {max(singles) * 1000:.0f})",
            "<= 50 ms",
        )
        cpu, gap, turn = usage(crew, labels)
        results.add("longest time between heartbeats", registry, f"{gap:.2f} s", late(settings))
        results.add("longest turn of a loop", registry, f"{turn * 1000:.0f} ms", "<= 50 ms")
        results.add("processor time of all nodes", registry, f"{cpu:.1f} s")


def traffic(etcd: EtcdCluster) -> tuple[float, float]:
    """Bytes that clients have sent to etcd's only member and got from it, and when."""
    with urllib.request.urlopen(f"http://{etcd.endpoints[0]}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    at = time.monotonic()
    names = r"^etcd_network_client_grpc_(?:sent|received)_bytes_total (\S+)$"
    return sum(map(float, re.findall(names, text, re.MULTILINE))), at


def state_times(url: str, group: str) -> tuple[list[float], list[float], rebalanser.GroupState]:
    """Wall and processor seconds of reading the state of a group."""
    walls, cpus = [], []
    with rebalanser.Admin(group, url) as admin:
        for _ in range(3):
            began, cpu_began = time.monotonic(), time.process_time()
            state = admin.state()
            walls.append(time.monotonic() - began)
            cpus.append(time.process_time() - cpu_began)
    return walls, cpus, state


def told_of(crew: Crew, label: str, event: str, field: str) -> float:
    """A number of a process's latest event of a kind; 0 if there was none."""
    number: float = crew.latest.get((label, event), {}).get(field, 0)
    return number


def has_joined(crew: Crew, count: int) -> bool:
    """True if so many of the nodes that join later have settled."""
    return told_of(crew, "j", "settled", "nodes") == count


def all_owned(crew: Crew, labels: Sequence[str], count: int) -> float:
    """When the nodes of all processes owned all resources, and the leader knew it."""

    def reached() -> bool:
        version = max(told_of(crew, label, "settled", "version") for label in labels)
        owned = sum(told_of(crew, label, "settled", "owned") for label in labels)
        return owned == count and told_of(crew, "l", "rebalance_completed", "value") >= version

    crew.await_until(reached)
    return max(
        told_of(crew, "l", "rebalance_completed", "at"),
        *(told_of(crew, label, "settled", "at") for label in labels),
    )


def many_nodes(
    url: str, registry: str, nodes: int, count: int, results: Results, etcd: EtcdCluster | None
) -> None:
    """Bare drivers: first settle, a join, traffic of a settled group, and what an operator reads."""
    settings = rebalanser.Settings() if etcd else rebalanser.Settings(lease_ttl_s=SQLITE_LEASE_TTL_S)
    group, _ = filled(url, count)
    program = [str(Path(__file__).resolve()), "--drive"]
    with Crew(url, group, settings.lease_ttl_s) as crew:
        followers = [f"f{number}" for number in range(FOLLOWER_PROCESSES)]
        for number, label in enumerate(followers):
            share = (nodes - 1 + number) // FOLLOWER_PROCESSES
            crew.hire(label, program, str(share))
        crew.hire("l", program, "1")
        if etcd:
            crew.hire("j", program, str(REPEATS))
        for label in followers:
            crew.tell(label, "start")
        crew.await_until(lambda: all((label, "joined") in crew.latest for label in followers))
        began = time.monotonic()
        for label in ("l", *followers):
            crew.tell(label, "campaign")
            if label == "l":
                crew.tell(label, "start")
                crew.await_event("l", "elected")
        settled_s = all_owned(crew, ["l", *followers], count) - began
        results.add(f"first settle of {nodes:,} nodes", registry, f"{settled_s:.1f} s")
        everyone = ["l", *followers, *(["j"] if etcd else [])]
        longest = "longest time between heartbeats"
        _, gap, _ = usage(crew, everyone)
        results.add(f"{longest}, first settle", registry, f"{gap:.2f} s", late(settings))
        if etcd is not None:
            time.sleep(2 * settings.heartbeat_interval_s)
            cpu_before, _, _ = usage(crew, ["l"])
            before = traffic(etcd)
            time.sleep(LOAD_S)
            after = traffic(etcd)
            rate = (after[0] - before[0]) / (after[1] - before[1])
            idle_cpu = (usage(crew, ["l"])[0] - cpu_before) / LOAD_S
            results.add("traffic of a settled group", registry, f"{rate / 1e6:.2f} MB/s", "<= 0.5 MB/s")
            results.add("leader of a settled group", registry, f"{idle_cpu:.1%} of a core")
            joins, cpus, turns, sizes = [], [], [], []
            crew.tell("j", "campaign")
            for number in range(REPEATS):
                cpu_before, _, _ = usage(crew, ["l"])
                before = traffic(etcd)
                crew.tell("j", f"start {number}")
                began = time.monotonic()
                crew.await_until(partial(has_joined, crew, number + 1))
                joins.append(all_owned(crew, ["l", *followers, "j"], count) - began)
                cpu_after, _, turn = usage(crew, ["l"])
                cpus.append(cpu_after - cpu_before)
                turns.append(turn)
                sizes.append(traffic(etcd)[0] - before[0])
                time.sleep(1.0)
            results.add(
                f"join of node {nodes + 1:,}",
                registry,
                f"{statistics.median(joins):.2f} s (max {max(joins):.2f})",
                "<= 3 s",
            )
            results.add(
                "leader's processor time of it",
                registry,
                f"{statistics.median(cpus):.2f} s (max {max(cpus):.2f})",
                "<= 0.3 s",
            )
            results.add("bytes sent for it, in all", registry, f"{statistics.median(sizes) / 1e6:.1f} MB")
            results.add("longest turn of the leader", registry, f"{max(turns) * 1000:.0f} ms", "<= 50 ms")
            _, gap, _ = usage(crew, everyone)
            results.add(f"{longest}, joins", registry, f"{gap:.2f} s", late(settings))
        walls, cpus, state = state_times(url, group)
        results.add(
            f"Admin.state() ({len(state.nodes):,} nodes, {state.owned:,} owned)",
            registry,
            f"{statistics.median(walls):.2f} s (processor {statistics.median(cpus):.2f} s)",
            "<= 3 s",
        )
        _, gap, _ = usage(crew, everyone)
        results.add(f"{longest}, Admin.state()", registry, f"{gap:.2f} s", late(settings))


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """End what takes longer than this."""

    def end(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f"ended after {seconds} s")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    except (TimeoutError, queue.Empty) as error:
        console.print(f"not measured to the end: {error!r}", style="red")
    finally:
        signal.alarm(0)


def main() -> None:
    """Measure what is asked for and print the tables."""
    if sys.argv[1:2] == ["--drive"]:
        drive(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=TABLES, action="append")
    parser.add_argument("--registry", choices=["etcd", "sqlite"], action="append")
    parser.add_argument("--nodes", type=int, default=1000, help="nodes of the large group")
    parser.add_argument("--resources", type=int, default=100_000)
    parser.add_argument("--limit-s", type=int, default=210, help="seconds for each of four parts")
    asked = parser.parse_args()
    only, registries = set(asked.only or TABLES), set(asked.registry or ["etcd", "sqlite"])
    console.print(
        f"{platform.python_implementation()} {platform.python_version()}, {os.cpu_count()} cores; "
        f"{asked.resources:,} resources"
    )
    few, many = Results("4 nodes: real groups, a process each"), Results(f"{asked.nodes:,} nodes: drivers")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        for registry in sorted(registries):
            for part in sorted(only):
                with limited(asked.limit_s):
                    etcd = EtcdCluster(1, data_folder=path / part) if registry == "etcd" else None
                    url = f"sqlite:///{path}/{part}.db"
                    try:
                        if etcd is not None:
                            etcd.start()
                            url = etcd.url("scale")
                        if part == "few":
                            few_nodes(url, registry, 4, asked.resources, few)
                        else:
                            many_nodes(url, registry, asked.nodes, asked.resources, many, etcd)
                    finally:
                        if etcd is not None:
                            etcd.stop()
    few.print()
    many.print()


if __name__ == "__main__":
    main()
