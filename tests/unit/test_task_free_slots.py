"""Free slots: which one an owner claims for, and which ones a worker publishes and withdraws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rebalanser.core.tasks.claims import PartitionClaims, PendingClaim, claimant_of, keeps_slot
from rebalanser.core.tasks.model import ClaimState, ClaimTerm, Head, Status, Stored, TaskState
from rebalanser.core.tasks.owner import PartitionOwner
from rebalanser.core.tasks.rules import Reason, Refused
from rebalanser.core.tasks.slots import (
    AHEAD_FOR_S,
    FRESH_RATIO,
    MAX_OFFERED,
    MAX_USED_SLOTS,
    SETTLE_S,
    Arrival,
    FreeSlots,
    NewSlots,
    Offered,
    OwnSlots,
    SlotPlan,
    WorkerRoom,
    is_fresh,
)
from rebalanser.core.tasks.store import (
    Applied,
    FreeSlot,
    GoneSlot,
    Names,
    OwnerEpoch,
    SlotGone,
    UsedSlot,
    WriteConflict,
)

HERE, THERE = "process-here", "process-there"
SEND, SWEEP, BOTH = frozenset({"send"}), frozenset({"sweep"}), frozenset({"send", "sweep"})
TTL_S = 10.0
NOW = 100.0
"""Later than all that a test does."""
TASK = "0" * 39 + "1"


def slot(holder: str, *, process: str = THERE, names: Names = SEND) -> FreeSlot:
    return FreeSlot(holder, process, "label", names, TTL_S, 7, revision=3)


def used(holder: str, process: str = HERE) -> UsedSlot:
    return UsedSlot(holder, process, TASK)


def taken(slots: FreeSlots, names: frozenset[str] = SEND) -> list[str]:
    found = []
    while (each := slots.take(names)) is not None:
        found.append(each.holder)
    return found


# -- an owner's view


@pytest.mark.rule("SK-20")
def test_a_slot_is_tried_by_one_claim_at_a_time() -> None:
    slots = FreeSlots(HERE)
    assert slots.learn(slot("a"))
    assert not slots.learn(slot("a")), "a change told twice"
    assert slots.take(SEND) == slot("a")
    assert slots.take(SEND) is None
    assert not slots.learn(slot("a")), "told again while it is tried"
    assert slots.groups() == []
    slots.put_back(slot("a"))
    assert taken(slots) == ["a"]


@pytest.mark.rule("SK-20")
@pytest.mark.parametrize("news", [used("a", THERE), GoneSlot("a", THERE)])
def test_a_slot_that_is_used_or_gone_is_not_tried(news: Any) -> None:
    slots = FreeSlots(HERE)
    slots.learn(slot("a"))
    slots.learn(news)
    assert len(slots) == 0
    assert taken(slots) == []
    slots.learn(slot("b"))
    tried = slots.take(SEND)
    assert tried is not None
    slots.learn(replace(news, holder="b"))
    slots.put_back(tried)
    assert taken(slots) == [], "it went while it was tried"
    slots.learn(slot("c"))
    tried = slots.take(SEND)
    assert tried is not None
    slots.drop(tried)
    slots.put_back(tried)
    assert taken(slots) == []


@pytest.mark.rule("SK-20")
def test_own_slots_are_for_others() -> None:
    slots = FreeSlots(HERE)
    assert not slots.learn(slot("a", process=HERE))
    assert taken(slots) == []


@pytest.mark.rule("SK-20")
def test_a_slot_takes_the_tasks_of_its_functions() -> None:
    slots = FreeSlots(HERE)
    slots.learn(slot("a"))
    slots.learn(slot("b", names=BOTH))
    assert set(slots.groups()) == {SEND, BOTH}
    assert taken(slots, BOTH) == ["b"]
    assert slots.groups() == [SEND]
    slots.replace([slot("c", names=BOTH), used("a", THERE)], 9)
    assert slots.groups() == [BOTH], "what was missed is made up for"
    slots.learn(replace(slot("d"), revision=10))
    slots.replace([], 9)
    assert taken(slots) == ["d"], "it was published after what is read was sent"


@pytest.mark.rule("SK-20")
def test_two_owners_try_different_slots_first() -> None:
    holders = [f"holder-{number}" for number in range(20)]
    orders = []
    for process in (HERE, THERE):
        slots = FreeSlots(process)
        for holder in holders:
            slots.learn(slot(holder, process="a third one"))
        orders.append(taken(slots))
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(holders)
    assert orders[0][:5] != orders[1][:5]


@pytest.mark.rule("SK-20")
def test_slots_ahead_are_for_when_no_thread_is_idle() -> None:
    slots = FreeSlots(HERE)
    for number in range(10):
        slots.learn(replace(slot(f"ahead-{number}"), ahead=True))
    slots.learn(slot("idle"))
    assert taken(slots)[0] == "idle"


# -- the claim for a slot


def asked() -> tuple[PartitionClaims, PendingClaim]:
    owner = PartitionOwner(0, 5, buffer_s=1.0, clock="boot-here")
    owner.learn(Stored(Head(TASK, "q", "send"), TaskState(), 1, 0), 0.0)
    stored, over = owner.take(TASK)
    ask = PendingClaim(
        stored, claimant_of(slot("a"), "boot-here", 2.0), OwnerEpoch(0, 5), over=over, slot=slot("a")
    )
    return PartitionClaims(owner), ask


@pytest.mark.rule("SK-6", "SK-13", "SK-20")
def test_a_claim_for_a_slot_is_the_slots_in_the_name_of_the_epoch() -> None:
    claiming, ask = asked()
    write = ask.write()
    assert write is not None
    assert (write.epoch, write.slot, write.revision) == (OwnerEpoch(0, 5), slot("a"), 1)
    assert write.state.claim == ClaimState(0, "a", "label", ClaimTerm(TTL_S, "boot-here", 2.0 + TTL_S))
    ask.answered(Applied(9))
    assert claiming.settled(ask, 3.0) is not None
    assert not keeps_slot(ask)


@pytest.mark.rule("SK-20")
def test_a_task_whose_slot_is_gone_is_offered_again_at_once() -> None:
    claiming, ask = asked()
    ask.write()
    ask.answered(SlotGone())
    ask.found(ask.last_read)
    assert ask.future.result() == Refused(Reason.NO_SLOT)
    assert claiming.settled(ask, 3.0) is None
    assert not claiming.deposed
    assert not keeps_slot(ask)
    assert claiming.owner.best(3.0, 0.0) is not None


@pytest.mark.rule("SK-6", "SK-20")
def test_a_claim_whose_answer_was_lost_is_found_by_the_slots_holder() -> None:
    """The slot is gone, as this very claim has used it."""
    claiming, ask = asked()
    write = ask.write()
    assert write is not None
    ask.answered(SlotGone())
    ask.found(replace(ask.last_read, state=write.state, revision=2))
    assert ask.write() is None
    claimed = claiming.settled(ask, 3.0)
    assert claimed is not None
    assert claimed.revision == 2
    assert not keeps_slot(ask)


@pytest.mark.rule("SK-13", "SK-20")
def test_an_owner_that_was_followed_by_another_claims_for_no_slot() -> None:
    claiming, ask = asked()
    while not ask.settled and ask.write() is not None:
        ask.answered(WriteConflict())
        ask.found(ask.last_read)
    assert claiming.settled(ask, 3.0) is None
    assert claiming.deposed
    assert keeps_slot(ask)


@pytest.mark.rule("SK-20")
def test_a_slot_whose_claim_has_an_unknown_outcome_is_not_tried_again() -> None:
    _, ask = asked()
    ask.future.set_exception(TimeoutError("the engine is away"))
    assert not keeps_slot(ask)


@pytest.mark.rule("SK-15", "SK-20")
def test_burying_a_task_uses_no_slot() -> None:
    over = ClaimState(0, "h", "w", ClaimTerm(TTL_S, "", 0.0))
    stored = Stored(Head(TASK, "q", "send"), TaskState(Status.CLAIMED, over), 1, 0)
    ask = PendingClaim(stored, claimant_of(slot("a"), "", 2.0), OwnerEpoch(0, 5), over=True, slot=slot("a"))
    write = ask.write()
    assert write is not None
    assert (write.state.status, write.slot) == (Status.DEAD, None)
    ask.answered(Applied(2))
    assert keeps_slot(ask)


@pytest.mark.rule("SK-15", "SK-17", "SK-20")
def test_a_claim_for_a_slot_that_its_worker_never_took_counts_as_a_try() -> None:
    """Nothing in the store tells that no body began, and one that kills its worker must end some time."""
    never_taken = ClaimState(0, "h", "killed", ClaimTerm(TTL_S, "", 0.0))
    stored = Stored(Head(TASK, "q", "send", retries=1), TaskState(Status.CLAIMED, never_taken), 1, 0)
    ask = PendingClaim(stored, claimant_of(slot("a"), "", 2.0), OwnerEpoch(0, 5), over=True, slot=slot("a"))
    write = ask.write()
    assert write is not None
    assert write.state.claim is not None
    assert (write.state.status, write.state.claim.number, write.state.failures) == (Status.CLAIMED, 1, 1)
    assert write.state.error == "claim 0 of killed ended without a word"


# -- a worker's own slots


def published(
    own: OwnSlots, holders: list[str], at: float, names: Names = SEND, *, ahead: bool = False
) -> None:
    own.published([replace(slot(each, process=HERE, names=names), ahead=ahead) for each in holders], at)


def offering(room: int, now: float = 0.0) -> OwnSlots:
    """A worker that has published slots for its room."""
    own = OwnSlots()
    own.offer({SEND: WorkerRoom(room, room)}, now)
    (new,) = own.plan(now + SETTLE_S).publish
    published(own, [f"h{number}" for number in range(new.count)], now + SETTLE_S)
    return own


@pytest.mark.rule("SK-20")
def test_room_that_lasts_is_published() -> None:
    own = OwnSlots()
    own.offer({SEND: WorkerRoom(2, 2)}, 0.0)
    assert own.plan(0.0) == SlotPlan()
    assert own.next_wakeup(NOW) == SETTLE_S
    own.offer({SEND: WorkerRoom(0, 0)}, SETTLE_S / 2)
    assert own.plan(SETTLE_S) == SlotPlan(), "it is busy again"
    assert own.next_wakeup(NOW) is None
    own.offer({SEND: WorkerRoom(1, 1)}, SETTLE_S)
    assert own.plan(SETTLE_S) == SlotPlan((NewSlots(SEND, 1),)), (
        "a worker with gaps only is idle in the next one"
    )
    published(own, ["a"], SETTLE_S)
    assert own.plan(2 * SETTLE_S) == SlotPlan()
    assert own.next_wakeup(NOW) is None


@pytest.mark.rule("SK-20")
def test_slots_for_which_there_is_no_room_are_withdrawn() -> None:
    own = offering(2)
    own.offer({SEND: WorkerRoom(1, 1)}, 1.0)
    assert own.plan(1.0) == SlotPlan(), "the body may be a quick one"
    own.offer({SEND: WorkerRoom(2, 2)}, 1.0 + SETTLE_S / 2)
    assert own.plan(1.0 + SETTLE_S) == SlotPlan()
    own.offer({SEND: WorkerRoom(0, 0)}, 2.0)
    assert own.next_wakeup(NOW) == 2.0 + SETTLE_S
    assert own.plan(2.0 + SETTLE_S) == SlotPlan(withdraw=("h0", "h1"))
    own.gone(["h0", "h1"])
    assert own.plan(3.0) == SlotPlan()


@pytest.mark.rule("SK-20")
def test_while_its_slots_are_used_a_worker_with_quick_bodies_publishes_some_ahead() -> None:
    own = OwnSlots()
    own.offer({SEND: WorkerRoom(1, 5)}, 0.0)
    assert own.plan(SETTLE_S) == SlotPlan((NewSlots(SEND, 1),)), "nobody needs more"
    published(own, ["h0"], SETTLE_S)
    own.used(used("h0"), 1.0)
    own.forgotten(["h0"])
    assert own.plan(1.0) == SlotPlan((NewSlots(SEND, 4, 4),)), "one has arrived already"
    published(own, ["h1", "h2", "h3", "h4"], 1.0, ahead=True)
    own.take_arrived(1)
    assert own.plan(1.1) == SlotPlan()
    later = 1.0 + AHEAD_FOR_S
    assert own.next_wakeup(1.1) == later
    own.offer({SEND: WorkerRoom(1, 5)}, later)
    assert own.plan(later + SETTLE_S) == SlotPlan((NewSlots(SEND, 1),), ("h1", "h2", "h3", "h4"))
    published(own, ["h5"], later + SETTLE_S)
    own.gone(["h1", "h2", "h3", "h4"])
    assert own.next_wakeup(later + SETTLE_S) is None


@pytest.mark.rule("SK-20", "SK-23")
def test_a_slot_of_an_idle_thread_takes_the_place_of_one_ahead() -> None:
    """A task with a rate limit is claimed for no slot ahead: an idle thread would never get it."""
    own = OwnSlots()
    own.offer({SEND: WorkerRoom(0, 3)}, 0.0)
    own.used(used("h0"), 0.0)
    own.forgotten(["h0"])
    own.take_arrived(1)
    own.offer({SEND: WorkerRoom(0, 3)}, 0.1)
    assert own.plan(0.1) == SlotPlan((NewSlots(SEND, 3, 3),))
    published(own, ["h1", "h2", "h3"], 0.1, ahead=True)
    own.offer({SEND: WorkerRoom(1, 3)}, 0.2)
    own.offer({SEND: WorkerRoom(0, 3)}, 0.2 + SETTLE_S / 2)
    own.offer({SEND: WorkerRoom(1, 3)}, 0.3)
    assert own.plan(0.3) == SlotPlan(), "a thread is idle between two quick bodies"
    assert own.next_wakeup(0.3) == 0.3 + SETTLE_S
    assert own.plan(0.3 + SETTLE_S) == SlotPlan((NewSlots(SEND, 1),), ("h3",))
    published(own, ["h4"], 0.3 + SETTLE_S)
    own.gone(["h3"])
    assert own.plan(0.5) == SlotPlan()
    own.offer({SEND: WorkerRoom(0, 2)}, 0.5)
    assert own.plan(0.5 + SETTLE_S) == SlotPlan(withdraw=("h2",)), "those ahead first"


@pytest.mark.rule("SK-20")
def test_there_are_never_more_slots_than_one_worker_may_have() -> None:
    own = OwnSlots()
    own.offer({SEND: WorkerRoom(10_000, 10_000)}, 0.0)
    assert own.plan(1.0) == SlotPlan((NewSlots(SEND, MAX_OFFERED),))
    own.offer({SEND: WorkerRoom(-3, -3)}, 0.0)
    assert own.plan(1.0) == SlotPlan()


@pytest.mark.rule("SK-6", "SK-20")
def test_a_used_slot_is_taken_once_and_deleted() -> None:
    own = offering(1)
    assert own.used(used("h0"), 0.0)
    assert not own.used(used("h0"), 0.0)
    assert own.arrived == [Arrival(used("h0"), Offered(SEND, SETTLE_S))]
    assert own.plan(1.0) == SlotPlan(forget=("h0",)), "its room is taken, though the worker has not begun"
    own.take_arrived(1)
    own.forgotten(["h0"])
    assert not own.used(used("h0"), 0.0), "a watch that tells it again"
    assert own.plan(1.0) == SlotPlan()
    own.offer({SEND: WorkerRoom(1, 1)}, 1.0)
    assert own.plan(1.0) == SlotPlan((NewSlots(SEND, 1),)), "others have more to do: there is no delay"


@pytest.mark.rule("SK-8", "SK-20")
def test_a_claim_that_comes_of_an_unknown_publication_has_no_known_begin() -> None:
    own = OwnSlots()
    own.learn(slot("late", process=HERE), 0.0)
    assert own.plan(1.0).withdraw == ()
    own.used(used("late"), 0.0)
    (arrival,) = own.arrived
    assert arrival.offered is not None
    assert not is_fresh(arrival.offered.sent_at, 0.0, TTL_S)
    own.used(used("unheard of"), 0.0)
    assert own.arrived[1] == Arrival(used("unheard of"), None)


@pytest.mark.rule("SK-8")
def test_the_claim_of_an_old_slot_is_renewed_before_its_body_begins() -> None:
    assert is_fresh(5.0, 5.0 + FRESH_RATIO * TTL_S, TTL_S)
    assert not is_fresh(5.0, 5.1 + FRESH_RATIO * TTL_S, TTL_S)


@pytest.mark.rule("SK-20")
def test_slots_of_a_lease_that_ended_are_published_anew() -> None:
    own = offering(2)
    own.used(used("h0"), 0.0)
    own.lease_ended()
    assert own.offered == {}
    assert [each.slot.holder for each in own.arrived] == ["h0"], "it was claimed before"
    assert own.next_wakeup(1.0) is not None
    assert own.plan(1.0) == SlotPlan((NewSlots(SEND, 1),))
    own = offering(1)
    own.learn(GoneSlot("h0", HERE), 0.0)
    assert own.next_wakeup(1.0) == 1.0 + SETTLE_S
    assert own.plan(1.0 + SETTLE_S) == SlotPlan((NewSlots(SEND, 1),))


@pytest.mark.rule("SK-20")
def test_what_a_watch_has_missed_is_made_up_for() -> None:
    own = offering(3)
    own.used(used("h2"), 0.0)
    own.take_arrived(1)
    own.forgotten(["h2"])
    own.replace([slot("h0", process=HERE), slot("late", process=HERE), used("h1"), used("h2")], 0.0)
    assert own.offered == {"h0": Offered(SEND, SETTLE_S), "late": Offered(SEND, float("-inf"))}
    assert [each.slot.holder for each in own.arrived] == ["h1"]
    assert set(own.plan(1.0).forget) == {"h1", "h2"}


@pytest.mark.rule("SK-20")
def test_slots_of_other_functions_than_now_are_withdrawn() -> None:
    own = offering(2)
    own.offer({BOTH: WorkerRoom(2, 2)}, 1.0)
    assert own.plan(1.0) == SlotPlan()
    assert own.next_wakeup(1.0) == 1.0 + SETTLE_S
    assert own.plan(1.0 + SETTLE_S) == SlotPlan((NewSlots(BOTH, 2),), withdraw=("h0", "h1"))
    published(own, ["h2", "h3"], 1.0 + SETTLE_S, BOTH)
    own.gone(["h0", "h1"])
    own.offer({BOTH: WorkerRoom(2, 2)}, 2.0)
    assert own.plan(3.0) == SlotPlan()
    assert own.next_wakeup(NOW) is None


@pytest.mark.rule("SK-20")
def test_each_set_of_functions_has_its_own_slots() -> None:
    """A client that waits for other functions than the first one has slots too."""
    own = OwnSlots()
    own.offer({SEND: WorkerRoom(2, 2), SWEEP: WorkerRoom(1, 1), None: WorkerRoom(3, 3)}, 0.0)
    assert set(own.plan(SETTLE_S).publish) == {NewSlots(SEND, 2), NewSlots(SWEEP, 1), NewSlots(None, 3)}
    for names, holders in {SEND: ["a0", "a1"], SWEEP: ["b0"], None: ["c0", "c1", "c2"]}.items():
        published(own, holders, SETTLE_S, names)
    assert own.plan(1.0) == SlotPlan()
    own.used(used("b0"), 1.0)
    own.forgotten(["b0"])
    own.offer({SEND: WorkerRoom(2, 2), None: WorkerRoom(1, 1)}, 1.0)
    own.take_arrived(1)
    assert own.plan(1.0 + SETTLE_S) == SlotPlan(withdraw=("c1", "c2")), "the room of the others is as it was"
    own.gone(["c1", "c2"])
    own.offer({SEND: WorkerRoom(2, 2), SWEEP: WorkerRoom(1, 1), None: WorkerRoom(1, 1)}, 1.5)
    assert own.plan(1.5) == SlotPlan((NewSlots(SWEEP, 1),)), (
        "its functions have more tasks: there is no delay"
    )
    published(own, ["b1"], 1.5, SWEEP)
    own.used(used("a1"), 1.6)
    own.take_arrived(1)
    own.forgotten(["a1"])
    assert own.plan(1.7) == SlotPlan()


@pytest.mark.rule("SK-20")
def test_a_claim_of_an_unknown_slot_takes_room_of_each_set() -> None:
    own = OwnSlots()
    own.offer({SEND: WorkerRoom(1, 1), SWEEP: WorkerRoom(2, 2)}, 0.0)
    own.used(used("unheard of"), 0.0)
    own.forgotten(["unheard of"])
    assert own.plan(1.0) == SlotPlan((NewSlots(SWEEP, 1),))
    own.take_arrived(1)
    assert own.plan(2.0) == SlotPlan((NewSlots(SWEEP, 1),)), (
        "the worker has not said yet what room it has left"
    )
    own.offer({SEND: WorkerRoom(1, 1), SWEEP: WorkerRoom(2, 2)}, 2.0)
    assert len(own.plan(2.0).publish) == 2
    own.used(used("unheard of either"), 2.0)
    own.forgotten(["unheard of either"])
    own.offer({BOTH: WorkerRoom(1, 1)}, 2.0)
    assert own.plan(3.0) == SlotPlan(), "also of one that is offered later"


@pytest.mark.rule("SK-20")
def test_each_of_many_sets_has_a_slot_and_together_they_have_few_more() -> None:
    sets = [frozenset({f"function-{number}"}) for number in range(2 * MAX_OFFERED)]
    own = OwnSlots()
    own.offer(dict.fromkeys(sets, WorkerRoom(100, 100)), 0.0)
    assert own.plan(1.0) == SlotPlan(tuple(NewSlots(each, 1) for each in sets))
    own = OwnSlots()
    own.offer({SEND: WorkerRoom(10_000, 10_000), SWEEP: WorkerRoom(2, 2), BOTH: WorkerRoom(9, 10_000)}, 0.0)
    assert own.plan(1.0) == SlotPlan(
        (NewSlots(SWEEP, 2), NewSlots(SEND, MAX_OFFERED // 2 - 1), NewSlots(BOTH, 9))
    )


@pytest.mark.rule("SK-20")
def test_sets_of_functions_that_nobody_waits_for_are_forgotten() -> None:
    own = OwnSlots()
    for number in range(1000):
        own.offer({frozenset({f"function-{number}"}): WorkerRoom(1, 1)}, float(number))
    assert len(own._shares) == 1


@pytest.mark.rule("SK-20")
def test_what_is_remembered_of_used_slots_is_bounded() -> None:
    own = OwnSlots()
    for number in range(MAX_USED_SLOTS + 10):
        own.used(used(f"h{number}"), 0.0)
    own.take_arrived(MAX_USED_SLOTS + 10)
    assert len(own._seen) == MAX_USED_SLOTS
    assert not own.used(used(f"h{MAX_USED_SLOTS}"), 0.0)
    assert own.used(used("h0"), 0.0)
