"""What may follow what: every row of the table of rules, from every state that can be reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebalanser.core.tasks import rules
from rebalanser.core.tasks.model import AfterFailure, ClaimState, ClaimTerm, Head, Status, TaskState
from rebalanser.core.tasks.rules import ClaimKey, Decision, FailedDependency, Reason, Refused

HEAD = Head("0" * 40, "q", "f", retries=2)
TERM = ClaimTerm(10.0, "boot", 110.0)
LATER = ClaimTerm(10.0, "boot", 111.0)
NOW = ClaimKey(1, "h1")
"""Who holds the claim of the states below."""
BEFORE = ClaimKey(0, "h0")
NAMESAKE = ClaimKey(1, "h2")
"""Another holder of a claim of the same number."""
STRANGERS = (BEFORE, NAMESAKE, ClaimKey(2, "h1"))


def state(status: Status, **changes: object) -> TaskState:
    """A state after claim 1, of which two updates were written."""
    claim = ClaimState(1, "h1", "worker", TERM, updates=2)
    return replace(TaskState(status=status, claim=claim, failures=1, error="it failed"), **changes)  # type: ignore[arg-type]


WAITING, CLAIMED, COMPLETED, DEAD, CANCELLED = (state(status) for status in Status)
FRESH = TaskState()


def claimed(
    before: TaskState,
    holder: str = "h9",
    *,
    over: bool = False,
    head: Head = HEAD,
    failed: FailedDependency | None = None,
) -> Decision:
    return rules.claim(head, before, holder, "w", LATER, over=over, failed=failed)


@pytest.mark.rule("SK-6")
def test_the_first_claim_has_number_0_and_the_next_one_more() -> None:
    first = claimed(FRESH)
    assert first == TaskState(Status.CLAIMED, ClaimState(0, "h9", "w", LATER))
    assert claimed(WAITING) == replace(WAITING, status=Status.CLAIMED, claim=ClaimState(2, "h9", "w", LATER))


@pytest.mark.rule("SK-6", "SK-8")
def test_a_claim_is_followed_by_another_only_once_it_is_over() -> None:
    assert claimed(CLAIMED) == Refused(Reason.HELD)
    taken = claimed(CLAIMED, over=True)
    assert isinstance(taken, TaskState)
    assert taken.claim == ClaimState(2, "h9", "w", LATER)
    assert taken.failures == CLAIMED.failures + 1
    assert taken.error == "claim 1 of worker ended without a word"


@pytest.mark.rule("SK-5")
def test_a_task_that_fails_with_a_dependency_is_dead_and_no_try_of_it_is_counted() -> None:
    failed = FailedDependency("1" * 40, Status.CANCELLED)
    told = f"it depends on {failed.id}, which is cancelled"
    assert claimed(FRESH, failed=failed) == TaskState(Status.DEAD, error=told)
    assert claimed(WAITING, failed=failed) == claimed(WAITING), "it was claimed before, so it may go on"
    assert claimed(DEAD, failed=failed) == Refused(Reason.NOT_OPEN)


@pytest.mark.rule("SK-5")
def test_what_settles_a_dependency_and_what_fails_with_it() -> None:
    wait, run, fail = AfterFailure
    settled = {
        (each, choice) for each in (None, *Status) for choice in AfterFailure if rules.settles(each, choice)
    }
    undone = (Status.DEAD, Status.CANCELLED)
    complete = {(Status.COMPLETED, choice) for choice in (wait, run, fail)}
    assert settled == complete | {(each, run) for each in undone}
    failing = {
        (each, choice) for each in (None, *Status) for choice in AfterFailure if rules.fails(each, choice)
    }
    assert failing == {(each, fail) for each in undone}


@pytest.mark.rule("SK-15")
def test_a_task_whose_last_try_was_cut_off_is_dead_and_not_claimed() -> None:
    last = replace(CLAIMED, failures=HEAD.retries)
    dead = claimed(last, over=True)
    assert isinstance(dead, TaskState)
    assert (dead.status, dead.failures) == (Status.DEAD, HEAD.retries + 1)
    assert dead.claim == last.claim
    assert claimed(last) == Refused(Reason.HELD)


@pytest.mark.rule("SK-6")
@pytest.mark.parametrize("over", [False, True])
def test_claiming_again_by_the_same_holder_changes_nothing(over: bool) -> None:
    assert claimed(CLAIMED, "h1", over=over) is CLAIMED
    assert claimed(WAITING, "h1", over=over) == Refused(Reason.ENDED)
    assert claimed(COMPLETED, "h1", over=over) == Refused(Reason.FINISHED)
    assert claimed(DEAD, "h1", over=over) == Refused(Reason.NOT_OPEN)


@pytest.mark.rule("SK-10")
@pytest.mark.parametrize("over", [False, True])
def test_what_is_closed_is_not_claimed(over: bool) -> None:
    assert claimed(COMPLETED, over=over) == Refused(Reason.FINISHED)
    assert claimed(DEAD, over=over) == Refused(Reason.NOT_OPEN)
    assert claimed(CANCELLED, over=over) == Refused(Reason.NOT_OPEN)


HOLDERS_RULES: dict[str, Callable[[TaskState, ClaimKey], Decision]] = {
    "renew": lambda before, held: rules.renew(before, held, LATER),
    "update": lambda before, held: rules.update(before, held, 2, b"x", None),
    "complete": lambda before, held: rules.complete(before, held, b"result"),
    "fail": lambda before, held: rules.fail(HEAD, before, held, "again", 5.0),
    "release": rules.release,
}


@pytest.mark.rule("SK-7", "SK-9", "SK-10")
@pytest.mark.parametrize("rule", HOLDERS_RULES)
def test_only_the_holder_of_the_current_claim_is_heard(rule: str) -> None:
    ask = HOLDERS_RULES[rule]
    assert isinstance(ask(CLAIMED, NOW), TaskState)
    for stranger in STRANGERS:
        for before in (CLAIMED, WAITING, COMPLETED, DEAD, CANCELLED):
            assert ask(before, stranger) == Refused(Reason.SUPERSEDED)
    for before in (WAITING, DEAD, CANCELLED):
        assert ask(before, NOW) == Refused(Reason.ENDED)
    assert ask(FRESH, NOW) == Refused(Reason.SUPERSEDED)
    if rule != "complete":
        assert ask(COMPLETED, NOW) == Refused(Reason.FINISHED)


@pytest.mark.rule("SK-7")
def test_renewing_is_idempotent_and_never_shortens() -> None:
    renewed = rules.renew(CLAIMED, NOW, LATER)
    assert isinstance(renewed, TaskState)
    assert renewed.claim is not None
    assert renewed == replace(CLAIMED, claim=replace(CLAIMED.claim, term=LATER))  # type: ignore[type-var]
    assert rules.renew(renewed, NOW, LATER) is renewed
    assert rules.renew(renewed, NOW, TERM) is renewed, "it came late"
    elsewhere = ClaimTerm(5.0, "another boot", 1.0)
    moved = rules.renew(renewed, NOW, elsewhere)
    assert isinstance(moved, TaskState)
    assert moved.claim is not None
    assert moved.claim.term == elsewhere, "clocks of two boots are not compared"


@pytest.mark.rule("SK-9")
def test_updates_are_contiguous_and_may_be_sent_again() -> None:
    third = rules.update(CLAIMED, NOW, 2, b"c", None)
    assert isinstance(third, TaskState)
    assert third.claim is not None
    assert third.claim.updates == 3
    assert rules.update(third, NOW, 2, b"c", b"c") is third
    assert rules.update(third, NOW, 0, b"a", b"a") is third
    assert rules.update(third, NOW, 2, b"other", b"c") == Refused(Reason.OTHER_CONTENT)
    assert rules.update(third, NOW, 4, b"e", None) == Refused(Reason.GAP)
    assert rules.update(third, NOW, -1, b"e", None) == Refused(Reason.GAP)


@pytest.mark.rule("SK-10")
def test_completing_is_idempotent_and_the_first_result_stays() -> None:
    done = rules.complete(CLAIMED, NOW, b"first")
    assert done == replace(CLAIMED, status=Status.COMPLETED, result=b"first", error="")
    assert isinstance(done, TaskState)
    assert rules.complete(done, NOW, b"second") is done


@pytest.mark.rule("SK-15")
def test_a_failed_try_waits_until_it_is_due_or_is_the_last() -> None:
    again = rules.fail(HEAD, CLAIMED, NOW, "why", 50.0)
    assert again == replace(CLAIMED, status=Status.WAITING, failures=2, error="why", due=50.0)
    dead = replace(CLAIMED, status=Status.DEAD, failures=2, error="why")
    assert rules.fail(HEAD, CLAIMED, NOW, "why", None) == dead
    last = replace(CLAIMED, failures=2)
    assert rules.fail(HEAD, last, NOW, "why", 50.0) == replace(dead, failures=3)
    assert isinstance(again, TaskState)
    assert rules.fail(HEAD, again, NOW, "why", 50.0) == Refused(Reason.ENDED), "a failure counts once"


def test_a_claim_that_is_given_back_counts_as_no_try() -> None:
    assert rules.release(CLAIMED, NOW) == replace(CLAIMED, status=Status.WAITING)


@pytest.mark.rule("SK-15")
def test_cancelling_ends_what_is_not_complete() -> None:
    for before in (WAITING, CLAIMED, DEAD):
        assert rules.cancel(before) == replace(before, status=Status.CANCELLED)
    assert rules.cancel(CANCELLED) is CANCELLED
    assert rules.cancel(COMPLETED) == Refused(Reason.FINISHED)


@pytest.mark.rule("SK-6", "SK-15")
def test_requeueing_gives_all_tries_and_keeps_the_number() -> None:
    for before in (DEAD, CANCELLED):
        again = rules.requeue(before)
        assert again == replace(before, status=Status.WAITING, failures=0, due=0.0)
        assert isinstance(again, TaskState)
        taken = claimed(again)
        assert isinstance(taken, TaskState)
        assert taken.claim is not None
        assert taken.claim.number == 2
    for before in (WAITING, CLAIMED):
        assert rules.requeue(before) == Refused(Reason.NOT_CLOSED)
    assert rules.requeue(COMPLETED) == Refused(Reason.FINISHED)


Asked = Callable[[TaskState, ClaimKey, int], Decision]
ASKS: dict[str, Asked] = {
    "claim": lambda before, held, n: rules.claim(HEAD, before, f"h{n}", "w", TERM, over=False),
    "claim over": lambda before, held, n: rules.claim(HEAD, before, f"h{n}", "w", TERM, over=True),
    "renew": lambda before, held, n: rules.renew(before, held, ClaimTerm(10.0, "boot", float(n))),
    "update": lambda before, held, n: rules.update(before, held, n % 4, b"x", b"x"),
    "complete": lambda before, held, n: rules.complete(before, held, b"r"),
    "fail": lambda before, held, n: rules.fail(HEAD, before, held, "e", float(n)),
    "fail for good": lambda before, held, n: rules.fail(HEAD, before, held, "e", None),
    "release": lambda before, held, n: rules.release(before, held),
    "cancel": lambda before, held, n: rules.cancel(before),
    "requeue": lambda before, held, n: rules.requeue(before),
}
FOLLOWS = {
    "claim": {(Status.WAITING, Status.CLAIMED), (Status.CLAIMED, Status.CLAIMED)},
    "claim over": {
        (Status.WAITING, Status.CLAIMED),
        (Status.CLAIMED, Status.CLAIMED),
        (Status.CLAIMED, Status.DEAD),
    },
    "renew": {(Status.CLAIMED, Status.CLAIMED)},
    "update": {(Status.CLAIMED, Status.CLAIMED)},
    "complete": {(Status.CLAIMED, Status.COMPLETED), (Status.COMPLETED, Status.COMPLETED)},
    "fail": {(Status.CLAIMED, Status.WAITING), (Status.CLAIMED, Status.DEAD)},
    "fail for good": {(Status.CLAIMED, Status.DEAD)},
    "release": {(Status.CLAIMED, Status.WAITING)},
    "cancel": {
        (before, Status.CANCELLED)
        for before in (Status.WAITING, Status.CLAIMED, Status.DEAD, Status.CANCELLED)
    },
    "requeue": {(Status.DEAD, Status.WAITING), (Status.CANCELLED, Status.WAITING)},
}
"""The table of the rules' module, and what changes nothing."""


