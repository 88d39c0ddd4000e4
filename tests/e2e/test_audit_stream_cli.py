"""``rebalanser audit --stream`` as people run it: killed at any place and started again, and stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from rebalanser.audit import audit
from rebalanser.testing import waiting
from rebalanser.testing.waiting import PATIENCE_S
from support.histories import tell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEEDS = (2, 3, 4, 6, 9, 11)


@contextmanager
def streaming(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "rebalanser", "audit", str(folder / "history"), "--stream", "--json"]
    places = ["--out", str(folder / "out"), "--checkpoint", str(folder / "checkpoint")]
    spark = ["--memory", "1g", "--master", "local[2]"]
    # A JVM that is killed soon does not earn what it spends on compiling well.
    environment = {**os.environ, "SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1"}
    with subprocess.Popen(
        [*command, *places, *spark, "--delay", "2", *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(what: str, holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    def look() -> bool:
        assert process.poll() is None, process.communicate()
        return holds()

    waiting.wait_until(look, what, 3 * PATIENCE_S)


def states(folder: Path) -> set[str]:
    return {path.parent.name for path in (folder / "checkpoint" / "state").glob("*/_SUCCESS")}


@pytest.mark.rule("AU-9", "AU-4")
def test_a_driver_killed_at_any_place_finds_what_the_batch_finds_once_each(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Killed while it writes its first findings, and once more between two micro-batches."""
    (tmp_path / "history").mkdir()
    lines = [line for seed in SEEDS for line in tell(seed).pages.records]
    lines.sort(key=lambda line: float(json.loads(line)["wall_time"]))
    half = len(lines) // 2
    history = tmp_path / "history" / "a.jsonl"
    history.write_bytes(b"".join(lines[:half]) + lines[half][:20])
    with streaming(tmp_path) as process:
        written = tmp_path / "out" / "intervals"
        wait_until("a table being written", lambda: any(written.glob("batch=0/*")), process)
        os.kill(process.pid, signal.SIGKILL)
    assert "0" not in states(tmp_path), "it was killed in the middle of the first micro-batch"
    with streaming(tmp_path) as process:
        wait_until("the first micro-batch", lambda: bool(states(tmp_path)), process)
        with history.open("ab") as file:
            file.write(lines[half][20:] + b"".join(lines[half + 1 :]))
        os.kill(process.pid, signal.SIGKILL)
    with streaming(tmp_path, "--fail-on-findings") as process:
        last = {"1-idle", "2-idle"}
        wait_until("the last record being judged", lambda: bool(states(tmp_path) & last), process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=3 * PATIENCE_S)
    assert process.returncode == 1, err
    assert err == ""
    *_, stopped = map(json.loads, out.splitlines())
    found = spark.read.parquet(str(tmp_path / "out" / "findings")).select("id", "certainty").collect()
    with audit(spark, tmp_path / "history") as whole:
        expected = whole.tables.findings.select("id", "certainty").collect()
        gaps = whole.tables.gaps.select("process", "first", "last").collect()
    assert expected
    assert Counter(map(tuple, found)) == Counter(map(tuple, expected))
    told = spark.read.parquet(str(tmp_path / "out" / "gaps")).select("process", "first", "last").collect()
    assert Counter(map(tuple, told)) == Counter(map(tuple, gaps))
    assert stopped["event"] == "stopped"
    assert stopped["conclusion"] == "refuted"
    assert stopped["records"] == len(lines)
    assert stopped["certain"] + stopped["fenced"] + stopped["possible"] == len(expected)


@pytest.mark.rule("AU-9")
def test_a_stream_waits_on_an_empty_folder_and_stops_when_asked(tmp_path: Path) -> None:
    (tmp_path / "history").mkdir()
    with streaming(tmp_path) as process:
        wait_until("the start", lambda: (tmp_path / "checkpoint" / "spark" / "metadata").exists(), process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=3 * PATIENCE_S)
    assert process.returncode == 0, err
    (stopped,) = map(json.loads, out.splitlines())
    assert stopped["conclusion"] == "sound"
    assert stopped["records"] == 0
