"""What one line of the history is, and how to read it back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from rebalanser.protocol.messages import Fact, FactKind
from rebalanser.redaction import HIDDEN, names_secret, redact

SCHEMA_VERSION: Final = 1
GAP: Final = "gap"
MAX_TEXT: Final = 4096
"""Characters of one text in ``detail``; the rest of a longer one is cut off."""
MAX_LINE_BYTES: Final = 1 << 20
"""A longer line is no record of ours; it is reported and never held in memory."""

Kind: TypeAlias = FactKind | Literal["gap"]
Value: TypeAlias = str | int | float | bool | None


class Record(BaseModel):
    """One thing that happened on one node. ``(node, incarnation, sequence)`` names it for ever.

    A ``gap`` record stands for records that were dropped, has the sequence number of the first of them, and
    in its detail how many there were (``dropped``), their numbers (``first``, ``last``) and the ``reason``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    schema_version: Literal[1] = Field(description="the version of this schema")
    group: str = Field(description="the group's name")
    node: str = Field(description="the id of the node's incarnation, never used again")
    label: str = Field(description="the name that a person gave the node; many nodes may share it")
    incarnation: int = Field(ge=0, description="which incarnation of its process this is; ends the node id")
    sequence: int = Field(
        ge=0,
        description="counts the records of one process from 0, across its incarnations; "
        "a number is missing only where a record was dropped",
    )
    kind: Kind = Field(description="what happened, a word of the table of kinds")
    term: int = Field(ge=0, description="the leader's term that the node knew; 0 before it knew one")
    version: int = Field(ge=0, description="the allocation that the node had adopted; 0 before the first")
    resource: str | None = Field(default=None, description="the resource concerned, if it is one only")
    token: int | None = Field(
        default=None, ge=0, description="the resource's fencing token, where one is held"
    )
    revision: int | None = Field(
        default=None, ge=0, description="the registry revision at which it was seen or done"
    )
    wall_time: float = Field(description="seconds since 1970 by the host's clock, which may jump")
    monotonic_time: float = Field(
        description="seconds of the clock that leases are counted on; comparable on one host until it reboots"
    )
    detail: dict[str, Value] = Field(
        default_factory=dict, description="what else there is to say of the kind"
    )

    @classmethod
    def from_fact(
        cls, fact: Fact, *, group: str, label: str, sequence: int, wall: float, monotonic: float
    ) -> Self:
        """A fact as a record: ``wall`` in seconds since 1970, ``monotonic`` in seconds of the lease clock.

        Takes any fact: text that is no valid Unicode is escaped, long text is cut, secrets are hidden, and
        a number that JSON does not know becomes text.
        """
        return cls(
            schema_version=SCHEMA_VERSION,
            group=_text(group),
            node=_text(fact.node),
            label=_text(label),
            incarnation=_incarnation(fact.node),
            sequence=sequence,
            kind=fact.kind,
            term=fact.term,
            version=fact.version,
            resource=None if fact.resource is None else _text(fact.resource),
            token=fact.token,
            revision=fact.revision,
            wall_time=wall,
            monotonic_time=monotonic,
            detail=_detail(fact.detail),
        )

    @classmethod
    def gap(cls, first: Record, last: Record, *, dropped: int, reason: str) -> Self:
        """The record that takes the place of ``dropped`` records, from ``first`` to ``last``."""
        return cls(
            schema_version=SCHEMA_VERSION,
            group=first.group,
            node=first.node,
            label=first.label,
            incarnation=first.incarnation,
            sequence=first.sequence,
            kind=GAP,
            term=first.term,
            version=first.version,
            wall_time=first.wall_time,
            monotonic_time=first.monotonic_time,
            detail=_detail(
                {"dropped": dropped, "first": first.sequence, "last": last.sequence, "reason": reason}
            ),
        )

    def to_line(self) -> bytes:
        """The record as one line of JSON, with its newline."""
        return self.__pydantic_serializer__.to_json(self) + b"\n"


def json_schema() -> dict[str, Any]:
    """The JSON schema of one line."""
    return Record.model_json_schema()


class UnreadableReason(StrEnum):
    """Why a line is no record."""

    TORN = "torn"
    """The last line of a file whose writer died while writing it."""
    NOT_JSON = "not_json"
    NEWER_SCHEMA = "newer_schema"
    """Written by a newer version of Rebalanser."""
    NOT_A_RECORD = "not_a_record"
    """JSON, but not what the schema says."""
    TOO_LONG = "too_long"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line that could not be read; ``line`` counts from 1. It is told, never skipped in silence."""

    file: Path
    line: int
    reason: UnreadableReason
    detail: str


def read_records(path: Path | str) -> Iterator[Record | Unreadable]:
    """Read a history file, or all ``*.jsonl`` files right in a folder in the order of their names.

    Streams: one line is in memory at a time. Records of one process come in the order of their sequence.

    Raises:
        OSError: the path, or a file that was there when the folder was listed, can't be opened or read.
    """
    path = Path(path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    for file in files:
        with file.open("rb") as lines:
            yield from _read_lines(file, lines)


def _read_lines(file: Path, lines: BinaryIO) -> Iterator[Record | Unreadable]:
    number = 0
    while line := lines.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            _skip_line(lines)
            yield Unreadable(file, number, UnreadableReason.TOO_LONG, f"over {MAX_LINE_BYTES} bytes")
        else:
            yield _read_line(file, number, line)


def _skip_line(lines: BinaryIO) -> None:
    while (rest := lines.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
        continue


def _read_line(file: Path, number: int, line: bytes) -> Record | Unreadable:
    try:
        return Record.model_validate_json(line)
    except ValidationError as error:
        reason, detail = _why_unreadable(line, error)
        return Unreadable(file, number, reason, detail)


def _why_unreadable(line: bytes, error: ValidationError) -> tuple[UnreadableReason, str]:
    try:
        content = from_json(line)
    except ValueError as syntax:
        torn = not line.endswith(b"\n")
        return (UnreadableReason.TORN if torn else UnreadableReason.NOT_JSON), str(syntax)
    version = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        return UnreadableReason.NEWER_SCHEMA, f"version {version}; this one reads up to {SCHEMA_VERSION}"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the line"
    return UnreadableReason.NOT_A_RECORD, f"{where}: {first['msg']}"


def _incarnation(node: str) -> int:
    """The number that ends a node id ``STEM-N``; 0 where there is none."""
    suffix = node.rpartition("-")[2]
    return int(suffix) if suffix.isascii() and suffix.isdigit() and len(suffix) < 19 else 0


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _detail(detail: Mapping[str, Value]) -> dict[str, Value]:
    return {_text(name): HIDDEN if names_secret(name) else _value(value) for name, value in detail.items()}


def _value(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    return _text(redact(str(value))[:MAX_TEXT])
