"""Writes the generated parts of the documentation: ``python docs/generate.py``, or ``--check`` to verify.

A part stands between ``<!-- generated: NAME -->`` and ``<!-- end: NAME -->``; everything outside is written
by hand. The rules and lessons themselves are written by hand too; which tests hold them is read from the
``rule`` and ``lesson`` marks in ``tests/``.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import inspect
import io
import json
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperArgument, TyperGroup

from rebalanser_etcd.known_bugs import KNOWN_BUGS, NEVER
from rebalanser_kafka.group.coordinator import CAPABILITIES
from rebalanser_kafka.group.log import PREFERRED, SETTINGS
from rebalanser_kafka.neli.topic import topic_spec
from rebalanser_kafka.shiva.topics import specs

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import log_events

import rebalanser
import rebalanser.tasks
import rebalanser.testing
from rebalanser import cli, errors, history
from rebalanser.admin import Owner
from rebalanser.audit import Options, tables
from rebalanser.audit.result import FOLDERS
from rebalanser.audit.tables import FindingKind
from rebalanser.cli.table import render_view
from rebalanser.cli.view import Moves, Picture, View
from rebalanser.core.group import (
    MEMBERSHIP,
    ROLE,
    STEPS,
    Fingerprint,
    Group,
    Header,
    Leadership,
    Member,
    ResourceSpec,
    Share,
    Step,
)
from rebalanser.core.neli.settings import Mode, NeliSettings
from rebalanser.core.neli.states import PARTITION
from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.run_states import RUN
from rebalanser.core.shiva.states import APPLICATION_BEGINS, APPLICATION_ENDS, APPLICATION_STEPS
from rebalanser.core.shiva.types import ApplicationState
from rebalanser.core.shiva.worker_options import WorkerOptions
from rebalanser.core.transitions import Table
from rebalanser.neli import Candidacy, Neli
from rebalanser.owners import OwnerChange
from rebalanser.registry import GroupView, Holding
from rebalanser.registry.contract import LeaseAge
from rebalanser.settings import Settings
from rebalanser.shiva import TopicNames, manifest_schema
from rebalanser.state import GroupState, describe
from simulation.kernel.mutants import Mutant

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
RULES = DOCS / "rules.md"
PICTURE = DOCS / "live-table.svg"
"""Written and never verified: each version of the library that draws it draws it a little differently."""
RULE = re.compile(r"^- \*\*((?:RB|SH|NE|AU|SK)-\d+)\*\* (.+)$", re.MULTILINE)
LESSON = re.compile(r"^(\d+)\. (.+)$", re.MULTILINE)
NOT_YET_CLAIMED = "## Not yet claimed"
MARKER = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end: (?P=name) -->)", re.DOTALL)


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """A test that says which rule or lesson it holds."""

    kind: str
    key: str
    file: str
    test: str


def claimed_rules() -> dict[str, str]:
    """The rules that this release claims to keep, with their texts."""
    return dict(RULE.findall(RULES.read_text().partition(NOT_YET_CLAIMED)[0]))


def unclaimed_rules() -> dict[str, str]:
    """The rules that are still to come."""
    return dict(RULE.findall(RULES.read_text().partition(NOT_YET_CLAIMED)[2]))


def lessons() -> dict[str, str]:
    """The numbered lessons."""
    return dict(LESSON.findall((REFERENCE / "lessons.md").read_text()))


def _calls(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    for call in (inner for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Call)):
        match call.func:
            case ast.Attribute(attr="rule" | "lesson" as kind, value=ast.Attribute(attr="mark")):
                yield from ((kind, str(ast.literal_eval(argument))) for argument in call.args)


def _marks_in(body: Iterable[ast.stmt], file: str, outer: str) -> Iterator[Mark]:
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                name = f"{outer}.{node.name}".lstrip(".")
                yield from (Mark(kind, key, file, name) for kind, key in _calls(node.decorator_list))
                if isinstance(node, ast.ClassDef):
                    yield from _marks_in(node.body, file, name)
            case ast.Assign(targets=[ast.Name(id="pytestmark")]):
                yield from (Mark(kind, key, file, outer or "every test") for kind, key in _calls([node]))


@functools.cache
def marks(folder: Path = ROOT / "tests") -> list[Mark]:
    """Every ``rule`` and ``lesson`` mark of the tests, in order."""
    found: set[Mark] = set()
    for path in folder.rglob("test_*.py"):
        file = path.relative_to(folder.parent).as_posix()
        found.update(_marks_in(ast.parse(path.read_text()).body, file, ""))
    return sorted(found)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    titles = list(head)
    return "\n".join([line(titles), line("---" for _ in titles), *(line(row) for row in rows)])


def _held_by(kind: str, keys: Iterable[str], root: str) -> str:
    tests: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for mark in marks():
        if mark.kind == kind:
            tests[mark.key][mark.file].append(mark.test)
    return _table(
        [kind.capitalize(), "Tests"],
        (
            [
                key,
                "<br>".join(
                    f"[{file.removeprefix('tests/')}]({root}/{file}): "
                    + ", ".join(f"`{name}`" for name in names)
                    for file, names in tests[key].items()
                ),
            ]
            for key in keys
        ),
    )


def rule_tests() -> str:
    """Which tests hold each claimed rule."""
    return _held_by("rule", claimed_rules(), "..")


@functools.cache
def mutants(file: str) -> tuple[Mutant, ...]:
    """The mutants that a file of tests runs."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, ROOT / file)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: tuple[Mutant, ...] = module.MUTANTS
    return made


