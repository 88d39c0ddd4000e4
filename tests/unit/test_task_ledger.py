"""The one writer of a process: whoever stops can wait for what was asked before."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import pytest

from rebalanser.tasks.asks import Ask
from rebalanser.tasks.ledger import Ledger

if TYPE_CHECKING:
    from rebalanser.tasks.engine import Answer, Engine, Write
    from rebalanser.tasks.model import Stored


class Asked(Ask[str]):
    """Settled by the first answer."""

    def write(self) -> Write:
        return cast("Write", self.task)

    def answered(self, answer: Answer) -> None:
        self.future.set_result(str(answer))

    def found(self, stored: Stored | None) -> None:
        raise AssertionError("it was answered")


class Gated:
    """An engine that writes when it may."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may = threading.Event()

    def apply(self, writes: Sequence[Write], _timeout_s: float) -> Sequence[Answer]:
        self.has_begun.set()
        self.may.wait()
        return cast("Sequence[Answer]", writes)


@pytest.fixture
def engine() -> Gated:
    return Gated()


@pytest.fixture
def ledger(engine: Gated) -> Iterator[Ledger]:
    made = Ledger(cast("Engine", engine), "work", 1.0)
    yield made
    engine.may.set()
    made.close()


@pytest.mark.rule("SK-15")
def test_what_was_asked_before_is_known_after_a_flush(engine: Gated, ledger: Ledger) -> None:
    asked = [Asked("a"), Asked("b"), Asked("a")]
    ledger.submit(asked[0])
    engine.has_begun.wait()
    ledger.submit_all(asked[1:])  # one waits for the other, which is about the same task
    engine.may.set()
    ledger.flush()
    assert [each.future.done() and each.future.result() for each in asked] == ["a", "b", "a"]


def test_where_nothing_is_asked_a_flush_is_over_at_once(ledger: Ledger) -> None:
    ledger.flush()
