"""Weights from the audit's loads: what they would change in a registry, and changing it (AU-7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Protocol

from pydantic import BaseModel, ConfigDict

from rebalanser.admin import Admin
from rebalanser.history import Protocol as Writer
from rebalanser.state import ResourceState

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


@dataclass(frozen=True, slots=True)
class _As:
    """What is said of a resource beside its name."""

    weight: float
    pin: str | None
    attributes: tuple[tuple[str, str], ...]


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

    Pins and attributes are left as they are. ``changes`` says which weights differ by enough.
    """
    there = {resource.resource: resource for resource in admin.resources()}
    weights = changes(loads, {name: each.weight for name, each in there.items()}, LEAST_CHANGE)
    done = 0
    for what, names in _alike(weights, there):
        admin.add(names, weight=what.weight, pin=what.pin, attributes=dict(what.attributes))
        done += len(names)
        progress(done, len(weights))
    return Weighing(group=admin.name, weights=weights, applied=True)


def _alike(
    weights: Mapping[str, float], there: Mapping[str, ResourceState]
) -> Iterator[tuple[_As, list[str]]]:
    """The resources of which the same is to be said, together: there are few different weights."""
    alike: dict[_As, list[str]] = {}
    for name, weight in weights.items():
        resource = there[name]
        key = _As(weight, resource.pin, tuple(sorted(resource.attributes.items())))
        alike.setdefault(key, []).append(name)
    yield from alike.items()
