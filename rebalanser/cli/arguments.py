"""Arguments as values: names and fields of resources, attributes, times and durations."""

from __future__ import annotations

import csv
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

import typer

from rebalanser.errors import InvalidArgument, InvalidName
from rebalanser.registry.keys import check_attribute, check_name

STANDARD_INPUT = Path("-")
CSV_COLUMNS: Final = ("name", "weight", "needs", "spread", "pin")


def read_names(given: Sequence[str], file: Path | None) -> list[str]:
    """Return the given names, and those of the file, one per line; ``-`` is standard input.

    Raises:
        InvalidName: a name can't be stored or is given twice; the message says which and where.
    """
    if not given and file is None:
        raise typer.BadParameter("no resources: give names, or a file with --file")
    places: dict[str, str] = {}
    for place, name in _placed(given, file):
        _check(name, place)
        _note_place(name, place, places)
    return list(places)


def _note_place(name: str, place: str, places: dict[str, str]) -> None:
    if name in places:
        raise InvalidName(f"{place}: {name!r} is given twice, first as {places[name]}; nothing was changed")
    places[name] = place


def _check(name: str, place: str) -> None:
    try:
        check_name(name, "resource")
    except InvalidName as error:
        raise InvalidName(f"{place}: {error}; nothing was changed") from None


def _placed(given: Sequence[str], file: Path | None) -> Iterator[tuple[str, str]]:
    for number, name in enumerate(given, start=1):
        yield f"name {number}", name
    if file == STANDARD_INPUT:
        yield from _lines(sys.stdin.buffer)
    elif file is not None:
        try:
            with file.open("rb") as lines:
                yield from _lines(lines)
        except OSError as error:
            reason = f"{file} can't be read: {error.strerror}"
            raise typer.BadParameter(reason, param_hint="'--file'") from error


def _lines(lines: BinaryIO) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(lines, start=1):
        try:
            name = line.removesuffix(b"\n").removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise InvalidName(f"line {number}: it is not UTF-8 text; nothing was changed") from error
        yield f"line {number}", name


def read_described(file: Path) -> dict[str, dict[str, Any]]:
    """Return what a file says of resources, by name, as ``Admin.add_each`` takes it.

    A ``.csv`` file has a line of ``CSV_COLUMNS`` first; an empty cell says nothing, needs are separated by
    semicolons, and spaces before a cell are ignored. A ``.jsonl`` file has an object on each line, with
    ``name`` and what ``Admin.add`` takes.

    Raises:
        InvalidArgument: a line can't be read; the message says which.
        InvalidName: a name can't be stored or is given twice.
    """
    readers = {".csv": _csv_rows, ".jsonl": _json_rows}
    if (reader := readers.get(file.suffix)) is None:
        raise typer.BadParameter(f"{file} ends neither in .csv nor in .jsonl", param_hint="'--from'")
    said: dict[str, dict[str, Any]] = {}
    places: dict[str, str] = {}
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            for place, row in reader(lines):
                name = row.pop("name", None)
                if name is None:
                    raise InvalidArgument(f"{place}: it has no name; nothing was changed")
                _check(name, place)
                _note_place(name, place, places)
                said[name] = row
    except OSError as error:
        raise typer.BadParameter(f"{file} can't be read: {error.strerror}", param_hint="'--from'") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{file} is not UTF-8 text; nothing was changed") from error
    return said


