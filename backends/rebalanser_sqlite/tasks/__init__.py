"""``sqlite:///file`` as an engine of tasks (SK-6, SK-12): tables of its own in the registry's file.

.. code-block:: text

    apply ──► Committer: who comes first leads, and commits what others brought meanwhile with his own
                │ one transaction, one fsync, then the notifier
                ▼
             mail.db ──► Reader: snapshots, which wait for nobody
                └──────► Follower: the one thread of all watches, woken by the notifier

**Tables.** ``skuld_tasks`` has a small row for each task, which its states are written to; what never changes
and may be large, payloads and lists of dependencies, lies beside it in ``skuld_contents``, updates in
``skuld_updates``. All names begin with ``skuld_``, and ``skuld_meta`` has their version
(``rebalanser_sqlite.tasks.schema``): a group's registry and an application's own tables may be in the same
file.

**Conditions** are looked at inside the one write transaction of the host, so whatever owners believe, a state
is put in the place of the very one that was read. Each write that changes something takes the next revision.

**Claims** are taken from a partial index of the ready tasks of each function, in the order of SK-5, so that
neither complete tasks nor waiting ones cost anything. Whoever claims looks first without a lock, then makes
ready what a time has come for, and claims, all in one write transaction. The write lock of the file is what
gives a task to one of many: no process owns anything (SK-13).

**Steps.** What concerns very many tasks is done in several transactions of bounded size: the dependents of a
task are told of its end by the claims that follow (``Writing.tell_dependents
<rebalanser_sqlite.tasks.writer.Writing.tell_dependents>``), and a large component is marked and then deleted
(``rebalanser_sqlite.tasks.collection``). What is left to do is stored with the first of them.

**Pages** of dead or cancelled tasks are merged from one range of an index for each status, so that
no task that is not on the page is looked at; of other statuses a page looks at a bounded number of tasks, and
may be empty. Counts are kept, and the last changes added to them.

**Watches** read the tasks enqueued and the changes written since they were told last; one that is very far
behind is told of a loss. A task that changes twice before a watch looks is told once, as it is then. The
notifier is that of the registry, with its slow look every 250 ms for a writer that was killed before it
rang, or that committed on a connection of its own and does not ring (``SqliteEngine.move_in``).
"""

from rebalanser_sqlite.tasks.engine import SqliteEngine, open_engine

__all__ = ["SqliteEngine", "open_engine"]
