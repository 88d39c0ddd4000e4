"""How bodies are called: in the thread that asks, or somewhere from where they can be ended."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from rebalanser.tasks.functions import TaskBody
from rebalanser.tasks.model import Head
from rebalanser.tasks.outcomes import Cut, Outcome, raised, returned
from rebalanser.tasks.worker_claim import WorkerClaim


@dataclass(frozen=True, slots=True)
class Job:
    """One try: the function to call, under its claim, with arguments that were found to fit."""

    body: TaskBody
    claim: WorkerClaim
    head: Head
    payload: bytes
    arguments: dict[str, Any]


class Caller(Protocol):
    """Calls bodies. May be used from any thread, of which as many call at a time as bodies may run."""

    def open(self) -> None:
        """Get ready; called once, before all else."""

    def call(self, job: Job) -> Outcome:
        """Call a body and wait for how it ends. Raises nothing."""

    def begin(self, _job: Job, /) -> Future[Outcome] | None:
        """Begin a body that takes no thread, and give how it will end; None where it is to be called."""

    def takes_thread(self, _body: TaskBody, /) -> bool:
        """True if this body has to be called, so that a thread is taken until it ends."""

    def can_end(self, _body: TaskBody, /) -> bool:
        """Whether :meth:`call` itself ends this body at its ``timeout_s`` and once its claim is lost."""

    def cut_off(self) -> None:
        """End all bodies that can be ended, now and from now on; returns at once."""

    def close(self) -> None:
        """Let go of everything; no body is called any more."""


class ThreadCaller:
    """Calls each body in the thread that asks, which nothing can end but the body."""

    def open(self) -> None:
        """Nothing to do."""

    def call(self, job: Job) -> Outcome:
        """Call a body; one that wants to exit has failed, as the process is not its own."""
        try:
            return returned(job.body.call(job.claim, job.arguments))
        except BaseException as error:  # what ended this thread would leave the claim renewed for ever
            return raised(error)

    def begin(self, _job: Job) -> None:
        """All are to be called."""

    def takes_thread(self, _body: TaskBody) -> bool:
        """All do."""
        return True

    def can_end(self, _body: TaskBody) -> bool:
        """It can end none."""
        return False

    def cut_off(self) -> None:
        """Nothing can be done."""

    def close(self) -> None:
        """Nothing to do."""


def cut_of(job: Job, ends_at: float | None, now: float) -> Cut | None:
    """Why a body must be ended now; None if it may go on. Out of time is one that runs at ``ends_at``."""
    if job.claim.stop_requested.is_set() or job.claim.deadline <= now:
        return Cut.LOST
    return Cut.TIMED_OUT if ends_at is not None and ends_at <= now else None


@dataclass(slots=True)
class Watch:
    """Waits for bodies that can be ended until they have, or one of the reasons to end them is there."""

    _waiting: set[threading.Event] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: bool = False

    def until(self, job: Job, ended: Future[Any], limit_s: float | None = None) -> Cut | None:
        """Wait until ``ended`` is done, which gives None, or the body must be ended, and why.

        Out of time is what has not ended within ``limit_s`` seconds from now.
        """
        woken = threading.Event()
        job.claim.stop_requested.listen(woken.set)
        ended.add_done_callback(lambda _: woken.set())
        with self._lock:
            self._waiting.add(woken)
        try:
            return self._until(job, ended, None if limit_s is None else time.monotonic() + limit_s, woken)
        finally:
            job.claim.stop_requested.leave(woken.set)
            with self._lock:
                self._waiting.discard(woken)

    def _until(
        self, job: Job, ended: Future[Any], ends_at: float | None, woken: threading.Event
    ) -> Cut | None:
        while True:
            woken.clear()
            if ended.done():
                return None
            if self._stopped:
                return Cut.STOPPED
            now = time.monotonic()
            cut = cut_of(job, ends_at, now)
            if cut is not None:
                return cut
            deadline = job.claim.deadline
            woken.wait((deadline if ends_at is None else min(deadline, ends_at)) - now)

    def stop(self) -> None:
        """Whoever waits is told to end what he waits for, now and from now on."""
        self._stopped = True
        with self._lock:
            for each in self._waiting:
                each.set()
