"""The balanced allocation against two optima that share no code with it.

Small cases are compared with every assignment there is, middle ones with a minimum-cost flow. Both take the
sum of the squared loads as the measure of imbalance, and count moves by their definition: a resource that
has a holder, the smallest live node that had it, and is now on another node.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebalanser.core.allocation import balanced, minimum_moves, moves
from rebalanser.core.allocation.placement import measured as effort
from support.allocation_problems import allocate

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping


@dataclass(frozen=True)
class Case:
    nodes: frozenset[str]
    resources: frozenset[str]
    previous: Mapping[str, tuple[str, ...]]
    pinned: Mapping[str, str]
    refused: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def allocation(self) -> Mapping[str, Collection[str]]:
        if self.refused:
            return allocate(self.nodes, self.resources, self.previous, self.pinned, self.refused)
        return balanced(self.nodes, self.resources, self.previous, self.pinned)

    def minimum(self) -> int:
        if self.refused:
            spent = effort(self.allocation(), self.resources, self.previous, self.pinned, self.refused)
            return spent.least_moves
        return minimum_moves(self.nodes, self.resources, self.previous, self.pinned)

    def open_to(self, name: str) -> list[str]:
        pin = self.pinned.get(name)
        willing = self.nodes - self.refused.get(name, frozenset())
        return sorted(node for node in willing if pin in {None, node})

    def holder(self, name: str) -> str | None:
        return min((node for node in self.nodes if name in self.previous.get(node, ())), default=None)

    def is_moved_to(self, name: str, node: str) -> bool:
        return self.holder(name) not in {None, node}

    @property
    def placeable(self) -> list[str]:
        return sorted(name for name in self.resources if self.open_to(name))


@dataclass(frozen=True, order=True)
class Price:
    squares: int
    moves: int


def price_of(case: Case, owners: Mapping[str, str]) -> Price:
    return Price(
        squares=sum(load**2 for load in Counter(owners.values()).values()),
        moves=sum(case.is_moved_to(name, node) for name, node in owners.items()),
    )


def owners_in(allocation: Mapping[str, Collection[str]]) -> dict[str, str]:
    return {name: node for node, names in allocation.items() for name in names}


@st.composite
def cases(draw: st.DrawFn, max_nodes: int, max_resources: int, with_pins: bool) -> Case:
    """Live nodes are the first of the ids, resources the first of the names: the others are gone.

    Hypothesis draws the seed only: drawn choice by choice, most cases come out with no pin and no move.
    """
    random = draw(st.randoms(use_true_random=True))
    ids = [f"n{number:02}" for number in range(max_nodes + 1)]
    names = [f"r{number:02}" for number in range(max_resources + 2)]
    nodes, resources = random.randint(1, max_nodes), random.randint(0, max_resources)
    # Few holders and few targets of pins make the uneven nodes on which a wrong choice shows.
    old = random.sample(ids, random.randint(1, min(5, len(ids))))
    had = [random.choice([None, *old]) for _ in names]
    previous = {node: [name for name, at in zip(names, had, strict=True) if at == node] for node in old}
    for _ in range(random.randint(0, 3)):
        previous[random.choice(old)].append(random.choice(names))
    targets = random.choices(ids[: nodes + 1], k=random.randint(1, 5)) if with_pins else []
    pins = {name: random.choice([None, None, None, *targets]) for name in names}
    return Case(
        nodes=frozenset(ids[:nodes]),
        resources=frozenset(names[:resources]),
        previous={node: tuple(held) for node, held in previous.items()},
        pinned={name: target for name, target in pins.items() if target is not None},
    )


def every_assignment(case: Case) -> Iterator[dict[str, str]]:
    names = case.placeable
    choices = [case.open_to(name) for name in names]
    for owners in product(*choices):
        yield dict(zip(names, owners, strict=True))


def spread(case: Case, owners: Mapping[str, str]) -> int:
    loads = Counter(owners.values())
    return max(loads[node] for node in case.nodes) - min(loads[node] for node in case.nodes)


def assert_is_an_optimum_of_all(case: Case) -> None:
    allocation = case.allocation()
    owners = owners_in(allocation)
    assignments = list(every_assignment(case))
    best = min(price_of(case, assignment) for assignment in assignments)

    assert allocation.keys() == case.nodes
    assert sorted(name for names in allocation.values() for name in names) == case.placeable
    assert owners in assignments
    assert price_of(case, owners) == best
    if not case.refused:
        assert spread(case, owners) == min(spread(case, assignment) for assignment in assignments)
    assert moves(case.previous, allocation) == case.minimum() == best.moves


@pytest.mark.rule("RB-2", "RB-10")
@given(cases(max_nodes=4, max_resources=5, with_pins=False))
@settings(max_examples=6 * settings().max_examples)
def test_no_assignment_is_more_even_or_as_even_with_fewer_moves(case: Case) -> None:
    assert_is_an_optimum_of_all(case)


@pytest.mark.rule("RB-10", "RB-29")
@given(cases(max_nodes=4, max_resources=5, with_pins=True))
@settings(max_examples=6 * settings().max_examples)
def test_no_assignment_that_honours_the_pins_is_more_even_or_as_even_with_fewer_moves(case: Case) -> None:
    assert_is_an_optimum_of_all(case)


@st.composite
def refusals(draw: st.DrawFn, max_nodes: int, max_resources: int) -> Case:
    case, random = (
        draw(cases(max_nodes, max_resources, with_pins=True)),
        draw(st.randoms(use_true_random=True)),
    )
    ids = sorted(case.nodes | case.previous.keys())
    some = [frozenset(random.sample(ids, random.randint(1, len(ids)))) for _ in range(3)]
    refused = {name: random.choice([None, *some]) for name in sorted(case.resources)}
    return replace(case, refused={name: nodes for name, nodes in refused.items() if nodes is not None})


@pytest.mark.rule("RB-2", "RB-10", "RB-29")
@given(refusals(max_nodes=4, max_resources=5))
@settings(max_examples=6 * settings().max_examples)
def test_no_assignment_without_what_nodes_refuse_is_better(case: Case) -> None:
    assert_is_an_optimum_of_all(case)
    allocation = case.allocation()
    if case.refused:
        again = allocate(case.nodes, case.resources, allocation, case.pinned, case.refused)
        assert again == allocation
        assert all(again[node] is allocation[node] for node in again), "what stays is the same set"


def cheapest_flow(case: Case) -> Price:
    """One unit flows from each resource to the sink; a node's n-th unit costs what it adds to the squares."""
    names = case.placeable
    one_square = len(names) + 1  # dearer than moving everything, so that evenness comes first
    graph = nx.MultiDiGraph()
    graph.add_node("sink", demand=len(names))
    for name in names:
        source, holder = ("resource", name), case.holder(name)
        graph.add_node(source, demand=-1)
        if name in case.pinned:
            graph.add_edge(source, ("node", case.pinned[name]), capacity=1, weight=0)
            continue
        if name in case.refused:
            for node in case.open_to(name):
                graph.add_edge(source, ("node", node), capacity=1, weight=int(case.is_moved_to(name, node)))
            continue
        if holder is not None:
            graph.add_edge(source, ("node", holder), capacity=1, weight=0)
        graph.add_edge(source, "anywhere", capacity=1, weight=int(holder is not None))
    for node in case.nodes:
        graph.add_edge("anywhere", ("node", node), capacity=len(names), weight=0)
        for load in range(len(names)):
            graph.add_edge(("node", node), "sink", capacity=1, weight=one_square * (2 * load + 1))
    squares, free_moves = divmod(nx.min_cost_flow_cost(graph), one_square)
    pin_moves = sum(case.is_moved_to(name, case.pinned[name]) for name in names if name in case.pinned)
    return Price(squares, free_moves + pin_moves)


