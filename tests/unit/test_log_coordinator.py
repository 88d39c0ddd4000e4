"""A connection to a group in a log: what it says when the log refuses, is silent, lost or cannot be read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import count
from typing import Self, TypeAlias

import pytest

from rebalanser.core.group.messages import Alive, Failed, Heartbeat, Join, Joined, Noticed, SessionLost
from rebalanser.core.group.types import Member, ResourceSpec, Session, Topic, TopicKind
from rebalanser.core.shiva.changes import DocumentChain, change_between
from rebalanser.core.shiva.records import AssignmentDocument, DocumentChange
from rebalanser.core.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationState,
    Archive,
    Epoch,
    Mode,
)
from rebalanser.errors import (
    AccessDenied,
    OutcomeUnknown,
    RebalanserError,
    RegistryUnavailable,
    UnusableStore,
)
from rebalanser.feed import Applications
from rebalanser.testing import FakeClock
from rebalanser.testing.coordinator_suite import NoticeRecorder
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.group import applications as applications_module
from rebalanser_kafka.group import coordinator as coordinator_module
from rebalanser_kafka.group import records
from rebalanser_kafka.group.applications import RunningApplications
from rebalanser_kafka.group.coordinator import SNAPSHOT_RECORDS, LogCoordinator, OnDone
from rebalanser_kafka.group.follower import LogEntry
from rebalanser_kafka.group.leases import REPEAT_S
from rebalanser_kafka.group.records import Expire, ReadAll, Rebase, Request, Snapshot, decode, encode
from rebalanser_kafka.records import LogRecord
from rebalanser_kafka.shiva import wire
from rebalanser_kafka.shiva.wire import key_of

BORN_MS = 1_700_000_000_000


class SharedLog:
    """A log in memory that several connections share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.values: list[bytes | None] = []
        self.start = 0
        self.born_ms = BORN_MS

    def append(self, value: bytes | None) -> int:
        with self.changed:
            self.values.append(value)
            self.changed.notify_all()
            return len(self.values) - 1

    def make_anew(self) -> None:
        """As a topic that was deleted and created again."""
        with self.changed:
            self.values.clear()
            self.start = 0
            self.born_ms += 1_000_000
            self.changed.notify_all()

    def wishes(self, kind: type) -> list[object]:
        with self.changed:
            found = [decode(value).wish for value in self.values[self.start :] if value is not None]
        return [wish for wish in found if isinstance(wish, kind)]


class MemoryLog:
    """One connection to a shared log, and what a test has it do wrong."""

    name = "the log"
    trouble = None
    unsafe_reasons = ("it is in memory",)

    def __init__(self, shared: SharedLog) -> None:
        self._shared = shared
        self.position = 0
        self.refuses: RebalanserError | None = None
        self.answers: RebalanserError | None = None
        self.deleted = threading.Event()
        self.refused = threading.Event()
        self.cut_off = False

    def begin(self) -> tuple[int, int]:
        with self._shared.changed:
            self.position = self._shared.start
            return self._shared.start, len(self._shared.values)

    def read(self, timeout_s: float) -> Sequence[LogEntry]:
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(
                lambda: not self.cut_off and len(shared.values) != self.position, timeout_s
            )
            if self.cut_off:
                return ()
            if not shared.start <= self.position <= len(shared.values):
                raise RegistryUnavailable("the log does not hold what comes next")
            entries = [
                LogEntry(offset, shared.born_ms + offset, shared.values[offset])
                for offset in range(self.position, len(shared.values))
            ]
            self.position = len(shared.values)
            return entries

    def append(self, value: bytes, done: OnDone) -> None:
        if self.refuses is not None:
            self.refused.set()
            raise self.refuses
        if self.answers is not None:
            done(self.answers)
            return
        done(self._shared.append(value))

    def delete_before(self, offset: int) -> None:
        with self._shared.changed:
            self._shared.start = max(self._shared.start, offset)
        self.deleted.set()

    def close(self) -> None:
        """Nothing is open."""


Connect: TypeAlias = Callable[..., tuple[LogCoordinator, MemoryLog]]


