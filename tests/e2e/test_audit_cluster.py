"""The audit on a standalone Spark cluster: the same tables as on this host, by its master or spark-submit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pyspark
import pytest

from rebalanser.audit.result import FOLDERS
from rebalanser.cli import main
from rebalanser.history import Protocol
from rebalanser.testing.servers import ServerProcess, free_ports
from rebalanser.testing.waiting import PATIENCE_S, wait_until
from support.histories import tell, write_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.rule("AU-10")]

HOST = "127.0.0.1"
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
SMALL = ("SPARK_DAEMON_MEMORY=192m", f"SPARK_LOCAL_IP={HOST}", f"SPARK_HOME={Path(pyspark.__file__).parent}")


@dataclass(frozen=True)
class Standalone:
    """A master with two workers of one core each, as ``sbin/start-all.sh`` of a cluster starts them."""

    master: str
    state_url: str
    settings: Path
    """A folder with ``spark-defaults.conf``, as every host of a cluster has one."""

    def state(self) -> dict[str, Any]:
        """What the master says of its workers and applications; nothing before it answers.

        For a moment of its start another page than this one answers, in HTML.
        """
        try:
            with urllib.request.urlopen(self.state_url, timeout=PATIENCE_S) as answer:
                state: dict[str, Any] = json.load(answer)
        except (OSError, json.JSONDecodeError):
            return {"workers": [], "completedapps": []}
        return state

    @property
    def workers(self) -> int:
        """How many are alive."""
        return sum(worker["state"] == "ALIVE" for worker in self.state()["workers"])

    @property
    def finished(self) -> list[str]:
        """How each application that is over has ended."""
        return [application["state"] for application in self.state()["completedapps"]]


@pytest.fixture(scope="module")
def standalone(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """Started by PySpark's own script; all are killed at the end, and die with this process in any case.

    The shared session tells that there is a Java.
    """
    assert spark.version
    folder = tmp_path_factory.mktemp("standalone")
    port, ui, *worker_uis = free_ports(4)
    cluster = Standalone(f"spark://{HOST}:{port}", f"http://{HOST}:{ui}/json/", folder)
    # Two hundred partitions, Spark's own default, are for more than a few hundred records.
    (folder / "spark-defaults.conf").write_text("spark.sql.shuffle.partitions 2\n")
    at = ("--host", HOST)
    daemons = {
        "master.Master": (*at, "--port", str(port), "--webui-port", str(ui)),
        **{
            f"worker.Worker-{number}": (
                *at,
                *("--cores", "1", "--memory", "1g", "--webui-port", str(worker_ui)),
                *("--work-dir", str(folder / f"work-{number}"), cluster.master),
            )
            for number, worker_ui in enumerate(worker_uis)
        },
    }
    with ExitStack() as running:
        for name, options in daemons.items():
            server = ServerProcess(name, folder / f"{name}.log")
            running.callback(server.kill)
            kind = f"org.apache.spark.deploy.{name.partition('-')[0]}"
            server.start(["env", *SMALL, str(SPARK_CLASS), kind, *options])
        wait_until(lambda: cluster.workers == len(worker_uis), f"the workers are there: {folder}")
        yield cluster


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Histories of all protocols with whatever twelve seeds plant in them."""
    folder = tmp_path_factory.mktemp("history")
    protocols = list(Protocol)
    pages = [tell(seed, protocol=protocols[seed % len(protocols)]).pages for seed in range(12)]
    write_pages(folder, pages, files=4, seed=0)
    return folder


def run(cluster: Standalone, *command: str | Path) -> dict[str, Any]:
    """A command that ends well on a host of the cluster; the document that it told."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "PATH": path, "SPARK_LOCAL_IP": HOST, "SPARK_CONF_DIR": str(cluster.settings)},
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


@pytest.fixture(scope="module")
def here(spark: SparkSession, history: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tables of the audit on this host."""
    out = tmp_path_factory.mktemp("here") / "audit"
    assert str(spark.sparkContext.master).startswith("local")
    assert main(["audit", str(history), "--out", str(out), "--json"]) == 0
    return out


def rows(folder: Path) -> list[str]:
    """A table's rows as text, in an order of their own; sums of real numbers depend on theirs in the end."""
    return sorted(str(settled(row)) for row in pq.read_table(folder).to_pylist())


def settled(value: Any) -> Any:
    match value:
        case float():
            return round(value, 6)
        case dict():
            return {name: settled(each) for name, each in value.items()}
        case list():
            return sorted((settled(each) for each in value), key=str)
        case _:
            return value


def test_a_cluster_gives_the_same_tables(
    standalone: Standalone, history: Path, here: Path, tmp_path: Path
) -> None:
    out = tmp_path / "audit"
    document = run(
        standalone,
        *(sys.executable, "-m", "rebalanser", "audit", history, "--json"),
        *("--master", standalone.master, "--memory", "1g", "--out", out),
    )
    assert document["verdict"]["conclusion"] == "refuted"
    wait_until(lambda: standalone.finished == ["FINISHED"], "the master has had the job")
    found = {name: rows(out / name) for name in FOLDERS}
    assert found == {name: rows(here / name) for name in FOLDERS}
    told = {name for name, content in found.items() if content}
    assert told >= {"findings", "intervals", "gaps", "quarantine", "processes", "rebalances"}


def test_the_entry_script_runs_inside_spark_submit(
    standalone: Standalone, history: Path, here: Path, tmp_path: Path
) -> None:
    """As documented: ``spark-submit --master URL "$(python -m rebalanser.audit.submit --path)" PATH``."""
    script = subprocess.run(
        [sys.executable, "-m", "rebalanser.audit.submit", "--path"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    submit = Path(sys.executable).with_name("spark-submit")
    out, report = tmp_path / "audit", tmp_path / "report.html"
    settings = ("--master", standalone.master, "--driver-memory", "1g")
    before = len(standalone.finished)
    document = run(standalone, submit, *settings, script, history, "--out", out, "--report", report, "--json")
    assert document["verdict"]["conclusion"] == "refuted"
    wait_until(lambda: len(standalone.finished) == before + 1, "the master has had the job")
    assert rows(out / "findings") == rows(here / "findings")
    assert "<html" in report.read_text()
