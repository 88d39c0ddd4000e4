"""The owner of a partition: what it offers, when, and in which order, in whatever order it is told."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from rebalanser.core.tasks import dependencies, rules
from rebalanser.core.tasks import owner as owner_module
from rebalanser.core.tasks.claims import ASIDE_S, Claimant, PartitionClaims, PendingClaim, pending_claim
from rebalanser.core.tasks.clocks import Timers
from rebalanser.core.tasks.dependencies import Dependencies
from rebalanser.core.tasks.model import (
    OPEN,
    AfterFailure,
    ClaimState,
    ClaimTerm,
    Head,
    RateMark,
    Status,
    Stored,
    TaskId,
    TaskState,
)
from rebalanser.core.tasks.owner import PartitionOwner
from rebalanser.core.tasks.ready_index import ReadyTasks
from rebalanser.core.tasks.retention import Components
from rebalanser.core.tasks.rules import FailedDependency, Reason, Refused
from rebalanser.core.tasks.store import Applied, OwnerEpoch, RateStart, WriteConflict
from rebalanser.core.tasks.writes import PendingMove
from rebalanser.errors import RequestTooLarge

TTL_S, BUFFER_S = 10.0, 1.0
HERE, ELSEWHERE = "boot-here", "boot-elsewhere"


def task(number: int) -> TaskId:
    return f"{number:040x}"


def stored(
    number: int,
    status: Status = Status.WAITING,
    *,
    revision: int = 1,
    priority: int = 0,
    after: tuple[int, ...] = (),
    due: float = 0.0,
    claim: ClaimState | None = None,
    partition: int = 0,
    retries: int = 3,
    after_failure: AfterFailure = AfterFailure.WAIT,
) -> Stored:
    needed = tuple(task(each) for each in after)
    head = Head(task(number), "q", "f", priority, needed, retries, after_failure=after_failure)
    return Stored(head, TaskState(status, claim, due), revision, partition)


def held(number: int = 0, clock: str = ELSEWHERE, ends_at_s: float = 0.0, ttl_s: float = TTL_S) -> ClaimState:
    return ClaimState(number, f"h{number}", "w", ClaimTerm(ttl_s, clock, ends_at_s))


def make(*known: Stored, now: float = 0.0) -> PartitionOwner:
    owner = PartitionOwner(0, 5, buffer_s=BUFFER_S, clock=HERE)
    for each in known:
        owner.learn(each, now)
    return owner


def offered(owner: PartitionOwner, now: float = 0.0, wall: float = 0.0, limit: int = 100) -> list[int]:
    return [int(each, 16) for each, _ in candidates(owner, limit, now, wall)]


def candidates(owner: PartitionOwner, limit: int, now: float, wall: float) -> list[tuple[TaskId, bool]]:
    """What is offered one after the other, and whether a claim of it is over; all of it is put back."""
    found: list[tuple[TaskId, bool]] = []
    while len(found) < limit and (best := owner.best(now, wall)) is not None:
        _, over = owner.take(best[1])
        found.append((best[1], over))
    for each, _ in found:
        owner.put_back(each, now)
    return found


@pytest.mark.rule("SK-5")
def test_the_highest_priority_comes_first_then_the_oldest() -> None:
    owner = make(stored(3), stored(1), stored(4, priority=9), stored(2, priority=-9), stored(5, priority=9))
    assert offered(owner) == [4, 5, 1, 3, 2]
    assert offered(owner, limit=2) == [4, 5], "what was offered and not taken is offered again"
    owner.take(task(4))
    owner.learn(stored(6, priority=7), 0.0)
    assert offered(owner, limit=2) == [5, 6]


@pytest.mark.rule("SK-5")
def test_what_is_not_due_waits_for_the_wall_clock() -> None:
    owner = make(stored(1, due=100.0), stored(2))
    assert offered(owner, wall=99.9) == [2]
    assert offered(owner, wall=100.0) == [1, 2]


@pytest.mark.rule("SK-5")
def test_a_task_waits_for_all_that_it_depends_on_wherever_that_lies() -> None:
    owner = make(stored(1, after=(7, 8, 9)), stored(8))
    assert owner.unknown_dependencies() == [task(7), task(8), task(9)]
    assert owner.unknown_dependencies(2) == [task(7), task(8)]
    owner.learn_dependency(task(7), Status.COMPLETED)
    owner.learn_dependency(task(8), Status.WAITING)
    owner.learn_dependency(task(9), Status.WAITING)
    assert owner.unknown_dependencies() == []
    assert offered(owner) == [8]
    owner.learn(stored(8, Status.COMPLETED, revision=2), 0.0)
    assert task(9) in owner.awaited
    owner.learn(stored(9, Status.CLAIMED, revision=3, partition=4, claim=held()), 0.0)
    assert offered(owner) == []
    owner.learn(stored(9, Status.COMPLETED, revision=4, partition=4), 0.0)
    assert offered(owner) == [1]
    assert task(9) not in owner.awaited


WAIT, RUN, FAIL = AfterFailure


def ask(owner: PartitionOwner, *answers: Status | None) -> None:
    """A read of all that is unknown, with these answers."""
    for needed, status in zip(owner.ask_dependencies(), answers, strict=True):
        owner.learn_dependency(needed, status)


@pytest.mark.rule("SK-5")
@pytest.mark.parametrize("status", [Status.DEAD, Status.CANCELLED])
@pytest.mark.parametrize("partition", [0, 4])
def test_what_depends_on_a_failed_task_is_offered_or_waits(status: Status, partition: int) -> None:
    owner = make(
        stored(1, after=(7,)),
        stored(2, after=(7,), after_failure=RUN),
        stored(3, after=(7,), after_failure=FAIL),
        stored(4, after=(7, 8), after_failure=RUN),
        stored(5, after=(7, 8), after_failure=FAIL),
    )
    ask(owner, Status.WAITING, None)
    assert offered(owner) == []
    owner.learn(stored(7, status, revision=2, partition=partition), 0.0)
    assert offered(owner) == [], "news may be old"
    assert owner.unknown_dependencies() == [task(7)]
    ask(owner, status)
    assert owner.failed_dependency(task(2)) is None
    assert owner.failed_dependency(task(3)) == FailedDependency(task(7), status)
    assert offered_once(owner) == [2, 3, 5]
    assert owner.unknown_dependencies() == []


def offered_once(owner: PartitionOwner) -> list[int]:
    """What is offered; nothing is put back."""
    found = []
    while (best := owner.best(0.0, 0.0)) is not None:
        found.append(int(best[1], 16))
        owner.take(best[1])
    return found


@pytest.mark.rule("SK-24")
def test_a_claim_goes_with_its_last_reference() -> None:
    """A claim that refers to itself waits for the garbage collector, which then takes longer."""
    owner = make(stored(1))
    made = pending_claim(owner, task(1), Claimant("h", "w", ClaimTerm(TTL_S, HERE, TTL_S)))
    assert made.write() is not None
    made.answered(Applied(9))
    gone = weakref.ref(made)
    gc.disable()
    try:
        del made
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.rule("SK-5")
def test_an_offered_task_that_fails_says_why_until_more_is_known_of_it() -> None:
    owner = make(stored(1, after=(7,), after_failure=FAIL))
    ask(owner, Status.DEAD)
    assert owner.failed_dependency(task(1)) == FailedDependency(task(7), Status.DEAD)
    made = pending_claim(owner, task(1), Claimant("h", "w", ClaimTerm(TTL_S, HERE, TTL_S)))
    assert (made.fails, made.makes_dead) == (True, True)
    write = made.write()
    assert write is not None
    assert (write.state.status, write.slot) == (Status.DEAD, None)
    assert write.epoch == OwnerEpoch(0, 5)
    owner.put_back(task(1), 0.0)
    assert owner.failed_dependency(task(1)) is None
    assert owner.unknown_dependencies() == [task(7)], "the next who looks decides"
    ask(owner, Status.WAITING)
    assert offered(owner) == []


@pytest.mark.rule("SK-5")
@pytest.mark.parametrize("choice", [RUN, FAIL])
def test_an_answer_counts_for_those_that_waited_when_it_was_asked_for(choice: AfterFailure) -> None:
    """What was dead before a task was enqueued may have been requeued since."""
    owner = make(stored(1, after=(7,), after_failure=choice), stored(3, after=(7,)))
    assert owner.ask_dependencies() == [task(7)]
    owner.learn(stored(2, after=(7,), after_failure=choice), 0.0)
    owner.learn_dependency(task(7), Status.DEAD)
    assert offered_once(owner) == [1]
    assert owner.unknown_dependencies() == [task(7)]
    owner.learn_dependency(task(7), Status.DEAD)
    assert offered_once(owner) == [], "who has not asked learns nothing"
    ask(owner, Status.WAITING)
    assert offered_once(owner) == []
    assert owner.unknown_dependencies() == []


@pytest.mark.rule("SK-5")
def test_an_answer_counts_only_if_nothing_has_changed_since_it_was_asked_for() -> None:
    owner = make(stored(1, after=(7,), after_failure=FAIL))
    assert owner.ask_dependencies() == [task(7)]
    owner.learn(stored(7, Status.DEAD, revision=5, partition=3), 0.0)
    owner.learn_dependency(task(7), Status.WAITING)
    assert owner.unknown_dependencies() == [task(7)]
    owner.ask_dependencies()
    owner.learn(stored(7, revision=6, partition=3), 0.0)
    owner.learn_dependency(task(7), Status.DEAD)
    assert offered(owner) == []
    owner.ask_dependencies()
    owner.doubt_dependencies()
    owner.learn_dependency(task(7), Status.DEAD)
    assert offered(owner) == []
    ask(owner, Status.DEAD)
    assert offered_once(owner) == [1]


@pytest.mark.rule("SK-5")
@pytest.mark.parametrize("partition", [0, 3, None], ids=["its own", "another", "not told"])
def test_what_was_requeued_is_waited_for_again_by_what_was_not_offered(partition: int | None) -> None:
    owner = make(stored(1, after=(7, 8), after_failure=RUN))
    ask(owner, Status.DEAD, Status.WAITING)
    if partition is not None:
        owner.learn(stored(7, Status.CLAIMED, revision=4, partition=partition, claim=held()), 0.0)
    else:
        owner.doubt_dependencies()
        ask(owner, Status.CLAIMED, Status.WAITING)
    owner.completed(task(8), 3, 5)
    assert offered_once(owner) == []
    if partition is not None:
        ask(owner, Status.CLAIMED)
    owner.completed(task(7), partition or 0, 6)
    assert offered_once(owner) == [1]
    assert not owner._blocked._waiting
    assert not owner._blocked._choices
    assert not owner._blocked._asked


@pytest.mark.rule("SK-5")
def test_what_comes_later_asks_again_about_what_another_waits_for() -> None:
    owner = make(stored(1, after=(7,)))
    ask(owner, Status.DEAD)
    owner.learn(stored(2, after=(7,), after_failure=FAIL), 0.0)
    assert owner.unknown_dependencies() == [task(7)]
    ask(owner, Status.DEAD)
    assert offered_once(owner) == [2]


@pytest.mark.rule("SK-5")
def test_what_was_dead_and_is_complete_leaves_nothing_behind() -> None:
    owner = make(stored(1, after=(7, 8), after_failure=RUN))
    ask(owner, Status.DEAD, Status.WAITING)
    owner.completed(task(7), 3, 5)
    owner.learn(stored(1, Status.CANCELLED, revision=9), 0.0)
    assert not owner._blocked._waiting


@pytest.mark.rule("SK-5")
def test_a_task_with_a_choice_that_is_gone_leaves_nothing_behind() -> None:
    owner = make(stored(1, after=(7, 8), after_failure=RUN), stored(2, after=(8,), after_failure=FAIL))
    ask(owner, Status.DEAD, Status.WAITING)
    owner.ask_dependencies()
    for number in (1, 2):
        owner.learn(stored(number, Status.CANCELLED, revision=9), 0.0)
    blocked = owner._blocked
    assert not any((blocked._waiting, blocked._missing, blocked._choices, blocked._asked, blocked._unknown))
    assert not owner.learn_unfinished(task(7), Status.DEAD)


@pytest.mark.rule("SK-10")
def test_a_known_completion_is_not_asked_for_again() -> None:
    owner = make(stored(1, Status.COMPLETED, revision=4), stored(2, after=(1,), revision=5))
    assert owner.unknown_dependencies() == []
    assert offered(owner) == [2]


def test_after_lost_changes_all_that_is_waited_for_is_asked_for_again() -> None:
    owner = make(stored(1, after=(7,)))
    owner.learn_dependency(task(7), Status.WAITING)
    owner.doubt_dependencies()
    assert owner.unknown_dependencies() == [task(7)]
    owner.learn(stored(1, Status.CANCELLED, revision=2, after=(7,)), 0.0)
    assert owner.unknown_dependencies() == []
    assert task(7) not in owner.awaited


def test_what_was_claimed_before_has_all_it_depends_on() -> None:
    owner = make(stored(1, after=(7,), claim=held()))
    assert owner.unknown_dependencies() == []
    assert offered(owner) == [1]


@pytest.mark.rule("SK-8", "SK-18")
def test_a_claim_is_over_after_its_time_and_the_buffer_counted_from_when_it_was_learnt() -> None:
    far_ahead = held(ends_at_s=1e9)
    owner = make(stored(1, Status.CLAIMED, claim=far_ahead), now=50.0)
    assert candidates(owner, 9, 50.0 + TTL_S + BUFFER_S - 0.001, 0.0) == []
    assert owner.next_wakeup(51.0, 0.0) == 50.0 + TTL_S + BUFFER_S
    assert candidates(owner, 9, 50.0 + TTL_S + BUFFER_S, 0.0) == [(task(1), True)]


@pytest.mark.rule("SK-8")
def test_on_one_boot_of_one_host_a_claim_is_over_at_its_very_end() -> None:
    owner = make(stored(1, Status.CLAIMED, claim=held(clock=HERE, ends_at_s=53.0)), now=50.0)
    assert owner.next_wakeup(50.0, 0.0) == 53.0 + BUFFER_S
    odd = make(stored(1, Status.CLAIMED, claim=held(clock=HERE, ends_at_s=1e9)), now=50.0)
    assert odd.next_wakeup(50.0, 0.0) == 50.0 + TTL_S + BUFFER_S, "no claim lasts longer than its time"
    nameless = PartitionOwner(0, 5)
    nameless.learn(stored(1, Status.CLAIMED, claim=held(clock="", ends_at_s=51.0)), 50.0)
    assert nameless.next_wakeup(50.0, 0.0) == 50.0 + TTL_S


@pytest.mark.rule("SK-7", "SK-8")
def test_a_renewal_counts_anew_and_an_update_does_not() -> None:
    first = held(ends_at_s=1.0)
    owner = make(stored(1, Status.CLAIMED, claim=first), now=50.0)
    owner.learn(stored(1, Status.CLAIMED, revision=2, claim=replace(first, updates=1)), 55.0)
    assert owner.next_wakeup(55.0, 0.0) == 50.0 + TTL_S + BUFFER_S
    renewed = replace(first, term=replace(first.term, ends_at_s=6.0))
    owner.learn(stored(1, Status.CLAIMED, revision=3, claim=renewed), 56.0)
    assert owner.next_wakeup(56.0, 0.0) == 56.0 + TTL_S + BUFFER_S
    candidates(owner, 9, 67.0, 0.0)
    owner.learn(stored(1, Status.CLAIMED, revision=4, claim=held(ends_at_s=9.0)), 67.5)
    assert offered(owner, 68.0) == [], "renewed after its time, before anybody took it"


@pytest.mark.rule("SK-11")
def test_older_news_change_nothing() -> None:
    owner = make(stored(1, Status.CLAIMED, revision=5, claim=held()))
    owner.learn(stored(1, revision=4), 0.0)
    assert offered(owner) == []
    owner.learn(stored(1, Status.COMPLETED, revision=6), 0.0)
    owner.learn(stored(1, Status.CLAIMED, revision=5, claim=held()), 0.0)
    owner.learn(stored(1, Status.COMPLETED, revision=6), 0.0)
    assert len(owner) == 0
    assert owner.get(task(1)) is None
    owner.learn(stored(2, Status.DEAD, revision=7), 0.0)
    owner.learn(stored(2, revision=8), 0.0)
    assert offered(owner) == [2]


@pytest.mark.rule("SK-2", "SK-11")
@pytest.mark.parametrize(
    "known",
    [
        stored(1, revision=7, priority=-3, retries=0, after_failure=AfterFailure.RUN),
        stored(1, due=5.0),
        stored(1, after=(2, 3)),
        stored(1, claim=held()),
        stored(1, Status.CLAIMED, claim=held()),
        *(
            replace(each, head=replace(each.head, **{name: value}))
            for each in [stored(1, revision=2**70)]
            for name, value in {
                "queue": "other",
                "name": "g",
                "timeout_s": 2.5,
                "unique_key": "u",
                "unique_for_s": 3.0,
                "limit_key": "k",
                "max_running": 2,
                "rate_limit": "1/s",
            }.items()
        ),
        *(
            replace(each, state=replace(each.state, **{name: value}))
            for each in [stored(1)]
            for name, value in {"failures": 1, "error": "e", "result": b"r"}.items()
        ),
    ],
)
def test_a_task_is_known_as_it_was_learnt(known: Stored) -> None:
    """However it is kept: beside another one of the same function, and after that has changed."""
    owner = make(stored(9, revision=3), known, stored(8, revision=4))
    assert owner.get(known.head.id) == known
    assert owner.knows(known.head.id, known.revision)
    assert not owner.knows(known.head.id, known.revision + 1)
    assert owner.get(task(9)) == stored(9, revision=3)
    owner.learn(stored(9, revision=5, due=2.0), 0.0)
    assert owner.get(task(9)) == stored(9, revision=5, due=2.0)
    assert owner.get(known.head.id) == known


@pytest.mark.rule("SK-24")
def test_new_tasks_of_a_function_share_their_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deep queue on etcd is kept in memory. The number of heads that are shared is bounded."""
    monkeypatch.setattr(owner_module, "MAX_TEMPLATES", 4)
    known = [stored(number, revision=number, priority=number % 6) for number in range(1, 61)]
    owner = make(*known)
    assert [owner.get(each.head.id) for each in known] == known
    packed = [each for each in owner._open._tasks.values() if isinstance(each, int)]
    assert (len(packed), len(owner._open._templates)) == (40, 4)
    assert len(offered(owner)) == 60


