"""A real stream without a server: the lines of this interpreter's own standard library.

Every source file belongs to one partition, by its name, and every partition is an append-only log file of
records ``file<TAB>line``. A position in a partition is an offset in bytes, as in any log. In your program
this is Kafka, a table of events, or a folder of a shared file system.
"""

from __future__ import annotations

import sysconfig
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
NOT_OF_IT = {"site-packages", "dist-packages"}
TICK_S = 0.1


def sources() -> list[str]:
    """The standard library's source files, relative to its folder."""
    paths = (path.relative_to(STANDARD_LIBRARY) for path in STANDARD_LIBRARY.rglob("*.py"))
    return sorted(path.as_posix() for path in paths if not NOT_OF_IT & set(path.parts))


def lines_of(source: str) -> Iterator[str]:
    """The lines of a source file, whatever encoding it has."""
    with (STANDARD_LIBRARY / source).open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            yield line.removesuffix("\n")


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive records of a partition: the bytes from ``first`` up to, but without, ``last``."""

    first: int
    last: int
    records: tuple[tuple[str, str], ...]
    """Pairs of a source file and one of its lines."""


class Stream:
    """The partitions in a folder. Written by one process, read by many."""

    def __init__(self, folder: Path, partitions: int = 12) -> None:
        self.folder = folder
        self.partitions = [f"partition-{number:02}" for number in range(partitions)]
        self.manifest = folder / "produced.txt"
        """The source files that were produced so far, or are under way; one a line."""

    def log(self, partition: str) -> Path:
        """The file that holds a partition's records."""
        return self.folder / f"{partition}.log"

    def size(self, partition: str) -> int:
        """The position at which the partition ends now."""
        path = self.log(partition)
        return path.stat().st_size if path.exists() else 0

    def read(self, partition: str, position: int, limit_bytes: int = 32_768) -> Batch:
        """The records from a position on, about ``limit_bytes`` of them; without records at the end."""
        if position >= self.size(partition):
            return Batch(position, position, ())
        with self.log(partition).open("rb") as log:
            log.seek(position)
            data = log.read(limit_bytes) + log.readline()
        complete = data[: data.rfind(b"\n") + 1]
        return Batch(position, position + len(complete), tuple(map(_record, complete.split(b"\n")[:-1])))

    def partition_of(self, source: str) -> str:
        """The partition that a source file belongs to."""
        return self.partitions[zlib.crc32(source.encode()) % len(self.partitions)]

    def produce(self, lines_per_s: float, stopped: threading.Event) -> None:
        """Append the standard library, a little of every partition in each turn, until ``stopped`` is set.

        Then finish the files under way at full speed, so that what was produced is a number of whole files.

        Raises:
            FileExistsError: there is a stream in this folder already.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        waiting: dict[str, list[str]] = defaultdict(list)
        for source in sources():
            waiting[self.partition_of(source)].append(source)
        with ExitStack() as stack:
            manifest = stack.enter_context(self.manifest.open("x"))
            logs = {p: stack.enter_context(self.log(p).open("xb", buffering=0)) for p in self.partitions}

            def records(files: Iterable[str]) -> Iterator[bytes]:
                for source in files:
                    if stopped.is_set():
                        return
                    manifest.write(f"{source}\n")
                    yield from (f"{source}\t{line}\n".encode() for line in lines_of(source))

            under_way = {partition: records(waiting[partition]) for partition in self.partitions}
            lines_per_turn = max(1, round(lines_per_s * TICK_S / len(self.partitions)))
            while under_way:
                for partition, rest in list(under_way.items()):
                    if chunk := b"".join(islice(rest, lines_per_turn)):
                        logs[partition].write(chunk)
                    else:
                        del under_way[partition]
                stopped.wait(TICK_S)

    def produced(self) -> list[str]:
        """The source files that were produced, once producing has ended."""
        return self.manifest.read_text().splitlines()


def _record(line: bytes) -> tuple[str, str]:
    source, _, text = line.decode().partition("\t")
    return source, text
