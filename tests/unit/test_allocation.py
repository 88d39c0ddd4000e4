"""The balanced allocation by example, and what must hold of it for any input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebalanser.core.allocation import AllocationProblem, balanced, minimum_moves, moves, solve
from rebalanser.core.allocation.flow import Network
from rebalanser.core.allocation.placement import measured as effort
from rebalanser.core.group import Effort, Member
from rebalanser.core.group.types import Policy
from support.allocation_problems import allocate

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

NODES = [f"node-{number:02}" for number in range(15)]
RESOURCES = [f"resource-{number:04}" for number in range(1000)]

IDS = st.sampled_from([f"n{number}" for number in range(6)])
NAMES = st.sampled_from([f"r{number:02}" for number in range(20)])
inputs = st.fixed_dictionaries(
    {
        "nodes": st.lists(IDS),
        "resources": st.lists(NAMES),
        "previous": st.dictionaries(IDS, st.lists(NAMES, max_size=12)),
        "pinned": st.dictionaries(NAMES, IDS),
    }
)
any_input = settings(max_examples=2 * settings().max_examples)


@pytest.mark.rule("RB-2")
def test_without_nodes_nothing_is_allocated() -> None:
    assert balanced([], ["a"], {"n1": ["a"]}) == {}
    assert minimum_moves([], ["a"], {"n1": ["a"]}) == 0


@pytest.mark.rule("RB-2")
def test_without_resources_every_node_has_an_empty_share() -> None:
    assert balanced(["n2", "n1"], [], {"n1": ["a"]}) == {"n1": (), "n2": ()}


@pytest.mark.rule("RB-2")
def test_with_fewer_resources_than_nodes_the_others_have_an_empty_share() -> None:
    assert balanced(["n1", "n2", "n3"], ["a"], {"n3": ["a"]}) == {"n1": (), "n2": (), "n3": ("a",)}


@pytest.mark.rule("RB-2")
def test_a_first_allocation_deals_neighbours_by_name_to_different_nodes() -> None:
    allocation = balanced(["n2", "n1"], ["e", "d", "c", "b", "a"], {})
    assert allocation == {"n1": ("a", "c", "e"), "n2": ("b", "d")}
    assert list(allocation) == ["n1", "n2"]


@pytest.mark.rule("RB-10")
def test_the_fullest_nodes_get_one_more_whatever_their_ids() -> None:
    previous = {"n1": ["a"], "n2": ["b", "c"], "n3": ["d", "e"]}
    assert balanced(["n1", "n2", "n3"], "abcde", previous) == {
        "n1": ("a",),
        "n2": ("b", "c"),
        "n3": ("d", "e"),
    }


@pytest.mark.rule("RB-10")
def test_among_equally_full_nodes_the_smaller_ids_get_one_more() -> None:
    previous = {"n1": ["a"], "n2": ["b"], "n3": ["c"]}
    assert balanced(["n3", "n2", "n1"], "abcde", previous) == {
        "n1": ("a", "d"),
        "n2": ("b", "e"),
        "n3": ("c",),
    }


@pytest.mark.rule("RB-10")
def test_the_last_by_name_leave_an_overloaded_node() -> None:
    assert balanced(["n1", "n2"], "abcd", {"n1": ["c", "a", "d", "b"]}) == {
        "n1": ("a", "b"),
        "n2": ("c", "d"),
    }


@pytest.mark.rule("RB-10")
def test_nodes_and_resources_that_are_gone_leave_no_trace() -> None:
    previous = {"gone": ["a", "x"], "n1": ["b", "y"], "n2": ["c", "d"]}
    assert balanced(["n1", "n2"], "abcd", previous) == {"n1": ("a", "b"), "n2": ("c", "d")}


@pytest.mark.rule("RB-2", "RB-10")
def test_a_resource_on_two_nodes_stays_with_the_smallest_live_one() -> None:
    previous = {"gone": ["a"], "n2": ["a", "b"], "n1": ["a", "a"]}
    assert balanced(["n1", "n2"], "ab", previous) == {"n1": ("a",), "n2": ("b",)}
    assert moves(previous, {"n1": ("b",), "n2": ("a",)}) == 2


@pytest.mark.rule("RB-2")
def test_names_given_twice_count_once() -> None:
    assert balanced(["n1", "n1", "n2"], "aabb", {"n2": "bb"}) == {"n1": ("a",), "n2": ("b",)}


@pytest.mark.rule("RB-29")
def test_free_resources_flow_around_the_pinned_ones() -> None:
    pinned = dict.fromkeys("abcd", "n1") | {"e": "n2"}
    assert balanced(["n1", "n2", "n3"], "abcdefgh", {}, pinned) == {
        "n1": ("a", "b", "c", "d"),
        "n2": ("e", "f"),
        "n3": ("g", "h"),
    }


@pytest.mark.rule("RB-10", "RB-29")
def test_pinned_resources_count_when_the_fullest_node_is_looked_for() -> None:
    previous = {"n1": ["a"], "n2": ["b", "c"]}
    assert balanced(["n1", "n2"], "abc", previous, {"c": "n2"}) == {"n1": ("a",), "n2": ("b", "c")}


@pytest.mark.rule("RB-29")
def test_a_node_that_pins_fill_above_the_level_gives_up_all_others() -> None:
    pinned = dict.fromkeys("abc", "n1")
    assert balanced(["n1", "n2"], "abcde", {"n1": "abcde"}, pinned) == {
        "n1": ("a", "b", "c"),
        "n2": ("d", "e"),
    }


@pytest.mark.rule("RB-29")
def test_a_pin_moves_its_resource_and_makes_room_for_it() -> None:
    previous = {"n1": ("a", "b"), "n2": ("c", "d")}
    allocation = balanced(["n1", "n2"], "abcd", previous, {"c": "n1"})
    assert allocation == {"n1": ("a", "c"), "n2": ("b", "d")}
    assert moves(previous, allocation) == minimum_moves(["n1", "n2"], "abcd", previous, {"c": "n1"}) == 2


@pytest.mark.rule("RB-29")
def test_a_resource_pinned_to_a_node_that_is_not_live_is_on_none() -> None:
    previous = {"n1": ("a", "b"), "n2": ("c",)}
    allocation = balanced(["n1", "n2"], "abc", previous, {"a": "gone"})
    assert allocation == {"n1": ("b",), "n2": ("c",)}
    assert moves(previous, allocation) == 0


@pytest.mark.rule("RB-29")
def test_a_pin_of_an_unknown_resource_is_ignored() -> None:
    assert balanced(["n1", "n2"], "ab", {}, {"x": "n1"}) == {"n1": ("a",), "n2": ("b",)}


@pytest.mark.rule("AU-6", "RB-10")
def test_the_effort_of_an_allocation_is_its_moves_beside_the_fewest() -> None:
    previous = {"n1": ("a", "b", "c"), "n2": ("d",), "gone": ("e", "f")}
    wasteful = {"n1": ("d", "e", "f"), "n2": ("a", "b", "c")}
    assert effort(wasteful, "abcdef", previous) == Effort(moves=4, least_moves=0, nodes=2, resources=6)
    pinned = {"d": "n1"}
    best = balanced(["n1", "n2"], "abcdef", previous, pinned)
    assert effort(best, "abcdef", previous, pinned) == Effort(moves=2, least_moves=2, nodes=2, resources=6)


@pytest.mark.rule("RB-2")
@given(inputs)
@any_input
def test_every_resource_is_placed_once_and_evenly(given_input: dict[str, Any]) -> None:
    nodes, resources = set(given_input["nodes"]), set(given_input["resources"])
    allocation = balanced(**given_input | {"pinned": {}})
    assert allocation.keys() == nodes
    assert all(list(names) == sorted(names) for names in allocation.values())
    placed = Counter(name for names in allocation.values() for name in names)
    assert placed == (Counter(resources) if nodes else Counter())
    ceil = -(-len(resources) // len(nodes)) if nodes else 0
    assert all(len(names) in {ceil, len(resources) // len(nodes)} for names in allocation.values())


@pytest.mark.rule("RB-29")
@given(inputs)
@any_input
def test_pins_are_honoured_and_the_rest_is_placed_once(given_input: dict[str, Any]) -> None:
    nodes, pinned = set(given_input["nodes"]), given_input["pinned"]
    allocation = balanced(**given_input)
    placed = [name for names in allocation.values() for name in names]
    placeable = {name for name in given_input["resources"] if nodes and pinned.get(name) in {None, *nodes}}
    assert Counter(placed) == Counter(placeable)
    assert all(pinned.get(name, node) == node for node, names in allocation.items() for name in names)


@pytest.mark.rule("RB-10")
@given(inputs, st.randoms(use_true_random=False))
@any_input
def test_order_of_the_input_does_not_matter(given_input: dict[str, Any], random: Any) -> None:
    def shuffled(items: Collection[Any]) -> list[Any]:
        copy = list(items)
        random.shuffle(copy)
        return copy

    again: dict[str, Any] = {
        "nodes": shuffled(given_input["nodes"]),
        "resources": shuffled(given_input["resources"]),
        "previous": {node: shuffled(names) for node, names in shuffled(given_input["previous"].items())},
        "pinned": dict(shuffled(given_input["pinned"].items())),
    }
    assert list(balanced(**again).items()) == list(balanced(**given_input).items())
    assert minimum_moves(**again) == minimum_moves(**given_input)


@pytest.mark.rule("RB-10")
@given(inputs)
@any_input
def test_its_own_output_is_left_as_it_is(given_input: dict[str, Any]) -> None:
    allocation = balanced(**given_input)
    again = given_input | {"previous": allocation}
    assert balanced(**again) == allocation
    assert minimum_moves(**again) == 0


@pytest.mark.rule("RB-10")
@given(inputs)
@any_input
def test_no_node_gives_up_a_free_resource_and_receives_another(given_input: dict[str, Any]) -> None:
    allocation = balanced(**given_input | {"pinned": {}})
    owners = {name: node for node, names in allocation.items() for name in names}
    holders = {
        name: min(node for node in allocation if name in given_input["previous"].get(node, ()))
        for name in owners
        if any(name in given_input["previous"].get(node, ()) for node in allocation)
    }
    giving = {node for name, node in holders.items() if owners[name] != node}
    receiving = {node for name, node in owners.items() if holders.get(name) != node}
    assert giving.isdisjoint(receiving)


@pytest.mark.rule("RB-10")
@given(inputs)
@any_input
def test_the_input_is_left_alone(given_input: dict[str, Any]) -> None:
    before = json.dumps(given_input)
    balanced(**given_input)
    minimum_moves(**given_input)
    assert json.dumps(given_input) == before


ALLOCATE_FROM_SETS = """
import json
from rebalanser.core.allocation import balanced
nodes = {f"n{number}" for number in range(7)}
names = {f"r{number}" for number in range(100)}
previous = {node: {name for name in names if int(name[1:]) % 9 <= int(node[1:])} for node in nodes}
pinned = {name: "n3" for name in names if name.endswith("5")}
print(json.dumps([list(names), balanced(nodes, names, previous, pinned)]))
"""


def allocation_under_hash_seed(seed: int) -> tuple[list[str], str]:
    """The order in which a set of names is iterated under this seed, and the allocation as text."""
    environment = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ALLOCATE_FROM_SETS]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    order, allocation = json.loads(run.stdout)
    return order, json.dumps(allocation)


@pytest.mark.rule("RB-10")
def test_the_hash_seed_does_not_matter() -> None:
    first_order, first = allocation_under_hash_seed(1)
    second_order, second = allocation_under_hash_seed(2)
    assert first_order != second_order
    assert first == second


@pytest.mark.rule("RB-10")
@pytest.mark.lesson(11, 14)
@pytest.mark.parametrize(
    ("after", "fewest"),
    [
        pytest.param(11, 90, id="one joins"),
        pytest.param(9, 0, id="one leaves: what it had has to be placed, the rest stays"),
        pytest.param(15, 330, id="five join"),
    ],
)
def test_joins_and_leaves_of_ten_nodes_move_the_minimum_of_a_thousand(after: int, fewest: int) -> None:
    previous = balanced(NODES[:10], RESOURCES, {})
    allocation = balanced(NODES[:after], RESOURCES, previous)
    assert moves(previous, allocation) == minimum_moves(NODES[:after], RESOURCES, previous) == fewest


def kept(previous: Mapping[str, Collection[str]], allocation: Mapping[str, Collection[str]]) -> int:
    return sum(len({*previous[node]} & {*names}) for node, names in allocation.items() if node in previous)


def most_kept(previous: Mapping[str, Collection[str]], sizes: Collection[int], live: Collection[str]) -> int:
    """Pairing fuller nodes with larger shares keeps the most, by the rearrangement of sums of minima."""
    held = sorted((len(previous.get(node, ())) for node in live), reverse=True)
    return sum(map(min, held, sorted(sizes, reverse=True)))


@pytest.mark.rule("RB-2", "RB-10")
@pytest.mark.lesson(11)
@given(st.lists(st.sets(st.sampled_from(NODES), min_size=1), min_size=2, max_size=6))
@settings(max_examples=60)
def test_a_chain_of_memberships_moves_the_minimum_at_every_link(memberships: list[set[str]]) -> None:
    allocation = balanced(memberships[0], RESOURCES, {})
    for _, live in pairwise(memberships):
        previous, allocation = allocation, balanced(live, RESOURCES, allocation)
        low, over = divmod(len(RESOURCES), len(live))
        sizes = [low + (number < over) for number in range(len(live))]
        assert Counter(map(len, allocation.values())) == Counter(sizes)
        assert kept(previous, allocation) == most_kept(previous, sizes, live)
        assert moves(previous, allocation) == minimum_moves(live, RESOURCES, previous)


@pytest.mark.rule("RB-10")
def test_when_a_node_leaves_the_others_keep_all_that_they_have() -> None:
    allocation = balanced(NODES, RESOURCES, {})
    for count in range(len(NODES) - 1, 0, -1):
        previous, allocation = allocation, balanced(NODES[:count], RESOURCES, allocation)
        assert all({*previous[node]} <= {*names} for node, names in allocation.items())


@pytest.mark.rule("RB-10")
@given(inputs, st.dictionaries(NAMES, IDS))
@any_input
def test_moves_are_those_of_the_definition(given_input: dict[str, Any], owners: dict[str, str]) -> None:
    previous, live = given_input["previous"], {*given_input["nodes"], *owners.values()}
    allocation = {node: [name for name, owner in owners.items() if owner == node] for node in live}
    counted = 0
    for name, owner in owners.items():
        holders = [node for node in sorted(live) if name in previous.get(node, [])]
        counted += bool(holders) and holders[0] != owner
    assert moves(previous, allocation) == counted


class CountedName(str):
    """A name that counts how often names are compared for order."""

    __slots__ = ()
    comparisons = 0

    def __lt__(self, other: str) -> bool:
        CountedName.comparisons += 1
        return str.__lt__(self, other)


def comparisons_when_one_joins(resources: int) -> int:
    names = [CountedName(f"{number:06}") for number in range(resources)]
    previous = balanced(NODES[:10], names, {})
    CountedName.comparisons = 0
    balanced(NODES[:11], names, previous)
    return CountedName.comparisons


@pytest.mark.rule("RB-10")
def test_the_work_for_a_join_grows_with_the_resources_and_no_faster() -> None:
    small, large = comparisons_when_one_joins(1_000), comparisons_when_one_joins(16_000)
    assert 1_000 < small < 4_000
    assert large < 16.5 * small


@pytest.mark.rule("RB-10", "RB-45")
@given(inputs, st.sets(NAMES), st.dictionaries(NAMES, st.frozensets(IDS, min_size=1)), st.booleans())
@any_input
def test_to_look_only_at_what_is_unsettled_gives_the_same_allocation(
    given_input: dict[str, Any], others: set[str], refused: dict[str, frozenset[str]], refuse: bool
) -> None:
    """``others`` are taken for unsettled as well."""
    named = Counter(name for names in given_input["previous"].values() for name in set(names))
    there = given_input["resources"] = set(given_input["resources"])
    unsettled = frozenset(
        {name for name in there | named.keys() if name not in there or named[name] != 1} | others
    )
    given_input["previous"] = {node: frozenset(names) for node, names in given_input["previous"].items()}
    given_input["refused"] = refused if refuse else {}
    allocation = allocate(**given_input)
    assert allocate(**given_input, unsettled=unsettled) == allocation
    del given_input["nodes"]
    assert effort(allocation, **given_input, unsettled=unsettled) == effort(allocation, **given_input)


class Looked(frozenset[str]):
    """A set that counts how many of its names are looked at."""

    looks = 0


def _counting(method: str) -> Callable[..., Any]:
    plain = getattr(frozenset, method)

    def counted(self: Looked, *others: Any) -> Any:
        sizes = [len(self), *(len(other) for other in others if method in {"intersection", "__and__"})]
        Looked.looks += min(sizes)
        return plain(self, *others)

    return counted


for _method in (
    *("__iter__", "__eq__", "__ne__", "__le__", "__lt__", "__ge__", "__gt__", "__and__", "__or__", "__sub__"),
    *("difference", "intersection", "isdisjoint", "issubset", "issuperset", "union"),
):
    setattr(Looked, _method, _counting(_method))


class Resources(dict[str, None]):
    """Resources that are counted among those looked at when all are walked through."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(dict.fromkeys(names))

    def __iter__(self) -> Iterator[str]:
        Looked.looks += len(self)
        return super().__iter__()


