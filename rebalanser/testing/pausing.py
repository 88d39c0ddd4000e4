"""Pauses a process (SIGSTOP) without blocking others that share a SQLite file with it.

SQLite's lock does not end as a lease does: a process that is stopped within a commit blocks all others
(docs/how-to/deployment.md). On a busy machine that happens often.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subprocess import Popen

_BRIEFLY_S = 0.1
_GO_ON_S = 0.3
"""Seconds between two tries: enough to renew a lease, so that retries end none."""
_TRIES = 50


def can_be_written(url: str, patience_s: float = 0.5) -> bool:
    """True if this URL's SQLite file can be locked within ``patience_s`` seconds, or for any other URL."""
    scheme, _, path = url.partition(":///")
    if scheme != "sqlite":
        return True
    connection = sqlite3.connect(path.partition("?")[0], timeout=patience_s, isolation_level=None)
    with contextlib.closing(connection):
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        connection.execute("ROLLBACK")
        return True


def wait_stopped(pid: int) -> None:
    """Wait until a child that was sent SIGSTOP runs no more, or has ended.

    The signal goes to one of its threads. Until that one gets a CPU, the others run on.
    """
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def pause(process: Popen[str] | Popen[bytes], *urls: str) -> None:
    """Stop a process (SIGSTOP) at a moment at which it does not hold the lock of a file of these ``urls``.

    Raises:
        TimeoutError: It held a lock whenever it was stopped.
    """
    for _ in range(_TRIES):
        process.send_signal(signal.SIGSTOP)
        wait_stopped(process.pid)
        if all(can_be_written(url, _BRIEFLY_S) for url in urls):
            return
        process.send_signal(signal.SIGCONT)
        time.sleep(_GO_ON_S)
    raise TimeoutError(
        f"each of {_TRIES} times it was stopped, {process.pid} held a lock of {', '.join(urls)}"
    )
