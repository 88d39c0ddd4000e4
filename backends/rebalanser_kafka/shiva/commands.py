"""Start commands with their archives, and commands that no document has taken into account yet."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeAlias

from rebalanser.core.shiva.messages import ScaleRead, StartRead, StopRead
from rebalanser.core.shiva.records import AssignmentDocument, ScaleCommand, StartCommand, StopCommand
from rebalanser.core.shiva.types import ApplicationId, Archive, CommandId, check_part
from rebalanser.errors import (
    InvalidArchive,
    InvalidManifest,
    InvalidSettings,
    RebalanserError,
    RegistryUnavailable,
)
from rebalanser.shiva.archives import Packed, pack
from rebalanser.shiva.cluster import Progress, Start
from rebalanser_kafka.connection import Connection, patiently
from rebalanser_kafka.failures import LogTruncated
from rebalanser_kafka.reader import LogReader
from rebalanser_kafka.records import FRAMING_BYTES, NewRecord
from rebalanser_kafka.shiva.decoding import command_event
from rebalanser_kafka.shiva.wire import PartKey, encode, key_of
from rebalanser_kafka.writer import UNDER_WAY_BYTES, LogWriter

PART_BYTES: Final = 900_000
"""Maximum bytes of a part: below Kafka's own default limit of a record, whatever the topic allows."""
_POLL_S: Final = 0.2
_BATCH: Final = 500
_BATCH_BYTES: Final = 8_000_000
"""Number of applications, and bytes of archives, whose parts are written before their start commands."""


def packed_starts(starts: Sequence[Start]) -> list[Packed]:
    """Pack the archives of applications; a source of several applications is packed once.

    Raises:
        InvalidSettings: an application is given twice.
        InvalidName: a tag is no valid name.
        InvalidArchive, InvalidManifest: as ``pack`` does, with the application
            if there are several.
    """
    names: set[ApplicationId] = set()
    known: dict[tuple[Path, tuple[tuple[str, str], ...]], Packed] = {}
    packed = []
    for start in starts:
        if start.application in names:
            raise InvalidSettings(f"{start.application} is given twice; nothing was sent")
        names.add(start.application)
        for tag in start.tags:
            check_part(tag, "tag")
        key = start.source, tuple(sorted(start.environment.items()))
        if key not in known:
            known[key] = _packed(start, named=len(starts) > 1)
        packed.append(known[key])
    return packed


def _packed(start: Start, named: bool) -> Packed:
    about = f"{start.application}: " if named else ""
    try:
        return pack(start.source, environment=start.environment)
    except OSError as error:
        raise InvalidArchive(f"{about}{start.source} cannot be read: {error.strerror}") from error
    except (InvalidArchive, InvalidManifest) as error:
        raise type(error)(f"{about}{error}") from error


