"""A worker whose body completes its task in a transaction of its own, killed at one of its statements.

Arguments: the queue's file, a state folder, and the number of the statement of the body's connection, from 0,
at whose beginning the process is killed; one that there is not kills nobody.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from rebalanser import Settings
from rebalanser.tasks import Claim, Queue
from rebalanser.testing.waiting import PATIENCE_S

CLAIM_TTL_S = 1.0
OUTPUTS = "CREATE TABLE outputs (task TEXT PRIMARY KEY, content TEXT NOT NULL)"


class Host:
    """The host application: a table of its own in the queue's file."""

    def __init__(self, path: Path, state: Path, killed_at: int) -> None:
        self._path = path
        self._left = killed_at
        self.queue = Queue(
            "work",
            f"sqlite:///{path}",
            claim_ttl_s=CLAIM_TTL_S,
            partitions=1,
            settings=Settings(lease_ttl_s=1.0),
            state_folder=state,
        )
        self.queue.task(retries=100)(self.send)

    def send(self, claim: Claim, to: str) -> None:
        """Write an output and complete the task, both or neither."""
        with closing(sqlite3.connect(self._path, timeout=PATIENCE_S, isolation_level=None)) as own:
            own.set_trace_callback(self._count)
            own.execute("BEGIN IMMEDIATE")
            own.execute("INSERT INTO outputs VALUES (?, ?)", (claim.task_id, f"sent to {to}"))
            claim.complete_in(own, b'"sent"')
            own.execute("COMMIT")
            own.execute("SELECT 'after it'")

    def _count(self, _statement: str) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


def main(path: Path, state: Path, killed_at: int) -> None:
    """Work until killed, by itself or by others."""
    host = Host(path, state, killed_at)
    host.queue.run()
    host.queue.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
