"""A follower that cannot go on says so, and its lag is shown to people without anybody waiting for it."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError, TopicPartition

from rebalanser.errors import AccessDenied, InternalError
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.shiva import follower as module
from rebalanser_kafka.shiva.follower import (
    COMMIT_AGAIN_S,
    COMMIT_S,
    LagGroup,
    ReadBatch,
    TopicFollower,
    TopicLost,
)

if TYPE_CHECKING:
    from rebalanser_kafka.log import LogRecord

CONNECTION = Connection.from_url("kafka://127.0.0.1:1/c")


@pytest.mark.parametrize("error", [AccessDenied("not for you"), RuntimeError("a fault")])
def test_whatever_ends_it_is_told(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    given: queue.SimpleQueue[ReadBatch | TopicLost] = queue.SimpleQueue()
    follower = TopicFollower(CONNECTION, "t", 0, given.put)

    def fail(_timeout_s: float) -> list[LogRecord]:
        raise error

    monkeypatch.setattr(follower._reader, "poll", fail)
    follower.begin()
    lost = given.get(timeout=PATIENCE_S)
    follower.close()
    assert isinstance(lost, TopicLost)
    assert isinstance(lost.error, AccessDenied if isinstance(error, AccessDenied) else InternalError)
    assert str(error) in str(lost.error)


class Brokers:
    """Takes commits, and answers them when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.config: dict[str, Any] = {}
        self.sent: list[list[TopicPartition]] = []
        self.errors: list[KafkaError] = []
        self.answers: list[tuple[KafkaError | None, list[SimpleNamespace]]] = []
        self.closed = threading.Event()

    def __call__(self, config: dict[str, Any]) -> Brokers:
        self.config = config
        return self

    def poll(self, _timeout_s: float) -> SimpleNamespace | None:
        """The client tells its answers, or an error of its own."""
        answers, self.answers = self.answers, []
        for answer in answers:
            self.config["on_commit"](*answer)
        return SimpleNamespace(error=self.errors.pop) if self.errors else None

    def close(self) -> None:
        self.closed.set()

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> None:
        assert asynchronous
        self.sent.append(offsets)

    @property
    def committed(self) -> list[dict[str, int]]:
        return [{each.topic: each.offset for each in sent} for sent in self.sent]

    def answer(self, code: int | None = None, *, whole: int | None = None) -> None:
        """Each place has this error, or the commit as a whole."""
        places = [
            SimpleNamespace(
                topic=each.topic, offset=each.offset, error=None if code is None else KafkaError(code)
            )
            for each in self.sent[-1]
        ]
        self.answers.append((None if whole is None else KafkaError(whole), places))


@pytest.mark.rule("SH-29")
class TestLag:
    @pytest.fixture
    def brokers(self, monkeypatch: pytest.MonkeyPatch) -> Brokers:
        brokers = Brokers()
        monkeypatch.setattr(module, "Consumer", brokers)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: brokers.now))
        return brokers

    @pytest.fixture
    def lag(self, brokers: Brokers) -> LagGroup:
        return LagGroup(CONNECTION, "worker:w1")

    def later(self, brokers: Brokers, lag: LagGroup, seconds: float = COMMIT_S) -> None:
        brokers.now += seconds
        lag.commit_if_due()

    def test_positions_that_have_changed_are_committed_at_a_low_rate(
        self, brokers: Brokers, lag: LagGroup
    ) -> None:
        for position in range(10):
            lag.note("c-command", position)
            self.later(brokers, lag, COMMIT_S / 10)
        lag.note("c-control", 3)
        self.later(brokers, lag)
        assert brokers.config["group.id"] == "c-lag:worker:w1"
        assert brokers.committed == [{"c-command": 9}], "the answer to the first one is awaited"
        brokers.answer()
        self.later(brokers, lag)
        brokers.answer()
        self.later(brokers, lag)
        assert brokers.committed[1:] == [{"c-control": 3}]
        self.later(brokers, lag, COMMIT_AGAIN_S)
        assert brokers.committed[2:] == [{"c-command": 9, "c-control": 3}]

    @pytest.mark.parametrize(
        ("code", "lines"),
        [
            (KafkaError.GROUP_AUTHORIZATION_FAILED, 1),
            (KafkaError.UNKNOWN_MEMBER_ID, 1),
            (KafkaError.COORDINATOR_LOAD_IN_PROGRESS, 0),
        ],
    )
    def test_a_refused_commit_is_logged_once_and_tried_again(
        self, brokers: Brokers, lag: LagGroup, code: int, lines: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[str] = []
        log = SimpleNamespace(warning=lambda line, **_fields: told.append(line))
        monkeypatch.setattr(module, "_log", log)
        lag.note("c-command", 7)
        for _ in range(3):
            self.later(brokers, lag)
            brokers.answer(code)
        self.later(brokers, lag)
        brokers.answer(whole=KafkaError._TIMED_OUT)
        self.later(brokers, lag)
        self.later(brokers, lag)
        assert brokers.committed == [{"c-command": 7}] * 5
        assert len(told) == lines
        assert all(line.startswith("its lag is not shown: committing to group c-lag:w") for line in told)

    def test_a_coordinator_that_may_not_be_looked_for_is_logged_once(
        self, brokers: Brokers, lag: LagGroup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[str] = []
        log = SimpleNamespace(warning=lambda line, **_fields: told.append(line))
        monkeypatch.setattr(module, "_log", log)
        refused = KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)
        brokers.errors = [refused, refused, KafkaError(KafkaError._TRANSPORT)]
        for _ in range(4):
            self.later(brokers, lag)
        assert [line[:59] for line in told] == ["its lag is not shown: committing to group c-lag:worker:w1 f"]

    def test_a_batch_counts_once_it_was_taken_and_commits_go_on_until_then(
        self, brokers: Brokers, lag: LagGroup
    ) -> None:
        given: queue.SimpleQueue[ReadBatch | TopicLost] = queue.SimpleQueue()
        follower = TopicFollower(CONNECTION, "c-command", 0, given.put, lag)
        lag.note("c-control", 1)

        class Taken(SimpleNamespace):
            def wait(self, _timeout_s: float) -> bool:
                brokers.now += COMMIT_S
                self.looks -= 1
                return not self.looks

            def is_set(self) -> bool:
                return not self.looks

        follower._hand_over(ReadBatch("c-command", [], 5, Taken(looks=3)))  # type: ignore[arg-type]
        assert brokers.committed == [{"c-control": 1}]
        brokers.answer()
        self.later(brokers, lag)
        assert brokers.committed[1:] == [{"c-command": 5}]
        follower.close()
        assert brokers.closed.wait(PATIENCE_S)
        lag.note("c-control", 2)
        self.later(brokers, lag)
        assert len(brokers.committed) == 2, "nothing is committed by a group that is closed"
