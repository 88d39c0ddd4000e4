"""What ``rebalanser run`` decides: when a command is started again, and how it is told its resource."""

from __future__ import annotations

import itertools
import json
import os
import queue
from typing import TYPE_CHECKING

import pytest

from rebalanser.cli.run import IdleHint
from rebalanser.cli.supervisor import (
    LineForwarder,
    RestartCondition,
    Style,
    Supervisor,
    filled_in,
)
from rebalanser.core.clock import RESTART_INITIAL_S, RESTART_MAX_S, RESTART_RESET_S, GrowingDelay
from rebalanser.core.group import Fact, FactKind
from rebalanser.errors import InternalError
from rebalanser.group import Group
from rebalanser.runtime.clock import SystemClock
from rebalanser.runtime.owned import AccessDeadline, Owned, StopRequest
from rebalanser.runtime.shim_client import CommandStarted, Exited, Outcome
from rebalanser.settings import Settings
from rebalanser.testing.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rebalanser.runtime.supervisor_shim import SupervisedCommand


def test_placeholders_are_filled_in_once_and_everywhere() -> None:
    command = ["run-{resource}", "{token}:{resource}", "{other}", "$HOME", "{}"]
    assert filled_in(command, "a {token} 'b'", 7) == [
        "run-a {token} 'b'",
        "7:a {token} 'b'",
        "{other}",
        "$HOME",
        "{}",
    ]


def test_the_delay_doubles_up_to_a_limit_and_begins_anew_after_a_long_run() -> None:
    delay = GrowingDelay()
    delays = [delay.after(0.1) for _ in range(2_000)]
    assert delays[:3] == [RESTART_INITIAL_S, 2 * RESTART_INITIAL_S, 4 * RESTART_INITIAL_S]
    assert all(before <= after for before, after in itertools.pairwise(delays))
    assert delays[-1] == RESTART_MAX_S
    assert delay.after(RESTART_RESET_S) == RESTART_INITIAL_S
    assert delay.after(0.1) == 2 * RESTART_INITIAL_S


class ScriptedProcesses:
    """Stands for the shim: each start ends as the script says; the resource leaves after the last."""

    def __init__(self, owned: Owned, script: list[Exited]) -> None:
        self._owned = owned
        self._script = script
        self.started = 0

    def start(self, job: SupervisedCommand, tell: Callable[[Outcome], None], files: Sequence[int]) -> int:
        self.started += 1
        exited = self._script.pop(0)
        if not self._script:
            self._owned.stop_requested.set()
        tell(CommandStarted(1234))
        tell(exited)
        return self.started

    def stop(self, number: int, kill_at: float) -> None:
        """It has exited already."""


@pytest.fixture
def owned() -> Owned:
    clock = SystemClock()
    tenure = AccessDeadline(clock)
    tenure.deadline = clock.now() + 1_000
    return Owned("a", 7, tenure)


def supervisor(restart: RestartCondition, processes: object) -> Supervisor:
    made = Supervisor(
        Group("orders", "memory://supervisor"), Settings(), ["true"], restart, LineForwarder(Style.AS_IT_IS)
    )
    made._processes = processes  # type: ignore[assignment]
    return made


GOOD = Exited(0, None, by_shim=False)
BAD = Exited(3, None, by_shim=False)
ENDED = Exited(0, None, by_shim=True)


@pytest.mark.parametrize(
    ("restart", "first", "starts", "failed"),
    [
        (RestartCondition.ALWAYS, GOOD, 2, {}),
        (RestartCondition.ALWAYS, BAD, 2, {}),
        (RestartCondition.ON_FAILURE, GOOD, 1, {}),
        (RestartCondition.ON_FAILURE, BAD, 2, {}),
        (RestartCondition.NEVER, GOOD, 1, {}),
        (RestartCondition.NEVER, BAD, 1, {"a": 3}),
        (RestartCondition.NEVER, ENDED, 2, {}),
    ],
)
def test_a_command_is_started_again_as_asked(
    owned: Owned,
    monkeypatch: pytest.MonkeyPatch,
    restart: RestartCondition,
    first: Exited,
    starts: int,
    failed: dict[str, int],
) -> None:
    monkeypatch.setattr(GrowingDelay, "after", lambda _delay, _lasted_s: 0.0)
    processes = ScriptedProcesses(owned, [first, GOOD])
    made = supervisor(restart, processes)
    made.supervise(owned)
    assert processes.started == starts
    assert made.failed == failed


