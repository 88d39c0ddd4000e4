"""What a server writes into its history of claims that are held over HTTP (AU-4)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from rebalanser.core.tasks.claims import Claimed
from rebalanser.core.tasks.model import ClaimState, ClaimTerm, Head, Status, Stored, TaskState
from rebalanser.core.tasks.rules import ClaimKey
from rebalanser.core.tasks.store import Change, ChangesLost
from rebalanser.errors import RegistryUnavailable
from rebalanser.history import SkuldKind
from rebalanser.tasks.http.claims import HISTORY_DELAY_S, ClaimHistory, holder_with_token, parse_holder

TASK = "1" * 40
TTL_S = 10.0
HELD = ClaimKey(0, "abc")
HEAD = Head(TASK, "work", "send")
TERM = ClaimTerm(TTL_S, "here", 110.0)

pytest.importorskip("fastapi", reason="the HTTP interface needs the extra web")


@dataclass
class Stand:
    """A claim_history, its clock, and what it has written."""

    now: float = 100.0
    is_written: bool = True
    written: list[Any] = field(default_factory=list)
    woken: threading.Event = field(default_factory=threading.Event)
    there: dict[str, Stored] = field(default_factory=dict)
    is_away: bool = False
    closed: int = 0

    def __post_init__(self) -> None:
        clock = SimpleNamespace(now=lambda: self.now)
        history: Any = SimpleNamespace(is_written=self.is_written, write=self._write)
        clock.wall = lambda: self.now + 1e9
        context: Any = SimpleNamespace(
            clock=clock, clock_name="here", history=history, ttl_s=TTL_S, timeout_s=5.0, queue="work",
            watch=self._watched, read=lambda tasks: self.read(tasks),
        )  # fmt: skip
        self.claim_history = ClaimHistory(context, self.woken.set)

    def _write(
        self, kind: SkuldKind, task: str, token: int, *, revision: int | None, value: int | None
    ) -> None:
        assert task == TASK
        self.written.append((kind.value, token, value))

    def _watched(self, told: Callable[[Any], None], wants: Callable[[Change], bool]) -> Any:
        self.told, self.wants = told, wants
        return SimpleNamespace(close=lambda: setattr(self, "closed", self.closed + 1))

    def read(self, tasks: list[str]) -> dict[str, Stored]:
        if self.is_away:
            raise RegistryUnavailable("away")
        return {task: self.there[task] for task in tasks if task in self.there}

    def news(self, status: Status, held: ClaimKey, term: ClaimTerm = TERM) -> None:
        """The engine tells what the task is now."""
        claim = ClaimState(held.number, held.holder, "a", term)
        if self.wants(Change(TASK, 0, status, 20)):
            self.told([Stored(HEAD, TaskState(status, claim), 20, 0)])

    def stored(self, revision: int) -> Stored:
        return Stored(HEAD, TaskState(), revision, 0)

    def claim(self, number: int = 0, revision: int = 7) -> ClaimKey:
        held = ClaimKey(number, f"holder {number}")
        self.claim_history.claimed(Claimed(self.stored(revision), held, sent_at=self.now))
        return held


@pytest.mark.rule("AU-4", "SK-16")
def test_a_claim_is_told_from_its_beginning_to_its_end() -> None:
    stand = Stand()
    held = stand.claim()
    for sequence in (0, 1, 1):
        stand.claim_history.updated(stand.stored(8 + sequence), held, 7, sequence)
    stand.claim_history.renewed(TASK, held, 7, stand.now + TTL_S)
    stand.claim_history.completed(stand.stored(10), held, 7)
    assert stand.written == [
        ("claimed", 7, 0), ("updated", 7, 0), ("updated", 7, 1), ("claim_renewed", 7, None),
        ("completed", 7, None), ("claim_ended", 7, None),
    ]  # fmt: skip
    assert stand.claim_history.end_over() is None


@pytest.mark.rule("AU-4", "SK-8")
def test_a_claim_that_nobody_renews_ends_with_its_time() -> None:
    stand = Stand()
    held = stand.claim()
    assert stand.claim_history.end_over() == stand.now + TTL_S
    stand.now += TTL_S - 1
    stand.claim_history.renewed(TASK, held, 7, stand.now + TTL_S)
    stand.now += TTL_S - 1
    assert stand.claim_history.end_over() == stand.now + 1
    stand.now += 1
    assert stand.claim_history.end_over() is None
    assert stand.written[-1] == ("claim_ended", 7, None)
    stand.claim_history.fenced(TASK, held, 7)
    assert stand.written[-1] == ("fenced", 7, None), "it ends once"


@pytest.mark.rule("AU-4", "SK-6")
def test_a_claim_ends_before_the_next_one_of_its_task_begins() -> None:
    stand = Stand()
    first = stand.claim()
    stand.claim(1, revision=9)
    stand.claim_history.ended(TASK, first)
    stand.claim_history.fenced(TASK, first, 7)
    assert stand.written == [
        ("claimed", 7, 0), ("claim_ended", 7, None), ("claimed", 9, 1), ("fenced", 7, None)
    ]  # fmt: skip


@pytest.mark.rule("AU-4", "SK-9")
def test_updates_have_no_number_once_another_server_may_have_accepted_some() -> None:
    stand = Stand()
    held = stand.claim()
    for sequence in (0, 2, 3):
        stand.claim_history.updated(stand.stored(8 + sequence), held, 7, sequence)
    assert [value for kind, _, value in stand.written if kind == "updated"] == [0, None, None]
    other = Stand()
    other.claim_history.updated(other.stored(8), HELD, 7, 0)
    assert other.written == [("updated", 7, None)]


@pytest.mark.rule("AU-4", "SK-6")
@pytest.mark.parametrize("status", [Status.COMPLETED, Status.WAITING, Status.DEAD])
def test_a_claim_that_is_ended_at_another_server_ends_with_the_news(status: Status) -> None:
    stand = Stand()
    stand.claim_history.follow()
    held = stand.claim(1)
    stand.news(Status.WAITING, ClaimKey(0, "an earlier one"))  # news that come late
    stand.news(Status.CLAIMED, held)
    assert [kind for kind, _, _ in stand.written] == ["claimed"]
    stand.news(status, held)
    stand.news(status, held)
    assert stand.written == [("claimed", 7, 1), ("claim_ended", 7, None)]
    stand.claim_history.close()
    stand.claim_history.close()
    assert stand.closed == 1


@pytest.mark.rule("AU-4", "SK-10")
def test_a_claim_that_completes_here_ends_after_that() -> None:
    stand = Stand()
    stand.claim_history.follow()
    held = stand.claim()
    stand.claim_history.completing(TASK, HELD)  # somebody else's
    stand.claim_history.completing(TASK, held)
    stand.news(Status.COMPLETED, held)
    stand.claim_history.completed(stand.stored(10), held, 7)
    assert [kind for kind, _, _ in stand.written] == ["claimed", "completed", "claim_ended"]


@pytest.mark.rule("AU-4", "SK-6")
def test_a_claim_that_was_followed_by_another_server_s_ends_with_the_news() -> None:
    stand = Stand()
    stand.claim_history.follow()
    stand.claim()
    stand.news(Status.CLAIMED, ClaimKey(1, "of another server"))
    assert stand.written[-1] == ("claim_ended", 7, None)


@pytest.mark.rule("AU-4")
def test_who_holds_a_cancelled_task_acts_until_he_is_told() -> None:
    stand = Stand()
    stand.claim_history.follow()
    held = stand.claim()
    stand.news(Status.CANCELLED, held)
    assert [kind for kind, _, _ in stand.written] == ["claimed"]
    assert stand.claim_history.end_over() == stand.now + TTL_S


@pytest.mark.rule("AU-4", "SK-7")
@pytest.mark.parametrize(("clock", "ends_at"), [("here", 113.0), ("there", 114.0)])
def test_a_claim_that_is_renewed_at_another_server_lasts_longer(clock: str, ends_at: float) -> None:
    stand = Stand()
    stand.claim_history.follow()
    held = stand.claim()
    stand.now += 4.0
    stand.news(Status.CLAIMED, held, ClaimTerm(TTL_S, clock, 113.0))
    assert stand.claim_history.end_over() == ends_at


@pytest.mark.rule("AU-4", "SK-11")
def test_what_the_engine_could_not_tell_is_read() -> None:
    stand = Stand()
    stand.claim_history.follow()
    held = stand.claim()
    stand.is_away = True
    stand.told(ChangesLost(30))
    assert stand.woken.is_set()
    assert stand.claim_history.end_over() == stand.now + TTL_S
    stand.is_away, stand.there[TASK] = False, stand.stored(7)
    stand.there[TASK] = Stored(HEAD, TaskState(Status.CLAIMED, ClaimState(0, held.holder, "a", TERM)), 7, 0)
    assert stand.claim_history.end_over() == stand.now + TTL_S
    stand.told(ChangesLost(40))
    del stand.there[TASK]  # it was completed and collected
    assert stand.claim_history.end_over() is None
    assert stand.written[-1] == ("claim_ended", 7, None)


@pytest.mark.rule("AU-4", "SK-6")
def test_a_task_waits_until_the_server_that_made_its_claim_has_heard_of_the_end() -> None:
    stand = Stand()
    held = stand.claim()
    assert stand.claim_history.due_after(TASK, held) == 0.0
    assert stand.claim_history.due_after(TASK, HELD) == stand.now + 1e9 + HISTORY_DELAY_S
    assert Stand(is_written=False).claim_history.due_after(TASK, HELD) == 0.0


def test_without_a_history_nothing_is_kept_in_mind() -> None:
    stand = Stand(is_written=False)
    stand.claim_history.follow()
    stand.claim()
    assert stand.claim_history.end_over() is None


def test_a_holder_is_given_back_with_its_token() -> None:
    claimed = Claimed(Stand().stored(12), ClaimKey(3, "abc"), 0.0)
    assert holder_with_token(claimed) == "abc.12"
    assert parse_holder(3, "abc.12") == (ClaimKey(3, "abc"), 12)
    for holder in ("abc", "abc.", "abc.x", "abc.²", f"abc.{10**30}"):
        assert parse_holder(0, holder) == (HELD, None), holder
