"""The command line of Shiva as people and scripts use it: a whole day, and whatever is typed wrongly."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.types import ApplicationState
from rebalanser.testing.waiting import PATIENCE_S, wait_until
from support.shiva_cluster import RUNS, ShivaCluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

PRINTS = 'echo "hello from $SHIVA_WORKER"; while read -r line; do echo "$line"; done < "$PIPE"; ' + RUNS


@pytest.fixture
def shiva(kafka_address: str, tmp_path: Path) -> Iterator[ShivaCluster]:
    with ShivaCluster(kafka_address, tmp_path) as cluster:
        yield cluster


@pytest.mark.rule("SH-3", "SH-4", "SH-5", "SH-11", "SH-12", "SH-18", "SH-26")
def test_a_day_with_the_command_line(shiva: ShivaCluster) -> None:
    daemons = {
        name: shiva.daemon(name, *options)
        for name, options in (("d1", ()), ("d2", ("--tag", "gpu")), ("d3", ("--tag", "gpu", "--tag", "ssd")))
    }
    for name, daemon in daemons.items():
        daemon.says(f"daemon {name} runs; Ctrl-C stops it")
    shiva.until(lambda document: len(document.workers) == 3, "three workers are known")

    folder = str(shiva.application())
    started = shiva.run("shiva", "start", "acme/prod/web", folder, "--wait")
    assert started.code == 0, started.err
    assert started.out.startswith("acme/prod/web is running on d")
    tagged = shiva.run("shiva", "start", "acme/prod/train", folder, "--tag", "ssd", "--wait", "--json")
    assert json.loads(tagged.out)["worker"] == "d3"
    assert json.loads(tagged.out)["state"] == "running"
    assert shiva.run("shiva", "start", "acme/prod/big", folder, "--tag", "huge").code == 0
    late = shiva.run("shiva", "start", "acme/prod/big", folder, "--tag", "huge", "--wait", "--timeout", "1.5")
    assert late.code == 4
    assert "acme/prod/big is waiting" in late.err
    assert "huge" in late.err

    listed = shiva.run("shiva", "list").out.splitlines()
    assert [line.partition(":")[0] for line in listed] == [
        "acme/prod/big",
        "acme/prod/train",
        "acme/prod/web",
    ]
    assert "running on d3" in listed[1]
    status = shiva.run("shiva", "status").out
    assert "3 workers, 2 of 3 applications running" in status
    assert "d3: 1 application, tags gpu ssd" in status
    assert status.count(" leads (last ping ") == 1
    assert status.count(", last pong ") == 3
    document = json.loads(shiva.run("shiva", "status", "--json").out)
    assert {worker["worker"] for worker in document["workers"]} == {"d1", "d2", "d3"}
    assert {each["application"]: each["state"] for each in document["applications"]} == {
        "acme/prod/big": "waiting",
        "acme/prod/train": "running",
        "acme/prod/web": "running",
    }
    assert shiva.run("shiva", "status", "--exit-code").code == 1

    worker = str(shiva.running("acme/prod/web").worker)
    drained = shiva.run("shiva", "drain", worker, "--wait")
    assert (drained.code, drained.out) == (0, f"{worker} is drained\n"), drained.err
    assert shiva.running("acme/prod/web").worker != worker
    assert ", drained, last pong " in shiva.run("shiva", "status").out
    assert shiva.run("shiva", "uncordon", worker).out == f"{worker}: commanded to be uncordoned\n"
    unknown = shiva.run("shiva", "cordon", "d9")
    assert unknown.code == 3
    assert "knows no worker d9; it knows d1, d2, d3" in unknown.err

    assert shiva.run("shiva", "stop", "acme/prod/big").out == "acme/prod/big: stop commanded\n"
    shiva.gone("acme/prod/big")
    assert shiva.run("shiva", "status", "--exit-code").code == 0
    stopped = shiva.run("shiva", "stop", "acme/prod/web", "--wait")
    seen = [stopped.err, *(daemon.log.read_text() for daemon in daemons.values())]
    assert (stopped.code, stopped.out) == (0, "acme/prod/web is stopped\n"), "\n".join(seen)
    assert shiva.run("shiva", "stop", "acme/prod/train", "--wait", "--json").code == 0
    assert not [pid for name in daemons for pid in shiva.processes_of(name)]
    for daemon in daemons.values():
        daemon.interrupt()
    assert [daemon.wait() for daemon in daemons.values()] == [0, 0, 0]


@pytest.mark.rule("SH-4", "SH-18")
def test_what_runs_and_what_failed_is_started_anew_from_the_log(shiva: ShivaCluster, tmp_path: Path) -> None:
    never_s = 10_000.0
    options = LeaderOptions(round_s=0.5, session_timeout_s=1.5, retry_initial_s=never_s, retry_max_s=never_s)
    leader = shiva.cluster.run_leader("leader-1", options)
    shiva.worker()
    database = tmp_path / "database"
    notes = 'echo "start $SHIVA_WORKER $SHIVA_TOKEN" >> "$JOURNAL"'
    needs = f"{notes}; test -e {database} && exec sleep 1000; exit 7"
    database.touch()
    folder = shiva.application("web", needs, restart={"max_restarts": 1, "backoff_initial_s": 0.05})
    assert shiva.run("shiva", "retry").out == "no application has failed\n"
    shiva.start(source=folder)
    first = shiva.running()
    wait_until(lambda: shiva.starts() == 1, "it has begun")
    shutil.rmtree(folder)
    anew = shiva.run("shiva", "restart", "t/c/web", "--wait")
    assert (anew.code, anew.out) == (0, "t/c/web is running on worker-1\n"), anew.err
    assert shiva.running().command != first.command
    assert shiva.running().archive == first.archive
    wait_until(lambda: shiva.starts() == 2, "it has begun anew")
    assert shiva.run("shiva", "retry", "t/c/web").out == "t/c/web has not failed\n"

    database.unlink()
    assert shiva.run("shiva", "restart", "t/c/web").out == "t/c/web: restart commanded\n"
    shiva.entry_when(lambda entry: entry.state is ApplicationState.FAILED, "has failed")
    database.touch()
    assert shiva.run("shiva", "retry").out == "t/c/web: retry commanded\n"
    shiva.running()

    unknown = shiva.run("shiva", "restart", "t/c/none")
    assert unknown.code == 3
    assert "knows no application t/c/none; it knows t/c/web" in unknown.err
    leader.stop()
    assert leader.wait(PATIENCE_S)


@pytest.mark.rule("SH-11", "SH-18")
def test_status_is_watched_on_a_pipe_until_ctrl_c(shiva: ShivaCluster) -> None:
    shiva.daemon().says("daemon-1 runs")
    watching = shiva.launch("watching", "shiva", "status", "--watch")
    watching.says("1 worker, 0 of 0 applications running")
    shiva.start()
    watching.says("t/c/web: running on daemon-1")
    watching.interrupt()
    assert watching.wait() == 130
    assert "Traceback" not in watching.said


@pytest.mark.rule("SH-17", "SH-18")
def test_logs_are_shown_and_followed_on_the_workers_host(shiva: ShivaCluster, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    shiva.daemon()
    folder = shiva.application("web", PRINTS, environment={"PIPE": str(pipe), "JOURNAL": str(shiva.journal)})
    shiva.start(source=folder)
    shiva.running()
    data = str(shiva.data("daemon-1"))

    def shown() -> str:
        return shiva.run("shiva", "logs", "t/c/web", "--data", data).out

    wait_until(lambda: shown() == "hello from daemon-1\n", "the first line is shown")
    following = shiva.launch("following", "shiva", "logs", "t/c/web", "--data", data, "-f")
    following.says("hello from daemon-1")
    through = shiva.launch("through", "shiva", "logs", "t/c/web", "-f")
    through.says("hello from daemon-1")
    pipe.write_text("one\ntwo\n")
    for each in (following, through):
        each.says("one\ntwo\n")
        each.interrupt()
        assert each.wait() == 130
    assert shiva.run("shiva", "logs", "t/c/web", "--data", data, "-n", "1").out == "two\n"
    none = shiva.run("shiva", "logs", "t/c/none", "--data", data)
    assert none.code == 3
    assert "no output of t/c/none is kept" in none.err

    asked = shiva.run("shiva", "logs", "t/c/web")
    assert (asked.code, asked.out) == (0, "hello from daemon-1\none\ntwo\n"), asked.err
    assert shiva.run("shiva", "logs", "t/c/web", "--worker", "daemon-1", "-n", "1").out == "two\n"
    unknown = shiva.run("shiva", "logs", "t/c/none", "--worker", "daemon-1")
    assert unknown.code == 3
    assert "daemon-1: no output of t/c/none is kept" in unknown.err
    assert not shiva.known.set_aside
    absent = shiva.run("shiva", "logs", "t/c/web", "--worker", "nobody", "--timeout", "0.5")
    assert absent.code == 4
    assert "worker nobody has not answered within 0.5 s" in absent.err


@pytest.mark.rule("SH-18")
def test_without_a_broker_it_is_said_what_was_tried_and_for_how_long(tmp_path: Path) -> None:
    with ShivaCluster("127.0.0.1:1", tmp_path) as shiva:
        folder = str(shiva.application())
        data = str(tmp_path / "data")
        for arguments in (
            ("status",),
            ("list",),
            ("start", "t/c/web", folder),
            ("stop", "t/c/web"),
            ("leader",),
            ("worker", "--data", data),
            ("daemon", "--data", data),
        ):
            said = shiva.run("shiva", *arguments, REBALANSER_CONNECT_TIMEOUT_S="1")
            assert said.code == 4, said
            assert said.err.count("\n") == 1
            assert "127.0.0.1:1" in said.err
            assert re.search(r"for \d+\.\d s", said.err)


@pytest.mark.rule("SH-16", "SH-18")
def test_what_is_typed_wrongly_gets_one_line_that_says_what_is_right(
    shiva: ShivaCluster, tmp_path: Path
) -> None:
    shiva.daemon().says("daemon-1 runs")
    shiva.until(lambda document: document.workers, "the worker is known")
    folder = shiva.application()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "shiva.json").write_text(
        json.dumps(
            {"command": [], "limits": {"open_files": 1}, "restart": {"policy": "sometimes"}, "colour": 1}
        )
    )
    cases = [
        (("start", "../x/y", str(folder)), 3, ["cannot be a tenant"]),
        (("start", "t/c", str(folder)), 3, ["is not TENANT/CHANNEL/APPLICATION"]),
        (("start", "t/c/web", str(folder), "--tag", "a b"), 3, ["cannot be a tag"]),
        (("start", "t/c/web", str(tmp_path / "nothing")), 3, ["nothing"]),
        (
            ("start", "t/c/web", str(broken)),
            3,
            ["shiva.json", "command", "limits.open_files", "restart.policy", "colour"],
        ),
        (("stop", "t/c/none"), 3, ["knows no application t/c/none"]),
        (("leader", "--id", "a/b"), 3, ["cannot be an id"]),
        (("status", "--registry", "kafka://h:1/x"), 3, ["give either --registry"]),
        (("worker", "--data", "/proc/none"), 3, ["/proc/none cannot be used"]),
    ]
    for arguments, code, words in cases:
        said = shiva.run("shiva", *arguments)
        assert said.code == code, (arguments, said)
        assert said.err.count("\n") == 1, said.err
        assert all(word in said.err for word in words), said.err
        as_json = shiva.run("shiva", *arguments, "--json")
        assert json.loads(as_json.out)["exit_code"] == code


@pytest.mark.rule("SH-3", "SH-18")
def test_a_data_folder_in_use_is_refused(shiva: ShivaCluster) -> None:
    shiva.worker("worker-1").says("worker-1 runs")
    said = shiva.run("shiva", "worker", "--id", "worker-2", "--data", str(shiva.data("worker-1")))
    assert said.code == 3
    assert "give each worker a folder of its own" in said.err


def test_the_schema_of_the_manifest_is_shown_without_any_cluster() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rebalanser", "shiva", "schema"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert "command" in json.loads(done.stdout)["properties"]


@pytest.mark.rule("SH-18")
def test_waiting_for_what_fails_says_why(shiva: ShivaCluster) -> None:
    shiva.daemon()
    # Without a check it would be running, for a moment, as soon as it is started.
    folder = shiva.application("web", "exit 3", restart={"max_restarts": 0}, health_check={"exec": ["false"]})
    said = shiva.run("shiva", "start", "t/c/web", str(folder), "--wait")
    assert said.code == 3
    assert "failed on every worker" in said.err
    assert "exit code 3" in said.err


@pytest.mark.rule("SH-17")
def test_a_second_signal_while_it_stops_changes_nothing(shiva: ShivaCluster) -> None:
    worker = shiva.daemon()
    shiva.start(
        source=shiva.application("web", "trap '' TERM; " + RUNS.replace("exec ", ""), stop_timeout_s=1.0)
    )
    shiva.running()
    os.kill(worker.pid, signal.SIGTERM)
    worker.says("process stopping")
    os.kill(worker.pid, signal.SIGINT)
    assert worker.wait() == 0
    assert not shiva.processes_of("daemon-1")
