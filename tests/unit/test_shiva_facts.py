"""What Shiva's facts become in the history and in the log."""

from __future__ import annotations

import pytest

from rebalanser.core.shiva.messages import Fact, FactKind
from rebalanser.core.shiva.types import ApplicationId
from rebalanser.history import UNLIMITED_S, MemorySink
from rebalanser.runtime.clock import SystemClock
from rebalanser_kafka.shiva.facts import FactWriter, event_of

WEB = ApplicationId("t", "c", "web")


@pytest.mark.rule("AU-3", "SH-14")
@pytest.mark.parametrize(("mode", "limit_s"), [("available", UNLIMITED_S), ("exclusive", None)])
def test_a_start_says_how_long_the_next_owner_may_overlap(mode: str, limit_s: float | None) -> None:
    starting = Fact(FactKind.PROCESS_STARTING, WEB, "w", 7, 9, 9, detail={"run": 1, "mode": mode})
    event = event_of(starting, "w-folder-3", 3, label="w")
    assert (event.resource, event.token, event.overlap_limit_s) == ("t/c/web", 9, limit_s)
    assert (event.node, event.incarnation, event.term, event.version) == ("w-folder-3", 3, 7, 9)
    assert event.detail == {"run": 1, "mode": mode}, "that it is itself is said by the label"
    exited = Fact(FactKind.PROCESS_EXITED, WEB, "w", 7, 9, 9, detail={"run": 1})
    assert event_of(exited, "w-folder-3", 3, label="w").overlap_limit_s is None


@pytest.mark.rule("AU-4", "SH-7")
def test_a_published_document_has_the_number_under_which_workers_adopt_it() -> None:
    published = Fact(
        FactKind.DOCUMENT_PUBLISHED,
        term=7,
        version=12,
        revision=12,
        detail={"epoch": "7.1", "offset": 12, "workers": 2, "applications": 3},
    )
    event = event_of(published, "l-1", 1, label="l")
    assert (event.value, event.version, event.revision) == (12.0, 12, 12)
    assert event.detail == {"epoch": "7.1", "offset": 12, "nodes": 2, "resources": 3}
    assert published.detail["workers"] == 2, "the fact is as it was"


def test_a_leader_names_the_workers_that_it_counts_even_its_own() -> None:
    removed = Fact(FactKind.WORKER_REMOVED, worker="d", detail={"reason": "it left"})
    assert event_of(removed, "d-leader-1", 1, label="d").detail == {"worker": "d", "reason": "it left"}


@pytest.mark.rule("AU-2")
def test_the_records_of_all_incarnations_are_numbered_through() -> None:
    sink = MemorySink()
    teller = FactWriter("prod", "l-leader-abc", "l", sink, SystemClock())
    for term, node in enumerate(("l-leader-abc-1", "l-leader-abc-2"), 1):
        teller.tell(Fact(FactKind.TOOK_OVER, term=term, revision=term, detail={"term": term}), node, term)
    teller.close()
    written = [(r.group, r.process, r.node, r.label, r.incarnation, r.sequence, r.term) for r in sink.records]
    assert written == [
        ("prod", "l-leader-abc", "l-leader-abc-1", "l", 1, 0, 1),
        ("prod", "l-leader-abc", "l-leader-abc-2", "l", 2, 1, 2),
    ]
    assert sink.closed


@pytest.mark.rule("AU-3", "SH-14")
def test_what_is_told_late_has_the_time_at_which_it_was_so() -> None:
    sink, clock = MemorySink(), SystemClock()
    teller = FactWriter("prod", "w-1", "w", sink, clock)
    began = clock.now()
    teller.tell(Fact(FactKind.PROCESS_EXITED, WEB, "w", token=5, at=began - 60.0), "w-1", 1)
    teller.tell(Fact(FactKind.LEFT, worker="w"), "w-1", 1)
    exited, left = sink.records
    assert exited.monotonic_time == began - 60.0
    assert left.monotonic_time >= began
    assert left.wall_time - exited.wall_time == pytest.approx(
        left.monotonic_time - exited.monotonic_time, abs=1.0
    )


def test_without_a_history_the_log_alone_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rebalanser.shiva")
    teller = FactWriter("prod", "w-1", "w", None, SystemClock())
    teller.tell(Fact(FactKind.PROCESS_STARTING, WEB, "w", token=5), "w-1", 1)
    teller.close()
    assert caplog.records
