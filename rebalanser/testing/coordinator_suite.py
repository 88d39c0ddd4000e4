"""The conformance suite for coordinators: a backend that passes it may run the protocol.

A backend's tests implement a ``CoordinatorHarness`` and subclass ``CoordinatorConformance``::

    class TestMyCoordinator(CoordinatorConformance):
        @pytest.fixture
        def harness(self, tmp_path):
            return MyHarness(tmp_path)

Every test quotes the sentence that it checks, of ``rebalanser.registry.coordinator`` or of the commands in
``rebalanser.core.group.messages``. The suite uses no keys, so that a log can pass it as well as a registry.
It never sleeps: time passes only through ``CoordinatorHarness.let_pass``, and a watch is waited for by its
notices. Call ``pytest.register_assert_rewrite("rebalanser.testing.coordinator_suite")`` in a ``conftest.py``
for full assertion messages.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from hashlib import shake_256
from itertools import count, pairwise
from typing import TypeAlias, TypeVar

import pytest

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
    Conflict,
    Deposed,
    Elected,
    Failed,
    Follows,
    GroupRead,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Left,
    Noticed,
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
from rebalanser.core.group.types import (
    POLICY_FIELDS,
    SPEC_FIELDS,
    Group,
    Header,
    Leadership,
    Member,
    Mode,
    NodeId,
    Plan,
    Policy,
    Resource,
    ResourceSpec,
    Session,
    Share,
    SpreadOver,
    Token,
    Topic,
    TopicKind,
    Trouble,
)
from rebalanser.errors import UnusableStore
from rebalanser.registry import contract
from rebalanser.registry.contract import (
    Capabilities,
    Get,
    KeyValue,
    Operation,
    Put,
    Registry,
    Transaction,
)
from rebalanser.registry.coordinator import Coordinator, Holding, HoldingsRead
from rebalanser.registry.keys import GroupKeys
from rebalanser.testing.waiting import PATIENCE_S

LONG_TTL_S = 60.0
"""Seconds of a lease that outlives a test without a heartbeat."""
MANY = 300
"""More resources than a registry's transaction takes."""
AWKWARD_NAMES = (
    "plain",
    "with space",
    "a/b",
    "a/b/c",
    "a",
    "a%2Fb",
    "%",
    "..",
    "größe",
    "日本語",
    "🐙",
    "quote'\"",
    "back\\slash",
    "x" * 512,
)


class CoordinatorHarness(ABC):
    """A backend for the suite: connections to one store, and control of its time.

    Set ``can_lose_history``, ``can_hold_foreign`` or ``can_tell_ages`` to False if the store has no such
    thing; the test that needs it is then reported as skipped, with the reason.
    """

    can_lose_history: bool = True
    can_hold_foreign: bool = True
    can_tell_ages: bool = True

    min_ttl_s: float
    """Seconds of the suite's short leases, the least that the store keeps reliably."""
    patience_s: float = PATIENCE_S
    """Real seconds to wait for a notice before the test fails."""

    @abstractmethod
    def open(self, group: str = "group") -> Coordinator:
        """A new connection to a group of the one store, as another process would open it.

        The suite closes it. No group holds anything when a test begins.
        """

    @abstractmethod
    def now(self) -> float:
        """Seconds of the clock that ``proven_at`` is on."""

    @abstractmethod
    def let_pass(self, seconds: float) -> None:
        """Let ``seconds`` pass on the store's clock: advance a fake one, or block.

        With a fake clock this also wakes all timers that end leases.
        """

    def lose_history(self) -> None:
        """Make the store forget all changes, as a compaction does; what it stores stays."""
        raise NotImplementedError("can_lose_history is True: forget the changes so far")

    def plant_foreign(self) -> Callable[[], bool]:
        """Write foreign data into the group "group"; a check that all of it is stored as written.

        For a registry ``plant_foreign_keys`` does it.
        """
        raise NotImplementedError("can_hold_foreign is True: write what no Rebalanser wrote")


FOREIGN = (
    ("shares/foo", b""),
    ("shares/n-0/1", b""),
    ("shares/n-0/1/x", b""),
    ("shares/n-0/1/2/3", b""),
    ("nodes/foo", b"[1]"),
    ("nodes/newer", b'{"schema":999,"label":"b"}'),
    ("nodes/a/b", b"{}"),
    ("nodes/%ff", b"{}"),
    ("acks/foo", b"x"),
    ("acks/", b"1"),
    ("resources/", b""),
    ("resources/%ff", b""),
    ("resources/a/b", b""),
    ("drains/%ff", b""),
    ("barriers/foo", b"x"),
    ("barriers/a/b/0", b"x"),
    ("policy", b'{"schema":999}'),
)
"""Keys of a group, without its prefix, and values that no Rebalanser writes there."""


def plant_foreign_keys(connect: Callable[[], Registry], keys: GroupKeys) -> Callable[[], bool]:
    """Write ``FOREIGN`` into a group; a check that all of it is stored as written."""
    planted = {keys.prefix + key: value for key, value in FOREIGN}

    def ask(*operations: Operation) -> contract.Outcome:
        with closing(connect()) as registry:
            answer = registry.execute(Transaction(then=operations), PATIENCE_S)
        assert isinstance(answer, contract.Outcome)
        return answer

    put_at = ask(*(Put(key, value) for key, value in planted.items())).revision

    def is_left_alone() -> bool:
        found = ask(*map(Get, planted)).results
        expected = [(key, value, put_at) for key, value in planted.items()]
        return expected == [
            (entry.key, entry.value, entry.mod_revision) for entry in found if isinstance(entry, KeyValue)
        ]

    return is_left_alone


class NoticeRecorder:
    """A listener that records notices, and lets a test wait for them."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._told: list[Noticed] = []
        self._more = threading.Condition()

    def __call__(self, notices: Sequence[Noticed]) -> None:
        with self._more:
            self._told.extend(notices)
            self._more.notify_all()

    def of(self, kind: TopicKind, since: int = 0) -> list[Noticed]:
        """The notices of a kind of topic at revision ``since`` or later."""
        with self._more:
            return [notice for notice in self._told if notice.topic.kind is kind and notice.revision >= since]

    def wait_for(self, kind: TopicKind, since: int = 0, node: NodeId | None = None) -> list[Noticed]:
        """Block until the kind of topic was noticed at ``since`` or later; all such notices.

        With ``node``, only notices that name it count. Raises AssertionError when patience is over.
        """

        def found() -> list[Noticed]:
            return [
                notice
                for notice in self._told
                if notice.topic.kind is kind
                and notice.revision >= since
                and (node is None or notice.topic.node == node)
            ]

        with self._more:
            if not self._more.wait_for(found, timeout=self._patience_s):
                raise AssertionError(
                    f"no notice of {kind} since revision {since} within {self._patience_s} s; "
                    f"told: {self._told[-20:]}"
                )
            return found()

    def keys(self, at_least: int) -> frozenset[str]:
        """Block until at least that many keys of the group were noticed as changed; all of them."""

        def found() -> frozenset[str]:
            return frozenset().union(*(notice.keys for notice in self._told))

        with self._more:
            assert self._more.wait_for(lambda: len(found()) >= at_least, timeout=self._patience_s), found()
            return found()


Connect: TypeAlias = Callable[..., Coordinator]
OutcomeT = TypeVar("OutcomeT", bound=Outcome)


def perform(coordinator: Coordinator, command: Command, expected: type[OutcomeT]) -> OutcomeT:
    """Carry out a command whose outcome must be of the expected type."""
    outcome = coordinator.perform(command)
    assert isinstance(outcome, expected), f"{command!r} was answered with {outcome!r}"
    return outcome


POLICY = Policy(SpreadOver.ZONE, 0.25, 3, 5.0, 60.0)
"""A policy of which every field differs from the default."""


def no_progress(_done: int) -> None:
    """No-op progress callback."""


_numbers = count()


def join(coordinator: Coordinator, label: str = "node", ttl_s: float = LONG_TTL_S) -> Session:
    """Register a member under an id of its own."""
    member = Member(node=f"{label}-{next(_numbers)}", label=label)
    return perform(coordinator, Join(member, ttl_s), Joined).session


def elect(coordinator: Coordinator, session: Session) -> Leadership:
    """Make a session the leader; there must be no other."""
    return perform(coordinator, Campaign(session), Elected).leadership


def planned(group: Group, shares: Mapping[NodeId, Iterable[Resource]]) -> Plan:
    """The plan that changes only the named nodes' shares, and drops those of nodes not named."""
    before = {node: share.version for node, share in group.shares.items()}
    version = (group.header.version if group.header else 0) + 1
    targets = {node: frozenset(resources) for node, resources in shares.items()}
    changed = {
        node: target
        for node, target in targets.items()
        if node not in before or group.shares[node].resources != target
    }
    return Plan(
        version=version,
        based_on=group.header,
        shares={node: version if node in changed else before[node] for node in targets},
        changed=changed,
        obsolete=group.obsolete_after(changed.keys() | (before.keys() - targets.keys())),
        aborted=group.uncommitted,
    )


def publish(
    coordinator: Coordinator,
    session: Session,
    leadership: Leadership,
    shares: Mapping[NodeId, Iterable[Resource]],
) -> Header:
    """Publish an allocation on top of the present one."""
    plan = planned(coordinator.read().group, shares)
    return perform(coordinator, Publish(session, leadership, plan), Published).header


def add(coordinator: Coordinator, session: Session, resources: Iterable[Resource]) -> BarriersAdded:
    """Add barriers, on the node's present share."""
    share = perform(coordinator, ReadShare(session), ShareRead).share
    assert share is not None
    command = AddBarriers(session, share.version, share.revision, frozenset(resources))
    return perform(coordinator, command, BarriersAdded)