@pytest.fixture
def shared() -> SharedLog:
    return SharedLog()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def connect(shared: SharedLog, clock: FakeClock) -> Iterator[Connect]:
    with ExitStack() as stack:

        def opened(timeout_s: float = PATIENCE_S) -> tuple[LogCoordinator, MemoryLog]:
            log = MemoryLog(shared)
            coordinator = stack.enter_context(closing(LogCoordinator(log, "group", clock.now, timeout_s)))
            coordinator.open(PATIENCE_S)
            return coordinator, log

        yield opened


def joined(coordinator: LogCoordinator, ttl_s: float = 10.0) -> Session:
    outcome = coordinator.perform(Join(Member("n", "n"), ttl_s))
    assert isinstance(outcome, Joined)
    return outcome.session


def test_a_refused_append_had_no_effect(connect: Connect) -> None:
    coordinator, log = connect()
    log.refuses = RegistryUnavailable("too many wait")
    assert coordinator.perform(Join(Member("n", "n"), 10.0)) == Failed("RegistryUnavailable: too many wait")
    log.refuses, log.answers = None, AccessDenied("you may not")
    outcome = coordinator.perform(Join(Member("n", "n"), 10.0))
    assert outcome == Failed("AccessDenied: you may not", fatal=True)


def test_an_append_without_an_answer_may_have_had_one(connect: Connect) -> None:
    coordinator, log = connect()
    log.answers = OutcomeUnknown("it may still take effect")
    outcome = coordinator.perform(Join(Member("n", "n"), 10.0))
    assert isinstance(outcome, Failed)
    assert outcome.unknown


def test_a_silent_log_leaves_the_outcome_unknown(connect: Connect) -> None:
    coordinator, log = connect(timeout_s=0.01)
    log.append = lambda value, done: None  # type: ignore[method-assign]
    outcome = coordinator.perform(Join(Member("n", "n"), 10.0))
    assert isinstance(outcome, Failed)
    assert outcome.unknown
    assert "no answer within 0.01 s: the request was not acknowledged, the log was read to" in outcome.error


@pytest.mark.rule("RB-44")
def test_a_late_request_of_an_operator_undoes_no_later_one(connect: Connect, shared: SharedLog) -> None:
    slow, log = connect(timeout_s=0.01)
    late: list[bytes] = []
    log.append = lambda value, done: late.append(value)  # type: ignore[method-assign]
    specs, weights = [ResourceSpec("a"), ResourceSpec("b")], {"a": 2.0, "b": 2.0}
    operations: list[Callable[[LogCoordinator], object]] = [
        lambda on: on.put_resources(specs, lambda _: None),
        lambda on: on.weigh_resources(weights, lambda _: None),
        lambda on: on.remove_resources(["a"], lambda _: None),
        lambda on: on.set_drained("label", drained=True),
        lambda on: on.set_drained("label", drained=False),
    ]
    for operation in operations:
        with pytest.raises(OutcomeUnknown):
            operation(slow)
    other, _ = connect()
    for operation in (*operations, *reversed(operations)):
        operation(other)
    done = other.read().group
    for value in late:
        shared.append(value)
    assert replace(other.read().group, revision=done.revision) == done


@pytest.mark.rule("RB-44")
def test_an_operator_asks_again_until_others_come_before_each_of_its_tries(
    connect: Connect, shared: SharedLog
) -> None:
    (one, log), (other, _) = connect(), connect()
    append, tries = log.append, count(1)
    overtaken = 3

    def overtake(value: bytes, done: OnDone) -> None:
        if next(tries) <= overtaken:
            other.set_drained("other", drained=True)
        append(value, done)

    log.append = overtake  # type: ignore[method-assign]
    assert one.put_resources([ResourceSpec("a")], lambda _: None) == 1
    assert next(tries) == overtaken + 2
    overtaken = 1_000
    with pytest.raises(RegistryUnavailable, match="other operator requests kept coming first"):
        one.set_drained("label", drained=True)
    assert other.read().group.drained == {"other"}


@pytest.mark.rule("RB-20", "RB-21")
def test_whoever_counted_it_out_ends_a_lease(connect: Connect, clock: FakeClock, shared: SharedLog) -> None:
    holder, _ = connect()
    session = joined(holder, ttl_s=10.0)
    watcher, _ = connect()
    notices = NoticeRecorder(PATIENCE_S)
    watcher.watch("", {Topic(TopicKind.NODE, session.node): session.created + 1}, notices)
    clock.advance(9.9)
    assert isinstance(holder.perform(Heartbeat(session)), Alive)
    watcher.read()
    clock.advance(9.9)
    assert set(watcher.read().group.members) == {"n"}
    assert shared.wishes(Expire) == []
    clock.advance(0.2 + 1.0)
    notices.wait_for(TopicKind.NODE, session.created + 1)
    assert holder.perform(Heartbeat(session)) == SessionLost()


