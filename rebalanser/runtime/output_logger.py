"""The logger: a process that writes the output of jobs to files of limited size and number.

The ``runtime.supervisor_shim`` runs it as a program, by its path, with the standard library alone:
``output_logger.py SOCKET``. The logger gets the reading end of each job's output over the socket. After a job
has ended it reports when all of the output has been written.

It is a separate process so that neither a stopped supervisor nor a disk that hangs blocks the jobs or the
shim. A job that prints faster than the disk writes waits, as it would for the disk itself. On a disk that
refuses writes (full, read-only) output is lost, but no job waits: lost bytes are counted, and their number is
written once the disk takes it.

When the shim is gone, the logger kills what is left of its jobs: their process groups, and whatever else
holds their locks. Then it writes the remaining output and ends. So a descendant that the kernel does not kill
with the shim does not live on, even if the supervisor was killed too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

CHUNK_BYTES: Final = 32_768
"""Maximum length of a line that is kept whole, and of one write."""
LAST_WORDS_S: Final = 5.0
"""Seconds to keep reading once the shim is gone, while its jobs are killed."""
_MAX_ORDER_BYTES: Final = 65_536
_FILES_OF_AN_ORDER: Final = 2
_KILL_ROUNDS: Final = 20
"""Maximum number of searches for holders of a lock; each kills those that it finds."""
_OURS: Final = tuple(
    os.fsencode(Path(__file__).with_name(name)) for name in ("supervisor_shim.py", "output_logger.py")
)
"""Programs that hold or try the locks of jobs, and are no jobs."""


class RotatedFile(logging.handlers.RotatingFileHandler):
    """Writes raw bytes to ``path`` and rotates to ``path.1`` and so on; counts bytes it can't write.

    The library counts characters. In Latin-1 every byte is one character.
    """

    def __init__(self, path: str, file_bytes: int, files: int) -> None:
        super().__init__(path, maxBytes=file_bytes, backupCount=files - 1, encoding="latin-1", delay=True)
        self.terminator = ""
        self._lost_bytes = 0

    def write(self, text: bytes) -> None:
        """Write output, preceded by the number of bytes that were lost before it, if any."""
        if self._lost_bytes:
            lost = self._lost_bytes
            self._lost_bytes = 0
            self._write(f"[{lost} bytes of output were lost: they could not be written]\n".encode(), lost)
        self._write(text, len(text))

    def _write(self, text: bytes, cost_bytes: int) -> None:
        record = logging.makeLogRecord({"msg": text.decode("latin-1"), "cost_bytes": cost_bytes})
        self.emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """Count the bytes of a write that failed."""
        self._lost_bytes += record.__dict__["cost_bytes"]
        stream, self.stream = self.stream, None
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


class Source:
    """One job's output: read from a pipe, written in whole lines."""

    def __init__(self, reading: int, lock: int | None, group: int, to: RotatedFile) -> None:
        self.reading = reading
        self.lock = lock
        self.group = group
        self.to = to
        self._rest = b""
        os.set_blocking(reading, False)

    def read(self) -> bool:
        """Write the available output, at most one chunk. Return False at the end of the output."""
        text = os.read(self.reading, CHUNK_BYTES)
        self._rest += text
        whole = self._rest.rfind(b"\n") + 1
        if len(self._rest) - whole >= CHUNK_BYTES:
            whole = len(self._rest)
        if whole:
            self.to.write(self._rest[:whole])
            self._rest = self._rest[whole:]
        return bool(text)

    def close(self) -> None:
        """Write the remaining output, then close the pipe and release the lock."""
        with contextlib.suppress(BlockingIOError):
            while self.read():
                continue
        if self._rest:
            self.to.write(self._rest + b"\n")
        os.close(self.reading)
        if self.lock is not None:
            os.close(self.lock)


class OutputLogger:
    """Writes the output of one shim's jobs."""

    def __init__(self, shim: socket.socket) -> None:
        self._shim = shim
        self._sources: dict[int, Source] = {}
        self._until: float | None = None
        """Time to end (monotonic seconds) once the shim is gone; None while it lives."""

    def serve(self) -> None:
        """Carry out orders until the shim is gone and all output has been written."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._shim, selectors.EVENT_READ)
            while self._until is None or (self._sources and time.monotonic() < self._until):
                for key, _ in selector.select(None if self._until is None else LAST_WORDS_S):
                    if key.fileobj is self._shim:
                        self._listen(selector)
                    elif key.data in self._sources:
                        self._read(key.data, selector)
        for number in list(self._sources):
            self._close(number)

    def _read(self, number: int, selector: selectors.BaseSelector) -> None:
        source = self._sources[number]
        try:
            more = source.read()
        except BlockingIOError:
            return
        if not more:
            selector.unregister(source.reading)
            if self._until is not None:
                self._close(number)

    def _listen(self, selector: selectors.BaseSelector) -> None:
        try:
            text, files, _, _ = socket.recv_fds(self._shim, _MAX_ORDER_BYTES, _FILES_OF_AN_ORDER)
        except ConnectionError:
            text, files = b"", []
        if not text:
            selector.unregister(self._shim)
            self._kill_jobs()
            self._until = time.monotonic() + LAST_WORDS_S
            for number, source in list(self._sources.items()):
                if source.reading not in selector.get_map():
                    self._close(number)
            return
        self._obey(json.loads(text), files, selector)

    def _obey(self, order: dict[str, Any], files: Sequence[int], selector: selectors.BaseSelector) -> None:
        number = order["number"]
        if order["do"] == "keep":
            for file in files:
                os.set_inheritable(file, False)
            reading, lock = files[0], files[1] if len(files) == _FILES_OF_AN_ORDER else None
            to = RotatedFile(order["path"], order["file_bytes"], order["files"])
            self._sources[number] = Source(reading, lock, order["group"], to)
            selector.register(reading, selectors.EVENT_READ, number)
        elif number in self._sources:
            with contextlib.suppress(KeyError):
                selector.unregister(self._sources[number].reading)
            self._close(number)
            with contextlib.suppress(OSError):
                self._shim.send(json.dumps({"number": number}).encode())

    def _kill_jobs(self) -> None:
        """Kill the jobs that the shim had not reported as ended; their commands are killed already."""
        locks = set()
        for source in self._sources.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(source.group, signal.SIGKILL)
            if source.lock is not None:
                status = os.fstat(source.lock)
                locks.add((status.st_dev, status.st_ino))
        for _ in range(_KILL_ROUNDS if locks else 0):
            holders = list(_holders(locks))
            if not holders:
                return
            for pid in holders:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _close(self, number: int) -> None:
        source = self._sources.pop(number)
        source.close()
        source.to.close()


def _holders(files: Collection[tuple[int, int]]) -> Iterator[int]:
    """The processes that have one of these files open, as far as this user may know."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            opened = {(status.st_dev, status.st_ino) for status in map(_status, (process / "fd").iterdir())}
            if opened.isdisjoint(files):
                continue
            program = (process / "cmdline").read_bytes()
            if not any(ours in program for ours in _OURS):
                yield int(process.name)


def _status(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except FileNotFoundError:
        return os.stat_result([0] * 10)


def main(arguments: Sequence[str]) -> None:
    """Serve the shim at the other end of the socket; the first argument is its file descriptor."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(arguments[0])) as shim:
        os.set_inheritable(shim.fileno(), False)
        OutputLogger(shim).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
