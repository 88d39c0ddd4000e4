"""The style of the house: who may import whom, what is pure, documented, marked and named how."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rebalanser.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parents[2]
PURE = {f"rebalanser.core{room}" for room in ("", ".allocation", ".group", ".neli", ".shiva", ".tasks")}
"""Events in, effects out: the standard library only, and of that nothing that touches the world."""
LEAVES = {"rebalanser.boot_id", "rebalanser.errors", "rebalanser.redaction"}
"""They import nothing of the house."""
CORE = PURE | LEAVES | {"rebalanser.registry"}
LIBRARY = CORE | {
    "rebalanser.forks",
    "rebalanser.history",
    "rebalanser.explanation",
    "rebalanser.observer",
    "rebalanser.plan",
    "rebalanser.runtime",
    "rebalanser.settings",
    "rebalanser.state",
}
FACADE = {
    "rebalanser",
    "rebalanser.admin",
    "rebalanser.async_admin",
    "rebalanser.shiva",
    "rebalanser.async_group",
    "rebalanser.feed",
    "rebalanser.folders",
    "rebalanser.group",
    "rebalanser.owners",
    "rebalanser.neli",
    "rebalanser.tasks",
}
WALLS: dict[str, set[str]] = {
    "rebalanser": LIBRARY | FACADE,
    "rebalanser.boot_id": set(),
    "rebalanser.errors": set(),
    "rebalanser.redaction": set(),
    "rebalanser.core": {"rebalanser.errors"},
    "rebalanser.core.allocation": {"rebalanser.errors", "rebalanser.core.group"},
    "rebalanser.core.group": {"rebalanser.core", "rebalanser.core.allocation", "rebalanser.errors"},
    "rebalanser.core.shiva": {"rebalanser.core", "rebalanser.core.allocation", "rebalanser.errors"},
    "rebalanser.core.neli": {"rebalanser.core", "rebalanser.errors"},
    "rebalanser.core.tasks": {"rebalanser.core", "rebalanser.errors"},
    "rebalanser.registry": LEAVES | {"rebalanser.core.group"},
    "rebalanser.history": PURE - {"rebalanser.core.allocation"}
    | LEAVES
    | {"rebalanser.folders", "rebalanser.registry"},
    "rebalanser.audit": {"rebalanser.errors", "rebalanser.history", "rebalanser.redaction"},
    "rebalanser.runtime": LEAVES | {"rebalanser.core", "rebalanser.core.group", "rebalanser.registry"},
    "rebalanser.settings": CORE | {"rebalanser.folders"},
    "rebalanser.state": CORE,
    "rebalanser.plan": CORE | {"rebalanser.state"},
    "rebalanser.explanation": CORE | {"rebalanser.state"},
    "rebalanser.observer": LIBRARY,
    "rebalanser.group": LIBRARY,
    "rebalanser.async_group": LIBRARY | {"rebalanser.group"},
    "rebalanser.owners": LIBRARY | {"rebalanser.admin", "rebalanser.group"},
    "rebalanser.async_admin": LIBRARY | {"rebalanser.admin"},
    "rebalanser.admin": LIBRARY | {"rebalanser.group"},
    "rebalanser.shiva": CORE | {"rebalanser.history", "rebalanser.runtime"},
    "rebalanser.neli": CORE | {"rebalanser.folders", "rebalanser.history", "rebalanser.runtime"},
    "rebalanser.feed": LIBRARY | {"rebalanser.admin", "rebalanser.shiva"},
    "rebalanser.folders": {"rebalanser.errors", "rebalanser.forks"},
    "rebalanser.forks": {"rebalanser.errors"},
    "rebalanser.tasks": LIBRARY | {"rebalanser.admin", "rebalanser.folders", "rebalanser.group"},
    "rebalanser.__main__": {"rebalanser.cli"},
    "rebalanser.cli": LIBRARY | FACADE | {"rebalanser.audit"},
    "rebalanser.testing": LIBRARY | FACADE | {"rebalanser.audit"},
    "rebalanser_etcd": CORE | {"rebalanser.forks"},
    "rebalanser_kafka": CORE
    | {
        "rebalanser.shiva",
        "rebalanser.feed",
        "rebalanser.history",
        "rebalanser.neli",
        "rebalanser.runtime",
    },
    "rebalanser_sqlite": CORE | {"rebalanser.folders", "rebalanser.forks", "rebalanser.tasks"},
}
"""What else each package or module may import. Nobody imports ``testing``, nor ``cli`` but to run it."""

IMPURE_MODULES = {
    "asyncio", "concurrent", "ctypes", "datetime", "io", "logging", "multiprocessing", "os", "pathlib",
    "queue", "random", "secrets", "select", "selectors", "shutil", "signal", "socket", "sqlite3",
    "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid",
}  # fmt: skip
IMPURE_BUILTINS = {"print", "open", "input", "id", "hash"}
UNITS = ("_s", "_bytes", "_ratio")
SHARED_NAMES = {
    **dict.fromkeys(
        (
            "Deposed", "Fact", "FactKind", "Finished", "HandlerReturned",
            "Leave", "Published", "Report", "Stop", "Wakeup",
        ),
        "the state machines of groups, Shiva and NELI mean the same by it",
    ),
    "Group": "public; in the core it is all of a group, as it is read",
    "Mode": "public in three packages, each of which has its modes",
    "Start": "public in Shiva; in the core it is the event beside Stop",
    "Unchanged": "a guard of the registry, and an argument that Admin was not given: they never meet",
    "Watch": "the command of a node, and the watch of a registry that carries it out",
}  # fmt: skip
"""Names of several classes, each with the reason."""
TOP_LEVEL = {
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "SECURITY.md", "backends",
    "benchmarks", "docs", "examples", "pyproject.toml", "rebalanser", "tests",
}  # fmt: skip
TIMELESS_TESTS = ("conformance", "simulation", "unit")
REAL_TESTS = ("conformance", "e2e", "faults")
"""Tests of real parts, which a busy machine slows down."""
LIMITS = {"timeout", "timeout_s", "within_s"}
WAITS = {
    "acquire": 0, "append_and_wait": 4, "bounds": 0, "communicate": 1, "create_connection": 1,
    "end_offset": 0, "exception": 0, "expect": 2, "flush": 0, "join": 0, "list_topics": 1, "result": 0,
    "run": 1, "settimeout": 0, "terminate": 0, "urlopen": 2, "wait": 0, "wait_balanced": 0,
    "wait_for": 1, "wait_healthy": 0, "wait_leader": 1, "wait_ready": 0, "wait_settled": 0,
    "wait_stopped": 0, "wait_until": 2,
}  # fmt: skip
"""Functions that wait, each with the index of the first positional argument that may be its limit."""
TEXT = {"", ".cfg", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}


def _module_of(path: Path) -> str:
    base = ROOT / "backends" if path.is_relative_to(ROOT / "backends") else ROOT
    return ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def _sources() -> dict[str, ast.Module]:
    paths = [*(ROOT / "rebalanser").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]
    return {_module_of(path): ast.parse(path.read_text(), str(path)) for path in sorted(paths)}


def _room_of(module: str) -> str:
    """The wall that a module stands behind: ``rebalanser.registry`` for ``rebalanser.registry.urls``."""
    parts = module.split(".")
    rooms = (".".join(parts[:length]) for length in (3, 2))
    return next((room for room in rooms if room in WALLS), parts[0])


def _imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere in the tree, also inside functions and for type checking."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            assert node.module is not None
            children = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (child if child in _sources() or child in WALLS else node.module for child in children)


def _house(module: str) -> bool:
    return module.partition(".")[0] in {
        "rebalanser",
        "rebalanser_etcd",
        "rebalanser_kafka",
        "rebalanser_sqlite",
    }


def test_every_module_is_behind_a_wall() -> None:
    unknown = {module for module in _sources() if module != "rebalanser" and _room_of(module) == "rebalanser"}
    assert not unknown, f"say in WALLS what these may import: {sorted(unknown)}"


def _forbidden_imports(module: str, tree: ast.Module) -> list[str]:
    room = _room_of(module)
    allowed = WALLS[room] | {room}
    return sorted(name for name in _imports(tree) if _house(name) and _room_of(name) not in allowed)


def test_imports_respect_the_walls() -> None:
    crossed = {
        module: found for module, tree in _sources().items() if (found := _forbidden_imports(module, tree))
    }
    assert not crossed


def _needed(tree: ast.Module) -> Iterator[str]:
    """Modules that a module can't be read without, also those of types only; not those inside functions."""
    todo: list[ast.AST] = [tree]
    for node in todo:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            yield from (f"{module}.{alias.name}" if module else alias.name for alias in node.names)
            if module:
                yield module
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += ast.iter_child_nodes(node)


