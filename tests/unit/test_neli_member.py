"""The member of NELI, one rule at a time, each quoted; by hand-made events on a hand-moved clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pytest

from rebalanser.core.neli.member import NeliMember
from rebalanser.core.neli.messages import (
    AskPartitionCount,
    Assigned,
    CallFenced,
    CallInduced,
    CallLapsed,
    Commit,
    CommitAnswered,
    Effect,
    Event,
    FactKind,
    Fail,
    HandlerReturned,
    HeartbeatRead,
    LastCommit,
    Leave,
    LetGo,
    Lost,
    PartitionCount,
    Polled,
    PublishHeartbeats,
    Report,
    Revoked,
    RolesChanged,
    Stop,
    Wakeup,
)
from rebalanser.core.neli.records import LeadershipClaim, Note, Stamp
from rebalanser.core.neli.settings import GroupProtocol, Mode, NeliSettings, check
from rebalanser.core.neli.states import PARTITION, PartitionState, Turn
from rebalanser.errors import InvalidSettings

E = TypeVar("E")
NEVER = LastCommit(None)
FAST = NeliSettings(session_timeout_s=10.0, deadline_s=2.0, publish_interval_s=0.5, clock_drift_ratio=0.0)
EXCLUSIVE = replace(FAST, mode=Mode.EXCLUSIVE, deadline_s=5.0, clock_error_s=1.0)
NON_EXCLUSIVE = replace(FAST, mode=Mode.NON_EXCLUSIVE, deadline_s=15.0)


@dataclass
class Driver:
    """Plays the client and the broker: one process, partitions with an offset each, a clock."""

    settings: NeliSettings = FAST
    partitions: int = 2
    roles: object = (0, 1)
    process: str = "me"
    now: float = 100.0
    member: NeliMember = field(init=False)
    ends: dict[int, int] = field(default_factory=dict)
    published: dict[int, list[Stamp]] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)
    questions: list[AskPartitionCount] = field(default_factory=list)

    def __post_init__(self) -> None:
        check(self.settings)
        self.member = NeliMember("g", self.process, self.partitions, self.roles, self.settings, self.now)  # type: ignore[arg-type]

    def tell(self, event: Event) -> list[Effect]:
        effects = self.member.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, PublishHeartbeats):
                for partition, stamp in effect.heartbeats.items():
                    self.published.setdefault(partition, []).append(stamp)
            elif isinstance(effect, Commit):
                self.commits.append(effect)
            elif isinstance(effect, AskPartitionCount):
                self.questions.append(effect)
        return effects

    def assign(self, *partitions: int, last: LastCommit | None = NEVER) -> list[Effect]:
        for partition in partitions:
            self.ends[partition] = (last.offset if last else None) or 0
        return self.tell(Assigned(dict.fromkeys(partitions, last)))

    def read(
        self, partition: int, stamp: Stamp | None, age_s: float = 0.0, is_append_time: bool = True
    ) -> list[Effect]:
        offset = self.ends[partition]
        self.ends[partition] += 1
        wall_ms = self.now * 1000
        appended_ms = int(wall_ms - age_s * 1000)
        return self.tell(HeartbeatRead(partition, offset, stamp, appended_ms, is_append_time, wall_ms))

    def read_own(self, partition: int) -> list[Effect]:
        return self.read(partition, self.published[partition][-1])

    def poll(self, **answer: object) -> list[Effect]:
        """A poll, whose commit is answered at once."""
        effects = self.tell(Polled())
        for commit in of(effects, Commit):
            effects += self.tell(CommitAnswered(commit, **answer))  # type: ignore[arg-type]
        return effects

    def count(self, partitions: int | None = None) -> list[Effect]:
        return self.tell(PartitionCount(self.questions[-1], partitions or self.partitions))

    def beat(self, *partitions: int) -> list[Effect]:
        """Everything that keeps leadership: count confirmed, heartbeats published, read back, committed."""
        effects = self.tell(Wakeup())
        if self.questions:
            effects += self.count()
        for partition in partitions:
            effects += self.read_own(partition)
        return effects + self.poll()

    def live(self, for_s: float, *partitions: int) -> list[Effect]:
        """Beat every 0.5 s."""
        effects: list[Effect] = []
        for _ in range(round(for_s / 0.5)):
            self.now += 0.5
            effects += self.beat(*partitions)
        return effects

    def induct(self, *partitions: int) -> list[Effect]:
        """From nothing to leading: assigned, waited, told, and the handlers have returned."""
        self.assign(*partitions)
        effects = self.live(self.settings.wait_s + 0.5, *partitions)
        for call in of(effects, CallInduced):
            self.tell(HandlerReturned(call.partition))
        return effects

    def leads(self, role: int = 0) -> bool:
        return self.member.leads(role, self.now)


def of(effects: Iterable[Effect], kind: type[E]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def facts(effects: Iterable[Effect]) -> list[FactKind]:
    return [effect.fact.kind for effect in of(effects, Report)]


def other(partition_count: int = 2, sequence: int = 1, group: str = "g", tenure: int = 1) -> Stamp:
    return Stamp(group, "other", tenure, sequence, partition_count)


@pytest.mark.rule("NE-1")
def test_another_group_id_on_the_same_topic_is_another_group() -> None:
    """A NELI group is a topic with M partitions, a consumer group id, a set of roles that may change."""
    driver = Driver()
    released = Note(LeadershipClaim.RELEASED, "other", 1, 2.0, 2)
    driver.assign(0, last=LastCommit(7, released.encode()))
    for _ in range(3):
        driver.read(0, other(group="another"))
    assert FactKind.SUCCEEDS in facts(driver.read_own(0)), "records of another group are nobody's of ours"


@pytest.mark.rule("NE-1", "NE-16")
def test_the_set_of_roles_may_change_at_any_time() -> None:
    driver = Driver(roles=(0,))
    driver.induct(0)
    assert of(driver.tell(RolesChanged((0, 2, 4))), CallInduced)[0].roles == {2, 4}
    driver.tell(HandlerReturned(0))
    assert driver.leads(4)
    lapsed = of(driver.tell(RolesChanged((0,))), CallLapsed)
    assert lapsed[0].roles == {2, 4}
    assert driver.leads(0)
    assert not driver.leads(4)
    assert driver.member.held(driver.now) == {0: driver.member.token(0, driver.now)}


@pytest.mark.rule("NE-2")
def test_classic_publishes_to_every_partition_each_interval() -> None:
    """Every process publishes an empty record to every partition each publish_interval_s."""
    driver = Driver(NON_EXCLUSIVE, partitions=3)
    assert of(driver.tell(Wakeup()), PublishHeartbeats)[0].heartbeats.keys() == {0, 1, 2}
    driver.now += 0.4
    assert not of(driver.tell(Wakeup()), PublishHeartbeats)
    assert driver.member.next_wakeup == pytest.approx(100.5)
    driver.now = 100.5
    assert of(driver.tell(Wakeup()), PublishHeartbeats)[0].heartbeats.keys() == {0, 1, 2}


@pytest.mark.rule("NE-9")
def test_fast_publishes_to_its_own_partitions_only() -> None:
    """Only a partition's owner publishes."""
    driver = Driver(partitions=3)
    assert not of(driver.tell(Wakeup()), PublishHeartbeats)
    assert of(driver.assign(1), PublishHeartbeats)[0].heartbeats.keys() == {1}
    driver.tell(Lost(frozenset({1})))
    driver.now += 0.5
    assert not of(driver.tell(Wakeup()), PublishHeartbeats)