def remove(coordinator: Coordinator, session: Session, barriers: Mapping[Resource, Token]) -> BarriersRemoved:
    """Remove barriers."""
    return perform(coordinator, RemoveBarriers(session, dict(barriers)), BarriersRemoved)


def acknowledge(
    coordinator: Coordinator, session: Session, version: int, replaces: int | None = None
) -> Acknowledged:
    """Acknowledge a node's share; ``replaces`` is for all but its first acknowledgement."""
    command = Acknowledge(session, version, session.created if replaces is None else replaces)
    return perform(coordinator, command, Acknowledged)


def record_releases(
    coordinator: Coordinator, session: Session, resources: Iterable[Resource], replaces: int | None = None
) -> ReleasesRecorded:
    """Rewrite a node's record; ``replaces`` is for all but the first time."""
    member = coordinator.read().group.members[session.node]
    rewritten = replace(member, released=frozenset(resources))
    return perform(
        coordinator,
        RecordReleases(session, rewritten, session.created if replaces is None else replaces),
        ReleasesRecorded,
    )


def holders(coordinator: Coordinator) -> dict[Resource, NodeId]:
    """The holder of each barrier."""
    return {holding.resource: holding.node for holding in coordinator.read().holdings}


def session_commands(session: Session, leadership: Leadership, header: Header) -> list[Command]:
    """Every command that carries a session, except the one that ends it."""
    plan = Plan(version=header.version + 1, based_on=header, shares={}, changed={}, obsolete=frozenset())
    return [
        Heartbeat(session),
        Heartbeat(session, leader=leadership.leader, blockers=frozenset({"other"}), read_fingerprint=True),
        ReadShare(session),
        ReadBarriers(session, frozenset({"r"})),
        AddBarriers(session, header.version, header.revision, frozenset({"r"})),
        RemoveBarriers(session, {"r": 1}),
        Acknowledge(session, header.version, session.created),
        RecordReleases(session, Member(session.node, "node", released=frozenset({"r"})), session.created),
        Campaign(session),
        ReadGroup(session, leadership),
        Publish(session, leadership, plan),
        Resign(session, leadership, "why"),
    ]


