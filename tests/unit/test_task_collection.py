"""Which tasks may be collected: whole components of closed tasks, and nothing else (SK-14)."""

from __future__ import annotations

from itertools import pairwise

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebalanser.core.tasks.model import OPEN, Head, Status, Stored, TaskState
from rebalanser.core.tasks.retention import Components

TASKS = [f"{number:040x}" for number in range(12)]
STATUSES = st.dictionaries(st.sampled_from(TASKS), st.sampled_from(Status))
GRAPHS = st.dictionaries(st.sampled_from(TASKS), st.sets(st.sampled_from(TASKS), max_size=3))


def stored(task: str, after: tuple[str, ...] = (), status: Status = Status.COMPLETED) -> Stored:
    return Stored(Head(task, "work", "add", after=after), TaskState(status), revision=7, partition=3)


@pytest.mark.rule("SK-14", "SK-22")
@given(
    GRAPHS, st.dictionaries(st.sampled_from(TASKS), st.sampled_from(Status)), st.sets(st.sampled_from(TASKS))
)
def test_just_the_whole_components_of_closed_tasks_are_collected(
    after: dict[str, set[str]], statuses: dict[str, Status], kept: set[str]
) -> None:
    graph = networkx.Graph()
    graph.add_nodes_from(TASKS)
    components = Components()
    for task in TASKS:
        needed = tuple(sorted(after.get(task, ())))
        status = statuses.get(task, Status.WAITING)
        components.add(stored(task, needed, status), keep=task in kept)
        graph.add_edges_from((task, other) for other in needed)
    may_go = {task for task, status in statuses.items() if status not in OPEN} - kept
    expected = {frozenset(part) for part in networkx.connected_components(graph) if part <= may_go}
    found = list(components.collectable())
    assert {frozenset(part) for part in found} == expected
    assert {where for part in found for where in part.values()} <= {(3, 7)}


def test_a_long_chain_takes_no_deep_recursion() -> None:
    components = Components()
    chain = [f"{number:040x}" for number in range(50_000)]
    components.add(stored(chain[0]))
    for earlier, later in pairwise(chain):
        components.add(stored(later, (earlier,)))
    (whole,) = components.collectable()
    assert len(whole) == len(chain)
