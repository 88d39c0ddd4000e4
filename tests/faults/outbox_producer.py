"""A producer with an outbox that is killed at a place of its choosing, for the fault tests.

Its one argument is a JSON object: ``url`` and ``folder``, in both of which ``{number}`` stands for the number
of the child; ``base``, a file that each child has a copy of as ``FOLDER/mail.db``, or null; and ``first`` and
``last``. For each number in the range a child enqueues by way of ``FOLDER/outbox`` and is killed when it
has come to that place: those where a statement that may write begins, of the outbox's file or of the
engine's, and those just before and just behind a transaction with a registry. It writes a line to
``FOLDER/answered`` for each answer, and how it ended is in ``FOLDER/ended``: ``whole`` or ``killed``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

from rebalanser.core.tasks.model import ID_DIGITS, Enqueued
from rebalanser.errors import InvalidTask
from rebalanser.registry.contract import Outcome, Transaction
from rebalanser.tasks import Queue
from rebalanser.tasks.functions import EnqueueOptions
from rebalanser.tasks.key_value.steps import EngineCall
from rebalanser.testing.waiting import PATIENCE_S

QUEUE = "mail"
PARTITIONS = 4
TIMEOUT_S = PATIENCE_S
READS = ("SELECT", "PRAGMA")
ABSENT = f"{99:0{ID_DIGITS}x}"
CALLS: tuple[tuple[tuple[int, tuple[str, ...]], ...], ...] = (
    ((1, ()),),
    ((2, ()), (3, ())),
    ((4, (ABSENT,)),),
    ((5, ()),),
)
"""The numbers of the tasks that are enqueued together, each with what it depends on."""
REFUSED = 4


def task_id(number: int) -> str:
    return f"{number:0{ID_DIGITS}x}"


def opened(url: str, folder: Path) -> Queue:
    """The queue of a test, as the producer and who comes after it open it."""
    return Queue(
        QUEUE,
        url,
        partitions=PARTITIONS,
        timeout_s=TIMEOUT_S,
        outbox=folder / "outbox",
        state_folder=folder / "state",
    )


def produce(url: str, folder: Path) -> None:
    """Enqueue, and write down what was answered."""
    with (folder / "answered").open("w", buffering=1) as answers, closing(opened(url, folder)) as queue:
        for call in CALLS:
            made = [
                queue.build_raw_enqueue("send", b"{}", EnqueueOptions(task_id=task_id(number), after=after))
                for number, after in call
            ]
            try:
                told = queue.commit(made)
            except InvalidTask:
                answers.write(f"{made[0].task.head.id} refused\n")
            else:
                answers.writelines(_line(each) for each in told)


def _line(enqueued: Enqueued) -> str:
    return f"{enqueued} {enqueued.answer}\n"


class Place:
    """Counts the places that a process comes to, and kills it at the one of this number."""

    def __init__(self, number: int) -> None:
        self._left = number
        self._lock = threading.Lock()

    def come_to(self) -> None:
        """Here is one."""
        with self._lock:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)

    def statement(self, text: str) -> None:
        """One killed when a read begins is, to the file, killed when the next statement does."""
        if not text.startswith(READS):
            self.come_to()

    def watch(self) -> None:
        """Count what this process does from now on."""
        connect, execute = sqlite3.connect, EngineCall.execute

        def traced(*arguments: Any, **named: Any) -> sqlite3.Connection:
            connection: sqlite3.Connection = connect(*arguments, **named)
            connection.set_trace_callback(self.statement)
            return connection

        def between(call: EngineCall, transaction: Transaction) -> Outcome:
            self.come_to()
            outcome = execute(call, transaction)
            self.come_to()
            return outcome

        sqlite3.connect = traced  # type: ignore[assignment]
        EngineCall.execute = between  # type: ignore[method-assign]


def main(order: dict[str, Any]) -> None:
    for number in range(order["first"], order["last"]):
        folder = Path(order["folder"].format(number=number))
        folder.mkdir()
        if order["base"] is not None:
            shutil.copy(order["base"], folder / "mail.db")
        pid = os.fork()
        if pid == 0:
            Place(number).watch()
            produce(order["url"].format(number=number), folder)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        (folder / "ended").write_text({0: "whole", -signal.SIGKILL: "killed"}.get(code, f"failed: {code}"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
