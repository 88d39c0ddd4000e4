"""``rebalanser plan`` and ``rebalanser explain``: what an allocation would do, and why it is as it is."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final

import typer

from rebalanser.cli.arguments import read_conditions, read_described, read_pairs
from rebalanser.cli.groups import labels_where
from rebalanser.cli.lines import first_lines
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
from rebalanser.cli.output import Face, counted, printable
from rebalanser.explanation import Explanation
from rebalanser.plan import GroupPlan, PlannedMove, PlannedNode
from rebalanser.runtime.narration import shown_names

UNPLACED: Final = 2
"""Exit code of a plan by which a resource has no owner."""
_UNOWNED: Final = "unowned by this process's settings, without requests to the registry and OnStart"


def plan(
    on: RegistryOptions,
    group: GroupArgument,
    described: ResourceOptions,
    policy: PolicyOptions,
    add_node: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL[,KEY=VALUE]...",
            help="A node that joins, such as w9,capacity=8,tags=gpu;ssd,zone=eu-1,mode=eager; repeatable.",
            show_default=False,
        ),
    ] = None,
    remove_node: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL",
            help="The live nodes with this label leave; repeatable.",
            show_default=False,
            autocompletion=complete_node,
        ),
    ] = None,
    drain: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL",
            help="The live nodes with this label are drained; repeatable.",
            show_default=False,
            autocompletion=complete_node,
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--drain-where",
            "--where",
            metavar="KEY=VALUE",
            help="All live nodes with this label, zone or attribute are drained; repeatable, all must hold.",
            show_default=False,
        ),
    ] = None,
    undrain: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL",
            help="The nodes with this label are undrained; repeatable.",
            show_default=False,
            autocompletion=complete_node,
        ),
    ] = None,
    undrain_where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="All live nodes with this label, zone or attribute are undrained; repeatable, all must "
            "hold.",
            show_default=False,
        ),
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A resource that is added, or changed as --weight, --needs, --spread and --pin say; "
            "repeatable.",
            show_default=False,
        ),
    ] = None,
    source: FromOption = None,
    remove: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A resource that is removed; repeatable.",
            show_default=False,
            autocompletion=complete_resource,
        ),
    ] = None,
    set_weight: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER", help="Another weight of a resource; repeatable.", show_default=False
        ),
    ] = None,
    set_pin: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=LABEL", help="Another pin of a resource; repeatable.", show_default=False),
    ] = None,
    clear_pin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A resource that every node may own again; repeatable.",
            show_default=False,
            autocompletion=complete_resource,
        ),
    ] = None,
    limit: LimitOption = None,
) -> None:
    """Show what the next allocation would do about a change, without making it.

    Exits with 2 if a resource would have no owner. Nothing is written. With --json all moves are listed.
    """
    said = described.said
    if said and not add and source is None:
        raise typer.BadParameter("--weight, --needs, --spread and --pin need --add or --from")
    rows = {} if source is None else {name: {**said, **row} for name, row in read_described(source).items()}
    both = sorted(rows.keys() & set(add or ()))
    if both:
        raise typer.BadParameter(f"{both[0]!r} is in --from and --add")
    pins: dict[str, str | None] = {**read_pairs(set_pin or (), "--set-pin")}
    for name in clear_pin or ():
        if name in pins:
            raise typer.BadParameter(f"the pin of {name!r} is given twice")
        pins[name] = None
    if len(set(add or ())) < len(add or ()):
        raise typer.BadParameter("--add has a resource twice")
    changes: dict[str, Any] = {
        "add_nodes": _nodes_to_come(add_node or ()),
        "remove_nodes": remove_node or (),
        "add": rows | dict.fromkeys(add or (), said),
        "remove": remove or (),
        "weights": {
            name: _number(name, text) for name, text in read_pairs(set_weight or (), "--set-weight").items()
        },
        "pins": pins,
        **policy.changes,
    }
    drains, undrains = read_conditions(where or ()), read_conditions(undrain_where or (), "--undrain-where")
    face = on.face()
    with face.admin_of_known(group) as admin:
        state = face.known(admin.state()) if drains or undrains else None
        planned = admin.plan(
            drain=[*(drain or ()), *(labels_where(state, drains) if state and drains else ())],
            undrain=[*(undrain or ()), *(labels_where(state, undrains) if state and undrains else ())],
            **changes,
        )
    face.answer(planned, *_plan_lines(planned, face.limit(limit)))
    if not planned.all_placed:
        raise typer.Exit(UNPLACED)


def _nodes_to_come(given: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return what each ``LABEL[,KEY=VALUE]...`` says of a node, as ``Admin.plan`` takes it."""
    nodes: dict[str, dict[str, Any]] = {}
    for text in given:
        label, *parts = text.split(",")
        if label in nodes:
            raise typer.BadParameter(f"{label!r} is given twice", param_hint="'--add-node'")
        offers: dict[str, Any] = {**read_pairs(parts, "--add-node")}
        if "tags" in offers:
            offers["tags"] = [tag.strip() for tag in offers["tags"].split(";")]
        nodes[label] = offers
    return nodes


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(
            f"the weight of {name!r} is {text!r}: give a number", param_hint="'--set-weight'"
        ) from None