@pytest.mark.rule("RB-45")
@pytest.mark.parametrize("change", ["added", "removed", "pinned", "released"])
def test_the_work_for_one_change_does_not_grow_with_the_resources(change: str) -> None:
    """All of one share may be looked at, which is written anew."""
    names = [f"{number:06}" for number in range(100_000)]
    nodes = [f"node-{number:04}" for number in range(1_000)]
    previous = {node: Looked(names[number::1_000]) for number, node in enumerate(nodes)}
    pinned = {names[7]: nodes[8]} if change == "pinned" else {}
    there = {"added": [*names, "new"], "removed": names[1:]}.get(change, names)
    unsettled = {"added": frozenset({"new"}), "removed": frozenset(names[:1])}.get(change, frozenset())
    refused = {names[7]: frozenset({nodes[7]})} if change == "released" else {}
    resources = Resources(there)
    members = {node: Member(node, node) for node in nodes}
    Looked.looks = 0
    allocation = solve(
        AllocationProblem(
            members,
            resources,  # type: ignore[arg-type]
            previous,
            Policy(),
            pinned,
            refused,
            special=frozenset(),
            unsettled=unsettled,
        )
    )
    assert sum(map(len, allocation.shares.values())) == len(there)
    assert allocation.effort is not None
    assert Looked.looks < 10_000


@pytest.mark.rule("RB-45")
def test_the_work_for_a_release_does_not_grow_with_what_was_released_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each arc of a network of flows is some work; most releases are of a resource that has left since."""
    names, nodes = (
        [f"{number:05}" for number in range(10_000)],
        [f"node-{number:02}" for number in range(100)],
    )
    refused = {
        name: frozenset(nodes[number % 97 : number % 97 + 3]) for number, name in enumerate(names[::10])
    }
    before = allocate(nodes, names, {}, {}, refused)
    owners = {name: node for node, share in before.items() for name in share}
    arcs = 0
    add_arc = Network.add_arc

    def counted(network: Network, tail: int, head: int, capacity: int, cost: int = 0) -> int:
        nonlocal arcs
        arcs += 1
        return add_arc(network, tail, head, capacity, cost)

    monkeypatch.setattr(Network, "add_arc", counted)
    after = allocate(nodes, names, before, {}, refused | {"00001": frozenset({owners["00001"]})})
    assert "00001" not in after[owners["00001"]]
    assert moves(before, after) == 2, "another resource takes its place"
    assert arcs < 1_000
    arcs = 0
    assert allocate(nodes, names, after, {}, refused) == after
    assert arcs < 1_000
