"""``rebalanser history``: show, count and export the ownership history."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from rebalanser.cli.arguments import parse_time
from rebalanser.cli.audit_stream import steps
from rebalanser.cli.commands import Commands
from rebalanser.cli.history_export import Exported, Filter, export_lines, export_parquet, refuse_overwriting
from rebalanser.cli.history_sources import HistorySource, Item, open_source, read_all
from rebalanser.cli.history_stats import (
    RecordCounter,
    UnreadableStats,
    node_line,
    place_of,
    printable,
    record_line,
    stats_table,
)
from rebalanser.cli.options import JsonOption
from rebalanser.cli.output import Face, counted
from rebalanser.errors import UnusableHistory
from rebalanser.history import KINDS, Record

LOOK_S: Final = 0.2
"""Seconds between two reads of ``--follow``."""
MAX_WARNINGS: Final = 20
"""Maximum number of unreadable lines that an export reports one by one; it counts the others."""
PROGRESS_STEP: Final = 1_000

app = Commands("Show, count and export the ownership history.")

SourcesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE",
        show_default=False,
        help="Folders or files of history, or topics such as kafka://HOST:PORT/TOPIC.",
    ),
]
GroupOption = Annotated[
    str | None, typer.Option("--group", metavar="G", show_default=False, help="Only records of this group.")
]
SinceOption = Annotated[
    float | None,
    typer.Option(
        "--since",
        parser=parse_time,
        metavar="T",
        show_default=False,
        help="Only records since this time, such as 2026-11-22T00:30 (local), or of the last 15m or 2h.",
    ),
]
UntilOption = Annotated[
    float | None,
    typer.Option(
        "--until", parser=parse_time, metavar="T", show_default=False, help="Only records up to this time."
    ),
]


class Format(StrEnum):
    """Format of an export."""

    JSONL = "jsonl"
    PARQUET = "parquet"


@app.command()
def tail(
    sources: SourcesArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then show new records as they come, until Ctrl-C.")
    ] = False,
    last: Annotated[
        int | None,
        typer.Option(
            "--last", "-n", min=0, metavar="N", show_default="all", help="Show only the last N records first."
        ),
    ] = None,
    group: GroupOption = None,
    resource: Annotated[
        str | None,
        typer.Option("--resource", metavar="R", show_default=False, help="Only records about this resource."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="K", show_default=False, help="Only records of this kind.")
    ] = None,
    since: SinceOption = None,
    json: JsonOption = False,
) -> None:
    """Show records, a line each, those of all processes merged by time. With --json the original records.

    Lines that are not records are reported on standard error.
    """
    face = Face.of("", json)
    wanted = Filter(since, None, group, resource, _kind(kind))
    counter = RecordCounter()
    with _opened(sources, may_be_empty=follow) as opened:
        records = _wanted(_records_of(read_all(opened, growing=follow), counter), wanted)
        _show(face, records if last is None else deque(records, maxlen=last))
        if follow:
            _follow(face, opened, wanted)
        _require_records(opened, counter)


@app.command()
def stats(sources: SourcesArgument, json: JsonOption = False) -> None:
    """Count the records of a history: per node its records, times, kinds, duplicates and gaps.

    The history is read once. Memory grows with the number of processes, not of records.
    """
    face = Face.of("", json)
    counter = RecordCounter()
    with _opened(sources) as opened:
        for item in _with_progress(face, opened):
            counter.add(item)
        _require_records(opened, counter)
        document = counter.stats(source.name for source in opened)
    if face.on_terminal:
        face.draw(stats_table(document))
    else:
        face.answer(document, *map(node_line, document.nodes))
    _tell_unreadable(document.unreadable)


@app.command()
def export(
    sources: SourcesArgument,
    to: Annotated[
        Path,
        typer.Option(
            "--to",
            metavar="FOLDER|FILE",
            show_default=False,
            help="A new or empty folder, or a new file that ends in .jsonl.",
        ),
    ],
    format_: Annotated[
        Format, typer.Option("--format", help="Lines of JSON, or Parquet, which needs Spark.")
    ] = Format.JSONL,
    since: SinceOption = None,
    until: UntilOption = None,
    group: GroupOption = None,
    json: JsonOption = False,
) -> None:
    """Write the records to a new file or folder, in the current version of the schema.

    Nothing is overwritten. A target that can't be written completely is removed.
    """
    face = Face.of("", json)
    wanted = Filter(since, until, group)
    if wanted.since is not None and wanted.until is not None and wanted.since > wanted.until:
        raise typer.BadParameter("it is later than --until", param_hint="'--since'")
    if format_ is Format.PARQUET:
        with steps(silent=json) as step:
            records, unreadable = export_parquet(sources, to, wanted, step)
        _tell_unreadable(unreadable)
    else:
        refuse_overwriting(to)
        counter = RecordCounter()
        with _opened(sources) as opened:
            records = export_lines(to, _to_export(face, opened, wanted, counter))
        unreadable = counter.unreadable()
    left_out = sum(each.lines for each in unreadable)
    answer = Exported(to=str(to), format=format_, records=records, unreadable=left_out)
    face.answer(answer, answer.sentence())


@contextmanager
def _opened(places: Sequence[str], *, may_be_empty: bool = False) -> Iterator[list[HistorySource]]:
    """Open all sources, and close them at the end."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(closing(open_source(place, may_be_empty=may_be_empty))) for place in places
        ]


