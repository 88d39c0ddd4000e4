"""A group in the memory registry keeps the contract of coordinators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rebalanser.registry import GroupKeys, RegistryCoordinator
from rebalanser.testing import FakeClock, MemoryRegistry, MemoryStore
from rebalanser.testing.coordinator_suite import (
    CoordinatorConformance,
    CoordinatorHarness,
    plant_foreign_keys,
)
from rebalanser.testing.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from rebalanser.registry import Coordinator


class MemoryHarness(CoordinatorHarness):
    """Groups in one memory store on a fake clock."""

    min_ttl_s = 1.0

    def __init__(self, proves_renewals: bool = True) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(self.clock)
        self.store.proves_renewals = proves_renewals

    def open(self, group: str = "group") -> Coordinator:
        return RegistryCoordinator(MemoryRegistry(self.store), "root", group, self.clock.now, PATIENCE_S)

    def now(self) -> float:
        return self.clock.now()

    def let_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.store.expire()

    def lose_history(self) -> None:
        self.store.compact(self.store.revision + 1)

    def plant_foreign(self) -> Callable[[], bool]:
        return plant_foreign_keys(lambda: MemoryRegistry(self.store), GroupKeys("root", "group"))


@pytest.mark.rule("RB-4", "RB-5", "RB-6", "RB-15", "RB-16", "RB-20", "RB-28", "RB-33")
@pytest.mark.lesson(2, 4, 6, 10)
class TestMemory(CoordinatorConformance):
    @pytest.fixture
    def harness(self) -> CoordinatorHarness:
        return MemoryHarness()


class TestMemoryInTwoSteps(TestMemory):
    """A store that renews a lease in one step and proves it in another."""

    @pytest.fixture
    def harness(self) -> CoordinatorHarness:
        return MemoryHarness(proves_renewals=False)
