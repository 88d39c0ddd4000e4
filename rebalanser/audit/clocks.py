"""Least differences between the clocks of two hosts, proven by cause and effect (AU-5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from rebalanser.audit.owner_pairs import contradicts_cause, has_barriers
from rebalanser.audit.tables import CLOCKS
from rebalanser.history import HistoryStep

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from rebalanser.audit.options import Options

ALLOCATION: Final = "adopted an allocation before it was published"
BARRIER: Final = "added a barrier before its last holder had stopped"

_PROVEN: Final = "proven_errors"
_LEADING: Final = ("protocol", "group", "process")


def clocks(records: DataFrame, suspects: DataFrame, options: Options) -> DataFrame:
    """The table ``CLOCKS``: pairs of hosts whose wall clocks contradict cause and effect.

    Only contradictions beyond ``clock_error_s`` count, and of one pair and cause the greatest one.
    ``suspects`` are those of ``owner_pairs.suspects``.
    """
    seen = _allocations(records).unionByName(_barriers(suspects, options))
    apart = seen.where((F.col("behind_s") > options.clock_error_s) & (F.col("host") != F.col("behind_host")))
    pairs = apart.groupBy("group", "host", "behind_host", "cause").agg(
        F.max_by("seen_wall", "behind_s").alias("seen_wall"), F.max("behind_s").alias("behind_s")
    )
    return pairs.select(*CLOCKS.fieldNames())


def host_errors(clocks: DataFrame) -> DataFrame:
    """The error in seconds that is proven of each host of a group: ``group, host, error_s``.

    Of two hosts that differ, the wrong one is that which differs from more others in the same direction; if
    that does not decide, both are.
    """
    apart = clocks.groupBy("group", "host", "behind_host").agg(F.max("behind_s").alias("apart_s"))
    counted = apart.select(
        "*",
        F.count(F.lit(1)).over(Window.partitionBy("group", "host")).alias("behind"),
        F.count(F.lit(1)).over(Window.partitionBy("group", "behind_host")).alias("ahead"),
    )
    wrong = F.array(
        F.when(F.col("behind") >= F.col("ahead"), F.col("host")),
        F.when(F.col("ahead") >= F.col("behind"), F.col("behind_host")),
    )
    return (
        counted.select("group", F.explode(F.array_compact(wrong)).alias("host"), "apart_s")
        .groupBy("group", "host")
        .agg(F.max("apart_s").alias("error_s"))
    )


def with_uncertainty(
    pairs: DataFrame, errors: DataFrame | None, one: str, other: str, options: Options
) -> DataFrame:
    """``pairs`` with ``uncertainty_s``, the possible seconds between the two owners' wall clocks (AU-5).

    ``one`` and ``other`` are columns with the struct of an access each; ``errors`` are the ``host_errors``,
    None for none. The uncertainty is the stated clock error and the proven errors of both hosts.
    """
    stated_s = F.lit(options.clock_error_s)
    if errors is None:
        return pairs.withColumn("uncertainty_s", stated_s)
    entry = F.struct(F.struct("group", "host"), "error_s")
    proven = errors.agg(F.map_from_entries(F.collect_list(entry)).alias(_PROVEN))

    def off_s(owner: str) -> Column:
        key = F.struct("group", clock_of(F.col(owner)).alias("host"))
        return F.coalesce(F.try_element_at(_PROVEN, key), F.lit(0.0))

    uncertainty_s = stated_s + off_s(one) + off_s(other)
    return pairs.crossJoin(F.broadcast(proven)).withColumn("uncertainty_s", uncertainty_s).drop(_PROVEN)


def clock_of(who: Column) -> Column:
    """The name of a wall clock: the host, else the process."""
    return F.coalesce(who["host"], who["process"])


def _allocations(records: DataFrame) -> DataFrame:
    """Adoptions of an allocation that, by the clocks, precede its leader's reading of the group.

    A leader may record late what it published; it had read the group before it published. If no such reading
    is recorded, the time of publishing is used.
    """
    host = F.coalesce("host", "process").alias("host")
    leading = records.where(F.col("step").isin(HistoryStep.GROUP_READ, HistoryStep.PUBLISHED)).select(
        *_LEADING, "sequence", "step", "wall_time", host, _published_version().alias("made")
    )
    before = Window.partitionBy(*_LEADING).orderBy("sequence").rowsBetween(Window.unboundedPreceding, -1)
    read = F.when(F.col("step") == HistoryStep.GROUP_READ, F.col("wall_time"))
    published = (
        leading.withColumn("read", F.last(read, ignorenulls=True).over(before))
        .where(F.col("step") == HistoryStep.PUBLISHED)
        .groupBy("protocol", "group", "made", F.col("host").alias("behind_host"))
        .agg(F.min(F.coalesce("read", "wall_time")).alias("cause_wall"))
    )
    adopted = records.where(F.col("step") == HistoryStep.ADOPTED).select(
        "protocol", "group", F.col("version").alias("made"), host, F.col("wall_time").alias("seen_wall")
    )
    return adopted.join(published, ["protocol", "group", "made"]).select(
        "group",
        "host",
        "behind_host",
        (F.col("cause_wall") - F.col("seen_wall")).alias("behind_s"),
        "seen_wall",
        F.lit(ALLOCATION).alias("cause"),
    )


def _published_version() -> Column:
    """The version that a record publishes; its leader has not adopted it, so the record's own is older."""
    value = F.col("value").cast("long")
    return F.when(has_barriers(F.col("protocol")), value).otherwise(F.coalesce(value, "version"))


def _barriers(suspects: DataFrame, options: Options) -> DataFrame:
    """Barriers that were added, by the clocks, before their last holder had stopped."""
    owner, previous = F.col("owner"), F.col("previous.owner")
    return suspects.where(contradicts_cause(options)).select(
        "group",
        clock_of(owner).alias("host"),
        clock_of(previous).alias("behind_host"),
        (previous["stop_returned_wall"] - owner["barrier_added_wall"]).alias("behind_s"),
        owner["barrier_added_wall"].alias("seen_wall"),
        F.lit(BARRIER).alias("cause"),
    )
