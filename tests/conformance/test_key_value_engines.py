"""The engine on registries of keys and values keeps the contract of engines, in memory and on a real etcd."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest
from rebalanser_etcd import open_etcd

from rebalanser.registry.urls import parse_url
from rebalanser.tasks.key_value import KeyValueEngine
from rebalanser.testing import FakeClock, MemoryRegistry, MemoryStore
from rebalanser.testing.engine_suite import EngineHarness, EngineSuite
from rebalanser.testing.waiting import PATIENCE_S

if TYPE_CHECKING:
    from rebalanser.tasks.engine import Engine
    from rebalanser.testing.etcd_server import EtcdCluster


class MemoryHarness(EngineHarness):
    """Engines on one memory store."""

    def __init__(self) -> None:
        self._store = MemoryStore(FakeClock())

    def open(self) -> Engine:
        return KeyValueEngine(MemoryRegistry(self._store), "tasks")

    def lose_history(self, revision: int) -> None:
        self._store.compact(revision)


class EtcdHarness(EngineHarness):
    """Engines on one server, under a root of the test's own."""

    def __init__(self, server: EtcdCluster) -> None:
        self._server = server
        self._root = f"engines/{uuid.uuid4().hex}"

    def open(self) -> Engine:
        return KeyValueEngine(open_etcd(parse_url(self._server.url()), PATIENCE_S), self._root)

    def lose_history(self, revision: int) -> None:
        self._server.call("/v3/kv/compaction", {"revision": str(revision), "physical": True})


class TestMemory(EngineSuite):
    @pytest.fixture
    def harness(self) -> EngineHarness:
        return MemoryHarness()


class TestEtcd(EngineSuite):
    @pytest.fixture
    def harness(self, etcd: EtcdCluster) -> EngineHarness:
        return EtcdHarness(etcd)
