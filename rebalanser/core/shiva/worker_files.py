"""Start commands that a worker has read from COMMAND, and their files on its disk (SH-4, SH-5)."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from rebalanser.core.shiva.messages import DropFiles, RecordMetadata, StoreFiles
from rebalanser.core.shiva.records import KeptCommand, StartCommand
from rebalanser.core.shiva.types import ApplicationId, Archive, CommandId, RestartPolicy

MAX_STARTS: Final = 4
"""Maximum start commands of one application that are kept until a document decides on them."""
MAX_STOPS: Final = 10_000
"""Maximum stops that are kept until a document takes them into account."""

FilesEffect: TypeAlias = StoreFiles | DropFiles


class Stage(StrEnum):
    """Stage of the files of a start command."""

    ABSENT = "absent"
    STORING = "storing"
    STORED = "stored"
    REFUSED = "refused"


@dataclass(slots=True)
class StagedStart:
    """One start command and the stage of its files."""

    application: ApplicationId
    command: CommandId
    archive: Archive
    position: int
    """Offset on COMMAND as of which it counts."""
    stage: Stage = Stage.ABSENT
    stopped_at: int | None = None
    """Offset of the last stop after it, unless the adopted document names it all the same."""
    keep_data: bool = False
    """True if that stop says to keep its data."""
    given_up: bool = False
    """True if too many later ones were read that no document has decided on either."""
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    reason: str = ""
    reported: bool = False
    """True if the leader knows that the files were refused."""
    dropped: bool = False
    """True if the application's folder was dropped and nothing of this command was stored since."""

    @property
    def stopped(self) -> bool:
        """True if a stop was read that overrides it."""
        return self.stopped_at is not None

    def read_again(self, position: int) -> None:
        """Take in a further copy: refused files are tried again, a stopped command is started anew."""
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

    Files are stored once a document names this worker for their command. They are removed once the command is
    over, or ``keep_s`` seconds after the last document that named this worker for it.

    A document *decides on* a command once its ``consumed`` reaches the command's offset: from then on files
    of the command are needed only if the document says that it is to run.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._started: dict[ApplicationId, dict[CommandId, StagedStart]] = {}
        self._stops: OrderedDict[ApplicationId, _StopRead] = OrderedDict()
        self._decided = -1
        self._to_run: dict[ApplicationId, CommandId] = {}
        self._finished: dict[ApplicationId, CommandId] = {}
        self._mine: dict[ApplicationId, CommandId] = {}
        self._undecided: dict[ApplicationId, None] = {}
        """Applications with commands that were read since the last document, or not decided on by it."""
        self._unpacked: set[ApplicationId] = set()
        """The applications that may have unpacked files on this worker's disk."""
        self._unused: dict[ApplicationId, float] = {}
        """Times since which those files are unused (monotonic seconds), the earliest first."""

    @property
    def applications(self) -> tuple[ApplicationId, ...]:
        """All applications with a command or a stop."""
        return tuple(self._started)

    @property
    def undecided(self) -> tuple[ApplicationId, ...]:
        """Applications on whose commands the next document may decide."""
        return tuple(self._undecided)

    @property
    def next_unused(self) -> float | None:
        """Time (monotonic seconds) at which the next files are unused for long enough; None for none."""
        return next((since + self._keep_s for since in self._unused.values()), None)

    def unused(self, now: float) -> list[ApplicationId]:
        """Return the applications whose files are unused for long enough to be removed."""
        return list(itertools.takewhile(lambda each: self._is_unused(each, now), self._unused))

    def found(self, applications: Iterable[ApplicationId]) -> None:
        """Note that folders of these applications are on the disk from an earlier process."""
        self._unpacked.update(applications)

    def find(self, application: ApplicationId, command: CommandId) -> StagedStart | None:
        """Return the start command, if it was read and may still be acted on."""
        return self._started.get(application, {}).get(command)

    def was_stopped(self, application: ApplicationId) -> bool:
        """True if a stop was read that no document has taken into account yet."""
        return application in self._stops

    def start(self, at: RecordMetadata, record: StartCommand | KeptCommand) -> ApplicationId:
        """Take in a start command; a kept one counts as of the client's record (SH-15)."""
        start = record.start if isinstance(record, KeptCommand) else record
        position = record.original if isinstance(record, KeptCommand) else at.offset
        self._undecided[start.application] = None
        commands = self._started.setdefault(start.application, {})
        known = commands.get(start.command)
        if known is None:
            started = StagedStart(start.application, start.command, start.archive, position)
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

    def stop(self, at: RecordMetadata, application: ApplicationId, keep_data: bool = False) -> None:
        """Take in a stop: earlier start commands are no longer run or stored (SH-5)."""
        self._undecided[application] = None
        before = self._stops.pop(application, None)
        if before is None or before.offset < at.offset:
            before = _StopRead(at.offset, keep_data)
        self._stops[application] = before
        if len(self._stops) > MAX_STOPS:
            forgotten, _ = self._stops.popitem(last=False)
            if forgotten not in self._started:
                self._undecided.pop(forgotten, None)
        for started in self._started.get(application, {}).values():
            if started.position < at.offset:
                started.stopped_at, started.keep_data = at.offset, keep_data

    def decided(
        self,
        consumed: int,
        to_run: Mapping[ApplicationId, CommandId],
        finished: Mapping[ApplicationId, CommandId],
        mine: Mapping[ApplicationId, CommandId],
    ) -> None:
        """Take in the adopted document, which takes COMMAND into account as far as ``consumed``.

        ``mine`` has the commands that it names this worker for.

        A command that it names in spite of a stop that it takes into account is to run on: in place of that
        stop the leader may have found only a later start command, which it refused.

        A finished command keeps its files for a while, and is not stored again: the leader need not keep its
        archive.
        """
        self._to_run, self._finished, self._mine = dict(to_run), dict(finished), dict(mine)
        self._decide(consumed, dict.fromkeys((*self._stops, *to_run)))

    def decided_further(
        self,
        consumed: int,
        changed: Collection[ApplicationId],
        to_run: Mapping[ApplicationId, CommandId],
        finished: Mapping[ApplicationId, CommandId],
        mine: Mapping[ApplicationId, CommandId],
    ) -> tuple[ApplicationId, ...]:
        """Take in a document in which only these applications have changed; return those that it may concern.

        The mappings have, of these applications, what ``decided`` gets of all.
        """
        concerned = tuple(dict.fromkeys((*self._undecided, *changed)))
        for application in changed:
            for known, now in ((self._to_run, to_run), (self._finished, finished), (self._mine, mine)):
                if application in now:
                    known[application] = now[application]
                else:
                    known.pop(application, None)
        self._decide(consumed, concerned)
        return concerned

    def _decide(self, consumed: int, applications: Iterable[ApplicationId]) -> None:
        self._decided = max(self._decided, consumed)
        for application in applications:
            stop = self._stops.get(application)
            if stop is not None and stop.offset <= self._decided:
                del self._stops[application]
            command = self._to_run.get(application)
            started = self.find(application, command) if command is not None else None
            if started is not None and started.stopped_at is not None and started.stopped_at <= consumed:
                started.stopped_at = None
        self._undecided = {each: None for each in self._undecided if self._awaits(each)}

    def _awaits(self, application: ApplicationId) -> bool:
        """True if a command of it was read that no document has decided on."""
        stop = self._stops.get(application)
        return (stop is not None and stop.offset > self._decided) or any(
            max(started.position, started.stopped_at or -1) > self._decided
            for started in self._started.get(application, {}).values()
        )

    def stored(self, application: ApplicationId, command: CommandId, policy: RestartPolicy) -> bool:
        """Note that its files are on disk; True if they were requested."""
        started = self._answered(application, command, Stage.STORED)
        if started is not None:
            started.policy = policy
        return started is not None

    def refused(self, application: ApplicationId, command: CommandId, reason: str) -> bool:
        """Note that its files cannot be used; True if they were requested."""
        started = self._answered(application, command, Stage.REFUSED)
        if started is not None:
            started.reason = reason
        return started is not None

    def retry(self, application: ApplicationId, command: CommandId) -> bool:
        """Forget that files of the command were refused; True if they were."""
        started = self.find(application, command)
        if started is None or started.stage is not Stage.REFUSED:
            return False
        started.stage, started.reported = Stage.ABSENT, False
        return True

    def _answered(self, application: ApplicationId, command: CommandId, stage: Stage) -> StagedStart | None:
        started = self.find(application, command)
        if started is None or started.stage is not Stage.STORING:
            return None
        started.stage = stage
        return started

    def settle(
        self, applications: Iterable[ApplicationId], in_use: Mapping[ApplicationId, CommandId], now: float
    ) -> list[FilesEffect]:
        """Return what to store and drop now, in the order of the log; ``in_use`` has the running commands.

        A command keeps its files until a document has decided on the later ones, as these may be refused.
        Files that are being stored are dropped once that has been answered, so at most one request for a
        command's files is under way.
        """
        effects: list[tuple[int, FilesEffect]] = []
        for application in applications:
            commands = self._started.get(application, {})
            for started in list(commands.values()):
                effect = self._settled(started, in_use.get(application), now)
                if effect is not None:
                    effects.append((started.position, effect))
                if started.stage is Stage.ABSENT and self._is_over(started) and not self._is_kept(started):
                    del commands[started.command]
            if not commands:
                self._started.pop(application, None)
                self._unpacked.discard(application)
            self._note_use(application, in_use, now)
        return [effect for _, effect in sorted(effects, key=lambda pair: pair[0])]

    def _settled(self, started: StagedStart, in_use: CommandId | None, now: float) -> FilesEffect | None:
        application, command = started.application, started.command
        if started.stage is Stage.ABSENT and self._is_mine(started) and not started.stopped:
            started.stage, started.dropped = Stage.STORING, False
            self._unpacked.add(application)
            return StoreFiles(application, command, started.archive)
        if started.stage is Stage.STORING or command == in_use:
            return None
        if started.stopped or (self._is_over(started) and not self._is_kept(started)):
            return self._dropped(started)
        here = started.stage is Stage.STORED or application in self._unpacked
        if here and in_use is None and self._is_unused(application, now):
            started.stage = Stage.ABSENT
            self._unpacked.discard(application)
            return DropFiles(application, command, stays=True)
        return None

    def _dropped(self, started: StagedStart) -> DropFiles | None:
        """Drop the files of a command that is over, and the whole folder with the last one.

        The folder is dropped in any case, as it may hold data of an earlier process of this worker.
        """
        application, was = started.application, started.stage
        started.stage = Stage.ABSENT
        others = [each for each in self._started[application].values() if each is not started]
        if was is Stage.ABSENT and (others or started.dropped):
            return None
        started.dropped = True
        stays = not started.stopped and any(not self._is_over(o) or self._is_kept(o) for o in others)
        if all(other.stage is Stage.ABSENT for other in others):
            self._unpacked.discard(application)
        return DropFiles(
            application, started.command, started.keep_data if started.stopped else None, stays=stays
        )

    def _note_use(
        self, application: ApplicationId, in_use: Mapping[ApplicationId, CommandId], now: float
    ) -> None:
        """Note since when the files of an application are unused (SH-4)."""
        if application not in self._unpacked or application in self._mine or application in in_use:
            self._unused.pop(application, None)
        else:
            self._unused.setdefault(application, now)

    def _is_unused(self, application: ApplicationId, now: float) -> bool:
        since = self._unused.get(application)
        return since is not None and application not in self._mine and now >= since + self._keep_s

    def _is_mine(self, started: StagedStart) -> bool:
        """True if the adopted document names this worker for the command (SH-4)."""
        return self._mine.get(started.application) == started.command

    def _is_kept(self, started: StagedStart) -> bool:
        """True if it is to run, here or elsewhere, or has finished."""
        return self._is_to_run(started) or self._finished.get(started.application) == started.command

    def _is_to_run(self, started: StagedStart) -> bool:
        return self._to_run.get(started.application) == started.command

    def _is_over(self, started: StagedStart) -> bool:
        """True if it runs only if a document names it."""
        return started.stopped or started.given_up or started.position <= self._decided


def _position(started: StagedStart) -> int:
    return started.position