@pytest.mark.rule("RB-12", "RB-22", "RB-28")
def test_a_log_made_anew_ends_the_sessions_and_tells_whoever_watches(
    connect: Connect, shared: SharedLog
) -> None:
    coordinator, _ = connect()
    session = joined(coordinator)
    told = threading.Event()

    def listen(_notices: Sequence[Noticed]) -> None:
        told.set()

    coordinator.watch("n", {Topic(TopicKind.ALLOCATION, "n"): session.created + 1}, listen)
    shared.make_anew()
    assert told.wait(PATIENCE_S)
    assert coordinator.perform(Heartbeat(session)) == SessionLost()
    assert joined(coordinator).created > session.created


@pytest.mark.rule("RB-1", "RB-22")
def test_a_log_made_anew_unseen_is_noticed(connect: Connect, shared: SharedLog) -> None:
    """A connection that was cut off goes on in the middle of the new log, as Kafka's client does."""
    behind, log = connect()
    session = joined(behind)
    log.cut_off = True
    shared.make_anew()
    other, _ = connect()
    while len(shared.values) <= log.position:
        other.read()
    before = len(shared.values)
    with ThreadPoolExecutor(1) as aside:
        beat = aside.submit(behind.perform, Heartbeat(session))
        with shared.changed:
            assert shared.changed.wait_for(lambda: len(shared.values) > before, PATIENCE_S)
            log.cut_off = False
        outcome = beat.result(PATIENCE_S)
    assert isinstance(outcome, Failed)
    assert "recreated" in outcome.error
    assert not outcome.unknown
    assert behind.perform(Heartbeat(session)) == SessionLost()
    assert other.read().group.members == {}
    assert joined(behind).created > session.created


@pytest.mark.rule("RB-12")
def test_tokens_stay_above_what_a_lost_end_of_the_log_had(connect: Connect, shared: SharedLog) -> None:
    coordinator, _ = connect()
    session = joined(coordinator)
    for _ in range(5):
        coordinator.read()
    with shared.changed:
        del shared.values[1:]
        shared.changed.notify_all()
    told = threading.Event()
    coordinator.watch(
        "n", {Topic(TopicKind.ALLOCATION, "n"): session.created + 1}, lambda _notices: told.set()
    )
    assert told.wait(PATIENCE_S)
    coordinator.read()
    assert len(shared.wishes(Rebase)) == 1
    later, _ = connect()
    outcome = later.perform(Join(Member("m", "m"), 10.0))
    assert isinstance(outcome, Joined)
    assert outcome.session.created > session.created + 5


@pytest.mark.rule("RB-12")
def test_revisions_are_moved_on_though_the_first_attempt_was_lost(
    connect: Connect, clock: FakeClock, shared: SharedLog
) -> None:
    coordinator, log = connect()
    seen = joined(coordinator).created
    for _ in range(5):
        coordinator.read()
    log.refuses = RegistryUnavailable("too many wait")
    with shared.changed:
        del shared.values[1:]
        shared.changed.notify_all()
    assert log.refused.wait(PATIENCE_S)
    log.refuses = None
    clock.advance(REPEAT_S)
    with shared.changed:
        assert shared.changed.wait_for(lambda: len(shared.values) > 1, PATIENCE_S)
    outcome = coordinator.perform(Join(Member("m", "m"), 10.0))
    assert isinstance(outcome, Joined)
    assert outcome.session.created > seen + 5


def test_a_newer_format_ends_the_connection_with_what_to_do(connect: Connect, shared: SharedLog) -> None:
    coordinator, _ = connect()
    shared.append(b"RG\x03" + encode(Request("r", ReadAll()))[3:])
    with pytest.raises(UnusableStore, match="upgrade this node"):
        coordinator.read()
    with pytest.raises(UnusableStore, match="upgrade this node"):
        connect()


