"""What users get: the built wheel, alone in a clean environment without extras.

In an editable checkout ``import backends`` works by accident and every extra is there; here nothing is.
"""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import rebalanser
from rebalanser.testing.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True, slots=True)
class Installed:
    """A clean environment with the wheel in it."""

    wheel: Path
    bin: Path
    folder: Path

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in a folder that has nothing of the checkout."""
        program, *arguments = command
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "LANG": "C.UTF-8"}
        return subprocess.run(
            [self.bin / program, *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run Python code, with warnings as errors."""
        return self.run("python", "-W", "error", "-c", code)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel, built from the checkout and installed without extras."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT], check=True)
    (wheel,) = folder.glob("rebalanser-*.whl")
    venv.create(folder / "clean", with_pip=False)
    python = folder / "clean" / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", wheel], check=True)
    (folder / "elsewhere").mkdir()
    return Installed(wheel, python.parent, folder / "elsewhere")


def test_holds_the_packages_and_nothing_else(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        names = archive.namelist()
    packages = {"rebalanser", "rebalanser_etcd", "rebalanser_kafka", "rebalanser_sqlite"}
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == packages
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.parametrize("folder", ["backends", "benchmarks", "docs", "examples", "tests"])
def test_folders_of_the_checkout_are_no_modules(installed: Installed, folder: str) -> None:
    result = installed.python(f"import {folder}")
    assert f"ModuleNotFoundError: No module named {folder!r}" in result.stderr


def test_public_names_are_there(installed: Installed) -> None:
    result = installed.python("import rebalanser; print(*rebalanser.__all__)")
    assert result.stdout.split() == list(rebalanser.__all__), result.stderr


def test_modules_import_without_extras_and_test_packages(installed: Installed) -> None:
    result = installed.python(
        "import importlib, pkgutil, rebalanser, rebalanser_sqlite\n"
        "for package in (rebalanser, rebalanser_sqlite):\n"
        "    found = pkgutil.walk_packages(package.__path__, package.__name__ + '.', lambda name: None)\n"
        "    for module in found:\n"
        "        needs_spark = module.name.startswith('rebalanser.audit') or module.name.endswith('.large')\n"
        "        needs_web = module.name.startswith('rebalanser.tasks.http.')\n"
        "        if not (needs_spark or needs_web) and not module.name.endswith(('_suite', '__main__')):\n"
        "            importlib.import_module(module.name)\n"
    )
    assert result.returncode == 0, result.stderr


def test_the_audit_names_its_extra(installed: Installed) -> None:
    assert "pip install 'rebalanser[spark]'" in installed.python("import rebalanser.audit").stderr
    told = installed.run("rebalanser", "audit", ".")
    assert (told.returncode, told.stdout) == (3, "")
    assert told.stderr.startswith("error: the audit needs ")


def test_group_works_on_sqlite(installed: Installed) -> None:
    result = installed.python(
        "import rebalanser\n"
        "url = 'sqlite:///smoke.db'\n"
        "def member(node):\n"
        "    group = rebalanser.Group('orders', url, node=node)\n"
        "    group.on_start(lambda owned: None)\n"
        "    group.on_stop(lambda owned: None)\n"
        "    return group\n"
        "with rebalanser.Admin('orders', url) as admin:\n"
        "    admin.add(*'abcd')\n"
        "    with member('one') as one, member('two') as two:\n"
        "        admin.wait_balanced(timeout_s=30)\n"
        "        print(len(one.resources), len(two.resources))\n"
    )
    assert result.stdout.split() == ["2", "2"], result.stderr


def test_command_line_helps(installed: Installed) -> None:
    result = installed.run("rebalanser", "--help")
    assert result.returncode == 0, result.stderr
    assert "resources" in result.stdout


def test_command_line_works_on_sqlite(installed: Installed) -> None:
    registry = "sqlite:///command-line.db"
    added = installed.run("rebalanser", "resources", "add", "orders", "a", "b", "--registry", registry)
    assert added.returncode == 0, added.stderr
    listed = installed.run("rebalanser", "resources", "list", "orders", "--registry", registry, "--json")
    assert '"a"' in listed.stdout, listed.stderr


def test_missing_extra_is_named_in_one_line(installed: Installed) -> None:
    result = installed.run("rebalanser", "status", "orders", "--registry", "etcd://127.0.0.1:2379")
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    (line,) = result.stderr.splitlines()
    assert "pip install 'rebalanser[etcd]'" in line


def test_unknown_scheme_is_answered_with_the_known_ones(installed: Installed) -> None:
    result = installed.run("rebalanser", "status", "orders", "--registry", "nonsense://127.0.0.1:1")
    (line,) = result.stderr.splitlines()
    assert "sqlite" in line
    assert result.returncode != 0
