"""Kinds of records, with the meaning and the step of each.

Each protocol has its own kinds. Kinds that begin, end or guard the ownership of a resource also have a
*step*. The audit reads the steps, so that one set of checks works for all protocols.
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
"""Kind of a record that replaces dropped records, in every protocol."""


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
    """OnStop raised; it is unknown whether access has ended."""
    ELECTED = "elected"
    """The node leads ``term``."""
    GROUP_READ = "group_read"
    PUBLISHED = "published"
    """The leader committed the allocation whose version is ``value``."""
    ADOPTED = "adopted"
    """The node starts to act on the allocation ``version``."""
    ACKNOWLEDGED = "acknowledged"
    """The node's share of the allocation ``version`` is complete."""
    COMPLETED = "completed"
    """The leader saw every node complete the allocation ``value``."""
    LOAD = "load"
    """The application reports the load ``value`` of the resource."""
    UPDATED = "updated"
    """The update numbered ``value`` of the claim ``token`` was accepted."""
    FINISHED = "finished"
    """The task is complete."""


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
    """Meaning of a kind of record, and the possible keys of its ``detail``."""

    meaning: str
    detail: tuple[str, ...] = ()
    step: HistoryStep | None = None


_GAP_NOTE: Final = KindNote(
    "records were dropped here; `sequence` is the number of the first",
    ("dropped", "first", "last", "reason"),
)

_GROUP: Final[Mapping[str, KindNote]] = MappingProxyType(
    {
        GroupKind.JOINING: KindNote("the node asks for a lease and registers"),
        GroupKind.JOINED: KindNote(
            "the node is registered; `revision` created its node key", ("capacity", "tags", "zone")
        ),
        GroupKind.JOIN_FAILED: KindNote(
            "the registration failed; it is retried unless `fatal`", ("error", "fatal")
        ),
        GroupKind.ISOLATED: KindNote("proof of life is overdue: access must end now", ("last_proof_s",)),
        GroupKind.RECONNECTED: KindNote("life is proven again; the lease did not end meanwhile"),
        GroupKind.SESSION_LOST: KindNote("the lease has ended; the node joins again as a new incarnation"),
        GroupKind.LEAVING: KindNote("the node ends all access and will leave"),
        GroupKind.LAPSING: KindNote("OnStop raised: the barriers stay until the lease ends", ("resources",)),
        GroupKind.LEFT: KindNote("the node has left the group"),
        GroupKind.ELECTED: KindNote(
            "this node leads `term`, which began at `revision`", step=HistoryStep.ELECTED
        ),
        GroupKind.FOLLOWS: KindNote("another node leads `term`", ("leader",)),
        GroupKind.DEPOSED: KindNote("this node is no longer the leader"),
        GroupKind.RESIGNED: KindNote(
            "the leader gave up `term` at `revision` because it could not read the group or publish"
        ),
        GroupKind.GROUP_READ: KindNote(
            "the leader read the group up to `revision`",
            ("members", "resources"),
            step=HistoryStep.GROUP_READ,
        ),
        GroupKind.ALLOCATION_PUBLISHED: KindNote(
            "the leader committed an allocation at `revision`",
            ("published_version", "moves", "least_moves", "nodes", "resources"),
            step=HistoryStep.PUBLISHED,
        ),
        GroupKind.REBALANCE_COMPLETED: KindNote(
            "every live node has acknowledged its share", ("completed_version",), step=HistoryStep.COMPLETED
        ),
        GroupKind.ALLOCATION_ADOPTED: KindNote(
            "the node starts to act on a new share", ("share_version", "resources"), step=HistoryStep.ADOPTED
        ),
        GroupKind.BARRIER_ADDED: KindNote(
            "the node holds the barrier of `resource`, with `token`", step=HistoryStep.BARRIER_ADDED
        ),
        GroupKind.BARRIER_BLOCKED: KindNote(
            "another node still holds the barrier of `resource`", ("holder",)
        ),
        GroupKind.BARRIER_REMOVED: KindNote(
            "the node no longer holds the barrier of `resource`; `value` seconds since it asked for the "
            "removal",
            step=HistoryStep.BARRIER_REMOVED,
        ),
        GroupKind.ACKNOWLEDGED: KindNote(
            "the node reported that its share is complete", ("share_version",), step=HistoryStep.ACKNOWLEDGED
        ),
        GroupKind.START_ENTERED: KindNote(
            "OnStart is called: access to `resource` begins, with `token`", step=HistoryStep.START_ENTERED
        ),
        GroupKind.START_RETURNED: KindNote("OnStart returned", step=HistoryStep.START_RETURNED),
        GroupKind.START_FAILED: KindNote("OnStart raised; OnStop follows and the node leaves", ("error",)),
        GroupKind.START_REFUSED: KindNote(
            "OnStart was not called: the node was no longer allowed to begin access"
        ),
        GroupKind.STOP_ENTERED: KindNote(
            "OnStop is called; access to `resource` ends when it returns", step=HistoryStep.STOP_ENTERED
        ),
        GroupKind.STOP_RETURNED: KindNote(
            "OnStop returned: access to `resource` has ended", step=HistoryStep.STOP_RETURNED
        ),
        GroupKind.STOP_FAILED: KindNote(
            "OnStop raised; access to `resource` is assumed to continue", ("error",), HistoryStep.STOP_FAILED
        ),
        GroupKind.HANDLER_OVERRAN: KindNote(
            "a handler exceeded its time limit and still runs; the node keeps its barriers",
            ("handler", "limit_s"),
        ),
        GroupKind.COMMAND_FAILED: KindNote(
            "a request to the registry failed; if `unknown`, it may have taken effect",
            ("command", "error", "unknown"),
        ),
        GroupKind.RELEASED: KindNote(
            "the application released `resource` for `value` seconds, or until it reclaims it if there "
            "is no `value`"
        ),
        GroupKind.LOAD_REPORTED: KindNote(
            "the application reported the load `value` of `resource`", step=HistoryStep.LOAD
        ),
        GroupKind.LOOP_SLOW: KindNote(
            "the event loop was busy with `cause` for `value` seconds, `cpu_s` of them CPU time",
            ("cause", "cpu_s", "limit_s"),
        ),
        GroupKind.UNREADABLE: KindNote(
            "the leader skips `value` keys that it can't decode; `why` is the error of the first", ("why",)
        ),
        GroupKind.WORKER_FAILED: KindNote(
            "the worker function of `resource` raised; it is called again after a delay",
            ("error", "raised_at", "attempt"),
        ),
        GroupKind.WORKER_RETURNED: KindNote(
            "the worker function of `resource` returned while the node still owns it; it is called again "
            "after a delay",
            ("attempt",),
        ),
        GroupKind.ENGINE_FAILED: KindNote(
            "an error in Rebalanser itself: the node ends all access and lets its lease expire", ("error",)
        ),
        GroupKind.UNSAFE_REGISTRY: KindNote(
            "the registry has a known bug or setting that weakens a guarantee", ("reason",)
        ),
        GAP: _GAP_NOTE,
    }
)

