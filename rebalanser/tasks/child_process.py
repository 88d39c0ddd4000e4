"""The child process of a body: calls its functions, and sends every write to the worker."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing.spawn
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeAlias

from rebalanser.core.tasks.failures import summary_of
from rebalanser.core.tasks.model import Update
from rebalanser.errors import InvalidState, RebalanserError, RequestTooLarge
from rebalanser.tasks.claim import Claim, ClaimFacts, check_content
from rebalanser.tasks.execution.outcomes import GiveUp, Raised, Returned, raised, returned
from rebalanser.tasks.functions import TaskBody, body_at

if TYPE_CHECKING:
    import sqlite3


@dataclass(frozen=True, slots=True)
class LoadFunctions:
    """First message to the child: data for ``multiprocessing.spawn.prepare``, a reference per function."""

    preparation: Mapping[str, Any]
    references: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ChildReady:
    """Message from the child: its functions are imported, unless there is a ``problem``."""

    problem: str | None = None


@dataclass(frozen=True, slots=True)
class RunBody:
    """Message to the idle child: a body to call. ``deadline`` is that of the claim.

    ``max_bytes`` is the limit of an update, of a result, and of an error that is sent back.
    """

    facts: ClaimFacts
    deadline: float
    payload: bytes
    max_bytes: int


@dataclass(frozen=True, slots=True)
class BodyFailed:
    """Outcome of a body that has raised; ``error`` is pickled, None if it can't be or is too large.

    ``types`` are those of ``Raised``.
    """

    text: str
    types: frozenset[str]
    summary: str
    error: bytes | None


@dataclass(frozen=True, slots=True)
class BodyDone:
    """Message from the child: the outcome of the body; the child is idle."""

    outcome: Returned | BodyFailed


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """Request to add to the claim's log."""

    content: bytes


@dataclass(frozen=True, slots=True)
class LogRequest:
    """Request for a page of the log, of one claim or of all (None), from a number on."""

    claim: int | None
    first: int


@dataclass(frozen=True, slots=True)
class RenewalRequest:
    """Request to renew the claim."""


@dataclass(frozen=True, slots=True)
class DeadlineRequest:
    """Request for the deadline of the claim."""


ChildRequest: TypeAlias = UpdateRequest | LogRequest | RenewalRequest | DeadlineRequest


@dataclass(frozen=True, slots=True)
class NumberedRequest:
    """Message from the child: a numbered request to the claim."""

    number: int
    request: ChildRequest


@dataclass(frozen=True, slots=True)
class NumberedAnswer:
    """Message to the child: the answer to the request of this number, or the error that it raised."""

    number: int
    value: Any = None
    error: RebalanserError | None = None


ANSWER_TIMEOUT_S: Final = 1.0
"""Maximum seconds to wait for the worker to extend a claim; a paused worker does not."""


class SendRequest(Protocol):
    """Sends a request of the claim to the worker."""

    def __call__(self, request: ChildRequest, timeout_s: float | None = None) -> Any:
        """Return the answer; raises what the worker raised, and TimeoutError if it took longer."""


class ChildClaim(Claim):
    """A claim that another process holds."""

    def __init__(self, facts: ClaimFacts, deadline: float, request: SendRequest, max_bytes: int) -> None:
        super().__init__(facts, threading.Event())
        self._max_bytes = max_bytes
        self._deadline = deadline
        self._request = request

    @property
    def deadline(self) -> float:
        """See ``Claim.deadline``; the last known one if the worker does not answer."""
        with contextlib.suppress(TimeoutError):
            self._deadline = float(self._request(DeadlineRequest(), ANSWER_TIMEOUT_S))
        return self._deadline

    def still_mine(self) -> bool:
        """See ``Claim.still_mine``; requests the deadline again once the known one has passed."""
        if self.stop_requested.is_set():
            return False
        return time.monotonic() < self._deadline or time.monotonic() < self.deadline

    def update(self, content: bytes) -> int:
        """See ``Claim.update``. An update over the limit fails here, before it is sent."""
        return int(self._request(UpdateRequest(check_content("an update", content, self._max_bytes))))

    def log_page(self, claim: int | None, first: int) -> Sequence[Update]:
        """See ``Claim.log_page``."""
        return list(self._request(LogRequest(claim, first)))

    def complete_in(self, _connection: sqlite3.Connection, _result: bytes | None = None) -> None:
        """Refuse: the worker renews the claim meanwhile, in transactions of its own.

        Raises:
            InvalidState: always.
        """
        raise InvalidState("complete_in needs a body that runs in a thread of the worker, not in a process")

    def renew(self) -> bool:
        """See ``Claim.renew``."""
        return bool(self._request(RenewalRequest()))


_PR_SET_PDEATHSIG: Final = 1
_TERMINATED: Final = 128 + signal.SIGTERM
_pipes: list[Connection[Any, Any]] = []
"""Pipes to the worker, if this is a child; open until the process ends, as their end reports that."""


