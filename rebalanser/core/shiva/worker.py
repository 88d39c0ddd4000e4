"""The worker: events in, effects out. It stores and runs the applications that are assigned to it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias, assert_never

from rebalanser.core.shiva.changes import DocumentChain
from rebalanser.core.shiva.exclusive_lease import ExclusiveLease
from rebalanser.core.shiva.messages import (
    CaughtUp,
    ChangeRead,
    CommandEvent,
    DocumentPassed,
    DocumentRead,
    ExtendDeadline,
    Fact,
    FactKind,
    FilesFound,
    FilesRefused,
    FilesStored,
    Finished,
    HealthChecked,
    LeaderRead,
    PartRead,
    PingRead,
    ProcessExited,
    ProcessStarted,
    RecordMetadata,
    Report,
    ScaleRead,
    SendPong,
    StartProcess,
    StartRead,
    Stop,
    StopProcess,
    StopRead,
    Unreadable,
    Wakeup,
    WorkerCommandRead,
    WorkerEffect,
    WorkerEvent,
)
from rebalanser.core.shiva.records import (
    AssignmentDocument,
    DocumentChange,
    Heard,
    KeptCommand,
    Ping,
    Pong,
    RunReport,
    StartCommand,
)
from rebalanser.core.shiva.runs import Run
from rebalanser.core.shiva.states import TO_RUN
from rebalanser.core.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationState,
    CommandId,
    Epoch,
    Incarnation,
    Mode,
    RunState,
    WorkerEntry,
    WorkerId,
)
from rebalanser.core.shiva.worker_files import Stage, StagedStart, WorkerFiles
from rebalanser.core.shiva.worker_options import DEFAULT_WORKER_OPTIONS, WorkerOptions
from rebalanser.errors import InvalidSettings

Concerned: TypeAlias = Collection[ApplicationId] | None
"""The applications concerned; None for all."""
_Commands: TypeAlias = dict[ApplicationId, CommandId]
QUICK_S: Final = 2.0
"""Seconds after which a worker reports that an application waits for its files.

A shorter wait is worth no document.
"""
SPARE_PONGS: Final = 3
"""Pongs of changes in quick succession after a quiet time, before the sustained interval applies."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One application that the adopted document assigns to this worker."""

    command: CommandId
    mode: Mode
    token: int
    """Offset of the first document read that assigned the command to this worker."""


@dataclass(frozen=True, slots=True)
class _Said:
    """Content of a pong, beside its number and its round."""

    seen: Epoch | None
    applications: Mapping[ApplicationId, RunReport]


