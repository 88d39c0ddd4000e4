"""A worker of a queue in a process of its own, for the fault tests: it tells what its bodies do.

Its one argument is a JSON object: ``url``, ``claim_ttl_s``, ``lease_ttl_s``, ``concurrency``, ``state`` (a
folder) and ``log``, a file to which it appends one JSON object a line, in one piece.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from rebalanser import Settings
from rebalanser.errors import Fenced
from rebalanser.tasks import Claim, Queue
from rebalanser.testing.waiting import PATIENCE_S

SINK = "CREATE TABLE IF NOT EXISTS sink (task TEXT PRIMARY KEY, token INTEGER NOT NULL)"
FENCED_WRITE = (
    "INSERT INTO sink VALUES (?, ?) ON CONFLICT (task) DO UPDATE SET token = excluded.token "
    "WHERE excluded.token >= token"
)


def queue_of(order: dict[str, Any]) -> Queue:
    """The queue of a test, as every process of it opens it."""
    return Queue(
        "work",
        order["url"],
        claim_ttl_s=order["claim_ttl_s"],
        partitions=order.get("partitions", 4),
        settings=Settings(lease_ttl_s=order["lease_ttl_s"]),
        state_folder=Path(order["state"]),
    )


class Host:
    """The host application: its functions, and where they tell what they do."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._sink = order.get("sink")
        self.queue = queue_of(order)
        self.queue.task(retries=10)(self.sleep)
        self.queue.task(retries=10)(self.outlive)
        self.queue.task(retries=2, backoff_s=0.05)(self.die)
        self.queue.task(retries=10, backoff_s=0.05)(self.add_or_die)
        self.queue.task(self.total)
        self.queue.task(retries=10)(self.add)  # its worker may be killed beside it by another task

    def tell(self, event: str, claim: Claim, **more: Any) -> None:
        """Append what happened."""
        line = {
            "event": event, "task": claim.task_id, "number": claim.number, "token": claim.token,
            "failures": claim.failures, "pid": os.getpid(), "at": time.monotonic(), **more,
        }  # fmt: skip
        os.write(self._log, json.dumps(line).encode() + b"\n")

    def sleep(self, claim: Claim, for_s: float) -> None:
        """Work for so long."""
        self.tell("began", claim)
        time.sleep(for_s)
        self.tell("ended", claim)

    def outlive(self, claim: Claim) -> None:
        """The first try writes on once its claim is over, everywhere it can; later tries just end."""
        self.tell("began", claim)
        claim.update(f"after {claim.failures} failures".encode())
        self._write(claim)
        if claim.failures > 0:
            return
        while claim.still_mine():
            time.sleep(0.05)
        self.tell("renewed" if claim.renew() else "renewal refused", claim)
        try:
            claim.update(b"too late")
        except Fenced:
            self.tell("update refused", claim)
        self._write(claim)

    def _write(self, claim: Claim) -> None:
        """Write to an outside world that checks tokens."""
        with closing(sqlite3.connect(self._sink, timeout=PATIENCE_S, isolation_level=None)) as connection:
            connection.execute(SINK)
            written = connection.execute(FENCED_WRITE, (claim.task_id, claim.token)).rowcount
        self.tell("written outside" if written else "refused outside", claim)

    def die(self, claim: Claim) -> None:
        """Kill the whole process."""
        self.tell("began", claim)
        os.kill(os.getpid(), signal.SIGKILL)

    def add_or_die(self, claim: Claim, a: int, b: int) -> int:
        """The first try kills the whole process."""
        self.tell("began", claim)
        if claim.failures == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.tell("ended", claim, value=a + b)
        return a + b

    def total(self, claim: Claim, parts: list[int]) -> int:
        """The sum of some."""
        self.tell("began", claim)
        self.tell("ended", claim, value=sum(parts))
        return sum(parts)

    def add(self, claim: Claim, a: int, b: int) -> int:
        """Something quick."""
        self.tell("began", claim)
        return a + b


def main() -> None:
    order = json.loads(sys.argv[1])
    host = Host(order)
    host.queue.run(order["concurrency"])
    host.queue.close()


if __name__ == "__main__":
    main()
