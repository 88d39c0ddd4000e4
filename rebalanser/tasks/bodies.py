"""Runs the bodies of tasks, each under its claim, and ends the claim by what became of the body (SK-15)."""

from __future__ import annotations

import contextlib
import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from pydantic_core import PydanticSerializationError, to_json

from rebalanser.errors import Fenced, InvalidTask
from rebalanser.history import SkuldKind
from rebalanser.runtime.clock import Clock
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks import rules
from rebalanser.tasks.claim import Claim
from rebalanser.tasks.functions import TaskBody
from rebalanser.tasks.middleware import Middleware
from rebalanser.tasks.model import Head, Status, Stored
from rebalanser.tasks.options import TaskOptions
from rebalanser.tasks.rules import Decision, Reason, Refused

MAX_ERROR: Final = 4000
"""The most characters of an error that are kept with a task."""
JITTER: Final = 0.25
_log = get_logger()


class Retry(Exception):
    """Raised by a body: this try failed, and the next one is not to come before ``delay_s`` seconds."""

    def __init__(self, message: str = "the task asks to be tried again", *, delay_s: float) -> None:
        super().__init__(message)
        self.delay_s = delay_s


class GiveUp(Exception):
    """Raised by a body: no further try can help. The task is dead, for an operator to look at."""


class Bodies:
    """The functions of a queue, and how each try of one ends. May be used from any thread.

    ``clock`` tells when a failed task is due again.
    """

    def __init__(
        self,
        functions: Mapping[str, TaskBody],
        middleware: Sequence[Middleware],
        clock: Clock,
    ) -> None:
        self._functions = functions
        self._middleware = middleware
        self._clock = clock

    def names(self) -> Sequence[str]:
        """The functions that there are."""
        return tuple(self._functions)

    def work(self, claim: Claim, head: Head, payload: bytes) -> None:
        """One try, from its arguments to the end of its claim. Raises nothing."""
        body = self._functions[claim.name]
        try:
            arguments = body.arguments(payload)
        except InvalidTask as error:
            self._fail(claim, head, error, due=None)
            return
        for each in self._middleware:
            self._told(each.before, claim)
        try:
            result = _as_json(body.call(claim, arguments))
        except Fenced:
            self._told_of_end(claim, None)
        except Retry as error:
            self._told_of_end(claim, error)
            self._fail(claim, head, error, due=self._clock.wall() + error.delay_s)
        except (GiveUp, InvalidTask) as error:
            self._told_of_end(claim, error)
            self._fail(claim, head, error, due=None)
        except Exception as error:
            self._told_of_end(claim, error)
            self._fail(claim, head, error, due=self._clock.wall() + backoff_s(body.options, claim.failures))
        else:
            self._told_of_end(claim, None)
            self._end(claim, lambda stored: rules.complete(stored.state, claim.held, result))

    def time_out(self, claim: Claim, head: Head) -> None:
        """The try has taken too long: its claim fails now, whatever the body still does."""
        limit_s = head.timeout_s or 0.0
        due = self._clock.wall() + backoff_s(self._functions[claim.name].options, claim.failures)
        self._fail(claim, head, TimeoutError(f"the body took longer than timeout_s {limit_s:g}"), due)

    def give_back(self, claim: Claim) -> None:
        """The worker stops: the task goes back as if it had not been tried."""
        self._end(claim, lambda stored: rules.release(stored.state, claim.held))

    def _fail(self, claim: Claim, head: Head, error: BaseException, due: float | None) -> None:
        _log.warning(
            "a task's try failed",
            action="task_failed",
            queue=claim.queue,
            task=claim.task_id,
            name=claim.name,
            claim=claim.number,
            error=repr(error),
        )
        told = "".join(traceback.format_exception(error)).strip()[-MAX_ERROR:]
        self._end(claim, lambda stored: rules.fail(head, stored.state, claim.held, told, due))

    def _end(self, claim: Claim, rule: Callable[[Stored], Decision]) -> None:
        if claim.is_over:
            return
        claim.settle(rule).add_done_callback(partial(self._ended, claim))

    def _ended(self, claim: Claim, outcome: Future[Stored | Refused]) -> None:
        error = outcome.exception()
        if error is not None:
            _log.error(
                "nobody knows how the claim ended; if it did not, the task is tried again after its time",
                action="task_unsettled",
                queue=claim.queue,
                task=claim.task_id,
                error=repr(error),
            )
            return
        settled = outcome.result()
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

    def _told_of_end(self, claim: Claim, error: BaseException | None) -> None:
        for each in reversed(self._middleware):
            self._told(each.after, claim, error)

    def _told(self, hook: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(Exception):
            hook(*arguments)


def backoff_s(options: TaskOptions, failures: int) -> float:
    """How long the next try waits after so many failures before this one, in seconds."""
    wait_s = min(options.backoff_s * 2.0 ** min(failures, 60), options.max_backoff_s)
    return wait_s * (1 + random.uniform(0, JITTER))  # noqa: S311 - spreads load, hides nothing


def _as_json(result: object) -> bytes | None:
    if result is None:
        return None
    try:
        return to_json(result)
    except PydanticSerializationError as error:
        raise GiveUp(f"the result is no JSON: {error}") from error
