"""Results of tasks as arguments of others: chains, and a task after many; the same on all engines (SK-5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from rebalanser import Settings
from rebalanser.core.tasks.model import MAX_RESULTS_BYTES, Task, TaskId
from rebalanser.core.tasks.store import EnqueueAll
from rebalanser.errors import (
    DependencyCycle,
    InvalidTask,
    OutcomeUnknown,
    TaskExists,
    TaskFailed,
    UnknownTask,
)
from rebalanser.tasks import Claim, GiveUp, Queue, Status
from rebalanser.tasks.calls import MAX_TOGETHER
from rebalanser.tasks.checking import Check
from rebalanser.tasks.functions import EnqueueOptions
from rebalanser.testing.waiting import PATIENCE_S

QUICK = Settings(min_rebalance_interval_s=0.0, rejoin_initial_s=0.01)


def count(claim: Claim, page: str) -> int:
    return len(page)


def total(claim: Claim, parts: list[int], unit: str = "") -> str:
    return f"{'+'.join(map(str, parts))}={sum(parts)}{unit}"


def total_of_some(claim: Claim, parts: list[int | None]) -> list[int | None]:
    return parts


def double(claim: Claim, number: float) -> float:
    return number * 2


def born(claim: Claim, year: int) -> date:
    return date(year, 2, 3)


def next_year(claim: Claim, day: date) -> date:
    return day.replace(year=day.year + 1)


def nothing(claim: Claim) -> None:
    """Return nothing."""


def large(claim: Claim, size: int) -> str:
    return "x" * size


def length(claim: Claim, texts: list[str]) -> int:
    return sum(map(len, texts))


class Stage:
    """A queue with some functions, one of which fails until it is told not to."""

    def __init__(self, url: str, folder: Path) -> None:
        queue = self.queue = Queue(
            "work", url, partitions=3, state_folder=folder, settings=QUICK, timeout_s=PATIENCE_S
        )
        self.is_broken = True
        self.count, self.total, self.some = queue.task(count), queue.task(total), queue.task(total_of_some)
        self.broken = queue.task("broken", retries=0)(self._broken)
        self.double, self.born, self.next_year = queue.task(double), queue.task(born), queue.task(next_year)
        self.nothing, self.large, self.length = queue.task(nothing), queue.task(large), queue.task(length)

    def _broken(self, claim: Claim, page: str) -> int:
        if self.is_broken:
            raise GiveUp(page)
        return 1

    def ids(self) -> list[TaskId]:
        return [each.head.id for each in self.queue.tasks()]

    def faults(self) -> list[str]:
        check = Check(self.queue.context.engine, "work", 3, PATIENCE_S)
        return [f"{each.fault} {each.task}" for each in check.findings()]


@pytest.fixture
def stage(engine_url: str, tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(engine_url, tmp_path)
    with stage.queue:
        yield stage


@pytest.mark.rule("SK-5")
def test_a_chain_passes_each_result_on(stage: Stage) -> None:
    last = stage.count.call("abc").then(stage.double).then(stage.double).enqueue()
    days = stage.born.call(2024).then(stage.next_year).enqueue()
    assert len(stage.ids()) == 5
    assert stage.queue.get(last).head.after
    stage.queue.start(concurrency=2)
    assert stage.queue.wait(last, PATIENCE_S) == 12
    assert stage.queue.wait(days, PATIENCE_S) == date(2025, 2, 3)
    assert stage.faults() == []


@pytest.mark.rule("SK-5")
def test_a_task_gets_the_results_of_many_in_their_order(stage: Stage) -> None:
    pages = [stage.count.call("x" * size) for size in (5, 3, 9, 1)]
    parts = [page.result for page in pages]
    last = stage.total.call(parts, unit=" kg").enqueue()
    doubled = stage.double.call(pages[2].result).enqueue()
    stage.queue.start(concurrency=4)
    assert stage.queue.wait(last, PATIENCE_S) == "5+3+9+1=18 kg"
    assert stage.queue.wait(doubled, PATIENCE_S) == 18
    assert len(stage.ids()) == 6, "a call is one task, however many get its result"


@pytest.mark.rule("SK-5")
def test_results_of_tasks_that_are_enqueued_are_arguments_too(stage: Stage) -> None:
    """So more than can be enqueued together are collected by one task."""
    pages = stage.count.enqueue_many([((f"{'x' * (number % 7)}",), {}) for number in range(300)])
    last = stage.total.enqueue([page.result for page in pages])
    none = stage.total.call([]).enqueue()
    stage.queue.start(concurrency=8)
    told = stage.queue.wait(last, PATIENCE_S)
    assert told.partition("=")[0] == "+".join(str(number % 7) for number in range(300))
    assert stage.queue.wait(none, PATIENCE_S) == "=0"


@pytest.mark.rule("SK-5", "SK-15")
def test_a_dead_task_holds_up_the_chain_until_it_is_requeued(stage: Stage) -> None:
    broken = stage.broken.call("abc")
    last = broken.then(stage.double).enqueue()
    fails = stage.double.options(after_failure="fail").call(broken.result).enqueue()
    stage.queue.start(concurrency=2)
    with pytest.raises(TaskFailed, match=f"it depends on {broken.id}, which is dead"):
        stage.queue.wait(fails, PATIENCE_S)
    assert broken.id is not None
    ((_, blockers),) = stage.queue.with_blockers([stage.queue.get(last)])
    assert [each.head.id for each in blockers] == [broken.id]
    stage.is_broken = False
    stage.queue.requeue(broken.id)
    assert stage.queue.wait(last, PATIENCE_S) == 2


@pytest.mark.rule("SK-5")
def test_a_task_that_runs_after_failures_gets_none_in_their_places(stage: Stage) -> None:
    calls = [stage.count.call("ab"), stage.broken.call("abc"), stage.count.call("abcd")]
    parts = [call.result for call in calls]
    some = stage.some.options(after_failure="run").call(parts)
    strict = stage.total.options(after_failure="run").call(parts)
    some_id, strict_id = stage.queue.enqueue_all([some, strict])
    stage.queue.start(concurrency=4)
    assert stage.queue.wait(some_id, PATIENCE_S) == [2, None, 4]
    with pytest.raises(TaskFailed) as raised:
        stage.queue.wait(strict_id, PATIENCE_S)
    assert str(raised.value).endswith(
        "InvalidTask: total: parts.1: must be a valid integer (got None); parts has the results of 3 tasks, "
        f"and task {calls[1].id} is dead"
    )


@pytest.mark.rule("SK-2", "SK-3")
def test_calls_are_enqueued_all_or_none(stage: Stage) -> None:
    taken = stage.count.options(task_id=stage.queue.new_id()).call("a")
    taken.enqueue()
    other = stage.count.options(task_id=taken.id).call("b")
    with pytest.raises(TaskExists, match=f"{taken.id} exists with other content"):
        stage.total.call([stage.count.call("abc").result, other.result]).enqueue()
    unknown = stage.queue.new_id()
    with pytest.raises(UnknownTask, match=f"is to come after {unknown}, which does not exist"):
        stage.count.call("abc").then(stage.double.options(after=[unknown])).enqueue()
    twice = stage.count.options(task_id=unknown).call("b")
    with pytest.raises(InvalidTask, match="have one id"):
        stage.queue.enqueue_all([twice, stage.count.options(task_id=unknown).call("b")])
    with pytest.raises(DependencyCycle):
        stage.count.call("a").then(stage.double.options(task_id=unknown, after=[unknown])).enqueue()
    assert stage.ids() == [taken.id]
    assert stage.faults() == []


@pytest.mark.rule("SK-3")
def test_enqueueing_calls_again_makes_no_further_task(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the answer was lost, and others of them were enqueued before."""
    first = stage.count.call("abc")
    first.enqueue()
    second = first.then(stage.double)
    last = second.then(stage.double)
    batcher = stage.queue.context.batcher
    write_all = batcher.write_all

    def lose(asks: list[object]) -> None:
        write_all(asks)  # type: ignore[type-var]
        raise OutcomeUnknown("lost")

    monkeypatch.setattr(batcher, "write_all", lose)
    with pytest.raises(OutcomeUnknown):
        last.enqueue()
    monkeypatch.undo()
    further = last.then(stage.double).enqueue()
    assert last.enqueue() == last.enqueue() == last.id
    assert stage.ids() == [first.id, second.id, last.id, further]
    stage.queue.start()
    assert stage.queue.wait(further, PATIENCE_S) == 24
    other = second.then(stage.double).enqueue()
    assert stage.queue.wait(other, PATIENCE_S) == 12
    assert len(stage.ids()) == 5
    assert stage.queue.collect(0.0).tasks == 5
    with pytest.raises(UnknownTask):
        second.then(stage.double).enqueue()
    assert stage.ids() == [], "what was done and collected is not done again"


