"""What a server writes into its history of claims that are held over HTTP (AU-4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from rebalanser.history import SkuldKind
from rebalanser.tasks.http.telling import Telling, named, parsed
from rebalanser.tasks.model import Head, State, Stored
from rebalanser.tasks.partitions import Claimed
from rebalanser.tasks.rules import Held

TASK = "1" * 40
TTL_S = 10.0
HELD = Held(0, "abc")

pytest.importorskip("fastapi", reason="the HTTP interface needs the extra web")


@dataclass
class Stand:
    """A telling, its clock, and what it has written."""

    now: float = 100.0
    is_written: bool = True
    written: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        clock = SimpleNamespace(now=lambda: self.now)
        history: Any = SimpleNamespace(is_written=self.is_written, write=self._write)
        context: Any = SimpleNamespace(clock=clock, history=history, ttl_s=TTL_S)
        self.telling = Telling(context)

    def _write(
        self, kind: SkuldKind, task: str, token: int, *, revision: int | None, value: int | None
    ) -> None:
        assert task == TASK
        self.written.append((kind.value, token, value))

    def stored(self, revision: int) -> Stored:
        return Stored(Head(TASK, "work", "send"), State(), revision, 0)

    def claim(self, number: int = 0, revision: int = 7) -> Held:
        held = Held(number, f"holder {number}")
        self.telling.claimed(Claimed(self.stored(revision), held, sent_at=self.now))
        return held


@pytest.mark.rule("AU-4", "SK-16")
def test_a_claim_is_told_from_its_beginning_to_its_end() -> None:
    stand = Stand()
    held = stand.claim()
    for sequence in (0, 1, 1):
        stand.telling.updated(stand.stored(8 + sequence), held, 7, sequence)
    stand.telling.renewed(TASK, held, 7, stand.now + TTL_S)
    stand.telling.completed(stand.stored(10), held, 7)
    assert stand.written == [
        ("claimed", 7, 0), ("updated", 7, 0), ("updated", 7, 1), ("claim_renewed", 7, None),
        ("completed", 7, None), ("claim_ended", 7, None),
    ]  # fmt: skip
    assert stand.telling.end_over() is None


@pytest.mark.rule("AU-4", "SK-8")
def test_a_claim_that_nobody_renews_ends_with_its_time() -> None:
    stand = Stand()
    held = stand.claim()
    assert stand.telling.end_over() == stand.now + TTL_S
    stand.now += TTL_S - 1
    stand.telling.renewed(TASK, held, 7, stand.now + TTL_S)
    stand.now += TTL_S - 1
    assert stand.telling.end_over() == stand.now + 1
    stand.now += 1
    assert stand.telling.end_over() is None
    assert stand.written[-1] == ("claim_ended", 7, None)
    stand.telling.fenced(TASK, held, 7)
    assert stand.written[-1] == ("fenced", 7, None), "it ends once"


@pytest.mark.rule("AU-4", "SK-6")
def test_a_claim_ends_before_the_next_one_of_its_task_begins() -> None:
    stand = Stand()
    first = stand.claim()
    stand.claim(1, revision=9)
    stand.telling.ended(TASK, first)
    stand.telling.fenced(TASK, first, 7)
    assert stand.written == [
        ("claimed", 7, 0), ("claim_ended", 7, None), ("claimed", 9, 1), ("fenced", 7, None)
    ]  # fmt: skip


@pytest.mark.rule("AU-4", "SK-9")
def test_updates_have_no_number_once_another_server_may_have_accepted_some() -> None:
    stand = Stand()
    held = stand.claim()
    for sequence in (0, 2, 3):
        stand.telling.updated(stand.stored(8 + sequence), held, 7, sequence)
    assert [value for kind, _, value in stand.written if kind == "updated"] == [0, None, None]
    other = Stand()
    other.telling.updated(other.stored(8), HELD, 7, 0)
    assert other.written == [("updated", 7, None)]


def test_without_a_history_nothing_is_kept_in_mind() -> None:
    stand = Stand(is_written=False)
    stand.claim()
    assert stand.telling.end_over() is None


def test_a_holder_is_given_back_with_its_token() -> None:
    claimed = Claimed(Stand().stored(12), Held(3, "abc"), 0.0)
    assert named(claimed) == "abc.12"
    assert parsed(3, "abc.12") == (Held(3, "abc"), 12)
    for holder in ("abc", "abc.", "abc.x", "abc.²", f"abc.{10**30}"):
        assert parsed(0, holder) == (HELD, None), holder
