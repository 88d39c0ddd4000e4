"""The history as records of a Kafka topic: one for each line that a file would have, with its process as key.

``kafka://[USER:PASSWORD@]HOST:PORT,…/TOPIC[?OPTION=VALUE&…]``, with the options and the environment of every
other ``kafka://`` URL. The key keeps one process's records in one partition, in their order.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from functools import partial
from types import MappingProxyType
from typing import Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_exponential

from rebalanser.errors import InvalidName, InvalidSettings, InvalidUrl, RebalanserError, RegistryUnavailable
from rebalanser.history import GAP, HistorySink, Record
from rebalanser.history.buffer import TOO_SLOW, RecordBuffer
from rebalanser.redaction import redact
from rebalanser.registry.urls import check_topic_name, parse_url
from rebalanser_kafka.connection import Connection, client_config
from rebalanser_kafka.failures import RAISED, Act, error_of, judge
from rebalanser_kafka.records import FRAMING_BYTES, MAX_RECORD_BYTES, WRITER_SETTINGS
from rebalanser_kafka.topics import TopicSpec, ensure_topics, partitions_of

PARTITIONS: Final = 4
SETTINGS: Final = MappingProxyType(
    {
        "cleanup.policy": "delete",
        "message.timestamp.type": "LogAppendTime",  # a node's wrong clock must not end a record's time here
        "retention.ms": str(30 * 24 * 3600 * 1000),
    }
)
"""Settings of a topic that is created; an existing one is used as it is."""
QUEUE_SIZE: Final = 10_000

_PRODUCER: Final = MappingProxyType(
    {
        **WRITER_SETTINGS,
        "batch.size": 65_536,  # a topic that takes records of this size refuses none for its neighbours
        "compression.type": "lz4",
        "linger.ms": 5,
        "message.max.bytes": MAX_RECORD_BYTES + FRAMING_BYTES,
        "message.timeout.ms": 0,  # librdkafka tries for as long as it takes: our own queue is the limit
        "partitioner": "murmur2_random",
    }
)
_GATHER_S: Final = 0.02
"""Seconds that a first record waits for others to be sent with it."""
_SERVE_S: Final = 0.1
_IDLE_S: Final = 1.0
_TOPIC_TIMEOUT_S: Final = 5.0
_RETRY_INITIAL_S: Final = 0.05
_RETRY_MAX_S: Final = 1.0
_SETTLE_S: Final = 0.2
"""Seconds before its deadline, at most a tenth of its time, at which ``close`` gives up to count the
losses."""
_MISSING_TOPIC: Final = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})

_log = logging.getLogger("rebalanser.history")


def open_sink(url: str, group: str, label: str) -> HistorySink:
    """Return a sink that writes to the topic of ``url``; ``group`` and ``label`` identify the history in
    logs.

    No request is sent yet; records are taken in while no broker is reachable.

    Raises:
        InvalidUrl: the topic, an option or the account is invalid; the message says why.
    """
    return KafkaSink(connection_of(url), group, label)


def connection_of(url: str) -> Connection:
    """Return the connection to the brokers; its ``cluster`` is the topic's name.

    Raises:
        InvalidUrl: the topic, an option or the account is invalid; the message says why.
    """
    parsed = parse_url(url)
    topic = parsed.path.strip("/")
    if parsed.scheme != "kafka" or not topic:
        raise InvalidUrl(f"{parsed} names no topic for the history; write kafka://HOST:PORT/TOPIC")
    try:
        check_topic_name(topic)
    except InvalidName as error:
        raise InvalidUrl(f"{parsed}: {error}") from None
    return dataclasses.replace(Connection.from_url(dataclasses.replace(parsed, path="")), cluster=topic)


class KafkaSink:
    """Sends records to a topic, from a daemon thread of its own, each acknowledged by all replicas in sync.

    While no broker answers, up to ``queue_size`` records wait, and as many again may be in flight; librdkafka
    holds at most 10,000 of these, or 64 MiB. Records beyond that are dropped and counted; once there is room
    again, a ``gap`` record takes their place. A record may arrive twice, always with its number, if the
    producer had to be created anew.
    """

    def __init__(
        self, connection: Connection, group: str, label: str, *, queue_size: int = QUEUE_SIZE
    ) -> None:
        """Begin to send; the topic is created if it is missing, as soon as a broker answers.

        Raises:
            InvalidSettings: ``queue_size`` is not positive.
            InvalidUrl: librdkafka refuses the settings of the connection.
        """
        if queue_size < 1:
            raise InvalidSettings(f"queue_size of the history must be 1 or more, not {queue_size}")
        self._connection = connection
        self._topic = connection.cluster
        self._whose = f"the history of {label} in {group}"
        self._waiting = RecordBuffer(queue_size)
        self._topic_is_there = False
        self._under_way = False
        self._deadline: float | None = None
        self._filled = threading.Event()
        self._closing = threading.Event()
        try:
            self._producer = self._new_producer()
        except (KafkaException, ValueError, TypeError) as exception:
            reason = redact(error_of(exception).str())
            raise InvalidUrl(f"{connection.describe()} cannot be used: {reason}") from None
        self._thread = threading.Thread(target=self._run, name=f"rebalanser-history-{group}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Number of dropped records so far; a ``gap`` record that could not be sent counts as one."""
        return self._waiting.dropped

    def write(self, record: Record) -> None:
        """Accept a record, or drop and count it. Never waits for a broker, and never raises."""
        self._waiting.put(record)
        if not self._filled.is_set():
            self._filled.set()

    def close(self, timeout_s: float) -> None:
        """Send all accepted records, waiting at most ``timeout_s`` seconds for the acknowledgements."""
        if self._deadline is None:
            self._deadline = time.monotonic() + timeout_s - min(_SETTLE_S, timeout_s / 10)
        self._closing.set()
        self._filled.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning(
                "%s is not completely written after %.3g s",
                self._whose,
                timeout_s,
                extra={"action": "history_incomplete"},
            )

    def _run(self) -> None:
        last = False
        while not last:
            if not self._filled.wait(_IDLE_S):
                self._serve(0.0)
                continue
            self._closing.wait(_GATHER_S)
            self._filled.clear()
            last = self._closing.is_set()
            self._deliver(_Batch(self._waiting.take(last=last)))
        self._forget_producer()

    def _deliver(self, batch: _Batch) -> None:
        """Write the records to the topic; retry until that succeeds or the time to close is over."""
        retrying = Retrying(
            retry=retry_if_exception_type(RebalanserError),
            wait=wait_exponential(multiplier=_RETRY_INITIAL_S, max=_RETRY_MAX_S),
            stop=lambda _state: self._is_over(),
            sleep=self._pause,
            before_sleep=self._tell,
            reraise=True,
        )
        self._under_way = True
        try:
            retrying(self._attempt, batch)
        except RebalanserError as error:
            self._forget_producer()
            self._waiting.drop_for_good(len(batch.left))
            _log.error(
                "%d records of %s are lost: %s",
                len(batch.left),
                self._whose,
                error,
                extra={"action": "history_lost"},
            )
        else:
            self._recovered()
        finally:
            self._under_way = False

    def _attempt(self, batch: _Batch) -> None:
        """Send the rest of the batch once, and wait for every answer.

        Raises:
            RebalanserError: not all arrived; those that did are no longer in the batch.
        """
        if not batch.left:
            return
        self._make_topic()
        batch.begin()
        while batch.unsent or batch.unanswered:
            if self._is_over():
                raise RegistryUnavailable(f"{self._connection.servers} did not answer in time")
            self._hand_over(batch)
            self._serve(_SERVE_S)
        batch.replace_too_large(self._waiting)
        if batch.failed is not None:
            self._topic_is_there = batch.failed.code() not in _MISSING_TOPIC
            raise judge(batch.failed, Act.READ, f"writing to topic {self._topic}")

    def _make_topic(self) -> None:
        if self._topic_is_there:
            return
        timeout_s = min(_TOPIC_TIMEOUT_S, self._left_s())
        with self._connection.naming_user():
            if self._topic not in partitions_of(self._connection, [self._topic], timeout_s):
                spec = TopicSpec(self._topic, PARTITIONS, SETTINGS, must_match=frozenset())
                ensure_topics(self._connection, [spec], timeout_s)
        self._topic_is_there = True

    def _hand_over(self, batch: _Batch) -> None:
        """Give librdkafka as many records as it has room for."""
        while batch.unsent:
            place = batch.unsent.pop()
            record = batch.left.get(place)
            if record is None:  # an answer of the producer before this one came late
                continue
            answer = partial(batch.answered, place)
            try:
                self._producer.produce(
                    self._topic,
                    key=record.process.encode(),
                    value=record.to_line().removesuffix(b"\n"),
                    on_delivery=answer,
                )
            except BufferError:
                batch.unsent.append(place)
                return
            except RAISED as exception:
                batch.failed_at(place, error_of(exception))
            else:
                batch.unanswered.add(place)

    def _serve(self, timeout_s: float) -> None:
        """Process librdkafka's answers.

        Raises:
            RebalanserError: librdkafka has given the producer up for good, in the middle of a batch.
        """
        try:
            self._producer.poll(timeout_s)
        except RAISED as exception:
            self._forget_producer()
            self._producer = self._new_producer()
            if self._under_way:
                error = error_of(exception)
                raise judge(error, Act.READ, f"writing to topic {self._topic}") from None

    def _new_producer(self) -> Producer:
        return Producer(client_config(self._connection, _PRODUCER, self._hear))

    def _forget_producer(self) -> None:
        try:
            self._producer.purge()
            self._producer.poll(0)
        except RAISED as exception:
            _log.debug(
                "%s: %s",
                self._whose,
                redact(error_of(exception).str()),
                extra={"action": "history_unflushed"},
            )

    def _hear(self, error: KafkaError) -> None:
        """Handle an error that belongs to no record, such as a lost connection."""
        if self._under_way:
            self._failing(redact(error.str()))

    def _tell(self, attempt: RetryCallState) -> None:
        error = attempt.outcome.exception() if attempt.outcome else None
        self._failing(str(error))

    def _failing(self, reason: str) -> None:
        if self._waiting.reason == TOO_SLOW:
            self._waiting.reason = reason
            _log.warning(
                "%s can't be written, trying again: %s",
                self._whose,
                reason,
                extra={"action": "history_failing"},
            )

    def _recovered(self) -> None:
        if self._waiting.reason != TOO_SLOW:
            self._waiting.reason = TOO_SLOW
            _log.info("writing to %s works again", self._whose, extra={"action": "history_recovered"})

    def _left_s(self) -> float:
        """Return the seconds until the sink must be closed; infinite until ``close``."""
        return float("inf") if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _is_over(self) -> bool:
        return self._left_s() <= 0.0

    def _pause(self, seconds: float) -> None:
        if self._closing.is_set():
            time.sleep(min(seconds, self._left_s()))
        else:
            self._closing.wait(seconds)


