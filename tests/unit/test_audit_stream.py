"""The audit as a stream, without Spark: its options, its checkpoint, and how growing files are read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from rebalanser.audit import Conclusion, tailing
from rebalanser.audit.checkpoint import Checkpoint, StreamState, Totals, UnusableCheckpoint, claim_output
from rebalanser.audit.sources import NoHistory
from rebalanser.audit.streaming import claimed, followed
from rebalanser.audit.tailing import TailReader, oldest_unread, planned
from rebalanser.cli import main
from rebalanser.cli.audit_stream import conclusion, line, summary
from rebalanser.errors import UnusableOutput

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def history(tmp_path: Path) -> Path:
    (tmp_path / "history").mkdir()
    return tmp_path / "history"


def record(wall: float, padding: int = 0) -> bytes:
    return json.dumps({"wall_time": wall, "padding": "x" * padding}).encode() + b"\n"


class TestOptions:
    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["--stream"], "--stream needs --checkpoint and --out FOLDER"),
            (["--stream", "--out", "o"], "--stream needs --checkpoint FOLDER"),
            (
                ["--stream", "--out", "o", "--checkpoint", "c", "--since", "2h"],
                "--since can't be used with --stream",
            ),
            (
                ["--stream", "--out", "o", "--checkpoint", "c", "--apply", "--report", "r"],
                "--report, --apply",
            ),
            (["--checkpoint", "c"], "--checkpoint need --stream"),
            (["--delay", "3"], "--delay need --stream"),
        ],
    )
    def test_what_does_not_go_together_is_refused(
        self, history: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
    ) -> None:
        assert main(["audit", str(history), *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert told in err
        assert err.count("\n") == 1

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("nowhere", "does not exist"),
            ("s3a://bucket/history", "a stream follows folders and files of this host, or Kafka"),
            ("rows.parquet", "can't be followed"),
            ("packed", "can't be followed"),
        ],
    )
    def test_what_can_t_be_followed_is_refused_before_spark_starts(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, told: str
    ) -> None:
        (tmp_path / "rows.parquet").touch()
        (tmp_path / "packed").mkdir()
        (tmp_path / "packed" / "old.jsonl.gz").touch()
        path = name if "://" in name else str(tmp_path / name)
        places = ["--checkpoint", str(tmp_path / "checkpoint"), "--out", str(tmp_path / "out")]
        assert main(["audit", path, "--stream", *places]) == 3
        assert told in capsys.readouterr().err
        assert not (tmp_path / "checkpoint").exists()

    @pytest.mark.parametrize(
        ("totals", "word"),
        [
            (Totals(records=5), Conclusion.SOUND),
            (Totals(fenced=1), Conclusion.FENCED),
            (Totals(fenced=1, late=1), Conclusion.UNSURE),
            (Totals(missing=1), Conclusion.UNSURE),
            (Totals(possible=1), Conclusion.UNSURE),
            (Totals(possible=1, certain=1), Conclusion.REFUTED),
        ],
    )
    def test_the_summary_concludes_as_the_batch_does(self, totals: Totals, word: Conclusion) -> None:
        assert conclusion(totals) == word
        document, lines = summary(totals, "out", "checkpoint")
        assert document["conclusion"] == word
        assert lines[0].startswith(f"{word.capitalize()} so far: ")

    def test_a_name_in_a_finding_gives_no_orders_to_the_terminal(self) -> None:
        found = {"certainty": "certain", "kind": "overlap", "id": "i", "sentence": "a\x1b[2Jb", "gap": None}
        assert "\x1b" not in line(found)


class TestCheckpoint:
    def test_it_is_of_one_version_and_one_set_of_sources(self, tmp_path: Path) -> None:
        mark = tmp_path / "rebalanser.json"
        first = Checkpoint(tmp_path, ["a"])
        assert Checkpoint(tmp_path, ["a"]).id == first.id
        with pytest.raises(UnusableCheckpoint, match="belongs to a: name the same sources"):
            Checkpoint(tmp_path, ["a", "b"])
        for content, told in (
            (json.dumps(json.loads(mark.read_text()) | {"format": 1}), "has format 1"),
            ("[]", "has format None"),
            ("{", "can't be used"),
        ):
            mark.write_text(content)
            with pytest.raises(UnusableCheckpoint, match=told):
                Checkpoint(tmp_path, ["a"])
        mark.unlink()
        (tmp_path / "notes.txt").touch()
        with pytest.raises(UnusableCheckpoint, match="contains other files"):
            Checkpoint(tmp_path, ["a"])

    def test_one_whose_making_was_cut_off_can_be_made_again(self, tmp_path: Path) -> None:
        (tmp_path / "rebalanser.partial").write_text("{")
        assert Checkpoint(tmp_path, ["a"]).last() is None

    def test_one_that_can_t_be_made_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(UnusableCheckpoint, match="can't be used"):
            Checkpoint(tmp_path / "file" / "checkpoint", ["a"])

    def test_two_streams_can_t_have_it_at_once(self, tmp_path: Path) -> None:
        first, second = Checkpoint(tmp_path, ["a"]), Checkpoint(tmp_path, ["a"])
        first.lock()
        with pytest.raises(UnusableCheckpoint, match="another stream uses"):
            second.lock()
        first.unlock()
        second.lock()
        second.unlock()
        second.unlock()

    def test_the_output_is_that_of_one_checkpoint(self, tmp_path: Path) -> None:
        mine, other = Checkpoint(tmp_path / "mine", ["a"]), Checkpoint(tmp_path / "other", ["a"])
        out = tmp_path / "out"
        claim_output(out, mine)
        (out / "findings").mkdir()
        claim_output(out, mine)
        with pytest.raises(UnusableOutput, match="not written by the stream"):
            claim_output(out, other)
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "notes.txt").touch()
        for taken in (tmp_path / "full", tmp_path / "full" / "notes.txt"):
            with pytest.raises(UnusableOutput):
                claim_output(taken, mine)

    def test_what_left_no_whole_state_has_not_happened(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint(tmp_path, ["a"])
        for name in ("3", "3-idle", "4"):
            (tmp_path / "state" / name).mkdir(parents=True)
            (tmp_path / "state" / name / "about.json").write_text(StreamState().model_dump_json())
            (tmp_path / "state" / name / "_SUCCESS").touch()
        (tmp_path / "state" / "4-idle").mkdir()
        happened = {
            n: checkpoint.happened(n) for n in ("1", "1-idle", "3", "3-idle", "4", "4-idle", "5", "x")
        }
        assert happened == {
            "1": True,
            "1-idle": True,
            "3": True,
            "3-idle": True,
            "4": True,
            "4-idle": False,
            "5": False,
            "x": False,
        }
        assert checkpoint.last() == 4
        checkpoint.prune(5)
        assert checkpoint.last() == 4
        assert not (tmp_path / "state" / "3").exists()

    def test_a_relative_path_is_the_same_source_from_everywhere(
        self, history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        first = claimed(["history"], tmp_path / "out", tmp_path / "checkpoint")
        monkeypatch.chdir(history)
        assert claimed([str(history)], tmp_path / "out", tmp_path / "checkpoint").id == first.id

    def test_a_password_is_not_kept(self, tmp_path: Path) -> None:
        claimed(["kafka://me:hunter2secret@h:1/t"], tmp_path / "out", tmp_path / "checkpoint")
        assert "hunter2secret" not in (tmp_path / "checkpoint" / "rebalanser.json").read_text()

    def test_no_source_at_all(self) -> None:
        with pytest.raises(NoHistory, match="no source"):
            followed([])


@pytest.mark.rule("AU-9")
class TestTail:
    @pytest.fixture(autouse=True)
    def _small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tailing, "_BLOCK_BYTES", 100)
        monkeypatch.setattr(tailing, "MAX_BYTES", 400)

    def test_a_long_history_is_read_along_its_times(self, history: Path) -> None:
        """One host's hours are not read before another's first minute, which would make them late."""
        for name, begins in (("a", 0.0), ("b", 0.5)):
            (history / f"{name}.jsonl").write_bytes(b"".join(record(begins + n) for n in range(50)))
        reader = TailReader([str(history)], {}, tasks=2, max_bytes=400)
        offset = reader.latestOffset()
        read = sorted(end for end, _ in offset.values())
        assert 300 <= sum(read) < 500, "at most a line more"
        assert read[1] - read[0] <= 100

    def test_it_is_told_how_far_all_files_have_come(self, history: Path, tmp_path: Path) -> None:
        (history / "a.jsonl").write_bytes(b"".join(record(float(n)) for n in range(50)))
        (history / "b.jsonl").write_bytes(b"".join(record(100.0 + n) for n in range(50)))
        (history / "c.jsonl").write_bytes(b"{torn")
        (tmp_path / "offsets").mkdir()
        reader = TailReader([str(history)], planned(tmp_path), tasks=2, max_bytes=400)
        offset = reader.latestOffset()
        (tmp_path / "offsets" / "0").write_text(f"v1\n{{}}\n{json.dumps(offset)}\n")
        (a,) = (lines for path, (_, lines) in offset.items() if path.endswith("a.jsonl"))
        assert oldest_unread(tmp_path, 0, [str(history)]) == float(a)
        (tmp_path / "offsets" / "1").write_text(f"v1\n{{}}\n{json.dumps(offset)}\n")
        assert oldest_unread(tmp_path, 1, [str(history)]) is None, "all that was there has been read"
        assert planned(tmp_path) == offset

    def test_a_line_longer_than_a_block_is_read_whole(self, history: Path) -> None:
        path = history / "a.jsonl"
        path.write_bytes(record(1.0, padding=200) + record(2.0))
        reader = TailReader([str(history)], {}, tasks=2, max_bytes=400)
        offset = reader.latestOffset()
        assert offset == {str(path): [path.stat().st_size, 2]}
        (task,) = reader.partitions({}, offset)
        (batch, *_) = reader.read(task)
        assert [json.loads(value)["wall_time"] for value in batch.to_pydict()["value"]] == [1.0, 2.0]

    def test_a_file_that_is_deleted_before_it_is_read_is_no_failure(self, history: Path) -> None:
        (history / "a.jsonl").write_bytes(record(1.0))
        reader = TailReader([str(history)], {}, tasks=2)
        (task,) = reader.partitions({}, reader.latestOffset())
        (history / "a.jsonl").unlink()
        assert list(reader.read(task)) == []
        assert reader.latestOffset() == {}

    def test_many_files_are_read_by_few_tasks_of_about_the_same_length(self, history: Path) -> None:
        for name, lines in (("a", 4), ("b", 1), ("c", 1), ("d", 1), ("e", 1)):
            (history / f"{name}.jsonl").write_bytes(b"".join(record(float(n)) for n in range(lines)))
        reader = TailReader([str(history)], {}, tasks=2, max_bytes=10_000)
        offset: dict[str, list[int]] = {}
        while (latest := reader.latestOffset()) != offset:
            offset = latest
        tasks = reader.partitions({}, offset)
        read = [[position for batch in reader.read(task) for position in batch["position"]] for task in tasks]
        assert [len(positions) for positions in read] == [4, 4]

    def test_an_empty_folder_is_waited_on(self, history: Path) -> None:
        reader = TailReader([str(history)], {}, tasks=2)
        assert reader.initialOffset() == reader.latestOffset() == {}
        (history / "a.jsonl").write_bytes(record(1.0))
        assert len(reader.latestOffset()) == 1
