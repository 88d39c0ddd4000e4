"""The audit as a whole: from a history to the tables, the verdict, the files and the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final, Self, TypeAlias

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from rebalanser.audit.accesses import put_together
from rebalanser.audit.caching import KEPT, Keep, computed, count, cut_off, observed
from rebalanser.audit.control_records import looked_at
from rebalanser.audit.evaluation import Presence, evaluate, of_accesses
from rebalanser.audit.evidence import with_evidence
from rebalanser.audit.ingest import RAW, Ingested, parse_once, read
from rebalanser.audit.metrics import measure
from rebalanser.audit.options import Options
from rebalanser.audit.outputs import OutputFolder, write_file
from rebalanser.audit.report import build
from rebalanser.audit.sequences import gaps_of, process_counts
from rebalanser.audit.sources import LINES, NoHistory
from rebalanser.audit.tables import CLOCKS, FINDINGS, GAPS, Tables
from rebalanser.audit.verdict import Verdict, conclude, severity
from rebalanser.audit.weights import loads
from rebalanser.history import GAP

FOLDERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "findings": "FINDINGS",
        "intervals": "ACCESSES",
        "gaps": "GAPS",
        "clocks": "CLOCKS",
        "quarantine": "QUARANTINE",
        "processes": "PROCESSES",
        "rebalances": "REBALANCES",
        "unavailability": "UNAVAILABILITY",
        "handlers": "HANDLERS",
        "balance": "BALANCE",
        "leaders": "LEADERS",
        "loads": "LOADS",
    }
)
"""The folder of each table, with the name of its columns in ``rebalanser.audit.tables``."""

Step: TypeAlias = Callable[[str], None]
"""Progress callback: ``step(words)`` is called as each step begins."""


Source: TypeAlias = str | Path
"""A file or folder of JSONL or Parquet, or ``kafka://HOST:PORT/TOPIC``."""


def _untold(_words: str) -> None:
    """No-op progress callback."""


def judge(records: DataFrame, quarantine: DataFrame, options: Options, *, keep: Keep = computed) -> Tables:
    """All tables of a history, computed when they are read (AU-4, AU-6, AU-7).

    ``records`` has the columns of ``RECORDS``, in any order and possibly with duplicates; ``quarantine`` has
    all else that was read. ``keep`` may persist frames that are used several times.
    """
    if options.until is not None:
        records = records.where(f.col("wall_time") <= options.until)
    counted = keep("counting the records of each process", process_counts(records))
    of_processes, controls, of_records = looked_at(records, counted, keep)
    missing = gaps_of(counted, controls.where(f.col("kind") == GAP), records, keep)
    together = put_together(records, of_processes, keep, **of_accesses())
    owned, there = together.in_turns, Presence(**of_records, **together.are_any)
    asked = records if there.tasks or there.twice else controls
    evaluation = evaluate(asked, owned, options, keep, there=there)
    findings = _findings(evaluation.found, records, missing, options, keep)
    metrics = measure(records, owned, of_processes, options, controls)
    return Tables(
        findings=findings,
        accesses=owned,
        gaps=_or_empty(missing, records, GAPS),
        clocks=_or_empty(evaluation.clocks, records, CLOCKS),
        quarantine=keep(None, quarantine),
        processes=of_processes,
        rebalances=keep(None, metrics.rebalances),
        unavailability=keep(None, metrics.unavailability),
        handlers=keep(None, metrics.handlers),
        balance=keep(None, metrics.balance),
        leaders=keep(None, metrics.leaders),
        loads=keep(None, loads(records, options)),
    )


def _findings(
    found: DataFrame | None, records: DataFrame, gaps: DataFrame | None, options: Options, keep: Keep
) -> DataFrame:
    """Findings since ``options.since``, with their evidence."""
    if found is not None and options.since is not None:
        found = found.where(f.coalesce(f.col("ends") >= options.since, f.lit(True)))
    if found is not None:
        found, seen = observed(keep, "looking for findings", found, rows=count())
        if seen["rows"]:
            found = keep("collecting evidence", with_evidence(found, records, gaps))
    return _or_empty(found, records, FINDINGS)


def _or_empty(found: DataFrame | None, records: DataFrame, table: StructType) -> DataFrame:
    return records.sparkSession.createDataFrame([], table) if found is None else found


