"""Commands as requests: chunks under the registry's limits, late requests, and names with any text."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count, product
from math import ceil
from random import Random
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebalanser.core.allocation import Allocation, AllocationProblem, balanced, solve
from rebalanser.core.group import Group, Header, Member, Plan, Policy, ResourceSpec, Session
from rebalanser.core.group.leading import RESIGN_AFTER, Leading, intended, problem_of
from rebalanser.core.group.messages import (
    Acknowledge,
    Acknowledged,
    AddBarriers,
    Alive,
    BarriersAdded,
    BarriersRead,
    BarriersRemoved,
    Campaign,
    Command,
    Deposed,
    Elected,
    Failed,
    GroupRead,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Left,
    Outcome,
    Publish,
    Published,
    ReadBarriers,
    ReadGroup,
    ReadShare,
    RecordReleases,
    ReleasesRecorded,
    RemoveBarriers,
    Resign,
    Resigned,
    SessionLost,
    ShareRead,
)
from rebalanser.core.group.types import Fingerprint, Share, SharePart, Topic, TopicKind
from rebalanser.errors import (
    InvalidName,
    LeaseNotFound,
    OutcomeUnknown,
    RebalanserError,
    RegistryUnavailable,
    RequestTooLarge,
    UnusableStore,
)
from rebalanser.registry import RegistryCoordinator, contract, values
from rebalanser.registry.contract import (
    Changed,
    Delete,
    Done,
    Get,
    HistoryLost,
    KeepAlive,
    KeyValue,
    Put,
    Range,
    Reply,
    Request,
    Revoke,
    Stat,
    Transaction,
    WatchEvent,
)
from rebalanser.registry.keys import MAX_NAME_BYTES, GroupKeys, check_name
from rebalanser.registry.leader_scripts import MAX_ERROR_CHARS
from rebalanser.registry.script import Answer, Script, failure
from rebalanser.registry.store import check_transaction
from rebalanser.registry.translation import CHANGES_KEPT, Translation
from rebalanser.settings import Settings
from rebalanser.state import describe
from rebalanser.testing import MEMORY_CAPABILITIES, FakeClock, MemoryRegistry, MemoryStore
from rebalanser.testing.coordinator_suite import FOREIGN
from support.allocation_checker import check

ResultT = TypeVar("ResultT")
OutcomeT = TypeVar("OutcomeT", bound=Outcome)
ODD_NAMES = ("100%", "%2F", "a/b", "a", "a/", "/", "ü", "日本", "*", "a b", "..", "0", "a%2Fb", "🦊")


class Wire:
    """A store, with the means to count requests and to lose some; sent one a second."""

    def __init__(
        self,
        max_operations: int = 128,
        group: str = "g",
        store: MemoryStore | None = None,
        max_request_bytes: int = MEMORY_CAPABILITIES.max_request_bytes,
    ) -> None:
        capabilities = replace(
            MEMORY_CAPABILITIES, max_operations=max_operations, max_request_bytes=max_request_bytes
        )
        self.store = store or MemoryStore(FakeClock(), capabilities)
        self.keys = GroupKeys("root", group)
        self.translation = Translation(self.keys, capabilities)
        self.requests: list[Request] = []
        self.disturb: Callable[[int], RebalanserError | None] = lambda _: None

    def drive(self, script: Script[ResultT]) -> ResultT:
        try:
            request = next(script)
            while True:
                self.requests.append(request)
                error = self.disturb(len(self.requests))
                if error is not None:
                    request = script.throw(error)
                else:
                    request = script.send(Answer(self.reply(request), float(len(self.requests))))
        except StopIteration as stop:
            result: ResultT = stop.value
            return result

    def lose_write(self, number: int) -> list[Request]:
        """Give no answer to the write of this number, and keep it."""
        numbers = count(1)
        on_its_way: list[Request] = []

        def lose(_: int) -> RebalanserError | None:
            request = self.requests[-1]
            assert isinstance(request, Transaction)
            if any(isinstance(each, Put) for each in request.then) and next(numbers) == number:
                on_its_way.append(request)
                return OutcomeUnknown("no answer in time")
            return None

        self.disturb = lose
        return on_its_way

    def reply(self, request: Request) -> Reply:
        return self.store.execute(request)

    def record_replies(self) -> list[Reply]:
        """A list to which every reply from now on is added."""
        replies: list[Reply] = []
        reply = self.reply

        def kept(request: Request) -> Reply:
            replies.append(reply(request))
            return replies[-1]

        self.reply = kept  # type: ignore[method-assign]
        return replies

    def perform(self, command: Command, expected: type[OutcomeT]) -> OutcomeT:
        self.requests = []
        try:
            outcome = self.drive(self.translation.script(command))
        except RebalanserError as error:
            outcome = failure(error)
        assert isinstance(outcome, expected), outcome
        return outcome

    def join(self, node: str = "n-0") -> Session:
        return self.perform(Join(Member(node, node), 10.0), Joined).session

    def add(self, resources: Iterable[str]) -> int:
        specs = [ResourceSpec(name) for name in resources]
        return self.drive(self.translation.put_resources(specs, lambda _: None))

    def lead(self, session: Session) -> tuple[Elected, Group]:
        elected = self.perform(Campaign(session), Elected)
        return elected, self.perform(ReadGroup(session, elected.leadership), GroupRead).group

    def publish(self, session: Session, version: int = 1) -> Header:
        """Lead, and share out everything among all members."""
        elected, group = self.lead(session)
        plan = plan_for(group, version)
        return self.perform(Publish(session, elected.leadership, plan), Published).header

    def adding(self, session: Session, resources: Iterable[str]) -> AddBarriers:
        """The command that adds barriers on the share that the node has."""
        share = self.perform(ReadShare(session), ShareRead).share
        assert share is not None
        return AddBarriers(session, share.version, share.revision, frozenset(resources))

    def under(self, prefix: str) -> list[str]:
        return [entry.key for entry in self.store.items(prefix)]


class Leader:
    """What a node that leads knows, and what it asks of the store."""

    def __init__(self, wire: Wire, session: Session) -> None:
        self.wire = wire
        self.session = session
        self.unsettled: list[frozenset[str] | None] = []
        """What each plan had to look at; None for everything."""
        self.knows = Leading(True, Settings().timings, self._solve)
        self.elect()

    def _solve(self, problem: AllocationProblem) -> Allocation:
        self.unsettled.append(problem.unsettled)
        allocation = solve(problem)
        check(problem, allocation)
        return allocation

    def elect(self) -> None:
        self.leadership = self.wire.perform(Campaign(self.session), Elected).leadership
        self.knows.elected(self.leadership, now=0.0)

    def read(self) -> ReadGroup:
        """Read what it has to, and plan; what was asked."""
        command = self.knows.reading_group(self.session, self.leadership)
        self.learn(command, self.wire.perform(command, GroupRead))
        return command

    def learn(self, command: ReadGroup, outcome: GroupRead) -> None:
        asked = self.knows.group_read(command, outcome, now=0.0)
        self.knows.plan_made(self.knows.make_plan(asked), now=0.0)

    @property
    def plan(self) -> Plan:
        assert self.knows.plan is not None
        return self.knows.plan

    def publish(self) -> Plan:
        plan = self.plan
        done = self.wire.perform(Publish(self.session, self.leadership, plan), Published)
        self.knows.published(done.header, done.shares, now=0.0)
        return plan

    def fail_to_publish(self) -> None:
        """Publish without an answer, as the wire has been told to disturb it."""
        self.wire.perform(Publish(self.session, self.leadership, self.plan), Failed)
        self.wire.disturb = lambda _: None
        self.knows.publish_unknown(self.plan, self.leadership.term)
        self.knows.failed("lost", now=0.0)

    def lead(self) -> None:
        """Read and publish."""
        self.read()
        if self.knows.plan is not None:
            self.publish()

    def hear(self, *events: WatchEvent) -> None:
        for noticed in self.wire.translation.notices(Topic(TopicKind.GROUP), events):
            self.knows.group_noticed(noticed, now=0.0)

    def hear_of(self, key: str) -> None:
        """A watch tells that a key was written by what the store was asked last."""
        self.hear(Changed(key, self.wire.store.revision, b""))

    def beat(self) -> None:
        beat = Heartbeat(self.session, read_fingerprint=True)
        self.knows.seen_alive(self.wire.perform(beat, Alive), now=0.0)

    def shares_of_version(self, version: int) -> set[str]:
        """The nodes whose share that version changed."""
        assert self.knows.group is not None
        return {node for node, share in self.knows.group.shares.items() if share.version == version}

    @property
    def members(self) -> set[str]:
        assert self.knows.group is not None
        return set(self.knows.group.members)

    @property
    def resources(self) -> set[str]:
        assert self.knows.group is not None
        return set(self.knows.group.resources)


def reads_all(wire: Wire, prefix: str) -> bool:
    """True if one of the last requests reads a folder as a whole."""
    return any(
        isinstance(each, Range) and each.prefix == prefix and not each.modified_after
        for request in wire.requests
        if isinstance(request, Transaction)
        for each in request.then
    )


def plan_for(group: Group, version: int) -> Plan:
    shares = balanced(group.members, group.resources, {}, {})
    return Plan(
        version=version,
        based_on=group.header,
        shares=dict.fromkeys(shares, version),
        changed={node: frozenset(share) for node, share in shares.items()},
        obsolete=group.obsolete_after(group.shares.keys()),
        aborted=group.uncommitted,
    )


@pytest.mark.rule("RB-21")
@pytest.mark.parametrize(("renewed_in", "outcome"), [(7, Alive), (6, Failed), (8, Failed)])
def test_only_the_leader_that_proves_a_lease_can_have_renewed_it(
    monkeypatch: pytest.MonkeyPatch, renewed_in: int, outcome: type[Outcome]
) -> None:
    wire = Wire()
    wire.store.proves_renewals = False
    session = wire.join()
    reply = wire.reply

    def of_a_cluster(request: Request) -> Reply:
        answer = reply(request)
        if not isinstance(answer, Done | contract.Outcome):
            return answer
        return replace(answer, term=renewed_in if isinstance(request, KeepAlive) else 7)

    monkeypatch.setattr(wire, "reply", of_a_cluster)
    answered = wire.perform(Heartbeat(session), outcome)
    assert not isinstance(answered, Failed) or answered.unknown, "it may have been renewed all the same"
    assert wire.under(wire.keys.nodes), "the node lives, whoever renewed"
    again = Join(Member(session.node, session.node), 10.0)
    wire.perform(again, Joined if outcome is Alive else Failed)
    assert any(isinstance(request, KeepAlive) for request in wire.requests)


@pytest.mark.rule("RB-13", "RB-28")
def test_of_several_changes_the_latest_is_told() -> None:
    keys = Wire().keys
    events = [contract.Changed(keys.term, revision, b"") for revision in (11, 13, 12)]
    told = Wire().translation.notices(Topic(TopicKind.LEADERSHIP), events)
    assert [(notice.revision, notice.lost) for notice in told] == [(13, False)]


@pytest.mark.rule("RB-45")
@pytest.mark.parametrize("leading", [True, False])
def test_a_heartbeat_moves_under_a_kilobyte_however_large_the_group_is(leading: bool) -> None:
    wire = Wire()
    session = wire.join("node-000")
    for number in range(1, 200):
        wire.join(f"node-{number:03}")
    wire.add(names(2_000))
    wire.publish(session)
    replies = wire.record_replies()
    wire.perform(Heartbeat(session, leader=None if leading else "node-001", read_fingerprint=leading), Alive)
    assert len(repr(wire.requests)) + len(repr(replies)) < 1_000
    assert not any(
        isinstance(each, Stat) and each.prefix == wire.keys.resources
        for request in wire.requests
        if isinstance(request, Transaction)
        for each in request.then
    ), "etcd would look at every resource"


def change_group(wire: Wire, sessions: Sequence[Session], change: str) -> None:
    match change:
        case "added":
            wire.add(["new"])
        case "removed":
            wire.drive(wire.translation.remove_resources([min(names(3_000))], lambda _: None))
        case "drained":
            wire.drive(wire.translation.set_drained("node-007", drained=True))
        case "joined":
            wire.join("zzz")
        case "left":
            wire.perform(Leave(sessions[7]), Left)
        case "released":
            share = wire.perform(ReadShare(sessions[7]), ShareRead).share
            assert share is not None
            record = Member("node-007", "node-007", released=frozenset({min(share.resources)}))
            wire.perform(RecordReleases(sessions[7], record, sessions[7].created), ReleasesRecorded)


@pytest.mark.rule("RB-45")
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("change", ["added", "removed", "drained", "joined", "left", "released"])
def test_a_change_costs_the_leader_and_the_registry_what_changed(change: str, told: bool) -> None:
    """Nothing of it reaches a node whose share stays; some of what a watch missed takes another request."""
    wire = Wire()
    sessions = [wire.join(f"node-{number:03}") for number in range(300)]
    wire.add(names(3_000))
    leader = Leader(wire, sessions[0])
    leader.lead()
    changes: list[Changed] = []
    watch = wire.store.watch(contract.Target("root/", prefix=True), wire.store.revision + 1, changes.extend)
    change_group(wire, sessions, change)
    if told:
        targets = wire.translation.targets(Topic(TopicKind.GROUP))
        leader.hear(*(each for each in changes if any(target.covers(each.key) for target in targets)))
    replies, changes[:] = wire.record_replies(), []
    leader.read()
    assert len(wire.requests) == (1 if told or change in ("joined", "released") else 2)
    whole = change == "left" and not told
    assert len(repr(replies)) < (300_000 if whole else 3_000)
    planned = leader.publish()
    assert len(wire.requests) == 1
    assert len(repr(wire.requests)) < 1_500 * (1 + len(planned.changed))
    assert len(planned.changed) <= 11
    watch.close()
    for session in sessions:
        own = wire.translation.targets(Topic(TopicKind.ALLOCATION, session.node))
        reached = any(target.covers(each.key) for each in changes for target in own)
        gone = session.node not in planned.shares
        assert reached == (session.node in planned.changed or gone)


@pytest.mark.rule("RB-45")
def test_a_plan_looks_only_at_resources_that_changed_since_the_last() -> None:
    wire = Wire()
    leader, other = Leader(wire, wire.join("lead")), wire.join("other")
    wire.add(["r1", "r2", "r3", "r4"])

    def looked_at() -> list[frozenset[str] | None]:
        leader.unsettled.clear()
        leader.read()
        return leader.unsettled

    assert looked_at() == [None]
    leader.publish()
    assert looked_at() == [frozenset()]
    wire.add(["r5"])
    assert looked_at() == [{"r5"}]
    leader.publish()
    wire.drive(wire.translation.remove_resources(["r1"], lambda _: None))
    assert looked_at() == [{"r1"}]
    leader.publish()
    pinned = [ResourceSpec("r2", pin="other"), ResourceSpec("r3", pin="nobody")]
    wire.drive(wire.translation.put_resources(pinned, lambda _: None))
    assert looked_at() == [{"r2", "r3"}]
    leader.publish()
    assert looked_at() == [{"r3"}], "it is on no node"
    wire.perform(Leave(other), Left)
    leader.hear(Changed(wire.keys.node("other"), wire.store.revision, None))
    assert looked_at() == [{"r3"}]
    leader.publish()
    assert looked_at() == [{"r2", "r3"}]
    leader.hear(HistoryLost(wire.store.revision))
    assert looked_at() == [None]


def change_at_random(wire: Wire, leader: Leader, sessions: dict[str, Session], random: Random) -> None:
    some = random.sample([f"r{number}" for number in range(30)], random.randint(1, 6))
    label = f"n{random.randint(1, 5)}"
    match random.choice(["add", "add", "remove", "pin", "drain", "join or leave", "refuse", "lose"]):
        case "add":
            wire.add(some)
        case "remove":
            wire.drive(wire.translation.remove_resources(some, lambda _: None))
        case "pin":
            pins = [ResourceSpec(name, pin=random.choice([None, "lead", label])) for name in some]
            wire.drive(wire.translation.put_resources(pins, lambda _: None))
        case "drain":
            wire.drive(wire.translation.set_drained(label, drained=random.random() < 0.5))
        case "join or leave" if label in sessions:
            left = sessions.pop(label)
            wire.perform(Leave(left), Left)
            leader.hear(Changed(wire.keys.node(left.node), wire.store.revision, None))
        case "join or leave":
            member = Member(f"{label}-{wire.store.revision}", label)
            sessions[label] = wire.perform(Join(member, 10.0), Joined).session
        case "refuse" if label in sessions:
            node = sessions[label].node
            revision = wire.store.items(wire.keys.node(node))[0].mod_revision
            record = Member(node, label, released=frozenset(some))
            wire.perform(RecordReleases(sessions[label], record, revision), ReleasesRecorded)
        case "lose":
            leader.hear(HistoryLost(wire.store.revision))


@pytest.mark.rule("RB-2", "RB-10", "RB-29", "RB-45")
@pytest.mark.parametrize("seed", range(25))
def test_a_leader_that_looks_at_changes_plans_as_one_that_reads_everything(seed: int) -> None:
    wire, random = Wire(), Random(seed)
    leader, sessions = Leader(wire, wire.join("lead")), dict[str, Session]()
    for _ in range(60):
        for _ in range(random.randint(1, 3)):
            change_at_random(wire, leader, sessions, random)
        leader.read()
        if leader.knows.plan is not None and random.random() < 0.2:
            wire.disturb = lambda _: OutcomeUnknown("no answer in time")
            leader.fail_to_publish()
        elif leader.knows.plan is not None:
            leader.publish()
            group = wire.perform(ReadGroup(leader.session, leader.leadership), GroupRead).group
            shares = {node: share.resources for node, share in group.shares.items()}
            assert shares == intended(group, solve(problem_of(group)))
    assert None in leader.unsettled
    assert sum(each is not None for each in leader.unsettled) > 20


@pytest.mark.rule("RB-28")
@pytest.mark.parametrize("told", ["both", "the later", "neither"])
def test_a_leader_reads_every_record_that_was_rewritten(told: str) -> None:
    """The number of members and the newest revision among them do not show that one was rewritten earlier."""
    wire = Wire()
    leader, one, two = (wire.join(name) for name in ("l", "n-1", "n-2"))
    elected, known = wire.lead(leader)
    for session in (one, two):
        record = Member(session.node, session.node, released=frozenset({session.node}))
        wire.perform(RecordReleases(session, record, session.created), ReleasesRecorded)
    keys = {
        "both": {wire.keys.node(one.node), wire.keys.node(two.node)},
        "the later": {wire.keys.node(two.node)},
        "neither": set(),
    }
    command = ReadGroup(leader, elected.leadership, known=known, keys=frozenset(keys[told]))
    group = wire.perform(command, GroupRead).group
    assert {node: set(member.released) for node, member in group.members.items()} == {
        "l": set(),
        "n-1": {"n-1"},
        "n-2": {"n-2"},
    }
    assert len(wire.requests) == 1
    assert not reads_all(wire, wire.keys.nodes)
    again = ReadGroup(leader, elected.leadership, known=group, keys=frozenset(keys["both"]))
    assert wire.perform(again, GroupRead).group == replace(group, revision=wire.store.revision)


@pytest.mark.rule("RB-2", "RB-28")
@pytest.mark.parametrize("then", ["a node joins", "a node leaves and joins", "nothing"])
def test_a_leader_reads_a_rewritten_record_that_no_watch_told_of(then: str) -> None:
    """The next notice is not taken for the only change."""
    wire = Wire()
    leader, releasing, other = Leader(wire, wire.join("lead")), wire.join("releasing"), wire.join("other")
    wire.add(names(6))
    leader.lead()
    assert leader.knows.group is not None
    released = frozenset({min(leader.knows.group.shares["releasing"].resources)})
    replaces = releasing.created
    for recorded in (released, frozenset[str]()):
        record = Member("releasing", "releasing", released=recorded)
        replaces = wire.perform(RecordReleases(releasing, record, replaces), ReleasesRecorded).revision
        match then:
            case "a node joins":
                leader.hear_of(wire.keys.node(wire.join(f"joined-{replaces}").node))
            case "a node leaves and joins":
                wire.perform(Leave(other), Left)
                leader.hear(Changed(wire.keys.node("other"), wire.store.revision, None))
                other = wire.join("other")
                leader.hear_of(wire.keys.node("other"))
        leader.beat()
        assert leader.knows.rebalance_at is not None
        leader.lead()
        assert not reads_all(wire, wire.keys.nodes)
        group = leader.knows.group
        assert group is not None
        assert group.members["releasing"].released == recorded
        assert recorded.isdisjoint(group.shares["releasing"].resources)
        leader.beat()
        assert leader.knows.rebalance_at is None, "nothing is left to read"


@pytest.mark.rule("RB-2")
def test_a_record_of_a_node_that_never_heard_of_releases_names_none() -> None:
    old = b'{"schema":1,"label":"n","mode":"cooperative","may_lead":true,"host":"h","pid":1,"attributes":{}}'
    assert values.load_member("n-0", KeyValue("k", old, 1, 1)) == Member("n-0", "n", host="h", pid=1)
    assert b"refused" not in values.dump_member(Member("n-0", "n")), "nor is there more to read for it"


def test_records_have_the_bytes_that_they_had_if_they_say_nothing_new() -> None:
    member = Member("n-0", "n", host="h", pid=1, attributes={"k": "v"})
    assert values.dump_member(member) == (
        b'{"attributes":{"k":"v"},"host":"h","label":"n","may_lead":true,"mode":"cooperative","pid":1,"schema":1}'
    )
    spec = ResourceSpec("a", 2.0, "n", {"k": "v"})
    assert values.dump_resource(spec) == b'{"attributes":{"k":"v"},"pin":"n","weight":2.0}'
    assert values.dump_resource(ResourceSpec("a")) == b""


GPU = frozenset({"gpu"})


@pytest.mark.rule("RB-46")
@pytest.mark.parametrize("new", [{"needs": GPU}, {"spread": "db"}, {"needs": GPU, "spread": "db"}])
@pytest.mark.parametrize("pin", [None, "n"])
def test_a_leader_that_knows_no_needs_leaves_such_a_resource_unowned(
    new: dict[str, Any], pin: str | None
) -> None:
    spec = ResourceSpec("a", 2.0, pin, {"k": "v"}, **new)
    value = values.dump_resource(spec)
    assert values.load_resource("a", KeyValue("k", value, 1, 1)) == spec
    assert values.is_constrained(value)
    known = {
        name: each for name, each in json.loads(value).items() if name in {"weight", "pin", "attributes"}
    }
    seen = values.load_resource("a", KeyValue("k", json.dumps(known).encode(), 1, 1))
    assert seen == ResourceSpec("a", 2.0, seen.pin, {"k": "v"})
    with pytest.raises(InvalidName, match="unprintable"):
        check_name(seen.pin or "", "node")
    mended = values.dump_resource(replace(seen, **new))
    assert values.load_resource("a", KeyValue("k", mended, 1, 1)) == replace(spec, pin=None)


@pytest.mark.rule("RB-46")
def test_a_leader_that_knows_no_capacity_sets_such_a_member_aside() -> None:
    member = Member("n-0", "n", capacity=2.0, tags=GPU, zone="eu-1")
    assert json.loads(values.dump_member(member))["schema"] == 2
    assert json.loads(values.dump_member(replace(member, capacity=None)))["schema"] == 1
    assert values.load_member("n-0", KeyValue("k", values.dump_member(member), 1, 1)) == member


@pytest.mark.rule("RB-45")
def test_after_a_change_of_the_policy_any_resource_may_move() -> None:
    wire = Wire()
    session = wire.join()
    wire.add(["a", "b"])
    leadership = wire.perform(Campaign(session), Elected).leadership
    known = wire.perform(ReadGroup(session, leadership), GroupRead).group
    wire.add(["c"])
    read = wire.perform(ReadGroup(session, leadership, known), GroupRead)
    assert read.changed == {"c"}
    wire.drive(wire.translation.set_policy(Policy(max_moves=1), frozenset({"max_moves"})))
    read = wire.perform(ReadGroup(session, leadership, read.group), GroupRead)
    assert (read.changed, read.group.policy) == (None, Policy(max_moves=1))
    assert read.read is not None, "that is no reason to read the whole group"


@pytest.mark.rule("RB-45")
@pytest.mark.parametrize(("members", "counted"), [(1, 12), (127, 12), (128, 6), (300, 4)])
def test_of_many_members_a_leader_counts_a_part_with_each_heartbeat(members: int, counted: int) -> None:
    wire = Wire()
    sessions = [wire.join(f"n-{number}") for number in range(members)]
    leading = Leading(True, Settings().timings, solve)
    elected, group = wire.lead(sessions[0])
    assert not leading.next_beat_reads_fingerprint(), "it does not lead"
    leading.elected(elected.leadership, now=0.0)
    leading.group_read(ReadGroup(sessions[0], elected.leadership), GroupRead(group), now=0.0)
    assert sum(leading.next_beat_reads_fingerprint() for _ in range(12)) == counted


@pytest.mark.rule("RB-45")
@pytest.mark.parametrize(
    ("requests", "keys", "whole"),
    [
        (CHANGES_KEPT, 1, False),
        (CHANGES_KEPT + 1, 1, True),
        (1, 3_000, True),
        (1, 300, True),
        (1, 200, False),
    ],
)
def test_a_leader_that_missed_much_reads_the_whole_group(requests: int, keys: int, whole: bool) -> None:
    wire = Wire(max_operations=4_000)
    session = wire.join()
    wire.add(names(1_000))
    elected, known = wire.lead(session)
    for request in range(requests):
        wire.add(f"{request} {key}" for key in range(keys))
    assert len(wire.under(wire.keys.changes)) <= CHANGES_KEPT
    group = wire.perform(ReadGroup(session, elected.leadership, known), GroupRead).group
    assert len(group.resources) == 1_000 + requests * keys
    assert reads_all(wire, wire.keys.resources) == whole


@pytest.mark.rule("RB-45", "RB-46")
def test_what_others_write_past_the_operators_is_read_where_a_watch_tells_of_it() -> None:
    wire = Wire()
    session = wire.join()
    wire.add(["r"])
    elected, known = wire.lead(session)
    keys = [wire.keys.resource(name) for name in ("r", "s")]
    for value in (b"what no Rebalanser wrote", b""):
        wire.store.execute(Transaction(then=tuple(Put(key, value) for key in keys)))
        command = ReadGroup(session, elected.leadership, known, keys=frozenset(keys))
        known = wire.perform(command, GroupRead).group
        assert known.resources.keys() == {"r", "s"}
        assert known.unreadable.keys() == (set(keys) if value else set())
    wire.store.execute(Transaction(then=tuple(map(Delete, keys))))
    command = ReadGroup(session, elected.leadership, known, keys=frozenset(keys))
    assert wire.perform(command, GroupRead).group.resources == {}


@pytest.mark.rule("RB-9", "RB-45")
@pytest.mark.parametrize(
    "told",
    ["at once", "one by one", "while it reads", "after it has read", "while all is read", "of no loss"],
)
def test_a_leader_whose_watch_missed_changes_reads_the_whole_group_and_then_increments(told: str) -> None:
    """One node left and one joined: as many members as before, and the next that joins is the newest."""
    wire = Wire()
    leader, leaving = Leader(wire, wire.join("lead")), wire.join("leaving")
    wire.add(["r1", "r2", "r3", "r4"])
    leader.lead()
    if told == "while all is read":
        leader.hear(HistoryLost(wire.store.revision + 1))
        wire.add(["r5"])
    asked = leader.knows.reading_group(leader.session, leader.leadership)
    early = wire.perform(asked, GroupRead)
    wire.perform(Leave(leaving), Left)
    wire.join("missed")
    lost = HistoryLost(wire.store.revision)
    wire.join("told")
    joined = Changed(wire.keys.node("told"), wire.store.revision, b"")
    match told:
        case "at once":
            leader.hear(lost, joined)
        case "one by one":
            leader.hear(lost)
            leader.hear(HistoryLost(1))
            leader.hear(joined)
        case "while it reads" | "while all is read":
            leader.hear(lost)
            leader.hear(joined)
            leader.learn(asked, early)
        case "after it has read":
            leader.hear(joined)
            leader.lead()
            leader.hear(lost)
        case "of no loss":
            leader.hear(joined)
    assert leader.knows.rebalance_at is not None
    leader.lead()
    assert leader.members == {"lead", "missed", "told"}
    wire.add(["r6"])
    leader.beat()
    assert leader.read().known is not None
    assert "r6" in leader.resources


@pytest.mark.rule("RB-45", "RB-46")
@pytest.mark.parametrize("told", ["after it has read", "while it reads"])
def test_a_key_that_somebody_repairs_is_read_however_late_a_watch_tells(told: str) -> None:
    """A node joins at the same time, and the leader reads because of that."""
    wire = Wire()
    leader, junk = Leader(wire, wire.join("lead")), wire.keys.resource("junk")
    wire.add(["r"])
    wire.store.execute(Transaction(then=(Put(junk, b"what no Rebalanser wrote"),)))
    leader.lead()
    repaired = wire.store.execute(Transaction(then=(Delete(junk),)))
    assert isinstance(repaired, contract.Outcome)
    wire.join("joined")
    leader.hear_of(wire.keys.node("joined"))
    asked = leader.knows.reading_group(leader.session, leader.leadership)
    outcome = wire.perform(asked, GroupRead)
    if told == "while it reads":
        leader.hear(Changed(junk, repaired.revision, None))
    leader.learn(asked, outcome)
    if told == "after it has read":
        assert "junk" in leader.resources
        assert leader.knows.rebalance_at is None
        leader.hear(Changed(junk, repaired.revision, None))
    assert leader.knows.rebalance_at is not None
    leader.read()
    assert leader.resources == {"r"}
    assert leader.knows.group is not None
    assert not leader.knows.group.unreadable
    leader.hear(Changed(junk, repaired.revision, None))
    assert leader.knows.rebalance_at is None, "it is told of what it has read"


@pytest.mark.rule("RB-45")
def test_an_older_notice_of_a_key_takes_no_newer_one_s_place() -> None:
    wire = Wire()
    leader = Leader(wire, wire.join("lead"))
    leader.lead()
    asked = leader.knows.reading_group(leader.session, leader.leadership)
    outcome = wire.perform(asked, GroupRead)
    key = wire.keys.resource("by hand")
    wire.store.execute(Transaction(then=(Put(key, b""),)))
    leader.hear_of(key)
    leader.hear(Changed(key, outcome.group.revision, b""))
    leader.learn(asked, outcome)
    leader.read()
    assert leader.resources == {"by hand"}


@pytest.mark.rule("RB-45")
def test_what_a_watch_told_of_is_read_though_a_reading_fails() -> None:
    wire = Wire()
    leader = Leader(wire, wire.join("lead"))
    leader.lead()
    key = wire.keys.resource("by hand")
    wire.store.execute(Transaction(then=(Put(key, b""),)))
    leader.hear_of(key)
    leader.knows.reading_group(leader.session, leader.leadership)
    leader.knows.failed("refused", now=0.0)
    leader.read()
    assert leader.resources == {"by hand"}


@pytest.mark.rule("RB-45")
@pytest.mark.parametrize("lost", [False, True])
def test_acknowledgements_are_read_once_their_notices_end_and_not_while_they_come(lost: bool) -> None:
    """Each heartbeat sees a newer one; all of them are as many as there are members (RB-19)."""
    wire = Wire()
    sessions = [wire.join(f"node-{number}") for number in range(20)]
    leader = Leader(wire, sessions[0])
    wire.add(names(40))
    leader.lead()
    for session in sessions:
        wire.perform(Acknowledge(session, 1, session.created), Acknowledged)
        if not (lost and session is sessions[7]):
            leader.knows.acknowledged(session.node, 1, now=0.0)
            leader.beat()
            assert leader.knows.rebalance_at is None
    assert leader.knows.newly_completed() == (None if lost else 1)
    leader.beat()
    assert (leader.knows.rebalance_at is not None) == lost
    if lost:
        assert leader.read().reread_acknowledgements
        assert leader.knows.newly_completed() == 1
        assert not leader.read().reread_acknowledgements


@pytest.mark.rule("RB-19", "RB-45")
@pytest.mark.parametrize("junk", [False, True])
def test_of_acknowledgements_that_were_missed_only_later_ones_are_read(junk: bool) -> None:
    """All of them are read if the leader knows of an unreadable one, which may be gone meanwhile."""
    wire = Wire()
    sessions = [wire.join(f"node-{number:03}") for number in range(300)]
    if junk:
        wire.store.execute(Transaction(then=(Put(wire.keys.acks + "junk", b"junk"),)))
    leader = Leader(wire, sessions[0])
    wire.add(names(600))
    leader.lead()
    revisions = {
        session: wire.perform(Acknowledge(session, 1, session.created), Acknowledged).revision
        for session in sessions
    }
    leader.beat()
    leader.read()
    assert leader.knows.newly_completed() == 1
    if junk:
        wire.store.execute(Transaction(then=(Delete(wire.keys.acks + "junk"),)))
    wire.add(["new"])
    wire.perform(Leave(sessions[-1]), Left)
    leader.hear(Changed(wire.keys.node(sessions[-1].node), wire.store.revision, None))
    leader.lead()
    late = next(each for each in sessions if each.node in leader.shares_of_version(2))
    for session in sessions:
        if session is not late and session.node in leader.shares_of_version(2):
            leader.knows.acknowledged(session.node, 2, now=0.0)
            wire.perform(Acknowledge(session, 2, revisions[session]), Acknowledged)
    leader.beat()
    assert leader.knows.rebalance_at is None, "notices come"
    wire.perform(Acknowledge(late, 2, revisions[late]), Acknowledged)
    replies = wire.record_replies()
    leader.beat()
    assert leader.read().reread_acknowledgements
    assert reads_all(wire, wire.keys.acks) == junk
    assert (len(repr(replies)) < 5_000) != junk
    assert leader.knows.group is not None
    assert leader.knows.group.acknowledged.keys() == leader.knows.group.members.keys()
    assert leader.knows.group.unreadable == {}
    assert leader.knows.newly_completed() == 2


@pytest.mark.rule("RB-19")
def test_a_new_leader_learns_what_the_members_have_completed() -> None:
    wire = Wire()
    first, second = wire.join("first"), wire.join("second")
    before = Leader(wire, first)
    before.lead()
    for session in (first, second):
        wire.perform(Acknowledge(session, 1, session.created), Acknowledged)
    wire.perform(Resign(first, before.leadership, "failures"), Resigned)
    leader = Leader(wire, second)
    leader.read()
    assert leader.knows.newly_completed() == 1


@pytest.mark.rule("RB-45", "RB-46")
@pytest.mark.parametrize("name", ["", "9", "zz", "00000000000000000001x", f"{10**30}"])
def test_what_stands_among_the_records_of_changes_costs_no_reading_of_all(name: str) -> None:
    wire = Wire()
    leader = Leader(wire, wire.join("lead"))
    wire.add(names(1_000))
    leader.lead()
    wire.store.execute(Transaction(then=(Put(wire.keys.changes + name, b"x"),)))
    wire.add(["new"])
    leader.read()
    assert "new" in leader.resources
    assert not reads_all(wire, wire.keys.resources)


@pytest.mark.rule("RB-5", "RB-46")
def test_a_key_of_a_node_without_a_name_leaves_no_group_without_a_leader() -> None:
    """A leader that has resigned has no name either (RB-43)."""
    wire = Wire()
    first, second = wire.join("first"), wire.join("second")
    wire.store.execute(Transaction(then=(Put(wire.keys.nodes, b"x"),)))
    leadership = wire.perform(Campaign(first), Elected).leadership
    wire.perform(Resign(first, leadership, "failures"), Resigned)
    assert wire.perform(Campaign(second), Elected).leadership.leader == "second"


@pytest.mark.rule("RB-45")
@pytest.mark.parametrize("change", ["a member", "its newest member", "an unreadable member", "a drain"])
def test_what_goes_leaves_nothing_in_doubt(change: str) -> None:
    """The next heartbeat finds the group as the leader knows it, and the leader has read one key."""
    wire = Wire()
    leader = Leader(wire, wire.join("lead"))
    sessions = [wire.join(name) for name in ("first", "newest")]
    junk, drain = wire.keys.nodes + "junk", f"{wire.keys.drains}%ff"
    wire.store.execute(Transaction(then=(Put(junk, b"junk"), Put(drain, b""))))
    last = wire.join("last")
    leader.lead()
    match change:
        case "a member":
            key = wire.keys.node("first")
            wire.perform(Leave(sessions[0]), Left)
        case "its newest member":
            key = wire.keys.node("last")
            wire.perform(Leave(last), Left)
        case "an unreadable member":
            key = junk
            wire.store.execute(Transaction(then=(Delete(junk),)))
        case _:
            key = drain
            wire.store.execute(Transaction(then=(Put(drain, b"again"),)))
    leader.hear_of(key)
    leader.read()
    assert not reads_all(wire, wire.keys.nodes)
    beside = {"a member": "first", "its newest member": "last"}.get(change)
    assert leader.members == {"lead", "first", "newest", "last"} - {beside}
    group = leader.knows.group
    assert group is not None
    assert (junk in group.unreadable) == (change != "an unreadable member")
    assert group.drained == frozenset()
    wire.perform(Acknowledge(leader.session, 1, leader.session.created), Acknowledged)
    leader.knows.acknowledged("lead", 1, now=0.0)
    leader.beat()
    assert leader.knows.rebalance_at is None


@pytest.mark.rule("RB-45", "RB-46")
def test_members_that_are_read_again_as_a_whole_are_as_they_are_now() -> None:
    """A watch told of none: neither of one that joined nor of a key that somebody deleted."""
    wire = Wire()
    leader, junk = Leader(wire, wire.join("lead")), wire.keys.nodes + "junk"
    wire.store.execute(Transaction(then=(Put(junk, b"junk"),)))
    leader.lead()
    wire.store.execute(Transaction(then=(Delete(junk),)))
    wire.join("joined")
    wire.join("again")
    leader.read()
    group = leader.knows.group
    assert group is not None
    assert leader.members == {"lead", "joined", "again"}
    assert not group.unreadable
    assert (
        group.fingerprint == wire.perform(Heartbeat(leader.session, read_fingerprint=True), Alive).fingerprint
    )
    leader.hear_of(wire.keys.node("joined"))
    assert leader.knows.rebalance_at is None, "it is told of what it has read"


@pytest.mark.rule("RB-9", "RB-45")
def test_what_a_watch_tells_while_it_is_read_is_not_read_twice() -> None:
    wire = Wire()
    leader = Leader(wire, wire.join("lead"))
    leader.lead()
    wire.add(["r"])
    asked = leader.knows.reading_group(leader.session, leader.leadership)
    outcome = wire.perform(asked, GroupRead)
    leader.hear_of(wire.keys.resource("r"))
    leader.learn(asked, outcome)
    assert leader.knows.rebalance_at is None


@pytest.mark.rule("RB-9", "RB-45")
def test_a_member_that_leaves_between_two_rounds_of_a_reading_is_not_in_it() -> None:
    wire, other = Wire(), Wire()
    other.store = wire.store
    leader, leaving = Leader(wire, wire.join("lead")), wire.join("leaving")
    wire.join("stays")
    leader.lead()
    wire.add(["r"])
    leader.hear_of(wire.keys.node("leaving"))

    def exchange(number: int) -> None:
        if number == 2:
            other.perform(Leave(leaving), Left)
            other.join("joined")

    wire.disturb = exchange
    leader.read()
    assert len(wire.requests) == 3
    assert leader.members == {"lead", "stays", "joined"}


@pytest.mark.rule("RB-45")
@pytest.mark.parametrize("keys", [40, 41, 100])
def test_many_changed_keys_are_read_in_requests_that_keep_the_limits(keys: int) -> None:
    wire = Wire(max_operations=60, max_request_bytes=6_000)
    leader = Leader(wire, wire.join("lead"))
    wire.add(names(1_000))
    leader.lead()
    added = [f"{number:03}{'x' * 300}" for number in range(keys)]
    wire.add(added)
    leader.read()
    assert leader.resources == {*names(1_000), *added}
    assert not reads_all(wire, wire.keys.resources)
    for request in wire.requests:
        assert isinstance(request, Transaction)
        check_transaction(request, wire.store.capabilities)
        assert sum(len(each.key) for each in request.then if isinstance(each, Get)) < 6_000


@pytest.mark.rule("RB-9")
def test_a_node_waits_for_the_header_of_the_first_publication_too() -> None:
    wire, leader, sessions = _group_of_twelve()
    leader.read()
    wire.disturb = lambda _: OutcomeUnknown("lost") if writes_header(wire) else None
    leader.fail_to_publish()
    read = wire.perform(ReadShare(sessions[0]), ShareRead)
    assert read.share is None
    assert read.pending


@pytest.mark.rule("RB-9", "RB-45")
def test_a_leader_that_committed_knows_what_it_wrote() -> None:
    """Also after a leader that gave up: its versions are aborted, and nothing is left of its shares."""
    wire, before, sessions = _group_of_twelve()
    before.read()
    wire.disturb = lambda _: OutcomeUnknown("lost") if writes_header(wire) else None
    before.fail_to_publish()
    wire.perform(Resign(before.session, before.leadership, "lost"), Resigned)
    leader = Leader(wire, sessions[1])
    leader.read()
    assert leader.publish().aborted
    assert leader.knows.group is not None
    assert not leader.knows.group.obsolete_parts
    leader.read()
    assert len(wire.requests) == 1
    assert not reads_all(wire, wire.keys.shares)


@pytest.mark.rule("RB-9", "RB-45")
@pytest.mark.parametrize("stays", [True, False])
def test_all_parts_of_a_share_that_was_replaced_are_deleted(stays: bool) -> None:
    """Also if its node has never read another."""
    wire = Wire(max_request_bytes=6_000)
    leader, other = Leader(wire, wire.join("lead")), wire.join("other")
    wire.add(uuid.UUID(int=Random(number).getrandbits(128)).hex for number in range(2_000))
    leader.lead()
    assert len(parts_of(wire)) > 10
    if stays:
        wire.drive(wire.translation.set_drained("other", drained=True))
    else:
        wire.perform(Leave(other), Left)
    leader.lead()
    assert {part.version for part in parts_of(wire)} == {2}


@pytest.mark.rule("RB-9", "RB-45")
def test_a_leader_reads_on_while_operators_go_on() -> None:
    """What an operator changes between two requests of a reading is in it, or it is read as a whole."""
    wire, other = Wire(max_operations=12), Wire(max_operations=12)
    other.store = wire.store
    session = wire.join()
    elected, known = wire.lead(session)
    for changes in (1, 3, 100):
        numbers = count(1)

        def add(_: int, numbers: Iterator[int] = numbers, changes: int = changes) -> None:
            number = next(numbers)
            if number <= changes:
                other.add([f"{changes} {number} {part}" for part in range(20)])

        other.add([f"{changes} first"])
        wire.disturb = add
        group = wire.perform(ReadGroup(session, elected.leadership, known), GroupRead).group
        wire.disturb = lambda _: None
        stored = {wire.keys.name(key, wire.keys.resources) for key in other.under(other.keys.resources)}
        assert group.resources.keys() == stored


REFUSED = RegistryUnavailable("refused")


@pytest.mark.rule("RB-26")
@pytest.mark.parametrize(
    ("answers", "unknown"),
    [
        ([REFUSED], False),
        ([OutcomeUnknown("no answer")], True),
        ([None, REFUSED], True),
        ([LeaseNotFound("gone"), REFUSED], True),
        ([LeaseNotFound("gone"), None], True),
    ],
)
def test_a_heartbeat_had_no_effect_only_if_its_keep_alive_was_never_sent(
    answers: list[RebalanserError | None], unknown: bool
) -> None:
    """Else a node that leaves would not wait for a lease that it has just renewed."""
    wire = Wire()
    wire.store.proves_renewals = False
    session = wire.join()
    wire.disturb = lambda number: answers[number - 1]
    assert wire.perform(Heartbeat(session), Failed).unknown is unknown


@pytest.mark.rule("RB-21")
@pytest.mark.parametrize(("proves_renewals", "requests"), [(True, 1), (False, 2)])
def test_a_heartbeat_renews_and_proves_in_one_request_where_the_registry_can(
    proves_renewals: bool, requests: int
) -> None:
    wire = Wire()
    wire.store.proves_renewals = proves_renewals
    session = wire.join()
    alive = wire.perform(Heartbeat(session), Alive)
    assert len(wire.requests) == requests
    assert alive.proven_at == 1.0, "the instant before the renewal was sent"


@pytest.mark.rule("RB-21", "RB-22")
@pytest.mark.parametrize("proves_renewals", [True, False])
def test_a_lease_that_lives_proves_nothing_once_the_nodes_key_is_gone(proves_renewals: bool) -> None:
    wire = Wire()
    wire.store.proves_renewals = proves_renewals
    session = wire.join()
    key = wire.keys.node(session.node)
    wire.reply(Transaction(then=(Delete(key),)))
    wire.perform(Heartbeat(session), SessionLost)
    wire.reply(Transaction(then=(Put(key, b"another's", session.lease),)))
    wire.perform(Heartbeat(session), SessionLost)
    assert session.lease in wire.store.leases


class LowersItsLimit(MemoryRegistry):
    """A registry that takes shorter transactions one day, as if another member of it answered then."""

    takes = MEMORY_CAPABILITIES.max_operations

    @property
    def capabilities(self) -> contract.Capabilities:
        return replace(MEMORY_CAPABILITIES, max_operations=self.takes)

    def execute(self, request: Request, timeout_s: float) -> Reply:
        transaction = request.proof if isinstance(request, KeepAlive) else request
        if isinstance(transaction, Transaction):
            check_transaction(transaction, self.capabilities)
        return super().execute(request, timeout_s)


@pytest.mark.rule("RB-3")
def test_requests_that_are_too_long_all_at_once_are_made_anew_as_shorter_ones() -> None:
    """Nodes must not take a limit that they kept for a fault of their configuration, and stop."""
    registry = LowersItsLimit(MemoryStore(FakeClock()))
    group = RegistryCoordinator(registry, "root", "g", lambda: 0.0, 1.0)
    joined = group.perform(Join(Member("n-0", "n-0"), 10.0))
    assert isinstance(joined, Joined)
    specs = [ResourceSpec(name) for name in names(100)]
    registry.takes = 16
    with pytest.raises(RegistryUnavailable, match="takes 16 operations in a transaction now"):
        group.put_resources(specs, lambda _: None)
    assert group.put_resources(specs, lambda _: None) == 100
    beat = Heartbeat(joined.session, blockers=frozenset(f"n-{number}" for number in range(14)))
    assert isinstance(group.perform(beat), Alive)
    registry.takes = 12
    failed = group.perform(beat)
    assert isinstance(failed, Failed)
    assert not failed.fatal
    assert isinstance(group.perform(beat), Alive)


def test_a_request_that_no_limit_explains_is_refused_for_good() -> None:
    class TakesNone(MemoryRegistry):
        def execute(self, request: Request, timeout_s: float) -> Reply:
            raise RequestTooLarge("too many bytes")

    group = RegistryCoordinator(TakesNone(MemoryStore(FakeClock())), "root", "g", lambda: 0.0, 1.0)
    failed = group.perform(Heartbeat(Session("n-0", 1, 1)))
    assert isinstance(failed, Failed)
    assert failed.fatal


def names(count: int) -> frozenset[str]:
    return frozenset(f"resource-{index:05}" for index in range(count))


@pytest.mark.rule("RB-29")
@pytest.mark.parametrize("max_operations", [16, 128])
def test_a_thousand_barriers_take_as_few_transactions_as_the_limit_allows(max_operations: int) -> None:
    wire = Wire(max_operations)
    session = wire.join()
    wire.add(names(1000))
    header = wire.publish(session)
    added = wire.perform(AddBarriers(session, header.version, header.revision, names(1000)), BarriersAdded)
    assert added.added.keys() == names(1000)
    assert len(wire.requests) == ceil(1000 / (max_operations - 4))
    assert len(set(added.added.values())) == len(wire.requests)
    mine = wire.perform(ReadBarriers(session, names(1000)), BarriersRead)
    assert mine.mine == added.added
    wire.perform(RemoveBarriers(session, added.added), BarriersRemoved)
    assert len(wire.requests) == ceil(1000 / (max_operations - 4))
    assert wire.under(wire.keys.barriers) == []


@pytest.mark.rule("RB-29")
def test_ten_thousand_resources_are_added_with_progress_and_only_once() -> None:
    wire = Wire()
    progress: list[int] = []
    specs = [ResourceSpec(name) for name in sorted(names(10_000))]
    assert wire.drive(wire.translation.put_resources(specs, progress.append)) == 10_000
    assert progress[0] == 0
    assert progress == sorted(progress)
    assert progress[-1] == 10_000
    assert len(progress) > 50
    assert len(wire.requests) == len(progress), "a reading, and as many writes as the limit makes of it"
    assert wire.drive(wire.translation.put_resources(specs, progress.append)) == 0
    assert progress[-1] == 10_000


@pytest.mark.rule("RB-29")
def test_a_small_change_reads_nothing_of_the_rest_of_the_group() -> None:
    wire = Wire()
    wire.add(names(2_000))
    answered = wire.record_replies()
    few = sorted(names(3))
    assert (
        wire.drive(wire.translation.put_resources([ResourceSpec(n) for n in ["new", *few]], lambda _: None))
        == 1
    )
    assert wire.drive(wire.translation.weigh_resources(dict.fromkeys(few, 2.0), lambda _: None)) == 3
    assert wire.drive(wire.translation.remove_resources([*few, "absent"], lambda _: None)) == 3
    assert len(repr(answered)) < 4_000
    group = wire.drive(wire.translation.read()).group
    assert len(group.resources) == 1_998


@pytest.mark.rule("RB-9")
@pytest.mark.rule("RB-5", "RB-6")
def test_a_leader_whose_term_is_over_is_told_so_whatever_it_asks() -> None:
    wire = Wire()
    one, two = wire.join("one"), wire.join("two")
    wire.add("a")
    elected, group = wire.lead(one)
    wire.perform(Resign(one, elected.leadership, "it can't read"), Resigned)
    wire.lead(two)
    before = wire.store.revision
    for command in (
        ReadGroup(one, elected.leadership),
        Publish(one, elected.leadership, plan_for(group, 1)),
        Resign(one, elected.leadership, "once more"),
    ):
        wire.perform(command, Deposed)
    assert wire.store.revision == before


def test_a_publish_that_fits_is_one_transaction() -> None:
    wire = Wire()
    session = wire.join()
    wire.add(names(10))
    wire.publish(session)
    assert len(wire.requests) == 1


@pytest.mark.rule("RB-9")
def test_a_publish_that_does_not_fit_is_committed_by_its_header() -> None:
    wire = Wire(max_operations=8)
    leader = wire.join("n-0")
    sessions = [leader, *(wire.join(f"n-{index}") for index in range(1, 12))]
    wire.add(names(24))
    elected, group = wire.lead(leader)
    publish = Publish(leader, elected.leadership, plan_for(group, 1))
    wire.disturb = lambda count: OutcomeUnknown("lost") if count == 3 else None
    assert wire.perform(publish, Failed).unknown
    assert wire.under(wire.keys.shares) != []
    assert wire.perform(ReadShare(sessions[3]), ShareRead).share is None
    wire.disturb = lambda _: None

    group = wire.perform(ReadGroup(leader, elected.leadership), GroupRead).group
    assert group.header is None
    assert group.obsolete_parts
    plan = plan_for(group, 2)
    wire.perform(Publish(leader, elected.leadership, plan), Published)
    assert len(wire.requests) > 2
    shares = [wire.perform(ReadShare(session), ShareRead).share for session in sessions]
    owned = [name for share in shares if share is not None for name in share.resources]
    assert sorted(owned) == sorted(names(24))
    assert wire.under(wire.keys.shares) == sorted(wire.keys.share(SharePart(s.node, 2)) for s in sessions)


@pytest.mark.rule("RB-9", "RB-43")
def test_leaders_that_fail_leave_no_more_than_the_last_of_them_did() -> None:
    """Each fails at its header, after its shares are written, and no leader ever publishes."""
    wire = Wire(max_operations=8)
    sessions = [wire.join(f"n-{index}") for index in range(12)]
    wire.add(names(24))
    stored = []
    for session in sessions[:6]:
        leader = Leader(wire, session)
        for _ in range(RESIGN_AFTER):
            leader.read()
            wire.disturb = lambda _: OutcomeUnknown("lost") if writes_header(wire) else None
            leader.fail_to_publish()
        wire.perform(Resign(session, leader.leadership, "lost"), Resigned)
        stored.append(len(wire.under(wire.keys.shares)))
    assert stored == [RESIGN_AFTER * len(sessions)] * 6


def writes_header(wire: Wire) -> bool:
    request = wire.requests[-1]
    return isinstance(request, Transaction) and any(
        isinstance(each, Put) and each.key == wire.keys.header for each in request.then
    )


def _group_of_twelve() -> tuple[Wire, Leader, list[Session]]:
    """A group whose allocation takes several requests, its leader and its members."""
    wire = Wire(max_operations=8)
    sessions = [wire.join(f"n-{index:02}") for index in range(12)]
    wire.add(names(24))
    return wire, Leader(wire, sessions[0]), sessions


@pytest.mark.rule("RB-9")
def test_a_publication_of_unknown_outcome_finds_its_shares_however_late_it_is() -> None:
    """This leader's next attempt, of the same term, has begun meanwhile and got no answer either."""
    wire, leader, sessions = _group_of_twelve()
    headers: list[Request] = []
    for _ in range(2):
        leader.read()
        wire.disturb = lambda _: OutcomeUnknown("lost") if writes_header(wire) else None
        leader.fail_to_publish()
        headers.append(wire.requests[-1])
    wire.store.execute(headers[0])
    share = wire.perform(ReadShare(sessions[0]), ShareRead).share
    assert share is not None
    assert share.version == 1


