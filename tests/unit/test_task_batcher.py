"""The one writer of a process: whoever stops can wait for what was asked before."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, cast
from unittest.mock import Mock

import pytest

from rebalanser.core.tasks.failures import ErrorKind
from rebalanser.core.tasks.model import Head, Task
from rebalanser.core.tasks.store import Applied, Enqueue
from rebalanser.core.tasks.writes import (
    Apply,
    FirstError,
    PendingEnqueue,
    PendingWrite,
    Settlement,
    Sleep,
)
from rebalanser.errors import (
    InternalError,
    InvalidState,
    OutcomeUnknown,
    QuotaExceeded,
    RegistryUnavailable,
    RequestTooLarge,
    UnusableStore,
)
from rebalanser.runtime.clock import SystemClock
from rebalanser.tasks.batcher import WriteBatcher, on_settled, result_of
from rebalanser.tasks.loops import ErrorPolicy
from rebalanser.testing.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from rebalanser.core.tasks.model import Stored, TaskId
    from rebalanser.core.tasks.store import Answer, Write
    from rebalanser.tasks.engine import Engine


class Asked(PendingWrite[str]):
    """Settled by the first answer."""

    def __init__(self, task: str, *, lasting: bool = False, after: Sequence[str] = ()) -> None:
        super().__init__(task, lasting=lasting)
        self.after = after

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
        self.begun = threading.Semaphore(0)
        """Counts the calls."""
        self.may = threading.Event()
        self.errors: list[BaseException] = []
        """Raised by the next calls, whatever they write."""
        self.poison: dict[str, BaseException] = {}
        """Raised by each call that writes one of these."""
        self.written: list[list[str]] = []
        """What each call was to write."""
        self.writers: list[threading.Thread] = []
        """The thread of each call."""
        self.meeting: threading.Barrier | None = None
        """Where calls wait for each other."""

    def apply(self, writes: Sequence[Write], _timeout_s: float) -> Sequence[Answer]:
        tasks = cast("Sequence[str]", writes)
        self.writers.append(threading.current_thread())
        self.written.append(list(tasks))
        self.has_begun.set()
        self.begun.release()
        self.may.wait()
        if self.meeting is not None:
            self.meeting.wait(PATIENCE_S)
        if self.errors:
            raise self.errors.pop(0)
        for task in tasks:
            if task in self.poison:
                raise self.poison[task]
        return [Applied(1) if isinstance(each, Enqueue) else cast("Answer", each) for each in writes]

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
    monkeypatch.setattr(policy, "failed", lambda loop, error, **_: 0.0 * failed(loop, error))
    return policy


@pytest.fixture
def batcher(engine: Gated, errors: ErrorPolicy) -> Iterator[WriteBatcher]:
    made = WriteBatcher(cast("Engine", engine), "work", 0.0, errors)
    yield made
    engine.may.set()
    made.close()


@pytest.fixture
def wide(engine: Gated, errors: ErrorPolicy) -> Iterator[WriteBatcher]:
    """A batcher that writes two batches at the same time."""
    made = WriteBatcher(cast("Engine", engine), "work", 0.0, errors, max_in_flight=2)
    yield made
    engine.may.set()
    made.close()


def begin(batcher: WriteBatcher, asked: Sequence[PendingWrite[str]]) -> threading.Thread:
    """Write in a thread that waits for the outcome."""
    thread = threading.Thread(target=batcher.write_all, args=(asked,), daemon=True)
    thread.start()
    return thread


def outcomes(asked: Sequence[PendingWrite[str]]) -> list[str]:
    """What became of each: its result, or the name of its error."""
    found: list[str] = []
    for each in asked:
        try:
            found.append(result_of(each, PATIENCE_S))
        except Exception as error:
            found.append(type(error).__name__)
    return found


@pytest.mark.rule("SK-15")
def test_what_was_asked_before_is_known_after_a_flush(engine: Gated, batcher: WriteBatcher) -> None:
    asked = [Asked("a"), Asked("b"), Asked("a")]
    batcher.submit(asked[0])
    engine.has_begun.wait()
    batcher.submit_all(asked[1:])  # one waits for the other, which is about the same task
    engine.may.set()
    batcher.flush()
    assert [each.future.done() and each.future.result() for each in asked] == ["a", "b", "a"]


@pytest.mark.rule("SK-15")
def test_a_flush_waits_for_what_the_outcomes_call(engine: Gated, batcher: WriteBatcher) -> None:
    """What is told of an outcome, such as that a write was refused, must not be lost with the process."""
    begun, told = threading.Event(), []
    asked = Asked("a")

    def tell(_: object) -> None:
        begun.set()
        wait_until(lambda: batcher._batches.flushes, "a flush")
        told.append("a")

    asked.future.add_done_callback(tell)
    engine.may.set()
    batcher.submit(asked)
    assert begun.wait(PATIENCE_S)
    batcher.flush()
    assert told == ["a"]


@pytest.mark.rule("SK-15")
def test_a_flush_waits_for_what_follows_from_an_outcome(engine: Gated, batcher: WriteBatcher) -> None:
    """A completion that the engine can't take is followed by a failure, which must not be lost either."""
    asked, follows, ended = Asked("a"), Asked("a"), []
    engine.poison = {"a": TOO_LARGE}

    def follow(_: object) -> None:
        engine.may.clear()
        engine.poison = {}
        batcher.submit(follows)

    asked.future.add_done_callback(follow)
    batcher.submit(asked)
    flushing = threading.Thread(target=lambda: (batcher.flush(), ended.append(follows.settled)))
    flushing.start()
    wait_until(lambda: batcher._batches.flushes, "a flush")
    engine.may.set()
    flushing.join(0.05)
    assert ended == []
    engine.may.set()
    flushing.join(PATIENCE_S)
    assert ended == [True]


