"""What was planted, in the words of the audit, so that it can be told what must be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from rebalanser.history import Protocol
from support.histories.world import World


class Defect(StrEnum):
    """What can be wrong with a history; all but the last three are findings of the audit (AU-4)."""

    OVERLAP = "overlap"
    BARRIER_OVERLAP = "barrier_overlap"
    UNOWNED = "unowned"
    TOKEN_ORDER = "token_order"
    START_WITHOUT_BARRIER = "start_without_barrier"
    STEP_ORDER = "step_order"
    TWO_LEADERS = "two_leaders"
    CLAIM_TWICE = "claim_twice"
    UPDATE_GAP = "update_gap"
    STALE_WRITE = "stale_write"
    CONFLICT = "conflict"
    GAP = "gap"
    """Records of a process are missing (AU-2)."""
    CLOCK = "clock"
    """The clock of a host is far from that of the others (AU-5)."""
    QUARANTINE = "quarantine"
    """What was read is no record (AU-1)."""


@dataclass(frozen=True, slots=True)
class Planted:
    """One defect that must be found, once.

    A finding has a ``resource`` unless it is about none, a ``certainty``, and whether a gap is to be said of
    it (``behind_gap``). A gap has the ``process``, ``first`` and ``last`` missing number, and its ``reason``.
    A clock has the two ``hosts``, the one behind first, and what is in quarantine a ``reason``.
    """

    defect: Defect
    group: str
    resource: str | None = None
    certainty: str | None = None
    behind_gap: bool = False
    process: str | None = None
    first: int | None = None
    last: int | None = None
    reason: str | None = None
    hosts: tuple[str, str] | None = None


Planter: TypeAlias = Callable[[World], tuple[Planted, ...]]
"""Lets something happen in a world and tells what an audit must find of it: nothing, if it is a near miss."""

CERTAIN: Final = "certain"
POSSIBLE: Final = "possible"
ROTATED: Final = "rotated"
"""The reason of a gap at the beginning of a process, whose oldest file is not there any more."""

BARRIERS: Final = frozenset({Protocol.GROUP})
"""The protocols whose owners hold barriers."""
OWNERS: Final = frozenset(Protocol)
TASKS: Final = frozenset({Protocol.SKULD})


@dataclass(frozen=True, slots=True)
class Drama:
    """A planter, and in which protocols it can happen."""

    plant: Planter
    protocols: frozenset[Protocol] = OWNERS

    @property
    def name(self) -> str:
        """What the planter is called."""
        return self.plant.__name__


def finding(
    world: World, defect: Defect, resource: str | None, certainty: str = CERTAIN, *, behind_gap: bool = False
) -> Planted:
    """A finding that must be made of this world's group."""
    return Planted(defect, world.group, resource, certainty, behind_gap)
