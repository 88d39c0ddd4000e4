"""What a leader's term makes of its machine's effects, with a writer that is told what to answer."""

from __future__ import annotations

import itertools
import math
import threading
from typing import TYPE_CHECKING, ClassVar, cast
from unittest import mock

import pytest
from confluent_kafka import TopicPartition

from rebalanser.core.clock import RESTART_MAX_S
from rebalanser.core.shiva.changes import DocumentChain, change_between
from rebalanser.core.shiva.messages import (
    Deposed,
    DropRecords,
    Fact,
    FactKind,
    KeepCommands,
    Kept,
    LeaderEffect,
    LeaderEvent,
    PongRead,
    PublishDocument,
    Published,
    Report,
    SendPing,
    Stop,
    TookOver,
    Wakeup,
)
from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.records import (
    AssignmentDocument,
    DocumentChange,
    KeptCommand,
    LeaderAnnouncement,
    Ping,
    Pong,
    StartCommand,
)
from rebalanser.core.shiva.types import ApplicationId, Archive, Epoch, Incarnation, Mode
from rebalanser.errors import (
    InternalError,
    InvalidState,
    OutcomeUnknown,
    RebalanserError,
    RegistryUnavailable,
    UnusableStore,
)
from rebalanser.shiva.cluster import TopicNames
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.log import GroupOffsets
from rebalanser_kafka.records import LogRecord, NewRecord
from rebalanser_kafka.shiva import candidate as leading
from rebalanser_kafka.shiva import leader as module
from rebalanser_kafka.shiva.candidate import LeaderCandidate
from rebalanser_kafka.shiva.follower import ReadBatch
from rebalanser_kafka.shiva.leader import LeaderTerm
from rebalanser_kafka.shiva.wire import PartKey, decode, encode, key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rebalanser.core.shiva.leader import Leader
    from rebalanser_kafka.log import TransactionalWriter

DOCUMENT = AssignmentDocument(Epoch(5, 1), "l", 0, 30.0)
NEXT = AssignmentDocument(Epoch(5, 2), "l", 41, 30.0)
PING = Ping(5, "l", 1, Epoch(5, 1), 30.0)
APP = ApplicationId("t", "c", "a")

CONNECTION = Connection.from_url("kafka://127.0.0.1:1/c")


class Writer:
    """Writes to a list; like the real one it takes no more after an outcome that is not known."""

    def __init__(self) -> None:
        self.written: list[list[NewRecord]] = []
        self.committed: list[object] = []
        self.limits_s: list[float] = []
        self.failure: RebalanserError | None = None
        self._failed = False

    def init(self) -> None:
        """Fence nobody."""

    def transaction(
        self, records: Sequence[NewRecord], offsets: object = None, *, limit_s: float = math.inf
    ) -> list[int]:
        self.limits_s.append(limit_s)
        if self._failed:
            raise InvalidState("it needs init() first")
        if self.failure is not None:
            self._failed = True
            raise self.failure
        before = sum(map(len, self.written))
        self.written.append(list(records))
        self.committed.append(offsets)
        return list(range(before, before + len(records)))


class Machine:
    """Says once what it was told to say, and notes what it hears."""

    def __init__(self, *effects: LeaderEffect) -> None:
        self._effects = list(effects)
        self.heard: list[LeaderEvent] = []
        self.wall_ms = 0
        self.next_wakeup = None

    def handle(self, event: LeaderEvent, _now: float, wall_ms: int) -> list[LeaderEffect]:
        self.heard.append(event)
        self.wall_ms = wall_ms
        effects, self._effects = self._effects, []
        return effects


def term_of(machine: Machine, writer: Writer, options: LeaderOptions | None = None) -> LeaderTerm:
    term = LeaderTerm(
        CONNECTION,
        TopicNames().of("c"),
        "l",
        options or LeaderOptions(),
        lambda: "membership",
        timeout_s=1.0,
        tell=lambda _fact: None,
    )
    term._machine = cast("Leader", machine)
    term._writer = cast("TransactionalWriter", writer)
    return term


