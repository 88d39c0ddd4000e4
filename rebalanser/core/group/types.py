"""The nouns of the protocol: small, frozen and comparable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias, TypeVar, dataclass_transform

NodeId: TypeAlias = str
"""Names one incarnation of a node and is never used again; a user's name for a node is a label."""
Resource: TypeAlias = str
Token: TypeAlias = int
"""A fencing token: the registry revision at which the barrier was added. It grows from owner to owner."""

RecordT = TypeVar("RecordT")
_NO_ATTRIBUTES: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[RecordT]) -> type[RecordT]:
    """Make a value of a class: comparable, hashable, and frozen as far as the type checker sees.

    One that is frozen at run time takes several times as long to make, and most of what passes between a
    node and its registry lives for a moment only.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


class Mode(StrEnum):
    """The resources that a rebalance stops."""

    COOPERATIVE = "cooperative"
    """Only what leaves the node is stopped and only what arrives is started (RB-17)."""
    EAGER = "eager"
    """Everything is stopped and started each time, as the original protocol says (RB-17)."""


class OnOverrun(StrEnum):
    """The treatment of a process whose handler does not return within its limit."""

    REPORT = "report"
    """It is reported and its barriers stay held (RB-25)."""
    KILL = "kill"
    """The dead man's switch kills it before its lease can end (RB-34)."""


@dataclass(frozen=True, slots=True)
class Timings:
    """The times that the protocol runs on, in seconds of the node's monotonic clock.

    ``rebalanser.settings`` derives and checks them; see RB-21 for the inequality that they keep.
    """

    lease_ttl_s: float
    heartbeat_interval_s: float
    stop_timeout_s: float
    start_timeout_s: float
    safety_margin_s: float
    clock_drift_ratio: float
    settle_time_s: float
    min_rebalance_interval_s: float
    retry_initial_s: float
    retry_max_s: float
    rejoin_initial_s: float
    rejoin_max_s: float

    @property
    def access_s(self) -> float:
        """Seconds after a proof of life that access may last: the lease, less clock drift and the margin."""
        return self.lease_ttl_s * (1 - self.clock_drift_ratio) - self.safety_margin_s

    @property
    def detect_s(self) -> float:
        """Seconds after a proof of life at which OnStop must be called, to return in time (RB-21)."""
        return self.access_s - self.stop_timeout_s


@dataclass(frozen=True, slots=True)
class Member:
    """A node's description of itself, stored when it joins."""

    node: NodeId
    label: str
    mode: Mode = Mode.COOPERATIVE
    may_lead: bool = True
    host: str = ""
    pid: int = 0
    attributes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    released: frozenset[Resource] = frozenset()
    """Resources that its application has released: no allocation gives it one of them."""
    capacity: float | None = None
    """The greatest sum of weights that it may own (RB-37); None for no limit."""
    tags: frozenset[str] = frozenset()
    """Tags that resources may need (RB-37)."""
    zone: str = ""
    """The zone that it is in; nodes without one share the empty zone."""
    rejoin_grace_s: float = 0.0
    """Seconds for which its label keeps its share once it is gone (RB-39)."""
    registered: int = field(default=0, compare=False)
    """The revision at which it joined: the order of nodes with the same label. It is not in its record."""


MAX_REJOIN_GRACE_S: Final = 86_400.0
"""Maximum seconds for which a share is kept: a day. More counts as this much."""


@record
class ResourceSpec:
    """A resource: what an operator has said of it."""

    resource: Resource
    weight: float = 1.0
    """Its part of a node's load, in any unit that all resources of the group share (RB-36)."""
    pin: str | None = None
    """The label of the only node that may own it (RB-29)."""
    attributes: Mapping[str, str] = field(default_factory=lambda: _NO_ATTRIBUTES)
    needs: frozenset[str] = frozenset()
    """The tags that its node must have (RB-37)."""
    spread: str | None = None
    """Resources with the same spread are on distinct nodes, or in distinct zones (RB-37)."""


SPEC_FIELDS: Final = frozenset({"weight", "pin", "attributes", "needs", "spread"})
"""The fields of a ``ResourceSpec`` that an operator may set."""


