"""Events and effects of Shiva's two state machines.

**The ordering contract.** Effects are carried out in the order of the list, those of one call before those of
the next. Events of a topic come in the order of offsets, each record once. Before ``CaughtUp`` a
document may come late, but before any later announcement of a leader. At most one ``PublishDocument`` is
under way, and it is answered by one ``Published`` or ``Deposed``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TypeAlias

from rebalanser.core.shiva.records import (
    AssignmentDocument,
    DocumentChange,
    KeptCommand,
    LeaderAnnouncement,
    Ping,
    Pong,
    ScaleCommand,
    StartCommand,
    StopCommand,
    WorkerCommand,
)
from rebalanser.core.shiva.types import (
    ApplicationId,
    Archive,
    CommandId,
    RestartPolicy,
)


@dataclass(frozen=True, slots=True)
class RecordMetadata:
    """Offset of a record of COMMAND, time at which it was written by Kafka's clock, and size."""

    offset: int
    timestamp_ms: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StartRead:
    """A start command was read from COMMAND, or a kept one, which counts as of its ``original`` offset."""

    at: RecordMetadata
    record: StartCommand | KeptCommand


@dataclass(frozen=True, slots=True)
class StopRead:
    """A stop command was read from COMMAND."""

    at: RecordMetadata
    record: StopCommand


@dataclass(frozen=True, slots=True)
class ScaleRead:
    """A command about the number of replicas of an application was read from COMMAND."""

    at: RecordMetadata
    record: ScaleCommand


@dataclass(frozen=True, slots=True)
class WorkerCommandRead:
    """A command about a worker was read from COMMAND."""

    at: RecordMetadata
    record: WorkerCommand


@dataclass(frozen=True, slots=True)
class DocumentRead:
    """An assignment document was read from COMMAND."""

    at: RecordMetadata
    record: AssignmentDocument


@dataclass(frozen=True, slots=True)
class ChangeRead:
    """A change of a document was read from COMMAND."""

    at: RecordMetadata
    record: DocumentChange


@dataclass(frozen=True, slots=True)
class DocumentPassed:
    """A document or change on COMMAND was not decoded, as a later document replaces it (SH-24)."""

    at: RecordMetadata


@dataclass(frozen=True, slots=True)
class LeaderRead:
    """A leader's announcement was read from COMMAND; its offset is the leader's term."""

    at: RecordMetadata
    record: LeaderAnnouncement


@dataclass(frozen=True, slots=True)
class PartRead:
    """A part of an archive, or a tombstone (``size_bytes`` 0), was read from COMMAND; the driver keeps it."""

    at: RecordMetadata
    application: ApplicationId
    sha256: str
    number: int


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record of COMMAND or CONTROL could not be read (SH-16)."""

    at: RecordMetadata
    key: str
    reason: str
    on_control: bool = False
    """True if its offset is one of CONTROL."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """COMMAND has been read to the end that it had when reading began (SH-6, SH-9)."""


@dataclass(frozen=True, slots=True)
class Wakeup:
    """``next_wakeup`` has come."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The process is asked to stop gracefully.

    A leader gets it once CONTROL has been read to the end that it had at the request, and goes on until it
    emits ``StepDown`` (SH-22).
    """


RecordRead: TypeAlias = (
    StartRead
    | StopRead
    | ScaleRead
    | WorkerCommandRead
    | DocumentRead
    | ChangeRead
    | DocumentPassed
    | LeaderRead
    | PartRead
    | Unreadable
)
CommandEvent: TypeAlias = RecordRead | CaughtUp


@dataclass(frozen=True, slots=True)
class TookOver:
    """This process holds COMMAND's partition, has fenced its predecessor, and has announced itself.

    ``document`` is the last one on ASSIGNEMENT, read after the predecessor was fenced. ``pongs`` are the last
    pongs of workers on CONTROL before the offset from which pongs follow as events (SH-22). All of COMMAND,
    from its first record on, follows as events, then ``CaughtUp``.
    """

    term: int
    document: AssignmentDocument | None
    pongs: tuple[Pong, ...] = ()
    document_missing: bool = False
    """True if ASSIGNEMENT has changes without their base (SH-24)."""


@dataclass(frozen=True, slots=True)
class PongRead:
    """A pong was read from CONTROL."""

    record: Pong


@dataclass(frozen=True, slots=True)
class Published:
    """The document under way is on both topics, on COMMAND at ``offset``."""

    offset: int


@dataclass(frozen=True, slots=True)
class Kept:
    """The commands of a ``KeepCommands`` were written again, each at its new offset."""

    at: Mapping[ApplicationId, RecordMetadata]


@dataclass(frozen=True, slots=True)
class Deposed:
    """This process leads no more: it was fenced, lost the partition, or the outcome of a write is unknown."""

    reason: str


LeaderEvent: TypeAlias = CommandEvent | TookOver | PongRead | Published | Kept | Deposed | Wakeup | Stop


@dataclass(frozen=True, slots=True)
class PublishDocument:
    """Write the document to COMMAND and ASSIGNEMENT with the offset consumed, both or neither (SH-4).

    A ``change`` is written in place of the whole document: both topics have its base.
    """

    document: AssignmentDocument
    change: DocumentChange | None = None


@dataclass(frozen=True, slots=True)
class SendPing:
    """Write a ping to CONTROL, in a transaction: a deposed leader's must not count (SH-14)."""

    ping: Ping