_SHIVA: Final[Mapping[str, KindNote]] = MappingProxyType(
    {
        ShivaKind.TOOK_OVER: KindNote(
            "this leader leads `term`, which is the offset of its announcement on COMMAND",
            ("term",),
            HistoryStep.ELECTED,
        ),
        ShivaKind.STEPPED_DOWN: KindNote("this process is no longer the leader", ("term", "reason")),
        ShivaKind.WORKER_ADDED: KindNote(
            "the leader added `worker` to the cluster", ("worker", "host", "lineage", "incarnation")
        ),
        ShivaKind.WORKER_STALLED: KindNote(
            "`worker` answers pings but does not adopt the assignment", ("worker", "seen", "published")
        ),
        ShivaKind.WORKER_REMOVED: KindNote(
            "the leader removed `worker` from the cluster", ("worker", "reason")
        ),
        ShivaKind.WORKER_REFUSED: KindNote(
            "two processes with different data folders use one worker name; the leader refuses one of them",
            ("worker", "host", "reason"),
        ),
        ShivaKind.WORKER_CORDONED: KindNote(
            "an operator cordoned or drained `worker`", ("worker", "command", "cordon")
        ),
        ShivaKind.WORKER_UNCORDONED: KindNote(
            "`worker` is no longer cordoned or drained", ("worker", "command", "cordon")
        ),
        ShivaKind.START_COMMANDED: KindNote("the start of `resource` was commanded", ("command", "offset")),
        ShivaKind.STOP_COMMANDED: KindNote("the stop of `resource` was commanded", ("command",)),
        ShivaKind.SCALE_COMMANDED: KindNote(
            "a change of the number of replicas of `resource` was commanded", ("command", "replicas")
        ),
        ShivaKind.COMMAND_REFUSED: KindNote("a command was refused", ("command", "reason")),
        ShivaKind.RECORD_SET_ASIDE: KindNote("an invalid record was skipped", ("offset", "key", "reason")),
        ShivaKind.DOCUMENT_PUBLISHED: KindNote(
            "the leader published an assignment; `value` and `version` are its offset on COMMAND",
            ("epoch", "offset", "nodes", "resources"),
            HistoryStep.PUBLISHED,
        ),
        ShivaKind.COMMANDS_KEPT: KindNote(
            "the leader rewrote commands before Kafka's retention deleted them", ("applications",)
        ),
        ShivaKind.DOCUMENT_ADOPTED: KindNote(
            "the worker starts to act on the assignment `version`, which is its offset on COMMAND",
            ("epoch", "offset", "applications"),
            HistoryStep.ADOPTED,
        ),
        ShivaKind.DOCUMENT_REFUSED: KindNote(
            "the worker refused an assignment", ("epoch", "leader", "offset", "reason")
        ),
        ShivaKind.FILES_STORED: KindNote("the worker stored the files of `resource`", ("command",)),
        ShivaKind.FILES_REFUSED: KindNote(
            "the worker refused the files of `resource`", ("command", "reason")
        ),
        ShivaKind.PROCESS_STARTING: KindNote(
            "the process of `resource` is being started: access begins, with `token`",
            ("run", "mode"),
            HistoryStep.START_ENTERED,
        ),
        ShivaKind.PROCESS_STARTED: KindNote(
            "the process of `resource` is running", ("run",), HistoryStep.START_RETURNED
        ),
        ShivaKind.PROCESS_STOPPING: KindNote(
            "the process of `resource` is being stopped", ("run", "reason"), HistoryStep.STOP_ENTERED
        ),
        ShivaKind.PROCESS_EXITED: KindNote(
            "the process of `resource` has exited: access has ended",
            ("run", "code", "error", "told"),
            HistoryStep.STOP_RETURNED,
        ),
        ShivaKind.APPLICATION_FAILED: KindNote(
            "`resource` failed; this worker does not restart it", ("reason",)
        ),
        ShivaKind.LEADER_SILENT: KindNote("the worker receives no pings of a leader", ("term",)),
        ShivaKind.LEADER_HEARD: KindNote(
            "the worker receives pings of the leader of `term`", ("leader", "term")
        ),
        ShivaKind.LEFT: KindNote("the worker has left the cluster"),
        GAP: _GAP_NOTE,
    }
)

