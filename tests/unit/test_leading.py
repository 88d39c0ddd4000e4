"""A leader that moves resources for a better balance, as the policy of its group allows."""

from __future__ import annotations

from typing import Any

import pytest

from rebalanser import Settings
from rebalanser.core.allocation import solve
from rebalanser.core.group import Fingerprint, Group, Header, Leadership, Member, ResourceSpec, Session, Share
from rebalanser.core.group.leading import Leading
from rebalanser.core.group.messages import GroupRead
from rebalanser.core.group.types import PlanBasis, Policy
from rebalanser.registry import GroupView
from rebalanser.state import describe

SESSION = Session("m", lease=1, created=1)
LEADERSHIP = Leadership(term=1, leader="m", revision=2)
NAMES = [f"r{number}" for number in range(8)]


class Leader:
    """A leader and what is stored of its group; all is on one of two nodes when it is elected."""

    def __init__(self, elected_at: float = 100.0, settle_time_s: float = 0.0, **policy: Any) -> None:
        self.timings = Settings(settle_time_s=settle_time_s).timings
        self.policy = Policy(**policy)
        self.specs = {name: ResourceSpec(name, weight=2.0 if name == "r0" else 1.0) for name in NAMES}
        self.shares = {"m": Share(1, frozenset(NAMES)), "n": Share(1, frozenset())}
        self.header = Header(version=1, term=0, revision=2)
        self.revision = 2
        self.elect(elected_at)

    def elect(self, now: float) -> None:
        self.leading = Leading(True, self.timings, solve)
        self.leading.elected(LEADERSHIP, now)

    def move(self, now: float, *, lost: bool = False) -> set[str]:
        """Read the group, plan, and publish; what leaves the first node. ``lost``: no answer comes."""
        leading = self.leading
        command = leading.reading_group(SESSION, LEADERSHIP)
        self.revision += 1
        members = {node: Member(node, node) for node in self.shares}
        group = Group(
            self.revision,
            members,
            self.specs,
            frozenset(),
            self.header,
            self.shares,
            frozenset(),
            {},
            Fingerprint(),
            self.policy,
        )
        asked = leading.group_read(command, GroupRead(group), now)
        leading.plan_made(leading.make_plan(asked), now)
        plan, before = leading.plan, self.shares["m"].resources
        if plan is None:
            return set()
        self.revision += 1
        self.header = Header(plan.version, LEADERSHIP.term, self.revision)
        changed = {node: Share(plan.version, names) for node, names in plan.changed.items()}
        self.shares = self.shares | changed
        if lost:
            leading.publish_unknown(plan, LEADERSHIP.term)
            leading.failed("no answer", now)
        else:
            leading.published(self.header, changed, now)
        return set(before - self.shares["m"].resources)


@pytest.mark.rule("RB-38")
def test_without_a_policy_all_that_helps_moves_at_once() -> None:
    leader = Leader()
    assert len(leader.move(100.0)) == 3
    assert leader.leading.rebalance_at is None


@pytest.mark.rule("RB-38")
def test_a_leader_goes_on_with_what_one_rebalance_left() -> None:
    leader = Leader(max_moves=1)
    moved = leader.move(100.0)
    assert len(moved) == 1
    apart_s = Settings().timings.min_rebalance_interval_s
    at = leader.leading.rebalance_at
    assert at == 100.0 + apart_s
    assert len(leader.move(at)) == 1


@pytest.mark.rule("RB-8", "RB-38")
def test_a_change_settles_also_while_moves_for_a_better_balance_are_due() -> None:
    leader = Leader(max_moves=1, move_interval_s=30.0, settle_time_s=2.0)
    assert leader.move(130.0)
    assert leader.leading.rebalance_at == 160.0
    leader.leading.group_changed(leader.revision + 1, 159.0)
    assert leader.leading.rebalance_at == 161.0
    leader.leading.reading_group(SESSION, LEADERSHIP)
    assert leader.leading.rebalance_at is None, "one reading is for both"


@pytest.mark.rule("RB-38")
def test_a_policy_of_no_moves_plans_none_for_later() -> None:
    leader = Leader(max_moves=0)
    assert not leader.move(100.0)
    assert leader.leading.rebalance_at is None


@pytest.mark.rule("RB-38")
def test_moves_for_a_better_balance_keep_their_interval_also_after_an_election() -> None:
    leader = Leader(max_moves=1, move_interval_s=30.0)
    assert not leader.move(100.0)
    assert leader.leading.rebalance_at == 130.0
    assert not leader.move(129.9)
    assert len(leader.move(130.0)) == 1
    assert leader.leading.rebalance_at == 160.0
    assert not leader.move(159.0)
    leader.elect(170.0)
    assert not leader.move(170.0)
    assert leader.leading.rebalance_at == 200.0
    assert len(leader.move(200.0)) == 1


