"""One leader for each term (RB-5, SH-7)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from rebalanser.audit.invariants.findings import by_protocol, findings, named, party, text, witness, worded
from rebalanser.audit.tables import FindingKind
from rebalanser.history import HistoryStep, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from rebalanser.audit.invariants.findings import Case

_TERM: Final = ("protocol", "group", "term")
_RULES: Final = {Protocol.GROUP: "RB-5", Protocol.SHIVA: "SH-7"}


def two_leaders(case: Case) -> DataFrame:
    """Terms in which two nodes report that they were elected: certain. Of more than two, two are named."""
    elected = (
        case.records.where(F.col("step") == HistoryStep.ELECTED)
        .groupBy(*_TERM, "process", "node")
        .agg(
            F.min("sequence").alias("sequence"),
            F.min("wall_time").alias("start_entered_wall"),
            F.max("label").alias("label"),
            F.max("host").alias("host"),
        )
    )
    one = F.struct(
        "process",
        "node",
        "label",
        "host",
        "sequence",
        "start_entered_wall",
        F.lit(None).alias("token"),
        F.lit(None).alias("end_wall"),
    )
    terms = (
        elected.groupBy(*_TERM)
        .agg(F.min(one).alias("one"), F.max(one).alias("other"), F.count(F.lit(1)).alias("leaders"))
        .where(F.col("leaders") > 1)
        .withColumn("resource", F.lit(None).cast("string"))
    )
    one, other = F.col("one"), F.col("other")
    sentence = text(
        "term {} of {} had {} leaders: {} and {}",
        F.col("term"),
        F.col("group"),
        F.col("leaders"),
        named(one, other),
        named(other, one),
    )
    return findings(
        terms,
        worded(
            FindingKind.TWO_LEADERS,
            rule=by_protocol(_RULES),
            sentence=sentence,
            parties=[party(one), party(other)],
            evidence=[
                witness(one["process"], one["sequence"], HistoryStep.ELECTED),
                witness(other["process"], other["sequence"], HistoryStep.ELECTED),
            ],
            begins=F.greatest(one["start_entered_wall"], other["start_entered_wall"]),
            ends=F.greatest(one["start_entered_wall"], other["start_entered_wall"]),
        ),
    )
