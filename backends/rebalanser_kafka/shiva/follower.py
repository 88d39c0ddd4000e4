"""A thread that follows one topic and passes on its records, one batch at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from confluent_kafka import Consumer, KafkaError, TopicPartition

from rebalanser.errors import InternalError, RebalanserError, RegistryUnavailable, UnusableStore
from rebalanser.runtime.logs import get_logger
from rebalanser_kafka.connection import Connection, client_config
from rebalanser_kafka.failures import RAISED, Act, LogTruncated, error_of, is_passing, judge
from rebalanser_kafka.reader import LogReader
from rebalanser_kafka.records import LogRecord
from rebalanser_kafka.shiva.throttled_warning import ThrottledWarning

POLL_S: Final = 0.2
CLOSE_TIMEOUT_S: Final = 5.0
LOOK_S: Final = 5.0
"""Seconds for one request of the log's first and last offset."""
COMMIT_S: Final = 5.0
"""Minimum seconds between two commits of the positions of a process's followers."""
COMMIT_AGAIN_S: Final = 3600.0
"""Seconds after which unchanged positions are committed again: brokers forget them in time."""

_log = get_logger("rebalanser.shiva")


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Records of a follower, and the position after them. It reads on once ``taken`` is set."""

    topic: str
    records: Sequence[LogRecord]
    position: int
    taken: threading.Event


@dataclass(frozen=True, slots=True)
class TopicLost:
    """A topic cannot be followed any more."""

    error: RebalanserError


class LagGroup:
    """Commits positions to a consumer group without members, so that Kafka's own tools show the lag.

    Positions are for people and alerts: no reader starts from them. Nothing waits for a commit. The first one
    that a broker refuses is logged. All methods may be called from any thread.
    """

    def __init__(self, connection: Connection, reader: str) -> None:
        """``reader`` is the reader's name within the cluster: the group is ``{cluster}-lag:{reader}``.

        No cluster's name has a colon, so no other group of a cluster can have this name. A consumer that
        subscribes to nothing commits: it joins nothing, and a group with members would refuse its commits.
        An admin client would do, but librdkafka 2.16 aborts the process if the broker is away meanwhile.
        """
        self.group = f"{connection.cluster}-lag:{reader}"
        self._fields = {"cluster": connection.cluster, "group": self.group}
        self._lock = threading.Lock()
        settings = {"group.id": self.group, "enable.auto.commit": False, "on_commit": self._answered}
        self._consumer: Consumer | None = Consumer(client_config(connection, settings))
        self._positions: dict[str, int] = {}
        self._committed: dict[str, int] = {}
        self._pending = False
        self._due_at = time.monotonic() + COMMIT_S
        self._again_at = time.monotonic() + COMMIT_AGAIN_S
        self._has_warned = False

    def note(self, topic: str, position: int) -> None:
        """Take a position up to which a topic was worked through; the next commit has it."""
        with self._lock:
            self._positions[topic] = position

    def commit_if_due(self) -> None:
        """Send the positions that have changed, if it is time; returns at once."""
        now = time.monotonic()
        if now < self._due_at or not self._lock.acquire(blocking=False):
            return
        try:
            if self._consumer is None:
                return
            self._due_at = now + COMMIT_S
            message = self._consumer.poll(0)
            if message is not None and (error := message.error()) is not None:
                self._warn_once(error)  # of the search for the coordinator, say: no answer has it
            if not self._pending:
                self._commit(self._consumer, now)
        except RAISED as exception:
            self._warn_once(error_of(exception))
        finally:
            self._lock.release()

    def close(self) -> None:
        """Commit nothing more; returns at once. Closing twice does nothing.

        A thread closes the client: with a commit on its way and no broker, librdkafka waits for 45 s.
        """
        with self._lock:
            consumer, self._consumer = self._consumer, None
        if consumer is not None:
            with suppress(RuntimeError):  # the host is at its limit of threads
                threading.Thread(target=consumer.close, name="rebalanser-lag-close", daemon=True).start()

    def _answered(self, error: KafkaError | None, places: Sequence[TopicPartition]) -> None:
        """Note what the last commit has led to; called by ``poll``."""
        self._pending = False
        for place in places:
            refused = error or place.error
            if refused is None:
                self._committed[place.topic] = place.offset
            else:
                self._warn_once(refused)

    def _commit(self, consumer: Consumer, now: float) -> None:
        if now >= self._again_at:
            self._again_at = now + COMMIT_AGAIN_S
            self._committed.clear()
        places = [
            TopicPartition(topic, 0, position)
            for topic, position in self._positions.items()
            if self._committed.get(topic) != position
        ]
        if places:
            consumer.commit(offsets=places, asynchronous=True)
            self._pending = True

    def _warn_once(self, error: KafkaError) -> None:
        if not self._has_warned and not is_passing(error):
            self._has_warned = True
            reason = judge(error, Act.READ, f"committing to group {self.group}")
            _log.warning(f"its lag is not shown: {reason}", action="lag_not_shown", **self._fields)


Give: TypeAlias = Callable[[ReadBatch | TopicLost], None]
"""Takes a follower's batches, at once and from its thread; at most one batch of each is pending."""