@pytest.mark.rule("RB-9")
def test_a_leader_elected_again_in_its_term_leaves_what_it_wrote_in_it() -> None:
    """A watch that lost its history deposes it; a publication of unknown outcome may still come."""
    wire, leader, sessions = _group_of_twelve()
    late: list[Request] = []
    for _ in range(2):
        leader.elect()
        leader.read()
        assert not leader.plan.orphaned
        wire.disturb = lambda _: OutcomeUnknown("lost") if writes_header(wire) else None
        leader.fail_to_publish()
        late.append(wire.requests[-1])
        leader.knows.deposed()
    wire.store.execute(late[0])
    assert wire.perform(ReadShare(sessions[0]), ShareRead).share is not None


def shares_of(wire: Wire, sessions: Iterable[Session]) -> dict[str, Share | None]:
    """What each node reads as its share."""
    return {each.node: wire.perform(ReadShare(each), ShareRead).share for each in sessions}


@pytest.mark.rule("RB-9")
@pytest.mark.parametrize("lands", ["before the read", "before the commit", "after it", "after the next"])
def test_shares_of_a_version_that_was_given_up_are_nobodys_however_late_they_come(lands: str) -> None:
    wire, leader, sessions = _group_of_twelve()

    def land(now: str) -> None:
        if now == lands:
            wire.store.execute(late[0])

    leader.lead()
    want = shares_of(wire, sessions)
    wire.add(f"more-{number}" for number in range(12))
    leader.read()
    late = wire.lose_write(1)
    leader.fail_to_publish()
    wire.drive(wire.translation.remove_resources([f"more-{n}" for n in range(12)], lambda _: None))
    land("before the read")
    leader.read()
    land("before the commit")
    leader.publish()
    land("after it")
    assert shares_of(wire, sessions) == want
    wire.drive(wire.translation.set_drained("n-11", drained=True))
    leader.read()
    leader.publish()
    land("after the next")
    leader.read()
    assert leader.knows.group is not None
    assert shares_of(wire, sessions) == leader.knows.group.shares
    assert not any(part.version == 2 for part in parts_of(wire)), "they are deleted"


