"""Topics on Kafka: a client that gets no answer is replaced by another one."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from rebalanser_kafka import topics
from rebalanser_kafka.connection import Connection

from rebalanser.errors import RegistryUnavailable

CONNECTION = Connection.from_address("127.0.0.1:9", "c")
TOPIC = "c-topic"


def answered(outcome: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    return future


@pytest.fixture(autouse=True)
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(topics, "PAUSE_S", 0.0)


class Clients:
    """Clients of which the first ones have been told that there is no broker, and wait for one in vain."""

    def __init__(self, deaf: int) -> None:
        self._deaf = deaf
        self.made = 0
        self.timeouts_s: list[float] = []

    def __call__(self, _config: object) -> SimpleNamespace:
        self.made += 1
        is_deaf = self.made <= self._deaf

        def describe_topics(_names: object, *, request_timeout: float) -> dict[str, Future[Any]]:
            self.timeouts_s.append(request_timeout)
            late = KafkaException(KafkaError(KafkaError._TIMED_OUT))
            return {TOPIC: answered(late if is_deaf else SimpleNamespace(partitions=[0, 1]))}

        return SimpleNamespace(describe_topics=describe_topics)


def test_a_client_that_hears_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = Clients(deaf=2)
    monkeypatch.setattr(topics, "AdminClient", clients)
    assert topics.partitions_of(CONNECTION, [TOPIC], 60.0) == {TOPIC: 2}
    assert clients.made == 3
    assert clients.timeouts_s == [2.0, 4.0, 8.0]


def test_no_answer_at_all_is_told_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "AdminClient", Clients(deaf=1))
    with pytest.raises(RegistryUnavailable):
        topics.partitions_of(CONNECTION, [TOPIC], 0.0)
