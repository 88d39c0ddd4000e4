"""What stands on Shiva's three topics. How it is written as bytes is the driver's affair.

=============  =========================================  ===============================================
topic          key                                        value
=============  =========================================  ===============================================
COMMAND        ``cmd:T/C/A``                              :class:`StartCommand` or :class:`StopCommand`
COMMAND        ``keep:T/C/A``                             :class:`KeptCommand`
COMMAND        ``part:T/C/A:SHA256:N``                    the bytes of part N of an archive
COMMAND        ``worker:W``                               :class:`WorkerCommand`
COMMAND        ``output:W``                               :class:`OutputRequest`
COMMAND        ``leader``                                 :class:`LeaderAnnouncement`
COMMAND        ``assignement``                            :class:`AssignmentDocument`
ASSIGNEMENT    ``assignement``                            the same document
both of them   ``change:N``                               :class:`DocumentChange`
CONTROL        ``ping``                                   :class:`Ping`
CONTROL        ``pong:W``                                 :class:`Pong`
CONTROL        ``printed:W``                              :class:`OutputAnswer`
=============  =========================================  ===============================================

Everything that a leader writes, it writes in a transaction: ``leader`` alone, a document or a change to both
topics together with the consumed offset, a ping alone, kept commands with the parts they need (SH-4, SH-7).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, TypeAlias

from rebalanser.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationState,
    Archive,
    CommandId,
    Cordon,
    Epoch,
    Incarnation,
    LeaderId,
    Leaving,
    Mode,
    RunState,
    SetAside,
    Tag,
    WorkerEntry,
    WorkerId,
    check_part,
)


@dataclass(frozen=True, slots=True)
class StartCommand:
    """A client wants an application to run (SH-4). The parts of its archive stand before it."""

    application: ApplicationId
    command: CommandId
    archive: Archive
    mode: Mode
    tags: frozenset[Tag] = frozenset()


@dataclass(frozen=True, slots=True)
class StopCommand:
    """A client wants an application to stop (SH-5)."""

    application: ApplicationId
    command: CommandId
    keep_data: bool = False
    """True if workers keep the folder with its own data."""


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """An operator cordons or drains a worker, or ends both with ``cordon`` None (SH-26).

    Raises:
        InvalidName: ``worker`` is no name.
    """

    worker: WorkerId
    command: CommandId
    cordon: Cordon | None

    def __post_init__(self) -> None:
        """Refuse what no worker can be called."""
        check_part(self.worker, "worker")


@dataclass(frozen=True, slots=True)
class OutputRequest:
    """A client asks a worker for the last lines that an application has printed there (SH-17).

    Leaders and other workers leave it alone; it is answered only if it is read as it comes.
    """

    worker: WorkerId
    request: str
    application: ApplicationId
    lines: int
    follow_s: float = 0.0
    """Seconds for which what is printed then is sent as well; the same request made again extends them."""


@dataclass(frozen=True, slots=True)
class OutputAnswer:
    """The lines of an application's output, oldest first, or why there are none."""

    worker: WorkerId
    request: str
    lines: tuple[str, ...] = ()
    error: str = ""
    omitted: int = 0
    """Number of lines before them that were asked for and did not fit."""


@dataclass(frozen=True, slots=True)
class KeptCommand:
    """A start command that a leader wrote again before it would age out (SH-15).

    It counts as standing at ``original``, the offset of the client's own record: a stop that was published
    after that one still comes after it, wherever this copy stands.
    """

    start: StartCommand
    original: int


@dataclass(frozen=True, slots=True)
class LeaderAnnouncement:
    """A leader took over; the offset of this record is its term (SH-7)."""

    leader: LeaderId


