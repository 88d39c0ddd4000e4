"""The steps of each process, token and resource become one row with its end (AU-3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rebalanser.audit.accesses import accesses
from rebalanser.audit.tables import ACCESSES

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.rule("AU-3")]

NOON = 1_700_000_000.0


@pytest.fixture(scope="module")
def rows(spark: SparkSession, new_histories: Any) -> dict[str, list[Row]]:
    told = new_histories()
    told.own("whole", "a", 5, 0, 10, removed=6, version=3, fenced=True)
    told.own("again", "a", 5, 0, 10).own("again", "a", 5, 11, 20, removed=9)
    told.own("open again", "a", 5, 0, 10).own("open again", "a", 5, 11, None).tell(
        "open again", "a", None, 30
    )
    told.own("silent", "a", 5, 0, None).tell("silent", "a", None, 7)
    told.own("next life", "a", 5, 0, None).tell("next life", "a", None, 50, node="a-1")
    told.tell("barrier only", "a", "barrier_added", 0, resource="p", token=5)
    told.own("no token", "a", None, 0, 1, barrier=False)
    told.own("claim", "a", 5, 0, 1, barrier=False, protocol="skuld", value=3.0)
    told.own("clock set back", "a", 5, 0, None).tell(
        "clock set back", "a", "start_entered", -90, resource="p", token=5, monotonic_time=5100.0
    )
    records = told.records(spark)
    made = accesses(records, told.processes(records))
    assert made.schema.fieldNames() == ACCESSES.fieldNames()
    assert [field.dataType for field in made.schema] == [field.dataType for field in ACCESSES]
    by_case: dict[str, list[Row]] = {}
    for row in made.collect():
        by_case.setdefault(row["group"], []).append(row)
    return by_case


def test_all_steps_of_a_token_are_one_row(rows: dict[str, list[Row]]) -> None:
    (row,) = rows["whole"]
    steps = (
        "barrier_added",
        "start_entered",
        "start_returned",
        "stop_entered",
        "stop_returned",
        "barrier_removed",
    )
    assert [row[f"{step}_sequence"] for step in steps] == [0, 1, 2, 3, 4, 5]
    assert (row["start_entered_wall"], row["start_entered_monotonic"]) == (NOON, 5000.0)
    assert (row["end_wall"], row["end_monotonic"], row["ended_by"]) == (NOON + 10, 5010.0, "stop")
    assert (row["token"], row["removed_revision"], row["version"], row["fenced"]) == (5, 6, 3, True)
    assert (row["label"], row["host"], row["boot"]) == ("a", "host-a", "boot-a")


def test_the_first_start_and_the_last_stop_count(rows: dict[str, list[Row]]) -> None:
    (row,) = rows["again"]
    assert (row["start_entered_sequence"], row["start_entered_wall"]) == (1, NOON)
    assert (row["end_wall"], row["ended_by"], row["removed_revision"]) == (NOON + 20, "stop", 9)


def test_an_access_that_was_entered_again_has_no_recorded_end(rows: dict[str, list[Row]]) -> None:
    (row,) = rows["open again"]
    assert (row["end_wall"], row["ended_by"]) == (NOON + 30, "silence")


def test_without_a_stop_it_lasts_until_the_last_record_of_its_node(rows: dict[str, list[Row]]) -> None:
    (row,) = rows["silent"]
    assert (row["end_wall"], row["end_monotonic"], row["ended_by"]) == (NOON + 7, 5007.0, "silence")
    (row,) = rows["next life"]
    assert (row["end_wall"], row["ended_by"]) == (NOON, "silence")


def test_a_barrier_alone_is_no_access(rows: dict[str, list[Row]]) -> None:
    (row,) = rows["barrier only"]
    assert (row["start_entered_sequence"], row["end_wall"], row["ended_by"]) == (None, None, None)


def test_steps_without_a_token_are_kept(rows: dict[str, list[Row]]) -> None:
    (row,) = rows["no token"]
    assert (row["token"], row["ended_by"]) == (None, "stop")


def test_the_value_of_a_claim_is_its_number(rows: dict[str, list[Row]]) -> None:
    assert rows["claim"][0]["claim"] == 3


def test_the_wall_time_is_that_of_the_record_that_counts(rows: dict[str, list[Row]]) -> None:
    (row,) = rows["clock set back"]
    assert (row["start_entered_sequence"], row["start_entered_wall"]) == (1, NOON)
