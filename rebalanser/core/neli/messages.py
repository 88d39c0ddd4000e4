"""Events and effects of a member, and their order.

**The contract of a driver.** One thread polls the consumer and passes events to the member, in the order in
which they came from the client. Effects are carried out in the order of the list.

- ``Assigned`` is passed inside the assign callback, after the committed offsets of the new partitions were
  requested. Reading goes on at the committed offset, or at the end of a partition that has none. Each record
  of an assigned partition becomes a ``HeartbeatRead``, in the order of the log, none left out.
- ``Revoked`` is passed inside the revoke callback, which returns (and so gives up the partitions) only after
  ``LetGo`` has named each of them. Until then the driver feeds ``HandlerReturned``,
  ``CommitAnswered`` and ``Wakeup``, and does not poll.
- ``Polled`` is passed each time a poll has returned, after all events that came with it.
- ``Commit`` and ``PublishHeartbeats`` are sent at once. Each Commit is answered by one
  ``CommitAnswered``, also if no answer came in time. A PublishHeartbeats has no answer: a heartbeat is known
  to have arrived when it is read back. Records are produced with acks=all.
- Each ``Call…`` is answered by one ``HandlerReturned``. A partition has at most one call under way,
  partitions do not wait for each other, and the thread that polls waits for none of them.

Times (``now``) are seconds of this process's monotonic clock, which goes on while the process is stopped. A
member is not thread-safe: a caller in another thread holds the driver's lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from rebalanser.core.neli.records import Note, Stamp
from rebalanser.core.neli.roles import Role, Roles
from rebalanser.errors import FixConfiguration

Partition: TypeAlias = int


@dataclass(frozen=True, slots=True)
class LastCommit:
    """Last commit of the group for a partition; ``offset`` is None if there is none."""

    offset: int | None
    metadata: str = ""


@dataclass(frozen=True, slots=True)
class Assigned:
    """Partitions were assigned to this process; with the last commit of each, None if the request failed."""

    partitions: Mapping[Partition, LastCommit | None]


@dataclass(frozen=True, slots=True)
class Revoked:
    """The group asks for partitions back; they go to others when the callback returns."""

    partitions: frozenset[Partition]


@dataclass(frozen=True, slots=True)
class Lost:
    """Partitions are lost; another process may have them already."""

    partitions: frozenset[Partition]


@dataclass(frozen=True, slots=True)
class Polled:
    """A poll has returned, and all events that came with it were passed."""


@dataclass(frozen=True, slots=True)
class HeartbeatRead:
    """A record of an assigned partition was read.

    ``stamp`` is None for a record that has none. ``timestamp_ms`` is the record's (milliseconds since
    1970), set by the broker where ``log_append_time``. ``wall_ms`` is this process's wall clock when the
    record was read.
    """

    partition: Partition
    offset: int
    stamp: Stamp | None
    timestamp_ms: int
    log_append_time: bool
    wall_ms: float


@dataclass(frozen=True, slots=True)
class Committing:
    """One partition's part of a commit: the offset, and the note that becomes its metadata."""

    offset: int
    note: Note


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit these offsets in the group, checked by the broker against member and generation (NE-10).

    ``sent_at`` is the instant from which an accepted commit counts; it is sent no earlier.
    """

    number: int
    sent_at: float
    offsets: Mapping[Partition, Committing]


@dataclass(frozen=True, slots=True)
class CommitAnswered:
    """A commit was accepted but for ``failed``: partitions with the error, refused or without an answer.

    ``fenced``: the broker said that this process is no member any more (unknown member id, fenced
    instance id, fenced member epoch). A generation that is just changing is none of these.
    """

    commit: Commit
    failed: Mapping[Partition, str] = field(default_factory=dict)
    fenced: bool = False


@dataclass(frozen=True, slots=True)
class AskPartitionCount:
    """Ask the broker for the topic's partition count; the answer is a ``PartitionCount``.

    A request that fails has no answer.
    """

    asked_at: float


@dataclass(frozen=True, slots=True)
class PartitionCount:
    """The broker's answer to an ``AskPartitionCount``."""

    question: AskPartitionCount
    partitions: int


