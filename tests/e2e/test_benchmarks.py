"""Benchmarks run to their end, here small ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rebalanser.testing.waiting import PATIENCE_S

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.slow


def printed(program: str, *arguments: str) -> str:
    command = [sys.executable, BENCHMARKS / program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=True).stdout


def measured(registry: str) -> str:
    """What the benchmark of large groups prints of a few nodes and resources."""
    return printed("scale.py", "--registry", registry, "--nodes", "6", "--resources", "60")


def test_groups_on_sqlite_are_measured_to_the_end() -> None:
    text = measured("sqlite")
    assert "not measured to the end" not in text
    for what in ("first settle of 4 nodes", "join of node 5", "one resource added", "Admin.state()"):
        assert f"  {what}" in text


def test_allocations_are_measured_to_the_end() -> None:
    text = printed("allocation.py", "--nodes", "6", "--resources", "60", "--repeat", "1")
    assert text.count("from scratch") == text.count("a node more") == 7


@pytest.mark.usefixtures("etcd_binary")
def test_groups_on_etcd_are_measured_to_the_end() -> None:
    text = measured("etcd")
    assert "not measured to the end" not in text
    for what in ("first settle of 6 nodes", "traffic of a settled group", "join of node 7", "Admin.state()"):
        assert f"  {what}" in text


@pytest.mark.usefixtures("kafka_libraries")
def test_fail_overs_are_measured_to_the_end() -> None:
    text = printed(
        "failover.py", "--count", "1", "--only", "(kafka:// group.*|neli, fast|plain, KIP-848), SIGTERM"
    )
    assert "not measured to the end" not in text
    for what in ("another node", "its leader", "NELI, fast", "plain, KIP-848"):
        assert what in text
