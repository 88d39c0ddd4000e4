"""Tasks: how many are enqueued and run in a second, how soon one starts, and other queues beside it.

``python benchmarks/tasks.py [--tasks N] [--waiting N,N] [--drained N,N] [--queues NAME,NAME]`` prints tables.
Nothing is asserted here.

All queues do the same: every transition is durable (fsynced on SQLite; synced by the one member of etcd;
``appendfsync always`` on Redis; the defaults of PostgreSQL). Tasks are enqueued one by one by one thread and,
where the queue can, 100 at a time; two workers drain tasks that do nothing but count, four at a time each; on
an idle queue with one worker it is measured how long it is from the call of enqueue to the start of the body.
A rate is measured for 15 s at most.

Of Skuld alone it is measured what one call of enqueue costs its process; what a deep queue costs, with
``--waiting`` tasks that may all be claimed (a million take minutes to enqueue), in time and in memory for
each; how many a second are drained of ``--drained`` tasks, to the last one; and what dependencies do: a chain
of 1,000 tasks, each after the one before, and a fan: 10,000 tasks after one, one after each 1,000 of these,
and one after the ten.

The packages of the other queues may be in an environment of their own, whose interpreter is
``QUEUES_PYTHON``; ``make bench-tasks`` sees to that. Redis and PostgreSQL are started where they are
installed. What can't be started is left out, and said to be.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

from queues.catalogue import PEERS, Peer
from queues.runs import missing, run
from rich.console import Console
from rich.table import Table

DEEP_S = 1800.0
"""How long a deep queue, or tasks that depend on each other, may take to be enqueued and run."""
PRODUCED = 5_000
"""Number of calls whose cost is measured."""
console = Console()


def milliseconds(seconds: list[float]) -> str:
    """The median and the 99th percentile."""
    if not seconds:
        return "never"
    ordered = sorted(seconds)
    p99 = ordered[int(len(ordered) * 0.99)]
    return f"{statistics.median(ordered) * 1000:.1f}, {p99 * 1000:.1f} ms"


def told(peer: Peer, action: str, count: int = 0, longest_s: float = 400.0) -> dict[str, Any] | None:
    """What an action tells; None, and a line for people, where it failed."""
    try:
        return run(peer, action, count, longest_s)
    except Exception as error:
        console.print(f"{peer.name}, {action}: {error}", markup=False)
        return None


def per_second(rate: float | None) -> str:
    return "" if rate is None else f"{rate:,.0f}"


def side_by_side(peers: list[Peer], tasks: int) -> Table:
    """The same of all queues."""
    table = Table(
        "queue", "enqueue/s", "100 at a time", "drain/s", "start p50, p99",
        title=f"{tasks:,} tasks, two workers",
    )  # fmt: skip
    for peer in peers:
        rates, starts = told(peer, "throughput", tasks) or {}, told(peer, "starts") or {}
        table.add_row(
            peer.name, per_second(rates.get("enqueue")),
            per_second(rates.get("enqueue in batches")), per_second(rates.get("drain")),
            milliseconds(starts.get("seconds", [])),
        )  # fmt: skip
    return table


def one_producer(peers: Iterable[Peer], tasks: int) -> Table:
    """What a call of enqueue costs."""
    table = Table(
        "queue", "enqueue/s", "CPU per call", "write calls", "written", "8 threads, enqueue/s",
        title="Enqueued one by one by one process",
    )  # fmt: skip
    for peer in peers:
        if (found := told(peer, "producing", tasks)) is not None:
            table.add_row(
                peer.name, per_second(found["enqueue"]), f"{found['cpu us']:.0f} us",
                f"{found['writes']:.1f}", f"{found['kB']:.1f} kB", per_second(found["eight threads"]),
            )  # fmt: skip
    return table


def deep(peers: Iterable[Peer], depths: list[int]) -> Table:
    """What it costs that many tasks wait."""
    table = Table(
        "queue", "waiting", "held after", "owner's memory", "a task", "claims/s", "claim to start p50, p99",
        title="Tasks waiting, one worker",
    )  # fmt: skip
    for peer in peers:
        for depth in depths:
            if (found := told(peer, "waiting", depth, DEEP_S)) is not None:
                table.add_row(
                    peer.name, f"{depth:,}", f"{found['held after s']:.1f} s", f"{found['owner MB']:,.0f} MB",
                    f"{found['bytes a task']:,.0f} B", per_second(found["claims"]),
                    milliseconds(found["seconds"]),
                )  # fmt: skip
    return table


def drained(peers: Iterable[Peer], counts: list[int]) -> Table:
    """Measure the drained tasks a second, of few and of very many."""
    table = Table(
        "queue", "tasks", "1,000 at a time", "drain/s", "the last tenth", "workers' CPU a task",
        title="Drained to the last task, two workers",
    )  # fmt: skip
    for peer in peers:
        for count in counts:
            if (found := told(peer, "drained", count, DEEP_S)) is not None:
                table.add_row(
                    peer.name, f"{count:,}", per_second(found["enqueue"]), per_second(found["drain"]),
                    per_second(found["last tenth"]), f"{found['cpu us']:.0f} us",
                )  # fmt: skip
    return table


def dependent(peers: Iterable[Peer]) -> Table:
    """What dependencies cost."""
    table = Table("queue", "shape", "enqueue/s", "run/s", title="Dependencies, two workers")
    for peer in peers:
        for shape, words in (("chain", "chain of 1,000"), ("fan", "fan of 10,000")):
            if (found := told(peer, shape, 0, DEEP_S)) is not None:
                table.add_row(peer.name, words, per_second(found["enqueue"]), per_second(found["run"]))
    return table


def chosen(names: str) -> Iterator[Peer]:
    """The queues to measure; those that can't be started are told of."""
    for peer in PEERS:
        if peer.is_default or not any(peer.name.startswith(name) for name in names.split(",")):
            continue
        if lack := missing(peer):
            console.print(f"{peer.name} is left out: {lack}", markup=False)
        else:
            yield peer


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--tasks", type=int, default=20_000)
    options.add_argument("--waiting", default="10,1000", help="numbers of waiting tasks, as 10,1000,1000000")
    options.add_argument("--drained", default="20000,130000", help="numbers of tasks, as 130000,1000000")
    options.add_argument("--queues", default="skuld,huey,rq,celery,dramatiq,procrastinate")
    options.add_argument("--parts", default="side-by-side,producer,deep,drained,dependent")
    given = options.parse_args()
    peers = list(chosen(given.queues))
    own = [each for each in peers if each.module == "on_skuld"]
    parts = given.parts.split(",")
    if "side-by-side" in parts:
        console.print(side_by_side(peers, given.tasks))
        for peer in peers:
            console.print(f"{peer.name}: {peer.settings}", markup=False)
    if "producer" in parts:
        console.print(one_producer(own, min(given.tasks, PRODUCED)))
    if "deep" in parts:
        console.print(deep(own, [int(each) for each in given.waiting.split(",")]))
    if "drained" in parts:
        console.print(drained(own, [int(each) for each in given.drained.split(",")]))
    if "dependent" in parts:
        console.print(dependent(own))
    console.print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