_NELI: Final[Mapping[str, KindNote]] = MappingProxyType(
    {
        NeliKind.ASSIGNED: KindNote("the broker assigned the partition `resource`", ("tenure",)),
        NeliKind.REVOKED: KindNote("the broker revoked the partition `resource`"),
        NeliKind.LOST: KindNote("the member lost `partitions`", ("reason", "partitions")),
        NeliKind.SUCCEEDS: KindNote("the predecessor's last record was read"),
        NeliKind.WAITS: KindNote("the member waits until its predecessor's leadership has ended"),
        NeliKind.INDUCED: KindNote(
            "this member leads the roles of the partition `resource`, with `token`",
            ("roles", "late_s"),
            HistoryStep.START_ENTERED,
        ),
        NeliKind.LAPSED: KindNote(
            "the handover of leadership began: the handlers were asked to end their work",
            step=HistoryStep.STOP_ENTERED,
        ),
        NeliKind.FENCED: KindNote(
            "leadership has ended out of order; the times are those of its end. If it expired, the record "
            "was written `late_s` seconds later",
            ("reason", "late_s"),
            HistoryStep.STOP_RETURNED,
        ),
        NeliKind.ENDED: KindNote(
            "the handlers have ended their work: leadership has ended", step=HistoryStep.STOP_RETURNED
        ),
        NeliKind.RELEASED: KindNote("the member notified its successor that it need not wait"),
        NeliKind.COMMIT_FAILED: KindNote("an offset commit failed", ("error", "fenced")),
        NeliKind.CLOCK_OFF: KindNote("a clock is behind the broker's", ("behind_s",)),
        NeliKind.HANDLER_FAILED: KindNote("a handler raised", ("error",)),
        NeliKind.HANDLER_OVERRAN: KindNote("a handler exceeded its time limit and still runs"),
        NeliKind.FAILED: KindNote("the member stopped on an error that a retry can't fix", ("error",)),
        NeliKind.LEFT: KindNote("the member has left the consumer group"),
        GAP: _GAP_NOTE,
    }
)

_SKULD: Final[Mapping[str, KindNote]] = MappingProxyType(
    {
        SkuldKind.CLAIMED: KindNote(
            "a worker holds the claim numbered `value` of the task `resource`, with `token`",
            step=HistoryStep.START_ENTERED,
        ),
        SkuldKind.CLAIM_RENEWED: KindNote("the claim was renewed"),
        SkuldKind.UPDATED: KindNote(
            "the update numbered `value` of the claim `token` was accepted", step=HistoryStep.UPDATED
        ),
        SkuldKind.COMPLETED: KindNote("the task is complete", step=HistoryStep.FINISHED),
        SkuldKind.CLAIM_ENDED: KindNote(
            "the worker no longer acts on the claim", step=HistoryStep.STOP_RETURNED
        ),
        SkuldKind.FENCED: KindNote("a write of a superseded claim was refused"),
        GAP: _GAP_NOTE,
    }
)

KINDS: Final[Mapping[Protocol, Mapping[str, KindNote]]] = MappingProxyType(
    {Protocol.GROUP: _GROUP, Protocol.SHIVA: _SHIVA, Protocol.NELI: _NELI, Protocol.SKULD: _SKULD}
)
"""Every kind that each protocol writes."""
