"""A group in etcd keeps the contract of coordinators, on a real server."""

from __future__ import annotations

import threading
import uuid
from typing import TYPE_CHECKING

import pytest

from rebalanser.registry import GroupKeys, RegistryCoordinator
from rebalanser.registry.urls import parse_url
from rebalanser.runtime.clock import SystemClock
from rebalanser.testing.coordinator_suite import (
    CoordinatorConformance,
    CoordinatorHarness,
    plant_foreign_keys,
)
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_etcd import open_etcd

if TYPE_CHECKING:
    from collections.abc import Callable

    from rebalanser.registry import Coordinator
    from rebalanser.testing.etcd_server import EtcdCluster
    from rebalanser_etcd import EtcdRegistry


class EtcdHarness(CoordinatorHarness):
    """Groups on one server; time is the server's own, so letting it pass is waiting."""

    min_ttl_s = 1.0

    def __init__(self, server: EtcdCluster) -> None:
        self._server = server
        self._root = f"conformance/{uuid.uuid4().hex}"
        self._clock = SystemClock()

    def open(self, group: str = "group") -> Coordinator:
        return RegistryCoordinator(self._connect(), self._root, group, self._clock.now, PATIENCE_S)

    def now(self) -> float:
        return self._clock.now()

    def let_pass(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def lose_history(self) -> None:
        reading = self._server.call("/v3/kv/range", {"key": "MA=="})
        revision = reading["header"]["revision"]
        self._server.call("/v3/kv/compaction", {"revision": revision, "physical": True})

    def plant_foreign(self) -> Callable[[], bool]:
        return plant_foreign_keys(self._connect, GroupKeys(self._root, "group"))

    def _connect(self) -> EtcdRegistry:
        return open_etcd(parse_url(self._server.url()), PATIENCE_S)


@pytest.mark.rule("RB-4", "RB-5", "RB-6", "RB-15", "RB-16", "RB-20", "RB-28", "RB-33")
@pytest.mark.lesson(2, 4, 6, 10)
class TestEtcd(CoordinatorConformance):
    @pytest.fixture
    def harness(self, etcd: EtcdCluster) -> CoordinatorHarness:
        return EtcdHarness(etcd)
