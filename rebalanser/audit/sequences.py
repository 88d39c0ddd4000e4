"""Processes, gaps and duplicates, by the numbers of the records (AU-2).

The numbers of a process are cut into words of 64, and of each word only the set of numbers seen is kept, as
the bits of one whole number. That is a hash aggregation over primitive values which neither order nor
duplicates change, done where the records lie; all that follows works on one row for 64 records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom
from pyspark.sql.types import DataType, StructType

from rebalanser.audit.caching import count, observed
from rebalanser.audit.schema import RECORD
from rebalanser.audit.tables import FINDINGS, GAPS, PROCESSES, WITNESS, Certainty, FindingKind
from rebalanser.history import GAP

if TYPE_CHECKING:
    from rebalanser.audit.caching import Keep

NUMBERED: Final = ("protocol", "group", "process")
"""Columns that identify a process, which counts its records from 0 on."""
INCARNATION: Final = (*NUMBERED, "node", "label", "host", "boot")
ROTATED: Final = "rotated"
"""Reason of a gap before the first record that is there."""
MISSING: Final = "missing"
"""Reason of a gap without a recorded reason."""
_WORD: Final = 64
_CONTENT: Final = tuple(name for name in RECORD.names if name not in {"detail", *NUMBERED, "sequence"})


def process_counts(records: DataFrame, **also: Column) -> DataFrame:
    """One row for each 64 numbers of an incarnation: all aggregates of every record, in one pass.

    ``taken`` are the bits of all numbers, ``bits`` of those of records that are no ``gap``, null if none is;
    ``count`` is the number of records. ``also`` are further aggregates.
    """
    return records.groupBy(*INCARNATION, _word().alias("word")).agg(
        F.bit_or(bit()).alias("taken"),
        F.bit_or(F.when(F.col("kind") != GAP, bit())).alias("bits"),
        count().alias("count"),
        F.min("sequence").alias("first_sequence"),
        F.max("sequence").alias("last_sequence"),
        F.min("wall_time").alias("first_wall"),
        F.max("wall_time").alias("last_wall"),
        F.max("monotonic_time").alias("last_monotonic"),
        *(column.alias(name) for name, column in also.items()),
    )


def processes_of(counted: DataFrame, **also: Column) -> DataFrame:
    """The table ``PROCESSES`` of the result of ``process_counts``, with further aggregates of it."""
    extremes = {"first_sequence": F.min, "first_wall": F.min}
    again = F.sum(F.col("count") - F.bit_count("taken")).alias("duplicates")
    return (
        counted.groupBy(*INCARNATION)
        .agg(
            *(
                extremes.get(name, F.max)(name).alias(name)
                for name in ("first_sequence", "last_sequence", "first_wall", "last_wall", "last_monotonic")
            ),
            again,
            *(column.alias(name) for name, column in also.items()),
        )
        .select(*PROCESSES.names, *also)
    )


def has_duplicates(counted: DataFrame) -> bool:
    """True if a number of a process came more than once, by ``process_counts``. Takes a job, at once."""
    of_words = counted.groupBy(*NUMBERED, "word").agg(
        F.bit_or("taken").alias("taken"), F.sum("count").alias("count")
    )
    return not of_words.where(F.col("count") > F.bit_count("taken")).isEmpty()


def words(records: DataFrame, *also: str) -> DataFrame:
    """One row for each 64 numbers of a process: ``word``, ``bits`` of the numbers seen, and ``count``.

    ``also`` are columns that are the same in all records of a process, to be carried along.
    """
    return records.groupBy(*NUMBERED, *also, _word().alias("word")).agg(
        F.bit_or(bit()).alias("bits"), count().alias("count")
    )


def _word() -> Column:
    return F.shiftright("sequence", 6)


def bit() -> Column:
    """The bit of a record's number in its word."""
    return F.expr("shiftleft(1L, cast(sequence & 63 as int))")


