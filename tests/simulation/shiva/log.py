"""A broker as Shiva sees it: three topics of one partition, one transactional id, a cleaner."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random
from typing import TypeAlias

from rebalanser.core.shiva.records import CommandRecord, ControlRecord
from rebalanser.core.shiva.types import ApplicationId


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes of one part of an archive."""

    application: ApplicationId
    sha256: str
    number: int


@dataclass(frozen=True, slots=True)
class Poison:
    """What nobody can read."""

    reason: str


Value: TypeAlias = CommandRecord | ControlRecord | Part | Poison | None
"""What a record says; None for a tombstone."""


class Outcome(Enum):
    """What has become of a transaction."""

    OPEN = auto()
    COMMITTED = auto()
    ABORTED = auto()


@dataclass(eq=False, slots=True)
class Transaction:
    """What one producer writes, seen by readers at once or never."""

    epoch: int
    opened_at: float
    outcome: Outcome = Outcome.OPEN
    topics: list[Topic] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Record:
    """A record where it stands."""

    offset: int
    timestamp_ms: int
    key: str
    value: Value
    size_bytes: int
    transaction: Transaction | None


@dataclass(frozen=True, slots=True)
class Write:
    """A record to be written."""

    topic: Topic
    key: str
    value: Value
    size_bytes: int


class Fenced(Exception):
    """A later producer of the transactional id has begun, or the transaction is not there any more."""


def _offset(record: Record) -> int:
    return record.offset


class Topic:
    """One partition. Offsets have gaps: of control records, and of what was compacted away."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.records: list[Record] = []
        self.end = 0
        """The offset of the next record."""
        self.size_bytes = 0
        self.open: dict[int, Transaction] = {}
        self.readers: list[tuple[str, Callable[[], None]]] = []
        """Who wants to know of new records, and of which keys: a beginning of them."""

    def append(self, record: Record) -> None:
        """Take in the next record."""
        self.records.append(record)
        self.end += 1
        self.size_bytes += record.size_bytes

    @property
    def stable_end(self) -> int:
        """Up to where ``read_committed`` reads."""
        return min(self.open, default=self.end)

    def read(self, position: int) -> tuple[list[Record], int]:
        """What can be read from a position on, and the position after it."""
        end = self.stable_end
        low = bisect_left(self.records, position, key=_offset)
        high = len(self.records) if end == self.end else bisect_left(self.records, end, key=_offset)
        found = [record for record in self.records[low:high] if _is_visible(record)]
        return found, max(end, position)

    def last(self, key: str) -> Record | None:
        """The last committed record of a key."""
        end = self.stable_end
        for record in reversed(self.records):
            if record.key == key and record.offset < end and _is_visible(record):
                return record
        return None

    def tell(self, keys: Sequence[str]) -> None:
        """Tell readers that records of these keys can be read."""
        for begins, wake in self.readers:
            if not begins or any(key.startswith(begins) for key in keys):
                wake()

    def drop(self, kept: list[Record]) -> int:
        """Keep these records only. How many went."""
        gone = len(self.records) - len(kept)
        self.records = kept
        self.size_bytes = sum(record.size_bytes for record in kept)
        return gone


def _is_visible(record: Record) -> bool:
    return record.transaction is None or record.transaction.outcome is Outcome.COMMITTED


class Broker:
    """The topics, the transactional id of the leaders, and the cleaner."""

    def __init__(self, retention_ms: int, retention_bytes: int, random: Random) -> None:
        self.command = Topic("COMMAND")
        self.control = Topic("CONTROL")
        self.assignement = Topic("ASSIGNEMENT")
        self.topics = (self.command, self.control, self.assignement)
        self.down = False
        self.epoch = 0
        self._retention_ms = retention_ms
        self._retention_bytes = retention_bytes
        self._random = random
        self._open: Transaction | None = None

    def is_fenced(self, epoch: int) -> bool:
        """Whether a later producer of the transactional id has begun."""
        return epoch != self.epoch

    def append(self, now: float, write: Write, transaction: Transaction | None = None) -> Record:
        """Write one record at true time ``now`` (seconds)."""
        topic = write.topic
        record = Record(topic.end, int(now * 1000), write.key, write.value, write.size_bytes, transaction)
        topic.append(record)
        if transaction is None:
            topic.tell([write.key])
        return record

    def begin_producer(self) -> int:
        """``init_transactions``: fence every producer before, and abort what it left open."""
        self.epoch += 1
        self.abort_open()
        return self.epoch

    def write(self, now: float, epoch: int, writes: Sequence[Write]) -> tuple[Transaction, list[Record]]:
        """Begin a transaction and write its records.

        Raises:
            Fenced: a later producer has begun.
        """
        if self.is_fenced(epoch):
            raise Fenced
        self.abort_open()
        transaction = self._open = Transaction(epoch, now)
        for write in writes:
            if write.topic not in transaction.topics:
                transaction.topics.append(write.topic)
                write.topic.open[write.topic.end] = transaction
        return transaction, [self.append(now, write, transaction) for write in writes]

    def commit(self, transaction: Transaction) -> None:
        """Make the records of a transaction readable.

        Raises:
            Fenced: it was aborted meanwhile.
        """
        if transaction.outcome is not Outcome.OPEN or self.is_fenced(transaction.epoch):
            raise Fenced
        self._end(transaction, Outcome.COMMITTED)

    def abort_open(self, opened_before: float = float("inf")) -> bool:
        """Abort the transaction that is open, if it is that old. Whether there was one."""
        transaction = self._open
        if transaction is None or transaction.opened_at >= opened_before:
            return False
        self._end(transaction, Outcome.ABORTED)
        return True

    def _end(self, transaction: Transaction, outcome: Outcome) -> None:
        transaction.outcome = outcome
        self._open = None if self._open is transaction else self._open
        for topic in transaction.topics:
            first = next(offset for offset, other in topic.open.items() if other is transaction)
            del topic.open[first]
            topic.end += 1
            low = bisect_left(topic.records, first, key=_offset)
            topic.tell([record.key for record in topic.records[low:]])

    def compact(self) -> int:
        """Drop what a later record of the same key replaces, up to somewhere. How many records went."""
        gone = 0
        for topic in self.topics:
            stable = topic.stable_end
            limit = min(stable, topic.end - self._random.randint(1, 4))
            last: dict[str, int] = {}
            for record in topic.records:
                if record.offset < limit and _is_visible(record):
                    last[record.key] = record.offset
            gone += topic.drop([r for r in topic.records if r.offset >= limit or _stays(r, last)])
        return gone

    def retain(self, now: float) -> int:
        """Drop the beginning of COMMAND that is too old, or beyond the size. How many records went."""
        topic = self.command
        oldest_ms = now * 1000 - self._retention_ms
        left_bytes, index = topic.size_bytes, 0
        for record in topic.records:
            too_big = left_bytes - record.size_bytes >= self._retention_bytes
            if record.offset >= topic.stable_end or not (record.timestamp_ms < oldest_ms or too_big):
                break
            left_bytes -= record.size_bytes
            index += 1
        return topic.drop(topic.records[index:]) if index else 0


def _stays(record: Record, last: dict[str, int]) -> bool:
    return last.get(record.key) == record.offset and record.value is not None
