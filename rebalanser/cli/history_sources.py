"""Sources of the history commands: folders and files, which may grow meanwhile, and topics.

Memory is bounded by the number of processes that wrote, not by their records: 16 KiB of each process's files
are in memory at a time, and 16 MiB of each partition of a topic.
"""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, Final, Protocol, TypeAlias

from rebalanser.cli.output import counted
from rebalanser.errors import UnusableHistory
from rebalanser.history import Record, UnreadableLine, UnreadableReason, read_line
from rebalanser.history.reader import MAX_LINE_BYTES
from rebalanser.registry.urls import load_opener

ENTRY_POINT_GROUP: Final = "rebalanser.history_sources"
"""Entry points by URL scheme for topics: ``open_source(url, timeout_s)`` returns a ``HistorySource``."""
CONNECT_TIMEOUT_S: Final = 5.0
SUFFIX: Final = ".jsonl"
_CHUNK_BYTES: Final = 16_384
_KIB: Final = 1024

Item: TypeAlias = Record | UnreadableLine
_Timed: TypeAlias = tuple[float, Item]


class HistorySource(Protocol):
    """A source of history records. Used by one thread."""

    @property
    def name(self) -> str:
        """The path or URL, for messages."""

    @property
    def found(self) -> str:
        """A description of the source, for the message that it has no record."""

    @property
    def trouble(self) -> str | None:
        """Reason why no new records may arrive now; None if the source works."""

    def read(self, *, growing: bool) -> Iterator[Item]:
        """Yield all that is new since the last read, merged by wall time.

        With ``growing`` an incomplete last line is left for the next read.
        """

    def progress(self) -> tuple[int, int]:
        """Return how much was read, and how much there is, in units of the source."""

    def close(self) -> None:
        """Close the source."""


def open_source(place: str, *, may_be_empty: bool = False) -> HistorySource:
    """Open a source by the name of a folder, a file or a URL such as ``kafka://HOST:PORT/TOPIC``.

    Raises:
        UnusableHistory: it does not exist, or has no history unless it ``may_be_empty``.
        UnknownScheme: no installed package has topics of that scheme.
        MissingExtra: the package that the topic needs is not installed; the message names the extra.
        RegistryUnavailable: no broker answered within five seconds.
    """
    scheme, separator, _ = place.partition("://")
    if separator:
        source: HistorySource = load_opener(scheme, ENTRY_POINT_GROUP)(place, CONNECT_TIMEOUT_S)
        return source
    files = FileSource(Path(place))
    files.look()
    if not may_be_empty and not files.has_files:
        raise UnusableHistory(f"{place} has no history: {files.found}")
    return files


def read_all(sources: Sequence[HistorySource], *, growing: bool = False) -> Iterator[Item]:
    """Yield the records of all sources: source by source, each merged by wall time."""
    return chain.from_iterable(source.read(growing=growing) for source in sources)


