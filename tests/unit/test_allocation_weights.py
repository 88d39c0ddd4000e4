"""Placement by weight: by example, and for any input.

The search is bounded: what it reaches is checked, and not compared with an optimum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations
from random import Random
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebalanser.core.allocation import (
    MAX_AMOUNT,
    Capacity,
    Placement,
    RememberedSearch,
    Requests,
    has_room,
    place,
    weighted,
)
from rebalanser.core.allocation.weighted import EVEN, _Packing

NO_TAGS: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Case:
    workers: Mapping[str, frozenset[str]]
    resources: Mapping[str, frozenset[str]]
    previous: Mapping[str, str]
    requests: Mapping[str, Requests]
    capacities: Mapping[str, Capacity]
    groups: Mapping[str, str] = field(default_factory=dict)

    def placement(self, by_weight: RememberedSearch | None = None) -> Placement:
        return place(
            self.workers,
            self.resources,
            self.previous,
            requests=self.requests,
            capacities=self.capacities,
            groups=self.groups,
            by_weight=by_weight,
        )

    def open_to(self, name: str) -> list[str]:
        return [worker for worker, tags in self.workers.items() if self.resources[name] <= tags]

    @property
    def weighed(self) -> list[str]:
        return [name for name in self.resources if self.requests.get(name) and self.open_to(name)]

    def load(self, holders: Mapping[str, str], worker: str, *more: str) -> tuple[int, int]:
        there = [name for name, holder in holders.items() if holder == worker and name not in more]
        taken = [self.requests[name] for name in [*there, *more] if name in self.requests]
        return sum(each.cpu_milli for each in taken), sum(each.memory_mb for each in taken)

    def fits(self, load: tuple[int, int], worker: str) -> bool:
        capacity = self.capacities.get(worker, Capacity())
        limits = capacity.cpu_milli, capacity.memory_mb
        return all(limit is None or amount <= limit for amount, limit in zip(load, limits, strict=True))

    def fullness(self, load: tuple[int, int], worker: str) -> float:
        """The larger part of its capacity that is taken; where it has no limit, of the largest capacity."""
        parts = []
        for dimension, amount in zip(("cpu_milli", "memory_mb"), load, strict=True):
            known = [getattr(self.capacities.get(each, Capacity()), dimension) for each in self.workers]
            all_requests = sum(getattr(self.requests[name], dimension) for name in self.weighed)
            reference = max((limit for limit in known if limit is not None), default=0) or all_requests or 1
            own = getattr(self.capacities.get(worker, Capacity()), dimension)
            parts.append(amount / (own or reference))
        return max(parts)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Hypothesis draws the seed only: drawn choice by choice, most cases come out with room for all."""
    random: Random = draw(st.randoms(use_true_random=True))
    workers = [f"w{number}" for number in range(random.randint(0, 5))]
    names = [f"r{number:02}" for number in range(random.randint(0, 14))]
    tagged, limited, largest = random.choice((0.0, 0.3)), random.random(), random.choice((2, 4, 8))
    same, memory = random.random() < 0.4, random.random() < 0.7
    base = random.randint(2, 20)

    def drawn(chance: float) -> frozenset[str]:
        return frozenset(tag for tag in "ab" if random.random() < chance)

    def limit() -> int | None:
        return (base if same else random.randint(0, 20)) * 100 if random.random() < limited else None

    return Case(
        workers={worker: drawn(0.7) for worker in workers},
        resources={name: drawn(tagged) for name in names},
        previous={name: f"w{random.randint(0, len(workers))}" for name in names if random.random() < 0.8},
        requests={
            name: Requests(
                random.randint(0, largest) * 100, random.randint(0, largest) * 100 if memory else 0
            )
            for name in names
            if random.random() < 0.8
        },
        capacities={
            worker: Capacity(limit(), limit() if memory else None)
            for worker in workers
            if random.random() < 0.9
        },
    )


@pytest.mark.rule("SH-27")
@given(cases())
@settings(max_examples=10 * settings().max_examples)
def test_no_worker_gets_more_than_its_capacity_and_what_waits_has_no_room(case: Case) -> None:
    placement = case.placement()
    holders = placement.holders
    assert sorted([*holders, *placement.unplaced]) == sorted(case.resources)
    assert all(worker in case.open_to(name) for name, worker in holders.items())
    for worker in case.workers:
        assert case.fits(case.load(holders, worker), worker)
    assert placement.full == {name for name in placement.unplaced if case.open_to(name)}
    for name in placement.full:
        assert not any(case.fits(case.load(holders, each, name), each) for each in case.open_to(name))
        assert placement.unplaced[name]


