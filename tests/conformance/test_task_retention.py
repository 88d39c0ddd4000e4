"""Closed tasks, and no others, are deleted a stated time after they were closed: the same on all engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from threading import Event

import pytest

from rebalanser.core.tasks import rules
from rebalanser.core.tasks.ids import lowest_id_at
from rebalanser.core.tasks.model import AfterFailure, ClaimTerm, Stored, TaskId, TaskState
from rebalanser.core.tasks.retention import DELAY_RATIO, LONGEST_INTERVAL_S, Mark, Marks
from rebalanser.core.tasks.rules import ClaimKey
from rebalanser.core.tasks.store import Answer, Applied, Collect, Move, Write
from rebalanser.errors import (
    InvalidArgument,
    QuotaExceeded,
    RegistryUnavailable,
    RequestTooLarge,
    UnknownTask,
)
from rebalanser.tasks import AsyncQueue, Queue, Retention, Status
from rebalanser.tasks.functions import EnqueueOptions
from rebalanser.tasks.retention import LEASE_S, MIN_AGE_S, TASKS_PER_STEP, RetentionRecord, Sweeper
from rebalanser.testing.clock import FakeClock
from rebalanser.testing.waiting import PATIENCE_S, wait_until

DAY_S = 86_400.0
WEEK = Retention(completed_s=7 * DAY_S, dead_s=30 * DAY_S, cancelled_s=7 * DAY_S)
LATE = 1 + DELAY_RATIO
"""How much longer than its time a task is there at most."""


class Stage:
    """A queue at a time that the test says, and a worker's sweeper."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.clock = FakeClock()
        self.queue = Queue("work", url, partitions=3, state_folder=folder, timeout_s=PATIENCE_S)
        self.queue._clock = self.queue.context.clock = self.clock  # type: ignore[assignment]
        self._ids = count()

    def sweeper(self, retention: Retention = WEEK) -> Sweeper:
        return Sweeper(self.queue.context, lambda: self.queue.tasks(page=TASKS_PER_STEP), retention, "worker")

    def enqueue(
        self,
        status: Status = Status.WAITING,
        after: Sequence[TaskId] = (),
        after_failure: AfterFailure = AfterFailure.WAIT,
        name: str = "send",
        unique_for_s: float | None = None,
    ) -> TaskId:
        made_at = lowest_id_at(self.clock.wall())
        task = f"{made_at[:16]}{next(self._ids):024x}"
        options = EnqueueOptions(
            after=tuple(after), task_id=task, after_failure=after_failure, unique_for_s=unique_for_s
        )
        self.queue.commit([self.queue.build_raw_enqueue(name, b"{}", options, retries=0)])
        self.close(task, status)
        return task

    def close(self, task: TaskId, status: Status) -> None:
        if status is Status.CANCELLED:
            self.queue.cancel(task)
        if status not in {Status.COMPLETED, Status.DEAD, Status.CLAIMED}:
            return
        held, term = ClaimKey(0, f"holder {task}"), ClaimTerm(30.0, "", 0.0)
        head = self.queue.get(task).head
        self._move(task, rules.claim(head, self.queue.get(task).state, held.holder, "me", term, over=False))
        state = self.queue.get(task).state
        if status is Status.COMPLETED:
            self._move(task, rules.complete(state, held, None))
        elif status is Status.DEAD:
            self._move(task, rules.fail(head, state, held, "broken", None))

    def _move(self, task: TaskId, state: TaskState | rules.Refused) -> None:
        assert isinstance(state, TaskState)
        stored = self.queue.get(task)
        move = Move(task, "work", stored.partition, stored.revision, state, head=stored.head)
        (answer,) = self.queue.context.engine.apply([move], PATIENCE_S)
        assert isinstance(answer, Applied)

    def left(self) -> set[TaskId]:
        return {stored.head.id for stored in self.queue.tasks()}

    def live(self, seconds: float, *sweepers: Sweeper) -> None:
        """Let time pass while workers sweep: when it is due, or 20 times, which is less often."""
        until = self.clock.now() + seconds
        while (left_s := until - self.clock.now()) > 0:
            pauses = [sweeper.sweep() for sweeper in sweepers]
            self.clock.advance(min(left_s, max([seconds / 20, *pauses])))
        for sweeper in sweepers:
            sweeper.sweep()


