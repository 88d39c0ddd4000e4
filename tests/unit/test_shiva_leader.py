"""The Shiva leader, one event at a time: each test quotes the sentence that it holds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar
from unittest import mock

import pytest

from rebalanser.core.allocation import Capacity, Requests
from rebalanser.core.allocation.weighted import _Packing
from rebalanser.core.shiva.changes import change_between, changed
from rebalanser.core.shiva.leader import Leader
from rebalanser.core.shiva.messages import (
    CaughtUp,
    ChangeRead,
    Deposed,
    DocumentRead,
    DropRecords,
    Fact,
    FactKind,
    KeepCommands,
    Kept,
    LeaderEffect,
    LeaderEvent,
    LeaderRead,
    PartRead,
    PongRead,
    PublishDocument,
    Published,
    RecordMetadata,
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
from rebalanser.core.shiva.publishing import ENTRIES_RATIO
from rebalanser.core.shiva.records import (
    AssignmentDocument,
    DocumentChange,
    Heard,
    KeptCommand,
    LeaderAnnouncement,
    Ping,
    Pong,
    RunReport,
    ScaleCommand,
    StartCommand,
    StopCommand,
    WorkerCommand,
)
from rebalanser.core.shiva.safeguards import Safeguards
from rebalanser.core.shiva.states import (
    APPLICATION_BEGINS,
    APPLICATION_ENDS,
    APPLICATION_STEPS,
    check_step,
)
from rebalanser.core.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationState,
    Archive,
    Cordon,
    Epoch,
    Incarnation,
    Leaving,
    Mode,
    RunState,
    SetAside,
    WorkerEntry,
)
from rebalanser.errors import InternalError, InvalidSettings

OPTIONS = LeaderOptions(
    round_s=10.0,
    missed_rounds=1,
    deadline_s=30.0,
    settle_time_s=0.5,
    min_publish_interval_s=1.0,
    retention_s=1000.0,
    retention_bytes=1_000_000,
    drop_after_s=60.0,
)
A, B, C, D = (ApplicationId("tenant", "channel", name) for name in "abcd")
GIVEN_TERM = 100
SMALL = Archive("sha", 1000, 2)
EffectT = TypeVar("EffectT")


def incarnation(worker: str, number: int = 1) -> Incarnation:
    return Incarnation(f"folder-of-{worker}", number)


class Rig:
    """A leader with a log, a clock and workers, all moved by hand."""

    def __init__(self, options: LeaderOptions = OPTIONS, *, offset: int = GIVEN_TERM) -> None:
        self.leader = Leader("leader-1", options)
        self.now = 1000.0
        self.wall_ms = 1_000_000_000
        self.effects: list[LeaderEffect] = []
        self._offset = offset
        self._sequences = itertools.count(1)
        self._base: AssignmentDocument | None = None
        self.reads_changes = False
        self.reads_replicas = True

    def feed(self, event: LeaderEvent) -> list[LeaderEffect]:
        if isinstance(event, CaughtUp):
            self._base = self.leader.document
        effects = self.leader.handle(event, self.now, self.wall_ms)
        self.effects += effects
        return effects

    def at(self, size_bytes: int = 100) -> RecordMetadata:
        self._offset += 1
        return RecordMetadata(self._offset, self.wall_ms, size_bytes)

    def take_over(
        self,
        document: AssignmentDocument | None = None,
        term: int = GIVEN_TERM,
        pongs: Iterable[Pong] = (),
    ) -> None:
        self.feed(TookOver(term, document, tuple(pongs)))

    def lead(self, document: AssignmentDocument | None = None) -> None:
        self.take_over(document)
        self.feed(CaughtUp())

    def parts(self, application: ApplicationId, archive: Archive, count: int | None = None) -> None:
        for number in range(archive.parts if count is None else count):
            size = archive.size_bytes // archive.parts
            self.feed(PartRead(self.at(size), application, archive.sha256, number))

    def start(
        self,
        application: ApplicationId,
        command: str = "start-1",
        *,
        mode: Mode = Mode.AVAILABLE,
        tags: Iterable[str] = (),
        archive: Archive = SMALL,
        cpu: int = 0,
        replicas: int = 1,
    ) -> StartCommand:
        self.parts(application, archive)
        requests = Requests(cpu) or None
        record = StartCommand(application, command, archive, mode, frozenset(tags), requests, replicas)
        self.feed(StartRead(self.at(), record))
        return record

    def stop(self, application: ApplicationId, command: str = "stop-1") -> None:
        self.feed(StopRead(self.at(), StopCommand(application, command)))

    def scale(self, application: ApplicationId, replicas: int, command: str = "scale-1") -> int:
        at = self.at()
        self.feed(ScaleRead(at, ScaleCommand(application, command, replicas)))
        return at.offset

    def cordon(self, worker: str, cordon: Cordon | None, command: str = "order-1") -> None:
        self.feed(WorkerCommandRead(self.at(), WorkerCommand(worker, command, cordon)))

    def pong(
        self,
        worker: str,
        runs: Mapping[ApplicationId, RunState | RunReport] | None = None,
        *,
        number: int = 1,
        lineage: str = "",
        seen: Epoch | None = None,
        tags: Iterable[str] = (),
        leaving: bool = False,
        sequence: int | None = None,
        cpu: int | None = None,
    ) -> None:
        """A pong that has seen the last published document, unless told otherwise."""
        document = self.leader.document
        reports = {
            app: state if isinstance(state, RunReport) else RunReport(self.command_of(app), state)
            for app, state in (runs or {}).items()
        }
        self.feed(
            PongRead(
                Pong(
                    worker,
                    Incarnation(lineage or f"folder-of-{worker}", number),
                    sequence or next(self._sequences),
                    1,
                    GIVEN_TERM,
                    seen or (document.epoch if document else None),
                    frozenset(tags),
                    leaving=leaving,
                    applications=reports,
                    reads_changes=self.reads_changes,
                    reads_replicas=self.reads_replicas,
                    capacity=None if cpu is None else Capacity(cpu),
                )
            )
        )

    def command_of(self, application: ApplicationId) -> str:
        return self.entry(application).command

    def pass_s(self, seconds: float) -> None:
        """Let time pass; every wake-up that is asked for happens, and every document is published."""
        until = self.now + seconds
        while (at := self.leader.next_wakeup) is not None and at <= until:
            self.now = max(self.now, at)
            self.feed(Wakeup())
            self.publish_issued()
        self.now = until
        self.wall_ms += int(seconds * 1000)

    def publish_issued(self) -> None:
        issued = [effect.document for effect in self.effects if isinstance(effect, PublishDocument)]
        known = self.leader.document
        if issued and (known is None or issued[-1].epoch > known.epoch):
            self.feed(Published(self.at().offset))

    def settle(self) -> AssignmentDocument:
        """What is published once everything so far has settled."""
        self.publish_issued()
        self.pass_s(1.5)
        return self.document

    @property
    def document(self) -> AssignmentDocument:
        assert self.leader.document is not None
        return self.leader.document

    def entry(self, application: ApplicationId) -> ApplicationEntry:
        return self.document.applications[application]

    def state(self, application: ApplicationId) -> ApplicationState:
        return self.entry(application).state

    def all(self, kind: type[EffectT]) -> list[EffectT]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    @property
    def news(self) -> list[AssignmentDocument]:
        """The documents issued that say more than who leads."""
        issued = [effect.document for effect in self.all(PublishDocument)]
        before = [self._base or AssignmentDocument(Epoch(-1, 0), "", -1, OPTIONS.permission_s), *issued]
        return [now for last, now in itertools.pairwise(before) if _content(now) != _content(last)]

    def facts(self, kind: FactKind) -> list[Fact]:
        return [report.fact for report in self.all(Report) if report.fact.kind is kind]

    @property
    def pings(self) -> list[Ping]:
        return [effect.ping for effect in self.all(SendPing)]

    def keep_company(self, seconds: float, *workers: str) -> None:
        """Let time pass with these workers answering, each with what it was last named for."""
        for _ in range(int(seconds / OPTIONS.round_s * 2)):
            self.pass_s(OPTIONS.round_s / 2)
            for worker in workers:
                self.runs_what_it_should(worker)

    def runs_what_it_should(self, worker: str) -> None:
        named = [app for app, entry in self.document.applications.items() if entry.worker == worker]
        entry = self.document.workers.get(worker)
        self.pong(
            worker,
            dict.fromkeys(named, RunState.RUNNING),
            number=entry.incarnation.number if entry else 1,
            tags=entry.tags if entry else (),
            cpu=entry.capacity.cpu_milli if entry and entry.capacity else None,
        )


def _content(document: AssignmentDocument) -> tuple[object, ...]:
    entries = {
        application: replace(entry, offset=0, timestamp_ms=0)
        for application, entry in document.applications.items()
    }
    return dict(document.workers), entries, document.set_aside, document.deadline_s, dict(document.cordons)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def running(
    rig: Rig, *workers: str, mode: Mode = Mode.AVAILABLE, apps: Iterable[ApplicationId] = (A,)
) -> None:
    """Lead these workers, with these applications running on them."""
    rig.lead()
    for worker in workers:
        rig.pong(worker)
    for app in apps:
        rig.start(app, mode=mode)
    rig.settle()
    for worker in workers:
        rig.runs_what_it_should(worker)
    rig.settle()


def named(worker: str | None, **more: object) -> ApplicationEntry:
    """An entry of a predecessor's document."""
    state = ApplicationState.RUNNING if worker else ApplicationState.WAITING
    entry = ApplicationEntry(
        "start-1", state, Mode.AVAILABLE, SMALL, worker=worker, offset=10, timestamp_ms=1
    )
    return replace(entry, **more)  # type: ignore[arg-type]


def predecessors(
    applications: Mapping[ApplicationId, ApplicationEntry], *workers: str, consumed: int = 50, **more: object
) -> AssignmentDocument:
    document = AssignmentDocument(
        epoch=Epoch(40, 3),
        leader="leader-0",
        consumed=consumed,
        deadline_s=30.0,
        workers={worker: WorkerEntry(incarnation(worker)) for worker in workers},
        applications=applications,
        round_s=OPTIONS.round_s,
    )
    return replace(document, **more)  # type: ignore[arg-type]


@pytest.mark.rule("SH-4")
def test_the_leader_assigns_and_publishes_one_complete_document(rig: Rig) -> None:
    """The leader assigns, and publishes one complete assignment document."""
    running(rig, "w1", "w2", apps=[A, B])
    assert set(rig.document.workers) == {"w1", "w2"}
    assert {rig.entry(A).worker, rig.entry(B).worker} == {"w1", "w2"}
    assert rig.state(A) is rig.state(B) is ApplicationState.RUNNING
    assert rig.document.epoch.term == GIVEN_TERM
    assert rig.document.leader == "leader-1"


@pytest.mark.rule("SH-4")
def test_at_most_one_document_is_under_way(rig: Rig) -> None:
    """At most one PublishDocument is under way, and it is answered."""
    rig.lead()
    rig.pong("w1")
    rig.now += 2
    rig.feed(Wakeup())
    assert len(rig.all(PublishDocument)) == 1
    rig.start(A)
    rig.now += 5
    rig.feed(Wakeup())
    assert len(rig.all(PublishDocument)) == 1
    rig.feed(Published(rig.at().offset))
    assert len(rig.all(PublishDocument)) == 2


@pytest.mark.rule("SH-5")
def test_a_stopped_application_is_taken_out_once_its_worker_has_stopped_it(rig: Rig) -> None:
    """The leader takes it out and republishes."""
    running(rig, "w1")
    rig.stop(A)
    document = rig.settle()
    assert rig.state(A) is ApplicationState.STOPPING
    assert rig.entry(A).worker is None
    assert rig.entry(A).leaving == Leaving("w1", incarnation("w1"), document.epoch, Mode.AVAILABLE)
    rig.pong("w1", {A: RunState.STOPPING})
    assert rig.settle().applications.keys() == {A}
    rig.pong("w1")
    assert rig.settle().applications == {}


@pytest.mark.rule("SH-5")
def test_what_no_worker_runs_is_taken_out_at_once(rig: Rig) -> None:
    running(rig, "w1", apps=[])
    rig.start(A, tags=["gpu"])
    rig.settle()
    assert rig.state(A) is ApplicationState.WAITING
    rig.stop(A)
    assert rig.settle().applications == {}


@pytest.mark.rule("SH-2")
def test_start_stop_start_leaves_the_last(rig: Rig) -> None:
    """Start, stop, start leaves the last; the worker that was still stopping gets it back at once."""
    running(rig, "w1", "w2")
    rig.stop(A)
    rig.settle()
    before = rig.entry(A)
    assert before.leaving is not None
    rig.start(A, "start-2")
    rig.settle()
    assert rig.entry(A).command == "start-2"
    assert (rig.entry(A).worker, rig.entry(A).leaving) == (before.leaving.worker, None)


@pytest.mark.rule("SH-13")
def test_a_start_while_a_stop_goes_on_waits_for_the_worker_that_is_stopping_it(rig: Rig) -> None:
    running(rig, "w1")
    rig.pong("w2", tags=["gpu"])
    rig.settle()
    rig.stop(A)
    rig.settle()
    rig.start(A, "start-2", tags=["gpu"])
    rig.settle()
    assert rig.state(A) is ApplicationState.MOVING
    assert rig.entry(A).worker is None
    rig.pong("w1", {A: RunReport("start-1", RunState.STOPPING)})
    assert rig.settle().applications[A].worker is None
    rig.pong("w1")
    assert rig.settle().applications[A].worker == "w2"


@pytest.mark.rule("SH-4")
def test_a_new_start_is_given_to_the_same_worker_and_clears_its_failures(rig: Rig) -> None:
    running(rig, "w1", "w2")
    worker = rig.entry(A).worker
    assert worker is not None
    rig.pong(worker, {A: RunReport("start-1", RunState.FAILED, 5, "exit code 1")})
    rig.settle()
    assert rig.entry(A).failed_on == {worker: "exit code 1"}
    rig.pong(worker)
    rig.settle()
    second = rig.entry(A).worker
    assert second not in {None, worker}
    rig.start(A, "start-2")
    rig.settle()
    assert (rig.entry(A).worker, rig.entry(A).failed_on) == (second, {})
    assert rig.state(A) is ApplicationState.ASSIGNED


@pytest.mark.rule("SH-14")
def test_a_start_in_another_mode_waits_even_for_the_same_worker(rig: Rig) -> None:
    """What may run on in one mode is not taken over by the other without a stop."""
    running(rig, "w1", mode=Mode.EXCLUSIVE)
    rig.start(A, "start-2", mode=Mode.AVAILABLE)
    rig.settle()
    leaving = rig.entry(A).leaving
    assert leaving is not None
    assert leaving.mode is Mode.EXCLUSIVE
    assert rig.entry(A).worker is None
    rig.keep_company(20)
    assert "w1" not in rig.document.workers
    rig.pong("w2")
    rig.settle()
    assert rig.entry(A).worker is None
    rig.pass_s(8)
    assert rig.entry(A).worker == "w2"


@pytest.mark.rule("SH-4")
def test_the_same_command_again_is_no_restart(rig: Rig) -> None:
    """A command id that the document has is the same start."""
    running(rig, "w1")
    before = rig.document
    rig.start(A, "start-1")
    assert rig.settle() is before
    rig.start(B)
    rig.settle()
    after, entry = rig.entry(A), before.applications[A]
    assert after.offset > entry.offset
    assert replace(after, offset=0, timestamp_ms=0) == replace(entry, offset=0, timestamp_ms=0)


