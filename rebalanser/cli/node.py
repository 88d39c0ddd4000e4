"""``rebalanser node``: lists nodes, and drains them or ends that."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from rebalanser.cli.lines import absent_drains, node_line
from rebalanser.cli.options import GroupArgument, JsonOption, LimitOption, RegistryOption, complete_node
from rebalanser.cli.output import Face, counted

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", help="List nodes, drain one, or end that."
)

NodeArgument = Annotated[
    str,
    typer.Argument(
        metavar="NODE", help="The node's label.", show_default=False, autocompletion=complete_node
    ),
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Wait until the group is balanced again.")]
TimeoutOption = Annotated[
    float, typer.Option(min=0.0, metavar="SECONDS", help="Maximum time to wait, with --wait.")
]


@app.command("list")
def list_nodes(
    group: GroupArgument,
    after: Annotated[
        str | None,
        typer.Option(metavar="LABEL", help="List only nodes after this label.", show_default=False),
    ] = None,
    after_id: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="With --after: list also the nodes of that label whose ids are after this one.",
            show_default=False,
        ),
    ] = None,
    limit: LimitOption = None,
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """List the nodes in the order of their labels and ids, then the drained labels that no live node has.

    If there are more, the last line, or `next` in JSON, has the options for the next page. They serve even if
    the node that they name has left.
    """
    if after_id is not None and after is None:
        raise typer.BadParameter("--after-id needs --after")
    face = Face.of(registry, json)
    state = face.state(group)
    absent = absent_drains(state)
    nodes = [
        each
        for each in state.nodes
        if after is None
        or each.label > after
        or (each.label == after and after_id is not None and each.node > after_id)
    ]
    page = nodes[: face.limit(limit)]
    rest = nodes[len(page) :]
    last = [f"{label}: drained, not there" for label in absent]
    place: dict[str, str] | None = None
    if rest:
        place = {"after": page[-1].label}
        if page[-1].label == rest[0].label:  # nodes may share a label
            place["after_id"] = page[-1].node
        options = (f"--{name.replace('_', '-')} {shlex.quote(value)}" for name, value in place.items())
        last = [f"… {len(rest):,} more, use {' '.join(options)}"]
    face.answer(
        {
            "group": group,
            "nodes": [node.model_dump(mode="json") for node in page],
            "drained_and_absent": absent,
            "next": place,
        },
        *(node_line(node) for node in page),
        *last,
    )


@app.command()
def drain(
    group: GroupArgument,
    node: NodeArgument,
    wait: WaitOption = False,
    timeout: TimeoutOption = 60.0,
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """Move all resources away from a node, and keep it empty until it is undrained."""
    _set_drained(Face.of(registry, json), group, node, drained=True, wait_s=timeout if wait else None)


@app.command()
def undrain(
    group: GroupArgument,
    node: NodeArgument,
    wait: WaitOption = False,
    timeout: TimeoutOption = 60.0,
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """Let a node own resources again."""
    _set_drained(Face.of(registry, json), group, node, drained=False, wait_s=timeout if wait else None)


def _set_drained(face: Face, group: str, node: str, *, drained: bool, wait_s: float | None) -> None:
    with face.admin_of_known(group) as admin:
        if drained:
            admin.drain(node)
        else:
            admin.undrain(node)
        state = admin.state() if wait_s is None else admin.wait_balanced(wait_s)
    here = [each for each in state.nodes if each.label == node]
    held = sum(each.held for each in here)
    word = "drained" if drained else "undrained"
    said = f"it holds {counted(held, 'resource')} now" if here else "no live node has that label now"
    if wait_s is not None and state.unowned:
        said += f"; resources of the group without an owner: {state.unowned:,}, see rebalanser status"
    face.answer(
        {"group": group, "node": node, "drained": drained, "live": bool(here), "held": held},
        f"{node} is {word}; {said}",
    )
