"""Locations of the records that show a finding, and the gaps that could hide or explain it (AU-2, AU-4).

Spark reads a file in pieces in parallel and does not know line numbers. They are looked up only in the files
that have a record of evidence: those are read once more as text, the lines of each piece are counted, and the
lines of the pieces before it are added.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from rebalanser.audit.caching import computed, observed
from rebalanser.audit.ingest import parse, parse_lines
from rebalanser.audit.sequences import NUMBERED, content
from rebalanser.audit.sources import escaped, spark_path
from rebalanser.audit.tables import FINDINGS, WITNESS, Certainty, FindingKind
from rebalanser.history import HistoryStep

MAX_FILES: Final = 1000
"""Maximum number of files in which lines are looked up; evidence in further ones has only its file."""
_NAME: Final = (*NUMBERED, "sequence")
_WHERE: Final = ("source", "position")
_BETWEEN: Final = (FindingKind.STEP_ORDER, FindingKind.UPDATE_GAP)


def with_evidence(
    found: DataFrame, records: DataFrame, gaps: DataFrame | None, *, has_lines: bool = False
) -> DataFrame:
    """Findings with the details of their witnesses, and with the gaps that make them doubtful.

    ``found`` are the findings of the invariants, whose witnesses have ``process`` and ``sequence`` and as
    ``kind`` the step; it is used several times, and should be cut off from its plan. If one of ``gaps`` could
    change a verdict it is named and the finding is ``possible`` (AU-2); without ``gaps`` there are none.
    ``has_lines`` is true if all records have a ``position`` already.
    """
    doubted = found if gaps is None else _with_gap(found, gaps)
    return _with_witnesses(doubted, records, has_lines).select(*FINDINGS.names)


def numbered_lines(records: DataFrame) -> DataFrame:
    """The records with a null ``position`` that were read from files that still exist, with their line.

    The lines of up to ``MAX_FILES`` files are counted, from 1 on. Columns: the name, ``content``, ``source``
    and ``position``.
    """
    spark = records.sparkSession
    without = records.where("position is null")
    sources = [row["source"] for row in without.select("source").distinct().limit(MAX_FILES).collect()]
    paths = [path for source in sources if (path := _path_of(source)) is not None]
    text = _lines(spark.read.option("lineSep", "\n").text(paths)) if paths else None
    if text is None:
        return without.select(*_NAME, "content", *_WHERE).limit(0)
    read_again = parse(parse_lines(text.select("value", "source", F.col("number").alias("position")))).records
    wanted = without.select(*_NAME, "content", "source").distinct()
    again = read_again.withColumn("content", content()).select(*_NAME, "content", *_WHERE)
    hits = again.join(F.broadcast(wanted), [*_NAME, "content", "source"], "left_semi")
    pieces = F.broadcast(_pieces(text)).alias("piece")
    inside = (
        (F.col("hit.source") == F.col("piece.source"))
        & (F.col("position") >= F.col("piece.begins"))
        & (F.col("position") < F.col("piece.begins") + F.col("piece.lines"))
    )
    line = F.col("position") - F.col("piece.begins") + F.col("piece.before") + 1
    return (
        hits.alias("hit")
        .join(pieces, inside)
        .select(*(F.col(f"hit.{name}") for name in (*_NAME, "content", "source")), line.alias("position"))
    )


def _lines(text: DataFrame) -> DataFrame:
    """Each line with its file, the byte at which its piece of the file begins, and a number that grows."""
    return text.select(
        "value",
        F.col("_metadata.file_path").alias("source"),
        F.col("_metadata.file_block_start").alias("piece"),
        F.monotonically_increasing_id().alias("number"),
    )


def _pieces(text: DataFrame) -> DataFrame:
    """Each piece of each file with the number of its first line, its lines, and the lines ``before`` it."""
    earlier = Window.partitionBy("source").orderBy("piece").rowsBetween(Window.unboundedPreceding, -1)
    return (
        text.groupBy("source", "piece")
        .agg(F.min("number").alias("begins"), F.count(F.lit(1)).alias("lines"))
        .withColumn("before", F.coalesce(F.sum("lines").over(earlier), F.lit(0)))
    )


def _path_of(source: str) -> str | None:
    """The path, as Spark reads it, of a file's URI; None if it no longer exists."""
    parts = urlsplit(source)
    if not parts.scheme:
        return None
    if parts.scheme != "file":
        return escaped(unquote(source))
    path = Path(unquote(parts.path))
    return spark_path(path) if os.access(path, os.R_OK) else None


def _with_witnesses(found: DataFrame, records: DataFrame, has_lines: bool) -> DataFrame:
    """All records that have the names of the witnesses: two of a name if they differ, else one."""
    named = found.select("id", *NUMBERED[:2], F.posexplode("evidence").alias("place", "witness")).select(
        "id",
        *NUMBERED[:2],
        "place",
        "witness.process",
        "witness.sequence",
        F.col("witness.kind").alias("step"),
    )
    wanted = named.select(*_NAME).distinct()
    copies = (
        records.join(F.broadcast(wanted), list(_NAME), "left_semi")
        .withColumn("content", content())
        .groupBy(*_NAME, "content")
        .agg(F.min(F.struct(*_WHERE, "kind", "wall_time", "revision")).alias("first"))
        .select(*_NAME, "content", "first.*")
    )
    seen = copies if has_lines else _with_lines(copies)
    kind = F.coalesce("kind", "step").alias("kind")
    witness = F.struct(*(kind if name == "kind" else F.col(name) for name in WITNESS.names)).cast(WITNESS)
    evidence = (
        named.join(seen, list(_NAME), "left")
        .groupBy("id")
        .agg(F.sort_array(F.collect_list(F.struct("place", *_WHERE, witness.alias("witness")))).alias("all"))
        .select("id", F.col("all.witness").alias("evidence"))
    )
    return (
        found.drop("evidence")
        .join(evidence, "id", "left")
        .withColumn("evidence", F.coalesce("evidence", F.array().cast(FINDINGS["evidence"].dataType)))
    )