@pytest.mark.rule("RB-9")
def test_shares_that_came_late_stay_void_though_nobody_deletes_them() -> None:
    """They come between the shares and the header of the next publication, whose leader stops after it."""
    wire, leader, sessions = _group_of_twelve()
    leader.lead()
    wire.add(f"more-{number}" for number in range(12))
    leader.read()
    late = wire.lose_write(1)
    leader.fail_to_publish()
    wire.drive(wire.translation.remove_resources([f"more-{n}" for n in range(12)], lambda _: None))
    leader.read()
    wire.store.execute(late[0])
    leader.publish()
    wire.drive(wire.translation.set_drained("n-11", drained=True))
    leader.read()
    committed: list[int] = []

    def stop(number: int) -> RebalanserError | None:
        if committed:
            return RegistryUnavailable("stopped")
        committed.extend([number] * writes_header(wire))
        return None

    wire.disturb = stop
    leader.fail_to_publish()
    owned = [name for share in shares_of(wire, sessions).values() if share for name in share.resources]
    assert sorted(owned) == sorted(names(24))


def parts_of(wire: Wire) -> list[SharePart]:
    return [wire.keys.share_part(key) for key in wire.under(wire.keys.shares)]


@pytest.mark.rule("RB-9", "RB-29")
@pytest.mark.parametrize("lost", [0, 1, 2, 6, 11, 12])
def test_a_share_larger_than_a_request_is_stored_in_parts(lost: int) -> None:
    """Whichever request has no answer, and takes effect late, the next attempt leaves nothing else behind."""
    wire = Wire(max_request_bytes=6_000)
    session = wire.join("a")
    everything = frozenset(uuid.UUID(int=Random(number).getrandbits(128)).hex for number in range(1_000))
    wire.add(everything)
    elected, group = wire.lead(session)
    wire.requests = []
    wire.disturb = lambda count: OutcomeUnknown("lost") if count == lost else None
    first = Publish(session, elected.leadership, plan_for(group, 1))
    wire.perform(first, Failed if lost else Published)
    late = wire.requests[-1]
    wire.disturb = lambda _: None

    group = wire.perform(ReadGroup(session, elected.leadership), GroupRead).group
    second = wire.perform(Publish(session, elected.leadership, plan_for(group, 2)), Published)
    share = wire.perform(ReadShare(session), ShareRead).share
    assert share == Share(2, everything)
    assert share.parts > 10
    assert wire.perform(wire.adding(session, ["any"]), BarriersAdded).added.keys() == {"any"}
    if lost:
        wire.store.execute(late)

    group = wire.perform(ReadGroup(session, elected.leadership), GroupRead).group
    assert group.shares == {"a": Share(2, everything)}
    assert {part.version for part in group.obsolete_parts} <= {1}
    plan = replace(plan_for(group, 3), based_on=second.header, changed={"a": frozenset("few")})
    wire.perform(Publish(session, elected.leadership, plan), Published)
    assert wire.perform(ReadShare(session), ShareRead).share == Share(3, frozenset("few"))
    assert parts_of(wire) == [SharePart("a", 3)]


