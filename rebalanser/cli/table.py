"""The state of a group for people, as a table for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.box import ROUNDED
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rebalanser.cli.lines import (
    condition,
    condition_of,
    counted,
    first_nodes,
    first_waits,
    more_nodes,
    owned,
)
from rebalanser.state import GroupState, NodeState, ResourceState

MOST_LINES: Final = 10
"""How many lines of the table one node gets where the height is not limited."""
MOST_ROWS: Final = 200
"""How many lines all of them get, unless there are more nodes."""

MOST_CELLS: Final = 1_000
"""How many resources beside one node are laid out: more than fit anywhere."""

FRAME_LINES: Final = 6
"""What the table needs beside its rows: the title, the head with its three rules, and the legend."""
NARROWEST: Final = 12
"""The least width that the names of resources are cut down to."""
GAP: Final = "  "

HELD, COMING, LEAVING = "green", "yellow", "red"
LEGEND: Final = "★ leads   ● held   ○ coming   ◌ leaving   the number is the fencing token"


def render(
    state: GroupState, note: str | None = None, height: int | None = None, most_nodes: int | None = None
) -> RenderableType:
    """The group as a table: a row for each node, with the resources that it holds, gets and gives up.

    ``note`` is shown below it, for what a person should know beside the state. With a ``height`` it is kept
    within so many lines and those that the note takes beyond its first: what does not fit is counted, as are
    nodes beyond ``most_nodes``.
    """
    below = [Text(line, style=COMING, no_wrap=True, overflow="ellipsis") for line in first_waits(state)]
    if note is not None:
        below.append(Text(note, style="bold red"))
    if not state.nodes:
        return Group(_title(state), *below)
    nodes = first_nodes(state, most_nodes)
    if len(nodes) < len(state.nodes):
        below.insert(0, Text(more_nodes(state, nodes), style="dim"))
    unlimited = min(len(nodes) * MOST_LINES, max(len(nodes), MOST_ROWS))
    room = unlimited if height is None else height - FRAME_LINES - len(below)
    if len(nodes) > room:
        nodes = nodes[: max(1, room - 1)]
        below.insert(0, Text(f"  and {counted(len(state.nodes) - len(nodes), 'more node')}", style="dim"))
    legend = Text(LEGEND, style="dim", no_wrap=True, overflow="ellipsis")
    return Group(_title(state), _table(state, nodes, max(1, room // len(nodes))), legend, *below)


def _title(state: GroupState) -> Text:
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(f"{state.group}  ", style="bold")
    title.append(condition(state), style=f"bold {HELD if state.all_owned else COMING}")
    title.append(f"  {owned(state)}")
    title.append(f" · {counted(len(state.nodes), 'node')}")
    title.append(f" · version {state.version} · term {state.term}", style="dim")
    return title


def _table(state: GroupState, nodes: Sequence[NodeState], most_lines: int) -> Table:
    table = Table(box=ROUNDED)
    table.add_column("node", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("holds", justify="right", no_wrap=True)
    table.add_column("resources", ratio=1)
    concerned: dict[str, list[ResourceState]] = {node.node: [] for node in nodes}
    for resource in state.resources:
        for identity in {resource.held_by, resource.assigned_to}:
            if identity in concerned:
                concerned[identity].append(resource)
    for node in nodes:
        resources = concerned[node.node]
        first = resources
        if len(resources) > MOST_CELLS:
            first = sorted(resources, key=lambda each: each.held_by == each.assigned_to)[:MOST_CELLS]
        first = sorted(first, key=lambda each: _as_people_count(each.resource))
        table.add_row(
            Text(f"{'★' if node.leader else ' '} {node.label}", style="bold" if node.leader else ""),
            Text(condition_of(node), style=HELD if node.completed else COMING),
            Text(f"{node.held}/{node.assigned}"),
            _Cells([_cell(node, resource) for resource in first], len(resources) - len(first), most_lines),
        )
    return table


@dataclass(frozen=True, slots=True)
class _Cell:
    """One resource beside a node."""

    text: Text
    moves: bool


@dataclass(frozen=True, slots=True)
class _Cells:
    """Resources in even columns, as many as the width allows; what moves is shown first if not all fits."""

    cells: Sequence[_Cell]
    others: int
    """How many more there are, which nothing has room for."""
    most_lines: int

    def _widths(self) -> tuple[int, int]:
        """The width of the widest, and of all in one line."""
        widths = [cell.text.cell_len for cell in self.cells]
        return max(widths, default=0), sum(widths) + len(GAP) * max(0, len(widths) - 1)

    def __rich_measure__(self, _console: Console, options: ConsoleOptions) -> Measurement:
        widest, line = self._widths()
        return Measurement(min(widest, NARROWEST), line).with_maximum(options.max_width)

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[Text]:
        widest, line = self._widths()
        if line <= options.max_width and not self.others:
            yield Text(GAP).join(cell.text for cell in self.cells)
            return
        width = min(widest, options.max_width)
        columns = (options.max_width + len(GAP)) // (width + len(GAP))
        texts = self._that_fit(columns * self.most_lines)
        for start in range(0, len(texts), columns):
            row = (_padded(text, width) for text in texts[start : start + columns])
            yield Text(GAP, no_wrap=True, overflow="ellipsis").join(row)

    def _that_fit(self, room: int) -> list[Text]:
        if len(self.cells) <= room and not self.others:
            return [cell.text for cell in self.cells]
        first = sorted(self.cells, key=lambda cell: not cell.moves)[: max(0, room - 1)]
        rest = len(self.cells) + self.others - len(first)
        more = Text(f"{'and ' if first else ''}{rest:,} {'more' if first else 'in all'}")
        more.stylize("dim")
        return [*(cell.text for cell in first), more]


def _padded(text: Text, width: int) -> Text:
    padded = text.copy()
    padded.truncate(width, overflow="ellipsis", pad=True)
    return padded


def _cell(node: NodeState, resource: ResourceState) -> _Cell:
    """``●`` is held, ``○`` is coming, ``◌`` is leaving; the number is the fencing token."""
    if resource.held_by != node.node:
        return _Cell(Text(f"○ {resource.resource}", style=COMING), moves=True)
    leaving = resource.assigned_to != node.node
    text = Text(f"{'◌' if leaving else '●'} {resource.resource}", style=LEAVING if leaving else HELD)
    return _Cell(text.append(f" {resource.token}", style="dim"), moves=leaving)


def _as_people_count(name: str) -> list[str | int]:
    """A key that sorts ``part-2`` before ``part-10``: text and numbers take turns in it."""
    return [int(part) if number % 2 else part for number, part in enumerate(re.split(r"(\d+)", name))]
