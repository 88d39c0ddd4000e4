"""The engine on etcd while members are killed, leaders change, history is compacted and the store is full."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pytest

from rebalanser.core.tasks.model import ClaimState, ClaimTerm, Head, Status, Stored, Task, TaskId, TaskState
from rebalanser.core.tasks.store import Applied, ChangesLost, Collect, Enqueue, Exists, Move
from rebalanser.errors import OutcomeUnknown, RetryLater
from rebalanser.tasks.key_value.engine import KeyValueEngine, open_engine
from rebalanser.testing.engine_suite import StateRecorder
from rebalanser.testing.etcd_server import EtcdCluster
from rebalanser.testing.waiting import PATIENCE_S
from support.proxy import TcpProxy

TIMEOUT_S = PATIENCE_S
SHORT_S = 2.0
QUEUE = "mail"
PARTITIONS = 4
THREADS = 4
BATCH = 40

Opener: TypeAlias = Callable[[str], KeyValueEngine]


@pytest.fixture
def connect() -> Iterator[Opener]:
    """Opens engines that are closed when the test ends."""
    with contextlib.ExitStack() as stack:

        def opened(url: str) -> KeyValueEngine:
            engine = stack.enter_context(contextlib.closing(open_engine(url, TIMEOUT_S)))
            engine.define(QUEUE, PARTITIONS, TIMEOUT_S)
            return engine

        yield opened


@pytest.fixture
def members(etcd_cluster: EtcdCluster) -> Iterator[EtcdCluster]:
    """Three healthy members, made whole again after the test."""
    yield etcd_cluster
    etcd_cluster.restart_all()


@pytest.fixture
def prefix() -> str:
    return f"faults/{random.randbytes(8).hex()}"


def enqueue(task: TaskId, payload: bytes = b"payload") -> Enqueue:
    return Enqueue(Task(Head(task, QUEUE, "send"), payload), int(task, 16) % PARTITIONS)


def claimed(number: int, holder: str) -> TaskState:
    return TaskState(Status.CLAIMED, ClaimState(number, holder, "worker", ClaimTerm(30.0, "boot", 1.0)))


def collect(*tasks: Stored) -> Collect:
    return Collect(QUEUE, {task.head.id: (task.partition, task.revision) for task in tasks})


@dataclass
class Worker:
    """Claims the tasks of its own again and again, in batches, and checks all that the engine says.

    Nobody else writes them, so what is read is what was answered last, or put by an unknown outcome.
    """

    engine: KeyValueEngine
    name: int
    unknown: int = 0
    refused: int = 0
    latest: int = 0
    """The greatest revision seen."""
    known: dict[TaskId, int] = field(default_factory=dict)
    """The number of each task's last claim that is known to be there; -1 for none."""

    def work(self, rounds: int, finished: threading.Event) -> None:
        """Claim for so many rounds at least, and until it is finished."""
        ids = [f"{self.name:08x}{each:032x}" for each in range(BATCH)]
        deadline = time.monotonic() + PATIENCE_S
        while set(self.known) < set(ids):
            self._try(self._enqueue, ids, deadline)
        while min(self.known.values()) < rounds or not finished.is_set():
            self._try(self._claim, ids, deadline)

    def _try(self, act: Callable[[list[TaskId]], None], ids: list[TaskId], deadline: float) -> None:
        assert time.monotonic() < deadline, f"worker {self.name} came as far as {self.known}"
        try:
            act(ids)
        except OutcomeUnknown:
            self.unknown += 1
        except RetryLater:
            self.refused += 1

    def _enqueue(self, ids: list[TaskId]) -> None:
        answers = self.engine.apply([enqueue(task) for task in ids], SHORT_S)
        for task, answer in zip(ids, answers, strict=True):
            assert isinstance(answer, Applied) or (isinstance(answer, Exists) and self.unknown), answer
            self.known[task] = -1

    def _claim(self, ids: list[TaskId]) -> None:
        found = self.engine.read(QUEUE, ids, SHORT_S, at_least=self.latest)
        assert found.keys() == set(ids), "an answered task is gone"
        moves = [self._move(stored) for stored in found.values()]
        answers = self.engine.apply(moves, SHORT_S)
        for move, answer in zip(moves, answers, strict=True):
            assert isinstance(answer, Applied), "a conflict, though nobody else writes"
            assert answer.revision >= self.latest, "revisions went back"
            self.latest = answer.revision
            self.known[move.id] += 1

    def _move(self, stored: Stored) -> Move:
        """The next claim. What is found may be further than what was answered, if an outcome is unknown."""
        task = stored.head.id
        number = -1 if stored.state.claim is None else stored.state.claim.number
        assert number >= self.known[task], "an answered claim is lost"
        assert number == self.known[task] or self.unknown, "a claim took effect that the engine denied"
        self.known[task] = number
        self.latest = max(self.latest, stored.revision)
        state = claimed(number + 1, f"{self.name}-{number + 1}")
        return Move(task, QUEUE, stored.partition, stored.revision, state, head=stored.head)


