"""A candidate: the thread that polls the consumer, gives the member events and carries out its effects."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import uuid
from typing import Final

from confluent_kafka import KafkaError

from rebalanser.core.neli.member import NeliMember
from rebalanser.core.neli.messages import (
    AskPartitionCount,
    Assigned,
    CallFenced,
    CallInduced,
    CallLapsed,
    Commit,
    CommitAnswered,
    Effect,
    Event,
    Fail,
    HandlerReturned,
    HeartbeatRead,
    LastCommit,
    Leave,
    LetGo,
    Lost,
    Partition,
    Polled,
    PublishHeartbeats,
    Report,
    Revoked,
    RolesChanged,
    Stop,
    Wakeup,
)
from rebalanser.core.neli.roles import Role, RoleMap, Roles, numbered
from rebalanser.core.neli.settings import GroupProtocol
from rebalanser.errors import (
    Fenced,
    FixConfiguration,
    InternalError,
    RebalanserError,
    RegistryRefused,
    StopAccess,
)
from rebalanser.neli.contract import Call, Candidacy, Candidate, OnCall, OnFact
from rebalanser.redaction import redact
from rebalanser.runtime.clock import SystemClock
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.failures import Act, UnsupportedBroker, is_fenced, judge
from rebalanser_kafka.neli.consumer import GroupConsumer
from rebalanser_kafka.neli.heartbeats import HeartbeatProducer
from rebalanser_kafka.neli.topic import NO_CONSUMER_GROUPS

LOOK_S: Final = 0.05
"""Seconds until the polling thread sees notices from other threads."""
LEAST_WAIT_S: Final = 0.001
CLOSE_S: Final = 10.0
"""Maximum seconds to leave the group; after that the coordinator waits for the session timeout."""
LEAVE_S: Final = 1.0
"""Seconds after the handlers' limit at which a stop continues without those that have not returned."""

_PASSING: Final = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_ID,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._UNKNOWN_TOPIC,
    }
)
"""Errors that a broker which has just started reports even about a topic that exists."""
_INSTANCE_TAKEN: Final = tuple(
    KafkaError(code).str() for code in (KafkaError.FENCED_INSTANCE_ID, KafkaError.UNRELEASED_INSTANCE_ID)
)
_UNSUPPORTED: Final = KafkaError(KafkaError.UNSUPPORTED_VERSION).str()
_log = logging.getLogger("rebalanser.neli")


