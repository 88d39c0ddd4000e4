"""The last document on ASSIGNEMENT: all that a status is made of, and what a new leader begins with."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Final

from rebalanser.errors import RegistryUnavailable
from rebalanser.shiva.records import AssignmentDocument
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.reader import LogReader
from rebalanser_kafka.records import LogRecord
from rebalanser_kafka.shiva.patience import patiently
from rebalanser_kafka.shiva.wire import NotReadable, decode

_TAIL: Final = 16
"""How many offsets before the end are looked at first: a document and its control record take two."""
_POLL_S: Final = 0.2


def document_in(record: LogRecord) -> AssignmentDocument | None:
    """The document that a record holds; None if it holds none that can be read (SH-16)."""
    if record.value is None:
        return None
    try:
        read = decode(record.key, record.value)
    except NotReadable:
        return None
    return read if isinstance(read, AssignmentDocument) else None


def newest(
    records: Iterable[LogRecord], known: AssignmentDocument | None = None
) -> AssignmentDocument | None:
    """The document of the greatest epoch: a deposed leader's late one does not count (SH-7)."""
    for record in records:
        document = document_in(record)
        if document is not None and (known is None or document.epoch > known.epoch):
            known = document
    return known


def last_document(connection: Connection, topic: str, timeout_s: float) -> AssignmentDocument | None:
    """Read ASSIGNEMENT to its end; None if it holds no document.

    Raises:
        RegistryUnavailable: not within ``timeout_s`` seconds.
        RegistryRefused: there is no such topic.
    """
    return patiently(partial(_last_document, connection, topic), timeout_s)


def _last_document(connection: Connection, topic: str, timeout_s: float) -> AssignmentDocument | None:
    deadline = time.monotonic() + timeout_s
    with LogReader(connection, topic, "latest") as reader:
        first = reader.start_offset(timeout_s)
        end = reader.end_offset(timeout_s)
    if end <= first:
        return None
    found = _newest_from(connection, topic, max(first, end - _TAIL), end, deadline)
    if found is None and end - _TAIL > first:
        found = _newest_from(connection, topic, first, end, deadline)
    return found


def _newest_from(
    connection: Connection, topic: str, start: int, end: int, deadline: float
) -> AssignmentDocument | None:
    found: AssignmentDocument | None = None
    with LogReader(connection, topic, start) as reader:
        while reader.position < end:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RegistryUnavailable(
                    f"{topic} could not be read to its end in time{_because(reader.trouble)}"
                )
            found = newest(reader.poll(min(left_s, _POLL_S)), found)
    return found


def _because(trouble: str | None) -> str:
    return f": {trouble}" if trouble else ""
