"""Files that grow by whole lines, are rotated by size, and never fill the disk.

Each file is named ``GROUP.NODE.START.N.jsonl``, every name percent-encoded so that a dot only separates. A
writer only makes new files, holds a lock on the one that it writes, and never touches one that another
writer, alive or dead, has begun: so a line that a crash tore stays the last of its file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import quote

from rebalanser.folders import make_folder

SUFFIX: Final = ".jsonl"
_CHUNK_BYTES: Final = 1 << 16
_MAX_ENCODED: Final = 90


def encoded(name: str) -> str:
    """``name`` as a part of a file name: no dot, no slash, and short enough for every file system.

    Nor does it begin with an underscore: to Spark such a file is hidden.
    """
    quoted = quote(name, safe="", errors="backslashreplace").replace(".", "%2E").replace("~", "%7E")
    if quoted.startswith("_"):
        quoted = f"%5F{quoted[1:]}"
    if len(quoted) <= _MAX_ENCODED:
        return quoted
    digest = hashlib.sha256(quoted.encode()).hexdigest()[:16]
    return f"{quoted[: _MAX_ENCODED - 17]}~{digest}"


class RotatingFiles:
    """The files of one writer. Not for use by several threads at once.

    ``wall`` is the start of the writer, in seconds since 1970. A new file is begun before one would exceed
    ``max_file_bytes``, and then only the newest ``max_files`` files of this group and node are kept,
    including those of earlier processes; a file that a living process writes is never deleted. ``file_mode``
    is the mode of new files, whatever the umask; new folders follow it.
    """

    def __init__(
        self,
        folder: Path,
        group: str,
        node: str,
        *,
        wall: float,
        max_file_bytes: int,
        max_files: int,
        file_mode: int = 0o600,
    ) -> None:
        self._folder = folder
        self._file_mode = file_mode
        self._family = f"{encoded(group)}.{encoded(node)}."
        self._start = datetime.fromtimestamp(wall, UTC).strftime("%Y%m%dT%H%M%S%fZ")
        self._numbers = itertools.count()
        self._max_file_bytes = max_file_bytes
        self._max_files = max_files
        self._descriptor: int | None = None
        self._size = 0
        self.unsynced = False
        """True if something was written that ``sync`` has not flushed to the disk."""

    def append(self, lines: deque[bytes]) -> None:
        """Write the lines, taking each out of ``lines`` once it is in a file.

        Raises:
            OSError: they could not be written. Those still in ``lines`` are in no file, not even partly.
        """
        while lines:
            chunk = self._chunk(lines)
            self._write(self._open_for(len(chunk[0])), b"".join(chunk))
            for _ in chunk:
                lines.popleft()

    def sync(self) -> None:
        """Flush written lines to the disk, so that they outlive a power failure.

        Raises:
            OSError: it failed; the file is left, and a new one is begun with the next line.
        """
        if self._descriptor is None or not self.unsynced:
            return
        try:
            os.fsync(self._descriptor)
        except OSError:
            self._leave()
            raise
        self.unsynced = False

    def close(self) -> None:
        """Close the present file. A later ``append`` begins a new one."""
        self._leave()

    def _chunk(self, lines: deque[bytes]) -> list[bytes]:
        """The first lines that fit in the present file and in one write; at least one."""
        chunk = [lines[0]]
        room = min(_CHUNK_BYTES, self._max_file_bytes - self._size) - len(lines[0])
        for line in itertools.islice(lines, 1, None):
            room -= len(line)
            if room < 0:
                break
            chunk.append(line)
        return chunk

    def _open_for(self, size: int) -> int:
        """The file for the next ``size`` bytes."""
        if self._size and self._size + size > self._max_file_bytes:
            self._rotate()
        if self._descriptor is None:
            make_folder(self._folder, self._file_mode)
            self._prune()
            self._descriptor = self._create()
            self._size = 0
        return self._descriptor

    def _rotate(self) -> None:
        with contextlib.suppress(OSError):
            self.sync()
        self._leave()

    def _create(self) -> int:
        for number in self._numbers:
            path = self._folder / f"{self._family}{self._start}.{number:06}{SUFFIX}"
            try:
                descriptor = os.open(
                    path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, self._file_mode
                )
            except FileExistsError:
                continue
            with contextlib.suppress(OSError):
                os.fchmod(descriptor, self._file_mode)  # the umask may have taken something
            _lock(descriptor)
            return descriptor
        raise AssertionError("unreachable: the numbers never end")

    def _write(self, descriptor: int, data: bytes) -> None:
        try:
            _write_all(descriptor, data)
            if os.fstat(descriptor).st_nlink == 0:
                self._leave()
                raise FileNotFoundError(errno.ENOENT, "the history file was deleted")
        except OSError:
            self._take_back(descriptor)
            raise
        self._size += len(data)
        self.unsynced = True

    def _take_back(self, descriptor: int) -> None:
        """Cut off the rest of a failed write; if that fails too, never write to that file again."""
        if descriptor != self._descriptor:
            return
        try:
            os.ftruncate(descriptor, self._size)
        except OSError:
            self._leave()

    def _leave(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            self._size = 0
            self.unsynced = False
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _prune(self) -> None:
        """Delete the oldest files so that one more makes ``max_files``."""
        files = sorted(
            path
            for path in self._folder.iterdir()
            if path.name.startswith(self._family) and path.name.endswith(SUFFIX)
        )
        for path in files[: max(0, len(files) + 1 - self._max_files)]:
            _delete_unless_in_use(path)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _lock(descriptor: int) -> None:
    """Mark the file as in use. On a file system without locks it is not, and may be deleted when old."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _delete_unless_in_use(path: Path) -> None:
    """Delete a file that no living process writes."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except OSError:
        return
