"""Healthy histories of any size for benchmarks, made by Spark itself: expressions, no loop over records.

Every record is a function of its number alone. Groups of ``NODES`` nodes rebalance every ``ROUND_S`` seconds,
each time passing every resource on to the next node; so in each round every node writes one block of records
of the same length, whose order is that of the four steps (RB-11). A hot resource is one that ``HOT_NODES``
nodes pass around all the time, with as many records as all others have together.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from rebalanser.audit.schema import RECORD
from rebalanser.core.group.messages import FactKind
from rebalanser.history import SCHEMA_VERSION, Protocol
from support.histories.world import EPOCH

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

NODES: Final = 8
SHARE: Final = 4
"""Resources of each node."""
RESOURCES: Final = NODES * SHARE
ROUND_S: Final = 600.0
HOT_NODES: Final = 4
HOT_ROUND_S: Final = 2.0
_GROUP_RECORDS: Final = 250_000
_FILE_RECORDS: Final = 250_000
_MOST_CLOCK_ERROR_S: Final = 0.1
_REMOVAL_S: Final = 0.002
_HOSTS: Final = 1000
_DRAWS: Final = 100_000
_REVISIONS: Final = 2 * RESOURCES + NODES + 4
"""How many revisions of the registry a round takes."""


class Format(StrEnum):
    """How a large history is written."""

    JSONL = "jsonl"
    PARQUET = "parquet"


@dataclass(frozen=True, slots=True)
class Slots:
    """Consecutive records of a block that are of one kind, the first one ``at_s`` after the round's begin."""

    kind: FactKind
    count: int
    at_s: float
    step_s: float = 0.0005


_BLOCK: Final = (
    Slots(FactKind.GROUP_READ, 1, 0.0),
    Slots(FactKind.ALLOCATION_PUBLISHED, 1, 0.05),
    Slots(FactKind.ALLOCATION_ADOPTED, 1, 0.3),
    Slots(FactKind.STOP_ENTERED, SHARE, 0.4),
    Slots(FactKind.STOP_RETURNED, SHARE, 0.5),
    Slots(FactKind.BARRIER_REMOVED, SHARE, 0.6),
    Slots(FactKind.BARRIER_ADDED, SHARE, 0.9),
    Slots(FactKind.START_ENTERED, SHARE, 1.0),
    Slots(FactKind.START_RETURNED, SHARE, 1.2),
    Slots(FactKind.ACKNOWLEDGED, 1, 1.3),
    Slots(FactKind.REBALANCE_COMPLETED, 1, 2.0),
    Slots(FactKind.LOAD_REPORTED, SHARE, 60.0, 100.0),
)
"""What a node writes in a round; the leader's records are loads with the other nodes."""
_HOT_BLOCK: Final = (
    Slots(FactKind.ALLOCATION_ADOPTED, 1, 0.0),
    Slots(FactKind.BARRIER_ADDED, 1, 0.3),
    Slots(FactKind.START_ENTERED, 1, 0.31),
    Slots(FactKind.START_RETURNED, 1, 0.33),
    Slots(FactKind.LOAD_REPORTED, 2, 0.5, 0.5),
    Slots(FactKind.STOP_ENTERED, 1, 1.4),
    Slots(FactKind.STOP_RETURNED, 1, 1.5),
    Slots(FactKind.BARRIER_REMOVED, 1, 1.6),
)
_LEADING: Final = (FactKind.GROUP_READ, FactKind.ALLOCATION_PUBLISHED, FactKind.REBALANCE_COMPLETED)
_LEAVING: Final = (FactKind.STOP_ENTERED, FactKind.STOP_RETURNED, FactKind.BARRIER_REMOVED)
_ARRIVING: Final = (FactKind.BARRIER_ADDED, FactKind.START_ENTERED, FactKind.START_RETURNED)


def write_large(
    spark: SparkSession,
    folder: Path,
    records: int,
    *,
    format: Format = Format.JSONL,  # noqa: A002 - the word that Spark uses
    seed: int = 0,
    hot: bool = False,
) -> None:
    """Write exactly ``records`` records of a history in which nothing is wrong, as files in a new ``folder``.

    With ``hot`` half of the records are those of one resource.

    Raises:
        FileExistsError: the folder exists.
    """
    if folder.exists():
        raise FileExistsError(folder)
    history = large(spark, records, seed=seed, hot=hot)
    if format is Format.PARQUET:
        history.write.parquet(str(folder))
        return
    history.select(f.to_json(f.struct(*history.columns)).alias("value")).write.text(str(folder))
    for number, part in enumerate(sorted(folder.glob("part-*"))):
        part.rename(folder / f"history.{number:06}.jsonl")
    for other in folder.glob("*"):
        if other.suffix != ".jsonl":
            other.unlink()


