"""The records of one micro-batch, with those carried over, and the fate of each (AU-9).

Nothing here is written or remembered: frames in, frames out. Presence flags are collected as the records are
read, since a further query takes longer to plan than to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from rebalanser.audit.caching import computed, count, limits, observed
from rebalanser.audit.checkpoint import CARRIED, SETTLED, TIP, StreamState
from rebalanser.audit.ingest import MAX_RAW, is_current, parse, with_step
from rebalanser.audit.schema import RECORDS
from rebalanser.audit.sequences import NUMBERED, bit, process_counts, processes_of
from rebalanser.audit.stream_state import carried
from rebalanser.audit.tables import PROCESSES, EndedBy
from rebalanser.history import GAP, HistoryStep, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

LATE: Final = "late"
"""The reason in quarantine of a record that came after the watermark had passed it."""

_PHASE: Final = "phase"
_SETTLED, _DUE, _WAITING, _OVERTAKEN = "settled", "due", "waiting", "late"
_LINKED: Final = "linked"
"""Column: true if a record is part of the counting: the last judged number of a process, and new ones."""
_TIP_SEQUENCE: Final = "tip_sequence"
_CURRENT: Final = "current"
_NOW: Final = "now"
"""Column: the wall time, null if it is from the future."""


@dataclass(frozen=True, slots=True)
class Came:
    """Input of a micro-batch."""

    records: DataFrame | None = None
    count: int = 0
    newest: float | None = None
    """The newest wall time of a record, by clocks that aren't ahead."""
    bad: int = 0
    """Number of rows that were no records."""
    quarantine: DataFrame | None = None
    """Those rows; None if there are none."""


@dataclass(frozen=True, slots=True)
class Placed:
    """All records, each classified: judged before, due, waiting or late."""

    everything: DataFrame
    reached: DataFrame
    """One row with the watermark."""
    late: int
    has_gaps: bool
    """True if there is a ``gap`` record."""
    there: Mapping[str, bool]
    """Presence flags, for ``Presence``."""

    @property
    def judged(self) -> DataFrame:
        """Records that were judged before, and those that are due."""
        return self.everything.where(F.col(_PHASE).isin(_SETTLED, _DUE))

    @property
    def linked(self) -> DataFrame:
        """The last judged number of each process, and those that are due."""
        return self.judged.where(_LINKED)

    def too_late(self) -> DataFrame:
        """Rows of quarantine, one for each late record."""
        return self.everything.where(F.col(_PHASE) == _OVERTAKEN).select(
            "source",
            "position",
            F.lit(LATE).alias("reason"),
            F.format_string("of %.3f, which is before the watermark", "wall_time").alias("detail"),
            F.left(F.to_json(F.struct(*RECORDS.names)), F.lit(MAX_RAW)).alias("raw"),
        )

    def ended(self, accesses: DataFrame) -> DataFrame:
        """The accesses that ended with a record that is due."""
        over = accesses.where(F.col("ended_by") == EndedBy.STOP)
        due = (F.col(_PHASE) == _DUE) & (F.col("step") == HistoryStep.STOP_RETURNED)
        stops = self.everything.where(due).select(
            "process", F.col("sequence").alias("stop_returned_sequence")
        )
        return over.join(stops, ["process", "stop_returned_sequence"], "left_semi")

    def carried_on(self, settled: DataFrame, processes: DataFrame, accesses: DataFrame) -> DataFrame:
        """Records for the next micro-batch: those that later ones may be judged with, and those that wait."""
        kept = carried(settled, processes, accesses, self.reached).withColumn(SETTLED, F.lit(True))
        waiting = self.everything.where(F.col(_PHASE) == _WAITING).withColumn(TIP, F.lit(False))
        return kept.unionByName(waiting.select(*RECORDS.names, TIP, SETTLED))


def read_once(raw: DataFrame, ahead: float) -> Came:
    """The content of ``raw``, read once; wall times later than ``ahead`` do not count as the newest."""
    limit = limits(raw.sparkSession, ahead=ahead)
    now = F.when(F.col("wall_time") <= F.col("ahead"), F.col("wall_time"))
    rows, seen = observed(
        computed,
        "reading",
        raw.crossJoin(limit).withColumns({_CURRENT: is_current(), _NOW: now}),
        others=F.count_if(~F.col(_CURRENT)),
        records=F.count_if(F.col(_CURRENT)),
        newest=F.max(F.when(F.col(_CURRENT), F.col(_NOW))),
    )
    if not seen["others"]:
        return Came(with_step(rows), seen["records"], seen["newest"])
    others = parse(rows.where(~F.col(_CURRENT)))
    older, old = observed(
        computed,
        "reading records of older versions",
        others.records.crossJoin(limit).withColumn(_NOW, now),
        records=count(),
        newest=F.max(_NOW),
    )
    return Came(
        with_step(rows.where(_CURRENT)).unionByName(older.select(*RECORDS.names)),
        seen["records"] + old["records"],
        max((wall for wall in (seen["newest"], old["newest"]) if wall is not None), default=None),
        seen["others"] - old["records"],
        others.quarantine,
    )


