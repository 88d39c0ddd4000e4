"""Statistics of a history, counted in one read; they and records as lines and tables.

Memory grows with the number of processes, not of records: at most 1,000 separate runs of sequence numbers are
kept for each process.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from json import dumps
from typing import Final

from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table
from rich.text import Text

from rebalanser.cli.arguments import shown_time
from rebalanser.cli.history_sources import Item
from rebalanser.cli.output import counted
from rebalanser.history import GAP, Record, UnreadableLine
from rebalanser.redaction import redact

MAX_RUNS: Final = 1_000
"""Maximum number of separate runs per process; with more, counts are lower bounds."""

SHOWN_KINDS: Final = 4
"""Maximum number of kinds that a table names per node; the JSON has all."""


class _StatsModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NodeStats(_StatsModel):
    """Counts of one node of one group, over all of its processes. Times are seconds since 1970."""

    protocol: str
    group: str
    node: str = Field(description="the node's label")
    processes: int
    records: int = Field(description="each counted once")
    duplicates: int = Field(description="further copies of records (AU-2)")
    gaps: int = Field(description="runs of missing sequence numbers between two records")
    missing: int = Field(description="missing numbers in those gaps")
    dropped: int = Field(description="records that gap records report as lost")
    earlier: int = Field(
        description="numbers before the first record, such as in files that were rotated away"
    )
    exact: bool = Field(description="true if the counts are exact; else they are lower bounds")
    first_time: float
    last_time: float
    span_s: float
    kinds: dict[str, int]


class UnreadableStats(_StatsModel):
    """Lines that are not records, for one reason."""

    reason: str
    lines: int
    first: str = Field(description="place and error of the first one")


class HistoryStats(_StatsModel):
    """Counts of a history."""

    sources: list[str]
    records: int
    duplicates: int
    unreadable: list[UnreadableStats]
    nodes: list[NodeStats]


class Numbers:
    """The sequence numbers seen of one process, as runs without a hole, lowest first."""

    def __init__(self, max_runs: int = MAX_RUNS) -> None:
        self._max_runs = max_runs
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self._settled_gaps = 0
        self._settled_missing = 0
        self._lowest: int | None = None
        self.exact = True
        """True if it is known of each number whether it had been seen before."""

    def add(self, first: int, last: int) -> bool:
        """Add the numbers from ``first`` to ``last``. Return True if ``first`` is new."""
        if self._lasts and first == self._lasts[-1] + 1:
            self._lasts[-1] = max(last, first)
            return True
        if self._settled_gaps and first < self._firsts[0]:
            self.exact = False
            return True
        return self._insert(first, max(last, first))

    @property
    def earlier(self) -> int:
        """Number of numbers before the first one seen."""
        return self._lowest if self._lowest is not None else self._firsts[0]

    @property
    def gaps(self) -> int:
        """Number of missing runs between the numbers seen."""
        return self._settled_gaps + len(self._firsts) - 1

    @property
    def missing(self) -> int:
        """Number of missing numbers between the numbers seen."""
        holes = zip(self._firsts[1:], self._lasts[:-1], strict=True)
        return self._settled_missing + sum(first - last - 1 for first, last in holes)

    def _insert(self, first: int, last: int) -> bool:
        begin = bisect_left(self._lasts, first - 1)
        end = bisect_right(self._firsts, last + 1)
        touched = range(begin, end)
        new = not any(self._firsts[run] <= first <= self._lasts[run] for run in touched[:2])
        if touched:
            first = min(first, self._firsts[begin])
            last = max(last, self._lasts[end - 1])
        self._firsts[begin:end] = [first]
        self._lasts[begin:end] = [last]
        if len(self._firsts) > self._max_runs:
            self._settle_lowest()
        return new

    def _settle_lowest(self) -> None:
        """Count the lowest gap as final, and forget the run below it."""
        first, last = self._firsts.pop(0), self._lasts.pop(0)
        if self._lowest is None:
            self._lowest = first
        self._settled_gaps += 1
        self._settled_missing += self._firsts[0] - last - 1


@dataclass(slots=True)
class _Node:
    """Counts of one node so far."""

    first_time: float
    last_time: float
    records: int = 0
    duplicates: int = 0
    dropped: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    processes: dict[str, Numbers] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        numbers = self.processes.get(record.process)
        if numbers is None:
            numbers = self.processes[record.process] = Numbers()
        last = _last_number(record)
        if not numbers.add(record.sequence, last):
            self.duplicates += 1
            return
        self.records += 1
        self.dropped += last - record.sequence + 1 if record.kind == GAP else 0
        self.kinds[record.kind] += 1
        self.first_time = min(self.first_time, record.wall_time)
        self.last_time = max(self.last_time, record.wall_time)


class RecordCounter:
    """Counts records and unreadable lines one by one."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, str, str], _Node] = {}
        self._unreadable: Counter[str] = Counter()
        self._first_unreadable: dict[str, str] = {}
        self.readable = 0
        """Number of records, duplicates included."""

    def add(self, item: Item) -> None:
        """Count one record or unreadable line."""
        if isinstance(item, UnreadableLine):
            self._unreadable[item.reason] += 1
            self._first_unreadable.setdefault(item.reason, place_of(item))
            return
        self.readable += 1
        name = (item.protocol, item.group, item.label)
        node = self._nodes.get(name)
        if node is None:
            node = self._nodes[name] = _Node(item.wall_time, item.wall_time)
        node.add(item)

    def unreadable(self) -> list[UnreadableStats]:
        """Return the unreadable lines by reason, the most frequent first."""
        return [
            UnreadableStats(reason=reason, lines=count, first=self._first_unreadable[reason])
            for reason, count in self._unreadable.most_common()
        ]

    def stats(self, sources: Iterable[str]) -> HistoryStats:
        """Return all counts."""
        nodes = [_stats_of(name, node) for name, node in sorted(self._nodes.items())]
        return HistoryStats(
            sources=list(sources),
            records=sum(node.records for node in nodes),
            duplicates=sum(node.duplicates for node in nodes),
            unreadable=self.unreadable(),
            nodes=nodes,
        )


