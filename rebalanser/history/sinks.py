"""Sinks of the history. No sink ever blocks or fails the node that writes to it."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    wait_exponential,
)

from rebalanser.errors import InvalidSettings, InvalidUrl
from rebalanser.folders import PRIVATE, file_mode_of
from rebalanser.history.buffer import TOO_SLOW, RecordBuffer
from rebalanser.history.files import RotatingFiles
from rebalanser.history.records import Record
from rebalanser.registry.urls import load_opener, parse_url

_log = logging.getLogger("rebalanser.history")

_RETRY_INITIAL_S: Final = 0.05
_RETRY_MAX_S: Final = 5.0


class HistorySink(Protocol):
    """Takes the records of one node, in the order of their sequence. May be called from any thread."""

    def write(self, record: Record) -> None:
        """Add a record. Never waits for anything outside of this process, and never raises."""

    def close(self, timeout_s: float) -> None:
        """Flush all records added so far, waiting at most ``timeout_s`` seconds.

        Later records are dropped. Closing twice does nothing. Never raises.
        """


class NullSink:
    """Discards all records."""

    def write(self, record: Record) -> None:
        """Discard the record."""

    def close(self, timeout_s: float) -> None:
        """Do nothing."""


class MemorySink:
    """Keeps all records in ``records``; for tests."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.closed = False

    def write(self, record: Record) -> None:
        """Keep the record."""
        if not self.closed:
            self.records.append(record)

    def close(self, timeout_s: float) -> None:
        """Keep no more records; ``timeout_s`` is not used."""
        del timeout_s
        self.closed = True


class JsonlSink:
    """Appends records as lines of JSON to files in ``folder``, from a daemon thread of its own.

    A record waits at most ``flush_interval_s`` seconds to be written together with others; from then on it
    outlives a ``kill -9``, and after ``fsync_interval_s`` seconds more (None: at a time that the system
    chooses) a power failure. ``node`` names the files: the same name in a later process lets the limit of
    ``max_files`` files of ``max_file_bytes`` bytes hold across restarts (``rebalanser.history.files``).

    While the disk is full, gone, read-only or slow, up to ``queue_size`` records wait, and as many again may
    be in a write; the writer retries after a growing delay. Further records are dropped and counted, and a
    ``gap`` record takes their place once writing works again.
    """

    def __init__(
        self,
        folder: Path | str,
        group: str,
        node: str,
        *,
        max_file_bytes: int = 64 << 20,
        max_files: int = 8,
        queue_size: int = 10_000,
        flush_interval_s: float = 0.02,
        fsync_interval_s: float | None = 1.0,
        file_mode: str = PRIVATE,
    ) -> None:
        """Begin to write; the first file is made with the first record.

        Raises:
            InvalidSettings: a limit is not positive, or ``file_mode`` is no mode of a file, such as 0640.
        """
        for name, limit in {
            "max_file_bytes": max_file_bytes,
            "max_files": max_files,
            "queue_size": queue_size,
        }.items():
            if limit < 1:
                raise InvalidSettings(f"{name} of the history must be 1 or more, not {limit}")
        self._files = RotatingFiles(
            Path(folder),
            group,
            node,
            wall=time.time(),
            max_file_bytes=max_file_bytes,
            max_files=max_files,
            file_mode=file_mode_of(file_mode),
        )
        self._flush_interval_s = flush_interval_s
        self._fsync_interval_s = fsync_interval_s
        self._synced_at = time.monotonic()
        self._waiting = RecordBuffer(queue_size)
        self._lines: deque[bytes] = deque()
        self._filled = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rebalanser-history-{group}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Number of records dropped so far; a ``gap`` record that could not be written counts as one."""
        return self._waiting.dropped

    def write(self, record: Record) -> None:
        """Add a record, or drop and count it. Never waits for the disk, and never raises."""
        self._waiting.put(record)
        if not self._filled.is_set():
            self._filled.set()

    def close(self, timeout_s: float) -> None:
        """Write and sync all records added so far, waiting at most ``timeout_s`` seconds."""
        self._closing.set()
        self._filled.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning(
                "the history is not completely written after %.3g s",
                timeout_s,
                extra={"action": "history_incomplete"},
            )

    def _run(self) -> None:
        last = False
        while not last:
            if self._filled.wait(self._next_sync_s()):
                self._closing.wait(self._flush_interval_s)
                self._filled.clear()
            last = self._closing.is_set()
            self._lines.extend(record.to_line() for record in self._waiting.take(last=last))
            self._append()
            self._sync(now=last)
        self._files.close()

    def _append(self) -> None:
        """Write the taken records, retrying until it works or an attempt fails that began after ``close``."""
        is_last = False

        def attempt() -> None:
            nonlocal is_last
            is_last = self._closing.is_set()
            self._files.append(self._lines)

        retrying = Retrying(
            retry=retry_if_exception_type(OSError),
            wait=wait_exponential(multiplier=_RETRY_INITIAL_S, max=_RETRY_MAX_S),
            stop=lambda _state: is_last,
            sleep=sleep_using_event(self._closing),
            before_sleep=self._failing,
            reraise=True,
        )
        try:
            retrying(attempt)
        except OSError as error:
            self._waiting.drop_for_good(len(self._lines))
            _log.error(
                "%d records of the history are lost: %s",
                len(self._lines),
                _reason(error),
                extra={"action": "history_lost"},
            )
            self._lines.clear()
            return
        if self._waiting.reason != TOO_SLOW:
            self._waiting.reason = TOO_SLOW
            _log.info("the history is written again", extra={"action": "history_recovered"})

    def _failing(self, attempt: RetryCallState) -> None:
        error = attempt.outcome.exception() if attempt.outcome else None
        reason = _reason(error) if isinstance(error, OSError) else TOO_SLOW
        if self._waiting.reason != reason:
            self._waiting.reason = reason
            _log.warning(
                "the history can't be written, trying again: %s", reason, extra={"action": "history_failing"}
            )

    def _next_sync_s(self) -> float | None:
        if self._fsync_interval_s is None or not self._files.unsynced:
            return None
        return max(0.0, self._synced_at + self._fsync_interval_s - time.monotonic())

    def _sync(self, *, now: bool) -> None:
        if not now and self._next_sync_s() != 0.0:
            return
        try:
            self._files.sync()
        except OSError as error:
            _log.warning(
                "the history may not outlive a power failure: %s",
                _reason(error),
                extra={"action": "history_unsynced"},
            )
        self._synced_at = time.monotonic()


def _reason(error: OSError) -> str:
    """``ENOSPC: No space left on device``; no path, since the log line or the file's place has it."""
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    return f"{name}: {error.strerror or error}"


