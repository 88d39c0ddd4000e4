"""Scripts: what the writer and the owner of partitions do with the store, without the store.

A script is a generator: it yields a request, is sent the answer or thrown the error of the store, and returns
its result. It does no I/O and takes no lock, so that threads and the simulator run the same code.
:func:`run_script` is the driver of a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from rebalanser.tasks.asks import Ask
from rebalanser.tasks.engine import Write
from rebalanser.tasks.model import TaskId

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Apply:
    """Carry out writes; the answer is one for each, as of :meth:`~rebalanser.tasks.engine.Engine.apply`."""

    writes: Sequence[Write]


@dataclass(frozen=True, slots=True)
class ReadTasks:
    """Read tasks; the answer has those that exist, by id."""

    ids: Sequence[TaskId]


@dataclass(frozen=True, slots=True)
class ReadPage:
    """Read open tasks of a partition; the answer is a :class:`~rebalanser.tasks.engine.Page`."""

    partition: int
    after: TaskId | None
    limit: int


@dataclass(frozen=True, slots=True)
class ReadPayloads:
    """Read payloads; the answer has those that could be read, by id."""

    ids: Sequence[TaskId]


@dataclass(frozen=True, slots=True)
class Submit:
    """Have these written; answered at once."""

    asks: Sequence[Ask[Any]]


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until all of these are settled, in whatever way."""

    asks: Sequence[Ask[Any]]


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait before the next request."""

    seconds: float


Request: TypeAlias = Apply | ReadTasks | ReadPage | ReadPayloads | Submit | Await | Pause
Script: TypeAlias = Generator[Request, Any, ResultT]


def run_script(script: Script[ResultT], perform: Callable[[Request], Any]) -> ResultT:
    """Perform the requests of a script; its result.

    An error of a request is the script's to handle; what is no ``Exception`` ends it.
    """
    try:
        request = next(script)
        while True:
            try:
                answer = perform(request)
            except Exception as error:
                request = script.throw(error)
            else:
                request = script.send(answer)
    except StopIteration as ended:
        result: ResultT = ended.value
        return result