def test_where_nothing_is_asked_a_flush_is_over_at_once(batcher: WriteBatcher) -> None:
    batcher.flush()


TOO_LARGE = RequestTooLarge("5 MB")
AWAY = RegistryUnavailable("away")
FULL = QuotaExceeded("full")


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("error", [TOO_LARGE, InternalError("refused a statement"), TypeError("no bytes")])
@pytest.mark.parametrize("where", [0, 63, 99])
def test_what_the_engine_can_not_take_fails_alone(
    engine: Gated, batcher: WriteBatcher, error: Exception, where: int
) -> None:
    asked = [Asked(f"{number:02}") for number in range(100)]
    engine.poison = {f"{where:02}": error}
    engine.may.set()
    batcher.submit_all(asked)
    expected = [each.task for each in asked]
    expected[where] = type(error).__name__
    assert outcomes(asked) == expected
    assert len(engine.written) <= 16, "halves, not one by one"


@pytest.mark.rule("SK-15")
def test_all_that_the_engine_can_not_take_is_found(engine: Gated, batcher: WriteBatcher) -> None:
    asked = [Asked(str(number)) for number in range(9)]
    engine.poison = dict.fromkeys("1278", TOO_LARGE)
    engine.may.set()
    batcher.submit_all(asked)
    told = ["RequestTooLarge" if each.task in "1278" else each.task for each in asked]
    assert outcomes(asked) == told


@pytest.mark.rule("SK-15")
def test_a_batch_of_which_a_part_took_effect_is_written_again_and_split(
    engine: Gated, batcher: WriteBatcher
) -> None:
    """As an engine says it that was refused the second of its transactions."""
    engine.errors = [OutcomeUnknown("a part took effect")]
    engine.poison = {"b": TOO_LARGE}
    engine.may.set()
    asked = [Asked("a"), Asked("b"), Asked("c")]
    batcher.submit_all(asked)
    assert outcomes(asked) == ["a", "RequestTooLarge", "c"]


def test_who_gives_up_on_lost_answers_is_told_that_nobody_knows(engine: Gated, batcher: WriteBatcher) -> None:
    """Not that nothing was written: a request that was lost may take effect later."""
    engine.errors = [OutcomeUnknown("no answer")] * 1000
    engine.may.set()
    asked = [Asked("a"), Asked("b")]
    batcher.submit_all(asked)
    assert outcomes(asked) == ["OutcomeUnknown"] * 2
    assert len(engine.written) < 10, "pauses instead of asking again and again"
    engine.errors = []


