"""The running applications of the cluster as resources of its groups (SH-19).

The connection of a group's leader follows the cluster's assignment documents. It appends the running
applications to the group's log; there they take effect unless a newer document has been fed. An operator who
reads a group without a leader does the same before the read. If the cluster has no such topic, nothing is
fed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from rebalanser.errors import RebalanserError, RegistryRefused
from rebalanser.feed import Applications, started_applications
from rebalanser.shiva.cluster import TopicNames
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.log import LogReader
from rebalanser_kafka.shiva.last_records import last_document, read_on

LOOK_S: Final = 0.5
"""Maximum seconds until a node that becomes leader begins to follow."""
POLL_S: Final = 0.2
MISSING_S: Final = 10.0
"""Seconds between two checks of a cluster without applications."""
RETRY_S: Final = 1.0
CLOSE_TIMEOUT_S: Final = 5.0


class RunningApplications:
    """The running applications of a cluster."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._topic = TopicNames().of(connection.cluster).assignement

    def read(self, timeout_s: float) -> Applications | None:
        """Return the applications of the last document; None without a document, or without the cluster's
        topics.

        Raises:
            RetryLater: it could not be read to its end within ``timeout_s`` seconds.
        """
        try:
            chain, _ = last_document(self._connection, self._topic, timeout_s)
        except RegistryRefused:
            return None
        return started_applications(chain.document) if chain.document is not None else None

    def follow(
        self, goes_on: Callable[[], bool], take: Callable[[Applications], None], timeout_s: float
    ) -> None:
        """Call ``take`` with the applications of the last document, and of each newer one.

        Return once ``goes_on`` is false, or after a missed change: then call it again.

        Raises:
            RegistryRefused: the cluster has no such topic.
            RetryLater: it could not be read now.
        """
        chain, end = last_document(self._connection, self._topic, timeout_s)
        with LogReader(self._connection, self._topic, end) as reader:
            is_new = True
            while goes_on() and not chain.missed:
                if is_new and chain.document is not None:
                    take(started_applications(chain.document))
                is_new = read_on(chain, reader.poll(POLL_S))


class LeaderFeed:
    """A thread that follows the running applications as long as its node leads."""

    def __init__(
        self,
        running: RunningApplications,
        leads: Callable[[], bool],
        take: Callable[[Applications], None],
        timeout_s: float,
        group: str,
    ) -> None:
        self._running = running
        self._leads = leads
        self._take = take
        self._timeout_s = timeout_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rebalanser-feed-{group}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following. Closing twice does nothing."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _goes_on(self) -> bool:
        return not self._closed.is_set() and self._leads()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            if not self._goes_on():
                continue
            try:
                self._running.follow(self._goes_on, self._take, self._timeout_s)
            except RegistryRefused:
                self._closed.wait(MISSING_S)
            except RebalanserError:
                self._closed.wait(RETRY_S)