class CoordinatorConformance:
    """The contract of coordinators: subclass it, provide the fixture ``harness``, and run pytest."""

    @pytest.fixture
    def harness(self) -> CoordinatorHarness:
        """The backend's harness, new for every test."""
        raise NotImplementedError("a backend overrides the fixture `harness`")

    @pytest.fixture
    def connect(self, harness: CoordinatorHarness) -> Iterator[Connect]:
        """Opens connections that are closed when the test ends."""
        with ExitStack() as stack:
            yield lambda group="group": stack.enter_context(closing(harness.open(group)))

    @pytest.fixture
    def coordinator(self, connect: Connect) -> Coordinator:
        """One connection."""
        return connect()

    @pytest.fixture
    def notices(self, harness: CoordinatorHarness) -> NoticeRecorder:
        """A listener."""
        return NoticeRecorder(harness.patience_s)

    def end_lease(self, harness: CoordinatorHarness, coordinator: Coordinator) -> None:
        """Let the suite's short leases end, including the latest ones."""
        harness.let_pass(harness.min_ttl_s + coordinator.capabilities.lease_detection_s)

    # -- members

    def test_says_what_it_can_do(self, coordinator: Coordinator) -> None:
        """Holds: "Abilities and limits of the store"."""
        assert isinstance(coordinator.capabilities, Capabilities)
        assert coordinator.capabilities.lease_detection_s >= 0

    def test_a_group_begins_empty(self, coordinator: Coordinator) -> None:
        """Holds: "Read all of the group and its barriers, at one revision (RB-19)"."""
        view = coordinator.read()
        assert (view.group.members, view.group.resources, view.group.shares) == ({}, {}, {})
        assert (view.group.header, view.leadership, view.holdings) == (None, None, ())
        assert view.group.drained == frozenset()
        assert not view.exists
        assert not coordinator.exists()

    def test_a_member_is_seen_as_it_joined(self, coordinator: Coordinator, connect: Connect) -> None:
        """Holds: "Register ``member`` under a new lease"."""
        member = Member("n-0", "label", Mode.EAGER, may_lead=False, host="h", pid=7, attributes={"zone": "z"})
        session = perform(coordinator, Join(member, LONG_TTL_S), Joined).session
        assert session.node == "n-0"
        seen = connect().read().group.members["n-0"]
        assert seen == member

    def test_a_member_says_what_it_offers(self, coordinator: Coordinator, connect: Connect) -> None:
        """Holds: "A node's description of itself, stored when it joins", with capacity, tags, zone, grace."""
        some = (
            Member("n-0", "label", capacity=2.5),
            Member("n-1", "label", tags=frozenset({"gpu", "a b"})),
            Member("n-2", "label", zone="eu-1", rejoin_grace_s=7.5),
        )
        members = {member.node: member for member in some}
        for member in members.values():
            session = perform(coordinator, Join(member, LONG_TTL_S), Joined).session
        assert connect().read().group.members == members
        releasing = replace(members["n-2"], released=frozenset({"r"}))
        perform(coordinator, RecordReleases(session, releasing, session.created), ReleasesRecorded)
        assert connect().read().group.members["n-2"] == releasing

    def test_the_order_of_joining_is_told(self, coordinator: Coordinator) -> None:
        """Holds: "The revision at which it joined: the order of nodes with the same label"."""
        sessions = [join(coordinator) for _ in range(3)]
        record_releases(coordinator, sessions[0], ["r"])
        members = coordinator.read().group.members
        assert {s.node: members[s.node].registered for s in sessions} == {s.node: s.created for s in sessions}

    def test_a_plan_remembers_members_that_are_gone(self, coordinator: Coordinator, connect: Connect) -> None:
        """Holds: "The members with a grace to which an allocation gave a share, also those that are gone"."""
        session = join(coordinator)
        leadership, other = elect(coordinator, session), join(coordinator)
        member = Member(other.node, "label", zone="z", capacity=2.0, rejoin_grace_s=7.5)
        shares = {session.node: ["a"], other.node: ["b"]}
        plan = replace(planned(coordinator.read().group, shares), remember={other.node: member})
        perform(coordinator, Publish(session, leadership, plan), Published)
        perform(coordinator, Leave(other), Left)
        group = connect().read().group
        assert group.remembered == {other.node: member}
        assert group.shares[other.node].resources == frozenset({"b"})
        read = perform(coordinator, ReadGroup(session, leadership), GroupRead).group
        assert (read.remembered, read.shares) == (group.remembered, group.shares)
        plan = replace(planned(group, {session.node: ["a", "b"]}), forget=frozenset({other.node}))
        perform(coordinator, Publish(session, leadership, plan), Published)
        group = connect().read().group
        assert not group.remembered
        assert group.shares.keys() == {session.node}
        read = perform(coordinator, ReadGroup(session, leadership, read, reread_shares=True), GroupRead).group
        assert (read.remembered, read.shares) == (group.remembered, group.shares)

    def test_a_record_names_what_its_node_has_released(
        self, coordinator: Coordinator, connect: Connect
    ) -> None:
        """Holds: "``member`` names the resources that it has released", and none before it ever did."""
        member = Member("n-0", "label", Mode.EAGER, may_lead=False, host="h", pid=7, attributes={"zone": "z"})
        session = perform(coordinator, Join(member, LONG_TTL_S), Joined).session
        assert connect().read().group.members["n-0"].released == frozenset()
        one = record_releases(coordinator, session, AWKWARD_NAMES)
        assert one.resources == frozenset(AWKWARD_NAMES)
        assert one.revision > session.created
        assert connect().read().group.members["n-0"] == replace(member, released=frozenset(AWKWARD_NAMES))
        assert record_releases(coordinator, session, [], one.revision).revision > one.revision
        assert connect().read().group.members["n-0"] == member
        assert isinstance(coordinator.perform(Heartbeat(session)), Alive), "the session is the same"
        perform(coordinator, Leave(session), Left)
        again = replace(member, node="n-1", released=frozenset({"r"}))
        perform(coordinator, Join(again, LONG_TTL_S), Joined)
        assert coordinator.read().group.members == {"n-1": again}

    def test_a_late_record_changes_nothing(self, coordinator: Coordinator) -> None:
        """Holds: "a late rewrite can't take the place of a newer one"."""
        session = join(coordinator)
        one = record_releases(coordinator, session, ["a"])
        two = record_releases(coordinator, session, ["a", "b"], one.revision)
        assert record_releases(coordinator, session, []) == two
        assert record_releases(coordinator, session, [], one.revision) == two
        assert coordinator.read().group.members[session.node].released == {"a", "b"}

    def test_joining_again_makes_no_second_member(self, coordinator: Coordinator, connect: Connect) -> None:
        """Holds: "registering the same node id creates no second member"."""
        join_it = Join(Member("n-0", "label"), LONG_TTL_S)
        first = perform(coordinator, join_it, Joined).session
        again = perform(coordinator, join_it, Joined).session
        elsewhere = perform(connect(), join_it, Joined).session
        assert first == again == elsewhere
        assert list(coordinator.read().group.members) == ["n-0"]
        assert isinstance(coordinator.perform(Heartbeat(first)), Alive)

    def test_joining_at_once_makes_no_second_member(self, coordinator: Coordinator, connect: Connect) -> None:
        """Holds: "Idempotent by the node id (RB-4)"."""
        join_it = Join(Member("n-0", "label"), LONG_TTL_S)
        connections = [coordinator, *(connect() for _ in range(3))]
        with ThreadPoolExecutor(len(connections)) as pool:
            outcomes = list(pool.map(lambda each: each.perform(join_it), connections))
        sessions = {outcome.session for outcome in outcomes if isinstance(outcome, Joined)}
        assert all(isinstance(outcome, Joined | Failed) for outcome in outcomes)
        assert sessions == {perform(coordinator, join_it, Joined).session}
        assert list(coordinator.read().group.members) == ["n-0"]

    def test_sessions_differ(self, coordinator: Coordinator) -> None:
        """Holds: "Register ``member`` under a new lease"."""
        sessions = [join(coordinator) for _ in range(3)]
        assert len({session.node for session in sessions}) == 3
        assert len({(session.lease, session.created) for session in sessions}) == 3
        assert set(coordinator.read().group.members) == {session.node for session in sessions}

    def test_life_is_proven_from_before_the_request(
        self, coordinator: Coordinator, harness: CoordinatorHarness
    ) -> None:
        """``proven_at`` is "the instant just before the lease was asked for", then of the keep-alive."""
        before = harness.now()
        joined = perform(coordinator, Join(Member("n-0", "n"), LONG_TTL_S), Joined)
        between = harness.now()
        alive = perform(coordinator, Heartbeat(joined.session), Alive)
        assert before <= joined.proven_at <= between <= alive.proven_at <= harness.now()

    def test_heartbeats_keep_a_session(self, coordinator: Coordinator, harness: CoordinatorHarness) -> None:
        """Holds: "Renew the lease, then prove that it lives"."""
        session = join(coordinator, ttl_s=harness.min_ttl_s)
        for _ in range(3):
            harness.let_pass(harness.min_ttl_s * 0.6)
            assert isinstance(coordinator.perform(Heartbeat(session)), Alive)

    def test_the_ages_of_heartbeats_are_told(
        self, coordinator: Coordinator, harness: CoordinatorHarness
    ) -> None:
        """Holds: "Return the ages of live nodes' last heartbeats"."""
        if not harness.can_tell_ages:
            pytest.skip("the store does not tell how old a heartbeat is")
        silent, alive = join(coordinator, "n-0", ttl_s=LONG_TTL_S), join(coordinator, "n-1", ttl_s=LONG_TTL_S)
        harness.let_pass(harness.min_ttl_s * 1.5)
        assert isinstance(coordinator.perform(Heartbeat(alive)), Alive)
        told = coordinator.heartbeats([silent.node, alive.node, "n-2"])
        assert set(told) == {silent.node, alive.node}
        assert 0 <= told[alive.node].age_s < told[silent.node].age_s < LONG_TTL_S
        assert told[silent.node].ttl_s >= LONG_TTL_S
        many = [silent.node, *(f"absent-{number}" for number in range(MANY))]
        assert set(coordinator.heartbeats(many)) == {silent.node}

    def test_every_command_of_an_ended_session_is_refused(
        self, coordinator: Coordinator, harness: CoordinatorHarness
    ) -> None:
        """Holds: "A command that carries a session takes effect only while that session lives"."""
        session = join(coordinator, ttl_s=harness.min_ttl_s)
        leadership = elect(coordinator, session)
        header = publish(coordinator, session, leadership, {session.node: ["r"]})
        self.end_lease(harness, coordinator)
        before = coordinator.read()
        for command in session_commands(session, leadership, header):
            assert coordinator.perform(command) == SessionLost(), command
        after = coordinator.read()
        assert (after.holdings, after.leadership) == (before.holdings, before.leadership)
        assert after.group.header == before.group.header
        assert after.group.members == {}

    def test_every_command_after_leaving_is_refused(self, coordinator: Coordinator) -> None:
        """Holds: "takes effect only while that session lives; otherwise its outcome is SessionLost"."""
        session = join(coordinator)
        leadership = elect(coordinator, session)
        header = publish(coordinator, session, leadership, {session.node: ["r"]})
        assert coordinator.perform(Leave(session)) == Left()
        for command in session_commands(session, leadership, header):
            assert coordinator.perform(command) == SessionLost(), command

    def test_leaving_takes_all_of_the_session_along(self, coordinator: Coordinator) -> None:
        """Holds: "Revoke the lease, and the node with it", and "The node and its lease are gone"."""
        stays, goes = join(coordinator), join(coordinator)
        leadership = elect(coordinator, stays)
        publish(coordinator, stays, leadership, {goes.node: ["r"], stays.node: []})
        add(coordinator, goes, ["r"])
        assert coordinator.perform(Leave(goes)) == Left()
        assert list(coordinator.read().group.members) == [stays.node]
        assert holders(coordinator) == {}
        assert isinstance(coordinator.perform(Leave(goes)), Left | SessionLost)
        assert isinstance(coordinator.perform(Heartbeat(stays)), Alive)

    def test_the_end_of_a_lease_takes_all_of_the_session_along(
        self, coordinator: Coordinator, harness: CoordinatorHarness
    ) -> None:
        """Holds: "this session's node key is gone", and its barriers with it (RB-20)."""
        stays, dies = join(coordinator), join(coordinator, ttl_s=harness.min_ttl_s)
        leadership = elect(coordinator, stays)
        publish(coordinator, stays, leadership, {stays.node: ["s"], dies.node: ["d"]})
        add(coordinator, stays, ["s"])
        token = add(coordinator, dies, ["d"]).added["d"]
        self.end_lease(harness, coordinator)
        view = coordinator.read()
        assert list(view.group.members) == [stays.node]
        assert [holding.resource for holding in view.holdings] == ["s"]
        assert add(coordinator, stays, ["d"]).added["d"] > token

    # -- leading

    def test_one_is_elected_and_the_others_follow(self, coordinator: Coordinator, connect: Connect) -> None:
        """Holds: "Find out who leads and, if nobody alive does, increment the term (RB-5)"."""
        first, second = join(coordinator), join(coordinator)
        leadership = elect(coordinator, first)
        assert leadership.leader == first.node
        assert leadership.term > 0
        assert perform(connect(), Campaign(second), Follows).leadership == leadership
        assert perform(connect(), Campaign(first), Elected).leadership == leadership
        assert coordinator.read().leadership == leadership

    def test_one_leader_per_term(self, connect: Connect) -> None:
        """Holds: "increment the term (RB-5)", once, whoever campaigns at the same time."""
        connections = [connect() for _ in range(6)]
        sessions = [join(each) for each in connections]
        with ThreadPoolExecutor(len(connections)) as pool:
            outcomes = list(
                pool.map(lambda each, session: each.perform(Campaign(session)), connections, sessions)
            )
        elected = [outcome.leadership for outcome in outcomes if isinstance(outcome, Elected)]
        followed = [outcome.leadership for outcome in outcomes if isinstance(outcome, Follows)]
        assert len(elected) == 1
        assert followed == elected * 5

    def test_terms_grow_and_never_go_back(
        self, coordinator: Coordinator, harness: CoordinatorHarness
    ) -> None:
        """Holds: "Revisions of one group only grow", those at which terms begin too."""
        terms = []
        for ttl_s in (LONG_TTL_S, harness.min_ttl_s, LONG_TTL_S):
            session = join(coordinator, ttl_s=ttl_s)
            terms.append(elect(coordinator, session))
            if ttl_s == LONG_TTL_S:
                perform(coordinator, Leave(session), Left)
            else:
                self.end_lease(harness, coordinator)
        assert all(earlier.term < later.term for earlier, later in pairwise(terms))
        assert all(earlier.revision < later.revision for earlier, later in pairwise(terms))

    def test_nobody_is_elected_while_the_leader_lives(self, coordinator: Coordinator) -> None:
        """Holds: "if nobody alive does, increment the term"."""
        leader, follower = join(coordinator), join(coordinator)
        leadership = elect(coordinator, leader)
        for _ in range(3):
            assert perform(coordinator, Campaign(follower), Follows).leadership == leadership
        perform(coordinator, Leave(leader), Left)
        assert elect(coordinator, follower).term == leadership.term + 1

    def test_whoever_resigned_leads_no_more_and_anybody_may_lead_next(self, coordinator: Coordinator) -> None:
        """Holds: "Leave the term without a leader, so that any node may take the next one (RB-43)"."""
        first, second = join(coordinator), join(coordinator)
        given_up = elect(coordinator, first)
        vacated = perform(coordinator, Resign(first, given_up, "why"), Resigned).leadership
        assert (vacated.term, vacated.leader) == (given_up.term, "")
        assert vacated.revision > given_up.revision
        assert coordinator.read().leadership == vacated
        assert coordinator.perform(ReadGroup(first, given_up)) == Deposed()
        leadership = elect(coordinator, second)
        assert leadership.term == given_up.term + 1
        assert leadership.trouble == vacated.trouble == Trouble(given_up.term, "why"), (
            "the next term tells it on"
        )
        assert coordinator.perform(Resign(first, given_up, "why")) == Deposed()
        assert perform(coordinator, Campaign(first), Follows).leadership == leadership

    def test_an_earlier_term_can_do_nothing(self, coordinator: Coordinator) -> None:
        """Holds: "takes effect only while its term is the latest; otherwise its outcome is Deposed"."""
        first, second = join(coordinator), join(coordinator)
        outdated = elect(coordinator, first)
        perform(coordinator, Leave(first), Left)
        leadership = elect(coordinator, second)
        header = publish(coordinator, second, leadership, {second.node: ["r"]})
        plan = planned(coordinator.read().group, {second.node: ["stolen"]})
        assert coordinator.perform(ReadGroup(second, outdated)) == Deposed()
        assert coordinator.perform(Publish(second, outdated, plan)) == Deposed()
        group = coordinator.read().group
        assert group.header == header
        assert group.shares[second.node].resources == {"r"}

    # -- allocations

    def test_each_node_reads_its_share(self, coordinator: Coordinator) -> None:
        """Holds: "Read the allocation's header, this node's share, and who leads"."""
        first, second = join(coordinator), join(coordinator)
        leadership = elect(coordinator, first)
        header = publish(coordinator, first, leadership, {first.node: ["a", "b"], second.node: ["c"]})
        for session, expected in ((first, {"a", "b"}), (second, {"c"})):
            read = perform(coordinator, ReadShare(session), ShareRead)
            assert read.share == Share(header.version, frozenset(expected))
            assert (read.header, read.leadership) == (header, leadership)
            assert read.revision >= header.revision

    def test_an_empty_share_is_a_share(self, coordinator: Coordinator) -> None:
        """Holds: "``share`` is None before it was thought of", and only then."""
        known, new = join(coordinator), join(coordinator)
        leadership = elect(coordinator, known)
        assert perform(coordinator, ReadShare(known), ShareRead).header is None
        header = publish(coordinator, known, leadership, {known.node: []})
        assert perform(coordinator, ReadShare(known), ShareRead).share == Share(header.version, frozenset())
        assert perform(coordinator, ReadShare(new), ShareRead).share is None

    def test_a_share_that_stays_keeps_its_version(self, coordinator: Coordinator) -> None:
        """Holds: "Write the changed shares, then commit them by the header"."""
        first, second = join(coordinator), join(coordinator)
        leadership = elect(coordinator, first)
        one = publish(coordinator, first, leadership, {first.node: ["a"], second.node: ["b"]})
        two = publish(coordinator, first, leadership, {first.node: ["a"], second.node: ["b", "c"]})
        assert two.version == one.version + 1
        assert two.revision > one.revision
        read = perform(coordinator, ReadShare(first), ShareRead)
        assert read.share == Share(one.version, frozenset({"a"}))
        assert read.header == two
        group = coordinator.read().group
        assert group.shares == {
            first.node: Share(one.version, frozenset({"a"})),
            second.node: Share(two.version, frozenset({"b", "c"})),
        }
        assert group.obsolete_parts == frozenset()

    def test_a_share_may_be_larger_than_a_request(self, coordinator: Coordinator) -> None:
        """Holds: "``Publish`` commits all shares of a version at one point", however large they are."""
        session = join(coordinator)
        leadership = elect(coordinator, session)
        names = [shake_256(str(number).encode()).hexdigest(250) for number in range(8_000)]
        for share in (names, names[1:], ["few"]):
            header = publish(coordinator, session, leadership, {session.node: share})
            read = perform(coordinator, ReadShare(session), ShareRead)
            assert read.share == Share(header.version, frozenset(share))
            group = coordinator.read().group
            assert group.shares == {session.node: read.share}
            assert group.obsolete_parts == frozenset()

    def test_a_plan_on_an_old_allocation_conflicts(self, coordinator: Coordinator) -> None:
        """Holds: "The allocation that the plan was based on is not the latest: read the group again"."""
        session = join(coordinator)
        leadership = elect(coordinator, session)
        from_nothing = planned(coordinator.read().group, {session.node: ["stale"]})
        one = publish(coordinator, session, leadership, {session.node: ["a"]})
        from_one = planned(coordinator.read().group, {session.node: ["stale"]})
        two = publish(coordinator, session, leadership, {session.node: ["b"]})
        for plan in (from_nothing, from_one):
            assert coordinator.perform(Publish(session, leadership, plan)) == Conflict()
        group = coordinator.read().group
        assert group.header == two
        assert two.revision > one.revision
        assert group.shares[session.node].resources == {"b"}

    def test_all_shares_of_a_version_are_committed_at_one_point(
        self, coordinator: Coordinator, connect: Connect
    ) -> None:
        """Holds: "``Publish`` commits all shares of a version at one point"."""
        session, reader = join(coordinator), connect()
        leadership = elect(coordinator, session)
        nodes = [f"node-{number}" for number in range(MANY)]
        odd_versions = {node: [f"odd-{node}"] for node in nodes}
        even_versions = {node: [f"even-{node}"] for node in nodes}
        publish(coordinator, session, leadership, odd_versions)
        published = threading.Event()

        def read_until_published() -> list[Group]:
            groups = [reader.read().group]
            while not published.is_set():
                groups.append(reader.read().group)
            return [*groups, reader.read().group]

        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read_until_published)
            try:
                for shares in (even_versions, odd_versions, even_versions):
                    publish(coordinator, session, leadership, shares)
            finally:
                published.set()
            groups = reading.result()
        for group in groups:
            assert group.header is not None
            expected = odd_versions if group.header.version % 2 else even_versions
            assert {node: list(share.resources) for node, share in group.shares.items()} == expected
        assert groups[-1].header is not None
        assert groups[-1].header.version == 4
        assert groups[-1].obsolete_parts == frozenset()

    def test_a_leader_reads_what_anyone_reads(self, coordinator: Coordinator) -> None:
        """Holds: "Read the group at one revision, as its leader (RB-9)"."""
        session = join(coordinator)
        leadership = elect(coordinator, session)
        coordinator.put_resources([ResourceSpec("r", 2.0, "node", {"k": "v"})], no_progress)
        coordinator.set_drained("other", drained=True)
        coordinator.set_policy(POLICY, POLICY_FIELDS)
        publish(coordinator, session, leadership, {session.node: ["r"]})
        group = perform(coordinator, ReadGroup(session, leadership), GroupRead).group
        assert group == coordinator.read().group
        assert group.resources == {"r": ResourceSpec("r", 2.0, "node", {"k": "v"})}
        assert group.drained == {"other"}
        assert group.policy == POLICY

    @pytest.mark.parametrize("told", [True, False])
    def test_a_leader_reads_what_changed_since_it_read_the_group(
        self, coordinator: Coordinator, connect: Connect, notices: NoticeRecorder, told: bool
    ) -> None:
        """Holds: "what changed since it is ``known``, else all" (RB-45), also if no watch told of it."""
        session, leaves = join(coordinator), join(other := connect())
        leadership = elect(coordinator, session)
        coordinator.put_resources([ResourceSpec(name) for name in ("a", "b", "c")], no_progress)
        coordinator.set_drained("x", drained=True)
        publish(coordinator, session, leadership, {session.node: ["a", "b"], leaves.node: ["c"]})
        known = perform(coordinator, ReadGroup(session, leadership), GroupRead).group
        coordinator.watch(session.node, {Topic(TopicKind.GROUP): known.revision + 1}, notices)

        def changed(keys: int) -> Group:
            read = coordinator.read().group
            hints = notices.keys(keys) if told else frozenset()
            command = ReadGroup(session, leadership, known=known, reread_acknowledgements=True, keys=hints)
            for until in (0, known.revision):
                asked = replace(command, acknowledged_until=until)
                group = perform(coordinator, asked, GroupRead).group
                assert group == replace(read, revision=group.revision)
            return group

        assert changed(0).resources == known.resources
        other.put_resources([ResourceSpec("b", pin="here"), ResourceSpec("d")], no_progress)
        other.remove_resources(["c"], no_progress)
        other.set_drained("x", drained=False)
        other.set_drained("y", drained=True)
        assert changed(5).resources == {r: ResourceSpec(r, pin="here" if r == "b" else None) for r in "abd"}
        for number, policy in enumerate((POLICY, replace(POLICY, max_moves=None), Policy())):
            other.set_policy(policy, POLICY_FIELDS)
            assert changed(6).policy == policy, number
        other.put_resources([ResourceSpec("b", needs=frozenset({"gpu"}), spread="db")], no_progress)
        assert changed(6).resources["b"] == ResourceSpec("b", needs=frozenset({"gpu"}), spread="db")
        perform(other, Leave(leaves), Left)
        joins = join(coordinator)
        assert changed(8).members.keys() == {session.node, joins.node}
        acknowledge(coordinator, session, 1)
        assert changed(8).acknowledged[session.node] == 1
        record_releases(coordinator, joins, ["a"])
        record_releases(coordinator, session, ["b"])
        assert [changed(9).members[each.node].released for each in (joins, session)] == [{"a"}, {"b"}]
        publish(coordinator, session, leadership, {session.node: ["a"], joins.node: ["b", "d"]})
        assert changed(9).shares[joins.node].resources == {"b", "d"}

    def test_acknowledgements_are_seen(self, coordinator: Coordinator, connect: Connect) -> None:
        """Holds: "Tell the group that this node has completed its share of this version (RB-19)"."""
        session = join(coordinator)
        assert coordinator.read().group.acknowledged.get(session.node, 0) == 0
        one = acknowledge(coordinator, session, 1)
        assert one.version == 1
        assert connect().read().group.acknowledged[session.node] == 1
        two = acknowledge(coordinator, session, 2, one.revision)
        assert two.version == 2
        assert two.revision > one.revision
        assert connect().read().group.acknowledged[session.node] == 2
        perform(coordinator, Leave(session), Left)
        assert session.node not in coordinator.read().group.acknowledged

    def test_a_late_acknowledgement_changes_nothing(self, coordinator: Coordinator) -> None:
        """Holds: "a late acknowledgement of an older version can't take the place of a newer one"."""
        session = join(coordinator)
        one = acknowledge(coordinator, session, 1)
        two = acknowledge(coordinator, session, 2, one.revision)
        assert acknowledge(coordinator, session, 1) == two
        assert acknowledge(coordinator, session, 1, one.revision) == two
        assert coordinator.read().group.acknowledged[session.node] == 2

    # -- barriers

    def test_a_free_barrier_is_added(self, coordinator: Coordinator, connect: Connect) -> None:
        """Holds: "A barrier is added only while nobody holds it and the node's share is the named one"."""
        session = join(coordinator)
        publish(coordinator, session, elect(coordinator, session), {session.node: ["a", "b"]})
        outcome = add(coordinator, session, ["a", "b"])
        assert set(outcome.added) == {"a", "b"}
        assert (outcome.blocked, outcome.superseded) == ({}, False)
        assert outcome.revision >= max(outcome.added.values())
        expected = {Holding(resource, session.node, token) for resource, token in outcome.added.items()}
        assert set(connect().read().holdings) == expected
        mine = perform(coordinator, ReadBarriers(session, frozenset("abc")), BarriersRead).mine
        assert mine == outcome.added

    def test_a_held_barrier_blocks(self, coordinator: Coordinator) -> None:
        """Holds: "Barriers added, and holders of the others"."""
        first, second = join(coordinator), join(coordinator)
        publish(coordinator, first, elect(coordinator, first), {first.node: [], second.node: []})
        theirs = add(coordinator, first, ["a"]).added
        outcome = add(coordinator, second, ["a", "b"])
        assert outcome.blocked == {"a": first.node}
        assert set(outcome.added) == {"b"}
        assert holders(coordinator) == {"a": first.node, "b": second.node}
        assert perform(coordinator, ReadBarriers(second, frozenset("ab")), BarriersRead).mine == outcome.added
        assert perform(coordinator, ReadBarriers(first, frozenset("ab")), BarriersRead).mine == theirs

    def test_adding_again_answers_with_the_token(self, coordinator: Coordinator, connect: Connect) -> None:
        """Holds: "adding a barrier that the same session holds returns its token"."""
        session = join(coordinator)
        publish(coordinator, session, elect(coordinator, session), {session.node: ["a"]})
        first = add(coordinator, session, ["a"])
        again = add(connect(), session, ["a", "b"])
        assert again.added["a"] == first.added["a"]
        assert again.added["b"] > first.added["a"]

    def test_tokens_of_a_resource_grow(self, coordinator: Coordinator, harness: CoordinatorHarness) -> None:
        """Holds: "Revisions of one group only grow, and so do the tokens of one resource"."""
        leader = join(coordinator)
        leadership = elect(coordinator, leader)
        tokens = []
        for round_number in range(4):
            dies = round_number == 2
            session = join(coordinator, ttl_s=harness.min_ttl_s if dies else LONG_TTL_S)
            publish(coordinator, leader, leadership, {leader.node: [], session.node: ["r"]})
            tokens.append(add(coordinator, session, ["r"]).added["r"])
            if dies:
                self.end_lease(harness, coordinator)
            else:
                remove(coordinator, session, {"r": tokens[-1]})
            coordinator.remove_resources(["r"], no_progress)
            coordinator.put_resources([ResourceSpec("r")], no_progress)
        assert all(earlier < later for earlier, later in pairwise(tokens))

    def test_another_share_adds_nothing(self, coordinator: Coordinator) -> None:
        """Holds: "``superseded``: the node has another share meanwhile"."""
        session = join(coordinator)
        leadership = elect(coordinator, session)
        publish(coordinator, session, leadership, {session.node: ["a"]})
        outdated = perform(coordinator, ReadShare(session), ShareRead).share
        assert outdated is not None
        current = publish(coordinator, session, leadership, {session.node: ["a", "b"]})
        late = AddBarriers(session, outdated.version, outdated.revision, frozenset("ab"))
        outcome = perform(coordinator, late, BarriersAdded)
        assert outcome.superseded
        assert (outcome.added, outcome.blocked) == ({}, {})
        assert outcome.revision >= current.revision
        assert holders(coordinator) == {}
        assert not add(coordinator, session, ["a", "b"]).superseded

    def test_the_shares_of_others_may_change_meanwhile(self, coordinator: Coordinator) -> None:
        """Holds: "the own share the one that was read"."""
        session, other = join(coordinator), join(coordinator)
        leadership = elect(coordinator, session)
        publish(coordinator, session, leadership, {session.node: ["a"], other.node: []})
        share = perform(coordinator, ReadShare(session), ShareRead).share
        assert share is not None
        publish(coordinator, session, leadership, {session.node: ["a"], other.node: ["b"]})
        meanwhile = AddBarriers(session, share.version, share.revision, frozenset("a"))
        outcome = perform(coordinator, meanwhile, BarriersAdded)
        assert outcome.added.keys() == {"a"}
        assert not outcome.superseded

    def test_only_own_barriers_are_removed(self, coordinator: Coordinator) -> None:
        """Holds: "and is removed only by the session that added it"."""
        first, second = join(coordinator), join(coordinator)
        publish(coordinator, first, elect(coordinator, first), {first.node: [], second.node: []})
        theirs = add(coordinator, first, ["a"]).added
        mine = add(coordinator, second, ["b"]).added
        remove(coordinator, second, {"a": mine["b"], "b": mine["b"], "never": mine["b"]})
        assert holders(coordinator) == {"a": first.node}
        remove(coordinator, first, theirs)
        assert holders(coordinator) == {}

    def test_a_barrier_of_the_past_is_not_removed(self, coordinator: Coordinator) -> None:
        """Holds: "each one only if still this session's (RB-15)", whoever has it now."""
        first, second = join(coordinator), join(coordinator)
        publish(coordinator, first, elect(coordinator, first), {first.node: [], second.node: []})
        once_mine = add(coordinator, first, ["a"]).added
        remove(coordinator, first, once_mine)
        add(coordinator, second, ["a"])
        outcome = remove(coordinator, first, once_mine)
        assert outcome.resources == {"a"}
        assert holders(coordinator) == {"a": second.node}

    def test_removing_again_changes_nothing(self, coordinator: Coordinator) -> None:
        """Holds: "None of these barriers is this session's any more"."""
        session = join(coordinator)
        publish(coordinator, session, elect(coordinator, session), {session.node: ["a"]})
        added = add(coordinator, session, ["a", "b"]).added
        for _ in range(2):
            assert remove(coordinator, session, {"a": added["a"]}).resources == {"a"}
            assert holders(coordinator) == {"b": session.node}

    def test_a_barrier_has_one_holder(self, coordinator: Coordinator, connect: Connect) -> None:
        """Holds: "each one only if absent", whoever adds at the same time."""
        connections = [coordinator, *(connect() for _ in range(3))]
        sessions = [join(each) for each in connections]
        shares: dict[NodeId, list[Resource]] = {session.node: [] for session in sessions}
        publish(coordinator, sessions[0], elect(coordinator, sessions[0]), shares)
        resources = [f"r{number}" for number in range(20)]
        with ThreadPoolExecutor(len(connections)) as pool:
            outcomes = list(pool.map(lambda each, own: add(each, own, resources), connections, sessions))
        held = holders(coordinator)
        assert set(held) == set(resources)
        for session, outcome in zip(sessions, outcomes, strict=True):
            assert set(outcome.added) == {r for r, node in held.items() if node == session.node}
            assert set(outcome.added) | set(outcome.blocked) == set(resources)
            assert all(held[r] == holder for r, holder in outcome.blocked.items())

    def test_removing_a_resource_leaves_its_barrier(self, coordinator: Coordinator) -> None:
        """Holds: "but not their barriers (RB-16)"."""
        first, second = join(coordinator), join(coordinator)
        coordinator.put_resources([ResourceSpec("r")], no_progress)
        publish(coordinator, first, elect(coordinator, first), {first.node: [], second.node: []})
        token = add(coordinator, first, ["r"]).added["r"]
        changes: list[Callable[[], object]] = [
            lambda: coordinator.remove_resources(["r"], no_progress),
            lambda: coordinator.put_resources([ResourceSpec("r")], no_progress),
        ]
        for change in changes:
            change()
            assert coordinator.read().holdings == (Holding("r", first.node, token),)
            assert add(coordinator, second, ["r"]).blocked == {"r": first.node}

    def test_many_barriers_at_once(self, coordinator: Coordinator) -> None:
        """Holds: "One that concerns many resources may take effect in parts, each at one point"."""
        session = join(coordinator)
        resources = [f"resource {number}" for number in range(MANY)]
        publish(coordinator, session, elect(coordinator, session), {session.node: resources})
        added = add(coordinator, session, resources).added
        assert set(added) == set(resources)
        asked = ReadBarriers(session, frozenset(resources))
        assert perform(coordinator, asked, BarriersRead).mine == added
        assert remove(coordinator, session, added).resources == set(resources)
        assert coordinator.read().holdings == ()

    def test_a_removal_is_told_where_it_happened(self, coordinator: Coordinator) -> None:
        """Holds: "the revision at which this command removed a barrier; without those that it found gone"."""
        first, second = join(coordinator), join(coordinator)
        publish(coordinator, first, elect(coordinator, first), {first.node: [], second.node: []})
        mine = add(coordinator, first, ["a", "b"]).added
        outcome = remove(coordinator, first, {**mine, "never": mine["a"]})
        assert outcome.removed_at.keys() == {"a", "b"}
        assert all(mine[r] < removed_at <= outcome.revision for r, removed_at in outcome.removed_at.items())
        theirs = add(coordinator, second, ["a"]).added
        assert theirs["a"] > outcome.removed_at["a"]
        assert remove(coordinator, first, mine).removed_at == {}

    def test_each_of_many_removals_is_told_where_it_happened(
        self, coordinator: Coordinator, connect: Connect
    ) -> None:
        """Holds: "The revision at which this command removed a barrier", though others add it at once."""
        other = connect()
        first, second = join(coordinator), join(other)
        resources = {f"resource {number}" for number in range(MANY)}
        publish(coordinator, first, elect(coordinator, first), {first.node: [], second.node: []})
        mine = add(coordinator, first, resources).added
        theirs: dict[Resource, Token] = {}
        with ThreadPoolExecutor(1) as pool:
            removing = pool.submit(remove, coordinator, first, mine)
            over = False
            while not over and theirs.keys() != resources:
                over = removing.done()
                theirs.update(add(other, second, resources - theirs.keys()).added)
            removed_at = removing.result().removed_at
        assert removed_at.keys() == theirs.keys() == resources
        assert all(mine[r] < removed_at[r] < theirs[r] for r in resources)

    # -- what a heartbeat sees on its way

    def test_a_heartbeat_sees_what_a_notice_may_not_have_told(self, coordinator: Coordinator) -> None:
        """Holds: "so that a lost wake-up is made good within a heartbeat"."""
        first, second = join(coordinator), join(coordinator)
        beat = Heartbeat(second, leader=first.node, blockers=frozenset({first.node}))
        leadership = elect(coordinator, first)
        header = publish(coordinator, first, leadership, {first.node: ["a"], second.node: []})
        added = add(coordinator, first, ["a"])
        alive = perform(coordinator, beat, Alive)
        assert (alive.header_revision, alive.leadership_revision) == (header.revision, leadership.revision)
        assert alive.share_revision == header.revision
        assert alive.leader_alive
        assert alive.removals[first.node] <= added.revision
        removed = remove(coordinator, first, added.added)
        assert perform(coordinator, beat, Alive).removals[first.node] >= removed.revision > added.revision
        perform(coordinator, Leave(first), Left)
        alive = perform(coordinator, beat, Alive)
        assert not alive.leader_alive
        assert alive.removals[first.node] in {0, *range(removed.revision + 1, alive.revision + 1)}

    def test_the_fingerprint_tells_every_change_of_the_group(self, coordinator: Coordinator) -> None:
        """Holds: "Tells whether members, resources, drains or the policy changed"."""
        session = join(coordinator)
        beat = Heartbeat(session, read_fingerprint=True)
        guest: list[Session] = []
        changes: list[Callable[[], object]] = [
            lambda: coordinator.put_resources([ResourceSpec("a")], no_progress),
            lambda: coordinator.put_resources([ResourceSpec("a", 2.0)], no_progress),
            lambda: coordinator.put_resources([ResourceSpec("b")], no_progress),
            lambda: coordinator.remove_resources(["a"], no_progress),
            lambda: coordinator.set_drained("node", drained=True),
            lambda: coordinator.set_drained("node", drained=False),
            lambda: coordinator.set_policy(POLICY, POLICY_FIELDS),
            lambda: coordinator.set_policy(Policy(), frozenset({"max_moves"})),
            lambda: coordinator.set_policy(Policy(), POLICY_FIELDS),
            lambda: guest.append(join(coordinator)),
            lambda: record_releases(coordinator, guest[0], ["a"]),
            lambda: perform(coordinator, Leave(guest[0]), Left),
        ]
        fingerprints = [perform(coordinator, beat, Alive).fingerprint]
        for change in changes:
            change()
            seen = perform(coordinator, beat, Alive).fingerprint
            assert seen == coordinator.read().group.fingerprint
            assert seen != fingerprints[-1]
            fingerprints.append(seen)
        acknowledge(coordinator, session, 1)
        assert perform(coordinator, beat, Alive).fingerprint == fingerprints[-1]

    # -- notices

    def test_notices_of_the_allocation(self, coordinator: Coordinator, notices: NoticeRecorder) -> None:
        """Holds: "A hint that a watched topic changed at or after a revision"."""
        first, second = join(coordinator), join(coordinator)
        leadership = elect(coordinator, first)
        revision = coordinator.read().group.revision
        coordinator.watch(second.node, {Topic(TopicKind.ALLOCATION, second.node): revision + 1}, notices)
        one = publish(coordinator, first, leadership, {first.node: ["a"], second.node: ["b"]})
        notices.wait_for(TopicKind.ALLOCATION, one.revision)
        two = publish(coordinator, first, leadership, {first.node: ["a", "c"], second.node: ["b"]})
        three = publish(coordinator, first, leadership, {first.node: ["a"], second.node: ["b", "c"]})
        told = notices.wait_for(TopicKind.ALLOCATION, three.revision)
        assert {notice.version for notice in told} <= {None, three.version}
        between = [
            n for n in notices.of(TopicKind.ALLOCATION, one.revision + 1) if n.revision < three.revision
        ]
        assert between == [], f"version {two.version} leaves this node's share as it is (RB-45)"

    def test_notices_of_the_leadership(self, coordinator: Coordinator, notices: NoticeRecorder) -> None:
        """Holds: "Watch exactly these topics, new ones from their revisions on"."""
        first, second = join(coordinator), join(coordinator)
        one = elect(coordinator, first)
        topics = {
            Topic(TopicKind.LEADERSHIP): one.revision + 1,
            Topic(TopicKind.NODE, first.node): one.revision + 1,
        }
        coordinator.watch(second.node, topics, notices)
        perform(coordinator, Leave(first), Left)
        notices.wait_for(TopicKind.NODE, one.revision + 1)
        two = elect(coordinator, second)
        notices.wait_for(TopicKind.LEADERSHIP, two.revision)

    def test_a_lease_that_ends_is_noticed(
        self, coordinator: Coordinator, harness: CoordinatorHarness, notices: NoticeRecorder
    ) -> None:
        """Holds: "Hints may be doubled, but are never all lost", also when nobody asked for the change."""
        stays, dies = join(coordinator), join(coordinator, ttl_s=harness.min_ttl_s)
        revision = coordinator.read().group.revision
        kinds = (TopicKind.NODE, TopicKind.REMOVALS)
        topics = {Topic(kind, dies.node): revision + 1 for kind in kinds}
        coordinator.watch(stays.node, topics | {Topic(TopicKind.GROUP): revision + 1}, notices)
        self.end_lease(harness, coordinator)
        for kind in (*kinds, TopicKind.GROUP):
            notices.wait_for(kind, revision + 1)

    def test_notices_of_a_holder_that_removes_barriers(
        self, coordinator: Coordinator, notices: NoticeRecorder
    ) -> None:
        """Holds: "Remove barriers, each one only if still this session's (RB-15), and tell who waits"."""
        first, second = join(coordinator), join(coordinator)
        publish(coordinator, first, elect(coordinator, first), {first.node: [], second.node: []})
        added = add(coordinator, first, ["a", "b"])
        blocked = add(coordinator, second, ["a", "b"])
        topics = {Topic(TopicKind.REMOVALS, first.node): blocked.revision + 1}
        coordinator.watch(second.node, topics, notices)
        one = remove(coordinator, first, {"a": added.added["a"]})
        notices.wait_for(TopicKind.REMOVALS, one.revision, first.node)
        two = remove(coordinator, first, {"b": added.added["b"]})
        notices.wait_for(TopicKind.REMOVALS, two.revision, first.node)
        assert set(add(coordinator, second, ["a", "b"]).added) == {"a", "b"}

    def test_notices_of_every_change_of_the_group(
        self, coordinator: Coordinator, connect: Connect, notices: NoticeRecorder
    ) -> None:
        """Holds: "reports changes", be it a member, a resource, a drain or the policy."""
        session = join(coordinator)
        revision = coordinator.read().group.revision
        coordinator.watch(session.node, {Topic(TopicKind.GROUP): revision + 1}, notices)
        other = connect()
        guest: list[Session] = []
        changes: list[Callable[[], object]] = [
            lambda: guest.append(join(other)),
            lambda: other.put_resources([ResourceSpec("a")], no_progress),
            lambda: other.put_resources([ResourceSpec("a", 2.0)], no_progress),
            lambda: other.remove_resources(["a"], no_progress),
            lambda: other.set_drained("node", drained=True),
            lambda: other.set_drained("node", drained=False),
            lambda: other.set_policy(POLICY, POLICY_FIELDS),
            lambda: other.set_policy(Policy(), POLICY_FIELDS),
            lambda: record_releases(other, guest[0], ["a"]),
            lambda: perform(other, Leave(guest[0]), Left),
        ]
        for change in changes:
            before = other.read().group.revision
            change()
            notices.wait_for(TopicKind.GROUP, before + 1)

    def test_notices_of_acknowledgements(
        self, coordinator: Coordinator, connect: Connect, notices: NoticeRecorder
    ) -> None:
        """A hint: "for ACKNOWLEDGEMENTS the version that the topic's node has completed", or none."""
        leader, other = join(coordinator), join(coordinator)
        revision = coordinator.read().group.revision
        coordinator.watch(leader.node, {Topic(TopicKind.ACKNOWLEDGEMENTS): revision + 1}, notices)
        acknowledge(connect(), other, 7)
        for notice in notices.wait_for(TopicKind.ACKNOWLEDGEMENTS, revision + 1):
            assert notice.version is None or (notice.topic.node, notice.version) == (other.node, 7)

    def test_notices_of_barriers_say_what_to_read(
        self, coordinator: Coordinator, connect: Connect, notices: NoticeRecorder
    ) -> None:
        """Holds: "Barriers were added or removed", and "or only those at keys of notices"."""
        first, second = join(coordinator), join(coordinator)
        publish(coordinator, first, elect(coordinator, first), {first.node: [], second.node: []})
        client = connect()
        revision = client.read_holdings(frozenset()).revision
        client.watch("", {Topic(TopicKind.BARRIERS): revision + 1}, notices)

        def told(since: int) -> HoldingsRead:
            found = notices.wait_for(TopicKind.BARRIERS, since)
            assert not any(notice.lost for notice in found)
            return client.read_holdings(frozenset[str]().union(*(notice.keys for notice in found)))

        added = add(coordinator, first, ["a", "b/c"])
        holding = Holding("b/c", first.node, added.added["b/c"])
        read = told(added.revision)
        assert (set(read.holdings), read.holdings["b/c"]) == ({"a", "b/c"}, holding)
        assert read.members[first.node] == coordinator.read().group.members[first.node]
        removed = remove(coordinator, first, {"a": added.added["a"]})
        assert told(removed.revision).holdings.get("a") is None
        all_read = client.read_holdings()
        assert (all_read.holdings, set(all_read.members)) == ({"b/c": holding}, {first.node, second.node})
        assert all_read.whole
        perform(coordinator, Leave(first), Left)
        left = told(removed.revision + 1)
        assert left.holdings.get("b/c") is None
        assert set(client.read_holdings().members) == {second.node}

    def test_a_watch_tells_of_the_past(self, coordinator: Coordinator, notices: NoticeRecorder) -> None:
        """Holds: "new ones from their revisions on"."""
        session = join(coordinator)
        revision = coordinator.read().group.revision
        leadership = elect(coordinator, session)
        header = publish(coordinator, session, leadership, {session.node: ["a"]})
        coordinator.put_resources([ResourceSpec("a")], no_progress)
        acknowledge(coordinator, session, header.version)
        added = add(coordinator, session, ["a"])
        removed = remove(coordinator, session, added.added)
        topics = {
            Topic(TopicKind.ALLOCATION, session.node): revision + 1,
            Topic(TopicKind.COMMIT): revision + 1,
            Topic(TopicKind.LEADERSHIP): revision + 1,
            Topic(TopicKind.GROUP): revision + 1,
            Topic(TopicKind.ACKNOWLEDGEMENTS): revision + 1,
            Topic(TopicKind.REMOVALS, session.node): revision + 1,
        }
        coordinator.watch(session.node, topics, notices)
        notices.wait_for(TopicKind.ALLOCATION, header.revision)
        notices.wait_for(TopicKind.COMMIT, header.revision)
        notices.wait_for(TopicKind.LEADERSHIP, leadership.revision)
        notices.wait_for(TopicKind.GROUP, header.revision)
        notices.wait_for(TopicKind.ACKNOWLEDGEMENTS, header.revision)
        notices.wait_for(TopicKind.REMOVALS, removed.revision)

    def test_topics_that_stay_go_on(
        self, coordinator: Coordinator, connect: Connect, notices: NoticeRecorder
    ) -> None:
        """Holds: "known ones continue", and only they."""
        session, other = join(coordinator), connect()
        leadership = elect(coordinator, session)
        revision = coordinator.read().group.revision
        group, allocation = Topic(TopicKind.GROUP), Topic(TopicKind.ALLOCATION, session.node)
        coordinator.watch(session.node, {group: revision + 1, allocation: revision + 1}, notices)
        other.put_resources([ResourceSpec("before")], no_progress)
        notices.wait_for(TopicKind.GROUP, revision + 1)
        coordinator.watch(session.node, {allocation: other.read().group.revision + 1}, notices)
        between = other.read().group.revision
        other.put_resources([ResourceSpec("after")], no_progress)
        header = publish(other, session, leadership, {session.node: ["a"]})
        notices.wait_for(TopicKind.ALLOCATION, header.revision)
        assert notices.of(TopicKind.GROUP, between + 1) == []

    def test_a_gap_is_noticed(
        self, coordinator: Coordinator, harness: CoordinatorHarness, notices: NoticeRecorder
    ) -> None:
        """Holds: "after a gap every watched topic gets one"."""
        if not harness.can_lose_history:
            pytest.skip("the harness says that its store cannot lose history")
        session = join(coordinator)
        revision = coordinator.read().group.revision
        leadership = elect(coordinator, session)
        publish(coordinator, session, leadership, {session.node: ["a"]})
        coordinator.put_resources([ResourceSpec("a")], no_progress)
        acknowledge(coordinator, session, 1)
        remove(coordinator, session, add(coordinator, session, ["a"]).added)
        harness.lose_history()
        shared = (
            TopicKind.COMMIT,
            TopicKind.LEADERSHIP,
            TopicKind.GROUP,
            TopicKind.ACKNOWLEDGEMENTS,
        )
        its_own = (TopicKind.ALLOCATION, TopicKind.REMOVALS, TopicKind.NODE)
        topics = {Topic(kind): revision + 1 for kind in shared}
        topics |= {Topic(kind, session.node): revision + 1 for kind in its_own}
        coordinator.watch(session.node, topics, notices)
        for topic in topics:
            notices.wait_for(topic.kind, revision + 1)

    # -- operators

    def test_resources_are_put_with_what_is_said_of_them(
        self, coordinator: Coordinator, connect: Connect
    ) -> None:
        """Holds: "Add resources, or change existing ones. Return the number of new ones"."""
        plain, heavy = ResourceSpec("plain"), ResourceSpec("heavy", 3.5, "worker 1", {"k": "v"})
        assert coordinator.put_resources([plain, heavy], no_progress) == 2
        assert connect().read().group.resources == {"plain": plain, "heavy": heavy}
        needy = ResourceSpec("heavy", 3.5, "worker 1", {}, frozenset({"gpu", "a b"}), "db")
        assert coordinator.put_resources([needy], no_progress) == 0
        assert coordinator.weigh_resources({"heavy": 4.0}, no_progress) == 1
        assert connect().read().group.resources["heavy"] == replace(needy, weight=4.0)
        assert coordinator.resource("heavy") == replace(needy, weight=4.0)
        lighter = ResourceSpec("heavy", 1.5)
        assert coordinator.put_resources([lighter, ResourceSpec("new")], no_progress) == 1
        assert connect().read().group.resources["heavy"] == lighter

    @pytest.mark.parametrize(
        "fields",
        [frozenset(), *(frozenset({name}) for name in sorted(SPEC_FIELDS)), frozenset({"pin", "attributes"})],
    )
    def test_only_the_given_fields_change(self, coordinator: Coordinator, fields: frozenset[str]) -> None:
        """Holds: "Of existing resources only the ``fields`` change"."""
        known = ResourceSpec("known", 3.5, "worker 1", {"k": "v"}, frozenset({"gpu"}), "db")
        other = ResourceSpec("known", 2.0, None, {"other": "value"})
        coordinator.put_resources([known], no_progress)
        assert coordinator.put_resources([other, ResourceSpec("new", 2.0)], no_progress, fields) == 1
        values = {name: getattr(other if name in fields else known, name) for name in SPEC_FIELDS}
        assert coordinator.read().group.resources == {
            "known": ResourceSpec("known", **values),
            "new": ResourceSpec("new", 2.0),
        }
        fingerprint = coordinator.read().group.fingerprint
        assert coordinator.put_resources([other], no_progress, fields) == 0
        assert coordinator.read().group.fingerprint == fingerprint

    def test_putting_again_changes_nothing(self, coordinator: Coordinator) -> None:
        """Holds: "Return the number of new ones. Idempotent (RB-29)"."""
        specs = [ResourceSpec(f"r{number}") for number in range(5)]
        assert coordinator.put_resources(specs, no_progress) == 5
        fingerprint = coordinator.read().group.fingerprint
        assert coordinator.put_resources(specs, no_progress) == 0
        assert coordinator.read().group.fingerprint == fingerprint

    def test_concurrent_operator_requests_all_succeed(
        self, coordinator: Coordinator, connect: Connect
    ) -> None:
        """Holds: "is refused if another came first. The client then retries"."""
        operators = [coordinator, *(connect() for _ in range(3))]
        names = [f"r{number}" for number in range(10)]

        def operate(number: int) -> None:
            for name in names:
                spec = ResourceSpec(f"{name} of {number}")
                assert operators[number].put_resources([spec, ResourceSpec(name)], no_progress) in {1, 2}
                assert operators[number].weigh_resources({spec.resource: 2.0}, no_progress) == 1

        with ThreadPoolExecutor(len(operators)) as pool:
            list(pool.map(operate, range(len(operators))))
        weights = {name: spec.weight for name, spec in coordinator.read().group.resources.items()}
        of_each = {f"{name} of {number}": 2.0 for name in names for number in range(len(operators))}
        assert weights == {**dict.fromkeys(names, 1.0), **of_each}

    def test_long_changes_show_their_progress(self, coordinator: Coordinator) -> None:
        """Progress is "Called with the number of items of a long change that are done"."""
        specs = [ResourceSpec(f"resource {number}") for number in range(MANY)]
        names = [spec.resource for spec in specs]
        putting: list[int] = []
        removing: list[int] = []
        assert coordinator.put_resources(specs, putting.append) == MANY
        assert set(coordinator.read().group.resources) == set(names)
        assert coordinator.remove_resources(names, removing.append) == MANY
        assert coordinator.read().group.resources == {}
        for done in (putting, removing):
            assert done == sorted(done)
            assert done[-1] == MANY

    def test_resources_are_removed(self, coordinator: Coordinator) -> None:
        """Holds: "Return how many existed"."""
        coordinator.put_resources([ResourceSpec("a"), ResourceSpec("b")], no_progress)
        assert coordinator.remove_resources(["a", "never"], no_progress) == 1
        assert coordinator.remove_resources(["a"], no_progress) == 0
        assert set(coordinator.read().group.resources) == {"b"}

    def test_resources_are_weighed_and_nothing_else_is_said_of_them(self, coordinator: Coordinator) -> None:
        """Holds: "Change the weights of existing resources. Return the number of changes"."""
        pinned = ResourceSpec("pinned", 1.0, "worker 1", {"k": "v"})
        coordinator.put_resources([pinned, ResourceSpec("plain"), ResourceSpec("same", 3.0)], no_progress)
        done: list[int] = []
        weights = {"pinned": 2.5, "plain": 0.5, "same": 3.0, "never": 4.0}
        assert coordinator.weigh_resources(weights, done.append) == 2
        assert coordinator.read().group.resources == {
            "pinned": ResourceSpec("pinned", 2.5, "worker 1", {"k": "v"}),
            "plain": ResourceSpec("plain", 0.5),
            "same": ResourceSpec("same", 3.0),
        }
        assert done == sorted(done)
        assert done[-1] == len(weights)
        fingerprint = coordinator.read().group.fingerprint
        assert coordinator.weigh_resources(weights, no_progress) == 0
        assert coordinator.read().group.fingerprint == fingerprint
        assert coordinator.weigh_resources({"plain": 1.0}, no_progress) == 1
        assert coordinator.read().group.resources["plain"] == ResourceSpec("plain")

    def test_nodes_are_drained(self, coordinator: Coordinator) -> None:
        """Holds: "Drain the nodes with a label, or end that (RB-30). Idempotent"."""
        for drained in (True, True, False, False):
            before = coordinator.read().group
            coordinator.set_drained("worker 1", drained)
            after = coordinator.read().group
            assert after.drained == ({"worker 1"} if drained else frozenset())
            assert (after.fingerprint == before.fingerprint) == (after.drained == before.drained)
            assert coordinator.exists()

    def test_the_policy_is_set_field_by_field(self, coordinator: Coordinator, connect: Connect) -> None:
        """Holds: "Change these ``fields`` of the group's policy; the others stay. Idempotent (RB-38)"."""
        assert coordinator.policy() == coordinator.read().group.policy == Policy()
        set_so_far = Policy()
        for name in sorted(POLICY_FIELDS):
            set_so_far = replace(set_so_far, **{name: getattr(POLICY, name)})
            coordinator.set_policy(POLICY, frozenset({name}))
            fingerprint = coordinator.read().group.fingerprint
            coordinator.set_policy(POLICY, frozenset({name}))
            coordinator.set_policy(Policy(), frozenset())
            assert coordinator.read().group.fingerprint == fingerprint
            assert coordinator.policy() == connect().read().group.policy == set_so_far
        assert set_so_far == POLICY

    # -- names, groups, connections

    def test_names_are_kept_as_they_are(self, coordinator: Coordinator) -> None:
        """Holds: "All of the group and its barriers", whatever printable text names them (RB-33)."""
        coordinator.put_resources([ResourceSpec(name, pin=name) for name in AWKWARD_NAMES], no_progress)
        sessions = {name: join(coordinator, label=name) for name in AWKWARD_NAMES}
        for name in AWKWARD_NAMES:
            coordinator.set_drained(name, drained=True)
        leader = sessions["plain"]
        shares = {session.node: [name] for name, session in sessions.items()}
        header = publish(coordinator, leader, elect(coordinator, leader), shares)
        for name, session in sessions.items():
            add(coordinator, session, [name])
            acknowledge(coordinator, session, header.version)
            share = perform(coordinator, ReadShare(session), ShareRead).share
            assert share is not None
            assert share.resources == {name}
        view = coordinator.read()
        names, nodes = set(AWKWARD_NAMES), {session.node for session in sessions.values()}
        assert view.group.resources == {name: ResourceSpec(name, pin=name) for name in AWKWARD_NAMES}
        assert {member.label for member in view.group.members.values()} == names == view.group.drained
        assert set(view.group.members) == set(view.group.shares) == set(view.group.acknowledged) == nodes
        assert {(each.resource, each.node) for each in view.holdings} == {
            (name, session.node) for name, session in sessions.items()
        }
        blocked = add(coordinator, leader, AWKWARD_NAMES[1:]).blocked
        assert blocked == {name: sessions[name].node for name in AWKWARD_NAMES[1:]}

    def test_groups_never_touch_each_other(self, connect: Connect, notices: NoticeRecorder) -> None:
        """Holds: "All of a group", and nothing of another one, however alike their names (RB-33)."""
        quiet = connect("a")
        bystander = join(quiet)
        quiet.put_resources([ResourceSpec("r")], no_progress)
        leadership = elect(quiet, bystander)
        header = publish(quiet, bystander, leadership, {bystander.node: ["r"]})
        add(quiet, bystander, ["r"])
        before = quiet.read()
        kinds = (TopicKind.COMMIT, TopicKind.LEADERSHIP, TopicKind.GROUP, TopicKind.ACKNOWLEDGEMENTS)
        since = before.group.revision + 1
        topics = {Topic(kind): since for kind in kinds}
        quiet.watch(bystander.node, topics, notices)
        for name in ("a/b", "a%2Fb", "a/", "A", "ab", "a/resources", "aa"):
            busy = connect(name)
            assert busy.read().group.members == {}
            session = join(busy)
            assert elect(busy, session).leader == session.node
            busy.put_resources([ResourceSpec("r"), ResourceSpec("s")], no_progress)
            theirs = publish(busy, session, elect(busy, session), {session.node: ["r"]})
            assert set(add(busy, session, ["r"]).added) == {"r"}
            busy.set_drained("node", drained=True)
            acknowledge(busy, session, theirs.version)
            busy.remove_resources(["r", "s"], no_progress)
            perform(busy, Leave(session), Left)
        after = quiet.read()
        assert (after.leadership, after.holdings) == (before.leadership, before.holdings)
        assert (after.group.members, after.group.resources) == (before.group.members, before.group.resources)
        assert (after.group.header, after.group.shares) == (before.group.header, before.group.shares)
        assert after.group.drained == frozenset()
        acknowledge(quiet, bystander, header.version)
        notices.wait_for(TopicKind.ACKNOWLEDGEMENTS, since)
        assert {notice.version for kind in kinds[:3] for notice in notices.of(kind)} <= {None}
        assert {notice.version for notice in notices.of(TopicKind.ACKNOWLEDGEMENTS)} <= {None, header.version}

    def test_what_no_rebalanser_wrote_is_reported_and_left_alone(
        self, coordinator: Coordinator, harness: CoordinatorHarness
    ) -> None:
        """Holds: "Keys that no Rebalanser wrote, or a newer one, and what is wrong with each: they are left
        alone"."""
        if not harness.can_hold_foreign:
            pytest.skip("the harness says that nobody else can write into its store")
        first = join(coordinator)
        leadership = elect(coordinator, first)
        coordinator.set_policy(POLICY, POLICY_FIELDS)
        known = perform(coordinator, ReadGroup(first, leadership), GroupRead).group
        is_left_alone = harness.plant_foreign()
        assert coordinator.exists() == coordinator.read().exists
        second = join(coordinator)
        coordinator.put_resources([ResourceSpec("a"), ResourceSpec("b")], no_progress)
        seen = coordinator.read().group
        assert seen.unreadable
        assert all(seen.unreadable.values())
        for change in (coordinator.policy, lambda: coordinator.set_policy(Policy(), POLICY_FIELDS)):
            with pytest.raises(UnusableStore, match=r"policy.*schema 999"):
                change()
        for command in (
            ReadGroup(first, leadership),
            ReadGroup(first, leadership, known, keys=frozenset(seen.unreadable)),
        ):
            led = perform(coordinator, command, GroupRead).group
            assert led.policy == POLICY, "a leader keeps the last policy that it could read"
            assert any(key.endswith("/policy") for key in led.unreadable)
        assert (set(seen.members), set(seen.resources)) == ({first.node, second.node}, {"a", "b"})
        for shares in ({first.node: ["a", "b"], second.node: []}, {first.node: ["a"], second.node: ["b"]}):
            header = publish(coordinator, first, leadership, shares)
            added = add(coordinator, first, shares[first.node])
            assert set(added.added) == set(shares[first.node])
            remove(coordinator, first, added.added)
        acknowledge(coordinator, first, header.version)
        assert isinstance(coordinator.perform(Heartbeat(first, read_fingerprint=True)), Alive)
        led = perform(coordinator, ReadGroup(first, leadership), GroupRead).group
        beside = {key for key in seen.unreadable if {"barriers", "troubles"} & set(key.split("/"))}
        assert set(led.unreadable) == set(seen.unreadable) - beside
        assert led.acknowledged[first.node] == header.version
        coordinator.remove_resources(["a"], no_progress)
        perform(coordinator, Leave(second), Left)
        left = coordinator.read().group
        assert left.unreadable == seen.unreadable
        assert (set(left.members), set(left.resources)) == ({first.node}, {"b"})
        assert is_left_alone()

    def test_revisions_only_grow(self, coordinator: Coordinator) -> None:
        """Holds: "A command sent after another was answered takes effect after it"."""
        session = join(coordinator)
        revisions = [coordinator.read().group.revision]
        leadership = elect(coordinator, session)
        header = publish(coordinator, session, leadership, {session.node: ["a"]})
        added = add(coordinator, session, ["a"])
        removed = remove(coordinator, session, added.added)
        revisions += [leadership.revision, header.revision, added.added["a"], removed.revision]
        coordinator.put_resources([ResourceSpec("a")], no_progress)
        revisions.append(coordinator.read().group.revision)
        perform(coordinator, Leave(session), Left)
        revisions.append(coordinator.read().group.revision)
        assert revisions == sorted(set(revisions))

    def test_a_failure_is_an_outcome(self, harness: CoordinatorHarness) -> None:
        """Holds: "Every failure is an outcome, never an exception"."""
        coordinator = harness.open()
        session = join(coordinator)
        coordinator.close()
        coordinator.close()
        outcome = coordinator.perform(Heartbeat(session))
        assert isinstance(outcome, Failed)
        assert outcome.error
