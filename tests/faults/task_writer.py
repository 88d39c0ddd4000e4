"""A process that writes tasks into an SQLite file, step by step, and is killed at a place of its choosing.

``task_writer.py BASE FOLDER statement FIRST LAST STEP``: for each number in the range, a child has a copy of
BASE and is killed when that statement of its begins, of those that may write. ``… size FIRST LAST STEP``:
when a file would grow over so many KiB. Each child writes a line for each step that was answered to
``FOLDER/NUMBER.answered``, and how it ended is in ``FOLDER/NUMBER.ended``: ``whole`` or ``killed``.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from rebalanser.core.tasks.ids import partition_of_id
from rebalanser.core.tasks.model import (
    ID_DIGITS,
    ClaimState,
    ClaimTerm,
    Head,
    Status,
    Stored,
    Task,
    TaskState,
    Update,
)
from rebalanser.core.tasks.store import Collect, Enqueue, EnqueueAll, Move, OwnerEpoch, TakeOver, Write
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_sqlite import store
from rebalanser_sqlite.tasks import SqliteEngine

QUEUE = "mail"
PARTITIONS = 4
TASKS = 6
TERM = ClaimTerm(30.0, "boot", 1.0)
COMMITS_PER_CHECKPOINT = 3
"""So that checkpoints are among the places of death."""
READS = (
    "SELECT",
    "PRAGMA synchronous",
    "PRAGMA database_list",
    "PRAGMA application_id",
    "PRAGMA user_version",
)


def task_id(number: int) -> str:
    return f"{number:0{ID_DIGITS}x}"


def enqueue(number: int, *, after: tuple[int, ...] = ()) -> Enqueue:
    task = task_id(number)
    head = Head(task, QUEUE, "send", after=tuple(map(task_id, after)))
    return Enqueue(Task(head, bytes([number]) * 3000), partition_of_id(task, PARTITIONS))


def move(of: Stored, status: Status, *, updates: int = 0, result: bytes | None = None) -> Move:
    claim = ClaimState(0, "holder", "worker", TERM, updates)
    update = Update(0, updates - 1, bytes(2000)) if status is Status.CLAIMED and updates else None
    state = TaskState(status, claim, result=result)
    return Move(of.head.id, QUEUE, of.partition, of.revision, state, update=update)


def prepare(path: Path) -> None:
    """Make the file that every child has a copy of."""
    with closing(SqliteEngine(path)) as engine:
        engine.define(QUEUE, PARTITIONS, PATIENCE_S)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE outputs (task TEXT PRIMARY KEY, content TEXT)")


def steps(path: Path) -> Iterator[Callable[[], None]]:
    """What is written, one transaction each."""
    with closing(SqliteEngine(path)) as engine, closing(sqlite3.connect(path)) as own:
        own.isolation_level = None

        def present(number: int) -> Stored:
            return engine.read(QUEUE, [task_id(number)], PATIENCE_S)[task_id(number)]

        def apply(*writes: Write) -> Callable[[], None]:
            return lambda: (engine.apply(writes, PATIENCE_S), None)[1]

        def output_with_completion(number: int) -> None:
            own.execute("BEGIN IMMEDIATE")
            own.execute("INSERT INTO outputs VALUES (?, ?)", (task_id(number), "sent"))
            engine.move_in(own, move(present(number), Status.COMPLETED, updates=1, result=b"sent"))
            own.execute("COMMIT")
            engine.ring()

        yield apply(*(enqueue(number) for number in range(1, TASKS)))
        yield apply(enqueue(TASKS, after=(1, 2)), TakeOver(QUEUE, OwnerEpoch(1, 5)))
        chain = tuple(enqueue(number, after=(number - 1,)) for number in range(TASKS + 1, TASKS + 4))
        yield apply(EnqueueAll(chain))
        yield apply(*(move(present(number), Status.CLAIMED) for number in range(1, 5)))
        yield apply(*(move(present(number), Status.CLAIMED, updates=1) for number in range(1, 4)))
        yield lambda: output_with_completion(1)
        yield apply(*(move(present(n), Status.COMPLETED, updates=1, result=b"r") for n in (2, 3)))
        yield lambda: output_with_completion(4)
        gone = {item.head.id: (item.partition, item.revision) for item in (present(3), present(4))}
        yield apply(Collect(QUEUE, gone), move(present(5), Status.CANCELLED))


def child(path: Path, answered: Path) -> None:
    with answered.open("w", buffering=1) as answers:
        for step in steps(path):
            step()
            answers.write("answered\n")


def kill_at_statement(number: int) -> None:
    """Have this process killed when the statement of this number begins, on whichever connection.

    One killed when a read begins is, to the file, killed when the next statement does.
    """
    left = [number]
    connect = sqlite3.connect

    def count(statement: str) -> None:
        if statement.startswith(READS):
            return
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def traced(*arguments: object, **named: object) -> sqlite3.Connection:
        connection = connect(*arguments, **named)  # type: ignore[call-overload]
        connection.set_trace_callback(count)
        return connection  # type: ignore[no-any-return]

    sqlite3.connect = traced  # type: ignore[assignment]


def kill_at_size(kibibytes: int) -> None:
    """Have this process killed in the middle of the write that makes a file larger than this."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (kibibytes << 10, kibibytes << 10))


KINDS: dict[str, Callable[[int], None]] = {
    "statement": kill_at_statement,
    "size": kill_at_size,
}


def main(base: Path, folder: Path, kind: str, numbers: range) -> None:
    if kind == "statement":  # without checkpoints the log grows with each step, over all of the sizes
        store.COMMITS_PER_CHECKPOINT = COMMITS_PER_CHECKPOINT
    for number in numbers:
        path = folder / f"{number}.db"
        shutil.copy(base, path)
        pid = os.fork()
        if pid == 0:
            KINDS[kind](number)
            child(path, folder / f"{number}.answered")
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        ended = "whole" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        (folder / f"{number}.ended").write_text(ended)


if __name__ == "__main__":
    base, folder, kind, first, last, step = sys.argv[1:]
    main(Path(base), Path(folder), kind, range(int(first), int(last), int(step)))