@pytest.mark.rule("RB-14", "RB-3")
def test_what_acts_on_an_earlier_share_is_late_once_the_node_has_read_another() -> None:
    """Though the leader has not removed the earlier share yet, and while a third allocation is written."""
    wire = Wire(max_operations=10)
    sessions = [wire.join(f"n-{number:02}") for number in range(12)]
    first = sessions[0]
    wire.add(names(12))
    elected, group = wire.lead(first)
    wire.perform(Publish(first, elected.leadership, plan_for(group, 1)), Published)
    late = [wire.adding(session, names(12)) for session in sessions]
    for version, lost in ((2, 4), (3, 2)):  # after its shares and header, and after some of its shares
        group = wire.perform(ReadGroup(first, elected.leadership), GroupRead).group
        plan = plan_for(group, version)
        wire.disturb = lambda count, lost=lost: OutcomeUnknown("lost") if count == lost else None  # type: ignore[misc]
        wire.perform(Publish(first, elected.leadership, plan), Failed)
        wire.disturb = lambda _: None
    assert {part.version for part in parts_of(wire)} == {1, 2, 3}

    assert wire.perform(late[1], BarriersAdded).added.keys() == names(12), "nobody has read the next one"
    for session in sessions:
        share = wire.perform(ReadShare(session), ShareRead).share
        assert share is not None
        assert share.version == 2
    assert {part.version for part in parts_of(wire)} == {2, 3}, "of what is being written nothing is removed"
    for command in late:
        outcome = wire.perform(command, BarriersAdded)
        assert (outcome.superseded, outcome.added) == (True, {})


