"""Running maxima along the accesses of each resource, even if one resource has a million of them.

A window keeps all rows of its partition in one task. So a crowded series is cut into buckets of its order,
each a window partition of its own; the buckets before it add one more maximum, of as many rows as there are
buckets. Series that are not crowded have no bucket and need no more than the window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import Column, DataFrame

BUCKET: Final = "bucket"
MOST_BUCKETS: Final = 256
"""Maximum buckets of a series; if that is not enough they are larger than ``crowded``."""

_COUNT: Final = "rows_of_series"
_BOUNDS: Final = "bounds"
_BEFORE: Final = (Window.unboundedPreceding, Window.currentRow - 1)
_GRID: Final = [part / MOST_BUCKETS for part in range(1, MOST_BUCKETS)]


def bucketed(frame: DataFrame, series: Sequence[str], order: str, crowded: int | None) -> DataFrame:
    """``frame`` with the column ``BUCKET`` if a series of it has more than ``crowded`` rows, else itself.

    Without ``crowded`` the result is always ``frame`` itself.

    Along the whole number ``order`` the bucket of a crowded series grows; each holds about ``crowded`` rows
    at most, and rows of equal ``order`` are in one. The bucket of other series is null. Counting takes a job,
    at once, so ``frame`` should be persisted or cheap to make. The columns of ``series`` are never null.
    """
    if crowded is None:
        return frame
    crowds = frame.groupBy(*series).agg(F.count(F.lit(1)).alias(_COUNT)).where(F.col(_COUNT) > crowded)
    if crowds.isEmpty():
        return frame
    step = F.greatest(F.lit(1), F.floor(F.lit(MOST_BUCKETS * crowded) / F.col(_COUNT))).cast("int")
    bounds = (
        frame.select(*series, order)
        .join(F.broadcast(crowds), list(series))
        .groupBy(*series, _COUNT)
        .agg(F.percentile_approx(order, _GRID).alias(_BOUNDS))
        .select(
            *series,
            F.filter(_BOUNDS, lambda _bound, index: (index + 1) % step == 0).alias(_BOUNDS),
        )
    )
    passed = F.size(F.filter(_BOUNDS, lambda bound: bound < F.col(order)))
    return (
        frame.join(F.broadcast(bounds), list(series), "left")
        .withColumn(BUCKET, F.when(F.col(_BOUNDS).isNotNull(), passed))
        .drop(_BOUNDS)
    )


def spread(frame: DataFrame, series: Sequence[str]) -> DataFrame:
    """``frame`` exchanged once for all later windows by ``series``, or by ``series`` and more columns."""
    return frame.repartition(*_keys(frame, series))


def running_max(
    frame: DataFrame, series: Sequence[str], order: Sequence[str], maxima: Mapping[str, Column]
) -> DataFrame:
    """``frame`` with, for each of ``maxima``, the greatest value of the rows of the series *before* this one.

    ``frame`` has been ``bucketed`` along the first of ``order``, by ``series`` or a part of it. Rows
    without a value do not count; a row with none before it gets null.
    """
    keys = _keys(frame, series)
    within = Window.partitionBy(*keys).orderBy(*order).rowsBetween(*_BEFORE)
    local = frame.select("*", *(F.max(value).over(within).alias(name) for name, value in maxima.items()))
    if BUCKET not in keys:
        return local
    joined = local.join(F.broadcast(_before_buckets(frame, series, maxima)), keys, "left")
    return joined.select(*frame.columns, *(F.greatest(name, _of(name)).alias(name) for name in maxima))


def _before_buckets(frame: DataFrame, series: Sequence[str], maxima: Mapping[str, Column]) -> DataFrame:
    """The maxima of all buckets before it, for each bucket of each crowded series."""
    totals = (
        frame.where(F.col(BUCKET).isNotNull())
        .groupBy(*series, BUCKET)
        .agg(*(F.max(value).alias(_of(name)) for name, value in maxima.items()))
    )
    before = Window.partitionBy(*series).orderBy(BUCKET).rowsBetween(*_BEFORE)
    return totals.select(
        *series, BUCKET, *(F.max(_of(name)).over(before).alias(_of(name)) for name in maxima)
    )


def _keys(frame: DataFrame, series: Sequence[str]) -> list[str]:
    return [*series, BUCKET] if BUCKET in frame.columns else [*series]


def _of(name: str) -> str:
    return f"{name}_before"