@pytest.mark.rule("NE-3")
def test_v_is_the_time_of_the_last_record_whoever_published_it() -> None:
    """V[i] is the time of the last record received from partition i, whoever published it."""
    driver = Driver(NON_EXCLUSIVE)
    driver.assign(0)
    driver.beat(0)
    assert driver.leads()
    for _ in range(60):
        driver.now += 0.5
        driver.tell(Wakeup())
        driver.count()
        driver.read(0, other())
        driver.poll()
        assert driver.leads()


@pytest.mark.rule("NE-4")
@pytest.mark.parametrize("settings", [FAST, EXCLUSIVE, NON_EXCLUSIVE], ids=lambda settings: settings.mode)
def test_leadership_lapses_without_any_event(settings: NeliSettings) -> None:
    """Evaluated when asked: leadership lapses without any event. A stored flag is not leadership."""
    driver = Driver(settings)
    driver.induct(0)
    assert driver.leads()
    assert driver.member.leads(0, driver.now + settings.limit_s - 0.01)
    assert not driver.member.leads(0, driver.now + settings.limit_s)
    assert driver.member.state_of(0) is PartitionState.LED, "nothing was told, and it is not led all the same"
    assert driver.member.next_wakeup is not None
    driver.now += settings.limit_s
    fenced = of(driver.tell(Wakeup()), CallFenced)
    assert [call.roles for call in fenced] == [{0}]
    assert driver.member.state_of(0) is PartitionState.HELD


