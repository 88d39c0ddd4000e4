"""A paused queue hands out no claims, and a paused schedule has no ticks: the same on all engines."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import Queue as Queue_
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from rebalanser import Settings
from rebalanser.core.tasks import worker as execution
from rebalanser.core.tasks.model import TaskId
from rebalanser.core.tasks.slots import WorkerRoom
from rebalanser.core.tasks.store import FreeSlot
from rebalanser.core.tasks.ticking import CATCH_UP_S
from rebalanser.errors import (
    InvalidArgument,
    InvalidName,
    InvalidState,
    InvalidTask,
    NotSettled,
    RegistryUnavailable,
)
from rebalanser.tasks import Claim, Pause, Pauses, Queue, Status
from rebalanser.tasks.engine import SharesSlots
from rebalanser.tasks.execution.partitions import Partitions
from rebalanser.tasks.functions import EnqueueOptions
from rebalanser.tasks.http.dispenser import Dispenser
from rebalanser.tasks.pauses import MAX_CHARACTERS
from rebalanser.tasks.periodic import Schedule, Ticker
from rebalanser.testing.clock import FakeClock
from rebalanser.testing.waiting import PATIENCE_S, wait_until

QUICK = Settings(min_rebalance_interval_s=0.0, rejoin_initial_s=0.01)
HOUR_S = 3600.0


class Shop:
    """A store, and queues at it as several processes open them. Bodies wait until they may end."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self._url = url
        self._folder = folder
        self._stack = stack
        self.may_end = threading.Event()
        self.begun: Queue_[TaskId] = Queue_(maxsize=1000)

    def open(self, name: str = "one") -> Queue:
        queue = self._stack.enter_context(
            Queue(
                "work",
                self._url,
                partitions=2,
                state_folder=self._folder / name,
                node=name,
                settings=QUICK,
                timeout_s=PATIENCE_S,
            )
        )
        queue.task(name="slow")(self._slow)
        queue.task(name="quick")(self._quick)
        return queue

    def _slow(self, claim: Claim) -> None:
        self.begun.put(claim.task_id)
        assert self.may_end.wait(PATIENCE_S)

    def _quick(self, claim: Claim) -> None:
        self.begun.put(claim.task_id)


def enqueue(queue: Queue, name: str, count: int = 1) -> list[TaskId]:
    return queue.commit([queue.build_enqueue(queue.functions[name], (), {}) for _ in range(count)])


def statuses(queue: Queue) -> dict[Status, int]:
    return {status: number for status, number in queue.count().items() if number}


@pytest.fixture
def shop(engine_url: str, tmp_path: Path) -> Iterator[Shop]:
    with ExitStack() as stack:
        shop = Shop(engine_url, tmp_path, stack)
        yield shop
        shop.may_end.set()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Shop]:
    with ExitStack() as stack:
        yield Shop(f"memory://{uuid.uuid4().hex}", tmp_path, stack)


def knows(queue: Queue, is_paused: bool) -> None:
    """Wait until a worker knows of a pause, or of its end."""
    wait_until(lambda: (queue.known_pause is not None) is is_paused)


def test_what_runs_goes_on_and_nothing_more_is_claimed(shop: Shop) -> None:
    queue, operator = shop.open(), shop.open("operator")
    queue.start(2)
    (running,) = enqueue(operator, "slow")
    assert shop.begun.get(timeout=PATIENCE_S) == running
    paused = operator.pause("the mail host is down", by="ann")
    assert (paused.by, paused.reason, paused.ended) == ("ann", "the mail host is down", None)
    waiting = enqueue(operator, "quick", 20)
    knows(queue, True)
    assert statuses(operator) == {Status.CLAIMED: 1, Status.WAITING: 20}
    shop.may_end.set()
    assert operator.wait(running, PATIENCE_S) is None
    assert shop.begun.empty()
    assert statuses(operator) == {Status.COMPLETED: 1, Status.WAITING: 20}
    ended = operator.resume()
    assert ended is not None
    assert ended.since == paused.since <= (ended.ended or 0.0)
    assert {shop.begun.get(timeout=PATIENCE_S) for _ in waiting} == set(waiting)
    knows(queue, False)


def test_a_pause_outlives_all_processes(shop: Shop) -> None:
    first = shop.open()
    if first._url.startswith("memory:"):
        shop.open("keeps the store")
    paused = first.pause("for the night")
    first.close()
    later = shop.open("two")
    assert later.pauses() == Pauses(queue=paused)
    assert later.status().pauses.queue == paused
    later.start()
    (task,) = enqueue(later, "quick")
    knows(later, True)
    assert later.known_pause == paused
    assert later.get(task).state.status is Status.WAITING
    later.resume()
    assert shop.begun.get(timeout=PATIENCE_S) == task


