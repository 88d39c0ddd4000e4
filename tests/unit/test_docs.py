"""The documentation is current, and names no rule, command, option, setting, variable or API that is none."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from markdown_it import MarkdownIt
from typer.core import TyperGroup

import rebalanser
from rebalanser.cli.check import OTHER_VARIABLES
from rebalanser.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
CLAIMED = {
    *(f"RB-{number}" for number in (*range(1, 31), *range(33, 40), *range(41, 47))),
    *(f"SH-{number}" for number in (*range(1, 21), *range(22, 28))),
    *(f"NE-{number}" for number in range(1, 17)),
    *(f"AU-{number}" for number in range(1, 11)),
    *(f"SK-{number}" for number in range(1, 25)),
    "SH-28",
    "SH-29",
}
SHELLS = {"bash", "console", "sh"}
API = re.compile(
    r"(?<![\w/.])(rebalanser|AsyncGroup|Group|Admin|Settings|Owned|group|admin|owned)((?:\.[A-Za-z_]\w*)+)"
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENTRY_POINTS = re.compile("|".join(map(re.escape, PROJECT["entry-points"])))
PLACE = re.compile(r"(?!.*NAME)(?:rebalanser|backends|tests|docs|examples|benchmarks|\.ci|\.github)/[\w./-]+")
"""A span of code that is a file or a folder of the repository; NAME stands for one yet to be written."""
VARIABLE = re.compile(r"\bREBALANSER_[A-Z_]*[A-Z]\b")


def _load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


generate = _load_generator()


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True, slots=True)
class Code:
    """A block of code (``info`` says of which language) or a span of it in a sentence (no ``info``)."""

    page: str
    line: int
    info: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def _code_of(page: Path) -> Iterator[Code]:
    line = 0
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        line = token.map[0] + 1 if token.map else line
        if token.type == "fence":
            yield Code(_name(page), line, token.info, token.content)
        for child in token.children or ():
            if child.type == "code_inline":
                yield Code(_name(page), line, "", child.content)


CODE = [code for page in PAGES for code in _code_of(page)]


def _commands() -> Iterator[tuple[Code, list[str]]]:
    """Every mention of the ``rebalanser`` command, taken apart as a shell does."""
    for code in CODE:
        if code.info and code.info.split()[0] not in SHELLS:
            continue
        for line in code.text.replace("\\\n", " ").splitlines():
            words = re.split(r"\s(?:&&?|[|>])(?:\s|$)", line.removeprefix("$ "))[0]
            if re.match(r"(?:\w+=\S+ )*rebalanser( |$)", words):
                found = shlex.split(words, comments=True)
                yield code, found[found.index("rebalanser") + 1 :]


COMMANDS = list(_commands())


def test_generated_parts_are_current() -> None:
    pages = [_name(page) for page in generate.outdated()]
    assert not pages, "run `make docs`"


def test_every_generated_part_stands_somewhere() -> None:
    written = {match["name"] for page in PAGES for match in generate.MARKER.finditer(page.read_text())}
    assert written == set(generate.PARTS)


def test_a_page_that_is_out_of_date_is_noticed() -> None:
    stale = "<!-- generated: role -->\nby hand\n<!-- end: role -->"
    assert generate.render(stale) != stale
    assert generate.render(generate.render(stale)) == generate.render(stale)


def test_rules_are_those_that_this_release_claims() -> None:
    assert set(generate.claimed_rules()) == CLAIMED
    assert set(generate.claimed_rules()) | set(generate.unclaimed_rules()) == CLAIMED | {
        *(f"RB-{number}" for number in range(1, 36)),
    }


@pytest.mark.rule("SH-17")
def test_the_unit_of_a_worker_leaves_its_children_to_the_shim() -> None:
    """Any other KillMode kills shim and applications at once when the worker has crashed."""
    page = (ROOT / "docs" / "how-to" / "shiva-operations.md").read_text()
    unit = page.partition("```ini\n")[2].partition("```")[0]
    assert {"KillMode=process", "OOMPolicy=continue"} <= set(unit.splitlines())
    guide = (ROOT / "docs" / "how-to" / "deployment.md").read_text()
    assert "For `rebalanser run` write `KillMode=process` instead." in guide


def test_every_claimed_rule_has_a_test() -> None:
    held = {mark.key for mark in generate.marks() if mark.kind == "rule"}
    without = [rule for rule in generate.claimed_rules() if rule not in held]
    assert not without, f"no test holds {', '.join(without)}"


def test_the_simulator_is_marked_with_the_rules_whose_mutants_it_notices() -> None:
    judges = {
        "test_no_rule_is_broken_whatever_fails",
        "test_resources_are_placed_and_moved_as_the_policy_says",
        "test_labels_keep_their_shares_and_pass_them_on",
    }
    marked = {
        mark.key
        for mark in generate.marks()
        if mark.kind == "rule" and mark.file == "tests/simulation/test_simulation.py" and mark.test in judges
    }
    shown = frozenset[str]().union(
        *(each.rules for each in generate.mutants("tests/simulation/test_mutants.py"))
    )
    assert marked == shown


def test_every_claimed_rule_of_groups_has_a_mutant() -> None:
    files = ("tests/simulation/test_mutants.py", "tests/unit/test_runtime_mutants.py")
    broken = frozenset[str]().union(*(each.rules for file in files for each in generate.mutants(file)))
    without = {rule for rule in generate.claimed_rules() if rule.startswith("RB-")} - broken
    assert not without


def test_every_lesson_has_a_test() -> None:
    held = {mark.key for mark in generate.marks() if mark.kind == "lesson"}
    without = [lesson for lesson in generate.lessons() if lesson not in held]
    assert not without, f"no test holds the lessons {', '.join(without)}"


def test_marks_name_what_there_is() -> None:
    rules = {*generate.claimed_rules(), *generate.unclaimed_rules()}
    known = {"rule": rules, "lesson": set(generate.lessons())}
    unknown = [mark for mark in generate.marks() if mark.key not in known[mark.kind]]
    assert not unknown


def test_marks_are_found_wherever_they_may_stand(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_example.py").write_text(
        "pytestmark = pytest.mark.rule('RB-1')\n"
        "@pytest.mark.rule('RB-2', 'RB-3')\n"
        "class TestIt:\n"
        "    @pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.rule('RB-4'))])\n"
        "    def test_a(self, x): ...\n"
        "@pytest.mark.lesson(5)\n"
        "async def test_b(): ...\n"
        "@pytest.mark.timeout(9)\n"
        "def test_c(): ...\n"
    )
    found = {(mark.key, mark.test) for mark in generate.marks(tmp_path / "tests")}
    assert found == {
        ("RB-1", "every test"),
        ("RB-2", "TestIt"),
        ("RB-3", "TestIt"),
        ("RB-4", "TestIt.test_a"),
        ("5", "test_b"),
    }


def _resolve(command: Any, words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words name, and the words that are left."""
    while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        inner = command.commands.get(words[0])
        assert inner is not None, f"there is no command {words[0]!r}"
        command, words = inner, words[1:]
    return command, words


