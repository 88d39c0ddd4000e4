"""One term of a leader on Kafka: fences its predecessor, announces itself, and drives the machine."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeAlias, assert_never

import tenacity

from rebalanser.core.shiva.leader import Leader
from rebalanser.core.shiva.messages import (
    CaughtUp,
    Deposed,
    DropRecords,
    Fact,
    KeepCommands,
    Kept,
    LeaderEffect,
    LeaderEvent,
    PartRead,
    PongRead,
    PublishDocument,
    Published,
    RecordMetadata,
    Report,
    SendPing,
    StepDown,
    Stop,
    TookOver,
    Unreadable,
    Wakeup,
)
from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.records import (
    AssignmentDocument,
    DocumentChange,
    KeptCommand,
    LeaderAnnouncement,
    Pong,
)
from rebalanser.core.shiva.types import ApplicationId, Archive, LeaderId
from rebalanser.errors import (
    Fenced,
    InternalError,
    OutcomeUnknown,
    RebalanserError,
    RegistryUnavailable,
    UnusableStore,
)
from rebalanser.runtime.clock import SystemClock
from rebalanser.shiva.cluster import TopicNames
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.failures import clear_frames
from rebalanser_kafka.log import (
    GroupOffsets,
    LogReader,
    LogRecord,
    NewRecord,
    StaleMembership,
    TransactionalWriter,
)
from rebalanser_kafka.shiva.decoding import ReplayedCommands, control_record
from rebalanser_kafka.shiva.follower import LagGroup, ReadBatch, TopicFollower, TopicLost
from rebalanser_kafka.shiva.last_records import end_of, last_document, last_pongs
from rebalanser_kafka.shiva.parts import ArchiveReader, PartIndex
from rebalanser_kafka.shiva.topics import MAX_MESSAGE_BYTES
from rebalanser_kafka.shiva.wire import LEADER_KEY, PartKey, encode, kept_key, key_of

LOOK_AT_CLOCK_S: Final = 0.5
CLOSE_TIMEOUT_S: Final = 15.0
STALE_RETRY_S: Final = 0.1
SHORTEST_WRITE_S: Final = 5.0
SESSIONS_OF_A_WRITE: Final = 2
"""Number of sessions after which a leader that cannot write begins a new term, with new connections.

Until then no other leader takes over: the group still has its member."""
_WRITTEN_AT_ONCE: Final = 1000
_WRITTEN_AT_ONCE_BYTES: Final = 8_000_000
"""A transaction must be written within the timeout, and fit into librdkafka's buffer."""

_log = logging.getLogger("rebalanser.shiva")


_Item: TypeAlias = ReadBatch | TopicLost | Deposed | Stop


