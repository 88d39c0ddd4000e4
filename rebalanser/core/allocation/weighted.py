"""Placement by weight within capacities; the theory is in ``rebalanser.core.allocation``."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, fields
from heapq import heapify, heappop, heapreplace, nsmallest
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from rebalanser.core.allocation.balanced import vacancies
from rebalanser.core.allocation.reasons import why_full, why_not_separate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

MAX_AMOUNT: Final = 1_000_000_000
MAX_RELOCATED: Final = 3
"""Maximum resources that leave a worker so that a waiting one has room there."""
EVEN: Final = 0.8
"""Load of another worker, as a part of this one's, from which both count as even: nothing moves."""

Amounts: TypeAlias = tuple[int, int]
"""Thousandths of a processor, and megabytes of memory."""
Limits: TypeAlias = tuple[float, float]
"""Amounts of a worker in all, infinite where it has no limit."""
_Loads: TypeAlias = tuple[float, float]
"""Relative loads of two workers, the greater one first."""


@dataclass(frozen=True, slots=True, order=True)
class Requests:
    """Amounts that a resource reserves of its worker; they do not limit what it really uses.

    Raises:
        ValueError: an amount is out of range.
    """

    cpu_milli: int = 0
    """Thousandths of a processor."""
    memory_mb: int = 0
    """Megabytes of memory."""

    def __post_init__(self) -> None:
        """Refuse amounts that no worker can have."""
        _check_amounts(self)

    def __bool__(self) -> bool:
        """True if it requests anything."""
        return self.cpu_milli > 0 or self.memory_mb > 0

    @property
    def amounts(self) -> Amounts:
        """Both amounts."""
        return self.cpu_milli, self.memory_mb


@dataclass(frozen=True, slots=True)
class Capacity:
    """Amounts that the resources of a worker may take together; None for no limit.

    Raises:
        ValueError: an amount is out of range.
    """

    cpu_milli: int | None = None
    memory_mb: int | None = None

    def __post_init__(self) -> None:
        """Refuse amounts that no worker can have."""
        _check_amounts(self)

    @property
    def limits(self) -> Limits:
        """Both amounts, infinite where there is no limit."""
        return (
            math.inf if self.cpu_milli is None else self.cpu_milli,
            math.inf if self.memory_mb is None else self.memory_mb,
        )


def thousandths(cpu: float) -> int:
    """Return a number of processors in thousandths.

    Raises:
        ValueError: it has more than three decimal places.
    """
    cpu_milli = round(cpu * 1000)
    if cpu_milli / 1000 != cpu:
        raise ValueError(f"cpu {cpu!r} has more than three decimal places")
    return cpu_milli


def _check_amounts(given: Requests | Capacity) -> None:
    for field in fields(given):
        amount = getattr(given, field.name)
        if amount is not None and not 0 <= amount <= MAX_AMOUNT:
            raise ValueError(f"{field.name} is {amount}, and must be from 0 to {MAX_AMOUNT:,}")


UNLIMITED: Final = Capacity()
NOTHING: Final[Amounts] = (0, 0)


def has_room(limits: Limits, load: Amounts, needs: Amounts) -> bool:
    """True if a worker with a load has what is requested; an amount that is not requested does not count.

    So a resource that requests memory only has room where processors are short (SH-27).
    """
    return (not needs[0] or load[0] + needs[0] <= limits[0]) and (
        not needs[1] or load[1] + needs[1] <= limits[1]
    )