@pytest.mark.rule("SK-9")
def test_an_update_that_may_be_written_is_not_told_as_one_that_was_not(
    engine: Gated, batcher: WriteBatcher
) -> None:
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
    batcher.submit_all(asked)
    assert outcomes(asked) == ["OutcomeUnknown", "b"]


@pytest.mark.rule("SK-9")
@pytest.mark.parametrize("error", [AWAY, FULL, UnusableStore("read-only")])
def test_a_write_whose_answer_was_lost_is_unknown_also_if_the_engine_takes_none_then(
    engine: Gated, batcher: WriteBatcher, error: Exception
) -> None:
    """The first request may take effect later: whoever is told of a full disk would write it once more."""
    engine.errors = [OutcomeUnknown("no answer"), error]
    engine.may.set()
    asked = [Asked("a")]
    batcher.submit_all(asked)
    assert outcomes(asked) == ["OutcomeUnknown"]


@pytest.mark.rule("SK-9")
def test_a_half_whose_answer_was_lost_is_unknown_also_if_the_other_half_is_refused(
    engine: Gated, batcher: WriteBatcher
) -> None:
    engine.errors = [TypeError("no bytes"), OutcomeUnknown("no answer"), FULL]
    engine.may.set()
    asked = [Asked("a"), Asked("b")]
    batcher.submit_all(asked)
    assert outcomes(asked) == ["OutcomeUnknown", "OutcomeUnknown"]


@pytest.mark.parametrize("part", ["write", "answered"])
def test_what_goes_wrong_with_one_ask_is_its_own_failure(
    engine: Gated, batcher: WriteBatcher, part: str
) -> None:
    asked = [Asked("a"), Broken("b", part), Asked("c")]
    engine.may.set()
    batcher.submit_all(asked)
    assert outcomes(asked) == ["a", "ZeroDivisionError", "c"]


@pytest.mark.parametrize("error", [AWAY, FULL, UnusableStore("read-only")])
def test_while_the_engine_takes_nothing_those_who_wait_are_told_and_the_lasting_is_kept(
    engine: Gated, batcher: WriteBatcher, errors: ErrorPolicy, error: Exception
) -> None:
    engine.errors = [error] * 10
    waiting, lasting = Asked("a"), Asked("b", lasting=True)
    batcher.submit_all([waiting, lasting])
    engine.may.set()
    assert outcomes([waiting, lasting]) == [type(error).__name__, "b"]
    assert engine.written == [["a", "b"], *[["b"]] * 10]
    later = Asked("c")
    batcher.submit(later)
    assert outcomes([later]) == ["c"]
    assert errors.troubles == ()


