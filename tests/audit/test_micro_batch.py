"""One micro-batch: where each record stands, and whether a number is missing or came twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rebalanser.audit.checkpoint import CARRIED, StreamState
from rebalanser.audit.ingest import RAW
from rebalanser.audit.micro_batch import counted_on, place, read_once
from rebalanser.audit.schema import RECORDS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from rebalanser.audit.micro_batch import Placed

pytestmark = pytest.mark.slow

BEGAN = 1000.0
AHEAD = 5000.0


def a_record(sequence: int, **other: Any) -> dict[str, Any]:
    record: dict[str, Any] = dict.fromkeys([*RECORDS.names, *RAW.names])
    return record | {
        "schema_version": 2,
        "protocol": "group",
        "group": "orders",
        "process": "p",
        "node": "p-1",
        "label": "worker",
        "incarnation": 1,
        "sequence": sequence,
        "kind": "joining",
        "term": 0,
        "version": 0,
        "wall_time": BEGAN + sequence,
        "monotonic_time": float(sequence),
        "detail": {},
        "source": "t/0",
        **other,
    }


def rows(spark: SparkSession, schema: Any, records: list[dict[str, Any]]) -> DataFrame:
    return spark.createDataFrame([tuple(record[name] for name in schema.names) for record in records], schema)


def placed(
    spark: SparkSession,
    came: list[dict[str, Any]],
    tip: int | None = None,
    before: float | None = None,
    watermark: float = AHEAD,
) -> Placed:
    """The records that came, after one with the number ``tip`` had been judged."""
    over = [] if tip is None else [a_record(tip, settled=True, tip=True)]
    return place(
        rows(spark, RECORDS, came),
        rows(spark, CARRIED, over),
        StreamState(watermark=before),
        StreamState(watermark=watermark),
        AHEAD,
    )


def numbers(frame: DataFrame) -> list[int]:
    return sorted(row["sequence"] for row in frame.select("sequence").collect())


@pytest.mark.rule("AU-2", "AU-9")
@pytest.mark.parametrize(
    ("came", "tip", "missing", "twice"),
    [
        ([0, 1, 2], None, False, False),
        ([0, 2], None, True, False),
        ([3, 4], None, True, False),
        ([5, 6], 4, False, False),
        ([6], 4, True, False),
        ([5, 5, 6], 4, False, True),
        ([5, 5, 7], 4, True, True),
    ],
    ids=["all", "one missing", "rotated", "counted on", "one missing before", "twice", "both"],
)
def test_what_is_missing_and_what_came_twice_is_noticed(
    spark: SparkSession, came: list[int], tip: int | None, missing: bool, twice: bool
) -> None:
    there = placed(spark, [a_record(number) for number in came], tip)
    processes, is_missing, is_twice = counted_on(there.judged)
    assert (is_missing, is_twice) == (missing, twice)
    (row,) = processes.collect()
    assert (row["first_sequence"], row["last_sequence"]) == (tip or min(came), max(came))


@pytest.mark.rule("AU-2")
def test_incarnations_that_follow_one_another_are_in_order_and_others_are_looked_at(
    spark: SparkSession,
) -> None:
    second = {"node": "p-2", "incarnation": 2}
    in_turn = [*(a_record(number) for number in (0, 1)), *(a_record(number, **second) for number in (2, 3))]
    assert counted_on(placed(spark, in_turn).judged)[1:] == (False, False)
    # Two of one number, and one missing: as many as there should be.
    mixed = [*(a_record(number) for number in (0, 1, 3)), a_record(1, **second)]
    assert counted_on(placed(spark, mixed).judged)[1:] == (True, True)


@pytest.mark.rule("AU-9")
def test_each_record_stands_where_the_watermarks_put_it(spark: SparkSession) -> None:
    other = {"process": "q", "node": "q-1"}
    came = [
        a_record(3),  # of before the watermark, and a later one was judged
        a_record(6),
        a_record(8),
        a_record(0, **other),  # of before, but the first of its process
        a_record(9, wall_time=AHEAD + 1.0),
    ]
    there = placed(spark, came, tip=5, before=BEGAN + 5, watermark=BEGAN + 7)
    assert there.late == 1
    assert numbers(there.judged) == [0, 5, 6, 9]
    assert numbers(there.linked) == [0, 5, 6, 9]
    assert [row["detail"] for row in there.too_late().collect()] == [
        "of 1003.000, which is before the watermark"
    ]
    assert not there.has_gaps
    assert set(there.there.values()) == {False}


@pytest.mark.rule("AU-9")
def test_what_there_is_to_ask_for_is_seen_as_records_are_put_in_place(spark: SparkSession) -> None:
    kinds = {"gap": None, "published": "published", "elected": "elected", "claimed": "start_entered"}
    came = [
        a_record(number, kind=kind, step=step, protocol="skuld" if kind == "claimed" else "group")
        for number, (kind, step) in enumerate(kinds.items())
    ]
    there = placed(spark, came)
    assert there.has_gaps
    assert there.there == {"allocations": True, "elections": True, "tasks": True}
    waiting = placed(spark, came, watermark=BEGAN - 1.0)
    assert not waiting.has_gaps
    assert set(waiting.there.values()) == {False}


@pytest.mark.rule("AU-1", "AU-9")
def test_rows_are_told_apart_as_they_are_read(spark: SparkSession) -> None:
    good = [a_record(0), a_record(1), a_record(2, wall_time=AHEAD + 1.0)]
    came = read_once(rows(spark, RAW, good), AHEAD)
    assert (came.count, came.newest, came.bad, came.quarantine) == (3, BEGAN + 1, 0, None)
    older = a_record(7, schema_version=1, protocol=None, process=None, node="old-1")
    torn = dict.fromkeys(RAW.names) | {"raw": '{"schema_ver', "source": "t/0", "position": 4}
    came = read_once(rows(spark, RAW, [*good, older, torn]), AHEAD)
    assert (came.count, came.newest, came.bad) == (4, BEGAN + 7, 1)
    assert came.records is not None
    assert numbers(came.records) == [0, 1, 2, 7]
    assert came.quarantine is not None
    assert [row["reason"] for row in came.quarantine.collect()] == ["torn"]
