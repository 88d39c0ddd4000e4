"""Converts the contract's transactions to etcd's messages, and etcd's answers to the contract's outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

from etcd3 import etcdrpc

from rebalanser.errors import InternalError, RequestTooLarge
from rebalanser.registry.contract import (
    Absent,
    Created,
    Delete,
    Get,
    Guard,
    KeyValue,
    Operation,
    Outcome,
    Put,
    Range,
    Result,
    Stat,
    Stats,
    Target,
    Transaction,
    Unchanged,
)

MAX_OPERATIONS: Final = 128
"""etcd's default ``--max-txn-ops``; higher limits are not used."""
MIN_OPERATIONS: Final = 16
"""Minimum operations of a transaction: reading a whole group takes 11, and later versions may take more."""
MAX_REQUEST_BYTES: Final = 1_500_000
"""etcd's default ``--max-request-bytes`` (1.5 MiB) minus the overhead of its encoding."""
_MOD: Final = etcdrpc.Compare.MOD
_CREATE: Final = etcdrpc.Compare.CREATE
PAGE_KEYS: Final = 10_000
"""Keys per page of a range. For each page etcd counts all the keys that follow.

With ``min_mod_revision`` it also reads them all, and only then leaves out older keys and cuts the page:
``more`` is about the keys that are left, but ``count`` is not.
"""

FollowUp: TypeAlias = Callable[[Any], Callable[[], Any]]
"""Sends a RangeRequest for a further page and returns what waits for its RangeResponse."""


