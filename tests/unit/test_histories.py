"""The generator of histories: the same every time, readable, and as the protocols write."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from rebalanser.core.group import FactKind
from rebalanser.history import Protocol, Record, UnreadableLine, UnreadableReason, read_records
from support.histories import CLOCK_ERROR_S, DRAMAS, SPOILING, Defect, World, tell, write_pages
from support.histories.healthy import LIVES

if TYPE_CHECKING:
    from pathlib import Path

SEEDS = range(40)
STEPS = [
    FactKind.BARRIER_ADDED,
    FactKind.START_ENTERED,
    FactKind.START_RETURNED,
    FactKind.STOP_ENTERED,
    FactKind.STOP_RETURNED,
    FactKind.BARRIER_REMOVED,
]


def lived(seed: int, protocol: Protocol) -> World:
    world = World(random.Random(seed), protocol, f"group-{seed}")
    LIVES[protocol](world)
    return world


def test_one_seed_tells_one_story() -> None:
    assert [tell(seed) for seed in SEEDS] == [tell(seed) for seed in SEEDS]
    assert tell(1).pages != tell(2).pages


def test_the_same_stories_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "other"):
        pages = [tell(seed).pages for seed in SEEDS]
        write_pages(tmp_path / name, pages, files=3, seed=7)
    one, other = sorted((tmp_path / "one").iterdir()), sorted((tmp_path / "other").iterdir())
    assert [path.name for path in one] == [path.name for path in other]
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]


def test_a_plot_that_is_given_is_played() -> None:
    story = tell(3, ["two_leaders", "garbage"], protocol=Protocol.GROUP)
    assert story.plot == ("two_leaders", "garbage")
    assert [one.defect for one in story.planted] == [Defect.TWO_LEADERS, Defect.QUARANTINE]
    assert tell(3, []).planted == ()


@pytest.mark.full_size
def test_seeds_play_everything_in_every_protocol() -> None:
    played = defaultdict(set)
    for seed in range(2000):
        story = tell(seed)
        for name in story.plot:
            played[name].add(story.protocol)
    acts = {name: drama.protocols for name, drama in DRAMAS.items()}
    acts |= {name: spoiling.protocols for name, spoiling in SPOILING.items()}
    assert dict(played) == {name: set(protocols) for name, protocols in acts.items()}


@pytest.mark.rule("AU-1")
def test_all_that_is_written_is_read_but_what_was_planted_as_no_record(tmp_path: Path) -> None:
    for seed in SEEDS:
        story = tell(seed)
        write_pages(tmp_path / str(seed), [story.pages], files=2, seed=seed)
        unread = [line for line in read_records(tmp_path / str(seed)) if isinstance(line, UnreadableLine)]
        reasons = sorted(one.reason or "" for one in story.planted if one.defect is Defect.QUARANTINE)
        assert sorted(line.reason for line in unread) == reasons


def test_a_torn_line_is_the_last_of_its_file(tmp_path: Path) -> None:
    story = tell(5, ["torn_line"])
    write_pages(tmp_path, [story.pages], files=2, seed=5)
    (torn,) = (line for line in read_records(tmp_path) if isinstance(line, UnreadableLine))
    assert torn.reason is UnreadableReason.TORN
    assert torn.line == len(torn.file.read_bytes().splitlines())


@pytest.mark.parametrize("protocol", Protocol)
def test_each_process_of_a_healthy_life_counts_without_a_gap_and_its_clock_goes_on(
    protocol: Protocol,
) -> None:
    for seed in SEEDS:
        for process in lived(seed, protocol).processes:
            assert [record.sequence for record in process.records] == [*range(len(process.records))]
            assert all(a.monotonic_time <= b.monotonic_time for a, b in pairwise(process.records))


@pytest.mark.parametrize("protocol", Protocol)
def test_hosts_of_a_healthy_world_are_within_the_stated_error(protocol: Protocol) -> None:
    for seed in SEEDS:
        errors = [host.clock_error_s for host in lived(seed, protocol).hosts]
        assert max(errors) - min(errors) < CLOCK_ERROR_S


@pytest.mark.rule("RB-11", "RB-12")
def test_a_healthy_group_takes_the_steps_in_order_and_its_tokens_grow() -> None:
    for seed in SEEDS:
        world = lived(seed, Protocol.GROUP)
        accesses: dict[tuple[str | None, int | None], list[Record]] = defaultdict(list)
        for process in world.processes:
            for record in process.records:
                if record.kind in STEPS:
                    accesses[record.resource, record.token].append(record)
        for records in accesses.values():
            taken = [STEPS.index(FactKind(record.kind)) for record in records]
            assert taken == sorted(set(taken))
            assert len({record.process for record in records}) == 1
            assert records[0].token == records[0].revision


@pytest.mark.rule("RB-1")
def test_no_two_own_at_once_in_a_healthy_group_by_its_true_time() -> None:
    for seed in SEEDS:
        world = lived(seed, Protocol.GROUP)
        true_times: dict[str | None, list[tuple[int, float, float]]] = defaultdict(list)
        for process in world.processes:
            by_token: dict[tuple[str | None, int | None], list[float]] = defaultdict(list)
            for record in process.records:
                if record.kind in (FactKind.START_ENTERED, FactKind.STOP_RETURNED):
                    true_s = record.wall_time - process.host.clock_error_s
                    by_token[record.resource, record.token].append(true_s)
            for (resource, token), times in by_token.items():
                true_times[resource].append((token or 0, times[0], times[-1]))
        for owners in true_times.values():
            assert all(a[2] <= b[1] for a, b in pairwise(sorted(owners)))


def test_what_is_planted_in_one_world_has_a_resource_of_its_own() -> None:
    for seed in range(200):
        told = defaultdict(set)
        for one in tell(seed).planted:
            if one.resource is not None:
                told[one.resource].add(one.defect)
        assert all(len(defects) <= 2 for defects in told.values())
