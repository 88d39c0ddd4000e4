"""The balanced allocation; the theory and the proofs are in ``rebalanser.core.allocation``."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from rebalanser.core.group.types import Effort

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

NO_PINS: Mapping[str, str] = MappingProxyType({})
NOTHING: frozenset[str] = frozenset()


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
    kept, arriving = _share_out(nodes, resources, previous, pinned)
    return {
        node: tuple(sorted(_sorted(held, previous.get(node, ())) + arriving[node]))
        for node, held in kept.items()
    }


def share_out(
    nodes: Collection[str],
    resources: Collection[str],
    previous: Mapping[str, Collection[str]],
    pinned: Mapping[str, str] = NO_PINS,
    unsettled: AbstractSet[str] | None = None,
) -> dict[str, frozenset[str]]:
    """Allocate as ``balanced`` does, in sets: only shares that lose something are sorted.

    A share that stays as it was is the very same set, if it was a frozenset. ``unsettled`` has the only names
    that may not be both in ``resources`` and in just one share of ``previous``. With it the cost grows with
    the numbers of nodes and pins and with what changes, not with that of all resources (RB-45).
    """
    kept, arriving = _share_out(nodes, resources, previous, pinned, unsettled)
    shares: dict[str, frozenset[str]] = {}
    for node, share in kept.items():
        shares[node] = as_before(previous.get(node), share.union(arriving[node]) if arriving[node] else share)
    return shares


def as_before(before: Collection[str] | None, share: AbstractSet[str]) -> frozenset[str]:
    """Return ``before`` itself if it is a frozenset equal to ``share``, else the share."""
    if share is not before and isinstance(before, frozenset) and share == before:
        return before
    return share if isinstance(share, frozenset) else frozenset(share)


def _share_out(
    nodes: Collection[str],
    resources: Collection[str],
    previous: Mapping[str, Collection[str]],
    pinned: Mapping[str, str],
    unsettled: AbstractSet[str] | None = None,
) -> tuple[dict[str, frozenset[str]], dict[str, list[str]]]:
    """Return the free resources that each live node keeps, and those that it gets."""
    live = sorted(set(nodes))
    if not live:
        return {}, {}
    if unsettled is None:
        resources = frozenset(resources)
    arriving = fixed(live, resources, pinned)
    kept, unheld = free_held(live, resources, previous, pinned, unsettled)
    free = sum(map(len, kept.values())) + len(unheld)
    quotas = _quotas({node: len(arriving[node]) for node in live}, kept, free)

    waiting = list(unheld)
    for node in live:
        if len(kept[node]) > quotas[node]:
            leaving = _sorted(kept[node], previous.get(node, ()))[quotas[node] :]
            kept[node] = kept[node].difference(leaving)
            waiting += leaving
    places = vacancies({node: quotas[node] - len(kept[node]) for node in live})
    for name, node in zip(sorted(waiting), places, strict=True):
        arriving[node].append(name)
    return kept, arriving


def moves(previous: Mapping[str, Collection[str]], allocation: Mapping[str, Collection[str]]) -> int:
    """Return the number of resources that moved from a node that is still live to another one.

    ``allocation`` has every live node as a key, also those that own nothing, as ``balanced`` gives it.
    Resources that no live node had, or that are on no node now, are not counted (RB-10).
    """
    held, _ = _held(sorted(allocation), set().union(*allocation.values()), previous)
    return _moved(held, allocation)


def minimum_moves(
    nodes: Collection[str],
    resources: Collection[str],
    previous: Mapping[str, Collection[str]],
    pinned: Mapping[str, str] = NO_PINS,
) -> int:
    """The fewest ``moves`` with which any allocation as even as possible can follow ``previous`` (RB-10).

    Computed from counts alone, without making an allocation; the arguments are those of ``balanced``.
    """
    live = sorted(set(nodes))
    if not live:
        return 0
    return _minimum_moves(live, frozenset(resources), previous, pinned, None)


def _moved(held: Mapping[str, frozenset[str]], allocation: Mapping[str, Collection[str]]) -> int:
    """The number of resources that nodes held and that others have now."""
    lost = [
        names.difference(allocation[node]) for node, names in held.items() if allocation[node] is not names
    ]
    left = set().union(*lost)
    if not left:
        return 0
    return len(set().union(*(left.intersection(names) for names in allocation.values())))


def _minimum_moves(
    live: Sequence[str],
    resources: Collection[str],
    previous: Mapping[str, Collection[str]],
    pinned: Mapping[str, str],
    unsettled: AbstractSet[str] | None,
) -> int:
    pinned_to = fixed(live, resources, pinned)
    held_free, unheld = free_held(live, resources, previous, pinned, unsettled)
    loads = {node: len(pinned_to[node]) for node in live}
    held = {node: len(names) for node, names in held_free.items()}
    level, extra = _water_level(loads.values(), sum(held.values()) + len(unheld))

    forced = moves(previous, pinned_to)
    surplus = sum(max(0, held[node] - max(0, level - loads[node])) for node in live)
    could_spare_one = sum(loads[node] <= level < loads[node] + held[node] for node in live)
    return forced + surplus - min(extra, could_spare_one)


def effort(
    allocation: Mapping[str, Collection[str]],
    resources: Collection[str],
    previous: Mapping[str, Collection[str]],
    pinned: Mapping[str, str] = NO_PINS,
    unsettled: AbstractSet[str] | None = None,
) -> Effort:
    """The cost of ``allocation``: its ``moves`` beside the ``minimum_moves`` of its nodes (RB-10).

    ``unsettled`` is that of ``share_out``.
    """
    live = sorted(allocation)
    if unsettled is None:
        resources = frozenset(resources)
    held, _ = free_held(live, resources, previous, NO_PINS, unsettled)
    return Effort(
        moves=_moved(held, allocation),
        least_moves=_minimum_moves(live, resources, previous, pinned, unsettled) if live else 0,
        nodes=len(allocation),
        resources=len(resources),
    )


def fixed(live: Sequence[str], resources: Container[str], pinned: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the pinned resources of each live node."""
    on_node: dict[str, list[str]] = {node: [] for node in live}
    for name, node in pinned.items():
        if node in on_node and name in resources:
            on_node[node].append(name)
    return on_node


