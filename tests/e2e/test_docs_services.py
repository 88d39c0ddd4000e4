"""The programs in the documentation that are marked ``python service`` serve until they are told to stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from rebalanser.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
OWNED = 12
"""Number of resources of a program, each with a thread that prints."""
STARTED = re.compile(r"(partition-\d+) is mine, fencing token \d+\n")
STOPPED = re.compile(r"(partition-\d+) is given up\n")
SERVICES = [
    pytest.param(token.content, id=page.name)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for token in MarkdownIt("commonmark").parse(page.read_text())
    if token.type == "fence" and token.info == "python service"
]


@pytest.mark.rule("RB-26")
@pytest.mark.parametrize("program", SERVICES)
def test_program_owns_something_and_stops_gracefully(program: str, tmp_path: Path) -> None:
    file = tmp_path / "service.py"
    file.write_text(program)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REBALANSER_")}
    with subprocess.Popen(
        [sys.executable, "-W", "error", file],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(OWNED)]
        process.send_signal(signal.SIGTERM)
        output, complaints = process.communicate(timeout=PATIENCE_S)
    lines += output.splitlines(keepends=True)
    resources = {f"partition-{number}" for number in range(OWNED)}
    assert {found[1] for line in lines[:OWNED] if (found := STARTED.fullmatch(line))} == resources, complaints
    assert {found[1] for line in lines[OWNED:] if (found := STOPPED.fullmatch(line))} == resources, complaints
    assert process.returncode == 0, complaints
