"""The running applications of a cluster as the resources of groups, on a real broker (SH-19)."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import closing

import pytest

from rebalanser import Admin, Group, Owned, Settings
from rebalanser.core.shiva.records import AssignmentDocument
from rebalanser.core.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationState,
    Archive,
    Epoch,
    Mode,
)
from rebalanser.feed import Applications, ClusterSource, ResourceFeed
from rebalanser.registry.urls import parse_url
from rebalanser.shiva.cluster import TopicNames, open_cluster
from rebalanser.testing.kafka_server import KafkaCluster
from rebalanser.testing.waiting import PATIENCE_S, wait_until
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.group.replica import FED_BY, FEEDER
from rebalanser_kafka.log import LogReader, LogWriter
from rebalanser_kafka.shiva import topics as shiva_topics
from rebalanser_kafka.shiva.wire import ASSIGNEMENT_KEY, encode

pytestmark = pytest.mark.rule("SH-19")


class ShivaLeader:
    """Writes assignment documents as the leader of a cluster does."""

    def __init__(self, url: str) -> None:
        self._connection = Connection.from_url(parse_url(url))
        self._names = TopicNames().of(self._connection.cluster)
        shiva_topics.ensure(self._connection, self._names, PATIENCE_S)

    def publish(self, epoch: tuple[int, int], *running: str, stopping: str | None = None) -> None:
        states = dict.fromkeys(running, ApplicationState.RUNNING)
        if stopping is not None:
            states[stopping] = ApplicationState.STOPPING
        entries = {
            ApplicationId.parse(name): ApplicationEntry("c", state, Mode.AVAILABLE, Archive("0" * 64, 1, 1))
            for name, state in states.items()
        }
        document = AssignmentDocument(Epoch(*epoch), "leader", 0, 1.0, applications=entries)
        key, value = ASSIGNEMENT_KEY.encode(), encode(document)
        with LogWriter(self._connection) as writer:
            writer.append_and_wait(self._names.assignement, key, value, timeout_s=PATIENCE_S)


@pytest.fixture
def url(kafka: KafkaCluster) -> str:
    return kafka.url(f"feed-{uuid.uuid4().hex}")


@pytest.fixture
def leader(url: str) -> ShivaLeader:
    return ShivaLeader(url)


@pytest.fixture
def admin(url: str) -> Iterator[Admin]:
    with Admin("orders", url, timeout_s=PATIENCE_S) as opened:
        yield opened


def marks(admin: Admin) -> dict[str, dict[str, str]]:
    return {each.resource: each.attributes for each in admin.resources()}


FED = {FED_BY: FEEDER}


def test_the_handlers_of_a_host_application_receive_what_runs(
    url: str, leader: ShivaLeader, admin: Admin
) -> None:
    leader.publish((1, 1), "t/c/a", "t/c/b")
    admin.add("own")
    owned: set[str] = set()
    lock = threading.Lock()
    settings = Settings(lease_ttl_s=2.0, min_rebalance_interval_s=0.0)
    group = Group("orders", url, node="n", settings=settings)

    @group.on_start
    def start(arrived: list[Owned]) -> None:
        with lock:
            owned.update(each.resource for each in arrived)

    @group.on_stop
    def stop(left: list[Owned]) -> None:
        with lock:
            owned.difference_update(each.resource for each in left)

    with group:
        wait_until(lambda: set(owned) == {"own", "t/c/a", "t/c/b"})
        leader.publish((1, 2), "t/c/b", "t/c/d", stopping="t/c/a")
        wait_until(lambda: set(owned) == {"own", "t/c/b", "t/c/d"})
        assert marks(admin) == {"own": {}, "t/c/b": FED, "t/c/d": FED}


def test_an_operator_sees_what_runs_though_no_node_does(leader: ShivaLeader, admin: Admin) -> None:
    assert marks(admin) == {}
    leader.publish((1, 1), "t/c/a")
    assert marks(admin) == {"t/c/a": FED}
    leader.publish((1, 2))
    assert marks(admin) == {}


def test_a_cluster_without_applications_feeds_nothing(admin: Admin) -> None:
    admin.add("own")
    assert marks(admin) == {"own": {}}


def test_a_source_follows_the_topic_and_does_not_ask_for_its_end(
    url: str, leader: ShivaLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader.publish((1, 1), "t/c/a")
    source = ClusterSource(open_cluster(url, PATIENCE_S), PATIENCE_S)
    asked: list[str] = []
    end_offset = LogReader.end_offset

    def ask(reader: LogReader, timeout_s: float) -> int:
        asked.append(reader.topic)
        return end_offset(reader, timeout_s)

    with closing(source):
        assert source.read(PATIENCE_S) == Applications((1, 1), frozenset({"t/c/a"}))
        assert not source.wait(0.0)
        monkeypatch.setattr(LogReader, "end_offset", ask)
        assert not source.wait(0.0)
        leader.publish((1, 2), "t/c/b")
        assert source.wait(PATIENCE_S)
        assert asked == []
        assert source.read(PATIENCE_S) == Applications((1, 2), frozenset({"t/c/b"}))


def test_a_feed_keeps_a_group_elsewhere_equal_to_what_runs(url: str, leader: ShivaLeader) -> None:
    target = f"memory://{uuid.uuid4().hex}"
    with Admin("orders", target, timeout_s=PATIENCE_S) as admin, ResourceFeed(url, "orders", target):
        leader.publish((1, 1), "t/c/a", "t/c/b")
        wait_until(lambda: set(marks(admin)) == {"t/c/a", "t/c/b"})
        leader.publish((1, 2), "t/c/b")
        wait_until(lambda: set(marks(admin)) == {"t/c/b"})
