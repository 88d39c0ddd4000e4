"""How bodies are called, found by another process, and told to end."""

from __future__ import annotations

import asyncio
import math
import pickle
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, cast
from zoneinfo import ZoneInfo

import pytest
from pydantic import AfterValidator
from pydantic_core import from_json

from rebalanser.core.tasks.model import Head, Update
from rebalanser.errors import (
    Fenced,
    InvalidArgument,
    InvalidHandlers,
    InvalidState,
    InvalidTask,
    RequestTooLarge,
)
from rebalanser.runtime.clock import SystemClock
from rebalanser.runtime.owned import StopRequest
from rebalanser.tasks import AsyncClaim, Claim, GiveUp, Queue, Retry
from rebalanser.tasks import child_process as child
from rebalanser.tasks import processes as caller
from rebalanser.tasks.async_claim import BodySupervisor
from rebalanser.tasks.child_process import (
    BodyFailed,
    ChildClaim,
    ChildRequest,
    DeadlineRequest,
    LogRequest,
    RenewalRequest,
    RunBody,
    UpdateRequest,
)
from rebalanser.tasks.claim import ClaimFacts, read_log
from rebalanser.tasks.execution.bodies import BodyCall, BodyWaits, ThreadCaller
from rebalanser.tasks.execution.outcomes import (
    MAX_ERROR,
    MAX_MESSAGE,
    BodyOutcome,
    Cut,
    Raised,
    Returned,
    raised,
    returned,
    split_error,
)
from rebalanser.tasks.functions import TaskBody, TaskOptions, body_at, reference_of
from rebalanser.tasks.loops import ErrorPolicy
from rebalanser.tasks.processes import ChildProcess, ProcessCaller
from rebalanser.testing.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

FACTS = ClaimFacts("0" * 40, "mail", "send", 3, 2, 77)
FOREVER_S = 3600.0


def send(claim: Claim, to: str = "a") -> str:
    """What stands at the top of a module."""
    return to


def leave(claim: Claim) -> None:
    raise SystemExit(3)


class Home:
    @staticmethod
    def post(claim: Claim) -> None: ...

    def write(self, claim: Claim) -> None: ...


def body_of(function: Any, name: str = "send") -> TaskBody:
    return TaskBody(function, name, TaskOptions())


class FakeClaim:
    """What a caller looks at."""

    def __init__(self, lasts_s: float = FOREVER_S) -> None:
        self.stop_requested = StopRequest()
        self.deadline = time.monotonic() + lasts_s
        self.held = SimpleNamespace(holder="holder")
        self.task_id, self.queue, self.name = FACTS.task_id, FACTS.queue, FACTS.name
        self.is_completed_within = False


def job_of(function: Any = send, claim: FakeClaim | None = None) -> BodyCall:
    return BodyCall(
        body_of(function), cast("Any", claim or FakeClaim()), Head("0" * 40, "mail", "send"), b"{}", {}
    )


@pytest.mark.parametrize("function", [send, Home.post])
def test_a_function_at_the_top_is_found_at_its_place(function: Any) -> None:
    place = reference_of(body_of(function))
    assert place == f"{__name__}:{function.__qualname__}"
    assert body_at(place, "send").function is function


def test_a_function_that_was_decorated_is_found_as_it_was_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Queue("mail", f"memory://{tmp_path}", state_folder=tmp_path) as queue:

        def decorated(claim: Claim) -> None: ...

        decorated.__qualname__ = "decorated"
        registered = queue.task()(decorated)
        monkeypatch.setitem(globals(), "decorated", registered)
        place = reference_of(registered.body)
        assert body_at(place, "decorated") is registered.body


def test_what_no_other_process_can_import_is_refused_by_its_name() -> None:
    def nested(claim: Claim) -> None: ...

    here = "test_what_no_other_process_can_import_is_refused_by_its_name.<locals>."
    named = {f"{here}nested": nested, f"{here}<lambda>": lambda claim: None, "Home.write": Home().write}
    for name, function in named.items():
        refused = re.escape(f"task 'odd': no other process can import {name}; a function")
        with pytest.raises(InvalidHandlers, match=refused):
            reference_of(body_of(function, "odd"))
    calling = ProcessCaller({"odd": body_of(nested, "odd")}, policy())
    with pytest.raises(InvalidHandlers, match="task 'odd': no other process can import"):
        calling.open()


