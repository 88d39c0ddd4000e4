"""Runs the bodies of tasks, each under its claim, and ends the claim as the body ended (SK-15)."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from rebalanser.errors import Fenced, InvalidArgument, InvalidTask, RequestTooLarge, RetryLater
from rebalanser.history import SkuldKind
from rebalanser.runtime.clock import Clock
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks import metrics, rules
from rebalanser.tasks.functions import OtherArguments, TaskBody, TaskOptions
from rebalanser.tasks.loops import LONGEST_PAUSE_S, ErrorKind, ErrorPolicy, kind_of
from rebalanser.tasks.metrics import TaskMetrics
from rebalanser.tasks.middleware import FailureReports, Middleware
from rebalanser.tasks.model import Head, Status, Stored
from rebalanser.tasks.outcomes import (
    MAX_ERROR,
    Cut,
    GiveUp,
    Outcome,
    Raised,
    Retry,
    Returned,
    raised,
    returned,
    summary_of,
)
from rebalanser.tasks.rules import Decision, Reason, Refused
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


_UNREAD: Final = re.compile(r" \(unread (?:once|(?P<times>[0-9]{1,6}) times)\)\Z")
_log = get_logger()


class Bodies:
    """The functions of a queue, and how each try of one ends. May be used from any thread.

    ``clock`` tells when a failed task is due again, ``caller`` calls the functions.
    """

    def __init__(
        self,
        functions: Mapping[str, TaskBody],
        middleware: Sequence[Middleware],
        clock: Clock,
        caller: Caller,
        errors: ErrorPolicy,
        task_metrics: TaskMetrics,
    ) -> None:
        self._functions = functions
        self._middleware = middleware
        self._clock = clock
        self._caller = caller
        self._reports = FailureReports(middleware, errors)
        self._reports.start()
        self._errors = errors
        self._metrics = task_metrics

    def names(self) -> Sequence[str]:
        """The functions that there are."""
        return tuple(self._functions)

    def can_end(self, name: str) -> bool:
        """Whether :meth:`work` ends the bodies of a function when their time is up or their claim is lost."""
        return self._caller.can_end(self._functions[name])

    def close(self) -> None:
        """Report the failures that wait to be; once all tries have ended."""
        self._reports.close()

    def cut_off(self) -> None:
        """End all bodies that can be ended; what they worked on goes back. Returns at once."""
        self._caller.cut_off()

    def takes_thread(self, name: str) -> bool:
        """True if :meth:`work` takes its thread for as long as the body of a function runs."""
        return self._caller.takes_thread(self._functions[name])

    def work(self, claim: WorkerClaim, head: Head, payload: bytes) -> Future[None] | None:
        """One try, from its arguments to the end of its claim; raises nothing of a body or a hook.

        None if it has ended; else a future that is done once it has, in another thread.
        """
        body = self._functions[claim.name]
        try:
            got = claim.filled(head, payload)
            payload = got.payload
            arguments = body.arguments(payload, got)
        except OtherArguments as error:
            self._give_back_unread(claim, error)
            return None
        except InvalidTask as error:
            self._fail(claim, head, raised(error), due=None)
            return None
        except RetryLater as error:
            self._give_back_without_results(claim, error)
            return None
        except BaseException as error:  # whatever a validator does
            self.fail(claim, head, error)
            return None
        for each in self._middleware:
            self._told(each.before, claim)
        job = Job(body, claim, head, payload, arguments)
        self._metrics.started(claim.name)
        began_at = self._clock.now()
        begun = self._caller.begin(job)
        if begun is None:
            outcome = self._caller.call(job)
            self._metrics.ran(claim.name, self._clock.now() - began_at)
            self._called(claim, head, outcome)
            return None
        ended: Future[None] = Future()

        def end(outcome: Future[Outcome]) -> None:
            self._metrics.ran(claim.name, self._clock.now() - began_at)
            try:
                self._called(claim, head, outcome.result())
            except BaseException as error:  # whoever waits must be told, whatever it is
                ended.set_exception(error)
            else:
                ended.set_result(None)

        begun.add_done_callback(end)
        return ended

    def _called(self, claim: WorkerClaim, head: Head, outcome: Outcome) -> None:
        """End the claim by how its body has ended."""
        match outcome:
            case Returned(result=result):
                self._returned(claim, head, result)
            case Raised():
                self._raised(claim, head, outcome)
            case Cut.TIMED_OUT:
                self._told_of_end(claim, _out_of_time(head))
                self.time_out(claim, head)
            case Cut.LOST | Cut.STOPPED:
                self._told_of_end(claim, None)
                self.give_back(claim)

    def time_out(self, claim: WorkerClaim, head: Head) -> None:
        """The try has taken too long: its claim fails now, whatever the body still does."""
        self._fail(claim, head, raised(_out_of_time(head)), self._backed_off(claim))

    def fail(self, claim: WorkerClaim, head: Head, error: BaseException) -> None:
        """The try has failed by an error that its body did not raise."""
        self._fail(claim, head, raised(error), self._backed_off(claim))

    def give_back(self, claim: WorkerClaim) -> None:
        """The worker stops: the task goes back as if it had not been tried."""
        self._end(claim, lambda stored: rules.release(stored.state, claim.held))

    def _give_back_unread(self, claim: WorkerClaim, error: OtherArguments) -> None:
        """Let a task wait for a worker that can read it, ever longer: no failure is counted (SK-21)."""
        self._errors.unreadable(claim.name, error)
        before = unread_before(claim.error_before)
        times = "once" if not before else f"{before + 1} times"
        counted = f" (unread {times})"
        reason = raised(error).told[: MAX_ERROR - len(counted)] + counted
        due = self._backed_off(claim, before)
        self._end(claim, lambda stored: rules.release(stored.state, claim.held, due, reason))

    def _give_back_without_results(self, claim: WorkerClaim, error: RetryLater) -> None:
        """Let a task wait whose results can't be read, as the engine is away: no failure is counted.

        The pause is the longest of the loops: that of the function is for failures of its own.
        """
        self._errors.ignored(f"reading the results for {claim.name}", error)
        due = self._clock.wall() + LONGEST_PAUSE_S
        self._end(claim, lambda stored: rules.release(stored.state, claim.held, due))

    def _returned(self, claim: WorkerClaim, head: Head, result: bytes | None) -> None:
        if result is not None:
            try:
                result = claim.check_result(result)
            except RequestTooLarge as error:
                self._raised(claim, head, raised(GiveUp(str(error))))
                return
        self._told_of_end(claim, None)
        self._end(claim, lambda stored: rules.complete(stored.state, claim.held, result), head)

    def _raised(self, claim: WorkerClaim, head: Head, outcome: Raised) -> None:
        match outcome.error:
            case Fenced() if claim.is_over:
                self._told_of_end(claim, None)
                return
            case Retry(delay_s=delay_s):
                due: float | None = self._clock.wall() + delay_s
            case GiveUp() | InvalidTask():
                due = None
            case _ if not outcome.is_retried(self._functions[claim.name].options.retry_on):
                due = None
            case _:
                due = self._backed_off(claim)
        self._told_of_end(claim, outcome.error)
        self._fail(claim, head, outcome, due)

    def _backed_off(self, claim: WorkerClaim, failures: int | None = None) -> float:
        """When a task is due again after so many failures before this one, of its tries where None."""
        options = self._functions[claim.name].options
        try:
            wait_s = backoff_s(options, claim.failures if failures is None else failures)
        except BaseException as error:  # whatever the function does that says how long
            self._errors.ignored(f"backoff_s of {claim.name}", error)
            wait_s = options.max_backoff_s
        return self._clock.wall() + wait_s * (1 + random.uniform(0, options.jitter))  # noqa: S311 - no secret

    def _fail(self, claim: WorkerClaim, head: Head, outcome: Raised, due: float | None) -> None:
        _log.warning(
            "a task's try failed",
            action="task_failed",
            queue=claim.queue,
            task=claim.task_id,
            name=claim.name,
            claim=claim.number,
            error=summary_of(outcome.error),
        )
        self._end(
            claim,
            lambda stored: rules.fail(head, stored.state, claim.held, outcome.told, due),
            failure=outcome.error,
        )

    def _end(
        self,
        claim: WorkerClaim,
        rule: Callable[[Stored], Decision],
        completed: Head | None = None,
        failure: BaseException | None = None,
    ) -> None:
        """End a claim by a rule: as ``completed``, or as failed by ``failure``."""
        if not claim.is_over:
            claim.settle(rule).add_done_callback(partial(self._ended, claim, completed, failure))
        elif failure is not None:
            self._reports.report(claim, failure, is_dead=False)

    def _ended(
        self,
        claim: WorkerClaim,
        completed: Head | None,
        failure: BaseException | None,
        outcome: Future[Stored | Refused],
    ) -> None:
        error = outcome.exception()
        if failure is not None:
            settled = None if error is not None else outcome.result()
            is_dead = isinstance(settled, Stored) and settled.state.status is Status.DEAD
            self._reports.report(claim, failure, is_dead=is_dead)
        if error is not None and completed is not None and kind_of(error) is not ErrorKind.OUTAGE:
            self._fail_uncompleted(claim, completed, error)
            return
        if error is not None:
            self._metrics.ended(claim.name, metrics.Outcome.UNKNOWN)
            _log.error(
                "nobody knows how the claim ended; if it did not, the task is tried again after its time",
                action="task_unsettled",
                queue=claim.queue,
                task=claim.task_id,
                error=summary_of(error),
            )
            return
        settled = outcome.result()
        self._metrics.ended(claim.name, metrics.outcome_of(settled, claim.failures))
        if not isinstance(settled, Refused):
            if settled.state.status is Status.COMPLETED:
                claim.tell(SkuldKind.COMPLETED, settled.revision)
        elif settled.reason is not Reason.ENDED:
            claim.tell(SkuldKind.FENCED)
            _log.warning(
                "a write of a claim that has ended was refused",
                action="task_fenced",
                queue=claim.queue,
                task=claim.task_id,
                claim=claim.number,
                reason=settled.reason.value,
            )

    def _fail_uncompleted(self, claim: WorkerClaim, head: Head, error: BaseException) -> None:
        """The engine can't take the completion: were that left alone, the body would run again, to no end."""
        outcome = raised(error)
        due = None if kind_of(error) is ErrorKind.POISON else self._backed_off(claim)
        failed = claim.settle(lambda stored: rules.fail(head, stored.state, claim.held, outcome.told, due))
        failed.add_done_callback(partial(self._ended, claim, None, outcome.error))

    def _told_of_end(self, claim: WorkerClaim, error: BaseException | None) -> None:
        for each in reversed(self._middleware):
            self._told(each.after, claim, error)

    def _told(self, hook: Callable[..., None], *arguments: Any) -> None:
        try:
            hook(*arguments)
        except BaseException as error:  # whatever a hook does, the task goes on
            self._errors.ignored(f"middleware {hook.__qualname__}", error)


def backoff_s(options: TaskOptions, failures: int) -> float:
    """Seconds that the next try waits at least after so many failures before this one.

    Raises:
        InvalidArgument: the function that says it gives no number of seconds from 0.
    """
    if not callable(options.backoff_s):
        return min(options.backoff_s * 2.0 ** min(failures, 60), options.max_backoff_s)
    given: object = options.backoff_s(failures + 1)
    if not isinstance(given, int | float) or not given >= 0:
        raise InvalidArgument(f"it gives {given!r}, which is no number of seconds from 0")
    return min(float(given), options.max_backoff_s)


def unread_before(error: str) -> int:
    """How often in a row a task could not be read, as its last error says."""
    found = _UNREAD.search(error)
    if found is None:
        return 0
    return 1 if found["times"] is None else int(found["times"])


def _out_of_time(head: Head) -> TimeoutError:
    return TimeoutError(f"the body took longer than timeout_s {head.timeout_s or 0.0:g}")