def test_a_session_that_ends_while_it_removes_earlier_shares_is_lost() -> None:
    wire = Wire()
    session = wire.join()
    wire.publish(session)
    wire.store.execute(Transaction(then=(Put(wire.keys.share(SharePart(session.node, 0)), b""),)))

    def end(count: int) -> None:
        if count == 2:
            wire.store.execute(Revoke(session.lease))

    wire.disturb = end
    wire.perform(ReadShare(session), SessionLost)


@pytest.mark.parametrize("missing", [0, 1, -1])
def test_a_share_without_one_of_its_parts_is_never_taken_for_whole(missing: int) -> None:
    wire = Wire(max_request_bytes=6_000)
    session = wire.join("a")
    wire.add(uuid.UUID(int=Random(number).getrandbits(128)).hex for number in range(1_000))
    wire.publish(session)
    wire.store.execute(Transaction(then=(Delete(wire.keys.share(sorted(parts_of(wire))[missing])),)))
    if missing == 0:
        assert wire.perform(ReadShare(session), ShareRead).share is None, "as while it is being deleted"
    else:
        assert "holds what no Rebalanser wrote" in wire.perform(ReadShare(session), Failed).error


@pytest.mark.rule("RB-14")
@pytest.mark.parametrize("error", [RegistryUnavailable("refused"), OutcomeUnknown("no answer")])
def test_adding_that_fails_half_way_tells_what_it_added(error: RebalanserError) -> None:
    wire = Wire(max_operations=16)
    session = wire.join()
    wire.add(names(30))
    header = wire.publish(session)
    wire.disturb = lambda count: error if count == 2 else None
    some = wire.perform(AddBarriers(session, header.version, header.revision, names(30)), BarriersAdded)
    assert 0 < len(some.added) < 30
    assert set(some.added.values()) == {some.revision}
    assert bool(some.unknown) == isinstance(error, OutcomeUnknown)
    assert not some.unknown & some.added.keys()
    rest = names(30) - some.added.keys()
    wire.disturb = lambda count: error if count == 1 else None
    assert wire.perform(AddBarriers(session, header.version, header.revision, rest), Failed).unknown == bool(
        some.unknown
    )
    wire.disturb = lambda _: None
    assert (
        wire.perform(AddBarriers(session, header.version, header.revision, rest), BarriersAdded).added.keys()
        == rest
    )