def place_of(item: UnreadableLine) -> str:
    """Return the place and the error of an unreadable line, in one line."""
    return f"{item.file}:{item.line}: {item.reason}: {item.detail}"


def _last_number(record: Record) -> int:
    """Return the last number that a record covers: its own, or a gap's last."""
    last = record.detail.get("last")
    if record.kind == GAP and isinstance(last, int) and last >= record.sequence:
        return last
    return record.sequence


def _stats_of(name: tuple[str, str, str], node: _Node) -> NodeStats:
    protocol, group, label = name
    numbers = node.processes.values()
    return NodeStats(
        protocol=protocol,
        group=group,
        node=label,
        processes=len(node.processes),
        records=node.records,
        duplicates=node.duplicates,
        gaps=sum(each.gaps for each in numbers),
        missing=sum(each.missing for each in numbers),
        dropped=node.dropped,
        earlier=sum(each.earlier for each in numbers),
        exact=all(each.exact for each in numbers),
        first_time=node.first_time,
        last_time=node.last_time,
        span_s=node.last_time - node.first_time,
        kinds=dict(sorted(node.kinds.items())),
    )


def record_line(record: Record) -> str:
    """Return a record in one line: time, node, kind, resource, and its other fields."""
    numbers = {
        "token": record.token,
        "revision": record.revision,
        "value": record.value,
        "term": record.term or None,
        "version": record.version or None,
    }
    fields = [f"{name}={number}" for name, number in numbers.items() if number is not None]
    fields += [f"{name}={dumps(value, ensure_ascii=False)}" for name, value in record.detail.items()]
    words = [shown_time(record.wall_time), f"{record.group}/{record.label}", record.kind]
    return printable("  ".join(filter(None, [*words, record.resource, " ".join(fields)])))


def printable(text: str) -> str:
    """Return a text for a terminal, without secrets and control characters."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in redact(text)
    )


def node_line(node: NodeStats) -> str:
    """Return the counts of a node in one line."""
    processes = "1 process" if node.processes == 1 else f"{node.processes:,} processes"
    words = [
        f"{counted(node.records, 'record')} of {processes}",
        f"{shown_time(node.first_time)} to {shown_time(node.last_time)} ({node.span_s:,.1f} s)",
        *_irregular(node).values(),
    ]
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in node.kinds.items())
    return printable(f"{node.group}/{node.node} ({node.protocol}): {', '.join(words)}; {kinds}")


def stats_table(document: HistoryStats) -> Table:
    """Return the nodes as a table, a row each."""
    table = Table(
        "Group", "Node", "Records", "From", "To", "Faults", "Most frequent",
        caption=_caption(document),
    )  # fmt: skip
    for node in document.nodes:
        frequent = sorted(node.kinds.items(), key=lambda each: -each[1])[:SHOWN_KINDS]
        table.add_row(
            Text(printable(node.group)),
            Text(printable(node.node)),
            f"{node.records:,}",
            shown_time(node.first_time),
            shown_time(node.last_time),
            "\n".join(_irregular(node).values()) or "-",
            "\n".join(f"{count:,} {kind}" for kind, count in frequent),
        )
    return table


def _irregular(node: NodeStats) -> dict[str, str]:
    """Return the faults of a node's records in words."""
    least = "" if node.exact else "at least "
    words = {
        "duplicates": f"{least}{counted(node.duplicates, 'duplicate')}",
        "missing": f"{least}{node.missing:,} missing in {counted(node.gaps, 'gap')}",
        "dropped": f"{node.dropped:,} dropped",
        "earlier": f"{node.earlier:,} missing before",
    }
    return {name: text for name, text in words.items() if getattr(node, name)}


def _caption(document: HistoryStats) -> str:
    nodes = counted(len(document.nodes), "node")
    return f"{counted(document.records, 'record')} of {nodes}"
