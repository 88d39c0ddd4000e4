"""The memory registry keeps the contract of registries."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from rebalanser.testing import FakeClock, MemoryRegistry, MemoryStore
from rebalanser.testing.registry_suite import RegistryConformance, RegistryHarness

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rebalanser.registry.contract import Registry


class MemoryHarness(RegistryHarness):
    """Connections to one memory store on a fake clock."""

    can_be_replaced = False  # a connection holds the store itself
    prefix = "conformance/"
    min_ttl_s = 1.0

    def __init__(self, make: type[MemoryStore] = MemoryStore, proves_renewals: bool = True) -> None:
        self.clock = FakeClock()
        self.store = make(self.clock)
        self.store.proves_renewals = proves_renewals
        self.opened: list[MemoryRegistry] = []

    def open(self) -> Registry:
        self.opened.append(MemoryRegistry(self.store))
        return self.opened[-1]

    @contextmanager
    def cut_answers(self) -> Iterator[None]:
        for registry in self.opened:
            registry.loses_answers = True
        yield
        for registry in self.opened:
            registry.loses_answers = False

    def let_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.store.expire()

    def lose_history(self, revision: int) -> None:
        self.store.compact(revision)

    def restart(self) -> None:
        self.store.restart()


@pytest.mark.rule("RB-20", "RB-21", "RB-28", "RB-33")
@pytest.mark.lesson(16)
class TestMemory(RegistryConformance):
    @pytest.fixture
    def harness(self) -> RegistryHarness:
        return MemoryHarness()


class TestMemoryInTwoSteps(TestMemory):
    """A store that renews a lease in one step and proves it in another."""

    @pytest.fixture
    def harness(self) -> RegistryHarness:
        return MemoryHarness(proves_renewals=False)