@pytest.mark.rule("RB-14")
def test_adding_that_a_newer_allocation_ends_half_way_tells_what_it_added() -> None:
    wire = Wire(max_operations=16)
    session = wire.join()
    wire.add(names(30))
    header = wire.publish(session)

    def publish_another(count: int) -> None:
        if count == 2:
            Wire(16, store=wire.store).publish(session, version=2)

    wire.disturb = publish_another
    some = wire.perform(AddBarriers(session, header.version, header.revision, names(30)), BarriersAdded)
    assert some.superseded
    assert 0 < len(some.added) < 30
    assert set(some.added.values()) == {some.revision}


@pytest.mark.rule("RB-11", "RB-15")
def test_removing_that_fails_half_way_is_unknown_as_a_whole() -> None:
    wire = Wire(max_operations=16)
    session = wire.join()
    wire.add(names(30))
    wire.publish(session)
    added = wire.perform(wire.adding(session, names(30)), BarriersAdded).added
    wire.disturb = lambda count: RegistryUnavailable("refused") if count == 2 else None
    assert wire.perform(RemoveBarriers(session, added), Failed).unknown
    wire.disturb = lambda count: RegistryUnavailable("refused") if count == 1 else None
    assert not wire.perform(RemoveBarriers(session, added), Failed).unknown