def _with_lines(copies: DataFrame) -> DataFrame:
    """The records with the lines of those that have no ``position``, if there are any."""
    without_line = F.count_if(F.col("position").isNull())
    copies, met = observed(computed, "collecting evidence", copies, without_line=without_line)
    if not met["without_line"]:
        return copies
    lines = numbered_lines(copies).groupBy(*_NAME, "content", "source").agg(F.min("position").alias("line"))
    return copies.join(lines, [*_NAME, "content", "source"], "left").withColumn(
        "position", F.coalesce("position", "line")
    )


def _with_gap(found: DataFrame, gaps: DataFrame) -> DataFrame:
    """Describe the first gap that makes a finding doubtful, and count the others."""
    doubts = (
        _doubted_by_process(found, gaps)
        .unionByName(_doubted_by_group(found, gaps))
        .groupBy("id")
        .agg(F.min(F.struct("first", "words")).alias("gap"), F.count(F.lit(1)).alias("count"))
        .select(
            "id",
            F.concat(
                "gap.words",
                F.when(F.col("count") > 1, F.format_string(", and %d more", F.col("count") - 1)).otherwise(
                    ""
                ),
            ).alias("behind"),
        )
    )
    certainty = F.when(F.col("behind").isNotNull(), str(Certainty.POSSIBLE)).otherwise(F.col("certainty"))
    return (
        found.join(doubts, "id", "left")
        .withColumns({"certainty": certainty, "gap": F.col("behind")})
        .drop("behind")
    )


def _doubted_by_process(found: DataFrame, gaps: DataFrame) -> DataFrame:
    """Gaps in the records of an involved process that could hold what a finding misses.

    An OnStart without a barrier could have had it in any earlier gap, and a claim its updates. Steps could
    have been taken in a gap between those recorded. An access that has no recorded end could have ended in a
    later gap.
    """
    witnesses = F.explode(F.filter("evidence", _may_doubt))
    concerned = (
        found.select("id", "kind", "protocol", "group", "ends", witnesses.alias("witness"))
        .groupBy("id", "kind", "protocol", "group", "ends", F.col("witness.process").alias("process"))
        .agg(F.min("witness.sequence").alias("least"), F.max("witness.sequence").alias("greatest"))
    )
    kind = F.col("kind")
    could = (
        F.when(kind == str(FindingKind.START_WITHOUT_BARRIER), F.col("first") <= F.col("greatest"))
        .when(
            kind == str(FindingKind.OVERLAP),
            (F.col("last") > F.col("least")) & (F.coalesce("after_wall", "ends") <= F.col("ends")),
        )
        .when(kind == str(FindingKind.UPDATE_GAP), F.col("first") < F.col("greatest"))
        .otherwise((F.col("last") > F.col("least")) & (F.col("first") < F.col("greatest")))
    )
    return (
        concerned.join(gaps.drop("label"), list(NUMBERED))
        .where(could)
        .select("id", "first", _words().alias("words"))
    )


def _may_doubt(witness: Column) -> Column:
    """True if a gap of this witness's process can change the verdict."""
    kind = F.col("kind")
    of_former_owner = witness["process"] == F.col("evidence")[0]["process"]
    has_ended = F.exists("evidence", lambda other: other["kind"] == str(HistoryStep.STOP_RETURNED))
    return kind.isin(str(FindingKind.START_WITHOUT_BARRIER), *map(str, _BETWEEN)) | (
        (kind == str(FindingKind.OVERLAP)) & of_former_owner & ~has_ended
    )


def _doubted_by_group(found: DataFrame, gaps: DataFrame) -> DataFrame:
    """Gaps of any process of the group within the time that a resource was unowned."""
    unowned = found.where(F.col("kind") == str(FindingKind.UNOWNED)).select(
        "id", "protocol", "group", "begins", "ends"
    )
    meanwhile = (F.coalesce("after_wall", "begins") <= F.col("ends")) & (
        F.coalesce("before_wall", "ends") >= F.col("begins")
    )
    return (
        unowned.join(gaps, ["protocol", "group"])
        .where(meanwhile)
        .select("id", "first", _words().alias("words"))
    )


def _words() -> Column:
    """A gap in words: its process, numbers, times and reason."""
    numbers = F.when(F.col("first") == F.col("last"), F.format_string("record %d of", "first")).otherwise(
        F.format_string("records %d to %d of", "first", "last")
    )
    between = F.concat(
        F.coalesce(F.concat(F.lit("after "), _time("after_wall")), F.lit("")),
        F.when(F.col("after_wall").isNotNull() & F.col("before_wall").isNotNull(), ", ").otherwise(""),
        F.coalesce(F.concat(F.lit("before "), _time("before_wall")), F.lit("")),
    )
    return F.concat_ws(" ", numbers, F.col("process"), F.concat(F.lit("("), "reason", F.lit(")")), between)


def _time(wall: str) -> Column:
    local = F.timestamp_seconds(wall)
    return F.date_format(F.to_utc_timestamp(local, F.current_timezone()), "yyyy-MM-dd'T'HH:mm:ss.SSS'Z'")
