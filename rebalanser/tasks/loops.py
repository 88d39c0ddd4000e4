"""Background loops in threads, and the one policy for their errors (``core.tasks.failures``).

No loop ends by an error: neither a supervisor nor a group sees a dead thread in a live process.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from rebalanser.core.clock import Clock
from rebalanser.core.tasks.failures import (
    LONGEST_PAUSE_S,
    REPORT_S,
    SHORTEST_PAUSE_S,
    ErrorKind,
    LoopFailure,
    LoopFailures,
    summary_of,
)
from rebalanser.runtime.logs import get_logger

UNREADABLE_S: Final = 1800.0
"""Seconds for which an unreadable task is a trouble of its function."""
_log = get_logger()


class ErrorPolicy:
    """Policy for errors of a queue's loops in this process. May be used from any thread.

    ``end`` is called once the process has to end, and once only.
    """

    def __init__(self, queue: str, clock: Clock, end: Callable[[], None]) -> None:
        self._queue = queue
        self._clock = clock
        self._end = end
        self._failures = LoopFailures()
        self._unreadable: dict[str, tuple[LoopFailure, float]] = {}
        self._ignored: dict[str, float] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._ended = False

    @property
    def troubles(self) -> tuple[LoopFailure, ...]:
        """The loops that fail now, and the functions whose tasks can't be read; empty if all is well."""
        now = self._clock.now()
        with self._lock:
            failing = self._failures.troubles()
            unreadable = [each for each, last in self._unreadable.values() if now - last < UNREADABLE_S]
        return (*failing, *unreadable)

    @property
    def counts(self) -> Mapping[tuple[str, str], int]:
        """Number of errors of each loop, by kind."""
        with self._lock:
            return self._counts.copy()

    def failed(self, loop: str, error: BaseException, *, ends_process: bool = True) -> float:
        """Note an error; return the seconds that the loop pauses before it tries again.

        Bugs that persist end the process only if ``ends_process``.
        """
        now, wall = self._clock.now(), self._clock.wall()
        with self._lock:
            step = self._failures.failed(loop, error, now, wall, ends_process=ends_process)
            self._counts[loop, step.kind.value] += 1
        if step.is_due:
            self._report(loop, step.kind, error, step.attempts)
        if step.gives_up:
            self.give_up(step.gives_up)
        return step.pause_s

    def give_up(self, reason: str) -> None:
        """End the process, as it can't go on by itself; the first reason counts."""
        with self._lock:
            was_ended, self._ended = self._ended, True
        if not was_ended:
            _log.critical("the process ends", action="tasks_process_ends", queue=self._queue, reason=reason)
            self._end()

    def worked(self, loop: str) -> None:
        """Note a step that succeeded: the trouble of its loop ends."""
        if loop not in self._failures:
            return
        with self._lock:
            failures = self._failures.ended(loop)
        if failures is not None:
            attempts, began = failures
            _log.info(
                "works again",
                action="tasks_work_again",
                queue=self._queue,
                loop=loop,
                attempts=attempts,
                lasted_s=round(self._clock.now() - began, 3),
            )

    def ended(self, loop: str) -> None:
        """Forget the trouble of a loop that takes no more steps."""
        with self._lock:
            self._failures.ended(loop)

    def unreadable(self, name: str, error: BaseException) -> None:
        """Note a task of a function that can't be read here; only the first is logged."""
        loop, error_text = f"task {name}", summary_of(error)
        with self._lock:
            known, _ = self._unreadable.get(name, (None, 0.0))
            since, attempts = (self._clock.wall(), 0) if known is None else (known.since, known.attempts)
            trouble = LoopFailure(loop, ErrorKind.POISON, error_text, since, attempts + 1)
            self._unreadable[name] = (trouble, self._clock.now())
        if known is None:
            _log.error(
                "tasks of a function have arguments that this worker can't read: they wait for one that can",
                action="task_unreadable",
                queue=self._queue,
                name=name,
                error=error_text,
            )

    def ignored(self, what: str, error: BaseException) -> None:
        """Log an error, with its traceback, that ends nothing; at most once in ``REPORT_S`` per kind."""
        now = self._clock.now()
        with self._lock:
            is_due = now - self._ignored.get(what, -REPORT_S) >= REPORT_S
            if is_due:
                self._ignored[what] = now
        if is_due:
            _log.error(
                "an error is ignored",
                action="tasks_error_ignored",
                queue=self._queue,
                what=what,
                error=summary_of(error),
                exc_info=error,
            )

    def _report(self, loop: str, kind: ErrorKind, error: BaseException, attempts: int) -> None:
        known = {"queue": self._queue, "loop": loop, "attempts": attempts, "error": summary_of(error)}
        if kind is ErrorKind.OUTAGE:
            _log.warning("waits for the engine", action="tasks_engine_away", **known)
        else:
            _log.error("fails and is retried", action="tasks_loop_failed", exc_info=error, **known)


class Loop:
    """A thread that takes steps, whatever they raise, until one returns False: that was the last.

    A step that has to wait for work does so before it begins to work: when it returns, it has succeeded.
    Without ``ends_process`` bugs that persist end no process: that of a host application, not of a worker.
    """

    def __init__(
        self, name: str, step: Callable[[], bool], errors: ErrorPolicy, *, ends_process: bool = True
    ) -> None:
        self.name = name
        self._step = step
        self._errors = errors
        self._ends_process = ends_process
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rebalanser-tasks-{name}", daemon=True)

    @property
    def has_begun(self) -> bool:
        """True once it was started."""
        return self._thread.ident is not None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def end_soon(self) -> None:
        """Pause only shortly from now on, as the loop is about to end."""
        self._ending.set()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the last step was taken; returns at once if it was never started."""
        if self.has_begun:
            self._thread.join(timeout_s)

    def take_step(self) -> float | None:
        """Take a step; return the seconds to pause before the next one, None if it was the last."""
        try:
            goes_on = self._step()
        except BaseException as error:  # an exception would end this thread unseen
            return self.failed(error)
        if not goes_on:
            self._errors.ended(self.name)
            return None
        self._errors.worked(self.name)
        return 0.0

    def failed(self, error: BaseException) -> float:
        """Note an error of a step; return the seconds to pause. Raises nothing."""
        try:
            return self._errors.failed(self.name, error, ends_process=self._ends_process)
        except Exception:  # a handler of the host's logging, or whatever else
            return LONGEST_PAUSE_S

    def pause(self, pause_s: float) -> None:
        """Wait for some seconds, or shortly if the loop is about to end."""
        if pause_s and self._ending.wait(pause_s):
            time.sleep(min(pause_s, SHORTEST_PAUSE_S))

    def _run(self) -> None:
        while (pause_s := self.take_step()) is not None:
            self.pause(pause_s)