def free_held(
    live: Sequence[str],
    resources: Collection[str],
    previous: Mapping[str, Collection[str]],
    pinned: Mapping[str, str],
    unsettled: AbstractSet[str] | None,
) -> tuple[dict[str, frozenset[str]], set[str]]:
    """Return the resources without a pin that each live node held, and those that none held."""
    if unsettled is not None:
        unsettled = unsettled | pinned.keys() if pinned else unsettled
        there = {name for name in unsettled if name in resources and name not in pinned}
        return _held_but(live, there, previous, unsettled)
    return _held(live, frozenset(resources).difference(pinned) if pinned else resources, previous)


def _held_but(
    live: Sequence[str],
    there: set[str],
    previous: Mapping[str, Collection[str]],
    unsettled: AbstractSet[str],
) -> tuple[dict[str, frozenset[str]], set[str]]:
    """As ``_held``, where all but ``unsettled`` are in just one share; of those only ``there`` exist."""
    held: dict[str, frozenset[str]] = {}
    for node in live:
        had = previous.get(node, NOTHING)
        if not isinstance(had, frozenset):
            had = frozenset(had)
        doubtful = had.intersection(unsettled)
        if not doubtful <= there:
            had = had.difference(doubtful - there)
        there -= doubtful
        held[node] = had
    for node in previous.keys() - held.keys():
        there.update(name for name in previous[node] if name not in unsettled)
    return held, there


def _held(
    live: Sequence[str], names: Iterable[str], previous: Mapping[str, Collection[str]]
) -> tuple[dict[str, frozenset[str]], set[str]]:
    """Return which of ``names`` each live node held, and which none; of several the first in ``live``.

    What a node held that lost nothing is the very set that it had: in a large group most did.
    """
    without_holder = set(names)
    held: dict[str, frozenset[str]] = {}
    for node in live:
        had = previous.get(node, ())
        if not isinstance(had, frozenset) or not without_holder.issuperset(had):
            had = frozenset(without_holder.intersection(had))
        without_holder -= had
        held[node] = had
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
    """Return the number of free resources for each node; ``loads`` are the pinned ones."""
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