@dataclass(frozen=True, slots=True)
class KeepCommands:
    """Write these start commands again, each after the parts of its archive, in transactions (SH-15)."""

    commands: tuple[KeptCommand, ...]


@dataclass(frozen=True, slots=True)
class DropRecords:
    """Write tombstones for kept commands and parts of archives that no application needs any more."""

    kept: frozenset[ApplicationId] = frozenset()
    archives: frozenset[tuple[ApplicationId, Archive]] = frozenset()


@dataclass(frozen=True, slots=True)
class StepDown:
    """Give the partition back. The machine has ended; a new term needs a new one."""

    reason: str


class FactKind(StrEnum):
    """Kinds of facts of a Shiva leader or worker, the same in logs and documentation."""

    TOOK_OVER = "took_over"
    STEPPED_DOWN = "stepped_down"
    WORKER_ADDED = "worker_added"
    WORKER_STALLED = "worker_stalled"
    WORKER_REMOVED = "worker_removed"
    WORKER_REFUSED = "worker_refused"
    WORKER_CORDONED = "worker_cordoned"
    WORKER_UNCORDONED = "worker_uncordoned"
    START_COMMANDED = "start_commanded"
    STOP_COMMANDED = "stop_commanded"
    SCALE_COMMANDED = "scale_commanded"
    COMMAND_REFUSED = "command_refused"
    RECORD_SET_ASIDE = "record_set_aside"
    DOCUMENT_PUBLISHED = "document_published"
    COMMANDS_KEPT = "commands_kept"
    DOCUMENT_ADOPTED = "document_adopted"
    DOCUMENT_REFUSED = "document_refused"
    FILES_STORED = "files_stored"
    FILES_REFUSED = "files_refused"
    PROCESS_STARTING = "process_starting"
    PROCESS_STARTED = "process_started"
    PROCESS_STOPPING = "process_stopping"
    PROCESS_EXITED = "process_exited"
    APPLICATION_FAILED = "application_failed"
    LEADER_SILENT = "leader_silent"
    LEADER_HEARD = "leader_heard"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that happened, for logs, history and metrics. Reporting never blocks."""

    kind: FactKind
    application: ApplicationId | None = None
    worker: str = ""
    term: int = 0
    """Greatest known term of a leader; 0 before any."""
    version: int = 0
    """Offset on COMMAND of the document that is acted on, or was published last; 0 before any.

    It orders documents as their epochs do, for leaders and workers alike.
    """
    token: int | None = None
    """Fencing token of the process concerned, from before its start to after its end."""
    revision: int | None = None
    """Offset on COMMAND of the record concerned, if there is one."""
    at: float | None = None
    """Time of the fact (monotonic seconds), if it is reported later; None for now."""
    detail: Mapping[str, str | int | float | bool | None] = field(
        default_factory=lambda: MappingProxyType({})
    )


@dataclass(frozen=True, slots=True)
class Report:
    """Report a fact to the sinks."""

    fact: Fact


LeaderEffect: TypeAlias = PublishDocument | SendPing | KeepCommands | DropRecords | StepDown | Report


@dataclass(frozen=True, slots=True)
class PingRead:
    """A ping was read from CONTROL."""

    record: Ping


@dataclass(frozen=True, slots=True)
class FilesFound:
    """Folders of these applications are on this worker's disk from an earlier process.

    It comes at most once, before ``CaughtUp``.
    """

    applications: frozenset[ApplicationId]


@dataclass(frozen=True, slots=True)
class FilesStored:
    """An application's files are on this worker's disk, checked and unpacked (SH-16)."""

    application: ApplicationId
    command: CommandId
    policy: RestartPolicy


@dataclass(frozen=True, slots=True)
class FilesRefused:
    """An application's files cannot be used; the reason is for people (SH-16)."""

    application: ApplicationId
    command: CommandId
    reason: str


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """A process runs."""

    application: ApplicationId
    run: int


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """A process and all of its group have ended, or it was never started (``error``)."""

    application: ApplicationId
    run: int
    code: int | None
    """The exit code, negative for a signal; None where it was not started."""
    error: str = ""
    at: float | None = None
    """Time of the finding (monotonic seconds): a worker that was stopped gets it late. None for now."""


