"""A queue on a real engine, and the processes that take part in it (``queue_process.py``)."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from rebalanser.core.tasks.store import Enqueue
from rebalanser.tasks import Queue, Status
from rebalanser.tasks.functions import EnqueueOptions
from rebalanser.testing.waiting import PATIENCE_S

PROCESS = Path(__file__).with_name("queue_process.py")


class Stage:
    """The queue, its processes, what their bodies tell and what they log."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._started = 0
        self.url = url
        self.log = folder / "log.jsonl"
        self.queue = stack.enter_context(Queue("work", url, partitions=4, state_folder=folder / "state"))

    def start(self, role: str, **more: Any) -> Process:
        """Start a process; each has a state folder of its own, as on a host of its own."""
        self._started += 1
        order = {
            "role": role,
            "url": self.url,
            "log": str(self.log),
            "state": str(self._folder / f"state-{self._started}"),
            "concurrency": 2,
            **more,
        }
        return self._stack.enter_context(Process(order, self._folder / f"stderr-{self._started}.jsonl"))

    def made(self, name: str, **options: Any) -> Enqueue:
        """A task of a function that no worker has."""
        return self.queue.build_raw_enqueue(name, b"{}", EnqueueOptions(**options))

    def events(self, event: str) -> list[dict[str, Any]]:
        """What was told so far."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [told for line in lines if (told := json.loads(line))["event"] == event]

    def statuses(self) -> dict[Status, int]:
        """How many tasks there are in each status."""
        return {status: count for status, count in self.queue.count().items() if count}


class Process:
    """A process of the stage, killed when the test ends."""

    def __init__(self, order: dict[str, Any], stderr: Path) -> None:
        self._stderr = stderr
        with stderr.open("wb") as file:
            self.popen = subprocess.Popen(
                [sys.executable, str(PROCESS), json.dumps(order)], stdout=subprocess.PIPE, stderr=file
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self.popen.stdout is not None
        self.popen.stdout.close()

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.popen.kill()
        self.popen.wait()

    def answer(self) -> Any:
        """What it prints, once it has ended well."""
        out, _ = self.popen.communicate(timeout=PATIENCE_S)
        assert self.popen.returncode == 0, self._stderr.read_text()
        return json.loads(out)

    def logged(self, action: str) -> list[dict[str, Any]]:
        """The lines of its log that have this action."""
        lines = [json.loads(line) for line in self._stderr.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("action") == action]
