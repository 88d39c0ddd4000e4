"""A process that works on a queue or enqueues, with a wall clock of its own, for the fault tests.

Its one argument is a JSON object: ``url``, ``state`` (a folder), ``log``, a file to which it appends one JSON
object a line in one piece, and ``role``:

- ``work``: run bodies, ``concurrency`` at a time; ``periodic`` is the cron expression of ``tick``, if any.
- ``enqueue``: enqueue the ``calls``, each the name of a function, its arguments and its options.
- ``produce``: enqueue a chain of three after another, for ever.
- ``collect``: collect what is older than ``older_than_s`` into the file ``archive``, for ever.

``shift_s`` is how far its wall clock is ahead of the machine's, ``host`` the name under which it takes part
as if it ran on a host of its own. Its logs are lines of JSON on standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from rebalanser import Settings
from rebalanser.runtime.clock import SystemClock
from rebalanser.runtime.logs import configure_cli_logging
from rebalanser.tasks import Claim, Queue, Status, open_queue
from rebalanser.tasks.functions import EnqueueOptions
from rebalanser.tasks.id_files import IdSource, wall_ms

CLAIM_TTL_S = 2.0
LEASE_TTL_S = 2.0
MAX_WAITING = 100
"""Tasks that wait when a producer pauses."""


def shift_clock(shift_s: float) -> None:
    """Have the queue's wall clock in this process go ahead of the machine's.

    Not all of ``time``: gRPC compares that with the clock of its own.
    """
    SystemClock.wall = lambda _clock: time.time() + shift_s
    open_queue.IdSource = partial(IdSource, wall_ms=lambda: wall_ms() + int(shift_s * 1000))


class Host:
    """The host application: its functions, and where they tell what they do."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.queue = Queue(
            "work",
            order["url"],
            claim_ttl_s=CLAIM_TTL_S,
            partitions=4,
            settings=Settings(lease_ttl_s=LEASE_TTL_S),
            state_folder=Path(order["state"]),
        )
        self.queue.task(retries=10)(self.sleep)
        self.queue.task(retries=10)(self.add)
        if "periodic" in order:
            self.queue.periodic(order["periodic"], retries=10)(self.tick)

    def tell(self, event: str, claim: Claim) -> None:
        """Append what happened."""
        line = {
            "event": event, "name": claim.name, "task": claim.task_id, "number": claim.number,
            "token": claim.token, "pid": os.getpid(), "at": time.monotonic(),
        }  # fmt: skip
        os.write(self._log, json.dumps(line).encode() + b"\n")

    def sleep(self, claim: Claim, for_s: float) -> None:
        """Work for so long."""
        self.tell("began", claim)
        time.sleep(for_s)
        self.tell("ended", claim)

    def add(self, claim: Claim, a: int, b: int) -> int:
        """Something quick."""
        self.tell("began", claim)
        claim.update(b'"added"')
        return a + b

    def tick(self, claim: Claim) -> None:
        """What comes again and again."""
        self.tell("began", claim)

    def enqueue(self, calls: list[tuple[str, list[Any], dict[str, Any]]]) -> list[str]:
        """Enqueue calls of the functions; the tasks' ids."""
        functions = self.queue.functions
        made = [
            self.queue.build_enqueue(functions[name], tuple(given), {}, EnqueueOptions(**options))
            for name, given, options in calls
        ]
        return self.queue.commit(made)

    def produce(self) -> None:
        """Enqueue chains until this process is killed; what is stored for good is told.

        Workers keep up, however busy the machine is: what waits has to be done before the test ends.
        """
        while True:
            while self.queue.count().get(Status.WAITING, 0) > MAX_WAITING:
                time.sleep(0.05)
            after: list[str] = []
            for number in range(3):
                after = self.enqueue([("add", [number, 1], {"after": after})])
                os.write(self._log, json.dumps({"event": "enqueued", "task": after[0]}).encode() + b"\n")
            time.sleep(0.01)

    def collect(self, older_than_s: float, archive: Path) -> None:
        """Collect until this process is killed; what was done is told."""
        while True:
            done = self.queue.collect(older_than_s, archive)
            os.write(self._log, json.dumps({"event": "collected", "tasks": done.tasks}).encode() + b"\n")
            time.sleep(0.05)


def main(order: dict[str, Any]) -> None:
    """Do what was ordered."""
    configure_cli_logging(json=True, verbose=0)
    shift_clock(order.get("shift_s", 0.0))
    if "host" in order:
        open_queue.boot = lambda: order["host"]
    host = Host(order)
    match order["role"]:
        case "work":
            host.queue.run(order["concurrency"])
        case "enqueue":
            print(json.dumps(host.enqueue(order["calls"])), flush=True)
        case "produce":
            host.produce()
        case "collect":
            host.collect(order["older_than_s"], Path(order["archive"]))
    host.queue.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
