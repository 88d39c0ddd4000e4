"""The state of a group as a table for a terminal."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from rich.box import ROUNDED
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rebalanser.cli.lines import (
    condition,
    condition_of,
    first_lines,
    first_nodes,
    first_waits,
    more_nodes,
    offers,
    owned,
    resource_line,
)
from rebalanser.cli.output import counted
from rebalanser.cli.view import HeartbeatAges, ObservedMove, Picture, View, WatchPage, concerned_by, move_line
from rebalanser.state import GroupState, NodeState, ResourceState

MOST_LINES: Final = 10
"""Maximum lines of one node if the height is not limited."""
MOST_ROWS: Final = 200
"""Maximum lines of all nodes, unless there are more nodes."""

MOST_CELLS: Final = 1_000
"""Maximum number of resources laid out beside one node, more than fit on any terminal."""

OFFERS_WIDTH: Final = 30
"""Maximum columns of what a node offers; the lines of ``node list`` have all of it."""
FRAME_LINES: Final = 6
"""Lines of the table beside its rows: the head with its three rules, the legend, and the position."""
MOST_BELOW: Final = 4
"""Maximum lines below the table for waits, and for moves."""
NARROWEST: Final = 12
"""Minimum width to which names of resources are cut."""
GAP: Final = "  "

HELD, COMING, LEAVING = "green", "yellow", "red"
LEGEND: Final = "★ leads   ● held   ○ coming   ◌ leaving   the number is the fencing token"

KEYS: Final = "q: quit  ↑ ↓ PgUp PgDn Home End: scroll  Tab: next list  /: filter"


def render(state: GroupState, most_nodes: int | None = None) -> RenderableType:
    """Return the group as a table: a row for each node, with the resources that it holds, gets and gives up.

    Nodes beyond ``most_nodes`` are only counted.
    """
    below = _faint_lines(first_waits(state))
    if not state.nodes:
        return Group(_title(state), *below)
    nodes = first_nodes(state, most_nodes)
    if len(nodes) < len(state.nodes):
        below.insert(0, Text(more_nodes(state, nodes), style="dim"))
    offering = any(map(offers, state.nodes))
    table = _table(offering)
    room = min(len(nodes) * MOST_LINES, max(len(nodes), MOST_ROWS))
    concerned = concerned_by(state)
    for node in nodes:
        resources = concerned[node.node]
        cells = _cells(node, resources, len(resources), max(1, room // len(nodes)))
        table.add_row(*_node_cells(node, offering), cells)
    return Group(_title(state), table, _legend(), *below)


def render_view(view: View, height: int) -> RenderableType:
    """Return the screen of ``rebalanser watch`` for a view, within ``height`` lines."""
    picture = view.picture
    error = [Text(view.error, style="bold red", no_wrap=True, overflow="ellipsis")] if view.error else []
    if picture is None:
        return Group(*error, Text("reading the group"))
    head = [_title(picture.state), _pages(view, picture)]
    foot = [*error, _help(view)]
    if view.page is WatchPage.NODES and picture.state.nodes:
        body = _nodes_page(view, picture, height - len(head) - len(foot))
    else:
        body = _lines_page(view, height - len(head) - len(foot))
    return Group(*head, *body, *foot)


def _nodes_page(view: View, picture: Picture, height: int) -> list[RenderableType]:
    """Return the table of nodes, with waits and the last moves below."""
    spare = max(0, height - FRAME_LINES - 1)
    moves = [f"  {_clock(move.seen_at)}  {move_line(move)}" for move in islice(view.moves, MOST_BELOW)]
    below = _faint_lines(first_lines(picture.notes, min(MOST_BELOW, spare // 3)))
    below += [Text(line, style="dim") for line in first_lines(moves, min(MOST_BELOW, spare // 3), view.moved)]
    room = max(1, height - FRAME_LINES - len(below))
    top, rows = view.window(room)
    nodes = [row for row in rows if isinstance(row, NodeState)]
    offering = any(map(offers, picture.state.nodes))
    table = _table(offering, heartbeats=True)
    for node in nodes:
        resources = list(view.matching(node))
        cells = _cells(node, resources, len(view.concerned(node)), max(1, room // len(nodes)))
        table.add_row(*_node_cells(node, offering), _heartbeat(view.heartbeats, node), cells)
    return [table, _legend(), *below, _position(view, top, len(rows))]


def _lines_page(view: View, height: int) -> list[RenderableType]:
    """Return a page with a line for each row."""
    top, rows = view.window(max(1, height - 1))
    lines: list[RenderableType] = []
    for row in rows:
        line = row if isinstance(row, str) else ""
        if isinstance(row, ResourceState):
            line = resource_line(row)
        elif isinstance(row, ObservedMove):
            line = f"{_clock(row.seen_at)}  {move_line(row)}"
        lines.append(Text(f"  {line}", no_wrap=True, overflow="ellipsis"))
    return [*lines, _position(view, top, len(rows))]


def _faint_lines(lines: Iterable[str]) -> list[RenderableType]:
    return [Text(line, style=COMING, no_wrap=True, overflow="ellipsis") for line in lines]


def _clock(wall: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(wall))


def _pages(view: View, picture: Picture) -> Text:
    """Return the names of the pages with their sizes, and the time of the picture."""
    state = picture.state
    sizes = {
        WatchPage.NODES: len(state.nodes),
        WatchPage.RESOURCES: len(state.resources),
        WatchPage.MOVES: view.moved,
        WatchPage.WAITS: len(picture.waits),
    }
    text = Text(no_wrap=True, overflow="ellipsis")
    for page, size in sizes.items():
        text.append(f"{page.value} {size:,}", style="bold underline" if page is view.page else "dim")
        text.append(GAP)
    return text.append(f"as of {_clock(picture.seen_at)}", style="dim")


def _position(view: View, top: int, shown: int) -> Text:
    """Return which rows are shown, of how many."""
    count = len(view.rows())
    text = f"  {view.page.value} {top + 1:,} to {top + shown:,} of {count:,}" if shown else "  nothing"
    if view.pattern:
        text += f" with {view.pattern!r}"
    if view.page is WatchPage.MOVES and view.moved > len(view.moves):
        text += f"; {view.moved - len(view.moves):,} earlier ones are forgotten"
    if view.page is WatchPage.NODES:
        text += f"; {len(view.heartbeats.silent):,} silent" if view.heartbeats.silent else ""
        text += "; this registry reports no heartbeats" if view.heartbeats.told is False else ""
    return Text(text, style="dim", no_wrap=True, overflow="ellipsis")


def _help(view: View) -> Text:
    if view.typing:
        return Text(f"/{view.pattern}▏  Enter: done  Esc: no filter", no_wrap=True, overflow="ellipsis")
    return Text(KEYS, style="dim", no_wrap=True, overflow="ellipsis")


def _legend() -> Text:
    return Text(LEGEND, style="dim", no_wrap=True, overflow="ellipsis")


def _title(state: GroupState) -> Text:
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(f"{state.group}  ", style="bold")
    title.append(condition(state), style=f"bold {HELD if state.all_owned else COMING}")
    title.append(f"  {owned(state)}")
    title.append(f" · {counted(len(state.nodes), 'node')}")
    title.append(f" · version {state.version} · term {state.term}", style="dim")
    return title


def _table(offering: bool, heartbeats: bool = False) -> Table:
    table = Table(box=ROUNDED, expand=heartbeats)  # its width stays the same from key to key
    table.add_column("node", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("holds", justify="right", no_wrap=True)
    if offering:
        table.add_column("offers", no_wrap=True, overflow="ellipsis", max_width=OFFERS_WIDTH)
    if heartbeats:
        table.add_column("heartbeat", justify="right", no_wrap=True)
    table.add_column("resources", ratio=1)
    return table


def _node_cells(node: NodeState, offering: bool) -> tuple[Text, ...]:
    return (
        Text(f"{'★' if node.leader else ' '} {node.label}", style="bold" if node.leader else ""),
        Text(condition_of(node), style=HELD if node.completed else COMING),
        Text(f"{node.held}/{node.assigned}"),
        *([Text(", ".join(offers(node)))] if offering else []),
    )


def _heartbeat(heartbeats: HeartbeatAges, node: NodeState) -> Text:
    """Return the age of a node's last heartbeat; of a silent node also the length of its lease."""
    silent = heartbeats.silent.get(node.node)
    if silent is not None:
        return Text(f"{silent.age_s:.0f} of {silent.ttl_s:.0f} s", style=f"bold {LEAVING}")
    age = heartbeats.ages.get(node.node)
    return Text("—" if age is None else f"{age.age_s:.0f} s ago", style="dim")


