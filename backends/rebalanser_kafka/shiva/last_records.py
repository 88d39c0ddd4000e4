"""The last document on ASSIGNEMENT and the last records of CONTROL: a status, and a new leader's start."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from rebalanser.core.shiva.changes import DocumentChain
from rebalanser.core.shiva.records import CHANGE_KEYS, AssignmentDocument, DocumentChange, Ping, Pong
from rebalanser.core.shiva.types import Epoch, WorkerId
from rebalanser.errors import RegistryUnavailable
from rebalanser.shiva.status import LastHeard
from rebalanser_kafka.connection import Connection, patiently
from rebalanser_kafka.failures import LogTruncated
from rebalanser_kafka.reader import LogReader
from rebalanser_kafka.records import LogRecord
from rebalanser_kafka.shiva.decoding import control_record
from rebalanser_kafka.shiva.wire import (
    ASSIGNEMENT_KEY,
    CHANGE_KEY,
    PING_KEY,
    NotReadable,
    decode,
    peek_epoch,
)

_TAILS: Final = (16, 256, 2 * CHANGE_KEYS + 16)
"""Number of offsets before the end that are read first: a record and its commit marker take two."""
_CONTROL_TAIL: Final = 5000
"""Number of offsets before the end of CONTROL that are first searched for the last record of each key."""
_PINGS: Final = 2
"""Number of pings that a status reads back: a live worker has answered one of the last two."""
_POLL_S: Final = 0.2


def document_in(record: LogRecord) -> AssignmentDocument | DocumentChange | None:
    """Return the document or change of a record; None if it has none that is readable (SH-16)."""
    if record.value is None:
        return None
    try:
        read = decode(record.key, record.value)
    except NotReadable:
        return None
    return read if isinstance(read, AssignmentDocument | DocumentChange) else None


def read_on(chain: DocumentChain, records: Iterable[LogRecord]) -> bool:
    """Take in records of ASSIGNEMENT as they come; True if they make a newer document."""
    read = [chain.read(found) for found in map(document_in, records) if found is not None]
    return any(read)


def newest(records: Sequence[LogRecord]) -> DocumentChain:
    """Read the whole document of the greatest epoch and the changes after it (SH-24).

    A deposed leader's late document does not count (SH-7). All records are decoded if a leader that reads no
    changes may have overlooked some.
    """
    beyond = Epoch(sys.maxsize, 0)
    found = [
        (peek_epoch(record.value) or beyond, place)
        for place, record in enumerate(records)
        if record.key == ASSIGNEMENT_KEY.encode() and record.value is not None
    ]
    chain = DocumentChain()
    for _, place in sorted(found, reverse=True):
        document = document_in(records[place])
        if isinstance(document, AssignmentDocument):
            if not document.reads_changes and any(map(_is_change, records)):
                break
            chain.take(document)
            read_on(chain, filter(_is_change, records[place + 1 :]))
            return chain
    read_on(chain, records)
    return chain


def _is_change(record: LogRecord) -> bool:
    return (record.key or b"").startswith(CHANGE_KEY.encode())


def last_document(
    connection: Connection, topic: str, timeout_s: float, *, overlooked: bool = False
) -> tuple[DocumentChain, int]:
    """Read back from the end of ASSIGNEMENT; return the last document, if any, and the topic's end.

    Read on from that end for later records (SH-24). With ``overlooked`` it also reads the changes that the
    last document's leader may have overlooked.

    Raises:
        RegistryUnavailable: not within ``timeout_s`` seconds.
        RegistryRefused: there is no such topic.
    """
    return patiently(partial(_last_document, connection, topic, overlooked), timeout_s)


def _last_document(
    connection: Connection, topic: str, overlooked: bool, timeout_s: float
) -> tuple[DocumentChain, int]:
    deadline = time.monotonic() + timeout_s
    first, end = _bounds(connection, topic, timeout_s)
    chain, start = DocumentChain(), end
    for tail in (*_TAILS, end):
        if start > first and not _is_enough(chain, overlooked):
            start = max(first, end - tail)
            chain = newest(list(_records(connection, topic, start, end, deadline)))
    return chain, end


def _is_enough(chain: DocumentChain, overlooked: bool) -> bool:
    document = chain.document
    return document is not None and not chain.missed and (document.reads_changes or not overlooked)


def last_of_each_key(
    connection: Connection, topic: str, timeout_s: float, pings: int = 0
) -> tuple[list[LogRecord], int]:
    """Read the tail of CONTROL; return the last record of each key in it, and the topic's end.

    The tail has at least ``pings`` pings, if the topic has.

    Raises:
        RegistryUnavailable: not within ``timeout_s`` seconds.
        RegistryRefused: there is no such topic.
    """
    return patiently(partial(_last_of_each_key, connection, topic, pings), timeout_s)


def _last_of_each_key(
    connection: Connection, topic: str, pings: int, timeout_s: float
) -> tuple[list[LogRecord], int]:
    deadline = time.monotonic() + timeout_s
    first, end = _bounds(connection, topic, timeout_s)
    length = _CONTROL_TAIL
    while True:
        start = max(first, end - length)
        found, last = 0, {}
        for record in _records(connection, topic, start, end, deadline):
            found += record.key == PING_KEY.encode()
            last[record.key] = record
        if found >= pings or start == first:
            return list(last.values()), end
        length *= 4


def last_pongs(connection: Connection, topic: str, timeout_s: float) -> tuple[tuple[Pong, ...], int]:
    """Read the last pong of each worker on CONTROL, and the topic's end; errors as above."""
    records, end = last_of_each_key(connection, topic, timeout_s)
    read = map(control_record, records)
    return tuple(record for record in read if isinstance(record, Pong)), end


