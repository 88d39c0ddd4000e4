"""Which tasks may be collected: whole components of complete tasks, and nothing else (SK-14)."""

from __future__ import annotations

from itertools import pairwise

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebalanser.tasks.collection import Components

TASKS = [f"{number:040x}" for number in range(12)]
GRAPHS = st.lists(
    st.tuples(st.sampled_from(TASKS), st.lists(st.sampled_from(TASKS), max_size=3)), max_size=15
)


@pytest.mark.rule("SK-14")
@given(GRAPHS, st.sets(st.sampled_from(TASKS)))
def test_just_the_whole_components_of_what_may_go_are_collected(
    edges: list[tuple[str, list[str]]], may_go: set[str]
) -> None:
    graph = networkx.Graph()
    components = Components()
    for task, after in edges:
        components.add(task, after)
        graph.add_edges_from((task, other) for other in after)
    for task in sorted(may_go):
        components.allow(task, (0, 1))
    expected = {frozenset(part) for part in networkx.connected_components(graph) if part <= may_go}
    assert {frozenset(part) for part in components.whole()} == expected
    assert {task for task in TASKS if task in components} == set(graph.nodes)


def test_a_long_chain_takes_no_deep_recursion() -> None:
    components = Components()
    chain = [f"{number:040x}" for number in range(50_000)]
    for earlier, later in pairwise(chain):
        components.add(later, [earlier])
    for task in chain:
        components.allow(task, (0, 1))
    (whole,) = components.whole()
    assert len(whole) == len(chain)
