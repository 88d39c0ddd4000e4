"""Task functions: their names, options and references, and their arguments as JSON."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, Self, TypedDict, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    TypeAdapter,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import from_json, to_json

from rebalanser.core.tasks.model import (
    HIGHEST_PRIORITY,
    ID_DIGITS,
    LOWEST_PRIORITY,
    MAX_SECONDS,
    AfterFailure,
    TaskId,
    is_number,
    rate_of,
)
from rebalanser.errors import InvalidArgument, InvalidHandlers, InvalidTask
from rebalanser.redaction import redact
from rebalanser.registry.keys import check_name
from rebalanser.runtime.handlers import name_of
from rebalanser.tasks.claim import Claim
from rebalanser.tasks.results import (
    FilledPayload,
    contains,
    has_result,
    source_of,
    sources_in,
    tasks_of,
    with_sources,
)

MAX_AFTER: Final = 1000
"""Maximum number of tasks that one task waits for. For more, let tasks between collect them."""
FAR_FUTURE_S: Final = 31_557_600.0
"""Maximum seconds that the time in a given id may be ahead of the clock: a year.

A task with a later id would never be old enough to be collected, and would wait behind all others.
"""
MAX_KEY: Final = 512
"""Maximum length of a key."""
MAX_RUNNING: Final = 1000
"""Maximum of a limit: a store may read as many claims to find out if there is room."""
MAX_SHOWN: Final = 80
"""Maximum length of a value in a message."""
_HEX = frozenset("0123456789abcdef")


def _check_id(text: str) -> str:
    if len(text) != ID_DIGITS or not _HEX.issuperset(text):
        raise ValueError(f"a task id is {ID_DIGITS} hexadecimal digits in lower case")
    return text


def _check_rate(text: str) -> str:
    rate_of(text)
    return text


def _listed(given: Any) -> Any:
    """Wrap a single item in a tuple."""
    return (given,) if isinstance(given, str | type) else given


def problems_of(error: ValidationError, known: Iterable[str] = (), outer: str = "argument") -> str:
    """Return pydantic's problems in one line, each with its place.

    ``known`` are the valid options; without them what was checked has an ``outer`` of each name.
    """
    problems = []
    for each in error.errors(include_url=False):
        place = ".".join(str(part) for part in each["loc"] if part not in _CHOICES)
        kind, problem = each["type"], plain_message(each["msg"])
        if kind == "extra_forbidden":
            problem = (
                f"there is no such option; there are: {', '.join(known)}"
                if known
                else f"is no {outer if len(each['loc']) == 1 else 'field'} of it"
            )
        elif kind == "missing":
            problem = "is missing"
        elif kind == "json_invalid":
            problem = f"it is not JSON ({each['ctx']['error']})"
        elif kind == "model_type" and not place:
            problem = "it must be a JSON object with a field for each argument"
        elif place or kind != "value_error":
            shown = shown_value(each["input"])
            if shown[0] != "'" or shown not in problem:
                problem += f" (got {shown})"
        problems.append(f"{place}: {problem}" if place else problem)
    return "; ".join(problems)


def shown_value(value: object) -> str:
    """Return a value for a message; the name of its type if it is long or no single value."""
    shown = redact(repr(value)) if value is None or isinstance(value, int | float | str) else ""
    return shown if 0 < len(shown) <= MAX_SHOWN else type(value).__name__


_CHOICES: Final = frozenset({"constrained-float", "callable"})
"""Names that pydantic gives to the choices of a type, in the place of an error."""
_PYDANTIC: Final = re.compile(r"^(?:Input|String|Tuple|Dictionary|List) should")
_COUNTED: Final = re.compile(r" after validation, not .*")


def plain_message(message: str) -> str:
    """Return a message of pydantic without its jargon."""
    plain = _PYDANTIC.sub("must", message.removeprefix("Value error, "))
    return _COUNTED.sub("", plain).replace("be a valid tuple", "be a list")


Flag = Annotated[bool, Field(strict=True)]
Id = Annotated[TaskId, Field(strict=True), AfterValidator(_check_id)]
Priority = Annotated[int, Field(strict=True, ge=LOWEST_PRIORITY, le=HIGHEST_PRIORITY)]
PositiveSeconds = Annotated[float, Field(strict=True, gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
Retries = Annotated[int, Field(strict=True, ge=0, le=1_000_000)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
Key = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_KEY)]
RateLimit = Annotated[str, Field(strict=True), AfterValidator(_check_rate)]
MaxRunning = Annotated[int, Field(strict=True, ge=1, le=MAX_RUNNING)]
ErrorTypes = Annotated[tuple[type[Exception], ...], Field(min_length=1), BeforeValidator(_listed)]
Ids = Annotated[tuple[Id, ...], FailFast(), Field(max_length=MAX_AFTER), BeforeValidator(_listed)]


class TaskOptions(BaseModel):
    """Options of a function: how its tasks are tried (SK-15)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    priority: Priority = 0
    """Higher first (SK-2)."""
    retries: Retries = 3
    """Maximum number of retries, after tries that failed or whose worker died."""
    timeout_s: PositiveSeconds | None = None
    """Maximum seconds of one try; None for no limit."""
    retry_on: ErrorTypes | None = None
    """Exceptions after which a task is retried; after any other it is dead at once. None for all."""
    backoff_s: PositiveSeconds | Callable[[int], float] = 1.0
    """Seconds before the first retry, doubled each time; or a function of the number of failures."""
    max_backoff_s: PositiveSeconds = 600.0
    """Maximum seconds before a retry, before ``jitter`` is added."""
    jitter: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.25
    """Maximum fraction of the wait that is added at random, so that retries don't come together."""
    unique_for_s: Seconds | None = None
    """Seconds after a task is enqueued in which it keeps out others with its unique key, as it does while it
    is open (SK-23); 0 for only while it is open. The key is ``EnqueueOptions.unique_key``, or the
    arguments. None: only tasks with a ``unique_key`` are unique."""

    max_running: MaxRunning | None = None
    """Maximum number of the function's tasks that are claimed at once, over all workers (SK-23)."""
    max_running_per_key: MaxRunning | None = None
    """The same for tasks with equal ``EnqueueOptions.key``."""
    rate_limit: RateLimit | None = None
    """Maximum rate at which the function's tasks are claimed, over all workers, such as ``10/s``, or
    ``100/m burst 20``, which lets up to 20 begin at once after a rest (SK-23)."""
    rate_limit_per_key: RateLimit | None = None
    """The same for tasks with equal ``EnqueueOptions.key``."""

    @model_validator(mode="after")
    def _has_one_limit(self) -> Self:
        of_name = [name for name in ("max_running", "rate_limit") if getattr(self, name) is not None]
        of_key = [f"{name}_per_key" for name in ("max_running", "rate_limit")]
        of_key = [name for name in of_key if getattr(self, name) is not None]
        if of_name and of_key:
            raise ValueError(
                f"give {of_name[0]} or {of_key[0]}, not both: limits count by function or by key"
            )
        return self

    def limit(self, key: str | None) -> GivenLimit:
        """Return the limit of a task with this key, as the fields of its head."""
        if self.max_running_per_key is None and self.rate_limit_per_key is None:
            return {"max_running": self.max_running or 0, "rate_limit": self.rate_limit or ""}
        if not key:
            return {}
        return {
            "limit_key": key,
            "max_running": self.max_running_per_key or 0,
            "rate_limit": self.rate_limit_per_key or "",
        }


