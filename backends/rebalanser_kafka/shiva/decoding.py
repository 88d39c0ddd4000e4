"""Decodes records of COMMAND and CONTROL to events of the machines."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar, assert_never

from rebalanser.core.shiva.messages import (
    ChangeRead,
    CommandEvent,
    DocumentPassed,
    DocumentRead,
    LeaderRead,
    PartRead,
    RecordMetadata,
    ScaleRead,
    StartRead,
    StopRead,
    Unreadable,
    WorkerCommandRead,
)
from rebalanser.core.shiva.records import (
    CHANGE_KEYS,
    AssignmentDocument,
    DocumentChange,
    KeptCommand,
    LeaderAnnouncement,
    OutputAnswer,
    OutputRequest,
    Ping,
    Pong,
    ScaleCommand,
    StartCommand,
    StopCommand,
    WorkerCommand,
)
from rebalanser.core.shiva.types import Epoch
from rebalanser_kafka.records import LogRecord
from rebalanser_kafka.shiva.wire import (
    ASSIGNEMENT_KEY,
    CHANGE_KEY,
    LEADER_KEY,
    NotReadable,
    Written,
    decode,
    decode_part_key,
    peek_epoch,
)

RECORD_OVERHEAD_BYTES = 160
"""Bytes of a record beside key and value if it is alone in a transaction: the headers of its batch and its
own, and the batch with the commit marker. Retention by size counts them too (SH-15)."""
_SHOWN_BYTES = 200
_OF_LEADERS = frozenset({ASSIGNEMENT_KEY.encode(), LEADER_KEY.encode()})
_OUTPUT_KEYS = (b"output:", b"printed:")
OutputT = TypeVar("OutputT", OutputRequest, OutputAnswer)


def metadata_of(record: LogRecord) -> RecordMetadata:
    """Return a record's offset and its share of the topic's size."""
    return RecordMetadata(record.offset, record.timestamp_ms, record.size_bytes + RECORD_OVERHEAD_BYTES)


def command_event(record: LogRecord) -> CommandEvent | None:
    """Decode a record of COMMAND; None if it changes nothing, such as a tombstone of no part."""
    at = metadata_of(record)
    try:
        part = decode_part_key(record.key)
        if part is not None:
            if record.value is None:
                at = replace(at, size_bytes=0)
            return PartRead(at, part.application, part.sha256, part.number)
        return None if record.value is None else _event(at, decode(record.key, record.value))
    except NotReadable as error:
        return unreadable(record, error)


class ReplayedCommands:
    """Decodes records of COMMAND to events; of documents it decodes few while COMMAND is replayed.

    A document is held back, with the changes that follow it, until a document of its term with a greater
    epoch replaces it. If another document, an announcement or the end comes first, they are decoded and
    precede that. So a machine decides as if it had read all (SH-7, SH-24).
    """

    def __init__(self) -> None:
        self._ended = False
        self._epoch: Epoch | None = None
        self._held: list[LogRecord] = []
        """Records held back: the document of that epoch and its changes."""

    def events(self, record: LogRecord) -> list[CommandEvent]:
        """Return the events that are due with this record: its own, those held back, or none."""
        if self._ended or record.value is None:
            return _events([record])
        if (record.key or b"").startswith(CHANGE_KEY.encode()):
            if not self._held or len(self._held) > CHANGE_KEYS:
                return _events([*self._let_go(), record])
            self._held.append(record)
            return []
        if record.key not in _OF_LEADERS:
            return _events([record])
        before, held = self._epoch, self._let_go()
        epoch = peek_epoch(record.value)
        if epoch is None:
            return _events([*held, record])
        self._epoch, self._held = epoch, [record]
        if before is not None and before.term == epoch.term and before < epoch:
            return [DocumentPassed(metadata_of(each)) for each in held]
        return _events(held)

    def end(self) -> list[CommandEvent]:
        """End the replay; return the events that were held back."""
        self._ended = True
        return _events(self._let_go())

    def _let_go(self) -> list[LogRecord]:
        held, self._held, self._epoch = self._held, [], None
        return held


def _events(records: list[LogRecord]) -> list[CommandEvent]:
    return [event for event in map(command_event, records) if event is not None]


def output_request(record: LogRecord) -> OutputRequest | None:
    """Return the request for output of a record of COMMAND; None for other records."""
    return _output(record, OutputRequest)


def output_answer(record: LogRecord) -> OutputAnswer | None:
    """Return the answer to such a request of a record of CONTROL; None for other records."""
    return _output(record, OutputAnswer)


def _output(record: LogRecord, kind: type[OutputT]) -> OutputT | None:
    if record.value is None or not (record.key or b"").startswith(_OUTPUT_KEYS):
        return None
    try:
        read = decode(record.key, record.value)
    except NotReadable:
        return None
    return read if isinstance(read, kind) else None


def control_record(record: LogRecord) -> Ping | Pong | Unreadable | None:
    """Decode a record of CONTROL; None if it changes nothing."""
    if record.value is None:
        return None
    try:
        read = decode(record.key, record.value)
    except NotReadable as error:
        return unreadable(record, error, on_control=True)
    if isinstance(read, Ping | Pong):
        return read
    if isinstance(read, OutputAnswer):
        return None
    misplaced = NotReadable("the record does not belong on CONTROL")
    return unreadable(record, misplaced, on_control=True)


def unreadable(record: LogRecord, error: NotReadable, *, on_control: bool = False) -> Unreadable:
    """Return an event for a record that is set aside, with a readable form of its key (SH-16)."""
    key = (record.key or b"")[:_SHOWN_BYTES].decode(errors="backslashreplace")
    return Unreadable(metadata_of(record), key, str(error), on_control)


def _event(at: RecordMetadata, record: Written) -> CommandEvent | None:
    match record:
        case StartCommand() | KeptCommand():
            return StartRead(at, record)
        case StopCommand():
            return StopRead(at, record)
        case ScaleCommand():
            return ScaleRead(at, record)
        case WorkerCommand():
            return WorkerCommandRead(at, record)
        case AssignmentDocument():
            return DocumentRead(at, record)
        case DocumentChange():
            return ChangeRead(at, record)
        case LeaderAnnouncement():
            return LeaderRead(at, record)
        case OutputRequest():
            return None
        case Ping() | Pong() | OutputAnswer():
            raise NotReadable("the record does not belong on COMMAND")
        case _:
            assert_never(record)
