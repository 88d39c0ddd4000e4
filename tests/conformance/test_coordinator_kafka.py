"""A group in a log on Kafka keeps the contract of coordinators, on a real broker."""

from __future__ import annotations

import threading
import uuid
from typing import TYPE_CHECKING

import pytest

from rebalanser.admin import Admin
from rebalanser.errors import UnknownGroup
from rebalanser.registry.urls import parse_url
from rebalanser.runtime.clock import SystemClock
from rebalanser.testing.coordinator_suite import CoordinatorConformance, CoordinatorHarness
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_kafka import open_kafka

if TYPE_CHECKING:
    from rebalanser.registry import Coordinator


class KafkaHarness(CoordinatorHarness):
    """Groups on one broker; leases are counted by whoever is connected, so letting time pass is waiting."""

    can_hold_foreign = False  # keys are no records; tests/unit/test_replica.py reads what nobody can read
    min_ttl_s = 1.0

    def __init__(self, address: str) -> None:
        self._url = parse_url(f"kafka://{address}/conformance-{uuid.uuid4().hex}")
        self._clock = SystemClock()
        self._opened: list[Coordinator] = []

    def open(self, group: str = "group") -> Coordinator:
        coordinator = open_kafka(self._url, PATIENCE_S).open_group(
            group, self._clock.now, PATIENCE_S, PATIENCE_S
        )
        self._opened.append(coordinator)
        return coordinator

    def now(self) -> float:
        return self._clock.now()

    def let_pass(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def lose_history(self) -> None:
        for coordinator in self._opened:
            coordinator.forget_history()


@pytest.mark.rule("RB-4", "RB-5", "RB-6", "RB-15", "RB-16", "RB-20", "RB-28", "RB-33")
@pytest.mark.lesson(2, 4, 6, 10)
class TestKafka(CoordinatorConformance):
    @pytest.fixture
    def harness(self, kafka_address: str) -> CoordinatorHarness:
        return KafkaHarness(kafka_address)


@pytest.mark.rule("RB-46")
def test_whoever_only_looks_makes_no_topic(kafka_address: str) -> None:
    url = f"kafka://{kafka_address}/looks-{uuid.uuid4().hex}"
    for _ in range(2):
        with pytest.raises(UnknownGroup, match="there is no topic"):
            Admin("orders", url, create=False)
    with Admin("orders", url) as admin:
        admin.add("r1")
    with Admin("orders", url, create=False) as admin:
        assert [each.resource for each in admin.resources()] == ["r1"]