def policy() -> ErrorPolicy:
    def end() -> None:
        raise AssertionError("the process is not to end")

    return ErrorPolicy("work", SystemClock(), end)


@pytest.mark.rule("SK-15", "SK-19")
def test_a_host_that_gives_no_process_is_a_trouble_until_it_gives_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = policy()
    calling, job = (
        ProcessCaller({}, errors),
        cast("BodyCall", SimpleNamespace(claim=None, payload=b"", head=Head)),
    )
    pauses: list[float] = []
    monkeypatch.setattr(caller.time, "sleep", pauses.append)
    begun = SimpleNamespace(ready=Future(), is_alive=False, call=lambda *_: ended, kill=lambda: None)
    ended: Future[Returned] = Future()
    ended.set_result(Returned(b"1"))
    monkeypatch.setattr(calling, "_watch", SimpleNamespace(until=lambda *_: None))
    answers: list[Any] = [*[BlockingIOError(11, "Resource temporarily unavailable")] * 50, begun, begun]

    def started() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(calling, "_started", started)
    assert [calling.call(job) for _ in range(50)] == [Cut.STOPPED] * 50
    (trouble,) = errors.troubles
    assert (trouble.loop, trouble.attempts) == ("processes", 50)
    assert "Resource temporarily unavailable" in trouble.error
    assert len(pauses) == 50
    assert min(pauses) >= caller.START_PAUSE_S
    begun.ready.set_exception(InvalidHandlers("can't import"))
    assert calling.call(job) is Cut.STOPPED
    assert "can't import" in errors.troubles[0].error
    begun.ready = Future()
    begun.ready.set_result(None)
    assert calling.call(job) == Returned(b"1")
    assert errors.troubles == ()
    calling.close()


@pytest.mark.parametrize("place", [f"{__name__}:absent", f"{__name__}:FOREVER_S"])
def test_a_place_without_a_function_is_refused(place: str) -> None:
    with pytest.raises(InvalidHandlers, match=f"there is no function {place}"):
        body_at(place, "send")


def test_a_child_works_on_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    child.refuse_in_child()
    monkeypatch.setattr(child, "_pipes", [object()])
    with pytest.raises(InvalidState, match="__main__"):
        child.refuse_in_child()


@pytest.mark.rule("SK-15")
def test_a_body_that_wants_to_exit_has_failed() -> None:
    assert ThreadCaller().call(job_of()) == Returned(b'"a"')
    outcome = ThreadCaller().call(job_of(leave))
    assert isinstance(outcome, Raised)
    assert isinstance(outcome.error, SystemExit)
    assert outcome.text.endswith("SystemExit: 3")


def test_what_is_returned_is_json_or_nothing() -> None:
    assert returned(None) == Returned(None)
    assert returned({"a": 1}) == Returned(b'{"a":1}')
    outcome = returned(object())
    assert isinstance(outcome, Raised)
    assert isinstance(outcome.error, GiveUp)


def count(claim: Claim, it: Any = "x") -> int:
    return it  # type: ignore[no-any-return] # the caller chooses


def explode(_given: object) -> object:
    raise RuntimeError("validators do what they like")


def test_a_result_that_does_not_fit_the_return_type_fails_the_body() -> None:
    """Else the task would be complete, and everybody who waits for it would fail."""
    counting = body_of(count, "count")
    assert returned(5, counting) == Returned(b"5")
    assert returned("5", counting) == Returned(b'"5"'), "wait makes 5 of it"
    for wrong in ("x", None, [5], {"a": 1}):
        outcome = returned(wrong, counting)
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.error, GiveUp)
        assert str(outcome.error).startswith("count: the result does not fit its type: must be a valid int")
    assert returned("x", body_of(leave)) == Returned(b'"x"'), "of a function that says it returns None"

    def broken(claim: Claim) -> Annotated[int, AfterValidator(explode)]: ...

    outcome = returned(5, body_of(broken, "broken"))
    assert isinstance(outcome, Raised)
    assert "broken: the result can't be checked: RuntimeError(" in str(outcome.error)


