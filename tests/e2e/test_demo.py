"""The demo, as a person runs it: on SQLite, on three etcd members, on Kafka, and without the fence."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rebalanser.core.group import FactKind
from rebalanser.history import Record, read_records
from rebalanser.testing.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo.py"
ACTS = ("a joins", "b joins", "c joins", "d joins", "kill -9 of", "SIGSTOP of", "resumes and joins", "leaves")


class Played:
    """One performance of the demo: its exit code and what it printed."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.history = folder / "history"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        command = [sys.executable, str(DEMO), "--history", str(self.history), *arguments]
        environment = {**os.environ, "TMPDIR": str(self.temporary), "COLUMNS": "120"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
        )
        self.code = done.returncode
        self.output = done.stdout + done.stderr

    def figure(self, name: str) -> int:
        """A figure of the comparison."""
        found = re.search(rf"^{name} +([\d,]+)$", self.output, re.MULTILINE)
        assert found, self.output
        return int(found[1].replace(",", ""))

    def rebalances(self) -> list[tuple[str, int, int]]:
        """Cause, moves and minimum of each rebalance."""
        rows = re.findall(r"^│ (.+?) +│ +(\d+) │ +(\d+) │ +\d+ │ +[\d.]+ │$", self.output, re.MULTILINE)
        return [(cause, int(moved), int(minimum)) for cause, moved, minimum in rows]

    def expect_as_promised(self) -> None:
        """Nothing lost, nothing twice, the stale write refused, no move too many, and nothing left behind."""
        assert self.code == 0, self.output
        assert self.figure("lines produced") == self.figure("lines processed") > 10_000
        assert self.figure("lines accepted twice") == 0
        assert self.figure("lines lost") == 0
        assert self.figure("files counted wrongly") == 0
        assert self.figure("stale writes refused") >= 1
        rebalances = self.rebalances()
        assert len(rebalances) == len(ACTS)
        assert all(act in cause for act, (cause, _, _) in zip(ACTS, rebalances, strict=True)), self.output
        assert all(moved == minimum for _, moved, minimum in rebalances), self.output
        assert list(self.temporary.iterdir()) == []

    def expect_history(self) -> None:
        """The history can be read, and tells of the resumed node's two incarnations."""
        records = list(read_records(self.history))
        assert all(isinstance(record, Record) for record in records)
        joined = [r for r in records if isinstance(r, Record) and r.kind == FactKind.JOINED]
        assert len({record.node for record in joined}) == 5
        assert len({record.label for record in joined}) == 4


pytestmark = pytest.mark.rule("RB-1", "RB-2", "RB-12", "RB-20", "RB-26", "RB-27")


def test_demo_on_sqlite(tmp_path: Path) -> None:
    played = Played(tmp_path)
    played.expect_as_promised()
    played.expect_history()


@pytest.mark.slow
@pytest.mark.usefixtures("etcd_binary")
def test_demo_on_three_etcd_members(tmp_path: Path) -> None:
    played = Played(tmp_path, "--registry", "etcd")
    played.expect_as_promised()
    played.expect_history()


@pytest.mark.slow
@pytest.mark.rule("SH-19")
@pytest.mark.usefixtures("kafka_libraries")
def test_demo_on_kafka(tmp_path: Path) -> None:
    played = Played(tmp_path, "--registry", "kafka")
    played.expect_as_promised()
    played.expect_history()


@pytest.mark.slow
def test_without_the_fence_a_stale_write_is_accepted_and_the_demo_says_so(tmp_path: Path) -> None:
    """A lease alone cannot keep a paused process out: this workload is expected to fail."""
    played = Played(tmp_path, "--without-fence")
    assert played.code == 1, played.output
    assert played.figure("lines accepted twice") > 0
    assert played.figure("stale writes refused") == 0
    assert played.figure("lines lost") == 0
    assert "NOT AS PROMISED" in played.output
    assert "accepted twice" in played.output.partition("NOT AS PROMISED")[2]


def _processes_of(folder: Path) -> list[str]:
    """States of the processes whose command lines name the folder; "T" is a stopped one."""
    states = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if bytes(folder) in (process / "cmdline").read_bytes():
                states.append((process / "stat").read_text().rpartition(")")[2].split()[0])
    return states


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_demo_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    demo = subprocess.Popen([sys.executable, DEMO], env=environment, stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    with demo, demo.stdout:
        for line in demo.stdout:
            if "SIGSTOP of" in line:
                break
        # A stopped worker is the hardest to end.
        wait_until(lambda: "T" in _processes_of(tmp_path), "a worker is stopped")
        demo.send_signal(number)
        demo.wait(PATIENCE_S)
    wait_until(lambda: not _processes_of(tmp_path), "no process is left")
    if number is not signal.SIGKILL:
        assert demo.returncode == 128 + number
        assert list(tmp_path.glob("rebalanser-demo-*")) == []