class LeaderTerm:
    """Leads until it is deposed, fails, or the machine steps down."""

    def __init__(
        self,
        connection: Connection,
        topics: TopicNames,
        leader: LeaderId,
        options: LeaderOptions,
        membership: Callable[[], object],
        timeout_s: float,
        tell: Callable[[Fact], None],
    ) -> None:
        self._connection = connection
        self._topics = topics
        self._leader = leader
        self._membership = membership
        self._timeout_s = timeout_s
        self._write_s = max(SHORTEST_WRITE_S, SESSIONS_OF_A_WRITE * options.session_timeout_s)
        """Maximum seconds for writing a ping, an announcement or a document; at most the timeout."""
        self._tell = tell
        self._clock = SystemClock()
        self._machine = Leader(leader, options)
        self._writer = TransactionalWriter(
            connection, f"{connection.cluster}-leader", timeout_s, max_record_bytes=MAX_MESSAGE_BYTES
        )
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._followers: list[TopicFollower] = []
        self._index = PartIndex()
        self._archives = ArchiveReader(
            partial(LogReader, connection, topics.command),
            self._index,
            patience_s=timeout_s,
        )
        self._replayed = ReplayedCommands()
        self._caught_up_at: int | None = None
        self._broker_ahead_ms: int | None = None
        """Seconds by which the broker's time of day is ahead of this clock, by the last record."""
        self._control_position = 0
        self._stop_at: int | None = None
        """The position on CONTROL at which the machine is asked to stop."""
        self._steps = 0
        self._over = threading.Event()
        self.failure: RebalanserError | None = None
        """The error that ended it, if neither ``depose`` nor the machine did."""
        self._thread = threading.Thread(target=self._run, name=f"rebalanser-term-{leader}", daemon=True)

    @property
    def leads(self) -> bool:
        """True if it has caught up with COMMAND and has not ended."""
        return not self._over.is_set() and self._machine.leads

    @property
    def progress(self) -> int:
        """Counter of the thread's requests, effects, reads of archives and waits for work."""
        return self._steps + self._archives.progress

    @property
    def ended(self) -> bool:
        """True if it has ended."""
        return self._over.is_set()

    def begin(self) -> None:
        """Begin to lead."""
        self._thread.start()

    def depose(self, reason: str) -> None:
        """End it: another leader may hold the partition from now on."""
        self._items.put(Deposed(reason))

    def stop(self) -> None:
        """End it gracefully: read CONTROL to its present end, and publish what that changes (SH-22)."""
        self._items.put(Stop())

    def close(self) -> None:
        """Wait, for a bounded time, until it has ended; the next term fences its late writes."""
        self._thread.join(CLOSE_TIMEOUT_S)
        if self.failure is not None:
            clear_frames(self.failure)

    def _run(self) -> None:
        try:
            self._take_over()
            while not self._over.is_set():
                self._step()
        except RebalanserError as error:
            self.failure = error
        except Exception as error:
            _log.exception(
                "the term of leader %s stopped on an unexpected error",
                self._leader,
                extra={"action": "leader_failed"},
            )
            self.failure = InternalError(f"{type(error).__name__}: {error}")
        finally:
            self._over.set()
            for follower in self._followers:
                follower.close()
            self._writer.close()

    def _take_over(self) -> None:
        """Fence, announce, read what nobody can replace any more, then follow: in this order."""
        self._writer.init()
        command = self._topics.command
        announcement = NewRecord(command, LEADER_KEY.encode(), encode(LeaderAnnouncement(self._leader)))
        [term] = self._write_consumed([announcement])
        self._steps += 1
        chain, _ = last_document(self._connection, self._topics.assignement, self._timeout_s, overlooked=True)
        document = None if chain.missed else chain.document
        if document is not None and document.epoch.term > term:
            self._refuse_foreign(document)
        self._steps += 1
        # Known before the first ping: a pong that came before a slower "latest" would be missed, and its
        # worker removed.
        pongs, answers_from = last_pongs(self._connection, self._topics.control, self._timeout_s)
        self._control_position = answers_from
        self._caught_up_at = term + 1
        self._handle(TookOver(term, document, pongs, chain.missed))
        lag = LagGroup(self._connection, "leader")
        self._followers = [
            TopicFollower(self._connection, self._topics.control, answers_from, self._items.put, lag),
            TopicFollower(self._connection, command, "earliest", self._items.put, lag),
        ]
        for follower in self._followers:
            follower.begin()

    def _end_of(self, topic: str) -> int:
        return end_of(self._connection, topic, self._timeout_s)

    def _refuse_foreign(self, document: AssignmentDocument) -> None:
        """Refuse a document of a term beyond COMMAND's end: no new term would be greater.

        Raises:
            UnusableStore: COMMAND was created anew, and ASSIGNEMENT was not.
        """
        command, end = self._topics.command, self._end_of(self._topics.command)
        if document.epoch.term >= end:
            raise UnusableStore(
                f"topic {command} has been recreated: it ends at {end}, and {self._topics.assignement} has a "
                f"document of term {document.epoch.term}; stop all workers, delete that topic as well, and "
                "start the applications again"
            )

    def _consumed(self, document: AssignmentDocument | None) -> GroupOffsets:
        """Return the offset to commit, with which the broker checks that this process is still in the group.

        Raises:
            Fenced: it does not hold COMMAND's partition any more.
        """
        membership = self._membership()
        if membership is None:
            raise Fenced("the partition of COMMAND was given to another leader")
        following = 0 if document is None else document.consumed + 1
        return GroupOffsets(membership, {(self._topics.command, 0): following})

    def _write_consumed(
        self, records: Sequence[NewRecord], document: AssignmentDocument | None = None
    ) -> list[int]:
        """Write records together with the offset consumed.

        A candidate that joins or leaves begins a new generation of the group. The broker refuses a
        transaction of the old generation; it is retried once the thread that polls the group knows the new
        one. That is safe: a later leader fences this one's writer before it reads.
        """
        trying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StaleMembership),
            wait=tenacity.wait_fixed(STALE_RETRY_S),
            stop=tenacity.stop_after_delay(self._timeout_s),
            reraise=True,
        )
        written: list[int] = trying(self._write_once, records, document)
        return written

    def _write_once(self, records: Sequence[NewRecord], document: AssignmentDocument | None) -> list[int]:
        return self._writer.transaction(records, self._consumed(document), limit_s=self._write_s)

    def _step(self) -> None:
        wakeup = self._machine.next_wakeup
        patience_s = LOOK_AT_CLOCK_S
        if wakeup is not None:
            patience_s = min(patience_s, max(0.0, wakeup - self._clock.now()))
        try:
            item = self._items.get(timeout=patience_s)
        except queue.Empty:
            item = None
        self._steps += 1
        match item:
            case ReadBatch():
                self._take(item)
                item.taken.set()
            case TopicLost(error=error):
                raise error
            case Deposed():
                self._handle(item)
            case Stop():
                self._begin_stop()
            case None:
                pass
            case _:
                assert_never(item)
        wakeup = self._machine.next_wakeup
        if wakeup is not None and self._clock.now() >= wakeup:
            self._handle(Wakeup())

    def _take(self, batch: ReadBatch) -> None:
        if batch.topic == self._topics.control:
            for record in batch.records:
                self._take_control(record)
            self._control_position = batch.position
            self._stop_once_read()
            return
        for record in batch.records:
            self._take_command(record)
        self._note_position(batch.position)

    def _begin_stop(self) -> None:
        try:
            self._stop_at = self._end_of(self._topics.control)
        except RegistryUnavailable as error:
            self._handle(Deposed(f"asked to stop, and CONTROL cannot be read: {error}"))
        else:
            self._stop_once_read()

    def _stop_once_read(self) -> None:
        if self._stop_at is not None and self._control_position >= self._stop_at:
            self._stop_at = None
            self._handle(Stop())

    def _take_control(self, record: LogRecord) -> None:
        match control_record(record):
            case Pong() as pong:
                self._handle(PongRead(pong))
            case Unreadable() as unreadable:
                self._handle(unreadable)

    def _take_command(self, record: LogRecord) -> None:
        self._note_position(record.offset)
        if record.log_append_time:
            self._broker_ahead_ms = record.timestamp_ms - int(self._clock.now() * 1000)
        for event in self._replayed.events(record):
            if isinstance(event, PartRead):
                key = PartKey(event.application, event.sha256, event.number)
                self._index.note(key, record.offset if event.at.size_bytes else None)
            self._handle(event)

    def _note_position(self, position: int) -> None:
        if self._caught_up_at is not None and position >= self._caught_up_at:
            self._caught_up_at = None
            for event in (*self._replayed.end(), CaughtUp()):
                self._handle(event)

    def _handle(self, event: LeaderEvent) -> None:
        """Give the machine an event, and carry out its effects; their results are its next events."""
        events = [event]
        while events and not self._over.is_set():
            for effect in self._machine.handle(events.pop(0), self._clock.now(), self._wall_ms()):
                answer = self._perform(effect)
                self._steps += 1
                if isinstance(answer, Deposed):
                    events = [answer]
                    break
                if answer is not None:
                    events.append(answer)

    def _wall_ms(self) -> int:
        """Return the time of day by the broker's clock, as retention uses: this host's may be days off."""
        if self._broker_ahead_ms is None:
            return int(self._clock.wall() * 1000)
        return int(self._clock.now() * 1000) + self._broker_ahead_ms

    def _perform(self, effect: LeaderEffect) -> LeaderEvent | None:
        match effect:
            case PublishDocument(document=document, change=change):
                return self._publish(document, change)
            case SendPing(ping=ping):
                control = NewRecord(self._topics.control, key_of(ping).encode(), encode(ping))
                write = partial(self._writer.transaction, [control], limit_s=self._write_s)
                return self._written(write, lambda _offsets: None)
            case KeepCommands(commands=commands):
                return self._keep(commands)
            case DropRecords(kept=kept, archives=archives):
                return self._drop(kept, archives)
            case StepDown():
                self._over.set()
            case Report(fact=fact):
                self._tell(fact)
            case _:
                assert_never(effect)
        return None

    def _written(
        self, write: Callable[[], list[int]], answer: Callable[[list[int]], LeaderEvent | None]
    ) -> LeaderEvent | None:
        """Write in one transaction; anything but success ends the term.

        A new term fences this one first, then reads what was written, so an unknown outcome becomes known.
        """
        self._steps += 1
        try:
            return answer(write())
        except (Fenced, OutcomeUnknown, RegistryUnavailable) as error:
            self.failure = error
            return Deposed(str(error))

    def _publish(self, document: AssignmentDocument, change: DocumentChange | None) -> LeaderEvent | None:
        record = change or document
        key, value = key_of(record).encode(), encode(record)
        records = [NewRecord(topic, key, value) for topic in (self._topics.command, self._topics.assignement)]
        write = partial(self._write_consumed, records, document)
        return self._written(write, lambda offsets: Published(offsets[0]))

    def _keep(self, commands: Sequence[KeptCommand]) -> LeaderEvent | None:
        """Write start commands again, with their parts as they are on COMMAND (SH-15)."""
        archives = [(command.start.application, command.start.archive) for command in commands]
        parts = self._archives.parts(archives)
        records: list[NewRecord] = []
        places: dict[ApplicationId, int] = {}
        for command in commands:
            start = command.start
            keys = [PartKey(start.application, start.archive.sha256, n) for n in range(start.archive.parts)]
            if not all(key in parts for key in keys):
                _log.error(
                    "parts of %s are not on COMMAND any more: it cannot be kept",
                    start.application,
                    extra={"action": "command_not_kept"},
                )
                continue
            records += [NewRecord(self._topics.command, str(key).encode(), parts[key]) for key in keys]
            places[start.application] = len(records)
            records.append(NewRecord(self._topics.command, key_of(command).encode(), encode(command)))
        if not records:
            return Kept({})
        written_ms = self._wall_ms()

        def kept(offsets: list[int]) -> LeaderEvent:
            return Kept(
                {
                    application: RecordMetadata(offsets[place], written_ms, records[place].size_bytes)
                    for application, place in places.items()
                }
            )

        return self._written(partial(self._write_in_turn, records), kept)

    def _write_in_turn(self, records: Sequence[NewRecord]) -> list[int]:
        """Write in several transactions, each small enough to be written in time.

        A command must follow all of its parts; parts alone have no effect.
        """
        offsets: list[int] = []
        for batch in _batches(records):
            offsets += self._writer.transaction(batch)
        return offsets

    def _drop(
        self, kept: frozenset[ApplicationId], archives: frozenset[tuple[ApplicationId, Archive]]
    ) -> LeaderEvent | None:
        parts = (
            PartKey(application, archive.sha256, number)
            for application, archive in sorted(archives, key=lambda pair: (pair[0], pair[1].sha256))
            for number in range(archive.parts)
        )
        keys = [kept_key(application) for application in sorted(kept)]
        keys += [str(part) for part in parts if part in self._index]
        for first in range(0, len(keys), _WRITTEN_AT_ONCE):
            tombstones = [
                NewRecord(self._topics.command, key.encode(), None)
                for key in keys[first : first + _WRITTEN_AT_ONCE]
            ]
            deposed = self._written(partial(self._writer.transaction, tombstones), lambda _offsets: None)
            if deposed is not None:
                return deposed
        return None


def _batches(records: Sequence[NewRecord]) -> Iterator[list[NewRecord]]:
    batch: list[NewRecord] = []
    size_bytes = 0
    for record in records:
        size_bytes += record.size_bytes
        if batch and (len(batch) == _WRITTEN_AT_ONCE or size_bytes > _WRITTEN_AT_ONCE_BYTES):
            yield batch
            batch, size_bytes = [], record.size_bytes
        batch.append(record)
    if batch:
        yield batch
