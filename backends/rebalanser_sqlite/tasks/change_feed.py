"""The one thread of an engine, which reports changes to watches."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rebalanser.core.tasks.store import ChangesLost, StatusFilter
from rebalanser_sqlite.listener import LOOK_S, PATIENCE_S, Listener
from rebalanser_sqlite.store import Deadline, Store
from rebalanser_sqlite.tasks.reader import TaskSnapshot
from rebalanser_sqlite.tasks.rows import change_of, stored_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rebalanser.core.tasks.model import Status, Stored
    from rebalanser.core.tasks.store import ChangeFilter
    from rebalanser.tasks.engine import Sink
    from rebalanser_sqlite.tasks.rows import Row

CHANGES_PER_READ = 500

_log = logging.getLogger("rebalanser.sqlite")


@dataclass(eq=False, slots=True)
class TaskWatch:
    """A running watch: all changes of ``queue`` up to the revision ``seen`` were reported."""

    queue: str
    seen: int
    sink: Sink
    wants: ChangeFilter | None
    forget: Callable[[TaskWatch], None] = field(repr=False)
    open: bool = True

    def close(self) -> None:
        """Stop the watch. A report under way may still arrive. Closing twice does nothing."""
        self.open = False
        self.forget(self)

    def tell(self, told: Sequence[Row] | ChangesLost) -> None:
        """Pass a report to the sink, whose errors must not end the thread that all watches share."""
        if not self.open:
            return
        try:
            wanted = told if isinstance(told, ChangesLost) else self._wanted(told)
            if wanted:
                self.sink(wanted)
        except Exception:
            _log.exception(
                "a change listener raised for queue %s", self.queue, extra={"action": "sink_failed"}
            )

    def _wanted(self, rows: Sequence[Row]) -> list[Stored]:
        """Return the tasks of the rows that the watch wants."""
        wants = self.wants
        return [stored_of(self.queue, row) for row in rows if wants is None or wants(change_of(row))]


@dataclass(eq=False, slots=True)
class CommitWatch:
    """A running watch that is only notified of commits after the revision ``seen``."""

    wake: Callable[[], None]
    forget: Callable[[CommitWatch], None] = field(repr=False)
    seen: int = -1
    open: bool = True

    def close(self) -> None:
        """Stop the watch. A notice under way may still arrive. Closing twice does nothing."""
        self.open = False
        self.forget(self)

    def tell(self) -> None:
        """Notify the watch, whose errors must not end the thread that all watches share."""
        if not self.open:
            return
        try:
            self.wake()
        except Exception:
            _log.exception("a watch of commits raised", extra={"action": "sink_failed"})


class ChangeFeed(Listener["TaskWatch | CommitWatch"]):
    """Runs while its engine is open, once it has had a watch."""

    def __init__(self, path: Path, open_store: Callable[[], Store]) -> None:
        super().__init__(path, open_store, "tasks")

    def add(self, queue: str, from_revision: int, sink: Sink, wants: ChangeFilter | None) -> TaskWatch:
        """Begin a watch; the first one starts the thread."""
        watch = TaskWatch(queue, from_revision, sink, wants, self._forget)
        self._begin(watch)
        return watch

    def add_commits(self, wake: Callable[[], None]) -> CommitWatch:
        """Begin a watch of commits, which is notified once at the start."""
        watch = CommitWatch(wake, self._forget)
        self._begin(watch)
        return watch

    def _look(self, store: Store) -> float | None:
        """Report new changes. Return the seconds until there is more to do, None for never."""
        while True:
            with self._lock:
                watches = list(self._watches)
            if not watches:
                return None
            with store.reading(Deadline.after(PATIENCE_S)):
                snapshot = TaskSnapshot(store)
                behind = [watch for watch in watches if watch.seen != snapshot.revision]
                news = self._news(snapshot, [each for each in behind if isinstance(each, TaskWatch)])
            for each in behind:
                if isinstance(each, CommitWatch):
                    each.seen = snapshot.revision
                    each.tell()
            for watches_there, told, seen in news:
                for watch in watches_there:
                    if told:
                        watch.tell(told)
                    watch.seen = seen
            if all(watch.seen == snapshot.revision for watch in watches):
                return LOOK_S

    @staticmethod
    def _news(
        snapshot: TaskSnapshot, behind: list[TaskWatch]
    ) -> list[tuple[list[TaskWatch], Sequence[Row] | ChangesLost, int]]:
        """Return the next report for each watch, read once for watches at the same position, and the position
        after it."""
        places: defaultdict[tuple[str, int], list[TaskWatch]] = defaultdict(list)
        for watch in behind:
            places[watch.queue, watch.seen].append(watch)
        news: list[tuple[list[TaskWatch], Sequence[Row] | ChangesLost, int]] = []
        for (queue, seen), watches in places.items():
            if seen > snapshot.revision or seen < snapshot.forgotten:
                news.append((watches, ChangesLost(snapshot.revision), snapshot.revision))
                continue
            up_to = min(seen + CHANGES_PER_READ, snapshot.revision)
            news.append((watches, snapshot.changed(queue, seen, up_to, _statuses(watches)), up_to))
        return news


def _statuses(watches: Sequence[TaskWatch]) -> set[Status] | None:
    """Return the statuses of the changes that watches want; None for all, and for new tasks."""
    statuses: set[Status] = set()
    for each in watches:
        if not isinstance(each.wants, StatusFilter):
            return None
        statuses |= each.wants.statuses
    return statuses
