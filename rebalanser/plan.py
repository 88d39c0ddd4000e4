"""A change of a group before it is made: what the leader's own code would do about it (RB-35).

The group is read, the change is made to what was read, and the leader's functions allocate it. Nothing is
written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import count
from math import fsum
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from rebalanser.core.allocation import Allocation, MoveReason, solve
from rebalanser.core.allocation.bounds import MILLION, Capacities
from rebalanser.core.group import Group, Member, Mode, Policy, ResourceSpec, intended, problem_of
from rebalanser.core.group.succession import succession
from rebalanser.core.group.types import NodeId, Resource, Timings
from rebalanser.errors import InvalidArgument
from rebalanser.registry import GroupView
from rebalanser.state import collector_paused, is_stable

_NOTHING: Final[frozenset[Resource]] = frozenset()


class PlannedMove(BaseModel):
    """A resource that gets another node."""

    model_config = ConfigDict(frozen=True)

    resource: str
    source: str | None = Field(description="the label of the node that has it; null if none has")
    source_node: str | None = Field(description="that node's id")
    target: str = Field(description="the label of the node that gets it")
    target_node: str = Field(description="that node's id; `planned-1` and so on for a node to come")
    reason: str
    unowned_s: float = Field(
        description="seconds without an owner that the settings allow, without requests to the registry and "
        "OnStart; `unowned` says of which settings they are the sum"
    )


class UnplacedResource(BaseModel):
    """A resource that no node would own."""

    model_config = ConfigDict(frozen=True)

    resource: str
    reason: str
    source: str | None = Field(description="the label of the node that has it now and would stop it")


class PlannedNode(BaseModel):
    """Resources and load of a node, now and after the change."""

    model_config = ConfigDict(frozen=True)

    node: str = Field(description="the node's id; `planned-1` and so on for a node to come")
    label: str
    change: str | None = Field(description="added, removed, drained or undrained by the plan; else null")
    drained: bool = Field(description="whether the label would be drained")
    capacity: float | None
    resources_before: int
    resources_after: int
    load_before: float
    load_after: float
    restarted: int = Field(
        description="resources that stay and yet stop and start, as the node's mode is eager"
    )


class UnownedTime(BaseModel):
    """The time without an owner that the settings allow to resources of one kind.

    Requests to the registry and OnStart come on top: neither has a limit.
    """

    model_config = ConfigDict(frozen=True)

    kind: str
    resources: int
    unowned_s: float
    of: str = Field(description="the settings that the time is the sum of, as this process has them")


class GroupPlan(BaseModel):
    """Outcome of the next allocation after a change of the group."""

    model_config = ConfigDict(frozen=True)

    group: str
    revision: int = Field(description="the revision at which the group was read")
    version: int = Field(description="the present allocation")
    moves: tuple[PlannedMove, ...]
    unplaced: tuple[UnplacedResource, ...]
    stopped: tuple[str, ...] = Field(description="removed resources that a node has now and would stop")
    nodes: tuple[PlannedNode, ...]
    largest_before: float = Field(description="the largest load per capacity of a node now")
    largest_after: float = Field(description="the largest load per capacity of a node then")
    bound: float = Field(description="a load per capacity below which no allocation can keep every node")
    unowned: tuple[UnownedTime, ...]
    improvable: bool = Field(description="the policy leaves moves for a better balance to later rebalances")
    policy: Policy
    notes: tuple[str, ...] = Field(description="what limits the plan")

    @property
    def all_placed(self) -> bool:
        """True if every resource would have an owner."""
        return not self.unplaced


@dataclass(frozen=True, slots=True)
class GroupChange:
    """A change of a group that is to be planned; what is not given stays."""

    nodes_added: tuple[Member, ...] = ()
    nodes_removed: frozenset[str] = frozenset()
    drained: frozenset[str] = frozenset()
    undrained: frozenset[str] = frozenset()
    put: Mapping[Resource, Mapping[str, Any]] = field(default_factory=dict)
    """Fields of resources that are added or changed."""
    removed: frozenset[Resource] = frozenset()
    weights: Mapping[Resource, float] = field(default_factory=dict)
    pins: Mapping[Resource, str | None] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            InvalidArgument: two parts of the change exclude each other.
        """
        labels = (("removed", self.nodes_removed), ("drained", self.drained), ("undrained", self.undrained))
        _exclude("node", labels)
        added = self.put.keys()
        _exclude("resource", (("added", added), ("removed", self.removed)))
        for what, changed in (("weight", self.weights), ("pin", self.pins)):
            _exclude("resource", ((f"given a {what}", changed.keys()), ("removed", self.removed)))
            said = {name for name, fields in self.put.items() if what in fields}
            _exclude("resource", ((f"added with a {what}", said), (f"given another {what}", changed.keys())))

    def made_to(self, group: Group) -> Group:
        """Return the group after the change.

        Raises:
            InvalidArgument: a node or a resource that is to change is not there.
        """
        members = self._members(group)
        live = {member.label for member in group.members.values()} | {each.label for each in self.nodes_added}
        _refuse_missing("live node with the label", self.drained - live)
        _refuse_missing("live or drained node with the label", self.undrained - live - group.drained)
        return replace(
            group,
            members=members,
            resources=self._resources(group),
            drained=group.drained - self.undrained | self.drained,
            policy=replace(group.policy, **self.policy),
        )

    def _members(self, group: Group) -> dict[NodeId, Member]:
        known = {member.label for member in group.members.values()}
        _refuse_missing("live node with the label", self.nodes_removed - known)
        members = {n: member for n, member in group.members.items() if member.label not in self.nodes_removed}
        taken = group.members.keys() | group.shares.keys()
        free = (node for number in count(1) if (node := f"planned-{number}") not in taken)
        return members | {
            node: replace(member, node=node) for node, member in zip(free, self.nodes_added, strict=False)
        }

    def _resources(self, group: Group) -> Mapping[Resource, ResourceSpec]:
        if not (self.put or self.removed or self.weights or self.pins):
            return group.resources
        resources = dict(group.resources)
        _refuse_missing("resource", self.removed - resources.keys())
        for name, said in self.put.items():
            resources[name] = replace(resources.get(name) or ResourceSpec(name), **said)
        _refuse_missing("resource", (self.weights.keys() | self.pins.keys()) - resources.keys())
        for name, weight in self.weights.items():
            resources[name] = replace(resources[name], weight=float(weight))
        for name, pin in self.pins.items():
            resources[name] = replace(resources[name], pin=pin)
        for name in self.removed:
            del resources[name]
        return resources