@pytest.mark.rule("NE-5")
def test_a_change_of_the_partition_count_is_refused() -> None:
    """A change of M while running is detected and refused."""
    driver = Driver()
    driver.induct(0)
    effects = driver.count(3)
    assert "3 partitions and had 2" in str(of(effects, Fail)[0].error)
    assert isinstance(driver.member.error, InvalidSettings)
    assert of(effects, CallFenced)
    assert not driver.leads()
    assert driver.member.next_wakeup is None
    assert of(driver.tell(Revoked(frozenset({0}))), LetGo)
    assert driver.tell(PartitionCount(driver.questions[-1], 4)) == []


@pytest.mark.rule("NE-5")
def test_a_partition_beyond_the_count_is_a_change_of_it() -> None:
    driver = Driver()
    assert of(driver.assign(2), Fail)


@pytest.mark.rule("NE-5")
def test_who_cannot_confirm_the_partition_count_stops_leading() -> None:
    driver = Driver()
    driver.induct(0)
    for _ in range(5):
        driver.now += 0.5
        driver.tell(Wakeup())
        driver.read_own(0)
        driver.poll()
    assert driver.member.why_not(0, driver.now) == "the partition count was not confirmed within the deadline"


@pytest.mark.rule("NE-5")
def test_a_heartbeat_by_another_count_makes_the_member_ask_at_once() -> None:
    driver = Driver(NON_EXCLUSIVE)
    driver.assign(0)
    driver.beat(0)
    asked = len(driver.questions)
    driver.now += 0.01
    driver.read(0, other(partition_count=3))
    assert len(driver.questions) == asked + 1


@pytest.mark.rule("NE-6")
def test_non_exclusive_leads_without_a_grace() -> None:
    """While one process lives, every role has a leader once a rebalance ends."""
    driver = Driver(NON_EXCLUSIVE)
    driver.assign(0, last=LastCommit(3, Note(LeadershipClaim.HELD, "other", 1, 15.0, 2).encode()))
    driver.beat(0)
    assert driver.leads()


@pytest.mark.rule("NE-7")
def test_exclusive_refuses_records_without_the_brokers_time() -> None:
    """The record must carry the LogAppendTime type, else exclusive is refused."""
    driver = Driver(EXCLUSIVE)
    driver.assign(0)
    assert "LogAppendTime" in str(of(driver.read(0, None, is_append_time=False), Fail)[0].error)


@pytest.mark.rule("NE-7")
def test_a_backlog_makes_nobody_a_leader() -> None:
    """A process paused past its session that drains a backlog does not become leader."""
    driver = Driver(EXCLUSIVE)
    driver.induct(0)
    driver.now += 30
    driver.tell(Wakeup())
    driver.count()
    driver.poll()
    for age_s in range(30, 5, -1):
        driver.read(0, other(), age_s=age_s)
    assert driver.member.why_not(0, driver.now) == "no heartbeat came back within the deadline"
    driver.read(0, other(), age_s=4.9)
    assert driver.leads()


@pytest.mark.rule("NE-7")
def test_a_clock_behind_the_brokers_by_more_than_the_stated_error_renews_nothing() -> None:
    driver = Driver(EXCLUSIVE)
    driver.induct(0)
    driver.now += 4.9
    driver.tell(Wakeup())
    driver.count()
    driver.poll()
    assert facts(driver.read(0, other(), age_s=-1.5)) == [FactKind.CLOCK_OFF]
    assert facts(driver.read(0, other(), age_s=-1.5)) == [], "said once"
    driver.now += 0.2
    assert not driver.leads()
    driver.read(0, other(), age_s=-0.9)
    assert driver.leads()


