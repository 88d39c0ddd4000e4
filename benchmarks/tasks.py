"""Tasks: how many are enqueued and drained in a second, and how soon one starts on an idle queue.

``python benchmarks/tasks.py [--tasks N] [--waiting N,N] [--engines sqlite,etcd,huey]`` prints a table. Every
transition is durable: fsynced on SQLite, synced by the member of etcd; huey runs on SQLite with its ``fsync``
setting, and is said to have drained once its last task was taken. Two worker processes drain tasks that do
nothing. Nothing is asserted here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from rich.console import Console
from rich.table import Table

from rebalanser import Settings
from rebalanser.tasks import Claim, Queue, Status
from rebalanser.testing.etcd_server import EtcdCluster

WORKERS = 2
CONCURRENCY = 4
BATCH = 1000
STARTS = 200
QUIET_S = 0.02
"""How long the queue is idle before each task whose start is measured."""
console = Console()


def opened(url: str, folder: Path) -> Queue:
    """The queue as every process of the benchmark opens it."""
    return Queue(
        "bench", url, claim_ttl_s=30, settings=Settings(lease_ttl_s=10), state_folder=folder / "state"
    )


def nothing(_claim: Claim) -> None:
    """The body of every task that is drained."""


def stamp(_claim: Claim, path: str) -> None:
    """Say when it was started."""
    with Path(path).open("a") as file:
        file.write(f"{time.monotonic()}\n")


def work(url: str, folder: Path) -> None:
    """A worker, until it is told to stop."""
    with opened(url, folder) as queue:
        queue.task()(nothing)
        queue.task()(stamp)
        queue.run(CONCURRENCY)


@contextmanager
def workers(url: str, folder: Path, count: int) -> Iterator[None]:
    """So many workers, in processes of their own."""
    command = [sys.executable, __file__, "--work", url, "--folder", str(folder)]
    started = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for each in started:
            each.terminate()
        for each in started:
            each.wait()


def await_count(queue: Queue, status: Status, count: int) -> None:
    while queue.count().get(status, 0) < count:
        time.sleep(0.02)


def drained(url: str, folder: Path, tasks: int, waiting: int) -> tuple[float, float]:
    """Enqueued and drained tasks in a second, beside ``waiting`` that are not due."""
    with opened(url, folder) as queue:
        task = queue.task()(nothing)
        for first in range(0, waiting, BATCH):
            calls = [((), {"delay_s": 86_400.0})] * min(BATCH, waiting - first)
            task.enqueue_many(calls)
        began = time.monotonic()
        for first in range(0, tasks, BATCH):
            task.enqueue_many([((), {})] * min(BATCH, tasks - first))
        enqueued_s = time.monotonic() - began
        with workers(url, folder, WORKERS):
            await_count(queue, Status.COMPLETED, tasks // 10)
            began, before = time.monotonic(), queue.count()[Status.COMPLETED]
            await_count(queue, Status.COMPLETED, tasks)
            drained_s = time.monotonic() - began
    return tasks / enqueued_s, (tasks - before) / drained_s


def starts(url: str, folder: Path) -> list[float]:
    """From the call of enqueue to the start of the body, in seconds, on an idle queue."""
    told = folder / "starts"
    told.touch()
    with opened(url, folder) as queue:
        task = queue.task()(stamp)
        queue.task()(nothing)
        with workers(url, folder, 1):
            queue.wait(task.enqueue(str(told)))
            seconds = []
            for _ in range(STARTS):
                time.sleep(QUIET_S)
                known = told.stat().st_size
                began = time.monotonic()
                task.enqueue(str(told))
                while told.stat().st_size == known:
                    time.sleep(0.0002)
                seconds.append(float(told.read_text().split()[-1]) - began)
    return seconds


HUEY = """
import json, sys, time
from huey import SqliteHuey
huey = SqliteHuey("bench", filename=sys.argv[1], fsync=True, results=False)

@huey.task()
def nothing():
    pass

if __name__ == "__main__":
    tasks = int(sys.argv[2])
    began = time.monotonic()
    for _ in range(tasks):
        nothing()
    enqueued_s = time.monotonic() - began
    from huey.consumer import Consumer
    import threading
    consumer = huey.create_consumer(workers=8, worker_type="thread", initial_delay=0.001, max_delay=0.01)
    began = time.monotonic()
    consumer.start()
    while huey.pending_count():
        time.sleep(0.01)
    print(json.dumps([tasks / enqueued_s, tasks / (time.monotonic() - began)]))
    consumer.stop(graceful=True)
"""


def huey(folder: Path, tasks: int) -> tuple[float, float]:
    """The same with huey: one process of eight threads, as its consumer is."""
    program = folder / "huey_bench.py"
    program.write_text(HUEY)
    done = subprocess.run(
        [sys.executable, str(program), str(folder / "huey.db"), str(tasks)],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    enqueued, drained_per_s = json.loads(done.stdout.strip().splitlines()[-1])
    return enqueued, drained_per_s


@contextmanager
def engines(names: list[str]) -> Iterator[dict[str, Callable[[Path], str]]]:
    """How to name a new store of each engine."""
    urls: dict[str, Callable[[Path], str]] = {}
    if "sqlite" in names:
        urls["SQLite"] = lambda folder: f"sqlite:///{folder / 'tasks.db'}"
    if "etcd" not in names:
        yield urls
        return
    with tempfile.TemporaryDirectory() as data, EtcdCluster(1, data_folder=Path(data)) as cluster:
        urls["etcd, 1 member"] = lambda _folder: cluster.url(f"bench/{uuid4().hex}")
        yield urls


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tasks", type=int, default=20_000)
    options.add_argument("--waiting", default="10,1000")
    options.add_argument("--engines", default="sqlite,etcd,huey")
    options.add_argument("--work", metavar="URL", help="be a worker")
    options.add_argument("--folder", type=Path)
    given = options.parse_args()
    if given.work:
        work(given.work, given.folder)
        return
    names = given.engines.split(",")
    table = Table(
        "queue", "waiting", "enqueue/s", "drain/s", "start p50, p99", title=f"{given.tasks:,} tasks"
    )
    with engines(names) as urls:
        for name, url in urls.items():
            for waiting in map(int, given.waiting.split(",")):
                with tempfile.TemporaryDirectory() as folder:
                    enqueued, per_s = drained(url(Path(folder)), Path(folder), given.tasks, waiting)
                with tempfile.TemporaryDirectory() as folder:
                    seconds = sorted(starts(url(Path(folder)), Path(folder)))
                p50, p99 = statistics.median(seconds), seconds[int(len(seconds) * 0.99)]
                table.add_row(
                    name, f"{waiting:,}", f"{enqueued:,.0f}", f"{per_s:,.0f}",
                    f"{p50 * 1000:.1f}, {p99 * 1000:.1f} ms",
                )  # fmt: skip
    if "huey" in names and importlib.util.find_spec("huey"):
        with tempfile.TemporaryDirectory() as folder:
            enqueued, per_s = huey(Path(folder), given.tasks)
        table.add_row("huey on SQLite, fsync", "0", f"{enqueued:,.0f}", f"{per_s:,.0f}", "")
    console.print(table)
    console.print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
