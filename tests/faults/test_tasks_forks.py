"""Queues that are open when their process is forked, as by gunicorn with ``--preload`` or multiprocessing."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rebalanser import forks
from rebalanser.testing.etcd_server import EtcdCluster
from rebalanser.testing.waiting import PATIENCE_S, patience_ratio

CHILDREN = 5
PROGRAM = """
import asyncio, json, os, sys, threading, traceback
from pathlib import Path
from rebalanser import forks
from rebalanser.errors import Forked
from rebalanser.tasks import AsyncQueue, Claim, Queue

folder, url, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
outbox = folder / "outbox" if kind == "outbox" else None
patience_s = float(sys.argv[4])

def tell(**what):
    os.write(1, json.dumps(what).encode() + b"\\n")

def in_child(body):
    child = os.fork()
    if not child:
        try:
            tell(child=body())
        except BaseException as error:
            traceback.print_exc()
            tell(child=type(error).__name__, error=str(error))
        os._exit(0)
    os.waitpid(child, 0)

def has_locks():
    inode = os.stat(url.removeprefix("sqlite:///")).st_ino
    owners = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(line[4] == str(os.getpid()) and line[5].endswith(f":{inode}") for line in owners)

queue = Queue("q", url, state_folder=folder / "state", outbox=outbox, timeout_s=patience_s)
held = threading.Event()

@queue.task
def nothing(claim: Claim, number: int) -> int:
    return number

@queue.task
def forks_itself(claim: Claim) -> None:
    in_child(lambda: [claim.still_mine(), claim.update(b"of a child")])
    claim.update(b"of the parent")

made = [nothing.enqueue(0)]
if kind in ("busy", "outbox"):
    stopped = threading.Event()
    def enqueue():
        while not stopped.is_set():
            made.append(nothing.enqueue(1))
    busy = threading.Thread(target=enqueue)
    busy.start()
    for _ in range(int(sys.argv[5])):
        in_child(lambda: nothing.enqueue(2))
        made.append(nothing.enqueue(3))
    stopped.set()
    busy.join()
elif kind == "worker":
    queue.start(concurrency=2)
    def child():
        task = nothing.enqueue(2)
        return queue.wait(task, patience_s)
    for _ in range(int(sys.argv[5])):
        in_child(child)
    queue.wait(nothing.enqueue(3), patience_s)
elif kind == "claim":
    queue.start()
    queue.wait(forks_itself.enqueue(), patience_s)
elif kind == "locks":
    in_child(lambda: [str(nothing.enqueue(2)), has_locks()])
    tell(parent=[str(nothing.enqueue(2)), has_locks()])
elif kind == "async":
    asynchronous = AsyncQueue("q", url, state_folder=folder / "state")
    @asynchronous.task
    def other(claim: Claim) -> None: ...
    asyncio.run(other.enqueue())
    in_child(lambda: asyncio.run(other.enqueue()))
elif kind == "no gRPC":
    def child():
        os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "1"  # too late
        return str(Queue("q", url, state_folder=folder / "state", timeout_s=0.5))
    for _ in range(2):
        in_child(child)
    made.append(nothing.enqueue(3))
elif kind == "stuck":
    inside, free = threading.Event(), threading.Event()
    def stay():
        with forks.postponed:
            inside.set()
            free.wait()
    threading.Thread(target=stay).start()
    inside.wait()
    in_child(lambda: nothing.enqueue(2))
    free.set()
    made.append(nothing.enqueue(3))
elif kind == "closed":
    queue.close()
    in_child(lambda: nothing.enqueue(2))
elif kind == "child works":
    def child():
        task = nothing.enqueue(2)
        queue.start()
        result = queue.wait(task, patience_s)
        queue.close()
        return result
    queue.start()
    in_child(child)
