"""A thousand clusters under faults: no rule of Shiva is broken, and all is well soon after they end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simulation.shiva import (
    ANYTHING,
    PROFILES,
    Fault,
    Profile,
    exercised,
    replay_command,
    run_seed,
    run_seeds,
)

SIMULATOR = "shiva"
CHUNK = 100
CHUNKS = 10


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.rule(
    "SH-2",
    "SH-3",
    "SH-4",
    "SH-5",
    "SH-6",
    "SH-7",
    "SH-8",
    "SH-9",
    "SH-10",
    "SH-11",
    "SH-12",
    "SH-13",
    "SH-14",
    "SH-15",
    "SH-16",
    "SH-17",
)
@pytest.mark.lesson(12)
def test_no_rule_is_broken_whatever_fails(chunk: int) -> None:
    report = run_seeds(chunk * CHUNK, CHUNK)
    assert not report.violations, report.told(replay_command)
    assert exercised(report) == []


@pytest.mark.rule("SH-13", "SH-14", "SH-26")
@pytest.mark.lesson(12)
def test_workers_are_cordoned_drained_and_waited_for_whatever_fails() -> None:
    profile = PROFILES["absences"]
    report = run_seeds(0, CHUNK // 2, profile)
    assert not report.violations, report.told(lambda seed: replay_command(seed, profile))
    assert exercised(report, profile) == []


@pytest.mark.rule("SH-12", "SH-13", "SH-27")
@pytest.mark.lesson(12)
def test_no_worker_is_given_more_than_its_capacity_whatever_fails() -> None:
    profile = PROFILES["weights"]
    report = run_seeds(0, CHUNK // 2, profile)
    assert not report.violations, report.told(lambda seed: replay_command(seed, profile))
    assert exercised(report, profile) == []


@pytest.mark.rule("SH-12", "SH-13", "SH-14", "SH-28")
@pytest.mark.lesson(12)
def test_no_two_replicas_are_on_one_worker_whatever_fails() -> None:
    profile = PROFILES["replicas"]
    report = run_seeds(0, CHUNK // 2, profile)
    assert not report.violations, report.told(lambda seed: replay_command(seed, profile))
    assert exercised(report, profile) == []


@pytest.mark.rule("SH-2", "SH-15")
def test_a_start_whose_archive_is_dropped_before_it_is_read_is_refused_and_the_last_one_runs_on() -> None:
    """A client wrote an old archive anew just when a leader that read COMMAND late was to drop it."""
    profile = PROFILES["weights"]
    report = run_seeds(700_693, 1, profile)
    assert not report.violations, report.told(lambda seed: replay_command(seed, profile))


@pytest.mark.rule("SH-13", "SH-14", "SH-24")
@pytest.mark.lesson(12)
def test_whatever_changes_are_lost_nothing_runs_twice_and_all_is_well_soon() -> None:
    profile = PROFILES["lost changes"]
    report = run_seeds(0, 30, profile)
    assert not report.violations, report.told(lambda seed: replay_command(seed, profile))
    assert exercised(report, profile) == []


@pytest.mark.full_size
@pytest.mark.parametrize("name", [name for name in PROFILES if name != ANYTHING.name])
def test_without_a_mutant_every_profile_is_clean(name: str) -> None:
    report = run_seeds(0, 50, PROFILES[name])
    assert not report.violations, report.told(lambda seed: replay_command(seed, PROFILES[name]))
    assert report.starts > report.seeds


@pytest.mark.full_size
@pytest.mark.lesson(12)
def test_a_seed_is_the_same_run_in_every_process(digest: Callable[[str, str], str]) -> None:
    assert len({digest(SIMULATOR, hash_seed) for hash_seed in ("1", "2", "3")}) == 1


@pytest.mark.full_size
@pytest.mark.lesson(12)
def test_runs_that_exercised_nothing_fail() -> None:
    idle = Profile("idle", faults={}, kinds=(0, 0))
    report = run_seeds(0, 50, idle)
    assert not report.violations, report.told(replay_command)
    missing = "\n".join(exercised(report))
    for kind in ANYTHING.faults:
        if kind not in {Fault.KICK, Fault.RETENTION}:
            assert kind in missing


def test_the_trace_of_a_seed_tells_what_happened() -> None:
    lines: list[str] = []
    run_seed(2, ANYTHING, lines.append)
    text = "\n".join(lines)
    for sentence in ("took over with term", "StartCommand", "RUNS", "everything is healed"):
        assert sentence in text


@pytest.mark.full_size
@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("--seed", "0"), 0, "seed 0: no violation"),
        (("--seed", "0", "--trace"), 0, "everything is healed"),
        (("--seeds", "4", "--jobs", "1"), 0, "documents published"),
        (("--seeds", "4", "--profile", "weather"), 2, "unknown profile"),
    ],
)
def test_the_command_line_replays_and_soaks(
    arguments: tuple[str, ...], status: int, told: str, command_line: Callable[..., tuple[int, str]]
) -> None:
    ended, said = command_line(SIMULATOR, *arguments)
    assert ended == status, said
    assert told in said
