"""The one thread of a registry: tells its watches what changed, and ends leases that nobody else ended."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rebalanser.errors import RebalanserError
from rebalanser.registry.contract import Changed, HistoryLost, Sink, Target, WatchEvent
from rebalanser_sqlite import history, leases
from rebalanser_sqlite.bell import Bell, bell_of
from rebalanser_sqlite.store import Deadline, Store, ring

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOOK_S = 0.25
"""The slow look that finds what a writer committed and was killed before it could ring."""
PATIENCE_S = 1.0
"""How long the thread waits for a lock before it looks again."""

_log = logging.getLogger("rebalanser.sqlite")


@dataclass(eq=False, slots=True)
class FileWatch:
    """A running watch: the changes from revision ``next`` on have not been told yet."""

    target: Target
    next: int
    sink: Sink
    forget: Callable[[FileWatch], None] = field(repr=False)
    open: bool = True

    def close(self) -> None:
        """Stop it. Events already under way may still be told. Closing twice does nothing."""
        self.open = False
        self.forget(self)

    def tell(self, events: list[WatchEvent]) -> None:
        """Hand events to the sink, whose errors must not end the thread that all watches share."""
        if not self.open:
            return
        try:
            self.sink(events)
        except Exception:
            _log.exception("a sink raised for %s", self.target.key, extra={"action": "sink_failed"})


class Watcher:
    """Runs while its registry is open, once it has had a watch."""

    def __init__(self, path: Path, open_store: Callable[[], Store]) -> None:
        self._path = path
        self._open_store = open_store
        self._lock = threading.Lock()
        self._watches: list[FileWatch] = []
        self._closing = False
        self._bell: Bell | None = None
        self._thread: threading.Thread | None = None

    def add(self, target: Target, from_revision: int, sink: Sink) -> FileWatch:
        """Begin a watch; the first one starts the thread."""
        watch = FileWatch(target, from_revision, sink, self._forget)
        with self._lock:
            self._watches.append(watch)
            if self._bell is None:
                self._bell = bell_of(self._path)
                self._thread = threading.Thread(
                    target=self._run, args=(self._bell,), name=f"registry {self._path.name}", daemon=True
                )
                self._thread.start()
            self._bell.wake()
        return watch

    def _forget(self, watch: FileWatch) -> None:
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)

    def wake(self) -> None:
        """Have a look now."""
        with self._lock:
            if self._bell is not None and not self._closing:
                self._bell.wake()

    def close(self) -> None:
        """End all watches and the thread, and wait for it, unless it is the one that asks."""
        with self._lock:
            watches, self._watches = self._watches, []
            was_closing, self._closing = self._closing, True
            if self._bell is not None and not was_closing:
                self._bell.wake()
        for watch in watches:
            watch.open = False
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, bell: Bell) -> None:
        store: Store | None = None
        try:
            while not self._closing:
                try:
                    store = store or self._open_store()
                    pause_s = self._look(store)
                except RebalanserError as error:
                    _log.warning("watches wait: %s", error, extra={"action": "watch_failed"})
                    pause_s = LOOK_S
                bell.wait(pause_s)
        finally:
            if store is not None:
                store.close()
            with self._lock:
                self._closing = True
                bell.close()

    def _look(self, store: Store) -> float | None:
        """Tell what is new and end what is over; how many seconds there is nothing to do."""
        with self._lock:
            watches = list(self._watches)
        if not watches:
            return None
        while True:
            with store.reading(Deadline.after(PATIENCE_S)):
                kept = history.extent(store)
                untold = min(watch.next for watch in watches)
                first = max(untold, kept.forgotten + 1)
                last = min(kept.latest, first + history.REVISIONS_PER_READ - 1)
                changes = history.changes(store, first, last) if first <= last else []
                next_end_s = leases.next_end_s(store)
            if untold <= kept.latest:
                self._tell(watches, changes, kept.forgotten, last)
            if next_end_s is not None and next_end_s <= store.clock.now():
                self._end_leases(store)
            elif last >= kept.latest:
                return LOOK_S if next_end_s is None else min(LOOK_S, next_end_s - store.clock.now())

    def _end_leases(self, store: Store) -> None:
        with store.writing(Deadline.after(PATIENCE_S)):
            keys_went = leases.end_those_over(store)
            history.trim(store)
        if keys_went:
            ring(self._path)

    @staticmethod
    def _tell(watches: list[FileWatch], changes: list[Changed], forgotten: int, last: int) -> None:
        """Tell each watch what concerns it, by a look-up for those of one key, for they can be many."""
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
                watch.tell(events[watch])