def _mutant_table(file: str) -> str:
    return _table(
        ["Mutant", "Promise that it breaks", "Rules", "Faults that show it"],
        (
            [mutant.name, mutant.promise, ", ".join(sorted(mutant.rules, key=_by_number)), mutant.profile]
            for mutant in mutants(file)
        ),
    )


def _by_number(rule: str) -> tuple[str, int]:
    family, number = rule.split("-")
    return family, int(number)


def group_mutants() -> str:
    """The mutants of the protocol of groups."""
    return _mutant_table("tests/simulation/test_mutants.py")


def runtime_mutants() -> str:
    """The mutants of what no simulator runs."""
    return _table(
        ["Mutant", "Promise that it breaks", "Rules", "Test that sees it"],
        (
            [
                mutant.name,
                mutant.promise,
                ", ".join(sorted(mutant.rules, key=_by_number)),
                _link_to_test(mutant.test),
            ]
            for mutant in mutants("tests/unit/test_runtime_mutants.py")
        ),
    )


def _link_to_test(test: str) -> str:
    file, _, name = test.partition("::")
    return f"[{file.removeprefix('tests/')}](../../{file}): `{name.partition('[')[0].replace('::', '.')}`"


def shiva_mutants() -> str:
    """The mutants of Shiva."""
    return _mutant_table("tests/simulation/test_shiva_mutants.py")


def neli_mutants() -> str:
    """The mutants of NELI."""
    return _mutant_table("tests/simulation/test_neli_mutants.py")


def task_mutants() -> str:
    """The mutants of Skuld."""
    return _mutant_table("tests/simulation/test_tasks_mutants.py")


def lesson_tests() -> str:
    """Which tests hold each lesson."""
    return _held_by("lesson", lessons(), "../..")


