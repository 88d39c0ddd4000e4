"""The list of commands, and the conversion of their errors to one line and an exit code.

Importing a command takes long, so only the requested one is imported. The overview of ``--help`` is built
from the summaries in this module.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Final, NamedTuple

import typer

from rebalanser.cli.commands import Commands
from rebalanser.errors import FixConfiguration, RebalanserError, RetryLater, StopAccess, UnwritableAnswer
from rebalanser.redaction import redact

USAGE: Final = 2
FIX_CONFIGURATION: Final = 3
TRY_AGAIN: Final = 4
INTERNAL: Final = 70
INTERRUPTED: Final = 130
COMPLETION_VARIABLE: Final = "_REBALANSER_COMPLETE"
"""Set by the shell when it asks for completions."""


class _Command(NamedTuple):
    """A command: its place below ``rebalanser.cli``, and the first sentence of its help."""

    module: str
    attribute: str
    summary: str


_COMMANDS: Final = {
    "groups": _Command("groups", "groups", "List the groups in the registry."),
    "group": _Command("groups", "group_app", "Set and show the policy of a group."),
    "resources": _Command("groups", "resources_app", "Add, remove and list the resources of a group."),
    "status": _Command(
        "groups",
        "status",
        "Show a group: its nodes, its leader, whether it is balanced, and what waits for an owner.",
    ),
    "watch": _Command(
        "watch",
        "watch",
        "Show a group as it changes, until q or Ctrl-C: live lists on a terminal that can draw, else a line "
        "for each change.",
    ),
    "node": _Command("groups", "node_app", "List, drain and undrain nodes."),
    "plan": _Command(
        "plan", "plan", "Show what the next allocation would do about a change, without making it."
    ),
    "explain": _Command(
        "plan",
        "explain",
        "Say why a resource is where it is, why it is on no other node, and what it waits for.",
    ),
    "run": _Command(
        "run",
        "run",
        "Join a group and run a command for each resource that this node owns, until Ctrl-C or SIGTERM.",
    ),
    "check": _Command(
        "check",
        "check",
        "Check that the registry answers, that it grants the lease, and that the settings keep their "
        "promises.",
    ),
    "feed": _Command(
        "feed",
        "feed",
        "Keep a group's resources equal to a cluster's running applications, until Ctrl-C or SIGTERM.",
    ),
    "history": _Command("history", "app", "Show, count and export the ownership history."),
    "audit": _Command(
        "audit",
        "audit",
        "Prove or refute, from the history of all nodes, that no resource ever had two owners.",
    ),
    "shiva": _Command("shiva", "app", "Place applications on workers, over Kafka."),
    "neli": _Command("neli", "app", "Lead roles, one process each at a time, over a Kafka consumer group."),
    "tasks": _Command("tasks", "app", "Enqueue, show and run tasks, and serve them over HTTP."),
}


@cache
def application(only: str | None = None) -> Commands:
    """Return the command line with all commands, or with one, whose modules alone are imported then."""
    app = _without_commands()
    for name in [only] if only else _COMMANDS:
        module, attribute, _ = _COMMANDS[name]
        command = getattr(import_module(f"rebalanser.cli.{module}"), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def overview() -> Commands:
    """Return the command line for ``--help`` alone; no command is imported."""
    app = _without_commands()
    for name, command in _COMMANDS.items():
        app.command(name, help=command.summary)(_nothing)
    return app


def _without_commands() -> Commands:
    app = Commands(
        "Nodes of a group share out resources so that every resource has exactly one owner.",
        name="rebalanser",
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    return app


def _nothing() -> None:
    """Placeholder for a command in the overview."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("rebalanser"))
        raise typer.Exit


def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Without a docstring of its own: the application has the help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments``, by default the process's own, and return its exit code.

    See ``rebalanser.cli`` for the codes. A user's error is one line on standard error, or one JSON
    document on standard output; only a fault of Rebalanser itself shows a traceback.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in (given[: given.index("--")] if "--" in given else given)
    try:
        code = _application_for(given)(given, prog_name="rebalanser", standalone_mode=False)
    except typer.TyperException as error:
        return _fail(_with_help(error), "Usage", USAGE, as_json)
    except UnwritableAnswer as error:
        return _fail(str(error), "UnwritableAnswer", FIX_CONFIGURATION, as_json=False)
    except RebalanserError as error:
        return _fail(str(error), type(error).__name__, _code_of(error), as_json)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        sys.stderr.write(redact(traceback.format_exc()))
        return _fail(
            f"{type(error).__name__}: {error}; this is a bug of Rebalanser, please report it",
            "InternalError",
            INTERNAL,
            as_json,
        )
    return code if isinstance(code, int) else 0


def _application_for(given: Sequence[str]) -> Commands:
    """Return as much of the command line as these arguments need."""
    if COMPLETION_VARIABLE in os.environ:
        return application()
    first = next((argument for argument in given if not argument.startswith("-")), None)
    return application(first) if first in _COMMANDS else overview()


def _with_help(error: typer.TyperException) -> str:
    """Return the usage error, and the command that shows the help."""
    message = error.format_message().removeprefix("Invalid value: ").replace("Value error, ", "").rstrip(".")
    problems = getattr(error.__cause__, "errors", None)  # pydantic's; importing it here would cost each start
    if callable(problems) and "Input should be" in message:
        message = f"{message.replace('Input should be', 'must be')} (got {problems()[0]['input']!r})"
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