@pytest.mark.rule("SH-9")
def test_nothing_is_published_before_command_has_been_read(rig: Rig) -> None:
    """Commands published while no leader lived are replayed in order, without a storm."""
    rig.take_over()
    rig.pong("w1")
    rig.start(A)
    rig.stop(A)
    rig.start(A, "start-2")
    rig.start(B)
    rig.stop(B)
    rig.start(C)
    assert rig.all(PublishDocument) == []
    assert rig.pings == []
    assert rig.leader.next_wakeup is None
    effects = rig.feed(CaughtUp())
    kinds = [type(effect) for effect in effects if not isinstance(effect, Report)]
    assert kinds == [PublishDocument, SendPing]
    (published,) = rig.all(PublishDocument)
    assert {app: entry.command for app, entry in published.document.applications.items()} == {
        A: "start-2",
        C: "start-1",
    }
    assert {entry.worker for entry in published.document.applications.values()} == {"w1"}


@pytest.mark.rule("SH-9", "SH-20")
def test_a_leader_that_finds_nothing_new_publishes_only_that_it_leads(rig: Rig) -> None:
    """A leader restart with live workers restarts no application."""
    rig.take_over(predecessors({A: named("w1"), B: named("w2")}, "w1", "w2"))
    rig.feed(CaughtUp())
    assert len(rig.pings) == 1
    rig.pong("w1", {A: RunState.RUNNING})
    rig.pong("w2", {B: RunState.RUNNING})
    rig.keep_company(60, "w1", "w2")
    assert rig.news == []
    assert [effect.document.epoch for effect in rig.all(PublishDocument)] == [Epoch(GIVEN_TERM, 1)]
    assert rig.document.leader == "leader-1"
    assert {ping.epoch for ping in rig.pings} == {Epoch(GIVEN_TERM, 1)}


@pytest.mark.rule("SH-9")
def test_what_the_document_reflects_is_not_applied_twice(rig: Rig) -> None:
    """The leader starts from the last assignment document."""
    rig = Rig(offset=0)
    rig.take_over(predecessors({A: named("w1", offset=3, timestamp_ms=rig.wall_ms)}, "w1", consumed=9))
    rig.start(A)
    rig.start(B)
    rig.start(C, "start-9")
    rig.stop(D)
    rig.feed(CaughtUp())
    assert rig.news == [], "B and C were commanded, and had gone, before"
    assert rig.facts(FactKind.START_COMMANDED) == []
    assert rig.facts(FactKind.STOP_COMMANDED) == [
        Fact(FactKind.STOP_COMMANDED, D, term=GIVEN_TERM, revision=10, detail={"command": "stop-1"})
    ]


@pytest.mark.rule("SH-9", "SH-15")
@pytest.mark.parametrize(
    ("copied_from", "expected"), [(10, set()), (61, {A})], ids=["before the stop", "after the stop"]
)
def test_a_kept_command_counts_where_the_clients_record_stood(
    copied_from: int, expected: set[ApplicationId]
) -> None:
    """The copy never overrides a stop that the leader had not read yet."""
    rig = Rig(offset=59)
    rig.take_over(predecessors({A: named("w1")}, "w1"), term=200)
    rig.stop(A)
    start = StartCommand(A, "start-1", SMALL, Mode.AVAILABLE)
    rig.parts(A, start.archive)
    rig.feed(StartRead(rig.at(), KeptCommand(start, copied_from)))
    rig.feed(CaughtUp())
    rig.publish_issued()
    wanted = {
        app
        for app, entry in rig.document.applications.items()
        if entry.state is not ApplicationState.STOPPING
    }
    assert wanted == expected


@pytest.mark.rule("SH-9")
def test_the_newest_document_on_command_serves_if_assignement_has_lost_it(rig: Rig) -> None:
    rig.take_over(None)
    document = predecessors({A: named("w1")}, "w1")
    rig.feed(DocumentRead(RecordMetadata(60, 1, 10), replace(document, epoch=Epoch(40, 2), applications={})))
    rig.feed(DocumentRead(RecordMetadata(61, 1, 10), document))
    rig.feed(CaughtUp())
    assert rig.document == document
    assert rig.news == []


@pytest.mark.rule("SH-7")
@pytest.mark.parametrize("assignement_lost", [True, False])
def test_a_late_document_on_command_is_not_gone_on_from(rig: Rig, assignement_lost: bool) -> None:
    """A deposed leader's late assignment is refused, by its successor's successor as well."""
    last = predecessors({A: named("w1")}, "w1")
    late = predecessors({A: named("w2")}, "w2", epoch=Epoch(20, 900))
    rig.take_over(None if assignement_lost else last)
    rig.feed(DocumentRead(RecordMetadata(30, 1, 10), replace(late, epoch=Epoch(20, 899))))
    if assignement_lost:
        rig.feed(LeaderRead(RecordMetadata(40, 1, 10), LeaderAnnouncement("leader-0")))
        rig.feed(DocumentRead(RecordMetadata(60, 1, 10), replace(last, epoch=Epoch(40, 1))))
        rig.feed(DocumentRead(RecordMetadata(61, 1, 10), last))
    else:
        late = replace(late, epoch=Epoch(50, 1))
    rig.feed(DocumentRead(RecordMetadata(62, 1, 10), late))
    rig.feed(CaughtUp())
    assert rig.document == last
    assert rig.news == []


@pytest.mark.rule("SH-7")
@pytest.mark.parametrize(
    "event",
    [
        LeaderRead(RecordMetadata(GIVEN_TERM + 1, 1, 10), LeaderAnnouncement("leader-2")),
        DocumentRead(RecordMetadata(300, 1, 10), predecessors({}, epoch=Epoch(GIVEN_TERM + 1, 1))),
        Deposed("fenced"),
        Stop(),
    ],
    ids=lambda event: type(event).__name__,
)
@pytest.mark.parametrize("caught_up", [True, False])
def test_only_the_active_leader_acts(rig: Rig, event: LeaderEvent, caught_up: bool) -> None:
    """Only the active leader acts: another term, or being fenced, ends it, and nothing comes afterwards."""
    rig.take_over()
    if caught_up:
        rig.feed(CaughtUp())
        rig.publish_issued()
    effects = rig.feed(event)
    assert isinstance(effects[-1], StepDown)
    assert len(rig.facts(FactKind.STEPPED_DOWN)) == 1
    assert rig.leader.next_wakeup is None
    rig.pong("w1")
    rig.start(A)
    rig.now += 100
    assert rig.feed(Wakeup()) == []
    assert rig.effects[-1] is effects[-1]


@pytest.mark.rule("SH-7")
def test_earlier_terms_and_its_own_records_do_not_end_a_leader(rig: Rig) -> None:
    rig.take_over()
    rig.feed(LeaderRead(RecordMetadata(30, 1, 10), LeaderAnnouncement("leader-0")))
    rig.feed(LeaderRead(RecordMetadata(GIVEN_TERM, 1, 10), LeaderAnnouncement("leader-1")))
    rig.feed(CaughtUp())
    rig.pong("w1")
    rig.feed(DocumentRead(rig.at(), rig.settle()))
    assert rig.all(StepDown) == []


@pytest.mark.rule("SH-7")
def test_epochs_grow(rig: Rig) -> None:
    """Epochs grow from document to document."""
    running(rig, "w1", "w2", apps=[A, B])
    rig.stop(A)
    rig.settle()
    epochs = [effect.document.epoch for effect in rig.all(PublishDocument)]
    assert epochs == sorted(set(epochs))
    assert len(epochs) >= 3


@pytest.mark.rule("SH-8")
def test_each_round_the_leader_pings(rig: Rig) -> None:
    """Each round the leader pings on CONTROL."""
    rig.lead()
    rig.pass_s(35)
    assert [ping.round for ping in rig.pings] == [1, 2, 3, 4]
    assert {(ping.term, ping.leader, ping.deadline_s) for ping in rig.pings} == {
        (GIVEN_TERM, "leader-1", 30.0)
    }


@pytest.mark.rule("SH-8", "SH-14")
def test_a_ping_says_which_pongs_were_heard(rig: Rig) -> None:
    rig.lead(predecessors({}, "w0"))
    rig.pong("w1", sequence=7)
    rig.pass_s(10)
    assert rig.pings[-1].heard == {"w1": Heard(incarnation("w1"), 7)}


@pytest.mark.rule("SH-14")
def test_a_new_worker_is_answered_before_the_next_round(rig: Rig) -> None:
    """Else it could start no exclusive application for up to a round."""
    rig.lead()
    rig.pass_s(3)
    rig.pong("w1", sequence=7)
    rig.pass_s(1)
    assert [ping.round for ping in rig.pings] == [1, 1]
    assert "w1" in rig.pings[-1].heard


@pytest.mark.rule("SH-9", "SH-14")
def test_a_new_leader_answers_the_workers_that_it_takes_over_before_the_next_round(rig: Rig) -> None:
    """Else what its predecessor permitted could run out, and exclusive applications stop."""
    rig.lead(predecessors({A: named("w1", mode=Mode.EXCLUSIVE)}, "w1"))
    assert rig.pings[-1].heard == {}
    for number in range(3):
        rig.pong("w1", {A: RunState.RUNNING}, sequence=number + 1)
    rig.pass_s(5)
    assert [ping.round for ping in rig.pings] == [1, 1]
    assert rig.pings[-1].heard == {"w1": Heard(incarnation("w1"), 3)}


@pytest.mark.rule("SH-8")
def test_an_unchanged_round_changes_nothing(rig: Rig) -> None:
    """An unchanged round changes nothing."""
    running(rig, "w1", "w2", apps=[A, B, C])
    published = len(rig.all(PublishDocument))
    rig.keep_company(200, "w1", "w2")
    assert len(rig.all(PublishDocument)) == published
    assert len(rig.pings) >= 20


@pytest.mark.rule("SH-8")
def test_who_misses_a_full_round_is_removed_and_who_is_new_is_added(rig: Rig) -> None:
    """Who misses `missed_rounds` is removed, who is new is added; a change recomputes and republishes."""
    running(rig, "w1", "w2", apps=[A, B])
    rig.pass_s(10)
    rig.runs_what_it_should("w1")
    assert set(rig.document.workers) == {"w1", "w2"}, "w2 was heard in the first round"
    rig.pass_s(10)
    assert set(rig.document.workers) == {"w1"}
    assert [fact.worker for fact in rig.facts(FactKind.WORKER_REMOVED)] == ["w2"]
    assert rig.entry(A).worker == rig.entry(B).worker == "w1"


@pytest.mark.rule("SH-8")
def test_missed_rounds_are_counted_from_the_last_pong() -> None:
    rig = Rig(replace(OPTIONS, missed_rounds=3, deadline_s=50.0))
    running(rig, "w1")
    silent_since = rig.now
    while rig.document.workers:
        rig.pass_s(1)
    assert 30 <= rig.now - silent_since <= 41.5


def stand_still(rig: Rig, seconds: float, seen: Epoch) -> None:
    """Let time pass with w2 in good health and w1 answering without following any document."""
    for _ in range(int(seconds / 5)):
        rig.pass_s(5)
        rig.pong("w1", {A: RunState.RUNNING}, seen=seen)
        rig.runs_what_it_should("w2")


@pytest.mark.rule("SH-8")
def test_who_answers_and_does_not_follow_is_warned_about_and_then_gone() -> None:
    rig = Rig(replace(OPTIONS, stalled_s=40.0))
    running(rig, "w1", "w2", apps=[A, B])
    assert rig.entry(A).worker == "w1"
    seen = rig.document.epoch
    rig.start(C)
    stand_still(rig, 30, seen)
    (warned,) = rig.facts(FactKind.WORKER_STALLED)
    assert (warned.worker, warned.detail["seen"]) == ("w1", str(seen))
    assert set(rig.document.workers) == {"w1", "w2"}
    stand_still(rig, 45, seen)
    assert set(rig.document.workers) == {"w2"}
    (removed,) = rig.facts(FactKind.WORKER_REMOVED)
    assert removed.detail["reason"] == "it answers and has followed no assignment for 40 s"
    assert rig.entry(A).worker == "w2", "in mode available it is not waited for"
    stand_still(rig, 60, seen)
    assert set(rig.document.workers) == {"w2"}, "what it says does not count"
    rig.pong("w1")
    rig.settle()
    assert set(rig.document.workers) == {"w1", "w2"}, "it follows again"


@pytest.mark.rule("SH-13", "SH-14")
def test_what_is_exclusive_waits_until_a_worker_that_stands_still_must_have_stopped_it() -> None:
    rig = Rig(replace(OPTIONS, stalled_s=40.0))
    running(rig, "w1", "w2", apps=[A, B], mode=Mode.EXCLUSIVE)
    seen = rig.document.epoch
    rig.start(C)
    while not rig.facts(FactKind.WORKER_REMOVED):
        stand_still(rig, 5, seen)
        heard_at = rig.now
    answered = len(rig.pings)
    while rig.entry(A).worker is None:
        stand_still(rig, 5, seen)
    assert rig.now - heard_at >= OPTIONS.permission_s - 5
    assert all("w1" not in ping.heard for ping in rig.pings[answered:])


@pytest.mark.rule("SH-8")
def test_a_leader_that_overslept_blames_no_worker_for_not_following() -> None:
    """What the worker has said in the meantime is still unread."""
    rig = Rig(replace(OPTIONS, stalled_s=40.0))
    running(rig, "w1", "w2", apps=[A, B])
    seen = rig.document.epoch
    rig.start(C)
    stand_still(rig, 30, seen)
    assert rig.facts(FactKind.WORKER_STALLED)
    rig.now += 60
    rig.feed(Wakeup())
    assert rig.facts(FactKind.WORKER_REMOVED) == []


@pytest.mark.rule("SH-8")
def test_who_follows_slowly_does_not_stand_still() -> None:
    rig = Rig(replace(OPTIONS, stalled_s=20.0))
    running(rig, "w1", "w2", apps=[A, B])
    epochs: list[Epoch] = []
    for number in range(15):
        rig.start(C, f"start-{number}")
        rig.settle()
        epochs.append(rig.document.epoch)
        stand_still(rig, 15, epochs[max(0, number - 3)] if number > 3 else epochs[-1])
    assert len(rig.facts(FactKind.WORKER_STALLED)) == 1
    assert rig.facts(FactKind.WORKER_REMOVED) == []


@pytest.mark.rule("SH-9")
def test_a_new_leader_removes_nobody_before_its_second_round(rig: Rig) -> None:
    """A leader corrects from the second round on."""
    rig.lead(predecessors({A: named("w1"), B: named("w2")}, "w1", "w2"))
    rig.pong("w1", {A: RunState.RUNNING})
    rig.pass_s(9.9)
    assert rig.news == []
    rig.pass_s(1)
    assert set(rig.document.workers) == {"w1"}
    assert rig.entry(B).worker == "w1"


@pytest.mark.rule("SH-8")
def test_a_leader_that_overslept_holds_it_against_nobody(rig: Rig) -> None:
    """Pongs that were not read yet were not missed."""
    running(rig, "w1")
    rig.now += 100
    rig.feed(Wakeup())
    rig.publish_issued()
    assert set(rig.document.workers) == {"w1"}
    rig.pass_s(11)
    assert set(rig.document.workers) == set()


@pytest.mark.rule("SH-3")
def test_a_greater_incarnation_of_the_same_folder_takes_over_at_once(rig: Rig) -> None:
    running(rig, "w1", "w2", mode=Mode.EXCLUSIVE)
    holder = rig.entry(A).worker
    assert holder is not None
    rig.pong(holder, number=2)
    document = rig.settle()
    assert document.workers[holder].incarnation == incarnation(holder, 2)
    assert (rig.entry(A).worker, rig.entry(A).leaving) == (holder, None)
    assert rig.state(A) is ApplicationState.ASSIGNED
    rig.pong(holder, {A: RunState.RUNNING}, number=1)
    assert rig.settle() is document, "an older incarnation's pong is ignored"


@pytest.mark.rule("SH-13")
def test_a_greater_incarnation_shows_that_what_was_waited_for_has_ended(rig: Rig) -> None:
    running(rig, "w1", mode=Mode.EXCLUSIVE)
    rig.stop(A)
    rig.settle()
    assert rig.state(A) is ApplicationState.STOPPING
    rig.pong("w1", number=2, seen=Epoch(1, 1))
    assert A not in rig.settle().applications


@pytest.mark.rule("SH-3")
def test_another_folder_under_a_known_id_is_refused_until_the_known_worker_is_gone(rig: Rig) -> None:
    """Of two lineages under one worker id none knows of the other."""
    running(rig, "w1")
    for _ in range(2):
        rig.pong("w1", lineage="elsewhere")
    document = rig.settle()
    assert document.workers["w1"].incarnation == incarnation("w1")
    assert len(rig.facts(FactKind.WORKER_REFUSED)) == 1
    ((about, reason),) = [(aside.key, aside.reason) for aside in document.set_aside]
    assert about == "pong:w1"
    assert "elsewhere" in reason
    assert "w1" not in rig.pings[-1].heard or rig.pings[-1].heard["w1"].incarnation == incarnation("w1")
    rig.pass_s(25)
    assert rig.document.workers == {}
    rig.pong("w1", lineage="elsewhere")
    assert rig.settle().workers["w1"].incarnation.lineage == "elsewhere"


@pytest.mark.rule("SH-8")
def test_a_worker_that_leaves_is_removed_at_once_and_waited_for_no_more(rig: Rig) -> None:
    running(rig, "w1", "w2", mode=Mode.EXCLUSIVE, apps=[A, B])
    rig.stop(A)
    rig.settle()
    leaving = rig.entry(A).leaving
    assert leaving is not None
    rig.pong(leaving.worker, seen=Epoch(0, 0), leaving=True)
    document = rig.settle()
    assert leaving.worker not in document.workers
    assert set(document.applications) == {B}
    assert document.applications[B].worker in document.workers
    assert [fact.worker for fact in rig.facts(FactKind.WORKER_REMOVED)] == [leaving.worker]
    rig.pong(leaving.worker, sequence=1)
    assert rig.settle() is document, "what was read before does not bring it back"


def assigned(worker: str, mode: Mode = Mode.AVAILABLE) -> ApplicationEntry:
    return ApplicationEntry("start-1", ApplicationState.RUNNING, mode, SMALL, worker=worker, offset=20)


def last_pong(worker: str, *, number: int = 1, leaving: bool = True) -> Pong:
    return Pong(worker, incarnation(worker, number), 9, 1, 1, Epoch(40, 3), leaving=leaving)


@pytest.mark.rule("SH-14")
def test_a_document_says_how_long_the_rounds_are(rig: Rig) -> None:
    rig.lead(replace(predecessors({}, "w1"), round_s=0.0))
    assert rig.settle().round_s == OPTIONS.round_s


@pytest.mark.rule("SH-22")
@pytest.mark.parametrize("mode", Mode)
def test_what_left_before_a_take_over_is_not_waited_for(rig: Rig, mode: Mode) -> None:
    """A graceful stop of the leading daemon leaves its applications down no longer than stop and start."""
    document = predecessors({A: assigned("w1", mode)}, "w1", "w2")
    rig.take_over(document, pongs=[last_pong("w1"), last_pong("w2", leaving=False)])
    rig.feed(CaughtUp())
    rig.settle()
    assert set(rig.document.workers) == {"w2"}
    assert (rig.entry(A).worker, rig.entry(A).leaving) == ("w2", None)


@pytest.mark.rule("SH-22", "SH-9")
def test_a_pong_from_before_a_take_over_brings_no_worker_back(rig: Rig) -> None:
    rig.take_over(predecessors({A: assigned("w1")}, "w1"), pongs=[last_pong("w2", leaving=False)])
    rig.feed(CaughtUp())
    rig.settle()
    assert set(rig.document.workers) == {"w1"}
    assert rig.pings[-1].heard == {}


@pytest.mark.rule("SH-22", "SH-3")
@pytest.mark.parametrize("restarted", ["before the last document", "since"])
def test_the_leave_of_an_earlier_process_does_not_remove_a_later_one(rig: Rig, restarted: str) -> None:
    known = 2 if restarted == "before the last document" else 1
    document = predecessors({A: assigned("w1")}, "w1")
    workers = {"w1": replace(document.workers["w1"], incarnation=incarnation("w1", known))}
    rig.take_over(replace(document, workers=workers), pongs=[last_pong("w1")])
    rig.pong("w1", {A: RunReport("start-1", RunState.RUNNING)}, number=2, sequence=1)
    rig.feed(CaughtUp())
    rig.settle()
    assert rig.document.workers["w1"].incarnation.number == 2
    assert rig.entry(A).worker == "w1"


@pytest.mark.rule("SH-22")
def test_a_leader_that_stops_publishes_first_what_no_document_has_said(rig: Rig) -> None:
    running(rig, "w1", "w2", mode=Mode.EXCLUSIVE)
    left = rig.entry(A).worker or ""
    [other] = {"w1", "w2"} - {left}
    rig.pong(left, leaving=True)
    effects = rig.feed(Stop())
    [issued] = [effect.document for effect in effects if isinstance(effect, PublishDocument)]
    assert set(issued.workers) == {other}
    assert issued.applications[A].worker == other
    assert rig.leader.next_wakeup is None, "there is nothing to do but wait for the broker"
    rig.pong(other)
    assert not rig.all(StepDown)
    assert isinstance(rig.feed(Published(rig.at().offset))[-1], StepDown), "and says no second thing"


@pytest.mark.rule("SH-22")
def test_a_leader_that_stops_waits_for_the_document_under_way(rig: Rig) -> None:
    running(rig, "w1", "w2", apps=[A, B])
    rig.start(C)
    rig.now += 5
    rig.feed(Wakeup())
    rig.pong("w1", leaving=True)
    assert not any(isinstance(effect, PublishDocument | StepDown) for effect in rig.feed(Stop()))
    effects = rig.feed(Published(rig.at().offset))
    [issued] = [effect.document for effect in effects if isinstance(effect, PublishDocument)]
    assert set(issued.workers) == {"w2"}
    assert isinstance(rig.feed(Published(rig.at().offset))[-1], StepDown)


@pytest.mark.rule("SH-22")
def test_a_leader_that_stops_with_nothing_to_say_steps_down_at_once(rig: Rig) -> None:
    running(rig, "w1")
    [*_, last] = rig.feed(Stop())
    assert last == StepDown("asked to stop")


def moving(rig: Rig, mode: Mode) -> None:
    """Application A runs on w1, and has to go to w2 by its tags."""
    rig.lead()
    rig.pong("w1", tags=["x"])
    rig.start(A, mode=mode, tags=["x"])
    rig.settle()
    rig.pong("w1", {A: RunState.RUNNING}, tags=["x"])
    rig.pong("w2", tags=["x", "y"])
    rig.settle()
    assert rig.entry(A).worker == "w1"
    rig.start(A, "start-2", mode=mode, tags=["y"])


@pytest.mark.rule("SH-13")
@pytest.mark.parametrize("mode", Mode)
def test_a_moved_application_is_named_for_the_new_worker_after_the_old_one_stopped_it(
    rig: Rig, mode: Mode
) -> None:
    """A moved application starts on the new worker only after the old one has stopped it."""
    moving(rig, mode)
    before = rig.document.epoch
    epoch = rig.settle().epoch
    assert rig.state(A) is ApplicationState.MOVING
    assert (rig.entry(A).worker, rig.entry(A).leaving) == (
        None,
        Leaving("w1", incarnation("w1"), epoch, mode),
    )
    assert rig.entry(A).reason == "to be started on w2 once w1 has stopped it or is gone"
    rig.pong("w1", {}, seen=before, tags=["x"])
    assert rig.settle().applications[A].worker is None, "w1 has not seen yet that it is not named"
    for state in (RunState.STARTING, RunState.RUNNING, RunState.STOPPING):
        rig.pong("w1", {A: state}, tags=["x"])
        assert rig.settle().applications[A].worker is None
    rig.pong("w1", {}, number=0, tags=["x"])
    assert rig.settle().applications[A].worker is None, "another incarnation says nothing"
    rig.pong("w1", {}, tags=["x"])
    assert rig.settle().applications[A].worker == "w2"
    assert rig.entry(A).leaving is None


@pytest.mark.rule("SH-14")
def test_a_cut_off_worker_of_an_available_application_is_replaced_once_it_is_removed(rig: Rig) -> None:
    """Mode available: a cut-off worker runs on."""
    running(rig, "w1", "w2", apps=[A, B])
    gone = rig.entry(A).worker
    other = rig.entry(B).worker
    assert gone is not None
    assert other is not None
    rig.keep_company(25, other)
    assert rig.entry(A).worker == other
    assert rig.entry(A).leaving is None


@pytest.mark.rule("SH-14")
def test_a_cut_off_worker_of_an_exclusive_application_is_waited_for_until_its_deadline(rig: Rig) -> None:
    """Mode exclusive: only then is it started elsewhere."""
    running(rig, "w1", "w2", mode=Mode.EXCLUSIVE, apps=[A, B])
    gone, other = rig.entry(A).worker, rig.entry(B).worker
    assert gone is not None
    assert other is not None
    rig.pong(gone, {A: RunState.RUNNING})
    heard_at = rig.now
    while rig.entry(A).worker != other:
        rig.runs_what_it_should(other)
        rig.pass_s(0.5)
        if gone not in rig.document.workers and rig.now - heard_at < 30:
            leaving = rig.entry(A).leaving
            assert leaving is not None
            assert leaving.worker == gone
    assert 30 <= rig.now - heard_at <= 32


@pytest.mark.rule("SH-14")
def test_a_pong_after_the_removal_begins_the_deadline_anew(rig: Rig) -> None:
    """It is counted from the last pong that a leader can have heard, even of a worker that left since."""
    running(rig, "w1", mode=Mode.EXCLUSIVE)
    rig.pass_s(25)
    assert rig.state(A) is ApplicationState.WAITING
    rig.stop(A)
    rig.pong("w1", {A: RunState.RUNNING})
    rig.settle()
    rig.pass_s(25)
    assert rig.document.workers == {}
    assert rig.state(A) is ApplicationState.STOPPING, "30 s since the first removal are over by far"
    rig.pass_s(5)
    assert rig.document.applications == {}


@pytest.mark.rule("SH-14")
@pytest.mark.parametrize(
    ("own_s", "inherited_s"),
    [(30.0, 30.0), (30.0, 70.0), (70.0, 30.0)],
    ids=["same", "longer before", "shorter before"],
)
def test_a_leader_waits_for_what_its_predecessor_may_have_heard(own_s: float, inherited_s: float) -> None:
    """For a leader that did not read it itself, the deadline is counted since it took over."""
    rig = Rig(replace(OPTIONS, deadline_s=own_s))
    exclusive = named("w1", mode=Mode.EXCLUSIVE)
    rig.lead(predecessors({A: exclusive}, "w1", deadline_s=inherited_s))
    took_over_at = rig.now
    rig.publish_issued()
    rig.pong("w2")
    while rig.entry(A).worker != "w2":
        rig.pass_s(1)
        rig.pong("w2")
    assert max(own_s, inherited_s) <= rig.now - took_over_at <= max(own_s, inherited_s) + 4


@pytest.mark.rule("SH-14")
def test_the_document_says_the_longest_deadline_that_workers_can_still_count_on() -> None:
    """A third leader must wait for what the first one permitted, whatever the second one's settings."""
    rig = Rig()
    rig.lead(predecessors({A: named("w1")}, "w1", deadline_s=70.0))
    assert rig.news == []
    assert rig.pings[-1].deadline_s == 30.0
    rig.keep_company(65, "w1")
    assert rig.document.deadline_s == 70.0
    rig.keep_company(10, "w1")
    assert rig.document.deadline_s == 30.0
    longer = Rig(replace(OPTIONS, deadline_s=90.0))
    longer.lead(predecessors({}, deadline_s=30.0))
    assert longer.pings[-1].deadline_s == 30.0, "its successor would not know of more yet"
    longer.settle()
    longer.pass_s(10)
    assert (longer.document.deadline_s, longer.pings[-1].deadline_s) == (90.0, 90.0)


@pytest.mark.rule("SH-14")
def test_a_permission_carries_the_epoch_of_the_document_under_way(rig: Rig) -> None:
    """A worker that comes back starts nothing by a document older than the one that took it away."""
    running(rig, "w1")
    rig.start(B)
    rig.now += 5
    rig.feed(Wakeup())
    issued = rig.all(PublishDocument)[-1].document.epoch
    assert issued > rig.document.epoch
    rig.now += 5
    rig.feed(Wakeup())
    assert rig.pings[-1].epoch == issued


@pytest.mark.rule("SH-14")
def test_exclusive_is_waited_for_until_the_document_without_it_is_issued(rig: Rig) -> None:
    """Else a pong that comes just then would be answered by a ping that permits the older document."""
    running(rig, "w1", mode=Mode.EXCLUSIVE)
    rig.start(B)
    rig.now += 2
    rig.feed(Wakeup())
    rig.pong("w2")
    for _ in range(8):
        rig.now += 9
        rig.feed(Wakeup())
        rig.pong("w2")
    rig.effects.clear()
    rig.feed(Published(rig.at().offset))
    (issued,) = rig.all(PublishDocument)
    assert issued.document.applications[A].worker is None
    assert issued.document.applications[A].leaving is not None
    rig.publish_issued()
    assert rig.settle().applications[A].worker == "w2"


@pytest.mark.rule("SH-13")
def test_a_worker_that_was_cut_off_may_have_back_what_still_waits_for_it(rig: Rig) -> None:
    """It is the only one that may run it, so that no second one comes about."""
    running(rig, "w1", "w2", mode=Mode.EXCLUSIVE, apps=[A, B])
    gone, other = rig.entry(A).worker, rig.entry(B).worker
    assert gone is not None
    assert other is not None
    rig.keep_company(20, other)
    assert rig.state(A) is ApplicationState.MOVING
    rig.pong(gone, {A: RunState.RUNNING}, seen=Epoch(1, 1))
    rig.settle()
    assert (rig.entry(A).worker, rig.entry(A).leaving) == (gone, None)


@pytest.mark.rule("SH-13")
def test_what_a_returning_worker_still_runs_is_not_started_elsewhere_beside_it(rig: Rig) -> None:
    running(rig, "w1")
    rig.pass_s(25)
    assert (rig.state(A), rig.entry(A).leaving) == (ApplicationState.WAITING, None)
    rig.pong("w2")
    rig.pong("w1", {A: RunState.RUNNING})
    rig.settle()
    assert rig.entry(A).worker == "w1"


@pytest.mark.rule("SH-12")
def test_moves_in_progress_go_on_where_they_were_going(rig: Rig) -> None:
    """Placement is balanced and moves the least: each application moves once."""
    running(rig, "w1", apps=[A, B, C, D])
    rig.pong("w2")
    rig.settle()
    moving_apps = {app for app, entry in rig.document.applications.items() if entry.leaving}
    assert len(moving_apps) == 2
    first, second = sorted(moving_apps)
    stays = dict.fromkeys({A, B, C, D} - moving_apps, RunState.RUNNING)
    rig.pong("w1", {**stays, second: RunState.STOPPING})
    rig.settle()
    assert rig.entry(first).worker == "w2"
    assert {app for app, entry in rig.document.applications.items() if entry.leaving} == {second}
    rig.pong("w3", tags=["x"], leaving=True)
    rig.pong("w1", stays)
    rig.settle()
    assert {app for app, entry in rig.document.applications.items() if entry.worker == "w2"} == moving_apps


@pytest.mark.rule("SH-12")
def test_an_application_runs_only_on_a_worker_that_has_all_of_its_tags(rig: Rig) -> None:
    """An application runs only on a worker that has all of its tags; no tags means anywhere."""
    rig.lead()
    rig.pong("w1", tags=["x"])
    rig.pong("w2", tags=["x", "y"])
    rig.start(A, tags=["x", "y"])
    rig.start(B, tags=["z"])
    rig.start(C)
    rig.settle()
    assert (rig.entry(A).worker, rig.entry(C).worker) == ("w2", "w1")
    assert (rig.state(B), rig.entry(B).reason) == (ApplicationState.WAITING, "no worker has the tag z")
    rig.pong("w3", tags=["z"])
    assert rig.settle().applications[B].worker == "w3"


@pytest.mark.rule("SH-28")
class TestReplicas:
    """An application may have several replicas, numbered from 0, each on another worker."""

    @pytest.fixture
    def three(self, rig: Rig) -> Rig:
        """Three replicas of A run on three workers."""
        rig.lead()
        for worker in ("w1", "w2", "w3"):
            rig.pong(worker)
        rig.start(A, replicas=3)
        rig.settle()
        return self.all_run(rig)

    @staticmethod
    def all_run(rig: Rig, *without: str) -> Rig:
        for worker in rig.document.workers:
            if worker not in without:
                rig.runs_what_it_should(worker)
        rig.settle()
        return rig

    @staticmethod
    def places(rig: Rig) -> dict[str, str | None]:
        return {str(name): entry.worker for name, entry in rig.document.applications.items()}

    def test_each_is_on_another_worker(self, three: Rig) -> None:
        assert self.places(three) == {
            "tenant/channel/a": "w1",
            "tenant/channel/a#1": "w2",
            "tenant/channel/a#2": "w3",
        }
        entries = three.document.applications.values()
        assert {(entry.state, entry.command, entry.replicas) for entry in entries} == {
            (ApplicationState.RUNNING, "start-1", 3)
        }

    def test_the_loss_of_a_worker_moves_only_its_replica(self, three: Rig) -> None:
        three.pong("w4")
        self.all_run(three)
        before = self.places(three)
        three.pong("w2", leaving=True)
        three.settle()
        assert self.places(three) == {**before, "tenant/channel/a#1": "w4"}

    def test_a_surplus_waits_with_the_numbers_until_there_is_a_worker(self, three: Rig) -> None:
        three.pong("w2", leaving=True)
        three.settle()
        entry = three.entry(A.numbered(1))
        reason = "3 replicas on 2 workers that may take them"
        assert (entry.state, entry.reason) == (ApplicationState.WAITING, reason)
        three.pong("w5")
        assert three.settle().applications[A.numbered(1)].worker == "w5"

    def test_where_only_a_cordoned_worker_is_left_the_reason_names_it(self, three: Rig) -> None:
        three.pong("w4")
        three.cordon("w4", Cordon.CORDONED)
        three.pong("w2", leaving=True)
        three.settle()
        assert three.entry(A.numbered(1)).reason == "no other worker could take it than w4 (cordoned)"

    def test_one_that_failed_on_all_workers_without_another_one_has_failed(self, rig: Rig) -> None:
        rig.lead()
        rig.pong("w1")
        rig.pong("w2")
        rig.start(A, replicas=2)
        rig.settle()
        rig.pong("w1", {A: RunState.RUNNING})
        rig.pong("w2", {A.numbered(1): RunReport("start-1", RunState.FAILED, reason="exit code 1")})
        rig.settle()
        rig.pong("w2", {})
        rig.settle()
        assert (rig.state(A), rig.state(A.numbered(1))) == (ApplicationState.RUNNING, ApplicationState.FAILED)

    def test_a_worker_is_given_one_once_another_one_has_left_it(self, three: Rig) -> None:
        """No worker runs two at a time, also not while they move."""
        three.pong("w2", {A.numbered(1): RunReport("start-1", RunState.FAILED, reason="exit code 1")})
        three.settle()
        three.scale(A, 4)
        three.settle()
        fourth = three.entry(A.numbered(3))
        assert (fourth.state, fourth.worker) == (ApplicationState.MOVING, None)
        assert fourth.reason == "to be started on w2 once tenant/channel/a#1 has left it"
        three.pong("w2", {})
        assert three.settle().applications[A.numbered(3)].worker == "w2"

    def test_another_number_leaves_the_others_alone(self, three: Rig) -> None:
        """Another number starts or stops those with the greatest numbers and leaves the others alone."""
        before = three.entry(A)
        offset = three.scale(A, 2)
        three.settle()
        assert three.state(A.numbered(2)) is ApplicationState.STOPPING
        assert three.entry(A) == replace(before, replicas=2)
        three.pong("w3", {})
        assert three.settle().applications.keys() == {A, A.numbered(1)}
        three.scale(A, 3, "scale-2")
        three.settle()
        assert self.places(three)["tenant/channel/a#2"] == "w3"
        assert three.entry(A) == before
        assert three.facts(FactKind.SCALE_COMMANDED)[0] == Fact(
            FactKind.SCALE_COMMANDED,
            A,
            term=GIVEN_TERM,
            version=three.facts(FactKind.SCALE_COMMANDED)[0].version,
            revision=offset,
            detail={"command": "scale-1", "replicas": 2},
        )

    @pytest.mark.rule("SH-18")
    def test_the_present_number_is_answered_by_a_document(self, three: Rig) -> None:
        offset = three.scale(A, 3)
        assert three.settle().consumed >= offset

    def test_a_start_has_a_number_of_its_own(self, three: Rig) -> None:
        three.scale(A, 5)
        three.start(A, "start-2", replicas=1)
        three.settle()
        assert three.entry(A).replicas == 1
        stopped = [each for each, entry in three.document.applications.items() if each != A]
        assert {three.state(each) for each in stopped} == {ApplicationState.STOPPING}

    def test_a_number_for_what_is_not_there_is_set_aside(self, rig: Rig) -> None:
        running(rig, "w1")
        offset = rig.scale(B, 2)
        reason = f"{B} is not to run: start it first"
        assert rig.settle().set_aside == (SetAside(offset, f"scale:{B}", reason),)
        rig.start(B)
        assert rig.settle().set_aside == ()

    @pytest.mark.rule("SH-13")
    def test_none_are_started_beside_a_worker_that_would_not_follow(self, rig: Rig) -> None:
        """A worker of a version without them would count as gone, and run on what is available."""
        running(rig, "w1", "w2", apps=[B])
        rig.reads_replicas = False
        rig.pong("w2", number=2)
        rig.settle()
        rig.start(A, replicas=2)
        rig.settle()
        reason = "w2 is of a version without replicas: upgrade all workers first"
        assert (rig.state(A), rig.entry(A).reason) == (ApplicationState.REFUSED, reason)
        assert {entry.replicas for entry in rig.document.applications.values()} == {1}
        offset = rig.scale(B, 2)
        assert rig.settle().set_aside[-1] == SetAside(offset, f"scale:{B}", reason)
        assert rig.entry(B).replicas == 1
        rig.reads_replicas = True
        rig.pong("w2", number=3)
        rig.start(A, "start-2", replicas=2)
        rig.scale(B, 2, "scale-2")
        rig.settle()
        assert (rig.entry(A).replicas, rig.entry(B).replicas) == (2, 2)

    @pytest.mark.rule("SH-15")
    @pytest.mark.parametrize("dropped", [True, False])
    def test_more_of_what_has_finished_need_the_archive_and_its_budget(self, rig: Rig, dropped: bool) -> None:
        """The archive of what has finished is dropped, and counts no more, until it is started again."""
        running(rig, "w1", "w2", apps=[])
        large = Archive("large", int(OPTIONS.budget_bytes * 0.6), 1)
        rig.start(A, archive=large)
        rig.settle()
        rig.pong("w1", {A: RunState.FINISHED})
        rig.settle()
        if dropped:
            rig.keep_company(2 * OPTIONS.drop_after_s, "w1", "w2")
        else:
            rig.start(B, archive=replace(large, sha256="another"))
            rig.settle()
        offset = rig.scale(A, 2)
        (aside,) = rig.settle().set_aside
        assert (aside.offset, aside.key) == (offset, f"scale:{A}")
        assert ("just being dropped" if dropped else "more than the budget") in aside.reason
        assert (rig.entry(A).replicas, A.numbered(1) in rig.document.applications) == (1, False)

    @pytest.mark.rule("SH-9")
    def test_a_new_leader_follows_the_last_number_after_the_start(self, rig: Rig) -> None:
        rig.take_over()
        rig.scale(A, 4, "scale-0")
        rig.start(A, replicas=2)
        rig.scale(B, 3)
        rig.start(B)
        rig.scale(A, 5)
        rig.scale(A, 3, "scale-2")
        rig.scale(C, 2)
        rig.feed(CaughtUp())
        document = rig.settle()
        assert (document.applications[A].replicas, document.applications[B].replicas) == (3, 1)
        assert len(document.applications) == 4
        assert document.set_aside == ()

    @pytest.mark.rule("SH-9")
    def test_a_new_leader_goes_on_with_the_replicas_of_the_document(self, rig: Rig) -> None:
        second = A.numbered(1)
        entries = {A: named("w1", replicas=2), second: named("w2", replicas=2)}
        rig.take_over(predecessors(entries, "w1", "w2"))
        rig.parts(A, SMALL)
        rig.feed(CaughtUp())
        rig.pong("w1", {A: RunReport("start-1", RunState.RUNNING)})
        rig.pong("w2", {second: RunReport("start-1", RunState.RUNNING)})
        assert rig.settle().applications == entries
        rig.scale(A, 1)
        assert rig.settle().applications[second].state is ApplicationState.STOPPING

    @pytest.mark.rule("SH-9")
    def test_a_start_that_comes_twice_has_its_number_again_as_a_replay_has_it(self, three: Rig) -> None:
        three.scale(A, 1)
        record = StartCommand(A, "start-1", SMALL, Mode.AVAILABLE, replicas=3)
        three.feed(StartRead(three.at(), record))
        assert three.settle().applications[A].replicas == 3

    @pytest.mark.rule("SH-5")
    def test_a_stop_is_for_all(self, three: Rig) -> None:
        three.stop(A)
        three.settle()
        assert {entry.state for entry in three.document.applications.values()} == {ApplicationState.STOPPING}
        for worker in ("w1", "w3", "w2"):
            three.pong(worker, {})
        assert three.settle().applications == {}

    @pytest.mark.rule("SH-5")
    def test_what_is_stopped_and_started_at_once_waits_for_each(self, three: Rig) -> None:
        three.stop(A)
        three.start(A, "start-2", replicas=3)
        three.settle()
        assert {entry.worker for entry in three.document.applications.values()} == {"w1", "w2", "w3"}
        assert {entry.command for entry in three.document.applications.values()} == {"start-2"}

    @pytest.mark.rule("SH-15")
    def test_the_archive_counts_once_and_is_kept_while_one_runs(self, rig: Rig) -> None:
        rig.lead()
        for worker in ("w1", "w2"):
            rig.pong(worker)
        half = Archive("half", int(OPTIONS.budget_bytes * 0.6), 1)
        rig.start(A, replicas=2, archive=half)
        rig.settle()
        assert rig.document.set_aside == ()
        rig.pong("w1", {A: RunReport("start-1", RunState.FINISHED)})
        rig.pong("w2", {A.numbered(1): RunState.RUNNING})
        rig.settle()
        assert (rig.state(A), rig.state(A.numbered(1))) == (
            ApplicationState.FINISHED,
            ApplicationState.RUNNING,
        )
        rig.start(B, archive=half)
        assert "more than the budget" in rig.settle().set_aside[0].reason
        rig.wall_ms += int(OPTIONS.retention_s * 1000)
        rig.pass_s(OPTIONS.round_s)
        (kept,) = rig.all(KeepCommands)
        assert [(each.start.application, each.start.replicas) for each in kept.commands] == [(A, 2)]

    @pytest.mark.rule("SH-14")
    def test_each_waits_for_its_own_worker_in_mode_exclusive(self, rig: Rig) -> None:
        rig.lead()
        for worker in ("w1", "w2", "w3"):
            rig.pong(worker)
        rig.start(A, replicas=2, mode=Mode.EXCLUSIVE)
        rig.settle()
        self.all_run(rig)
        gone = rig.entry(A).worker or ""
        stays = rig.entry(A.numbered(1)).worker or ""
        third = ({"w1", "w2", "w3"} - {gone, stays}).pop()
        rig.keep_company(OPTIONS.round_s * 2, stays, third)
        assert rig.entry(A).worker is None
        assert rig.entry(A).leaving is not None
        assert rig.entry(A.numbered(1)).worker == stays
        rig.keep_company(OPTIONS.permission_s, stays, third)
        assert rig.entry(A).worker == third


