"""Allocation problems at random, and short ways to state and solve one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rebalanser.core.allocation import Allocation, AllocationProblem, solve
from rebalanser.core.group import Member, ResourceSpec
from rebalanser.core.group.types import Policy, SpreadOver
from support.allocation_checker import check

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from random import Random

TAGS = ("fast", "gpu", "ssd")


def problem(
    nodes: Iterable[str | Member],
    resources: Iterable[str | ResourceSpec],
    previous: Mapping[str, Collection[str]] | None = None,
    pinned: Mapping[str, str] | None = None,
    refused: Mapping[str, frozenset[str]] | None = None,
    unsettled: frozenset[str] | None = None,
    policy: Policy | None = None,
) -> AllocationProblem:
    """A problem; a node or resource that is only named has nothing special."""
    members = [Member(node, node) if isinstance(node, str) else node for node in nodes]
    specs = [ResourceSpec(name) if isinstance(name, str) else name for name in resources]
    return AllocationProblem(
        {member.node: member for member in members},
        {spec.resource: spec for spec in specs},
        {node: frozenset(names) for node, names in (previous or {}).items()},
        policy or Policy(),
        pinned or {},
        refused or {},
        unsettled=unsettled,
    )


def solved(stated: AllocationProblem) -> Allocation:
    """The allocation of a problem, checked."""
    allocation = solve(stated)
    check(stated, allocation)
    return allocation


def allocate(
    nodes: Iterable[str],
    resources: Iterable[str],
    previous: Mapping[str, Collection[str]],
    pinned: Mapping[str, str] | None = None,
    refused: Mapping[str, frozenset[str]] | None = None,
    unsettled: frozenset[str] | None = None,
) -> Mapping[str, frozenset[str]]:
    """The shares of a plain problem, checked."""
    return solved(problem(nodes, resources, previous, pinned, refused, unsettled)).shares


def fed_back(stated: AllocationProblem, allocation: Allocation) -> AllocationProblem:
    """The same problem once the allocation holds."""
    return replace(stated, previous=dict(allocation.shares), unsettled=None)


def random_problem(random: Random, max_nodes: int = 6, max_resources: int = 14) -> AllocationProblem:
    """A small problem with some of everything."""
    with_capacity, with_tags, with_spread = (random.random() < 0.5 for _ in range(3))
    weights = random.choice([(1.0,), (1.0, 2.0, 5.0), (0.1, 0.3, 2.7, 9.0)])
    ids = [f"n{number}" for number in range(random.randint(1, max_nodes) + 1)]
    members = [
        Member(
            node,
            node.upper(),
            capacity=random.choice([None, 3.0, 8.0, 20.0]) if with_capacity else None,
            tags=frozenset(random.sample(TAGS, random.randint(0, 3))) if with_tags else frozenset(),
            zone=random.choice(["", "a", "b"]),
        )
        for node in ids[:-1]
    ]
    names = [f"r{number:02}" for number in range(random.randint(0, max_resources) + 2)]
    specs = [
        ResourceSpec(
            name,
            weight=random.choice(weights),
            needs=frozenset(random.sample(TAGS, random.choice([0, 0, 1, 2]))) if with_tags else frozenset(),
            spread=random.choice([None, None, "x", "y"]) if with_spread else None,
        )
        for name in names[:-2]
    ]
    previous: dict[str, set[str]] = {}
    for name in names:
        if random.random() < 0.7:
            previous.setdefault(random.choice(ids), set()).add(name)
    few = random.choice([0.0, 0.0, 0.15])
    return replace(
        problem(
            members,
            specs,
            previous,
            {name: random.choice(ids) for name in names if random.random() < few},
            {name: frozenset(random.sample(ids, 2)) for name in names if random.random() < few},
            policy=Policy(
                spread_over=random.choice(list(SpreadOver)),
                imbalance_band=random.choice([0.0, 0.0, 0.2]),
                max_moves=random.choice([None, None, 0, 2]),
            ),
        ),
        resting=frozenset(name for name in names if random.random() < few),
        moves_left=random.choice([None, None, None, 1]),
    )
