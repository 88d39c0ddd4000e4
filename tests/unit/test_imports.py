"""A plain ``import rebalanser`` stays cheap: it loads what a group needs and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
import typer

import rebalanser
from rebalanser.cli.app import application, overview

ON_DEMAND = {"croniter", "rich", "structlog", "typer"}
"""Packages that are loaded when a group, or a command, first needs them."""
FOR_A_GROUP = {
    "rebalanser",
    "rebalanser.core",
    "rebalanser.errors",
    "rebalanser.folders",
    "rebalanser.forks",
    "rebalanser.group",
    "rebalanser.observer",
    "rebalanser.redaction",
    "rebalanser.registry",
    "rebalanser.runtime",
    "rebalanser.settings",
}
"""The modules and packages of our own that a group may load."""


def _loaded_by(statement: str) -> set[str]:
    """Modules that a fresh interpreter has after a statement."""
    program = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(ran.stdout.splitlines()[-1]))


def _own(loaded: set[str]) -> set[str]:
    """The modules and packages directly below the package, and itself."""
    return {".".join(name.split(".")[:2]) for name in loaded if name.split(".")[0] == "rebalanser"}


def test_importing_the_package_loads_nothing_else_of_it() -> None:
    loaded = _loaded_by("import rebalanser")
    assert _own(loaded) == {"rebalanser"}
    assert not loaded & {*ON_DEMAND, "pydantic"}


def test_a_group_loads_what_it_needs_and_nothing_else() -> None:
    loaded = _loaded_by("from rebalanser import Group, Owned, Settings")
    assert _own(loaded) == FOR_A_GROUP
    assert not loaded & ON_DEMAND


def test_a_group_that_runs_can_log_without_importing_first() -> None:
    loaded = _loaded_by(
        "from rebalanser import Group; group = Group('imports', 'memory://imports'); "
        "group.on_start(print); group.on_stop(print); group.start(); group.stop()"
    )
    assert "structlog" in loaded
    assert "rebalanser.history" not in loaded


def test_names_that_a_group_does_without_are_loaded_on_first_use() -> None:
    loaded = _loaded_by("from rebalanser import AsyncGroup, ResourceFeed")
    assert {"rebalanser.async_group", "rebalanser.feed"} <= loaded


def test_every_public_name_is_listed_and_found() -> None:
    found = _loaded_by(
        "import rebalanser; assert set(rebalanser.__all__) <= set(dir(rebalanser)); from rebalanser import *"
    )
    assert "rebalanser.feed" in found


@pytest.mark.parametrize("package", ["errors", "history", "neli", "shiva", "tasks", "testing"])
def test_a_public_package_is_found_without_importing_it_first(package: str) -> None:
    loaded = _loaded_by(
        f"import rebalanser; assert {package!r} in dir(rebalanser); assert rebalanser.{package}.__doc__"
    )
    assert f"rebalanser.{package}" in loaded


@pytest.mark.parametrize("package", ["audit", "tasks", "testing"])
def test_a_package_lists_names_that_it_loads_later(package: str) -> None:
    _loaded_by(f"import rebalanser.{package} as its; assert set(its.__all__) <= set(dir(its))")


def test_the_version_is_that_of_the_installed_package() -> None:
    assert rebalanser.__version__ == metadata.version("rebalanser")
    assert "__version__" in dir(rebalanser)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = rebalanser.nonsense  # type: ignore[attr-defined]


def test_a_command_loads_no_other_command() -> None:
    loaded = _loaded_by("from rebalanser.cli import main; main(['status', '--help'])")
    assert "rebalanser.cli.groups" in loaded
    others = {"audit", "check", "feed", "history", "neli", "plan", "run", "shiva", "tasks"}
    assert not loaded & {f"rebalanser.cli.{other}" for other in others}


@pytest.mark.parametrize("arguments", [["--help"], ["statos"]])
def test_the_help_of_all_commands_loads_none(arguments: list[str]) -> None:
    loaded = _loaded_by(f"from rebalanser.cli import main; main({arguments})")
    own = {"rebalanser.cli.app", "rebalanser.cli.commands"}
    assert {name for name in loaded if name.startswith("rebalanser.cli.")} == own
    assert "rebalanser.core.group" not in loaded


def test_a_state_in_plain_lines_loads_no_tables() -> None:
    loaded = _loaded_by("from rebalanser.cli import main; main(['status', 'g', '--registry', 'memory://g'])")
    assert "rebalanser.state" in loaded
    assert not loaded & {"rich", "structlog"}


def test_the_help_of_all_commands_says_what_each_command_says() -> None:
    def summaries(app: typer.Typer) -> dict[str, str]:
        group: Any = typer.main.get_command(app)
        return {name: command.get_short_help_str(1000) for name, command in group.commands.items()}

    assert summaries(overview()) == summaries(application())


def test_what_hooks_and_operators_get_has_public_names() -> None:
    assert rebalanser.Fact(rebalanser.FactKind.JOINED, "n-1").kind == "joined"
    assert rebalanser.Mode("eager") is rebalanser.Mode.EAGER
    assert "balanced" in rebalanser.GroupState.model_fields


def test_etcd_loads_what_few_need_when_it_is_asked_for() -> None:
    loaded = _loaded_by(
        "from rebalanser.registry import parse_url; from rebalanser_etcd.registry import connect_etcd; "
        "connect_etcd(parse_url('etcd://127.0.0.1:1/')).close()"
    )
    assert "rebalanser_etcd.endpoints" in loaded
    assert not {name.partition(".")[0] for name in loaded} & {"cryptography", "dns"}
