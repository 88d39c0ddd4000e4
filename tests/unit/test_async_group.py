"""The asyncio twin of a group, in this process on the memory registry."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import threading
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from rebalanser import Admin, AsyncAdmin, AsyncGroup, Group, Settings, async_group
from rebalanser.core.clock import GrowingDelay
from rebalanser.core.group import FactKind
from rebalanser.errors import HandlerFailed, InvalidHandlers, InvalidState, NotSettled
from rebalanser.neli import AsyncNeli, Neli
from rebalanser.runtime import workers
from rebalanser.runtime.loop_bridge import awaited
from rebalanser.tasks import AsyncQueue
from rebalanser.testing.waiting import PATIENCE_S

if TYPE_CHECKING:
    from rebalanser import Fact, Owned

QUICK = Settings(min_rebalance_interval_s=0.0, rejoin_initial_s=0.01, connect_timeout_s=PATIENCE_S)


@pytest.fixture
def url() -> str:
    """A registry with a group of one resource."""
    made = f"memory://{uuid.uuid4().hex}"
    with Admin("group", made) as admin:
        admin.add("a")
    return made


def within_patience(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def names(owned: list[Owned]) -> list[str]:
    return [each.resource for each in owned]


def group_of(url: str) -> AsyncGroup:
    return AsyncGroup("group", url, node="n", settings=QUICK)


def test_says_what_it_is(url: str) -> None:
    group = group_of(url)
    assert (group.name, group.node, group.settings) == ("group", "n", QUICK)
    assert repr(group) == f"AsyncGroup('group', '{url}', node='n')"


@pytest.mark.parametrize("kind", ["coroutine", "plain"])
def test_handlers_run_in_the_loop(url: str, kind: str) -> None:
    calls: list[object] = []
    loops: set[object] = set()

    def note(call: str, owned: list[Owned]) -> None:
        loops.add(asyncio.get_running_loop())
        calls.append((call, names(owned)))

    def handler(call: str) -> Callable[[list[Owned]], Awaitable[None] | None]:
        async def awaited(owned: list[Owned]) -> None:
            await asyncio.sleep(0)
            note(call, owned)

        def plain(owned: list[Owned]) -> None:
            note(call, owned)

        return awaited if kind == "coroutine" else plain

    async def main() -> None:
        group = group_of(url)
        group.on_start(handler("start"))
        group.on_stop(handler("stop"))
        async with group:
            await group.wait_settled(PATIENCE_S)
            assert list(group.resources) == ["a"]
            assert group.resources["a"].still_mine()
            assert group.is_leader
        assert group.resources == {}
        assert loops == {asyncio.get_running_loop()}

    within_patience(main)
    assert calls == [("start", ["a"]), ("stop", ["a"])]


@pytest.mark.rule("RB-25")
@pytest.mark.lesson(5)
def test_a_blocked_loop_delays_no_heartbeat(url: str) -> None:
    beats = threading.Semaphore(0)

    async def main() -> None:
        group = AsyncGroup("group", url, settings=Settings(lease_ttl_s=2.0))
        facts: list[FactKind] = []
        group.on_fact(lambda fact: facts.append(fact.kind))

        @group.on_start
        def block(owned: list[Owned]) -> None:
            """Holds the loop until the lease was renewed many times."""
            before = owned[0].deadline
            while owned[0].deadline < before + 2 * group.settings.lease_ttl_s:
                beats.acquire(timeout=0.01)

        group.on_stop(lambda _owned: None)
        async with group:
            await group.wait_settled(PATIENCE_S)
            assert facts.count(FactKind.JOINED) == 1
            assert FactKind.ISOLATED not in facts

    within_patience(main)


def test_a_worker_is_a_task_for_each_resource(url: str) -> None:
    async def main() -> None:
        group, ended = group_of(url), asyncio.Event()
        running = asyncio.Event()

        @group.worker
        async def work(owned: Owned) -> None:
            assert asyncio.current_task() is not None
            running.set()
            await owned.until_stop_requested()
            assert not owned.still_mine()
            ended.set()

        async with group:
            await running.wait()
        assert ended.is_set()

    within_patience(main)


def test_a_worker_that_raises_is_called_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "RESTART_INITIAL_S", 0.001)

    async def main() -> None:
        group, calls, enough = group_of(url), [], asyncio.Event()

        @group.worker
        async def work(owned: Owned) -> None:
            calls.append(owned.resource)
            if len(calls) < 4:
                raise OSError("connection reset")
            enough.set()
            await owned.until_stop_requested()

        async with group:
            await enough.wait()
        assert calls == ["a"] * 4

    within_patience(main)


def test_a_worker_is_called_again_if_what_it_awaits_was_cancelled(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers.GrowingDelay, "after", lambda _self, _lasted_s: 0.001)

    async def main() -> None:
        group, called_again, calls = group_of(url), asyncio.Event(), []

        @group.worker
        async def work(owned: Owned) -> None:
            calls.append(owned)
            if len(calls) > 1:
                called_again.set()
                await owned.until_stop_requested()
                return
            awaited = asyncio.ensure_future(asyncio.Event().wait())
            awaited.cancel()
            await awaited

        async with group:
            await called_again.wait()

    within_patience(main)


def test_a_worker_is_not_called_again_once_its_resource_leaves(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "RESTART_INITIAL_S", 1000.0)
    monkeypatch.setattr(workers, "GrowingDelay", partial(GrowingDelay, 1000.0, 1000.0))

    async def main() -> None:
        group, calls, called = group_of(url), [], asyncio.Event()

        @group.worker
        async def work(owned: Owned) -> None:
            calls.append(owned.still_mine())
            called.set()
            raise OSError("connection reset")

        async with group:
            await called.wait()
        assert calls == [True]

    within_patience(main)


def test_a_worker_that_returns_early_is_called_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "RESTART_INITIAL_S", 0.001)

    async def main() -> None:
        group, calls, enough = group_of(url), [], asyncio.Event()

        @group.worker
        async def work(owned: Owned) -> None:
            calls.append(owned.resource)
            if len(calls) == 3:
                enough.set()
                await owned.until_stop_requested()

        async with group:
            await enough.wait()
        assert calls == ["a"] * 3

    within_patience(main)


def test_a_task_may_release_its_resource_and_take_it_back(url: str) -> None:
    async def main() -> None:
        group, calls, left = group_of(url), 0, asyncio.Event()
        loop = asyncio.get_running_loop()
        group.on_fact(
            lambda fact: (
                fact.kind is FactKind.BARRIER_REMOVED and loop.call_soon_threadsafe(left.set) and None
            )
        )
        again = asyncio.Event()

        @group.worker
        async def work(owned: Owned) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                owned.release()
                return
            again.set()
            await owned.until_stop_requested()

        async with group:
            await left.wait()
            assert group.released == {"a"}
            assert group.resources == {}
            group.accept("a")
            await again.wait()
            assert group.released == frozenset()
        assert calls == 2

    within_patience(main)


def test_a_worker_that_goes_on_after_it_was_asked_to_stop_is_cancelled(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_group, "CANCEL_SHARE", 0.001)

    async def main() -> None:
        group, running, ends = group_of(url), asyncio.Event(), []

        @group.worker
        async def work(owned: Owned) -> None:
            running.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ends.append(owned.stop_requested.is_set())
                raise

        async with group:
            await running.wait()
        assert ends == [True], "it was asked first"

    within_patience(main)


@pytest.mark.parametrize("what", ["on_start", "on_stop", "worker"])
def test_a_handler_that_cannot_be_called_is_refused_at_once(url: str, what: str) -> None:
    async def handler() -> None:
        """Take no argument."""

    with pytest.raises(InvalidHandlers, match=f"{what} is called with"):
        getattr(group_of(url), what)(handler)


@pytest.mark.rule("RB-26")
def test_a_start_that_is_cancelled_twice_leaves_nothing_running(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        group = group_of(url)

        @group.worker
        async def work(owned: Owned) -> None:
            await owned.until_stop_requested()

        being_made, may_go_on = asyncio.Event(), threading.Event()
        loop, made = asyncio.get_running_loop(), group._sync._made

        def slowly() -> object:
            loop.call_soon_threadsafe(being_made.set)
            assert may_go_on.wait(PATIENCE_S)
            return made()

        monkeypatch.setattr(group._sync, "_made", slowly)
        starting = asyncio.ensure_future(group.start())
        await being_made.wait()
        for _ in range(2):
            starting.cancel()
            await asyncio.sleep(0)
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert group._sync._run is None

    within_patience(main)


def test_a_worker_task_that_was_cancelled_is_reported_and_another_follows(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "RESTART_INITIAL_S", 0.001)

    async def main() -> None:
        group, running, failed = group_of(url), asyncio.Event(), threading.Event()
        tasks: list[asyncio.Task[None]] = []

        @group.worker
        async def work(owned: Owned) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.append(task)
            running.set()
            await owned.until_stop_requested()

        @group.on_fact
        def note(fact: Fact) -> None:
            if fact.kind is FactKind.WORKER_FAILED:
                failed.set()

        async with group:
            for number in range(3):
                await running.wait()
                running.clear()
                assert len(tasks) == number + 1
                tasks[-1].cancel()
            await running.wait()
            assert failed.is_set()
            tasks[-1].cancel()
        assert all(task.done() for task in tasks)

    within_patience(main)


def test_a_plain_worker_is_refused(url: str) -> None:
    with pytest.raises(InvalidHandlers, match="coroutine function"):
        group_of(url).worker(lambda _owned: None)  # type: ignore[arg-type, return-value]


async def work_on(owned: Owned) -> None:
    await owned.until_stop_requested()


def handle(_owned: list[Owned]) -> None:
    """Does nothing."""


@pytest.mark.parametrize("handler", ["on_start", "on_stop"])
def test_a_worker_and_handlers_exclude_each_other(url: str, handler: str) -> None:
    group = group_of(url)
    group.worker(work_on)
    with pytest.raises(InvalidHandlers, match="not both"):
        getattr(group, handler)(handle)
    with pytest.raises(InvalidHandlers, match="worker is registered already"):
        group.worker(work_on)
    group = group_of(url)
    getattr(group, handler)(handle)
    with pytest.raises(InvalidHandlers, match="not both"):
        group.worker(work_on)


def test_no_handler_is_refused(url: str) -> None:
    with pytest.raises(InvalidHandlers, match="no handler registered"):
        asyncio.run(group_of(url).start())


@pytest.mark.rule("RB-24")
def test_what_a_handler_raises_is_told(url: str) -> None:
    async def main() -> None:
        group = group_of(url)
        group.on_start(handle)

        @group.on_stop
        async def stop(_owned: list[Owned]) -> None:
            raise OSError("device busy")

        await group.start()
        await group.wait_settled(PATIENCE_S)
        with pytest.raises(HandlerFailed, match="device busy"):
            await group.stop()

    within_patience(main)


def test_stop_in_a_handler_is_refused(url: str) -> None:
    async def main() -> None:
        group, refused = group_of(url), asyncio.Event()

        @group.on_start
        async def start(_owned: list[Owned]) -> None:
            with pytest.raises(InvalidState, match="from a handler; call request_stop"):
                await group.stop()
            refused.set()

        group.on_stop(handle)
        async with group:
            await refused.wait()

    within_patience(main)


def test_stop_in_a_worker_is_refused(url: str) -> None:
    async def main() -> None:
        group, refused = group_of(url), asyncio.Event()

        @group.worker
        async def work(owned: Owned) -> None:
            with pytest.raises(InvalidState, match="from a handler; call request_stop"):
                await group.stop()
            refused.set()
            await owned.until_stop_requested()

        async with group:
            await refused.wait()

    within_patience(main)


def test_a_stop_that_takes_too_long_goes_on(url: str) -> None:
    async def main() -> None:
        group, may_return = group_of(url), asyncio.Event()
        group.on_start(handle)

        @group.on_stop
        async def stop(_owned: list[Owned]) -> None:
            await may_return.wait()

        await group.start()
        await group.wait_settled(PATIENCE_S)
        with pytest.raises(NotSettled, match="has not stopped within 0 s"):
            await group.stop(0)
        may_return.set()
        await group.stop()

    within_patience(main)


@pytest.mark.rule("RB-26")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_runs_until_a_signal(url: str, number: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    calls: list[str] = []

    async def main() -> None:
        group = group_of(url)

        @group.on_start
        async def start(_owned: list[Owned]) -> None:
            calls.append("start")
            os.kill(os.getpid(), number)

        @group.on_stop
        async def stop(_owned: list[Owned]) -> None:
            calls.append("stop")

        await group.run()
        calls.append("end")

    within_patience(main)
    assert calls == ["start", "stop", "end"]
    assert {each: signal.getsignal(each) for each in before} == before
    with Admin("group", url) as admin:
        assert admin.state().nodes == ()


@pytest.mark.rule("RB-26")
@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_groups_of_a_loop_that_has_no_thread_to_spare(
    url: str, number: signal.Signals
) -> None:
    """One thread of the default executor is enough for all of them and the handlers."""
    stopped: list[str] = []

    def group_named(name: str, started: asyncio.Event) -> AsyncGroup:
        group = AsyncGroup(name, url, settings=QUICK)

        @group.on_start
        async def start(_owned: list[Owned]) -> None:
            await asyncio.to_thread(threading.get_ident)
            started.set()

        @group.on_stop
        async def stop(_owned: list[Owned]) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.to_thread(threading.get_ident)
            stopped.append(name)

        return group

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        started = {name: asyncio.Event() for name in ("group", "other", "third")}
        running = [asyncio.create_task(group_named(*each).run()) for each in started.items()]
        await asyncio.gather(*(event.wait() for event in started.values()))
        os.kill(os.getpid(), number)
        await asyncio.gather(*running)

    for name in ("other", "third"):
        with Admin(name, url) as admin:
            admin.add("a")
    within_patience(main)
    assert sorted(stopped) == ["group", "other", "third"]


def test_starting_twice_is_refused(url: str) -> None:
    async def main() -> None:
        group = group_of(url)
        group.on_start(handle)
        group.on_stop(handle)
        async with group:
            with pytest.raises(InvalidState, match="runs already"):
                await group.start()
            await group.wait_settled(PATIENCE_S)

    within_patience(main)


@pytest.mark.rule("RB-26")
@pytest.mark.parametrize("settled", [True, False])
def test_a_loop_that_ends_stops_its_group(url: str, settled: bool) -> None:
    """Its handlers can't run without it: the node would own resources that nobody works on."""
    group = group_of(url)
    calls: list[str] = []

    @group.on_start
    async def start(_owned: list[Owned]) -> None:
        calls.append("start")

    @group.on_stop
    async def stop(_owned: list[Owned]) -> None:
        await asyncio.sleep(0)
        calls.append("stop")

    async def fail() -> None:
        await group.start()
        if settled:
            await group.wait_settled(PATIENCE_S)
        else:
            for task in asyncio.all_tasks():
                if task.get_name() == "rebalanser-stop-at-end":
                    task.cancel()
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        within_patience(fail)
    assert group._sync._run is None
    assert calls.count("start") == calls.count("stop") >= settled
    with Admin("group", url) as admin:
        state = admin.state()
    assert (state.nodes, state.owned) == ((), 0)


