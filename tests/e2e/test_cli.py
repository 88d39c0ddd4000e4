"""The command line as people and scripts use it: real processes, a terminal, a real etcd."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rebalanser.testing.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


class Shell:
    """Runs the command line with a registry of the test's own."""

    def __init__(self, registry: str) -> None:
        self.environment = {**os.environ, "REBALANSER_REGISTRY": registry, "REBALANSER_LEASE_TTL_S": "2"}
        self.environment.pop("COLUMNS", None)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "rebalanser", *arguments]

    def run(self, *arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            env={**self.environment, **variables},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    @contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen(
            self.command(*arguments),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(f"sqlite:///{tmp_path / 'groups.db'}")


def wait_balanced(shell: Shell) -> None:
    wait_until(lambda: shell.run("status", "orders", "--exit-code").returncode == 0, "it is balanced")


@pytest.mark.rule("RB-19", "RB-26", "RB-30")
def test_a_day_with_the_command_line(shell: Shell) -> None:
    assert shell.run("resources", "add", "orders", "a", "b").stdout == "added 2 resources\n"
    with shell.running(
        "run", "orders", "--node", "w1", "--prefix", "--", "sh", "-c", "echo at {resource}; cat"
    ) as one:
        assert one.stdout is not None
        assert {one.stdout.readline() for _ in range(2)} == {"[a] at a\n", "[b] at b\n"}
        wait_balanced(shell)
        status = shell.run("status", "orders").stdout.splitlines()
        assert status[0].startswith(
            "orders: balanced, version 1, term 1, leader w1, 1 node, 2 of 2 resources"
        )
        assert status[1:] == ["  w1: leader, ready, holds 2 of 2 assigned"]
        drained = shell.run("node", "drain", "orders", "w1", "--wait")
        assert drained.stdout == (
            "w1 is drained; it holds 0 resources now; "
            "resources of the group without an owner: 2, see rebalanser status\n"
        )
        assert shell.run("node", "undrain", "orders", "w1", "--wait").returncode == 0
        owners = json.loads(shell.run("resources", "list", "orders", "--json").stdout)["resources"]
        assert [resource["owner"] for resource in owners] == ["w1", "w1"]
        one.send_signal(signal.SIGINT)
        assert one.wait(PATIENCE_S) == 0
    state = json.loads(shell.run("status", "orders", "--json").stdout)
    assert state["nodes"] == []
    assert all(resource["held_by"] is None for resource in state["resources"])


@pytest.mark.rule("RB-29")
def test_ten_thousand_resources_come_through_a_pipe(shell: Shell) -> None:
    names = "\n".join(f"partition {number}" for number in range(10_000))
    added = shell.run("resources", "add", "orders", "--file", "-", "--json", stdin=names)
    assert (json.loads(added.stdout)["added"], added.stderr) == (10_000, "")
    assert len(shell.run("resources", "list", "orders").stdout.splitlines()) == 10_000
    with subprocess.Popen(
        shell.command("resources", "list", "orders"),
        env=shell.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as listing:
        assert listing.stdout is not None
        assert listing.stderr is not None
        assert listing.stdout.readline() == "partition 0: no owner\n"
        listing.stdout.close()
        assert listing.stderr.read() == "", "who reads only the head of a list is shown no traceback"


def test_run_works_without_standard_streams(shell: Shell, tmp_path: Path) -> None:
    """Some starters of daemons close them: what is opened then must not become a command's output."""
    script = "ls -l /proc/self/fd/1 /proc/self/fd/2 > $0; exec sleep 3600"
    run = shell.command("run", "orders", "--add", "a", "--", "sh", "-c", script, str(tmp_path / "files"))
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    with subprocess.Popen([*closed, *run], env=shell.environment) as process:
        try:
            wait_balanced(shell)
            wait_until(lambda: (tmp_path / "files").is_file() and "/2 ->" in (tmp_path / "files").read_text())
        finally:
            process.terminate()
        assert process.wait(PATIENCE_S) == 0
    assert (tmp_path / "files").read_text().count("-> /dev/null") == 1
    answer = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *shell.command("status", "orders")],
        env=shell.environment,
        stderr=subprocess.PIPE,
        timeout=PATIENCE_S,
    )
    assert (answer.returncode, answer.stderr) == (0, b"")


@pytest.mark.rule("RB-19", "RB-7")
def test_watch_prints_a_line_for_each_change_until_ctrl_c(shell: Shell) -> None:
    shell.run("resources", "add", "orders", "b")
    with shell.running("watch", "orders", "--json", "--interval", "3600") as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        state = json.loads(watching.stdout.readline())
        assert [resource["resource"] for resource in state["resources"]] == ["b"]
        # Only the watch can find it: the interval is longer than any test may take.
        shell.run("resources", "add", "orders", "a")
        state = json.loads(watching.stdout.readline())
        assert [resource["resource"] for resource in state["resources"]] == ["a", "b"]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(PATIENCE_S) == 130
        assert watching.stderr.read() == ""


class Terminal:
    """A command on a terminal of 100 columns and 30 lines: what it shows, and keys for it."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor

    def read_until(self, text: str) -> str:
        """All that is shown up to a text."""
        seen = ""
        while text not in seen:
            seen += os.read(self._descriptor, 65_536).decode(errors="replace")
        return seen

    def press(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def wait(self) -> int:
        """Read on until the command has ended; its exit code."""
        while self.process.poll() is None:
            if select.select([self._descriptor], [], [], 0.05)[0]:
                os.read(self._descriptor, 65_536)
        return self.process.returncode

    def echoes(self) -> bool:
        """True if the terminal shows what is typed, as a shell wants it."""
        return bool(termios.tcgetattr(self._descriptor)[3] & termios.ECHO)


@contextmanager
def terminal(shell: Shell, *arguments: str, kind: str = "xterm") -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        shell.command(*arguments),
        env={**shell.environment, "TERM": kind, "COLUMNS": "100", "LINES": "30"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        try:
            yield Terminal(process, ours)
        finally:
            process.kill()
            os.close(theirs)
            os.close(ours)


def on_terminal(shell: Shell, *arguments: str, until: str) -> tuple[str, int]:
    """What a command shows on a terminal up to a text, and its exit code after Ctrl-C."""
    with terminal(shell, *arguments) as shown:
        seen = shown.read_until(until)
        shown.process.send_signal(signal.SIGINT)
        return seen, shown.wait()


@pytest.mark.rule("RB-19")
def test_watch_scrolls_filters_and_is_left_by_keys(shell: Shell) -> None:
    shell.run("resources", "add", "orders", *(f"r-{number:02}" for number in range(60)))
    with terminal(shell, "watch", "orders") as shown:
        shown.read_until("nodes 0")
        assert not shown.echoes()
        shown.press("\t")
        shown.read_until("resources 1 to 26 of 60")
        shown.press("\x1b[6~")
        shown.read_until("resources 26 to 51 of 60")
        shown.press("\x1b[B")
        shown.read_until("resources 27 to 52 of 60")
        shown.press("/r-5q\x7f9\r")
        assert "r-59: no owner" in shown.read_until("resources 1 to 1 of 1 with 'r-59'")
        shown.press("q")
        assert shown.wait() == 0
        assert shown.echoes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_watch_that_is_killed_leaves_a_terminal_that_can_be_used(
    shell: Shell, number: signal.Signals
) -> None:
    shell.run("resources", "add", "orders", "a")
    with terminal(shell, "watch", "orders") as shown:
        shown.read_until("nodes 0")
        shown.process.send_signal(number)
        shown.read_until("\x1b[?1049l")
        assert shown.wait() == 128 + number
        assert shown.echoes()


@pytest.mark.rule("RB-19")
def test_watch_prints_lines_on_a_terminal_that_cannot_draw(shell: Shell) -> None:
    shell.run("resources", "add", "orders", "a")
    with terminal(shell, "watch", "orders", kind="dumb") as shown:
        shown.read_until("nobody owns a: no node takes part")
        shown.process.send_signal(signal.SIGINT)
        assert shown.wait() == 130


@pytest.mark.rule("RB-19")
def test_watch_without_a_terminal_prints_what_changed(shell: Shell) -> None:
    with shell.running("run", "orders", "--node", "w1", "--add", "a", "--", "sleep", "1000") as node:
        wait_balanced(shell)
        with shell.running("watch", "orders", "--interval", "0.2") as watching:
            assert watching.stdout is not None
            first = [watching.stdout.readline() for _ in range(2)]
            assert "orders: balanced" in first[0]
            assert first[1].endswith("    w1: leader, ready, holds 1 of 1 assigned\n")
            shell.run("resources", "add", "orders", "b")
            moved = next(line for line in watching.stdout if " → " in line)
            assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d    b: nobody → w1, token \d+\n", moved)
            node.send_signal(signal.SIGSTOP)
            silent = next(line for line in watching.stdout if "heartbeat" in line)
            assert re.search(r"w1: no heartbeat for [12] s, its lease ends after 2 s$", silent)


@pytest.mark.rule("RB-19")
def test_watch_draws_a_live_table_on_a_terminal(shell: Shell) -> None:
    with shell.running("run", "orders", "--node", "w1", "--add", "a", "--", "sleep", "1000") as node:
        wait_balanced(shell)
        seen, code = on_terminal(shell, "watch", "orders", until="╰")
        assert code == 130
        assert "★ w1" in seen
        assert "Traceback" not in seen
        node.send_signal(signal.SIGTERM)
        assert node.wait(PATIENCE_S) == 0


@pytest.mark.slow
@pytest.mark.rule("RB-29")
def test_long_work_shows_a_bar_on_a_terminal(shell: Shell, tmp_path: Path) -> None:
    names = tmp_path / "names"
    names.write_text("\n".join(map(str, range(10_000))))
    seen, _ = on_terminal(
        shell, "resources", "add", "orders", "--file", str(names), until="added 10,000 resources"
    )
    assert "10000/10000" in seen


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("command", [["status", "orders"], ["run", "orders", "--", "true"]])
def test_an_etcd_that_does_not_answer_is_one_line(shell: Shell, command: list[str]) -> None:
    port = closed_port()
    variables = {"REBALANSER_CONNECT_TIMEOUT_S": "0.5", "REBALANSER_REGISTRY": f"etcd://127.0.0.1:{port}/x"}
    answer = shell.run(*command, **variables)
    assert answer.returncode == 4
    assert answer.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in answer.stderr
    assert f"127.0.0.1:{port}" in answer.stderr
    assert re.search(r"for \d+\.\d s$", answer.stderr.rstrip())
    document = json.loads(shell.run(command[0], "--json", *command[1:], **variables).stdout.splitlines()[-1])
    assert (document["kind"], document["exit_code"]) == ("RegistryUnavailable", 4)


@pytest.mark.slow
def test_check_finds_a_real_etcd_good(shell: Shell, etcd_url: str) -> None:
    report = shell.run("check", "orders", "--json", "--registry", f"{etcd_url}/test-cli")
    assert report.returncode == 0, report
    findings = {each["check"]: each for each in json.loads(report.stdout)["findings"]}
    assert findings["lease"]["verdict"] == "ok"
    assert "shared between hosts" in findings["abilities"]["detail"]


@pytest.mark.slow
@pytest.mark.rule("RB-21")
def test_a_lease_below_what_etcd_allows_is_refused_with_the_numbers(shell: Shell, etcd_url: str) -> None:
    url = f"{etcd_url}/test-cli"

    def answered(*command: str, code: int) -> subprocess.CompletedProcess[str] | None:
        """None without an answer of etcd: a busy one doesn't answer within so short a lease."""
        ran = shell.run(*command, REBALANSER_LEASE_TTL_S="0.5")
        silent = "no answer" in ran.stdout or "does not answer" in ran.stdout
        return None if ran.returncode != code or silent else ran

    report = wait_until(lambda: answered("check", "--registry", url, code=1), "etcd answers")
    assert "lease_ttl_s 0.5 is below what the registry allows" in report.stdout
    refused = wait_until(
        lambda: answered("run", "orders", "--registry", url, "--", "true", code=3), "etcd answers"
    )
    assert "lease_ttl_s 0.5" in refused.stderr.splitlines()[-1]
