"""Rebalances, unavailability, handlers, balance and leaders of small histories worked out by hand (AU-6)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, DoubleType, LongType, MapType, StringType, StructField, StructType

from rebalanser.audit.metrics import (
    BALANCE_POINTS,
    balance,
    handlers,
    leaders,
    measure,
    phases,
    rebalances,
    unavailability,
)
from rebalanser.audit.options import Options
from rebalanser.audit.tables import (
    ACCESSES,
    BALANCE,
    HANDLERS,
    LEADERS,
    PROCESSES,
    REBALANCES,
    UNAVAILABILITY,
)
from rebalanser.history import HistoryStep

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.rule("AU-6")]

_TEXT = ("protocol", "group", "process", "node", "label", "boot", "step", "resource")
_WHOLE = ("incarnation", "sequence", "term", "version")
_REAL = ("value", "wall_time", "monotonic_time")
RECORDS = StructType(
    [
        *(StructField(name, StringType()) for name in _TEXT),
        *(StructField(name, LongType()) for name in _WHOLE),
        *(StructField(name, DoubleType()) for name in _REAL),
        StructField("detail", MapType(StringType(), StringType())),
    ]
)
_BOOT_OFFSET_S = 900.0
"""How far the monotonic clock of these tests lies behind the wall clock, unless said otherwise."""


def record(process: str, sequence: int, step: HistoryStep, at: float, **fields: Any) -> dict[str, Any]:
    """A record of ``process`` at wall time ``at``; its clock's monotonic time follows from that."""
    return {
        "protocol": "group",
        "group": "orders",
        "process": process,
        "node": f"{process}-0",
        "label": f"label of {process}",
        "boot": f"boot of {process}",
        "incarnation": 0,
        "sequence": sequence,
        "step": str(step),
        "term": 1,
        "version": 0,
        "wall_time": at,
        "monotonic_time": at - _BOOT_OFFSET_S,
        "detail": {},
        **fields,
    }


def access(
    resource: str, token: int, node: str, start: float, end: float | None, **fields: Any
) -> dict[str, Any]:
    """An access by wall times on the node's own host; OnStart takes 0.25 s and OnStop 0.5 s of it."""
    last = None if end is None else end - _BOOT_OFFSET_S
    return {
        "protocol": "group",
        "group": "orders",
        "resource": resource,
        "token": token,
        "process": node,
        "node": f"{node}-0",
        "label": f"label of {node}",
        "boot": f"boot of {node}",
        "start_entered_wall": start,
        "start_entered_monotonic": start - _BOOT_OFFSET_S,
        "start_returned_monotonic": start - _BOOT_OFFSET_S + 0.25,
        "stop_entered_monotonic": None if last is None else last - 0.5,
        "stop_returned_monotonic": last,
        "end_wall": end,
        "end_monotonic": last,
        "ended_by": "stop",
        **fields,
    }


def process(name: str, first: float, last: float, **fields: Any) -> dict[str, Any]:
    """A row of ``PROCESSES``."""
    return {
        "protocol": "group",
        "group": "orders",
        "process": name,
        "node": f"{name}-0",
        "label": f"label of {name}",
        "first_wall": first,
        "last_wall": last,
        **fields,
    }


def frame(spark: SparkSession, schema: StructType, rows: list[dict[str, Any]]) -> DataFrame:
    """The rows as a frame, without a Python worker; what they don't say is null."""
    return spark.range(1).select(f.inline(f.from_json(f.lit(json.dumps(rows)), ArrayType(schema))))


def twice(rows: DataFrame) -> DataFrame:
    """Every row two times, in another order."""
    return rows.unionByName(rows).orderBy(f.rand(7))