class SpreadOver(StrEnum):
    """Places of which each has at most one resource of a ``spread``."""

    NODE = "node"
    ZONE = "zone"


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules by which every leader allocates the resources of a group; they are kept in the registry."""

    spread_over: SpreadOver = SpreadOver.NODE
    """The places that keep resources with the same ``spread`` apart (RB-37)."""
    imbalance_band: float = 0.0
    """The part by which the largest load per capacity may exceed the lower bound before anything moves to
    lower it: 0.1 is a tenth (RB-38)."""
    max_moves: int | None = None
    """The most resources that one rebalance moves for a better balance; None for no limit (RB-38)."""
    move_interval_s: float = 0.0
    """Minimum seconds between two rebalances that only improve the balance (RB-38)."""
    cooldown_s: float = 0.0
    """Seconds after a move in which a resource does not move again for a better balance (RB-38)."""

    @property
    def spaces_moves(self) -> bool:
        """True if moves for a better balance are kept apart in time (RB-38)."""
        return self.move_interval_s > 0.0 or self.cooldown_s > 0.0


POLICY_FIELDS: Final = frozenset(each.name for each in fields(Policy))
"""The fields of a ``Policy``."""


@dataclass(frozen=True, slots=True)
class Session:
    """One incarnation's membership: its id, its lease, and the revision that created its node key (RB-4)."""

    node: NodeId
    lease: int
    created: int


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why the leader of a term resigned (RB-43)."""

    term: int
    error: str


@dataclass(frozen=True, slots=True)
class Leadership:
    """The term, its leader, and the revision at which the term began (RB-5)."""

    term: int
    leader: NodeId
    revision: int
    trouble: Trouble | None = None
    """The trouble of the last leader that resigned; obsolete once a later term publishes."""


@dataclass(frozen=True, slots=True)
class Header:
    """A committed allocation. Each node's share is its latest stored one of a committed version.

    A version writes only the shares that it changes, so that one costs as much as it changes (RB-45).
    """

    version: int
    term: int
    revision: int
    aborted: frozenset[int] = frozenset()
    """Versions that were never committed, and of which shares may be stored."""

    def is_committed(self, version: int) -> bool:
        """Return True if this version is, or was, the committed allocation."""
        return version <= self.version and version not in self.aborted


@dataclass(frozen=True, slots=True)
class Share:
    """The resources that one node is to own, since allocation ``version``."""

    version: int
    resources: frozenset[Resource]
    parts: int = field(default=1, compare=False)
    """Number of parts in which it is stored, as a request has a limit."""
    revision: int = field(default=0, compare=False)
    """The revision at which the first part was written."""


class SharePart(NamedTuple):
    """A stored part of a share; parts are counted from 0."""

    node: NodeId
    version: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Tells whether members, resources, drains or the policy changed.

    Of members the count and the newest revision; of the others how many requests of operators have changed
    any. ``acknowledgements`` has their count and newest revision; they are no reason to rebalance.
    """

    members: tuple[int, int] = (0, 0)
    changes: int = 0
    acknowledgements: tuple[int, int] = field(default=(0, 0), compare=False)


