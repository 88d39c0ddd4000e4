"""Helpers for tests of applications: tasks run in the calling thread, and bodies take a claim of no queue."""

from __future__ import annotations

import asyncio
import math
import pickle
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rebalanser.core.tasks.ids import created_at
from rebalanser.errors import (
    Fenced,
    InvalidArgument,
    InvalidState,
    InvalidTask,
    InvalidUrl,
    NotSettled,
    RequestTooLarge,
    TaskFailed,
)
from rebalanser.tasks import AsyncClaim, AsyncQueue, Claim, GiveUp, Middleware, Queue, Retry, Status
from rebalanser.tasks.claim import LOG_PAGE
from rebalanser.tasks.execution.worker import SHORTEST_STEP_S
from rebalanser.testing import FakeClaim, FakeClock
from rebalanser.testing.claim import MAX_BYTES
from rebalanser.testing.memory import _SHARED
from rebalanser.testing.waiting import PATIENCE_S

DAY_S = 86_400.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["memory", "sqlite"])
def tasks(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> Iterator[Queue]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'tasks.db'}"
    with Queue("mail", url, clock=clock, state_folder=tmp_path) as queue:
        yield queue


@pytest.mark.rule("SK-5")
@pytest.mark.rule("SK-15")
def test_all_that_is_ready_runs_in_the_calling_thread_by_priority(tasks: Queue) -> None:
    ran: list[tuple[str, int]] = []

    @tasks.task
    def first(claim: Claim, name: str) -> str:
        ran.append((name, threading.get_ident()))
        if name == "a":
            first.options(priority=7).enqueue("by a")
        return name

    a = first.options(priority=2).enqueue("a")
    first.enqueue("c")
    first.options(priority=1).enqueue("b")
    first.options(after=[first.options(delay_s=1.0).enqueue("later")], priority=9).enqueue("after c")
    assert tasks.run_until_idle() == 4
    here = threading.get_ident()
    assert ran == [("a", here), ("by a", here), ("b", here), ("c", here)]
    assert tasks.wait(a) == "a"
    assert tasks.run_until_idle() == 0
    none = dict.fromkeys(Status, 0)
    assert tasks.count() == none | {Status.WAITING: 2, Status.COMPLETED: 4}, "a status without tasks has 0"


@pytest.mark.rule("SK-23")
def test_a_rate_limit_lets_tasks_through_as_the_clock_is_moved(tasks: Queue, clock: FakeClock) -> None:
    at: list[float] = []
    began = clock.now()

    @tasks.task(rate_limit="1/m burst 2", max_running=1)
    def call(claim: Claim) -> None:
        at.append(clock.now() - began)

    for _ in range(5):
        call.enqueue()
    assert tasks.run_until_idle() == 2
    assert tasks.run_until_idle(advance_s=120.0) == 2
    assert at == pytest.approx([0.0, 0.0, 60.0, 120.0], abs=2 * SHORTEST_STEP_S)


@pytest.mark.rule("SK-15")
def test_a_test_moves_delays_and_retries_forward(tasks: Queue, clock: FakeClock) -> None:
    at: list[float] = []
    began = clock.now()

    @tasks.task(retries=3, backoff_s=60.0)
    def flaky(claim: Claim) -> None:
        at.append(clock.now() - began)
        if claim.failures < 2:
            raise Retry(delay_s=100.0)

    task = flaky.options(delay_s=1000.0).enqueue()
    assert tasks.run_until_idle() == 0
    assert tasks.run_until_idle(advance_s=999.0) == 0
    assert clock.now() - began == pytest.approx(999.0)
    assert tasks.run_until_idle(advance_s=DAY_S) == 3
    assert at == pytest.approx([1000.0, 1100.0, 1200.0], abs=10 * SHORTEST_STEP_S)
    assert clock.now() - began == pytest.approx(999.0 + DAY_S)
    assert tasks.get(task).state.status is Status.COMPLETED


@pytest.mark.rule("SK-15")
def test_the_test_may_move_the_clock_itself(tasks: Queue, clock: FakeClock) -> None:
    @tasks.task
    def send(claim: Claim) -> None: ...

    send.options(delay_s=1000.0).enqueue()
    clock.advance(1000.0)
    assert tasks.run_until_idle() == 1