@pytest.mark.rule("RB-38")
def test_a_resource_that_moved_stays_for_its_cool_down() -> None:
    leader = Leader(cooldown_s=60.0)
    assert not leader.move(159.0)
    moved = leader.move(160.0)
    assert moved
    leader.specs = {name: ResourceSpec(name, weight=5.0 if name in moved else 1.0) for name in NAMES}
    assert not leader.move(170.0)
    assert leader.leading.rebalance_at == 220.0
    assert leader.shares["n"].resources == moved, "what is heavy now is where it was"
    before = leader.shares["n"]
    leader.move(220.0)
    assert leader.shares["n"] != before


@pytest.mark.rule("RB-38")
def test_moves_whose_publication_is_known_late_count_from_then() -> None:
    leader = Leader(max_moves=1, move_interval_s=30.0)
    assert len(leader.move(130.0, lost=True)) == 1
    assert not leader.move(131.0)
    assert leader.leading.rebalance_at == 161.0


@pytest.mark.rule("RB-38")
def test_what_is_unowned_is_placed_in_the_interval_too() -> None:
    leader = Leader(move_interval_s=1_000.0, cooldown_s=1_000.0, max_moves=0)
    leader.specs["new"] = ResourceSpec("new", weight=3.0)
    assert not leader.move(101.0)
    assert leader.shares["n"].resources == {"new"}


@pytest.mark.rule("RB-38")
def test_a_change_of_weights_alone_moves_only_what_the_policy_allows() -> None:
    leader = Leader(max_moves=2)
    leader.shares = {"m": Share(1, frozenset(NAMES[:4])), "n": Share(1, frozenset(NAMES[4:]))}
    leader.move(100.0)
    for number, name in enumerate(NAMES):
        leader.specs[name] = ResourceSpec(name, weight=9.0 if number < 4 else 1.0)
    before = dict(leader.shares)
    leader.move(200.0)
    stayed = sum(len(before[node].resources & leader.shares[node].resources) for node in before)
    assert stayed >= len(NAMES) - 2


@pytest.mark.rule("RB-36", "RB-45")
def test_the_basis_of_a_plan_knows_what_is_special_from_the_changes() -> None:
    basis = PlanBasis(frozenset(), {}, frozenset("ab"))
    specs = {"a": ResourceSpec("a"), "c": ResourceSpec("c", spread="s"), "d": ResourceSpec("d", weight=2.0)}
    assert basis.after(frozenset("abcde"), specs).special == frozenset("cd")
    assert basis.after(frozenset("e"), specs).special is basis.special


@pytest.mark.rule("RB-37")
def test_the_state_says_why_a_resource_has_no_node() -> None:
    group = Group(
        revision=3,
        members={"n": Member("n", "one", capacity=1.0)},
        resources={"big": ResourceSpec("big", weight=2.0), "new": ResourceSpec("new")},
        drained=frozenset(),
        header=Header(version=1, term=1, revision=2),
        shares={"n": Share(1, frozenset())},
        obsolete_parts=frozenset(),
        acknowledged={"n": 1},
        fingerprint=Fingerprint(),
    )
    state = describe("g", GroupView(group, Leadership(term=1, leader="n", revision=2), ()))
    assert {each.resource: each.reason for each in state.resources} == {
        "big": "no node has a capacity of 2: one, the largest, has 1",
        "new": "the next allocation is to place it",
    }
    assert not state.balanced


@pytest.mark.rule("RB-19", "RB-38")
def test_a_group_is_balanced_while_moves_for_a_better_balance_wait_for_their_interval() -> None:
    def is_balanced(policy: Policy, drained: frozenset[str] = frozenset()) -> bool:
        group = Group(
            revision=3,
            members={"m": Member("m", "one"), "n": Member("n", "two")},
            resources={name: ResourceSpec(name) for name in NAMES},
            drained=drained,
            header=Header(version=1, term=1, revision=2),
            shares={"m": Share(1, frozenset(NAMES)), "n": Share(1, frozenset())},
            obsolete_parts=frozenset(),
            acknowledged={"m": 1, "n": 1},
            fingerprint=Fingerprint(),
            policy=policy,
        )
        return describe("g", GroupView(group, Leadership(term=1, leader="m", revision=2), ())).balanced

    for policy in (Policy(move_interval_s=60.0), Policy(cooldown_s=60.0)):
        assert is_balanced(policy)
        assert not is_balanced(policy, frozenset({"one"})), "a drain is no matter of balance"
    assert not is_balanced(Policy())
