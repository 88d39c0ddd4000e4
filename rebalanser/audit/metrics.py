"""Metrics of groups: rebalances, unavailability, handlers, balance and leaders (AU-6).

Every duration that begins and ends in one process, or on one boot of one host, is measured on its monotonic
clock. Only a duration between two hosts is a difference of wall clocks, and never counts below zero. Nothing
here depends on the order of records, and duplicates change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import Window
from pyspark.sql import functions as f

from rebalanser.audit.running_max import bucketed, running_max
from rebalanser.audit.tables import BALANCE, HANDLERS, LEADERS, REBALANCES, UNAVAILABILITY
from rebalanser.history import HistoryStep, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import Column, DataFrame

    from rebalanser.audit.options import Options

BALANCE_POINTS: Final = 500
"""Maximum number of times at which a group's balance is taken."""
PERCENTILE_ACCURACY: Final = 10_000
"""Accuracy of ``percentile_approx``: a rank error of at most 1 in this many, none for fewer calls."""

_GROUP: Final = ("protocol", "group")
_RESOURCE: Final = (*_GROUP, "resource")
_NODE: Final = (*_GROUP, "process", "node")
_VERSION: Final = (*_GROUP, "version")


@dataclass(frozen=True, slots=True)
class Metrics:
    """The tables of ``rebalanser.audit.tables`` that measure, by name."""

    rebalances: DataFrame
    unavailability: DataFrame
    handlers: DataFrame
    balance: DataFrame
    leaders: DataFrame


def measure(
    records: DataFrame,
    accesses: DataFrame,
    processes: DataFrame,
    options: Options,
    controls: DataFrame | None = None,
) -> Metrics:
    """All metrics of a history, from ``options.since`` on (AU-6).

    ``records`` has the columns of a record with its ``step``, the others are ``ACCESSES`` and ``PROCESSES``.
    ``controls`` may be the kept ``control_records`` of the records.
    """
    of_leaders = records if controls is None else controls
    recent = accesses if options.since is None else accesses.where(f.col("end_wall") >= options.since)
    rebalanced, led = rebalances(records, of_leaders), leaders(of_leaders, processes)
    if options.since is not None:
        rebalanced = rebalanced.where(f.col("published_wall") >= options.since)
        led = led.where(f.col("to_wall") >= options.since)
    return Metrics(
        rebalances=rebalanced,
        unavailability=unavailability(recent, options.crowded),
        handlers=handlers(recent),
        balance=balance(recent, processes),
        leaders=led,
    )


def rebalances(records: DataFrame, controls: DataFrame | None = None) -> DataFrame:
    """``REBALANCES``: one row for each published allocation; ``controls`` is as of ``measure``.

    - ``plan_s``: from the leader's last reading of the group to publishing, on the leader's clock.
    - ``completed_wall``: the time when a leader first saw every node complete it; null if none did, as after
      a newer allocation took its place.
    - ``duration_s``: ``plan_s`` and the time from publishing to completion; null if there was none. On one
      clock if the same boot did both, else by wall clocks, as after a change of the leader.
    - ``stop_s``, ``barrier_s``, ``start_s``: those of the node that took longest for each (``phases``).

    Of two allocations with one version that of the later term counts.
    """
    of_leaders = _of_leaders(records if controls is None else controls)
    published = (
        of_leaders.where(f.col("step") == HistoryStep.PUBLISHED)
        .groupBy(*_VERSION)
        .agg(f.max_by("leads", f.struct("term", "wall_time")).alias("published"))
    )
    completed = (
        of_leaders.where(f.col("step") == HistoryStep.COMPLETED)
        .groupBy(*_VERSION)
        .agg(f.min_by("leads", f.struct("wall_time", "term")).alias("completed"))
    )
    slowest = (
        phases(records)
        .groupBy(*_VERSION)
        .agg(*(f.max(phase).alias(phase) for phase in ("stop_s", "barrier_s", "start_s")))
    )
    joined = published.join(completed, [*_VERSION], "left").join(slowest, [*_VERSION], "left")
    begun, done = f.col("published"), f.col("completed")
    plan_s = begun["monotonic"] - begun["read_monotonic"]
    return joined.select(
        *_VERSION,
        begun["term"].alias("term"),
        begun["label"].alias("leader"),
        begun["wall"].alias("published_wall"),
        done["wall"].alias("completed_wall"),
        (f.coalesce(plan_s, f.lit(0.0)) + _elapsed(begun, done)).alias("duration_s"),
        plan_s.alias("plan_s"),
        "stop_s",
        "barrier_s",
        "start_s",
        *(begun[count].alias(count) for count in ("moves", "least_moves", "nodes", "resources")),
    ).select(*REBALANCES.fieldNames())


