"""Several queues in one worker: one concurrency, and the tasks of earlier queues first, on all engines."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import Queue as Queue_

import pytest

from rebalanser import Settings
from rebalanser.core.tasks.model import TaskId
from rebalanser.errors import InvalidArgument, InvalidState
from rebalanser.tasks import AsyncClaim, AsyncQueue, AsyncQueues, Claim, Queue, Queues, Status
from rebalanser.tasks.execution.partitions import Partitions
from rebalanser.tasks.execution.worker import SharedConcurrency
from rebalanser.testing.waiting import PATIENCE_S, wait_until

QUICK = Settings(min_rebalance_interval_s=0.0, rejoin_initial_s=0.01)
NAMES = ("high", "default", "low")


class Shop:
    """Three queues at one store. A body says which queue it is of, and waits until it may end."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self.queues = [
            stack.enter_context(
                Queue(name, url, partitions=2, state_folder=folder, settings=QUICK, timeout_s=PATIENCE_S)
            )
            for name in NAMES
        ]
        self.may_end = threading.Semaphore(0)
        self.begun: Queue_[str] = Queue_(maxsize=1000)
        self.running = self.most = 0
        self._lock = threading.Lock()
        for queue in self.queues:
            queue.task(name="send", retries=0)(self._body(queue.name))
        self.worker = Queues(*self.queues)
        stack.callback(self.worker.stop)
        stack.callback(self.release)

    def release(self) -> None:
        self.may_end.release(1000)

    def _body(self, name: str) -> Callable[[Claim], None]:
        def send(claim: Claim) -> None:
            with self._lock:
                self.running += 1
                self.most = max(self.most, self.running)
            self.begun.put(name)
            assert self.may_end.acquire(timeout=PATIENCE_S)
            with self._lock:
                self.running -= 1

        return send

    def enqueue(self, number: int, count: int = 1) -> list[TaskId]:
        queue = self.queues[number]
        return queue.commit([queue.build_enqueue(queue.functions["send"], (), {}) for _ in range(count)])

    def begin(self, count: int) -> list[str]:
        """The queues of the next bodies that begin."""
        return [self.begun.get(timeout=PATIENCE_S) for _ in range(count)]

    def open_tasks(self) -> int:
        return sum(
            queue.count().get(status, 0)
            for queue in self.queues
            for status in (Status.WAITING, Status.CLAIMED)
        )


@pytest.fixture
def shop(engine_url: str, tmp_path: Path) -> Iterator[Shop]:
    with ExitStack() as stack:
        yield Shop(engine_url, tmp_path, stack)


@pytest.mark.rule("SK-5")
def test_tasks_of_earlier_queues_begin_first_and_never_more_than_may_run(shop: Shop) -> None:
    shop.worker.start(2)
    shop.enqueue(1, 2)
    assert shop.begin(2) == ["default"] * 2, "an idle worker begins what there is"
    shop.enqueue(2, 4)
    shop.enqueue(0, 4)
    shop.enqueue(1, 4)
    knows_all(shop, 4, 0, 1, 2)
    order: list[str] = []
    for _ in range(12):
        shop.may_end.release()
        order += shop.begin(1)
    assert order == [*["high"] * 4, *["default"] * 4, *["low"] * 4]
    shop.release()
    wait_until(lambda: shop.open_tasks() == 0)
    assert shop.most == 2


def knows_all(shop: Shop, tasks: int, *numbers: int) -> None:
    """Wait until the worker has heard of so many tasks of these queues, and looks for places for them."""
    worker = shop.queues[0]._worker
    assert worker is not None
    assert worker._shared is not None
    sharers = worker._shared._sharers

    def knows(number: int) -> bool:
        source = shop.queues[number]._source
        assert source is not None
        if isinstance(source, Partitions):
            known = sum(len(each.owner) for each in source._index._owners.values())
        else:
            known = tasks  # the store itself hands them out
        return sharers[number].looks and source.pause is None and known >= tasks

    wait_until(lambda: all(map(knows, numbers)))


