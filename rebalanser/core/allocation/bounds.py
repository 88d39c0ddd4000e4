"""Amounts as integers, and the lower bound of the largest load; see ``rebalanser.core.allocation``.

Weights and capacities are counted in millionths, rounded: so sums don't depend on their order, and ten times
0.1 is 1.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from rebalanser.core.group.problem import AllocationProblem
    from rebalanser.core.group.types import Member, NodeId, Resource

MILLION: Final = 1_000_000
MAX_WEIGHT: Final = 1e15
"""Maximum weight and capacity; more counts as this much."""
MAX_SETS: Final = 64
"""Maximum sets of nodes for each of which a lower bound is computed, beside single nodes."""


def millionths(amount: float) -> int:
    """Return a weight in millionths, at least one."""
    return round(min(amount, MAX_WEIGHT) * MILLION) or 1


@dataclass(frozen=True, slots=True)
class Capacities:
    """Divisors and limits of loads, in millionths."""

    amounts: Mapping[NodeId, int]
    """The capacity of each node; where it has none the largest of any, or 1 if none has one."""
    limits: Mapping[NodeId, int]
    """The capacity of each node that has one."""

    @classmethod
    def of(cls, nodes: Mapping[NodeId, Member]) -> Capacities:
        """Return the capacities of nodes."""
        limits = {
            node: round(min(member.capacity, MAX_WEIGHT) * MILLION)
            for node, member in nodes.items()
            if member.capacity is not None
        }
        return cls(dict.fromkeys(nodes, max(limits.values(), default=0) or MILLION) | limits, limits)


def lower_bound(problem: AllocationProblem, unplaced: Collection[Resource]) -> float:
    """Return a load per capacity that no allocation of all but ``unplaced`` can be below on every node.

    It is the largest of these, for all nodes and for each set of nodes to which some resources are kept: the
    weight of what may be on no other nodes, per capacity of these, or, once those with a limit are full, per
    capacity of the others; and the heaviest resource on the node with the largest capacity that it may be on.
    If all weights and all capacities are equal, whole resources are counted.
    """
    capacities = Capacities.of(problem.nodes)
    amounts, limits = capacities.amounts, capacities.limits
    live = sorted(problem.nodes)
    bits = {node: 1 << i for i, node in enumerate(live)}
    weights, heaviest = _weights_of_sets(problem, frozenset(unplaced), limits)
    masks = {nodes: sum(bits[node] for node in nodes) for nodes in weights}
    several = sorted(
        (nodes for nodes in weights if 1 < len(nodes) < len(live)),
        key=lambda nodes: (-weights[nodes], masks[nodes]),
    )
    single = (nodes for nodes in weights if len(nodes) == 1 < len(live))
    unit = _unit(problem) if len(set(amounts.values())) == 1 else 0
    best = 0.0
    for nodes in (frozenset(live), *several[:MAX_SETS], *single):
        outside = ~sum(bits[node] for node in nodes)
        total = (
            weights[nodes]
            if len(nodes) == 1
            else sum(weight for each, weight in weights.items() if not masks[each] & outside)
        )
        whole = -(-total // (unit * len(nodes))) * unit * len(nodes) if unit else total
        best = max(best, _quotient(whole, sum(amounts[node] for node in nodes)))
        full = nodes & limits.keys()
        rest = total - sum(limits[node] for node in full)
        best = max(best, _quotient(rest, sum(amounts[node] for node in nodes - full)))
    for nodes, weight in heaviest.items():
        largest = max((amounts[node] for node in nodes), default=0)
        best = max(best, _quotient(weight, largest))
    return best


def _quotient(load: int, capacity: int) -> float:
    return load / capacity if capacity else 0.0


def _unit(problem: AllocationProblem) -> int:
    """Return the weight that all resources have; 0 if weights differ."""
    special, resources = problem.special_resources, problem.resources
    weights = {resources[name].weight for name in special}
    if len(special) < len(resources):
        weights.add(1.0)
    return millionths(weights.pop()) if len(weights) == 1 else 0


def _weights_of_sets(
    problem: AllocationProblem, unplaced: frozenset[Resource], limits: Mapping[NodeId, int]
) -> tuple[dict[frozenset[NodeId], int], dict[frozenset[NodeId], int]]:
    """Return the sum of the weights of the resources that may be on each set of nodes, and the greatest."""
    total: dict[frozenset[NodeId], int] = defaultdict(int)
    heaviest: dict[frozenset[NodeId], int] = defaultdict(int)
    special, resources, nodes = problem.special_resources, problem.resources, problem.nodes
    bound = {name for name in (*problem.pinned, *problem.refused) if name in resources}
    steps = sorted(set(limits.values()))
    open_to: dict[tuple[frozenset[str], int], frozenset[NodeId]] = {}

    def open_nodes(needs: frozenset[str], weight: int) -> frozenset[NodeId]:
        key = needs, bisect_left(steps, weight)
        found = open_to.get(key)
        if found is None:
            found = open_to[key] = frozenset(
                node
                for node, member in nodes.items()
                if needs <= member.tags and limits.get(node, weight) >= weight
            )
        return found

    looked_at = special | bound if bound else special
    for name in looked_at:
        if name in unplaced:
            continue
        spec = resources[name]
        weight = millionths(spec.weight)
        able = open_nodes(spec.needs, weight)
        if name in bound:
            pin = problem.pinned.get(name)
            able = able - problem.refused.get(name, frozenset())
            able = able if pin is None else able & {pin}
        total[able] += weight
        if weight > heaviest[able]:
            heaviest[able] = weight
    others = len(resources) - len(looked_at) - len(unplaced - looked_at)
    if others:
        able = open_nodes(frozenset(), MILLION)
        total[able] += others * MILLION
        heaviest[able] = max(heaviest[able], MILLION)
    return total, heaviest
