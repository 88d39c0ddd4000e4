"""Makes records of JSONL files, Parquet files and Kafka topics, and quarantines all else (AU-1).

**Reading** gives the same columns from every source: those of a record as far as they are there, ``raw`` with
the text of a line that is not what the schema says, and where it was read. The JSON is parsed once, by
Spark's own scan, which skips unused fields. **Parsing** is one condition on these columns: a row is a record
if it is met and goes to quarantine if not, so that none is lost, in batch and in a stream.

A record with a field that the schema does not know counts: a later release may write more fields. A number or
truth value where text belongs is read as its text. A record of schema version 1 is read as one of version 2:
it is a group's, and its process is its node without the incarnation's number. A line longer than any record
of ours counts too if it is a record. Only blank lines and an empty JSON array are ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Final

from annotated_types import Ge
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom
from pyspark.sql.types import AtomicType, StringType, StructField, StructType

from rebalanser.audit.caching import computed, count, observed, once
from rebalanser.audit.schema import RECORD, RECORDS, step_of
from rebalanser.audit.session import KAFKA_PACKAGE, KafkaConnectorMissing
from rebalanser.audit.sources import LINES, ROWS, InvalidTopic, KafkaTopic, NoHistory, Places, places
from rebalanser.audit.tables import QUARANTINE, SOURCE_COLUMNS
from rebalanser.errors import FixConfiguration
from rebalanser.history import KINDS, SCHEMA_VERSION, Record, UnreadableReason
from rebalanser.history.reader import MAX_LINE_BYTES
from rebalanser.history.version_1 import (
    DEFAULTS_OF_VERSION_1,
    INCARNATION_OF_NODE,
    OLDEST_VERSION,
    VALUE_IN_DETAIL_OF_VERSION_1,
)

MAX_RAW: Final = 4096
"""Maximum characters of a line that quarantine keeps."""
READABLE_VERSIONS: Final = tuple(range(OLDEST_VERSION, SCHEMA_VERSION + 1))

_RAW: Final = StructField("raw", StringType())
RAW: Final = StructType([*RECORD, _RAW, *SOURCE_COLUMNS])
"""Columns as read, before validation. All but ``source`` may be null."""
PARSED: Final = StructType([*RECORD, _RAW])
"""Columns for the JSON parser, which fills ``raw`` itself."""
JSON_OPTIONS: Final = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": _RAW.name,
    "allowNonNumericNumbers": "false",
}

_SPARK_ERRORS: Final = (PySparkException, Py4JJavaError)
"""Errors that Spark raises: those that PySpark knows, and all others."""
_REQUIRED: Final = tuple(name for name, field in Record.model_fields.items() if field.is_required())
_NEVER_NEGATIVE: Final = tuple(
    name
    for name, field in Record.model_fields.items()
    if any(isinstance(limit, Ge) and limit.ge == 0 for limit in field.metadata)
)


@dataclass(frozen=True, slots=True)
class Ingested:
    """Result of ingestion: every line, row or message of a source is in one of the two."""

    records: DataFrame
    """Valid records, with the columns of ``RECORDS``."""
    quarantine: DataFrame
    """All else, with the columns of ``QUARANTINE``."""


def read(spark: SparkSession, sources: Iterable[str | os.PathLike[str]]) -> DataFrame:
    """Read all that the sources have now, with the columns of ``RAW``; Kafka from the earliest offset on.

    ``rebalanser.audit.sources.places`` describes sources.

    Raises:
        NoHistory: a path does not exist, or has no file of a history in it.
        InvalidTopic: the URL of a topic cannot be used, or there is no such topic.
        KafkaUnreachable: no broker answers at the address.
    """
    found = places(sources)
    return reduce(DataFrame.unionByName, _raws(spark, found))


def parse(raw: DataFrame) -> Ingested:
    """Separate valid records from invalid lines, in batch or stream; ``raw`` has the columns of ``RAW``."""
    upgraded = _upgraded(raw)
    good = _is_record()
    records = upgraded.where(good).withColumns(
        {
            "step": step_of(F.col("protocol"), F.col("kind")),
            "schema_version": F.lit(SCHEMA_VERSION).cast("long"),
        }
    )
    return Ingested(records.select(*RECORDS.names), _quarantined(upgraded.where(~good)))


def parse_once(raw: DataFrame) -> Ingested:
    """``parse``, with a check at once: if all rows are records, later queries do not check them again.

    Later queries then read only the columns that they need. ``raw`` is read several times.
    """
    (row,) = raw.agg(F.count_if(~is_current()).alias("others")).collect()
    if not row["others"]:
        return Ingested(with_step(raw), raw.sparkSession.createDataFrame([], QUARANTINE))
    others = parse(raw.where(~is_current()))
    older, seen = observed(computed, "reading records of older versions", others.records, rows=count())
    records = with_step(raw.where(is_current()))
    return Ingested(records.unionByName(older) if seen["rows"] else records, others.quarantine)


def with_step(current: DataFrame) -> DataFrame:
    """The records that these rows are; ``is_current`` holds of each."""
    return current.withColumn("step", _step()).select(*RECORDS.names)


@once
def _step() -> Column:
    return step_of(F.col("protocol"), F.col("kind"))


@once
def is_current() -> Column:
    """True if a row is a record of this schema version; never null. All others are for ``parse``."""
    return F.coalesce((F.col("schema_version") == SCHEMA_VERSION) & _is_record(), F.lit(False))


def parse_lines(lines: DataFrame) -> DataFrame:
    """Rows with the columns of ``RAW``, of lines of JSON: ``value``, ``source`` and ``position``.

    Blank lines are left out.
    """
    # A generator, unlike a projection, is not evaluated again for every later condition on its columns.
    parsed = F.inline(F.array(F.from_json("value", PARSED, JSON_OPTIONS)))
    # To trim a line takes as long as to look at all of it: most are spared that.
    value = F.col("value")
    blank = ~value.startswith("{") & (F.trim(value, F.lit(" \t\r\n")) == "")
    filled = lines.where(~F.coalesce(blank, F.lit(False)))
    return filled.select(parsed, *SOURCE_COLUMNS.names).select(*RAW.names)


def _raws(spark: SparkSession, found: Places) -> Iterator[DataFrame]:
    """One frame for each way of reading. Folders are read with all their files, files under any name."""
    lines = spark.read.schema(PARSED).options(**JSON_OPTIONS)
    if found.line_files:
        yield _raw_lines(lines.json(list(found.line_files)))
    if found.line_folders:
        yield _raw_lines(lines.options(**_within(LINES)).json(list(found.line_folders)))
    if found.row_files:
        yield _raw_rows(spark.read, found.row_files)
    if found.row_folders:
        yield _raw_rows(spark.read.options(**_within(ROWS)), found.row_folders)
    for topic in found.topics:
        yield _raw_messages(spark, topic)


def _within(endings: Iterable[str]) -> dict[str, str]:
    names = ",".join(f"*{ending}" for ending in endings)
    return {"recursiveFileLookup": "true", "pathGlobFilter": f"{{{names}}}"}


def _raw_lines(lines: DataFrame) -> DataFrame:
    """The rows of Spark's JSON scan, which has parsed the lines already."""
    source = F.col("_metadata.file_path").alias("source")
    return lines.select(*PARSED.names, source, F.lit(None).cast("long").alias("position"))


