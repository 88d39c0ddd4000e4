"""librdkafka's errors as Rebalanser's.

The outcome of a failed *write* is known only if a broker refused it, or librdkafka did before it sent
anything. librdkafka retries by itself until the timeout, so after any other error the write may have taken
effect. A read has no effect, so a failed read may be repeated.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from enum import Enum, auto
from typing import Final, TypeAlias, cast

from confluent_kafka import KafkaError, KafkaException

from rebalanser.errors import (
    AccessDenied,
    Fenced,
    InvalidSettings,
    OutcomeUnknown,
    RebalanserError,
    RegistryRefused,
    RegistryUnavailable,
    RequestTooLarge,
    RetryLater,
)
from rebalanser.redaction import redact

OnDone: TypeAlias = Callable[[int | RebalanserError], None]
"""Called once, with the offset of a written record, or with the error if it is not or may not be written."""


class LogTruncated(RetryLater):
    """The log has no longer, or not yet, the offset to read: begin again from a known point."""

    def __init__(self, topic: str, offset: int) -> None:
        super().__init__(
            f"the log {topic} does not hold offset {offset}: it was deleted by retention or the topic was "
            f"made anew; begin again from the start or a snapshot"
        )
        self.topic = topic
        self.offset = offset


class UnsupportedBroker(RegistryRefused):
    """The broker is too old for a request, or has its feature switched off."""


class Act(Enum):
    """Kind of a failed request: a read may be repeated, a write may have taken effect."""

    READ = auto()
    WRITE = auto()


_DENIED: Final = frozenset(
    {
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.DELEGATION_TOKEN_AUTHORIZATION_FAILED,
        KafkaError.DELEGATION_TOKEN_EXPIRED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.ILLEGAL_SASL_STATE,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.SECURITY_DISABLED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError._AUTHENTICATION,
    }
)
_GRANTS: Final = {
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "IDEMPOTENT_WRITE on the cluster, or CREATE to make topics",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "READ on the group, and DESCRIBE_CONFIGS for KIP-848",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: (
        "DESCRIBE, DESCRIBE_CONFIGS, READ and WRITE on the topic, and CREATE where it is missing"
    ),
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "WRITE and DESCRIBE on the transactional id",
}
"""Permissions to grant to a refused user."""
_BROKER_LIMITS: Final = {
    KafkaError.INVALID_SESSION_TIMEOUT: (
        "group.min.session.timeout.ms (6 s by default) to group.max.session.timeout.ms (30 min)"
    ),
    KafkaError.INVALID_TRANSACTION_TIMEOUT: "up to transaction.max.timeout.ms (15 min by default)",
}
"""Settings of brokers that limit a timeout."""
_TOO_OLD: Final = frozenset(
    {
        KafkaError.UNSUPPORTED_ASSIGNOR,
        KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        KafkaError.UNSUPPORTED_VERSION,
        KafkaError._UNSUPPORTED_FEATURE,
    }
)
_TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
_FENCED: Final = frozenset(
    {
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.PRODUCER_FENCED,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError.TRANSACTION_COORDINATOR_FENCED,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError._ASSIGNMENT_LOST,
        KafkaError._FENCED,
    }
)
_MISSING: Final = frozenset(
    {
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.UNKNOWN_TOPIC_ID,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._UNKNOWN_TOPIC,
    }
)
_WRONG_SETTING: Final = frozenset(
    {
        KafkaError.INVALID_CONFIG,
        KafkaError.INVALID_GROUP_ID,
        KafkaError.INVALID_PARTITIONS,
        KafkaError.INVALID_REPLICATION_FACTOR,
        KafkaError.INVALID_SESSION_TIMEOUT,
        KafkaError.INVALID_TRANSACTION_TIMEOUT,
        KafkaError._INVALID_ARG,
    }
)
_REFUSED: Final = frozenset(
    {
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_REQUEST,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.POLICY_VIOLATION,
        KafkaError.UNSUPPORTED_COMPRESSION_TYPE,
    }
)
_NOT_SENT: Final = frozenset({KafkaError._QUEUE_FULL})
_TRUNCATED: Final = frozenset(
    {KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET, KafkaError._LOG_TRUNCATION}
)

_CLASSES: Final[tuple[tuple[frozenset[int], type[RebalanserError]], ...]] = (
    (_DENIED, AccessDenied),
    (_TOO_OLD, UnsupportedBroker),
    (_TOO_LARGE, RequestTooLarge),
    (_FENCED, Fenced),
    (_MISSING, RegistryRefused),
    (_WRONG_SETTING, InvalidSettings),
    (_REFUSED, RegistryRefused),
    (_NOT_SENT, RegistryUnavailable),
)


def is_denied(error: KafkaError) -> bool:
    """True if the error is about the user: waiting does not change it."""
    return error.code() in _DENIED


def is_fenced(error: KafkaError) -> bool:
    """True if a newer client has replaced this one."""
    return error.code() in _FENCED


def is_truncated(error: KafkaError) -> bool:
    """True if the requested offset is not in the log."""
    return error.code() in _TRUNCATED


def is_missing(error: KafkaError) -> bool:
    """True if the error says that a topic or partition is unknown."""
    return error.code() in _MISSING


def is_passing(error: KafkaError) -> bool:
    """True if the error passes once brokers, network and leaders have recovered."""
    known = any(error.code() in codes for codes, _ in _CLASSES if codes is not _NOT_SENT)
    return not known and not error.fatal() and not is_truncated(error)


def judge(error: KafkaError, act: Act, what: str) -> RebalanserError:
    """Return the error to raise if ``error`` ended ``what``, a phrase such as ``"the append to log x"``."""
    sentence = redact(f"{what} failed: {error.str()} ({error.name()})")
    if error.code() in _GRANTS:
        sentence = f"{sentence}; grant the user {_GRANTS[error.code()]}"
    if error.code() in _BROKER_LIMITS:
        sentence = f"{sentence}; the brokers take {_BROKER_LIMITS[error.code()]}"
    for codes, kind in _CLASSES:
        if error.code() in codes:
            return kind(sentence)
    if act is Act.WRITE:
        return OutcomeUnknown(f"{sentence}; it may still take effect")
    return RegistryUnavailable(sentence)


RAISED: Final[tuple[type[BaseException], ...]] = (
    KafkaException,
    cast("type[BaseException]", KafkaError),
    SystemError,
)
"""Exceptions that the client raises. A *fatal* error of librdkafka is raised as a bare ``KafkaError`` by any
call that serves callbacks, above all ``poll`` and ``flush``; ``except BaseException`` does not catch it. If
the call has another callback to serve, it raises a ``SystemError`` instead, and the work of that callback is
lost."""


def clear_frames(error: BaseException) -> None:
    """Release the objects that the frames of an error and of their callers hold, once all have ended.

    confluent-kafka never frees some of the errors that it raises. Through their tracebacks, and the callers
    of those frames, each would keep alive all objects of its thread. Objects in closures remain.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    frames += [frame for last in frames[-1:] for frame, _ in traceback.walk_stack(last)]
    for frame in frames:
        with contextlib.suppress(RuntimeError):  # it has not ended
            frame.clear()


def error_of(exception: BaseException) -> KafkaError:
    """Return the ``KafkaError`` that was raised, or one that represents any other exception."""
    if isinstance(exception, RAISED[1]):
        return cast("KafkaError", exception)
    if isinstance(exception, KafkaException) and exception.args and isinstance(exception.args[0], KafkaError):
        return exception.args[0]
    if isinstance(exception, BufferError):
        return KafkaError(KafkaError._QUEUE_FULL, str(exception))
    code = KafkaError._FATAL if isinstance(exception, SystemError) else KafkaError._FAIL
    return KafkaError(code, repr(exception))
