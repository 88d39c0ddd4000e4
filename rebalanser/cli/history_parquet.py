"""Export of a history as Parquet, by Spark and the audit's reader."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rebalanser.cli.history_export import Filter, refuse_overwriting
from rebalanser.cli.history_stats import UnreadableStats
from rebalanser.cli.spark_progress import Steps
from rebalanser.errors import UnusableHistory, UnusableOutput

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def export_parquet(
    places: Sequence[str], to: Path, wanted: Filter, step: Steps
) -> tuple[int, list[UnreadableStats]]:
    """Write the records to the new folder ``to``, one row each with the columns of the schema.

    Returns the number of records and the unreadable lines. ``step`` is called with each step that begins.

    Raises:
        MissingExtra: the packages of the extra ``spark`` are not installed.
        SparkUnusable: there is no Java, or an unsupported version.
        NoHistory: a place has no history; the message says what it has.
        UnusableHistory: no line is a record.
        UnusableOutput: ``to`` exists, can't be written, or no record matches.
    """
    from rebalanser.audit import ingest, session  # noqa: PLC0415 - what needs Spark is loaded when asked for
    from rebalanser.audit.outputs import reason  # noqa: PLC0415
    from rebalanser.audit.schema import RECORD  # noqa: PLC0415

    refuse_overwriting(to)
    step("starting Spark")
    spark = session.session(kafka=any(place.startswith("kafka://") for place in places))
    step.watch(spark)
    found = ingest.parse(ingest.read(spark, places))
    try:
        with tempfile.TemporaryDirectory(prefix=".rebalanser-export-", dir=to.parent) as workshop:
            folder = Path(workshop).resolve() / "export"
            step("writing Parquet")
            found.records.where(_condition(wanted)).select(*RECORD.names).write.parquet(folder.as_uri())
            step("counting unreadable lines")
            unreadable = _unreadable(found.quarantine)
            count = spark.read.parquet(folder.as_uri()).count()
            _require_records(count, unreadable, to, found.records)
            refuse_overwriting(to)
            folder.rename(to)
    except OSError as error:
        raise UnusableOutput(f"{to} can't be written: {error.strerror or error}; nothing is left") from None
    except _spark_errors() as error:
        raise UnusableOutput(f"{to} can't be written: {reason(error)}; nothing is left") from None
    return count, unreadable


def _spark_errors() -> tuple[type[Exception], ...]:
    from py4j.protocol import Py4JJavaError  # noqa: PLC0415
    from pyspark.errors import PySparkException  # noqa: PLC0415

    return (Py4JJavaError, PySparkException)


def _condition(wanted: Filter) -> Column:
    """Return the times and group of a ``Filter`` as a condition on columns."""
    from pyspark.sql import functions as f  # noqa: PLC0415

    condition = f.lit(True)
    if wanted.since is not None:
        condition &= f.col("wall_time") >= wanted.since
    if wanted.until is not None:
        condition &= f.col("wall_time") <= wanted.until
    if wanted.group is not None:
        condition &= f.col("group") == wanted.group
    return condition


def _unreadable(quarantine: DataFrame) -> list[UnreadableStats]:
    """Return the quarantine: a row for each of the few reasons, with one example each."""
    from pyspark.sql import functions as f  # noqa: PLC0415

    example = f.min(f.struct("source", "position", "detail")).alias("example")
    rows = quarantine.groupBy("reason").agg(f.count("*").alias("lines"), example).collect()
    return [
        UnreadableStats(
            reason=row.reason,
            lines=row.lines,
            first=": ".join(str(part) for part in row.example if part is not None),
        )
        for row in sorted(rows, key=lambda row: (-row.lines, row.reason))
    ]


def _require_records(count: int, unreadable: list[UnreadableStats], to: Path, records: DataFrame) -> None:
    if count:
        return
    if unreadable and records.isEmpty():
        reasons = ", ".join(f"{each.lines:,} {each.reason}" for each in unreadable)
        raise UnusableHistory(f"there is no record, only other lines ({reasons}): {unreadable[0].first}")
    raise UnusableOutput(f"no record matches the options; nothing was written to {to}")
