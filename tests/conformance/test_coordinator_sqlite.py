"""A group in a SQLite file keeps the contract of coordinators."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import pytest

from rebalanser.registry import GroupKeys, RegistryCoordinator
from rebalanser.testing import FakeClock
from rebalanser.testing.coordinator_suite import (
    CoordinatorConformance,
    CoordinatorHarness,
    plant_foreign_keys,
)
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_sqlite import SqliteRegistry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rebalanser.registry import Coordinator


class SqliteHarness(CoordinatorHarness):
    """Groups in one file, whose leases are counted on a fake clock."""

    min_ttl_s = 1.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = FakeClock()
        self.opened: weakref.WeakSet[SqliteRegistry] = weakref.WeakSet()

    def registry(self) -> SqliteRegistry:
        registry = SqliteRegistry(self.path, clock=self.clock, boot_id="this boot")
        self.opened.add(registry)
        return registry

    def open(self, group: str = "group") -> Coordinator:
        return RegistryCoordinator(self.registry(), "root", group, self.clock.now, PATIENCE_S)

    def now(self) -> float:
        return self.clock.now()

    def let_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for registry in self.opened:
            registry.wake()

    def lose_history(self) -> None:
        registry = self.registry()
        revision = (
            RegistryCoordinator(registry, "root", "any", self.clock.now, PATIENCE_S).read().group.revision
        )
        registry.forget_history(revision + 1)
        registry.close()

    def plant_foreign(self) -> Callable[[], bool]:
        return plant_foreign_keys(self.registry, GroupKeys("root", "group"))


@pytest.mark.rule("RB-4", "RB-5", "RB-6", "RB-15", "RB-16", "RB-20", "RB-28", "RB-33")
@pytest.mark.lesson(2, 4, 6, 10)
class TestSqlite(CoordinatorConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> CoordinatorHarness:
        return SqliteHarness(tmp_path / "groups.db")
