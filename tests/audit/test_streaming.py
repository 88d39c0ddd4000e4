"""The audit as a stream: what the batch finds, once each, across restarts; what comes too late is told."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from rebalanser.audit import audit
from rebalanser.audit.sources import InvalidTopic, KafkaUnreachable
from rebalanser.audit.streaming import LATE, Stream, Told
from rebalanser.audit.tailing import TailReader
from rebalanser.history import Protocol, Record
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_kafka.history import open_sink
from support.histories import tell

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.slow

DELAY_S = 5.0
GROUP = Protocol.GROUP
PAIR = ("group", "host", "behind_host", "cause")
SEEDS = (2, 3, 4, 6, 9, 11)


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


def send(url: str, records: list[Record]) -> None:
    sink = open_sink(url, "orders", "worker-1")
    for record in records:
        sink.write(record)
    sink.close(PATIENCE_S)


def named(findings: DataFrame) -> Counter[tuple[str, str]]:
    return Counter((row["id"], row["certainty"]) for row in findings.select("id", "certainty").collect())


def stream(spark: SparkSession, folder: Path, told: list[Told], source: str | None = None) -> Stream:
    return Stream(
        spark,
        [source or str(folder / "history")],
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
    found = named(table(spark, folder, "findings"))
    with audit(spark, folder / "history") as whole:
        expected = named(whole.tables.findings)
    assert expected
    assert found == expected
    assert sum(each.came.records for each in told) == len(lines)
    assert sum(each.came.findings for each in told) == len(expected)


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
    assert sum(each.came.late for each in told) == 1


def test_of_hosts_whose_clocks_are_hours_apart_nothing_is_missed_that_the_batch_finds(
    spark: SparkSession, folder: Path
) -> None:
    """Their records are hours before the watermark, or ahead of all others, and count all the same."""
    told: list[Told] = []
    following = stream(spark, folder, told)
    following.start()
    for seed in (1, 5):
        append(
            folder,
            tell(seed, ["clock_hours_off", "overlap_beyond_clock_error"], protocol=GROUP).pages.records,
        )
        following.settle()
    following.stop()
    found = named(table(spark, folder, "findings"))
    with audit(spark, folder / "history") as whole:
        expected = named(whole.tables.findings)
        apart = {tuple(row) for row in whole.tables.clocks.select(*PAIR).collect()}
    assert expected
    assert {finding for finding, _ in expected} <= {finding for finding, _ in found}
    assert set(found.values()) == {1}
    assert {tuple(row) for row in following.table("clocks").select(*PAIR).collect()} == apart
    assert sum(each.came.late for each in told) == 0


@pytest.mark.rule("AU-1", "AU-9")
def test_a_topic_tells_what_the_files_tell_in_batch_and_as_a_stream(
    spark_kafka: SparkSession, kafka_address: str, folder: Path
) -> None:
    """Written by the sink that nodes write with, in three parts, one of which comes too late."""
    spark = spark_kafka
    lines = lines_of(SEEDS[:3])
    records = [Record.model_validate_json(line) for line in lines]
    held_back, rest = records[:1], records[1:]
    url = f"kafka://{kafka_address}/history-{uuid.uuid4().hex}"
    half = len(rest) // 2
    told: list[Told] = []
    for part in (rest[:half], rest[half:], held_back):
        send(url, part)
        following = stream(spark, folder, told, url)
        following.start()
        following.settle()
        following.stop()
    append(folder, [line for line, record in zip(lines, records, strict=True) if record not in held_back])
    (late,) = table(spark, folder, "quarantine").collect()
    assert late["reason"] == LATE
    assert json.loads(late["raw"])["process"] == held_back[0].process
    with audit(spark, folder / "history") as files:
        expected = named(files.tables.findings)
    assert expected
    assert named(table(spark, folder, "findings")) == expected
    send(url, held_back)
    append(folder, [lines[0]])
    with audit(spark, folder / "history") as files, audit(spark, url) as topic:
        assert named(topic.tables.findings) == named(files.tables.findings)
    nowhere = stream(spark, folder / "other", [], f"kafka://{kafka_address}/{uuid.uuid4().hex}")
    with pytest.raises(InvalidTopic, match="has no topic"):
        nowhere.start()
    nowhere.stop()
    silent = stream(spark, folder / "another", [], "kafka://127.0.0.1:1/history")
    with pytest.raises(KafkaUnreachable, match="no Kafka broker answers"):
        silent.start()
    silent.stop()


@pytest.mark.rule("AU-9")
def test_only_whole_lines_of_growing_files_are_read_and_each_once(folder: Path) -> None:
    reader = TailReader([str(folder / "history")], {}, tasks=2)
    append(folder, [b"one\n", b"two\n", b"thr"])
    first = reader.latestOffset()
    path = str(folder / "history" / "a.jsonl")
    assert first == {path: [8, 2]}
    (task,) = reader.partitions({}, first)
    (batch,) = reader.read(task)
    assert batch.to_pydict()["value"] == ["one", "two"]
    append(folder, [b"ee\n"])
    second = reader.latestOffset()
    (task,) = reader.partitions(first, second)
    (batch,) = reader.read(task)
    assert batch.to_pydict() == {
        "value": ["three"],
        "source": [(folder / "history" / "a.jsonl").as_uri()],
        "position": [3],
    }
    assert reader.partitions(second, reader.latestOffset()) == []
