"""One problem in, one allocation with its certificate out; see ``rebalanser.core.allocation``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from rebalanser.core.allocation.bounds import MILLION, Capacities, lower_bound, millionths
from rebalanser.core.allocation.constrained import Solution, allocate_constrained
from rebalanser.core.allocation.placement import measured, plain_shares
from rebalanser.core.allocation.reasons import why_unplaced

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rebalanser.core.group.problem import AllocationProblem
    from rebalanser.core.group.types import Effort, NodeId, Resource


class MoveReason(StrEnum):
    """Reason why a resource is on another node than before."""

    NEW = "it had no node"
    GONE = "its node is gone"
    DRAINED = "its node is drained"
    PINNED = "it is pinned"
    RELEASED = "its node has released it"
    CONSTRAINT = "its node does not meet its needs"
    ROOM = "capacity or spread"
    """It made room for another one, or its node has too much, or another resource of its spread."""
    REBALANCE = "rebalance"
    """Only the balance improves; the policy limits these moves (RB-38)."""


@dataclass(frozen=True, slots=True)
class ResourceMove:
    """A resource that has another node than before."""

    resource: Resource
    source: NodeId | None
    """The node that had it; None if none had."""
    target: NodeId
    reason: MoveReason


def solve(problem: AllocationProblem) -> Allocation:
    """Allocate the resources of a group.

    Plain problems, in which all resources and nodes are alike, have floor or ceil on each node and fewest
    moves (RB-2, RB-10). Others are placed by weight, within capacities, tags, pins, releases and spreads
    (RB-36, RB-37), and moved for a better balance as far as the policy allows (RB-38).
    """
    if problem.is_plain:
        shares = plain_shares(
            problem.nodes.keys(),
            problem.resources,
            problem.previous,
            problem.pinned,
            problem.refused,
            problem.unsettled,
        )
        return Allocation(problem, Solution(shares), is_plain=True)
    return Allocation(problem, allocate_constrained(problem), is_plain=False)


class Allocation:
    """The share of each node; a share that stays is the very same set as before."""

    def __init__(self, problem: AllocationProblem, solution: Solution, *, is_plain: bool) -> None:
        self._problem = problem
        self.is_plain = is_plain
        """True if counts alone decided."""
        self.shares: Mapping[NodeId, frozenset[Resource]] = solution.shares
        self.certificate = Certificate(problem, solution)

    @property
    def effort(self) -> Effort | None:
        """Its moves beside the fewest possible; None if the problem is not plain: these are unknown then."""
        problem = self._problem
        if not self.is_plain:
            return None
        return measured(
            self.shares,
            problem.resources,
            problem.previous,
            problem.pinned,
            problem.refused,
            problem.unsettled,
        )


class Certificate:
    """Facts about an allocation that anybody can check: loads, their bound, moves, and what is unplaced.

    Most of it is computed on first use.
    """

    def __init__(self, problem: AllocationProblem, solution: Solution) -> None:
        self._problem = problem
        self._solution = solution

    @property
    def improvable(self) -> bool:
        """True if the balance would be better with moves that the policy does not allow now."""
        return self._solution.improvable

    @cached_property
    def loads(self) -> Mapping[NodeId, float]:
        """The sum of the weights on each node."""
        return {node: load / MILLION for node, load in self._loads.items()}

    @cached_property
    def largest(self) -> float:
        """The largest load per capacity of any node."""
        amounts = Capacities.of(self._problem.nodes).amounts
        return max((load / amounts[node] for node, load in self._loads.items() if amounts[node]), default=0.0)

    @cached_property
    def bound(self) -> float:
        """A load per capacity that no allocation of the same resources stays below on every node (RB-36)."""
        return lower_bound(self._problem, self.unplaced.keys())

    @cached_property
    def unplaced(self) -> Mapping[Resource, str]:
        """For each resource that is on no node the reason: one sentence, without a full stop (RB-37)."""
        if self._solution.unplaced:
            return self._solution.unplaced
        resources, shares = self._problem.resources, self._solution.shares
        if len(resources) == sum(map(len, shares.values())):
            return {}
        return why_unplaced(self._problem, sorted(set(resources).difference(*shares.values())))

    @cached_property
    def moves(self) -> tuple[ResourceMove, ...]:
        """The resources that have another node than before, and why, by their names (RB-38)."""
        return tuple(sorted(self._moves(), key=lambda move: move.resource))

    @property
    def improvements(self) -> frozenset[Resource]:
        """The resources that moved only for a better balance."""
        return frozenset(move.resource for move in self.moves if move.reason is MoveReason.REBALANCE)

    @cached_property
    def _loads(self) -> Mapping[NodeId, int]:
        resources, special = self._problem.resources, self._problem.special_resources
        return {
            node: MILLION * len(share)
            + sum(millionths(resources[name].weight) - MILLION for name in share & special)
            for node, share in self._solution.shares.items()
        }

    def _moves(self) -> Iterator[ResourceMove]:
        problem, shares = self._problem, self._solution.shares
        arrived: dict[Resource, NodeId] = {}
        for node, share in shares.items():
            before = problem.previous.get(node, frozenset())
            if share is not before:
                arrived.update(dict.fromkeys(share - before, node))
        sources: dict[Resource, NodeId] = {}
        for node in sorted(problem.previous, key=lambda node: (node not in problem.nodes, node)):
            if shares.get(node) is not problem.previous[node]:
                for name in problem.previous[node] & arrived.keys():
                    sources.setdefault(name, node)
        for name, target in arrived.items():
            source = sources.get(name)
            yield ResourceMove(name, source, target, self._reason(name, source))

    def _reason(self, name: Resource, source: NodeId | None) -> MoveReason:
        problem = self._problem
        if source is None:
            return MoveReason.NEW
        member = problem.nodes.get(source)
        if member is None:
            return MoveReason.DRAINED if source in problem.drained else MoveReason.GONE
        if problem.pinned.get(name, source) != source:
            return MoveReason.PINNED
        if source in problem.refused.get(name, ()):
            return MoveReason.RELEASED
        if not problem.resources[name].needs <= member.tags:
            return MoveReason.CONSTRAINT
        return MoveReason.ROOM if name in self._solution.forced else MoveReason.REBALANCE
