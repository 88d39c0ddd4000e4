"""Records of version 1 of the schema, read as they would be written now."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from rebalanser.history import Protocol, Record, UnreadableLine, UnreadableReason, read_records
from rebalanser.history.version_1 import DEFAULTS_OF_VERSION_1, INCARNATION_OF_NODE, Version1, upgrade

if TYPE_CHECKING:
    from pathlib import Path

LINE = (
    b'{"schema_version":1,"group":"orders","node":"w-7-3","label":"worker 7","incarnation":3,"sequence":9,'
    b'"kind":"start_entered","term":2,"version":5,"resource":"p/1","token":41,"revision":44,'
    b'"wall_time":1700000000.25,"monotonic_time":12.5,"detail":{}}\n'
)
"""As version 1 wrote it."""


def old(**fields: Any) -> Version1:
    return Version1.model_validate_json(json.dumps(json.loads(LINE) | fields))


@pytest.mark.rule("AU-1")
def test_a_file_of_both_versions_is_read_as_one(tmp_path: Path) -> None:
    file = tmp_path / "g.n.1.jsonl"
    upgraded = upgrade(old())
    file.write_bytes(LINE + upgraded.to_line() + LINE.replace(b"start_entered", b"exploded"))
    first, second, bad = read_records(file)
    assert first == second == upgraded
    assert isinstance(bad, UnreadableLine)
    assert (bad.reason, bad.line) == (UnreadableReason.NOT_A_RECORD, 3)
    assert "is not a kind of group" in bad.detail


def test_what_version_1_said_stays_and_what_it_lacked_is_added() -> None:
    record = upgrade(old())
    for name in Version1.model_fields.keys() - {"schema_version"}:
        assert getattr(record, name) == json.loads(LINE)[name]
    assert (record.schema_version, record.protocol, record.process) == (2, Protocol.GROUP, "w-7")
    added = (record.host, record.boot, record.value, record.fenced, record.overlap_limit_s)
    assert added == (None,) * 5


def test_every_field_that_version_1_lacked_is_accounted_for() -> None:
    lacking = Record.model_fields.keys() - Version1.model_fields.keys()
    assert lacking == DEFAULTS_OF_VERSION_1.keys() | {"process", "value"}


@pytest.mark.parametrize(
    ("node", "process"),
    [
        ("a-1", "a"),
        ("a-b-12", "a-b"),
        ("solo", "solo"),
        ("a-", "a-"),
        ("7", "7"),
        ("a-1-", "a-1-"),
        ("a-1234567890123456789", "a-1234567890123456789"),
    ],
)
def test_the_process_is_the_node_without_its_incarnation(node: str, process: str) -> None:
    assert upgrade(old(node=node)).process == process
    assert re.sub(INCARNATION_OF_NODE, "", node) == process


@pytest.mark.parametrize(
    ("kind", "detail", "value"),
    [
        ("allocation_published", {"published_version": 7}, 7.0),
        ("rebalance_completed", {"completed_version": 8}, 8.0),
        ("allocation_adopted", {"share_version": 9}, None),
        ("allocation_published", {}, None),
        ("allocation_published", {"published_version": "x"}, None),
    ],
)
def test_the_value_is_taken_out_of_the_detail(kind: str, detail: dict[str, Any], value: float | None) -> None:
    assert upgrade(old(kind=kind, detail=detail)).value == value


def test_a_gap_of_version_1_stays_one() -> None:
    detail = {"dropped": 2, "first": 9, "last": 10, "reason": "ENOSPC: No space left on device"}
    gap = upgrade(old(kind="gap", resource=None, token=None, revision=None, detail=detail))
    assert (gap.kind, gap.sequence, gap.detail) == ("gap", 9, detail)
