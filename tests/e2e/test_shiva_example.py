"""The placement example: a web server goes on answering after its worker was killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rebalanser.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

DEMO = Path(__file__).resolve().parents[2] / "examples" / "shiva_placement" / "demo.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end."""
    return subprocess.run(
        [sys.executable, str(DEMO), *arguments],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )


@pytest.mark.rule("SH-4", "SH-5", "SH-8", "SH-13", "SH-17", "SH-18")
def test_a_web_server_answers_from_another_worker_after_its_own_was_killed(kafka_address: str) -> None:
    done = run("--kafka", kafka_address)
    assert done.returncode == 0, done.stdout + done.stderr
    answered = re.findall(r"answers: Answer\(worker='(worker-\d)', token=(\d+)", done.stdout)
    (first, token), (second, later_token) = answered
    assert first != second
    assert int(later_token) > int(token)
    assert "is stopped, and nobody answers" in done.stdout


def test_without_a_broker_the_demo_says_so_and_fails() -> None:
    done = run("--kafka", "127.0.0.1:1", REBALANSER_CONNECT_TIMEOUT_S="1")
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr
