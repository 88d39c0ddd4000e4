"""Scripts: the store accesses of the batcher and of partition owners, as generators without I/O.

A script yields a request, receives the store's answer or its error, and returns a result. It does no I/O and
takes no lock, so that threads and the simulator run the same code. Threads run it by ``run_script``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from rebalanser.core.tasks.model import LimitId, TaskId
from rebalanser.core.tasks.store import Write
from rebalanser.tasks.writes.pending import PendingWrite

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Apply:
    """Carry out writes; the answer has one for each, as of ``apply``."""

    writes: Sequence[Write]


@dataclass(frozen=True, slots=True)
class ReadTasks:
    """Read tasks; the answer has those that exist, by id."""

    ids: Sequence[TaskId]


@dataclass(frozen=True, slots=True)
class ReadPage:
    """Read open tasks of a partition; the answer is a ``Page``."""

    partition: int
    after: TaskId | None
    limit: int


@dataclass(frozen=True, slots=True)
class ReadPayloads:
    """Read payloads; the answer has those that could be read, by id."""

    ids: Sequence[TaskId]


@dataclass(frozen=True, slots=True)
class ReadRates:
    """Read the marks of rate limits; the answer has those that exist, by limit."""

    limits: Sequence[LimitId]


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit pending writes to the batcher; answered at once."""

    pending_writes: Sequence[PendingWrite[Any]]


@dataclass(frozen=True, slots=True)
class WriteHere(Submit):
    """Submit pending writes and, if nothing else is to be written, write them before the answer."""


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until all pending writes are settled, also those that fail."""

    pending_writes: Sequence[PendingWrite[Any]]


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait before the next request."""

    seconds: float


Request: TypeAlias = Apply | ReadTasks | ReadPage | ReadPayloads | ReadRates | Submit | Await | Sleep
Script: TypeAlias = Generator[Request, Any, ResultT]


def run_script(
    script: Generator[RequestT, Any, ResultT],
    perform: Callable[[RequestT], Any],
    lock: AbstractContextManager[object] | None = None,
) -> ResultT:
    """Run a script, and return its result; errors of requests are thrown into it.

    ``lock`` is held while the script runs, and released during requests.
    """
    send: Callable[[Any], RequestT] = script.send
    throw: Callable[[Any], RequestT] = script.throw
    if lock is not None:
        send, throw = _within(lock, send), _within(lock, throw)
    try:
        request = send(None)
        while True:
            try:
                answer = perform(request)
            except BaseException as error:
                request = throw(error)
            else:
                request = send(answer)
    except StopIteration as ended:
        result: ResultT = ended.value
        return result


def _within(
    lock: AbstractContextManager[object], advance: Callable[[Any], RequestT]
) -> Callable[[Any], RequestT]:
    def locked(answer: Any) -> RequestT:
        with lock:
            return advance(answer)

    return locked
