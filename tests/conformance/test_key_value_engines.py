"""The engine on registries of keys and values keeps the contract of engines, in memory and on a real etcd."""

from __future__ import annotations

import threading
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rebalanser.core.tasks.model import ClaimState, RateMark, Status, Stored, TaskState
from rebalanser.core.tasks.store import (
    Applied,
    ChangesLost,
    FreeSlot,
    GoneSlot,
    Move,
    OwnerEpoch,
    Paused,
    RateMoved,
    RateStart,
    SlotGone,
    SlotNews,
    TakeOver,
    UsedSlot,
    WriteConflict,
)
from rebalanser.errors import LeaseNotFound
from rebalanser.registry.urls import parse_url
from rebalanser.tasks.engine import SharesSlots
from rebalanser.tasks.key_value import values
from rebalanser.tasks.key_value.engine import KeyValueEngine
from rebalanser.testing import FakeClock, MemoryRegistry, MemoryStore
from rebalanser.testing.engine_suite import (
    OTHER_QUEUE,
    PARTITIONS,
    QUEUE,
    TERM,
    TIMEOUT_S,
    Connect,
    EngineHarness,
    EngineSuite,
    applied,
    apply,
    make,
    move,
    read,
    task_id,
)
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_etcd import open_etcd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rebalanser.tasks.engine import Engine
    from rebalanser.testing.etcd_server import EtcdCluster

LEASE_S = 3600.0
PROCESS = "the process"
NAMES = frozenset({"send", "größe"})


class MemoryHarness(EngineHarness):
    """Engines on one memory store."""

    def __init__(self) -> None:
        self._store = MemoryStore(FakeClock())

    def open(self) -> Engine:
        return KeyValueEngine(MemoryRegistry(self._store), "tasks")

    def lose_history(self, revision: int) -> None:
        self._store.compact(revision)


class EtcdHarness(EngineHarness):
    """Engines on one server, under a root of the test's own."""

    def __init__(self, server: EtcdCluster) -> None:
        self._server = server
        self._root = f"engines/{uuid.uuid4().hex}"

    def open(self) -> Engine:
        return KeyValueEngine(open_etcd(parse_url(self._server.url()), PATIENCE_S), self._root)

    def lose_history(self, revision: int) -> None:
        self._server.call("/v3/kv/compaction", {"revision": str(revision), "physical": True})


class SlotRecorder:
    """A sink of slots that keeps what it is told, and lets a test wait for it."""

    def __init__(self) -> None:
        self._told: list[SlotNews | ChangesLost] = []
        self._more = threading.Condition()

    def __call__(self, told: Sequence[SlotNews] | ChangesLost) -> None:
        with self._more:
            self._told.extend([told] if isinstance(told, ChangesLost) else told)
            self._more.notify_all()

    def wait_for(self, *expected: SlotNews) -> None:
        """Wait until these were told, in this order."""

        def is_told() -> bool:
            rest = iter(self._told)
            return all(each in rest for each in expected)

        with self._more:
            assert self._more.wait_for(is_told, PATIENCE_S), (expected, self._told)


