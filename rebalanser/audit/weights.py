"""Weights of resources from the loads that host applications report (AU-7)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from rebalanser.audit.tables import LOADS
from rebalanser.history import HistoryStep

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import DataFrame, Row

    from rebalanser.audit.options import Options

LEAST_WEIGHT: Final = 0.1
MOST_WEIGHT: Final = 10.0
"""Maximum weight. Weights are bounded, so that no wrong sample empties a node for one resource."""
DECIMALS: Final = 1
"""Decimals of a weight: a smaller change than a tenth of a mean resource moves nothing."""

_FADED: Final = 1000.0
"""Half-lives after which samples count no less: 2 to the minus 1,075 is zero as a float."""
_RESOURCE: Final = ("protocol", "group", "resource")


def loads(records: DataFrame, options: Options) -> DataFrame:
    """``LOADS``: the smoothed load of each resource with samples, and the weight that follows from it.

    The load is the mean of the resource's samples, each of weight ``2 ** -(age / load_half_life_s)``; its age
    is counted by wall clocks from the newest sample of the group. The weight is the load relative to the mean
    load of the group's resources that have samples, between ``LEAST_WEIGHT`` and ``MOST_WEIGHT``, and 1 for
    all if nothing has any load. A resource without samples gets none. Duplicate records count once; a load
    below zero is ignored.
    """
    samples = (
        records.where(
            (f.col("step") == HistoryStep.LOAD) & (f.col("value") >= 0) & f.col("resource").isNotNull()
        )
        .groupBy(*_RESOURCE, "process", "sequence")
        .agg(f.max("value").alias("value"), f.max("wall_time").alias("wall_time"))
    )
    newest = samples.groupBy("protocol", "group").agg(f.max("wall_time").alias("newest"))
    age = (f.col("newest") - f.col("wall_time")) / options.load_half_life_s
    counts = f.pow(f.lit(2.0), -f.least(age, f.lit(_FADED)))
    smoothed = (
        samples.join(f.broadcast(newest), ["protocol", "group"])
        .withColumn("counts", counts)
        .groupBy(*_RESOURCE)
        .agg(
            f.count("*").alias("samples"),
            (f.sum(f.col("value") * f.col("counts")) / f.sum("counts")).alias("load"),
            f.max("wall_time").alias("last_wall"),
        )
    )
    means = smoothed.groupBy("protocol", "group").agg(f.avg("load").alias("mean"))
    relative = f.when(f.col("mean") > 0, f.col("load") / f.col("mean")).otherwise(1.0)
    bounded = f.greatest(f.lit(LEAST_WEIGHT), f.least(f.lit(MOST_WEIGHT), relative))
    return (
        smoothed.join(f.broadcast(means), ["protocol", "group"])
        .withColumn("weight", f.round(bounded, DECIMALS))
        .select(*LOADS.fieldNames())
    )


def changes(loads_rows: Iterable[Row], current: Mapping[str, float], min_change: float) -> dict[str, float]:
    """The weights to write, by resource: those of one group's ``LOADS`` that differ from ``current`` enough.

    ``current`` is the weight of every resource that exists; others are ignored. A weight changes if it
    differs by at least ``min_change``, so that small differences move nothing.
    """
    wanted = {row.resource: row.weight for row in loads_rows if row.resource in current}
    return {
        resource: weight
        for resource, weight in sorted(wanted.items())
        if weight != current[resource] and abs(weight - current[resource]) >= min_change - 1e-9
    }