def last_heard(connection: Connection, topic: str, timeout_s: float) -> LastHeard:
    """Read the last ping and the last pong of each worker on CONTROL; errors as above.

    A record's age is this host's time of day less the broker's time of the record, at least 0.
    """
    records, _ = last_of_each_key(connection, topic, timeout_s, _PINGS)
    return heard_in(records, time.time())


def heard_in(records: Iterable[LogRecord], wall_s: float) -> LastHeard:
    """Find the last ping and the last pong of each worker in records of CONTROL, as of ``wall_s`` seconds."""
    ping: tuple[Ping, float] | None = None
    pongs: dict[WorkerId, tuple[Pong, float]] = {}
    for record in records:
        age_s = max(0.0, wall_s - record.timestamp_ms / 1000)
        match control_record(record):
            case Ping() as read:
                ping = read, age_s
            case Pong() as read:
                pongs[read.worker] = read, age_s
    return LastHeard(ping, pongs)


def end_of(connection: Connection, topic: str, timeout_s: float) -> int:
    """Return the end of a topic; errors as above."""
    with LogReader(connection, topic, "latest") as reader:
        return reader.end_offset(timeout_s)


def _bounds(connection: Connection, topic: str, timeout_s: float) -> tuple[int, int]:
    """Return the first offset of a topic, and its end."""
    with LogReader(connection, topic, "latest") as reader:
        return reader.bounds(timeout_s)


def _records(
    connection: Connection, topic: str, start: int, end: int, deadline: float
) -> Iterator[LogRecord]:
    with LogReader(connection, topic, start) as reader:
        while reader.position < end:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RegistryUnavailable(
                    f"{topic} could not be read to its end in time{_because(reader.trouble)}"
                )
            try:
                records = reader.poll(min(left_s, _POLL_S))
            except LogTruncated as error:
                raise RegistryUnavailable(f"{topic} was cleaned while it was read: {error}") from error
            yield from (record for record in records if record.offset < end)


def _because(trouble: str | None) -> str:
    return f": {trouble}" if trouble else ""
