"""The example that shares the partitions of a real Kafka topic counts every record once."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from rebalanser.testing.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "kafka_partitions.py"
LEASE_TTL_S = 3.0


class Place:
    """Where a run of the example is: its topic, its group and its sink."""

    def __init__(self, folder: Path, kafka: str, registry: str) -> None:
        self.sink = folder / "sink.db"
        self._command = [
            *(sys.executable, str(PROGRAM), "--kafka", kafka, "--topic", f"lines-{uuid4().hex[:8]}"),
            *("--registry", registry, "--sink", str(self.sink)),
        ]
        self._environment = {**os.environ, "REBALANSER_LEASE_TTL_S": f"{LEASE_TTL_S:g}"}

    @contextmanager
    def process(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """A process of the example, gone when the context ends."""
        process = subprocess.Popen([*self._command, *arguments], env=self._environment)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def check(self) -> subprocess.CompletedProcess[str]:
        """What the example's own check says."""
        return subprocess.run(
            [*self._command, "check"],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def accepted(self, worker: str) -> int:
        """How many batches of a worker the sink has accepted."""
        try:
            with closing(sqlite3.connect(f"file:{self.sink}?mode=ro", uri=True)) as sink:
                found = sink.execute("SELECT count(*) FROM accepted WHERE writer = ?", (worker,))
                return int(found.fetchone()[0])
        except sqlite3.OperationalError:
            return 0


def ended(process: subprocess.Popen[bytes]) -> int:
    """Ask a process to stop, and wait for it."""
    process.send_signal(signal.SIGTERM)
    return process.wait(PATIENCE_S)


@pytest.fixture(params=["sqlite", "etcd"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The group's registry; an etcd of other tests too, so under a prefix of its own."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'groups.db'}"
    return f"{request.getfixturevalue('etcd_url')}/partitions-{uuid4().hex[:8]}"


@pytest.mark.rule("RB-2", "RB-12", "RB-23", "RB-26")
def test_every_record_is_counted_once_while_workers_come_leave_and_die(
    kafka_address: str, registry: str, tmp_path: Path
) -> None:
    place = Place(tmp_path, kafka_address, registry)
    with (
        place.process("produce", "--partitions", "6", "--lines-per-second", "3000") as producer,
        place.process("worker", "--node", "a") as first,
    ):
        wait_until(lambda: place.accepted("a") > 10, "the first worker works")
        with place.process("worker", "--node", "b") as second, place.process("worker", "--node", "c"):
            wait_until(lambda: place.accepted("b") > 5 and place.accepted("c") > 5, "three workers work")
            first.kill()
            assert ended(second) == 0
            assert ended(producer) == 0
            wait_until(lambda: place.check().returncode == 0, "all is counted by the worker that is left")
    found = place.check()
    assert found.returncode == 0, found.stdout + found.stderr
    assert re.search(r"^records counted +[1-9][\d,]+$", found.stdout, re.MULTILINE)
    assert re.search(r"^files counted wrongly +0$", found.stdout, re.MULTILINE)


def test_one_line_for_a_mistake(kafka_address: str, tmp_path: Path) -> None:
    found = Place(tmp_path, kafka_address, f"sqlite:///{tmp_path / 'groups.db'}").check()
    assert found.returncode == 1
    assert re.fullmatch(r"there is no topic lines-\w+ at .+\n", found.stderr)