@pytest.mark.rule("SH-27")
class TestRequests:
    """A worker never gets more than its capacity; what has no room waits, with the reason."""

    @pytest.fixture
    def full(self, rig: Rig) -> Rig:
        """A and B run on w1, which has no room for more, in 600 and 400 thousandths of its processor."""
        rig.lead()
        rig.pong("w1", cpu=1000)
        rig.start(A, cpu=600)
        rig.start(B, cpu=400)
        rig.settle()
        rig.runs_what_it_should("w1")
        rig.settle()
        assert (rig.entry(A).worker, rig.entry(B).worker) == ("w1", "w1")
        return rig

    def test_what_has_no_room_waits_until_a_worker_has(self, full: Rig) -> None:
        full.start(C, cpu=300)
        full.settle()
        reason = "no worker has 0.3 cpu free: w1, the largest, has 1 cpu"
        assert (full.state(C), full.entry(C).reason) == (ApplicationState.WAITING, reason)
        full.pong("w2", cpu=300)
        assert full.settle().applications[C].worker == "w2"
        assert {full.entry(app).worker for app in (A, B)} == {"w1"}

    @pytest.mark.rule("SH-24")
    def test_what_waits_is_not_published_anew_with_each_change_of_what_is_free(self, full: Rig) -> None:
        full.start(C, cpu=900)
        full.settle()
        before = full.entry(C)
        full.stop(B)
        full.pong("w1", {A: RunState.RUNNING}, cpu=1000)
        full.settle()
        full.pong("w1", {A: RunState.RUNNING}, cpu=1000)
        assert full.settle().applications.keys() == {A, C}
        assert full.entry(C) == before

    def test_what_is_being_stopped_keeps_its_room_until_it_has_ended(self, full: Rig) -> None:
        full.stop(B)
        full.start(C, cpu=400)
        full.settle()
        assert (full.state(C), full.entry(C).worker) == (ApplicationState.MOVING, None)
        assert full.entry(C).reason == "to be started on w1 once others that leave it have made room"
        full.pong("w1", {A: RunState.RUNNING, B: RunState.STOPPING}, cpu=1000)
        assert full.settle().applications[C].worker is None
        full.pong("w1", {A: RunState.RUNNING}, cpu=1000)
        assert full.settle().applications[C].worker == "w1"

    def test_room_is_searched_for_again_only_if_there_may_be_some(self, full: Rig) -> None:
        """A search that finds none takes longest; many documents are published meanwhile."""
        with mock.patch.object(_Packing, "search", autospec=True, side_effect=_Packing.search) as searches:
            full.start(C, cpu=900)
            full.settle()
            assert searches.call_count == 1
            light = [ApplicationId("t", "c", f"light-{number}") for number in range(3)]
            for application in light:
                full.start(application)
                full.settle()
            full.stop(light[0])
            full.settle()
            assert (full.state(C), searches.call_count) == (ApplicationState.WAITING, 1)
            full.stop(B)
            full.start(C, "start-2", cpu=400)
            full.settle()
            searched = searches.call_count
            for _ in range(3):
                full.pong("w1", {A: RunState.RUNNING, B: RunState.STOPPING}, cpu=1000)
                full.settle()
            assert (full.state(C), searches.call_count) == (ApplicationState.MOVING, searched)
            full.pong("w1", {A: RunState.RUNNING}, cpu=1000)
            assert full.settle().applications[C].worker == "w1"

    def test_what_requests_nothing_starts_on_a_full_worker(self, full: Rig) -> None:
        full.start(C)
        assert full.settle().applications[C].worker == "w1"

    def test_what_is_started_anew_with_more_starts_once_others_have_left(self, rig: Rig) -> None:
        rig.lead()
        rig.pong("w1", cpu=1000)
        rig.start(A, cpu=300)
        rig.start(B, cpu=200)
        rig.settle()
        rig.runs_what_it_should("w1")
        rig.start(A, "start-2", cpu=900)
        rig.settle()
        assert (rig.state(A), rig.state(B)) == (ApplicationState.MOVING, ApplicationState.WAITING)
        rig.pong("w1", {B: RunReport("start-1", RunState.STOPPING)}, cpu=1000)
        assert rig.settle().applications[A].worker is None
        rig.pong("w1", {}, cpu=1000)
        assert rig.settle().applications[A].worker == "w1"

    def test_what_is_started_anew_with_less_keeps_its_room_until_its_last_process_has_ended(
        self, full: Rig
    ) -> None:
        full.start(A, "start-2", cpu=300)
        full.start(C, cpu=300)
        full.settle()
        assert (full.entry(A).worker, full.entry(B).worker, full.entry(C).worker) == (None, "w1", None)
        stopping = RunReport("start-1", RunState.STOPPING)
        full.pong("w1", {A: stopping, B: RunState.RUNNING}, cpu=1000)
        assert full.settle().applications[C].worker is None
        full.pong("w1", {B: RunState.RUNNING}, cpu=1000)
        full.settle()
        assert {full.entry(app).worker for app in (A, B, C)} == {"w1"}

    def test_what_is_started_anew_with_more_stays_where_there_is_room(self, rig: Rig) -> None:
        rig.lead()
        rig.pong("w1", cpu=1000)
        rig.pong("w2", cpu=1000)
        rig.start(A, cpu=600)
        rig.settle()
        before = rig.entry(A).worker
        rig.runs_what_it_should(before or "")
        rig.start(A, "start-2", cpu=900)
        rig.settle()
        assert (rig.entry(A).worker, rig.state(A)) == (before, ApplicationState.ASSIGNED)

    def test_a_worker_that_is_smaller_now_gives_up_what_is_too_much(self, full: Rig) -> None:
        full.pong("w1", {}, number=2, cpu=600)
        full.settle()
        assert (full.entry(A).worker, full.entry(B).worker) == ("w1", None)
        assert full.entry(B).reason.startswith("no worker has 0.4 cpu free")

    def test_what_failed_elsewhere_and_has_no_room_waits_for_it(self, full: Rig) -> None:
        full.pong("w2", cpu=500)
        full.start(C, cpu=500)
        full.settle()
        full.pong("w2", {C: RunReport("start-1", RunState.FAILED, 0, "broken")}, cpu=500)
        full.settle()
        assert full.state(C) is ApplicationState.WAITING
        assert full.entry(C).reason.startswith(
            "no worker that may take it has 0.5 cpu free: w1, the largest,"
        )
        assert full.entry(C).failed_on == {"w2": "broken"}

    @pytest.mark.rule("SH-12", "SH-26")
    @pytest.mark.parametrize("cordon", list(Cordon))
    def test_what_has_no_room_beside_a_closed_worker_waits_for_room_and_says_so(
        self, full: Rig, cordon: Cordon
    ) -> None:
        full.pong("w2", cpu=1000)
        full.cordon("w2", cordon)
        full.start(C, cpu=300)
        full.settle()
        which = "worker" if cordon is Cordon.DRAINED else "worker that may take it"
        reason = f"no {which} has 0.3 cpu free: w1, the largest, has 1 cpu"
        assert (full.state(C), full.entry(C).reason) == (ApplicationState.WAITING, reason)

    def test_a_leader_of_an_earlier_version_has_left_requests_out_of_its_document(self, full: Rig) -> None:
        document = full.document
        forgetful = {app: replace(entry, requests=None) for app, entry in document.applications.items()}
        after = Rig(offset=500)
        after.take_over(replace(document, applications=forgetful), term=200)
        for app, cpu in ((A, 600), (B, 400)):
            after.start(app, cpu=cpu)
        after.feed(CaughtUp())
        after.pong("w1", {A: RunState.RUNNING, B: RunState.RUNNING}, cpu=1000)
        after.settle()
        assert (after.entry(A).requests, after.entry(B).requests) == (Requests(600), Requests(400))
        assert (after.entry(A).worker, after.entry(B).worker) == ("w1", "w1")

    def test_a_command_that_is_kept_keeps_its_requests(self, full: Rig) -> None:
        full.keep_company(OPTIONS.retention_s * OPTIONS.keep_ratio + OPTIONS.round_s, "w1")
        assert {command.start.requests for command in kept(full)} == {Requests(600), Requests(400)}

    def test_capacity_bounds_what_is_still_leaving_too(self) -> None:
        guards = Safeguards()
        assert guards.has_room(Capacity(1000, 100), Requests(400), [Requests(600, 100)])
        assert not guards.has_room(Capacity(1000), Requests(401), [Requests(600)])
        assert guards.has_room(Capacity(500), Requests(0, 7), [Requests(600)])
        assert not guards.has_room(Capacity(None, 500), Requests(0, 7), [Requests(0, 494)])


@pytest.mark.rule("SH-12")
def test_a_worker_that_comes_back_with_other_tags_gives_up_what_it_may_not_run(rig: Rig) -> None:
    rig.lead()
    rig.pong("w1", tags=["x"])
    rig.start(A, tags=["x"])
    rig.settle()
    rig.pong("w1", {A: RunState.RUNNING}, tags=["y"])
    rig.settle()
    leaving = rig.entry(A).leaving
    assert (rig.state(A), leaving and leaving.worker) == (ApplicationState.WAITING, "w1")


@pytest.mark.rule("SH-11", "SH-17")
def test_what_fails_on_a_worker_is_placed_elsewhere_and_failed_when_none_is_left(rig: Rig) -> None:
    """`failed` after the limit, placed elsewhere if another worker can take it."""
    running(rig, "w1", "w2")
    first = rig.entry(A).worker
    assert first is not None
    failed = RunReport("start-1", RunState.FAILED, 5, "exit code 3")
    rig.pong(first, {A: failed})
    assert rig.settle().applications[A].leaving is not None
    rig.pong(first, {A: failed})
    rig.settle()
    second = rig.entry(A).worker
    assert second not in {None, first}
    assert second is not None
    rig.pong(second, {A: failed})
    rig.settle()
    rig.pong(second)
    rig.settle()
    assert rig.state(A) is ApplicationState.FAILED
    assert rig.entry(A).failed_on == {first: "exit code 3", second: "exit code 3"}
    words = "failed on every worker: w1, w2; retry 1 comes 30 s after its last failure"
    assert rig.entry(A).reason == words
    published = len(rig.all(PublishDocument))
    rig.keep_company(20, "w1", "w2")
    assert len(rig.all(PublishDocument)) == published
    rig.pong("w3")
    assert rig.settle().applications[A].worker == "w3", "a worker joined that has not failed it"


def fail_on_w1(rig: Rig) -> float:
    """Let A fail on w1, the only worker, and wait until it is named anew; the seconds in between."""
    rig.pong("w1", {A: RunReport("start-1", RunState.FAILED, 5, "no database")})
    failed_at = rig.now
    rig.settle()
    rig.pong("w1")
    while rig.entry(A).worker is None:
        rig.pass_s(1)
        rig.pong("w1")
    return rig.now - failed_at


@pytest.mark.rule("SH-17")
def test_what_failed_is_tried_again_later_and_later_up_to_a_limit() -> None:
    rig = Rig(replace(OPTIONS, retry_initial_s=20.0, retry_max_s=100.0))
    running(rig, "w1")
    waits = [fail_on_w1(rig) for _ in range(5)]
    assert waits == pytest.approx([20, 40, 80, 100, 100], abs=2.5)
    assert rig.entry(A).failed_on == {}


@pytest.mark.rule("SH-17")
def test_after_a_long_time_without_a_failure_retries_begin_anew() -> None:
    rig = Rig(replace(OPTIONS, retry_initial_s=20.0, retry_max_s=100.0))
    running(rig, "w1")
    assert [fail_on_w1(rig) for _ in range(2)] == pytest.approx([20, 40], abs=2.5)
    rig.keep_company(250, "w1")
    assert fail_on_w1(rig) == pytest.approx(20, abs=2.5)


@pytest.mark.rule("SH-17")
def test_a_failure_on_one_worker_is_forgotten_while_it_runs_on_another() -> None:
    """A worker whose disk was full can take it again."""
    rig = Rig(replace(OPTIONS, retry_initial_s=20.0))
    running(rig, "w1", "w2")
    first = rig.entry(A).worker
    assert first is not None
    rig.pong(first, {A: RunReport("start-1", RunState.FAILED, 0, "no space left on device")})
    rig.settle()
    rig.pong(first)
    rig.settle()
    assert rig.entry(A).failed_on
    second = rig.entry(A).worker
    rig.keep_company(30, "w1", "w2")
    assert (rig.entry(A).failed_on, rig.entry(A).worker) == ({}, second)


@pytest.mark.rule("SH-9", "SH-17")
def test_a_new_leader_tries_again_what_had_failed_before_it() -> None:
    rig = Rig(replace(OPTIONS, retry_initial_s=20.0))
    entry = named("w1", state=ApplicationState.FAILED)
    entry = replace(entry, worker=None, failed_on={"w1": "no database"}, reason="failed on every worker: w1")
    rig.lead(predecessors({A: entry}, "w1"))
    rig.pong("w1")
    rig.keep_company(30, "w1")
    assert rig.state(A) is ApplicationState.RUNNING


@pytest.mark.rule("SH-17")
def test_what_is_started_anew_after_it_failed_is_tried_at_once(rig: Rig) -> None:
    running(rig, "w1")
    rig.pong("w1", {A: RunReport("start-1", RunState.FAILED, 5, "no database")})
    rig.settle()
    rig.pong("w1")
    rig.settle()
    rig.start(A, "start-2")
    rig.settle()
    assert (rig.entry(A).worker, rig.entry(A).failed_on) == ("w1", {})
    assert rig.leader.next_wakeup == pytest.approx(rig.now + 10, abs=10)


@pytest.mark.rule("SH-11")
def test_a_report_of_an_earlier_command_says_nothing_of_this_one(rig: Rig) -> None:
    running(rig, "w1")
    rig.start(A, "start-2")
    rig.settle()
    for state in (RunState.RUNNING, RunState.FAILED, RunState.FINISHED):
        rig.pong("w1", {A: RunReport("start-1", state)})
        rig.settle()
        assert rig.state(A) is ApplicationState.ASSIGNED


@pytest.mark.rule("SH-11")
def test_what_finished_is_not_started_again_wherever_workers_go(rig: Rig) -> None:
    running(rig, "w1")
    rig.pong("w1", {A: RunReport("start-1", RunState.FINISHED, 2)})
    rig.settle()
    rig.pong("w1")
    rig.settle()
    entry = rig.entry(A)
    assert (entry.state, entry.worker, entry.leaving) == (ApplicationState.FINISHED, None, None)
    assert (entry.restarts, entry.reason) == (2, "finished on w1")
    rig.pong("w1", number=2)
    rig.pong("w2")
    assert rig.settle().applications[A] == entry
    rig.start(A, "start-2")
    assert rig.settle().applications[A].worker in {"w1", "w2"}


def finishes_while_left(rig: Rig, worker: str) -> None:
    """The worker that is waited for says that it finished by itself, before it was told to stop."""
    assert rig.entry(A).leaving is not None
    rig.pong(worker, {A: RunReport("start-1", RunState.FINISHED)})
    rig.settle()
    assert (rig.state(A), rig.entry(A).worker) == (ApplicationState.FINISHED, None)
    rig.pong(worker)
    assert rig.settle().applications[A].leaving is None


@pytest.mark.rule("SH-11")
def test_what_finishes_while_it_moves_is_not_started_elsewhere(rig: Rig) -> None:
    rig.lead()
    rig.pong("w1")
    for app in (A, B):
        rig.start(app)
    rig.settle()
    rig.runs_what_it_should("w1")
    rig.pong("w2", tags=["x"])
    rig.settle()
    rig.start(C, tags=["x"])
    rig.settle()
    moved = [app for app, entry in rig.document.applications.items() if entry.leaving]
    assert len(moved) == 1
    assert rig.state(moved[0]) is ApplicationState.MOVING
    rig.pong("w1", {moved[0]: RunState.FINISHED})
    rig.settle()
    rig.pong("w1")
    rig.settle()
    assert (rig.state(moved[0]), rig.entry(moved[0]).worker) == (ApplicationState.FINISHED, None)


@pytest.mark.rule("SH-11")
@pytest.mark.parametrize("failed_before", [False, True], ids=["waiting", "failed"])
def test_what_finishes_while_no_worker_may_take_it_is_finished(rig: Rig, failed_before: bool) -> None:
    rig.lead()
    rig.pong("w1", tags=["x"])
    rig.start(A, tags=["x"])
    rig.settle()
    holder = "w1"
    if failed_before:
        rig.pong("w2", tags=["x"])
        for _ in range(2):
            rig.pong("w1", {A: RunState.FAILED}, tags=["x"])
            rig.settle()
        holder = "w2"
    rig.pong(holder, {A: RunState.RUNNING}, tags=["x"])
    rig.settle()
    assert rig.state(A) is ApplicationState.RUNNING
    rig.pong(holder, {A: RunState.RUNNING}, tags=["y"])
    rig.settle()
    assert rig.state(A) is (ApplicationState.FAILED if failed_before else ApplicationState.WAITING)
    finishes_while_left(rig, holder)


@pytest.mark.rule("SH-11")
def test_the_document_says_what_workers_say(rig: Rig) -> None:
    """Status is read from the last assignment document alone."""
    running(rig, "w1")
    rig.pong("w1", {A: RunReport("start-1", RunState.PENDING, 0, "no leader has answered")})
    entry = rig.settle().applications[A]
    assert (entry.state, entry.reason) == (ApplicationState.ASSIGNED, "no leader has answered")
    rig.pong("w1", {A: RunReport("start-1", RunState.RUNNING, 3)})
    assert rig.settle().applications[A].state is ApplicationState.RUNNING
    rig.pong("w1", {})
    assert rig.settle().applications[A].state is ApplicationState.ASSIGNED


