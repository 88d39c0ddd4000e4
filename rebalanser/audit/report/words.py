"""Text forms of numbers, times and names."""

from __future__ import annotations

import math
import re
from typing import Final

from rebalanser.audit import formatting as times
from rebalanser.audit.tables import FindingKind

NONE: Final = "\u2013"
"""Placeholder for a missing value."""

KIND_NAMES: Final[dict[str, str]] = {
    FindingKind.OVERLAP: "Two owners at once",
    FindingKind.BARRIER_OVERLAP: "Two barriers at once",
    FindingKind.CLAIM_TWICE: "Two workers with one claim",
    FindingKind.STALE_WRITE: "Write of a superseded claim accepted",
    FindingKind.TWO_LEADERS: "Two leaders of one term",
    FindingKind.TOKEN_ORDER: "Fencing token did not grow",
    FindingKind.START_WITHOUT_BARRIER: "OnStart without the barrier",
    FindingKind.STEP_ORDER: "Steps in the wrong order",
    FindingKind.UPDATE_GAP: "Updates of a claim missing",
    FindingKind.CONFLICT: "Two records with one number",
    FindingKind.UNOWNED: "Unowned for too long",
}
"""Titles of the kinds of findings, worst first."""

_PARTS: Final = re.compile(r"(\d+)")


def number(value: float | None) -> str:
    """A count with a space between thousands: ``12 345``."""
    return NONE if value is None else f"{value:,.0f}".replace(",", "\u202f")


def real(value: float | None) -> str:
    """A number to three significant digits."""
    return NONE if value is None else f"{value:.3g}"


def percent(part: float, whole: float) -> str:
    """A percentage, never rounded to 0 % or 100 %."""
    if whole <= 0:
        return NONE
    share = 100 * part / whole
    if 0 < share < 0.1:
        return "under 0.1 %"
    if 99.9 < share < 100:
        return "over 99.9 %"
    return f"{share:.3g} %"


def duration(seconds: float | None) -> str:
    """A duration in suitable units: ``1.25 ms``, ``3.4 s``, ``2 h 5 min``."""
    return NONE if seconds is None or not math.isfinite(seconds) else times.lasting(seconds)


def moment(wall: float | None, *, milliseconds: bool = True) -> str:
    """A wall time in UTC: ``2026-03-01 12:00:00.250``."""
    return NONE if wall is None or not math.isfinite(wall) else times.moment(wall, milliseconds=milliseconds)


def period(begins: float | None, ends: float | None) -> str:
    """Begin and end of a period; the end's date only if it differs."""
    first, last = moment(begins), moment(ends)
    if begins is None or ends is None or first == last:
        return first if begins is not None else last
    day, _, time = last.partition(" ")
    return f"{first} to {time if first.startswith(day) and time else last}"


def elided(name: str, limit: int) -> str:
    """A name shortened in the middle to at most ``limit`` characters."""
    if len(name) <= limit:
        return name
    head = (limit - 1) * 2 // 3
    return f"{name[:head]}…{name[len(name) - (limit - 1 - head) :]}"


def plural(count: int, one: str, many: str | None = None) -> str:
    """``1 finding``, ``12 findings``."""
    return f"{number(count)} {one if count == 1 else many or one + 's'}"


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts ``shard-9`` before ``shard-10``."""
    parts = _PARTS.split(name)
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part)