def _cells(node: NodeState, resources: Sequence[ResourceState], of: int, most_lines: int) -> _Cells:
    """Return the cells of the resources beside a node; ``of`` is their number without the filter."""
    first = resources
    if len(resources) > MOST_CELLS:
        first = sorted(resources, key=lambda each: each.held_by == each.assigned_to)[:MOST_CELLS]
    first = sorted(first, key=lambda each: _as_people_count(each.resource))
    return _Cells([_cell(node, resource) for resource in first], of - len(first), most_lines)


@dataclass(frozen=True, slots=True)
class _Cell:
    """One resource beside a node."""

    text: Text
    moves: bool


@dataclass(frozen=True, slots=True)
class _Cells:
    """Resources in even columns, as many as the width allows; moving ones first if not all fit."""

    cells: Sequence[_Cell]
    others: int
    """Number of further resources that are not laid out."""
    most_lines: int

    def _widths(self) -> tuple[int, int]:
        """Return the width of the widest cell, and of all cells in one line."""
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
    """Return a cell: ``●`` is held, ``○`` is coming, ``◌`` is leaving; the number is the fencing token."""
    if resource.held_by != node.node:
        return _Cell(Text(f"○ {resource.resource}", style=COMING), moves=True)
    leaving = resource.assigned_to != node.node
    text = Text(f"{'◌' if leaving else '●'} {resource.resource}", style=LEAVING if leaving else HELD)
    return _Cell(text.append(f" {resource.token}", style="dim"), moves=leaving)


def _as_people_count(name: str) -> list[str | int]:
    """Return a sort key that puts ``part-2`` before ``part-10``; text and numbers alternate in it."""
    return [int(part) if number % 2 else part for number, part in enumerate(re.split(r"(\d+)", name))]
