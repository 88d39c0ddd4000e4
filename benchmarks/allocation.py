"""Processor time of allocations: of everything from scratch, and after one node or resource more or less.

``make bench-allocation`` prints one table. Each number is the least of several runs.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random

from rich.console import Console
from rich.table import Table

from rebalanser.core.allocation import Allocation, AllocationProblem, solve
from rebalanser.core.group import Member, ResourceSpec
from rebalanser.core.group.types import Policy, SpreadOver

TAGS = (frozenset[str](), frozenset({"gpu"}), frozenset({"ssd"}), frozenset({"gpu", "ssd"}))
NEEDS = (frozenset[str](), frozenset[str](), frozenset[str](), frozenset({"gpu"}), frozenset({"ssd"}))
ZONES = ("east", "north", "west")
KINDS: dict[str, Callable[[str, int, Random], ResourceSpec]] = {
    "plain": lambda name, _, __: ResourceSpec(name),
    "weighted": lambda name, _, random: ResourceSpec(name, weight=random.uniform(0.5, 2.0)),
    "weighted and tagged": lambda name, number, random: ResourceSpec(
        name, weight=random.uniform(0.5, 2.0), needs=NEEDS[number % len(NEEDS)]
    ),
    "heavy-tailed": lambda name, _, random: ResourceSpec(name, weight=random.lognormvariate(0.0, 2.0)),
    "capacities 90 % full": lambda name, _, random: ResourceSpec(name, weight=random.uniform(0.5, 2.0)),
    "capacities 110 % full": lambda name, _, random: ResourceSpec(name, weight=random.uniform(0.5, 2.0)),
    "three of each over zones": lambda name, number, random: ResourceSpec(
        name, weight=random.uniform(0.5, 2.0), spread=f"s{number // 3}"
    ),
}


def stated(kind: str, nodes: int, resources: int) -> AllocationProblem:
    """Return a problem of this kind that nothing is known of."""
    random = Random(kind)
    full = {"capacities 90 % full": 0.9, "capacities 110 % full": 1.1}.get(kind)
    capacity = 1.25 * resources / nodes / full if full else None
    members = [
        Member(f"node-{i:05}", f"n{i}", capacity=capacity, tags=TAGS[i % 4], zone=ZONES[i % 3])
        for i in range(nodes)
    ]
    specs = [KINDS[kind](f"resource-{i:06}", i, random) for i in range(resources)]
    problem = AllocationProblem(
        {member.node: member for member in members},
        {spec.resource: spec for spec in specs},
        {},
        Policy(spread_over=SpreadOver.ZONE),
    )
    return replace(problem, special=problem.special_resources)


def changes(problem: AllocationProblem) -> dict[str, AllocationProblem]:
    """Return the problems that follow a change of one node or resource."""
    last = max(problem.nodes)
    fewer = {node: member for node, member in problem.nodes.items() if node != last}
    like = problem.nodes[last]
    more = problem.nodes | {"node-new": replace(like, node="node-new", label="new")}
    return {
        "nothing": problem,
        "a node more": replace(problem, nodes=more),
        "a node less": replace(problem, nodes=fewer),
    }


def timed(problem: AllocationProblem, repeat: int) -> tuple[Allocation, float]:
    """Return the allocation, and the milliseconds of processor time that it takes at least."""
    best = float("inf")
    for _ in range(repeat):
        gc.collect()
        began = time.process_time()
        allocation = solve(problem)
        best = min(best, time.process_time() - began)
    return allocation, best * 1e3


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--resources", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    table = Table("resources", "change", "ms", "moves", "largest load", "bound", "unplaced")
    for kind in KINDS:
        problem = stated(kind, options.nodes, options.resources)
        first, spent_ms = timed(problem, options.repeat)
        rows = [("from scratch", first, spent_ms)]
        settled = replace(
            problem, previous=dict(first.shares), unsettled=frozenset(first.certificate.unplaced)
        )
        for change, changed in changes(settled).items():
            rows.append((change, *timed(changed, options.repeat)))
        for change, allocation, spent_ms in rows:
            certificate = allocation.certificate
            moves = sum(move.source is not None for move in certificate.moves)
            table.add_row(
                kind,
                change,
                f"{spent_ms:,.1f}",
                f"{moves:,}",
                f"{certificate.largest:,.4g}",
                f"{certificate.bound:,.4g}",
                f"{len(certificate.unplaced):,}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