def a_rebalance() -> list[dict[str, Any]]:
    """The leader a publishes version 4 at 100; b gives up what a takes; all is seen complete at 103."""
    published = {"moves": "3", "least_moves": "2", "nodes": "2", "resources": "6"}
    return [
        record("a", 1, HistoryStep.GROUP_READ, 90.0),
        record("a", 2, HistoryStep.GROUP_READ, 99.5),
        record("a", 3, HistoryStep.PUBLISHED, 100.0, value=4.0, detail=published),
        record("a", 4, HistoryStep.ADOPTED, 100.1, version=4),
        record("a", 5, HistoryStep.BARRIER_ADDED, 101.6, version=4),
        record("a", 6, HistoryStep.START_ENTERED, 101.7, version=4),
        record("a", 7, HistoryStep.START_RETURNED, 102.7, version=4),
        record("a", 8, HistoryStep.ACKNOWLEDGED, 102.8, version=4),
        record("a", 9, HistoryStep.COMPLETED, 103.0, value=4.0, version=4),
        record("b", 1, HistoryStep.ADOPTED, 100.2, version=4),
        record("b", 2, HistoryStep.STOP_ENTERED, 100.3, version=4),
        record("b", 3, HistoryStep.STOP_RETURNED, 101.2, version=4),
        record("b", 4, HistoryStep.BARRIER_REMOVED, 101.3, version=4),
        record("b", 5, HistoryStep.ACKNOWLEDGED, 101.4, version=4),
    ]


def only(rows: DataFrame) -> Row:
    """The one row that there is."""
    (row,) = rows.collect()
    return row


def test_a_rebalance_is_timed_from_reading_the_group_to_completion_and_by_phase(spark: SparkSession) -> None:
    found = rebalances(frame(spark, RECORDS, a_rebalance()))
    assert found.schema.names == REBALANCES.names
    row = only(found)
    assert (row.version, row.term, row.leader) == (4, 1, "label of a")
    assert (row.published_wall, row.completed_wall) == (100.0, 103.0)
    assert row.plan_s == pytest.approx(0.5)
    assert row.duration_s == pytest.approx(3.5)
    assert row.stop_s == pytest.approx(1.0)
    assert row.barrier_s == pytest.approx(1.5)
    assert row.start_s == pytest.approx(1.0)
    assert (row.moves, row.least_moves, row.nodes, row.resources) == (3, 2, 2, 6)


@pytest.mark.rule("AU-2")
def test_duplicates_and_order_change_no_rebalance(spark: SparkSession) -> None:
    records = frame(spark, RECORDS, a_rebalance())
    assert rebalances(twice(records)).collect() == rebalances(records).collect()
    assert leaders(twice(records), frame(spark, PROCESSES, [])).collect() == []


def test_a_rebalance_that_a_newer_one_replaced_has_no_duration(spark: SparkSession) -> None:
    rows = [row for row in a_rebalance() if row["step"] != HistoryStep.COMPLETED]
    row = only(rebalances(frame(spark, RECORDS, rows)))
    assert row.completed_wall is None
    assert row.duration_s is None
    assert row.stop_s == pytest.approx(1.0)


def test_a_jump_of_the_wall_clock_does_not_change_a_duration(spark: SparkSession) -> None:
    rows = a_rebalance()
    for row in rows:
        if row["process"] == "a" and row["sequence"] > 3:
            row["wall_time"] += 7_200.0
    row = only(rebalances(frame(spark, RECORDS, rows)))
    assert row.duration_s == pytest.approx(3.5)


def test_a_completion_that_the_next_leader_saw_is_timed_by_wall_clocks(spark: SparkSession) -> None:
    rows = [row for row in a_rebalance() if row["step"] != HistoryStep.COMPLETED]
    rows.append(record("b", 6, HistoryStep.COMPLETED, 110.0, value=4.0, monotonic_time=5.0, term=2))
    row = only(rebalances(frame(spark, RECORDS, rows)))
    assert row.duration_s == pytest.approx(10.5)
    one_host = [{**row, "boot": "one"} for row in rows]
    row = only(rebalances(frame(spark, RECORDS, one_host)))
    assert row.duration_s == pytest.approx(5.0 - (100.0 - _BOOT_OFFSET_S) + 0.5)


def test_what_a_node_does_after_its_acknowledgement_belongs_to_no_phase(spark: SparkSession) -> None:
    rows = a_rebalance()
    rows += [
        record("a", 20, HistoryStep.STOP_ENTERED, 9_000.0, version=4),
        record("a", 21, HistoryStep.STOP_RETURNED, 9_001.0, version=4),
        record("a", 22, HistoryStep.BARRIER_REMOVED, 9_002.0, version=4),
        record("a", 23, HistoryStep.START_ENTERED, 9_010.0, version=4),
        record("a", 24, HistoryStep.START_RETURNED, 9_050.0, version=4),
    ]
    by_process = {row.process: row for row in phases(frame(spark, RECORDS, rows)).collect()}
    assert by_process["a"].stop_s is None
    assert by_process["a"].start_s == pytest.approx(1.1), "until the acknowledgement at the latest"
    assert by_process["b"].stop_s == pytest.approx(1.0)
    assert by_process["b"].start_s is None
    assert by_process["b"].barrier_s is None


