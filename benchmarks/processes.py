"""Node processes of a benchmark, and who owns what according to what they tell."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NODE = Path(__file__).with_name("node.py")
PATIENCE_S = 120.0


class Crew:
    """The node processes of one group; they are killed when the crew is left."""

    def __init__(self, url: str, group: str, lease_ttl_s: float) -> None:
        self._url, self._group, self._lease_ttl_s = url, group, lease_ttl_s
        self._events: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue(maxsize=100_000)
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self.owners: dict[str, str] = {}
        self.latest: dict[tuple[str, str], dict[str, Any]] = {}
        """The latest event of each kind, by process and kind."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.kill()
            process.communicate()

    def hire(self, label: str, program: Sequence[str] = (str(NODE),), *more: str) -> None:
        """Start a process, and wait until it is ready to join; ``more`` are arguments of its program."""
        process = subprocess.Popen(
            [sys.executable, *program, self._url, self._group, label, str(self._lease_ttl_s), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ, PYTHONUNBUFFERED="1"),
        )
        self._processes[label] = process
        threading.Thread(target=self._listen, args=(label, process), daemon=True).start()
        self.await_event(label, "ready")

    def _listen(self, label: str, process: subprocess.Popen[str]) -> None:
        if process.stdout is not None:
            for line in process.stdout:
                self._events.put((label, json.loads(line)))

    def tell(self, label: str, command: str) -> None:
        """Give a process a command."""
        stdin = self._processes[label].stdin
        if stdin is None:
            raise RuntimeError(f"{label} has no standard input")
        stdin.write(command + "\n")
        stdin.flush()

    def await_event(self, label: str, event: str) -> dict[str, Any]:
        """The next such event of that process; ownership is kept up to date on the way."""
        while True:
            who, what = self._next()
            if who == label and what["event"] == event:
                return what

    def await_until(self, reached: Callable[[], bool]) -> None:
        """Take in events until something is so."""
        while not reached():
            self._next()

    def _next(self) -> tuple[str, dict[str, Any]]:
        who, what = self._events.get(timeout=PATIENCE_S)
        self.latest[who, what["event"]] = what
        for resource in what.get("resources", ()):
            if what["event"] == "started":
                self.owners[resource] = who
            elif self.owners.get(resource) == who:
                del self.owners[resource]
        return who, what

    def await_all_owned(self, count: int, nodes: int) -> float:
        """When the last of ``count`` resources got its owner, spread evenly over ``nodes``."""
        at = time.monotonic()
        while not self._even(count, nodes):
            at = self._next()[1]["at"]
        return at

    def _even(self, count: int, nodes: int) -> bool:
        held: dict[str, int] = {}
        for owner in self.owners.values():
            held[owner] = held.get(owner, 0) + 1
        if len(self.owners) != count or len(held) != min(nodes, count):
            return False
        return max(held.values()) - min(held.values()) <= 1

    def kill(self, label: str) -> float:
        """``kill -9`` a process; when."""
        process = self._processes.pop(label)
        at = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        self.owners = {resource: owner for resource, owner in self.owners.items() if owner != label}
        return at
