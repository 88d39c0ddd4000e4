"""The keeper: the process that writes what jobs print to files of a limited size and number.

It is run by the :mod:`~rebalanser.runtime.guardian` as a program, by its path, with the standard library
alone: ``keeper.py SOCKET``. It gets the reading end of each job's output over the socket, and says when all
of a job's output has been written after the job ended.

It is a process of its own so that nothing holds up what prints, nor the guardian: a supervisor may be
stopped, and a disk may hang. A job that prints faster than the disk takes it waits, as it would for the disk
itself. A disk that refuses (full, read-only) costs output and never a job's time: what is lost is counted,
and the number is written once the disk takes it.

When the guardian is gone, it writes what there still is and ends.
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
from collections.abc import Sequence
from typing import Any, Final

CHUNK_BYTES: Final = 32_768
"""The longest line that is kept whole, and the most that is written at once."""
LAST_WORDS_S: Final = 5.0
"""How long to read on once the guardian is gone: its jobs are being killed then."""
_MAX_ORDER_BYTES: Final = 65_536
_FILES_OF_AN_ORDER: Final = 2


class RotatedFile(logging.handlers.RotatingFileHandler):
    """Bytes as they come, in ``path``, ``path.1`` and so on; what cannot be written is counted.

    The library counts characters; in Latin-1 they are bytes, and every byte is one.
    """

    def __init__(self, path: str, file_bytes: int, files: int) -> None:
        super().__init__(path, maxBytes=file_bytes, backupCount=files - 1, encoding="latin-1", delay=True)
        self.terminator = ""
        self._lost_bytes = 0

    def write(self, text: bytes) -> None:
        """Write some output, after the number of bytes that were lost before it, if any were."""
        if self._lost_bytes:
            lost = self._lost_bytes
            self._lost_bytes = 0
            self._write(f"[{lost} bytes of output were lost: they could not be written]\n".encode(), lost)
        self._write(text, len(text))

    def _write(self, text: bytes, cost_bytes: int) -> None:
        record = logging.makeLogRecord({"msg": text.decode("latin-1"), "cost_bytes": cost_bytes})
        self.emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """Count what was not written."""
        self._lost_bytes += record.__dict__["cost_bytes"]
        stream, self.stream = self.stream, None
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


class Source:
    """One job's output: read from a pipe, written by whole lines."""

    def __init__(self, reading: int, lock: int | None, to: RotatedFile) -> None:
        self.reading = reading
        self._lock = lock
        self.to = to
        self._rest = b""
        os.set_blocking(reading, False)

    def read(self) -> bool:
        """Pass on what there is, up to one chunk; False at the end of the output."""
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
        """Pass on all that has been printed, and let the file and the lock go."""
        with contextlib.suppress(BlockingIOError):
            while self.read():
                continue
        if self._rest:
            self.to.write(self._rest + b"\n")
        os.close(self.reading)
        if self._lock is not None:
            os.close(self._lock)


class Keeper:
    """Keeps the output of the jobs of one guardian."""

    def __init__(self, guardian: socket.socket) -> None:
        self._guardian = guardian
        self._sources: dict[int, Source] = {}
        self._until: float | None = None
        """When to end, once the guardian is gone."""

    def serve(self) -> None:
        """Do as the guardian says until it is gone and all has been written."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._guardian, selectors.EVENT_READ)
            while self._until is None or (self._sources and time.monotonic() < self._until):
                for key, _ in selector.select(None if self._until is None else LAST_WORDS_S):
                    if key.fileobj is self._guardian:
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
            text, files, _, _ = socket.recv_fds(self._guardian, _MAX_ORDER_BYTES, _FILES_OF_AN_ORDER)
        except ConnectionError:
            text, files = b"", []
        if not text:
            selector.unregister(self._guardian)
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
            self._sources[number] = Source(reading, lock, to)
            selector.register(reading, selectors.EVENT_READ, number)
        elif number in self._sources:
            with contextlib.suppress(KeyError):
                selector.unregister(self._sources[number].reading)
            self._close(number)
            with contextlib.suppress(OSError):
                self._guardian.send(json.dumps({"number": number}).encode())

    def _close(self, number: int) -> None:
        source = self._sources.pop(number)
        source.close()
        source.to.close()


def main(arguments: Sequence[str]) -> None:
    """Serve the guardian at the other end of the socket whose number is the first argument."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(arguments[0])) as guardian:
        os.set_inheritable(guardian.fileno(), False)
        Keeper(guardian).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
