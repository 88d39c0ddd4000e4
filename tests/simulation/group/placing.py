"""Checks of plans where resources and nodes differ: by weight, within constraints, under a policy.

A plan is judged by the group as it really was at the revision that its leader read: resources and policy as
the registry had them, capacities, tags and zones as the hosts have them. The checks share no code with what
makes plans.

A plan is **calm** if before it every constraint held and it gives an owner to nothing that had none. Then
nothing had to move, and each move of it only improves the balance: these the policy limits (RB-38).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from simulation.group.oracle import Judged
from simulation.kernel.reports import Violation
from support.allocation_checker import MILLION, check_constraints, check_nothing_fits, largest_load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rebalanser.core.allocation import AllocationProblem
    from rebalanser.core.group.types import Group, NodeId, Plan, Policy, Resource

_EPSILON_S = 1e-4
_NEVER = float("-inf")


class PlacingWorld(Protocol):
    """The world of leaders that place by weight."""

    def problem_at(self, group: Group) -> AllocationProblem:
        """Return what a plan has to solve, as it really was when a group was read."""
        ...


class Leader(Judged, Protocol):
    """A process that may lead."""

    @property
    def world(self) -> PlacingWorld:
        """Its world."""
        ...


class PlanChecks:
    """Judges the plans of one process. All times are seconds of its own clock."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._elected_at = self._read_at = self._improved_at = _NEVER
        self._rests: dict[Resource, float] = {}
        """When each resource moved last for a better balance, while a policy had a cool-down."""
        self._improving: dict[int, frozenset[Resource]] = {}
        """The resources that each version moves for a better balance, if the policy spaces such moves."""

    def elected(self) -> None:
        """The process leads a new term: it knows nothing of what moved before."""
        self._elected_at, self._improved_at = self._leader.now, _NEVER
        self._rests.clear()
        self._improving.clear()

    def read(self, group: Group) -> None:
        """The process learned the group."""
        now, cooldown_s = self._leader.now, group.policy.cooldown_s
        self._read_at = now
        self._rests = {name: at for name, at in self._rests.items() if now < at + cooldown_s - _EPSILON_S}

    def publishes(self, plan: Plan, group: Group) -> None:
        """Judge a plan that is about to be published."""
        problem = self._leader.world.problem_at(group)
        shares = {node: plan.changed.get(node, problem.previous.get(node)) for node in plan.shares}
        owners = {name: node for node, share in shares.items() for name in share or ()}
        owned_before = {
            name: node
            for node, share in problem.previous.items()
            for name in share & problem.resources.keys()
            if node in problem.nodes
        }
        try:
            check_constraints(problem, owners)
            check_nothing_fits(problem, owners)
        except AssertionError as wrong:
            rule, _, sentence = str(wrong).partition(": ")
            raise Violation(rule, f"version {plan.version} of {self._leader.label}: {sentence}") from wrong
        if _is_calm(problem, owned_before, owners):
            moved = frozenset(name for name, node in owners.items() if owned_before[name] != node)
            wrong_move = self._wrong_move(problem, owned_before, moved)
            if wrong_move is not None:
                raise Violation("RB-38", f"version {plan.version} of {self._leader.label} {wrong_move}")
            if problem.policy.move_interval_s or problem.policy.cooldown_s:
                self._improving[plan.version] = moved

    def committed(self, version: int) -> None:
        """A version that it publishes is committed, just now."""
        moved = self._improving.pop(version, None)
        if moved:
            self._improved_at = self._leader.now
            self._rests.update(dict.fromkeys(moved, self._leader.now))

    def _wrong_move(
        self, problem: AllocationProblem, before: Mapping[Resource, NodeId], moved: frozenset[Resource]
    ) -> str | None:
        """Why the policy forbids these moves for a better balance; None if it allows them."""
        policy = problem.policy
        if not moved:
            return None
        if policy.max_moves is not None and len(moved) > policy.max_moves:
            return f"moves {len(moved)} resources for a better balance, not {policy.max_moves} at most"
        resting = sorted(moved & self._rests.keys())
        if resting:
            return f"moves {resting}, which rest"
        since_s = self._read_at - self._improved_at
        if since_s < policy.move_interval_s - _EPSILON_S:
            return f"improves the balance {since_s:.3f} s after it did last"
        since_s, quiet_s = self._read_at - self._elected_at, _quiet_s(policy)
        if since_s < quiet_s - _EPSILON_S:
            return f"improves the balance {since_s:.3f} s after its election, not {quiet_s} s"
        if policy.imbalance_band and largest_load(problem, before) <= _mean(problem, before) * (
            1 + policy.imbalance_band
        ):
            return f"moves {sorted(moved)} within the band"
        return None


def _quiet_s(policy: Policy) -> float:
    """Seconds after its election in which a leader does not improve the balance."""
    return max(policy.move_interval_s, policy.cooldown_s)


def _is_calm(
    problem: AllocationProblem, before: Mapping[Resource, NodeId], owners: Mapping[Resource, NodeId]
) -> bool:
    if before.keys() != owners.keys():
        return False
    try:
        check_constraints(problem, before)
    except AssertionError:
        return False
    return True


def _mean(problem: AllocationProblem, owners: Mapping[Resource, NodeId]) -> float:
    """The load per capacity if weights could be divided: no allocation is below it on every node."""
    given = [each.capacity for each in problem.nodes.values() if each.capacity is not None]
    capacity = max(given, default=1.0) * (len(problem.nodes) - len(given)) + sum(given)
    weight = sum(max(1, round(problem.resources[name].weight * MILLION)) for name in owners) / MILLION
    return weight / capacity if capacity else 0.0
