"""Reduces tables of any size to the bounded numbers of a report (AU-10): Spark aggregates, sorts, limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from rebalanser.audit.metrics import BALANCE_POINTS
from rebalanser.audit.report.content import (
    Balance,
    Bar,
    Facts,
    Findings,
    Heat,
    Leaders,
    Loads,
    Rebalances,
    ReportContent,
    Spread,
    Summary,
    Timeline,
    Unavailability,
    UnreadSummary,
)
from rebalanser.audit.report.words import KIND_NAMES, duration, natural, number
from rebalanser.audit.tables import EndedBy
from rebalanser.audit.verdict import HARMLESS, ROTATED, severity
from rebalanser.audit.weights import DECIMALS, MOST_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql import Column, DataFrame

    from rebalanser.audit.options import ReportLimits
    from rebalanser.audit.tables import Tables

HEAT_LEVELS: Final = (
    (1 - 1e-9, "always"),
    (0.99, "99 % or more"),
    (0.9, "90 to 99 %"),
    (0.5, "50 to 90 %"),
    (0.0, "under 50 %"),
)
"""(minimum share, text) levels of the share of a period that a resource was owned."""
NEVER: Final = "never"

_ACCURACY: Final = 10_000
_GROUP: Final = ("protocol", "group")
_RESOURCE: Final = (*_GROUP, "resource")
_PHASES: Final = {
    "duration_s": "whole rebalance",
    "plan_s": "plan",
    "stop_s": "stop",
    "barrier_s": "barriers",
    "start_s": "start",
}


def gather(tables: Tables, verdict: str, limits: ReportLimits) -> ReportContent:
    """Collect the content of the report, each part bounded by ``limits``."""
    findings = _findings(tables.findings, limits)
    unavailable = _unavailability(tables.unavailability, limits)
    spans = tables.accesses.where(
        f.col("start_entered_wall").isNotNull() & (f.col("end_wall") >= f.col("start_entered_wall"))
    )
    shown = _rows_of_timeline(findings, tables.unavailability, limits)
    crowded = unavailable.resources > limits.timeline_resources
    by_time = f.desc_nulls_last("p99_s")
    handlers = _top(tables.handlers, limits.worst, by_time, *_GROUP, "label", "handler")
    clocks = _top(tables.clocks, limits.clocks, f.desc("behind_s"), "group", "host", "behind_host")
    return ReportContent(
        verdict=verdict,
        limits=limits,
        summary=_summary(tables.processes, unavailable, tables.gaps),
        findings=findings,
        unread=_unread(tables, limits),
        timeline=_timeline(spans, findings, shown, unavailable.resources, limits),
        heat=_heat(spans, tables.unavailability, limits) if crowded else None,
        rebalances=_rebalances(tables.rebalances, limits),
        unavailability=unavailable,
        balance=_balance(tables.balance, limits),
        handler_count=_count(tables.handlers, handlers, limits.worst),
        handlers=handlers,
        leaders=_leaders(tables.leaders, limits),
        loads=_loads(tables.loads, limits),
        clock_count=_count(tables.clocks, clocks, limits.clocks),
        clocks=clocks,
    )


def _rows(frame: DataFrame) -> tuple[Facts, ...]:
    return tuple(row.asDict(recursive=True) for row in frame.collect())


def _top(frame: DataFrame, count: int, *order: Column | str) -> tuple[Facts, ...]:
    return _rows(frame.orderBy(*order).limit(count))


def _count(frame: DataFrame, rows: Sequence[Facts], limit: int) -> int:
    """Number of all rows; ``rows`` are at most ``limit`` of them."""
    return len(rows) if len(rows) < limit else frame.count()


def _one(frame: DataFrame, **aggregates: Column) -> Facts:
    """One row of aggregates over all rows."""
    (row,) = _rows(frame.agg(*(value.alias(name) for name, value in aggregates.items())))
    return row


def _summary(processes: DataFrame, unavailable: Unavailability, gaps: DataFrame) -> Summary:
    lived = processes.groupBy(*_GROUP, "process").agg(
        f.count("*").alias("nodes"),
        f.max("host").alias("host"),
        (f.max("last_sequence") - f.min("first_sequence") + 1).alias("records"),
        f.min("first_wall").alias("first_wall"),
        f.max("last_wall").alias("last_wall"),
    )
    whole = _one(
        lived,
        groups=f.count_distinct(*_GROUP),
        processes=f.count("*"),
        nodes=f.sum("nodes"),
        hosts=f.count_distinct("host"),
        records=f.sum("records"),
        first_wall=f.min("first_wall"),
        last_wall=f.max("last_wall"),
    )
    lost = _one(gaps.where(f.col("reason") != ROTATED), records=f.sum("missing"))
    sizes = lived.groupBy(*_GROUP).agg(f.sum("records").alias("records"))
    return Summary(
        groups=tuple((row["protocol"], row["group"]) for row in _top(sizes, 5, f.desc("records"), *_GROUP)),
        group_count=whole["groups"],
        nodes=whole["nodes"] or 0,
        processes=whole["processes"],
        hosts=whole["hosts"],
        records=max(0, (whole["records"] or 0) - (lost["records"] or 0)),
        resources=unavailable.resources,
        accesses=unavailable.accesses,
        first_wall=whole["first_wall"],
        last_wall=whole["last_wall"],
    )


def _findings(frame: DataFrame, limits: ReportLimits) -> Findings:
    kinds = frame.groupBy("kind", "certainty").agg(
        f.count("*").alias("count"),
        f.max("lasts_s").alias("longest_s"),
        f.count_if(f.col("fenced")).alias("fenced"),
    )
    order = list(KIND_NAMES)
    return Findings(
        shown=_rows(
            severity(frame)
            .limit(limits.findings)
            .withColumn("parties_left_out", f.greatest(f.size("parties") - limits.parties, f.lit(0)))
            .withColumn("evidence_left_out", f.greatest(f.size("evidence") - limits.witnesses, f.lit(0)))
            .withColumn("parties", f.slice("parties", 1, limits.parties))
            .withColumn("evidence", f.slice("evidence", 1, limits.witnesses))
        ),
        kinds=tuple(
            sorted(
                _rows(kinds),
                key=lambda row: (row["certainty"], order.index(row["kind"]) if row["kind"] in order else 99),
            )
        ),
    )


def _unread(tables: Tables, limits: ReportLimits) -> UnreadSummary:
    reasons = _top(tables.quarantine.groupBy("reason").agg(f.count("*").alias("count")), 100, f.desc("count"))
    examples = tables.quarantine.select(
        "source", "position", "reason", "detail", f.substring("raw", 1, 200).alias("raw")
    )
    is_rotated = f.col("reason") == ROTATED
    gaps = _one(
        tables.gaps,
        count=f.count_if(~is_rotated),
        missing=f.sum(f.when(~is_rotated, f.col("missing"))),
        rotated=f.count_if(is_rotated),
    )
    largest = tables.gaps.where(~is_rotated)
    return UnreadSummary(
        quarantined=sum(row["count"] for row in reasons),
        doubtful=sum(row["count"] for row in reasons if row["reason"] not in HARMLESS),
        reasons=reasons[: limits.reasons],
        examples=_rows(examples.limit(limits.reasons)) if reasons else (),
        gap_count=gaps["count"],
        missing=gaps["missing"] or 0,
        rotated=gaps["rotated"],
        gaps=_top(largest, limits.gaps, f.desc("missing"), "process", "first") if gaps["count"] else (),
    )


def _key(values: Sequence[Any]) -> Column:
    """Names of a resource and its group as a struct that compares with ``f.struct(*_RESOURCE)``."""
    return f.struct(*(f.lit(value).alias(name) for name, value in zip(_RESOURCE, values, strict=True)))


def _rows_of_timeline(findings: Findings, unavailability: DataFrame, limits: ReportLimits) -> list[Facts]:
    """The resources to draw: those with findings, worst first, then those with the most unowned time."""
    keys: dict[tuple[Any, ...], None] = {}
    for finding in findings.shown:
        if finding["resource"] is not None:
            keys[tuple(finding[key] for key in _RESOURCE)] = None
    marked = list(keys)[: limits.timeline_resources]
    found = f.array(*map(_key, marked)) if marked else None
    is_marked = f.lit(False) if found is None else f.array_contains(found, f.struct(*_RESOURCE))
    chosen = _top(
        unavailability.withColumn("marked", is_marked),
        limits.timeline_resources,
        f.desc("marked"),
        f.desc("unowned_s"),
        *_GROUP,
        f.length("resource"),
        "resource",
    )
    place = {key: number for number, key in enumerate(marked)}
    return sorted(
        chosen,
        key=lambda row: (
            place.get(tuple(row[key] for key in _RESOURCE), len(marked)),
            -row["unowned_s"],
            natural(row["resource"]),
        ),
    )


def _timeline(
    spans: DataFrame, findings: Findings, chosen: Sequence[Facts], resources: int, limits: ReportLimits
) -> Timeline | None:
    if not chosen:
        return None
    rows = {tuple(row[key] for key in _RESOURCE): number for number, row in enumerate(chosen)}
    keys = f.array(*map(_key, rows))
    row = f.array_position(keys, f.struct(*_RESOURCE)).cast("int") - 1
    drawn = spans.withColumn("row", row).where(f.col("row") >= 0)
    begins = min(row["first_wall"] for row in chosen)
    ends = max(row["last_wall"] for row in chosen)
    slot_s = None
    if sum(row["accesses"] for row in chosen) <= limits.bars:
        bars = _single_bars(drawn)
    else:
        slots = max(1, limits.bars // len(chosen))
        slot_s = max((ends - begins) / slots, 1e-3)
        bars = _slots(drawn, begins, slot_s, limits.bars)
    groups = {key[1] for key in rows}
    return Timeline(
        resources=tuple(key[2] if len(groups) == 1 else f"{key[1]} / {key[2]}" for key in rows),
        bars=_named(bars),
        marks=tuple(_marks(findings, rows)),
        left_out=max(0, resources - len(rows)),
        slot_s=slot_s,
    )


def _single_bars(drawn: DataFrame) -> tuple[Facts, ...]:
    """One bar for each access."""
    return _rows(
        drawn.select(
            "row",
            "label",
            "node",
            f.col("start_entered_wall").alias("begins"),
            f.col("end_wall").alias("ends"),
            "token",
            "ended_by",
        ).orderBy("row", "begins", "token")
    )


def _slots(drawn: DataFrame, begins: float, slot_s: float, most: int) -> tuple[Facts, ...]:
    """One bar for each resource and owned slot of time, for the node that owned most of the slot."""
    slot = f.explode(
        f.sequence(
            f.floor((f.col("start_entered_wall") - begins) / slot_s),
            f.floor((f.col("end_wall") - begins) / slot_s),
        )
    )
    slot_begins = begins + f.col("slot") * slot_s
    inside = f.least(f.col("end_wall"), slot_begins + slot_s) - f.greatest(
        f.col("start_entered_wall"), slot_begins
    )
    owned = (
        drawn.select("row", "label", "node", "start_entered_wall", "end_wall", slot.alias("slot"))
        .withColumn("inside", inside)
        .groupBy("row", "slot", "label", "node")
        .agg(f.sum("inside").alias("inside"), f.count("*").alias("accesses"))
        .groupBy("row", "slot")
        .agg(
            f.max_by(f.struct("label", "node"), "inside").alias("owner"),
            f.sum("accesses").alias("accesses"),
            f.least(f.lit(1.0), f.sum("inside") / slot_s).alias("share"),
        )
    )
    return _rows(
        owned.select(
            "row",
            "owner.label",
            "owner.node",
            slot_begins.alias("begins"),
            (slot_begins + slot_s * f.col("share")).alias("ends"),
            "accesses",
        )
        .orderBy("row", "begins")
        .limit(most)
    )


def _named(bars: Iterable[Facts]) -> tuple[Bar, ...]:
    """Bars under the labels of their nodes, or under their ids if all have one label."""
    bars = list(bars)
    labels = {bar["label"] for bar in bars}
    nodes = {bar["node"] for bar in bars}
    name = "node" if len(labels) == 1 and len(nodes) > 1 else "label"
    return tuple(
        Bar(bar["row"], bar[name] or bar["node"], bar["begins"], bar["ends"], _tooltip(bar)) for bar in bars
    )


_ENDS: Final = {
    EndedBy.STOP: "stopped",
    EndedBy.SILENCE: "end not recorded",
    EndedBy.FAILURE: "OnStop raised",
}


def _tooltip(bar: Facts) -> str:
    lasts = duration(bar["ends"] - bar["begins"])
    if "accesses" in bar:
        return f"{bar['node']}, with {number(bar['accesses'])} accesses"
    end = _ENDS[bar["ended_by"]]
    return f"{bar['node']}, token {bar['token']}, for {lasts}, {end}"


def _marks(findings: Findings, rows: dict[tuple[Any, ...], int]) -> Iterable[Bar]:
    for finding in findings.shown:
        row = rows.get(tuple(finding[key] for key in _RESOURCE))
        if row is not None and finding["begins"] is not None:
            ends = max(finding["begins"], finding["ends"] or finding["begins"])
            tooltip = f"{KIND_NAMES.get(finding['kind'], finding['kind'])}, {finding['certainty']}"
            yield Bar(row, finding["id"], finding["begins"], ends, tooltip)


def _heat(spans: DataFrame, unavailability: DataFrame, limits: ReportLimits) -> Heat | None:
    """Number of resources in each period, by the share of it that they were owned.

    A resource counts from its first owner to the end of its last one, as in ``UNAVAILABILITY``.
    """
    extent = _one(unavailability, begins=f.min("first_wall"), ends=f.max("last_wall"))
    if extent["begins"] is None or extent["ends"] <= extent["begins"]:
        return None
    begins, columns = extent["begins"], limits.heat_columns
    width_s = (extent["ends"] - begins) / columns

    def pieces(frame: DataFrame, first: str, last: str, what: str) -> DataFrame:
        def column(time: str) -> Column:
            return f.least(f.lit(columns - 1), f.floor((f.col(time) - begins) / width_s)).cast("int")

        cut = frame.select(
            *_RESOURCE, first, last, f.explode(f.sequence(column(first), column(last))).alias("at")
        )
        left = begins + f.col("at") * width_s
        inside = f.least(f.col(last), left + width_s) - f.greatest(f.col(first), left)
        other = "known" if what == "owned" else "owned"
        return cut.select(*_RESOURCE, "at", inside.alias(what), f.lit(0.0).alias(other))

    shares = (
        pieces(spans, "start_entered_wall", "end_wall", "owned")
        .unionByName(pieces(unavailability, "first_wall", "last_wall", "known"))
        .groupBy(*_RESOURCE, "at")
        .agg(f.try_divide(f.sum("owned"), f.sum("known")).alias("share"))
        .where(f.col("share").isNotNull())
    )
    level = f.coalesce(
        f.when(f.col("share") <= 0, len(HEAT_LEVELS)),
        *(f.when(f.col("share") >= least, number) for number, (least, _) in enumerate(HEAT_LEVELS)),
    )
    counts = [[0] * columns for _ in range(len(HEAT_LEVELS) + 1)]
    for row in shares.groupBy("at", level.alias("level")).count().collect():
        counts[row["level"]][row["at"]] = row["count"]
    return Heat(begins, width_s, tuple(map(tuple, counts)))


def _spread_of(column: str, values: Column) -> dict[str, Column]:
    """The aggregates for ``_spread``."""
    return {
        f"{column}_count": f.count(values),
        f"{column}_percentiles": f.percentile_approx(values, [0.5, 0.99], _ACCURACY),
        f"{column}_max": f.max(values),
    }


def _spread(row: Facts, column: str, name: str) -> Spread:
    """Median, 99th percentile (``percentile_approx``) and greatest value of a column."""
    p50_s, p99_s = row[f"{column}_percentiles"] or (None, None)
    return Spread(name, row[f"{column}_count"], p50_s, p99_s, row[f"{column}_max"])


def _rebalances(frame: DataFrame, limits: ReportLimits) -> Rebalances:
    told = f.col("moves").isNotNull() & f.col("least_moves").isNotNull()
    spreads: dict[str, Column] = {}
    for column in _PHASES:
        spreads.update(_spread_of(column, f.col(column)))
    whole = _one(
        frame,
        count=f.count("*"),
        completed=f.count("completed_wall"),
        moves=f.sum(f.when(told, f.col("moves"))),
        least=f.sum(f.when(told, f.col("least_moves"))),
        told=f.count_if(told),
        **spreads,
    )
    phases = (f.coalesce(f.col(phase), f.lit(0.0)) for phase in ("plan_s", "stop_s", "barrier_s", "start_s"))
    took = f.coalesce("duration_s", sum(phases, f.lit(0.0)))
    needless = f.col("moves") - f.col("least_moves")
    by_moves = (needless.desc(), f.desc("moves"), "published_wall", *_GROUP)
    return Rebalances(
        count=whole["count"],
        completed=whole["completed"],
        moves=whole["moves"] or 0,
        least_moves=whole["least"] or 0,
        counted_moves=whole["told"],
        spreads=tuple(_spread(whole, column, name) for column, name in _PHASES.items()),
        longest=_in_time(_top(frame, limits.rebalances, took.desc(), "published_wall", *_GROUP, "version")),
        moving=_in_time(_top(frame.where(told), limits.rebalances, *by_moves)) if whole["told"] else (),
    )


def _in_time(rebalances: Iterable[Facts]) -> tuple[Facts, ...]:
    return tuple(sorted(rebalances, key=lambda row: (row["published_wall"], row["group"], row["version"])))


def _unavailability(frame: DataFrame, limits: ReportLimits) -> Unavailability:
    unowned = f.col("unowned_s")
    whole = _one(
        frame,
        resources=f.count("*"),
        accesses=f.sum("accesses"),
        **_spread_of("unowned_s", f.when(unowned > 0, unowned)),
    )
    spread = _spread(whole, "unowned_s", "unowned")
    affected = frame.where(unowned > 0)
    thirds = f.floor(f.log10(f.greatest(unowned, f.lit(1e-3))) * 3).cast("int")
    histogram = affected.groupBy(thirds.alias("third")).agg(f.count("*").alias("count"))
    return Unavailability(
        resources=whole["resources"],
        accesses=whole["accesses"] or 0,
        affected=spread.count,
        spread=spread,
        worst=_top(affected, limits.worst, f.desc("unowned_s"), *_RESOURCE) if spread.count else (),
        histogram=tuple((row["third"], row["count"]) for row in _top(histogram, 100, "third"))
        if spread.count
        else (),
    )


def _balance(frame: DataFrame, limits: ReportLimits) -> Balance:
    sizes = frame.groupBy(*_GROUP).agg(f.max("owned").alias("owned"))
    largest = _top(sizes, limits.groups, f.desc("owned"), *_GROUP)
    points: dict[tuple[str, str], list[Facts]] = {(row["protocol"], row["group"]): [] for row in largest}
    shown = frame.join(
        f.broadcast(sizes.orderBy(f.desc("owned"), *_GROUP).limit(limits.groups)), [*_GROUP], "left_semi"
    )
    for row in _top(shown, limits.groups * BALANCE_POINTS, *_GROUP, "at_wall") if largest else ():
        points[row["protocol"], row["group"]].append(row)
    return Balance(
        groups=tuple((group, tuple(rows)) for (_, group), rows in points.items()),
        left_out=_count(sizes, largest, limits.groups) - len(largest),
    )


def _leaders(frame: DataFrame, limits: ReportLimits) -> Leaders:
    terms = frame.groupBy(*_GROUP).agg(f.count_distinct("term").alias("terms"))
    counted = _one(terms, terms=f.sum("terms"), changes=f.sum(f.col("terms") - 1))
    newest = _top(frame, limits.terms, f.desc("from_wall"), *_GROUP, "term") if counted["terms"] else ()
    return Leaders(
        term_count=counted["terms"] or 0,
        changes=counted["changes"] or 0,
        newest=tuple(reversed(newest)),
    )


def _loads(frame: DataFrame, limits: ReportLimits) -> Loads:
    whole = _one(frame, resources=f.count("*"), groups=f.count_distinct(*_GROUP), samples=f.sum("samples"))
    weights = frame.groupBy("weight").agg(f.count("*").alias("count"))
    most = round(MOST_WEIGHT * 10**DECIMALS)
    return Loads(
        resources=whole["resources"],
        groups=whole["groups"],
        samples=whole["samples"] or 0,
        heaviest=_top(frame, limits.worst, f.desc("weight"), f.desc("load"), *_RESOURCE)
        if whole["resources"]
        else (),
        weights=tuple((row["weight"], row["count"]) for row in _top(weights, most, "weight"))
        if whole["resources"] > limits.worst
        else (),
    )
