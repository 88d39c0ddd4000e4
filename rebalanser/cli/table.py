"""The state of a group for people: a table where there is a terminal, plain lines where there is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from rich.box import ROUNDED
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rebalanser.state import GroupState, NodeState, ResourceState

MOST_RESOURCES: Final = 120
"""How many resources of one node are named in the table."""
MOST_WAITS: Final = 10
"""How many waits are listed below the table."""

HELD, COMING, LEAVING = "green", "yellow", "red"


def waits(state: GroupState) -> Iterator[str]:
    """Who waits for what, one sentence each."""
    labels = {node.node: node.label for node in state.nodes}
    for resource in state.resources:
        wanted_by = labels.get(resource.assigned_to or "")
        holder = resource.owner or (f"{resource.held_by} (gone)" if resource.held_by else None)
        if resource.removed:
            yield f"{resource.resource} is removed and still held by {holder}"
        elif holder is not None and resource.held_by != resource.assigned_to:
            yield f"{wanted_by or 'a node to come'} waits for {resource.resource}, held by {holder}"
        elif holder is None and wanted_by is not None:
            yield f"{wanted_by} has not taken {resource.resource} yet"
        elif holder is None:
            yield f"{resource.resource} waits for a node" + (f" named {resource.pin}" if resource.pin else "")


def headline(state: GroupState) -> str:
    """The group in one line."""
    owned = sum(resource.held_by is not None for resource in state.resources)
    condition = "balanced" if state.balanced else "rebalancing" if state.nodes else "nobody takes part"
    return (
        f"{state.group}: {condition}, version {state.version}, term {state.term}, "
        f"leader {state.leader or 'none'}, {counted(len(state.nodes), 'node')}, "
        f"{owned:,} of {counted(len(state.resources), 'resource')} owned"
    )


def counted(number: int, noun: str) -> str:
    """A number of things, such as ``1 node`` or ``10,000 nodes``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def node_line(node: NodeState) -> str:
    """A node in one line."""
    return f"{node.label}: {', '.join(_roles(node))}, holds {node.held} of {node.assigned} assigned"


def resource_line(resource: ResourceState) -> str:
    """A resource in one line."""
    owner = resource.owner or resource.held_by
    parts = [f"owned by {owner}, token {resource.token}" if owner else "no owner"]
    if resource.weight != 1:
        parts.append(f"weight {resource.weight:g}")
    if resource.pin is not None:
        parts.append(f"pinned to {resource.pin}")
    parts += [f"{name}={value}" for name, value in resource.attributes.items()]
    return f"{resource.resource}: {', '.join(parts)}"


def plain(state: GroupState) -> list[str]:
    """The group as lines of text: the headline, the nodes, and who waits for what."""
    return [headline(state), *(f"  {node_line(node)}" for node in state.nodes), *_first_waits(state)]


def render(state: GroupState, note: str | None = None) -> RenderableType:
    """The group as a table: a row for each node, with the resources that it holds, gets and gives up.

    ``note`` is shown below it, for what a person should know beside the state.
    """
    table = Table(box=ROUNDED)
    table.add_column("node", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("holds", justify="right", no_wrap=True)
    table.add_column("resources", ratio=1)
    for node in state.nodes:
        table.add_row(
            Text(f"{'★' if node.leader else ' '} {node.label}", style="bold" if node.leader else ""),
            Text(", ".join(_roles(node)), style=HELD if node.completed else COMING),
            Text(f"{node.held}/{node.assigned}"),
            _resources_of(node, state.resources),
        )
    below = [Text(line, style=COMING) for line in _first_waits(state)]
    if note is not None:
        below.append(Text(note, style="bold red"))
    above = Text(headline(state), style=f"bold {HELD if state.balanced else COMING}")
    return Group(above, *([table] if state.nodes else []), *below)


def _roles(node: NodeState) -> list[str]:
    roles = ["leader"] if node.leader else []
    roles += ["drained"] if node.drained else []
    return [*roles, "ready" if node.completed else "rebalancing"]


def _resources_of(node: NodeState, resources: Sequence[ResourceState]) -> Text:
    """``●`` is held, ``○`` is coming, ``◌`` is leaving; the number is the fencing token."""
    concerned = [r for r in resources if node.node in {r.held_by, r.assigned_to}]
    text = Text()
    for resource in concerned[:MOST_RESOURCES]:
        text.append("  " if text else "")
        if resource.held_by != node.node:
            text.append(f"○\u00a0{resource.resource}", style=COMING)
            continue
        leaving = resource.assigned_to != node.node
        style = LEAVING if leaving else HELD
        text.append(f"{'◌' if leaving else '●'}\u00a0{resource.resource}", style=style)
        text.append(f"\u00a0{resource.token}", style="dim")
    if len(concerned) > MOST_RESOURCES:
        text.append(f"  and {len(concerned) - MOST_RESOURCES:,} more", style="dim")
    return text


def _first_waits(state: GroupState) -> list[str]:
    every = waits(state)
    lines = [f"  {line}" for line in islice(every, MOST_WAITS)]
    rest = sum(1 for _ in every)
    return [*lines, f"  and {rest:,} more"] if rest else lines
