"""Runs the bodies of tasks under their claims, and ends each claim by how its body ended (SK-15).

``Middleware`` has the hooks around every task: for tracing, error reports, and connections for bodies.
"""

from __future__ import annotations

import queue
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from rebalanser.core.clock import Clock
from rebalanser.core.tasks import rules
from rebalanser.core.tasks.failures import LONGEST_PAUSE_S, ErrorKind, kind_of, summary_of
from rebalanser.core.tasks.model import Head, Status, Stored, is_number
from rebalanser.core.tasks.rules import Decision, Reason, Refused
from rebalanser.core.tasks.writes import WriteFuture
from rebalanser.errors import Fenced, InvalidArgument, InvalidTask, RequestTooLarge, RetryLater
from rebalanser.history import SkuldKind
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks import metrics
from rebalanser.tasks.batcher import on_settled
from rebalanser.tasks.claim import Claim
from rebalanser.tasks.execution.outcomes import (
    MAX_ERROR,
    BodyOutcome,
    Cut,
    GiveUp,
    Raised,
    Retry,
    Returned,
    raised,
    returned,
)
from rebalanser.tasks.execution.worker_claim import WorkerClaim
from rebalanser.tasks.functions import OtherArguments, TaskBody, TaskOptions
from rebalanser.tasks.loops import ErrorPolicy, Loop
from rebalanser.tasks.metrics import TaskMetrics


@dataclass(frozen=True, slots=True)
class BodyCall:
    """One try: a function, its claim, and its checked arguments."""

    body: TaskBody
    claim: WorkerClaim
    head: Head
    payload: bytes
    arguments: dict[str, Any]

    def returned(self, value: object) -> BodyOutcome:
        """Return the outcome of the body that returned this, checked by its return type.

        A body that has completed its task in a transaction of its own may return nothing.
        """
        is_done = value is None and self.claim.is_completed_within
        return returned(value, None if is_done else self.body)


class Caller(Protocol):
    """Calls bodies. May be used from any thread; as many threads call at a time as bodies may run."""

    def open(self) -> None:
        """Prepare for calls; called once, before all else."""

    def call(self, job: BodyCall) -> BodyOutcome:
        """Call a body, and return its outcome. Raises nothing."""

    def begin(self, _job: BodyCall, /) -> Future[BodyOutcome] | None:
        """Begin a body that takes no thread, and return its future; None if it must be called."""

    def takes_thread(self, _body: TaskBody, /) -> bool:
        """True if this body must be called, and takes a thread until it ends."""

    def can_end(self, _body: TaskBody, /) -> bool:
        """True if ``call`` ends this body at its ``timeout_s`` and once its claim is lost."""

    def cut_off(self) -> None:
        """End all bodies that can be ended, now and from now on; returns at once."""

    def close(self) -> None:
        """Release all resources; no body is called any more."""


class ThreadCaller:
    """Calls each body in the calling thread. Only the body itself can end."""

    def open(self) -> None:
        """No-op."""

    def call(self, job: BodyCall) -> BodyOutcome:
        """Call a body. A body that tries to exit the process has failed."""
        try:
            return job.returned(job.body.call(job.claim, job.arguments))
        except BaseException as error:  # if this thread ended, the claim would be renewed for ever
            return raised(error)

    def begin(self, _job: BodyCall) -> None:
        """Return None: all bodies must be called."""

    def takes_thread(self, _body: TaskBody) -> bool:
        """Return True: all bodies take a thread."""
        return True

    def can_end(self, _body: TaskBody) -> bool:
        """Return False: no body can be ended."""
        return False

    def cut_off(self) -> None:
        """No-op: no body can be ended."""

    def close(self) -> None:
        """No-op."""


def cut_of(job: BodyCall, ends_at: float | None, now: float) -> Cut | None:
    """Return why a body must be ended now; None if it may go on. It times out at ``ends_at``."""
    if job.claim.stop_requested.is_set() or job.claim.deadline <= now:
        return Cut.LOST
    return Cut.TIMED_OUT if ends_at is not None and ends_at <= now else None