class Audit:
    """Findings and measurements. Use it as a context manager, or ``close`` it: it caches tables in Spark."""

    def __init__(self, spark: SparkSession, tables: Tables, kept: list[DataFrame], step: Step) -> None:
        self.tables = tables
        self._spark = spark
        self._kept = kept
        self._step = step
        self._verdict: Verdict | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the tables that are cached in Spark. Closing twice does nothing."""
        while self._kept:
            self._kept.pop().unpersist()

    def verdict(self) -> Verdict:
        """The verdict, in words and as a document; computed once."""
        if self._verdict is None:
            self._step("concluding")
            self._verdict = conclude(self.tables)
        return self._verdict

    def write(self, folder: str | Path | OutputFolder) -> None:
        """Write each table as Parquet, in place of an earlier audit's in that folder.

        Raises:
            UnusableOutput: the folder belongs to something else, or can't be written to; nothing in it was
                changed.
        """
        target = folder if isinstance(folder, OutputFolder) else OutputFolder(self._spark, str(folder))
        verdict = self.verdict()
        tables = self.tables.folders() | {"findings": severity(self.tables.findings)}
        target.write(tables, verdict.model_dump(mode="json", exclude={"worst"}), self._step)

    def report(self, path: str | Path) -> None:
        """Write the report, one HTML file of this host (AU-8).

        Raises:
            UnusableOutput: it can't be written there.
        """
        verdict = self.verdict()
        self._step("drawing the report")
        page = build(self.tables, "\n".join(verdict.sentences()))
        write_file(Path(path), page)


def audit(
    spark: SparkSession,
    history: DataFrame | Source | Sequence[Source],
    options: Options | None = None,
    *,
    step: Step = _untold,
) -> Audit:
    """Audit a history: one or more sources, or a DataFrame that has the columns of a record.

    ``step`` is called as each step begins. Close the result: it holds tables in Spark's memory and disk.

    Raises:
        NoHistory: there is no readable record; the message says what there is instead.
        KafkaUnreachable: no broker answers at the address.
    """
    chosen = options or Options()
    kept: list[DataFrame] = []

    def persist(frame: DataFrame) -> DataFrame:
        kept.append(frame.persist(KEPT))
        return frame

    def keep(words: str | None, frame: DataFrame) -> DataFrame:
        if words is None:
            return persist(frame)
        step(words)
        return cut_off(frame)

    try:
        step("reading the history")
        ingested = _ingest(spark, history, persist)
        _check_until(ingested.records, chosen.until)
        return Audit(spark, judge(ingested.records, ingested.quarantine, chosen, keep=keep), kept, step)
    except BaseException:
        for frame in kept:
            frame.unpersist()
        raise


def _ingest(
    spark: SparkSession,
    history: DataFrame | Source | Sequence[Source],
    persist: Callable[[DataFrame], DataFrame],
) -> Ingested:
    """The records of a history, kept if reading them again would be costly, as parsing JSON is."""
    if isinstance(history, DataFrame):
        ingested = parse_once(_as_raw(history))
    else:
        sources = [history] if isinstance(history, str | Path) else list(history)
        raw = read(spark, sources)
        ingested = parse_once(raw if _is_cheap_to_read(sources) else persist(raw))
    if ingested.records.isEmpty():
        raise NoHistory(f"no readable record: {_instead(ingested.quarantine)}")
    return ingested


def _check_until(records: DataFrame, until: float | None) -> None:
    if until is not None and records.where(f.col("wall_time") <= until).isEmpty():
        raise NoHistory("every record is later than `until`")


def _is_cheap_to_read(sources: Sequence[Source]) -> bool:
    """True if all sources are Parquet, by their names."""
    paths = [Path(source) for source in sources if "://" not in str(source)]
    return len(paths) == len(sources) and all(
        path.suffix == ".parquet" or (path.is_dir() and not any(any(path.rglob(f"*{end}")) for end in LINES))
        for path in paths
    )


def _as_raw(history: DataFrame) -> DataFrame:
    """A DataFrame of records with all columns of a source, null where it has none."""
    there = set(history.columns)
    columns = (f.col(field.name) if field.name in there else f.lit(None).alias(field.name) for field in RAW)
    return history.select(*(column.cast(field.dataType) for column, field in zip(columns, RAW, strict=True)))


def _instead(quarantine: DataFrame) -> str:
    """A description of what the sources hold instead of records."""
    rows = quarantine.groupBy("reason").agg(f.count("*").alias("count"), f.min("detail").alias("detail"))
    found = [
        f"{row['count']:,} {row['reason']} ({row['detail']})" for row in rows.orderBy("reason").collect()
    ]
    return ", ".join(found) or "every file is empty"
