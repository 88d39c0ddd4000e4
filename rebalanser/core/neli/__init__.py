"""NELI: processes that share nothing but a consumer group know, at any moment, which of them leads each role.

Theory of operation
===================

A *group* is a consumer group id on a topic of M partitions (NE-1). Kafka's group coordinator assigns each
partition to one process at a time. A *role* belongs to the partition "its number mod M" (NE-5), and whoever
leads a partition leads its roles. What the coordinator thinks and what a process believes may be far apart: a
process that is stopped, stuck or cut off learns nothing. So being assigned is not leading. Leading is being
assigned **and** holding evidence younger than the *deadline* (``deadline_s``; T of the classic modes).
It is computed at each request (NE-4), as it ends by time alone.

**The evidence**, each piece counted on the own monotonic clock from *before* its request:

- *heard*. In ``fast``: an own heartbeat of this very tenure was read back (NE-9). In ``non-exclusive``: any
  record of the partition was received. In ``exclusive``: any record that the broker's timestamp says is young
  enough (NE-7), so that draining a backlog makes nobody a leader.
- *confirmed*. An offset commit of the partition was accepted; the broker checks it against member id and
  generation, or epoch (NE-10). Hearing proves that a broker can be reached, not that the partition is still
  one's own: a process cut off from its coordinator alone goes on hearing. So every mode asks for this. It is
  sent right after a poll only, so a process whose poll loop is stuck stops leading after the
  deadline, long before ``max.poll.interval`` ends its membership.
- *counted*. The broker confirmed that the topic still has M partitions. A member that hears of another count
  fails (NE-5); one that hears nothing stops leading.

**One leader at a time** (``fast``, ``exclusive``). Let B be assigned a partition that A had. The coordinator
refuses commits of A from then on, in both group protocols: classic, because the generation has moved on or
the member is unknown; KIP-848, because a partition goes to B only after A's epoch was fenced or A itself has
said, after its revoke callback, that it gave the partition up. So each accepted commit of A was *sent* before
B was assigned, and A's leadership ends at most a deadline after that. B waits as long after its assignment,
the drift of both clocks included (``wait_s``). Nothing is assumed of the session timeout here. That matters:
in the classic protocol an accepted commit also renews the session, under KIP-848 it does *not*, and in both a
member that has overrun the rebalance timeout may be expelled right after a commit of its was accepted.
A successor learns from the last commit's note if a predecessor has a longer deadline than its own, and waits
that long. ``exclusive`` always waits (the grace of NE-8).

**An orderly hand-over spares the wait** (``fast``). The revoke callback calls the ``lapsed`` handlers, waits
until they return, and then commits with the note "released" (``core.neli.records``), which only a
process writes that has itself waited out, or been spared, its predecessors. B leads without waiting where
the last commit says "released" by A and every record from the committed offset to B's own first heartbeat is
A's or another group's. Why the log is read as well: the note of a zombie might be accepted late, after C had
the partition (under KIP-848 a member keeps its epoch while it gives up partitions in several turns). C led
only with a heartbeat of its own in the log, which is behind the offset that A committed, so B sees it. The
note belongs in the commit and not in a record, because the broker checks commits and takes records from
anybody. While A's handlers run, nobody else leads: the coordinator waits for A's callback, for at most the
rebalance timeout (``max_poll_interval_s``), and as long as A's client keeps its session.

**Fencing tokens** (NE-15). A leader's token is the offset of its tenure's first heartbeat that it read back,
valid once a commit has been accepted that was sent after the reading. Tokens of a partition grow strictly
from leader to leader: when that commit was accepted the partition was still A's, and A's heartbeat was in the
log. A later leader publishes the heartbeats of its tenure after it was assigned, so later, so at greater
offsets. (This needs a log that loses no acknowledged record: ``acks=all``, replicas in sync, no unclean
election. Topics that are made anew start at 0 again.) Between ``is_leader`` and the act time passes, so two
leaders can be kept apart only by the store that refuses a token below one it has seen.

**Non-exclusive** does not wait. With the classic protocol, where A loses touch with the cluster or stops, the
overlap is at most the deadline minus the session timeout (NE-6), because the last accepted commit renewed the
session. Where a member is expelled for another reason (it overran the rebalance timeout), or under KIP-848 if
heartbeats to the coordinator are lost while commits arrive, the overlap is at most the deadline. The oracle
of the simulator holds both bounds.

**Fail-over** takes, after a crash, the session timeout, a rebalance, and the wait: a deadline, a quarter of
the session timeout by default in ``fast``. After an orderly leave it takes a rebalance and three round trips
(heartbeat, its reading back, commit). When a group first starts nobody can have led, but roles wait all the
same: processes that go by another partition count may be there, and their evidence has to age.

**What a change of the partition count can do.** Processes that go by different counts give roles to different
partitions. Those that were there before the change hold no evidence of their count younger than the change,
and those that start after it wait a deadline first; a "released" note of another count spares nothing. So no
role has two leaders even then, as long as all brokers answer with the new count once one has.

Use ``NeliMember``: ``member.handle(event, now)`` returns effects, in the order in which they must take place;
``member.next_wakeup`` is when to call it with ``Wakeup`` at the latest; ``member.leads(role, now)`` and
``member.token(role, now)`` say what holds now. ``core.neli.messages`` has the contract of a driver,
``core.neli.settings`` the times, and ``PARTITION`` the states of a partition.
"""
