"""What ``rebalanser shiva`` tells people, of answers that take no cluster."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rebalanser.cli import shiva as cli
from rebalanser.cli import shiva_options, shiva_running
from rebalanser.cli.output import Face
from rebalanser.cli.shiva import _environment, _started, _watch
from rebalanser.cli.shiva_options import ClusterOptions, topic_names
from rebalanser.cli.shiva_running import WorkOptions
from rebalanser.cli.shiva_table import MOST_FAILURES, application_line, plain, render
from rebalanser.core.allocation import Capacity, Requests
from rebalanser.core.shiva.records import AssignmentDocument, Ping, Pong, RunReport
from rebalanser.core.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationPattern,
    ApplicationState,
    Archive,
    Cordon,
    Epoch,
    Incarnation,
    Mode,
    RunState,
    SetAside,
    WorkerEntry,
    check_part,
)
from rebalanser.errors import InvalidName, InvalidSettings, InvalidUrl, UnknownApplication
from rebalanser.shiva import Commanded, Start, TopicNames, read_channel_file
from rebalanser.shiva.status import (
    ApplicationStatus,
    ClusterStatus,
    LastHeard,
    WorkerStatus,
    status_of,
)


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


WEB = ApplicationId("t", "c", "web")
RESTARTED = {WEB: RunReport("a1", RunState.BACKING_OFF, 3, "exit code 1")}
FRESH_S = 70.0
"""The age up to which a ping or pong counts, with rounds of 30 s."""


def document(state: ApplicationState = ApplicationState.RUNNING, **fields: Any) -> AssignmentDocument:
    worker = fields.pop("worker", "w")
    entry = ApplicationEntry("a1", state, Mode.AVAILABLE, Archive("0" * 64, 1, 1), worker=worker, **fields)
    return AssignmentDocument(
        Epoch(5, 2),
        "host-1",
        0,
        90.0,
        workers={"w": WorkerEntry(Incarnation("folder", 1), host="h")},
        applications={WEB: entry},
        round_s=30.0,
    )


def ping(age_s: float, leader: str = "host-2") -> tuple[Ping, float]:
    return Ping(6, leader, 1, Epoch(5, 2), 90.0), age_s


def pong(age_s: float, **fields: Any) -> tuple[Pong, float]:
    known: dict[str, Any] = {"seen": Epoch(5, 2), "incarnation": Incarnation("folder", 1)}
    return Pong(**{"worker": "w", "sequence": 1, "round": 1, "term": 6, **known, **fields}), age_s


@pytest.mark.rule("SH-24")
class TestRestarts:
    """What the document leaves to the pongs: what is being started again is not called running."""

    def test_the_last_pong_tells_of_restarts(self) -> None:
        heard = LastHeard(ping(3.2), {"w": pong(4.0, applications=RESTARTED)})
        status = status_of("c", document(), heard)
        assert plain(status)[-1] == "t/c/web: assigned on w, 3 restarts, exit code 1"
        assert not status.settled

    def test_once_it_runs_again_the_restarts_stay_counted(self) -> None:
        runs = {WEB: RunReport("a1", RunState.RUNNING, 3)}
        status = status_of("c", document(), LastHeard(ping(3.2), {"w": pong(4.0, applications=runs)}))
        assert plain(status)[-1] == "t/c/web: running on w, 3 restarts"
        assert status.settled

    @pytest.mark.parametrize(
        "fields",
        [
            {"incarnation": Incarnation("folder", 2), "applications": RESTARTED},
            {"applications": {WEB: replace(RESTARTED[WEB], command="a0")}},
        ],
        ids=["another process", "another command"],
    )
    def test_a_pong_of_something_else_tells_nothing(self, fields: dict[str, Any]) -> None:
        (web,) = status_of("c", document(), LastHeard(ping(3.2), {"w": pong(4.0, **fields)})).applications
        assert (web.restarts, web.reason.startswith("exit")) == (0, False)

    def test_a_stale_worker_leaves_it_unknown(self) -> None:
        old = pong(FRESH_S + 1, applications=RESTARTED)
        (web,) = status_of("c", document(), LastHeard(ping(3.2), {"w": old})).applications
        assert web.state == "unknown"


@pytest.mark.rule("SH-20")
class TestAges:
    def test_the_status_says_who_leads_now_and_when_each_was_heard(self) -> None:
        status = status_of("c", document(), LastHeard(ping(3.2), {"w": pong(4.0)}))
        assert plain(status) == [
            "c: host-2 leads (last ping 3 s ago), epoch 5.2 by host-1, 1 worker, 1 of 1 application running",
            "w: 1 application, on h, last pong 4 s ago",
            "t/c/web: running on w",
        ]
        assert status.settled

    def test_what_is_stale_is_never_called_running(self) -> None:
        heard = LastHeard(ping(FRESH_S + 1, "host-1"), {"w": pong(FRESH_S + 2)})
        status = status_of("c", document(), heard)
        known = "epoch 5.2 by host-1, 1 worker, 0 of 1 application running"
        assert plain(status) == [
            f"c: STALE: no ping from a leader for 71 s (host-1 was the last one), {known}",
            "w: 1 application, on h, STALE: last pong 72 s ago",
            "t/c/web: unknown on w, it ran when w was last heard",
        ]
        assert not status.settled

    def test_a_worker_without_a_leader_may_have_stopped_what_it_ran(self) -> None:
        """What is exclusive has ended by then, which its worker says, and no document."""
        status = status_of("c", document(), LastHeard(ping(FRESH_S + 1), {"w": pong(20)}))
        assert plain(status)[2] == "t/c/web: unknown on w, it ran when a leader was last heard"
        assert "0 of 1 application running" in plain(status)[0]

    @pytest.mark.parametrize(
        "heard",
        [
            LastHeard(None, {"w": pong(1)}),
            LastHeard(ping(FRESH_S + 1), {"w": pong(1)}),
            LastHeard(ping(1), {"w": pong(FRESH_S + 1)}),
            LastHeard(ping(1), {}),
            LastHeard(ping(1), {"w": pong(1, incarnation=Incarnation("folder", 2))}),
            LastHeard(ping(1), {"w": pong(1, leaving=True)}),
        ],
        ids=["no ping", "old ping", "old pong", "no pong", "pong of another process", "left"],
    )
    def test_nothing_that_is_not_known_to_live_is_settled(self, heard: LastHeard) -> None:
        assert not status_of("c", document(), heard).settled
        assert status_of("c", document(), LastHeard(ping(FRESH_S), {"w": pong(FRESH_S)})).settled

    def test_a_worker_that_lags_behind_is_named_with_what_it_follows(self) -> None:
        heard = LastHeard(ping(1), {"w": pong(1, seen=Epoch(5, 1))})
        assert plain(status_of("c", document(), heard))[1].endswith("1 s ago, behind: follows 5.1")
        heard = LastHeard(ping(1), {"w": pong(1, seen=None)})
        assert plain(status_of("c", document(), heard))[1].endswith("behind: follows no document")

    def test_a_cluster_that_nobody_leads_is_stale(self) -> None:
        assert not status_of("c", None, LastHeard()).settled
        assert plain(status_of("c", None, LastHeard())) == [
            "c: no leader has published anything yet, STALE: no ping from a leader"
        ]
        assert plain(status_of("c", None)) == ["c: no leader has published anything yet"]

    def test_short_rounds_leave_time_for_a_change_of_the_leader(self) -> None:
        quick = replace(document(), round_s=1.0)
        assert status_of("c", quick, LastHeard(ping(12), {"w": pong(12)})).settled
        assert not status_of("c", quick, LastHeard(ping(13), {"w": pong(12)})).settled

    def test_the_table_shows_it_too(self) -> None:
        drawn = io.StringIO()
        stale = status_of("c", document(), LastHeard(ping(3), {"w": pong(FRESH_S + 1)}))
        Console(file=drawn, width=200).print(render(stale))
        assert "STALE: last pong 71 s ago" in drawn.getvalue()
        assert "unknown" in drawn.getvalue()

    def test_who_watches_sees_what_becomes_stale_without_a_new_document(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fresh = LastHeard(ping(1), {"w": pong(1)})
        heard = [fresh, fresh, LastHeard(ping(FRESH_S + 1), {"w": pong(FRESH_S + 1)})]
        cluster = mock.Mock()
        cluster.documents.return_value = [document()] * 3
        cluster.heard.side_effect = heard
        _watch(Face("kafka://h:1/c", json=False), cluster, ApplicationPattern.parse("*"))
        headlines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("c:")]
        assert [line.partition(" (")[0] for line in headlines] == [
            "c: host-2 leads",
            "c: STALE: no ping from a leader for 71 s",
        ]
        assert cluster.documents.call_args.kwargs["repeat_s"] > 0


@pytest.mark.rule("SH-17")
@pytest.mark.parametrize("command", [["leader"], ["daemon", "--data", "d"]], ids=lambda words: words[0])
def test_times_of_a_leader_are_options(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = mock.Mock()
    monkeypatch.setattr(ClusterOptions, "opened", lambda *_: contextlib.nullcontext(cluster))
    monkeypatch.setattr(shiva_running, "_run_until_signal", lambda *_: None)
    retries = ["--retry-initial", "4", "--retry-max", "9"]
    times = ["--round", "2", "--stalled", "50", *retries, "--away-grace", "7", "--snapshot-changes", "5"]
    done = CliRunner().invoke(cli.app, [*command, "--registry", "kafka://h:1/c", "--id", "x", *times])
    assert done.exit_code == 0, done.output
    options = cluster.run_leader.call_args.args[1]
    assert (options.round_s, options.stalled_s) == (2, 50)
    assert (options.retry_initial_s, options.retry_max_s, options.away_grace_s) == (4, 9, 7)
    assert options.snapshot_changes == 5


@pytest.mark.rule("SH-20")
class TestReasons:
    def test_the_reason_of_a_refused_start_is_printed_once(self) -> None:
        refused = document(ApplicationState.REFUSED, worker=None, reason="too large")
        asides = SetAside(9, f"cmd:{WEB}", "too large"), SetAside(10, "cmd:t/c/other", "too large")
        lines = plain(status_of("c", replace(refused, set_aside=asides)))
        assert lines[2:] == [
            "t/c/web: refused, too large",
            "set aside: record 10 of 'cmd:t/c/other': too large",
        ]

    def test_the_reason_of_a_failure_is_printed_once(self) -> None:
        failed_on = {"w": "exit code 1"}
        line = application_line(application(failed_on=failed_on, reason="failed on w: exit code 1"))
        assert line == "t/c/web: failed, failed on w: exit code 1"


@pytest.mark.rule("SH-11", "SH-26")
def test_a_cordoned_worker_is_shown_whether_or_not_it_is_there() -> None:
    there = WorkerStatus(
        worker="w1", host="h1", tags=[], incarnation=1, applications=2, cordon=Cordon.DRAINED
    )
    status = ClusterStatus(
        cluster="c",
        leader="l",
        epoch="1.1",
        workers=[there],
        applications=[],
        set_aside=[],
        cordons={"w1": Cordon.DRAINED, "w2": Cordon.CORDONED},
    )
    assert plain(status)[1:] == ["w1: 2 applications, on h1, drained", "w2: cordoned, not running"]
    drawn = io.StringIO()
    Console(file=drawn, width=200).print(render(status))
    assert "w1 (drained)" in drawn.getvalue()
    assert "w2: cordoned, not running" in drawn.getvalue()


@pytest.mark.rule("SH-11", "SH-27")
def test_requests_and_capacities_are_shown() -> None:
    before = document()
    ((name, entry),) = before.applications.items()
    ((worker, known),) = before.workers.items()
    light = {name: replace(entry, worker=worker, requests=Requests(500, 1024))}
    for capacity, shown in (
        (None, "0.5 cpu, 1,024 MB"),
        (Capacity(2000), "0.5 of 2 cpu, 1,024 MB"),
        (Capacity(0, 4096), "0.5 of 0 cpu, 1,024 of 4,096 MB"),
    ):
        limited = {worker: replace(known, capacity=capacity)}
        status = status_of("c", replace(before, applications=light, workers=limited))
        lines = plain(status)
        assert lines[1].startswith(f"{worker}: 1 application ({shown}), on")
        assert ", 0.5 cpu, 1,024 MB" in lines[2]
        drawn = io.StringIO()
        Console(file=drawn, width=200).print(render(status))
        assert f"1 ({shown})" in drawn.getvalue()
    assert status_of("c", replace(before, workers=limited)).workers[0].model_dump(
        include={"cpu", "memory_mb"}
    ) == {
        "cpu": 0.0,
        "memory_mb": 4096,
    }


@pytest.mark.rule("SH-11", "SH-28")
def test_it_is_shown_how_many_replicas_run() -> None:
    before = document()
    ((name, entry),) = before.applications.items()
    entries = {name.numbered(number): replace(entry, replicas=3) for number in range(3)}
    entries[name.numbered(2)] = replace(
        entries[name], state=ApplicationState.WAITING, worker=None, reason="no"
    )
    status = status_of("c", replace(before, applications=entries))
    assert [each.running_replicas for each in status.applications] == [2, 2, 2]
    assert [each.replicas for each in status.applications] == [3, 3, 3]
    lines = plain(status)
    assert lines[0].endswith("0 of 1 application running")
    assert f"{name}: running on {entry.worker}, 2 of 3 replicas running" in lines[2]
    assert [line.partition(",")[0] for line in lines[3:]] == [
        f"{name.numbered(1)}: running on {entry.worker}",
        f"{name.numbered(2)}: waiting",
    ]
    drawn = io.StringIO()
    Console(file=drawn, width=200).print(render(status))
    assert drawn.getvalue().count("2 of 3 replicas running") == 1
    assert len(status.only(ApplicationPattern.parse(str(name))).applications) == 3


@pytest.mark.rule("SH-28")
def test_replicas_are_scaled_and_a_single_one_is_not(cluster: mock.Mock) -> None:
    cluster.scale.return_value = "c1"
    done = invoke("scale", "a/b/1", "3")
    assert done.stdout == "a/b/1: commanded to have 3 replicas\n", done.output
    assert cluster.scale.call_args.args == (ApplicationId.parse("a/b/1"), 3)
    assert not cluster.wait.called
    done = invoke("scale", "a/b/1", "1", "--wait", "--json")
    assert json.loads(done.stdout) == {
        "application": "a/b/1",
        "command": "c1",
        "replicas": 1,
        "settled": True,
    }
    assert cluster.wait.call_args.args[1] == "c1"
    assert invoke("scale", "a/b/1", "0").exit_code == 2
    cluster.scale.reset_mock()
    for verb, *more in (["stop"], ["restart"], ["retry"], ["scale", "2"], ["start", "no-folder"]):
        refused = invoke(verb, "a/b/1#1", *more).exception
        assert isinstance(refused, InvalidName)
        assert "is a replica, which can't be started, stopped or restarted alone" in str(refused)
        assert "rebalanser shiva scale a/b/1 N" in str(refused)
    for verb in ("list", "status"):
        refused = invoke(verb, "a/b/1#1").exception
        assert isinstance(refused, InvalidName)
        assert str(refused) == "a/b/1#1 is a replica, and is shown with all of them: give a/b/1"
    assert not cluster.scale.called


@pytest.mark.rule("SH-27")
def test_the_capacity_of_a_worker_is_an_option() -> None:
    assert WorkOptions().checked().capacity is None
    assert WorkOptions(cpu=1.001).checked().capacity == Capacity(1001)
    assert WorkOptions(memory_mb=512).checked().capacity == Capacity(None, 512)
    with pytest.raises(InvalidSettings, match=r"--cpu 0\.0004 has more than three decimal places"):
        WorkOptions(cpu=0.0004).checked()


@pytest.mark.rule("SH-20", "SH-26")
def test_a_cordoned_worker_is_shown_with_the_age_of_its_pong() -> None:
    cordons = {"w": Cordon.CORDONED, "x": Cordon.DRAINED}
    lines = plain(status_of("c", replace(document(), cordons=cordons), LastHeard(ping(1), {"w": pong(4)})))
    assert lines[1:3] == ["w: 1 application, on h, cordoned, last pong 4 s ago", "x: drained, not running"]


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
        ClusterOptions(registry="sqlite:///groups.db").url()
    assert ClusterOptions(registry="kafka://h:1/c").url() == "kafka://h:1/c"


@pytest.mark.parametrize(("what", "words"), [("application", "an application"), ("tag", "a tag")])
def test_what_cannot_be_a_name_is_told_in_grammar(what: str, words: str) -> None:
    with pytest.raises(InvalidName, match=f"'a b' cannot be {words}: use at most"):
        check_part("a b", what)


def test_variables_are_given_with_their_values_or_taken_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "as it is")
    monkeypatch.delenv("NOWHERE", raising=False)
    assert _environment(["A=b=c", "EMPTY=", "HERE"]) == {"A": "b=c", "EMPTY": "", "HERE": "as it is"}
    with pytest.raises(InvalidSettings, match="--env NOWHERE: it is not set in this environment"):
        _environment(["NOWHERE"])


@pytest.mark.rule("SH-25")
class TestPatterns:
    @pytest.mark.parametrize(
        ("text", "matched"),
        [
            ("acme", ["acme/main/web", "acme/test/web"]),
            ("acme/main", ["acme/main/web"]),
            ("*/main", ["acme/main/web", "other/main/job-1"]),
            ("*/*/job-?", ["other/main/job-1"]),
            ("acme/main/web", ["acme/main/web"]),
            ("ac", []),
            ("*", ["acme/main/web", "acme/test/web", "other/main/job-1"]),
        ],
    )
    def test_applications_of_a_tenant_or_a_channel(self, text: str, matched: list[str]) -> None:
        pattern = ApplicationPattern.parse(text)
        names = ("acme/main/web", "acme/test/web", "other/main/job-1")
        assert [name for name in names if pattern.matches(ApplicationId.parse(name))] == matched
        status = ClusterStatus(
            cluster="c",
            leader="l",
            epoch="1.1",
            workers=[],
            applications=[application(application=name) for name in names],
            set_aside=[],
        )
        assert [each.application for each in status.only(pattern).applications] == matched
        assert (pattern.exact is not None) is (text == "acme/main/web")

    @pytest.mark.parametrize("text", ["", "a/b/c/d", "a//c", "a/b b", "../x", "[a]", "a/.*"])
    def test_what_can_match_no_application_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidName):
            ApplicationPattern.parse(text)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """A cluster with applications of two channels, one of which is being stopped."""
    entry = document().applications[WEB]
    states = {"a/b/1": "running", "a/b/2": "failed", "a/c/3": "running", "a/b/4": "stopping"}
    entries = {
        ApplicationId.parse(name): replace(
            entry, state=ApplicationState(state), failed_on={"w1": "?"} if state == "failed" else {}
        )
        for name, state in states.items()
    }
    cluster = mock.Mock()
    cluster.read.return_value = replace(document(), applications=entries)
    cluster.applications.return_value = {name: entry.state for name, entry in entries.items()}
    cluster.start_all.side_effect = lambda items, *_: [f"c{number}" for number, _ in enumerate(items)]
    for method in (cluster.stop_all, cluster.restart_all):
        method.side_effect = lambda items, **_: Commanded(
            {name: f"c{number}" for number, name in enumerate(items)}, {}
        )
    cluster.wait_all.side_effect = lambda commands, _timeout_s: dict.fromkeys(commands)
    monkeypatch.setattr(ClusterOptions, "opened", lambda *_: contextlib.nullcontext(cluster))
    return cluster


def invoke(*words: str, answer: str | None = None) -> Any:
    """Run a command; with an ``answer`` a person is there to be asked."""
    with mock.patch("typer.testing._NamedTextIOWrapper.isatty", return_value=answer is not None, create=True):
        return CliRunner().invoke(cli.app, [*words, "--registry", "kafka://h:1/c"], input=answer)


@pytest.mark.rule("SH-25")
class TestMany:
    def test_a_stop_of_a_channel_needs_a_yes_and_spares_what_stops_already(self, cluster: mock.Mock) -> None:
        refused = invoke("stop", "a/b")
        assert isinstance(refused.exception, InvalidSettings)
        assert "this would stop 2 applications of a/b/* (a/b/1, a/b/2): give --yes" in str(refused.exception)
        assert not cluster.stop_all.called
        done = invoke("stop", "a/b", "--yes", "--keep-data")
        assert done.exit_code == 0, done.output
        assert [str(name) for name in cluster.stop_all.call_args.args[0]] == ["a/b/1", "a/b/2"]
        assert cluster.stop_all.call_args.kwargs == {"keep_data": True}
        assert done.stdout == "stop of 2 applications commanded\n"
        assert not cluster.wait_all.called

    @pytest.mark.parametrize(("answer", "stops"), [("y", True), ("n", False), ("", False)])
    def test_a_person_is_asked_with_the_number(self, cluster: mock.Mock, answer: str, stops: bool) -> None:
        done = invoke("stop", "a/b", answer=f"{answer}\n")
        assert "stop 2 applications (a/b/1, a/b/2)?" in done.output
        assert cluster.stop_all.called is stops
        assert (done.exit_code == 0) is stops

    def test_who_waits_is_told_of_the_effect(self, cluster: mock.Mock) -> None:
        done = invoke("stop", "a/c", "--yes", "--wait", "--json")
        assert json.loads(done.stdout) == {
            "applications": [{"application": "a/c/3", "command": "c0", "state": "stopped"}],
            "left_out": [],
        }
        assert [str(name) for name in cluster.wait_all.call_args.args[0]] == ["a/c/3"]

    @pytest.mark.parametrize("verb", ["stop", "restart"])
    def test_what_has_vanished_meanwhile_is_told_and_the_others_go_on(
        self, cluster: mock.Mock, verb: str
    ) -> None:
        first, second = map(ApplicationId.parse, ("a/b/1", "a/b/2"))
        gone = {first: UnknownApplication("cluster c knows no application a/b/1")}
        method = cluster.stop_all if verb == "stop" else cluster.restart_all
        method.side_effect = lambda _items, **_: Commanded({second: "c0"}, gone)
        done = invoke(verb, "a/b", "--yes", "--wait")
        assert done.exit_code == 0, done.output
        assert done.stderr == "left out: cluster c knows no application a/b/1\n"
        assert done.stdout == f"{verb} of 1 application commanded, and all have taken effect\n"
        assert list(cluster.wait_all.call_args.args[0]) == [second]
        left_out = json.loads(invoke(verb, "a/b", "--yes", "--json").stdout)["left_out"]
        assert left_out == [{"application": "a/b/1", "reason": "cluster c knows no application a/b/1"}]
        method.side_effect = lambda _items, **_: Commanded({}, gone)
        assert isinstance(invoke(verb, "a/b", "--yes").exception, UnknownApplication)

    def test_a_retry_of_several_goes_on_without_an_unknown_one(self, cluster: mock.Mock) -> None:
        failed, unknown = map(ApplicationId.parse, ("a/b/2", "a/b/9"))
        cluster.restart_all.side_effect = lambda _items: Commanded(
            {failed: "c0"}, {unknown: UnknownApplication("cluster c knows no application a/b/9")}
        )
        done = invoke("retry", "a/b/2", "a/b/9")
        assert done.stdout == "a/b/2: retry commanded\n"
        assert isinstance(done.exception, UnknownApplication)

    def test_a_retry_names_all_that_are_unknown(self, cluster: mock.Mock) -> None:
        names = [ApplicationId.parse(name) for name in ("a/b/8", "a/b/9")]
        gone = {name: UnknownApplication(f"no application {name}") for name in names}
        cluster.restart_all.side_effect = lambda _items: Commanded({}, gone)
        done = invoke("retry", "a/b/8", "a/b/9", "--json")
        assert str(done.exception) == "no application a/b/8"
        assert done.stderr == "left out: no application a/b/9\n"
        assert json.loads(done.stdout)["left_out"] == [
            {"application": str(name), "reason": f"no application {name}"} for name in names
        ]

    @pytest.mark.parametrize("named", [False, True])
    def test_a_retry_by_pattern_goes_on_without_what_has_vanished_meanwhile(
        self, cluster: mock.Mock, named: bool
    ) -> None:
        failed, other = map(ApplicationId.parse, ("a/b/2", "a/b/4"))
        document = cluster.read.return_value
        entries = {**document.applications, other: document.applications[failed]}
        cluster.read.return_value = replace(document, applications=entries)
        gone = UnknownApplication("no application a/b/2")
        cluster.restart_all.side_effect = lambda _items: Commanded({other: "c0"}, {failed: gone})
        done = invoke("retry", *(("a/b", "a/b/2") if named else ("a/b",)))
        assert done.stdout == "a/b/4: retry commanded\n"
        assert (done.exit_code == 0, done.stderr) == (not named, "" if named else f"left out: {gone}\n")
        cluster.restart_all.side_effect = lambda _items: Commanded({}, {failed: gone})
        assert invoke("retry", "a/b").exception is gone

    def test_one_application_is_stopped_without_a_question(self, cluster: mock.Mock) -> None:
        assert invoke("stop", "a/b/1").exit_code == 0
        assert cluster.stop.call_args.args == (ApplicationId.parse("a/b/1"),)

    def test_no_application_is_an_error(self, cluster: mock.Mock) -> None:
        assert isinstance(invoke("stop", "z", "--yes").exception, UnknownApplication)
        assert not cluster.stop_all.called

    def test_a_restart_of_a_tenant_is_one_call(self, cluster: mock.Mock) -> None:
        assert invoke("restart", "a", "--yes").exit_code == 0
        assert [str(name) for name in cluster.restart_all.call_args.args[0]] == ["a/b/1", "a/b/2", "a/c/3"]

    def test_a_retry_of_a_channel_restarts_what_has_failed_there(self, cluster: mock.Mock) -> None:
        assert invoke("retry", "a/c").stdout == "no application has failed\n"
        assert not cluster.restart_all.called
        assert "a/b/2: retry commanded" in invoke("retry", "a").stdout

    def test_all_applications_of_a_channel_file_are_started_in_one_call(
        self, cluster: mock.Mock, tmp_path: Path
    ) -> None:
        file = tmp_path / "channel.json"
        applications = {
            "web": {"source": "web", "tags": ["ssd"], "mode": "exclusive", "environment": {"A": "b"}},
            "job": {"source": "job.zip"},
        }
        file.write_text(json.dumps({"tenant": "acme", "channel": "main", "applications": applications}))
        done = invoke("start", "--channel-file", str(file))
        assert done.exit_code == 0, done.output
        assert cluster.start_all.call_args.args[0] == [
            Start(
                ApplicationId("acme", "main", "web"), tmp_path / "web", ["ssd"], Mode.EXCLUSIVE, {"A": "b"}
            ),
            Start(ApplicationId("acme", "main", "job"), tmp_path / "job.zip", []),
        ]
        assert done.stdout == "start of 2 applications commanded\n"

    @pytest.mark.parametrize(
        "words",
        [["start"], ["start", "a/b/c"], ["start", "a/b/c", "x", "--channel-file", "f"]],
        ids=lambda words: str(len(words)),
    )
    def test_a_start_is_of_one_application_or_of_a_channel_file(
        self, cluster: mock.Mock, words: list[str]
    ) -> None:
        assert isinstance(invoke(*words).exception, InvalidSettings)
        assert not cluster.mock_calls

    @pytest.mark.parametrize(
        ("content", "told"),
        [
            ("{", "Invalid JSON"),
            ('{"tenant": "t", "channel": "c", "applications": {}}', "applications: "),
            ('{"tenant": "t", "channel": "c", "applications": {"a": {}}}', "applications.a.source: "),
            (
                '{"tenant": "t", "applications": {"a": {"source": "x", "tag": 1}}}',
                r"channel: .*applications\.a\.tag",
            ),
        ],
        ids=["no JSON", "empty", "no source", "several errors"],
    )
    def test_every_error_of_a_channel_file_is_told_with_its_place(
        self, content: str, told: str, tmp_path: Path
    ) -> None:
        file = tmp_path / "channel.json"
        file.write_text(content)
        with pytest.raises(InvalidSettings, match=told):
            read_channel_file(file)

    def test_a_channel_file_that_is_not_there_or_has_a_bad_name_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidSettings, match="cannot be read"):
            read_channel_file(tmp_path / "nowhere")
        file = tmp_path / "channel.json"
        file.write_text('{"tenant": "t", "channel": "../c", "applications": {"a": {"source": "x"}}}')
        with pytest.raises(InvalidName, match="channel"):
            read_channel_file(file)


@pytest.mark.rule("SH-1")
class TestTopicNames:
    def test_the_names_of_topics_are_options(self, monkeypatch: pytest.MonkeyPatch) -> None:
        opened: list[Any] = []

        def open_cluster(*arguments: Any) -> Any:
            opened.append(arguments)
            raise InvalidSettings("far enough")

        monkeypatch.setattr(shiva_options, "open_cluster", open_cluster)
        invoke("list", "--topics", "command=a.b,assignement=c")
        invoke("list")
        monkeypatch.setenv("REBALANSER_TOPICS", "control=x")
        invoke("drain", "w1")
        assert [names for _, _, names in opened] == [
            TopicNames(command="a.b", assignement="c"),
            TopicNames(),
            TopicNames(control="x"),
        ]

    @pytest.mark.parametrize("text", ["a", "command", "command=", "other=x", "command=a,command=b"])
    def test_what_names_no_topic_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidSettings, match="--topics"):
            topic_names(text)

    @pytest.mark.parametrize("name", ["a/b", "a b", "ä", "a\n", ".", "..", "a" * 250])
    def test_what_is_no_name_of_a_topic_is_refused(self, name: str) -> None:
        with pytest.raises(InvalidName, match=r"cannot name a topic: use .* but not '\.' or '\.\.' alone"):
            TopicNames(control=name)
        with pytest.raises(InvalidName, match="cannot name a topic"):
            topic_names(f"command={name}")

    def test_the_names_differ_also_from_defaults(self) -> None:
        for names in (("a", "a", ""), ("", "a.b", "a_b")):
            with pytest.raises(InvalidName, match="need different names"):
                TopicNames(*names)
        with pytest.raises(InvalidName, match="c-control, c-control, c-assignement"):
            TopicNames(command="c-control").of("c")
        assert TopicNames(command="c-control").of("d").command == "c-control"
        assert TopicNames("a" * 249).of("c").command == "a" * 249