@pytest.mark.rule("NE-8")
@pytest.mark.parametrize("claim", [LeadershipClaim.HELD, LeadershipClaim.RELEASED])
def test_exclusive_answers_not_leader_for_a_grace(claim: LeadershipClaim) -> None:
    """A process that newly gets a partition answers "not leader" for a grace of T."""
    driver = Driver(EXCLUSIVE)
    driver.assign(0, last=LastCommit(3, Note(claim, "other", 1, 5.0, 2).encode()))
    driver.live(4.5, 0)
    assert driver.member.why_not(0, driver.now) == "a predecessor may still lead"
    driver.live(0.5, 0)
    assert driver.leads()


@pytest.mark.rule("NE-8")
@pytest.mark.parametrize(
    ("last", "wait_s"),
    [
        (NEVER, 2.0),
        (None, 10.0),
        (LastCommit(3, "by hand"), 10.0),
        (LastCommit(3, Note(LeadershipClaim.HELD, "other", 1, 6.0, 2).encode()), 6.0),
        (LastCommit(3, Note(LeadershipClaim.HELD, "other", 1, 1.0, 2).encode()), 2.0),
    ],
    ids=["never committed", "could not be asked", "not understood", "longer deadline", "shorter deadline"],
)
def test_a_successor_waits_as_long_as_any_predecessor_may_lead(
    last: LastCommit | None, wait_s: float
) -> None:
    driver = Driver()
    driver.assign(0, last=last)
    driver.live(wait_s - 0.5, 0)
    assert not driver.leads()
    driver.live(0.5, 0)
    assert driver.leads()


def test_the_wait_outlasts_the_deadline_of_a_slower_clock() -> None:
    settings = replace(FAST, clock_drift_ratio=0.1)
    assert settings.wait_s == pytest.approx(2.0 * 1.1 / 0.9)


def test_who_waits_itself_passes_the_longest_wait_on() -> None:
    driver = Driver()
    driver.assign(0, last=LastCommit(3, Note(LeadershipClaim.HELD, "other", 1, 6.0, 2).encode()))
    driver.beat(0)
    assert driver.commits[-1].offsets[0].note.wait_s == 6.0
    driver.live(6.5, 0)
    assert driver.commits[-1].offsets[0].note.wait_s == 2.0


@pytest.mark.rule("NE-9")
def test_heartbeats_read_again_resume_leadership() -> None:
    """None within the deadline and it relinquishes; read again while it still owns it and it resumes."""
    driver = Driver()
    driver.induct(0)
    token = driver.member.token(0, driver.now)
    for _ in range(4):
        driver.now += 0.5
        driver.tell(Wakeup())
        driver.count()
        driver.poll()
    assert driver.member.why_not(0, driver.now) == "no heartbeat came back within the deadline"
    driver.tell(HandlerReturned(0))
    driver.beat(0)
    assert driver.member.token(0, driver.now) == token


@pytest.mark.rule("NE-9")
def test_records_of_others_and_stale_ones_renew_nothing() -> None:
    """Reads its own heartbeats back (records of others, and stale ones, renew nothing)."""
    driver = Driver()
    driver.induct(0)
    stale = driver.published[0][-1]
    earlier_tenure = replace(stale, tenure=stale.tenure - 1)
    for _ in range(4):
        driver.now += 0.5
        driver.tell(Wakeup())
        driver.count()
        for stamp in (stale, earlier_tenure, other(), other(sequence=stale.sequence), None):
            driver.read(0, stamp)
        driver.poll()
    assert driver.member.why_not(0, driver.now) == "no heartbeat came back within the deadline"


@pytest.mark.rule("NE-9")
def test_a_heartbeat_counts_from_before_it_was_sent() -> None:
    driver = Driver()
    driver.induct(0)
    driver.now += 0.5
    driver.tell(Wakeup())
    sent_at, late = driver.now, driver.published[0][-1]
    driver.now += 1.4
    driver.tell(Wakeup())
    driver.count()
    driver.read(0, late)
    driver.poll()
    assert driver.leads()
    assert not driver.member.leads(0, sent_at + 2.0)


