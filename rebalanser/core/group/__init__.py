"""The protocol core: one node of a group as a state machine, without clock, thread, randomness or I/O.

Theory of operation
===================

A *group* is a set of nodes that share out a list of *resources* so that every resource has exactly one
owner. All that the nodes know of each other is in a registry; they never talk to each other.

**A node's life.** A node joins by writing its node key under a lease. The key's create revision names the
*session*: whoever sees the key at that revision, in a linearizable transaction, knows that the lease and
everything under it lived at that moment. The node renews the lease by heartbeats and counts its *deadline*
from the instant before the renewal was sent that such a transaction then proved. A session that is seen to
be gone is gone with everything under it: the node forgets its role, its barriers and its tokens, calls
OnStop once, and joins again as another incarnation under another id. The table is ``MEMBERSHIP``.

**Leading.** One node leads at a time: the one that incremented the *term* last. The term key belongs to no
lease, so terms never go back; a leader is gone when its node key is. Everything a leader writes is guarded
by its term, so a leader that lost it without knowing can write nothing. ``ROLE`` is the table.
The leader reads the group at one revision, computes an allocation, and publishes what changed: a *share* for
each node that changes, and a *header* that commits the new *version*. If nothing changes nothing is written.
A node's share is its latest stored one of a *committed* version: those are the versions up to the header's
without the *aborted* ones, which were given up while their shares were written. So a node hears of the
allocations that change its share, and of no others.

**Following an allocation.** A node that finds its share changed acts on it in four steps (``STEPS``):

1. OnStop for what must be given up, and wait for it to return;
2. remove the *barriers* of what was stopped;
3. add barriers for what is wanted, waiting for each until its present holder removes it;
4. OnStart.

A barrier is a key of the node's lease. It can be added only while it is absent, while the share acted on is
the last that the node has read, and while the node's own key lives; its create revision is the *fencing
token* handed to OnStart. Exclusion rests on barriers alone: an allocation that is wrong, late, or written by
two leaders can delay a resource but never give it two owners. The leader merely proposes.

Two steps run code of the application and are never interrupted: 1 and 4. A newer allocation cuts 2 and 3
short. A node does not follow a script: after every event it looks at what it wants, holds and has started,
and does the first thing that is missing. An interrupted rebalance is therefore nothing special.

**Losing touch.** ``detect_s`` after the last proof of life a node calls OnStop for everything, early enough
for OnStop to return before the lease can end. It keeps its barriers: if the registry answers again in time
and the session lives, it starts them again; if not, they ended with the lease.

**Releasing a resource.** A node whose application releases a resource names it in its node key, which it
rewrites over what it last wrote there. The leader reads that as any change of the members and gives the
resource to a node that has not released it, if there is one; the steps above do the rest. The node measures
the time of a release by its own clock, rewrites its key once the time has passed, and names what is still
released when it joins again.

**Unknown outcomes.** A command whose answer is lost may still take effect later. Each command is therefore
either idempotent and sent again, or read back, or made impossible:

- a barrier that may have been added is *uncertain* until it is added for sure or, once a later share forbids
  the late write, read. A node that reads a share therefore deletes its earlier ones;
- a barrier that may have been removed protects nothing any more. Its removal is finished first, even where a
  newer allocation gives the resource back;
- an acknowledgement is written only over the one before it, so that a late one can't replace a newer one;
- a plan that may still be committed is forbidden by committing another one, even where nothing has to change.
  No version is tried twice, so that late parts of one plan never mix with another. Shares are written only
  while the header is the one that the plan is based on, and each header aborts what may be stored of others.

Use ``Node``: ``node.handle(event, now)`` returns effects, in the order in which they must take place;
``node.next_wakeup`` is when to call it with ``Wakeup`` at the latest. ``rebalanser.core.group.messages``
describes events and effects, and what must happen before what.
"""

from rebalanser.core.group.leading import Solve, intended, problem_of, releasers
from rebalanser.core.group.messages import (
    OUTCOMES,
    Accept,
    Answered,
    AskStop,
    CallStart,
    CallStop,
    Command,
    Effect,
    Event,
    Fact,
    FactKind,
    Failed,
    Finished,
    Guard,
    Handler,
    HandlerReturned,
    Lane,
    MakePlan,
    Noticed,
    Outcome,
    Perform,
    PlanMade,
    Release,
    Report,
    Start,
    Stop,
    Wakeup,
    Watch,
)
from rebalanser.core.group.node import Node, NodeOptions
from rebalanser.core.group.states import MEMBERSHIP, ROLE, STEPS, Membership, Role, Step
from rebalanser.core.group.types import (
    Effort,
    Fingerprint,
    Group,
    Header,
    Leadership,
    Member,
    Mode,
    OnOverrun,
    Plan,
    Policy,
    ResourceSpec,
    Session,
    Share,
    SpreadOver,
    Timings,
    Topic,
    TopicKind,
)

__all__ = [
    "MEMBERSHIP",
    "OUTCOMES",
    "ROLE",
    "STEPS",
    "Accept",
    "Answered",
    "AskStop",
    "CallStart",
    "CallStop",
    "Command",
    "Effect",
    "Effort",
    "Event",
    "Fact",
    "FactKind",
    "Failed",
    "Fingerprint",
    "Finished",
    "Group",
    "Guard",
    "Handler",
    "HandlerReturned",
    "Header",
    "Lane",
    "Leadership",
    "MakePlan",
    "Member",
    "Membership",
    "Mode",
    "Node",
    "NodeOptions",
    "Noticed",
    "OnOverrun",
    "Outcome",
    "Perform",
    "Plan",
    "PlanMade",
    "Policy",
    "Release",
    "Report",
    "ResourceSpec",
    "Role",
    "Session",
    "Share",
    "Solve",
    "SpreadOver",
    "Start",
    "Step",
    "Stop",
    "Timings",
    "Topic",
    "TopicKind",
    "Wakeup",
    "Watch",
    "intended",
    "problem_of",
    "releasers",
]
