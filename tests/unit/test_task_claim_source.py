"""Claims from an engine's index: what is asked of the engine, and when to ask again."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rebalanser.core.tasks.claims import MAX_CLAIMS
from rebalanser.core.tasks.clocks import READ_PAUSE_S, ForeignTerms
from rebalanser.core.tasks.model import ClaimState, ClaimTerm, Head, Status, Stored, TaskState
from rebalanser.core.tasks.rules import ClaimKey
from rebalanser.core.tasks.store import ClaimAnswer, ClaimQuery
from rebalanser.errors import OutcomeUnknown
from rebalanser.tasks.engine import ClaimsFromIndex
from rebalanser.tasks.execution.claim_source import IndexClaims
from rebalanser.testing.clock import FakeClock

BOOT = "a boot"


class FakeIndex(ClaimsFromIndex):
    """Answers what a test wants, and keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[ClaimQuery] = []
        self.answer = ClaimAnswer(())
        self.claims = 0
        """Number of claims that each request makes."""
        self.error: Exception | None = None
        self.wakes: list[Callable[[], None]] = []
        self.ready = {"send"}

    def claim(self, request: ClaimQuery, timeout_s: float) -> ClaimAnswer:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        if self.claims:
            return ClaimAnswer([(stored(0, holder), b"") for holder in request.holders[: self.claims]])
        return self.answer

    def ready_names(self, queue: str, timeout_s: float) -> set[str]:
        return self.ready

    def watch_commits(self, wake: Callable[[], None]) -> Any:
        self.wakes.append(wake)
        return SimpleNamespace(close=lambda: self.wakes.remove(wake))


class Stand:
    def __init__(self) -> None:
        self.clock, self.index, self.woken = FakeClock(), FakeIndex(), 0
        context: Any = SimpleNamespace(
            clock=self.clock,
            queue="work",
            timeout_s=5.0,
            term=lambda: ClaimTerm(30.0, BOOT, self.clock.now() + 30.0),
        )
        self.claims = IndexClaims(context, self.index, "here", 3.0, self._wake)

    def _wake(self) -> None:
        self.woken += 1


def stored(number: int = 0, holder: str = "h") -> Stored:
    claim = ClaimState(number, holder, "w", ClaimTerm(30.0, BOOT, 30.0))
    return Stored(Head("0" * 40, "work", "send"), TaskState(Status.CLAIMED, claim), 7, 0)


@pytest.mark.rule("SK-6", "SK-8")
def test_each_claim_has_a_holder_of_its_own() -> None:
    stand = Stand()
    stand.index.claims = 2
    held = [each.held.holder for _ in range(3) for each in stand.claims.claim(MAX_CLAIMS + 1, {"send"})]
    assert len(held) == len(set(held)) == 6
    stand.index.claims = 0
    for limit in (MAX_CLAIMS, 2):
        stand.claims.claim(limit, None, "a client")
    for each in stand.index.requests:
        assert len(each.holders) == len(set(each.holders)) <= MAX_CLAIMS
    for number, each in enumerate(stand.index.requests[:3]):
        assert each.holders[:2] == held[2 * number : 2 * number + 2]
        assert len(each.holders) == MAX_CLAIMS
    assert not set(held) & set(stand.index.requests[-2].holders)
    first, last = stand.index.requests[0], stand.index.requests[-1]
    assert (first.queue, first.names, first.worker, first.buffer_s) == ("work", {"send"}, "here", 3.0)
    assert (last.names, last.worker) == (None, "a client")
    assert first.clock() == stand.clock.now()


@pytest.mark.rule("SK-6")
def test_no_claim_has_a_holder_of_a_request_that_has_failed() -> None:
    """Its outcome may be unknown, so that a task may have one of its holders."""
    stand = Stand()
    stand.claims.claim(4, None)
    stand.index.error = OutcomeUnknown("the disk failed")
    with pytest.raises(OutcomeUnknown):
        stand.claims.claim(3, None)
    stand.index.error = None
    stand.claims.claim(4, None)
    nothing, failed, last = (set(each.holders) for each in stand.index.requests)
    assert not failed & last
    assert len(nothing & last) == 1, "a holder that no claim has is left for the next one"


