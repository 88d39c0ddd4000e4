"""Calls of task functions before they are enqueued, alone or together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, Generic, TypeVar, cast

from rebalanser.core.tasks.model import Enqueued, Result, TaskId
from rebalanser.errors import InvalidArgument, InvalidTask
from rebalanser.tasks.functions import MAX_SHOWN, EnqueueOptions, TaskBody, shown_value

MAX_TOGETHER: Final = 100
"""Maximum number of tasks in one all-or-none enqueue."""
PAIR: Final = 'positional arguments and named ones, such as (("a",), {"copies": 2})'
R_co = TypeVar("R_co", covariant=True)
_assigning = threading.Lock()


class PlannedCall(Generic[R_co]):
    """A call of a function that becomes one task, also if it is enqueued again.

    ``queue`` is that of the function, ``R_co`` is its return type.
    """

    def __init__(
        self,
        queue: object,
        body: TaskBody,
        options: EnqueueOptions,
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> None:
        self.queue = queue
        self.body = body
        self.arguments = arguments
        self.named = named
        self.enqueued: Enqueued[Any] | None = None
        """Answer to its enqueue; None before that."""
        self._options = options

    @property
    def id(self) -> TaskId | None:
        """Id of the task; None before the call is enqueued, unless given as an option."""
        return self._options.task_id

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.body.name

    @property
    def result(self) -> R_co:
        """Placeholder of the function's result, as an argument of another call, alone or in a list.

        Type checkers see the result's type. A call that gets it waits for this one.
        """
        return cast("R_co", Result(self))

    def options(self, new_id: Callable[[], TaskId]) -> EnqueueOptions:
        """Return the options to enqueue it with. The id is made at the first call and kept."""
        with _assigning:
            if self._options.task_id is None:
                self._options = self._options.model_copy(update={"task_id": new_id()})
            return self._options

    def needs(self) -> Iterator[PlannedCall[Any]]:
        """Iterate over the calls whose results it gets."""
        for value in chain(self.arguments, self.named.values()):
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, Result) and isinstance(each.of, PlannedCall):
                    yield each.of

    def __repr__(self) -> str:
        return f"<call of {self.name!r}, {self.id or 'without an id'}>"


def given_calls(calls: Iterable[PlannedCall[R_co]]) -> tuple[PlannedCall[R_co], ...]:
    """Return the calls that are to be enqueued together.

    Raises:
        InvalidTask: it is no list of calls.
    """
    given: object = calls
    if isinstance(given, PlannedCall | str | bytes) or not isinstance(given, Iterable):
        raise InvalidTask(
            f"enqueue_all takes a list of calls, such as [send.call(…), send.call(…)], not {given!r}; "
            "a single call has enqueue()"
        )
    return tuple(calls)


def sort_by_dependency(calls: Iterable[PlannedCall[Any]], queue: object) -> dict[PlannedCall[Any], int]:
    """Sort calls, and the calls that they need, by dependency; skip those that are enqueued.

    Each has the position of the first of ``calls`` that it is, or that needs it.

    Raises:
        InvalidTask: there are more than ``MAX_TOGETHER``, or some are no calls, or of another queue.
    """
    ordered: dict[PlannedCall[Any], int] = {}
    seen: set[PlannedCall[Any]] = set()

    def visit(call: PlannedCall[Any], number: int) -> None:
        given: object = call
        if not isinstance(given, PlannedCall):
            raise InvalidTask(
                f"calls[{number}] is {given!r}: give a call that is not enqueued yet, such as send.call(…)"
            )
        if call.enqueued is not None or call in seen:
            return
        if call.queue is not queue:
            raise InvalidTask(f"calls[{number}]: {call!r} is of {call.queue!r}, not of {queue!r}")
        seen.add(call)
        refuse_too_many(len(seen))
        for needed in call.needs():
            visit(needed, number)
        ordered[call] = number

    for number, call in enumerate(calls):
        visit(call, number)
    return ordered


def refuse_too_many(tasks: int) -> None:
    """Refuse an enqueue of too many tasks together.

    Raises:
        InvalidTask: there are more than ``MAX_TOGETHER``.
    """
    if tasks > MAX_TOGETHER:
        raise InvalidTask(
            f"more than {MAX_TOGETHER} tasks can't be enqueued together; enqueue some of them before, and "
            "pass the `.result` of each returned id to the others"
        )


def pairs_of(name: str, calls: Iterable[object]) -> Iterator[tuple[Sequence[Any], Mapping[str, Any]]]:
    """Iterate over calls of the function ``name``, each as positional arguments and named ones.

    Raises:
        InvalidArgument: one is something else.
    """
    if not isinstance(calls, Iterable):
        raise InvalidArgument(f"{name}: calls are {shown_value(calls)}: give a list of {PAIR}")
    for number, call in enumerate(calls):
        match call:
            case (Sequence() as arguments, Mapping() as named) if not isinstance(
                arguments, str | bytes
            ) and all(isinstance(key, str) for key in named):
                yield arguments, named
            case _:
                raise InvalidArgument(f"{name}: {call_place(number)} is {call!r:.{MAX_SHOWN}}: give {PAIR}")


def call_place(number: int) -> str:
    """Return the place of one of several calls, as errors name it."""
    return f"calls[{number}]"


def call_places(calls: int) -> list[str]:
    """Return the places of a number of calls."""
    return [call_place(number) for number in range(calls)]
