"""The tables of tasks, and their version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rebalanser.errors import UnusableStore

if TYPE_CHECKING:
    import sqlite3

    from rebalanser_sqlite.store import Deadline, Store

VERSION = 1
SCHEMA = """
CREATE TABLE skuld_meta (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    version INTEGER NOT NULL,
    revision INTEGER NOT NULL
);
CREATE TABLE skuld_queues (
    number INTEGER PRIMARY KEY,
    name TEXT NOT NULL COLLATE BINARY UNIQUE,
    partitions INTEGER NOT NULL
);
CREATE TABLE skuld_owners (
    queue INTEGER NOT NULL,
    partition INTEGER NOT NULL,
    token INTEGER NOT NULL,
    PRIMARY KEY (queue, partition)
) WITHOUT ROWID;
CREATE TABLE skuld_tasks (
    number INTEGER PRIMARY KEY,
    queue INTEGER NOT NULL,
    id BLOB NOT NULL,
    partition INTEGER NOT NULL,
    name TEXT NOT NULL,
    priority INTEGER NOT NULL,
    dependencies INTEGER NOT NULL,
    retries INTEGER NOT NULL,
    timeout_s REAL,
    revision INTEGER NOT NULL,
    status TEXT NOT NULL,
    claim INTEGER,
    holder TEXT,
    worker TEXT,
    ttl_s REAL,
    clock TEXT,
    ends_at_s REAL,
    updates INTEGER,
    due REAL NOT NULL,
    failures INTEGER NOT NULL,
    error TEXT NOT NULL,
    result BLOB
);
CREATE UNIQUE INDEX skuld_tasks_by_id ON skuld_tasks (queue, id);
CREATE INDEX skuld_tasks_by_status ON skuld_tasks (queue, partition, status, id);
CREATE INDEX skuld_tasks_by_revision ON skuld_tasks (queue, revision);
CREATE TABLE skuld_contents (
    task INTEGER PRIMARY KEY,
    after BLOB NOT NULL,
    payload BLOB NOT NULL
);
CREATE TABLE skuld_dependents (
    queue INTEGER NOT NULL,
    id BLOB NOT NULL,
    task INTEGER NOT NULL,
    PRIMARY KEY (queue, id, task)
) WITHOUT ROWID;
CREATE TABLE skuld_updates (
    task INTEGER NOT NULL,
    claim INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (task, claim, sequence)
);
CREATE TABLE skuld_counts (
    queue INTEGER NOT NULL,
    status TEXT NOT NULL,
    tasks INTEGER NOT NULL,
    PRIMARY KEY (queue, status)
) WITHOUT ROWID;
"""
"""``dependencies`` is how many ids ``skuld_contents.after`` has, of 20 bytes each, so that most need not be
read; ``skuld_dependents`` has the same the other way round."""
OUTBOXES = """
CREATE TABLE skuld_outboxes (
    queue INTEGER NOT NULL,
    outbox TEXT NOT NULL,
    number INTEGER NOT NULL,
    skipped INTEGER NOT NULL,
    PRIMARY KEY (queue, outbox)
) WITHOUT ROWID
"""
"""The tallies of outboxes. It came later than the other tables, and is added where it is missing: nothing
that was there before is changed, and a Rebalanser that does not know of it never writes it."""

_CACHE = "PRAGMA cache_size = -16384"
"""16 MiB: the upper pages of the indexes of millions of tasks."""
_IS_THERE = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'skuld_meta'"
_HAS_OUTBOXES = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'skuld_outboxes'"
_VERSION = "SELECT version FROM skuld_meta"
_BEGIN = "INSERT INTO skuld_meta (one, version, revision) VALUES (1, ?, 0)"


def prepare(store: Store, deadline: Deadline) -> None:
    """Have the tables in the store, made if they are not there.

    Raises:
        UnusableStore: they are of another version.
        QuotaExceeded: the disk is full.
        RegistryUnavailable: others kept the file locked.
    """
    store.set(_CACHE)
    with store.reading(deadline):
        there = _are_there(store) and _has_outboxes(store.connection)
    if not there:
        with store.writing(deadline):
            if not _are_there(store):
                _create(store.connection)
            if not _has_outboxes(store.connection):
                store.connection.execute(OUTBOXES)


def _are_there(store: Store) -> bool:
    if store.connection.execute(_IS_THERE).fetchone() is None:
        return False
    (version,) = store.connection.execute(_VERSION).fetchone()
    if version != VERSION:
        raise UnusableStore(
            f"the tasks in {store.path} have schema {version} and this version of rebalanser knows "
            f"{VERSION}; upgrade rebalanser on this host"
        )
    return True


def _has_outboxes(connection: sqlite3.Connection) -> bool:
    return connection.execute(_HAS_OUTBOXES).fetchone() is not None


def _create(connection: sqlite3.Connection) -> None:
    for statement in SCHEMA.split(";"):
        connection.execute(statement)
    connection.execute(_BEGIN, (VERSION,))
