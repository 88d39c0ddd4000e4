"""Allocation by weight, capacity, tags and spread; the theory is in ``rebalanser.core.allocation``."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from rebalanser.core.allocation.balanced import NO_PINS, as_before, free_held
from rebalanser.core.allocation.bounds import MAX_WEIGHT, MILLION, Capacities, lower_bound, millionths
from rebalanser.core.allocation.reasons import why_unplaced
from rebalanser.core.group.types import SpreadOver

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from rebalanser.core.group.problem import AllocationProblem

SLACK: Final = 0.01
"""Part by which a load may exceed the mean before anything moves, where weights differ (RB-36)."""
MAX_RELOCATED: Final = 3
"""Maximum resources that leave a node so that a waiting one has room there."""
MAX_TRIED: Final = 16
"""Maximum nodes on which room is made for one resource."""
MAX_FAILURES: Final = 50
"""Maximum resources in a row for which no room is found, before the others are left unplaced."""
MAX_PAIRED: Final = 8
"""Maximum nodes in a row for which pairs of moves are looked for."""
_LOOKED_AT: Final = 8
"""Maximum resources of a node that are looked at for one step, in either direction of the wanted weight."""
_RECEIVERS: Final = 3
"""Maximum nodes that are looked at for a resource with a spread."""
_SKIPPED: Final = 8
"""Maximum nodes that a class lacks without an order of its own: nodes release many resources, each of another
class, and every move is entered in all orders."""

_Key: TypeAlias = tuple[frozenset[str], frozenset[str], str | None]
_Heap: TypeAlias = list[tuple[float, int]]
_Listed: TypeAlias = list[tuple[int, str]]
"""Resources of a node with their weights, sorted."""


@dataclass(eq=False, slots=True)
class _Class:
    """Resources that may be on the same nodes."""

    open_to: Sequence[int]
    members: frozenset[int]
    apart: bool = False
    """True if some of them have a spread."""
    emptiest: dict[int, _Heap] | None = None
    """Nodes by relative load: one heap for each bit length of capacities, as a small node gains more by the
    same resource. Entries with an old load are skipped. A class that lacks few nodes has no heaps of its own:
    it reads those of all nodes."""


def _narrowest(item: tuple[_Class, object]) -> tuple[int, Sequence[int]]:
    """Sort classes by the number of their nodes, the fewest first."""
    return len(item[0].open_to), item[0].open_to


class _Improvement(NamedTuple):
    """Resources that move for a better balance, all at once; the smallest is the best."""

    after: float
    """The greatest relative load of the nodes concerned afterwards."""
    moves: tuple[tuple[str, int, int], ...]


@dataclass(slots=True)
class Solution:
    """Shares, and what a certificate says of them."""

    shares: dict[str, frozenset[str]]
    unplaced: dict[str, str] = field(default_factory=dict)
    forced: frozenset[str] = frozenset()
    """Resources that moved to make room, or that a capacity or a spread forced to leave."""
    improvable: bool = False


def allocate_constrained(problem: AllocationProblem) -> Solution:
    """Place by weight within all constraints, and move for a better balance as far as the policy allows."""
    return _Search(problem).solution()


class _Search:
    """The state of the search: what each node holds, and how much that weighs."""

    def __init__(self, problem: AllocationProblem) -> None:
        self._problem = problem
        self._live = sorted(problem.nodes)
        self._number = {node: i for i, node in enumerate(self._live)}
        self._read_nodes()
        self._read_resources()
        self._classes: dict[_Key, _Class] = {}
        self._common: dict[frozenset[str], _Class] = {}
        """Classes of resources that are neither pinned nor refused, by their needs."""
        self._by_members: dict[frozenset[int], _Class] = {}
        self._in_order: list[_Class] = []
        """Classes that have ``emptiest``."""
        self._orders: list[list[dict[int, _Heap]]] = [[] for _ in self._live]
        """For each node, their heaps that it is in."""
        held, waiting = free_held(self._live, problem.resources, problem.previous, NO_PINS, problem.unsettled)
        self._held = [held[node] for node in self._live]
        self._lost: list[set[str]] = [set() for _ in self._live]
        self._got: list[set[str]] = [set() for _ in self._live]
        self._loads = [sum(map(self._weights.__getitem__, had)) for had in self._held]
        self._total = 0
        self._origin: dict[str, int] = {}
        """The node that held each resource which has left it."""
        self._fresh: set[str] = set(waiting)
        """Resources that no node held, or that had to leave: their moves don't count."""
        self._forced: set[str] = set()
        self._taken: dict[tuple[str, str], str] = {}
        """The resource of each spread on each node or in each zone."""
        self._waiting = set(waiting)
        self._kept: set[str] = set()
        if problem.kept:
            self._kept = {name for name in waiting if problem.pinned.get(name) in problem.kept}
            self._waiting -= self._kept
        self._spent = 0
        self._mean = self._high = self._low = self._aim = 0.0
        self._lists: dict[int, list[tuple[_Class, _Listed]]] = {}
        self._improvable = False

    def _read_nodes(self) -> None:
        members = [self._problem.nodes[node] for node in self._live]
        capacities = Capacities.of(self._problem.nodes)
        self._limits: list[float] = [capacities.limits.get(node, math.inf) for node in self._live]
        self._capacities = [capacities.amounts[node] for node in self._live]
        self._sizes = [capacity.bit_length() for capacity in self._capacities]
        self._tags = [member.tags for member in members]
        self._by_tags: dict[frozenset[str], list[int]] = defaultdict(list)
        """The nodes that have room for anything, by their tags."""
        for i, tags in enumerate(self._tags):
            if self._capacities[i]:
                self._by_tags[tags].append(i)
        by_zone = self._problem.policy.spread_over is SpreadOver.ZONE
        self._by_zone = by_zone
        self._sites = [
            member.zone if by_zone else node for node, member in zip(self._live, members, strict=True)
        ]

    def _read_resources(self) -> None:
        problem = self._problem
        specs = problem.resources
        special = problem.special_resources
        all_special = len(special) == len(specs)
        given = specs.items() if all_special else [(name, specs[name]) for name in special]
        self._weights = {} if all_special else dict.fromkeys(specs, millionths(1.0))
        # As ``millionths`` does, without a call for each of them.
        self._weights |= {name: round(min(spec.weight, MAX_WEIGHT) * MILLION) or 1 for name, spec in given}
        self._needs = {name: spec.needs for name, spec in given if spec.needs}
        self._spreads = {name: spec.spread for name, spec in given if spec.spread is not None}
        self._bound_names = frozenset(problem.pinned) | frozenset(problem.refused)
        """Resources that are pinned or refused."""

    def solution(self) -> Solution:
        """Search, and return the shares."""
        for needs in {*self._needs.values(), frozenset[str]()}:
            self._class((needs, frozenset(), None))
        for name in self._bound_names & self._weights.keys():
            self._class_of(name)
        for name in self._spreads:
            self._class_of(name).apart = True
        self._give_up()
        self._take_kept_sites()
        self._total = sum(self._loads)
        changed = True
        while changed:
            changed = self._place_waiting()
            changed = self._improve() and bool(self._waiting)
        shares: dict[str, frozenset[str]] = {}
        for i, node in enumerate(self._live):
            share = self._held[i]
            if self._lost[i]:
                share = share.difference(self._lost[i])
            if self._got[i]:
                share = share.union(self._got[i])
            shares[node] = as_before(self._problem.previous.get(node), share)
        return Solution(
            shares,
            why_unplaced(self._problem, sorted(self._waiting | self._kept), self._taken),
            frozenset(self._forced),
            self._improvable,
        )

    # Classes

    def _class_of(self, name: str) -> _Class:
        needs = self._needs.get(name, frozenset())
        if name not in self._bound_names:
            found = self._common.get(needs)
            if found is None:
                found = self._common[needs] = self._class((needs, frozenset(), None))
            return found
        problem = self._problem
        refused = problem.refused.get(name, frozenset()).intersection(self._number)
        return self._class((needs, refused, problem.pinned.get(name)))

    def _class(self, key: _Key) -> _Class:
        found = self._classes.get(key)
        if found is None:
            needs, refused, pin = key
            open_to = sorted(
                chain.from_iterable(nodes for tags, nodes in self._by_tags.items() if needs <= tags)
            )
            if refused or pin is not None:
                live = self._live
                open_to = [i for i in open_to if live[i] not in refused and pin in {None, live[i]}]
            members = frozenset(open_to)
            found = self._classes[key] = self._by_members.setdefault(members, _Class(open_to, members))
        return found

    # Changes of the state

    def _names(self, i: int) -> Iterator[str]:
        lost = self._lost[i]
        yield from (name for name in self._held[i] if name not in lost) if lost else self._held[i]
        yield from self._got[i]

    def _take(self, name: str, i: int) -> None:
        """Take a resource off a node."""
        if name in self._got[i]:
            self._got[i].remove(name)
        else:
            self._lost[i].add(name)
            self._origin[name] = i
        self._loads[i] -= self._weights[name]
        self._changed(name, i, None)

    def _put(self, name: str, i: int) -> None:
        if self._origin.get(name) == i:
            self._lost[i].remove(name)
            del self._origin[name]
        else:
            self._got[i].add(name)
        self._loads[i] += self._weights[name]
        self._changed(name, i, name)

    def _changed(self, name: str, i: int, holder: str | None) -> None:
        if i in self._lists:
            self._relist(name, i, holder is not None)
        spread = self._spreads.get(name)
        if spread is not None:
            if holder is None:
                self._taken.pop((spread, self._sites[i]), None)
            else:
                self._taken[spread, self._sites[i]] = holder
        relative = self._relative(i)
        for heaps in self._orders[i]:
            heappush(heaps[self._sizes[i]], (relative, i))

    def _relative(self, i: int) -> float:
        """The load of a node per capacity: a quotient of integers, rounded alike on every machine."""
        capacity = self._capacities[i]
        return self._loads[i] / capacity if capacity else 0.0

    def _is_free(self, name: str, i: int, but: Container[str] = ()) -> bool:
        """True if no other resource of the spread is on the node or in its zone."""
        spread = self._spreads.get(name)
        if spread is None:
            return True
        there = self._taken.get((spread, self._sites[i]))
        return there is None or there == name or there in but

    def _has_room(self, name: str, i: int) -> bool:
        return self._loads[i] + self._weights[name] <= self._limits[i]

    # What has to leave

    def _give_up(self) -> None:
        """Evict what may not stay: for tags, releases and pins, then spreads, then capacities."""
        for i, had in enumerate(self._held):
            for name in sorted(self._unwelcome(i, had)):
                self._evict(name, i)
        self._give_up_siblings()
        for i, limit in enumerate(self._limits):
            if self._loads[i] > limit:
                for name in self._excess(i):
                    self._evict(name, i)
                    self._forced.add(name)

    def _give_up_siblings(self) -> None:
        holders: dict[str, int] = {}
        if self._spreads:
            spread_names = frozenset(self._spreads)
            for i, had in enumerate(self._held):
                holders.update(dict.fromkeys(had & spread_names, i))
        for name, i in sorted(holders.items()):
            if name in self._origin:
                continue
            if self._is_free(name, i):
                self._taken[self._spreads[name], self._sites[i]] = name
            else:
                there = self._taken[self._spreads[name], self._sites[i]]
                self._evict(name, i)
                self._taken[self._spreads[name], self._sites[i]] = there
                self._forced.add(name)

    def _take_kept_sites(self) -> None:
        """Keep the zones of kept resources free of others of their spread, for the return of their nodes."""
        problem = self._problem
        for name in sorted(self._kept & self._spreads.keys()) if self._by_zone else ():
            zone = problem.kept[problem.pinned[name]].zone
            self._taken.setdefault((self._spreads[name], zone), name)

    def _unwelcome(self, i: int, had: frozenset[str]) -> Iterable[str]:
        closed: set[str] = set()
        if not self._capacities[i]:
            return closed  # all leave for want of room
        if self._bound_names:
            closed.update(name for name in had & self._bound_names if i not in self._class_of(name).members)
        if self._needs and had:
            tags, needs_of = self._tags[i], self._needs.get
            missing = {needs for needs in set(map(needs_of, had)) if needs and not needs <= tags}
            if missing:
                closed.update(name for name in had if needs_of(name) in missing)
        return closed

    def _excess(self, i: int) -> list[str]:
        """Return what leaves a node over its capacity: the lightest that is enough, or the heaviest ones."""
        over = self._loads[i] - self._limits[i]
        pinned, weights = self._problem.pinned, self._weights
        names = sorted(self._names(i), key=lambda name: (name in pinned, -weights[name], name))
        excess: list[str] = []
        for number, name in enumerate(names):
            if weights[name] >= over:
                alike = (each for each in names[number:] if (each in pinned) == (name in pinned))
                lightest = min((weights[each], each) for each in alike if weights[each] >= over)
                return [*excess, lightest[1]]
            excess.append(name)
            over -= weights[name]
        return excess

    def _evict(self, name: str, i: int) -> None:
        self._take(name, i)
        self._fresh.add(name)
        self._waiting.add(name)

    # Placing

    def _place_waiting(self) -> bool:
        """Place what waits, and make room for the rest; True if anything was placed."""
        before = len(self._waiting)
        self._fill_all()
        while self._waiting and self._make_rooms():
            self._fill_all()
        self._total = sum(self._loads)
        return len(self._waiting) < before

    def _fill_all(self) -> None:
        together: dict[_Class, list[str]] = defaultdict(list)
        for name in sorted(self._waiting):
            together[self._class_of(name)].append(name)
        weights = self._weights
        for each, names in sorted(together.items(), key=_narrowest):
            if not each.open_to:
                continue
            names.sort(key=weights.__getitem__, reverse=True)
            if self._spreads:
                self._fill_apart([name for name in names if name in self._spreads], each)
            self._fill([name for name in names if name not in self._spreads], each)
        self._lists.clear()
        for each in self._in_order:
            each.emptiest = None
            for i in each.open_to:
                self._orders[i].clear()
        self._in_order.clear()

    def _fill(self, names: Sequence[str], where: _Class) -> None:
        """Place resources, the heaviest first, each where it leaves the smallest relative load.

        The order of nodes is computed for one weight, and used for others down to half of it.
        """
        weights, loads, capacities, limits = self._weights, self._loads, self._capacities, self._limits
        got, lost, origin = self._got, self._lost, self._origin
        waiting = self._waiting
        heap: _Heap = []
        full: list[tuple[float, int]] = []
        reference = 0
        for name in names:
            weight = weights[name]
            if 2 * weight <= reference or not reference:
                reference = weight
                heap = [((loads[i] + weight) / capacities[i], i) for i in where.open_to]
                heapify(heap)
                full = []
            while full and -full[0][0] >= weight:
                i = heappop(full)[1]
                heappush(heap, ((loads[i] + reference) / capacities[i], i))
            while heap:
                i = heap[0][1]
                load = loads[i] + weight
                if load > limits[i]:
                    heappop(heap)
                    heappush(full, (loads[i] - limits[i], i))
                    continue
                loads[i] = load
                heapreplace(heap, ((load + reference) / capacities[i], i))
                if name in origin and origin[name] == i:
                    lost[i].remove(name)
                    del origin[name]
                else:
                    got[i].add(name)
                waiting.remove(name)
                break

    def _fill_apart(self, names: Sequence[str], where: _Class) -> None:
        """As ``_fill``, for resources with a spread: the nodes of each zone have an order of their own."""
        heaps: dict[object, _Heap] = {}
        taken_everywhere: set[str] = set()
        reference = 0
        for name in names:
            if self._spreads[name] in taken_everywhere:
                continue
            weight = self._weights[name]
            if 2 * weight <= reference or not reference:
                reference = weight
                heaps = defaultdict(list)
                for i in where.open_to:
                    heaps[self._sites[i] if self._by_zone else None].append((self._with(i, weight), i))
                for heap in heaps.values():
                    heapify(heap)
            found = self._first_free(name, heaps.values(), reference)
            if found is not None:
                self._waiting.remove(name)
                self._put(name, found)
                zone = self._sites[found] if self._by_zone else None
                heappush(heaps[zone], (self._with(found, reference), found))
            elif not any(self._is_free(name, i) for i in where.open_to):
                taken_everywhere.add(self._spreads[name])

    def _with(self, i: int, weight: int) -> float:
        """The relative load of a node with this weight added."""
        return (self._loads[i] + weight) / self._capacities[i]

    def _first_free(self, name: str, heaps: Iterable[_Heap], reference: int) -> int | None:
        """The least full node that has room for a resource and none of its siblings."""
        best: tuple[float, int] | None = None
        for heap in heaps:
            passed: _Heap = []
            while heap and (best is None or heap[0] < best):
                key, i = heap[0]
                if key != self._with(i, reference) or 2 * (self._limits[i] - self._loads[i]) < reference:
                    heappop(heap)  # its load has changed, or it has no room for any of these weights
                elif self._has_room(name, i) and self._is_free(name, i):
                    best = heap[0]
                elif self._by_zone and not self._is_free(name, i):
                    break
                else:
                    passed.append(heappop(heap))
            for entry in passed:
                heappush(heap, entry)
        return None if best is None else best[1]

    # Making room

    def _make_rooms(self) -> bool:
        """Move others away for what waits, the heaviest first; True if anything was placed."""
        made, failures = False, 0
        failed: set[tuple[_Class, int]] = set()
        for name in sorted(self._waiting, key=lambda name: (-self._weights[name], name)):
            where = self._class_of(name)
            sort = where, self._weights[name]
            if (sort in failed and name not in self._spreads) or failures >= MAX_FAILURES:
                continue
            if self._make_room(name, where):
                made, failures = True, 0
                failed.clear()
            else:
                failed.add(sort)
                failures += 1
        return made

    def _make_room(self, name: str, where: _Class) -> bool:
        loads, limits = self._loads, self._limits
        for i in sorted(where.open_to, key=lambda i: (loads[i] - limits[i], i))[:MAX_TRIED]:
            done: list[tuple[str, int, int]] = []
            if self._weights[name] <= limits[i] and self._relocate(name, i, done):
                self._waiting.remove(name)
                self._put(name, i)
                self._forced.update(each for each, _, _ in done)
                return True
            for each, source, target in reversed(done):
                self._take(each, target)
                self._put(each, source)
        return False

    def _relocate(self, name: str, i: int, done: list[tuple[str, int, int]]) -> bool:
        """Move up to ``MAX_RELOCATED`` resources off a node, or a sibling out of its zone."""
        while not (self._is_free(name, i) and self._has_room(name, i)):
            step = self._relocation(name, i) if len(done) < MAX_RELOCATED else None
            if step is None:
                return False
            each, source, target = step
            self._take(each, source)
            self._put(each, target)
            done.append(step)
        return True

    def _relocation(self, name: str, i: int) -> tuple[str, int, int] | None:
        """The next resource that leaves: a sibling, the lightest that is enough, or the heaviest."""
        if not self._is_free(name, i):
            sibling = self._taken[self._spreads[name], self._sites[i]]
            if sibling in self._kept:
                return None
            source = i if self._holds(i, sibling) else self._holder(sibling)
            target = self._destination(sibling, i)
            return None if target is None else (sibling, source, target)
        over = self._loads[i] + self._weights[name] - self._limits[i]
        room = max((limit - self._loads[j] for j, limit in enumerate(self._limits) if j != i), default=0)
        listed = sorted((self._weights[each], each) for each in self._names(i))
        fitting = [each for each in listed if each[0] <= room]
        enough = [each for each in fitting if each[0] >= over][:_LOOKED_AT]
        for _, each in enough or fitting[: -_LOOKED_AT - 1 : -1]:
            target = self._destination(each, i)
            if target is not None:
                return each, i, target
        return None

    def _holds(self, i: int, name: str) -> bool:
        return name in self._got[i] or (name in self._held[i] and name not in self._lost[i])

    def _holder(self, name: str) -> int:
        return next(i for i in range(len(self._live)) if self._holds(i, name))

    def _destination(self, name: str, but: int) -> int | None:
        """The least full node that may take a resource, other than one; in no zone that holds a sibling."""
        away = self._sites[but]
        able = (
            (self._with(j, self._weights[name]), j)
            for j in self._class_of(name).open_to
            if j != but
            and self._has_room(name, j)
            and (name not in self._spreads or (self._sites[j] != away and self._is_free(name, j)))
        )
        return min(able, default=(0.0, None))[1]

    # Improving

    def _improve(self) -> bool:
        """Move resources off the fullest nodes until no step helps; True if any moved (RB-36, RB-38)."""
        self._improvable = False
        if not self._is_uneven():
            return False
        moved, again = False, True
        while again:
            again = False
            donors = self._donors()
            heapify(donors)
            pairs = MAX_PAIRED
            while donors:
                i = donors[0][1]
                if -donors[0][0] != self._relative(i):
                    heapreplace(donors, (-self._relative(i), i))
                    continue
                step = self._step(i)
                if step is None and pairs and self._relative(i) > self._high:
                    pairs -= 1
                    step = self._pair(i)
                if step is None:
                    heappop(donors)
                    continue
                self._carry_out(step)
                again = moved = True
        self._improvable = self._is_limited and self._could_improve()
        return moved

    def _could_improve(self) -> bool:
        """True if a step is left that only the limits of the policy forbid."""
        pairs = MAX_PAIRED
        for full, i in sorted(self._donors()):
            if self._step(i, limited=False) is not None:
                return True
            if pairs and -full > self._high:
                pairs -= 1
                if self._pair(i, limited=False) is not None:
                    return True
        return False

    def _donors(self) -> list[tuple[float, int]]:
        """The nodes that may give something up, with their relative loads negated."""
        relative = [(self._relative(i), i) for i in range(len(self._live)) if self._capacities[i]]
        least = min(relative)[0]
        enough = self._low if least < self._low else self._high
        return [(-full, i) for full, i in relative if full > enough]

    @property
    def _is_limited(self) -> bool:
        return self._problem.max_moves is not None or bool(self._problem.resting)

    def _is_uneven(self) -> bool:
        """Set the loads to aim at; return False if nothing is to move."""
        capacity = sum(self._capacities)
        if not capacity:
            return False
        self._mean = self._aim = self._high = self._low = self._level()
        band = self._problem.policy.imbalance_band
        if not band:
            weights = iter(self._weights.values())
            first = next(weights, 0)
            slack = SLACK if any(weight != first for weight in weights) else 0.0
            self._high, self._low = self._mean * (1 + slack), self._mean * (1 - slack)
            return True
        bound = lower_bound(self._problem, self._waiting)
        # Loads that have left the band return to the middle of it, so that noise does not move them again.
        self._aim = self._high = bound * (1 + band / 2)
        self._low = 0.0
        return max(map(self._relative, range(len(self._live)))) > bound * (1 + band)

    def _level(self) -> float:
        """The relative load of all nodes but those that have a resource which is heavier than that.

        The heaviest are taken to be on the largest nodes.
        """
        total, capacity = self._total, sum(self._capacities)
        # Nodes that can own nothing count for nothing.
        largest = sorted(filter(None, self._capacities), reverse=True)
        waiting = self._waiting
        heavy: list[int] = []
        while True:
            level, count = total / capacity, len(heavy)
            least = level * largest[-1]
            if not heavy and max(self._weights.values(), default=0) <= least:
                return level
            heavy = sorted(
                (weight for name, weight in self._weights.items() if weight > least and name not in waiting),
                reverse=True,
            )[: len(largest) - 1]
            fitting = (weight <= level * size for weight, size in zip(heavy, largest, strict=False))
            heavy = heavy[: next((i for i, fits in enumerate(fitting) if fits), len(heavy))]
            if len(heavy) <= count:
                return level
            total = self._total - sum(heavy)
            capacity = sum(largest[len(heavy) :])

    @property
    def _is_used_up(self) -> bool:
        limit = self._problem.max_moves
        return limit is not None and self._spent >= limit

    def _carry_out(self, step: _Improvement) -> None:
        was_used_up = self._is_used_up
        for name, source, target in step.moves:
            costs = name not in self._fresh and name not in self._forced
            before = name in self._origin
            self._take(name, source)
            self._put(name, target)
            if costs:
                self._spent += (name in self._origin) - before
        if self._is_used_up != was_used_up:
            self._lists.clear()

    def _listed(self, i: int, limited: bool = True) -> list[tuple[_Class, _Listed]]:
        """The resources of a node that may move, by class and weight."""
        if limited and i in self._lists:
            return self._lists[i]
        weights = self._weights
        names: Iterable[str] = self._names(i)
        if limited and (self._is_used_up or self._problem.resting):
            names = filter(self._may_move, names)
        if self._bound_names:
            names = [name for name in names if name not in self._problem.pinned]
        if not self._needs and not self._bound_names:
            listed = sorted([(weights[name], name) for name in names])
            found = [(self._class_of(listed[0][1]), listed)] if listed else []
        else:
            by_class: dict[_Class, _Listed] = defaultdict(list)
            for name in names:
                by_class[self._class_of(name)].append((weights[name], name))
            found = sorted(by_class.items(), key=_narrowest)
            for _, listed in found:
                listed.sort()
        if limited:
            self._lists[i] = found
        return found

    def _may_move(self, name: str) -> bool:
        """False if the limits of the policy do not let a resource move, or move any further."""
        if name in self._fresh or name in self._origin:
            return True
        return not self._is_used_up and name not in self._problem.resting

    def _relist(self, name: str, i: int, came: bool) -> None:
        """Add a resource to the sorted ones of a node, or remove it: sorting them again takes long."""
        where, entry = self._class_of(name), (self._weights[name], name)
        listed = next((listed for each, listed in self._lists[i] if each is where), None)
        if listed is None:
            if came:
                del self._lists[i]
        elif not came:
            at = bisect_left(listed, entry)
            if listed[at : at + 1] == [entry]:
                del listed[at]
        elif name not in self._problem.pinned and self._may_move(name):
            insort(listed, entry)

    def _receivers(self, where: _Class, but: int, count: int) -> Iterator[int]:
        """The least full nodes that are open to a class, of each size."""
        anywhere = self._class((frozenset(), frozenset(), None))
        order = anywhere if len(anywhere.open_to) - len(where.open_to) <= _SKIPPED else where
        heaps = order.emptiest
        if heaps is None:
            heaps = order.emptiest = defaultdict(list)
            self._in_order.append(order)
            for i in order.open_to:
                self._orders[i].append(heaps)
                heaps[self._sizes[i]].append((self._relative(i), i))
            for heap in heaps.values():
                heapify(heap)
        for heap in heaps.values():
            found: list[tuple[float, int]] = []
            closed: list[tuple[float, int]] = []
            while heap and len(found) < count + 1:
                entry = heappop(heap)
                if entry[0] == self._relative(entry[1]) and entry not in found and entry not in closed:
                    (found if entry[1] in where.members else closed).append(entry)
            for entry in chain(found, closed):
                heappush(heap, entry)
            yield from [i for _, i in found if i != but][:count]

    def _step(self, i: int, *, limited: bool = True) -> _Improvement | None:
        """The move off a node that lowers the fuller one of both nodes most."""
        best: _Improvement | None = None
        if not self._may_help(i):
            return None
        for where, listed in self._listed(i, limited):
            for j in self._receivers(where, i, _RECEIVERS if where.apart else 1):
                for weight, name in self._candidates(i, j, listed):
                    after = max((self._loads[i] - weight) / self._capacities[i], self._with(j, weight))
                    step = _Improvement(after, ((name, i, j),))
                    if best is None or step < best:
                        best = step
        return best

    def _pair(self, i: int, *, limited: bool = True) -> _Improvement | None:
        """A resource that goes to another node, and one of that node that goes on or comes back instead."""
        limit = self._problem.max_moves
        if limited and limit is not None and self._spent + 2 > limit:
            return None
        best: _Improvement | None = None
        enough = self._relative(i) - (self._high - self._mean)
        for where, listed in self._listed(i, limited):
            for j in self._receivers(where, i, _RECEIVERS):
                for first in listed[-_LOOKED_AT:]:
                    if not self._is_free_to_go(first[1], i, j):
                        continue
                    for step in self._onward(i, j, first, limited):
                        if step.after < enough and (best is None or step < best):
                            best = step
        return best

    def _onward(self, i: int, j: int, first: tuple[int, str], limited: bool) -> Iterator[_Improvement]:
        """The pairs of moves of which the first is given."""
        loads, limits, capacities = self._loads, self._limits, self._capacities
        weight, name = first
        wanted = loads[j] + weight - self._mean * capacities[j]
        for where, listed in self._listed(j, limited):
            at = bisect_right(listed, wanted, key=itemgetter(0))
            others = {*self._receivers(where, j, 1), *({i} & where.members)}
            for back, other in listed[max(0, at - _LOOKED_AT // 2) : at + _LOOKED_AT // 2]:
                for k in sorted(others):
                    after = {i: loads[i] - weight, j: loads[j] + weight - back}
                    after[k] = after.get(k, loads[k]) + back
                    if self._is_free_to_go(other, j, k) and all(after[n] <= limits[n] for n in after):
                        full = max(load / capacities[n] for n, load in after.items())
                        yield _Improvement(full, ((name, i, j), (other, j, k)))

    def _may_help(self, i: int) -> bool:
        """False if no node is so much less full that it could get anything of this one."""
        full = self._relative(i)
        anywhere = self._class((frozenset(), frozenset(), None))
        least = (self._relative(j) for j in self._receivers(anywhere, i, 1))
        return any(other < full and (full > self._high or other < self._low) for other in least)

    def _candidates(self, i: int, j: int, listed: _Listed) -> Iterator[tuple[int, str]]:
        """Yield resources near the wanted weight whose move leaves the other node less full than this one."""
        full, other = self._relative(i), self._relative(j)
        if full <= self._high and other >= self._low:
            return
        aim = self._low if other < self._low else self._aim
        excess = self._loads[i] - aim * self._capacities[i]
        lacking = self._mean * self._capacities[j] - self._loads[j]
        at = bisect_right(listed, min(excess, max(lacking, 0.0)), key=itemgetter(0))
        for numbers in (range(at - 1, -1, -1), range(at, len(listed))):
            for number in numbers[:_LOOKED_AT]:
                weight, name = listed[number]
                if self._with(j, weight) >= full:
                    if numbers.step > 0:
                        break
                    continue
                if self._has_room(name, j) and self._is_free_to_go(name, i, j):
                    yield weight, name
                    break

    def _is_free_to_go(self, name: str, i: int, j: int) -> bool:
        if name not in self._spreads or self._sites[i] == self._sites[j]:
            return True
        return self._is_free(name, j)