def test_that_something_is_kept_is_seen(
    engine: Gated, batcher: WriteBatcher, errors: ErrorPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, failed = threading.Event(), errors.failed

    def noted(loop: str, error: BaseException, **_named: object) -> float:
        pause_s = failed(loop, error)
        seen.set()
        return pause_s

    monkeypatch.setattr(errors, "failed", noted)
    engine.poison = {"a": FULL}
    engine.may.set()
    batcher.submit(Asked("a", lasting=True))
    assert seen.wait(PATIENCE_S)
    assert [(each.loop, each.error) for each in errors.troubles] == [("writer", "QuotaExceeded('full')")]
    engine.poison = {}


def test_what_is_kept_keeps_its_place_before_what_follows_of_the_same_task(
    engine: Gated, batcher: WriteBatcher
) -> None:
    engine.errors = [FULL] * 3
    first, second = Asked("a", lasting=True), Asked("a", lasting=True)
    done: list[str] = []
    first.future.add_done_callback(lambda _: done.append("first"))
    second.future.add_done_callback(lambda _: done.append("second"))
    batcher.submit_all([first, second])
    engine.may.set()
    outcomes([first, second])
    assert done == ["first", "second"]


@pytest.mark.parametrize("end", ["flush", "close"])
def test_who_ends_does_not_wait_for_an_engine_that_stays_away(
    engine: Gated, batcher: WriteBatcher, end: str
) -> None:
    engine.poison = {"a": AWAY}
    engine.may.set()
    lasting = Asked("a", lasting=True)
    batcher.submit(lasting)
    getattr(batcher, end)()
    assert isinstance(lasting.future.exception(), RegistryUnavailable)


@pytest.mark.rule("SK-19")
def test_the_future_of_a_write_is_settled_once_and_reports_to_each() -> None:
    asked = Asked("a")
    future = asked.future
    told: list[str] = []

    def fail(_: object) -> None:
        raise ZeroDivisionError

    on_settled(future, fail)
    on_settled(future, lambda done: told.append(done.result()))
    for timeout_s in (0, -0.5, -1):
        with pytest.raises(TimeoutError):
            result_of(asked, timeout_s)
    with pytest.raises(InternalError):
        future.result()
    future.set_result("written")
    with pytest.raises(InternalError):
        future.set_exception(ZeroDivisionError())
    on_settled(future, lambda done: told.append(done.result()))
    assert told == ["written", "written"]
    assert (future.result(), future.exception()) == ("written", None)


def test_who_waits_for_a_write_gets_its_error() -> None:
    asked, error = Asked("a"), ZeroDivisionError()
    waiter = threading.Thread(target=lambda: asked.future.set_exception(error))
    on_settled(asked.future, lambda _: None)
    waiter.start()
    with pytest.raises(ZeroDivisionError):
        result_of(asked, PATIENCE_S)
    assert asked.future.exception() is error
    waiter.join()


def test_a_callback_that_is_added_while_a_write_is_settled_is_called_once() -> None:
    for _ in range(500):
        asked, together = Asked("a"), threading.Barrier(2)
        called: list[int] = []
        adder = threading.Thread(target=add_three, args=(asked, together, called))
        adder.start()
        together.wait()
        asked.future.set_result("written")
        adder.join()
        assert sorted(called) == [0, 1, 2]


def add_three(asked: Asked, together: threading.Barrier, called: list[int]) -> None:
    together.wait()
    for number in range(3):
        asked.future.add_done_callback(lambda _, number=number: called.append(number))  # type: ignore[misc]


def test_a_caller_that_waits_and_is_alone_hands_over_to_nobody(engine: Gated, batcher: WriteBatcher) -> None:
    engine.may.set()
    for task in "abc":
        asked = [Asked(task)]
        batcher.write_all(asked)
        assert asked[0].settled
    assert engine.writers == [threading.current_thread()] * 3


ENQUEUE = Enqueue(Task(Head("a" * 40, "work", "send"), b"{}"), 0)


def test_an_enqueue_that_is_alone_is_written_by_its_caller(engine: Gated, batcher: WriteBatcher) -> None:
    engine.may.set()
    assert [batcher.enqueue(ENQUEUE) for _ in range(3)] == [Applied(1)] * 3
    assert engine.writers == [threading.current_thread()] * 3


def test_an_enqueue_beside_a_batch_joins_the_next_one(engine: Gated, batcher: WriteBatcher) -> None:
    begin(batcher, [Asked("first")])
    engine.has_begun.wait()
    batcher.submit(Asked("b"))
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(batcher.enqueue(ENQUEUE)), daemon=True)
    thread.start()
    wait_until(lambda: len(batcher._batches._waiting) == 2, "the enqueue")
    engine.may.set()
    thread.join(PATIENCE_S)
    assert answers == [Applied(1)]
    assert engine.written == [["first"], ["b", ENQUEUE]]


@pytest.mark.rule("SK-3")
@pytest.mark.parametrize("lost", [OutcomeUnknown("no answer"), AWAY])
def test_an_enqueue_whose_first_request_fails_is_written_again(
    engine: Gated, errors: ErrorPolicy, lost: Exception
) -> None:
    engine.errors = [lost]
    engine.may.set()
    batcher = WriteBatcher(cast("Engine", engine), "work", PATIENCE_S, errors)
    assert batcher.enqueue(ENQUEUE) == Applied(1)
    assert engine.written == [[ENQUEUE]] * 2
    assert engine.writers == [threading.current_thread()] * 2
    batcher.close()


