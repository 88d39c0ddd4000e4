"""The code in the documentation that needs a Kafka: what is marked ``python kafka`` and ``console kafka``.

All such Python blocks of a page run in order in one process, and so do its commands in one shell. Only the
address of Kafka and the name of the cluster are other ones than on the page.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from markdown_it import MarkdownIt

from rebalanser.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ADDRESS = "127.0.0.1:9092"


def blocks(page: Path, kind: str) -> str:
    """All blocks of this kind on a page, one after the other."""
    tokens = MarkdownIt("commonmark").parse(page.read_text())
    return "\n".join(token.content for token in tokens if token.type == "fence" and token.info == kind)


def having(kind: str) -> list[Path]:
    """The pages that have such blocks."""
    return [page for page in PAGES if blocks(page, kind)]


def here(text: str, kafka_address: str) -> str:
    """The text of a page as it is right for these tests."""
    cluster = f"docs-{uuid4().hex[:8]}"
    return (
        text.replace(ADDRESS, kafka_address)
        .replace(f"{kafka_address}/demo", f"{kafka_address}/{cluster}")
        .replace("REBALANSER_CLUSTER=demo", f"REBALANSER_CLUSTER={cluster}")
    )


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run what a page says, in a folder of its own and with nothing of the user's settings."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("REBALANSER_")}
    return subprocess.run(
        command,
        cwd=folder,
        env={**clean, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )


@pytest.mark.rule("SH-4", "SH-5", "SH-11", "SH-18")
@pytest.mark.parametrize("page", having("console kafka"), ids=lambda page: page.name)
def test_the_commands_of_a_page_do_what_it_says(page: Path, kafka_address: str, tmp_path: Path) -> None:
    lines = here(blocks(page, "console kafka"), kafka_address).splitlines()
    assert all(line.startswith("$ ") for line in lines if line)
    commands = [line.removeprefix("$ ") for line in lines]
    script = "\n".join(["set -e", "trap 'kill $(jobs -p); wait' EXIT", *commands])
    done = run(["bash", "-c", script], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "acme/main/hello is running on host-" in done.stdout
    assert "acme/main/hello is stopped" in done.stdout


@pytest.mark.parametrize("page", having("python kafka"), ids=lambda page: page.name)
def test_the_programs_of_a_page_run(page: Path, kafka_address: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(here(blocks(page, "python kafka"), kafka_address))
    done = run([sys.executable, "-W", "error", str(program)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
