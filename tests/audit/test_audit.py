"""The audit as a whole: verdicts, tables on disk, the report, what is kept, and bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rebalanser.audit import Audit, Conclusion, Options, Tables, audit
from rebalanser.audit import tables as schemas
from rebalanser.audit.outputs import MARKER, OutputFolder
from rebalanser.audit.result import FOLDERS
from rebalanser.audit.sources import NoHistory
from rebalanser.cli import main
from rebalanser.errors import UnusableOutput
from rebalanser.history import Protocol
from support.histories import tell, write_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A history in which nothing is wrong, but that a writer died in the middle of its last line."""
    folder = tmp_path_factory.mktemp("healthy")
    write_pages(folder, [tell(3, [], protocol=Protocol.GROUP).pages], files=2, seed=0)
    (folder / "torn.jsonl").write_text('{"schema_version":2,"protocol":"gro')
    return folder


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A history with whatever thirty seeds plant in it."""
    folder = tmp_path_factory.mktemp("planted")
    write_pages(folder, [tell(seed).pages for seed in range(30)], files=2, seed=0)
    return folder


@pytest.fixture(scope="module")
def sound(spark: SparkSession, healthy: Path) -> Iterator[Audit]:
    with audit(spark, str(healthy)) as found:
        yield found


@pytest.fixture(scope="module")
def refuted(spark: SparkSession, planted: Path) -> Iterator[Audit]:
    with audit(spark, planted) as found:
        yield found


def test_every_table_has_its_columns_and_a_folder(sound: Audit) -> None:
    folders = sound.tables.folders()
    assert list(folders) == list(FOLDERS)
    assert set(Tables.__dataclass_fields__) - {"accesses"} == set(folders) - {"intervals"}
    for name, constant in FOLDERS.items():
        wanted = getattr(schemas, constant)
        got = folders[name].schema
        assert [(c.name, c.dataType.simpleString()) for c in got] == [
            (c.name, c.dataType.simpleString()) for c in wanted
        ], name


@pytest.mark.rule("AU-1", "AU-4")
def test_a_sound_history_is_called_sound_and_a_torn_line_is_said(sound: Audit, healthy: Path) -> None:
    verdict = sound.verdict()
    first, *rest = verdict.sentences()
    assert verdict.conclusion is Conclusion.SOUND
    assert first.startswith("Sound. No resource had two owners: ")
    assert [line for line in rest if "(torn)" in line and "torn.jsonl" in line]
    lines = [line for file in healthy.glob("*.jsonl") for line in file.read_bytes().splitlines()]
    whole = [line for line in lines if line.endswith(b"}")]
    assert verdict.records == len(set(map(_name, whole)))
    assert verdict.duplicates == len(whole) - verdict.records
    assert verdict.accesses > 0
    assert verdict.certain == 0


def _name(line: bytes) -> tuple[str, int]:
    record = json.loads(line)
    return record["process"], record["sequence"]


@pytest.mark.rule("AU-4")
def test_findings_refute_with_the_worst_first(refuted: Audit) -> None:
    verdict = refuted.verdict()
    assert verdict.conclusion is Conclusion.REFUTED
    assert verdict.certain > 0
    assert sum(count.certain + count.fenced + count.possible for count in verdict.findings) == (
        refuted.tables.findings.count()
    )
    certainties = [found.certainty for found in verdict.worst]
    assert certainties == sorted(certainties), "certain ones come first"
    assert {found.kind for found in verdict.worst} == {count.kind for count in verdict.findings}


@pytest.mark.rule("AU-2")
def test_a_gap_is_a_doubt_that_is_said(refuted: Audit) -> None:
    verdict = refuted.verdict()
    assert verdict.missing > 0
    assert any("missing and could hide a finding" in doubt for doubt in verdict.doubts())


@pytest.mark.rule("AU-10")
def test_a_table_of_records_gives_the_same_findings_as_its_files(
    spark: SparkSession, refuted: Audit, planted: Path, tmp_path: Path
) -> None:
    from rebalanser.audit.ingest import parse, read

    records = parse(read(spark, [str(planted)])).records
    records.drop("step").write.parquet(str(tmp_path / "records"))
    with audit(spark, spark.read.parquet(str(tmp_path / "records"))) as again:
        same = {row["id"] for row in again.tables.findings.select("id").collect()}
    assert same == {row["id"] for row in refuted.tables.findings.select("id").collect()}


def test_what_was_over_before_since_is_left_out(spark: SparkSession, planted: Path, refuted: Audit) -> None:
    last = refuted.verdict().last_wall
    assert last is not None
    with audit(spark, planted, Options(since=last + 1)) as later:
        assert later.tables.findings.where(f"ends < {last + 1}").isEmpty()
    with pytest.raises(NoHistory, match="until"):
        audit(spark, planted, Options(until=1.0))


@pytest.mark.rule("AU-8")
def test_the_tables_and_the_report_are_written(spark: SparkSession, refuted: Audit, tmp_path: Path) -> None:
    out = tmp_path / "audit"
    refuted.write(out)
    assert {path.name for path in out.iterdir() if path.is_dir()} == set(FOLDERS)
    about = json.loads((out / MARKER).read_text())
    assert about["conclusion"] == "refuted"
    kept = spark.read.parquet(str(out / "findings"))
    assert kept.count() == refuted.tables.findings.count()
    refuted.report(tmp_path / "report.html")
    assert "<html" in (tmp_path / "report.html").read_text()
    assert {path.name for path in tmp_path.iterdir()} - {".audit.crc"} == {"audit", "report.html"}


class TestOutput:
    @pytest.fixture
    def tables(self, spark: SparkSession) -> dict[str, Any]:
        return {"one": spark.range(3), "two": spark.range(4)}

    def test_an_earlier_audit_is_replaced(
        self, spark: SparkSession, tables: dict[str, Any], tmp_path: Path
    ) -> None:
        for size in (2, 5):
            OutputFolder(spark, str(tmp_path / "out")).write({"one": spark.range(size)}, {}, lambda _: None)
        assert spark.read.parquet(str(tmp_path / "out" / "one")).count() == 5
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    def test_somebody_elses_folder_is_left_alone(self, spark: SparkSession, tmp_path: Path) -> None:
        (tmp_path / "photos").mkdir()
        (tmp_path / "photos" / "cat.jpg").write_text("meow")
        with pytest.raises(UnusableOutput, match="was not written by an audit"):
            OutputFolder(spark, str(tmp_path / "photos"))
        (tmp_path / "file").write_text("text")
        with pytest.raises(UnusableOutput, match="was not written by an audit"):
            OutputFolder(spark, str(tmp_path / "file"))
        assert {path.name for path in tmp_path.rglob("*")} == {"photos", "cat.jpg", "file"}

    def test_no_room_leaves_the_earlier_audit_whole(
        self, spark: SparkSession, tables: dict[str, Any], tmp_path: Path
    ) -> None:
        """A real full disk where a small one can be mounted."""
        disk = tmp_path / "disk"
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
        if (
            shutil.which("mount") is None
            or subprocess.run(command, capture_output=True, check=False).returncode
        ):
            pytest.skip("a small file system can't be mounted here")
        try:
            OutputFolder(spark, str(disk / "out")).write(tables, {}, lambda _: None)
            big = {"one": spark.range(200_000).selectExpr("uuid() as text")}
            with pytest.raises(UnusableOutput, match="no space is left"):
                OutputFolder(spark, str(disk / "out")).write(big, {}, lambda _: None)
            assert spark.read.parquet(str(disk / "out" / "two")).count() == 4
            assert [path.name for path in disk.iterdir()] == ["out"]
        finally:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)

    def test_a_folder_that_cannot_be_written_to(self, spark: SparkSession) -> None:
        with pytest.raises(UnusableOutput, match="can't be"):
            OutputFolder(spark, "/proc/nothing/out")


class TestBadHistory:
    def test_no_readable_record_says_what_was_found(self, spark: SparkSession, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"hello": "world"}\nnot json at all\n')
        with pytest.raises(NoHistory, match=r"1 not_a_record .*1 not_json"):
            audit(spark, tmp_path)

    def test_empty_files(self, spark: SparkSession, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text("")
        with pytest.raises(NoHistory, match="every file is empty"):
            audit(spark, tmp_path)


@pytest.mark.usefixtures("spark")
class TestCommand:
    """In this process, in its session."""

    def test_fail_on_findings(self, planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["audit", str(planted), "--fail-on-findings", "--json"]) == 1
        out, err = capsys.readouterr()
        document = json.loads(out)
        assert document["verdict"]["conclusion"] == "refuted"
        assert err == ""

    def test_the_summary_for_people(self, healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["audit", str(healthy), "--fail-on-findings"]) == 0
        out, err = capsys.readouterr()
        assert out.startswith("Sound. No resource had two owners: ")
        assert "reading the history" in err
