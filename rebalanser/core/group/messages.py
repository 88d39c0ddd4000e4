"""The input and output of a node: events, commands with their outcomes, and the other effects.

**The ordering contract.** Effects are carried out in the order of the list. A command is sent after every
earlier effect of the list is done. Each ``Perform`` is answered by exactly one ``Answered``, in
any order between lanes; a node has at most one command under way in each lane. Each ``CallStart`` and
``CallStop`` is answered by exactly one ``HandlerReturned``; a node has at most one under way. A
``Guard`` must be in force before a later ``CallStart`` of the same list enters the handler.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar, NamedTuple, TypeAlias

from rebalanser.core.group.types import (
    Fingerprint,
    Group,
    Header,
    Leadership,
    Member,
    NodeId,
    Plan,
    PlanBasis,
    Resource,
    Session,
    Share,
    Token,
    Topic,
    TopicKind,
    record,
)


class Lane(StrEnum):
    """Commands of one lane follow each other; lanes never wait for each other."""

    HEARTBEAT = "heartbeat"
    MEMBER = "member"
    LEADER = "leader"


@dataclass(frozen=True, slots=True)
class Join:
    """Register ``member`` under a new lease. Idempotent by the node id (RB-4)."""

    lane: ClassVar[Lane] = Lane.MEMBER
    member: Member
    lease_ttl_s: float


@record
class Heartbeat:
    """Renew the lease, then prove that it lives, and read the revisions of what this node waits for."""

    lane: ClassVar[Lane] = Lane.HEARTBEAT
    session: Session
    leader: NodeId | None = None
    """The leader that the node follows, to see whether it is alive."""
    blockers: frozenset[NodeId] = frozenset()
    """The holders of barriers that the node waits for, to see whether they have removed any."""
    read_fingerprint: bool = False
    """True to read the group's fingerprint too, as its leader."""


@dataclass(frozen=True, slots=True)
class ReadShare:
    """Read the allocation's header, this node's share, and who leads; delete its earlier shares."""

    lane: ClassVar[Lane] = Lane.MEMBER
    session: Session


@dataclass(frozen=True, slots=True)
class ReadBarriers:
    """Find out which of these barriers are this session's, after an unknown outcome."""

    lane: ClassVar[Lane] = Lane.MEMBER
    session: Session
    resources: frozenset[Resource]


@dataclass(frozen=True, slots=True)
class AddBarriers:
    """Add barriers, each one only if absent, the own node key alive, and the own share the one that was read.

    ``version`` and ``revision`` are the share's.
    """

    lane: ClassVar[Lane] = Lane.MEMBER
    session: Session
    version: int
    revision: int
    resources: frozenset[Resource]


@dataclass(frozen=True, slots=True)
class RemoveBarriers:
    """Remove barriers, each one only if still this session's (RB-15), and tell who waits for them."""

    lane: ClassVar[Lane] = Lane.MEMBER
    session: Session
    barriers: Mapping[Resource, Token]


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the group that this node has completed its share of this version (RB-19).

    Written only over what this node last knew to stand there, put at revision ``replaces``, so that a late
    acknowledgement of an older version can't take the place of a newer one.
    """

    lane: ClassVar[Lane] = Lane.MEMBER
    session: Session
    version: int
    replaces: int


@dataclass(frozen=True, slots=True)
class RecordReleases:
    """Rewrite this node's record: ``member`` names the resources that it has released.

    Written only over the record that was put at revision ``replaces``, so that a late rewrite can't take the
    place of a newer one.
    """

    lane: ClassVar[Lane] = Lane.MEMBER
    session: Session
    member: Member
    replaces: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Revoke the lease, and the node with it. Only ever sent once nothing is accessed (RB-26)."""

    lane: ClassVar[Lane] = Lane.MEMBER
    session: Session


@dataclass(frozen=True, slots=True)
class Campaign:
    """Find out who leads and, if nobody alive does, increment the term (RB-5)."""

    lane: ClassVar[Lane] = Lane.LEADER
    session: Session


