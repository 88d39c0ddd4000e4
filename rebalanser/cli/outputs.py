"""Output of the subprocesses of ``rebalanser run``, and lines about them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import BinaryIO, Final, TextIO

LONGEST_LINE_BYTES: Final = 65_536
"""Maximum length of a line; a longer one is shown in parts."""
LAST_LINES_S: Final = 0.1
"""Maximum seconds to wait for the last lines of a command that has exited."""


class Style(Enum):
    """Form of the subprocesses' output."""

    AS_IT_IS = auto()
    """Subprocesses write directly to this process's standard output and error."""
    PREFIXED = auto()
    """Each line begins with ``[resource]``."""
    JSON = auto()
    """Each line is an object, as is each event, on standard output."""


class Outputs:
    """Passes on whole lines, so that those of several subprocesses do not mix. Thread-safe."""

    def __init__(self, style: Style) -> None:
        self._style = style
        self._lock = threading.Lock()
        self._readers: defaultdict[str, list[threading.Thread]] = defaultdict(list)
        self._begun: dict[str, threading.Event] = {}

    @contextlib.contextmanager
    def of(self, resource: str) -> Iterator[Sequence[int]]:
        """Open the files for a subprocess's output; none if it inherits those of this process."""
        if self._style is Style.AS_IT_IS:
            yield ()
            return
        self._begun[resource] = threading.Event()
        with contextlib.ExitStack() as ends:
            yield [ends.enter_context(self._pipe(resource, stream)) for stream in ("stdout", "stderr")]

    @contextlib.contextmanager
    def _pipe(self, resource: str, stream: str) -> Iterator[int]:
        reading, writing = os.pipe()
        try:
            lines = os.fdopen(reading, "rb")
            name = f"rebalanser-{stream}-{resource}"
            reader = threading.Thread(
                target=self._read,
                args=(resource, stream, lines, self._begun[resource]),
                name=name,
                daemon=True,
            )
            reader.start()
            self._readers[resource].append(reader)
            yield writing
        finally:
            os.close(writing)

    def begin(self, resource: str) -> None:
        """Pass on the output of a subprocess, and report that it has started."""
        if resource in self._begun:
            self._begun[resource].set()

    def finish(self, resource: str) -> None:
        """Wait a moment for the last lines of a subprocess that has exited."""
        self.begin(resource)
        for reader in self._readers.pop(resource, []):
            reader.join(LAST_LINES_S)

    def _read(self, resource: str, stream: str, lines: BinaryIO, begun: threading.Event) -> None:
        begun.wait()
        with lines:
            while line := lines.readline(LONGEST_LINE_BYTES):
                text = line.decode(errors="replace").removesuffix("\n")
                if self._style is Style.JSON:
                    self.tell("output", resource=resource, stream=stream, line=text)
                else:
                    self._write(sys.stdout if stream == "stdout" else sys.stderr, f"[{resource}] {text}")

    def tell(self, event: str, **what: str | int) -> None:
        """Report an event: as an object on standard output, or as a line on standard error."""
        if self._style is Style.JSON:
            self._write(sys.stdout, json.dumps({"event": event, **what}))
            return
        details = ", ".join(f"{name} {value}" for name, value in what.items())
        self._write(sys.stderr, f"rebalanser: {event.replace('_', ' ')} {details}")

    def _write(self, to: TextIO, line: str) -> None:
        """Write a whole line. If its reader is gone, the subprocesses go on."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            to.write(f"{line}\n")
            to.flush()