class KafkaCandidate(Candidate):
    """Takes part from its creation on. Threads: one polls; each call of handlers has one; one requests the
    partition count. They share the member under a lock that is never held during I/O."""

    def __init__(
        self,
        connection: Connection,
        candidacy: Candidacy,
        partitions: int,
        counted_at: float,
        on_call: OnCall,
        on_fact: OnFact,
    ) -> None:
        """``partitions`` is the topic's count, requested after ``counted_at`` (seconds of the clock)."""
        settings = candidacy.settings
        self._connection = connection
        self._group = candidacy.group
        self._partitions = partitions
        self._protocol = settings.protocol
        self._pid = os.getpid()
        self._process = f"{socket.gethostname()}-{self._pid}-{uuid.uuid4().hex[:12]}"
        self._clock = SystemClock()
        self._on_call = on_call
        self._on_fact = on_fact
        self._stop_s = settings.lapse_s + LEAVE_S
        self._stop_by: float | None = None
        self._member = NeliMember(
            candidacy.group, self._process, partitions, candidacy.roles, settings, counted_at
        )
        self._warn_of_imbalance(candidacy.roles)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._assigned: set[Partition] = set()
        self._held_back: set[Partition] = set()
        self._in_callback = False
        self._ending = False
        self._failure: RebalanserError | None = None
        self._consumer = GroupConsumer(connection, candidacy, self._process, self, self._clock)
        self._heartbeats = HeartbeatProducer(
            connection, candidacy.topic, self._process, settings.limit_s, self._inbox.put, self.failed
        )
        self._ended = threading.Event()
        name = f"rebalanser-neli-{candidacy.group}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def process(self) -> str:
        return self._process

    def leads(self, role: Role) -> bool:
        return self.token(role) is not None

    def token(self, role: Role) -> int | None:
        if os.getpid() != self._pid:
            return None
        with self._lock:
            return self._member.token(role, self._clock.now())

    def held(self) -> dict[Role, int]:
        if os.getpid() != self._pid:
            return {}
        with self._lock:
            return self._member.held(self._clock.now())

    def why_not(self, role: Role) -> str | None:
        if os.getpid() != self._pid:
            return "this is a child of the process that takes part"
        with self._lock:
            return self._member.why_not(role, self._clock.now())

    def wait_leader(self, role: Role, timeout_s: float) -> bool:

        def leads() -> bool:
            return self._member.leads(role, self._clock.now())

        if os.getpid() != self._pid:
            return False
        with self._changed:
            self._changed.wait_for(lambda: leads() or self._ended.is_set(), timeout_s)
            return leads()

    def set_roles(self, roles: Roles) -> None:
        self._inbox.put(RolesChanged(numbered(roles)))
        self._warn_of_imbalance(roles)

    def stop(self) -> None:
        self._inbox.put(Stop())

    def wait(self, timeout_s: float | None = None) -> bool:
        ended = self._ended.wait(timeout_s)
        if ended and self._failure is not None:
            raise self._failure
        return ended

    def assigned(self, last: dict[Partition, LastCommit | None]) -> None:
        """Called by the consumer inside the assign callback."""
        self._assigned |= last.keys()
        self._tell(Assigned(last))

    def revoked(self, partitions: frozenset[Partition]) -> None:
        """Called by the consumer inside the revoke callback, which waits for work in progress (NE-9)."""
        self._held_back = set(partitions)
        self._in_callback = True
        try:
            self._tell(Revoked(partitions))
            while self._held_back:
                self._hear_others(self._wait_s(LOOK_S))
        finally:
            self._in_callback = False
            self._assigned -= partitions

    def lost(self, partitions: frozenset[Partition]) -> None:
        """Called by the consumer inside the lost callback."""
        self._assigned -= partitions
        self._tell(Lost(partitions))

    def read(self, record: HeartbeatRead) -> None:
        """Take a record from the consumer."""
        self._tell(record)

    def answered(self, answer: CommitAnswered) -> None:
        """Take the answer to a commit from the consumer."""
        self._tell(answer)

    def failed(self, error: KafkaError) -> None:
        """Called by the consumer with errors, and for heartbeats that were denied.

        Errors that pass are waited out: leadership ends by the evidence's age.
        """
        what = f"taking part in group {self._group}"
        failure = self._fatal(error, what) or judge(error, Act.READ, what)
        passes = not isinstance(failure, FixConfiguration | StopAccess) or error.code() in _PASSING
        if passes or is_fenced(error):
            _log.info("%s", failure, extra={"action": "group_unreachable"})
        elif self._failure is None:
            self._failure = self._connection.with_user(failure)
            self._inbox.put(Lost(frozenset(self._assigned)))
            self._inbox.put(Stop())

    def _fatal(self, error: KafkaError, what: str) -> RebalanserError | None:
        """Return the error after which a consumer cannot continue; the client keeps its text, not its
        code."""
        if not error.fatal() and error.code() != KafkaError._FATAL:
            return None
        sentence = redact(f"{what} failed: {error.str()}")
        if self._protocol is GroupProtocol.CONSUMER and _UNSUPPORTED in sentence:
            return UnsupportedBroker(NO_CONSUMER_GROUPS)
        if any(words in sentence for words in _INSTANCE_TAKEN):
            return Fenced(f"{sentence}; give each process an instance of its own")
        return RegistryRefused(sentence)

    def _warn_of_imbalance(self, roles: Roles) -> None:
        if told := RoleMap(roles, self._partitions).imbalance():
            _log.warning("group %s: %s", self._group, told, extra={"action": "roles_uneven"})

    def _run(self) -> None:
        try:
            self._consumer.join()
            while not self._ending:
                self._turn()
        except RebalanserError as error:
            self._fail(error)
        except Exception as error:
            _log.exception("the thread of group %s failed", self._group, extra={"action": "member_failed"})
            self._fail(InternalError(f"the thread of group {self._group} failed: {error!r}"))
        finally:
            self._close()

    def _turn(self) -> None:
        """Poll once, give the member all events, and let it do the work that is due."""
        if self._failure is None:
            self._consumer.poll(self._wait_s(LOOK_S))
            self._tell(Polled())
            self._hear_others(0.0)
        else:
            self._hear_others(self._wait_s(LOOK_S))
        if self._stop_by is not None and self._clock.now() >= self._stop_by:
            self._ending = True

    def _wait_s(self, longest_s: float) -> float:
        due = self._member.next_wakeup
        if due is None:
            return longest_s
        return max(LEAST_WAIT_S, min(longest_s, due - self._clock.now()))

    def _hear_others(self, timeout_s: float) -> None:
        """Take in notices of other threads, waiting at most ``timeout_s`` seconds for the first; then do due
        work."""
        try:
            event = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
            while True:
                self._tell(event)
                event = self._inbox.get_nowait()
        except queue.Empty:
            due = self._member.next_wakeup
            if due is not None and self._clock.now() >= due:
                self._tell(Wakeup())

    def _tell(self, event: Event) -> None:
        if isinstance(event, Stop) and self._stop_by is None:
            self._stop_by = self._clock.now() + self._stop_s
        with self._changed:
            effects = self._member.handle(event, self._clock.now())
            self._changed.notify_all()
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case PublishHeartbeats(heartbeats=heartbeats):
                self._heartbeats.publish(heartbeats)
            case Commit():
                answer = self._consumer.commit(effect, wait=self._in_callback)
                if answer is not None:
                    self._inbox.put(answer)
            case AskPartitionCount():
                self._heartbeats.ask(effect)
            case CallInduced() | CallLapsed() | CallFenced():
                name = f"rebalanser-neli-{self._group}-{effect.partition}"
                threading.Thread(target=self._call, args=(effect,), name=name, daemon=True).start()
            case LetGo(partitions=partitions):
                self._held_back -= partitions
            case Leave():
                self._ending = True
            case Fail(error=error):
                self._fail(error)
            case Report(fact=fact):
                self._on_fact(fact)

    def _call(self, call: Call) -> None:
        error: str | None = None
        try:
            self._on_call(call)
        except Exception as raised:
            error = repr(raised)
        self._inbox.put(HandlerReturned(call.partition, error))

    def _fail(self, error: RebalanserError) -> None:
        self._failure = self._failure or error
        self._ending = True

    def _close(self) -> None:
        """Report all held roles to the member as lost first, so that nothing is led while the client
        leaves."""
        try:
            self._tell(Lost(frozenset(self._assigned)))
            # Leaving waits for the coordinator, for minutes if only the coordinator is unreachable.
            leaving = threading.Thread(target=self._consumer.close, name="rebalanser-neli-leave", daemon=True)
            leaving.start()
            leaving.join(CLOSE_S)
            self._heartbeats.close()
        except RebalanserError as error:
            self._failure = self._failure or error
        finally:
            self._ended.set()
            with self._changed:
                self._changed.notify_all()