@dataclass(frozen=True, slots=True)
class Resign:
    """Leave the term without a leader, so that any node may take the next one (RB-43)."""

    lane: ClassVar[Lane] = Lane.LEADER
    session: Session
    leadership: Leadership
    error: str
    """The latest error of the leader, shown to readers of the group."""


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """Read the group at one revision, as its leader (RB-9): what changed since it is ``known``, else all."""

    lane: ClassVar[Lane] = Lane.LEADER
    session: Session
    leadership: Leadership
    known: Group | None = None
    reread_shares: bool = False
    """True to read all shares again: a publication of unknown outcome may have written some."""
    reread_acknowledgements: bool = False
    """True to read acknowledgements again: watches may not have reported some."""
    acknowledged_until: int = 0
    """The revision up to which the known group has all acknowledgements: only later ones are read again."""
    keys: frozenset[str] = frozenset()
    """Keys that watches reported: they are read in any case."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Write the changed shares, then commit them by the header.

    All is guarded by the term (RB-6), and shares and header by the allocation that the plan is based on.
    """

    lane: ClassVar[Lane] = Lane.LEADER
    session: Session
    leadership: Leadership
    plan: Plan


Command: TypeAlias = (
    Join
    | Heartbeat
    | ReadShare
    | ReadBarriers
    | AddBarriers
    | RemoveBarriers
    | Acknowledge
    | RecordReleases
    | Leave
    | Campaign
    | Resign
    | ReadGroup
    | Publish
)


@dataclass(frozen=True, slots=True)
class Failed:
    """The command had no effect, or (``unknown``) may have had one, now or a little later."""

    error: str
    unknown: bool = False
    fatal: bool = False
    """Trying again cannot help until a person changes something."""


@dataclass(frozen=True, slots=True)
class SessionLost:
    """A linearizable transaction saw that this session's node key is gone (RB-22)."""


@dataclass(frozen=True, slots=True)
class Deposed:
    """A linearizable transaction saw a term other than this leader's (RB-6).

    A leader that repeats a ``Resign`` whose answer was lost learns so that it took effect. To
    ``ReadGroup`` and ``Publish`` it is the answer of a fence: as long as the term key changes only
    by the commands of nodes, a leader sends neither after its term. It must not go on leading where somebody
    else wrote the key, as a restored backup does.
    """


@dataclass(frozen=True, slots=True)
class Joined:
    """Registered. ``proven_at`` is the instant just before the lease was asked for."""

    session: Session
    proven_at: float


@record
class Alive:
    """The own node key was seen at its create revision.

    ``proven_at`` is the instant just before the keep-alive was sent that this proves to have taken effect.
    The rest is what was read with it, so that a lost wake-up is made good within a heartbeat.
    """

    proven_at: float
    revision: int
    share_revision: int = 0
    """The revision at which a share of this node was written last."""
    header_revision: int = 0
    leadership_revision: int = 0
    leader_alive: bool = True
    removals: Mapping[NodeId, int] = field(default_factory=dict)
    """The revision at which each blocker removed barriers last; 0 for one that is gone."""
    fingerprint: Fingerprint | None = None


@dataclass(frozen=True, slots=True)
class ShareRead:
    """The allocation as far as it concerns this node; ``share`` is None before it was thought of."""

    revision: int
    header: Header | None
    share: Share | None
    leadership: Leadership | None
    pending: bool = False
    """True if a later share of this node is stored, which may be committed yet."""


@dataclass(frozen=True, slots=True)
class BarriersRead:
    """The barriers among those asked for that are this session's."""

    mine: Mapping[Resource, Token]


@dataclass(frozen=True, slots=True)
class BarriersAdded:
    """Barriers added, and holders of the others. ``superseded``: the node has another share meanwhile.

    A barrier in neither was not tried, because of that or since a request failed.
    """

    revision: int
    """No later than the revision at which this was read of the first barrier."""
    added: Mapping[Resource, Token]
    blocked: Mapping[Resource, NodeId]
    superseded: bool = False
    unknown: frozenset[Resource] = frozenset()
    """Barriers that a request without an answer may have added, now or a little later."""