def _circle(trees: Mapping[str, ast.Module]) -> list[str]:
    """Return modules that import each other in a circle; none if there is no circle."""
    needs = {module: {*_needed(tree)} & trees.keys() - {module} for module, tree in trees.items()}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    """A type that two modules need belongs below both. A package's own names are loaded on demand."""
    trees = {module: tree for module, tree in _sources().items() if not _is_package(module)}
    for path in (ROOT / "tests").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "tests").with_suffix("").parts)
        if path.name != "__init__.py":
            trees[module] = ast.parse(path.read_text(), str(path))
    assert _circle(trees) == []


def _is_package(module: str) -> bool:
    path = Path(*module.split("."))
    return any((base / path / "__init__.py").is_file() for base in (ROOT, ROOT / "backends"))


def test_a_circle_of_types_is_found() -> None:
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {} import Name"
    trees = {"a": ast.parse(typed.format("b")), "b": ast.parse("import a"), "c": ast.parse("import b")}
    assert set(_circle(trees)) == {"a", "b"}
    trees["b"] = ast.parse("def on_demand():\n    import a")
    assert _circle(trees) == []


def _impure(tree: ast.Module) -> set[str]:
    """Imports and calls that a pure module must not have."""
    tops = {name.partition(".")[0] for name in _imports(tree) if not _house(name)}
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    return (tops - sys.stdlib_module_names) | (tops & IMPURE_MODULES) | (called & IMPURE_BUILTINS)