def test_a_result_is_written_by_the_return_type_if_only_that_knows_how() -> None:
    """An argument of such a type could be passed, and a body that returned it was dead after its work."""
    home = ZoneInfo("Europe/Rome")

    def zone(claim: Claim) -> ZoneInfo: ...  # type: ignore[empty-body]

    def zones(claim: Claim) -> list[ZoneInfo]: ...  # type: ignore[empty-body]

    def by_name(claim: Claim) -> dict[str, list[ZoneInfo]]: ...  # type: ignore[empty-body]

    def weighed(claim: Claim) -> tuple[ZoneInfo, float | None]: ...  # type: ignore[empty-body]

    weightless = returned((home, math.nan), body_of(weighed))
    assert isinstance(weightless, Raised)
    assert "can't represent NaN" in str(weightless.error), "it is not None"
    assert returned(home, body_of(zone)) == Returned(b'"Europe/Rome"')
    assert body_of(zones).value(b'["Europe/Rome"]') == [home]
    assert returned([home], body_of(zones)) == Returned(b'["Europe/Rome"]')
    for value, body in (
        (home, None),
        (home, body_of(count)),
        (object(), body_of(zone)),
        (iter([home, home]), body_of(zones)),
        ({"a": iter([home, home])}, body_of(by_name)),
    ):
        outcome = returned(value, body)
        assert isinstance(outcome, Raised)
        assert "Unable to serialize unknown type" in str(outcome.error)


@pytest.mark.rule("SK-15")
def test_a_body_in_a_process_is_failed_by_its_result_too() -> None:
    begun = child._BodyServer(cast("Any", None), {"send": body_of(count)})
    failed = begun._called(RunBody(FACTS, math.inf, b"{}", 8000))
    assert isinstance(failed, BodyFailed)
    assert "the result does not fit its type" in failed.text
    assert begun._called(RunBody(FACTS, math.inf, b'{"it": 5}', 8000)) == Returned(b"5")


def test_of_an_error_the_frames_of_the_user_are_kept() -> None:
    async def deep(claim: Claim) -> None:
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 0.0)
        except TimeoutError as error:
            raise ExceptionGroup("all of it", [ValueError("broken")]) from error

    outcome = ThreadCaller().call(job_of(deep))
    assert isinstance(outcome, Raised)
    assert outcome.text.count('File "') == 2, outcome.text
    assert outcome.text.count(__file__) == 2
    assert "TimeoutError" in outcome.text
    assert "ValueError: broken" in outcome.text


@pytest.mark.parametrize("value", [float("nan"), [1.0, float("inf")], {"NaN": float("-inf")}])
def test_a_number_that_json_has_no_word_for_is_refused_by_its_name(value: object) -> None:
    outcome = returned(value)
    assert isinstance(outcome, Raised)
    assert isinstance(outcome.error, GiveUp)
    assert str(outcome.error) == "the result is not JSON, which can't represent NaN and infinities"
    assert returned("NaN, Infinity") == Returned(b'"NaN, Infinity"')


def nested(levels: int) -> Any:
    """An array and an object in each other by turns."""
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.rule("SK-15", "SK-19")
@pytest.mark.parametrize(
    "value", [nested(201), nested(250), nested(300), 10**5000], ids=["201", "250", "300", "long number"]
)
def test_a_result_that_could_not_be_read_again_is_refused(value: Any) -> None:
    """Else the task would be complete, and everybody who wants its result would fail."""
    outcome = returned(value)
    assert isinstance(outcome, Raised)
    assert isinstance(outcome.error, GiveUp)
    assert str(outcome.error).startswith("the result is not JSON")
    assert "NaN" not in str(outcome.error)


def test_a_result_that_can_be_read_again_is_not() -> None:
    for value in (nested(200), [[]] * 300, 10**4000):
        outcome = returned(value)
        assert isinstance(outcome, Returned)
        assert from_json(outcome.result or b"") == value


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("delay_s", [-1.0, float("inf"), float("nan"), 1e300, "5", None])
def test_a_pause_that_no_clock_can_wait_for_is_refused(delay_s: Any) -> None:
    with pytest.raises(InvalidArgument, match="it must be a number of seconds from 0 to 315576000"):
        Retry("later", delay_s=delay_s)
    assert Retry("later", delay_s=0).delay_s == 0


