"""How fast the whole batch audit is, to the verdict and the written tables, beside a plain script in DuckDB.

``python benchmarks/audit.py [--sizes 1,5,20] [--formats jsonl,parquet] [--hot] [--cores 2]``. The histories
are generated once and kept in the user's cache. Each audit is the first one of a process of its own, whose
clock starts once the Spark session has; one more audit in the same session shows what of it was compiling. As
the machine may have other work to do, the seconds of CPU are told beside those of the wall, and the load.
Nothing is asserted here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from rebalanser.audit import audit
from rebalanser.audit.session import default_memory_mib, session
from rebalanser.testing.servers import cache_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.histories.large import Format, write_large

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLAIN = Path(__file__).with_name("audit_plain.py")
MILLION = 1_000_000
GENERATION = 2
"""Grows when the generator writes something else, so that older histories are not taken."""
console = Console()


@dataclass(frozen=True)
class History:
    """One generated history."""

    records: int
    format: Format
    hot: bool

    @property
    def folder(self) -> Path:
        """Where it is kept."""
        name = f"{self.records}{'-hot' if self.hot else ''}.{self.format}"
        return cache_folder() / "histories" / str(GENERATION) / name

    def generate(self, spark: SparkSession) -> None:
        """Write it, under another name first, so that what is there is whole."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as parent:
            partial = Path(parent) / "history"
            write_large(spark, partial, self.records, format=self.format, hot=self.hot)
            partial.rename(self.folder)


class Meter:
    """Seconds, and those of CPU that this process and its JVM have used."""

    def __init__(self, jvm: int) -> None:
        self._jvm = Path("/proc") / str(jvm)
        self._began, self._cpu = time.monotonic(), self._used()

    def _used(self) -> float:
        fields = (self._jvm / "stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")

    def figures(self) -> dict[str, float]:
        """What was used since this was made, and the most memory that either process ever had."""
        statuses = [(path / "status").read_text() for path in (self._jvm, Path("/proc/self"))]
        peaks = [re.search(r"VmHWM:\s*(\d+)", status) for status in statuses]
        return {
            "wall_s": time.monotonic() - self._began,
            "cpu_s": self._used() - self._cpu,
            "peak_mib": sum(int(peak[1]) for peak in peaks if peak) / 1024,
        }


def started(cores: int, memory: str | None) -> SparkSession:
    """A session as ``rebalanser audit`` makes it, on so many cores."""
    return session(f"local[{cores}]", memory=memory)


def audit_one(history: History, cores: int, memory: str | None) -> None:
    """Audit a history twice in a new session, and print the figures of each time as a line of JSON."""
    spark = started(cores, memory)
    jvm: Any = spark._jvm  # noqa: SLF001 - the only way to its process
    pid = int(jvm.java.lang.ProcessHandle.current().pid())
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            meter = Meter(pid)
            with audit(spark, history.folder) as found:
                told = found.verdict().sentences()[0]
                found.write(Path(folder) / "tables")
            print(json.dumps(meter.figures() | {"told": told}), flush=True)
    spark.stop()


def measured(*command: str) -> list[dict[str, Any]]:
    """The lines of JSON that a process of its own prints."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def row(table: Table, history: History, what: str, cores: int, figures: dict[str, Any], load: float) -> None:
    """A line of the table, told at once too."""
    cells = (
        f"{history.records:,}",
        f"{history.format}{', hot' if history.hot else ''}",
        what,
        f"{figures['wall_s']:.1f}",
        f"{figures['cpu_s']:.1f}",
        f"{history.records / figures['wall_s']:,.0f}",
        f"{history.records * cores / figures['cpu_s']:,.0f}",
        f"{figures['peak_mib']:,.0f}",
        f"{load:.1f}",
    )
    table.add_row(*cells)
    console.print(", ".join(cells[:3]), ": done, ", figures["told"], sep="")


def main() -> None:
    """Generate what is missing, run everything and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1,5,20", help="millions of records, such as 1,5,20")
    parser.add_argument("--formats", default="jsonl,parquet")
    parser.add_argument("--hot", action="store_true", help="half of the records are those of one resource")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--memory", help="of the driver; by default the audit's own choice")
    parser.add_argument("--one", nargs=2, metavar=("RECORDS", "FORMAT"), help=argparse.SUPPRESS)
    parser.add_argument("--generate", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    formats = [Format(name) for name in given.formats.split(",")]
    sizes = [int(float(size) * MILLION) for size in given.sizes.split(",")]
    histories = [History(size, format_, given.hot) for format_ in formats for size in sizes]
    if given.one:
        audit_one(History(int(given.one[0]), Format(given.one[1]), given.hot), given.cores, given.memory)
        return
    missing = [history for history in histories if not history.folder.exists()]
    if given.generate:
        spark = started(given.cores, given.memory)
        for history in missing:
            history.generate(spark)
        spark.stop()
        return
    if missing:
        console.print(f"generating {len(missing)} histories into {missing[0].folder.parent}")
        measured(*sys.argv, "--generate")
    memory = given.memory or f"{default_memory_mib()}m"
    table = Table(title=f"The whole batch audit on {given.cores} cores, driver memory {memory}")
    for column in ("records", "format", "", "s", "CPU s", "records/s", "by CPU", "peak MiB", "load"):
        table.add_column(column, justify="left" if column in {"format", ""} else "right")
    for history in histories:
        load = os.getloadavg()[0]
        first, again = measured(*sys.argv, "--one", str(history.records), str(history.format))
        row(table, history, "audit", given.cores, first, load)
        row(table, history, "again, same session", given.cores, again, load)
        (plain,) = measured(str(PLAIN), str(history.folder))
        row(table, history, "plain script in DuckDB", given.cores, plain, load)
    console.print(table)
    console.print("by CPU: records in each second in which all cores do nothing else")


if __name__ == "__main__":
    main()
