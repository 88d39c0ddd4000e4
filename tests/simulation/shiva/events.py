"""What a record of COMMAND is to a machine, and how big records are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rebalanser.core.shiva.messages import (
    ChangeRead,
    CommandEvent,
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
    AssignmentDocument,
    DocumentChange,
    KeptCommand,
    LeaderAnnouncement,
    ScaleCommand,
    StartCommand,
    StopCommand,
    WorkerCommand,
)
from rebalanser.core.shiva.types import ApplicationId
from simulation.shiva.log import Part, Poison

if TYPE_CHECKING:
    from simulation.shiva.log import Record, Value

SMALL_BYTES: Final = 100
PART_BYTES: Final = 600


def size_bytes(value: Value) -> int:
    """How big a record is."""
    match value:
        case None:
            return 0
        case Part():
            return PART_BYTES
        case AssignmentDocument(workers=workers, applications=applications):
            return SMALL_BYTES + 20 * len(workers) + 40 * len(applications)
        case DocumentChange(entries=entries):
            return SMALL_BYTES + 40 * entries
        case _:
            return SMALL_BYTES


def part_key(application: ApplicationId, sha256: str, number: int) -> str:
    """The key of one part of an archive."""
    return f"part:{application}:{sha256}:{number}"


def command_event(record: Record) -> CommandEvent | None:
    """What a machine is told of a record of COMMAND; None where it is told nothing."""
    at = RecordMetadata(record.offset, record.timestamp_ms, record.size_bytes)
    match record.value:
        case StartCommand() | KeptCommand() as start:
            return StartRead(at, start)
        case StopCommand() as stop:
            return StopRead(at, stop)
        case ScaleCommand() as scale:
            return ScaleRead(at, scale)
        case WorkerCommand() as command:
            return WorkerCommandRead(at, command)
        case AssignmentDocument() as document:
            return DocumentRead(at, document)
        case DocumentChange() as change:
            return ChangeRead(at, change)
        case LeaderAnnouncement() as announcement:
            return LeaderRead(at, announcement)
        case Part(application, sha256, number):
            return PartRead(at, application, sha256, number)
        case Poison(reason):
            return Unreadable(at, record.key, reason)
        case _:
            return _tombstone(record, at)


def _tombstone(record: Record, at: RecordMetadata) -> CommandEvent | None:
    kind, _, rest = record.key.partition(":")
    if kind != "part":
        return None
    application, sha256, number = rest.rsplit(":", 2)
    return PartRead(at, ApplicationId.parse(application), sha256, int(number))
