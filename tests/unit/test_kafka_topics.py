"""Topics and groups on Kafka: a client without an answer is replaced, and settings are as they must be."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final, Self

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import ConfigSource  # type: ignore[attr-defined]

from rebalanser.core.neli.settings import GroupProtocol, NeliSettings
from rebalanser.errors import InvalidSettings, RegistryUnavailable
from rebalanser.neli.contract import Candidacy
from rebalanser_kafka import topics
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.neli import topic

CONNECTION = Connection.from_url("kafka://127.0.0.1:9/c")
TOPIC = "c-topic"
NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


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


DEFAULTS: Final = {topic.GROUP_SESSION: "45000", topic.GROUP_HEARTBEAT: "5000"}


class GroupSettings:
    """Settings of a KIP-848 group, by default Kafka's, and what they are changed to."""

    def __init__(self, own: Mapping[str, str] = NOTHING, *, refuses: int | None = None) -> None:
        self._own = own
        self._refuses = refuses
        self.changed: dict[str, str] = {}

    def __call__(self, _config: object) -> Self:
        return self

    def describe_configs(self, resources: list[Any], **_: object) -> dict[Any, Future[Any]]:
        entries = {
            name: SimpleNamespace(value=value, source=ConfigSource.DEFAULT_CONFIG.value)
            for name, value in DEFAULTS.items()
        }
        for name, value in self._own.items():
            entries[name] = SimpleNamespace(value=value, source=ConfigSource.GROUP_CONFIG.value)
        return {resources[0]: answered(entries)}

    def incremental_alter_configs(self, resources: list[Any], **_: object) -> dict[Any, Future[Any]]:
        if self._refuses is not None:
            return {resources[0]: answered(KafkaException(KafkaError(self._refuses)))}
        self.changed = {entry.name: entry.value for entry in resources[0].incremental_configs}
        return {resources[0]: answered(None)}


def prepared(monkeypatch: pytest.MonkeyPatch, broker: GroupSettings, **settings: Any) -> dict[str, str]:
    """What a member with these settings changes."""
    monkeypatch.setattr(topic, "AdminClient", broker)
    of = NeliSettings(protocol=GroupProtocol.CONSUMER, max_poll_interval_s=300.0, **settings)
    topic.prepare_group(CONNECTION, Candidacy("t", "g", settings=of), 1.0)
    return broker.changed


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"session_timeout_s": 45.0}, {}),
        ({"session_timeout_s": 60.0}, {topic.GROUP_SESSION: "60000"}),
        ({"session_timeout_s": 45.0, "heartbeat_interval_s": 15.0}, {topic.GROUP_HEARTBEAT: "15000"}),
        (
            {"session_timeout_s": 6.0},
            {topic.GROUP_SESSION: "6000", topic.GROUP_HEARTBEAT: "1000"},
        ),
    ],
)
def test_a_groups_settings_are_changed_where_fail_overs_would_take_longer(
    settings: dict[str, float], changed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prepared(monkeypatch, GroupSettings(), **settings) == changed


def test_a_session_of_a_group_that_may_not_be_changed_is_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    denied = GroupSettings(refuses=KafkaError.GROUP_AUTHORIZATION_FAILED)
    command = "--alter --group g --add-config consumer.session.timeout.ms=10000"
    with pytest.raises(InvalidSettings, match=f"has consumer.session.timeout.ms=45000 .* {command}"):
        prepared(monkeypatch, denied)


def test_a_session_or_heartbeat_beyond_the_brokers_limits_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    beyond = GroupSettings(refuses=KafkaError.INVALID_CONFIG)
    with pytest.raises(InvalidSettings) as caught:
        prepared(monkeypatch, beyond)
    for name in ("session.timeout.ms", "heartbeat.interval.ms"):
        assert f"group.consumer.{{min,max}}.{name}" in str(caught.value)


def test_heartbeats_that_are_too_rare_are_warned_about_with_the_command(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Set on purpose, they are left alone."""
    rare = GroupSettings({topic.GROUP_SESSION: "45000", topic.GROUP_HEARTBEAT: "15000"})
    assert prepared(monkeypatch, rare, session_timeout_s=45.0) == {}
    assert "group g has consumer.heartbeat.interval.ms=15000, and not 7500" in caplog.text
    assert "--alter --group g --add-config consumer.heartbeat.interval.ms=7500" in caplog.text