def _exclude(noun: str, sets: Collection[tuple[str, AbstractSet[str]]]) -> None:
    first: dict[str, str] = {}
    for done, names in sets:
        for name in sorted(names):
            if name in first:
                raise InvalidArgument(f"{noun} {name!r} can't be {first[name]} and {done} in one plan")
            first[name] = done


def _refuse_missing(noun: str, names: AbstractSet[str]) -> None:
    if names:
        others = f", nor {len(names) - 1:,} others" if len(names) > 1 else ""
        raise InvalidArgument(f"there is no {noun} {min(names)!r}{others}; nothing was planned")


@collector_paused()
def plan_change(name: str, view: GroupView, change: GroupChange, timings: Timings) -> GroupPlan:
    """Return what the next allocation does once group ``name`` is changed.

    Raises:
        InvalidArgument: the change concerns nodes or resources that are not there.
    """
    before, after = view.group, change.made_to(view.group)
    allocation = solve(problem_of(after))
    targets = intended(after, allocation)
    moves = tuple(_moves(before, after, allocation, timings))
    nodes = tuple(_nodes(before, after, targets, change))
    certificate = allocation.certificate
    owners = _owners(before, certificate.unplaced.keys() | change.removed)
    return GroupPlan(
        group=name,
        revision=before.revision,
        version=before.header.version if before.header else 0,
        moves=moves,
        unplaced=tuple(
            UnplacedResource(resource=resource, reason=reason, source=owners.get(resource))
            for resource, reason in sorted(certificate.unplaced.items())
        ),
        stopped=tuple(sorted(change.removed & owners.keys())),
        nodes=nodes,
        largest_before=_largest(before),
        largest_after=certificate.largest,
        bound=certificate.bound,
        unowned=_unowned(moves, nodes, before, after, timings),
        improvable=certificate.improvable,
        policy=after.policy,
        notes=tuple(_notes(view, after, allocation)),
    )


def _label(group: Group, node: NodeId) -> str:
    """The label of a node; its id if it is not there any more."""
    return group.members[node].label if node in group.members else node


def _owners(group: Group, names: AbstractSet[Resource]) -> dict[Resource, str]:
    """The labels of the nodes that have these resources now."""
    return {
        resource: _label(group, node)
        for node, share in group.shares.items()
        for resource in share.resources & names
        if node in group.members
    }


_HANDED_OVER: Final = "moving between nodes"
_LEAVES: Final = "moving from a removed node"
_NO_OWNER: Final = "without an owner before"
_RESTARTED: Final = "staying on a node in eager mode"


def _kind(source: NodeId | None, before: Group, after: Group) -> str:
    if source is None or source not in before.members:
        return _NO_OWNER
    return _HANDED_OVER if source in after.members else _LEAVES


