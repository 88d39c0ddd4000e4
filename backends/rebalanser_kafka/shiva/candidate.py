"""A leader on Kafka: a candidate for COMMAND's partition, and a term each time that it gets it.

Threads: the candidate has one that polls the consumer group and decides nothing. Each term has one for the
machine and its transactions, and one for each of the two topics that it follows.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from typing import Final

from confluent_kafka import Consumer, KafkaException, TopicPartition

from rebalanser.core.clock import GrowingDelay
from rebalanser.core.shiva.messages import Fact
from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.types import LeaderId
from rebalanser.errors import (
    AccessDenied,
    Fenced,
    FixConfiguration,
    InternalError,
    InvalidSettings,
    RebalanserError,
    RetryLater,
    StopAccess,
)
from rebalanser.history import HistorySink
from rebalanser.runtime.clock import SystemClock
from rebalanser.runtime.logs import get_logger
from rebalanser.shiva.cluster import TopicNames
from rebalanser_kafka.connection import Connection, client_config
from rebalanser_kafka.failures import RAISED, Act, error_of, judge
from rebalanser_kafka.shiva.facts import FactWriter
from rebalanser_kafka.shiva.leader import CLOSE_TIMEOUT_S, LeaderTerm
from rebalanser_kafka.shiva.throttled_warning import ThrottledWarning

POLL_S: Final = 0.1
RETRY_S: Final = 1.0
"""Seconds from a term that failed to the next one, while the partition is still held.

After terms that stepped down in a row, as those of an old leader beside newer records, they double up to
``RESTART_MAX_S``.
"""
LONGEST_HEARTBEAT_MS: Final = 500
"""Maximum milliseconds between heartbeats, whose answers tell that the leader was lost or has left."""
MAX_POLL_INTERVAL_S: Final = 60.0
"""Seconds without a poll after which Kafka gives the partition to another leader."""
LOOK_S: Final = 1.0
"""Maximum seconds that count between two checks of a term's thread: a paused process does not hang."""
HUNG_S: Final = 60.0
"""Minimum seconds that a term's thread may hang while this process holds the partition."""

_log = get_logger("rebalanser.shiva")


