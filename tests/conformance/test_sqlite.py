"""The SQLite registry keeps the contract of registries."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import pytest
from rebalanser_sqlite import SqliteRegistry

from rebalanser.testing import FakeClock
from rebalanser.testing.registry_suite import RegistryConformance, RegistryHarness

if TYPE_CHECKING:
    from pathlib import Path

    from rebalanser.registry.contract import Registry


class SqliteHarness(RegistryHarness):
    """Connections to one file, whose leases are counted on a fake clock."""

    can_restart = False  # there is no server; tests/unit/test_sqlite_registry.py opens the file again
    prefix = "conformance/"
    min_ttl_s = 1.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = FakeClock()
        self.opened: weakref.WeakSet[SqliteRegistry] = weakref.WeakSet()

    def open(self) -> Registry:
        registry = SqliteRegistry(self.path, clock=self.clock, boot_id="this boot")
        self.opened.add(registry)
        return registry

    def let_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for registry in self.opened:
            registry.wake()

    def lose_history(self, revision: int) -> None:
        with_it = SqliteRegistry(self.path, clock=self.clock, boot_id="this boot")
        with_it.forget_history(revision)
        with_it.close()


@pytest.mark.rule("RB-20", "RB-21", "RB-28", "RB-33")
@pytest.mark.lesson(16)
class TestSqlite(RegistryConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> RegistryHarness:
        return SqliteHarness(tmp_path / "groups.db")
