"""Archives on COMMAND: where their parts are, how they are read, and the threads that write their files."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeAlias

from rebalanser.core.shiva.archives import check_archive_size
from rebalanser.core.shiva.types import ApplicationId, Archive
from rebalanser.errors import InvalidArchive, RegistryUnavailable
from rebalanser.runtime.logs import get_logger
from rebalanser_kafka.log import LogReader, LogRecord, LogTruncated
from rebalanser_kafka.shiva.wire import PartKey

THREADS: Final = 4
"""Maximum applications whose files are written at a time."""
MAX_WAITING: Final = 10_000
"""Maximum pending jobs; beyond it no more of COMMAND is read."""
POLL_S: Final = 0.2
PATIENCE_S: Final = 5.0
"""Seconds without a record of COMMAND after which reading an archive fails for now."""

Work: TypeAlias = Callable[[], None]

_log = get_logger("rebalanser.shiva")


class FileThreads:
    """Runs jobs on files: those of an application in order, several applications at a time.

    A slow or hung disk blocks the caller only once ``MAX_WAITING`` jobs are pending.
    """

    def __init__(self, name: str, threads: int = THREADS, max_waiting: int = MAX_WAITING) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._queued: dict[str, list[Work]] = {}
        self._waiting = 0
        self._when_room: list[Work] = []

    def submit(self, folder: str, work: Work) -> None:
        """Run ``work`` after all earlier jobs on the same folder."""
        with self._lock:
            self._waiting += 1
            idle = folder not in self._queued
            self._queued.setdefault(folder, []).append(work)
        if idle:
            self._begin(folder)

    def when_room(self, action: Work) -> None:
        """Call ``action`` once no more jobs are pending than the limit: now or later."""
        with self._lock:
            has_room = self._waiting <= self._max_waiting
            if not has_room:
                self._when_room.append(action)
        if has_room:
            action()

    def close(self) -> None:
        """Drop the jobs that have not begun, and wait for the others."""
        self._pool.shutdown(cancel_futures=True)

    def _begin(self, folder: str) -> None:
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._pool.submit(self._run, folder)

    def _run(self, folder: str) -> None:
        work = self._queued[folder][0]
        try:
            work()
        except Exception:
            _log.exception("work on files failed", action="file_work_failed", folder=folder)
        actions: list[Work] = []
        with self._lock:
            self._waiting -= 1
            if self._waiting <= self._max_waiting:
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


class PartIndex:
    """Offsets of the parts of archives on COMMAND, as read last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offsets: dict[tuple[ApplicationId, str], dict[int, int]] = {}

    def note(self, key: PartKey, offset: int | None) -> None:
        """Note the offset of a part; None for a tombstone, which removes it."""
        files = key.application, key.sha256
        with self._lock:
            if offset is not None:
                self._offsets.setdefault(files, {})[key.number] = offset
                return
            offsets = self._offsets.get(files, {})
            offsets.pop(key.number, None)
            if not offsets:
                self._offsets.pop(files, None)

    def __contains__(self, key: PartKey) -> bool:
        """True if the part is there."""
        with self._lock:
            return key.number in self._offsets.get((key.application, key.sha256), {})

    def offsets(self, application: ApplicationId, archive: Archive) -> dict[int, int]:
        """Return the number of each part of an archive by its offset.

        Raises:
            PartsMissing: a part is missing.
        """
        with self._lock:
            known = dict(self._offsets.get((application, archive.sha256), {}))
        missing = [number for number in range(archive.parts) if number not in known]
        if missing:
            raise PartsMissing(
                f"{len(missing)} of the archive's {archive.parts} parts are missing, first part {missing[0]}"
            )
        return {known[number]: number for number in range(archive.parts)}


