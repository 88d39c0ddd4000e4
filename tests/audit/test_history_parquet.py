"""``rebalanser history export --format parquet``: the records as rows, and what is none told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from rebalanser.cli import main
from rebalanser.core.group.messages import FactKind
from rebalanser.history import Author, Event, Protocol, Record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),  # PySpark's own
]
WALL = 1_700_000_000.0


def record(sequence: int, group: str = "orders") -> Record:
    event = Event(FactKind.BARRIER_ADDED, "w-1", resource="r", token=7, detail={"error": "none"})
    author = Author(Protocol.GROUP, group, "w", "w")
    return Record.of(author, event, sequence=sequence, wall=WALL + sequence, monotonic=float(sequence))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    lines = [record(sequence, "orders" if sequence % 2 else "other").to_line() for sequence in range(10)]
    (source / "x.jsonl").write_bytes(b"".join(lines) + b"{}\nnonsense\n")
    return source


@pytest.mark.rule("AU-1")
def test_parquet_has_every_record_and_the_rest_is_told(
    spark: SparkSession, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "out"
    assert main(["history", "export", str(folder), "--to", str(to), "--format", "parquet"]) == 0
    out, err = capsys.readouterr()
    assert out == f"wrote 10 records to {to}; 2 lines left out: not records\n"
    assert "unreadable, not_a_record: 1 line" in err
    assert "unreadable, not_json: 1 line" in err
    rows = spark.read.parquet(to.as_uri()).orderBy("sequence").collect()
    assert [row.sequence for row in rows] == list(range(10))
    assert set(rows[0].asDict()) == set(Record.model_fields)
    assert (rows[1].group, rows[1].resource, rows[1].token, rows[1].wall_time) == ("orders", "r", 7, WALL + 1)
    assert rows[1].detail == {"error": "none"}
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out", "source"]


def test_parquet_of_one_group_between_two_times_is_read_again(
    spark: SparkSession, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "out"
    command = ["history", "export", str(folder), "--to", str(to), "--format", "parquet", "--json"]
    choice = ["--group", "orders", "--since", "2023-11-14T22:13:22Z", "--until", "2023-11-14T22:13:27Z"]
    assert main([*command, *choice]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "to": str(to),
        "format": "parquet",
        "records": 3,
        "unreadable": 2,
    }
    again = tmp_path / "again"
    assert main(["history", "export", str(to), "--to", str(again), "--format", "parquet"]) == 0
    assert [row.sequence for row in spark.read.parquet(again.as_uri()).orderBy("sequence").collect()] == [
        3,
        5,
        7,
    ]


def test_parquet_is_refused_where_it_would_be_nothing_or_overwrite(
    spark: SparkSession, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["history", "export", "--format", "parquet", "--json", *arguments]) == 3
        return str(json.loads(capsys.readouterr().out)["error"])

    to = str(tmp_path / "out")
    assert "not empty" in refused(str(folder), "--to", str(folder))
    assert "no record matches" in refused(str(folder), "--to", to, "--group", "nobody")
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b"{}\n{}\n")
    assert "2 not_a_record" in refused(str(bad), "--to", to)
    assert "does not exist" in refused(str(tmp_path / "nowhere"), "--to", to)
    assert "can't be written" in refused(str(folder), "--to", str(tmp_path / "no" / "out"))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["bad.jsonl", "source"]


def test_the_missing_extra_is_named(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forget_modules: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    forget_modules("rebalanser.audit")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    command = ["history", "export", str(folder), "--to", str(tmp_path / "out"), "--format", "parquet"]
    assert main(command) == 3
    assert "pip install 'rebalanser[spark]'" in capsys.readouterr().err