@pytest.mark.rule("SH-8", "SH-15")
@pytest.mark.parametrize(("session_timeout_s", "limit_s"), [(1.5, 5.0), (4.0, 8.0), (10.0, 20.0)])
def test_a_leader_that_cannot_write_is_silent_for_two_sessions_and_archives_have_their_time(
    session_timeout_s: float, limit_s: float
) -> None:
    archive = Archive("0" * 64, 3, 1)
    keep = KeepCommands((KeptCommand(StartCommand(APP, "s", archive, Mode.AVAILABLE), 7),))
    writer = Writer()
    effects = (SendPing(PING), PublishDocument(DOCUMENT), keep)
    options = LeaderOptions(session_timeout_s=session_timeout_s)
    term = term_of(Machine(*effects), writer, options)
    parts = {PartKey(APP, archive.sha256, 0): b"zip"}
    with mock.patch.object(term._archives, "parts", return_value=parts):
        term._handle(Wakeup())
    assert writer.limits_s == [limit_s, limit_s, math.inf]


@pytest.mark.rule("SH-7", "SH-9")
def test_what_follows_a_write_of_unknown_outcome_is_not_written_and_the_leader_may_lead_again() -> None:
    machine, writer = Machine(PublishDocument(DOCUMENT), SendPing(PING)), Writer()
    writer.failure = OutcomeUnknown("the commit was not answered")
    term = term_of(machine, writer)
    term._handle(Wakeup())
    assert machine.heard == [Wakeup(), Deposed("the commit was not answered")]
    assert term.failure is writer.failure


def test_what_became_of_an_effect_is_told_after_all_effects_of_the_same_event() -> None:
    machine, writer = Machine(PublishDocument(DOCUMENT), SendPing(PING)), Writer()
    term_of(machine, writer)._handle(Wakeup())
    assert machine.heard == [Wakeup(), Published(0)]
    assert [[record.topic for record in records] for records in writer.written] == [
        ["c-command", "c-assignement"],
        ["c-control"],
    ]


@pytest.mark.rule("SH-4", "SH-24")
@pytest.mark.parametrize("change", [None, change_between(DOCUMENT, NEXT)], ids=["whole", "change"])
def test_a_document_or_change_is_written_to_both_topics_with_the_offset_consumed(
    change: DocumentChange | None,
) -> None:
    """Both or neither: one transaction."""
    machine, writer = Machine(PublishDocument(NEXT, change)), Writer()
    term_of(machine, writer)._handle(Wakeup())
    assert machine.heard == [Wakeup(), Published(0)]
    ((command, assignement),) = writer.written
    assert [record.topic for record in (command, assignement)] == ["c-command", "c-assignement"]
    assert (command.key, command.value) == (assignement.key, assignement.value)
    assert decode(command.key, command.value or b"") == (change or NEXT)
    (offsets,) = writer.committed
    assert isinstance(offsets, GroupOffsets)
    assert dict(offsets.next_offsets) == {("c-command", 0): NEXT.consumed + 1}


@pytest.mark.rule("SH-15")
def test_however_large_an_archive_is_it_is_kept_in_transactions_that_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_WRITTEN_AT_ONCE_BYTES", 2500)
    start = StartCommand(APP, "1", Archive("0" * 64, 6000, 6), Mode.AVAILABLE)
    parts = {PartKey(APP, start.archive.sha256, number): bytes(1000) for number in range(6)}
    machine, writer = Machine(KeepCommands((KeptCommand(start, 3),))), Writer()
    term = term_of(machine, writer)
    monkeypatch.setattr(term._archives, "parts", lambda _archives: parts)
    term._handle(Wakeup())
    assert all(sum(record.size_bytes for record in records) <= 2500 for records in writer.written)
    keys = [(record.key or b"").decode() for records in writer.written for record in records]
    assert keys == [*map(str, parts), f"keep:{APP}"]
    kept = machine.heard[-1]
    assert isinstance(kept, Kept)
    assert kept.at[APP].offset == 6


@pytest.mark.rule("SH-15", "SH-16")
def test_only_what_stands_on_command_is_dropped_whatever_number_somebody_gave_a_part() -> None:
    stray = PartKey(APP, "0" * 64, 99_999)
    dropped = DropRecords(archives=frozenset({(APP, Archive(stray.sha256, 0, stray.number + 1))}))
    writer = Writer()
    term = term_of(Machine(dropped), writer)
    term._index.note(stray, 7)
    term._handle(Wakeup())
    assert [[record.key for record in records] for records in writer.written] == [[str(stray).encode()]]


@pytest.mark.rule("SH-15")
def test_the_age_of_records_is_told_by_the_brokers_clock() -> None:
    machine = Machine()
    term = term_of(machine, Writer())
    announcement = LeaderAnnouncement("l")
    key, value = key_of(announcement).encode(), encode(announcement)
    term._take_command(LogRecord(7, 5_000_000, True, key, value))
    term._handle(Wakeup())
    assert 5_000_000 <= machine.wall_ms < 5_060_000
    term._take_command(LogRecord(8, 77, False, key, value))
    term._handle(Wakeup())
    assert 5_000_000 <= machine.wall_ms < 5_060_000, "a client's clock does not count"