def gaps(records: DataFrame) -> DataFrame:
    """The table ``GAPS``.

    A ``gap`` record represents missing numbers and is none of them itself. Missing numbers with a reason from
    such a record are a row of their own beside those without.
    """
    is_gap = F.col("kind") == GAP
    seen = _runs(words(records.where(~is_gap), "label"))
    told = _recorded_gaps(records.where(is_gap))
    return _with_walls(_between(seen.unionByName(told)), records.where(~is_gap)).select(*GAPS.names)


def gaps_of(counted: DataFrame, told: DataFrame, records: DataFrame, keep: Keep) -> DataFrame | None:
    """The table ``GAPS`` of ``process_counts`` and of the ``gap`` records ``told``; None if there is no gap.

    ``records`` are read only if there is one.
    """
    seen = _runs(counted.where(F.col("bits").isNotNull()))
    between = _between(seen.unionByName(_recorded_gaps(told)))
    found, met = observed(keep, "looking for gaps", between, rows=count())
    if not met["rows"]:
        return None
    walls = _with_walls(found, records.where(F.col("kind") != GAP)).select(*GAPS.names)
    return keep("looking for gaps", walls)


def conflicts(records: DataFrame) -> DataFrame:
    """Rows of ``FINDINGS``: two different records with one name, looked for only if a name comes twice."""
    suspects = words(records).where(F.col("count") > F.bit_count("bits")).select(*NUMBERED, "word")
    word = F.shiftright("sequence", 6)
    different = (
        records.withColumn("word", word)
        .join(F.broadcast(suspects), [*NUMBERED, "word"], "left_semi")
        .groupBy(*NUMBERED, "sequence")
        .agg(
            F.min(content()).alias("least"),
            F.max(content()).alias("greatest"),
            F.min("wall_time").alias("begins"),
            F.max("wall_time").alias("ends"),
        )
        .where("least <> greatest")
    )
    return _findings(different)


def content() -> Column:
    """A number that differs between records that differ in more than their source."""
    return F.xxhash64(*_CONTENT, F.sort_array(F.map_entries("detail")))


def _findings(different: DataFrame) -> DataFrame:
    kind = str(FindingKind.CONFLICT)
    name = F.format_string("%s#%d", "process", "sequence")
    witness = _struct(WITNESS, {"process": F.col("process"), "sequence": F.col("sequence")})
    columns = {
        "id": F.sha2(F.concat_ws("|", F.lit(kind), "protocol", "group", name), 256),
        "kind": F.lit(kind),
        "rule": F.lit("AU-2"),
        "certainty": F.lit(str(Certainty.CERTAIN)),
        "protocol": F.col("protocol"),
        "group": F.col("group"),
        "sentence": F.format_string(
            "group %s has two different records with the number %d of process %s",
            "group",
            "sequence",
            "process",
        ),
        "begins": F.col("begins"),
        "ends": F.col("ends"),
        "parties": F.array(),
        "evidence": F.array(witness),
    }
    return different.select(*_columns(FINDINGS, columns))


def _struct(kind: StructType, known: dict[str, Column]) -> Column:
    return F.struct(*_columns(kind, known))


def _columns(kind: StructType, known: dict[str, Column]) -> list[Column]:
    """All columns of a table in its order: those known, cast to their type, and null for the others."""

    def of(name: str, wanted: DataType) -> Column:
        return known.get(name, F.lit(None)).cast(wanted).alias(name)

    return [of(field.name, field.dataType) for field in kind]


def _runs(of_words: DataFrame) -> DataFrame:
    """Runs of seen numbers, ``start`` to ``end``, cut at the ends of the words.

    A full word is one run: only a few words need work on single bits.
    """
    base = F.col("word") * _WORD
    whole = F.array(F.struct(base.alias("start"), (base + _WORD - 1).alias("end")))
    positions = F.sequence(F.lit(0), F.lit(_WORD - 1))
    starts, ends = F.filter(positions, _begins), F.filter(positions, _ends)
    parts = F.zip_with(
        starts, ends, lambda start, end: F.struct((base + start).alias("start"), (base + end).alias("end"))
    )
    runs = F.when(F.col("bits") == -1, whole).otherwise(parts)
    return of_words.select(*NUMBERED, "label", F.inline(runs)).select(
        *NUMBERED,
        "label",
        "start",
        "end",
        F.lit(None).cast("long").alias("until"),
        F.lit(None).cast("string").alias("told"),
    )


