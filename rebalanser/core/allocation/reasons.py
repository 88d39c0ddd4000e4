"""Why a resource can be on no worker, in a sentence for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

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
    those = f"every worker that has the {_tags(tags)}" if tags else "every worker"
    return f"failed on {those}: {_some(refused.intersection(fitting))}"


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


def _amount(dimension: int, amount: float) -> str:
    return f"{amount:,.0f} MB of memory" if dimension else f"{amount / 1000:g} cpu"


def _why_not_on_its_pin(workers: Mapping[str, frozenset[str]], tags: frozenset[str], pin: str) -> str:
    if pin not in workers:
        return f"pinned to {pin}, which is not live"
    if missing := tags - workers[pin]:
        return f"pinned to {pin}, which lacks the {_tags(missing)}"
    return f"pinned to {pin}, where it failed"


def _what_is_missing(workers: Mapping[str, frozenset[str]], tags: frozenset[str]) -> str:
    nearest = min(workers, key=lambda worker: (-len(tags & workers[worker]), worker))
    has = tags & workers[nearest]
    if len(tags) == 1:
        return f"no worker has the {_tags(tags)}"
    if not has:
        return f"no worker has any of the {_tags(tags)}"
    return f"no worker has all of the {_tags(tags)}: the nearest, {nearest}, has {_some(has)}"


def _tags(tags: Collection[str]) -> str:
    return f"{'tag' if len(tags) == 1 else 'tags'} {_some(tags)}"


def _some(names: Collection[str]) -> str:
    """The names in order; of many the first few, since a sentence is to be read."""
    named = sorted(names)[:NAMED_AT_MOST]
    more = len(names) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")
