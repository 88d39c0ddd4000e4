"""The one writer of a process: whoever stops can wait for what was asked before."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import pytest

from rebalanser.errors import (
    InternalError,
    OutcomeUnknown,
    QuotaExceeded,
    RegistryUnavailable,
    RequestTooLarge,
    UnusableStore,
)
from rebalanser.runtime.clock import SystemClock
from rebalanser.tasks.asks import Ask
from rebalanser.tasks.ledger import Ledger
from rebalanser.tasks.loops import ErrorPolicy
from rebalanser.testing.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from rebalanser.tasks.engine import Answer, Engine, Write
    from rebalanser.tasks.model import Stored, TaskId


class Asked(Ask[str]):
    """Settled by the first answer."""

    def write(self) -> Write:
        return cast("Write", self.task)

    def answered(self, answer: Answer) -> None:
        self.future.set_result(str(answer))

    def found(self, stored: Stored | None) -> None:
        """It is written again."""


class Broken(Asked):
    """A part of it raises."""

    def __init__(self, task: str, part: str) -> None:
        super().__init__(task)
        self._part = part

    def _raise(self, part: str) -> None:
        if part == self._part:
            raise ZeroDivisionError(part)

    def write(self) -> Write:
        self._raise("write")
        return super().write()

    def answered(self, answer: Answer) -> None:
        self._raise("answered")
        super().answered(answer)


class Gated:
    """An engine that writes when it may, and raises what it is told to."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may = threading.Event()
        self.errors: list[BaseException] = []
        """Raised by the next calls, whatever they write."""
        self.poison: dict[str, BaseException] = {}
        """Raised by each call that writes one of these."""
        self.written: list[list[str]] = []
        """What each call was to write."""

    def apply(self, writes: Sequence[Write], _timeout_s: float) -> Sequence[Answer]:
        tasks = cast("Sequence[str]", writes)
        self.written.append(list(tasks))
        self.has_begun.set()
        self.may.wait()
        if self.errors:
            raise self.errors.pop(0)
        for task in tasks:
            if task in self.poison:
                raise self.poison[task]
        return cast("Sequence[Answer]", writes)

    def read(self, _queue: str, _ids: Sequence[TaskId], _timeout_s: float) -> dict[TaskId, Stored]:
        return {}


@pytest.fixture
def engine() -> Gated:
    return Gated()


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> ErrorPolicy:
    """A policy that knows no pause."""
    policy = ErrorPolicy("work", SystemClock(), lambda: None)
    failed = policy.failed
    monkeypatch.setattr(policy, "failed", lambda loop, error: 0.0 * failed(loop, error))
    return policy


@pytest.fixture
def ledger(engine: Gated, errors: ErrorPolicy) -> Iterator[Ledger]:
    made = Ledger(cast("Engine", engine), "work", 0.0, errors)
    yield made
    engine.may.set()
    made.close()


def outcomes(asked: Sequence[Ask[str]]) -> list[str]:
    """What became of each: its result, or the name of its error."""
    return [
        type(error).__name__ if (error := each.future.exception(PATIENCE_S)) else each.future.result()
        for each in asked
    ]


@pytest.mark.rule("SK-15")
def test_what_was_asked_before_is_known_after_a_flush(engine: Gated, ledger: Ledger) -> None:
    asked = [Asked("a"), Asked("b"), Asked("a")]
    ledger.submit(asked[0])
    engine.has_begun.wait()
    ledger.submit_all(asked[1:])  # one waits for the other, which is about the same task
    engine.may.set()
    ledger.flush()
    assert [each.future.done() and each.future.result() for each in asked] == ["a", "b", "a"]


@pytest.mark.rule("SK-15")
def test_a_flush_waits_for_what_the_outcomes_call(engine: Gated, ledger: Ledger) -> None:
    """What is told of an outcome, such as that a write was refused, must not be lost with the process."""
    begun, told = threading.Event(), []
    asked = Asked("a")

    def tell(_: object) -> None:
        begun.set()
        wait_until(lambda: ledger._flushing, "a flush")
        told.append("a")

    asked.future.add_done_callback(tell)
    engine.may.set()
    ledger.submit(asked)
    assert begun.wait(PATIENCE_S)
    ledger.flush()
    assert told == ["a"]


def test_where_nothing_is_asked_a_flush_is_over_at_once(ledger: Ledger) -> None:
    ledger.flush()


TOO_LARGE = RequestTooLarge("5 MB")
AWAY = RegistryUnavailable("away")
FULL = QuotaExceeded("full")


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("error", [TOO_LARGE, InternalError("refused a statement"), TypeError("no bytes")])
@pytest.mark.parametrize("where", [0, 63, 99])
def test_what_the_engine_can_not_take_fails_alone(
    engine: Gated, ledger: Ledger, error: Exception, where: int
) -> None:
    asked = [Asked(f"{number:02}") for number in range(100)]
    engine.poison = {f"{where:02}": error}
    engine.may.set()
    ledger.submit_all(asked)
    expected = [each.task for each in asked]
    expected[where] = type(error).__name__
    assert outcomes(asked) == expected
    assert len(engine.written) <= 16, "halves, not one by one"


