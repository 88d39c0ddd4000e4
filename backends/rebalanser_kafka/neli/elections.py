"""NELI groups of a Kafka cluster."""

from __future__ import annotations

import logging
from dataclasses import replace

from rebalanser.core.neli.settings import check
from rebalanser.errors import InvalidUrl, RegistryUnavailable
from rebalanser.neli.contract import Candidacy, Elections, OnCall, OnFact
from rebalanser.neli.description import GroupDescription
from rebalanser.registry.urls import RegistryUrl
from rebalanser.runtime.clock import SystemClock
from rebalanser_kafka.connection import Connection, reach
from rebalanser_kafka.neli.candidate import KafkaCandidate
from rebalanser_kafka.neli.description import describe_group
from rebalanser_kafka.neli.topic import prepare_group, prepare_topic
from rebalanser_kafka.topics import describe

_log = logging.getLogger("rebalanser.neli")


class KafkaElections(Elections):
    """NELI groups of one Kafka cluster; keeps nothing open but the candidates that it created."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        """``timeout_s`` limits each preparation of a topic or group, and each description."""
        self._connection = connection
        self._timeout_s = timeout_s

    def stand(self, candidacy: Candidacy, on_call: OnCall, on_fact: OnFact) -> KafkaCandidate:
        for warning in check(candidacy.settings):
            _log.warning("%s", warning, extra={"action": "unwise_settings"})
        with self._connection.naming_user():
            prepare_topic(self._connection, candidacy, self._timeout_s)
            prepare_group(self._connection, candidacy, self._timeout_s)
            counted_at = SystemClock().now()
            found = describe(self._connection, [candidacy.topic], self._timeout_s)
        if candidacy.topic not in found:
            raise RegistryUnavailable(f"topic {candidacy.topic} has been deleted just now")
        partitions = found[candidacy.topic].partitions
        return KafkaCandidate(self._connection, candidacy, partitions, counted_at, on_call, on_fact)

    def describe(self, candidacy: Candidacy) -> GroupDescription:
        with self._connection.naming_user():
            return describe_group(self._connection, candidacy, self._timeout_s)


def open_elections(url: RegistryUrl, timeout_s: float) -> KafkaElections:
    """Connect to the cluster at ``kafka://HOST:PORT,…``; wait at most ``timeout_s`` seconds for a first
    answer.

    Raises:
        InvalidUrl: the URL names more than a cluster's brokers, or an option is invalid.
        RegistryUnavailable: no broker answered; the message says what was tried.
        AccessDenied: a broker answered and refused the account.
    """
    if url.path.strip("/"):
        raise InvalidUrl(f"{url} has a path; NELI takes the topic and the group by themselves")
    connection = replace(Connection.from_url(url, timeout_s), cluster="")
    reach(connection, timeout_s)
    return KafkaElections(connection, timeout_s)
