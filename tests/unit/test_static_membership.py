"""A leader that keeps the share of a label whose node is gone, and passes it to the one that comes for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from rebalanser import Settings
from rebalanser.core.allocation import Allocation, AllocationProblem, solve
from rebalanser.core.group import Fingerprint, Group, Header, Leadership, Member, ResourceSpec, Session, Share
from rebalanser.core.group.leading import Leading
from rebalanser.core.group.messages import GroupRead
from rebalanser.core.group.types import MAX_REJOIN_GRACE_S, PlanBasis, Policy, SpreadOver
from rebalanser.errors import InvalidSettings
from rebalanser.group import Group as HostGroup
from rebalanser.registry import GroupView
from rebalanser.state import GroupState, describe
from support.allocation_checker import check

SESSION = Session("leader", lease=1, created=1)
LEADERSHIP = Leadership(term=1, leader="leader", revision=2)
GRACE_S = 60.0
PLAIN = [ResourceSpec(f"r{number:02}") for number in range(30)]
WEIGHTED = [ResourceSpec(f"r{number:02}", weight=1.0 + number % 5) for number in range(30)]
BOTH = pytest.mark.parametrize("specs", [PLAIN, WEIGHTED], ids=["plain", "weighted"])


def _solve(problem: AllocationProblem) -> Allocation:
    allocation = solve(problem)
    check(problem, allocation)
    return allocation


class Fleet:
    """The stored state of a group, and its leader, which is a further node."""

    def __init__(self, specs: list[ResourceSpec], *labels: str, **settings: Any) -> None:
        self.specs = {spec.resource: spec for spec in specs}
        self.members: dict[str, Member] = {}
        self.shares: Mapping[str, Share] = {}
        self.remembered: Mapping[str, Member] = {}
        self.drained: frozenset[str] = frozenset()
        self.policy = Policy()
        self.header: Header | None = None
        self.revision = 10
        self.changed: frozenset[str] | None = None
        self.settings = settings
        self.basis: PlanBasis | None = None
        self.elect()
        for label in labels:
            self.join(label)
        self.rebalance(0.0)

    def elect(self) -> None:
        """Another node leads, and knows only what is stored."""
        self.leading = Leading(True, Settings().timings, _solve)
        self.leading.elected(LEADERSHIP, 0.0)
        self.group: Group | None = None

    def join(self, label: str, node: str | None = None, **member: Any) -> str:
        self.revision += 1
        name = node or f"{label}.{self.revision}"
        given = {"rejoin_grace_s": GRACE_S, **self.settings, **member}
        self.members[name] = Member(name, label, registered=self.revision, **given)
        return name

    def node(self, label: str) -> str:
        """The node of a label that is there."""
        (found,) = (node for node, member in self.members.items() if member.label == label)
        return found

    def leave(self, node: str) -> frozenset[str]:
        del self.members[node]
        return self.shares[node].resources

    def put(self, *specs: ResourceSpec) -> None:
        self.specs = self.specs | {spec.resource: spec for spec in specs}
        self.changed = frozenset(spec.resource for spec in specs)

    def remove(self, *names: str) -> None:
        self.specs = {name: spec for name, spec in self.specs.items() if name not in names}
        self.changed = frozenset(names)

    def read(self) -> Group:
        self.revision += 1
        before = self.group
        return Group(
            self.revision,
            dict(self.members),
            before.resources if before and before.resources == self.specs else self.specs,
            self.drained,
            self.header,
            self.shares,
            frozenset(),
            {},
            Fingerprint(),
            self.policy,
            self.remembered,
        )

    def plan(self, now: float) -> dict[str, tuple[frozenset[str], frozenset[str]]] | None:
        """Read the group and publish a plan; return what each node that changed had and has."""
        leading = self.leading
        command = leading.reading_group(SESSION, LEADERSHIP)
        group = self.read()
        changed, self.changed = self.changed if self.changed is not None else frozenset(), None
        known = command.known is not None
        outcome = GroupRead(group, read={} if known else None, changed=changed if known else None)
        asked = leading.group_read(command, outcome, now)
        self.group, self.basis = group, asked.basis
        leading.plan_made(leading.make_plan(asked), now)
        plan, before = leading.plan, self.shares
        if plan is None:
            return None
        self.revision += 1
        self.header = Header(plan.version, LEADERSHIP.term, self.revision)
        new = {node: Share(plan.version, names) for node, names in plan.changed.items()}
        leading.published(self.header, new, now)
        stored = {node: before.get(node) for node in plan.shares} | new
        self.shares = {node: share for node, share in stored.items() if share is not None}
        assert self.shares.keys() == plan.shares.keys()
        kept = {node: member for node, member in self.remembered.items() if node not in plan.forget}
        self.remembered = {**kept, **plan.remember}
        if leading.group is not None:
            assert leading.group.remembered == self.remembered
            self.shares = leading.group.shares
        return {
            node: (before[node].resources if node in before else frozenset(), share.resources)
            for node, share in new.items()
        }

    def rebalance(self, now: float) -> None:
        """Plan until nothing changes any more."""
        for _ in range(5):
            if self.plan(now) is None:
                return
        raise AssertionError("it does not come to an end")

    def by_label(self) -> dict[str, frozenset[str]]:
        """What each label has, whether its node is there or not."""
        known = {**self.remembered, **self.members}
        found: dict[str, frozenset[str]] = {}
        for node, share in self.shares.items():
            found[known[node].label] = found.get(known[node].label, frozenset()) | share.resources
        return found

    def state(self) -> GroupState:
        acknowledged = {node: share.version for node, share in self.shares.items()}
        group = replace(self.read(), acknowledged=acknowledged)
        return describe("g", GroupView(group, LEADERSHIP, ()))


@BOTH
@pytest.mark.rule("RB-39")
def test_a_share_is_kept_while_its_label_is_away_and_goes_to_the_node_that_comes_back(
    specs: list[ResourceSpec],
) -> None:
    fleet = Fleet(specs, "a", "b", "c")
    before = fleet.by_label()
    fleet.leave(fleet.node("b"))
    assert fleet.plan(100.0) is None, "nothing changes for anybody"
    assert fleet.leading.rebalance_at == 100.0 + GRACE_S
    assert fleet.plan(100.0 + GRACE_S - 1.0) is None
    node = fleet.join("b")
    changed = fleet.plan(100.0 + GRACE_S - 0.5)
    assert changed == {node: (frozenset(), before["b"])}, "exactly its share, and no other moves"
    assert fleet.plan(100.0 + GRACE_S) is None
    assert fleet.by_label() == before
    assert fleet.remembered.keys() == fleet.members.keys()
    assert fleet.leading.rebalance_at is None


@BOTH
@pytest.mark.rule("RB-39")
def test_after_the_grace_the_others_get_the_share(specs: list[ResourceSpec]) -> None:
    fleet = Fleet(specs, "a", "b", "c")
    gone = fleet.node("b")
    kept = fleet.leave(gone)
    assert fleet.plan(100.0) is None
    changed = fleet.plan(100.0 + GRACE_S)
    assert changed is not None
    assert frozenset().union(*(after - had for had, after in changed.values())) == kept
    assert gone not in fleet.shares
    assert gone not in fleet.remembered
    node = fleet.join("b")
    fleet.rebalance(200.0)
    assert fleet.shares[node].resources, "it comes too late, and is a node like any other"


@pytest.mark.rule("RB-39")
def test_without_a_grace_nothing_is_kept() -> None:
    fleet = Fleet(PLAIN, "a", "b", "c", rejoin_grace_s=0.0)
    fleet.leave(fleet.node("b"))
    assert fleet.plan(100.0)
    assert not fleet.remembered


@pytest.mark.rule("RB-39")
def test_a_new_leader_counts_the_grace_anew_and_no_leader_counts_for_ever() -> None:
    fleet = Fleet(PLAIN, "a", "b", "c", rejoin_grace_s=1e300)
    before = fleet.by_label()
    fleet.leave(fleet.node("b"))
    assert fleet.plan(100.0) is None
    fleet.elect()
    assert fleet.plan(5.0) is None, "its clock is another one"
    assert fleet.leading.rebalance_at == 5.0 + MAX_REJOIN_GRACE_S
    assert fleet.plan(4.0 + MAX_REJOIN_GRACE_S) is None
    fleet.elect()
    fleet.join("b")
    fleet.rebalance(0.0)
    assert fleet.by_label() == before
    fleet.leave(fleet.node("b"))
    fleet.elect()
    assert fleet.plan(0.0) is None
    assert fleet.plan(MAX_REJOIN_GRACE_S)


@pytest.mark.rule("RB-39")
def test_a_failure_to_publish_does_not_begin_the_grace_anew() -> None:
    fleet = Fleet(PLAIN, "a", "b")
    fleet.leave(fleet.node("b"))
    assert fleet.plan(100.0) is None
    leading = fleet.leading
    asked = leading.group_read(leading.reading_group(SESSION, LEADERSHIP), GroupRead(fleet.read()), 160.0)
    leading.plan_made(leading.make_plan(asked), 160.0)
    assert leading.plan is not None
    leading.failed("no answer", 160.0)
    assert fleet.plan(161.0)


@BOTH
@pytest.mark.rule("RB-39")
def test_after_a_restart_of_all_each_label_has_its_share_again(specs: list[ResourceSpec]) -> None:
    fleet = Fleet(specs, "a", "b", "c")
    before = fleet.by_label()
    for label in "abc":
        fleet.leave(fleet.node(label))
    fleet.elect()
    for label in "cab":
        fleet.join(label)
        fleet.rebalance(7.0)
        assert fleet.by_label() == before
    assert len(fleet.shares) == 3


@BOTH
@pytest.mark.rule("RB-39")
def test_nobody_else_gets_anything_of_a_kept_share(specs: list[ResourceSpec]) -> None:
    """A new node gets of the others' resources only, and new resources go to nodes that are there."""
    fleet = Fleet(specs, "a", "b", "c")
    kept = fleet.leave(fleet.node("b"))
    assert fleet.plan(100.0) is None
    new = fleet.join("d")
    fleet.put(*(ResourceSpec(f"new{number}") for number in range(5)))
    fleet.rebalance(101.0)
    assert fleet.by_label()["b"] == kept
    assert fleet.shares[new].resources
    owned = [fleet.by_label()[label] for label in "acd"]
    assert frozenset().union(*owned) == fleet.specs.keys() - kept
    node = fleet.join("b")
    changed = fleet.plan(102.0)
    assert changed == {node: (frozenset(), kept)}, "first it gets exactly its share"
    assert fleet.leading.rebalance_at is not None, "then the balance is looked at"
    fleet.rebalance(103.0)
    assert frozenset().union(*(share.resources for share in fleet.shares.values())) == fleet.specs.keys()