@pytest.mark.rule("SK-2")
def test_a_chain_is_one_write(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stage.queue.context.engine
    apply, written = engine.apply, []
    monkeypatch.setattr(
        engine, "apply", lambda writes, timeout_s: (written.extend(writes), apply(writes, timeout_s))[1]
    )
    call = stage.count.call("abc")
    parts = [stage.count.call(str(number)) for number in range(MAX_TOGETHER - 2)]
    stage.total.call([call.result, *(part.result for part in parts)]).enqueue()
    assert [type(each) for each in written] == [EnqueueAll]
    assert len(stage.ids()) == MAX_TOGETHER
    with pytest.raises(InvalidTask, match="more than 100 tasks can't be enqueued together"):
        stage.total.call([stage.count.call("a").result for _ in range(MAX_TOGETHER)]).enqueue()
    assert len(stage.ids()) == MAX_TOGETHER


@pytest.mark.rule("SK-14", "SK-22")
def test_no_result_is_collected_that_a_task_waits_for(stage: Stage) -> None:
    """However old it is: the task that gets it is not closed, or not due."""
    first = stage.count.call("abc")
    last = first.then(stage.double.options(delay_s=3600.0)).enqueue()
    alone = stage.count.enqueue("ab")
    stage.queue.start()
    assert first.enqueued is not None
    stage.queue.wait(first.enqueued, PATIENCE_S)
    stage.queue.wait(alone, PATIENCE_S)
    collected = stage.queue.collect(0.0, statuses=frozenset(Status))
    assert collected.tasks == 1
    assert stage.ids() == [first.enqueued, last]
    stage.queue.cancel(last)
    assert stage.queue.collect(0.0, statuses=frozenset(Status)).tasks == 2


@pytest.mark.rule("SK-5")
def test_a_result_that_does_not_fit_is_told_and_not_tried_again(stage: Stage) -> None:
    nothing = stage.nothing.call()
    last = stage.total.call(nothing.result).enqueue()  # type: ignore[arg-type]
    stage.queue.start()
    with pytest.raises(TaskFailed, match="must be a valid array") as raised:
        stage.queue.wait(last, PATIENCE_S)
    assert str(raised.value).endswith(f"parts is the result of task {nothing.id}")
    assert stage.queue.get(last).state.failures == 1


@pytest.mark.rule("SK-5")
def test_a_payload_that_names_a_task_waits_for_it(stage: Stage) -> None:
    """Also one of another language, which names it by itself."""
    first = stage.count.enqueue("abc")
    payload = b'{"$results": {"number": "%b"}}' % first.encode()
    made = stage.queue.build_raw_enqueue("double", payload, EnqueueOptions())
    assert made.task.head.after == (first,)
    with pytest.raises(InvalidTask, match="names no tasks"):
        stage.queue.build_raw_enqueue("double", b'{"$results": {"number": 7}}', EnqueueOptions())
    (last,) = stage.queue.commit([made])
    hidden = replace(made, task=Task(replace(made.task.head, id=stage.queue.new_id(), after=()), payload))
    (alone,) = stage.queue.commit([hidden])
    stage.queue.start()
    assert stage.queue.wait(last, PATIENCE_S) == 6
    with pytest.raises(TaskFailed, match=f"gets the result of task {first}, but does not wait for it"):
        stage.queue.wait(alone, PATIENCE_S)


@pytest.mark.rule("SK-5")
def test_results_that_are_too_large_together_are_told(stage: Stage) -> None:
    size = stage.queue.context.max_bytes - 10
    number = min(MAX_RESULTS_BYTES // size + 1, 400)
    parts = stage.large.enqueue_many([((size,), {})] * number)
    last = stage.length.enqueue([part.result for part in parts])
    fits = stage.length.enqueue([part.result for part in parts[:2]])
    stage.queue.start(concurrency=2)
    assert stage.queue.wait(fits, PATIENCE_S) == 2 * size
    with pytest.raises(
        TaskFailed, match=f"results of {number} tasks that it gets have more than 16777216 bytes"
    ):
        stage.queue.wait(last, PATIENCE_S)
    assert stage.queue.get(last).state.failures == 1