@pytest.mark.full_size
@pytest.mark.rule("RB-2", "RB-10")
@given(cases(max_nodes=12, max_resources=60, with_pins=False))
@settings(max_examples=2 * settings().max_examples)
def test_costs_as_much_as_the_cheapest_flow(case: Case) -> None:
    best = cheapest_flow(case)
    assert price_of(case, owners_in(case.allocation())) == best
    assert case.minimum() == best.moves


@pytest.mark.full_size
@pytest.mark.rule("RB-10", "RB-29")
@given(cases(max_nodes=12, max_resources=60, with_pins=True))
@settings(max_examples=2 * settings().max_examples)
def test_costs_as_much_as_the_cheapest_flow_that_honours_the_pins(case: Case) -> None:
    best = cheapest_flow(case)
    assert price_of(case, owners_in(case.allocation())) == best
    assert case.minimum() == best.moves


@pytest.mark.full_size
@pytest.mark.rule("RB-2", "RB-10", "RB-29")
@given(refusals(max_nodes=12, max_resources=60))
@settings(max_examples=2 * settings().max_examples)
def test_costs_as_much_as_the_cheapest_flow_without_what_nodes_refuse(case: Case) -> None:
    best = cheapest_flow(case)
    assert price_of(case, owners_in(case.allocation())) == best
    assert case.minimum() == best.moves
