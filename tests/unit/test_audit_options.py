"""The audit without Spark: its options, its verdict in words, and what bad input gets before Spark starts."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import typer
from pydantic import ValidationError

import rebalanser.audit
from rebalanser.admin import Admin
from rebalanser.audit import Conclusion, Options, Verdict, submit
from rebalanser.audit.outputs import reason, write_file
from rebalanser.audit.tables import FindingKind
from rebalanser.audit.verdict import (
    MEANINGS,
    ClockBehind,
    Count,
    Missing,
    Unread,
)
from rebalanser.audit.weights import changes
from rebalanser.cli import application, main
from rebalanser.cli.audit import Weighing, apply, asked, by_group
from rebalanser.errors import MissingExtra, UnusableOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def verdict(conclusion: Conclusion = Conclusion.SOUND, **known: Any) -> Verdict:
    nothing: dict[str, Any] = {
        "records": 1_000,
        "missing": 0,
        "duplicates": 0,
        "accesses": 80,
        "resources": 12,
        "nodes": 5,
        "processes": 4,
        "groups": 1,
        "first_wall": 1_700_000_000.0,
        "last_wall": 1_700_011_000.0,
        "findings": (),
        "worst": (),
        "gaps": (),
        "rotated": 0,
        "unread": (),
        "clocks": (),
    }
    return Verdict(conclusion=conclusion, **{**nothing, **known})


def gap(**known: Any) -> Missing:
    return Missing(
        **{
            "group": "orders",
            "label": "worker-1",
            "process": "p1",
            "missing": 7,
            "reason": "missing",
            "after_wall": 1_700_000_000.0,
            "before_wall": 1_700_000_060.0,
            **known,
        }
    )


class TestOptions:
    def test_since_must_be_before_until(self) -> None:
        with pytest.raises(ValidationError, match="since must be before until"):
            Options(since=2.0, until=1.0)
        with pytest.raises(ValidationError, match="since must be before until"):
            Options(since=2.0, until=2.0)
        assert Options(since=1.0, until=2.0).until == 2.0

    @pytest.mark.parametrize("name", ["clock_error_s", "unowned_limit_s"])
    @pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
    def test_lengths_of_time_are_numbers_from_zero_on(self, name: str, value: float) -> None:
        with pytest.raises(ValidationError):
            Options.model_validate({name: value})

    def test_the_command_shows_the_defaults_that_hold(self) -> None:
        command: Any = typer.main.get_command(application())
        shown = {each.name: each.show_default for each in command.commands["audit"].params}
        assert float(shown["clock_error"]) == Options().clock_error_s
        assert float(shown["unowned_limit"]) == Options().unowned_limit_s


class TestWithoutTheExtra:
    def test_importing_the_audit_names_it(
        self, monkeypatch: pytest.MonkeyPatch, forget_modules: Callable[[str], None]
    ) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        forget_modules("rebalanser.audit")
        with pytest.raises(MissingExtra, match=r"pip install 'rebalanser\[spark\]'") as told:
            importlib.import_module("rebalanser.audit")
        assert "pyspark" in str(told.value)

    def test_the_command_says_so_in_one_line(
        self,
        monkeypatch: pytest.MonkeyPatch,
        forget_modules: Callable[[str], None],
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        forget_modules("rebalanser.audit")
        refused(capsys, [str(tmp_path)], 3, "pip install 'rebalanser[spark]'")

    def test_a_name_that_is_none_is_no_attribute(self) -> None:
        assert not hasattr(rebalanser.audit, "nonsense")
        assert all(getattr(rebalanser.audit, name) for name in rebalanser.audit.__all__)


def refused(capsys: pytest.CaptureFixture[str], arguments: Sequence[str], code: int, *fragments: str) -> None:
    """One line on standard error, none on standard output."""
    assert main(["audit", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    said = [line for line in err.splitlines() if not line.endswith(" s  starting Spark")]
    assert len(said) == 1, err
    assert said[0].startswith("error: ")
    for fragment in fragments:
        assert fragment in err


class TestBadInput:
    """What can be told before Spark starts is: no test here has a JVM."""

    @pytest.fixture
    def history(self, tmp_path: Path) -> str:
        folder = tmp_path / "history"
        folder.mkdir()
        (folder / "a.jsonl").write_text("{}\n")
        return str(folder)

    def test_since_later_than_until(self, capsys: pytest.CaptureFixture[str], history: str) -> None:
        refused(
            capsys,
            [history, "--since", "2026-01-02", "--until", "2026-01-01"],
            2,
            "since must be before until",
        )

    def test_a_time_that_is_none(self, capsys: pytest.CaptureFixture[str], history: str) -> None:
        refused(capsys, [history, "--since", "yesterday"], 2, "invalid time")

    def test_a_folder_that_is_not_there(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        refused(capsys, [str(tmp_path / "nowhere")], 3, "nowhere does not exist")

    def test_an_empty_folder(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        refused(capsys, [str(tmp_path)], 3, "found: nothing")

    def test_a_folder_of_other_files_says_which(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        (tmp_path / "notes.txt").write_text("buy milk")
        refused(capsys, [str(tmp_path)], 3, "1 .txt")

    def test_a_report_in_no_folder(
        self, capsys: pytest.CaptureFixture[str], history: str, tmp_path: Path
    ) -> None:
        refused(
            capsys,
            [history, "--report", str(tmp_path / "no" / "r.html")],
            3,
            "in a folder that does not exist",
        )
        refused(capsys, [history, "--report", str(tmp_path)], 3, "is a folder")

    def test_a_kafka_that_does_not_answer(self, capsys: pytest.CaptureFixture[str]) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            refused(capsys, [f"kafka://127.0.0.1:{port}/history"], 4, "no Kafka broker answers", str(port))

    @pytest.mark.rule("AU-7")
    def test_a_registry_for_the_weights_that_is_none(
        self, capsys: pytest.CaptureFixture[str], history: str
    ) -> None:
        refused(
            capsys, [history, "--apply", "--registry", "nowhere://host:1"], 3, "no backend for nowhere://"
        )

    def test_a_kafka_url_without_a_topic(self, capsys: pytest.CaptureFixture[str]) -> None:
        refused(capsys, ["kafka://127.0.0.1:9092"], 3, "has no topic")

    @pytest.mark.usefixtures("_no_session")
    def test_no_java(
        self,
        capsys: pytest.CaptureFixture[str],
        history: str,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("JAVA_HOME", raising=False)
        refused(capsys, [history], 3, "Spark needs Java", "JAVA_HOME", "17")

    @pytest.mark.usefixtures("_no_session")
    @pytest.mark.parametrize("version", ["1.8.0_402", "11.0.2", "26"])
    def test_a_java_that_does_not_fit(
        self,
        capsys: pytest.CaptureFixture[str],
        history: str,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        version: str,
    ) -> None:
        java = tmp_path / "bin" / "java"
        java.parent.mkdir()
        java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
        java.chmod(0o755)
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
        refused(capsys, [history], 3, "PySpark 4", "install Java 17 or 21")

    @pytest.fixture
    def _no_session(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in a process of its own, in which no other test has started Spark."""
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
        monkeypatch.setattr(SparkContext, "_active_spark_context", None)
        monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)

    def test_an_error_is_one_document_with_json(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        assert main(["audit", str(tmp_path / "nowhere"), "--json"]) == 3
        out, err = capsys.readouterr()
        assert err == ""
        assert json.loads(out)["exit_code"] == 3


class TestVerdict:
    def test_every_kind_of_finding_has_its_words(self) -> None:
        assert set(MEANINGS) == set(FindingKind)

    def test_sound(self) -> None:
        assert verdict().sentences() == [
            (
                "Sound. No resource had two owners: 80 accesses of 12 resources by 5 nodes of 1 group over "
                "3 h 3 min from 2023-11-14 22:13:20 UTC, 1,000 records."
            )
        ]

    def test_refuted_names_the_rules_and_the_counts(self) -> None:
        counts = (
            Count(kind="overlap", rule="RB-1", certain=2, fenced=1, possible=3),
            Count(kind="unowned", rule="RB-2", certain=0, fenced=0, possible=1),
        )
        first, *rest = verdict(Conclusion.REFUTED, findings=counts).sentences()
        assert first.startswith("Refuted. 2 certain findings break RB-1: 80 accesses")
        assert rest == [
            (
                "overlap (RB-1), 2 certain, 1 certain but fenced, 3 possible: "
                "two owners had access to one resource at the same time."
            ),
            "unowned (RB-2), 1 possible: a resource had no owner for longer than the limit.",
        ]

    @pytest.mark.rule("AU-2")
    def test_a_gap_that_could_hide_something_is_said_with_its_node(self) -> None:
        told = verdict(Conclusion.UNSURE, missing=7, gaps=(gap(),)).sentences()
        assert told[0].startswith("Unsure.")
        assert told[1:] == [
            "Doubt: 7 records of worker-1 are missing and could hide a finding.",
            (
                "  7 records of worker-1 after 2023-11-14 22:13:20 UTC, before 2023-11-14 22:14:20 UTC "
                "(missing)."
            ),
        ]

    @pytest.mark.rule("AU-2")
    def test_what_rotation_deleted_is_no_doubt_about_the_rest(self) -> None:
        told = verdict(gaps=(gap(reason="rotated", after_wall=None),), rotated=1).sentences()
        assert told[0].startswith("Sound.")
        assert told[1:] == [
            (
                "The oldest records of 1 process were deleted by rotation: the audit covers only the time "
                "after them."
            )
        ]

    @pytest.mark.rule("AU-1")
    def test_what_could_not_be_read_is_said_with_the_first_place(self) -> None:
        unread = Unread(
            reason="not_json",
            items=2,
            first_source="file:///h/a.jsonl",
            first_position=9,
            first_detail="not JSON",
        )
        torn = unread.model_copy(update={"reason": "torn", "items": 1, "first_position": None})
        told = verdict(Conclusion.UNSURE, unread=(unread, torn)).sentences()[1:]
        assert told == [
            "Doubt: 2 items could not be read (not_json), the first at file:///h/a.jsonl:9, not JSON.",
            (
                "1 item could not be read (torn), the first at file:///h/a.jsonl, not JSON; its writer died "
                "there."
            ),
        ]

    @pytest.mark.rule("AU-5")
    def test_clocks_that_are_hours_apart_are_said_with_their_hosts(self) -> None:
        clock = ClockBehind(group="orders", host="a", behind_host="b", behind_s=7_260.0, seen_wall=None)
        told = verdict(clocks=(clock,) * 5).sentences()[1:]
        assert told[0] == ("Clocks: a is at least 2 h 1 min behind b; the audit allows for it.")
        assert told[-1] == "Clocks: 2 more pairs of hosts disagree."


class TestFiles:
    def test_a_report_is_whole_or_not_there(self, tmp_path: Path) -> None:
        target = tmp_path / "report.html"
        write_file(target, "new")
        assert target.read_text() == "new"
        assert list(tmp_path.iterdir()) == [target]

    def test_no_room_for_the_report_leaves_what_was_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = tmp_path / "report.html"
        target.write_text("old")

        def full(*_: object, **__: object) -> int:
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr(Path, "write_text", full)
        with pytest.raises(UnusableOutput, match="no space is left"):
            write_file(target, "new")
        assert target.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [target]

    def test_the_cause_of_a_java_error_is_told(self) -> None:
        told = "An error\n: java.lang.RuntimeException: x\n\tat a.b\nCaused by: java.io.IOException: y"
        assert reason(RuntimeError(told)) == "java.io.IOException: y"
        assert reason(RuntimeError("x: No space left on device")) == "no space is left on the device"
        assert reason(RuntimeError("")) == "RuntimeError"


def load(resource: str, weight: float, group: str = "orders", protocol: str = "group") -> Any:
    return SimpleNamespace(protocol=protocol, group=group, resource=resource, load=weight, weight=weight)


@pytest.mark.rule("AU-7")
class TestWeights:
    def test_loads_are_taken_by_group_and_those_of_groups_only(self) -> None:
        rows = [load("x", 1, "a"), load("y", 2, "a"), load("z", 1, "b"), load("t", 1, "c", "skuld")]
        assert [(group, [each.resource for each in loads]) for group, loads in by_group(rows)] == [
            ("a", ["x", "y"]),
            ("b", ["z"]),
        ]

    def test_a_dry_run_shows_the_heaviest(self) -> None:
        lines = list(asked("orders", [load(f"r{n}", 0.1 * n) for n in range(1, 13)]).lines())
        assert lines[0] == "Weights of orders, 12 of which would be written by --apply:"
        assert lines[1] == "  r12: 1.2"
        assert lines[-1] == "  and 2 more"
        weights = [float(line.rpartition(" ")[2]) for line in lines[1:-1]]
        assert all(one >= other for one, other in pairwise(weights))

    def test_applied_weights_leave_pins_and_attributes_and_absent_resources_alone(self) -> None:
        with Admin("orders", "memory://weigh") as admin:
            admin.add("heavy", "light", "same")
            admin.add("pinned", pin="node-1", attributes={"zone": "a"})
            loads = [load("heavy", 2.0), load("light", 0.5), load("same", 1.1), load("pinned", 2.0)]
            done: list[tuple[int, int]] = []
            outcome = apply(
                admin, [*loads, load("gone", 3.0)], changes, lambda *progress: done.append(progress)
            )
            after = {each.resource: each for each in admin.resources()}
        assert outcome == Weighing(
            group="orders", weights={"heavy": 2.0, "light": 0.5, "pinned": 2.0}, applied=True
        )
        assert {name: each.weight for name, each in after.items()} == {
            "heavy": 2.0,
            "light": 0.5,
            "same": 1.0,
            "pinned": 2.0,
        }
        assert (after["pinned"].pin, after["pinned"].attributes) == ("node-1", {"zone": "a"})
        assert done[-1] == (3, 3)


@pytest.mark.rule("AU-10")
class TestSubmit:
    def test_its_path_is_told(self) -> None:
        told = subprocess.run(
            [sys.executable, "-m", "rebalanser.audit.submit", "--path"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stdout == f"{Path(submit.__file__).resolve()}\n"

    def test_it_is_the_command(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["submit.py", str(tmp_path / "nowhere")])
        monkeypatch.setattr(sys, "path", [str(Path(submit.__file__).parent), *sys.path])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(submit.__file__, run_name="__main__")
        assert ended.value.code == 3
        assert "nowhere does not exist" in capsys.readouterr().err
        assert str(Path(submit.__file__).parent) not in sys.path