def test_the_version_of_the_older_schema_is_read_from_the_detail(spark: SparkSession) -> None:
    rows = [
        record("a", 1, HistoryStep.PUBLISHED, 100.0, detail={"published_version": "9"}),
        record("a", 2, HistoryStep.COMPLETED, 101.0, detail={"completed_version": "9"}),
    ]
    row = only(rebalances(frame(spark, RECORDS, rows)))
    assert (row.version, row.duration_s, row.plan_s, row.moves) == (9, 1.0, None, None)


def test_a_resource_is_unowned_from_the_end_of_all_earlier_owners_to_the_next(spark: SparkSession) -> None:
    accesses = [
        access("r", 1, "a", 100.0, 200.0),
        access("r", 2, "b", 150.0, 160.0),
        access("r", 3, "c", 205.0, 300.0),
        access("r", 4, "a", 301.0, 400.0),
        access("never started", 5, "a", 0.0, None, start_entered_wall=None),
        access("one owner", 6, "a", 50.0, 60.0),
    ]
    found = unavailability(frame(spark, ACCESSES, accesses), crowded=50)
    assert found.schema.names == UNAVAILABILITY.names
    rows = {row.resource: row for row in found.collect()}
    assert rows.keys() == {"r", "one owner"}
    assert (rows["r"].accesses, rows["r"].unowned_s, rows["r"].longest_s) == (4, 6.0, 5.0)
    assert (rows["r"].longest_from, rows["r"].first_wall, rows["r"].last_wall) == (200.0, 100.0, 400.0)
    assert (rows["one owner"].unowned_s, rows["one owner"].longest_from) == (0.0, None)


def test_unowned_time_between_owners_on_one_boot_is_measured_on_its_clock(spark: SparkSession) -> None:
    accesses = [
        access("r", 1, "a", 100.0, 200.0, boot="one"),
        access("r", 2, "b", 290.0, 300.0, boot="one", start_entered_monotonic=200.0 - _BOOT_OFFSET_S + 3.0),
    ]
    assert only(unavailability(frame(spark, ACCESSES, accesses), crowded=50)).unowned_s == pytest.approx(3.0)


def test_a_crowded_resource_gives_the_same_as_one_task(spark: SparkSession) -> None:
    start = (f.col("id") * 10).cast("double") + f.rand(3) * 4
    accesses = spark.range(5_000).select(
        f.lit("group").alias("protocol"),
        f.lit("orders").alias("group"),
        f.lit("hot").alias("resource"),
        f.col("id").alias("token"),
        f.format_string("boot %d", f.col("id") % 3).alias("boot"),
        start.alias("start_entered_wall"),
        start.alias("start_entered_monotonic"),
        (start + f.when(f.col("id") == 700, 9_000.0).otherwise(4.0 + f.rand(4) * 9)).alias("end_wall"),
    )
    accesses = accesses.withColumn("end_monotonic", f.col("end_wall")).cache()
    whole, spread = (only(unavailability(accesses, crowded)) for crowded in (1_000_000, 100))
    accesses.unpersist()
    assert spread.unowned_s == pytest.approx(whole.unowned_s)
    assert spread.unowned_s > 0
    assert (spread.accesses, spread.longest_s, spread.longest_from) == (
        whole.accesses,
        whole.longest_s,
        whole.longest_from,
    )


