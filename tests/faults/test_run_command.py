"""``rebalanser run`` among real processes: whatever happens to it, no subprocess outlives its ownership."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from rebalanser.testing.pausing import pause
from rebalanser.testing.waiting import PATIENCE_S, patience_ratio, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

LEASE_TTL_S: Final = 2.0
LONG_TTL_S: Final = 120.0
"""A lease so long that nothing in a test waits for its end."""
FAMILY: Final = "sleep 1001 & sleep 1002"
"""A command with a descendant in its process group."""
STUBBORN: Final = "trap '' TERM; (trap '' TERM; sleep 1003; sleep 1004) & while :; do sleep 1; done"


def members(group: int) -> list[int]:
    """The processes of a process group that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, pgrp = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(pgrp) == group and state not in "ZX":
            found.append(int(folder.name))
    return found


class Node:
    """A process of ``rebalanser run``, with the events that it has told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._more = threading.Condition()
        self._events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._more:
                    self._events.append(json.loads(line))
                    self._more.notify_all()

    def events(self, kind: str) -> list[dict[str, Any]]:
        with self._more:
            return [event for event in self._events if event["event"] == kind]

    def wait_for(self, count: int, kind: str, timeout_s: float = PATIENCE_S) -> list[dict[str, Any]]:
        with self._more:
            enough = self._more.wait_for(lambda: len(self.events(kind)) >= count, timeout_s)
            assert enough, f"{count} x {kind} expected: {self._events}"
        return self.events(kind)

    @property
    def running(self) -> dict[str, dict[str, Any]]:
        """The last start of each resource that has not exited since."""
        with self._more:
            last = {
                event["resource"]: event for event in self._events if event["event"] in {"started", "exited"}
            }
        return {resource: event for resource, event in last.items() if event["event"] == "started"}

    @property
    def shim(self) -> int:
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)

    def end(self) -> None:
        """Kill it; nothing that it started writes to its output any more when this returns."""
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


class Team:
    """Starts nodes of one group, in a registry of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder / 'groups.db'}"
        self.environment = {
            **os.environ,
            "REBALANSER_LEASE_TTL_S": str(LEASE_TTL_S),
            "REBALANSER_REGISTRY": self.url,
        }
        self._nodes: list[Node] = []

    def node(self, label: str, script: str, *options: str) -> Node:
        command = [sys.executable, "-m", "rebalanser", "run", "orders", "--node", label, "--json", *options]
        process = subprocess.Popen(
            [*command, "--", "sh", "-c", script],
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._nodes.append(Node(process))
        return self._nodes[-1]

    def add(self, *resources: str) -> None:
        command = [sys.executable, "-m", "rebalanser", "resources", "add", "orders", *resources]
        subprocess.run(command, env=self.environment, check=True, stdout=subprocess.DEVNULL)

    def close(self) -> None:
        for node in self._nodes:
            node.end()


@contextmanager
def gathered(folder: Path) -> Iterator[Team]:
    team = Team(folder)
    try:
        yield team
    finally:
        team.close()


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    with gathered(tmp_path) as made:
        yield made


def tokens(*nodes: Node) -> dict[str, list[int]]:
    """The tokens of each resource, in the order of its starts."""
    starts = sorted((event for node in nodes for event in node.events("started")), key=lambda e: e["token"])
    return {
        resource: [event["token"] for event in starts if event["resource"] == resource]
        for resource in {event["resource"] for event in starts}
    }


@pytest.mark.rule("RB-20", "RB-12")
def test_a_killed_supervisor_leaves_nothing_behind_and_the_other_takes_over(team: Team) -> None:
    team.add("a", "b", "c", "d")
    one = team.node("one", FAMILY)
    one.wait_for(4, "started")
    two = team.node("two", FAMILY)
    wait_until(lambda: len(one.running) == len(two.running) == 2, "they share the four")
    groups = {resource: event["pid"] for resource, event in one.running.items()}
    assert all(len(members(group)) == 3 for group in groups.values())
    before = tokens(one, two)
    one.send(signal.SIGKILL)
    wait_until(
        lambda: not any(map(members, groups.values())), "no subprocess and no child of one", LEASE_TTL_S
    )
    wait_until(lambda: len(two.running) == 4, "two has all")
    for resource in groups:
        assert two.running[resource]["token"] > before[resource][-1]


@pytest.mark.rule("RB-26")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_graceful_stop_waits_for_no_lease(team: Team, number: signal.Signals) -> None:
    team.environment["REBALANSER_LEASE_TTL_S"] = str(LONG_TTL_S)
    script = "trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    one = team.node("one", script, "--add", "a", "--add", "b")
    one.wait_for(2, "output")
    two = team.node("two", FAMILY)
    two.wait_for(1, "started")
    began = time.monotonic()
    one.send(number)
    assert one.process.wait(PATIENCE_S) == 0
    wait_until(lambda: len(two.running) == 2, "two has both")
    assert time.monotonic() - began < LONG_TTL_S / 2
    said = [event["line"] for event in one.wait_for(4, "output") if event["stream"] == "stdout"]
    assert sorted(said) == ["bye", "bye", "ready", "ready"]
    assert [event["code"] for event in one.events("exited")] == [0, 0]


@pytest.mark.rule("RB-26", "RB-21")
def test_a_command_that_ignores_sigterm_is_killed_within_the_limit(team: Team) -> None:
    node = team.node("one", STUBBORN, "--add", "a")
    (started,) = node.wait_for(1, "started")
    wait_until(lambda: len(members(started["pid"])) >= 3, "it runs with its descendants")
    began = time.monotonic()
    node.send(signal.SIGTERM)
    assert node.process.wait(PATIENCE_S) == 0
    assert 0.5 < time.monotonic() - began < 10.0 * patience_ratio()
    assert [event["code"] for event in node.wait_for(1, "exited")] == [-signal.SIGKILL]
    assert not members(started["pid"])


@pytest.mark.rule("RB-27", "RB-21", "RB-34")
@pytest.mark.parametrize("script", [FAMILY, STUBBORN])
def test_a_supervisor_stopped_past_its_lease_loses_its_subprocesses_before_the_lease_ends(
    team: Team, script: str
) -> None:
    one = team.node("one", script, "--add", "a", "--add", "b")
    one.wait_for(2, "started")
    two = team.node("two", FAMILY)
    two.wait_for(1, "started")
    wait_until(lambda: len(one.running) == len(two.running) == 1, "they share the two")
    ((resource, started),) = one.running.items()
    pause(one.process, team.url)
    wait_until(lambda: not members(started["pid"]), "the shim kills the group", LEASE_TTL_S)
    assert resource not in two.running, "it was killed only once the lease had ended"
    wait_until(lambda: resource in two.running, "two takes over")
    assert two.running[resource]["token"] > started["token"]
    one.send(signal.SIGCONT)
    wait_until(lambda: len(one.running) == len(two.running) == 1, "one takes part again")
    assert one.process.poll() is None
    assert all(len(set(numbers)) == len(numbers) for numbers in tokens(one, two).values())


@pytest.mark.rule("RB-21")
def test_a_killed_shim_takes_everything_with_it_and_the_node_leaves(team: Team) -> None:
    node = team.node("one", FAMILY, "--add", "a", "--add", "b")
    groups = [event["pid"] for event in node.wait_for(2, "started")]
    os.kill(node.shim, signal.SIGKILL)
    wait_until(lambda: not any(map(members, groups)), "no subprocess is left", LEASE_TTL_S)
    assert node.process.wait(PATIENCE_S) == 70


@pytest.mark.rule("RB-21")
def test_a_stopped_shim_does_not_keep_subprocesses_alive(team: Team) -> None:
    node = team.node("one", FAMILY, "--add", "a")
    (started,) = node.wait_for(1, "started")
    shim = node.shim
    os.kill(shim, signal.SIGSTOP)
    node.send(signal.SIGTERM)
    wait_until(lambda: not members(started["pid"]), "the supervisor kills the group", LEASE_TTL_S)
    os.kill(shim, signal.SIGCONT)
    assert node.process.wait(PATIENCE_S) == 0


def test_the_shim_does_not_mind_signals_that_ask_to_stop(team: Team) -> None:
    node = team.node("one", FAMILY, "--add", "a")
    (started,) = node.wait_for(1, "started")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        os.kill(node.shim, number)
    os.kill(started["pid"], signal.SIGTERM)
    node.wait_for(2, "started")
    assert node.process.poll() is None


@pytest.mark.rule("RB-12")
def test_a_command_that_exits_is_started_again_with_the_same_token(team: Team) -> None:
    node = team.node(
        "one", 'echo "$REBALANSER_GROUP/$REBALANSER_NODE/$0/$1/$REBALANSER_RESOURCE/$REBALANSER_TOKEN"'
    )
    team.add("a")
    first, second = node.wait_for(2, "started")[:2]
    assert (first["resource"], first["token"]) == (second["resource"], second["token"])
    assert first["pid"] != second["pid"]
    line = node.wait_for(1, "output")[0]["line"]
    assert line == f"orders/one/sh//a/{first['token']}"


@pytest.mark.rule("RB-1")
def test_what_a_command_leaves_of_its_group_is_killed_before_its_exit_is_told(team: Team) -> None:
    node = team.node("one", "trap '' TERM HUP; sleep 1005 & sleep 0.2", "--add", "a", "--restart", "never")
    (started,) = node.wait_for(1, "started")
    node.wait_for(1, "exited")
    assert not members(started["pid"])


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 5", 1)])
def test_a_failed_command_that_is_not_to_be_started_again_shows_in_the_exit_code(
    team: Team, script: str, code: int
) -> None:
    node = team.node("one", script, "--add", "a", "--restart", "never")
    node.wait_for(1, "exited")
    node.send(signal.SIGTERM)
    assert node.process.wait(PATIENCE_S) == code


@pytest.mark.rule("RB-16", "RB-29")
def test_a_removed_resource_is_stopped(team: Team) -> None:
    node = team.node("one", FAMILY, "--add", "a", "--add", "b")
    node.wait_for(2, "started")
    command = [sys.executable, "-m", "rebalanser", "resources", "remove", "orders", "a"]
    subprocess.run(command, env=team.environment, check=True, stdout=subprocess.DEVNULL)
    node.wait_for(1, "exited")
    assert set(node.running) == {"b"}


@pytest.mark.rule("RB-30")
def test_draining_a_node_stops_only_its_subprocesses(team: Team) -> None:
    one = team.node("one", FAMILY, "--add", "a", "--add", "b")
    one.wait_for(2, "started")
    two = team.node("two", FAMILY)
    wait_until(lambda: len(one.running) == len(two.running) == 1, "they share the two")
    kept = dict(two.running)
    command = [sys.executable, "-m", "rebalanser", "node", "drain", "orders", "one", "--wait", "--json"]
    drained = subprocess.run(command, env=team.environment, check=True, capture_output=True, text=True)
    assert json.loads(drained.stdout) == {
        "group": "orders",
        "node": "one",
        "drained": True,
        "live": True,
        "held": 0,
    }
    wait_until(lambda: not one.running and len(two.running) == 2, "two has both")
    assert kept.items() <= two.running.items()