def place_by_weight(
    workers: Iterable[str],
    open_to: Mapping[str, tuple[str, ...]],
    requests: Mapping[str, Requests],
    capacities: Mapping[str, Capacity],
    previous: Mapping[str, str],
    groups: Mapping[str, str],
) -> tuple[dict[str, str], dict[str, str], frozenset[str]]:
    """Place resources that request something; return the holders, and why the others have none (SH-27).

    The last value has those of the others that some worker may take once it has room.

    Args:
        workers: all live workers.
        open_to: the workers that each resource may be on, sorted.
        requests: the requests of each of these resources.
        capacities: the capacities of workers; one that is missing has no limit.
        previous: the worker that holds a resource.
        groups: the group of a resource that needs another worker than all others of its group (SH-28).
    """
    together: dict[_Kind, list[str]] = defaultdict(list)
    for name in sorted(open_to, key=lambda name: (len(name), name) if name in groups else (0, name)):
        together[_Kind(requests[name], open_to[name], groups.get(name, ""))].append(name)
    limits = {worker: capacities.get(worker, UNLIMITED) for worker in workers}
    scale = _full_amounts(limits.values(), [requests[name] for name in open_to])
    kinds = sorted(together, key=lambda kind: (-_relative_load(kind.requests.amounts, scale), *kind))
    taken: set[tuple[str, str]] = set()
    held = [_held(kind, together[kind], previous, taken) for kind in kinds]
    packing = _Packing(kinds, held, [len(together[kind]) for kind in kinds], limits, scale)
    packing.search()

    holders: dict[str, str] = {}
    left: dict[str, str] = {}
    full: set[str] = set()
    for number, kind in enumerate(kinds):
        needs, going, waiting = {}, [], []
        kept: set[str] = set()
        for worker in kind.open_to:
            names, count = held[number].get(worker, []), packing.counts[worker][number]
            holders.update(dict.fromkeys(names[:count], worker))
            kept.update(names)
            going += names[count:]
            needs[worker] = count - len(names)
        waiting = [name for name in together[kind] if name not in kept]
        homeless = iter([*sorted(going), *waiting])
        holders.update((next(homeless), worker) for worker in vacancies(needs))
        for name in homeless:
            left[name] = packing.why_full(number)
            if packing.has_place(number):
                full.add(name)
    return holders, left, frozenset(full)


class RememberedSearch:
    """Returns what ``place_by_weight`` returns, and searches only if an argument of the search has changed.

    The search is deterministic and idempotent, so the last outcome still holds if the arguments are those of
    the last search, or those with its outcome as ``previous``. It takes longest when nothing more has room,
    and without this class each change of anything else would repeat it.
    """

    def __init__(self) -> None:
        self._asked: tuple[object, ...] | None = None
        self._previous: tuple[Mapping[str, str | None], ...] = ()
        self._outcome: tuple[dict[str, str], dict[str, str], frozenset[str]] = {}, {}, frozenset()

    def __call__(
        self,
        workers: Iterable[str],
        open_to: Mapping[str, tuple[str, ...]],
        requests: Mapping[str, Requests],
        capacities: Mapping[str, Capacity],
        previous: Mapping[str, str],
        groups: Mapping[str, str],
    ) -> tuple[dict[str, str], dict[str, str], frozenset[str]]:
        """Return the outcome of ``place_by_weight`` for these arguments."""
        limits = {worker: capacities.get(worker, UNLIMITED) for worker in workers}
        grouped = {name: groups[name] for name in open_to if name in groups}
        asked = (limits, dict(open_to), {name: requests[name] for name in open_to}, grouped)
        held = {name: previous.get(name) for name in open_to}
        if asked != self._asked or held not in self._previous:
            self._outcome = place_by_weight(limits, open_to, requests, limits, previous, grouped)
            holders, *_ = self._outcome
            self._asked, self._previous = asked, (held, {name: holders.get(name) for name in open_to})
        return self._outcome


class _Kind(NamedTuple):
    """Resources that request the same amounts and may be on the same workers."""

    requests: Requests
    open_to: tuple[str, ...]
    group: str = ""
    """Group of which no two are on one worker (SH-28); empty for none."""


def _full_amounts(capacities: Iterable[Capacity], requests: Iterable[Requests]) -> Amounts:
    """The amounts that count as a full worker where it has no limit: the largest limit, or all requests."""
    known = list(capacities)
    wanted = list(requests)
    cpu_milli = max((c.cpu_milli for c in known if c.cpu_milli is not None), default=0)
    memory_mb = max((c.memory_mb for c in known if c.memory_mb is not None), default=0)
    return (
        cpu_milli or sum(each.cpu_milli for each in wanted) or 1,
        memory_mb or sum(each.memory_mb for each in wanted) or 1,
    )


def _relative_load(amounts: Amounts, scale: Amounts) -> float:
    """The larger part of a worker with the amounts ``scale`` that these amounts are."""
    # Division of integers rounds correctly: equal parts are equal, and order is never reversed.
    return max(amounts[0] / scale[0], amounts[1] / scale[1])


