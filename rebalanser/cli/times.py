"""Times and durations on the command line."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Final

import typer

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
