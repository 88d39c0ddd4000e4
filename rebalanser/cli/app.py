"""The commands put together, and what their errors become: one line, and an exit code."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Final

import typer

from rebalanser.cli.face import UnwritableAnswer
from rebalanser.errors import FixConfiguration, RebalanserError, RetryLater, StopAccess
from rebalanser.redaction import redact

USAGE: Final = 2
FIX_CONFIGURATION: Final = 3
TRY_AGAIN: Final = 4
INTERNAL: Final = 70
INTERRUPTED: Final = 130

_COMMANDS: Final = {
    "resources": "resources.app",
    "status": "state.status",
    "watch": "state.watch",
    "node": "node.app",
    "run": "run.run",
    "check": "check.check",
    "feed": "feed.feed",
    "history": "history.app",
    "audit": "audit.audit",
    "shiva": "shiva.app",
    "neli": "neli.app",
    "tasks": "tasks.app",
}
"""Each command and where it is defined below :mod:`rebalanser.cli`."""


@cache
def application(only: str | None = None) -> typer.Typer:
    """The command line with all commands, or with one: then only that command's modules are imported."""
    app = typer.Typer(
        name="rebalanser",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        help="Nodes of a group share out resources so that every resource has exactly one owner.",
    )
    app.callback()(_options)
    for name in [only] if only else _COMMANDS:
        module, _, attribute = _COMMANDS[name].partition(".")
        command = getattr(import_module(f"rebalanser.cli.{module}"), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("rebalanser"))
        raise typer.Exit


def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Without a docstring of its own: the application's help says it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments``, by default the process's own, and return its exit code.

    See :mod:`rebalanser.cli` for the codes. Every error of a user is one line on standard error, or one JSON
    document on standard output; only a fault of Rebalanser's own shows a traceback.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in (given[: given.index("--")] if "--" in given else given)
    try:
        code = _application_for(given)(given, prog_name="rebalanser", standalone_mode=False)
    except typer.TyperException as error:
        return _fail(_with_help(error), "Usage", USAGE, as_json)
    except RebalanserError as error:
        return _fail(str(error), type(error).__name__, _code_of(error), as_json)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except UnwritableAnswer as error:
        return _fail(str(error), "UnwritableAnswer", FIX_CONFIGURATION, as_json=False)
    except Exception as error:
        sys.stderr.write(redact(traceback.format_exc()))
        return _fail(
            f"{type(error).__name__}: {error}; this is a fault of Rebalanser, please report it",
            "InternalError",
            INTERNAL,
            as_json,
        )
    return code if isinstance(code, int) else 0


def _application_for(given: Sequence[str]) -> typer.Typer:
    return application(given[0]) if given and given[0] in _COMMANDS else application()


def _with_help(error: typer.TyperException) -> str:
    """What is wrong with the command line, and which help says what would be right."""
    message = error.format_message().removeprefix("Invalid value: ").rstrip(".")
    context = getattr(error, "ctx", None)
    if not message or context is None:  # a command group alone has shown its help already
        return message
    return f"{message}; see {context.command_path} --help"


def _code_of(error: RebalanserError) -> int:
    if isinstance(error, FixConfiguration):
        return FIX_CONFIGURATION
    return TRY_AGAIN if isinstance(error, RetryLater | StopAccess) else INTERNAL


def _fail(message: str, kind: str, code: int, as_json: bool) -> int:
    line = redact(" ".join(message.split()))
    if as_json:
        sys.stdout.write(json.dumps({"error": line, "kind": kind, "exit_code": code}) + "\n")
    elif line:
        sys.stderr.write(f"error: {line}\n")
    return code
