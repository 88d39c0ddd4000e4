"""Maps a failed call to etcd to its effect, to a possible retry elsewhere, and to an error for the caller.

This module separates failed outcomes from unknown ones. If in doubt whether a request took effect, the
verdict is ``FailureEffect.UNKNOWN``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import grpc

from rebalanser.errors import (
    AccessDenied,
    LeaseNotFound,
    OutcomeUnknown,
    QuotaExceeded,
    RebalanserError,
    RegistryRefused,
    RegistryUnavailable,
    RequestTooLarge,
)


class FailureEffect(Enum):
    """Effect of a failed call on the store."""

    NONE = auto()
    """None, and another endpoint, or this one a little later, may carry out the request."""
    BUSY = auto()
    """None, and the same endpoint may carry it out later: another one would only share its load."""
    UNKNOWN = auto()
    """The request took effect, will take effect later, or never."""
    REFUSED = auto()
    """None: the store refused, and would refuse again."""
    PERHAPS_REFUSED = auto()
    """All or none: the store refused, but may have carried out the request nevertheless."""
    STALE_TOKEN = auto()
    """None: the client has to log in again first."""
    COMPACTED = auto()
    """None: the requested revision is compacted."""


@dataclass(frozen=True, slots=True)
class FailedCall:
    """The verdict on one failed call; ``text`` never has a secret."""

    effect: FailureEffect
    error: type[RebalanserError]
    text: str


OVER_QUOTA: Final = (
    "etcd is over its storage quota and refuses writes and lease grants, so that no node can join; "
    "compact and defragment every member (etcdctl compact, etcdctl defrag), then etcdctl alarm disarm, "
    "or raise --quota-backend-bytes"
)

TOO_MANY_OPERATIONS: Final = "too many operations in txn"

_BY_MESSAGE: Final[tuple[tuple[str, FailureEffect, type[RebalanserError], str], ...]] = (
    ("requested lease not found", FailureEffect.REFUSED, LeaseNotFound, "the lease has ended"),
    # etcd also says so of the request that passed the quota, and of concurrent ones: these were applied.
    ("database space exceeded", FailureEffect.PERHAPS_REFUSED, QuotaExceeded, OVER_QUOTA),
    ("request is too large", FailureEffect.REFUSED, RequestTooLarge, ""),
    (TOO_MANY_OPERATIONS, FailureEffect.REFUSED, RequestTooLarge, ""),
    ("required revision has been compacted", FailureEffect.COMPACTED, RegistryUnavailable, ""),
    ("authentication failed", FailureEffect.REFUSED, AccessDenied, "wrong user or password"),
    ("permission denied", FailureEffect.REFUSED, AccessDenied, "the user has no permission for these keys"),
    ("invalid auth token", FailureEffect.STALE_TOKEN, AccessDenied, ""),
    ("revision of auth store is old", FailureEffect.STALE_TOKEN, AccessDenied, ""),
    ("user name is empty", FailureEffect.STALE_TOKEN, AccessDenied, "etcd asks for a user and a password"),
    ("no leader", FailureEffect.NONE, RegistryUnavailable, ""),
    ("not leader", FailureEffect.NONE, RegistryUnavailable, ""),
    ("too many requests", FailureEffect.BUSY, RegistryUnavailable, ""),
    ("not capable", FailureEffect.NONE, RegistryUnavailable, ""),
    ("rpc not supported for learner", FailureEffect.NONE, RegistryUnavailable, ""),
)
"""Verdicts by a part of etcd's message; our own message, if there is one, replaces etcd's."""

_NEVER_SENT: Final = ("failed to connect to all addresses", "DNS resolution failed", "empty address list")
"""gRPC's messages for a missing connection. It reports them only before the request is sent."""

_HANDSHAKE: Final = (
    "tls handshake failed",
    "certificate_verify_failed",
    "failed to create security handshaker",
    "hostname verification check failed",
    "tsi_data_corrupted",  # the alert of a server that requires a client certificate
)

_IN_DOUBT: Final = frozenset(
    {
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
    }
)


def judge(code: grpc.StatusCode, details: str) -> FailedCall:
    """Return the verdict on a call that ended with this status."""
    if details.startswith("etcdserver: "):
        return _judge_answer(code, details)
    if details == "raft proposal dropped":
        return FailedCall(FailureEffect.NONE, RegistryUnavailable, details)
    if "message larger than max" in details and "grpc:" in details:
        return FailedCall(FailureEffect.REFUSED, RequestTooLarge, details)
    if code is grpc.StatusCode.UNAVAILABLE and any(mark in details for mark in _NEVER_SENT):
        return _judge_connection(details)
    if code in _IN_DOUBT:
        return FailedCall(FailureEffect.UNKNOWN, OutcomeUnknown, _shorten(details) or code.name)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return FailedCall(FailureEffect.REFUSED, RegistryRefused, f"this server is not etcd 3 ({details})")
    return FailedCall(FailureEffect.REFUSED, RegistryRefused, f"{code.name}: {_shorten(details)}")


def _judge_answer(code: grpc.StatusCode, details: str) -> FailedCall:
    for part, effect, error, text in _BY_MESSAGE:
        if part in details:
            return FailedCall(effect, error, text or details)
    if code in _IN_DOUBT:
        return FailedCall(FailureEffect.UNKNOWN, OutcomeUnknown, details)
    return FailedCall(FailureEffect.REFUSED, RegistryRefused, details)


def _judge_connection(details: str) -> FailedCall:
    cause = _shorten(details)
    if any(mark in details.lower() for mark in _HANDSHAKE):
        return FailedCall(
            FailureEffect.NONE, AccessDenied, f"TLS was refused, check ca, cert, key and server_name: {cause}"
        )
    if "Socket closed" in details:
        cause += "; perhaps one side speaks TLS and the other does not: etcd+tls:// or etcd://"
    return FailedCall(FailureEffect.NONE, RegistryUnavailable, cause)


def _shorten(details: str) -> str:
    """Return the last cause in gRPC's chain of messages, without the address; the others repeat it."""
    *_, last = details.rpartition("last error: ")
    first_line, *_ = last.splitlines() or [""]
    return re.sub(r"^[A-Z]+: ipv[46]:\S+: ", "", first_line.strip())[:200]
