"""Groups in a log on a real broker that is stopped, killed, flooded, shortened and made anew.

What processes that are killed or paused do to such a group is tested with those of the other registries.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import pairwise

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from rebalanser import Admin, Group, Owned, Settings
from rebalanser.core.group.messages import Alive, Heartbeat, Join, Joined, SessionLost
from rebalanser.core.group.types import Member, Session, Topic, TopicKind
from rebalanser.errors import InvalidSettings, RegistryUnavailable
from rebalanser.registry.urls import parse_url
from rebalanser.runtime.clock import SystemClock
from rebalanser.testing.coordinator_suite import NoticeRecorder
from rebalanser.testing.kafka_server import KafkaCluster
from rebalanser.testing.waiting import PATIENCE_S, patience_ratio, wait_until
from rebalanser_kafka import open_kafka
from rebalanser_kafka.group.coordinator import SNAPSHOT_RECORDS, LogCoordinator
from rebalanser_kafka.group.log import topic_of
from rebalanser_kafka.group.records import Expire, UnreadableValue, decode
from rebalanser_kafka.log import LogReader, LogWriter

TTL_S = 2.0
RESOURCES = tuple(f"r{number}" for number in range(6))
SHUTDOWN_S = 5.0
"""A broker that is told to stop goes on serving for a while."""
CLOCK = SystemClock()


class Owners:
    """What the nodes of one process own, and what must not have happened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.owners: dict[str, str] = {}
        self.tokens: dict[str, list[tuple[int, str]]] = {}
        self.overlaps: list[str] = []
        self.stopped_at: list[float] = []

    def group(self, url: str, node: str) -> Group:
        """A node whose handlers tell of what it owns."""
        settings = Settings(lease_ttl_s=TTL_S, min_rebalance_interval_s=0.0)
        group = Group("orders", url, node=node, settings=settings)

        @group.on_start
        def start(owned: list[Owned]) -> None:
            with self._lock:
                for each in owned:
                    if each.resource in self.owners:
                        self.overlaps.append(f"{each.resource}: {self.owners[each.resource]} and {node}")
                    self.owners[each.resource] = node
                    self.tokens.setdefault(each.resource, []).append((each.token, node))

        @group.on_stop
        def stop(owned: list[Owned]) -> None:
            with self._lock:
                self.stopped_at.append(CLOCK.now())
                for each in owned:
                    self.owners.pop(each.resource, None)

        return group

    def check(self) -> None:
        """No resource had two owners, and its tokens grew from owner to owner (RB-1, RB-12).

        A node whose barrier nobody took away meanwhile begins again with the token that it had.
        """
        assert self.overlaps == []
        for tokens in self.tokens.values():
            assert all(earlier[0] < later[0] or earlier == later for earlier, later in pairwise(tokens)), (
                tokens
            )


@pytest.fixture
def url(kafka: KafkaCluster) -> str:
    return kafka.url(f"faults-{uuid.uuid4().hex}")


@pytest.fixture
def topic(url: str) -> str:
    return topic_of(parse_url(url).root, "orders")


@pytest.fixture
def owners() -> Owners:
    return Owners()


Connect = Callable[[], LogCoordinator]


@pytest.fixture
def connect(url: str) -> Iterator[Connect]:
    """Opens connections that are closed when the test ends."""
    with ExitStack() as stack:

        def opened() -> LogCoordinator:
            groups = stack.enter_context(closing(open_kafka(parse_url(url), PATIENCE_S)))
            return stack.enter_context(closing(groups.open_group("orders", CLOCK.now, 5.0, 10.0)))

        yield opened


def join(coordinator: LogCoordinator, ttl_s: float = 60.0) -> Session:
    """Register a member."""
    outcome = coordinator.perform(Join(Member(uuid.uuid4().hex, "node"), ttl_s))
    assert isinstance(outcome, Joined)
    return outcome.session