def test_the_beginning_of_a_long_message_is_kept() -> None:
    outcome = raised(ValueError("x" * MAX_ERROR + "end"))
    assert outcome.text == "ValueError: ".ljust(MAX_MESSAGE, "x")


def test_of_many_frames_the_last_are_kept_and_the_type() -> None:
    def deep(left: int) -> None:
        deep(left - 1) if left % 2 else again(left - 1)

    def again(left: int) -> None:
        if left < 0:
            raise LookupError("no such\nthing" + "x" * MAX_ERROR)
        deep(left) if left % 2 else again(left - 1)

    with pytest.raises(LookupError) as caught:
        deep(200)
    text = raised(caught.value).text
    assert len(text) <= MAX_ERROR
    assert text.startswith("  ")
    assert "raise LookupError(" in text
    assert split_error(text) == ("LookupError", "no such")


def test_an_error_is_split_into_its_type_and_its_message() -> None:
    class Strange(Exception):
        pass

    def chained() -> None:
        try:
            int("first")
        except ValueError as error:
            raise Strange("second: third") from error

    with pytest.raises(Strange) as caught:
        chained()
    kind, message = split_error(raised(caught.value).text)
    assert (kind.rpartition(".")[2], message) == ("Strange", "second: third")
    with pytest.raises(InvalidTask) as refused:
        job_of().body.arguments(b"{")
    text = raised(refused.value.with_traceback(None)).text
    assert 'File "' not in text, "no frame is the user's"
    kind, message = split_error(text)
    assert kind == "rebalanser.errors.InvalidTask", "and not that of the error that it comes from"
    assert "it is not JSON" in message
    assert split_error(raised(KeyboardInterrupt()).text) == ("KeyboardInterrupt", "")
    assert split_error(raised(TimeoutError("too late")).text) == ("TimeoutError", "too late")
    assert split_error("the last try was cut off: it is over") == ("", "the last try was cut off: it is over")
    assert split_error("") == ("", "")


@pytest.mark.parametrize("is_raised", [False, True])
def test_a_group_of_errors_is_split_too(is_raised: bool) -> None:
    """As of a coroutine with a task group, whose tasks have frames of their own."""
    errors: list[Exception] = []
    for number in range(2):
        try:
            int(f"number {number}")
        except ValueError as error:
            errors.append(error)
    group = ExceptionGroup("several", errors)
    if is_raised:
        with pytest.raises(ExceptionGroup):
            raise group
    text = raised(group).text
    assert split_error(text) == ("ExceptionGroup", "several (2 sub-exceptions)")
    group.__cause__ = errors[0]
    assert split_error(raised(group).text) == ("ExceptionGroup", "several (2 sub-exceptions)")
    long = raised(ExceptionGroup("several", [*errors, ValueError("x" * MAX_ERROR)])).text
    assert len(long) == MAX_ERROR
    assert split_error(long) == ("ExceptionGroup", "several (3 sub-exceptions)")
    plain = ValueError("plain")
    plain.__cause__ = group
    assert split_error(raised(plain).text) == ("ValueError", "plain")


def test_a_wish_to_be_tried_again_can_be_sent() -> None:
    sent = pickle.loads(pickle.dumps(Retry("later", delay_s=3.0)))
    assert (str(sent), sent.delay_s) == ("later", 3.0)