def test_what_is_being_claimed_is_not_offered_whatever_is_told_meanwhile() -> None:
    owner = make(stored(1), stored(2))
    owner.take(task(1))
    owner.learn(stored(1, revision=2), 0.0)
    assert offered(owner) == [2]
    owner.put_back(task(1), 0.0)
    assert offered(owner) == [1, 2]


def test_a_claim_that_was_written_runs_from_when_that_was_learnt() -> None:
    owner = make(stored(1))
    owner.take(task(1))
    mine = stored(1, Status.CLAIMED, revision=2, claim=held())
    owner.learn(mine, 3.0)
    owner.settled(mine, 4.0)
    assert owner.next_wakeup(4.0, 0.0) == 3.0 + TTL_S + BUFFER_S
    owner.take(task(1))
    owner.settled(replace(mine, state=replace(mine.state, status=Status.DEAD), revision=3), 5.0)
    assert len(owner) == 0
    assert owner.next_wakeup(5.0, 0.0) is None


def test_what_was_refused_must_be_read_unless_more_is_known_already() -> None:
    owner = make(stored(1), stored(2), stored(3))
    for number in (1, 2, 3):
        owner.take(task(number))
    owner.learn(stored(2, revision=2), 0.0)
    for number in (1, 2, 3):
        owner.conflicted(task(number), 0.0)
    assert owner.doubtful() == [task(1), task(3)]
    assert offered(owner) == [2]
    owner.learn(stored(1), 0.0)
    owner.forget(task(3))
    assert owner.doubtful() == []
    assert offered(owner) == [1, 2]
    assert len(owner) == 2


