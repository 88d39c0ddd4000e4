"""Shiva's three topics and their settings (SH-1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.errors import RegistryRefused
from rebalanser.runtime.logs import get_logger
from rebalanser.shiva.cluster import TopicNames
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.topics import (
    PARTITIONS,
    Difference,
    TopicSpec,
    by_topic,
    describe,
    ensure_topics,
    partitions_of,
    refuse,
    remedy,
)

_DAY_MS: Final = 24 * 3600 * 1000
MAX_MESSAGE_BYTES: Final = 8 * 2**20
"""Maximum bytes of a record: a document of 10,000 applications takes 850 kB, near Kafka's own default."""
_COMMON: Final = MappingProxyType(
    {
        "cleanup.policy": "compact,delete",
        "max.message.bytes": str(MAX_MESSAGE_BYTES),
        "message.timestamp.type": "LogAppendTime",  # retention must not depend on a writer's wrong clock
        "segment.bytes": str(10_000_000),  # the active segment is neither compacted nor deleted
    }
)
_MUST_MATCH: Final = frozenset({PARTITIONS})

_log = get_logger("rebalanser.shiva")


def specs(names: TopicNames) -> list[TopicSpec]:
    """Return the topics with their retention; the protocol requires one partition each."""
    retention: tuple[tuple[str, int, int, dict[str, str]], ...] = (
        # A stop that is compacted away while nobody leads is lost if the start after it is then refused.
        (names.command, 15 * _DAY_MS, 100_000_000, {"min.compaction.lag.ms": str(_DAY_MS)}),
        (names.control, _DAY_MS, 100_000_000, {}),
        (names.assignement, 3 * 365 * _DAY_MS, 20_000_000, {}),
    )
    return [
        TopicSpec(
            name,
            partitions=1,
            settings={
                **_COMMON,
                "retention.ms": str(age_ms),
                "retention.bytes": str(size_bytes),
                **further,
            },
            must_match=_MUST_MATCH,
        )
        for name, age_ms, size_bytes, further in retention
    ]


def ensure(connection: Connection, names: TopicNames, timeout_s: float) -> None:
    """Create missing topics, and log the differences of the others.

    Raises:
        InvalidSettings: a topic has several partitions; the message says what to do.
        AccessDenied: a topic is missing and this user may not create it.
        RegistryUnavailable: no answer within ``timeout_s`` seconds.
    """
    for found in by_topic(ensure_topics(connection, specs(names), timeout_s)):
        _log.warning(
            "a topic has other settings than it should",
            action="topic_differs",
            cluster=connection.cluster,
            topic=found[0].topic,
            differences="; ".join(f"{each.setting} is {each.found}, wanted {each.wanted}" for each in found),
            remedy=remedy(found, connection.servers),
        )


def require_one_partition(connection: Connection, names: TopicNames, timeout_s: float) -> None:
    """Refuse topics that no leader could use, instead of waiting for a leader; creates nothing.

    Raises:
        InvalidSettings: a topic has several partitions; the message says what to do.
        AccessDenied: this user may not describe a topic.
        RegistryUnavailable: no answer within ``timeout_s`` seconds.
    """
    topics = (names.command, names.control, names.assignement)
    counts = partitions_of(connection, topics, timeout_s)
    refuse(
        connection,
        [Difference(name, PARTITIONS, "1", str(count)) for name, count in counts.items() if count != 1],
    )


@dataclass(frozen=True, slots=True)
class CommandTopic:
    """Limits of COMMAND as it is; a retention of -1 counts as for ever."""

    retention_ms: int
    retention_bytes: int
    max_message_bytes: int

    def retained(self, options: LeaderOptions) -> LeaderOptions:
        """Return the options with the retention that COMMAND really has (SH-15)."""
        return replace(
            options,
            retention_s=options.retention_s if self.retention_ms < 0 else self.retention_ms / 1000,
            retention_bytes=options.retention_bytes if self.retention_bytes < 0 else self.retention_bytes,
        )


def found(connection: Connection, command: str, timeout_s: float) -> CommandTopic:
    """Return the limits of COMMAND, which must exist.

    Raises:
        RegistryRefused: it was removed meanwhile.
        RegistryUnavailable: no answer within ``timeout_s`` seconds.
    """
    state = describe(connection, [command], timeout_s).get(command)
    if state is None:
        raise RegistryRefused(f"topic {command} does not exist")
    names = ("retention.ms", "retention.bytes", "max.message.bytes")
    return CommandTopic(*(int(state.settings[name]) for name in names))


def exists(connection: Connection, topic: str, timeout_s: float) -> bool:
    """True if the topic exists; it is not created.

    Raises:
        RegistryUnavailable: no answer within ``timeout_s`` seconds.
    """
    return topic in partitions_of(connection, [topic], timeout_s)
