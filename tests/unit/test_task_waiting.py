"""What wakes those who wait for tasks."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from rebalanser.errors import RegistryUnavailable
from rebalanser.tasks.engine import Lost
from rebalanser.tasks.model import Head, State, Status, Stored
from rebalanser.tasks.waiting import REPORT_S, Bell, WaitingBodies, waiting_for


class FakeEngine:
    """Has watches, and may be away."""

    def __init__(self) -> None:
        self.watches: list[Callable[[Sequence[Stored] | Lost], None]] = []
        self.is_away = False

    def page(self, _queue: str, _timeout_s: float, *, limit: int) -> Any:
        assert limit == 1
        return SimpleNamespace(revision=5)

    def watch(self, queue: str, revision: int, told: Callable[[Sequence[Stored] | Lost], None]) -> Any:
        assert (queue, revision) == ("mail", 5)
        if self.is_away:
            raise RegistryUnavailable("away")
        self.watches.append(told)
        return SimpleNamespace(close=lambda: self.watches.remove(told))

    def tell(self, news: Sequence[Stored] | Lost) -> None:
        (told,) = self.watches
        told(news)


def news_of(*tasks: str) -> list[Stored]:
    return [Stored(Head(task, "mail", "send"), State(), 6, 0) for task in tasks]


@pytest.mark.rule("SK-12")
def test_all_who_wait_share_a_watch_that_ends_with_the_last() -> None:
    engine = FakeEngine()
    context: Any = SimpleNamespace(engine=engine, queue="mail", timeout_s=1.0)
    bell = Bell(lambda: context)
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


def test_who_could_not_be_heard_is_forgotten() -> None:
    engine = FakeEngine()
    context: Any = SimpleNamespace(engine=engine, queue="mail", timeout_s=1.0)
    bell = Bell(lambda: context)
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
