"""What the Kafka client layer decides without a broker: URLs, secrets, errors, parts."""

from __future__ import annotations

import hashlib
import logging
import math
import re
import shlex
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("confluent_kafka")

from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, TopicPartition

from rebalanser.errors import (
    AccessDenied,
    Fenced,
    InvalidSettings,
    InvalidState,
    InvalidUrl,
    OutcomeUnknown,
    RebalanserError,
    RegistryRefused,
    RegistryUnavailable,
    RequestTooLarge,
)
from rebalanser.testing.clock import FakeClock
from rebalanser.testing.waiting import wait_until
from rebalanser_kafka import reader, transactions
from rebalanser_kafka.connection import Connection, client_config, reach
from rebalanser_kafka.failures import Act, UnsupportedBroker, clear_frames, error_of, is_passing, judge
from rebalanser_kafka.group.parts import HEADER_BYTES, REACH, BadPart, OrderedAssembler, split
from rebalanser_kafka.log import LogReader, LogWriter, NewRecord, TransactionalWriter
from rebalanser_kafka.topics import (
    Difference,
    TopicSpec,
    TopicState,
    by_topic,
    differences,
    refuse,
    remedy,
)

if TYPE_CHECKING:
    from collections.abc import Collection
    from random import Random

    from confluent_kafka import Producer

NOWHERE = "kafka://127.0.0.1:1"


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REBALANSER_KAFKA_USER", raising=False)
    monkeypatch.delenv("REBALANSER_KAFKA_PASSWORD", raising=False)


class TestUrls:
    def test_hosts_cluster_and_options(self) -> None:
        connection = Connection.from_url(
            "kafka://h1:9092,[::1]:9093/prod-1?client.rack=r2&broker.address.family=v4"
        )
        assert connection.cluster == "prod-1"
        assert connection.config["bootstrap.servers"] == "h1:9092,[::1]:9093"
        assert connection.config["client.rack"] == "r2"
        assert connection.config["security.protocol"] == "PLAINTEXT"
        assert "sasl.mechanism" not in connection.config

    def test_the_cluster_has_a_default_name(self) -> None:
        assert Connection.from_url("kafka://h:1").cluster == "rebalanser"

    @pytest.mark.parametrize("name", ["a/b", "a%20b", "ü", ".", "..", "x" * 129])
    def test_a_name_that_no_topic_may_have_is_refused(self, name: str) -> None:
        with pytest.raises(InvalidUrl, match="cannot name a cluster"):
            Connection.from_url(f"kafka://h:1/{name}")

    @pytest.mark.parametrize(
        "option",
        [
            "acks",
            "enable.idempotence",
            "isolation.level",
            "auto.offset.reset",
            "group.id",
            "transactional.id",
        ],
    )
    def test_what_safety_rests_on_cannot_be_set(self, option: str) -> None:
        with pytest.raises(InvalidUrl, match="its safety rests on it"):
            Connection.from_url(f"kafka://h:1/c?{option}=x")

    def test_an_unknown_option_is_named(self) -> None:
        with pytest.raises(InvalidUrl, match="unknown option 'retrys'"):
            Connection.from_url("kafka://h:1/c?retrys=1")

    def test_a_password_among_the_options_is_refused(self) -> None:
        with pytest.raises(InvalidUrl, match="REBALANSER_KAFKA_PASSWORD") as refused:
            Connection.from_url("kafka://h:1/c?sasl.password=hush-hush")
        assert "hush-hush" not in str(refused.value)