@pytest.mark.rule("SH-27")
@given(cases())
@settings(max_examples=4 * settings().max_examples)
def test_no_single_move_would_make_the_load_of_two_workers_more_even(case: Case) -> None:
    holders = case.placement().holders
    for name in case.weighed:
        if name not in holders:
            continue
        worker = holders[name]
        full = case.fullness(case.load(holders, worker), worker)
        rest = {other: held for other, held in holders.items() if other != name}
        for other in case.open_to(name):
            there = case.fullness(case.load(holders, other), other)
            load = case.load(holders, other, name)
            if there < EVEN * full and case.fits(load, other):
                left = case.fullness(case.load(rest, worker), worker)
                assert max(left, case.fullness(load, other)) >= full


@pytest.mark.rule("SH-27", "RB-10")
@given(cases(), st.randoms(use_true_random=True))
@settings(max_examples=4 * settings().max_examples)
def test_its_own_outcome_stays_as_it_is_whatever_the_order_of_the_arguments(
    case: Case, random: Random
) -> None:
    def shuffled(mapping: Mapping[str, Any]) -> dict[str, Any]:
        return dict(random.sample(sorted(mapping.items(), key=lambda item: item[0]), len(mapping)))

    placement = case.placement()
    assert replace(case, previous=placement.holders).placement() == placement
    names = ("workers", "resources", "previous", "requests", "capacities")
    other = Case(*(shuffled(getattr(case, name)) for name in names))
    assert other.placement() == placement


@pytest.mark.rule("SH-27", "SH-12")
@given(cases())
@settings(max_examples=4 * settings().max_examples)
def test_without_requests_all_is_placed_as_if_there_were_no_capacities(case: Case) -> None:
    light = {name: tags for name, tags in case.resources.items() if not case.requests.get(name)}
    alone = place(case.workers, light, case.previous)
    assert replace(case, requests={}).placement() == place(case.workers, case.resources, case.previous)
    beside = case.placement()
    assert {name: beside.holders.get(name) for name in light} == {
        name: alone.holders.get(name) for name in light
    }


def placed(
    capacities: Mapping[str, Capacity], requests: Mapping[str, Requests], previous: Mapping[str, str]
) -> Placement:
    return place(
        dict.fromkeys(capacities, NO_TAGS),
        dict.fromkeys(requests, NO_TAGS),
        previous,
        requests=requests,
        capacities=capacities,
    )


def cpu(*amounts: int) -> dict[str, Requests]:
    return {name: Requests(amount) for name, amount in zip("abcdefgh", amounts, strict=False)}


@pytest.mark.rule("SH-27")
def test_load_is_shared_out_by_weight_and_not_by_number() -> None:
    placement = placed({"w1": Capacity(), "w2": Capacity()}, cpu(400, 100, 100, 100, 100), {})
    assert placement.holders == {"a": "w1", "b": "w2", "c": "w2", "d": "w2", "e": "w2"}


@pytest.mark.rule("SH-27")
def test_a_larger_worker_gets_more() -> None:
    holders = placed({"w1": Capacity(3000), "w2": Capacity(1000)}, cpu(*[500] * 4), {}).holders
    assert sorted(holders.values()) == ["w1", "w1", "w1", "w2"]


@pytest.mark.rule("SH-27")
def test_one_that_takes_processors_and_one_that_takes_memory_share_a_worker() -> None:
    both = {"w1": Capacity(1000, 1000), "w2": Capacity(1000, 1000)}
    requests = {"a": Requests(800), "b": Requests(800), "c": Requests(0, 800), "d": Requests(0, 800)}
    holders = placed(both, requests, {}).holders
    assert len({holders["a"], holders["b"]}) == len({holders["c"], holders["d"]}) == 2


@pytest.mark.rule("SH-27")
def test_what_a_worker_has_stays_while_another_one_has_as_much_to_do() -> None:
    previous = {"a": "w1", "b": "w1", "c": "w2"}
    assert placed({"w1": Capacity(), "w2": Capacity()}, cpu(200, 200, 400), previous).holders == previous


