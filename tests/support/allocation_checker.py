"""An independent check of allocations and their certificates: it shares no code with what computes them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rebalanser.core.group.types import SpreadOver

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rebalanser.core.allocation import Allocation, AllocationProblem

MILLION = 1_000_000


def check(problem: AllocationProblem, allocation: Allocation) -> None:
    """Raise AssertionError if an allocation breaks a rule, or its certificate is wrong."""
    shares = allocation.shares
    assert shares.keys() == problem.nodes.keys(), "RB-2: a share for each node that may own resources"
    owners = {name: node for node, share in shares.items() for name in share}
    assert len(owners) == sum(map(len, shares.values())), "RB-2: a resource is on two nodes"
    assert owners.keys() <= problem.resources.keys(), "RB-7: a resource is placed that is not there"
    for node, share in shares.items():
        before = problem.previous.get(node)
        assert share != before or share is before, "RB-45: a share that stays is the same set"
    check_constraints(problem, owners)
    _check_unplaced(problem, allocation, owners)
    _check_moves(problem, allocation, owners)
    _check_balance(problem, allocation, owners)


def _weight(problem: AllocationProblem, name: str) -> int:
    return max(1, round(problem.resources[name].weight * MILLION))


def _site(problem: AllocationProblem, node: str) -> str:
    return problem.nodes[node].zone if problem.policy.spread_over == "zone" else node


def _may_own(problem: AllocationProblem, name: str, node: str) -> bool:
    """Return True if a resource may be on a node, apart from other resources there."""
    return (
        problem.pinned.get(name, node) == node
        and node not in problem.refused.get(name, ())
        and problem.resources[name].needs <= problem.nodes[node].tags
    )


def _loads(problem: AllocationProblem, owners: Mapping[str, str]) -> Counter[str]:
    loads = Counter(dict.fromkeys(problem.nodes, 0))
    for name, node in owners.items():
        loads[node] += _weight(problem, name)
    return loads


def _limit(problem: AllocationProblem, node: str) -> float:
    capacity = problem.nodes[node].capacity
    return float("inf") if capacity is None else round(capacity * MILLION)


def check_constraints(problem: AllocationProblem, owners: Mapping[str, str]) -> None:
    """Raise AssertionError if an owner breaks a hard constraint."""
    for name, node in owners.items():
        assert problem.pinned.get(name, node) == node, f"RB-29: {name} is not on the node of its pin"
        assert _may_own(problem, name, node), f"RB-37: {name} may not be on {node}"
    for node, load in _loads(problem, owners).items():
        assert load <= _limit(problem, node), f"RB-37: {node} has more than its capacity"
    spreads = Counter(
        (problem.resources[name].spread, _site(problem, node))
        for name, node in owners.items()
        if problem.resources[name].spread is not None
    )
    assert all(count == 1 for count in spreads.values()), f"RB-37: together: {spreads.most_common(1)}"


def _check_unplaced(problem: AllocationProblem, allocation: Allocation, owners: Mapping[str, str]) -> None:
    unplaced = allocation.certificate.unplaced
    assert unplaced.keys() == problem.resources.keys() - owners.keys(), "RB-37: a reason for each"
    for why in unplaced.values():
        assert why.strip(".\n") == why != "", f"RB-35: {why!r} is no sentence"
    check_nothing_fits(problem, owners)


def check_nothing_fits(problem: AllocationProblem, owners: Mapping[str, str]) -> None:
    """Raise AssertionError if what has no owner could be placed while all others stay."""
    loads = _loads(problem, owners)
    taken = {(problem.resources[name].spread, _site(problem, node)) for name, node in owners.items()}
    for name, node in problem.pinned.items():
        if node in problem.kept and problem.policy.spread_over is SpreadOver.ZONE:
            taken.add((problem.resources[name].spread, problem.kept[node].zone))
    for name in problem.resources.keys() - owners.keys():
        weight, spread = _weight(problem, name), problem.resources[name].spread
        for node in problem.nodes:
            fits = loads[node] + weight <= _limit(problem, node)
            apart = spread is None or (spread, _site(problem, node)) not in taken
            assert not (_may_own(problem, name, node) and fits and apart), f"RB-38: {name} fits on {node}"


def _check_moves(problem: AllocationProblem, allocation: Allocation, owners: Mapping[str, str]) -> None:
    before: dict[str, str] = {}
    for node in sorted(problem.previous, key=lambda node: (node not in problem.nodes, node)):
        for name in problem.previous[node]:
            before.setdefault(name, node)
    arrived = {
        name: node for name, node in owners.items() if name not in problem.previous.get(node, frozenset())
    }
    moved = {name: (before.get(name), node) for name, node in arrived.items()}
    told = {move.resource: (move.source, move.target) for move in allocation.certificate.moves}
    assert told == moved, "RB-38: the certificate names other moves"
    improvements = {move.resource for move in allocation.certificate.moves if move.reason == "rebalance"}
    for name in improvements:
        source = before[name]
        assert source in problem.nodes, f"RB-38: the node of {name} is gone"
        assert _may_own(problem, name, source), f"RB-38: {name} had to move"
    limits = [each for each in (problem.moves_left, problem.policy.max_moves) if each is not None]
    assert len(improvements) <= min(limits, default=len(improvements)), "RB-38: more moves than allowed"
    assert not improvements & problem.resting, "RB-38: a resource moved that is to rest"
    stay = len(moved) == len(improvements) and before.keys() == owners.keys()
    if problem.policy.imbalance_band and improvements and stay:
        band = 1 + problem.policy.imbalance_band
        largest = largest_load(problem, before)
        assert largest > allocation.certificate.bound * band, "RB-38: moved within the band"


def _capacities(problem: AllocationProblem) -> dict[str, int]:
    given = {n: round(m.capacity * MILLION) for n, m in problem.nodes.items() if m.capacity is not None}
    return dict.fromkeys(problem.nodes, max(given.values(), default=0) or MILLION) | given


def largest_load(problem: AllocationProblem, owners: Mapping[str, str]) -> float:
    """Return the largest load per capacity of any node."""
    capacities, loads = _capacities(problem), _loads(problem, owners)
    return max((load / capacities[n] for n, load in loads.items() if capacities[n]), default=0.0)


def _check_balance(problem: AllocationProblem, allocation: Allocation, owners: Mapping[str, str]) -> None:
    certificate, capacities = allocation.certificate, _capacities(problem)
    loads, largest = _loads(problem, owners), largest_load(problem, owners)
    assert certificate.largest == largest, "RB-36: the certificate states another largest load"
    assert certificate.loads == {n: load / MILLION for n, load in loads.items()}, "RB-36: other loads"
    assert certificate.bound <= largest, "RB-36: the bound is above the largest load"
    capacity = sum(capacities.values())
    if not owners or not capacity:
        return
    heaviest = max(_weight(problem, name) for name in owners)
    plain_bound = max(sum(loads.values()) / capacity, heaviest / max(capacities.values()))
    assert certificate.bound >= plain_bound, "RB-36: the bound is below the mean or the heaviest resource"
    specs = problem.resources.values()
    policy_limits = problem.policy.max_moves, problem.moves_left
    if any(spec.needs or spec.spread is not None for spec in specs) or problem.resting:
        return
    if problem.pinned or problem.refused or certificate.unplaced or policy_limits != (None, None):
        return
    if largest > 1 and any(member.capacity is not None for member in problem.nodes.values()):
        return  # full nodes may keep others from a better balance
    mean = capacity / len(capacities)
    band = 1 + max(problem.policy.imbalance_band, 0.01)
    allowed = max(certificate.bound * band, certificate.bound + heaviest / mean)
    assert largest <= allowed, f"RB-36: {largest} is more than {allowed}, for a bound of {certificate.bound}"
    alike = len({spec.weight for spec in specs}) == len(set(capacities.values())) == 1
    if alike and not problem.policy.imbalance_band:
        counts = [len(share) for share in allocation.shares.values()]
        assert max(counts) - min(counts) <= 1, "RB-2: neither floor nor ceil"
