"""A thousand NELI groups under faults: no rule is broken, and every role soon has its leader again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simulation.neli import (
    PROFILES,
    Fault,
    Profile,
    Report,
    exercised,
    replay_command,
    run_seed,
    run_seeds,
)

SIMULATOR = "neli"
CHUNK = 100
CHUNKS = 10


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.rule("NE-4", "NE-5", "NE-6", "NE-7", "NE-8", "NE-9", "NE-10", "NE-15", "NE-16")
@pytest.mark.lesson(12, 13)
def test_no_rule_is_broken_whatever_fails(chunk: int) -> None:
    report = run_seeds(chunk * CHUNK, CHUNK)
    assert not report.violations, report.told(replay_command)
    assert exercised(report) == []


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
    assert "changes of a leader" in missing
    for fault in Fault:
        assert fault in missing


def test_a_batch_too_small_to_judge_still_needs_inductions() -> None:
    assert exercised(Report(seeds=10, inductions=9)) == ["10 seeds had 9 inductions only"]
    assert exercised(Report(seeds=10, inductions=10)) == []


def test_reports_are_added_up_but_for_the_longest_overlap() -> None:
    reports = (Report(seeds=2, overlaps=1, longest_overlap_s=length_s) for length_s in (0.25, 0.75, 0.5))
    assert Report.of(reports) == Report(seeds=6, overlaps=3, longest_overlap_s=0.75)


def test_the_trace_of_a_seed_tells_what_happened() -> None:
    lines: list[str] = []
    run_seed(0, PROFILES["hand-overs"], lines.append)
    text = "\n".join(lines)
    for word in ("p1        starts", "kind=induced", "FAULT", "commit", "everything is healed"):
        assert word in text


@pytest.mark.full_size
@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("--seed", "0"), 0, "seed 0: no violation"),
        (("--seed", "0", "--profile", "late requests", "--trace"), 0, "everything is healed"),
        (("--seeds", "4", "--first", "10", "--jobs", "1"), 0, "longest overlap"),
        (("--seeds", "4", "--profile", "weather"), 2, "unknown profile"),
    ],
)
def test_the_command_line_replays_and_soaks(
    arguments: tuple[str, ...], status: int, told: str, command_line: Callable[..., tuple[int, str]]
) -> None:
    ended, said = command_line(SIMULATOR, *arguments)
    assert ended == status, said
    assert told in said
