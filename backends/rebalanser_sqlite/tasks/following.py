"""The one thread of an engine: tells its watches what changed."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rebalanser.errors import RebalanserError
from rebalanser.tasks.engine import Lost
from rebalanser_sqlite.bell import Bell, bell_of
from rebalanser_sqlite.store import Deadline, Store
from rebalanser_sqlite.tasks.reading import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rebalanser.tasks.engine import Sink
    from rebalanser.tasks.model import Stored

LOOK_S = 0.25
"""The slow look that finds what was committed and not rung for."""
PATIENCE_S = 1.0
"""How long the thread waits for a lock before it looks again."""
CHANGES_PER_READ = 500

_log = logging.getLogger("rebalanser.sqlite")


@dataclass(eq=False, slots=True)
class TaskWatch:
    """A running watch: all changes of ``queue`` up to the revision ``seen`` were told."""

    queue: str
    seen: int
    sink: Sink
    forget: Callable[[TaskWatch], None] = field(repr=False)
    open: bool = True

    def close(self) -> None:
        """Stop telling. What is under way may still be told. Closing twice does nothing."""
        self.open = False
        self.forget(self)

    def tell(self, told: Sequence[Stored] | Lost) -> None:
        """Hand it to the sink, whose errors must not end the thread that all watches share."""
        if not self.open:
            return
        try:
            self.sink(told)
        except Exception:
            _log.exception("a sink raised for queue %s", self.queue, extra={"action": "sink_failed"})


class Follower:
    """Runs while its engine is open, once it has had a watch."""

    def __init__(self, path: Path, open_store: Callable[[], Store]) -> None:
        self._path = path
        self._open_store = open_store
        self._lock = threading.Lock()
        self._watches: list[TaskWatch] = []
        self._closing = False
        self._bell: Bell | None = None
        self._thread: threading.Thread | None = None

    def add(self, queue: str, from_revision: int, sink: Sink) -> TaskWatch:
        """Begin a watch; the first one starts the thread."""
        watch = TaskWatch(queue, from_revision, sink, self._forget)
        with self._lock:
            self._watches.append(watch)
            if self._bell is None:
                self._bell = bell_of(self._path)
                self._thread = threading.Thread(
                    target=self._run, args=(self._bell,), name=f"tasks {self._path.name}", daemon=True
                )
                self._thread.start()
            if not self._closing:
                self._bell.wake()
        return watch

    def _forget(self, watch: TaskWatch) -> None:
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)

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
        """Tell what is new; how many seconds there is nothing to do, None for any time."""
        while True:
            with self._lock:
                watches = list(self._watches)
            if not watches:
                return None
            with store.reading(Deadline.after(PATIENCE_S)):
                snapshot = Snapshot(store)
                behind = [watch for watch in watches if watch.seen != snapshot.revision]
                news = self._news(snapshot, behind)
            for watches_there, told, seen in news:
                for watch in watches_there:
                    if told:
                        watch.tell(told)
                    watch.seen = seen
            if all(watch.seen == snapshot.revision for watch in watches):
                return LOOK_S

    @staticmethod
    def _news(
        snapshot: Snapshot, behind: list[TaskWatch]
    ) -> list[tuple[list[TaskWatch], Sequence[Stored] | Lost, int]]:
        """What each of the watches is to be told next, read once for those at one place, and where it is
        then."""
        places: defaultdict[tuple[str, int], list[TaskWatch]] = defaultdict(list)
        for watch in behind:
            places[watch.queue, watch.seen].append(watch)
        news: list[tuple[list[TaskWatch], Sequence[Stored] | Lost, int]] = []
        for (queue, seen), watches in places.items():
            if seen > snapshot.revision:
                news.append((watches, Lost(snapshot.revision), snapshot.revision))
                continue
            changed = snapshot.changed(queue, seen, CHANGES_PER_READ)
            whole = len(changed) < CHANGES_PER_READ
            news.append((watches, changed, snapshot.revision if whole else changed[-1].revision))
        return news