class TestSecurity:
    def test_a_user_means_tls_unless_said_otherwise(self) -> None:
        config = Connection.from_url("kafka://ann:s3cr3t@h:1/c").config
        assert config["security.protocol"] == "SASL_SSL"
        assert config["sasl.mechanism"] == "SCRAM-SHA-512"
        assert (config["sasl.username"], config["sasl.password"]) == ("ann", "s3cr3t")

    def test_options_pass_through(self) -> None:
        url = "kafka://ann:s3cr3t@h:1/c?security.protocol=sasl_plaintext&sasl.mechanisms=PLAIN"
        config = Connection.from_url(url).config
        assert (config["security.protocol"], config["sasl.mechanism"]) == ("SASL_PLAINTEXT", "PLAIN")
        assert "sasl.mechanisms" not in config
        tls = Connection.from_url(
            "kafka://h:1/c?ssl.ca.location=/ca.pem&ssl.certificate.location=/c.pem"
        ).config
        assert (tls["security.protocol"], tls["ssl.ca.location"]) == ("SSL", "/ca.pem")

    def test_the_account_may_stand_in_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("REBALANSER_KAFKA_USER", "bob")
        monkeypatch.setenv("REBALANSER_KAFKA_PASSWORD", "from-outside")
        config = Connection.from_url("kafka://h:1/c").config
        assert (config["sasl.username"], config["sasl.password"]) == ("bob", "from-outside")
        assert Connection.from_url("kafka://ann:inside@h:1/c").config["sasl.password"] == "inside"

    def test_contradictions_are_refused(self) -> None:
        with pytest.raises(InvalidUrl, match="no password"):
            Connection.from_url("kafka://ann@h:1/c")
        with pytest.raises(InvalidUrl, match="asks for none"):
            Connection.from_url("kafka://ann:s3cr3t@h:1/c?security.protocol=SSL")
        with pytest.raises(InvalidUrl, match="names no user"):
            Connection.from_url("kafka://h:1/c?security.protocol=SASL_SSL")

    def test_no_secret_is_printed(self) -> None:
        connection = Connection.from_url("kafka://ann:correct-horse@h:1/c?ssl.key.password=battery-staple")
        for text in (str(connection), repr(connection), connection.describe()):
            assert "correct-horse" not in text
            assert "battery-staple" not in text
        assert connection.describe() == "kafka://ann:***@h:1/c (SASL_SSL, SCRAM-SHA-512)"
        error = KafkaError(KafkaError._FAIL, "server said correct-horse and battery-staple")
        text = str(judge(error, Act.READ, "reading"))
        assert "correct-horse" not in text
        assert "battery-staple" not in text

    def test_a_file_that_is_not_there_is_named(self) -> None:
        with pytest.raises(InvalidUrl, match=r"ssl\.ca\.location"):
            reach(Connection.from_url("kafka://h:1/c?ssl.ca.location=/no/such/ca.pem"), 0.1)

    def test_without_a_cluster_of_ours_none_is_named(self) -> None:
        connection = replace(Connection.from_url("kafka://h:1"), cluster="")
        assert connection.describe() == "kafka://h:1 (PLAINTEXT)"

    def test_who_was_refused_is_said(self) -> None:
        refused, other = AccessDenied("no right"), RegistryUnavailable("no answer")
        named = Connection.from_url("kafka://ann:s3cr3t@h:1/c").with_user(refused)
        assert (type(named), str(named)) == (AccessDenied, "no right (the user is 'ann')")
        nobody = Connection.from_url("kafka://h:1/c")
        assert nobody.with_user(other) is other
        with pytest.raises(AccessDenied, match=r"no right \(no user is given\)"), nobody.naming_user():
            raise refused

    def test_what_librdkafka_calls_critical_is_a_detail(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, "rebalanser")
        quiet = client_config(Connection.from_url("kafka://h:1/c"), {})["logger"]
        quiet.log(logging.CRITICAL, "%s [%s] %s", "FATAL", "producer-1", "Fatal error: 100% lost")
        assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
            ("DEBUG", "FATAL [producer-1] Fatal error: 100% lost")
        ]

    def test_the_callers_settings_win(self) -> None:
        config = client_config(Connection.from_url("kafka://h:1/c"), {"client.id": "mine"})
        assert config["client.id"] == "mine"


