"""Weights that follow from reported loads (AU-7)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import Row
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, StructType

from rebalanser.audit.options import Options
from rebalanser.audit.tables import LOADS
from rebalanser.audit.weights import LEAST_WEIGHT, MOST_WEIGHT, changes, loads
from rebalanser.history import HistoryStep

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.rule("AU-7")]

_SCHEMA = "sequence long, resource string, value double, wall_time double"


def _samples(spark: SparkSession, *samples: tuple[str, float, float], group: str = "orders") -> DataFrame:
    """Records of (resource, load, wall time)."""
    rows = [
        {"sequence": number, "resource": resource, "value": load, "wall_time": wall}
        for number, (resource, load, wall) in enumerate(samples)
    ]
    records = f.from_json(f.lit(json.dumps(rows)), ArrayType(StructType.fromDDL(_SCHEMA)))
    return spark.range(1).select(
        f.lit("group").alias("protocol"),
        f.lit(group).alias("group"),
        f.lit(f"p of {group}").alias("process"),
        f.lit(HistoryStep.LOAD.value).alias("step"),
        f.inline(records),
    )


def _by_resource(rows: DataFrame) -> dict[str, Row]:
    return {row.resource: row for row in rows.collect()}


def test_a_sample_counts_half_after_the_half_life(spark: SparkSession) -> None:
    records = _samples(spark, ("r", 10.0, 0.0), ("r", 40.0, 100.0), ("other", 15.0, 200.0))
    found = loads(records, Options(load_half_life_s=100.0))
    assert found.schema.names == LOADS.names
    rows = _by_resource(found)
    assert rows["r"].load == pytest.approx((10.0 * 0.25 + 40.0 * 0.5) / 0.75)
    assert (rows["r"].samples, rows["r"].last_wall) == (2, 100.0)
    assert rows["r"].weight == 1.3
    assert rows["other"].weight == 0.7


@pytest.mark.rule("AU-2")
def test_duplicates_and_order_change_no_load(spark: SparkSession) -> None:
    records = _samples(spark, ("r", 10.0, 0.0), ("r", 40.0, 100.0), ("s", 1.0, 5.0))
    again = records.unionByName(records).orderBy("value", ascending=False)
    assert _by_resource(loads(again, Options())) == _by_resource(loads(records, Options()))


def test_weights_are_bounded_and_groups_are_apart(spark: SparkSession) -> None:
    light = [(f"light {number}", 1.0, 0.0) for number in range(30)]
    records = _samples(spark, ("heavy", 1e9, 0.0), *light).unionByName(
        _samples(spark, ("heavy", 3.0, 0.0), ("light 1", 1.0, 0.0), group="payments")
    )
    rows = {(row.group, row.resource): row.weight for row in loads(records, Options()).collect()}
    assert rows["orders", "heavy"] == MOST_WEIGHT
    assert rows["orders", "light 1"] == LEAST_WEIGHT
    assert rows["payments", "heavy"] == 1.5
    assert rows["payments", "light 1"] == 0.5


def test_loads_of_nothing_and_of_long_ago_give_weights_too(spark: SparkSession) -> None:
    idle = loads(_samples(spark, ("a", 0.0, 0.0), ("b", 0.0, 0.0)), Options())
    assert {row.weight for row in idle.collect()} == {1.0}
    old = loads(_samples(spark, ("a", 2.0, 0.0), ("b", 6.0, 1e9)), Options(load_half_life_s=1.0))
    assert {row.resource: row.weight for row in old.collect()} == {"a": 0.5, "b": 1.5}


def test_a_load_that_is_none_and_a_resource_without_samples_give_no_weight(spark: SparkSession) -> None:
    records = _samples(spark, ("below zero", -1.0, 0.0), ("r", 1.0, 0.0))
    other = records.selectExpr("* except (step)", "'start_entered' as step").replace(
        "r", "no samples", ["resource"]
    )
    assert _by_resource(loads(records.unionByName(other), Options())).keys() == {"r"}


def test_only_weights_that_change_enough_are_written() -> None:
    rows = [
        Row(resource="same", weight=1.0),
        Row(resource="hardly", weight=1.1),
        Row(resource="just enough", weight=1.3),
        Row(resource="much", weight=4.0),
        Row(resource="gone", weight=9.0),
    ]
    current = {"same": 1.0, "hardly": 1.0, "just enough": 1.0, "much": 0.5, "without samples": 1.0}
    assert changes(rows, current, 0.3) == {"just enough": 1.3, "much": 4.0}
    assert changes(rows, current, 0.0) == {"hardly": 1.1, "just enough": 1.3, "much": 4.0}
    assert changes([], current, 0.0) == {}
