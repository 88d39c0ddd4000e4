"""A worker's renewals: one that fails concerns its own claim alone."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from rebalanser.errors import QuotaExceeded, RegistryUnavailable, RequestTooLarge
from rebalanser.runtime.clock import SystemClock
from rebalanser.tasks.bodies import Bodies
from rebalanser.tasks.calling import ThreadCaller
from rebalanser.tasks.claim import Claim
from rebalanser.tasks.functions import TaskBody
from rebalanser.tasks.loops import UNREADABLE_S, ErrorKind, ErrorPolicy
from rebalanser.tasks.model import ClaimState, Head, State, Status, Stored, Term
from rebalanser.tasks.options import TaskOptions
from rebalanser.tasks.rules import Held
from rebalanser.tasks.worker import PAUSE_S, RENEWALS, Worker, _Try

TTL_S = 3600.0
FOREVER_S = 1e9


class FakeClaim:
    """A claim whose renewals raise what a test wants."""

    is_over = False

    def __init__(self, error: BaseException | None = None, deadline: float = FOREVER_S) -> None:
        self.error = error
        self.deadline = time.monotonic() + deadline
        self.stop_requested = threading.Event()
        self.renewals = 0

    def renew(self) -> bool:
        if self.error is not None:
            raise self.error
        self.renewals += 1
        return True


class Stand:
    """A worker that was not started, and claims that are due to be renewed."""

    def __init__(self, *claims: FakeClaim) -> None:
        self.errors = ErrorPolicy("work", SystemClock(), lambda: None)
        context: Any = SimpleNamespace(errors=self.errors, ttl_s=TTL_S)
        nobody: Any = None
        self.worker = Worker(context, nobody, nobody, 1, threading.Event())
        self.tries = [_Try(self._as_claim(each), Head("0" * 40, "work", "it"), 0.0) for each in claims]
        self.worker._tries = {str(number): each for number, each in enumerate(self.tries)}

    @staticmethod
    def _as_claim(claim: FakeClaim) -> Any:
        return claim


ERRORS = [
    RegistryUnavailable("away"),
    RequestTooLarge("of a batch"),
    QuotaExceeded("full"),
    KeyError("a bug"),
]


@pytest.mark.rule("SK-7")
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_renewal_that_fails_keeps_no_other_from_being_made(error: Exception) -> None:
    bad, good = FakeClaim(error), FakeClaim()
    stand = Stand(bad, good)
    began = time.monotonic()
    assert stand.worker._renew()
    ended = time.monotonic()
    assert good.renewals == 1
    again, later = (each.renew_at for each in stand.tries)
    assert began + PAUSE_S <= again <= ended + PAUSE_S
    assert began + TTL_S / RENEWALS <= later <= ended + TTL_S / RENEWALS


@pytest.mark.rule("SK-7", "SK-8")
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_body_is_asked_to_stop_once_its_claim_is_over_and_not_before(error: Exception) -> None:
    early, late = FakeClaim(error), FakeClaim(error, deadline=-1.0)
    Stand(early, late).worker._renew()
    assert (early.stop_requested.is_set(), late.stop_requested.is_set()) == (False, True)


def test_renewals_that_fail_are_seen_until_they_succeed() -> None:
    claim = FakeClaim(QuotaExceeded("full"))
    stand = Stand(claim)
    stand.worker._renew()
    assert [each.loop for each in stand.errors.troubles] == ["renewals"]
    claim.error = None
    stand.tries[0].renew_at = 0.0
    stand.worker._renew()
    assert stand.errors.troubles == ()


class StillClock:
    """A clock that a test moves."""

    at = 0.0

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return 1e9 + self.at


class Unread:
    """A claim of a task that its worker can't read, by its number; what it was settled with."""

    name, queue, task_id, failures, is_over = "send", "work", "0" * 40, 2, False

    def __init__(self, number: int) -> None:
        self.number = number
        self.held = Held(number, "holder")
        self.left: Any = None

    def settle(self, rule: Any) -> Future[Any]:
        head = Head(self.task_id, "work", "send")
        state = State(
            Status.CLAIMED, ClaimState(self.number, "holder", "me", Term(TTL_S, "", 0.0)), failures=2
        )
        self.left = rule(Stored(head, state, 5, 0))
        return Future()


def send(claim: Claim, to: str) -> None:
    raise AssertionError("its arguments can't be read")


@pytest.mark.rule("SK-21")
def test_a_task_that_can_not_be_read_waits_ever_longer_and_has_not_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = StillClock()
    errors = ErrorPolicy("work", clock, lambda: None)
    options = TaskOptions(backoff_s=1.0, max_backoff_s=100.0, retries=0)
    bodies = Bodies({"send": TaskBody(send, "send", options)}, (), clock, ThreadCaller(), errors)
    waits: list[float] = []
    for number in range(2, 12):
        claim: Any = Unread(number)
        bodies.work(claim, Head("0" * 40, "work", "send"), b'{"to": "a", "cc": "b"}')
        left = claim.left
        assert (left.status, left.failures) == (Status.WAITING, 2)
        assert "cc: Extra inputs are not permitted" in left.error
        waits.append(left.due - clock.wall())
    assert all(2.0**n <= wait <= 2.0**n * 1.25 for n, wait in enumerate(waits[:7]))
    assert all(100.0 <= wait <= 125.0 for wait in waits[7:])
    assert [each.getMessage().count("this worker can't read") for each in caplog.records] == [1]
    (trouble,) = errors.troubles
    assert (trouble.loop, trouble.kind, trouble.attempts) == ("task send", ErrorKind.POISON, 10)
    clock.at = UNREADABLE_S
    assert errors.troubles == ()