def test_a_log_without_its_beginning_and_without_a_snapshot_is_refused(
    connect: Connect, shared: SharedLog
) -> None:
    shared.append(None)
    shared.append(None)
    shared.start = 1
    with pytest.raises(UnusableStore, match="has no snapshot"):
        connect()


@pytest.mark.rule("RB-28")
def test_a_snapshot_is_written_once_and_what_it_stands_for_is_deleted(
    connect: Connect, shared: SharedLog
) -> None:
    coordinator, log = connect()
    session = joined(coordinator)
    other, _ = connect()
    for _ in range(SNAPSHOT_RECORDS):
        shared.append(None)
    assert log.deleted.wait(PATIENCE_S)
    assert isinstance(other.perform(Heartbeat(session)), Alive)
    assert len(shared.wishes(Snapshot)) == 1
    assert shared.start > SNAPSHOT_RECORDS / 2
    late, _ = connect()
    assert late.read().group.members.keys() == {"n"}
    assert late.capabilities.unsafe_reasons == ("it is in memory",)


def test_a_group_too_large_for_a_snapshot_is_told(
    connect: Connect, shared: SharedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    limit = len(encode(Request("r" * 32, ReadAll(), BORN_MS))) + 10
    monkeypatch.setattr(records, "MAX_REQUEST_BYTES", limit)
    monkeypatch.setattr(coordinator_module, "SNAPSHOT_RECORDS", 10)
    monkeypatch.setattr(
        coordinator_module,
        "log_aside",
        lambda _what, _error, action, **_: told.set() if action == "snapshot_too_large" else None,
    )
    coordinator, _ = connect()
    for _ in range(12):
        coordinator.read()
    assert told.wait(PATIENCE_S)
    assert coordinator.read().group.members == {}


def test_nothing_is_done_on_a_closed_connection(connect: Connect) -> None:
    coordinator, _ = connect()
    coordinator.close()
    with pytest.raises(RegistryUnavailable, match="closed"):
        coordinator.read()


def test_what_a_notice_names_is_read_without_the_log(connect: Connect, shared: SharedLog) -> None:
    session = joined(connect()[0])
    client, _ = connect()
    key = client._follower.replica.keys.node(session.node)
    appended = len(shared.values)
    read = client.read_holdings({key})
    assert (read.members, read.whole) == ({session.node: Member(session.node, "n")}, False)
    assert len(shared.values) == appended
    assert client.read_holdings().members == read.members
    assert len(shared.values) == appended + 1
    client.close()
    with pytest.raises(RegistryUnavailable, match="was not read to its end"):
        client.read_holdings({key})


class TestRunningApplications:
    @pytest.mark.rule("SH-19")
    def test_only_a_newer_document_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Most polls bring nothing, and a list of all applications costs as much as there are."""
        app = ApplicationId("t", "c", "web")
        entry = ApplicationEntry("c-1", ApplicationState.RUNNING, Mode.AVAILABLE, Archive("0" * 64, 1, 1))
        first = AssignmentDocument(Epoch(1, 1), "l", 0, 90.0, {}, {})
        second = replace(first, epoch=Epoch(1, 2), applications={app: entry})
        third = replace(second, epoch=Epoch(1, 3), applications={})
        polls: list[list[AssignmentDocument | DocumentChange]] = [
            [],
            [],
            [second],
            [],
            [change_between(second, third)],
            [],
        ]
        chain = DocumentChain()
        chain.take(first)
        monkeypatch.setattr(applications_module, "last_document", lambda *_: (chain, 7))
        monkeypatch.setattr(applications_module, "LogReader", lambda *_: _Polled(polls))
        told: list[Applications] = []
        running = RunningApplications(Connection.from_url("kafka://127.0.0.1:1/c"))
        running.follow(lambda: bool(polls), told.append, 1.0)
        assert told == [
            Applications((1, 1), frozenset()),
            Applications((1, 2), frozenset({"t/c/web"})),
            Applications((1, 3), frozenset()),
        ]


class _Polled:
    """A reader of ASSIGNEMENT whose polls answer these records."""

    def __init__(self, polls: list[list[AssignmentDocument | DocumentChange]]) -> None:
        self._polls = polls

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def poll(self, _timeout_s: float) -> list[LogRecord]:
        return [
            LogRecord(0, 0, True, key_of(record).encode(), wire.encode(record), size_bytes=1)
            for record in self._polls.pop(0)
        ]
