"""Export of records to a new file or folder, all or nothing: lines of JSON, or Parquet by Spark."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from pydantic import BaseModel, ConfigDict, Field

from rebalanser.cli.audit_stream import Steps
from rebalanser.cli.history_sources import SUFFIX
from rebalanser.cli.history_stats import UnreadableStats
from rebalanser.cli.output import counted
from rebalanser.errors import UnusableHistory, UnusableOutput
from rebalanser.history import Record

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

FILE_NAME: Final = f"history{SUFFIX}"
"""File name of an export into a folder."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A selection of records. Times are seconds since 1970, inclusive."""

    since: float | None = None
    until: float | None = None
    group: str | None = None
    resource: str | None = None
    kind: str | None = None

    def takes(self, record: Record) -> bool:
        """Return True if the record is selected."""
        return (
            (self.since is None or record.wall_time >= self.since)
            and (self.until is None or record.wall_time <= self.until)
            and (self.group is None or record.group == self.group)
            and (self.resource is None or record.resource == self.resource)
            and (self.kind is None or record.kind == self.kind)
        )


class Exported(BaseModel):
    """Result of an export."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    to: str
    format: str
    records: int
    unreadable: int = Field(description="lines that are not records and so not in the export")

    def sentence(self) -> str:
        """Return the result in one line."""
        rest = f"; {counted(self.unreadable, 'line')} left out: not records" if self.unreadable else ""
        return f"wrote {counted(self.records, 'record')} to {self.to}{rest}"


def refuse_overwriting(to: Path) -> None:
    """Check that ``to`` does not exist, or is an empty folder.

    Raises:
        UnusableOutput: ``to`` has something.
    """
    try:
        if to.is_dir():
            taken = "the folder is not empty" if next(to.iterdir(), None) else None
        else:
            taken = "the file exists" if to.exists() or to.is_symlink() else None
    except OSError as error:
        raise _unwritable(to, error) from None
    if taken is not None:
        raise UnusableOutput(f"{to} is not overwritten: {taken}; name a new one with --to")


def export_lines(to: Path, records: Iterable[Record]) -> int:
    """Write the records as lines of JSON, and return their number.

    ``to`` is a new file, or a folder unless its name ends in ``.jsonl``.

    Raises:
        UnusableOutput: ``to`` exists, can't be written, or there is no record.
    """
    refuse_overwriting(to)
    with _whole_or_nothing(to) as file:
        count = 0
        for record in records:
            file.write(record.to_line())
            count += 1
        if not count:
            raise UnusableOutput(f"no record matches the options; nothing was written to {to}")
    return count


@contextmanager
def _whole_or_nothing(to: Path) -> Iterator[BinaryIO]:
    """Open a file that is moved to its place once it is complete."""
    try:
        with tempfile.TemporaryDirectory(prefix=".rebalanser-export-", dir=to.parent) as workshop:
            folder = Path(workshop, "export")
            folder.mkdir()
            with (folder / FILE_NAME).open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            into_folder = to.is_dir() or to.suffix != SUFFIX
            refuse_overwriting(to)
            (folder if into_folder else folder / FILE_NAME).rename(to)
    except OSError as error:
        raise _unwritable(to, error) from None


def _unwritable(to: Path, error: OSError) -> UnusableOutput:
    return UnusableOutput(f"{to} can't be written: {error.strerror or error}; nothing is left there")


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
