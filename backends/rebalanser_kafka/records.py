"""Records of a log, read and to be written, and their way through librdkafka."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, cast

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, KafkaError, Message, Producer

from rebalanser.errors import OutcomeUnknown, RebalanserError, RegistryUnavailable, RequestTooLarge
from rebalanser_kafka.failures import RAISED, Act, OnDone, error_of, judge

MAX_RECORD_BYTES: Final = 1_000_000
"""Maximum bytes of key, value and headers of a record; with Kafka's framing it fits the default of
1,048,588."""
BUFFERED_RECORDS: Final = 10_000
BUFFERED_KBYTES: Final = 65_536

FRAMING_BYTES: Final = 16_384
"""Upper bound of the bytes that librdkafka counts for a record beside key, value and headers."""
_PURGE_S: Final = 1.0

WRITER_SETTINGS: Final = MappingProxyType(
    {
        "acks": "all",
        "enable.idempotence": True,
        "linger.ms": 0,
        "queue.buffering.max.messages": BUFFERED_RECORDS,
        "queue.buffering.max.kbytes": BUFFERED_KBYTES,
        "retry.backoff.ms": 50,
        "topic.metadata.propagation.max.ms": 5_000,  # else a missing topic is waited for half a minute
    }
)


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One record as it was read. ``timestamp_ms`` is the broker's if ``log_append_time`` is true."""

    offset: int
    timestamp_ms: int
    log_append_time: bool
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes] = field(default_factory=dict)
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NewRecord:
    """One record to write. Without a value it is a tombstone: compaction treats it as a deletion."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes] = field(default_factory=dict)
    partition: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes that count against ``MAX_RECORD_BYTES``."""
        headers = sum(len(name.encode()) + len(value) for name, value in self.headers.items())
        return len(self.key or b"") + len(self.value or b"") + headers


def to_record(message: Message, offset: int) -> LogRecord:
    """Convert a message of librdkafka to a record."""
    kind, timestamp_ms = message.timestamp()
    key, value = message.key(), message.value()
    headers: dict[str, bytes] = {}
    for name, content in cast("Iterable[tuple[str, bytes | None]]", message.headers() or ()):
        headers[name] = content or b""
    size_bytes = (
        len(key or b"")
        + len(value or b"")
        + sum(len(name) + len(content) for name, content in headers.items())
    )
    return LogRecord(
        offset=offset,
        timestamp_ms=timestamp_ms,
        log_append_time=kind == TIMESTAMP_LOG_APPEND_TIME,
        key=key,
        value=value,
        headers=headers,
        size_bytes=size_bytes,
    )


def check_size(record: NewRecord, limit_bytes: int) -> None:
    """Refuse an oversized record before it is sent; the message has the sizes."""
    if record.size_bytes > limit_bytes:
        raise RequestTooLarge(
            f"a record of {record.size_bytes} bytes for {record.topic}; at most {limit_bytes} are sent"
        )


class Delivery:
    """Receives librdkafka's report about one record, and calls ``on_done`` once."""

    __slots__ = ("_act", "_limit_bytes", "_on_done", "_record", "_told")

    def __init__(self, record: NewRecord, limit_bytes: int, on_done: OnDone, act: Act) -> None:
        self._record = record
        self._limit_bytes = limit_bytes
        self._on_done = on_done
        self._act = act
        self._told = False

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        self._tell(self._refusal(error) if error is not None else self._offset(message))

    def give_up(self) -> None:
        """Give up the record: no report will come any more."""
        self._tell(OutcomeUnknown(f"the append to {self._record.topic} was given up; it may have been done"))

    def _tell(self, answer: int | RebalanserError) -> None:
        if not self._told:
            self._told = True
            self._on_done(answer)

    def _offset(self, message: Message) -> int | RebalanserError:
        offset = message.offset()
        if offset is None or offset < 0:  # known to the broker from an earlier try, but not where it wrote it
            return OutcomeUnknown(f"the append to {self._record.topic} was done, but its offset is not known")
        return offset

    def _refusal(self, error: KafkaError) -> RebalanserError:
        failure = judge(error, self._act, f"the append to {self._record.topic}")
        if isinstance(failure, RequestTooLarge):
            return RequestTooLarge(
                f"a record of {self._record.size_bytes} bytes is over max.message.bytes of topic "
                f"{self._record.topic}; this writer would send {self._limit_bytes}"
            )
        return failure


def produce(producer: Producer, record: NewRecord, delivery: Delivery) -> None:
    """Hand one record to librdkafka; if this raises, the record was not sent."""
    try:
        producer.produce(
            record.topic,
            value=record.value,
            key=record.key,
            partition=record.partition,
            headers=list(record.headers.items()),
            on_delivery=delivery,
        )
    except BufferError:
        raise RegistryUnavailable(
            f"{BUFFERED_RECORDS} records or {BUFFERED_KBYTES} kB wait to be sent already; nothing was sent"
        ) from None
    except RAISED as exception:
        raise judge(error_of(exception), Act.READ, f"the append to {record.topic}") from None


def settle(producer: Producer, timeout_s: float = 0.0) -> None:
    """Wait at most ``timeout_s`` seconds for records in flight; then report each other record as given up, so
    that every ``on_done`` is called."""
    for wait_s in (timeout_s, _PURGE_S, _PURGE_S):
        with suppress(*RAISED):  # a fatal error comes once, and instead of the rest of the reports
            producer.flush(wait_s)
        producer.purge()
    del producer  # an error of the client that is never freed would keep it, by this frame