def _diagram(
    begins: Mapping[str, str],
    names: Mapping[str, str],
    edges: Mapping[tuple[str, str], Iterable[str]],
    ends: Mapping[str, str],
) -> str:
    def arrow(before: str, after: str, why: str) -> str:
        return f"    {before} --> {after}: {why.replace(':', ',')}" if why else f"    {before} --> {after}"

    lines = [f'    state "{label}" as {state}' for state, label in names.items() if state != label]
    lines += [arrow("[*]", state, why) for state, why in begins.items()]
    lines += [arrow(state, after, " or ".join(why)) for (state, after), why in edges.items()]
    lines += [arrow(state, "[*]", why) for state, why in ends.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def _without_a_way_on(names: Iterable[str], edges: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The states that no edge leaves, as ends that need no reason."""
    leaving = {state for state, _ in edges}
    return {state: "" for state in names if state not in leaving}


def _diagram_of(table: Table[Any, Any]) -> str:
    edges: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (state, trigger), after in table.rows.items():
        edges[state.name.lower(), after.name.lower()].append(trigger.value)
    names = {state.name.lower(): state.value for state in type(table.first)}
    return _diagram({table.first.name.lower(): ""}, names, edges, _without_a_way_on(names, edges))


def membership() -> str:
    """The diagram of a node's life."""
    return _diagram_of(MEMBERSHIP)


def role() -> str:
    """The diagram of a node's role."""
    return _diagram_of(ROLE)


def steps() -> str:
    """The diagram of the four steps."""
    edges = {
        (step.name.lower(), after.name.lower()): [why]
        for step, row in STEPS.items()
        for after, why in row.items()
    }
    names = {step.name.lower(): step.value for step in Step}
    return _diagram({"settled": ""}, names, edges, _without_a_way_on(names, edges))


def shiva_application() -> str:
    """The diagram of an application in the assignment document."""
    return _diagram(
        {state.value: why for state, why in APPLICATION_BEGINS.items()},
        {state.value: state.value for state in ApplicationState},
        {
            (before.value, after.value): [why]
            for before, row in APPLICATION_STEPS.items()
            for after, why in row.items()
        },
        {state.value: why for state, why in APPLICATION_ENDS.items()},
    )


def shiva_run() -> str:
    """The diagram of an application on one worker."""
    return _diagram_of(RUN)


def shiva_manifest() -> str:
    """The JSON schema of an application's manifest."""
    return f"```json\n{json.dumps(manifest_schema(), indent=2)}\n```"


def _options_table(owner: type, defaults: Any) -> str:
    meanings = _attribute_docstrings(owner)
    return _table(
        ["Option", "Default", "Meaning"],
        (
            [
                f"`{field.name}`",
                _shown_default(getattr(defaults, field.name)),
                _code_quotes(" ".join(inspect.cleandoc(meanings[field.name]).split())),
            ]
            for field in fields(owner)
        ),
    )


def shiva_leader_options() -> str:
    """Every option of a leader."""
    return _options_table(LeaderOptions, LeaderOptions())


def shiva_worker_options() -> str:
    """Every option of a worker."""
    return _options_table(WorkerOptions, WorkerOptions())


def shiva_topics() -> str:
    """The three topics and what they are made with."""
    rows = []
    for spec in specs(TopicNames().of("CLUSTER")):
        settings = [f"`{name}={value}`" for name, value in spec.settings.items()]
        rows.append([f"`{spec.name}`", str(spec.partitions), ", ".join(settings)])
    return _table(["Topic", "Partitions", "Settings"], rows)


def neli_partition() -> str:
    """The diagram of a partition as one process sees it."""
    return _diagram_of(PARTITION)


def neli_members() -> str:
    """What ``Neli`` offers."""
    return _members_table(Neli)


def neli_settings() -> str:
    """Every setting of a process that leads roles."""
    return _options_table(NeliSettings, NeliSettings())


def neli_times() -> str:
    """The times that follow from the mode and a session timeout of ten seconds."""
    return _table(
        ["Mode", "Deadline", "Heartbeats and commits every", "A successor waits"],
        (
            [
                f"`{mode.value}`",
                f"{settings.limit_s:g} s",
                f"{settings.interval_s:g} s",
                "not at all" if mode is Mode.NON_EXCLUSIVE else f"{settings.wait_s:.2f} s",
            ]
            for mode in Mode
            for settings in [NeliSettings(mode=mode)]
        ),
    )


def neli_topic() -> str:
    """What the topic of heartbeats is made with, and what of it an existing one must have."""
    spec = topic_spec(Candidacy("TOPIC", "GROUP"))
    exclusive = topic_spec(Candidacy("TOPIC", "GROUP", settings=NeliSettings(mode=Mode.EXCLUSIVE)))
    return _table(
        ["Setting", "Value", "Refused where it differs"],
        (
            [
                f"`{name}`",
                f"`{value}`",
                "yes"
                if name in spec.must_match
                else "in `exclusive`"
                if name in exclusive.must_match
                else "no",
            ]
            for name, value in spec.settings.items()
        ),
    )


def audit_findings() -> str:
    """Every kind of finding, with the rules that it is against."""
    meanings = _attribute_docstrings(FindingKind)
    return _table(
        ["Kind", "What it means"],
        ([f"`{kind.value}`", _code_quotes(_one_line(meanings[kind.name]))] for kind in FindingKind),
    )


def audit_options() -> str:
    """What the audit may be told."""
    meanings = _attribute_docstrings(Options)
    defaults = Options()
    return _table(
        ["Option", "Default", "Meaning"],
        (
            [f"`{name}`", _shown_default(getattr(defaults, name)), _code_quotes(_one_line(meanings[name]))]
            for name in Options.model_fields
        ),
    )


def audit_tables() -> str:
    """Every table that the audit writes: its folder, its columns, what a row is."""
    meanings = dict(_docstrings_in(ast.parse(inspect.getsource(tables)).body))
    return _table(
        ["Folder", "Columns", "What it holds"],
        (
            [
                f"`{folder}`",
                ", ".join(f"`{column.name}` {column.dataType.simpleString()}" for column in schema)
                if folder not in {"findings", "intervals"}
                else ", ".join(f"`{column.name}`" for column in schema),
                _code_quotes(_one_line(meanings[constant])),
            ]
            for folder, constant in FOLDERS.items()
            for schema in [getattr(tables, constant)]
        ),
    )


def _one_line(text: str) -> str:
    return " ".join(inspect.cleandoc(text).split())


def kafka_capabilities() -> str:
    """What the registry ``kafka://`` declares of itself."""
    return _table(
        ["Capability", "Value"],
        (
            [f"`{field.name}`", f"`{getattr(CAPABILITIES, field.name)}`"]
            for field in fields(CAPABILITIES)
            if field.name != "unsafe_reasons"  # they are the topic's own
        ),
    )


def kafka_group_topic() -> str:
    """What a group's topic is made with, and what of it must be so."""
    rows = [[f"`{name}`", f"`{value}`", "yes"] for name, value in SETTINGS.items()]
    rows += [[f"`{name}`", f"`{value}`", "no"] for name, value in PREFERRED.items()]
    return _table(["Setting", "Value", "Refused where it differs"], rows)


def _first_sentences(text: str | None) -> str:
    return " ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split())


def _code_quotes(text: str) -> str:
    """Sphinx's roles and quotes as those of Markdown; a reference with a tilde shows its last name only."""
    text = re.sub(r":\w+:`~[\w.]*?(\w+)`", r"`\1`", text)
    return re.sub(r"``(.+?)``", r"`\1`", re.sub(r":\w+:`([^`]+)`", r"`\1`", text))


def public_names() -> str:
    """The public names and what each of them is."""
    rows = []
    for module in (rebalanser, rebalanser.tasks, rebalanser.testing):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isroutine(thing):
                described = _code_quotes(_first_sentences(inspect.getdoc(thing)))
                rows.append([f"`{module.__name__}.{name}`", described])
    return _table(["Name", "What it is"], rows)


def _attribute_docstrings(owner: type) -> dict[str, str]:
    """The strings that stand below a class's attributes, wherever they are set."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    bodies = (node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return {name: text for body in bodies for name, text in _docstrings_in(body)}


def _docstrings_in(body: Iterable[ast.stmt]) -> Iterator[tuple[str, str]]:
    """What is set in these statements and has a string below it, with that string."""
    for statement, following in pairwise(body):
        match statement, following:
            case (
                ast.AnnAssign(target=target) | ast.Assign(targets=[target]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield ast.unparse(target).removeprefix("self."), text


def _without_annotations(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    bare = [each.replace(annotation=each.empty) for each in list(signature.parameters.values())[1:]]
    shown = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    return re.sub(r"<function .+?>", "…", shown)


OF_THE_GROUP = {"ask_to_stop", "report_worker"}
"""Methods of public classes that the package alone calls."""


def _members_of(owner: type) -> Iterator[tuple[str, str]]:
    """The public attributes, properties and methods of a class, with their docstrings."""
    attributes = _attribute_docstrings(owner)
    for name, text in attributes.items():
        if not name.startswith("_"):
            yield f"`{name}`", text
    for name, member in inspect.getmembers_static(owner):
        if name.startswith("_") or name in attributes or name in OF_THE_GROUP:
            continue
        documented = inspect.getdoc(member) or ""
        if isinstance(member, property):
            yield f"`{name}`", documented
        elif inspect.isfunction(member):
            prefix = "await " if inspect.iscoroutinefunction(member) else ""
            yield f"`{prefix}{name}{_without_annotations(member)}`", documented


def _members_table(owner: type) -> str:
    return _table(
        ["Member", "What it does"],
        ([name, _code_quotes(_first_sentences(text))] for name, text in _members_of(owner)),
    )


def group_members() -> str:
    """What a group offers."""
    return _members_table(rebalanser.Group)


def admin_members() -> str:
    """What an admin offers."""
    return _members_table(rebalanser.Admin)


def owned_members() -> str:
    """What an owned resource offers."""
    return _members_table(rebalanser.Owned)


def owners_members() -> str:
    """What a cache of owners offers."""
    return _members_table(rebalanser.Owners)


def owner_members() -> str:
    """What is known of an owner."""
    return _members_table(Owner)


def owner_change_members() -> str:
    """What is told of a change of an owner."""
    return _members_table(OwnerChange)


def _shown_default(value: object) -> str:
    plain = getattr(value, "value", value)
    if plain in (None, {}, frozenset()):
        return ""
    return f"`{plain:.7g}`" if isinstance(plain, float) and plain.is_integer() else _short(plain)


def _short(value: object) -> str:
    return f"`{value:.4g}`" if isinstance(value, float) else f"`{value}`"


def settings_table() -> str:
    """Every setting, its environment variable, default and meaning."""
    meanings = _attribute_docstrings(Settings)
    defaults = Settings.model_construct()
    rows = []
    for name, field in Settings.model_fields.items():
        meaning = _code_quotes(_first_sentences(field.description or meanings.get(name)))
        meaning = meaning[:1].upper() + meaning[1:]
        default = _shown_default(getattr(defaults, name))
        rows.append([f"`{name}`", f"`REBALANSER_{name.upper()}`", default, meaning])
    return _table(["Setting", "Environment", "Default", "Meaning"], rows)


def worked_timings() -> str:
    """RB-21 in numbers, for some lengths of the lease."""
    rows = []
    for ttl in (2, 5, 10, 30, 60):
        settings = Settings(lease_ttl_s=ttl)
        seconds = (
            settings.lease_ttl_s,
            settings.heartbeat_interval_s,
            settings.registry_timeout_s,
            settings.stop_timeout_s,
            settings.safety_margin_s,
            settings.lease_ttl_s * settings.clock_drift_ratio,
            settings.timings.detect_s,
            settings.timings.access_s,
        )
        rows.append([f"{value:.2f}" for value in seconds])
    head = [
        "`lease_ttl_s`",
        "`heartbeat_interval_s`",
        "`registry_timeout_s`",
        "`stop_timeout_s`",
        "`safety_margin_s`",
        "drift",
        "OnStop is called after",
        "access has ended after",
    ]
    return _table(head, rows)


@functools.cache
def command_tree() -> Any:
    """The command line, as the library that parses it sees it."""
    return typer.main.get_command(cli.application())


def _commands_below(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(command, TyperGroup):
        for name, inner in command.commands.items():
            yield from _commands_below(inner, f"{path} {name}")
    elif not command.hidden:
        yield path, command


def _usage(parameter: Any) -> str:
    """How a parameter is written; made here, since the library's own text differs between its versions."""
    if isinstance(parameter, TyperArgument):
        return str(parameter.metavar or parameter.name.upper())
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    if parameter.is_flag or parameter.count:
        return names
    return f"{names} {parameter.metavar or parameter.name.upper().strip('_')}"


def _choices_and_default(parameter: Any) -> str:
    """The values that an option takes, if they are few, and the one that it has if it is not given."""
    if isinstance(parameter, TyperArgument) or parameter.is_flag or parameter.count:
        return ""
    found = []
    if isinstance(parameter.default, Enum):
        found.append(f"One of {', '.join(f'`{each.value}`' for each in type(parameter.default))}.")
    shown = parameter.show_default
    default = _code_quotes(shown) if isinstance(shown, str) else shown and _shown_default(parameter.default)
    if default:
        found.append(f"Default: {default}.")
    return "".join(f" {each}" for each in found)


PARTS_WITH_COMMANDS = ("neli", "shiva", "tasks")
"""Groups of commands that have a page of their own."""


def _commands_of(part: str) -> str:
    """Every command of a part, or of none of them, with its arguments and options."""
    sections = []
    for path, command in _commands_below(command_tree(), "rebalanser"):
        group = path.split()[1]
        if (group if group in PARTS_WITH_COMMANDS else "groups") != part:
            continue
        shown = [each for each in command.params if not each.hidden and each.name != "help"]
        arguments = [_usage(each) for each in shown if isinstance(each, TyperArgument)]
        rows = [
            [
                f"`{_usage(each)}`",
                _code_quotes(" ".join((each.help or "").split())) + _choices_and_default(each),
            ]
            for each in shown
        ]
        title = f"## `{' '.join([path, *arguments])}`"
        sections += [title, _code_quotes(_first_sentences(command.help)), _table(["", "Meaning"], rows)]
    return "\n\n".join(sections)


def exit_codes() -> str:
    """What the exit codes of the command line mean."""
    found = re.findall(r"^(\d+) +(.+)$", cli.__doc__ or "", re.MULTILINE)
    return _table(["Exit code", "Meaning"], ([code, _code_quotes(meaning)] for code, meaning in found))


def error_tree() -> str:
    """The tree of errors, grouped by what the caller must do."""

    def lines(error: type[Exception], depth: int) -> Iterator[str]:
        yield f"{'  ' * depth}- `{error.__name__}`: {_code_quotes(_first_sentences(error.__doc__))}"
        for inner in error.__subclasses__():
            if inner.__module__ == errors.__name__:
                yield from lines(inner, depth + 1)

    return "\n".join(lines(errors.RebalanserError, 0))


def _log_events(area: str) -> str:
    """Every event of an area that is logged."""
    head = ["Event", "Level", "Fields", "What happened", "What to do"]
    return _table(head, log_events.rows(area))


def example_state(moved: int) -> GroupState:
    """A group of twelve partitions while a fourth node takes its share of three over, ``moved`` so far."""
    nodes = {f"{number}": Member(f"{number}", f"worker-{number}", host="10.0.0.1") for number in range(1, 5)}
    resources = [f"partition-{number:02}" for number in range(12)]
    held = {resource: str(1 + number % 3) for number, resource in enumerate(resources)}
    wanted = {**held, **dict.fromkeys(resources[-3:], "4")}
    now = {**held, **dict.fromkeys(resources[-3:][:moved], "4")}
    group = Group(
        revision=41,
        members=nodes,
        resources={resource: ResourceSpec(resource) for resource in resources},
        drained=frozenset(),
        header=Header(version=17, term=3, revision=40),
        shares={node: Share(17, frozenset(r for r in resources if wanted[r] == node)) for node in nodes},
        obsolete_parts=frozenset(),
        acknowledged={"1": 17},
        fingerprint=Fingerprint(),
    )
    tokens = {resource: 41 if now[resource] == "4" else 8 + int(held[resource]) for resource in resources}
    holdings = tuple(Holding(resource, now[resource], tokens[resource]) for resource in resources)
    return describe("orders", GroupView(group, Leadership(3, "1", 20), holdings))


def etcd_faults() -> str:
    """Every known fault of etcd, the versions that have it, and what becomes of it here."""
    rows = []
    for fault in KNOWN_BUGS:
        spans = []
        for (major, minor), fixed in fault.fixed.items():
            first = f"{major}.{minor}.{fault.since.get((major, minor), 0)}"
            last = f"{major}.{minor}.{fixed - 1}"
            spans.append(
                f"{first} on" if fixed == NEVER else first if first == last else f"{first} to {last}"
            )
        verdict = "survived" if fault.survived else "warned about"
        rows.append([fault.sentence, ", ".join(spans), fault.breaks, verdict])
    return _table(["etcd", "Versions", "What it breaks here", "Here it is"], rows)


def live_table() -> str:
    """What ``rebalanser watch`` shows, as a picture."""
    console = Console(record=True, width=120, file=io.StringIO())
    view, moves = View(), Moves()
    for seen_at, moved in enumerate((0, 1)):
        state = example_state(moved)
        view.update(Picture.of(state, seen_at, moves.see(state, seen_at)))
    view.hear("1234", {node: LeaseAge(7.0 if node == "2" else 1.0, 10.0) for node in "1234"})
    console.print(render_view(view, height=24))
    return console.export_svg(title="rebalanser watch orders", unique_id="live-table")


PARTS: Mapping[str, Callable[[], str]] = {
    "rule-tests": rule_tests,
    "lesson-tests": lesson_tests,
    "group-mutants": group_mutants,
    "runtime-mutants": runtime_mutants,
    "shiva-mutants": shiva_mutants,
    "neli-mutants": neli_mutants,
    "task-mutants": task_mutants,
    "membership": membership,
    "role": role,
    "steps": steps,
    "public-names": public_names,
    "group": group_members,
    "admin": admin_members,
    "owned": owned_members,
    "owners": owners_members,
    "owner": owner_members,
    "owner-change": owner_change_members,
    "settings": settings_table,
    "timings": worked_timings,
    "etcd-faults": etcd_faults,
    **{f"commands-{part}": partial(_commands_of, part) for part in ("groups", *PARTS_WITH_COMMANDS)},
    **{f"log-events-{area}": partial(_log_events, area) for area, _ in log_events.AREAS},
    "exit-codes": exit_codes,
    "errors": error_tree,
    "shiva-application": shiva_application,
    "shiva-run": shiva_run,
    "shiva-manifest": shiva_manifest,
    "shiva-leader-options": shiva_leader_options,
    "shiva-worker-options": shiva_worker_options,
    "shiva-topics": shiva_topics,
    "neli-partition": neli_partition,
    "neli-members": neli_members,
    "neli-settings": neli_settings,
    "neli-times": neli_times,
    "neli-topic": neli_topic,
    "audit-findings": audit_findings,
    "audit-options": audit_options,
    "audit-tables": audit_tables,
    "history": history.describe,
    "kafka-capabilities": kafka_capabilities,
    "kafka-group-topic": kafka_group_topic,
}


def render(text: str) -> str:
    """A page with its generated parts as they should be. Raises KeyError for a part that nobody makes."""
    return MARKER.sub(lambda match: f"{match[1]}{PARTS[match['name']]()}\n{match[3]}", text)


def outdated() -> dict[Path, str]:
    """The pages whose generated parts are not current, with what they should be."""
    pages = {path: path.read_text() for path in sorted(DOCS.rglob("*.md"))}
    return {path: new for path, text in pages.items() if (new := render(text)) != text}


def main() -> int:
    """Write what is out of date, or with ``--check`` name it and fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not current")
    check: bool = parser.parse_args().check
    pages = outdated()
    for path, text in pages.items():
        if not check:
            path.write_text(text)
        sys.stdout.write(f"{path.relative_to(ROOT)} {'is out of date: make docs' if check else 'written'}\n")
    if not check:
        PICTURE.write_text(live_table())
    return 1 if check and pages else 0


if __name__ == "__main__":
    sys.exit(main())
