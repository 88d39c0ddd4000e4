"""Reader of history files, in every version of the schema that was ever written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, Final

from pydantic import ValidationError
from pydantic_core import from_json

from rebalanser.history.records import SCHEMA_VERSION, Record
from rebalanser.history.version_1 import Version1, upgrade

MAX_LINE_BYTES: Final = 1 << 20
"""Maximum bytes of a line. A longer one is no record of ours; it is reported and never held in memory."""


class UnreadableReason(StrEnum):
    """Reasons why a line is no record."""

    TORN = "torn"
    """The last line of a file whose writer died while writing it."""
    NOT_JSON = "not_json"
    NEWER_SCHEMA = "newer_schema"
    """Written by a newer version of Rebalanser."""
    NOT_A_RECORD = "not_a_record"
    """JSON that does not match the schema."""
    TOO_LONG = "too_long"


@dataclass(frozen=True, slots=True)
class UnreadableLine:
    """A line that could not be read; ``line`` counts from 1. It is reported, never skipped in silence."""

    file: Path
    line: int
    reason: UnreadableReason
    detail: str


def read_records(path: Path | str) -> Iterator[Record | UnreadableLine]:
    """Read a history file, or all ``*.jsonl`` files right in a folder in the order of their names.

    Streams: one line is in memory at a time. Records of one process come in the order of their sequence.
    Records of older versions of the schema come as they would be written now.

    Raises:
        OSError: the path, or a file that was there when the folder was listed, can't be opened or read.
    """
    path = Path(path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    for file in files:
        with file.open("rb") as lines:
            yield from _read_lines(file, lines)


def _read_lines(file: Path, lines: BinaryIO) -> Iterator[Record | UnreadableLine]:
    number = 0
    while line := lines.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            _skip_line(lines)
            yield UnreadableLine(file, number, UnreadableReason.TOO_LONG, f"over {MAX_LINE_BYTES} bytes")
        else:
            yield read_line(line, file, number)


def _skip_line(lines: BinaryIO) -> None:
    while (rest := lines.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
        continue


def read_line(line: bytes, file: Path, number: int) -> Record | UnreadableLine:
    """The record of one line; ``file`` and ``number`` locate a line that is no record.

    A message of a topic is such a line too: ``file`` is then ``TOPIC/PARTITION``, and ``number`` its offset.
    """
    try:
        return Record.model_validate_json(line)
    except ValidationError as error:
        present = error
    try:
        content = from_json(line)
    except ValueError as syntax:
        torn = not line.endswith(b"\n")
        reason = UnreadableReason.TORN if torn else UnreadableReason.NOT_JSON
        return UnreadableLine(file, number, reason, str(syntax))
    match content:
        case {"schema_version": 1}:
            return _read_version_1(file, number, line)
        case {"schema_version": int(version)} if version > SCHEMA_VERSION:
            told = f"version {version}; this one reads up to {SCHEMA_VERSION}"
            return UnreadableLine(file, number, UnreadableReason.NEWER_SCHEMA, told)
        case _:
            return UnreadableLine(file, number, UnreadableReason.NOT_A_RECORD, _first_of(present))


def _read_version_1(file: Path, number: int, line: bytes) -> Record | UnreadableLine:
    try:
        return upgrade(Version1.model_validate_json(line))
    except ValidationError as error:
        return UnreadableLine(file, number, UnreadableReason.NOT_A_RECORD, _first_of(error))


def _first_of(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the line"
    return f"{where}: {first['msg']}"
