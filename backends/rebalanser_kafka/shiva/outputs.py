"""A worker's answers to requests for the output of its applications (SH-17)."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from rebalanser.core.clock import Clock
from rebalanser.core.shiva.records import OutputAnswer, OutputRequest
from rebalanser.core.shiva.types import WorkerId
from rebalanser.errors import FixConfiguration
from rebalanser.runtime.clock import SystemClock
from rebalanser.shiva.outputs import newest_lines, tail

MAX_LINES: Final = 10_000
MAX_BYTES: Final = 400_000
"""Maximum bytes of output in one answer: its record stays below Kafka's default limit."""
MAX_FOLLOWED: Final = 8
"""Maximum requests with ``follow`` at the same time, with a thread each."""
MAX_FOLLOW_S: Final = 60.0
PAUSE_S: Final = 0.5
"""Seconds between two answers to a request with ``follow``."""
FOLLOWED_BYTES: Final = 100_000
"""Maximum bytes of each such answer but the first: CONTROL could not hold all that is printed."""


class _Over(Exception):
    """The request has expired, or the worker is closing."""


class OutputServer:
    """Answers requests for output; ``send`` is called with each answer, from any thread."""

    def __init__(
        self,
        worker: WorkerId,
        folder: Path,
        send: Callable[[OutputAnswer], None],
        clock: Clock | None = None,
    ) -> None:
        self._worker = worker
        self._folder = folder
        self._send = send
        self._clock = clock or SystemClock()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}
        """Time (monotonic seconds) at which each request with ``follow`` expires."""

    def answer(self, request: OutputRequest) -> None:
        """Send the last lines once."""
        answer = OutputAnswer(self._worker, request.request)
        try:
            lines, omitted = newest_lines(
                self._folder, request.application, min(request.lines, MAX_LINES), MAX_BYTES
            )
            answer = replace(answer, lines=tuple(lines), omitted=omitted)
        except (FixConfiguration, OSError) as error:
            answer = replace(answer, error=str(error))
        self._send(answer)

    def follow(self, request: OutputRequest) -> None:
        """Send the last lines, then new lines from a thread; a repeated request is extended."""
        with self._lock:
            followed = request.request in self._until
            has_room = followed or len(self._until) < MAX_FOLLOWED
            if has_room:
                self._until[request.request] = self._clock.now() + min(MAX_FOLLOW_S, request.follow_s)
        if followed:
            self._send(OutputAnswer(self._worker, request.request))
        elif not has_room:
            self._refuse(request, f"the output of {MAX_FOLLOWED} applications is followed here already")
        else:
            self._begin(request)

    def close(self) -> None:
        """End all requests with ``follow``."""
        self._closing.set()

    def _begin(self, request: OutputRequest) -> None:
        thread = threading.Thread(target=self._follow, args=(request,), name="rebalanser-output", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._forget(request)
            self._refuse(request, str(error))

    def _refuse(self, request: OutputRequest, error: str) -> None:
        self._send(OutputAnswer(self._worker, request.request, error=error))

    def _forget(self, request: OutputRequest) -> None:
        with self._lock:
            self._until.pop(request.request, None)

    def _follow(self, request: OutputRequest) -> None:
        reading = _Collected()
        due = self._clock.now() + PAUSE_S
        limit_bytes, is_first = MAX_BYTES, True

        def send() -> None:
            nonlocal due, limit_bytes, is_first
            answer = reading.take(limit_bytes, OutputAnswer(self._worker, request.request))
            if is_first or answer.lines or answer.omitted:
                self._send(answer)
            due, limit_bytes, is_first = self._clock.now() + PAUSE_S, FOLLOWED_BYTES, False

        def go_on(seconds: float) -> None:
            if is_first or self._clock.now() >= due:
                send()
            self._closing.wait(seconds)
            if self._closing.is_set() or self._clock.now() >= self._until[request.request]:
                raise _Over

        try:
            lines = min(request.lines, MAX_LINES)
            for line in tail(self._folder, request.application, lines, follow=True, wait=go_on):
                reading.add(line, limit_bytes)
                if self._clock.now() >= due:
                    go_on(0.0)
        except _Over:
            pass
        except (FixConfiguration, OSError) as error:
            self._refuse(request, str(error))
        finally:
            self._forget(request)


class _Collected:
    """Pending lines: the last ones that fit, and the number that did not."""

    def __init__(self) -> None:
        self._lines: deque[tuple[str, int]] = deque(maxlen=MAX_LINES)
        self._bytes = 0
        self._omitted = 0

    def add(self, line: str, limit_bytes: int) -> None:
        """Add one line; drop the oldest lines that no longer fit."""
        if len(self._lines) == MAX_LINES:
            self._drop_first()
        size_bytes = len(json.dumps(line))
        self._lines.append((line, size_bytes))
        self._bytes += size_bytes
        self._fit(limit_bytes)

    def take(self, limit_bytes: int, answer: OutputAnswer) -> OutputAnswer:
        """Return the answer with the pending lines, and clear them."""
        self._fit(limit_bytes)
        lines = tuple(line for line, _ in self._lines)
        answer = replace(answer, lines=lines, omitted=self._omitted)
        self._lines.clear()
        self._bytes = self._omitted = 0
        return answer

    def _fit(self, limit_bytes: int) -> None:
        while self._bytes > limit_bytes:
            self._drop_first()

    def _drop_first(self) -> None:
        self._bytes -= self._lines.popleft()[1]
        self._omitted += 1
