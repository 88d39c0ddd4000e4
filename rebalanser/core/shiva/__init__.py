"""Shiva: a leader places applications on workers, over nothing but a log.

Two state machines, ``Leader`` and ``Worker``, take events and return effects. They use no clock, thread, file
or Kafka. Production and the simulator drive the same objects.

Theory of operation
===================

*Commands.* A client writes the parts of an application's archive and then a start command to COMMAND, or a
stop command. Parts are named by the archive's sha256, so two clients never overwrite each other's. The last
command of an application wins, in the order of the log (SH-2). Workers note the offsets of the parts. They
store and start nothing yet (SH-4).

*The leader.* The holder of COMMAND's one partition in the consumer group of leaders is the active leader. It
first fences its predecessor (the broker accepts no transaction of an earlier producer of the cluster's
transactional id any more), then announces itself on COMMAND: the offset of that record is its **term**. It
reads the last document from ASSIGNEMENT, which no predecessor can replace any more, and all of COMMAND. It
goes on from there: it takes the commands since that document in order, and publishes once (SH-9). It writes
everything in transactions, so a deposed leader writes nothing at all. If a late document of a deposed leader
is on the log all the same, its **epoch** (term, number) is below the announced term, and workers and status
readers refuse it (SH-7).

*The document.* One complete assignment, written to COMMAND and ASSIGNEMENT with the consumed offset, both or
neither. Restarts that a worker makes by itself are only in its pongs. On COMMAND a document follows the
commands that it takes into account. So a worker knows where an application's archive is before a document
names the application (SH-6). A worker acts on the last document only, and only on entries that name it and
**its incarnation**: a restarted worker runs nothing until a leader has heard it.

*Files* (SH-4). A worker that an entry names reads the archive at the offsets of its parts, unpacks it, and
starts the application, which is pending until then. Unpacked files stay while a document names the worker,
while a process uses them, and ``keep_files_s`` longer: an application that returns in that time starts at
once. An application's own data stays until a stop.

*Changes* (SH-24). A document is written whole or as a change of the one before it in the same term, its
*base*. The first of a term is whole. A change is written as a document is, and applies to its base only: a
reader that lacks the base waits for a whole document. Meanwhile a worker acts on an older document, as a slow
reader does. A leader never goes on from a document that lacks a change, as that change may have named another
worker. A leader of a version that reads only whole documents would do so. So workers refuse its documents
while a change is outstanding, and its successor goes on from the last document that they followed. Leaders
write changes only while every known worker reads them.

*One worker at a time* (SH-13). An entry names at most one worker. To move an application, the leader
publishes it without a worker, ``leaving`` the old one since that epoch, and names the new one only when the
old one

- has said in a pong that it acts on a document of that epoch or later, and that no process of the
  application runs: acting on the last document only, it cannot start it any more; or
- has a successor, a greater incarnation number of the same lineage: the lock of the data folder proves that
  the old one has ended; or
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
a leader that waits ``deadline_s`` from the last pong that any leader can have heard waits longer than any
such permission lasts. Leaders may have different deadlines. A document carries the longest that is still in
use, a successor keeps to it until its predecessor's permissions have ended, and no ping permits more than a
published document says. A permission also carries the epoch of the leader's document: a worker that was cut
off and is still behind on COMMAND starts no exclusive application by a document older than the one that took
the application away. The supervisor of the worker's processes enforces the deadline: a worker that is stopped
(SIGSTOP) cannot stop anything itself.

*Failures* (SH-17). An application that has failed on a worker is placed elsewhere. The leader forgets where
it failed some time after the last failure, later with each failure in a row. A worker that is named anew
begins with all restarts, and stores again the files that it had refused.

*Absence* (SH-26). The applications of a worker that left or is missing wait for it for ``away_grace_s``,
without a worker. A worker with its id that is heard in time gets them back, also with another folder. A grace
only delays, and proves nothing: the next worker, even the same one, gets an application only once the old
process has stopped it or is gone as above. A cordoned worker gets no further applications, a drained one has
none. Cordons come as commands, and stay in the document.

*Replicas* (SH-28). An application with several replicas has an entry for each, ``T/C/A#1`` for the second,
with a worker, state, failures and tokens of its own: all above holds for each by itself. They share the
start command, the archive and the files on a worker. No two are ever on one worker. A leader names a worker
for one only once no document lets another one run there, and a worker starts one only once its process of
another one has ended: it may have been cut off, and have been given that replica while it still ran this one.
The number comes with each start, and with a scale command, which counts for the start before it. Records that
name replicas have a format of their own, which earlier versions refuse.

*Rounds* (SH-8). The leader pings each round. Workers pong at once, and whenever their state changes. Changes
in quick succession share a pong, as each pong has all applications of the worker. A worker that has not been
heard for ``missed_rounds`` full rounds is removed; a new leader begins to count with its first ping, and
removes no worker before its second (SH-9). A leader answers a worker that it hears for the first time by
another ping of the same round, so that exclusive applications outlive a change of leader. A round that comes
more than half a round late removes no worker: pongs may be waiting unread. A worker that answers, but has
followed no document for ``stalled_s``, is removed too. Its pongs do not count, and no ping answers them,
until it follows the document that removed it: its exclusive applications end as if it were silent. Nothing
else is periodic: commands, changed reports and new workers are acted on as they are read, coalesced over
``settle_time_s``.

*Retention* (SH-15). COMMAND loses old records by age and by size. Before that, a start command of an
application that is to run is written again, with its parts, under a key of its own (``keep:``). The copy
counts as of the offset of the client's record, so it never overrides a stop that the leader had not read yet.
When the application stops, or starts anew, the copy is dropped. Parts are dropped once nothing has needed
them for a while: a client may be about to start the same archive again.
"""
