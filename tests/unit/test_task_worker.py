"""A worker's renewals: one that fails concerns its own claim alone."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from rebalanser.errors import QuotaExceeded, RegistryUnavailable, RequestTooLarge
from rebalanser.runtime.clock import SystemClock
from rebalanser.tasks.loops import ErrorPolicy
from rebalanser.tasks.model import Head
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
