"""Thousands of groups under faults: no rule is broken, and all is well soon after the faults end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import pytest

from rebalanser.core.group import Event, Fact, FactKind, Node, rebalancing
from simulation.group import (
    ANYTHING,
    PROFILES,
    HostPlan,
    Process,
    Profile,
    Report,
    Scenario,
    Trace,
    World,
    exercised,
    replay_command,
    run_seed,
    run_seeds,
)
from simulation.group.coverage import ANSWERS, ENOUGH, NOT_BY_CHANCE, TRANSITIONS, seldom
from simulation.kernel.mutants import Switch, switched

SIMULATOR = "group"
CHUNK = 100
CHUNKS = 20


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.rule(
    "RB-1",
    "RB-2",
    "RB-3",
    "RB-4",
    "RB-5",
    "RB-6",
    "RB-7",
    "RB-8",
    "RB-9",
    "RB-10",
    "RB-11",
    "RB-12",
    "RB-13",
    "RB-14",
    "RB-15",
    "RB-16",
    "RB-17",
    "RB-18",
    "RB-19",
    "RB-20",
    "RB-21",
    "RB-22",
    "RB-23",
    "RB-24",
    "RB-25",
    "RB-26",
    "RB-27",
    "RB-28",
    "RB-29",
    "RB-30",
    "RB-33",
    "RB-34",
    "RB-41",
    "RB-43",
    "RB-44",
)
@pytest.mark.lesson(1, 2, 3, 6, 7, 8, 9, 10, 12, 13)
def test_no_rule_is_broken_whatever_fails(chunk: int) -> None:
    report = run_seeds(chunk * CHUNK, CHUNK)
    assert not report.violations, report.told(replay_command)
    assert exercised(report) == []


def _answers(node: Node) -> dict[str, object]:
    """What the node's rebalancing says of itself."""
    state = node._rebalancing
    return {
        f"{question.__name__} {everything}": question(everything)
        for question in (state.to_stop, state.to_remove, state.to_find_out)
        for everything in (False, True)
    } | {"add": state.to_add(), "missing": state.missing, "start": state.to_start(), "done": state.completed}


def _command_at_most(barriers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def first(resources: Iterable[Any], count: int) -> list[Any]:
        return sorted(resources)[:count]

    monkeypatch.setattr(rebalancing, "MAX_BARRIERS", barriers)
    monkeypatch.setattr(rebalancing, "islice", first)  # a seed is the same run whatever the order of sets


def _differences(node: Node) -> dict[str, object]:
    """The differences between what a node wants, holds and has started, as it keeps them."""
    state = node._rebalancing
    return {
        "to try": state._to_try,
        "leaving": state._leaving,
        "spare": state._spare,
        "ready": state._ready,
        "waiting": state._waiting_for.keys(),
    }


def _differences_worked_out(node: Node) -> dict[str, object]:
    """The same, worked out from what is wanted, held, started and waited for."""
    state = node._rebalancing
    wanted, held, started = set(state.wanted), state.held.keys(), state.started.keys()
    waiting = {resource for resources in state._waiting_for.values() for resource in resources & wanted}
    spare = held - started - (wanted - state._restarting - state._giving_back)
    return {
        "to try": wanted - held - waiting,
        "leaving": ((started - wanted) | (started & (state._restarting | state.asked))) - state.stuck,
        "spare": spare,
        "ready": {
            resource: token for resource, token in state.held.items() if resource not in spare | started
        },
        "waiting": {holder for holder, resources in state._waiting_for.items() if resources - held},
    }


@pytest.mark.rule("RB-11", "RB-42")
@pytest.mark.parametrize("most", [rebalancing.MAX_BARRIERS, 2])
@pytest.mark.parametrize(
    "profile", ["anything", "short lives", "overruns", "late requests", "leaders", "isolation"]
)
def test_what_is_remembered_is_what_would_be_worked_out(
    profile: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _command_at_most(most, monkeypatch)

    def checked(handle: Callable[[Process, Event], None]) -> Callable[[Process, Event], None]:
        def handle_and_check(process: Process, event: Event) -> None:
            handle(process, event)
            remembered = _answers(process.node)
            process.node._rebalancing._changed()
            assert remembered == _answers(process.node), event
            assert _differences(process.node) == _differences_worked_out(process.node), event

        return handle_and_check

    with switched([Switch(Process, "handle", checked)]):
        for seed in range(25):
            run_seed(seed, PROFILES[profile])


@pytest.mark.rule("RB-14", "RB-42")
@pytest.mark.parametrize("profile", PROFILES)
def test_commands_for_two_barriers_each_break_no_rule(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _command_at_most(2, monkeypatch)
    for seed in range(8):
        assert run_seed(seed, PROFILES[profile]).violations == []


@pytest.mark.rule("RB-36", "RB-37", "RB-38")
def test_resources_are_placed_and_moved_as_the_policy_says() -> None:
    report = run_seeds(0, 25, PROFILES["placement"])
    assert not report.violations, report.told(lambda seed: replay_command(seed, PROFILES["placement"]))
    assert exercised(report, PROFILES["placement"]) == []


@pytest.mark.full_size
@pytest.mark.lesson(12)
def test_a_seed_is_the_same_run_in_every_process(digest: Callable[[str, str], str]) -> None:
    assert len({digest(SIMULATOR, hash_seed) for hash_seed in ("1", "2", "3")}) == 1


@pytest.mark.lesson(12)
def test_runs_that_exercised_nothing_fail() -> None:
    idle = Profile("idle", faults={}, kinds=(0, 0), hosts=(1, 1), resources=(1, 1))
    report = run_seeds(0, 50, idle)
    assert not report.violations
    missing = "\n".join(exercised(report))
    assert "changes of the leader" in missing
    for kind in ANYTHING.faults:
        assert kind in missing


def test_what_a_soak_met_too_seldom_is_told() -> None:
    met = Counter(dict.fromkeys((ANSWERS | TRANSITIONS) - NOT_BY_CHANCE, ENOUGH))
    assert seldom(met) == {}
    met["Join → Joined"] -= 1
    del met["role: leader, another term seen"]
    assert seldom(met) == {"Join → Joined": ENOUGH - 1, "role: leader, another term seen": 0}


@pytest.mark.full_size
def test_a_soak_of_all_profiles_reports_what_it_met_too_seldom(
    command_line: Callable[..., tuple[int, str]],
) -> None:
    seeds = len(PROFILES) + 1
    status, said = command_line(SIMULATOR, "--profile", "all", "--seeds", str(seeds), "--jobs", "1")
    assert status == 0, said
    assert "seldom met: Campaign → SessionLost" in said


def test_a_batch_too_small_to_judge_still_needs_rebalances() -> None:
    assert exercised(Report(seeds=10, rebalances=9)) == ["10 seeds completed 9 rebalances only"]
    assert exercised(Report(seeds=10, rebalances=10)) == []


def test_facts_are_handed_out_with_the_hosts_own_clock() -> None:
    told: list[tuple[str, FactKind, float, float]] = []
    run_seed(3, on_fact=lambda host, fact, wall, monotonic: told.append((host, fact.kind, wall, monotonic)))
    kinds = Counter(kind for _, kind, _, _ in told)
    assert kinds[FactKind.START_ENTERED] >= kinds[FactKind.START_RETURNED] > 0
    assert kinds[FactKind.JOINED] > 0
    for host in {host for host, *_ in told}:
        times = [monotonic for where, _, _, monotonic in told if where == host]
        assert times == sorted(times)


def test_the_trace_of_a_seed_tells_what_happened() -> None:
    lines: list[str] = []
    run_seed(0, ANYTHING, lines.append)
    text = "\n".join(lines)
    for sentence in ("starts as host-0.1", "elected", "everything is healed", "on_start entered for"):
        assert sentence in text


@pytest.mark.full_size
@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("--seed", "0"), 0, "seed 0: no violation"),
        (("--seed", "0", "--trace"), 0, "everything is healed"),
        (("--seeds", "4", "--jobs", "1"), 0, "stale writes refused"),
        (("--seeds", "4", "--profile", "weather"), 2, "unknown profile"),
    ],
)
def test_the_command_line_replays_and_soaks(
    arguments: tuple[str, ...], status: int, told: str, command_line: Callable[..., tuple[int, str]]
) -> None:
    ended, said = command_line(SIMULATOR, *arguments)
    assert ended == status, said
    assert told in said


