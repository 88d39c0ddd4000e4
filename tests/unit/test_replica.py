"""The log of a group: every replica of it agrees, wherever it began, and what a lease's end needs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields, replace
from itertools import count, pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebalanser.core.group.messages import (
    Acknowledge,
    AddBarriers,
    Alive,
    BarriersAdded,
    BarriersRead,
    BarriersRemoved,
    Campaign,
    Command,
    Elected,
    Failed,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Outcome,
    Publish,
    Published,
    ReadBarriers,
    ReadGroup,
    ReadShare,
    RecordReleases,
    RemoveBarriers,
    SessionLost,
)
from rebalanser.core.group.types import (
    Header,
    Leadership,
    Member,
    Plan,
    Policy,
    ResourceSpec,
    Session,
)
from rebalanser.errors import InvalidName, RegistryUnavailable, UnusableStore
from rebalanser.registry.coordinator import GroupView
from rebalanser_kafka.group.follower import (
    Ended,
    Event,
    LogEntry,
    LogFollower,
    SnapshotRead,
    UnreadableRecord,
)
from rebalanser_kafka.group.leases import MAX_RANK, REPEAT_S, STAGGER_S, LeaseCounter, rank
from rebalanser_kafka.group.log import topic_of, weaknesses
from rebalanser_kafka.group.parts import REACH, in_parts
from rebalanser_kafka.group.records import (
    Change,
    Expire,
    Fed,
    PutResources,
    ReadAll,
    Rebase,
    RemoveResources,
    Request,
    SetDrained,
    SetPolicy,
    UnreadableValue,
    WeighResources,
    Wish,
    decode,
    encode,
)
from rebalanser_kafka.group.replica import FED_BY, FEEDER, LogLease, Result
from rebalanser_kafka.group.splitting import RESOURCES_PER_COMMAND, divided, in_turn

BORN_MS = 1_700_000_000_000
RESOURCES = ("a", "b", "c")


@dataclass
class Log:
    """A log in memory, and a follower that has read all of it from its beginning."""

    entries: list[LogEntry] = field(default_factory=list)
    born_ms: int = BORN_MS
    tokens: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """Each resource's holders with their tokens, as they followed each other."""

    def __post_init__(self) -> None:
        self.follower = LogFollower("group", 0)
        self._numbers = count()
        self.events: list[Event] = []

    def append(self, value: bytes | None, asked: str = "") -> list[Event]:
        offset = len(self.entries)
        entry = LogEntry(offset, self.born_ms + offset * 7, value)
        self.entries.append(entry)
        events = self.follower.read(entry, {asked: 100.0 + offset})
        self.events += events
        self._note_holders()
        return events

    def ask(self, wish: Wish, max_bytes: int = 10_000) -> Result:
        """Append a wish as a node does, and carry it out; its result."""
        name = f"request {next(self._numbers)}"
        events: list[Event] = []
        for part in in_parts(encode(Request(name, wish)), max_bytes):
            events += self.append(part, name)
        (ended,) = [event for event in events if isinstance(event, Ended)]
        if ended.error is not None:
            raise ended.error
        return ended.result

    def say(self, wish: Wish) -> None:
        self.append(encode(Request(f"request {next(self._numbers)}", wish)))

    def _note_holders(self) -> None:
        keys = self.follower.replica.keys
        for item in self.follower.replica.items():
            if item.key.startswith(keys.barriers):
                holders = self.tokens.setdefault(keys.resource_of_barrier(item.key), [])
                holder = (item.value.decode(), item.create_revision)
                if not holders or holders[-1] != holder:
                    holders.append(holder)

    def read_from(self, start: int) -> LogFollower:
        """Another connection that begins to read at ``start``, the earlier records being deleted."""
        follower = LogFollower("group", start)
        for entry in self.entries[start:]:
            follower.read(entry, {})
        return follower


