"""Records of the applications on COMMAND, their age, and the bytes written since (SH-15)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from rebalanser.core.shiva.messages import PartRead, RecordMetadata
from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.records import StartCommand
from rebalanser.core.shiva.types import ApplicationEntry, ApplicationId, Archive, CommandId

Files: TypeAlias = tuple[ApplicationId, str]
"""An application and the sha256 of an archive of it."""
_MAX_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class _Place:
    """Time of a record by Kafka's clock, and the bytes of COMMAND that had been read by then."""

    timestamp_ms: int
    position_bytes: int


_GONE: Final = _Place(timestamp_ms=-1, position_bytes=-1)


@dataclass(frozen=True, slots=True)
class _Start:
    place: _Place
    original: int


class RetainedRecords:
    """Start commands and archives on COMMAND."""

    def __init__(self, options: LeaderOptions) -> None:
        self.kept: dict[ApplicationId, CommandId] = {}
        """The command whose copy is under each application's ``keep:`` key."""
        self._kept_at: dict[ApplicationId, int] = {}
        self._options = options
        self._read_bytes = 0
        self._looked_at_bytes = 0
        self._parts: dict[Files, dict[int, _Place]] = {}
        self._dropping: dict[Files, dict[int, _Place]] = {}
        self._idle_since: dict[Files, float] = {}
        self._starts: dict[ApplicationId, dict[CommandId, _Start]] = {}

    def read(self, at: RecordMetadata) -> None:
        """Take in any record of COMMAND."""
        self._read_bytes += at.size_bytes

    def part_read(self, event: PartRead, now: float) -> None:
        """Take in a part of an archive, or its tombstone."""
        files = (event.application, event.sha256)
        if event.at.size_bytes:
            self._parts.setdefault(files, {})[event.number] = self._place(event.at)
            self._idle_since[files] = now
            return
        self._pop(self._parts, files, event.number)
        self._pop(self._dropping, files, event.number)
        if files not in self._parts:
            self._idle_since.pop(files, None)

    @staticmethod
    def _pop(numbers: dict[Files, dict[int, _Place]], files: Files, number: int) -> None:
        of_files = numbers.get(files, {})
        of_files.pop(number, None)
        if not of_files:
            numbers.pop(files, None)

    def _place(self, at: RecordMetadata) -> _Place:
        return _Place(at.timestamp_ms, self._read_bytes)

    def missing(self, application: ApplicationId, archive: Archive) -> str:
        """Return the parts of an archive that are not on COMMAND, for people; empty if all are.

        A part that is read while tombstones are being written may precede them.
        """
        if (application, archive.sha256) in self._dropping:
            return "its archive was unused for long and is just being dropped: start it again"
        parts = self._parts.get((application, archive.sha256), {})
        missing = [str(number) for number in range(archive.parts) if number not in parts]
        if not missing:
            return ""
        some = ", ".join(missing[:_MAX_NAMED]) + (", ..." if len(missing) > _MAX_NAMED else "")
        return (
            f"{len(missing)} of the {archive.parts} parts of its archive are not on COMMAND (numbers {some}):"
            " start it again"
        )

    def copied(self, application: ApplicationId, command: CommandId, offset: int) -> None:
        """Note a copy of a start command at ``offset``; one that is read after a later one was written is
        obsolete."""
        if offset >= self._kept_at.get(application, -1):
            self.kept[application] = command
            self._kept_at[application] = offset

    def uncopied(self, application: ApplicationId) -> None:
        """Note that the copy of a start command is dropped."""
        del self.kept[application]
        self._kept_at.pop(application, None)

    def start_read(self, start: StartCommand, at: RecordMetadata, original: int) -> None:
        """Note a start command at ``at``, which counts as of ``original``."""
        self._starts.setdefault(start.application, {})[start.command] = _Start(self._place(at), original)

    def original(self, application: ApplicationId, entry: ApplicationEntry) -> int:
        """Return the offset as of which an application's start command counts."""
        start = self._starts.get(application, {}).get(entry.command)
        return start.original if start else entry.offset

    def rewritten(self, application: ApplicationId, entry: ApplicationEntry, at: RecordMetadata) -> None:
        """Note that the start command and the archive of an application were written again."""
        place = self._place(at)
        original = self.original(application, entry)
        self._starts.setdefault(application, {})[entry.command] = _Start(place, original)
        parts = self._parts.get((application, entry.archive.sha256), {})
        for number in parts:
            parts[number] = place

    def follow(self, application: ApplicationId, command: CommandId | None) -> None:
        """Forget the offsets of the other start commands of an application."""
        starts = self._starts.pop(application, {})
        if command is not None and command in starts:
            self._starts[application] = {command: starts[command]}

    @property
    def look_due(self) -> bool:
        """True if enough was written that a start command may be close to the limit by size."""
        return (self._read_bytes - self._looked_at_bytes) * 20 >= self._options.retention_bytes

    def due(
        self, applications: Iterable[tuple[ApplicationId, ApplicationEntry]], wall_ms: int
    ) -> list[ApplicationId]:
        """Return the start commands to write again, the oldest first.

        A start command that COMMAND has dropped is written again from the document, if its archive is still
        there.
        """
        self._looked_at_bytes = self._read_bytes
        oldest_ms = wall_ms - self._options.keep_ratio * self._options.retention_s * 1000
        first_byte = self._read_bytes - self._options.keep_ratio * self._options.retention_bytes
        due = []
        for application, entry in applications:
            parts = self._parts.get((application, entry.archive.sha256), {})
            start = self._starts.get(application, {}).get(entry.command)
            if len(parts) < entry.archive.parts:
                continue
            places = [start.place if start else _GONE, *parts.values()]
            time_ms = min(place.timestamp_ms for place in places)
            position = min(place.position_bytes for place in places)
            if time_ms <= oldest_ms or position < first_byte:
                due.append((position, application))
        return [application for _, application in sorted(due)]

    def unneeded(self, needed: Callable[[Files], bool], now: float) -> list[tuple[ApplicationId, Archive]]:
        """Return the archives that have been unused for so long that no client can be about to start them."""
        dropped = []
        for files, parts in self._parts.items():
            if needed(files):
                self._idle_since[files] = now
            elif now - self._idle_since[files] >= self._options.drop_after_s:
                application, sha256 = files
                dropped.append((application, Archive(sha256, 0, max(parts) + 1)))
        return dropped

    def dropping(self, dropped: Iterable[Files]) -> None:
        """Note that tombstones are being written; they will be read as well."""
        for files in dropped:
            self._dropping[files] = self._parts.pop(files)
            del self._idle_since[files]
