"""The nouns of Shiva: small, frozen and comparable."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final, Self, TypeAlias

from rebalanser.core.allocation import Capacity, Requests
from rebalanser.errors import InvalidName

WorkerId: TypeAlias = str
"""A worker's name. Its ``Incarnation`` identifies the process behind it."""
LeaderId: TypeAlias = str
CommandId: TypeAlias = str
"""Names one start or stop command for ever; a command that is republished keeps its id."""
Tag: TypeAlias = str

MAX_PART_CHARS: Final = 64
MAX_REPLICAS: Final = 1000
"""Maximum replicas of an application (SH-28)."""
_REPLICA: Final = re.compile(r"[1-9][0-9]{0,2}")
_PART: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?")


def check_part(text: str, what: str) -> str:
    """Return the name of a tenant, channel, application, worker, leader or tag, if it is valid.

    Letters, digits, ``_``, ``-`` and ``.``, at most 64, the first neither ``.`` nor ``-`` and the last no
    ``.``: such a name is safe in a path, in a record's key and on a command line (SH-16).

    Raises:
        InvalidName: it is not.
    """
    if len(text) > MAX_PART_CHARS or not _PART.fullmatch(text):
        article = "an" if what[0] in "aeiou" else "a"
        raise InvalidName(
            f"{text[:80]!r} cannot be {article} {what}: use at most {MAX_PART_CHARS} of the letters "
            "A-Z and a-z, digits, '_', '-' and '.', beginning with a letter, a digit or '_' and not ending "
            "with '.'"
        )
    return text