@dataclass(frozen=True, slots=True)
class Group:
    """All of a group, read at one revision (RB-9)."""

    revision: int
    members: Mapping[NodeId, Member]
    resources: Mapping[Resource, ResourceSpec]
    drained: frozenset[str]
    header: Header | None
    shares: Mapping[NodeId, Share]
    obsolete_parts: frozenset[SharePart]
    """Stored parts of shares that are not, or no longer, in the allocation."""
    acknowledged: Mapping[NodeId, int]
    fingerprint: Fingerprint
    policy: Policy = Policy()
    remembered: Mapping[NodeId, Member] = field(default_factory=lambda: MappingProxyType({}))
    """The members with a grace to which an allocation gave a share, also those that are gone (RB-39)."""
    unreadable: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Keys that no Rebalanser wrote, or a newer one, and what is wrong with each: they are left alone."""

    @property
    def uncommitted(self) -> frozenset[int]:
        """Versions of which shares are stored and that are not committed."""
        header = self.header
        versions = {part.version for part in self.obsolete_parts}
        return frozenset(v for v in versions if header is None or not header.is_committed(v))

    def obsolete_after(self, replaced: Iterable[NodeId]) -> frozenset[SharePart]:
        """The parts that are obsolete once the shares of these nodes are replaced."""
        return self.obsolete_parts | {
            SharePart(node, share.version, part)
            for node, share in ((node, self.shares[node]) for node in replaced if node in self.shares)
            for part in range(share.parts)
        }


@dataclass(frozen=True, slots=True)
class Effort:
    """The cost of an allocation, and the least that it could be (RB-10)."""

    moves: int
    """Resources that leave a node which is still there and may own resources, for another one."""
    least_moves: int
    """The fewest moves with which any allocation as even as possible could follow the one before."""
    nodes: int
    """The nodes that may own resources: the live ones that are not drained."""
    resources: int
    """All resources of the group."""


@dataclass(frozen=True, slots=True)
class Plan:
    """An allocation that a leader is about to publish, as the change from the one before."""

    version: int
    based_on: Header | None
    shares: Mapping[NodeId, int]
    """The version of each node's share, once this is committed."""
    changed: Mapping[NodeId, frozenset[Resource]]
    obsolete: frozenset[SharePart]
    """Stored parts of shares that are not in the new allocation."""
    aborted: frozenset[int] = frozenset()
    """Earlier versions that this one aborts, and of which shares may be stored."""
    orphaned: frozenset[SharePart] = frozenset()
    """Obsolete parts left by leaders of earlier terms: no publication under way can commit them."""
    effort: Effort | None = None
    """Its cost; None if it is not measured."""
    remember: Mapping[NodeId, Member] = field(default_factory=dict)
    """Members to remember beyond their leases (RB-39)."""
    forget: frozenset[NodeId] = frozenset()
    """Members that were remembered and are no longer."""


def is_special(spec: ResourceSpec) -> bool:
    """Return True if a resource has a weight, needs or a spread: then counts alone do not decide."""
    return spec.weight != 1.0 or bool(spec.needs) or spec.spread is not None


def special_resources(resources: Mapping[Resource, ResourceSpec]) -> frozenset[Resource]:
    """Return the resources that ``is_special``."""
    return frozenset(name for name, spec in resources.items() if is_special(spec))


@dataclass(frozen=True, slots=True)
class PlanBasis:
    """Facts about a group's resources and shares, so that a plan looks only at what changed (RB-45)."""

    unsettled: frozenset[Resource]
    """The only names that may not be both a resource and in just one share."""
    pins: Mapping[Resource, str]
    """The label in the pin of each pinned resource."""
    special: frozenset[Resource] = frozenset()
    """The resources that ``is_special``."""

    def after(self, changed: frozenset[Resource], resources: Mapping[Resource, ResourceSpec]) -> PlanBasis:
        """The facts after these of the resources changed, while the shares stayed."""
        found = {name: resources[name] for name in changed if name in resources}
        pins = {name: label for name, label in self.pins.items() if name not in changed}
        pins |= {name: spec.pin for name, spec in found.items() if spec.pin is not None}
        special = self.special
        if found or not special.isdisjoint(changed):
            special = special - changed | {name for name, spec in found.items() if is_special(spec)}
        return PlanBasis(self.unsettled | changed, pins, special)


class TopicKind(StrEnum):
    """The kinds of topics that a node can watch."""

    ALLOCATION = "allocation"
    """A share was written for a node."""
    COMMIT = "commit"
    """Another version of the allocation was committed."""
    LEADERSHIP = "leadership"
    NODE = "node"
    REMOVALS = "removals"
    """A node removed barriers, or left."""
    GROUP = "group"
    ACKNOWLEDGEMENTS = "acknowledgements"
    BARRIERS = "barriers"
    """Barriers were added or removed. Clients that follow owners watch it, and no node does."""


class Topic(NamedTuple):
    """A topic to watch; ``node`` is the node concerned, for NODE, REMOVALS and ALLOCATION."""

    kind: TopicKind
    node: NodeId = ""
