"""Resource names from the command line and from files; all are checked before any is used."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import typer

from rebalanser.errors import InvalidName
from rebalanser.registry.keys import check_attribute, check_name

STANDARD_INPUT = Path("-")


def read_names(given: Sequence[str], file: Path | None) -> list[str]:
    """Return the given names, and those of the file, one per line; ``-`` is standard input.

    Raises:
        InvalidName: a name can't be stored or is given twice; the message says which and where.
    """
    if not given and file is None:
        raise typer.BadParameter("no resource is named; give names, or a file with --file")
    places: dict[str, str] = {}
    for place, name in _placed(given, file):
        _check(name, place)
        if name in places:
            raise InvalidName(
                f"{place}: {name!r} is given twice, first as {places[name]}; nothing was changed"
            )
        places[name] = place
    return list(places)


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
