"""A worker's files: the threads that write them, and the parts of archives until these are put together."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeAlias

from rebalanser.applications.data_folder import folder_name
from rebalanser.errors import InvalidArchive
from rebalanser.runtime.logs import get_logger
from rebalanser.shiva.types import ApplicationId, Archive
from rebalanser_kafka.shiva.wire import PartKey

THREADS: Final = 4
"""Applications whose files are worked on at a time."""
MAX_WAITING_BYTES: Final = 64_000_000
"""Bytes of parts that may wait to be written before no more of COMMAND is read."""
LEAST_WORK_BYTES: Final = 1_000
"""Bytes that work counts for at least, so that its amount is bounded too."""

Work: TypeAlias = Callable[[], None]

_log = get_logger("rebalanser.shiva")


class FileThreads:
    """Carries out work on files: of each application in the order given, of several applications at a time.

    A slow or hung disk holds up the caller only once :data:`MAX_WAITING_BYTES` wait to be written.
    """

    def __init__(self, name: str, threads: int = THREADS, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._max_waiting_bytes = max_waiting_bytes
        self._lock = threading.Lock()
        self._queued: dict[str, list[tuple[Work, int]]] = {}
        self._waiting_bytes = 0
        self._when_room: list[Work] = []

    def submit(self, folder: str, work: Work, size_bytes: int = 0) -> None:
        """Carry out ``work`` after all earlier work on the same folder; it holds ``size_bytes`` till then."""
        size_bytes = max(size_bytes, LEAST_WORK_BYTES)
        with self._lock:
            self._waiting_bytes += size_bytes
            idle = folder not in self._queued
            self._queued.setdefault(folder, []).append((work, size_bytes))
        if idle:
            self._begin(folder)

    def when_room(self, action: Work) -> None:
        """Call ``action`` as soon as at most the limit of bytes wait to be written: at once, or later."""
        with self._lock:
            has_room = self._waiting_bytes <= self._max_waiting_bytes
            if not has_room:
                self._when_room.append(action)
        if has_room:
            action()

    def close(self) -> None:
        """Drop what has not begun, and wait for what has."""
        self._pool.shutdown(cancel_futures=True)

    def _begin(self, folder: str) -> None:
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._pool.submit(self._run, folder)

    def _run(self, folder: str) -> None:
        work, size_bytes = self._queued[folder][0]
        try:
            work()
        except Exception:
            _log.exception("work on files failed", action="file_work_failed", folder=folder)
        actions: list[Work] = []
        with self._lock:
            self._waiting_bytes -= size_bytes
            if self._waiting_bytes <= self._max_waiting_bytes:
                actions, self._when_room = self._when_room, []
            queued = self._queued[folder]
            del queued[0]
            goes_on = bool(queued)
            if not goes_on:
                del self._queued[folder]
        for action in actions:
            action()
        if goes_on:
            self._begin(folder)


class PartsMissing(InvalidArchive):
    """Parts of an archive are not there, or not yet."""


class PartStore:
    """Files named by archive and number. One thread at a time works on those of an application."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, key: PartKey, value: bytes | None) -> None:
        """Keep a part as it was read last; a tombstone removes it."""
        file = self._folder_of(key.application, key.sha256) / str(key.number)
        if value is None:
            file.unlink(missing_ok=True)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".new")
        part.write_bytes(value)
        part.replace(file)

    def assembled(self, application: ApplicationId, archive: Archive) -> bytes:
        """The whole archive.

        Raises:
            PartsMissing: a part is missing.
            InvalidArchive: the parts do not give the archive's sha256.
        """
        folder = self._folder_of(application, archive.sha256)
        files = [folder / str(number) for number in range(archive.parts)]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise PartsMissing(
                f"{len(missing)} of the archive's {archive.parts} parts are missing, first part {missing[0]}"
            )
        sizes = [file.stat().st_size for file in files]
        if sum(sizes) != archive.size_bytes:
            raise InvalidArchive(f"the archive's parts have {sum(sizes)} bytes, not {archive.size_bytes}")
        whole = b"".join(file.read_bytes() for file in files)
        if hashlib.sha256(whole).hexdigest() != archive.sha256:
            raise InvalidArchive("the archive's parts do not give its sha256")
        return whole

    def drop(self, application: ApplicationId, sha256: str) -> None:
        """Forget the parts of an application's archive."""
        shutil.rmtree(self._folder_of(application, sha256), ignore_errors=True)

    def _folder_of(self, application: ApplicationId, sha256: str) -> Path:
        return self._folder / folder_name(str(application)) / sha256
