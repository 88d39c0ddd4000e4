"""Hooks around every task: for tracing, error reports, and connections for bodies."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Final

from rebalanser.core.tasks.model import Head
from rebalanser.tasks.claim import Claim
from rebalanser.tasks.loops import ErrorPolicy, Loop

MAX_REPORTS: Final = 1000
"""Maximum number of failures that wait to be reported; further ones are dropped."""
CLOSE_S: Final = 5.0
"""Maximum seconds that a worker which stops waits for reports."""


class Middleware:
    """Base class of hooks: override the ones you need. Errors of a hook are logged and ignored (SK-15).

    Hooks but ``failed`` are called in the thread of the enqueuer or of the body: in the order given
    before, in the reverse order after. Those of a coroutine are called in two threads, and neither is that
    of its loop.
    """

    def enqueued(self, head: Head) -> None:
        """A task was committed or spooled."""

    def before(self, claim: Claim) -> None:
        """A body is about to be called."""

    def after(self, claim: Claim, error: BaseException | None) -> None:
        """A body has returned, or raised ``error``; its claim ends now."""

    def failed(self, claim: Claim, error: BaseException, *, is_dead: bool) -> None:
        """A try has failed: its body raised ``error``, took too long, or could not be called.

        The try is number ``claim.failures``, counted from 0, of the task ``claim.task_id``. ``is_dead`` is
        True if the store has recorded it as the last one. Called after that is known, one call at a time, in
        a thread of its own: a slow hook delays no task.
        """


class FailureReports:
    """Reports failures to the middleware that overrides ``failed``, in a thread of its own (SK-15)."""

    def __init__(self, middleware: Sequence[Middleware], errors: ErrorPolicy) -> None:
        self._hooks = [each for each in middleware if type(each).failed is not Middleware.failed]
        self._errors = errors
        self._waiting: queue.Queue[tuple[Claim, BaseException, bool] | None] = queue.Queue(
            maxsize=MAX_REPORTS
        )
        self._loop = Loop("reports", self._step, errors)

    def start(self) -> None:
        """Start the thread, if any middleware takes reports."""
        if self._hooks:
            self._loop.start()

    def report(self, claim: Claim, error: BaseException, *, is_dead: bool) -> None:
        """Report a failure later; never waits, and raises nothing."""
        if not self._hooks:
            return
        try:
            self._waiting.put_nowait((claim, error, is_dead))
        except queue.Full as full:
            self._errors.ignored("a report of a failure, as too many wait", full)

    def close(self) -> None:
        """Report what waits, within a limit."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full as full:
            self._errors.ignored("reports of failures, as a hook does not return", full)
        else:
            self._loop.join(CLOSE_S)

    def _step(self) -> bool:
        report = self._waiting.get()
        if report is None:
            return False
        claim, error, is_dead = report
        for hook in self._hooks:
            try:
                hook.failed(claim, error, is_dead=is_dead)
            except BaseException as raised:  # whatever a hook does, the others are called
                self._errors.ignored(f"middleware {type(hook).__qualname__}.failed", raised)
        return True
