"""Unique tasks: of equal ones a single one is open, the same on all engines (SK-23)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rebalanser.core.tasks.model import TaskId
from rebalanser.errors import InvalidTask, UnknownTask
from rebalanser.tasks import Claim, EnqueueAnswer, Queue, Status
from rebalanser.testing import FakeClock
from rebalanser.testing.waiting import PATIENCE_S

COMMITTED, DUPLICATE = EnqueueAnswer.COMMITTED, EnqueueAnswer.DUPLICATE
MINUTE_S = 60.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def queue(engine_url: str, tmp_path: Path, clock: FakeClock) -> Iterator[Queue]:
    with Queue(
        "work", engine_url, partitions=3, state_folder=tmp_path, clock=clock, timeout_s=PATIENCE_S
    ) as queue:
        yield queue


def answers(*tasks: TaskId) -> list[EnqueueAnswer]:
    return [getattr(task, "answer") for task in tasks]  # noqa: B009 - of Enqueued


@pytest.mark.rule("SK-23")
def test_a_task_with_the_key_of_an_open_one_is_that_one(queue: Queue) -> None:
    @queue.task
    def bill(claim: Claim, customer: int) -> None:
        pass

    @queue.task
    def remind(claim: Claim, customer: int) -> None:
        pass

    first = bill.options(unique_key="7").enqueue(7)
    again = bill.options(unique_key="7").enqueue(8)
    others = [
        bill.options(unique_key="8").enqueue(7), remind.options(unique_key="7").enqueue(7), bill.enqueue(7)
    ]  # fmt: skip
    assert again == first
    assert answers(first, again, *others) == [COMMITTED, DUPLICATE, COMMITTED, COMMITTED, COMMITTED]
    assert [each.head.id for each in queue.tasks()] == [first, *others]
    queue.cancel(first)
    second = bill.options(unique_key="7").enqueue(7)
    assert second.answer is COMMITTED
    assert bill.options(unique_key="7").enqueue(7) == second


@pytest.mark.rule("SK-23")
def test_without_a_key_tasks_with_equal_arguments_are_equal(queue: Queue, clock: FakeClock) -> None:
    @queue.task(unique_for_s=MINUTE_S)
    def report(claim: Claim, day: str, pages: int = 1) -> None:
        pass

    made = report.enqueue_many(
        [(["monday"], {}), (["tuesday"], {}), ([], {"day": "monday"}), (["monday", 2], {})]
    )
    assert answers(*made) == [COMMITTED, COMMITTED, DUPLICATE, COMMITTED]
    assert made[2] == made[0]
    assert queue.get(made[0]).head.unique_for_s == MINUTE_S
    queue.cancel(made[0])
    clock.advance(MINUTE_S - 0.5)
    assert report.enqueue("monday") == made[0], "it was enqueued less than a minute ago"
    assert report.options(unique_for_s=0.0).enqueue("monday") == made[0]
    assert report.enqueue("tuesday") == made[1]
    clock.advance(1.0)
    later = report.options(unique_for_s=0.0).enqueue("monday")
    assert later.answer is COMMITTED
    assert report.enqueue("tuesday") == made[1], "its time is over and it is still open"
    queue.cancel(later)
    assert report.enqueue("monday").answer is COMMITTED


@pytest.mark.rule("SK-3", "SK-23")
def test_a_unique_task_is_enqueued_again_by_its_id(queue: Queue, clock: FakeClock) -> None:
    @queue.task
    def bill(claim: Claim, customer: int) -> None:
        pass

    task = queue.new_id()
    keyed = bill.options(task_id=task, unique_key="7", unique_for_s=MINUTE_S)
    assert answers(keyed.enqueue(7), keyed.enqueue(7)) == [COMMITTED, COMMITTED]
    clock.advance(MINUTE_S)
    queue.cancel(task)
    other = bill.options(unique_key="7").enqueue(7)
    assert answers(keyed.enqueue(7), other) == [COMMITTED, COMMITTED]
    late = bill.options(task_id=queue.new_id(), unique_key="7")
    assert late.enqueue(7) == other


@pytest.mark.rule("SK-23")
def test_hooks_and_counts_are_not_told_of_duplicates(queue: Queue) -> None:
    @queue.task(unique_for_s=0)
    def report(claim: Claim) -> None:
        pass

    report.enqueue_many([([], {})] * 3)
    assert queue.metrics.total().enqueued == {"report": 1}
    assert queue.count()[Status.WAITING] == 1


@pytest.mark.rule("SK-23")
@pytest.mark.parametrize("statement", [{"unique_for_s": -1.0}, {"unique_for_s": 1e12}, {"unique_for_s": "x"}])
def test_what_can_not_be_is_refused_where_it_is_said(queue: Queue, statement: dict[str, float]) -> None:
    with pytest.raises(InvalidTask, match="unique_for_s"):
        queue.task(**statement)

    @queue.task
    def bill(claim: Claim) -> None:
        pass

    for key in ("", "x" * 513):
        with pytest.raises(InvalidTask, match="unique_key"):
            bill.options(unique_key=key)


@pytest.mark.rule("SK-15", "SK-23")
def test_a_tick_is_left_out_while_the_task_of_another_is_open(tmp_path: Path, clock: FakeClock) -> None:
    with Queue("work", f"sqlite:///{tmp_path}/tasks.db", state_folder=tmp_path, clock=clock) as queue:
        began: list[float] = []
        is_broken = True

        @queue.periodic("* * * * *", overlap=False, retries=1, backoff_s=210.0, jitter=0.0)
        def clean(claim: Claim) -> None:
            began.append(clock.wall())
            if is_broken:
                raise OSError("the disk is away")

        @queue.periodic("* * * * *", overlap=True)
        def count(claim: Claim) -> None:
            pass

        queue.run_until_idle()
        queue.run_until_idle(advance_s=MINUTE_S)
        (first,) = queue.tasks(name="clean")
        assert (first.state.status, first.state.failures) == (Status.WAITING, 1)
        is_broken = False
        queue.run_until_idle(advance_s=3 * MINUTE_S)
        assert [each.head.id for each in queue.tasks(name="clean")] == [first.head.id]
        queue.run_until_idle(advance_s=2 * MINUTE_S)
        runs = [round(at - began[0]) for at in began]
        assert runs == [0, 210, 240, 300]
        assert len(list(queue.tasks(name="count"))) == 6


@pytest.mark.rule("SK-4", "SK-23")
def test_by_way_of_an_outbox_a_duplicate_is_the_earlier_one(tmp_path: Path, clock: FakeClock) -> None:
    url, outbox = f"sqlite:///{tmp_path}/tasks.db", tmp_path / "outbox"
    with Queue("work", url, state_folder=tmp_path, outbox=outbox, timeout_s=PATIENCE_S) as queue:

        @queue.task(unique_for_s=0)
        def report(claim: Claim, day: str) -> None:
            pass

        made = report.enqueue_many([(["monday"], {}), (["monday"], {}), (["tuesday"], {})])
        assert answers(*made) == [COMMITTED, DUPLICATE, COMMITTED]
        assert made[1] == made[0]
        assert report.enqueue("monday") == made[0]
        assert [each.head.id for each in queue.tasks()] == [made[0], made[2]]
        with pytest.raises(UnknownTask):
            report.options(after=[queue.new_id()]).enqueue("wednesday")
