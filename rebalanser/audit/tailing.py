"""A streaming source of Spark for history files that are still being written (AU-9).

Spark's own source of files reads each file once, when it first sees it. A history file grows for hours, so
this one keeps a position in each: ``{path: [bytes, lines]}`` is its offset, which Spark keeps in its
checkpoint. It reads whole lines only: an unfinished one waits. ``position`` is the line's number, from 1.

If there is more than one micro-batch may read, the files are read along their records' wall times, a block of
the oldest one first, so that no host's history is far ahead of another's; ``oldest_unread`` returns the time
up to which all are read.

Spark does not give a reader in Python the offset of its checkpoint, so ``planned`` reads it there.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from rebalanser.history.reader import MAX_LINE_BYTES

if TYPE_CHECKING:
    from pyarrow import RecordBatch

NAME: Final = "rebalanser_history"
MAX_BYTES: Final = 64 << 20
"""Maximum bytes that one micro-batch reads."""
_BLOCK_BYTES: Final = 1 << 20
_FIRST_SOURCE: Final = 2
"""The line of Spark's log of offsets that is the first source's, after a version and a line of settings."""

Offset: TypeAlias = dict[str, list[int]]


@dataclass(frozen=True)
class ByteRange:
    """Whole lines of one file: bytes ``start`` to ``end``, before which there are ``lines`` lines."""

    path: str
    start: int
    end: int
    lines: int


@dataclass
class ByteRanges(InputPartition):  # type: ignore[misc, unused-ignore]
    """Input of one task: starting a task takes longer than reading what a file grows by in a second."""

    members: list[ByteRange]


def planned(checkpoint: Path) -> Offset:
    """Offset to which the newest micro-batch of a checkpoint reads, finished or not; empty without one.

    The files must be the first source of the query.
    """
    batches = [int(file.name) for file in (checkpoint / "offsets").glob("*") if file.name.isdigit()]
    return _offset_of(checkpoint, max(batches)) if batches else {}


def oldest_unread(checkpoint: Path, number: int, paths: Sequence[str]) -> float | None:
    """The wall time of the oldest record that micro-batch ``number`` left unread for lack of room.

    None if it has read all there was, or if no file is followed.
    """
    if not paths:
        return None
    reached, before = _offset_of(checkpoint, number), _offset_of(checkpoint, number - 1)
    taken = sum(end - before.get(path, [0, 0])[0] for path, (end, _) in reached.items())
    if taken < MAX_BYTES - _BLOCK_BYTES:
        return None
    unread = ((str(path), reached.get(str(path), [0, 0])[0]) for path in _files([Path(p) for p in paths]))
    walls = (_next_wall(path, start) for path, start in unread if _size(path) > start)
    return min((wall for wall in walls if wall > -math.inf), default=None)


def _offset_of(checkpoint: Path, number: int) -> Offset:
    try:
        lines = (checkpoint / "offsets" / str(number)).read_text().splitlines()
    except FileNotFoundError:
        return {}
    offset: Offset = json.loads(lines[_FIRST_SOURCE])
    return offset


class HistoryFiles(DataSource):
    """``spark.readStream.format("rebalanser_history")``: the history files in folders, as they grow.

    Options: ``paths``, a JSON list of folders, which are searched for ``*.jsonl`` at each micro-batch, nested
    ones too, and of files; ``planned``, the result of ``planned``, as JSON; ``tasks``, the maximum number of
    tasks that read a micro-batch.
    """

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return NAME

    def schema(self) -> str:
        """The columns that ``rebalanser.audit.ingest.parse_lines`` takes."""
        return "value string, source string, position long"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: ARG002, N802 - Spark's name
        """The reader of the paths in the options."""
        paths, planned = json.loads(self.options["paths"]), json.loads(self.options["planned"])
        return TailReader(paths, planned, int(self.options["tasks"]))


class TailReader(DataSourceStreamReader):
    """Follows files as they grow, appear and are deleted."""

    def __init__(self, paths: list[str], planned: Offset, tasks: int, max_bytes: int = MAX_BYTES) -> None:
        self._paths = [Path(path) for path in paths]
        self._planned = planned
        self._tasks = tasks
        self._max_bytes = max_bytes

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """The empty offset: no file has been read."""
        return {}

    def latestOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """The offset of the files' whole lines, at most ``max_bytes`` beyond the one planned before."""
        latest = {str(path): self._planned.get(str(path), [0, 0]) for path in _files(self._paths)}
        budget = self._max_bytes
        grown = [path for path, (start, _) in latest.items() if _size(path) > start]
        oldest_first = [(_next_wall(path, latest[path][0]), path) for path in grown]
        heapq.heapify(oldest_first)
        while oldest_first and budget > 0:
            _, path = heapq.heappop(oldest_first)
            start, lines = latest[path]
            more, counted = _whole_lines(Path(path), start, min(_BLOCK_BYTES, budget))
            if not more:
                continue
            budget -= more
            latest[path] = [start + more, lines + counted]
            if _size(path) > start + more:
                heapq.heappush(oldest_first, (_next_wall(path, start + more), path))
        self._planned = latest
        return latest

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Tasks of about the same length, with a stretch for each file that has grown."""
        found = sorted(_stretches(start, end), key=lambda stretch: stretch.start - stretch.end)
        least_first = [(0, number, ByteRanges([])) for number in range(min(self._tasks, len(found)))]
        for stretch in found:
            taken, number, task = least_first[0]
            task.members.append(stretch)
            heapq.heapreplace(least_first, (taken + stretch.end - stretch.start, number, task))
        return [task for _, _, task in least_first]

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        """The lines of a task's stretches, in blocks."""
        assert isinstance(partition, ByteRanges)
        for stretch in partition.members:
            yield from _batches(stretch)