def _of_leaders(records: DataFrame) -> DataFrame:
    """Leaders' readings, publications and completions: few records, each with the last reading before it."""
    before = Window.partitionBy(*_GROUP, "process", "incarnation").orderBy("sequence")
    read = f.when(f.col("step") == HistoryStep.GROUP_READ, f.col("monotonic_time"))
    told = f.coalesce(f.col("detail")["published_version"], f.col("detail")["completed_version"])
    version = f.coalesce(f.col("value"), told.try_cast("double"))
    counts = (
        f.col("detail")[name].try_cast("long").alias(name)
        for name in ("moves", "least_moves", "nodes", "resources")
    )
    return (
        records.where(
            f.col("step").isin(HistoryStep.GROUP_READ, HistoryStep.PUBLISHED, HistoryStep.COMPLETED)
        )
        .dropDuplicates(["process", "sequence"])
        .withColumn("read_monotonic", f.last(read, ignorenulls=True).over(before))
        .where(f.col("step") != HistoryStep.GROUP_READ)
        .select(
            *_GROUP,
            version.cast("long").alias("version"),
            "step",
            "term",
            "wall_time",
            f.struct(
                "term",
                "label",
                "process",
                "boot",
                f.col("wall_time").alias("wall"),
                f.col("monotonic_time").alias("monotonic"),
                "read_monotonic",
                *counts,
            ).alias("leads"),
        )
    )


def _elapsed(begun: Column, done: Column) -> Column:
    """Seconds between two records, on one clock if they share one; null if either is missing."""
    one_clock = (begun["process"] == done["process"]) | (begun["boot"] == done["boot"])
    return f.when(one_clock, done["monotonic"] - begun["monotonic"]).when(
        done["wall"].isNotNull(), f.greatest(f.lit(0.0), done["wall"] - begun["wall"])
    )


def phases(records: DataFrame) -> DataFrame:
    """Durations of each allocation's phases on each node that adopted it, on the node's own clock.

    The order of the steps (RB-11) delimits the phases by first and last steps, so that one pass over the
    records is enough: ``stop_s`` is from the first OnStop entered to the first barrier removed (to the first
    OnStop returned in protocols without barriers), ``barrier_s`` from there, or from the adoption if nothing
    stopped, to the last barrier added, and ``start_s`` from the first OnStart entered to the last one
    returned. Steps after the node acknowledged its share are no part of the rebalance: a stop because of
    isolation hours later is left out. If the node never acknowledged, ``start_s`` is until the first OnStart
    returned. A phase that did not take place is null.
    """

    def at(extreme: Callable[[Column], Column], step: HistoryStep) -> Column:
        return extreme(f.when(f.col("step") == step, f.col("monotonic_time")))

    firsts = {
        "adopted": HistoryStep.ADOPTED,
        "acknowledged": HistoryStep.ACKNOWLEDGED,
        "stopping": HistoryStep.STOP_ENTERED,
        "stopped": HistoryStep.STOP_RETURNED,
        "removed": HistoryStep.BARRIER_REMOVED,
        "starting": HistoryStep.START_ENTERED,
        "started": HistoryStep.START_RETURNED,
    }
    lasts = {"added_last": HistoryStep.BARRIER_ADDED, "started_last": HistoryStep.START_RETURNED}
    steps = (
        records.where(f.col("step").isin(*firsts.values(), *lasts.values()) & (f.col("version") > 0))
        .groupBy(*_VERSION, "process", "incarnation")
        .agg(
            *(at(f.min, step).alias(name) for name, step in firsts.items()),
            *(at(f.max, step).alias(name) for name, step in lasts.items()),
        )
    )

    def within(time: Column) -> Column:
        return f.when(time <= f.coalesce(f.col("acknowledged"), time), time)

    stopping, starting = within(f.col("stopping")), within(f.col("starting"))
    stop_end = f.when(stopping.isNotNull(), within(f.coalesce("removed", "stopped")))
    start_end = f.when(f.col("acknowledged").isNull(), f.col("started")).otherwise(
        f.least("started_last", "acknowledged")
    )
    return steps.select(
        *_VERSION,
        "process",
        "incarnation",
        _forwards(stopping, stop_end).alias("stop_s"),
        _forwards(
            f.coalesce(stop_end, "adopted"),
            f.when(f.col("added_last").isNotNull(), f.least("added_last", "acknowledged")),
        ).alias("barrier_s"),
        _forwards(starting, start_end).alias("start_s"),
    )


