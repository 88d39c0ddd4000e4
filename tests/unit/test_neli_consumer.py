"""The commits of NELI's consumer, over a client that answers when the test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaError, TopicPartition

from rebalanser.core.neli.messages import (
    Commit,
    CommitAnswered,
    Committing,
    HeartbeatRead,
    LastCommit,
    Partition,
)
from rebalanser.core.neli.records import LeadershipClaim, Note
from rebalanser.core.neli.settings import NeliSettings
from rebalanser.neli.contract import Candidacy
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.neli import consumer
from rebalanser_kafka.neli.consumer import MAX_COMMITS, GroupConsumer

LIMIT_S = 8.0
"""Four times what a silent broker has at a session timeout of 2 s."""


class Client:
    """Takes commits in, and answers none by itself."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.on_commit: Callable[[KafkaError | None, list[TopicPartition]], None] = config["on_commit"]
        self.sent: list[list[TopicPartition]] = []

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> None:
        assert asynchronous
        self.sent.append(offsets)

    def poll(self, _timeout_s: float) -> None:
        """Nothing is there."""


class Stage:
    """A consumer on a clock that the test moves; its listener, too."""

    def __init__(self) -> None:
        self.time = 100.0
        self.answers: list[CommitAnswered] = []
        candidacy = Candidacy("roles", "office", settings=NeliSettings(session_timeout_s=2.0))
        connection = Connection.from_url("kafka://127.0.0.1:1")
        self.consumer = GroupConsumer(connection, candidacy, "me", self, self)

    @property
    def client(self) -> Client:
        client: Any = self.consumer._consumer
        assert isinstance(client, Client)
        return client

    def commit(self, offset: int) -> CommitAnswered | None:
        note = Note(LeadershipClaim.HELD, "me", 1, 2.0, 1)
        return self.consumer.commit(Commit(offset, self.time, {0: Committing(offset, note)}), wait=False)

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        raise NotImplementedError

    def assigned(self, last: dict[Partition, LastCommit | None]) -> None:
        raise NotImplementedError

    def revoked(self, partitions: frozenset[Partition]) -> None:
        raise NotImplementedError

    def lost(self, partitions: frozenset[Partition]) -> None:
        raise NotImplementedError

    def read(self, record: HeartbeatRead) -> None:
        raise NotImplementedError

    def failed(self, error: KafkaError) -> None:
        raise NotImplementedError

    def answered(self, answer: CommitAnswered) -> None:
        self.answers.append(answer)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(consumer, "Consumer", Client)
    return Stage()


@pytest.mark.rule("NE-10")
def test_commits_that_are_never_answered_fail_and_make_room(stage: Stage) -> None:
    for offset in range(MAX_COMMITS):
        assert stage.commit(offset) is None
    refused = stage.commit(MAX_COMMITS)
    assert refused is not None
    assert refused.failed == {0: "earlier commits are not answered yet"}
    stage.time += LIMIT_S
    stage.consumer.poll(0.0)
    assert not stage.answers
    stage.time += 0.1
    stage.consumer.poll(0.0)
    assert [each.commit.number for each in stage.answers] == [*range(MAX_COMMITS)]
    assert {each.failed[0] for each in stage.answers} == {"not answered within 8 s"}
    assert stage.commit(MAX_COMMITS) is None


@pytest.mark.rule("NE-10")
def test_a_late_answer_does_not_pass_for_that_of_an_equal_commit(stage: Stage) -> None:
    """It was accepted when the earlier was sent, and must not make the later one's evidence."""
    assert stage.commit(7) is None
    stage.time += LIMIT_S + 0.1
    stage.consumer.poll(0.0)
    assert len(stage.answers) == 1
    assert stage.commit(7) is not None, "an equal commit can't be told from the one that was given up"
    stage.client.on_commit(None, stage.client.sent[0])
    assert len(stage.answers) == 1
    assert stage.commit(7) is None
    stage.client.on_commit(None, stage.client.sent[1])
    assert stage.answers[1].failed == {}
