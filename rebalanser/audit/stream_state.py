"""Records that a stream carries over from one micro-batch to the next (AU-9).

A stream judges what a batch would judge of all records up to a *watermark*: the newest wall time seen, less a
delay in which late records may still come. Of the records before it, few are needed later: a running maximum
needs the access that holds it, an access that is not over all of its steps, and the next number of a process
the one before. All others are settled and dropped, so that the carried records grow with the resources and
not with the history.
"""

from __future__ import annotations

from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING, Final

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from rebalanser.audit.checkpoint import TIP
from rebalanser.audit.owner_pairs import SERIES
from rebalanser.audit.sequences import NUMBERED
from rebalanser.audit.tables import EndedBy
from rebalanser.history import HistoryStep

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

KEEP_S: Final = 600.0
"""Seconds that an access that is over is carried, if it is among the last of its resource."""
KEEP_LAST: Final = 4
"""Number of accesses of a resource that are over and still carried, beside those that hold a maximum."""
KEEP_SILENT_S: Final = 86_400.0
"""Seconds that an access without a recorded end is carried once its node is silent and it has a successor."""
KEEP_PUBLISHED_S: Final = 86_400.0
"""Seconds that leaders' publications are carried, to compare clocks by them."""
KEEP_ADOPTED_S: Final = 60.0
"""Seconds that adoptions are carried, in case their cause comes later."""
KEEP_TERMS_S: Final = 7 * 86_400.0
"""Seconds that elections and the last number of a process are carried."""

_ACCESS: Final = (*SERIES, "process", "node", "token")
_NODE: Final = (*NUMBERED, "node")
_WATERMARK: Final = "watermark"
_KEPT: Final = "kept_access"
_NODE_LAST: Final = "last_of_node"
_LAST: Final = "last_of_process"


def carried(settled: DataFrame, processes: DataFrame, accesses: DataFrame, reached: DataFrame) -> DataFrame:
    """The records of ``settled`` that later ones may be judged with, and which of them are tips.

    ``processes`` and ``accesses`` are those made of ``settled``; ``reached`` is one row with the
    ``watermark``, in seconds since 1970.
    """
    kept = (
        _kept_accesses(accesses.crossJoin(reached))
        .select(*_ACCESS)
        .distinct()
        .withColumn(_KEPT, F.lit(True))
        .alias("a")
    )
    last = F.broadcast(_lasts(processes)).alias("l")
    records = settled.alias("r")
    same_access = reduce(and_, (F.col(f"r.{name}").eqNullSafe(F.col(f"a.{name}")) for name in _ACCESS))
    same_node = reduce(and_, (F.col(f"r.{name}") == F.col(f"l.{name}") for name in _NODE))
    known = (
        records.join(last, same_node, "left")
        .join(F.broadcast(kept), same_access, "left")
        .select("r.*", _NODE_LAST, _LAST, _KEPT)
        .crossJoin(reached)
    )
    number = F.col("sequence")
    reasons = (
        F.col(_KEPT),
        _is_kept(),
        (number == F.col(_NODE_LAST)) & _since(KEEP_TERMS_S),
        number == F.col(_LAST),
    )
    is_kept = reduce(or_, (F.coalesce(reason, F.lit(False)) for reason in reasons))
    return known.where(is_kept).select(*settled.columns, (number == F.col(_LAST)).alias(TIP))


def _lasts(processes: DataFrame) -> DataFrame:
    """The last number of each process and of each incarnation: an access without an end lasts until then."""
    of_nodes = processes.groupBy(*_NODE).agg(F.max("last_sequence").alias(_NODE_LAST))
    return of_nodes.withColumn(_LAST, F.max(_NODE_LAST).over(Window.partitionBy(*NUMBERED)))


def _since(ago_s: float) -> Column:
    return F.col("wall_time") > F.col(_WATERMARK) - ago_s


def _is_kept() -> Column:
    """True for elections, and for records by which clocks are compared."""
    step = F.col("step")
    elections = (step == HistoryStep.ELECTED) & _since(KEEP_TERMS_S)
    published = step.isin(HistoryStep.GROUP_READ, HistoryStep.PUBLISHED) & _since(KEEP_PUBLISHED_S)
    adopted = (step == HistoryStep.ADOPTED) & _since(KEEP_ADOPTED_S)
    return elections | published | adopted


def _kept_accesses(accesses: DataFrame) -> DataFrame:
    """Accesses that are not over or among the last of their resource, and those that hold a maximum of it."""
    last_seen = F.greatest("end_wall", "barrier_removed_wall", "barrier_added_wall", "start_entered_wall")
    of_series = Window.partitionBy(*SERIES)
    latest_first = of_series.orderBy(last_seen.desc())
    held = F.col("barrier_added_sequence").isNotNull() & F.col("barrier_removed_sequence").isNull()
    open_still = held | (F.col("ended_by") != EndedBy.STOP)
    maxima = ("token", "removed_revision", "end_wall", "start_entered_wall")
    reasons = (
        (last_seen > F.col(_WATERMARK) - KEEP_S) & (F.row_number().over(latest_first) <= KEEP_LAST),
        open_still & (last_seen > F.col(_WATERMARK) - KEEP_SILENT_S),
        *(F.col(name) == F.max(name).over(of_series) for name in maxima),
    )
    is_kept = reduce(or_, (F.coalesce(reason, F.lit(False)) for reason in reasons))
    return accesses.select(*_ACCESS, is_kept.alias(_KEPT)).where(_KEPT)