@pytest.mark.rule("SH-24")
class TestChanges:
    """Documents are written whole now and then, and between these as changes."""

    APPS = tuple(ApplicationId("tenant", "channel", f"n{number}") for number in range(200))

    def lead(self, options: LeaderOptions = OPTIONS, workers: Iterable[str] = ("w1",)) -> Rig:
        rig = Rig(options)
        rig.reads_changes = True
        running(rig, *workers)
        rig.effects.clear()
        return rig

    @staticmethod
    def restart(rig: Rig, command: str) -> DocumentChange | None:
        """Start an application anew: what is written for the document that says so."""
        rig.effects.clear()
        rig.start(A, command)
        rig.settle()
        return rig.all(PublishDocument)[-1].change

    def test_the_first_document_of_a_term_is_whole_and_the_next_ones_are_changes(self) -> None:
        rig = Rig()
        rig.reads_changes = True
        running(rig, "w1")
        whole, *changes = rig.all(PublishDocument)
        assert whole.change is None
        assert whole.document.reads_changes
        document = whole.document
        assert len(changes) >= 1
        for effect in changes:
            assert effect.change is not None
            document = changed(document, effect.change)
            assert document == effect.document
        heir = Rig(offset=GIVEN_TERM + 1000)
        heir.reads_changes = True
        heir.take_over(document, GIVEN_TERM + 1000)
        heir.feed(CaughtUp())
        heir.settle()
        assert heir.all(PublishDocument)[0].change is None

    def test_a_change_is_of_the_document_before_it_and_says_what_was_consumed(self) -> None:
        rig = self.lead()
        before = rig.document
        change = self.restart(rig, "start-2")
        assert change is not None
        assert (change.base, change.epoch) == (
            before.epoch,
            replace(before.epoch, number=change.epoch.number),
        )
        assert change.consumed > before.consumed
        assert list(change.applications) == [A]
        assert change.workers == {}

    def test_while_a_worker_reads_no_changes_every_document_is_whole(self) -> None:
        """It would act on an old one (a worker of an earlier version says nothing of changes)."""
        rig = self.lead()
        assert self.restart(rig, "start-2") is not None
        rig.reads_changes = False
        rig.pong("w2")
        assert rig.settle().workers.keys() == {"w1", "w2"}
        assert self.restart(rig, "start-3") is None
        rig.pong("w2", leaving=True)
        rig.settle()
        assert self.restart(rig, "start-4") is not None

    def test_a_worker_that_was_not_heard_yet_may_read_no_changes(self) -> None:
        rig = self.lead()
        heir = Rig(offset=GIVEN_TERM + 1000)
        heir.reads_changes = True
        heir.take_over(rig.document, GIVEN_TERM + 1000)
        heir.feed(CaughtUp())
        heir.settle()
        assert self.restart(heir, "start-8") is None
        heir.pong("w1")
        assert self.restart(heir, "start-9") is not None

    def test_after_so_many_changes_a_whole_one_comes(self) -> None:
        rig = self.lead(replace(OPTIONS, snapshot_changes=3))
        kinds = [self.restart(rig, f"start-{number}") is None for number in range(2, 12)]
        assert True in kinds
        first = kinds.index(True)
        assert kinds[first:] == [number % 4 == 0 for number in range(len(kinds) - first)]

    def test_without_changes_all_are_whole(self) -> None:
        rig = self.lead(replace(OPTIONS, snapshot_changes=0))
        assert {self.restart(rig, f"start-{number}") for number in range(2, 6)} == {None}

    def test_once_changes_are_several_times_a_document_a_whole_one_comes(self) -> None:
        """What a reader must read is bounded by the size of what it reads of."""
        rig = self.lead()
        for app in self.APPS:
            rig.start(app)
        rig.settle()
        entries, wholes = 200, 0
        for number in range(2, 22):
            for app in self.APPS[:100]:
                rig.start(app, f"start-{number}")
            rig.effects.clear()
            rig.settle()
            change = rig.all(PublishDocument)[-1].change
            wholes += change is None
            entries = 0 if change is None else entries + change.entries
            assert entries <= ENTRIES_RATIO * 202
        assert 1 <= wholes <= 4

    def test_the_next_document_after_a_time_is_whole(self) -> None:
        rig = self.lead(replace(OPTIONS, snapshot_s=20.0))
        assert self.restart(rig, "start-2") is not None
        for _ in range(3):
            rig.pass_s(9.0)
            rig.runs_what_it_should("w1")
        assert self.restart(rig, "start-3") is None
        assert self.restart(rig, "start-4") is not None

    def test_a_worker_that_cannot_follow_gets_a_whole_one_though_nothing_is_new(self) -> None:
        """A change that it lacks must not leave it behind until the next whole one is due."""
        rig = self.lead()
        seen = rig.document.epoch
        assert self.restart(rig, "start-2") is not None
        rig.runs_what_it_should("w1")
        rig.settle()
        rig.effects.clear()
        for _ in range(3):
            rig.pong("w1", {A: RunState.RUNNING}, seen=seen)
            rig.pass_s(10.0)
        (whole,) = rig.all(PublishDocument)
        assert whole.change is None
        assert rig.facts(FactKind.WORKER_STALLED) != []

    def round_without(self, rig: Rig, seen: Epoch) -> list[AssignmentDocument]:
        """The whole documents of a round in which worker w1 still is where it was."""
        rig.effects.clear()
        rig.pong("w1", seen=seen)
        rig.pass_s(8.5)
        rig.runs_what_it_should("w2")
        return [effect.document for effect in rig.all(PublishDocument) if effect.change is None]

    @pytest.mark.rule("SH-8")
    def test_a_worker_that_lacks_the_whole_one_too_gets_another_one(self) -> None:
        """One that is too slow for the topic's retention can lack what was published for it."""
        rig = self.lead(replace(OPTIONS, stalled_s=60.0), ("w1", "w2"))
        assert self.restart(rig, "start-2") is not None
        seen = rig.document.epoch
        self.restart(rig, "start-3")
        self.round_without(rig, seen)
        self.round_without(rig, seen)
        for number in range(4, 7):
            assert self.restart(rig, f"start-{number}") is not None
            (whole,) = self.round_without(rig, seen)
            assert whole.workers.keys() == {"w1", "w2"}

    @pytest.mark.rule("SH-8")
    def test_the_document_that_removes_a_worker_that_stands_still_is_whole(self) -> None:
        """The worker is known again once it follows that one."""
        rig = self.lead(replace(OPTIONS, stalled_s=60.0), ("w1", "w2"))
        seen = rig.document.epoch
        self.restart(rig, "start-2")
        while rig.document.workers.keys() == {"w1", "w2"}:
            wholes = self.round_without(rig, seen)
        assert wholes[0].workers.keys() == {"w2"}
        assert self.restart(rig, "start-3") is not None, "should it lack that one as well"
        assert sum(len(self.round_without(rig, seen)) for _ in range(5)) == 1

    def test_a_leader_without_assignement_goes_on_from_the_changes_on_command(self) -> None:
        rig = self.lead()
        first = rig.document
        assert self.restart(rig, "start-2") is not None
        last = rig.document
        heir = Rig(offset=GIVEN_TERM + 50)
        heir.take_over(None, GIVEN_TERM + 50)
        heir.feed(DocumentRead(RecordMetadata(GIVEN_TERM + 10, 1, 10), first))
        heir.feed(ChangeRead(RecordMetadata(GIVEN_TERM + 11, 1, 10), change_between(first, last)))
        heir.feed(CaughtUp())
        assert heir.leader.document == last

    def test_a_leader_for_which_changes_are_missing_does_not_lead(self) -> None:
        """It would name workers by where applications ran once."""
        rig = self.lead()
        first = rig.document
        self.restart(rig, "start-2")
        middle = rig.document
        self.restart(rig, "start-3")
        heir = Rig(offset=GIVEN_TERM + 50)
        heir.take_over(None, GIVEN_TERM + 50)
        heir.feed(DocumentRead(RecordMetadata(GIVEN_TERM + 10, 1, 10), first))
        heir.feed(ChangeRead(RecordMetadata(GIVEN_TERM + 12, 1, 10), change_between(middle, rig.document)))
        heir.feed(CaughtUp())
        assert not heir.leader.leads
        assert heir.all(PublishDocument) == []
        assert "are missing" in heir.all(StepDown)[-1].reason

    @pytest.mark.parametrize("on_command", [False, True])
    def test_a_leader_that_finds_changes_and_nowhere_their_document_does_not_lead(
        self, on_command: bool
    ) -> None:
        """COMMAND forgets after days what ASSIGNEMENT has for years."""
        rig = self.lead()
        heir = Rig(offset=GIVEN_TERM + 50)
        heir.feed(TookOver(GIVEN_TERM + 50, None, document_missing=True))
        if on_command:
            heir.feed(DocumentRead(RecordMetadata(GIVEN_TERM + 10, 1, 10), rig.document))
        heir.feed(CaughtUp())
        assert heir.leader.leads is on_command
        assert (heir.all(StepDown) == []) is on_command


@pytest.mark.rule("SH-24")
def test_restarts_of_what_runs_are_no_change(rig: Rig) -> None:
    """The log's growth follows changes: a worker's pongs tell how often it starts a process again."""
    running(rig, "w1")
    rig.settle()
    rig.effects.clear()
    for restarts in range(1, 20):
        for state in (RunState.STOPPING, RunState.BACKING_OFF, RunState.STARTING, RunState.RUNNING):
            reason = "" if state is RunState.RUNNING else f"exit code {restarts}"
            rig.pong("w1", {A: RunReport("start-1", state, restarts, reason)})
            rig.pass_s(1.5)
    assert rig.all(PublishDocument) == []
    assert rig.state(A) is ApplicationState.RUNNING
    rig.pong("w1", {A: RunReport("start-1", RunState.FAILED, 20, "exit code 1")})
    assert rig.settle().applications[A].failed_on == {"w1": "exit code 1"}


@pytest.mark.rule("SH-24")
def test_what_never_comes_up_says_why_and_not_with_each_restart(rig: Rig) -> None:
    running(rig, "w1")
    rig.start(A, "start-2")
    rig.settle()
    rig.pong("w1", {A: RunReport("start-2", RunState.STARTING, 0, "not passed yet")})
    assert rig.settle().applications[A].reason == "not passed yet"
    rig.pong("w1", {A: RunReport("start-2", RunState.BACKING_OFF, 1, "failed 3 times")})
    entry = rig.settle().applications[A]
    assert (entry.state, entry.reason) == (ApplicationState.ASSIGNED, "failed 3 times")
    rig.effects.clear()
    for restarts in range(1, 20):
        rig.pong("w1", {A: RunReport("start-2", RunState.STARTING, restarts, "not passed yet")})
        rig.pass_s(1.5)
        rig.pong("w1", {A: RunReport("start-2", RunState.BACKING_OFF, restarts + 1, "failed 3 times")})
        rig.pass_s(1.5)
    assert rig.all(PublishDocument) == []
    rig.pong("w1", {A: RunReport("start-2", RunState.RUNNING, 20)})
    assert rig.settle().applications[A].state is ApplicationState.RUNNING


@pytest.mark.rule("SH-8")
def test_changes_are_coalesced(rig: Rig) -> None:
    """Commands, changed reports and new workers are acted on as read, coalesced over settle_time_s."""
    rig.lead()
    rig.settle()
    rig.effects.clear()
    rig.pong("w1")
    rig.now += 0.4
    for number in range(50):
        rig.start(ApplicationId("tenant", "channel", f"n{number}"))
    assert rig.all(PublishDocument) == []
    rig.now += 0.1
    rig.feed(Wakeup())
    assert len(rig.all(PublishDocument)) == 1
    rig.publish_issued()
    rig.stop(ApplicationId("tenant", "channel", "n1"))
    rig.pass_s(0.9)
    assert len(rig.all(PublishDocument)) == 1, "at most one document a second"
    rig.pass_s(0.1)
    assert len(rig.all(PublishDocument)) == 2


@pytest.mark.rule("SH-16")
def test_an_unreadable_record_is_set_aside_with_key_offset_and_reason() -> None:
    """A record that can't be read is set aside with key, offset and reason; leader and workers go on."""
    rig = Rig(replace(OPTIONS, max_set_aside=3))
    rig.take_over()
    rig.feed(Unreadable(RecordMetadata(7, 1, 10), "cmd:t/c/a", "no JSON"))
    rig.feed(CaughtUp())
    rig.feed(Unreadable(RecordMetadata(201, 1, 10), "cmd:t/c/b", "no such mode"))
    assert rig.settle().set_aside == (
        SetAside(7, "cmd:t/c/a", "no JSON"),
        SetAside(201, "cmd:t/c/b", "no such mode"),
    )
    for offset in range(202, 205):
        rig.feed(Unreadable(RecordMetadata(offset, 1, 10), "cmd:t/c/b", "again"))
    rig.start(A)
    assert [aside.offset for aside in rig.settle().set_aside] == [202, 203, 204]
    assert A in rig.document.applications
    assert rig.document.consumed >= 204


@pytest.mark.rule("SH-16")
def test_a_poisoned_pong_is_shown_once(rig: Rig) -> None:
    rig.lead()
    for offset in range(3):
        rig.feed(Unreadable(RecordMetadata(offset, 1, 10), "pong:w1", "no JSON"))
    assert rig.settle().set_aside == (SetAside(0, "pong:w1", "no JSON"),)


@pytest.mark.rule("SH-16", "SH-20")
def test_a_poisoned_pong_leaves_the_status_once_it_is_not_heard_any_more(rig: Rig) -> None:
    rig.lead()
    for offset in range(4):
        rig.feed(Unreadable(RecordMetadata(offset, 1, 10), "pong:w1", "no JSON", on_control=True))
        rig.pass_s(OPTIONS.permission_s - OPTIONS.round_s)
    assert [aside.key for aside in rig.settle().set_aside] == ["pong:w1"]
    rig.pass_s(2 * OPTIONS.round_s)
    assert rig.settle().set_aside == ()


@pytest.mark.rule("SH-3", "SH-20")
def test_a_twin_leaves_the_status_once_it_is_gone(rig: Rig) -> None:
    rig.lead()
    rig.pong("w1")
    for _ in range(8):
        rig.pong("w1", lineage="twin")
        rig.keep_company(OPTIONS.round_s, "w1")
    assert [aside.key for aside in rig.document.set_aside] == ["pong:w1"]
    assert len(rig.facts(FactKind.WORKER_REFUSED)) == 1
    rig.keep_company(OPTIONS.permission_s + OPTIONS.round_s, "w1")
    assert rig.document.set_aside == ()


@pytest.mark.rule("SH-16", "SH-20")
@pytest.mark.parametrize("later", ["start", "stop"])
def test_a_refused_start_leaves_the_status_with_the_next_command(rig: Rig, later: str) -> None:
    running(rig, "w1")
    rig.start(A, "start-2", archive=Archive("huge", 900_000, 2))
    rig.start(B, archive=Archive("huge", 900_000, 2))
    assert [aside.key for aside in rig.settle().set_aside] == [f"cmd:{A}", f"cmd:{B}"]
    if later == "start":
        rig.start(A, "start-3")
    else:
        rig.stop(A)
    assert [aside.key for aside in rig.settle().set_aside] == [f"cmd:{B}"]


@pytest.mark.rule("SH-16", "SH-20")
def test_what_nobody_can_read_leaves_the_status_after_a_time() -> None:
    rig = Rig(replace(OPTIONS, set_aside_s=100.0))
    rig.take_over(predecessors({}, set_aside=(SetAside(7, "cmd:t/c/a", "no JSON"),), consumed=9))
    rig.feed(CaughtUp())
    rig.feed(Unreadable(rig.at(), "cmd:t/c/b", "no JSON"))
    rig.pass_s(100)
    assert len(rig.document.set_aside) == 2
    rig.pass_s(OPTIONS.round_s)
    assert rig.settle().set_aside == ()


@pytest.mark.rule("SH-16")
def test_what_a_predecessor_set_aside_is_not_set_aside_again() -> None:
    rig = Rig()
    aside = SetAside(7, "cmd:t/c/a", "no JSON")
    rig.take_over(predecessors({}, set_aside=(aside,), consumed=9))
    rig.feed(Unreadable(RecordMetadata(6, 1, 10), "cmd:t/c/z", "out of the list by now"))
    rig.feed(Unreadable(RecordMetadata(7, 1, 10), "cmd:t/c/a", "no JSON"))
    rig.feed(CaughtUp())
    assert rig.news == []
    rig.feed(Unreadable(RecordMetadata(10, 1, 10), "cmd:t/c/b", "new"))
    assert rig.settle().set_aside == (aside, SetAside(10, "cmd:t/c/b", "new"))


BIG = Archive("big", 350_000, 2)


@pytest.mark.rule("SH-15")
def test_a_start_beyond_the_size_budget_is_refused_with_the_numbers(rig: Rig) -> None:
    """Starts beyond the size budget are refused."""
    running(rig, "w1", apps=[])
    rig.start(A, archive=BIG)
    rig.start(B, archive=replace(BIG, sha256="other"))
    rig.settle()
    assert rig.entry(A).worker == "w1"
    refused = rig.entry(B)
    assert (refused.state, refused.worker) == (ApplicationState.REFUSED, None)
    assert refused.reason == (
        "its archive of 350000 bytes and the 350000 bytes of the other applications are more than the "
        "budget of 400000 bytes (40% of COMMAND's retention of 1000000 bytes)"
    )
    assert rig.facts(FactKind.COMMAND_REFUSED)[0].application == B
    rig.start(A, "start-2", archive=replace(BIG, sha256="newer"))
    rig.settle()
    assert rig.entry(A).command == "start-2", "it takes the place of its own earlier one"
    rig.stop(A)
    rig.settle()
    rig.pong("w1")
    rig.start(B, "start-2", archive=BIG)
    assert rig.settle().applications[B].worker == "w1"