def _csv_rows(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    rows = csv.reader(lines, strict=True, skipinitialspace=True)
    try:
        columns = [column.strip() for column in next(filter(None, rows), ())]
        _check_columns(columns, f"line {rows.line_num}")
        for cells in rows:
            place = f"line {rows.line_num}"
            if cells and len(cells) != len(columns):
                raise InvalidArgument(
                    f"{place}: {len(cells)} cells for {len(columns)} columns; nothing was changed"
                )
            row: dict[str, Any] = {name: cell for name, cell in zip(columns, cells, strict=False) if cell}
            if "needs" in row:
                row["needs"] = [tag.strip() for tag in row["needs"].split(";")]
            if "weight" in row:
                row["weight"] = _number(row["weight"], place)
            if cells:
                yield place, row
    except csv.Error as error:
        raise InvalidArgument(f"line {rows.line_num}: {error}; nothing was changed") from error


def _check_columns(columns: Sequence[str], place: str) -> None:
    if not columns:
        raise InvalidArgument("the line of columns is missing; nothing was changed")
    for column in columns:
        if column not in CSV_COLUMNS:
            raise InvalidArgument(
                f"{place}: {column!r} is not a column; the first line has columns, "
                f"out of {', '.join(CSV_COLUMNS)}; nothing was changed"
            )
        if columns.count(column) > 1:
            raise InvalidArgument(f"{place}: column {column!r} is given twice; nothing was changed")


def _number(text: str, place: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidArgument(f"{place}: weight: {text!r} is not a number; nothing was changed") from None


def _json_rows(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"line {number}: it is not JSON ({error}); nothing was changed") from None
        if not isinstance(row, dict):
            raise InvalidArgument(f"line {number}: it is not a JSON object; nothing was changed")
        yield f"line {number}", row


def read_conditions(given: Sequence[str], option: str = "--where") -> dict[str, str]:
    """Parse the conditions of ``--where KEY=VALUE``.

    An empty value is refused: ``zone=$ZONE`` without the variable would choose every node without a zone.
    """
    conditions = read_pairs(given, option)
    for name, value in conditions.items():
        if not value:
            raise typer.BadParameter(f"{name}= has no value", param_hint=f"'{option}'")
    return conditions


def read_pairs(given: Sequence[str], option: str) -> dict[str, str]:
    """Parse the ``KEY=VALUE`` texts of an option."""
    pairs: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals) or name in pairs:
            reason = "is given twice" if name in pairs else "is not KEY=VALUE"
            raise typer.BadParameter(f"{text!r} {reason}", param_hint=f"'{option}'")
        pairs[name] = value
    return pairs


def read_attributes(given: Sequence[str]) -> dict[str, str]:
    """Parse attributes from ``KEY=VALUE`` texts.

    Raises:
        InvalidName: an attribute can't be stored; nothing was changed.
    """
    attributes: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="'--attribute'")
        if name in attributes:
            raise InvalidName(f"attribute {name!r} is given twice; nothing was changed")
        check_attribute(name, value, "resource")
        attributes[name] = value
    return attributes


_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d|w)")
_SECONDS: Final = re.compile(r"\d+(?:\.\d+)?")
_AGO: Final = re.compile(rf"{_SPAN.pattern}(?: ago)?")
_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


def parse_time(text: str) -> float:
    """Parse a time in ISO 8601 (local without a zone), or an age, and return seconds since 1970.

    ``2026-11-22T00:30``, ``2026-11-22 00:30:15.5+01:00``, ``2026-11-22``; ``90s``, ``15m``, ``2h``, ``3d``,
    ``1w``.

    Raises:
        typer.BadParameter: it is neither; the message has an example.
    """
    if ago := _AGO.fullmatch(text.strip()):
        return time.time() - float(ago[1]) * _UNITS_S[ago[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise typer.BadParameter(
            f"invalid time {text!r}: use ISO 8601 such as 2026-11-22T00:30 or 2026-11-22T00:30+01:00, or "
            f"an age such as 15m or 2h"
        ) from None


def parse_span(text: str) -> float:
    """Parse a duration, ``90s``, ``15m``, ``2h``, ``3d``, ``1w``, and return its seconds.

    Raises:
        typer.BadParameter: it is not a duration; the message has an example.
    """
    if span := _SPAN.fullmatch(text.strip()):
        return float(span[1]) * _UNITS_S[span[2]]
    raise typer.BadParameter(f"invalid duration {text!r}: use one such as 90s, 15m, 2h, 3d or 1w")


def parse_seconds(text: str) -> float:
    """Parse seconds, ``30`` or ``0.5``, or a duration such as ``15m``, and return its seconds.

    Raises:
        typer.BadParameter: it is neither; the message has examples.
    """
    if _SECONDS.fullmatch(text.strip()):
        return float(text)
    try:
        return parse_span(text)
    except typer.BadParameter:
        raise typer.BadParameter(
            f"invalid duration {text!r}: use seconds such as 30 or 0.5, or 90s, 15m, 2h, 3d or 1w"
        ) from None


def shown_time(wall: float) -> str:
    """Format seconds since 1970 as local time, with milliseconds and the zone's offset."""
    try:
        return datetime.fromtimestamp(wall).astimezone().isoformat(" ", "milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{wall:g} s since 1970"
