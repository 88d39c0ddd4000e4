"""The best allocation of a small problem, by trying all of them; it shares no code with the solver."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rebalanser.core.allocation import AllocationProblem

MILLION = 1_000_000


def optimum(problem: AllocationProblem) -> tuple[int, float]:
    """Return the maximum number of placed resources, and the least largest load per capacity with it."""
    nodes = sorted(problem.nodes)
    members = [problem.nodes[node] for node in nodes]
    limits = [None if m.capacity is None else round(m.capacity * MILLION) for m in members]
    most = max((limit for limit in limits if limit is not None), default=0) or MILLION
    capacities = [most if limit is None else limit for limit in limits]
    by_zone = problem.policy.spread_over == "zone"
    sites = [member.zone if by_zone else node for node, member in zip(nodes, members, strict=True)]
    weights = {name: max(1, round(spec.weight * MILLION)) for name, spec in problem.resources.items()}
    names = sorted(weights, key=lambda name: -weights[name])
    choices = {
        name: [
            i
            for i, (node, member) in enumerate(zip(nodes, members, strict=True))
            if capacities[i]
            and problem.pinned.get(name, node) == node
            and node not in problem.refused.get(name, ())
            and problem.resources[name].needs <= member.tags
        ]
        for name in names
    }
    loads = [0] * len(nodes)
    taken: set[tuple[str | None, str]] = set()
    best = 0, float("inf")

    def search(at: int, placed: int, largest: float) -> None:
        nonlocal best
        left = len(names) - at
        if (-(placed + left), largest) >= (-best[0], best[1]):
            return
        if not left:
            best = placed, largest
            return
        name = names[at]
        weight, spread = weights[name], problem.resources[name].spread
        for i in sorted(choices[name], key=loads.__getitem__):
            after, limit = loads[i] + weight, limits[i]
            if (limit is not None and after > limit) or (spread and (spread, sites[i]) in taken):
                continue
            loads[i] = after
            if spread:
                taken.add((spread, sites[i]))
            search(at + 1, placed + 1, max(largest, after / capacities[i]))
            loads[i] -= weight
            taken.discard((spread, sites[i]))
        if placed + left - 1 >= best[0]:
            search(at + 1, placed, largest)

    search(0, 0, 0.0)
    return best if best[1] < float("inf") else (0, 0.0)
