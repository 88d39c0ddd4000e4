"""Workers of a queue as real processes on real engines: killed, paused, and killed by what they work on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rebalanser.admin import Admin
from rebalanser.core.tasks.model import Status
from rebalanser.core.tasks.store import FreeSlot
from rebalanser.tasks import Call, Queue
from rebalanser.tasks.engine import SharesSlots
from rebalanser.tasks.functions import NO_OPTIONS
from rebalanser.tasks.queue import group_name
from rebalanser.testing.pausing import pause
from rebalanser.testing.waiting import PATIENCE_S, patience_ratio, wait_until
from tests.faults.tasks_process import Host

PROCESS = Path(__file__).with_name("tasks_process.py")
CLAIM_TTL_S = 2.0
LEASE_TTL_S = 2.0
BODY_S = 3.0
TASKS = 12
LONG_S = 20.0
"""A body that runs longer than all else in a test."""


class Stage:
    """A queue, its workers, and what their bodies tell."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self.url = url
        self.log = folder / "log.jsonl"
        self._order: dict[str, Any] = {
            "url": url,
            "claim_ttl_s": CLAIM_TTL_S,
            "lease_ttl_s": LEASE_TTL_S,
            "state": str(folder / "state"),
            "log": str(self.log),
            "sink": str(folder / "sink.db"),
        }
        self._stack = stack
        self.host = Host(self._order)
        self.queue: Queue = self.host.queue
        stack.callback(self.queue.close)

    def start(self, concurrency: int = 2) -> subprocess.Popen[bytes]:
        """Start a worker."""
        order = json.dumps({**self._order, "concurrency": concurrency})
        process = subprocess.Popen([sys.executable, str(PROCESS), order])
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def events(self, event: str | None = None) -> list[dict[str, Any]]:
        """What was told so far."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        told = [json.loads(line) for line in lines]
        return [each for each in told if event in {None, each["event"]}]

    def enqueue(self, function: str, *calls: tuple[Any, ...]) -> list[str]:
        """Enqueue calls of a function of the host application."""
        body = self.queue.functions[function]
        return self.queue.commit([self.queue.build_enqueue(body, call, {}) for call in calls])

    def statuses(self) -> dict[Status, int]:
        return {status: count for status, count in self.queue.count().items() if count}


@pytest.fixture(params=["sqlite", "etcd"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'tasks.db'}"
    else:
        url = f"{request.getfixturevalue('etcd_url')}/tasks/{uuid.uuid4().hex}"
    with ExitStack() as stack:
        yield Stage(url, tmp_path, stack)


@pytest.mark.rule("SK-8", "SK-17")
def test_a_worker_that_is_killed_loses_nothing(stage: Stage) -> None:
    ids = stage.enqueue("sleep", *[(BODY_S,)] * TASKS)
    first = stage.start()
    wait_until(lambda: len(stage.events("ended")) >= 2 and len(stage.events("began")) >= 4)
    first.kill()
    first.wait()
    killed_at = time.monotonic()
    began = {each["task"] for each in stage.events("began")}
    running = began - {each.head.id for each in stage.queue.tasks(frozenset({Status.COMPLETED}))}
    assert running, "it was killed in the middle"
    stage.start()
    wait_until(lambda: stage.statuses() == {Status.COMPLETED: TASKS})
    tries = Counter(each["task"] for each in stage.events("began"))
    assert set(tries) == set(ids)
    assert {task for task, count in tries.items() if count > 1} <= running
    assert max(tries.values()) <= 2
    again = [each["at"] for each in stage.events("began") if each["failures"] > 0]
    buffer_s = 0.1 * CLAIM_TTL_S
    others_s = BODY_S  # what runs in front of them
    assert max(again) - killed_at < LEASE_TTL_S + CLAIM_TTL_S + buffer_s + others_s + 5.0 * patience_ratio()


@pytest.mark.rule("SK-5", "SK-17")
def test_a_worker_that_is_killed_between_the_steps_of_a_chain_loses_no_result(stage: Stage) -> None:
    """Each step kills it once, and begins with the result of the step before when it is tried again."""
    step = stage.queue.functions["add_or_die"]
    chain = [Call(stage.queue, step, NO_OPTIONS, (0, 1), {})]
    for _ in range(3):
        chain.append(Call(stage.queue, step, NO_OPTIONS, (chain[-1].result, 1), {}))
    parts = [Call(stage.queue, step, NO_OPTIONS, (chain[-1].result, number), {}) for number in range(2)]
    last = Call(
        stage.queue, stage.queue.functions["total"], NO_OPTIONS, ([part.result for part in parts],), {}
    )
    task = last.enqueue()
    while not _is_complete(stage, task):
        worker = stage.start(1)
        wait_until(lambda worker=worker: worker.poll() is not None or _is_complete(stage, task))
    assert stage.queue.wait(task, PATIENCE_S) == (4 + 0) + (4 + 1)
    tries = Counter(each["task"] for each in stage.events("began"))
    # A claim for a thread of the process that was just killed is a try too, and begins nowhere.
    assert tries[str(chain[0].id)] == 2
    assert {tries[str(call.id)] for call in chain} <= {1, 2}
    assert {*tries} == {task, *(str(call.id) for call in (*chain, *parts))}
    ended = [each["value"] for each in stage.events("ended")]
    assert [*ended[:4], *sorted(ended[4:6]), *ended[6:]] == [1, 2, 3, 4, 4, 5, 9], (
        "each step once, with the result of that before; the two parts in any order"
    )


def _is_complete(stage: Stage, task: str) -> bool:
    return stage.queue.get(task).state.status is Status.COMPLETED


@pytest.mark.rule("SK-6", "SK-7", "SK-8", "SK-10")
def test_a_worker_that_was_paused_past_its_claim_can_write_nothing(stage: Stage) -> None:
    (task,) = stage.enqueue("outlive", ())
    paused = stage.start(1)
    wait_until(lambda: bool(stage.events("written outside")))
    pause(paused, stage.url)
    stage.start(1)
    assert stage.queue.wait(task, PATIENCE_S) is None
    paused.send_signal(signal.SIGCONT)
    wait_until(lambda: bool(stage.events("refused outside")))
    late = [each["event"] for each in stage.events() if each["pid"] == paused.pid]
    assert late == ["began", "written outside", "renewal refused", "update refused", "refused outside"]
    assert stage.queue.get(task).state.failures == 1
    first, second = stage.queue.log(task)
    assert (first.content, second.content) == (b"after 0 failures", b"after 1 failures")
    assert first.claim < second.claim
    tokens = [each["token"] for each in stage.events("began")]
    assert tokens == sorted(set(tokens))


@pytest.mark.rule("SK-15")
def test_a_task_that_kills_its_worker_every_time_ends_as_a_dead_letter(stage: Stage) -> None:
    (deadly,) = stage.enqueue("die", ())
    others = stage.enqueue("add", *[(number, 1) for number in range(5)])
    for _ in range(4):
        worker = stage.start(1)
        wait_until(lambda worker=worker: worker.poll() is not None or _is_dead(stage, deadly))
        if worker.poll() is None:
            break
    assert stage.queue.get(deadly).state.error.endswith("ended without a word")
    assert len([each for each in stage.events("began") if each["task"] == deadly]) == 3
    for number, other in enumerate(others):
        assert stage.queue.wait(other, PATIENCE_S) == number + 1


def _is_dead(stage: Stage, task: str) -> bool:
    return stage.queue.get(task).state.status is Status.DEAD


@pytest.mark.rule("SK-15")
def test_a_payload_that_no_worker_can_read_is_a_dead_letter_at_once(stage: Stage) -> None:
    body = stage.queue.functions["add"]
    made = stage.queue.build_enqueue(body, (1, 2), {})
    poisoned = type(made)(type(made.task)(made.task.head, b"\xff no JSON"), made.partition)
    (task,) = stage.queue.commit([poisoned])
    (good,) = stage.enqueue("add", (1, 2))
    stage.start(1)
    assert stage.queue.wait(good, PATIENCE_S) == 3
    wait_until(lambda: _is_dead(stage, task))
    assert "add: " in stage.queue.get(task).state.error
    assert [each for each in stage.events("began") if each["task"] == task] == []


@pytest.mark.rule("SK-13")
def test_partitions_change_hands_without_losing_or_doubling_a_claim(stage: Stage) -> None:
    ids = stage.enqueue("sleep", *[(0.3,)] * 60)
    workers = [stage.start() for _ in range(2)]
    wait_until(lambda: len(stage.events("ended")) >= 5)
    workers.append(stage.start())
    wait_until(lambda: len(stage.events("ended")) >= 15)
    workers[0].send_signal(signal.SIGTERM)
    assert workers[0].wait(PATIENCE_S) == 0
    wait_until(lambda: len(stage.events("ended")) >= 30)
    workers[1].kill()
    workers.append(stage.start())
    wait_until(lambda: stage.statuses() == {Status.COMPLETED: len(ids)})
    claims = Counter((each["task"], each["number"]) for each in stage.events("began"))
    assert set(claims.values()) == {1}, "no claim number was given twice"
    tries = Counter(each["task"] for each in stage.events("began"))
    # Of each of its two threads: the body that ran, and the one that had ended, if that was not written yet.
    assert sum(tries.values()) - len(ids) <= 4, "only what the killed worker ran was tried again"


def _pid_of(stage: Stage, task: str) -> int:
    """The process in which a task has begun."""
    wait_until(lambda: any(each["task"] == task for each in stage.events("began")))
    return next(each["pid"] for each in stage.events("began") if each["task"] == task)


@pytest.fixture
def shared(etcd_url: str, tmp_path: Path) -> Iterator[Stage]:
    """A queue on an engine whose workers share their free slots."""
    with ExitStack() as stack:
        yield Stage(f"{etcd_url}/tasks/{uuid.uuid4().hex}", tmp_path, stack)


def _slots(stage: Stage) -> list[FreeSlot]:
    engine = stage.queue.context.engine
    assert isinstance(engine, SharesSlots)
    return [each for each in engine.slots("work", PATIENCE_S)[0] if isinstance(each, FreeSlot)]


@pytest.mark.rule("SK-20")
def test_no_task_waits_behind_a_slow_body_while_another_worker_is_idle(shared: Stage) -> None:
    workers = [shared.start(1) for _ in range(2)]
    (slow,) = shared.enqueue("sleep", (LONG_S,))
    busy = _pid_of(shared, slow)
    quick = shared.enqueue("add", *[(number, 1) for number in range(40)])
    for number, task in enumerate(quick):
        assert shared.queue.wait(task, PATIENCE_S) == number + 1
    assert shared.queue.get(slow).state.status is Status.CLAIMED, "the slow body runs still"
    assert busy in {worker.pid for worker in workers}
    begun = [each for each in shared.events("began") if each["task"] in quick]
    assert {each["pid"] for each in begun} == {worker.pid for worker in workers} - {busy}
    # Not by the numbers of their claims: one that was given back before it began has one more.
    assert sorted(each["task"] for each in begun) == sorted(quick)


@pytest.mark.rule("SK-13", "SK-20")
def test_workers_without_a_partition_work_too(shared: Stage) -> None:
    """Six workers, four partitions: six bodies run at one time."""
    workers = [shared.start(1) for _ in range(6)]
    tasks = shared.enqueue("sleep", *[(LONG_S,)] * 6)
    wait_until(lambda: len(shared.events("began")) == 6)
    assert {each["pid"] for each in shared.events("began")} == {worker.pid for worker in workers}
    assert not shared.events("ended")
    assert {each["task"] for each in shared.events("began")} == set(tasks)


@pytest.mark.rule("SK-13", "SK-20")
def test_a_worker_that_stops_leaves_its_partitions_before_its_bodies_end(shared: Stage) -> None:
    workers = [shared.start(2) for _ in range(2)]
    (slow,) = shared.enqueue("sleep", (LONG_S,))
    leaving = next(worker for worker in workers if worker.pid == _pid_of(shared, slow))
    (other,) = (worker for worker in workers if worker is not leaving)
    leaving.send_signal(signal.SIGTERM)

    def is_left() -> bool:
        with Admin(group_name("work"), shared.url) as admin:
            owners = admin.owners().values()
        return len(owners) == shared.queue.partition_count and len({each.node for each in owners}) == 1

    wait_until(is_left)
    assert shared.queue.get(slow).state.status is Status.CLAIMED
    quick = shared.enqueue("add", *[(number, 1) for number in range(30)])
    for task in quick:
        shared.queue.wait(task, PATIENCE_S)
    begun = [each for each in shared.events("began") if each["task"] in quick]
    assert {each["pid"] for each in begun} == {other.pid}
    assert leaving.poll() is None, "its body runs still"


def _claimed(stage: Stage) -> int:
    return stage.queue.count().get(Status.CLAIMED, 0)


@pytest.mark.rule("SK-8", "SK-17", "SK-20")
def test_what_is_claimed_for_a_worker_that_was_killed_runs_again(shared: Stage) -> None:
    """Its slots are in the store until their lease ends; claims for them end in time."""
    owner = shared.start(1)
    (slow,) = shared.enqueue("sleep", (LONG_S,))
    assert _pid_of(shared, slow) == owner.pid
    idle = shared.start(4)
    wait_until(lambda: len(_slots(shared)) == 4)
    idle.send_signal(signal.SIGSTOP)
    tasks = shared.enqueue("add", *[(number, 1) for number in range(8)])
    wait_until(lambda: _claimed(shared) > 1 or not _slots(shared))
    lent = _claimed(shared) - 1
    idle.kill()
    third = shared.start(2)
    for number, task in enumerate(tasks):
        assert shared.queue.wait(task, PATIENCE_S) == number + 1
    begun = [each for each in shared.events("began") if each["task"] in tasks]
    assert {each["pid"] for each in begun} <= {owner.pid, third.pid}
    assert len([each for each in begun if each["failures"] == 1]) >= lent, "claims for it were over in time"
