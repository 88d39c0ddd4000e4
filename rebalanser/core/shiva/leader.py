"""The leader: events in, effects out. The theory of operation is in ``rebalanser.core.shiva``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, TypeAlias, assert_never

from rebalanser.core.shiva.assignments import (
    MAX_CORDONS,
    MAX_NAMED,
    MAX_REASON_CHARS,
    AssignmentTable,
    Retries,
)
from rebalanser.core.shiva.changes import DocumentChain
from rebalanser.core.shiva.command_log import RetainedRecords
from rebalanser.core.shiva.membership import Members, PongMeaning
from rebalanser.core.shiva.messages import (
    CaughtUp,
    ChangeRead,
    Deposed,
    DocumentPassed,
    DocumentRead,
    Fact,
    FactKind,
    Kept,
    LeaderEffect,
    LeaderEvent,
    LeaderRead,
    PartRead,
    PongRead,
    PublishDocument,
    Published,
    RecordMetadata,
    RecordRead,
    Report,
    ScaleRead,
    SendPing,
    StartRead,
    StepDown,
    Stop,
    StopRead,
    TookOver,
    Unreadable,
    Wakeup,
    WorkerCommandRead,
)
from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.publishing import Publisher
from rebalanser.core.shiva.records import (
    AssignmentDocument,
    DocumentChange,
    KeptCommand,
    Ping,
    Pong,
    StartCommand,
    StopCommand,
)
from rebalanser.core.shiva.replay import OrderedCommand, Replay, commanded
from rebalanser.core.shiva.republish import Republisher
from rebalanser.core.shiva.safeguards import Safeguards
from rebalanser.core.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationState,
    Archive,
    Epoch,
    LeaderId,
    SetAside,
    WorkerId,
)
from rebalanser.errors import InternalError

Detail: TypeAlias = str | int | float | bool | None
_NOTHING_READ: Final = -1
_CONTROL_KEYS: Final = ("ping", "pong:")
_ASKED_TO_STOP: Final = "asked to stop"


def _is_of_control(record: SetAside) -> bool:
    return record.offset == _NOTHING_READ or record.key.startswith(_CONTROL_KEYS)


class Leader:
    """One term of one leader, from its take-over until it steps down.

    Args:
        leader: the leader's name.
        options: its settings.
        guards: its safety decisions; only a test of the tests passes others.

    Raises:
        InvalidSettings: the options contradict each other.
    """

    def __init__(
        self,
        leader: LeaderId,
        options: LeaderOptions,
        guards: Safeguards | None = None,
    ) -> None:
        options.check()
        self._leader = leader
        self._options = options
        self._guards = guards or Safeguards()
        self._members = Members(self._guards, options.missed_rounds)
        self._retries = Retries(options.retry_initial_s, options.retry_max_s)
        self._assignments = AssignmentTable(self._members, self._guards, self._retries)
        self._retained = RetainedRecords(options)
        self._republisher = Republisher(self._assignments, self._retained, options)
        self._replay = Replay(self._guards)
        self._unread: list[SetAside] = []
        self._worker_commands: dict[WorkerId, WorkerCommandRead] = {}
        self._scale_commands: dict[ApplicationId, ScaleRead] = {}
        self._term = _NOTHING_READ
        self._took_over_at = 0.0
        self._announced = _NOTHING_READ
        self._version = 0
        self._assignement_lost = True
        self._document_missing = False
        self._chain = DocumentChain()
        """The documents on COMMAND, as read so far."""
        self._inherited_s = 0.0
        self._caught_up = False
        self._done = False
        self._consumed = _NOTHING_READ
        self._publisher = Publisher(options)
        self._set_aside: dict[SetAside, float] = {}
        """Records set aside, each with the time (monotonic seconds) at which it was last reported."""
        self._set_aside_changed = False
        self._required: Epoch | None = None
        self._whole_for_stalled_at = -math.inf
        self._early_pongs: dict[tuple[WorkerId, str], tuple[Pong, float]] = {}
        self._stopping = False
        self._last_word_said = False
        self._round = 0
        self._ping_at = 0.0
        self._pinged_at = 0.0
        self._answer_at: float | None = None
        self._may_drop = False
        self._now = 0.0
        self._effects: list[LeaderEffect] = []

    @property
    def document(self) -> AssignmentDocument | None:
        """Last document that is known to be published; None before the first."""
        return self._publisher.document

    @property
    def leads(self) -> bool:
        """True if it has caught up with COMMAND and has not stepped down."""
        return self._caught_up and not self._done

    @property
    def next_wakeup(self) -> float | None:
        """Time (monotonic seconds) by which it needs a ``Wakeup``; None for never."""
        if not self.leads or self._stopping:
            return None
        times = [self._ping_at, self._answer_at, self._publish_at, self._deadline_falls_at]
        times += [self._assignments.next_gone(self._now, self._deadline_s), self._retries.next_at]
        times += [self._assignments.next_grace_end]
        return min(at for at in times if at is not None)

    def handle(self, event: LeaderEvent, now: float, wall_ms: int) -> list[LeaderEffect]:
        """Take in one event; return what to do, in order.

        Args:
            event: what happened.
            now: monotonic seconds; it never goes back.
            wall_ms: the time of day by Kafka's clock; for the age of records only.

        Raises:
            InternalError: the event cannot come now: the ordering contract is broken.
        """
        if self._done:
            return []
        self._now = self._retries.now = now
        self._effects = []
        self._take_in(event)
        if self.leads:
            self._go_on(wall_ms)
        effects, self._effects = self._effects, []
        return effects

    def _take_in(self, event: LeaderEvent) -> None:
        match event:
            case TookOver():
                self._take_over(event)
            case CaughtUp():
                self._catch_up()
            case PongRead(record):
                self._pong_came(record)
            case Published() | Kept():
                self._answered(event)
            case Deposed(reason):
                self._step_down(reason)
            case Stop():
                self._stopping = True
                if not self._caught_up:
                    self._step_down(_ASKED_TO_STOP)
            case Wakeup():
                pass
            case _:
                self._record_read(event)

    def _require_term(self) -> None:
        if self._term == _NOTHING_READ:
            raise InternalError("COMMAND was read before TookOver")

    def _answered(self, event: Published | Kept) -> None:
        match event:
            case Published(offset):
                self._published(offset)
            case Kept(at):
                self._kept(at)
            case _:
                assert_never(event)

    def _report(
        self,
        kind: FactKind,
        application: ApplicationId | None = None,
        worker: WorkerId = "",
        *,
        revision: int | None = None,
        **detail: Detail,
    ) -> None:
        fact = Fact(
            kind,
            application,
            worker,
            max(0, self._term),
            self._version,
            revision=revision,
            detail=MappingProxyType(detail),
        )
        self._effects.append(Report(fact))

    def _step_down(self, reason: str) -> None:
        self._done = True
        self._report(FactKind.STEPPED_DOWN, term=self._term, reason=reason)
        self._effects.append(StepDown(reason))

    def _give_way_to(self, term: int) -> None:
        if not self._done and self._guards.is_overtaken(self._term, term):
            self._step_down(f"another leader took over with term {term}, this one has {self._term}")

    def _take_over(self, event: TookOver) -> None:
        if self._term != _NOTHING_READ:
            raise InternalError(f"TookOver came twice: terms {self._term} and {event.term}")
        self._term = event.term
        self._took_over_at = self._now
        self._assignments.next = Epoch(self._term, 1)
        self._report(FactKind.TOOK_OVER, revision=self._term, term=self._term)
        self._document_missing = event.document_missing
        if event.document is not None:
            self._give_way_to(event.document.epoch.term)
            self._publisher.document = event.document
            self._assignement_lost = False
        for pong in event.pongs:
            if self._guards.tells_of_the_end(pong):
                self._pong_came(pong)
        if self._guards.may_publish(caught_up=False):
            self._catch_up()

    def _record_read(self, event: RecordRead) -> None:
        self._require_term()
        if isinstance(event, Unreadable) and event.on_control:
            # The offset distinguishes it from a record of COMMAND with the same key.
            offset = event.at.offset if event.key.startswith(_CONTROL_KEYS) else _NOTHING_READ
            self._put_aside(SetAside(offset, event.key, event.reason[:MAX_REASON_CHARS]))
            return
        self._consumed = max(self._consumed, event.at.offset)
        self._retained.read(event.at)
        match event:
            case StartRead() | StopRead():
                self._command_read(event)
            case ScaleRead() | WorkerCommandRead():
                self._setting_read(event)
            case DocumentRead(at, record) | ChangeRead(at, record):
                self._give_way_to(record.epoch.term)
                if not self._caught_up and at.offset < self._term:
                    self._go_on_from(record)
            case LeaderRead(at):
                self._announced = max(self._announced, at.offset)
                self._give_way_to(at.offset)
            case DocumentPassed():
                pass
            case PartRead():
                self._retained.part_read(event, self._now)
            case Unreadable():
                self._unreadable(event)
            case _:
                assert_never(event)

    def _unreadable(self, event: Unreadable) -> None:
        record = SetAside(event.at.offset, event.key, event.reason[:MAX_REASON_CHARS])
        if self._caught_up:
            self._put_aside(record)
        else:
            self._unread = [*self._unread, record][-max(1, self._options.max_set_aside) :]

    def _go_on_from(self, record: AssignmentDocument | DocumentChange) -> None:
        """Take the last document from COMMAND if ASSIGNEMENT has lost it; late ones do not count."""
        if self._assignement_lost and record.epoch.term >= self._announced and self._chain.read(record):
            self._publisher.document = self._chain.document

    def _command_read(self, event: StartRead | StopRead) -> None:
        command = commanded(event)
        if isinstance(command.record, StartCommand):
            self._retained.start_read(command.record, command.at, command.order)
        if isinstance(event.record, KeptCommand):
            self._retained.copied(command.record.application, command.record.command, command.at.offset)
        if not self._caught_up:
            self._replay.read(command)
        elif isinstance(event.record, KeptCommand):
            self._note_copy(event.record.start, command)
        else:
            if isinstance(command.record, StopCommand):
                self._publisher.commanded(event.at.offset, self._now)
            self._follow(command)
            self._forget_other_starts(command.record.application)

    def _setting_read(self, event: ScaleRead | WorkerCommandRead) -> None:
        match event:
            case ScaleRead():
                self._scale_command_read(event)
            case WorkerCommandRead():
                self._worker_command_read(event)
            case _:
                assert_never(event)

    def _scale_command_read(self, event: ScaleRead) -> None:
        """Take in a command about the number of replicas of an application: the last one counts (SH-28)."""
        application, replicas, offset = event.record.application, event.record.replicas, event.at.offset
        if not self._caught_up:
            self._scale_commands[application] = event
            return
        self._publisher.commanded(offset, self._now)
        self._forget_earlier_set_aside(f"scale:{application}", offset)
        entry = self._assignments.entries.get(application)
        if entry is None or entry.state in {ApplicationState.STOPPING, ApplicationState.REFUSED}:
            reason = f"{application} is not to run: start it first"
            self._put_aside(SetAside(offset, f"scale:{application}", reason))
        elif not self._guards.follows_start(offset, self._retained.original(application, entry)):
            pass
        elif why_not := self._why_not_scale(application, entry, replicas):
            self._put_aside(SetAside(offset, f"scale:{application}", why_not))
        else:
            self._assignments.scale(application, replicas)
            self._report(
                FactKind.SCALE_COMMANDED,
                application,
                revision=offset,
                command=event.record.command,
                replicas=replicas,
            )

    def _worker_command_read(self, event: WorkerCommandRead) -> None:
        """Take in a command about a worker: the last one counts (SH-26)."""
        worker, cordon = event.record.worker, event.record.cordon
        if not self._caught_up:
            self._worker_commands[worker] = event
            return
        self._publisher.commanded(event.at.offset, self._now)
        self._forget_earlier_set_aside(f"worker:{worker}", event.at.offset)
        if not self._assignments.has_room_for(worker, cordon):
            reason = f"{MAX_CORDONS} workers are cordoned: uncordon those that are no more"
            self._put_aside(SetAside(event.at.offset, f"worker:{worker}", reason))
        elif self._assignments.cordons.get(worker) is not cordon:
            self._assignments.cordon(worker, cordon)
            self._report(
                FactKind.WORKER_UNCORDONED if cordon is None else FactKind.WORKER_CORDONED,
                worker=worker,
                revision=event.at.offset,
                command=event.record.command,
                cordon=cordon,
            )

    def _forget_other_starts(self, application: ApplicationId) -> None:
        entry = self._assignments.entries.get(application)
        self._retained.follow(application, entry.command if entry else None)

    def _note_copy(self, start: StartCommand, command: OrderedCommand) -> bool:
        """Note the offset of a start command that the document has already; False for another one."""
        entry = self._assignments.entries.get(start.application)
        if entry is None or entry.command != start.command:
            return False
        self._assignments.recall_requests(start)
        if command.at.offset > entry.offset:
            self._assignments.note_offset(start.application, command.at.offset, command.at.timestamp_ms)
        return True

    def _catch_up(self) -> None:
        """Go on from the predecessor's document, and follow the commands since then (SH-9)."""
        self._require_term()
        if self._caught_up:
            return
        nowhere = self._document_missing and self._chain.document is None
        if self._assignement_lost and (self._chain.missed or nowhere):
            self._step_down("changes of the last document are missing: where applications run is not known")
            return
        self._caught_up = True
        base = self.document
        self._assignments.issued = base.epoch if base else Epoch(self._term, 0)
        consumed = base.consumed if base else _NOTHING_READ
        if base is not None:
            self._members.take_over(base.workers, self._took_over_at)
            self._assignments.take_over(base, self._took_over_at + self._options.away_grace_s)
            self._inherited_s = base.deadline_s
            self._set_aside = dict.fromkeys(base.set_aside, self._now)
        for record in self._unread:
            if not self._guards.is_reflected(record.offset, consumed):
                self._put_aside(record)
        self._follow_replay(consumed)
        self._assignments.clear_gone(self._now, self._deadline_s)
        self._ping_at = self._now
        self._publisher.changed(self._now - self._options.settle_time_s)
        pongs, self._early_pongs = self._early_pongs, {}
        for pong, at in pongs.values():
            self._pong_read(pong, at)

    def _follow_replay(self, consumed: int) -> None:
        for application, history in self._replay.histories.items():
            entry = self._assignments.entries.get(application)
            start = history.starts.get(entry.command) if entry else None
            if start is not None and isinstance(start.record, StartCommand):
                self._note_copy(start.record, start)
        for due in self._replay.after(consumed):
            if due.stop is not None:
                self._follow(due.stop)
            any(self._follow(start) for start in due.starts)
        for application in self._replay.histories:
            self._forget_other_starts(application)
        commands, self._worker_commands = self._worker_commands, {}
        for event in commands.values():
            if not self._guards.is_reflected(event.at.offset, consumed):
                self._worker_command_read(event)
        scales, self._scale_commands = self._scale_commands, {}
        for scale in scales.values():
            known = scale.record.application in self._assignments.entries
            if known and not self._guards.is_reflected(scale.at.offset, consumed):
                self._scale_command_read(scale)
        self._replay = Replay(self._guards)
        self._unread = []

    def _follow(self, command: OrderedCommand) -> bool:
        """Carry out a client's command; False if it is refused."""
        for kind in ("cmd", "scale"):
            self._forget_earlier_set_aside(f"{kind}:{command.record.application}", command.at.offset)
        match command.record:
            case StartCommand() as start:
                return self._start(start, command)
            case StopCommand() as stop:
                self._stop(stop, command.at.offset)
                return True
            case _:
                assert_never(command.record)

    def _start(self, start: StartCommand, command: OrderedCommand) -> bool:
        application = start.application
        entry = self._assignments.entries.get(application)
        stopping = entry is not None and entry.state is ApplicationState.STOPPING
        if not stopping and self._note_copy(start, command):
            if self._assignments.needing(application) is not None:
                self._assignments.scale(application, start.replicas)  # as a replay of the log has it
            return True
        why_not = self._why_no_replicas(start.replicas) or self._why_not(application, start.archive)
        if why_not:
            self._refuse(start, command, entry, why_not)
            return False
        self._assignments.start(start, command.at.offset, command.at.timestamp_ms)
        offset = command.at.offset
        self._report(
            FactKind.START_COMMANDED, application, revision=offset, command=start.command, offset=offset
        )
        return True

    def _why_not_scale(self, application: ApplicationId, entry: ApplicationEntry, replicas: int) -> str:
        """Return why an application cannot have another number of replicas; empty if it can."""
        if self._assignments.begins_anew(application, replicas):
            return self._why_no_replicas(replicas) or self._why_not(application, entry.archive)
        return self._why_no_replicas(replicas) if replicas > entry.replicas else ""

    def _why_no_replicas(self, replicas: int) -> str:
        """Return which workers would not follow a document with replicas; empty if all would (SH-28).

        They would count as gone after ``stalled_s`` and run on what is available.
        """
        without = self._members.without_replicas
        if replicas == 1 or not without:
            return ""
        return (
            f"{', '.join(without[:MAX_NAMED])} {'is' if len(without) == 1 else 'are'} of a version without "
            "replicas: upgrade all workers first"
        )

    def _why_not(self, application: ApplicationId, archive: Archive) -> str:
        """Return why an application cannot be started with this archive; empty if it can (SH-15)."""
        missing = self._retained.missing(application, archive)
        if missing:
            return missing
        needing = self._assignments.needing(application)
        replaced = needing.archive.size_bytes if needing is not None else 0
        others = self._assignments.needed_bytes - replaced
        budget = self._options.budget_bytes
        if self._guards.fits(others + archive.size_bytes, budget):
            return ""
        return (
            f"its archive of {archive.size_bytes} bytes and the {others} bytes of the other "
            f"applications are more than the budget of {budget} bytes ({self._options.budget_ratio:.0%} of "
            f"COMMAND's retention of {self._options.retention_bytes} bytes)"
        )

    def _refuse(
        self, start: StartCommand, command: OrderedCommand, entry: ApplicationEntry | None, reason: str
    ) -> None:
        """Let what ran before run on; its start command is no longer the last under its key (SH-15)."""
        application, at = start.application, command.at
        self._report(
            FactKind.COMMAND_REFUSED, application, revision=at.offset, command=start.command, reason=reason
        )
        self._put_aside(SetAside(at.offset, f"cmd:{application}", reason))
        if self._assignments.needing(application) is not None:
            self._republisher.keep(application)
        refused_later = (
            entry is not None and entry.state is ApplicationState.REFUSED and entry.offset > at.offset
        )
        gone = entry is None or entry.state in {ApplicationState.STOPPING, ApplicationState.REFUSED}
        if gone and not refused_later:
            if self._members.without_replicas:
                start = replace(start, replicas=1)  # or the document would be one that they do not follow
            self._assignments.refuse(start, at.offset, at.timestamp_ms, reason)

    def _stop(self, stop: StopCommand, offset: int) -> None:
        application = stop.application
        self._report(FactKind.STOP_COMMANDED, application, revision=offset, command=stop.command)
        self._assignments.stop(application)

    def _put_aside(self, record: SetAside) -> None:
        """Show a record that was not carried out; each source's complaint is shown once (SH-16)."""
        periodic = _is_of_control(record)
        for known in self._set_aside:
            same = known.reason == record.reason if periodic else known.offset == record.offset
            if same and known.key == record.key:
                self._set_aside[known] = self._now
                return
        self._report(
            FactKind.RECORD_SET_ASIDE,
            revision=None if periodic else record.offset,
            offset=record.offset,
            key=record.key,
            reason=record.reason,
        )
        self._set_aside[record] = self._now
        surplus = max(0, len(self._set_aside) - max(0, self._options.max_set_aside))
        self._forget_set_aside(itertools.islice(self._set_aside, surplus))
        self._set_aside_changed = True

    def _forget_earlier_set_aside(self, key: str, offset: int) -> None:
        """Remove records set aside that a later command, at this offset, makes irrelevant (SH-20)."""
        self._forget_set_aside(
            aside for aside in self._set_aside if aside.key == key and aside.offset < offset
        )

    def _forget_set_aside(self, records: Iterable[SetAside]) -> None:
        for record in list(records):
            del self._set_aside[record]
            self._set_aside_changed = True

    def _forget_old_set_aside(self) -> None:
        """Remove records set aside that no longer matter (SH-20).

        A complaint that each round repeats, as about a worker's pongs, stays until it stops.
        """
        self._forget_set_aside(
            record
            for record, at in self._set_aside.items()
            if self._now - at
            > (self._options.permission_s if _is_of_control(record) else self._options.set_aside_s)
        )

    def _pong_came(self, pong: Pong) -> None:
        if self._caught_up:
            self._pong_read(pong, self._now)
        else:
            behind = pong.worker, pong.incarnation.lineage
            self._early_pongs.pop(behind, None)
            self._early_pongs[behind] = (pong, self._now)

    def _pong_read(self, pong: Pong, at: float) -> None:
        verdict = self._members.judge(pong)
        if verdict is PongMeaning.STALLED:
            self._help_stalled()
        if verdict in {PongMeaning.STALE, PongMeaning.STALLED}:
            return
        if verdict is PongMeaning.REFUSED:
            self._refuse_worker(pong)
            self._assignments.clear_stopped(pong)
            return
        if verdict is PongMeaning.LEFT:
            self._worker_left(pong, at)
            return
        if not self._members.is_answered(pong):
            self._answer_soon()
        self._members.hear(pong, at)
        if verdict is not PongMeaning.HEARD:
            self._assignments.returned(pong.worker)
        if verdict in {PongMeaning.ADDED, PongMeaning.SUCCEEDED}:
            self._worker_added(pong, verdict)
        self._assignments.reported(pong)
        self._assignments.clear_stopped(pong)

    def _refuse_worker(self, pong: Pong) -> None:
        known = self._members.incarnation(pong.worker)
        if known is None:
            return
        reason = (
            f"another worker with the data folder {pong.incarnation.lineage} on {pong.host or 'some host'} "
            f"answers to this id, which the one with the folder {known.lineage} has"
        )[:MAX_REASON_CHARS]
        if self._members.refuse(pong):
            self._report(FactKind.WORKER_REFUSED, worker=pong.worker, host=pong.host, reason=reason)
        self._put_aside(SetAside(_NOTHING_READ, f"pong:{pong.worker}", reason))

    def _worker_left(self, pong: Pong, at: float) -> None:
        self._members.hear(pong, at)
        self._assignments.reported(pong)
        if pong.worker in self._members.entries:
            self._remove(pong.worker, "it left")
        self._assignments.clear_ended(pong.worker, pong.incarnation, left=True)

    def _worker_added(self, pong: Pong, verdict: PongMeaning) -> None:
        self._assignments.clear_ended(pong.worker, pong.incarnation, left=False)
        if verdict is PongMeaning.ADDED:
            self._assignments.offer_back(pong.worker, pong.incarnation)
        else:
            self._assignments.begin_again(pong.worker)
        self._report(
            FactKind.WORKER_ADDED,
            worker=pong.worker,
            host=pong.host,
            lineage=pong.incarnation.lineage,
            incarnation=pong.incarnation.number,
        )

    def _answer_soon(self) -> None:
        """Answer a worker that is heard for the first time before the next round (SH-14).

        Until then it may start nothing exclusive, and may even have to stop it: the permission of an earlier
        leader ends.
        """
        if self._answer_at is None:
            answer_at = self._pinged_at + self._options.min_publish_interval_s
            self._answer_at = max(answer_at, self._now + self._options.settle_time_s)

    def _remove(self, worker: WorkerId, reason: str, *, stalled: bool = False) -> None:
        self._assignments.vacate(worker, 0.0 if stalled else self._options.away_grace_s, self._now)
        if stalled:
            self._members.remove_stalled(worker, self._assignments.next)
        else:
            self._members.remove(worker)
        self._assignments.clear_gone(self._now, self._deadline_s)
        self._report(FactKind.WORKER_REMOVED, worker=worker, reason=reason)

    @property
    def _deadline_s(self) -> float:
        """Longest time, in seconds, for which workers may run on permissions that they can have (SH-14)."""
        own_s = self._options.permission_s
        if self._now >= self._took_over_at + self._inherited_s:
            return own_s
        return self._guards.longest_deadline(own_s, self._inherited_s)

    @property
    def _deadline_falls_at(self) -> float | None:
        """Time at which the longer permissions of a predecessor have all ended; None once they have."""
        at = self._took_over_at + self._inherited_s
        return at if self._inherited_s > self._options.permission_s and at > self._now else None

    def _go_on(self, wall_ms: int) -> None:
        """Do what is due after any event."""
        self._assignments.clear_gone(self._now, self._deadline_s, overdue=True)
        self._assignments.retry_failed()
        self._assignments.end_grace(self._now)
        self._note_changes()
        if self._stopping:
            self._take_leave()
            return
        self._publish_if_due()
        round_begins = self._now >= self._ping_at
        if round_begins:
            self._begin_round()
            self._note_changes()
        elif self._answer_at is not None and self._now >= self._answer_at:
            self._ping()
        if round_begins or self._retained.look_due:
            self._republisher.look(wall_ms)
        if batch := self._republisher.batch():
            self._effects.append(batch)
        if round_begins or self._may_drop:
            self._drop(archives_too=round_begins)

    def _note_changes(self) -> None:
        newest = self._publisher.newest
        falls = newest is not None and newest.deadline_s != self._deadline_s
        if self._assignments.changed or self._members.changed or self._set_aside_changed or falls:
            self._assignments.changed = self._members.changed = self._set_aside_changed = False
            self._publisher.changed(self._now)

    @property
    def _publish_at(self) -> float | None:
        return self._publisher.due_at(len(self._assignments.entries))

    def _publish_if_due(self) -> None:
        at = self._publish_at
        if at is not None and self._now >= at:
            self._publish()

    def _take_leave(self) -> None:
        """Publish what no document has yet, then step down (SH-22)."""
        if self._publisher.under_way is None and not self._last_word_said:
            self._last_word_said = True
            self._publish()
        if self._publisher.under_way is None:
            self._step_down(_ASKED_TO_STOP)

    def _publish(self) -> None:
        self._assignments.settle()
        self._note_changes()
        document = self._composed()
        if not self._publisher.issue(document, self._now):
            return
        self._assignments.issued = document.epoch
        self._assignments.next = replace(document.epoch, number=document.epoch.number + 1)
        change = self._publisher.change_under_way(self._now, self._members.all_read_changes)
        self._effects.append(PublishDocument(document, change))

    def _composed(self) -> AssignmentDocument:
        return AssignmentDocument(
            epoch=self._assignments.next,
            leader=self._leader,
            consumed=self._consumed,
            deadline_s=self._deadline_s,
            workers=MappingProxyType(dict(self._members.entries)),
            applications=MappingProxyType(dict(self._assignments.entries)),
            set_aside=tuple(self._set_aside),
            round_s=self._options.round_s,
            cordons=MappingProxyType(dict(self._assignments.cordons)),
            reads_changes=True,
        )

    def _published(self, offset: int) -> None:
        document = self._publisher.published()
        self._may_drop = True
        self._version = offset
        self._report(
            FactKind.DOCUMENT_PUBLISHED,
            revision=offset,
            epoch=str(document.epoch),
            offset=offset,
            workers=len(document.workers),
            applications=len(document.applications),
        )

    def _begin_round(self) -> None:
        overslept = self._round > 0 and self._now > self._ping_at + self._options.round_s / 2
        for worker in self._members.begin_round(overslept):
            missed = self._options.missed_rounds
            self._remove(worker, "silent for a full round" if missed == 1 else f"silent for {missed} rounds")
        self._remove_stalled(overslept)
        self._members.forget(self._now - 2 * self._deadline_s, self._assignments.waited_for)
        self._forget_old_set_aside()
        self._round += 1
        begun_at = self._now if overslept or self._round == 1 else self._ping_at
        self._ping_at = begun_at + self._options.round_s
        self._ping()

    def _remove_stalled(self, overslept: bool) -> None:
        """Warn of workers that answer but do not follow, and remove those that have stalled for too long.

        They must follow what was published before the last round began. A worker may also lack the whole
        document that was published for it. So another one follows in each round until the worker is removed,
        and the document that removes it is whole.
        """
        found = self._members.find_behind(self._required, self._now, overslept)
        if found or self._members.stand_still(self._now):
            self._publisher.want_whole(self._now)
        for worker in found:
            seen, required = self._members.seen(worker), self._required
            self._report(
                FactKind.WORKER_STALLED, worker=worker, seen=str(seen or "none"), published=str(required)
            )
        for worker in self._members.stalled(self._now, self._options.stalled_s):
            self._remove(
                worker,
                f"it answers and has followed no assignment for {self._options.stalled_s:g} s",
                stalled=True,
            )
            self._publisher.next_is_whole()
        self._required = self.document.epoch if self.document is not None else None

    def _help_stalled(self) -> None:
        """Publish a whole document each ``stalled_s`` for a removed worker that lacks the last one."""
        if self._now >= self._whole_for_stalled_at + self._options.stalled_s:
            self._whole_for_stalled_at = self._now
            self._publisher.want_whole(self._now)

    def _ping(self) -> None:
        self._answer_at = None
        self._pinged_at = self._now
        deadline_s = self._options.permission_s
        published = Epoch(_NOTHING_READ, 0)
        if self.document is not None:
            deadline_s = min(deadline_s, self.document.deadline_s)
            published = self.document.epoch
        epoch = self._guards.permitted_by(published, self._assignments.issued)
        heard = MappingProxyType(self._members.heard)
        self._effects.append(SendPing(Ping(self._term, self._leader, self._round, epoch, deadline_s, heard)))

    def _kept(self, at: Mapping[ApplicationId, RecordMetadata]) -> None:
        self._may_drop = True
        self._report(FactKind.COMMANDS_KEPT, applications=self._republisher.kept(at))

    def _drop(self, *, archives_too: bool) -> None:
        """Drop records that neither the published document nor the next one needs."""
        if not self._publisher.settled:
            return
        self._may_drop = False
        if dropped := self._republisher.dropped(self._now, archives_too=archives_too):
            self._effects.append(dropped)