class TestNoBroker:
    def test_reach_says_what_was_tried_and_for_how_long(self) -> None:
        with pytest.raises(
            RegistryUnavailable, match=r"tried 127\.0\.0\.1:1 for \d\.\d s \(.*refused"
        ) as failed:
            reach(Connection.from_url(NOWHERE), 1.0)
        assert "kafka://127.0.0.1:1/rebalanser (PLAINTEXT)" in str(failed.value)

    def test_an_append_ends_in_its_time_with_an_unknown_outcome(self) -> None:
        writer = LogWriter(Connection.from_url(NOWHERE))
        with pytest.raises(OutcomeUnknown, match=r"not answered within 0\.1 s"):
            writer.append_and_wait("t", None, b"v", timeout_s=0.1)
        writer.close(0.0)

    @pytest.mark.parametrize("delivery_timeout_s", [0.1, 30.0])
    def test_every_append_is_answered_once_by_the_time_of_close(self, delivery_timeout_s: float) -> None:
        answers: list[object] = []
        writer = LogWriter(Connection.from_url(NOWHERE), delivery_timeout_s=delivery_timeout_s)
        for _ in range(20):
            writer.append("t", b"k", b"v", on_done=answers.append)
        writer.close(0.3)
        writer.close(0.3)
        assert [type(answer) for answer in answers] == [OutcomeUnknown] * 20
        with pytest.raises(InvalidState):
            writer.append("t", b"k", b"v")

    def test_too_many_waiting_records_are_refused_at_once(self) -> None:
        writer = LogWriter(Connection.from_url(NOWHERE))
        for _ in range(10_000):
            writer.append("t", None, b"v")
        with pytest.raises(RegistryUnavailable, match=r"10000 records .* nothing was sent"):
            writer.append("t", None, b"v")
        writer.close(0.0)

    def test_a_record_over_the_limit_is_refused_with_the_numbers(self) -> None:
        connection = Connection.from_url(NOWHERE)
        writer = LogWriter(connection)
        with pytest.raises(RequestTooLarge, match="1000001 bytes for t; at most 1000000"):
            writer.append("t", b"k", b"v" * 999_998, {"h": b"i"})
        writer.close(0.0)
        transactional = TransactionalWriter(connection, "t", 1.0)
        with pytest.raises(RequestTooLarge, match="1000001 bytes for t; at most 1000000"):
            transactional.transaction([NewRecord("t", None, b"v" * 1_000_001)])
        with pytest.raises(RequestTooLarge, match="10001 records"):
            transactional.transaction([NewRecord("t", None, b"v")] * 10_001)

    def test_a_reader_waits_and_says_why(self) -> None:
        with LogReader(Connection.from_url(NOWHERE), "t", "earliest") as reader:
            assert "refused" in wait_until(lambda: (reader.poll(0.1) == [] and reader.trouble) or "")
            assert reader.position == 0
            with pytest.raises(RegistryUnavailable, match="offsets of t"):
                reader.end_offset(0.1)
        with pytest.raises(InvalidState):
            reader.poll(0.0)
        with LogReader(Connection.from_url(NOWHERE), "t", "latest") as latest:
            assert latest.poll(0.1) == []
            assert latest.trouble is not None

    def test_a_transaction_needs_init_first(self) -> None:
        writer = TransactionalWriter(Connection.from_url(NOWHERE), "t", 0.3)
        with pytest.raises(InvalidState, match=r"needs init\(\) first"):
            writer.transaction([NewRecord("t", None, b"v")])
        with pytest.raises(RegistryUnavailable, match="taking over t"):
            writer.init()
        writer.close()


