"""The order in which a node takes the steps of an access, by its record numbers (RB-11, RB-12)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from rebalanser.audit.invariants.findings import findings, party, subject, text, witness, worded
from rebalanser.audit.owner_pairs import has_barriers, stopped_too_late
from rebalanser.audit.tables import ACCESSES, EndedBy, FindingKind
from rebalanser.history import HistoryStep

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from rebalanser.audit.invariants.findings import Case

_ENTERED = "start_entered_sequence"


def is_unguarded() -> Column:
    """True if OnStart was entered without a token, without an added barrier, or before it was added."""
    early = F.col("barrier_added_sequence") > F.col(_ENTERED)
    return (
        has_barriers(F.col("protocol"))
        & F.col(_ENTERED).isNotNull()
        & (F.col("turn") == 0)
        & (_has_no_barrier() | early)
    )


def _has_no_barrier() -> Column:
    return F.col("token").isNull() | F.col("barrier_added_sequence").isNull()


def start_without_barrier(case: Case) -> DataFrame:
    """OnStart entered without a token, without an added barrier, or before it was added (RB-12)."""
    broken = case.accesses.where(is_unguarded())
    how = (
        F.when(F.col("token").isNull(), F.lit("without a token"))
        .when(_has_no_barrier(), F.lit("without holding its barrier"))
        .otherwise(F.lit("before it held its barrier"))
    )
    return findings(
        broken,
        worded(
            FindingKind.START_WITHOUT_BARRIER,
            rule=F.lit("RB-12"),
            sentence=text(
                "{} called OnStart of {} (token {}) {}", F.col("label"), subject(), F.col("token"), how
            ),
            parties=[_party()],
            evidence=[_witness(HistoryStep.START_ENTERED), _witness(HistoryStep.BARRIER_ADDED)],
            begins=F.col("start_entered_wall"),
            ends=F.coalesce("barrier_added_wall", "end_wall"),
            fenced=F.col("fenced"),
        ),
    )


def first_wrong_step() -> Column:
    """Describe the first step of an access that is out of order; null if all are in order."""
    entered, removed = F.col(_ENTERED), F.col("barrier_removed_sequence")
    stop, start_returned = F.col("stop_returned_sequence"), F.col("start_returned_sequence")
    return (
        F.when(start_returned < entered, F.lit("OnStart returned before it was called"))
        .when(stop < entered, F.lit("OnStop returned before OnStart was called"))
        .when(
            (removed < F.col("barrier_added_sequence")) & (F.col("turn") == 0),
            F.lit("the barrier was removed before it was added"),
        )
        .when(removed < entered, F.lit("OnStart was called after the barrier had been removed"))
        .when(removed < stop, F.lit("the barrier was removed before OnStop had returned"))
        .when(
            removed.isNotNull() & stopped_too_late(),
            F.lit("the removal of the barrier was requested before OnStop had returned"),
        )
        .when(
            removed.isNotNull() & (F.col("ended_by") == EndedBy.SILENCE),
            F.lit("the barrier was removed although OnStop had not returned"),
        )
        .when(
            removed.isNotNull() & (F.col("ended_by") == EndedBy.FAILURE),
            F.lit("the barrier was removed although OnStop had raised"),
        )
    )


def step_order(case: Case) -> DataFrame:
    """Accesses whose steps break the order of RB-11; without barriers these are start and stop only.

    A node requests the removal of a barrier after the last OnStop has returned. Nothing returns before it was
    entered, and nothing stops before the start. If a node started again with the same token, each start is
    judged with the stop that followed, and the barrier once.
    """
    broken = case.accesses.withColumn("wrong", first_wrong_step()).where(F.col("wrong").isNotNull())
    return findings(
        broken,
        worded(
            FindingKind.STEP_ORDER,
            rule=F.lit("RB-11"),
            sentence=text(
                "{} with token {} on {}: {}", F.col("label"), F.col("token"), subject(), F.col("wrong")
            ),
            parties=[_party()],
            evidence=[
                _witness(HistoryStep.BARRIER_ADDED),
                _witness(HistoryStep.START_ENTERED),
                _witness(HistoryStep.START_RETURNED),
                _witness(HistoryStep.STOP_RETURNED),
                _witness(HistoryStep.BARRIER_REMOVED),
            ],
            begins=F.coalesce(F.least("barrier_removed_wall", "stop_returned_wall"), "start_entered_wall"),
            ends=F.coalesce(F.greatest("barrier_removed_wall", "stop_returned_wall"), "end_wall"),
            fenced=F.col("fenced"),
        ),
    )


def _party() -> Column:
    return party(F.struct(*ACCESSES.fieldNames()))


def _witness(step: HistoryStep) -> Column:
    return witness(F.col("process"), F.col(f"{step}_sequence"), step)
