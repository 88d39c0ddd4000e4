"""The processes of workers: started, paused and killed whole."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from queues.place import folder


class Workers:
    """The processes of one worker, its children among them: a session of its own, by which they are found."""

    def __init__(self, app: Any, concurrency: int) -> None:
        with (folder() / "worker.log").open("ab") as log:
            self._process = subprocess.Popen(
                app.worker(concurrency), start_new_session=True, stdout=log, stderr=log, cwd=folder()
            )

    @property
    def resident_mb(self) -> float:
        """The memory that all of them have resident, in MB of 10⁶ bytes."""
        pages = sum(
            int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in _session(self._process.pid)
        )
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    @property
    def busy_s(self) -> float:
        """The processor time that its living processes have used, in seconds."""
        ticks = 0
        for each in _session(self._process.pid):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def await_idle(self, longest_s: float) -> float:
        """Wait until it does next to nothing for two seconds; when that began, by ``time.monotonic()``."""
        deadline = time.monotonic() + longest_s
        idle_since = time.monotonic()
        while time.monotonic() < min(deadline, idle_since + 2):
            before = self.busy_s
            time.sleep(0.25)
            if self.busy_s - before > 0.05:
                idle_since = time.monotonic()
        return idle_since

    def send(self, number: signal.Signals) -> None:
        """Send all of them a signal, also those that have left the process group."""
        for each in _session(self._process.pid):
            try:
                os.kill(each, number)
            except ProcessLookupError:
                continue

    def kill(self) -> None:
        """End all of them with ``kill -9``."""
        while _session(self._process.pid):
            self.send(signal.SIGKILL)
            self._process.poll()
            time.sleep(0.01)


def _session(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


@contextmanager
def workers(app: Any, concurrency: int) -> Iterator[Workers]:
    """A worker, killed at the end."""
    started = Workers(app, concurrency)
    try:
        yield started
    finally:
        started.send(signal.SIGCONT)
        started.kill()


def await_that(is_so: Callable[[], bool], longest_s: float) -> bool:
    """Whether it became so in time."""
    deadline = time.monotonic() + longest_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
