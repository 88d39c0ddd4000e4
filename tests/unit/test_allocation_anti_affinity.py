"""Placement of replicas, each on a worker of its own: by example, and compared with all placements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebalanser.core.allocation import Capacity, Placement, RememberedSearch, Requests, place
from rebalanser.core.allocation.anti_affinity import ReplicaPlacement

NO_TAGS: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Case:
    workers: Mapping[str, frozenset[str]]
    resources: Mapping[str, frozenset[str]]
    groups: Mapping[str, str]
    previous: Mapping[str, str]
    refused: Mapping[str, frozenset[str]]

    def placement(
        self, requests: Mapping[str, Requests] | None = None, by_weight: RememberedSearch | None = None
    ) -> Placement:
        return place(
            self.workers,
            self.resources,
            self.previous,
            refused=self.refused,
            requests=requests or {},
            groups=self.groups,
            by_weight=by_weight,
        )

    def open_to(self, name: str) -> list[str]:
        tags, refused = self.resources[name], self.refused.get(name, NO_TAGS)
        return [worker for worker, has in self.workers.items() if tags <= has and worker not in refused]

    def is_apart(self, holders: Mapping[str, str]) -> bool:
        taken = Counter((self.groups[name], held) for name, held in holders.items() if name in self.groups)
        return all(count == 1 for count in taken.values())

    def all_placements(self) -> Iterator[dict[str, str]]:
        """All placements of as many as can be placed."""
        names = sorted(self.resources)
        found = []
        for workers in product(*([*self.open_to(name), None] for name in names)):
            holders = {name: held for name, held in zip(names, workers, strict=True) if held is not None}
            if self.is_apart(holders):
                found.append(holders)
        most = max(map(len, found))
        yield from (holders for holders in found if len(holders) == most)


def squares(holders: Mapping[str, str]) -> int:
    return sum(load * load for load in Counter(holders.values()).values())


@st.composite
def cases(draw: st.DrawFn, *, refusals: bool = False, most: int = 6) -> Case:
    random: Random = draw(st.randoms(use_true_random=True))
    workers = [f"w{number}" for number in range(random.randint(1, 4))]
    groups = {
        f"g{group}#{number}": f"g{group}" for group in range(random.randint(1, 2)) for number in range(3)
    }
    names = [*sorted(groups, key=lambda _: random.random())[: random.randint(1, most)]]
    names += [f"r{number}" for number in range(random.randint(0, most - len(names)))]
    tagged = random.choice((0.0, 0.4))
    tags = {
        each: frozenset(tag for tag in "a" if random.random() < tagged)
        for each in {groups.get(name, name) for name in names}
    }
    return Case(
        workers={worker: frozenset("a" if random.random() < 0.7 else "") for worker in workers},
        resources={name: tags[groups.get(name, name)] for name in names},
        groups={name: group for name, group in groups.items() if name in names},
        previous={name: f"w{random.randint(0, len(workers))}" for name in names if random.random() < 0.7},
        refused={
            name: frozenset({random.choice(workers)}) for name in names if refusals and random.random() < 0.4
        },
    )


@pytest.mark.rule("SH-28")
@given(cases())
@settings(max_examples=4 * settings().max_examples, deadline=None)
def test_as_many_are_placed_as_can_be_and_as_evenly_as_any_placement(case: Case) -> None:
    placement = case.placement()
    assert case.is_apart(placement.holders)
    assert sorted([*placement.holders, *placement.unplaced]) == sorted(case.resources)
    assert all(held in case.open_to(name) for name, held in placement.holders.items())
    best = list(case.all_placements())
    assert len(placement.holders) == len(best[0])
    assert squares(placement.holders) == min(map(squares, best))
    assert not placement.full
    assert all(placement.unplaced.values())


@pytest.mark.rule("SH-28")
@given(cases(refusals=True))
@settings(max_examples=4 * settings().max_examples, deadline=None)
def test_wherever_replicas_have_failed_as_many_are_placed_as_can_be(case: Case) -> None:
    placement = replace(case, previous={}).placement()
    assert case.is_apart(placement.holders)
    assert all(held in case.open_to(name) for name, held in placement.holders.items())
    assert len(placement.holders) == len(next(case.all_placements()))


@pytest.mark.rule("SH-28")
@given(cases(refusals=True))
@settings(max_examples=4 * settings().max_examples, deadline=None)
def test_what_has_a_worker_keeps_one_and_whatever_has_none_finds_none_free(case: Case) -> None:
    placement = case.placement()
    assert case.is_apart(placement.holders)
    before: dict[tuple[str, str], str] = {}
    for name in sorted(case.groups):
        held = case.previous.get(name)
        if held in case.open_to(name):
            before.setdefault((case.groups[name], held), name)
    assert set(before.values()) <= placement.holders.keys()
    for name in placement.unplaced:
        taken = {
            placement.holders.get(other)
            for other in case.groups
            if case.groups[other] == case.groups.get(name)
        }
        assert set(case.open_to(name)) <= taken


@pytest.mark.rule("SH-28")
def test_one_that_runs_does_not_move_for_one_that_has_failed() -> None:
    case = Case(
        {"w1": NO_TAGS, "w2": NO_TAGS},
        {"g": NO_TAGS, "g#1": NO_TAGS},
        {"g": "g", "g#1": "g"},
        {"g": "w1"},
        {"g#1": frozenset({"w2"})},
    )
    assert case.placement().holders == {"g": "w1"}
    assert case.placement().unplaced == {
        "g#1": "each worker that may take this replica has another one; 2 replicas on 2 workers"
    }
    assert replace(case, previous={}).placement().holders == {"g": "w2", "g#1": "w1"}


@pytest.mark.rule("SH-28")
@given(cases(refusals=True), st.booleans())
@settings(max_examples=4 * settings().max_examples, deadline=None)
def test_its_own_outcome_stays_as_it_is_whatever_the_order_of_the_arguments(
    case: Case, weighed: bool
) -> None:
    requests = {name: Requests(100) for name in case.groups} if weighed else {}
    placement = case.placement(requests)
    mixed = Case(
        dict(reversed(case.workers.items())),
        dict(reversed(case.resources.items())),
        dict(reversed(case.groups.items())),
        placement.holders,
        case.refused,
    )
    assert mixed.placement(requests) == placement


@pytest.mark.rule("SH-28")
@given(cases())
@settings(max_examples=4 * settings().max_examples, deadline=None)
def test_with_requests_as_many_are_placed_where_nothing_has_a_limit(case: Case) -> None:
    placement = case.placement({name: Requests(100) for name in case.resources})
    assert case.is_apart(placement.holders)
    assert len(placement.holders) == len(next(case.all_placements()))
    assert not placement.full


@pytest.mark.rule("SH-28", "SH-27")
@given(cases(), st.integers(1, 4))
@settings(max_examples=4 * settings().max_examples, deadline=None)
def test_with_capacities_no_worker_has_two_or_too_much(case: Case, room: int) -> None:
    requests = {name: Requests(100) for name in case.resources}
    placement = place(
        case.workers,
        case.resources,
        case.previous,
        requests=requests,
        capacities={worker: Capacity(100 * room) for worker in case.workers},
        groups=case.groups,
    )
    loads = Counter(placement.holders.values())
    assert case.is_apart(placement.holders)
    assert all(load <= room for load in loads.values())
    for name in placement.unplaced:
        siblings = {
            held
            for other, held in placement.holders.items()
            if case.groups.get(other) == case.groups.get(name, 0)
        }
        assert not [each for each in case.open_to(name) if loads[each] < room and each not in siblings]


@pytest.mark.rule("SH-28")
@pytest.mark.parametrize("requests", [{}, {f"g#{number}": Requests(100) for number in range(3)}])
def test_more_than_workers_wait_with_the_numbers(requests: Mapping[str, Requests]) -> None:
    names = [f"g#{number}" for number in range(3)]
    case = Case(
        {"w1": NO_TAGS, "w2": NO_TAGS}, dict.fromkeys(names, NO_TAGS), dict.fromkeys(names, "g"), {}, {}
    )
    placement = case.placement(requests)
    assert placement.holders == {"g#0": "w1", "g#1": "w2"}
    assert placement.unplaced == {"g#2": "3 replicas on 2 workers that may take them"}


@pytest.mark.rule("SH-28")
@pytest.mark.parametrize("weighed", [False, True])
def test_the_loss_of_a_worker_moves_only_what_it_had(weighed: bool) -> None:
    names = [f"g{group}#{number}" for group in range(4) for number in range(3)]
    groups = {name: name.partition("#")[0] for name in names}
    requests = {name: Requests(100) for name in names} if weighed else {}
    workers = {f"w{number}": NO_TAGS for number in range(6)}
    before = Case(workers, dict.fromkeys(names, NO_TAGS), groups, {}, {}).placement(requests).holders
    assert set(Counter(before.values()).values()) == {2}
    left = {worker: NO_TAGS for worker in workers if worker != "w3"}
    after = Case(left, dict.fromkeys(names, NO_TAGS), groups, before, {}).placement(requests).holders
    assert {name for name in names if after[name] != before[name]} == {
        name for name in names if before[name] == "w3"
    }


@pytest.mark.rule("SH-28")
def test_a_worker_that_joins_takes_its_part_of_replicas_alone() -> None:
    names = [f"g{group}#{number}" for group in range(4) for number in range(3)]
    groups = {name: name.partition("#")[0] for name in names}
    resources = dict.fromkeys(names, NO_TAGS)
    before = (
        Case({f"w{number}": NO_TAGS for number in range(3)}, resources, groups, {}, {}).placement().holders
    )
    after = (
        Case({f"w{number}": NO_TAGS for number in range(4)}, resources, groups, before, {})
        .placement()
        .holders
    )
    assert Counter(after.values()) == {f"w{number}": 3 for number in range(4)}
    assert sum(after[name] != before[name] for name in names) == 3


@pytest.mark.rule("SH-28")
def test_a_remembered_search_is_repeated_once_replicas_come_or_go() -> None:
    names, requests = ("app", "app#1", "app#2"), Requests(1)
    search, workers = RememberedSearch(), dict.fromkeys(("w1", "w2"), NO_TAGS)
    placed = []
    for groups in ({}, dict.fromkeys(names, "app"), dict.fromkeys(names[:2], "app"), {}):
        case = Case(workers, dict.fromkeys(names, NO_TAGS), groups, {}, {})
        placement = case.placement(dict.fromkeys(names, requests), search)
        assert placement == case.placement(dict.fromkeys(names, requests))
        placed.append(len(placement.holders))
    assert placed == [3, 2, 3, 3]


class _Hashed(tuple[str, ...]):
    """Workers that count how often they are hashed."""

    times = 0

    def __hash__(self) -> int:
        type(self).times += 1
        return super().__hash__()


def test_a_surplus_costs_as_much_as_its_number_and_not_its_square() -> None:
    times = []
    for replicas in (50, 200):
        _Hashed.times = 0
        names = [f"a#{number}" for number in range(replicas)]
        workers = _Hashed(f"w{number}" for number in range(10))
        placed = ReplicaPlacement(dict.fromkeys(names, workers), dict.fromkeys(names, "a"), {}, Counter())
        assert len(placed.unplaced()) == replicas - 10
        times.append(_Hashed.times / replicas)
    assert times[0] == times[1]
