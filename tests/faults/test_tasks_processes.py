"""Bodies in processes of their own: what they can't do to their worker, and what it can do to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from rebalanser.core.tasks.model import Status
from rebalanser.errors import TaskFailed
from rebalanser.tasks import Call, Queue
from rebalanser.tasks.functions import NO_OPTIONS, EnqueueOptions
from rebalanser.testing.waiting import PATIENCE_S, wait_until
from tests.faults.bodies_process import queue_of

PROCESS = Path(__file__).with_name("bodies_process.py")
CLAIM_TTL_S = 2.0
TIMEOUT_S = 3.0
FOREVER_S = 600.0


class Stage:
    """A queue on SQLite, its workers, and what their bodies tell."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._told = folder / "told.jsonl"
        self._order: dict[str, Any] = {
            "url": f"sqlite:///{folder / 'tasks.db'}",
            "claim_ttl_s": CLAIM_TTL_S,
            "lease_ttl_s": 2.0,
            "timeout_s": FOREVER_S,
            "grace_s": None,
            "state": str(folder / "state"),
        }
        self._stack = stack
        stack.callback(self._end_helpers)
        self.queue = queue_of(self._order)
        stack.callback(self.queue.close)

    def within(self, timeout_s: float) -> None:
        """Have tasks that are enqueued from now on time out after so long."""
        self.queue.close()
        self._order["timeout_s"] = timeout_s
        self.queue = queue_of(self._order)
        self._stack.callback(self.queue.close)

    def start(self, concurrency: int = 2, grace_s: float | None = None) -> subprocess.Popen[bytes]:
        """Start a worker; with a grace it stops once it reads a line."""
        order = json.dumps({**self._order, "concurrency": concurrency, "grace_s": grace_s})
        process = subprocess.Popen(
            [sys.executable, str(PROCESS), order],
            stdin=subprocess.PIPE,
            env={**os.environ, "TOLD": str(self._told)},
        )
        self._stack.callback(process.__exit__, None, None, None)
        self._stack.callback(process.kill)
        return process

    def events(self, event: str | None = None, task: str | None = None) -> list[dict[str, Any]]:
        """What was told so far."""
        lines = self._told.read_text().splitlines() if self._told.exists() else []
        told = [json.loads(line) for line in lines]
        return [each for each in told if event in {None, each["event"]} and task in {None, each["task"]}]

    def enqueue(self, function: str, *arguments: Any, **named: Any) -> str:
        """Enqueue a call of a function of the worker."""
        body = self.queue.functions[function]
        (task,) = self.queue.commit([self.queue.build_enqueue(body, arguments, named)])
        return task

    def _end_helpers(self) -> None:
        """End what a body has started whose worker was killed: the kernel kills the body alone."""
        for told in self.events("began"):
            if "helper" in told:
                with suppress(ProcessLookupError):
                    os.kill(told["helper"], signal.SIGKILL)

    def began(self, task: str) -> dict[str, Any]:
        """What the first try of a task tells, once it has begun."""
        wait_until(lambda: bool(self.events("began", task)))
        return self.events("began", task)[0]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(tmp_path, stack)


