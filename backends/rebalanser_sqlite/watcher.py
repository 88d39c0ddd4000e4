"""The one thread of a registry: reports changes to its watches, and ends leases that are over."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rebalanser.registry.contract import Changed, HistoryLost, Sink, Target, WatchEvent
from rebalanser_sqlite import history, leases
from rebalanser_sqlite.listener import LOOK_S, PATIENCE_S, Listener
from rebalanser_sqlite.store import Deadline, Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_log = logging.getLogger("rebalanser.sqlite")


@dataclass(eq=False, slots=True)
class FileWatch:
    """A running watch: the changes from revision ``next`` on have not been reported yet."""

    target: Target
    next: int
    sink: Sink
    forget: Callable[[FileWatch], None] = field(repr=False)
    open: bool = True

    def close(self) -> None:
        """Stop the watch. Events under way may still arrive. Closing twice does nothing."""
        self.open = False
        self.forget(self)

    def deliver(self, events: list[WatchEvent]) -> None:
        """Pass events to the sink, whose errors must not end the thread that all watches share."""
        if not self.open:
            return
        try:
            self.sink(events)
        except Exception:
            _log.exception(
                "a change listener raised for %s", self.target.key, extra={"action": "sink_failed"}
            )


class Watcher(Listener[FileWatch]):
    """Runs from the first watch until the registry is closed."""

    def __init__(self, path: Path, open_store: Callable[[], Store]) -> None:
        super().__init__(path, open_store, "registry")

    def add(self, target: Target, from_revision: int, sink: Sink) -> FileWatch:
        """Begin a watch; the first one starts the thread."""
        return self._begin(FileWatch(target, from_revision, sink, self._forget))

    def _look(self, store: Store) -> float | None:
        """Report new changes and end leases. Return the seconds until there is more to do."""
        with self._lock:
            watches = list(self._watches)
        if not watches:
            return None
        while True:
            with store.reading(Deadline.after(PATIENCE_S)):
                kept = history.extent(store)
                earliest = min(watch.next for watch in watches)
                first = max(earliest, kept.forgotten + 1)
                last = min(kept.latest, first + history.REVISIONS_PER_READ - 1)
                changes = history.changes(store, first, last) if first <= last else []
                next_end_s = leases.next_end_s(store)
            if earliest <= kept.latest:
                self._deliver(watches, changes, kept.forgotten, last)
            if next_end_s is not None and next_end_s <= store.clock.now():
                self._end_leases(store)
            elif last >= kept.latest:
                return LOOK_S if next_end_s is None else min(LOOK_S, next_end_s - store.clock.now())

    def _end_leases(self, store: Store) -> None:
        with store.writing(Deadline.after(PATIENCE_S)):
            keys_went = leases.end_those_over(store)
            history.trim(store)
        if keys_went:
            store.ring()

    @staticmethod
    def _deliver(watches: list[FileWatch], changes: list[Changed], forgotten: int, last: int) -> None:
        """Report to each watch its changes; watches of one key are found by look-up, as they can be many."""
        events: defaultdict[FileWatch, list[WatchEvent]] = defaultdict(list)
        of_key: defaultdict[str, list[FileWatch]] = defaultdict(list)
        of_prefix: list[FileWatch] = []
        for watch in watches:
            if watch.next <= forgotten:
                events[watch].append(HistoryLost(forgotten))
                watch.next = forgotten + 1
            if watch.target.prefix:
                of_prefix.append(watch)
            else:
                of_key[watch.target.key].append(watch)
        for change in changes:
            concerned = [*of_key.get(change.key, ()), *of_prefix]
            for watch in concerned:
                if watch.next <= change.revision and watch.target.covers(change.key):
                    events[watch].append(change)
        for watch in watches:
            watch.next = max(watch.next, last + 1)
            if watch in events:
                watch.deliver(events[watch])