@pytest.mark.rule("SK-8", "SK-15")
def test_a_body_is_ended_for_the_first_reason_that_is_there() -> None:
    ended: Future[None] = Future()
    watch = BodyWaits()
    assert watch.until(job_of(), ended, 0.0) is Cut.TIMED_OUT
    assert watch.until(job_of(claim=FakeClaim(lasts_s=-1.0)), ended, 0.0) is Cut.LOST
    lost = FakeClaim()
    lost.stop_requested.set()
    assert watch.until(job_of(claim=lost), ended) is Cut.LOST
    watch.stop()
    assert watch.until(job_of(), ended) is Cut.STOPPED
    ended.set_result(None)
    assert watch.until(job_of(claim=lost), ended) is None


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("reason", [None, Cut.LOST, Cut.STOPPED])
def test_who_waits_for_a_body_is_woken(reason: Cut | None) -> None:
    ended: Future[None] = Future()
    claim, watch = FakeClaim(), BodyWaits()
    told: Future[Cut | None] = Future()
    waiting = threading.Thread(
        target=lambda: told.set_result(watch.until(job_of(claim=claim), ended, FOREVER_S))
    )
    waiting.start()
    match reason:
        case Cut.LOST:
            claim.stop_requested.set()
        case Cut.STOPPED:
            watch.stop()
        case _:
            ended.set_result(None)
    assert told.result(PATIENCE_S) is reason
    waiting.join()


@pytest.mark.rule("SK-6")
def test_the_claim_of_a_child_asks_its_worker() -> None:
    asked: list[ChildRequest] = []
    later = time.monotonic() + FOREVER_S
    answers = {
        UpdateRequest: 4,
        LogRequest: (Update(3, 0, b"a"),),
        RenewalRequest: False,
        DeadlineRequest: later,
    }

    def ask(ask: ChildRequest, timeout_s: float | None = None) -> Any:
        asked.append(ask)
        return () if ask == LogRequest(3, 1) else answers[type(ask)]

    claim = ChildClaim(FACTS, 0.0, ask, 1)
    assert (claim.task_id, claim.queue, claim.name) == ("0" * 40, "mail", "send")
    assert (claim.number, claim.failures, claim.token) == (3, 2, 77)
    assert claim.update(b"a") == 4
    assert list(claim.log(3)) == [Update(3, 0, b"a")]
    assert claim.renew() is False
    assert claim.still_mine(), "the worker knows of a later deadline"
    assert claim.still_mine(), "and is not asked again before that"
    assert asked == [
        UpdateRequest(b"a"),
        LogRequest(3, 0),
        LogRequest(3, 1),
        RenewalRequest(),
        DeadlineRequest(),
    ]
    with pytest.raises(InvalidState, match="complete_in needs a body that runs in a thread"):
        claim.complete_in(cast("Any", None))
    claim.stop_requested.set()
    assert not claim.still_mine()


@pytest.mark.rule("SK-9")
def test_a_child_sends_nothing_that_is_over_the_limit() -> None:
    """The worker would have to read it whole before it could refuse it."""

    def ask(ask: ChildRequest, timeout_s: float | None = None) -> Any:
        raise AssertionError(ask)

    claim = ChildClaim(FACTS, 0.0, ask, 8)
    with pytest.raises(RequestTooLarge, match="an update has 9 bytes; the limit is 8"):
        claim.update(b"x" * 9)
    with pytest.raises(InvalidArgument, match="must be bytes"):
        claim.update("text")  # type: ignore[arg-type]
    assert child._sendable(Returned(b"x" * 8), 8) == Returned(b"x" * 8)
    assert child._sendable(Returned(None), 8) == Returned(None)
    failed = child._sendable(Returned(b"x" * 9000), 8000)
    assert isinstance(failed, BodyFailed)
    assert isinstance(pickle.loads(failed.error or b""), GiveUp)
    assert "a result has 9000 bytes; the limit is 8000" in failed.text
    long = child._sendable(raised(ValueError("x" * 9000)), 8000)
    assert isinstance(long, BodyFailed)
    assert long.error is None
    assert len(long.text) == MAX_MESSAGE


LOG = [Update(claim, number, b"") for claim, size in enumerate([0, 7, 2, 0, 3, 0]) for number in range(size)]


@pytest.mark.rule("SK-9", "SK-12")
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_all_of_a_log_is_read_in_pages(size: int) -> None:
    asked: list[tuple[int | None, int]] = []

    def page(claim: int | None, first: int) -> list[Update]:
        asked.append((claim, first))
        found = [each for each in LOG if claim in (None, each.claim) and each.sequence >= first]
        return found[:size]

    assert list(read_log(page, 6)) == LOG
    assert [each.sequence for each in read_log(page, 6, 4)] == [0, 1, 2]
    assert list(read_log(page, 6, 5)) == []
    asked.clear()
    next(read_log(page, 6))
    assert asked == [(None, 0)], "no more than is taken"