def flood(url: str, topic: str, records: int) -> None:
    """Write what no Rebalanser writes."""
    written = threading.Semaphore(0)
    with LogWriter(open_kafka(parse_url(url), PATIENCE_S).connection) as writer:
        for number in range(records):
            writer.append(topic, None, b"%d bottles" % number, on_done=lambda _done: written.release())
            if number >= 1000:
                written.acquire()


def log_start(url: str, topic: str) -> int:
    with LogReader(open_kafka(parse_url(url), PATIENCE_S).connection, topic, "earliest") as reader:
        return reader.bounds(PATIENCE_S)[0]


@pytest.mark.rule("RB-1", "RB-12", "RB-21", "RB-22", "RB-28")
@pytest.mark.parametrize(("how", "away_s"), [("stopped", 20.0), ("killed", 1.5 * TTL_S)])
def test_owners_stop_while_the_broker_is_away_and_join_again(
    kafka: KafkaCluster, url: str, owners: Owners, how: str, away_s: float
) -> None:
    with Admin("orders", url, timeout_s=PATIENCE_S) as admin, ExitStack() as stack:
        admin.add(RESOURCES)
        for node in ("a", "b"):
            stack.enter_context(owners.group(url, node))
        admin.wait_balanced(PATIENCE_S)
        gone_at = CLOCK.now()
        if how == "stopped":
            kafka.stop_broker(0)
        else:
            kafka.kill(0)
        wait_until(lambda: not owners.owners)
        assert max(owners.stopped_at) <= gone_at + TTL_S + SHUTDOWN_S
        threading.Event().wait(max(0.0, away_s - (CLOCK.now() - gone_at)))
        kafka.restart(0)
        wait_until(lambda: set(owners.owners) == set(RESOURCES))
        admin.wait_balanced(PATIENCE_S)
    owners.check()


@pytest.mark.rule("RB-1", "RB-28")
def test_a_broker_killed_and_restarted_at_once_loses_nothing(
    kafka: KafkaCluster, url: str, connect: Connect
) -> None:
    first = connect()
    session = join(first)
    kafka.restart(0)

    def beats() -> bool:
        return isinstance(first.perform(Heartbeat(session)), Alive)

    wait_until(beats)
    assert set(connect().read().group.members) == {session.node}


@pytest.mark.rule("RB-1", "RB-12", "RB-28")
def test_the_broker_that_leads_the_log_is_killed(kafka_cluster: KafkaCluster, owners: Owners) -> None:
    url = kafka_cluster.url(f"faults-{uuid.uuid4().hex}")
    topic = topic_of(parse_url(url).root, "orders")
    with Admin("orders", url, timeout_s=PATIENCE_S) as admin, ExitStack() as stack:
        admin.add(RESOURCES)
        for node in ("a", "b"):
            stack.enter_context(owners.group(url, node))
        admin.wait_balanced(PATIENCE_S)
        client = AdminClient(kafka_cluster.client_settings)
        leader = client.list_topics(topic, timeout=PATIENCE_S).topics[topic].partitions[0].leader
        kafka_cluster.kill(leader)
        stack.callback(kafka_cluster.restart, leader)
        admin.add("another")
        wait_until(lambda: set(owners.owners) == {*RESOURCES, "another"})
        admin.wait_balanced(PATIENCE_S)
    owners.check()


@pytest.mark.rule("RB-12", "RB-28")
def test_a_log_is_shortened_by_snapshots_while_nodes_run(url: str, topic: str, owners: Owners) -> None:
    with Admin("orders", url, timeout_s=PATIENCE_S) as admin, ExitStack() as stack:
        admin.add(RESOURCES)
        stack.enter_context(owners.group(url, "a"))
        stack.enter_context(owners.group(url, "b"))
        admin.wait_balanced(PATIENCE_S)
        before = {each.resource: each.token for each in admin.resources()}
        flood(url, topic, SNAPSHOT_RECORDS + 500)
        wait_until(lambda: log_start(url, topic) > SNAPSHOT_RECORDS)
        assert {each.resource: each.token for each in admin.resources()} == before
        with Admin("orders", url, timeout_s=PATIENCE_S) as late:
            assert {each.resource: each.token for each in late.resources()} == before
        stack.enter_context(owners.group(url, "c"))
        state = admin.wait_balanced(PATIENCE_S)
        assert {node.label: node.held for node in state.nodes} == {"a": 2, "b": 2, "c": 2}
        moved = {each.resource: each.token for each in state.resources if each.owner == "c"}
        assert all((token or 0) > (before[resource] or 0) for resource, token in moved.items())
    owners.check()