@pytest.mark.rule("RB-39")
def test_labels_keep_their_shares_and_pass_them_on() -> None:
    report = run_seeds(0, 25, PROFILES["static membership"])
    assert not report.violations, report.told(
        lambda seed: replay_command(seed, PROFILES["static membership"])
    )
    assert exercised(report, PROFILES["static membership"]) == []


@pytest.mark.rule("RB-39")
@pytest.mark.parametrize("surge", [False, True], ids=["one by one", "with surge"])
def test_a_rolling_restart_starts_each_resource_once_and_moves_none_between_labels(surge: bool) -> None:
    """Ten nodes own a thousand resources in all; the time is virtual."""
    plans = [HostPlan(f"host-{index}", rejoin_grace_s=30.0) for index in range(10)]
    started: Counter[str] = Counter()
    owners: dict[str, str] = {}

    def told(label: str, fact: Fact, _wall: float, _monotonic: float) -> None:
        if fact.kind is FactKind.START_ENTERED and fact.resource is not None:
            started[fact.resource] += 1
            owners[fact.resource] = label

    def is_settled() -> bool:
        return world.unsettled() is None and len(world.oracle.accesses) == 1000

    def until(is_done: Callable[[], bool]) -> None:
        ends = world.now + 60.0
        while not is_done():
            assert world.now < ends, world.unsettled()
            world.run_for(0.2)

    world = World(Scenario((*plans, *plans), resources=1000, writes=0.0), Random(1), Trace(None), told)
    olds, news = world.hosts[:10], world.hosts[10:]
    for host in olds:
        world.start(host)
    until(is_settled)
    before = {resource: owner.partition("#")[0] for resource, owner in owners.items()}
    assert Counter(before.values()) == dict.fromkeys((plan.label for plan in plans), 100)
    started.clear()
    for old, new in zip(olds, news, strict=True):
        if surge:
            world.start(new)
            until(is_settled)
        world.stop(old)
        until(lambda host=old: host.running is None)  # type: ignore[misc]
        if not surge:
            world.start(old)
        until(is_settled)
    assert len(started) == 1000
    assert set(started.values()) == {1}, "starts are exactly as many as resources"
    assert {resource: owner.partition("#")[0] for resource, owner in owners.items()} == before
