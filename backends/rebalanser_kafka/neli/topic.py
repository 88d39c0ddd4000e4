"""The topic of heartbeats and the group's own settings, as the mode requires them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    ResourceType,
)

from rebalanser.core.neli.settings import GroupProtocol, Mode, NeliSettings
from rebalanser.errors import InvalidSettings
from rebalanser.neli.contract import Candidacy
from rebalanser_kafka.connection import Connection, client_config
from rebalanser_kafka.failures import Act, UnsupportedBroker, error_of, is_denied, judge
from rebalanser_kafka.topics import PARTITIONS, TopicSpec, ensure_topics

TIMESTAMPS: Final = "message.timestamp.type"
GROUP_SESSION: Final = "consumer.session.timeout.ms"
GROUP_HEARTBEAT: Final = "consumer.heartbeat.interval.ms"
RETENTION_MS: Final = 3_600_000
"""Retention in milliseconds, longer than any reader needs: reading begins where the last leader committed."""

NO_CONSUMER_GROUPS: Final = (
    "this broker has no KIP-848 consumer groups (Kafka 4.0 or later, switched on); "
    "use the classic protocol (--protocol classic)"
)
_NO_GROUP_SETTINGS: Final = frozenset(
    {KafkaError.INVALID_REQUEST, KafkaError.UNSUPPORTED_VERSION, KafkaError._UNSUPPORTED_FEATURE}
)

_log = logging.getLogger("rebalanser.neli")


def topic_spec(candidacy: Candidacy) -> TopicSpec:
    """Return the topic's settings for its creation, and those that an existing one must have (NE-2, NE-7)."""
    exclusive = candidacy.settings.mode is Mode.EXCLUSIVE
    settings = {
        "cleanup.policy": "delete",
        TIMESTAMPS: "LogAppendTime",
        "retention.ms": str(RETENTION_MS),
        "segment.ms": str(RETENTION_MS // 6),
        "unclean.leader.election.enable": "false",
    }
    must_match = {"cleanup.policy"} | ({TIMESTAMPS} if exclusive else set())
    return TopicSpec(candidacy.topic, candidacy.partitions, settings, frozenset(must_match))


def prepare_topic(connection: Connection, candidacy: Candidacy, timeout_s: float) -> None:
    """Create the topic if it is missing; warn of unwise settings of an existing one.

    Raises:
        InvalidSettings: the mode's promises could not be kept on it; the message says what to do.
        AccessDenied: it is missing and this user may not create it.
        RegistryUnavailable: no answer within ``timeout_s`` seconds.
    """
    for difference in ensure_topics(connection, [topic_spec(candidacy)], timeout_s):
        if difference.setting == "unclean.leader.election.enable":
            _log.warning(
                "%s: tokens may not grow if a log loses records (NE-15)",
                difference,
                extra={"action": "unsafe_topic"},
            )
        elif difference.setting != PARTITIONS:
            _log.debug("%s", difference, extra={"action": "topic_differs"})


def prepare_group(connection: Connection, candidacy: Candidacy, timeout_s: float) -> None:
    """Give a KIP-848 group the session timeout of the settings: it is a setting of the broker.

    Heartbeats may be more frequent than in the settings; less frequent ones cause a warning.

    Raises:
        InvalidSettings: the group has another timeout, which was set on purpose or which this user may not
            change.
        UnsupportedBroker: groups of this broker have no settings, so it does not support KIP-848.
        RegistryUnavailable: no answer within ``timeout_s`` seconds.
    """
    settings, group = candidacy.settings, candidacy.group
    if settings.protocol is GroupProtocol.CLASSIC:
        return
    admin = AdminClient(client_config(connection, {}))
    wanted = _wanted(settings)
    found = _group_settings(admin, group, timeout_s)
    differing = {name: value for name, value in wanted.items() if found.get(name, ("", False))[0] != value}
    alive_ms = found.get(GROUP_HEARTBEAT, ("", False))[0]
    if not settings.heartbeat_interval_s and alive_ms and int(alive_ms) <= int(wanted[GROUP_HEARTBEAT]):
        differing.pop(GROUP_HEARTBEAT, None)
    if not any(found[name][1] for name in differing if name in found):
        differing = _set(admin, group, differing, timeout_s)

    def remedy(name: str) -> str:
        return (
            f"kafka-configs.sh --bootstrap-server {connection.servers} --alter --group {group} "
            f"--add-config {name}={wanted[name]}"
        )

    if GROUP_SESSION in differing:
        has = found.get(GROUP_SESSION, ("an unknown value", False))[0]
        raise InvalidSettings(
            f"group {group} has {GROUP_SESSION}={has} and session_timeout_s is "
            f"{settings.session_timeout_s:g}: make them equal ({remedy(GROUP_SESSION)})"
        )
    if GROUP_HEARTBEAT in differing:
        _log.warning(
            "group %s has %s=%s, and not %s: processes learn later that one was lost (%s)",
            group,
            GROUP_HEARTBEAT,
            alive_ms or "an unknown value",
            wanted[GROUP_HEARTBEAT],
            remedy(GROUP_HEARTBEAT),
            extra={"action": "slow_heartbeats"},
        )


def _wanted(settings: NeliSettings) -> dict[str, str]:
    return {
        GROUP_SESSION: str(int(settings.session_timeout_s * 1000)),
        GROUP_HEARTBEAT: str(max(1, int(settings.alive_interval_s * 1000))),
    }


def _group_settings(admin: AdminClient, group: str, timeout_s: float) -> dict[str, tuple[str, bool]]:
    """Return each setting's value, and True if it was set for this very group."""
    resource = ConfigResource(ResourceType.GROUP, group)
    try:
        (future,) = admin.describe_configs([resource], request_timeout=timeout_s).values()
        entries = future.result(timeout_s + 1)
    except KafkaException as exception:
        error = error_of(exception)
        if group and error.code() in _NO_GROUP_SETTINGS:
            raise UnsupportedBroker(NO_CONSUMER_GROUPS) from None
        raise judge(error, Act.READ, f"looking at the settings of group {group}") from None
    own = ConfigSource.GROUP_CONFIG.value
    return {name: (entry.value, entry.source == own) for name, entry in entries.items() if entry.value}


def _set(admin: AdminClient, group: str, settings: Mapping[str, str], timeout_s: float) -> dict[str, str]:
    """Set these settings; return those that the broker does not let this user set."""
    if not settings:
        return {}
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in settings.items()
    ]
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=entries)
    try:
        (future,) = admin.incremental_alter_configs([resource], request_timeout=timeout_s).values()
        future.result(timeout_s + 1)
    except KafkaException as exception:
        error = error_of(exception)
        if not is_denied(error):
            what = ", ".join(f"{name}={value}" for name, value in settings.items())
            limits = (
                "brokers allow sessions of 45 to 60 s and heartbeats each 5 to 15 s unless their "
                "group.consumer.{min,max}.session.timeout.ms and "
                "group.consumer.{min,max}.heartbeat.interval.ms differ"
            )
            raise judge(error, Act.READ, f"setting {what} of group {group} ({limits})") from None
        return dict(settings)
    return {}