def test_pure_packages_touch_nothing() -> None:
    pure = {module for module in _sources() if _room_of(module) in PURE}
    found = {module: sorted(impure) for module in pure if (impure := _impure(_sources()[module]))}
    assert not found


def _head_losses(tree: ast.Module) -> Iterator[int]:
    """Lines that delete the first key of a mapping by looking for it: ``del d[next(iter(d))]``, or by pop."""
    for node in ast.walk(tree):
        match node:
            case ast.Delete(targets=[ast.Subscript(value=mapping, slice=key)]):
                pass
            case ast.Call(func=ast.Attribute(value=mapping, attr="pop"), args=[key, *_]):
                pass
            case _:
                continue
        if ast.unparse(key) == f"next(iter({ast.unparse(mapping)}))":
            yield node.lineno


def test_no_mapping_loses_its_head_at_a_cost_of_all_that_it_has_lost() -> None:
    """A dict keeps the places of deleted keys, and passes them each time it is asked for its first one."""
    found = [f"{module}:{line}" for module, tree in _sources().items() for line in _head_losses(tree)]
    assert not found, "use OrderedDict.popitem(last=False)"


@pytest.mark.parametrize(
    "line", ["del a.b[next(iter(a.b))]", "a.pop(next(iter(a)))", "a.pop(next(iter(a)), 0)"]
)
def test_a_lost_head_is_found(line: str) -> None:
    assert list(_head_losses(ast.parse(line))) == [1]


def _public_definitions(tree: ast.Module, module: str) -> Iterator[tuple[str, ast.AST]]:
    yield module, tree
    todo: list[tuple[str, ast.Module | ast.ClassDef]] = [(module, tree)]
    for path, owner in todo:
        for node in owner.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_") or _is_spelled_out_elsewhere(node, owner):
                continue
            yield f"{path}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                todo.append((f"{path}.{node.name}", node))


