"""The commands on groups: ``rebalanser groups``, ``status``, ``resources`` and ``node``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rebalanser.admin import UNCHANGED
from rebalanser.cli.arguments import read_attributes, read_names
from rebalanser.cli.commands import Commands
from rebalanser.cli.lines import absent_drains, first_nodes, node_line, plain, resource_line
from rebalanser.cli.options import (
    GroupArgument,
    LimitOption,
    RegistryOptions,
    complete_node,
    complete_resource,
)
from rebalanser.cli.output import Face, counted


def groups(on: RegistryOptions) -> None:
    """List the groups in the registry. In Kafka each group is a topic, which Kafka's own tools list."""
    face = on.face()
    names = face.groups()
    face.answer({"groups": names}, *names)


def status(
    on: RegistryOptions,
    group: GroupArgument,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code", help="Exit with 1 unless it is balanced and every resource has an owner."
        ),
    ] = False,
    limit: LimitOption = None,
) -> None:
    """Show a group: its nodes, its leader, whether it is balanced, and what waits for an owner.

    With --limit the JSON has at most N nodes and N resources.
    """
    face = on.face()
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


resources_app = Commands("Add, remove and list the resources of a group.")

NamesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME]...", help="The resources' names.", show_default=False)
]
KnownNamesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME]...",
        help="The resources' names.",
        show_default=False,
        autocompletion=complete_resource,
    ),
]
FileOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        metavar="PATH",
        allow_dash=True,
        show_default=False,
        help="A file of names, one per line; - is standard input. If one is invalid, nothing is changed.",
    ),
]


@resources_app.command()
def add(
    on: RegistryOptions,
    group: GroupArgument,
    names: NamesArgument = None,
    file: FileOption = None,
    weight: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            help="The weight of each, 1 by default. Groups do not place by it yet.",
            show_default=False,
        ),
    ] = None,
    pin: Annotated[
        str | None,
        typer.Option(
            metavar="NODE",
            help="The label of the only node that may own them.",
            show_default=False,
            autocompletion=complete_node,
        ),
    ] = None,
    unpin: Annotated[bool, typer.Option("--unpin", help="Let every node own them again.")] = False,
    attribute: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="An attribute; repeatable. The given attributes replace all earlier ones.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Add resources, or change existing ones. Options that are not given change nothing."""
    if unpin and pin is not None:
        raise typer.BadParameter("--pin and --unpin exclude each other")
    resources = read_names(names or (), file)
    attributes = UNCHANGED if attribute is None else read_attributes(attribute)
    face = on.face()
    with face.admin(group) as admin, face.progress("adding", len(resources)) as progress:
        added = admin.add(
            resources,
            weight=UNCHANGED if weight is None else weight,
            pin=UNCHANGED if pin is None and not unpin else pin,
            attributes=attributes,
            progress=progress,
        )
    already = len(resources) - added
    face.answer(
        {"group": group, "given": len(resources), "added": added},
        f"added {counted(added, 'resource')}"
        + (f"; {already:,} {'was' if already == 1 else 'were'} there already" if already else ""),
    )


@resources_app.command()
def remove(
    on: RegistryOptions,
    group: GroupArgument,
    names: KnownNamesArgument = None,
    file: FileOption = None,
) -> None:
    """Remove resources. Their owners stop."""
    resources = read_names(names or (), file)
    face = on.face()
    with face.admin_of_known(group) as admin, face.progress("removing", len(resources)) as progress:
        removed = admin.remove(resources, progress=progress)
    absent = len(resources) - removed
    face.answer(
        {"group": group, "given": len(resources), "removed": removed},
        f"removed {counted(removed, 'resource')}"
        + (f"; {absent:,} {'was' if absent == 1 else 'were'} not there" if absent else ""),
    )


@resources_app.command("list")
def list_resources(
    on: RegistryOptions,
    group: GroupArgument,
    node: Annotated[
        str | None,
        typer.Option(
            metavar="NODE",
            help="List only resources that this node holds or is assigned.",
            show_default=False,
            autocompletion=complete_node,
        ),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="List only resources after this name.", show_default=False),
    ] = None,
    limit: LimitOption = None,
) -> None:
    """List the resources with their owners, in the order of their names.

    If there are more, the last line, or `next` in JSON, has the option for the next page.
    """
    face = on.face()
    state = face.state(group)
    ids = {each.node for each in state.nodes if each.label == node}
    resources = [
        each
        for each in state.resources
        if not each.removed
        and (node is None or each.held_by in ids or each.assigned_to in ids)
        and (after is None or each.resource > after)
    ]
    page = resources[: face.limit(limit)]
    rest = len(resources) - len(page)
    more = [f"… {rest:,} more, use --after {shlex.quote(page[-1].resource)}"] if rest else []
    if node is not None and not ids and not on.json:
        typer.echo(f"no live node has the label {node!r}", err=True)
    face.answer(
        {
            "group": group,
            "resources": [resource.model_dump(mode="json") for resource in page],
            "next": {"after": page[-1].resource} if rest else None,
        },
        *(resource_line(resource) for resource in page),
        *more,
    )


node_app = Commands("List, drain and undrain nodes.")

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


@node_app.command("list")
def list_nodes(
    on: RegistryOptions,
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
) -> None:
    """List the nodes in the order of their labels and ids, then the drained labels that no live node has.

    If there are more, the last line, or `next` in JSON, has the options for the next page. They work even if
    the node that they name has left.
    """
    if after_id is not None and after is None:
        raise typer.BadParameter("--after-id needs --after")
    face = on.face()
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
    last = [f"{label}: drained, no live node" for label in absent]
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


@node_app.command()
def drain(
    on: RegistryOptions,
    group: GroupArgument,
    node: NodeArgument,
    wait: WaitOption = False,
    timeout: TimeoutOption = 60.0,
) -> None:
    """Move all resources away from a node, and keep it empty until it is undrained."""
    _set_drained(on.face(), group, node, drained=True, wait_s=timeout if wait else None)


@node_app.command()
def undrain(
    on: RegistryOptions,
    group: GroupArgument,
    node: NodeArgument,
    wait: WaitOption = False,
    timeout: TimeoutOption = 60.0,
) -> None:
    """Let a node own resources again."""
    _set_drained(on.face(), group, node, drained=False, wait_s=timeout if wait else None)


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
    resources = f"it holds {counted(held, 'resource')} now" if here else "no live node has that label now"
    if wait_s is not None and state.unowned:
        resources += f"; resources of the group without an owner: {state.unowned:,}, see rebalanser status"
    face.answer(
        {"group": group, "node": node, "drained": drained, "live": bool(here), "held": held},
        f"{node} is {word}; {resources}",
    )
