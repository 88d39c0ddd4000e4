"""What a task does once one that it depends on is dead or cancelled: the same on all engines (SK-5)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rebalanser import Settings
from rebalanser.core.tasks.model import AfterFailure, TaskId, TaskState
from rebalanser.errors import TaskFailed
from rebalanser.tasks import Claim, Queue, Status
from rebalanser.tasks.checking import Check
from rebalanser.testing.waiting import PATIENCE_S, wait_until

QUICK = Settings(min_rebalance_interval_s=0.0, rejoin_initial_s=0.01)
WAIT, RUN, FAIL = AfterFailure


class Stage:
    """A queue with one function, which fails if it is told so, and what was run."""

    def __init__(self, url: str, folder: Path) -> None:
        self.queue = Queue(
            "work", url, partitions=3, state_folder=folder, settings=QUICK, timeout_s=PATIENCE_S
        )
        self.ran: list[str] = []
        self.is_broken = True

        @self.queue.task(retries=0)
        def step(claim: Claim, name: str) -> None:
            self.ran.append(name)
            if name == "broken" and self.is_broken:
                raise ValueError(name)

        self.step = step

    def state(self, task: TaskId) -> TaskState:
        return self.queue.get(task).state

    def await_status(self, task: TaskId, status: Status) -> TaskState:
        wait_until(lambda: self.state(task).status is status)
        return self.state(task)

    def has_failed_with(self, task: TaskId, needed: TaskId, status: Status) -> None:
        with pytest.raises(TaskFailed, match=f"{needed}, which is {status}"):
            self.queue.wait(task, PATIENCE_S)
        state = self.state(task)
        assert (state.status, state.claim, state.failures) == (Status.DEAD, None, 0)

    def faults(self) -> list[str]:
        check = Check(self.queue.context.engine, "work", 3, PATIENCE_S)
        return [f"{each.fault} {each.task}" for each in check.findings()]


@pytest.fixture
def stage(engine_url: str, tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(engine_url, tmp_path)
    with stage.queue:
        yield stage


@pytest.mark.rule("SK-5")
@pytest.mark.parametrize("is_late", [False, True], ids=["dies later", "is dead"])
def test_dependents_wait_run_or_fail(stage: Stage, *, is_late: bool) -> None:
    step = stage.step
    broken = step.enqueue("broken")
    if is_late:
        stage.queue.start(concurrency=2)
        stage.await_status(broken, Status.DEAD)
    waits = step.options(after=broken).enqueue("waits")
    runs = step.options(after=broken, after_failure="run").enqueue("runs")
    fails = step.options(after=broken, after_failure="fail").enqueue("fails")
    too = step.options(after=[fails, runs], after_failure="fail").enqueue("fails too")
    after_all = step.options(after=[fails, too, runs], after_failure=RUN).enqueue("after all")
    if not is_late:
        stage.queue.start(concurrency=2)
    assert stage.queue.wait(runs, PATIENCE_S) is None
    assert stage.queue.wait(after_all, PATIENCE_S) is None
    stage.has_failed_with(fails, broken, Status.DEAD)
    stage.has_failed_with(too, fails, Status.DEAD)
    assert stage.ran == ["broken", "runs", "after all"]
    assert stage.state(waits) == TaskState()
    assert stage.faults() == [f"blocked {waits}"]

    stage.is_broken = False
    decided = {task: stage.queue.get(task) for task in (runs, fails, too, after_all)}
    stage.queue.requeue(broken)
    assert stage.queue.wait(waits, PATIENCE_S) is None
    assert {task: stage.queue.get(task) for task in decided} == decided, "a requeue does not undo it"
    stage.queue.requeue(fails)
    assert stage.queue.wait(fails, PATIENCE_S) is None
    assert stage.ran[3:] == ["broken", "waits", "fails"]
    assert stage.faults() == []


@pytest.mark.rule("SK-5")
def test_what_is_cancelled_or_unknown_settles_as_what_is_dead_does(stage: Stage) -> None:
    step, queue = stage.step, stage.queue
    coming = queue.new_id()
    runs = step.options(after=coming, after_failure="run", waits_for_unknown=True).enqueue("runs")
    fails = step.options(after=coming, after_failure="fail", waits_for_unknown=True, delay_s=0.01).enqueue(
        "fails"
    )
    queue.start(concurrency=2)
    done = step.enqueue("done")
    queue.wait(done, PATIENCE_S)
    assert (stage.state(runs).status, stage.state(fails).status) == (Status.WAITING,) * 2
    step.options(task_id=coming, delay_s=3600.0).enqueue("never")
    queue.cancel(coming)
    assert queue.wait(runs, PATIENCE_S) is None
    stage.has_failed_with(fails, coming, Status.CANCELLED)
    assert queue.wait(step.options(after=done, after_failure="fail").enqueue("last"), PATIENCE_S) is None
    assert stage.ran == ["done", "runs", "last"]


@pytest.mark.rule("SK-5", "SK-13")
def test_the_next_worker_decides_what_the_last_one_left(stage: Stage) -> None:
    """Nothing is lost between the end of one task and that of its dependents, whoever is gone by then."""
    step, queue = stage.step, stage.queue
    first, second = step.enqueue("first"), step.enqueue("second")
    fails = step.options(after=[first, second], after_failure="fail").enqueue("fails")
    queue.start()
    assert queue.wait(second, PATIENCE_S) is None
    queue.stop()
    other = step.enqueue("other")
    last = step.options(after=[fails, other], after_failure="run").enqueue("last")
    late = step.options(after=other, after_failure="fail").enqueue("late")
    queue.cancel(other)
    assert stage.state(late).status is Status.WAITING
    queue.start()
    stage.has_failed_with(late, other, Status.CANCELLED)
    assert queue.wait(last, PATIENCE_S) is None
    assert queue.wait(fails, PATIENCE_S) is None
    assert "other" not in stage.ran
