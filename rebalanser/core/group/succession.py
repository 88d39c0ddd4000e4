"""Static membership: the node to which the share of a label goes, or for which it is kept (RB-39).

A member with ``rejoin_grace_s`` represents its label. The leader stores its description beside its share,
under no lease, so that any later leader knows both once the member is gone.

*Gone, and no live node has its label.* The share is **kept**: nothing is taken from it or added to it, and
the others share out the rest among themselves. So the kept resources have no owner.

*Gone, and a live node has its label.* That node is the **heir**, and gets the whole share, in an allocation
that moves nothing else. Only after it may the balance be improved.

*Two of its label live*, and both state a grace: the one that registered last replaces the others, which are
**superseded** (surge). Their shares go to the heir in the same way: it waits for each barrier as any node
does. If the heir is gone before it has taken over, a superseded one is the heir of it in turn.

An operator's wish comes first: nothing is kept for a drained label, nor a resource that was removed, pinned
elsewhere, or needs what the member did not offer. All of this concerns the allocation only: two owners are
excluded by barriers as ever (RB-1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from rebalanser.core.group.types import Group, Member, NodeId, Resource

NOBODY: Final[frozenset[NodeId]] = frozenset()


@dataclass(frozen=True, slots=True)
class LabelSuccession:
    """Shares of labels: those that are kept, and those that pass to other nodes."""

    kept: Mapping[NodeId, frozenset[Resource]]
    """Resources that are kept for each node that is gone and has no heir."""
    heirs: Mapping[NodeId, NodeId]
    """The heir of each node that is gone or superseded, and of which a share is stored."""
    inherited: Mapping[Resource, NodeId]
    """The node to which each resource goes with the share of its label."""
    superseded: frozenset[NodeId] = NOBODY
    """Live nodes that own nothing, as a later one of their label replaces them."""

    @property
    def bound(self) -> dict[Resource, NodeId]:
        """The only node that each resource may be on, or be kept for."""
        return {r: node for node, kept in self.kept.items() for r in kept} | dict(self.inherited)


def succession(
    group: Group, ended: AbstractSet[NodeId] = NOBODY, unsettled: AbstractSet[Resource] | None = None
) -> LabelSuccession:
    """Return the succession in a group. Nothing is kept for the nodes in ``ended``: their grace is over.

    ``unsettled`` has the only names of which an operator's wish may have changed; None if it is not known.
    """
    gone = [node for node in group.remembered if node not in group.members and node in group.shares]
    stating: dict[str, list[NodeId]] = {}
    for node, member in group.members.items():
        if member.rejoin_grace_s:
            stating.setdefault(member.label, []).append(node)
    members = group.members
    latest = {label: max(those, key=lambda n: (members[n].registered, n)) for label, those in stating.items()}
    superseded = {n for label, those in stating.items() for n in those if n != latest[label]}
    if not gone and not superseded:
        return LabelSuccession({}, {}, {})
    heirs = {node: latest[members[node].label] for node in superseded if node in group.shares}
    newcomers = _newcomers(group) if gone else {}
    kept: dict[NodeId, frozenset[Resource]] = {}
    for node in gone:
        member = group.remembered[node]
        if member.label in group.drained:
            continue
        heir = latest.get(member.label, newcomers.get(member.label))
        if heir is not None:
            heirs[node] = heir
        elif node not in ended:
            kept[node] = _kept(group, node, member, unsettled)
    return LabelSuccession(
        {node: share for node, share in kept.items() if share},
        heirs,
        dict(_inherited(group, heirs)),
        frozenset(superseded),
    )


def _newcomers(group: Group) -> dict[str, NodeId]:
    """The node without a share that registered last, of each label."""
    new = sorted((m.registered, n) for n, m in group.members.items() if n not in group.shares)
    return {group.members[node].label: node for _, node in new}


def _kept(
    group: Group, node: NodeId, member: Member, unsettled: AbstractSet[Resource] | None
) -> frozenset[Resource]:
    """The share of a node that is gone, but for what an operator wishes elsewhere."""
    share = group.shares[node].resources
    doubtful = share if unsettled is None else share & unsettled
    lost = {name for name in doubtful if not _may_keep(group, member, name)}
    return share - lost if lost else share


def _may_keep(group: Group, member: Member, name: Resource) -> bool:
    spec = group.resources.get(name)
    return spec is not None and spec.pin in {None, member.label} and spec.needs <= member.tags


def _inherited(group: Group, heirs: Mapping[NodeId, NodeId]) -> Iterator[tuple[Resource, NodeId]]:
    for node, heir in heirs.items():
        member = group.members[heir]
        if member.label in group.drained:
            continue
        for name in group.shares[node].resources:
            if name not in member.released and _may_keep(group, member, name):
                yield name, heir
