"""Export of records to a new file or folder, all or nothing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from pydantic import BaseModel, ConfigDict, Field

from rebalanser.cli.history_sources import SUFFIX
from rebalanser.cli.output import counted
from rebalanser.errors import UnusableOutput
from rebalanser.history import Record

FILE_NAME: Final = f"history{SUFFIX}"
"""File name of an export into a folder."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A selection of records. Times are seconds since 1970, inclusive."""

    since: float | None = None
    until: float | None = None
    group: str | None = None
    resource: str | None = None
    kind: str | None = None

    def takes(self, record: Record) -> bool:
        """Return True if the record is selected."""
        return (
            (self.since is None or record.wall_time >= self.since)
            and (self.until is None or record.wall_time <= self.until)
            and (self.group is None or record.group == self.group)
            and (self.resource is None or record.resource == self.resource)
            and (self.kind is None or record.kind == self.kind)
        )


class Exported(BaseModel):
    """Result of an export."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    to: str
    format: str
    records: int
    unreadable: int = Field(description="lines that are not records and so not in the export")

    def sentence(self) -> str:
        """Return the result in one line."""
        rest = f"; {counted(self.unreadable, 'line')} left out, not being records" if self.unreadable else ""
        return f"wrote {counted(self.records, 'record')} to {self.to}{rest}"


def refuse_overwriting(to: Path) -> None:
    """Check that ``to`` does not exist, or is an empty folder.

    Raises:
        UnusableOutput: ``to`` has something.
    """
    try:
        if to.is_dir():
            taken = "the folder is not empty" if next(to.iterdir(), None) else None
        else:
            taken = "the file exists" if to.exists() or to.is_symlink() else None
    except OSError as error:
        raise _unwritable(to, error) from None
    if taken is not None:
        raise UnusableOutput(f"{to} is not overwritten: {taken}; name a new one with --to")


def export_lines(to: Path, records: Iterable[Record]) -> int:
    """Write the records as lines of JSON, and return their number.

    ``to`` is a new file, or a folder unless its name ends in ``.jsonl``.

    Raises:
        UnusableOutput: ``to`` exists, can't be written, or there is no record.
    """
    refuse_overwriting(to)
    with _whole_or_nothing(to) as file:
        count = 0
        for record in records:
            file.write(record.to_line())
            count += 1
        if not count:
            raise UnusableOutput(f"no record matches the options; nothing was written to {to}")
    return count


@contextmanager
def _whole_or_nothing(to: Path) -> Iterator[BinaryIO]:
    """Open a file that is moved to its place once it is complete."""
    try:
        with tempfile.TemporaryDirectory(prefix=".rebalanser-export-", dir=to.parent) as workshop:
            folder = Path(workshop, "export")
            folder.mkdir()
            with (folder / FILE_NAME).open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            into_folder = to.is_dir() or to.suffix != SUFFIX
            refuse_overwriting(to)
            (folder if into_folder else folder / FILE_NAME).rename(to)
    except OSError as error:
        raise _unwritable(to, error) from None


def _unwritable(to: Path, error: OSError) -> UnusableOutput:
    return UnusableOutput(f"{to} can't be written: {error.strerror or error}; nothing is left there")
