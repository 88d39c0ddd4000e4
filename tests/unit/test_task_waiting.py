"""What wakes those who wait for tasks."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rebalanser.core.tasks.model import Head, Status, Stored, TaskState
from rebalanser.core.tasks.store import Change, ChangeFilter, ChangesLost
from rebalanser.errors import NotSettled, RegistryUnavailable
from rebalanser.runtime.clock import SystemClock
from rebalanser.tasks import AsyncQueue, Claim, Queue, waiting
from rebalanser.tasks.context import QueueOpener, SharedWatch
from rebalanser.tasks.loops import ErrorPolicy
from rebalanser.tasks.waiting import REPORT_S, SLACK_S, CompletionNotifier, WaitingBodies, waiting_for
from rebalanser.testing import FakeClock
from rebalanser.testing.waiting import PATIENCE_S, wait_until


class FakeEngine:
    """Has watches, and may be away."""

    def __init__(self) -> None:
        self.watches: list[tuple[Callable[[Sequence[Stored] | ChangesLost], None], ChangeFilter]] = []
        self.is_away = False
        self.errors = ErrorPolicy("mail", SystemClock(), lambda: None)

    def shared(self) -> SharedWatch:
        return SharedWatch(self, "mail", 1.0, self.errors)  # type: ignore[arg-type]

    def page(self, _queue: str, timeout_s: float, *, limit: int) -> Any:
        assert limit == 1
        self.read(timeout_s)
        return SimpleNamespace(revision=5)

    def read(self, _timeout_s: float) -> None:
        """Let a test block a read, or see its timeout."""

    def watch(
        self,
        queue: str,
        revision: int,
        told: Callable[[Sequence[Stored] | ChangesLost], None],
        wants: ChangeFilter,
    ) -> Any:
        assert (queue, revision) == ("mail", 5)
        if self.is_away:
            raise RegistryUnavailable("away")
        watch = (told, wants)
        self.watches.append(watch)
        return SimpleNamespace(close=lambda: self.watches.remove(watch))

    def tell(self, news: Sequence[Stored] | ChangesLost) -> list[str]:
        """Tell what is wanted of the news; the tasks of that."""
        ((told, wants),) = self.watches
        if isinstance(news, ChangesLost):
            told(news)
            return []
        changes = [(Change(each.head.id, 0, each.state.status, each.revision), each) for each in news]
        wanted = [each for change, each in changes if wants(change)]
        if wanted:
            told(wanted)
        return [each.head.id for each in wanted]


def news_of(*tasks: str) -> list[Stored]:
    return [Stored(Head(task, "mail", "send"), TaskState(), 6, 0) for task in tasks]


@pytest.mark.rule("SK-19")
def test_all_who_begin_to_wait_while_the_engine_is_away_are_told_by_one_try() -> None:
    """One after the other they would wait as many times as long, each beyond its own time."""
    tasks = [f"{number}" for number in range(8)]
    tries: list[int] = []
    outcomes: list[str] = []

    def watch(*_: Any) -> Any:
        tries.append(1)
        wait_until(lambda: len(bell._listeners) == len(tasks))
        raise RegistryUnavailable("away")

    bell = CompletionNotifier(lambda: SimpleNamespace(watch=watch))  # type: ignore[arg-type,return-value]

    def listen(task: str) -> None:
        try:
            bell.listen(task, lambda: None)
        except RegistryUnavailable as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=listen, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == ["away"] * len(tasks)
    assert len(tries) == 1
    assert bell._listeners == {}


@pytest.mark.rule("SK-19")
def test_who_waits_begins_the_watch_that_another_was_interrupted_in() -> None:
    engine = FakeEngine()
    shared = engine.shared()
    tries: list[int] = []

    def watch(*arguments: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:
            wait_until(lambda: len(bell._listeners) == 2)
            raise KeyboardInterrupt
        return shared.join(*arguments)

    bell = CompletionNotifier(lambda: SimpleNamespace(watch=watch))  # type: ignore[arg-type,return-value]
    heard: list[str] = []

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            bell.listen("a", lambda: heard.append("a"))

    first = threading.Thread(target=interrupted)
    first.start()
    wait_until(lambda: len(tries) == 1)
    bell.listen("b", lambda: heard.append("b"))
    first.join()
    engine.tell(news_of("a", "b"))
    assert heard == ["b"]


class Blocked:
    """A thread that begins a watch, and reads from the engine until it is let go."""

    def __init__(self, engine: FakeEngine, shared: SharedWatch, timeout_s: float = math.inf) -> None:
        self._reads, self._go_on = threading.Event(), threading.Event()
        self.outcomes: list[object] = []
        self._thread = threading.Thread(target=self._join, args=(shared, timeout_s))
        engine.read = self._read  # type: ignore[method-assign]
        self._thread.start()
        assert self._reads.wait(PATIENCE_S)
        engine.read = lambda _timeout_s: None  # type: ignore[method-assign]

    def _read(self, _timeout_s: float) -> None:
        self._reads.set()
        assert self._go_on.wait(PATIENCE_S)

    def _join(self, shared: SharedWatch, timeout_s: float) -> None:
        try:
            self.outcomes.append(shared.join(lambda _: None, None, timeout_s))
        except RegistryUnavailable as error:
            self.outcomes.append(error)

    def go_on(self) -> None:
        self._go_on.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.mark.rule("SK-12")
def test_a_watch_is_begun_without_its_lock() -> None:
    """Else whoever joins or leaves waits as long as the engine takes, whatever its own time."""
    engine = FakeEngine()
    shared = engine.shared()
    blocked = Blocked(engine, shared)
    with pytest.raises(RegistryUnavailable, match=r"^the engine has not answered within 0 s$"):
        shared.join(lambda _: None, None, 0.0)
    heard: list[int] = []
    with ThreadPoolExecutor(1) as others:
        joining = others.submit(shared.join, lambda _: heard.append(1), None)
        wait_until(lambda: len(shared._feed.readers) == 2)
        blocked.go_on()
        last = joining.result(PATIENCE_S)
    assert len(engine.watches) == 1
    engine.tell(news_of("a"))
    assert heard == [1]
    (first,) = blocked.outcomes
    first.close()  # type: ignore[attr-defined]
    assert len(engine.watches) == 1
    last.close()
    assert engine.watches == []


@pytest.mark.rule("SK-12")
def test_who_has_more_time_begins_the_watch_that_another_gave_up() -> None:
    engine = FakeEngine()
    shared = engine.shared()
    engine.is_away = True
    blocked = Blocked(engine, shared, 0.5)
    with ThreadPoolExecutor(2) as others:
        longer = others.submit(shared.join, lambda _: None, None, 1.0)
        same = others.submit(shared.join, lambda _: None, None, 0.5)
        wait_until(lambda: len(shared._feed.readers) == 3)
        timeouts: list[float] = []

        def read(timeout_s: float) -> None:
            timeouts.append(timeout_s)
            engine.is_away = False

        engine.read = read  # type: ignore[method-assign]
        blocked.go_on()
        longer.result(PATIENCE_S)
        with pytest.raises(RegistryUnavailable):
            same.result(PATIENCE_S)
    assert isinstance(blocked.outcomes[0], RegistryUnavailable)
    assert len(engine.watches) == len(timeouts) == 1
    assert timeouts[0] <= 1.0
    assert len(shared._feed.readers) == 1


@pytest.mark.rule("SK-12")
def test_a_watch_is_closed_without_its_lock() -> None:
    """It waits for sinks that are being called, and these may join and leave."""
    engine = FakeEngine()
    shared = engine.shared()
    joined: list[object] = []
    begin = engine.watch

    def watch(*arguments: Any) -> Any:
        begun = begin(*arguments)

        def close() -> None:
            joining = threading.Thread(target=lambda: joined.append(shared.join(lambda _: None, None)))
            joining.start()
            joining.join(PATIENCE_S)
            begun.close()

        return SimpleNamespace(close=close)

    engine.watch = watch  # type: ignore[method-assign]
    reader = shared.join(lambda _: None, None)
    engine.watch = begin  # type: ignore[method-assign]
    reader.close()
    assert len(joined) == len(engine.watches) == 1


@pytest.mark.rule("SK-19")
@pytest.mark.parametrize("timeout_s", [0.0, 1.0, 3600.0])
def test_no_request_of_a_wait_takes_longer_than_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    """While the engine was away a wait of a second took the timeout of a request, 10 s."""
    timeouts: list[float] = []
    waits = timeout_s > 0.0

    async def awaited() -> None:
        async with AsyncQueue("mail", f"memory://{tmp_path}", state_folder=tmp_path) as queue:
            task = await queue.task(send).enqueue()
            assert queue._queue is not None
            noted(queue._queue.context.engine)
            with pytest.raises((NotSettled, RegistryUnavailable)):
                await queue.wait(task, timeout_s)

    def noted(engine: Any) -> None:
        page, read = engine.page, engine.read

        def paged(queue: str, timeout_s: float, **more: Any) -> Any:
            timeouts.append(timeout_s)
            return page(queue, timeout_s, **more)

        def found(queue: str, ids: Any, timeout_s: float, **more: Any) -> Any:
            timeouts.append(timeout_s)
            if waits:
                raise RegistryUnavailable("away")
            return read(queue, ids, timeout_s, **more)

        def away(queue: str, timeout_s: float) -> Any:
            timeouts.append(timeout_s)
            raise RegistryUnavailable("away")

        monkeypatch.setattr(engine, "page", paged)
        monkeypatch.setattr(engine, "read", found)
        monkeypatch.setattr(engine, "pauses", away)
        monkeypatch.setattr(engine, "workers", away)

    with Queue("mail", f"memory://{tmp_path}", state_folder=tmp_path) as queue:
        task = queue.task(send).enqueue()
        noted(queue.context.engine)
        with pytest.raises((NotSettled, RegistryUnavailable)):
            queue.wait(task, timeout_s)
    asyncio.run(awaited())
    assert len(timeouts) >= (4 if waits else 8)
    assert max(timeouts) <= min(10.0, timeout_s + SLACK_S)


def send(claim: Claim) -> None: ...


@pytest.mark.rule("SK-19")
def test_a_wait_does_not_outlast_an_engine_that_is_being_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "SLACK_S", 0.0)
    opens, go_on = threading.Event(), threading.Event()

    def opened(within_s: float | None) -> Any:
        opens.set()
        assert go_on.wait(PATIENCE_S)
        raise RegistryUnavailable(f"away for {within_s}")

    opening = QueueOpener(opened)
    with ThreadPoolExecutor(1) as others:
        first = others.submit(opening.opened)
        assert opens.wait(PATIENCE_S)
        with pytest.raises(RegistryUnavailable, match="has not answered within 0 s"):
            opening.opened(0.0)
        go_on.set()
        with pytest.raises(RegistryUnavailable, match="away for None"):
            first.result(PATIENCE_S)
    with pytest.raises(RegistryUnavailable, match=r"away for 0\.0"):
        opening.opened(0.0)

    async def awaited() -> None:
        queue = AsyncQueue("mail", "memory://", state_folder=tmp_path)
        go_on.clear()
        monkeypatch.setattr(queue, "_open", lambda: opened(None))
        with pytest.raises(RegistryUnavailable, match="has not answered within 0 s"):
            await queue.wait("0" * 40, 0.0)
        go_on.set()

    asyncio.run(awaited())


@pytest.mark.rule("SK-19")
@pytest.mark.parametrize("timeout_s", [math.inf, 1e300])
def test_a_wait_may_last_for_ever(tmp_path: Path, timeout_s: float) -> None:
    with (
        Queue("memory://", clock=FakeClock(), state_folder=tmp_path) as queue,
        ThreadPoolExecutor(1) as others,
    ):
        task = queue.task(send).enqueue()
        done = others.submit(queue.wait, task, timeout_s)
        wait_until(lambda: bool(queue.notifier._listeners) or done.done())
        assert queue.run_until_idle() == 1
        assert done.result(PATIENCE_S) is None


@pytest.mark.rule("SK-12")
def test_a_watch_that_has_ended_takes_no_news_from_the_next_one() -> None:
    """Each has a thread of its own in memory, and the one that ends may still be telling."""
    engine = FakeEngine()
    shared = engine.shared()
    heard: list[str] = []

    def hear(news: Sequence[Stored] | ChangesLost) -> None:
        heard.extend("lost" if isinstance(news, ChangesLost) else "".join(each.head.id for each in news))

    before = shared.join(lambda _: None, None)
    ((told, wants),) = engine.watches
    before.close()
    shared.join(hear, None)
    ((next_told, next_wants),) = engine.watches
    old, new = news_of("a", "b")
    assert not wants(Change(old.head.id, 0, Status.WAITING, old.revision))
    assert next_wants(Change(new.head.id, 0, Status.WAITING, new.revision))
    told([old])
    next_told([new])
    assert heard == ["b"]


@pytest.mark.rule("SK-12")
def test_all_who_wait_share_a_watch_that_ends_with_the_last() -> None:
    engine = FakeEngine()
    context: Any = SimpleNamespace(watch=engine.shared().join)
    bell = CompletionNotifier(lambda: context)
    heard: list[str] = []
    first, second, third = (lambda: heard.append("1")), (lambda: heard.append("2")), lambda: heard.append("3")
    bell.listen("a", first)
    bell.listen("a", second)
    bell.listen("b", third)
    engine.tell(news_of("a", "c"))
    assert heard == ["1", "2"]
    bell.leave("a", first)
    engine.tell(ChangesLost(7))
    assert heard == ["1", "2", "2", "3"]
    bell.leave("b", third)
    assert len(engine.watches) == 1
    bell.leave("a", second)
    assert engine.watches == []
    bell.listen("a", first)
    engine.tell(news_of("a"))
    assert heard[-1] == "1"


def test_sinks_share_one_watch_and_each_is_told_what_it_wants() -> None:
    engine = FakeEngine()
    shared = engine.shared()
    told: list[tuple[str, object]] = []

    def sink(name: str) -> Callable[[Sequence[Stored] | ChangesLost], None]:
        return lambda news: told.append(
            (name, news if isinstance(news, ChangesLost) else [each.head.id for each in news])
        )

    def broken(_news: object) -> None:
        raise ValueError

    everything = shared.join(sink("all"), None)
    only_a = shared.join(sink("a"), lambda change: change.task == "a")
    shared.join(broken, lambda change: change.task == "a")
    unsure = shared.join(sink("?"), lambda _: 1 // 0 == 0)
    assert engine.tell(news_of("b", "a")) == ["b", "a"]
    assert told == [("?", ChangesLost(6)), ("?", ChangesLost(6)), ("all", ["b", "a"]), ("a", ["a"])]
    told.clear()
    unsure.close()
    everything.close()
    assert engine.tell(news_of("b")) == []
    engine.tell(ChangesLost(9))
    assert told == [("a", ChangesLost(9))]
    only_a.close()
    only_a.close()
    assert len(engine.watches) == 1


def test_who_could_not_be_heard_is_forgotten() -> None:
    engine = FakeEngine()
    context: Any = SimpleNamespace(watch=engine.shared().join)
    bell = CompletionNotifier(lambda: context)
    heard: list[str] = []
    engine.is_away = True
    with pytest.raises(RegistryUnavailable):
        bell.listen("a", lambda: heard.append("1"))
    engine.is_away = False
    bell.listen("a", lambda: heard.append("2"))
    engine.tell(news_of("a"))
    assert heard == ["2"]


class Wall:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    wall = now


WAITING = Stored(Head("a", "mail", "send"), TaskState(), 6, 0)
CLAIMED = Stored(Head("a", "mail", "send"), TaskState(Status.CLAIMED), 6, 0)


def test_where_all_bodies_of_a_worker_wait_they_are_told(caplog: pytest.LogCaptureFixture) -> None:
    clock = Wall()
    bodies = WaitingBodies("mail", 2, clock)

    def waits() -> None:
        bodies.enter()
        with waiting_for("other") as elsewhere, waiting_for("mail") as first:
            assert (elsewhere(WAITING), first(WAITING)) == ("", "")
            with waiting_for("mail") as second:
                assert elsewhere(WAITING) == first(CLAIMED) == ""
                assert "all bodies of this worker (2) wait" in first(WAITING)
                clock.at = REPORT_S - 1
                assert "raise the concurrency" in second(WAITING)
                assert len(caplog.records) == 1
                clock.at = REPORT_S
                assert second(WAITING)
                assert len(caplog.records) == 2
            assert first(WAITING) == ""

    contextvars.copy_context().run(waits)
    with ExitStack() as stack:
        hints = [stack.enter_context(waiting_for("mail")) for _ in range(3)]
        assert {hint(WAITING) for hint in hints} == {""}, "nobody here is a body"
