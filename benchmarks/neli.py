"""Fail-overs of NELI in each mode beside those of a plain consumer group, on one broker of its own.

``python benchmarks/neli.py [--count 200] [--groups 1] [--session 2]``. Each fail-over kills the leader by
``kill -9``, or lets it leave in order, and takes the time until a process that was waiting leads. Leadership
is sampled a thousand times a second in each process, on the monotonic clock of the one host, so that the
longest time with two leaders can be told. Several groups at once take less time, and more of the machine.
Nothing is asserted here.
"""

from __future__ import annotations

import argparse
import json
import queue
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import tenacity
from confluent_kafka import Consumer, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from rich.console import Console
from rich.table import Table

from rebalanser.neli.settings import Mode
from rebalanser.testing.kafka_server import KafkaCluster

MEMBER = Path(__file__).resolve().parent.parent / "tests" / "faults" / "neli_process.py"
SPAN = struct.Struct("dd")
PATIENCE_S = 60.0
END_S = 5.0
PLAIN = "a plain consumer group"
console = Console()


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


@dataclass(frozen=True)
class Outcome:
    """How long each fail-over took, and the longest time with two leaders (none for a plain group)."""

    seconds: list[float]
    overlap_s: float | None


class Stage:
    """One group with one partition, in which leaders follow one another."""

    def __init__(self, kafka: str, folder: Path, session_s: float, mode: Mode | None) -> None:
        self._kafka = kafka
        self._folder = folder
        self._session_s = session_s
        self._mode = mode
        self._topic = f"bench-{uuid.uuid4().hex}"
        self._group = f"{self._topic}-group"
        self._admin = AdminClient({"bootstrap.servers": kafka})
        if mode is None:
            for future in self._admin.create_topics([NewTopic(self._topic, 1, 1)]).values():
                future.result(PATIENCE_S)

    def run(self, count: int, number: signal.Signals) -> Outcome:
        """Let ``count`` leaders end, one after the other, each beside one process that waits."""
        seconds: list[float] = []
        with ExitStack() as stack:
            processes = [self._start(stack)]
            processes[0].wait_induced()
            for _ in range(count):
                leader, successor = processes[-1], self._start(stack)
                processes.append(successor)
                self._wait_members(2)
                at = time.monotonic()
                leader.send(number)
                seconds.append(successor.wait_induced() - at)
                leader.end()
            processes[-1].send(signal.SIGTERM)
            processes[-1].end()
        return Outcome(seconds, None if self._mode is None else _overlap_s(processes))

    def _start(self, stack: ExitStack) -> Process:
        process = self._new()
        stack.callback(process.end)
        return process

    def _new(self) -> Process:
        if self._mode is None:
            order = [__file__, "--plain", self._kafka, self._topic, self._group, str(self._session_s)]
            return Process(*order)
        span = self._folder / uuid.uuid4().hex
        settings = {"session_timeout_s": self._session_s, "max_poll_interval_s": 10.0}
        return Process(
            str(MEMBER),
            json.dumps(
                {
                    "topic": self._topic,
                    "group": self._group,
                    "role": "only",
                    "kafka": self._kafka,
                    "mode": self._mode,
                    "settings": settings,
                    "span": str(span),
                }
            ),
            span=span,
        )

    def _wait_members(self, count: int) -> None:
        """Wait until the group has settled with so many members."""

        def settled() -> bool:
            found = self._admin.describe_consumer_groups([self._group])[self._group].result(PATIENCE_S)
            return len(found.members) == count and found.state.name == "STABLE"

        tenacity.Retrying(
            # A coordinator that has just been chosen may still be loading.
            retry=tenacity.retry_if_result(lambda found: not found)
            | tenacity.retry_if_exception_type(KafkaException),
            stop=tenacity.stop_after_delay(PATIENCE_S),
            wait=tenacity.wait_fixed(0.05),
        )(settled)


def fail_over(
    kafka: str,
    folder: Path,
    session_s: float,
    mode: Mode | None,
    counts: Sequence[int],
    number: signal.Signals,
) -> Outcome:
    """Let so many leaders of groups of their own end, in all groups at once."""

    def one(count: int) -> Outcome:
        return Stage(kafka, folder, session_s, mode).run(count, number)

    with ThreadPoolExecutor(len(counts)) as groups:
        outcomes = list(groups.map(one, counts))
    seconds = [each for outcome in outcomes for each in outcome.seconds]
    overlaps = [outcome.overlap_s for outcome in outcomes if outcome.overlap_s is not None]
    return Outcome(seconds, max(overlaps, default=None))


def _overlap_s(processes: Sequence[Process]) -> float:
    """The longest time with two leaders; 0 where there was none."""
    spans = sorted(span for process in processes for span in process.led if span[1] >= span[0])
    return max(0.0, *(earlier[1] - later[0] for earlier, later in pairwise(spans)))


def plain_member(kafka: str, topic: str, group: str, session_s: float) -> None:
    """A plain consumer, told when it is assigned the partition; runs until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    consumer = Consumer(
        {
            "bootstrap.servers": kafka,
            "group.id": group,
            "session.timeout.ms": int(session_s * 1000),
            "heartbeat.interval.ms": int(session_s * 1000 / 6),
            "partition.assignment.strategy": "cooperative-sticky",
        }
    )

    def assigned(_consumer: Consumer, partitions: Sequence[object]) -> None:
        if partitions:
            print(json.dumps({"event": "induced", "at": time.monotonic()}), flush=True)

    consumer.subscribe([topic], on_assign=assigned)
    while not stop.is_set():
        consumer.poll(0.05)
    consumer.close()


def main() -> None:
    """Run everything and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="fail-overs of each kind")
    parser.add_argument("--groups", type=int, default=1, help="how many groups share them, at once")
    parser.add_argument("--session", type=float, default=2.0, help="the session timeout in seconds")
    parser.add_argument("--plain", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plain:
        kafka_address, topic, group, session_s = given.plain
        plain_member(kafka_address, topic, group, float(session_s))
        return
    each, more = divmod(given.count, given.groups)
    counts = [each + (group < more) for group in range(given.groups)]
    title = f"{given.count} fail-overs each in {given.groups} groups, session timeout {given.session:g} s"
    table = Table(title=title)
    for column in ("", "after", "p50 s", "min s", "max s", "longest with two leaders s"):
        table.add_column(column, justify="left" if column in {"", "after"} else "right")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kafka = stack.enter_context(KafkaCluster(1, data_folder=folder / "kafka")).bootstrap
        for mode in (*Mode, None):
            for number, way in ((signal.SIGKILL, "kill -9"), (signal.SIGTERM, "a graceful leave")):
                outcome = fail_over(kafka, folder, given.session, mode, counts, number)
                values = (statistics.median(outcome.seconds), min(outcome.seconds), max(outcome.seconds))
                overlap = "-" if outcome.overlap_s is None else f"{outcome.overlap_s:.3f}"
                table.add_row(
                    mode.value if mode else PLAIN, way, *(f"{value:.2f}" for value in values), overlap
                )
                console.print(f"{mode or PLAIN}, {way}: done")
    console.print(table)


if __name__ == "__main__":
    main()