def _follow(face: Face, sources: Sequence[HistorySource], wanted: Filter) -> None:
    """Show new records until an interrupt."""
    troubles: dict[str, str | None] = {}
    while True:
        for source in sources:
            if source.trouble != troubles.get(source.name):
                troubles[source.name] = source.trouble
                typer.echo(f"warning: {source.name}: {source.trouble or 'available again'}", err=True)
        time.sleep(LOOK_S)
        _show(face, _wanted(_records_of(read_all(sources, growing=True)), wanted))


def _records_of(
    items: Iterable[Item], counter: RecordCounter | None = None, limit: int | None = None
) -> Iterator[Record]:
    """Yield the records; report other lines on standard error, at most ``limit`` of them."""
    told = 0
    for item in items:
        if counter is not None:
            counter.add(item)
        if isinstance(item, Record):
            yield item
        elif limit is None or told < limit:
            told += 1
            typer.echo(f"warning: {printable(place_of(item))}", err=True)


def _tell_unreadable(unreadable: Iterable[UnreadableStats]) -> None:
    """Report the number of lines that are not records, one line for each reason."""
    for each in unreadable:
        typer.echo(
            f"warning: unreadable, {each.reason}: {counted(each.lines, 'line')}, "
            f"such as {printable(each.first)}",
            err=True,
        )


def _wanted(records: Iterable[Record], wanted: Filter) -> Iterator[Record]:
    return (record for record in records if wanted.takes(record))


def _to_export(
    face: Face, sources: Sequence[HistorySource], wanted: Filter, counter: RecordCounter
) -> Iterator[Record]:
    yield from _wanted(_records_of(_with_progress(face, sources), counter, MAX_WARNINGS), wanted)
    _require_records(sources, counter)


def _with_progress(face: Face, sources: Sequence[HistorySource]) -> Iterator[Item]:
    """Yield all present records, with a progress bar on a terminal if they are many."""
    for source in sources:
        _, total = source.progress()
        with face.progress(f"reading {source.name}", total) as step:
            for number, item in enumerate(source.read(growing=False)):
                if number % PROGRESS_STEP == 0:
                    step(*source.progress())
                yield item


def _show(face: Face, records: Iterable[Record]) -> None:
    lines = Face(face.url, json=False)  # records have their own JSON encoding
    for record in records:
        line = record.to_line().decode().removesuffix("\n") if face.json else record_line(record)
        lines.answer({}, line)


def _require_records(sources: Sequence[HistorySource], counter: RecordCounter) -> None:
    """Check that there was a record.

    Raises:
        UnusableHistory: no line is a record; the message says what was found.
    """
    if counter.readable:
        return
    names = ", ".join(source.name for source in sources)
    if unreadable := counter.unreadable():
        reasons = ", ".join(f"{each.lines:,} {each.reason}" for each in unreadable)
        found = f"only other lines ({reasons}), the first: {printable(unreadable[0].first)}"
    else:
        found = "; ".join(f"{source.name}: {source.found}" for source in sources)
    raise UnusableHistory(f"there is no record in {names}; found: {found}")


def _kind(kind: str | None) -> str | None:
    known = sorted({str(word) for words in KINDS.values() for word in words})
    if kind is not None and kind not in known:
        near = get_close_matches(kind, known) or ["start_entered", "stop_returned", "gap"]
        raise typer.BadParameter(
            f"{kind!r} is not a kind of record; similar kinds are {', '.join(near)}", param_hint="'--kind'"
        )
    return kind