def _times(timings: Timings) -> dict[str, tuple[float, str]]:
    """The bound on the unowned time of each kind of moves, and what it consists of (RB-8, RB-21)."""
    pause = max(timings.settle_time_s, timings.min_rebalance_interval_s)
    stop = f"stop_timeout_s {timings.stop_timeout_s:g} of the old owner"
    pauses = (
        f"the larger of settle_time_s {timings.settle_time_s:g} and "
        f"min_rebalance_interval_s {timings.min_rebalance_interval_s:g} of the leader"
    )
    died = f"; if it dies instead, lease_ttl_s {timings.lease_ttl_s:g} replaces its stop_timeout_s"
    return {
        _HANDED_OVER: (timings.stop_timeout_s, stop),
        _LEAVES: (timings.stop_timeout_s + pause, f"{stop} and {pauses}{died}"),
        _NO_OWNER: (pause, f"{pauses}, from the change on"),
        _RESTARTED: (timings.stop_timeout_s, f"{stop}, or of the node itself"),
    }


def _moves(before: Group, after: Group, allocation: Allocation, timings: Timings) -> Iterator[PlannedMove]:
    times = _times(timings)
    for move in allocation.certificate.moves:
        yield PlannedMove(
            resource=move.resource,
            source=None if move.source is None else _label(before, move.source),
            source_node=move.source,
            target=after.members[move.target].label,
            target_node=move.target,
            reason="a better balance" if move.reason is MoveReason.REBALANCE else move.reason,
            unowned_s=times[_kind(move.source, before, after)][0],
        )


def _unowned(
    moves: Iterable[PlannedMove], nodes: Iterable[PlannedNode], before: Group, after: Group, timings: Timings
) -> tuple[UnownedTime, ...]:
    counts = Counter(_kind(move.source_node, before, after) for move in moves)
    counts[_RESTARTED] = sum(node.restarted for node in nodes)
    return tuple(
        UnownedTime(kind=kind, resources=counts[kind], unowned_s=seconds, of=parts)
        for kind, (seconds, parts) in _times(timings).items()
        if counts[kind]
    )


def _share(group: Group, node: NodeId) -> AbstractSet[Resource]:
    return group.shares[node].resources if node in group.shares else _NOTHING


def _load(names: Iterable[Resource], specs: Mapping[Resource, ResourceSpec]) -> float:
    return fsum(specs[name].weight for name in names if name in specs)


def _largest(group: Group) -> float:
    """The largest load per capacity of the nodes that may own resources, by the present shares."""
    active = {n: member for n, member in group.members.items() if member.label not in group.drained}
    amounts = Capacities.of(active).amounts
    loads = ((node, round(_load(_share(group, node), group.resources) * MILLION)) for node in active)
    return max((load / amounts[node] for node, load in loads if amounts[node]), default=0.0)


def _nodes(
    before: Group, after: Group, targets: Mapping[NodeId, AbstractSet[Resource]], change: GroupChange
) -> Iterator[PlannedNode]:
    members = {**before.members, **after.members}
    shares_change = any(targets[node] != _share(before, node) for node in targets)
    restarts = shares_change or before.shares.keys() != targets.keys()
    for node, member in sorted(members.items(), key=lambda item: (item[1].label, item[0])):
        had, gets = _share(before, node), targets.get(node, _NOTHING)
        is_restarted = restarts and member.mode is Mode.EAGER and node in after.members
        yield PlannedNode(
            node=node,
            label=member.label,
            change=_change_of(node, member.label, before, after, change),
            drained=member.label in after.drained,
            capacity=member.capacity,
            resources_before=len(had),
            resources_after=len(gets),
            load_before=_load(had, before.resources),
            load_after=_load(gets, after.resources),
            restarted=len(had & gets) if is_restarted else 0,
        )


def _change_of(node: NodeId, label: str, before: Group, after: Group, change: GroupChange) -> str | None:
    if node not in after.members:
        return "removed"
    if node not in before.members:
        return "added"
    if label in change.drained - before.drained:
        return "drained"
    return "undrained" if label in change.undrained & before.drained else None


def _notes(view: GroupView, after: Group, allocation: Allocation) -> Iterator[str]:
    group, policy = view.group, after.policy
    leader = view.leadership.leader if view.leadership else ""
    now = solve(problem_of(group))
    if not is_stable(group, now):
        yield "the group is not balanced now: moves that are due without the change are among these"
    if leader not in group.members:
        yield "the group has no leader now: nothing moves until one is elected"
    elif leader not in after.members:
        yield "the leader is among the removed nodes: nothing moves until another one is elected"
    kept = sum(len(share) for share in succession(after).kept.values())
    if kept:
        yield f"{kept:,} resources have no owner while they are kept for labels that may return"
    if after.members.keys() - group.members.keys():
        yield "ids decide between nodes that are equally good, and a node to come gets its id when it joins"
    if allocation.certificate.improvable:
        yield "the policy leaves more moves for a better balance to later rebalances"
    pause = max(policy.move_interval_s, policy.cooldown_s)
    if pause and allocation.certificate.improvements:
        yield (
            f"the leader may put off moves for a better balance by up to {pause:g} s after earlier ones; "
            "when these were is not stored"
        )