def state_of(follower: LogFollower) -> tuple[object, ...]:
    replica = follower.replica
    leases = {lease: (held.ttl_s, held.renewal, held.keys) for lease, held in replica.leases.items()}
    return replica.items(), leases, replica.revision, replica.latest, replica.birth_ms


def joined(log: Log, node: str, ttl_s: float = 10.0) -> Session:
    outcome = log.ask(Join(Member(node, node), ttl_s))
    assert isinstance(outcome, Joined)
    return outcome.session


def elected(log: Log, session: Session) -> Leadership:
    outcome = log.ask(Campaign(session))
    assert isinstance(outcome, Elected)
    return outcome.leadership


def published(log: Log, session: Session, leadership: Leadership, shares: dict[str, list[str]]) -> Header:
    view = log.ask(ReadAll())
    assert isinstance(view, GroupView)
    before = view.group.header
    version = (before.version if before else 0) + 1
    plan = Plan(
        version,
        before,
        dict.fromkeys(shares, version),
        {node: frozenset(share) for node, share in shares.items()},
        frozenset((before.shares if before else {}).items()),
    )
    outcome = log.ask(Publish(session, leadership, plan))
    assert isinstance(outcome, Published)
    return outcome.header


class Chance:
    """Writes whatever nodes, operators and passers-by may write, in any order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.log = Log()
        self.sessions = [Session("nobody", 1, 1)]
        self.leaderships = [Leadership(0, "nobody", 1)]
        self.headers = [Header(0, 0, 1)]
        self.tokens = {resource: [1] for resource in RESOURCES}
        self.open_parts: list[bytes] = []

    def run(self, steps: int) -> Log:
        for _ in range(steps):
            self.random.choice(
                [self.order, self.order, self.order, self.operate, self.expire, self.pass_by, self.save]
            )()
        return self.log

    def some(self) -> frozenset[str]:
        return frozenset(self.random.sample(RESOURCES, self.random.randint(0, len(RESOURCES))))

    def order(self) -> None:
        session = self.random.choice(self.sessions[-4:])
        leadership, header = self.random.choice(self.leaderships[-2:]), self.random.choice(self.headers[-2:])
        version = header.version + 1
        wishes: list[Wish] = [
            Join(Member(f"n{self.random.randint(0, 5)}", "label"), self.random.choice([1.0, 5.0])),
            Join(Member(f"n{self.random.randint(0, 5)}", "label", capacity=2.0, zone="z"), 5.0),
            Heartbeat(session, leader=leadership.leader, read_fingerprint=True, blockers=frozenset({"n1"})),
            ReadShare(session),
            ReadBarriers(session, self.some()),
            AddBarriers(session, header.version, header.revision, self.some()),
            AddBarriers(session, header.version, header.revision, frozenset(RESOURCES)),
            RemoveBarriers(session, {r: self.random.choice(self.tokens[r][-2:]) for r in self.some()}),
            Acknowledge(session, header.version, self.random.choice([session.created, header.revision])),
            RecordReleases(session, Member(session.node, "label", released=self.some()), session.created),
            Leave(session),
            Campaign(session),
            ReadGroup(session, leadership),
            Publish(
                session,
                leadership,
                Plan(
                    version,
                    header if header.version else None,
                    {session.node: version},
                    {session.node: self.some()},
                    frozenset({(session.node, header.version)}),
                ),
            ),
        ]
        self.learn(self.log.ask(self.random.choice(wishes), self.random.choice([80, 200, 10_000])))

    def learn(self, outcome: Result) -> None:
        match outcome:
            case Joined(session=session):
                self.sessions.append(session)
            case Elected(leadership=leadership):
                self.leaderships.append(leadership)
            case Published(header=header):
                self.headers.append(header)
            case BarriersAdded(added=added):
                for resource, token in added.items():
                    self.tokens[resource].append(token)
            case _:
                pass

    def operate(self) -> None:
        spec = ResourceSpec(self.random.choice(RESOURCES), self.random.choice([1.0, 2.0]))
        wishes: list[Wish] = [
            PutResources((spec,)),
            RemoveResources((spec.resource,)),
            WeighResources(dict.fromkeys(self.some(), 2.0)),
            SetDrained("label", self.random.random() < 0.5),
            PutResources((replace(spec, needs=self.some(), spread="s"),), frozenset({"needs"})),
            SetPolicy(Policy(max_moves=self.random.randint(0, 2)), frozenset({"max_moves"})),
            ReadAll(),
            Fed((self.random.randint(0, 3), self.random.randint(0, 9)), self.some()),
            Rebase(self.log.follower.replica.latest + self.random.choice([-5, 5])),
        ]
        self.log.ask(self.random.choice(wishes))

    def expire(self) -> None:
        leases = self.log.follower.replica.leases
        if leases:
            lease = self.random.choice(sorted(leases))
            self.log.say(Expire(lease, leases[lease].renewal - self.random.choice([0, 0, 1])))

    def pass_by(self) -> None:
        """What is no request, and large requests whose parts come late, or never."""
        if self.open_parts and self.random.random() < 0.7:
            self.log.append(self.open_parts.pop(0))
        elif self.random.random() < 0.5:
            name = f"late {len(self.log.entries)}"
            specs = tuple(ResourceSpec(f"{name} {number}") for number in range(4))
            self.open_parts = in_parts(encode(Request(name, PutResources(specs))), 120)
        elif self.random.random() < 0.5:
            wishes: list[Wish] = [Leave(self.sessions[-1]), SetDrained("label", drained=True)]
            self.log.append(encode(Request("of another log", self.random.choice(wishes), BORN_MS - 1)))
        else:
            self.log.append(self.random.choice([None, b"", b"hello", b"RG\x01jnonsense", b"RBc1 and so on"]))

    def save(self) -> None:
        self.log.append(encode(Request(f"snapshot {len(self.log.entries)}", self.log.follower.snapshot())))


@pytest.mark.rule("RB-12", "RB-20")
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 120))
def test_replicas_agree_wherever_they_began(seed: int, steps: int) -> None:
    log = Chance(seed).run(steps)
    log.append(encode(Request("the last snapshot", log.follower.snapshot())))
    expected = state_of(log.follower)
    assert state_of(log.read_from(0)) == expected
    needs = [event.needs_from for event in log.events if isinstance(event, SnapshotRead)]
    for start in needs:
        reader = log.read_from(start)
        assert reader.complete == (start < len(log.entries))
        if reader.complete:
            assert state_of(reader) == expected


@pytest.mark.rule("RB-12")
@given(seed=st.integers(0, 2**32))
def test_tokens_of_a_resource_grow_strictly(seed: int) -> None:
    log = Chance(seed).run(150)
    for holders in log.tokens.values():
        assert all(earlier[1] < later[1] for earlier, later in pairwise(holders)), holders


def test_chance_gets_everywhere() -> None:
    outcomes: set[type] = set()
    for seed in range(40):
        chance = Chance(seed)
        chance.run(120)
        outcomes |= {type(event.result) for event in chance.log.events if isinstance(event, Ended)}
        outcomes |= {type(event) for event in chance.log.events}
    assert outcomes >= {
        Joined,
        Elected,
        Published,
        BarriersAdded,
        Alive,
        SessionLost,
        UnreadableRecord,
        SnapshotRead,
    }


@pytest.mark.rule("RB-1", "RB-12")
def test_what_was_written_for_another_log_is_carried_out_by_nobody() -> None:
    log = Log()
    session = joined(log, "n")
    before = state_of(log.follower)[0]
    events = log.append(encode(Request("late", Leave(session), BORN_MS - 1)), "late")
    assert [type(event.error) for event in events if isinstance(event, Ended)] == [RegistryUnavailable]
    assert state_of(log.follower)[0] == before
    log.append(encode(Request("in time", Leave(session), BORN_MS)))
    assert state_of(log.follower)[0] != before


@pytest.mark.rule("RB-12")
def test_a_topic_made_anew_goes_on_with_greater_tokens() -> None:
    first, second = Log(), Log(born_ms=BORN_MS + 60_000)
    for _ in range(50):
        first.append(b"whatever")
    before, after = joined(first, "n"), joined(second, "n")
    assert before.created < after.created


def test_a_log_that_was_cut_back_goes_on_above_what_was_seen() -> None:
    log = Log()
    joined(log, "n")
    seen = log.follower.replica.latest + 1000
    log.say(Rebase(seen))
    assert joined(log, "m").created > seen
    log.say(Rebase(5))
    assert joined(log, "o").created > seen


@pytest.mark.rule("RB-20", "RB-21")
def test_a_lease_ends_only_by_the_renewal_that_is_its_last() -> None:
    log = Log()
    session = joined(log, "n")
    renewal = log.follower.replica.leases[session.lease].renewal
    assert isinstance(log.ask(Heartbeat(session)), Alive)
    log.say(Expire(session.lease, renewal))
    assert isinstance(log.ask(Heartbeat(session)), Alive)
    renewal = log.follower.replica.leases[session.lease].renewal
    log.say(Expire(session.lease, renewal))
    log.say(Expire(session.lease, renewal))
    assert log.ask(Heartbeat(session)) == SessionLost()
    view = log.ask(ReadAll())
    assert isinstance(view, GroupView)
    assert view.group.members == {}


@pytest.mark.rule("RB-15", "RB-20")
def test_the_end_of_a_lease_takes_the_barriers_along_and_frees_them() -> None:
    log = Log()
    dies, stays = joined(log, "dies"), joined(log, "stays")
    header = published(log, stays, elected(log, stays), {"dies": ["a"], "stays": []})
    held = log.ask(AddBarriers(dies, header.version, header.revision, frozenset("a")))
    blocked = log.ask(AddBarriers(stays, header.version, header.revision, frozenset("a")))
    assert isinstance(held, BarriersAdded)
    assert isinstance(blocked, BarriersAdded)
    assert blocked.blocked == {"a": "dies"}
    log.say(Expire(dies.lease, log.follower.replica.leases[dies.lease].renewal))
    taken = log.ask(AddBarriers(stays, header.version, header.revision, frozenset("a")))
    assert isinstance(taken, BarriersAdded)
    assert taken.added["a"] > held.added["a"]


@pytest.mark.rule("RB-21")
def test_life_is_proven_from_before_the_record_was_sent() -> None:
    log = Log()
    session = joined(log, "n")
    offset = len(log.entries)
    alive = log.ask(Heartbeat(session))
    assert isinstance(alive, Alive)
    assert alive.proven_at == 100.0 + offset


def test_a_command_of_ten_thousand_resources_is_one_point() -> None:
    log = Log()
    session = joined(log, "n")
    leadership = elected(log, session)
    names = [f"resource {number}" for number in range(10_000)]
    header = published(log, session, leadership, {"n": names})
    added = log.ask(AddBarriers(session, header.version, header.revision, frozenset(names)), max_bytes=4_000)
    assert isinstance(added, BarriersAdded)
    assert set(added.added) == set(names)
    assert len(set(added.added.values())) == 1


WRITTEN = """
Acknowledge session version replaces
AddBarriers session version revision resources
Campaign session
Expire lease renewal
Fed epoch resources
Heartbeat session leader blockers read_fingerprint
Join member lease_ttl_s
Leave session
Publish session leadership plan
PutResources specs said
ReadAll
ReadBarriers session resources
ReadGroup session leadership known reread_shares reread_acknowledgements acknowledged_until keys
ReadShare session
Rebase revision
RecordReleases session member replaces
RemoveBarriers session barriers
RemoveResources resources
Resign session leadership error
SetDrained label drained
SetPolicy policy said
Snapshot as_of needs_from state
WeighResources weights
"""


def test_kinds_and_fields_are_written_under_the_names_that_older_nodes_read() -> None:
    """A renamed kind would be set aside by older nodes, as what nobody can read: replicas would differ."""
    kinds = (*get_args(Command), *get_args(Change))
    written = {kind.__name__: [each.name for each in fields(kind)] for kind in kinds}
    assert written == {kind: names for kind, *names in map(str.split, WRITTEN.strip().splitlines())}


@pytest.mark.parametrize(
    "value",
    [b"", b"x", b"RG", b"RG\x01", b"RG\x01j{}", b"RG\x01z123", b'RG\x01j{"id":1,"kind":"Leave","body":{}}'],
)
def test_what_nobody_can_read_is_set_aside(value: bytes) -> None:
    with pytest.raises(UnreadableValue):
        decode(value)
    log = Log()
    (event,) = log.append(value)
    assert isinstance(event, UnreadableRecord)
    assert state_of(log.follower) == state_of(log.read_from(0))


def test_a_request_of_a_newer_format_is_never_skipped() -> None:
    log = Log()
    newer = b"RG\x03" + encode(Request("r", ReadAll()))[3:]
    with pytest.raises(UnusableStore, match="upgrade this node"):
        log.append(newer)


def test_a_request_has_the_bytes_that_it_had_if_it_says_nothing_new() -> None:
    assert encode(Request("r", PutResources((ResourceSpec("a", 2.0, "w"),), frozenset({"pin"})))) == (
        b'RG\x01j{"id":"r","born_ms":0,"epoch":null,"kind":"PutResources","body":{"specs":[{"resource":"a",'
        b'"weight":2.0,"pin":"w","attributes":{}}],"said":["pin"]}}'
    )
    assert encode(Request("r", Join(Member("n", "label"), 5.0))) == (
        b'RG\x01j{"id":"r","born_ms":0,"epoch":null,"kind":"Join","body":{"member":{"node":"n","label":"label",'
        b'"mode":"cooperative","may_lead":true,"host":"","pid":0,"attributes":{},"released":[]},'
        b'"lease_ttl_s":5.0}}'
    )


GPU = frozenset({"gpu"})


@pytest.mark.rule("RB-46")
@pytest.mark.parametrize(
    "wish",
    [
        PutResources((ResourceSpec("a", needs=GPU),), frozenset({"needs"})),
        PutResources((ResourceSpec("a", spread="db"),), frozenset({"spread"})),
        PutResources((ResourceSpec("a"),), frozenset({"needs"})),
        Join(Member("n", "n", capacity=1.0), 5.0),
        Join(Member("n", "n", tags=GPU), 5.0),
        RecordReleases(Session("n", 1, 1), Member("n", "n", zone="eu-1"), 1),
        SetPolicy(Policy(), frozenset()),
    ],
)
def test_replicas_stop_at_a_request_that_they_would_carry_out_otherwise(wish: Wish) -> None:
    value = encode(Request("r", wish))
    assert value[2] == 2
    assert decode(value).wish == wish


@pytest.mark.rule("RB-46")
def test_replicas_stop_at_a_snapshot_with_needs_until_there_are_none() -> None:
    log = Log()
    log.ask(PutResources((ResourceSpec("a"), ResourceSpec("b")), frozenset()))
    assert encode(Request("s", log.follower.snapshot()))[2] == 1
    log.ask(PutResources((ResourceSpec("a", needs=GPU),), frozenset({"needs"})))
    assert encode(Request("s", log.follower.snapshot()))[2] == 2
    log.ask(PutResources((ResourceSpec("a"),), frozenset({"needs"})))
    assert encode(Request("s", log.follower.snapshot()))[2] == 1


def test_a_log_without_its_beginning_waits_for_a_snapshot() -> None:
    log = Log()
    joined(log, "n")
    joined(log, "m")
    assert not log.read_from(1).complete


def test_a_value_whose_parts_stand_too_far_apart_is_dropped() -> None:
    log = Log()
    first, *others = in_parts(encode(Request("r", PutResources((ResourceSpec("a"), ResourceSpec("b"))))), 100)
    log.append(first)
    for _ in range(REACH):
        log.append(None)
    for part in others:
        log.append(part)
    view = log.ask(ReadAll())
    assert isinstance(view, GroupView)
    assert view.group.resources == {}


@pytest.mark.rule("SH-19")
class TestFed:
    """The running applications of a cluster as resources, beside those that operators add."""

    @pytest.fixture
    def log(self) -> Log:
        return Log()

    def resources(self, log: Log) -> dict[str, ResourceSpec]:
        view = log.ask(ReadAll())
        assert isinstance(view, GroupView)
        return dict(view.group.resources)

    def test_what_runs_is_a_resource(self, log: Log) -> None:
        log.say(Fed((1, 1), frozenset({"t/c/a", "t/c/b"})))
        log.say(Fed((1, 2), frozenset({"t/c/b"})))
        assert self.resources(log) == {"t/c/b": ResourceSpec("t/c/b", attributes={FED_BY: FEEDER})}

    def test_an_older_document_undoes_nothing(self, log: Log) -> None:
        log.say(Fed((2, 1), frozenset({"new"})))
        for epoch in ((1, 9), (2, 0), (2, 1)):
            log.say(Fed(epoch, frozenset({"old"})))
        assert set(self.resources(log)) == {"new"}
        assert log.follower.replica.fed_epoch == (2, 1)

    def test_what_an_operator_added_stays_as_he_said(self, log: Log) -> None:
        log.say(PutResources((ResourceSpec("both", 3.0), ResourceSpec("own"))))
        log.say(Fed((1, 1), frozenset({"both"})))
        assert self.resources(log)["both"] == ResourceSpec("both", 3.0)
        log.say(Fed((1, 2), frozenset()))
        assert self.resources(log) == {"both": ResourceSpec("both", 3.0), "own": ResourceSpec("own")}

    def test_its_weight_goes_with_it(self, log: Log) -> None:
        log.say(Fed((1, 1), frozenset({"t/c/a", "t/c/b"})))
        assert log.ask(WeighResources({"t/c/a": 3.0, "t/c/none": 2.0})) == 1
        weighed = ResourceSpec("t/c/a", 3.0, attributes={FED_BY: FEEDER})
        assert self.resources(log)["t/c/a"] == weighed
        log.say(Fed((1, 2), frozenset({"t/c/a"})))
        assert self.resources(log) == {"t/c/a": weighed}
        log.say(Fed((1, 3), frozenset()))
        assert self.resources(log) == {}

    def test_it_goes_once_it_is_neither_added_nor_runs(self, log: Log) -> None:
        log.say(Fed((1, 1), frozenset({"both"})))
        assert log.ask(PutResources((ResourceSpec("both", 3.0),))) == 0
        assert log.ask(RemoveResources(("both",))) == 1
        assert self.resources(log) == {"both": ResourceSpec("both", attributes={FED_BY: FEEDER})}
        assert log.ask(RemoveResources(("both",))) == 0
        log.say(Fed((1, 2), frozenset()))
        assert self.resources(log) == {}


@pytest.mark.rule("RB-21")
class TestLeaseCounter:
    """Who says when that a lease has ended."""

    def test_it_counts_from_when_the_renewal_was_read(self) -> None:
        counter = LeaseCounter()
        counter.observe({7: LogLease(10.0, 1)}, 100.0)
        assert counter.due(109.9, lambda: [7], 7) == []
        counter.observe({7: LogLease(10.0, 2)}, 105.0)
        assert counter.due(114.9, lambda: [7], 7) == []
        assert counter.due(115.0, lambda: [7], 7) == [Expire(7, 2)]

    def test_it_says_so_again_after_a_while(self) -> None:
        counter = LeaseCounter()
        counter.observe({7: LogLease(1.0, 1)}, 0.0)
        assert counter.due(1.0, list, None) == [Expire(7, 1)]
        assert counter.due(1.0 + REPEAT_S / 2, list, None) == []
        assert counter.due(1.0 + REPEAT_S, list, None) == [Expire(7, 1)]

    def test_each_waits_for_those_that_joined_before(self) -> None:
        members = [1, 2, 3]
        for own, waits_s in ((1, 0.0), (2, STAGGER_S), (None, STAGGER_S * MAX_RANK)):
            counter = LeaseCounter()
            counter.observe({3: LogLease(1.0, 1)}, 0.0)
            if waits_s:
                assert counter.due(1.0 + waits_s / 2, lambda: members, own) == []
            assert counter.due(1.0 + waits_s + 1e-9, lambda: members, own) == [Expire(3, 1)]

    def test_those_that_are_over_themselves_are_not_waited_for(self) -> None:
        counter = LeaseCounter()
        counter.observe({1: LogLease(1.0, 1), 2: LogLease(9.0, 2)}, 0.0)
        assert counter.due(1.0, lambda: [1, 2], 2) == [Expire(1, 1)]

    def test_leases_that_are_gone_are_forgotten(self) -> None:
        counter = LeaseCounter()
        counter.observe({1: LogLease(1.0, 1)}, 0.0)
        counter.observe({}, 0.5)
        assert counter.due(9.0, list, None) == []
        assert counter.next_look(9.0) is None

    def test_a_rank_is_bounded(self) -> None:
        assert rank([], None) == 0
        assert rank(range(100), 99) == MAX_RANK


@pytest.mark.rule("RB-33")
class TestTopics:
    """The topic of a group."""

    @pytest.mark.parametrize("group", ["orders", "A", "a-b", "2026-11"])
    def test_a_plain_name_stays_legible(self, group: str) -> None:
        assert topic_of("c", group) == f"c-group-{group}"

    @given(
        st.lists(
            st.tuples(
                st.from_regex(r"[a-z-]{1,8}(-group-?){0,2}[a-z]{0,3}", fullmatch=True),
                st.text("abgroup-./_ é", min_size=1, max_size=12) | st.just("x" * 512),
            ),
            min_size=2,
            max_size=20,
            unique=True,
        )
    )
    def test_no_two_groups_share_a_topic(self, pairs: list[tuple[str, str]]) -> None:
        topics = [topic_of(cluster, group) for cluster, group in pairs]
        assert len(set(topics)) == len(pairs)
        assert all(len(topic) <= 249 and topic.isascii() for topic in topics)

    def test_what_can_name_no_topic_is_refused(self) -> None:
        with pytest.raises(InvalidName):
            topic_of("c", "")


class TestPortions:
    """Commands about very many resources."""

    names = tuple(f"r{number:05}" for number in range(RESOURCES_PER_COMMAND * 2 + 1))
    session = Session("n", 1, 1)

    def test_a_small_command_stays_whole(self) -> None:
        command = AddBarriers(self.session, 1, 1, frozenset("ab"))
        assert divided(command) == [command]
        assert divided(AddBarriers(self.session, 1, 1, frozenset())) == [
            AddBarriers(self.session, 1, 1, frozenset())
        ]

    @pytest.mark.parametrize("kind", ["add", "remove", "read"])
    def test_a_large_command_does_the_same_in_parts(self, kind: str) -> None:
        log = Log()
        session = joined(log, "n")
        header = published(log, session, elected(log, session), {"n": list(self.names)})
        asked: list[Command] = []

        def perform(command: Command) -> Outcome:
            asked.append(command)
            outcome = log.ask(command)
            assert not isinstance(outcome, int | GroupView | None)
            return outcome

        added = in_turn(AddBarriers(session, header.version, header.revision, frozenset(self.names)), perform)
        assert isinstance(added, BarriersAdded)
        assert set(added.added) == set(self.names)
        if kind == "read":
            assert in_turn(ReadBarriers(session, frozenset(self.names)), perform) == BarriersRead(added.added)
        elif kind == "remove":
            removed = in_turn(RemoveBarriers(session, added.added), perform)
            assert isinstance(removed, BarriersRemoved)
            assert removed.resources == removed.removed_at.keys() == set(self.names)
            parts = set(removed.removed_at.values())
            assert len(parts) == 3
            assert removed.revision == max(parts)
        assert len(asked) == (3 if kind == "add" else 6)

    @pytest.mark.parametrize(
        ("second", "superseded", "unknown"),
        [
            (Failed("away"), False, False),
            (Failed("away", unknown=True), False, True),
            (BarriersAdded(9, {}, {}, superseded=True), True, False),
        ],
    )
    def test_adding_that_fails_in_its_second_part_tells_what_the_first_added(
        self, second: Outcome, superseded: bool, unknown: bool
    ) -> None:
        parts: list[frozenset[str]] = []
        outcomes = iter([BarriersAdded(5, {"r00000": 5}, {"r00001": "m"}), second])

        def perform(part: Command) -> Outcome:
            assert isinstance(part, AddBarriers)
            parts.append(part.resources)
            return next(outcomes)

        told = in_turn(AddBarriers(self.session, 1, 1, frozenset(self.names)), perform)
        lost = parts[1] if unknown else frozenset()
        assert told == BarriersAdded(5, {"r00000": 5}, {"r00001": "m"}, superseded, lost)

    @pytest.mark.parametrize("second", [Failed("away"), Failed("away", unknown=True)])
    def test_removing_that_fails_in_its_second_part_is_unknown_as_a_whole(self, second: Outcome) -> None:
        outcomes = iter([BarriersRemoved(frozenset({"r00000"}), 5), second])
        command = RemoveBarriers(self.session, dict.fromkeys(self.names, 1))
        assert in_turn(command, lambda _part: next(outcomes)) == Failed("away", unknown=True)

    def test_a_session_that_ends_between_two_parts_is_lost(self) -> None:
        outcomes = iter([BarriersAdded(5, {"r00000": 5}, {}), SessionLost()])
        command = AddBarriers(self.session, 1, 1, frozenset(self.names))
        assert in_turn(command, lambda _part: next(outcomes)) == SessionLost()

    @pytest.mark.parametrize(
        "first", [Failed("away"), SessionLost(), BarriersAdded(9, {}, {}, superseded=True)]
    )
    def test_a_first_part_that_fails_is_the_end(self, first: Outcome) -> None:
        outcomes = iter([first])
        command = AddBarriers(self.session, 1, 1, frozenset(self.names))
        assert in_turn(command, lambda _part: next(outcomes)) == first


@pytest.mark.parametrize(
    ("replicas", "settings_found", "words"),
    [
        (3, {"min.insync.replicas": "2", "unclean.leader.election.enable": "false"}, []),
        (1, {"min.insync.replicas": "1"}, ["one replica"]),
        (3, {"min.insync.replicas": "1"}, ["min.insync.replicas is 1"]),
        (
            3,
            {"min.insync.replicas": "1", "unclean.leader.election.enable": "true"},
            ["unclean.leader.election.enable is true", "min.insync.replicas is 1"],
        ),
    ],
)
def test_what_weakens_the_promise_is_told(
    replicas: int, settings_found: dict[str, str], words: list[str]
) -> None:
    reasons = weaknesses(replicas, settings_found)
    assert len(reasons) == len(words)
    assert all(word in reason for word, reason in zip(words, reasons, strict=True))