def prefix_end(prefix: bytes) -> bytes:
    """Return the first key after all keys with the prefix, for etcd's ``range_end``."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"


def prefix_span(prefix: str) -> tuple[bytes, bytes]:
    """Return ``key`` and ``range_end`` of a request for all keys with the prefix."""
    start = prefix.encode()
    return start or b"\0", prefix_end(start)


def check_limits(transaction: Transaction, max_operations: int = MAX_OPERATIONS) -> None:
    """Refuse a transaction that etcd would refuse, before anything is sent.

    Raises:
        RequestTooLarge: too many operations or too many bytes, with the numbers.
    """
    if transaction.length > max_operations:
        raise RequestTooLarge(
            f"a transaction of {transaction.length} operations, with the longest of its nested ones; "
            f"etcd takes {max_operations}"
        )
    size = _bytes(transaction)
    if size > MAX_REQUEST_BYTES:
        raise RequestTooLarge(f"a transaction of {size} bytes; etcd takes {MAX_REQUEST_BYTES}")


def to_request(transaction: Transaction, anchor: str) -> Any:
    """Return the TxnRequest for a transaction.

    etcd answers a transaction without operations from the member's own, perhaps outdated, state. So a
    transaction that has only guards reads the key ``anchor`` as well.
    """
    request = etcdrpc.TxnRequest()
    _fill_transaction(request, transaction)
    if _is_bare(transaction):
        look = etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(key=anchor.encode(), keys_only=True))
        request.success.append(look)
        request.failure.append(look)
    return request


def to_outcome(transaction: Transaction, reply: Any, follow_up: FollowUp) -> Outcome:
    """Return the outcome in a TxnResponse; ``follow_up`` reads the further pages of long ranges."""
    revision, term = reply.header.revision, reply.header.raft_term
    if _is_bare(transaction):
        return Outcome(reply.succeeded, revision, (), term)
    return _outcome(transaction, reply, revision, follow_up, term)


def to_watch_request(target: Target, from_revision: int) -> Any:
    """Return the WatchRequest that begins a watch; from now on if ``from_revision`` is 0."""
    start, end = prefix_span(target.key) if target.prefix else (target.key.encode(), b"")
    create = etcdrpc.WatchCreateRequest(key=start, range_end=end, start_revision=from_revision)
    return etcdrpc.WatchRequest(create_request=create)


def _is_bare(transaction: Transaction) -> bool:
    return not transaction.then and not transaction.otherwise


def _fill_transaction(request: Any, transaction: Transaction) -> None:
    """Fill in a TxnRequest.

    A transaction has a hundred guards and operations. Messages that are made apart are copied into it, and
    arguments by name are slow: that takes three times as long.
    """
    add = request.compare.add
    for guard in transaction.guards:
        _fill_compare(add(), guard)
    add = request.success.add
    for operation in transaction.then:
        _fill_operation(add(), operation)
    add = request.failure.add
    for operation in transaction.otherwise:
        _fill_operation(add(), operation)


def _outcome(
    transaction: Transaction, reply: Any, revision: int, follow_up: FollowUp, term: int = 0
) -> Outcome:
    operations, responses = transaction.then if reply.succeeded else transaction.otherwise, reply.responses
    if len(operations) != len(responses):
        raise InternalError(f"etcd answered {len(responses)} of {len(operations)} operations")
    results = tuple(
        # The answer of a put is not looked at: each access makes an object.
        None if isinstance(operation, Put) else _result(operation, responses[index], revision, follow_up)
        for index, operation in enumerate(operations)
    )
    return Outcome(reply.succeeded, revision, results, term)


def _bytes(transaction: Transaction) -> int:
    size = sum(len(guard.key) for guard in transaction.guards)
    for operation in (*transaction.then, *transaction.otherwise):
        match operation:
            case Put():
                size += len(operation.key) + len(operation.value)
            case Delete() | Get():
                size += len(operation.key)
            case Stat():
                size += len(operation.prefix)
            case Range():
                size += len(operation.prefix) + len(operation.after)
            case Transaction():
                size += _bytes(operation)
    return size


def _fill_compare(compare: Any, guard: Guard) -> None:
    """Fill in a Compare; its result is EQUAL by default."""
    compare.key = guard.key.encode()
    match guard:
        case Unchanged():
            compare.target = _MOD
            compare.mod_revision = guard.revision
        case Absent():
            compare.target = _CREATE
            compare.create_revision = 0  # it must be set: else nothing is compared
        case Created():
            compare.target = _CREATE
            compare.create_revision = guard.revision


def _fill_operation(filled: Any, operation: Operation) -> None:
    """Fill in a RequestOp."""
    match operation:
        case Put():
            put = filled.request_put
            put.key = operation.key.encode()
            put.value = operation.value
            if operation.lease:
                put.lease = operation.lease
        case Get():
            one = filled.request_range
            one.key = operation.key.encode()
            if operation.keys_only:
                one.keys_only = True
        case Delete():
            filled.request_delete_range.key = operation.key.encode()
        case Range():
            filled.request_range.CopyFrom(_first_page(operation))
        case Stat():
            newest_first = filled.request_range
            newest_first.key, newest_first.range_end = prefix_span(operation.prefix)
            newest_first.limit = 1
            newest_first.keys_only = True
            newest_first.sort_order = etcdrpc.RangeRequest.DESCEND
            newest_first.sort_target = etcdrpc.RangeRequest.MOD
        case Transaction():
            filled.request_txn.SetInParent()  # also if it is empty
            _fill_transaction(filled.request_txn, operation)


def _first_page(asked: Range) -> Any:
    start, end = prefix_span(asked.prefix)
    if asked.after:
        start = max(start, asked.after.encode() + b"\0")
    return _page(asked, start, end, asked.limit)


def _page(asked: Range, key: bytes, range_end: bytes, wanted: int, revision: int = 0) -> Any:
    """Return the request for the next keys of a range, at most ``wanted``, or all if that is 0."""
    return etcdrpc.RangeRequest(
        key=key,
        range_end=range_end,
        limit=min(wanted, PAGE_KEYS) or PAGE_KEYS,
        revision=revision,
        min_mod_revision=asked.modified_after and asked.modified_after + 1,
    )


def _result(operation: Operation, response: Any, revision: int, follow_up: FollowUp) -> Result:
    match operation:
        case Put() | Delete():
            return None
        case Get():
            found = response.response_range.kvs
            return _key_value(found[0]) if found else None
        case Range():
            return tuple(_all_pages(operation, response.response_range, revision, follow_up))
        case Stat():
            counted = response.response_range
            newest = counted.kvs[0].mod_revision if counted.kvs else 0
            return Stats(count=counted.count, newest=newest)
        case Transaction():
            return _outcome(operation, response.response_txn, revision, follow_up)


def _all_pages(asked: Range, page: Any, revision: int, follow_up: FollowUp) -> Iterator[KeyValue]:
    """Decode each page while etcd reads the next one; all are of one revision."""
    _, end = prefix_span(asked.prefix)
    read = len(page.kvs)
    while page.more and (not asked.limit or read < asked.limit):
        wanted = asked.limit - read if asked.limit else 0
        following = follow_up(_page(asked, page.kvs[-1].key + b"\0", end, wanted, revision))
        yield from map(_key_value, page.kvs)
        page = following()
        read += len(page.kvs)
    yield from map(_key_value, page.kvs)


def _key_value(stored: Any) -> KeyValue:
    # A group has hundreds of thousands of keys; arguments by name take a third longer.
    return KeyValue(
        stored.key.decode("utf-8", "surrogateescape"),
        stored.value,
        stored.create_revision,
        stored.mod_revision,
        stored.lease,
    )