@pytest.mark.rule("RB-20")
def test_two_connections_that_end_the_same_lease_end_it_once(url: str, topic: str, connect: Connect) -> None:
    watcher, second = connect(), connect()
    notices = NoticeRecorder(PATIENCE_S)
    session = join(connect(), ttl_s=1.0)
    watcher.watch("", {Topic(TopicKind.NODE, session.node): session.created + 1}, notices)
    (ended,) = notices.wait_for(TopicKind.NODE, session.created + 1)
    again = join(second, ttl_s=60.0)
    for each in (watcher, second):
        each._say(Expire(session.lease, session.lease))
    assert set(watcher.read().group.members) == {again.node}
    assert isinstance(second.perform(Heartbeat(again)), Alive)
    assert notices.of(TopicKind.NODE) == [ended]
    said = [wish for wish in wishes(url, topic) if isinstance(wish, Expire)]
    assert {wish.lease for wish in said} == {session.lease}


def wishes(url: str, topic: str) -> list[object]:
    """All that stands in the log and can be read."""
    found: list[object] = []
    with LogReader(
        open_kafka(parse_url(url), PATIENCE_S).connection, topic, 0, committed_only=False
    ) as reader:
        end = reader.end_offset(PATIENCE_S)
        while reader.position < end:
            for record in reader.poll(1.0):
                try:
                    found.append(decode(record.value).wish)
                except UnreadableValue:
                    continue
    return found


def test_what_cannot_be_read_is_set_aside_by_all_alike(url: str, topic: str, connect: Connect) -> None:
    first, second = connect(), connect()
    session = join(first)
    flood(url, topic, 3)
    assert isinstance(first.perform(Heartbeat(session)), Alive)
    views = [each.read() for each in (first, second, connect())]
    assert all(set(view.group.members) == {session.node} for view in views)
    assert all(view.group == views[0].group for view in views)


@pytest.mark.rule("RB-12", "RB-22")
def test_a_topic_made_anew_ends_all_sessions_and_goes_on_with_greater_tokens(
    kafka: KafkaCluster, url: str, topic: str, connect: Connect
) -> None:
    coordinator = connect()
    session = join(coordinator)
    for _ in range(20):
        coordinator.read()
    admin = AdminClient(kafka.client_settings)
    (deleted,) = admin.delete_topics([topic]).values()
    deleted.result(PATIENCE_S)

    # For a moment after the answer the broker may still take and show records of the old topic.
    wait_until(lambda: isinstance(coordinator.perform(Heartbeat(session)), SessionLost))
    assert join(coordinator).created > session.created
    assert isinstance(coordinator.perform(Heartbeat(session)), SessionLost)


@pytest.mark.rule("RB-28")
def test_a_topic_that_would_lose_records_is_refused(kafka: KafkaCluster, url: str, topic: str) -> None:
    admin = AdminClient(kafka.client_settings)
    (made,) = admin.create_topics([NewTopic(topic, 1, 1)]).values()
    made.result(PATIENCE_S)
    with pytest.raises(InvalidSettings, match=r"retention.ms is \d+, wanted -1"):
        Admin("orders", url)


def test_a_broker_that_is_not_there_is_told() -> None:
    began = time.monotonic()
    with pytest.raises(RegistryUnavailable, match=r"tried 127.0.0.1:1 for \d+\.\d s"):
        Admin("orders", "kafka://127.0.0.1:1/c", settings=Settings(connect_timeout_s=1.0))
    assert time.monotonic() - began < 10.0 * patience_ratio()
