"""Records of the history: what they take in, how they are written, read back and described."""

from __future__ import annotations

import dataclasses
import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from rebalanser.core.group.messages import Fact, FactKind
from rebalanser.core.neli.messages import FactKind as NeliKind
from rebalanser.core.shiva.messages import FactKind as ShivaKind
from rebalanser.history import (
    GAP,
    KINDS,
    Author,
    Event,
    Protocol,
    Record,
    UnreadableLine,
    UnreadableReason,
    event_of,
    json_schema,
    read_records,
)
from rebalanser.history.reader import MAX_LINE_BYTES
from rebalanser.history.records import MAX_TEXT

AUTHOR = Author(Protocol.GROUP, "orders", "w-7", "worker 7", "alpha", "boot-1")
WORDS = [(protocol, kind) for protocol, kinds in KINDS.items() for kind in kinds]


def record(sequence: int = 0, fact: Fact | None = None, author: Author = AUTHOR, **of_event: Any) -> Record:
    fact = fact or Fact(
        FactKind.START_ENTERED, "w-7-3", term=2, version=5, resource="p/1", token=41, revision=44
    )
    event = dataclasses.replace(event_of(fact, fenced=True), **of_event)
    return Record.of(author, event, sequence=sequence, wall=1_700_000_000.25, monotonic=12.5)


def test_a_fact_becomes_a_record_with_the_incarnation_of_its_node() -> None:
    assert json.loads(record(sequence=9).to_line()) == {
        "schema_version": 2,
        "protocol": "group",
        "group": "orders",
        "process": "w-7",
        "node": "w-7-3",
        "label": "worker 7",
        "incarnation": 3,
        "host": "alpha",
        "boot": "boot-1",
        "sequence": 9,
        "kind": "start_entered",
        "term": 2,
        "version": 5,
        "resource": "p/1",
        "token": 41,
        "revision": 44,
        "fenced": True,
        "wall_time": 1_700_000_000.25,
        "monotonic_time": 12.5,
        "detail": {},
    }


@pytest.mark.parametrize(
    ("node", "incarnation"), [("a-1", 1), ("a-b-12", 12), ("solo", 0), ("a-", 0), ("a-²", 0), ("7", 7)]
)
def test_incarnation_is_the_number_that_ends_the_node_id(node: str, incarnation: int) -> None:
    assert record(fact=Fact(FactKind.JOINED, node)).incarnation == incarnation


@pytest.mark.parametrize("kind", FactKind)
def test_whether_writes_are_fenced_is_said_where_access_begins(kind: FactKind) -> None:
    fact = Fact(kind, "w-1")
    begins = kind is FactKind.START_ENTERED
    assert event_of(fact, fenced=True).fenced is (True if begins else None)
    assert event_of(fact, fenced=False).fenced is (False if begins else None)
    assert event_of(fact).fenced is None


@pytest.mark.rule("AU-1")
@pytest.mark.parametrize(("protocol", "kind"), WORDS)
def test_every_kind_survives_a_round_trip(protocol: Protocol, kind: str) -> None:
    written = Record.of(
        dataclasses.replace(AUTHOR, protocol=protocol),
        Event(kind, "w-1", value=1.5, detail={"text": "ä", "number": 1.5, "flag": True, "none": None}),
        sequence=1,
        wall=1.5,
        monotonic=2.5,
    )
    assert Record.model_validate_json(written.to_line()) == written
    jsonschema.validate(json.loads(written.to_line()), json_schema())


@pytest.mark.parametrize(
    ("protocol", "kind"), [("shiva", "joined"), ("group", "process_exited"), ("neli", "")]
)
def test_a_kind_of_another_protocol_is_no_record(protocol: str, kind: str) -> None:
    with pytest.raises(ValidationError, match=f"is not a kind of {protocol}"):
        record(author=dataclasses.replace(AUTHOR, protocol=Protocol(protocol)), kind=kind)


def test_what_is_null_is_left_out_of_a_line_and_read_back() -> None:
    written = record(fact=Fact(FactKind.JOINED, "w-1"), author=Author(Protocol.GROUP, "g", "p", "l"))
    assert "null" not in written.to_line().decode()
    assert Record.model_validate_json(written.to_line()) == written
    assert (written.host, written.boot, written.value, written.overlap_limit_s) == (None,) * 4


def test_any_fact_can_be_written() -> None:
    detail: dict[str, Any] = {"nan": float("nan"), "inf": float("inf"), "error": "\ud800\x00" + "x" * 9999}
    written = record(fact=Fact(FactKind.JOIN_FAILED, "w-1", resource="half \udcff", detail=detail))
    read = Record.model_validate_json(written.to_line())
    assert read.resource == "half \\udcff"
    assert (read.detail["nan"], read.detail["inf"]) == ("nan", "inf")
    assert isinstance(read.detail["error"], str)
    assert read.detail["error"].startswith("\\ud800\x00x")
    assert len(read.detail["error"].encode()) <= MAX_TEXT + 16