@pytest.mark.rule("AU-4", "RB-12")
def test_each_chunk_of_a_removal_is_told_at_its_own_revision() -> None:
    """Who adds barriers between two chunks has tokens above the removals before, and only above those."""
    wire = Wire(max_operations=16)
    session, next_session = wire.join("n-0"), wire.join("n-1")
    wire.add(names(30))
    wire.publish(session)
    added = wire.perform(wire.adding(session, names(30)), BarriersAdded).added
    theirs: dict[str, int] = {}

    def add_what_is_free(count: int) -> None:
        if count > 1:
            other = Wire(16, store=wire.store)
            free = names(30) - theirs.keys()
            theirs.update(other.perform(other.adding(next_session, free), BarriersAdded).added)

    wire.disturb = add_what_is_free
    removed = wire.perform(RemoveBarriers(session, added), BarriersRemoved)
    assert len(wire.requests) == 3
    assert len(theirs) == 24
    assert removed.removed_at.keys() == names(30)
    assert all(removed.removed_at[name] < token for name, token in theirs.items())
    assert len(set(removed.removed_at.values())) == 3
    assert removed.revision == max(removed.removed_at.values()) > min(theirs.values())


@pytest.mark.rule("AU-4", "RB-15")
@pytest.mark.parametrize("takes_effect", [True, False])
def test_what_an_earlier_attempt_may_have_removed_has_no_revision(takes_effect: bool) -> None:
    wire = Wire()
    session = wire.join()
    wire.add(names(5))
    wire.publish(session)
    added = wire.perform(wire.adding(session, names(5)), BarriersAdded).added

    def lose(_count: int) -> OutcomeUnknown:
        if takes_effect:
            wire.reply(wire.requests[-1])
        return OutcomeUnknown("lost")

    wire.disturb = lose
    assert wire.perform(RemoveBarriers(session, added), Failed).unknown
    wire.disturb = lambda _: None
    removed = wire.perform(RemoveBarriers(session, added), BarriersRemoved)
    assert removed.resources == names(5)
    assert removed.removed_at == ({} if takes_effect else dict.fromkeys(names(5), removed.revision))


@pytest.mark.rule("RB-4")
@pytest.mark.lesson(6)
def test_registering_again_after_a_lost_answer_makes_no_second_member() -> None:
    wire = Wire()
    join = Join(Member("n-0", "n"), 10.0)
    script = wire.translation.script(join)
    granted = wire.reply(next(script))
    registration = script.send(Answer(granted, 0.0))
    wire.reply(registration)
    with pytest.raises(OutcomeUnknown):
        script.throw(OutcomeUnknown("no answer"))
    session = wire.perform(join, Joined).session
    assert [r.lease for r in wire.requests if isinstance(r, Revoke)] == [session.lease + 1], "the spare one"
    assert wire.under(wire.keys.nodes) == [wire.keys.node("n-0")]
    assert session.created == wire.store.items(wire.keys.nodes)[0].create_revision
    wire.perform(ReadShare(session), ShareRead)


@pytest.mark.rule("RB-3", "RB-5")
def test_a_campaign_that_an_earlier_attempt_of_its_own_overtook_is_won() -> None:
    wire = Wire()
    session = wire.join()
    late, again = (wire.translation.script(Campaign(session)) for _ in range(2))
    attempts = [script.send(Answer(wire.reply(next(script)), 0.0)) for script in (late, again)]
    wire.reply(attempts[0])
    with pytest.raises(StopIteration) as ended:
        again.send(Answer(wire.reply(attempts[1]), 0.0))
    assert isinstance(ended.value.value, Elected)
    assert ended.value.value.leadership.term == 1


@pytest.mark.rule("RB-19")
def test_a_late_acknowledgement_never_replaces_a_newer_one() -> None:
    wire = Wire()
    session = wire.join()
    late = next(wire.translation.script(Acknowledge(session, 1, session.created)))
    acknowledged = wire.perform(Acknowledge(session, 2, session.created), Acknowledged)
    wire.reply(late)
    assert wire.perform(Acknowledge(session, 3, session.created), Acknowledged) == acknowledged
    assert acknowledged.version == 2
    assert wire.perform(Acknowledge(session, 3, acknowledged.revision), Acknowledged).version == 3


@pytest.mark.rule("RB-15", "RB-20", "RB-26")
def test_after_leaving_nothing_of_the_session_is_left_and_nothing_it_sends_takes_effect() -> None:
    wire = Wire()
    session = wire.join()
    wire.add(["r"])
    header = wire.publish(session)
    add = AddBarriers(session, header.version, header.revision, frozenset({"r"}))
    wire.perform(add, BarriersAdded)
    wire.perform(Leave(session), Left)
    assert wire.under(wire.keys.nodes) == wire.under(wire.keys.barriers) == wire.under(wire.keys.acks) == []
    wire.perform(add, SessionLost)
    wire.perform(Acknowledge(session, 1, session.created), SessionLost)
    wire.perform(RemoveBarriers(session, {"r": 1}), SessionLost)
    wire.perform(ReadBarriers(session, frozenset({"r"})), SessionLost)


@pytest.mark.rule("RB-4", "RB-26")
def test_a_late_copy_of_its_registration_makes_no_member_of_a_node_that_leaves() -> None:
    wire = Wire()
    session = wire.join()
    registration = wire.requests[-1]

    def deliver_late(_: int) -> None:
        with suppress(RebalanserError):
            wire.store.execute(registration)
        members = wire.store.items(wire.keys.nodes)
        assert {each.create_revision for each in members} <= {session.created}

    wire.disturb = deliver_late
    wire.perform(Leave(session), Left)
    deliver_late(0)
    assert wire.under(wire.keys.nodes) == []


@pytest.mark.rule("RB-16")
@pytest.mark.lesson(10)
def test_removing_a_resource_leaves_its_barrier() -> None:
    wire = Wire()
    session = wire.join()
    wire.add(["r"])
    other = wire.join("m-0")
    wire.publish(session)
    token = wire.perform(wire.adding(session, ["r"]), BarriersAdded).added["r"]
    assert wire.drive(wire.translation.remove_resources(["r"], lambda _: None)) == 1
    wire.add(["r"])
    assert wire.store.items(wire.keys.barrier("r"))[0].create_revision == token
    refused = wire.perform(wire.adding(other, ["r"]), BarriersAdded)
    assert refused.blocked == {"r": "n-0"}


@pytest.mark.rule("RB-43")
def test_why_a_leader_resigned_is_told_until_a_later_one_rebalanced() -> None:
    wire = Wire()

    def trouble() -> str | None:
        return describe("g", wire.drive(wire.translation.read())).trouble

    def resign(session: Session, elected: Elected, error: str) -> None:
        wire.perform(Resign(session, elected.leadership, error), Resigned)

    one, two = wire.join("one"), wire.join("two")
    wire.add("a")
    elected, _ = wire.lead(one)
    assert trouble() is None
    resign(one, elected, "RequestTooLarge: " + 1_000 * "x")
    told = "the leader of term 1 resigned: RequestTooLarge: "
    assert trouble() == told + (MAX_ERROR_CHARS - len("RequestTooLarge: ")) * "x"
    elected, _ = wire.lead(two)
    assert (trouble() or "").startswith(told), "whoever leads next has done nothing yet"
    wire.publish(two)
    assert trouble() is None
    assert not describe("g", wire.drive(wire.translation.read())).balanced, "nobody has acknowledged yet"
    resign(two, elected, "http://ann:secret@host refused /\udcff.db")
    assert trouble() == r"the leader of term 2 resigned: http://ann:***@host refused /\udcff.db"
    for session in (one, two):
        read = wire.perform(ReadShare(session), ShareRead)
        assert read.header is not None
        found = wire.store.items(wire.keys.ack(session.node))[0].mod_revision
        wire.perform(Acknowledge(session, read.header.version, found), Acknowledged)
    assert trouble() is None, "it is balanced all the same"


OPERATIONS: Mapping[str, Callable[[Translation], Script[object]]] = MappingProxyType(
    {
        "add": lambda translation: translation.put_resources(_specs(5), lambda _: None),
        "add heavier": lambda translation: translation.put_resources(_specs(5, 2.0), lambda _: None),
        "remove": lambda translation: translation.remove_resources(
            [s.resource for s in _specs(5)], lambda _: None
        ),
        "weigh": lambda translation: translation.weigh_resources(
            {s.resource: 3.0 for s in _specs(5)}, lambda _: None
        ),
        "drain": lambda translation: translation.set_drained("label", drained=True),
        "undrain": lambda translation: translation.set_drained("label", drained=False),
    }
)
"""What an operator may ask; on resources in several transactions."""


