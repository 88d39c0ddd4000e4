"""Producers with an outbox: killed at every step, cut off from their engine, and out of space (SK-4)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rebalanser.core.tasks.model import (
    ClaimState,
    ClaimTerm,
    EnqueueAnswer,
    Status,
    Stored,
    TaskId,
    TaskState,
)
from rebalanser.core.tasks.store import Applied, Collect, Move
from rebalanser.tasks import Queue
from rebalanser.tasks.functions import EnqueueOptions
from rebalanser.tasks.spool import SUFFIX, Spool
from rebalanser.testing.etcd_server import EtcdCluster
from rebalanser.testing.waiting import PATIENCE_S, patience_ratio, wait_until
from rebalanser_sqlite.tasks import SqliteEngine
from tests.faults.outbox_producer import CALLS, PARTITIONS, QUEUE, REFUSED, TIMEOUT_S, opened, task_id

PRODUCER = Path(__file__).with_name("outbox_producer.py")
SHORT_S = 2.0
AT_ONCE = 20
GOOD = {task_id(number) for call in CALLS for number, _ in call if number != REFUSED}
DONE = TaskState(Status.COMPLETED, ClaimState(0, "holder", "worker", ClaimTerm(30.0, "", 0.0)))
FULL_DISK = """
import resource, sys
from pathlib import Path
from rebalanser.errors import UnusableFolder
from rebalanser.core.tasks.store import Enqueue
from rebalanser.core.tasks.model import Head, Task
from rebalanser.tasks.spool import Spool, SpoolName
def task(number):
    return Enqueue(Task(Head(f"{number:040x}", "mail", "send"), bytes(2000)), 0)
