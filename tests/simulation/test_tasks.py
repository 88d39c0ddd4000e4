"""A thousand task queues under faults: no rule is broken, and all is completed that can be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simulation.tasks import (
    ANYTHING,
    PROFILES,
    Fault,
    Profile,
    Report,
    exercised,
    replay_command,
    run_seed,
    run_seeds,
)
from simulation.tasks.scenario import OF_OPERATORS

SIMULATOR = "tasks"
CHUNK = 100
CHUNKS = 10
GENERAL = [
    name
    for name, profile in PROFILES.items()
    if not (profile.has_pools or profile.has_servers) and not set(OF_OPERATORS) & set(profile.faults)
]
"""Profiles that have no test of their own."""


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.rule("SK-3", "SK-4", "SK-5", "SK-6", "SK-7", "SK-8", "SK-9")
@pytest.mark.rule("SK-10", "SK-11", "SK-13", "SK-14", "SK-17", "SK-18", "SK-19", "SK-20", "SK-22", "SK-23")
@pytest.mark.lesson(12)
def test_no_rule_is_broken_whatever_fails(chunk: int) -> None:
    report = run_seeds(chunk * CHUNK, CHUNK)
    assert not report.violations, report.told(replay_command)
    assert exercised(report) == []


@pytest.mark.parametrize(("profile", "seeds"), [("workers", 24), ("busy workers", 8)])
@pytest.mark.rule("SK-6", "SK-7", "SK-8", "SK-15", "SK-17", "SK-19", "SK-20")
def test_loops_of_workers_do_all_tasks_whatever_fails(profile: str, seeds: int) -> None:
    report = run_seeds(0, seeds, PROFILES[profile])
    assert not report.violations, report.told(lambda seed: replay_command(seed, PROFILES[profile]))
    facts = {"begun", "given back", "renewed", "graceful stops", "errors of the loop slots"}
    assert facts <= report.facts.keys()


@pytest.mark.rule("SK-5", "SK-6", "SK-8", "SK-17", "SK-19", "SK-20", "SK-23")
def test_workers_claim_from_an_index_whatever_fails() -> None:
    report = run_seeds(0, 12, PROFILES["claims from an index"])
    assert not report.violations, report.told(
        lambda seed: replay_command(seed, PROFILES["claims from an index"])
    )
    facts = {"claims from the index", "claims of what was over", "given back", "looks of a paused worker"}
    assert facts | {"errors of the loop claims", "graceful stops", "timed out"} <= report.facts.keys()
    assert "claims for slots" not in report.facts


@pytest.mark.rule("SK-6", "SK-8", "SK-16", "SK-19", "SK-20")
def test_servers_serve_clients_whatever_fails_and_whoever_hangs_up() -> None:
    report = run_seeds(0, 6, PROFILES["servers"])
    assert not report.violations, report.told(lambda seed: replay_command(seed, PROFILES["servers"]))
    facts = {"claims for clients", "claims from the index", "claims for slots", "given back"}
    facts |= {"clients that hang up", "answers while a client hangs up", "clients told of an error"}
    assert facts | {"errors of the loop dispenser", "graceful stops"} <= report.facts.keys()


@pytest.mark.rule("SK-23")
def test_a_paused_queue_hands_out_nothing_and_goes_on_once_resumed() -> None:
    report = run_seeds(0, 6, PROFILES["pauses"])
    assert not report.violations, report.told(lambda seed: replay_command(seed, PROFILES["pauses"]))
    assert {"pauses", "refused: paused", "looks while paused", "given back"} <= report.facts.keys()


@pytest.mark.rule("SK-3", "SK-15", "SK-23")
def test_each_tick_has_one_task_unless_its_schedule_is_paused() -> None:
    report = run_seeds(0, 5, PROFILES["ticks"])
    assert not report.violations, report.told(lambda seed: replay_command(seed, PROFILES["ticks"]))
    assert {"ticks", "ticks that failed", "ticks left out", "looks at ticks"} <= report.facts.keys()


@pytest.mark.rule("SK-3")
def test_tasks_are_enqueued_together_or_not_at_all() -> None:
    report = run_seeds(0, 10, PROFILES["tasks together"])
    assert not report.violations, report.told(lambda seed: replay_command(seed, PROFILES["tasks together"]))
    assert {"enqueued together", "refused together"} <= report.facts.keys()


@pytest.mark.full_size
@pytest.mark.rule("SK-6", "SK-8", "SK-14", "SK-22")
@pytest.mark.parametrize("profile", GENERAL)
def test_without_a_mutant_every_profile_is_clean(profile: str) -> None:
    report = run_seeds(0, 60, PROFILES[profile])
    assert not report.violations, report.told(lambda seed: replay_command(seed, PROFILES[profile]))
    assert exercised(report, PROFILES[profile]) == []


@pytest.mark.full_size
@pytest.mark.lesson(12)
def test_a_seed_is_the_same_run_in_every_process(digest: Callable[[str, str], str]) -> None:
    assert len({digest(SIMULATOR, hash_seed) for hash_seed in ("1", "2", "3")}) == 1


@pytest.mark.full_size
@pytest.mark.lesson(12)
def test_runs_that_exercised_nothing_fail() -> None:
    idle = Profile("idle", faults=())
    report = run_seeds(0, 50, idle)
    assert not report.violations
    missing = "\n".join(exercised(report))
    for fault in set(ANYTHING.faults) - {Fault.COLLECT}:
        assert fault in missing


def test_a_batch_too_small_to_judge_still_needs_claims() -> None:
    told = exercised(Report(seeds=1))
    assert [sentence.rpartition(": ")[2] for sentence in told] == ["claims", "completed"]


def test_the_trace_of_a_seed_tells_what_happened() -> None:
    lines: list[str] = []
    run_seed(0, PROFILES["zombies"], lines.append)
    text = "\n".join(lines)
    for word in ("starts on host", "TakeOver", "FAULT", "status=claimed", "everything is healed"):
        assert word in text


@pytest.mark.full_size
@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("--seed", "0"), 0, "seed 0: no violation"),
        (("--seed", "0", "--profile", "lost requests", "--trace"), 0, "everything is healed"),
        (("--seeds", "4", "--first", "10", "--jobs", "1"), 0, "fact: claims"),
        (("--seeds", "4", "--profile", "weather"), 2, "unknown profile"),
    ],
)
def test_the_command_line_replays_and_soaks(
    arguments: tuple[str, ...], status: int, told: str, command_line: Callable[..., tuple[int, str]]
) -> None:
    ended, said = command_line(SIMULATOR, *arguments)
    assert ended == status, said
    assert told in said
