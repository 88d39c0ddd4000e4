"""The model of ``rebalanser watch``: the changes between two reads of a group, and what is shown.

This module is pure: clocks, keys and reads come from ``rebalanser.cli.watch``, and
``rebalanser.cli.table`` draws the result.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Final

from rebalanser.cli.lines import first_waits, headline, node_line, waits
from rebalanser.registry.contract import LeaseAge
from rebalanser.state import GroupState, NodeState, ResourceState

MOST_MOVES: Final = 10_000
"""Maximum number of moves that are kept."""
MOST_ASKED: Final = 128
"""Maximum number of nodes whose heartbeats are read at once; in a larger group the nodes take turns."""
SILENT_SHARE: Final = 0.5
"""Share of a lease without a heartbeat after which a node is silent; it sends one each sixth."""


@dataclass(frozen=True, slots=True)
class ObservedMove:
    """A change of owner between two reads."""

    resource: str
    source: str | None
    """The label of the previous owner; None if there was none since the watch began."""
    target: str
    token: int | None
    seen_at: float
    """Seconds since 1970."""


class Moves:
    """Finds the changes of owners from one read to the next."""

    def __init__(self) -> None:
        self._owners: dict[str, str | None] | None = None

    def see(self, state: GroupState, seen_at: float) -> list[ObservedMove]:
        """Add a read, and return the resources with another owner than the last one seen."""
        before = self._owners
        owners = {each.resource: each.owner for each in state.resources}
        if before is None:
            self._owners = owners
            return []
        moved = [
            ObservedMove(each.resource, before.get(each.resource), each.owner, each.token, seen_at)
            for each in state.resources
            if each.owner is not None and each.owner != before.get(each.resource)
        ]
        self._owners = {name: owner or before.get(name) for name, owner in owners.items()}
        return moved


def move_line(move: ObservedMove) -> str:
    """Return a move in one line, without its time."""
    return f"{move.resource}: {move.source or 'nobody'} → {move.target}, token {move.token}"


class HeartbeatAges:
    """The ages of the nodes' last heartbeats, as far as they were read."""

    def __init__(self) -> None:
        self.ages: Mapping[str, LeaseAge] = {}
        """The ages of the last read, by node."""
        self.silent: Mapping[str, LeaseAge] = {}
        """The silent nodes: at their last read they had sent none for ``SILENT_SHARE`` of their lease."""
        self.told: bool | None = None
        """True once the registry has reported an age, False if it reports none, None if not known yet."""
        self._next = 0

    def to_ask(self, nodes: Sequence[str], first: Iterable[str]) -> list[str]:
        """Choose the nodes to read now: the silent ones, those in ``first``, and the others in turn."""
        if len(nodes) <= MOST_ASKED:
            return list(nodes)
        living = set(nodes)
        chosen = dict.fromkeys(node for node in (*self.silent, *first) if node in living)
        chosen = dict.fromkeys(islice(chosen, MOST_ASKED // 2))
        for taken, node in enumerate((*nodes[self._next :], *nodes[: self._next])):
            if len(chosen) == MOST_ASKED:
                self._next = (self._next + taken) % len(nodes)
                break
            chosen[node] = None
        return list(chosen)

    def take(self, nodes: Iterable[str], asked: Iterable[str], ages: Mapping[str, LeaseAge]) -> None:
        """Add the ages of the nodes in ``asked``; ``nodes`` are all live ones."""
        kept = set(nodes).difference(asked)
        silent = {node: age for node, age in self.silent.items() if node in kept}
        silent |= {node: age for node, age in ages.items() if age.age_s > age.ttl_s * SILENT_SHARE}
        self.ages, self.silent = ages, silent
        if ages or (self.told is None and asked):
            self.told = bool(ages)


def silent_line(label: str, age: LeaseAge) -> str:
    """Return a silent node in one line."""
    return f"{label}: no heartbeat for {age.age_s:.0f} s, its lease ends after {age.ttl_s:.0f} s"


@dataclass(frozen=True, slots=True)
class Picture:
    """One read of a group, with what is computed from it once."""

    state: GroupState
    seen_at: float
    """Seconds since 1970."""
    moves: Sequence[ObservedMove]
    """The moves since the previous read."""
    concerned: Mapping[str, Sequence[ResourceState]]
    """The resources that each node holds, gets or gives up."""
    waits: Sequence[str]
    """A sentence for each wait, and for each reason without an owner."""
    notes: Sequence[str]
    """Lines about what needs attention, with the first waits."""

    @classmethod
    def of(cls, state: GroupState, seen_at: float, moves: Sequence[ObservedMove]) -> Picture:
        """Compute the picture of a state."""
        return cls(state, seen_at, moves, concerned_by(state), tuple(waits(state)), tuple(first_waits(state)))


def concerned_by(state: GroupState) -> dict[str, list[ResourceState]]:
    """Return the resources that each node holds, gets or gives up."""
    concerned: dict[str, list[ResourceState]] = {node.node: [] for node in state.nodes}
    for resource in state.resources:
        for identity in {resource.held_by, resource.assigned_to}:
            if identity in concerned:
                concerned[identity].append(resource)
    return concerned


def changed_lines(before: Picture | None, after: Picture) -> Iterator[str]:
    """Yield a line for each change from one read to the next; for the first read, the whole group."""
    was = {} if before is None else {node.node: node for node in before.state.nodes}
    if before is None or headline(before.state) != headline(after.state):
        yield headline(after.state)
    for node in after.state.nodes:
        earlier = was.pop(node.node, None)
        if earlier is None or node_line(earlier) != node_line(node):
            yield f"  {node_line(node)}"
    for gone in was.values():
        yield f"  {gone.label}: gone"
    for move in after.moves:
        yield f"  {move_line(move)}"
    told = set(before.notes if before else ())
    yield from (note for note in after.notes if note not in told)


def changed_silence(
    labels: Mapping[str, str], before: Mapping[str, LeaseAge], after: Mapping[str, LeaseAge]
) -> Iterator[str]:
    """Yield a line for each node that has become silent, and for each that has sent heartbeats again."""
    for node, age in after.items():
        if node not in before:
            yield f"  {silent_line(labels[node], age)}"
    for node in before:
        if node not in after and node in labels:
            yield f"  {labels[node]}: heartbeats again"


class WatchPage(Enum):
    """The lists of ``rebalanser watch``."""

    NODES = "nodes"
    RESOURCES = "resources"
    MOVES = "moves"
    WAITS = "waits"


Row = NodeState | ResourceState | ObservedMove | str

_KEYS: Final = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1bOH": "home",
    "\x1b[1~": "home",
    "\x1b[F": "end",
    "\x1bOF": "end",
    "\x1b[4~": "end",
    "\x1b[Z": "back tab",
    "\x1b": "escape",
    "\t": "tab",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\b": "backspace",
}
_KEY: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|.", re.DOTALL)


def keys_in(text: str) -> list[str]:
    """Return the keys that a terminal sent: a name such as ``page up``, or the character itself.

    Unknown sequences are left out.
    """
    sent = _KEY.findall(text)
    return [_KEYS.get(each, each) for each in sent if each in _KEYS or len(each) == 1]


class View:
    """The state of the screen: the latest picture, the page, its scroll position, and the filter."""

    def __init__(self) -> None:
        self.picture: Picture | None = None
        self.heartbeats = HeartbeatAges()
        self.moves: deque[ObservedMove] = deque(maxlen=MOST_MOVES)
        self.moved = 0
        """Number of moves since the watch began."""
        self.error: str | None = None
        """Reason why the picture may be out of date; None if it is current."""
        self.page = WatchPage.NODES
        self.pattern = self._folded = ""
        self.typing = False
        self._tops = dict.fromkeys(WatchPage, 0)
        self._room = 1
        self._rows: dict[WatchPage, Sequence[Row]] = {}

    def update(self, picture: Picture) -> None:
        """Show another picture; page, position and filter stay."""
        self.picture, self.error = picture, None
        self.moves.extendleft(reversed(picture.moves))
        self.moved += len(picture.moves)
        self._rows.clear()

    def press(self, key: str) -> bool:
        """Handle a key. Return False if it quits."""
        if self.typing:
            self._type(key)
        elif key == "q":
            return False
        elif key == "/":
            self.typing = True
        elif key == "escape":
            self._filter("")
        elif key in {"tab", "back tab"}:
            pages = list(WatchPage)
            self.page = pages[(pages.index(self.page) + (1 if key == "tab" else -1)) % len(pages)]
        else:
            self._scroll(key)
        return True

    def _type(self, key: str) -> None:
        if key in {"enter", "escape"}:
            self.typing = False
        if key == "escape":
            self._filter("")
        elif key == "backspace":
            self._filter(self.pattern[:-1])
        elif len(key) == 1 and key.isprintable():
            self._filter(self.pattern + key)

    def _filter(self, pattern: str) -> None:
        self.pattern, self._folded = pattern, pattern.casefold()
        self._tops = dict.fromkeys(WatchPage, 0)
        self._rows.clear()

    def _scroll(self, key: str) -> None:
        page = max(1, self._room - 1)
        steps = {"up": -1, "down": 1, "page up": -page, "page down": page}
        last = max(0, len(self.rows()) - self._room)
        ends = {"home": 0, "end": last}
        top = ends.get(key, self._tops[self.page] + steps.get(key, 0))
        self._tops[self.page] = min(max(0, top), last)

    def hear(self, asked: Iterable[str], ages: Mapping[str, LeaseAge]) -> None:
        """Add the ages of the heartbeats of the nodes in ``asked``."""
        if self.picture is None:
            return
        before = self.heartbeats.silent.keys()
        self.heartbeats.take([node.node for node in self.picture.state.nodes], asked, ages)
        if self.heartbeats.silent.keys() != before:
            self._rows.pop(WatchPage.NODES, None)

    def window(self, room: int) -> tuple[int, Sequence[Row]]:
        """Return the position of the first row in sight, and the rows that fit into ``room`` lines."""
        if room != self._room:
            self._room = max(1, room)
            self._rows.pop(WatchPage.NODES, None)
        rows = self.rows()
        top = self._tops[self.page] = min(self._tops[self.page], max(0, len(rows) - self._room))
        return top, rows[top : top + self._room]

    def shown_nodes(self) -> list[str]:
        """Return the nodes in sight."""
        rows = self.window(self._room)[1] if self.page is WatchPage.NODES else ()
        return [row.node for row in rows if isinstance(row, NodeState)]

    def rows(self, page: WatchPage | None = None) -> Sequence[Row]:
        """Return all rows of a page, by default the current one, that match the filter."""
        page = page or self.page
        if page not in self._rows:
            every = self._all(page, self.picture) if self.picture else ()
            self._rows[page] = tuple(filter(self._matches, every)) if self.pattern else tuple(every)
        return self._rows[page]

    def _all(self, page: WatchPage, picture: Picture) -> Iterable[Row]:
        match page:
            case WatchPage.NODES if len(picture.state.nodes) > self._room:
                return sorted(picture.state.nodes, key=self._is_well)
            case WatchPage.NODES:
                return picture.state.nodes
            case WatchPage.RESOURCES:
                return picture.state.resources
            case WatchPage.MOVES:
                return self.moves
            case WatchPage.WAITS:
                return picture.waits

    def _is_well(self, node: NodeState) -> bool:
        return node.completed and node.node not in self.heartbeats.silent

    def _matches(self, row: Row) -> bool:
        match row:
            case NodeState():
                return self._has(row.label) or any(True for _ in self.matching(row))
            case ResourceState():
                return self._has(row.resource) or self._has(row.owner or row.held_by or "")
            case ObservedMove():
                return self._has(move_line(row))
            case _:
                return self._has(row)

    def _has(self, text: str) -> bool:
        return self._folded in text.casefold()

    def matching(self, node: NodeState) -> Iterable[ResourceState]:
        """Return the resources beside a node that match the filter; all if the node itself matches."""
        concerned = self.concerned(node)
        if not self.pattern or self._has(node.label):
            return concerned
        return (each for each in concerned if self._has(each.resource))

    def concerned(self, node: NodeState) -> Sequence[ResourceState]:
        """Return the resources that a node holds, gets or gives up."""
        return self.picture.concerned.get(node.node, ()) if self.picture else ()
