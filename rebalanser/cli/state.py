"""``rebalanser status``: the state of a group."""

from __future__ import annotations

from typing import Annotated

import typer

from rebalanser.cli.lines import first_nodes, plain
from rebalanser.cli.options import GroupArgument, JsonOption, LimitOption, RegistryOption
from rebalanser.cli.output import Face


def status(
    group: GroupArgument,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code", help="Exit with 1 unless it is balanced and every resource has an owner."
        ),
    ] = False,
    limit: LimitOption = None,
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """Show a group: its nodes, its leader, whether it is balanced, and what waits for an owner.

    With --limit the JSON has at most N nodes and N resources.
    """
    face = Face.of(registry, json)
    state = face.state(group)
    most = face.limit(limit)
    if face.on_terminal:
        from rebalanser.cli.table import render  # noqa: PLC0415 - slow to import

        face.draw(render(state, most_nodes=most))
    else:
        cut = {"nodes": tuple(first_nodes(state, most)), "resources": state.resources[:most]}
        face.answer(state.model_copy(update=cut), *plain(state, most))
    if exit_code and not state.all_owned:
        raise typer.Exit(1)
