"""Weights from the audit's loads: computes the changes in a registry, and writes them (AU-7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, Protocol

from pydantic import BaseModel, ConfigDict

from rebalanser.admin import Admin
from rebalanser.history import Protocol as Writer

LEAST_CHANGE: Final = 0.2
"""Minimum relative change of a weight: a move costs more than a little imbalance."""
MOST_SHOWN: Final = 10


class Load(Protocol):
    """A row of the table of loads."""

    group: str
    resource: str
    load: float
    weight: float


class Weighing(BaseModel):
    """The weights computed from the loads of one group."""

    model_config = ConfigDict(frozen=True)

    group: str
    weights: dict[str, float]
    """The weights that change in the registry, by resource; without a registry, all computed ones."""
    applied: bool

    def lines(self) -> Iterator[str]:
        """Return lines with the first weights and their number."""
        if not self.weights:
            yield f"Weights of {self.group}: nothing to change."
            return
        verb = "are written" if self.applied else "would be written by --apply"
        yield f"Weights of {self.group}, {len(self.weights):,} of which {verb}:"
        heaviest = sorted(self.weights.items(), key=lambda item: (-item[1], item[0]))
        yield from (f"  {resource}: {weight:g}" for resource, weight in heaviest[:MOST_SHOWN])
        if len(heaviest) > MOST_SHOWN:
            yield f"  and {len(heaviest) - MOST_SHOWN:,} more"


def by_group(rows: Iterable[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the loads of each group from rows sorted by group; only of resources of groups."""
    of_groups = (row for row in rows if row.protocol == Writer.GROUP)
    for group, loads in groupby(of_groups, key=lambda row: row.group):
        yield str(group), list(loads)


def asked(group: str, loads: Sequence[Load]) -> Weighing:
    """Return the weights computed from the loads, without a registry."""
    return Weighing(group=group, weights={each.resource: each.weight for each in loads}, applied=False)


def apply(
    admin: Admin,
    loads: Sequence[Load],
    changes: Callable[[Iterable[Any], Mapping[str, float], float], dict[str, float]],
    progress: Callable[[int, int], None],
) -> Weighing:
    """Write the weights that differ, and no other field; removed resources are not added again.

    ``changes`` decides which weights differ enough.
    """
    current = {resource.resource: resource.weight for resource in admin.resources()}
    weights = changes(loads, current, LEAST_CHANGE)
    admin.weigh(weights, progress=progress)
    return Weighing(group=admin.name, weights=weights, applied=True)
