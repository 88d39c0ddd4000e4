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

from rebalanser.errors import InvalidState, RebalanserError, RequestTooLarge
from rebalanser.tasks.claim import Claim, Facts, check_content
from rebalanser.tasks.execution.outcomes import GiveUp, Raised, Returned, raised, returned, summary_of
from rebalanser.tasks.functions import TaskBody, body_at
from rebalanser.tasks.model import Update

if TYPE_CHECKING:
    import sqlite3


@dataclass(frozen=True, slots=True)
class Begin:
    """To the child, first: what ``multiprocessing.spawn.prepare`` takes, and where each function is."""

    preparation: Mapping[str, Any]
    references: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ChildReady:
    """From the child: its functions are imported; or what went wrong."""

    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """To the child, which is idle: a body to call. ``deadline`` is that of the claim.

    ``max_bytes`` is the limit of an update, of a result, and of an error that is sent back.
    """

    facts: Facts
    deadline: float
    payload: bytes
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    """From the child: the body has raised; the error is pickled, None where it can't be or is too large.

    ``types`` are those of :class:`~rebalanser.tasks.execution.outcomes.Raised`.
    """

    told: str
    types: frozenset[str]
    summary: str
    error: bytes | None


@dataclass(frozen=True, slots=True)
class Done:
    """From the child: how the body has ended, and that it is idle."""

    outcome: Returned | Failed


@dataclass(frozen=True, slots=True)
class AskUpdate:
    """An update of the claim's log."""

    content: bytes


@dataclass(frozen=True, slots=True)
class AskLog:
    """A page of the log, of one claim from a number on or of all."""

    claim: int | None
    first: int


@dataclass(frozen=True, slots=True)
class AskRenewal:
    """A renewal of the claim."""


@dataclass(frozen=True, slots=True)
class AskDeadline:
    """Question for the end of the claim."""


ChildAsk: TypeAlias = AskUpdate | AskLog | AskRenewal | AskDeadline


@dataclass(frozen=True, slots=True)
class Question:
    """From the child: something that is asked of the claim; the answer has its number."""

    number: int
    ask: ChildAsk


@dataclass(frozen=True, slots=True)
class Answered:
    """To the child: what was asked for, or the error that was raised."""

    number: int
    value: Any = None
    error: RebalanserError | None = None


PATIENCE_S: Final = 1.0
"""Maximum seconds to wait for the worker to extend a claim; a paused worker does not."""


class SendQuestion(Protocol):
    """Asks the worker something of the claim."""

    def __call__(self, ask: ChildAsk, timeout_s: float | None = None) -> Any:
        """The answer; raises what the worker raised, and TimeoutError if it took longer."""


class ChildClaim(Claim):
    """A claim that another process holds."""

    def __init__(self, facts: Facts, deadline: float, ask: SendQuestion, max_bytes: int) -> None:
        super().__init__(facts, threading.Event())
        self._max_bytes = max_bytes
        self._deadline = deadline
        self._ask = ask

    @property
    def deadline(self) -> float:
        """See :attr:`Claim.deadline`; the last one that is known where the worker does not answer."""
        with contextlib.suppress(TimeoutError):
            self._deadline = float(self._ask(AskDeadline(), PATIENCE_S))
        return self._deadline

    def still_mine(self) -> bool:
        """See :meth:`Claim.still_mine`; the worker is asked once the time that it told is over."""
        if self.stop_requested.is_set():
            return False
        return time.monotonic() < self._deadline or time.monotonic() < self.deadline

    def update(self, content: bytes) -> int:
        """See :meth:`Claim.update`. What is over the limit does not get as far as the worker."""
        return int(self._ask(AskUpdate(check_content("an update", content, self._max_bytes))))

    def log_page(self, claim: int | None, first: int) -> Sequence[Update]:
        """See :meth:`Claim.log_page`."""
        return list(self._ask(AskLog(claim, first)))

    def complete_in(self, _connection: sqlite3.Connection, _result: bytes | None = None) -> None:
        """Refused: the worker renews the claim meanwhile, in transactions of its own.

        Raises:
            InvalidState: always.
        """
        raise InvalidState("complete_in needs a body that runs in a thread of the worker, not in a process")

    def renew(self) -> bool:
        """See :meth:`Claim.renew`."""
        return bool(self._ask(AskRenewal()))


