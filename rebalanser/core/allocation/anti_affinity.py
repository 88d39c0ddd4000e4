"""Placement of replicas, each on a worker of its own; the theory is in ``rebalanser.core.allocation``."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_Moves: TypeAlias = list[tuple[str, str]]
"""Replicas and the workers that they move to, to be done together."""


class OthersPool(NamedTuple):
    """Resources other than replicas that may be on the same workers."""

    open_to: tuple[str, ...]
    counts: Mapping[str, int]
    """Number of them on each worker."""


class _Step(NamedTuple):
    """A way to hand one resource from a worker to another: one of a pool, or a replica of a group."""

    worker: str
    pool: int | None
    group: str


class ReplicaPlacement:
    """Workers of the replicas of all groups; each group has at most one on a worker.

    A replica stays on its previous worker if it may be there and no other one of its group is. As many of the
    others are placed as is possible beside those that stay: a replica that runs does not move for another one
    that has failed.
    """

    def __init__(
        self,
        open_to: Mapping[str, tuple[str, ...]],
        groups: Mapping[str, str],
        previous: Mapping[str, str],
        others: Counter[str],
    ) -> None:
        """``others`` has the number of other resources of each worker: the emptiest of several is taken."""
        self._open_to = open_to
        self._groups = groups
        self._previous = previous
        self._members: dict[str, list[str]] = defaultdict(list)
        for name in sorted(open_to, key=lambda name: (groups[name], len(name), name)):
            self._members[groups[name]].append(name)
        self._alike = {
            group for group, names in self._members.items() if len({open_to[name] for name in names}) == 1
        }
        """The groups to all replicas of which the same workers are open."""
        self._at: dict[str, dict[str, str]] = {group: {} for group in self._members}
        """The replica of each group on each worker."""
        self._loads = Counter(others)
        self.holders: dict[str, str] = {}
        for group, names in self._members.items():
            for name in names:
                worker = previous.get(name)
                if worker is not None and worker in open_to[name] and worker not in self._at[group]:
                    self._put(name, worker)
        self._place_waiting()

    def unplaced(self) -> dict[str, tuple[int, int]]:
        """Replicas without a worker, each with the size of its group and the number of workers open to it."""
        numbers = {
            group: (len(names), len({worker for name in names for worker in self._open_to[name]}))
            for group, names in self._members.items()
        }
        return {name: numbers[self._groups[name]] for name in self._open_to if name not in self.holders}

    def even_out(self, others: Sequence[OthersPool]) -> None:
        """Move replicas until the loads of all workers, with these others, are as even as can be.

        One that failed somewhere may find a worker then that another one had.
        """
        pools = [Counter(pool.counts) for pool in others]
        self._loads = Counter(self.holders.values())
        for counts in pools:
            self._loads.update(counts)
        workers = {worker for pool in others for worker in pool.open_to}
        workers.update(worker for able in self._open_to.values() for worker in able)
        in_order = sorted(workers)
        while self._even_out_once(in_order, others, pools) or self._place_waiting():
            continue

    def _place_waiting(self) -> bool:
        """Place replicas that have no worker; True if one was placed."""
        before = len(self.holders)
        for names in self._members.values():
            for name in names:
                if name not in self.holders:
                    self._match(name)
        return len(self.holders) > before

    def _put(self, name: str, worker: str) -> None:
        self._at[self._groups[name]][worker] = name
        self.holders[name] = worker
        self._loads[worker] += 1

    def _match(self, name: str) -> None:
        """Place one more replica of a group, on the emptiest worker; siblings that are new may make room."""
        at = self._at[self._groups[name]]
        free = [worker for worker in self._open_to[name] if worker not in at]
        if free:
            self._put(name, min(free, key=lambda worker: (self._loads[worker], worker)))
            return
        moves = next(self._chains(name), None)
        if moves is not None:
            self._carry_out(moves)

    def _chains(self, name: str) -> Iterator[_Moves]:
        """Yield the moves that bring a replica, or one that it displaces, to a worker without a sibling."""
        at, alike = self._at[self._groups[name]], self._groups[name] in self._alike
        before: dict[str, tuple[str, str] | None] = {name: None}
        reached: set[str] = set()
        queue = deque([name])
        while queue:
            each = queue.popleft()
            for worker in self._open_to[each]:
                occupant = at.get(worker)
                if occupant is None and worker not in reached:
                    reached.add(worker)
                    yield self._chain(each, worker, before)
                elif occupant is None or alike or occupant in before:
                    continue
                elif self._previous.get(occupant) != worker:
                    before[occupant] = each, worker
                    queue.append(occupant)

    @staticmethod
    def _chain(last: str, worker: str, before: Mapping[str, tuple[str, str] | None]) -> _Moves:
        moves = [(last, worker)]
        step = before[last]
        while step is not None:
            moves.append(step)
            step = before[step[0]]
        return moves

    def _carry_out(self, moves: _Moves) -> None:
        at = self._at[self._groups[moves[0][0]]]
        for name, _ in moves:
            if name in self.holders:
                self._loads[self.holders[name]] -= 1
                del at[self.holders[name]]
        for name, worker in moves:
            self._put(name, worker)

    def _even_out_once(
        self, workers: Sequence[str], others: Sequence[OthersPool], pools: Sequence[Counter[str]]
    ) -> bool:
        """Lower the sum of the squared loads by one path from a fuller worker; False if there is none."""
        hosted: dict[str, list[str]] = defaultdict(list)
        for name, worker in self.holders.items():
            hosted[worker].append(name)
        least = min((self._loads[worker] for worker in workers), default=0)
        dead: set[str] = set()
        for source in sorted(workers, key=lambda worker: (-self._loads[worker], worker)):
            if self._loads[source] < least + 2:
                return False
            if source not in dead:
                path = self._path(source, workers, others, pools, hosted, dead)
                if path and self._follow(path, pools):
                    return True
        return False

    def _path(
        self,
        source: str,
        workers: Sequence[str],
        others: Sequence[OthersPool],
        pools: Sequence[Counter[str]],
        hosted: Mapping[str, list[str]],
        dead: set[str],
    ) -> list[tuple[str, _Step]]:
        """Return steps from a worker to one with a load smaller by two; else its ways lead nowhere: ``dead``.

        A worker that is dead leads to none with a load smaller by two than one that is at least as full.
        """
        found: dict[str, _Step | None] = {source: None}
        left = set(workers) - dead - {source}
        queue = deque([source])
        while queue and left:
            worker = queue.popleft()
            for other, step in self._steps(worker, others, pools, hosted.get(worker, ())):
                if other not in left:
                    continue
                left.remove(other)
                found[other] = step
                if self._loads[other] <= self._loads[source] - 2:
                    path = [(other, step)]
                    while (before := found[path[-1][1].worker]) is not None:
                        path.append((path[-1][1].worker, before))
                    return path
                queue.append(other)
        dead.update(found)
        return []

    def _steps(
        self,
        worker: str,
        others: Sequence[OthersPool],
        pools: Sequence[Counter[str]],
        hosted: Iterable[str],
    ) -> Iterator[tuple[str, _Step]]:
        """Yield the workers to which a resource of this one can go; replicas that have moved go first."""
        for number, pool in enumerate(others):
            if pools[number][worker]:
                yield from ((other, _Step(worker, number, "")) for other in pool.open_to)
        for name in sorted(hosted, key=lambda name: (self._previous.get(name) != worker, name), reverse=True):
            group = self._groups[name]
            yield from ((moves[0][1], _Step(worker, None, group)) for moves in self._chains(name))

    def _follow(self, path: Sequence[tuple[str, _Step]], pools: Sequence[Counter[str]]) -> bool:
        """Hand resources on along a path, the last step first; False if replicas of a group hinder it."""
        before = dict(self.holders), {group: dict(at) for group, at in self._at.items()}, Counter(self._loads)
        counts = [Counter(pool) for pool in pools]
        for other, step in path:
            if step.pool is not None:
                for worker, change in ((step.worker, -1), (other, 1)):
                    pools[step.pool][worker] += change
                    self._loads[worker] += change
                continue
            name = self._at[step.group].get(step.worker)
            chains = self._chains(name) if name is not None else iter(())
            moves = next((moves for moves in chains if moves[0][1] == other), None)
            if moves is None:
                self.holders, self._at, self._loads = before
                for pool, count in zip(pools, counts, strict=True):
                    pool.clear()
                    pool.update(count)
                return False
            self._carry_out(moves)
        return True
