"""``sqlite:///file``: the embedded registry, one SQLite file shared by the processes of one host.

.. code-block:: text

    execute ──► Store (one connection, a lock) ──► groups.db, groups.db-wal, groups.db-shm
                  │ after COMMIT                                   ▲
                  ▼                                                │ reads what is new
                 bell: the file's times are touched ──inotify──► Watcher thread of every process

**Transactions.** What may write runs under ``BEGIN IMMEDIATE``, so that there is one writer on the host and
transactions are linearizable; what only reads takes a snapshot and waits for nobody. Guards and reads come
first, then all writes at one revision. A lock that another process holds is waited for until the request's
time is up; up to ``COMMIT`` a missed time limit rolls back and so has no effect. Ranges are read by a second
connection, so that a heartbeat waits for no long one.

**Leases** are counted on ``CLOCK_BOOTTIME``, which all processes of the host share, together with the boot
id: after a restart of the host every lease is over. No server ends them, so whoever finds one over does: each
transaction before it reads anything, and each Watcher, which sleeps until the next lease would end. A read
that finds a lease over becomes a write that ends it, so nobody ever sees a key of a lease that is over.

**Watches** read the table of changes, which the writing transaction itself appends to. The bell is a wake-up
only and is rung after the commit: the pages show up in the write-ahead log before it, when there is nothing
to see yet. A writer killed between its commit and the bell is noticed by a slow look every 250 ms.

**The log and the shared memory** beside the file belong to it: a process that sees the file without them
would make new ones, with a history and locks of their own. So the file may have one name only and must not be
a mount point, and all three are looked at before each transaction. A process that opens a file without one of
the other two makes sure first, by a lock on the whole file, that nobody has it open.

**Checkpoints** are made while holding the write lock. SQLite 3.7.0 to 3.51.2 may lose a committed transaction
when a commit resets the write-ahead log during a second checkpoint (https://sqlite.org/wal.html#walresetbug);
here no commit can come during a checkpoint, so every SQLite that Python is built with is good.
"""

from rebalanser_sqlite.registry import SqliteRegistry, open_sqlite

__all__ = ["SqliteRegistry", "open_sqlite"]
