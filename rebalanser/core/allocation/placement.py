"""Placement under constraints; the theory and the proofs are in ``rebalanser.core.allocation``."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import chain, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from rebalanser.core.allocation.anti_affinity import OthersPool, ReplicaPlacement
from rebalanser.core.allocation.balanced import (
    NO_PINS,
    as_before,
    fixed,
    free_held,
    share_out,
    vacancies,
)
from rebalanser.core.allocation.balanced import effort as balanced_effort
from rebalanser.core.allocation.flow import Network
from rebalanser.core.allocation.reasons import why_not_separate, why_nowhere
from rebalanser.core.allocation.weighted import Capacity, RememberedSearch, Requests, place_by_weight

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from rebalanser.core.group.types import Effort

NO_REFUSALS: Mapping[str, frozenset[str]] = MappingProxyType({})
NO_REQUESTS: Mapping[str, Requests] = MappingProxyType({})
NO_CAPACITIES: Mapping[str, Capacity] = MappingProxyType({})
NO_GROUPS: Mapping[str, str] = MappingProxyType({})
NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Placement:
    """The worker of each resource, or the reason why it has none; both in the order of names."""

    holders: Mapping[str, str]
    """The worker of each resource that is placed."""
    unplaced: Mapping[str, str]
    """For each resource that may be on no worker the reason: one sentence, without a full stop."""
    full: frozenset[str] = NOBODY
    """The unplaced resources that some worker may take, once it has room."""


def place(
    workers: Mapping[str, frozenset[str]],
    resources: Mapping[str, frozenset[str]],
    previous: Mapping[str, str],
    *,
    refused: Mapping[str, frozenset[str]] = NO_REFUSALS,
    pinned: Mapping[str, str] = NO_PINS,
    requests: Mapping[str, Requests] = NO_REQUESTS,
    capacities: Mapping[str, Capacity] = NO_CAPACITIES,
    groups: Mapping[str, str] = NO_GROUPS,
    by_weight: RememberedSearch | None = None,
) -> Placement:
    """Place ``resources`` on ``workers`` as evenly as their tags allow, moving as few as that allows (SH-12).

    Every resource without requests that may be on some worker is placed. The sum of the squared loads is the
    least there is, and no placement with the same sum moves fewer resources (RB-10). Those with requests are
    placed by weight, beside them: no worker gets more than its capacity, and what has no room anywhere is
    unplaced (SH-27). Of resources with a group no two of the same group are on one worker: as many as
    possible are placed, and those with requests as far as the search goes (SH-28). With such resources the
    sum of the squared loads is still the least, if the same workers are open to all of a group, and few
    resources move. The outcome depends on the contents of the arguments only, not on their order, and is the
    same when its holders are fed back as ``previous``.

    Args:
        workers: the tags of each live worker.
        resources: the tags of each resource. It may be only on a worker that has all of them; without tags
            it may be anywhere.
        previous: the worker that holds a resource. One that is gone, or that the resource may no longer be
            on, counts as none: to leave it is no move. Unknown resources are ignored.
        refused: the workers that a resource may not be on, whatever their tags, as it failed there. Unknown
            resources and workers are ignored.
        pinned: the only worker that a resource may be on (RB-29), and only if it has the tags and is not
            refused. Pins of unknown resources are ignored.
        requests: the amounts that a resource takes of its worker; one that is missing, or requests nothing,
            counts by number only. Unknown resources are ignored.
        capacities: the amounts that the resources of a worker may take; one that is missing has no limit.
        groups: the group of each resource that needs another worker than all others of its group.
            Unknown resources are ignored.
        by_weight: spares the search by weight if its arguments are those of its last one.
    """
    together: dict[tuple[str, ...], list[str]] = defaultdict(list)
    weighed: dict[str, tuple[str, ...]] = {}
    separate: dict[str, tuple[str, ...]] = {}
    unplaced: dict[str, str] = {}
    demands = {
        name: _Demand(resources[name], refused.get(name, NOBODY), pinned.get(name))
        for name in sorted(resources)
    }
    answers = {demand: demand.answer(workers) for demand in set(demands.values())}
    for name, demand in demands.items():
        answer = answers[demand]
        if isinstance(answer, str):
            unplaced[name] = answer
        elif requests.get(name):
            weighed[name] = answer
        elif name in groups:
            separate[name] = answer
        else:
            together[answer].append(name)
    pools = [_pool(able, names, previous) for able, names in together.items()]
    if separate:
        replicas = _separated(pools, separate, groups, previous)
        for name, (size, open_to) in replicas.unplaced().items():
            unplaced[name] = why_not_separate(size, open_to)
        pools = _around(pools, replicas.holders)
    holders = _even(pools)
    if not weighed:
        return Placement(dict(sorted(holders.items())), dict(sorted(unplaced.items())))
    search = by_weight or place_by_weight
    packed, left, full = search(workers, weighed, requests, capacities, previous, groups)
    return Placement(dict(sorted((holders | packed).items())), dict(sorted((unplaced | left).items())), full)


def _even(pools: Sequence[_Pool]) -> dict[str, str]:
    holders = {name: worker for pool in pools for worker, names in pool.held.items() for name in names}
    for block in _blocks(_whole(pools)):
        holders.update(_settled(block).arriving)
    return holders


def _separated(
    pools: Sequence[_Pool],
    open_to: Mapping[str, tuple[str, ...]],
    groups: Mapping[str, str],
    previous: Mapping[str, str],
) -> ReplicaPlacement:
    """Place replicas so that the others can be placed evenly around them."""
    held = Counter(worker for pool in pools for worker, names in pool.held.items() for _ in names)
    replicas = ReplicaPlacement(open_to, groups, previous, held)
    holders = _even(_around(pools, replicas.holders))
    replicas.even_out(
        [
            OthersPool(
                pool.workers, Counter(holders[name] for name in (*pool.waiting, *chain(*pool.held.values())))
            )
            for pool in pools
        ]
    )
    return replicas


def _around(pools: Sequence[_Pool], replicas: Mapping[str, str]) -> list[_Pool]:
    """Return the pools with those of replicas, which may be only where they are."""
    fixed_to: dict[str, list[str]] = defaultdict(list)
    for name, worker in sorted(replicas.items()):
        fixed_to[worker].append(name)
    return [
        *pools,
        *(_Pool((worker,), {worker: names}, (), len(names)) for worker, names in sorted(fixed_to.items())),
    ]


def plain_shares(
    nodes: Collection[str],
    resources: Collection[str],
    previous: Mapping[str, Collection[str]],
    pinned: Mapping[str, str] = NO_PINS,
    refused: Mapping[str, frozenset[str]] = NO_REFUSALS,
    unsettled: AbstractSet[str] | None = None,
) -> dict[str, frozenset[str]]:
    """Allocate as ``share_out`` does, and give no node what it refuses.

    Where nodes refuse resources the loads are as even as that and the pins allow, and as few resources move
    as that takes. A resource that is pinned to a node which refuses it, or that all refuse, is on none.

    Args:
        nodes: the ids of the live nodes that may own resources.
        resources: the names of all resources of the group.
        previous: what each node had, as ``balanced`` reads it.
        pinned: the only node that a resource may be on.
        refused: the nodes that a resource may not be on.
        unsettled: the only names that may not be both in ``resources`` and in just one share of ``previous``,
            which has frozensets then; None if it is not known.
    """
    if not refused:
        return share_out(nodes, resources, previous, pinned, unsettled)
    no_tags: frozenset[str] = frozenset()
    live = sorted(set(nodes))
    if unsettled is None:
        resources = frozenset(resources)
    around = _around_refusals(live, resources, previous, pinned, refused, unsettled)
    if around is not None:
        return around
    before = {name: node for node in reversed(live) for name in previous.get(node, ())}
    placed = place(
        dict.fromkeys(live, no_tags),
        dict.fromkeys(resources, no_tags),
        before,
        refused=refused,
        pinned=pinned,
    )
    shares: dict[str, set[str]] = {node: set() for node in live}
    for name, node in placed.holders.items():
        shares[node].add(name)
    return {node: as_before(previous.get(node), share) for node, share in shares.items()}


def _around_refusals(
    live: Sequence[str],
    resources: Collection[str],
    previous: Mapping[str, Collection[str]],
    pinned: Mapping[str, str],
    refused: Mapping[str, frozenset[str]],
    unsettled: AbstractSet[str] | None,
) -> dict[str, frozenset[str]] | None:
    """Allocate as if a resource were refused only while its holder refuses it, or it has none.

    None if some node would get what it refuses. Else no allocation is better: one that keeps to all refusals
    also keeps to these. So the cost follows what has to move, and not what was refused once.
    """
    held, waiting = free_held(live, resources, previous, pinned, unsettled)
    restricted = frozenset(refused)
    forced = waiting & restricted
    for node in live:
        unwanted = {name for name in held[node] & restricted if node in refused[name]}
        if unwanted:
            held[node] -= unwanted
            forced |= unwanted
    together: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in sorted(forced):
        together[tuple(node for node in live if node not in refused[name])].append(name)
    for node, names in fixed(live, resources, pinned).items():
        together[node,] += sorted(name for name in names if node not in refused.get(name, NOBODY))
    pools = [_Pool(able, {}, names, len(names)) for able, names in together.items() if able and names]
    free = sum(map(len, held.values())) + len(waiting - forced)
    if free and live:
        pools.append(_Pool(tuple(live), held, sorted(waiting - forced), free, restricted))
    arriving: dict[str, set[str]] = {node: set() for node in live}
    for block in _blocks(_whole(pools)):
        settled = _settled(block)
        for name, node in settled.arriving:
            if node in refused.get(name, NOBODY):
                return None
            arriving[node].add(name)
        for node, gone in settled.leaving.items():
            held[node] = held[node].difference(gone)
    return {
        node: as_before(previous.get(node), held[node] | arriving[node] if arriving[node] else held[node])
        for node in live
    }


def measured(
    allocation: Mapping[str, Collection[str]],
    resources: Collection[str],
    previous: Mapping[str, Collection[str]],
    pinned: Mapping[str, str] = NO_PINS,
    refused: Mapping[str, frozenset[str]] = NO_REFUSALS,
    unsettled: AbstractSet[str] | None = None,
) -> Effort:
    """The cost of ``allocation``: its moves beside the fewest that one to these nodes takes (RB-10).

    The fewest are counted (``minimum_moves``), or if nodes refuse
    resources, those of ``plain_shares``, for which there is a proof.
    """
    spent = balanced_effort(allocation, resources, previous, pinned, unsettled)
    if not refused:
        return spent
    best = plain_shares(allocation.keys(), resources, previous, pinned, refused, unsettled)
    return replace(spent, least_moves=balanced_effort(best, resources, previous, pinned, unsettled).moves)


class _Demand(NamedTuple):
    """Constraints on the workers of a resource; many resources have the same."""

    tags: frozenset[str]
    refused: frozenset[str]
    pin: str | None

    def answer(self, workers: Mapping[str, frozenset[str]]) -> tuple[str, ...] | str:
        """The workers that it allows, sorted; if there are none, why."""
        candidates = workers if self.pin is None else workers.keys() & {self.pin}
        able = (
            worker for worker in candidates if self.tags <= workers[worker] and worker not in self.refused
        )
        return tuple(sorted(able)) or why_nowhere(workers, self.tags, self.refused, self.pin)


@dataclass(frozen=True)
class _Pool:
    """The resources that may be on the same workers."""

    workers: tuple[str, ...]
    held: Mapping[str, Collection[str]]
    """Those that each of these workers holds."""
    waiting: Sequence[str]
    """Those that none of these workers holds, sorted."""
    size: int
    sedentary: frozenset[str] = NOBODY
    """Those that leave last."""

    def leaving(self, worker: str, kept: int) -> Sequence[str]:
        """Resources that a worker gives up to keep a number of them: the last ones by name."""
        names = self.held[worker]
        if kept == len(names):
            return ()
        return sorted(names, key=lambda name: (name not in self.sedentary, name))[kept:]


class _Settled(NamedTuple):
    """The resources of a block that are placed or leave; the others stay."""

    arriving: Sequence[tuple[str, str]]
    """Those that get another worker, with it."""
    leaving: Mapping[str, Sequence[str]]
    """Those that leave each worker."""


@dataclass(frozen=True)
class _Part:
    """Some workers, and the pools that are to be placed on these and no others."""

    kinds: Mapping[int, tuple[str, ...]]
    """The workers by kind: those of one kind are open to the same pools."""
    pools: Sequence[tuple[_Pool, Sequence[int]]]
    """Each pool with the kinds of this part that are open to it."""

    @property
    def ceiling(self) -> int:
        """The load of the fullest worker if all were as even as numbers allow."""
        workers = sum(map(len, self.kinds.values()))
        return -(-sum(pool.size for pool, _ in self.pools) // workers)

    def swamped(self, capacity: int) -> set[int]:
        """The kinds that are swamped when every worker has this capacity."""
        network = Network()
        source, sink = network.add_node(), network.add_node()
        kinds = {kind: network.add_node() for kind in self.kinds}
        for kind, workers in self.kinds.items():
            network.add_arc(kinds[kind], sink, capacity * len(workers))
        for pool, open_kinds in self.pools:
            node = network.add_node()
            network.add_arc(source, node, pool.size)
            for kind in open_kinds:
                network.add_arc(node, kinds[kind], pool.size)
        reached = network.fill(source, sink)
        return {kind for kind, node in kinds.items() if node in reached}

    def without(self, others: set[int]) -> _Part:
        """The other kinds, and the pools that can be placed on one of them."""
        pools = [(pool, [kind for kind in kinds if kind not in others]) for pool, kinds in self.pools]
        return _Part(
            {kind: workers for kind, workers in self.kinds.items() if kind not in others},
            [(pool, kinds) for pool, kinds in pools if kinds],
        )

    def within(self, kinds: set[int]) -> _Part:
        """These kinds, and the pools that can be placed on no other."""
        return _Part(
            {kind: workers for kind, workers in self.kinds.items() if kind in kinds},
            [(pool, open_kinds) for pool, open_kinds in self.pools if kinds.issuperset(open_kinds)],
        )


def _pool(workers: tuple[str, ...], names: Sequence[str], previous: Mapping[str, str]) -> _Pool:
    held: dict[str, list[str]] = {worker: [] for worker in workers}
    waiting: list[str] = []
    for name in names:
        holder = previous.get(name)
        (waiting if holder is None else held.get(holder, waiting)).append(name)
    return _Pool(workers, {worker: names for worker, names in held.items() if names}, waiting, len(names))


def _whole(pools: Sequence[_Pool]) -> _Part:
    """All pools, and all workers that are open to one at least."""
    open_to: dict[str, list[int]] = defaultdict(list)
    for number, pool in enumerate(pools):
        for worker in pool.workers:
            open_to[worker].append(number)
    alike: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for worker, pools_of_it in open_to.items():
        alike[tuple(pools_of_it)].append(worker)
    kinds_of: dict[int, list[int]] = defaultdict(list)
    for kind, numbers in enumerate(alike):
        for number in numbers:
            kinds_of[number].append(kind)
    return _Part(
        {kind: tuple(workers) for kind, workers in enumerate(alike.values())},
        [(pool, kinds_of[number]) for number, pool in enumerate(pools)],
    )


def _blocks(whole: _Part) -> Iterator[_Part]:
    """Divide the whole into parts all of whose workers have the same level, the ceiling of the part."""
    pending = [whole]
    while pending:
        part = pending.pop()
        if not part.pools:
            continue
        for capacity in (part.ceiling, part.ceiling - 1):
            swamped = part.swamped(capacity)
            if swamped and len(swamped) < len(part.kinds):
                pending += (part.within(swamped), part.without(swamped))
                break
        else:
            yield part


def _settled(block: _Part) -> _Settled:
    """The fewest moves with which the loads of all workers of a block fit the level."""
    network = Network()
    source, sink = network.add_node(), network.add_node()
    level, everything = block.ceiling, sum(pool.size for pool, _ in block.pools)
    kinds = {kind: network.add_node() for kind in block.kinds}
    nodes: dict[str, int] = {}
    arrivals: dict[int, dict[str, int]] = {}
    for kind, workers in block.kinds.items():
        nodes |= {worker: network.add_node() for worker in workers}
        arrivals[kind] = {worker: network.add_arc(kinds[kind], nodes[worker], level) for worker in workers}
    for node in nodes.values():
        network.add_arc(node, sink, level - 1)
        # Dearer than moving everything, so that no worker gets its last one while another lacks more.
        network.add_arc(node, sink, 1, cost=everything + 1)
    ways = [_ways(network, source, kinds, nodes, pool, open_kinds) for pool, open_kinds in block.pools]
    network.fill(source, sink)

    arriving: dict[int, list[str]] = {kind: [] for kind in block.kinds}
    left: dict[str, list[str]] = defaultdict(list)
    for (pool, _), (staying, leaving) in zip(block.pools, ways, strict=True):
        on_their_way = list(pool.waiting)
        for worker in pool.held:
            going = pool.leaving(worker, network.flow(staying[worker]) if worker in staying else 0)
            if going:
                left[worker] += going
                on_their_way += going
        departures = iter(on_their_way)
        for kind, arc in leaving.items():
            arriving[kind] += islice(departures, network.flow(arc))
    placed: list[tuple[str, str]] = []
    for kind, arcs in arrivals.items():
        needs = {worker: network.flow(arc) for worker, arc in arcs.items()}
        placed += zip(sorted(arriving[kind]), vacancies(needs), strict=True)
    return _Settled(placed, left)


def _ways(
    network: Network,
    source: int,
    kinds: Mapping[int, int],
    nodes: Mapping[str, int],
    pool: _Pool,
    open_kinds: Sequence[int],
) -> tuple[dict[str, int], dict[int, int]]:
    """The arcs of a pool to its holders, where staying is free, and to the kinds, where going costs one."""
    node = network.add_node()
    network.add_arc(source, node, pool.size)
    staying = {
        worker: network.add_arc(node, nodes[worker], len(names))
        for worker, names in pool.held.items()
        if worker in nodes
    }
    leaving = {kind: network.add_arc(node, kinds[kind], pool.size, cost=1) for kind in open_kinds}
    return staying, leaving