@pytest.mark.rule("SH-3")
def test_a_term_comes_further_with_each_effect_and_not_while_its_thread_hangs() -> None:
    seen: list[int] = []

    class Watched(Machine):
        def handle(self, event: LeaderEvent, now: float, wall_ms: int) -> list[LeaderEffect]:
            seen.append(term.progress)
            return super().handle(event, now, wall_ms)

    term = term_of(Watched(SendPing(PING), Report(Fact(FactKind.LEFT))), Writer())
    term.depose("enough")
    term._step()
    assert seen == [1], "it came further when it took the event"
    assert term.progress == 1 + 2 + 1, "over a request and two effects"


class Consumer:
    """Gives the partition to its leader at once, and notes what the leader does with it."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self.config = config
        self.did: list[str] = []

    def subscribe(self, _topics: list[str], *, on_assign: Callable[..., None], **_others: object) -> None:
        on_assign(self, [TopicPartition("c-command", 0)])

    def incremental_assign(self, _partitions: object) -> None: ...

    def pause(self, _partitions: object) -> None: ...

    def poll(self, _timeout_s: float) -> None: ...

    def consumer_group_metadata(self) -> str:
        return "membership"

    def close(self) -> None:
        self.did.append("closed")


@pytest.mark.parametrize(("session_timeout_s", "heartbeat_ms"), [(1.5, 300), (45.0, 500)])
def test_candidates_hear_within_half_a_second_that_the_leader_was_lost_or_has_left(
    session_timeout_s: float, heartbeat_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "Consumer", Consumer)
    options = LeaderOptions(session_timeout_s=session_timeout_s)
    leader = LeaderCandidate(CONNECTION, TopicNames().of("c"), "l", options, timeout_s=1.0)
    config = cast("Consumer", leader._consumer).config
    assert config["session.timeout.ms"] == session_timeout_s * 1000
    assert config["heartbeat.interval.ms"] == heartbeat_ms


MOVES, PAUSED_AT = 300, 350
"""Looks at a term's thread: until then it comes further, and then the whole process is paused."""


@pytest.mark.rule("SH-3")
def test_a_leader_whose_thread_hangs_gives_the_partition_back(monkeypatch: pytest.MonkeyPatch) -> None:
    term, looks = mock.Mock(ended=False, progress=7), itertools.count(1)

    def monotonic() -> float:
        """Half a second passes at each look, and once a pause of the whole process for a day."""
        look = next(looks)
        term.progress += look < MOVES
        return look / 2 + (86_400.0 if look > PAUSED_AT else 0.0)

    monkeypatch.setattr(leading, "time", mock.Mock(monotonic=monotonic))
    monkeypatch.setattr(leading, "Consumer", Consumer)
    monkeypatch.setattr(leading, "LeaderTerm", lambda *_: term)
    leader = LeaderCandidate(
        CONNECTION,
        TopicNames().of("c"),
        "l",
        LeaderOptions(),
        timeout_s=1.0,
    )
    leader.begin()
    with pytest.raises(InternalError, match="stood still for more than 60 s: another leader takes over"):
        leader.wait(PATIENCE_S)
    assert cast("Consumer", leader._consumer).did == ["closed"]
    assert leader._membership is None, "what the thread still writes is refused"
    assert MOVES + 2 * leading.HUNG_S - 4 < next(looks) < MOVES + 2 * leading.HUNG_S + 4
    term.depose.assert_called_once()
    term.close.assert_not_called()


class Forgotten(Consumer):
    """Is admitted to the group only if it is the third one: the client has dropped the others' requests."""

    made: ClassVar[list[Forgotten]] = []

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.made.append(self)

    def subscribe(self, topics: list[str], *, on_assign: Callable[..., None], **others: object) -> None:
        if len(self.made) == 3:
            super().subscribe(topics, on_assign=on_assign, **others)


