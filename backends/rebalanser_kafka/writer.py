"""Appends of single records."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
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
UNDER_WAY: Final = 1000
"""Maximum records that ``LogWriter.append_all`` has in flight."""
UNDER_WAY_BYTES: Final = 16 * 2**20
"""Default maximum of their bytes."""

_SERVE_S: Final = 0.1
_NO_HEADERS: Final[Mapping[str, bytes]] = MappingProxyType({})


class LogWriter:
    """Appends single records, each acknowledged by all replicas in sync and never written twice.

    At most 10,000 records or 64 MiB wait for their answers. Records of one writer keep their order.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        delivery_timeout_s: float = DELIVERY_TIMEOUT_S,
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        """A record that is not acknowledged within ``delivery_timeout_s`` seconds is given up; its outcome is
        unknown."""
        self._config = client_config(
            connection,
            {
                **WRITER_SETTINGS,
                "delivery.timeout.ms": int(delivery_timeout_s * 1000),
                "message.max.bytes": max_record_bytes + FRAMING_BYTES,
            },
        )
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
        """Hand over one record. ``on_done`` is called once with its offset, or with the error, in the
        writer's own thread, which it must not block. The error is an ``OutcomeUnknown`` if the record may
        still be written, and another one if it never will be. After an error raised here it is not called.

        Raises:
            RequestTooLarge: over the limit, with the sizes; nothing was sent.
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
        """Append one record and return its offset. Not to be called from ``on_done``: it would wait for
        itself.

        Raises:
            OutcomeUnknown: no answer within ``timeout_s`` seconds: the record may be written, now or later.
            RequestTooLarge, RegistryUnavailable, AccessDenied, RegistryRefused: it is not written.
        """
        record = NewRecord(topic, key, value, headers, partition)
        return self._answer_of(record, self._begin(record), timeout_s)

    def append_all(
        self,
        records: Iterable[NewRecord],
        *,
        timeout_s: float,
        under_way_bytes: int = UNDER_WAY_BYTES,
        on_written: Callable[[NewRecord], None] = lambda _record: None,
    ) -> list[int]:
        """Append records in this order, many at a time, and return their offsets.

        ``on_written`` is called for each one as it is acknowledged. At most ``under_way_bytes`` of them wait
        for their answers, unless one alone is larger. Give the topic's ``max.message.bytes`` if that may be
        less, since records are sent together. After an error, some records after the first unwritten one may
        be written.

        Raises:
            OutcomeUnknown: a record was not answered within ``timeout_s`` seconds.
            RequestTooLarge, RegistryUnavailable, AccessDenied, RegistryRefused: one is not written.
        """
        offsets: list[int] = []
        waiting: deque[tuple[NewRecord, Future[int]]] = deque(maxlen=UNDER_WAY)
        waiting_bytes = 0

        def settle_oldest() -> None:
            nonlocal waiting_bytes
            record, answer = waiting.popleft()
            offsets.append(self._answer_of(record, answer, timeout_s))
            waiting_bytes -= record.size_bytes + FRAMING_BYTES
            on_written(record)

        for record in records:
            while waiting and (
                len(waiting) == UNDER_WAY
                or waiting_bytes + record.size_bytes + FRAMING_BYTES > under_way_bytes
            ):
                settle_oldest()
            waiting.append((record, self._begin(record)))
            waiting_bytes += record.size_bytes + FRAMING_BYTES
        while waiting:
            settle_oldest()
        return offsets

    def _begin(self, record: NewRecord) -> Future[int]:
        answered: Future[int] = Future()

        def take(answer: int | RebalanserError) -> None:
            if isinstance(answer, RebalanserError):
                answered.set_exception(answer)
            else:
                answered.set_result(answer)

        self.append(record.topic, record.key, record.value, record.headers, take, partition=record.partition)
        return answered

    def _answer_of(self, record: NewRecord, answered: Future[int], timeout_s: float) -> int:
        try:
            return answered.result(timeout_s)
        except TimeoutError:
            raise OutcomeUnknown(
                f"the append to {record.topic} was not answered within {timeout_s:g} s; "
                "it may still take effect"
            ) from None

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait at most ``timeout_s`` seconds for records in flight, then give up the rest with unknown
        outcomes.

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
                # librdkafka has given up this producer for good; the next append creates another.
                self._settle(0.0)
                with self._lock:
                    self._spent = True


def _forget(_answer: int | RebalanserError) -> None:
    """Ignore the outcome."""