@contextlib.contextmanager
def working(workers: list[Worker], rounds: int) -> Iterator[None]:
    """Have the workers work while the block does something to the servers, and check that all went well."""
    finished = threading.Event()
    with ThreadPoolExecutor(len(workers)) as threads:
        futures: list[Future[None]] = [threads.submit(worker.work, rounds, finished) for worker in workers]
        try:
            yield
        finally:
            finished.set()
        for future in futures:
            future.result()


def check_all(workers: list[Worker], engine: KeyValueEngine) -> None:
    """All that was answered is there, and one unknown claim further at most."""
    for worker in workers:
        found = engine.read(QUEUE, list(worker.known), TIMEOUT_S, at_least=worker.latest)
        for task, number in worker.known.items():
            claim = found[task].state.claim
            assert claim is not None
            assert claim.number == number or (claim.number == number + 1 and worker.unknown)
    assert engine.count(QUEUE, TIMEOUT_S) == {Status.CLAIMED: BATCH * len(workers)}


@pytest.mark.rule("SK-6", "SK-11", "SK-17")
def test_no_answered_write_is_lost_when_leaders_are_killed(
    members: EtcdCluster, connect: Opener, prefix: str
) -> None:
    workers = [Worker(connect(members.url(prefix)), name) for name in range(THREADS)]
    with working(workers, rounds=10):
        for _ in range(2):
            time.sleep(0.5)
            leader = members.wait_leader()
            members.kill(leader)
            time.sleep(1.0)
            members.restart(leader)
    check_all(workers, connect(members.url(prefix)))


@pytest.mark.rule("SK-6", "SK-11")
def test_no_answered_write_is_lost_when_the_leader_changes_and_history_is_compacted(
    members: EtcdCluster, connect: Opener, prefix: str
) -> None:
    engine = connect(members.url(prefix))
    workers = [Worker(connect(members.url(prefix)), name) for name in range(THREADS)]
    with working(workers, rounds=10):
        for _ in range(5):
            time.sleep(0.2)
            revision = engine.page(QUEUE, TIMEOUT_S).revision
            members.call("/v3/kv/compaction", {"revision": str(revision), "physical": True})
        leader = members.wait_leader()
        members.stop_member(leader)
        time.sleep(0.5)
        members.restart(leader)
    check_all(workers, engine)


