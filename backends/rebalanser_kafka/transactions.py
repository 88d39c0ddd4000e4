"""Atomic writes of several records by one living writer."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, Self

import tenacity
from confluent_kafka import (
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)

from rebalanser.errors import (
    Fenced,
    InternalError,
    InvalidState,
    OutcomeUnknown,
    RebalanserError,
    RegistryUnavailable,
    RequestTooLarge,
)
from rebalanser.redaction import redact
from rebalanser_kafka.connection import Connection, client_config
from rebalanser_kafka.failures import RAISED, Act, error_of, is_fenced, judge
from rebalanser_kafka.records import (
    BUFFERED_KBYTES,
    BUFFERED_RECORDS,
    FRAMING_BYTES,
    MAX_RECORD_BYTES,
    WRITER_SETTINGS,
    Delivery,
    NewRecord,
    check_size,
    produce,
    settle,
)

ABORT_S: Final = 1.0
"""Minimum seconds for aborting a transaction that brokers did not acknowledge in time."""
CONNECT_S: Final = 1.0
"""Maximum seconds to wait for a first connection before the transactional id is initialised."""
_STALE: Final = frozenset({KafkaError.ILLEGAL_GENERATION, KafkaError.STALE_MEMBER_EPOCH})


class StaleMembership(Fenced):
    """The offsets belong to an earlier generation of the group: nothing was written.

    The writer was not fenced and continues. The thread that polls the consumer knows if its process is still
    a member of the group, and its present membership.
    """


@dataclass(frozen=True, slots=True)
class GroupOffsets:
    """Offsets of a consumer group that are committed with a transaction, or not at all.

    The broker checks them against the consumer's member and generation: a process that lost the partition is
    fenced even if no other has written yet.
    """

    membership: object
    """Result of ``Consumer.consumer_group_metadata()`` in the thread that polls the consumer, right after a
    poll; a call in another thread does not return while that one polls."""
    next_offsets: Mapping[tuple[str, int], int]
    """Offset of the next record to consume, by topic and partition."""


class TransactionalWriter:
    """Writes several records and offsets of a group, all or nothing; one living writer per id (SH-7).

    ``init`` fences every earlier writer of the same ``transactional_id``: its open transaction is aborted,
    and its later writes are refused with ``Fenced``. So only the present leader may call it: a deposed
    process that calls it again fences its successor.
    """

    def __init__(
        self,
        connection: Connection,
        transactional_id: str,
        timeout_s: float,
        *,
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        """``timeout_s`` limits each call here, and the time after which the broker aborts a transaction whose
        writer has vanished; committed-only readers wait behind it until then."""
        self._id = transactional_id
        self._timeout_s = timeout_s
        self._max_record_bytes = max_record_bytes
        self._lock = threading.Lock()
        self._producer: Producer | None = None
        self._aborted = False
        timeout_ms = int(timeout_s * 1000)
        socket_ms = min(int(connection.config["socket.timeout.ms"]), timeout_ms)
        self._config = client_config(
            connection,
            {
                **WRITER_SETTINGS,
                "transactional.id": transactional_id,
                "transaction.timeout.ms": timeout_ms + 1000,
                "delivery.timeout.ms": timeout_ms,
                "socket.timeout.ms": socket_ms,
                "message.max.bytes": max_record_bytes + FRAMING_BYTES,
            },
        )

    def init(self) -> None:
        """Take over the transactional id. After it returned, nothing of an earlier writer can take effect any
        more: all that is committed can be read up to ``end_offset``.

        Raises:
            RegistryUnavailable: it did not succeed in time; call it again.
            Fenced: another writer took over at the same moment.
            AccessDenied, UnsupportedBroker, InvalidSettings: the broker refuses it, at any time.
        """
        with self._lock:
            self._drop()
            self._producer = Producer(self._config)
            deadline = time.monotonic() + self._timeout_s
            # If no broker is connected yet, librdkafka looks for the coordinator again after half a second.
            with suppress(*RAISED):
                self._open.list_topics(timeout=min(CONNECT_S, self._timeout_s))
            try:
                _repeat(lambda left_s: self._open.init_transactions(left_s), deadline)  # noqa: PLW0108 - see _open
            except RAISED as exception:
                self._drop()
                raise judge(error_of(exception), Act.READ, f"taking over {self._id}") from None

    def transaction(
        self,
        records: Sequence[NewRecord],
        offsets: GroupOffsets | None = None,
        *,
        limit_s: float = math.inf,
    ) -> list[int]:
        """Write all records and commit all offsets, or nothing; return the records' offsets in their order.

        ``limit_s`` is a shorter limit for this call.

        Raises:
            StaleMembership: the offsets belong to an earlier generation of their consumer's group. Nothing
                was written; with a later membership it may be retried at once.
            Fenced: another writer has taken over, or the offsets' consumer is no member of the group any
                more. Unless the message says otherwise, nothing was written.
            OutcomeUnknown: the commit was sent and not answered. To find out, make sure that this process
                still leads, call ``init``, then read to the end.
            RegistryUnavailable: nothing was written; retry.
            RequestTooLarge, AccessDenied, RegistryRefused: nothing was written, and a retry is useless.
            InvalidState: ``init`` was not called, or must be called again after an earlier error.
        """
        self._check(records)
        with self._lock:
            if self._producer is None:
                raise InvalidState(f"the transactional writer {self._id} needs init() first")
            deadline = time.monotonic() + min(self._timeout_s, limit_s)
            after_abort, self._aborted = self._aborted, False
            try:
                written = self._prepare(records, offsets, deadline)
            except RegistryUnavailable:
                # librdkafka gives up the records of the next transaction too after one with a refused record.
                if not after_abort or self._producer is None:
                    raise
                written = self._prepare(records, offsets, deadline)
            self._commit(deadline)
            return written

    def close(self) -> None:
        """Abort an open transaction if a broker answers in time, and close the connection."""
        with self._lock:
            self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, records: Sequence[NewRecord]) -> None:
        for record in records:
            check_size(record, self._max_record_bytes)
        size_bytes = sum(record.size_bytes for record in records)
        if len(records) > BUFFERED_RECORDS or size_bytes > BUFFERED_KBYTES * 1024:
            raise RequestTooLarge(
                f"a transaction of {len(records)} records and {size_bytes} bytes; at most {BUFFERED_RECORDS} "
                f"records and {BUFFERED_KBYTES * 1024} bytes are written at once"
            )

    @property
    def _open(self) -> Producer:
        """Return the producer, which no frame may hold, not even as a bound method.

        confluent-kafka never frees some of its errors, nor the frames of their tracebacks.
        """
        if self._producer is None:
            raise InternalError(f"the transactional writer {self._id} is closed")
        return self._producer

    def _prepare(
        self, records: Sequence[NewRecord], offsets: GroupOffsets | None, deadline: float
    ) -> list[int]:
        """Do all up to the commit: a failure here leaves no effect."""
        answers: list[int | RebalanserError] = [
            RegistryUnavailable("the brokers did not acknowledge every record in time")
        ] * len(records)
        try:
            self._open.begin_transaction()
            for index, record in enumerate(records):
                take = partial(answers.__setitem__, index)
                produce(self._open, record, Delivery(record, self._max_record_bytes, take, Act.READ))
            self._open.flush(_left_s(deadline))
            written = [_offset(answer) for answer in answers]
            if offsets is not None:
                self._send_offsets(offsets, deadline)
        except RAISED as exception:
            error = error_of(exception)
            failure = judge(error, Act.READ, f"the transaction of {self._id}")
            if error.code() in _STALE:
                failure = StaleMembership(str(failure))
            if isinstance(failure, RegistryUnavailable):
                failure = self._cause(records) or failure
            raise self._undone(failure, deadline) from None
        except RegistryUnavailable as error:
            raise self._undone(self._cause(records) or error, deadline) from None
        except RebalanserError as error:
            raise self._undone(error, deadline) from None
        return written

    def _cause(self, records: Sequence[NewRecord]) -> RebalanserError | None:
        """Return the reason why librdkafka gave up the open transaction: the reports of its records have
        none.

        A request to begin a transaction inside another one is refused, with the reason if there is one.
        """
        try:
            self._open.begin_transaction()
        except RAISED as exception:
            error = error_of(exception)
            if error.code() != KafkaError._STATE:
                topics = ", ".join(sorted({record.topic for record in records}))
                return judge(error, Act.READ, f"the transaction of {self._id} on {topics}")
        return None

    def _send_offsets(self, offsets: GroupOffsets, deadline: float) -> None:
        positions = [
            TopicPartition(topic, partition, offset)
            for (topic, partition), offset in offsets.next_offsets.items()
        ]
        membership = offsets.membership
        _repeat(
            lambda left_s: self._open.send_offsets_to_transaction(positions, membership, left_s), deadline
        )

    def _commit(self, deadline: float) -> None:
        try:
            _repeat(lambda left_s: self._open.commit_transaction(left_s), deadline)  # noqa: PLW0108 - see _open
        except RAISED as exception:
            self._drop()
            error = error_of(exception)
            story = redact(f"the commit of {self._id} failed: {error.str()} ({error.name()})")
            if is_fenced(error):
                raise Fenced(f"{story}; whether it had been carried out before is not known") from None
            raise OutcomeUnknown(f"{story}; it may have taken effect") from None

    def _undone(self, failure: RebalanserError, deadline: float) -> RebalanserError:
        """Abort, and return the error to raise: nothing was committed, even if the abort fails.

        Brokers that have not answered so far get little more time: a leader is silent meanwhile.
        """
        try:
            unreachable = isinstance(failure, RegistryUnavailable)
            limit_s = ABORT_S if unreachable else self._timeout_s
            deadline = max(deadline, time.monotonic() + limit_s)
            _repeat(lambda left_s: self._open.abort_transaction(left_s), deadline)  # noqa: PLW0108 - see _open
            self._aborted = True
        except RAISED as exception:
            self._drop()
            if is_fenced(error_of(exception)):
                return Fenced(f"{self._id} was taken over by another writer; nothing was written")
        if isinstance(failure, Fenced) and not isinstance(failure, StaleMembership):
            self._drop()
        if isinstance(failure, OutcomeUnknown):
            return RegistryUnavailable(f"the transaction of {self._id} was undone: {failure}")
        return failure

    def _drop(self) -> None:
        producers, self._producer = [self._producer] if self._producer else [], None
        while producers:
            settle(producers.pop())


def _offset(answer: int | RebalanserError) -> int:
    if isinstance(answer, RebalanserError):
        raise answer
    return answer


def _left_s(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _may_repeat(error: BaseException) -> bool:
    return isinstance(error, KafkaException) and error_of(error).retriable()


def _repeat(step: Callable[[float], None], deadline: float) -> None:
    """Take a step of a transaction, and resume it if librdkafka allows that."""
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_may_repeat),
        wait=tenacity.wait_fixed(0.02),
        stop=lambda _state: time.monotonic() >= deadline,
        reraise=True,
    )
    retrying(lambda: step(_left_s(deadline)))
