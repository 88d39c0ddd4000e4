"""A group's log on Kafka: a topic of one partition, in which only the writer of a snapshot deletes
records."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

import tenacity
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from rebalanser.errors import RebalanserError, RegistryUnavailable
from rebalanser.registry.keys import check_name
from rebalanser.registry.urls import MAX_TOPIC_CHARS
from rebalanser.runtime.logs import log_aside
from rebalanser_kafka.connection import Connection, client_config
from rebalanser_kafka.failures import Act, error_of, judge
from rebalanser_kafka.group.coordinator import OnDone
from rebalanser_kafka.group.follower import LogEntry
from rebalanser_kafka.group.parts import in_parts
from rebalanser_kafka.log import MAX_RECORD_BYTES, LogReader, LogWriter
from rebalanser_kafka.topics import PARTITIONS, TopicSpec, describe, ensure_topics

SETTINGS: Final = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "message.timestamp.type": "LogAppendTime",
}
"""Required settings: retention would delete barriers, and the log's first timestamp must be the broker's."""
PREFERRED: Final = {"segment.bytes": str(16 * 1024 * 1024), "compression.type": "producer"}
"""Preferred settings: a segment is deleted only once all of it lies before a snapshot."""
PART_BYTES: Final = MAX_RECORD_BYTES - 1024
CLOSE_TIMEOUT_S: Final = 1.0


def weaknesses(replicas: int, settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return the reasons why a topic may lose acknowledged records, one sentence each."""
    reasons = []
    if settings.get("unclean.leader.election.enable") == "true":
        reasons.append(
            "unclean.leader.election.enable is true: a broker that lags behind may lead, without barriers "
            "that were added, and two nodes may own one resource"
        )
    if replicas == 1:
        reasons.append("the group's log has one replica: with that broker's disk all barriers are lost")
    elif settings.get("min.insync.replicas") == "1":
        reasons.append(
            "min.insync.replicas is 1: a broker alone may acknowledge a barrier, fail and lose it, and two "
            "nodes may own one resource"
        )
    return tuple(reasons)


class _NotKnownYet(RegistryUnavailable):
    """A broker does not know a topic that was created just now."""


