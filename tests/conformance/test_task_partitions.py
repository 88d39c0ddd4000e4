"""Where claims come from: the partitions that a process owns, or the index of a file, which nobody owns."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rebalanser.errors import RegistryUnavailable, UnusableStore
from rebalanser.tasks import Claim, Queue
from rebalanser.tasks.asks import MoveAsk
from rebalanser.tasks.claim_source import Claimed
from rebalanser.tasks.engine import Change, Page
from rebalanser.tasks.model import State, Status, TaskId
from rebalanser.tasks.options import EnqueueOptions
from rebalanser.tasks.partitions import Partitions
from rebalanser.tasks.periodic import Ticker
from rebalanser.testing.clock import FakeClock
from rebalanser.testing.waiting import PATIENCE_S

PARTITIONS = 2


class Stage:
    """A queue, and the partitions of it that are owned here."""

    def __init__(self, url: str, folder: Path) -> None:
        self.queue = Queue("work", url, partitions=PARTITIONS, state_folder=folder)
        self.woken = threading.Event()
        self.partitions = Partitions(self.queue.context, "here", 1.0, self.woken.set)
        self.asked: list[Change] = []
        self._wants = self.partitions._wants
        self.partitions._wants = self._asked  # type: ignore[method-assign]

    def _asked(self, change: Change) -> bool:
        wanted = self._wants(change)
        if wanted:
            self.asked.append(change)
        return wanted

    def take(self, *numbers: int) -> None:
        owned: list[Any] = [SimpleNamespace(resource=str(number), token=1) for number in numbers]
        self.partitions.take(owned)

    def enqueue(self, partition: int | None = None, after: tuple[TaskId, ...] = ()) -> TaskId:
        """Enqueue a task that lies in a partition, or in any."""
        while True:
            made = self.queue.made_raw("send", b"a payload", EnqueueOptions(after=after))
            if partition in (None, made.partition):
                (task,) = self.queue.commit([made])
                return task

    def claims(self, count: int = 1) -> list[Claimed]:
        """So many claims, as soon as there is something to claim."""
        found: list[Claimed] = []
        while len(found) < count:
            found += self.partitions.claim(count - len(found), None)
            if len(found) < count:
                assert self.woken.wait(PATIENCE_S)
                self.woken.clear()
        return found

    def complete(self, task: TaskId) -> None:
        ask = MoveAsk(self.queue.get(task), lambda _: State(Status.COMPLETED))
        self.queue.context.submit(ask).result(PATIENCE_S)

    def close(self) -> None:
        self.partitions.close()
        self.queue.close()


@pytest.fixture(params=["memory", "sqlite"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    url = f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"sqlite:///{tmp_path}/tasks.db"
    stage = Stage(url, tmp_path)
    yield stage
    stage.close()


@pytest.mark.rule("SK-2", "SK-5")
def test_a_claim_comes_with_the_payload(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.enqueue()
    stage.take(0, 1)
    (claimed,) = stage.claims()
    assert claimed.payload == b"a payload"
    monkeypatch.setattr(stage.queue.context.engine, "payloads", None)
    assert stage.partitions.payloads([claimed]) == {claimed.stored.head.id: b"a payload"}


@pytest.mark.rule("SK-5", "SK-6")
@pytest.mark.parametrize("error", [RegistryUnavailable("away"), UnusableStore("broken")])
def test_a_payload_that_could_not_be_read_is_read_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The claims are settled whatever became of the payloads: none of them is forgotten half made."""
    task = stage.enqueue()
    stage.take(0, 1)
    engine = stage.queue.context.engine
    read: Callable[..., Mapping[TaskId, bytes]] = engine.payloads
    answers: list[Exception] = [error, error]

    def payloads(queue: str, ids: Sequence[TaskId], timeout_s: float) -> Mapping[TaskId, bytes]:
        if answers:
            raise answers.pop()
        return read(queue, ids, timeout_s)

    monkeypatch.setattr(engine, "payloads", payloads)
    claimed = stage.claims()
    assert claimed[0].payload is None
    assert stage.queue.get(task).state.status is Status.CLAIMED
    with pytest.raises(type(error)):
        stage.partitions.payloads(claimed)
    assert stage.partitions.payloads(claimed) == {task: b"a payload"}


@pytest.mark.rule("SK-5", "SK-13")
def test_of_other_partitions_it_matters_only_what_is_complete(stage: Stage) -> None:
    first = stage.enqueue(partition=1)
    stage.take(0)
    second = stage.enqueue(partition=0, after=(first,))
    strange = stage.enqueue(partition=1)
    stage.complete(strange)
    stage.complete(first)
    assert [each.stored.head.id for each in stage.claims()] == [second]
    last = stage.enqueue(partition=0)
    assert [each.stored.head.id for each in stage.claims()] == [last]
    assert {change.partition for change in stage.asked} == {0}
    assert {change.status for change in stage.asked} <= {Status.WAITING, Status.CLAIMED}


