"""A plan is what the leader then publishes, and an explanation is what holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebalanser import Admin, Settings
from rebalanser.core.allocation import solve
from rebalanser.core.allocation.explanations import HELD_BACK, NO_BETTER, TOO_LITTLE
from rebalanser.core.group import Header, Leadership, Member, Mode, Session, problem_of
from rebalanser.core.group.leading import Leading
from rebalanser.core.group.messages import (
    Acknowledge,
    Acknowledged,
    AddBarriers,
    BarriersAdded,
    Campaign,
    Elected,
    GroupRead,
    Join,
    Joined,
    Leave,
    Publish,
    Published,
    RecordReleases,
    ReleasesRecorded,
    Resign,
)
from rebalanser.errors import InvalidArgument, InvalidName, UnknownGroup
from rebalanser.plan import GroupPlan
from rebalanser.registry import RegistryCoordinator
from rebalanser.testing import FakeClock, MemoryRegistry, MemoryStore
from rebalanser.testing.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rebalanser.core.group.messages import Command
    from rebalanser.explanation import Explanation

TTL_S = 1e6
TAGS = ("gpu", "ssd")
ZONES = ("", "eu-1", "eu-2")


class Fleet:
    """A group in a memory registry on a fake clock: an operator, members without handlers, and a leader.

    Labels are never used again. No watch reports changes to the leader; it rebalances when it is asked to.
    """

    def __init__(self) -> None:
        clock = FakeClock()
        store = MemoryStore(clock)

        def opened(*_arguments: Any, **_named: Any) -> RegistryCoordinator:
            return RegistryCoordinator(MemoryRegistry(store), "root", "g", clock.now, PATIENCE_S)

        self.clock = clock
        self.coordinator = opened()
        with patch("rebalanser.admin.open_coordinator", opened):
            self.admin = Admin("g", "memory://g", timeout_s=PATIENCE_S)
        self.sessions: dict[str, Session] = {}
        self.leading = Leading(True, Settings().timings, solve)
        self._numbers = count()
        self._acknowledged: dict[str, int] = {}

    def close(self) -> None:
        self.admin.close()
        self.coordinator.close()

    def perform(self, command: Command, kind: type[Any]) -> Any:
        outcome = self.coordinator.perform(command)
        assert isinstance(outcome, kind), outcome
        return outcome

    def join(self, label: str, **offers: Any) -> None:
        """A node of the label; later ones have greater ids, as those that a plan makes up."""
        member = Member(f"n-{next(self._numbers):04}", label, **offers)
        self.sessions[label] = self.perform(Join(member, TTL_S), Joined).session

    def leave(self, label: str) -> None:
        self.coordinator.perform(Leave(self.sessions.pop(label)))

    @property
    def leadership(self) -> Leadership:
        assert self.leading.leadership is not None
        return self.leading.leadership

    def lead(self, label: str) -> None:
        self.leader = self.sessions[label]
        elected = self.perform(Campaign(self.leader), Elected)
        self.leading.elected(elected.leadership, self.clock.now())

    def rebalance(self) -> Header | None:
        """Let the leader read the group once, and publish what it decides on."""
        leading = self.leading
        command = leading.reading_group(self.leader, self.leadership)
        asked = leading.group_read(command, self.perform(command, GroupRead), self.clock.now())
        leading.plan_made(leading.make_plan(asked), self.clock.now())
        if leading.plan is None:
            return None
        published = self.perform(Publish(self.leader, self.leadership, leading.plan), Published)
        leading.published(published.header, published.shares, self.clock.now())
        return published.header

    def settle(self) -> None:
        """Rebalance until nothing changes."""
        for _ in range(100):
            if self.rebalance() is None:
                return
        raise AssertionError("it never settles")

    def take(self, *labels: str) -> None:
        """Let these nodes, or all, hold the barriers of their shares, as far as they are free."""
        group = self.coordinator.read().group
        for label in labels or self.sessions:
            session = self.sessions[label]
            share = group.shares[session.node]
            added = self.perform(
                AddBarriers(session, share.version, share.revision, share.resources), BarriersAdded
            )
            if not added.blocked:
                command = Acknowledge(session, share.version, self._acknowledged.get(label, session.created))
                self._acknowledged[label] = self.perform(command, Acknowledged).revision

    def owners(self) -> dict[str, str]:
        """The label that the published allocation names for each resource."""
        group = self.coordinator.read().group
        return {
            name: group.members[node].label
            for node, share in group.shares.items()
            for name in share.resources
            if node in group.members
        }

    def do(self, change: Mapping[str, Any]) -> None:
        """Make a change that is in the words of ``Admin.plan``."""
        admin = self.admin
        policy = {k: v for k, v in change.items() if k in {"spread_over", "imbalance_band", "max_moves"}}
        if change.get("remove"):
            admin.remove(change["remove"])
        admin.add_each(change.get("add", {}))
        admin.weigh(change.get("weights", {}))
        for name, pin in change.get("pins", {}).items():
            admin.add(name, pin=pin)
        for label in change.get("drain", ()):
            admin.drain(label)
        for label in change.get("undrain", ()):
            admin.undrain(label)
        if policy:
            admin.configure(**policy)
        for label, offers in change.get("add_nodes", {}).items():
            tags = frozenset(offers.get("tags", ()))
            self.join(label, **{**offers, "tags": tags, "mode": Mode(offers.get("mode", "cooperative"))})
        for label in change.get("remove_nodes", ()):
            self.leave(label)

    def plan_and_do(self, change: Mapping[str, Any]) -> GroupPlan:
        """Plan a change, make it, and hold the plan against what the leader publishes."""
        before = self.owners()
        revision = self.coordinator.read().group.revision
        planned = self.admin.plan(**change)
        assert self.coordinator.read().group.revision == revision, "a plan writes nothing"
        self.do(change)
        self.rebalance()
        after, state = self.owners(), self.admin.state()
        assert before | {move.resource: move.target for move in planned.moves} == {
            **dict.fromkeys(planned.stopped),
            **before,
            **after,
        }
        assert {move.resource for move in planned.moves} == {
            name for name, label in after.items() if before.get(name) != label
        }
        assert {each.resource for each in planned.unplaced} == {
            each.resource for each in state.resources if not each.removed
        } - after.keys()
        for each in planned.unplaced:
            assert each.source == before.get(each.resource)
        nodes = {node.label: node for node in state.nodes}
        for node in planned.nodes:
            if node.change == "removed":
                assert node.label not in nodes
                assert (node.resources_after, node.load_after) == (0, 0.0)
            else:
                there = nodes.pop(node.label)
                assert (node.resources_after, node.drained) == (there.assigned, there.drained)
                assert node.load_after == pytest.approx(there.load)
        assert not nodes
        assert planned.bound <= planned.largest_after * (1 + 1e-9)
        return planned


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with closing(Fleet()) as fleet:
        yield fleet


def three(fleet: Fleet, resources: int = 12) -> None:
    """Three settled nodes; the first leads."""
    fleet.admin.add(f"r{number:02}" for number in range(resources))
    for label in ("w1", "w2", "w3"):
        fleet.join(label)
    fleet.lead("w1")
    fleet.settle()
    fleet.take()


CHANGES: Mapping[str, Mapping[str, Any]] = {
    "nothing": {},
    "a node joins": {"add_nodes": {"w4": {}}},
    "nodes with capacities join": {"add_nodes": {"w4": {"capacity": 2.0}, "w5": {"capacity": 6.0}}},
    "a node leaves": {"remove_nodes": ["w2"]},
    "a node is replaced": {"remove_nodes": ["w2"], "add_nodes": {"w4": {}}},
    "a node is drained": {"drain": ["w2"]},
    "all are drained": {"drain": ["w1", "w2", "w3"]},
    "resources come": {"add": {"s1": {}, "s2": {"weight": 3.0}}},
    "what nobody offers is needed": {"add": {"s1": {"needs": ["gpu"]}}},
    "a node that offers it joins": {
        "add": {"s1": {"needs": ["gpu"]}},
        "add_nodes": {"w4": {"tags": ["gpu"]}},
    },
    "a spread of more than there are nodes": {"add": {f"s{n}": {"spread": "s"} for n in range(4)}},
    "resources go": {"remove": ["r00", "r01", "r02", "r03"]},
    "a weight changes": {"weights": {"r00": 9.0}},
    "a weight changes under a budget": {"weights": {"r00": 9.0}, "max_moves": 1},
    "a weight changes within a band": {"weights": {"r00": 3.0}, "imbalance_band": 0.5},
    "a resource is pinned": {"pins": {"r00": "w3"}},
    "a resource is pinned to nobody": {"pins": {"r00": "w9"}},
    "zones": {
        "add_nodes": {"w4": {"zone": "eu-1"}},
        "add": {f"s{n}": {"spread": "s"} for n in range(2)},
        "spread_over": "zone",
    },
    "an eager node joins": {"add_nodes": {"w4": {"mode": "eager"}}},
}


@pytest.mark.rule("RB-35")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_is_planned_is_what_the_leader_publishes(fleet: Fleet, change: Mapping[str, Any]) -> None:
    three(fleet)
    fleet.plan_and_do(change)


@pytest.mark.rule("RB-35")
def test_a_plan_goes_on_from_present_pins_drains_and_policy(fleet: Fleet) -> None:
    three(fleet)
    fleet.plan_and_do({"drain": ["w2"], "pins": {"r00": "w2", "r01": "w3"}, "max_moves": 2})
    assert {each.resource for each in fleet.admin.plan().unplaced} == {"r00"}
    assert not fleet.admin.plan().moves
    back = fleet.plan_and_do({"undrain": ["w2"]})
    assert len(back.moves) == 3, "the pinned one, and two by the policy"
    assert back.improvable
    fleet.settle()
    fleet.plan_and_do({"pins": {"r00": None}, "drain": ["w2"]})


def random_change(random: Random, fleet: Fleet, labels: Iterator[str]) -> dict[str, Any]:
    """Some of everything that may change; the first node stays, as it leads."""
    group = fleet.coordinator.read().group
    others = sorted(label for label in fleet.sessions if label != "w0")
    leaving = random.sample(others, random.choice([0, 0, min(1, len(others))]))
    stay = [label for label in others if label not in leaving]
    drained = random.sample(stay, random.randint(0, min(1, len(stay))))
    names = sorted(group.resources)
    going = random.sample(names, random.randint(0, min(2, len(names))))
    kept = [name for name in names if name not in going]
    change: dict[str, Any] = {
        "add_nodes": {next(labels): offers(random) for _ in range(random.choice([0, 0, 1, 2]))},
        "remove_nodes": leaving,
        "drain": drained,
        "undrain": sorted(group.drained - set(drained) - set(leaving)) if random.random() < 0.4 else [],
        "add": {f"s{random.randint(0, 40)}": said(random) for _ in range(random.choice([0, 0, 3]))},
        "remove": going,
        "weights": {name: random.choice([1.0, 2.5, 7.0]) for name in random.sample(kept, min(1, len(kept)))},
        "pins": {n: random.choice([None, "w0", "w1", "w2"]) for n in random.sample(kept, min(1, len(kept)))},
        "spread_over": random.choice(["node", "zone"]),
        "imbalance_band": random.choice([0.0, 0.0, 0.3]),
        "max_moves": random.choice([None, None, 0, 2]),
    }
    change["add"] = {name: what for name, what in change["add"].items() if name not in names}
    return {what: value for what, value in change.items() if random.random() < 0.6}


def offers(random: Random) -> dict[str, Any]:
    return {
        "capacity": random.choice([None, None, 4.0, 9.0]),
        "tags": random.sample(TAGS, random.randint(0, 2)),
        "zone": random.choice(ZONES),
        "mode": random.choice(["cooperative", "eager"]),
    }


def said(random: Random) -> dict[str, Any]:
    return {
        "weight": random.choice([1.0, 1.0, 0.3, 4.0]),
        "needs": random.sample(TAGS, random.choice([0, 0, 0, 1])),
        "spread": random.choice([None, None, "s", "t"]),
    }


def random_fleet(random: Random, fleet: Fleet, labels: Iterator[str]) -> None:
    is_plain = random.random() < 0.3
    fleet.admin.add_each({f"r{n:02}": {} if is_plain else said(random) for n in range(random.randint(1, 14))})
    for _ in range(random.randint(1, 4)):
        fleet.do({"add_nodes": {next(labels): {} if is_plain else offers(random)}})
    fleet.lead("w0")
    if random.random() < 0.8:
        fleet.settle()


@pytest.mark.rule("RB-35")
@given(st.integers(0, 2**32))
def test_whatever_is_planned_is_what_the_leader_publishes(seed: int) -> None:
    random = Random(seed)
    labels = (f"w{number}" for number in count())
    with closing(Fleet()) as fleet:
        random_fleet(random, fleet, labels)
        for _ in range(3):
            fleet.plan_and_do(random_change(random, fleet, labels))


@pytest.mark.rule("RB-35")
def test_a_plan_says_how_long_resources_may_be_without_an_owner(fleet: Fleet) -> None:
    three(fleet)
    planned = fleet.admin.plan(
        drain=["w1"], remove_nodes=["w2"], add=["s"], add_nodes={"w4": {"mode": "eager"}}
    )
    by_source: dict[str | None, set[float]] = defaultdict(set)
    for move in planned.moves:
        by_source[move.source].add(move.unowned_s)
    stop, pause = Settings().stop_timeout_s, Settings().min_rebalance_interval_s
    assert by_source == {"w1": {stop}, "w2": {stop + pause}, None: {pause}}
    assert [(each.resources, each.unowned_s) for each in planned.unowned] == [
        (4, stop),
        (4, stop + pause),
        (1, pause),
    ]
    assert "lease_ttl_s 10" in planned.unowned[1].of


@pytest.mark.rule("RB-35")
def test_a_plan_counts_what_restarts_on_an_eager_node(fleet: Fleet) -> None:
    fleet.admin.add("a", "b", "c", "d")
    fleet.join("w1")
    fleet.join("w2", mode=Mode.EAGER)
    fleet.lead("w1")
    fleet.settle()
    before = fleet.coordinator.read().group.shares
    assert [node.restarted for node in fleet.admin.plan().nodes] == [0, 0], "nothing changes"
    planned = fleet.plan_and_do({"add": {"e": {}}})
    assert [node.restarted for node in planned.nodes] == [0, 2]
    assert planned.unowned[-1].resources == 2
    after = fleet.coordinator.read().group.shares
    assert after["n-0001"].version > before["n-0001"].version, "its share is written again, so it restarts"


@pytest.mark.rule("RB-35")
def test_a_plan_says_what_limits_it(fleet: Fleet) -> None:
    three(fleet)
    assert fleet.admin.plan().notes == ()
    assert "equally good" in fleet.admin.plan(add_nodes="w4").notes[0]
    assert "the leader is among the removed nodes" in fleet.admin.plan(remove_nodes="w1").notes[0]
    spaced = fleet.admin.plan(weights={"r00": 9.0}, move_interval_s=30, cooldown_s=60)
    assert "by up to 60 s" in spaced.notes[0]
    fleet.coordinator.perform(Resign(fleet.leader, fleet.leadership, "why not"))
    fleet.admin.add("s")
    assert [note.partition(":")[0] for note in fleet.admin.plan().notes] == [
        "the group is not balanced now",
        "the group has no leader now",
    ]
    held_back = fleet.admin.plan(weights={"r00": 9.0}, max_moves=0)
    assert held_back.improvable
    assert "later rebalances" in held_back.notes[-1]


@pytest.mark.rule("RB-35")
def test_a_plan_says_what_is_kept_for_a_label_that_may_return(fleet: Fleet) -> None:
    three(fleet)
    fleet.plan_and_do({"drain": ["w3"]})
    fleet.join("w4", rejoin_grace_s=60.0)
    fleet.settle()
    fleet.take()
    planned = fleet.admin.plan(remove_nodes="w4")
    assert not planned.moves
    assert planned.notes == ("4 resources have no owner while they are kept for labels that may return",)
    fleet.leave("w4")
    fleet.rebalance()
    assert fleet.admin.plan().notes == planned.notes, "the group is balanced, and they are still kept"


BAD_PLANS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"drain": ["w9"]}, InvalidArgument, "no live node with the label 'w9'"),
    ({"undrain": ["w9"]}, InvalidArgument, "no live or drained node with the label 'w9'"),
    ({"remove_nodes": ["w8", "w9"]}, InvalidArgument, "no live node with the label 'w8', nor 1 others"),
    ({"remove": ["z"]}, InvalidArgument, "no resource 'z'"),
    ({"weights": {"z": 1.0}}, InvalidArgument, "no resource 'z'"),
    ({"pins": {"z": "w1"}}, InvalidArgument, "no resource 'z'"),
    ({"weights": {"r00": 0.0}}, InvalidArgument, "weights.r00: .*greater than 0"),
    ({"weights": {"r00": -1.0}}, InvalidArgument, "weights.r00: .*greater than 0"),
    ({"weights": {"r00": float("nan")}}, InvalidArgument, "weights.r00: .*finite"),
    ({"add": {"s": {"weight": float("inf")}}}, InvalidArgument, "resource 's': weight: .*finite"),
    ({"add": {"s": {"wait": 1}}}, InvalidArgument, "resource 's': wait: no resource has such a field"),
    ({"add": ["s", "s"]}, InvalidName, "'s' is given twice"),
    ({"drain": ["w1", "w1"]}, InvalidName, "'w1' is given twice"),
    ({"drain": "\n"}, InvalidName, "unprintable"),
    ({"pins": {"r00": "\n"}}, InvalidName, "unprintable"),
    ({"pins": {"r00": 7}}, InvalidArgument, "pins.r00"),
    ({"drain": "w1", "undrain": "w1"}, InvalidArgument, "'w1' can't be drained and undrained"),
    ({"drain": "w1", "remove_nodes": "w1"}, InvalidArgument, "'w1' can't be removed and drained"),
    ({"add": "r00", "remove": "r00"}, InvalidArgument, "'r00' can't be added and removed"),
    ({"weights": {"r00": 2.0}, "remove": "r00"}, InvalidArgument, "can't be given a weight and removed"),
    ({"pins": {"r00": None}, "remove": "r00"}, InvalidArgument, "can't be given a pin and removed"),
    (
        {"add": {"r00": {"weight": 2}}, "weights": {"r00": 2.0}},
        InvalidArgument,
        "can't be added with a weight and given another weight",
    ),
    ({"add_nodes": {"w4": {"capacity": 0}}}, InvalidArgument, "node 'w4': capacity: .*greater than 0"),
    ({"add_nodes": {"w4": {"size": 1}}}, InvalidArgument, "node 'w4': size: give any of capacity, tags"),
    ({"add_nodes": {"w4": 1}}, InvalidArgument, "node 'w4': int: give any of"),
    ({"add_nodes": {"": {}}}, InvalidName, "empty"),
    ({"max_moves": -1}, InvalidArgument, "max_moves"),
    ({"imbalance_band": float("nan")}, InvalidArgument, "imbalance_band"),
]


@pytest.mark.rule("RB-35")
@pytest.mark.parametrize(("change", "error", "message"), BAD_PLANS)
def test_a_bad_plan_gets_one_clear_line(
    fleet: Fleet, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    three(fleet)
    with pytest.raises(error, match=message) as raised:
        fleet.admin.plan(**change)
    assert "\n" not in str(raised.value)


def test_a_group_that_is_not_there_is_neither_planned_nor_explained(fleet: Fleet) -> None:
    with pytest.raises(UnknownGroup):
        fleet.admin.plan()
    with pytest.raises(UnknownGroup):
        fleet.admin.explain("a")


def reasons(explained: Explanation) -> dict[str, str]:
    return {each.label: each.reason for each in explained.nodes}


@pytest.mark.rule("RB-35")
def test_each_node_has_the_constraint_that_keeps_a_resource_from_it(fleet: Fleet) -> None:
    fleet.admin.add("it", weight=2, needs="gpu", spread="s")
    fleet.admin.add("sibling", spread="s")
    fleet.admin.add("filler", weight=4)
    gpu = frozenset({"gpu"})
    for label, options in {
        "owner": {"tags": gpu},
        "drained": {"tags": gpu},
        "plain": {},
        "small": {"tags": gpu, "capacity": 1.0},
        "full": {"tags": gpu, "capacity": 5.0},
        "releaser": {"tags": gpu},
        "other": {"tags": gpu},
        "free": {"tags": gpu},
    }.items():
        fleet.join(label, **options)
    fleet.lead("owner")
    fleet.admin.drain("drained")
    session = fleet.sessions["releaser"]
    member = replace(fleet.coordinator.read().group.members[session.node], released=frozenset({"it"}))
    fleet.perform(RecordReleases(session, member, session.created), ReleasesRecorded)
    for name, label in {"it": "owner", "sibling": "other", "filler": "full"}.items():
        fleet.admin.add(name, pin=label)
    fleet.settle()
    fleet.admin.add("it", "filler", "sibling", pin=None)
    fleet.settle()
    fleet.take()
    explained = fleet.admin.explain("it")
    assert (explained.owner, explained.assigned, explained.next) == ("owner", "owner", "owner")
    assert explained.token == {h.resource: h.token for h in fleet.coordinator.read().holdings}["it"]
    assert explained.reason == "it was there before, and the balance would be no better elsewhere"
    assert reasons(explained) == {
        "drained": "it is drained",
        "plain": "it lacks the tag gpu",
        "small": "its capacity is below the weight of 2",
        "full": "it has no room for the weight of 2",
        "releaser": "it has released it",
        "other": "another one of the spread s is there",
        "free": NO_BETTER,
    }
    assert explained.waits_for == ()


@pytest.mark.rule("RB-35")
def test_a_zone_with_a_sibling_keeps_a_resource_from_all_its_other_nodes(fleet: Fleet) -> None:
    fleet.admin.add("a", "b", spread="s")
    fleet.admin.configure(spread_over="zone")
    for label, zone in {"w1": "x", "w2": "x", "w3": "y", "w4": "y"}.items():
        fleet.join(label, zone=zone)
    fleet.lead("w1")
    fleet.settle()
    fleet.take()
    owner = fleet.owners()["a"]
    zone = {"w1", "w2"} if owner in {"w1", "w2"} else {"w3", "w4"}
    beside = (zone - {owner}).pop()
    assert reasons(fleet.admin.explain("a")) == {
        label: NO_BETTER if label == beside else "another one of the spread s is in its zone"
        for label in {"w1", "w2", "w3", "w4"} - {owner}
    }


@pytest.mark.rule("RB-35")
def test_a_pin_explains_where_a_resource_is_and_where_not(fleet: Fleet) -> None:
    three(fleet)
    fleet.admin.add("p", pin="w2")
    fleet.settle()
    fleet.take()
    explained = fleet.admin.explain("p")
    assert (explained.owner, explained.reason) == ("w2", "it is pinned to w2")
    assert set(reasons(explained).values()) == {"it is pinned to w2"}
    fleet.admin.drain("w2")
    assert fleet.admin.explain("p").reason == (
        "it is to leave its node: pinned to w2, which is not there or is drained"
    )


@pytest.mark.rule("RB-35")
def test_a_policy_that_holds_moves_back_is_named(fleet: Fleet) -> None:
    three(fleet)
    fleet.admin.configure(max_moves=0)
    fleet.admin.add("r00", weight=20)
    fleet.settle()
    owner = fleet.owners()["r00"]
    neighbour = next(name for name, label in fleet.owners().items() if label == owner and name != "r00")
    explained = fleet.admin.explain(neighbour)
    fleet.take()
    assert set(reasons(explained).values()) == {HELD_BACK}
    explained = fleet.admin.explain(neighbour)
    assert explained.reason == "it was there before, and the balance is good enough for the policy"
    assert set(reasons(fleet.admin.explain("r00")).values()) == {NO_BETTER}


@pytest.mark.rule("RB-35")
def test_an_explanation_says_what_a_resource_waits_for(fleet: Fleet) -> None:
    three(fleet)
    fleet.admin.add("x")
    explained = fleet.admin.explain("x")
    assert (explained.owner, explained.reason) == (None, "the next allocation is to place it")
    assert explained.waits_for == (f"the next allocation gives it to {explained.next}",)
    fleet.rebalance()
    explained = fleet.admin.explain("x")
    taker = explained.assigned
    assert explained.reason == f"{taker} has yet to take it"
    version = fleet.admin.state().version
    assert explained.waits_for == (
        f"{taker} has yet to take it",
        f"allocation {version} is not completed by {taker}",
    )
    fleet.take()
    assert fleet.admin.explain("x").waits_for == ()
    assert taker is not None
    fleet.admin.drain(taker)
    explained = fleet.admin.explain("x")
    target = explained.next
    assert explained.reason == f"it is to move to {target}; its node is drained"
    assert explained.waits_for == (f"the next allocation gives it to {target}",)
    fleet.rebalance()
    explained = fleet.admin.explain("x")
    assert explained.reason == f"it is to move to {target}"
    assert explained.waits_for[0] == f"{target} waits: {taker} has yet to give it up, its barrier is held"
    fleet.coordinator.perform(Resign(fleet.leader, fleet.leadership, "why not"))
    fleet.admin.remove("x")
    explained = fleet.admin.explain("x")
    assert (explained.owner, explained.reason) == (taker, "it is removed, and its holder has yet to stop")
    fleet.admin.add("y")
    assert fleet.admin.explain("y").reason == "the group has no leader"
    assert fleet.admin.explain("y").waits_for[0] == "the group has no leader"
    with pytest.raises(InvalidArgument, match="no resource 'z'"):
        fleet.admin.explain("z")


@pytest.mark.rule("RB-35")
def test_what_can_t_be_placed_is_explained_node_by_node(fleet: Fleet) -> None:
    three(fleet)
    fleet.admin.add("x", needs=["gpu", "ssd"])
    fleet.join("w4", tags=frozenset({"gpu"}))
    fleet.settle()
    explained = fleet.admin.explain("x")
    status = {each.resource: each.reason for each in fleet.admin.state().resources}
    assert explained.reason == status["x"] == "no node has all of the tags gpu, ssd: the nearest, w4, has gpu"
    assert reasons(explained) == {
        "w1": "it lacks the tags gpu, ssd",
        "w2": "it lacks the tags gpu, ssd",
        "w3": "it lacks the tags gpu, ssd",
        "w4": "it lacks the tag ssd",
    }


@pytest.mark.rule("RB-35")
@given(st.integers(0, 2**32))
def test_whatever_the_group_a_reason_given_holds(seed: int) -> None:
    random = Random(seed)
    labels = (f"w{number}" for number in count())
    with closing(Fleet()) as fleet:
        random_fleet(random, fleet, labels)
        fleet.settle()
        fleet.take()
        group = fleet.coordinator.read().group
        allocation = solve(problem_of(group))
        loads, amounts = allocation.certificate.loads, {n: m.capacity for n, m in group.members.items()}
        owners = fleet.owners()
        for name, spec in group.resources.items():
            explained = fleet.admin.explain(name)
            assert len(explained.nodes) == len(group.members) - (name in owners)
            assert (explained.owner is None) == (name not in owners)
            able = {NO_BETTER, HELD_BACK, TOO_LITTLE}
            for each in explained.nodes:
                member = group.members[each.node]
                limit = amounts[each.node]
                fits = limit is None or loads[each.node] + spec.weight <= limit + 1e-9
                together = {
                    owners.get(other)
                    for other, its in group.resources.items()
                    if spec.spread is not None and its.spread == spec.spread and other != name
                }
                if each.reason in able:
                    assert fits
                    assert spec.needs <= member.tags
                    assert member.label not in together
                elif "lacks" in each.reason:
                    assert not spec.needs <= member.tags
                elif "room" in each.reason or "capacity" in each.reason:
                    assert not fits