class Wedged:
    """A transactional producer whose broker answers nothing any more; waiting for it lets time pass."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.begun = 0

    def begin_transaction(self) -> None:
        self.begun += 1
        if self.begun > 1:
            raise KafkaException(KafkaError(KafkaError._STATE))

    def produce(self, *_: object, **__: object) -> None:
        return

    def purge(self) -> None:
        return

    def flush(self, timeout_s: float) -> int:
        self._clock.advance(timeout_s)
        return 1

    def abort_transaction(self, timeout_s: float) -> None:
        self._clock.advance(timeout_s)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))


@pytest.mark.rule("SH-7", "SH-8")
@pytest.mark.parametrize(("limit_s", "most_s"), [(math.inf, 10.0), (4.0, 4.0), (60.0, 10.0)])
def test_a_transaction_that_no_broker_answers_ends_by_its_limit_with_its_abort(
    limit_s: float, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader is silent meanwhile: its abort took as long again."""
    clock = FakeClock()
    monkeypatch.setattr(transactions.time, "monotonic", clock.now)
    monkeypatch.setattr(transactions, "settle", lambda _producer: None)
    writer = TransactionalWriter(Connection.from_url(NOWHERE), "t", 10.0)
    writer._producer = cast("Producer", Wedged(clock))
    began = clock.now()
    with pytest.raises(RegistryUnavailable, match="did not acknowledge every record in time"):
        writer.transaction([NewRecord("t", None, b"v")], limit_s=limit_s)
    assert most_s <= clock.now() - began <= most_s + transactions.ABORT_S + 0.1
    with pytest.raises(InvalidState, match=r"needs init\(\) first"):
        writer.transaction([NewRecord("t", None, b"v")])


class Beginning:
    """A client of a broker that may be away: what it is asked for, in order, as it begins."""

    def __init__(self, away: bool) -> None:
        self.away = away
        self.asked: list[str] = []

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.away:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))

    def list_topics(self, *, timeout: float) -> None:
        assert 0 < timeout <= transactions.CONNECT_S
        self._ask("a connection")

    def init_transactions(self, _timeout_s: float) -> None:
        self.asked.append("the transactional id")

    def get_watermark_offsets(self, _partition: TopicPartition, *, timeout: float) -> tuple[int, int]:
        assert 0 < timeout <= 0.1
        self._ask("the offsets")
        return 0, 7

    def assign(self, partitions: list[TopicPartition]) -> None:
        self.asked.append(f"records from {partitions[0].offset} on")

    def poll(self, _timeout_s: float) -> None:
        """Nothing is there."""


