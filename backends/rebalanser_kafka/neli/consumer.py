"""The consumer of a NELI group: one thread polls it, and all of the client's reports come from its poll."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, Protocol

from confluent_kafka import OFFSET_END, OFFSET_STORED, Consumer, KafkaError, Message, TopicPartition

from rebalanser.core.clock import Clock
from rebalanser.core.neli.messages import Commit, CommitAnswered, HeartbeatRead, LastCommit, Partition
from rebalanser.core.neli.records import HEADER, Stamp
from rebalanser.core.neli.settings import GroupProtocol, NeliSettings
from rebalanser.neli.contract import Candidacy
from rebalanser_kafka.connection import Connection, client_config
from rebalanser_kafka.failures import RAISED, error_of
from rebalanser_kafka.records import to_record

MAX_BATCH: Final = 500
"""Maximum records of one poll before a commit may be made."""
MAX_COMMITS: Final = 8
"""Maximum unanswered commits."""
MAX_OVERDUE: Final = 1_000
"""Maximum commits kept of those given up unanswered."""
COOPERATIVE: Final = "cooperative-sticky"
UNIFORM: Final = "uniform"
"""The broker's sticky assignor for KIP-848."""

_NO_MEMBER: Final = frozenset(
    {KafkaError.UNKNOWN_MEMBER_ID, KafkaError.FENCED_INSTANCE_ID, KafkaError.FENCED_MEMBER_EPOCH}
)
_CommitKey = tuple[tuple[int, int, str], ...]
_log = logging.getLogger("rebalanser.neli")


class ConsumerListener(Protocol):
    """Receives the events of a poll, during the poll and in its thread."""

    def assigned(self, last: dict[Partition, LastCommit | None]) -> None:
        """Partitions are read from now on."""

    def revoked(self, partitions: frozenset[Partition]) -> None:
        """Partitions are revoked once this returns."""

    def lost(self, partitions: frozenset[Partition]) -> None:
        """Partitions are lost."""

    def read(self, record: HeartbeatRead) -> None:
        """A record was read."""

    def answered(self, answer: CommitAnswered) -> None:
        """A commit was answered."""

    def failed(self, error: KafkaError) -> None:
        """The client reported an error that belongs to no commit."""


def group_config(candidacy: Candidacy) -> dict[str, str | int | bool]:
    """Return librdkafka's settings of the consumer, without the connection's."""
    settings = candidacy.settings
    wait_ms = max(10, min(250, int(settings.base_interval_s * 250)))
    config: dict[str, str | int | bool] = {
        "group.id": candidacy.group,
        "group.protocol": settings.protocol.value,
        "max.poll.interval.ms": int(settings.max_poll_interval_s * 1000),
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "latest",
        "isolation.level": "read_uncommitted",
        # A new partition is fetched only after the answer to the fetch in flight.
        "fetch.wait.max.ms": wait_ms,
        "fetch.error.backoff.ms": wait_ms,
        "fetch.queue.backoff.ms": wait_ms,
        "socket.timeout.ms": int(_silence_s(settings) * 1000),
        "topic.metadata.refresh.interval.ms": max(1_000, int(settings.limit_s * 1000)),
    }
    if candidacy.instance is not None:
        config["group.instance.id"] = candidacy.instance
    return config | _protocol_config(settings)


def _silence_s(settings: NeliSettings) -> float:
    """Return the seconds after which a silent broker is given up, in time to ask the next one."""
    return min(60.0, max(2.0, settings.session_timeout_s))


def _protocol_config(settings: NeliSettings) -> dict[str, str | int | bool]:
    if settings.protocol is GroupProtocol.CONSUMER:
        return {"group.remote.assignor": UNIFORM if settings.assignor == COOPERATIVE else settings.assignor}
    return {
        "partition.assignment.strategy": settings.assignor,
        "session.timeout.ms": int(settings.session_timeout_s * 1000),
        "heartbeat.interval.ms": max(1, int(settings.alive_interval_s * 1000)),
    }


