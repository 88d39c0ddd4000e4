"""``rebalanser resources``: adds, removes and lists the resources of a group."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rebalanser.admin import UNCHANGED
from rebalanser.cli.arguments import read_attributes, read_names
from rebalanser.cli.lines import resource_line
from rebalanser.cli.options import (
    GroupArgument,
    JsonOption,
    LimitOption,
    RegistryOption,
    complete_node,
    complete_resource,
)
from rebalanser.cli.output import Face, counted

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", help="Add, remove and list the resources of a group."
)

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


@app.command()
def add(
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
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """Add resources, or change existing ones. Options that are not given change nothing."""
    if unpin and pin is not None:
        raise typer.BadParameter("--pin and --unpin exclude each other")
    resources = read_names(names or (), file)
    attributes = UNCHANGED if attribute is None else read_attributes(attribute)
    face = Face.of(registry, json)
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


@app.command()
def remove(
    group: GroupArgument,
    names: KnownNamesArgument = None,
    file: FileOption = None,
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """Remove resources. Their owners stop."""
    resources = read_names(names or (), file)
    face = Face.of(registry, json)
    with face.admin_of_known(group) as admin, face.progress("removing", len(resources)) as progress:
        removed = admin.remove(resources, progress=progress)
    absent = len(resources) - removed
    face.answer(
        {"group": group, "given": len(resources), "removed": removed},
        f"removed {counted(removed, 'resource')}"
        + (f"; {absent:,} {'was' if absent == 1 else 'were'} not there" if absent else ""),
    )


@app.command("list")
def list_resources(
    group: GroupArgument,
    node: Annotated[
        str | None,
        typer.Option(
            metavar="NODE",
            help="List only resources that this node holds or is to hold.",
            show_default=False,
            autocompletion=complete_node,
        ),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="List only resources after this name.", show_default=False),
    ] = None,
    limit: LimitOption = None,
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """List the resources with their owners, in the order of their names.

    If there are more, the last line, or `next` in JSON, has the option for the next page.
    """
    face = Face.of(registry, json)
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
    if node is not None and not ids and not json:
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