@pytest.mark.rule("SH-3")
def test_a_candidate_that_is_not_admitted_to_the_group_joins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count(0.0, 0.5)
    term = mock.Mock(ended=False, failure=None)
    monkeypatch.setattr(Forgotten, "made", [])
    monkeypatch.setattr(leading, "time", mock.Mock(monotonic=lambda: next(times)))
    monkeypatch.setattr(leading, "Consumer", Forgotten)
    monkeypatch.setattr(leading, "LeaderTerm", lambda *_: term)
    leader = LeaderCandidate(
        CONNECTION,
        TopicNames().of("c"),
        "l",
        LeaderOptions(),
        timeout_s=1.0,
    )
    term.begin = leader.stop
    leader.begin()
    assert leader.wait(PATIENCE_S)
    term.stop.assert_called_once()
    assert [consumer.did for consumer in Forgotten.made] == [["closed"]] * 3
    assert next(times) > 2 * (leading.MAX_POLL_INTERVAL_S + LeaderOptions().session_timeout_s)


STEPS_DOWN_S = 600.0
"""Seconds in which a leader begins terms that step down at once."""


@pytest.mark.rule("SH-3")
def test_a_leader_whose_terms_step_down_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times, began = itertools.count(0.0, 0.05), list[float]()
    term = mock.Mock(ended=True, failure=None)
    monkeypatch.setattr(leading, "time", mock.Mock(monotonic=lambda: next(times)))
    monkeypatch.setattr(leading, "Consumer", Consumer)
    monkeypatch.setattr(leading, "LeaderTerm", lambda *_: term)
    leader = LeaderCandidate(CONNECTION, TopicNames().of("c"), "l", LeaderOptions(), timeout_s=1.0)

    def begin() -> None:
        began.append(next(times))
        if began[-1] > STEPS_DOWN_S:
            leader.stop()

    term.begin = begin
    leader.begin()
    assert leader.wait(PATIENCE_S)
    rests = [later - earlier for earlier, later in itertools.pairwise(began)]
    assert [round(rest) for rest in rests[:6]] == [1, 2, 4, 8, 16, 30]
    assert all(RESTART_MAX_S <= rest < RESTART_MAX_S + 1 for rest in rests[5:])


@pytest.mark.rule("SH-22")
def test_a_term_that_stops_reads_control_to_its_end_first(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    term = term_of(machine, Writer())
    monkeypatch.setattr(term, "_end_of", lambda _topic: 7)
    term.stop()
    term._step()
    assert machine.heard == []
    pong = Pong("w", Incarnation("folder", 1), 1, 1, 5, None, leaving=True)
    record = LogRecord(5, 1, True, key_of(pong).encode(), encode(pong))
    term._take(ReadBatch(term._topics.control, [record], 6, threading.Event()))
    assert machine.heard == [PongRead(pong)]
    term._take(ReadBatch(term._topics.control, [], 7, threading.Event()))
    assert machine.heard == [PongRead(pong), Stop()]


@pytest.mark.rule("SH-22")
def test_a_term_that_cannot_read_control_any_more_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(_topic: str) -> int:
        raise RegistryUnavailable("no answer")

    machine = Machine()
    term = term_of(machine, Writer())
    monkeypatch.setattr(term, "_end_of", unreachable)
    term.stop()
    term._step()
    assert machine.heard == [Deposed("asked to stop, and CONTROL cannot be read: no answer")]


@pytest.mark.rule("SH-7")
@pytest.mark.parametrize("end", [5, 6])
def test_a_document_of_a_term_that_command_cannot_have_given_is_refused(
    monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    term = term_of(Machine(), Writer())
    monkeypatch.setattr(term, "_end_of", lambda _topic: end)
    if end > DOCUMENT.epoch.term:
        term._refuse_foreign(DOCUMENT)
        return
    with pytest.raises(UnusableStore, match="c-command has been recreated"):
        term._refuse_foreign(DOCUMENT)


@pytest.mark.rule("SH-9", "SH-24")
@pytest.mark.parametrize("read", [True, False], ids=["read", "missing"])
def test_a_leader_is_told_whether_the_last_document_was_there(
    monkeypatch: pytest.MonkeyPatch, read: bool
) -> None:
    chain = DocumentChain()
    if read:
        chain.read(DOCUMENT)
    chain.read(change_between(DOCUMENT, NEXT))
    monkeypatch.setattr(module, "last_document", lambda *_args, **_options: (chain, 9))
    monkeypatch.setattr(module, "last_pongs", lambda *_args: ((), 3))
    monkeypatch.setattr(module, "TopicFollower", mock.Mock())
    machine = Machine()
    term = term_of(machine, Writer())
    monkeypatch.setattr(term, "_refuse_foreign", lambda _document: None)
    term._take_over()
    assert machine.heard == [TookOver(0, NEXT if read else None, (), document_missing=not read)]