@BOTH
@pytest.mark.rule("RB-39")
def test_an_operator_overrides_what_is_kept(specs: list[ResourceSpec]) -> None:
    fleet = Fleet(specs, "a", "b", "c")
    kept = sorted(fleet.leave(fleet.node("b")))
    assert fleet.plan(100.0) is None
    fleet.remove(kept[0])
    fleet.rebalance(101.0)
    fleet.put(replace(fleet.specs[kept[1]], pin="a"))
    fleet.rebalance(102.0)
    fleet.put(replace(fleet.specs[kept[2]], pin="b"))
    fleet.rebalance(103.0)
    assert fleet.by_label()["b"] == frozenset(kept[2:])
    assert kept[1] in fleet.by_label()["a"]
    fleet.drained = frozenset({"b"})
    fleet.rebalance(104.0)
    assert "b" not in fleet.by_label()
    left = frozenset().union(*fleet.by_label().values())
    assert left == fleet.specs.keys() - {kept[2]}, "that one is pinned to what is drained"


@pytest.mark.rule("RB-39")
def test_what_needs_more_than_the_new_node_offers_goes_elsewhere() -> None:
    fleet = Fleet(PLAIN, "a", "b", tags=frozenset({"gpu"}))
    kept = sorted(fleet.leave(fleet.node("b")))
    assert fleet.plan(100.0) is None
    fleet.put(ResourceSpec(kept[0], needs=frozenset({"gpu"})))
    fleet.rebalance(101.0)
    node = fleet.join("b", tags=frozenset(), released=frozenset({kept[1]}))
    fleet.rebalance(102.0)
    assert fleet.shares[node].resources.isdisjoint(kept[:2])
    assert frozenset().union(*fleet.by_label().values()) == fleet.specs.keys()


