"""Files of a state folder: ids stay unique across crashes (SK-1).

A *state folder*, on a local disk, holds:

- ``salt``: 32 random hexadecimal digits, made once;
- ``slot-N``: one file for each process that makes ids at the same time. The process holds a lock (``flock``)
  on it as long as it lives. N is the 16-bit number in its ids. The file contains a *mark*: every id of this
  slot has fewer milliseconds. The mark is written and fsynced before the first id that needs it, so after
  ``kill -9`` the next process of the slot begins above all ids of the one before.

The host's 48 bits are the first 6 bytes of the BLAKE2b hash of the machine id (``/etc/machine-id``, else the
MAC address of Python's ``uuid.getnode``) and the salt. So two folders never make the same ids, on one host
or in two containers of one image. A copy of a running host, with disk and machine id, must not run beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import threading
import time
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from rebalanser import forks
from rebalanser.core.tasks.ids import MAX_PROCESS, Generator
from rebalanser.core.tasks.model import TaskId
from rebalanser.errors import UnusableFolder
from rebalanser.folders import sync_folder

RESERVE_MS: Final = 2_000
"""Milliseconds that a mark is ahead: at most one fsync in this time. A crash skips at most as much."""
_MACHINE_IDS: Final = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
_CELLS: Final = (0, 4096)
_CELL_BYTES: Final = 20


def wall_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class IdSource:
    """Makes the ids of this process (SK-1). May be called from any thread, and after a fork.

    The first id takes a slot; a forked child takes its own. Without a ``folder``, for the clock of a test,
    nothing is kept: 64 random bits in the place of host and process keep the ids apart from all others, and
    their times follow that clock alone.

    Raises:
        UnusableFolder: the folder can't be written, holds something else, or all its slots are taken.
    """

    def __init__(self, folder: Path | None, wall_ms: Callable[[], int] = wall_ms) -> None:
        self._folder = folder
        self._wall_ms = wall_ms
        self._lock = threading.Lock()
        self._slot: Slot | None = None
        self._generator: Generator | None = None
        forks.in_child(self.forked)

    def next(self) -> TaskId:
        """Return an id greater than all that this process and its slot's earlier processes have made."""
        with self._lock:
            generator = self._generator
            if generator is None:
                generator = self._generator = self._begin()
            return generator.next()

    def close(self) -> None:
        """Release the slot. Closing twice does nothing; the next id takes a slot again."""
        with self._lock:
            if self._slot is not None and self._generator is not None:
                self._slot.close(self._generator.floor)
            self._slot = self._generator = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forked(self) -> None:
        """Forget the parent's slot, in a forked child."""
        self._lock = threading.Lock()
        if self._slot is not None:
            self._slot.forget()
        self._slot = self._generator = None

    def _begin(self) -> Generator:
        folder = self._folder
        if folder is None:
            return Generator(self._wall_ms, secrets.randbits(48), secrets.randbits(16))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            host = host_bits(folder)
            slot = take_slot(folder)
        except OSError as error:
            raise UnusableFolder(f"{folder} can't hold the state of task ids: {error}") from error
        self._slot = slot
        mark = slot.mark
        return Generator(self._wall_ms, host, slot.number, mark, ceiling=mark, reserve=slot.reserve)


class Slot:
    """File of a slot, locked by this process."""

    def __init__(self, number: int, descriptor: int) -> None:
        self.number = number
        self._descriptor = descriptor
        self._written = 0
        self.mark = self._read()

    def reserve(self, ms: int) -> int:
        """Write a mark above ``ms`` durably, and return it."""
        self._write(ms + RESERVE_MS)
        return self.mark

    def close(self, mark: int) -> None:
        """Release the slot; its next process may begin at ``mark``, below the reserved one."""
        try:
            if mark < self.mark:
                self._write(mark)
        finally:
            self.forget()

    def forget(self) -> None:
        """Close the file without writing a mark."""
        os.close(self._descriptor)

    def _read(self) -> int:
        """Return the newer mark of the two cells; a write torn by a power cut was never returned."""
        cells = [os.pread(self._descriptor, _CELL_BYTES, offset) for offset in _CELLS]
        marks = [mark for cell in cells if (mark := _mark_of(cell))]
        if not marks and all(cell.strip(b"\0") for cell in cells):
            raise UnusableFolder(f"the file of slot {self.number} holds no mark")
        self._written, mark_ms = max(marks, default=(0, 0))
        return mark_ms

    def _write(self, mark: int) -> None:
        self._written += 1
        body = self._written.to_bytes(8) + mark.to_bytes(8)
        os.pwrite(self._descriptor, body + zlib.crc32(body).to_bytes(4), _CELLS[self._written % 2])
        os.fdatasync(self._descriptor)
        self.mark = mark


def _mark_of(cell: bytes) -> tuple[int, int] | None:
    """Return the sequence number and the mark of a cell; None if it has no valid mark."""
    body, check = cell[:16], cell[16:]
    if len(cell) < _CELL_BYTES or zlib.crc32(body).to_bytes(4) != check:
        return None
    return int.from_bytes(body[:8]), int.from_bytes(body[8:])


def take_slot(folder: Path) -> Slot:
    """Lock the first slot that no living process holds."""
    for number in range(MAX_PROCESS + 1):
        path = folder / f"slot-{number:05}"
        is_new = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_new:
                sync_folder(folder)
            return Slot(number, descriptor)
        except BlockingIOError:
            os.close(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
    raise UnusableFolder(f"all {MAX_PROCESS + 1} slots in {folder} are taken")


def host_bits(folder: Path) -> int:
    """Return the 48 bits that identify this host and folder in ids."""
    return int.from_bytes(hashlib.blake2b(_machine_id() + _salt(folder), digest_size=6).digest())


def _machine_id() -> bytes:
    for path in _MACHINE_IDS:
        with contextlib.suppress(OSError):
            if text := path.read_bytes().strip():
                return text
    return uuid.getnode().to_bytes(6)


def _salt(folder: Path) -> bytes:
    """Return the folder's unique salt. It is written whole under another name, then linked."""
    path = folder / "salt"
    if not path.exists():
        fresh = folder / f"salt-{secrets.token_hex(8)}"
        with fresh.open("x") as file:
            file.write(secrets.token_hex(16))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(fresh)
        fresh.unlink()
        sync_folder(folder)
    return path.read_bytes()