def _plan_lines(planned: GroupPlan, most: int | None) -> Iterator[str]:
    moved, unplaced = len(planned.moves), len(planned.unplaced)
    yield f"{planned.group}: {counted(moved, 'resource')} would get a node, {unplaced:,} would have none"
    yield (
        f"  largest load per capacity {planned.largest_before:.4g} now, {planned.largest_after:.4g} then; "
        f"no allocation gets below {planned.bound:.4g}"
    )
    yield from _part("moves", _move_lines(planned.moves), most)
    yield from _part(_UNOWNED, _time_lines(planned), None)
    yield from _part("no owner", _unplaced_lines(planned), most)
    if planned.stopped:
        yield f"stopped, as removed: {counted(len(planned.stopped), 'resource')}"
    yield from _part("nodes", [_node_line(node) for node in planned.nodes if _is_changed(node)], most)
    yield from (f"note: {printable(note)}" for note in planned.notes)


def _part(title: str, lines: Iterable[str], most: int | None) -> list[str]:
    listed = [f"  {line}" for line in lines]
    if not listed:
        return []
    return [f"{title}:", *first_lines(listed[:most], len(listed) if most is None else most + 1, len(listed))]


def _move_lines(moves: Iterable[PlannedMove]) -> Iterator[str]:
    """Yield a line for each reason and node, on the side of the moves that has fewer nodes."""
    by_reason: dict[str, list[PlannedMove]] = defaultdict(list)
    for move in moves:
        by_reason[move.reason].append(move)
    for reason, those in sorted(by_reason.items()):
        sources = Counter(move.source or "no node" for move in those)
        targets = Counter(move.target for move in those)
        by_source = len(sources) <= len(targets)
        together: dict[str, list[PlannedMove]] = defaultdict(list)
        for move in those:
            together[(move.source or "no node") if by_source else move.target].append(move)
        for label, group in sorted(together.items()):
            others = Counter(move.target if by_source else move.source or "no node" for move in group)
            far = _counted_labels(others)
            way = f"{printable(label)} -> {far}" if by_source else f"{far} -> {printable(label)}"
            yield f"{len(group):,}, {way} ({reason}): {shown_names([move.resource for move in group])}"


def _counted_labels(labels: Mapping[str, int]) -> str:
    """Return the first labels with their numbers, and the number of the others."""
    counts = {f"{printable(label)} {number:,}" for label, number in labels.items()}
    return printable(next(iter(labels))) if len(labels) == 1 else shown_names(counts)


def _time_lines(planned: GroupPlan) -> Iterator[str]:
    for each in planned.unowned:
        yield f"up to {each.unowned_s:g} s: {counted(each.resources, 'resource')} {each.kind} ({each.of})"


def _unplaced_lines(planned: GroupPlan) -> Iterator[str]:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for each in planned.unplaced:
        by_reason[each.reason].append(each.resource)
    stopped = Counter(each.reason for each in planned.unplaced if each.source is not None)
    for reason, names in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0])):
        now = f", of which {stopped[reason]:,} now run" if stopped[reason] else ""
        yield f"{counted(len(names), 'resource')}{now}, {printable(reason)}: {shown_names(names)}"


def _is_changed(node: PlannedNode) -> bool:
    before, after = (node.resources_before, node.load_before), (node.resources_after, node.load_after)
    return node.change is not None or before != after or node.restarted > 0


def _node_line(node: PlannedNode) -> str:
    change = f"{node.change}, " if node.change else "drained, " if node.drained else ""
    restarts = f", {node.restarted:,} that stay restart" if node.restarted else ""
    capacity = "" if node.capacity is None else f" of {node.capacity:g}"
    return (
        f"{printable(node.label)}: {change}{node.resources_before:,} -> "
        f"{counted(node.resources_after, 'resource')}, load {node.load_before:g} -> {node.load_after:g}"
        f"{capacity}{restarts}"
    )


def explain(
    on: RegistryOptions,
    group: GroupArgument,
    resource: Annotated[
        str,
        typer.Argument(
            metavar="RESOURCE",
            help="The resource's name.",
            show_default=False,
            autocompletion=complete_resource,
        ),
    ],
) -> None:
    """Say why a resource is where it is, why it is on no other node, and what it waits for."""
    face: Face = on.face()
    with face.admin_of_known(group) as admin:
        explained = admin.explain(resource)
    face.answer(explained, *_explanation_lines(explained))


def _explanation_lines(explained: Explanation) -> Iterator[str]:
    if explained.owner is not None:
        owner = f"owned by {printable(explained.owner)}, token {explained.token}"
    elif explained.held_by is not None:
        owner = f"no live owner; {explained.held_by} has the barrier, token {explained.token}"
    else:
        owner = "no owner"
    yield f"{printable(explained.resource)}: {owner}"
    if explained.assigned is not None:
        assigned = printable(explained.assigned)
        yield f"  in the share of {assigned}, which is of version {explained.assigned_by}"
    yield f"  why: {printable(explained.reason)}"
    yield from (f"  waits: {printable(wait)}" for wait in explained.waits_for)
    by_reason: dict[str, list[str]] = defaultdict(list)
    for node in explained.nodes:
        by_reason[node.reason].append(node.label)
    for reason, labels in sorted(by_reason.items()):
        yield f"  not on {shown_names(labels)}: {printable(reason)}"
