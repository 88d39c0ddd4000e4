"""The balanced allocation; the theory and the proofs are in :mod:`rebalanser.allocation`."""

from __future__ import annotations

from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING

from rebalanser.protocol.types import Effort

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

NO_PINS: Mapping[str, str] = MappingProxyType({})


def balanced(
    nodes: Collection[str],
    resources: Collection[str],
    previous: Mapping[str, Collection[str]],
    pinned: Mapping[str, str] = NO_PINS,
) -> dict[str, tuple[str, ...]]:
    """Share out ``resources`` evenly over ``nodes``, moving as few as that allows (RB-2, RB-10).

    The outcome depends on the contents of the arguments only, not on their order, and is the same when it is
    fed back as ``previous``. Repeated names count once.

    Args:
        nodes: the ids of the live nodes that may own resources.
        resources: the names of all resources of the group.
        previous: what each node had. Nodes and resources that are gone are ignored; a resource that several
            live nodes name counts as held by the one with the smallest id.
        pinned: the only node that a resource may be on (RB-29). A resource pinned to a node that is not in
            ``nodes`` is on none; a pin of an unknown resource is ignored.

    Returns:
        The sorted resources of every node, in the order of node ids. Without pins each node has floor or
        ceil of R/N; with pins the loads are as even as the pins allow.
    """
    live = sorted(set(nodes))
    if not live:
        return {}
    free = set(resources).difference(pinned)
    fixed = _fixed(live, resources, pinned)
    held, unheld = _held(live, free, previous)
    quotas = _quotas({node: len(fixed[node]) for node in live}, held, len(free))

    shares = {node: _sorted(held[node], previous.get(node, ())) for node in live}
    leaving = chain.from_iterable(shares[node][quotas[node] :] for node in live)
    waiting = sorted(chain(unheld, leaving))
    for node in live:
        del shares[node][quotas[node] :]
    free_places = vacancies({node: quotas[node] - len(shares[node]) for node in live})
    for name, node in zip(waiting, free_places, strict=True):
        shares[node].append(name)
    return {node: tuple(sorted(shares[node] + fixed[node])) for node in live}


def moves(previous: Mapping[str, Collection[str]], allocation: Mapping[str, Collection[str]]) -> int:
    """How many resources a node that is still there had and another one has now.

    ``allocation`` has every live node as a key, also those that own nothing, as :func:`balanced` gives it.
    Resources that no live node had, or that are on no node now, are not counted (RB-10).
    """
    held, _ = _held(sorted(allocation), set().union(*allocation.values()), previous)
    return sum(len(names.difference(allocation[node])) for node, names in held.items())


def minimum_moves(
    nodes: Collection[str],
    resources: Collection[str],
    previous: Mapping[str, Collection[str]],
    pinned: Mapping[str, str] = NO_PINS,
) -> int:
    """The fewest :func:`moves` with which any allocation as even as possible can follow ``previous`` (RB-10).

    Computed from counts alone, without making an allocation; the arguments are those of :func:`balanced`.
    """
    live = sorted(set(nodes))
    if not live:
        return 0
    free = set(resources).difference(pinned)
    fixed = _fixed(live, resources, pinned)
    loads = {node: len(fixed[node]) for node in live}
    held = {node: len(names) for node, names in _held(live, free, previous)[0].items()}
    level, extra = _water_level(loads.values(), len(free))

    forced = moves(previous, fixed)
    surplus = sum(max(0, held[node] - max(0, level - loads[node])) for node in live)
    could_spare_one = sum(loads[node] <= level < loads[node] + held[node] for node in live)
    return forced + surplus - min(extra, could_spare_one)


def effort(
    allocation: Mapping[str, Collection[str]],
    resources: Collection[str],
    previous: Mapping[str, Collection[str]],
    pinned: Mapping[str, str] = NO_PINS,
) -> Effort:
    """What ``allocation`` costs: its :func:`moves` beside the :func:`minimum_moves` of its nodes (RB-10)."""
    return Effort(
        moves=moves(previous, allocation),
        least_moves=minimum_moves(allocation.keys(), resources, previous, pinned),
        nodes=len(allocation),
        resources=len(resources),
    )


def _fixed(
    live: Sequence[str], resources: Collection[str], pinned: Mapping[str, str]
) -> dict[str, list[str]]:
    """What pins alone put on each live node."""
    fixed: dict[str, list[str]] = {node: [] for node in live}
    for name in set(resources).intersection(pinned) if pinned else ():
        if pinned[name] in fixed:
            fixed[pinned[name]].append(name)
    return fixed


def _held(
    live: Sequence[str], names: Iterable[str], previous: Mapping[str, Collection[str]]
) -> tuple[dict[str, set[str]], set[str]]:
    """Which of ``names`` each live node held, and which none; of several the first in ``live``."""
    without_holder = set(names)
    held: dict[str, set[str]] = {}
    for node in live:
        held[node] = without_holder.intersection(previous.get(node, ()))
        without_holder -= held[node]
    return held, without_holder


def _sorted(held: Collection[str], previous: Collection[str]) -> list[str]:
    """Those of the previous names that are held, sorted; this is linear if they are in order already."""
    if len(held) == len(previous):
        return sorted(previous)
    return sorted(name for name in dict.fromkeys(previous) if name in held)


def _water_level(loads: Iterable[int], free: int) -> tuple[int, int]:
    """The level to which ``free`` resources fill nodes with these loads, and how many are left over."""
    poured, below = free, 0
    for load in sorted(loads):
        if poured < below * load:
            break
        poured, below = poured + load, below + 1
    return divmod(poured, below)


def _quotas(loads: Mapping[str, int], held: Mapping[str, Collection[str]], free: int) -> dict[str, int]:
    """How many free resources each node gets; ``loads`` are the pinned ones."""
    level, extra = _water_level(loads.values(), free)
    fullest_first = sorted(
        (node for node, load in loads.items() if load <= level),
        key=lambda node: (-loads[node] - len(held[node]), node),
    )
    quotas = {node: max(0, level - load) for node, load in loads.items()}
    for node in fullest_first[:extra]:
        quotas[node] += 1
    return quotas


def vacancies(needs: Mapping[str, int]) -> Iterator[str]:
    """Each node as often as it needs a resource, in turns: neighbours by name are often busy together."""
    while needs := {node: need for node, need in needs.items() if need > 0}:
        yield from needs
        needs = {node: need - 1 for node, need in needs.items()}