def test_documentation_shows_the_commands() -> None:
    assert len(COMMANDS) > 10


@pytest.mark.parametrize(("code", "words"), COMMANDS, ids=lambda value: str(value))
def test_commands_exist_with_their_options(code: Code, words: list[str]) -> None:
    command, rest = _resolve(generate.command_tree(), words)
    if code.info:
        command.make_context("rebalanser", list(rest))
        return
    options = {
        option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
    }
    named = {word.partition("=")[0] for word in rest if word.startswith("--") and word != "--"}
    assert named <= options


@pytest.mark.parametrize("words", [["nonsense"], ["resources", "nonsense"]])
def test_a_command_that_is_none_is_noticed(words: list[str]) -> None:
    with pytest.raises(AssertionError, match="nonsense"):
        _resolve(generate.command_tree(), words)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_environment_variables_exist(page: Path) -> None:
    known = {f"REBALANSER_{name.upper()}" for name in Settings.model_fields}
    for path in (*(ROOT / "rebalanser").rglob("*.py"), *(ROOT / "backends").rglob("*.py")):
        known.update(re.findall(r'"(REBALANSER_[A-Z_]+)"', path.read_text()))
    assert set(VARIABLE.findall(page.read_text())) <= known


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target for code in CODE for target in re.findall(r"\bmake ([a-z-]+)", code.text)}
    assert named
    assert named <= targets


def test_extras_exist() -> None:
    named = {name for code in CODE for name in re.findall(r"(?:rebalanser|['/]\.)\[(\w+)\]", code.text)}
    assert named
    assert named <= set(PROJECT["optional-dependencies"])


def _named_parts() -> dict[str, Any]:
    group = rebalanser.Group("documentation", "memory://documentation")
    return {
        "rebalanser": rebalanser,
        "Admin": rebalanser.Admin,
        "AsyncGroup": rebalanser.AsyncGroup,
        "Group": group,
        "Owned": rebalanser.Owned,
        "Settings": group.settings,
        "admin": rebalanser.Admin,
        "group": group,
        "owned": rebalanser.Owned,
    }


