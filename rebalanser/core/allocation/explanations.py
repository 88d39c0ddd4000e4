"""Why a resource is on its node, and why not on another one, in a sentence for people (RB-35)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rebalanser.core.allocation.bounds import MILLION, Capacities, millionths
from rebalanser.core.allocation.reasons import tags_in_words
from rebalanser.core.group.types import SpreadOver

if TYPE_CHECKING:
    from rebalanser.core.allocation.solver import Allocation
    from rebalanser.core.group.problem import AllocationProblem
    from rebalanser.core.group.types import NodeId, Resource, ResourceSpec

DRAINED = "it is drained"
NO_BETTER = "it could own it, and the balance would be no better"
HELD_BACK = "it could own it, and the balance would be better: the policy holds such moves back"
TOO_LITTLE = "it could own it, and the balance would be better by too little to move anything"
_ABLE = frozenset({NO_BETTER, HELD_BACK, TOO_LITTLE})


def why_there(problem: AllocationProblem, allocation: Allocation, name: Resource, owner: NodeId) -> str:
    """Return why an allocation gives a resource to its owner (RB-35)."""
    if name in problem.pinned:
        return f"it is pinned to {problem.resources[name].pin}"
    elsewhere = why_not_there(problem, allocation, name, owner)
    able = [reason for reason in elsewhere.values() if reason in _ABLE]
    if not able:
        return "no other node may own it"
    move = next((move for move in allocation.certificate.moves if move.resource == name), None)
    if move is not None:
        return f"it moves there: {move.reason}"
    if all(reason == NO_BETTER for reason in able):
        return "it was there before, and the balance would be no better elsewhere"
    return "it was there before, and the balance is good enough for the policy"


def why_not_there(
    problem: AllocationProblem, allocation: Allocation, name: Resource, owner: NodeId | None
) -> dict[NodeId, str]:
    """Return for each node but the owner why an allocation does not give it a resource (RB-35)."""
    obstacles = _obstacles(problem, allocation, name)
    amounts = Capacities.of(problem.nodes).amounts
    weight, loads = millionths(problem.resources[name].weight), _in_millionths(allocation)
    here = loads[owner] / amounts[owner] if owner in loads and owner in amounts and amounts[owner] else 0.0
    reasons = dict.fromkeys(problem.drained, DRAINED) | obstacles
    for node in problem.nodes.keys() - reasons.keys():
        if owner is None:
            reasons[node] = "it could own it once others make room"
        elif (loads[node] + weight) / amounts[node] >= here:
            reasons[node] = NO_BETTER
        else:
            reasons[node] = HELD_BACK if allocation.certificate.improvable else TOO_LITTLE
    return {node: reasons[node] for node in sorted(reasons) if node != owner}


def _in_millionths(allocation: Allocation) -> dict[NodeId, int]:
    return {node: round(load * MILLION) for node, load in allocation.certificate.loads.items()}


def _obstacles(problem: AllocationProblem, allocation: Allocation, name: Resource) -> dict[NodeId, str]:
    """Return the nodes that can't own a resource beside what they are to own, and the constraint of each."""
    spec, shares = problem.resources[name], allocation.shares
    pin, refused = problem.pinned.get(name), problem.refused.get(name, frozenset())
    limits, loads = Capacities.of(problem.nodes).limits, _in_millionths(allocation)
    weight, siblings = millionths(spec.weight), _sites_of_siblings(problem, allocation, spec)
    by_zone = problem.policy.spread_over is SpreadOver.ZONE
    obstacles: dict[NodeId, str] = {}
    for node, member in problem.nodes.items():
        load = loads[node] - (weight if name in shares[node] else 0)
        limit = limits.get(node)
        if pin is not None and node != pin:
            obstacles[node] = f"it is pinned to {spec.pin}"
        elif node in refused:
            obstacles[node] = "it has released it"
        elif missing := spec.needs - member.tags:
            obstacles[node] = f"it lacks the {tags_in_words(missing)}"
        elif limit is not None and weight > limit:
            obstacles[node] = f"its capacity is below the weight of {spec.weight:g}"
        elif limit is not None and load + weight > limit:
            obstacles[node] = f"it has no room for the weight of {spec.weight:g}"
        elif (member.zone if by_zone else node) in siblings:
            where = "in its zone" if by_zone else "there"
            obstacles[node] = f"another one of the spread {spec.spread} is {where}"
    return obstacles


def _sites_of_siblings(
    problem: AllocationProblem, allocation: Allocation, spec: ResourceSpec
) -> frozenset[str]:
    """Return the nodes, or the zones, that have another resource of the same spread."""
    if spec.spread is None:
        return frozenset()
    resources = problem.resources
    siblings = {each for each in problem.special_resources if resources[each].spread == spec.spread} - {
        spec.resource
    }
    nodes = (node for node, share in allocation.shares.items() if not siblings.isdisjoint(share))
    if problem.policy.spread_over is SpreadOver.ZONE:
        return frozenset(problem.nodes[node].zone for node in nodes)
    return frozenset(nodes)