class GivenLimit(TypedDict, total=False):
    """The fields of ``Head`` that limit claims."""

    limit_key: str
    max_running: int
    rate_limit: str


class GivenTaskOptions(TypedDict, total=False):
    """The fields of ``TaskOptions`` as a caller may give them."""

    priority: int
    retries: int
    timeout_s: float | None
    retry_on: type[Exception] | Sequence[type[Exception]] | None
    backoff_s: float | Callable[[int], float]
    max_backoff_s: float
    jitter: float
    unique_for_s: float | None
    max_running: int | None
    max_running_per_key: int | None
    rate_limit: str | None
    rate_limit_per_key: str | None


SCHEDULE_OPTIONS: Final = ("time_zone", "jitter_s", "overlap")
"""Options of a periodic function beside those of any function."""


def task_options(given: GivenTaskOptions, others: Sequence[str] = ()) -> TaskOptions:
    """Validate the options of a function; ``others`` are options that it may have beside these.

    Raises:
        InvalidTask: an option is unknown, of a wrong type or out of range.
    """
    try:
        return TaskOptions.model_validate(given)
    except ValidationError as error:
        raise InvalidTask(problems_of(error, (*TaskOptions.model_fields, *others))) from error


def periodic_options(given: GivenTaskOptions, *, overlap: bool) -> GivenTaskOptions:
    """Validate the options of a periodic function, and return those that its tasks have.

    Raises:
        InvalidTask: an option is unknown, of a wrong type or out of range.
    """
    if not isinstance(overlap, bool):
        raise InvalidTask(f"overlap is {shown_value(overlap)}: give True or False")
    task_options(given, SCHEDULE_OPTIONS)
    return given if overlap else {"unique_for_s": 0.0, **given}


