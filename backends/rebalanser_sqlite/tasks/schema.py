"""The tables of tasks, their version, and the conversion of earlier versions.

**Numbers.** The ``number`` of a task is the revision at which it was enqueued. So the newest revision is the
greatest number in ``skuld_tasks`` or the greatest revision in ``skuld_changes``: no row is written just to
count it. Enqueueing a task changes three pages: its row, its id and its place among the ready ones.

**Places.** Every waiting task, and every claimed one whose time is over, is in at most one place. Its row's
columns show the place and a partial index holds it; a complete task is in none:

==========  ============================  ==================================================================
place       column                        what it is there for
==========  ============================  ==================================================================
ready       ``ready`` is 1                waiting and due, or claimed and over: in the order of SK-5
timed       ``timer`` is no NULL          waiting until the wall clock shows this time
blocked     ``blocked`` is more than 0    waiting for as many tasks that are not settled
running     ``status`` 1, no ready      claimed; by clock and end
held        ``ready`` is 2              limited, waiting and due: in the order of SK-5, by limit
paced       ``ready`` is 3              the one of a rate limit that is next, until ``skuld_rates`` has room
aside       ``ready`` is 0                timed as well: a claim of it has failed
==========  ============================  ==================================================================

**Limits.** Of the tasks of one limit, those that are claimed, ready or paced are *admitted*; the others that
could be ready are held. Any change of one of them admits the best held ones, as far as there is room, and
replaces a ready one by a better one. So a claim reads no held task, and exceeds no limit.

**Rates.** Of the tasks of one rate limit at most one that waits is admitted. The claim reads the limit's mark
in ``skuld_rates`` and writes the next one. If there is no room yet, it paces the task, and notes beside the
mark (``waits_clock``, ``waits_until``) the time for the next claim to check. Times are those of the boot's
clock.

A ready task that was never claimed may be ``blocked``, too: one that fails with a dependency, or one whose
dependency was requeued. The claim checks the dependencies, and the task becomes dead, or waits again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rebalanser.core.tasks.model import AfterFailure, Status
from rebalanser.errors import UnusableStore

if TYPE_CHECKING:
    import sqlite3

    from rebalanser_sqlite.store import Deadline, Store

VERSION: Final = 5
MIGRATION_S: Final = 3600.0
"""Maximum seconds for converting the tables of an earlier version."""
INLINE_BYTES: Final = 256
"""Maximum bytes of a payload in its task's row: a larger one is stored apart, so that a new state does not
write it again."""
STATUSES: Final = (Status.WAITING, Status.CLAIMED, Status.COMPLETED, Status.DEAD, Status.CANCELLED)
"""Statuses in the order of their stored codes."""
WAITING: Final = STATUSES.index(Status.WAITING)
CLAIMED: Final = STATUSES.index(Status.CLAIMED)
COMPLETED: Final = STATUSES.index(Status.COMPLETED)
CHOICES: Final = (AfterFailure.WAIT, AfterFailure.RUN, AfterFailure.FAIL)
"""Choices in the order of their stored codes."""
FAIL: Final = CHOICES.index(AfterFailure.FAIL)
HELD: Final = 2
"""Value of the column ``ready``: held back by the task's limit."""
PACED: Final = 3
"""Value of the column ``ready``: its rate limit has no room yet."""
ADMITTED: Final = f"limit_key IS NOT NULL AND (ready = 1 OR status = {CLAIMED} OR ready = {PACED})"
"""Condition of limited tasks that are or may be claimed: never more than their limit allows.

It begins with the condition of version 4: so SQLite can prove that the queries of that need no other index.
"""
FEW: Final = frozenset({Status.DEAD, Status.CANCELLED})
"""Statuses that have an index by id: most tasks have one of the others."""
SCHEMA: Final = """
CREATE TABLE skuld_meta (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    version INTEGER NOT NULL,
    counted INTEGER NOT NULL,
    forgotten_to INTEGER NOT NULL
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
    payload BLOB,
    revision INTEGER NOT NULL,
    status INTEGER NOT NULL,
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
    result BLOB,
    blocked INTEGER NOT NULL,
    ready INTEGER,
    timer REAL,
    after_failure INTEGER NOT NULL DEFAULT 0,
    unique_key TEXT,
    unique_for_s REAL,
    limit_key TEXT,
    max_running INTEGER,
    rate_limit TEXT
);
CREATE TABLE skuld_contents (
    task INTEGER PRIMARY KEY,
    after BLOB NOT NULL,
    payload BLOB
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
CREATE TABLE skuld_changes (
    revision INTEGER PRIMARY KEY,
    queue INTEGER NOT NULL,
    task INTEGER NOT NULL,
    before INTEGER,
    status INTEGER
);
CREATE TABLE skuld_counts (
    queue INTEGER NOT NULL,
    status INTEGER NOT NULL,
    tasks INTEGER NOT NULL,
    PRIMARY KEY (queue, status)
) WITHOUT ROWID;
CREATE TABLE skuld_outboxes (
    queue INTEGER NOT NULL,
    outbox TEXT NOT NULL,
    number INTEGER NOT NULL,
    skipped INTEGER NOT NULL,
    PRIMARY KEY (queue, outbox)
) WITHOUT ROWID;
"""
"""``dependencies`` is the number of ids in ``skuld_contents.after``, of 20 bytes each, so that most need not
be read; ``skuld_dependents`` has the same pairs in the other direction. ``skuld_changes`` has the latest
change of each task after it was enqueued; a deleted one has no status. ``skuld_counts`` is as of the revision
``counted``: later changes are added by each read. The changes up to ``forgotten_to`` are deleted."""
_NOTES: Final = """
CREATE TABLE IF NOT EXISTS skuld_notes (
    queue INTEGER PRIMARY KEY,
    content BLOB NOT NULL,
    version INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS skuld_workers (
    queue INTEGER NOT NULL,
    process TEXT NOT NULL,
    note BLOB NOT NULL,
    PRIMARY KEY (queue, process)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS skuld_pauses (
    queue INTEGER NOT NULL,
    schedule TEXT NOT NULL,
    pause BLOB NOT NULL,
    PRIMARY KEY (queue, schedule)
) WITHOUT ROWID;
"""
"""Notes of queues and of workers, and pauses; not all are in tables of versions 2 and 3.

The pause of a queue itself has an empty ``schedule``.
"""
_STEPS: Final = """
CREATE TABLE skuld_collections (
    number INTEGER PRIMARY KEY,
    decided INTEGER NOT NULL
);
CREATE TABLE skuld_collected (task INTEGER PRIMARY KEY);
CREATE TABLE skuld_settled (
    queue INTEGER NOT NULL,
    id BLOB NOT NULL,
    freed INTEGER NOT NULL,
    offered INTEGER NOT NULL,
    told INTEGER NOT NULL,
    last INTEGER NOT NULL,
    PRIMARY KEY (queue, id)
) WITHOUT ROWID;
"""
"""Work that takes several transactions, each one step of it, so that other writers get in between.

``skuld_collections`` has the present collection and ``skuld_collected`` its tasks, which are deleted once it
is ``decided`` (``rebalanser_sqlite.tasks.collection``). ``skuld_settled`` has the tasks with dependents that
have not been notified yet of the end: those up to ``told`` have been, and those after ``last`` were enqueued
later.
"""
_RATES: Final = """
CREATE TABLE skuld_rates (
    queue INTEGER NOT NULL,
    name TEXT NOT NULL,
    limit_key TEXT NOT NULL,
    debt_s REAL NOT NULL,
    clock TEXT NOT NULL,
    at_s REAL NOT NULL,
    wall REAL NOT NULL,
    revision INTEGER NOT NULL,
    waits_clock TEXT,
    waits_until REAL
);
CREATE UNIQUE INDEX skuld_rates_by_limit ON skuld_rates (queue, name, limit_key);
CREATE INDEX skuld_rates_waiting ON skuld_rates (queue, waits_clock, waits_until)
    WHERE waits_until IS NOT NULL;
CREATE INDEX skuld_rates_old ON skuld_rates (wall);
"""
"""The marks of rate limits (``rebalanser.core.tasks.model.RateMark``)."""
INDEXES: Final = f"""
CREATE UNIQUE INDEX skuld_tasks_by_id ON skuld_tasks (queue, id);
CREATE INDEX skuld_tasks_ready ON skuld_tasks (queue, name, priority DESC, id) WHERE ready = 1;
CREATE INDEX skuld_tasks_timed ON skuld_tasks (queue, timer) WHERE timer IS NOT NULL;
CREATE INDEX skuld_tasks_running ON skuld_tasks (queue, clock, ends_at_s) WHERE status = {CLAIMED} AND ready IS NULL;
CREATE INDEX skuld_tasks_by_status ON skuld_tasks (queue, status, id) WHERE status IN (3, 4);
CREATE INDEX skuld_tasks_unique ON skuld_tasks (queue, name, unique_key) WHERE unique_key IS NOT NULL;
CREATE INDEX skuld_tasks_held ON skuld_tasks (queue, name, limit_key, priority DESC, id) WHERE ready = {HELD};
CREATE INDEX skuld_tasks_admitted ON skuld_tasks (queue, name, limit_key, status, priority, id DESC) WHERE {ADMITTED};
"""  # noqa: E501 - one statement a line
_FIRST_TABLES: Final = ("meta", "tasks", "contents", "dependents", "updates", "counts", "queues", "owners")
_STATUS_OF_TEXT: Final = "CASE status {} END".format(
    " ".join(f"WHEN '{status.value}' THEN {code}" for code, status in enumerate(STATUSES))
)
_FROM_FIRST: Final = f"""
INSERT INTO skuld_meta SELECT one, {VERSION}, revision, revision FROM first_meta;
INSERT INTO skuld_queues SELECT number, name, partitions FROM first_queues;
INSERT INTO skuld_owners SELECT queue, partition, token FROM first_owners;
INSERT INTO skuld_contents SELECT task, after, CASE WHEN length(payload) > {INLINE_BYTES} THEN payload END
    FROM first_contents WHERE length(after) > 0 OR length(payload) > {INLINE_BYTES};
INSERT INTO skuld_dependents SELECT queue, id, task FROM first_dependents;
INSERT INTO skuld_updates SELECT task, claim, sequence, content FROM first_updates;
INSERT INTO skuld_counts SELECT queue, {_STATUS_OF_TEXT}, tasks FROM first_counts;
INSERT INTO skuld_outboxes SELECT queue, outbox, number, skipped FROM first_outboxes;
INSERT INTO skuld_tasks SELECT number, queue, id, partition, name, priority, dependencies, retries, timeout_s,
    (SELECT payload FROM first_contents WHERE task = number AND length(payload) <= {INLINE_BYTES}),
    revision, {_STATUS_OF_TEXT}, claim, holder, worker, ttl_s, clock, ends_at_s, updates, due, failures,
    error, result, 0, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL FROM first_tasks ORDER BY number;
"""  # noqa: S608 - of constants
_INCOMPLETE: Final = f"""
UPDATE skuld_tasks SET blocked = (
    SELECT count(*) FROM first_dependents AS edge WHERE edge.task = skuld_tasks.number AND NOT EXISTS (
        SELECT 1 FROM skuld_tasks AS other
        WHERE other.queue = edge.queue AND other.id = edge.id AND other.status = {COMPLETED}
    )
) WHERE dependencies > 0
"""  # noqa: S608 - of constants
_PLACE: Final = f"""
UPDATE skuld_tasks SET timer = CASE WHEN due > 0 THEN due END,
    ready = CASE WHEN due = 0 AND (blocked = 0 OR claim IS NOT NULL) THEN 1 END WHERE status = {WAITING}
"""  # noqa: S608 - of constants