tell(made=len(made))
queue.close()
"""


def told_by(
    folder: Path, kind: str, url: str | None = None, children: int = CHILDREN
) -> tuple[list[dict[str, Any]], str]:
    """What the program prints as JSON, and on stderr."""
    limit_s = PATIENCE_S * patience_ratio()
    ended = subprocess.run(
        [
            *(sys.executable, "-c", PROGRAM, folder, url or f"sqlite:///{folder}/q.db", kind),
            *(str(limit_s / 2), str(children)),
        ],
        capture_output=True,
        text=True,
        timeout=2 * limit_s,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")], ended.stderr


def tasks_in(folder: Path) -> int:
    """The tasks in the file, which must be whole."""
    with closing(sqlite3.connect(folder / "q.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return int(connection.execute("SELECT count(*) FROM skuld_tasks").fetchone()[0])


@pytest.mark.rule("SK-4")
@pytest.mark.parametrize("kind", ["busy", "outbox"])
def test_children_enqueue_whatever_other_threads_of_the_parent_do(tmp_path: Path, kind: str) -> None:
    told, errors = told_by(tmp_path, kind)
    children = [each["child"] for each in told if "child" in each]
    assert len(set(children)) == CHILDREN, errors
    assert tasks_in(tmp_path) == told[-1]["made"] + CHILDREN


@pytest.mark.rule("SK-4")
def test_children_enqueue_on_etcd(tmp_path: Path, etcd: EtcdCluster) -> None:
    told, errors = told_by(tmp_path, "busy", etcd.url("forks"))
    assert len({each["child"] for each in told if "child" in each}) == CHILDREN, errors


def test_where_grpc_does_not_survive_a_fork_the_child_is_told_so(
    tmp_path: Path, etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls would never end, whatever their timeout."""
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")
    told, _ = told_by(tmp_path, "no gRPC", etcd.url("no-forks"))
    assert [each.get("child") for each in told[:2]] == ["Forked", "Forked"]
    assert "GRPC_ENABLE_FORK_SUPPORT=1" in told[0]["error"]
    assert told[-1] == {"made": 2}


@pytest.mark.rule("SK-4")
def test_the_worker_of_the_parent_goes_on_and_the_child_is_told_that_it_has_none(tmp_path: Path) -> None:
    told, errors = told_by(tmp_path, "worker")
    assert [each["child"] for each in told if "child" in each] == [2] * CHILDREN
    assert errors.count("tasks_worker_not_forked") == CHILDREN


def test_a_child_may_have_a_worker_of_its_own(tmp_path: Path) -> None:
    told, _ = told_by(tmp_path, "child works")
    assert told[0] == {"child": 2}


@pytest.mark.rule("SK-6")
def test_a_claim_stays_with_the_process_that_made_it(tmp_path: Path) -> None:
    told, _ = told_by(tmp_path, "claim")
    assert told[0]["child"] == "Forked"
    assert "is held by the parent" in told[0]["error"]


def test_parent_and_child_hold_locks_of_their_own(tmp_path: Path) -> None:
    told, _ = told_by(tmp_path, "locks")
    assert [each.get("child", each.get("parent"))[1] for each in told[:2]] == [True, True]


def test_an_async_queue_is_opened_anew(tmp_path: Path) -> None:
    told, errors = told_by(tmp_path, "async")
    assert len(told[0]["child"]) == 40, errors
    assert tasks_in(tmp_path) == 3


def test_a_file_that_was_in_use_at_the_fork_is_refused_in_the_child_only(tmp_path: Path) -> None:
    told, _ = told_by(tmp_path, "stuck")
    assert told[0]["child"] == "Forked"
    assert str(tmp_path) in told[0]["error"]
    assert tasks_in(tmp_path) == 2


def test_a_store_in_memory_is_refused_in_a_child(tmp_path: Path) -> None:
    told, _ = told_by(tmp_path, "busy", "memory://forks", children=1)
    assert told[0]["child"] == "Forked"
    assert "use sqlite:///" in told[0]["error"]


def test_a_closed_queue_stays_closed_in_a_child(tmp_path: Path) -> None:
    told, _ = told_by(tmp_path, "closed")
    assert told[0]["child"] == "InvalidState"


def test_a_child_that_was_forked_within_counts_its_own_threads_only() -> None:
    postponed = forks._Postponed()
    with postponed:
        postponed.begin_anew()  # as in the child
    assert postponed.close()
    postponed.open()
    with postponed:
        assert postponed._inside == 1
