"""What ``rebalanser shiva`` tells people, of answers that take no cluster."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from rebalanser.applications.status import ApplicationStatus, ClusterStatus
from rebalanser.cli.shiva import _started, _url
from rebalanser.cli.shiva_table import MOST_FAILURES, application_line, render
from rebalanser.errors import InvalidName, InvalidUrl
from rebalanser.shiva.types import ApplicationEntry, ApplicationState, Archive, Mode, check_part


def application(**fields: Any) -> ApplicationStatus:
    known: dict[str, Any] = {
        "application": "t/c/web",
        "state": ApplicationState.FAILED,
        "worker": None,
        "leaving": None,
        "reason": "it failed on every worker that could run it",
        "mode": Mode.AVAILABLE,
        "tags": [],
        "command": "a1",
        "size_bytes": 1,
        "restarts": 0,
        "failed_on": {"host-2": "could not be started: no such file: web"},
    }
    return ApplicationStatus(**{**known, **fields})


@pytest.mark.rule("SH-11")
class TestFailures:
    def test_the_line_says_where_it_failed_and_why(self) -> None:
        assert application_line(application()) == (
            "t/c/web: failed, it failed on every worker that could run it, "
            "failed on host-2: could not be started: no such file: web"
        )

    def test_of_many_workers_a_few_are_named(self) -> None:
        failed_on = {f"w{number}": "exit code 1" for number in range(MOST_FAILURES + 2)}
        line = application_line(application(failed_on=failed_on, reason=""))
        assert line.count("exit code 1") == MOST_FAILURES
        assert line.endswith("and on 2 workers more")

    def test_the_table_says_it_too(self) -> None:
        status = ClusterStatus(
            cluster="c", leader="l", epoch="1.1", workers=[], applications=[application()], set_aside=[]
        )
        drawn = io.StringIO()
        Console(file=drawn, width=200).print(render(status))
        assert "failed on host-2: could not be started" in drawn.getvalue()


@pytest.mark.parametrize(
    ("state", "worker", "line"),
    [
        (ApplicationState.FINISHED, None, "t/c/web is finished"),
        (ApplicationState.RUNNING, "w", "t/c/web is running on w"),
    ],
)
def test_what_a_start_has_led_to(state: ApplicationState, worker: str | None, line: str) -> None:
    entry = ApplicationEntry(
        command="a1",
        offset=1,
        timestamp_ms=0,
        archive=Archive("0" * 64, 1, 1),
        mode=Mode.AVAILABLE,
        tags=frozenset(),
        state=state,
        worker=worker,
    )
    assert _started("t/c/web", entry) == line
    assert _started("t/c/web", None) == "t/c/web: start commanded"


def test_a_registry_that_is_no_kafka_is_refused_by_what_shiva_needs() -> None:
    with pytest.raises(InvalidUrl, match=r"Shiva needs Kafka, not sqlite://.*kafka://HOST"):
        _url("sqlite:///groups.db", None, None)
    assert _url("kafka://h:1/c", None, None) == "kafka://h:1/c"


@pytest.mark.parametrize(("what", "words"), [("application", "an application"), ("tag", "a tag")])
def test_what_cannot_be_a_name_is_told_in_grammar(what: str, words: str) -> None:
    with pytest.raises(InvalidName, match=f"'a b' cannot be {words}: use at most"):
        check_part("a b", what)