def _is_spelled_out_elsewhere(
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, owner: ast.Module | ast.ClassDef
) -> bool:
    names = {ast.unparse(decorator) for decorator in node.decorator_list}
    if "overload" in names or any(name.endswith(".setter") for name in names):
        return True
    bases = [ast.unparse(base).partition("[")[0] for base in getattr(owner, "bases", ())]
    return any(node.name in _documented_methods().get(base, ()) for base in bases)


@functools.cache
def _documented_methods() -> dict[str, set[str]]:
    """The methods with a docstring of each class."""
    return {
        owner.name: {
            each.name
            for each in owner.body
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(each)
        }
        for tree in _sources().values()
        for owner in tree.body
        if isinstance(owner, ast.ClassDef)
    }


def test_every_public_name_has_a_docstring() -> None:
    silent = [
        name
        for module, tree in _sources().items()
        for name, node in _public_definitions(tree, module)
        if ast.get_docstring(node) is None  # type: ignore[arg-type]
    ]
    assert not silent


def _repeated(modules: dict[str, ast.Module]) -> dict[str, list[str]]:
    """The modules of each class name that is defined more than once, one entry for each definition."""
    found: dict[str, list[str]] = {}
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    return {name: where for name, where in found.items() if len(where) > 1}


def test_a_class_name_means_one_thing() -> None:
    repeated = _repeated(_sources())
    new = {name: found for name, found in repeated.items() if name not in SHARED_NAMES}
    assert not new, "name each class by what it is, or say in SHARED_NAMES why they share it"
    assert SHARED_NAMES.keys() <= repeated.keys(), "take from SHARED_NAMES what is shared no more"


def test_a_repeated_class_name_is_found() -> None:
    nested = "class Page: ...\nclass View:\n    class Page: ..."
    modules = {"a": ast.parse("class _Part: ..."), "b": ast.parse("if 1:\n    class _Part: ...")}
    assert _repeated(modules) == {"_Part": ["a", "b"]}
    assert _repeated({"c": ast.parse(nested)}) == {"Page": ["c", "c"]}


_TABLE_ROW = re.compile(r"^``(\w+)``  ", re.MULTILINE)


def test_tables_of_modules_name_what_there_is() -> None:
    """The docstring of a package may list its modules; a rename must reach the list."""
    modules = _sources()
    packages = {module.rpartition(".")[0] for module in modules}
    stale = [
        f"{package}.{name}"
        for package in sorted(packages & set(modules))
        for name in _TABLE_ROW.findall(ast.get_docstring(modules[package]) or "")
        if f"{package}.{name}" not in modules
    ]
    assert not stale


def test_numbers_in_settings_carry_their_unit() -> None:
    numbers = [
        name
        for name, field in Settings.model_fields.items()
        if field.annotation in {float, int, float | None}
    ]
    assert numbers
    assert [name for name in numbers if not name.endswith(UNITS)] == []


def test_top_level_holds_only_what_belongs_there() -> None:
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")} - {"build", "dist"}
    assert found == TOP_LEVEL


def _tests(folders: tuple[str, ...], pattern: str = "*.py") -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / "tests" / folder).rglob(pattern))]