_CACHE = "PRAGMA cache_size = -16384"
"""16 MiB: the upper pages of the indexes of millions of tasks."""
_LIMITING_INDEXES: Final = INDEXES[INDEXES.index("CREATE INDEX skuld_tasks_unique") :].strip().rstrip(";")
_IS_THERE = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'skuld_meta'"
_HAS_OUTBOXES = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'skuld_outboxes'"
_OUTBOXES = SCHEMA[SCHEMA.index("CREATE TABLE skuld_outboxes") :].strip().rstrip(";")
_VERSION = "SELECT version FROM skuld_meta"
_BEGIN = "INSERT INTO skuld_meta (one, version, counted, forgotten_to) VALUES (1, ?, 0, 0)"
_FROM_SECOND = """
ALTER TABLE skuld_tasks ADD COLUMN after_failure INTEGER NOT NULL DEFAULT 0;
ALTER TABLE skuld_meta RENAME COLUMN forgotten TO forgotten_to;
"""
"""A running process of version 2 fails from then on, as it does nothing without ``forgotten``.

Otherwise it would run tasks that must fail, and let others wait for ever.
"""
_FROM_THIRD = f"""
ALTER TABLE skuld_tasks ADD COLUMN unique_key TEXT;
ALTER TABLE skuld_tasks ADD COLUMN unique_for_s REAL;
ALTER TABLE skuld_tasks ADD COLUMN limit_key TEXT;
ALTER TABLE skuld_tasks ADD COLUMN max_running INTEGER;
ALTER TABLE skuld_tasks ADD COLUMN rate_limit TEXT;
{_LIMITING_INDEXES};
"""
"""A running process of version 3 continues: it ignores pauses, and its tasks are not unique."""
_FROM_FOURTH = f"""
ALTER TABLE skuld_tasks ADD COLUMN rate_limit TEXT;
DROP INDEX skuld_tasks_admitted;
{_LIMITING_INDEXES[_LIMITING_INDEXES.index("CREATE INDEX skuld_tasks_admitted") :]};
"""
"""A running process of version 4 continues: it ignores rates, and a task that it requeues during its
collection is deleted.
"""
_FINALLY = f"""
{_STEPS.strip().rstrip(";")};
{_RATES.strip().rstrip(";")};
UPDATE skuld_meta SET version = {VERSION};
"""  # noqa: S608 - of constants
_INTO_PRESENT: Final = {
    2: _NOTES + _FROM_SECOND + _FROM_THIRD + _FINALLY,
    3: _NOTES + _FROM_THIRD + _FINALLY,
    4: _NOTES + _FROM_FOURTH + _FINALLY,
}
"""Statements that convert the tables of a version to the current ones."""


