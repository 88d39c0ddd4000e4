"""The loop's queue of events: bounded, with the notices of one topic folded into one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rebalanser.core.group import Event, Noticed, Topic


class Inbox:
    """Events for one loop.

    It can't grow without bound. A node has at most one command per lane and one handler under way, and is
    started and stopped once. There is at most one notice for each watched topic. A release that says nothing
    new about its resource is not added.
    """

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._events: list[Event] = []
        self._notices: dict[Topic, Noticed] = {}

    def put(self, event: Event) -> None:
        """Add an event and wake the loop up."""
        with self._arrived:
            self._events.append(event)
            self._arrived.notify()

    def notice(self, notices: Sequence[Noticed]) -> None:
        """Add notices; a later one of a topic replaces an earlier one that still waits.

        It keeps the keys of both: a leader reads the keys in the notice and takes the others as unchanged.
        """
        with self._arrived:
            for notice in notices:
                waiting = self._notices.get(notice.topic)
                self._notices[notice.topic] = notice if waiting is None else waiting.folded(notice)
            self._arrived.notify()

    def take(self, timeout_s: float | None) -> list[Event]:
        """Take all events; wait at most ``timeout_s`` seconds for the first. Empty on a timeout."""
        with self._arrived:
            if not self._events and not self._notices:
                self._arrived.wait(timeout_s)
            taken = [*self._events, *self._notices.values()]
            self._events.clear()
            self._notices.clear()
            return taken
