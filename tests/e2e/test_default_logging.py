"""Standard error of a program whose worker raises, with and without logging of its own."""

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
group = rebalanser.Group("orders", url)


@group.worker
def work(owned: rebalanser.Owned) -> None:
    group.request_stop()
    raise ValueError("no such account:\\n17")


with rebalanser.Admin("orders", url) as admin:
    admin.add("partition-0")
group.run()
"""
CONFIGURED = "import logging\nlogging.basicConfig(filename='program.log')\n"
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


def test_a_worker_that_raises_is_shown_on_one_line(tmp_path: Path) -> None:
    assert re.fullmatch(
        r"ERROR rebalanser: a worker raised; .* action=worker_failed resource=partition-0 token=\d+ "
        r'attempt=1 error="ValueError: no such account: 17" raised_at=\S+/program\.py:\d+\n',
        stderr_of(PROGRAM, tmp_path),
    )


def test_a_program_that_configured_logging_has_all_of_it_there(tmp_path: Path) -> None:
    assert stderr_of(CONFIGURED + PROGRAM, tmp_path) == ""
    logged = (tmp_path / "program.log").read_text()
    assert logged.count("action=worker_failed") == 1
    assert "Traceback (most recent call last)" in logged


def test_a_null_handler_silences_it(tmp_path: Path) -> None:
    assert stderr_of(SILENCED + PROGRAM, tmp_path) == ""