def _raw_rows(reader: DataFrameReader, paths: Iterable[str]) -> DataFrame:
    """Rows of Parquet files. A missing column is null, one of another type is cast if it can be."""
    paths = list(paths)
    try:
        rows = reader.parquet(*paths)
    except _SPARK_ERRORS as error:
        raise NoHistory(f"{', '.join(paths)} can't be read as Parquet: {_reason_of(error)}") from error
    given = {column.name: column.dataType for column in rows.schema}
    columns = []
    for name, wanted in ((column.name, column.dataType) for column in RECORD):
        there = given.get(name)
        if there is None or there == wanted:
            column = F.col(name) if there else F.lit(None).cast(wanted)
        elif isinstance(there, AtomicType) and isinstance(wanted, AtomicType):
            column = F.col(name).try_cast(wanted)
        else:
            raise NoHistory(
                f"{', '.join(paths)}: the column {name!r} is {there.simpleString()}; in a history it is "
                f"{wanted.simpleString()}"
            )
        columns.append(column.alias(name))
    raw = F.lit(None).cast("string").alias(_RAW.name)
    where = (F.col("_metadata.file_path").alias("source"), F.col("_metadata.row_index").alias("position"))
    return rows.select(*columns, raw, *where)


def _raw_messages(spark: SparkSession, topic: KafkaTopic) -> DataFrame:
    """All messages that a topic has now, read by as many tasks as there are cores."""
    topic.check()
    reader = spark.read.format("kafka").options(
        **kafka_options(topic),
        startingOffsets="earliest",
        endingOffsets="latest",
        minPartitions=str(spark.sparkContext.defaultParallelism),
    )
    try:
        messages = reader.load()
        messages.isEmpty()
    except _SPARK_ERRORS as error:
        raise _topic_error(topic, error) from error
    return parse_messages(messages)


def kafka_options(topic: KafkaTopic) -> dict[str, str]:
    """Options of Spark's connector for a topic, in batch and as a stream.

    Messages that the topic's retention deletes before they are read show as a gap of their process, so their
    loss is no failure.
    """
    return {
        **topic.options,
        "kafka.bootstrap.servers": topic.servers,
        "subscribe": topic.name,
        "failOnDataLoss": "false",
        "kafka.default.api.timeout.ms": "15000",
        "kafka.request.timeout.ms": "10000",
    }


def parse_messages(messages: DataFrame) -> DataFrame:
    """Rows with the columns of ``RAW`` of the messages that Spark's connector gives."""
    return parse_lines(
        messages.select(
            F.col("value").cast("string").alias("value"),
            F.concat_ws("/", "topic", "partition").alias("source"),
            F.col("offset").alias("position"),
        )
    )


