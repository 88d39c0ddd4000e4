"""Pausing a process (SIGSTOP) that shares a SQLite file without stopping all who share it.

SQLite's lock, unlike a lease, does not end: a process that is stopped just while it holds it holds up
everybody (docs/deployment.md). That takes a stop within a commit, all the likelier on a busy machine.
"""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subprocess import Popen

_BRIEFLY_S = 0.1
_GO_ON_S = 0.3
"""Between two tries: time to renew a lease, so that trying often ends none."""
_TRIES = 50


def can_be_written(url: str, patience_s: float = 0.5) -> bool:
    """Whether nobody holds the lock of the SQLite file of this URL for ``patience_s`` seconds; true of any
    other URL."""
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


def pause(process: Popen[str] | Popen[bytes], *urls: str) -> None:
    """Stop a process (SIGSTOP) at a moment at which it does not hold the lock of a file of these ``urls``.

    Raises:
        TimeoutError: It held a lock whenever it was stopped.
    """
    for _ in range(_TRIES):
        process.send_signal(signal.SIGSTOP)
        if all(can_be_written(url, _BRIEFLY_S) for url in urls):
            return
        process.send_signal(signal.SIGCONT)
        time.sleep(_GO_ON_S)
    raise TimeoutError(
        f"each of {_TRIES} times it was stopped, {process.pid} held a lock of {', '.join(urls)}"
    )