spool = Spool(Path(sys.argv[1]), SpoolName("mail", "", "mail"), 10.0)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
added = failures = 0
for number in range(200):
    try:
        spool.add([task(number), task(1000 + number)])
        added += 2
    except UnusableFolder as error:
        failures += 1
        assert "space" in str(error), error
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
assert spool.counts() == (added, 0), (spool.counts(), added)
assert spool.add([task(5000)]) == range(added + 1, added + 2)
print(added, failures)
"""


def spooled(folder: Path) -> tuple[int, int]:
    """How many tasks wait in the outbox of a folder, and how many were refused."""
    paths = list((folder / "outbox").glob(f"*{SUFFIX}"))
    if not paths:
        return 0, 0
    (path,) = paths
    with closing(Spool(path, None, TIMEOUT_S)) as spool:
        return spool.counts()


def stored(queue: Queue) -> list[Stored]:
    return list(queue.tasks())


def complete_and_collect(queue: Queue) -> set[TaskId]:
    """Have all tasks done and deleted; which they were."""
    engine = queue.context.engine
    moves = [Move(each.head.id, QUEUE, each.partition, each.revision, DONE) for each in stored(queue)]
    assert all(isinstance(answer, Applied) for answer in engine.apply(moves, TIMEOUT_S))
    done = {each.head.id: (each.partition, each.revision) for each in stored(queue)}
    if done:
        (answer,) = engine.apply([Collect(QUEUE, done)], TIMEOUT_S)
        assert isinstance(answer, Applied)
    return set(done)


def check_forwarded_once(url: str, folder: Path) -> bool:
    """Finish what a producer began, all that it had made being gone by then; whether it was killed."""
    ended = (folder / "ended").read_text()
    lines = (folder / "answered").read_text().split("\n")[:-1] if (folder / "answered").exists() else []
    told = dict(line.split() for line in lines)
    left, _ = spooled_safely(folder)
    with closing(Queue(QUEUE, url, partitions=PARTITIONS, state_folder=folder / "state")) as without_outbox:
        before = complete_and_collect(without_outbox)
    with closing(opened(url, folder)) as queue:
        wait_until(lambda: spooled(folder)[0] == 0)
        after = {each.head.id for each in stored(queue)}
    answered = {task for task, answer in told.items() if answer != "refused"}
    place = f"{folder.name}: {ended}, {told}, {before}, {after}"
    assert ended in {"killed", "whole"}, place
    assert before.isdisjoint(after), f"made twice: {place}"
    assert answered <= before | after, f"lost: {place}"
    assert before | after <= GOOD, f"refused, and yet there: {place}"
    assert {task for task, answer in told.items() if answer == "committed"} <= before, place
    assert len(after) <= left, f"more than was spooled: {place}"
    if ended == "whole":
        assert (before, after) == (GOOD, set())
        assert told == dict.fromkeys(sorted(GOOD), "committed") | {task_id(REFUSED): "refused"}
    return ended == "killed"


def spooled_safely(folder: Path) -> tuple[int, int]:
    """The same of a folder whose producer may have died before its spool was made."""
    try:
        return spooled(folder)
    except Exception:
        return 0, 0


def killed_everywhere(url: str, folder: Path, base: Path | None) -> int:
    """Have producers killed at every place that they come to; how many places there are."""
    killed = 0
    for first in range(1, 1000, AT_ONCE):
        order = {
            "url": url,
            "folder": str(folder / "{number}"),
            "base": None if base is None else str(base),
            "first": first,
            "last": first + AT_ONCE,
        }
        subprocess.run([sys.executable, str(PRODUCER), json.dumps(order)], check=True, timeout=PATIENCE_S)
        numbers = range(first, first + AT_ONCE)
        ends = [check_forwarded_once(url.format(number=each), folder / str(each)) for each in numbers]
        killed += sum(ends)
        if not all(ends):
            return killed
    raise AssertionError("the producers come to no end")


@pytest.mark.rule("SK-3", "SK-4", "SK-17")
def test_a_producer_killed_at_any_step_has_each_task_made_once_on_sqlite(tmp_path: Path) -> None:
    base = tmp_path / "base.db"
    with closing(SqliteEngine(base)) as engine:
        engine.define(QUEUE, PARTITIONS, TIMEOUT_S)
    url = f"sqlite:///{tmp_path}/{{number}}/mail.db"
    assert killed_everywhere(url, tmp_path, base) > 50


@pytest.mark.rule("SK-3", "SK-4", "SK-17")
def test_a_producer_killed_at_any_step_has_each_task_made_once_on_etcd(etcd_url: str, tmp_path: Path) -> None:
    url = f"{etcd_url}/outbox/{uuid.uuid4().hex}/{{number}}"
    assert killed_everywhere(url, tmp_path, None) > 50


@pytest.mark.rule("SK-4")
def test_a_full_disk_spools_nothing_half(tmp_path: Path) -> None:
    program = [sys.executable, "-c", FULL_DISK, str(tmp_path / "mail.spool")]
    ended = subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    added, failures = map(int, ended.stdout.split())
    assert added > 10
    assert failures > 50


@pytest.fixture
def own_etcd(etcd_binary: Path, tmp_path: Path) -> Iterator[EtcdCluster]:
    """A server of the test's own, which it may stop."""
    assert etcd_binary.exists()
    cluster = EtcdCluster(1, data_folder=tmp_path / "etcd")
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.mark.rule("SK-4")
def test_tasks_are_enqueued_while_the_engine_is_away_and_forwarded_when_it_is_back(
    own_etcd: EtcdCluster, tmp_path: Path
) -> None:
    url = own_etcd.url("outbox")

    def producer() -> Queue:
        return Queue(
            QUEUE,
            url,
            partitions=PARTITIONS,
            timeout_s=SHORT_S,
            outbox=tmp_path / "outbox",
            state_folder=tmp_path / "state",
        )

    def enqueue(queue: Queue, number: int) -> EnqueueAnswer:
        made = queue.build_raw_enqueue("send", b"{}", EnqueueOptions(task_id=task_id(number)))
        (enqueued,) = queue.commit([made])
        return enqueued.answer

    with producer() as queue:
        wait_until(lambda: enqueue(queue, 1) is EnqueueAnswer.COMMITTED)
        own_etcd.kill(0)
        began = time.monotonic()
        answers = [enqueue(queue, number) for number in range(2, 20)]
        took_s = time.monotonic() - began
        assert answers == [EnqueueAnswer.SPOOLED] * len(answers)
        assert took_s < 10 * SHORT_S * patience_ratio(), (
            "only who finds out that the engine is away waits for it"
        )
    with producer() as again:
        assert enqueue(again, 20) is EnqueueAnswer.SPOOLED
        assert spooled(tmp_path) == (19, 0)
        own_etcd.restart_all()
        wait_until(lambda: spooled(tmp_path) == (0, 0))
        assert [each.head.id for each in stored(again)] == [task_id(number) for number in range(1, 21)]
        wait_until(lambda: enqueue(again, 21) is EnqueueAnswer.COMMITTED)
