"""What a stream carries over from one micro-batch to the next (AU-9).

A stream judges what a batch would judge of all records up to a *watermark*: the newest wall time seen, less a
delay in which late records may still come. Of the records up to there it need not keep all: a running maximum
needs the access that holds it, an access that is not over all of its steps, and the next number of a process
the one before. Everything else is settled and forgotten, so that what is carried grows with the resources and
not with the history.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from rebalanser.audit.successions import SERIES
from rebalanser.audit.tables import EndedBy
from rebalanser.history import Step

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

KEEP_S: Final = 600.0
"""For how long an access that is over is carried, whatever came after it."""
KEEP_SILENT_S: Final = 86_400.0
"""For how long an access without a recorded end is carried once its node is silent and it has a successor."""
KEEP_CLOCKS_S: Final = 86_400.0
"""For how long allocations are remembered; clocks further apart than that are not noticed."""
KEEP_TERMS_S: Final = 7 * 86_400.0
"""For how long it is remembered who was elected for a term."""

_ACCESS: Final = (*SERIES, "process", "node", "token")
_NODE: Final = ("protocol", "group", "process", "node")
_OF_ALLOCATIONS: Final = (Step.GROUP_READ, Step.PUBLISHED, Step.ADOPTED)
_PROCESS: Final = ("protocol", "group", "process")


def carried(settled: DataFrame, accesses: DataFrame, watermark: float) -> DataFrame:
    """The records of ``settled`` that later ones may have to be judged with.

    ``accesses`` are those made of ``settled``; ``watermark`` is in seconds since 1970.
    """
    kept = _kept_accesses(accesses, watermark).select(*_ACCESS)
    same = reduce(
        lambda all_, one: all_ & one, (F.col(f"r.{name}").eqNullSafe(F.col(f"a.{name}")) for name in _ACCESS)
    )
    steps = settled.where(F.col("resource").isNotNull()).alias("r")
    of_accesses = steps.join(F.broadcast(kept).alias("a"), same, "left_semi")
    others = settled.where(_is_kept(watermark))
    return of_accesses.unionByName(others).unionByName(_tips(settled)).dropDuplicates(["process", "sequence"])


def newest(records: DataFrame) -> DataFrame:
    """The last record of each process: what the number of its next one is compared with."""
    last = records.groupBy(*_PROCESS).agg(F.max("sequence").alias("sequence"))
    return records.join(F.broadcast(last), [*_PROCESS, "sequence"], "left_semi")


def _tips(settled: DataFrame) -> DataFrame:
    """The last record of each incarnation: an access without a recorded end lasts until there."""
    last = settled.groupBy(*_NODE).agg(F.max("sequence").alias("sequence"))
    return settled.join(F.broadcast(last), [*_NODE, "sequence"], "left_semi")


def _is_kept(watermark: float) -> Column:
    """Elections, and what clocks are compared by."""
    step, wall = F.col("step"), F.col("wall_time")
    elections = (step == Step.ELECTED) & (wall > watermark - KEEP_TERMS_S)
    allocations = step.isin(*_OF_ALLOCATIONS) & (wall > watermark - KEEP_CLOCKS_S)
    return F.coalesce(elections | allocations, F.lit(False))


def _kept_accesses(accesses: DataFrame, watermark: float) -> DataFrame:
    """Those that are not over or ended lately, and those that hold a maximum of their resource."""
    holders = accesses.groupBy(*SERIES).agg(
        F.max("token").alias("last_token"),
        F.max("removed_revision").alias("last_removal"),
        F.max("end_wall").alias("last_end"),
        F.max("start_entered_wall").alias("last_start"),
    )
    last_seen = F.greatest("end_wall", "barrier_removed_wall", "barrier_added_wall", "start_entered_wall")
    held = F.col("barrier_added_sequence").isNotNull() & F.col("barrier_removed_sequence").isNull()
    open_still = held | (F.col("ended_by") == EndedBy.SILENCE)
    reasons = (
        last_seen > watermark - KEEP_S,
        open_still & (last_seen > watermark - KEEP_SILENT_S),
        F.col("token") == F.col("last_token"),
        F.col("removed_revision") == F.col("last_removal"),
        F.col("end_wall") == F.col("last_end"),
        F.col("start_entered_wall") == F.col("last_start"),
    )
    is_kept = reduce(or_, (F.coalesce(reason, F.lit(False)) for reason in reasons))
    return accesses.join(holders, list(SERIES)).where(is_kept)
