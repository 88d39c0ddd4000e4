"""What tasks do in every queue, and what they leave behind in the run's folder."""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from pathlib import Path

from queues.place import folder

SLOW_S = 3.0
ASKED_AT_ONCE = 500
_here = threading.local()
_waited: list[float] = []
_gate = threading.Event()


def nothing() -> None:
    """Count, in memory shared with the driver: no system call, so nothing that a thread would wait for."""
    if getattr(_here, "process", None) != os.getpid():
        _here.process, _here.count = os.getpid(), 0
        path = folder() / "ticks" / f"{os.getpid()}-{threading.get_ident()}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            _here.cell = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")
    _here.count += 1
    _here.cell[0] = _here.count


def ticks() -> int:
    """Return the number of calls of ``nothing`` in all processes."""
    counted = (folder() / "ticks").iterdir() if (folder() / "ticks").exists() else ()
    return sum(int.from_bytes(each.read_bytes(), "little") for each in counted)


def asked_at(at: float) -> None:
    """Wait until the driver opens the gate; count, and write down how long ago the claim was asked for.

    In parts, for few writes, and not of claims that were made before.
    """
    if not _gate.is_set():
        while not (folder() / "gate").exists():
            time.sleep(0.01)
        _gate.set()
    else:
        _waited.append(time.monotonic() - at)
    nothing()
    if len(_waited) >= ASKED_AT_ONCE:
        part, _waited[:] = _waited[:], []
        _append("asked", "\n".join(map(str, part)))


def asked() -> list[float]:
    """Return the times that ``asked_at`` has written."""
    path = folder() / "asked"
    return [float(line) for line in path.read_text().split()] if path.exists() else []


def stamp() -> None:
    """Say when it was started."""
    _append("starts", str(time.monotonic()))


def slow(name: str) -> None:
    """Take a while, and tell of its beginning and its end."""
    tell(name, "begun")
    time.sleep(SLOW_S)
    tell(name, "ended")


def held(name: str) -> None:
    """Last until the driver lets this try of it end."""
    tries = tell(name, "begun")
    while not (folder() / f"let-{tries}").exists():
        time.sleep(0.05)
    tell(name, f"ended-{tries}")


def tell(name: str, what: str) -> int:
    """Write down what a task does; how often it has done that now."""
    _append("runs", json.dumps([name, what, time.monotonic()]))
    return sum(1 for task, done, _ in runs() if (task, done) == (name, what))


def runs() -> list[tuple[str, str, float]]:
    """What tasks have told so far: name, what, and when."""
    path = folder() / "runs"
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def starts() -> list[float]:
    """When bodies of ``stamp`` started."""
    path = folder() / "starts"
    return [float(line) for line in path.read_text().split()] if path.exists() else []


def _append(file: str, line: str) -> None:
    path: Path = folder() / file
    with path.open("a") as opened:
        opened.write(f"{line}\n")
