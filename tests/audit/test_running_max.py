"""Running maxima in two levels equal those of one window, and share a crowded series out (AU-10)."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from rebalanser.audit.running_max import BUCKET, bucketed, running_max

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.rule("AU-10")]

CROWDED = 50_000
MILLIONTH = 300_000


def series(spark: SparkSession, of_crowd: int, of_others: int) -> DataFrame:
    """One series of ``of_crowd`` rows and ten that share ``of_others``, some orders being of two."""
    rows = spark.range(of_crowd + of_others)
    return rows.select(
        F.when(F.col("id") < of_crowd, "crowd")
        .otherwise(F.concat(F.lit("s"), F.col("id") % 10))
        .alias("name"),
        F.pow(F.col("id") / 2, 1.5).cast("long").alias("order"),
        "id",
        F.when(F.rand(7) < 0.9, F.round(F.rand(8) * 1e6, 2)).alias("value"),
    )


def test_the_result_is_that_of_a_plain_window(spark: SparkSession) -> None:
    frame = series(spark, 4_000, 1_000).persist()
    keyed = F.when(F.col("value").isNotNull(), F.struct("value", "id"))
    cut = bucketed(frame, ["name"], "order", 300)
    assert BUCKET in cut.columns
    before = Window.partitionBy("name").orderBy("order", "id").rowsBetween(Window.unboundedPreceding, -1)
    plain = frame.select("id", F.max(keyed).over(before).alias("plain"))
    both = running_max(cut, ["name"], ["order", "id"], {"greatest": keyed}).join(plain, "id")
    differing = both.where(~F.col("greatest").eqNullSafe(F.col("plain")))
    assert both.count() == 5_000
    assert differing.count() == 0
    frame.unpersist()


def test_a_crowded_series_is_cut_and_no_window_holds_more_than_a_bucket(spark: SparkSession) -> None:
    cut = bucketed(series(spark, MILLIONTH, 1_000), ["name"], "order", CROWDED)
    rows = cut.groupBy("name", BUCKET).agg(F.count(F.lit(1)).alias("rows"), F.min("order"), F.max("order"))
    buckets = sorted(row for row in rows.collect() if row["name"] == "crowd")
    others = [row for row in rows.collect() if row["name"] != "crowd"]
    assert sum(row["rows"] for row in buckets) == MILLIONTH
    assert max(row["rows"] for row in buckets) <= CROWDED * 1.02
    assert len(buckets) < 2 * MILLIONTH / CROWDED
    assert all(row[BUCKET] is None and row["rows"] == 100 for row in others)
    ordered = sorted(buckets, key=lambda row: row[BUCKET])
    assert all(one["max(order)"] < next_one["min(order)"] for one, next_one in pairwise(ordered))


def test_no_exchange_of_the_windows_is_by_the_crowded_series_alone(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = bucketed(series(spark, 1_000, 100), ["name"], "order", 300)
    running_max(cut, ["name"], ["order", "id"], {"greatest": F.col("value")}).explain()
    plan = capsys.readouterr().out
    windows = [line for line in plan.splitlines() if "Window [" in line and "value" in line]
    assert windows
    assert all(f"{BUCKET}#" in line or "_before" in line for line in windows)


def test_without_a_crowd_there_is_one_window_and_no_join(spark: SparkSession) -> None:
    frame = series(spark, 200, 100)
    assert bucketed(frame, ["name"], "order", 300) is frame
    assert running_max(frame, ["name"], ["order", "id"], {"greatest": F.col("value")}).columns == [
        *frame.columns,
        "greatest",
    ]
