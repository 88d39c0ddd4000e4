"""Retention: what a leader writes again before COMMAND drops it, and what it drops (SH-15)."""

from __future__ import annotations

from collections.abc import Mapping

from rebalanser.core.shiva.assignments import AssignmentTable
from rebalanser.core.shiva.command_log import Files, RetainedRecords
from rebalanser.core.shiva.messages import DropRecords, KeepCommands, RecordMetadata
from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.records import KeptCommand, StartCommand
from rebalanser.core.shiva.types import ApplicationId, CommandId
from rebalanser.errors import InternalError


class Republisher:
    """Start commands to write again, batch by batch, and records that are not needed any more."""

    def __init__(
        self, assignments: AssignmentTable, retained: RetainedRecords, options: LeaderOptions
    ) -> None:
        self._assignments = assignments
        self._retained = retained
        self._batch_bytes = options.keep_batch_bytes
        self._soon: dict[ApplicationId, None] = {}
        self._under_way: dict[ApplicationId, CommandId] = {}

    def keep(self, application: ApplicationId) -> None:
        """Write the start command of an application again soon."""
        if application not in self._under_way:
            self._soon[application] = None

    def look(self, wall_ms: int) -> None:
        """Find start commands that are old, or far from the end of COMMAND."""
        for application in self._retained.due(self._assignments.needed(), wall_ms):
            self.keep(application)

    def batch(self) -> KeepCommands | None:
        """Return the next batch; None if nothing is due, or while a batch is under way."""
        if self._under_way:
            return None
        commands: list[KeptCommand] = []
        size_bytes = 0
        for application in list(self._soon):
            entry = self._assignments.needing(application)
            if entry is not None and not self._retained.missing(application, entry.archive):
                size_bytes += entry.archive.size_bytes
                if commands and size_bytes > self._batch_bytes:
                    break
                original = self._retained.original(application, entry)
                commands.append(KeptCommand(StartCommand.of(application, entry), original))
                self._under_way[application] = entry.command
            del self._soon[application]
        return KeepCommands(tuple(commands)) if commands else None

    def kept(self, at: Mapping[ApplicationId, RecordMetadata]) -> int:
        """Note the offsets of the batch under way; return how many commands it has.

        Raises:
            InternalError: no batch is under way.
        """
        if not self._under_way:
            raise InternalError("Kept, but no commands are being kept")
        batch, self._under_way = self._under_way, {}
        for application, command in batch.items():
            entry = self._assignments.entries.get(application)
            record = at.get(application)
            if record is not None:
                self._retained.copied(application, command, record.offset)
            if entry is not None and entry.command == command and record is not None:
                self._retained.rewritten(application, entry, record)
                self._assignments.note_offset(application, record.offset, record.timestamp_ms)
        return len(batch)

    def dropped(self, now: float, *, archives_too: bool) -> DropRecords | None:
        """Return the records that nothing needs any more; the published document must be up to date."""
        kept = frozenset(
            application
            for application, command in self._retained.kept.items()
            if application not in self._under_way and not self._needs_command(application, command)
        )
        for application in kept:
            self._retained.uncopied(application)
        archives = self._retained.unneeded(self._needs_files, now) if archives_too else []
        self._retained.dropping((application, archive.sha256) for application, archive in archives)
        return DropRecords(kept, frozenset(archives)) if kept or archives else None

    def _needs_command(self, application: ApplicationId, command: CommandId) -> bool:
        entry = self._assignments.needing(application)
        return entry is not None and entry.command == command

    def _needs_files(self, files: Files) -> bool:
        application, sha256 = files
        entry = self._assignments.needing(application)
        return entry is not None and entry.archive.sha256 == sha256
