"""Where claims come from: the partitions that a process owns, or the index of a file, which nobody owns."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from queue import Queue as Queue_
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from rebalanser.admin import Admin
from rebalanser.core.tasks import slots as free_slots
from rebalanser.core.tasks.claims import Claimed
from rebalanser.core.tasks.model import AfterFailure, Status, TaskId, TaskState
from rebalanser.core.tasks.rules import ClaimKey
from rebalanser.core.tasks.slots import WorkerRoom
from rebalanser.core.tasks.store import (
    Answer,
    Applied,
    Change,
    ChangesLost,
    FreeSlot,
    Page,
    SlotNews,
    UsedSlot,
    Write,
)
from rebalanser.core.tasks.writes import PendingMove
from rebalanser.errors import OutcomeUnknown, RegistryUnavailable, RequestTooLarge, UnusableStore
from rebalanser.group import Group
from rebalanser.runtime.clock import SystemClock
from rebalanser.tasks import Claim, Queue
from rebalanser.tasks.batcher import result_of
from rebalanser.tasks.engine import ClaimsFromIndex, SharesSlots
from rebalanser.tasks.execution.partitions import Partitions, SlotOffers
from rebalanser.tasks.functions import EnqueueOptions
from rebalanser.tasks.http.dispenser import Dispenser
from rebalanser.tasks.periodic import Ticker
from rebalanser.tasks.queue import group_name
from rebalanser.testing.clock import FakeClock
from rebalanser.testing.waiting import PATIENCE_S, wait_until

PARTITIONS = 2


def owned(*numbers: int, token: int = 1) -> list[Any]:
    """Partitions as the group assigns them."""
    return [SimpleNamespace(resource=str(number), token=token) for number in numbers]


class Stage:
    """A queue, and the partitions of it that are owned here."""

    def __init__(self, url: str, folder: Path) -> None:
        self.queue = Queue("work", url, partitions=PARTITIONS, state_folder=folder)
        self.woken = threading.Event()
        self.partitions = Partitions(self.queue.context, "here", 1.0, self.woken.set, PARTITIONS)
        self.asked: list[Change] = []
        self._wants = self.partitions._wants
        self.partitions._wants = self._asked  # type: ignore[method-assign]

    def _asked(self, change: Change) -> bool:
        wanted = self._wants(change)
        if wanted:
            self.asked.append(change)
        return wanted

    def take(self, *numbers: int, token: int = 1) -> None:
        """Take partitions over, and wait until they are read."""
        self.partitions.take(owned(*numbers, token=token))
        wait_until(lambda: not self.partitions._unread)

    def enqueue(
        self,
        partition: int | None = None,
        after: tuple[TaskId, ...] = (),
        after_failure: AfterFailure = AfterFailure.WAIT,
        rate_limit: str | None = None,
    ) -> TaskId:
        """Enqueue a task that lies in a partition, or in any."""
        options = EnqueueOptions(after=after, after_failure=after_failure)
        while True:
            made = self.queue.build_raw_enqueue("send", b"a payload", options, rate_limit=rate_limit)
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
        ask = PendingMove(self.queue.get(task), lambda _: TaskState(Status.COMPLETED))
        self.queue.context.submit(ask)
        result_of(ask, PATIENCE_S)

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
    apply = engine.apply
    monkeypatch.setattr(engine, "apply", lambda *args: [_without_payload(each) for each in apply(*args)])
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


def _without_payload(answer: Answer) -> Answer:
    return replace(answer, payload=None) if isinstance(answer, Applied) else answer


@pytest.mark.rule("SK-5", "SK-6")
def test_a_lone_claim_is_written_by_its_caller_in_one_request(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several claims are written by the batcher, while the calling thread reads their payloads."""
    writers: list[int] = []
    engine = stage.queue.context.engine
    apply = engine.apply

    def applied(writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        writers.append(threading.get_ident())
        return apply(writes, timeout_s)

    _, *others = (stage.enqueue() for _ in range(3))
    stage.take(0, 1)
    monkeypatch.setattr(engine, "apply", applied)
    if not isinstance(engine, ClaimsFromIndex):
        monkeypatch.setattr(engine, "payloads", None)
    assert [each.payload for each in stage.claims()] == [b"a payload"]
    assert writers == [threading.get_ident()]
    monkeypatch.undo()
    monkeypatch.setattr(engine, "apply", applied)
    assert {each.stored.head.id for each in stage.partitions.claim(2, None)} == {*others}
    assert writers[1:]
    assert threading.get_ident() not in writers[1:]


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


@pytest.mark.rule("SK-5", "SK-13")
def test_what_becomes_dead_with_another_takes_no_room(stage: Stage) -> None:
    """One claim is asked for, and is made in the same step as all that is not claimed."""
    dead, late = stage.enqueue(partition=1), stage.enqueue(partition=1)
    failing = [stage.enqueue(partition=0, after=(dead,), after_failure=AfterFailure.FAIL) for _ in range(3)]
    runs = stage.enqueue(partition=0, after=(dead, late), after_failure=AfterFailure.RUN)
    stage.queue.cancel(dead)
    stage.queue.cancel(late)
    stage.take(0)
    assert [each.stored.head.id for each in stage.partitions.claim(1, None)] == [runs]
    assert {stage.queue.get(task).state.status for task in failing} == {Status.DEAD}
    again = stage.enqueue(partition=0, after=(runs,), after_failure=AfterFailure.FAIL)
    stage.queue.cancel(runs)
    last = stage.enqueue(partition=0, after=(again,), after_failure=AfterFailure.RUN)
    assert [each.stored.head.id for each in stage.claims()] == [last]
    stage.queue.requeue(failing[0])
    wait_until(lambda: not stage.partitions.claim(1, None) and stage.queue.count()[Status.DEAD] == 4)


@pytest.mark.rule("SK-5")
def test_a_ready_task_is_claimed_behind_any_number_of_unknown_dependencies(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead ones and such as do not exist: a step asks for some of them, and there is a next one at once."""
    monkeypatch.setattr("rebalanser.core.tasks.claims.PAGE", 2)
    first = stage.enqueue()
    stage.complete(first)
    dead = [stage.enqueue() for _ in range(5)]
    for each in dead:
        stage.queue.cancel(each)
    for number in range(5):
        stage.enqueue(partition=0, after=(dead[number],))
        made = stage.queue.build_raw_enqueue(
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
@pytest.mark.parametrize("part", ["wants", "learn"])
def test_news_that_could_not_be_learnt_are_read(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """A watch tells each change once: the error of a moment must not lose a task for ever."""
    stage.take(0, 1)
    index = stage.partitions._index
    learn, faults = getattr(index, part), [KeyError("a bug")]

    def fault(news: Any) -> Any:
        if faults:
            raise faults.pop()
        return learn(news)

    monkeypatch.setattr(index, part, fault)
    task = stage.enqueue()
    assert [each.stored.head.id for each in stage.claims()] == [task]
    assert not faults


@pytest.mark.rule("SK-5", "SK-13")
def test_what_is_read_of_a_deep_queue_is_claimed_while_the_rest_is_read(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rebalanser.core.tasks.claims.PAGE", 2)
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


@pytest.mark.rule("SK-13", "SK-23")
def test_no_limited_task_is_claimed_while_the_rest_is_read(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is claimed since before may come on the last page."""
    monkeypatch.setattr("rebalanser.core.tasks.claims.PAGE", 1)
    options = [EnqueueOptions(key="k", priority=number) for number in range(4)]
    made = [stage.queue.build_raw_enqueue("send", b"", each, max_running_per_key=1) for each in options]
    *waiting, last = stage.queue.commit(made)
    stage.take(made[0].partition)
    (claimed,) = stage.claims()
    assert claimed.stored.head.id == last
    partitions = Partitions(stage.queue.context, "there", 1.0, stage.woken.set, PARTITIONS)
    engine = stage.queue.context.engine
    read: Callable[..., Page] = engine.page
    claimed_early: list[Claimed] = []
    pages = 0

    def page(queue: str, timeout_s: float, **options: Any) -> Page:
        nonlocal pages
        if options.get("partition") is not None:
            pages += 1
            claimed_early.extend(partitions.claim(4, None))
        return read(queue, timeout_s, **options)

    with closing(partitions):
        monkeypatch.setattr(engine, "page", page)
        partitions.take(owned(made[0].partition, token=2))
        wait_until(lambda: not partitions._unread)
        assert pages >= 4
        assert not claimed_early
        assert partitions.claim(4, None) == []
        stage.complete(last)
        stage.woken.clear()
        wait_until(lambda: [each.stored.head.id for each in partitions.claim(4, None)] == [waiting[-1]])


@pytest.mark.rule("SK-13")
def test_a_partition_can_be_given_up_while_it_is_read(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a process that joins would wait until the first one has read all that is deep."""
    monkeypatch.setattr("rebalanser.core.tasks.claims.PAGE", 1)
    tasks = [stage.enqueue(partition=0) for _ in range(3)]
    engine = stage.queue.context.engine
    read: Callable[..., Page] = engine.page
    begun, goes_on = threading.Event(), threading.Event()
    pages: list[int] = []

    def page(queue: str, timeout_s: float, **options: Any) -> Page:
        if options.get("partition") is not None:
            pages.append(options["partition"])
            begun.set()
            assert goes_on.wait(PATIENCE_S)
        return read(queue, timeout_s, **options)

    monkeypatch.setattr(engine, "page", page)
    stage.partitions.take(owned(0))
    assert begun.wait(PATIENCE_S)
    stage.partitions.give_up(owned(0))
    stage.partitions.take(owned(1))
    goes_on.set()
    wait_until(lambda: not stage.partitions._unread)
    assert pages == [0, 1], "after its first page the partition is read no further"
    assert stage.partitions.claim(4, None) == []
    stage.take(0, token=2)
    assert {each.stored.head.id for each in stage.claims(3)} == set(tasks)


@pytest.mark.rule("SK-13")
def test_a_partition_that_is_taken_again_while_it_is_read_is_read_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = stage.enqueue(partition=0)
    engine = stage.queue.context.engine
    read: Callable[..., Page] = engine.page
    tokens = [2]

    def page(queue: str, timeout_s: float, **options: Any) -> Page:
        found = read(queue, timeout_s, **options)
        if options.get("partition") is not None and tokens:
            stage.partitions.give_up(owned(0))
            stage.partitions.take(owned(0, token=tokens.pop()))
        return found

    monkeypatch.setattr(engine, "page", page)
    made = [stage.queue.build_raw_enqueue("send", b"", EnqueueOptions(key="k"), max_running_per_key=1)]
    while made[-1].partition != 0:
        options = EnqueueOptions(key=f"k{len(made)}")
        made.append(stage.queue.build_raw_enqueue("send", b"", options, max_running_per_key=1))
    limited = stage.queue.commit(made[-1:])
    stage.take(0)
    claimed = {each.stored.head.id for each in stage.claims(2)}
    assert claimed == {task, *limited}, "a limited task is claimed once the whole partition was read"


def test_a_read_of_a_partition_that_failed_is_repeated(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = {stage.enqueue(partition=number) for number in (0, 1)}
    engine = stage.queue.context.engine
    read: Callable[..., Page] = engine.page
    faults: list[Exception] = [RegistryUnavailable("away"), KeyError("a bug")]
    pages: list[int] = []

    def page(queue: str, timeout_s: float, **options: Any) -> Page:
        if options.get("partition") is not None:
            pages.append(options["partition"])
            if pages[-1] == 0 and faults:
                raise faults.pop()
        return read(queue, timeout_s, **options)

    monkeypatch.setattr(engine, "page", page)
    stage.take(0, 1)
    assert {each.stored.head.id for each in stage.claims(2)} == tasks
    assert pages == [0, 1, 0, 0], "one that can't be read keeps no other from being read"
    wait_until(lambda: not stage.queue.troubles)


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
        assert waits == 0


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
    assert [workers[0].wait(each, PATIENCE_S) for each in tasks] == list(range(40))
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
    assert [second.wait(each, PATIENCE_S) for each in quick.enqueue_many([((), {})] * 20)] == [1] * 20
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


class Neighbours:
    """Processes of one queue in the memory of one, each with its partitions: how they share the work."""

    def __init__(self, folder: Path) -> None:
        self._url = f"memory://{uuid.uuid4().hex}"
        self._folder = folder
        self.stages: list[Stage] = []

    def open(self) -> Stage:
        stage = Stage(self._url, self._folder / str(len(self.stages)))
        self.stages.append(stage)
        return stage

    def slots(self) -> list[SlotNews]:
        engine = self.stages[0].queue.context.engine
        assert isinstance(engine, SharesSlots)
        return list(engine.slots("work", PATIENCE_S)[0])

    def wait_for_slots(self, count: int, of: Stage | None = None) -> None:
        """Wait until so many free slots are published, of one process or of all."""
        process = None if of is None else process_of(of)

        def is_published() -> bool:
            free = [each for each in self.slots() if isinstance(each, FreeSlot)]
            return len([each for each in free if process in (None, each.process)]) == count

        wait_until(is_published)

    def close(self) -> None:
        for stage in self.stages:
            stage.close()


def process_of(stage: Stage) -> str:
    assert stage.partitions._slots is not None
    return stage.partitions._slots.process


def knows(owner: Stage, tasks: int, slots: int) -> None:
    """Wait until an owner knows of so many tasks and so many slots of others."""
    offers = owner.partitions._slots
    assert offers is not None
    owners = owner.partitions._index._owners
    wait_until(lambda: sum(len(each.owner) for each in owners.values()) == tasks)
    wait_until(lambda: len(offers.offering.others) == slots)


def lends(owner: Stage, *tasks: TaskId) -> None:
    """An owner that has no room itself claims these tasks for others."""

    def is_claimed() -> bool:
        assert owner.partitions.claim(0, ()) == []
        return all(owner.queue.get(task).state.status is Status.CLAIMED for task in tasks)

    wait_until(is_claimed)


@pytest.fixture
def neighbours(tmp_path: Path) -> Iterator[Neighbours]:
    neighbours = Neighbours(tmp_path)
    yield neighbours
    neighbours.close()


NAMES = frozenset({"send"})


@pytest.mark.rule("SK-6", "SK-20")
def test_an_owner_without_room_claims_for_an_idle_worker(neighbours: Neighbours) -> None:
    """Which owns nothing: there may be more workers than partitions."""
    owner, idle = neighbours.open(), neighbours.open()
    owner.take(0, 1)
    task = owner.enqueue()
    idle.partitions.offer({NAMES: WorkerRoom(2, 2)})
    lends(owner, task)
    (claimed,) = idle.claims()
    claim = owner.queue.get(task).state.claim
    assert claim is not None
    assert (claimed.stored.head.id, claimed.held) == (task, ClaimKey(0, claim.holder))
    assert claim.worker == "here"
    assert idle.partitions.payloads([claimed]) == {task: b"a payload"}
    assert idle.partitions.claim(5, NAMES) == []
    idle.complete(task)
    neighbours.wait_for_slots(1)


@pytest.mark.rule("SK-5", "SK-20")
def test_an_owner_with_room_claims_for_itself_first(neighbours: Neighbours) -> None:
    owner, idle = neighbours.open(), neighbours.open()
    owner.take(0, 1)
    idle.partitions.offer({NAMES: WorkerRoom(2, 2)})
    tasks = [owner.enqueue() for _ in range(4)]
    knows(owner, tasks=4, slots=2)
    own = owner.claims(1)
    assert [each.stored.head.id for each in own] == [tasks[0]]
    lent = idle.claims(2)
    assert {each.stored.head.id for each in lent} == set(tasks[1:3])
    assert owner.queue.get(tasks[3]).state.status is Status.WAITING, "there were two slots"


@pytest.mark.rule("SK-20", "SK-23")
def test_no_task_of_a_rate_limit_is_claimed_ahead(neighbours: Neighbours) -> None:
    """It would count as a start, also if it is given back because of a slow body."""
    owner, busy = neighbours.open(), neighbours.open()
    owner.take(0, 1)
    plain = [owner.enqueue(), owner.enqueue()]
    limited = owner.enqueue(rate_limit="1/h")
    owner.enqueue()
    offers = busy.partitions._slots
    assert offers is not None
    offers.start()
    offers.offering.own.offer({NAMES: WorkerRoom(0, 1)}, 0.0)
    offers.offering.own.used(UsedSlot("before", process_of(busy), plain[0]), SystemClock().now())
    offers.offering.own.take_arrived(1)
    offers.offer({NAMES: WorkerRoom(0, 1)})
    knows(owner, tasks=4, slots=1)
    assert [slot.ahead for slot in neighbours.slots() if isinstance(slot, FreeSlot)] == [True]
    own = owner.partitions.claim(4, None, ahead=3)
    assert [each.stored.head.id for each in own] == plain
    assert owner.partitions.next_wakeup(()) is None, "it does not try again before there is news"
    assert owner.queue.get(limited).state.status is Status.WAITING
    offers.offer({NAMES: WorkerRoom(1, 1)})
    lends(owner, limited)
    assert owner.queue.get(limited).state.failures == 0


@pytest.mark.rule("SK-20")
def test_a_worker_that_owns_all_partitions_offers_nothing(neighbours: Neighbours) -> None:
    owner = neighbours.open()
    owner.take(0, 1)
    owner.partitions.offer({NAMES: WorkerRoom(3, 3)})
    slots = owner.partitions._slots
    assert slots is not None
    assert slots.offering.own.next_wakeup(0.0) is None
    owner.woken.clear()
    owner.partitions.give_up([SimpleNamespace(resource="1")])  # type: ignore[list-item]
    assert owner.woken.is_set(), "or it would not offer anything before there is news"
    owner.partitions.offer({NAMES: WorkerRoom(3, 3)})
    neighbours.wait_for_slots(3)


@pytest.mark.rule("SK-6", "SK-20")
def test_what_is_claimed_for_a_worker_that_leaves_is_given_back(neighbours: Neighbours) -> None:
    owner, leaving = neighbours.open(), neighbours.open()
    owner.take(0, 1)
    leaving.partitions.offer({NAMES: WorkerRoom(2, 2)})
    task = owner.enqueue()
    lends(owner, task)
    assert owner.queue.get(task).state.status is Status.CLAIMED
    leaving.partitions.retire()
    assert neighbours.slots() == []
    leaving.queue.context.batcher.flush()
    state = owner.queue.get(task).state
    assert (state.status, state.failures) == (Status.WAITING, 0)
    leaving.partitions.offer({NAMES: WorkerRoom(2, 2)})
    leaving.partitions.retire()
    assert neighbours.slots() == []


@pytest.mark.rule("SK-6", "SK-20")
def test_what_was_claimed_before_the_lease_ended_is_given_back_too(neighbours: Neighbours) -> None:
    owner, leaving = neighbours.open(), neighbours.open()
    owner.take(0, 1)
    leaving.partitions.offer({NAMES: WorkerRoom(1, 1)})
    task = owner.enqueue()
    lends(owner, task)
    slots = leaving.partitions._slots
    assert slots is not None
    wait_until(lambda: len(slots.offering.own.arrived) == 1)
    slots.offering._lease_ended()
    leaving.partitions.retire()
    leaving.queue.context.batcher.flush()
    assert owner.queue.get(task).state.status is Status.WAITING


@pytest.mark.rule("SK-6", "SK-20")
def test_claims_for_which_there_is_no_room_any_more_are_given_back_at_once(neighbours: Neighbours) -> None:
    """The threads of the slots have begun something else before these could be withdrawn."""
    owner, idle = neighbours.open(), neighbours.open()
    owner.take(0, 1)
    tasks = [owner.enqueue() for _ in range(3)]
    idle.partitions.offer({NAMES: WorkerRoom(3, 3)})
    lends(owner, *tasks)
    assert idle.partitions._slots is not None
    wait_until(lambda: len(idle.partitions._slots.offering.own.arrived) == 3)  # type: ignore[union-attr]
    kept = [each.stored.head.id for each in idle.partitions.claim(1, NAMES)]
    assert len(kept) == 1
    idle.queue.context.batcher.flush()
    states = {task: owner.queue.get(task).state for task in tasks}
    assert [task for task, state in states.items() if state.status is Status.CLAIMED] == kept
    assert {state.failures for state in states.values()} == {0}
    assert idle.partitions.claim(0, NAMES) == []
    assert owner.claims(2), "they are ready again"


@pytest.mark.rule("SK-7", "SK-8", "SK-20")
def test_the_claim_of_an_old_slot_is_renewed_first(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, idle = neighbours.open(), neighbours.open()
    owner.take(0, 1)
    monkeypatch.setattr(free_slots, "FRESH_RATIO", -1.0)  # every slot is old
    tasks = [owner.enqueue(), owner.enqueue()]
    idle.partitions.offer({NAMES: WorkerRoom(2, 2)})
    lends(owner, *tasks)
    cancelled, kept = tasks
    assert idle.partitions._slots is not None
    wait_until(lambda: len(idle.partitions._slots.offering.own.arrived) == 2)  # type: ignore[union-attr]
    owner.queue.cancel(cancelled)
    before = owner.queue.get(kept)
    now = idle.queue.context.clock.now()
    (claimed,) = idle.claims()
    assert claimed.stored.head.id == kept
    assert claimed.sent_at >= now
    assert claimed.stored.revision > before.revision
    assert claimed.stored.state.claim is not None
    assert claimed.stored.state.claim.term.ends_at_s >= now + idle.queue.context.ttl_s


@pytest.mark.rule("SK-20")
def test_claims_that_arrive_while_the_engine_is_away_are_taken_later(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, idle = neighbours.open(), neighbours.open()
    owner.take(0, 1)
    task = owner.enqueue()
    idle.partitions.offer({NAMES: WorkerRoom(1, 1)})
    lends(owner, task)
    assert idle.woken.wait(PATIENCE_S)
    assert idle.partitions._slots is not None
    wait_until(lambda: bool(idle.partitions._slots.offering.own.arrived))  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        away = RegistryUnavailable("away")
        patch.setattr(idle.queue.context.engine, "read", Mock(side_effect=away))
        with pytest.raises(RegistryUnavailable):
            idle.partitions.claim(1, NAMES)
    assert [each.stored.head.id for each in idle.claims()] == [task]


@pytest.mark.rule("SK-20")
@pytest.mark.parametrize("error", [OutcomeUnknown("lost"), RegistryUnavailable("away")])
def test_slots_that_could_not_be_published_are_published_later(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    owner, idle = neighbours.open(), neighbours.open()
    owner.take(0, 1)
    engine: Any = idle.queue.context.engine
    publish, faults = engine.publish_slots, [error]

    def fault(*arguments: Any) -> None:
        if not faults or isinstance(error, OutcomeUnknown):
            publish(*arguments)
        if faults:
            raise faults.pop()

    monkeypatch.setattr(engine, "publish_slots", fault)
    idle.partitions.offer({NAMES: WorkerRoom(2, 2)})
    neighbours.wait_for_slots(2)
    tasks = {owner.enqueue() for _ in range(2)}
    lends(owner, *tasks)
    assert {each.stored.head.id for each in idle.claims(2)} == tasks
    assert not faults


@pytest.mark.rule("SK-20")
def test_a_slot_serves_another_task_after_a_claim_that_could_not_be_written(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is free still, of which nothing tells: its worker would stay idle."""
    owner, idle = neighbours.open(), neighbours.open()
    owner.take(0, 1)
    bad = owner.enqueue()
    idle.partitions.offer({NAMES: WorkerRoom(1, 1)})
    knows(owner, tasks=1, slots=1)
    with monkeypatch.context() as patch:
        too_large = RequestTooLarge("the head of this task")
        patch.setattr(owner.queue.context.engine, "apply", Mock(side_effect=too_large))
        with pytest.raises(RequestTooLarge):
            owner.partitions.claim_for_others()
    good = owner.enqueue()
    lends(owner, good)
    assert [each.stored.head.id for each in idle.claims()] == [good]
    assert owner.queue.get(bad).state.status is Status.WAITING


@pytest.mark.rule("SK-17", "SK-20")
def test_slots_whose_lease_has_ended_are_published_anew(neighbours: Neighbours) -> None:
    """The worker was paused, or cut off from the store, for longer than the lease."""
    owner, idle = neighbours.open(), neighbours.open()
    owner.take(0, 1)
    idle.partitions.offer({NAMES: WorkerRoom(1, 1)})
    neighbours.wait_for_slots(1)
    slots, engine = idle.partitions._slots, owner.queue.context.engine
    assert slots is not None
    assert isinstance(engine, SharesSlots)
    (before,) = neighbours.slots()
    assert slots.offering.lease is not None
    engine.end_slots(slots.offering.lease, PATIENCE_S)
    wait_until(lambda: neighbours.slots() not in ([], [before]))
    task = owner.enqueue()
    lends(owner, task)
    assert [each.stored.head.id for each in idle.claims()] == [task]


@pytest.mark.rule("SK-11", "SK-20")
def test_changes_of_slots_that_a_watch_has_lost_are_read(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, idle = neighbours.open(), neighbours.open()
    owner.take(0, 1)
    task = owner.enqueue()
    for stage in (owner, idle):
        assert stage.partitions._slots is not None
        monkeypatch.setattr(stage.partitions._slots, "_learn", lambda _news: None)
    idle.partitions.offer({NAMES: WorkerRoom(1, 1)})
    neighbours.wait_for_slots(1)
    lose(owner)
    lends(owner, task)
    lose(idle)
    assert [each.stored.head.id for each in idle.claims()] == [task]


def lose(stage: Stage) -> None:
    slots = stage.partitions._slots
    assert slots is not None
    SlotOffers._learn(slots, ChangesLost(1))


class Shop:
    """Two workers of one queue, one body at a time each: bodies wait until they may end."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        url = f"memory://{uuid.uuid4().hex}"
        self.may_end = threading.Event()
        self.begun: Queue_[str] = Queue_(maxsize=100)
        self.queues = [
            stack.enter_context(
                Queue("work", url, partitions=PARTITIONS, state_folder=folder / name, node=name)
            )
            for name in ("one", "other")
        ]
        stack.callback(self.may_end.set)
        for queue in self.queues:
            queue.task(name="slow")(self._slow)
            queue.task(name="quick")(self._quick)
        self.admin = stack.enter_context(Admin(group_name("work"), url))

    def _slow(self, claim: Claim) -> None:
        self.begun.put(claim.task_id)
        assert self.may_end.wait(PATIENCE_S)

    @staticmethod
    def _quick(_claim: Claim) -> None:
        """Nothing."""

    def enqueue(self, name: str, count: int = 1) -> list[TaskId]:
        queue = self.queues[0]
        return queue.commit([queue.build_enqueue(queue.functions[name], (), {}) for _ in range(count)])

    def start(self) -> tuple[Queue, Queue]:
        """Both work, and own a partition each; the busy one, with a slow body, and the idle one."""
        for queue in self.queues:
            queue.start()
        wait_until(lambda: len({each.node for each in self.admin.owners().values()}) == len(self.queues))
        self.enqueue("slow")
        claim = self.queues[0].get(self.begun.get(timeout=PATIENCE_S)).state.claim
        one, other = self.queues
        return (one, other) if claim is not None and claim.worker == label_of(one) else (other, one)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with ExitStack() as stack:
        yield Shop(tmp_path, stack)


@pytest.mark.rule("SK-20")
def test_nothing_waits_behind_a_slow_body_of_another_worker(shop: Shop) -> None:
    busy, _ = shop.start()
    for task in shop.enqueue("quick", 20):
        busy.wait(task, PATIENCE_S)
    assert not shop.may_end.is_set()


@pytest.mark.rule("SK-13", "SK-20")
def test_a_worker_that_stops_leaves_first_and_waits_for_its_bodies_then(shop: Shop) -> None:
    busy, idle = shop.start()
    stopping = threading.Thread(target=busy.stop, args=(PATIENCE_S,))
    stopping.start()
    wait_until(lambda: {each.label for each in shop.admin.owners().values()} == {label_of(idle)})
    wait_until(lambda: len(shop.admin.owners()) == PARTITIONS)
    for task in shop.enqueue("quick", 20):
        idle.wait(task, PATIENCE_S)
    assert stopping.is_alive(), "its body runs still"
    shop.may_end.set()
    stopping.join(PATIENCE_S)
    wait_until(lambda: {status for status, number in idle.count().items() if number} == {Status.COMPLETED})


@pytest.mark.rule("SK-16", "SK-20")
def test_what_no_client_of_a_server_asks_for_is_run_by_an_idle_worker(shop: Shop) -> None:
    worker, server = shop.queues
    worker.start()
    dispenser = Dispenser(server.context)
    dispenser.start(server.start_claim_source(dispenser.wake))
    try:
        wait_until(lambda: dispenser.owned(PARTITIONS) == 1)
        for task in shop.enqueue("quick", 20):
            worker.wait(task, PATIENCE_S)
    finally:
        dispenser.stop()


@pytest.mark.rule("SK-8", "SK-16", "SK-20")
def test_clients_of_a_server_without_partitions_get_what_others_claim_for_them(
    neighbours: Neighbours,
) -> None:
    owner, server = neighbours.open(), neighbours.open()
    owner.take(0, 1)
    dispenser = Dispenser(server.queue.context)
    server.partitions._wake = dispenser.wake
    server.partitions._slots._wake = dispenser.wake  # type: ignore[union-attr]
    dispenser.start(server.partitions)
    try:
        others = dispenser.request("others", 1, PATIENCE_S, ["other"])
        asked = [dispenser.request("a", 1, PATIENCE_S, NAMES), dispenser.request("b", 2, PATIENCE_S, NAMES)]
        anything = dispenser.request("c", 1, PATIENCE_S)
        others.deadline = 0.0
        dispenser.wake()
        assert others.future.result(PATIENCE_S) == []
        for _ in range(4):
            owner.enqueue()
        clients = [*asked, anything]
        wait_until(
            lambda: owner.partitions.claim(0, ()) == [] and all(each.future.done() for each in clients)
        )
        lent = [one for each in clients for one in each.future.result()]
        claimed = {each.claimed.stored.head.id for each in lent}
        assert len(claimed) == len(lent) >= 3
        assert {each.claimed.held.number for each in lent} == {0}, "what is for others was not given back"
        assert {server.queue.get(task).state.status for task in claimed} == {Status.CLAIMED}
        early = replace(lent[0].claimed, sent_at=anything.requested_at - 5)
        (again,), _ = dispenser._run(dispenser._dispensing.with_payloads(anything, [early]))
        assert again.waited_s == pytest.approx(-5), "its time counts from before the client asked"
    finally:
        dispenser.stop()


@pytest.mark.rule("SK-16", "SK-20")
def test_a_client_is_served_beside_one_that_waits_for_other_functions(neighbours: Neighbours) -> None:
    owner, server = neighbours.open(), neighbours.open()
    owner.take(0, 1)
    dispenser = Dispenser(server.queue.context)
    server.partitions._wake = dispenser.wake
    server.partitions._slots._wake = dispenser.wake  # type: ignore[union-attr]
    dispenser.start(server.partitions)
    try:
        wanted: list[Collection[str] | None] = [["other"], ["another", "more"], NAMES, None]
        clients = [dispenser.request("client", 1, PATIENCE_S, each) for each in wanted]
        neighbours.wait_for_slots(len(clients))
        tasks = {owner.enqueue(), owner.enqueue()}
        served = clients[2:]
        wait_until(lambda: owner.partitions.claim(0, ()) == [] and all(each.future.done() for each in served))
        assert {each.claimed.stored.head.id for one in served for each in one.future.result()} == tasks
        assert not any(each.future.done() for each in clients[:2])
    finally:
        dispenser.stop()


@pytest.mark.rule("SK-20")
def test_a_worker_that_has_stopped_offers_nothing(shop: Shop) -> None:
    busy, idle = shop.start()
    engine = busy.context.engine
    assert isinstance(engine, SharesSlots)
    partitions = idle._source
    assert isinstance(partitions, Partitions)
    assert partitions._slots is not None
    process = partitions._slots.process

    def processes() -> list[str]:
        return [each.process for each in engine.slots("work", PATIENCE_S)[0]]

    wait_until(lambda: process in processes())
    idle.stop()
    assert process not in processes()


@pytest.mark.rule("SK-20")
def test_a_worker_that_could_not_be_started_offers_nothing(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others claimed for it would run nowhere, as long as its process lives."""
    queue, _ = shop.queues
    engine = queue.context.engine
    assert isinstance(engine, SharesSlots)

    def slots() -> Sequence[SlotNews]:
        return engine.slots("work", PATIENCE_S)[0]

    def away(_: Group) -> None:
        wait_until(lambda: len(slots()) == 1)
        raise RegistryUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(Group, "start", away)
        with pytest.raises(RegistryUnavailable):
            queue.start()
    assert slots() == []
    queue.start()
    (task,) = shop.enqueue("quick", 1)
    queue.wait(task, PATIENCE_S)


def label_of(queue: Queue) -> str:
    return queue._label