class TopicFollower:
    """Follows a topic of one partition in a thread of its own, until it is closed.

    ``give`` gets one ``ReadBatch`` after the other and, at the end, ``TopicLost`` if the topic cannot
    be followed any more. A reader that was too slow for the topic's retention goes on with what is left.
    With ``lag`` the positions after the batches that were taken are committed.
    """

    def __init__(
        self,
        connection: Connection,
        topic: str,
        start: int | Literal["earliest", "latest"],
        give: Give,
        lag: LagGroup | None = None,
    ) -> None:
        self._connection = connection
        self._lag = lag
        self._topic = topic
        self._give = give
        self._closing = threading.Event()
        self._fields = {"cluster": connection.cluster, "topic": topic}
        self._outage = ThrottledWarning.shared(connection.servers, "topic_unreadable", self._fields)
        self._reader = LogReader(connection, topic, start)
        self._thread = threading.Thread(target=self._follow, name=f"rebalanser-{topic}", daemon=True)

    def begin(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and its lag group, even if its last batch was not taken. May be called twice."""
        self._closing.set()
        if self._lag is not None:
            self._lag.close()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _follow(self) -> None:
        trouble: str | None = None
        seen = -1
        try:
            while not self._closing.is_set():
                self._commit_if_due()
                try:
                    records = self._reader.poll(POLL_S)
                except LogTruncated as error:
                    self._reopen(error)
                    continue
                if self._reader.trouble != trouble:
                    trouble = self._reader.trouble
                    self._tell(trouble)
                if records or self._reader.position != seen:
                    seen = self._reader.position
                    self._hand_over(ReadBatch(self._topic, records, seen, threading.Event()))
        except RebalanserError as error:
            self._lose(error)
        except Exception as error:
            _log.exception(
                "the follower stopped on an unexpected error", action="follower_failed", **self._fields
            )
            self._lose(InternalError(f"following {self._topic}: {type(error).__name__}: {error}"))
        finally:
            self._outage.leave(self)
            self._reader.close()

    def _tell(self, trouble: str | None) -> None:
        if trouble is None:
            self._outage.works("reading again", source=self)
        else:
            self._outage.failed(trouble, source=self)

    def _lose(self, error: RebalanserError) -> None:
        if not self._closing.is_set():
            self._give(TopicLost(error))

    def _hand_over(self, batch: ReadBatch) -> None:
        self._give(batch)
        while not batch.taken.wait(POLL_S) and not self._closing.is_set():
            self._commit_if_due()
        if self._lag is not None and batch.taken.is_set():
            self._lag.note(batch.topic, batch.position)

    def _commit_if_due(self) -> None:
        if self._lag is not None:
            self._lag.commit_if_due()

    def _reopen(self, error: LogTruncated) -> None:
        """Go on at the log's first record, if the next one is gone."""
        position = self._reader.position
        try:
            first, end = self._reader.bounds(LOOK_S)
        except RegistryUnavailable:
            return
        if end < position or first < position:
            raise UnusableStore(
                f"topic {self._topic} has been recreated: it ends at {end}, and was read up to {position}; "
                "start this process again"
            ) from error
        _log.warning(
            f"records {position} to {first} were deleted before they were read",
            action="records_missed",
            **self._fields,
        )
        self._reader.close()
        self._reader = LogReader(self._connection, self._topic, first)
