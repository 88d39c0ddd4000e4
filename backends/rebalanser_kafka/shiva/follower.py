"""A thread that follows one topic and passes on its records, one batch at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from rebalanser.errors import InternalError, RebalanserError, RegistryUnavailable, UnusableStore
from rebalanser.runtime.logs import get_logger
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.failures import LogTruncated
from rebalanser_kafka.reader import LogReader
from rebalanser_kafka.records import LogRecord
from rebalanser_kafka.shiva.outage import Outage

POLL_S: Final = 0.2
CLOSE_TIMEOUT_S: Final = 5.0
LOOK_S: Final = 5.0
"""Seconds for one request of the log's first and last offset."""

_log = get_logger("rebalanser.shiva")


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of a follower, and the position after them. It reads on once ``taken`` is set."""

    topic: str
    records: Sequence[LogRecord]
    position: int
    taken: threading.Event


@dataclass(frozen=True, slots=True)
class Lost:
    """A topic cannot be followed any more."""

    error: RebalanserError


Give: TypeAlias = Callable[[Batch | Lost], None]
"""Takes a follower's batches, at once and from its thread; at most one batch of each is pending."""


class Follower:
    """Follows a topic of one partition in a thread of its own, until it is closed.

    ``give`` gets one :class:`Batch` after the other and, at the end, :class:`Lost` if the topic cannot
    be followed any more. A reader that was too slow for the topic's retention goes on with what is left.
    """

    def __init__(
        self, connection: Connection, topic: str, start: int | Literal["earliest", "latest"], give: Give
    ) -> None:
        self._connection = connection
        self._topic = topic
        self._give = give
        self._closing = threading.Event()
        self._fields = {"cluster": connection.cluster, "topic": topic}
        self._outage = Outage.shared(connection.servers, "topic_unreadable", self._fields)
        self._reader = LogReader(connection, topic, start)
        self._thread = threading.Thread(target=self._follow, name=f"rebalanser-{topic}", daemon=True)

    def begin(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, whether or not its last batch was taken. Closing twice does nothing."""
        self._closing.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _follow(self) -> None:
        trouble: str | None = None
        seen = -1
        try:
            while not self._closing.is_set():
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
                    self._hand_over(Batch(self._topic, records, seen, threading.Event()))
        except RebalanserError as error:
            self._lose(error)
        except Exception as error:
            _log.exception("the follower ended by a fault", action="follower_failed", **self._fields)
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
            self._give(Lost(error))

    def _hand_over(self, batch: Batch) -> None:
        self._give(batch)
        while not batch.taken.wait(POLL_S) and not self._closing.is_set():
            continue

    def _reopen(self, error: LogTruncated) -> None:
        """Go on at the log's first record, if the next one is gone."""
        position = self._reader.position
        try:
            first, end = self._reader.start_offset(LOOK_S), self._reader.end_offset(LOOK_S)
        except RegistryUnavailable:
            return
        if end < position or first < position:
            raise UnusableStore(
                f"topic {self._topic} has been made anew: it ends at {end}, and was read up to {position}; "
                "start this process again"
            ) from error
        _log.warning(
            f"records {position} to {first} were deleted before they were read",
            action="records_missed",
            **self._fields,
        )
        self._reader.close()
        self._reader = LogReader(self._connection, self._topic, first)