@dataclass(frozen=True, slots=True)
class BarriersRemoved:
    """None of these barriers is this session's any more."""

    resources: frozenset[Resource]
    revision: int
    """The revision at which this was known of the last barrier."""
    removed_at: Mapping[Resource, int] = field(default_factory=dict)
    """The revision at which this command removed a barrier; without those that it found gone (RB-15)."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The acknowledgement that is stored now, this or an earlier one, and the revision that put it."""

    version: int
    revision: int


@dataclass(frozen=True, slots=True)
class ReleasesRecorded:
    """The resources that this node's record names as released, and the revision that put it."""

    resources: frozenset[Resource]
    revision: int


@dataclass(frozen=True, slots=True)
class Left:
    """The node and its lease are gone."""


@dataclass(frozen=True, slots=True)
class Elected:
    """This node leads the term."""

    leadership: Leadership


@dataclass(frozen=True, slots=True)
class Follows:
    """Another node leads the term, or none does; seen at ``revision``."""

    leadership: Leadership
    revision: int


@dataclass(frozen=True, slots=True)
class Resigned:
    """The term has no leader any more; ``leadership`` says so."""

    leadership: Leadership


@dataclass(frozen=True, slots=True)
class GroupRead:
    """All of the group at one revision.

    ``read`` has the keys and the prefixes that were read for it, each at its revision; None if all were.
    Changes of other keys may not be in the group yet.
    """

    group: Group
    read: Mapping[str, int] | None = None
    changed: frozenset[Resource] | None = None
    """The resources that may differ from those of the known group; None if any may, or the policy does."""


@dataclass(frozen=True, slots=True)
class Published:
    """The plan is committed, and ``shares`` are the changed ones as they are stored."""

    header: Header
    shares: Mapping[NodeId, Share] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Conflict:
    """The allocation that the plan was based on is not the latest: read the group again."""


Outcome: TypeAlias = (
    Failed
    | SessionLost
    | Deposed
    | Joined
    | Alive
    | ShareRead
    | BarriersRead
    | BarriersAdded
    | BarriersRemoved
    | Acknowledged
    | ReleasesRecorded
    | Left
    | Elected
    | Follows
    | Resigned
    | GroupRead
    | Published
    | Conflict
)

OUTCOMES: Mapping[type[Command], frozenset[type[Outcome]]] = MappingProxyType(
    {
        Join: frozenset({Joined, Failed}),
        Heartbeat: frozenset({Alive, SessionLost, Failed}),
        ReadShare: frozenset({ShareRead, SessionLost, Failed}),
        ReadBarriers: frozenset({BarriersRead, SessionLost, Failed}),
        AddBarriers: frozenset({BarriersAdded, SessionLost, Failed}),
        RemoveBarriers: frozenset({BarriersRemoved, SessionLost, Failed}),
        Acknowledge: frozenset({Acknowledged, SessionLost, Failed}),
        RecordReleases: frozenset({ReleasesRecorded, SessionLost, Failed}),
        Leave: frozenset({Left, Failed}),
        Campaign: frozenset({Elected, Follows, SessionLost, Failed}),
        Resign: frozenset({Resigned, Deposed, SessionLost, Failed}),
        ReadGroup: frozenset({GroupRead, Deposed, SessionLost, Failed}),
        Publish: frozenset({Published, Conflict, Deposed, SessionLost, Failed}),
    }
)
"""The outcomes that each command may have."""


@dataclass(frozen=True, slots=True)
class Start:
    """The host application wants to take part."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The host application wants a graceful stop (RB-26)."""


@dataclass(frozen=True, slots=True)
class Release:
    """The application gives up a resource that it owns with this token, for ``for_s`` seconds.

    Without a time it does so until an ``Accept``.
    """

    resource: Resource
    token: Token
    for_s: float | None = None


@dataclass(frozen=True, slots=True)
class Accept:
    """The application takes a resource again that it gave up."""

    resource: Resource


@record
class Wakeup:
    """``next_wakeup`` has come."""