def _held(
    kind: _Kind, names: Sequence[str], previous: Mapping[str, str], taken: set[tuple[str, str]]
) -> dict[str, list[str]]:
    """Return what each worker holds of a kind; ``taken`` has the groups and workers that have one already."""
    held: dict[str, list[str]] = defaultdict(list)
    able = frozenset(kind.open_to)
    for name in names:
        holder = previous.get(name)
        if holder not in able or (kind.group, holder) in taken:
            continue
        held[holder].append(name)
        if kind.group:
            taken.add((kind.group, holder))
    return held


class _Packing:
    """Number of resources of each kind on each worker, and the relative loads that follow."""

    def __init__(
        self,
        kinds: Sequence[_Kind],
        held: Sequence[Mapping[str, Sequence[str]]],
        sizes: Sequence[int],
        capacities: Mapping[str, Capacity],
        scale: Amounts,
    ) -> None:
        self._kinds = kinds
        self._needs = [kind.requests.amounts for kind in kinds]
        self._sizes = [_relative_load(needs, scale) for needs in self._needs]
        self._able = [frozenset(kind.open_to) for kind in kinds]
        self._groups = [kind.group for kind in kinds]
        self._grouped: Counter[tuple[str, str]] = Counter()
        """Number of resources of each group on each worker."""
        self._held = held
        self._waiting = list(sizes)
        self._limits = {worker: capacity.limits for worker, capacity in capacities.items()}
        self._scales = {
            worker: (capacity.cpu_milli or scale[0], capacity.memory_mb or scale[1])
            for worker, capacity in capacities.items()
        }
        self.counts: dict[str, Counter[int]] = {worker: Counter() for worker in sorted(capacities)}
        self._loads: dict[str, Amounts] = dict.fromkeys(self.counts, (0, 0))
        self._relative_loads = dict.fromkeys(self.counts, 0.0)
        self._emptiest_two: dict[int, list[str]] = {}
        """Results of ``_emptiest`` since the last change of a load."""

    def search(self) -> None:
        """Keep what fits, place the rest, and improve until no step does.

        Each turn places more, or makes the loads more even, or moves fewer: so it ends.
        """
        for number, held in enumerate(self._held):
            for worker, names in held.items():
                self._put(number, worker, len(names))
        for worker in self.counts:
            self._evict(worker)
        again = True
        while again:
            placed = self._place_waiting()
            again = self._even_out() or placed
            again = self._undo_moves() or again

    def has_place(self, number: int) -> bool:
        """True if one more of a kind may be on some worker, as far as its group is concerned."""
        return any(self._has_no_sibling(number, worker) for worker in self._kinds[number].open_to)

    def why_full(self, number: int) -> str:
        """Return the reason for which no worker has room for one more of a kind."""
        if not self.has_place(number):
            group = self._groups[number]
            alike = [each for each, known in enumerate(self._groups) if known == group]
            size = sum(self._waiting[each] for each in alike)
            size += sum(counts[each] for counts in self.counts.values() for each in alike)
            return why_not_separate(size, len({w for each in alike for w in self._kinds[each].open_to}))
        free = {
            worker: tuple(
                limit - load for limit, load in zip(self._limits[worker], self._loads[worker], strict=True)
            )
            for worker in self._kinds[number].open_to
            if self._has_no_sibling(number, worker)
        }
        everywhere = len(free) == len(self.counts)
        return why_full(self._needs[number], free, self._limits, everywhere=everywhere)

    def _put(self, number: int, worker: str, count: int = 1) -> None:
        needs, load = self._needs[number], self._loads[worker]
        self._loads[worker] = load = (load[0] + count * needs[0], load[1] + count * needs[1])
        self._relative_loads[worker] = _relative_load(load, self._scales[worker])
        self._waiting[number] -= count
        counts = self.counts[worker]
        counts[number] += count
        if not counts[number]:
            del counts[number]
        if self._groups[number]:
            self._grouped[self._groups[number], worker] += count
        self._emptiest_two = {}

    def _move(self, number: int, worker: str, other: str) -> None:
        self._put(number, worker, -1)
        self._put(number, other)

    def _has_no_sibling(self, number: int, worker: str) -> bool:
        """True if a worker has no resource of the group of a kind (SH-28)."""
        return not self._groups[number] or not self._grouped[self._groups[number], worker]

    def _fits(self, number: int, worker: str) -> bool:
        return has_room(self._limits[worker], self._loads[worker], self._needs[number])

    def _load_with(self, worker: str, number: int, count: int = 1) -> Amounts:
        load, needs = self._loads[worker], self._needs[number]
        return load[0] + count * needs[0], load[1] + count * needs[1]

    def _evict(self, worker: str) -> None:
        """Evict resources until the rest fits: as few as possible, the smallest one if one is enough."""
        while not has_room(self._limits[worker], NOTHING, self._loads[worker]):
            load, limits = self._loads[worker], self._limits[worker]
            excess = [number for number in self.counts[worker] if self._eases(number, load, limits)]
            enough = [
                number for number in excess if has_room(limits, NOTHING, self._load_with(worker, number, -1))
            ]
            self._put(max(enough) if enough else min(excess), worker, -1)

    def _eases(self, number: int, load: Amounts, limits: tuple[float, float]) -> bool:
        return any(
            have > limit and need for have, limit, need in zip(load, limits, self._needs[number], strict=True)
        )

    def _place_waiting(self) -> bool:
        """Place what waits, the largest first; True if anything was placed."""
        placed = False
        for number in range(len(self._kinds)):
            while self._waiting[number] and (self._fill(number) or self._make_room(number)):
                placed = True
        return placed

    def _fill(self, number: int) -> bool:
        """Place resources of a kind where there is room, each on the worker that is least full with it."""
        emptiest = [
            (_relative_load(self._load_with(worker, number), self._scales[worker]), worker)
            for worker in self._kinds[number].open_to
            if self._fits(number, worker) and self._has_no_sibling(number, worker)
        ]
        heapify(emptiest)
        placed = False
        while emptiest and self._waiting[number]:
            worker = emptiest[0][1]
            self._put(number, worker)
            placed = True
            if self._fits(number, worker) and self._has_no_sibling(number, worker):
                load = self._load_with(worker, number)
                heapreplace(emptiest, (_relative_load(load, self._scales[worker]), worker))
            else:
                heappop(emptiest)
        return placed

    def _make_room(self, number: int) -> bool:
        """Move a few resources off a worker so that one of this kind has room; False if none would do."""
        best: list[tuple[int, str]] | None = None
        target = ""
        room = self._most_free()
        for worker in self._kinds[number].open_to:
            at_most = MAX_RELOCATED if best is None else len(best) - 1
            if not at_most:
                break
            if not self._may_make_room(number, worker, at_most, room):
                continue
            found = self._relocations(number, worker, at_most, room)
            if found is not None:
                best, target = found, worker
        if best is None:
            return False
        for moved, other in best:
            self._move(moved, target, other)
        self._put(number, target)
        return True

    def _most_free(self) -> _Loads:
        """Return the most that any worker has free of each amount; what requests more fits on none."""
        cpu_milli = memory_mb = 0.0
        for worker, load in self._loads.items():
            limits = self._limits[worker]
            cpu_milli = max(cpu_milli, limits[0] - load[0])
            memory_mb = max(memory_mb, limits[1] - load[1])
        return cpu_milli, memory_mb

    def _may_make_room(self, number: int, worker: str, at_most: int, room: _Loads) -> bool:
        """False if moving ``at_most`` resources off a worker frees too little, as on most full ones."""
        if not has_room(self._limits[worker], NOTHING, self._needs[number]) or not self._has_no_sibling(
            number, worker
        ):
            return False
        wanted, limits = self._load_with(worker, number), self._limits[worker]
        return all(
            want - limit <= at_most * most for want, limit, most in zip(wanted, limits, room, strict=True)
        )

    def _relocations(
        self, number: int, worker: str, at_most: int, room: _Loads
    ) -> list[tuple[int, str]] | None:
        """Return the moves off a worker that make room: of the smallest that is enough, else large ones."""
        moves: list[tuple[int, str]] = []
        known = self._emptiest_two
        while len(moves) < at_most and not self._fits(number, worker):
            step = self._relocation(number, worker, room)
            if step is None:
                break
            self._move(step[0], worker, step[1])
            moves.append(step)
        found = self._fits(number, worker)
        for moved, other in reversed(moves):
            self._move(moved, other, worker)
        self._emptiest_two = known
        return moves if found else None

    def _relocation(self, number: int, worker: str, room: _Loads) -> tuple[int, str] | None:
        wanted, limits, load = self._load_with(worker, number), self._limits[worker], self._loads[worker]
        largest: tuple[int, str] | None = None
        smallest: tuple[int, str] | None = None
        for each in sorted(self.counts[worker]):
            needs = self._needs[each]
            if needs[0] > room[0] or needs[1] > room[1] or not self._eases(each, wanted, limits):
                continue
            other = self._emptiest(each, worker)
            if other is None:
                continue
            largest = largest or (each, other)
            if has_room(limits, (load[0] - needs[0], load[1] - needs[1]), self._needs[number]):
                smallest = each, other
        return smallest or largest

    def _emptiest(self, number: int, but: str) -> str | None:
        """Return the worker that is least full with one more of a kind; None if none has room."""
        two = self._emptiest_two.get(number)
        if two is None:
            able = (
                (_relative_load(self._load_with(worker, number), self._scales[worker]), worker)
                for worker in self._kinds[number].open_to
                if self._fits(number, worker) and self._has_no_sibling(number, worker)
            )
            two = self._emptiest_two[number] = [worker for _, worker in nsmallest(2, able)]
        return next((worker for worker in two if worker != but), None)

    def _even_out(self) -> bool:
        """Move single resources, and exchange two, while that makes the loads more even."""
        changed = False
        while self._move_down() or self._exchange():
            changed = True
        return changed

    def _move_down(self) -> bool:
        moved = False
        for worker in sorted(self.counts, key=lambda worker: (-self._relative_loads[worker], worker)):
            while step := min(self._moves_from(worker), default=None):
                self._move(step[1], worker, step[2])
                moved = True
        return moved

    def _moves_from(self, worker: str) -> Iterator[tuple[_Loads, int, str]]:
        """Yield the moves that lower the load of the fuller of two workers, with the loads that follow."""
        full = self._relative_loads[worker]
        for number in self.counts[worker]:
            for other in self._kinds[number].open_to:
                if self._relative_loads[other] < EVEN * full and self._has_no_sibling(number, other):
                    after = self._after(worker, other, number)
                    if after is not None and after < (full, self._relative_loads[other]):
                        yield after, number, other

    def _exchange(self) -> bool:
        """Exchange a resource of the fullest worker for another, if that lowers its load enough."""
        fullest = max(self._relative_loads.values(), default=0.0)
        enough = EVEN * fullest
        for worker in [worker for worker, full in self._relative_loads.items() if full and full == fullest]:
            best = min(
                (
                    (after, number, back, other)
                    for number in self.counts[worker]
                    for other in self._kinds[number].open_to
                    if self._relative_loads[other] < enough and self._has_no_sibling(number, other)
                    for back in self.counts[other]
                    if back != number and worker in self._able[back] and self._has_no_sibling(back, worker)
                    if (after := self._after(worker, other, number, back)) is not None and after[0] <= enough
                ),
                default=None,
            )
            if best is not None:
                _, number, back, other = best
                self._move(number, worker, other)
                self._move(back, other, worker)
                return True
        return False

    def _after(self, worker: str, other: str, number: int, back: int | None = None) -> _Loads | None:
        """Return the loads of two workers after a move between them; None if there is no room."""
        given = self._needs[number]
        taken = self._needs[back] if back is not None else (0, 0)
        ours, theirs = self._loads[worker], self._loads[other]
        ours = ours[0] - given[0], ours[1] - given[1]
        theirs = theirs[0] - taken[0], theirs[1] - taken[1]
        if not has_room(self._limits[other], theirs, given):
            return None
        if not has_room(self._limits[worker], ours, taken):
            return None
        ours = ours[0] + taken[0], ours[1] + taken[1]
        theirs = theirs[0] + given[0], theirs[1] + given[1]
        left, came = _relative_load(ours, self._scales[worker]), _relative_load(theirs, self._scales[other])
        return (left, came) if left >= came else (came, left)

    def _undo_moves(self) -> bool:
        """Undo moves without which the loads are as even."""
        returned = False
        for number, held in enumerate(self._held):
            for home, names in held.items():
                while self.counts[home][number] < len(names) and (away := self._worker_away(number, home)):
                    self._move(number, away, home)
                    returned = True
        return returned

    def _worker_away(self, number: int, home: str) -> str | None:
        """Return the worker from which a resource of a kind can return to its home; None if there is none."""
        if not self._has_no_sibling(number, home):
            return None
        for away in self._kinds[number].open_to:
            if self.counts[away][number] > len(self._held[number].get(away, ())):
                now = self._relative_loads[away], self._relative_loads[home]
                after = self._after(away, home, number)
                if after is not None and after <= (max(now), min(now)):
                    return away
        return None
