"""What was commanded and no document has taken into account yet."""

from __future__ import annotations

import time
from functools import partial
from typing import Final, Literal

from rebalanser.errors import RegistryUnavailable
from rebalanser.shiva.messages import StartRead, StopRead
from rebalanser.shiva.records import AssignmentDocument, StartCommand, StopCommand
from rebalanser.shiva.types import ApplicationId
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.failures import LogTruncated
from rebalanser_kafka.reader import LogReader
from rebalanser_kafka.shiva.patience import patiently
from rebalanser_kafka.shiva.reading import command_event

_POLL_S: Final = 0.2


def last_commanded(
    connection: Connection,
    topic: str,
    application: ApplicationId,
    document: AssignmentDocument | None,
    timeout_s: float,
) -> StartCommand | StopCommand | None:
    """The last command for the application behind what the document has consumed; None for none.

    Raises:
        RegistryUnavailable: COMMAND could not be read to its end within ``timeout_s`` seconds.
    """
    start: int | Literal["earliest"] = "earliest" if document is None else document.consumed + 1
    try:
        return patiently(partial(_last, connection, topic, application, start), timeout_s)
    except LogTruncated:
        return patiently(partial(_last, connection, topic, application, "earliest"), timeout_s)


def _last(
    connection: Connection,
    topic: str,
    application: ApplicationId,
    start: int | Literal["earliest"],
    timeout_s: float,
) -> StartCommand | StopCommand | None:
    deadline = time.monotonic() + timeout_s
    last: StartCommand | StopCommand | None = None
    with LogReader(connection, topic, start) as reader:
        end = reader.end_offset(timeout_s)
        while reader.position < end:
            if time.monotonic() >= deadline:
                raise RegistryUnavailable(f"{topic} could not be read to its end within {timeout_s:g} s")
            for event in map(command_event, reader.poll(_POLL_S)):
                match event:
                    case StartRead(record=StartCommand() as start_command):
                        last = start_command if start_command.application == application else last
                    case StopRead(record=record):
                        last = record if record.application == application else last
    return last
