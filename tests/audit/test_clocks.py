"""Cause precedes effect: what wall clocks say against it tells how far they are apart (AU-5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rebalanser.audit.accesses import accesses
from rebalanser.audit.clocks import ALLOCATION, BARRIER, clocks, host_errors
from rebalanser.audit.options import Options
from rebalanser.audit.owner_pairs import suspects
from rebalanser.audit.tables import CLOCKS

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.rule("AU-5")]

NOON = 1_700_000_000.0


def publish(told: Any, group: str, who: str, version: int, at: float, *, told_late_s: float = 0.1) -> None:
    told.tell(group, who, "group_read", at, version=version - 1)
    told.tell(group, who, "published", at + told_late_s, version=version - 1, value=float(version))


@pytest.fixture(scope="module")
def made(spark: SparkSession, new_histories: Any) -> tuple[dict[str, list[Row]], dict[str, dict[str, float]]]:
    told = new_histories()
    publish(told, "in step", "a", 4, 0)
    told.tell("in step", "b", "adopted", -0.4, version=4)
    publish(told, "told late", "a", 4, 0, told_late_s=30)
    told.tell("told late", "b", "adopted", 1, version=4)
    publish(told, "one behind", "a", 4, 0)
    publish(told, "one behind", "b", 5, 10)
    for at, version in ((-3600, 4), (-3590, 5)):
        told.tell("one behind", "c", "adopted", at, version=version)
        told.tell("one behind", "d", "adopted", 15, version=version)
    publish(told, "leader ahead", "a", 4, 7200)
    for who in ("b", "c", "d"):
        told.tell("leader ahead", who, "adopted", 1, version=4)
    told.own("by barriers", "a", 5, 0, 10, removed=6).own("by barriers", "b", 7, -90, -80, removed=8)
    told.own("lease ended", "a", 5, 0, 10).own("lease ended", "b", 7, -90, -80)
    publish(told, "unnamed", "a", 4, 0)
    told.tell("unnamed", "b", "adopted", -60, version=4, host=None)
    records = told.records(spark).persist()
    options = Options(clock_error_s=0.5)
    table = clocks(records, suspects(accesses(records, told.processes(records)), options), options)
    assert table.schema.fieldNames() == CLOCKS.fieldNames()
    table.persist()
    by_group: dict[str, list[Row]] = {}
    for row in table.collect():
        by_group.setdefault(row["group"], []).append(row)
    errors: dict[str, dict[str, float]] = {}
    for row in host_errors(table).collect():
        errors.setdefault(row["group"], {})[row["host"]] = row["error_s"]
    table.unpersist()
    records.unpersist()
    return by_group, errors


def pairs(rows: list[Row]) -> list[tuple[str, str, float, str]]:
    return sorted((row["host"], row["behind_host"], row["behind_s"], row["cause"]) for row in rows)


def test_contradictions_within_the_clock_error_and_late_records_prove_nothing(made: Any) -> None:
    by_group, errors = made
    for group in ("in step", "told late", "lease ended"):
        assert group not in by_group
        assert group not in errors


def test_an_allocation_is_adopted_after_its_leader_read_the_group(made: Any) -> None:
    by_group, _ = made
    assert pairs(by_group["one behind"]) == [
        ("host-c", "host-a", 3600.0, ALLOCATION),
        ("host-c", "host-b", 3600.0, ALLOCATION),
    ]
    assert by_group["one behind"][0]["seen_wall"] in {NOON - 3600, NOON - 3590}


def test_a_barrier_is_added_after_its_last_holder_had_stopped(made: Any) -> None:
    by_group, errors = made
    ((host, behind_host, behind_s, cause),) = pairs(by_group["by barriers"])
    assert (host, behind_host, cause) == ("host-b", "host-a", BARRIER)
    assert behind_s == pytest.approx(100.02)
    assert errors["by barriers"].keys() == {"host-a", "host-b"}


def test_the_host_that_is_apart_from_most_is_wrong(made: Any) -> None:
    _, errors = made
    assert errors["one behind"] == {"host-c": 3600.0}
    assert errors["leader ahead"] == {"host-a": 7199.0}


def test_where_the_host_is_unnamed_the_process_is_named(made: Any) -> None:
    by_group, _ = made
    assert pairs(by_group["unnamed"]) == [("unnamed/b", "host-a", 60.0, ALLOCATION)]