@pytest.mark.rule("SH-27")
def test_nothing_moves_for_a_small_difference() -> None:
    names = "abcdefgh" + "ijklmnop" * 2
    requests = {f"{name}{n}": Requests(100) for n, name in enumerate(names * 2)}
    previous = dict(zip(requests, ["w1"] * 24 + ["w2"] * 24, strict=True)) | {"x": "w1"}
    assert placed(
        {"w1": Capacity(), "w2": Capacity()}, {**requests, "x": Requests(100)}, previous
    ).holders == (dict(sorted(previous.items())))


@pytest.mark.rule("SH-27")
def test_what_is_too_much_for_a_smaller_worker_leaves_it() -> None:
    previous = {"a": "w1", "b": "w1", "c": "w1"}
    placement = placed({"w1": Capacity(1000), "w2": Capacity(300)}, cpu(700, 300, 300), previous)
    assert placement.holders == {"a": "w1", "b": "w1", "c": "w2"}


@pytest.mark.rule("SH-27")
@pytest.mark.parametrize("previous", sorted(set(permutations(["w1", "w1", "w2"]))))
def test_small_ones_make_room_for_a_large_one(previous: tuple[str, ...]) -> None:
    held = dict(zip("bcd", previous, strict=True))
    placement = placed({"w1": Capacity(1000), "w2": Capacity(1000)}, cpu(800, 300, 300, 300), held)
    assert placement.unplaced == {}
    assert len({placement.holders[name] for name in "bcd"}) == 1


@pytest.mark.rule("SH-27")
def test_as_many_as_may_leave_for_a_large_one_take_all_that_is_free_elsewhere() -> None:
    workers = {f"w{number}": Capacity(1000) for number in range(1, 5)}
    held = dict(zip("abcdef", ["w1", "w1", "w1", "w2", "w3", "w4"], strict=True))
    placement = placed(workers, cpu(300, 300, 300, 700, 700, 700, 1000), held)
    assert placement.unplaced == {}
    assert placement.holders["g"] == "w1"


@pytest.mark.rule("SH-27")
@pytest.mark.parametrize(
    ("requests", "reason"),
    [
        (Requests(4000), "no worker has 4 cpu: w2, the largest, has 3 cpu"),
        (Requests(100, 5000), "no worker has 5,000 MB of memory: w1, the largest, has 2,000 MB of memory"),
        (Requests(2500, 2000), "no worker has 2.5 cpu and 2,000 MB of memory free at the same time"),
    ],
)
def test_what_has_no_room_says_what_it_lacks(requests: Requests, reason: str) -> None:
    capacities = {"w1": Capacity(1000, 2000), "w2": Capacity(3000, 1000)}
    given_there = {"a": Requests(500), "x": requests}
    placement = placed(capacities, given_there, {"a": "w2"})
    assert placement == Placement({"a": "w2"}, {"x": reason}, frozenset("x"))


@pytest.mark.rule("SH-27")
def test_what_would_have_room_on_an_empty_worker_says_so() -> None:
    capacities = {"w1": Capacity(1000), "w2": Capacity(3000)}
    placement = placed(capacities, {"a": Requests(2000), "x": Requests(1500)}, {"a": "w2"})
    assert placement.unplaced == {"x": "no worker has 1.5 cpu free: w2, the largest, has 3 cpu"}


@pytest.mark.rule("SH-27")
def test_what_only_some_workers_may_take_says_so() -> None:
    placement = place(
        {"w1": frozenset({"gpu"}), "w2": NO_TAGS},
        {"x": frozenset({"gpu"})},
        {},
        requests={"x": Requests(2000)},
        capacities={"w1": Capacity(1000)},
    )
    assert placement.unplaced == {
        "x": "no worker that may take it has 2 cpu: w1, the largest, has 1 cpu",
    }


@pytest.mark.parametrize("amount", [-1, MAX_AMOUNT + 1])
@pytest.mark.parametrize("kind", [Requests, Capacity])
def test_an_amount_that_no_worker_can_have_is_refused(amount: int, kind: type[Requests | Capacity]) -> None:
    with pytest.raises(ValueError, match="memory_mb is"):
        kind(memory_mb=amount)