@pytest.mark.rule("SK-15")
def test_schedules_tick_as_the_clock_is_moved(tasks: Queue, clock: FakeClock) -> None:
    ticks: list[int] = []

    @tasks.periodic("0 * * * *")
    def hourly(claim: Claim) -> None:
        ticks.append(int(clock.wall()))

    assert tasks.run_until_idle() == 0
    assert tasks.run_until_idle(advance_s=DAY_S) == 24
    assert {tick % 3600 for tick in ticks} == {0}
    assert len(set(ticks)) == 24


def test_a_failed_task_tells_why_and_stops_no_other(tasks: Queue) -> None:
    @tasks.task(retries=0)
    def fails(claim: Claim) -> None:
        raise ValueError("no such address")

    task, other = fails.enqueue(), fails.enqueue()
    assert tasks.run_until_idle() == 2
    for each in (task, other):
        with pytest.raises(TaskFailed, match=f"^task {each} is dead: ValueError: no such address$") as failed:
            tasks.wait(each)
        assert failed.value.error_type == "ValueError"
        assert 'raise ValueError("no such address")' in failed.value.error_text
        assert "rebalanser/tasks/" not in failed.value.error_text
        again = pickle.loads(pickle.dumps(failed.value))
        assert (str(again), vars(again)) == (str(failed.value), vars(failed.value))


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("error", [GiveUp("no such order"), Retry("not yet", delay_s=0.0)])
def test_the_type_of_an_error_has_the_name_that_users_import(tasks: Queue, error: Exception) -> None:
    @tasks.task(retries=0)
    def send(claim: Claim) -> None:
        raise error

    task = send.enqueue()
    assert tasks.run_until_idle() == 1
    name = f"rebalanser.tasks.{type(error).__name__}"
    with pytest.raises(TaskFailed, match=rf"^task {task} is dead: {re.escape(name)}: {error}$") as failed:
        tasks.wait(task)
    assert failed.value.error_type == name
    assert type(pickle.loads(pickle.dumps(error))) is type(error)


WRONG = r"^task \S+ is dead: rebalanser\.tasks\.GiveUp: count: the result does not fit its type: .* \(got 'x'"


@pytest.mark.rule("SK-15")
def test_a_result_of_a_wrong_type_fails_the_task_and_not_the_waiter(tasks: Queue) -> None:
    @tasks.task(retries=3)
    def count(claim: Claim) -> int:
        return "x"  # type: ignore[return-value]

    task = count.enqueue()
    assert tasks.run_until_idle() == 1
    assert tasks.count()[Status.DEAD] == 1
    with pytest.raises(TaskFailed, match=WRONG):
        tasks.wait(task)


@pytest.mark.rule("SK-10")
def test_a_result_of_a_wrong_type_is_completed_in_no_transaction(clock: FakeClock, tmp_path: Path) -> None:
    errors: list[BaseException | None] = []

    class Errors(Middleware):
        def after(self, claim: Claim, error: BaseException | None, /) -> None:
            errors.append(error)

    url = f"sqlite:///{tmp_path / 'own.db'}"
    with Queue("mail", url, clock=clock, state_folder=tmp_path, middleware=[Errors()]) as queue:

        @queue.task
        def count(claim: Claim, result: str) -> int:  # type: ignore[return]
            connection = sqlite3.connect(tmp_path / "own.db", isolation_level=None)
            with closing(connection):
                connection.execute("BEGIN IMMEDIATE")
                claim.complete_in(connection, result.encode())
                connection.execute("COMMIT")

        wrong, right = count.enqueue('"x"'), count.enqueue("5")
        assert queue.run_until_idle() == 2
        assert queue.wait(right) == 5
        with pytest.raises(TaskFailed, match=r"InvalidTask: count: the result does not fit its type: "):
            queue.wait(wrong)
    assert [type(each) for each in errors] == [InvalidTask, type(None)], "it may return nothing then"


@pytest.mark.rule("SK-6")
@pytest.mark.rule("SK-13")
def test_queues_at_one_store_in_memory_take_turns(tmp_path: Path) -> None:
    ran: list[str] = []
    with (
        Queue("mail", "memory://turns", state_folder=tmp_path) as one,
        Queue("mail", "memory://turns", state_folder=tmp_path) as two,
    ):
        for name, queue in (("one", one), ("two", two)):
            queue.task("send")(lambda claim, name=name: ran.append(name))  # type: ignore[misc]
        for _ in range(3):
            for name, queue in (("one", one), ("two", two)):
                two.commit([two.build_enqueue(two.functions["send"], (), {})])
                assert queue.run_until_idle() == 1, name
    assert ran == ["one", "two"] * 3


