"""A group's log on Kafka: what the brokers may answer while its topic is new."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from rebalanser_kafka.connection import Connection
from rebalanser_kafka.group import log as group_log
from rebalanser_kafka.topics import TopicState

TOPIC = "c-group-g"


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """What brokers know, look by look: of the topic's settings, and of its partitions; the last one stays."""
    found: list[tuple[bool, bool]] = []

    def describe(*_: Any) -> dict[str, TopicState]:
        return {TOPIC: TopicState(TOPIC, 1, {"min.insync.replicas": "1"})} if found[0][0] else {}

    def list_topics(*_: Any, **__: Any) -> object:
        knows = found.pop(0)[1] if len(found) > 1 else found[0][1]
        partitions = {0: SimpleNamespace(replicas=[1, 2])} if knows else {}
        return SimpleNamespace(topics={TOPIC: SimpleNamespace(partitions=partitions)})

    class Reader:
        """Of an empty topic."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.position = 0

        def bounds(self, _timeout_s: float) -> tuple[int, int]:
            return 0, 0

        def close(self) -> None:
            """Nothing is open."""

    monkeypatch.setattr(group_log, "ensure_topics", lambda *_: [])
    monkeypatch.setattr(group_log, "describe", describe)
    monkeypatch.setattr(group_log, "AdminClient", lambda _config: SimpleNamespace(list_topics=list_topics))
    monkeypatch.setattr(group_log, "LogReader", Reader)
    return found


@pytest.mark.parametrize("first", [(False, True), (True, False)])
def test_a_new_topic_that_a_broker_has_not_heard_of_is_waited_for(
    looks: list[tuple[bool, bool]], first: tuple[bool, bool]
) -> None:
    looks += [first, (True, True)]
    with closing(group_log.KafkaLog(Connection.from_url("kafka://127.0.0.1:9/c"), TOPIC, 1.0, 20.0)) as log:
        assert log.begin() == (0, 0)
        assert len(log.unsafe_reasons) == 1
