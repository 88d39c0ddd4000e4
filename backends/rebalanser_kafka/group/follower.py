"""Follows a group's log, record by record, and keeps its replica, from the log's beginning or from a
snapshot.

A log from which earlier records were deleted begins in the middle. Its follower keeps the records it reads
until it has a whole snapshot that needs none of the deleted ones. It loads that snapshot, and applies the
records after the snapshot's offset.

A topic may be deleted and created again while a connection is cut off, and the new log may have grown past
the offset to read next: Kafka's client then continues there and reports nothing. So every request names the
log it was written for. A request for another log is executed by no replica, and is a sign to begin anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from rebalanser.errors import InternalError, RebalanserError, RegistryUnavailable, UnusableStore
from rebalanser_kafka.group.parts import BadPart, OrderedAssembler
from rebalanser_kafka.group.records import Request, Snapshot, UnreadableValue, decode, is_request
from rebalanser_kafka.group.replica import Replica, Result

MAX_KEPT_RECORDS: Final = 200_000
"""Maximum records kept while a snapshot is being found."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A record at its offset in the log."""

    offset: int
    timestamp_ms: int
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of a request that a caller here waits for."""

    request: str
    result: Result
    error: RebalanserError | None = None


@dataclass(frozen=True, slots=True)
class UnreadableRecord:
    """An unreadable record, and the reason."""

    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotRead:
    """A whole snapshot: no record before ``needs_from`` is needed any more."""

    request: str
    needs_from: int


Event: TypeAlias = Ended | UnreadableRecord | SnapshotRead


class Overtaken(RegistryUnavailable):
    """Another operator request took effect first; this one had no effect (RB-44)."""


class LogFollower:
    """The replica of a log that begins at offset ``log_start``, and the position in the log."""

    def __init__(self, group: str, log_start: int) -> None:
        self.replica = Replica(group)
        self._assembler = OrderedAssembler()
        self._log_start = log_start
        self._kept: deque[tuple[LogEntry, Request]] | None = None
        if log_start > 0:
            self._kept = deque(maxlen=MAX_KEPT_RECORDS + 1)
        self._position = log_start
        self._snapshot_at = log_start - 1
        self._bytes_since = 0
        self._foreign_at = -1

    @property
    def position(self) -> int:
        """The offset of the record to read next."""
        return self._position

    @property
    def foreign_at(self) -> int:
        """Offset of the last record that was written for another log, or -1: then its writer or this reader
        refers to a log that was created anew."""
        return self._foreign_at

    @property
    def complete(self) -> bool:
        """True if the replica is the log's state, False while it lacks the snapshot that it needs."""
        return self._kept is None

    @property
    def from_beginning(self) -> bool:
        """True if the log still has its first record."""
        return self._log_start == 0

    @property
    def records_since_snapshot(self) -> int:
        """Number of records in the log after the offset of the last snapshot that was read."""
        return self._position - self._snapshot_at - 1

    @property
    def bytes_since_snapshot(self) -> int:
        """Bytes read since the last snapshot was whole."""
        return self._bytes_since

    def read(self, entry: LogEntry, asked: Mapping[str, float]) -> list[Event]:
        """Take in one record. ``asked`` has the requests with waiting callers, and the times they were sent.

        Raises:
            UnusableStore: the log cannot be followed beyond this record, or without one that is missing
                before it.
        """
        if entry.offset < self._position:
            raise InternalError(f"offset {entry.offset} was read after {self._position - 1}")
        self._position = entry.offset + 1
        self._bytes_since += len(entry.value or b"")
        if self._kept is None:
            self.replica.see(entry.offset, entry.timestamp_ms)
        try:
            value = entry.value
            if value is not None and not is_request(value):
                value = self._assembler.add(entry.offset, value)
                if value is None:
                    return []
            request = decode(value)
        except (BadPart, UnreadableValue) as error:
            return [UnreadableRecord(entry.offset, str(error))]
        if self._kept is None and not self._is_for_this_log(request):
            return self._refuse(entry, request, asked)
        if isinstance(request.wish, Snapshot):
            events = self._found(request.id, request.wish, asked)
            if self._kept is None:
                self.replica.see(entry.offset, entry.timestamp_ms)
            return events
        if self._kept is None:
            return self._apply(request, asked)
        self._kept.append((entry, request))
        self._check_kept(len(self._kept))
        return []

    def _check_kept(self, kept: int) -> None:
        if kept > MAX_KEPT_RECORDS:
            raise UnusableStore(
                f"the log begins at offset {self._log_start} and has no snapshot within "
                f"{MAX_KEPT_RECORDS} records: its earlier records were deleted by somebody else"
            )

    def _is_for_this_log(self, request: Request) -> bool:
        return request.born_ms in {0, self.replica.birth_ms}

    def _refuse(self, entry: LogEntry, request: Request, asked: Mapping[str, float]) -> list[Event]:
        self._foreign_at = entry.offset
        error = RegistryUnavailable("the group's log was recreated meanwhile; this had no effect")
        return [Ended(request.id, None, error)] if request.id in asked else []

    def _apply(self, request: Request, asked: Mapping[str, float]) -> list[Event]:
        sent_at = asked.get(request.id)
        result: Result = None
        failed: RebalanserError | None = None
        try:
            if request.epoch not in {None, self.replica.operator_epoch}:
                raise Overtaken
            result = self.replica.apply(request.wish, sent_at)
        except RebalanserError as error:
            failed = error
        return [] if sent_at is None else [Ended(request.id, result, failed)]

    def _found(self, request: str, snapshot: Snapshot, asked: Mapping[str, float]) -> list[Event]:
        if self._kept is None:
            if snapshot.as_of > self._snapshot_at:
                self._snapshot_at = snapshot.as_of
                self._bytes_since = 0
            return [SnapshotRead(request, snapshot.needs_from)]
        if snapshot.needs_from < self._log_start:
            return []
        self.replica.load(snapshot.state)
        self._snapshot_at, self._bytes_since = snapshot.as_of, 0
        kept, self._kept = self._kept, None
        events: list[Event] = []
        for entry, later in kept:
            if entry.offset > snapshot.as_of:
                self.replica.see(entry.offset, entry.timestamp_ms)
                known = self._is_for_this_log(later)
                events += self._apply(later, asked) if known else self._refuse(entry, later, asked)
        return events

    def snapshot(self) -> Snapshot:
        """Return the state that a later reader needs in place of all records so far."""
        return Snapshot(
            as_of=self._position - 1,
            needs_from=self._assembler.oldest_needed(self._position),
            state=self.replica.dump(),
        )
