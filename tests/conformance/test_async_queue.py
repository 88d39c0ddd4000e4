"""The asyncio twin of a queue: the same on SQLite and in memory, with coroutines that can be ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
import threading
import uuid
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rebalanser import Settings
from rebalanser.core.tasks.model import Head
from rebalanser.errors import (
    Fenced,
    InvalidHandlers,
    InvalidName,
    InvalidState,
    InvalidTask,
    NotSettled,
    TaskFailed,
    UnknownTask,
)
from rebalanser.tasks import (
    AsyncCall,
    AsyncClaim,
    AsyncQueue,
    AsyncQueues,
    AsyncTaskFunction,
    Claim,
    GiveUp,
    Middleware,
    Pauses,
    Queue,
    Retry,
    Status,
)
from rebalanser.tasks.execution.bodies import Bodies
from rebalanser.tasks.execution.outcomes import BodyOutcome
from rebalanser.tasks.execution.worker_claim import WorkerClaim
from rebalanser.testing.waiting import PATIENCE_S

QUICK = Settings(min_rebalance_interval_s=0.0, rejoin_initial_s=0.01)
NEVER_S = 3600.0
BLINK_S = 0.01


class Stage:
    """Queues at one place."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._folder = folder

    def queue(self, **options: Any) -> AsyncQueue:
        """A queue, opened by what is done with it."""
        return AsyncQueue(
            "work", self.url, partitions=2, settings=QUICK, state_folder=self._folder, **options
        )


