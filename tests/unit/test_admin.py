"""What an operator does to a group, on the memory registry."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from rebalanser import Admin, Group, Policy, Settings, SpreadOver, state
from rebalanser.core.group import Fingerprint, Header, Member, ResourceSpec, Share
from rebalanser.core.group import Group as CoreGroup
from rebalanser.errors import (
    InvalidArgument,
    InvalidName,
    InvalidState,
    NotSettled,
    OutcomeUnknown,
    RegistryUnavailable,
    UnknownGroup,
)
from rebalanser.history import Record, read_records
from rebalanser.registry import GroupView, open_registry
from rebalanser.registry.contract import Put, Reply, Request, Transaction
from rebalanser.registry.registry_coordinator import groups_in
from rebalanser.registry.values import NEWER_PIN
from rebalanser.testing import MemoryRegistry
from rebalanser.testing.waiting import PATIENCE_S, wait_until

QUICK = Settings(min_rebalance_interval_s=0.0)


class Shop:
    """A registry of this test, with an operator and nodes."""

    def __init__(self, stack: ExitStack) -> None:
        self.url = f"memory://{uuid.uuid4().hex}"
        self._stack = stack
        self.admin = stack.enter_context(Admin("group", self.url, timeout_s=PATIENCE_S))

    def node(self, label: str, **settings: Any) -> Group:
        group = Group("group", self.url, node=label, settings=QUICK.model_copy(update=settings))
        group.on_start(lambda _owned: None)
        group.on_stop(lambda _owned: None)
        return self._stack.enter_context(group)


@pytest.fixture
def shop() -> Iterator[Shop]:
    with ExitStack() as stack:
        yield Shop(stack)


@pytest.fixture
def admin(shop: Shop) -> Admin:
    return shop.admin


@pytest.mark.rule("RB-19")
def test_several_threads_wait_for_balance_at_once(shop: Shop) -> None:
    """They share one watch: whoever begins or ends to wait takes it from nobody."""
    shop.admin.add("a")
    with ThreadPoolExecutor(3) as pool:
        with pytest.raises(NotSettled):
            shop.admin.wait_balanced(0)
        waiting = [pool.submit(shop.admin.wait_balanced, PATIENCE_S) for _ in range(3)]
        wait_until(lambda: len(shop.admin._listeners) == 3)
        with pytest.raises(NotSettled):
            shop.admin.wait_balanced(0)
        shop.node("n")
        for each in waiting:
            assert each.result(PATIENCE_S / 2).balanced
    assert shop.admin._listeners == []


def names(admin: Admin) -> list[str]:
    return [resource.resource for resource in admin.resources()]


@pytest.mark.rule("RB-29")
def test_adds_and_removes(admin: Admin) -> None:
    assert admin.add("b", ["a", "c"]) == 3
    assert admin.add("a", "d") == 1
    assert names(admin) == ["a", "b", "c", "d"]
    assert admin.remove(["a", "never"], "b") == 2
    assert admin.remove("a") == 0
    assert names(admin) == ["c", "d"]
    assert admin.add() == admin.remove() == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda admin: admin.drain("n"),
        lambda admin: admin.undrain("n"),
        lambda admin: admin.remove("a"),
        lambda admin: admin.weigh({"a": 2.0}),
    ],
    ids=["drain", "undrain", "remove", "weigh"],
)
@pytest.mark.parametrize("before", ["nothing", "resources that are gone", "a node alone"])
def test_only_a_group_that_is_there_is_changed(
    shop: Shop, change: Callable[[Admin], object], before: str
) -> None:
    if before == "nothing":
        with Admin("other", shop.url) as other:
            other.add("a")
        with pytest.raises(UnknownGroup, match=f"no such group: 'group' in {shop.url}"):
            change(shop.admin)
        with closing(open_registry(shop.url)) as registry:
            assert list(groups_in(registry, "rebalanser", PATIENCE_S)) == ["other"]
        assert not shop.admin.state().exists
        return
    if before == "a node alone":
        shop.node("m")
    else:
        shop.admin.add("a")
        shop.admin.remove("a")
    for _ in range(2):
        change(shop.admin)
    assert shop.admin.state().exists


@pytest.mark.rule("RB-29")
def test_thousands_at_a_time_show_their_progress(admin: Admin) -> None:
    many = [f"resource {number}" for number in range(3000)]
    seen: list[tuple[int, int]] = []
    assert admin.add(many, progress=lambda done, total: seen.append((done, total))) == 3000
    assert seen[-1] == (3000, 3000)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert len(seen) > 10
    assert admin.remove(many, progress=lambda done, total: seen.append((done, total))) == 3000
    assert names(admin) == []


@pytest.mark.rule("RB-29")
def test_says_things_of_resources(admin: Admin) -> None:
    admin.add("a", weight=2.5, pin="worker 1", attributes={"zone": "z1"})
    (resource,) = admin.resources()
    assert (resource.weight, resource.pin, resource.attributes) == (2.5, "worker 1", {"zone": "z1"})
    assert (resource.owner, resource.token, resource.removed) == (None, None, False)
    assert (resource.needs, resource.spread) == ((), None)
    admin.add("a", needs={"ssd", "gpu"}, spread="db")
    admin.add("b", needs="gpu")
    resource, other = admin.resources()
    assert (resource.weight, resource.pin, resource.attributes) == (2.5, "worker 1", {"zone": "z1"})
    assert (resource.needs, resource.spread, other.needs) == (("gpu", "ssd"), "db", ("gpu",))
    admin.add("a", needs=(), spread=None)
    assert (admin.resources()[0].needs, admin.resources()[0].spread) == ((), None)


@pytest.mark.rule("RB-29")
def test_says_another_thing_of_each_resource(admin: Admin) -> None:
    admin.add("a", weight=2.0, pin="n")
    seen: list[tuple[int, int]] = []
    each = {
        "a": {"weight": 3},
        "b": {"needs": ["gpu"]},
        "c": {"weight": 4, "attributes": {"k": "v"}},
        "d": {},
    }
    assert admin.add_each(each, progress=lambda done, total: seen.append((done, total))) == 3
    resources = {each.resource: each for each in admin.resources()}
    assert [resources[name].weight for name in "abcd"] == [3.0, 1.0, 4.0, 1.0]
    assert (resources["a"].pin, resources["b"].needs, resources["c"].attributes) == (
        "n",
        ("gpu",),
        {"k": "v"},
    )
    assert seen[-1] == (4, 4)
    assert seen == sorted(seen)
    assert admin.add_each({}) == 0


@pytest.mark.rule("RB-29")
@pytest.mark.parametrize(
    ("each", "kind", "message"),
    [
        (
            {"b": {"wieght": 2}},
            InvalidArgument,
            "resource 'b': wieght: no resource has such a field; is weight meant",
        ),
        (
            {"b": {"tags": ["gpu"]}},
            InvalidArgument,
            "tags: no resource has such a field; the fields are attributes, needs, pin, spread, weight",
        ),
        ({"b": {"weight": float("nan")}}, InvalidArgument, "resource 'b': weight: .*; nothing was changed"),
        ({"b": {"needs": ["", "x"]}}, InvalidName, "resource 'b': a tag name must not be empty; nothing was"),
        ({"b": {"needs": "gpu;ssd"}}, InvalidName, "tag 'gpu;ssd' has a comma or a semicolon: give each"),
        ({"": {}}, InvalidName, "a resource name must not be empty"),
        (
            {"b": {"needs": {"gpu": False}}},
            InvalidArgument,
            "resource 'b': needs: give a list of tags, not a mapping; nothing",
        ),
        (
            {"b": None},
            InvalidArgument,
            "resource 'b': give a mapping of its fields, not NoneType; nothing was",
        ),
        (
            {"b": ["gpu"]},
            InvalidArgument,
            "resource 'b': give a mapping of its fields, not list; nothing was",
        ),
    ],
)
def test_one_bad_resource_of_many_changes_nothing(
    admin: Admin, each: dict[str, dict[str, Any]], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        admin.add_each({"a": {"weight": 2.0}, **each})
    assert names(admin) == []


def test_many_resources_come_by_their_names(admin: Admin) -> None:
    with pytest.raises(InvalidArgument, match="resources must be a mapping from names, not list"):
        admin.add_each(["a"])  # type: ignore[arg-type]


@pytest.mark.rule("RB-29")
def test_a_mapping_is_no_list_of_names(admin: Admin) -> None:
    with pytest.raises(InvalidArgument, match="pass it to add_each; nothing was changed"):
        admin.add({"a": {"weight": 2.0}})
    assert names(admin) == []


def test_configures_the_policy_field_by_field(shop: Shop) -> None:
    admin = shop.admin
    with pytest.raises(UnknownGroup):
        admin.configure(max_moves=3)
    admin.add("a")
    assert admin.policy() == Policy()
    admin.configure(spread_over="zone", imbalance_band=0.1)
    admin.configure(max_moves=3, move_interval_s=5, cooldown_s=60.0)
    assert admin.policy() == Policy(SpreadOver.ZONE, 0.1, 3, 5.0, 60.0)
    assert admin.state().policy == admin.policy()
    admin.configure(max_moves=None, spread_over=SpreadOver.NODE)
    admin.configure()
    assert admin.policy() == Policy(imbalance_band=0.1, move_interval_s=5.0, cooldown_s=60.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spread_over": "rack"}, "spread_over: Input should be 'node' or 'zone'"),
        ({"imbalance_band": -0.1}, "imbalance_band: Input should be greater than or equal to 0"),
        ({"imbalance_band": float("nan")}, "imbalance_band: Input should be a finite number"),
        ({"max_moves": -1}, "max_moves: Input should be greater than or equal to 0"),
        ({"max_moves": 1.5}, "max_moves: Input should be a valid integer"),
        ({"move_interval_s": float("inf")}, "move_interval_s: Input should be a finite number"),
        ({"cooldown_s": "1"}, "cooldown_s: Input should be a valid number"),
    ],
)
def test_a_policy_out_of_range_changes_nothing(admin: Admin, change: dict[str, Any], message: str) -> None:
    admin.add("a")
    with pytest.raises(InvalidArgument, match=message):
        admin.configure(**{"move_interval_s": 9.0, **change})
    assert admin.policy() == Policy()


@pytest.mark.rule("RB-29")
@pytest.mark.parametrize(
    ("said", "after"),
    [
        ({}, (2.5, "worker 1", {"zone": "z1"})),
        ({"weight": 1.0}, (1.0, "worker 1", {"zone": "z1"})),
        ({"pin": None}, (2.5, None, {"zone": "z1"})),
        ({"attributes": {}}, (2.5, "worker 1", {})),
        ({"attributes": {"disk": "ssd"}}, (2.5, "worker 1", {"disk": "ssd"})),
    ],
)
def test_what_is_not_given_stays_as_it_is(
    admin: Admin, said: dict[str, Any], after: tuple[float, str | None, dict[str, str]]
) -> None:
    admin.add("a", weight=2.5, pin="worker 1", attributes={"zone": "z1"})
    assert admin.add("a", **said) == 0
    (resource,) = admin.resources()
    assert (resource.weight, resource.pin, resource.attributes) == after


@pytest.mark.rule("RB-33")
@pytest.mark.parametrize("bad", ["", "a\nb", "x" * 513, "\ud800"])
@pytest.mark.parametrize("change", ["add", "remove"])
def test_one_bad_name_changes_nothing(admin: Admin, change: str, bad: str) -> None:
    admin.add("kept")
    with pytest.raises(InvalidName, match=r"resource name.*\(number 3 of 4\); nothing was changed"):
        getattr(admin, change)(["kept", "new", bad, "later"])
    assert names(admin) == ["kept"]


@pytest.mark.parametrize("change", ["add", "remove"])
def test_a_resource_given_twice_changes_nothing(admin: Admin, change: str) -> None:
    admin.add("kept")
    with pytest.raises(InvalidName, match="resource 'kept' is given twice; nothing was changed"):
        getattr(admin, change)("kept", ["new", "kept"])
    assert names(admin) == ["kept"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"pin": ""}, "a node name must not be empty"),
        ({"needs": ["gpu", "gpu"]}, "tag 'gpu' is given twice"),
        ({"needs": [""]}, "a tag name must not be empty"),
        ({"spread": ""}, "a spread name must not be empty"),
        ({"attributes": {"": "x"}}, "a resource attribute name must not be empty"),
        ({"attributes": {"zone": "x" * 4097}}, "'zone' has a value of 4097 bytes; the limit is 4096"),
    ],
)
def test_what_can_not_be_said_changes_nothing(admin: Admin, said: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidName, match=message):
        admin.add("a", **said)
    assert names(admin) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda admin: admin.add("a", weight=0.0), r"weight: Input should be greater than 0 \(got 0.0\)"),
        (lambda admin: admin.add("a", weight=float("nan")), "weight: Input should be a finite number"),
        (lambda admin: admin.add("a", weight=float("inf")), "weight: Input should be a finite number"),
        (lambda admin: admin.add("a", weight="2"), r"weight: Input should be a valid number \(got '2'\)"),
        (lambda admin: admin.add("a", weight=True), r"weight: Input should be a valid number \(got True\)"),
        (lambda admin: admin.add("a", needs=5), r"needs.0: Input should be a valid string \(got 5\)"),
        (
            lambda admin: admin.add("a", attributes={"n": 1}),
            r"attributes.n: Input should be a valid string \(got 1\)",
        ),
        (
            lambda admin: admin.add("a", attributes=["n"]),
            r"attributes: Input should be a valid dictionary \(got \['n'\]\)",
        ),
        (lambda admin: admin.weigh({"a": True}), r"weights.a: Input should be a valid number \(got True\)"),
        (lambda admin: admin.weigh("a"), r"weights: Input should be a valid dictionary \(got 'a'\)"),
        (lambda admin: admin.wait_balanced("1"), r"timeout_s: Input should be a valid number \(got '1'\)"),
        (lambda admin: admin.wait_balanced(float("inf")), "timeout_s: Input should be a finite number"),
        (lambda admin: Admin("x", "memory://x", timeout_s="1"), "timeout_s: Input should be a valid number"),
    ],
)
def test_an_argument_of_a_wrong_kind_is_named(
    admin: Admin, call: Callable[[Any], object], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call(admin)
    assert names(admin) == []


def test_a_resource_that_is_no_text_is_refused(admin: Admin) -> None:
    for change in (admin.add, admin.remove):
        for given, kind in ((3, "int"), (["a", 3], "int"), (b"a", "bytes"), (None, "NoneType")):
            with pytest.raises(InvalidName, match=f"a resource name is text, not {kind}"):
                change(given)  # type: ignore[arg-type]


@pytest.mark.rule("RB-2", "RB-19")
def test_waits_until_balanced(shop: Shop) -> None:
    shop.admin.add([f"r{number}" for number in range(10)])
    nodes = [shop.node(label) for label in ("n1", "n2", "n3")]
    state = shop.admin.wait_balanced(PATIENCE_S)
    assert state.balanced
    assert state.completed
    assert sorted(node.held for node in state.nodes) == [3, 3, 4]
    assert [node.label for node in state.nodes] == ["n1", "n2", "n3"]
    assert {node.label for node in state.nodes if node.leader} == {state.leader}
    assert all(node.completed and node.held == node.assigned for node in state.nodes)
    owned = {name: each for node in nodes for name, each in node.resources.items()}
    assert {each.resource: each.token for each in state.resources} == {n: o.token for n, o in owned.items()}
    assert {each.owner for each in state.resources} == {"n1", "n2", "n3"}


@pytest.mark.rule("RB-30")
def test_drains_a_node_and_lets_it_work_again(shop: Shop) -> None:
    shop.admin.add("a", "b", "c", "d")
    first, second = shop.node("n1"), shop.node("n2")
    before = dict(shop.admin.wait_balanced(PATIENCE_S) and second.resources)
    shop.admin.drain("n1")
    state = shop.admin.wait_balanced(PATIENCE_S)
    assert [(node.label, node.held, node.drained) for node in state.nodes] == [
        ("n1", 0, True),
        ("n2", 4, False),
    ]
    assert dict(first.resources) == {}
    assert all(second.resources[name] is owned for name, owned in before.items()), "its work never stopped"
    shop.admin.undrain("n1")
    assert [node.held for node in shop.admin.wait_balanced(PATIENCE_S).nodes] == [2, 2]


@pytest.mark.rule("RB-30")
def test_a_drained_label_stays_drained_until_an_operator_says_otherwise(shop: Shop) -> None:
    shop.admin.add("a", "b")
    shop.node("other")
    gone, node = shop.node("gone:1-c0ffee"), shop.node("worker-1")
    for label in (gone.node, node.node):
        shop.admin.drain(label)
    shop.admin.wait_balanced(PATIENCE_S)
    gone.stop()
    node.stop()
    shop.node("worker-1")
    state = shop.admin.wait_balanced(PATIENCE_S)
    assert [(each.label, each.held) for each in state.nodes] == [("other", 2), ("worker-1", 0)]
    assert state.drained == ("gone:1-c0ffee", "worker-1")
    for label in state.drained:
        shop.admin.undrain(label)
    state = shop.admin.wait_balanced(PATIENCE_S)
    assert [(each.label, each.held) for each in state.nodes] == [("other", 1), ("worker-1", 1)]
    assert state.drained == ()


@pytest.mark.rule("RB-19", "RB-30")
def test_a_group_may_be_balanced_and_own_nothing(shop: Shop) -> None:
    shop.admin.add("a", "b")
    shop.admin.add("c", pin="n9")
    shop.node("n1")
    state = shop.admin.wait_balanced(PATIENCE_S)
    assert (state.owned, state.unowned, state.all_owned) == (2, 1, False)
    assert [each.reason for each in state.resources] == [None, None, "pinned to n9, which is not there"]
    shop.admin.drain("n1")
    shop.admin.drain("n9")
    state = shop.admin.wait_balanced(PATIENCE_S)
    assert (state.owned, state.unowned, state.drained) == (0, 3, ("n1", "n9"))
    assert {each.reason for each in state.resources[:2]} == {"every node is drained"}
    for node in ("n1", "n9"):
        shop.admin.undrain(node)
    shop.admin.remove("c")
    assert shop.admin.wait_balanced(PATIENCE_S).all_owned


@pytest.mark.rule("RB-29")
def test_a_pin_is_kept(shop: Shop) -> None:
    shop.admin.add("a", pin="n2")
    shop.admin.add("b", pin="n9")
    shop.node("n1")
    shop.node("n2")
    state = shop.admin.wait_balanced(PATIENCE_S)
    assert {each.resource: each.owner for each in state.resources} == {"a": "n2", "b": None}


def test_waiting_says_what_is_missing(shop: Shop) -> None:
    shop.admin.add("a")
    with pytest.raises(NotSettled, match=r"'group' is not balanced after 0 s: it has no nodes \(version 0\)"):
        shop.admin.wait_balanced(0)
    may_return = threading.Event()
    slow = Group("group", shop.url, node="slow", settings=QUICK)
    slow.on_start(lambda _owned: may_return.wait(PATIENCE_S) and None)
    slow.on_stop(lambda _owned: None)
    with slow:
        slow.wait_stopped(0)
        with pytest.raises(NotSettled, match="is not balanced after 0 s"):
            shop.admin.wait_balanced(0)
        may_return.set()
        shop.admin.wait_balanced(PATIENCE_S)


@pytest.mark.rule("RB-43")
def test_waiting_says_why_a_leader_resigned(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    state = shop.admin.state().model_copy(update={"trouble": "the leader of term 1 resigned: too large"})
    monkeypatch.setattr(Admin, "state", lambda _: state)
    with pytest.raises(NotSettled, match="no nodes; the leader of term 1 resigned: too large"):
        shop.admin.wait_balanced(0)


@pytest.mark.rule("RB-16")
def test_a_removed_resource_is_shown_while_its_barrier_stands(shop: Shop) -> None:
    shop.admin.add("a")
    may_return = threading.Event()
    slow = Group("group", shop.url, node="slow", settings=QUICK)
    slow.on_start(lambda _owned: None)
    slow.on_stop(lambda _owned: may_return.wait(PATIENCE_S) and None)
    with slow:
        shop.admin.wait_balanced(PATIENCE_S)
        shop.admin.remove("a")
        (resource,) = shop.admin.state().resources
        assert (resource.resource, resource.owner, resource.removed) == ("a", "slow", True)
        assert names(shop.admin) == []
        may_return.set()


def test_an_unknown_outcome_is_tried_again(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    execute, errors = MemoryRegistry.execute, [OutcomeUnknown("no answer")]

    def lose_answers(self: MemoryRegistry, request: Request, timeout_s: float) -> Reply:
        reply = execute(self, request, timeout_s)
        writes = isinstance(request, Transaction) and any(isinstance(each, Put) for each in request.then)
        if writes and errors:
            raise errors.pop()
        return reply

    monkeypatch.setattr(MemoryRegistry, "execute", lose_answers)
    admin.add("a", "b")
    assert errors == []
    assert names(admin) == ["a", "b"]


def test_a_registry_that_stays_away_is_told(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> Reply:
        raise RegistryUnavailable("connection refused")

    monkeypatch.setattr(MemoryRegistry, "execute", fail)
    monkeypatch.setattr(admin, "_timeout_s", 0.01)
    with pytest.raises(RegistryUnavailable, match="connection refused"):
        admin.add("a")


def test_a_closed_connection_is_refused(admin: Admin) -> None:
    admin.close()
    admin.close()
    with pytest.raises(InvalidState, match="the connection to group 'group' is closed"):
        admin.state()


@pytest.mark.parametrize("name", ["", "a\tb"])
def test_a_group_that_can_not_be_named_is_refused(name: str) -> None:
    with pytest.raises(InvalidName, match="group name"):
        Admin(name, "memory://x")


@pytest.mark.rule("RB-29")
def test_a_node_shows_what_it_offers_and_its_load(shop: Shop, tmp_path: Path) -> None:
    shop.admin.add("a", weight=2.5)
    shop.admin.add("b")
    offers = {"capacity": 8.0, "tags": frozenset({"ssd", "gpu"}), "zone": "eu-1", "history_dir": tmp_path}
    group = shop.node("n", **offers)
    (node,) = shop.admin.wait_balanced(PATIENCE_S).nodes
    assert (node.capacity, node.tags, node.zone, node.load) == (8.0, ("gpu", "ssd"), "eu-1", 3.5)
    group.stop()
    records = [each for each in read_records(tmp_path) if isinstance(each, Record)]
    (joined,) = [record for record in records if record.kind == "joined"]
    assert joined.detail == {"capacity": 8.0, "tags": "gpu,ssd", "zone": "eu-1"}


ROOMY, SMALL = Member("1", "roomy", tags=frozenset({"gpu"})), Member("2", "small", capacity=1.0)


@pytest.mark.rule("RB-2")
@pytest.mark.parametrize(
    ("spec", "members", "reason"),
    [
        (ResourceSpec("r", needs=frozenset({"gpu"})), [SMALL], "no node has the tag gpu"),
        (
            ResourceSpec("r", needs=frozenset({"gpu", "ssd"})),
            [ROOMY],
            "no node has all of the tags gpu, ssd: the nearest, roomy, has gpu",
        ),
        (
            ResourceSpec("r", pin="small", needs=frozenset({"gpu"})),
            [ROOMY, SMALL],
            "pinned to small, which lacks the tag gpu",
        ),
        (
            ResourceSpec("r", weight=1.5),
            [SMALL],
            "no node has a capacity of 1.5: small, the largest, has 1",
        ),
        (ResourceSpec("r", weight=0.5), [SMALL], "no node has room for its weight of 0.5"),
        (
            ResourceSpec("r", spread="db"),
            [ROOMY],
            "2 resources with the spread db on 1 node that may own one",
        ),
        (
            ResourceSpec("r", pin=NEWER_PIN),
            [ROOMY],
            "an older Rebalanser changed it, and dropped its needs and its spread: add it again with them",
        ),
    ],
)
def test_an_unowned_resource_has_its_reason(spec: ResourceSpec, members: list[Member], reason: str) -> None:
    owned = ResourceSpec("a", spread="db")
    group = CoreGroup(
        revision=1,
        members={member.node: member for member in members},
        resources={"a": owned, "r": spec},
        drained=frozenset(),
        header=Header(1, 1, 1),
        shares={
            member.node: Share(1, frozenset({"a"}) if member is members[0] else frozenset())
            for member in members
        },
        obsolete_parts=frozenset(),
        acknowledged=dict.fromkeys([member.node for member in members], 1),
        fingerprint=Fingerprint(),
    )
    (_, resource) = state.describe("group", GroupView(group, None, ())).resources
    assert resource.reason == reason
