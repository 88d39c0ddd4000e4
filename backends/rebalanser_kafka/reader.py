"""Reads one partition of a topic to its end, and further as it grows."""

from __future__ import annotations

import time
from contextlib import suppress
from types import MappingProxyType, TracebackType
from typing import Final, Literal, Self

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    Message,
    TopicPartition,
)

from rebalanser.errors import (
    InvalidState,
    RebalanserError,
    RegistryUnavailable,
)
from rebalanser_kafka.connection import Connection, client_config
from rebalanser_kafka.failures import (
    RAISED,
    Act,
    LogTruncated,
    error_of,
    is_missing,
    is_passing,
    is_truncated,
    judge,
)
from rebalanser_kafka.records import LogRecord, to_record

MAX_BATCH: Final = 500
"""Maximum records that one poll returns."""
READ_AHEAD_BYTES: Final = 16 * 2**20
"""Default bytes that are read ahead of a poll."""
FETCH_BYTES: Final = 2**20
"""Maximum bytes of one answer of the broker, unless its first batch alone is larger."""
_LEAST_S: Final = 0.001

_SETTINGS: Final = MappingProxyType(
    {
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",  # a reader that silently begins elsewhere has lost records
        "enable.partition.eof": True,  # the only sign that what is left are control records
        "fetch.wait.max.ms": 50,
        "fetch.error.backoff.ms": 50,
        "fetch.queue.backoff.ms": 10,
        "topic.metadata.propagation.max.ms": 5_000,  # else a missing topic is waited for half a minute
    }
)


