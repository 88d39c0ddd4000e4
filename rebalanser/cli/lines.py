"""The state of a group as plain lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from rebalanser.cli.output import counted, printable
from rebalanser.runtime.narration import shown_names
from rebalanser.state import GroupState, NodeState, ResourceState

MOST_WAITS: Final = 10
"""Maximum number of waits that are listed."""


def waits(state: GroupState) -> Iterator[str]:
    """Yield a sentence for each wait, then one for each reason why resources have no owner."""
    labels = {node.node: node.label for node in state.nodes}
    unowned: dict[str, list[str]] = {}
    for resource in state.resources:
        wanted_by = labels.get(resource.assigned_to or "", "a node to come")
        holder = resource.owner or (f"{resource.held_by} (gone)" if resource.held_by else None)
        if resource.removed:
            yield f"{resource.resource} is removed and still held by {holder}"
        elif holder is not None and resource.held_by != resource.assigned_to:
            yield f"{wanted_by} waits for {resource.resource}, held by {holder}"
        elif resource.reason is not None:
            unowned.setdefault(resource.reason, []).append(resource.resource)
    for reason, names in unowned.items():
        yield f"nobody owns {shown_names(names)}: {printable(reason)}"


def headline(state: GroupState) -> str:
    """Return the group in one line."""
    return (
        f"{state.group}: {condition(state)}, version {state.version}, term {state.term}, "
        f"leader {state.leader or 'none'}, {counted(len(state.nodes), 'node')}, "
        f"{owned(state)}"
    )


def owned(state: GroupState) -> str:
    """Return how many of the resources have an owner."""
    return f"{state.owned:,} of {counted(state.owned + state.unowned, 'resource')} owned"


def node_line(node: NodeState) -> str:
    """Return a node in one line."""
    role = "leader, " if node.leader else ""
    parts = [f"holds {node.held} of {node.assigned} assigned", *offers(node)]
    return f"{node.label}: {role}{condition_of(node)}, {', '.join(parts)}"


def offers(node: NodeState) -> list[str]:
    """Return a node's load if it is not just the number of resources, its capacity, tags and zone."""
    parts: list[str] = []
    if node.capacity is not None:
        parts.append(f"load {node.load:g} of {node.capacity:g}")
    elif node.load != node.assigned:
        parts.append(f"load {node.load:g}")
    parts += [f"tags {','.join(node.tags)}"] if node.tags else []
    parts += [f"zone {node.zone}"] if node.zone else []
    return parts


def resource_line(resource: ResourceState) -> str:
    """Return a resource in one line."""
    owner = resource.owner or resource.held_by
    parts = [f"owned by {owner}, token {resource.token}" if owner else "no owner"]
    if resource.weight != 1:
        parts.append(f"weight {resource.weight:g}")
    if resource.pin is not None:
        parts.append(f"pinned to {resource.pin}")
    parts += [f"needs {','.join(resource.needs)}"] if resource.needs else []
    parts += [f"spread {resource.spread}"] if resource.spread is not None else []
    parts += [f"{name}={printable(value)}" for name, value in resource.attributes.items()]
    return f"{resource.resource}: {', '.join(parts)}"


def plain(state: GroupState, limit: int | None = None) -> list[str]:
    """Return the group as lines: the headline, at most ``limit`` nodes, and the waits."""
    nodes = first_nodes(state, limit)
    more = [more_nodes(state, nodes)] if len(nodes) < len(state.nodes) else []
    return [headline(state), *(f"  {node_line(node)}" for node in nodes), *more, *first_waits(state)]


def first_nodes(state: GroupState, limit: int | None) -> Sequence[NodeState]:
    """Return at most ``limit`` nodes: if not all fit, first those that have not completed their share."""
    if limit is None or len(state.nodes) <= limit:
        return state.nodes
    return sorted(state.nodes, key=lambda node: node.completed)[:limit]


def more_nodes(state: GroupState, shown: Sequence[NodeState]) -> str:
    """Return a line with the number of nodes that are not shown, and the option to see them."""
    rest = len(state.nodes) - len(shown)
    return f"  … {counted(rest, 'more node')}, use --limit {len(state.nodes)}"


def condition(state: GroupState) -> str:
    """Return the state of a group in a word or two."""
    return "balanced" if state.balanced else "rebalancing" if state.nodes else "nobody takes part"


def condition_of(node: NodeState) -> str:
    """Return the state of a node in words."""
    condition = "ready" if node.completed else "rebalancing"
    if node.superseded:
        condition = f"replaced by a later node, {condition}"
    return f"drained, {condition}" if node.drained else condition


def absent_drains(state: GroupState) -> list[str]:
    """Return the drained labels that no live node has."""
    return sorted(set(state.drained) - {node.label for node in state.nodes})


def first_waits(state: GroupState) -> list[str]:
    """Return lines about what needs attention, each kind up to a limit.

    These are: why a leader resigned, a key that can't be read, errors of the application, released resources,
    drained labels that no live node has (nodes that come with them will own nothing), and the waits.
    """
    absent = absent_drains(state)
    lines = [f"  {printable(state.trouble)}"] if state.trouble else []
    if state.unreadable:
        others = f" (and {len(state.unreadable) - 1:,} more)" if len(state.unreadable) > 1 else ""
        lines.append(f"  left alone: {printable(state.unreadable[min(state.unreadable)])}{others}")
    lines += [f"  lately on {label}: {printable(text)}" for label, text in state.troubles.items()][
        :MOST_WAITS
    ]
    released = (node for node in state.nodes if node.released)
    lines += [
        f"  {node.label} has released {shown_names(node.released)}" for node in islice(released, MOST_WAITS)
    ]
    lines += [f"  drained, without a live node: {', '.join(absent)}"] if absent else []
    return [*lines, *first_lines([f"  {line}" for line in waits(state)], MOST_WAITS + 1)]


def first_lines(lines: Sequence[str], most: int, total: int | None = None) -> Sequence[str]:
    """Return at most ``most`` lines of ``total``; the last one counts those that are left out, if any."""
    rest = (len(lines) if total is None else total) - len(lines)
    if len(lines) + bool(rest) <= most:
        return [*lines, f"  and {rest:,} more"] if rest else lines
    shown = lines[: max(0, most - 1)]
    return [*shown, f"  and {rest + len(lines) - len(shown):,} more"][:most]
