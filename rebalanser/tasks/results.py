"""Results of tasks as arguments of others: in a call, in a payload, and as a worker reads them.

An argument of a call may be the result of another call, or a list of results. The payload then names the
tasks, under a key that no parameter can have::

    {"$results": {"total": "ID", "parts": ["ID", "ID"]}, "unit": "kg"}

The task depends on all of them (SK-5), and a task on which others depend is not collected (SK-14). So
each result is stored once, with the task that returned it, and a worker reads it when the body begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Final, Protocol, TypeAlias, runtime_checkable

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from rebalanser.core.tasks.model import (
    ID_DIGITS,
    MAX_RESULTS_BYTES,
    AfterFailure,
    Head,
    Result,
    Status,
    Stored,
    TaskId,
)
from rebalanser.errors import InvalidTask

KEY: Final = "$results"
"""Key in a payload of the parameters that get results, each with a task or several."""
_READ_AT_ONCE: Final = 50
_MARK: Final = to_json(KEY)
_MAX_DEPTH: Final = 20

Source: TypeAlias = TaskId | tuple[TaskId, ...]
"""Task whose result is an argument, or the tasks of a list of results."""
_Id: TypeAlias = Annotated[TaskId, Field(pattern=f"^[0-9a-f]{{{ID_DIGITS}}}$")]
_SOURCES: Final = TypeAdapter(dict[str, _Id | tuple[_Id, ...]])


@runtime_checkable
class PlannedTask(Protocol):
    """A call whose task may have no id yet."""

    @property
    def id(self) -> TaskId | None:
        """Id of the task; None before it is known."""
        ...

    @property
    def name(self) -> str:
        """Name of the function."""
        ...


def source_of(value: object) -> Source | None:
    """Return the task or tasks whose results an argument is; None if it is a plain value.

    Raises:
        InvalidTask: the call is not enqueued, or a list mixes results and values.
    """
    if isinstance(value, Result):
        return _task_of(value)
    if not isinstance(value, list | tuple) or not value or not isinstance(value[0], Result):
        return None
    if not all(isinstance(each, Result) for each in value):
        raise InvalidTask("a list with results can't have other values")
    return tuple(map(_task_of, value))


def _task_of(result: Result) -> TaskId:
    if not isinstance(result.of, PlannedTask):
        return str(result.of)
    if result.of.id is None:
        raise InvalidTask(
            f"an argument is the result of a call of {result.of.name!r} that is not enqueued: enqueue "
            "both together, with call(...).enqueue()"
        )
    return result.of.id


def has_result(value: object) -> bool:
    """True if a value is a result, or contains one at any depth."""
    return contains(value, Result)


def contains(value: object, kind: type, depth: int = 0) -> bool:
    """True if a value is of this kind, or contains one that is at any depth."""
    if isinstance(value, kind):
        return True
    if depth > _MAX_DEPTH:
        return False
    if isinstance(value, Mapping):
        return any(contains(each, kind, depth + 1) for each in value.values())
    return isinstance(value, list | tuple | set) and any(contains(each, kind, depth + 1) for each in value)


def with_sources(payload: bytes, sources: Mapping[str, Source]) -> bytes:
    """Add to a payload the arguments that are results.

    Raises:
        InvalidTask: the payload is not a JSON object, or has one of the names already.
    """
    if not sources:
        return payload
    try:
        content = from_json(payload)
    except ValueError as error:
        raise InvalidTask(f"a payload that gets results must be a JSON object: {error}") from error
    if not isinstance(content, dict):
        raise InvalidTask("a payload that gets results must be a JSON object")
    twice = sorted({KEY, *sources} & content.keys())
    if twice:
        raise InvalidTask(f"the payload already has a field that is to get a result: {', '.join(twice)}")
    return _object({KEY: to_json(sources)}, payload)


def sources_in(payload: bytes) -> dict[str, Source]:
    """Return the arguments of a payload that are results; empty if there are none.

    Raises:
        InvalidTask: their format is unknown.
    """
    content = _content(payload)
    if KEY not in content:
        return {}
    try:
        return _SOURCES.validate_python(content[KEY], strict=False)
    except ValidationError as error:
        places = sorted({".".join(map(str, each["loc"][:1])) for each in error.errors(include_url=False)})
        raise InvalidTask(f"{KEY} of the payload names no tasks for {', '.join(places)}") from error


def without_sources(payload: bytes) -> bytes:
    """Remove from a payload the tasks whose results it gets."""
    content = _content(payload)
    if KEY not in content:
        return payload
    return to_json({name: value for name, value in content.items() if name != KEY})


def redirect_sources(payload: bytes, others: Mapping[TaskId, TaskId]) -> bytes:
    """Replace the tasks whose results a payload gets: the keys of ``others`` by their values."""
    sources = sources_in(payload)
    if others.keys().isdisjoint(tasks_of(sources)):
        return payload
    changed: dict[str, Source] = {
        name: others.get(source, source)
        if isinstance(source, str)
        else tuple(others.get(each, each) for each in source)
        for name, source in sources.items()
    }
    return with_sources(without_sources(payload), changed)


def tasks_of(sources: Mapping[str, Source]) -> tuple[TaskId, ...]:
    """Return the tasks of sources, each once."""
    lists = ((each,) if isinstance(each, str) else each for each in sources.values())
    return tuple(dict.fromkeys(chain.from_iterable(lists)))


@dataclass(frozen=True, slots=True)
class FilledPayload:
    """A payload with the results in their places."""

    payload: bytes
    sources: Mapping[str, Source]
    without_result: Mapping[TaskId, str]
    """Tasks that have no result, with their status."""

    def hint(self, parameter: str) -> str:
        """Describe, for people, whose results a parameter got."""
        source = self.sources[parameter]
        if isinstance(source, str):
            hint = f"{parameter} is the result of task {source}"
        else:
            hint = f"{parameter} has the results of {len(source)} tasks"
        undone = [task for task in tasks_of({parameter: source}) if task in self.without_result]
        return ", ".join([hint, *(f"and task {task} is {self.without_result[task]}" for task in undone[:3])])


def fill_results(
    head: Head, payload: bytes, read: Callable[[Sequence[TaskId]], Mapping[TaskId, Stored]]
) -> FilledPayload:
    """Read the results that a payload gets, and fill them in.

    With ``after_failure="run"`` the result of a dead or cancelled task is null.

    Raises:
        InvalidTask: a result is missing or not JSON, or they exceed ``MAX_RESULTS_BYTES``; a retry would
            not help.
        RetryLater: the engine is away.
    """
    sources = sources_in(payload)
    if not sources:
        return FilledPayload(payload, {}, {})
    tasks = tasks_of(sources)
    unawaited = [task for task in tasks if task not in head.after]
    if unawaited:
        raise InvalidTask(f"it gets the result of task {unawaited[0]}, but does not wait for it (`after`)")
    results: dict[TaskId, bytes] = {}
    without: dict[TaskId, str] = {}
    size = 0
    for start in range(0, len(tasks), _READ_AT_ONCE):
        some = tasks[start : start + _READ_AT_ONCE]
        found = read(some)
        for task in some:
            results[task] = _result(task, found.get(task), head.after_failure, without)
            size += len(results[task])
        if size > MAX_RESULTS_BYTES:
            raise InvalidTask(
                f"the results of {len(tasks)} tasks that it gets have more than {MAX_RESULTS_BYTES} bytes: "
                "store large results elsewhere, and return their location"
            )
    got = {
        name: results[source] if isinstance(source, str) else _list(results[task] for task in source)
        for name, source in sources.items()
    }
    return FilledPayload(_object(got, without_sources(payload)), sources, without)


def _result(
    task: TaskId, stored: Stored | None, after_failure: AfterFailure, without: dict[TaskId, str]
) -> bytes:
    if stored is None:
        raise InvalidTask(f"the result of task {task} is missing: there is no such task")
    if stored.state.status is not Status.COMPLETED:
        without[task] = stored.state.status.value
        if after_failure is not AfterFailure.RUN:
            raise InvalidTask(f"the result of task {task} is missing: it is {stored.state.status}")
    result = stored.state.result
    if stored.state.status is not Status.COMPLETED or result is None:
        return b"null"
    try:
        from_json(result, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidTask(f"the result of task {task} ({stored.head.name}) is not JSON: {error}") from error
    return result


def _content(payload: bytes) -> dict[str, Any]:
    """Parse a payload if it may have results; an empty dict otherwise."""
    if _MARK not in payload:
        return {}
    try:
        content = from_json(payload)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _object(fields: Mapping[str, bytes], rest: bytes) -> bytes:
    """Return a JSON object with these fields and those of another object."""
    first = b",".join(b"%b:%b" % (to_json(name), value) for name, value in fields.items())
    other = rest.strip()[1:-1].strip()
    return b"{%b}" % (b",".join(part for part in (first, other) if part))


def _list(values: Iterable[bytes]) -> bytes:
    return b"[%b]" % b",".join(values)