@BOTH
@pytest.mark.rule("RB-39")
def test_with_surge_each_resource_moves_once_from_the_old_node_of_a_label_to_the_new(
    specs: list[ResourceSpec],
) -> None:
    fleet = Fleet(specs, "a", "b", "c")
    before, old = fleet.by_label(), fleet.node("b")
    new = fleet.join("b", node="0 a smaller id")
    changed = fleet.plan(100.0)
    assert changed == {old: (before["b"], frozenset()), new: (frozenset(), before["b"])}
    fleet.rebalance(100.0)
    assert fleet.shares[new].resources == before["b"]
    assert not fleet.shares[old].resources
    fleet.leave(old)
    fleet.rebalance(101.0)
    assert fleet.shares[new].resources == before["b"]
    assert fleet.by_label() == before
    assert old not in fleet.shares


@pytest.mark.rule("RB-39")
def test_if_the_new_node_is_gone_the_old_one_of_its_label_has_the_share_again() -> None:
    fleet = Fleet(PLAIN, "a", "b", "c")
    before, old = fleet.by_label(), fleet.node("b")
    new = fleet.join("b")
    fleet.rebalance(100.0)
    fleet.leave(new)
    fleet.elect()
    changed = fleet.plan(101.0)
    assert changed == {old: (frozenset(), before["b"])}
    fleet.rebalance(102.0)
    assert fleet.by_label() == before


