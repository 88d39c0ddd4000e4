"""``rebalanser history`` over files: what each command answers, and what bad input gets."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from rebalanser.cli import main
from rebalanser.cli.arguments import parse_time, shown_time
from rebalanser.cli.history_sources import FileSource, HistoryFile, open_source
from rebalanser.cli.history_stats import Numbers, RecordCounter, printable, record_line, stats_table
from rebalanser.core.group.messages import FactKind
from rebalanser.errors import UnusableHistory
from rebalanser.history import Author, Event, Record, UnreadableLine, UnreadableReason
from rebalanser.history import Protocol as HistoryProtocol
from rebalanser.history.reader import MAX_LINE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WALL = 1_700_000_000.0


def record(
    sequence: int,
    label: str = "w",
    *,
    group: str = "orders",
    kind: str = FactKind.BARRIER_ADDED,
    resource: str | None = "r",
    wall: float | None = None,
    process: str | None = None,
    **detail: str,
) -> Record:
    event = Event(kind, f"{label}-1", resource=resource, token=7, detail=detail)
    author = Author(HistoryProtocol.GROUP, group, process or f"{label}-process", label)
    at = WALL + sequence if wall is None else wall
    return Record.of(author, event, sequence=sequence, wall=at, monotonic=float(sequence))


def put(folder: Path, label: str, records: Sequence[Record], number: int = 0) -> Path:
    path = folder / f"orders.{label}.20231114T221320000000Z.{number:06}.jsonl"
    path.write_bytes(b"".join(each.to_line() for each in records))
    return path


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def sequences(self) -> list[int]:
        """Those of the records on standard output, one of JSON a line."""
        return [json.loads(line)["sequence"] for line in self.out.splitlines()]


class Cli(Protocol):
    def __call__(self, *arguments: str | Path) -> Answer: ...


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("XDG_STATE_HOME", "/nowhere/at/all")  # these commands need no registry

    def call(*arguments: str | Path) -> Answer:
        code = main(["history", *map(str, arguments)])
        return Answer(code, *capsys.readouterr())

    return call


def refused(answer: Answer, code: int, *fragments: str) -> None:
    """One line on standard error, none on standard output."""
    assert answer.code == code, answer
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1, answer.err
    for fragment in fragments:
        assert fragment in answer.err


def test_tail_merges_the_processes_by_time(cli: Cli, tmp_path: Path) -> None:
    put(tmp_path, "a", [record(0, "a", wall=1.0), record(1, "a", wall=5.0)])
    put(tmp_path, "a", [record(2, "a", wall=6.0)], number=1)
    put(tmp_path, "b", [record(0, "b", wall=2.0), record(1, "b", wall=5.5)])
    answer = cli("tail", tmp_path, "--json")
    shown = [(each["label"], each["sequence"]) for each in map(json.loads, answer.out.splitlines())]
    assert shown == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2)]
    assert (answer.code, answer.err) == (0, "")


def test_tail_says_who_did_what_when_and_to_what(cli: Cli, tmp_path: Path) -> None:
    put(tmp_path, "w", [record(0, kind=FactKind.START_FAILED, resource="partition-3", error="no disk")])
    answer = cli("tail", tmp_path)
    when = shown_time(WALL)
    assert answer.out == f'{when}  orders/w  start_failed  partition-3  token=7 error="no disk"\n'


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), [0, 1, 2, 3]),
        (("--group", "orders"), [0, 1, 3]),
        (("--resource", "r"), [0, 2]),
        (("--kind", "start_entered"), [3]),
        (("--since", "2023-11-14T22:13:22Z"), [2, 3]),
        (("--last", "1"), [3]),
        (("--last", "0"), []),
        (("--group", "orders", "--last", "2"), [1, 3]),
        (("--since", "1h"), []),
    ],
)
def test_tail_shows_what_was_asked_for(
    cli: Cli, tmp_path: Path, options: tuple[str, ...], expected: list[int]
) -> None:
    put(
        tmp_path,
        "w",
        [
            record(0),
            record(1, resource=None),
            record(2, group="other"),
            record(3, kind=FactKind.START_ENTERED, resource="s"),
        ],
    )
    answer = cli("tail", tmp_path, "--json", *options)
    assert answer.code == 0
    assert answer.sequences == expected


def test_json_is_the_record_itself(cli: Cli, tmp_path: Path) -> None:
    path = put(tmp_path, "w", [record(0), record(1, error="ü")])
    assert cli("tail", path, "--json").out.encode() == path.read_bytes()


@pytest.mark.rule("AU-1")
def test_unreadable_lines_are_told_and_the_rest_is_shown(cli: Cli, tmp_path: Path) -> None:
    path = put(tmp_path, "w", [record(0)])
    path.write_bytes(path.read_bytes() + b"{}\nnonsense\n" + record(1).to_line() + b'{"torn')
    answer = cli("tail", tmp_path, "--json")
    assert (answer.code, answer.sequences) == (0, [0, 1])
    assert [line.split(": ")[1:3] for line in answer.err.splitlines()] == [
        [f"{path}:2", "not_a_record"],
        [f"{path}:3", "not_json"],
        [f"{path}:5", "torn"],
    ]


def test_a_history_gives_no_orders_to_the_terminal(cli: Cli, tmp_path: Path) -> None:
    put(tmp_path, "w", [record(0, label="w\x1b[2J", resource="r\n\u202e", error="\x07")])
    answer = cli("tail", tmp_path)
    assert answer.out.count("\n") == 1
    assert answer.out.rstrip("\n").isprintable()
    stated = cli("stats", tmp_path)
    assert stated.out.rstrip("\n").isprintable()
    assert printable("etcd://user:password@host") == "etcd://user:***@host"


class Days:
    """What happens between the looks of ``--follow``: each sleep runs the next step, then comes Ctrl-C.

    It stands in for ``time`` in the command's module alone: threads that other tests have left in this
    process, such as those of a Spark session, sleep as ever.
    """

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = iter(steps)

    def sleep(self, _seconds: float) -> None:
        step = next(self._steps, None)
        if step is None:
            raise KeyboardInterrupt
        step()


def test_following_shows_what_comes_until_ctrl_c(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "orders.w.a.000000.jsonl"
    second = tmp_path / "orders.w.a.000001.jsonl"
    half = record(2).to_line()[:30]

    def append(path: Path, data: bytes) -> None:
        with path.open("ab") as file:
            file.write(data)

    days = Days(
        lambda: append(first, record(0).to_line()),
        lambda: append(first, record(1).to_line() + half),
        lambda: append(first, record(2).to_line()[30:]),
        lambda: append(second, record(3).to_line()),  # rotated
        first.unlink,
        lambda: append(second, record(4).to_line() + b"nonsense\n"),
    )
    monkeypatch.setattr("rebalanser.cli.history.time", days)
    answer = cli("tail", tmp_path, "--follow", "--json")
    assert answer.code == 130
    assert answer.sequences == [0, 1, 2, 3, 4]
    assert answer.err == f"warning: {second}:3: not_json: expected ident at line 1 column 2\n"


def test_following_one_file_goes_on_when_it_is_replaced(tmp_path: Path) -> None:
    path = put(tmp_path, "w", [record(0), record(1)])
    source = FileSource(path)
    assert list(source.read(growing=True)) == [record(0), record(1)]
    path.unlink()
    assert list(source.read(growing=True)) == []
    put(tmp_path, "w", [record(2)])
    assert list(source.read(growing=True)) == [record(2)]
    path.write_bytes(b"")
    assert list(source.read(growing=True)) == []
    put(tmp_path, "w", [record(3)])
    assert list(source.read(growing=True)) == [record(3)]


def test_trouble_of_a_source_is_told_once(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    troubles = iter([None, "no answer", "no answer", None])
    put(tmp_path, "w", [record(0)])
    asked = [next(troubles) for _ in range(4)]
    states = iter([state for state in asked for _ in range(3)])
    now: list[str | None] = [None]

    def step() -> None:
        now[0] = next(states)
        for _ in range(2):
            next(states)

    monkeypatch.setattr(FileSource, "trouble", property(lambda _self: now[0]))
    monkeypatch.setattr("rebalanser.cli.history.time", Days(step, step, step, step))
    answer = cli("tail", tmp_path, "--follow", "--json")
    assert answer.err.splitlines() == [
        f"warning: {tmp_path}: no answer",
        f"warning: {tmp_path}: available again",
    ]


def test_a_line_longer_than_any_record_is_never_held(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"x" * (3 * MAX_LINE_BYTES) + b"\n" + record(1).to_line())
    first, second = (item for _, item in HistoryFile(path).read(growing=False))
    assert isinstance(first, UnreadableLine)
    assert (first.line, first.reason) == (1, UnreadableReason.TOO_LONG)
    assert second == record(1)


def test_a_file_larger_than_a_part_is_read_whole(tmp_path: Path) -> None:
    records = [record(sequence) for sequence in range(500)]
    source = FileSource(put(tmp_path, "w", records))
    assert list(source.read(growing=False)) == records
    done, total = source.progress()
    assert done == total > 100


def test_stats_count_per_node(cli: Cli, tmp_path: Path) -> None:
    gap = Record.gap(record(4), record(6), dropped=3, reason="too fast")
    put(tmp_path, "a", [record(2, "a"), record(3, "a"), record(2, "a"), record(9, "a")])
    put(tmp_path, "w", [record(0), record(1), record(2), record(3), gap, record(7)])
    put(tmp_path, "x", [record(0, process="second", kind=FactKind.LEFT, wall=WALL + 100)])
    (tmp_path / "y.jsonl").write_bytes(b"{}\n{}\ntorn")
    document = cli("stats", tmp_path, "--json").document
    first, second = document["nodes"]
    assert document["records"] == 10
    assert document["duplicates"] == 1
    assert [(each["reason"], each["lines"]) for each in document["unreadable"]] == [
        ("not_a_record", 2),
        ("torn", 1),
    ]
    assert first["node"] == "a"
    assert (first["records"], first["duplicates"], first["earlier"]) == (3, 1, 2)
    assert (first["gaps"], first["missing"], first["dropped"]) == (1, 5, 0)
    assert second["processes"] == 2
    assert (second["gaps"], second["missing"], second["dropped"]) == (0, 0, 3)
    assert second["kinds"] == {"barrier_added": 5, "gap": 1, "left": 1}
    assert (second["first_time"], second["span_s"]) == (WALL, 100.0)


def test_stats_for_people_name_what_is_not_as_it_should_be(cli: Cli, tmp_path: Path) -> None:
    put(tmp_path, "a", [record(2, "a"), record(3, "a"), record(2, "a"), record(9, "a")])
    answer = cli("stats", tmp_path)
    assert answer.out.startswith("orders/a (group): 3 records of 1 process, ")
    assert "1 duplicate, 5 missing in 1 gap, 2 missing before; 3 barrier_added" in answer.out


def test_stats_on_a_terminal_are_a_table() -> None:
    from rich.console import Console

    tally = RecordCounter()
    tally.add(record(1, "[bold]a"))
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(stats_table(tally.stats(["x"])))
    text = console.export_text()
    console.file.close()
    assert "[bold]a" in text
    assert "1 missing before" in text
    assert "1 record of 1 node" in text


def oracle(ranges: list[tuple[int, int]]) -> tuple[int, int, int, int]:
    seen: set[int] = set()
    duplicates = 0
    for first, last in ranges:
        duplicates += first in seen
        seen |= set(range(first, last + 1))
    missing = sorted(set(range(min(seen), max(seen))) - seen)
    gaps = sum(1 for number in missing if number - 1 not in missing)
    return duplicates, len(missing), gaps, min(seen)


spans = st.tuples(st.integers(0, 40), st.integers(0, 4)).map(lambda pair: (pair[0], sum(pair)))


@pytest.mark.rule("AU-2")
@given(st.lists(spans, min_size=1, max_size=40))
def test_numbers_in_any_order_are_counted_as_sets_are(ranges: list[tuple[int, int]]) -> None:
    numbers = Numbers()
    duplicates = sum(not numbers.add(first, last) for first, last in ranges)
    assert (duplicates, numbers.missing, numbers.gaps, numbers.earlier) == oracle(ranges)
    assert numbers.exact


@given(st.lists(spans, min_size=1, max_size=40))
def test_numbers_with_little_room_are_exact_or_say_that_they_are_not(ranges: list[tuple[int, int]]) -> None:
    numbers = Numbers(max_runs=3)
    duplicates = sum(not numbers.add(first, last) for first, last in ranges)
    if numbers.exact:
        assert (duplicates, numbers.missing, numbers.gaps, numbers.earlier) == oracle(ranges)


def test_numbers_with_little_room_do_say_so() -> None:
    numbers = Numbers(max_runs=2)
    for number in (0, 2, 4, 6):
        assert numbers.add(number, number)
    assert (numbers.missing, numbers.gaps, numbers.exact) == (3, 3, True)
    numbers.add(1, 1)
    assert not numbers.exact


def test_export_to_a_file_and_to_a_folder(cli: Cli, tmp_path: Path) -> None:
    put(tmp_path, "a", [record(0, "a"), record(2, "a")])
    bad = put(tmp_path, "b", [record(1, "b"), record(3, "b", group="other")])
    bad.write_bytes(bad.read_bytes() + b"{}\n")
    target = tmp_path / "target"
    target.mkdir()
    answer = cli("export", tmp_path, "--to", target / "all.jsonl")
    assert answer.out == f"wrote 4 records to {target / 'all.jsonl'}; 1 line left out: not records\n"
    assert "not_a_record" in answer.err
    lines = (target / "all.jsonl").read_bytes()
    assert lines == b"".join(record(n, label).to_line() for n, label in ((0, "a"), (1, "b"), (2, "a"))) + (
        record(3, "b", group="other").to_line()
    )
    document = cli("export", tmp_path, "--to", target / "x", "--group", "other", "--json").document
    assert document == {"to": str(target / "x"), "format": "jsonl", "records": 1, "unreadable": 1}
    assert (target / "x" / "history.jsonl").read_bytes() == record(3, "b", group="other").to_line()
    assert sorted(path.name for path in target.iterdir()) == ["all.jsonl", "x"]


def test_an_export_is_between_two_times(cli: Cli, tmp_path: Path) -> None:
    put(tmp_path, "a", [record(sequence, "a") for sequence in range(10)])
    times = ("--since", "2023-11-14T22:13:22Z", "--until", "2023-11-14T22:13:24Z")
    cli("export", tmp_path, "--to", tmp_path / "out", *times)
    assert cli("tail", tmp_path / "out", "--json").sequences == [2, 3, 4]


def test_an_export_overwrites_nothing(cli: Cli, tmp_path: Path) -> None:
    source = put(tmp_path, "a", [record(0)])
    before = source.read_bytes()
    refused(cli("export", source, "--to", source), 3, "the file exists", "--to")
    refused(cli("export", source, "--to", tmp_path), 3, "the folder is not empty")
    link = tmp_path / "link.jsonl"
    link.symlink_to("nowhere")
    refused(cli("export", source, "--to", link), 3, "the file exists")
    assert source.read_bytes() == before


def test_an_export_into_an_empty_folder_that_is_there(cli: Cli, tmp_path: Path) -> None:
    source = put(tmp_path, "a", [record(0)])
    (tmp_path / "out").mkdir()
    assert cli("export", source, "--to", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "history.jsonl").exists()


def test_an_export_that_fails_leaves_nothing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = put(tmp_path, "a", [record(0)])

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        refused(cli("export", source, "--to", tmp_path / "out"), 3, "No space left", "nothing is left")
    refused(cli("export", source, "--to", tmp_path / "no" / "out"), 3, "No such file")
    refused(cli("export", source, "--to", tmp_path / "out", "--group", "none"), 3, "no record matches")
    backwards = ("--since", "1h", "--until", "2h")
    refused(cli("export", source, "--to", tmp_path / "out", *backwards), 2, "later than --until")
    assert list(tmp_path.iterdir()) == [source]


def test_what_is_no_history_is_told_with_what_was_found(cli: Cli, tmp_path: Path) -> None:
    for command in (("tail",), ("stats",), ("export", "--to", tmp_path / "out")):
        refused(cli(*command, tmp_path / "nowhere"), 3, "does not exist", "kafka://HOST:PORT/TOPIC")
        empty = tmp_path / f"empty-{command[0]}"
        empty.mkdir()
        refused(cli(*command, empty), 3, "the folder is empty")
        (empty / "a.txt").touch()
        (empty / "b.txt").touch()
        refused(cli(*command, empty), 3, "no *.jsonl file", "2 others (2 of .txt)")
        (empty / "part.parquet").touch()
        refused(cli(*command, empty), 3, "Parquet", "rebalanser audit")
        (empty / "x.jsonl").touch()
        refused(cli(*command, empty), 3, "no record", "1 file, 1 of them empty")
    assert not (tmp_path / "out").exists()


def test_a_file_without_any_record_says_what_its_lines_are(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"{}\n{}\n" + b'{"schema_version":99}\n')
    answer = cli("stats", path)
    refused(answer, 3, "2 not_a_record, 1 newer_schema", f"{path}:1")
    shown = cli("stats", path, "--json").document
    assert (shown["kind"], shown["exit_code"]) == ("UnusableHistory", 3)


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").mkdir()
    with pytest.raises(UnusableHistory, match="Is a directory"):
        list(open_source(str(tmp_path)).read(growing=False))


@pytest.mark.parametrize(
    ("arguments", "code", "fragment"),
    [
        (("tail", "FOLDER", "--kind", "start_enterd"), 2, "similar kinds are start_entered"),
        (("tail", "FOLDER", "--since", "yesterday"), 2, "15m or 2h"),
        (("tail", "FOLDER", "--last", "-1"), 2, "--last"),
        (("tail",), 2, "SOURCE"),
        (("export", "FOLDER"), 2, "--to"),
        (("export", "FOLDER", "--to", "x", "--format", "csv"), 2, "csv"),
        (("tail", "nats://localhost/x"), 3, "known: kafka"),
        (("tail", "kafka://localhost:9092"), 3, "names no topic"),
    ],
)
def test_what_is_typed_wrongly(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], code: int, fragment: str
) -> None:
    put(tmp_path, "a", [record(0)])
    given = [str(tmp_path) if each == "FOLDER" else each for each in arguments]
    refused(cli(*given), code, fragment)


def test_the_missing_extra_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rebalanser_kafka.history_source", None)
    refused(cli("tail", "kafka://localhost:9092/history"), 3, "pip install 'rebalanser[kafka]'")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2023-11-14T22:13:20Z", WALL),
        ("2023-11-14 23:13:20+01:00", WALL),
        ("2023-11-14T22:13:20.250+00:00", WALL + 0.25),
        (" 20231114T221320Z ", WALL),
    ],
)
def test_times_with_a_zone(text: str, expected: float) -> None:
    assert parse_time(text) == expected


def test_times_without_a_zone_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Etc/GMT-3")
    time.tzset()
    try:
        assert parse_time("2023-11-15T01:13:20") == WALL
        assert parse_time("2023-11-15") == WALL - 3600 - 13 * 60 - 20
        assert shown_time(WALL) == "2023-11-15 01:13:20.000+03:00"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("text", "ago_s"),
    [("90s", 90), ("15m", 900), ("2h", 7200), ("1.5h ago", 5400), ("1d", 86400), ("1w", 604800)],
)
def test_times_that_are_so_long_ago(text: str, ago_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rebalanser.cli.arguments.time", SimpleNamespace(time=lambda: WALL))
    assert parse_time(text) == WALL - ago_s


@pytest.mark.parametrize("text", ["", "h", "2", "-2h", "2 y", "2023-13-01", "now", "9999999999999d x"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="invalid time"):
        parse_time(text)


def test_a_time_that_no_calendar_has_is_shown_in_seconds() -> None:
    assert shown_time(1e300) == "1e+300 s since 1970"
    assert "1e+300" in record_line(record(0, wall=1e300))