@pytest.mark.rule("SH-15")
def test_a_refused_start_leaves_what_runs_and_keeps_its_command(rig: Rig) -> None:
    """The client's new record has taken the place of the running one's under its key."""
    running(rig, "w1")
    before = rig.entry(A)
    rig.start(A, "start-2", archive=Archive("huge", 900_000, 2))
    rig.settle()
    assert rig.entry(A) == before
    assert [aside.key for aside in rig.document.set_aside] == [f"cmd:{A}"]
    (keep,) = rig.all(KeepCommands)
    start = StartCommand(A, "start-1", before.archive, before.mode)
    assert keep.commands == (KeptCommand(start, before.offset),)
    kept_at = rig.at()
    rig.feed(StartRead(kept_at, keep.commands[0]))
    rig.feed(Kept({A: kept_at}))
    rig.start(B)
    assert rig.settle().applications[A] == replace(
        before, offset=kept_at.offset, timestamp_ms=kept_at.timestamp_ms
    )
    successor = Rig(offset=0)
    successor.take_over(rig.document, term=500)
    successor.feed(StartRead(RecordMetadata(kept_at.offset - 5, 1, 9), replace(start, command="start-2")))
    successor.parts(A, start.archive)
    successor.feed(StartRead(kept_at, keep.commands[0]))
    successor.feed(CaughtUp())
    assert successor.news == []


@pytest.mark.rule("SH-2", "SH-9", "SH-15")
@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        ("stop, start, huge", "start-2"),
        ("start, huge", "start-2"),
        ("huge", "start-1"),
        ("stop, huge", "huge"),
        ("start, stop, huge", "huge"),
        ("stop, huge, start", "start-2"),
        ("stop, huge-1, huge", "huge"),
    ],
)
def test_a_refused_start_that_is_replayed_leaves_what_came_before_it(commands: str, expected: str) -> None:
    """As if a leader had been there all the time: what a refused start leaves may be a stop."""
    rig = Rig(offset=50)
    rig.take_over(predecessors({A: named("w1")}, "w1"), term=200)
    for what in commands.split(", "):
        if what == "stop":
            rig.stop(A)
        else:
            huge = what.startswith("huge")
            archive = Archive("huge", 900_000, 2) if huge else SMALL
            rig.start(A, what if huge else "start-2", archive=archive)
    rig.feed(CaughtUp())
    rig.publish_issued()
    refused = expected == "huge"
    assert rig.entry(A).command == expected
    assert (rig.state(A) is ApplicationState.REFUSED) == refused
    assert rig.entry(A).worker == (None if refused else "w1")
    assert len(rig.all(PublishDocument)) == 1


@pytest.mark.rule("SH-15")
def test_a_start_whose_archive_is_not_there_is_refused(rig: Rig) -> None:
    """Parts can be dropped, or age out, between their writing and the start."""
    running(rig, "w1", apps=[])
    archive = Archive("sha", 1000, 5)
    rig.parts(A, archive)
    for number in (1, 3):
        rig.feed(PartRead(rig.at(0), A, "sha", number))
    rig.feed(StartRead(rig.at(), StartCommand(A, "start-1", archive, Mode.AVAILABLE)))
    rig.settle()
    assert rig.state(A) is ApplicationState.REFUSED
    assert rig.entry(A).reason == (
        "2 of the 5 parts of its archive are not on COMMAND (numbers 1, 3): start it again"
    )
    rig.start(A, "start-2", archive=archive)
    assert rig.settle().applications[A].worker == "w1"


@pytest.mark.rule("SH-15")
def test_a_start_that_meets_the_dropping_of_its_archive_is_refused(rig: Rig) -> None:
    """Its parts may stand before the tombstones that are on their way."""
    running(rig, "w1")
    rig.start(A, "start-2", archive=Archive("newer", 600, 3))
    rig.keep_company(75, "w1")
    assert len(rig.all(DropRecords)) == 1
    rig.start(B, "start-1")
    rig.start(A, "start-3")
    rig.settle()
    assert (rig.entry(A).command, rig.entry(B).worker) == ("start-2", "w1")
    assert rig.document.set_aside[-1].reason.endswith("just being dropped: start it again")
    for number in range(2):
        rig.feed(PartRead(rig.at(0), A, "sha", number))
    rig.start(A, "start-4")
    assert rig.settle().applications[A].command == "start-4"


def kept(rig: Rig) -> list[KeptCommand]:
    return [command for keep in rig.all(KeepCommands) for command in keep.commands]


def keep_it(rig: Rig) -> RecordMetadata:
    """Carry out the last KeepCommands as a driver does."""
    standing = {}
    for command in rig.all(KeepCommands)[-1].commands:
        rig.parts(command.start.application, command.start.archive)
        standing[command.start.application] = rig.at()
        rig.feed(StartRead(standing[command.start.application], command))
    rig.feed(Kept(standing))
    return max(standing.values(), key=lambda at: at.offset)


@pytest.mark.rule("SH-15")
def test_a_running_applications_start_command_is_kept_before_it_would_age_out(rig: Rig) -> None:
    """It is republished before it would age out."""
    running(rig, "w1")
    offset = rig.entry(A).offset
    rig.keep_company(480, "w1")
    assert kept(rig) == []
    rig.keep_company(30, "w1")
    assert [(command.start.command, command.original) for command in kept(rig)] == [("start-1", offset)]
    at = keep_it(rig)
    document = rig.document
    rig.keep_company(30, "w1")
    assert rig.document is document, "no document is published for that alone"
    rig.keep_company(440, "w1")
    assert len(kept(rig)) == 1
    rig.keep_company(60, "w1")
    assert [command.original for command in kept(rig)] == [offset, offset]
    assert len(kept(rig)) == 2
    rig.start(B)
    rig.settle()
    assert (rig.entry(A).offset, rig.entry(A).timestamp_ms) == (at.offset, at.timestamp_ms)


@pytest.mark.rule("SH-15")
def test_an_older_copy_that_is_read_late_does_not_take_away_the_newer_one(rig: Rig) -> None:
    """The copy of a running application's command is dropped only when nothing needs it any more."""
    huge = Archive("huge", OPTIONS.retention_bytes, 1)
    running(rig, "w1")
    first = rig.entry(A)
    rig.start(A, "start-2")
    rig.settle()
    rig.start(A, "too-much", archive=huge)
    older = rig.at()
    ((newer,),) = [keep.commands for keep in rig.all(KeepCommands)]
    assert newer.start.command == "start-2"
    rig.feed(Kept({A: rig.at()}))
    copy = StartCommand(A, first.command, first.archive, first.mode)
    rig.feed(StartRead(older, KeptCommand(copy, first.offset)))
    rig.settle()
    rig.pass_s(OPTIONS.round_s)
    assert not any(drop.kept for drop in rig.all(DropRecords))


@pytest.mark.rule("SH-15")
def test_a_running_applications_start_command_is_kept_before_size_would_drop_it(rig: Rig) -> None:
    running(rig, "w1")
    for _ in range(4):
        rig.feed(Unreadable(rig.at(100_000), "noise", "noise"))
    assert kept(rig) == []
    rig.feed(Unreadable(rig.at(100_000), "noise", "noise"))
    rig.feed(Wakeup())
    assert [command.start.application for command in kept(rig)] == [A]
    rig.feed(Unreadable(rig.at(300_000), "noise", "noise"))
    assert len(kept(rig)) == 1, "one transaction at a time"
    keep_it(rig)
    rig.settle()
    assert len(kept(rig)) == 1


@pytest.mark.rule("SH-15")
def test_commands_are_kept_in_batches() -> None:
    rig = Rig(replace(OPTIONS, keep_batch_bytes=2500))
    running(rig, "w1", apps=[A, B, C])
    rig.feed(Unreadable(rig.at(600_000), "noise", "noise"))
    assert [command.start.application for command in kept(rig)] == [A, B]
    keep_it(rig)
    assert [command.start.application for command in kept(rig)] == [A, B, C]


@pytest.mark.rule("SH-15")
def test_a_start_command_that_is_gone_is_written_again_from_the_document() -> None:
    """A leader may die between a refusal and keeping what the refused command displaced."""
    rig = Rig(offset=20)
    rig.take_over(predecessors({A: named("w1", offset=10)}, "w1"), term=200)
    rig.parts(A, SMALL)
    rig.feed(CaughtUp())
    assert [(command.start.command, command.original) for command in kept(rig)] == [("start-1", 10)]


@pytest.mark.rule("SH-15")
@pytest.mark.parametrize("how", ["stop", "start anew"])
def test_the_copy_is_dropped_when_no_document_needs_it(rig: Rig, how: str) -> None:
    """When the application stops, or starts anew, the copy is dropped."""
    running(rig, "w1")
    rig.feed(Unreadable(rig.at(600_000), "noise", "noise"))
    keep_it(rig)
    rig.settle()
    assert rig.all(DropRecords) == []
    if how == "stop":
        rig.stop(A)
    else:
        rig.start(A, "start-2")
    rig.now += 2
    rig.feed(Wakeup())
    assert rig.all(DropRecords) == [], "the document without it is not published yet"
    rig.publish_issued()
    assert rig.all(DropRecords) == [DropRecords(frozenset({A}))]


@pytest.mark.rule("SH-15")
def test_a_copy_that_comes_after_a_stop_starts_nothing_and_is_dropped(rig: Rig) -> None:
    running(rig, "w1")
    rig.feed(Unreadable(rig.at(600_000), "noise", "noise"))
    rig.stop(A)
    rig.settle()
    rig.pong("w1")
    keep_it(rig)
    assert rig.settle().applications == {}
    assert rig.all(DropRecords) == [DropRecords(frozenset({A}))]


@pytest.mark.rule("SH-15")
def test_archives_are_dropped_once_nothing_has_used_them_for_a_while(rig: Rig) -> None:
    """Not at once: a client may be writing the same parts again, for its next start."""
    running(rig, "w1")
    rig.start(A, "start-2", archive=Archive("newer", 600, 3))
    rig.keep_company(55, "w1")
    assert rig.all(DropRecords) == []
    rig.keep_company(20, "w1")
    ((app, archive),) = rig.all(DropRecords)[0].archives
    assert (app, archive.sha256, archive.parts) == (A, "sha", 2)
    for number in range(2):
        rig.feed(PartRead(rig.at(0), A, "sha", number))
    rig.keep_company(100, "w1")
    assert len(rig.all(DropRecords)) == 1


@pytest.mark.rule("SH-15")
def test_parts_that_a_client_is_still_writing_are_not_dropped(rig: Rig) -> None:
    running(rig, "w1", apps=[])
    archive = Archive("slow", 2000, 20)
    for number in range(20):
        rig.feed(PartRead(rig.at(), A, "slow", number))
        rig.keep_company(20, "w1")
    assert rig.all(DropRecords) == []
    rig.feed(StartRead(rig.at(), StartCommand(A, "start-1", archive, Mode.AVAILABLE)))
    assert rig.settle().applications[A].worker == "w1"


def test_a_stop_of_what_is_unknown_changes_nothing(rig: Rig) -> None:
    rig.lead()
    rig.stop(A)
    rig.pass_s(5)
    assert rig.news == []


@pytest.mark.rule("SH-18", "SH-26")
def test_a_command_that_changes_nothing_is_answered_by_a_document(rig: Rig) -> None:
    """Its client waits for a document that takes it into account."""
    running(rig, "w1", "w2")
    rig.stop(A)
    rig.settle()
    rig.pong("w1")
    rig.pong("w2")
    rig.settle()
    assert A not in rig.document.applications
    for repeat in (
        lambda: rig.stop(A, "stop-2"),
        lambda: rig.cordon("w2", None),
        lambda: rig.cordon("w2", None, "order-2"),
    ):
        said = _content(rig.document)
        offset = rig.at().offset
        repeat()
        assert rig.settle().consumed == offset + 1
        assert _content(rig.document) == said
    settled = rig.document
    rig.keep_company(60, "w1", "w2")
    assert rig.document is settled


def test_the_ordering_contract_is_held() -> None:
    """A pair that is not in the contract is a broken invariant."""
    rig = Rig()
    with pytest.raises(InternalError):
        rig.feed(CaughtUp())
    with pytest.raises(InternalError):
        rig.start(A)
    rig.take_over()
    with pytest.raises(InternalError):
        rig.take_over()
    rig.feed(CaughtUp())
    rig.publish_issued()
    with pytest.raises(InternalError):
        rig.feed(Published(1))
    with pytest.raises(InternalError):
        rig.feed(Kept({}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"round_s": 0.0}, "round_s is 0, and must be more than 0"),
        ({"missed_rounds": 0}, "missed_rounds is 0, and must be more than 0"),
        ({"settle_time_s": -1.0}, "settle_time_s is -1, and must be 0 or more"),
        ({"retention_s": float("inf")}, "retention_s is inf, and must be more than 0"),
        (
            {"deadline_s": 60.0},
            "deadline_s 60 must be over (missed_rounds 1 + 1) x round_s 30 = 60 s: ",
        ),
        (
            {"budget_ratio": 0.6},
            "budget_ratio 0.6 + keep_ratio 0.5 must be below 1: ",
        ),
    ],
)
def test_options_that_cannot_keep_the_rules_are_refused(change: Mapping[str, float], says: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        Leader("leader-1", replace(LeaderOptions(), **change))  # type: ignore[arg-type]
    assert str(caught.value).startswith(says)


def test_the_deadline_follows_the_rounds() -> None:
    assert LeaderOptions().permission_s == 90.0
    assert LeaderOptions(round_s=10.0, missed_rounds=2).permission_s == 40.0
    LeaderOptions().check()


def test_large_documents_are_published_less_often() -> None:
    assert OPTIONS.publish_interval_s(10) == OPTIONS.publish_interval_s(1000) == 1.0
    assert OPTIONS.publish_interval_s(10_000) == 10.0


def test_every_state_is_reached_and_can_be_left_or_ended() -> None:
    states = set(ApplicationState)
    assert set(APPLICATION_STEPS) == states
    reached = set(APPLICATION_BEGINS).union(*APPLICATION_STEPS.values())
    assert reached == states
    assert all(
        ApplicationState.STOPPING in APPLICATION_STEPS[state] for state in states - set(APPLICATION_ENDS)
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, ApplicationState.RUNNING),
        (ApplicationState.RUNNING, None),
        (ApplicationState.STOPPING, ApplicationState.RUNNING),
        (ApplicationState.REFUSED, ApplicationState.ASSIGNED),
    ],
)
def test_a_step_that_is_not_in_the_table_is_a_broken_invariant(
    before: ApplicationState | None, after: ApplicationState | None
) -> None:
    with pytest.raises(InternalError):
        check_step(before, after)


def settled(workers: int, applications: int) -> Rig:
    rig = Rig(replace(OPTIONS, retention_bytes=10**12, min_publish_interval_s=0.1))
    rig.lead()
    for number in range(workers):
        rig.pong(f"w{number}")
    for number in range(applications):
        rig.start(ApplicationId("tenant", "channel", f"a{number}"))
    rig.settle()
    return rig


@pytest.mark.full_size
@pytest.mark.rule("SH-12")
def test_ten_thousand_applications_are_placed_evenly_on_two_hundred_workers() -> None:
    """Placement is balanced, and honours tags."""
    rig = Rig(replace(OPTIONS, retention_bytes=10**12))
    rig.take_over()
    for number in range(200):
        rig.pong(f"w{number}", tags=["x"] if number % 3 else [])
    for number in range(10_000):
        rig.start(ApplicationId("tenant", "c", f"a{number}"), tags=["x"] if number % 7 == 0 else [])
    rig.feed(CaughtUp())
    (published,) = rig.all(PublishDocument)
    entries, workers = published.document.applications.values(), published.document.workers
    assert set(Counter(entry.worker for entry in entries).values()) == {50}
    assert all(entry.worker and entry.tags <= workers[entry.worker].tags for entry in entries)