def test_a_queue_of_a_url_in_memory_is_alone_and_ends_with_its_store(tmp_path: Path) -> None:
    before = set(_SHARED._stores)
    with Queue("memory://", state_folder=tmp_path) as one, Queue("memory://", state_folder=tmp_path) as two:
        for queue in (one, two):
            queue.task("send")(lambda claim: None)
        one.commit([one.build_enqueue(one.functions["send"], (), {})])
        assert one.name == two.name == "tasks"
        assert two.run_until_idle() == 0
        assert one.run_until_idle() == 1
        stores = [name for name in _SHARED._stores if name.startswith("~") and name not in before]
    assert len(stores) == 2
    assert not [name for name in stores if name in _SHARED._stores]


def test_a_queue_of_a_module_is_in_memory_within_a_test(tmp_path: Path, clock: FakeClock) -> None:
    ran: list[str] = []
    with Queue("mail", f"sqlite:///{tmp_path / 'tasks.db'}", state_folder=tmp_path) as queue:

        @queue.task
        def send(claim: Claim, to: str) -> None:
            ran.append(to)

        send.enqueue("for production")
        with queue.in_memory(clock):
            send.options(delay_s=60.0).enqueue("a")
            assert queue.run_until_idle(advance_s=60.0) == 1
            assert queue.count()[Status.COMPLETED] == 1
        with queue.in_memory():
            assert not any(queue.count().values())
        assert {status for status, number in queue.count().items() if number} == {Status.WAITING}
        queue.start()
        with pytest.raises(InvalidState, match="worked on already"), queue.in_memory():
            pass
    assert ran[0] == "a"


def test_an_asyncio_queue_of_a_module_is_in_memory_within_a_test(tmp_path: Path, clock: FakeClock) -> None:
    queue = AsyncQueue("mail", "etcd://127.0.0.1:1", state_folder=tmp_path)

    @queue.task
    async def send(claim: AsyncClaim, to: str) -> str:
        return to

    async def test() -> None:
        for _ in range(2):
            async with queue.in_memory(clock):
                task = await send.options(delay_s=60.0).enqueue("a")
                assert await queue.run_until_idle(advance_s=60.0) == 1
                assert await queue.wait(task) == "a"

    asyncio.run(test())


def test_a_queue_without_a_url_is_at_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REBALANSER_REGISTRY", "memory://")
    with Queue("mail", state_folder=tmp_path) as queue:
        assert queue.run_until_idle() == 0
    monkeypatch.delenv("REBALANSER_REGISTRY")
    with pytest.raises(InvalidUrl, match="no registry is named"):
        Queue("mail", state_folder=tmp_path)


def test_a_clock_of_its_own_is_for_tests_alone(tasks: Queue, tmp_path: Path) -> None:
    with pytest.raises(InvalidState, match="run_until_idle"):
        tasks.start()
    with (
        Queue("memory://", state_folder=tmp_path) as plain,
        pytest.raises(InvalidState, match="can be moved"),
    ):
        plain.run_until_idle(advance_s=1.0)


