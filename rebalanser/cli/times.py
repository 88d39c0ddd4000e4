"""Points in time, and spans of it, as people write them on the command line."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Final

import typer

_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d|w)")
_AGO: Final = re.compile(rf"{_SPAN.pattern}(?: ago)?")
_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


def parse_time(text: str) -> float:
    """Seconds since 1970 for a time in ISO 8601, local where it names no zone, or for so long ago.

    ``2026-11-22T00:30``, ``2026-11-22 00:30:15.5+01:00``, ``2026-11-22``; ``90s``, ``15m``, ``2h``, ``3d``,
    ``1w``.

    Raises:
        typer.BadParameter: it is neither; the message says what would be.
    """
    if ago := _AGO.fullmatch(text.strip()):
        return time.time() - float(ago[1]) * _UNITS_S[ago[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise typer.BadParameter(
            f"{text!r} is no time; write one such as 2026-11-22T00:30 or 2026-11-22T00:30+01:00, or how long "
            f"ago, such as 15m or 2h"
        ) from None


def parse_span(text: str) -> float:
    """Seconds of a span of time: ``90s``, ``15m``, ``2h``, ``3d``, ``1w``.

    Raises:
        typer.BadParameter: it is none; the message says what would be.
    """
    if span := _SPAN.fullmatch(text.strip()):
        return float(span[1]) * _UNITS_S[span[2]]
    raise typer.BadParameter(f"{text!r} is no span of time; write one such as 90s, 15m, 2h, 3d or 1w")


def shown_time(wall: float) -> str:
    """A time, in seconds since 1970, as people read it: local, in milliseconds, with its zone's offset."""
    try:
        return datetime.fromtimestamp(wall).astimezone().isoformat(" ", "milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{wall:g} s since 1970"