@pytest.mark.rule("SK-5")
def test_a_ready_task_is_claimed_behind_any_number_of_unknown_dependencies(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead ones and such as do not exist: a step asks for some of them, and there is a next one at once."""
    monkeypatch.setattr("rebalanser.tasks.partitions.PAGE", 2)
    first = stage.enqueue()
    stage.complete(first)
    dead = [stage.enqueue() for _ in range(5)]
    for each in dead:
        stage.queue.cancel(each)
    for number in range(5):
        stage.enqueue(partition=0, after=(dead[number],))
        made = stage.queue.made_raw(
            "send", b"", EnqueueOptions(after=(f"{number:040x}",), waits_for_unknown=True)
        )
        stage.queue.commit([made])
    ready = stage.enqueue(partition=0, after=(first,))
    stage.take(0, 1)
    steps = 0
    claimed: list[Claimed] = []
    clock = stage.queue.context.clock
    while (at := stage.partitions.next_wakeup()) is not None and at <= clock.now():
        claimed += stage.partitions.claim(10, None)
        steps += 1
        assert steps < 20, "a dependency that is not complete is asked for again and again"
    assert [each.stored.head.id for each in claimed] == [ready]


@pytest.mark.rule("SK-5")
@pytest.mark.parametrize("part", ["_is_wanted", "_learn_all"])
def test_news_that_could_not_be_learnt_are_read(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """A watch tells each change once: the error of a moment must not lose a task for ever."""
    stage.take(0, 1)
    learn, faults = getattr(stage.partitions, part), [KeyError("a bug")]

    def fault(news: Any) -> Any:
        if faults:
            raise faults.pop()
        return learn(news)

    monkeypatch.setattr(stage.partitions, part, fault)
    task = stage.enqueue()
    assert [each.stored.head.id for each in stage.claims()] == [task]
    assert not faults


@pytest.mark.rule("SK-5", "SK-13")
def test_what_is_read_of_a_deep_queue_is_claimed_while_the_rest_is_read(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rebalanser.tasks.partitions.PAGE", 2)
    for _ in range(6):
        stage.enqueue()
    engine = stage.queue.context.engine
    read: Callable[..., Page] = engine.page
    claimed: list[TaskId] = []
    pages = 0

    def page(queue: str, timeout_s: float, **options: Any) -> Page:
        nonlocal pages
        if options.get("partition") is not None:
            pages += 1
            if stage.woken.is_set():
                stage.woken.clear()
                claimed.extend(each.stored.head.id for each in stage.partitions.claim(1, None))
        return read(queue, timeout_s, **options)

    monkeypatch.setattr(engine, "page", page)
    stage.take(0, 1)
    assert pages >= 3
    assert claimed, "before the last page was read"
    rest = [each.stored.head.id for each in stage.claims(6 - len(claimed))]
    assert len({*claimed, *rest}) == 6


# -- claims from the index of a file


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[Queue]]:
    """Four workers of a queue of one partition, each of one thread."""
    with ExitStack() as stack:
        url = f"sqlite:///{tmp_path}/tasks.db"
        yield [stack.enter_context(Queue("work", url, partitions=1, state_folder=tmp_path)) for _ in range(4)]


@pytest.mark.rule("SK-13", "SK-20")
def test_as_many_workers_as_one_likes_have_work(workers: list[Queue]) -> None:
    """Each body ends only once all of the workers run one."""
    together = threading.Barrier(len(workers))

    def meet(claim: Claim) -> int:
        return together.wait(PATIENCE_S) * 0

    for queue in workers:
        task = queue.task(meet)
        queue.start(concurrency=1)
    for waits in [workers[0].wait(each, PATIENCE_S) for each in task.enqueue_many([((), {})] * 8)]:
        assert waits == b"0"


@pytest.mark.rule("SK-20")
def test_a_slow_body_keeps_no_task_from_another_worker(workers: list[Queue]) -> None:
    slow_runs, may_end = threading.Event(), threading.Event()

    def slow(claim: Claim) -> None:
        slow_runs.set()
        assert may_end.wait(PATIENCE_S)

    def quick(claim: Claim, number: int) -> int:
        return number

    for queue in workers[:2]:
        slow_task, quick_task = queue.task(slow), queue.task(quick)
        queue.start(concurrency=1)
    last = slow_task.enqueue()
    assert slow_runs.wait(PATIENCE_S)
    tasks = quick_task.enqueue_many([((number,), {}) for number in range(40)])
    assert [workers[0].wait(each, PATIENCE_S) for each in tasks] == [b"%d" % number for number in range(40)]
    assert workers[0].get(last).state.status is Status.CLAIMED
    may_end.set()
    workers[0].wait(last, PATIENCE_S)


@pytest.mark.rule("SK-20")
def test_a_worker_that_leaves_keeps_no_task_from_another(workers: list[Queue]) -> None:
    slow_runs, may_end = threading.Event(), threading.Event()

    def slow(claim: Claim) -> None:
        slow_runs.set()
        assert may_end.wait(PATIENCE_S)

    first, second = workers[:2]
    last = first.task(slow).enqueue()
    first.start(concurrency=2)
    assert slow_runs.wait(PATIENCE_S)
    leaving = threading.Thread(target=first.stop, args=(PATIENCE_S,))
    leaving.start()
    assert first.wait_stopped(PATIENCE_S)
    quick = second.task(name="quick")(lambda claim: 1)
    second.start(concurrency=1)
    assert [second.wait(each, PATIENCE_S) for each in quick.enqueue_many([((), {})] * 20)] == [b"1"] * 20
    assert leaving.is_alive()
    may_end.set()
    leaving.join(PATIENCE_S)
    assert second.wait(last, PATIENCE_S) is None


@pytest.mark.rule("SK-3", "SK-15")
def test_a_tick_makes_one_task_although_all_workers_look_for_it(workers: list[Queue]) -> None:
    clock = FakeClock()
    ticks: list[Ticker] = []
    for queue in workers:
        queue.periodic("* * * * *", "sweep")(lambda claim: None)
        exists = queue.context.read
        ticks.append(
            Ticker(queue._schedules, clock, lambda _: True, exists, queue._enqueue_tick, queue.errors)
        )
    clock.advance(60.0)
    for ticker in ticks * 2:
        ticker.tick()
    made = list(workers[0].tasks())
    assert len(made) == 1