@pytest.fixture(params=["memory", "sqlite"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    if request.param == "memory":
        return Stage(f"memory://{uuid.uuid4().hex}", tmp_path)
    return Stage(f"sqlite:///{tmp_path / 'tasks.db'}", tmp_path)


def within_patience(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


async def all_of(items: Any) -> list[Any]:
    return [each async for each in items]


@pytest.mark.rule("SK-3", "SK-9", "SK-11", "SK-12")
def test_tasks_are_enqueued_looked_at_and_changed(stage: Stage) -> None:
    async def main() -> None:
        async with stage.queue() as queue:

            @queue.task(retries=0)
            async def send(claim: AsyncClaim, to: str) -> None: ...

            known = await queue.new_id()
            first = await send.options(task_id=known).enqueue("a")
            assert first == known == await send.options(task_id=known).enqueue("a")
            second, third = await send.options(after=[first]).enqueue_many([(("b",), {}), (("c",), {})])
            assert json.loads(await queue.payload(second)) == {"to": "b"}
            assert (await queue.get(second)).head.after == (first,)
            assert [each.head.id for each in await all_of(queue.tasks(page=2))] == [first, second, third]
            assert await queue.cancel(third) is Status.CANCELLED
            cancelled = await all_of(queue.tasks(frozenset({Status.CANCELLED})))
            assert [each.head.id for each in cancelled] == [third]
            assert (await queue.count())[Status.CANCELLED] == 1
            assert (await queue.status()).counts[Status.CANCELLED] == 1
            assert queue.measure().counts.enqueued == {"send": 4}
            with pytest.raises(TaskFailed):
                await queue.wait(third)
            assert await queue.requeue(third) is Status.WAITING
            assert await all_of(queue.log(third)) == []
            assert (await queue.collect(0.0)).tasks == 0
            with pytest.raises(NotSettled):
                await queue.wait(third, 0.0)
            with pytest.raises(UnknownTask):
                await queue.wait("0" * 40)
            with pytest.raises(InvalidTask):
                await send.enqueue(5)

    within_patience(main)


def test_a_queue_is_paused_and_resumed(stage: Stage) -> None:
    async def main() -> None:
        async with stage.queue() as tasks:

            @tasks.task
            async def send(claim: AsyncClaim) -> str:
                return "sent"

            paused = await tasks.pause("no mail", by="ann")
            nightly = await tasks.pause(schedule="nightly")
            assert await tasks.pauses() == Pauses(queue=paused, schedules={"nightly": nightly})
            await tasks.start()
            task = await send.enqueue()
            with pytest.raises(NotSettled, match=r"the queue is paused for .* by ann: no mail"):
                await tasks.wait(task, 0.0)
            ended = await tasks.resume(schedule="nightly")
            assert ended is not None
            assert ended.since == nightly.since
            assert await tasks.resume() is not None
            assert await tasks.wait(task, PATIENCE_S) == "sent"
            assert await tasks.pauses() == Pauses()

    within_patience(main)


@pytest.mark.rule("SK-8")
def test_who_waits_again_and_again_for_a_request_to_stop_leaves_nothing_behind(stage: Stage) -> None:
    async def main() -> None:
        queue = stage.queue()

        @queue.task()
        async def patient(claim: AsyncClaim) -> int:
            while not claim.stop_requested._callbacks:  # who cancels the body listens soon after it began
                await asyncio.sleep(0)
            before = len(claim.stop_requested._callbacks)
            for _ in range(3):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0):
                        await claim.until_stop_requested()
            return len(claim.stop_requested._callbacks) - before

        async with queue:
            await queue.start()
            assert await queue.wait(await patient.enqueue(), PATIENCE_S) == 0

    within_patience(main)


def test_a_coroutine_that_waits_for_a_task_that_nobody_can_run_is_told(stage: Stage) -> None:
    async def main() -> None:
        queue = stage.queue()

        @queue.task(retries=0)
        async def child(claim: AsyncClaim) -> None: ...

        @queue.task(retries=0)
        async def parent(claim: AsyncClaim) -> str:
            task = await child.enqueue()
            with pytest.raises(NotSettled) as raised:
                await queue.wait(task, 0.0)
            return str(raised.value)

        async with queue:
            await queue.start(concurrency=1)
            told = await queue.wait(await parent.enqueue(), PATIENCE_S)
            assert "all bodies of this worker (1) wait" in told

    within_patience(main)


@pytest.mark.rule("SK-15")
def test_coroutines_take_no_thread_each(stage: Stage) -> None:
    count = 100

    async def main() -> None:
        queue = stage.queue()
        running, most, all_run = 0, 0, asyncio.Event()

        @queue.task(retries=0)
        async def together(claim: AsyncClaim) -> int:
            nonlocal running, most
            running += 1
            most = max(most, running)
            if running == count:
                all_run.set()
            await all_run.wait()
            running -= 1
            return threading.active_count()

        async with queue:
            await queue.start(concurrency=count)
            tasks = await together.enqueue_many([((), {})] * 2 * count)
            threads = [await queue.wait(task, PATIENCE_S) for task in tasks]
            assert most == count
            assert max(threads) < count

    within_patience(main)


@pytest.mark.rule("SK-15")
def test_a_fault_of_the_worker_at_the_end_of_a_coroutine_ends_one_try(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, faults = Bodies._called, [KeyError("a bug")]

    def broken(self: Bodies, claim: WorkerClaim, head: Head, outcome: BodyOutcome) -> None:
        if faults:
            raise faults.pop()
        called(self, claim, head, outcome)

    monkeypatch.setattr(Bodies, "_called", broken)

    async def main() -> None:
        queue = stage.queue()

        @queue.task(retries=0)
        async def number(claim: AsyncClaim) -> int:
            return 1

        async with queue:
            await queue.start(concurrency=1)
            with pytest.raises(TaskFailed, match="a bug"):
                await queue.wait(await number.enqueue(), PATIENCE_S)
            assert await queue.wait(await number.enqueue(), PATIENCE_S) == 1

    within_patience(main)


@pytest.mark.rule("SK-6", "SK-9")
def test_coroutines_run_in_the_loop_and_plain_functions_in_threads(stage: Stage) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        places: dict[str, object] = {}
        queue = stage.queue()

        @queue.task()
        async def inside(claim: AsyncClaim, factor: int) -> int:
            places["inside"] = asyncio.get_running_loop()
            assert (await claim.update(b"one"), await claim.update(b"two")) == (0, 1)
            assert [each.content async for each in claim.log()] == [b"one", b"two"]
            assert claim.still_mine()
            assert claim.deadline > 0
            assert await claim.renew()
            assert "mine" in repr(claim)
            assert (claim.queue, claim.name, claim.failures) == ("work", "inside", 0)
            last = (await queue.get(claim.task_id)).state.claim
            assert last is not None
            assert claim.number == last.number
            return claim.token * factor

        @queue.task()
        def outside(claim: Claim) -> str:
            claim.update(b"three")
            places["outside"] = threading.current_thread()
            return "done"

        async with queue:
            await queue.start(2)
            first, second = await inside.enqueue(1), await outside.enqueue()
            token = await queue.wait(first, PATIENCE_S)
            assert 0 < token < (await queue.get(first)).revision
            assert await queue.wait(second, PATIENCE_S) == "done"
            assert [each.content for each in await all_of(queue.log(first))] == [b"one", b"two"]
        assert places["inside"] is loop
        assert places["outside"] is not threading.main_thread()

    within_patience(main)


def test_as_many_coroutines_run_at_once_as_may(stage: Stage) -> None:
    async def main() -> None:
        queue = stage.queue()
        running, most = set[str](), 0
        both = asyncio.Event()

        @queue.task()
        async def meet(claim: AsyncClaim) -> None:
            nonlocal most
            running.add(claim.task_id)
            most = max(most, len(running))
            if len(running) == 2:
                both.set()
            await both.wait()
            await asyncio.sleep(0)
            running.discard(claim.task_id)

        async with queue:
            tasks = await meet.enqueue_many([((), {})] * 6)
            await queue.start(2)
            for task in tasks:
                await queue.wait(task, PATIENCE_S)
        assert most == 2

    within_patience(main)


@pytest.mark.rule("SK-15")
def test_a_coroutine_is_cancelled_at_its_timeout_and_tried_again(stage: Stage) -> None:
    async def main() -> None:
        queue = stage.queue()
        ended: list[str] = []

        @queue.task(retries=1, timeout_s=0.05, backoff_s=0.01)
        async def linger(claim: AsyncClaim) -> int:
            if claim.failures > 0:
                return claim.failures
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append("cancelled")
                assert not (await queue.get(claim.task_id)).state.failures, "it still has its claim"
                raise
            return 0

        async with queue:
            await queue.start()
            task = await linger.enqueue()
            assert await queue.wait(task, PATIENCE_S) == 1
            assert (await queue.get(task)).state.failures == 1
        assert ended == ["cancelled"]

    within_patience(main)


@pytest.mark.rule("SK-6", "SK-10")
def test_a_coroutine_is_cancelled_once_its_claim_is_lost(stage: Stage) -> None:
    async def main() -> None:
        queue = stage.queue(claim_ttl_s=3.0)
        began, refused = asyncio.Event(), asyncio.Event()
        requested: list[bool] = []

        @queue.task()
        async def linger(claim: AsyncClaim) -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                requested.append(claim.stop_requested.is_set())
                await claim.until_stop_requested()
                with pytest.raises(Fenced):
                    await claim.update(b"too late")
                refused.set()

        async with queue:
            await queue.start()
            task = await linger.enqueue()
            await began.wait()
            await queue.cancel(task)
            await refused.wait()
            assert (await queue.get(task)).state.status is Status.CANCELLED
        assert requested == [True]

    within_patience(main)


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (ValueError("wrong"), Status.DEAD, "ValueError: wrong"),
        (GiveUp("hopeless"), Status.DEAD, "GiveUp: hopeless"),
        (Retry("later", delay_s=NEVER_S), Status.WAITING, "Retry: later"),
        (SystemExit(3), Status.DEAD, "SystemExit: 3"),
        (asyncio.CancelledError("of its own"), Status.DEAD, "CancelledError: of its own"),
    ],
    ids=["error", "give up", "retry", "exit", "cancelled"],
)
def test_what_a_coroutine_raises_ends_its_try(
    stage: Stage, error: BaseException, status: Status, told: str
) -> None:
    async def main() -> None:
        heard: asyncio.Queue[tuple[str, BaseException | None]] = asyncio.Queue(maxsize=8)
        loop = asyncio.get_running_loop()

        class Told(Middleware):
            def before(self, claim: Claim) -> None:
                loop.call_soon_threadsafe(heard.put_nowait, (claim.name, None))

            def after(self, claim: Claim, error: BaseException | None) -> None:
                loop.call_soon_threadsafe(heard.put_nowait, (claim.name, error))

        queue = stage.queue(middleware=[Told()])

        @queue.task(retries=1 if status is Status.WAITING else 0)
        async def fail(claim: AsyncClaim) -> None:
            raise error

        async with queue:
            await queue.start()
            task = await fail.enqueue()
            assert await heard.get() == ("fail", None)
            assert await heard.get() == ("fail", error)
            await queue.stop()
            state = (await queue.get(task)).state
            assert (state.status, state.failures) == (status, 1)
            assert state.error.endswith(told)

    within_patience(main)


@pytest.mark.rule("SK-15")
def test_stopping_cancels_after_the_grace_and_gives_back(stage: Stage) -> None:
    async def main() -> None:
        queue = stage.queue()
        began = asyncio.Event()

        @queue.task(retries=0)
        async def linger(claim: AsyncClaim) -> None:
            began.set()
            await asyncio.Event().wait()

        async with queue:
            await queue.start()
            task = await linger.enqueue()
            await began.wait()
            await queue.stop(0.0)
            state = (await queue.get(task)).state
            assert (state.status, state.failures) == (Status.WAITING, 0)

    within_patience(main)


def test_a_body_may_ask_to_stop_but_not_wait_for_that(stage: Stage) -> None:
    async def main() -> None:
        queue = stage.queue()

        @queue.task(retries=0)
        async def leave(claim: AsyncClaim) -> str:
            for call in (queue.stop, queue.close):
                with pytest.raises(InvalidState, match="request_stop"):
                    await call()
            queue.request_stop()
            return "left"

        async with queue:
            task = await leave.enqueue()
            await queue.run()
            assert await queue.wait(task, 0.0) == "left"
            await queue.start()
            with pytest.raises(InvalidState, match="already"):
                await queue.start()

    within_patience(main)


def test_a_body_that_begins_while_the_queue_starts_may_not_wait_for_its_end(stage: Stage) -> None:
    tried = threading.Event()

    async def main() -> None:
        queue = stage.queue()

        @queue.task(retries=0)
        async def leave(claim: AsyncClaim) -> None:
            try:
                with pytest.raises(InvalidState, match="request_stop"):
                    await queue.stop()
            finally:
                tried.set()

        async with queue:
            task = await leave.enqueue()
            inner = queue._queue
            assert inner is not None
            start = inner.start_with

            def slow_start(*arguments: Any) -> None:
                start(*arguments)
                assert tried.wait(PATIENCE_S)

            inner.start_with = slow_start  # type: ignore[method-assign]
            await queue.start()
            assert await queue.wait(task, PATIENCE_S) is None

    within_patience(main)


@pytest.mark.rule("SK-10")
def test_work_and_completion_commit_together(tmp_path: Path) -> None:
    stage = Stage(f"sqlite:///{tmp_path / 'tasks.db'}", tmp_path)

    async def main() -> None:
        queue = stage.queue()

        @queue.task(retries=0)
        async def write(claim: AsyncClaim) -> None:
            path = tmp_path / "tasks.db"
            with closing(sqlite3.connect(path, check_same_thread=False, isolation_level=None)) as connection:
                connection.execute("CREATE TABLE outputs (task TEXT)")
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("INSERT INTO outputs VALUES (?)", (claim.task_id,))
                await claim.complete_in(connection, b'"both"')
                connection.execute("COMMIT")

        async with queue:
            await queue.start()
            assert await queue.wait(await write.enqueue(), PATIENCE_S) == "both"

    within_patience(main)


def test_a_blocked_loop_loses_no_claim(stage: Stage) -> None:
    async def main() -> None:
        queue = stage.queue(claim_ttl_s=3.0)

        @queue.task(retries=0)
        async def block(claim: AsyncClaim) -> bool:
            first, pause = claim.deadline, threading.Event()
            while claim.still_mine() and claim.deadline < first + 0.1:
                pause.wait(BLINK_S)  # the loop does nothing else meanwhile
            return claim.still_mine()

        async with queue:
            await queue.start()
            assert await queue.wait(await block.enqueue(), PATIENCE_S) is True

    within_patience(main)


@pytest.mark.rule("SK-15")
def test_periodic_functions_are_those_of_the_queue(stage: Stage) -> None:
    queue = stage.queue()

    @queue.periodic("*/5 * * * *")
    async def sweep(claim: AsyncClaim) -> None: ...

    assert sweep.name in queue.functions
    with pytest.raises(InvalidTask):
        queue.periodic("never", "other")(sweep.body.function)


def test_what_can_not_be_is_refused(stage: Stage) -> None:
    queue = stage.queue()

    async def takes_the_other(claim: Claim) -> None: ...

    def takes_this(claim: AsyncClaim) -> None: ...

    with pytest.raises(InvalidHandlers, match="of type AsyncClaim"):
        queue.task()(takes_the_other)
    with pytest.raises(InvalidHandlers, match="of type Claim"):
        queue.task()(takes_this)
    with pytest.raises(InvalidTask):
        queue.task(colour="red")
    with pytest.raises(InvalidName):
        AsyncQueue("\0", stage.url)

    async def main() -> None:
        await queue.close()
        await queue.close()
        with pytest.raises(InvalidState, match="is closed"):
            await queue.count()

    within_patience(main)
    assert repr(queue) == f"AsyncQueue('work', {stage.url!r})"


def test_who_waits_for_a_stop_hears_of_a_request(stage: Stage) -> None:
    async def main() -> None:
        async with stage.queue() as queue:
            for each in (queue, AsyncQueues(queue)):
                await each.start()
                assert not await each.wait_stopped(BLINK_S)
                each.request_stop()
                assert await each.wait_stopped(PATIENCE_S)
                await each.stop()

    within_patience(main)


@pytest.mark.parametrize("twin", [AsyncQueue, AsyncQueues, AsyncTaskFunction, AsyncCall])
def test_no_help_refers_to_itself(twin: type) -> None:
    for name, member in vars(twin).items():
        if not name.startswith("_") and callable(member):
            assert not re.search(rf"(?i)\b(see|as) ``{name}``", member.__doc__ or ""), name


def test_its_function_can_be_called_in_a_test(stage: Stage) -> None:
    queue = stage.queue()

    @queue.task()
    async def double(claim: AsyncClaim, number: int) -> int:
        return 2 * number

    assert asyncio.run(double(None, 4)) == 8  # type: ignore[arg-type] # it does nothing with the claim


@pytest.mark.rule("SK-15")
def test_a_coroutine_of_a_plain_queue_runs_in_a_loop_of_its_own(stage: Stage, tmp_path: Path) -> None:
    queue = Queue("work", stage.url, partitions=2, settings=QUICK, state_folder=tmp_path)

    @queue.task()
    async def wait(claim: Claim) -> str:
        await asyncio.sleep(0)
        return "done"

    with closing(queue):
        queue.start()
        assert queue.wait(wait.enqueue(), PATIENCE_S) == "done"
