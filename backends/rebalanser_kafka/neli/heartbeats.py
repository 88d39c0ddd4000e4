"""Heartbeats of a process, and its requests for the partition count."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from rebalanser.core.neli.messages import AskPartitionCount, Partition, PartitionCount
from rebalanser.core.neli.records import HEADER, Stamp
from rebalanser_kafka.connection import Connection, client_config
from rebalanser_kafka.failures import RAISED, error_of, is_denied
from rebalanser_kafka.records import settle

MAX_WAITING: Final = 10_000
"""Maximum heartbeats that wait for a broker; more are dropped."""
_QUESTION_S: Final = 2.0
_LEAST_DELIVERY_S: Final = 1.0

_log = logging.getLogger("rebalanser.neli")


class HeartbeatProducer:
    """Publishes empty records, each to a given partition (NE-2). One thread at a time.

    They need no idempotence: one that comes twice, or late, renews nothing. One that is not delivered within
    the deadline is given up, as it could renew nothing any more.
    """

    def __init__(
        self,
        connection: Connection,
        topic: str,
        process: str,
        deadline_s: float,
        on_count: Callable[[PartitionCount], None],
        on_denied: Callable[[KafkaError], None],
    ) -> None:
        """``on_denied`` is called, within ``publish``, if this user may not write to the topic."""
        self._topic = topic
        self._on_count = on_count
        self._on_denied = on_denied
        delivery_ms = int(max(_LEAST_DELIVERY_S, deadline_s) * 1000)
        self._producer = Producer(
            client_config(
                connection,
                {
                    "client.id": process,
                    "acks": "all",
                    "enable.idempotence": False,
                    "linger.ms": 0,
                    "delivery.timeout.ms": delivery_ms,
                    "socket.timeout.ms": max(2_000, delivery_ms),
                    "request.timeout.ms": delivery_ms,
                    "retry.backoff.ms": 20,
                    "queue.buffering.max.messages": MAX_WAITING,
                    "topic.metadata.propagation.max.ms": 5_000,
                },
            )
        )
        self._questions: queue.Queue[AskPartitionCount | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._ask, name=f"rebalanser-neli-count-{topic}", daemon=True)
        self._thread.start()

    def publish(self, heartbeats: Mapping[Partition, Stamp]) -> None:
        """Send one record to each of these partitions; without a broker they are dropped."""
        try:
            for partition, stamp in heartbeats.items():
                self._producer.produce(
                    self._topic,
                    partition=partition,
                    headers=[(HEADER, stamp.encode())],
                    on_delivery=self._delivered,
                )
            self._producer.poll(0)
        except BufferError:
            _log.debug(
                "%d heartbeats are already waiting to be sent",
                MAX_WAITING,
                extra={"action": "heartbeats_wait"},
            )
        except RAISED as exception:
            _log.warning(
                "publishing heartbeats failed: %s",
                error_of(exception).str(),
                extra={"action": "heartbeats_failed"},
            )

    def ask(self, question: AskPartitionCount) -> None:
        """Request the partition count, unless a request is pending."""
        try:
            self._questions.put_nowait(question)
        except queue.Full:
            _log.debug(
                "the partition count is already being requested", extra={"action": "partition_count_unknown"}
            )

    def close(self) -> None:
        """Give up all pending requests."""
        self._questions.put(None)
        self._thread.join()
        settle(self._producer)

    def _delivered(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None and is_denied(error):
            self._on_denied(error)

    def _ask(self) -> None:
        while (question := self._questions.get()) is not None:
            try:
                found = self._producer.list_topics(self._topic, timeout=_QUESTION_S).topics[self._topic]
            except KafkaException as exception:
                _log.debug(
                    "reading the partition count failed: %s",
                    error_of(exception).str(),
                    extra={"action": "partition_count_unknown"},
                )
                continue
            if found.error is None:
                self._on_count(PartitionCount(question, len(found.partitions)))
