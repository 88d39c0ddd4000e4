"""The history of simulated runs: the product's format, every process of its own, and what really was."""

from __future__ import annotations

from collections import defaultdict
from random import Random
from typing import TYPE_CHECKING

import pytest

from rebalanser.core.group.messages import FactKind
from rebalanser.history import Record, event_of
from rebalanser.registry.translation import Translation
from simulation.group import (
    PROFILES,
    HostPlan,
    Oracle,
    Recorder,
    Scenario,
    Trace,
    World,
    history_of,
    run_seed,
)
from simulation.group.process import Process
from simulation.kernel.mutants import Switch, always, switched

if TYPE_CHECKING:
    from collections.abc import Iterable

SEEDS = 12


def by_process(records: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        found[record.process].append(record)
    return found


@pytest.mark.rule("AU-2")
def test_every_process_numbers_its_records_from_0_and_no_name_is_used_twice() -> None:
    seen: set[str] = set()
    nodes: set[str] = set()
    for seed in range(SEEDS):
        history = history_of(seed, group=f"seed {seed}")
        processes = by_process(history.records)
        assert processes
        assert not seen & processes.keys()
        seen |= processes.keys()
        for name, records in processes.items():
            assert [record.sequence for record in records] == list(range(len(records))), name
            assert {record.group for record in records} == {f"seed {seed}"}
            assert len({record.boot for record in records}) == 1
            assert all(record.node.startswith(f"{name}-") or record.node == name for record in records)
        assert not nodes & {record.node for record in history.records}
        nodes |= {record.node for record in history.records}
    assert len(seen) > SEEDS


@pytest.mark.rule("AU-5")
def test_every_host_has_a_clock_and_a_boot_of_its_own() -> None:
    history = history_of(3, group="g")
    times: dict[str | None, list[float]] = defaultdict(list)
    for record in history.records:
        assert record.host == record.boot == f"g/{record.label}"
        times[record.boot].append(record.monotonic_time)
    assert len(times) > 1
    assert all(of_boot == sorted(of_boot) for of_boot in times.values())
    walls = [record.wall_time for record in history.records]
    assert walls == sorted(walls), "the walls' clocks are right"


def test_every_fact_is_written_as_the_product_writes_it() -> None:
    told = []
    run_seed(5, on_fact=lambda _label, fact, wall, monotonic: told.append((fact, wall, monotonic)))
    history = history_of(5, group="g", fenced=True)
    assert len(history.records) == len(told) > 50
    for record, (fact, wall, monotonic) in zip(history.records, told, strict=True):
        event = event_of(fact, fenced=True)
        assert (record.kind, record.node) == (event.kind, f"g/{event.node}")
        assert (record.incarnation, record.term, record.version) == (
            event.incarnation,
            event.term,
            event.version,
        )
        assert (record.resource, record.token, record.revision) == (
            event.resource,
            event.token,
            event.revision,
        )
        assert (record.value, record.fenced) == (event.value, event.fenced)
        assert (record.wall_time, record.monotonic_time) == (wall, monotonic)
        assert Record.model_validate_json(record.to_line()) == record


def test_writing_the_history_changes_nothing() -> None:
    plain: list[str] = []
    run_seed(7, write=plain.append)
    written: list[str] = []
    recorder = Recorder("g")
    run_seed(7, write=written.append, make_world=lambda *given: recorder.watch(World(*given)))
    assert plain == written


def test_where_access_begins_the_term_and_version_are_known() -> None:
    starts = [
        record
        for record in history_of(2, group="g").records
        if record.kind == FactKind.START_ENTERED and record.resource is not None
    ]
    assert starts
    assert all(record.version > 0 and record.term > 0 and record.token for record in starts)


def test_who_dies_writes_nothing_more() -> None:
    plans = (HostPlan("host-0"), HostPlan("host-1"))
    recorder = Recorder("g")
    world = recorder.watch(World(Scenario(plans, 4), Random(1), Trace(None)))
    for host in world.hosts:
        world.start(host)
    world.run_for(5)
    dead = world.hosts[0].running
    assert dead is not None
    world.crash(world.hosts[0])
    died_at = world.scheduler.clock.wall()
    world.start(world.hosts[0])
    world.run_for(5)
    processes = by_process(recorder.records)
    assert processes[f"g/{dead.stem}"][-1].wall_time <= died_at
    assert processes["g/host-0.2"][0].sequence == 0
    assert processes["g/host-0.2"][0].wall_time >= died_at


@pytest.mark.full_size
@pytest.mark.rule("AU-4", "RB-12")
@pytest.mark.parametrize("profile", ["late requests", "slow network"])
def test_barriers_are_told_at_their_own_revisions(profile: str) -> None:
    """Each is added before it is used or removed, and removed before the next holder adds it."""
    unknown = 0
    for seed in range(24):
        added: dict[str | None, dict[int | None, str]] = defaultdict(dict)
        removals: list[Record] = []
        for record in history_of(seed, PROFILES[profile], group=f"g{seed}").records:
            holders = added[record.resource]
            if record.kind == FactKind.BARRIER_ADDED:
                assert record.token == record.revision
                assert record.token not in holders, "told twice"
                holders[record.token] = record.node
            elif record.kind in {FactKind.START_ENTERED, FactKind.BARRIER_REMOVED} and record.resource:
                assert holders.get(record.token) == record.node, (seed, record)
            if record.kind == FactKind.BARRIER_REMOVED:
                removals.append(record)
        for removal in removals:
            assert removal.token is not None
            later = [
                token for token in added[removal.resource] if token is not None and token > removal.token
            ]
            if removal.revision is None:
                unknown += 1
            elif later:
                assert removal.token < removal.revision < min(later), (seed, removal)
    assert unknown > 0


@pytest.mark.full_size
@pytest.mark.rule("RB-10")
def test_what_was_published_says_what_it_costs() -> None:
    published = [
        record
        for seed in range(SEEDS)
        for record in history_of(seed, PROFILES["operator"], group=f"g{seed}").records
        if record.kind == FactKind.ALLOCATION_PUBLISHED
    ]
    assert len(published) > SEEDS
    for record in published:
        assert record.value == record.detail["published_version"]
        assert record.detail["moves"] == record.detail["least_moves"]
    assert any(record.detail["moves"] for record in published)


@pytest.mark.full_size
@pytest.mark.rule("RB-1")
def test_in_a_mutant_the_rule_and_the_overlap_stand_beside_the_history() -> None:
    free = Switch(Translation, "_free", always(()))
    with switched([free]):
        histories = [history_of(seed, group=f"g{seed}") for seed in range(40)]
    broken = [history for history in histories if history.report.violations]
    assert broken
    assert all(history.records for history in broken)
    assert {rule for history in broken for _, rule, _ in history.report.violations} == {"RB-1"}


@pytest.mark.full_size
@pytest.mark.rule("RB-1")
def test_an_overlap_is_named_as_in_the_history() -> None:
    # A run goes on beyond the end of a lease, to where another node starts.
    with switched([Switch(Process, "_fire", always(None)), Switch(Oracle, "_check_ended", always(None))]):
        histories = [history_of(seed, PROFILES["isolation"], group=f"g{seed}") for seed in range(60)]
    overlaps = [(history, overlap) for history in histories for overlap in history.overlaps]
    assert any(overlap.excuse is None for _, overlap in overlaps)
    assert any(overlap.excuse is not None for _, overlap in overlaps)
    for history, overlap in overlaps:
        assert overlap.older_token < overlap.newer_token
        for node, token in ((overlap.older, overlap.older_token), (overlap.newer, overlap.newer_token)):
            added = [
                record
                for record in history.records
                if (record.resource, record.token) == (overlap.resource, token)
                and record.kind == FactKind.BARRIER_ADDED
            ]
            assert {record.node for record in added} == {node}
    unexcused = {history.records[0].group for history, overlap in overlaps if overlap.excuse is None}
    assert unexcused == {
        f"g{seed}"
        for history in histories
        for seed, rule, sentence in history.report.violations
        if rule in {"RB-1", "RB-34"} and "while" in sentence
    }
