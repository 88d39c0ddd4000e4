"""Every line becomes a record or a row of quarantine, whatever it is."""

from __future__ import annotations

import gzip
import json
import socket
from typing import TYPE_CHECKING, Any

import pytest

from rebalanser.audit.ingest import parse, parse_lines, parse_once, read
from rebalanser.audit.schema import RECORD, RECORDS
from rebalanser.audit.sources import InvalidTopic, KafkaTopic, KafkaUnreachable, NoHistory
from rebalanser.audit.tables import QUARANTINE
from rebalanser.history import Author, Event, Protocol, Record

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import Row, SparkSession

AUTHOR = Author(Protocol.GROUP, "orders", "p", "worker", "host", "boot")


def a_line(number: int = 0, /, **changed: Any) -> str:
    event = Event(
        "barrier_added", "p-1", 1, resource="r", token=7, detail={"holder": "x", "n": 3, "yes": True}
    )
    record = Record.of(AUTHOR, event, sequence=number, wall=1000.5, monotonic=5.25).model_dump(mode="json")
    return json.dumps({name: value for name, value in {**record, **changed}.items() if value != "GONE"})


VERSION_1 = json.dumps(
    {
        "schema_version": 1, "group": "orders", "node": "q-x-12", "label": "worker", "incarnation": 12,
        "sequence": 5, "kind": "allocation_published", "term": 1, "version": 2, "wall_time": 1,
        "monotonic_time": 2, "detail": {"published_version": 17},
    }
)  # fmt: skip
BAD = {
    "nothing like JSON": ("not_json", "not JSON"),
    a_line(1)[:100]: ("torn", "truncated"),
    a_line(1)[:-1]: ("torn", "truncated"),
    a_line(schema_version=3): ("newer_schema", "schema version 3; this version of Rebalanser reads up to 2"),
    a_line(schema_version=0): ("not_a_record", "schema_version: unknown"),
    a_line(node="GONE"): ("not_a_record", "node: missing"),
    a_line(sequence="five"): ("not_a_record", "sequence: wrong type"),
    a_line(sequence=-1): ("not_a_record", "sequence: negative"),
    a_line(token=1.5): ("not_a_record", "token: wrong type"),
    a_line(token=1 << 70): ("not_a_record", "token: wrong type"),
    a_line(kind="danced"): ("not_a_record", "kind: 'danced' is not a kind of 'group'"),
    a_line(protocol="paxos"): ("not_a_record", "kind: 'barrier_added' is not a kind of 'paxos'"),
    "null": ("not_a_record", "schema_version: missing"),
    "17": ("not_a_record", "schema_version: missing"),
    "{}": ("not_a_record", "schema_version: missing"),
}
GOOD = [a_line(), a_line(1, new_in_a_later_release={"a": [1]}), VERSION_1]


