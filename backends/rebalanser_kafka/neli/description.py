"""A NELI group seen from outside, from data that any client of the cluster may read."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import UTC, datetime
from typing import TypeVar

from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from rebalanser.core.neli.messages import LastCommit, Partition
from rebalanser.core.neli.records import Note
from rebalanser.core.neli.roles import Role, RoleMap
from rebalanser.errors import RegistryRefused, RegistryUnavailable
from rebalanser.neli.contract import Candidacy
from rebalanser.neli.description import GroupDescription, MemberDescription, PartitionDescription
from rebalanser_kafka.connection import Connection, client_config
from rebalanser_kafka.failures import Act, error_of, judge
from rebalanser_kafka.topics import describe

_T = TypeVar("_T")


def describe_group(connection: Connection, candidacy: Candidacy, timeout_s: float) -> GroupDescription:
    """Request members and commits from the coordinator, and the newest records from the topic.

    Raises:
        RegistryRefused: there is no such topic, or no such group.
        AccessDenied: this user may not look at the topic or the group.
        RegistryUnavailable: no answer within ``timeout_s`` seconds.
    """
    topic = candidacy.topic
    found = describe(connection, [topic], timeout_s)
    if topic not in found:
        raise RegistryRefused(f"there is no topic {topic} at {connection.servers}")
    return _Outsider(connection, candidacy, found[topic].partitions, timeout_s).describe()


class _Outsider:
    def __init__(
        self, connection: Connection, candidacy: Candidacy, partitions: int, timeout_s: float
    ) -> None:
        self._admin = AdminClient(client_config(connection, {}))
        self._candidacy = candidacy
        self._partitions = range(partitions)
        self._roles = RoleMap(candidacy.roles, partitions)
        self._timeout_s = timeout_s

    def describe(self) -> GroupDescription:
        as_of = datetime.now(UTC)
        state, protocol, members = self._members()
        commits = self._commits()
        if state == "dead" and not commits:
            raise RegistryRefused(f"there is no group {self._candidacy.group}: nobody takes part in it")
        newest = self._newest()
        partitions = []
        for partition in self._partitions:
            commit = commits.get(partition, LastCommit(None))
            note = Note.decode(commit.metadata)
            partitions.append(
                PartitionDescription(
                    partition=partition,
                    roles=_sorted(self._roles.roles_of(partition)),
                    member=members.get(partition),
                    committed_offset=commit.offset,
                    claim=note.claim.value if note else None,
                    committed_by=note.process if note else None,
                    last_heartbeat_at=newest.get(partition),
                )
            )
        return GroupDescription(
            topic=self._candidacy.topic,
            group=self._candidacy.group,
            state=state,
            protocol=protocol,
            as_of=as_of,
            partitions=partitions,
        )

    def _members(self) -> tuple[str, str, dict[Partition, MemberDescription]]:
        group = self._candidacy.group
        futures = self._admin.describe_consumer_groups([group], request_timeout=self._timeout_s)
        found = self._result(futures[group], f"looking at group {group}")
        members = {
            assigned.partition: MemberDescription(
                member=member.member_id, client=member.client_id, host=member.host
            )
            for member in found.members
            for assigned in member.assignment.topic_partitions
            if assigned.topic == self._candidacy.topic
        }
        return found.state.name.lower(), found.type.name.lower(), members

    def _commits(self) -> dict[Partition, LastCommit]:
        group = self._candidacy.group
        (future,) = self._admin.list_consumer_group_offsets(
            [ConsumerGroupTopicPartitions(group)], request_timeout=self._timeout_s
        ).values()
        found = self._result(future, f"looking at the offsets of group {group}")
        return {
            each.partition: LastCommit(each.offset, each.metadata or "")
            for each in found.topic_partitions
            if each.topic == self._candidacy.topic and each.offset >= 0
        }

    def _newest(self) -> dict[Partition, datetime]:
        newest = OffsetSpec.max_timestamp()  # type: ignore[no-untyped-call]
        asked = {TopicPartition(self._candidacy.topic, partition): newest for partition in self._partitions}
        what = f"looking at the newest records of {self._candidacy.topic}"
        found = {
            each.partition: self._result(future, what)
            for each, future in self._admin.list_offsets(asked, request_timeout=self._timeout_s).items()
        }
        return {
            partition: datetime.fromtimestamp(record.timestamp / 1000, UTC)
            for partition, record in found.items()
            if record.timestamp >= 0
        }

    def _result(self, future: Future[_T], what: str) -> _T:
        try:
            return future.result(self._timeout_s + 1)
        except FutureTimeout:
            raise RegistryUnavailable(f"{what} was not answered within {self._timeout_s:g} s") from None
        except KafkaException as exception:
            raise judge(error_of(exception), Act.READ, what) from None


def _sorted(roles: Iterable[Role]) -> list[Role]:
    return sorted(
        roles, key=lambda role: (isinstance(role, str), role if isinstance(role, int) else 0, str(role))
    )
