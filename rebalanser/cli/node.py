"""``rebalanser node``: list nodes, take work off one, and give it back."""

from __future__ import annotations

import shlex
from typing import Annotated, Final

import typer

from rebalanser.cli.face import Face, GroupArgument, JsonOption, LimitOption, RegistryOption, complete_node
from rebalanser.cli.lines import absent_drains, counted, node_line

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", help="List nodes, drain one, or end that."
)

MAX_TEXT: Final = chr(0x10FFFF)
"""Sorts after every node id."""

NodeArgument = Annotated[
    str,
    typer.Argument(
        metavar="NODE", help="The node's label.", show_default=False, autocompletion=complete_node
    ),
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Wait until the group is balanced again.")]
TimeoutOption = Annotated[
    float, typer.Option(min=0.0, metavar="SECONDS", help="How long to wait at most, with --wait.")
]


@app.command("list")
def list_nodes(
    group: GroupArgument,
    after: Annotated[
        str | None,
        typer.Option(metavar="NODE", help="Only those after this label, or node id.", show_default=False),
    ] = None,
    limit: LimitOption = None,
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """List the nodes in the order of their labels, then the drained labels that no live node has."""
    face = Face.of(registry, json)
    state = face.state(group)
    absent = absent_drains(state)
    start = ("", "") if after is None else (after, MAX_TEXT)
    start = next(((each.label, each.node) for each in state.nodes if each.node == after), start)
    nodes = [each for each in state.nodes if (each.label, each.node) > start]
    page = nodes[: face.limit(limit)]
    rest = nodes[len(page) :]
    last = [f"{label}: drained, not there" for label in absent]
    if rest:  # nodes may share a label, and then only an id says where to go on
        name = page[-1].node if page[-1].label == rest[0].label else page[-1].label
        last = [f"… {len(rest):,} more, use --after {shlex.quote(name)}"]
    face.answer(
        {
            "group": group,
            "nodes": [node.model_dump(mode="json") for node in page],
            "drained_and_absent": absent,
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
    """Move all resources away from a node, and give it none, until it is undrained."""
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
    face.answer(
        {"group": group, "node": node, "drained": drained, "live": bool(here), "held": held},
        f"{node} is {word}; it holds {counted(held, 'resource')} now"
        if here
        else f"{node} is {word}; no live node has that label now",
    )
