"""The state of a group as anyone may read it (RB-19), and as the command line prints it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from math import fsum

from pydantic import BaseModel, ConfigDict, Field

from rebalanser.core.allocation import Allocation, AllocationProblem, solve
from rebalanser.core.group import Group, Member, Mode, Policy, ResourceSpec, intended, problem_of, releasers
from rebalanser.core.group.succession import succession
from rebalanser.core.group.types import NodeId, Resource
from rebalanser.registry import GroupView, Holding
from rebalanser.registry.values import NEWER_PIN


class NodeState(BaseModel):
    """One live node."""

    model_config = ConfigDict(frozen=True)

    node: str
    label: str
    host: str
    pid: int
    mode: Mode
    may_lead: bool
    leader: bool
    drained: bool
    attributes: dict[str, str]
    capacity: float | None = Field(default=None, description="the most load that it may own; null for any")
    tags: tuple[str, ...] = Field(default=(), description="what it offers to resources that need it")
    zone: str = Field(default="", description="the zone that it is in")
    rejoin_grace_s: float = Field(
        default=0.0, description="how many seconds its share is kept for its label once it is gone"
    )
    superseded: bool = Field(
        default=False, description="whether a later node of its label replaces it, so that it owns nothing"
    )
    load: float = Field(
        default=0.0, description="the sum of the weights of the resources that the allocation gives the node"
    )
    released: tuple[str, ...] = Field(
        default=(), description="the resources that it gave up (`owned.release()`) and does not want back now"
    )
    assigned: int = Field(description="how many resources the allocation gives the node")
    held: int = Field(description="how many barriers the node holds")
    completed: bool = Field(description="whether the node has acknowledged its share")


class KeptState(BaseModel):
    """A label whose node is gone, and for whose return its share is kept."""

    model_config = ConfigDict(frozen=True)

    label: str
    node: str = Field(description="the node that is gone")
    resources: int = Field(description="how many resources are kept for the label")
    rejoin_grace_s: float = Field(
        description="they go to other nodes this many seconds after the leader noticed that the node is gone"
    )


class ResourceState(BaseModel):
    """One resource, or one that was removed while its barrier is still held (RB-16)."""

    model_config = ConfigDict(frozen=True)

    resource: str
    assigned_to: str | None = Field(description="the node that the allocation names")
    held_by: str | None = Field(description="the node that holds the barrier")
    owner: str | None = Field(description="the label of the node that holds the barrier")
    token: int | None = Field(description="the fencing token of the barrier")
    reason: str | None = Field(description="why no live node owns it; null while one does")
    weight: float
    pin: str | None
    attributes: dict[str, str]
    needs: tuple[str, ...] = Field(default=(), description="the tags that its node must have")
    spread: str | None = Field(
        default=None, description="resources with the same one are on distinct nodes, or in distinct zones"
    )
    removed: bool


class GroupState(BaseModel):
    """A group at one revision."""

    model_config = ConfigDict(frozen=True)

    group: str
    revision: int
    term: int
    leader: str | None
    version: int
    completed: bool = Field(description="every live node has completed its share of this version")
    balanced: bool = Field(
        description="completed, and the allocation is the one for these nodes and resources; moves that only "
        "improve the balance and that the policy keeps apart in time are not waited for"
    )
    trouble: str | None = Field(
        description="why the last leader resigned; null while balanced, and once a later one has published"
    )
    unreadable: dict[str, str] = Field(
        default_factory=dict,
        description="keys that no Rebalanser wrote, or a newer one, and why they are left alone",
    )
    troubles: dict[str, str] = Field(
        default_factory=dict,
        description="what went wrong in handlers and workers lately, by the label of the node",
    )
    owned: int = Field(description="how many of the resources a live node owns")
    unowned: int = Field(description="how many of them nobody owns; the reason stands at each")
    drained: tuple[str, ...] = Field(description="the labels that are drained, of live nodes and of others")
    kept: tuple[KeptState, ...] = Field(
        default=(), description="the labels for whose return a share is kept; nobody owns these resources"
    )
    policy: Policy = Field(default=Policy(), description="how resources are allocated: `Admin.configure`")
    nodes: tuple[NodeState, ...]
    resources: tuple[ResourceState, ...]

    exists: bool = Field(default=True, description="false if nothing at all is known of a group of this name")

    @property
    def all_owned(self) -> bool:
        """True if the group is balanced and every resource has an owner."""
        return self.balanced and self.unowned == 0


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector of cycles: it would look many times at hundreds of thousands of new objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@collector_paused()
def describe(name: str, view: GroupView) -> GroupState:
    """The state of group ``name`` from what was read of it."""
    group, header = view.group, view.group.header
    held = {holding.resource: holding for holding in view.holdings}
    barriers = Counter(holding.node for holding in view.holdings)
    labels = {member.label for member in group.members.values()}
    assigned = {resource: node for node, share in group.shares.items() for resource in share.resources}
    shares = {node: share.version for node, share in group.shares.items()}
    completed = {
        node: node in shares and group.acknowledged.get(node, 0) >= shares[node] for node in group.members
    }
    specs, released, passing = group.resources, releasers(group), succession(group)
    allocation = cache(lambda: solve(_present_problem(group)))
    all_completed = header is not None and all(completed.values())
    is_balanced = all_completed and is_stable(group, allocation())
    leader = view.leadership.leader if view.leadership and view.leadership.leader in group.members else None
    nodes = tuple(
        NodeState(
            node=node,
            label=member.label,
            host=member.host,
            pid=member.pid,
            mode=member.mode,
            may_lead=member.may_lead,
            leader=node == leader,
            drained=member.label in group.drained,
            attributes=dict(member.attributes),
            capacity=member.capacity,
            tags=tuple(sorted(member.tags)),
            zone=member.zone,
            rejoin_grace_s=member.rejoin_grace_s,
            superseded=node in passing.superseded,
            load=fsum(specs[r].weight for r in _share_of(group, node) if r in specs),
            released=tuple(sorted(member.released)),
            assigned=len(_share_of(group, node)),
            held=barriers[node],
            completed=completed[node],
        )
        for node, member in sorted(group.members.items(), key=_by_label)
    )
    resources = tuple(
        _resource(
            resource,
            view,
            labels,
            leader,
            assigned.get(resource),
            held.get(resource),
            released.get(resource, frozenset()),
            lambda: allocation().certificate.unplaced,
        )
        for resource in sorted(group.resources.keys() | held.keys())
    )
    unowned = sum(resource.reason is not None for resource in resources)
    return GroupState(
        group=name,
        revision=group.revision,
        term=view.leadership.term if view.leadership else 0,
        leader=group.members[leader].label if leader else None,
        version=header.version if header else 0,
        completed=all_completed,
        balanced=is_balanced,
        trouble=None if is_balanced else _trouble(view),
        unreadable=dict(group.unreadable),
        troubles=dict(sorted(view.troubles.items())),
        owned=len(group.resources) - unowned,
        unowned=unowned,
        drained=tuple(sorted(group.drained)),
        kept=tuple(
            KeptState(
                label=group.remembered[node].label,
                node=node,
                resources=len(kept),
                rejoin_grace_s=group.remembered[node].rejoin_grace_s,
            )
            for node, kept in sorted(passing.kept.items(), key=lambda item: group.remembered[item[0]].label)
        ),
        policy=group.policy,
        nodes=nodes,
        resources=resources,
        exists=view.exists,
    )


def _trouble(view: GroupView) -> str | None:
    trouble, header = view.leadership.trouble if view.leadership else None, view.group.header
    if trouble is None or (header is not None and header.term > trouble.term):
        return None
    return f"the leader of term {trouble.term} resigned: {trouble.error}"


def _lately(troubles: Mapping[str, str]) -> str:
    label = min(troubles, default=None)
    return "" if label is None else f"; lately on {label}: {troubles[label]}"


def _by_label(item: tuple[str, Member]) -> tuple[str, str]:
    return item[1].label, item[0]


def _present_problem(group: Group) -> AllocationProblem:
    """Return the allocation problem of a group, without moves for a better balance if the policy delays them.

    Only the leader knows when such moves are due. A group that waits for them is balanced (RB-38).
    """
    problem = problem_of(group)
    return replace(problem, moves_left=0) if group.policy.spaces_moves else problem


def is_stable(group: Group, allocation: Allocation) -> bool:
    """Return True if a leader that read the group now, and allocated it so, would change no share."""
    shares, targets = group.shares, intended(group, allocation)
    return shares.keys() == targets.keys() and all(
        shares[node].resources == target for node, target in targets.items()
    )


def _resource(
    resource: str,
    view: GroupView,
    labels: AbstractSet[str],
    leader: str | None,
    assigned_to: str | None,
    holding: Holding | None,
    released_by: AbstractSet[NodeId],
    unplaced: Callable[[], Mapping[str, str]],
) -> ResourceState:
    group = view.group
    removed = resource not in group.resources
    spec = group.resources.get(resource) or ResourceSpec(resource)
    holder = group.members.get(holding.node) if holding else None
    return ResourceState(
        resource=resource,
        assigned_to=assigned_to,
        held_by=holding.node if holding else None,
        owner=holder.label if holder else None,
        token=holding.token if holding else None,
        reason=None
        if removed or holder
        else why_unowned(spec, view, labels, leader, assigned_to, released_by, unplaced),
        weight=spec.weight,
        pin=spec.pin,
        attributes=dict(spec.attributes),
        needs=tuple(sorted(spec.needs)),
        spread=spec.spread,
        removed=removed,
    )


def why_unowned(
    spec: ResourceSpec,
    view: GroupView,
    labels: AbstractSet[str],
    leader: str | None,
    assigned_to: str | None,
    released_by: AbstractSet[NodeId],
    unplaced: Callable[[], Mapping[str, str]],
) -> str:
    """Return why no live node owns a resource."""
    group, pin = view.group, spec.pin
    gone = None if assigned_to in group.members else group.remembered.get(assigned_to or "")
    if gone is not None and gone.label not in group.drained | labels and pin in {None, gone.label}:
        return f"kept for {gone.label}, which is gone, for up to {gone.rejoin_grace_s:g} s"
    if not labels:
        return "no node takes part" + _lately(view.troubles)
    if pin == NEWER_PIN:
        return "an older Rebalanser changed it, and dropped its needs and its spread: add it again with them"
    if pin is not None and pin not in labels:
        return f"pinned to {pin}, which is not there"
    if pin is not None and pin in group.drained:
        return f"pinned to {pin}, which is drained"
    if labels <= group.drained:
        return "every node is drained"
    if released_by and _open_to(spec, group) <= released_by:
        return f"pinned to {pin}, which has released it" if pin is not None else "every node has released it"
    if assigned_to is not None and assigned_to in group.members:
        return f"{group.members[assigned_to].label} has yet to take it"
    if spec.resource in unplaced():
        return unplaced()[spec.resource]
    return "the next allocation is to place it" if leader else "the group has no leader"


def _share_of(group: Group, node: NodeId) -> AbstractSet[Resource]:
    return group.shares[node].resources if node in group.shares else frozenset()


def _open_to(spec: ResourceSpec, group: Group) -> set[NodeId]:
    """The nodes that may own a resource, were it not for what they released."""
    return {
        node
        for node, member in group.members.items()
        if member.label not in group.drained and spec.pin in {None, member.label}
    }
