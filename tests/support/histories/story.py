"""One seed is one story: a healthy life, and what was planted in it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from rebalanser.history import Protocol
from support.histories import claims, losses, ownership, steps
from support.histories.healthy import LIVES
from support.histories.pages import SPOILINGS, Pages, Spoiling, pages_of
from support.histories.planted import POSSIBLE, ROTATED, Defect, Drama, Planted
from support.histories.world import EPOCH, World

DRAMAS: Final[Mapping[str, Drama]] = MappingProxyType(
    {drama.name: drama for drama in (*ownership.DRAMAS, *steps.DRAMAS, *claims.DRAMAS, *losses.DRAMAS)}
)
"""Everything that can happen in a world, defects and near misses, by name."""
SPOILING: Final[Mapping[str, Spoiling]] = MappingProxyType({each.name: each for each in SPOILINGS})
"""Everything that can happen to its lines, by name."""
MOST_DRAMAS: Final = 3


@dataclass(frozen=True, slots=True)
class Story:
    """The history of one group: what is written, what must be found in it, and what was done to it."""

    seed: int
    group: str
    protocol: Protocol
    pages: Pages
    planted: tuple[Planted, ...]
    plot: tuple[str, ...]


def tell(seed: int, plot: Iterable[str] | None = None, *, protocol: Protocol | None = None) -> Story:
    """The story of a seed, in the group ``seed-N``; the same seed tells the same, to the byte.

    The seed draws protocol and plot unless they are given: a plot are names of ``DRAMAS`` and
    ``SPOILING``, an empty one a healthy life.
    """
    rng = random.Random(f"story {seed}")
    protocol = protocol or rng.choice([Protocol.GROUP, Protocol.GROUP, *Protocol])
    names = _draw(rng, protocol) if plot is None else tuple(plot)
    world = World(rng, protocol, f"seed-{seed}", begins=EPOCH + 1000.0 * seed)
    acts = rng.sample(["", *(name for name in names if name in DRAMAS)], 1 + sum(n in DRAMAS for n in names))
    planted: list[Planted] = []
    for act in acts:
        world.after(1.0, 5.0)
        if act:
            planted.extend(DRAMAS[act].plant(world))
        else:
            LIVES[protocol](world)
    pages = pages_of(world)
    for name in names:
        if name in SPOILING:
            planted.extend(SPOILING[name].spoil(rng, world, pages))
    return Story(seed, world.group, protocol, pages, tuple(_doubted(planted)), names)


def _doubted(planted: list[Planted]) -> Iterator[Planted]:
    """What is found in the order in which it happened, as far as a beginning that is missing changes it.

    A process whose beginning is missing could have owned, before its first record, what seems unowned.
    """
    for at, one in enumerate(planted):
        later = planted[at + 1 :]
        doubtful = one.defect is Defect.UNOWNED and any(other.reason == ROTATED for other in later)
        yield replace(one, certainty=POSSIBLE, behind_gap=True) if doubtful else one


def _draw(rng: random.Random, protocol: Protocol) -> tuple[str, ...]:
    dramas = [name for name, drama in DRAMAS.items() if protocol in drama.protocols]
    spoilings = [name for name, spoiling in SPOILING.items() if protocol in spoiling.protocols]
    return (
        *rng.sample(dramas, rng.randint(0, MOST_DRAMAS)),
        *rng.sample(spoilings, rng.choice([0, 0, 0, 1, 1, 2])),
    )