class Worker:
    """One worker process from its start to its end.

    ``worker`` is its id, ``incarnation`` identifies the process behind that id, and ``host`` is for people.
    Each safety check is a method of its own, all of them at the end.
    """

    def __init__(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        host: str = "",
        options: WorkerOptions = DEFAULT_WORKER_OPTIONS,
    ) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._host = host
        self._options = options
        self._permission = ExclusiveLease()
        self._files = WorkerFiles(options.keep_files_s)
        self._runs: dict[ApplicationId, Run] = {}
        self._together: dict[ApplicationId, dict[ApplicationId, None]] = {}
        """Replicas of each application that have a run (SH-28)."""
        self._assignments: dict[ApplicationId, Assignment] = {}
        self._caught_up = False
        self._stopping = False
        self._finished = False
        self._announced = -1
        self._accepted: tuple[AssignmentDocument, int] | None = None
        self._chain = DocumentChain()
        self._adopted: AssignmentDocument | None = None
        self._version = 0
        self._refused_by: Incarnation | None = None
        self._round = 0
        self._ping_term = -1
        self._silent = False
        self._silent_at: float | None = None
        self._sequence = 0
        self._said: _Said | None = None
        self._pong_due = False
        self._ponged_at = -math.inf
        self._sustained_until = -math.inf
        """Time by which all pongs of changes would have been sent at the sustained interval."""
        self._news_at: float | None = None
        """Time of the next pong that reports changes; None if nothing has changed since the last pong."""
        self._processes = 0
        self._effects: list[WorkerEffect] = []
        self._check_at: float | None = None
        """Time by which all applications must be checked; None for never."""

    @property
    def next_wakeup(self) -> float | None:
        """Time by which the worker needs a ``Wakeup``, if no other event comes before."""
        times = (self._check_at, self._news_at)
        return min((at for at in times if at is not None), default=None)

    @property
    def finished(self) -> bool:
        """True if the worker has stopped for good."""
        return self._finished

    @property
    def caught_up(self) -> bool:
        """True if COMMAND was read to the end that it had at the start (SH-6)."""
        return self._caught_up

    @property
    def knows_assignment(self) -> bool:
        """True if it could rebuild the newest document that was read (SH-24)."""
        return self._accepted is not None and not self._chain.missed

    @property
    def seen(self) -> Epoch | None:
        """Epoch of the document that the worker acts on."""
        return self._adopted.epoch if self._adopted else None

    @property
    def term(self) -> int:
        """Greatest known term of a leader; 0 before any."""
        adopted = self._adopted.epoch.term if self._adopted else 0
        return max(0, self._announced, self._ping_term, adopted)

    @property
    def reports(self) -> Mapping[ApplicationId, RunReport]:
        """Reports of the applications for the next pong."""
        return MappingProxyType({application: run.report for application, run in sorted(self._runs.items())})

    @property
    def processes(self) -> Mapping[ApplicationId, int]:
        """Processes that exist or may exist, by their numbers."""
        return {a: run.process for a, run in self._runs.items() if run.process is not None}

    def handle(self, event: WorkerEvent, now: float) -> list[WorkerEffect]:
        """Take in one event at monotonic time ``now`` (seconds); return what to do, in order.

        Raises:
            InternalError: an invariant is broken; the worker must not be used any more.
        """
        self._effects = []
        if self._finished:
            return self._effects
        concerned = self._concerned_by(event, now)
        self._stop_what_may_not_run(concerned, now)
        self._take_in(event, now)
        if unused := self._files.unused(now):
            self._settle_files(unused, now)
        self._watch_silence(now)
        self._stop_what_may_not_run(concerned, now)
        self._advance(concerned, now)
        self._answer(concerned, now)
        self._check_at = self._earliest_check(concerned, now)
        return self._effects

    def _concerned_by(self, event: WorkerEvent, now: float) -> Concerned:
        """Return the applications that an event can affect; None for all.

        Once ``_check_at`` has come, all are checked: no deadline of an application is earlier. Before that
        time a wakeup is for a pong only.
        """
        if self._check_at is not None and now >= self._check_at:
            return None
        match event:
            case PartRead() | ScaleRead() | WorkerCommandRead() | DocumentPassed() | Unreadable() | Wakeup():
                return ()
            case ChangeRead(record=change) if self._goes_on_with(change):
                return self._concerned_by_change(change)
            case StartRead(record=KeptCommand(start=start)) | StartRead(record=StartCommand() as start):
                return self._replicas(start.application)
            case StopRead(record=stop):
                return self._replicas(stop.application)
            case FilesStored() | FilesRefused() | ProcessStarted() | ProcessExited() | HealthChecked():
                return self._replicas(event.application)
            case _:
                return None

    def _replicas(self, application: ApplicationId) -> tuple[ApplicationId, ...]:
        """Return the replicas of its application that have a run here."""
        return tuple(self._together.get(application.whole, ()))

    def _goes_on_with(self, change: DocumentChange) -> bool:
        """True if the change follows the document acted on, and has the same process behind this id."""
        return (
            self._may_act()
            and self._adopted is not None
            and self._adopted is self._chain.document
            and self._is_newer(change)
            and self._is_of_present_leader(change)
            and self._chain.follows(change)
            and self._follows_at_once(change)
            and self._worker not in change.workers
        )

    def _concerned_by_change(self, change: DocumentChange) -> tuple[ApplicationId, ...]:
        """Return the applications that it changes or may decide on, or that wait for a newer document."""
        waiting = (a for a, run in self._runs.items() if run.exclusive and run.state is RunState.PENDING)
        undecided = (replica for each in self._files.undecided for replica in self._replicas(each))
        return tuple(dict.fromkeys((*undecided, *change.applications, *change.progress, *waiting)))

    def _runs_of(self, concerned: Concerned) -> list[Run]:
        if concerned is None:
            return list(self._runs.values())
        return [self._runs[application] for application in concerned if application in self._runs]

    def _take_in(self, event: WorkerEvent, now: float) -> None:
        match event:
            case PingRead():
                self._ping_read(event.record, now)
            case FilesFound(applications=applications):
                self._files.found(applications)
            case FilesStored() | FilesRefused():
                self._files_answered(event, now)
            case ProcessStarted():
                self._process_started(event, now)
            case HealthChecked():
                self._health_checked(event, now)
            case ProcessExited():
                self._process_exited(event, now)
            case Stop():
                self._stopping = True
            case Wakeup():
                pass
            case _:
                self._read(event, now)

    def _read(self, event: CommandEvent, now: float) -> None:
        match event:
            case StartRead():
                self._settle_files([self._files.start(event.at, event.record)], now)
            case StopRead():
                self._files.stop(event.at, event.record.application, event.record.keep_data)
                self._settle_files([event.record.application], now)
            case DocumentRead():
                self._document_read(event.record, event.at.offset, now)
            case ChangeRead():
                self._change_read(event.record, event.at.offset, now)
            case LeaderRead():
                self._announced = max(self._announced, event.at.offset)
            case Unreadable():
                self._set_aside(event.at, event.key, event.reason)
            case CaughtUp():
                self._has_caught_up(now)
            case PartRead() | ScaleRead() | WorkerCommandRead() | DocumentPassed():
                pass
            case _:
                assert_never(event)

    def _report(
        self,
        kind: FactKind,
        application: ApplicationId | None = None,
        *,
        token: int | None = None,
        revision: int | None = None,
        at: float | None = None,
        **detail: str | float | bool | None,
    ) -> None:
        fact = Fact(
            kind,
            application,
            self._worker,
            self.term,
            self._version,
            token,
            revision,
            at,
            MappingProxyType(detail),
        )
        self._effects.append(Report(fact))

    def exits(self, error: str) -> list[Fact]:
        """Return the exits of all processes, for a driver that has ended them itself."""
        return [
            Fact(
                FactKind.PROCESS_EXITED,
                application,
                self._worker,
                self.term,
                self._version,
                run.token,
                detail={
                    "run": run.process,
                    "code": None,
                    "error": error,
                    "told": run.state is RunState.STOPPING,
                },
            )
            for application, run in sorted(self._runs.items())
            if run.process is not None
        ]

    def _set_aside(self, at: RecordMetadata, key: str, reason: str) -> None:
        self._report(FactKind.RECORD_SET_ASIDE, offset=at.offset, key=key, reason=reason)

    def _document_read(self, document: AssignmentDocument, offset: int, now: float) -> None:
        if not self._is_newer(document):
            self._refuse(document, offset, "a document of a later epoch was read before it")
        elif not self._is_of_present_leader(document):
            self._refuse(document, offset, "a later leader had announced itself before it")
        elif not self._chain.counts(document):
            reason = (
                "its leader is of an earlier version and overlooks the changes that were published before"
            )
            self._refuse(document, offset, reason)
        else:
            self._chain.take(document)
            self._accept(document, offset, now)

    def _change_read(self, change: DocumentChange, offset: int, now: float) -> None:
        """Go on from the changed document; without the base wait for the next whole one (SH-24)."""
        if not self._is_newer(change) or not self._is_of_present_leader(change):
            return
        missed, goes_on = self._chain.missed, self._goes_on_with(change)
        document = self._chain.take_change(change)
        if document is not None and goes_on:
            self._accepted = (document, offset)
            self._adopt_change(change, document, offset, now)
        elif document is not None:
            self._accept(document, offset, now)
        elif not missed and self._accepted is not None:
            self._refuse_change(change, offset)

    def _accept(self, document: AssignmentDocument, offset: int, now: float) -> None:
        self._accepted = (document, offset)
        if self._may_act():
            self._adopt(document, offset, now)

    def _refuse_change(self, change: DocumentChange, offset: int) -> None:
        self._report(
            FactKind.DOCUMENT_REFUSED,
            revision=offset,
            epoch=str(change.epoch),
            offset=offset,
            reason=f"it changes document {change.base}, which was not read; waits for a whole one",
        )

    def _refuse(self, document: AssignmentDocument, offset: int, reason: str) -> None:
        self._report(
            FactKind.DOCUMENT_REFUSED,
            revision=offset,
            epoch=str(document.epoch),
            leader=document.leader,
            offset=offset,
            reason=reason,
        )

    def _has_caught_up(self, now: float) -> None:
        self._caught_up = True
        self._pong_due = True
        if self._accepted is None:
            self._settle_files(self._files.applications, now)
        elif self._adopted is None:
            self._adopt(*self._accepted, now)

    def _adopt(self, document: AssignmentDocument, offset: int, now: float) -> None:
        """Act on this document from now on, and on no other (SH-6)."""
        followed = self._follows_at_once(document)
        self._assignments = self._assigned(document, document.applications, offset, followed)
        self._note_adopted(document, offset, now)
        known = document.applications
        wholes = dict.fromkeys(application.whole for application in known)
        self._files.decided(document.consumed, *self._decisions(document, wholes))
        self._settle_files(self._files.applications, now)

    def _adopt_change(
        self, change: DocumentChange, document: AssignmentDocument, offset: int, now: float
    ) -> None:
        """Do the same with a document of which only a few entries differ from the one acted on."""
        known = document.applications
        changed = tuple(dict.fromkeys((*change.applications, *change.progress)))
        entries = {application: known[application] for application in changed if application in known}
        assigned = self._assigned(document, entries, offset, followed=True)
        for application in changed:
            if application not in assigned:
                self._assignments.pop(application, None)
        self._assignments.update(assigned)
        self._note_adopted(document, offset, now)
        wholes = tuple(dict.fromkeys(application.whole for application in changed))
        concerned = self._files.decided_further(document.consumed, wholes, *self._decisions(document, wholes))
        self._settle_files(concerned, now)

    def _assigned(
        self,
        document: AssignmentDocument,
        entries: Mapping[ApplicationId, ApplicationEntry],
        offset: int,
        followed: bool,
    ) -> dict[ApplicationId, Assignment]:
        """Return the assignments to this worker among these entries of a document."""
        if not self._is_this_incarnation(document.workers.get(self._worker)):
            return {}
        return {
            application: self._assignment(application, entry, offset, followed)
            for application, entry in entries.items()
            if self._names_me(entry)
        }

    def _decisions(
        self, document: AssignmentDocument, applications: Collection[ApplicationId]
    ) -> tuple[_Commands, _Commands, _Commands]:
        """Return, of these applications, the commands to run, those finished, and those for this worker.

        Replicas share their files: a command is to run if it is for one of them.
        """
        to_run: _Commands = {}
        finished: _Commands = {}
        mine: _Commands = {}
        for whole in applications:
            for replica in _replicas_in(document, whole):
                entry = document.applications[replica]
                if entry.state in TO_RUN:
                    to_run[whole] = entry.command
                elif entry.state is ApplicationState.FINISHED:
                    finished[whole] = entry.command
                if replica in self._assignments:
                    mine[whole] = self._assignments[replica].command
        return to_run, finished, mine

    def _note_adopted(self, document: AssignmentDocument, offset: int, now: float) -> None:
        self._adopted, self._version = document, offset
        if self._silent_at is None and not self._silent:
            self._silent_at = now + document.deadline_s
        self._report(
            FactKind.DOCUMENT_ADOPTED,
            revision=offset,
            epoch=str(document.epoch),
            offset=offset,
            applications=len(self._assignments),
        )
        self._notice_another(document.workers.get(self._worker))

    def _assignment(
        self, application: ApplicationId, entry: ApplicationEntry, offset: int, followed: bool
    ) -> Assignment:
        before = self._assignments.get(application)
        if followed and before is not None and before.command == entry.command:
            return before
        return Assignment(entry.command, entry.mode, token=offset)

    def _follows_at_once(self, document: AssignmentDocument | DocumentChange) -> bool:
        """True if there was no document between: compaction drops what a slow reader has not read."""
        before = self.seen
        return before is not None and document.epoch == Epoch(before.term, before.number + 1)

    def _notice_another(self, known: WorkerEntry | None) -> None:
        """Report once that the leader knows another process under this worker's id (SH-3)."""
        if known is None or known.incarnation == self._incarnation:
            self._refused_by = None
        elif not self._incarnation.succeeds(known.incarnation) and known.incarnation != self._refused_by:
            self._refused_by = known.incarnation
            self._report(
                FactKind.WORKER_REFUSED,
                reason="the leader knows another process, with a data folder of its own, under this id",
                host=known.host,
            )

    def _ping_read(self, ping: Ping, now: float) -> None:
        if not self._is_of_present_term(ping):
            return
        if self._silent or ping.term > self._ping_term:
            self._report(FactKind.LEADER_HEARD, leader=ping.leader, term=ping.term)
        self._silent = False
        self._silent_at = now + ping.deadline_s
        self._round, self._ping_term = ping.round, ping.term
        self._pong_due = True
        self._permission.pinged(ping)
        heard = ping.heard.get(self._worker)
        if heard is not None and self._is_own_pong(heard):
            self._heard(heard, ping, now)

    def _heard(self, heard: Heard, ping: Ping, now: float) -> None:
        sent_at = self._permission.answered(heard.sequence)
        if sent_at is None:
            return
        until = self._counted_from(sent_at, now) + self._options.access_s(ping.deadline_s)
        if not self._permission.extend(until):
            return
        runs = {a: n for a, n in self.processes.items() if self._outlasts(self._runs[a])}
        if runs:
            self._effects.append(ExtendDeadline(runs, until))

    def _watch_silence(self, now: float) -> None:
        """Report once that no leader is heard; available applications run on (SH-10)."""
        if self._silent_at is not None and now >= self._silent_at and not self._stopping:
            self._silent = True
            self._silent_at = None
            self._report(FactKind.LEADER_SILENT, term=self._ping_term)

    def _files_answered(self, event: FilesStored | FilesRefused, now: float) -> None:
        match event:
            case FilesStored():
                if self._files.stored(event.application, event.command, event.policy):
                    self._report(FactKind.FILES_STORED, event.application, command=event.command)
            case FilesRefused():
                if self._files.refused(event.application, event.command, event.reason):
                    self._report(
                        FactKind.FILES_REFUSED, event.application, command=event.command, reason=event.reason
                    )
        self._settle_files([event.application], now)

    def _settle_files(self, applications: Collection[ApplicationId], now: float) -> None:
        if self._may_act():
            wholes = tuple(dict.fromkeys(application.whole for application in applications))
            runs = (self._runs[replica] for whole in wholes for replica in self._replicas(whole))
            in_use = {run.application.whole: run.command for run in runs if run.process is not None}
            self._effects += self._files.settle(wholes, in_use, now)

    def _process_started(self, event: ProcessStarted, now: float) -> None:
        run = self._runs.get(event.application)
        if run is None or run.process != event.run:
            return
        run.started(now)
        if run.state is not RunState.STOPPING:
            self._report(FactKind.PROCESS_STARTED, event.application, token=run.token, run=event.run)

    def _health_checked(self, event: HealthChecked, now: float) -> None:
        run = self._runs.get(event.application)
        if run is not None and run.process == event.run and run.checked(event.error, now):
            self._stop_process(event.application, event.run, run)

    def _stop_process(self, application: ApplicationId, process: int, run: Run) -> None:
        self._report(FactKind.PROCESS_STOPPING, application, token=run.token, run=process, reason=run.reason)
        self._effects.append(StopProcess(application, process))

    def _process_exited(self, event: ProcessExited, now: float) -> None:
        run = self._runs.get(event.application)
        if run is None or run.process != event.run:
            return
        self._report(
            FactKind.PROCESS_EXITED,
            event.application,
            token=run.token,
            at=event.at,
            run=event.run,
            code=event.code,
            error=event.error,
            told=run.state is RunState.STOPPING,
        )
        run.exited(event.code, event.error, now)
        if run.state is RunState.FAILED:
            self._report(FactKind.APPLICATION_FAILED, event.application, reason=run.reason)
        self._settle_files([event.application], now)

    def _stop_what_may_not_run(self, concerned: Concerned, now: float) -> None:
        for run in self._runs_of(concerned):
            if run.process is None or run.state is RunState.STOPPING:
                continue
            reason = self._must_stop(run, self._assignments.get(run.application), now)
            if reason:
                run.stop(reason)
                self._stop_process(run.application, run.process, run)

    def _must_stop(self, run: Run, assignment: Assignment | None, now: float) -> str:
        """Return why its process must be stopped; empty if it need not."""
        if self._stopping:
            return "the worker stops"
        if self._was_stopped(run):
            return "a stop was commanded"
        if assignment is None:
            return "no assignment names this worker for it any more"
        if assignment.command != run.command:
            return "a later start command replaces it"
        if run.exclusive and not self._is_permitted(run, now):
            return self._out_of_touch(run)
        return ""

    def _out_of_touch(self, run: Run) -> str:
        deadline_s, stop_timeout_s = self._permission.deadline_s or 0.0, run.policy.stop_timeout_s
        return self._misfit(run) or (
            f"no leader has answered this worker in time: the leader's deadline is {deadline_s:g} s, "
            f"and stopping takes up to {stop_timeout_s:g} s"
        )

    def _misfit(self, run: Run) -> str:
        """Return why it can't run on from round to round; empty if it can, or if no leader was heard."""
        deadline_s = self._permission.deadline_s
        if deadline_s is None or self._adopted is None:
            return ""
        try:
            self._options.check_deadline(deadline_s, self._adopted.round_s, run.policy.stop_timeout_s)
        except InvalidSettings as error:
            return str(error)
        return ""

    def _was_stopped(self, run: Run) -> bool:
        started = self._files.find(run.application.whole, run.command)
        return started is None or started.stopped

    def _advance(self, concerned: Concerned, now: float) -> None:
        """Start runs that may start, and forget those that are neither wanted nor running."""
        for ended in self._runs_of(concerned):
            if self._is_over(ended.application, ended):
                self._forget(ended.application)
        if not self._may_act() or self._stopping:
            return
        wanted = self._assignments if concerned is None else concerned
        for application in [each for each in wanted if each in self._assignments]:
            assignment, run = self._assignments[application], self._runs.get(application)
            if run is None:
                run = self._runs[application] = Run(
                    application, assignment.command, assignment.mode, assignment.token, now
                )
                self._together.setdefault(application.whole, {})[application] = None
                if self._files.retry(application.whole, assignment.command):
                    self._settle_files([application], now)
            elif run.state is not RunState.FAILED:
                run.named = assignment.token
            if run.state is RunState.BACKING_OFF and now >= run.restart_at:
                run.elapsed()
            if run.state is RunState.PENDING:
                self._start_if_it_may(run, assignment, now)

    def _forget(self, application: ApplicationId) -> None:
        del self._runs[application]
        together = self._together[application.whole]
        del together[application]
        if not together:
            del self._together[application.whole]

    def _is_over(self, application: ApplicationId, run: Run) -> bool:
        """True if a run has ended, and its end needs no further report.

        A failed application that is assigned again is tried again (SH-17).
        """
        assignment = self._assignments.get(application)
        if assignment is None or assignment.command != run.command:
            return self._has_ended(run)
        return run.state is RunState.FAILED and assignment.token != run.named

    def _start_if_it_may(self, run: Run, assignment: Assignment, now: float) -> None:
        started = self._files.find(run.application.whole, assignment.command)
        if started is not None and started.stage is Stage.REFUSED:
            run.refused(started.reason)
            started.reported = True
            self._report(FactKind.APPLICATION_FAILED, run.application, reason=run.reason)
        elif started is None or not self._are_files_stored(started):
            run.wait(self._what_is_missing(run, started, now))
        else:
            self._start_if_permitted(run, started, assignment.token, now)

    def _what_is_missing(self, run: Run, started: StagedStart | None, now: float) -> str:
        if started is not None and not started.stopped:
            return "its files are being stored" if now >= run.since + QUICK_S else ""
        if started is not None or self._files.was_stopped(run.application.whole):
            return "a stop was commanded"
        return "its start command has not been read yet"

    def _start_if_permitted(self, run: Run, started: StagedStart, token: int, now: float) -> None:
        run.policy = started.policy
        obstacle = self._sibling(run) or (self._obstacle(run, now) if run.exclusive else "")
        if obstacle:
            run.wait(obstacle)
            return
        self._processes += 1
        run.start(self._processes, token)
        self._report(
            FactKind.PROCESS_STARTING, run.application, token=token, run=self._processes, mode=run.mode.value
        )
        self._effects.append(
            StartProcess(
                run.application,
                run.command,
                self._processes,
                token,
                self._permission.until if run.exclusive else None,
                self._number_of_replicas(run),
            )
        )

    def _sibling(self, run: Run) -> str:
        """Return why a replica may not start beside another one; empty if it may."""
        others = (self._runs[each] for each in self._replicas(run.application) if each != run.application)
        other = next((other for other in others if self._waits_for(other)), None)
        return "" if other is None else f"{other.application} still runs on this worker"

    def _number_of_replicas(self, run: Run) -> int:
        entry = self._adopted.applications.get(run.application) if self._adopted is not None else None
        return 1 if entry is None else entry.replicas

    def _obstacle(self, run: Run, now: float) -> str:
        """Return why an exclusive application may not start now; empty if it may."""
        if not self._is_recent_enough():
            return "the leader has a later assignment than this worker has read"
        misfit = self._misfit(run)
        if misfit or self._is_permitted(run, now):
            return misfit
        if self._permission.until is None:
            return "no leader has answered this worker yet"
        return self._out_of_touch(run)

    def _answer(self, concerned: Concerned, now: float) -> None:
        """Send a pong if a ping asks, a report has changed (SH-8), or the worker leaves.

        Changes in quick succession share a pong, as each pong has all applications.
        """
        leaves = self._stopping and all(self._has_ended(run) for run in self._runs.values())
        sustained_s = self._options.sustained_pong_interval_s(len(self._runs))
        if self._news_at is None and self._may_act() and self._has_news(concerned):
            self._news_at = max(
                now,
                self._ponged_at + self._options.pong_interval_s(len(self._runs)),
                self._sustained_until - SPARE_PONGS * sustained_s,
            )
        news_due = self._news_at is not None and now >= self._news_at
        if news_due:
            self._sustained_until = max(now, self._sustained_until) + sustained_s
        if self._pong_due or leaves or news_due:
            self._pong_due, self._news_at, self._ponged_at = False, None, now
            self._said = _Said(self.seen, self.reports if not leaves else MappingProxyType({}))
            self._send_pong(self._said, leaves, now)
        if leaves:
            self._finished = True
            self._report(FactKind.LEFT)
            self._effects.append(Finished())

    def _has_news(self, concerned: Concerned) -> bool:
        """True if a report differs from the last pong."""
        said = self._said
        if said is None or concerned is None:
            return said != _Said(self.seen, self.reports)
        return said.seen != self.seen or any(
            (self._runs[a].report if a in self._runs else None) != said.applications.get(a) for a in concerned
        )

    def _send_pong(self, said: _Said, leaving: bool, now: float) -> None:
        self._sequence += 1
        self._permission.sent(self._sequence, now)
        pong = Pong(
            worker=self._worker,
            incarnation=self._incarnation,
            sequence=self._sequence,
            round=self._round,
            term=self._ping_term,
            seen=said.seen,
            tags=self._options.tags,
            host=self._host,
            leaving=leaving,
            applications=said.applications,
            reads_changes=True,
            reads_replicas=True,
            capacity=self._options.capacity,
        )
        self._effects.append(SendPong(pong))

    def _earliest_check(self, concerned: Concerned, now: float) -> float | None:
        """Return the time of the next check; applications that are not concerned keep theirs."""
        if self._finished:
            return None
        runs = self._runs_of(concerned)
        times = [run.restart_at for run in runs if run.state is RunState.BACKING_OFF]
        if concerned is not None and self._check_at is not None:
            times.append(self._check_at)
        if self._silent_at is not None and not self._stopping:
            times.append(self._silent_at)
        if self._files.next_unused is not None:
            times.append(self._files.next_unused)
        until = self._permission.until
        if until is not None:
            times += [
                until - run.policy.stop_timeout_s
                for run in runs
                if run.exclusive and run.state in {RunState.STARTING, RunState.RUNNING}
            ]
        return min((at for at in times if at > now), default=None)

    def _may_act(self) -> bool:
        """True once COMMAND has been read to the end that it had at the start (SH-6)."""
        return self._caught_up

    def _is_newer(self, document: AssignmentDocument | DocumentChange) -> bool:
        """True if its epoch is greater than that of every document before it (SH-7)."""
        return self._accepted is None or document.epoch > self._accepted[0].epoch

    def _is_of_present_leader(self, document: AssignmentDocument | DocumentChange) -> bool:
        """True if no later leader had announced itself on COMMAND before it (SH-7).

        A ping of a later leader does not count: that leader goes on from the last document of the one before,
        which may still be unread here.
        """
        return document.epoch.term >= self._announced

    def _is_this_incarnation(self, known: WorkerEntry | None) -> bool:
        """True if the document means this process, and no other one of the same name (SH-3)."""
        return known is not None and known.incarnation == self._incarnation

    def _names_me(self, entry: ApplicationEntry) -> bool:
        """True if the entry names this worker (SH-4)."""
        return entry.worker == self._worker

    def _are_files_stored(self, started: StagedStart) -> bool:
        """True if the files of this very command are on disk, and no stop was read since (SH-5, SH-6)."""
        return started.stage is Stage.STORED and not started.stopped

    def _has_ended(self, run: Run) -> bool:
        """True if no process of it exists or may come to exist (SH-13)."""
        return run.process is None

    def _waits_for(self, other: Run) -> bool:
        """True if another replica of the application has a process here, which ends first (SH-28)."""
        return not self._has_ended(other)

    def _is_of_present_term(self, ping: Ping) -> bool:
        """True if no later leader is known than its sender (SH-14)."""
        return ping.term >= max(self._announced, self._permission.term)

    def _is_own_pong(self, heard: Heard) -> bool:
        """True if this process sent the pong that was heard, and not an earlier one (SH-14)."""
        return heard.incarnation == self._incarnation

    def _counted_from(self, sent_at: float, now: float) -> float:
        """Count the deadline from when the pong was sent: its answer may come any time later (SH-14)."""
        return min(sent_at, now)

    def _outlasts(self, run: Run) -> bool:
        """True if a later permission lets it run on; not if it is being stopped, maybe too late (SH-14)."""
        return run.exclusive and run.state is not RunState.STOPPING

    def _is_recent_enough(self) -> bool:
        """True if the document acted on is no older than the leader's at the permission (SH-14)."""
        required, seen = self._permission.epoch, self.seen
        return seen is not None and (required is None or seen >= required)

    def _is_permitted(self, run: Run, now: float) -> bool:
        """True if a leader heard this worker so lately that the process can be stopped in time (SH-14)."""
        until = self._permission.until
        return until is not None and now < until - run.policy.stop_timeout_s


def _replicas_in(document: AssignmentDocument, whole: ApplicationId) -> Iterator[ApplicationId]:
    """Yield the replicas of an application in a document that are not being stopped (SH-28)."""
    first = document.applications.get(whole)
    for replica in range(0 if first is None else first.replicas):
        application = whole.numbered(replica)
        if application in document.applications:
            yield application
