"""Roles that one process at a time leads: a price list that is written by its leader alone.

``python examples/neli_roles.py HOST:PORT`` in two or three terminals: each says which roles it leads. Stop
one with Ctrl-C, or kill it: another takes over. The leader of a role writes to a database that keeps, beside
the output, the greatest fencing token it has seen, and refuses a smaller one in the very same transaction.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
import threading
from contextlib import closing
from pathlib import Path

from rebalanser.neli import Neli, NeliSettings, Role

ROLES = {"prices": 0, "invoices": 1, "newsletter": 2}
TABLE = (
    "CREATE TABLE IF NOT EXISTS output (role TEXT PRIMARY KEY, token INTEGER NOT NULL, runs INTEGER NOT NULL)"
)
FENCED_WRITE = """
    INSERT INTO output VALUES (?, ?, 1)
    ON CONFLICT (role) DO UPDATE SET token = excluded.token, runs = runs + 1 WHERE excluded.token >= token
"""


class Sink:
    """The outside world. It, and not the leader, makes sure that no former leader writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with closing(self._connected()) as connection:
            connection.execute(TABLE)

    def _connected(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=30, isolation_level=None)

    def write(self, role: Role, token: int) -> bool:
        """Write as the leader with this token; False if a later leader has written already."""
        with closing(self._connected()) as connection:
            return connection.execute(FENCED_WRITE, (str(role), token)).rowcount == 1


def say(line: str) -> None:
    """Print a line in one piece: handlers of several roles run at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Lead roles until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kafka", metavar="HOST:PORT")
    parser.add_argument("--topic", default="roles")
    parser.add_argument("--group", default="back-office")
    parser.add_argument("--database", type=Path, default=Path("neli_roles.db"))
    parser.add_argument("--session-timeout", type=float, default=10.0, metavar="SECONDS")
    given = parser.parse_args()

    sink = Sink(given.database)
    settings = NeliSettings(session_timeout_s=given.session_timeout)
    neli = Neli(given.topic, given.group, ROLES, kafka=given.kafka, settings=settings, partitions=len(ROLES))
    working: dict[Role, threading.Thread] = {}

    def work(role: Role, token: int) -> None:
        pause = threading.Event()
        while neli.is_leader(role) and sink.write(role, token):
            pause.wait(0.1)

    @neli.on_induced
    def induced(role: Role, token: int) -> None:
        say(f"leads {role} token={token}")
        working[role] = threading.Thread(target=work, args=(role, token))
        working[role].start()

    @neli.on_lapsed
    def lapsed(role: Role, _token: int) -> None:
        working[role].join()  # the next leader waits until this returns
        say(f"handed over {role}")

    @neli.on_fenced
    def fenced(role: Role, _token: int) -> None:
        say(f"lost {role}")

    neli.run()


if __name__ == "__main__":
    main()
