"""A task's output and its completion in one transaction on SQLite: both or neither, wherever it is killed."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from rebalanser import Settings
from rebalanser.errors import Fenced
from rebalanser.history import Record, SkuldKind, read_records
from rebalanser.tasks import Claim, Queue, Status
from rebalanser.testing.waiting import PATIENCE_S, wait_until
from tests.faults.transaction_worker import OUTPUTS, Host

WORKER = Path(__file__).with_name("transaction_worker.py")
NEVER = 1_000_000
BRIEFLY_S = 0.5
"""Seconds that a body waits for a renewal, which cannot end before the body's own transaction."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The queue's file with a table of the application's own."""
    path = tmp_path / "work.db"
    Queue("work", f"sqlite:///{path}", partitions=1).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(OUTPUTS)
    return path


@contextlib.contextmanager
def working(path: Path, killed_at: int) -> Iterator[subprocess.Popen[bytes]]:
    worker = subprocess.Popen(
        [sys.executable, str(WORKER), str(path), str(path.parent / "state"), str(killed_at)]
    )
    try:
        yield worker
    finally:
        worker.kill()
        worker.wait()


def outputs(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [task for (task,) in connection.execute("SELECT task FROM outputs")]


@pytest.mark.rule("SK-10", "SK-17")
@pytest.mark.timeout(600)
def test_wherever_the_worker_is_killed_output_and_completion_are_both_there_or_neither(path: Path) -> None:
    host = Host(path, path.parent / "here", NEVER)
    with closing(host.queue) as queue:
        send = queue.functions["send"]
        (task,) = queue.commit([queue.build_enqueue(send, ("a@example.org",), {})])
        killed_before = killed_at = 0
        while queue.get(task).state.status is not Status.COMPLETED:
            assert outputs(path) == []
            with working(path, killed_at) as worker:
                assert worker.wait(PATIENCE_S) == -signal.SIGKILL, "it was killed by itself"
            assert queue.get(task).state.failures == killed_at, "each earlier try has failed"
            killed_before, killed_at = killed_at, killed_at + 1
        assert outputs(path) == [task]
        assert queue.get(task).state.result == b'"sent"'
        assert killed_before >= 4, "at BEGIN, INSERT, what complete_in does, COMMIT, and after it"

        (other,) = queue.commit([queue.build_enqueue(send, ("b@example.org",), {})])
        with working(path, NEVER):
            assert queue.wait(other, PATIENCE_S) == "sent"
        assert sorted(outputs(path)) == sorted([task, other]), "what was complete was not done again"


@pytest.fixture
def queue(path: Path) -> Iterator[Queue]:
    with ExitStack() as stack:
        url = f"sqlite:///{path}"
        yield stack.enter_context(Queue("work", url, partitions=1, state_folder=path.parent / "state"))


@contextlib.contextmanager
def transaction(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, timeout=PATIENCE_S, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection
        if connection.in_transaction:
            connection.execute("COMMIT")


@pytest.mark.rule("SK-10")
def test_a_claim_that_has_ended_commits_nothing(queue: Queue, path: Path) -> None:
    ended: list[str] = []

    @queue.task()
    def send(claim: Claim) -> None:
        queue.cancel(claim.task_id)
        with transaction(path) as own:
            own.execute("INSERT INTO outputs VALUES (?, 'sent')", (claim.task_id,))
            try:
                claim.complete_in(own)
            except Fenced:
                own.execute("ROLLBACK")
                ended.append(claim.task_id)

    task = send.enqueue()
    queue.start()
    wait_until(lambda: ended == [task])
    queue.stop()
    assert queue.get(task).state.status is Status.CANCELLED
    assert outputs(path) == []


@pytest.mark.rule("SK-10")
def test_a_transaction_that_is_rolled_back_leaves_the_task_to_be_tried_again(
    queue: Queue, path: Path
) -> None:
    @queue.task(retries=1, backoff_s=0.01)
    def send(claim: Claim) -> None:
        with transaction(path) as own:
            own.execute("INSERT INTO outputs VALUES (?, 'sent')", (claim.task_id,))
            claim.complete_in(own)
            if claim.failures == 0:
                own.execute("ROLLBACK")
                raise OSError("the first try fails after all")

    task = send.enqueue()
    queue.start()
    queue.wait(task, PATIENCE_S)
    assert queue.get(task).state.failures == 1
    assert outputs(path) == [task]


@pytest.mark.rule("SK-7", "SK-10")
def test_a_renewal_that_waits_for_the_transaction_does_not_hold_it_up(tmp_path: Path, path: Path) -> None:
    """The renewal waits for the file's write lock, which the body has: so the body must not wait for it."""
    url = f"sqlite:///{path}"
    renewals = ThreadPoolExecutor(1)
    took: list[bool] = []
    settings = Settings(history_dir=tmp_path / "history")
    with (
        renewals,
        Queue(
            "work", url, timeout_s=PATIENCE_S, partitions=1, state_folder=tmp_path, settings=settings
        ) as queue,
    ):

        @queue.task()
        def send(claim: Claim) -> None:
            with transaction(path) as own:
                own.execute("INSERT INTO outputs VALUES (?, 'sent')", (claim.task_id,))
                renewal = renewals.submit(claim.renew)  # type: ignore[attr-defined]
                with contextlib.suppress(TimeoutError):
                    renewal.result(timeout=BRIEFLY_S)
                claim.complete_in(own)
                took.append(renewal.done())

        task = send.enqueue()
        queue.start()
        wait_until(lambda: queue.get(task).state.status is Status.COMPLETED)
    assert took == [False], "the completion did not wait for the renewal"
    assert outputs(path) == [task]
    told = [each.kind for each in read_records(tmp_path / "history") if isinstance(each, Record)]
    wanted = {SkuldKind.CLAIMED: 1, SkuldKind.COMPLETED: 1, SkuldKind.FENCED: 0}
    assert {kind: told.count(kind) for kind in wanted} == wanted
