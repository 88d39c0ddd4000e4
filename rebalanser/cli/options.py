"""Options and arguments that several commands have: each is declared once, with one text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rebalanser.cli.output import SHOWN, Face, default_url
from rebalanser.core.group import SpreadOver
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
FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="PATH",
        help="A file of resources and what is said of each: .csv with the columns name, weight, needs, "
        "spread and pin, or .jsonl. The options apply where it says nothing.",
        show_default=False,
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


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """The options that change a group's policy; one that is not given changes nothing."""

    spread_over: Annotated[
        SpreadOver | None,
        typer.Option(
            help="Keep resources with the same spread on distinct nodes, or in distinct zones.",
            show_default=False,
        ),
    ] = None
    imbalance_band: Annotated[
        float | None,
        typer.Option(
            metavar="PART",
            help="Move nothing for a better balance while the largest load is over the lower bound by at "
            "most this part; 0.1 is a tenth.",
            show_default=False,
        ),
    ] = None
    max_moves: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="The most resources that one rebalance moves for a better balance.",
            show_default=False,
        ),
    ] = None
    any_moves: Annotated[bool, typer.Option("--any-moves", help="No limit to these moves.")] = False
    move_interval: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Minimum time between two rebalances that only improve the balance.",
            show_default=False,
        ),
    ] = None
    cooldown: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Time after a move in which a resource does not move again for a better balance.",
            show_default=False,
        ),
    ] = None

    @property
    def changes(self) -> dict[str, Any]:
        """The fields of the policy that are given, as ``Admin.configure`` takes them."""
        if self.any_moves and self.max_moves is not None:
            raise typer.BadParameter("--max-moves and --any-moves exclude each other")
        given = {
            "spread_over": self.spread_over,
            "imbalance_band": self.imbalance_band,
            "max_moves": self.max_moves,
            "move_interval_s": self.move_interval,
            "cooldown_s": self.cooldown,
        }
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return changes | ({"max_moves": None} if self.any_moves else {})


@dataclass(frozen=True, slots=True)
class ResourceOptions:
    """The options that say something of resources; one that is not given changes nothing."""

    weight: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            help="The weight of each, its part of a node's load; 1 by default.",
            show_default=False,
        ),
    ] = None
    needs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TAG",
            help="A tag that their node must have; repeatable. The given tags replace all earlier ones.",
            show_default=False,
        ),
    ] = None
    no_needs: Annotated[bool, typer.Option("--no-needs", help="Remove their needs.")] = False
    spread: Annotated[
        str | None,
        typer.Option(
            metavar="WORD",
            help="Keep them, and all others with the same word, on distinct nodes or in distinct zones.",
            show_default=False,
        ),
    ] = None
    no_spread: Annotated[bool, typer.Option("--no-spread", help="Keep them apart no longer.")] = False
    pin: Annotated[
        str | None,
        typer.Option(
            metavar="NODE",
            help="The label of the only node that may own them.",
            show_default=False,
            autocompletion=complete_node,
        ),
    ] = None
    unpin: Annotated[bool, typer.Option("--unpin", help="Let every node own them again.")] = False

    @property
    def said(self) -> dict[str, Any]:
        """The given fields of the resources, as ``Admin.add`` takes them."""
        return {
            **({} if self.weight is None else {"weight": self.weight}),
            **_set_or_cleared("needs", self.needs, "--no-needs", [] if self.no_needs else None),
            **_set_or_cleared("spread", self.spread, "--no-spread", self.no_spread or None),
            **_set_or_cleared("pin", self.pin, "--unpin", self.unpin or None),
        }


def _set_or_cleared(name: str, value: object, clear: str, cleared: object) -> dict[str, Any]:
    """Return what two options say of a field: one sets it, the other clears it; empty if neither is given."""
    if value is not None and cleared is not None:
        raise typer.BadParameter(f"--{name} and {clear} exclude each other")
    if cleared is not None:
        return {name: cleared if cleared is not True else None}
    return {} if value is None else {name: value}
