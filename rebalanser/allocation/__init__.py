"""Who owns what: pure functions from nodes, resources and the previous allocation to the next one.

An allocation maps the id of every live node to the sorted names of the resources that it owns. Nothing here
reads a clock, draws a random number or depends on the order of its input, so that any two leaders that see
the same snapshot compute the same allocation (RB-10).

Theory of operation
===================

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
"""

from __future__ import annotations

from rebalanser.allocation.balanced import balanced, minimum_moves, moves

__all__ = ["balanced", "minimum_moves", "moves"]