def large(spark: SparkSession, records: int, *, seed: int = 0, hot: bool = False) -> DataFrame:
    """Those records, in the order in which the processes wrote them."""
    hot_records = _whole(records // 2, HOT_NODES * _length(_HOT_BLOCK)) if hot else 0
    groups = max(1, (records - hot_records) // _GROUP_RECORDS)
    usual_records = _whole(records - hot_records, groups * NODES * _length(_BLOCK))
    rest = records - hot_records - usual_records
    parts = [_rest(_numbers(spark, rest), seed)] if rest else []
    if usual_records:
        parts.append(_usual(_numbers(spark, usual_records), usual_records // (groups * NODES), groups, seed))
    if hot_records:
        parts.append(_hot(_numbers(spark, hot_records), hot_records // HOT_NODES, seed))
    return reduce(lambda one, other: one.unionByName(other), parts)


def _whole(records: int, unit: int) -> int:
    return records // unit * unit


def _length(block: tuple[Slots, ...]) -> int:
    return sum(slots.count for slots in block)


def _numbers(spark: SparkSession, records: int) -> DataFrame:
    return spark.range(0, records, 1, max(1, records // _FILE_RECORDS))


def _processes(spark: SparkSession, group: Column, count: int, nodes: int, seed: int) -> DataFrame:
    """The names and the clock of each process, numbered by ``at``; ``group`` is that of ``number``."""
    number = f.floor(f.col("at") / nodes)
    member = f.col("at") % nodes
    host = f.format_string("host-%03d", f.pmod(f.xxhash64("group", "member"), f.lit(_HOSTS)))
    return (
        spark.range(0, count, 1, 1)
        .select(f.col("id").alias("at"), number.alias("number"), member.alias("member"))
        .select("at", "member", group.alias("group"))
        .select("*", host.alias("host"), f.format_string("worker-%02d", "member").alias("label"))
        .select(
            "*",
            f.concat_ws("-", "group", "label", f.lit(f"{seed:08x}")).alias("process"),
            f.concat(f.lit(f"boot-{seed:08x}-of-"), "host").alias("boot"),
            (_MOST_CLOCK_ERROR_S * (2.0 * _drawn(seed, f.col("host")) / _DRAWS - 1.0)).alias("error_s"),
        )
        .select("*", f.concat("process", f.lit("-1")).alias("node"))
    )


def _drawn(seed: int, column: Column) -> Column:
    """A whole number below ``_DRAWS`` that depends on the seed and the column."""
    return f.pmod(f.xxhash64(f.lit(seed), column), f.lit(_DRAWS))


def _places(spark: SparkSession, block: tuple[Slots, ...]) -> DataFrame:
    """What stands at each ``offset`` of a block: the kind, which one of that kind, and when in the round."""
    places = (
        (slots.kind, index, slots.at_s + index * slots.step_s)
        for slots in block
        for index in range(slots.count)
    )
    rows = (
        f.struct(
            f.lit(offset).cast("long").alias("offset"),
            f.lit(str(kind)).alias("kind"),
            f.lit(index).cast("long").alias("index"),
            f.lit(at_s).alias("at_s"),
        )
        for offset, (kind, index, at_s) in enumerate(places)
    )
    return spark.range(0, 1, 1, 1).select(f.inline(f.array(*rows)))


def _placed(numbers: DataFrame, of_process: int, block: tuple[Slots, ...], processes: DataFrame) -> DataFrame:
    """Where each record belongs: its process and round, and its place in the block of that round.

    Names and places are looked up, not computed anew for each record.
    """
    length = _length(block)
    sequence = f.col("id") % of_process
    numbered = numbers.select(
        f.floor(f.col("id") / of_process).alias("at"),
        sequence.alias("sequence"),
        f.floor(sequence / length).alias("round"),
        (sequence % length).alias("offset"),
    )
    places = _places(numbers.sparkSession, block)
    return numbered.join(f.broadcast(processes), "at").join(f.broadcast(places), "offset")


def _usual(numbers: DataFrame, of_process: int, groups: int, seed: int) -> DataFrame:
    """Groups whose nodes pass all resources on in each round; the first has nothing to stop in round 0."""
    named = f.format_string("group-%05d", "number")
    processes = _processes(numbers.sparkSession, named, groups * NODES, NODES, seed)
    placed = _placed(numbers, of_process, _BLOCK, processes)
    leading, leaving = f.col("kind").isin(*_LEADING), f.col("kind").isin(*_LEAVING)
    idle = (leading & (f.col("member") != 0)) | (leaving & (f.col("round") == 0))
    kind = f.when(idle, f.lit(str(FactKind.RECONNECTED))).otherwise(f.col("kind"))
    owning = f.col("kind").isin(*_LEAVING, *_ARRIVING)
    tenure = f.when(leaving, f.col("round") - 1).otherwise(f.col("round"))
    owned = f.pmod(f.col("member") - tenure, f.lit(NODES)) * SHARE + f.col("index")
    told = placed.select(*placed.columns, owned.alias("owned"), tenure.alias("tenure")).withColumns(
        {
            "kind": kind,
            "version": f.when(f.col("offset") < 2, f.col("round")).otherwise(f.col("round") + 1),
            "resource": f.when(
                owning, f.concat(f.lit("orders-"), f.lpad(f.col("owned").cast("string"), 3, "0"))
            ),
            "token": f.when(owning, f.col("tenure") * _REVISIONS + RESOURCES + 3 + f.col("owned")),
            "true_s": f.col("round") * ROUND_S + f.col("at_s"),
        }
    )
    concerned = f.col("kind") != FactKind.RECONNECTED
    return _records(
        told.withColumns(
            {
                "resource": f.when(concerned, f.col("resource")),
                "token": f.when(concerned, f.col("token")),
                "revision": _revision(f.col("round") * _REVISIONS),
                "value": _value(seed, f.col("round") + 1.0),
                "detail": f.when(f.col("kind") == FactKind.ALLOCATION_PUBLISHED, f.create_map(*_sizes())),
            }
        )
    )


def _revision(start: Column) -> Column:
    """The revision of what a record tells, ``start`` being the last one before the round."""
    kind = f.col("kind")
    return (
        f.when(kind == FactKind.BARRIER_ADDED, f.col("token"))
        .when(kind == FactKind.BARRIER_REMOVED, start + 3 + f.col("owned"))
        .when(kind == FactKind.GROUP_READ, start + 1)
        .when(kind.isin(FactKind.ALLOCATION_PUBLISHED, FactKind.ALLOCATION_ADOPTED), start + 2)
        .when(kind == FactKind.ACKNOWLEDGED, start + 2 * RESOURCES + 4 + f.col("member"))
    )


def _value(seed: int, version: Column) -> Column:
    """A load, the version that a leader publishes or completes, or how long a removal took, in seconds."""
    kind = f.col("kind")
    load = _drawn(seed, f.col("sequence")) / 1000.0
    return (
        f.when(kind == FactKind.LOAD_REPORTED, load)
        .when(kind.isin(FactKind.ALLOCATION_PUBLISHED, FactKind.REBALANCE_COMPLETED), version)
        .when(kind == FactKind.BARRIER_REMOVED, _REMOVAL_S)
    )


def _sizes() -> list[Column]:
    """The details of what a leader publishes."""
    sizes = {"moves": RESOURCES, "least_moves": RESOURCES, "nodes": NODES, "resources": RESOURCES}
    return [part for name, size in sizes.items() for part in (f.lit(name), f.lit(str(size)))]


def _hot(numbers: DataFrame, of_process: int, seed: int) -> DataFrame:
    """One resource that a few nodes pass around."""
    processes = _processes(numbers.sparkSession, f.lit("hot"), HOT_NODES, HOT_NODES, seed)
    placed = _placed(numbers, of_process, _HOT_BLOCK, processes)
    turn = f.col("round") * HOT_NODES + f.col("member")
    token = 4 * turn + 3
    kind = f.col("kind")
    concerned = kind != FactKind.ALLOCATION_ADOPTED
    return _records(
        placed.withColumns(
            {
                "version": turn + 1,
                "resource": f.when(concerned, f.lit("the-hot-one")),
                "token": f.when(concerned, token),
                "revision": f.when(kind == FactKind.BARRIER_ADDED, token)
                .when(kind == FactKind.BARRIER_REMOVED, token + 1)
                .when(~concerned, token - 1),
                "value": _value(seed, turn + 1.0),
                "true_s": turn * HOT_ROUND_S + f.col("at_s"),
            }
        )
    )


def _rest(numbers: DataFrame, seed: int) -> DataFrame:
    """A node that does nothing but tell that all is well: what is left over of whole rounds."""
    process = _processes(numbers.sparkSession, f.lit("rest"), 1, 1, seed)
    return _records(
        numbers.join(f.broadcast(process)).withColumns(
            {
                "sequence": f.col("id"),
                "kind": f.lit(str(FactKind.RECONNECTED)),
                "version": f.lit(0),
                "true_s": f.col("id").cast("double"),
            }
        )
    )


def _records(told: DataFrame) -> DataFrame:
    """Whole records, of which all is null that is not told."""
    constant = {
        "schema_version": f.lit(SCHEMA_VERSION),
        "protocol": f.lit(str(Protocol.GROUP)),
        "incarnation": f.lit(1),
        "term": f.lit(1),
        "fenced": f.lit(True),
        "wall_time": EPOCH + f.col("true_s") + f.col("error_s"),
        "monotonic_time": f.col("true_s") + 1000.0,
    }
    known = {name: f.col(name) for name in told.columns} | constant
    return told.select(
        *(known.get(field.name, f.lit(None)).cast(field.dataType).alias(field.name) for field in RECORD)
    )
