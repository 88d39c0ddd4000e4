"""Flows of least cost, small and exact: what a placement needs that counts alone do not give."""

from __future__ import annotations

from heapq import heappop, heappush


class Network:
    """A directed network that carries a flow in whole units, every arc with a capacity and a cost per unit.

    Whatever has flowed, no flow of the same amount costs less: units go along paths of least cost only, and a
    later path may send back what an earlier one sent (successive shortest paths). Potentials keep the costs
    that the search sees from being negative; of the paths of least cost the shortest are filled together, as
    in Dinic's algorithm. The flow depends on the order in which nodes and arcs were added, on nothing else.
    """

    def __init__(self) -> None:
        self._arcs: list[list[int]] = []
        self._potentials: list[int] = []
        # Arc n and arc n ^ 1 are the two directions of one: what flows along one is the room of the other.
        self._tails: list[int] = []
        self._heads: list[int] = []
        self._room: list[int] = []
        self._costs: list[int] = []

    def add_node(self) -> int:
        """Add a node and return its number."""
        self._arcs.append([])
        self._potentials.append(0)
        return len(self._arcs) - 1

    def add_arc(self, tail: int, head: int, capacity: int, cost: int = 0) -> int:
        """Add an arc and return its number; ``cost`` is per unit and not negative."""
        arc = len(self._heads)
        self._tails += (tail, head)
        self._heads += (head, tail)
        self._room += (capacity, 0)
        self._costs += (cost, -cost)
        self._arcs[tail].append(arc)
        self._arcs[head].append(arc ^ 1)
        return arc

    def flow(self, arc: int) -> int:
        """Return the units that flow along the arc."""
        return self._room[arc ^ 1]

    def fill(self, source: int, sink: int) -> set[int]:
        """Let as much as possible flow from ``source`` to ``sink``, at the least cost.

        Returns:
            The nodes to which another unit could still get from the source: the smallest side of a minimum
            cut, and therefore the same for every greatest flow.
        """
        while True:
            distances = self._distances(source, sink)
            if sink not in distances:
                return set(distances)
            self._fill_shortest(source, sink, distances)
            self._raise_potentials(distances, distances[sink])

    def _length(self, arc: int) -> int:
        """Cost first and one hop second, in one number: no path has as many hops as there are nodes."""
        potentials = self._potentials
        reduced = self._costs[arc] + potentials[self._tails[arc]] - potentials[self._heads[arc]]
        return reduced * len(self._arcs) + 1

    def _distances(self, source: int, sink: int) -> dict[int, int]:
        """Return the distances of the sink and of all nearer nodes; of all nodes if the sink is cut off."""
        heads, room, length = self._heads, self._room, self._length
        distances: dict[int, int] = {}
        best = {source: 0}
        queue = [(0, source)]
        while queue:
            distance, node = heappop(queue)
            if node in distances:
                continue
            distances[node] = distance
            if node == sink:
                break
            for arc in self._arcs[node]:
                head = heads[arc]
                if room[arc] and head not in distances:
                    through_here = distance + length(arc)
                    if head not in best or through_here < best[head]:
                        best[head] = through_here
                        heappush(queue, (through_here, head))
        return distances

    def _fill_shortest(self, source: int, sink: int, distances: dict[int, int]) -> None:
        """Send units along paths of least length until none is left that has room."""
        heads, room = self._heads, self._room
        onward = {
            node: [arc for arc in reversed(self._arcs[node]) if room[arc] and self._is_tight(arc, distances)]
            for node in distances
        }
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                units = min(room[arc] for arc in path)
                for arc in path:
                    room[arc] -= units
                    room[arc ^ 1] += units
                path.clear()
                node = source
            elif onward[node]:
                arc = onward[node][-1]
                if room[arc]:
                    path.append(arc)
                    node = heads[arc]
                else:
                    onward[node].pop()
            elif path:
                node = heads[path.pop() ^ 1]
                onward[node].pop()
            else:
                return

    def _is_tight(self, arc: int, distances: dict[int, int]) -> bool:
        head = self._heads[arc]
        return head in distances and distances[head] == distances[self._tails[arc]] + self._length(arc)

    def _raise_potentials(self, distances: dict[int, int], farthest: int) -> None:
        hops = len(self._arcs)
        for node in range(hops):
            self._potentials[node] += distances.get(node, farthest) // hops
