"""``kafka://``: a Kafka cluster in which each group has a log of its own."""

from __future__ import annotations

from collections.abc import Callable

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from rebalanser.errors import UnknownGroup
from rebalanser.registry.contract import Capabilities
from rebalanser.registry.urls import GroupStore, RegistryUrl
from rebalanser_kafka.connection import Connection, client_config, reach
from rebalanser_kafka.failures import Act, error_of, judge
from rebalanser_kafka.group.applications import RunningApplications
from rebalanser_kafka.group.coordinator import CAPABILITIES, LogCoordinator
from rebalanser_kafka.group.log import KafkaLog, topic_of
from rebalanser_kafka.topics import describe


def open_kafka(url: RegistryUrl, timeout_s: float) -> KafkaGroups:
    """Open the Kafka cluster at ``url``, waiting at most ``timeout_s`` seconds for its first answer.

    Raises:
        InvalidUrl: the cluster's name, an option or the account is invalid.
        RegistryUnavailable: no broker answered; the message says what was tried and for how long.
        AccessDenied: a broker refused the account.
    """
    groups = KafkaGroups(url)
    reach(groups.connection, timeout_s)
    return groups


class KafkaGroups(GroupStore):
    """The groups of one cluster's name. Made by ``open_kafka``."""

    def __init__(self, url: RegistryUrl) -> None:
        self._url = url
        self.connection = Connection.from_url(url)
        self._admin: AdminClient | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of a group in a log."""
        return CAPABILITIES

    def look(self, timeout_s: float) -> None:
        """Ask a broker for its metadata, and wait at most ``timeout_s`` seconds for the answer.

        Raises:
            RegistryUnavailable: it did not answer in time.
        """
        if self._admin is None:
            self._admin = AdminClient(client_config(self.connection, {}))
        try:
            self._admin.list_topics(timeout=timeout_s)
        except KafkaException as error:
            raise judge(error_of(error), Act.READ, f"asking {self.connection.servers}") from None

    def open_group(
        self,
        group: str,
        now: Callable[[], float],
        timeout_s: float,
        connect_timeout_s: float,
        *,
        create: bool = True,
    ) -> LogCoordinator:
        """Open the log of a group and read it to its end; with ``create`` a missing topic is made.

        Raises:
            UnknownGroup: without ``create`` only: there is no such topic.
            RegistryUnavailable: the log was not read within ``connect_timeout_s`` seconds.
            InvalidName: the group's name can't be stored.
            InvalidSettings: its topic exists with settings that would lose records.
            AccessDenied: its topic may not be made or read.
        """
        topic = topic_of(self.connection.cluster, group)
        # A silent broker is given up, with its connection, at a command's timeout.
        connection = Connection.from_url(self._url, timeout_s)
        if not create and topic not in describe(connection, [topic], connect_timeout_s):
            raise UnknownGroup(f"no such group: {group!r}, as there is no topic {topic}")
        log = KafkaLog(connection, topic, timeout_s, connect_timeout_s)
        coordinator = LogCoordinator(log, group, now, timeout_s)
        try:
            coordinator.open(connect_timeout_s)
            coordinator.feed_from(RunningApplications(connection))
        except BaseException:
            coordinator.close()
            raise
        return coordinator

    def close(self) -> None:
        """Close the connection. Closing twice does nothing."""
        self._admin = None
