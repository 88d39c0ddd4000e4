"""The one policy for errors of background loops: of workers, tickers, writers, outboxes and servers.

======  =======================================================  ============================================
kind    errors                                                   consequence
======  =======================================================  ============================================
poison  of one task: too large, of a wrong type, no JSON         that task's step ends, and nothing else
outage  of the store: away, full, read-only, locked              retried with backoff, for as long as it takes
bug     all others: unforeseen                                   logged with the traceback and retried; once
                                                                 they persist the process ends
======  =======================================================  ============================================

No loop ends by an error: neither a supervisor nor a group sees a dead thread in a live process.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rebalanser.core.clock import Clock, GrowingDelay
from rebalanser.errors import (
    InvalidArgument,
    InvalidTask,
    RegistryRefused,
    RequestTooLarge,
    RetryLater,
    UnusableFolder,
)
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks.execution.outcomes import summary_of

SHORTEST_PAUSE_S: Final = 0.05
"""Seconds between the first error of a loop and its next step."""
LONGEST_PAUSE_S: Final = 2.0
"""Maximum seconds between two tries, and so between the end of an outage and the next step."""
UNREADABLE_S: Final = 1800.0
"""Seconds for which an unreadable task is a trouble of its function."""
REPORT_S: Final = 30.0
"""Seconds between two log lines about one loop that goes on failing."""
PERSISTS_S: Final = 60.0
"""Seconds after which bugs of a loop that has done nothing else meanwhile end the process."""
PERSISTS_ATTEMPTS: Final = 10
"""Minimum number of such bugs: a loop that has little to do is not given up for two in an hour."""
_log = get_logger()


class ErrorKind(StrEnum):
    """Kind of an error, by what follows from it."""

    POISON = "poison"
    """An error of one task, which comes again at each try of it."""
    OUTAGE = "outage"
    """The store is away or takes nothing now: the same step succeeds later."""
    BUG = "bug"
    """An unforeseen error."""


def kind_of(error: BaseException) -> ErrorKind:
    """Return the kind of an error that a step, or a part of one, has raised."""
    match error:
        case RequestTooLarge() | InvalidTask() | InvalidArgument():
            return ErrorKind.POISON
        case RetryLater() | RegistryRefused() | UnusableFolder() | OSError():
            return ErrorKind.OUTAGE
        case _:
            return ErrorKind.BUG


@dataclass(frozen=True, slots=True)
class Trouble:
    """A loop that fails now: its error, the first one's time (seconds since 1970), the attempts in a row.

    Under the name ``task NAME`` it is a function whose tasks this worker can't read (SK-21), and their
    number.
    """

    loop: str
    kind: ErrorKind
    error: str
    since: float
    attempts: int


@dataclass(slots=True)
class _Failing:
    """A loop's errors since its last step that succeeded."""

    delay: GrowingDelay
    began: float
    since: float
    reported: float
    kind: ErrorKind = ErrorKind.OUTAGE
    error: str = ""
    attempts: int = 0
    bug_since: float | None = None
    bugs: int = 0


@dataclass(frozen=True, slots=True)
class FailedStep:
    """Consequence of an error of a loop's step."""

    pause_s: float
    """Seconds before the next step."""
    kind: ErrorKind
    attempts: int
    is_due: bool
    """True if it is time to report it."""
    gives_up: str
    """Reason why the process ends; empty if it goes on."""


class LoopFailures:
    """The failing loops of a process, and the consequences. Pure.

    ``now`` is in seconds of a monotonic clock, ``wall`` in seconds since 1970.
    """

    def __init__(self) -> None:
        self._failing: dict[str, _Failing] = {}

    def __contains__(self, loop: str) -> bool:
        return loop in self._failing

    def troubles(self) -> list[Trouble]:
        """Return the loops that fail now."""
        return [
            Trouble(loop, each.kind, each.error, each.since, each.attempts)
            for loop, each in sorted(self._failing.items())
        ]

    def failed(
        self, loop: str, error: BaseException, now: float, wall: float, *, ends_process: bool = True
    ) -> FailedStep:
        """Note an error. Bugs that persist end the process only if ``ends_process``."""
        kind = kind_of(error)
        failing = self._failing.get(loop)
        is_due = failing is None or failing.kind is not kind or now - failing.reported >= REPORT_S
        if failing is None:
            delay = GrowingDelay(SHORTEST_PAUSE_S, LONGEST_PAUSE_S)
            failing = self._failing[loop] = _Failing(delay, now, wall, now)
        failing.kind, failing.error = kind, summary_of(error)
        failing.attempts += 1
        if kind is ErrorKind.BUG:
            failing.bug_since = now if failing.bug_since is None else failing.bug_since
            failing.bugs += 1
        else:
            failing.bug_since, failing.bugs = None, 0
        if is_due:
            failing.reported = now
        lasted_s = 0.0 if failing.bug_since is None else now - failing.bug_since
        persists = ends_process and lasted_s >= PERSISTS_S and failing.bugs >= PERSISTS_ATTEMPTS
        gives_up = f"{loop} has failed for {lasted_s:.0f} s: {failing.error}" if persists else ""
        return FailedStep(failing.delay.after(0.0), kind, failing.attempts, is_due, gives_up)

    def ended(self, loop: str) -> tuple[int, float] | None:
        """Forget a loop's failures; return their number and the time of the first, None if there are none."""
        failing = self._failing.pop(loop, None)
        return None if failing is None else (failing.attempts, failing.began)


class ErrorPolicy:
    """Policy for errors of a queue's loops in this process. May be used from any thread.

    ``end`` is called once the process has to end, and once only.
    """

    def __init__(self, queue: str, clock: Clock, end: Callable[[], None]) -> None:
        self._queue = queue
        self._clock = clock
        self._end = end
        self._failures = LoopFailures()
        self._unreadable: dict[str, tuple[Trouble, float]] = {}
        self._ignored: dict[str, float] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._ended = False

    @property
    def troubles(self) -> tuple[Trouble, ...]:
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
            trouble = Trouble(loop, ErrorKind.POISON, error_text, since, attempts + 1)
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

    A step that has to wait for work does so before it begins with it: when it returns, it has succeeded.
    Without ``ends_process`` bugs that persist end no process: one that is the host application's, not a
    worker's.
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