@pytest.mark.rule("SH-27")
@given(cases(), cases(), st.randoms(use_true_random=True))
@settings(max_examples=10 * settings().max_examples)
def test_a_search_is_spared_only_if_nothing_that_matters_has_changed(
    case: Case, other: Case, random: Random
) -> None:
    """Each case differs from the one before in some part, down to one resource or worker."""
    search = RememberedSearch()
    other = replace(other, groups={name: random.choice("gh") for name in other.resources})
    for _ in range(4):
        placement = case.placement(search)
        assert placement == case.placement()
        parts = ["workers", "resources", "previous", "requests", "capacities", "groups"]
        changes: dict[str, Any] = {}
        for part in random.sample(parts, 2):
            mine, theirs = getattr(case, part), getattr(other, part)
            key = random.choice([*mine, *theirs, ""])
            changes[part] = {**mine, **{name: theirs[name] for name in theirs if name == key}}
            if key not in theirs:
                changes[part].pop(key, None)
        known = changes.get("resources", case.resources).keys()
        if random.random() < 0.5:
            changes["previous"] = placement.holders
        case = replace(case, **changes)
        case = replace(case, requests={name: each for name, each in case.requests.items() if name in known})


@pytest.mark.rule("SH-27")
def test_a_search_is_not_repeated_while_nothing_that_matters_changes() -> None:
    requests = {name: Requests(600) for name in "abc"}
    case = Case(
        {"w1": NO_TAGS, "w2": NO_TAGS},
        {**dict.fromkeys(requests, NO_TAGS), "light": NO_TAGS},
        {},
        requests,
        {"w1": Capacity(1000), "w2": Capacity(700), "gone": Capacity(5)},
    )
    changed = [
        replace(case, workers={"w1": NO_TAGS}),
        replace(case, workers={**case.workers, "w3": NO_TAGS}),
        replace(case, resources={**case.resources, "a": frozenset("x")}),
        replace(case, previous={"a": "w2"}),
        replace(case, groups={"a": "g", "b": "g"}),
        replace(case, requests={**requests, "c": Requests(400)}),
        replace(case, capacities={"w1": Capacity(1000)}),
        replace(case, capacities={"w1": Capacity(1200), "w2": Capacity(700)}),
    ]
    for other in changed:
        search = RememberedSearch()
        with mock.patch.object(_Packing, "search", autospec=True, side_effect=_Packing.search) as searches:
            placement = case.placement(search)
            assert placement.full
            same = [
                case,
                replace(case, previous=placement.holders),
                replace(case, resources={**case.resources, "another": NO_TAGS}),
                replace(case, capacities={**case.capacities, "gone": Capacity(9)}),
            ]
            assert [each.placement(search).full for each in same] == [placement.full] * len(same)
            assert searches.call_count == 1
            other.placement(search)
            assert searches.call_count == 2


@pytest.mark.rule("SH-27")
@pytest.mark.parametrize(
    ("load", "needs", "room"),
    [
        ((600, 0), (0, 7), True),
        ((0, 120), (400, 0), True),
        ((600, 0), (1, 7), False),
        ((400, 90), (100, 10), True),
        ((400, 90), (100, 11), False),
        ((0, 0), (0, 0), True),
    ],
)
def test_an_amount_that_is_not_requested_needs_no_room(
    load: tuple[int, int], needs: tuple[int, int], room: bool
) -> None:
    """One rule for the placement, and for a start beside what has not ended yet."""
    assert has_room((500, 100), load, needs) is room


def _looks(count: int) -> float:
    """How often a full cluster is looked at for each resource that waits, and each worker.

    Each resource requests something else, so that nothing is counted together.
    """
    workers = [f"w{number:03}" for number in range(count // 4)]
    requests = {
        f"r{number:03}": Requests(100 + number * 37 % count, 100 + number * 61 % count)
        for number in range(count)
    }
    looks = Counter[str]()

    def counted(*given: tuple[float, float]) -> bool:
        looks["looks"] += 1
        return has_room(*given)  # type: ignore[arg-type]

    with mock.patch.object(weighted, "has_room", counted):
        placement = place(
            dict.fromkeys(workers, NO_TAGS),
            dict.fromkeys(requests, NO_TAGS),
            {},
            requests=requests,
            capacities=dict.fromkeys(workers, Capacity(330, 330)),
        )
    assert len(placement.full) >= count // 4
    return looks["looks"] / len(placement.full) / len(workers)


@pytest.mark.rule("SH-27")
def test_what_has_no_room_in_a_full_cluster_is_found_out_with_few_looks() -> None:
    assert _looks(120) < 1.5 * _looks(30)