def test_timeless_tests_never_sleep() -> None:
    sleeps = [
        f"{path.name}:{node.lineno}"
        for path in _tests(TIMELESS_TESTS, "test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] == "sleep"
        and not (node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0)
    ]
    assert not sleeps


def _is_limit(node: ast.expr) -> bool:
    """True for a number above 0. A limit of 0 does not wait."""
    return isinstance(node, ast.Constant) and type(node.value) in {int, float} and node.value > 0


def _bare_limits(tree: ast.AST) -> Iterator[str]:
    """Limits of waits, and of time that has passed, that are written as numbers."""
    for node in ast.walk(tree):
        limits: list[ast.expr] = []
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in WAITS:
                named = [keyword.value for keyword in node.keywords if keyword.arg in LIMITS]
                limits = [*node.args[WAITS[name] :], *named]
        elif isinstance(node, ast.Compare) and "monotonic()" in ast.unparse(node):
            pairs = zip(node.ops, node.comparators, strict=True)
            limits = [number for compares, number in pairs if isinstance(compares, ast.Lt | ast.LtE)]
        elif isinstance(node, ast.Assign) and "PATIENCE_S" in map(ast.unparse, node.targets):
            limits = [node.value]
        if any(map(_is_limit, limits)):
            yield f"{node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]


def test_waits_for_real_parts_have_the_one_limit() -> None:
    """A limit that a test is about is a named constant, whose docstring says what it shows."""
    found = [
        f"{path.name}:{limit}"
        for path in _tests(REAL_TESTS)
        for limit in _bare_limits(ast.parse(path.read_text()))
    ]
    assert not found, "wait for PATIENCE_S, or name the limit that the test is about"


@pytest.mark.parametrize(
    "line",
    [
        "process.wait(30)",
        "process.communicate(timeout=60)",
        "subprocess.run(command, timeout=1.5)",
        "queue.wait(task, 60.0)",
        "wait_until(lambda: True, 'it is so', 3.0)",
        "admin.wait_balanced(timeout_s=10)",
        "assert time.monotonic() - began < 5.0",
        "assert 0.5 <= time.monotonic() - began <= 5",
        "PATIENCE_S = 60.0",
    ],
)
def test_a_bare_limit_is_found(line: str) -> None:
    assert len(list(_bare_limits(ast.parse(line)))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "process.wait(PATIENCE_S)",
        "queue.wait(task, 0.0)",
        "worker.wait_for(2, 'started')",
        "assert time.monotonic() - began >= 0.5",
        "wait_until(lambda: not members(group), 'it has ended', LEASE_TTL_S)",
    ],
)
def test_other_lines_have_no_bare_limit(line: str) -> None:
    assert list(_bare_limits(ast.parse(line))) == []


def _texts() -> list[Path]:
    folders = [ROOT / name for name in (*TOP_LEVEL, ".ci", ".github") if (ROOT / name).is_dir()]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    files += [ROOT / name for name in TOP_LEVEL if (ROOT / name).is_file()]
    return sorted(path for path in files if path.suffix in TEXT and "__pycache__" not in path.parts)


UNFINISHED = re.compile(r"\b(?:TO[D]O|FIX[M]E|X[X]X)\b")
PLACE_OF_WORK = re.compile(r"(?<![\w.])/(?:root|work)/|(?i:\bissue\s*#?\d)|(?<![\w&(])#\d+\b")


def test_no_text_is_unfinished_or_names_its_place_of_work() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in _texts()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNFINISHED.search(line) or PLACE_OF_WORK.search(line)
    ]
    assert not found, "unfinished work, a path of one machine, or the number of an issue"


def test_changelog_has_safety_first() -> None:
    headings = re.findall(r"^(##+) (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    releases = [position for position, (level, _) in enumerate(headings) if level == "##"]
    assert headings[releases[0]] == ("##", "Unreleased")
    for position, following in zip(releases, [*releases[1:], len(headings)], strict=True):
        kinds = [title for _, title in headings[position + 1 : following]]
        assert "Safety" not in kinds[1:], "changes that concern safety come first"


def test_every_backend_is_packed_and_registered() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {path.name for path in (ROOT / "backends").iterdir() if (path / "__init__.py").is_file()}
    packed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {Path(package).name for package in packed if package.startswith("backends/")} == folders
    loaded = {
        point.partition(":")[0]
        for point in project["project"]["entry-points"]["rebalanser.backends"].values()
    }
    assert {module for module in loaded if not module.startswith("rebalanser.")} == folders


def test_benchmarks_import_what_there_is() -> None:
    """Nothing else reads them: they are run by hand, and types are not checked there."""
    missing = [
        f"{path.name}: {node.module}.{name.name}"
        for path in sorted((ROOT / "benchmarks").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rebalanser")
        for name in node.names
        if not hasattr(importlib.import_module(str(node.module)), name.name)
    ]
    assert missing == []


def test_dependencies_state_a_floor() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [
        item for group in project["dependency-groups"].values() for item in group if isinstance(item, str)
    ]
    extras = [item for extra in project["project"]["optional-dependencies"].values() for item in extra]
    named = [*project["project"]["dependencies"], *extras, *groups]
    packages = [item for item in named if isinstance(item, str) and not item.startswith("rebalanser[")]
    without = [item for item in packages if ">=" not in item]
    assert not without