def _has(owner: Any, path: str) -> bool:
    """Whether ``path`` leads to something: attributes, and modules that have to be imported."""
    for name in path.strip(".").split("."):
        if isinstance(owner, ModuleType) and not hasattr(owner, name):
            try:
                importlib.import_module(f"{owner.__name__}.{name}")
            except ModuleNotFoundError:
                return False
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
        if not isinstance(owner, ModuleType | type):
            return True
    return True


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_names_of_the_api_exist(page: Path) -> None:
    parts = _named_parts()
    texts = [
        ENTRY_POINTS.sub("", code.text)
        for code in CODE
        if code.page == _name(page) and (not code.info or code.info.startswith("python"))
    ]
    missing = {
        f"{owner}{path}"
        for text in texts
        for owner, path in API.findall(text)
        if not _has(parts[owner], path)
    }
    assert not missing


@pytest.mark.parametrize("mention", ["rebalanser.nonsense", "rebalanser.testing.nonsense", "group.nonsense"])
def test_a_name_that_is_none_is_noticed(mention: str) -> None:
    ((owner, path),) = API.findall(mention)
    assert not _has(_named_parts()[owner], path)


def _settings_given(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Settings":
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_settings_exist(page: Path) -> None:
    codes = [code for code in CODE if code.page == _name(page)]
    given = {name for code in codes if code.info.startswith("python") for name in _settings_given(code.text)}
    given |= {name for code in codes if not code.info for name in re.findall(r"Settings\((\w+)=", code.text)}
    assert given <= set(Settings.model_fields)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_names_with_units_are_in_the_code(page: Path) -> None:
    spans = (code.text for code in CODE if code.page == _name(page) and not code.info)
    named = {text for text in spans if re.fullmatch(r"[a-z_]+_(?:s|bytes|ratio)", text)}
    words = {
        word for path in (ROOT / "rebalanser").rglob("*.py") for word in re.findall(r"\w+", path.read_text())
    }
    assert named <= words


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_files_and_folders_exist(page: Path) -> None:
    spans = (code.text for code in CODE if code.page == _name(page) and not code.info)
    missing = [text for text in spans if PLACE.fullmatch(text) and not (ROOT / text).exists()]
    assert not missing


def test_the_reference_has_what_a_program_uses_and_nothing_internal() -> None:
    reference = "".join(page.read_text() for page in REFERENCE)
    members = set(re.findall(r"^\| `(?:await )?(\w+)[(`]", reference, re.MULTILINE))
    assert [name for name in members if name.startswith("_")] == []
    assert members & {"ask_to_stop", "report_worker"} == set()
    assert members >= {"get", "all", "is_current", "on_change", "label", "host", "before", "after"}
    environment = reference.partition("## Environment")[2].partition("\n## ")[0]
    unnamed = {name for name in OTHER_VARIABLES if f"`{name}`" not in environment}
    assert unnamed == set()
    assert "FORMAT_" not in reference


def test_every_line_of_the_log_has_an_action() -> None:
    assert generate.log_events.unnamed() == []


def test_the_reference_describes_every_log_event_and_no_other() -> None:
    """A fact has the meaning of its kind. An event that warns says what to do."""
    notes, logged = generate.log_events.notes(), generate.log_events.events()
    assert set(notes) == set(logged)
    for area, events in logged.items():
        assert set(notes[area]) - set(events) == set(), area
        rows = {row[0].strip("`"): row for row in generate.log_events.rows(area)}
        assert [name for name, row in rows.items() if not row[3]] == [], area
        loud = [name for name, event in events.items() if event.levels & {"warning", "error", "critical"}]
        assert [name for name in loud if not rows[name][4]] == [], area


def test_a_log_call_without_an_action_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "rebalanser").mkdir()
    (tmp_path / "rebalanser" / "new.py").write_text(
        "_log.warning('strange')\n_log.info('well', extra={'action': 'well'})\nmath.log(2)\n"
    )
    found = {(call.place, call.action, call.level) for call in generate.log_events.calls(tmp_path)}
    assert found == {("rebalanser/new.py:1", None, "warning"), ("rebalanser/new.py:2", "well", "info")}


def test_every_command_takes_json_where_the_reference_says_so() -> None:
    taken = {
        path: {option for parameter in command.params for option in parameter.opts}
        for path, command in generate._commands_below(generate.command_tree(), "rebalanser")
    }
    assert [path for path, options in taken.items() if "--json" not in options] == ["rebalanser shiva schema"]
    text = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert "Each command but `shiva schema` takes `--json`" in " ".join(text.split())


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in _anchors(file), target


def test_the_index_links_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / path).resolve() for path in re.findall(r"\]\(([^)#]+)\)", index.read_text())}
    pages = set((ROOT / "docs").rglob("*.md")) - {index}
    assert {_name(page) for page in pages - linked} == set()
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()
