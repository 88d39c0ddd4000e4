"""Restart the processes of a group one by one, and count what that costs: four ways side by side.

    python examples/rolling_deploy.py

Ten processes share twenty resources. Each is stopped and started again, with and without `rejoin_grace_s`,
and with surge, where the new process starts before the old one stops. With `--kafka HOST:PORT` a consumer
group of KIP-848 on twenty partitions is restarted in the same way.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from uuid import uuid4

import rebalanser

GRACE_S = 60.0
PATIENCE_S = 120.0


class Log:
    """A log of starts and stops, a line for each resource: processes write it, the deployment reads it."""

    def __init__(self, path: Path, label: str = "") -> None:
        self._path = path
        self._label = label

    def write(self, event: str, resources: Iterable[str]) -> None:
        """Append what happens just now, by the clock that all processes of a machine share."""
        lines = [json.dumps([time.monotonic(), self._label, event, each]) + "\n" for each in resources]
        with self._path.open("a") as file:
            file.write("".join(lines))

    def read(self) -> list[tuple[float, str, str, str]]:
        """All that was written, in the order of time."""
        text = self._path.read_text() if self._path.exists() else ""
        return sorted(tuple(json.loads(line)) for line in text.splitlines())

    def owners(self) -> dict[str, set[str]]:
        """The labels that work on each resource now; a process and its successor have the same one."""
        running: dict[str, list[str]] = {}
        for _, label, event, resource in self.read():
            here = running.setdefault(resource, [])
            here.append(label) if event == "start" else here.remove(label)
        return {resource: set(here) for resource, here in running.items() if here}


def work_in_group(log: Log, label: str, registry: str, grace_s: float) -> None:
    """Take part in the group until SIGTERM."""
    settings = rebalanser.Settings(lease_ttl_s=5.0, rejoin_grace_s=grace_s)
    group = rebalanser.Group("deploy", registry, node=label, settings=settings)
    group.on_start(lambda owned: log.write("start", (each.resource for each in owned)))
    group.on_stop(lambda owned: log.write("stop", (each.resource for each in owned)))
    group.run()


def consume(log: Log, kafka: str, name: str) -> None:
    """Be a member of the consumer group until SIGTERM."""
    from confluent_kafka import Consumer, TopicPartition  # noqa: PLC0415 - for this way only

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": name, "group.protocol": "consumer"})

    def told(event: str) -> Callable[[Consumer, list[TopicPartition]], None]:
        return lambda _, partitions: log.write(event, (str(each.partition) for each in partitions))

    consumer.subscribe([name], on_assign=told("start"), on_revoke=told("stop"), on_lost=told("stop"))
    while not stop.is_set():
        consumer.poll(0.05)
    consumer.close()


class Deployment:
    """Processes of one kind, and the log that they share."""

    def __init__(self, folder: Path, labels: list[str], resources: int, how: list[str]) -> None:
        self.log = Log(folder / "log.jsonl")
        self._arguments = ["--log", str(folder / "log.jsonl"), *how]
        self._labels = labels
        self._resources = resources
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, label: str) -> subprocess.Popen[bytes]:
        """Start a process."""
        return subprocess.Popen([sys.executable, __file__, "--worker", label, *self._arguments])

    def settle(self, done: Callable[[dict[str, set[str]]], bool] = lambda _: True) -> None:
        """Wait until each resource has an owner, and for what else is asked of the owners."""
        ends = time.monotonic() + PATIENCE_S
        since = None
        while since is None or time.monotonic() < since + 0.5:
            if time.monotonic() > ends:
                raise TimeoutError("the group did not settle")
            time.sleep(0.05)
            owners = self.log.owners()
            if len(owners) < self._resources or not done(owners):
                since = None
            elif since is None:
                since = time.monotonic()

    def run(self, surge: bool) -> str:
        """Start all processes, restart one after the other, and return the cost of the restarts."""
        try:
            for label in self._labels:
                self._running[label] = self.start(label)
            everybody = set(self._labels)
            self.settle(lambda owners: set().union(*owners.values()) == everybody)
            before = self.log.owners()
            begun_at = time.monotonic()
            for label in self._labels:
                self._restart(label, surge, everybody)
            return self._cost(begun_at, before)
        finally:
            for process in self._running.values():
                process.terminate()
            for process in self._running.values():
                process.wait(PATIENCE_S)

    def _restart(self, label: str, surge: bool, everybody: set[str]) -> None:
        old = self._running[label]
        seen = len(self.log.read())
        if surge:
            self._running[label] = self.start(label)
            self.settle(lambda _: self._started_again(label, seen))
        old.terminate()
        old.wait(PATIENCE_S)
        if not surge:
            self._running[label] = self.start(label)
        self.settle(lambda owners: set().union(*owners.values()) == everybody)

    def _started_again(self, label: str, seen: int) -> bool:
        return any(event[1:3] == (label, "start") for event in self.log.read()[seen:])

    def _cost(self, begun_at: float, before: dict[str, set[str]]) -> str:
        last_owner = {resource: next(iter(labels)) for resource, labels in before.items()}
        stopped_at: dict[str, float] = {}
        starts = moves = 0
        unowned_s: list[float] = []
        for at, label, event, resource in self.log.read():
            if at < begun_at:
                continue
            if event == "stop":
                stopped_at[resource] = at
                continue
            starts += 1
            moves += label != last_owner[resource]
            last_owner[resource] = label
            if resource in stopped_at:
                unowned_s.append(at - stopped_at.pop(resource))
        times = f"unowned p50 {median(unowned_s):.2f} s, max {max(unowned_s):.2f} s"
        return f"{starts} starts, {moves} moves between labels, {times}"


def make_topic(kafka: str, name: str, partitions: int) -> None:
    """Create the topic of a consumer group."""
    from confluent_kafka.admin import AdminClient, NewTopic  # noqa: PLC0415 - for this way only

    admin = AdminClient({"bootstrap.servers": kafka})
    for future in admin.create_topics([NewTopic(name, partitions, 1)]).values():
        future.result(PATIENCE_S)


def compare(processes: int, resources: int, kafka: str | None) -> None:
    """Restart the processes in each way, and print what it costs."""
    labels = [f"worker-{number}" for number in range(processes)]
    print(f"{processes} processes, {resources} resources, restarted one by one")
    ways = {
        "without a grace": (0.0, False),
        "with a grace": (GRACE_S, False),
        "with a grace, and surge": (GRACE_S, True),
    }
    with ExitStack() as stack:
        for way, (grace_s, surge) in ways.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            registry = f"sqlite:///{folder / 'groups.db'}"
            with rebalanser.Admin("deploy", registry) as admin:
                admin.add(*(f"resource-{number}" for number in range(resources)))
            how = ["--registry", registry, "--grace", str(grace_s)]
            print(f"{way}: {Deployment(folder, labels, resources, how).run(surge)}", flush=True)
        if kafka is None:
            print("consumer group, KIP-848: not measured, give --kafka HOST:PORT")
            return
        folder, name = Path(stack.enter_context(tempfile.TemporaryDirectory())), f"deploy-{uuid4().hex[:8]}"
        make_topic(kafka, name, resources)
        how = ["--kafka", kafka, "--group", name]
        print(f"consumer group, KIP-848: {Deployment(folder, labels, resources, how).run(surge=False)}")


def main() -> None:
    """Compare; or with ``--worker`` be one of the processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--resources", type=int, default=20)
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a broker that is there")
    for internal in ("--worker", "--registry", "--group", "--log"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--grace", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is None:
        compare(given.processes, given.resources, given.kafka)
    elif given.group is None:
        work_in_group(Log(Path(given.log), given.worker), given.worker, given.registry, given.grace)
    else:
        consume(Log(Path(given.log), given.worker), given.kafka, given.group)


if __name__ == "__main__":
    main()
