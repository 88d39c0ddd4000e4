"""Several records written at once, or none of them, by one living writer."""

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
"""Seconds, at least, for undoing what brokers did not acknowledge in time."""
CONNECT_S: Final = 1.0
"""Maximum seconds to wait for a first connection before the transactional id is asked for."""
_STALE: Final = frozenset({KafkaError.ILLEGAL_GENERATION, KafkaError.STALE_MEMBER_EPOCH})


class StaleMembership(Fenced):
    """The group has moved on to another generation than the offsets speak of: nothing was written.

    The writer was not fenced and goes on. Whether its process still has its place in the group, and by which
    membership, the thread that polls the consumer knows.
    """


@dataclass(frozen=True, slots=True)
class GroupOffsets:
    """Offsets of a consumer group that are committed by a transaction, or not at all with it.

    The broker checks them against the consumer's member and generation: whoever lost the partition is fenced
    even if nobody else has written yet.
    """

    membership: object
    """What ``Consumer.consumer_group_metadata()`` answers in the thread that polls the consumer, right after
    a poll; asked for in another thread while that one polls, it does not answer."""
    next_offsets: Mapping[tuple[str, int], int]
    """By topic and partition, the offset of the next record to consume."""


class TransactionalWriter:
    """Writes several records, and offsets of a group, all or nothing; one living writer per id (SH-7).

    ``init`` fences every earlier writer of the same ``transactional_id``: its open transaction is undone
    and whatever it still sends is refused with ``Fenced``. So call it only as the one who leads now: a
    process that was deposed and calls it again fences its successor.
    """

    def __init__(
        self,
        connection: Connection,
        transactional_id: str,
        timeout_s: float,
        *,
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        """``timeout_s`` limits each call here, and the time after which the broker undoes a transaction
        whose writer has vanished; committed-only readers wait behind it for so long."""
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
        """Take over the transactional id. When it returns nothing of an earlier writer can take effect any
        more, so what can be read then, up to ``end_offset``, is what was committed.

        Raises:
            RegistryUnavailable: not within the time; call it again.
            Fenced: another writer took over at the same moment.
            AccessDenied, UnsupportedBroker, InvalidSettings: the broker does not let it, whoever asks when.
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
        """Write all records and commit all offsets, or nothing; answer the records' offsets in their order.

        ``limit_s`` is a shorter limit for this call.

        Raises:
            StaleMembership: the offsets' consumer speaks of an earlier generation of its group. Nothing was
                written; with a later membership it may be tried again at once.
            Fenced: another writer has taken over, or the offsets' consumer has lost its place in the group.
                Unless it says otherwise, nothing was written.
            OutcomeUnknown: the commit was sent and not answered. To find out: make sure that this process
                still leads, call ``init``, then read to the end.
            RegistryUnavailable: nothing was written; try again.
            RequestTooLarge, AccessDenied, RegistryRefused: nothing was written, and trying again is no use.
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
        """Undo what is open, as far as a broker answers in time, and let go of the connection."""
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
        """The producer, which no frame may hold, not even as a bound method.

        confluent-kafka never frees some of its errors, nor the frames of their tracebacks.
        """
        if self._producer is None:
            raise InternalError(f"the transactional writer {self._id} is closed")
        return self._producer

    def _prepare(
        self, records: Sequence[NewRecord], offsets: GroupOffsets | None, deadline: float
    ) -> list[int]:
        """Everything up to the commit: whatever fails here leaves nothing behind."""
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
        """Why librdkafka has given up the open transaction: the reports of its records do not tell.

        To begin a transaction inside another one is refused, with the cause where there is one.
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
            raise OutcomeUnknown(f"{story}; it may have been carried out") from None

    def _undone(self, failure: RebalanserError, deadline: float) -> RebalanserError:
        """Abort, and answer what to raise: nothing was committed, whether the abort succeeds or not.

        Brokers that did not answer so far are hardly given more time: a leader is silent meanwhile.
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
    """Take a step of a transaction, resuming it where librdkafka says that it may be resumed."""
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_may_repeat),
        wait=tenacity.wait_fixed(0.02),
        stop=lambda _state: time.monotonic() >= deadline,
        reraise=True,
    )
    retrying(lambda: step(_left_s(deadline)))