class FileSource:
    """A history file, or all ``*.jsonl`` files directly in a folder, also later ones."""

    def __init__(self, path: Path) -> None:
        """Read nothing yet.

        Raises:
            UnusableHistory: there is no such file or folder.
        """
        self._path = path
        self._files: dict[str, HistoryFile] = {}
        if not path.exists():
            raise UnusableHistory(f"{path} does not exist; name a folder, a file or kafka://HOST:PORT/TOPIC")
        self._is_folder = path.is_dir()

    @property
    def name(self) -> str:
        """The path."""
        return str(self._path)

    @property
    def has_files(self) -> bool:
        """True if there is a file that may have history."""
        return bool(self._files)

    @property
    def found(self) -> str:
        """A description of the other files."""
        if self._files:
            empty = sum(not file.size for file in self._files.values())
            return f"{counted(len(self._files), 'file')}, {empty} of them empty"
        names = sorted(entry.name for entry in self._path.iterdir())
        if any(name.endswith(".parquet") for name in names):
            return "its files are Parquet, which `rebalanser audit` reads"
        if not names:
            return "the folder is empty"
        kinds = Counter(Path(name).suffix or "no suffix" for name in names)
        told = ", ".join(f"{count} of {suffix}" for suffix, count in kinds.most_common(3))
        return f"no *{SUFFIX} file is directly in this folder, only {counted(len(names), 'other')} ({told})"

    @property
    def trouble(self) -> str | None:
        """None: a file exists or it doesn't."""
        return None

    def look(self) -> None:
        """Find the present files.

        Raises:
            UnusableHistory: the folder can't be read.
        """
        paths = [self._path]
        if self._is_folder:
            try:
                paths = sorted(path for path in self._path.iterdir() if path.name.endswith(SUFFIX))
            except OSError as error:
                raise _unreadable(self._path, error) from None
        self._files = {
            path.name: self._files[path.name] if path.name in self._files else HistoryFile(path)
            for path in paths
        }

    def read(self, *, growing: bool) -> Iterator[Item]:
        """Yield all new lines, merged by wall time over the processes.

        Raises:
            UnusableHistory: a file exists and can't be read.
        """
        self.look()
        families: dict[str, list[HistoryFile]] = {}
        for name, file in self._files.items():
            families.setdefault(_writer_of(name), []).append(file)
        streams = [chain.from_iterable(file.read(growing=growing) for file in of) for of in families.values()]
        return (item for _, item in heapq.merge(*streams, key=itemgetter(0)))

    def progress(self) -> tuple[int, int]:
        """Return the KiB read and the KiB in all."""
        files = self._files.values()
        return sum(file.offset for file in files) // _KIB, sum(file.size for file in files) // _KIB

    def close(self) -> None:
        """Do nothing: no file is open between two reads."""


class HistoryFile:
    """One file, read from where the last read ended. It is open only during a read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.offset = 0
        """Number of bytes read."""
        self._line = 0
        self._identity: tuple[int, int] | None = None
        self._latest = 0.0

    @property
    def size(self) -> int:
        """Present size in bytes; 0 if the file is gone."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def read(self, *, growing: bool) -> Iterator[_Timed]:
        """Yield new lines with their times; a line that is not a record has the time of the line before.

        Raises:
            UnusableHistory: the file exists and can't be read.
        """
        while chunk := self._chunk(growing):
            for item in chunk:
                self._latest = item.wall_time if isinstance(item, Record) else self._latest
                yield self._latest, item

    def _chunk(self, growing: bool) -> list[Item]:
        try:
            with self._path.open("rb") as file:
                self._find_place(file)
                return list(self._lines(file, growing))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreadable(self._path, error) from None

    def _find_place(self, file: BinaryIO) -> None:
        """Continue where the last read ended, or at the start of a file that was replaced or truncated."""
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        if identity != self._identity or status.st_size < self.offset:
            self._identity, self.offset, self._line = identity, 0, 0
        file.seek(self.offset)

    def _lines(self, file: BinaryIO, growing: bool) -> Iterator[Item]:
        until = self.offset + _CHUNK_BYTES
        while self.offset < until and (line := file.readline(MAX_LINE_BYTES)):
            too_long = len(line) == MAX_LINE_BYTES and not line.endswith(b"\n")
            if growing and not too_long and not line.endswith(b"\n"):
                return
            self.offset += len(line) + (_skip_line(file) if too_long else 0)
            self._line += 1
            if too_long:
                detail = f"over {MAX_LINE_BYTES} bytes"
                yield UnreadableLine(self._path, self._line, UnreadableReason.TOO_LONG, detail)
            else:
                yield read_line(line, self._path, self._line)


def _skip_line(file: BinaryIO) -> int:
    """Skip the rest of a line and return its length."""
    skipped = 0
    while rest := file.readline(MAX_LINE_BYTES):
        skipped += len(rest)
        if rest.endswith(b"\n"):
            break
    return skipped


def _writer_of(name: str) -> str:
    """Return the common name of one process's files: ``GROUP.NODE.START`` of ``GROUP.NODE.START.N.jsonl``."""
    parts = name.removesuffix(SUFFIX).split(".")
    return ".".join(parts[:3]) if len(parts) == 4 else name


def _unreadable(path: Path, error: OSError) -> UnusableHistory:
    return UnusableHistory(f"{path} can't be read: {error.strerror or error}")