class GroupConsumer:
    """Reads the partitions that the group's coordinator assigns. One thread at a time."""

    def __init__(
        self,
        connection: Connection,
        candidacy: Candidacy,
        process: str,
        listener: ConsumerListener,
        clock: Clock,
    ) -> None:
        """Create the consumer; nothing is sent yet. ``clock`` gives the times of commits."""
        self._topic = candidacy.topic
        self._listener = listener
        self._clock = clock
        self._ask_s = max(1.0, min(5.0, candidacy.settings.limit_s))
        settings = candidacy.settings
        self._incremental = settings.protocol is GroupProtocol.CONSUMER or settings.assignor == COOPERATIVE
        self._unanswered: dict[_CommitKey, Commit] = {}
        self._overdue: OrderedDict[_CommitKey, None] = OrderedDict()
        # librdkafka answers each after waiting for a coordinator and asking it; twice that is not in time.
        self._answer_s = 4 * _silence_s(settings)
        config = {**group_config(candidacy), "client.id": process}
        self._consumer = Consumer(
            {**client_config(connection, config, listener.failed), "on_commit": self._committed}
        )

    def join(self) -> None:
        """Join the group with the next poll."""
        self._consumer.subscribe(
            [self._topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
        )

    def poll(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` seconds for an event, and pass all pending events to the listener, in
        the client's order. Raises what the listener raises."""
        self._give_up_overdue()
        for _ in range(MAX_BATCH):
            try:
                message = self._consumer.poll(timeout_s)
            except RAISED as exception:
                self._listener.failed(error_of(exception))
                return
            if message is None:
                return
            self._take(message)
            timeout_s = 0.0

    def commit(self, commit: Commit, *, wait: bool) -> CommitAnswered | None:
        """Send a commit. Its answer comes from a later poll, or with ``wait`` is awaited, as inside a
        callback; an error that prevents sending is an answer, too."""
        offsets = [
            TopicPartition(self._topic, partition, part.offset, part.note.encode())
            for partition, part in commit.offsets.items()
        ]
        key = _key(offsets)
        # Answers do not distinguish equal commits; nor may commits pile up while no answer comes.
        known = key in self._unanswered or key in self._overdue
        if not wait and (known or len(self._unanswered) >= MAX_COMMITS):
            return _refused(commit, "earlier commits are not answered yet")
        try:
            if wait:
                answered = self._consumer.commit(offsets=offsets, asynchronous=False)
                return _answer(commit, None, answered or [])
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except RAISED as exception:
            return _answer(commit, error_of(exception), offsets)
        self._unanswered[key] = commit
        return None

    def close(self) -> None:
        """Leave the group and close the connections."""
        self._consumer.close()

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        last = self._last_commits(partitions)
        for partition in partitions:
            known = last[partition.partition]
            if known is None:
                partition.offset = OFFSET_STORED
            else:
                partition.offset = OFFSET_END if known.offset is None else known.offset
        if self._incremental:
            consumer.incremental_assign(partitions)
        else:
            consumer.assign(partitions)
        self._listener.assigned(last)

    def _last_commits(self, partitions: list[TopicPartition]) -> dict[Partition, LastCommit | None]:
        if not partitions:
            return {}
        try:
            found = self._consumer.committed(partitions, timeout=self._ask_s)
        except RAISED as exception:
            _log.warning(
                "asking for the offsets of %s failed: %s",
                self._topic,
                error_of(exception).str(),
                extra={"action": "offsets_not_read"},
            )
            found = []
        last: dict[Partition, LastCommit | None] = dict.fromkeys(each.partition for each in partitions)
        for each in found:
            if each.error is None:
                never = each.offset < 0
                last[each.partition] = LastCommit(None if never else each.offset, each.metadata or "")
        return last

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._listener.revoked(_numbers(partitions))
        self._let_go(consumer, partitions)

    def _lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._listener.lost(_numbers(partitions))
        self._let_go(consumer, partitions)

    def _let_go(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if self._incremental:
            consumer.incremental_unassign(partitions)
        else:
            consumer.unassign()

    def _give_up_overdue(self) -> None:
        """Give up commits whose answers are overdue, so that others can be sent.

        The commit is remembered: a late answer would pass for that of an equal commit that was sent later,
        and make the evidence younger than it is. Offsets grow, so old ones need not be kept.
        """
        limit = self._clock.now() - self._answer_s
        for key in [key for key, commit in self._unanswered.items() if commit.sent_at < limit]:
            commit = self._unanswered.pop(key)
            self._overdue[key] = None
            if len(self._overdue) > MAX_OVERDUE:
                self._overdue.popitem(last=False)
            self._listener.answered(_refused(commit, f"not answered within {self._answer_s:g} s"))

    def _committed(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        key = _key(partitions)
        self._overdue.pop(key, None)
        commit = self._unanswered.pop(key, None)
        if commit is not None:
            self._listener.answered(_answer(commit, error, partitions))

    def _take(self, message: Message) -> None:
        error, partition, offset = message.error(), message.partition(), message.offset()
        if error is not None:
            self._listener.failed(error)
            return
        if partition is None or offset is None:
            return
        record = to_record(message, offset)
        self._listener.read(
            HeartbeatRead(
                partition=partition,
                offset=offset,
                stamp=Stamp.decode(record.headers.get(HEADER)),
                timestamp_ms=record.timestamp_ms,
                log_append_time=record.log_append_time,
                wall_ms=self._clock.wall() * 1000,
            )
        )


def _numbers(partitions: Iterable[TopicPartition]) -> frozenset[Partition]:
    return frozenset(each.partition for each in partitions)


def _key(offsets: Iterable[TopicPartition]) -> _CommitKey:
    return tuple(sorted((each.partition, each.offset, each.metadata or "") for each in offsets))


def _refused(commit: Commit, reason: str) -> CommitAnswered:
    return CommitAnswered(commit, dict.fromkeys(commit.offsets, reason))


def _answer(commit: Commit, error: KafkaError | None, partitions: Iterable[TopicPartition]) -> CommitAnswered:
    """Return the answer to the whole commit, or to each of its partitions; one that is not named was not
    accepted."""
    if error is not None:
        fenced = error.code() in _NO_MEMBER
        return CommitAnswered(commit, dict.fromkeys(commit.offsets, error.str()), fenced)
    failed = dict.fromkeys(commit.offsets, "no answer for this partition")
    fenced = False
    for each in partitions:
        if each.error is None:
            failed.pop(each.partition, None)
        else:
            failed[each.partition] = each.error.str()
            fenced = fenced or each.error.code() in _NO_MEMBER
    return CommitAnswered(commit, failed, fenced)
