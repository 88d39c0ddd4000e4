"""Records and their counts as lines and tables."""

from __future__ import annotations

from json import dumps
from typing import Final

from rich.table import Table
from rich.text import Text

from rebalanser.cli.arguments import shown_time
from rebalanser.cli.history_stats import HistoryStats, NodeStats
from rebalanser.cli.output import counted
from rebalanser.history import Record
from rebalanser.redaction import redact

SHOWN_KINDS: Final = 4
"""Maximum number of kinds that a table names per node; the JSON has all."""


def record_line(record: Record) -> str:
    """Return a record in one line: time, node, kind, resource, and its other fields."""
    numbers = {
        "token": record.token,
        "revision": record.revision,
        "value": record.value,
        "term": record.term or None,
        "version": record.version or None,
    }
    said = [f"{name}={number}" for name, number in numbers.items() if number is not None]
    said += [f"{name}={dumps(value, ensure_ascii=False)}" for name, value in record.detail.items()]
    words = [shown_time(record.wall_time), f"{record.group}/{record.label}", record.kind]
    return printable("  ".join(filter(None, [*words, record.resource, " ".join(said)])))


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