@record
class Answered:
    """A command has ended."""

    command: Command
    outcome: Outcome


@record
class Noticed:
    """A watched topic changed at ``revision``. A hint to look, never proof of anything.

    ``version`` is a hint too: for ALLOCATION the version of the share that was written, for ACKNOWLEDGEMENTS
    the version that the topic's node has completed; None where it is not known. ``lost`` is true if the
    watch lost its history: changes up to the revision may be missing. ``keys`` are those of GROUP and
    BARRIERS that changed.
    """

    topic: Topic
    revision: int
    version: int | None = None
    lost: bool = False
    keys: frozenset[str] = frozenset()

    def folded(self, other: Noticed) -> Noticed:
        """One notice for two of the same topic: the later one, with the keys of both if it has keys."""
        latest = other if other.revision >= self.revision else self
        if self.topic.kind not in {TopicKind.GROUP, TopicKind.BARRIERS}:
            return latest
        return replace(latest, lost=self.lost or other.lost, keys=self.keys | other.keys)


class Handler(StrEnum):
    """The two handlers that a host application writes."""

    START = "on_start"
    STOP = "on_stop"


@dataclass(frozen=True, slots=True)
class HandlerReturned:
    """A handler returned, raised (``error``), or was not entered because it was too late (``refused``)."""

    handler: Handler
    error: str | None = None
    refused: bool = False


class MoveLimits(NamedTuple):
    """Limits of the moves that only improve the balance, beside those of the policy (RB-38)."""

    moves_left: int | None = None
    """Maximum number of these moves; None for no limit."""
    resting: frozenset[Resource] = frozenset()
    """The resources that may not move."""


NO_LIMITS = MoveLimits()


@dataclass(frozen=True, slots=True)
class MakePlan:
    """Compute a plan outside the loop, as that takes long for many resources (RB-21).

    It is answered by exactly one ``PlanMade``, which ``make_plan``
    returns; a node asks for one at a time.
    """

    group: Group
    version: int
    """Version of the plan, if one is needed."""
    forbids: bool
    """True if a plan is needed even if nothing changes, to forbid one that was given up."""
    inherited_version: int = 0
    """Maximum version of the obsolete parts that earlier terms left."""
    attempts: frozenset[int] = frozenset()
    """Versions whose publication may still write shares until another version is committed."""
    basis: PlanBasis | None = None
    """Facts about the group that make the plan cheaper and change nothing in it."""
    limits: MoveLimits = NO_LIMITS
    ended: frozenset[NodeId] = frozenset()
    """Nodes that are gone, and whose labels' grace is over (RB-39)."""


@dataclass(frozen=True, slots=True)
class PlanMade:
    """The result of a ``MakePlan``; ``plan`` is None if nothing has to change."""

    asked: MakePlan
    plan: Plan | None
    basis: PlanBasis | None = None
    """The basis of the next plan: once this plan is committed, or now if there is none."""
    improved: frozenset[Resource] = frozenset()
    """The resources that it moves only for a better balance, if the policy spaces such moves."""
    improvable: bool = False
    """True if a later plan may improve the balance further."""
    inherits: bool = False
    """True if it moves only what goes to a node with the share of its label: another plan is to follow."""


Event: TypeAlias = Start | Stop | Release | Accept | Wakeup | Answered | Noticed | HandlerReturned | PlanMade


@record
class Perform:
    """Carry out a command through the coordinator, and answer with ``Answered``."""

    command: Command


@dataclass(frozen=True, slots=True)
class CallStart:
    """Call OnStart with these resources and their tokens, unless the clock has reached ``not_after``."""

    owned: Mapping[Resource, Token]
    not_after: float


@dataclass(frozen=True, slots=True)
class CallStop:
    """Call OnStop with these resources. Always entered, however late it is."""

    resources: frozenset[Resource]


@dataclass(frozen=True, slots=True)
class AskStop:
    """Notify the owners of these resources at once that OnStop is coming, while a handler still runs."""

    resources: frozenset[Resource]