def test_every_task_is_run_whatever_queues_have_some(shop: Shop) -> None:
    """With bodies that end at once, no queue waits for a wake-up that does not come."""
    shop.release()
    shop.worker.start(3)
    for number in (2, 1, 0, 2, 0, 1, 2, 2):
        tasks = shop.enqueue(number, 15)
        shop.may_end.release(15)
        for task in tasks:
            shop.queues[number].wait(task, PATIENCE_S)
    assert shop.most <= 3


def test_a_paused_queue_keeps_no_later_one_waiting(shop: Shop) -> None:
    shop.queues[0].pause()
    shop.worker.start(1)
    shop.enqueue(0, 3)
    shop.enqueue(2, 2)
    shop.may_end.release()
    assert shop.begin(2) == ["low"] * 2
    shop.queues[0].resume()
    knows_all(shop, 3, 0)
    shop.enqueue(2)
    shop.release()
    assert shop.begin(4) == [*["high"] * 3, "low"]


def test_they_stop_together_and_start_again(shop: Shop) -> None:
    for _ in range(2):
        shop.worker.start(2)
        assert not shop.worker.wait_stopped(0.0)
        with pytest.raises(InvalidState, match="is worked on already"):
            shop.worker.start()
        shop.queues[1].request_stop()
        assert shop.worker.wait_stopped(PATIENCE_S)
        shop.worker.stop()
        shop.worker.stop()
        assert [queue._source for queue in shop.queues] == [None] * 3
    (task,) = shop.enqueue(2)
    shop.release()
    shop.queues[2].start()
    with pytest.raises(InvalidState, match="'low' is worked on already"):
        shop.worker.start()
    assert [queue._source is None for queue in shop.queues] == [True, True, False]
    assert not shop.queues[2].wait_stopped(0.0)
    shop.queues[2].wait(task, PATIENCE_S)