def test_the_next_wakeup_is_when_something_can_be_offered() -> None:
    owner = make(stored(1, due=100.0))
    assert owner.next_wakeup(7.0, 90.0) == 17.0
    assert owner.next_wakeup(7.0, 190.0) == 7.0
    owner.learn(stored(2), 0.0)
    assert owner.next_wakeup(7.0, 90.0) == 7.0
    candidates(owner, 1, 7.0, 90.0)
    assert owner.next_wakeup(7.0, 90.0) == 7.0
    owner.take(task(2))
    assert owner.next_wakeup(7.0, 90.0) == 17.0
    assert make().next_wakeup(0.0, 0.0) is None


def test_of_what_is_closed_a_bounded_number_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "MAX_CLOSED", 3)
    monkeypatch.setattr(dependencies, "MAX_COMPLETIONS", 3)
    owner = make(*(stored(number, Status.COMPLETED, revision=number + 1) for number in range(9)))
    assert len(owner._closed) == len(owner._blocked._complete) == 3
    owner.learn(stored(10, revision=10, after=(8, 1)), 0.0)
    assert owner.unknown_dependencies() == [task(1)]


@pytest.mark.rule("SK-12")
def test_garbage_is_bounded() -> None:
    ready, timers, waits = ReadyTasks(), Timers(), Dependencies()
    for step in range(10_000):
        ready.add(task(step), step % 3)
        timers.set(task(step), float(step))
        timers.set(task(0), float(-step))
        waits.add(task(step), [task(step + 1)])
        if step > 10:
            ready.drop(task(step - 10))
            timers.drop(task(step - 10))
            assert task(step - 10) not in timers
            waits.drop(task(step - 10))
    assert ready._entries < 100
    assert len(timers._heap) < 100
    assert timers.next() == timers[task(0)] == -9999.0
    assert len(waits._missing) == len(waits._waiting) == len(waits._unknown) < 100