@record
class Guard:
    """Access must have ended by ``deadline``; None where nothing is owned. Arms the dead man's switch."""

    deadline: float | None


@record
class Watch:
    """Watch exactly these topics from now on, a new one from its revision."""

    topics: Mapping[Topic, int]


class FactKind(StrEnum):
    """The kinds of facts. Logs, history and documentation use the same words."""

    JOINING = "joining"
    JOINED = "joined"
    JOIN_FAILED = "join_failed"
    ISOLATED = "isolated"
    RECONNECTED = "reconnected"
    SESSION_LOST = "session_lost"
    LEAVING = "leaving"
    LAPSING = "lapsing"
    LEFT = "left"
    ELECTED = "elected"
    FOLLOWS = "follows"
    DEPOSED = "deposed"
    RESIGNED = "resigned"
    GROUP_READ = "group_read"
    ALLOCATION_PUBLISHED = "allocation_published"
    REBALANCE_COMPLETED = "rebalance_completed"
    ALLOCATION_ADOPTED = "allocation_adopted"
    BARRIER_ADDED = "barrier_added"
    BARRIER_BLOCKED = "barrier_blocked"
    BARRIER_REMOVED = "barrier_removed"
    ACKNOWLEDGED = "acknowledged"
    START_ENTERED = "start_entered"
    START_RETURNED = "start_returned"
    START_FAILED = "start_failed"
    START_REFUSED = "start_refused"
    STOP_ENTERED = "stop_entered"
    STOP_RETURNED = "stop_returned"
    STOP_FAILED = "stop_failed"
    HANDLER_OVERRAN = "handler_overran"
    COMMAND_FAILED = "command_failed"
    RELEASED = "released"
    LOAD_REPORTED = "load_reported"
    LOOP_SLOW = "loop_slow"
    UNREADABLE = "unreadable"
    WORKER_FAILED = "worker_failed"
    WORKER_RETURNED = "worker_returned"
    ENGINE_FAILED = "engine_failed"
    UNSAFE_REGISTRY = "unsafe_registry"


@record
class Fact:
    """Something that happened on this node, for logs, history and metrics. Reporting never blocks."""

    kind: FactKind
    node: NodeId
    term: int = 0
    version: int = 0
    resource: Resource | None = None
    token: Token | None = None
    revision: int | None = None
    value: float | None = None
    """The number that the kind is about: a published or completed version, a load, seconds of a removal, a
    release or a turn."""
    detail: Mapping[str, str | float | bool | None] = field(default_factory=dict)


@record
class Report:
    """Report to the sinks: one fact, or with ``each`` the same fact of each of these resources.

    The sinks make the facts of it, so that a report of many resources costs the node no more than one of a
    single resource. The mappings must not change any more.
    """

    fact: Fact
    each: Collection[Resource] | None = None
    tokens: Mapping[Resource, Token] = field(default_factory=dict)
    revisions: Mapping[Resource, int] = field(default_factory=dict)
    """Revisions of resources, where they differ; otherwise that of ``fact`` holds for all."""
    holders: Mapping[Resource, NodeId] = field(default_factory=dict)
    """Reported as ``holder`` in the detail."""

    @property
    def count(self) -> int:
        """Number of facts in the report."""
        return 1 if self.each is None else len(self.each)

    def facts(self) -> Iterator[Fact]:
        """Make the facts, of resources in the order of their names."""
        if self.each is None:
            yield self.fact
            return
        fact = self.fact
        for resource in sorted(self.each):
            holder = self.holders.get(resource)
            yield Fact(
                kind=fact.kind,
                node=fact.node,
                term=fact.term,
                version=fact.version,
                resource=resource,
                token=self.tokens.get(resource),
                revision=self.revisions.get(resource, fact.revision),
                value=fact.value,
                detail=fact.detail if holder is None else {**fact.detail, "holder": holder},
            )


@dataclass(frozen=True, slots=True)
class Finished:
    """The node has stopped for good and emits nothing more."""


Effect: TypeAlias = Perform | MakePlan | CallStart | CallStop | AskStop | Guard | Watch | Report | Finished
