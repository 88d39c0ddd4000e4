"""Was every line counted exactly once? Compares the sink with a direct count by a single process."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from stdlib_stream import Stream, lines_of


@dataclass(frozen=True, slots=True)
class Comparison:
    """What became of the lines of a stream."""

    produced: int
    """Lines of all files that were produced, counted in the standard library itself."""
    processed: int
    """Lines in all batches that the sink accepted."""
    accepted_twice: int
    lost: int
    """Lines that were passed over: later ones of their partition were accepted."""
    waiting: int
    """Lines that come after all that was accepted of their partition."""
    refused: int
    """Stale writes that the sink refused."""
    wrong_files: tuple[str, ...]
    """Files whose lines or words in the sink are not those of the direct count."""

    @property
    def exact(self) -> bool:
        """Whether every line was counted exactly once."""
        wrong = self.accepted_twice or self.lost or self.waiting or self.wrong_files
        return self.produced == self.processed and not wrong

    def lines(self) -> Iterator[str]:
        """The comparison for people, one figure a line."""
        figures = {
            "lines produced": self.produced,
            "lines processed": self.processed,
            "lines accepted twice": self.accepted_twice,
            "lines lost": self.lost,
            "lines not counted yet": self.waiting,
            "stale writes refused": self.refused,
            "files counted wrongly": len(self.wrong_files),
        }
        for name, figure in figures.items():
            yield f"{name:<24}{figure:>12,}"
        if self.waiting:
            yield "files are compared once no line waits any more: let the workers catch up, and ask again"


def compare(stream: Stream, sink_path: Path) -> Comparison:
    """Compare. While lines wait to be counted, files are not compared.

    Raises:
        OSError: there is no stream or no sink.
    """
    counted = {file: _count(file) for file in stream.produced()}
    with closing(sqlite3.connect(f"file:{sink_path}?mode=ro", uri=True)) as sink:
        written = {file: (lines, words) for file, lines, words in sink.execute("SELECT * FROM counts")}
        ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for partition, first, last in sink.execute("SELECT partition, first, last FROM accepted"):
            ranges[partition].append((first, last))
        (processed,) = sink.execute("SELECT coalesce(sum(lines), 0) FROM accepted").fetchone()
        (refused,) = sink.execute("SELECT count(*) FROM refused").fetchone()
    waiting, times = 0, []
    for partition in stream.partitions:
        reached = max((last for _, last in ranges[partition]), default=0)
        for start, number in _times_accepted(stream, partition, ranges):
            waiting += start >= reached
            if start < reached:
                times.append(number)
    return Comparison(
        produced=sum(lines for lines, _ in counted.values()),
        processed=processed,
        accepted_twice=sum(n > 1 for n in times),
        lost=sum(n == 0 for n in times),
        waiting=waiting,
        refused=refused,
        wrong_files=()
        if waiting
        else tuple(
            sorted(
                file
                for file in counted.keys() | written.keys()
                if counted.get(file, (0, 0)) != written.get(file, (0, 0))
            )
        ),
    )


def _count(file: str) -> tuple[int, int]:
    """Lines and words of a source file, read where the producer read it."""
    lines = words = 0
    for line in lines_of(file):
        lines += 1
        words += len(line.split())
    return lines, words


def _times_accepted(
    stream: Stream, partition: str, ranges: dict[str, list[tuple[int, int]]]
) -> Iterator[tuple[int, int]]:
    """Where each line of a partition begins, and in how many accepted ranges it is."""
    change: dict[int, int] = defaultdict(int)
    for first, last in ranges[partition]:
        change[first] += 1
        change[last] -= 1
    lines = stream.log(partition).read_bytes().splitlines(keepends=True)
    depth = 0
    for start in accumulate(map(len, lines[:-1]), initial=0) if lines else ():
        depth += change[start]
        yield start, depth
