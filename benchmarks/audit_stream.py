"""The audit as a stream: how soon overlaps are found in a history that grows. Nothing is asserted here.

A process of its own writes the history as nodes do, a file each. The resources go round: at each turn the
owner stops and removes its barrier, the next node adds it and starts. Now and then the next one starts while
its predecessor goes on for ``OVERLAP_S``. The latency of a finding is counted from the wall time of the
record that began the overlap until the finding lies in the output folder, whole.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rebalanser.audit.session import session
from rebalanser.audit.streaming import DELAY_S, Stream, Told

RATE = 20_000
SECONDS = 120.0
WARM_UP_S = 60.0
NODES = 50
RESOURCES = 2_000
OVERLAP_EVERY_S = 2.0
OVERLAP_S = 1.0
TICK_S = 0.05
STEPS_OF_A_TURN = 6


def main() -> None:
    """Measure, or write the history of a measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int, default=RATE, help="events a second")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for how long, after the warm-up")
    parser.add_argument("--warm-up", type=float, default=WARM_UP_S, help="seconds that don't count")
    parser.add_argument("--delay", type=float, default=DELAY_S, help="how long late records are waited for")
    parser.add_argument("--resources", type=int, default=RESOURCES)
    parser.add_argument("--memory", default="2g", help="Spark's")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.write:
        write(asked.write, asked.rate, asked.warm_up + asked.seconds, asked.resources)
    else:
        measure(asked)


@dataclass
class Writer:
    """A node's process and its file."""

    name: str
    path: Path
    sequence: int = 0
    lines: list[str] = field(default_factory=list)

    def tell(self, kind: str, resource: str, token: int, revision: int | None = None) -> None:
        """One record, as ``rebalanser.history.Record.to_line`` writes it."""
        at = "" if revision is None else f'"revision":{revision},'
        self.lines.append(
            f'{{"schema_version":2,"protocol":"group","group":"bench","process":"{self.name}",'
            f'"node":"{self.name}-1","label":"{self.name}","incarnation":1,"host":"host-{self.name}",'
            f'"boot":"boot-{self.name}","sequence":{self.sequence},"kind":"{kind}","term":1,"version":1,'
            f'"resource":"{resource}","token":{token},{at}"wall_time":{time.time():.6f},'
            f'"monotonic_time":{time.monotonic():.6f},"detail":{{}}}}\n'
        )
        self.sequence += 1

    def start(self, resource: str, token: int) -> None:
        """Add the barrier and start."""
        self.tell("barrier_added", resource, token, token)
        self.tell("start_entered", resource, token)
        self.tell("start_returned", resource, token)

    def stop(self, resource: str, token: int, revision: int) -> None:
        """Stop and remove the barrier."""
        self.tell("stop_entered", resource, token)
        self.tell("stop_returned", resource, token)
        self.tell("barrier_removed", resource, token, revision)

    def flush(self) -> None:
        """Write what was told."""
        if self.lines:
            with self.path.open("a") as file:
                file.write("".join(self.lines))
            self.lines.clear()


def write(folder: Path, rate: int, seconds: float, resources: int) -> None:
    """Let the resources go round at ``rate`` records a second for so many ``seconds``."""
    writers = [Writer(f"n{number}", folder / f"n{number}.jsonl") for number in range(NODES)]
    owners: dict[int, tuple[Writer, int]] = {}
    lingering: list[tuple[float, int, Writer, int]] = []
    began = time.monotonic()
    turn, revision, next_overlap = 0, 0, OVERLAP_EVERY_S
    while (passed := time.monotonic() - began) < seconds:
        while lingering and lingering[0][0] <= passed:
            _, number, writer, token = lingering.pop(0)
            revision += 1
            writer.stop(f"r{number}", token, revision)
        while turn < passed * rate / STEPS_OF_A_TURN:
            number = turn % resources
            if number in owners:
                writer, token = owners[number]
                if passed >= next_overlap:
                    next_overlap += OVERLAP_EVERY_S
                    lingering.append((passed + OVERLAP_S, number, writer, token))
                else:
                    revision += 1
                    writer.stop(f"r{number}", token, revision)
            revision += 1
            heir = writers[(turn + turn // resources) % NODES]
            heir.start(f"r{number}", revision)
            owners[number] = heir, revision
            turn += 1
        for writer in writers:
            writer.flush()
        time.sleep(TICK_S)


def measure(asked: argparse.Namespace) -> None:
    """Follow a growing history, and tell how soon what."""
    latencies_s: list[float] = []
    batches: list[Told] = []
    loads = [os.getloadavg()[0]]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rebalanser-stream-")))
        (folder / "history").mkdir()
        spark = session("local[*]", memory=asked.memory)
        stack.callback(spark.stop)
        began = 0.0

        def on_batch(told: Told) -> None:
            if began and time.time() > began + asked.warm_up:
                batches.append(told)
                now = time.time()
                latencies_s.extend(now - found["begins"] for found in stream.findings_of(told.batch))

        stream = Stream(
            spark,
            [str(folder / "history")],
            out=folder / "out",
            checkpoint=folder / "checkpoint",
            delay_s=asked.delay,
            on_batch=on_batch,
        )
        stack.callback(stream.stop)
        stream.start()
        began = time.time()
        arguments = [
            f"--{name}={getattr(asked, name.replace('-', '_'))}"
            for name in ("rate", "seconds", "warm-up", "resources")
        ]
        writing = subprocess.Popen([sys.executable, __file__, f"--write={folder / 'history'}", *arguments])
        stack.callback(writing.kill)
        while writing.poll() is None:
            stream.wait(1.0)
        loads.append(os.getloadavg()[0])
        behind_s = time.time() - (batches[-1].watermark or 0.0) if batches else float("nan")
        stream.stop()
    table(asked, latencies_s, batches, behind_s, loads)


def table(
    asked: argparse.Namespace,
    latencies_s: list[float],
    batches: list[Told],
    behind_s: float,
    loads: list[float],
) -> None:
    """Show the figures."""
    records = sum(told.came.records for told in batches)
    took = sorted(told.took_s for told in batches)
    found = sorted(latencies_s)
    shown = Table("Figure", "Value", title="The audit as a stream")
    shown.add_row("events written a second", f"{asked.rate:,}")
    shown.add_row("events judged a second", f"{records / asked.seconds:,.0f}")
    shown.add_row("micro-batches", f"{len(took)}")
    if took:
        shown.add_row(
            "a micro-batch takes, median / longest", f"{statistics.median(took):.2f} s / {took[-1]:.2f} s"
        )
    shown.add_row("findings", f"{len(found)}")
    if found:
        shown.add_row(
            "latency p50 / p99 / max",
            " / ".join(f"{percentile(found, part):.2f} s" for part in (0.5, 0.99, 1.0)),
        )
    shown.add_row("behind at the end", f"{behind_s:.1f} s")
    shown.add_row("cores; load before / after", f"{os.cpu_count()}; {loads[0]:.1f} / {loads[-1]:.1f}")
    Console(width=100).print(shown)


def percentile(ordered: list[float], part: float) -> float:
    """The value that ``part`` of all are not above."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


if __name__ == "__main__":
    main()
