"""Options and arguments that several commands have: each is declared once, with one text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from rebalanser.cli.output import SHOWN, Face, default_url
from rebalanser.registry.urls import KAFKA_VARIABLE, REGISTRY_VARIABLE
from rebalanser.settings import PREFIX


def _completed(context: typer.Context, begun: str, names: Callable[[Face], Iterable[str]]) -> list[str]:
    """Return the names that a shell may complete; none if the registry does not answer."""
    try:
        face = Face(context.params.get("registry") or default_url(), json=True)
        return [name for name in names(face) if name.startswith(begun)]
    except Exception:
        return []


def _group_in(context: typer.Context) -> str:
    """Return the group on a command line that may end with an option that has no value yet.

    Arguments are not parsed then, only collected.
    """
    group = context.params.get("group")
    return str(context.args[0] if group is None else group)


def complete_group(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return names of groups, for the shell."""
    return _completed(ctx, incomplete, Face.groups)


def complete_node(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return node labels of the group on the command line, for the shell."""

    def labels(face: Face) -> Iterable[str]:
        state = face.state(_group_in(ctx))
        return sorted({*state.drained, *(node.label for node in state.nodes)})

    return _completed(ctx, incomplete, labels)


def complete_resource(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return resources of the group on the command line, for the shell."""
    return _completed(
        ctx, incomplete, lambda face: (each.resource for each in face.state(_group_in(ctx)).resources)
    )


GroupArgument = Annotated[
    str,
    typer.Argument(
        metavar="GROUP", help="The group's name.", show_default=False, autocompletion=complete_group
    ),
]
LimitOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        show_default=f"{SHOWN} on a terminal, else all",
        help="Show at most N, and the number of the others.",
    ),
]
RegistryOption = Annotated[
    str | None,
    typer.Option(
        "--registry",
        metavar="URL",
        envvar=REGISTRY_VARIABLE,
        show_default="a SQLite file in the user's state folder",
        help="The registry, such as sqlite:///groups.db or etcd://HOST:PORT,HOST:PORT.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for errors too.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
VerboseOption = Annotated[
    int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Log more; repeatable.")
]
KafkaOption = Annotated[
    str | None,
    typer.Option(
        "--kafka",
        metavar="HOST:PORT",
        envvar=KAFKA_VARIABLE,
        show_default=False,
        help="Addresses of Kafka, such as HOST:PORT,HOST:PORT, or a kafka:// URL with security settings.",
    ),
]
HistoryOption = Annotated[
    Path | None,
    typer.Option(
        "--history",
        metavar="FOLDER",
        envvar=f"{PREFIX}HISTORY_DIR",
        show_default=False,
        help="Write the ownership history for `rebalanser audit` to files of JSON lines in this folder.",
    ),
]
HistoryTopicOption = Annotated[
    str | None,
    typer.Option(
        "--history-topic",
        metavar="URL",
        envvar=f"{PREFIX}HISTORY_TOPIC",
        show_default=False,
        help="Write the history to a topic, kafka://HOST:PORT/TOPIC.",
    ),
]


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """The options of every command on a registry."""

    registry: RegistryOption = None
    json: JsonOption = False

    def face(self, verbose: int = 0) -> Face:
        """Return the command's face. Logs go to standard error, more of them with ``verbose``."""
        return Face.of(self.registry, self.json, verbose)


@dataclass(frozen=True, slots=True)
class ParticipantOptions:
    """The options of a process that takes part in a protocol over Kafka."""

    history: HistoryOption = None
    history_topic: HistoryTopicOption = None
    verbose: VerboseOption = 0
