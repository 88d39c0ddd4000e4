"""The benchmark of large groups runs to its end, here with small ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rebalanser.testing.waiting import PATIENCE_S

SCALE = Path(__file__).parents[2] / "benchmarks" / "scale.py"

pytestmark = pytest.mark.slow


def measured(registry: str) -> str:
    """What it prints of a few nodes and resources."""
    command = [sys.executable, SCALE, "--registry", registry, "--nodes", "6", "--resources", "60"]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=True).stdout


def test_groups_on_sqlite_are_measured_to_the_end() -> None:
    text = measured("sqlite")
    assert "not measured to the end" not in text
    for what in ("first settle of 4 nodes", "join of node 5", "one resource added", "Admin.state()"):
        assert f"  {what}" in text


@pytest.mark.usefixtures("etcd_binary")
def test_groups_on_etcd_are_measured_to_the_end() -> None:
    text = measured("etcd")
    assert "not measured to the end" not in text
    for what in ("first settle of 6 nodes", "traffic of a settled group", "join of node 7", "Admin.state()"):
        assert f"  {what}" in text
