"""Records of Shiva's three topics. Their encoding is the driver's.

=============  =========================================  ===============================================
topic          key                                        value
=============  =========================================  ===============================================
COMMAND        ``cmd:T/C/A``                              ``StartCommand`` or ``StopCommand``
COMMAND        ``keep:T/C/A``                             ``KeptCommand``
COMMAND        ``part:T/C/A:SHA256:N``                    the bytes of part N of an archive
COMMAND        ``scale:T/C/A``                            ``ScaleCommand``
COMMAND        ``worker:W``                               ``WorkerCommand``
COMMAND        ``output:W``                               ``OutputRequest``
COMMAND        ``leader``                                 ``LeaderAnnouncement``
COMMAND        ``assignement``                            ``AssignmentDocument``
ASSIGNEMENT    ``assignement``                            the same document
both of them   ``change:N``                               ``DocumentChange``
CONTROL        ``ping``                                   ``Ping``
CONTROL        ``pong:W``                                 ``Pong``
CONTROL        ``printed:W``                              ``OutputAnswer``
=============  =========================================  ===============================================

A leader writes everything in transactions: ``leader`` alone, a document or a change to both
topics together with the consumed offset, a ping alone, kept commands with the parts they need (SH-4, SH-7).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, TypeAlias

from rebalanser.core.allocation import Capacity, Requests
from rebalanser.core.shiva.types import (
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
    check_replicas,
)


@dataclass(frozen=True, slots=True)
class StartCommand:
    """A client's request to run an application (SH-4). The parts of its archive precede it.

    Raises:
        InvalidName: it is for a single replica, or there can be no such number of them.
    """

    application: ApplicationId
    command: CommandId
    archive: Archive
    mode: Mode
    tags: frozenset[Tag] = frozenset()
    requests: Requests | None = None
    """Amounts of its worker that it takes (SH-27); None for none, and from a version that knew none."""
    replicas: int = 1
    """Number of replicas, each on a worker of its own (SH-28)."""

    def __post_init__(self) -> None:
        """Refuse what names a single replica."""
        self.application.require_whole()
        check_replicas(self.replicas)

    @classmethod
    def of(cls, application: ApplicationId, entry: ApplicationEntry) -> StartCommand:
        """Return the command that an entry of an application comes from."""
        return cls(
            application, entry.command, entry.archive, entry.mode, entry.tags, entry.requests, entry.replicas
        )

    def entry(self, state: ApplicationState, offset: int, timestamp_ms: int) -> ApplicationEntry:
        """Return the entry of this command from its record on COMMAND."""
        return ApplicationEntry(
            command=self.command,
            state=state,
            mode=self.mode,
            archive=self.archive,
            tags=self.tags,
            requests=self.requests,
            offset=offset,
            timestamp_ms=timestamp_ms,
            replicas=self.replicas,
        )


@dataclass(frozen=True, slots=True)
class StopCommand:
    """A client's request to stop an application with all of its replicas (SH-5).

    Raises:
        InvalidName: it is for a single replica.
    """

    application: ApplicationId
    command: CommandId
    keep_data: bool = False
    """True if workers keep the folder with its own data."""

    def __post_init__(self) -> None:
        """Refuse what names a single replica."""
        self.application.require_whole()


@dataclass(frozen=True, slots=True)
class ScaleCommand:
    """A client's request to run another number of replicas of an application (SH-28).

    A later start command has a number of its own.

    Raises:
        InvalidName: it is for a single replica, or there can be no such number of them.
    """

    application: ApplicationId
    command: CommandId
    replicas: int = 1

    def __post_init__(self) -> None:
        """Refuse what names a single replica."""
        self.application.require_whole()
        check_replicas(self.replicas)


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """An operator's request to cordon or drain a worker, or to end both with ``cordon`` None (SH-26).

    Raises:
        InvalidName: ``worker`` is no valid name.
    """

    worker: WorkerId
    command: CommandId
    cordon: Cordon | None

    def __post_init__(self) -> None:
        """Refuse an invalid name."""
        check_part(self.worker, "worker")


@dataclass(frozen=True, slots=True)
class OutputRequest:
    """A client's request for the last lines that an application has printed on a worker (SH-17).

    Leaders and other workers ignore it. A worker answers it only as it comes, not while it replays.
    """

    worker: WorkerId
    request: str
    application: ApplicationId
    lines: int
    follow_s: float = 0.0
    """Seconds for which new lines are sent as well; repeating the request extends them."""


@dataclass(frozen=True, slots=True)
class OutputAnswer:
    """Answer to a request for output: lines, the oldest first, or an error."""

    worker: WorkerId
    request: str
    lines: tuple[str, ...] = ()
    error: str = ""
    omitted: int = 0
    """Number of requested lines before them that did not fit."""


@dataclass(frozen=True, slots=True)
class KeptCommand:
    """A start command that a leader wrote again before it would age out (SH-15).

    It counts as of ``original``, the offset of the client's own record: a stop that was published
    after that one still comes after it, whatever the offset of this copy.
    """

    start: StartCommand
    original: int


@dataclass(frozen=True, slots=True)
class LeaderAnnouncement:
    """A leader took over; the offset of this record is its term (SH-7)."""

    leader: LeaderId


@dataclass(frozen=True, slots=True)
class AssignmentDocument:
    """One complete assignment: the known workers and applications (SH-4, SH-11)."""

    epoch: Epoch
    leader: LeaderId
    consumed: int
    """Offset of the last record of COMMAND that it takes into account; -1 for none."""
    deadline_s: float
    """Seconds after sending a pong that was heard in which exclusive applications may run (SH-14)."""
    workers: Mapping[WorkerId, WorkerEntry] = field(default_factory=lambda: MappingProxyType({}))
    applications: Mapping[ApplicationId, ApplicationEntry] = field(
        default_factory=lambda: MappingProxyType({})
    )
    set_aside: tuple[SetAside, ...] = ()
    """The last records that were not carried out, oldest first, limited in number (SH-16)."""
    round_s: float = 0.0
    """Seconds between two pings of its leader (SH-8); 0 from a leader of a version that did not say so."""
    cordons: Mapping[WorkerId, Cordon] = field(default_factory=lambda: MappingProxyType({}))
    """The workers that are cordoned or drained, known or not (SH-26)."""
    reads_changes: bool = False
    """True if its leader reads changes; False from a version that reads whole documents only."""


CHANGE_KEYS: Final = 1000
"""Number of keys of changes, used in turn: compaction keeps all that follow the last whole document."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The fields of an application's entry that may change while its start command stays the same."""

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
    """Changes of a document since its ``base``, the one before it in the same term (SH-24).

    In the mappings None removes an entry. All else is as in the base.
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
    """Progress of applications whose start command is the same."""
    cordons: Mapping[WorkerId, Cordon | None] = field(default_factory=lambda: MappingProxyType({}))
    set_aside: tuple[SetAside, ...] | None = None
    """All of them; None if they are the same."""

    @property
    def key(self) -> str:
        """Key of its record."""
        return f"change:{self.epoch.number % CHANGE_KEYS}"

    @property
    def entries(self) -> int:
        """Number of entries that differ."""
        return len(self.workers) + len(self.applications) + len(self.progress) + len(self.cordons)


@dataclass(frozen=True, slots=True)
class Heard:
    """Last pong of a worker that the leader has read."""

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
    """A worker's report of one application."""

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
    """Number of the last ping that was read; 0 for none."""
    term: int
    """Term of that ping; -1 for none."""
    seen: Epoch | None
    """Epoch of the last document that it acts on."""
    tags: frozenset[Tag] = frozenset()
    host: str = ""
    leaving: bool = False
    """True in its last pong: nothing of it runs, now or later."""
    applications: Mapping[ApplicationId, RunReport] = field(default_factory=lambda: MappingProxyType({}))
    reads_changes: bool = False
    """False from a version that reads whole documents only (SH-24)."""
    capacity: Capacity | None = None
    """Amounts that its applications may request together (SH-27); None for no limit."""
    reads_replicas: bool = False
    """False from a version that refuses documents with replicas (SH-28)."""


CommandRecord: TypeAlias = (
    StartCommand
    | StopCommand
    | ScaleCommand
    | WorkerCommand
    | OutputRequest
    | KeptCommand
    | LeaderAnnouncement
    | AssignmentDocument
    | DocumentChange
)
ControlRecord: TypeAlias = Ping | Pong | OutputAnswer
