"""What was started, as a worker read it from COMMAND, and which files of it are kept (SH-4, SH-5)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from rebalanser.shiva.messages import DropFiles, Standing, StoreFiles
from rebalanser.shiva.records import KeptCommand, StartCommand
from rebalanser.shiva.types import ApplicationId, Archive, CommandId, RestartPolicy

MAX_STARTS: Final = 4
"""Start commands of one application that are remembered while no document has decided on them."""
MAX_STOPS: Final = 10_000
"""Stops that are remembered while no document takes them into account."""

FilesEffect: TypeAlias = StoreFiles | DropFiles


class Stage(StrEnum):
    """How far the files of a start command are."""

    ABSENT = "absent"
    STORING = "storing"
    STORED = "stored"
    REFUSED = "refused"


@dataclass(slots=True)
class Started:
    """One start command, and what this worker has of its files."""

    application: ApplicationId
    command: CommandId
    archive: Archive
    position: int
    """Where it counts as standing on COMMAND."""
    stage: Stage = Stage.ABSENT
    stopped_at: int | None = None
    """Where the last stop behind it stands, unless a document was adopted that names it all the same."""
    keep_data: bool = False
    """True if that stop says to keep its data."""
    given_up: bool = False
    """Whether too many later ones were read that no document has decided on either."""
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    reason: str = ""
    reported: bool = False
    """True if the leader was told that the files were refused."""

    @property
    def stopped(self) -> bool:
        """Whether a stop was read that overrides it."""
        return self.stopped_at is not None

    def read_again(self, position: int) -> None:
        """It stands once more: what was refused is tried again, what was stopped since is started anew."""
        if self.stage is Stage.REFUSED:
            self.stage = Stage.ABSENT
        if position > self.position:
            self.position = position
            self.stopped_at = None


@dataclass(frozen=True, slots=True)
class _StopRead:
    offset: int
    keep_data: bool


class WorkerFiles:
    """The start commands that may still be acted on, and the stage of their files.

    A document *decides on* a command when its ``consumed`` reaches the command's position: whether it names
    the command, as one that is to run, then says whether files of it are still needed.
    """

    def __init__(self) -> None:
        self._started: dict[ApplicationId, dict[CommandId, Started]] = {}
        self._stops: OrderedDict[ApplicationId, _StopRead] = OrderedDict()
        self._decided = -1
        self._to_run: Mapping[ApplicationId, CommandId] = {}
        self._finished: Mapping[ApplicationId, CommandId] = {}

    @property
    def applications(self) -> tuple[ApplicationId, ...]:
        """All that something is remembered of."""
        return tuple(self._started)

    def find(self, application: ApplicationId, command: CommandId) -> Started | None:
        """The start command, if it was read and may still be acted on."""
        return self._started.get(application, {}).get(command)

    def was_stopped(self, application: ApplicationId) -> bool:
        """Whether a stop was read that no document has taken into account yet."""
        return application in self._stops

    def start(self, at: Standing, record: StartCommand | KeptCommand) -> ApplicationId:
        """A start command was read; a kept one counts as standing where the client's record stood (SH-15)."""
        start = record.start if isinstance(record, KeptCommand) else record
        position = record.original if isinstance(record, KeptCommand) else at.offset
        commands = self._started.setdefault(start.application, {})
        known = commands.get(start.command)
        if known is None:
            started = Started(start.application, start.command, start.archive, position)
            commands[start.command] = started
            stop = self._stops.get(start.application)
            if stop is not None and position < stop.offset:
                started.stopped_at, started.keep_data = stop.offset, stop.keep_data
            self._give_up_oldest(start.application)
        else:
            known.read_again(position)
        return start.application

    def _give_up_oldest(self, application: ApplicationId) -> None:
        commands = self._started[application]
        waiting = [c for c in commands.values() if not self._is_to_run(c) and not self._is_over(c)]
        if len(waiting) <= MAX_STARTS:
            return
        oldest = min(waiting, key=_position)
        oldest.given_up = True
        if oldest.stage is Stage.ABSENT:
            del commands[oldest.command]

    def stop(self, at: Standing, application: ApplicationId, keep_data: bool = False) -> None:
        """A stop was read: nothing that was started before it runs or is stored any more (SH-5)."""
        before = self._stops.pop(application, None)
        if before is None or before.offset < at.offset:
            before = _StopRead(at.offset, keep_data)
        self._stops[application] = before
        if len(self._stops) > MAX_STOPS:
            self._stops.popitem(last=False)
        for started in self._started.get(application, {}).values():
            if started.position < at.offset:
                started.stopped_at, started.keep_data = at.offset, keep_data

    def decided(
        self,
        consumed: int,
        to_run: Mapping[ApplicationId, CommandId],
        finished: Mapping[ApplicationId, CommandId],
    ) -> None:
        """A document was adopted that takes COMMAND into account as far as ``consumed``.

        What it names in spite of a stop that it takes into account is to run on: a leader may find nothing
        of that stop but a later start command, which it refused.

        What has finished keeps its files where they are, and is not stored where they are not: the leader
        need not keep its archive.
        """
        self._decided = max(self._decided, consumed)
        self._to_run = to_run
        self._finished = finished
        for application in [a for a, stop in self._stops.items() if stop.offset <= self._decided]:
            del self._stops[application]
        for application, command in to_run.items():
            started = self.find(application, command)
            if started is not None and started.stopped_at is not None and started.stopped_at <= consumed:
                started.stopped_at = None

    def stored(self, application: ApplicationId, command: CommandId, policy: RestartPolicy) -> bool:
        """Its files are on disk. Whether that was asked for."""
        started = self._answered(application, command, Stage.STORED)
        if started is not None:
            started.policy = policy
        return started is not None

    def refused(self, application: ApplicationId, command: CommandId, reason: str) -> bool:
        """Its files cannot be used. Whether they were asked for."""
        started = self._answered(application, command, Stage.REFUSED)
        if started is not None:
            started.reason = reason
        return started is not None

    def retry(self, application: ApplicationId, command: CommandId) -> bool:
        """Forget that files of the command were refused and the leader was told. Return whether it was so."""
        started = self.find(application, command)
        if started is None or started.stage is not Stage.REFUSED or not started.reported:
            return False
        started.stage, started.reported = Stage.ABSENT, False
        return True

    def _answered(self, application: ApplicationId, command: CommandId, stage: Stage) -> Started | None:
        started = self.find(application, command)
        if started is None or started.stage is not Stage.STORING:
            return None
        started.stage = stage
        return started

    def settle(
        self, applications: Iterable[ApplicationId], in_use: Mapping[ApplicationId, CommandId]
    ) -> list[FilesEffect]:
        """What is to be stored and dropped now, in the order of the log; ``in_use`` is what processes run.

        What a later start command follows keeps its files until a document has decided: that one may be
        refused. Files that are being stored are dropped once that has been answered, so that at most one
        request for a command's files is ever under way.
        """
        effects: list[tuple[int, FilesEffect]] = []
        for application in applications:
            commands = self._started.get(application, {})
            newest = max((c for c in commands.values() if not c.stopped), key=_position, default=None)
            for started in list(commands.values()):
                effect = self._settled(started, started is newest, in_use.get(application))
                if effect is not None:
                    effects.append((started.position, effect))
                if started.stage is Stage.ABSENT and self._is_over(started) and not self._is_to_run(started):
                    del commands[started.command]
            if not commands:
                self._started.pop(application, None)
        return [effect for _, effect in sorted(effects, key=lambda pair: pair[0])]

    def _settled(self, started: Started, newest: bool, in_use: CommandId | None) -> FilesEffect | None:
        if started.stage is Stage.ABSENT:
            if started.stopped or not (self._is_to_run(started) or (newest and not self._is_over(started))):
                return None
            started.stage = Stage.STORING
            return StoreFiles(started.application, started.command, started.archive)
        kept = self._is_to_run(started) or self._finished.get(started.application) == started.command
        dropped = started.stopped or (self._is_over(started) and not kept)
        if not dropped or started.stage is Stage.STORING or started.command == in_use:
            return None
        started.stage = Stage.ABSENT
        keep_data = started.keep_data if started.stopped else None
        return DropFiles(started.application, started.command, keep_data)

    def _is_to_run(self, started: Started) -> bool:
        return self._to_run.get(started.application) == started.command

    def _is_over(self, started: Started) -> bool:
        """Whether only a document that names it can still bring it about."""
        return started.stopped or started.given_up or started.position <= self._decided


def _position(started: Started) -> int:
    return started.position