def test_a_command_that_can_not_be_started_has_not_exited(
    owned: Owned, capsys: pytest.CaptureFixture[str]
) -> None:
    class Unstartable(ScriptedProcesses):
        def start(self, job: SupervisedCommand, tell: Callable[[Outcome], None], files: Sequence[int]) -> int:
            tell(Exited(None, "no program", by_shim=False))
            return 1

    made = supervisor(RestartCondition.NEVER, Unstartable(owned, []))
    made.supervise(owned)
    assert made.failed == {"a": None}
    assert capsys.readouterr().err == "rebalanser: not started resource a, token 7, reason no program\n"


def test_a_resource_is_owned_on_where_its_command_is_not_started_again(
    owned: Owned, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[StopRequest] = []
    monkeypatch.setattr(StopRequest, "wait", lambda request: waited.append(request))
    supervisor(RestartCondition.NEVER, ScriptedProcesses(owned, [GOOD, GOOD]))._work(owned)
    assert waited == [owned.stop_requested]


@pytest.mark.rule("RB-27")
def test_nothing_is_started_for_a_resource_that_has_to_be_given_up(owned: Owned) -> None:
    processes = ScriptedProcesses(owned, [GOOD])
    owned.stop_requested.set()
    supervisor(RestartCondition.ALWAYS, processes).supervise(owned)
    assert processes.started == 0


@pytest.mark.rule("RB-21")
def test_nothing_is_started_after_the_deadline(owned: Owned) -> None:
    processes = ScriptedProcesses(owned, [GOOD])
    owned._tenure.deadline = SystemClock().now() - 1
    made = supervisor(RestartCondition.ALWAYS, processes)
    run = made._run_once(owned, queue.SimpleQueue())
    assert run is not None
    assert run.exited.by_shim
    assert processes.started == 0


def test_without_a_shim_the_node_leaves(owned: Owned, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def start(self, *_arguments: object) -> int:
            raise InternalError("the shim of the subprocesses is gone")

    asked: list[bool] = []
    monkeypatch.setattr(Group, "request_stop", lambda _group: asked.append(True))
    supervisor(RestartCondition.ALWAYS, Gone()).supervise(owned)
    assert asked == [True]


def test_it_is_said_when_a_command_is_started_again(
    owned: Owned, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(GrowingDelay, "after", lambda _delay, _lasted_s: 0.001)
    supervisor(RestartCondition.ALWAYS, ScriptedProcesses(owned, [BAD, GOOD])).supervise(owned)
    told = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert told == ["started", "exited", "restarting", "started", "exited"]


def test_a_line_of_output_comes_after_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = LineForwarder(Style.JSON)
    with outputs.of("a") as (out, err):
        os.write(out, b"early\n")
        os.write(err, b"wrong\n")
    readers = list(outputs._readers["a"])
    assert capsys.readouterr().out == ""
    outputs.tell("started", resource="a")
    outputs.begin("a")
    for reader in readers:
        reader.join(PATIENCE_S)
    events = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert events == ["started", "output", "output"]


def test_output_is_passed_on_once_the_start_is_told(owned: Owned, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(LineForwarder, "tell", lambda _outputs, event, **_what: told.append(event))
    monkeypatch.setattr(
        LineForwarder, "begin", lambda _outputs, resource: told.append(f"output of {resource}")
    )
    monkeypatch.setattr(LineForwarder, "finish", lambda _outputs, _resource: None)
    supervisor(RestartCondition.NEVER, ScriptedProcesses(owned, [GOOD, GOOD])).supervise(owned)
    assert told == ["started", "output of a", "exited"]


def test_a_node_that_is_to_own_nothing_is_reported_once_with_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hint = IdleHint("orders", LineForwarder(Style.AS_IT_IS))

    def told(kind: FactKind, resources: int) -> str:
        hint.hear(Fact(kind, "n-1", detail={"resources": resources}))
        return capsys.readouterr().err

    assert told(FactKind.ALLOCATION_ADOPTED, 0) == (
        "rebalanser: owns nothing group orders, hint rebalanser status orders says why\n"
    )
    assert told(FactKind.ALLOCATION_ADOPTED, 0) == "", "it is no news"
    assert told(FactKind.ALLOCATION_ADOPTED, 2) == ""
    assert told(FactKind.GROUP_READ, 0) == ""
    assert told(FactKind.ALLOCATION_ADOPTED, 0) == (
        "rebalanser: owns nothing group orders, "
        "hint the group has no resources; add some with --add or rebalanser resources add\n"
    )