class EnqueueOptions(BaseModel):
    """Options of one task, beside those of its function."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    delay_s: Seconds = 0.0
    """Minimum seconds from now before it is claimed, up to ``MAX_SECONDS``."""
    after: Ids = ()
    """Task or tasks of the same queue that must be complete first, at most ``MAX_AFTER``."""
    after_failure: AfterFailure = AfterFailure.WAIT
    """Reaction once a task of ``after`` is dead or cancelled: ``wait``, ``run`` or ``fail``."""
    priority: Priority | None = None
    """Priority instead of the function's."""
    task_id: Id | None = None
    """Id from ``new_id``, which makes a repeated enqueue harmless (SK-3); None for a new id."""
    waits_for_unknown: Flag = False
    """True if ``after`` may name tasks that don't exist yet."""
    unique_key: Key | None = None
    """Key that a task of the function keeps to itself while open: enqueueing returns its id (SK-23)."""
    unique_for_s: Seconds | None = None
    """Seconds after it is enqueued in which it keeps its key too; instead of the function's."""
    key: Key | None = None
    """Key that limits per key count by, such as ``customer-7``; None for none of these limits."""

    def unique(self, unique_for_s: float | None, payload: bytes) -> tuple[str, float]:
        """Return a task's unique key, and the seconds in which it keeps others out; "" for no key.

        ``unique_for_s`` is the function's.
        """
        for_s = unique_for_s if self.unique_for_s is None else self.unique_for_s
        if self.unique_key is None and for_s is None:
            return "", 0.0
        return self.unique_key or hashlib.sha256(payload).hexdigest(), for_s or 0.0


class GivenOptions(TypedDict, total=False):
    """The fields of ``EnqueueOptions`` as a caller may give them."""

    delay_s: float
    after: TaskId | Sequence[TaskId]
    after_failure: Literal["wait", "run", "fail"] | AfterFailure
    priority: int | None
    task_id: TaskId | None
    waits_for_unknown: bool
    unique_key: str | None
    unique_for_s: float | None
    key: str | None


def chosen_options(name: str, given: Mapping[str, Any]) -> EnqueueOptions:
    """Validate the options of a task of the function ``name``.

    Raises:
        InvalidTask: an option is unknown or out of range.
    """
    try:
        return EnqueueOptions(**given)
    except ValidationError as error:
        raise InvalidTask(f"{name}: {problems_of(error, EnqueueOptions.model_fields)}") from error


NO_OPTIONS: Final = EnqueueOptions()


def dependencies(after: Sequence[TaskId], payload: bytes) -> tuple[TaskId, ...]:
    """Return the dependencies of a task: ``after``, and the tasks whose results its payload gets.

    Raises:
        InvalidTask: these are more than ``MAX_AFTER``.
    """
    sources = sources_in(payload)
    if not sources:
        return tuple(after)
    needed = tuple(dict.fromkeys((*after, *tasks_of(sources))))
    if len(needed) > MAX_AFTER:
        raise InvalidTask(
            f"it waits for {len(needed)} tasks, and gets results of them; the maximum is {MAX_AFTER}"
        )
    return needed


def reference_of(body: TaskBody) -> str:
    """Return the reference by which another process imports the function of a body.

    Raises:
        InvalidHandlers: its module does not have it under its name. Only functions at the top of a module, or
            in a class there, can be imported.
    """
    function = body.function
    module = getattr(function, "__module__", None)
    path = getattr(function, "__qualname__", None)
    if module is not None and path is not None:
        found = _found(sys.modules.get(module), path)
        if found is function or getattr(found, "body", None) is body:
            return f"{module}:{path}"
    raise InvalidHandlers(
        f"task {body.name!r}: no other process can import {name_of(function)}; "
        "a function whose bodies run in processes must be at the top of a module"
    )


