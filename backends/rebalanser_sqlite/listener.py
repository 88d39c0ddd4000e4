"""The one thread for all watches of an open file: it waits for the notifier, and reads new changes."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from rebalanser.errors import RebalanserError
from rebalanser_sqlite.file_notifier import FileNotifier, notifier_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rebalanser_sqlite.store import Store

LOOK_S: Final = 0.25
"""Seconds between looks without the notifier, which find commits of writers killed before they rang."""
PATIENCE_S: Final = 1.0
"""Maximum seconds that the thread waits for a lock before it looks again."""

_log = logging.getLogger("rebalanser.sqlite")


class OpenWatch(Protocol):
    """A running watch."""

    open: bool


WatchT = TypeVar("WatchT", bound=OpenWatch)


class Listener(ABC, Generic[WatchT]):
    """Runs from the first watch until the file is closed. ``name`` is part of the thread's name."""

    def __init__(self, path: Path, open_store: Callable[[], Store], name: str) -> None:
        self._path = path
        self._open_store = open_store
        self._name = name
        self._lock = threading.Lock()
        self._watches: list[WatchT] = []
        self._closing = False
        self._notifier: FileNotifier | None = None
        self._thread: threading.Thread | None = None

    @abstractmethod
    def _look(self, store: Store) -> float | None:
        """Report new changes. Return the seconds until there is more to do, None for never."""

    def _begin(self, watch: WatchT) -> WatchT:
        """Begin a watch; the first one starts the thread."""
        with self._lock:
            self._watches.append(watch)
            if self._notifier is None:
                self._notifier = notifier_of(self._path)
                self._thread = threading.Thread(
                    target=self._run,
                    args=(self._notifier,),
                    name=f"{self._name} {self._path.name}",
                    daemon=True,
                )
                self._thread.start()
            if not self._closing:
                self._notifier.wake()
        return watch

    def _forget(self, watch: WatchT) -> None:
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)

    def wake(self) -> None:
        """Look for changes now."""
        with self._lock:
            if self._notifier is not None and not self._closing:
                self._notifier.wake()

    def close(self) -> None:
        """End all watches and the thread, and wait for the thread unless it is the caller."""
        with self._lock:
            watches, self._watches = self._watches, []
            was_closing, self._closing = self._closing, True
            if self._notifier is not None and not was_closing:
                self._notifier.wake()
        for watch in watches:
            watch.open = False
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, notifier: FileNotifier) -> None:
        store: Store | None = None
        try:
            while not self._closing:
                try:
                    store = store or self._open_store()
                    pause_s = self._look(store)
                except RebalanserError as error:
                    _log.warning(
                        "changes can't be read, trying again: %s", error, extra={"action": "watch_failed"}
                    )
                    pause_s = LOOK_S
                except Exception:  # a thread that ended here would leave watches that hear nothing any more
                    _log.exception("watches wait", extra={"action": "watch_failed"})
                    pause_s = PATIENCE_S
                notifier.wait(pause_s)
        finally:
            if store is not None:
                store.close()
            with self._lock:
                self._closing = True
                notifier.close()
