"""The records of a history topic, read back for people: all partitions at once, merged by time."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Final

import tenacity

from rebalanser.errors import RegistryRefused, RegistryUnavailable
from rebalanser.history import Record, UnreadableLine, read_line
from rebalanser_kafka.connection import Connection, reach
from rebalanser_kafka.history import connection_of
from rebalanser_kafka.log import LogReader
from rebalanser_kafka.records import LogRecord
from rebalanser_kafka.topics import partitions_of

_POLL_S: Final = 0.2
_GLANCE_S: Final = 0.02
"""Seconds to wait for more from a partition that was read to its end."""


def open_source(url: str, timeout_s: float) -> TopicSource:
    """Open the topic of ``url`` for reading; it is not created.

    Raises:
        InvalidUrl: the topic, an option or the account is invalid; the message says why.
        RegistryUnavailable: no broker answered within ``timeout_s`` seconds.
        RegistryRefused: there is no such topic, or this user may not read it.
    """
    connection = connection_of(url)
    with connection.naming_user():
        reach(connection, timeout_s)
        count = partitions_of(connection, [connection.cluster], timeout_s).get(connection.cluster)
    if count is None:
        raise RegistryRefused(
            f"there is no topic {connection.cluster} on {connection.servers}: no node has written its "
            f"history there, or the name is another one"
        )
    return TopicSource(connection, count, timeout_s)


class TopicSource:
    """The records of one topic from its beginning, read by one thread.

    Each partition has a reader of its own, whose prefetched records take 16 MiB at most.
    """

    def __init__(self, connection: Connection, partitions: int, timeout_s: float) -> None:
        """A broker is given up if it is silent for ``timeout_s`` seconds while there must be more records."""
        self._topic = connection.cluster
        self._servers = connection.servers
        self._timeout_s = timeout_s
        self._readers = [
            LogReader(connection, self._topic, "earliest", partition=partition)
            for partition in range(partitions)
        ]
        self._ends: dict[int, int] = {}
        self._positions: dict[int, int] = {}

    @property
    def name(self) -> str:
        """Topic and brokers."""
        return f"topic {self._topic} on {self._servers}"

    @property
    def found(self) -> str:
        """Reason, for people, why no record was found."""
        return "it is empty"

    @property
    def trouble(self) -> str | None:
        """Reason why no records may be coming at present, such as an unreachable broker."""
        return next((reader.trouble for reader in self._readers if reader.trouble), None)

    def progress(self) -> tuple[int, int]:
        """Return the number of records read, and the number at the start of the read."""
        return sum(self._positions.values()), sum(self._ends.values())

    def read(self, *, growing: bool) -> Iterator[Record | UnreadableLine]:
        """Yield all records since the last call, in the order of their wall time.

        The ``file`` of an ``UnreadableLine`` is ``TOPIC/PARTITION``, its ``line`` the offset. A topic
        always grows, so ``growing`` changes nothing.

        Raises:
            RegistryUnavailable: no broker answers.
            RegistryRefused: the topic was removed, or this user may not read it.
            RetryLater: retention deleted records that were about to be read; begin again.
        """
        del growing
        streams = [self._stream(partition) for partition in range(len(self._readers))]
        return (item for _, item in heapq.merge(*streams, key=itemgetter(0)))

    def close(self) -> None:
        """Close the connections. Closing twice does nothing."""
        for reader in self._readers:
            reader.close()

    def _stream(self, partition: int) -> Iterator[tuple[float, Record | UnreadableLine]]:
        latest = 0.0
        place = Path(self._topic, str(partition))
        for found in self._new(partition):
            item = read_line((found.value or b"") + b"\n", place, found.offset)
            latest = item.wall_time if isinstance(item, Record) else latest
            yield latest, item

    def _new(self, partition: int) -> Iterator[LogRecord]:
        """Yield records up to the end as of the start of the read; later, up to the present end."""
        reader = self._readers[partition]
        if partition not in self._ends:
            self._positions[partition], self._ends[partition] = self._patiently(reader.bounds)
            yield from self._up_to(partition, self._ends[partition])
        while records := reader.poll(_GLANCE_S):
            yield from records

    def _patiently(self, ask: Callable[[float], tuple[int, int]]) -> tuple[int, int]:
        """Retry while brokers do not know yet the leader of a new topic's partition."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(RegistryUnavailable),
            wait=tenacity.wait_fixed(_POLL_S),
            stop=tenacity.stop_after_delay(self._timeout_s),
            reraise=True,
        )
        return retrying(ask, self._timeout_s)

    def _up_to(self, partition: int, end: int) -> Iterator[LogRecord]:
        reader = self._readers[partition]
        heard = time.monotonic()
        while self._positions[partition] < end:
            records = reader.poll(_POLL_S)
            if reader.position > self._positions[partition]:
                heard = time.monotonic()
            elif time.monotonic() - heard > self._timeout_s:
                raise RegistryUnavailable(
                    f"{self.name} stopped answering at offset {reader.position} of partition {partition}: "
                    f"{reader.trouble or 'no answer at all'}"
                )
            self._positions[partition] = max(reader.position, self._positions[partition])
            yield from records