@dataclass(frozen=True, slots=True)
class AssignmentDocument:
    """One complete assignment: all that is known of workers and applications (SH-4, SH-11)."""

    epoch: Epoch
    leader: LeaderId
    consumed: int
    """The offset of the last record of COMMAND that it takes into account; -1 for none."""
    deadline_s: float
    """How long a worker's pong, once heard, entitles it to run exclusive applications (SH-14)."""
    workers: Mapping[WorkerId, WorkerEntry] = field(default_factory=lambda: MappingProxyType({}))
    applications: Mapping[ApplicationId, ApplicationEntry] = field(
        default_factory=lambda: MappingProxyType({})
    )
    set_aside: tuple[SetAside, ...] = ()
    """The last records that were not carried out, oldest first, boundedly many (SH-16)."""
    round_s: float = 0.0
    """Seconds between two pings of its leader (SH-8); 0 from a leader of a version that did not say so."""
    cordons: Mapping[WorkerId, Cordon] = field(default_factory=lambda: MappingProxyType({}))
    """The workers that are cordoned or drained, known or not (SH-26)."""
    reads_changes: bool = False
    """True if its leader reads changes; False from one of a version that reads whole documents only."""


CHANGE_KEYS: Final = 1000
"""Keys of changes, used in turn: compaction drops no change that follows the last whole document."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What may change of an application's entry while its start command stays the same; its fields."""

    state: ApplicationState
    worker: WorkerId | None
    leaving: Leaving | None
    reason: str
    failed_on: Mapping[WorkerId, str]
    offset: int
    timestamp_ms: int
    restarts: int
    kept_for: WorkerId | None


@dataclass(frozen=True, slots=True)
class DocumentChange:
    """What is new in a document since the one before it of the same term, which is its ``base`` (SH-24).

    In the mappings None stands for what is not there any more. All else is as in the base.
    """

    epoch: Epoch
    base: Epoch
    consumed: int
    deadline_s: float
    workers: Mapping[WorkerId, WorkerEntry | None] = field(default_factory=lambda: MappingProxyType({}))
    applications: Mapping[ApplicationId, ApplicationEntry | None] = field(
        default_factory=lambda: MappingProxyType({})
    )
    progress: Mapping[ApplicationId, Progress] = field(default_factory=lambda: MappingProxyType({}))
    """Of the applications that still are of the same command."""
    cordons: Mapping[WorkerId, Cordon | None] = field(default_factory=lambda: MappingProxyType({}))
    set_aside: tuple[SetAside, ...] | None = None
    """All of them; None for the same as before."""

    @property
    def key(self) -> str:
        """The key that it stands under."""
        return f"change:{self.epoch.number % CHANGE_KEYS}"

    @property
    def entries(self) -> int:
        """Number of entries that differ."""
        return len(self.workers) + len(self.applications) + len(self.progress) + len(self.cordons)


@dataclass(frozen=True, slots=True)
class Heard:
    """The last pong of a worker that the leader has read."""

    incarnation: Incarnation
    sequence: int


@dataclass(frozen=True, slots=True)
class Ping:
    """The leader's question of a round, and its answer to the pongs before it (SH-8, SH-14).

    A worker whose pong is in ``heard`` may run exclusive applications until ``deadline_s`` after it sent that
    pong, by documents of ``epoch`` or later.
    """

    term: int
    leader: LeaderId
    round: int
    epoch: Epoch
    deadline_s: float
    heard: Mapping[WorkerId, Heard] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a worker says of one application."""

    command: CommandId
    state: RunState
    restarts: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Pong:
    """A worker's state, sent on each ping and whenever it changes (SH-8, SH-10)."""

    worker: WorkerId
    incarnation: Incarnation
    sequence: int
    """Grows with each pong of an incarnation, from 1."""
    round: int
    """Of the last ping that was read; 0 for none."""
    term: int
    """Of that ping; -1 for none."""
    seen: Epoch | None
    """Of the last document that it acts on."""
    tags: frozenset[Tag] = frozenset()
    host: str = ""
    leaving: bool = False
    """Its last pong: nothing of it runs any more and nothing will."""
    applications: Mapping[ApplicationId, RunReport] = field(default_factory=lambda: MappingProxyType({}))
    reads_changes: bool = False
    """False from a worker of a version that reads whole documents only (SH-24)."""


CommandRecord: TypeAlias = (
    StartCommand
    | StopCommand
    | WorkerCommand
    | OutputRequest
    | KeptCommand
    | LeaderAnnouncement
    | AssignmentDocument
    | DocumentChange
)
ControlRecord: TypeAlias = Ping | Pong | OutputAnswer