def body_at(reference: str, name: str) -> TaskBody:
    """Import the function of a reference, for the task ``name``.

    Raises:
        InvalidHandlers: there is no such function.
    """
    module, _, path = reference.partition(":")
    found = _found(importlib.import_module(module), path)
    body = getattr(found, "body", None)
    if isinstance(body, TaskBody):
        return body
    if not callable(found):
        raise InvalidHandlers(f"task {name!r}: there is no function {reference} in a process of its own")
    return TaskBody(found, name, TaskOptions())


def _found(module: object, path: str) -> object:
    try:
        return attrgetter(path)(module)
    except AttributeError:
        return None


_FIELD: Final = "argument_{}"
"""Field of a parameter, by its position: pydantic takes no field named ``_x`` or ``json``."""
_OF_OTHER_VERSIONS: Final = frozenset({"missing", "extra_forbidden"})
"""Types of errors of arguments that another version of the function may accept."""
_MASKED: Final = b'"**********"'
"""Text that pydantic writes for a secret, such as ``SecretStr``."""
_MAX_MODELS: Final = 16
_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class OtherArguments(InvalidTask):
    """A task has arguments that this version of its function does not take; another version may (SK-21)."""


class TaskBody:
    """A function registered under a name, with the conversion of its arguments to a payload and back.

    Its first parameter is the claim, of the type ``claim``. The others are the task's arguments, and need
    type hints that pydantic knows. Types are strict: ``"5"`` is not an int. Types that JSON lacks, such as a
    time, are parsed from text.

    Raises:
        InvalidHandlers: the function has unsuitable parameters.
        InvalidName: its name can't be stored.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        options: TaskOptions,
        claim: type[object] = Claim,
    ) -> None:
        self.function = function
        self.name = check_name(name, "task")
        self.options = options
        self.is_coroutine = is_coroutine_function(function)
        self._signature = _without_claim(function, self.name)
        self._fields = {_FIELD.format(number): each for number, each in enumerate(self._signature.parameters)}
        self._arguments = _model_of(function, self._signature, self.name, claim)
        self._with_results: dict[frozenset[str], type[BaseModel]] = {}
        """Models that take any value for some of the arguments."""

    def payload(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> bytes:
        """Return the given arguments of a call as JSON (UTF-8), without defaults (SK-21).

        Results are stored as the ids of their tasks (``tasks.results``).

        Raises:
            InvalidTask: they don't fit the function; the message has every error with its place.
        """
        try:
            bound = self._signature.bind(*arguments, **named)
        except TypeError as error:
            raise InvalidTask(f"{self.name}: {error}") from error
        given = bound.arguments
        try:
            sources = {
                name: source for name, value in given.items() if (source := source_of(value)) is not None
            }
            if not sources:
                return self._dumped(given, self._arguments)
            values = {name: value for name, value in given.items() if name not in sources}
            return with_sources(self._dumped(values, self._model_with(frozenset(sources))), sources)
        except ValidationError as error:
            raise InvalidTask(f"{self.name}: {self._problems(error, given)}") from error
        except ValueError as error:
            raise InvalidTask(
                f"{self.name}: the arguments are no JSON: {self._problems(error, given)}"
            ) from error
        except InvalidTask as error:
            raise InvalidTask(f"{self.name}: {error}") from error

    def _problems(self, error: ValueError, given: Mapping[str, Any]) -> str:
        for name, value in given.items():
            if has_result(value) and source_of(value) is None:
                return f"{name} has a result within: an argument may be one, or a list of results"
        return problems_of(error) if isinstance(error, ValidationError) else str(error)

    def _model_with(self, results: frozenset[str]) -> type[BaseModel]:
        """Return the model of the arguments that takes any value for these, which are results."""
        model = self._with_results.get(results)
        if model is None:
            fields: dict[str, Any] = {
                field: (Annotated[Any, Field(alias=name)], None)
                for field, name in self._fields.items()
                if name in results
            }
            model = create_model(self._arguments.__name__, __base__=self._arguments, **fields)
            if len(self._with_results) < _MAX_MODELS:
                self._with_results[results] = model
        return model

    def _dumped(self, given: Mapping[str, Any], model: type[BaseModel]) -> bytes:
        try:
            written = to_json(given, inf_nan_mode="null")
        except ValueError:  # of a type that only its parameter knows how to write
            read = [name for name, value in given.items() if contains(value, Iterator)]
            if read:
                raise InvalidTask(f"{read[0]} can be read once only: give a list") from None
            written = None
        if written is None:
            values = model.model_validate(given, strict=False)
        else:
            values = model.model_validate_json(written)
        fields = {field for field, name in self._fields.items() if name in given}
        payload = values.model_dump_json(include=fields, by_alias=True).encode()
        if payload != written:
            # Else only the worker would find out that the payload can't be read.
            model.model_validate_json(payload)
        if _MASKED in payload and model.model_validate_json(payload) != model.model_validate(
            given, strict=False
        ):
            raise InvalidTask(
                "a secret is never stored: the body would get '**********'; give a name by which it finds it"
            )
        return payload

    def call(self, claim: Claim, arguments: Mapping[str, Any]) -> Any:
        """Call the function, and return its result; a coroutine runs in a new loop of this thread."""
        if self.is_coroutine:
            return asyncio.run(self.function(claim, **arguments))
        return self.function(claim, **arguments)

    def value(self, result: bytes | None) -> Any:
        """Parse a stored result by the function's return type.

        Without a return type, or with None or one that pydantic does not know, it is parsed as plain JSON.

        Raises:
            InvalidTask: the result does not fit the type, or is not JSON.
        """
        if result is None:
            return None
        if self._returned is None:
            return plain_value(self.name, result)
        try:
            return self._returned.validate_json(result)
        except ValidationError as error:
            raise InvalidTask(
                f"{self.name}: the result does not fit its type: {problems_of(error, outer='field')}"
            ) from error

    def write_result(self, value: object) -> bytes:
        """Return a result as JSON, in the way of the return type if only that knows how to write it."""
        try:
            return to_json(value)
        except Exception:
            if self._returned is None or contains(value, Iterator):  # which has lost its first items
                raise
            with suppress(Exception):  # the first error says more of the value
                checked = self._returned.validate_python(value, strict=False)
                return to_json(self._returned.dump_python(checked, mode="json"))
            raise

    def refuse_result(self, result: bytes | None) -> None:
        """Refuse a result that does not fit the function's return type, by which ``value`` parses it.

        Raises:
            InvalidTask: it does not fit; the message says where.
        """
        if self._returned is not None:
            self.value(b"null" if result is None else result)

    @cached_property
    def _returned(self) -> TypeAdapter[Any] | None:
        try:
            hint = get_type_hints(self.function, include_extras=True)["return"]
            return None if hint is type(None) else TypeAdapter(hint)
        except Exception:  # there is no hint, or none that pydantic knows: each has an error of its own
            return None

    def arguments(self, payload: bytes, got: FilledPayload | None = None) -> dict[str, Any]:
        """Parse the arguments of a payload, by name; ``got`` says which of them are results.

        Raises:
            OtherArguments: the arguments don't fit this version of the function.
            InvalidTask: the payload is not a JSON object, or a result does not fit.
        """
        try:
            values = self._arguments.model_validate_json(payload)
        except ValidationError as error:
            problems = error.errors(include_url=False)
            unfit = {
                str(each["loc"][0]): None
                for each in problems
                if got is not None
                and each["loc"]
                and each["loc"][0] in got.sources
                and each["type"] not in _OF_OTHER_VERSIONS
            }
            if got is not None and unfit:
                problem = "; ".join([problems_of(error), *map(got.hint, unfit)])
                raise InvalidTask(f"{self.name}: {problem}") from None
            kind = OtherArguments if all(each["loc"] for each in problems) else InvalidTask
            raise kind(f"{self.name}: {problems_of(error)}") from error
        return {name: getattr(values, field) for field, name in self._fields.items()}


def plain_value(name: str, result: bytes) -> Any:
    """Parse the result of a task of a function as plain JSON.

    Raises:
        InvalidTask: it is not JSON, as a client in another language may have sent it.
    """
    try:
        return from_json(result)
    except ValueError as error:
        raise InvalidTask(f"{name}: the result is not JSON: {error}") from error


def register_body(functions: dict[str, TaskBody], body: TaskBody) -> TaskBody:
    """Add a body to a queue's functions, and return it.

    Raises:
        InvalidHandlers: its name is taken.
    """
    if body.name in functions:
        raise InvalidHandlers(f"task {body.name!r} is registered already")
    functions[body.name] = body
    return body


def is_coroutine_function(function: object) -> bool:
    """True if calling the function, or the callable object, returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - its own method matters
    )


