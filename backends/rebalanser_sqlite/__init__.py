"""``sqlite:///file``: the embedded registry, one SQLite file shared by the processes of one host.

.. code-block:: text

    execute ──► Store (one connection, a lock) ──► groups.db, groups.db-wal, groups.db-shm
                  │ after COMMIT                                   ▲
                  ▼                                                │ reads what is new
                 notifier: the log is opened ──inotify──► Watcher thread of every process

**Transactions.** A transaction that may write runs under ``BEGIN IMMEDIATE``, so that the host has one writer
and transactions are linearizable. One that only reads takes a snapshot and never waits. Guards and reads come
first, then all writes at one revision. A request waits for another process's lock until its time limit. If
the limit passes before ``COMMIT``, the transaction rolls back and has no effect. A second connection reads
ranges, so that a long one delays no heartbeat.

**Leases** use ``CLOCK_BOOTTIME``, which all processes of the host share, together with the boot id: after a
restart of the host every lease has ended. There is no server to end leases. So each transaction first ends
those that are over, and so does each Watcher, which sleeps until the next one ends. A read that finds a lease
over becomes a write that ends it, so that no client ever sees a key of such a lease.

**Watches** read the table of changes, to which each writing transaction appends. The notifier only wakes up.
It does so after the commit, as the write-ahead log has the pages already before it, when there is nothing to
read yet. A look every 250 ms finds the changes of a writer that was killed between commit and notifier.

**The log and the shared memory** beside the file belong to it. A process that sees the file without them
would create new ones, with a history and locks of their own. So the file may have only one name and must not
be a mount point, and all three files are checked before each transaction. A process that opens a file without
one of the other two first makes sure, by a lock on the whole file, that no process has it open.

**Checkpoints** run under the write lock. SQLite 3.7.0 to 3.51.2 may lose a committed transaction when a
commit resets the write-ahead log during a second checkpoint (https://sqlite.org/wal.html#walresetbug). Here
no commit can happen during a checkpoint, so every SQLite that Python is built with is safe.
"""

from rebalanser_sqlite.registry import SqliteRegistry, open_sqlite

__all__ = ["SqliteRegistry", "open_sqlite"]
