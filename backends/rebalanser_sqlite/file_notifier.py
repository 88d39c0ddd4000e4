"""A wake-up across processes: a writer rings after its commit, and every watcher of the file is woken up.

Ringing opens the write-ahead log and closes it again, which changes nothing on the disk: to touch the times
of a file would make the next commit write its inode too. SQLite opens the log only with a connection, so that
few events mean anything else, and has no lock on it that closing it would drop.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING

from rebalanser_sqlite.location import log_of

if TYPE_CHECKING:
    from pathlib import Path

if sys.platform == "linux" or TYPE_CHECKING:
    import inotify_simple  # type: ignore[import-untyped]

POLL_S = 0.01
"""Seconds between two looks if the notifier can't be heard."""


class FileNotifier(ABC):
    """A sleep that a change of the file ends. ``wake`` may be called from any thread, the rest from one."""

    @abstractmethod
    def wake(self) -> None:
        """Make a wait end, the present one or the next."""

    @abstractmethod
    def wait(self, timeout_s: float | None) -> None:
        """Return when the notifier rings, when woken, or on a timeout; sometimes without a reason."""

    @abstractmethod
    def close(self) -> None:
        """Give all descriptors back."""


class PollingNotifier(FileNotifier):
    """Wakes up every 10 ms, as it gets no notices from other processes. It needs no descriptor."""

    def __init__(self) -> None:
        self._woken = threading.Event()

    def wake(self) -> None:
        """Make a wait end, the present one or the next."""
        self._woken.set()

    def wait(self, timeout_s: float | None) -> None:
        """Return when woken or after 10 ms."""
        if self._woken.wait(POLL_S if timeout_s is None else max(0.0, min(timeout_s, POLL_S))):
            self._woken.clear()

    def close(self) -> None:
        """Do nothing."""


class InotifyNotifier(FileNotifier):
    """Hears the notifier of a database file by inotify, also once its log was made anew.

    The last connection of the host removes the log as it is closed, which a fork may do.

    Raises:
        OSError: the user has no inotify instance or watch left.
    """

    def __init__(self, path: Path) -> None:
        # inotify_simple would search the C library by running ldconfig, which takes 25 ms.
        if inotify_simple._libc is None:  # noqa: SLF001
            inotify_simple._libc = ctypes.CDLL(None, use_errno=True)  # noqa: SLF001
        self._log = log_of(path)
        self._inotify = inotify_simple.INotify(nonblocking=True)
        self._is_deaf = True
        try:
            self._listen()
            self._wake_reader, self._wake_writer = os.pipe()
        except BaseException:
            self._inotify.close()
            raise
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._poll = select.poll()
        self._poll.register(self._wake_reader, select.POLLIN)
        self._poll.register(self._inotify.fileno(), select.POLLIN)

    def wake(self) -> None:
        """Make a wait end, the present one or the next."""
        # A full pipe wakes as well.
        with suppress(BlockingIOError):
            os.write(self._wake_writer, b"\0")

    def wait(self, timeout_s: float | None) -> None:
        """Return at a change, when woken, or on a timeout; at once if it may have missed a change."""
        if self._is_deaf and self._listen():
            return
        for descriptor, _ in self._poll.poll(_milliseconds(timeout_s)):
            if descriptor == self._wake_reader:
                self._silence()
            else:
                ended = inotify_simple.flags.IGNORED
                self._is_deaf |= any(event.mask & ended for event in self._inotify.read(timeout=0))

    def _listen(self) -> bool:
        """Begin to hear the notifier; False if there is no log now."""
        with suppress(FileNotFoundError):
            self._inotify.add_watch(self._log, inotify_simple.flags.OPEN)
            self._is_deaf = False
        return not self._is_deaf

    def close(self) -> None:
        """Give all descriptors back."""
        self._inotify.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _silence(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._wake_reader, 4096):
                pass


def _milliseconds(timeout_s: float | None) -> float | None:
    # To poll, a negative time means for ever.
    return None if timeout_s is None else max(0.0, timeout_s * 1000)


def notifier_of(path: Path) -> FileNotifier:
    """Return the best available sleep for a database file."""
    if sys.platform == "linux":
        with suppress(OSError):
            return InotifyNotifier(path)
    return PollingNotifier()
