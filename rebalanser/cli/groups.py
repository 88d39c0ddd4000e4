"""The commands on groups: ``rebalanser groups``, ``status``, ``group``, ``resources`` and ``node``."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rebalanser.cli.arguments import read_attributes, read_conditions, read_described, read_names
from rebalanser.cli.commands import Commands
from rebalanser.cli.lines import absent_drains, first_nodes, node_line, plain, resource_line
from rebalanser.cli.options import (
    FromOption,
    GroupArgument,
    LimitOption,
    PolicyOptions,
    RegistryOptions,
    ResourceOptions,
    complete_node,
    complete_resource,
)
from rebalanser.cli.output import Face, counted
from rebalanser.core.group import Policy, SpreadOver
from rebalanser.errors import InvalidArgument
from rebalanser.runtime.narration import shown_names
from rebalanser.state import GroupState, NodeState


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


group_app = Commands("Set and show the policy of a group.")


@group_app.command("set")
def set_policy(
    on: RegistryOptions,
    group: GroupArgument,
    policy_options: PolicyOptions,
) -> None:
    """Change the policy of a group. Options that are not given change nothing."""
    changes = policy_options.changes
    if not changes:
        raise typer.BadParameter("nothing to change; give an option")
    face = on.face()
    with face.admin_of_known(group) as admin:
        admin.configure(**changes)
        policy = admin.policy()
    _show_policy(face, group, policy)


@group_app.command("show")
def show_policy(on: RegistryOptions, group: GroupArgument) -> None:
    """Show the policy of a group."""
    face = on.face()
    with face.admin_of_known(group) as admin:
        if not admin.exists():
            face.known(admin.state())
        policy = admin.policy()
    _show_policy(face, group, policy)


def _show_policy(face: Face, group: str, policy: Policy) -> None:
    moves = "any number of" if policy.max_moves is None else f"at most {policy.max_moves:,}"
    apart = "in distinct zones" if policy.spread_over is SpreadOver.ZONE else "on distinct nodes"
    face.answer(
        {"group": group, "policy": asdict(policy)},
        f"{group}: resources with the same spread are {apart}",
        f"  imbalance band {policy.imbalance_band:g}, {moves} moves for a better balance in one rebalance",
        f"  at least {policy.move_interval_s:g} s between such rebalances, "
        f"and {policy.cooldown_s:g} s between such moves of one resource",
    )


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
        help="A file of names alone, one per line; - is standard input. If one is invalid, nothing is "
        "changed.",
    ),
]


@resources_app.command()
def add(
    on: RegistryOptions,
    group: GroupArgument,
    described: ResourceOptions,
    names: NamesArgument = None,
    file: FileOption = None,
    source: FromOption = None,
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
    said: dict[str, Any] = {
        **described.said,
        **({} if attribute is None else {"attributes": read_attributes(attribute)}),
    }
    if source is not None and (names or file is not None):
        raise typer.BadParameter("--from excludes names and --file")
    rows = {} if source is None else {name: {**said, **row} for name, row in read_described(source).items()}
    resources = read_names(names or (), file) if source is None else list(rows)
    face = on.face()
    with face.admin(group) as admin, face.progress("adding", len(resources)) as progress:
        if source is None:
            added = admin.add(resources, **said, progress=progress)
        else:
            added = admin.add_each(rows, progress=progress)
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
    str | None,
    typer.Argument(
        metavar="[NODE]", help="The node's label.", show_default=False, autocompletion=complete_node
    ),
]
WhereOption = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="KEY=VALUE",
        help="Instead of NODE: all live nodes with this label, zone or attribute; repeatable, all must hold.",
        show_default=False,
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
    """List the nodes in the order of their labels and ids, then the labels that are away.

    Those are drained labels that no live node has, and labels whose share is kept for their return. If there
    are more, the last line, or `next` in JSON, has the options for the next page. They work even if the node
    that they name has left.
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
    last += [
        f"{each.label}: away, {counted(each.resources, 'resource')} kept for up to {each.rejoin_grace_s:g} s"
        for each in state.kept
    ]
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
            "kept": [each.model_dump(mode="json") for each in state.kept],
            "next": place,
        },
        *(node_line(node) for node in page),
        *last,
    )


@node_app.command()
def drain(
    on: RegistryOptions,
    group: GroupArgument,
    node: NodeArgument = None,
    where: WhereOption = None,
    wait: WaitOption = False,
    timeout: TimeoutOption = 60.0,
) -> None:
    """Move all resources away from a node, and keep it empty until it is undrained.

    Nodes with one label are drained together, also those that come later.
    """
    _set_drained(on.face(), group, node, where, drained=True, wait_s=timeout if wait else None)


@node_app.command()
def undrain(
    on: RegistryOptions,
    group: GroupArgument,
    node: NodeArgument = None,
    where: WhereOption = None,
    wait: WaitOption = False,
    timeout: TimeoutOption = 60.0,
) -> None:
    """Let a node own resources again."""
    _set_drained(on.face(), group, node, where, drained=False, wait_s=timeout if wait else None)


def _set_drained(
    face: Face, group: str, node: str | None, where: list[str] | None, *, drained: bool, wait_s: float | None
) -> None:
    conditions = read_conditions(where or ())
    if (node is None) == (not conditions):
        raise typer.BadParameter("name a NODE, or describe nodes with --where")
    with face.admin_of_known(group) as admin:
        labels = [node] if node is not None else labels_where(face.known(admin.state()), conditions)
        for label in labels:
            if drained:
                admin.drain(label)
            else:
                admin.undrain(label)
        state = admin.state() if wait_s is None else admin.wait_balanced(wait_s)
    here = [each for each in state.nodes if each.label in labels]
    held = sum(each.held for each in here)
    word = "drained" if drained else "undrained"
    if node is not None:
        resources = f"it holds {counted(held, 'resource')} now" if here else "no live node has that label now"
        subject = f"{node} is"
    else:
        is_one = len(labels) == 1
        resources = f"{'it holds' if is_one else 'they hold'} {counted(held, 'resource')} now"
        subject = f"{counted(len(labels), 'label')} ({shown_names(labels)}) {'is' if is_one else 'are'}"
    if wait_s is not None and state.unowned:
        resources += f"; resources of the group without an owner: {state.unowned:,}, see rebalanser status"
    named = {"node": node} if node is not None else {"nodes": labels}
    face.answer(
        {"group": group, **named, "drained": drained, "live": bool(here), "held": held},
        f"{subject} {word}; {resources}",
    )


def labels_where(state: GroupState, conditions: dict[str, str]) -> list[str]:
    """Return the labels of the live nodes that meet all conditions, at least one.

    Raises:
        InvalidArgument: none does, or a node that does not has the label of one that does.
    """
    meeting = [node for node in state.nodes if _meets(node, conditions)]
    described = ", ".join(f"{name}={value}" for name, value in conditions.items())
    if not meeting:
        raise InvalidArgument(
            f"no live node of {state.group} has {described} as its label, zone or attributes; "
            "nothing was changed"
        )
    labels = {node.label for node in meeting}
    for node in state.nodes:
        if node.label in labels and not _meets(node, conditions):
            raise InvalidArgument(
                f"of the nodes with the label {node.label} not all have {described}, and a label is drained "
                "as a whole; nothing was changed"
            )
    return sorted(labels)


def _meets(node: NodeState, conditions: dict[str, str]) -> bool:
    """Return True if each condition is the node's label, its zone, or one of its attributes."""
    known = {"label": {node.label}, "zone": {node.zone}}
    return all(
        value in known.get(name, set()) or node.attributes.get(name) == value
        for name, value in conditions.items()
    )
