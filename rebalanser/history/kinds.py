"""Kinds of records: the meaning of each, and its step for the audit.

Each protocol has its own kinds. Those that begin, end or guard the ownership of a resource are *steps*: the
audit uses only the step, so that one set of checks serves all protocols.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from rebalanser.core.group.messages import FactKind as GroupKind
from rebalanser.core.neli.messages import FactKind as NeliKind
from rebalanser.core.shiva.messages import FactKind as ShivaKind

GAP: Final = "gap"
"""Kind, in every protocol, of a record that represents dropped ones."""


class Protocol(StrEnum):
    """Protocols that write history."""

    GROUP = "group"
    SHIVA = "shiva"
    NELI = "neli"
    SKULD = "skuld"


class HistoryStep(StrEnum):
    """Meaning of a record for the ownership of a resource or the course of a rebalance."""

    BARRIER_ADDED = "barrier_added"
    BARRIER_REMOVED = "barrier_removed"
    START_ENTERED = "start_entered"
    """Access to the resource begins."""
    START_RETURNED = "start_returned"
    STOP_ENTERED = "stop_entered"
    STOP_RETURNED = "stop_returned"
    """Access to the resource has ended."""
    STOP_FAILED = "stop_failed"
    """OnStop raised: from now on it is unknown whether access has ended."""
    ELECTED = "elected"
    """The node leads ``term``."""
    GROUP_READ = "group_read"
    PUBLISHED = "published"
    """The leader committed an allocation, ``value`` being its version."""
    ADOPTED = "adopted"
    """The node acts on the allocation ``version`` from now on."""
    ACKNOWLEDGED = "acknowledged"
    """The node's share of the allocation ``version`` is complete."""
    COMPLETED = "completed"
    """The leader saw every node complete the allocation ``value``."""
    LOAD = "load"
    """The application reports the load ``value`` of the resource."""
    UPDATED = "updated"
    """The update numbered ``value`` of the claim ``token`` was accepted."""
    FINISHED = "finished"
    """The task is complete for good."""


class SkuldKind(StrEnum):
    """Kinds of Skuld's records."""

    CLAIMED = "claimed"
    CLAIM_RENEWED = "claim_renewed"
    UPDATED = "updated"
    COMPLETED = "completed"
    CLAIM_ENDED = "claim_ended"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class KindNote:
    """Meaning of a kind of record, and the keys that its ``detail`` may have."""

    meaning: str
    detail: tuple[str, ...] = ()
    step: HistoryStep | None = None


_GAP_NOTE: Final = KindNote(
    "records were dropped here, this one's `sequence` being the first of them",
    ("dropped", "first", "last", "reason"),
)