@pytest.mark.rule("RB-39")
def test_both_nodes_of_a_label_must_state_a_grace_for_one_to_replace_the_other() -> None:
    for grace_s, newer_s in ((0.0, GRACE_S), (GRACE_S, 0.0), (0.0, 0.0)):
        fleet = Fleet(PLAIN, "a", "b", rejoin_grace_s=grace_s)
        old = fleet.node("b")
        new = fleet.join("b", rejoin_grace_s=newer_s)
        fleet.rebalance(100.0)
        loads = {len(share.resources) for share in fleet.shares.values()}
        assert loads == {10}, "two nodes that share a label have a share each"
        assert {old, new} < fleet.shares.keys()


@pytest.mark.rule("RB-39")
def test_a_share_goes_to_a_new_node_of_its_label_that_states_no_grace() -> None:
    """As where static membership is turned off: nothing is to wait for the grace of the old node."""
    fleet = Fleet(PLAIN, "a", "b", "c")
    before = fleet.by_label()
    fleet.leave(fleet.node("b"))
    assert fleet.plan(100.0) is None
    node = fleet.join("b", rejoin_grace_s=0.0)
    assert fleet.plan(101.0) == {node: (frozenset(), before["b"])}
    assert node not in fleet.remembered


@pytest.mark.rule("RB-39", "RB-37")
def test_the_zone_of_a_kept_resource_stays_free_of_others_of_its_spread() -> None:
    specs = [ResourceSpec(f"s{number}", spread="one") for number in range(2)]
    fleet = Fleet([], "a", "b", zone="x")
    fleet.policy = Policy(spread_over=SpreadOver.ZONE)
    other = fleet.join("c", zone="y")
    fleet.put(*specs)
    fleet.rebalance(1.0)
    away = next(node for node, share in fleet.shares.items() if share.resources and node != other)
    kept = fleet.leave(away)
    assert fleet.plan(2.0) is None
    fleet.leave(other)
    fleet.put(ResourceSpec("s2", spread="one"))
    fleet.rebalance(3.0)
    assert fleet.by_label()[fleet.remembered[away].label] == kept
    there = frozenset().union(*(fleet.shares[node].resources for node in fleet.members))
    assert there == frozenset(), "none of the spread joins the kept one in its zone"
    fleet.rebalance(3.0 + GRACE_S)
    assert any(fleet.shares[node].resources for node in fleet.members)


@pytest.mark.rule("RB-39", "RB-45")
def test_a_plan_beside_a_kept_share_looks_at_what_changed_only() -> None:
    fleet = Fleet(PLAIN, "a", "b", "c")
    fleet.leave(fleet.node("b"))
    assert fleet.plan(100.0) is None
    fleet.put(ResourceSpec("new"))
    assert fleet.plan(101.0)
    assert fleet.basis is not None
    assert fleet.basis.unsettled == {"new"}
    assert fleet.plan(102.0) is None
    assert fleet.basis is not None
    assert fleet.basis.unsettled == frozenset()


@pytest.mark.rule("RB-39")
def test_the_state_tells_what_is_kept_for_whom() -> None:
    fleet = Fleet(PLAIN, "a", "b", "c")
    gone = fleet.node("b")
    kept = fleet.leave(gone)
    assert fleet.plan(100.0) is None
    state = fleet.state()
    assert state.balanced
    (label,) = state.kept
    assert (label.label, label.node, label.resources) == ("b", gone, len(kept))
    reasons = {r.resource: r.reason for r in state.resources if r.resource in kept}
    assert set(reasons.values()) == {"kept for b, which is gone, for up to 60 s"}
    old = fleet.node("a")
    fleet.join("a")
    fleet.rebalance(101.0)
    assert {node.node for node in fleet.state().nodes if node.superseded} == {old}


@pytest.mark.rule("RB-39")
@pytest.mark.parametrize("grace_s", [-1.0, float("nan"), float("inf"), MAX_REJOIN_GRACE_S + 1.0, "soon"])
def test_a_grace_that_makes_no_sense_is_refused_in_one_line(grace_s: Any) -> None:
    with pytest.raises(InvalidSettings, match="rejoin_grace_s") as refused:
        Settings(rejoin_grace_s=grace_s)
    assert "\n" not in str(refused.value)


@pytest.mark.rule("RB-39")
def test_a_grace_needs_a_name_that_comes_back() -> None:
    with pytest.raises(InvalidSettings, match="give the node one"):
        HostGroup("g", "memory://static", settings=Settings(rejoin_grace_s=5.0))