def test_handlers_are_timed_by_node_on_its_own_clock(spark: SparkSession) -> None:
    accesses = [
        access("r", number, "a", 100.0, 200.0, start_returned_monotonic=100.0 - _BOOT_OFFSET_S + number)
        for number in range(1, 101)
    ]
    accesses.append(access("killed", 200, "a", 100.0, 150.0, stop_entered_monotonic=None))
    found = handlers(frame(spark, ACCESSES, accesses))
    assert found.schema.names == HANDLERS.names
    rows = {row.handler: row for row in found.collect()}
    start, stop = rows["on_start"], rows["on_stop"]
    assert (start.label, start.calls, start.p50_s, start.p99_s, start.max_s) == (
        "label of a",
        101,
        50.0,
        99.0,
        100.0,
    )
    assert (stop.calls, stop.p50_s, stop.max_s) == (100, 0.5, 0.5)


def test_balance_is_the_least_and_the_most_of_the_living_nodes(spark: SparkSession) -> None:
    accesses = [
        access("r1", 1, "a", 0.0, 1_000.0),
        access("r2", 2, "a", 0.0, 500.0),
        access("r2", 3, "b", 500.0, 1_000.0),
        access("r3", 4, "a", 250.0, 1_000.0),
    ]
    living = [process("a", -10.0, 1_000.0), process("b", 400.0, 1_000.0), process("idle", 800.0, 900.0)]
    found = balance(frame(spark, ACCESSES, accesses), frame(spark, PROCESSES, living))
    assert found.schema.names == BALANCE.names
    rows = {row.at_wall: row for row in found.collect()}
    assert len(rows) == BALANCE_POINTS

    def at(wall: float) -> tuple[int, int, int, int]:
        row = rows[min(rows, key=lambda time: abs(time - wall))]
        return row.nodes, row.owned, row.least, row.most

    assert at(100.0) == (1, 2, 2, 2)
    assert at(300.0) == (1, 3, 3, 3)
    assert at(450.0) == (2, 3, 0, 3)
    assert at(600.0) == (2, 3, 1, 2)
    assert at(850.0) == (3, 3, 0, 2)
    assert at(950.0) == (2, 3, 1, 2)


def test_leaders_of_shiva_count_as_no_nodes_of_its_balance(spark: SparkSession) -> None:
    accesses = [access("app", 1, "worker", 0.0, 100.0, protocol="shiva")]
    living = [process(name, 0.0, 100.0, protocol="shiva") for name in ("worker", "leader")]
    found = balance(frame(spark, ACCESSES, accesses), frame(spark, PROCESSES, living)).collect()
    assert {(row.nodes, row.least, row.most) for row in found} == {(1, 1, 1)}


def test_a_leader_leads_until_the_next_term_or_its_own_last_record(spark: SparkSession) -> None:
    records = [
        record("a", 1, HistoryStep.ELECTED, 10.0, term=1),
        record("b", 1, HistoryStep.ELECTED, 20.0, term=2),
        record("a", 9, HistoryStep.ELECTED, 40.0, term=5),
        record("c", 1, HistoryStep.ELECTED, 42.0, term=5),
    ]
    living = [process("a", 0.0, 90.0), process("b", 0.0, 30.0), process("c", 0.0, 60.0)]
    found = leaders(twice(frame(spark, RECORDS, records)), frame(spark, PROCESSES, living))
    assert found.schema.names == LEADERS.names
    assert sorted((row.term, row.node, row.from_wall, row.to_wall) for row in found.collect()) == [
        (1, "a-0", 10.0, 20.0),
        (2, "b-0", 20.0, 30.0),
        (5, "a-0", 40.0, 90.0),
        (5, "c-0", 42.0, 60.0),
    ]


def test_metrics_begin_where_the_audit_does(spark: SparkSession) -> None:
    records = frame(spark, RECORDS, [*a_rebalance(), record("a", 0, HistoryStep.ELECTED, 80.0)])
    accesses = frame(spark, ACCESSES, [access("old", 1, "a", 0.0, 50.0), access("new", 2, "a", 60.0, 120.0)])
    living = frame(spark, PROCESSES, [process("a", 0.0, 120.0)])
    everything = measure(records, accesses, living, Options())
    assert everything.unavailability.count() == 2
    recent = measure(records, accesses, living, Options(since=110.0))
    assert [row.resource for row in recent.unavailability.collect()] == ["new"]
    assert recent.rebalances.count() == 0
    assert recent.leaders.count() == 1
    assert {row.calls for row in recent.handlers.collect()} == {1}
    assert recent.balance.select(f.max("owned")).head() == (1,)