def _files(paths: Sequence[Path]) -> list[Path]:
    """The files of a history in the folders among ``paths``, and the files among them."""
    found = {
        file
        for path in paths
        for file in (path.rglob("*.jsonl") if path.is_dir() else [path])
        if file.is_file()
    }
    return sorted(found)


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except FileNotFoundError:
        return 0


def _next_wall(path: str, start: int) -> float:
    """The wall time of the whole line that begins at byte ``start``; negative infinity if it has none."""
    try:
        with Path(path).open("rb") as file:
            file.seek(start)
            line = file.readline(MAX_LINE_BYTES)
        wall = json.loads(line)["wall_time"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return -math.inf
    return float(wall) if isinstance(wall, int | float) else -math.inf


def _stretches(start: Mapping[str, list[int]], end: Mapping[str, list[int]]) -> Iterator[ByteRange]:
    for path, (until, _) in sorted(end.items()):
        since, lines = start.get(path, [0, 0])
        if until > since:
            yield ByteRange(path, since, until, lines)


def _whole_lines(path: Path, start: int, budget: int) -> tuple[int, int]:
    """Number of whole-line bytes among the next ``budget`` bytes from ``start`` on, and of these lines.

    If the budget does not hold one line, more is read; a line of more than ``MAX_BYTES`` is no record and is
    read in pieces.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            block = file.read(budget)
            if len(block) == budget and b"\n" not in block:
                block += file.readline(MAX_BYTES - len(block))
    except FileNotFoundError:
        return 0, 0
    whole = block.rfind(b"\n") + 1
    return (whole or (len(block) if len(block) >= MAX_BYTES else 0)), block.count(b"\n")


def _batches(stretch: ByteRange) -> Iterator[RecordBatch]:
    """The lines of a stretch; none if its file was deleted meanwhile, which shows as a gap in its numbers."""
    path = Path(stretch.path)
    position = stretch.lines
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(stretch.start)
        left = stretch.end - stretch.start
        rest = b""
        while left:
            block = file.read(min(_BLOCK_BYTES, left))
            left = left - len(block) if block else 0
            whole, _, rest = (rest + block).rpartition(b"\n") if left else (rest + block, b"", b"")
            if whole:
                lines = whole.removesuffix(b"\n").decode("utf-8", "replace").split("\n")
                yield _rows(lines, path.as_uri(), position)
                position += len(lines)


def _rows(lines: list[str], uri: str, position: int) -> RecordBatch:
    import pyarrow  # noqa: PLC0415 - where Spark's workers read, not where the plan is made

    numbers = range(position + 1, position + 1 + len(lines))
    columns = [pyarrow.array(lines), pyarrow.repeat(uri, len(lines)), pyarrow.array(numbers)]
    return pyarrow.RecordBatch.from_arrays(columns, names=["value", "source", "position"])