@dataclass(frozen=True, slots=True)
class RolesChanged:
    """The host application has changed the roles. Raises InvalidSettings if one of them is invalid."""

    roles: Roles


@dataclass(frozen=True, slots=True)
class HandlerReturned:
    """The handler that was called for a partition's roles has returned, or raised (``error``)."""

    partition: Partition
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """The host application wants to leave in order."""


@dataclass(frozen=True, slots=True)
class Wakeup:
    """``next_wakeup`` has come."""


ClientEvent: TypeAlias = Assigned | Revoked | Lost | Polled | HeartbeatRead | CommitAnswered | PartitionCount
"""Events from the Kafka client."""
HostEvent: TypeAlias = RolesChanged | HandlerReturned | Stop | Wakeup
"""Events from the host application and the clock."""
Event: TypeAlias = ClientEvent | HostEvent


@dataclass(frozen=True, slots=True)
class PublishHeartbeats:
    """Publish one empty record (null key, null value, the stamp as header) to each partition (NE-2)."""

    heartbeats: Mapping[Partition, Stamp]


@dataclass(frozen=True, slots=True)
class CallInduced:
    """Call ``on_induced``: these roles are led now, with the fencing token of their partition (NE-15)."""

    partition: Partition
    roles: frozenset[Role]
    token: int


@dataclass(frozen=True, slots=True)
class CallLapsed:
    """Call ``on_lapsed``: these roles are being handed over, in order.

    Nobody else leads them until the handlers return, or until ``limit`` (monotonic seconds) at the latest.
    """

    partition: Partition
    roles: frozenset[Role]
    token: int
    limit: float


@dataclass(frozen=True, slots=True)
class CallFenced:
    """Call ``on_fenced``: these roles are led no longer, for ``reason``; another process may lead them."""

    partition: Partition
    roles: frozenset[Role]
    token: int
    reason: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """The revoke callback may return, as far as these partitions are concerned."""

    partitions: frozenset[Partition]


@dataclass(frozen=True, slots=True)
class Leave:
    """Close the consumer: nothing is led any more, everything handed over. Nothing follows."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Close the consumer and raise ``error``: a person must change something. Leads nothing any more."""

    error: FixConfiguration


class FactKind(StrEnum):
    """Kind of a member's fact; logs, history and documentation use the same words."""

    ASSIGNED = "assigned"
    REVOKED = "revoked"
    LOST = "lost"
    SUCCEEDS = "succeeds"
    WAITS = "waits"
    INDUCED = "induced"
    LAPSED = "lapsed"
    FENCED = "fenced"
    ENDED = "ended"
    RELEASED = "released"
    COMMIT_FAILED = "commit_failed"
    CLOCK_OFF = "clock_off"
    HANDLER_FAILED = "handler_failed"
    HANDLER_OVERRAN = "handler_overran"
    FAILED = "failed"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that happened to this member, for logs, history and metrics.

    Leadership of a partition begins with INDUCED and ends with one ENDED or FENCED of the same token, after
    LAPSED if it is handed over in order. They say what the member itself would have answered, even if no
    handler could be called.
    """

    kind: FactKind
    partition: Partition | None = None
    token: int | None = None
    at: float = 0.0
    """Time of the fact (seconds of the member's clock): leadership ends by time, and is noticed later."""
    detail: Mapping[str, str | float | bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """Report a fact to the sinks; never blocks."""

    fact: Fact


Effect: TypeAlias = (
    PublishHeartbeats
    | Commit
    | AskPartitionCount
    | CallInduced
    | CallLapsed
    | CallFenced
    | LetGo
    | Leave
    | Fail
    | Report
)
