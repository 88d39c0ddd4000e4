"""Standard error of a program that runs a group, with and without logging of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from rebalanser.testing.waiting import PATIENCE_S

PROGRAM = """
import sys

import rebalanser

url = sys.argv[1]
group = rebalanser.Group("orders", url, node="n")


@group.worker
def work(owned: rebalanser.Owned) -> None:
    group.request_stop()
    raise ValueError("no such account:\\n17")


with rebalanser.Admin("orders", url) as admin:
    admin.add("partition-0")
group.run()
"""
CONFIGURED = "import logging\nlogging.basicConfig(filename='program.log')\n"
LEVELLED = "import logging\nlogging.getLogger('rebalanser').setLevel(logging.ERROR)\n"
SILENCED = "import logging\nlogging.getLogger('rebalanser').addHandler(logging.NullHandler())\n"


def stderr_of(program: str, folder: Path) -> str:
    """Run a program until it ends by itself."""
    file = folder / "program.py"
    file.write_text(program)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REBALANSER_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", file, f"sqlite:///{folder / 'orders.db'}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr


def test_each_thing_that_happens_is_a_readable_line(tmp_path: Path) -> None:
    joined, owns, raised, gave_up, left = stderr_of(PROGRAM, tmp_path).splitlines()
    assert joined == f"rebalanser orders: n joined the group at sqlite:///{tmp_path}/orders.db"
    assert owns == "rebalanser orders: n owns partition-0; it owns 1 resource now"
    assert re.fullmatch(
        r"ERROR rebalanser: a worker raised; .* action=worker_failed resource=partition-0 token=\d+ "
        r'attempt=1 error="ValueError: no such account: 17" raised_at=\S+/program\.py:\d+',
        raised,
    )
    assert gave_up == "rebalanser orders: n gave up partition-0; it owns 0 resources now"
    assert left == "rebalanser orders: n left the group"


def test_a_level_of_the_program_counts_as_configured(tmp_path: Path) -> None:
    assert stderr_of(LEVELLED + PROGRAM, tmp_path).startswith("ERROR rebalanser: a worker raised")


def test_a_program_that_configured_logging_has_all_of_it_there(tmp_path: Path) -> None:
    assert stderr_of(CONFIGURED + PROGRAM, tmp_path) == ""
    logged = (tmp_path / "program.log").read_text()
    assert logged.count("action=worker_failed") == 1
    assert "Traceback (most recent call last)" in logged


def test_a_null_handler_silences_it(tmp_path: Path) -> None:
    assert stderr_of(SILENCED + PROGRAM, tmp_path) == ""