@dataclass
class Known:
    """What the model knows of a task: the naive way."""

    newest: Stored
    over_at: float = 0.0
    is_taken: bool = False
    refused_at: int = -1
    history: list[Stored] = field(default_factory=list)


ASKS = ("claim", "claim", "renew", "update", "complete", "complete", "fail", "release", "cancel", "requeue")


class OwnerAsAList:
    """The owner beside a list that is searched: what is offered is the same at every step."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.owner = PartitionOwner(0, 5, buffer_s=BUFFER_S, clock=HERE)
        self.now = 1000.0
        self.wall = 0.0
        self.revision = 0
        self.known: dict[int, Known] = {}
        self.complete: set[int] = set()

    def _learn(self, news: Stored) -> None:
        self.owner.learn(news, self.now)
        number = int(news.head.id, 16)
        known = self.known.setdefault(number, Known(replace(news, revision=-1, state=TaskState())))
        if news.revision >= known.newest.revision and not known.is_taken:
            known.refused_at = -1
        if news.revision <= known.newest.revision:
            return
        before = known.newest.state
        claim = news.state.claim
        if news.state.status is Status.CLAIMED and claim is not None:
            is_same = before.status is Status.CLAIMED and before.claim is not None
            if not (is_same and before.claim and before.claim.term == claim.term):
                ends = [self.now + claim.term.ttl_s]
                if claim.term.clock == HERE:
                    ends.append(claim.term.ends_at_s)
                known.over_at = min(ends) + BUFFER_S
        known.newest = news
        known.history.append(news)
        if news.state.status is Status.COMPLETED:
            self.complete.add(number)

    def step(self) -> None:
        """Something happens."""
        random = self.random
        number = random.randint(0, 7)
        match random.choices(("enqueue", "change", "old", "time", "take", "answer"), (4, 10, 2, 2, 2, 3))[0]:
            case "enqueue":
                after = {random.randint(0, 7) for _ in range(random.choice((0, 0, 1, 2)))}
                self.enqueue(number, random.randint(-1, 1), after, random.randint(0, 20))
            case "change":
                clock = random.choice((HERE, ELSEWHERE))
                self.change(number, random.choice(ASKS), clock, random.randint(1, 5))
            case "old":
                self.old_news(number, random.randint(0, 5))
            case "time":
                self.time_passes(random.randint(0, 8))
            case "take":
                self.take(random.randint(1, 2))
            case _:
                self.answer(random.choice(("settled", "conflicted", "put back")))

    def enqueue(self, number: int, priority: int, after: set[int], due: int) -> None:
        if number not in self.known:
            self.revision += 1
            older = tuple(sorted(each for each in after if each < number))
            news = stored(
                number, revision=self.revision, priority=priority, after=older, due=max(0, due - 10)
            )
            self._learn(news)

    def change(self, number: int, ask: str, clock: str, ttl_s: int) -> None:
        known = self.known.get(number)
        if known is None:
            return
        self.revision += 1
        before = known.newest
        term = ClaimTerm(float(ttl_s), clock, self.now + ttl_s if clock == HERE else float(self.revision))
        claim = before.state.claim
        mine = rules.ClaimKey(-1, "") if claim is None else rules.ClaimKey(claim.number, claim.holder)
        if ask == "claim" and not set(before.head.after) <= {task(each) for each in self.complete}:
            return
        after: Any = {
            "claim": lambda: rules.claim(
                before.head, before.state, f"h{self.revision}", "w", term, over=True
            ),
            "renew": lambda: rules.renew(before.state, mine, term),
            "update": lambda: rules.update(before.state, mine, claim.updates if claim else 0, b"", None),
            "complete": lambda: rules.complete(before.state, mine, None),
            "fail": lambda: rules.fail(before.head, before.state, mine, "e", self.wall + 3),
            "release": lambda: rules.release(before.state, mine),
            "cancel": lambda: rules.cancel(before.state),
            "requeue": lambda: rules.requeue(before.state),
        }[ask]()
        if isinstance(after, TaskState):
            self._learn(replace(before, state=after, revision=self.revision))

    def old_news(self, number: int, which: int) -> None:
        known = self.known.get(number)
        if known is not None and which < len(known.history):
            self._learn(known.history[which])

    def time_passes(self, passes: int) -> None:
        self.now += passes
        self.wall += passes

    def ask_about_dependencies(self) -> None:
        for needed in self.owner.unknown_dependencies():
            is_complete = int(needed, 16) in self.complete
            self.owner.learn_dependency(needed, Status.COMPLETED if is_complete else None)

    def take(self, limit: int) -> None:
        for each, _ in candidates(self.owner, limit, self.now, self.wall):
            self.owner.take(each)
            self.known[int(each, 16)].is_taken = True

    def answer(self, outcome: str) -> None:
        taken = [each for each, known in self.known.items() if known.is_taken]
        if not taken:
            return
        number = self.random.choice(taken)
        known = self.known[number]
        known.is_taken = False
        before = known.newest
        if before.state.status not in OPEN:
            self.owner.conflicted(task(number), self.now)
        elif outcome == "settled":
            self.revision += 1
            term = ClaimTerm(2.0, ELSEWHERE, float(self.revision))
            after = rules.claim(before.head, before.state, f"h{self.revision}", "w", term, over=True)
            assert isinstance(after, TaskState)
            news = replace(before, state=after, revision=self.revision)
            self.owner.settled(news, self.now)
            self._learn(news)
        elif outcome == "conflicted":
            self.owner.conflicted(task(number), self.now)
            for each in self.owner.doubtful():
                self._learn(self.known[int(each, 16)].newest)
        else:
            self.owner.put_back(task(number), self.now)

    def _claimable(self) -> list[tuple[TaskId, bool]]:
        found = []
        for number, known in self.known.items():
            newest = known.newest
            state, after = newest.state, {int(each, 16) for each in newest.head.after}
            is_over = state.status is Status.CLAIMED and known.over_at <= self.now
            is_waiting = state.status is Status.WAITING and state.due <= self.wall and after <= self.complete
            if not known.is_taken and (is_over or is_waiting):
                found.append((-newest.head.priority, task(number), is_over))
        return [(each, is_over) for _, each, is_over in sorted(found)]

    def the_same_is_offered(self) -> None:
        self.ask_about_dependencies()
        self.owner.best(self.now, self.wall)
        self.ask_about_dependencies()
        expected = self._claimable()
        wakeup = self.owner.next_wakeup(self.now, self.wall)
        assert candidates(self.owner, 99, self.now, self.wall) == expected
        assert (wakeup == self.now) == bool(expected)
        assert len(self.owner) == sum(known.newest.state.status in OPEN for known in self.known.values())


@pytest.mark.rule("SK-5", "SK-8", "SK-11")
@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_the_same_is_offered_as_by_a_list_that_is_searched(seed: int) -> None:
    model = OwnerAsAList(seed)
    for _ in range(150):
        model.step()
        model.the_same_is_offered()


def pending_claims(
    owner: PartitionOwner, claimants: Sequence[Claimant], now: float = 0.0
) -> list[PendingClaim]:
    """The claim of the best task for each, as long as there are tasks."""
    made = []
    for claimant in claimants:
        best = owner.best(now, 0.0)
        made += [] if best is None else [pending_claim(owner, best[1], claimant)]
    return made


def limited(number: int, status: Status = Status.WAITING, *, most: int = 1, **fields: Any) -> Stored:
    found = stored(number, status, **fields)
    return replace(found, head=replace(found.head, limit_key="k", max_running=most))


def whole(*known: Stored, now: float = 0.0) -> PartitionOwner:
    owner = make(*known, now=now)
    owner.offer_limited()
    return owner


@pytest.mark.rule("SK-23")
def test_no_limited_task_is_offered_before_all_is_known() -> None:
    owner = make(limited(1), stored(2))
    assert offered(owner) == [2]
    owner.learn(limited(3, Status.CLAIMED, claim=held()), 0.0)
    owner.offer_limited()
    assert offered(owner) == [2]
    owner.learn(limited(3, Status.COMPLETED, revision=2), 0.0)
    assert offered(owner) == [1, 2]


@pytest.mark.rule("SK-5", "SK-23")
def test_of_a_limit_the_best_are_offered_as_far_as_there_is_room() -> None:
    owner = whole(
        *(limited(number, most=2) for number in (1, 2, 3)), limited(4, most=2, priority=5), stored(9)
    )
    assert offered(owner) == [4, 1, 9]
    owner.take(task(4))
    owner.settled(limited(4, Status.CLAIMED, most=2, revision=2, claim=held()), 0.0)
    assert offered(owner) == [1, 9]
    owner.learn(limited(5, most=2, priority=7), 0.0)
    assert offered(owner) == [5, 9]
    owner.learn(limited(5, Status.CANCELLED, most=2, revision=3), 0.0)
    assert offered(owner) == [1, 9]
    assert owner.completed(task(4), 0, 4), "there is something to claim now"
    assert offered(owner) == [1, 2, 9]
    assert owner.next_wakeup(0.0, 0.0) == 0.0


@pytest.mark.rule("SK-23")
def test_a_claim_whose_outcome_is_unknown_takes_room() -> None:
    owner = whole(limited(1), limited(2))
    owner.take(task(1))
    assert offered(owner) == []
    owner.conflicted(task(1), 0.0)
    assert (offered(owner), owner.doubtful()) == ([], [task(1)])
    owner.learn(limited(1, revision=1), 0.0)
    assert offered(owner) == [1]
    owner.take(task(1))
    owner.put_back(task(1), 0.0)
    assert offered(owner) == [1]
    owner.forget(task(1))
    assert offered(owner) == [2]


@pytest.mark.rule("SK-19", "SK-23")
def test_a_task_whose_claim_can_not_be_written_leaves_its_place_to_others() -> None:
    owner = whole(limited(1), limited(2))
    claiming = PartitionClaims(owner)
    (ask,) = pending_claims(owner, CLAIMANTS)
    ask.fail(RequestTooLarge("too large"))
    with pytest.raises(RequestTooLarge):
        claiming.settled(ask, 3.0)
    assert (offered(owner, now=3.0), owner.doubtful()) == ([2], [])
    owner.take(task(2))
    assert owner.next_wakeup(3.0, 0.0) == 3.0 + ASIDE_S, "it is offered again then"
    owner.settled(limited(2, Status.COMPLETED, revision=2), 4.0)
    assert offered(owner, now=3.0 + ASIDE_S) == [1]


@pytest.mark.rule("SK-6", "SK-23")
def test_a_claim_that_failed_for_an_unknown_reason_takes_room_until_it_is_read() -> None:
    owner = whole(limited(1), limited(2))
    (ask,) = pending_claims(owner, CLAIMANTS)
    ask.fail(KeyError("a bug"))
    with pytest.raises(KeyError):
        PartitionClaims(owner).settled(ask, 3.0)
    assert (offered(owner, now=3.0), owner.doubtful()) == ([], [task(1)])


@pytest.mark.rule("SK-8", "SK-23")
def test_a_claim_that_is_over_takes_room_and_is_offered_itself() -> None:
    owner = whole(limited(1, Status.CLAIMED, claim=held()), limited(2, priority=5))
    assert offered(owner) == []
    assert offered(owner, now=TTL_S + BUFFER_S) == [1]
    owner.learn(limited(1, revision=2, due=50.0, claim=held()), 20.0)
    assert offered(owner, now=20.0) == [2]
    assert offered(owner, now=20.0, wall=50.0) == [2]


@pytest.mark.rule("SK-23")
def test_what_takes_room_is_read_once_changes_were_missed() -> None:
    owner = whole(limited(1, Status.CLAIMED, claim=held()), limited(2))
    owner.doubt_dependencies()
    assert owner.doubtful() == [task(1)]
    assert offered(owner) == []
    owner.learn(limited(1, Status.COMPLETED, revision=2), 0.0)
    assert (offered(owner), owner.doubtful()) == ([2], [])


@pytest.mark.rule("SK-23", "SK-24")
def test_what_a_limit_holds_back_costs_a_claim_nothing() -> None:
    """By counting: of 1,000 tasks that are held back none is among those that are looked at."""
    owner = whole(limited(0, Status.CLAIMED, claim=held()), *(limited(each) for each in range(1, 1001)))
    assert not owner._ready.has(None)
    assert owner.next_wakeup(0.0, 0.0) == TTL_S + BUFFER_S


def paced(number: int, status: Status = Status.WAITING, *, rate: str = "1/m", **fields: Any) -> Stored:
    found = stored(number, status, **fields)
    return replace(found, head=replace(found.head, limit_key="k", rate_limit=rate))


def started(owner: PartitionOwner, now: float, *, revision: int | None = None) -> list[int]:
    """Claim and complete all that is offered, one after the other; the claims are written at ``revision``."""
    numbers: list[int] = []
    while (best := owner.best(now, 0.0)) is not None:
        ask = pending_claim(owner, best[1], CLAIMANTS[0])
        assert owner.best(now, 0.0) is None, "one start of a limit is written at a time"
        ask.write()
        ask.answered(WriteConflict() if revision is None else Applied(revision))
        if revision is None:
            ask.found(None)
        PartitionClaims(owner).settled(ask, now)
        owner.completed(best[1], 0, 99)
        numbers.append(int(best[1], 16))
    return numbers


@pytest.mark.rule("SK-5", "SK-23")
def test_of_a_rate_limit_as_many_are_offered_as_it_allows() -> None:
    owner = whole(*(paced(number, rate="1/m burst 2") for number in (1, 2, 3)), paced(4, priority=5))
    assert (offered(owner), owner.unread_rates(9)) == ([], [("f", "k")])
    owner.learn_rate(("f", "k"), None, 100.0)
    assert started(owner, 100.0, revision=7) == [4, 1]
    assert owner.next_wakeup(100.0, 0.0) == 160.0
    assert started(owner, 159.9, revision=8) == []
    assert started(owner, 160.0, revision=8) == [2]


@pytest.mark.rule("SK-18", "SK-23")
@pytest.mark.parametrize(("clock", "room_at"), [(HERE, 130.0), (ELSEWHERE, 160.0), ("", 160.0)])
def test_a_new_owner_counts_the_starts_before(clock: str, room_at: float) -> None:
    owner = whole(paced(1))
    assert offered(owner, now=100.0) == []
    owner.learn_rate(("f", "k"), RateMark(60.0, clock, 70.0, 0.0, 9), 100.0)
    assert offered(owner, now=100.0) == []
    assert owner.next_wakeup(100.0, 0.0) == room_at
    assert offered(owner, now=room_at) == [1]
    write = pending_claims(owner, CLAIMANTS[:1], room_at)[0].write()
    assert write is not None
    assert write.start == RateStart(("f", "k"), 9, RateMark(60.0, HERE, room_at, 60.0))


@pytest.mark.rule("SK-23")
def test_after_a_start_whose_outcome_is_unknown_the_mark_is_read() -> None:
    owner = whole(paced(1), paced(2))
    owner.best(0.0, 0.0)
    owner.learn_rate(("f", "k"), None, 0.0)
    assert started(owner, 0.0) == [1]
    assert (offered(owner, now=500.0), owner.unread_rates(9)) == ([], [("f", "k")])
    owner.learn_rate(("f", "k"), RateMark(60.0, HERE, 0.0, 0.0, 9), 500.0)
    assert offered(owner, now=500.0) == [2]


@pytest.mark.rule("SK-8", "SK-15", "SK-23")
def test_what_is_over_waits_for_its_rate_and_what_becomes_dead_is_no_start() -> None:
    owner = whole(paced(1, Status.CLAIMED, claim=held(), retries=0), paced(2))
    owner.best(0.0, 0.0)
    owner.learn_rate(("f", "k"), RateMark(60.0, HERE, 0.0, 0.0, 9), 0.0)
    assert offered(owner, now=59.0) == []
    assert offered(owner, now=60.0, limit=1) == [1]
    (ask,) = pending_claims(owner, CLAIMANTS[:1], 60.0)
    write = ask.write()
    assert write is not None
    assert (write.state.status, write.start) == (Status.DEAD, None)
    ask.answered(Applied(10))
    PartitionClaims(owner).settled(ask, 60.0)
    assert offered(owner, now=60.0) == [2]


CLAIMANTS = [
    Claimant(f"holder-{number}", "w", ClaimTerm(TTL_S, ELSEWHERE, float(number))) for number in range(3)
]


@pytest.mark.rule("SK-6", "SK-13")
def test_who_asks_is_given_the_best_task_in_the_name_of_the_epoch() -> None:
    owner = make(stored(1), stored(2, priority=1))
    claiming = PartitionClaims(owner)
    asks = pending_claims(owner, CLAIMANTS)
    writes = [ask.write() for ask in asks]
    assert [(each.id, each.epoch, each.revision) for each in writes if each] == [
        (task(2), OwnerEpoch(0, 5), 1),
        (task(1), OwnerEpoch(0, 5), 1),
    ]
    assert pending_claims(owner, CLAIMANTS) == []
    asks[0].answered(Applied(9))
    claimed = claiming.settled(asks[0], 3.0)
    assert claimed is not None
    assert (claimed.revision, claimed.state.claim) == (9, ClaimState(0, "holder-0", "w", CLAIMANTS[0].term))
    assert owner.next_wakeup(3.0, 0.0) == 3.0 + TTL_S + BUFFER_S


@pytest.mark.rule("SK-15")
def test_a_task_whose_last_try_was_cut_off_is_buried() -> None:
    owner = make(stored(1, Status.CLAIMED, claim=held(), retries=0), stored(2))
    claiming = PartitionClaims(owner)
    asks = pending_claims(owner, CLAIMANTS[:2], TTL_S + BUFFER_S)
    assert [(ask.task, ask.makes_dead) for ask in asks] == [(task(1), True), (task(2), False)]
    for ask in asks:
        ask.write()
        ask.answered(Applied(9))
    assert [claiming.settled(ask, 20.0) is not None for ask in asks] == [False, True]
    assert len(owner) == 1


def _refused(found: Stored | None) -> tuple[PartitionOwner, PartitionClaims, Stored | None]:
    owner = make(stored(1))
    claiming = PartitionClaims(owner)
    (ask,) = pending_claims(owner, CLAIMANTS[:1])
    while not ask.settled and ask.write() is not None:
        ask.answered(WriteConflict())
        ask.found(found)
    return owner, claiming, claiming.settled(ask, 5.0)


@pytest.mark.rule("SK-6", "SK-8")
def test_a_claim_takes_only_the_state_that_was_offered() -> None:
    """The task has changed since: it may not be due any more, and a claim of it may not be over."""
    later = stored(1, revision=2, due=77.0)
    owner, _, claimed = _refused(later)
    assert claimed is None
    assert owner.get(task(1)) == later
    assert offered(owner) == []


@pytest.mark.rule("SK-6")
def test_a_claim_of_the_same_number_by_another_is_not_mine_and_my_own_is() -> None:
    other = stored(1, Status.CLAIMED, revision=2, claim=held())
    assert _refused(other)[2] is None
    mine = stored(1, Status.CLAIMED, revision=2, claim=replace(held(), holder="holder-0"))
    assert _refused(mine)[2] == mine
    ended = replace(mine, state=replace(mine.state, status=Status.WAITING))
    assert _refused(ended)[2] is None


@pytest.mark.rule("SK-13", "SK-14")
def test_who_is_deposed_knows_it_and_what_is_gone_is_forgotten() -> None:
    owner, claiming, claimed = _refused(stored(1))
    assert claimed is None
    assert claiming.deposed
    owner, claiming, claimed = _refused(None)
    assert claimed is None
    assert not claiming.deposed
    assert len(owner) == 0


def test_what_became_of_nobody_knows_is_read_before_it_is_offered_again() -> None:
    owner = make(stored(1))
    claiming = PartitionClaims(owner)
    (ask,) = pending_claims(owner, CLAIMANTS[:1])
    ask.future.set_exception(TimeoutError("the engine is away"))
    with pytest.raises(TimeoutError):
        claiming.settled(ask, 5.0)
    assert owner.doubtful() == [task(1)]
    assert offered(owner) == []


def test_an_ask_that_is_refused_for_good_says_why() -> None:
    ask = PendingMove(stored(1, Status.COMPLETED), lambda found: rules.cancel(found.state))
    assert ask.write() is None
    assert ask.future.result() == Refused(Reason.FINISHED)


def _collectable(*known: Stored, keep: frozenset[int] = frozenset()) -> list[list[int]]:
    components = Components()
    for each in known:
        components.add(each, keep=int(each.head.id, 16) in keep)
    return sorted(sorted(int(each, 16) for each in found) for found in components.collectable())


@pytest.mark.rule("SK-14")
def test_only_components_that_are_complete_altogether_are_collected() -> None:
    done = Status.COMPLETED
    assert _collectable(stored(1, done), stored(2), stored(3, Status.DEAD), keep=frozenset({3})) == [[1]]
    assert _collectable(stored(1, done), stored(2, Status.CLAIMED), stored(3, Status.DEAD)) == [[1], [3]]
    assert _collectable(stored(1, done), stored(2, done, after=(1,)), stored(3, after=(2,))) == []
    chain = (stored(1, done), stored(3, done, after=(2,)), stored(2, done, after=(1,)), stored(4, done))
    assert _collectable(*chain) == [[1, 2, 3], [4]]
    assert _collectable(*chain, keep=frozenset({1})) == [[4]]
    fan = (stored(2, done, after=(1,)), stored(3, after=(1,)), stored(1, done))
    assert _collectable(*fan) == []
    assert _collectable(stored(5, done, after=(4,), revision=7, partition=2)) == [[5]]
    components = Components()
    components.add(stored(5, done, revision=7, partition=2))
    assert list(components.collectable()) == [{task(5): (2, 7)}]


@pytest.mark.rule("SK-5", "SK-11", "SK-13")
def test_that_a_task_is_complete_is_all_that_must_be_told_of_it() -> None:
    owner = make(stored(1, revision=5), stored(2, after=(1,)), stored(3, after=(9,)))
    assert not owner.completed(task(1), 0, 5), "old news"
    assert offered(owner) == [1]
    assert owner.completed(task(1), 0, 6), "the second one may go on"
    assert owner.completed(task(9), 1, 2), "one of another partition"
    assert not owner.completed(task(9), 1, 2)
    assert offered(owner) == [2, 3]
    owner.learn(stored(1, revision=5), 0.0)
    assert offered(owner) == [2, 3], "what was complete does not come back"
    assert not owner.is_taken(task(2))
    owner.take(task(2))
    assert owner.is_taken(task(2))
