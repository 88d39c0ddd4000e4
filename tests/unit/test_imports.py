"""A plain ``import rebalanser`` stays cheap: it loads what a group needs and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import rebalanser

ON_DEMAND = {
    "croniter",
    "rebalanser.applications",
    "rebalanser.async_group",
    "rebalanser.cli",
    "rebalanser.feed",
    "rebalanser.history",
    "rebalanser.neli",
    "rebalanser.roles",
    "rebalanser.shiva",
    "rebalanser.state",
    "rebalanser.tasks",
    "rebalanser.testing",
    "rich.live",
    "typer",
}
ROOMS = {
    "rebalanser",
    "rebalanser.admin",
    "rebalanser.allocation",
    "rebalanser.errors",
    "rebalanser.group",
    "rebalanser.observing",
    "rebalanser.protocol",
    "rebalanser.redaction",
    "rebalanser.registry",
    "rebalanser.runtime",
    "rebalanser.settings",
}
"""The modules and packages of our own that ``import rebalanser`` may load."""


def _loaded_by(statement: str) -> set[str]:
    """Modules that a fresh interpreter has after a statement."""
    program = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(ran.stdout.splitlines()[-1]))


def test_importing_the_package_loads_what_a_group_needs() -> None:
    loaded = _loaded_by("import rebalanser")
    rooms = {".".join(name.split(".")[:2]) for name in loaded if name.split(".")[0] == "rebalanser"}
    assert rooms == ROOMS
    assert not loaded & ON_DEMAND


def test_names_that_a_group_does_without_are_loaded_on_first_use() -> None:
    loaded = _loaded_by("from rebalanser import AsyncGroup, ResourceFeed")
    assert {"rebalanser.async_group", "rebalanser.feed"} <= loaded


def test_every_public_name_is_listed_and_found() -> None:
    found = _loaded_by(
        "import rebalanser; assert set(rebalanser.__all__) <= set(dir(rebalanser)); from rebalanser import *"
    )
    assert "rebalanser.feed" in found


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = rebalanser.nonsense  # type: ignore[attr-defined]


def test_a_command_loads_no_other_command() -> None:
    loaded = _loaded_by("from rebalanser.cli import main; main(['status', '--help'])")
    assert "rebalanser.cli.state" in loaded
    others = {"audit", "check", "feed", "history", "neli", "resources", "run", "shiva", "tasks"}
    assert not loaded & {f"rebalanser.cli.{other}" for other in others}