@pytest.mark.rule("SK-3")
@pytest.mark.parametrize("error", [AWAY, FULL, UnusableStore("read-only")])
def test_an_enqueue_whose_first_answer_was_lost_stays_unknown(
    engine: Gated, batcher: WriteBatcher, error: Exception
) -> None:
    """A caller that reads that the engine took nothing would enqueue another task."""
    engine.errors = [OutcomeUnknown("no answer"), error]
    engine.may.set()
    with pytest.raises(OutcomeUnknown):
        batcher.enqueue(ENQUEUE)


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("error", [TOO_LARGE, FULL, TypeError("no bytes"), KeyboardInterrupt()])
def test_an_enqueue_that_fails_keeps_nobody_from_writing(
    engine: Gated, batcher: WriteBatcher, errors: ErrorPolicy, error: BaseException
) -> None:
    engine.errors = [error]
    engine.may.set()
    with pytest.raises(type(error)):
        batcher.enqueue(ENQUEUE)
    assert len(engine.written) == 1
    assert batcher.enqueue(ENQUEUE) == Applied(1)
    assert errors.troubles == ()


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("end", ["flush", "close"])
def test_who_ends_waits_for_an_enqueue_that_is_written(
    engine: Gated, batcher: WriteBatcher, end: str
) -> None:
    done: list[str] = []
    writing = threading.Thread(target=lambda: (batcher.enqueue(ENQUEUE), done.append("enqueue")))
    writing.start()
    engine.has_begun.wait()
    ending = threading.Thread(target=lambda: (getattr(batcher, end)(), done.append(end)))
    ending.start()
    ending.join(0.05)
    assert done == []
    engine.may.set()
    ending.join(PATIENCE_S)
    writing.join(PATIENCE_S)
    assert sorted(done) == sorted(["enqueue", end])


def test_what_is_closed_takes_no_enqueue(engine: Gated, batcher: WriteBatcher) -> None:
    engine.may.set()
    batcher.close()
    with pytest.raises(InvalidState):
        batcher.enqueue(ENQUEUE)
    assert engine.written == []


def test_the_time_of_a_write_counts_from_its_first_request() -> None:
    """A first request that has taken all the time is not followed by another."""
    pending = PendingEnqueue(ENQUEUE)
    script = Settlement([pending], 10.0, lambda: 100.0).script(FirstError(AWAY, began_at=90.0))
    with pytest.raises(RegistryUnavailable):
        next(script)
    script = Settlement([pending], 10.0, lambda: 99.0).script(FirstError(AWAY, began_at=90.0))
    assert isinstance(next(script), Sleep)
    assert script.send(None) == Apply([ENQUEUE])


def test_callers_that_come_while_one_writes_share_the_next_batch(
    engine: Gated, batcher: WriteBatcher
) -> None:
    begin(batcher, [Asked("first")])
    engine.has_begun.wait()
    asked = [Asked(str(number)) for number in range(20)]
    for each in asked:
        batcher.write_all([each])  # returns, as another thread is to write it
    engine.may.set()
    assert outcomes(asked) == [each.task for each in asked]
    assert engine.written == [["first"], [each.task for each in asked]]


