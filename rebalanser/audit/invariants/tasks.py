"""Invariants of Skuld: one claim at a time, updates without a gap, no write of a superseded claim."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from rebalanser.audit.invariants.findings import findings, named, party, subject, text, witness, worded
from rebalanser.audit.owner_pairs import SERIES
from rebalanser.audit.running_max import bucketed, running_max
from rebalanser.audit.tables import ACCESSES, FindingKind
from rebalanser.history import HistoryStep, Protocol

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from rebalanser.audit.invariants.findings import Case

_CLAIM: Final = (*SERIES, "token", "process", "node")


def claim_twice(case: Case) -> DataFrame:
    """Claims of a task with one number, or one token, held by two workers or given twice (SK-6): certain."""
    claims = case.accesses.where(_in_skuld() & F.col("start_entered_sequence").isNotNull())
    return _held_twice(claims, "claim").unionByName(_held_twice(claims, "token"))


def update_gap(case: Case) -> DataFrame:
    """Claims whose accepted updates are not numbered 0, 1, 2... without a gap (SK-9)."""
    numbers = (
        case.records.where(_in_skuld() & (F.col("step") == HistoryStep.UPDATED) & F.col("value").isNotNull())
        .groupBy(*_CLAIM, F.col("value").cast("long").alias("number"))
        .agg(F.min("sequence").alias("sequence"), F.min("wall_time").alias("wall"))
    )
    broken = (
        numbers.groupBy(*_CLAIM)
        .agg(
            F.count(F.lit(1)).alias("present"),
            F.max("number").alias("last"),
            F.min_by("sequence", "number").alias("first_sequence"),
            F.max_by("sequence", "number").alias("last_sequence"),
            F.min("wall").alias("start_entered_wall"),
            F.max("wall").alias("end_wall"),
        )
        .where(F.col("present") != F.col("last") + 1)
    )
    sentence = text(
        "{} of the updates 0 to {} of {} (token {}) are missing",
        F.col("last") + 1 - F.col("present"),
        F.col("last"),
        subject(),
        F.col("token"),
    )
    return findings(
        broken,
        worded(
            FindingKind.UPDATE_GAP,
            rule=F.lit("SK-9"),
            sentence=sentence,
            parties=[party(_writer())],
            evidence=[
                witness(F.col("process"), F.col("first_sequence"), HistoryStep.UPDATED),
                witness(F.col("process"), F.col("last_sequence"), HistoryStep.UPDATED),
            ],
            begins=F.col("start_entered_wall"),
            ends=F.col("end_wall"),
        ),
    )


def stale_write(case: Case) -> DataFrame:
    """Updates and completions accepted after a later claim had been granted, by revisions (SK-10)."""
    steps = F.col("step").isin(HistoryStep.START_ENTERED, HistoryStep.UPDATED, HistoryStep.FINISHED)
    granted = F.col("step") == HistoryStep.START_ENTERED
    written_at = F.when(~granted, F.col("revision"))
    claims = (
        case.records.where(_in_skuld() & steps & F.col("token").isNotNull())
        .groupBy(*_CLAIM)
        .agg(
            F.min(F.when(granted, F.coalesce("revision", "token"))).alias("granted"),
            F.min_by("sequence", F.when(granted, F.col("sequence"))).alias("granted_sequence"),
            F.max(written_at).alias("written"),
            F.max_by("sequence", written_at).alias("written_sequence"),
            F.max_by("wall_time", written_at).alias("written_wall"),
            F.min(F.when(granted, F.col("wall_time"))).alias("start_entered_wall"),
        )
        .withColumn("newest_first", -F.col("token"))
    )
    later = F.struct((-F.col("granted")).alias("key"), "token", "process", "node", "granted_sequence")
    cut = bucketed(claims, SERIES, "newest_first", case.options.crowded)
    superseded = running_max(
        cut,
        SERIES,
        ("newest_first", "process", "node"),
        {"later": F.when(F.col("granted").isNotNull(), later)},
    ).where((F.col("written") > -F.col("later.key")) & (F.col("later.token") > F.col("token")))
    sentence = text(
        "a write of the claim with token {} of {} was accepted at revision {}, "
        "though the claim with token {} was granted at revision {}",
        F.col("token"),
        subject(),
        F.col("written"),
        F.col("later.token"),
        -F.col("later.key"),
    )
    return findings(
        superseded.withColumn("end_wall", F.col("written_wall")),
        worded(
            FindingKind.STALE_WRITE,
            rule=F.lit("SK-10"),
            sentence=sentence,
            parties=[party(_writer())],
            evidence=[
                witness(F.col("process"), F.col("written_sequence"), HistoryStep.UPDATED),
                witness(F.col("later.process"), F.col("later.granted_sequence"), HistoryStep.START_ENTERED),
            ],
            begins=F.col("written_wall"),
            ends=F.col("written_wall"),
        ),
    )


def _held_twice(claims: DataFrame, name: str) -> DataFrame:
    """Claims held twice under one number; or under one token, if the numbers differ."""
    twice = (
        claims.where(F.col(name).isNotNull())
        .groupBy(*SERIES, name)
        .agg(F.count(F.lit(1)).alias("held"), F.min("claim").alias("least"), F.max("claim").alias("most"))
        .where((F.col("held") > 1) & (F.lit(name == "claim") | ~F.col("least").eqNullSafe(F.col("most"))))
        .drop("least", "most")
    )
    held = F.struct("start_entered_wall", *(c for c in ACCESSES.fieldNames() if c != "start_entered_wall"))
    pairs = (
        claims.join(twice, [*SERIES, name])
        .groupBy(*SERIES, name, "held")
        .agg(F.min(held).alias("one"), F.max(held).alias("other"))
    )
    one, other = F.col("one"), F.col("other")
    sentence = text(
        f"{name} {{}} of {{}} was held {{}} times, by {{}} and by {{}}",
        F.col(name),
        subject(),
        F.col("held"),
        named(one, other),
        named(other, one),
    )
    return findings(
        pairs,
        worded(
            FindingKind.CLAIM_TWICE,
            rule=F.lit("SK-6"),
            sentence=sentence,
            parties=[party(one), party(other)],
            evidence=[
                witness(one["process"], one["start_entered_sequence"], HistoryStep.START_ENTERED),
                witness(other["process"], other["start_entered_sequence"], HistoryStep.START_ENTERED),
            ],
            begins=other["start_entered_wall"],
            ends=F.least(one["end_wall"], other["end_wall"]),
            fenced=one["fenced"] & other["fenced"],
        ),
    )


def _writer() -> Column:
    """The owner of the present row, as far as its records of writes show."""
    return F.struct(
        "node",
        "process",
        "token",
        "start_entered_wall",
        "end_wall",
        F.lit(None).alias("label"),
        F.lit(None).alias("host"),
    )


def _in_skuld() -> Column:
    return F.col("protocol") == str(Protocol.SKULD)