def is_count(value: object, least: int = 0) -> bool:
    """True for a whole number from ``least``."""
    return is_number(value) and isinstance(value, int) and value >= least


def require_id(task: object) -> None:
    """Check that a value can be the id of a task.

    Raises:
        InvalidArgument: it is not text.
    """
    if not isinstance(task, str):
        raise InvalidArgument(f"the task is {task!r}: give the id of one task, as enqueue returns it")


def require_revision(at_least: object) -> None:
    """Check that a value can be a revision of the store.

    Raises:
        InvalidArgument: it is no whole number from 0.
    """
    if not is_count(at_least):
        raise InvalidArgument(f"at_least is {at_least!r}: give a revision, a whole number from 0")


def require_claim(name: str, claim: object) -> None:
    """Check that the first argument of a direct call may be a claim.

    Raises:
        InvalidArgument: ``claim`` is a value of JSON.
    """
    if isinstance(claim, int | float | str | bytes | list | tuple | dict):
        raise InvalidArgument(
            f"{name}({shown_value(claim)}) has no claim: a direct call gets one first, in a test "
            f"rebalanser.testing.FakeClaim(); to have a worker call it, use {name}.enqueue(...)"
        )


def require_function(function: object, kind: type[object]) -> None:
    """Check that a value is a task function.

    Raises:
        InvalidArgument: it is not of this ``kind``.
    """
    if not isinstance(function, kind):
        shown = name_of(function) if callable(function) else shown_value(function)
        raise InvalidArgument(
            f"then() takes a function that @tasks.task has registered, as {kind.__name__}, not {shown}"
        )