def test_no_secret_is_written() -> None:
    detail = {"error": "no answer from etcd://ann:hunter2@10.0.0.1:2379", "password": "hunter2"}
    line = record(fact=Fact(FactKind.JOIN_FAILED, "w-1", detail=detail)).to_line()
    assert b"hunter2" not in line
    assert b"etcd://ann:***@10.0.0.1:2379" in line


def test_records_are_frozen_and_strict() -> None:
    written = record()
    with pytest.raises(ValidationError, match="frozen"):
        written.term = 3
    with pytest.raises(ValidationError, match="sequence"):
        Record.model_validate(written.model_dump() | {"sequence": "1"})
    with pytest.raises(ValidationError, match="extra"):
        Record.model_validate(written.model_dump() | {"colour": "red"})


def test_a_gap_stands_where_the_first_dropped_record_would() -> None:
    gap = Record.gap(record(3), record(7), dropped=5, reason="ENOSPC: No space left on device")
    assert (gap.kind, gap.sequence, gap.node, gap.incarnation) == (GAP, 3, "w-7-3", 3)
    assert (gap.process, gap.host, gap.boot, gap.fenced) == ("w-7", "alpha", "boot-1", None)
    assert gap.detail == {
        "dropped": 5,
        "first": 3,
        "last": 7,
        "reason": "ENOSPC: No space left on device",
    }
    assert Record.model_validate_json(gap.to_line()) == gap


def read_all(path: Path) -> list[Record | UnreadableLine]:
    return list(read_records(path))


def test_a_folder_is_read_in_the_order_of_its_file_names(tmp_path: Path) -> None:
    (tmp_path / "g.n.2.jsonl").write_bytes(record(2).to_line())
    (tmp_path / "g.n.1.jsonl").write_bytes(record(0).to_line() + record(1).to_line())
    (tmp_path / "notes.txt").write_text("not history")
    assert read_all(tmp_path) == [record(0), record(1), record(2)]
    assert read_all(tmp_path / "g.n.2.jsonl") == [record(2)]


def changed(**fields: object) -> bytes:
    return json.dumps(json.loads(record().to_line()) | fields).encode() + b"\n"


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b"{'no json'}\n", UnreadableReason.NOT_JSON, "key"),
        (b"\xff\xfe\n", UnreadableReason.NOT_JSON, ""),
        (b"\n", UnreadableReason.NOT_JSON, ""),
        (b"[]\n", UnreadableReason.NOT_A_RECORD, "the line"),
        (b'{"schema_version":1}\n', UnreadableReason.NOT_A_RECORD, "group: Field required"),
        (b'{"schema_version":2}\n', UnreadableReason.NOT_A_RECORD, "protocol: Field required"),
        (changed(schema_version=0), UnreadableReason.NOT_A_RECORD, "schema_version"),
        (changed(schema_version=1), UnreadableReason.NOT_A_RECORD, "protocol: Extra inputs"),
        (changed(term=-1), UnreadableReason.NOT_A_RECORD, "term"),
        (changed(kind="exploded"), UnreadableReason.NOT_A_RECORD, "kind"),
        (changed(schema_version=3, colour="red"), UnreadableReason.NEWER_SCHEMA, "version 3"),
        (b"x" * (2 * MAX_LINE_BYTES + 5) + b"\n", UnreadableReason.TOO_LONG, "bytes"),
    ],
)
def test_an_unreadable_line_is_told_and_the_next_one_read(
    tmp_path: Path, line: bytes, reason: UnreadableReason, detail: str
) -> None:
    file = tmp_path / "g.n.1.jsonl"
    file.write_bytes(record(0).to_line() + line + record(1).to_line())
    first, bad, last = read_all(file)
    assert (first, last) == (record(0), record(1))
    assert isinstance(bad, UnreadableLine)
    assert (bad.file, bad.line, bad.reason) == (file, 2, reason)
    assert detail in bad.detail


def test_a_line_torn_anywhere_is_a_record_or_told_as_torn(tmp_path: Path) -> None:
    file = tmp_path / "g.n.1.jsonl"
    line = record(1).to_line()
    for length in range(1, len(line)):
        file.write_bytes(record(0).to_line() + line[:length])
        first, torn = read_all(file)
        assert first == record(0)
        if length == len(line) - 1:
            assert torn == record(1), "only the newline is missing"
        else:
            assert isinstance(torn, UnreadableLine)
            assert (torn.line, torn.reason) == (2, UnreadableReason.TORN)


def test_reading_streams() -> None:
    reading, writing = os.pipe()
    os.write(writing, record(0).to_line())
    records = read_records(f"/dev/fd/{reading}")
    assert next(records) == record(0), "the first is there before the file has ended"
    os.write(writing, record(1).to_line())
    os.close(writing)
    assert list(records) == [record(1)]
    os.close(reading)


@pytest.mark.parametrize(
    ("protocol", "kinds"),
    [(Protocol.GROUP, FactKind), (Protocol.SHIVA, ShivaKind), (Protocol.NELI, NeliKind)],
)
def test_every_kind_is_described(protocol: Protocol, kinds: type[StrEnum]) -> None:
    assert list(KINDS[protocol]) == [*kinds, GAP]


def test_every_field_is_described() -> None:
    assert all(field.description for field in Record.model_fields.values())
