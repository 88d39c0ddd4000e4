"""Reading and writing logs on a real Kafka."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest

pytest.importorskip("confluent_kafka")

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from rebalanser.errors import (
    AccessDenied,
    Fenced,
    InvalidSettings,
    InvalidState,
    OutcomeUnknown,
    RegistryRefused,
    RegistryUnavailable,
    RequestTooLarge,
)
from rebalanser.testing.kafka_server import KafkaCluster
from rebalanser.testing.waiting import PATIENCE_S, patience_ratio, wait_until
from rebalanser_kafka.connection import Connection, client_config, reach
from rebalanser_kafka.group.parts import OrderedAssembler, split
from rebalanser_kafka.log import (
    GroupOffsets,
    LogReader,
    LogRecord,
    LogTruncated,
    LogWriter,
    NewRecord,
    StaleMembership,
    TransactionalWriter,
)
from rebalanser_kafka.topics import TopicSpec, describe, ensure_topics

REFUSED_AFTER_S = 10.0
"""Time that a writer gives a topic to appear."""
SILENT_S = 0.5
"""Limit of a request to a broker that cannot answer."""


@pytest.fixture
def connection(kafka_address: str) -> Connection:
    return Connection.from_url(f"kafka://{kafka_address}/conformance")


@pytest.fixture
def topic(connection: Connection) -> str:
    name = f"log-{uuid.uuid4().hex[:12]}"
    ensure_topics(connection, [TopicSpec(name)], PATIENCE_S)
    return name


@pytest.fixture
def open_() -> Iterator[ExitStack]:
    """Closes what a test has opened, in the opposite order."""
    with ExitStack() as stack:
        yield stack


def read_to_end(reader: LogReader, end: int | None = None) -> list[LogRecord]:
    until = reader.end_offset(PATIENCE_S) if end is None else end
    records: list[LogRecord] = []

    def is_at_end() -> bool:
        if reader.position < until:
            records.extend(reader.poll(0.1))
        return reader.position >= until

    wait_until(is_at_end, f"offset {until}")
    return records


def values(records: list[LogRecord]) -> list[bytes | None]:
    return [record.value for record in records]


def new(topic: str, *texts: str) -> list[NewRecord]:
    return [NewRecord(topic, b"k", text.encode()) for text in texts]


class Outsider:
    """A transactional producer whose transactions the test itself ends."""

    def __init__(self, connection: Connection, open_: ExitStack) -> None:
        from confluent_kafka import Producer

        self.producer = Producer(client_config(connection, {"transactional.id": uuid.uuid4().hex}))
        self.producer.init_transactions(PATIENCE_S)
        open_.callback(self.producer.close)

    def write(self, topic: str, *texts: str) -> None:
        self.producer.begin_transaction()
        for text in texts:
            self.producer.produce(topic, text.encode(), partition=0)
        assert self.producer.flush(PATIENCE_S) == 0

    def abort(self) -> None:
        self.producer.abort_transaction(PATIENCE_S)


def wait_for_position(reader: LogReader, position: int) -> None:
    """Poll until the reader has found out where it is, and nothing has come."""

    def is_there() -> bool:
        assert reader.poll(0.1) == []
        return reader.position == position

    wait_until(is_there, f"offset {position}")


class TestReading:
    def test_a_record_comes_back_as_it_was_written(
        self, connection: Connection, topic: str, open_: ExitStack
    ) -> None:
        writer = open_.enter_context(LogWriter(connection))
        reader = open_.enter_context(LogReader(connection, topic, "earliest"))
        offset = writer.append_and_wait(topic, b"key", b"value", {"h": b"\x00\xff"}, timeout_s=PATIENCE_S)
        assert writer.append_and_wait(topic, b"key", None, timeout_s=PATIENCE_S) == offset + 1
        first, tombstone = read_to_end(reader)
        assert (first.offset, first.key, first.value, dict(first.headers)) == (
            0,
            b"key",
            b"value",
            {"h": b"\x00\xff"},
        )
        assert first.size_bytes == len(b"keyvalue") + 3
        assert not first.log_append_time
        assert abs(first.timestamp_ms / 1000 - time.time()) < 3600
        assert (tombstone.offset, tombstone.value) == (1, None)

    def test_the_brokers_time_is_told_as_such(self, connection: Connection, open_: ExitStack) -> None:
        topic = f"log-{uuid.uuid4().hex[:12]}"
        ensure_topics(
            connection, [TopicSpec(topic, 1, {"message.timestamp.type": "LogAppendTime"})], PATIENCE_S
        )
        writer = open_.enter_context(LogWriter(connection))
        reader = open_.enter_context(LogReader(connection, topic, "earliest"))
        writer.append_and_wait(topic, None, b"v", timeout_s=PATIENCE_S)
        assert read_to_end(reader)[0].log_append_time

    @pytest.mark.rule("SH-6")
    def test_the_end_is_reached_over_control_records_and_aborted_transactions(
        self, connection: Connection, topic: str, open_: ExitStack
    ) -> None:
        writer = open_.enter_context(TransactionalWriter(connection, uuid.uuid4().hex, PATIENCE_S))
        writer.init()
        outsider = Outsider(connection, open_)
        writer.transaction(new(topic, "a", "b"))
        outsider.write(topic, "never", "seen")
        outsider.abort()
        writer.transaction(new(topic, "c"))
        outsider.write(topic, "neither")
        outsider.abort()
        reader = open_.enter_context(LogReader(connection, topic, "earliest"))
        end = reader.end_offset(PATIENCE_S)
        records = read_to_end(reader, end)
        assert values(records) == [b"a", b"b", b"c"]
        assert records[-1].offset < end - 2, "the last offsets must be what nobody sees"
        assert reader.position == end

    def test_nothing_behind_an_open_transaction_is_read_until_it_ends(
        self, connection: Connection, topic: str, open_: ExitStack
    ) -> None:
        plain = open_.enter_context(LogWriter(connection))
        outsider = Outsider(connection, open_)
        outsider.write(topic, "open")
        behind = plain.append_and_wait(topic, None, b"behind", timeout_s=PATIENCE_S)
        reader = open_.enter_context(LogReader(connection, topic, "earliest"))
        dirty = open_.enter_context(LogReader(connection, topic, "earliest", committed_only=False))
        assert reader.end_offset(PATIENCE_S) == 0
        assert dirty.end_offset(PATIENCE_S) == behind + 1
        assert values(read_to_end(dirty)) == [b"open", b"behind"]
        outsider.abort()
        assert values(read_to_end(reader, behind + 1)) == [b"behind"]

    @pytest.mark.rule("SH-3")
    def test_two_readers_of_a_topic_both_get_every_record(
        self, connection: Connection, topic: str, open_: ExitStack
    ) -> None:
        writer = open_.enter_context(LogWriter(connection))
        readers = [open_.enter_context(LogReader(connection, topic, "earliest")) for _ in range(2)]
        for number in range(100):
            writer.append(topic, None, b"%d" % number)
        last = writer.append_and_wait(topic, None, b"last", timeout_s=PATIENCE_S)
        expected = [b"%d" % number for number in range(100)] + [b"last"]
        for reader in readers:
            assert values(read_to_end(reader, last + 1)) == expected

    def test_latest_begins_at_the_end_and_a_number_where_it_says(
        self, connection: Connection, topic: str, open_: ExitStack
    ) -> None:
        writer = open_.enter_context(LogWriter(connection))
        for text in (b"0", b"1", b"2"):
            writer.append_and_wait(topic, None, text, timeout_s=PATIENCE_S)
        latest = open_.enter_context(LogReader(connection, topic, "latest"))
        wait_for_position(latest, 3)
        third = open_.enter_context(LogReader(connection, topic, 2))
        end = writer.append_and_wait(topic, None, b"3", timeout_s=PATIENCE_S) + 1
        assert values(read_to_end(latest, end)) == [b"3"]
        assert values(read_to_end(third, end)) == [b"2", b"3"]

    def test_an_offset_that_the_log_does_not_hold_is_an_error_of_its_own(
        self, connection: Connection, topic: str, open_: ExitStack
    ) -> None:
        writer = open_.enter_context(LogWriter(connection))
        for text in (b"0", b"1", b"2"):
            writer.append_and_wait(topic, None, text, timeout_s=PATIENCE_S)
        admin = AdminClient(client_config(connection, {}))
        for deleted in admin.delete_records([TopicPartition(topic, 0, 2)]).values():
            deleted.result(PATIENCE_S)
        for start in (1, 99):
            reader = open_.enter_context(LogReader(connection, topic, start))
            with pytest.raises(LogTruncated, match=f"does not hold offset {start}"):
                reader.poll(PATIENCE_S)
            with pytest.raises(LogTruncated):
                reader.poll(0.0)
        fresh = open_.enter_context(LogReader(connection, topic, "earliest"))
        assert fresh.bounds(PATIENCE_S) == (2, 3)
        assert values(read_to_end(fresh)) == [b"2"]

    def test_a_topic_that_is_not_there_is_named(self, connection: Connection, open_: ExitStack) -> None:
        topic = f"none-{uuid.uuid4().hex[:8]}"
        reader = open_.enter_context(LogReader(connection, topic, "earliest"))
        with pytest.raises(RegistryRefused, match=topic):
            wait_until(lambda: reader.poll(1.0))
        writer = open_.enter_context(LogWriter(connection))
        with pytest.raises(RegistryRefused, match=topic):  # told once the time for it is over
            writer.append_and_wait(topic, None, b"v", timeout_s=REFUSED_AFTER_S)


class TestWriting:
    def test_records_of_many_threads_each_get_an_offset_of_their_own(
        self, connection: Connection, topic: str, open_: ExitStack
    ) -> None:
        writer = open_.enter_context(LogWriter(connection))

        def append(number: int) -> tuple[int, bytes]:
            value = b"%d" % number
            return writer.append_and_wait(topic, None, value, timeout_s=PATIENCE_S), value

        with ThreadPoolExecutor(8) as pool:
            written = dict(pool.map(append, range(200)))
        reader = open_.enter_context(LogReader(connection, topic, "earliest"))
        assert {record.offset: record.value for record in read_to_end(reader)} == written
        assert len(written) == 200

    @pytest.mark.parametrize("under_way_bytes", [1_000_000, 1])
    def test_many_records_are_written_together_in_their_order(
        self, connection: Connection, topic: str, open_: ExitStack, under_way_bytes: int
    ) -> None:
        writer = open_.enter_context(LogWriter(connection))
        records = [NewRecord(topic, b"%d" % number, b"v" * 2000) for number in range(60)]
        written: list[NewRecord] = []
        offsets = writer.append_all(
            iter(records),
            timeout_s=PATIENCE_S,
            under_way_bytes=under_way_bytes,
            on_written=written.append,
        )
        assert written == records
        reader = open_.enter_context(LogReader(connection, topic, "earliest"))
        read = {record.offset: record.key for record in read_to_end(reader)}
        assert [read[offset] for offset in offsets] == [record.key for record in records]
        reader.move_to(offsets[30])
        assert next(iter(reader.poll(PATIENCE_S))).offset == offsets[30]

    def test_of_many_records_the_first_that_is_refused_is_told(
        self, connection: Connection, topic: str, open_: ExitStack
    ) -> None:
        writer = open_.enter_context(LogWriter(connection, max_record_bytes=3_000_000))
        records = [NewRecord(topic, None, b"v" * size) for size in (10, 2_000_000, 10)]
        written: list[NewRecord] = []
        with pytest.raises(RequestTooLarge, match="2000000 bytes"):
            writer.append_all(records, timeout_s=PATIENCE_S, under_way_bytes=100, on_written=written.append)
        assert written == records[:1]

    def test_a_record_over_the_topics_limit_is_refused_with_the_numbers(
        self, connection: Connection, topic: str, open_: ExitStack
    ) -> None:
        writer = open_.enter_context(LogWriter(connection, max_record_bytes=3_000_000))
        with pytest.raises(
            RequestTooLarge, match=rf"2000000 bytes is over max\.message\.bytes of topic {topic}"
        ):
            writer.append_and_wait(topic, None, b"v" * 2_000_000, timeout_s=PATIENCE_S)
        assert writer.append_and_wait(topic, None, b"v" * 1_000_000, timeout_s=PATIENCE_S) >= 0

    def test_a_large_value_goes_in_parts_of_the_default_limit(
        self, connection: Connection, topic: str, open_: ExitStack
    ) -> None:
        value = bytes(range(256)) * 12_000
        writer = open_.enter_context(LogWriter(connection))
        parts = split(value, 1_000_000)
        for part in parts:
            writer.append_and_wait(topic, None, part, timeout_s=PATIENCE_S)
        reader = open_.enter_context(LogReader(connection, topic, "earliest"))
        assembler = OrderedAssembler()
        got = [assembler.add(record.offset, record.value or b"") for record in read_to_end(reader)]
        assert got == [None] * (len(parts) - 1) + [value]

    def test_a_silent_broker_leaves_the_outcome_unknown_in_time_and_closing_does_not_hang(
        self, kafka: KafkaCluster, open_: ExitStack
    ) -> None:
        connection = Connection.from_url(f"kafka://{kafka.bootstrap}/conformance")
        topic = f"log-{uuid.uuid4().hex[:12]}"
        ensure_topics(connection, [TopicSpec(topic)], PATIENCE_S)
        writer = LogWriter(connection)
        transactional = TransactionalWriter(connection, uuid.uuid4().hex, 2.0)
        reader = LogReader(connection, topic, "earliest")
        writer.append_and_wait(topic, None, b"before", timeout_s=PATIENCE_S)
        transactional.init()
        assert values(read_to_end(reader, 1)) == [b"before"]
        kafka.pause(0)
        open_.callback(kafka.resume, 0)
        began = time.monotonic()
        wait_until(lambda: _outcome_is_unknown(writer, topic))
        with pytest.raises(RegistryUnavailable):
            reader.end_offset(SILENT_S)
        with pytest.raises(RegistryUnavailable, match=r"did not acknowledge|failed"):
            transactional.transaction(new(topic, "lost"))
        assert set(values(reader.poll(0.2))) <= {b"during"}, "from before the broker really fell silent"
        for each in (reader, transactional):
            each.close()
        writer.close(0.2)
        assert time.monotonic() - began < 15.0 * patience_ratio()
        kafka.resume(0)
        again = open_.enter_context(LogReader(connection, topic, "earliest"))
        after = open_.enter_context(LogWriter(connection))
        end = after.append_and_wait(topic, None, b"after", timeout_s=PATIENCE_S) + 1
        seen = values(read_to_end(again, end))
        assert (seen[0], seen[-1]) == (b"before", b"after")
        assert set(seen[1:-1]) <= {b"during"}


class TestTransactions:
    def test_all_or_nothing_over_two_topics_with_the_offsets_in_order(
        self, connection: Connection, topic: str, open_: ExitStack
    ) -> None:
        other = f"{topic}-other"
        ensure_topics(connection, [TopicSpec(other)], PATIENCE_S)
        writer = open_.enter_context(TransactionalWriter(connection, uuid.uuid4().hex, PATIENCE_S))
        writer.init()
        first = writer.transaction([*new(topic, "a"), *new(other, "b", "c"), *new(topic, "d")])
        second = writer.transaction(new(topic, "e"))
        assert first == [0, 0, 1, 1]
        assert second[0] > 1
        reader = open_.enter_context(LogReader(connection, topic, "earliest"))
        assert [(record.offset, record.value) for record in read_to_end(reader)] == [
            (0, b"a"),
            (1, b"d"),
            (second[0], b"e"),
        ]

    @pytest.mark.rule("SH-7")
    def test_the_predecessor_is_fenced_and_nothing_of_it_is_read(
        self, connection: Connection, topic: str, open_: ExitStack
    ) -> None:
        name = uuid.uuid4().hex
        old = open_.enter_context(TransactionalWriter(connection, name, PATIENCE_S))
        old.init()
        old.transaction(new(topic, "old"))
        successor = open_.enter_context(TransactionalWriter(connection, name, PATIENCE_S))
        successor.init()
        with pytest.raises(Fenced, match="taken over"):
            old.transaction(new(topic, "zombie"))
        with pytest.raises(InvalidState):
            old.transaction(new(topic, "zombie again"))
        successor.transaction(new(topic, "new"))
        reader = open_.enter_context(LogReader(connection, topic, "earliest"))
        assert values(read_to_end(reader)) == [b"old", b"new"]

    @pytest.mark.rule("SH-7")
    def test_a_writer_fenced_between_its_records_and_its_commit_commits_nothing(
        self, connection: Connection, topic: str, open_: ExitStack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = uuid.uuid4().hex
        old = open_.enter_context(TransactionalWriter(connection, name, PATIENCE_S))
        successor = open_.enter_context(TransactionalWriter(connection, name, PATIENCE_S))
        old.init()
        commit = TransactionalWriter._commit

        def overtaken(self: TransactionalWriter, *arguments: object) -> None:
            if self is old:
                successor.init()
            commit(self, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(TransactionalWriter, "_commit", overtaken)
        with pytest.raises(Fenced):
            old.transaction(new(topic, "half", "done"))
        successor.transaction(new(topic, "new"))
        reader = open_.enter_context(LogReader(connection, topic, "earliest"))
        assert values(read_to_end(reader)) == [b"new"]

    def test_a_refused_record_undoes_the_others_and_the_writer_goes_on(
        self, connection: Connection, topic: str, open_: ExitStack
    ) -> None:
        writer = open_.enter_context(
            TransactionalWriter(connection, uuid.uuid4().hex, PATIENCE_S, max_record_bytes=3_000_000)
        )
        writer.init()
        with pytest.raises(RequestTooLarge, match="2000001 bytes"):
            writer.transaction([*new(topic, "good"), NewRecord(topic, b"k", b"v" * 2_000_000)])
        writer.transaction(new(topic, "after"))
        reader = open_.enter_context(LogReader(connection, topic, "earliest"))
        assert values(read_to_end(reader)) == [b"after"]

    @pytest.mark.rule("SH-7")
    def test_offsets_of_a_member_that_the_group_has_replaced_are_refused(
        self, connection: Connection, topic: str, open_: ExitStack
    ) -> None:
        group = f"group-{uuid.uuid4().hex[:12]}"
        old, new_member = (_member(connection, group, open_) for _ in range(2))
        writer = open_.enter_context(TransactionalWriter(connection, uuid.uuid4().hex, PATIENCE_S))
        writer.init()
        _join(old, topic)
        writer.transaction(new(topic, "led"), GroupOffsets(old.consumer_group_metadata(), {(topic, 0): 7}))
        assert old.committed([TopicPartition(topic, 0)], PATIENCE_S)[0].offset == 7
        metadata = old.consumer_group_metadata()
        old.unsubscribe()
        wait_until(lambda: old.poll(0.1) is None and not old.assignment())
        _join(new_member, topic)
        with pytest.raises(Fenced):
            writer.transaction(new(topic, "stale"), GroupOffsets(metadata, {(topic, 0): 9}))
        assert new_member.committed([TopicPartition(topic, 0)], PATIENCE_S)[0].offset == 7
        writer.init()
        writer.transaction(new(topic, "again"))
        reader = open_.enter_context(LogReader(connection, topic, "earliest"))
        assert values(read_to_end(reader)) == [b"led", b"again"]

    @pytest.mark.rule("SH-7")
    def test_offsets_of_the_last_generation_are_refused_and_the_writer_goes_on(
        self, connection: Connection, topic: str, open_: ExitStack
    ) -> None:
        group = f"group-{uuid.uuid4().hex[:12]}"
        member, another = (_member(connection, group, open_) for _ in range(2))
        writer = open_.enter_context(TransactionalWriter(connection, uuid.uuid4().hex, PATIENCE_S))
        writer.init()
        _join(member, topic)
        metadata = member.consumer_group_metadata()
        another.subscribe([topic])

        def refused() -> bool:
            member.poll(0.05)
            another.poll(0.05)
            try:
                writer.transaction(new(topic, "maybe"), GroupOffsets(metadata, {(topic, 0): 7}))
            except StaleMembership:
                return True
            return False

        wait_until(refused)
        holder = another if another.assignment() else member
        offsets = GroupOffsets(holder.consumer_group_metadata(), {(topic, 0): 8})
        writer.transaction(new(topic, "after"), offsets)
        assert holder.committed([TopicPartition(topic, 0)], PATIENCE_S)[0].offset == 8
        reader = open_.enter_context(LogReader(connection, topic, "earliest"))
        seen = values(read_to_end(reader))
        assert seen[-1] == b"after"
        assert set(seen[:-1]) <= {b"maybe"}


def _member(connection: Connection, group: str, open_: ExitStack) -> Consumer:
    settings = {"group.id": group, "auto.offset.reset": "latest", "enable.auto.commit": False}
    consumer = Consumer(client_config(connection, settings))
    open_.callback(consumer.close)
    return consumer


def _join(consumer: Consumer, topic: str) -> None:
    consumer.subscribe([topic])
    wait_until(lambda: consumer.poll(0.1) is None and bool(consumer.assignment()))


def _outcome_is_unknown(writer: LogWriter, topic: str) -> bool:
    """Whether the broker, told to stop a moment ago, really has stopped."""
    try:
        writer.append_and_wait(topic, None, b"during", timeout_s=SILENT_S)
    except OutcomeUnknown:
        return True
    return False


class TestTopics:
    @pytest.mark.rule("SH-1")
    def test_missing_ones_are_made_with_their_settings_however_many_do_it_at_once(
        self, connection: Connection
    ) -> None:
        name = f"made-{uuid.uuid4().hex[:12]}"
        specs = [
            TopicSpec(f"{name}-{number}", 2, {"cleanup.policy": "compact,delete", "retention.ms": "86400000"})
            for number in range(3)
        ]
        at_once = threading.Barrier(4)

        def ensure(_number: int) -> object:
            at_once.wait(PATIENCE_S)
            return ensure_topics(connection, specs, PATIENCE_S)

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(ensure, range(4))) == [[], [], [], []]
        states = describe(connection, [spec.name for spec in specs], PATIENCE_S)
        assert {state.partitions for state in states.values()} == {2}
        assert {state.settings["retention.ms"] for state in states.values()} == {"86400000"}
        assert describe(connection, [f"{name}-none"], PATIENCE_S) == {}

    @pytest.mark.rule("SH-1")
    def test_one_that_differs_is_an_error_or_a_warning_as_asked(self, connection: Connection) -> None:
        name = f"made-{uuid.uuid4().hex[:12]}"
        ensure_topics(connection, [TopicSpec(name, 1, {"retention.ms": "1000000"})], PATIENCE_S)
        wanted = TopicSpec(name, 2, {"retention.ms": "2000000", "cleanup.policy": "compact"})
        lenient = ensure_topics(connection, [replace(wanted, must_match=frozenset())], PATIENCE_S)
        assert [str(each) for each in lenient] == [
            f"{name}: partitions is 1, wanted 2",
            f"{name}: retention.ms is 1000000, wanted 2000000",
            f"{name}: cleanup.policy is delete, wanted compact",
        ]
        strict = replace(wanted, must_match=frozenset({"partitions", "cleanup.policy"}))
        with pytest.raises(InvalidSettings) as refused:
            ensure_topics(connection, [strict], PATIENCE_S)
        assert "partitions is 1, wanted 2" in str(refused.value)
        assert f"--topic {name} --add-config cleanup.policy=compact" in str(refused.value)
        assert "retention" not in str(refused.value)

    def test_more_replicas_than_brokers_is_refused(self, connection: Connection) -> None:
        with pytest.raises(InvalidSettings, match="replication factor of 30"):
            ensure_topics(
                connection, [TopicSpec(f"made-{uuid.uuid4().hex}")], PATIENCE_S, replication_factor=30
            )


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """A broker that wants an account and has an authorizer; what has no rules is open to everybody."""
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",  # the broker itself, on its internal listener
        "allow.everyone.if.no.acl.found": "true",
    }
    folder = tmp_path_factory.mktemp("guarded")
    with KafkaCluster(1, data_folder=folder, sasl=("ann", "open-sesame"), settings=settings) as cluster:
        yield cluster


def _as(cluster: KafkaCluster, account: str) -> Connection:
    security = "security.protocol=SASL_PLAINTEXT&sasl.mechanism=PLAIN"
    return Connection.from_url(f"kafka://{account}@{cluster.bootstrap}/conformance?{security}")


def _rule(kind: ResourceType, name: str, operation: AclOperation, verdict: AclPermissionType) -> AclBinding:
    pattern = ResourcePatternType.PREFIXED if kind is ResourceType.TOPIC else ResourcePatternType.LITERAL
    return AclBinding(kind, name, pattern, "User:ann", "*", operation, verdict)


@pytest.mark.kafka
class TestSecurity:
    def test_an_account_of_the_url_gets_in(self, guarded: KafkaCluster, open_: ExitStack) -> None:
        connection = _as(guarded, "ann:open-sesame")
        assert reach(connection, PATIENCE_S).brokers == guarded.addresses
        topic = f"open-{uuid.uuid4().hex[:12]}"
        ensure_topics(connection, [TopicSpec(topic)], PATIENCE_S)
        writer = open_.enter_context(LogWriter(connection))
        assert writer.append_and_wait(topic, None, b"v", timeout_s=PATIENCE_S) == 0

    def test_a_wrong_password_is_told_at_once_and_not_printed(self, guarded: KafkaCluster) -> None:
        began = time.monotonic()
        with pytest.raises(AccessDenied, match="uthentication") as refused:
            reach(_as(guarded, "ann:wrong-word"), PATIENCE_S)
        assert time.monotonic() - began < PATIENCE_S / 2
        assert "wrong-word" not in str(refused.value)

    def test_missing_rights_are_told_as_such(self, guarded: KafkaCluster, open_: ExitStack) -> None:
        connection = _as(guarded, "ann:open-sesame")
        prefix = f"denied-{uuid.uuid4().hex[:8]}"
        held = f"{prefix}-held"
        ensure_topics(connection, [TopicSpec(held)], PATIENCE_S)
        allow, deny = AclPermissionType.ALLOW, AclPermissionType.DENY
        rules = [
            _rule(ResourceType.TOPIC, prefix, AclOperation.DESCRIBE, allow),
            _rule(ResourceType.TOPIC, prefix, AclOperation.DESCRIBE_CONFIGS, allow),
            _rule(ResourceType.BROKER, "kafka-cluster", AclOperation.CREATE, deny),
        ]
        admin = AdminClient(client_config(connection, {}))
        for made in admin.create_acls(rules).values():
            made.result(PATIENCE_S)
        with pytest.raises(AccessDenied, match=f"{prefix}-new is missing and this user may not make it"):
            ensure_topics(connection, [TopicSpec(f"{prefix}-new")], PATIENCE_S)
        writer = open_.enter_context(LogWriter(connection))
        with pytest.raises(AccessDenied, match=held):
            writer.append_and_wait(held, None, b"v", timeout_s=PATIENCE_S)
        reader = open_.enter_context(LogReader(connection, held, "earliest"))
        with pytest.raises(AccessDenied, match=held):
            reader.poll(PATIENCE_S)
        transactional = open_.enter_context(TransactionalWriter(connection, prefix, PATIENCE_S))
        transactional.init()
        with pytest.raises(AccessDenied, match=held):
            transactional.transaction(new(held, "v"))