def task_name(function: Callable[..., Any], name: str | None) -> str:
    """Return the name under which to register a function: its own, unless ``name`` is given.

    Raises:
        InvalidHandlers: it is registered already, or has no name.
    """
    body = getattr(function, "body", None)
    if isinstance(body, TaskBody):
        raise InvalidHandlers(
            f"{body.name!r} is a task function already: decorate it once, with task or periodic; "
            "periodic takes the options of task too"
        )
    if name is not None and not isinstance(name, str):
        raise InvalidHandlers(f"the name of a task is text, not {shown_value(name)}")
    own = name or getattr(function, "__name__", None)
    if not isinstance(own, str):
        raise InvalidHandlers(
            f"an object of type {type(function).__name__} has no name: register a function made by def"
        )
    return own


def require_expression(expression: object) -> None:
    """Check that ``periodic`` got a cron expression, unlike ``@tasks.periodic`` without parentheses."""
    if not isinstance(expression, str):
        raise InvalidHandlers('periodic needs a cron expression, such as @tasks.periodic("*/15 * * * *")')


def require_defaults(function: Callable[..., Any], name: str) -> None:
    """Check that a periodic function needs no arguments, as a schedule passes none.

    Raises:
        InvalidHandlers: a parameter has no default.
    """
    parameters = _without_claim(function, name).parameters.values()
    missing = [each.name for each in parameters if each.default is each.empty]
    if missing:
        raise InvalidHandlers(
            f"task {name!r}: a schedule gives no arguments, and {', '.join(missing)} has no default"
        )


def _without_claim(function: Callable[..., Any], name: str) -> inspect.Signature:
    """Return the signature of the arguments, without the claim."""
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].kind not in _NAMED[:1]:
        raise InvalidHandlers(f"task {name!r}: the first parameter must be the claim")
    arguments = parameters[1:]
    for each in arguments:
        if each.kind not in _NAMED:
            raise InvalidHandlers(f"task {name!r}: parameter {each} can't be stored by its name")
    return inspect.Signature(arguments)


def _model_of(
    function: Callable[..., Any], signature: inspect.Signature, name: str, claim: type[object]
) -> type[BaseModel]:
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise InvalidHandlers(f"task {name!r}: a type hint can't be read: {error}") from error
    first = next(iter(inspect.signature(function).parameters))
    if hints.get(first, claim) is not claim:
        raise InvalidHandlers(
            f"task {name!r}: the first parameter is the claim, of type {claim.__name__}, not {hints[first]!r}"
        )
    fields: dict[str, Any] = {
        _FIELD.format(number): (
            Annotated[hints.get(each.name, Any), Field(alias=each.name)],
            ... if each.default is each.empty else each.default,
        )
        for number, each in enumerate(signature.parameters.values())
    }
    return create_model(
        f"{name} arguments",
        __config__=ConfigDict(extra="forbid", strict=True),
        **fields,
    )
