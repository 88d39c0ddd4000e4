"""A worker whose bodies run in processes of their own, for the fault tests: its bodies misbehave.

Its one argument is a JSON object: the settings of ``queue_of``, ``concurrency``, and ``grace_s``, with
which it stops once it reads a line. Bodies append one JSON object a line to the file that ``TOLD``, in the
environment, names.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from rebalanser import Settings
from rebalanser.errors import InvalidState
from rebalanser.tasks import Claim, Queue

FOREVER_S = 600.0
CLEANING_S = 0.5
"""Longer than the next try waits."""


def tell(event: str, claim: Claim, **more: Any) -> None:
    """Append what happened, in one piece."""
    line = {"event": event, "task": claim.task_id, "failures": claim.failures, "pid": os.getpid(), **more}
    file = os.open(os.environ["TOLD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


def leave(claim: Claim) -> None:
    """End the process without a word."""
    tell("began", claim)
    os._exit(3)


def crash(claim: Claim) -> None:
    """Die as a fault in native code does."""
    tell("began", claim)
    os.kill(os.getpid(), signal.SIGSEGV)


def add(claim: Claim, a: int, b: int) -> int:
    """Something quick."""
    tell("began", claim)
    return a + b


def linger(claim: Claim) -> str:
    """The first try takes for ever, with a process that it has started; later ones just end."""
    if claim.failures > 0:
        first = Path(os.environ["TOLD"]).read_text().splitlines()[0]
        tell("began", claim, beside=_is_there(json.loads(first)))
        return "at last"
    helper = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"])
    tell("began", claim, helper=helper.pid)
    try:
        time.sleep(FOREVER_S)
    finally:
        tell("cleaned up", claim)
        time.sleep(CLEANING_S)
    return "never"


def _is_there(told: dict[str, Any]) -> bool:
    """Whether the process that told something is still there."""
    try:
        os.kill(told["pid"], 0)
    except ProcessLookupError:
        return False
    return True


def freeze(claim: Claim) -> str:
    """As ``linger``, but no thread of the process runs any more, and nothing short of SIGKILL ends it."""
    if claim.failures > 0:
        return "at last"
    tell("began", claim)
    os.kill(os.getpid(), signal.SIGSTOP)
    return "never"


def report(claim: Claim) -> dict[str, Any]:
    """What a claim can do in a process of its own."""
    first, second = claim.update(b"one"), claim.update(b"two")
    try:
        with closing(sqlite3.connect(":memory:")) as connection:
            claim.complete_in(connection)
    except InvalidState as error:
        refused = str(error)
    return {
        "updates": [first, second],
        "log": [each.content.decode() for each in claim.log()],
        "is_mine": claim.still_mine() and claim.deadline > time.monotonic() and claim.renew(),
        "token": claim.token,
        "number": claim.number,
        "failures": claim.failures,
        "refused": refused,
        "pid": os.getpid(),
    }


class Strange(Exception):
    """An error that can't be pickled."""

    def __reduce__(self) -> str:
        raise TypeError("not to be pickled")


def fail(claim: Claim, *, strange: bool) -> None:
    """Raise something."""
    tell("began", claim)
    raise Strange("odd") if strange else ValueError("wrong")


def queue_of(order: dict[str, Any]) -> Queue:
    """The queue of a test, as every process of it opens it."""
    queue = Queue(
        "work",
        order["url"],
        claim_ttl_s=order["claim_ttl_s"],
        partitions=4,
        settings=Settings(lease_ttl_s=order["lease_ttl_s"]),
        state_folder=Path(order["state"]),
    )
    queue.task(retries=2, backoff_s=0.05)(leave)
    queue.task(retries=1, backoff_s=0.05)(crash)
    queue.task(retries=0)(add)
    queue.task(retries=3, backoff_s=0.05, timeout_s=order["timeout_s"])(linger)
    queue.task(retries=3, backoff_s=0.05)(freeze)
    queue.task(retries=0)(report)
    queue.task(retries=0)(fail)
    return queue


def main() -> None:
    order = json.loads(sys.argv[1])
    queue = queue_of(order)
    if order["grace_s"] is None:
        queue.run(order["concurrency"], bodies="processes")
    else:
        queue.start(order["concurrency"], bodies="processes")
        sys.stdin.readline()
        queue.stop(order["grace_s"])
    queue.close()


if __name__ == "__main__":
    main()