def is_gone(pid: int) -> bool:
    """Whether no process of this id runs any code: there is none, or it is a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] in {"Z", "X"}


@pytest.mark.rule("SK-5", "SK-15")
def test_a_body_in_a_process_gets_the_results_of_others(stage: Stage) -> None:
    add = stage.queue.functions["add"]
    first, second = (Call(stage.queue, add, NO_OPTIONS, (number, 1), {}) for number in range(2))
    last = Call(stage.queue, add, NO_OPTIONS, (first.result, second.result), {}).enqueue()
    stage.start()
    assert stage.queue.wait(last, PATIENCE_S) == 1 + 2


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize(
    ("function", "tries", "told"), [("leave", 3, "ended with code 3"), ("crash", 2, "was ended by SIGSEGV")]
)
def test_a_body_that_kills_its_process_ends_as_a_dead_letter_while_others_go_on(
    stage: Stage, function: str, tries: int, told: str
) -> None:
    deadly = stage.enqueue(function)
    others = [stage.enqueue("add", number, 1) for number in range(5)]
    worker = stage.start(1)
    for number, other in enumerate(others):
        assert stage.queue.wait(other, PATIENCE_S) == number + 1
    wait_until(lambda: stage.queue.get(deadly).state.status is Status.DEAD)
    assert stage.queue.get(deadly).state.error.endswith(f"BodyLost: the process of the body {told}")
    assert [each["failures"] for each in stage.events("began", deadly)] == list(range(tries))
    assert worker.poll() is None


@pytest.mark.rule("SK-15")
def test_a_body_that_is_out_of_time_is_killed_and_tried_again(stage: Stage) -> None:
    stage.within(TIMEOUT_S)
    task = stage.enqueue("linger")
    stage.start(2)
    stage.began(task)
    # So that a process is idle, and the next try need not wait for one.
    assert stage.queue.wait(stage.enqueue("add", 1, 2), PATIENCE_S) == 3
    assert stage.queue.wait(task, PATIENCE_S) == "at last"
    first, cleaned, second = stage.events(task=task)
    assert [first["event"], cleaned["event"], second["event"]] == ["began", "cleaned up", "began"]
    assert first["pid"] != second["pid"]
    assert second["beside"] is False, "it had ended before the next try began"
    wait_until(lambda: is_gone(first["helper"]))
    stored = stage.queue.get(task)
    assert stored.state.failures == 1
    assert stored.state.claim is not None
    assert stored.state.claim.number == 1


@pytest.mark.rule("SK-15")
def test_a_claim_that_is_lost_costs_the_body_its_process(stage: Stage) -> None:
    task = stage.enqueue("freeze")
    stage.start(1)
    first = stage.began(task)
    stage.queue.cancel(task)
    wait_until(lambda: is_gone(first["pid"]))
    other = stage.enqueue("add", 1, 2)
    assert stage.queue.wait(other, PATIENCE_S) == 3
    assert stage.queue.get(task).state.status is Status.CANCELLED


@pytest.mark.rule("SK-17")
def test_a_worker_that_is_killed_leaves_no_process(stage: Stage) -> None:
    tasks = [stage.enqueue("freeze"), stage.enqueue("linger")]
    worker = stage.start(2)
    pids = [stage.began(task)["pid"] for task in tasks]
    worker.kill()
    worker.wait()
    wait_until(lambda: all(is_gone(pid) for pid in pids))
    stage.start(2)
    for task in tasks:
        assert stage.queue.wait(task, PATIENCE_S) == "at last"


@pytest.mark.rule("SK-15", "SK-17")
def test_stopping_kills_after_the_grace_and_gives_back(stage: Stage) -> None:
    tasks = [stage.enqueue("freeze"), stage.enqueue("linger")]
    worker = stage.start(2, grace_s=0.2)
    pids = [stage.began(task)["pid"] for task in tasks]
    worker.communicate(b"stop\n", PATIENCE_S)
    assert worker.returncode == 0
    assert all(is_gone(pid) for pid in pids)
    for task in tasks:
        state = stage.queue.get(task).state
        assert (state.status, state.failures) == (Status.WAITING, 0)
    assert [each["task"] for each in stage.events("cleaned up")] == [tasks[1]]


@pytest.mark.rule("SK-6", "SK-9")
def test_a_claim_does_in_a_process_what_it_does_in_a_thread(stage: Stage) -> None:
    tasks = [stage.enqueue("report") for _ in range(2)]
    worker = stage.start(1)
    reports = [stage.queue.wait(task, PATIENCE_S) for task in tasks]
    assert reports[0]["pid"] == reports[1]["pid"] != worker.pid, "one process after the other"
    for task, found in zip(tasks, reports, strict=True):
        assert found["updates"] == [0, 1]
        assert found["log"] == ["one", "two"]
        assert found["is_mine"] is True
        claim = stage.queue.get(task).state.claim
        assert claim is not None
        assert (found["number"], found["failures"]) == (claim.number, 0)
        assert 0 < found["token"] < stage.queue.get(task).revision
        assert "not in a process" in found["refused"]
        assert [each.content for each in stage.queue.log(task)] == [b"one", b"two"]


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize(("strange", "told"), [(False, "ValueError: wrong"), (True, "Strange: odd")])
def test_what_a_body_raises_is_kept_with_the_place_where_it_was_raised(
    stage: Stage, strange: bool, told: str
) -> None:
    task = stage.enqueue("fail", strange=strange)
    stage.start(1)
    with pytest.raises(TaskFailed, match=told):
        stage.queue.wait(task, PATIENCE_S)
    assert "bodies_process.py" in stage.queue.get(task).state.error


MODULE = """
import os
from pathlib import Path
from rebalanser.tasks import Claim, Queue
tasks = Queue("mail", "sqlite:///mail.db", partitions=2, state_folder=Path("state"))

@tasks.task()
def where(claim: Claim) -> int:
    return os.getpid()
"""


def test_the_command_line_runs_bodies_in_processes_of_a_queue_that_they_import(tmp_path: Path) -> None:
    (tmp_path / "mail.py").write_text(MODULE)
    command = [sys.executable, "-m", "rebalanser", "tasks", "worker", "mail:tasks", "--processes"]
    with (
        subprocess.Popen(command, cwd=tmp_path) as worker,
        closing(
            Queue("mail", f"sqlite:///{tmp_path / 'mail.db'}", partitions=2, state_folder=tmp_path / "state")
        ) as queue,
    ):
        try:
            made = queue.build_raw_enqueue("where", b"{}", EnqueueOptions())
            (task,) = queue.commit([made])
            place = queue.wait(task, PATIENCE_S)
            assert place != worker.pid
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(PATIENCE_S) == 0
            assert is_gone(place)
        finally:
            worker.kill()


UNGUARDED = """
tasks.start(bodies="processes")
"""
NESTED = """
def outer():
    @tasks.task()
    def inner(claim: Claim) -> None: ...

outer()
if __name__ == "__main__":
    tasks.start(bodies="processes")
"""


@pytest.mark.parametrize(
    ("more", "fragment"),
    [
        (UNGUARDED, "put it under if __name__ == '__main__'"),
        (NESTED, "task 'inner': no other process can import outer.<locals>.inner; "),
    ],
    ids=["unguarded", "nested"],
)
def test_what_no_process_can_import_is_refused_at_the_start(tmp_path: Path, more: str, fragment: str) -> None:
    script = tmp_path / "mail.py"
    script.write_text(MODULE + more)
    ended = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("rebalanser.errors.InvalidHandlers: ")
    assert fragment in ended.stderr.splitlines()[-1]
