"""Findings name the lines that show them and the gaps that make them doubtful."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from rebalanser.audit.evidence import numbered_lines, with_evidence
from rebalanser.audit.ingest import parse, read
from rebalanser.audit.sequences import conflicts, content, gaps
from rebalanser.audit.tables import FINDINGS, GAPS
from rebalanser.history import Author, Event, Protocol, Record

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.slow

SPLIT = "spark.sql.files.maxPartitionBytes"


def a_line(process: str, sequence: int, kind: str = "joining", **changed: Any) -> str:
    author = Author(Protocol.GROUP, "orders", process, "worker")
    record = Record.of(
        author, Event(kind, f"{process}-1", 1), sequence=sequence, wall=1000.0 + sequence, monotonic=1
    )
    return json.dumps(record.model_dump(mode="json") | changed)


def a_finding(kind: str, *witnesses: tuple[str, int, str], **known: Any) -> dict[str, Any]:
    evidence = [{"process": process, "sequence": n, "kind": step} for process, n, step in witnesses]
    finding = {
        "id": f"{kind} {witnesses}",
        "kind": kind,
        "certainty": "certain",
        "protocol": "group",
        "group": "orders",
        "begins": 1005.0,
        "ends": 1010.0,
        "parties": [],
        "evidence": evidence,
    }
    return finding | known


def findings(spark: SparkSession, folder: Path, *rows: dict[str, Any]) -> DataFrame:
    file = folder / "findings.json"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return spark.read.schema(FINDINGS).json(str(file))


def a_history(folder: Path) -> dict[tuple[str, int], tuple[str, int]]:
    """Files of many shapes; where each record is: the file's name and the line that an editor shows."""
    folder.mkdir()
    shapes = {
        "plain.jsonl": "\n".join(a_line("plain", n) for n in range(300)) + "\n",
        "torn.jsonl": "\n".join(a_line("torn", n) for n in range(40)) + '\n{"schema_ver',
        "crlf.jsonl": "\r\n".join(a_line("crlf", n) for n in range(50)) + "\r\n",
        "blank %41 {lines}.jsonl": "\n\n" + "\n  \n".join(a_line("blank", n) for n in range(50)),
        "empty.jsonl": "",
        "newline.jsonl": "\n",
        "bad.jsonl": "what?\n" + "\n".join(a_line("bad", n) + "\nno" for n in range(30)),
        "one.jsonl": a_line("one", 0),
    }
    where = {}
    for name, text in shapes.items():
        (folder / name).write_bytes(text.encode())
        for number, line in enumerate(text.split("\n"), 1):
            if '"sequence": ' in line:
                record = json.loads(line)
                where[record["process"], record["sequence"]] = (name, number)
    return where


@pytest.mark.rule("AU-4")
@pytest.mark.parametrize(
    "split_bytes", [700, 5_000, 1 << 27], ids=["many a file", "some a file", "files together"]
)
def test_lines_are_numbered_as_an_editor_does_however_files_are_split(
    spark: SparkSession, tmp_path: Path, split_bytes: int
) -> None:
    where = a_history(tmp_path / "h")
    spark.conf.set(SPLIT, str(split_bytes))
    try:
        records = parse(read(spark, [tmp_path / "h"])).records.withColumn("content", content())
        lines = numbered_lines(records)
        found = {
            (row["process"], row["sequence"]): (row["source"], row["position"]) for row in lines.collect()
        }
    finally:
        spark.conf.unset(SPLIT)
    named = {name: (tmp_path / "h" / file, line) for name, (file, line) in where.items()}
    assert {name: line for name, (_, line) in found.items()} == {
        name: line for name, (_, line) in named.items()
    }
    assert {source.rsplit("/", 1)[1] for source, _ in found.values()} >= {"plain.jsonl", "one.jsonl"}


@pytest.mark.rule("AU-2", "AU-4")
def test_both_records_of_a_conflict_are_shown(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join([a_line("p", 0), a_line("p", 1), a_line("p", 1)]))
    (tmp_path / "b.jsonl").write_text("\n".join(["", a_line("p", 1, kind="left")]))
    records = parse(read(spark, [tmp_path])).records
    (found,) = with_evidence(conflicts(records), records, gaps(records)).collect()
    shown = [(w["kind"], w["source"].rsplit("/", 1)[1], w["position"]) for w in found["evidence"]]
    assert shown == [("joining", "a.jsonl", 2), ("left", "b.jsonl", 2)]
    assert (found["rule"], found["certainty"], found["gap"]) == ("AU-2", "certain", None)


GAP = {"protocol": "group", "group": "orders", "process": "p", "first": 6, "last": 7, "reason": "missing"}
START, STOP, REMOVED = "start_entered", "stop_returned", "barrier_removed"


DOUBTFUL = [
    a_finding("start_without_barrier", ("p", 9, START)),
    a_finding("step_order", ("p", 3, START), ("p", 9, REMOVED)),
    a_finding("overlap", ("p", 3, START), ("q", 1, START)),
    a_finding("unowned", ("q", 3, STOP), ("q", 4, START)),
]
SURE = [
    a_finding("start_without_barrier", ("p", 3, START)),
    a_finding("start_without_barrier", ("q", 9, START)),
    a_finding("step_order", ("p", 1, START), ("p", 3, REMOVED)),
    a_finding("overlap", ("p", 3, START), ("p", 9, STOP), ("q", 1, START)),
    a_finding("overlap", ("q", 3, START), ("p", 1, START)),
    a_finding("overlap", ("p", 3, START), ("q", 2, START), ends=1001.0),
    a_finding("unowned", ("q", 5, STOP), ("q", 6, START), begins=1020.0, ends=1030.0),
    a_finding("two_leaders", ("p", 3, "elected"), ("p", 9, "elected")),
]


@pytest.mark.rule("AU-2")
def test_a_gap_is_told_where_it_could_change_the_verdict_and_only_there(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "h.jsonl").write_text(a_line("p", 3))
    records = parse(read(spark, [tmp_path / "h.jsonl"])).records
    gap = GAP | {"after_wall": 1005.0, "before_wall": 1008.0, "missing": 2}
    missing = spark.createDataFrame([tuple(gap.get(name) for name in GAPS.names)], GAPS)
    asked = findings(spark, tmp_path, *DOUBTFUL, *SURE)
    found = {row["id"]: row for row in with_evidence(asked, records, missing).collect()}
    told = "records 6 to 7 of p (missing) after 1970-01-01T00:16:45.000Z, before 1970-01-01T00:16:48.000Z"
    for finding in [*DOUBTFUL, *SURE]:
        row = found[finding["id"]]
        expected = ("possible", told) if finding in DOUBTFUL else ("certain", None)
        assert (row["certainty"], row["gap"]) == expected, finding["id"]
        assert [w["sequence"] for w in row["evidence"]] == [w["sequence"] for w in finding["evidence"]]