@pytest.mark.rule("SK-8", "SK-15")
def test_who_has_waited_for_a_body_listens_no_more() -> None:
    ended: Future[None] = Future()
    ended.set_result(None)
    claim, watch = FakeClaim(), BodyWaits()
    for _ in range(3):
        assert watch.until(job_of(claim=claim), ended) is None
    assert claim.stop_requested._callbacks == []


class Supervised:
    """A supervisor and one body that it follows; what was cancelled."""

    def __init__(self, timeout_s: float | None = None, lasts_s: float = FOREVER_S) -> None:
        self.supervisor = BodySupervisor(ErrorPolicy("mail", SystemClock(), lambda: None))
        self.supervisor.start()
        self.claim = FakeClaim(lasts_s)
        job = replace(job_of(claim=self.claim), head=Head("0" * 40, "mail", "send", timeout_s=timeout_s))
        self.ended: Future[BodyOutcome] = Future()
        self.cancelled = threading.Event()
        self.outcome = self.supervisor.follow(job, self.ended, self.cancelled.set)


@pytest.fixture
def supervised() -> Iterator[Callable[..., Supervised]]:
    made: list[Supervised] = []

    def make(**options: Any) -> Supervised:
        made.append(Supervised(**options))
        return made[-1]

    yield make
    for each in made:
        each.supervisor.close()
        each.supervisor.close()
        assert each.claim.stop_requested._callbacks == []
        assert not each.supervisor._followed


@pytest.mark.rule("SK-15")
def test_a_supervised_body_ends_as_it_says(supervised: Callable[..., Supervised]) -> None:
    body = supervised(timeout_s=FOREVER_S)
    body.ended.set_result(Returned(b"1"))
    assert body.outcome.result(PATIENCE_S) == Returned(b"1")
    assert not body.cancelled.is_set()


@pytest.mark.rule("SK-8", "SK-15")
@pytest.mark.parametrize("reason", [Cut.TIMED_OUT, Cut.LOST, Cut.STOPPED, "over"])
def test_a_supervised_body_is_cancelled_for_a_reason(
    supervised: Callable[..., Supervised], reason: Cut | str
) -> None:
    match reason:
        case Cut.TIMED_OUT:
            body = supervised(timeout_s=1e-6)
        case Cut.LOST:
            body = supervised()
            body.claim.stop_requested.set()
        case Cut.STOPPED:
            body = supervised()
            body.supervisor.cut_off()
        case _:
            body, reason = supervised(lasts_s=-1.0), Cut.LOST
    assert body.cancelled.wait(PATIENCE_S)
    assert not body.outcome.done(), "it has time to end"
    body.ended.set_result(raised(ValueError("cancelled")))
    assert body.outcome.result(PATIENCE_S) is reason


