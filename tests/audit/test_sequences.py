"""Missing records, those that came twice, and processes, against a plain oracle over many histories."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from rebalanser.audit.caching import computed
from rebalanser.audit.schema import RECORDS
from rebalanser.audit.sequences import (
    conflicts,
    gaps,
    gaps_of,
    has_duplicates,
    process_counts,
    processes_of,
)
from rebalanser.audit.tables import FINDINGS, GAPS, PROCESSES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HISTORIES = 100
SEEN = "seen"
DIFFERENCES: list[dict[str, Any]] = [
    {"kind": "left"},
    {"detail": {"a": "b"}},
    {"token": 3},
    {"monotonic_time": -1.0},
]


def a_record(process: str, sequence: int, **other: Any) -> dict[str, Any]:
    record: dict[str, Any] = dict.fromkeys(RECORDS.names)
    return record | {
        "schema_version": 2,
        "protocol": "group",
        "group": "orders",
        "process": process,
        "node": f"{process}-1",
        "label": "worker",
        "incarnation": 1,
        "sequence": sequence,
        "kind": "joining",
        "term": 0,
        "version": 0,
        "wall_time": 1000.0 + sequence,
        "monotonic_time": float(sequence),
        "detail": {},
        "source": "file:///history.jsonl",
        **other,
    }


@dataclass
class History:
    """Records of one process, and what is to be found in them."""

    process: str
    records: list[dict[str, Any]] = field(default_factory=list)
    gaps: list[tuple[Any, ...]] = field(default_factory=list)
    duplicates: int = 0
    conflicts: set[int] = field(default_factory=set)


def a_history(seed: int) -> History:
    """Numbers of which some are missing, some told to be, some twice, and some twice and different."""
    rng = random.Random(seed)
    history = History(f"p{seed}")
    states = some_states(rng)
    numbers = [number for number, state in enumerate(states) if state == SEEN]
    history.records = [a_record(history.process, number) for number in numbers]
    add_gaps(history, numbers, runs_of(states))
    for number in rng.sample(numbers, min(len(numbers), rng.randrange(4))):
        differing = rng.choice(DIFFERENCES) if rng.random() < 0.5 else {}
        if differing:
            history.conflicts.add(number)
        history.records.append(a_record(history.process, number) | differing)
        history.duplicates += 1
    return history


def some_states(rng: random.Random) -> list[str | None]:
    """For each number whether it is seen, missing (None), or missing with a reason."""
    length = rng.choice([1, 2, 63, 64, 65, 128, 200])
    states: list[str | None] = [SEEN] * length
    for _ in range(rng.randrange(4)):
        begins = rng.randrange(length)
        ends = min(length, begins + rng.choice([1, 2, 63, 64, 65, 130]))
        states[begins:ends] = [f"told {begins}" if rng.random() < 0.5 else None] * (ends - begins)
    return states


def runs_of(states: list[str | None]) -> list[tuple[int, int, str | None]]:
    """First and last number and reason of each run of missing numbers, up to the last that anyone told of."""
    runs, number = [], 0
    for state, members in itertools.groupby(states):
        first, number = number, number + len(list(members))
        if state != SEEN:
            runs.append((first, number - 1, state))
    return runs[:-1] if runs and runs[-1][1] == len(states) - 1 and runs[-1][2] is None else runs


def add_gaps(history: History, numbers: list[int], runs: list[tuple[int, int, str | None]]) -> None:
    for first, last, told in runs:
        missing = last - first + 1
        if told:
            detail = {"dropped": str(missing), "first": str(first), "last": str(last), "reason": told}
            history.records.append(a_record(history.process, first, kind="gap", detail=detail))
        before = max((n for n in numbers if n < first), default=None)
        after = min((n for n in numbers if n > last), default=None)
        walls = [None if n is None else 1000.0 + n for n in (before, after)]
        reason = told or ("rotated" if before is None else "missing")
        history.gaps.append((history.process, first, last, missing, *walls, reason))


@pytest.fixture(scope="module")
def histories() -> list[History]:
    return [a_history(seed) for seed in range(HISTORIES)]


@pytest.fixture(scope="module")
def records(spark: SparkSession, histories: list[History], tmp_path_factory: pytest.TempPathFactory) -> Any:
    lines = [json.dumps(record) for history in histories for record in history.records]
    random.Random(1).shuffle(lines)
    file = tmp_path_factory.mktemp("sequences") / "records.jsonl"
    file.write_text("\n".join(lines))
    return spark.read.schema(RECORDS).json(str(file)).persist()


@pytest.mark.rule("AU-2")
def test_gaps_are_the_numbers_that_are_missing_with_the_reason_that_was_given(
    records: Any, histories: list[History]
) -> None:
    found = gaps(records)
    assert found.schema.names == GAPS.names
    rows = [tuple(row)[2:3] + tuple(row)[4:] for row in found.collect()]
    assert sorted(rows, key=repr) == sorted((gap for h in histories for gap in h.gaps), key=repr)
    assert {gap[-1].split()[0] for gap in rows} == {"told", "rotated", "missing"}


@pytest.mark.rule("AU-2")
def test_records_that_came_again_are_counted(records: Any, histories: list[History]) -> None:
    rows = processes_of(process_counts(records)).collect()
    found = {row["process"]: row["duplicates"] for row in rows if row["duplicates"]}
    assert found == {h.process: h.duplicates for h in histories if h.duplicates}


@pytest.mark.rule("AU-2", "AU-4")
def test_different_records_of_one_name_are_found_and_equal_ones_are_not(
    records: Any, histories: list[History]
) -> None:
    found = conflicts(records)
    assert found.schema == FINDINGS or found.schema.names == FINDINGS.names
    rows = found.collect()
    named = Counter((row["evidence"][0]["process"], row["evidence"][0]["sequence"]) for row in rows)
    assert named == Counter((h.process, number) for h in histories for number in h.conflicts)
    assert len({row["id"] for row in rows}) == len(rows) > 0


def test_processes_have_their_numbers_and_times(records: Any, histories: list[History]) -> None:
    found = processes_of(process_counts(records))
    assert found.schema.names == PROCESSES.names
    rows = {row["process"]: (row["first_sequence"], row["last_sequence"]) for row in found.collect()}
    expected = {
        h.process: (min(r["sequence"] for r in h.records), max(r["sequence"] for r in h.records))
        for h in histories
        if h.records
    }
    assert rows == expected


@pytest.mark.rule("AU-2")
def test_one_pass_over_all_records_tells_the_same(records: Any) -> None:
    counted = process_counts(records)
    missing = gaps_of(counted, records.where("kind = 'gap'"), records, computed)
    assert missing is not None
    assert missing.schema.names == GAPS.names
    assert sorted(missing.collect(), key=repr) == sorted(gaps(records).collect(), key=repr)
    assert has_duplicates(counted)
    assert not has_duplicates(process_counts(records.dropDuplicates(["process", "sequence"])))


@pytest.mark.rule("AU-2")
def test_where_no_number_is_missing_the_records_are_not_looked_at_again(spark: SparkSession) -> None:
    whole = spark.createDataFrame(
        [tuple(a_record("p", number).values()) for number in range(130)], RECORDS
    ).persist()
    unreadable = whole.where("raise_error('looked at') is null")
    assert gaps_of(process_counts(whole), whole.where("kind = 'gap'"), unreadable, computed) is None