def test_all_leave_before_bodies_end_and_an_interruption_ends_all(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.worker.start(2)
    (slow,) = shop.enqueue(0)
    assert shop.begin(1) == ["high"]
    left: list[str] = []
    stop = Queue.stop

    def interrupted(queue: Queue, grace_s: float | None = None) -> None:
        left.append(queue.name if grace_s else f"{queue.name} at once")
        workers = [each._worker for each in shop.queues]
        has_stopped = [worker is not None and worker.execution.stopping for worker in workers]
        assert all(has_stopped), "none claims any more"
        if len(left) == 1:
            raise KeyboardInterrupt
        stop(queue, grace_s)

    with monkeypatch.context() as patched:
        patched.setattr(Queue, "stop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shop.worker.stop(30.0)
    assert left == ["high", "low at once", "default at once", "high at once"]
    assert shop.queues[0].get(slow).state.status is Status.WAITING, "it is given back"


def test_queues_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    with (
        Queue("mail", "memory://", state_folder=tmp_path) as one,
        Queue("other", "memory://", state_folder=tmp_path) as other,
    ):
        awaited = [AsyncQueue(name, "memory://", state_folder=tmp_path) for name in ("mail", "other")]
        for kind, (first, second) in ((Queues, (one, other)), (AsyncQueues, awaited)):
            with pytest.raises(InvalidArgument, match="at least one"):
                kind()
            with pytest.raises(InvalidArgument, match="mail, other are not"):
                kind(first, second)
            with pytest.raises(InvalidArgument, match="comes twice in mail, mail"):
                kind(first, first)


def test_coroutines_of_several_queues_share_a_loop(tmp_path: Path) -> None:
    async def main() -> None:
        url = f"memory://{uuid.uuid4().hex}"
        queues = [
            AsyncQueue(name, url, partitions=1, settings=QUICK, state_folder=tmp_path) for name in NAMES
        ]
        order: list[str] = []
        running, most = 0, 0
        may_end = asyncio.Event()

        async def send(claim: AsyncClaim, name: str) -> str:
            nonlocal running, most
            running, most = running + 1, max(most, running + 1)
            order.append(name)
            await may_end.wait()
            running -= 1
            return name

        functions = [queue.task("send")(send) for queue in queues]
        worker = AsyncQueues(*queues)
        await worker.start(2)
        tasks = [
            (queue, await function.enqueue(name))
            for queue, function, name in zip(queues, functions, NAMES, strict=True)
        ]
        while len(order) < 2:
            await asyncio.sleep(0)
        may_end.set()
        assert [await queue.wait(task, PATIENCE_S) for queue, task in tasks] == list(NAMES)
        assert most == 2
        queues[1].request_stop()
        await asyncio.to_thread(worker._wait_stopped)
        await worker.stop()
        for queue in queues:
            await queue.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


class Desk:
    """Workers at shared places, each of which holds what the test says."""

    def __init__(self, places: int, workers: int) -> None:
        self.shared = SharedConcurrency(places)
        self.held = [0] * workers
        self.woken: list[int] = []
        for number in range(workers):
            assert self.shared.join(self._held(number), self._wake(number)) == number

    def _held(self, number: int) -> Callable[[], int]:
        return lambda: self.held[number]

    def _wake(self, number: int) -> Callable[[], None]:
        return lambda: self.woken.append(number)

    def claim(self, number: int, taken: int, found: int) -> list[int]:
        """A worker that has taken places finds so many tasks; who is woken by that."""
        self.woken.clear()
        self.held[number] += min(taken, found)
        self.shared.return_places(number, min(taken, found))
        return list(self.woken)


@pytest.mark.rule("SK-5")
def test_while_an_earlier_worker_looks_later_ones_get_no_place() -> None:
    desk = Desk(3, 2)
    assert desk.shared.take(0, 5) == 3
    assert desk.shared.take(1, 5) == 0
    assert desk.claim(1, 0, 0) == []
    assert desk.claim(0, 3, 1) == [1], "it found less than it had places for"
    assert desk.shared.take(1, 1) == 1
    assert desk.shared.idle() == 1
    assert desk.shared.take(0, 5) == 1, "a later worker that looks is in no one's way"
    assert desk.claim(1, 1, 1) == [0, 1]
    assert desk.claim(0, 1, 1) == [0, 1], "both may find more"
    assert desk.shared.take(0, 5) == 0
    assert desk.claim(0, 0, 0) == []
    desk.woken.clear()
    desk.held[1] = 0
    desk.shared.wake_waiting()
    assert desk.woken == [0, 1]
    assert desk.shared.take(1, 5) == 0, "it goes on looking"
    assert desk.shared.take(0, 5) == 1


@pytest.mark.rule("SK-5")
def test_a_worker_that_can_take_no_more_leaves_places_to_later_ones() -> None:
    """As where the host gives it no more threads."""
    desk = Desk(2, 2)
    assert desk.shared.take(0, 1) == 1
    assert desk.shared.take(1, 2) == 0
    assert desk.claim(0, 1, 1) == [0, 1]
    assert desk.shared.take(0, 0) == 0
    assert desk.claim(0, 0, 0) == [1]
    assert desk.shared.take(1, 2) == 1


def test_a_worker_that_leaves_is_in_no_ones_way() -> None:
    desk = Desk(1, 2)
    assert desk.shared.take(0, 1) == 1
    assert desk.shared.take(1, 1) == 0
    assert desk.claim(0, 1, 1) == [0, 1]
    desk.woken.clear()
    desk.shared.leave(0)
    assert desk.woken == [1]
    assert desk.shared.take(1, 1) == 0, "what it holds counts"
    desk.held[0] = 0
    assert desk.shared.take(1, 1) == 1


def test_a_wrong_argument_is_refused_in_the_name_of_the_queue() -> None:
    with pytest.raises(TypeError, match=r"^Queue.__init__\(\) missing a required argument: 'name'"):
        Queue()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Queue.__init__\(\) got an unexpected keyword argument 'ttl_s'"):
        Queue("memory://", ttl_s=30.0)  # type: ignore[call-arg]
