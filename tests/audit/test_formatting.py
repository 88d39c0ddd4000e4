"""Times and durations as people read them, the same wherever they were worded."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from rebalanser.audit.formatting import lasting, lasting_column, moment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EDGES = (0.9995e-6, 0.9995e-3, 0.9995, 1.0, 9.995, 59.95, 60.0, 3_599.5, 3_600.0, 86_399.5, 86_400.0)
DAY_S = 86_400


@pytest.mark.rule("AU-4", "AU-8")
@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (0.0000123, "12.3 µs"),
        (0.0012, "1.2 ms"),
        (0.0125, "12.5 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (-0.0125, "-12.5 ms"),
        (3.456, "3.46 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (119.7, "2 min"),
        (200.0, "3 min 20 s"),
        (3_599.6, "1 h"),
        (7_500.0, "2 h 5 min"),
        (DAY_S * 12 + 4.5 * 3_600, "12 d 4 h"),
    ],
)
def test_a_duration_is_told_in_the_unit_that_suits_it(seconds: float, words: str) -> None:
    assert lasting(seconds) == words


@pytest.mark.rule("AU-4", "AU-8")
def test_spark_words_it_to_the_letter_as_python_does(spark: SparkSession) -> None:
    chance = random.Random(0)
    near = [edge + off for edge in EDGES for off in (-1e-3, -1e-7, 0.0, 1e-7, 1e-3, 0.5)]
    halves = [number / 2_000 for number in range(1, 400)]
    anything = [10 ** chance.uniform(-7, 8) for _ in range(3_000)]
    seconds = [0.0, *near, *halves, *anything]
    rows = spark.createDataFrame([(each,) for each in [*seconds, *(-each for each in near)]], "s double")
    worded = rows.select("s", lasting_column(F.col("s")).alias("words")).collect()
    assert len(worded) == len(seconds) + len(near)
    assert {row["s"]: row["words"] for row in worded} == {row["s"]: lasting(row["s"]) for row in worded}


def test_a_point_in_time_is_told_in_utc_and_as_a_number_where_no_calendar_has_it() -> None:
    assert moment(1_772_366_400.25) == "2026-03-01 12:00:00.250"
    assert moment(1_772_366_400.25, milliseconds=False) == "2026-03-01 12:00:00"
    assert moment(1e300) == "1e+300 s since 1970"


def test_what_is_not_known_is_null(spark: SparkSession) -> None:
    row = spark.range(1).select(lasting_column(F.lit(None).cast("double")).alias("words")).first()
    assert row is not None
    assert row["words"] is None
