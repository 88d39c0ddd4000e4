"""The audit and the simulator's own oracle agree on the product and on each mutant.

Every seed is a group of its own in one history, which is audited in one job. What is found is compared with
what really was, case by case. ``REBALANSER_SIMULATED_SEEDS`` says how many sound seeds there are; each
mutant has a quarter as many.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rebalanser.audit import Options, audit
from rebalanser.core.group.messages import FactKind
from simulation.group import history_of

if TYPE_CHECKING:
    from types import ModuleType

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

SEEDS = int(os.environ.get("REBALANSER_SIMULATED_SEEDS", "32"))
HARD = (("remove only own barriers", 422), ("barrier absent", 425), ("clear on lost lease", 270))
"""Mutants and seeds whose late starts once hid other overlaps, or whose token two nodes used."""
UNSEEN_SHARE = 0.3
"""What share of the true cases of a kind the records may be unable to show.

They come in clusters, dozens in one run, so that it differs from sample to sample: of the steps of 60 seeds
of two mutants it was 12 to 26 %.
"""


def beside(name: str) -> ModuleType:
    """A module of this folder."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


simulated = beside("simulated")
compared = beside("compared")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simulated")


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[Any]:
    """The truth of all seeds, sound ones and those of each mutant, whose histories are written."""
    asked = [(None, range(SEEDS)), *((name, range(max(1, SEEDS // 4))) for name in simulated.mutants())]
    asked += [(name, range(seed, seed + 1)) for name, seed in HARD if seed >= SEEDS // 4]
    return [run for without, seeds in asked for run in simulated.write_runs((without, seeds, folder))]


@pytest.fixture(scope="module")
def exact(spark: SparkSession, folder: Path, runs: list[Any]) -> dict[str, list[dict[str, Any]]]:
    """What is found where all wall clocks are right: in the simulation they are."""
    return _audited(spark, folder / "right", 0.0) if runs else {}


@pytest.fixture(scope="module")
def blurred(spark: SparkSession, folder: Path, runs: list[Any]) -> dict[str, list[dict[str, Any]]]:
    """What is found where each host's wall clock is off, by as much as the audit is told."""
    return _audited(spark, folder / "wrong", 2 * simulated.SKEW_S) if runs else {}


def _audited(spark: SparkSession, folder: Path, clock_error_s: float) -> dict[str, list[dict[str, Any]]]:
    with audit(spark, folder, Options(clock_error_s=clock_error_s)) as audited:
        tables = audited.tables
        return {
            "findings": [row.asDict(recursive=True) for row in tables.findings.collect()],
            "accesses": [
                row.asDict() for row in tables.accesses.where("start_entered_wall is not null").collect()
            ],
            "aside": [row.asDict() for row in tables.quarantine.unionByName(tables.gaps, True).collect()],
            "clocks": [row.asDict() for row in tables.clocks.collect()],
        }


@pytest.mark.timeout(7200)
@pytest.mark.rule("AU-4", "AU-5")
def test_what_is_found_is_what_really_was(runs: list[Any], exact: dict[str, Any]) -> None:
    scores = compared.scores(runs, exact["findings"])
    table = compared.table(runs, scores)
    print(table)
    assert not any(score.missed or score.false for score in scores.values()), table
    for kind in compared.COMPARED:
        of_kind = [score for (_, which), score in scores.items() if which == kind]
        true, unseen = (sum(getattr(score, name) for score in of_kind) for name in ("true", "unseen"))
        assert unseen <= max(10, UNSEEN_SHARE * true), f"{kind}: {unseen} of {true}\n{table}"


@pytest.mark.rule("AU-4")
def test_without_a_mutant_only_what_the_bound_allows_is_found(runs: list[Any], exact: dict[str, Any]) -> None:
    sound = [run for run in runs if run.group.startswith(f"{simulated.SOUND}/")]
    assert len(sound) == SEEDS
    assert not [run.violation for run in sound if run.violation]
    kinds = {f["kind"] for f in exact["findings"] if f["group"].startswith(f"{simulated.SOUND}/")}
    assert kinds <= {"overlap", "token_order"}, "an old owner that was stopped may go on, or start too late"


@pytest.mark.rule("AU-3")
def test_every_access_is_an_interval_of_the_audit(runs: list[Any], exact: dict[str, Any]) -> None:
    rows = {(row["process"], row["start_entered_sequence"]): row for row in exact["accesses"]}
    assert len(rows) == len(exact["accesses"])
    seen = {access.name: access for run in runs for access in run.accesses if access.written is not None}
    assert rows.keys() == seen.keys()
    for name, access in seen.items():
        row = rows[name]
        assert (row["resource"], row["node"], row["token"]) == (access.resource, access.node, access.token)
        assert row["start_entered_wall"] == access.begins_wall
        if row["ended_by"] == "stop":
            assert row["end_wall"] == access.ends_wall


@pytest.mark.rule("AU-5")
def test_clocks_that_are_off_make_no_certain_finding_that_is_not_true(
    runs: list[Any], blurred: dict[str, Any]
) -> None:
    wrong = compared.false_by_clocks(runs, blurred["findings"], 2 * simulated.SKEW_S)
    assert not wrong, "\n".join(wrong)


@pytest.mark.rule("AU-1", "AU-2")
def test_nothing_of_a_simulated_history_is_set_aside(exact: dict[str, Any], blurred: dict[str, Any]) -> None:
    assert exact["aside"] == blurred["aside"] == []


@pytest.mark.rule("AU-3")
def test_a_stop_is_written_with_the_token_of_its_start() -> None:
    stops = [record for record in history_of(1, group="g").records if record.kind == FactKind.STOP_RETURNED]
    assert stops
    assert all(stop.token for stop in stops)


def test_the_run_is_the_same_whoever_looks_on(tmp_path: Path) -> None:
    """What an oracle sees first is what breaks a rule here as well; only then does the run go on."""
    seed = next(seed for seed in range(1, 400) if history_of(seed, group="g").overlaps)
    (run,) = simulated.write_runs((None, range(seed, seed + 1), tmp_path))
    plain = history_of(seed, group=run.group)
    assert run.violation is None
    assert run.records == len(plain.records)
    known = {(one.resource, one.older_token, one.newer_token) for one in plain.overlaps}
    assert known == {(older.resource, older.token, newer.token) for older, newer in compared.overlaps(run)}
    runs = simulated.write_runs(("barrier absent", range(1, 40), tmp_path))
    violations = [broken.violation for broken in runs if broken.violation is not None]
    assert violations
    assert {rule for rule, *_ in violations} == {"RB-1"}