def test_callers_wake_no_thread_that_could_not_write(
    engine: Gated, batcher: WriteBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the interpreter from the callers, look, and wait again."""
    first = begin(batcher, [Asked("first")])
    engine.has_begun.wait()
    notify = Mock(wraps=batcher._more.notify)
    monkeypatch.setattr(batcher._more, "notify", notify)
    asked = [Asked(str(number)) for number in range(4)]
    batcher.submit(asked[0])
    batcher.submit_all(asked[1:3])
    batcher.write_all(asked[3:])
    assert not notify.called
    engine.may.set()
    first.join(PATIENCE_S)
    assert notify.called
    assert outcomes(asked) == [each.task for each in asked]


def test_what_one_batch_does_not_hold_is_written_by_the_ledger_s_own_thread(
    engine: Gated, batcher: WriteBatcher
) -> None:
    engine.may.set()
    asked = [Asked("a"), Asked("b"), Asked("a")]
    batcher.write_all(asked)
    assert outcomes(asked) == ["a", "b", "a"]
    assert engine.written == [["a", "b"], ["a"]]
    assert engine.writers[0] is threading.current_thread() is not engine.writers[1]


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("error", [AWAY, FULL, TypeError("no bytes"), OutcomeUnknown("no answer")])
def test_a_caller_that_writes_is_told_and_the_ledger_goes_on(
    engine: Gated, batcher: WriteBatcher, errors: ErrorPolicy, error: Exception
) -> None:
    engine.poison = {"a": error}
    engine.may.set()
    asked = [Asked("a"), Asked("b")]
    batcher.write_all(asked)
    told = type(error).__name__
    assert outcomes(asked) == [told, "b" if isinstance(error, TypeError) else told]
    engine.poison = {}
    later = Asked("c")
    batcher.write_all([later])
    assert outcomes([later]) == ["c"]
    assert errors.troubles == ()


@pytest.mark.rule("SK-15")
def test_what_is_lasting_is_kept_for_the_ledger_s_own_thread(
    engine: Gated, batcher: WriteBatcher, errors: ErrorPolicy
) -> None:
    engine.errors = [FULL] * 3
    engine.may.set()
    lasting = Asked("a", lasting=True)
    batcher.write_all([lasting])  # does not wait for the engine to take something again
    assert outcomes([lasting]) == ["a"]
    assert [each is threading.current_thread() for each in engine.writers] == [True, False, False, False]
    batcher.flush()
    later = Asked("b")
    batcher.write_all([later])
    assert outcomes([later]) == ["b"]
    assert errors.troubles == ()


@pytest.mark.rule("SK-15")
def test_who_waits_beside_what_is_kept_does_not_ask_an_engine_that_rests(
    engine: Gated, batcher: WriteBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause after an error is one of all writers: callers must not query a full store again."""
    paused, goes_on = threading.Event(), threading.Event()

    def pause(_: float) -> None:
        paused.set()
        goes_on.wait()

    monkeypatch.setattr(batcher._loops[0], "pause", pause)
    engine.errors = [FULL]
    engine.may.set()
    asked = [Asked("a", lasting=True), Asked("b")]
    batcher.submit(asked[0])
    paused.wait()
    batcher.write_all(asked[1:])
    assert len(engine.written) == 1
    goes_on.set()
    assert outcomes(asked) == ["a", "b"]
    assert threading.current_thread() not in engine.writers


@pytest.mark.rule("SK-15")
def test_an_error_nobody_foresaw_counts_whoever_wrote(
    engine: Gated, batcher: WriteBatcher, errors: ErrorPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.may.set()

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(Settlement, "script", broken)
        asked = Asked("a")
        batcher.write_all([asked])
        assert outcomes([asked]) == ["ZeroDivisionError"]
        assert [(each.loop, each.attempts) for each in errors.troubles] == [("writer", 1)]
    batcher.write_all([Asked("b")])
    assert errors.troubles == ()


@pytest.mark.rule("SK-15")
def test_a_caller_that_is_interrupted_keeps_nobody_from_writing(
    engine: Gated, batcher: WriteBatcher, errors: ErrorPolicy
) -> None:
    engine.errors = [KeyboardInterrupt()]
    engine.may.set()
    asked = Asked("a")
    with pytest.raises(KeyboardInterrupt):
        batcher.write_all([asked])
    assert asked.settled
    later = [Asked("a"), Asked("b")]
    batcher.submit(later[0])
    batcher.write_all(later[1:])
    assert outcomes(later) == ["a", "b"]
    assert errors.troubles == ()


@pytest.mark.parametrize("end", ["flush", "close"])
def test_who_ends_waits_for_a_caller_that_writes(engine: Gated, batcher: WriteBatcher, end: str) -> None:
    asked = Asked("a")
    begin(batcher, [asked])
    engine.has_begun.wait()
    ended: list[bool] = []
    ending = threading.Thread(target=lambda: (getattr(batcher, end)(), ended.append(asked.settled)))
    ending.start()
    ending.join(0.05)
    assert ended == []
    engine.may.set()
    ending.join(PATIENCE_S)
    assert ended == [True]


def test_what_is_lasting_is_kept_after_a_flush_that_was_interrupted(
    engine: Gated, batcher: WriteBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(batcher._more, "wait_for", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            batcher.flush()
    engine.errors = [FULL]
    engine.may.set()
    lasting = Asked("a", lasting=True)
    batcher.submit(lasting)
    assert outcomes([lasting]) == ["a"]


@pytest.mark.rule("SK-15")
def test_a_trouble_of_any_batch_is_over_once_another_is_written(
    engine: Gated, wide: WriteBatcher, errors: ErrorPolicy
) -> None:
    """By whichever thread: one that has nothing more to write would be in trouble for ever."""
    engine.may.set()
    wide._loops[1].failed(FULL)
    assert [each.kind for each in errors.troubles] == [ErrorKind.OUTAGE]
    wide.write_all([Asked("a")])
    assert errors.troubles == ()


def test_what_is_closed_takes_nothing_from_a_caller_that_waits(engine: Gated, batcher: WriteBatcher) -> None:
    engine.may.set()
    batcher.close()
    with pytest.raises(InvalidState):
        batcher.write_all([Asked("a")])
    assert engine.written == []


def test_batches_about_different_tasks_are_in_flight_together(engine: Gated, wide: WriteBatcher) -> None:
    engine.meeting = threading.Barrier(2)
    asked = [Asked("a"), Asked("b")]
    wide.submit(asked[0])
    engine.has_begun.wait()
    engine.may.set()
    wide.write_all(asked[1:])
    assert outcomes(asked) == ["a", "b"]


@pytest.mark.parametrize(
    "second", [Asked("a"), Asked("b", after=["a"])], ids=["the same task", "one that comes after it"]
)
def test_what_concerns_a_task_in_flight_waits_for_it(
    engine: Gated, wide: WriteBatcher, second: Asked
) -> None:
    first, other, last = Asked("a"), Asked("c"), Asked(second.task)
    begin(wide, [first])
    engine.has_begun.wait()
    wide.submit_all([second, last])
    wide.write_all([other])
    for _ in range(2):
        assert engine.begun.acquire(timeout=PATIENCE_S)
    assert engine.written == [["a"], ["c"]]
    engine.may.set()
    assert outcomes([first, second, last, other]) == ["a", second.task, last.task, "c"]
    assert engine.written[2:] == [[second.task], [last.task]]


@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_many_callers_are_all_told_and_each_task_keeps_its_order(
    engine: Gated, errors: ErrorPolicy, max_in_flight: int
) -> None:
    """Also while every tenth call fails, and no task is ever in two calls at the same time."""
    engine.may.set()
    calls = count()
    inside: set[str] = set()
    done: dict[str, list[int]] = {}
    every: list[Asked] = []
    apply = engine.apply

    def checked(writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        tasks = cast("Sequence[str]", writes)
        assert inside.isdisjoint(tasks)
        inside.update(tasks)
        try:
            if next(calls) % 10 == 9:
                raise AWAY
            return apply(writes, timeout_s)
        finally:
            inside.difference_update(tasks)

    engine.apply = checked  # type: ignore[method-assign]
    batcher = WriteBatcher(cast("Engine", engine), "work", 0.0, errors, max_in_flight)

    def caller(name: str) -> None:
        for number in range(200):
            asked = Asked(name, lasting=True)
            asked.future.add_done_callback(lambda _, number=number: done[name].append(number))
            every.append(asked)
            (batcher.submit if number % 3 else lambda pending: batcher.write_all([pending]))(asked)

    threads = [threading.Thread(target=caller, args=(str(number),), daemon=True) for number in range(8)]
    for number, thread in enumerate(threads):
        done[str(number)] = []
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert all(result_of(each, PATIENCE_S) for each in every)
    batcher.close()
    assert all(each == list(range(200)) for each in done.values())
    assert errors.troubles == ()
