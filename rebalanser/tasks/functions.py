"""The functions that work on tasks: their names, their options, and their arguments as JSON."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Any, Final, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic_core import from_json, to_json

from rebalanser.errors import InvalidHandlers, InvalidTask
from rebalanser.registry.keys import check_name
from rebalanser.tasks.claim import Claim
from rebalanser.tasks.options import TaskOptions, problems_of

_FIELD: Final = "argument_{}"
"""Field of a parameter, by its position: pydantic takes no field of the name ``_x``, or ``json``."""
_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class OtherArguments(InvalidTask):
    """A task has arguments that this version of its function does not take; another one may (SK-21)."""


class TaskBody:
    """A function registered under a name, and how its arguments become a payload and back.

    Its first parameter is the claim, a :class:`~rebalanser.tasks.claim.Claim` unless ``claim`` says another
    type; the others, which need type hints that pydantic knows, are the task's arguments. Their types are
    strict: ``"5"`` is no int, but what JSON has no type for, such as a time, is read from text.

    Raises:
        InvalidHandlers: the function can't be called so.
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

    def payload(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> bytes:
        """The arguments of a call as JSON (UTF-8), without those that are left to their defaults (SK-21).

        Raises:
            InvalidTask: they don't fit the function; the message has every error with its place.
        """
        try:
            bound = self._signature.bind(*arguments, **named)
        except TypeError as error:
            raise InvalidTask(f"{self.name}: {error}") from error
        try:
            return self._dumped(bound.arguments)
        except ValidationError as error:
            raise InvalidTask(f"{self.name}: {problems_of(error)}") from error
        except ValueError as error:
            raise InvalidTask(f"{self.name}: the arguments are no JSON: {error}") from error

    def _dumped(self, given: Mapping[str, Any]) -> bytes:
        try:
            written = to_json(given, inf_nan_mode="null")
        except ValueError:  # of a type that only its parameter knows how to write
            written = None
        if written is None:
            values = self._arguments.model_validate(given, strict=False)
        else:
            values = self._arguments.model_validate_json(written)
        fields = {field for field, name in self._fields.items() if name in given}
        payload = values.model_dump_json(include=fields, by_alias=True).encode()
        if payload != written:
            # What can't be read again would be found out by the worker only.
            self._arguments.model_validate_json(payload)
        return payload

    def call(self, claim: Claim, arguments: Mapping[str, Any]) -> Any:
        """Call the function and wait for what it returns; a coroutine runs in a loop of this thread's own."""
        if self.is_coroutine:
            return asyncio.run(self.function(claim, **arguments))
        return self.function(claim, **arguments)

    def value(self, result: bytes | None) -> Any:
        """The value that a body returned, from its result as it is stored, by the function's return type.

        Without one, or of a type that pydantic does not know, it is what JSON gives; so is what a function
        that returns None has given to ``complete_in``.

        Raises:
            InvalidTask: the result does not fit the type.
        """
        if result is None:
            return None
        if self._returned is None:
            return from_json(result)
        try:
            return self._returned.validate_json(result)
        except ValidationError as error:
            raise InvalidTask(
                f"{self.name}: the result does not fit its type: {problems_of(error)}"
            ) from error

    @cached_property
    def _returned(self) -> TypeAdapter[Any] | None:
        try:
            hint = get_type_hints(self.function, include_extras=True)["return"]
            return None if hint is type(None) else TypeAdapter(hint)
        except Exception:  # there is no hint, or none that pydantic knows: each has an error of its own
            return None

    def arguments(self, payload: bytes) -> dict[str, Any]:
        """The arguments that a payload holds, by name.

        Raises:
            OtherArguments: it holds none that fit the function.
            InvalidTask: it is no JSON object, which no function can read.
        """
        try:
            values = self._arguments.model_validate_json(payload)
        except ValidationError as error:
            is_object = all(problem["loc"] for problem in error.errors(include_url=False))
            kind = OtherArguments if is_object else InvalidTask
            raise kind(f"{self.name}: {problems_of(error)}") from error
        return {name: getattr(values, field) for field, name in self._fields.items()}


def is_coroutine_function(function: object) -> bool:
    """Whether calling it gives a coroutine; an object may be called like a coroutine function."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - whose own method it is that matters
    )


def _without_claim(function: Callable[..., Any], name: str) -> inspect.Signature:
    """The signature of the arguments alone."""
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
