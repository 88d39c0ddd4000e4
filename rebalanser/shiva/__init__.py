"""Shiva: a leader places applications on workers, over nothing but a log.

Two machines, :class:`~rebalanser.shiva.leader.Leader` and :class:`~rebalanser.shiva.worker.Worker`, take
events and give effects. They know no clock, thread, file or Kafka; production and the simulator drive the
very same objects.

Theory of operation
===================

*Commands.* A client writes the parts of an application's archive and then a start command to COMMAND, or a
stop command. Parts are named by the archive's sha256, so two clients never overwrite each other's. The last
command of an application wins, in the order of the log (SH-2). Workers note where the parts stand, store
nothing and start nothing (SH-4).

*The leader.* The holder of COMMAND's one partition in the consumer group of leaders is the active leader. It
first fences its predecessor (the broker accepts no transaction of an earlier producer of the cluster's
transactional id any more), then announces itself on COMMAND: the offset of that record is its **term**. It
reads the last document from ASSIGNEMENT, which no predecessor can replace any more, and all of COMMAND, and
goes on from there: what was commanded while nobody led is taken in order and published once (SH-9).
Everything that it writes is written in transactions, so that a deposed leader writes nothing at all. Were a
late document of it there all the same, its **epoch** (term, number) is below the announced term, and workers
and status readers refuse it (SH-7).

*The document.* One complete assignment, written to COMMAND and ASSIGNEMENT with the consumed offset, both or
neither. Restarts that a worker makes by itself are not in it; pongs tell of them. On COMMAND it stands behind
the commands that it follows from, so that an application's archive is on the log, and a worker knows where,
before a document names it (SH-6). A worker acts on the last document only, on entries that name it and **its
incarnation**: a restarted worker runs nothing until a leader has heard it.

*Files* (SH-4). A worker that is named for an application reads its archive from where the parts stand,
unpacks it, and starts the application then; until then it is pending. Unpacked files stay while a document
names the worker, while a process uses them, and ``keep_files_s`` longer: what comes back in that time starts
at once. An application's own data stays until a stop.

*Changes* (SH-24). A document is written whole or as a change of the one published before it in the same term;
the first of a term is whole. A change is written just as a document is, and applied to the very document that
it names: whoever has not read that one knows so, and waits for a whole one. A worker that waits acts on an
older document, which is as if it read slowly. A leader never goes on from a document that lacks a change: the
missing one may have named another worker. A leader of a version that reads whole documents only would do just
that. So workers refuse its documents while a change is outstanding, and its successor goes on from the last
one that they followed. Leaders write changes only while every known worker reads them.

*One worker at a time* (SH-13). An entry names at most one worker. To move an application, the leader
publishes it without a worker, ``leaving`` the old one since that epoch, and names the new one only when the
old one

- has said in a pong that it acts on a document of that epoch or later, and that no process of the
  application runs: acting on the last document only, it cannot start it any more; or
- is behind a greater incarnation number of the same lineage: its data folder's lock proves that it ended; or
- is gone. In mode ``available`` that is once it is removed from the known workers, and a worker that was
  only cut off runs on beside the new one, as the mode says. In mode ``exclusive`` it is once the document
  without it was issued and ``deadline_s`` has passed since its last pong was read; for a leader that did not
  read it itself, since it took over.

Which mode counts is that of the command the old worker may still run by. An application that failed or
finished, and one that is started anew in the other mode, goes the same way: a report may be older than what
the worker does now.

*Why exclusive is exclusive* (SH-14). A worker may run an exclusive application until ``deadline_s``, less
clock drift and a margin, after it sent a pong that a ping of the present term says was heard. A leader heard
that pong after it was sent, and pings are transactions: a leader that was fenced answers no pong any more. So
whoever waits ``deadline_s`` from the last pong that a leader can have heard waits longer than any such
permission lasts. Leaders may have different deadlines: a document carries the greatest that may still be
relied on, a successor keeps to it until what its predecessor permitted has run out, and no ping permits more
than a document that was published says. A permission also carries the epoch of the leader's document: a
worker that comes back from being cut off, still behind on COMMAND, starts no exclusive application by a
document older than the one that took it away. The deadline is enforced beside the worker, by whoever
supervises its processes: a worker that is stopped (SIGSTOP) cannot stop anything itself.

*Failures* (SH-17). An application that has failed on a worker is placed elsewhere. Where it failed is
forgotten some time after its last failure, later with each failure in a row. A worker that is named anew
begins with all restarts, and stores again what it had refused.

*Absence* (SH-26). What a worker that left or is missing had is kept for it for ``away_grace_s``: named for
nobody, and not placed. A worker with its id that is heard in time gets it back; the id is its label, whatever
its folder. A grace delays, and proves nothing: whoever gets the application next, the same worker included,
gets it only once the old process has stopped it or is gone as above. A cordoned worker gets nothing that it
does not have, a drained one has nothing. Cordons come as commands, and stay in the document.

*Rounds* (SH-8). The leader pings each round; workers pong at once, and whenever their state changes: changes
that come one after the other share a pong, since each tells of all applications of the worker. A worker
that has not been heard for ``missed_rounds`` full rounds is removed; a new leader begins to count with its
first ping, and removes nobody before its second (SH-9). A worker that a leader hears for the first time is
answered by another ping of the same round, so that exclusive applications outlive a change of leader. A round
that comes more than half a round late removes nobody: pongs may be waiting unread. A worker that answers, and
for ``stalled_s`` has followed nothing of what was published, is removed too. Its pongs count for nothing, and
no ping answers them, until it follows the document that it was removed in: what it runs exclusively ends as
if it were silent. Nothing else is periodic:
commands, changed reports and new workers are acted on as they are read, coalesced over ``settle_time_s``.

*Retention* (SH-15). COMMAND loses old records by age and by size. A start command of an application that is
to run is written again, with its parts, under a key of its own (``keep:``) before either can happen. The copy
counts as standing where the client's record stood, so that it never overrides a stop that the leader had not
read yet. When the application stops, or starts anew, the copy is dropped. Parts are dropped once nothing has
needed them for a while: a client may be about to start the same archive again.
"""
