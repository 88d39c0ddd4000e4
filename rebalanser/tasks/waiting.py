"""Waiting for the end of a task: notification of callers, their results, and hints why it takes long."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from rebalanser.core.clock import Clock
from rebalanser.core.tasks.model import Status, Stored, TaskId, is_number
from rebalanser.core.tasks.store import Change, ChangesLost
from rebalanser.errors import InvalidArgument, NotSettled, TaskFailed
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks.context import Beginning, Context
from rebalanser.tasks.execution.outcomes import split_error
from rebalanser.tasks.functions import TaskBody, plain_value, require_id

CLOSED: Final = frozenset({Status.COMPLETED, Status.DEAD, Status.CANCELLED})
"""Statuses that a task does not leave by itself."""
SLACK_S: Final = 1.0
"""Seconds beyond its timeout in which a wait may still read its task, and the reason for its wait."""
REPORT_S: Final = 30.0
"""Seconds between two log lines about the bodies of a worker that all wait."""
_log = get_logger()


class WaitLimit:
    """Limit of the time that the requests of one wait take: its timeout and ``SLACK_S``.

    No request takes more than ``request_timeout_s``.
    """

    def __init__(self, timeout_s: float, request_timeout_s: float) -> None:
        self._request_timeout_s = request_timeout_s
        self._ends_at = time.monotonic() + timeout_s + SLACK_S

    @property
    def request_s(self) -> float:
        """Maximum seconds of a request that begins now."""
        return max(0.0, min(self._request_timeout_s, self._ends_at - time.monotonic()))


class CompletionNotifier:
    """Notifies all callers of a process that wait for tasks of a queue, by one watch while there are any.

    ``context`` gives the queue's context, or raises RegistryUnavailable. May be used from any thread.
    """

    def __init__(self, context: Callable[[], Context]) -> None:
        self._context = context
        self._beginning: Beginning | None = None
        """The watch, which a listener begins for all; None without listeners."""
        self._watching = threading.Lock()
        # Not the lock of the watch: to close the watch waits for listeners that are being called.
        self._lock = threading.Lock()
        self._listeners: dict[TaskId, list[Callable[[], None]]] = {}

    def listen(self, task: TaskId, changed: Callable[[], None], timeout_s: float = math.inf) -> None:
        """Call ``changed``, in any thread, whenever a task may have changed.

        It takes ``timeout_s`` seconds at most, and no more than the queue's timeout.

        Raises:
            RegistryUnavailable: the engine did not answer in time.
        """
        context, left_s = self._context(), timeout_s
        ends_at = time.monotonic() + timeout_s
        while not self._is_heard(context, task, changed, left_s):
            left_s = max(0.0, ends_at - time.monotonic())

    def _is_heard(
        self, context: Context, task: TaskId, changed: Callable[[], None], timeout_s: float
    ) -> bool:
        """Listen; False if the thread that was to begin the watch could not, and this one should."""
        mine = Beginning(timeout_s)
        with self._watching:
            with self._lock:
                self._listeners.setdefault(task, []).append(changed)
            beginning = self._beginning = self._beginning or mine
        try:
            if beginning is mine:
                self._begin(context, mine)
                return True
            is_heard = beginning.has_begun(timeout_s)
        except BaseException:
            self.leave(task, changed)
            raise
        if not is_heard:
            self.leave(task, changed)
        return is_heard

    def _begin(self, context: Context, beginning: Beginning) -> None:
        try:
            watch = context.watch(self._receive, self._is_awaited, beginning.timeout_s)
        except BaseException as error:
            with self._watching:
                self._beginning = None
            beginning.fail(error)
            raise
        beginning.succeed(watch)

    def leave(self, task: TaskId, changed: Callable[[], None]) -> None:
        """Stop calling ``changed``."""
        with self._watching:
            self._forget(task, changed)
            if not self._listeners and self._beginning is not None:
                self._beginning.watch.close()
                self._beginning = None

    def _forget(self, task: TaskId, changed: Callable[[], None]) -> None:
        with self._lock:
            self._listeners[task].remove(changed)
            if not self._listeners[task]:
                del self._listeners[task]

    def _is_awaited(self, change: Change) -> bool:
        return change.task in self._listeners

    def _receive(self, news: Sequence[Stored] | ChangesLost) -> None:
        with self._lock:
            tasks = (
                list(self._listeners) if isinstance(news, ChangesLost) else [each.head.id for each in news]
            )
            listeners = [listener for task in tasks for listener in self._listeners.get(task, ())]
        for listener in listeners:
            listener()


class WaitingBodies:
    """Counts the bodies of a worker that wait for tasks of its queue: if all wait, none runs those tasks.

    ``bodies`` run at a time. May be used from any thread.
    """

    def __init__(self, queue: str, bodies: int, clock: Clock) -> None:
        self.queue = queue
        self._bodies = bodies
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting = 0
        self._reported = -math.inf

    def enter(self) -> None:
        """Count the waits of this thread from now on, and of coroutines that it begins."""
        _WAITING_BODIES.set(self)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count one wait."""
        with self._lock:
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1

    def hint(self, stored: Stored) -> str:
        """Return, and log, a hint that no body of this process can run a task; empty if one can."""
        now = self._clock.now()
        with self._lock:
            if stored.state.status is not Status.WAITING or self._waiting < self._bodies:
                return ""
            is_due = now - self._reported >= REPORT_S
            if is_due:
                self._reported = now
        hint = (
            f"all bodies of this worker ({self._bodies}) wait for tasks of their own queue; unless "
            "another worker runs those, they wait for ever: raise the concurrency, or enqueue with after="
        )
        if is_due:
            _log.warning(hint, action="task_bodies_wait", queue=self.queue, task=stored.head.id)
        return f"; {hint}"