def _forwards(begin: Column, end: Column) -> Column:
    """Seconds from begin to end; null if the end is missing or came first."""
    return f.when(end >= begin, end - begin)


def unavailability(accesses: DataFrame, crowded: int | None) -> DataFrame:
    """``UNAVAILABILITY``: seconds that each resource was unowned between its first and its last owner.

    In the order of their tokens, a resource is unowned from the latest end of all accesses before until the
    next one begins. That is taken on one clock if both owners ran on one boot, else by wall clocks. Accesses
    that overlap, even if only by the clocks of two hosts, give no unowned time. Beyond ``crowded`` accesses,
    those of one resource are spread over several tasks.
    """
    spans = accesses.where(f.col("start_entered_wall").isNotNull() & f.col("end_wall").isNotNull()).select(
        *_RESOURCE,
        "token",
        "boot",
        f.col("start_entered_wall").alias("start"),
        f.col("start_entered_monotonic").alias("start_monotonic"),
        f.struct("end_wall", "boot", "end_monotonic").alias("end"),
    )
    series = bucketed(spans, _RESOURCE, "token", crowded)
    following = running_max(series, _RESOURCE, ("token", "start"), {"latest": f.col("end")})
    one_clock = f.coalesce(f.col("boot") == f.col("latest.boot"), f.lit(False))
    unowned = f.when(one_clock, f.col("start_monotonic") - f.col("latest.end_monotonic")).otherwise(
        f.col("start") - f.col("latest.end_wall")
    )
    gap_s = f.when(f.col("latest").isNotNull(), f.greatest(f.lit(0.0), unowned)).otherwise(0.0)
    return (
        following.withColumn("gap_s", gap_s)
        .groupBy(*_RESOURCE)
        .agg(
            f.count("*").alias("accesses"),
            f.sum("gap_s").alias("unowned_s"),
            f.max("gap_s").alias("longest_s"),
            f.max_by(f.when(f.col("gap_s") > 0, f.col("latest.end_wall")), "gap_s").alias("longest_from"),
            f.min("start").alias("first_wall"),
            f.max("end.end_wall").alias("last_wall"),
        )
        .select(*UNAVAILABILITY.fieldNames())
    )


def handlers(accesses: DataFrame) -> DataFrame:
    """``HANDLERS``: durations of OnStart and OnStop for one resource, by node label and handler.

    From entered to returned on the node's monotonic clock. A call whose entering or return was not recorded
    does not count. ``max_s`` is exact, the percentiles are those of ``percentile_approx``
    (``PERCENTILE_ACCURACY``).
    """

    def call(handler: str, step: str) -> Column:
        took = f.col(f"{step}_returned_monotonic") - f.col(f"{step}_entered_monotonic")
        return f.struct(f.lit(handler).alias("handler"), took.alias("took_s"))

    calls = accesses.select(
        *_GROUP, "label", f.inline(f.array(call("on_start", "start"), call("on_stop", "stop")))
    ).where(f.col("took_s") >= 0)
    took = f.col("took_s")
    return (
        calls.groupBy(*_GROUP, "label", "handler")
        .agg(
            f.count("*").alias("calls"),
            f.percentile_approx(took, 0.5, PERCENTILE_ACCURACY).alias("p50_s"),
            f.percentile_approx(took, 0.99, PERCENTILE_ACCURACY).alias("p99_s"),
            f.max(took).alias("max_s"),
        )
        .select(*HANDLERS.fieldNames())
    )


