"""The problem of an allocation; the theory is in ``rebalanser.core.allocation``."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from rebalanser.core.group.types import special_resources

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rebalanser.core.group.types import Member, NodeId, Policy, Resource, ResourceSpec

_NO_PINS: Mapping[str, str] = MappingProxyType({})
_NOBODY: Mapping[str, Member] = MappingProxyType({})
_NO_REFUSALS: Mapping[str, frozenset[str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class AllocationProblem:
    """All that an allocation depends on: the same problem has the same allocation on each machine (RB-10)."""

    nodes: Mapping[NodeId, Member]
    """The live nodes that may own resources."""
    resources: Mapping[Resource, ResourceSpec]
    """All resources of the group."""
    previous: Mapping[NodeId, frozenset[Resource]]
    """Each node's last share. Nodes and resources that are gone are ignored; a resource that several live
    nodes name counts as held by the one with the smallest id."""
    policy: Policy
    pinned: Mapping[Resource, NodeId] = field(default_factory=lambda: _NO_PINS)
    """The only node that each of these resources may be on; it is unplaced if that is not in ``nodes``
    (RB-29)."""
    refused: Mapping[Resource, frozenset[NodeId]] = field(default_factory=lambda: _NO_REFUSALS)
    """The nodes that have released a resource, and must not get it."""
    kept: Mapping[NodeId, Member] = field(default_factory=lambda: _NOBODY)
    """Nodes that are gone and for whose labels their shares are kept: ``pinned`` has each of these resources,
    on none of ``nodes`` (RB-39)."""
    drained: frozenset[NodeId] = frozenset()
    """Nodes that are live and may not own resources (RB-30); for the reasons of moves only."""
    special: frozenset[Resource] | None = None
    """The resources that ``is_special``; None if they are not known."""
    unsettled: frozenset[Resource] | None = None
    """The only names that may not be both in ``resources`` and in just one share of ``previous``; None if
    they are not known. With it the cost of a plain problem grows with the changes, not with the group
    (RB-45)."""
    moves_left: int | None = None
    """Maximum number of resources that may move now for a better balance, beside the policy's (RB-38)."""
    resting: frozenset[Resource] = frozenset()
    """The resources that may not move now for a better balance (RB-38)."""

    @property
    def max_moves(self) -> int | None:
        """Maximum number of moves for a better balance; None for no limit."""
        limits = [limit for limit in (self.moves_left, self.policy.max_moves) if limit is not None]
        return min(limits, default=None)

    @property
    def special_resources(self) -> frozenset[Resource]:
        """The resources that ``is_special``."""
        if self.special is not None:
            return self.special
        return special_resources(self.resources)

    @property
    def is_plain(self) -> bool:
        """True if resources and nodes are alike and any number may move: then counts decide."""
        policy = self.policy
        if policy.imbalance_band or self.max_moves is not None or self.resting:
            return False
        if any(member.capacity is not None for member in self.nodes.values()):
            return False
        special = self.special_resources
        if not special:
            return True
        if len(special) < len(self.resources):
            return False
        weight = next(iter(self.resources.values())).weight
        return all(
            spec.weight == weight and not spec.needs and spec.spread is None
            for spec in self.resources.values()
        )