@dataclass(frozen=True, slots=True, order=True)
class ApplicationId:
    """``tenant/channel/application``: names an application of a cluster (SH-2), or a replica of it (SH-28).

    The first replica has the application's own name, the others a number behind it: ``acme/main/web#2``.
    """

    tenant: str
    channel: str
    application: str
    replica: int = 0

    def __post_init__(self) -> None:
        """Refuse a name that cannot be a part of a path.

        Raises:
            InvalidName: a part is no name (SH-16), or there can be no such replica.
        """
        for what in ("tenant", "channel", "application"):
            check_part(getattr(self, what), what)
        if not 0 <= self.replica < MAX_REPLICAS:
            raise InvalidName(f"replicas have numbers from 0 to {MAX_REPLICAS - 1}, not {self.replica}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``tenant/channel/application``, or ``tenant/channel/application#number``.

        Raises:
            InvalidName: it has not three parts, one is no name, or the number is invalid.
        """
        name, numbered, number = text.partition("#")
        parts = name.split("/")
        if len(parts) != 3:
            raise InvalidName(f"{text[:200]!r} is not TENANT/CHANNEL/APPLICATION")
        tenant, channel, application = parts
        if not numbered:
            return cls(tenant, channel, application)
        if not _REPLICA.fullmatch(number):
            raise InvalidName(
                f"{text[:200]!r} is not a replica: give a number from 1 to {MAX_REPLICAS - 1} after "
                "'#', or no '#' for the first replica"
            )
        return cls(tenant, channel, application, int(number))

    @property
    def whole(self) -> ApplicationId:
        """The application that it is, or that it is a replica of."""
        return self.numbered(0)

    def numbered(self, replica: int) -> ApplicationId:
        """Return a replica of the application."""
        if replica == self.replica:
            return self
        return ApplicationId(self.tenant, self.channel, self.application, replica)

    def require_whole(self) -> None:
        """Check that it names an application: a command applies to all of its replicas.

        Raises:
            InvalidName: it names a replica other than the first.
        """
        if self.replica:
            raise InvalidName(
                f"{self} is a replica, which can't be started, stopped or restarted alone: give {self.whole} "
                f"for all replicas, or change their number with: rebalanser shiva scale {self.whole} N"
            )

    def __str__(self) -> str:
        number = f"#{self.replica}" if self.replica else ""
        return f"{self.tenant}/{self.channel}/{self.application}{number}"


def check_replicas(number: int) -> int:
    """Return a number of replicas, if it is valid (SH-28).

    Raises:
        InvalidName: it is not.
    """
    if not 1 <= number <= MAX_REPLICAS:
        raise InvalidName(f"an application has 1 to {MAX_REPLICAS} replicas, not {number}")
    return number


@dataclass(frozen=True, slots=True)
class ApplicationPattern:
    """A pattern of applications of a tenant or a channel; each part may have ``*`` and ``?`` (SH-25)."""

    tenant: str
    channel: str = "*"
    application: str = "*"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``TENANT``, ``TENANT/CHANNEL`` or ``TENANT/CHANNEL/APPLICATION``.

        Raises:
            InvalidName: it has more parts, one can match no name, or it names a single replica.
        """
        if "#" in text:
            ApplicationId.parse(text).require_whole()
        parts = text.split("/")
        if len(parts) > 3:
            raise InvalidName(f"{text[:200]!r} is not TENANT, TENANT/CHANNEL or TENANT/CHANNEL/APPLICATION")
        for what, part in zip(("tenant", "channel", "application"), parts, strict=False):
            check_part(re.sub(r"[*?]+", "_", part), f"pattern of {what}s")
        return cls(*parts)

    @property
    def exact(self) -> ApplicationId | None:
        """The only application that it can match; None if there may be several."""
        parts = (self.tenant, self.channel, self.application)
        return None if any("*" in part or "?" in part for part in parts) else ApplicationId(*parts)

    def matches(self, application: ApplicationId) -> bool:
        """True if it selects an application."""
        return (
            fnmatchcase(application.tenant, self.tenant)
            and fnmatchcase(application.channel, self.channel)
            and fnmatchcase(application.application, self.application)
        )

    def __str__(self) -> str:
        return f"{self.tenant}/{self.channel}/{self.application}"


class Mode(StrEnum):
    """Behaviour of an application on a worker that hears no leader (SH-14)."""

    AVAILABLE = "available"
    """It runs on: while the worker is cut off a second one may run elsewhere."""
    EXCLUSIVE = "exclusive"
    """It stops within the worker's deadline; only then it is started elsewhere."""


class Cordon(StrEnum):
    """Restriction of a worker by an operator (SH-26)."""

    CORDONED = "cordoned"
    """It gets no further applications; those that it has stay."""
    DRAINED = "drained"
    """It runs none: those that it has move to others."""


@dataclass(frozen=True, slots=True, order=True)
class Epoch:
    """Orders assignment documents: the leader's term, then the number of the document within it (SH-7).

    A term is the offset on COMMAND at which its leader announced itself, so no two leaders share one.
    """

    term: int
    number: int

    def __str__(self) -> str:
        return f"{self.term}.{self.number}"


@dataclass(frozen=True, slots=True)
class Incarnation:
    """The process behind a worker's id.

    ``lineage`` names the worker's data folder on one host since it booted, which one process locks at a time;
    ``number`` grows each time that the folder is opened. So a greater number of the same lineage proves that
    the earlier process has ended; processes of two lineages do not know of each other (SH-3).
    """

    lineage: str
    number: int

    def succeeds(self, other: Incarnation) -> bool:
        """True if this process proves that the other one has ended."""
        return self.lineage == other.lineage and self.number > other.number


@dataclass(frozen=True, slots=True)
class Archive:
    """An application's files, on COMMAND in ``parts`` records before the start command."""

    sha256: str
    size_bytes: int
    parts: int


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """When a health check that fails stops a process, from the manifest (SH-23)."""

    grace_period_s: float = 30.0
    """Seconds after its start in which failures don't count, until a check passes for the first time."""
    failure_threshold: int = 3
    """Failures in a row after which the process is stopped and started again."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a worker starts an application's process again, from the manifest (SH-17)."""

    restart: str = "always"
    """``always``, ``on_failure`` (an exit code other than 0, or a signal) or ``never``."""
    max_restarts: int = 5
    """Maximum restarts within the window; one more and the application has failed on this worker."""
    restart_window_s: float = 300.0
    backoff_initial_s: float = 0.5
    backoff_max_s: float = 30.0
    stop_timeout_s: float = 10.0
    """Seconds from SIGTERM to SIGKILL; its stop begins so long before its deadline (SH-14)."""
    health: HealthPolicy | None = None
    """None for no health check: it runs as soon as its process does."""


class RunState(StrEnum):
    """A worker's state of an application that it is assigned, or that it still runs."""

    PENDING = "pending"
    """Its files have not been stored yet, or its worker may not start it yet (SH-6, SH-14)."""
    STARTING = "starting"
    """Its process is being started, or has not passed its health check yet."""
    RUNNING = "running"
    BACKING_OFF = "backing_off"
    STOPPING = "stopping"
    FINISHED = "finished"
    """It exited and its manifest says not to start it again."""
    FAILED = "failed"
    """Its files were refused, or it exited more often than its manifest allows."""

    @property
    def may_run(self) -> bool:
        """True if a process of it may exist, now or before the worker takes in another event."""
        return self in {RunState.STARTING, RunState.RUNNING, RunState.STOPPING}


class ApplicationState(StrEnum):
    """State of an application in an assignment document (SH-11)."""

    WAITING = "waiting"
    """No worker can take it; the reason says why."""
    MOVING = "moving"
    """It starts elsewhere once its last worker has stopped it or is gone (SH-13), and has room (SH-27)."""
    ASSIGNED = "assigned"
    """It has a worker, which has not reported yet that it runs."""
    RUNNING = "running"
    """Its worker has reported that it runs. Only the worker's pongs report restarts (SH-24)."""
    FINISHED = "finished"
    STOPPING = "stopping"
    """A stop was commanded; its last worker has not reported yet that it has stopped."""
    FAILED = "failed"
    """It failed on every worker that could take it."""
    REFUSED = "refused"
    """Its start was refused, for instance beyond the size budget (SH-15)."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """A worker that may still run an application, taken from it in ``epoch`` (SH-13)."""

    worker: WorkerId
    incarnation: Incarnation
    epoch: Epoch
    mode: Mode = Mode.EXCLUSIVE
    """Mode in which it may run there; a later start command may have another mode."""
    requests: Requests | None = None
    """Amounts that it may still take there (SH-27); None for none."""


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """A worker that the leader knows: only this incarnation acts on the assignment."""

    incarnation: Incarnation
    tags: frozenset[Tag] = frozenset()
    host: str = ""
    capacity: Capacity | None = None
    """Amounts that its applications may request together (SH-27); None for no limit."""


@dataclass(frozen=True, slots=True)
class ApplicationEntry:
    """An application in an assignment document, or a replica of it."""

    command: CommandId
    state: ApplicationState
    mode: Mode
    archive: Archive
    tags: frozenset[Tag] = frozenset()
    worker: WorkerId | None = None
    """Worker that is to run it; None if it is assigned to none, or while ``leaving`` may still run it."""
    leaving: Leaving | None = None
    reason: str = ""
    failed_on: Mapping[WorkerId, str] = field(default_factory=lambda: MappingProxyType({}))
    """Workers on which this command failed, with the reasons."""
    offset: int = 0
    """Offset of its start command on COMMAND, as published or as last kept."""
    timestamp_ms: int = 0
    """Time of the record at ``offset``, by Kafka's clock."""
    restarts: int = 0
    """Restarts of a finished application; those of a running one are in its worker's pongs."""
    kept_for: WorkerId | None = None
    """The absent worker that gets it back if it returns in time (SH-26)."""
    requests: Requests | None = None
    """Amounts of its worker that it takes (SH-27); None for none."""
    replicas: int = 1
    """Number of replicas of its application (SH-28)."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """A record or command that was not carried out: its offset, and why (SH-16)."""

    offset: int
    """Offset on COMMAND, or of a ping or pong on CONTROL; -1 for other records of CONTROL."""
    key: str
    reason: str
