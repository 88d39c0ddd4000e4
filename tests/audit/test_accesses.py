"""The steps of each process, token and resource become one row with its end (AU-3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rebalanser.audit.accesses import accesses, in_turns
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
    told.own("raised", "a", 5, 0, None, raised=7).tell("raised", "a", None, 9)
    told.own("raised, then stopped", "a", 5, 0, None, raised=7).tell(
        "raised, then stopped", "a", "stop_returned", 9, resource="p", token=5
    )
    told.own("asked", "a", 5, 0, 10, removed=6, asked=0.25)
    told.own("thrice", "a", 5, 0, 10).own("thrice", "a", 5, 11, 20).own("thrice", "a", 5, 21, 30, removed=9)
    told.own("claim", "a", 5, 2, 3, barrier=False, protocol="skuld", value=3.0)
    records = told.records(spark).persist()
    whole = accesses(records, told.processes(records)).persist()
    made = in_turns(whole, records, lambda _words, frame: frame)
    assert made.schema.fieldNames() == ACCESSES.fieldNames()
    assert [field.dataType for field in made.schema] == [field.dataType for field in ACCESSES]
    by_case: dict[str, list[Row]] = {}
    for row in made.orderBy("turn").collect():
        by_case.setdefault(row["group"], []).append(row)
    whole.unpersist()
    records.unpersist()
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
    assert row["turn"] == 0
    assert row["stop_failed_sequence"] is None
    assert [row[f"{step}_sequence"] for step in steps] == [0, 1, 2, 3, 4, 5]
    assert (row["start_entered_wall"], row["start_entered_monotonic"]) == (NOON, 5000.0)
    assert (row["end_wall"], row["end_monotonic"], row["ended_by"]) == (NOON + 10, 5010.0, "stop")
    assert (row["token"], row["removed_revision"], row["version"], row["fenced"]) == (5, 6, 3, True)
    assert (row["label"], row["host"], row["boot"]) == ("a", "host-a", "boot-a")


def test_each_start_after_a_stop_is_a_turn_of_its_own(rows: dict[str, list[Row]]) -> None:
    first, second = rows["again"]
    assert [(row["turn"], row["ended_by"]) for row in (first, second)] == [(0, "stop"), (1, "stop")]
    assert (first["start_entered_wall"], first["end_wall"]) == (NOON, NOON + 10)
    assert (second["start_entered_wall"], second["end_wall"]) == (NOON + 11, NOON + 20)
    spans = [(row["start_entered_wall"] - NOON, row["end_wall"] - NOON) for row in rows["thrice"]]
    assert spans == [(0, 10), (11, 20), (21, 30)]


def test_what_there_is_to_say_of_the_barrier_stands_in_each_turn(rows: dict[str, list[Row]]) -> None:
    for row in rows["again"]:
        assert (row["barrier_added_sequence"], row["removed_revision"], row["label"]) == (0, 9, "a")
        assert row["barrier_removed_wall"] == NOON + 20.01


def test_a_turn_that_was_not_stopped_has_no_recorded_end(rows: dict[str, list[Row]]) -> None:
    first, second = rows["open again"]
    assert (first["end_wall"], first["ended_by"]) == (NOON + 10, "stop")
    assert (second["start_entered_wall"], second["end_wall"]) == (NOON + 11, NOON + 30)
    assert second["ended_by"] == "silence"


def test_an_onstop_that_raised_ends_nothing(rows: dict[str, list[Row]]) -> None:
    (row,) = rows["raised"]
    assert (row["end_wall"], row["end_monotonic"], row["ended_by"]) == (NOON + 9, 5009.0, "failure")
    assert (row["stop_failed_wall"], row["stop_failed_monotonic"]) == (NOON + 7, 5007.0)
    (row,) = rows["raised, then stopped"]
    assert (row["end_wall"], row["ended_by"]) == (NOON + 9, "stop")


def test_when_a_removal_was_asked_for_is_known_where_it_is_told(rows: dict[str, list[Row]]) -> None:
    (row,) = rows["asked"]
    assert row["removal_sent_monotonic"] == pytest.approx(5009.76)
    assert rows["whole"][0]["removal_sent_monotonic"] is None


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
    (row,) = rows["claim"]
    assert (row["claim"], row["turn"]) == (3, 0)


def test_the_wall_time_is_that_of_the_record_that_counts(rows: dict[str, list[Row]]) -> None:
    (row,) = rows["clock set back"]
    assert (row["start_entered_sequence"], row["start_entered_wall"]) == (1, NOON)
