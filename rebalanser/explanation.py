"""Why a resource is where it is, why it is nowhere else, and what it waits for (RB-35)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pydantic import BaseModel, ConfigDict, Field

from rebalanser.core.allocation import Allocation, AllocationProblem, solve
from rebalanser.core.allocation.explanations import why_not_there, why_there
from rebalanser.core.allocation.reasons import some
from rebalanser.core.group import Group, ResourceSpec, problem_of, releasers
from rebalanser.core.group.types import NodeId, Resource
from rebalanser.errors import InvalidArgument
from rebalanser.registry import GroupView, Holding
from rebalanser.state import collector_paused, why_unowned


class NodeReason(BaseModel):
    """Why a node does not get a resource."""

    model_config = ConfigDict(frozen=True)

    node: str
    label: str
    reason: str


class Explanation(BaseModel):
    """Why a resource is where it is at one revision, and why it is nowhere else."""

    model_config = ConfigDict(frozen=True)

    group: str
    revision: int
    version: int = Field(description="the present allocation")
    resource: str
    owner: str | None = Field(description="the label of the live node that holds the barrier")
    held_by: str | None = Field(description="the node that holds the barrier")
    token: int | None = Field(
        description="the fencing token: the revision since which the barrier is held (in Kafka the offset)"
    )
    assigned: str | None = Field(description="the label of the node that the present allocation names")
    assigned_to: str | None = Field(description="that node's id")
    assigned_by: int | None = Field(
        description="the version of that node's present share; earlier ones may have had the resource too"
    )
    next: str | None = Field(
        description="the label of the node that the next allocation names, if all may move now; null for none"
    )
    reason: str = Field(description="why it is there, or why no live node owns it")
    nodes: tuple[NodeReason, ...] = Field(description="why each other node does not get it")
    waits_for: tuple[str, ...]


@collector_paused()
def explain(name: str, view: GroupView, resource: Resource) -> Explanation:
    """Explain one resource of group ``name``.

    Raises:
        InvalidArgument: there is no such resource.
    """
    group, leadership = view.group, view.leadership
    holding = next((each for each in view.holdings if each.resource == resource), None)
    spec = group.resources.get(resource)
    if spec is None and holding is None:
        raise InvalidArgument(f"there is no resource {resource!r} in group {name!r}")
    assigned = next((n for n, share in group.shares.items() if resource in share.resources), None)
    holder = group.members.get(holding.node) if holding else None
    leader = leadership.leader if leadership and leadership.leader in group.members else None
    problem = problem_of(group)
    allocation = solve(problem)
    following = next((n for n, share in allocation.shares.items() if resource in share), None)
    nodes = _nodes(group, problem, allocation, resource, following) if spec else ()
    if spec is None:
        reason = "it is removed, and its holder has yet to stop"
    elif holder is None:
        reason = _why_unowned(view, allocation, spec, leader, assigned)
    else:
        reason = _why_owned(group, problem, allocation, resource, holding.node if holding else "", following)
    return Explanation(
        group=name,
        revision=group.revision,
        version=group.header.version if group.header else 0,
        resource=resource,
        owner=holder.label if holder else None,
        held_by=holding.node if holding else None,
        token=holding.token if holding else None,
        assigned=_label(group, assigned),
        assigned_to=assigned,
        assigned_by=group.shares[assigned].version if assigned is not None else None,
        next=_label(group, following),
        reason=reason,
        nodes=nodes,
        waits_for=tuple(_waits(group, leader, holding, assigned, following)),
    )


def _label(group: Group, node: NodeId | None) -> str | None:
    return group.members[node].label if node is not None and node in group.members else None


def _why_owned(
    group: Group,
    problem: AllocationProblem,
    allocation: Allocation,
    resource: Resource,
    holder: NodeId,
    following: NodeId | None,
) -> str:
    if following is None:
        return f"it is to leave its node: {allocation.certificate.unplaced[resource]}"
    if following == holder:
        return why_there(problem, allocation, resource, following)
    due = (move.reason for move in allocation.certificate.moves if move.resource == resource)
    target = f"it is to move to {_label(group, following)}"
    return "; ".join([target, *due])


def _why_unowned(
    view: GroupView,
    allocation: Allocation,
    spec: ResourceSpec,
    leader: NodeId | None,
    assigned: NodeId | None,
) -> str:
    group = view.group
    return why_unowned(
        spec,
        view,
        {member.label for member in group.members.values()},
        leader,
        assigned,
        releasers(group).get(spec.resource, frozenset()),
        lambda: allocation.certificate.unplaced,
    )


def _nodes(
    group: Group,
    problem: AllocationProblem,
    allocation: Allocation,
    resource: Resource,
    following: NodeId | None,
) -> tuple[NodeReason, ...]:
    reasons = why_not_there(problem, allocation, resource, following)
    labelled = sorted((group.members[node].label, node) for node in reasons)
    return tuple(NodeReason(node=node, label=label, reason=reasons[node]) for label, node in labelled)


def _waits(
    group: Group,
    leader: NodeId | None,
    holding: Holding | None,
    assigned: NodeId | None,
    following: NodeId | None,
) -> Iterator[str]:
    """Yield what has to happen before the resource is where the next allocation wants it."""
    holder = holding.node if holding else None
    taker = _label(group, assigned)
    if holder is not None and holder not in group.members:
        yield f"the barrier of {holder}, which is gone, is held until its lease ends"
    elif holder is not None and holder != assigned:
        waiting = f"{taker} waits: " if taker else ""
        yield f"{waiting}{_label(group, holder)} has yet to give it up, its barrier is held"
    elif holder is None and taker is not None:
        yield f"{taker} has yet to take it"
    due = following != assigned
    if due and leader is None:
        yield "the group has no leader"
    elif due:
        target = _label(group, following)
        yield "the next allocation " + (f"gives it to {target}" if target else "gives it to no node")
    if holder != assigned and (late := _late(group)):
        yield f"allocation {group.header.version if group.header else 0} is not completed by {some(late)}"


def _late(group: Group) -> Collection[str]:
    """The labels of the nodes that have not completed their shares."""
    return [
        member.label
        for node, member in group.members.items()
        if node in group.shares and group.acknowledged.get(node, 0) < group.shares[node].version
    ]