@pytest.mark.rule("SK-1")
@pytest.mark.rule("SK-23")
def test_ids_of_a_clock_of_a_test_and_of_the_host_do_not_meet(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a host that has made ids gives their times to those of a test, and a test's to the next ones."""
    with Queue("mail", "memory://", state_folder=tmp_path) as queue:
        before = queue.new_id()
    for wall in (1_700_000_000.0, 9_000_000_000.0):
        with Queue("mail", "memory://", state_folder=tmp_path, clock=FakeClock(wall=wall)) as queue:

            @queue.task(unique_for_s=600)
            def send(claim: Claim) -> None: ...

            first = send.enqueue()
            assert abs(created_at(first) - wall) < 1
            assert queue.run_until_idle() == 1
            assert send.enqueue() == first
            queue.run_until_idle(advance_s=601)
            assert send.enqueue() != first, "its time is over"
            assert len(list(queue.tasks(older_than_s=600))) == 1
    with Queue("mail", "memory://", state_folder=tmp_path) as queue:
        assert created_at(queue.new_id()) - created_at(before) < 1_000_000
    assert "clock_far_off" not in caplog.text


def test_a_caller_that_waits_while_there_is_no_worker_is_told(tasks: Queue) -> None:
    @tasks.task
    def send(claim: Claim) -> None: ...

    task = send.enqueue()
    with pytest.raises(
        NotSettled, match="is waiting after 0 s; no worker has reported itself: start one, or"
    ):
        tasks.wait(task, timeout_s=0.0)
    tasks.context.engine.note_worker(tasks.name, "another", b"a note", 1.0)
    with pytest.raises(NotSettled, match=r"is waiting after 0 s$"):
        tasks.wait(task, timeout_s=0.0)


def test_a_queue_that_is_started_runs_nothing_in_a_caller(tmp_path: Path) -> None:
    with Queue("mail", f"sqlite:///{tmp_path / 'tasks.db'}", state_folder=tmp_path) as queue:
        queue.start()
        with pytest.raises(InvalidState, match="worked on already"):
            queue.run_until_idle()


@pytest.mark.rule("SK-15")
def test_coroutines_run_in_the_loop_of_the_test(clock: FakeClock, tmp_path: Path) -> None:
    asyncio.run(coroutines_in_a_loop(clock, tmp_path))


@pytest.mark.rule("SK-12")
def test_tasks_that_are_read_in_a_loop_are_changed_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are an asynchronous iterator, which ended in a TypeError of Python."""
    monkeypatch.setattr("rebalanser.tasks.async_queue.PAGE", 2)

    async def changed() -> None:
        async with AsyncQueue("memory://", state_folder=tmp_path) as queue:

            @queue.task(max_running=1)
            def send(claim: Claim) -> None: ...

            for size in (5, 4, 0):
                await send.enqueue_many([((), {})] * size)
                found = frozenset({Status.WAITING})
                assert len(await queue.rooms(queue.tasks(found))) == size
                assert len(await queue.with_blockers(queue.tasks(found))) == size
                assert await queue.cancel_all(queue.tasks(found)) == size
            assert await queue.requeue_all(queue.tasks()) == 9
            assert await queue.cancel_all([each async for each in queue.tasks()]) == 9
            for wrong in (5, None, [5]):
                with pytest.raises(InvalidArgument, match="give what tasks"):
                    await queue.cancel_all(wrong)  # type: ignore[arg-type]

    asyncio.run(changed())


@pytest.mark.rule("SK-15")
def test_a_queue_that_is_closed_while_it_opens_leaves_nothing_open(tmp_path: Path) -> None:
    """As where a wait has ended in its time while the engine was away."""
    opens, go_on = threading.Event(), threading.Event()
    made: list[Queue] = []

    async def closed() -> None:
        queue = AsyncQueue("memory://", state_folder=tmp_path)
        make = queue._make

        def slow(**named: Any) -> Queue:
            opens.set()
            assert go_on.wait(PATIENCE_S)
            made.append(make(**named))
            return made[0]

        queue._make = slow  # type: ignore[assignment]
        opening = asyncio.ensure_future(queue.open())
        assert await asyncio.to_thread(opens.wait, PATIENCE_S)
        await queue.close()
        go_on.set()
        with pytest.raises(InvalidState, match="is closed"):
            await opening

    asyncio.run(closed())
    with pytest.raises(InvalidState, match="is closed"):
        made[0].count()


async def coroutines_in_a_loop(clock: FakeClock, tmp_path: Path) -> None:
    threads: list[int] = []
    async with AsyncQueue("memory://", clock=clock, state_folder=tmp_path) as queue:

        @queue.task
        async def post(claim: AsyncClaim, to: str) -> str:
            threads.append(threading.get_ident())
            await claim.update(b"half")
            return to

        task = await post.options(delay_s=5.0).enqueue("a")
        assert await queue.run_until_idle() == 0
        assert await queue.run_until_idle(advance_s=5.0) == 1
        assert await queue.wait(task) == "a"
        assert [update.content async for update in queue.log(task)] == [b"half"]

        @queue.task
        async def count(claim: AsyncClaim) -> int:
            return "x"  # type: ignore[return-value]

        task = await count.enqueue()
        assert await queue.run_until_idle() == 1
        with pytest.raises(TaskFailed, match=WRONG):
            await queue.wait(task)
    assert threads == [threading.get_ident()]


@pytest.mark.rule("SK-9")
def test_a_fake_claim_records_what_a_body_does() -> None:
    def body(claim: Claim, steps: int) -> int:
        done = sum(1 for _ in claim.log())
        for step in range(done, steps):
            claim.update(f"step {step}".encode())
        return steps - done

    claim = FakeClaim(earlier=[[b"step 0"], [], [b"step 1"]])
    assert body(claim, 4) == 2
    assert claim.updates == [b"step 2", b"step 3"]
    assert (claim.number, claim.failures, claim.token) == (3, 3, 1)
    assert [each.content for each in claim.log()] == [b"step 0", b"step 1", b"step 2", b"step 3"]
    assert [each.content for each in claim.log(3)] == [b"step 2", b"step 3"]
    assert list(claim.log(1)) == []


@pytest.mark.rule("SK-9")
def test_the_log_of_a_fake_claim_has_any_length() -> None:
    claim = FakeClaim(earlier=[[b"old"] * 250, [b"new"] * 250])
    assert len(list(claim.log())) == 500
    assert len(list(claim.log(1))) == 250


@pytest.mark.rule("SK-10")
def test_a_fake_claim_that_was_lost_refuses_what_is_written() -> None:
    claim = FakeClaim()
    assert claim.still_mine()
    assert claim.renew()
    with pytest.raises(RequestTooLarge):
        claim.update(bytes(MAX_BYTES + 1))
    claim.lose()
    assert claim.stop_requested.is_set()
    assert (claim.still_mine(), claim.renew(), claim.deadline) == (False, False, 0.0)
    with pytest.raises(Fenced):
        claim.update(b"late")
    with pytest.raises(Fenced):
        claim.complete_in(None)  # type: ignore[arg-type] # it is not used
    assert claim.updates == []


@pytest.mark.rule("SK-10")
def test_a_fake_claim_is_completed_once() -> None:
    claim = FakeClaim()
    claim.complete_in(None, b"1")  # type: ignore[arg-type] # it is not used
    assert (claim.is_completed, claim.result) == (True, b"1")
    with pytest.raises(Fenced):
        claim.complete_in(None)  # type: ignore[arg-type] # it is not used


@pytest.mark.rule("SK-9", "SK-12")
def test_a_coroutine_takes_a_fake_claim_too() -> None:
    asyncio.run(fake_claim_in_a_loop())


async def fake_claim_in_a_loop() -> None:
    earlier = [b"%d" % number for number in range(2 * LOG_PAGE + 1)]
    claim = FakeClaim(earlier=[earlier])
    twin = claim.as_async()
    await twin.update(b"last")
    assert [each.content async for each in twin.log()] == [*earlier, b"last"]
    claim.lose()
    await twin.until_stop_requested()
    with pytest.raises(Fenced):
        await twin.update(b"late")
    assert claim.updates == [b"last"]


@pytest.mark.parametrize("advance_s", [-5, -0.1, math.nan, math.inf, "5", None])
def test_a_time_that_a_clock_can_not_be_moved_by_is_refused(tasks: Queue, advance_s: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^advance_s is .*: give seconds from 0$"):
        tasks.run_until_idle(advance_s=advance_s)


@pytest.mark.parametrize("statuses", [{"ded"}, "dead!", [["dead"]], 5])
def test_a_status_that_there_is_not_is_refused_with_those_that_there_are(tasks: Queue, statuses: Any) -> None:
    for ask in (
        lambda: list(tasks.tasks(statuses)),
        lambda: tasks.newest(3, statuses),
        lambda: tasks.collect(statuses=statuses),
    ):
        with pytest.raises(
            InvalidArgument, match=r"^statuses are .*waiting, claimed, completed, dead, cancelled"
        ):
            ask()


def test_statuses_may_be_texts(tasks: Queue) -> None:
    @tasks.task
    def send(claim: Claim) -> None: ...

    task = send.enqueue()
    tasks.cancel(task)
    for statuses in ({"cancelled"}, ["cancelled"], "cancelled"):
        given: Any = statuses
        assert [each.head.id for each in tasks.tasks(given)] == [task]
    assert list(tasks.tasks(frozenset({Status.DEAD}))) == []


def test_who_waits_for_a_cancelled_task_is_told_what_to_do(tasks: Queue) -> None:
    @tasks.task
    def fails(claim: Claim) -> None:
        raise ValueError("no such address")

    task = fails.enqueue()
    tasks.cancel(task)
    with pytest.raises(TaskFailed, match=rf"^task {task} is cancelled: requeue\(\) tries it again$"):
        tasks.wait(task, 0.0)
    tasks.requeue(task)
    tasks.run_until_idle()
    tasks.cancel(task)
    with pytest.raises(TaskFailed, match=r"again; its last try failed: ValueError: no such address$"):
        tasks.wait(task, 0.0)
