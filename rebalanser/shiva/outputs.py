"""Reading what an application has printed on a worker, from the files that the worker keeps (SH-17)."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from rebalanser.core.shiva.types import ApplicationId
from rebalanser.errors import FixConfiguration
from rebalanser.runtime.supervisor_shim import is_file_at
from rebalanser.shiva.data_folder import output_file

POLL_S: Final = 0.2
LONGEST_LINE_BYTES: Final = 65_536
"""A longer line is shown in parts."""


def tail(
    data_folder: Path,
    application: ApplicationId,
    lines: int = 100,
    follow: bool = False,
    wait: Callable[[float], object] = time.sleep,
) -> Generator[str, None, None]:
    """Yield an application's last lines on this host's worker, oldest first, without line ends.

    With ``follow`` it continues with new lines, also across files, until it is closed. ``wait`` is called
    with seconds whenever there is no new line, and may raise to end it. The worker need not run.

    Raises:
        FixConfiguration: the worker of that folder keeps no output of the application.
    """
    newest = output_file(data_folder, application)
    if not newest.parent.is_dir():
        raise FixConfiguration(
            f"no output of {application} is kept in {data_folder}: look on the worker that runs it"
        )
    return _tail(newest, lines, follow, wait)


def newest_lines(
    data_folder: Path, application: ApplicationId, lines: int, max_bytes: int
) -> tuple[list[str], int]:
    """Return the last lines as ``tail`` reads them, ``max_bytes`` at most, and the number that did not fit.

    Raises:
        FixConfiguration: the worker of that folder keeps no output of the application.
    """
    found = list(tail(data_folder, application, lines))
    left, taken = max_bytes, 0
    for line in reversed(found):
        left -= len(json.dumps(line))
        if left < 0:
            break
        taken += 1
    return found[len(found) - taken :], len(found) - taken


def _tail(
    newest: Path, lines: int, follow: bool, wait: Callable[[float], object]
) -> Generator[str, None, None]:
    reading = _opened(newest)
    try:
        last = [] if reading is None else _last_lines(reading, lines)
        yield from map(_text, [*_older_lines(newest, lines - len(last)), *last])
        while follow:
            if reading is None:
                reading = _opened(newest)
            moved_on = False
            if reading is not None:
                yield from map(_text, _lines(reading))
                reading, moved_on = _next(newest, reading)
            if not moved_on:
                wait(POLL_S)
    finally:
        if reading is not None:
            reading.close()


def _last_lines(file: BinaryIO, count: int) -> list[bytes]:
    return list(deque(_lines(file), maxlen=max(0, count)))


def _older_lines(newest: Path, count: int) -> list[bytes]:
    """Return the last lines before those of the newest file."""
    found: list[bytes] = []
    for path in _kept(newest)[1:]:
        file = _opened(path) if len(found) < count else None
        if file is None:
            break
        with file:
            found = [*_last_lines(file, count - len(found)), *found]
    return found


def _kept(newest: Path) -> list[Path]:
    """Return the files of output, the newest first."""
    older = (newest.with_name(f"{newest.name}.{number}") for number in itertools.count(1))
    return [newest, *itertools.takewhile(Path.exists, older)]


def _next(newest: Path, reading: BinaryIO) -> tuple[BinaryIO, bool]:
    """Return the file to read next, and True if it can be read at once.

    That is the same file while it is the newest or has lines left. One that was removed meanwhile is followed
    by the oldest that is left.
    """
    here = os.fstat(reading.fileno())
    paths = _kept(newest)
    place = next((number for number, path in enumerate(paths) if is_file_at(path, here)), len(paths))
    if place == 0:
        return reading, False
    if _has_line(reading):
        return reading, True
    following = _opened(paths[place - 1])
    if following is None:
        return reading, False
    reading.close()
    return following, True


def _has_line(file: BinaryIO) -> bool:
    place = file.tell()
    found = next(_lines(file), None) is not None
    file.seek(place)
    return found


def _opened(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Return the lines up to the present end of the file, but for one that is still being written."""
    while line := file.readline(LONGEST_LINE_BYTES):
        if not line.endswith(b"\n") and len(line) < LONGEST_LINE_BYTES:
            file.seek(-len(line), os.SEEK_CUR)
            return
        yield line


def _text(line: bytes) -> str:
    return line.decode(errors="replace").removesuffix("\n")