@pytest.mark.parametrize("away", [False, True])
def test_a_writer_asks_for_its_transactional_id_once_it_has_looked_for_a_broker(
    away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """librdkafka waits half a second where none is connected yet, while nobody leads."""
    client = Beginning(away)
    monkeypatch.setattr(transactions, "Producer", lambda _config: client)
    TransactionalWriter(Connection.from_url(NOWHERE), "t", 10.0).init()
    assert client.asked == ["a connection", "the transactional id"]


@pytest.mark.parametrize("away", [False, True])
def test_a_reader_from_the_beginning_fetches_once_it_has_looked_for_the_partitions_leader(
    away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """librdkafka waits half a second where the leader is not known yet."""
    client = Beginning(away)
    monkeypatch.setattr(reader, "Consumer", lambda _config: client)
    log = LogReader(Connection.from_url(NOWHERE), "t", "earliest")
    assert [log.poll(0.1), log.poll(0.1)] == [[], []]
    assert client.asked == ["the offsets", f"records from {OFFSET_BEGINNING} on"]


class Returning:
    """A client whose broker has just come back: it knows the partitions of a topic, and leads none yet."""

    def __init__(self, code: int, partitions: Collection[int] | None) -> None:
        self._code = code
        self._partitions = partitions

    def get_watermark_offsets(self, _partition: TopicPartition, **_: float) -> tuple[int, int]:
        raise KafkaException(KafkaError(self._code))

    def list_topics(self, topic: str, *, timeout: float) -> SimpleNamespace:
        assert 0 < timeout <= 5.0
        if self._partitions is None:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        return SimpleNamespace(topics={topic: SimpleNamespace(partitions=dict.fromkeys(self._partitions))})


@pytest.mark.parametrize("code", [KafkaError._UNKNOWN_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART])
@pytest.mark.parametrize(
    ("partitions", "kind", "words"),
    [
        ([0], RegistryUnavailable, "offsets of t failed: its partition 0 has no leader yet"),
        ([], RegistryRefused, "offsets of t failed: .*nknown"),
        ([1], RegistryRefused, "offsets of t failed: .*nknown"),
        (None, RegistryUnavailable, "looking at topic t failed"),
    ],
)
def test_a_partition_without_a_leader_yet_is_told_from_one_that_is_missing(
    code: int,
    partitions: Collection[int] | None,
    kind: type[RebalanserError],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """librdkafka calls both unknown; a daemon that starts just as its broker comes back goes on."""
    monkeypatch.setattr(reader, "Consumer", lambda _config: Returning(code, partitions))
    log = LogReader(Connection.from_url(NOWHERE), "t", "latest")
    with pytest.raises(kind, match=words):
        log.bounds(5.0)
    if kind is RegistryUnavailable:
        assert log.poll(5.0) == []
        assert re.search(words, log.trouble or "")


def test_frames_of_an_error_that_was_raised_again_hold_nothing_once_cleared() -> None:
    class Held:
        pass

    def fail(_held: Held) -> None:
        raise RegistryUnavailable("away")

    def again(failure: Exception, _held: Held) -> None:
        raise failure

    def retried(held: Held) -> None:
        try:
            fail(held)
        except RegistryUnavailable as error:
            again(error, held)

    held = Held()
    left = weakref.ref(held)
    with pytest.raises(RegistryUnavailable) as caught:
        retried(held)
    del held
    clear_frames(caught.value)
    assert left() is None


class TestFailures:
    @pytest.mark.parametrize(
        ("code", "act", "kind"),
        [
            (KafkaError.TOPIC_AUTHORIZATION_FAILED, Act.WRITE, AccessDenied),
            (KafkaError._AUTHENTICATION, Act.READ, AccessDenied),
            (KafkaError.UNSUPPORTED_VERSION, Act.READ, UnsupportedBroker),
            (KafkaError._UNSUPPORTED_FEATURE, Act.READ, UnsupportedBroker),
            (KafkaError.MSG_SIZE_TOO_LARGE, Act.WRITE, RequestTooLarge),
            (KafkaError._FENCED, Act.WRITE, Fenced),
            (KafkaError.PRODUCER_FENCED, Act.WRITE, Fenced),
            (KafkaError.ILLEGAL_GENERATION, Act.WRITE, Fenced),
            (KafkaError.UNKNOWN_TOPIC_OR_PART, Act.WRITE, RegistryRefused),
            (KafkaError.INVALID_REPLICATION_FACTOR, Act.WRITE, InvalidSettings),
            (KafkaError._QUEUE_FULL, Act.WRITE, RegistryUnavailable),
            (KafkaError._TRANSPORT, Act.READ, RegistryUnavailable),
            (KafkaError._MSG_TIMED_OUT, Act.WRITE, OutcomeUnknown),
            (KafkaError._TRANSPORT, Act.WRITE, OutcomeUnknown),
            (KafkaError.REQUEST_TIMED_OUT, Act.WRITE, OutcomeUnknown),
            (KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND, Act.WRITE, OutcomeUnknown),
            (KafkaError._PURGE_QUEUE, Act.WRITE, OutcomeUnknown),
            (KafkaError._PURGE_INFLIGHT, Act.WRITE, OutcomeUnknown),
            (KafkaError._FATAL, Act.WRITE, OutcomeUnknown),
        ],
    )
    def test_what_a_code_means(self, code: int, act: Act, kind: type[Exception]) -> None:
        judged = judge(KafkaError(code), act, "the append to x")
        assert type(judged) is kind
        assert str(judged).startswith("the append to x failed: ")

    @pytest.mark.parametrize(
        ("code", "grant"),
        [
            (
                KafkaError.TOPIC_AUTHORIZATION_FAILED,
                "DESCRIBE, DESCRIBE_CONFIGS, READ and WRITE on the topic",
            ),
            (KafkaError.GROUP_AUTHORIZATION_FAILED, "READ on the group"),
            (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "WRITE and DESCRIBE on the transactional id"),
            (KafkaError.CLUSTER_AUTHORIZATION_FAILED, "IDEMPOTENT_WRITE on the cluster"),
        ],
    )
    def test_a_missing_right_is_named(self, code: int, grant: str) -> None:
        assert f"; grant the user {grant}" in str(judge(KafkaError(code), Act.READ, "reading"))

    @pytest.mark.parametrize(
        ("code", "setting"),
        [
            (KafkaError.INVALID_SESSION_TIMEOUT, "group.min.session.timeout.ms"),
            (KafkaError.INVALID_SESSION_TIMEOUT, "group.max.session.timeout.ms"),
            (KafkaError.INVALID_TRANSACTION_TIMEOUT, "transaction.max.timeout.ms"),
        ],
    )
    def test_the_brokers_setting_that_refuses_a_timeout_is_named(self, code: int, setting: str) -> None:
        assert setting in str(judge(KafkaError(code), Act.READ, "joining"))

    def test_every_code_of_a_write_that_is_not_a_known_refusal_leaves_the_outcome_unknown(self) -> None:
        codes = {
            value
            for name, value in vars(KafkaError).items()
            if isinstance(value, int) and not name.startswith("__")
        }
        kinds = {code: type(judge(KafkaError(code), Act.WRITE, "x")) for code in codes}
        assert len(codes) > 100
        for code, kind in kinds.items():
            if kind is not OutcomeUnknown:
                assert not KafkaError(code).retriable()
                assert code != KafkaError._MSG_TIMED_OUT

    def test_which_errors_pass_by_themselves(self) -> None:
        assert is_passing(KafkaError(KafkaError._ALL_BROKERS_DOWN))
        assert is_passing(KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION))
        assert not is_passing(KafkaError(KafkaError._TRANSPORT, fatal=True))
        assert not is_passing(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
        assert not is_passing(KafkaError(KafkaError._AUTO_OFFSET_RESET))

    def test_the_error_inside_an_exception(self) -> None:
        inner = KafkaError(KafkaError._TRANSPORT)
        assert error_of(KafkaException(inner)) == inner
        assert error_of(BufferError("full")).code() == KafkaError._QUEUE_FULL
        assert error_of(OSError("x")).code() == KafkaError._FAIL


class TestTopics:
    def test_differences_name_what_differs_and_what_to_do(self) -> None:
        spec = TopicSpec("t", 1, {"cleanup.policy": "compact,delete", "retention.ms": "5"})
        same = TopicState("t", 1, {"cleanup.policy": "delete, compact", "retention.ms": "5", "other": "x"})
        assert differences(spec, same) == []
        found = differences(spec, TopicState("t", 3, {"cleanup.policy": "delete"}))
        assert found == [
            Difference("t", "partitions", "1", "3"),
            Difference("t", "cleanup.policy", "compact,delete", "delete"),
            Difference("t", "retention.ms", "5", "unknown to the broker"),
        ]
        assert str(found[0]) == "t: partitions is 3, wanted 1"
        assert remedy(found[:1], "h:1").startswith("delete t or choose another name")

    def test_the_remedy_is_one_command_that_a_shell_takes_as_it_is(self) -> None:
        found = [
            Difference("t", "cleanup.policy", "compact,delete", "delete"),
            Difference("t", "retention.ms", "5", "7"),
            Difference("u", "retention.ms", "5", "7"),
        ]
        of_t, of_u = by_topic(found)
        assert shlex.split(remedy(of_t, "a:1,b:2")) == [
            "kafka-configs.sh",
            *("--bootstrap-server", "a:1,b:2"),
            *("--alter", "--topic", "t"),
            *("--add-config", "cleanup.policy=[compact,delete],retention.ms=5"),
        ]
        assert "--add-config 'cleanup.policy=[compact,delete],retention.ms=5'" in remedy(of_t, "a:1")
        assert remedy(of_u, "a:1").endswith("--topic u --add-config retention.ms=5")

    def test_a_refusal_names_each_topic_once(self) -> None:
        connection = Connection.from_url("kafka://127.0.0.1:1/c")
        refuse(connection, [])
        with pytest.raises(InvalidSettings) as refused:
            refuse(connection, [Difference("t", "a", "1", "2"), Difference("t", "b", "1", "2")])
        assert str(refused.value) == (
            "topics exist with other settings: t: a is 2, wanted 1, t: b is 2, wanted 1 (do: "
            "kafka-configs.sh --bootstrap-server 127.0.0.1:1 --alter --topic t --add-config a=1,b=1)"
        )


class TestParts:
    @given(
        st.lists(st.binary(max_size=400), min_size=1, max_size=6, unique=True),
        st.integers(HEADER_BYTES + 1, 600),
        st.randoms(use_true_random=False),
    )
    def test_values_are_put_together_from_parts_in_order_between_those_of_others(
        self, values: list[bytes], limit: int, random: Random
    ) -> None:
        rest = [split(value, limit) for value in values]
        assert all(len(part) <= limit for parts in rest for part in parts)
        assembler, whole, offset = OrderedAssembler(), [], 0
        while left := [parts for parts in rest if parts]:
            value = assembler.add(offset, random.choice(left).pop(0))
            whole += [] if value is None else [value]
            offset = min(offset + 1, REACH - 1)
        assert sorted(whole) == sorted(values)
        assert assembler.oldest_needed(offset) == offset

    @given(st.binary(min_size=50, max_size=300), st.data())
    def test_a_changed_byte_never_gives_another_value(self, value: bytes, data: st.DataObject) -> None:
        parts = split(value, HEADER_BYTES + 40)
        which = data.draw(st.integers(0, len(parts) - 1))
        where = data.draw(st.integers(0, len(parts[which]) - 1))
        flipped = bytearray(parts[which])
        flipped[where] ^= data.draw(st.integers(1, 255))
        parts[which] = bytes(flipped)
        assembler = OrderedAssembler()
        for offset, part in enumerate(parts):
            try:
                assert assembler.add(offset, part) in {None, value}
            except BadPart:
                continue

    def test_a_value_out_of_reach_is_dropped(self) -> None:
        first, last = split(b"x" * 100, HEADER_BYTES + 60)
        assembler = OrderedAssembler()
        assert assembler.add(5, first) is None
        assert assembler.oldest_needed(6) == 5
        assert assembler.oldest_needed(5 + REACH) == 5 + REACH
        with pytest.raises(BadPart, match="part 1 of 2 does not follow"):
            assembler.add(5 + REACH, last)
        assert assembler.add(2 * REACH, first) is None
        assert assembler.add(3 * REACH - 1, last) == b"x" * 100

    def test_limits_that_make_no_sense_are_refused(self) -> None:
        with pytest.raises(InvalidSettings, match="no room"):
            split(b"x", HEADER_BYTES)
        with pytest.raises(RequestTooLarge, match="1048577 parts"):
            split(b"x" * (2**20 + 1), HEADER_BYTES + 1)
        with pytest.raises(BadPart):
            OrderedAssembler().add(0, b"no part")

    def test_a_header_of_another_value_is_found_out(self) -> None:
        first, _ = split(b"a" * 100, HEADER_BYTES + 60)
        _, other = split(b"b" * 100, HEADER_BYTES + 60)
        digest = hashlib.sha256(b"a" * 100).digest()
        lying = other[: HEADER_BYTES - 32] + digest + other[HEADER_BYTES:]
        assembler = OrderedAssembler()
        assembler.add(0, first)
        with pytest.raises(BadPart, match="sha256"):
            assembler.add(1, lying)
        assert assembler.oldest_needed(2) == 2