@pytest.mark.rule("NE-9")
def test_the_revoke_callback_blocks_until_the_work_is_done() -> None:
    """The revoke callback blocks until in-flight work is done, and the successor waits for it."""
    driver = Driver()
    driver.induct(0, 1)
    token = driver.member.token(0, driver.now)
    effects = driver.tell(Revoked(frozenset({0})))
    lapsed = of(effects, CallLapsed)[0]
    assert (lapsed.partition, lapsed.roles, lapsed.token) == (0, {0}, token)
    assert lapsed.limit == driver.now + driver.settings.lapse_s
    assert not of(effects, LetGo)
    assert not driver.leads(0)
    assert driver.leads(1)
    driver.now += 1.0
    release = of(driver.tell(HandlerReturned(0)), Commit)[0]
    assert release.offsets.keys() == {0}
    assert release.offsets[0].note.claim is LeadershipClaim.RELEASED
    done = driver.tell(CommitAnswered(release))
    assert of(done, LetGo) == [LetGo(frozenset({0}))]
    assert FactKind.RELEASED in facts(done)
    assert driver.member.state_of(0) is PartitionState.FOREIGN


@pytest.mark.rule("NE-9")
def test_a_handler_that_overruns_holds_the_callback_for_its_limit_only() -> None:
    """Bounded by the rebalance timeout, which is stated."""
    driver = Driver()
    driver.induct(0)
    driver.tell(Revoked(frozenset({0})))
    driver.now += driver.settings.lapse_s
    effects = driver.tell(Wakeup())
    assert of(effects, LetGo)
    assert not of(effects, Commit), "what was not ended is not released"
    assert FactKind.HANDLER_OVERRAN in facts(effects)


@pytest.mark.rule("NE-9")
def test_losing_without_revoke_relinquishes_at_once() -> None:
    """Losing without revoke (on_lost) relinquishes at once."""
    driver = Driver()
    driver.induct(0)
    fenced = of(driver.tell(Lost(frozenset({0}))), CallFenced)
    assert (fenced[0].roles, fenced[0].reason) == ({0}, "lost")
    assert not driver.leads()


def test_what_is_lost_together_is_told_at_once() -> None:
    driver = Driver()
    driver.tell(Assigned({0: None, 1: None}))
    effects = driver.tell(Lost(frozenset({0, 1, 7})))
    told = [each.fact for each in of(effects, Report) if each.fact.kind is FactKind.LOST]
    assert [fact.detail for fact in told] == [{"reason": "lost", "partitions": "0, 1"}]
    assert not of(driver.tell(Lost(frozenset({0, 1}))), Report)


def _released(driver: Driver, *records: Stamp | None, last: LastCommit | None = None) -> list[Effect]:
    note = Note(LeadershipClaim.RELEASED, "other", 4, 2.0, 2)
    driver.assign(0, last=last or LastCommit(7, note.encode()))
    for stamp in records:
        driver.read(0, stamp)
    return driver.read_own(0)


@pytest.mark.rule("NE-9")
def test_a_release_spares_the_wait() -> None:
    driver = Driver()
    effects = _released(driver, other(tenure=4), None, other(tenure=4))
    assert FactKind.SUCCEEDS in facts(effects)
    driver.poll()
    assert driver.leads()


@pytest.mark.rule("NE-9")
@pytest.mark.parametrize(
    "stranger",
    [other(tenure=3), Stamp("g", "third", 4, 1, 2), Stamp("g", "me", 0, 1, 2)],
    ids=["earlier tenure", "another process", "own, before"],
)
def test_a_heartbeat_of_anybody_else_since_the_release_voids_it(stranger: Stamp) -> None:
    driver = Driver()
    assert FactKind.SUCCEEDS not in facts(_released(driver, other(tenure=4), stranger))
    driver.poll()
    assert driver.member.why_not(0, driver.now) == "a predecessor may still lead"


@pytest.mark.rule("NE-5", "NE-9")
def test_a_release_by_another_partition_count_spares_nothing() -> None:
    driver = Driver()
    note = Note(LeadershipClaim.RELEASED, "other", 4, 2.0, 3)
    assert FactKind.SUCCEEDS not in facts(_released(driver, last=LastCommit(7, note.encode())))


@pytest.mark.rule("NE-9")
def test_a_gap_in_the_log_since_the_release_voids_it() -> None:
    driver = Driver()
    driver.assign(0, last=LastCommit(7, Note(LeadershipClaim.RELEASED, "other", 4, 2.0, 2).encode()))
    driver.ends[0] += 1
    assert FactKind.SUCCEEDS not in facts(driver.read_own(0))