class ArchiveReader:
    """Reads archives from COMMAND at the offsets of the index, one after the other. Thread-safe.

    Requests that overlap share a reader, which the last of them closes.
    """

    def __init__(
        self,
        open_reader: Callable[[int], LogReader],
        index: PartIndex,
        now: Callable[[], float] = time.monotonic,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """``open_reader`` makes a reader of COMMAND that begins at an offset; ``now`` is in seconds.

        Reading fails for now after ``patience_s`` seconds without any record.
        """
        self._open_reader = open_reader
        self._index = index
        self._now = now
        self._patience_s = patience_s
        self.progress = 0
        """Counter of the polls that came further."""
        self._closing = threading.Event()
        self._counting = threading.Lock()
        self._requests = 0
        self._reading = threading.Lock()
        self._reader: LogReader | None = None

    def read(self, application: ApplicationId, archive: Archive) -> bytes:
        """Return the whole archive; unpacking checks its sha256.

        Raises:
            PartsMissing: a part is missing.
            InvalidArchive: it is too large, or its parts have another size than announced.
            RegistryUnavailable: nothing came for ``patience_s`` seconds, or ``close`` was called.
        """
        check_archive_size(archive.size_bytes)
        with self._request():
            return self._read(application, archive)

    def parts(self, archives: Sequence[tuple[ApplicationId, Archive]]) -> Mapping[PartKey, bytes]:
        """Return the parts of archives, read in one pass; none of an archive that lacks one in the index.

        Raises:
            LogTruncated: the log begins after the first part.
            RegistryUnavailable: nothing came for ``patience_s`` seconds, or ``close`` was called.
        """
        wanted: dict[int, PartKey] = {}
        for application, archive in archives:
            with contextlib.suppress(PartsMissing):
                numbers = self._index.offsets(application, archive)
                wanted |= {at: PartKey(application, archive.sha256, n) for at, n in numbers.items()}
        with self._request():
            return {
                wanted[record.offset]: record.value
                for record in self._records(sorted(wanted))
                if record.value is not None and record.key == str(wanted[record.offset]).encode()
            }

    @contextlib.contextmanager
    def _request(self) -> Iterator[None]:
        with self._counting:
            self._requests += 1
        try:
            with self._reading:
                yield
        finally:
            with self._counting:
                self._requests -= 1
                if not self._requests:
                    self._close_reader()

    def close(self) -> None:
        """Abort reading."""
        self._closing.set()

    def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _read(self, application: ApplicationId, archive: Archive) -> bytes:
        numbers = self._index.offsets(application, archive)
        parts: dict[int, bytes] = {}
        size_bytes = 0
        with contextlib.suppress(LogTruncated):
            for record in self._records(sorted(numbers)):
                number = numbers[record.offset]
                if record.value is None or record.key != _key(application, archive, number):
                    break
                parts[number] = record.value
                size_bytes += len(record.value)
                if size_bytes > archive.size_bytes:
                    raise InvalidArchive(f"the archive's parts have more than {archive.size_bytes} bytes")
        gone = numbers.keys() - {offset for offset, number in numbers.items() if number in parts}
        if gone:
            raise PartsMissing(f"a part of the archive has been deleted at offset {min(gone)}")
        if size_bytes != archive.size_bytes:
            raise InvalidArchive(f"the archive's parts have {size_bytes} bytes, not {archive.size_bytes}")
        return b"".join(parts[number] for number in range(archive.parts))

    def _records(self, offsets: Sequence[int]) -> Iterator[LogRecord]:
        """Yield the records at these ascending offsets, as far as they still exist."""
        if not offsets:
            return
        if self._reader is None:
            self._reader = self._open_reader(offsets[0])
        else:
            self._reader.move_to(offsets[0])
        wanted = frozenset(offsets)
        heard_at = self._now()
        while self._reader.position <= offsets[-1]:
            if self._closing.is_set():
                raise RegistryUnavailable("this process ends")
            if self._now() - heard_at > self._patience_s:
                trouble = f": {self._reader.trouble}" if self._reader.trouble else ""
                raise RegistryUnavailable(f"nothing of the archive came for {self._patience_s:g} s{trouble}")
            before = self._reader.position
            try:
                records = self._reader.poll(POLL_S)
            except LogTruncated:
                self._close_reader()
                raise
            yield from (record for record in records if record.offset in wanted)
            if self._reader.position != before:
                heard_at = self._now()
                self.progress += 1


def _key(application: ApplicationId, archive: Archive, number: int) -> bytes:
    return str(PartKey(application, archive.sha256, number)).encode()