class _Batch:
    """The records in flight, by their place, and their outcomes in this attempt."""

    def __init__(self, records: list[Record]) -> None:
        self.left = dict(enumerate(records))
        """Records that have not arrived."""
        self.unsent: list[int] = []
        """Places of the records to hand over, the first one last."""
        self.unanswered: set[int] = set()
        self.failed: KafkaError | None = None
        self._too_large: set[int] = set()

    def begin(self) -> None:
        """Begin another attempt with the rest."""
        self.unsent = sorted(self.left, reverse=True)
        self.unanswered = set()
        self.failed = None
        self._too_large = set()

    def answered(self, place: int, error: KafkaError | None, _message: Message) -> None:
        """Take librdkafka's report about one record; it may come after a later attempt has begun."""
        self.unanswered.discard(place)
        if error is None:
            self.left.pop(place, None)
        else:
            self.failed_at(place, error)

    def failed_at(self, place: int, error: KafkaError) -> None:
        """Note that the record did not arrive."""
        self.failed = error
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            self._too_large.add(place)

    def replace_too_large(self, waiting: RecordBuffer) -> None:
        """Replace each record that the topic will never accept by a gap record."""
        waiting.drop_for_good(len(self._too_large))
        for place in self._too_large & self.left.keys():
            record = self.left.pop(place)
            if record.kind != GAP:
                reason = "the topic takes no record of this size"
                self.left[place] = Record.gap(record, record, dropped=1, reason=reason)