class SlotSuite:
    """What ``SharesSlots`` promises, on any such engine."""

    @pytest.fixture
    def lease(self, engine: KeyValueEngine) -> int:
        return engine.grant_slots(LEASE_S, TIMEOUT_S)

    def publish(self, engine: KeyValueEngine, lease: int, *holders: str) -> list[FreeSlot]:
        """Publish slots; as they are in the store."""
        made = [FreeSlot(holder, PROCESS, "label", NAMES, 30.0, lease) for holder in holders]
        engine.publish_slots(QUEUE, made, [], TIMEOUT_S)
        found = {each.holder: each for each in self.slots(engine) if isinstance(each, FreeSlot)}
        assert [replace(found[each.holder], revision=0) for each in made] == made
        return [found[holder] for holder in holders]

    def slots(self, engine: KeyValueEngine) -> list[SlotNews]:
        return list(engine.slots(QUEUE, TIMEOUT_S)[0])

    def ready(self, engine: Engine, *numbers: int) -> list[Stored]:
        """Tasks in partitions that were taken over."""
        applied(engine, *(make(number) for number in numbers))
        tasks = [read(engine, task_id(number)) for number in numbers]
        applied(engine, *(TakeOver(QUEUE, OwnerEpoch(number, 1)) for number in range(PARTITIONS)))
        return tasks

    def claim(self, task: Stored, slot: FreeSlot, token: int = 1) -> Move:
        """The claim of a task for a slot."""
        state = TaskState(Status.CLAIMED, ClaimState(0, slot.holder, slot.worker, TERM))
        return replace(move(task, state, epoch=OwnerEpoch(task.partition, token)), slot=slot)

    @pytest.mark.rule("SK-6", "SK-20")
    def test_a_slot_serves_one_claim(self, connect: Connect, engine: KeyValueEngine, lease: int) -> None:
        """However many owners try: those who were later are told that it is gone."""
        (slot,) = self.publish(engine, lease, "a")
        tasks = self.ready(engine, 1, 2, 3)
        (first,) = apply(engine, self.claim(tasks[0], slot))
        assert isinstance(first, Applied)
        assert apply(engine, self.claim(tasks[1], slot)) == [SlotGone()]
        assert apply(connect(), self.claim(tasks[1], slot)) == [SlotGone()]
        assert read(engine, task_id(2)) == tasks[1]
        assert self.slots(engine) == [UsedSlot("a", PROCESS, task_id(1))]

    @pytest.mark.rule("SK-6", "SK-20")
    def test_of_one_batch_only_one_claim_uses_a_slot(self, engine: KeyValueEngine, lease: int) -> None:
        slots = self.publish(engine, lease, "a", "b")
        tasks = self.ready(engine, 1, 2, 3)
        claims = [self.claim(task, slot) for task, slot in zip(tasks, [*slots, slots[0]], strict=True)]
        answers = apply(engine, *claims)
        assert [type(answer) for answer in answers] == [Applied, Applied, SlotGone]

    @pytest.mark.rule("SK-6", "SK-13", "SK-20")
    def test_a_claim_that_is_refused_uses_no_slot(self, engine: KeyValueEngine, lease: int) -> None:
        (slot,) = self.publish(engine, lease, "a")
        (task,) = self.ready(engine, 1)
        assert apply(engine, self.claim(task, slot, token=2)) == [WriteConflict()]
        assert apply(engine, self.claim(replace(task, revision=task.revision - 1), slot)) == [WriteConflict()]
        assert self.slots(engine) == [slot]
        applied(engine, TakeOver(QUEUE, OwnerEpoch(task.partition, 2)))
        assert apply(engine, self.claim(task, slot, token=1)) == [WriteConflict()]
        applied(engine, self.claim(task, slot, token=2))

    @pytest.mark.rule("SK-6", "SK-20")
    def test_nothing_is_claimed_for_a_slot_that_was_withdrawn(
        self, engine: KeyValueEngine, lease: int
    ) -> None:
        slots = self.publish(engine, lease, "a", "b", "c")
        tasks = self.ready(engine, 1, 2, 3)
        applied(engine, self.claim(tasks[0], slots[0]))
        used = UsedSlot("a", PROCESS, task_id(1))
        assert engine.withdraw_slots(QUEUE, PROCESS, ["a", "b"], TIMEOUT_S) == [used]
        assert apply(engine, self.claim(tasks[1], slots[1])) == [SlotGone()]
        assert self.slots(engine) == [used, slots[2]]
        assert engine.withdraw_slots(QUEUE, "another process", None, TIMEOUT_S) == []
        assert engine.withdraw_slots(QUEUE, PROCESS, None, TIMEOUT_S) == [used]
        assert self.slots(engine) == [used]
        engine.publish_slots(QUEUE, [], [used], TIMEOUT_S)
        assert self.slots(engine) == []

    @pytest.mark.rule("SK-17", "SK-20")
    def test_slots_end_with_their_lease(self, engine: KeyValueEngine, lease: int) -> None:
        (slot,) = self.publish(engine, lease, "a")
        (task,) = self.ready(engine, 1)
        engine.keep_slots(lease, TIMEOUT_S)
        engine.end_slots(lease, TIMEOUT_S)
        assert self.slots(engine) == []
        assert apply(engine, self.claim(task, slot)) == [SlotGone()]
        with pytest.raises(LeaseNotFound):
            engine.keep_slots(lease, TIMEOUT_S)
        with pytest.raises(LeaseNotFound):
            engine.publish_slots(QUEUE, [replace(slot, holder="b")], [], TIMEOUT_S)
        assert self.slots(engine) == []

    @pytest.mark.rule("SK-20")
    def test_each_change_of_a_slot_is_told(
        self, connect: Connect, engine: KeyValueEngine, lease: int
    ) -> None:
        _, revision = engine.slots(QUEUE, TIMEOUT_S)
        told, told_to_other_queue = SlotRecorder(), SlotRecorder()
        watching = connect()
        assert isinstance(watching, SharesSlots)
        watching.watch_slots(OTHER_QUEUE, revision, told_to_other_queue)
        watching.watch_slots(QUEUE, revision, told)
        first, second = self.publish(engine, lease, "a", "b")
        (task,) = self.ready(engine, 1)
        applied(engine, self.claim(task, first))
        engine.end_slots(lease, TIMEOUT_S)
        gone = GoneSlot("a", PROCESS), GoneSlot("b", PROCESS)
        told.wait_for(first, UsedSlot("a", PROCESS, task_id(1)), gone[0])
        told.wait_for(first, second, gone[1])
        assert told_to_other_queue._told == []

    @pytest.mark.rule("SK-20")
    def test_a_slot_of_a_newer_version_is_left_alone(
        self, engine: KeyValueEngine, lease: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told = SlotRecorder()
        _, revision = engine.slots(QUEUE, TIMEOUT_S)
        newer = FreeSlot("a", "its process", "label", NAMES, 30.0, lease)
        with monkeypatch.context() as patch:
            patch.setattr(values, "SCHEMA_VERSION", 99)
            engine.publish_slots(QUEUE, [newer], [], TIMEOUT_S)
        engine.watch_slots(QUEUE, revision, told)
        (slot,) = self.publish(engine, lease, "b")
        assert self.slots(engine) == [slot]
        told.wait_for(slot)
        assert [each for each in told._told if not isinstance(each, ChangesLost)] == [slot]


class RateSuite:
    """What ``Move`` promises of rate limits, on an engine with owners."""

    @pytest.mark.rule("SK-23")
    def test_a_start_is_written_over_the_mark_that_it_follows(self, connect: Connect) -> None:
        engine = connect()
        limit, epoch = ("send", "größe \0"), OwnerEpoch(0, 5)
        applied(engine, TakeOver(QUEUE, epoch), *(make(number) for number in range(1, 5)))
        claim = TaskState(Status.CLAIMED, ClaimState(0, "h", "w", TERM))
        mark = RateMark(0.25, "boot", 1e6 + 0.125, 1.7e9)

        def started(number: int, before: int) -> Move:
            of = read(engine, task_id(number))
            return replace(move(of, claim, epoch=epoch), start=RateStart(limit, before, mark))

        assert engine.rates(QUEUE, [limit], TIMEOUT_S) == {}
        (first,) = applied(engine, started(1, 0))
        assert connect().rates(QUEUE, [limit, ("send", "")], TIMEOUT_S) == {
            limit: replace(mark, revision=first)
        }
        assert engine.rates(OTHER_QUEUE, [limit], TIMEOUT_S) == {}
        for before in (0, first - 1):
            assert apply(engine, started(2, before)) == [RateMoved()]
        assert read(engine, task_id(2)).state.status is Status.WAITING
        answers = apply(engine, started(2, first), started(3, first))
        assert [type(answer) for answer in answers] == [Applied, RateMoved]
        (after,) = engine.rates(QUEUE, [limit], TIMEOUT_S).values()
        assert after.revision == read(engine, task_id(2)).revision
        engine.put_pause(QUEUE, "", b"pause", TIMEOUT_S)
        assert apply(engine, started(3, after.revision)) == [Paused()]
        engine.put_pause(QUEUE, "", None, TIMEOUT_S)
        applied(engine, TakeOver(QUEUE, OwnerEpoch(0, 6)))
        assert apply(engine, started(3, after.revision)) == [WriteConflict()]
        assert engine.rates(QUEUE, [limit], TIMEOUT_S) == {limit: after}


class TestMemory(RateSuite, SlotSuite, EngineSuite):
    @pytest.fixture
    def harness(self) -> EngineHarness:
        return MemoryHarness()


class TestEtcd(RateSuite, SlotSuite, EngineSuite):
    @pytest.fixture
    def harness(self, etcd: EtcdCluster) -> EngineHarness:
        return EtcdHarness(etcd)
