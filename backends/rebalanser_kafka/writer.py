"""Appending single records."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Final, Self

from confluent_kafka import (
    Producer,
)

from rebalanser.errors import (
    InvalidState,
    OutcomeUnknown,
    RebalanserError,
)
from rebalanser_kafka.connection import Connection, client_config
from rebalanser_kafka.failures import RAISED, Act, OnDone
from rebalanser_kafka.records import (
    FRAMING_BYTES,
    MAX_RECORD_BYTES,
    WRITER_SETTINGS,
    Delivery,
    NewRecord,
    check_size,
    produce,
    settle,
)

DELIVERY_TIMEOUT_S: Final = 30.0
CLOSE_TIMEOUT_S: Final = 5.0

_SERVE_S: Final = 0.1
_NO_HEADERS: Final[Mapping[str, bytes]] = MappingProxyType({})


class LogWriter:
    """Appends single records, each acknowledged by all replicas in sync and never written twice.

    At most 10,000 records or 64 MiB wait for their answer. Records of one writer keep their order.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        delivery_timeout_s: float = DELIVERY_TIMEOUT_S,
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        """A record that is not acknowledged within ``delivery_timeout_s`` seconds is given up as unknown."""
        self._config = client_config(
            connection,
            {
                **WRITER_SETTINGS,
                "delivery.timeout.ms": int(delivery_timeout_s * 1000),
                "message.max.bytes": max_record_bytes + FRAMING_BYTES,
            },
        )
        self._delivery_timeout_s = delivery_timeout_s
        self._max_record_bytes = max_record_bytes
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._producer = Producer(self._config)
        self._spent = False
        self._waiting: set[Delivery] = set()
        self._thread = threading.Thread(target=self._serve, name="rebalanser-kafka-writer", daemon=True)
        self._thread.start()

    def append(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Mapping[str, bytes] = _NO_HEADERS,
        on_done: OnDone | None = None,
        *,
        partition: int = 0,
    ) -> None:
        """Hand over one record. ``on_done`` is told its offset, or the error, once, from the writer's own
        thread, which it must not hold up: an :class:`OutcomeUnknown` where the record may still be written,
        any other error where it never will be. After an error raised here it is not called.

        Raises:
            RequestTooLarge: over the limit, with the numbers; nothing was sent.
            RegistryUnavailable: too many records wait already; nothing was sent.
            InvalidState: the writer is closed.
        """
        record = NewRecord(topic, key, value, headers, partition)
        check_size(record, self._max_record_bytes)
        tell = on_done or _forget

        def finish(answer: int | RebalanserError) -> None:
            self._waiting.discard(delivery)
            tell(answer)

        delivery = Delivery(record, self._max_record_bytes, finish, Act.WRITE)
        with self._lock:
            if self._closing.is_set():
                raise InvalidState("the writer is closed")
            if self._spent:
                self._producer, self._spent = Producer(self._config), False
            self._waiting.add(delivery)
            try:
                produce(self._producer, record, delivery)
            except BaseException:
                self._waiting.discard(delivery)
                raise

    def append_and_wait(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Mapping[str, bytes] = _NO_HEADERS,
        *,
        timeout_s: float,
        partition: int = 0,
    ) -> int:
        """Append one record and answer its offset. Not from ``on_done``: it would wait for itself.

        Raises:
            OutcomeUnknown: no answer within ``timeout_s`` seconds: it may be written, now or later.
            RequestTooLarge, RegistryUnavailable, AccessDenied, RegistryRefused: it is not written.
        """
        answered = threading.Event()
        answers: list[int | RebalanserError] = []

        def take(answer: int | RebalanserError) -> None:
            answers.append(answer)
            answered.set()

        self.append(topic, key, value, headers, take, partition=partition)
        if not answered.wait(timeout_s):
            raise OutcomeUnknown(
                f"the append to {topic} was not answered within {timeout_s:g} s; it may still take effect"
            )
        answer = answers[0]
        if isinstance(answer, RebalanserError):
            raise answer
        return answer

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait at most ``timeout_s`` seconds for what is under way, then give the rest up as unknown.

        Every ``on_done`` has been called when it returns. Closing twice does nothing.
        """
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        self._thread.join()
        self._settle(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _settle(self, timeout_s: float) -> None:
        settle(self._producer, timeout_s)
        for delivery in tuple(self._waiting):
            delivery.give_up()

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                self._producer.poll(_SERVE_S)
            except RAISED:
                # librdkafka has given this producer up for good; the next append gets another.
                self._settle(0.0)
                with self._lock:
                    self._spent = True


def _forget(_answer: int | RebalanserError) -> None:
    """For those who do not want to know."""