@pytest.mark.rule("NE-9")
def test_who_has_to_wait_releases_nothing() -> None:
    driver = Driver()
    driver.assign(0, last=LastCommit(3, Note(LeadershipClaim.HELD, "other", 1, 2.0, 2).encode()))
    driver.beat(0)
    effects = driver.tell(Revoked(frozenset({0})))
    assert of(effects, LetGo)
    assert not of(effects, Commit)


@pytest.mark.rule("NE-10")
def test_hearing_ones_own_heartbeat_is_not_enough() -> None:
    """Hearing one's own heartbeat proves reachability, not ownership: renewed by an offset commit."""
    driver = Driver()
    driver.induct(0)
    for _ in range(4):
        driver.now += 0.5
        driver.tell(Wakeup())
        driver.count()
        driver.read_own(0)
        driver.poll(failed={0: "timed out"})
    assert driver.member.why_not(0, driver.now) == "the broker accepted no commit within the deadline"


@pytest.mark.rule("NE-10")
def test_a_commit_is_made_right_after_a_poll_and_at_no_other_time() -> None:
    driver = Driver()
    driver.induct(0)
    driver.now += 0.5
    before = len(driver.commits)
    driver.tell(Wakeup())
    driver.read_own(0)
    driver.count()
    assert len(driver.commits) == before
    driver.tell(Polled())
    assert len(driver.commits) == before + 1
    driver.tell(Polled())
    assert len(driver.commits) == before + 1, "once an interval"


@pytest.mark.rule("NE-10")
def test_a_commit_counts_from_before_it_was_sent() -> None:
    """Made right after a poll and counted from before it was sent."""
    driver = Driver()
    driver.induct(0)
    driver.now += 0.5
    commit = of(driver.tell(Polled()), Commit)[0]
    sent_at = driver.now
    assert commit.sent_at == sent_at
    driver.now += 1.0
    driver.tell(Wakeup())
    driver.count()
    driver.read_own(0)
    driver.tell(CommitAnswered(commit))
    assert driver.member.leads(0, sent_at + 1.99)
    assert not driver.member.leads(0, sent_at + 2.0)


@pytest.mark.rule("NE-10")
def test_who_is_no_member_any_more_stops_at_once() -> None:
    driver = Driver()
    driver.induct(0)
    driver.now += 0.5
    effects = driver.poll(failed={0: "UNKNOWN_MEMBER_ID"}, fenced=True)
    assert of(effects, CallFenced)
    driver.tell(HandlerReturned(0))
    driver.live(1.0, 0)
    assert not driver.leads(), "until the partition is assigned anew"


@pytest.mark.rule("NE-10")
def test_an_answer_to_a_commit_of_an_earlier_tenure_renews_nothing() -> None:
    driver = Driver()
    driver.induct(0)
    driver.now += 0.5
    late = of(driver.tell(Polled()), Commit)[0]
    driver.tell(Lost(frozenset({0})))
    driver.assign(0)
    driver.tell(CommitAnswered(late))
    driver.now += 2.0
    driver.tell(Wakeup())
    driver.count()
    driver.read_own(0)
    assert driver.member.why_not(0, driver.now) == "the broker accepted no commit within the deadline"


@pytest.mark.rule("NE-12")
def test_n_groups_share_a_topic_each_at_n_times_the_interval() -> None:
    """n groups may share a topic, each publishing at n times the interval."""
    shared = replace(NON_EXCLUSIVE, groups=4)
    driver = Driver(shared)
    driver.tell(Wakeup())
    driver.now += 1.9
    assert not of(driver.tell(Wakeup()), PublishHeartbeats)
    driver.now += 0.1
    assert of(driver.tell(Wakeup()), PublishHeartbeats)
    assert replace(shared, mode=Mode.FAST).interval_s == 0.5, "there its own heartbeats are all that counts"


@pytest.mark.rule("NE-13")
def test_two_disjoint_groups_give_every_role_a_leader_in_each() -> None:
    """Two disjoint process groups over the same roles give every role a leader in each."""
    groups = {name: Driver(process=name) for name in ("left", "right")}
    for driver in groups.values():
        driver.member = NeliMember(driver.process, driver.process, 2, (0, 1), FAST, driver.now)
        driver.induct(0, 1)
    for driver in groups.values():
        assert driver.leads(0)
        assert driver.leads(1)