def _specs(count: int, weight: float = 1.0) -> list[ResourceSpec]:
    return [ResourceSpec(f"resource-{number}", weight) for number in range(count)]


@pytest.mark.rule("RB-44")
@pytest.mark.parametrize("again", [False, True], ids=["given up", "asked again"])
@pytest.mark.parametrize("later", OPERATIONS)
@pytest.mark.parametrize("late", OPERATIONS)
def test_a_late_request_of_an_operator_undoes_no_later_one(late: str, later: str, again: bool) -> None:
    """Whichever of its writes it is that had no answer, and whatever there was."""
    for before, lost in product((None, *OPERATIONS), range(1, 5)):
        wire = Wire(max_operations=6)
        if before is not None:
            wire.drive(OPERATIONS[before](wire.translation))
        on_its_way = wire.lose_write(lost)
        with suppress(OutcomeUnknown):
            wire.drive(OPERATIONS[late](wire.translation))
        wire.disturb = lambda _: None
        assert on_its_way or lost > 1
        if again:
            wire.drive(OPERATIONS[late](wire.translation))
        wire.drive(OPERATIONS[later](wire.translation))
        done = wire.store.items()
        for request in on_its_way:
            wire.store.execute(request)
        assert wire.store.items() == done, (before, lost)


@pytest.mark.rule("RB-44")
@pytest.mark.parametrize("later", OPERATIONS)
@pytest.mark.parametrize("late", OPERATIONS)
def test_an_operator_request_holds_though_a_late_one_arrives_while_it_is_carried_out(
    late: str, later: str
) -> None:
    """Making it again changes nothing: so it was carried out as a whole, after the late one or without it."""
    for before, arrives in product((None, *OPERATIONS), range(2, 5)):
        wire = Wire(max_operations=6)
        if before is not None:
            wire.drive(OPERATIONS[before](wire.translation))
        on_its_way = wire.lose_write(1)
        with suppress(OutcomeUnknown):
            wire.drive(OPERATIONS[late](wire.translation))
        assert on_its_way
        wire.requests = []

        def arrive(number: int, at: int = arrives, late: Request = on_its_way[0], wire: Wire = wire) -> None:
            if number == at:
                wire.store.execute(late)

        wire.disturb = arrive
        wire.drive(OPERATIONS[later](wire.translation))
        wire.disturb = lambda _: None
        done = {entry.key: entry.value for entry in wire.store.items()}
        wire.drive(OPERATIONS[later](wire.translation))
        assert {entry.key: entry.value for entry in wire.store.items()} == done, (before, arrives)


@pytest.mark.rule("RB-44")
def test_an_operator_is_told_if_others_come_before_each_of_its_tries() -> None:
    wire = Wire()

    def meddle(number: int) -> RebalanserError | None:
        wire.store.execute(Transaction(then=(Put(wire.keys.operator, str(number).encode()),)))
        return None

    wire.disturb = meddle
    for operate in OPERATIONS.values():
        with pytest.raises(RegistryUnavailable, match="other operator requests kept coming first"):
            wire.drive(operate(wire.translation))
    assert wire.under(wire.keys.prefix) == [wire.keys.operator]


@pytest.mark.rule("RB-33")
def test_names_may_hold_any_printable_text() -> None:
    wire = Wire(group="50% / ü")
    session = wire.join("worker/1 %")
    assert wire.add(ODD_NAMES) == len(ODD_NAMES)
    _, group = wire.lead(session)
    assert set(group.resources) == set(ODD_NAMES)
    assert set(group.members) == {"worker/1 %"}
    header = wire.publish(session)
    added = wire.perform(
        AddBarriers(session, header.version, header.revision, frozenset(ODD_NAMES)), BarriersAdded
    )
    assert set(added.added) == set(ODD_NAMES)
    share = wire.perform(ReadShare(session), ShareRead).share
    assert share is not None
    assert share.resources == frozenset(ODD_NAMES)
    view = wire.drive(wire.translation.read())
    assert {holding.resource for holding in view.holdings} == set(ODD_NAMES)
    for label in ODD_NAMES:
        wire.drive(wire.translation.set_drained(label, drained=True))
    assert wire.drive(wire.translation.read()).group.drained == set(ODD_NAMES)


@pytest.mark.rule("RB-33")
@pytest.mark.parametrize(
    ("one", "other"), [("a", "a/b"), ("a", "ab"), ("a", "a%2F"), ("a/", "a"), ("%", "%25")]
)
def test_no_groups_keys_are_under_anothers(one: str, other: str) -> None:
    first = Wire(group=one)
    second = Wire(group=other, store=first.store)
    first.add(["r1", "nodes/x"])
    second.add(["r2"])
    assert set(first.drive(first.translation.read()).group.resources) == {"r1", "nodes/x"}
    assert set(second.drive(second.translation.read()).group.resources) == {"r2"}
    assert not first.keys.prefix.startswith(second.keys.prefix)
    assert not second.keys.prefix.startswith(first.keys.prefix)


@pytest.mark.rule("RB-33")
@pytest.mark.parametrize(
    "name", ["", "a\nb", "\x00", "\ud800", "x" * (MAX_NAME_BYTES + 1), "é" * MAX_NAME_BYTES]
)
def test_what_cannot_be_stored_is_refused(name: str) -> None:
    with pytest.raises(InvalidName):
        check_name(name, "resource")


def test_every_request_keeps_the_limits_of_a_small_registry() -> None:
    wire = Wire(max_operations=8)
    session = wire.join()
    wire.add(names(40))
    header = wire.publish(session)
    wire.perform(AddBarriers(session, header.version, header.revision, names(40)), BarriersAdded)
    assert all(len(r.then) <= 8 for r in wire.requests if isinstance(r, Transaction))


@pytest.mark.rule("RB-46")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        *FOREIGN,
        ("nodes/a/b", values.dump_member(Member("b", "b"))),
        ("nodes/%ff", values.dump_member(Member("b", "b"))),
        ("barriers/r0", b"x"),
    ],
)
def test_what_no_rebalanser_wrote_is_told_of_and_left_alone(key: str, value: bytes) -> None:
    wire = Wire()
    session = wire.join()
    wire.add(["r0", "r1"])
    wire.publish(session)
    before = wire.drive(wire.translation.read())
    key = wire.keys.prefix + key
    wire.store.execute(Transaction(then=(Put(key, value),)))
    after = wire.drive(wire.translation.read())
    assert after.group.unreadable.keys() == {key}
    alike = {"revision": 0, "unreadable": {}, "fingerprint": Fingerprint()}
    assert replace(after.group, **alike) == replace(before.group, **alike)
    assert after.holdings == before.holdings
    wire.perform(ReadShare(session), ShareRead)
    wire.publish(session, version=2)
    kept = wire.store.get(key)
    assert kept is not None
    assert kept.value == value


@pytest.mark.rule("RB-46")
@pytest.mark.parametrize(
    "value", [b"[]", b"\xff", b'{"weight":"x"}', b'{"weight":-1}', b'{"attributes":5}', b'{"schema":2}']
)
def test_a_resource_whose_value_can_not_be_read_stays_a_resource(value: bytes) -> None:
    wire = Wire()
    wire.add(["r0"])
    wire.store.execute(Transaction(then=(Put(wire.keys.resource("r0"), value),)))
    group = wire.drive(wire.translation.read()).group
    assert group.resources == {"r0": ResourceSpec("r0")}
    assert group.unreadable.keys() == {wire.keys.resource("r0")}


@pytest.mark.rule("RB-46")
def test_a_share_that_is_not_there_is_published_anew() -> None:
    wire = Wire()
    session = wire.join()
    wire.add(["r0"])
    wire.publish(session)
    for entry in wire.store.items(wire.keys.shares):
        wire.store.execute(Transaction(then=(Delete(entry.key),)))
    assert wire.perform(ReadShare(session), ShareRead).share is None
    wire.publish(session, version=2)
    share = wire.perform(ReadShare(session), ShareRead).share
    assert share is not None
    assert share.resources == {"r0"}


@given(
    st.one_of(
        st.text("a/%2F:é~\u20ac", min_size=1), st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
    )
)
def test_a_name_is_written_as_in_a_url_and_read_back(name: str) -> None:
    keys = GroupKeys("root", "g")
    assert keys.resource(name) == f"root/g/resources/{quote(name, safe='')}"
    assert keys.name(keys.resource(name), keys.resources) == name
    assert keys.resource_of_barrier(keys.barrier(name)) == name


@pytest.mark.rule("RB-46")
@pytest.mark.parametrize("written", ["", "a/b", "a b", "%41", "%2f", "%2", "%", "%E9", "%2F/", "é", "a\n"])
def test_a_key_that_no_name_is_written_as_is_refused(written: str) -> None:
    keys = GroupKeys("root", "g")
    with pytest.raises(UnusableStore, match="no Rebalanser wrote"):
        keys.name(keys.resources + written, keys.resources)


@pytest.mark.rule("RB-33", "RB-46")
def test_a_group_whose_keys_would_be_among_anothers_is_refused() -> None:
    GroupKeys("root", "shares")
    GroupKeys("a/b", "shares of b")
    with pytest.raises(InvalidName, match="among those of the group 'b' under 'a'"):
        GroupKeys("a/b", "shares")


@pytest.mark.parametrize(
    "load",
    [
        values.load_leadership,
        values.load_header,
        values.load_acknowledgement,
        lambda entry: values.load_member("n-0", entry),
        lambda entry: values.load_resource("r", entry),
        lambda entry: values.load_share(1, [entry]),
    ],
)
@pytest.mark.parametrize("value", [b"hello", b"[]", b"\xff"])
def test_what_no_rebalanser_wrote_is_named_for_a_person_to_repair(
    load: Callable[[KeyValue], object], value: bytes
) -> None:
    with pytest.raises(UnusableStore, match="some key"):
        load(KeyValue("root/g/some key", value, 1, 1))


@pytest.mark.rule("RB-46")
@pytest.mark.parametrize(
    ("load", "value"),
    [
        (values.load_header, b'{"version":"1","term":1,"void":[]}'),
        (values.load_header, b'{"version":1,"term":1,"void":["1"]}'),
        (values.load_leadership, b'{"term":1.0,"leader":"n-0"}'),
        (values.load_leadership, b'{"term":1,"leader":null}'),
    ],
)
def test_a_value_of_wrong_types_is_named(load: Callable[[KeyValue], object], value: bytes) -> None:
    with pytest.raises(UnusableStore, match=r"some key.*: Input should be a valid"):
        load(KeyValue("root/g/some key", value, 1, 1))