class LogReader:
    """Reads one partition in order. Any number of readers share a topic: none takes a record from another.

    It joins no consumer group; librdkafka needs the name of one, ``{cluster}-reader``, but never commits to
    it. With ``committed_only`` (the default) records of open and aborted transactions are not seen, nor any
    record after the first open one. One thread at a time.
    """

    def __init__(
        self,
        connection: Connection,
        topic: str,
        start: int | Literal["earliest", "latest"],
        *,
        partition: int = 0,
        committed_only: bool = True,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
    ) -> None:
        """Create the reader; nothing is sent yet. ``latest`` is the end at the time the first poll reaches a
        broker.

        About ``read_ahead_bytes`` are fetched at a time, and as much waits for ``poll``.
        """
        self._topic = topic
        self._partition = partition
        self._start = start
        self._position = start if isinstance(start, int) else 0
        self._assigned = False
        self._failed: RebalanserError | None = None
        self._trouble: str | None = None
        self._closed = False
        isolation = "read_committed" if committed_only else "read_uncommitted"
        settings = {
            **_SETTINGS,
            "group.id": f"{connection.cluster}-reader",
            "isolation.level": isolation,
            "queued.max.messages.kbytes": max(1, read_ahead_bytes // 1024),
            "fetch.message.max.bytes": min(read_ahead_bytes, FETCH_BYTES),
        }
        self._consumer = Consumer(client_config(connection, settings, self._hear))

    @property
    def topic(self) -> str:
        """The topic being read."""
        return self._topic

    @property
    def position(self) -> int:
        """Offset of the next record: all visible records before it were returned.

        0 until a ``latest`` is known.
        """
        return self._position

    @property
    def trouble(self) -> str | None:
        """Reason why no records may be coming, such as an unreachable broker; None after any came."""
        return self._trouble

    def poll(self, timeout_s: float) -> list[LogRecord]:
        """Return the next records, at most 500, as soon as there are any; none after ``timeout_s`` seconds,
        or if only the position has moved. An unreachable broker is waited for: see ``trouble``.

        Raises:
            LogTruncated: the position is not in the log any more, or not yet; the reader is unusable from now
                on.
            AccessDenied: this user may not read the topic.
            RegistryRefused: there is no such topic.
        """
        if self._failed is not None:
            raise self._failed
        if self._closed:
            raise InvalidState(f"the reader of {self._topic} is closed")
        deadline = time.monotonic() + timeout_s
        if not self._assigned and not self._assign(timeout_s):
            return []
        before = self._position
        records: list[LogRecord] = []
        while True:
            messages = self._fetch(max(0.0, deadline - time.monotonic()))
            for message in messages:
                self._take(message, records)
            if self._failed is not None and not records:
                raise self._failed
            if records or self._position != before or not messages:
                return records

    def move_to(self, offset: int) -> None:
        """Continue at this offset; records read ahead are dropped."""
        self._start = self._position = offset
        self._assigned, self._failed = False, None

    def end_offset(self, timeout_s: float) -> int:
        """Return the offset after the last visible record: with ``committed_only`` the last stable offset,
        else the high watermark.

        Raises:
            RebalanserError: as ``bounds``.
        """
        return self.bounds(timeout_s)[1]

    def bounds(self, timeout_s: float) -> tuple[int, int]:
        """Return the offset of the log's first record, and ``end_offset``, in one request.

        Raises:
            RegistryUnavailable: no broker answered within ``timeout_s`` seconds, or the partition has no
                leader yet, as after a start of its brokers.
            AccessDenied, RegistryRefused: as ``poll``.
        """
        if self._closed:
            raise InvalidState(f"the reader of {self._topic} is closed")
        deadline = time.monotonic() + timeout_s
        partition = TopicPartition(self._topic, self._partition)
        what = f"asking for the offsets of {self._topic}"
        try:
            return self._consumer.get_watermark_offsets(partition, timeout=max(_LEAST_S, timeout_s))
        except RAISED as exception:
            error = error_of(exception)
        if is_missing(error) and self._is_known(max(_LEAST_S, deadline - time.monotonic())):
            raise RegistryUnavailable(f"{what} failed: its partition {self._partition} has no leader yet")
        raise judge(error, Act.READ, what)

    def close(self) -> None:
        """Close the connection, without waiting for a broker. Closing twice does nothing."""
        if not self._closed:
            self._closed = True
            self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fetch(self, timeout_s: float) -> list[Message]:
        try:
            message = self._consumer.poll(timeout_s)
            return [] if message is None else [message, *self._consumer.consume(MAX_BATCH - 1, 0)]
        except RAISED as exception:
            self._failed = judge(error_of(exception), Act.READ, f"reading {self._topic}")
            return []

    def _is_known(self, timeout_s: float) -> bool:
        """True if the brokers know the partition, with a leader or without; the request creates no topic.

        The client reports both a missing topic and one without a leader as unknown.
        """
        try:
            found = self._consumer.list_topics(self._topic, timeout=timeout_s).topics.get(self._topic)
        except RAISED as exception:
            raise judge(error_of(exception), Act.READ, f"looking at topic {self._topic}") from None
        return found is not None and self._partition in found.partitions

    def _assign(self, timeout_s: float) -> bool:
        if self._start == "latest":
            try:
                self._position = self.end_offset(timeout_s)
            except RegistryUnavailable as error:
                self._trouble = str(error)
                return False
        elif self._start == "earliest":
            # If the partition's leader is not known yet, librdkafka retries after half a second.
            with suppress(RebalanserError):
                self.bounds(timeout_s)
        offset = OFFSET_BEGINNING if self._start == "earliest" else self._position
        self._consumer.assign([TopicPartition(self._topic, self._partition, offset)])
        self._assigned = True
        return True

    def _take(self, message: Message, records: list[LogRecord]) -> None:
        error = message.error()
        offset = message.offset()
        if error is None and offset is not None:
            self._trouble = None
            self._position = offset + 1
            records.append(to_record(message, offset))
        elif error is not None and error.code() == KafkaError._PARTITION_EOF:
            self._trouble = None
            self._position = max(self._position, offset or 0)
        elif error is not None:
            self._learn(error)

    def _hear(self, error: KafkaError) -> None:
        """Handle an error of the client as a whole; one about its group or one connection may pass."""
        if error.code() in {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED}:
            self._learn(error)
        else:
            self._note(error)

    def _learn(self, error: KafkaError) -> None:
        if is_truncated(error):
            self._failed = LogTruncated(self._topic, self._position)
        elif is_passing(error):
            self._note(error)
        else:
            self._failed = judge(error, Act.READ, f"reading {self._topic}")

    def _note(self, error: KafkaError) -> None:
        self._trouble = str(judge(error, Act.READ, f"reading {self._topic}"))