def refuse_in_child() -> None:
    """Raise in a child: it starts no children of its own, as an import that runs a queue would.

    Raises:
        InvalidState: this process is one that runs bodies.
    """
    if _pipes:
        raise InvalidState(
            "the process of a body was about to work on the queue itself, as the module does that when it is "
            "imported; put it under if __name__ == '__main__'"
        )


def main(file: int, worker: int) -> None:
    """Serve the process ``worker`` over the pipe ``file``, until it closes the pipe or is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != worker:
        os._exit(1)
    pipe: Connection[Any, Any] = Connection(file)
    _pipes.append(pipe)
    try:
        bodies = _bodies(pipe)
    except EOFError:
        return
    except BaseException as error:  # whatever a module does when it is imported
        pipe.send(ChildReady(f"{type(error).__name__}: {error}"))
        return
    child = _BodyServer(pipe, bodies)
    pipe.send(ChildReady())
    child.serve()


def _bodies(pipe: Connection[Any, Any]) -> dict[str, TaskBody]:
    begin: LoadFunctions = pipe.recv()
    multiprocessing.spawn.prepare(dict(begin.preparation))
    return {name: body_at(reference, name) for name, reference in begin.references.items()}


class _BodyServer:
    """Caller of the bodies in the child process."""

    def __init__(self, pipe: Connection[Any, Any], bodies: Mapping[str, TaskBody]) -> None:
        self._pipe = pipe
        self._bodies = bodies
        self._work: queue.Queue[RunBody | None] = queue.Queue(maxsize=1)
        self._lock = threading.Lock()
        self._answers: dict[int, Future[Any]] = {}
        self._sent = 0
        self._claim: ChildClaim | None = None
        self._terminated = False

    def serve(self) -> None:
        """Call the bodies that the worker sends, until it sends no more."""
        signal.signal(signal.SIGTERM, self._terminate)
        threading.Thread(target=self._read, name="rebalanser-tasks-child", daemon=True).start()
        while (work := self._work.get()) is not None:
            done = BodyDone(self._called(work))
            if self._terminated:
                sys.exit(_TERMINATED)
            self._send(done)

    def _called(self, work: RunBody) -> Returned | BodyFailed:
        claim = ChildClaim(work.facts, work.deadline, self._request, work.max_bytes)
        body = self._bodies[claim.name]
        self._claim = claim
        try:
            outcome = returned(body.call(claim, body.arguments(work.payload)), body)
        except BaseException as error:  # SystemExit by the body is a failure too
            outcome = raised(error)
        finally:
            self._claim = None
        return _sendable(outcome, work.max_bytes)

    def _terminate(self, _number: int, _frame: FrameType | None) -> NoReturn:
        self._terminated = True
        if self._claim is not None:
            # A thread of its own: this very one may have been interrupted with the lock of the event.
            threading.Thread(target=self._claim.stop_requested.set, daemon=True).start()
        sys.exit(_TERMINATED)

    def _request(self, request: ChildRequest, timeout_s: float | None = None) -> Any:
        answer: Future[Any] = Future()
        with self._lock:
            self._sent += 1
            self._answers[self._sent] = answer
            self._pipe.send(NumberedRequest(self._sent, request))
        return answer.result(timeout_s)

    def _send(self, message: BodyDone) -> None:
        with self._lock:
            self._pipe.send(message)

    def _read(self) -> None:
        try:
            while True:
                match self._pipe.recv():
                    case RunBody() as work:
                        self._work.put(work)
                    case NumberedAnswer() as answered:
                        self._answer(answered)
                    case None:
                        self._work.put(None)
                        return
        except (EOFError, OSError):
            if self._claim is not None:
                os._exit(1)
            self._work.put(None)

    def _answer(self, answered: NumberedAnswer) -> None:
        question = self._answers.pop(answered.number)
        if answered.error is None:
            question.set_result(answered.value)
        else:
            question.set_exception(answered.error)


def _sendable(outcome: Returned | Raised, max_bytes: int) -> Returned | BodyFailed:
    """Prepare an outcome to be sent; a result over the limit fails here, before it is in the pipe."""
    if isinstance(outcome, Raised):
        return _failed(outcome, max_bytes)
    try:
        if outcome.result is not None:
            check_content("a result", outcome.result, max_bytes)
    except RequestTooLarge as error:
        return _failed(raised(GiveUp(str(error))), max_bytes)
    return outcome


def _failed(outcome: Raised, max_bytes: int) -> BodyFailed:
    """Prepare an error to be sent: itself if it can be pickled and is small, and always its text."""
    try:
        pickled = pickle.dumps(outcome.error)
    except Exception:  # whatever its class does when it is pickled
        return BodyFailed(outcome.text, outcome.types, summary_of(outcome.error), None)
    is_small = len(pickled) <= max_bytes
    return BodyFailed(outcome.text, outcome.types, summary_of(outcome.error), pickled if is_small else None)
