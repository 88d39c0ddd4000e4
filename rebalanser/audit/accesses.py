"""What each process did with each token of each resource, as one row (AU-3).

All steps are minima and maxima over numbers: one hash aggregation, whose result does not depend on the
order of the records and is not changed by duplicates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from rebalanser.audit.tables import ACCESSES, EndedBy
from rebalanser.history import Step

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_ACCESS: Final = ("protocol", "group", "resource", "process", "node", "token")
_INCARNATION: Final = ("protocol", "group", "process", "node")
_OPENING: Final = (Step.BARRIER_ADDED, Step.START_ENTERED, Step.START_RETURNED)
_CLOSING: Final = (Step.STOP_ENTERED, Step.STOP_RETURNED, Step.BARRIER_REMOVED)
_LAST_START: Final = "last_start_sequence"


def accesses(records: DataFrame, processes: DataFrame) -> DataFrame:
    """The table ``ACCESSES`` of these records, the incarnations of their processes being ``processes``.

    Of a step that was taken twice with one token, the first of those that open an access counts, and the last
    of those that close it; its wall time is that of the same record. An access that was entered again after
    its last stop has no recorded end. Steps without a token are one row for each resource and incarnation,
    whose token is null.
    """
    steps = records.where(F.col("step").isin(*_OPENING, *_CLOSING) & F.col("resource").isNotNull())
    taken = steps.groupBy(*_ACCESS).agg(*_aggregates())
    incarnations = processes.select(*_INCARNATION, "label", "host", "boot", "last_wall", "last_monotonic")
    return _ended(taken.join(incarnations, [*_INCARNATION], "left"))


def _aggregates() -> list[Column]:
    entered = F.col("step") == Step.START_ENTERED
    return [
        *(part for step in _OPENING for part in _step(step, first=True)),
        *(part for step in _CLOSING for part in _step(step, first=False)),
        F.max(F.when(entered, F.col("sequence"))).alias(_LAST_START),
        F.max(F.when(entered, F.col("value")).cast("long")).alias("claim"),
        F.max(F.when(F.col("step") == Step.BARRIER_REMOVED, F.col("revision"))).alias("removed_revision"),
        F.max("version").alias("version"),
        F.max("fenced").alias("fenced"),
        F.max("overlap_limit_s").alias("overlap_limit_s"),
    ]


def _step(step: Step, *, first: bool) -> list[Column]:
    """When the step was taken, for the first or the last time, by number and by both clocks.

    The monotonic clock of a process never goes back, so its extremes belong to those of the numbers.
    """
    taken = F.col("step") == step
    sequence, monotonic = F.when(taken, F.col("sequence")), F.when(taken, F.col("monotonic_time"))
    extreme, extreme_by = (F.min, F.min_by) if first else (F.max, F.max_by)
    return [
        extreme(sequence).alias(f"{step}_sequence"),
        extreme_by("wall_time", sequence).alias(f"{step}_wall"),
        extreme(monotonic).alias(f"{step}_monotonic"),
    ]


def _ended(taken: DataFrame) -> DataFrame:
    """With the end of each access that was entered, and how it is known."""
    entered = F.col("start_entered_sequence").isNotNull()
    stopped = entered & F.coalesce(F.col("stop_returned_sequence") > F.col(_LAST_START), F.lit(False))
    ended = taken.select(
        "*",
        F.when(stopped, F.lit(EndedBy.STOP)).when(entered, F.lit(EndedBy.SILENCE)).alias("ended_by"),
        *(
            F.when(stopped, F.col(f"stop_returned_{clock}"))
            .when(entered, F.greatest(F.col(f"last_{clock}"), F.col(f"start_entered_{clock}")))
            .alias(f"end_{clock}")
            for clock in ("wall", "monotonic")
        ),
    )
    return ended.select(*ACCESSES.fieldNames())