@pytest.mark.rule("SK-15")
def test_all_that_the_engine_can_not_take_is_found(engine: Gated, ledger: Ledger) -> None:
    asked = [Asked(str(number)) for number in range(9)]
    engine.poison = dict.fromkeys("1278", TOO_LARGE)
    engine.may.set()
    ledger.submit_all(asked)
    told = ["RequestTooLarge" if each.task in "1278" else each.task for each in asked]
    assert outcomes(asked) == told


@pytest.mark.rule("SK-15")
def test_a_batch_of_which_a_part_took_effect_is_written_again_and_split(
    engine: Gated, ledger: Ledger
) -> None:
    """As an engine says it that was refused the second of its transactions."""
    engine.errors = [OutcomeUnknown("a part took effect")]
    engine.poison = {"b": TOO_LARGE}
    engine.may.set()
    asked = [Asked("a"), Asked("b"), Asked("c")]
    ledger.submit_all(asked)
    assert outcomes(asked) == ["a", "RequestTooLarge", "c"]


def test_who_gives_up_on_lost_answers_is_told_that_nobody_knows(engine: Gated, ledger: Ledger) -> None:
    """Not that nothing was written: a request that was lost may take effect later."""
    engine.errors = [OutcomeUnknown("no answer")] * 1000
    engine.may.set()
    asked = [Asked("a"), Asked("b")]
    ledger.submit_all(asked)
    assert outcomes(asked) == ["OutcomeUnknown"] * 2
    assert len(engine.written) < 10, "pauses instead of asking again and again"
    engine.errors = []


@pytest.mark.rule("SK-9")
def test_an_update_that_may_be_written_is_not_told_as_one_that_was_not(engine: Gated, ledger: Ledger) -> None:
    """Its rule reads the log once an answer was lost, and the store may be away by then."""

    class Rereading(Asked):
        writes = 0

        def write(self) -> Write:
            self.writes += 1
            if self.writes > 1:
                raise AWAY
            return super().write()

    engine.errors = [OutcomeUnknown("no answer")]
    engine.may.set()
    asked = [Rereading("a"), Asked("b")]
    ledger.submit_all(asked)
    assert outcomes(asked) == ["OutcomeUnknown", "b"]


@pytest.mark.parametrize("part", ["write", "answered"])
def test_what_goes_wrong_with_one_ask_is_its_own_failure(engine: Gated, ledger: Ledger, part: str) -> None:
    asked = [Asked("a"), Broken("b", part), Asked("c")]
    engine.may.set()
    ledger.submit_all(asked)
    assert outcomes(asked) == ["a", "ZeroDivisionError", "c"]


@pytest.mark.parametrize("error", [AWAY, FULL, UnusableStore("read-only")])
def test_while_the_engine_takes_nothing_those_who_wait_are_told_and_the_lasting_is_kept(
    engine: Gated, ledger: Ledger, errors: ErrorPolicy, error: Exception
) -> None:
    engine.errors = [error] * 10
    waiting, lasting = Asked("a"), Asked("b", lasting=True)
    ledger.submit_all([waiting, lasting])
    engine.may.set()
    assert outcomes([waiting, lasting]) == [type(error).__name__, "b"]
    assert engine.written == [["a", "b"], *[["b"]] * 10]
    later = Asked("c")
    ledger.submit(later)
    assert outcomes([later]) == ["c"]
    assert errors.troubles == ()


def test_that_something_is_kept_is_seen(
    engine: Gated, ledger: Ledger, errors: ErrorPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, failed = threading.Event(), errors.failed

    def noted(loop: str, error: BaseException) -> float:
        pause_s = failed(loop, error)
        seen.set()
        return pause_s

    monkeypatch.setattr(errors, "failed", noted)
    engine.poison = {"a": FULL}
    engine.may.set()
    ledger.submit(Asked("a", lasting=True))
    assert seen.wait(PATIENCE_S)
    assert [(each.loop, each.error) for each in errors.troubles] == [("ledger", "QuotaExceeded('full')")]
    engine.poison = {}


def test_what_is_kept_keeps_its_place_before_what_follows_of_the_same_task(
    engine: Gated, ledger: Ledger
) -> None:
    engine.errors = [FULL] * 3
    first, second = Asked("a", lasting=True), Asked("a", lasting=True)
    done: list[str] = []
    first.future.add_done_callback(lambda _: done.append("first"))
    second.future.add_done_callback(lambda _: done.append("second"))
    ledger.submit_all([first, second])
    engine.may.set()
    outcomes([first, second])
    assert done == ["first", "second"]


@pytest.mark.parametrize("end", ["flush", "close"])
def test_who_ends_does_not_wait_for_an_engine_that_stays_away(
    engine: Gated, ledger: Ledger, end: str
) -> None:
    engine.poison = {"a": AWAY}
    engine.may.set()
    lasting = Asked("a", lasting=True)
    ledger.submit(lasting)
    getattr(ledger, end)()
    assert isinstance(lasting.future.exception(0), RegistryUnavailable)


def test_who_has_given_up_waiting_ends_nothing(engine: Gated, ledger: Ledger) -> None:
    asked = [Asked("a"), Asked("b")]
    ledger.submit_all(asked)
    engine.has_begun.wait()
    assert asked[0].future.cancel()
    engine.may.set()
    assert outcomes(asked[1:]) == ["b"]
    later = Asked("c")
    ledger.submit(later)
    assert outcomes([later]) == ["c"]