@pytest.mark.rule("NE-15")
def test_a_token_is_confirmed_by_a_commit_sent_after_it_was_known() -> None:
    """Leadership comes with a fencing token that grows from leader to leader."""
    driver = Driver(NON_EXCLUSIVE)
    driver.assign(0)
    driver.read(0, other())
    commit = of(driver.tell(Polled()), Commit)[0]
    driver.read_own(0)
    driver.tell(CommitAnswered(commit))
    assert driver.member.why_not(0, driver.now) == "no heartbeat of its own is confirmed as fencing token yet"
    driver.poll()
    assert driver.member.token(0, driver.now) == 1, "the offset of its first own heartbeat"


@pytest.mark.rule("NE-15")
def test_a_later_tenure_has_a_greater_token() -> None:
    driver = Driver()
    driver.induct(0)
    first = driver.member.token(0, driver.now)
    driver.tell(Lost(frozenset({0})))
    driver.tell(HandlerReturned(0))
    end = driver.ends[0]
    driver.assign(0, last=LastCommit(end, driver.commits[-1].offsets[0].note.encode()))
    driver.live(2.5, 0)
    second = driver.member.token(0, driver.now)
    assert first is not None
    assert second is not None
    assert second > first


@pytest.mark.rule("NE-16")
@pytest.mark.parametrize("protocol", GroupProtocol)
def test_handlers_are_told_one_at_a_time_in_each_partition(protocol: GroupProtocol) -> None:
    """Decorators for induced, lapsed and fenced; both the classic and the new group protocol."""
    driver = Driver(replace(FAST, protocol=protocol))
    driver.assign(0)
    induced = of(driver.live(2.5, 0), CallInduced)
    assert [(call.roles, call.token) for call in induced] == [({0}, 0)]
    assert not of(driver.tell(Lost(frozenset({0}))), CallFenced), "the first handler has not returned"
    assert not driver.leads(), "which does not make it a leader"
    effects = driver.tell(HandlerReturned(0, error="boom"))
    assert FactKind.HANDLER_FAILED in facts(effects)
    assert of(effects, CallFenced)
    assert not of(driver.tell(HandlerReturned(0)), CallFenced)


@pytest.mark.rule("NE-16")
def test_a_stop_hands_everything_over_then_leaves() -> None:
    driver = Driver()
    driver.induct(0, 1)
    effects = driver.tell(Stop())
    assert {call.partition for call in of(effects, CallLapsed)} == {0, 1}
    assert not driver.leads(0)
    assert not of(driver.tell(Assigned({1: NEVER})), PublishHeartbeats), "who leaves takes nothing"
    first = of(driver.tell(HandlerReturned(0)), Commit)[0]
    assert not of(driver.tell(CommitAnswered(first)), Leave)
    second = of(driver.tell(HandlerReturned(1)), Commit)[0]
    assert of(driver.tell(CommitAnswered(second)), Leave) == [Leave()]
    assert driver.member.next_wakeup is None
    assert of(driver.tell(Revoked(frozenset({0, 1}))), LetGo) == [LetGo(frozenset({0, 1}))]


@pytest.mark.rule("NE-16")
def test_a_stop_of_a_member_that_holds_nothing_leaves_at_once() -> None:
    assert of(Driver().tell(Stop()), Leave)


def test_what_is_not_known_is_not_led_and_why_is_said() -> None:
    driver = Driver()
    assert driver.member.why_not("unheard of", driver.now) == "the role is not known here"
    assert driver.member.why_not(1, driver.now) == "partition 1 is not assigned here"
    assert driver.member.token("unheard of", driver.now) is None
    assert driver.member.partition_of(1) == 1
    assert driver.member.partitions == 2


def test_every_standing_can_be_reached_and_left() -> None:
    assert {state for state, _ in PARTITION.rows} == set(PartitionState) == set(PARTITION.rows.values())
    assert {turn for _, turn in PARTITION.rows} == set(Turn)


