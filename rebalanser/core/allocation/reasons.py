"""Reasons why a resource is on no worker or node, in sentences for people."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from rebalanser.core.group.types import SpreadOver

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Mapping

    from rebalanser.core.group.problem import AllocationProblem
    from rebalanser.core.group.types import Resource, ResourceSpec

NAMED_AT_MOST = 5


def why_nowhere(
    workers: Mapping[str, frozenset[str]], tags: frozenset[str], refused: frozenset[str], pin: str | None
) -> str:
    """The constraint that leaves no worker for a resource with these tags, refusals and pin (SH-12)."""
    if not workers:
        return "no worker is live"
    if pin is not None:
        return _why_not_on_its_pin(workers, tags, pin)
    fitting = [worker for worker, has in workers.items() if tags <= has]
    if not fitting:
        return _what_is_missing(workers, tags)
    those = f"every worker that has the {tags_in_words(tags)}" if tags else "every worker"
    return f"failed on {those}: {some(refused.intersection(fitting))}"


def why_not_separate(size: int, workers: int) -> str:
    """Why a replica has no worker: all that may take it have another one of the same group (SH-28).

    Args:
        size: the number of replicas of the group.
        workers: the number of workers that may take one of them.
    """
    noun = "worker" if workers == 1 else "workers"
    if size > workers:
        return f"{size} replicas on {workers} {noun} that may take them"
    return f"each worker that may take this replica has another one; {size} replicas on {workers} {noun}"


def why_full(
    needs: tuple[int, int],
    free: Mapping[str, tuple[float, ...]],
    limits: Mapping[str, tuple[float, float]],
    *,
    everywhere: bool,
) -> str:
    """The amount that no worker has free, of those that a resource may be on (SH-27).

    It names what the largest of them has in all, not what is free now: so the reason stays the same while
    others come and go.

    Args:
        needs: thousandths of a processor and megabytes of memory.
        free: what each of these workers has free.
        limits: what each worker has in all.
        everywhere: True if it may be on all workers.
    """
    which = "no worker has" if everywhere else "no worker that may take it has"
    for dimension, need in enumerate(needs):
        if any(need <= each[dimension] for each in free.values()):
            continue
        largest = min(free, key=lambda worker: (-limits[worker][dimension], worker))
        limit = limits[largest][dimension]
        lacking = _amount(dimension, need) + ("" if need > limit else " free")
        return f"{which} {lacking}: {largest}, the largest, has {_amount(dimension, limit)}"
    together = " and ".join(_amount(dimension, need) for dimension, need in enumerate(needs))
    return f"{which} {together} free at the same time"


def why_unplaced(
    problem: AllocationProblem,
    names: Collection[Resource],
    taken: Container[tuple[str, str]] = frozenset(),
) -> dict[Resource, str]:
    """Return for each of these resources why no node owns it (RB-37).

    ``taken`` has the spreads of all others, each with the node, or the zone, that has one of them.
    """
    resources, refused = problem.resources, problem.refused
    sizes: Counter[str | None] = Counter()
    if any(resources[name].spread is not None for name in names):
        sizes.update(spec.spread for spec in resources.values())
    open_to: dict[tuple[frozenset[str], frozenset[str]], _Willing | str] = {}
    reasons: dict[Resource, str] = {}
    for name in names:
        spec, pin = resources[name], problem.pinned.get(name)
        if pin is not None and problem.nodes:
            reasons[name] = _why_not_on_its_node(problem, name, pin)
            continue
        key = spec.needs, refused.get(name, frozenset())
        if key not in open_to:
            open_to[key] = _willing(problem, *key)
        willing = open_to[key]
        if isinstance(willing, str):
            reasons[name] = willing
        else:
            reasons[name] = _why_no_room(spec, willing, sizes[spec.spread], taken)
    return reasons


class _Willing(NamedTuple):
    """Nodes that may own a resource."""

    which: str
    """The beginning of a sentence that says that none of them does."""
    largest: str | None
    """The label of the one with the largest capacity; None if one has no limit."""
    capacity: float
    sites: frozenset[str]
    """They, or their zones, if spreads are over zones."""
    site: str


def _willing(problem: AllocationProblem, needs: frozenset[str], refused: frozenset[str]) -> _Willing | str:
    """Return the nodes that may own a resource; if there are none, the reason."""
    nodes = problem.nodes
    if not nodes:
        return "no node may own resources"
    tags = {node: member.tags for node, member in nodes.items()}
    fitting = {node for node, has in tags.items() if needs <= has}
    if not fitting:
        return _what_is_missing({nodes[node].label: has for node, has in tags.items()}, needs, "node")
    willing = sorted(fitting - refused)
    if not willing:
        return f"every node {f'with the {tags_in_words(needs)} ' if needs else ''}has released it"
    capacities = [(nodes[node].capacity, node) for node in willing]
    given = [(capacity, node) for capacity, node in capacities if capacity is not None]
    capacity, largest = min(given, key=lambda each: (-each[0], each[1]), default=(0.0, ""))
    by_zone = problem.policy.spread_over is SpreadOver.ZONE
    sites = frozenset(nodes[node].zone for node in willing) if by_zone else frozenset(willing)
    return _Willing(
        "no node" if len(willing) == len(nodes) else "no node that may own it",
        nodes[largest].label if len(given) == len(willing) else None,
        capacity,
        sites,
        ("zone" if by_zone else "node") + ("" if len(sites) == 1 else "s"),
    )


def _why_no_room(spec: ResourceSpec, willing: _Willing, size: int, taken: Container[tuple[str, str]]) -> str:
    """Return why none of the nodes that may own a resource does; ``size`` is that of its spread."""
    which, weight = willing.which, f"{spec.weight:g}"
    if willing.largest is not None and spec.weight > willing.capacity:
        has = f"{willing.capacity:g}"
        return f"{which} has a capacity of {weight}: {willing.largest}, the largest, has {has}"
    with_others = (
        sum((spec.spread, site) in taken for site in willing.sites) if spec.spread is not None else 0
    )
    if not with_others:
        return f"{which} has room for its weight of {weight}"
    if with_others == len(willing.sites) and size > with_others:
        where = f"{with_others} {willing.site} that may own one"
        return f"{size} resources with the spread {spec.spread} on {where}"
    return f"{which} has room for its weight of {weight} and no other of the spread {spec.spread}"


def _why_not_on_its_node(problem: AllocationProblem, name: Resource, pin: str) -> str:
    spec, member = problem.resources[name], problem.nodes.get(pin)
    label = spec.pin or pin
    if pin in problem.kept:
        return f"kept for {problem.kept[pin].label}, which is gone"
    if member is None:
        return f"pinned to {label}, which is not there or is drained"
    if pin in problem.refused.get(name, ()):
        return f"pinned to {label}, which has released it"
    if missing := spec.needs - member.tags:
        return f"pinned to {label}, which lacks the {tags_in_words(missing)}"
    if spec.spread is not None and not (member.capacity is not None and spec.weight > member.capacity):
        return f"pinned to {label}, which has no room or another one of the spread {spec.spread}"
    return f"pinned to {label}, which has no room for its weight of {spec.weight:g}"


def _amount(dimension: int, amount: float) -> str:
    return f"{amount:,.0f} MB of memory" if dimension else f"{amount / 1000:g} cpu"


def _why_not_on_its_pin(workers: Mapping[str, frozenset[str]], tags: frozenset[str], pin: str) -> str:
    if pin not in workers:
        return f"pinned to {pin}, which is not live"
    if missing := tags - workers[pin]:
        return f"pinned to {pin}, which lacks the {tags_in_words(missing)}"
    return f"pinned to {pin}, where it failed"


def _what_is_missing(
    workers: Mapping[str, frozenset[str]], tags: frozenset[str], noun: str = "worker"
) -> str:
    nearest = min(workers, key=lambda worker: (-len(tags & workers[worker]), worker))
    has = tags & workers[nearest]
    if len(tags) == 1:
        return f"no {noun} has the {tags_in_words(tags)}"
    if not has:
        return f"no {noun} has any of the {tags_in_words(tags)}"
    return f"no {noun} has all of the {tags_in_words(tags)}: the nearest, {nearest}, has {some(has)}"


def tags_in_words(tags: Collection[str]) -> str:
    """Return tags in order, after the noun."""
    return f"{'tag' if len(tags) == 1 else 'tags'} {some(tags)}"


def some(names: Collection[str]) -> str:
    """The names in order; of many the first few, since a sentence is to be read."""
    named = sorted(names)[:NAMED_AT_MOST]
    more = len(names) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")