@pytest.mark.rule("SK-15")
def test_a_supervised_body_that_does_not_end_is_given_up(
    supervised: Callable[..., Supervised], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rebalanser.tasks.async_claim.CANCEL_S", 0.0)
    body = supervised(timeout_s=1e-6)
    assert body.outcome.result(PATIENCE_S) is Cut.TIMED_OUT
    body.ended.set_result(Returned(b"late"))
    assert "still runs although it was cancelled" in caplog.text


@pytest.mark.rule("SK-8", "SK-15")
@pytest.mark.parametrize("reason", [Cut.LOST, Cut.STOPPED])
def test_a_reason_that_comes_during_a_look_is_not_missed(
    supervised: Callable[..., Supervised], reason: Cut
) -> None:
    body = supervised()
    supervisor = body.supervisor

    class Late(FakeClaim):
        looks = 0

        @property
        def deadline(self) -> float:
            self.looks += 1
            if self.looks > 1:
                self.stop_requested.set() if reason is Cut.LOST else supervisor.cut_off()
            return time.monotonic() + FOREVER_S

        @deadline.setter
        def deadline(self, _at: float) -> None: ...

    claim, cancelled, ended = Late(), threading.Event(), Future[BodyOutcome]()
    claim.held = SimpleNamespace(holder="late")
    outcome = supervisor.follow(job_of(claim=claim), ended, cancelled.set)
    assert cancelled.wait(PATIENCE_S)
    ended.set_result(Returned(None))
    assert outcome.result(PATIENCE_S) is reason
    body.ended.set_result(Returned(None))


@pytest.mark.rule("SK-8")
def test_a_supervised_body_goes_on_while_its_claim_is_renewed(supervised: Callable[..., Supervised]) -> None:
    body = supervised()
    looked = threading.Event()

    class Renewed(FakeClaim):
        @property
        def deadline(self) -> float:
            looked.set()
            return time.monotonic() + (-1.0 if is_over.is_set() else 0.001)

        @deadline.setter
        def deadline(self, _at: float) -> None: ...

    is_over = threading.Event()
    claim, cancelled, ended = Renewed(), threading.Event(), Future[BodyOutcome]()
    claim.held = SimpleNamespace(holder="renewed")
    outcome = body.supervisor.follow(job_of(claim=claim), ended, cancelled.set)
    for _ in range(3):
        looked.clear()
        assert looked.wait(PATIENCE_S)
    assert not cancelled.is_set()
    is_over.set()
    assert cancelled.wait(PATIENCE_S)
    ended.set_result(Returned(None))
    assert outcome.result(PATIENCE_S) is Cut.LOST
    body.ended.set_result(Returned(None))


@pytest.mark.rule("SK-8")
def test_the_claim_of_a_child_is_over_where_its_worker_says_nothing_or_that() -> None:
    def silent(ask: ChildRequest, timeout_s: float | None = None) -> Any:
        assert timeout_s is not None
        raise TimeoutError

    def fencing(ask: ChildRequest, timeout_s: float | None = None) -> Any:
        if isinstance(ask, DeadlineRequest):
            return 0.0
        raise Fenced("another worker has claimed it since")

    assert not ChildClaim(FACTS, 0.0, silent, 1).still_mine()
    assert ChildClaim(FACTS, 5.0, silent, 1).deadline == 5.0
    fenced = ChildClaim(FACTS, 0.0, fencing, 9)
    assert not fenced.still_mine()
    with pytest.raises(Fenced, match="another worker"):
        fenced.update(b"late")


def test_the_type_of_a_claim_is_that_of_the_function() -> None:
    async def twin(claim: AsyncClaim) -> None: ...

    assert TaskBody(twin, "twin", TaskOptions(), AsyncClaim).is_coroutine
    with pytest.raises(InvalidHandlers, match="of type Claim"):
        TaskBody(twin, "twin", TaskOptions())


@pytest.mark.rule("SK-17", "SK-19")
@pytest.mark.parametrize("refused", ["rebalanser-tasks-child", "rebalanser-tasks-sends"])
def test_a_process_whose_threads_are_refused_is_ended_and_reaped(
    monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start, popen = threading.Thread.start, subprocess.Popen

    def start_some(thread: threading.Thread) -> None:
        if thread.name.startswith(refused):
            raise RuntimeError("can't start new thread")
        start(thread)

    def noted(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(threading.Thread, "start", start_some)
    monkeypatch.setattr(subprocess, "Popen", noted)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        ChildProcess({})
    (process,) = started
    assert process.returncode == -signal.SIGKILL


def test_where_the_host_reaps_all_children_the_end_of_one_is_noticed_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it does that ignores SIGCHLD: who waits for the body would else wait for ever."""

    def reaped(*_: object) -> None:
        raise ChildProcessError

    process = ChildProcess({})
    process.ready.result(PATIENCE_S)
    # Only from here on: to a process that takes long to begin, it would say that it has ended.
    monkeypatch.setattr("os.waitid", reaped)
    outcome = process.call(cast("Any", SimpleNamespace(facts=FACTS, deadline=0.0, max_bytes=9)), b"{}")
    process.kill(0.0)
    ended = outcome.result(PATIENCE_S)
    assert isinstance(ended, Raised)
    assert not process.is_alive
