"""A follower that cannot go on says so, whatever the cause: nobody waits for ever for a thread that ended."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

import pytest
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.shiva.follower import Batch, Follower, Lost

from rebalanser.errors import AccessDenied, InternalError
from rebalanser.testing.waiting import PATIENCE_S

if TYPE_CHECKING:
    from rebalanser_kafka.log import LogRecord


@pytest.mark.parametrize("error", [AccessDenied("not for you"), RuntimeError("a fault")])
def test_whatever_ends_it_is_told(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    given: queue.SimpleQueue[Batch | Lost] = queue.SimpleQueue()
    follower = Follower(Connection.from_address("127.0.0.1:1", "c"), "t", 0, given.put)

    def fail(_timeout_s: float) -> list[LogRecord]:
        raise error

    monkeypatch.setattr(follower._reader, "poll", fail)
    follower.begin()
    lost = given.get(timeout=PATIENCE_S)
    follower.close()
    assert isinstance(lost, Lost)
    assert isinstance(lost.error, AccessDenied if isinstance(error, AccessDenied) else InternalError)
    assert str(error) in str(lost.error)
