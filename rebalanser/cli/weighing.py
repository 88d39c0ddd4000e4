"""Weights from the audit's loads: what they would change in a registry, and changing it (AU-7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, Protocol

from pydantic import BaseModel, ConfigDict

from rebalanser.admin import Admin
from rebalanser.history import Protocol as Writer

LEAST_CHANGE: Final = 0.2
"""A weight is changed if it does by this much or more: a move costs more than a little imbalance."""
MOST_SHOWN: Final = 10


class Load(Protocol):
    """A row of the table of loads."""

    group: str
    resource: str
    load: float
    weight: float


class Weighing(BaseModel):
    """What the loads of one group ask for."""

    model_config = ConfigDict(frozen=True)

    group: str
    weights: dict[str, float]
    """The weight of each resource that is to change, or, where no registry was asked, of each with a load."""
    applied: bool

    def lines(self) -> Iterator[str]:
        """For people: the first of them, and how many there are."""
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
    """The loads of each group, from rows that are sorted by group; those that a group shares out only."""
    of_groups = (row for row in rows if row.protocol == Writer.GROUP)
    for group, loads in groupby(of_groups, key=lambda row: row.group):
        yield str(group), list(loads)


def asked(group: str, loads: Sequence[Load]) -> Weighing:
    """The weights that the loads ask for, whatever the registry has."""
    return Weighing(group=group, weights={each.resource: each.weight for each in loads}, applied=False)


def apply(
    admin: Admin,
    loads: Sequence[Load],
    changes: Callable[[Iterable[Any], Mapping[str, float], float], dict[str, float]],
    progress: Callable[[int, int], None],
) -> Weighing:
    """Write the weights that differ; resources that are not there any more stay away.

    Nothing else that is said of them is touched. ``changes`` says which weights differ by enough.
    """
    current = {resource.resource: resource.weight for resource in admin.resources()}
    weights = changes(loads, current, LEAST_CHANGE)
    admin.weigh(weights, progress=progress)
    return Weighing(group=admin.name, weights=weights, applied=True)
