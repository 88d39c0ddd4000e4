"""The Shiva worker, one sentence of its rules after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from unittest import mock

import pytest

from rebalanser.core.allocation import Capacity
from rebalanser.core.shiva.changes import change_between
from rebalanser.core.shiva.exclusive_lease import MAX_UNANSWERED
from rebalanser.core.shiva.messages import (
    CaughtUp,
    ChangeRead,
    DocumentRead,
    DropFiles,
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
    SendPong,
    StartProcess,
    StartRead,
    Stop,
    StopProcess,
    StopRead,
    StoreFiles,
    Unreadable,
    Wakeup,
    WorkerEffect,
    WorkerEvent,
)
from rebalanser.core.shiva.records import (
    AssignmentDocument,
    Heard,
    KeptCommand,
    LeaderAnnouncement,
    Ping,
    Pong,
    StartCommand,
    StopCommand,
)
from rebalanser.core.shiva.run_states import RUN, RunTrigger
from rebalanser.core.shiva.runs import MAX_REASON_CHARS
from rebalanser.core.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationState,
    Archive,
    Epoch,
    HealthPolicy,
    Incarnation,
    Mode,
    RestartPolicy,
    RunState,
    WorkerEntry,
)
from rebalanser.core.shiva.worker import QUICK_S, Worker
from rebalanser.core.shiva.worker_files import MAX_STARTS, MAX_STOPS, WorkerFiles
from rebalanser.core.shiva.worker_options import WorkerOptions
from rebalanser.core.transitions import Table
from rebalanser.errors import InternalError, InvalidName, InvalidSettings

A, B, C = (ApplicationId("t", "c", name) for name in "ABC")
ME = Incarnation("folder", 3)
OTHER = Incarnation("elsewhere", 1)
POLICY = RestartPolicy(
    max_restarts=2,
    restart_window_s=100.0,
    backoff_initial_s=1.0,
    backoff_max_s=8.0,
    stop_timeout_s=5.0,
)
KEEP_S = 500.0
OPTIONS = WorkerOptions(
    frozenset({"gpu"}),
    capacity=Capacity(4000, 8000),
    clock_drift_ratio=0.1,
    safety_margin_s=2.0,
    min_pong_interval_s=0.0,
    keep_files_s=KEEP_S,
)
DEADLINE_S = 40.0
ALLOWED_S = 34.0
"""40 s less a tenth for drift and 2 s of margin."""
STOPPED_AFTER_S = 29.0
"""What is left of that before the stop timeout."""
LONGER = "a longer deadline_s, which follows the rounds unless it is set"

EffectT = TypeVar("EffectT")


def archive_of(command: str) -> Archive:
    return Archive(f"sha-{command}", 10, 1)


def named(
    command: str,
    worker: str | None = "w",
    mode: Mode = Mode.AVAILABLE,
    state: ApplicationState = ApplicationState.ASSIGNED,
) -> ApplicationEntry:
    return ApplicationEntry(command, state, mode, archive_of(command), worker=worker)


@dataclass
class Bench:
    """A worker, its log, and everything that it ever asked for."""

    worker: Worker = field(default_factory=lambda: Worker("w", ME, "host-1", OPTIONS))
    now: float = 1000.0
    end: int = 0
    number: int = 0
    asked: list[WorkerEffect] = field(default_factory=list)
    quick: dict[tuple[ApplicationId, str], RestartPolicy] = field(default_factory=dict)
    """Commands whose files are stored as soon as that is asked for."""

    def feed(self, event: WorkerEvent, *, after_s: float = 0.0) -> list[WorkerEffect]:
        self.now += after_s
        effects = self.worker.handle(event, self.now)
        self.asked += effects
        for store in only(effects, StoreFiles):
            policy = self.quick.pop((store.application, store.command), None)
            if policy is not None:
                effects = effects + self.feed(FilesStored(store.application, store.command, policy))
        return effects

    def at(self, offset: int | None = None) -> RecordMetadata:
        self.end = self.end + 1 if offset is None else offset
        return RecordMetadata(self.end, 0, 100)

    def start(self, application: ApplicationId, command: str) -> list[WorkerEffect]:
        return self.feed(
            StartRead(self.at(), StartCommand(application, command, archive_of(command), Mode.AVAILABLE))
        )

    def keep(self, application: ApplicationId, command: str, original: int) -> list[WorkerEffect]:
        start = StartCommand(application, command, archive_of(command), Mode.AVAILABLE)
        return self.feed(StartRead(self.at(), KeptCommand(start, original)))

    def stop(self, application: ApplicationId, keep_data: bool = False) -> list[WorkerEffect]:
        return self.feed(StopRead(self.at(), StopCommand(application, f"stop-{self.end}", keep_data)))

    def leader(self) -> int:
        self.feed(LeaderRead(self.at(), LeaderAnnouncement("l")))
        return self.end

    def caught_up(self) -> list[WorkerEffect]:
        return self.feed(CaughtUp())

    def document(
        self,
        entries: Mapping[ApplicationId, ApplicationEntry] | None = None,
        *,
        epoch: Epoch | None = None,
        consumed: int | None = None,
        incarnation: Incarnation = ME,
        round_s: float = 0.0,
    ) -> list[WorkerEffect]:
        if epoch is None:
            self.number += 1
            epoch = Epoch(0, self.number)
        document = AssignmentDocument(
            epoch=epoch,
            leader="l",
            consumed=self.end if consumed is None else consumed,
            deadline_s=DEADLINE_S,
            workers={"w": WorkerEntry(incarnation, host="host-2")},
            applications=entries or {},
            round_s=round_s,
        )
        return self.feed(DocumentRead(self.at(), document))

    def ping(
        self,
        heard: int | None = None,
        *,
        term: int = 0,
        epoch: Epoch | None = None,
        incarnation: Incarnation = ME,
        deadline_s: float = DEADLINE_S,
    ) -> list[WorkerEffect]:
        answer = {"w": Heard(incarnation, heard)} if heard is not None else {}
        epoch = epoch or Epoch(0, self.number)
        return self.feed(PingRead(Ping(term, "l", 7, epoch, deadline_s, answer)))

    def stored(self, application: ApplicationId, command: str, **policy: Any) -> list[WorkerEffect]:
        """Files of a command are stored now, or else as soon as that is asked for."""
        stored = FilesStored(application, command, replace(POLICY, **policy))
        effects = self.feed(stored)
        if not facts(effects, FactKind.FILES_STORED):
            self.quick[application, command] = stored.policy
        return effects

    def exited(self, application: ApplicationId, code: int | None = 0, error: str = "") -> list[WorkerEffect]:
        return self.feed(ProcessExited(application, self.process(application), code, error))

    def process(self, application: ApplicationId) -> int:
        return [e.run for e in only(self.asked, StartProcess) if e.application == application][-1]

    @property
    def pong(self) -> Pong:
        return only(self.asked, SendPong)[-1].pong

    def state(self, application: ApplicationId = A) -> RunState:
        return self.pong.applications[application].state

    def reason(self, application: ApplicationId = A) -> str:
        return self.pong.applications[application].reason


def only(effects: list[WorkerEffect], kind: type[EffectT]) -> list[EffectT]:
    return [effect for effect in effects if isinstance(effect, kind)]


def facts(effects: list[WorkerEffect], kind: FactKind) -> list[Fact]:
    return [effect.fact for effect in only(effects, Report) if effect.fact.kind is kind]


def ready() -> Bench:
    """A worker that has caught up with an empty log."""
    bench = Bench()
    bench.caught_up()
    return bench


def running(mode: Mode = Mode.AVAILABLE, **policy: Any) -> Bench:
    """A worker that runs application A by command a1."""
    bench = ready()
    bench.start(A, "a1")
    bench.document({A: named("a1", mode=mode)})
    bench.stored(A, "a1", **policy)
    if mode is Mode.EXCLUSIVE:
        bench.ping(heard=bench.pong.sequence)
    bench.feed(ProcessStarted(A, bench.process(A)))
    assert bench.state() is RunState.RUNNING
    return bench


HEALTH = HealthPolicy(grace_period_s=20.0, failure_threshold=3)


def checked_process(mode: Mode = Mode.AVAILABLE, **policy: Any) -> Bench:
    """A worker with a process of application A that has a health check and has not passed it yet."""
    bench = ready()
    bench.start(A, "a1")
    bench.document({A: named("a1", mode=mode)})
    bench.stored(A, "a1", health=HEALTH, **policy)
    if mode is Mode.EXCLUSIVE:
        bench.ping(heard=bench.pong.sequence)
    bench.feed(ProcessStarted(A, bench.process(A)))
    return bench


def check(bench: Bench, *errors: str, after_s: float = 0.0) -> list[WorkerEffect]:
    """Let health checks pass (no errors, or an empty one) or fail, the first after ``after_s`` seconds."""
    bench.now += after_s
    effects: list[WorkerEffect] = []
    for error in errors or ("",):
        effects += bench.feed(HealthChecked(A, bench.process(A), error))
    return effects


@pytest.mark.rule("SH-23")
class TestHealth:
    def test_it_counts_as_running_once_its_check_has_passed(self) -> None:
        bench = checked_process()
        assert bench.state() is RunState.STARTING
        check(bench, "connection refused")
        assert bench.state() is RunState.STARTING
        assert bench.reason() == "its health check has not passed yet: connection refused"
        check(bench)
        assert (bench.state(), bench.reason()) == (RunState.RUNNING, "")
        assert len(facts(bench.asked, FactKind.PROCESS_STARTED)) == 1

    def test_failures_within_the_grace_period_do_not_count(self) -> None:
        bench = checked_process()
        check(bench, *["no"] * 9, after_s=HEALTH.grace_period_s - 1)
        assert not only(bench.asked, StopProcess)
        check(bench, "no", "no", after_s=1)
        assert not only(bench.asked, StopProcess)
        assert only(check(bench, "no"), StopProcess) == [StopProcess(A, 1)]

    def test_the_grace_period_ends_with_the_first_check_that_passes(self) -> None:
        bench = checked_process()
        assert only(check(bench, "", "no", "no", "no"), StopProcess) == [StopProcess(A, 1)]

    def test_only_failures_in_a_row_stop_it(self) -> None:
        bench = checked_process()
        assert not only(check(bench, "", *["no", "no", ""] * 3), StopProcess)
        assert bench.state() is RunState.RUNNING

    @pytest.mark.rule("SH-17")
    @pytest.mark.parametrize("restart", ["always", "on_failure"])
    def test_an_unhealthy_process_is_started_again_with_backoff_and_a_limit(self, restart: str) -> None:
        bench = checked_process(restart=restart)
        for wait_s in (1.0, 2.0):
            check(bench, "", *["no"] * 3)
            assert bench.state() is RunState.STOPPING
            bench.exited(A, 0)
            assert bench.state() is RunState.BACKING_OFF
            assert bench.reason() == "its health check failed 3 times in a row: no"
            starts = len(only(bench.asked, StartProcess))
            bench.feed(Wakeup(), after_s=wait_s - 0.1)
            assert len(only(bench.asked, StartProcess)) == starts
            bench.feed(Wakeup(), after_s=0.1)
            bench.feed(ProcessStarted(A, bench.process(A)))
            assert bench.state() is RunState.STARTING
        check(bench, "", *["no"] * 3)
        bench.exited(A, 0)
        assert bench.state() is RunState.FAILED
        assert bench.reason() == (
            "its health check failed 3 times in a row: no, after 2 restarts within the restart window"
        )

    def test_an_unhealthy_process_that_is_not_to_be_started_again_has_failed(self) -> None:
        bench = checked_process(restart="never")
        check(bench, "", *["no"] * 3)
        bench.exited(A, 0)
        assert bench.state() is RunState.FAILED

    @pytest.mark.parametrize("mode", Mode)
    def test_one_that_is_stopped_meanwhile_is_not_started_again(self, mode: Mode) -> None:
        bench = checked_process(mode)
        check(bench, "", *["no"] * 3)
        bench.document({})
        bench.exited(A)
        bench.feed(Wakeup(), after_s=60.0)
        assert len(only(bench.asked, StartProcess)) == 1
        assert A not in bench.pong.applications

    def test_a_check_of_an_earlier_process_or_of_none_says_nothing(self) -> None:
        bench = checked_process()
        bench.feed(HealthChecked(A, 7))
        bench.feed(HealthChecked(B, 1))
        assert bench.state() is RunState.STARTING
        check(bench, "", *["no"] * 3)
        check(bench)
        assert bench.state() is RunState.STOPPING
        without = running()
        assert not only(check(without, *["no"] * 9, after_s=100.0), StopProcess)


@pytest.mark.rule("SH-4")
class TestStart:
    def test_a_start_command_alone_stores_nothing_and_starts_nothing(self) -> None:
        bench = ready()
        assert not bench.start(A, "a1")
        effects = bench.document({A: named("a1", "x")})
        assert not only(effects, StoreFiles)
        assert bench.document({A: named("a1")})[1:-1] == [StoreFiles(A, "a1", archive_of("a1"))]
        assert not only(bench.asked, StartProcess)
        effects = bench.stored(A, "a1")
        assert [fact.detail["command"] for fact in facts(effects, FactKind.FILES_STORED)] == ["a1"]

    def test_of_many_applications_a_worker_stores_those_that_it_is_named_for(self) -> None:
        bench = Bench()
        entries = {}
        for number in range(200):
            application = ApplicationId("t", "c", f"a{number:03}")
            bench.start(application, "x")
            entries[application] = named("x", "w" if number % 50 == 0 else "other")
        bench.document(entries)
        stores = only(bench.caught_up(), StoreFiles)
        assert [store.application.application for store in stores] == ["a000", "a050", "a100", "a150"]

    def test_a_worker_starts_an_application_only_on_an_assignment_naming_it(self) -> None:
        bench = ready()
        bench.start(A, "a1")
        bench.stored(A, "a1")
        bench.document({A: named("a1", worker="someone-else")})
        bench.document({A: named("a1", worker=None, state=ApplicationState.WAITING)})
        assert not only(bench.asked, StartProcess)
        effects = bench.document({A: named("a1")})
        assert only(effects, StartProcess) == [StartProcess(A, "a1", 1, token=bench.end, deadline=None)]

    @pytest.mark.rule("SH-3")
    @pytest.mark.parametrize(
        "incarnation", [OTHER, Incarnation("folder", 2), Incarnation("folder", 4)], ids=str
    )
    def test_an_assignment_naming_another_incarnation_starts_nothing(self, incarnation: Incarnation) -> None:
        bench = ready()
        bench.start(A, "a1")
        bench.stored(A, "a1")
        bench.document({A: named("a1")}, incarnation=incarnation)
        assert not only(bench.asked, StartProcess)

    def test_a_document_that_names_it_without_knowing_it_starts_nothing(self) -> None:
        bench = ready()
        bench.start(A, "a1")
        bench.stored(A, "a1")
        document = AssignmentDocument(Epoch(0, 1), "l", 1, DEADLINE_S, applications={A: named("a1")})
        bench.feed(DocumentRead(bench.at(), document))
        assert not only(bench.asked, StartProcess)

    @pytest.mark.rule("SH-2")
    def test_the_command_that_it_runs_is_the_one_that_the_assignment_names(self) -> None:
        bench = ready()
        bench.start(A, "a1")
        bench.document({A: named("a1", mode=Mode.EXCLUSIVE)})
        bench.stored(A, "a1")
        bench.start(A, "a2")
        bench.stored(A, "a2")
        effects = bench.document({A: named("a2")})
        assert [start.command for start in only(bench.asked, StartProcess)] == ["a2"]
        assert only(effects, DropFiles) == [DropFiles(A, "a1", stays=True)]

    @pytest.mark.rule("SH-13")
    def test_a_superseded_commands_process_is_stopped_first_and_awaited(self) -> None:
        bench = running()
        bench.start(A, "a2")
        bench.stored(A, "a2")
        effects = bench.document({A: named("a2")})
        assert only(effects, StopProcess) == [StopProcess(A, 1)]
        assert not only(effects, StartProcess)
        assert not only(effects, DropFiles)
        assert (bench.pong.applications[A].command, bench.state()) == ("a1", RunState.STOPPING)
        effects = bench.exited(A)
        assert only(effects, DropFiles) == [DropFiles(A, "a1", stays=True)]
        assert [(start.command, start.run) for start in only(effects, StartProcess)] == [("a2", 2)]

    @pytest.mark.rule("SH-15")
    def test_what_ran_before_a_refused_start_runs_on_and_keeps_its_files(self) -> None:
        bench = running()
        bench.start(A, "huge")
        bench.document({A: named("a1")})
        assert [store.command for store in only(bench.asked, StoreFiles)] == ["a1"]
        assert not only(bench.asked, DropFiles)
        assert not only(bench.asked, StopProcess)

    @pytest.mark.parametrize("state", [ApplicationState.REFUSED, ApplicationState.STOPPING])
    def test_files_of_what_can_run_no_more_are_dropped(self, state: ApplicationState) -> None:
        bench = running()
        bench.document({A: named("a1", None, state=state)})
        assert only(bench.exited(A), DropFiles) == [DropFiles(A, "a1")]

    def test_files_of_what_has_finished_stay_for_a_while_and_are_not_stored_anew(self) -> None:
        finished = {A: named("a1", None, state=ApplicationState.FINISHED)}
        bench = running(restart="never")
        bench.exited(A, 0)
        assert not only(bench.document(finished), DropFiles)
        assert only(bench.document({}), DropFiles) == [DropFiles(A, "a1")]
        late = Bench()
        late.start(A, "a1")
        late.document(finished)
        assert not only(late.caught_up(), StoreFiles)

    def test_files_that_are_still_being_stored_are_dropped_once_they_are(self) -> None:
        bench = ready()
        bench.start(A, "a1")
        bench.document({A: named("a1")})
        assert not only(bench.stop(A), DropFiles)
        assert only(bench.stored(A, "a1"), DropFiles) == [DropFiles(A, "a1", keep_data=False)]

    def test_files_are_kept_while_no_document_has_decided_on_a_later_start(self) -> None:
        bench = running()
        bench.document({A: named("a1", "x")})
        bench.exited(A)
        bench.start(A, "a2")
        bench.document({A: named("a1", "x")}, consumed=bench.end - 1)
        assert not only(bench.asked, DropFiles)
        decided = bench.document({A: named("a2", "x")})
        assert only(decided, DropFiles) == [DropFiles(A, "a1", stays=True)]

    def moved_away(self) -> Bench:
        """A worker that ran application A, which another worker has now."""
        bench = running()
        bench.document({A: named("a1", "x")})
        bench.exited(A)
        return bench

    def test_unpacked_files_of_what_has_moved_away_are_removed_after_a_stated_time(self) -> None:
        bench = self.moved_away()
        bench.feed(Wakeup(), after_s=DEADLINE_S)
        assert bench.worker.next_wakeup == bench.now - DEADLINE_S + KEEP_S
        bench.feed(Wakeup(), after_s=KEEP_S - DEADLINE_S - 1)
        bench.document({A: named("a1", "x")})
        assert not only(bench.asked, DropFiles)
        assert only(bench.feed(Wakeup(), after_s=1), DropFiles) == [DropFiles(A, "a1", stays=True)]
        assert not only(bench.feed(Wakeup(), after_s=10 * KEEP_S), DropFiles)
        assert only(bench.document({A: named("a1")}), StoreFiles) == [StoreFiles(A, "a1", archive_of("a1"))]

    def test_what_comes_back_in_that_time_is_not_stored_anew(self) -> None:
        bench = self.moved_away()
        bench.now += KEEP_S - 1
        assert only(bench.document({A: named("a1")}), StartProcess)
        bench.feed(Wakeup(), after_s=10 * KEEP_S)
        assert len(only(bench.asked, StoreFiles)) == 1
        assert not only(bench.asked, DropFiles)

    def test_what_comes_back_just_when_its_files_would_be_removed_is_started(self) -> None:
        """A worker that was suspended can read of both at once."""
        bench = self.moved_away()
        bench.now += KEEP_S
        assert only(bench.document({A: named("a1")}), StartProcess)
        assert not only(bench.asked, DropFiles)

    def test_files_that_a_process_uses_are_not_removed_however_long_it_takes_to_stop(self) -> None:
        bench = running()
        bench.document({A: named("a1", "x")})
        bench.feed(Wakeup(), after_s=10 * KEEP_S)
        assert not only(bench.asked, DropFiles)
        bench.exited(A)
        assert not only(bench.asked, DropFiles)
        assert only(bench.feed(Wakeup(), after_s=KEEP_S), DropFiles) == [DropFiles(A, "a1", stays=True)]

    @pytest.mark.parametrize("keep_data", [False, True])
    def test_a_stop_drops_the_folder_whose_unpacked_files_are_gone_already(self, keep_data: bool) -> None:
        bench = self.moved_away()
        bench.feed(Wakeup(), after_s=KEEP_S)
        assert only(bench.stop(A, keep_data), DropFiles) == [DropFiles(A, "a1", keep_data)]
        bench.document({})
        assert len(only(bench.asked, DropFiles)) == 2
        assert not bench.worker._files.applications

    def test_files_of_what_has_finished_are_removed_after_that_time_and_its_folder_stays(self) -> None:
        bench = running(restart="never")
        bench.exited(A, 0)
        bench.document({A: named("a1", None, state=ApplicationState.FINISHED)})
        effects = bench.feed(Wakeup(), after_s=KEEP_S)
        assert only(effects, DropFiles) == [DropFiles(A, "a1", stays=True)]
        assert only(bench.document({}), DropFiles) == [DropFiles(A, "a1")]

    def test_files_from_before_this_worker_began_are_removed_after_that_time_too(self) -> None:
        bench = Bench()
        bench.start(A, "a1")
        bench.start(B, "b1")
        bench.start(C, "c1")
        bench.document({A: named("a1", "x"), B: named("b1"), C: named("c1", "x")})
        bench.feed(FilesFound(frozenset({A, B})))
        assert not only(bench.caught_up(), DropFiles)
        effects = bench.feed(Wakeup(), after_s=KEEP_S)
        assert only(effects, DropFiles) == [DropFiles(A, "a1", stays=True)]
        assert only(bench.stop(A), DropFiles) == [DropFiles(A, "a1", keep_data=False)]

    def test_a_stop_drops_the_folder_of_an_application_that_never_ran_here_once(self) -> None:
        """It may hold data that an earlier stop kept, of which the log tells nothing any more."""
        bench = ready()
        bench.start(A, "a1")
        bench.document({A: named("a1", "x")})
        assert only(bench.stop(A), DropFiles) == [DropFiles(A, "a1", keep_data=False)]
        bench.document({A: named("a1", "x")}, consumed=1)
        bench.document({})
        assert len(only(bench.asked, DropFiles)) == 1
        assert not bench.worker._files.applications


@pytest.mark.rule("SH-5")
class TestStop:
    def test_a_worker_that_runs_it_stops_it_at_once(self) -> None:
        bench = running()
        assert only(bench.stop(A), StopProcess) == [StopProcess(A, 1)]
        assert (bench.state(), bench.reason()) == (RunState.STOPPING, "a stop was commanded")

    def test_a_worker_that_runs_it_stops_it_also_on_an_assignment_without_it(self) -> None:
        bench = running()
        assert only(bench.document({}), StopProcess) == [StopProcess(A, 1)]
        assert bench.state() is RunState.STOPPING
        bench.exited(A)
        assert not bench.pong.applications

    @pytest.mark.parametrize("keep_data", [False, True])
    def test_it_drops_its_files_once_the_process_has_exited(self, keep_data: bool) -> None:
        bench = running()
        assert not only(bench.stop(A, keep_data) + bench.document({}), DropFiles)
        assert only(bench.exited(A), DropFiles) == [DropFiles(A, "a1", keep_data)]

    def test_what_was_stopped_is_not_started_again_by_the_document_that_still_names_it(self) -> None:
        bench = running()
        bench.stop(A)
        bench.exited(A)
        assert (bench.state(), bench.reason()) == (RunState.PENDING, "a stop was commanded")
        bench.document({A: named("a1")}, consumed=1)
        assert len(only(bench.asked, StartProcess)) == 1

    @pytest.mark.rule("SH-2")
    def test_a_document_that_takes_the_stop_into_account_and_names_it_all_the_same_prevails(self) -> None:
        """Nobody led, a later start that is refused followed the stop, and compaction dropped the stop."""
        bench = running()
        bench.stop(A)
        bench.exited(A)
        assert only(bench.document({A: named("a1")}), StoreFiles) == [StoreFiles(A, "a1", archive_of("a1"))]
        assert [start.command for start in only(bench.stored(A, "a1"), StartProcess)] == ["a1"]

    @pytest.mark.rule("SH-2")
    def test_a_kept_copy_that_is_replayed_before_such_a_document_prevails_with_it(self) -> None:
        bench = Bench()
        bench.end = 5
        bench.stop(A)
        bench.keep(A, "a1", original=3)
        bench.document({A: named("a1")})
        assert only(bench.caught_up(), StoreFiles) == [StoreFiles(A, "a1", archive_of("a1"))]

    @pytest.mark.rule("SH-15")
    def test_a_kept_copy_of_what_was_stopped_does_not_bring_it_back(self) -> None:
        bench = running()
        bench.stop(A)
        bench.exited(A)
        assert not only(bench.keep(A, "a1", original=1), StoreFiles)
        assert len(only(bench.asked, StartProcess)) == 1

    @pytest.mark.rule("SH-2")
    def test_start_stop_start_leaves_the_last(self) -> None:
        bench = running()
        bench.stop(A)
        bench.start(A, "a2")
        bench.stored(A, "a2")
        bench.document({A: named("a2")})
        bench.exited(A)
        assert [start.command for start in only(bench.asked, StartProcess)] == ["a1", "a2"]

    @pytest.mark.rule("SH-2")
    def test_the_same_command_published_again_after_the_stop_starts_it_anew(self) -> None:
        bench = running()
        bench.stop(A)
        bench.start(A, "a1")
        bench.document({A: named("a1")})
        assert len(only(bench.asked, StartProcess)) == 1
        effects = bench.exited(A)
        assert not only(effects, DropFiles)
        assert [start.run for start in only(effects, StartProcess)] == [2]


@pytest.mark.rule("SH-6")
class TestReplay:
    def test_a_worker_that_starts_late_replays_without_acting_then_acts(self) -> None:
        bench = Bench()
        bench.start(A, "a1")
        bench.document({A: named("a1")})
        bench.start(B, "b1")
        bench.stop(B)
        bench.document({A: named("a1"), C: named("c1")})
        assert not bench.asked
        effects = bench.caught_up()
        assert only(effects, StoreFiles) == [StoreFiles(A, "a1", archive_of("a1"))]
        assert bench.pong.seen == Epoch(0, 2)

    def test_only_what_may_still_run_is_stored_in_the_order_of_the_log(self) -> None:
        bench = Bench()
        bench.start(A, "a1")
        bench.start(B, "b1")
        for command in ("a2", "a3"):
            bench.start(A, command)
        bench.document({B: named("b1"), A: named("a1")}, consumed=2)
        stores = only(bench.caught_up(), StoreFiles)
        assert [store.command for store in stores] == ["a1", "b1"]

    @pytest.mark.parametrize("documents", [0, 1])
    def test_of_many_starts_that_no_document_knows_the_last_are_remembered(self, documents: int) -> None:
        bench = Bench()
        for _ in range(documents):
            bench.document({})
        for number in range(MAX_STARTS * 3):
            bench.start(A, f"a{number}")
        assert not only(bench.caught_up(), StoreFiles)
        assert len(bench.worker._files._started[A]) <= MAX_STARTS
        last = f"a{MAX_STARTS * 3 - 1}"
        assert [store.command for store in only(bench.document({A: named(last)}), StoreFiles)] == [last]

    def test_it_acts_on_the_last_document_alone(self) -> None:
        bench = Bench()
        bench.start(A, "a1")
        bench.document({A: named("a1")})
        bench.document({A: named("a1", "x")})
        bench.caught_up()
        bench.stored(A, "a1")
        assert not only(bench.asked, StartProcess)

    def test_assigned_and_archive_not_seen_yet_is_pending_not_an_error(self) -> None:
        bench = ready()
        bench.document({A: named("a1")})
        assert bench.state() is RunState.PENDING
        assert bench.reason() == "its start command has not been read yet"
        bench.start(A, "a1")
        assert (bench.state(), bench.reason()) == (RunState.PENDING, "")
        bench.now += QUICK_S
        bench.ping()
        assert (bench.state(), bench.reason()) == (RunState.PENDING, "its files are being stored")
        assert [s.command for s in only(bench.stored(A, "a1"), StartProcess)] == ["a1"]

    @pytest.mark.rule("SH-15")
    def test_a_kept_copy_is_as_good_as_the_start_command(self) -> None:
        bench = Bench()
        bench.end = 500
        bench.keep(A, "a1", original=3)
        bench.document({A: named("a1")})
        assert only(bench.caught_up(), StoreFiles) == [StoreFiles(A, "a1", archive_of("a1"))]

    @pytest.mark.rule("SH-2", "SH-15")
    def test_a_kept_copy_stands_before_the_start_that_the_client_published_after_its_original(self) -> None:
        bench = Bench()
        bench.end = 1
        bench.start(A, "a2")
        bench.keep(A, "a1", original=1)
        bench.document({A: named("a2")})
        assert [store.command for store in only(bench.caught_up(), StoreFiles)] == ["a2"]

    @pytest.mark.rule("SH-2", "SH-15")
    def test_a_kept_copy_stands_before_the_stop_that_the_client_published_after_its_original(self) -> None:
        bench = Bench()
        bench.end = 1
        bench.document({A: named("a1")}, consumed=1)
        bench.stop(A)
        bench.keep(A, "a1", original=1)
        assert not only(bench.caught_up(), StoreFiles)
        assert (bench.state(), bench.reason()) == (RunState.PENDING, "a stop was commanded")


@pytest.mark.rule("SH-7")
class TestDocuments:
    @pytest.mark.parametrize(
        ("epoch", "accepted"),
        [
            (Epoch(10, 4), False),
            (Epoch(10, 5), False),
            (Epoch(9, 99), False),
            (Epoch(10, 6), True),
            (Epoch(11, 1), True),
        ],
        ids=str,
    )
    def test_epochs_grow(self, epoch: Epoch, accepted: bool) -> None:
        bench = ready()
        bench.document({}, epoch=Epoch(10, 5))
        refused = facts(bench.document({}, epoch=epoch), FactKind.DOCUMENT_REFUSED)
        assert [fact.detail["epoch"] for fact in refused] == ([] if accepted else [str(epoch)])
        assert bench.worker.seen == (epoch if accepted else Epoch(10, 5))

    @pytest.mark.parametrize("caught_up", [True, False])
    def test_a_deposed_leaders_late_assignment_is_refused_by_workers(self, caught_up: bool) -> None:
        bench = ready() if caught_up else Bench()
        bench.start(A, "a1")
        term = bench.leader()
        effects = bench.document({A: named("a1")}, epoch=Epoch(term - 1, 1))
        assert "later leader" in str(facts(effects, FactKind.DOCUMENT_REFUSED)[0].detail["reason"])
        assert not bench.document({A: named("a1")}, epoch=Epoch(term, 1)) or caught_up
        if not caught_up:
            bench.caught_up()
        assert bench.worker.seen == Epoch(term, 1)

    def test_a_ping_of_the_next_leader_does_not_condemn_what_it_goes_on_from(self) -> None:
        bench = ready()
        bench.ping(term=50, epoch=Epoch(0, 1))
        bench.document({}, epoch=Epoch(0, 1))
        assert bench.worker.seen == Epoch(0, 1)


@pytest.mark.rule("SH-24", "SH-7")
class TestChanges:
    """A change counts for the document that it names alone; without that a whole one is waited for."""

    @staticmethod
    def whole(bench: Bench, number: int, term: int = 0, **fields: Any) -> AssignmentDocument:
        known: dict[str, Any] = {"consumed": bench.end, "deadline_s": DEADLINE_S, "reads_changes": True}
        workers = {"w": WorkerEntry(ME, host="host-2")}
        return AssignmentDocument(Epoch(term, number), "l", **{**known, "workers": workers, **fields})

    def ready(self, *, caught_up: bool = True) -> tuple[Bench, AssignmentDocument]:
        bench = ready() if caught_up else Bench()
        base = self.whole(bench, 1)
        bench.start(A, "a1")
        bench.feed(DocumentRead(bench.at(), base))
        return bench, base

    @pytest.mark.parametrize("caught_up", [True, False])
    def test_it_acts_on_the_changed_document(self, caught_up: bool) -> None:
        bench, base = self.ready(caught_up=caught_up)
        document = self.whole(bench, 2, applications={A: named("a1")})
        bench.feed(ChangeRead(bench.at(), change_between(base, document)))
        if not caught_up:
            bench.caught_up()
        assert bench.worker.seen == Epoch(0, 2)
        bench.stored(A, "a1")
        assert only(bench.asked, StartProcess)[-1].token == bench.end
        bench.feed(ChangeRead(bench.at(), change_between(document, self.whole(bench, 3))))
        assert only(bench.asked, StopProcess) != []

    def test_of_a_document_that_was_not_read_it_waits_for_a_whole_one(self) -> None:
        bench, _ = self.ready()
        lost = self.whole(bench, 2, applications={A: named("a1")})
        for number in (3, 4):
            made = change_between(replace(lost, epoch=Epoch(0, number - 1)), self.whole(bench, number))
            bench.feed(ChangeRead(bench.at(), made))
        (refused,) = facts(bench.asked, FactKind.DOCUMENT_REFUSED)
        assert "it changes document 0.2, which was not read" in str(refused.detail["reason"])
        assert bench.worker.seen == Epoch(0, 1)
        bench.feed(DocumentRead(bench.at(), self.whole(bench, 5)))
        assert bench.worker.seen == Epoch(0, 5)

    def test_what_is_left_of_earlier_changes_is_nothing_to_a_worker_that_begins(self) -> None:
        bench = Bench()
        for number in (7, 9):
            made = change_between(self.whole(bench, number - 1), self.whole(bench, number))
            bench.feed(ChangeRead(bench.at(), made))
        base = self.whole(bench, 20)
        bench.feed(DocumentRead(bench.at(), base))
        bench.feed(ChangeRead(bench.at(), change_between(base, self.whole(bench, 21))))
        bench.caught_up()
        assert bench.worker.seen == Epoch(0, 21)
        assert facts(bench.asked, FactKind.DOCUMENT_REFUSED) == []

    def test_a_deposed_leaders_late_change_is_not_followed(self) -> None:
        bench, base = self.ready()
        bench.leader()
        late = self.whole(bench, 2, applications={A: named("a1")})
        bench.feed(ChangeRead(bench.at(), change_between(base, late)))
        assert bench.worker.seen == Epoch(0, 1)

    def test_a_leader_of_an_earlier_version_that_overlooks_changes_is_not_followed(self) -> None:
        """It goes on from the last whole document: what a change moved would start a second time."""
        bench, base = self.ready()
        bench.feed(ChangeRead(bench.at(), change_between(base, self.whole(bench, 2))))
        term = bench.leader()
        overlooks = self.whole(bench, 1, term, applications={A: named("a1")}, reads_changes=False)
        bench.feed(DocumentRead(bench.at(), overlooks))
        (refused,) = facts(bench.asked, FactKind.DOCUMENT_REFUSED)
        assert "of an earlier version" in str(refused.detail["reason"])
        assert bench.worker.seen == Epoch(0, 2)
        term = bench.leader()
        bench.feed(DocumentRead(bench.at(), self.whole(bench, 1, term)))
        assert bench.worker.seen == Epoch(term, 1)

    def test_it_says_that_it_reads_changes_and_replicas(self) -> None:
        assert ready().pong.reads_changes
        assert ready().pong.reads_replicas


@pytest.mark.rule("SH-8")
class TestPongs:
    def test_workers_pong_at_once_with_their_state_and_the_last_epoch_they_saw(self) -> None:
        bench = running()
        sequence = bench.pong.sequence
        pong = only(bench.ping(), SendPong)[0].pong
        assert (pong.round, pong.term, pong.seen) == (7, 0, Epoch(0, 1))
        assert pong.applications[A].state is RunState.RUNNING
        assert pong.sequence == sequence + 1

    @pytest.mark.rule("SH-10")
    @pytest.mark.parametrize("caught_up", [True, False])
    def test_always_answer_with_their_identity(self, caught_up: bool) -> None:
        bench = ready() if caught_up else Bench()
        pong = only(bench.ping(), SendPong)[0].pong
        assert (pong.worker, pong.incarnation, pong.host) == ("w", ME, "host-1")
        assert (pong.tags, pong.capacity) == ({"gpu"}, Capacity(4000, 8000))
        assert (pong.seen, pong.leaving, pong.applications) == (None, False, {})

    @pytest.mark.rule("SH-10")
    def test_a_worker_says_that_it_is_there_before_any_leader_asks(self) -> None:
        bench = ready()
        assert (bench.pong.sequence, bench.pong.round, bench.pong.term) == (1, 0, -1)

    def test_one_pong_for_each_change_of_state_and_none_without(self) -> None:
        bench = ready()
        bench.start(A, "a1")
        assert len(only(bench.asked, SendPong)) == 1
        assert len(only(bench.document({A: named("a1")}), SendPong)) == 1
        assert len(only(bench.stored(A, "a1"), SendPong)) == 1
        assert len(only(bench.feed(ProcessStarted(A, 1)), SendPong)) == 1
        assert not bench.feed(Wakeup())
        assert not bench.feed(PartRead(bench.at(), A, "sha", 0))
        assert bench.pong.sequence == 4

    def test_changes_that_come_one_after_the_other_are_said_together(self) -> None:
        bench = Bench(Worker("w", ME, "host-1", replace(OPTIONS, min_pong_interval_s=0.1)))
        bench.caught_up()
        applications = [ApplicationId("t", "c", f"a{number}") for number in range(20)]
        for application in applications:
            bench.start(application, "x")
        bench.now += 1.0
        assert only(bench.document({a: named("x") for a in applications}), SendPong), "the first one at once"
        for application in applications:
            assert not only(bench.stored(application, "x"), SendPong)
            assert not only(bench.feed(ProcessStarted(application, bench.process(application))), SendPong)
        assert bench.worker.next_wakeup == pytest.approx(bench.now + 0.1)
        assert not bench.feed(Wakeup(), after_s=0.05)
        (pong,) = only(bench.feed(Wakeup(), after_s=0.051), SendPong)
        assert {report.state for report in pong.pong.applications.values()} == {RunState.RUNNING}
        assert len(pong.pong.applications) == 20
        assert not only(bench.feed(Wakeup(), after_s=1.0), SendPong)
        bench.exited(applications[0], 1)
        assert only(bench.ping(), SendPong), "a ping is answered at once"
        bench.stop(applications[1])
        assert only(bench.feed(Stop()) + [e for a in applications[1:] for e in bench.exited(a)], Finished)
        assert bench.pong.leaving

    def test_the_more_applications_the_rarer_are_pongs_of_changes(self) -> None:
        options = WorkerOptions(min_pong_interval_s=0.1)
        assert [options.pong_interval_s(n) for n in (0, 500, 2000)] == pytest.approx([0.1, 0.1, 0.4])

    def test_a_ping_of_a_leader_that_was_followed_by_another_is_not_answered(self) -> None:
        bench = ready()
        term = bench.leader()
        assert not bench.ping(term=term - 1)
        assert only(bench.ping(term=term), SendPong)


@pytest.mark.rule("SH-10")
class TestNoLeader:
    def test_workers_go_on_with_what_they_run_while_no_leader_is_there(self) -> None:
        bench = running()
        bench.ping()
        effects = bench.feed(Wakeup(), after_s=DEADLINE_S)
        assert facts(effects, FactKind.LEADER_SILENT)
        effects += bench.feed(Wakeup(), after_s=DEADLINE_S * 100)
        assert len(facts(effects, FactKind.LEADER_SILENT)) == 1
        assert not only(effects, StopProcess)
        bench.exited(A, 1)
        bench.feed(Wakeup(), after_s=1.0)
        assert [start.run for start in only(bench.asked, StartProcess)] == [1, 2]

    def test_silence_ends_with_a_ping_and_can_come_again(self) -> None:
        bench = ready()
        assert facts(bench.ping(), FactKind.LEADER_HEARD)
        assert not facts(bench.ping(), FactKind.LEADER_HEARD)
        assert bench.worker.next_wakeup == bench.now + DEADLINE_S
        assert facts(bench.feed(Wakeup(), after_s=DEADLINE_S), FactKind.LEADER_SILENT)
        bench.document({})
        assert bench.worker.next_wakeup is None
        assert facts(bench.ping(), FactKind.LEADER_HEARD)
        assert facts(bench.feed(Wakeup(), after_s=DEADLINE_S), FactKind.LEADER_SILENT)

    def test_a_document_without_any_ping_is_silence_too(self) -> None:
        bench = Bench()
        bench.document({})
        bench.caught_up()
        assert bench.worker.next_wakeup == bench.now + DEADLINE_S
        assert facts(bench.feed(Wakeup(), after_s=DEADLINE_S), FactKind.LEADER_SILENT)

    def test_another_leader_is_worth_a_word(self) -> None:
        bench = ready()
        bench.ping(term=0)
        assert [f.detail["term"] for f in facts(bench.ping(term=9), FactKind.LEADER_HEARD)] == [9]


@pytest.mark.rule("SH-13")
class TestOneAtATime:
    def test_a_worker_that_is_no_longer_named_says_so_only_when_nothing_runs(self) -> None:
        bench = running()
        bench.document({A: named("a1", None)})
        assert (bench.pong.seen, bench.state()) == (Epoch(0, 2), RunState.STOPPING)
        bench.exited(A)
        assert A not in bench.pong.applications

    def test_a_process_that_was_not_yet_started_is_waited_for_too(self) -> None:
        bench = ready()
        bench.start(A, "a1")
        bench.document({A: named("a1")})
        bench.stored(A, "a1")
        bench.document({A: named("a1", None)})
        assert only(bench.asked, StopProcess) == [StopProcess(A, 1)]
        bench.feed(ProcessStarted(A, 1))
        assert bench.state() is RunState.STOPPING
        bench.exited(A, -15)
        assert A not in bench.pong.applications

    def test_named_again_it_starts_anew_once_the_old_process_has_ended(self) -> None:
        bench = running()
        bench.document({A: named("a1", None)})
        bench.document({A: named("a1")})
        assert len(only(bench.asked, StartProcess)) == 1
        bench.exited(A)
        assert len(only(bench.asked, StartProcess)) == 2

    def test_the_exit_of_a_process_that_is_not_the_present_one_means_nothing(self) -> None:
        bench = running()
        assert not bench.feed(ProcessExited(A, 99, 0))
        assert not bench.feed(ProcessStarted(B, 1))
        assert bench.worker.processes == {A: 1}

    def test_the_token_is_the_offset_of_the_document_that_first_named_it(self) -> None:
        bench = running()
        first = bench.end
        bench.start(B, "b1")
        bench.document({A: named("a1"), B: named("b1", "x")})
        bench.exited(A, 1)
        bench.feed(Wakeup(), after_s=1.0)
        assert [start.token for start in only(bench.asked, StartProcess)] == [first, first]

    @pytest.mark.parametrize("epoch", [Epoch(0, 3), Epoch(7, 1)], ids=["one missed", "another leader"])
    def test_the_token_is_a_later_one_where_another_worker_may_have_been_named_between(
        self, epoch: Epoch
    ) -> None:
        bench = running()
        bench.document({A: named("a1")}, epoch=epoch)
        later = bench.end
        bench.exited(A, 1)
        bench.feed(Wakeup(), after_s=1.0)
        assert only(bench.asked, StartProcess)[-1].token == later

    def test_the_token_grows_with_an_interruption(self) -> None:
        bench = running()
        bench.document({A: named("a1", "x")})
        bench.exited(A)
        bench.document({A: named("a1")})
        first, second = only(bench.asked, StartProcess)
        assert first.token < second.token == bench.end


@pytest.mark.rule("SH-14")
class TestExclusive:
    def assigned(self, **policy: Any) -> Bench:
        bench = ready()
        bench.start(A, "a1")
        bench.stored(A, "a1", **policy)
        bench.document({A: named("a1", mode=Mode.EXCLUSIVE)})
        assert bench.state() is RunState.PENDING
        assert bench.reason() == "no leader has answered this worker yet"
        return bench

    @pytest.mark.parametrize(
        "event",
        [
            PartRead(RecordMetadata(90, 0, 100), B, "sha", 0),
            StartRead(RecordMetadata(90, 0, 100), StartCommand(B, "b1", archive_of("b1"), Mode.AVAILABLE)),
            StopRead(RecordMetadata(90, 0, 100), StopCommand(B, "s1")),
            Unreadable(RecordMetadata(90, 0, 100), "?", "?"),
            ProcessExited(B, 99, 0),
            FilesRefused(B, "b1", "?"),
        ],
        ids=lambda event: type(event).__name__,
    )
    def test_once_its_time_has_come_it_is_stopped_whatever_is_read(self, event: WorkerEvent) -> None:
        bench = running(Mode.EXCLUSIVE)
        assert not only(bench.feed(event, after_s=STOPPED_AFTER_S - 0.1), StopProcess)
        assert only(bench.feed(event, after_s=0.2), StopProcess) == [StopProcess(A, 1)]

    def test_one_that_starts_meanwhile_is_stopped_in_time_too(self) -> None:
        bench = running(Mode.EXCLUSIVE)
        bench.start(B, "b1")
        exclusive = Mode.EXCLUSIVE
        bench.document({A: named("a1", mode=exclusive), B: named("b1", mode=exclusive)}, epoch=Epoch(0, 2))
        bench.stored(B, "b1", stop_timeout_s=10.0)
        assert bench.worker.next_wakeup == pytest.approx(bench.now + ALLOWED_S - 10.0)
        bench.feed(ProcessStarted(B, 2))
        effects = bench.feed(PartRead(bench.at(), C, "sha", 0), after_s=ALLOWED_S - 9.9)
        assert only(effects, StopProcess) == [StopProcess(B, 2)]

    def test_it_starts_once_a_leader_has_heard_a_pong_and_until_its_deadline(self) -> None:
        bench = self.assigned()
        sent_at, heard = bench.now, bench.pong.sequence
        bench.now += 3.0
        (start,) = only(bench.ping(heard), StartProcess)
        assert start.deadline == pytest.approx(sent_at + ALLOWED_S)

    @pytest.mark.parametrize(
        ("case", "ping"),
        [
            ("another incarnation was heard", {"incarnation": Incarnation("folder", 2)}),
            ("another folder was heard", {"incarnation": OTHER}),
            ("a pong that it never sent", {"heard": 99}),
            ("nobody was heard", {"heard": None}),
            ("an earlier leader", {"term": -1}),
            ("the leader's document is later", {"epoch": Epoch(0, 2)}),
        ],
    )
    def test_it_does_not_start_if(self, case: str, ping: dict[str, Any]) -> None:
        bench = self.assigned()
        bench.leader()
        term = ping.pop("term", bench.end)
        bench.ping(**{"heard": bench.pong.sequence, **ping}, term=term)
        assert not only(bench.asked, StartProcess)
        assert bench.state() is RunState.PENDING

    def test_it_starts_by_the_document_that_the_permission_speaks_of(self) -> None:
        bench = self.assigned()
        bench.ping(bench.pong.sequence, epoch=Epoch(0, 2))
        assert bench.reason() == "the leader has a later assignment than this worker has read"
        effects = bench.document({A: named("a1", mode=Mode.EXCLUSIVE)})
        assert len(only(effects, StartProcess)) == 1

    def test_a_document_that_a_fenced_leader_was_about_to_publish_is_not_waited_for(self) -> None:
        bench = self.assigned()
        bench.ping(bench.pong.sequence, epoch=Epoch(0, 2))
        bench.ping(bench.pong.sequence, term=9, epoch=Epoch(0, 1))
        assert len(only(bench.asked, StartProcess)) == 1

    def test_each_newer_permission_extends_the_deadline(self) -> None:
        bench = running(Mode.EXCLUSIVE)
        bench.now += 10.0
        bench.ping()
        sent_at, heard = bench.now, bench.pong.sequence
        bench.now += 10.0
        (extend,) = only(bench.ping(heard), ExtendDeadline)
        assert extend.runs == {A: 1}
        assert extend.deadline == pytest.approx(sent_at + ALLOWED_S)
        assert not only(bench.ping(heard), ExtendDeadline)
        assert not only(bench.ping(1), ExtendDeadline)
        assert bench.worker.next_wakeup == extend.deadline - 5.0

    def test_a_worker_that_hears_no_leader_within_its_deadline_stops(self) -> None:
        bench = running(Mode.EXCLUSIVE)
        (start,) = only(bench.asked, StartProcess)
        until = start.deadline
        assert until is not None
        assert bench.worker.next_wakeup == until - 5.0
        bench.now = until - 5.0
        assert only(bench.feed(Wakeup()), StopProcess) == [StopProcess(A, 1)]
        assert bench.state() is RunState.STOPPING
        bench.exited(A, -9)
        assert (bench.state(), bench.pong.applications[A].restarts) == (RunState.PENDING, 0)
        assert "no leader has answered this worker in time" in bench.reason()
        assert "40 s" in bench.reason()
        assert "5 s" in bench.reason()

    def test_what_its_supervisor_ended_at_the_deadline_has_not_failed(self) -> None:
        bench = running(Mode.EXCLUSIVE, max_restarts=0)
        bench.now += STOPPED_AFTER_S + 6.0
        bench.exited(A, -9)
        assert bench.state() is RunState.PENDING

    def test_it_starts_again_when_the_leader_is_back(self) -> None:
        bench = running(Mode.EXCLUSIVE)
        bench.feed(Wakeup(), after_s=STOPPED_AFTER_S)
        bench.exited(A, -15)
        bench.ping()
        assert len(only(bench.asked, StartProcess)) == 1
        bench.ping(bench.pong.sequence)
        assert len(only(bench.asked, StartProcess)) == 2

    @pytest.mark.parametrize(
        ("round_s", "stop_timeout_s", "left_s", "remedy"),
        [
            (0.0, ALLOWED_S, 0, f"{LONGER}, or a shorter stop_timeout_s in the manifest"),
            (15.0, 5.0, 29, f"{LONGER}, or a shorter stop_timeout_s in the manifest"),
            (17.0, 5.0, 29, LONGER),
        ],
    )
    def test_a_stop_timeout_that_does_not_fit_between_two_rounds_never_starts(
        self, round_s: float, stop_timeout_s: float, left_s: int, remedy: str
    ) -> None:
        """Each start would end in a stop, although no leader was ever silent.

        A shorter stop timeout is named only where there is one that fits.
        """
        bench = self.assigned(stop_timeout_s=stop_timeout_s)
        bench.document({A: named("a1", mode=Mode.EXCLUSIVE)}, round_s=round_s)
        for _ in range(3):
            bench.ping(bench.pong.sequence)
        assert not only(bench.asked, StartProcess)
        assert bench.reason() == (
            "exclusive applications would be stopped between two rounds: deadline_s 40 less clock drift 4, "
            f"safety_margin_s 2 and the stop timeout {stop_timeout_s:g} leaves {left_s} s, and two rounds "
            f"take {2 * round_s:g} s: {remedy}"
        )

    def test_what_did_not_fit_starts_under_a_leader_with_other_rounds(self) -> None:
        bench = self.assigned()
        bench.document({A: named("a1", mode=Mode.EXCLUSIVE)}, round_s=15.0)
        bench.ping(bench.pong.sequence)
        assert not only(bench.asked, StartProcess)
        bench.document({A: named("a1", mode=Mode.EXCLUSIVE)}, round_s=10.0)
        assert len(only(bench.asked, StartProcess)) == 1

    def test_what_is_available_runs_on_beside_it(self) -> None:
        bench = running(Mode.EXCLUSIVE)
        bench.start(B, "b1")
        bench.stored(B, "b1")
        bench.document({A: named("a1", mode=Mode.EXCLUSIVE), B: named("b1")})
        effects = bench.feed(Wakeup(), after_s=DEADLINE_S)
        assert only(effects, StopProcess) == [StopProcess(A, 1)]

    def test_a_permission_that_comes_late_does_not_extend_what_is_being_stopped(self) -> None:
        bench = running(Mode.EXCLUSIVE)
        bench.now += 10.0
        bench.ping()
        heard = bench.pong.sequence
        bench.now += ALLOWED_S - 5.0
        effects = bench.ping(heard)
        assert only(effects, StopProcess) == [StopProcess(A, 1)]
        assert not only(effects, ExtendDeadline)

    def test_a_restart_needs_a_permission_too(self) -> None:
        bench = running(Mode.EXCLUSIVE)
        bench.now += STOPPED_AFTER_S - 0.5
        bench.exited(A, 1)
        assert bench.state() is RunState.BACKING_OFF
        bench.feed(Wakeup(), after_s=1.0)
        assert bench.state() is RunState.PENDING
        assert len(only(bench.asked, StartProcess)) == 1

    def test_a_longer_deadline_counts_from_the_next_ping(self) -> None:
        bench = running(Mode.EXCLUSIVE)
        sequence = bench.pong.sequence
        (extend,) = only(bench.ping(sequence, deadline_s=100.0), ExtendDeadline)
        assert extend.deadline == pytest.approx(bench.now + 88.0)

    def test_pongs_are_remembered_only_while_they_can_be_answered(self) -> None:
        bench = ready()
        for _ in range(MAX_UNANSWERED * 2):
            bench.ping()
        assert len(bench.worker._permission._sent) == MAX_UNANSWERED
        bench.now += DEADLINE_S + 1
        bench.ping()
        assert len(bench.worker._permission._sent) == 1
        bench.ping()
        bench.ping(bench.pong.sequence)
        assert min(bench.worker._permission._sent) == bench.pong.sequence - 1


@pytest.mark.rule("SH-16")
class TestBadRecords:
    def test_a_record_that_cannot_be_read_is_set_aside_and_workers_go_on(self) -> None:
        bench = ready()
        (report,) = bench.feed(Unreadable(bench.at(17), "cmd:t/c/A", "no JSON"))
        assert isinstance(report, Report)
        assert report.fact.kind is FactKind.RECORD_SET_ASIDE
        assert report.fact.detail == {"offset": 17, "key": "cmd:t/c/A", "reason": "no JSON"}
        bench.start(A, "a1")
        assert only(bench.document({A: named("a1")}), StoreFiles)

    def test_files_that_cannot_be_used_are_a_failure_with_the_reason(self) -> None:
        bench = ready()
        bench.start(A, "a1")
        bench.document({A: named("a1")})
        refused = bench.feed(FilesRefused(A, "a1", "entry '../x' leaves the folder"))
        assert facts(refused, FactKind.FILES_REFUSED)
        assert (bench.state(), bench.reason()) == (RunState.FAILED, "entry '../x' leaves the folder")
        assert len(facts(bench.asked, FactKind.APPLICATION_FAILED)) == 1

    def test_however_long_a_reason_is_the_pong_stays_small(self) -> None:
        bench = ready()
        bench.start(A, "a1")
        bench.document({A: named("a1")})
        bench.feed(FilesRefused(A, "a1", "wrong " * 10_000))
        assert bench.reason().startswith("wrong wrong")
        assert len(bench.reason()) == MAX_REASON_CHARS

    def test_files_that_were_refused_are_tried_again_when_they_are_written_again(self) -> None:
        bench = ready()
        bench.start(A, "a1")
        bench.document({A: named("a1")})
        bench.feed(FilesRefused(A, "a1", "part 2 of 3 is missing"))
        assert only(bench.keep(A, "a1", original=1), StoreFiles) == [StoreFiles(A, "a1", archive_of("a1"))]

    def test_files_that_were_refused_are_tried_again_when_it_is_named_anew(self) -> None:
        bench = ready()
        bench.start(A, "a1")
        bench.document({A: named("a1")})
        bench.feed(FilesRefused(A, "a1", "no space left on device"))
        bench.document({A: named("a1")})
        assert bench.state() is RunState.FAILED, "it goes on being named"
        bench.document({A: named("a1", None)})
        effects = bench.document({A: named("a1")})
        assert only(effects, StoreFiles) == [StoreFiles(A, "a1", archive_of("a1"))]
        assert bench.state() is RunState.PENDING
        assert only(bench.feed(FilesStored(A, "a1", POLICY)), StartProcess)

    def test_what_was_refused_while_it_was_taken_away_is_tried_again_too(self) -> None:
        bench = ready()
        bench.start(A, "a1")
        bench.document({A: named("a1")})
        bench.document({A: named("a1", "x")})
        bench.feed(FilesRefused(A, "a1", "no space left on device"))
        effects = bench.document({A: named("a1")})
        assert only(effects, StoreFiles) == [StoreFiles(A, "a1", archive_of("a1"))]
        assert bench.state() is RunState.PENDING

    def test_answers_that_nobody_asked_for_mean_nothing(self) -> None:
        bench = ready()
        assert not bench.feed(FilesStored(A, "a1", POLICY))
        assert not bench.feed(FilesRefused(A, "a1", "?"))


@pytest.mark.rule("SH-17")
class TestRestarts:
    @pytest.mark.parametrize(
        ("restart", "code", "state"),
        [
            ("always", 0, RunState.BACKING_OFF),
            ("always", 1, RunState.BACKING_OFF),
            ("always", None, RunState.BACKING_OFF),
            ("on_failure", 0, RunState.FINISHED),
            ("on_failure", 1, RunState.BACKING_OFF),
            ("on_failure", -9, RunState.BACKING_OFF),
            ("on_failure", None, RunState.BACKING_OFF),
            ("never", 0, RunState.FINISHED),
            ("never", 3, RunState.FINISHED),
            ("never", None, RunState.FAILED),
        ],
    )
    def test_what_becomes_of_a_process_that_ended_by_itself(
        self, restart: str, code: int | None, state: RunState
    ) -> None:
        bench = running(restart=restart)
        bench.exited(A, code, "no such file" if code is None else "")
        assert bench.state() is state
        bench.feed(Wakeup(), after_s=1000.0)
        assert (len(only(bench.asked, StartProcess)) == 2) is (state is RunState.BACKING_OFF)

    @pytest.mark.parametrize(
        ("code", "error", "reason"),
        [
            (3, "", "exit code 3"),
            (-9, "", "killed by signal 9"),
            (None, "no memory", "could not be started: no memory"),
        ],
    )
    def test_the_reason_says_how_it_ended(self, code: int | None, error: str, reason: str) -> None:
        bench = running()
        bench.exited(A, code, error)
        assert bench.reason() == reason

    def test_restart_with_backoff_and_failed_after_a_limit(self) -> None:
        bench = running()
        for delay_s, restarts in ((1.0, 1), (2.0, 2)):
            bench.exited(A, 1)
            assert (bench.state(), bench.pong.applications[A].restarts) == (RunState.BACKING_OFF, restarts)
            assert bench.worker.next_wakeup is not None
            assert bench.worker.next_wakeup - bench.now == pytest.approx(delay_s)
            bench.feed(Wakeup(), after_s=delay_s / 2)
            assert bench.state() is RunState.BACKING_OFF
            bench.feed(Wakeup(), after_s=delay_s / 2)
            bench.feed(ProcessStarted(A, bench.process(A)))
        effects = bench.exited(A, 1)
        assert bench.state() is RunState.FAILED
        assert bench.reason() == "exit code 1, after 2 restarts within the restart window"
        assert len(facts(effects, FactKind.APPLICATION_FAILED)) == 1
        assert not only(bench.feed(Wakeup(), after_s=1000.0), StartProcess)

    def test_the_delay_has_a_limit(self) -> None:
        bench = running(max_restarts=100)
        for _ in range(20):
            bench.exited(A, 1)
            assert bench.worker.next_wakeup is not None
            waits_s = bench.worker.next_wakeup - bench.now
            bench.feed(Wakeup(), after_s=waits_s)
        assert waits_s == pytest.approx(8.0)

    def test_a_run_that_was_healthy_for_the_window_starts_afresh(self) -> None:
        bench = running()
        for _ in range(5):
            bench.now += 100.0
            bench.exited(A, 1)
            assert bench.worker.next_wakeup == bench.now + 1.0
            bench.feed(Wakeup(), after_s=1.0)
        assert bench.pong.applications[A].restarts == 5

    def test_what_was_told_to_stop_has_not_failed(self) -> None:
        bench = running(max_restarts=0)
        bench.document({A: named("a1", None)})
        assert not facts(bench.exited(A, -9), FactKind.APPLICATION_FAILED)

    @pytest.mark.rule("SH-9")
    def test_what_fails_after_a_leader_has_changed_has_failed(self) -> None:
        """The next leader names it anew while it runs: that grants no further restarts."""
        bench = running(max_restarts=0)
        bench.document({A: named("a1")}, epoch=Epoch(bench.leader(), 1))
        effects = bench.exited(A, 1)
        assert bench.state() is RunState.FAILED
        assert not only(effects + bench.ping(term=bench.worker.term), StartProcess)

    def test_it_is_tried_again_when_it_is_named_anew_by_documents_of_which_some_were_compacted(self) -> None:
        bench = running(max_restarts=0)
        bench.exited(A, 1)
        assert bench.state() is RunState.FAILED
        bench.number += 1
        assert only(bench.document({A: named("a1")}), StartProcess)

    def test_named_anew_after_it_failed_it_has_all_its_restarts_again(self) -> None:
        bench = running(max_restarts=0)
        bench.exited(A, 1)
        bench.document({A: named("a1", None)})
        assert not bench.pong.applications
        bench.document({A: named("a1")})
        assert len(only(bench.asked, StartProcess)) == 2

    def test_on_a_stop_all_processes_are_stopped_and_awaited_and_leave_is_taken_last(self) -> None:
        bench = running()
        bench.start(B, "b1")
        bench.stored(B, "b1")
        bench.document({A: named("a1"), B: named("b1")})
        effects = bench.feed(Stop())
        assert set(only(effects, StopProcess)) == {StopProcess(A, 1), StopProcess(B, 2)}
        assert not bench.pong.leaving
        bench.feed(Stop())
        bench.document({A: named("a1"), B: named("b1")})
        bench.ping()
        bench.exited(B)
        assert (bench.worker.finished, bench.pong.leaving) == (False, False)
        effects = bench.exited(A)
        assert isinstance(effects[-1], Finished)
        assert (bench.pong.leaving, bench.pong.applications) == (True, {})
        assert len(only(bench.asked, StartProcess)) == 2
        assert bench.worker.finished
        assert bench.worker.next_wakeup is None
        assert not bench.ping()

    @pytest.mark.parametrize("caught_up", [True, False])
    def test_a_worker_that_runs_nothing_leaves_at_once(self, caught_up: bool) -> None:
        bench = ready() if caught_up else Bench()
        effects = bench.feed(Stop())
        assert [type(effect) for effect in effects] == [SendPong, Report, Finished]
        assert bench.pong.leaving

    def test_what_backs_off_is_not_waited_for(self) -> None:
        bench = running()
        bench.exited(A, 1)
        bench.feed(Stop())
        assert bench.worker.finished


@pytest.mark.rule("SH-3")
class TestFacts:
    """What the history needs of a worker: one token from the start to the end, and an order of documents."""

    def told(self, bench: Bench, *kinds: FactKind) -> list[Fact]:
        return [e.fact for e in only(bench.asked, Report) if e.fact.kind in kinds]

    @pytest.mark.rule("AU-3")
    def test_all_of_a_run_carries_the_token_of_its_start(self) -> None:
        bench = running()
        token = bench.end
        bench.document({A: named("a1")}, epoch=Epoch(0, 9))
        assert only(bench.asked, StartProcess)[0].token == token
        bench.stop(A)
        bench.exited(A, -15)
        kinds = (
            FactKind.PROCESS_STARTING,
            FactKind.PROCESS_STARTED,
            FactKind.PROCESS_STOPPING,
            FactKind.PROCESS_EXITED,
        )
        told = self.told(bench, *kinds)
        assert [(fact.kind, fact.token, fact.detail["run"]) for fact in told] == [
            (kind, token, 1) for kind in kinds
        ]
        assert told[0].detail["mode"] == "available"

    @pytest.mark.rule("AU-3", "SH-17")
    def test_a_process_that_was_killed_beside_the_worker_has_its_exit_told(self) -> None:
        """By its shim at the deadline: nobody has told it to stop here."""
        bench = running(Mode.EXCLUSIVE)
        token = only(bench.asked, StartProcess)[0].token
        exited = ProcessExited(A, bench.process(A), -9, at=bench.now)
        (told,) = facts(bench.feed(exited, after_s=60.0), FactKind.PROCESS_EXITED)
        assert (told.token, told.detail["code"]) == (token, -9)
        assert told.at == bench.now - 60.0, "a worker that was stopped hears of it late"
        (starting,) = self.told(bench, FactKind.PROCESS_STARTING)
        assert starting.detail["mode"] == "exclusive"

    @pytest.mark.rule("AU-3")
    def test_a_start_after_a_gap_between_documents_has_a_token_of_its_own(self) -> None:
        bench = running()
        bench.document({A: named("a1")}, epoch=Epoch(0, 9))
        bench.exited(A, 1)
        bench.feed(Wakeup(), after_s=1.0)
        tokens = [fact.token for fact in self.told(bench, FactKind.PROCESS_STARTING, FactKind.PROCESS_EXITED)]
        assert tokens == [tokens[0], tokens[0], bench.end]
        assert tokens[0] != bench.end

    @pytest.mark.rule("AU-4")
    def test_a_start_that_is_told_after_the_stop_is_not_reported(self) -> None:
        """Else its steps would be out of order."""
        bench = ready()
        bench.start(A, "a1")
        bench.document({A: named("a1")})
        bench.stored(A, "a1")
        bench.stop(A)
        assert not facts(bench.feed(ProcessStarted(A, bench.process(A))), FactKind.PROCESS_STARTED)
        assert facts(bench.exited(A, -15), FactKind.PROCESS_EXITED)

    @pytest.mark.rule("AU-3")
    def test_what_still_runs_when_the_worker_ends_by_a_fault_is_said_to_have_ended(self) -> None:
        bench = running()
        assert [(f.kind, f.application, f.token, f.detail["error"]) for f in bench.worker.exits("gone")] == [
            (FactKind.PROCESS_EXITED, A, only(bench.asked, StartProcess)[0].token, "gone")
        ]
        bench.exited(A, 1)
        assert bench.worker.exits("gone") == []

    @pytest.mark.rule("AU-4", "SH-7")
    def test_the_version_is_where_the_document_stands_and_the_term_is_the_last_known(self) -> None:
        bench = ready()
        first = bench.leader()
        (adopted,) = facts(bench.document(epoch=Epoch(first, 1)), FactKind.DOCUMENT_ADOPTED)
        assert (adopted.version, adopted.revision, adopted.term) == (bench.end, bench.end, first)
        second, version = bench.leader(), adopted.version
        (refused,) = facts(bench.document(epoch=Epoch(first, 2)), FactKind.DOCUMENT_REFUSED)
        assert (refused.version, refused.revision, refused.term) == (version, bench.end, second)
        (later,) = facts(bench.document(epoch=Epoch(second, 1)), FactKind.DOCUMENT_ADOPTED)
        assert later.version == bench.end
        assert later.version > version


class TestTwoFoldersUnderOneId:
    def test_it_runs_nothing_and_says_so_once(self) -> None:
        bench = running()
        effects = bench.document({A: named("a1")}, incarnation=OTHER)
        effects += bench.document({A: named("a1")}, incarnation=OTHER)
        (fact,) = facts(effects, FactKind.WORKER_REFUSED)
        assert fact.detail["host"] == "host-2"
        assert only(effects, StopProcess) == [StopProcess(A, 1)]
        assert facts(bench.document({}, incarnation=Incarnation("third", 1)), FactKind.WORKER_REFUSED)

    def test_its_own_predecessor_is_nothing_to_speak_of(self) -> None:
        bench = ready()
        assert not facts(bench.document(incarnation=Incarnation("folder", 2)), FactKind.WORKER_REFUSED)


def _cost_of_starts(count: int) -> Counter[str]:
    """Start N applications, 50 a second, with a change of the document for each pong; count operations."""
    bench = Bench(Worker("w", ME, "host-1", WorkerOptions()))
    bench.caught_up()
    applications = [ApplicationId("t", "c", f"a{number}") for number in range(count)]
    for application in applications:
        bench.start(application, "x")
    bench.document({application: named("x") for application in applications})
    base = bench.worker._accepted
    assert base is not None
    document, counts = base[0], Counter[str]()

    def counted(kind: type, name: str) -> Any:
        call = getattr(kind, name)

        def count_and_call(*arguments: Any) -> Any:
            counts[name] += 1
            return call(*arguments)

        return mock.patch.object(kind, name, count_and_call)

    with counted(Worker, "_must_stop"), counted(WorkerFiles, "_settled"):
        for application in applications:
            bench.stored(application, "x")
            effects = bench.feed(ProcessStarted(application, bench.process(application)), after_s=0.02)
            if (at := bench.worker.next_wakeup) is not None and at <= bench.now:
                effects += bench.feed(Wakeup())
            for pong in only(effects, SendPong):
                counts["reports"] += len(pong.pong.applications)
                running = {a for a, r in pong.pong.applications.items() if r.state is RunState.RUNNING}
                entries = {
                    a: replace(entry, state=ApplicationState.RUNNING) if a in running else entry
                    for a, entry in document.applications.items()
                }
                bench.number += 1
                epoch = replace(document.epoch, number=bench.number)
                after = replace(document, epoch=epoch, consumed=bench.end, applications=entries)
                bench.feed(ChangeRead(bench.at(), change_between(document, after)))
                document = after
    assert bench.worker.seen == document.epoch
    return counts


class TestBounds:
    @pytest.mark.rule("SH-8")
    def test_an_event_of_one_application_looks_at_no_other(self) -> None:
        bench = ready()
        applications = [ApplicationId("t", "c", f"a{number}") for number in range(100)]
        for application in applications:
            bench.start(application, "x")
        bench.document({application: named("x") for application in applications})
        for application in applications:
            bench.stored(application, "x")
            bench.feed(ProcessStarted(application, bench.process(application)))
        looked: list[str] = []
        must_stop = Worker._must_stop

        def look(worker: Worker, run: Any, assignment: Any, now: float) -> str:
            looked.append(run.application.application)
            return must_stop(worker, run, assignment, now)

        with mock.patch.object(Worker, "_must_stop", look):
            bench.start(B, "b1")
            bench.feed(PartRead(bench.at(), B, "sha", 0))
            assert not looked
            bench.stop(applications[7])
            bench.exited(applications[7])
            assert set(looked) == {"a7"}
            bench.feed(Wakeup())
            assert set(looked) == {"a7"}
            bench.ping()
            assert len(set(looked)) == 100

    @pytest.mark.rule("SH-8")
    def test_many_starts_one_after_the_other_cost_in_proportion_to_their_number(self) -> None:
        """Each pong has all applications, and each change of a document was compared with all of them."""
        few, many = _cost_of_starts(200), _cost_of_starts(800)
        assert few.keys() == many.keys() == {"_must_stop", "_settled", "reports"}
        for what, count in many.items():
            assert count <= 5 * few[what], (what, few, many)

    @pytest.mark.rule("SH-5")
    def test_commands_of_stopped_applications_are_forgotten(self) -> None:
        bench = ready()
        for number in range(50):
            application = ApplicationId("t", "c", f"a{number}")
            bench.start(application, "x")
            bench.document({application: named("x", mode=Mode.EXCLUSIVE)})
            bench.stored(application, "x")
            bench.stop(application)
        bench.document({})
        assert not bench.worker._files.applications
        assert len(only(bench.asked, DropFiles)) == 50
        assert not bench.worker._files._stops

    def test_stops_without_a_leader_are_remembered_up_to_a_limit(self) -> None:
        bench = ready()
        for number in range(MAX_STOPS + 10):
            bench.stop(ApplicationId("t", "c", f"a{number}"))
        assert len(bench.worker._files._stops) == MAX_STOPS
        assert len(bench.worker._files.undecided) == MAX_STOPS
        bench.document({})
        assert not bench.worker._files.undecided

    def test_superseded_starts_that_nobody_decided_on_are_remembered_up_to_a_limit(self) -> None:
        bench = running()
        for number in range(MAX_STARTS * 2):
            bench.start(A, f"x{number}")
        assert len(bench.worker._files._started[A]) == 1 + MAX_STARTS
        assert bench.worker._files.find(A, "a1")
        assert not only(bench.asked, StopProcess)


class TestOptions:
    @pytest.mark.parametrize(
        ("values", "told"),
        [
            ({"clock_drift_ratio": 0.5}, "clock_drift_ratio 0.5"),
            ({"clock_drift_ratio": -0.1}, "clock_drift_ratio -0.1"),
            ({"clock_drift_ratio": float("nan")}, "clock_drift_ratio nan"),
            ({"safety_margin_s": -1.0}, "safety_margin_s -1"),
            ({"safety_margin_s": float("inf")}, "safety_margin_s inf"),
            ({"keep_files_s": -1.0}, "keep_files_s -1"),
            ({"keep_files_s": float("nan")}, "keep_files_s nan"),
            ({"tags": "gpu"}, "tags 'gpu' must be a set of tags"),
        ],
    )
    def test_what_no_deadline_could_be_kept_with_is_refused(self, values: dict[str, Any], told: str) -> None:
        with pytest.raises(InvalidSettings, match=told):
            WorkerOptions(**values)

    def test_a_tag_is_a_name(self) -> None:
        with pytest.raises(InvalidName, match="tag"):
            WorkerOptions(frozenset({"a b"}))

    @pytest.mark.rule("SH-14")
    def test_a_deadline_that_passes_between_two_rounds_is_refused_with_the_numbers(self) -> None:
        OPTIONS.check_deadline(40.0, round_s=10.0, stop_timeout_s=5.0)
        with pytest.raises(InvalidSettings, match=r"leaves 29 s, and two rounds take 30 s"):
            OPTIONS.check_deadline(40.0, round_s=15.0, stop_timeout_s=5.0)


class TestStates:
    @contextmanager
    def recorded(self) -> Iterator[set[tuple[Any, Any]]]:
        seen: set[tuple[Any, Any]] = set()
        move = Table.move

        def recording(table: Table[Any, Any], state: Any, trigger: Any) -> Any:
            seen.add((state, trigger))
            return move(table, state, trigger)

        with mock.patch.object(Table, "move", recording):
            yield seen

    def lives(self) -> Iterator[None]:
        """A few lives of an application, by which each row of the table happens."""
        for code, policy in (
            (1, {}),
            (0, {"restart": "never"}),
            (1, {"max_restarts": 0}),
        ):
            for has_started in (True, False):
                bench = ready()
                bench.start(A, "a1")
                bench.document({A: named("a1")})
                bench.stored(A, "a1", **policy)
                if has_started:
                    bench.feed(ProcessStarted(A, 1))
                bench.exited(A, code)
                yield None
                bench.feed(Wakeup(), after_s=1.0)
        for has_started in (True, False):
            bench = ready()
            bench.start(A, "a1")
            bench.document({A: named("a1")})
            bench.stored(A, "a1")
            if has_started:
                bench.feed(ProcessStarted(A, 1))
            bench.stop(A)
            if not has_started:
                bench.feed(ProcessStarted(A, 1))
            bench.exited(A)
            yield None
        bench = ready()
        bench.start(A, "a1")
        bench.document({A: named("a1")})
        bench.feed(FilesRefused(A, "a1", "bad"))
        yield None
        for passed, policy in ((True, {}), (False, {"max_restarts": 0})):
            bench = checked_process(**policy)
            if passed:
                check(bench)
            check(bench, *["no"] * 3, after_s=HEALTH.grace_period_s)
            bench.exited(A)
            yield None

    def test_every_row_of_the_table_happens_and_no_other(self) -> None:
        with self.recorded() as seen:
            for _ in self.lives():
                pass
        assert seen == set(RUN.rows)

    def test_every_state_is_reached(self) -> None:
        assert {RUN.first, *RUN.rows.values()} == set(RunState)
        assert {trigger for _, trigger in RUN.rows} == set(RunTrigger)

    def test_a_row_that_is_not_there_is_a_broken_invariant(self) -> None:
        with pytest.raises(InternalError, match="run"):
            RUN.move(RunState.FAILED, RunTrigger.START)


@pytest.mark.rule("SH-28")
class TestReplicas:
    """No worker runs two replicas of an application at a time, also not while they move."""

    SECOND = A.numbered(1)

    def entry(self, worker: str | None, command: str = "a1") -> ApplicationEntry:
        return replace(named(command, worker), replicas=2)

    @pytest.fixture
    def bench(self) -> Bench:
        """A worker that runs the second replica of A."""
        bench = ready()
        bench.start(A, "a1")
        bench.stored(A, "a1")
        bench.document({A: self.entry("other"), self.SECOND: self.entry("w")})
        bench.feed(ProcessStarted(self.SECOND, bench.process(self.SECOND)))
        return bench

    def test_one_runs_from_the_files_of_the_application(self, bench: Bench) -> None:
        (store,) = only(bench.asked, StoreFiles)
        assert store.application == A
        (start,) = only(bench.asked, StartProcess)
        assert (start.application, start.replicas) == (self.SECOND, 2)
        assert bench.pong.applications.keys() == {self.SECOND}
        assert bench.state(self.SECOND) is RunState.RUNNING

    def test_one_starts_once_the_process_of_another_has_ended(self, bench: Bench) -> None:
        """As on a worker that was cut off, and is given another one while it still runs the first."""
        effects = bench.document({A: self.entry("w"), self.SECOND: self.entry("other")})
        assert only(effects, StopProcess) == [StopProcess(self.SECOND, bench.process(self.SECOND))]
        assert only(effects, StartProcess) == []
        assert bench.reason(A) == "t/c/A#1 still runs on this worker"
        effects = bench.exited(self.SECOND)
        assert [start.application for start in only(effects, StartProcess)] == [A]
        assert only(effects, DropFiles) == []

    def test_another_number_leaves_it_running(self, bench: Bench) -> None:
        before = {A: self.entry("other"), self.SECOND: self.entry("w")}
        effects = bench.document({each: replace(entry, replicas=3) for each, entry in before.items()})
        assert only(effects, StopProcess) == only(effects, StartProcess) == []

    def test_one_that_is_scaled_away_ends_and_the_files_of_others_stay(self, bench: Bench) -> None:
        one = replace(self.entry("other"), replicas=1)
        gone = replace(self.entry(None), state=ApplicationState.STOPPING)
        effects = bench.document({A: one, self.SECOND: gone})
        assert only(effects, StopProcess) == [StopProcess(self.SECOND, bench.process(self.SECOND))]
        bench.exited(self.SECOND)
        assert bench.pong.applications == {}
        assert only(bench.asked, DropFiles) == []
        assert only(bench.feed(Wakeup(), after_s=KEEP_S), DropFiles) == [DropFiles(A, "a1", stays=True)]

    @pytest.mark.rule("SH-5")
    def test_a_stop_of_the_application_stops_it(self, bench: Bench) -> None:
        effects = bench.stop(A)
        assert only(effects, StopProcess) == [StopProcess(self.SECOND, bench.process(self.SECOND))]
        assert only(bench.exited(self.SECOND), DropFiles) == [DropFiles(A, "a1", False)]

    @pytest.mark.rule("SH-24")
    def test_files_stay_while_one_is_to_run_elsewhere_and_another_one_has_finished(
        self, bench: Bench
    ) -> None:
        known = bench.worker._adopted
        assert known is not None
        finished = replace(self.entry(None), state=ApplicationState.FINISHED)
        document = replace(
            known,
            epoch=Epoch(0, known.epoch.number + 1),
            consumed=bench.end,
            applications={**known.applications, self.SECOND: finished},
        )
        bench.exited(self.SECOND)
        effects = bench.feed(ChangeRead(bench.at(), change_between(known, document)))
        assert only(effects, DropFiles) == []
