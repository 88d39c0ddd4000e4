"""Points in time and durations for people; durations read the same on the driver and in Spark.

Both forms of a duration take the same steps in whole numbers and IEEE arithmetic, so that they agree to the
letter: ``15 ms``, ``2.5 s``, ``3 min 20 s``, ``2 h 5 min``, ``12 d 4 h``.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

if TYPE_CHECKING:
    from pyspark.sql import Column

_SMALL: Final = ((0.9995e-3, 1e6, "µs"), (0.9995, 1e3, "ms"), (59.95, 1.0, "s"))
"""(upper bound in seconds, units per second, name) of units that are used alone."""
_DECIMALS: Final = ((9.995, 100.0), (99.95, 10.0), (math.inf, 1.0))
"""(upper bound, multiplier) pairs that round to three significant digits."""
_LARGE: Final = (
    (3_600, 60, "min", 1, "s"),
    (86_400, 3_600, "h", 60, "min"),
    (math.inf, 86_400, "d", 3_600, "h"),
)
"""(upper bound in seconds, seconds and name of each of two units) for durations in two units."""


def moment(wall: float, *, milliseconds: bool = True) -> str:
    """A wall time, in UTC: ``2026-03-01 12:00:00.250``; the number itself beyond the calendar's range."""
    try:
        time = datetime.fromtimestamp(wall, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{wall:g} s since 1970"
    return time.strftime("%Y-%m-%d %H:%M:%S") + (f".{time.microsecond // 1000:03}" if milliseconds else "")


def lasting(seconds: float) -> str:
    """A duration in the unit that suits it, with three significant digits or in two units."""
    if seconds < 0:
        return f"-{lasting(-seconds)}"
    if seconds == 0:
        return "0 s"
    for below, per_second, unit in _SMALL:
        if seconds < below:
            return f"{_rounded(seconds * per_second)} {unit}"
    whole = math.floor(seconds + 0.5)
    _, size, unit, finer, finer_unit = next(units for units in _LARGE if whole < units[0])
    rest = whole % size // finer
    return f"{whole // size} {unit}" + (f" {rest} {finer_unit}" if rest else "")


def _rounded(number: float) -> str:
    parts = next(parts for below, parts in _DECIMALS if number < below)
    return str(math.floor(number * parts + 0.5) / parts).removesuffix(".0")


def lasting_column(seconds: Column) -> Column:
    """``lasting`` of each row; null where ``seconds`` is."""
    positive = F.abs(seconds.cast("double"))
    whole = F.floor(positive + 0.5)
    words = F.lit("")
    for limit, size, unit, finer, finer_unit in reversed(_LARGE):
        rest = F.floor(F.pmod(whole, F.lit(size)) / finer)
        more = F.when(rest > 0, F.format_string(f" %d {finer_unit}", rest)).otherwise("")
        in_two = F.concat(F.format_string(f"%d {unit}", F.floor(whole / size)), more)
        words = F.when(whole < limit, in_two).otherwise(words)
    for below, per_second, unit in reversed(_SMALL):
        few = F.concat(_rounded_column(positive * per_second), F.lit(f" {unit}"))
        words = F.when(positive < below, few).otherwise(words)
    sign = F.when(seconds < 0, "-").otherwise("")
    return F.when(seconds.isNotNull(), F.when(positive == 0, "0 s").otherwise(F.concat(sign, words)))


def _rounded_column(number: Column) -> Column:
    words = F.lit("")
    for below, parts in reversed(_DECIMALS):
        rounded = F.regexp_replace((F.floor(number * parts + 0.5) / parts).cast("string"), r"\.0$", "")
        words = F.when(number < below, rounded).otherwise(words)
    return words
