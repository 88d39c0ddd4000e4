"""Groups of commands whose options may be declared together, in a dataclass.

typer reads a command's options from its signature alone. Here a parameter may be a dataclass: its fields are
options of the command, after the command's own. So what all commands of a group need is declared once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, TypeVar, get_type_hints

import typer

CommandT = TypeVar("CommandT", bound=Callable[..., None])


class Commands(typer.Typer):
    """Commands, or groups of them, under one name."""

    def __init__(self, help: str, **settings: Any) -> None:  # noqa: A002 - typer's name
        super().__init__(help=help, no_args_is_help=True, rich_markup_mode="markdown", **settings)

    def command(self, *names: Any, **settings: Any) -> Callable[[CommandT], CommandT]:
        """Add a command, as ``typer.Typer.command``; its parameters may be dataclasses of options."""
        add = super().command(*names, **settings)

        def add_spread(command: CommandT) -> CommandT:
            add(_spread(command))
            return command

        return add_spread


def _spread(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the fields of its dataclasses as parameters, after all others."""
    signature = inspect.signature(command, eval_str=True)
    types: dict[str, Any] = {name: each.annotation for name, each in signature.parameters.items()}
    shared = {name: each for name, each in types.items() if isinstance(each, type) and is_dataclass(each)}
    parameters = signature.parameters.values()
    own = (each.replace(kind=each.KEYWORD_ONLY) for each in parameters if each.name not in shared)
    every = [*own, *(option for options in shared.values() for option in _options(options))]

    @wraps(command)
    def spread(**given: Any) -> None:
        for name, options in shared.items():
            given[name] = options(**{field.name: given.pop(field.name) for field in fields(options)})
        command(**given)

    spread.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
    return spread


def _options(options: type[Any]) -> Iterator[inspect.Parameter]:
    """Yield the fields of a dataclass as parameters."""
    types = get_type_hints(options, include_extras=True)
    for field in fields(options):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[field.name]
        )
