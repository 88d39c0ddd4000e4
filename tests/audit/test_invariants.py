"""Each invariant on small histories worked out by hand: violations, and what only looks like one (AU-4)."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from rebalanser.audit import invariants
from rebalanser.audit.accesses import accesses, in_turns
from rebalanser.audit.clocks import clocks, host_errors
from rebalanser.audit.invariants import ALL
from rebalanser.audit.options import Options
from rebalanser.audit.owner_pairs import suspects, suspects_in_order
from rebalanser.audit.tables import FINDINGS
from rebalanser.history import UNLIMITED_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import Row, SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.rule("AU-4", "AU-5")]

OPTIONS = Options(clock_error_s=0.5, unowned_limit_s=60.0)
HOST = {"host": "h", "boot": "one"}
SHIVA: Mapping[str, Any] = {"protocol": "shiva", "barrier": False}
NELI: Mapping[str, Any] = {"protocol": "neli", "barrier": False}
SKULD: Mapping[str, Any] = {"protocol": "skuld", "barrier": False}

NOTHING: tuple[str, ...] = ()
EXPECTED: dict[str, tuple[str, ...]] = {}


class Cases:
    """The cases under their names, each with what is to be found in it."""

    def __init__(self, histories: Any) -> None:
        self._histories = histories

    def expect(self, name: str, *found: str) -> Case:
        EXPECTED[name] = found
        return Case(self._histories, name)


class Case:
    """One case: a group of its own."""

    def __init__(self, histories: Any, name: str) -> None:
        self._histories, self._name = histories, name

    def own(self, who: str, token: int | None, start: float, stop: float | None, **fields: Any) -> Case:
        self._histories.own(self._name, who, token, start, stop, **fields)
        return self

    def tell(self, who: str, step: str | None, at: float, **fields: Any) -> Case:
        self._histories.tell(self._name, who, step, at, **({"resource": "p"} | fields))
        return self


def overlaps(cases: Cases) -> None:
    expect = cases.expect
    expect("handed over").own("a", 5, 0, 10, removed=6).own("b", 7, 10.1, 20, removed=8)
    expect("ended with its lease").own("a", 5, 0, 10).own("b", 7, 15, 20)
    expect("two hosts at once", "overlap certain").own("a", 5, 0, 10).own("b", 7, 5, 20)
    expect("within the clock error", "overlap possible").own("a", 5, 0, 10).own("b", 7, 9.8, 20)
    expect("a short one inside", "overlap certain").own("a", 5, 0, 10).own("b", 7, 5, 5.001)
    expect("revisions decide").own("a", 5, 0, 10, removed=6).own("b", 7, 9, 20)
    expect("one clock decides", "overlap certain").own("a", 5, 0, 10, removed=6, **HOST).own(
        "b", 7, 9.999, 20, **HOST
    )
    expect("one clock, one ms apart").own("a", 5, 0, 10, **HOST).own("b", 7, 10.001, 20, **HOST)
    expect("one clock, wall stepped back").own("a", 5, 0, 10, **HOST).own(
        "b", 7, 9, 20, **HOST, monotonic_time=5011.0
    )
    expect("killed").own("a", 5, 0, None).tell("a", None, 3).own("b", 7, 13, 20)
    expect("woke too late", "overlap certain").own("a", 5, 0, None).own("b", 7, 13, 20).tell("a", None, 15)
    expect("each against the longest", "overlap certain", "overlap certain").own("a", 5, 0, 30, **HOST).own(
        "b", 7, 5, 8, **HOST
    ).own("c", 9, 10, 40, **HOST)
    expect("a possible longer one hides none", "overlap certain", "overlap certain").own(
        "a", 5, 0, 9.1, **HOST
    ).own("x", 6, 1, None).tell("x", None, 9.3).own("b", 8, 9, 20, **HOST)
    expect("raised, then the next", "overlap possible").own("a", 5, 0, None, raised=10).tell(
        "a", None, 25
    ).own("b", 7, 20, 30)
    expect("raised, and the next before", "overlap certain").own("a", 5, 0, None, raised=10).tell(
        "a", None, 25
    ).own("b", 7, 5, 30)
    expect("raised, on one clock", "overlap possible").own("a", 5, 0, None, raised=10, **HOST).tell(
        "a", None, 25, **HOST
    ).own("b", 7, 24.999, 30, **HOST)
    expect("raised, silent before the next").own("a", 5, 0, None, raised=10).tell("a", None, 12).own(
        "b", 7, 20, 30
    )
    for name, clock in (("one that raised hides none", {}), ("nor on one clock", HOST)):
        expect(name, "overlap possible", "overlap certain").own("x", 5, 3, None, raised=10, **clock).tell(
            "x", None, 50, **clock
        ).own("y", 6, 20, 40, **clock).own("b", 7, 30, 100, **clock)
    expect("started again after the next", "token_order certain").own("a", 5, 0, 10).own("b", 7, 12, 20).own(
        "a", 5, 21, 30, barrier=False
    )
    expect("started again, and the next before", "overlap certain").own("a", 5, 0, 10).own(
        "a", 5, 12, 30, barrier=False
    ).own("b", 7, 20, 40)
    for name, clock in (("one started again hides none", {}), ("nor on its own clock", HOST)):
        expect(name, "token_order certain", "overlap certain").own("a", 5, 0, 10, **clock).own(
            "b", 7, 5, 20, **clock
        ).own("a", 5, 30, 40, barrier=False, **clock)
    expect(
        "one released and started again hides none",
        *("token_order certain", "overlap certain", "barrier_overlap certain"),
    ).own("a", 5, 0, 10).own("b", 7, 5, 20).own("a", 5, 30, 40, barrier=False, removed=9)
    for name, clock in (("a late one hides none", {}), ("nor on one clock if late", HOST)):
        expect(name, "token_order certain", "overlap certain").own("x", 3, 30, 40, **clock).own(
            "a", 5, 0, 10, **clock
        ).own("b", 7, 5, 20, **clock)
    expect("paused for the next", "token_order certain").own("a", 5, 0, 10, **NELI).own(
        "b", 7, 12, 20, **NELI
    ).own("a", 5, 30, 40, **NELI)
    expect(
        "several barriers stood",
        *("barrier_overlap certain", "overlap certain", "barrier_overlap certain", "overlap certain"),
    ).own("a", 5, 0, 10, removed=20).own("x", 6, 1, 30, removed=19).own("b", 7, 12, 40)
    expect("asked for while OnStop ran", "step_order certain", "overlap certain").own(
        "a", 5, 0, 10, removed=6, asked=1.5
    ).own("b", 7, 9, 20)
    expect("asked for after OnStop").own("a", 5, 0, 10, removed=6, asked=0.01).own("b", 7, 9, 20)
    expect("again the same", *NOTHING).own("a", 5, 0, 10, removed=6).own("a", 7, 10, 20, removed=8)
    expect("neli handed over").own("a", 5, 0, 10, **NELI).own("b", 7, 9.8, 20, **NELI)
    expect("neli at once", "overlap certain").own("a", 5, 0, 10, **NELI).own("b", 7, 9, 20, **NELI)
    expect("neli, allowed").own("a", 5, 0, 10, **NELI, overlap_limit_s=2.0).own(
        "b", 7, 9, 20, **NELI, overlap_limit_s=2.0
    )
    expect("neli, too long", "overlap certain").own("a", 5, 0, 10, **NELI, overlap_limit_s=2.0).own(
        "b", 7, 7, 20, **NELI, overlap_limit_s=2.0
    )
    expect("shiva, available").own("a", 5, 0, 100, **SHIVA, overlap_limit_s=UNLIMITED_S).own(
        "b", 7, 7, 20, **SHIVA, overlap_limit_s=UNLIMITED_S
    )
    expect("one that may hides none", "overlap certain").own(
        "x", 3, 0, 100, **SHIVA, overlap_limit_s=UNLIMITED_S
    ).own("a", 5, 1, 20, **SHIVA).own("b", 7, 7, 30, **SHIVA)


def barriers(cases: Cases) -> None:
    expect = cases.expect
    expect("barrier held twice", "barrier_overlap certain").own("a", 5, 0, 10, removed=9).own(
        "b", 7, 10.5, 20, removed=12
    )
    expect("barrier held twice, and none added", "start_without_barrier certain").own(
        "a", 5, 0, 10, removed=9
    ).own("b", 7, 10.5, 20, barrier=False)
    expect("removed, though OnStop raised", "step_order certain").own("a", 5, 0, None, raised=10, removed=6)
    expect("started again, unguarded", "start_without_barrier certain").own("a", 5, 0, 10, barrier=False).own(
        "a", 5, 11, 20, barrier=False
    )
    expect("removed between two starts", "step_order certain").own("a", 5, 0, 10, removed=6).own(
        "a", 5, 11, 20, barrier=False
    )
    expect("no barrier", "start_without_barrier certain").own("a", 5, 0, 10, barrier=False)
    expect("no token", "start_without_barrier certain").own("a", None, 0, 10, barrier=False)
    expect("barrier after start", "start_without_barrier certain").tell(
        "a", "start_entered", 0, token=5
    ).tell("a", "barrier_added", 1, token=5)
    expect("start refused").tell("a", "barrier_added", 0, token=5).tell(
        "a", "barrier_removed", 1, token=5, revision=6
    )
    expect("started again").own("a", 5, 0, 10).own("a", 5, 11, 20, barrier=False, removed=9)
    expect("removed first", "step_order certain").own("a", 5, 0, None, removed=6).tell(
        "a", "stop_returned", 2, token=5
    )
    expect("removed, not stopped", "step_order certain").own("a", 5, 0, None, removed=6)
    expect("removed, not stopped again", "step_order certain").own("a", 5, 0, 10).own(
        "a", 5, 11, None, barrier=False, removed=9
    )
    expect("removed before the start", "step_order certain").tell("a", "barrier_added", 0, token=5).tell(
        "a", "barrier_removed", 1, token=5, revision=6
    ).own("a", 5, 2, 3, barrier=False)
    expect("stopped first", "step_order certain").tell("a", "stop_returned", 0, token=5, protocol="neli").own(
        "a", 5, 1, None, **NELI
    )


def gaps_and_tokens(cases: Cases) -> None:
    expect = cases.expect
    expect("unowned", "unowned certain").own("a", 5, 0, 10, removed=6).own("b", 7, 70.6, 80)
    expect("unowned within the clock error").own("a", 5, 0, 10, removed=6).own("b", 7, 70.4, 80)
    expect("unowned on one clock", "unowned certain").own("a", 5, 0, 10, removed=6, **HOST).own(
        "b", 7, 70.1, 80, **HOST
    )
    expect("unowned after silence", "unowned possible").own("a", 5, 0, None).own("b", 7, 100, 110)
    expect("unowned, maybe stopped", "unowned possible").own("a", 5, 0, 10, **SHIVA).own(
        "b", 7, 100, 110, **SHIVA
    )
    expect("covered by a third").own("a", 5, 0, 95, **NELI, overlap_limit_s=UNLIMITED_S).own(
        "c", 6, 3, 10, **NELI
    ).own("b", 7, 100, 110, **NELI)
    expect("a task waits").own("a", 5, 0, 10, **SKULD).own("b", 7, 100, 110, **SKULD)
    expect("token went back", "token_order certain").own("a", 7, 0, 10).own("b", 5, 15, 20)
    expect("two tokens went back by one", "token_order certain").own("a", 7, 0, 10).own("c", 8, 15, 20).own(
        "b", 5, 25, 30
    )
    expect("token went back on one clock", "token_order certain").own("a", 7, 0, 0.1, **HOST).own(
        "b", 5, 0.2, 20, **HOST
    )
    expect("within the clock error they started").own("a", 5, 0.3, 0.31, removed=6).own("b", 7, 0, 20)
    expect("token given twice", "token_order certain").own("a", 7, 0, 10).own("b", 7, 15, 20)


def leaders_and_tasks(cases: Cases) -> None:
    expect = cases.expect
    expect("two leaders", "two_leaders certain").tell("a", "elected", 0, term=3).tell(
        "b", "elected", 9, term=3
    )
    expect("two terms").tell("a", "elected", 0, term=3).tell("b", "elected", 9, term=4)
    expect("told twice").tell("a", "elected", 0, term=3).tell("a", "elected", 9, term=3)
    expect("one claim of two", "claim_twice certain").own("a", 5, 0, 10, **SKULD, value=1.0).own(
        "b", 7, 15, 20, **SKULD, value=1.0
    )
    expect("one token of two claims", "claim_twice certain").own("a", 5, 0, 10, **SKULD, value=1.0).own(
        "b", 5, 15, 20, **SKULD, value=2.0
    )
    expect("claims in a row").own("a", 5, 0, 10, **SKULD, value=1.0).own("b", 7, 15, 20, **SKULD, value=2.0)

    def written(name: str, numbers: tuple[int, ...], *found: str) -> Case:
        told = expect(name, *found).own("a", 5, 0, None, **SKULD, value=0.0)
        for at, number in enumerate(numbers, 1):
            told.tell("a", "updated", at, token=5, value=float(number), revision=10 + at, protocol="skuld")
        return told

    written("updates", (0, 1, 2, 3))
    written("an update resent", (0, 1, 1, 2))
    written("an update missing", (0, 1, 3), "update_gap certain")
    written("the first update missing", (1, 2), "update_gap certain")
    claimed_later = {"protocol": "skuld", "barrier": False, "value": 1.0}
    written("written before the next claim", (0, 1)).own("b", 13, 10, 20, **claimed_later)
    written("written after the next claim", (0, 1), "stale_write certain").own(
        "b", 11, 10, 20, **claimed_later
    )
    written("finished after the next claim", (0,), "stale_write certain").tell(
        "a", "stop_returned", 5, token=5, protocol="skuld"
    ).own("b", 12, 10, 20, **claimed_later).tell("a", "finished", 30, token=5, revision=40, protocol="skuld")
    written("finished by the next claim", (0,)).own("b", 12, 10, 20, **claimed_later).tell(
        "b", "finished", 30, token=12, revision=40, protocol="skuld"
    )


@pytest.fixture(scope="module")
def found(spark: SparkSession, new_histories: Any) -> dict[str, list[Row]]:
    histories = new_histories()
    cases = Cases(histories)
    for told in (overlaps, barriers, gaps_and_tokens, leaders_and_tasks):
        told(cases)
    histories.own("fenced", "a", 5, 0, 10, fenced=True).own("fenced", "b", 7, 5, 20, fenced=True)
    _clocks_apart(histories)
    records = histories.records(spark).persist()
    owned = accesses(records, histories.processes(records)).persist()
    owned = in_turns(owned, records, lambda _words, frame: frame.persist())
    doubtful = suspects(owned, OPTIONS).persist()
    apart = clocks(records, doubtful, OPTIONS).persist()
    judged_case = invariants.Case(
        records, owned, doubtful, suspects_in_order(owned, OPTIONS), host_errors(apart), OPTIONS
    )
    by_case = defaultdict(list)
    for rows in (invariant(judged_case) for invariant in ALL):
        assert rows.schema.fieldNames() == FINDINGS.fieldNames()
        for row in rows.collect():
            by_case[row["group"]].append(row)
    for frame in (apart, doubtful, owned, records):
        frame.unpersist()
    return by_case


def _clocks_apart(histories: Any) -> None:
    """Host-b is two hours behind, as the barrier of q shows; its overlap of p may be none."""
    told = {"resource": "q"}
    histories.own("clocks apart", "a", 5, 0, 1, removed=6, **told)
    histories.own("clocks apart", "b", 7, -7200, -7190, removed=8, **told)
    histories.own("clocks apart", "a", 15, 5, 10).own("clocks apart", "b", 17, 3, 20)


@pytest.mark.rule("RB-1", "RB-2", "RB-5", "RB-11", "RB-12")
def test_every_violation_is_found_and_nothing_else(found: dict[str, list[Row]]) -> None:
    got = {name: sorted(f"{row['kind']} {row['certainty']}" for row in found[name]) for name in EXPECTED}
    assert got == {name: sorted(kinds) for name, kinds in EXPECTED.items()}


def test_a_finding_says_what_happened(found: dict[str, list[Row]]) -> None:
    (row,) = found["two hosts at once"]
    assert row["sentence"] == (
        "two hosts at once/p had two owners for 5 s: a (token 5) had not stopped when b (token 7) started"
    )
    assert (row["rule"], row["lasts_s"], row["uncertainty_s"], row["fenced"]) == ("RB-1", 5.0, 0.5, None)
    assert (row["begins"], row["ends"]) == (1_700_000_005.0, 1_700_000_010.0)
    assert [(party["label"], party["token"], party["host"]) for party in row["parties"]] == [
        ("a", 5, "host-a"),
        ("b", 7, "host-b"),
    ]
    assert [(seen["process"], seen["sequence"]) for seen in row["evidence"]] == [
        ("two hosts at once/a", 1),
        ("two hosts at once/a", 4),
        ("two hosts at once/b", 1),
    ]


def test_what_is_not_certain_says_why(found: dict[str, list[Row]]) -> None:
    assert (
        "may differ by 500 ms, so there may be no overlap" in found["within the clock error"][0]["sentence"]
    )
    assert "the end of its access was not recorded" in found["woke too late"][0]["sentence"]
    told = found["raised, then the next"][0]["sentence"]
    assert told.endswith("OnStop of a raised, so the end of its access is unknown")


def test_a_fenced_overlap_says_that_receivers_refused_the_older_one(found: dict[str, list[Row]]) -> None:
    (row,) = found["fenced"]
    assert row["fenced"] is True
    assert "receivers check the token and refuse writes of a" in row["sentence"]


def test_exact_times_have_no_uncertainty(found: dict[str, list[Row]]) -> None:
    (row,) = found["one clock decides"]
    assert row["uncertainty_s"] == 0.0
    assert row["lasts_s"] == pytest.approx(0.001)
    assert "for 1 ms" in row["sentence"]


def test_clocks_proven_apart_make_nothing_certain(found: dict[str, list[Row]]) -> None:
    (row,) = found["clocks apart"]
    assert (row["kind"], row["certainty"]) == ("overlap", "possible")
    assert row["uncertainty_s"] == pytest.approx(0.5 + 2 * 7201.02)


def test_ids_name_the_records_and_differ(found: dict[str, list[Row]]) -> None:
    ids = [row["id"] for rows in found.values() for row in rows]
    assert len(ids) == len(set(ids))
    assert all(len(name) == 64 for name in ids)
