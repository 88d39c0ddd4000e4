"""The commands put together, and what their errors become: one line, and an exit code."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Final

import typer

from rebalanser.cli import audit, check, feed, history, neli, node, resources, run, shiva, state, tasks
from rebalanser.cli.face import UnwritableAnswer
from rebalanser.errors import FixConfiguration, RebalanserError, RetryLater, StopAccess
from rebalanser.redaction import redact

USAGE: Final = 2
FIX_CONFIGURATION: Final = 3
TRY_AGAIN: Final = 4
INTERNAL: Final = 70
INTERRUPTED: Final = 130

app = typer.Typer(
    name="rebalanser",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Nodes of a group share out resources so that every resource has exactly one owner.",
)
app.add_typer(resources.app, name="resources")
app.command()(state.status)
app.command()(state.watch)
app.add_typer(node.app, name="node")
app.command()(run.run)
app.command()(check.check)
app.command()(feed.feed)
app.add_typer(history.app, name="history")
app.command()(audit.audit)
app.add_typer(shiva.app, name="shiva")
app.add_typer(neli.app, name="neli")
app.add_typer(tasks.app, name="tasks")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("rebalanser"))
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Without a docstring of its own: the application's help says it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out the command that ``arguments`` (else the process's) are; its exit code.

    See :mod:`rebalanser.cli` for the codes. Every error of a user is one line on standard error, or one JSON
    document on standard output; only a fault of Rebalanser's own shows a traceback.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in (given[: given.index("--")] if "--" in given else given)
    try:
        code = app(given, prog_name="rebalanser", standalone_mode=False)
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
