"""The state of a group for people, as plain lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from rebalanser.state import GroupState, NodeState, ResourceState

MOST_WAITS: Final = 10
"""How many waits are listed."""


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
    return (
        f"{state.group}: {condition(state)}, version {state.version}, term {state.term}, "
        f"leader {state.leader or 'none'}, {counted(len(state.nodes), 'node')}, "
        f"{owned:,} of {counted(len(state.resources), 'resource')} owned"
    )


def counted(number: int, noun: str) -> str:
    """A number of things, such as ``1 node`` or ``10,000 nodes``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def node_line(node: NodeState) -> str:
    """A node in one line."""
    role = "leader, " if node.leader else ""
    return f"{node.label}: {role}{condition_of(node)}, holds {node.held} of {node.assigned} assigned"


def resource_line(resource: ResourceState) -> str:
    """A resource in one line."""
    owner = resource.owner or resource.held_by
    parts = [f"owned by {owner}, token {resource.token}" if owner else "no owner"]
    if resource.weight != 1:
        parts.append(f"weight {resource.weight:g}")
    if resource.pin is not None:
        parts.append(f"pinned to {resource.pin}")
    parts += [f"{name}={_printable(value)}" for name, value in resource.attributes.items()]
    return f"{resource.resource}: {', '.join(parts)}"


def _printable(value: str) -> str:
    """An attribute or an error may be any text; none may give orders to the terminal."""
    return value if value.isprintable() else repr(value)


def plain(state: GroupState) -> list[str]:
    """The group as lines of text: the headline, the nodes, and who waits for what."""
    return [headline(state), *(f"  {node_line(node)}" for node in state.nodes), *first_waits(state)]


def condition(state: GroupState) -> str:
    """Whether a group is balanced."""
    return "balanced" if state.balanced else "rebalancing" if state.nodes else "nobody takes part"


def condition_of(node: NodeState) -> str:
    """Whether a node has completed its share, and whether it is drained."""
    condition = "ready" if node.completed else "rebalancing"
    return f"drained, {condition}" if node.drained else condition


def first_waits(state: GroupState) -> list[str]:
    """Why a leader resigned; then who waits for what, the first lines of it, and how many more there are."""
    every = waits(state)
    lines = [f"  {_printable(state.trouble)}"] if state.trouble else []
    lines += [f"  {line}" for line in islice(every, MOST_WAITS)]
    rest = sum(1 for _ in every)
    return [*lines, f"  and {rest:,} more"] if rest else lines
