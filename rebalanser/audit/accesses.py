"""Puts together one row for all that a process did with a token of a resource (AU-3).

All steps are minima and maxima over numbers: one hash aggregation, whose result does not depend on the order
of the records and is not changed by duplicates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from rebalanser.audit.caching import observed, once
from rebalanser.audit.tables import ACCESSES, EndedBy
from rebalanser.history import HistoryStep, Protocol

if TYPE_CHECKING:
    from pyspark.sql import Column

    from rebalanser.audit.caching import Keep

_ACCESS: Final = ("protocol", "group", "resource", "process", "node", "token")
_INCARNATION: Final = ("protocol", "group", "process", "node")
_OPENING: Final = (HistoryStep.BARRIER_ADDED, HistoryStep.START_ENTERED, HistoryStep.START_RETURNED)
_CLOSING: Final = (
    HistoryStep.STOP_ENTERED,
    HistoryStep.STOP_RETURNED,
    HistoryStep.STOP_FAILED,
    HistoryStep.BARRIER_REMOVED,
)
_LAST_START: Final = "last_start_sequence"
_FIRST_STOP: Final = "first_stop_sequence"
_TURN: Final = "turn"
_WHOLE: Final = "whole"
_OF_THE_BARRIER: Final = (
    *(
        f"{step}_{part}"
        for step in (HistoryStep.BARRIER_ADDED, HistoryStep.BARRIER_REMOVED)
        for part in ("sequence", "wall", "monotonic")
    ),
    "removal_sent_monotonic",
    "removed_revision",
)
_CLOCKS: Final = ("wall", "monotonic")


def accesses(records: DataFrame, processes: DataFrame) -> DataFrame:
    """The table ``ACCESSES`` of these records; ``processes`` are the incarnations of their processes.

    If a step was taken twice with one token, the first of those that open an access counts, and the last of
    those that close it; its wall time is that of the same record. An access that was entered again after its
    last stop has no recorded end. Steps without a token are one row for each resource and incarnation, whose
    token is null. If a row covers several turns its ``turn`` is null; ``in_turns`` separates them, and needs
    that row.
    """
    steps = _steps(records)
    taken = steps.groupBy(*_ACCESS).agg(*_aggregates(), _first_stop())
    again = (F.col(_FIRST_STOP) < F.col(_LAST_START)) & (F.col("start_entered_sequence") < F.col(_LAST_START))
    # A claim is one, however often its worker says that it took it.
    several = F.coalesce(again, F.lit(False)) & (F.col("protocol") != str(Protocol.SKULD))
    incarnations = processes.select(*_INCARNATION, "label", "host", "boot", "last_wall", "last_monotonic")
    known = taken.join(incarnations, [*_INCARNATION], "left").withColumn(
        _TURN, F.when(~several, F.lit(0)).cast("long")
    )
    last = {clock: F.greatest(F.col(f"last_{clock}"), F.col(f"start_entered_{clock}")) for clock in _CLOCKS}
    return _ended(known, F.when(_failed(), EndedBy.FAILURE).otherwise(EndedBy.SILENCE), last)


@dataclass(frozen=True, slots=True)
class Accesses:
    """The accesses of a history, kept."""

    whole: DataFrame
    """The result of ``accesses``."""
    in_turns: DataFrame
    """One row for each turn; the same as ``whole`` if nothing was started again with the same token."""
    are_any: Mapping[str, bool]
    """True, by name, if some access may meet the condition."""


def put_together(records: DataFrame, processes: DataFrame, keep: Keep, **asked: Column) -> Accesses:
    """The table ``ACCESSES``, kept; ``are_any`` says of each condition ``asked`` if an access may meet it."""
    whole, seen = observed(
        keep,
        "assembling accesses",
        accesses(records, processes),
        several=F.count_if(F.col(_TURN).isNull()),
        **{name: F.count_if(condition) for name, condition in asked.items()},
    )
    several = seen["several"] > 0
    apart = in_turns(whole, records, keep) if several else whole
    return Accesses(whole, apart, {name: several or seen[name] > 0 for name in asked})


def in_turns(accesses: DataFrame, records: DataFrame, keep: Keep) -> DataFrame:
    """The accesses with a row for each turn, if a node started again with the same token after a stop.

    ``accesses`` are made of ``records`` and should be persisted.
    """
    several = accesses.where(F.col(_TURN).isNull())
    whole = F.broadcast(several.select(*_ACCESS, F.struct(*several.columns).alias(_WHOLE)).alias("a"))
    same = reduce(and_, (F.col(f"r.{name}").eqNullSafe(F.col(f"a.{name}")) for name in _ACCESS))
    steps = _steps(records).alias("r").join(whole, same).select("r.*", _WHOLE)
    turns = (
        _with_turn(steps)
        .groupBy(*_ACCESS, _TURN)
        .agg(*_aggregates(), F.first(_WHOLE).alias(_WHOLE))
        .withColumns({name: F.col(f"{_WHOLE}.{name}") for name in ("label", "host", "boot")})
        .withColumns({name: F.col(f"{_WHOLE}.{name}") for name in _OF_THE_BARRIER})
    )
    ends = {clock: F.col(f"{_WHOLE}.end_{clock}") for clock in _CLOCKS}
    apart = _ended(turns, F.col(f"{_WHOLE}.ended_by"), ends)
    return keep("matching starts", accesses.where(F.col(_TURN).isNotNull()).unionByName(apart))


def _steps(records: DataFrame) -> DataFrame:
    return records.where(F.col("step").isin(*_OPENING, *_CLOSING) & F.col("resource").isNotNull())


def _with_turn(steps: DataFrame) -> DataFrame:
    """Each step with the number of times that its access had been started again after a stop."""
    access = Window.partitionBy(*_ACCESS).orderBy("sequence")
    before = access.rowsBetween(Window.unboundedPreceding, -1)
    step = F.col("step")
    edge = F.when(step.isin(HistoryStep.START_ENTERED, HistoryStep.STOP_RETURNED), step)
    was_stopped = F.last(edge, ignorenulls=True).over(before) == HistoryStep.STOP_RETURNED
    was_started = F.max(step == HistoryStep.START_ENTERED).over(before)
    again = F.coalesce((step == HistoryStep.START_ENTERED) & was_stopped & was_started, F.lit(False))
    return steps.withColumn(_TURN, again.cast("long")).withColumn(
        _TURN, F.sum(_TURN).over(access.rowsBetween(Window.unboundedPreceding, Window.currentRow))
    )


@once
def _aggregates() -> list[Column]:
    entered, removed = (
        F.col("step") == HistoryStep.START_ENTERED,
        F.col("step") == HistoryStep.BARRIER_REMOVED,
    )
    return [
        *(part for step in _OPENING for part in _step(step, first=True)),
        *(part for step in _CLOSING for part in _step(step, first=False)),
        F.max(F.when(entered, F.col("sequence"))).alias(_LAST_START),
        F.max(F.when(entered, F.col("value")).cast("long")).alias("claim"),
        F.max(F.when(removed, F.col("monotonic_time") - F.col("value"))).alias("removal_sent_monotonic"),
        F.max(F.when(removed, F.col("revision"))).alias("removed_revision"),
        F.max("version").alias("version"),
        F.max("fenced").alias("fenced"),
        F.max("overlap_limit_s").alias("overlap_limit_s"),
    ]


def _first_stop() -> Column:
    stopped = F.col("step") == HistoryStep.STOP_RETURNED
    return F.min(F.when(stopped, F.col("sequence"))).alias(_FIRST_STOP)


def _step(step: HistoryStep, *, first: bool) -> list[Column]:
    """Number and times of a step, at its first or last occurrence, on both clocks.

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


def _failed() -> Column:
    """True if OnStop raised after the last start."""
    return F.coalesce(F.col("stop_failed_sequence") > F.col(_LAST_START), F.lit(False))


def _ended(taken: DataFrame, otherwise: Column, ends: Mapping[str, Column]) -> DataFrame:
    """The accesses with their ends, and how each end is known.

    Without a recorded stop that is ``otherwise``, and the end by each clock is that of ``ends``.
    """
    entered = F.col("start_entered_sequence").isNotNull()
    stopped = entered & F.coalesce(F.col("stop_returned_sequence") > F.col(_LAST_START), F.lit(False))
    ended = taken.select(
        "*",
        F.when(stopped, F.lit(EndedBy.STOP)).when(entered, otherwise).alias("ended_by"),
        *(
            F.when(stopped, F.col(f"stop_returned_{clock}")).when(entered, end).alias(f"end_{clock}")
            for clock, end in ends.items()
        ),
    )
    return ended.select(*ACCESSES.fieldNames())
