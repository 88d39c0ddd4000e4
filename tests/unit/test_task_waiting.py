"""What wakes those who wait for tasks."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from rebalanser.errors import RegistryUnavailable
from rebalanser.runtime.clock import SystemClock
from rebalanser.tasks.context import SharedWatch
from rebalanser.tasks.engine import Change, ChangeFilter, Lost
from rebalanser.tasks.loops import ErrorPolicy
from rebalanser.tasks.model import Head, State, Status, Stored
from rebalanser.tasks.waiting import REPORT_S, CompletionNotifier, WaitingBodies, waiting_for
from rebalanser.testing.waiting import wait_until


class FakeEngine:
    """Has watches, and may be away."""

    def __init__(self) -> None:
        self.watches: list[tuple[Callable[[Sequence[Stored] | Lost], None], ChangeFilter]] = []
        self.is_away = False
        self.errors = ErrorPolicy("mail", SystemClock(), lambda: None)

    def shared(self) -> SharedWatch:
        return SharedWatch(self, "mail", 1.0, self.errors)  # type: ignore[arg-type]

    def page(self, _queue: str, _timeout_s: float, *, limit: int) -> Any:
        assert limit == 1
        return SimpleNamespace(revision=5)

    def watch(
        self, queue: str, revision: int, told: Callable[[Sequence[Stored] | Lost], None], wants: ChangeFilter
    ) -> Any:
        assert (queue, revision) == ("mail", 5)
        if self.is_away:
            raise RegistryUnavailable("away")
        watch = (told, wants)
        self.watches.append(watch)
        return SimpleNamespace(close=lambda: self.watches.remove(watch))

    def tell(self, news: Sequence[Stored] | Lost) -> list[str]:
        """Tell what is wanted of the news; the tasks of that."""
        ((told, wants),) = self.watches
        if isinstance(news, Lost):
            told(news)
            return []
        changes = [(Change(each.head.id, 0, each.state.status, each.revision), each) for each in news]
        wanted = [each for change, each in changes if wants(change)]
        if wanted:
            told(wanted)
        return [each.head.id for each in wanted]


def news_of(*tasks: str) -> list[Stored]:
    return [Stored(Head(task, "mail", "send"), State(), 6, 0) for task in tasks]


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


@pytest.mark.rule("SK-12")
def test_a_watch_that_has_ended_takes_no_news_from_the_next_one() -> None:
    """Each has a thread of its own in memory, and the one that ends may still be telling."""
    engine = FakeEngine()
    shared = engine.shared()
    heard: list[str] = []

    def hear(news: Sequence[Stored] | Lost) -> None:
        heard.extend("lost" if isinstance(news, Lost) else "".join(each.head.id for each in news))

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
    engine.tell(Lost(7))
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

    def sink(name: str) -> Callable[[Sequence[Stored] | Lost], None]:
        return lambda news: told.append(
            (name, news if isinstance(news, Lost) else [each.head.id for each in news])
        )

    def broken(_news: object) -> None:
        raise ValueError

    everything = shared.join(sink("all"), None)
    only_a = shared.join(sink("a"), lambda change: change.task == "a")
    shared.join(broken, lambda change: change.task == "a")
    unsure = shared.join(sink("?"), lambda _: 1 // 0 == 0)
    assert engine.tell(news_of("b", "a")) == ["b", "a"]
    assert told == [("?", Lost(6)), ("?", Lost(6)), ("all", ["b", "a"]), ("a", ["a"])]
    told.clear()
    unsure.close()
    everything.close()
    assert engine.tell(news_of("b")) == []
    engine.tell(Lost(9))
    assert told == [("a", Lost(9))]
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


WAITING = Stored(Head("a", "mail", "send"), State(), 6, 0)
CLAIMED = Stored(Head("a", "mail", "send"), State(Status.CLAIMED), 6, 0)


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