@pytest.mark.rule("SK-14")
def test_a_collection_is_all_or_none_when_leaders_are_killed(
    members: EtcdCluster, connect: Opener, prefix: str
) -> None:
    engine = connect(members.url(prefix))
    ids = [f"{number:040x}" for number in range(400)]
    engine.apply([enqueue(task) for task in ids], TIMEOUT_S)
    with ThreadPoolExecutor(1) as threads:
        for _ in range(2):
            tasks = engine.read(QUEUE, ids, TIMEOUT_S).values()
            collecting = threads.submit(engine.apply, [collect(*tasks)], TIMEOUT_S)
            time.sleep(random.uniform(0.02, 0.2))
            leader = members.wait_leader()
            members.kill(leader)
            with contextlib.suppress(RetryLater):
                collecting.result()
            members.restart(leader)
            left = engine.read(QUEUE, ids, TIMEOUT_S)
            settle(engine, left)
            assert len(engine.read(QUEUE, ids, TIMEOUT_S)) in {0, len(ids)}
            engine.apply([enqueue(task) for task in ids], TIMEOUT_S)


def settle(engine: KeyValueEngine, tasks: Mapping[TaskId, Stored]) -> None:
    """Write to each of the tasks, which settles a collection that was cut off."""
    moves = [
        Move(task, QUEUE, stored.partition, stored.revision, TaskState(), head=stored.head)
        for task, stored in tasks.items()
    ]
    engine.apply(moves, TIMEOUT_S)


@pytest.mark.rule("SK-12")
def test_a_full_store_says_so_and_can_be_emptied(tmp_path: Path, connect: Opener, prefix: str) -> None:
    with EtcdCluster(data_folder=tmp_path, quota_bytes=4_000_000) as server:
        engine = connect(server.url(prefix))
        there: list[TaskId] = []
        with pytest.raises(OutcomeUnknown, match="quota"):  # noqa: PT012 (which it is depends on the server)
            for number in range(400):
                task = f"{number:040x}"
                engine.apply([enqueue(task, b"x" * 400_000)], TIMEOUT_S)
                there.append(task)
        assert there
        found = engine.read(QUEUE, there, TIMEOUT_S)
        assert list(found) == there, "an answered task is gone"
        perhaps = [task, *(f"{number:040x}" for number in range(500, 510))]
        with pytest.raises(OutcomeUnknown, match="quota"):
            engine.apply([enqueue(each, b"x" * 9_000) for each in perhaps[1:]], TIMEOUT_S)
        found |= engine.read(QUEUE, perhaps, TIMEOUT_S)
        assert engine.count(QUEUE, TIMEOUT_S) == {Status.WAITING: len(found)}
        answers = engine.apply([collect(stored) for stored in found.values()], TIMEOUT_S)
        assert all(isinstance(answer, Applied) for answer in answers)
        assert engine.count(QUEUE, TIMEOUT_S) == {}


@pytest.mark.rule("SK-11")
def test_a_watch_goes_on_after_a_compaction(etcd: EtcdCluster, connect: Opener, prefix: str) -> None:
    writer = connect(etcd.url(prefix))
    recorder = StateRecorder(PATIENCE_S)
    with TcpProxy(etcd.endpoints[0]) as proxy:
        watcher = connect(etcd.url(prefix, endpoints=[proxy.address]))
        first = write(writer, 0)
        watch = watcher.watch(QUEUE, first.revision - 1, recorder)
        recorder.wait_for(first)
        proxy.cut()
        hidden = [write(writer, number) for number in range(1, 10)]
        revision = hidden[-1].revision
        etcd.call("/v3/kv/compaction", {"revision": str(revision), "physical": True})
        proxy.heal()
        recorder.wait_until(
            lambda told: any(
                isinstance(item, ChangesLost) and item.revision >= revision - 1 for item in told
            ),
            f"Lost up to {revision}",
        )
        later = write(writer, 10)
        recorder.wait_for(later)
        watch.close()
        watcher.close()


def write(engine: KeyValueEngine, number: int) -> Stored:
    """Enqueue one task and read it."""
    task = f"{number:040x}"
    (answer,) = engine.apply([enqueue(task)], TIMEOUT_S)
    assert isinstance(answer, Applied)
    return engine.read(QUEUE, [task], TIMEOUT_S)[task]