def test_a_pong_costs_the_same_however_many_applications_there_are() -> None:
    """Counted by the entries that are looked at, not by a clock."""
    looked_at = []
    for applications in (200, 2000):
        rig = settled(applications // 20, applications)
        entries = rig.leader._assignments.entries
        counted = _Counted(entries)
        rig.leader._assignments.entries = counted
        rig.runs_what_it_should("w1")
        looked_at.append(counted.looked_at)
    assert looked_at[0] == looked_at[1] > 20


def test_replicas_that_wait_cost_the_same_however_many_siblings_each_has() -> None:
    """Counted by the entries that are looked at, while half of the workers are cordoned."""
    looked_at = []
    for replicas in (100, 400):
        rig = settled(40, 0)
        for number in range(20):
            rig.cordon(f"w{number}", Cordon.CORDONED, f"order-{number}")
        rig.start(A, replicas=replicas)
        rig.settle()
        counted = _Counted(rig.leader._assignments.entries)
        rig.leader._assignments.entries = counted
        rig.start(B)
        rig.settle()
        looked_at.append(counted.looked_at / replicas)
    assert looked_at[1] < 2 * looked_at[0]


class _Counted(dict[ApplicationId, ApplicationEntry]):
    looked_at = 0

    def __getitem__(self, key: ApplicationId) -> ApplicationEntry:
        self.looked_at += 1
        return super().__getitem__(key)

    def get(self, key: ApplicationId, default: object = None) -> ApplicationEntry | None:  # type: ignore[override]
        self.looked_at += 1
        return super().get(key)

    def items(self) -> object:  # type: ignore[override]
        self.looked_at += len(self)
        return super().items()


@pytest.mark.rule("AU-4", "SH-7")
def test_its_facts_carry_term_and_version_and_where_the_record_stands(rig: Rig) -> None:
    """A document's version is its offset on COMMAND, which is how workers record what they adopt."""
    rig.take_over()
    rig.feed(CaughtUp())
    rig.pong("w1")
    rig.start(A)
    rig.settle()
    (took_over,) = rig.facts(FactKind.TOOK_OVER)
    assert (took_over.term, took_over.revision, took_over.version) == (GIVEN_TERM, GIVEN_TERM, 0)
    published = rig.facts(FactKind.DOCUMENT_PUBLISHED)
    assert all(fact.version == fact.revision == fact.detail["offset"] for fact in published)
    versions = [fact.version for fact in published]
    assert versions == sorted(set(versions))
    (commanded,) = rig.facts(FactKind.START_COMMANDED)
    assert commanded.revision == commanded.detail["offset"]
    rig.feed(Deposed("fenced"))
    (stepped_down,) = rig.facts(FactKind.STEPPED_DOWN)
    assert (stepped_down.term, stepped_down.version) == (GIVEN_TERM, versions[-1])


GRACE_S = 60.0
WITH_GRACE = replace(OPTIONS, away_grace_s=GRACE_S)


def graceful(rig: Rig, worker: str, number: int = 1) -> None:
    """The worker says goodbye: everything that it ran has been stopped."""
    rig.pong(worker, number=number, leaving=True)


def two_workers(
    mode: Mode = Mode.AVAILABLE, options: LeaderOptions = WITH_GRACE
) -> tuple[Rig, dict[str, ApplicationId]]:
    """Two workers with an application each; what each has."""
    rig = Rig(options)
    running(rig, "w1", "w2", apps=[A, B], mode=mode)
    return rig, {str(rig.entry(app).worker): app for app in (A, B)}


@pytest.mark.rule("SH-26")
@pytest.mark.parametrize("mode", list(Mode))
def test_a_worker_that_returns_within_the_grace_gets_its_applications_back(mode: Mode) -> None:
    """The applications of a worker that left or is missing wait for it before they move."""
    rig, has = two_workers(mode)
    graceful(rig, "w1")
    rig.settle()
    assert rig.state(has["w1"]) is ApplicationState.WAITING
    assert rig.entry(has["w1"]).kept_for == "w1"
    assert "gets it back if it returns within 60 s" in rig.entry(has["w1"]).reason
    rig.keep_company(GRACE_S - 10, "w2")
    rig.pong("w1", number=2)
    rig.settle()
    assert {app: rig.entry(app).worker for app in (A, B)} == {has["w1"]: "w1", has["w2"]: "w2"}
    assert rig.entry(has["w1"]).kept_for is None


@pytest.mark.rule("SH-26")
def test_a_worker_with_a_new_folder_gets_back_what_its_label_had() -> None:
    """A worker's id is its label: whoever returns with it within the grace gets the applications back."""
    rig, has = two_workers()
    graceful(rig, "w1")
    rig.settle()
    rig.pong("w1", lineage="new-folder")
    rig.settle()
    assert rig.entry(has["w1"]).worker == "w1"


@pytest.mark.rule("SH-26")
def test_what_is_kept_moves_when_the_grace_is_over() -> None:
    """The applications of a worker that left or is missing wait for it before they move."""
    rig, has = two_workers()
    graceful(rig, "w1")
    rig.keep_company(GRACE_S - 5, "w2")
    assert rig.entry(has["w1"]).worker is None
    rig.keep_company(10, "w2")
    assert rig.entry(has["w1"]).worker == "w2"
    assert rig.entry(has["w1"]).kept_for is None


@pytest.mark.rule("SH-26")
def test_without_a_grace_what_a_worker_had_moves_at_once() -> None:
    """The default of away_grace_s is 0."""
    rig, has = two_workers(options=OPTIONS)
    graceful(rig, "w1")
    rig.settle()
    assert rig.entry(has["w1"]).worker == "w2"


@pytest.mark.rule("SH-14", "SH-26")
def test_the_grace_shortens_no_wait_for_an_exclusive_worker_that_is_missing() -> None:
    """An exclusive application moves once the grace and the deadline are both over."""
    rig, has = two_workers(Mode.EXCLUSIVE, replace(OPTIONS, away_grace_s=1.0))
    rig.keep_company(20, "w2")
    entry = rig.entry(has["w1"])
    assert "w1" not in rig.document.workers
    assert entry.worker is None
    assert entry.leaving is not None
    rig.keep_company(20, "w2")
    assert rig.entry(has["w1"]).worker == "w2"


@pytest.mark.rule("SH-13", "SH-26")
def test_a_worker_that_was_cut_off_and_runs_on_gets_back_what_is_kept_for_it() -> None:
    """It is the only one that may run the application, so that no second one comes about."""
    rig, has = two_workers()
    rig.keep_company(25, "w2")
    assert rig.entry(has["w1"]).kept_for == "w1"
    rig.pong("w1", {has["w1"]: RunState.RUNNING})
    rig.settle()
    assert rig.entry(has["w1"]).worker == "w1"
    assert rig.entry(has["w1"]).kept_for is None


@pytest.mark.rule("SH-9", "SH-26")
@pytest.mark.parametrize(("grace_s", "worker"), [(GRACE_S, None), (0.0, "w2")])
def test_a_new_leader_goes_on_keeping_as_its_own_grace_says(grace_s: float, worker: str | None) -> None:
    """Counted from when a leader takes over."""
    rig = Rig(replace(OPTIONS, away_grace_s=grace_s))
    rig.lead(predecessors({A: named(None, kept_for="w1")}, "w2"))
    rig.settle()
    rig.keep_company(30, "w2")
    assert rig.entry(A).worker == worker
    rig.keep_company(GRACE_S, "w2")
    assert rig.entry(A).worker == "w2"


@pytest.mark.rule("SH-26")
def test_what_is_kept_and_started_anew_runs_elsewhere_at_once() -> None:
    """An operator who starts an application does not wait for a worker that is away."""
    rig, has = two_workers()
    graceful(rig, "w1")
    rig.settle()
    rig.start(has["w1"], "start-2")
    rig.settle()
    assert rig.entry(has["w1"]).worker == "w2"


@pytest.mark.rule("SH-5", "SH-26")
def test_what_is_kept_can_be_stopped() -> None:
    """A stop takes an application out, whoever it was kept for."""
    rig, has = two_workers()
    graceful(rig, "w1")
    rig.settle()
    rig.stop(has["w1"])
    assert has["w1"] not in rig.settle().applications
    rig.keep_company(2 * GRACE_S, "w2")


@pytest.mark.rule("SH-8", "SH-26")
def test_nothing_is_kept_for_a_worker_that_stands_still() -> None:
    """It is not away: it answers, and follows nothing."""
    rig, has = two_workers(options=replace(WITH_GRACE, stalled_s=20.0))
    seen = rig.document.epoch
    rig.start(C)
    rig.settle()
    for _ in range(12):
        rig.pass_s(OPTIONS.round_s / 2)
        rig.pong("w1", {has["w1"]: RunState.RUNNING}, seen=seen)
        rig.runs_what_it_should("w2")
    rig.settle()
    assert "w1" not in rig.document.workers
    assert {rig.entry(app).worker for app in (A, B, C)} == {"w2"}


@pytest.mark.rule("SH-26")
def test_a_cordoned_worker_gets_nothing_further_and_keeps_what_it_has() -> None:
    """Gets no further applications; those that it has stay."""
    rig, has = two_workers()
    rig.cordon("w1", Cordon.CORDONED)
    rig.start(C)
    rig.start(D)
    rig.settle()
    assert rig.document.cordons == {"w1": Cordon.CORDONED}
    assert {rig.entry(app).worker for app in (C, D)} == {"w2"}
    assert rig.entry(has["w1"]).worker == "w1"
    graceful(rig, "w1")
    rig.settle()
    rig.pong("w1", number=2)
    rig.settle()
    assert rig.entry(has["w1"]).worker == "w1"
    rig.cordon("w1", None)
    rig.settle()
    assert rig.document.cordons == {}
    rig.pong("w2")
    rig.settle()
    workers = Counter(rig.entry(app).worker for app in (A, B, C, D))
    assert workers["w1"] == 2


@pytest.mark.rule("SH-13", "SH-26")
@pytest.mark.parametrize("mode", list(Mode))
def test_what_a_drained_worker_has_moves_once_it_has_stopped_it(mode: Mode) -> None:
    """Runs none: those that it has move to others."""
    rig, has = two_workers(mode)
    rig.cordon("w1", Cordon.DRAINED)
    rig.settle()
    assert rig.state(has["w1"]) is ApplicationState.MOVING
    assert rig.entry(has["w1"]).worker is None
    rig.pong("w1")
    rig.settle()
    assert rig.entry(has["w1"]).worker == "w2"
    graceful(rig, "w1")
    rig.settle()
    rig.pong("w1", number=2)
    rig.settle()
    assert rig.entry(has["w1"]).worker == "w2"


@pytest.mark.rule("SH-12", "SH-26")
def test_what_only_cordoned_workers_could_take_waits_and_says_so(rig: Rig) -> None:
    """What can't be placed says which constraint keeps it from being placed."""
    running(rig, "w1")
    rig.cordon("w1", Cordon.DRAINED)
    rig.settle()
    rig.pong("w1")
    rig.settle()
    assert rig.state(A) is ApplicationState.WAITING
    assert rig.entry(A).reason == "no other worker could take it than w1 (drained)"
    rig.cordon("w1", None)
    rig.settle()
    assert rig.entry(A).worker == "w1"


@pytest.mark.rule("SH-26")
def test_draining_a_worker_that_is_away_ends_its_grace() -> None:
    """Draining says that the worker is not to be waited for."""
    rig, has = two_workers()
    graceful(rig, "w1")
    rig.settle()
    rig.cordon("w1", Cordon.DRAINED)
    rig.settle()
    assert rig.entry(has["w1"]).worker == "w2"


@pytest.mark.rule("SH-26")
def test_nothing_is_kept_for_a_drained_worker_that_leaves_at_once() -> None:
    """Draining says that the worker is not to be waited for."""
    rig, has = two_workers()
    rig.cordon("w1", Cordon.DRAINED)
    graceful(rig, "w1")
    rig.settle()
    assert rig.entry(has["w1"]).worker == "w2"


@pytest.mark.rule("SH-9", "SH-26")
def test_a_new_leader_keeps_cordons_and_follows_the_last_command_that_none_has_followed(rig: Rig) -> None:
    """Persistent with the leader's document; of the commands about a worker the last one counts."""
    before = predecessors({A: named("w1")}, "w1", "w2", consumed=50, cordons={"w1": Cordon.CORDONED})
    rig.take_over(before)
    for offset, cordon in ((20, None), (60, Cordon.DRAINED), (70, Cordon.CORDONED)):
        at = RecordMetadata(offset, rig.wall_ms, 100)
        rig.feed(WorkerCommandRead(at, WorkerCommand("w2", f"order-{offset}", cordon)))
    rig.feed(WorkerCommandRead(RecordMetadata(30, rig.wall_ms, 100), WorkerCommand("w1", "order-30", None)))
    rig.feed(CaughtUp())
    rig.settle()
    assert rig.document.cordons == {"w1": Cordon.CORDONED, "w2": Cordon.CORDONED}
    assert [fact.worker for fact in rig.facts(FactKind.WORKER_CORDONED)] == ["w2"]


@pytest.mark.rule("SH-16", "SH-26")
def test_more_cordons_than_a_document_takes_are_set_aside(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table of the document has a limit."""
    monkeypatch.setattr("rebalanser.core.shiva.assignments.MAX_CORDONS", 1)
    rig.lead()
    rig.cordon("w1", Cordon.CORDONED)
    rig.cordon("w2", Cordon.CORDONED)
    rig.cordon("w1", Cordon.DRAINED)
    document = rig.settle()
    assert document.cordons == {"w1": Cordon.DRAINED}
    assert [each.key for each in document.set_aside] == ["worker:w2"]


@pytest.mark.rule("SH-20", "SH-26")
def test_a_refused_cordon_leaves_the_status_with_the_next_command(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rebalanser.core.shiva.assignments.MAX_CORDONS", 1)
    rig.lead()
    for worker in ("w1", "w2", "w3"):
        rig.cordon(worker, Cordon.CORDONED)
    assert [each.key for each in rig.settle().set_aside] == ["worker:w2", "worker:w3"]
    rig.cordon("w2", None)
    assert [each.key for each in rig.settle().set_aside] == ["worker:w3"]


@pytest.mark.rule("SH-9", "SH-16")
@pytest.mark.parametrize("key", ["anything", "ping", "pong:w1", "cmd:t/c/a"])
def test_an_offset_of_control_is_never_taken_for_one_of_command(rig: Rig, key: str) -> None:
    """The offset consumed is that of the last record of COMMAND that a document takes into account."""
    running(rig, "w1")
    rig.feed(Unreadable(RecordMetadata(10**9, rig.wall_ms, 100), key, "no JSON", on_control=True))
    document = rig.settle()
    assert [each.key for each in document.set_aside] == [key]
    assert document.consumed < 10**9
    assert [fact.revision for fact in rig.facts(FactKind.RECORD_SET_ASIDE)] == [None]


@pytest.mark.rule("SH-16", "SH-20")
def test_a_foreign_key_on_control_is_shown_once_and_never_as_a_command(rig: Rig) -> None:
    running(rig, "w1")
    command = rig.at().offset
    for offset in range(command - 2, command + 3):
        rig.feed(
            Unreadable(RecordMetadata(offset, rig.wall_ms, 10), "cmd:tenant/channel/a", "no", on_control=True)
        )
    assert rig.settle().set_aside == (SetAside(-1, "cmd:tenant/channel/a", "no"),)
    rig.keep_company(OPTIONS.permission_s + 2 * OPTIONS.round_s, "w1")
    assert rig.document.set_aside == ()