def leadership(effects: Iterable[Effect]) -> list[tuple[FactKind, int | None, int | None]]:
    """What was told of leadership: kind, partition and token."""
    kinds = {
        FactKind.INDUCED,
        FactKind.LAPSED,
        FactKind.ENDED,
        FactKind.FENCED,
        FactKind.RELEASED,
        FactKind.HANDLER_OVERRAN,
    }
    told = [each.fact for each in of(effects, Report)]
    return [(fact.kind, fact.partition, fact.token) for fact in told if fact.kind in kinds]


@pytest.mark.rule("AU-3", "NE-9")
def test_an_orderly_hand_over_ends_when_the_handlers_have_returned() -> None:
    """Not when the broker has answered: that may take long, and nothing is led any more."""
    driver = Driver(roles=("bills", "mail", "news"))
    effects = driver.induct(0, 1)
    begun = next(each.fact for each in of(effects, Report) if each.fact.kind is FactKind.INDUCED)
    roles = {driver.member.partition_of(role): role for role in ("bills", "mail", "news")}
    assert set(str(begun.detail["roles"]).split(", ")) <= {"bills", "mail", "news"}
    assert roles
    token = begun.token
    assert begun.partition == 0
    assert leadership(driver.tell(Revoked(frozenset({0})))) == [(FactKind.LAPSED, 0, token)]
    returned = driver.tell(HandlerReturned(0))
    assert leadership(returned) == [(FactKind.ENDED, 0, token)]
    answered = driver.tell(CommitAnswered(of(returned, Commit)[0]))
    assert leadership(answered) == [(FactKind.RELEASED, 0, token)]


@pytest.mark.rule("AU-3", "NE-9")
@pytest.mark.parametrize("how", ["refused", "lost", "overran", "exclusive"])
def test_a_hand_over_without_a_release_ends_once(how: str) -> None:
    """Leadership that ends in any way ends with exactly one record that says so."""
    driver = Driver(EXCLUSIVE if how == "exclusive" else FAST)
    driver.induct(0)
    token = driver.member.token(0, driver.now)
    effects = driver.tell(Revoked(frozenset({0})))
    if how == "overran":
        driver.now += driver.settings.lapse_s
        effects += driver.tell(Wakeup())
    elif how == "lost":
        effects += driver.tell(Lost(frozenset({0})))
    returned = driver.tell(HandlerReturned(0))
    effects += returned
    for commit in of(returned, Commit):
        effects += driver.tell(CommitAnswered(commit, {0: "timed out"}))
    overran = [(FactKind.HANDLER_OVERRAN, 0, token)] if how == "overran" else []
    end = FactKind.FENCED if how in {"lost", "overran"} else FactKind.ENDED
    assert leadership(effects) == [(FactKind.LAPSED, 0, token), *overran, (end, 0, token)]
    driver.now += 100.0
    assert leadership(driver.tell(Wakeup())) == []


@pytest.mark.rule("AU-3", "NE-4")
def test_leadership_that_ended_by_time_is_told_with_the_time_at_which_it_ended() -> None:
    """Leadership lapses without any event: a process that was stopped tells later when it had ended."""
    driver = Driver()
    driver.induct(0)
    token, ends_at = driver.member.token(0, driver.now), driver.member.next_wakeup
    while driver.leads():
        driver.now += 0.125
    ended_by = driver.now
    driver.now += 60.0
    (fact,) = [e.fact for e in of(driver.tell(Wakeup()), Report) if e.fact.kind is FactKind.FENCED]
    assert ends_at is not None
    assert ended_by - 0.125 < fact.at <= ended_by
    assert (fact.token, fact.detail["late_s"]) == (token, driver.now - fact.at)


@pytest.mark.rule("AU-3", "NE-4")
def test_leadership_is_told_while_a_handler_still_runs() -> None:
    """``is_leader`` does not wait for handlers, and so the history must not."""
    driver = Driver()
    driver.assign(0)
    effects = driver.live(driver.settings.wait_s + 0.5, 0)
    assert len(of(effects, CallInduced)) == 1
    driver.now += 100.0
    assert not driver.leads()
    assert [kind for kind, _, _ in leadership(driver.tell(Wakeup()))] == [FactKind.FENCED]
    again = driver.beat(0)
    again += driver.live(1.0, 0)
    assert driver.leads()
    assert [kind for kind, _, _ in leadership(again)] == [FactKind.INDUCED]
    assert not of(again, CallInduced), "the handler of before has not returned"
