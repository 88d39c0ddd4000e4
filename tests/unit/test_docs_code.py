"""The code in the documentation compiles, and what is marked ``python run`` runs.

All ``run`` blocks of a page run in order, in one namespace. Those marked ``python service`` are programs of
their own and are run by ``tests/e2e/test_docs_services.py``; those marked ``python kafka`` need a broker and
are run by ``tests/e2e/test_docs_kafka.py``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _blocks(page: Path, kind: str = "") -> list[str]:
    """The Python blocks of a page; of the kind that the second word after the fence says, if given."""
    return [
        # Blank lines before it make errors name the page's own line.
        "\n" * (token.map[0] + 1 if token.map else 0) + token.content
        for token in MarkdownIt("commonmark").parse(page.read_text())
        if token.type == "fence" and token.info.startswith("python") and kind in token.info
    ]


def _having(kind: str) -> list[Path]:
    return [page for page in PAGES if _blocks(page, kind)]


def test_kinds_are_spelled_right() -> None:
    infos = {
        token.info
        for page in PAGES
        for token in MarkdownIt("commonmark").parse(page.read_text())
        if token.type == "fence" and token.info.startswith("python")
    }
    assert infos <= {"python", "python kafka", "python run", "python service"}


@pytest.mark.parametrize("page", _having(""), ids=lambda page: page.name)
def test_code_compiles(page: Path) -> None:
    for block in _blocks(page):
        compile(block, str(page), "exec")


@pytest.mark.parametrize("page", _having("run"), ids=lambda page: page.name)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("REBALANSER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    namespace: dict[str, object] = {"__name__": "documentation"}
    for block in _blocks(page, "run"):
        exec(compile(block, str(page), "exec"), namespace)


def test_what_workers_of_the_tasks_quickstart_import_enqueues_nothing() -> None:
    definitions = _blocks(ROOT / "docs" / "tasks.md", "run")[0]
    assert "@tasks.task" in definitions
    assert "enqueue" not in definitions


def test_every_example_has_a_command_to_copy() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    programs = {*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.sh")}
    modules = {"comparison", "demo", "demo_view", "demo_worker", "stdlib_stream", "audit_demo"}
    for program in programs:
        if program.stem not in modules:
            assert f"`examples/{program.name}" in page or f"`python examples/{program.name}" in page
    assert {"`make demo`", "`make audit-demo`"} <= set(re.findall(r"`make [^`]*`", page))