def a_history(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_text("\n".join([*GOOD, "", "   ", *BAD]) + "\n")
    return folder


def as_dicts(rows: list[Row]) -> list[dict[str, Any]]:
    return sorted((row.asDict() for row in rows), key=lambda row: (row["process"], row["sequence"]))


@pytest.mark.rule("AU-1")
def test_every_line_is_a_record_or_in_quarantine_with_its_reason(spark: SparkSession, tmp_path: Path) -> None:
    ingested = parse(read(spark, [a_history(tmp_path / "100%a {b}")]))
    assert ingested.records.schema.names == RECORDS.names
    assert ingested.quarantine.schema.names == QUARANTINE.names
    bad = ingested.quarantine.collect()
    assert sorted((row["reason"], row["detail"]) for row in bad) == sorted(BAD.values())
    assert {row["raw"] for row in bad if row["reason"] in {"torn", "not_json"}} < set(BAD)
    first, second, old = as_dicts(ingested.records.collect())
    assert {name: first[name] for name in RECORD.names} == json.loads(a_line()) | {
        "detail": {"holder": "x", "n": "3", "yes": "true"}
    }
    assert first["step"] == "barrier_added"
    assert first["source"].endswith("/100%2525a%20%7Bb%7D/a.jsonl") or first["source"].endswith("a.jsonl")
    assert second["sequence"] == 1
    assert (old["process"], old["protocol"], old["value"], old["step"]) == ("q-x", "group", 17.0, "published")


@pytest.mark.rule("AU-1")
@pytest.mark.parametrize("lines", [GOOD[:2], GOOD, [*GOOD, *BAD]])
def test_records_are_the_same_where_all_are_looked_at_at_once(
    spark: SparkSession, tmp_path: Path, lines: list[str]
) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    raw = read(spark, [tmp_path])
    once, each = parse_once(raw), parse(raw)
    assert once.records.schema.names == RECORDS.names
    assert once.quarantine.schema.names == QUARANTINE.names
    assert as_dicts(once.records.collect()) == as_dicts(each.records.collect())
    assert sorted(once.quarantine.collect()) == sorted(each.quarantine.collect())
    assert once.quarantine.count() == len(lines) - len(set(GOOD) & set(lines))


@pytest.mark.rule("AU-1")
def test_lines_of_a_stream_are_judged_like_those_of_files(spark: SparkSession, tmp_path: Path) -> None:
    folder = a_history(tmp_path / "h")
    of_files = parse(read(spark, [folder]))
    lines = spark.read.text(str(folder)).selectExpr("value", "'t/0' as source", "7L as position")
    of_lines = parse(parse_lines(lines))
    for one, other in ((of_files.records, of_lines.records), (of_files.quarantine, of_lines.quarantine)):
        columns = [name for name in one.columns if name not in {"source", "position"}]
        assert sorted(map(repr, one.select(columns).collect())) == sorted(
            map(repr, other.select(columns).collect())
        )
    assert {row["position"] for row in of_lines.records.collect()} == {7}


@pytest.mark.rule("AU-1")
def test_a_message_without_a_value_is_quarantined_and_a_blank_one_is_nothing(spark: SparkSession) -> None:
    rows = [(None, "t/0", 0), (" \r", "t/0", 1), ("", "t/0", 2), (f" {GOOD[0]} ", "t/0", 3)]
    messages = spark.createDataFrame(rows, "value string, source string, position long")
    parsed = parse(parse_lines(messages))
    assert [row["position"] for row in parsed.records.collect()] == [3]
    assert [(row["position"], row["reason"]) for row in parsed.quarantine.collect()] == [(0, "not_a_record")]


@pytest.mark.rule("AU-1")
def test_nested_folders_compressed_files_and_parquet_are_read_together(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "in" / "it").mkdir(parents=True)
    (tmp_path / "in" / "it" / "b.jsonl").write_text(a_line(1))
    with gzip.open(tmp_path / "in" / "c.jsonl.gz", "wt") as file:
        file.write(a_line(2))
    (tmp_path / "in" / "notes.txt").write_text("no history")
    written = str(tmp_path / "in" / "d")
    parse(read(spark, [tmp_path / "in" / "it" / "*.jsonl"])).records.drop("host").write.parquet(written)
    rows = as_dicts(parse(read(spark, [tmp_path])).records.collect())
    assert [(row["sequence"], row["position"], row["host"]) for row in rows].count((1, 0, None)) == 1
    assert sorted(row["sequence"] for row in rows) == [1, 1, 2]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([], "found: nothing"),
        (["a.txt", "b.txt", "c.log"], "found: 2 .txt, 1 .log"),
        (["_hidden.jsonl"], "rename it"),
    ],
)
def test_a_folder_without_history_is_refused_with_what_is_there(
    spark: SparkSession, tmp_path: Path, names: list[str], told: str
) -> None:
    for name in names:
        (tmp_path / name).write_text(a_line())
    with pytest.raises(NoHistory, match=told):
        read(spark, [tmp_path])


def test_a_path_that_is_not_there_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(NoHistory, match=r"nothing/\*\.jsonl does not exist"):
        read(spark, [f"{tmp_path}/nothing/*.jsonl"])


def test_a_parquet_file_that_is_none_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no Parquet")
    with pytest.raises(NoHistory, match=r"a\.parquet"):
        read(spark, [tmp_path / "a.parquet"])


def test_a_wrong_kafka_address_is_told_at_once(spark: SparkSession) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(KafkaUnreachable, match=f"127.0.0.1:{port}: Connection refused"):
        read(spark, [f"kafka://127.0.0.1:{port}/history"])


def test_the_account_of_a_topic_is_not_shown() -> None:
    topic = KafkaTopic.from_url("kafka://me:s%22ecret@broker/history?ssl.ca.location=/ca.pem")
    assert topic.servers == "broker:9092"
    assert topic.options["kafka.security.protocol"] == "SASL_SSL"
    assert 'password="s\\"ecret"' in topic.options["kafka.sasl.jaas.config"]
    assert "ecret" not in f"{topic} {topic!r}"


@pytest.mark.parametrize(
    "url",
    [
        "kafka://broker",
        "kafka:///history",
        "kafka://broker/a/b",
        "kafka://b/t?acks=1",
        "kafka://b/t?ssl.ca.location=",
    ],
)
def test_a_url_that_names_no_topic_is_refused(url: str) -> None:
    with pytest.raises(InvalidTopic):
        KafkaTopic.from_url(url)