_GROUP: Final[Mapping[str, KindNote]] = MappingProxyType(
    {
        GroupKind.JOINING: KindNote("the node asks for a lease and registers"),
        GroupKind.JOINED: KindNote("it is registered; `revision` created its node key"),
        GroupKind.JOIN_FAILED: KindNote(
            "registering failed; it is tried again unless `fatal`", ("error", "fatal")
        ),
        GroupKind.ISOLATED: KindNote(
            "life was not proven for so long that access must end now", ("last_proof_s",)
        ),
        GroupKind.RECONNECTED: KindNote("life is proven again, the lease never ended"),
        GroupKind.SESSION_LOST: KindNote("the lease has ended; the node joins again as a new incarnation"),
        GroupKind.LEAVING: KindNote("the node stops access in order to leave"),
        GroupKind.LAPSING: KindNote(
            "OnStop raised: the barriers are left to end with the lease, not removed", ("resources",)
        ),
        GroupKind.LEFT: KindNote("the node is out of the group"),
        GroupKind.ELECTED: KindNote(
            "this node leads `term`, which began at `revision`", step=HistoryStep.ELECTED
        ),
        GroupKind.FOLLOWS: KindNote("another node leads `term`", ("leader",)),
        GroupKind.DEPOSED: KindNote("this node led and leads no more"),
        GroupKind.RESIGNED: KindNote(
            "this node gave up `term` at `revision`, after it could not read the group or publish"
        ),
        GroupKind.GROUP_READ: KindNote(
            "the leader brought its view of the group up to `revision`",
            ("members", "resources"),
            step=HistoryStep.GROUP_READ,
        ),
        GroupKind.ALLOCATION_PUBLISHED: KindNote(
            "the leader committed an allocation at `revision`",
            ("published_version", "moves", "least_moves", "nodes", "resources"),
            step=HistoryStep.PUBLISHED,
        ),
        GroupKind.REBALANCE_COMPLETED: KindNote(
            "the leader saw every live node complete its share",
            ("completed_version",),
            step=HistoryStep.COMPLETED,
        ),
        GroupKind.ALLOCATION_ADOPTED: KindNote(
            "the node acts on a new share from now on",
            ("share_version", "resources"),
            step=HistoryStep.ADOPTED,
        ),
        GroupKind.BARRIER_ADDED: KindNote(
            "the node holds the barrier of `resource`, with `token`", step=HistoryStep.BARRIER_ADDED
        ),
        GroupKind.BARRIER_BLOCKED: KindNote(
            "another node still holds the barrier of `resource`", ("holder",)
        ),
        GroupKind.BARRIER_REMOVED: KindNote(
            "the node gave up the barrier of `resource`, `value` seconds after it had asked for that",
            step=HistoryStep.BARRIER_REMOVED,
        ),
        GroupKind.ACKNOWLEDGED: KindNote(
            "the node told the group that its share is complete",
            ("share_version",),
            step=HistoryStep.ACKNOWLEDGED,
        ),
        GroupKind.START_ENTERED: KindNote(
            "OnStart is entered: access to `resource` begins, with `token`", step=HistoryStep.START_ENTERED
        ),
        GroupKind.START_RETURNED: KindNote("OnStart returned", step=HistoryStep.START_RETURNED),
        GroupKind.START_FAILED: KindNote("OnStart raised; OnStop follows and the node leaves", ("error",)),
        GroupKind.START_REFUSED: KindNote("OnStart was not entered, because it was too late for it"),
        GroupKind.STOP_ENTERED: KindNote(
            "OnStop is entered; access to `resource` goes on until it returns", step=HistoryStep.STOP_ENTERED
        ),
        GroupKind.STOP_RETURNED: KindNote(
            "OnStop returned: access to `resource` has ended", step=HistoryStep.STOP_RETURNED
        ),
        GroupKind.STOP_FAILED: KindNote(
            "OnStop raised; access to `resource` is taken as not ended", ("error",), HistoryStep.STOP_FAILED
        ),
        GroupKind.HANDLER_OVERRAN: KindNote(
            "a handler still runs after its limit; its barriers stay held", ("handler", "limit_s")
        ),
        GroupKind.COMMAND_FAILED: KindNote(
            "a request to the registry failed, or (`unknown`) may have worked",
            ("command", "error", "unknown"),
        ),
        GroupKind.RELEASED: KindNote(
            "the application gave `resource` up, for `value` seconds; without a `value` until it asks for it"
        ),
        GroupKind.LOAD_REPORTED: KindNote(
            "the application reported `value` as the load of `resource`", step=HistoryStep.LOAD
        ),
        GroupKind.LOOP_SLOW: KindNote(
            "handling `cause` took the loop `value` seconds, `cpu_s` of them on the processor",
            ("cause", "cpu_s", "limit_s"),
        ),
        GroupKind.UNREADABLE: KindNote(
            "the leader leaves `value` keys alone that it can't read; `why` tells of the first", ("why",)
        ),
        GroupKind.WORKER_FAILED: KindNote(
            "the worker of `resource` raised; it is called again after a pause",
            ("error", "raised_at", "attempt"),
        ),
        GroupKind.WORKER_RETURNED: KindNote(
            "the worker of `resource` returned though the node owns it; it is called again after a pause",
            ("attempt",),
        ),
        GroupKind.ENGINE_FAILED: KindNote(
            "a fault of Rebalanser itself: access ends, and the lease ends by itself", ("error",)
        ),
        GroupKind.UNSAFE_REGISTRY: KindNote(
            "the node starts on a registry that is known to weaken a promise", ("reason",)
        ),
        GAP: _GAP_NOTE,
    }
)