class LeaderCandidate:
    """Leads whenever it gets the partition, until it is stopped. Made by ``KafkaShivaCluster.run_leader``."""

    def __init__(
        self,
        connection: Connection,
        topics: TopicNames,
        leader: LeaderId,
        options: LeaderOptions,
        timeout_s: float,
        history: HistorySink | None = None,
    ) -> None:
        self._connection = connection
        self._topics = topics
        self._leader = leader
        self._options = options
        self._timeout_s = timeout_s
        self._stopping = threading.Event()
        fields = {"cluster": connection.cluster, "leader": leader}
        self._groups = ThrottledWarning("group_unreachable", fields)
        self._terms = ThrottledWarning("term_failed", fields)
        self._held = False
        self._waits_since: float | None = None
        """Time (monotonic seconds) since which it waits to be admitted to the group; None while it is in."""
        self._membership: object = None
        self._term: LeaderTerm | None = None
        self._began_at = 0.0
        self._retry_at = 0.0
        self._retries = GrowingDelay(RETRY_S)
        self._progress = -1
        self._looked_at = 0.0
        self._stood_still_s = 0.0
        self._process = f"{leader}-leader-{uuid.uuid4().hex}"
        self._numbers = itertools.count(1)
        self._facts = FactWriter(connection.cluster, self._process, leader, history, SystemClock())
        self._failure: RebalanserError | None = None
        self._consumer = self._joining()
        self._thread = threading.Thread(target=self._run, name=f"rebalanser-leader-{leader}", daemon=True)

    def _joining(self) -> Consumer:
        """Return its consumer in the group of leaders.

        Raises:
            InvalidSettings: ``session_timeout_s`` is beyond the limits of Kafka's client.
        """
        session_ms = int(self._options.session_timeout_s * 1000)
        settings = {
            "group.id": f"{self._connection.cluster}-leader",
            "client.id": f"leader-{self._leader}",
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": session_ms,
            "heartbeat.interval.ms": max(1, min(session_ms // 5, LONGEST_HEARTBEAT_MS)),
            "max.poll.interval.ms": max(session_ms, int(MAX_POLL_INTERVAL_S * 1000)),
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
        try:
            return Consumer(client_config(self._connection, settings))
        except RAISED as exception:
            raise judge(error_of(exception), Act.READ, self._taking_part) from None

    @property
    def _taking_part(self) -> str:
        timeout_s = self._options.session_timeout_s
        return f"taking part in the group of leaders with session_timeout_s {timeout_s:g}"

    @property
    def leads(self) -> bool:
        """True if it is the active leader, as far as it knows."""
        term = self._term
        return term is not None and term.leads

    def begin(self) -> None:
        """Join the group of leaders."""
        self._thread.start()

    def stop(self) -> None:
        """Request a graceful stop, from any thread; returns at once."""
        self._stopping.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; True if it has. Raise the error that ended it, unless ``stop`` did."""
        self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        if ended and self._failure is not None:
            raise self._failure
        return ended

    def _run(self) -> None:
        try:
            self._subscribe()
            while not self._stopping.is_set():
                self._take_part()
            self._finish_term()
        except RebalanserError as error:
            self._failure = error
        except Exception as error:
            _log.exception(
                "the leader stopped on an unexpected error", action="leader_failed", leader=self._leader
            )
            self._failure = InternalError(f"{type(error).__name__}: {error}")
        finally:
            self._close()

    def _subscribe(self) -> None:
        self._waits_since = time.monotonic()
        self._consumer.subscribe(
            [self._topics.command],
            on_assign=self._assigned,
            on_revoke=self._revoked,
            on_lost=self._revoked,
        )

    def _join_anew_if_forgotten(self) -> None:
        """Replace a consumer that was not admitted to the group for longer than that can take.

        A broker that has missed its own heartbeats, as after a pause, tells clients for a moment that there
        is no broker. Kafka's client then drops that broker with the requests under way, and was seen to wait
        without end for the group.
        """
        limit_s = self._options.session_timeout_s + MAX_POLL_INTERVAL_S
        if self._waits_since is None or time.monotonic() - self._waits_since <= limit_s:
            return
        self._groups.failed(f"not admitted to the group of leaders for {limit_s:g} s: joining it anew")
        self._consumer.close()
        self._consumer = self._joining()
        self._subscribe()

    def _finish_term(self) -> None:
        """Let the term publish all that is pending before this process leaves the group (SH-22)."""
        term = self._term
        if term is None:
            return
        term.stop()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self._term is term and time.monotonic() < deadline:
            self._take_part()

    def _close(self) -> None:
        try:
            self._end_term("the leader stops")
        except RebalanserError as error:
            self._failure = self._failure or error
        finally:
            self._consumer.close()
            self._facts.close()

    def _take_part(self) -> None:
        try:
            message = self._consumer.poll(POLL_S)
        except RAISED as exception:
            failure = judge(error_of(exception), Act.READ, self._taking_part)
            if isinstance(failure, FixConfiguration):
                raise failure from None
            self._groups.failed(str(failure))
            return
        if message is not None and (error := message.error()) is not None:
            failure = judge(error, Act.READ, self._taking_part)
            if isinstance(failure, AccessDenied | InvalidSettings):
                raise failure
            self._groups.failed(str(failure))
        if self._term is not None and self._term.ended:
            self._close_term(self._term)
        self._refuse_hung()
        self._join_anew_if_forgotten()
        if self._held:
            self._membership = self._consumer.consumer_group_metadata()
        may_begin = self._held and not self._stopping.is_set()
        if may_begin and self._term is None and time.monotonic() >= self._retry_at:
            self._begin_term()

    def _refuse_hung(self) -> None:
        """End this leader if the thread of its term hangs, so that another one gets the partition.

        If the thread goes on, the next leader has fenced it. Nothing is logged before the partition is given
        back: the thread may hang in the log.

        Raises:
            InternalError: it hangs.
        """
        term, now = self._term, time.monotonic()
        self._stood_still_s += min(now - self._looked_at, LOOK_S)
        self._looked_at = now
        progress = -1 if term is None else term.progress
        if term is None or progress != self._progress:
            self._progress, self._stood_still_s = progress, 0.0
        limit_s = max(HUNG_S, 2 * self._timeout_s)
        if term is None or self._stood_still_s <= limit_s:
            return
        self._term = self._membership = None
        reason = f"the thread of the leader's term has stood still for more than {limit_s:g} s"
        term.depose(reason)
        raise InternalError(f"{reason}: another leader takes over, and this one ends; start it again")

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Hold the partition without reading: each term reads COMMAND itself."""
        consumer.incremental_assign(partitions)
        self._waits_since = None
        self._groups.works("taking part in the group of leaders again")
        if partitions:
            consumer.pause(partitions)
            self._held = True
            self._retry_at = 0.0
            self._retries = GrowingDelay(RETRY_S)

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if partitions:
            self._held = False
            self._waits_since = time.monotonic()
            self._membership = None
            self._end_term("the partition of COMMAND was given to another leader")
        try:
            consumer.incremental_unassign(partitions)
        except KafkaException as error:
            _log.debug(f"after the partition was lost: {error}", action="partition_lost")

    def _begin_term(self) -> None:
        """Begin a term; each is an incarnation of its own in the history."""
        number = next(self._numbers)
        self._began_at = time.monotonic()

        def tell(fact: Fact) -> None:
            self._facts.tell(fact, f"{self._process}-{number}", number)

        self._term = LeaderTerm(
            self._connection,
            self._topics,
            self._leader,
            self._options,
            lambda: self._membership,
            self._timeout_s,
            tell,
        )
        self._term.begin()

    def _end_term(self, reason: str) -> None:
        if self._term is not None:
            self._term.depose(reason)
            self._close_term(self._term)

    def _close_term(self, term: LeaderTerm) -> None:
        """Finish a term; start another one later, unless the term failed for a reason that does not pass.

        A fenced leader may have been paused, and another one may hold the partition: a new term at once would
        fence that leader. Within a session this process learns who holds it.
        """
        term.close()
        self._term = None
        now = time.monotonic()
        match term.failure:
            case None:
                self._retry_at = now + self._retries.after(now - self._began_at)
            case Fenced():
                self._retry_at = now + self._options.session_timeout_s
            case _:
                self._retry_at = now + RETRY_S
        if term.failure is not None:
            if not isinstance(term.failure, RetryLater | StopAccess):
                raise term.failure
            self._terms.failed(f"the term ended: {term.failure}")
