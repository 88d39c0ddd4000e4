"""Checks of plans where labels keep their shares (RB-39); they share no code with what makes plans.

A plan is judged by the group that its leader read and by what hosts state, with the leader's own clock. It
knows since when a node is gone only from its own readings in its term.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Protocol

from rebalanser.core.group.types import Group, NodeId, Plan, Resource, Share
from simulation.group.oracle import Judged
from simulation.group.scenario import HostPlan
from simulation.kernel.reports import Violation

_EPSILON_S = 1e-4
_NONE: frozenset[Resource] = frozenset()


class LabelWorld(Protocol):
    """The world of leaders that keep shares for labels."""

    def plan_of(self, node: NodeId) -> HostPlan:
        """Return what runs on the host of a node."""
        ...


class Leader(Judged, Protocol):
    """A process that may lead."""

    @property
    def world(self) -> LabelWorld:
        """Its world."""
        ...


def replaced(
    nodes: Collection[NodeId], plans: Mapping[NodeId, HostPlan], joined: Mapping[NodeId, int]
) -> set[str]:
    """Return the live nodes that a later one of their label replaces: both state a grace."""
    return {
        node
        for node in nodes
        for other in nodes
        if plans[node].rejoin_grace_s
        and plans[other].rejoin_grace_s
        and plans[node].label == plans[other].label
        and joined[node] < joined[other]
    }


class LabelChecks:
    """Judges the plans of one process by what labels keep. All times are seconds of its own clock."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._read_at = 0.0
        self._gone_since: dict[NodeId, float] = {}

    def elected(self) -> None:
        """The process leads a new term: it knows nothing of who has gone since when."""
        self._gone_since.clear()

    def read(self, group: Group) -> None:
        """The process learned the group."""
        self._read_at = self._leader.now
        gone = group.shares.keys() - group.members.keys()
        self._gone_since = {node: self._gone_since.get(node, self._read_at) for node in sorted(gone)}

    def publishes(self, plan: Plan, group: Group) -> tuple[Group, list[NodeId], dict[Resource, NodeId]]:
        """Judge what a plan does with shares of labels.

        Return the group without what is kept or goes to a node of its label; the nodes that may own anything;
        and the node of its label to which each such resource goes.
        """
        world, version = self._leader.world, plan.version
        plans = {node: world.plan_of(node) for node in group.members.keys() | group.shares.keys()}
        joined = {node: member.registered for node, member in group.members.items()}
        superseded = replaced(group.members, plans, joined)
        active = sorted(
            node for node in group.members.keys() - superseded if plans[node].label not in group.drained
        )
        before = {node: share.resources for node, share in group.shares.items()}
        after = {node: plan.changed.get(node, before.get(node, _NONE)) for node in plan.shares}
        self._check_drained(plan, group, plans)
        inherited: dict[Resource, NodeId] = {}
        specs = dict(group.resources)
        for node in sorted(before.keys() - group.members.keys() | superseded & before.keys()):
            label, grace_s = plans[node].label, plans[node].rejoin_grace_s
            if not grace_s or label in group.drained:
                continue
            share = frozenset(
                name
                for name in before[node]
                if name in group.resources and group.resources[name].pin in {None, label}
            )
            heir = self._heir(label, active, plans, joined, group.shares)
            if heir is not None:
                share -= group.members[heir].released
                if not share <= after[heir]:
                    raise Violation("RB-39", f"version {version} gives {heir} not all of what {node} had")
                inherited.update(dict.fromkeys(share, heir))
            elif not self._is_kept(node, label, share, grace_s, after, version):
                continue
            for name in share:
                specs.pop(name, None)
        for node in superseded:
            if after.get(node):
                raise Violation("RB-39", f"version {version} gives {node} something, which is replaced")
        return replace(group, resources=specs), active, inherited

    @staticmethod
    def _check_drained(plan: Plan, group: Group, plans: Mapping[NodeId, HostPlan]) -> None:
        """Check that nothing is kept for a drained label."""
        for node in sorted(plan.shares.keys() - group.members.keys()):
            if plans[node].label in group.drained:
                raise Violation("RB-39", f"version {plan.version} keeps what {node} had, which is drained")

    def _is_kept(
        self,
        node: NodeId,
        label: str,
        share: frozenset[Resource],
        grace_s: float,
        after: Mapping[NodeId, frozenset[Resource]],
        version: int,
    ) -> bool:
        """Return True if the grace of a node that is gone is not over; then its share must be kept whole."""
        over_s = self._read_at - self._gone_since[node] - grace_s
        if over_s < -_EPSILON_S and after.get(node, _NONE) != share:
            raise Violation("RB-39", f"version {version} gives up what is kept for {label}")
        if over_s > _EPSILON_S and node in after:
            raise Violation("RB-39", f"version {version} keeps {label}'s share {over_s:.3f} s too long")
        return over_s < 0

    @staticmethod
    def _heir(
        label: str,
        active: Collection[NodeId],
        plans: Mapping[NodeId, HostPlan],
        joined: Mapping[NodeId, int],
        shares: Mapping[NodeId, Share],
    ) -> NodeId | None:
        """The node that takes over: the last of the label that states a grace, else the last newcomer."""
        alike = [node for node in active if plans[node].label == label]
        stating = [node for node in alike if plans[node].rejoin_grace_s]
        newcomers = [node for node in alike if node not in shares]
        return max(stating or newcomers, key=lambda node: joined[node], default=None)