_SHIVA: Final[Mapping[str, KindNote]] = MappingProxyType(
    {
        ShivaKind.TOOK_OVER: KindNote(
            "this leader leads `term`, the offset of its announcement on COMMAND",
            ("term",),
            HistoryStep.ELECTED,
        ),
        ShivaKind.STEPPED_DOWN: KindNote("this leader leads no more", ("term", "reason")),
        ShivaKind.WORKER_ADDED: KindNote(
            "the leader counts `worker` in", ("worker", "host", "lineage", "incarnation")
        ),
        ShivaKind.WORKER_STALLED: KindNote(
            "`worker` answers and does not follow the assignment", ("worker", "seen", "published")
        ),
        ShivaKind.WORKER_REMOVED: KindNote("the leader counts `worker` out", ("worker", "reason")),
        ShivaKind.WORKER_REFUSED: KindNote("a worker of that name is refused", ("worker", "host", "reason")),
        ShivaKind.WORKER_CORDONED: KindNote(
            "an operator cordoned or drained `worker`", ("worker", "command", "cordon")
        ),
        ShivaKind.WORKER_UNCORDONED: KindNote(
            "`worker` is no longer cordoned or drained", ("worker", "command", "cordon")
        ),
        ShivaKind.START_COMMANDED: KindNote("the start of `resource` was commanded", ("command", "offset")),
        ShivaKind.STOP_COMMANDED: KindNote("the stop of `resource` was commanded", ("command",)),
        ShivaKind.SCALE_COMMANDED: KindNote(
            "another number of replicas of `resource` was commanded", ("command", "replicas")
        ),
        ShivaKind.COMMAND_REFUSED: KindNote("a command was refused", ("command", "reason")),
        ShivaKind.RECORD_SET_ASIDE: KindNote(
            "a record of the log made no sense", ("offset", "key", "reason")
        ),
        ShivaKind.DOCUMENT_PUBLISHED: KindNote(
            "the leader published an assignment; `value` and `version` are its offset on COMMAND",
            ("epoch", "offset", "nodes", "resources"),
            HistoryStep.PUBLISHED,
        ),
        ShivaKind.COMMANDS_KEPT: KindNote(
            "commands were written again before they aged out", ("applications",)
        ),
        ShivaKind.DOCUMENT_ADOPTED: KindNote(
            "the worker acts on the assignment `version` from now on, which is its offset on COMMAND",
            ("epoch", "offset", "applications"),
            HistoryStep.ADOPTED,
        ),
        ShivaKind.DOCUMENT_REFUSED: KindNote(
            "the worker refused an assignment", ("epoch", "leader", "offset", "reason")
        ),
        ShivaKind.FILES_STORED: KindNote("the worker has the files of `resource`", ("command",)),
        ShivaKind.FILES_REFUSED: KindNote("the files of `resource` are unusable", ("command", "reason")),
        ShivaKind.PROCESS_STARTING: KindNote(
            "the process of `resource` is about to run: access begins, with `token`",
            ("run", "mode"),
            HistoryStep.START_ENTERED,
        ),
        ShivaKind.PROCESS_STARTED: KindNote(
            "the process of `resource` runs", ("run",), HistoryStep.START_RETURNED
        ),
        ShivaKind.PROCESS_STOPPING: KindNote(
            "the process of `resource` is told to end", ("run", "reason"), HistoryStep.STOP_ENTERED
        ),
        ShivaKind.PROCESS_EXITED: KindNote(
            "the process of `resource` has ended, and access with it",
            ("run", "code", "error", "told"),
            HistoryStep.STOP_RETURNED,
        ),
        ShivaKind.APPLICATION_FAILED: KindNote("`resource` is not tried again here", ("reason",)),
        ShivaKind.LEADER_SILENT: KindNote("the worker hears no leader", ("term",)),
        ShivaKind.LEADER_HEARD: KindNote("the worker hears the leader of `term`", ("leader", "term")),
        ShivaKind.LEFT: KindNote("the worker has left the cluster"),
        GAP: _GAP_NOTE,
    }
)