_WAITING_BODIES: ContextVar[WaitingBodies | None] = ContextVar("waiting_bodies", default=None)


@contextmanager
def waiting_for(queue: str) -> Iterator[Callable[[Stored], str]]:
    """Count a wait for a task of a queue; yields ``WaitingBodies.hint``, or no hint."""
    bodies = _WAITING_BODIES.get()
    if bodies is None or bodies.queue != queue:
        yield lambda _: ""
    else:
        with bodies.counted():
            yield bodies.hint


def refuse_wait(task: object, timeout_s: object) -> None:
    """Check the arguments of a wait.

    Raises:
        InvalidArgument: ``task`` is not text, or ``timeout_s`` no number of seconds from 0.
    """
    require_id(task)
    if not is_number(timeout_s) or not timeout_s >= 0:
        raise InvalidArgument(f"timeout_s is {timeout_s!r}: give seconds from 0")


def not_settled(stored: Stored, timeout_s: float, hint: str = "") -> NotSettled:
    """Return the error of a task that is not closed after ``timeout_s`` seconds."""
    return NotSettled(f"task {stored.head.id} is {stored.state.status} after {timeout_s:g} s{hint}")


def still_spooled(task: TaskId, timeout_s: float) -> NotSettled:
    """Return the error of a task that the engine does not have after ``timeout_s`` seconds."""
    return NotSettled(
        f"task {task} was not forwarded by its outbox within {timeout_s:g} s: see rebalanser tasks outbox"
    )


def value_of(stored: Stored, functions: Mapping[str, TaskBody]) -> Any:
    """Return the result of a closed task; plain JSON if its function is not known here.

    Raises:
        TaskFailed: it is dead or cancelled.
        InvalidTask: the result does not fit the function's return type, or is not JSON.
    """
    state = stored.state
    if state.status is not Status.COMPLETED:
        kind, message = split_error(state.error)
        reason = f"{kind}: {message}" if kind and message else kind or message
        if not reason and state.status is Status.DEAD:
            reason = "no try has failed"
        elif state.status is Status.CANCELLED:
            reason = "requeue() tries it again" + (f"; its last try failed: {reason}" if reason else "")
        raise TaskFailed(
            f"task {stored.head.id} is {state.status}: {reason}", error_type=kind, error_text=state.error
        )
    body = functions.get(stored.head.name)
    if body is not None:
        return body.value(state.result)
    return None if state.result is None else plain_value(stored.head.name, state.result)