@pytest.fixture
def stage(engine_url: str, tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(engine_url, tmp_path)
    with stage.queue:
        yield stage


CLOSED = (Status.COMPLETED, Status.DEAD, Status.CANCELLED)


@pytest.mark.rule("SK-22")
def test_closed_tasks_are_deleted_after_their_time_and_open_ones_never(stage: Stage) -> None:
    sweeper = stage.sweeper()
    tasks = {status: stage.enqueue(status) for status in Status}
    stage.live(7 * DAY_S - 1, sweeper)
    assert stage.left() == set(tasks.values()), "none is deleted too early"
    stage.live(7 * DAY_S * DELAY_RATIO, sweeper)
    gone = {tasks[Status.COMPLETED], tasks[Status.CANCELLED]}
    assert stage.left() == set(tasks.values()) - gone
    stage.live(30 * DAY_S * LATE, sweeper)
    assert stage.left() == {tasks[Status.WAITING], tasks[Status.CLAIMED]}
    record = stage.queue.retained()
    assert (record.deleted_ever, record.sweeper) == (3, "")
    assert record.swept_at == stage.clock.wall()


@pytest.mark.rule("SK-22")
def test_the_time_counts_from_when_a_task_was_closed(stage: Stage) -> None:
    """Not from when it was enqueued: one that waited for a month is not gone as soon as it is complete."""
    sweeper = stage.sweeper()
    task = stage.enqueue()
    stage.live(40 * DAY_S, sweeper)
    stage.close(task, Status.COMPLETED)
    stage.live(7 * DAY_S - 1, sweeper)
    assert stage.left() == {task}
    stage.live(7 * DAY_S * DELAY_RATIO, sweeper)
    assert stage.left() == set()


@pytest.mark.rule("SK-22")
def test_what_was_closed_before_there_was_retention_counts_as_closed_when_that_begins(stage: Stage) -> None:
    """A store of an earlier version loses nothing at once."""
    task = stage.enqueue(Status.COMPLETED)
    stage.clock.advance(100 * DAY_S)
    sweeper = stage.sweeper()
    stage.live(7 * DAY_S - 1, sweeper)
    assert stage.left() == {task}
    stage.live(DAY_S, sweeper)
    assert stage.left() == set()


@pytest.mark.rule("SK-22", "SK-23")
def test_a_unique_task_is_kept_for_as_long_as_it_keeps_others_out(stage: Stage) -> None:
    sweeper = stage.sweeper(Retention(completed_s=DAY_S, dead_s=None, cancelled_s=None))
    task = stage.enqueue(Status.COMPLETED, unique_for_s=3 * DAY_S)
    stage.live(2.9 * DAY_S, sweeper)
    assert stage.left() == {task}
    with pytest.raises(UnknownTask):
        stage.enqueue(Status.CANCELLED, unique_for_s=3 * DAY_S)  # there is none of this id: it is a duplicate
    stage.live(0.4 * DAY_S, sweeper)
    assert stage.left() == set()


@pytest.mark.rule("SK-22")
def test_a_requeued_task_counts_anew(stage: Stage) -> None:
    sweeper = stage.sweeper()
    task = stage.enqueue(Status.CANCELLED)
    stage.live(6 * DAY_S, sweeper)
    stage.queue.requeue(task)
    stage.queue.cancel(task)
    stage.live(6 * DAY_S, sweeper)
    assert stage.left() == {task}


@pytest.mark.rule("SK-14", "SK-22")
def test_a_task_goes_with_all_that_it_is_connected_to(stage: Stage) -> None:
    sweeper = stage.sweeper()
    dead = stage.enqueue(Status.DEAD)
    waits = stage.enqueue(after=[dead])
    ran = stage.enqueue(Status.COMPLETED, [dead], AfterFailure.RUN)
    done = stage.enqueue(Status.COMPLETED)
    half = stage.enqueue(Status.COMPLETED, [done])
    stage.enqueue(Status.DEAD, [half])
    alone = stage.enqueue(Status.COMPLETED)
    stage.live(8 * DAY_S, sweeper)
    assert alone not in stage.left()
    assert len(stage.left()) == 6, "what belongs to a dead one is kept as long as that"
    stage.live(33 * DAY_S, sweeper)
    assert stage.left() == {dead, waits, ran}, "what an open task depends on stays, and says so"
    ((_, blockers),) = stage.queue.with_blockers([stage.queue.get(waits)])
    assert [each.head.id for each in blockers] == [dead]
    stage.queue.cancel(waits)
    stage.live(8 * DAY_S, sweeper)
    assert stage.left() == set()


@pytest.mark.rule("SK-14", "SK-22")
def test_a_young_task_keeps_what_it_is_connected_to(stage: Stage) -> None:
    """Also in the other direction: an old task may depend on one whose id is younger."""
    hour = Retention(completed_s=3600.0, dead_s=3600.0, cancelled_s=3600.0)
    sweeper = stage.sweeper(hour)
    old = stage.enqueue(Status.COMPLETED)
    coming = f"{lowest_id_at(stage.clock.wall() + 7200.0)[:16]}{'f' * 24}"
    broken = stage.enqueue(Status.CANCELLED)
    options = EnqueueOptions(after=(coming, broken), waits_for_unknown=True)
    early = f"{lowest_id_at(stage.clock.wall())[:16]}{'e' * 24}"
    options = options.model_copy(update={"task_id": early})
    stage.queue.commit([stage.queue.build_raw_enqueue("send", b"{}", options)])
    stage.queue.cancel(early)
    stage.live(3000.0, sweeper)
    young = stage.enqueue(after=[old])
    stage.live(1800.0, sweeper)
    assert stage.left() == {old, young, early, broken}


@pytest.mark.rule("SK-3", "SK-22")
def test_connected_tasks_that_are_too_many_for_the_store_keep_no_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A store takes a component in one request, whose size has a limit."""
    first = stage.enqueue(Status.COMPLETED)
    large = {first, *(stage.enqueue(Status.COMPLETED, after=[first]) for _ in range(3))}
    for _ in range(2):
        stage.enqueue(Status.COMPLETED, after=[stage.enqueue(Status.COMPLETED)])
    engine = stage.queue.context.engine
    apply = engine.apply

    def limited(writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        if any(isinstance(each, Collect) and len(each.tasks) > 3 for each in writes):
            raise RequestTooLarge("the names of the tasks to collect")
        return apply(writes, timeout_s)

    monkeypatch.setattr(engine, "apply", limited)
    stage.live(7 * DAY_S * LATE, stage.sweeper())
    assert stage.left() == large
    record = stage.queue.retained()
    assert (record.deleted_ever, record.sweeper) == (4, ""), "the sweep has ended as any other"
    assert stage.queue.collect(0.0).tasks == 0
    (line,) = {each.getMessage() for each in caplog.records if "too many" in each.getMessage()}
    assert "4 tasks" in line


@pytest.mark.rule("SK-22")
def test_a_task_that_was_just_enqueued_is_kept_whatever_is_stated(stage: Stage) -> None:
    """So its id is known to whoever enqueues it again, as it got no answer."""
    sweeper = stage.sweeper(Retention(completed_s=0.0, dead_s=0.0, cancelled_s=None))
    done, cancelled = stage.enqueue(Status.COMPLETED), stage.enqueue(Status.CANCELLED)
    stage.live(MIN_AGE_S - 1, sweeper)
    assert stage.left() == {done, cancelled}
    stage.live(10.0, sweeper)
    assert stage.left() == {cancelled}
    stage.live(1000 * DAY_S, sweeper)
    assert stage.left() == {cancelled}, "None keeps them for ever"


@pytest.mark.rule("SK-22")
def test_one_worker_sweeps_at_a_time_and_another_follows_one_that_has_died(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = stage.sweeper(), stage.sweeper()
    begun: list[str] = []

    def dies(self: Sweeper, _: Marks) -> None:
        begun.append(self._name)
        if self is one:
            assert two.sweep() > 0, "it waits for the one that sweeps"
            raise RegistryUnavailable("gone")
        raise KeyboardInterrupt

    monkeypatch.setattr(Sweeper, "_delete", dies)
    with pytest.raises(RegistryUnavailable):
        one.sweep()
    assert begun == [one._name]
    stage.clock.advance(two.sweep())
    assert stage.clock.wall() - FakeClock().wall() <= LEASE_S
    with pytest.raises(KeyboardInterrupt):
        two.sweep()
    assert begun == [one._name, two._name]


@pytest.mark.rule("SK-22")
def test_a_sweep_is_not_repeated_by_the_next_worker(stage: Stage) -> None:
    one, two = stage.sweeper(), stage.sweeper()
    assert one.sweep() == LONGEST_INTERVAL_S
    swept_at = stage.queue.retained().swept_at
    stage.clock.advance(1.0)
    assert two.sweep() == LONGEST_INTERVAL_S - 1
    assert stage.queue.retained().swept_at == swept_at
    earlier = FakeClock(wall=swept_at - 1000.0)
    stage.queue.context.clock = earlier
    two.sweep()
    assert stage.queue.retained().swept_at == earlier.wall(), "a clock that was set back does not end it"


@pytest.mark.rule("SK-22")
def test_many_tasks_go_in_small_steps_with_rests(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeper = stage.sweeper(Retention(completed_s=0.0))
    writes: list[int] = []
    rests: list[float] = []
    apply = stage.queue.context.engine.apply
    monkeypatch.setattr(sweeper._ending, "wait", rests.append)

    def counted(asked: Sequence[object], timeout_s: float) -> Sequence[object]:
        writes.append(len(asked))
        stage.clock.advance(0.5)
        return apply(asked, timeout_s)  # type: ignore[arg-type]

    for _ in range(2 * TASKS_PER_STEP + 10):
        stage.enqueue(Status.CANCELLED)
        stage.close(stage.enqueue(), Status.COMPLETED)
    stage.clock.advance(MIN_AGE_S + 1)
    monkeypatch.setattr(stage.queue.context.engine, "apply", counted)
    sweeper.sweep()
    assert sum(writes) == 2 * TASKS_PER_STEP + 10
    assert max(writes) <= TASKS_PER_STEP
    assert rests.count(1.5) == len(writes), "it rests three times as long as a step took"
    assert stage.queue.retained().deleted == 2 * TASKS_PER_STEP + 10


@pytest.mark.rule("SK-22")
def test_a_long_sweep_is_repeated_soon_if_it_finds_much_and_else_seldom(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that deleting keeps up with what is completed, and reading what stays costs little."""

    def reads_slowly() -> Iterator[Stored]:
        for stored in stage.queue.tasks():
            stage.clock.advance(50.0)
            yield stored

    monkeypatch.setattr(Event, "wait", lambda *_: False)
    sweeper = Sweeper(stage.queue.context, reads_slowly, WEEK, "worker")
    done = [stage.enqueue(Status.COMPLETED) for _ in range(3)]
    sweeper.sweep()
    stage.clock.advance(8 * DAY_S)
    stage.enqueue()
    assert sweeper.sweep() == LONGEST_INTERVAL_S - 2 * 4 * 50.0
    assert not stage.left().intersection(done)
    stage.clock.advance(8 * DAY_S)
    assert sweeper.sweep() == 20 * 2 * 50.0


@pytest.mark.rule("SK-22")
def test_a_full_store_is_emptied_although_it_takes_no_note(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeper = stage.sweeper()
    stage.enqueue(Status.COMPLETED)
    stage.live(1.0, sweeper)
    stage.clock.advance(8 * DAY_S)

    def full(*_: object) -> bool:
        raise QuotaExceeded("full")

    monkeypatch.setattr(stage.queue.context.engine, "put_note", full)
    sweeper.sweep()
    assert stage.left() == set()


@pytest.mark.rule("SK-22")
def test_a_worker_sweeps_by_itself_and_stops(stage: Stage) -> None:
    """With the clock that it is given, once its first pause is over."""
    task = stage.enqueue(Status.COMPLETED)
    stage.clock.advance(MIN_AGE_S + 1)
    stage.queue.retention = Retention(completed_s=0.0)
    stage.queue._start_sweeper()
    wait_until(lambda: task not in stage.left())
    stage.queue.retention = Retention(completed_s=None, dead_s=None, cancelled_s=None)
    sweeper, stage.queue._sweeper = stage.queue._sweeper, None
    assert sweeper is not None
    sweeper.stop()
    stage.queue._start_sweeper()
    assert stage.queue._sweeper is None
    with pytest.raises(UnknownTask):
        stage.queue.get(task)


@pytest.mark.rule("SK-22")
def test_a_note_of_another_version_is_begun_anew(stage: Stage) -> None:
    engine = stage.queue.context.engine
    task = stage.enqueue(Status.COMPLETED)
    assert engine.put_note("work", b'{"marks": "none"}', 0, PATIENCE_S)
    assert stage.queue.retained() == RetentionRecord()
    stage.clock.advance(8 * DAY_S)
    stage.sweeper().sweep()
    assert stage.left() == {task}
    assert len(stage.queue.retained().marks) == 1


@pytest.mark.rule("SK-22")
def test_marks_never_say_too_early_and_soon_enough_and_are_few() -> None:
    marks, closed, revision = Marks(), list[tuple[float, int]](), 0
    wall, kept_s = 1_700_000_000.0, 30 * DAY_S
    for _ in range(60 * 144):
        wall += 600.0
        revision += 1
        closed.append((wall - 300.0, revision))
        marks = marks.with_mark(Mark(wall, revision), kept_s)
    for at, number in closed:
        said = marks.closed_at(number)
        assert said is not None
        assert said >= at or wall - said >= kept_s
        assert said - at <= max(600.0, (wall - at) * DELAY_RATIO + 600.0) or wall - said >= kept_s
    assert marks.closed_at(revision + 1) is None
    assert len(marks) < 200
    assert marks.with_mark(Mark(wall + 1, revision), kept_s)[-1].wall == wall, "nothing was written since"
    back = marks.with_mark(Mark(wall - DAY_S, revision - 10), kept_s)
    assert back.closed_at(revision) is None, "a clock was set back"
    back = marks.with_mark(Mark(wall + 1, revision - 10), kept_s)
    assert back.closed_at(revision) is None, "a store that was set back has other states of these revisions"


@pytest.mark.rule("SK-22")
def test_nobody_waits_for_a_sweeper_that_is_late_or_whose_clock_was_ahead() -> None:
    record = RetentionRecord(sweeper="other", until=1000.0 + LEASE_S)
    assert record.wait_s(1000.0, "me") == LEASE_S
    assert record.wait_s(1000.0, "other") == 0.0
    assert record.wait_s(1000.0 + LEASE_S, "me") == record.wait_s(2000.0, "me") == 0.0
    assert record.wait_s(900.0, "me") == 0.0
    ended = RetentionRecord(swept_at=1000.0, next_at=1600.0)
    assert [ended.wait_s(now, "me") for now in (999.0, 1000.0, 1599.0, 1600.0)] == [0.0, 600.0, 1.0, 0.0]


@pytest.mark.rule("SK-22")
def test_workers_delete_closed_tasks_unless_they_are_told_otherwise() -> None:
    assert Retention() == WEEK
    with Queue("memory://") as queue:
        assert (queue.retention, AsyncQueue("memory://").retention) == (WEEK, WEEK)
    with Queue("memory://", retention=None) as queue:
        assert (queue.retention, AsyncQueue("memory://", retention=None).retention) == (None, None)


@pytest.mark.parametrize(
    "wrong", [{"completed_s": -1.0}, {"dead_s": float("nan")}, {"cancelled_s": "7d"}, {"dead_s": True}]
)
def test_what_is_no_time_is_refused(wrong: Mapping[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        Retention(**wrong)  # type: ignore[arg-type]


@pytest.mark.rule("SK-14", "SK-22")
def test_by_command_no_open_task_goes_whatever_is_stated(stage: Stage) -> None:
    tasks = {status: stage.enqueue(status) for status in Status}
    assert stage.queue.collect(0.0).tasks == 1
    done = stage.queue.collect(0.0, statuses=frozenset(Status))
    assert (done.tasks, done.dead, done.cancelled) == (2, 1, 1)
    assert stage.left() == {tasks[Status.WAITING], tasks[Status.CLAIMED]}
