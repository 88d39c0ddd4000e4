"""``sqlite:///file`` as an engine of tasks (SK-6, SK-12): tables of its own in the registry's file.

.. code-block:: text

    apply ──► Committer: the first thread leads, and commits the writes of others with its own
                │ one transaction, one fsync, then the notifier
                ▼
             mail.db ──► Reader: snapshots, which wait for no writer
                └──────► Follower: the one thread of all watches, woken by the notifier

**Tables.** ``skuld_tasks`` has a small row for each task, to which its states are written. Payloads and lists
of dependencies never change and may be large: they are in ``skuld_contents``, and updates in
``skuld_updates``. All names begin with ``skuld_``, and ``skuld_meta`` has their version
(``rebalanser_sqlite.tasks.schema``): a group's registry and an application's own tables may be in the same
file.

**Conditions** are checked inside the one write transaction of the host: a new state replaces the very state
that was read, whatever owners believe. Each write that changes something takes the next revision.

**Claims** use a partial index of the ready tasks of each function, in the order of SK-5, so that neither
complete nor waiting tasks cost anything. A claim looks first without a lock. Then, in one write transaction,
it makes tasks ready whose time has come, and claims. The write lock of the file gives a task to one of many
processes: no process owns anything (SK-13).

**Steps.** Work on a great many tasks takes several transactions of bounded size, and the first of these
stores the remaining work. A large component is marked and then deleted
(``rebalanser_sqlite.tasks.collection``). The claims that follow the end of a task notify its dependents
(``Writing.tell_dependents <rebalanser_sqlite.tasks.writer.Writing.tell_dependents>``).

**Pages** of dead or cancelled tasks are merged from one index range for each status, so that only tasks of
the page are read. For other statuses a page reads a bounded number of tasks, and may be empty. Counts are
stored, and the latest changes are added to them.

**Watches** read the tasks and changes since their last report; one that is very far behind reports a loss. A
task that changes twice between two looks is reported once, as it is then. The notifier is that of the
registry. A look every 250 ms finds the changes of a writer that was killed before it rang, or that committed
on a connection of its own and does not ring (``SqliteEngine.move_in``).
"""

from rebalanser_sqlite.tasks.engine import SqliteEngine, open_engine

__all__ = ["SqliteEngine", "open_engine"]