class KafkaLog:
    """The log of one group. ``timeout_s`` limits each append, ``connect_timeout_s`` each ``begin``."""

    def __init__(
        self, connection: Connection, topic: str, timeout_s: float, connect_timeout_s: float
    ) -> None:
        self._connection = connection
        self._topic = topic
        self._connect_timeout_s = connect_timeout_s
        self._writer = LogWriter(connection, delivery_timeout_s=timeout_s)
        self._reader: LogReader | None = None
        self._admin: AdminClient | None = None
        self._closed = False
        self._unsafe_reasons: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the log in messages."""
        return f"the log {self._topic} at {self._connection.servers}"

    @property
    def position(self) -> int:
        """Offset of the next record."""
        return self._reader.position if self._reader is not None else 0

    @property
    def unsafe_reasons(self) -> tuple[str, ...]:
        """Reasons why its topic weakens a promise, one sentence each; known after ``begin``."""
        return self._unsafe_reasons

    @property
    def trouble(self) -> str | None:
        """Reason why no records may be coming at present."""
        return self._reader.trouble if self._reader is not None else None

    def begin(self) -> tuple[int, int]:
        """Create the topic if it is missing, and read from its first record on.

        Return the offsets of its first record and of the next one.

        Raises:
            InvalidSettings: the topic exists with settings that would lose records; says what differs.
            AccessDenied: it is missing and this user may not create it, or may not read it.
            RegistryUnavailable: no answer within the timeout.
        """
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        spec = TopicSpec(
            self._topic, 1, {**SETTINGS, **PREFERRED}, must_match=frozenset({PARTITIONS, *SETTINGS})
        )
        ensure_topics(self._connection, [spec], self._connect_timeout_s)
        self._unsafe_reasons = self._weaknesses()
        reader = LogReader(self._connection, self._topic, "earliest", committed_only=False)
        try:
            start, end = reader.bounds(self._connect_timeout_s)
        except BaseException:
            reader.close()
            raise
        reader.close()
        self._reader = LogReader(self._connection, self._topic, start, committed_only=False)
        return start, end

    def _weaknesses(self) -> tuple[str, ...]:
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_NotKnownYet),
            wait=tenacity.wait_fixed(0.05),
            stop=tenacity.stop_after_delay(self._connect_timeout_s),
            reraise=True,
        )
        return retrying(self._look)

    def _look(self) -> tuple[str, ...]:
        state = describe(self._connection, [self._topic], self._connect_timeout_s).get(self._topic)
        try:
            topics = self._operator().list_topics(self._topic, timeout=self._connect_timeout_s).topics
        except KafkaException as error:
            raise judge(error_of(error), Act.READ, f"asking for the replicas of {self.name}") from None
        if state is None or not topics[self._topic].partitions:
            raise _NotKnownYet(f"{self.name}: not every broker knows of it yet")
        return weaknesses(len(topics[self._topic].partitions[0].replicas), state.settings)

    def _operator(self) -> AdminClient:
        if self._admin is None:
            self._admin = AdminClient(client_config(self._connection, {}))
        return self._admin

    def read(self, timeout_s: float) -> Sequence[LogEntry]:
        """Return the next records; none if none comes within ``timeout_s`` seconds.

        Raises:
            RebalanserError: the log must be begun anew.
        """
        if self._reader is None:
            self.begin()
        assert self._reader is not None
        return [
            LogEntry(record.offset, record.timestamp_ms, record.value)
            for record in self._reader.poll(timeout_s)
        ]

    def append(self, value: bytes, done: OnDone) -> None:
        """Append a request, in parts if it is too large; ``done`` is called for each part.

        Raises:
            RebalanserError: no part was sent that could take effect.
        """
        for part in in_parts(value, PART_BYTES):
            self._writer.append(self._topic, None, part, on_done=done)

    def delete_before(self, offset: int) -> None:
        """Ask the broker to delete the records before this offset. Returns without waiting."""
        try:
            futures = self._operator().delete_records([TopicPartition(self._topic, 0, offset)])
        except KafkaException as error:
            self._kept(judge(error_of(error), Act.READ, f"deleting the beginning of {self.name}"))
            return
        for future in futures.values():
            future.add_done_callback(self._deleted)

    def _deleted(self, future: Future[object]) -> None:
        error = future.exception()
        if error is not None and not self._closed:
            self._kept(judge(error_of(error), Act.READ, f"deleting the beginning of {self.name}"))

    def _kept(self, error: RebalanserError) -> None:
        log_aside("the group's log could not be shortened", error, action="log_kept", topic=self._topic)

    def close(self) -> None:
        """Close the log; pending appends are awaited shortly."""
        self._closed = True
        self._writer.close(CLOSE_TIMEOUT_S)
        if self._reader is not None:
            with suppress(RuntimeError):
                self._reader.close()


_PLAIN: Final = re.compile(r"[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*")
_HASH_CHARS: Final = 32
_SEPARATOR: Final = "-group-"


def topic_of(cluster: str, group: str) -> str:
    """Return the topic of a group's log. ``cluster`` is a valid name of a cluster.

    Raises:
        InvalidName: the group's name can't be stored.
    """
    check_name(group, "group")
    room = MAX_TOPIC_CHARS - len(cluster) - len(_SEPARATOR)
    if _PLAIN.fullmatch(group) and "group" not in group.split("-") and len(group) <= room:
        return cluster + _SEPARATOR + group
    legible = "-".join(part for part in re.split(r"[^A-Za-z0-9]+", group) if part not in {"", "group"})
    digest = hashlib.sha256(group.encode()).hexdigest()[:_HASH_CHARS]
    head = legible[: room - _HASH_CHARS - 2].rstrip("-")
    return f"{cluster}{_SEPARATOR}{head}--{digest}"
