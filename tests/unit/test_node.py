"""The core, one event at a time: what the simulator does not show by itself, and what it once found."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import pytest

from rebalanser.core.allocation import solve
from rebalanser.core.group import (
    Accept,
    Answered,
    AskStop,
    CallStart,
    CallStop,
    Command,
    Effect,
    Effort,
    Event,
    FactKind,
    Failed,
    Fingerprint,
    Finished,
    Group,
    Guard,
    Handler,
    HandlerReturned,
    Header,
    Leadership,
    MakePlan,
    Member,
    Membership,
    Mode,
    Node,
    NodeOptions,
    Noticed,
    OnOverrun,
    Outcome,
    Perform,
    Release,
    Report,
    ResourceSpec,
    Role,
    Session,
    Share,
    Start,
    Step,
    Stop,
    Timings,
    Topic,
    TopicKind,
    Wakeup,
    Watch,
    intended,
    problem_of,
)
from rebalanser.core.group.leading import RESIGN_AFTER
from rebalanser.core.group.messages import (
    Acknowledge,
    Acknowledged,
    AddBarriers,
    Alive,
    BarriersAdded,
    BarriersRead,
    BarriersRemoved,
    Campaign,
    Conflict,
    Deposed,
    Elected,
    Follows,
    GroupRead,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Left,
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
from rebalanser.errors import InternalError

TIMINGS = Timings(
    lease_ttl_s=10.0,
    heartbeat_interval_s=1.0,
    stop_timeout_s=2.0,
    start_timeout_s=2.0,
    safety_margin_s=1.0,
    clock_drift_ratio=0.0,
    settle_time_s=0.5,
    min_rebalance_interval_s=3.0,
    retry_initial_s=0.1,
    retry_max_s=1.0,
    rejoin_initial_s=1.0,
    rejoin_max_s=8.0,
)
SESSION = Session("n-0", lease=1, created=10)
LOST = Failed("no answer", unknown=True)
CommandT = TypeVar("CommandT", bound=Command)
EffectT = TypeVar("EffectT", bound=Effect)


class Driven:
    """A node whose world is the test."""

    def __init__(
        self,
        mode: Mode = Mode.COOPERATIVE,
        may_lead: bool = False,
        options: NodeOptions | None = None,
        timings: Timings = TIMINGS,
    ) -> None:
        member = Member("n", label="n", mode=mode, may_lead=may_lead)
        self.node = Node(member, timings, solve, options or NodeOptions())
        self.now = 0.0
        self.effects: list[Effect] = []
        self.under_way: list[Command] = []
        self.plans_at_once = True

    def feed(self, event: Event) -> list[Effect]:
        """Handle an event; a plan that is asked for is made at once, unless the test makes it."""
        self.effects = self.node.handle(event, self.now)
        for asked in self.all(MakePlan) if self.plans_at_once else ():
            self.effects += self.node.handle(self.node.make_plan(asked), self.now)
        self.under_way += [effect.command for effect in self.effects if isinstance(effect, Perform)]
        return self.effects

    def pass_to(self, now: float) -> list[Effect]:
        self.now = now
        return self.feed(Wakeup())

    def all(self, kind: type[EffectT]) -> list[EffectT]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def sent(self, kind: type[CommandT]) -> CommandT | None:
        return next((command for command in self.under_way if isinstance(command, kind)), None)

    def answer(self, kind: type[Command], outcome: Outcome) -> list[Effect]:
        command = self.sent(kind)
        assert command is not None, f"{kind.__name__} was not sent, but {self.under_way}"
        self.under_way.remove(command)
        return self.feed(Answered(command, outcome))

    def returns(self, handler: Handler, error: str | None = None) -> list[Effect]:
        return self.feed(HandlerReturned(handler, error))

    def facts(self) -> list[FactKind]:
        return [fact.kind for report in self.all(Report) for fact in report.facts()]

    def told(self, kind: FactKind) -> list[tuple[str | None, int | None, int | None]]:
        """Of each such fact the resource, the token and the revision."""
        facts = [fact for report in self.all(Report) for fact in report.facts()]
        return [(fact.resource, fact.token, fact.revision) for fact in facts if fact.kind is kind]

    def join(self) -> None:
        self.feed(Start())
        self.answer(Join, Joined(SESSION, proven_at=self.now))

    def give(self, version: int, *resources: str) -> None:
        """The next ReadShare is answered with this share."""
        revision = 100 + version
        header = Header(version, 1, revision)
        self.answer(ReadShare, ShareRead(revision, header, Share(version, frozenset(resources)), None))

    def notice(self, version: int) -> None:
        self.feed(Noticed(Topic(TopicKind.ALLOCATION, "n-0"), 100 + version, version))

    def add(self, token: int, *resources: str, blocked: Mapping[str, str] | None = None) -> None:
        self.answer(AddBarriers, BarriersAdded(token, dict.fromkeys(resources, token), blocked or {}))

    def own(self, *resources: str) -> None:
        """Join, and own these with token 200."""
        self.join()
        self.give(1, *resources)
        self.add(200, *resources)
        self.returns(Handler.START)
        self.answer(Acknowledge, Acknowledged(1, 201))

    def beat(self, **seen: object) -> None:
        """The heartbeat of this moment is answered."""
        self.answer(Heartbeat, Alive(proven_at=self.now, revision=500, share_revision=101, **seen))  # type: ignore[arg-type]


def leading(resources: int = 2, group_revision: int = 50) -> Driven:
    """A leader that has published version 1 for itself."""
    driven = Driven(may_lead=True)
    driven.join()
    driven.answer(Campaign, Elected(Leadership(1, "n-0", 40)))
    driven.answer(ReadGroup, GroupRead(group(resources, group_revision)))
    driven.answer(Publish, Published(Header(1, 1, 51), {"n-0": _share(resources)}))
    return driven


def group(
    resources: int, revision: int, header: Header | None = None, acknowledged: int = 0, **shares: Share
) -> Group:
    named = {f"r{index}": ResourceSpec(f"r{index}") for index in range(resources)}
    return Group(
        revision=revision,
        members={"n-0": Member("n-0", "n")},
        resources=named,
        drained=frozenset(),
        header=header,
        shares={name.replace("_", "-"): share for name, share in shares.items()},
        obsolete_parts=frozenset(),
        acknowledged={"n-0": acknowledged},
        fingerprint=Fingerprint((1, 10), 5),
    )


@pytest.mark.rule("RB-5")
def test_a_node_that_may_lead_campaigns_and_leads_when_elected() -> None:
    driven = Driven(may_lead=True)
    driven.join()
    assert driven.sent(Campaign) == Campaign(SESSION)
    driven.answer(Campaign, Elected(Leadership(7, "n-0", 40)))
    assert driven.node.role is Role.LEADER
    assert driven.sent(ReadGroup) == ReadGroup(SESSION, Leadership(7, "n-0", 40))


@pytest.mark.rule("RB-5")
def test_a_node_that_may_not_lead_never_campaigns() -> None:
    driven = Driven(may_lead=False)
    driven.join()
    driven.pass_to(1.0)
    driven.beat(leader_alive=False)
    assert driven.sent(Campaign) is None
    assert driven.node.role is Role.NONE


@pytest.mark.rule("RB-6")
def test_a_leader_that_sees_another_term_reverts_and_asks_who_leads() -> None:
    driven = leading()
    driven.feed(Noticed(Topic(TopicKind.LEADERSHIP), 60))
    assert FactKind.DEPOSED in driven.facts()
    assert driven.node.role is Role.FOLLOWER
    driven.answer(Campaign, Follows(Leadership(2, "m-0", 60), 61))
    assert driven.node.leadership == Leadership(2, "m-0", 60)


@pytest.mark.rule("RB-28", "RB-8")
@pytest.mark.parametrize(
    "notice",
    [
        Noticed(Topic(TopicKind.LEADERSHIP), 60, lost=True),
        Noticed(Topic(TopicKind.NODE, "m-0"), 60),
        Noticed(Topic(TopicKind.NODE, "m-0"), 60, lost=True),
    ],
    ids=["the term's history is lost", "the leader before it left", "that leader's history is lost"],
)
def test_a_leader_leads_on_until_it_is_told_of_another_term(notice: Noticed) -> None:
    driven = leading()
    driven.feed(notice)
    assert driven.node.role is Role.LEADER
    driven.pass_to(1.0)
    driven.beat(leadership_revision=55)
    assert driven.node.role is Role.FOLLOWER


@pytest.mark.rule("RB-46")
def test_a_leader_tells_once_of_keys_that_it_can_not_read() -> None:
    driven = Driven(may_lead=True)
    driven.join()
    driven.answer(Campaign, Elected(Leadership(1, "n-0", 40)))
    told: list[list[tuple[float | None, object]]] = []
    for revision, keys in (
        (50, {}),
        (60, {"b": "why b"}),
        (70, {"b": "why b"}),
        (80, {"b": "b", "a": "why a"}),
    ):
        driven.answer(ReadGroup, GroupRead(replace(group(2, revision), unreadable=keys)))
        facts = [fact for report in driven.all(Report) for fact in report.facts()]
        told.append([(f.value, f.detail["why"]) for f in facts if f.kind is FactKind.UNREADABLE])
        driven.answer(Publish, Failed("too slow"))
        driven.pass_to(driven.now + 1.0)
    assert told == [[], [(1, "why b")], [], [(2, "why a")]]


@pytest.mark.rule("RB-7", "RB-13", "RB-19")
def test_what_a_node_watches_follows_from_its_role() -> None:
    driven = Driven(may_lead=True)
    driven.join()
    driven.give(1)
    driven.answer(Campaign, Follows(Leadership(2, "m-0", 60), 61))
    own = {Topic(TopicKind.ALLOCATION, "n-0"): 102}
    assert driven.all(Watch)[-1].topics == {
        Topic(TopicKind.LEADERSHIP): 62,
        Topic(TopicKind.NODE, "m-0"): 62,
        **own,
    }
    driven.feed(Noticed(Topic(TopicKind.NODE, "m-0"), 70))
    driven.answer(Campaign, Elected(Leadership(3, "n-0", 71)))
    driven.answer(ReadGroup, GroupRead(group(2, 80)))
    assert driven.all(Watch)[-1].topics == {
        Topic(TopicKind.LEADERSHIP): 72,
        Topic(TopicKind.GROUP): 81,
        Topic(TopicKind.ACKNOWLEDGEMENTS): 81,
        **own,
    }


@pytest.mark.rule("RB-34")
def test_the_switch_is_armed_before_onstart_is_called() -> None:
    driven = Driven()
    driven.join()
    driven.give(1, "a")
    driven.add(200, "a")
    kinds = [type(effect) for effect in driven.effects]
    assert kinds.index(Guard) < kinds.index(CallStart)


@pytest.mark.rule("RB-6")
@pytest.mark.parametrize("kind", [ReadGroup, Publish, Resign])
def test_a_leader_that_is_told_of_another_term_reverts_whatever_it_asked(kind: type[Command]) -> None:
    driven = Driven(may_lead=True)
    driven.join()
    driven.answer(Campaign, Elected(Leadership(1, "n-0", 40)))
    if kind is Publish:
        driven.answer(ReadGroup, GroupRead(group(2, 50)))
    if kind is Resign:
        fails(driven, ReadGroup, RESIGN_AFTER)
    driven.answer(kind, Deposed())
    assert FactKind.DEPOSED in driven.facts()
    assert driven.node.role is Role.FOLLOWER
    assert driven.sent(Campaign) == Campaign(SESSION)


def fails(driven: Driven, kind: type[Command], times: int) -> None:
    """Let commands of a kind fail, and the time pass until each is tried again."""
    for _ in range(times):
        driven.answer(kind, Failed("too slow"))
        driven.pass_to(driven.now + 4.0)
        driven.beat()


@pytest.mark.rule("RB-43")
@pytest.mark.parametrize("kind", [ReadGroup, Publish])
def test_a_leader_that_fails_too_often_resigns(kind: type[Command]) -> None:
    driven = Driven(may_lead=True)
    driven.join()
    driven.answer(Campaign, Elected(Leadership(1, "n-0", 40)))
    for failure in range(RESIGN_AFTER):
        assert driven.sent(Resign) is None, failure
        if kind is Publish:
            driven.answer(ReadGroup, GroupRead(group(2, 50)))
        fails(driven, kind, 1)
    assert driven.sent(ReadGroup) is None
    assert driven.sent(Resign) == Resign(SESSION, Leadership(1, "n-0", 40), "too slow")
    fails(driven, Resign, 2)
    driven.answer(Resign, Resigned(Leadership(1, "", 60)))
    assert FactKind.RESIGNED in driven.facts()
    assert driven.node.role is Role.FOLLOWER
    assert driven.sent(Campaign) is None
    driven.pass_to(driven.now + 0.9 * TIMINGS.lease_ttl_s)
    assert driven.sent(Campaign) is None, "others come first"
    driven.beat()
    driven.pass_to(driven.now + 0.1 * TIMINGS.lease_ttl_s)
    assert driven.sent(Campaign) == Campaign(SESSION), "nobody else leads"


@pytest.mark.rule("RB-43")
@pytest.mark.parametrize("succeeds", ["with a plan", "without"])
def test_only_failures_in_a_row_make_a_leader_resign(succeeds: str) -> None:
    driven = Driven(may_lead=True)
    driven.join()
    driven.answer(Campaign, Elected(Leadership(1, "n-0", 40)))
    version = 0
    for _ in range(3):
        fails(driven, ReadGroup, RESIGN_AFTER - 1)
        if succeeds == "without" and version:
            header = Header(version, 1, 50 + version)
            share = Share(version, frozenset({"r0", "r1"}))
            driven.answer(ReadGroup, GroupRead(group(2, 60 + version, header, n_0=share)))
        else:
            version += 1
            driven.answer(ReadGroup, GroupRead(group(1 + version, 50 + 10 * version)))
            driven.answer(Publish, Published(Header(version, 1, 51 + 10 * version)))
        driven.feed(Noticed(Topic(TopicKind.GROUP), 100 * (version + 10)))
        driven.pass_to(driven.now + 4.0)
        driven.beat()
    assert driven.sent(Resign) is None
    assert driven.node.role is Role.LEADER


@pytest.mark.rule("RB-43")
def test_who_resigned_campaigns_as_soon_as_another_leads() -> None:
    driven = Driven(may_lead=True)
    driven.join()
    driven.answer(Campaign, Elected(Leadership(1, "n-0", 40)))
    fails(driven, ReadGroup, RESIGN_AFTER)
    driven.feed(Noticed(Topic(TopicKind.LEADERSHIP), 60))
    assert driven.node.role is Role.FOLLOWER, "the notice overtook the answer"
    driven.answer(Resign, Resigned(Leadership(1, "", 60)))
    assert driven.sent(Campaign) is None
    driven.feed(Noticed(Topic(TopicKind.LEADERSHIP), 61))
    driven.answer(Campaign, Follows(Leadership(2, "m-0", 61), 61))
    assert driven.node.leadership == Leadership(2, "m-0", 61)


@pytest.mark.rule("RB-43")
def test_where_nobody_leads_a_follower_campaigns_again() -> None:
    driven = Driven(may_lead=True)
    driven.join()
    driven.answer(Campaign, Follows(Leadership(1, "", 60), 60))
    driven.answer(Campaign, Elected(Leadership(2, "n-0", 61)))
    assert driven.node.role is Role.LEADER


@pytest.mark.rule("RB-7")
def test_heartbeats_trigger_no_rebalance_and_a_change_does() -> None:
    driven = leading()
    driven.now = 5.0
    driven.feed(Wakeup())
    driven.beat(fingerprint=Fingerprint((1, 10), 5), leadership_revision=40)
    assert driven.sent(ReadGroup) is None
    driven.feed(Noticed(Topic(TopicKind.GROUP), 60))
    assert driven.sent(ReadGroup) is None
    driven.pass_to(5.5)
    assert driven.sent(ReadGroup) is not None


@pytest.mark.rule("RB-7", "RB-28")
def test_a_heartbeat_makes_good_a_change_that_no_watch_told() -> None:
    driven = leading()
    driven.pass_to(5.0)
    driven.beat(fingerprint=Fingerprint((1, 10), 60), leadership_revision=40)
    driven.pass_to(5.5)
    assert driven.sent(ReadGroup) is not None


@pytest.mark.rule("RB-8")
def test_changes_within_the_settle_time_are_one_rebalance() -> None:
    driven = leading()
    driven.now = 10.0
    driven.feed(Noticed(Topic(TopicKind.GROUP), 60))
    driven.now = 10.4
    driven.feed(Noticed(Topic(TopicKind.GROUP), 61))
    assert driven.sent(ReadGroup) is None
    driven.pass_to(10.5)
    assert driven.sent(ReadGroup) is not None
    driven.answer(ReadGroup, GroupRead(group(3, 61)))
    driven.answer(Publish, Published(Header(2, 1, 62)))
    driven.pass_to(30.0)
    assert driven.sent(ReadGroup) is None


@pytest.mark.rule("AU-6", "RB-10")
def test_what_is_published_says_what_it_costs() -> None:
    driven = leading(resources=2)
    (published,) = (
        report.fact for report in driven.all(Report) if report.fact.kind is FactKind.ALLOCATION_PUBLISHED
    )
    assert published.value == 1
    assert published.detail == {
        "published_version": 1,
        "moves": 0,
        "least_moves": 0,
        "nodes": 1,
        "resources": 2,
    }


@pytest.mark.rule("AU-6", "RB-6")
def test_what_turns_out_to_have_been_published_is_told_once() -> None:
    driven = Driven(may_lead=True)
    driven.join()
    driven.answer(Campaign, Elected(Leadership(1, "n-0", 40)))
    driven.answer(ReadGroup, GroupRead(group(2, 50)))
    driven.answer(Publish, LOST)
    driven.pass_to(0.6)
    driven.answer(ReadGroup, GroupRead(group(2, 50)))
    assert FactKind.ALLOCATION_PUBLISHED not in driven.facts()
    driven.answer(Publish, Conflict())
    driven.pass_to(1.2)
    owned = Share(1, frozenset({"r0", "r1"}))
    driven.answer(ReadGroup, GroupRead(group(2, 52, Header(1, 1, 51), n_0=owned)))
    facts = [report.fact for report in driven.all(Report)]
    assert [fact.kind for fact in facts] == [FactKind.ALLOCATION_PUBLISHED, FactKind.GROUP_READ]
    assert (facts[0].term, facts[0].value, facts[0].revision) == (1, 1, 51)
    assert facts[0].detail == {
        "published_version": 1,
        "moves": 0,
        "least_moves": 0,
        "nodes": 1,
        "resources": 2,
    }
    driven.feed(Noticed(Topic(TopicKind.GROUP), 60))
    driven.pass_to(1.8)
    driven.answer(ReadGroup, GroupRead(group(2, 61, Header(1, 1, 51), n_0=owned)))
    assert FactKind.GROUP_READ in driven.facts()
    assert FactKind.ALLOCATION_PUBLISHED not in driven.facts()


@pytest.mark.rule("AU-6", "RB-6")
def test_what_another_leader_published_is_not_told_as_ones_own() -> None:
    driven = Driven(may_lead=True)
    driven.join()
    driven.answer(Campaign, Elected(Leadership(2, "n-0", 40)))
    owned = Share(7, frozenset({"r0", "r1"}))
    driven.answer(ReadGroup, GroupRead(group(2, 50, Header(7, 1, 39), n_0=owned)))
    assert driven.facts() == [FactKind.GROUP_READ]


@pytest.mark.rule("AU-6", "RB-10")
def test_a_drained_node_counts_as_gone_in_what_an_allocation_costs() -> None:
    driven = leading(resources=0)
    header = Header(1, 1, 51)
    resources = {name: ResourceSpec(name) for name in "abcd"}
    shares = {"n-0": Share(1, frozenset("ab")), "m-0": Share(1, frozenset("cd"))}
    members = {"n-0": Member("n-0", "n"), "m-0": Member("m-0", "m")}
    driven.now = 10.0
    driven.feed(Noticed(Topic(TopicKind.GROUP), 60))
    driven.pass_to(10.5)
    driven.answer(
        ReadGroup,
        GroupRead(
            replace(
                group(0, 61, header),
                members=members,
                resources=resources,
                shares=shares,
                drained=frozenset({"m"}),
            )
        ),
    )
    publish = driven.sent(Publish)
    assert publish is not None
    assert publish.plan.effort == Effort(moves=0, least_moves=0, nodes=1, resources=4)
    assert publish.plan.changed == {"n-0": frozenset("abcd"), "m-0": frozenset()}


@pytest.mark.rule("RB-8")
def test_rebalances_keep_their_distance() -> None:
    driven = leading()
    driven.now = 1.0
    driven.feed(Noticed(Topic(TopicKind.GROUP), 60))
    driven.pass_to(2.9)
    assert driven.sent(ReadGroup) is None
    driven.pass_to(3.0)
    assert driven.sent(ReadGroup) is not None


@pytest.mark.rule("RB-8", "RB-9")
def test_a_change_after_the_snapshot_is_never_lost() -> None:
    driven = leading()
    driven.now = 10.0
    driven.feed(Noticed(Topic(TopicKind.GROUP), 60))
    driven.pass_to(10.5)
    driven.feed(Noticed(Topic(TopicKind.GROUP), 70))
    driven.answer(ReadGroup, GroupRead(group(2, 65, Header(1, 1, 51), n_0=_share(2))))
    driven.pass_to(12.0)
    assert driven.sent(ReadGroup) is not None


def _share(resources: int, version: int = 1) -> Share:
    return Share(version, frozenset(f"r{index}" for index in range(resources)))


@pytest.mark.rule("RB-10")
def test_a_balanced_group_is_left_as_it_is() -> None:
    driven = leading()
    driven.now = 10.0
    driven.feed(Noticed(Topic(TopicKind.GROUP), 60))
    driven.pass_to(10.5)
    driven.answer(ReadGroup, GroupRead(group(2, 65, Header(1, 1, 51), n_0=_share(2))))
    assert driven.sent(Publish) is None


def planning() -> tuple[Driven, MakePlan]:
    """A leader that has read the group, and the plan that it asked for."""
    driven = Driven(may_lead=True)
    driven.plans_at_once = False
    driven.join()
    driven.answer(Campaign, Elected(Leadership(1, "n-0", 40)))
    driven.answer(ReadGroup, GroupRead(group(2, 50)))
    (asked,) = driven.all(MakePlan)
    return driven, asked


@pytest.mark.rule("RB-9", "RB-21")
def test_a_leader_heartbeats_and_reads_nothing_anew_while_its_plan_is_made() -> None:
    driven, asked = planning()
    driven.feed(Noticed(Topic(TopicKind.GROUP), 60))
    driven.pass_to(5.0)
    assert driven.sent(Heartbeat) is not None
    assert driven.sent(Publish) is None
    assert driven.sent(ReadGroup) is None
    driven.feed(driven.node.make_plan(asked))
    publish = driven.sent(Publish)
    assert publish is not None
    assert publish.plan.shares == {"n-0": 1}
    driven.answer(Publish, Published(Header(1, 1, 61)))
    driven.pass_to(9.0)
    assert driven.sent(ReadGroup) is not None, "the change came while the plan was made"


@pytest.mark.rule("RB-6")
def test_a_plan_that_was_asked_for_in_another_term_is_not_published() -> None:
    driven, asked = planning()
    driven.feed(Noticed(Topic(TopicKind.LEADERSHIP), 60))
    driven.answer(Campaign, Elected(Leadership(3, "n-0", 65)))
    driven.feed(driven.node.make_plan(asked))
    assert driven.sent(Publish) is None
    driven.answer(ReadGroup, GroupRead(group(2, 70)))
    (again,) = driven.all(MakePlan)
    driven.feed(driven.node.make_plan(asked))
    assert driven.sent(Publish) is None
    driven.feed(driven.node.make_plan(again))
    publish = driven.sent(Publish)
    assert publish is not None
    assert publish.leadership.term == 3


@pytest.mark.rule("RB-6")
def test_a_plan_that_is_made_after_its_session_ended_is_not_published() -> None:
    driven, asked = planning()
    driven.pass_to(5.0)
    driven.answer(Heartbeat, SessionLost())
    assert driven.node.role is not Role.LEADER
    driven.feed(driven.node.make_plan(asked))
    assert driven.sent(Publish) is None


@pytest.mark.rule("RB-9", "RB-10")
def test_a_plan_that_was_given_up_is_made_impossible_even_where_nothing_has_to_change() -> None:
    driven = leading()
    header = Header(1, 1, 51)
    driven.now = 10.0
    driven.feed(Noticed(Topic(TopicKind.GROUP), 60))
    driven.pass_to(10.5)
    driven.answer(ReadGroup, GroupRead(group(3, 65, header, n_0=_share(2))))
    given_up = driven.sent(Publish)
    assert given_up is not None
    driven.answer(Publish, LOST)
    driven.pass_to(12.0)
    driven.answer(ReadGroup, GroupRead(group(2, 70, header, n_0=_share(2))))
    publish = driven.sent(Publish)
    assert publish is not None
    assert publish.plan.based_on == given_up.plan.based_on
    assert publish.plan.version > given_up.plan.version
    assert publish.plan.shares == {"n-0": 1}
    assert publish.plan.changed == {}


@pytest.mark.rule("RB-14")
def test_a_newer_allocation_aborts_step_3() -> None:
    driven = Driven()
    driven.join()
    driven.give(1, "a", "b")
    driven.add(200, "a", blocked={"b": "m-0"})
    driven.returns(Handler.START)
    assert driven.node.step is Step.ADDING
    driven.notice(2)
    driven.give(2, "a")
    assert driven.node.blocked == {}
    assert driven.sent(AddBarriers) is None
    assert driven.sent(Acknowledge) == Acknowledge(SESSION, 2, replaces=10)


@pytest.mark.rule("RB-14")
@pytest.mark.parametrize("revision", [101, 150])
def test_a_superseded_attempt_reads_the_share_again_and_keeps_what_it_added(revision: int) -> None:
    driven = Driven()
    driven.join()
    driven.give(1, "a", "b")
    driven.answer(AddBarriers, BarriersAdded(revision, {"a": revision}, {}, superseded=True))
    assert driven.sent(ReadShare) == ReadShare(SESSION)
    header = Header(2, 1, 160)
    driven.answer(ReadShare, ShareRead(160, header, Share(2, frozenset({"a", "b"})), None))
    again = driven.sent(AddBarriers)
    assert again is not None
    assert again.resources == {"b"}


@pytest.mark.rule("RB-14")
def test_what_a_lost_answer_may_have_added_is_found_out_once_it_is_not_wanted() -> None:
    driven = Driven()
    driven.join()
    driven.give(1, "a", "b", "c")
    driven.answer(AddBarriers, BarriersAdded(150, {"a": 150}, {}, unknown=frozenset({"b"})))
    again = driven.sent(AddBarriers)
    assert again is not None
    assert again.resources == {"b", "c"}
    driven.answer(AddBarriers, Failed("refused"))
    driven.notice(2)
    driven.pass_to(TIMINGS.retry_initial_s)
    driven.give(2, "a", "c")
    assert driven.sent(ReadBarriers) == ReadBarriers(SESSION, frozenset({"b"}))


@pytest.mark.rule("RB-21")
def test_what_happens_to_many_resources_is_one_report() -> None:
    driven = Driven()
    driven.join()
    driven.give(1, "a", "b", "c", "d")
    driven.add(200, "b", "a", blocked={"d": "m-0", "c": "m-1"})
    added, blocked = driven.all(Report)
    assert [(fact.resource, fact.token, fact.revision) for fact in added.facts()] == [
        ("a", 200, 200),
        ("b", 200, 200),
    ]
    assert [(fact.resource, fact.revision, fact.detail) for fact in blocked.facts()] == [
        ("c", 200, {"holder": "m-1"}),
        ("d", 200, {"holder": "m-0"}),
    ]
    assert (added.count, blocked.count) == (2, 2)


@pytest.mark.rule("RB-14")
def test_a_newer_allocation_never_interrupts_onstart() -> None:
    driven = Driven()
    driven.join()
    driven.give(1, "a")
    driven.add(200, "a")
    driven.notice(2)
    driven.give(2)
    assert driven.all(AskStop) == [AskStop(frozenset({"a"}))]
    assert driven.all(CallStop) == []
    assert driven.sent(RemoveBarriers) is None
    driven.returns(Handler.START)
    assert driven.all(CallStop) == [CallStop(frozenset({"a"}))]


@pytest.mark.rule("RB-14", "RB-18", "RB-41")
def test_what_was_asked_to_stop_passes_onstop_and_starts_anew_even_if_it_is_given_back() -> None:
    driven = Driven()
    driven.join()
    driven.give(1, "a")
    driven.add(200, "a")
    driven.notice(2)
    driven.give(2)
    driven.notice(3)
    driven.give(3, "a")
    driven.returns(Handler.START)
    assert driven.all(CallStop) == [CallStop(frozenset({"a"}))]
    assert driven.sent(Acknowledge) is None
    driven.returns(Handler.STOP)
    assert driven.sent(RemoveBarriers) is None
    assert [call.owned for call in driven.all(CallStart)] == [{"a": 200}]
    driven.returns(Handler.START)
    assert driven.all(CallStop) == []
    assert driven.sent(Acknowledge) == Acknowledge(SESSION, 3, replaces=10)


@pytest.mark.rule("RB-14")
def test_each_resource_is_asked_to_stop_once() -> None:
    driven = Driven()
    driven.own("a", "b", "c")
    driven.notice(2)
    driven.give(2, "b", "c")
    assert driven.all(CallStop) == [CallStop(frozenset({"a"}))]
    driven.notice(3)
    driven.give(3, "c")
    assert driven.all(AskStop) == [AskStop(frozenset({"b"}))]
    driven.notice(4)
    driven.give(4, "b")
    assert driven.all(AskStop) == [AskStop(frozenset({"c"}))]
    driven.returns(Handler.STOP)
    assert driven.all(CallStop) == [CallStop(frozenset({"b", "c"}))]


@pytest.mark.rule("RB-14", "RB-41")
def test_an_onstart_that_was_asked_to_stop_before_it_was_entered_is_called_again_without_onstop() -> None:
    driven = Driven()
    driven.join()
    driven.give(1, "a")
    driven.add(200, "a")
    driven.notice(2)
    driven.give(2)
    driven.notice(3)
    driven.give(3, "a")
    driven.feed(HandlerReturned(Handler.START, refused=True))
    assert driven.all(CallStop) == []
    assert [call.owned for call in driven.all(CallStart)] == [{"a": 200}]


@pytest.mark.rule("RB-14")
def test_what_was_added_for_an_aborted_rebalance_is_removed() -> None:
    driven = Driven()
    driven.join()
    driven.give(1, "a", "b")
    driven.answer(AddBarriers, LOST)
    driven.pass_to(0.2)
    driven.notice(2)
    driven.answer(AddBarriers, BarriersAdded(102, {}, {}, superseded=True))
    driven.give(2, "a")
    assert driven.sent(ReadBarriers) == ReadBarriers(SESSION, frozenset({"b"}))
    driven.answer(ReadBarriers, BarriersRead({"b": 120}))
    assert driven.sent(RemoveBarriers) == RemoveBarriers(SESSION, {"b": 120})


@pytest.mark.rule("AU-4", "RB-12")
def test_a_barrier_that_is_found_to_be_held_is_told_as_added_before_it_is_used() -> None:
    driven = Driven()
    driven.join()
    driven.give(1, "a", "b")
    driven.answer(AddBarriers, LOST)
    driven.pass_to(0.2)
    driven.notice(2)
    driven.answer(AddBarriers, BarriersAdded(102, {}, {}, superseded=True))
    driven.give(2)
    driven.notice(3)
    driven.answer(ReadBarriers, BarriersRead({"a": 120}))
    assert driven.told(FactKind.BARRIER_ADDED) == [("a", 120, 120)]
    driven.give(3, "a", "b")
    assert driven.all(CallStart)[0].owned == {"a": 120}
    driven.returns(Handler.START)
    driven.add(211, "b")
    assert driven.told(FactKind.BARRIER_ADDED) == [("b", 211, 211)]


@pytest.mark.rule("AU-4", "RB-15")
def test_a_removal_is_told_with_its_own_revision_or_with_none() -> None:
    driven = Driven()
    driven.own("a", "b", "c")
    driven.notice(2)
    driven.give(2)
    driven.returns(Handler.STOP)
    driven.answer(RemoveBarriers, BarriersRemoved(frozenset("abc"), 212, {"a": 210, "b": 212}))
    removed = driven.told(FactKind.BARRIER_REMOVED)
    assert removed == [("a", 200, 210), ("b", 200, 212), ("c", 200, None)]


@pytest.mark.rule("AU-4", "RB-11")
def test_a_removal_tells_how_long_ago_it_was_sent() -> None:
    driven = Driven()
    driven.own("a")
    driven.notice(2)
    driven.give(2)
    driven.pass_to(0.5)
    driven.returns(Handler.STOP)
    driven.pass_to(0.75)
    driven.answer(RemoveBarriers, LOST)
    driven.pass_to(1.0)
    assert driven.sent(RemoveBarriers) is not None
    driven.pass_to(1.125)
    effects = driven.answer(RemoveBarriers, BarriersRemoved(frozenset({"a"}), 210, {"a": 210}))
    (removed,) = (e.fact for e in effects if isinstance(e, Report) and e.fact.kind == "barrier_removed")
    assert removed.value == 0.125


@pytest.mark.rule("AU-4", "RB-24")
def test_an_onstop_that_raises_is_told_of_each_resource_it_was_to_stop() -> None:
    driven = Driven()
    driven.own("a", "b", "c")
    driven.notice(2)
    driven.give(2, "b")
    driven.returns(Handler.STOP, "the application raised")
    assert driven.told(FactKind.STOP_FAILED) == [("a", 200, None), ("c", 200, None)]


@pytest.mark.rule("RB-11", "RB-12")
def test_a_barrier_that_may_be_gone_protects_nothing_any_more() -> None:
    driven = Driven()
    driven.own("a", "b")
    driven.notice(2)
    driven.give(2, "a")
    driven.returns(Handler.STOP)
    driven.answer(RemoveBarriers, LOST)
    driven.notice(3)
    driven.pass_to(0.2)
    driven.give(3, "a", "b")
    assert driven.all(CallStart) == []
    assert driven.sent(RemoveBarriers) == RemoveBarriers(SESSION, {"b": 200})
    driven.answer(RemoveBarriers, BarriersRemoved(frozenset({"b"}), 210))
    driven.add(211, "b")
    assert driven.all(CallStart)[0].owned == {"b": 211}


@pytest.mark.rule("RB-17")
@pytest.mark.parametrize(("mode", "stopped"), [(Mode.COOPERATIVE, {"b"}), (Mode.EAGER, {"a", "b"})])
def test_what_a_rebalance_stops(mode: Mode, stopped: set[str]) -> None:
    driven = Driven(mode)
    driven.own("a", "b")
    driven.notice(2)
    driven.give(2, "a", "c")
    assert driven.all(CallStop) == [CallStop(frozenset(stopped))]
    driven.returns(Handler.STOP)
    driven.answer(RemoveBarriers, BarriersRemoved(frozenset(stopped), 210))
    asked = driven.sent(AddBarriers)
    assert asked is not None
    assert asked.resources == (stopped | {"c"}) - {"b"}
    driven.add(211, *sorted(asked.resources))
    assert driven.all(CallStart)[0].owned.keys() == asked.resources


@pytest.mark.rule("RB-17")
@pytest.mark.parametrize("batches", [True, False])
def test_whether_what_is_free_starts_before_the_rest(batches: bool) -> None:
    driven = Driven(options=NodeOptions(start_in_batches=batches))
    driven.join()
    driven.give(1, "a", "b")
    driven.add(200, "a", blocked={"b": "m-0"})
    assert [set(call.owned) for call in driven.all(CallStart)] == ([{"a"}] if batches else [])
    if batches:
        driven.returns(Handler.START)
    driven.feed(Noticed(Topic(TopicKind.REMOVALS, "m-0"), 205))
    driven.add(206, "b")
    assert [set(call.owned) for call in driven.all(CallStart)] == [{"b"} if batches else {"a", "b"}]


@pytest.mark.rule("RB-13")
def test_a_blocked_node_watches_who_is_in_the_way_and_tries_again_when_told() -> None:
    driven = Driven()
    driven.join()
    driven.give(1, "a")
    driven.add(200, blocked={"a": "m-0"})
    assert driven.all(Watch)[-1].topics[Topic(TopicKind.REMOVALS, "m-0")] == 201
    assert driven.sent(AddBarriers) is None
    driven.feed(Noticed(Topic(TopicKind.REMOVALS, "m-0"), 200))
    assert driven.sent(AddBarriers) is None
    driven.feed(Noticed(Topic(TopicKind.REMOVALS, "m-0"), 201))
    assert driven.sent(AddBarriers) is not None


@pytest.mark.rule("RB-3", "RB-13")
def test_a_heartbeat_tells_that_the_holder_of_a_barrier_is_gone() -> None:
    driven = Driven()
    driven.join()
    driven.give(1, "a")
    driven.add(200, blocked={"a": "m-0"})
    driven.pass_to(1.0)
    assert driven.sent(Heartbeat) == Heartbeat(SESSION, blockers=frozenset({"m-0"}))
    driven.beat(removals={"m-0": 0})
    assert driven.sent(AddBarriers) is not None


@pytest.mark.rule("RB-13")
def test_a_release_between_two_attempts_is_not_lost() -> None:
    driven = Driven()
    driven.join()
    driven.give(1, "a", "b", "c")
    driven.add(200, "c", blocked={"a": "m-0", "b": "o-0"})
    driven.feed(Noticed(Topic(TopicKind.REMOVALS, "o-0"), 203))
    driven.add(210, blocked={"b": "p-0"})
    driven.feed(Noticed(Topic(TopicKind.REMOVALS, "m-0"), 205))
    asked = driven.sent(AddBarriers)
    assert asked is not None
    assert asked.resources == {"a"}


@pytest.mark.rule("RB-18", "RB-21")
def test_an_empty_allocation_whose_onstart_came_too_late_is_told_again() -> None:
    driven = Driven()
    driven.join()
    driven.give(1)
    assert [call.owned for call in driven.all(CallStart)] == [{}]
    driven.feed(HandlerReturned(Handler.START, refused=True))
    assert [call.owned for call in driven.all(CallStart)] == [{}]


@pytest.mark.rule("RB-14", "RB-19")
def test_a_node_that_may_hold_a_barrier_too_many_has_not_settled() -> None:
    driven = Driven()
    driven.own("a")
    driven.notice(2)
    driven.give(2, "a", "b")
    driven.answer(AddBarriers, LOST)
    driven.notice(3)
    driven.pass_to(0.2)
    driven.give(3, "a")
    assert not driven.node.settled
    driven.answer(ReadBarriers, BarriersRead({}))
    assert driven.node.settled


@pytest.mark.rule("RB-18")
@pytest.mark.lesson(8)
def test_an_empty_allocation_is_told_once() -> None:
    driven = Driven()
    driven.join()
    driven.give(1)
    assert [dict(call.owned) for call in driven.all(CallStart)] == [{}]
    driven.returns(Handler.START)
    driven.answer(Acknowledge, Acknowledged(1, 201))
    driven.pass_to(0.5)
    assert driven.all(CallStart) == []
    assert driven.node.settled


@pytest.mark.rule("RB-18")
def test_a_node_that_loses_everything_is_told() -> None:
    driven = Driven()
    driven.own("a")
    driven.notice(2)
    driven.give(2)
    driven.returns(Handler.STOP)
    assert [dict(call.owned) for call in driven.all(CallStart)] == []
    driven.answer(RemoveBarriers, BarriersRemoved(frozenset({"a"}), 210))
    assert [dict(call.owned) for call in driven.all(CallStart)] == [{}]


@pytest.mark.rule("RB-19")
def test_a_share_is_acknowledged_once_onstart_has_returned() -> None:
    driven = Driven()
    driven.join()
    driven.give(1, "a")
    driven.add(200, "a")
    assert driven.sent(Acknowledge) is None
    driven.returns(Handler.START)
    assert driven.sent(Acknowledge) == Acknowledge(SESSION, 1, replaces=10)


@pytest.mark.rule("RB-19")
def test_an_acknowledgement_that_a_late_one_overtook_is_written_again() -> None:
    driven = Driven()
    driven.own("a")
    driven.notice(2)
    driven.give(2, "a")
    driven.answer(Acknowledge, Acknowledged(1, 300))
    assert driven.sent(Acknowledge) == Acknowledge(SESSION, 2, replaces=300)


@pytest.mark.rule("RB-19")
def test_the_leader_sees_that_every_node_has_completed_its_share_of_the_version() -> None:
    driven = leading()
    topic = Topic(TopicKind.ACKNOWLEDGEMENTS, "n-0")
    driven.feed(Noticed(topic, 52, version=0))
    assert FactKind.REBALANCE_COMPLETED not in driven.facts()
    driven.feed(Noticed(topic, 53, version=1))
    assert FactKind.REBALANCE_COMPLETED in driven.facts()
    driven.feed(Noticed(topic, 54, version=1))
    assert FactKind.REBALANCE_COMPLETED not in driven.facts()


@pytest.mark.rule("RB-21")
@pytest.mark.lesson(5)
def test_out_of_touch_everything_is_stopped_in_time_and_the_barriers_are_kept() -> None:
    driven = Driven()
    driven.own("a")
    driven.pass_to(TIMINGS.detect_s - 0.01)
    assert driven.all(CallStop) == []
    assert driven.node.next_wakeup is not None
    assert driven.node.next_wakeup <= TIMINGS.detect_s
    driven.pass_to(TIMINGS.detect_s)
    assert driven.all(CallStop) == [CallStop(frozenset({"a"}))]
    assert driven.facts() == [FactKind.ISOLATED]
    driven.returns(Handler.STOP)
    assert driven.sent(RemoveBarriers) is None
    driven.now = 7.5
    driven.beat()
    assert FactKind.RECONNECTED in driven.facts()
    assert driven.all(CallStart) == [CallStart({"a": 200}, 7.5 + TIMINGS.detect_s)]


@pytest.mark.rule("RB-18", "RB-21", "RB-41")
def test_what_was_asked_to_stop_out_of_touch_passes_onstop_and_starts_anew_back_in_touch() -> None:
    driven = Driven()
    driven.own("a")
    driven.notice(2)
    driven.give(2, "a", "b")
    driven.add(210, "b")
    driven.pass_to(TIMINGS.detect_s)
    assert driven.all(AskStop) == [AskStop(frozenset({"a", "b"}))]
    driven.now = 7.5
    driven.beat()
    driven.returns(Handler.START)
    assert driven.all(CallStop) == [CallStop(frozenset({"a", "b"}))]
    driven.returns(Handler.STOP)
    assert [call.owned for call in driven.all(CallStart)] == [{"a": 200, "b": 210}]


@pytest.mark.rule("RB-11", "RB-21")
def test_back_in_touch_a_node_goes_on_waiting_for_what_was_blocked() -> None:
    driven = Driven(options=NodeOptions(start_in_batches=False))
    driven.own("a")
    driven.notice(2)
    driven.give(2, "a", "b")
    driven.add(210, blocked={"b": "m-0"})
    driven.pass_to(TIMINGS.detect_s)
    assert driven.node.step is Step.STOPPING
    driven.now = 7.5
    driven.beat()
    driven.returns(Handler.STOP)
    assert driven.node.step is Step.ADDING
    driven.feed(Noticed(Topic(TopicKind.REMOVALS, "m-0"), 220))
    driven.add(221, "b")
    assert driven.all(CallStart)[0].owned == {"a": 200, "b": 221}


@pytest.mark.rule("RB-21")
def test_the_deadline_follows_the_proofs_of_life() -> None:
    driven = Driven()
    driven.own("a")
    assert driven.node.deadline == TIMINGS.access_s
    driven.pass_to(1.0)
    driven.beat()
    assert driven.all(Guard) == [Guard(1.0 + TIMINGS.access_s)]


class Counted(str):
    """A resource that counts how often any of its kind is looked up."""

    __slots__ = ()
    looked_up = 0

    def __hash__(self) -> int:
        Counted.looked_up += 1
        return str.__hash__(self)

    __eq__ = str.__eq__


class Measured(Driven):
    """A node whose turns are measured: look-ups of resources, and the most bytes that a turn has made."""

    def feed(self, event: Event) -> list[Effect]:
        Counted.looked_up = 0
        tracemalloc.start()
        try:
            self.effects = self.node.handle(event, self.now)
            self.made_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        self.looked_up = Counted.looked_up
        self.under_way += [effect.command for effect in self.effects if isinstance(effect, Perform)]
        return self.effects


MANY = 20_000
A_SET_OF_MANY_BYTES = 500_000
A_SLICE = 100


def owner_of_many(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """A node that owns many resources, each slice of them added by a command of its own."""
    monkeypatch.setattr("rebalanser.core.group.rebalancing.MAX_BARRIERS", MANY)
    driven = Measured()
    driven.own(*(Counted(f"r{number:05}") for number in range(MANY)))
    assert len(driven.node.started) == MANY
    monkeypatch.setattr("rebalanser.core.group.rebalancing.MAX_BARRIERS", A_SLICE)
    return driven


def check_small(driven: Measured) -> None:
    """The turn touched no more than a few slices."""
    assert driven.looked_up <= 20 * A_SLICE < MANY
    assert driven.made_bytes < A_SET_OF_MANY_BYTES


@pytest.mark.rule("RB-21", "RB-42")
def test_a_turn_costs_the_same_however_much_is_owned(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = owner_of_many(monkeypatch)
    for event in (
        Wakeup(),
        Noticed(Topic(TopicKind.ALLOCATION, "n-0"), 150, 1),
        Noticed(Topic(TopicKind.REMOVALS, "m-0"), 150),
    ):
        driven.now += 0.5
        driven.feed(event)
        check_small(driven)
        assert driven.node.settled
    driven.beat()
    check_small(driven)


@pytest.mark.rule("RB-14", "RB-42")
def test_barriers_are_added_and_removed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rebalanser.core.group.rebalancing.MAX_BARRIERS", A_SLICE)
    driven = Measured(options=NodeOptions(start_in_batches=False))
    driven.join()
    driven.give(1, *(Counted(f"r{number:05}") for number in range(MANY)))
    while (adding := driven.sent(AddBarriers)) is not None:
        assert len(adding.resources) == A_SLICE
        assert driven.all(CallStart) == []
        driven.answer(AddBarriers, BarriersAdded(200, dict.fromkeys(adding.resources, 200), {}))
        assert driven.looked_up <= 20 * A_SLICE
    assert [len(call.owned) for call in driven.all(CallStart)] == [MANY]
    driven.returns(Handler.START)
    driven.answer(Acknowledge, Acknowledged(1, 201))
    driven.feed(Stop())
    driven.returns(Handler.STOP)
    removed = 0
    while (removing := driven.sent(RemoveBarriers)) is not None:
        assert len(removing.barriers) == A_SLICE
        removed += A_SLICE
        driven.answer(RemoveBarriers, BarriersRemoved(frozenset(removing.barriers), 300))
        assert driven.looked_up <= 20 * A_SLICE
    assert removed == MANY
    assert driven.sent(Leave) is not None


@pytest.mark.rule("RB-42")
def test_no_turn_goes_through_all_that_is_owned_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = owner_of_many(monkeypatch)
    turns = [driven.looked_up]

    def told(_: list[Effect]) -> None:
        turns.append(driven.looked_up)

    told(driven.pass_to(1.0))
    driven.beat()
    told(driven.pass_to(driven.now + TIMINGS.detect_s))
    assert len(driven.all(CallStop)[0].resources) == MANY
    told(driven.returns(Handler.STOP))
    driven.beat()
    told(driven.effects)
    assert len(driven.all(CallStart)[0].owned) == MANY
    told(driven.returns(Handler.START))
    driven.notice(2)
    driven.give(2, *(Counted(f"r{number:05}") for number in range(0, MANY, 2)))
    told(driven.effects)
    told(driven.returns(Handler.STOP))
    driven.pass_to(driven.now + 1.0)
    driven.answer(Heartbeat, SessionLost())
    told(driven.effects)
    assert max(turns) <= 2 * MANY


@pytest.mark.rule("RB-22")
@pytest.mark.lesson(3)
def test_after_a_lost_lease_everything_is_forgotten_onstop_is_called_once_and_the_node_joins_anew() -> None:
    driven = Driven()
    driven.own("a")
    driven.pass_to(1.0)
    driven.answer(Heartbeat, SessionLost())
    assert driven.node.held == {}
    assert driven.all(CallStop) == [CallStop(frozenset({"a"}))]
    assert driven.sent(Join) is None
    driven.returns(Handler.STOP)
    assert driven.all(CallStop) == []
    join = driven.sent(Join)
    assert join is not None
    assert join.member.node == "n-1"


@pytest.mark.rule("RB-24")
@pytest.mark.lesson(9)
def test_an_onstart_that_raises_is_stopped_left_and_tried_again_after_a_growing_delay() -> None:
    delays = []
    driven = Driven()
    driven.feed(Start())
    for attempt in range(3):
        session = Session(f"n-{attempt}", attempt + 1, 10)
        driven.answer(Join, Joined(session, proven_at=driven.now))
        header = Header(1, 1, 101)
        driven.answer(ReadShare, ShareRead(101, header, Share(1, frozenset({"a"})), None))
        driven.add(200 + attempt, "a")
        driven.returns(Handler.START, "the application raised")
        assert FactKind.START_FAILED in driven.facts()
        assert driven.all(CallStop) == [CallStop(frozenset({"a"}))]
        driven.returns(Handler.STOP)
        driven.answer(RemoveBarriers, BarriersRemoved(frozenset({"a"}), 300))
        driven.answer(Leave, Left())
        assert driven.node.membership is Membership.BACKOFF
        assert driven.node.next_wakeup is not None
        delays.append(driven.node.next_wakeup - driven.now)
        driven.pass_to(driven.node.next_wakeup)
    assert delays == [1.0, 2.0, 4.0]


@pytest.mark.rule("RB-24")
def test_an_onstop_that_raises_leaves_the_barriers_until_the_lease_has_ended() -> None:
    driven = Driven()
    driven.own("a", "b")
    driven.notice(2)
    driven.give(2, "a")
    driven.returns(Handler.STOP, "the application raised")
    assert FactKind.STOP_FAILED in driven.facts()
    driven.returns(Handler.STOP)
    driven.answer(RemoveBarriers, BarriersRemoved(frozenset({"a"}), 300))
    assert driven.node.membership is Membership.LAPSING
    driven.pass_to(2.0)
    assert driven.sent(Heartbeat) is None
    assert driven.under_way == []
    lapsed = TIMINGS.lease_ttl_s + TIMINGS.safety_margin_s
    driven.pass_to(lapsed - 0.1)
    assert driven.node.membership is Membership.LAPSING
    driven.pass_to(lapsed)
    assert driven.node.membership is Membership.BACKOFF


def out_of_touch(until: float, *lost_at: float) -> Driven:
    """An owner that has stopped: its heartbeats since 0 were refused, or lost at these times."""
    driven = Driven()
    driven.own("a")
    while driven.now < until:
        assert driven.node.next_wakeup is not None
        driven.pass_to(driven.node.next_wakeup)
        if driven.sent(Heartbeat):
            lost = any(at <= driven.now < at + 0.5 for at in lost_at)
            driven.answer(Heartbeat, LOST if lost else Failed("refused"))
        if driven.all(CallStop):
            driven.returns(Handler.STOP)
    assert driven.node.isolated
    assert not driven.node.started
    return driven


@pytest.mark.rule("RB-26")
def test_a_node_whose_lease_ended_unrenewed_stops_at_once() -> None:
    driven = out_of_touch(TIMINGS.lease_ttl_s + TIMINGS.safety_margin_s)
    driven.feed(Stop())
    assert driven.node.membership is Membership.STOPPED


@pytest.mark.rule("RB-26")
def test_a_node_waits_for_the_lease_that_its_last_lost_renewal_may_have_left() -> None:
    driven = out_of_touch(TIMINGS.lease_ttl_s + TIMINGS.safety_margin_s, 4.0, 8.0)
    driven.feed(Stop())
    assert driven.node.membership is Membership.LEAVING
    driven.pass_to(8.0 + TIMINGS.lease_ttl_s + TIMINGS.safety_margin_s - 0.1)
    assert driven.node.membership is Membership.LEAVING
    driven.pass_to(8.5 + TIMINGS.lease_ttl_s + TIMINGS.safety_margin_s)
    assert driven.node.membership is Membership.STOPPED


@pytest.mark.rule("RB-24")
def test_a_lapsing_node_takes_part_in_nothing() -> None:
    driven = Driven()
    driven.own("a")
    driven.pass_to(1.0)
    driven.notice(2)
    driven.give(2)
    driven.returns(Handler.STOP, "the application raised")
    assert driven.node.membership is Membership.LAPSING
    driven.notice(3)
    assert driven.sent(ReadShare) is None
    driven.answer(Heartbeat, SessionLost())
    assert driven.node.membership is Membership.BACKOFF


@pytest.mark.rule("RB-25")
def test_an_overrun_is_reported_while_it_lasts_and_heartbeats_go_on() -> None:
    driven = Driven()
    driven.own("a", "b")
    driven.notice(2)
    driven.give(2, "a")
    for second in (1.0, 2.0, 3.0, 4.0):
        driven.pass_to(second)
        assert (FactKind.HANDLER_OVERRAN in driven.facts()) == (second == 2.0)
        driven.beat()
        assert driven.sent(RemoveBarriers) is None
    assert driven.node.held == {"a": 200, "b": 200}
    driven.returns(Handler.STOP)
    assert driven.sent(RemoveBarriers) == RemoveBarriers(SESSION, {"b": 200})


@pytest.mark.rule("RB-34")
def test_an_overrun_with_kill_ends_the_process_now() -> None:
    driven = Driven(options=NodeOptions(on_overrun=OnOverrun.KILL))
    driven.own("a")
    driven.notice(2)
    driven.give(2)
    driven.pass_to(2.0)
    assert driven.all(Guard)[-1] == Guard(2.0)


@pytest.mark.rule("RB-34")
def test_the_switch_stays_armed_over_what_a_lost_session_left_behind() -> None:
    driven = Driven(options=NodeOptions(on_overrun=OnOverrun.KILL))
    driven.own("a")
    driven.pass_to(1.0)
    driven.answer(Heartbeat, SessionLost())
    driven.returns(Handler.STOP, error="it is stuck")
    assert driven.all(Guard) == []
    assert driven.node.deadline is not None


@pytest.mark.rule("RB-21")
def test_an_onstart_that_runs_when_touch_is_lost_has_the_limit_of_onstop() -> None:
    slow = dataclasses.replace(TIMINGS, start_timeout_s=60.0)
    driven = Driven(timings=slow)
    driven.join()
    driven.give(1, "a")
    driven.add(200, "a")
    driven.pass_to(slow.detect_s)
    assert FactKind.ISOLATED in driven.facts()
    driven.pass_to(slow.detect_s + slow.stop_timeout_s)
    assert FactKind.HANDLER_OVERRAN in driven.facts()


@pytest.mark.rule("RB-21", "RB-34")
def test_back_in_touch_an_onstart_that_runs_has_its_own_limit_again() -> None:
    slow = dataclasses.replace(TIMINGS, start_timeout_s=12.0)
    driven = Driven(timings=slow, options=NodeOptions(on_overrun=OnOverrun.KILL))
    driven.join()
    driven.give(1, "a")
    driven.add(200, "a")
    driven.pass_to(slow.detect_s)
    assert driven.node.next_wakeup == slow.detect_s + slow.stop_timeout_s
    driven.now = slow.detect_s + 1
    driven.beat()
    assert FactKind.RECONNECTED in driven.facts()
    driven.pass_to(slow.detect_s + slow.stop_timeout_s)
    assert FactKind.HANDLER_OVERRAN not in driven.facts()
    driven.beat()
    driven.pass_to(11.9)
    assert FactKind.HANDLER_OVERRAN not in driven.facts()
    driven.pass_to(12.0)
    assert FactKind.HANDLER_OVERRAN in driven.facts()


@pytest.mark.rule("RB-26")
@pytest.mark.lesson(1)
@pytest.mark.parametrize("leads", [False, True])
def test_the_order_of_a_graceful_stop(leads: bool) -> None:
    driven = leading() if leads else Driven()
    if leads:
        driven.give(1, "a")
        driven.add(200, "a")
        driven.returns(Handler.START)
        driven.answer(Acknowledge, Acknowledged(1, 201))
    else:
        driven.own("a")
    driven.feed(Stop())
    assert driven.all(CallStop) == [CallStop(frozenset({"a"}))]
    assert driven.sent(RemoveBarriers) is None
    assert driven.sent(Leave) is None
    driven.returns(Handler.STOP)
    assert driven.sent(RemoveBarriers) == RemoveBarriers(SESSION, {"a": 200})
    assert driven.sent(Leave) is None
    driven.answer(RemoveBarriers, BarriersRemoved(frozenset({"a"}), 300))
    assert driven.sent(Leave) == Leave(SESSION)
    driven.answer(Leave, Left())
    assert driven.all(Finished) == [Finished()]
    assert driven.node.membership is Membership.STOPPED
    assert driven.node.next_wakeup is None


@pytest.mark.rule("RB-26")
def test_a_heartbeat_that_sees_what_the_leave_did_tells_of_no_lost_session() -> None:
    driven = Driven()
    driven.own("a")
    driven.pass_to(1.0)
    driven.feed(Stop())
    driven.returns(Handler.STOP)
    driven.answer(RemoveBarriers, BarriersRemoved(frozenset({"a"}), 300))
    assert driven.sent(Leave) == Leave(SESSION)
    driven.answer(Heartbeat, SessionLost())
    assert driven.facts() == [FactKind.LEFT]
    assert driven.all(Finished) == [Finished()]
    driven.answer(Leave, Left())
    assert driven.facts() == []


@pytest.mark.rule("RB-26", "RB-3")
def test_a_graceful_stop_ends_even_if_the_registry_never_answers_again() -> None:
    driven = Driven()
    driven.own("a")
    driven.feed(Stop())
    driven.returns(Handler.STOP)
    for tick in range(1, 400):
        driven.now = tick * 0.1
        for command in list(driven.under_way):
            driven.under_way.remove(command)
            driven.feed(Answered(command, LOST))
        driven.feed(Wakeup())
        if driven.all(Finished):
            break
    assert driven.now <= TIMINGS.detect_s + TIMINGS.lease_ttl_s + TIMINGS.safety_margin_s + 1


@pytest.mark.rule("RB-26")
def test_a_stop_before_the_registration_is_sent_ends_at_once() -> None:
    driven = Driven()
    driven.own("a")
    driven.pass_to(1.0)
    driven.notice(2)
    driven.answer(Heartbeat, SessionLost())
    driven.returns(Handler.STOP)
    assert driven.node.membership is Membership.JOINING
    assert driven.sent(Join) is None
    driven.feed(Stop())
    assert driven.node.membership is Membership.WITHDRAWING
    driven.answer(ReadShare, LOST)
    assert driven.all(Finished) == [Finished()]


def test_a_stop_while_registering_leaves_what_was_registered() -> None:
    driven = Driven()
    driven.feed(Start())
    driven.feed(Stop())
    driven.answer(Join, Joined(SESSION, 0.0))
    assert driven.sent(Leave) == Leave(SESSION)


def test_a_node_that_was_never_started_stops_at_once() -> None:
    driven = Driven()
    driven.feed(Stop())
    assert driven.all(Finished) == [Finished()]


def test_notices_for_an_earlier_incarnation_are_ignored() -> None:
    driven = Driven()
    driven.own("a")
    driven.feed(Noticed(Topic(TopicKind.ALLOCATION, "n-9"), 400, 1))
    assert driven.node.header is not None
    assert driven.node.header.revision == 101


def test_an_allocation_that_leaves_the_share_alone_needs_no_read() -> None:
    driven = Driven()
    driven.own("a")
    driven.feed(Noticed(Topic(TopicKind.ALLOCATION, "n-0"), 400, 1))
    assert driven.sent(ReadShare) is None
    assert driven.node.settled


@pytest.mark.parametrize("event", [HandlerReturned(Handler.START), Answered(Leave(SESSION), Left())])
def test_what_nobody_asked_for_is_a_broken_invariant(event: Event) -> None:
    driven = Driven()
    driven.join()
    with pytest.raises(InternalError):
        driven.feed(event)


@pytest.mark.rule("RB-21")
def test_brief_losses_cause_retries_only() -> None:
    driven = Driven()
    driven.own("a")
    driven.pass_to(1.0)
    for retry in range(5):
        driven.answer(Heartbeat, replace(LOST, unknown=retry % 2 == 0))
        assert driven.all(CallStop) == []
        assert driven.node.next_wakeup is not None
        driven.pass_to(driven.node.next_wakeup)
    driven.beat()
    assert driven.node.settled


def refused_until_isolated(stem: str) -> list[float]:
    """When a node sends heartbeats that are refused at once, until it has to stop."""
    driven = Driven()
    driven.node = Node(Member(stem, label=stem), TIMINGS, solve, NodeOptions())
    driven.own("a")
    sent_at: list[float] = []
    driven.pass_to(1.0)
    while driven.node.isolated is False:
        if driven.sent(Heartbeat) is not None:
            sent_at.append(driven.now)
            driven.answer(Heartbeat, Failed("refused"))
        assert driven.node.next_wakeup is not None
        driven.pass_to(driven.node.next_wakeup)
    return sent_at


@pytest.mark.rule("RB-21")
def test_refused_heartbeats_are_sent_at_growing_distances_that_differ_from_node_to_node() -> None:
    sent_at = refused_until_isolated("n")
    distances = [later - earlier for earlier, later in pairwise(sent_at)]
    for retry, distance in enumerate(distances):
        longest = min(TIMINGS.retry_initial_s * 2**retry, TIMINGS.retry_max_s)
        assert longest / 2 < distance <= longest
    assert len(distances) >= 6
    assert len({refused_until_isolated(f"n{number}")[5] for number in range(20)}) == 20


def test_an_answered_heartbeat_ends_the_growing_distances() -> None:
    driven = Driven()
    driven.own("a")
    driven.pass_to(1.0)
    for _ in range(5):
        driven.answer(Heartbeat, Failed("refused"))
        assert driven.node.next_wakeup is not None
        driven.pass_to(driven.node.next_wakeup)
    driven.beat()
    driven.pass_to(driven.now + TIMINGS.heartbeat_interval_s)
    driven.answer(Heartbeat, Failed("refused"))
    assert driven.node.next_wakeup is not None
    assert driven.node.next_wakeup <= driven.now + TIMINGS.retry_initial_s


# -- giving up single resources


def record(*released: str) -> Member:
    return Member("n-0", label="n", may_lead=False, released=frozenset(released))


def owning(*resources: str) -> Driven:
    driven = Driven()
    driven.own(*resources)
    return driven


@pytest.mark.rule("RB-2")
def test_what_is_released_stands_in_the_nodes_record_for_its_time() -> None:
    driven = owning("a", "b")
    driven.now = 1.0
    driven.feed(Release("a", 200, for_s=5.0))
    assert driven.told(FactKind.RELEASED) == [("a", 200, None)]
    assert driven.node.released == {"a"}
    assert driven.sent(RecordReleases) == RecordReleases(SESSION, record("a"), replaces=10)
    driven.answer(RecordReleases, ReleasesRecorded(frozenset({"a"}), 300))
    assert driven.all(CallStop) == [], "it works on until the leader gives it to another node"
    driven.pass_to(5.9)
    assert driven.sent(RecordReleases) is None
    assert driven.node.next_wakeup == 6.0
    driven.pass_to(6.0)
    assert driven.node.released == frozenset()
    assert driven.sent(RecordReleases) == RecordReleases(SESSION, record(), replaces=300)


@pytest.mark.rule("RB-2")
@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("ends", ["the leader", "the application", "time"])
@pytest.mark.parametrize("running", [True, False])
def test_what_is_released_while_it_is_stopped_does_not_start_again(
    running: bool, ends: str, batches: bool
) -> None:
    """Until the leader has given it away, or the application wants it back."""
    driven = Driven(options=NodeOptions(start_in_batches=batches))
    driven.own("a", "b")
    version, others = 1, {"b": 200}
    if running:
        driven.notice(2)
        driven.give(2, "a", "b", "c")
        driven.add(210, "c")
        version, others = 2, {"b": 200, "c": 210}
    driven.pass_to(TIMINGS.detect_s)
    if running:
        driven.returns(Handler.START)
    assert driven.all(CallStop) == [CallStop(frozenset({"a", *others}))]
    driven.now += 0.1
    driven.feed(Release("a", 200, for_s=1.0))
    driven.returns(Handler.STOP)
    driven.beat()
    assert [call.owned for call in driven.all(CallStart)] == [others]
    driven.returns(Handler.START)
    assert driven.all(CallStart) == []
    assert not driven.node.settled
    assert driven.node.step is Step.SETTLED, "it waits for the leader, which has to hear of it"
    driven.answer(RecordReleases, ReleasesRecorded(frozenset({"a"}), 300))
    match ends:
        case "the leader":
            driven.notice(version + 1)
            driven.give(version + 1, *others)
            assert driven.sent(RemoveBarriers) == RemoveBarriers(SESSION, {"a": 200})
            return
        case "the application":
            driven.feed(Accept("a"))
        case "time":
            driven.pass_to(driven.now + 1.0)
    assert [call.owned for call in driven.all(CallStart)] == [{"a": 200}]
    driven.returns(Handler.START)
    assert driven.node.settled


@pytest.mark.rule("RB-2", "RB-17")
def test_in_eager_mode_onstart_gets_all_of_a_share_also_what_was_released() -> None:
    """The next allocation is without it."""
    driven = Driven(Mode.EAGER)
    driven.own("a", "b")
    driven.pass_to(TIMINGS.detect_s)
    driven.feed(Release("a", 200))
    driven.returns(Handler.STOP)
    driven.beat()
    assert [call.owned for call in driven.all(CallStart)] == [{"a": 200, "b": 200}]


@pytest.mark.rule("RB-2")
def test_of_two_releases_the_later_time_counts() -> None:
    driven = owning("a")
    told: list[tuple[float | None, int]] = []
    for for_s in (5.0, 3.0, 9.0, None, 4.0):
        driven.feed(Release("a", 200, for_s))
        facts = [fact for report in driven.all(Report) for fact in report.facts()]
        told += [(fact.value, len(facts)) for fact in facts if fact.kind is FactKind.RELEASED]
    assert told == [(5.0, 1), (9.0, 1), (None, 1)]
    driven.pass_to(6.0)
    assert driven.node.released == {"a"}
    driven.feed(Accept("a"))
    assert driven.node.released == frozenset()


@pytest.mark.parametrize(("resource", "token"), [("a", 199), ("b", 200)])
def test_what_is_owned_no_more_is_not_released(resource: str, token: int) -> None:
    driven = owning("a")
    driven.feed(Release(resource, token))
    assert driven.sent(RecordReleases) is None
    assert driven.facts() == []
    assert driven.node.released == frozenset()


@pytest.mark.rule("RB-2")
def test_what_is_accepted_again_is_released_no_more() -> None:
    driven = owning("a", "b")
    for name in "ab":
        driven.feed(Release(name, 200))
    driven.answer(RecordReleases, ReleasesRecorded(frozenset({"a"}), 300))
    driven.answer(RecordReleases, ReleasesRecorded(frozenset({"a", "b"}), 301))
    driven.feed(Accept("a"))
    driven.feed(Accept("never released"))
    assert driven.sent(RecordReleases) == RecordReleases(SESSION, record("b"), replaces=301)
    driven.answer(RecordReleases, ReleasesRecorded(frozenset({"b"}), 302))
    assert driven.under_way == []


@pytest.mark.rule("RB-2")
def test_a_record_of_unknown_outcome_is_written_until_it_says_what_is_true() -> None:
    driven = owning("a", "b")
    driven.feed(Release("a", 200))
    driven.answer(RecordReleases, LOST)
    driven.feed(Release("b", 200))
    driven.pass_to(0.1)
    assert driven.sent(RecordReleases) == RecordReleases(SESSION, record("a", "b"), replaces=10)
    driven.answer(RecordReleases, ReleasesRecorded(frozenset({"a"}), 300))
    assert driven.sent(RecordReleases) == RecordReleases(SESSION, record("a", "b"), replaces=300)
    driven.answer(RecordReleases, ReleasesRecorded(frozenset({"a", "b"}), 301))
    assert driven.under_way == []


@pytest.mark.rule("RB-2")
def test_a_record_that_may_have_been_written_is_written_anew_even_if_it_was_right_before() -> None:
    driven = owning("a")
    driven.feed(Release("a", 200))
    driven.answer(RecordReleases, LOST)
    driven.feed(Accept("a"))
    driven.pass_to(0.1)
    assert driven.sent(RecordReleases) == RecordReleases(SESSION, record(), replaces=10)
    driven.answer(RecordReleases, ReleasesRecorded(frozenset({"a"}), 300))
    assert driven.sent(RecordReleases) == RecordReleases(SESSION, record(), replaces=300)
    driven.answer(RecordReleases, ReleasesRecorded(frozenset(), 301))
    assert driven.under_way == []


@pytest.mark.rule("RB-3")
def test_a_record_that_can_not_be_written_holds_up_nothing() -> None:
    driven = owning("a")
    driven.feed(Release("a", 200))
    driven.notice(2)
    driven.answer(RecordReleases, Failed("too large"))
    driven.pass_to(0.1)
    driven.give(2, "b")
    assert driven.sent(RecordReleases) is not None, "it goes beside OnStop"
    driven.answer(RecordReleases, Failed("too large"))
    driven.returns(Handler.STOP)
    driven.pass_to(0.3)
    driven.answer(RemoveBarriers, BarriersRemoved(frozenset({"a"}), 210))
    driven.add(220, "b")
    driven.returns(Handler.START)
    driven.answer(RecordReleases, Failed("too large"))
    driven.pass_to(1.0)
    assert driven.sent(Acknowledge) == Acknowledge(SESSION, 2, replaces=201)


@pytest.mark.rule("RB-2", "RB-4", "RB-22")
def test_what_was_released_is_named_when_the_node_joins_again() -> None:
    driven = owning("a", "b")
    driven.feed(Release("a", 200))
    driven.feed(Release("b", 200, for_s=1.0))
    driven.answer(RecordReleases, SessionLost())
    driven.pass_to(2.0)
    driven.returns(Handler.STOP)
    joining = driven.sent(Join)
    assert joining is not None
    assert joining.member == replace(record("a"), node="n-1")
    driven.answer(Join, LOST)
    driven.feed(Accept("a"))
    driven.pass_to(10.0)
    assert driven.sent(Join) == joining, "one incarnation registers as the same, however often it tries"
    session = Session("n-1", lease=2, created=400)
    driven.answer(Join, Joined(session, proven_at=driven.now))
    driven.answer(ReadShare, ShareRead(401, None, None, None))
    assert driven.sent(RecordReleases) == RecordReleases(session, replace(record(), node="n-1"), replaces=400)


def test_a_node_that_leaves_records_no_more_releases() -> None:
    driven = owning("a")
    driven.feed(Stop())
    driven.feed(Release("a", 200))
    assert driven.sent(RecordReleases) is None
    driven.returns(Handler.STOP)
    driven.answer(RemoveBarriers, BarriersRemoved(frozenset({"a"}), 210))
    driven.answer(Leave, Left())
    assert driven.all(Finished) == [Finished()]


RELEASED = {
    "another node gets it": ({"n-0": {"r0"}}, {}, {"m-0": {"r0"}, "n-0": {"r1"}}),
    "it moves for that alone": ({"n-0": {"r0", "r1"}}, {}, {"m-0": {"r0", "r1"}, "n-0": set()}),
    "none gets what all have released": ({"n-0": {"r0"}, "m-0": {"r0"}}, {}, {"m-0": {"r1"}, "n-0": set()}),
    "a pin holds": ({"n-0": {"r0"}}, {"r0": "n"}, {"m-0": {"r1"}, "n-0": set()}),
    "others with the label may have it": ({"m-0": {"r0"}}, {"r0": "m"}, {"m-0": {"r1"}, "m-1": {"r0"}}),
}


@pytest.mark.rule("RB-2", "RB-29")
@pytest.mark.parametrize("case", RELEASED)
def test_a_leader_gives_no_node_what_it_has_released(case: str) -> None:
    released, pins, expected = RELEASED[case]
    members = {
        node: Member(node, node[0], released=frozenset(released.get(node, ()))) for node in sorted(expected)
    }
    resources = {name: ResourceSpec(name, pin=pins.get(name)) for name in ("r0", "r1")}
    read = replace(group(2, 50), members=members, resources=resources)
    given = {node: set(share) for node, share in intended(read, solve(problem_of(read))).items()}
    if "pin" in case:
        assert "r0" not in given["m-0"] | given["n-0"]
    else:
        assert given == expected
