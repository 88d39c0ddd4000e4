"""The code in the documentation compiles, and what is marked ``python run`` runs.

All ``run`` blocks of a page run in order, in one namespace. Those marked ``python service`` are programs of
their own and are run by ``tests/e2e/test_docs_services.py``; those marked ``python kafka`` need a broker and
are run by ``tests/e2e/test_docs_kafka.py``. Those marked with the name of a web framework are the files of
one application, named by their first line; the tests among them are run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from markdown_it import MarkdownIt

from rebalanser.tasks import Queue
from rebalanser.testing.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
APPLICATIONS = {
    "fastapi": ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_app.py"],
    "django": ["-m", "django", "test", "--settings", "shop.settings"],
}
"""How the tests of an application of each framework are run."""
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
    assert infos <= {
        "python",
        "python kafka",
        "python run",
        "python service",
        *(f"python {framework}" for framework in APPLICATIONS),
    }


@pytest.mark.parametrize("page", _having(""), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_compiles(page: Path) -> None:
    for block in _blocks(page):
        compile(block, str(page), "exec")


@pytest.mark.parametrize("page", _having("run"), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("REBALANSER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    namespace: dict[str, object] = {"__name__": "documentation"}
    for block in _blocks(page, "run"):
        exec(compile(block, str(page), "exec"), namespace)


def write_application(framework: str, folder: Path) -> dict[str, str]:
    """Write the files of an application to a folder; the environment that it runs in."""
    for block in _blocks(ROOT / "docs" / "how-to" / "web-applications.md", framework):
        name = block.split(maxsplit=2)[1]
        file = folder / name
        if file.parent != folder:
            file.parent.mkdir(exist_ok=True)
            (file.parent / "__init__.py").touch()
        file.write_text(block.lstrip())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REBALANSER_")}
    return environment | {"XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(folder)}


@pytest.mark.parametrize("framework", APPLICATIONS)
def test_applications_pass_their_tests(framework: str, tmp_path: Path) -> None:
    environment = write_application(framework, tmp_path)
    ran = subprocess.run(
        [sys.executable, "-W", "error", *APPLICATIONS[framework]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"\b(1 passed|Ran 2 tests)\b", ran.stdout + ran.stderr)


@pytest.mark.slow
@pytest.mark.rule("SK-3", "SK-4")
def test_gunicorn_may_load_the_application_before_it_forks(tmp_path: Path) -> None:
    environment = write_application("django", tmp_path) | {"DJANGO_SETTINGS_MODULE": "shop.settings"}

    def call(*words: str) -> list[str]:
        return [sys.executable, "-W", "error", *words]

    page = (ROOT / "docs" / "how-to" / "web-applications.md").read_text()
    commands = re.findall(r"^\$ python (-m django (?!test).*)$", page, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        subprocess.run(call(*command.split()), cwd=tmp_path, env=environment, check=True)
    server = call("-m", "gunicorn", "--preload", "--workers", "2", "--bind", "unix:web", "shop.wsgi")
    url = f"sqlite:///{tmp_path}/tasks.db"
    with (
        subprocess.Popen(server, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process,
        httpx.Client(transport=httpx.HTTPTransport(uds=str(tmp_path / "web"), retries=5)) as client,
    ):
        assert process.stderr is not None
        try:
            wait_until((tmp_path / "web").exists)
            answers = [
                client.post("http://localhost/orders", json={"address": "a@example.org"}) for _ in range(20)
            ]
        finally:
            process.terminate()
        complaints = process.communicate(timeout=PATIENCE_S)[1]
    assert {answer.status_code for answer in answers} == {202}, complaints
    assert process.returncode == 0, complaints
    assert "Traceback" not in complaints
    with Queue("shop", url, state_folder=tmp_path, create=False) as queue:
        assert {each.head.id for each in queue.tasks()} == {answer.json()["task"] for answer in answers}


def test_what_workers_of_the_tasks_quickstart_import_enqueues_nothing() -> None:
    definitions = _blocks(ROOT / "docs" / "quickstart" / "tasks.md", "run")[0]
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