def test_a_loop_that_ends_leaves_what_was_started_again_elsewhere(url: str) -> None:
    group = group_of(url)
    loop = asyncio.new_event_loop()

    @group.worker
    async def work(owned: Owned) -> None:
        await owned.until_stop_requested()

    async def first() -> None:
        await group.start()
        group.request_stop()
        await asyncio.to_thread(group._sync.wait_stopped, PATIENCE_S)
        await group.start()
        await group.wait_settled(PATIENCE_S)
        group.request_stop()
        await asyncio.to_thread(group._sync.wait_stopped, PATIENCE_S)

    async def second() -> None:
        async with group:
            await asyncio.to_thread(loop.run_until_complete, cancelled_all())
            await group.wait_settled(PATIENCE_S)
            assert group._sync.wait_stopped(0) is False

    async def cancelled_all() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        assert [task.get_name() for task in tasks] == ["rebalanser-stop-at-end"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    loop.run_until_complete(asyncio.wait_for(first(), PATIENCE_S))
    within_patience(second)
    loop.close()
    assert group._sync._run is None


def test_a_loop_that_is_gone_can_not_stop_access(url: str) -> None:
    group = group_of(url)
    group.on_start(handle)
    group.on_stop(handle)

    async def forget_to_stop() -> None:
        await group.start()
        await group.wait_settled(PATIENCE_S)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(forget_to_stop())
    ended = asyncio.all_tasks(loop)
    loop.close()
    assert [task.get_name() for task in ended] == ["rebalanser-stop-at-end"]
    with pytest.raises(HandlerFailed, match="event loop that it was started in is closed"):
        group._sync.stop()


def test_an_operator_awaits_the_same_names() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    calls: list[tuple[int, int]] = []

    def progress(done: int, of: int) -> None:
        calls.append((done, of))

    async def main() -> None:
        async with AsyncAdmin("group", url) as admin:
            assert await admin.add("a", ["b"], weight=2.0, attributes={"zone": "z"}, progress=progress) == 2
            assert calls == [(0, 2), (2, 2)]
            assert await admin.weigh({"b": 3.0}) == 1
            assert await admin.remove("a") == 1
            await admin.drain("n")
            ((only,), state) = await asyncio.gather(admin.resources(), admin.state())
            assert (only.resource, only.weight, only.attributes) == ("b", 3.0, {"zone": "z"})
            assert state.drained == ("n",)
            await admin.undrain("n")
            group = group_of(url)
            group.on_start(lambda _owned: None)
            group.on_stop(lambda _owned: None)
            async with group:
                assert (await admin.wait_balanced(PATIENCE_S)).all_owned
        with pytest.raises(InvalidState, match="closed"):
            await admin.state()
        await admin.close()

    within_patience(main)


def test_an_operator_that_waits_blocks_no_loop(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, may_answer = threading.Event(), threading.Event()

    def slowly(_admin: Admin) -> None:
        asked.set()
        assert may_answer.wait(PATIENCE_S)

    async def main() -> None:
        admin = AsyncAdmin("group", url)
        monkeypatch.setattr(AsyncAdmin, "state", awaited(slowly))
        waiting = asyncio.ensure_future(admin.state())
        while not asked.is_set():
            await asyncio.sleep(0)
        may_answer.set()
        await waiting
        await admin.close()

    within_patience(main)


def test_the_operators_twin_has_the_same_methods() -> None:
    def public(owner: type) -> set[str]:
        return {name for name in vars(owner) if not name.startswith("_")}

    assert public(AsyncAdmin) == public(Admin) - {"changes"}, "an event of threads"


@pytest.mark.parametrize(("twin", "blocking"), [(AsyncGroup, Group), (AsyncNeli, Neli)])
def test_a_participants_twin_has_the_same_names_with_the_same_parameters(twin: Any, blocking: Any) -> None:
    def parameters(owner: type, name: str) -> object:
        method = getattr(owner, name)
        return list(inspect.signature(method).parameters.values())[1:] if callable(method) else None

    def without_types(given: Any) -> object:
        return given and [(each.name, each.kind, each.default) for each in given]

    names = {name for name in dir(blocking) if not name.startswith("_")}
    assert names <= {name for name in dir(twin) if not name.startswith("_")}
    for name in names:
        assert without_types(parameters(twin, name)) == without_types(parameters(blocking, name)), name


def test_an_asyncio_group_waits_until_it_has_stopped(url: str) -> None:
    async def main() -> None:
        group = group_of(url)
        group.on_start(lambda _owned: None)
        group.on_stop(lambda _owned: None)
        assert await group.wait_stopped()
        await group.start()
        assert not await group.wait_stopped(0.01)
        group.request_stop()
        assert await group.wait_stopped(PATIENCE_S)
        await group.stop()

    within_patience(main)


def test_a_loop_closes_although_workers_run(url: str) -> None:
    groups = []

    async def main() -> None:
        group, running = group_of(url), asyncio.Event()
        groups.append(group)

        @group.worker
        async def work(owned: Owned) -> None:
            running.set()
            await owned.until_stop_requested()

        await group.start()
        await running.wait()

    within_patience(main)
    assert groups[0]._sync._run is None


@pytest.mark.parametrize("twin", [AsyncAdmin, AsyncGroup, AsyncNeli, AsyncQueue])
def test_an_asyncio_twin_refuses_an_unknown_argument_by_its_own_name(twin: Any) -> None:
    name = f"^{twin.__name__}[.]__init__"
    assert twin.__init__.__qualname__ == f"{twin.__name__}.__init__"
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'lease_ttl'"):
        twin(**dict.fromkeys(inspect.signature(twin).parameters), lease_ttl=30.0)
    with pytest.raises(TypeError, match=rf"{name}\(\) missing a required argument: '\w+'"):
        twin()