@dataclass(slots=True)
class BodyWaits:
    """Waits for bodies until they end or must be ended."""

    _waiting: set[threading.Event] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: bool = False

    def until(self, job: BodyCall, ended: Future[Any], limit_s: float | None = None) -> Cut | None:
        """Wait until ``ended`` is done, and return None, or until the body must be ended, and return why.

        It times out ``limit_s`` seconds from now.
        """
        woken = threading.Event()
        wake = woken.set
        job.claim.stop_requested.call_when_set(wake)
        ended.add_done_callback(lambda _: wake())
        with self._lock:
            self._waiting.add(woken)
        try:
            return self._until(job, ended, None if limit_s is None else time.monotonic() + limit_s, woken)
        finally:
            job.claim.stop_requested.forget(wake)
            with self._lock:
                self._waiting.discard(woken)

    def _until(
        self, job: BodyCall, ended: Future[Any], ends_at: float | None, woken: threading.Event
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
        """End all bodies, now and from now on."""
        self._stopped = True
        with self._lock:
            for each in self._waiting:
                each.set()


_UNREAD: Final = re.compile(r" \(unread (?:once|(?P<times>[0-9]{1,6}) times)\)\Z")
_log = get_logger()


class Bodies:
    """Runs tries of a queue's functions, and ends their claims. May be used from any thread.

    ``clock`` gives the time at which a failed task is due again, ``caller`` calls the functions.
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
        """Return the names of the functions."""
        return tuple(self._functions)

    def can_end(self, name: str) -> bool:
        """True if ``work`` ends the bodies of a function at their time limit or once a claim is lost."""
        return self._caller.can_end(self._functions[name])

    def close(self) -> None:
        """Report all pending failures; called once all tries have ended."""
        self._reports.close()

    def cut_off(self) -> None:
        """End all bodies that can be ended, and give their tasks back. Returns at once."""
        self._caller.cut_off()

    def takes_thread(self, name: str) -> bool:
        """True if ``work`` takes its thread for as long as the body of a function runs."""
        return self._caller.takes_thread(self._functions[name])

    def work(self, claim: WorkerClaim, head: Head, payload: bytes) -> Future[None] | None:
        """Run one try, from its arguments to the end of its claim. Raises nothing of a body or a hook.

        Returns None if it has ended; else a future that is done once it ends in another thread.
        """
        body = claim.body = self._functions[claim.name]
        try:
            got = claim.fill_results(head, payload)
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
        except BaseException as error:  # a validator may raise anything
            self.fail(claim, head, error)
            return None
        for each in self._middleware:
            self._call_hook(each.before, claim)
        job = BodyCall(body, claim, head, payload, arguments)
        self._metrics.started(claim.name)
        began_at = self._clock.now()
        begun = self._caller.begin(job)
        if begun is None:
            outcome = self._caller.call(job)
            self._metrics.ran(claim.name, self._clock.now() - began_at)
            self._called(claim, head, outcome)
            return None
        ended: Future[None] = Future()

        def end(outcome: Future[BodyOutcome]) -> None:
            self._metrics.ran(claim.name, self._clock.now() - began_at)
            try:
                self._called(claim, head, outcome.result())
            except BaseException as error:  # the worker waits for this future
                ended.set_exception(error)
            else:
                ended.set_result(None)

        begun.add_done_callback(end)
        return ended

    def _called(self, claim: WorkerClaim, head: Head, outcome: BodyOutcome) -> None:
        """End the claim by how its body has ended."""
        match outcome:
            case Returned(result=result):
                self._returned(claim, head, result)
            case Raised():
                self._raised(claim, head, outcome)
            case Cut.TIMED_OUT:
                self._call_after_hooks(claim, _out_of_time(head))
                self.time_out(claim, head)
            case Cut.LOST | Cut.STOPPED:
                self._call_after_hooks(claim, None)
                self.give_back(claim)

    def time_out(self, claim: WorkerClaim, head: Head) -> None:
        """Fail the claim of a try that has taken too long; its body may still run."""
        self._fail(claim, head, raised(_out_of_time(head)), self._backed_off(claim))

    def fail(self, claim: WorkerClaim, head: Head, error: BaseException) -> None:
        """Fail a try by an error that its body did not raise."""
        self._fail(claim, head, raised(error), self._backed_off(claim))

    def give_back(self, claim: WorkerClaim) -> None:
        """Give a task back, as the worker stops; the try is not counted."""
        self._end(claim, lambda stored: rules.release(stored.state, claim.held))

    def _give_back_unread(self, claim: WorkerClaim, error: OtherArguments) -> None:
        """Give back a task that this worker can't read, with a growing delay and no failure (SK-21)."""
        self._errors.unreadable(claim.name, error)
        before = unread_before(claim.error_before)
        times = "once" if not before else f"{before + 1} times"
        counted = f" (unread {times})"
        reason = raised(error).text[: MAX_ERROR - len(counted)] + counted
        due = self._backed_off(claim, before)
        self._end(claim, lambda stored: rules.release(stored.state, claim.held, due, reason))

    def _give_back_without_results(self, claim: WorkerClaim, error: RetryLater) -> None:
        """Give back a task whose results can't be read while the engine is away; no failure is counted.

        It waits for the longest pause of a loop: the function's backoff is for its own failures.
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
        self._call_after_hooks(claim, None)
        self._end(claim, lambda stored: rules.complete(stored.state, claim.held, result), head)

    def _raised(self, claim: WorkerClaim, head: Head, outcome: Raised) -> None:
        match outcome.error:
            case Fenced() if claim.is_over:
                self._call_after_hooks(claim, None)
                return
            case Retry(delay_s=delay_s):
                due: float | None = self._clock.wall() + delay_s
            case GiveUp() | InvalidTask():
                due = None
            case _ if not outcome.is_retried(self._functions[claim.name].options.retry_on):
                due = None
            case _:
                due = self._backed_off(claim)
        self._call_after_hooks(claim, outcome.error)
        self._fail(claim, head, outcome, due)

    def _backed_off(self, claim: WorkerClaim, failures: int | None = None) -> float:
        """Return when a task is due again after ``failures`` earlier failures, those of its tries if None."""
        options = self._functions[claim.name].options
        try:
            wait_s = backoff_s(options, claim.failures if failures is None else failures)
        except BaseException as error:  # the user's function may raise anything
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
            lambda stored: rules.fail(head, stored.state, claim.held, outcome.text, due),
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
            on_settled(claim.settle(rule), partial(self._ended, claim, completed, failure))
        elif failure is not None:
            self._reports.report(claim, failure, is_dead=False)

    def _ended(
        self,
        claim: WorkerClaim,
        completed: Head | None,
        failure: BaseException | None,
        outcome: WriteFuture[Stored | Refused],
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
            self._metrics.ended(claim.name, metrics.ClaimOutcome.UNKNOWN)
            _log.error(
                "it is unknown if the claim has ended; if not, the task is retried after its time",
                action="task_unsettled",
                queue=claim.queue,
                task=claim.task_id,
                error=summary_of(error),
            )
            return
        settled = outcome.result()
        self._metrics.ended(claim.name, metrics.claim_outcome(settled, claim.failures))
        if not isinstance(settled, Refused):
            if settled.state.status is Status.COMPLETED:
                claim.record(SkuldKind.COMPLETED, settled.revision)
        elif settled.reason is not Reason.ENDED:
            claim.record(SkuldKind.FENCED)
            _log.warning(
                "a write of a claim that has ended was refused",
                action="task_fenced",
                queue=claim.queue,
                task=claim.task_id,
                claim=claim.number,
                reason=settled.reason.value,
            )

    def _fail_uncompleted(self, claim: WorkerClaim, head: Head, error: BaseException) -> None:
        """Fail a task whose completion the engine refuses: else the body would run again and again."""
        outcome = raised(error)
        due = None if kind_of(error) is ErrorKind.POISON else self._backed_off(claim)
        failed = claim.settle(lambda stored: rules.fail(head, stored.state, claim.held, outcome.text, due))
        on_settled(failed, partial(self._ended, claim, None, outcome.error))

    def _call_after_hooks(self, claim: WorkerClaim, error: BaseException | None) -> None:
        for each in reversed(self._middleware):
            self._call_hook(each.after, claim, error)

    def _call_hook(self, hook: Callable[..., None], *arguments: Any) -> None:
        try:
            hook(*arguments)
        except BaseException as error:  # a hook never stops the task
            self._errors.ignored(f"middleware {hook.__qualname__}", error)


def backoff_s(options: TaskOptions, failures: int) -> float:
    """Return the minimum seconds before the next try, after ``failures`` earlier failures.

    Raises:
        InvalidArgument: the function ``backoff_s`` returns no number, or a negative one.
    """
    if not callable(options.backoff_s):
        return min(options.backoff_s * 2.0 ** min(failures, 60), options.max_backoff_s)
    given: object = options.backoff_s(failures + 1)
    if not is_number(given) or not given >= 0:
        raise InvalidArgument(f"it gives {given!r}, which is not a number of seconds, 0 or more")
    return min(float(given), options.max_backoff_s)


def unread_before(error: str) -> int:
    """Return the number of times in a row that a task could not be read, by its last error."""
    found = _UNREAD.search(error)
    if found is None:
        return 0
    return 1 if found["times"] is None else int(found["times"])


def _out_of_time(head: Head) -> TimeoutError:
    return TimeoutError(f"the body took longer than timeout_s {head.timeout_s or 0.0:g}")


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
