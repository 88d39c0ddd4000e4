"""The audit as people run it: of the demo's history, on a Spark of its own, and by spark-submit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rebalanser.core.group import FactKind
from rebalanser.history import Record, read_records
from rebalanser.testing.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(600)


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    # As where the virtual environment is activated: Spark's scripts look for their Python on the PATH.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "COLUMNS": "120", "PATH": path}
    return subprocess.run(
        [str(part) for part in command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
        check=False,
    )


def audited(history: Path, *options: str | Path) -> dict[str, object]:
    done = run(sys.executable, "-m", "rebalanser", "audit", history, "--memory", "2g", "--json", *options)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stderr == ""
    document: dict[str, object] = json.loads(done.stdout)
    return document


def expect_as_played(history: Path, document: dict[str, object]) -> None:
    """Every record counts, every access is seen, and only the frozen worker overlapped, fenced."""
    verdict = document["verdict"]
    assert isinstance(verdict, dict)
    records = [record for record in read_records(history) if isinstance(record, Record)]
    assert verdict["records"] == len({(record.process, record.sequence) for record in records})
    starts = {(r.node, r.resource, r.token) for r in records if r.kind == FactKind.START_ENTERED}
    assert verdict["accesses"] == len(starts) > 12
    assert verdict["resources"] == len({resource for _, resource, _ in starts})
    assert verdict["nodes"] == 5, "four workers, one of which joined again"
    assert verdict["conclusion"] in {"sound", "fenced"}, verdict
    assert {count["kind"] for count in verdict["findings"]} <= {"overlap"}
    assert {found["fenced"] for found in verdict["worst"]} <= {True}
    stopped = {record.process for record in records if record.kind == FactKind.SESSION_LOST}
    labels = {record.label for record in records if record.process in stopped}
    assert all(any(label in found["sentence"] for label in labels) for found in verdict["worst"])


@pytest.mark.rule("AU-3", "AU-4", "AU-8")
def test_the_demo_on_sqlite_and_its_audit(tmp_path: Path) -> None:
    """What ``make audit-demo`` runs."""
    done = run(sys.executable, ROOT / "examples" / "audit_demo.py", "--folder", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"report: {tmp_path / 'report.html'}" in done.stdout
    assert "<html" in (tmp_path / "report.html").read_text()
    about = json.loads((tmp_path / "audit" / "_rebalanser_audit.json").read_text())
    expect_as_played(tmp_path / "history", {"verdict": {**about, "worst": []}})


@pytest.mark.slow
@pytest.mark.rule("AU-4")
@pytest.mark.usefixtures("etcd_binary")
def test_the_demo_on_etcd_and_its_audit(tmp_path: Path) -> None:
    history = tmp_path / "history"
    played = run(sys.executable, ROOT / "examples" / "demo.py", "--registry", "etcd", "--history", history)
    assert played.returncode == 0, played.stdout
    expect_as_played(history, audited(history))


@pytest.mark.slow
@pytest.mark.rule("AU-10")
def test_spark_submit_runs_the_same(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("no record\n")
    path = run(sys.executable, "-m", "rebalanser.audit.submit", "--path").stdout.strip()
    submit = Path(sys.executable).with_name("spark-submit")
    done = run(submit, "--master", "local[1]", "--driver-memory", "1g", path, tmp_path, "--json")
    assert done.returncode == 3, done.stderr
    assert "1 not_json" in json.loads(done.stdout.splitlines()[-1])["error"]
