"""All benchmarks in one run, printed side by side. Nothing is asserted here."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock
from uuid import uuid4

from processes import Crew
from rich.console import Console
from rich.table import Table

import rebalanser
from rebalanser.core.allocation import balanced, minimum_moves, moves
from rebalanser.core.group import Answered, Event, HandlerReturned
from rebalanser.registry import open_registry
from rebalanser.registry.contract import Put, Target, Transaction
from rebalanser.runtime.node_runner import NodeRunner
from rebalanser.testing.etcd_server import EtcdCluster

REPEATS = 9
TABLES = ["floor", "join", "kill", "idle", "moves", "turns"]
REQUEST_TIMEOUT_S = 5.0
console = Console()


def milliseconds(seconds: Sequence[float]) -> tuple[str, str, str]:
    """Median, smallest and largest, in milliseconds."""
    values = (statistics.median(seconds), min(seconds), max(seconds))
    return tuple(f"{value * 1000:.1f}" for value in values)  # type: ignore[return-value]


def floor_hops(url: str, hops: int = 300) -> list[float]:
    """Serialized hops: put a key, wait for the watch to tell it, through the library's own client."""
    registry = open_registry(url)
    key = f"floor-{uuid4().hex}"
    told = threading.Event()
    watch = registry.watch(Target(key), 1, lambda _events: told.set())
    seconds = []
    try:
        for number in range(hops):
            told.clear()
            before = time.monotonic()
            registry.execute(Transaction(then=(Put(key, str(number).encode()),)), REQUEST_TIMEOUT_S)
            told.wait(REQUEST_TIMEOUT_S)
            seconds.append(time.monotonic() - before)
    finally:
        watch.close()
        registry.close()
    return seconds[hops // 10 :]


def filled(url: str, count: int) -> str:
    """A new group with ``count`` resources; its name."""
    name = f"bench-{uuid4().hex[:8]}"
    with rebalanser.Admin(name, url) as admin:
        admin.add(f"resource-{number:04}" for number in range(count))
    return name


def join_and_leave(url: str, count: int) -> tuple[list[float], list[float]]:
    """From start() of a fourth node to every resource held and its OnStart returned, and back."""
    joins, leaves = [], []
    with Crew(url, filled(url, count), lease_ttl_s=10) as crew:
        for label in ("a", "b", "c", "d"):
            crew.hire(label)
        for label in ("a", "b", "c"):
            crew.tell(label, "start")
        crew.await_all_owned(count, 3)
        for _ in range(REPEATS):
            time.sleep(0.5)
            crew.tell("d", "start")
            started_at = crew.await_event("d", "starting")["at"]
            joins.append(crew.await_all_owned(count, 4) - started_at)
            time.sleep(0.5)
            crew.tell("d", "stop")
            stopped_at = crew.await_event("d", "stopping")["at"]
            leaves.append(crew.await_all_owned(count, 3) - stopped_at)
    return joins, leaves


def killed(url: str, lease_ttl_s: float, count: int = 30) -> list[float]:
    """From ``kill -9`` of one of three nodes to everything owned again."""
    seconds = []
    with Crew(url, filled(url, count), lease_ttl_s) as crew:
        for label in ("a", "b"):
            crew.hire(label)
            crew.tell(label, "start")
        for number in range(REPEATS):
            victim = f"victim-{number}"
            crew.hire(victim)
            crew.tell(victim, "start")
            crew.await_all_owned(count, 3)
            time.sleep(0.3)
            at = crew.kill(victim)
            seconds.append(crew.await_all_owned(count, 2) - at)
    return seconds


def idle(url: str, nodes: int = 10, seconds: float = 20.0) -> tuple[float, float, float]:
    """Requests per second of a settled group, its heartbeats per second, and a node's share of a core."""
    settings = rebalanser.Settings()
    with Crew(url, filled(url, 100), settings.lease_ttl_s) as crew:
        labels = [f"n{number}" for number in range(nodes)]
        for label in labels:
            crew.hire(label)
            crew.tell(label, "start")
        crew.await_all_owned(100, nodes)
        time.sleep(settings.heartbeat_interval_s)
        before = usage(crew, labels)
        time.sleep(seconds)
        after = usage(crew, labels)
    elapsed = after[2] - before[2]
    heartbeats = nodes / settings.heartbeat_interval_s
    return (after[0] - before[0]) / elapsed, heartbeats, (after[1] - before[1]) / elapsed / nodes


def usage(crew: Crew, labels: Sequence[str]) -> tuple[float, float, float]:
    """Requests and processor seconds of all nodes together, and when."""
    requests = cpu_s = 0.0
    for label in labels:
        crew.tell(label, "usage")
        told = crew.await_event(label, "usage")
        requests, cpu_s = requests + told["requests"], cpu_s + told["cpu_s"]
    return requests, cpu_s, time.monotonic()


def turns(count: int) -> dict[str, float]:
    """Longest processor seconds of a turn of a node's loop with ``count`` resources on one node, by cause."""
    url, longest, handle = f"memory://turns-{uuid4().hex}", dict[str, float](), vars(NodeRunner)["_handle"]

    def timed(engine: NodeRunner, event: Event) -> None:
        began_s = time.thread_time()
        handle(engine, event)
        took_s = time.thread_time() - began_s
        words = [type(event).__name__]
        if isinstance(event, Answered):
            words += [type(event.command).__name__, type(event.outcome).__name__]
        elif isinstance(event, HandlerReturned):
            words.append(event.handler.value)
        cause = " ".join(words)
        longest[cause] = max(took_s, longest.get(cause, 0.0))

    def node(label: str) -> rebalanser.Group:
        group = rebalanser.Group("turns", url, node=label, settings=rebalanser.Settings(lease_ttl_s=30.0))
        group.on_start(lambda _: None)
        group.on_stop(lambda _: None)
        return group

    with (
        mock.patch.object(NodeRunner, "_handle", timed),
        rebalanser.Admin("turns", url) as admin,
        node("a"),
    ):
        admin.add(f"tenant/partition-{number:06}" for number in range(count))
        admin.wait_balanced(timeout_s=300)
        with node("b"):
            admin.wait_balanced(timeout_s=300)
        admin.wait_balanced(timeout_s=300)
        admin.drain("a")
        with node("b"):
            admin.wait_balanced(timeout_s=300)
    return longest


def moved(before: int, after: int, count: int = 1000) -> tuple[int, int]:
    """Moves of one rebalance between two sizes of a group, and the least possible."""
    names = [f"resource-{number:04}" for number in range(count)]
    old = balanced([f"node-{n:02}" for n in range(before)], names, {})
    nodes = [f"node-{n:02}" for n in range(after)]
    return moves(old, balanced(nodes, names, old)), minimum_moves(nodes, names, old)


@contextmanager
def registries() -> Iterator[list[tuple[str, str]]]:
    """The registries to measure: etcd with three members and with one, and SQLite."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        with (
            EtcdCluster(3, data_folder=path / "three") as three,
            EtcdCluster(1, data_folder=path / "one") as one,
        ):
            yield [
                ("etcd, 3 members", three.url("bench")),
                ("etcd, 1 member", one.url("bench")),
                ("SQLite", f"sqlite:///{path}/groups.db"),
            ]


def compare_registries(only: set[str]) -> None:
    """Print what is measured on each registry."""
    with registries() as measured:
        times = Table(title="Times in ms", title_justify="left")
        for column in ("what", "registry", "median", "min", "max", "floor hops"):
            times.add_column(column, justify="left" if column in {"what", "registry"} else "right")
        for label, url in measured:
            floor = floor_hops(url)
            hop = statistics.median(floor)

            def row(what: str, seconds: Sequence[float], where: str = label, hop: float = hop) -> None:
                times.add_row(what, where, *milliseconds(seconds), f"{statistics.median(seconds) / hop:.1f}")

            row("floor: put to watch", floor)
            for count in (30, 100, 1000) if "join" in only else ():
                joins, leaves = join_and_leave(url, count)
                row(f"join 3 to 4, {count} resources", joins)
                row(f"leave 4 to 3, {count} resources", leaves)
            if "kill" in only:
                row("kill -9, lease of 2 s", killed(url, 2.0))
            times.add_section()
        console.print(times)
        if "idle" in only:
            table = Table(
                "registry",
                "requests/s",
                "heartbeats/s",
                "core per node",
                title="Idle, 10 nodes",
                title_justify="left",
            )
            for label, url in measured:
                requests, heartbeats, core = idle(url)
                table.add_row(label, f"{requests:.1f}", f"{heartbeats:.1f}", f"{core:.2%}")
            console.print(table)


def print_turns() -> None:
    """Print the longest turns of a loop at two sizes."""
    counts = (20_000, 100_000)
    longest = [turns(count) for count in counts]
    columns = [f"{count:,} resources" for count in counts]
    table = Table(
        "cause", *columns, title="Longest turns of a loop, ms of processor time", title_justify="left"
    )
    for cause in sorted(longest[-1], key=lambda cause: -longest[-1][cause]):
        table.add_row(cause, *(f"{each.get(cause, 0.0) * 1000:.1f}" for each in longest))
    console.print(table)


def main() -> None:
    """Run what is asked for and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=TABLES, action="append")
    only = set(parser.parse_args().only or TABLES)
    console.print(
        f"{platform.python_implementation()} {platform.python_version()}, {platform.system()}, "
        f"{os.cpu_count()} cores; medians of {REPEATS}; a lease of 10 s unless said otherwise"
    )
    if only - {"moves", "turns"}:
        compare_registries(only)
    if "moves" in only:
        table = Table("nodes", "moves", "minimum", title="Moves, 1,000 resources", title_justify="left")
        for before, after in ((10, 11), (10, 9), (10, 15)):
            done, least = moved(before, after)
            table.add_row(f"{before} to {after}", str(done), str(least))
        console.print(table)
    if "turns" in only:
        print_turns()


if __name__ == "__main__":
    main()