@dataclass(frozen=True, slots=True)
class HealthChecked:
    """A health check of a process has passed, or has failed with ``error`` (SH-23)."""

    application: ApplicationId
    run: int
    error: str = ""


WorkerEvent: TypeAlias = (
    CommandEvent
    | PingRead
    | FilesFound
    | FilesStored
    | FilesRefused
    | ProcessStarted
    | ProcessExited
    | HealthChecked
    | Wakeup
    | Stop
)


@dataclass(frozen=True, slots=True)
class StoreFiles:
    """Fetch, check and unpack an archive; answered by ``FilesStored`` or ``FilesRefused``."""

    application: ApplicationId
    command: CommandId
    archive: Archive


@dataclass(frozen=True, slots=True)
class DropFiles:
    """Remove an application's files of this command: no process uses them any more (SH-5)."""

    application: ApplicationId
    command: CommandId
    keep_data: bool | None = None
    """True if a stop says that the folder with its own data stays; None if no stop is the reason."""
    stays: bool = False
    """True if the application is to run on, here or elsewhere: only its unpacked files go."""


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Start an application's process; answered by ``ProcessStarted``, once by ``ProcessExited``.

    ``run`` numbers the processes of this worker. ``token`` is the offset of the document that named this
    worker: it grows from worker to worker. By ``deadline`` (monotonic seconds) the process must have ended,
    whatever becomes of the worker; None in mode ``available`` (SH-14). ``replicas`` is the present number of
    replicas of the application.
    """

    application: ApplicationId
    command: CommandId
    run: int
    token: int
    deadline: float | None
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class StopProcess:
    """Stop a process: SIGTERM, then SIGKILL after its stop timeout (SH-17)."""

    application: ApplicationId
    run: int


@dataclass(frozen=True, slots=True)
class ExtendDeadline:
    """Let the exclusive processes run until ``deadline`` (monotonic seconds)."""

    runs: Mapping[ApplicationId, int]
    deadline: float


@dataclass(frozen=True, slots=True)
class SendPong:
    """Write a pong to CONTROL. The machine counts its deadline from the call that returned this effect."""

    pong: Pong


@dataclass(frozen=True, slots=True)
class Finished:
    """The worker has stopped for good and emits nothing more."""


WorkerEffect: TypeAlias = (
    StoreFiles | DropFiles | StartProcess | StopProcess | ExtendDeadline | SendPong | Report | Finished
)
