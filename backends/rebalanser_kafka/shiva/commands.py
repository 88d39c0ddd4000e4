"""What was commanded and no document has taken into account yet."""

from __future__ import annotations

import time
from functools import partial
from typing import Final, Literal

from rebalanser.errors import RegistryUnavailable
from rebalanser.shiva.messages import StartRead, StopRead
from rebalanser.shiva.records import AssignmentDocument, KeptCommand
from rebalanser.shiva.types import ApplicationId
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.failures import LogTruncated
from rebalanser_kafka.reader import LogReader
from rebalanser_kafka.shiva.patience import patiently
from rebalanser_kafka.shiva.reading import command_event

_POLL_S: Final = 0.2


def is_commanded(
    connection: Connection,
    topic: str,
    application: ApplicationId,
    document: AssignmentDocument | None,
    timeout_s: float,
) -> bool:
    """Whether the last command for the application behind what the document has consumed is a start.

    Raises:
        RegistryUnavailable: COMMAND could not be read to its end within ``timeout_s`` seconds.
    """
    start: int | Literal["earliest"] = "earliest" if document is None else document.consumed + 1
    try:
        return patiently(partial(_last_is_start, connection, topic, application, start), timeout_s)
    except LogTruncated:
        return patiently(partial(_last_is_start, connection, topic, application, "earliest"), timeout_s)


def _last_is_start(
    connection: Connection,
    topic: str,
    application: ApplicationId,
    start: int | Literal["earliest"],
    timeout_s: float,
) -> bool:
    deadline = time.monotonic() + timeout_s
    started = False
    with LogReader(connection, topic, start) as reader:
        end = reader.end_offset(timeout_s)
        while reader.position < end:
            if time.monotonic() >= deadline:
                raise RegistryUnavailable(f"{topic} could not be read to its end within {timeout_s:g} s")
            for event in map(command_event, reader.poll(_POLL_S)):
                match event:
                    case StartRead(record=record) if not isinstance(record, KeptCommand):
                        started = record.application == application or started
                    case StopRead(record=record) if record.application == application:
                        started = False
    return started