class Publication:
    """Writes archives and start commands to COMMAND, those of many applications at a time.

    A start command is written once all parts of its archive have been acknowledged (SH-6).
    """

    def __init__(
        self, writer: LogWriter, topic: str, timeout_s: float, max_message_bytes: int, progress: Progress
    ) -> None:
        """``progress`` is called with the bytes of archives that were acknowledged.

        Raises:
            InvalidSettings: the topic's largest record has no room for a part.
        """
        part_bytes = min(PART_BYTES, max_message_bytes - FRAMING_BYTES)
        if part_bytes <= 0:
            raise InvalidSettings(
                f"{topic} takes records of {max_message_bytes:,} bytes; archives are sent in records of more "
                f"than {FRAMING_BYTES:,}: raise its max.message.bytes"
            )
        self._writer = writer
        self._topic = topic
        self._timeout_s = timeout_s
        self._part_bytes = part_bytes
        self._under_way_bytes = min(UNDER_WAY_BYTES, max_message_bytes)
        self._progress = progress
        self._done_bytes = 0
        self._total_bytes = 0

    def publish(self, starts: Sequence[Start], packed: Sequence[Packed]) -> tuple[list[CommandId], list[int]]:
        """Publish applications with their archives; return ids and offsets of the start commands.

        Raises:
            OutcomeUnknown, RequestTooLarge, RegistryUnavailable, AccessDenied, RegistryRefused: not all were
                started; of several the message says how many surely were.
        """
        self._total_bytes = sum(archive.size_bytes for archive in packed)
        commands = [self._command(start, archive) for start, archive in zip(starts, packed, strict=True)]
        offsets: list[int] = []
        try:
            for first, behind in _batches([archive.size_bytes for archive in packed]):
                batch = commands[first:behind]
                parts = self._parts(batch, packed[first:behind])
                self._append(parts, self._tell)
                offsets += self._append(self._record(key_of(command), encode(command)) for command in batch)
        except RebalanserError as error:
            if len(starts) > 1:
                told = f"{error}; the first {len(offsets):,} of {len(starts):,} applications were started"
                raise type(error)(told) from error
            raise
        return [command.command for command in commands], offsets

    def _append(
        self, records: Iterable[NewRecord], on_written: Callable[[NewRecord], None] = lambda _record: None
    ) -> list[int]:
        return self._writer.append_all(
            records,
            timeout_s=self._timeout_s,
            under_way_bytes=self._under_way_bytes,
            on_written=on_written,
        )

    def _command(self, start: Start, packed: Packed) -> StartCommand:
        archive = Archive(packed.sha256, packed.size_bytes, -(-packed.size_bytes // self._part_bytes))
        tags = packed.tags.union(start.tags)
        replicas = packed.manifest.replicas if start.replicas is None else start.replicas
        command = uuid.uuid4().hex
        return StartCommand(start.application, command, archive, start.mode, tags, packed.requests, replicas)

    def _parts(self, commands: Sequence[StartCommand], packed: Sequence[Packed]) -> Iterator[NewRecord]:
        for command, each in zip(commands, packed, strict=True):
            for number in range(command.archive.parts):
                first = number * self._part_bytes
                key = PartKey(command.application, each.sha256, number)
                yield self._record(str(key), each.archive[first : first + self._part_bytes])

    def _record(self, key: str, value: bytes) -> NewRecord:
        return NewRecord(self._topic, key.encode(), value)

    def _tell(self, part: NewRecord) -> None:
        self._done_bytes += len(part.value or b"")
        self._progress(self._done_bytes, self._total_bytes)


def _batches(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the bounds of batches of archives; an archive beyond the limit is a batch of its own."""
    first = size_bytes = 0
    for number, each_bytes in enumerate(sizes):
        full = number - first == _BATCH or size_bytes + each_bytes > _BATCH_BYTES
        if full and number > first:
            yield first, number
            first, size_bytes = number, 0
        size_bytes += each_bytes
    if first < len(sizes):
        yield first, len(sizes)


LastCommands: TypeAlias = dict[ApplicationId, StartCommand | StopCommand | ScaleCommand]


def last_commanded(
    connection: Connection, topic: str, document: AssignmentDocument | None, timeout_s: float
) -> LastCommands:
    """Return the last command of each application that has one after the consumed offset.

    A start that another number of replicas was commanded for has that number.

    Raises:
        RegistryUnavailable: COMMAND could not be read to its end within ``timeout_s`` seconds.
    """
    start: int | Literal["earliest"] = "earliest" if document is None else document.consumed + 1
    try:
        return patiently(partial(_last, connection, topic, start), timeout_s)
    except LogTruncated:
        return patiently(partial(_last, connection, topic, "earliest"), timeout_s)


def _last(
    connection: Connection, topic: str, start: int | Literal["earliest"], timeout_s: float
) -> LastCommands:
    deadline = time.monotonic() + timeout_s
    last: LastCommands = {}
    with LogReader(connection, topic, start) as reader:
        end = reader.end_offset(timeout_s)
        while reader.position < end:
            if time.monotonic() >= deadline:
                raise RegistryUnavailable(f"{topic} could not be read to its end within {timeout_s:g} s")
            for event in map(command_event, reader.poll(_POLL_S)):
                match event:
                    case StartRead(record=StartCommand() as command):
                        last[command.application] = command
                    case StopRead(record=stop):
                        last[stop.application] = stop
                    case ScaleRead(record=scale):
                        before = last.get(scale.application)
                        if isinstance(before, StartCommand):
                            last[scale.application] = replace(before, replicas=scale.replicas)
                        elif not isinstance(before, StopCommand):
                            last[scale.application] = scale
    return last
