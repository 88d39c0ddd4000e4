"""Errors of a real store, and of a worker that can't go on: what is done then by a real process."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from rebalanser import Settings
from rebalanser.tasks import Claim, Queue
from rebalanser.tasks.queue import EXIT_CODE
from rebalanser.testing.waiting import PATIENCE_S, wait_until

TIMEOUT_S = 0.3
QUICK = Settings(min_rebalance_interval_s=0.0, rejoin_initial_s=0.01)
ENDED = """
import sys, threading
from pathlib import Path
from rebalanser import Settings
from rebalanser.tasks import Claim, Queue, loops
from rebalanser.tasks.execution.claim_source import IndexClaims

loops.PERSISTS_S, loops.PERSISTS_ATTEMPTS = 0.2, 3
queue = Queue("work", sys.argv[1], settings=Settings(lease_ttl_s=2.0), state_folder=Path(sys.argv[2]))
began = threading.Event()


def broken(*_):
    raise KeyError("a bug")


@queue.task(retries=0)
def work(claim: Claim) -> str:
    IndexClaims.claim = broken
    began.set()
    while not queue.wait_stopped(0.1):
        pass
    return "done"


print(work.enqueue(), flush=True)
queue.start(concurrency=2)
began.wait()
work.enqueue()
threading.Event().wait()
"""
FULL = """
import json, resource, sys, threading
from pathlib import Path
from rebalanser import Settings
from rebalanser.errors import RebalanserError
from rebalanser.tasks import Claim, Queue, Retention, retention
from rebalanser.testing.waiting import wait_until

retention.MIN_AGE_S, retention.FIRST_S = 0.0, 0.2
url, folder = sys.argv[1], Path(sys.argv[2])
settings = Settings(lease_ttl_s=2.0)
short = Retention(completed_s=0.5, dead_s=None, cancelled_s=None)
queue = Queue("work", url, settings=settings, retention=short, state_folder=folder)
spooling = Queue("work", url, settings=settings, outbox=folder / "outbox", state_folder=folder)
ran, ticks, may_run = set(), threading.Semaphore(0), threading.Event()
may_run.set()


def add(claim: Claim, number: int) -> int:
    may_run.wait()
    ran.add(number)
    return number


@queue.periodic("* * * * * *")
def tick(claim: Claim) -> None:
    ticks.release()


class Producer:
    def __init__(self, queue, first):
        self.add = queue.task(retries=9)(add)
        self.numbers, self.next, self.refusals = [], first, 0

    def one_more(self):
        self.next += 1
        try:
            self.add.enqueue(self.next)
        except RebalanserError:
            self.refusals += 1
            return False
        self.numbers.append(self.next)
        return True


direct, spooled = Producer(queue, 0), Producer(spooling, 1_000_000)
queue.start(concurrency=2)
for each in (direct, spooled):
    assert all(each.one_more() for _ in range(30))
wait_until(lambda: len(ran) > 20)
assert ticks.acquire(timeout=60)
may_run.clear()
for each in (direct, spooled):
    assert all(each.one_more() for _ in range(30))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
for each in (direct, spooled):
    wait_until(lambda: not each.one_more())
may_run.set()
wait_until(lambda: {"claims", "ticks"} <= {each.loop for each in queue.troubles})
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
for each in (direct, spooled):
    wait_until(each.one_more)
wait_until(lambda: ran.issuperset([*direct.numbers, *spooled.numbers]))
while ticks.acquire(blocking=False):
    pass
assert ticks.acquire(timeout=60)
more = range(2_000_000, 2_001_000)
for first in range(0, 1000, 100):
    queue.enqueue_all([direct.add.call(number) for number in more[first : first + 100]])
wait_until(lambda: ran.issuperset(more))
wait_until(lambda: not queue.troubles and sum(queue.count().values()) < 100)
queue.stop()
print(json.dumps([len(ran.intersection(more)), direct.refusals > 0, spooled.refusals > 0]), flush=True)
"""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep everybody else from writing, as a long transaction of another program does."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


@pytest.mark.rule("SK-10", "SK-15", "SK-17")
def test_while_the_file_is_locked_results_are_kept_and_it_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "tasks.db"
    runs: list[int] = []
    began, may_end = threading.Event(), threading.Event()
    with Queue(
        "work", f"sqlite:///{path}", settings=QUICK, timeout_s=TIMEOUT_S, state_folder=tmp_path
    ) as queue:

        @queue.task(retries=0)
        def charge(claim: Claim) -> str:
            runs.append(claim.failures)
            began.set()
            assert may_end.wait(PATIENCE_S)
            return "charged"

        first, second = charge.enqueue(), charge.enqueue()
        queue.start(concurrency=1)
        assert began.wait(PATIENCE_S)
        with locked(path):
            may_end.set()
            wait_until(lambda: "writer" in {each.loop for each in queue.troubles})
        assert [queue.wait(task, PATIENCE_S) for task in (first, second)] == ["charged"] * 2
        assert runs == [0, 0]
        wait_until(lambda: queue.troubles == ())


@pytest.mark.rule("SK-3", "SK-4", "SK-17", "SK-19", "SK-22")
def test_after_no_file_could_grow_all_is_done_without_a_restart(tmp_path: Path) -> None:
    """Neither SQLite's log, nor its database by a checkpoint, nor an outbox; then there is room again."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, f"sqlite:///{tmp_path / 'tasks.db'}", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1000, True, True], "both were refused something, and nothing is lost"


@pytest.mark.rule("SK-17")
def test_a_worker_that_can_not_go_on_ends_its_process(tmp_path: Path) -> None:
    """A supervisor sees that, and the group too; what ran meanwhile has had its time to end."""
    url = f"sqlite:///{tmp_path / 'tasks.db'}"
    ended = subprocess.run(
        [sys.executable, "-c", ENDED, url, str(tmp_path / "state")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == EXIT_CODE, ended.stderr
    assert "action=tasks_loop_failed" in ended.stderr
    assert "action=tasks_process_ends" in ended.stderr
    with Queue("work", url, state_folder=tmp_path) as queue:
        assert queue.wait(ended.stdout.strip(), 0.0) == "done"