def _topic_error(topic: KafkaTopic, error: Exception) -> FixConfiguration:
    told = str(error)
    if "UnknownTopicOrPartition" in told:
        return InvalidTopic(f"{topic.servers} has no topic {topic.name!r}")
    if "Failed to find data source: kafka" in told or "DATA_SOURCE_NOT_FOUND" in told:
        return KafkaConnectorMissing(
            f"this Spark session cannot read Kafka: start it with --packages {KAFKA_PACKAGE}"
        )
    return InvalidTopic(f"{topic} can't be read: {_reason_of(error)}")


def _reason_of(error: Exception) -> str:
    told = str(error.java_exception if isinstance(error, Py4JJavaError) else error)
    return told.strip().partition("\n")[0]


def _upgraded(raw: DataFrame) -> DataFrame:
    """Rows with the fields that version 1 lacked, as ``rebalanser.history.version_1.upgrade`` sets them."""
    first = F.col("schema_version") == 1
    added = {name: F.lit(value) for name, value in DEFAULTS_OF_VERSION_1.items() if value is not None}
    added["process"] = F.regexp_replace("node", INCARNATION_OF_NODE, "")
    added["value"] = reduce(
        lambda rest, kind: F.when(F.col("kind") == kind, _number_in_detail(kind)).otherwise(rest),
        VALUE_IN_DETAIL_OF_VERSION_1,
        F.lit(None),
    )
    return raw.withColumns(
        {name: F.when(first, value).otherwise(F.col(name)) for name, value in added.items()}
    )


def _number_in_detail(kind: str) -> Column:
    return F.col("detail")[VALUE_IN_DETAIL_OF_VERSION_1[kind]].try_cast("double")


def _is_record() -> Column:
    """True if a row matches the schema; never null."""
    conditions = [
        F.col(_RAW.name).isNull(),
        F.col("schema_version").isin(*READABLE_VERSIONS),
        *(F.col(name).isNotNull() for name in _REQUIRED),
        *(_not_negative(name) for name in _NEVER_NEGATIVE),
        _kind_is_known(),
    ]
    return F.coalesce(reduce(and_, conditions), F.lit(False))


def _not_negative(name: str) -> Column:
    at_least = F.col(name) >= 0
    return at_least if name in _REQUIRED else at_least | F.col(name).isNull()


def _kind_is_known() -> Column:
    return reduce(
        or_,
        (
            (F.col("protocol") == str(name)) & F.col("kind").isin([str(word) for word in words])
            for name, words in KINDS.items()
        ),
    )


def _quarantined(bad: DataFrame) -> DataFrame:
    """The rows of the quarantine table, with the reason of each."""
    judged = bad.withColumn("reason", _reason())
    return judged.select(
        "source",
        "position",
        "reason",
        _detail(F.col("reason")).alias("detail"),
        F.left(F.coalesce(_RAW.name, F.to_json(F.struct(*RECORD.names))), F.lit(MAX_RAW)).alias("raw"),
    )


def _reason() -> Column:
    raw = F.col(_RAW.name)
    is_json = F.try_parse_json(raw).isNotNull()
    cut_off = raw.startswith("{") & (
        ~F.rtrim(raw).endswith("}") | F.try_parse_json(F.concat(raw, F.lit("}"))).isNotNull()
    )
    return (
        F.when(F.octet_length(raw) >= MAX_LINE_BYTES, str(UnreadableReason.TOO_LONG))
        .when(F.col("schema_version") > SCHEMA_VERSION, str(UnreadableReason.NEWER_SCHEMA))
        .when(raw.isNull() | is_json, str(UnreadableReason.NOT_A_RECORD))
        .when(cut_off, str(UnreadableReason.TORN))
        .otherwise(str(UnreadableReason.NOT_JSON))
    )


def _detail(reason: Column) -> Column:
    version = F.format_string(
        f"schema version %d; this version of Rebalanser reads up to {SCHEMA_VERSION}", F.col("schema_version")
    )
    return (
        F.when(reason == str(UnreadableReason.TOO_LONG), f"over {MAX_LINE_BYTES} bytes")
        .when(reason == str(UnreadableReason.NEWER_SCHEMA), version)
        .when(reason == str(UnreadableReason.NOT_A_RECORD), _what_is_wrong())
        .when(reason == str(UnreadableReason.TORN), "truncated")
        .otherwise("not JSON")
    )


def _what_is_wrong() -> Column:
    """The first field that is missing, of another type, or of no known value."""
    text = F.col(_RAW.name)
    given = {name: F.get_json_object(text, f"$.{name}").isNotNull() for name in RECORD.names}
    faults = [
        *(
            F.when(F.col(name).isNull() & F.coalesce(given[name], F.lit(False)), f"{name}: wrong type")
            for name in RECORD.names
        ),
        *(F.when(F.col(name).isNull(), f"{name}: missing") for name in _REQUIRED),
        F.when(~F.col("schema_version").isin(*READABLE_VERSIONS), "schema_version: unknown"),
        *(F.when(F.col(name) < 0, f"{name}: negative") for name in _NEVER_NEGATIVE),
        F.when(~_kind_is_known(), F.format_string("kind: '%s' is not a kind of '%s'", "kind", "protocol")),
    ]
    return F.coalesce(*faults, F.lit("not a record"))