ENTRY_POINT_GROUP: Final = "rebalanser.history"
"""Openers of topics by URL scheme: ``open_sink(url, group, label)`` gives a ``HistorySink``."""
MAX_FILES: Final = 8
"""Number of files that share the size limit of a node's history."""


class TeeSink:
    """Passes every record to several sinks. One that drops records or is slow to close delays no other."""

    def __init__(self, sinks: Sequence[HistorySink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, record: Record) -> None:
        """Pass the record to all sinks."""
        for sink in self._sinks:
            sink.write(record)

    def close(self, timeout_s: float) -> None:
        """Close all sinks, one after another, each within its share of the rest of ``timeout_s`` seconds."""
        ends = time.monotonic() + timeout_s
        for left in range(len(self._sinks), 0, -1):
            self._sinks[-left].close(max(0.0, ends - time.monotonic()) / left)


def open_sinks(
    history_dir: Path | None,
    history_topic: str | None,
    group: str,
    label: str,
    max_bytes: int,
    file_mode: str = PRIVATE,
) -> HistorySink:
    """Open the sinks of records: files in ``history_dir``, at most ``max_bytes``, and the topic at the URL.

    A topic is ``kafka://HOST:PORT[,HOST:PORT]/TOPIC``. Both may be named, or none: then nothing is kept.
    ``group`` and ``label`` name the files, which are made with the mode ``file_mode``. Nothing is waited for;
    an unreachable topic is tried again.

    Raises:
        InvalidUrl: ``history_topic`` is no URL.
        UnknownScheme: no installed package has topics of that scheme.
        MissingExtra: the package that the topic needs is not installed; the message names the extra.
        InvalidSettings: ``file_mode`` is no mode of a file, such as 0640.
    """
    sinks: list[HistorySink] = []
    if history_topic is not None:
        sinks.append(_open_topic(history_topic, group, label))
    if history_dir is not None:
        sinks.append(
            JsonlSink(
                history_dir,
                group,
                label,
                max_file_bytes=max_bytes // MAX_FILES,
                max_files=MAX_FILES,
                file_mode=file_mode,
            )
        )
    return sinks[0] if len(sinks) == 1 else TeeSink(sinks) if sinks else NullSink()


def _open_topic(url: str, group: str, label: str) -> HistorySink:
    if "://" not in url:
        raise InvalidUrl(f"history_topic is {url!r}: write kafka://HOST:PORT/TOPIC")
    sink: HistorySink = load_opener(parse_url(url).scheme, ENTRY_POINT_GROUP)(url, group, label)
    return sink