_PR_SET_PDEATHSIG: Final = 1
_TERMINATED: Final = 128 + signal.SIGTERM
_pipes: list[Connection[Any, Any]] = []
"""The pipe to the worker, if this is a child. Held to the very end, as its end tells that of the process."""


def refuse_in_child() -> None:
    """See that a child starts no children of its own, as its module would that runs a queue when imported.

    Raises:
        InvalidState: this process is one that runs bodies.
    """
    if _pipes:
        raise InvalidState(
            "the process of a body was about to work on the queue itself, as the module does that when it is "
            "imported; put it under if __name__ == '__main__'"
        )


def main(file: int, worker: int) -> None:
    """Serve the worker, a process, over the pipe ``file`` until it closes that or is gone."""
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
    child = _Child(pipe, bodies)
    pipe.send(ChildReady())
    child.serve()


def _bodies(pipe: Connection[Any, Any]) -> dict[str, TaskBody]:
    begin: Begin = pipe.recv()
    multiprocessing.spawn.prepare(dict(begin.preparation))
    return {name: body_at(reference, name) for name, reference in begin.references.items()}


class _Child:
    """Caller of the bodies in the child process."""

    def __init__(self, pipe: Connection[Any, Any], bodies: Mapping[str, TaskBody]) -> None:
        self._pipe = pipe
        self._bodies = bodies
        self._work: queue.Queue[Work | None] = queue.Queue(maxsize=1)
        self._lock = threading.Lock()
        self._questions: dict[int, Future[Any]] = {}
        self._asked = 0
        self._claim: ChildClaim | None = None
        self._terminated = False

    def serve(self) -> None:
        """Call what the worker sends until there is nothing more to come."""
        signal.signal(signal.SIGTERM, self._terminate)
        threading.Thread(target=self._read, name="rebalanser-tasks-child", daemon=True).start()
        while (work := self._work.get()) is not None:
            done = Done(self._called(work))
            if self._terminated:
                sys.exit(_TERMINATED)
            self._send(done)

    def _called(self, work: Work) -> Returned | Failed:
        claim = ChildClaim(work.facts, work.deadline, self._ask, work.max_bytes)
        body = self._bodies[claim.name]
        self._claim = claim
        try:
            outcome = returned(body.call(claim, body.arguments(work.payload)))
        except BaseException as error:  # the body's own wish to exit is a failure too
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

    def _ask(self, ask: ChildAsk, timeout_s: float | None = None) -> Any:
        answer: Future[Any] = Future()
        with self._lock:
            self._asked += 1
            self._questions[self._asked] = answer
            self._pipe.send(Question(self._asked, ask))
        return answer.result(timeout_s)

    def _send(self, message: Done) -> None:
        with self._lock:
            self._pipe.send(message)

    def _read(self) -> None:
        try:
            while True:
                match self._pipe.recv():
                    case Work() as work:
                        self._work.put(work)
                    case Answered() as answered:
                        self._answer(answered)
                    case None:
                        self._work.put(None)
                        return
        except (EOFError, OSError):
            if self._claim is not None:
                os._exit(1)
            self._work.put(None)

    def _answer(self, answered: Answered) -> None:
        question = self._questions.pop(answered.number)
        if answered.error is None:
            question.set_result(answered.value)
        else:
            question.set_exception(answered.error)


def _sendable(outcome: Returned | Raised, max_bytes: int) -> Returned | Failed:
    """Prepare an outcome to be sent; a result over the limit fails here, before it is in the pipe."""
    if isinstance(outcome, Raised):
        return _failed(outcome, max_bytes)
    try:
        if outcome.result is not None:
            check_content("a result", outcome.result, max_bytes)
    except RequestTooLarge as error:
        return _failed(raised(GiveUp(str(error))), max_bytes)
    return outcome


def _failed(outcome: Raised, max_bytes: int) -> Failed:
    """Prepare an error to be sent: itself if it can be pickled and is small, and always its text."""
    try:
        pickled = pickle.dumps(outcome.error)
    except Exception:  # whatever its class does when it is pickled
        return Failed(outcome.told, outcome.types, summary_of(outcome.error), None)
    is_small = len(pickled) <= max_bytes
    return Failed(outcome.told, outcome.types, summary_of(outcome.error), pickled if is_small else None)