_NELI: Final[Mapping[str, KindNote]] = MappingProxyType(
    {
        NeliKind.ASSIGNED: KindNote("the broker assigned the partition `resource`", ("tenure",)),
        NeliKind.REVOKED: KindNote("the broker takes the partition `resource` away"),
        NeliKind.LOST: KindNote("partitions were lost", ("reason", "partitions")),
        NeliKind.SUCCEEDS: KindNote("the predecessor's last record was read"),
        NeliKind.WAITS: KindNote("the member waits until its predecessor's leadership has ended"),
        NeliKind.INDUCED: KindNote(
            "this member leads the roles of the partition `resource`, with `token`",
            ("roles", "late_s"),
            HistoryStep.START_ENTERED,
        ),
        NeliKind.LAPSED: KindNote(
            "leadership is handed over: the handlers are told to end their work",
            step=HistoryStep.STOP_ENTERED,
        ),
        NeliKind.FENCED: KindNote(
            "leadership has ended out of order; the record's times are those of its end, and were written "
            "`late_s` seconds later where it ended by time alone",
            ("reason", "late_s"),
            HistoryStep.STOP_RETURNED,
        ),
        NeliKind.ENDED: KindNote(
            "the handlers have ended their work, and leadership has ended with it",
            step=HistoryStep.STOP_RETURNED,
        ),
        NeliKind.RELEASED: KindNote("the successor was told that it need not wait"),
        NeliKind.COMMIT_FAILED: KindNote("an offset commit was refused or lost", ("error", "fenced")),
        NeliKind.CLOCK_OFF: KindNote("a clock is behind the broker's", ("behind_s",)),
        NeliKind.HANDLER_FAILED: KindNote("a handler raised", ("error",)),
        NeliKind.HANDLER_OVERRAN: KindNote("a handler still runs after its limit"),
        NeliKind.FAILED: KindNote("the member can't go on", ("error",)),
        NeliKind.LEFT: KindNote("the member has left"),
        GAP: _GAP_NOTE,
    }
)

_SKULD: Final[Mapping[str, KindNote]] = MappingProxyType(
    {
        SkuldKind.CLAIMED: KindNote(
            "a worker holds the claim numbered `value` of the task `resource`, with `token`",
            step=HistoryStep.START_ENTERED,
        ),
        SkuldKind.CLAIM_RENEWED: KindNote("the claim lasts longer"),
        SkuldKind.UPDATED: KindNote(
            "the update numbered `value` of the claim `token` was accepted", step=HistoryStep.UPDATED
        ),
        SkuldKind.COMPLETED: KindNote("the task is complete for good", step=HistoryStep.FINISHED),
        SkuldKind.CLAIM_ENDED: KindNote(
            "the worker acts on the claim no more", step=HistoryStep.STOP_RETURNED
        ),
        SkuldKind.FENCED: KindNote("a write of a superseded claim was refused"),
        GAP: _GAP_NOTE,
    }
)

KINDS: Final[Mapping[Protocol, Mapping[str, KindNote]]] = MappingProxyType(
    {Protocol.GROUP: _GROUP, Protocol.SHIVA: _SHIVA, Protocol.NELI: _NELI, Protocol.SKULD: _SKULD}
)
"""Every kind that each protocol writes."""
