"""A transaction of the contract as SQL: first all guards and reads, then all writes at one revision.

A transaction may write a key only once, and reads of what it writes are unspecified, so the order of its
operations makes no difference. Every statement is a constant, so that SQLite reuses its prepared form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from rebalanser.errors import LeaseNotFound
from rebalanser.registry.contract import (
    Absent,
    Created,
    Delete,
    Get,
    Guard,
    KeyValue,
    Operation,
    Outcome,
    Put,
    Range,
    Result,
    Stat,
    Stats,
    Transaction,
)

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator

MAX_OPERATIONS = 1024
"""Limit that bounds the time for which one transaction blocks other writers to about 5 ms."""
MAX_REQUEST_BYTES = 4 << 20

_AFTER_PRINTABLE = "\x7f"
"""Greater than every character of a key: ``prefix <= key < prefix + this`` is the range of a prefix."""

_BEFORE_PRINTABLE = "\0"
"""Less than every character of a key: ``after + this <= key`` are the keys greater than ``after``."""
_NO_LIMIT = -1

_REVISIONS = "SELECT create_revision, mod_revision FROM kv WHERE key = ?"
_GET = "SELECT key, value, create_revision, mod_revision, lease FROM kv WHERE key = ?"
_LOOK = "SELECT key, x'', create_revision, mod_revision, lease FROM kv WHERE key = ?"
_RANGE = (
    "SELECT key, value, create_revision, mod_revision, lease FROM kv WHERE key >= ? AND key < ? "
    "AND mod_revision > ? ORDER BY key LIMIT ?"
)
"""Visits the keys with the prefix, and no others, also where few of them are new enough."""
_STAT = "SELECT count(*), coalesce(max(mod_revision), 0) FROM kv WHERE key >= ? AND key < ?"
_LEASE = "SELECT 1 FROM leases WHERE id = ?"
_PUT = (
    "INSERT INTO kv (key, value, create_revision, mod_revision, lease) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT (key) DO UPDATE "
    "SET value = excluded.value, mod_revision = excluded.mod_revision, lease = excluded.lease"
)
_DELETE = "DELETE FROM kv WHERE key = ?"
_RECORD = "INSERT INTO changes (revision, key, value) VALUES (?, ?, ?)"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The branch of a transaction that runs, after its guards were checked."""

    succeeded: bool
    operations: tuple[Put | Delete | Get | Range | Stat | Chosen, ...]

    def writes(self) -> Iterator[Put | Delete]:
        """Yield all puts and deletes, of nested transactions too."""
        for operation in self.operations:
            if isinstance(operation, Chosen):
                yield from operation.writes()
            elif isinstance(operation, Put | Delete):
                yield operation


_Revisions: TypeAlias = dict[str, tuple[int, int] | None]


def has_range(transaction: Transaction) -> bool:
    """Return True if a branch reads a range, whose length is not known in advance."""
    return any(
        has_range(operation) if isinstance(operation, Transaction) else isinstance(operation, Range)
        for operation in (*transaction.then, *transaction.otherwise)
    )


def choose(connection: sqlite3.Connection, transaction: Transaction) -> Chosen:
    """Check all guards, in the state before the transaction."""
    return _choose(connection, transaction, {})


def _choose(connection: sqlite3.Connection, transaction: Transaction, seen: _Revisions) -> Chosen:
    succeeded = all(_holds(connection, guard, seen) for guard in transaction.guards)
    operations = transaction.then if succeeded else transaction.otherwise
    return Chosen(
        succeeded,
        tuple(
            _choose(connection, operation, seen) if isinstance(operation, Transaction) else operation
            for operation in operations
        ),
    )


def _holds(connection: sqlite3.Connection, guard: Guard, seen: _Revisions) -> bool:
    if guard.key in seen:
        found = seen[guard.key]
    else:
        found = seen[guard.key] = connection.execute(_REVISIONS, (guard.key,)).fetchone()
    if isinstance(guard, Absent):
        return found is None
    return found is not None and guard.revision == found[0 if isinstance(guard, Created) else 1]


def answer(connection: sqlite3.Connection, chosen: Chosen, revision: int) -> Outcome:
    """Carry out all reads of the chosen branches."""
    return Outcome(
        chosen.succeeded,
        revision,
        tuple(_result(connection, operation, revision) for operation in chosen.operations),
    )


def _result(connection: sqlite3.Connection, operation: Operation | Chosen, revision: int) -> Result:
    match operation:
        case Chosen():
            return answer(connection, operation, revision)
        case Get(key, keys_only):
            row = connection.execute(_LOOK if keys_only else _GET, (key,)).fetchone()
            return KeyValue(*row) if row else None
        case Range(prefix, after, limit, modified_after):
            start = max(prefix, after + _BEFORE_PRINTABLE) if after else prefix
            span = (start, prefix + _AFTER_PRINTABLE)
            rows = connection.execute(_RANGE, (*span, modified_after, limit or _NO_LIMIT))
            return tuple(KeyValue(*row) for row in rows)
        case Stat(prefix):
            return Stats(*connection.execute(_STAT, (prefix, prefix + _AFTER_PRINTABLE)).fetchone())
        case _:
            return None


@dataclass(frozen=True, slots=True)
class Writes:
    """The changes of a transaction; empty if it only deletes absent keys."""

    puts: tuple[Put, ...]
    deletes: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of bytes that these changes take in the history."""
        return sum(len(put.key) + len(put.value) for put in self.puts) + sum(map(len, self.deletes))

    def __bool__(self) -> bool:
        return bool(self.puts or self.deletes)


def writes_of(connection: sqlite3.Connection, chosen: Chosen) -> Writes:
    """Compute the changes of the chosen branches before any is written.

    Raises:
        LeaseNotFound: a put is under a lease that does not exist.
    """
    operations = list(chosen.writes())
    puts = tuple(operation for operation in operations if isinstance(operation, Put))
    for lease in {put.lease for put in puts} - {0}:
        if connection.execute(_LEASE, (lease,)).fetchone() is None:
            raise LeaseNotFound(f"lease {lease} has ended")
    deletes = tuple(
        operation.key
        for operation in operations
        if isinstance(operation, Delete) and connection.execute(_REVISIONS, (operation.key,)).fetchone()
    )
    return Writes(puts, deletes)


def write(connection: sqlite3.Connection, writes: Writes, revision: int) -> None:
    """Write all changes at one revision, and record them for the watches."""
    connection.executemany(_PUT, [(put.key, put.value, revision, revision, put.lease) for put in writes.puts])
    connection.executemany(_DELETE, [(key,) for key in writes.deletes])
    connection.executemany(_RECORD, [(revision, put.key, put.value) for put in writes.puts])
    connection.executemany(_RECORD, [(revision, key, None) for key in writes.deletes])