def prepare(store: Store, deadline: Deadline) -> None:
    """Create the tables in the store, or convert those of an earlier version.

    Raises:
        UnusableStore: they are of a newer version.
        QuotaExceeded: the disk is full.
        RegistryUnavailable: other processes kept the file locked.
    """
    store.set(_CACHE)
    with store.reading(deadline):
        version = _version(store)
    if version != VERSION:
        with store.writing(deadline, ends_within_s=MIGRATION_S):
            version = _version(store)
            if version is None:
                _run(store.connection, SCHEMA + _NOTES + _STEPS + _RATES + INDEXES)
                store.connection.execute(_BEGIN, (VERSION,))
            elif version == 1:
                _turn_first_into_present(store.connection)
            elif version != VERSION:
                _run(store.connection, _INTO_PRESENT[version])
        store.checkpoint()


def _version(store: Store) -> int | None:
    """Return the version of the tables; None if there are none."""
    if store.connection.execute(_IS_THERE).fetchone() is None:
        return None
    version = int(store.connection.execute(_VERSION).fetchone()[0])
    if version > VERSION:
        raise UnusableStore(
            f"the tasks in {store.path} have schema {version} and this version of rebalanser knows "
            f"{VERSION}; upgrade rebalanser on this host"
        )
    return version


def _turn_first_into_present(connection: sqlite3.Connection) -> None:
    """Convert the tables of version 1; a running process of that version fails from then on.

    All that it does begins with a read of ``skuld_meta.revision``, which is gone. Otherwise it would write
    states without their places, and a claimed task could be claimed again.
    """
    if connection.execute(_HAS_OUTBOXES).fetchone() is None:
        connection.execute(_OUTBOXES)
    tables = (*_FIRST_TABLES, "outboxes")
    for table in tables:
        connection.execute(f"ALTER TABLE skuld_{table} RENAME TO first_{table}")
    _run(connection, SCHEMA + _NOTES + _STEPS + _RATES + _FROM_FIRST)
    connection.execute("CREATE INDEX first_by_task ON first_dependents (task)")
    for index in ("by_id", "by_status", "by_revision"):
        connection.execute(f"DROP INDEX skuld_tasks_{index}")
    _run(connection, INDEXES)
    connection.execute(_INCOMPLETE)
    connection.execute(_PLACE)
    for table in tables:
        connection.execute(f"DROP TABLE first_{table}")


def _run(connection: sqlite3.Connection, statements: str) -> None:
    for statement in statements.split(";"):
        connection.execute(statement)