def place(
    came: DataFrame | None, carried_over: DataFrame, before: StreamState, reached: StreamState, ahead: float
) -> Placed:
    """Classify each record, between the watermarks of both states; without ``came`` none waits."""
    spark = carried_over.sparkSession
    tips = carried_over.where(TIP).groupBy(*NUMBERED).agg(F.max("sequence").alias(_TIP_SEQUENCE))
    everything = carried_over
    if came is not None:
        everything = everything.unionByName(came.withColumns({SETTLED: F.lit(False), TIP: F.lit(False)}))
    walls = limits(spark, before=before.watermark, watermark=reached.watermark, ahead=ahead)
    wall, is_onward = F.col("wall_time"), F.col("sequence") > F.col(_TIP_SEQUENCE)
    overtaken = (wall < F.col("before")) & ~is_onward & (F.col("sequence") != F.col(_TIP_SEQUENCE))
    due = F.lit(True) if came is None else (wall <= F.col("watermark")) | (wall > F.col("ahead"))
    phase = F.when(F.col(SETTLED), _SETTLED).when(overtaken, _OVERTAKEN).when(due, _DUE).otherwise(_WAITING)
    linked = F.col(TIP) | ((F.col(_PHASE) == _DUE) & F.coalesce(is_onward, F.lit(True)))
    placed, seen = observed(
        computed,
        "putting in place",
        everything.join(F.broadcast(tips), list(NUMBERED), "left")
        .crossJoin(walls)
        .withColumn(_PHASE, phase)
        .select(*CARRIED.names, _PHASE, linked.alias(_LINKED)),
        **_asked(),
    )
    there = {name: seen[name] > 0 for name in ("allocations", "elections", "tasks")}
    walls = limits(spark, watermark=reached.watermark or 0.0)
    return Placed(placed, walls, seen["late"], seen["gaps"] > 0, there)


def _asked() -> dict[str, Column]:
    """Counts of the records that decide which queries are needed."""
    is_new = F.col(_PHASE) == _DUE
    return {
        "late": F.count_if(F.col(_PHASE) == _OVERTAKEN),
        "gaps": F.count_if(is_new & (F.col("kind") == GAP)),
        "allocations": F.count_if(is_new & F.col("step").isin(HistoryStep.PUBLISHED, HistoryStep.ADOPTED)),
        "elections": F.count_if(is_new & (F.col("step") == HistoryStep.ELECTED)),
        "tasks": F.count_if(F.col(_PHASE).isin(_SETTLED, _DUE) & (F.col("protocol") == str(Protocol.SKULD))),
    }


def counted_on(judged: DataFrame) -> tuple[DataFrame, bool, bool]:
    """The table ``PROCESSES`` of ``Placed.judged``, kept, and flags for missing and repeated numbers.

    The first flag is true if a number may be missing before one that is due, the second if one may have come
    twice. Both are false if the incarnations of each process follow one another and none has such a number.
    """
    linked = F.when(F.col(_LINKED), F.col("sequence"))
    counted = process_counts(
        judged,
        linked_bits=F.bit_or(F.when(F.col(_LINKED), bit())),
        first_linked=F.min(linked),
        last_linked=F.max(linked),
        known=F.bool_or(TIP),
    )
    of_incarnations = processes_of(
        counted,
        linked=F.sum(F.bit_count("linked_bits")),
        first_linked=F.min("first_linked"),
        last_linked=F.max("last_linked"),
        known=F.bool_or("known"),
    )
    process = Window.partitionBy(*NUMBERED)
    before = process.orderBy("first_sequence").rowsBetween(Window.unboundedPreceding, -1)
    first, last = F.min("first_linked").over(process), F.max("last_linked").over(process)
    missing = (F.sum("linked").over(process) <= last - first) | (
        ~F.bool_or("known").over(process) & (first > 0)
    )
    interleaved = F.max("last_sequence").over(before) >= F.col("first_sequence")
    processes, seen = observed(
        computed,
        "counting the records of each process",
        of_incarnations.select(
            *PROCESSES.names, missing.alias("missing"), F.coalesce(interleaved, F.lit(False)).alias("mixed")
        ),
        missing=F.count_if(F.col("missing") | F.col("mixed")),
        twice=F.count_if((F.col("duplicates") > 0) | F.col("mixed")),
    )
    return processes.select(*PROCESSES.names), seen["missing"] > 0, seen["twice"] > 0