def balance(accesses: DataFrame, processes: DataFrame) -> DataFrame:
    """``BALANCE``: numbers of resources that the nodes owned, at ``BALANCE_POINTS`` times of each group.

    The times lie evenly between the group's first OnStart and the last end of an access, by wall clocks. A
    node counts from its first to its last record, also while it owns nothing; in Shiva, where leaders write
    history too and never own anything, only if it ever owned something. Each access is one step up and one
    down: steps are summed by time before they are joined with the times at which they count.
    """
    spans = accesses.where(f.col("start_entered_wall").isNotNull() & f.col("end_wall").isNotNull())
    extents = spans.groupBy(*_GROUP).agg(
        f.min("start_entered_wall").alias("from"), f.max("end_wall").alias("to")
    )
    owners = spans.select(*_NODE).distinct()
    of_shiva = f.col("protocol") == Protocol.SHIVA
    nodes = processes.where(~of_shiva).unionByName(
        processes.where(of_shiva).join(owners, [*_NODE], "left_semi")
    )

    point = f.col("point")
    events = spans.select(
        *_NODE,
        f.inline(
            f.array(
                f.struct(f.col("start_entered_wall").alias("at"), f.lit(1).alias("step")),
                f.struct(f.col("end_wall").alias("at"), f.lit(-1).alias("step")),
            )
        ),
        f.lit(None).cast("double").alias("gone"),
    ).unionByName(
        nodes.select(
            *_NODE, f.col("first_wall").alias("at"), f.lit(0).alias("step"), f.col("last_wall").alias("gone")
        )
    )
    width = (f.col("to") - f.col("from")) / BALANCE_POINTS

    def first_point(time: Column) -> Column:
        reached = f.ceil((time - f.col("from")) / width - 0.5)
        return f.greatest(f.lit(0), f.least(f.lit(BALANCE_POINTS), reached)).cast("int")

    stepped = (
        events.join(f.broadcast(extents.where(f.col("to") > f.col("from"))), [*_GROUP])
        .select(
            *_NODE, first_point(f.col("at")).alias("point"), "step", first_point(f.col("gone")).alias("gone")
        )
        .groupBy(*_NODE, "point")
        .agg(f.sum("step").alias("step"), f.max("gone").alias("gone"))
    )
    of_node = Window.partitionBy(*_NODE)
    until = f.least(
        f.lead(point).over(of_node.orderBy("point")), f.max("gone").over(of_node), f.lit(BALANCE_POINTS)
    )
    held = (
        stepped.select(
            *_NODE, point, f.sum("step").over(of_node.orderBy("point")).alias("owned"), until.alias("until")
        )
        .where(f.col("until") > point)
        .select(*_GROUP, f.explode(f.sequence(point, f.col("until") - 1)).alias("point"), "owned")
    )
    counted = held.groupBy(*_GROUP, "point").agg(
        f.count("*").alias("nodes"),
        f.sum("owned").alias("owned"),
        f.min("owned").alias("least"),
        f.max("owned").alias("most"),
    )
    return (
        counted.join(f.broadcast(extents), [*_GROUP])
        .withColumn("at_wall", f.col("from") + (point + 0.5) * width)
        .select(*BALANCE.fieldNames())
    )


def leaders(records: DataFrame, processes: DataFrame) -> DataFrame:
    """``LEADERS``: one row for each node that reported leading a term, by wall clocks.

    The row ends when a later term began or with the node's last record, whichever is first. Two rows of one
    term are two leaders, which the invariants judge.
    """
    elected = (
        records.where(f.col("step") == HistoryStep.ELECTED)
        .groupBy(*_NODE, "term")
        .agg(f.min("wall_time").alias("from_wall"), f.min("label").alias("label"))
    )
    terms = elected.groupBy(*_GROUP, "term").agg(f.min("from_wall").alias("begins"))
    later = Window.partitionBy(*_GROUP).orderBy("term")
    following = terms.select(*_GROUP, "term", f.lead("begins").over(later).alias("next_begins"))
    last = processes.select(*_NODE, "last_wall")
    return (
        elected.join(following, [*_GROUP, "term"])
        .join(last, [*_NODE], "left")
        .withColumn(
            "to_wall", f.greatest("from_wall", f.coalesce(f.least("next_begins", "last_wall"), "from_wall"))
        )
        .select(*LEADERS.fieldNames())
    )
