"""The audit as a stream: what the batch finds, once each, across restarts; what comes too late is told."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from rebalanser.audit import audit
from rebalanser.audit.streaming import LATE, Stream, Told, UnusableCheckpoint
from rebalanser.audit.tailing import TailReader
from rebalanser.testing.histories import tell

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

DELAY_S = 5.0
SEEDS = (2, 3, 4, 6, 9, 11)
"""Stories without clocks that are hours apart: of such hosts a stream can't tell what a batch can."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "history").mkdir()
    return tmp_path


def lines_of(seeds: Iterable[int]) -> list[bytes]:
    """The lines of some stories that have no spoiled line, in the order of their wall times."""
    lines = [line for seed in seeds for line in tell(seed).pages.records]
    return sorted(lines, key=lambda line: float(json.loads(line)["wall_time"]))


def append(folder: Path, lines: list[bytes]) -> None:
    with (folder / "history" / "a.jsonl").open("ab") as file:
        file.writelines(lines)


def stream(spark: SparkSession, folder: Path, told: list[Told]) -> Stream:
    return Stream(
        spark,
        [str(folder / "history")],
        out=folder / "out",
        checkpoint=folder / "checkpoint",
        delay_s=DELAY_S,
        on_batch=told.append,
    )


def table(spark: SparkSession, folder: Path, name: str) -> DataFrame:
    return spark.read.parquet(*map(str, (folder / "out" / name).glob("batch=*")))


@pytest.mark.rule("AU-9", "AU-4")
def test_a_restarted_stream_finds_what_the_batch_finds_once_each(spark: SparkSession, folder: Path) -> None:
    lines = lines_of(SEEDS)
    third = len(lines) // 3
    told: list[Told] = []
    for part in (lines[:third], lines[third : 2 * third], lines[2 * third :]):
        append(folder, part)
        following = stream(spark, folder, told)
        following.start()
        following.settle() if part is lines[2 * third :] else following.read_all()
        following.stop()
    found = Counter(
        (row["id"], row["certainty"])
        for row in table(spark, folder, "findings").select("id", "certainty").collect()
    )
    with audit(spark, folder / "history") as whole:
        expected = Counter(
            (row["id"], row["certainty"]) for row in whole.tables.findings.select("id", "certainty").collect()
        )
    assert expected
    assert found == expected
    assert sum(each.records for each in told) == len(lines)
    assert sum(each.findings for each in told) == len(expected)


@pytest.mark.rule("AU-1", "AU-9")
def test_what_comes_too_late_is_quarantined_and_what_comes_late_counts(
    spark: SparkSession, folder: Path
) -> None:
    lines = lines_of([0])
    walls = [float(json.loads(line)["wall_time"]) for line in lines]
    late = next(n for n, wall in enumerate(walls) if wall > walls[-1] - DELAY_S)
    told: list[Told] = []
    following = stream(spark, folder, told)
    append(folder, lines[1:late] + lines[late + 1 :])
    following.start()
    following.read_all()
    append(folder, [lines[0], lines[late]])
    following.settle()
    following.stop()
    (row,) = table(spark, folder, "quarantine").collect()
    assert row["reason"] == LATE
    assert json.loads(row["raw"])["sequence"] == json.loads(lines[0])["sequence"]
    assert sum(each.late for each in told) == 1


@pytest.mark.rule("AU-9")
def test_a_checkpoint_of_another_version_or_of_other_sources_is_refused(
    spark: SparkSession, folder: Path
) -> None:
    stream(spark, folder, [])
    mark = folder / "checkpoint" / "rebalanser.json"
    mark.write_text(json.dumps(json.loads(mark.read_text()) | {"format": 99}))
    with pytest.raises(UnusableCheckpoint, match="format 99"):
        stream(spark, folder, [])
    mark.write_text(json.dumps({"format": 1, "sources": ["elsewhere"]}))
    with pytest.raises(UnusableCheckpoint, match="is of elsewhere"):
        stream(spark, folder, [])
    mark.unlink()
    (folder / "checkpoint" / "notes.txt").touch()
    with pytest.raises(UnusableCheckpoint, match="something else"):
        stream(spark, folder, [])


@pytest.mark.rule("AU-9")
def test_only_whole_lines_of_growing_files_are_read_and_each_once(folder: Path) -> None:
    reader = TailReader([str(folder / "history")], {})
    append(folder, [b"one\n", b"two\n", b"thr"])
    first = reader.latestOffset()
    path = str(folder / "history" / "a.jsonl")
    assert first == {path: [8, 2]}
    (stretch,) = reader.partitions({}, first)
    (batch,) = reader.read(stretch)
    assert batch.to_pydict()["value"] == ["one", "two"]
    append(folder, [b"ee\n"])
    second = reader.latestOffset()
    (stretch,) = reader.partitions(first, second)
    (batch,) = reader.read(stretch)
    assert batch.to_pydict() == {
        "value": ["three"],
        "source": [(folder / "history" / "a.jsonl").as_uri()],
        "position": [3],
    }
    assert reader.partitions(second, reader.latestOffset()) == []