def _is_set(position: Column) -> Column:
    return F.getbit("bits", position) == 1


def _begins(position: Column) -> Column:
    before = F.greatest(position - 1, F.lit(0))
    return _is_set(position) & ((position == 0) | ~_is_set(before))


def _ends(position: Column) -> Column:
    after = F.least(position + 1, F.lit(_WORD - 1))
    return _is_set(position) & ((position == _WORD - 1) | ~_is_set(after))


def _recorded_gaps(gap_records: DataFrame) -> DataFrame:
    """Empty runs at both edges of the range of a ``gap`` record, the first with its reason.

    So the missing numbers between them become a gap of their own, also if nothing was seen after it.
    """
    first, last = F.col("sequence"), F.coalesce(F.col("detail")["last"].try_cast("long"), F.col("sequence"))
    reason = F.coalesce(F.col("detail")["reason"], F.lit(MISSING))
    none = F.lit(None)
    edges = F.array(
        F.struct(first.alias("start"), (first - 1).alias("end"), last.alias("until"), reason.alias("told")),
        F.struct(
            (last + 1).alias("start"),
            last.alias("end"),
            none.cast("long").alias("until"),
            none.cast("string").alias("told"),
        ),
    )
    return gap_records.select(*NUMBERED, "label", F.inline(edges))


def _between(runs: DataFrame) -> DataFrame:
    """Gaps between runs: ``first``, ``last``, ``reason``, and the numbers seen ``before`` and ``after``."""
    ordered = Window.partitionBy(*NUMBERED).orderBy("start", "end")
    earlier = ordered.rowsBetween(Window.unboundedPreceding, -1)
    # The same rows from the other side: a frame that ends with the last row is aggregated anew for each row.
    backwards = Window.partitionBy(*NUMBERED).orderBy(F.desc("start"), F.desc("end"))
    later = backwards.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    seen = F.col("end") >= F.col("start")
    mark = F.when(F.col("told").isNotNull(), F.struct("until", "told"))
    marked = runs.select(
        *NUMBERED,
        "label",
        (F.coalesce(F.max("end").over(earlier), F.lit(-1)) + 1).alias("first"),
        (F.col("start") - 1).alias("last"),
        F.max(F.when(seen, F.col("end"))).over(earlier).alias("before"),
        F.min(F.when(seen, F.col("start"))).over(later).alias("after"),
        F.last(mark, ignorenulls=True).over(earlier).alias("mark"),
    )
    reason = (
        F.when(F.col("first") <= F.col("mark.until"), F.col("mark.told"))
        .when(F.col("before").isNull(), F.lit(ROTATED))
        .otherwise(F.lit(MISSING))
    )
    return marked.where("last >= first").withColumn("reason", reason).drop("mark")


def _with_walls(found: DataFrame, records: DataFrame) -> DataFrame:
    """Gaps with the wall times of the records around them."""
    around = found.select(*NUMBERED, F.explode(F.array("before", "after")).alias("sequence"))
    seen = (
        records.join(F.broadcast(around.where("sequence is not null").distinct()), [*NUMBERED, "sequence"])
        .groupBy(*NUMBERED, "sequence")
        .agg(F.min("wall_time").alias("wall"))
    )
    before = seen.withColumnsRenamed({"sequence": "before", "wall": "after_wall"})
    after = seen.withColumnsRenamed({"sequence": "after", "wall": "before_wall"})
    return (
        found.join(before, [*NUMBERED, "before"], "left")
        .join(after, [*NUMBERED, "after"], "left")
        .withColumn("missing", F.col("last") - F.col("first") + 1)
    )
