"""``rebalanser run``: runs a program in any language as a node of a group."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from rebalanser.cli.arguments import read_names
from rebalanser.cli.options import GroupArgument, RegistryOptions, VerboseOption
from rebalanser.cli.supervisor import LineForwarder, RestartCondition, Style, Supervisor, mistyped
from rebalanser.core.group import Fact, FactKind
from rebalanser.errors import InvalidSettings
from rebalanser.group import Group
from rebalanser.settings import Settings, Values

_OPTIONS: Final = {"lease_ttl_s": "--lease", "stop_timeout_s": "--stop-timeout"}


def run(
    on: RegistryOptions,
    group: GroupArgument,
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            show_default=False,
            help="The command to run; {resource} and {token} in it are replaced.",
        ),
    ],
    node: Annotated[
        str | None,
        typer.Option(
            metavar="LABEL", help="This node's label.", show_default="host, process and a random part"
        ),
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Add this resource first; repeatable.", show_default=False),
    ] = None,
    restart: Annotated[
        RestartCondition, typer.Option(help="When to restart a command that has exited by itself.")
    ] = RestartCondition.ALWAYS,
    lease: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            show_default="REBALANSER_LEASE_TTL_S, else 10",
            help="Time after which the registry removes a silent node and others get its resources.",
        ),
    ] = None,
    stop_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            show_default="REBALANSER_STOP_TIMEOUT_S, else 0.4 of the lease",
            help="Maximum time from SIGTERM to the end of a command.",
        ),
    ] = None,
    prefix: Annotated[
        bool | None,
        typer.Option(
            "--prefix/--no-prefix",
            show_default="on a terminal",
            help="Begin each line of output with the resource's name in brackets.",
        ),
    ] = None,
    verbose: VerboseOption = 0,
) -> None:
    """Join a group and run a command for each resource that this node owns, until Ctrl-C or SIGTERM.

    The command gets REBALANSER_GROUP, REBALANSER_RESOURCE, REBALANSER_TOKEN and REBALANSER_NODE. When its
    resource has to be given up, its process group gets SIGTERM, and SIGKILL soon after. No command outlives
    this process, however it ends, or runs on when this node's lease may end. With --json each event and
    each line of output is an object. A graceful stop exits with 0, or with 1 if a command failed that was
    not to be restarted.
    """
    if "{" not in command[0] and shutil.which(command[0]) is None:
        raise typer.BadParameter(_unusable(command[0]), param_hint="'COMMAND'")
    if (found := mistyped(command)) is not None:
        word, meant = found
        raise typer.BadParameter(f"{{{word}}} is not replaced; is {{{meant}}} meant?", param_hint="'COMMAND'")
    resources = read_names(add, None) if add else []
    given: Values = {}
    if lease is not None:
        given["lease_ttl_s"] = lease
    if stop_timeout is not None:
        given["stop_timeout_s"] = stop_timeout
    with _in_words_of_options(given):
        settings = Settings(**given)
    face = on.face(verbose)
    member = Group(group, face.url, node=node, settings=settings)
    if resources:
        with face.admin(group) as admin:
            admin.add(resources)
    outputs = LineForwarder(_style(prefix, on.json))
    outputs.tell("joining", group=member.name, node=member.node)
    member.on_fact(IdleHint(group, outputs).hear)
    supervisor = Supervisor(member, settings, command, restart, outputs)
    with _in_words_of_options(given):
        supervisor.run()
    if supervisor.failed:
        raise typer.Exit(1)


class IdleHint:
    """Reports that this node is to own nothing, and what to do, whenever that begins."""

    def __init__(self, group: str, outputs: LineForwarder) -> None:
        self._group = group
        self._outputs = outputs
        self._in_group: object = None
        self._idle = False

    def hear(self, fact: Fact) -> None:
        """Take note of a fact; a hook of ``rebalanser.Group.on_fact``."""
        if fact.kind is FactKind.GROUP_READ:
            self._in_group = fact.detail.get("resources")
        elif fact.kind is FactKind.ALLOCATION_ADOPTED:
            before, self._idle = self._idle, fact.detail.get("resources") == 0
            if self._idle and not before:
                empty = "the group has no resources; add some with --add or rebalanser resources add"
                hint = empty if self._in_group == 0 else f"rebalanser status {self._group} says why"
                self._outputs.tell("owns_nothing", group=self._group, hint=hint)


@contextmanager
def _in_words_of_options(given: Values) -> Iterator[None]:
    """Name options instead of settings in errors.

    Raises:
        InvalidSettings: the settings can't be used.
    """
    try:
        yield
    except InvalidSettings as error:
        text = str(error)
        for setting in given:
            text = text.replace(setting, _OPTIONS[setting])
        raise InvalidSettings(text) from error


def _unusable(command: str) -> str:
    """Return why a command can't be run: it does not exist, or may not be executed."""
    if Path(command).is_file():
        return f"{command!r} is a file that this user may not execute; chmod +x it"
    return f"there is no command {command!r}"


def _style(prefix: bool | None, json: bool) -> Style:
    if json:
        return Style.JSON
    wanted = sys.stdout.isatty() if prefix is None else prefix
    return Style.PREFIXED if wanted else Style.AS_IT_IS