@pytest.mark.rule("SK-20")
def test_functions_are_not_read_where_the_claim_has_told_that_no_other_is_ready(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stand = Stand()
    stand.index.ready = {"other"}
    stand.index.answer = ClaimAnswer((), others_ready=False)
    stand.claims.claim(1, {"send"})
    stand.claims.report_unknown({"send"})
    assert caplog.records == []
    stand.index.answer = ClaimAnswer(())
    stand.claims.claim(1, {"send"})
    stand.claims.report_unknown({"send"})
    assert len(caplog.records) == 1


@pytest.mark.rule("SK-5", "SK-8")
def test_a_claim_tells_when_it_was_asked_for_and_its_payload() -> None:
    stand = Stand()
    stand.index.answer = ClaimAnswer([(stored(4), b"a payload"), (stored(), None)])
    began = stand.clock.now()
    one, two = stand.claims.claim(2, None)
    assert (one.held, one.payload, one.sent_at) == (ClaimKey(4, "h"), b"a payload", began)
    assert two.payload is None


@pytest.mark.rule("SK-5", "SK-20")
@pytest.mark.parametrize(
    ("due_in", "over_in", "wakes_in"),
    [
        (None, None, None),
        (5.0, None, 5.0),
        (None, 7.0, 7.0),
        (5.0, 7.0, 5.0),
        (9.0, 7.0, 7.0),
        (-3.0, None, 0.0),
    ],
)
def test_it_is_asked_again_when_a_time_has_come(
    due_in: float | None, over_in: float | None, wakes_in: float | None
) -> None:
    stand = Stand()
    now, wall = stand.clock.now(), stand.clock.wall()
    due = None if due_in is None else wall + due_in
    stand.index.answer = ClaimAnswer((), due, None if over_in is None else now + over_in)
    assert stand.claims.next_wakeup() == now, "at first there may be something"
    assert stand.claims.claim(1, None) == []
    at = stand.claims.next_wakeup()
    assert at is None if wakes_in is None else at == pytest.approx(now + wakes_in)
    stand.index.answer = ClaimAnswer([(stored(), b"")], due)
    stand.claims.claim(1, None)
    assert stand.claims.next_wakeup() == now, "where there was one there may be another"


@pytest.mark.rule("SK-20")
def test_commits_wake_until_it_is_closed() -> None:
    stand = Stand()
    stand.claims.open()
    (wake,) = stand.index.wakes
    wake()
    assert stand.woken == 1
    stand.claims.close()
    stand.claims.close()
    assert stand.index.wakes == []
    assert stand.claims.owns(12345)


def test_functions_that_nobody_here_knows_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    stand = Stand()
    stand.index.ready = {"send", "other"}
    for _ in range(3):
        stand.claims.report_unknown({"send"})
    assert [record.__dict__["name"] for record in caplog.records] == [caplog.records[0].name]


# -- terms of other clocks


def claim(ends_at_s: float = 30.0, number: int = 0) -> ClaimState:
    return ClaimState(number, "h", "w", ClaimTerm(30.0, "another", ends_at_s))


@pytest.mark.rule("SK-8", "SK-18")
def test_the_time_of_another_clock_counts_from_when_it_is_known() -> None:
    terms = ForeignTerms[int]()
    assert terms.learn({1: claim()}, 100.0, 3.0) == []
    assert terms.next_over() == 133.0
    assert terms.learn({1: claim(), 2: claim()}, 110.0, 3.0) == []
    assert terms.learn({1: claim(), 2: claim()}, 133.0, 3.0) == [1]
    assert terms.learn({2: claim(60.0)}, 140.0, 3.0) == [], "it was renewed"
    assert terms.next_over() == 173.0
    assert terms.learn({2: claim(60.0, number=1)}, 173.0, 3.0) == [], "it is another claim"
    assert terms.learn({}, 200.0, 3.0) == []
    assert terms.next_over() is None


@pytest.mark.rule("SK-24")
def test_many_claims_of_other_clocks_are_read_seldom() -> None:
    terms = ForeignTerms[int]()
    assert not terms.skips(0.0)
    many = {number: claim() for number in range(2000)}
    terms.learn(many, 10.0, 3.0)
    assert terms.next_over() == 43.0
    again_at = 10.0 + 2000 * READ_PAUSE_S
    assert terms.skips(math.nextafter(again_at, 0.0))
    assert terms.next_over() == again_at, "one that came meanwhile is to be known soon"
    assert not terms.skips(again_at)
