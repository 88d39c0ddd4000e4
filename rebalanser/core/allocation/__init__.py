"""Allocations: pure functions from nodes, resources and the previous allocation to the next one.

An allocation maps the id of every live node to the sorted names of the resources that it owns. Nothing here
reads a clock, draws a random number or depends on the order of its input, so that any two leaders that see
the same snapshot compute the same allocation (RB-10).

The leader of a group calls ``solve`` with an ``AllocationProblem``. The ``Allocation`` that it returns has a
certificate: a lower bound of the largest load, the moves with their reasons, and why resources are unplaced.
Where all nodes and resources are alike, counts decide (*balanced* below, and *place* where nodes
refuse resources); else weights do (*groups with weights*). Shiva calls ``place`` for its applications:
workers have tags and capacities, and each application is kept to those that it may be on.

Theory of operation: balanced
=============================

*Terms.* The previous allocation is read as a function: the **holder** of a resource is the live node that
had it, the one with the smallest id should several name it; a resource whose nodes are all gone, and a new
one, has none. A **move** is a resource that has a holder and is now on another node. Placing a resource
that has no holder is no move: there is nobody to leave it with. A **pinned** resource is on the node of its
pin or, if that node is not live, on none; all others are **free**.

*How many each node gets.* Let node ``i`` carry ``p(i)`` pinned resources. The free ones are poured over the
nodes like water over an uneven floor, up to a **level**: every node with ``p(i) <= level`` is filled to the
level, and the ``extra`` resources that are left over, fewer than there are such nodes, go one each to some
of them. A node whose pins alone rise above the level gets nothing more. Without pins the level is
``R // N`` and ``extra`` is ``R % N``: floor or ceil for everyone (RB-2).

*Why no other loads are as even.* Suppose that a free resource is on a node of load ``a`` while another node
has load ``a - 2`` or less. Handing it over lowers the sum of the squared loads. Where no such step is left,
every node with free resources has load ``h`` or ``h + 1``, ``h`` being the smallest load of all, so that
nodes with more than ``h`` pinned resources have no free one and the others are at ``h`` or ``h + 1``. As the
total is fixed these are the loads above, with ``h`` the level. So these and only these have the least sum of
squares. They also have the least maximum and the greatest minimum at once: below a lower maximum there is
not room for all, and for a greater minimum there are not enough.

*Why the moves are minimal.* Let ``f(i)`` be the free resources whose holder is ``i``, and ``q(i)`` how many
free ones it gets. Whatever the allocation, node ``i`` keeps at most ``min(f(i), q(i))`` of its own, so that
at least ``sum f(i) - sum min(f(i), q(i))`` free resources move. The allocation here reaches this bound: a
node gives up only what exceeds its ``q(i)``, and then receives none. What is left to choose is who gets one
of the ``extra``. For node ``i`` it raises ``min(f(i), q(i))`` by one exactly if ``p(i) + f(i) > level``,
else by nothing. Giving them to the fullest nodes first, fullest by ``p(i) + f(i)``, therefore saves
``min(extra, number of such nodes)`` moves, and no choice can save more. Pinned resources that have to go
move in every allocation that honours the pins. ∎

*Why it is idempotent.* On its own output every node holds ``q(i)``, those with an extra one are the fullest
and get it again: nothing exceeds, nothing waits.

*Cost.* Deciding how many resources each node keeps and gets takes O(R + N log N) expected time, with R
counting every name given. Which ones they are is decided by name, so that names are sorted, but only those
of one node at a time and those that have to be placed. Sorting a share that is a share of an earlier result
is linear, since it is in order already; so with M resources to place the whole takes
O(R + N log N + M log M). Only a previous allocation out of order, or a first allocation, where M is R, pays
for a full sort: that is the price of a sorted result and not of the choice.

Theory of operation: place
==========================

*Terms.* Tags, refusals and pins have one effect: they say which workers are **open** to a resource. If there
are none it is unplaced, with the reason; below only the others count, and all of them are placed. Its holder
is its previous worker if that one is still open to it. Resources to which the same workers are open form a
**pool**; workers open to the same pools are of one **kind**. A placement is **even** if its sum of squared
loads is the least that there is.

*Levels.* In some placement let worker ``i`` lead to ``j`` if ``j`` is open to a resource on ``i``, or to one
on a worker that ``i`` leads to. Handing one resource over at each step of the way lowers the load of ``i`` by
one and raises that of ``j``; if ``i`` has two more than ``j`` this lowers the sum of squares. So in an even
placement no worker leads to one with a load smaller by two. Take such a placement, and let the **level**
``c(i)`` of a worker be the greatest load among itself and those that lead to it. Then

1. every worker ``i`` has load ``c(i)`` or ``c(i) - 1``;
2. every resource is on a worker whose level is the lowest among those open to it,

the latter because the worker it is on leads to them all, and a level is at least that of whoever leads there.

*These two conditions are what being even means*, for any placement and not just the one that the levels were
taken from. For whole numbers ``(x - c)(x - c + 1) >= 0``, or ``x² >= (2c - 1)x - c(c - 1)``, and they are
equal just for ``x = c`` and ``x = c - 1``. Summed over the loads of all workers, with each resource
contributing ``2c - 1`` for the worker it is on, the sum of squares is at least::

    sum over resources (2 · lowest level open to it - 1)  -  sum over workers c(c - 1)

in which the placement no longer appears. Equality takes 1 for each worker and 2 for each resource; the
placement above reaches it, hence so does every even one. ∎

*Finding the levels.* Give all workers a capacity ``k`` and let as many resources as possible be placed. A
worker is **swamped** at ``k`` if it is open to a resource left over, or to one on a swamped worker. With the
resources left over the swamped workers are the smallest side of a minimum cut, the same for every greatest
flow. They are just the workers with a level above ``k``. For take away from an even placement what each
worker has above ``k``: swamped are then the workers that had more than ``k`` and those they led to, which is
to say all with a level above ``k``; by 1 these are full, so that no more can be placed, as was required. So
levels, too, are the same whichever even placement they are taken from.

Hence a flow from pools to kinds divides workers into those above a level and those not above it, and by 2 it
divides the pools as well: into those to which swamped workers only are open, and the others, which are then
kept to the workers not swamped. A part with R resources and N workers is tried with the capacity
``ceil(R/N)``, at which not all can be swamped, and with one less, at which some are. If neither divides it,
all its workers have the level ``ceil(R/N)``: it is a **block**. Levels within a part are those of the whole,
since a worker that leads to ``i`` and has the load ``c(i)`` does so over workers of the same level.

*Fewest moves.* Blocks share no resource and no worker, so that each is settled alone; a holder outside the
block is lost to every even placement. Within it the placements that fulfil 1 are the flows from pools to
workers in which each worker takes ``c - 1`` units for nothing and one more at a price above that of moving
everything. Before that a unit stays with a worker for nothing, as often as this one holds resources of the
pool, or goes to any worker open to the pool for 1. So the cost of a flow is, but for a constant, the number
of moves, and the cheapest one has the fewest. No resource that goes is dealt to its own holder: it could have
stayed for less. ∎

*Why it is idempotent.* On its own output no move is needed. So the fewest are none: every resource is with
its holder, and one that was unplaced still is.

*Without constraints* there is one pool and one block with the level ``ceil(R/N)``: floor or ceil for everyone
(RB-2), and as few moves as with ``balanced``, though not always of the same resources.

*Refusals of the past.* A leader allocates first as if a resource were refused only while its holder refuses
it or it has no holder. Every allocation that keeps to all refusals keeps to these, and costs the same. So if
the best one gives no node what it refuses, no other is better; else all refusals are taken into account. Most
of what was ever refused is with a node that takes it, and belongs to the one large pool again.

*Cost.* Names are read and sorted once. The networks have a node for each pool and kind and, for the moves,
each worker; an arc for each kind open to a pool, and for each worker that holds some of a pool. The number of
resources does not enter. At most two flows are computed for each part that is tried and one for each block,
so that there are fewer than five times as many as there are different levels.

Theory of operation: groups with weights
========================================

*Terms.* The **load** of a node is the sum of the weights of its resources, its **relative load** that sum
per capacity. A node without a capacity counts as the largest capacity of any, or as 1 if none has one.
Weights and capacities are counted in millionths, rounded, so that sums don't depend on their order and ten
times 0.1 is 1; relative loads are quotients of these integers, rounded correctly: all are equal on every
machine. Resources that may be on the same nodes, by their needs, releases and pins, are of one **class**.
The **level** is the relative load of all nodes if weights could be divided, but for nodes that have a
resource heavier than that.

*The bound.* On some node the relative load is at least the sum of all weights per sum of all capacities:
else there is no room for all. The same holds for each set of nodes and the resources that may be on no
others, and for the rest once nodes with a limit, whose relative load is 1 at most, are full. And the
heaviest resource is on some node that it may be on.

*How it is decided*, from the previous shares:

1. What may not stay leaves its node: over pins, releases and needs; then where two resources of a spread are
   together, the later by name; then where there is more than the capacity, the lightest resource that is
   enough, or the heaviest ones.
2. What has no node is placed, the classes with the fewest nodes first and the heaviest resources of each,
   where it leaves the smallest relative load. For what has room nowhere at most ``MAX_RELOCATED`` others
   move away.
3. The fullest nodes give resources to the least full ones that are open to them, while that lowers the
   fuller of both; if no single resource helps, two are moved on or exchanged. Where weights differ only
   nodes that are a hundredth above the level give, or that others lack a hundredth: little noise moves
   little, and only a band makes sure that it moves nothing. The resource is the heaviest that both sides
   have use for, so that few move.

*How far off it is.* Let the fullest node have relative load ``M`` after step 3, and let all resources be
open to all nodes. No resource ``w`` of it lowers ``M`` on any node ``j``, so that ``load(j) + w >= M ·
capacity(j)``, summed over all ``n`` nodes: ``M <= total / capacities + w · n / capacities``. So the largest
relative load is above the mean by no more than its lightest resource is on a node of mean capacity, unless
it is within the hundredth (RB-36). Where pins, needs, spreads or limits hinder a move this need not hold;
small cases are compared with the best there is. Optimal packing is NP-hard.

*Moves* of step 1, and those that make room, are needed. Those of step 3 are for the **balance** only, and
the policy limits them (RB-38): at most ``max_moves``; none of a resource in its cool-down; none while the
largest relative load is within ``1 + imbalance_band`` of the bound, so that with a band a new node may get
nothing for as long as the others are within it. Once a load leaves the band, loads are lowered to the middle
of it. If steps are left that the limits forbid, the certificate says so (``improvable``). What is unowned is
placed whatever the limits.

*Why it ends, and is idempotent.* Step 2 lowers the number of resources without a node. A step of 3 lowers
the relative loads in lexicographic order, the greatest first. So no state comes twice, and the search ends
where no step applies; unless limits ended it, it applies none to its own outcome.

*Cost.* Weights and needs of all resources are read: O(R + N log N + M log R) for M that are placed or move.

Theory of operation: anti-affinity
==================================

*Terms.* Resources of a **group**, the replicas of an application, are each to be on a worker of its own.

*How they are placed.* A replica stays where it is if it may be there and no other one of its group is. The
others take the emptiest workers; if all that are open to one have a sibling, those that are new make room
along an alternating path. So as many as possible are placed beside those that stay. If the same workers are
open to all of a group no more can be placed in any way; if some have failed somewhere, those that run stay
where they are. All other resources are then placed around the replicas as above, as if those were pinned.
Last, while some worker leads to one with a load smaller by two, over resources of any sort, the shortest such
way is followed. Then all others are placed once more around the replicas as they are now, so that these move
as little as can be.

*Why this is even.* A placement is a flow, from each pool and group over at most one unit for each pair of a
group and a worker. If the same workers are open to all of a group, a unit can be led from one worker to
another just if there is such a way. A flow has the least sum of squares if no unit can be led to a load
smaller by two, as any better one would differ from it by such ways; and none is left. Where replicas have
failed on different workers a way may use two siblings that hinder each other. It is then left out, and the
outcome may be less even.

*Why it is idempotent.* On its own output every replica stays, the others do not move, and no way is left.

*With requests* the search below is kept to workers without a sibling in each of its steps.

Theory of operation: weights
============================

*Terms.* A resource may **request** processors and memory, and a worker may have a **capacity** of each. The
**relative load** of a worker is the larger of the two parts of its capacity that are requested there. Where a
worker has no limit the largest capacity of any worker counts instead, or all requests together if there is
none. Resources that request nothing have no weight: they are placed by number, as above, whatever else there
is.

*Why a search.* To pack as many as possible, or as evenly as possible, is NP-hard. So these resources are
placed by a bounded search that begins with the previous placement, and repeats three steps:

1. Place what waits, the largest first, where it leaves the lowest relative load. If there is room nowhere, at
   most ``MAX_RELOCATED`` resources move off a worker to make it.
2. Move a resource, or exchange two of the fullest worker and another, if that lowers the greater one of both
   relative loads. Loads that differ by less than a fifth count as even, since a move restarts a process.
3. Undo moves without which the loads are as even.

*Why it ends, and is idempotent.* A step of kind 1 leaves fewer resources without a worker. One of kind 2
lowers the relative loads in lexicographic order, the greatest first, and one of kind 3 lowers the number of
moves and raises no load. So no state comes twice. The search ends where none of the steps applies. It begins
there if its own outcome is fed back, and ends at once. Relative loads are quotients of integers, rounded
correctly: equal ones are equal on every machine.

*Capacity* holds in every state after the first, in which a worker that has too much gives up a few.

*Cost.* Resources with the same requests that may be on the same workers are of one kind, and the search only
counts them. A step looks at all workers and kinds. To make room it first compares what is lacking with the
most that any worker has free, so that full workers are passed over. Whoever places again and again keeps a
``RememberedSearch``, which searches only if something that matters has changed.
"""

from __future__ import annotations

from rebalanser.core.allocation.balanced import balanced, minimum_moves, moves, share_out
from rebalanser.core.allocation.placement import Placement, place
from rebalanser.core.allocation.solver import Allocation, Certificate, MoveReason, ResourceMove, solve
from rebalanser.core.allocation.weighted import (
    MAX_AMOUNT,
    Capacity,
    RememberedSearch,
    Requests,
    has_room,
    thousandths,
)
from rebalanser.core.group.problem import AllocationProblem

__all__ = [
    "MAX_AMOUNT",
    "Allocation",
    "AllocationProblem",
    "Capacity",
    "Certificate",
    "MoveReason",
    "Placement",
    "RememberedSearch",
    "Requests",
    "ResourceMove",
    "balanced",
    "has_room",
    "minimum_moves",
    "moves",
    "place",
    "share_out",
    "solve",
    "thousandths",
]