def test_all_workers_hear_of_it(shop: Shop) -> None:
    workers = [shop.open(name) for name in ("one", "two", "three")]
    for each in workers:
        each.start()
    for _ in range(3):
        workers[0].pause()
        for each in workers:
            knows(each, True)
        (task,) = enqueue(workers[1], "quick")
        workers[2].resume()
        for each in workers:
            knows(each, False)
        assert shop.begun.get(timeout=PATIENCE_S) == task


def test_claims_that_have_not_begun_are_given_back_and_not_counted(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those ahead of a thread, and those that owners make for the slots of others."""
    monkeypatch.setattr(execution, "AHEAD_WAIT_S", HOUR_S)
    workers = [shop.open(name) for name in ("one", "two")]
    for each in workers:
        each.start()
        assert each._worker is not None
        each._worker.execution.body_s = 1e-3  # bodies have been quick, so that tasks are claimed ahead
    enqueue(workers[0], "slow", 60)
    for _ in workers:
        shop.begun.get(timeout=PATIENCE_S)
    workers[1].pause()
    for each in workers:
        knows(each, True)
    wait_until(lambda: statuses(workers[0]) == {Status.CLAIMED: 2, Status.WAITING: 58})
    waiting = list(workers[0].tasks(frozenset({Status.WAITING})))
    assert {each.state.failures for each in waiting} == {0}
    assert shop.begun.empty()


def test_a_pause_that_is_in_force_stays_as_it_is(shop: Shop) -> None:
    queue = shop.open()
    assert queue.resume() is None
    assert queue.resume(schedule="quick") is None
    first = queue.pause("first", by="ann")
    assert queue.pause("second", by="ben") == first
    nightly = queue.pause("third", schedule="nightly", by="ben")
    assert queue.pauses() == Pauses(queue=first, schedules={"nightly": nightly})
    queue.resume()
    assert queue.pauses() == Pauses(schedules={"nightly": nightly})
    ended = queue.resume(schedule="nightly")
    assert ended is not None
    assert ended.ended is not None
    assert queue.resume(schedule="nightly") is None
    assert queue.pauses() == Pauses()
    again = queue.pause(schedule="nightly")
    assert (again.by, again.reason, again.ended) == ("one", "", None)


def test_a_pause_that_this_version_cannot_read_is_in_force(shop: Shop) -> None:
    queue = shop.open()
    queue.context.engine.put_pause("work", "", b"\xff of a later version", PATIENCE_S)
    paused = queue.pauses().queue
    assert paused is not None
    assert paused.by == "another version"
    assert queue.resume() is not None
    assert queue.pauses().queue is None


def test_what_cannot_be_stored_is_refused(memory: Shop) -> None:
    queue = memory.open()
    with pytest.raises(InvalidArgument, match="reason"):
        queue.pause("x" * (MAX_CHARACTERS + 1))
    with pytest.raises(InvalidArgument, match="reason"):
        queue.pause("\udcff")
    with pytest.raises(InvalidArgument, match="by"):
        queue.pause(by="x" * (MAX_CHARACTERS + 1))
    with pytest.raises(InvalidName):
        queue.pause(schedule="")
    queue.periodic("* * * * *", name="nightly")(lambda claim: None)  # type: ignore[misc]
    for call in (queue.pause, queue.resume):
        with pytest.raises(InvalidTask, match=r"no periodic function 'nigthly' is registered.*: nightly"):
            call(schedule="nigthly")
    assert queue.pauses() == Pauses()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["memory", "sqlite"])
def inline(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> Iterator[Queue]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'tasks.db'}"
    with Queue("mail", url, clock=clock, state_folder=tmp_path, node="me") as queue:
        yield queue


@pytest.mark.rule("SK-15")
def test_ticks_while_a_schedule_is_paused_are_missed(inline: Queue, clock: FakeClock) -> None:
    ran: list[str] = []
    hourly = inline.periodic("0 * * * *", name="hourly")(lambda claim: ran.append("hourly"))
    inline.periodic("0 * * * *", name="other")(lambda claim: ran.append("other"))
    inline.run_until_idle()
    assert inline.run_until_idle(advance_s=HOUR_S) == 2
    inline.pause("no need of it", schedule="hourly")
    assert inline.run_until_idle(advance_s=3 * HOUR_S) == 3
    hourly.enqueue()
    assert inline.run_until_idle() == 1, "by hand it is enqueued all the same"
    ran.clear()
    inline.resume(schedule="hourly")
    assert inline.run_until_idle() == 0
    assert inline.run_until_idle(advance_s=HOUR_S) == 2
    assert sorted(ran) == ["hourly", "other"]


@pytest.mark.rule("SK-15")
def test_a_tick_within_a_pause_is_missed_whoever_looks_at_it_and_whenever() -> None:
    """A worker that looks after the end of the pause, and one that could not before it began."""
    schedule, clock = Schedule("mail", "send", "* * * * *"), FakeClock()
    clock.advance(60.0 - clock.wall() % 60.0 + 30.0)
    noon = clock.wall() - 30.0
    came: list[float] = []

    def ticks(pause: Pause) -> list[float]:
        came.clear()
        there = schedule.task_id(int(noon) - 60)
        ticker = Ticker(
            [schedule],
            clock,
            lambda _: True,
            lambda _: {there},
            lambda name, task, delay_s: came.append(int(task[:16], 16) / 1000),
            None,  # type: ignore[arg-type]
            pauses=lambda: {"send": pause},
        )
        ticker.tick()
        ticker.tick()
        return came

    assert ticks(Pause(since=noon + 1.0, by="ann")) == [noon]
    assert ticks(Pause(since=noon, by="ann")) == []
    assert ticks(Pause(since=noon - 1.0, by="ann", ended=noon)) == []
    assert ticks(Pause(since=noon - 9.0, by="ann", ended=noon - 1.0)) == [noon]


@pytest.mark.rule("SK-15")
def test_a_tick_within_an_earlier_pause_is_missed_though_a_later_one_follows(tmp_path: Path) -> None:
    """Resumed and paused again at once, as to change the reason: a worker that looks late finds both."""
    clock, url = FakeClock(), f"sqlite:///{tmp_path / 'tasks.db'}"
    clock.advance(60.0 - clock.wall() % 60.0 + 5.0)

    def worker() -> Queue:
        queue = Queue("mail", url, clock=clock, state_folder=tmp_path)
        queue.periodic("* * * * * */10", name="often")(lambda claim: None)
        return queue

    with worker() as first, worker() as second, worker() as third:
        assert first.run_until_idle(advance_s=10.0) == 1
        for _ in range(3):
            first.pause(schedule="often")
            clock.advance(10.0)
            first.resume(schedule="often")
        first.pause(schedule="often")
        assert len(first.pauses().schedules["often"].earlier) == 3
        assert second.run_until_idle() == 0
        clock.advance(1.0)
        first.resume(schedule="often")
        assert third.run_until_idle() == 0
        clock.advance(CATCH_UP_S)
        assert first.pause(schedule="often").earlier[0][1] == clock.wall() - CATCH_UP_S


@pytest.mark.rule("SK-15")
def test_while_the_queue_is_paused_ticks_wait(inline: Queue) -> None:
    ran: list[str] = []
    inline.periodic("0 * * * *", name="hourly")(lambda claim: ran.append("hourly"))
    inline.run_until_idle()
    inline.pause()
    with pytest.raises(InvalidState, match="tasks are ready"):
        inline.run_until_idle(advance_s=2 * HOUR_S)
    inline.resume()
    assert inline.run_until_idle() >= 1


def test_who_runs_tasks_in_a_test_is_told(inline: Queue, clock: FakeClock) -> None:
    @inline.task
    def send(claim: Claim, pauses: bool = False) -> None:
        if pauses:
            inline.pause("by a body")

    inline.pause("the mail host is down", by="ann")
    assert inline.run_until_idle() == 0, "nothing is ready"
    send.enqueue()
    clock.advance(5.0)
    told = r"tasks are ready and the queue is paused for 5 s by ann: the mail host is down; resume\(\) it"
    with pytest.raises(InvalidState, match=told):
        inline.run_until_idle()
    inline.resume()
    assert inline.run_until_idle() == 1
    send.enqueue(pauses=True)
    send.enqueue()
    with pytest.raises(InvalidState, match="paused for 0 s by me: by a body"):
        inline.run_until_idle()
    assert inline.count()[Status.WAITING] == 1


def test_who_waits_for_a_task_is_told(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    queue = shop.open()
    (task,) = enqueue(queue, "quick")
    with pytest.raises(NotSettled) as unpaused:
        queue.wait(task, 0.0)
    assert "paused" not in str(unpaused.value)
    queue.pause("the mail host is down", by="ann")
    told = "the queue is paused for"
    with caplog.at_level(logging.WARNING), pytest.raises(NotSettled, match=told) as paused:
        queue.wait(task, 0.0)
    assert str(paused.value).endswith("by ann: the mail host is down")
    assert any(told in record.getMessage() for record in caplog.records)


def test_a_store_that_is_away_keeps_nobody_from_waiting(
    memory: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = memory.open()
    (task,) = enqueue(queue, "quick")

    def away(*_: Any) -> Any:
        raise RegistryUnavailable("away")

    monkeypatch.setattr(queue.context.engine, "pauses", away)
    with pytest.raises(NotSettled):
        queue.wait(task, 0.0)


def test_a_pause_that_could_not_be_read_is_read_again(memory: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = memory.open()
    engine = queue.context.engine
    source = Partitions(queue.context, "here", 1.0, lambda: None, 2)
    queue.pause()
    (task,) = enqueue(queue, "quick")
    source.take([SimpleNamespace(resource=str(number), token=1) for number in range(2)])  # type: ignore[misc]
    with monkeypatch.context() as patched:
        patched.setattr(engine, "pauses", Mock(side_effect=RegistryUnavailable("away")))
        for _ in range(2):
            with pytest.raises(RegistryUnavailable):
                source.claim(1, None)
    assert source.claim(1, None) == []
    assert source.pause is not None
    assert queue.get(task).state.status is Status.WAITING
    source.close()


def test_an_owner_that_has_not_heard_of_a_pause_is_refused(
    memory: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watch is late: the store refuses the claim, and the task is claimed after the pause."""
    queue, operator = memory.open(), memory.open("operator")
    deaf: list[Callable[[], None]] = []
    engine = queue.context.engine
    watch_pauses = engine.watch_pauses
    monkeypatch.setattr(
        engine,
        "watch_pauses",
        lambda name, revision, wake: (deaf.append(wake), watch_pauses(name, revision, lambda: None))[1],
    )
    queue.start()
    wait_until(lambda: len(deaf) == 1)
    (first,) = enqueue(operator, "quick")
    assert memory.begun.get(timeout=PATIENCE_S) == first
    operator.wait(first, PATIENCE_S)
    operator.pause()
    assert queue.known_pause is None
    (task,) = enqueue(operator, "quick")
    knows(queue, True)
    assert operator.get(task).state.status is Status.WAITING
    operator.resume()
    deaf[0]()
    assert memory.begun.get(timeout=PATIENCE_S) == task
    assert operator.get(task).state.claim.number == 0  # type: ignore[union-attr]


def test_a_server_hands_out_nothing(shop: Shop) -> None:
    queue, operator = shop.open(), shop.open("operator")
    dispenser = Dispenser(queue.context)
    source = queue.start_claim_source(dispenser.wake)
    dispenser.start(source)
    try:
        operator.pause("the mail host is down")
        knows(queue, True)
        (task,) = enqueue(operator, "quick")
        assert dispenser.request("client", 1, 0.0).future.result(PATIENCE_S) == []
        client = dispenser.request("client", 1, PATIENCE_S)
        operator.resume()
        (lent,) = client.future.result(PATIENCE_S)
        assert lent.claimed.stored.head.id == task
        knows(queue, False)
    finally:
        dispenser.stop()


@pytest.mark.rule("SK-20")
def test_a_claim_for_a_slot_is_given_back_and_slots_are_withdrawn(tmp_path: Path) -> None:
    with ExitStack() as stack:
        url = f"memory://{uuid.uuid4().hex}"
        owner, idle = (
            stack.enter_context(Queue("work", url, partitions=1, state_folder=tmp_path / name))
            for name in ("owner", "idle")
        )
        sources = [Partitions(each.context, "here", 1.0, lambda: None, 1) for each in (owner, idle)]
        for source in sources:
            stack.callback(source.close)
        owning, offering = sources
        owning.take([SimpleNamespace(resource="0", token=1)])  # type: ignore[list-item]
        (task,) = owner.commit([owner.build_raw_enqueue("send", b"{}", EnqueueOptions())])
        assert offering.claim(0, ["send"]) == []
        offering.offer({frozenset({"send"}): WorkerRoom(1, 1)})

        def is_claimed() -> bool:
            return not owning.claim(0, ()) and owner.get(task).state.status is Status.CLAIMED

        wait_until(is_claimed)
        owner.pause()
        wait_until(lambda: offering._claims._changed and owning._claims._changed)

        def is_given_back() -> bool:
            assert offering.claim(1, ["send"]) == []
            offering.offer({frozenset({"send"}): WorkerRoom(1, 1)})
            return owner.get(task).state.status is Status.WAITING

        wait_until(is_given_back)
        assert owner.get(task).state.failures == 0
        engine = owner.context.engine
        assert isinstance(engine, SharesSlots)
        wait_until(lambda: not [each for each in engine.slots("work", 10)[0] if isinstance(each, FreeSlot)])
        assert owning.claim(1, None) == []
        assert (owning.next_wakeup(), offering.next_wakeup()) == (None, None)
        owner.resume()
        wait_until(lambda: len(owning.claim(1, None)) == 1)