def _histories(length: int) -> set[TaskState]:
    """Every state that is reached by so many asks of two holders and operators."""
    reached = {FRESH}
    frontier = {FRESH}
    for _ in range(length):
        frontier = {
            after
            for before in frontier
            for ask in ASKS.values()
            for held in (ClaimKey(0, "h0"), ClaimKey(1, "h1"), ClaimKey(0, "h1"), ClaimKey(2, "h0"))
            for number in (0, 1)
            if isinstance(after := ask(before, held, number), TaskState)
        } - reached
        reached |= frontier
    return reached


@pytest.mark.rule("SK-6", "SK-7", "SK-9", "SK-10")
def test_from_every_state_that_can_be_reached_only_the_table_is_followed() -> None:
    states = _histories(7)
    assert {each.status for each in states} == set(Status)
    helds = [ClaimKey(number, holder) for number in range(3) for holder in ("h0", "h1", "h2")]
    for before in states:
        for name, ask in ASKS.items():
            for held in helds:
                after = ask(before, held, 2)
                if isinstance(after, TaskState):
                    assert (before.status, after.status) in FOLLOWS[name], (name, before)
                    _keeps_what_must_stay(before, after)


def _keeps_what_must_stay(before: TaskState, after: TaskState) -> None:
    if before.status is Status.COMPLETED:
        assert after == before
    if before.claim is not None:
        assert after.claim is not None, "the number of a claim is never forgotten"
        is_same = (after.claim.number, after.claim.holder) == (before.claim.number, before.claim.holder)
        assert is_same or after.claim.number == before.claim.number + 1
        if is_same:
            assert after.claim.updates - before.claim.updates in (0, 1)
        else:
            assert after.claim.updates == 0
    elif after.claim is not None:
        assert after.claim.number == 0


@given(st.lists(st.tuples(st.sampled_from(sorted(ASKS)), st.integers(0, 5), st.integers(0, 6)), max_size=60))
@pytest.mark.rule("SK-6", "SK-10")
def test_claims_are_numbered_without_reuse_whoever_asks_for_what(steps: list[tuple[str, int, int]]) -> None:
    current = FRESH
    holders: list[str] = []
    for step, (name, number, holder) in enumerate(steps):
        unique = step if name.startswith("claim") else holder
        after = ASKS[name](current, ClaimKey(number, f"h{holder}"), unique)
        if isinstance(after, Refused):
            continue
        _keeps_what_must_stay(current, after)
        if after.claim is not None and after.claim != current.claim:
            assert after.status is Status.CLAIMED
            if after.claim.number == len(holders):
                holders.append(after.claim.holder)
        current = after
        if current.claim is not None:
            assert current.claim.holder == holders[current.claim.number]
            assert current.claim.number == len(holders) - 1
        assert current.failures <= HEAD.retries + 1
