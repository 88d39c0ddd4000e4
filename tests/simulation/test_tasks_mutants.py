"""Proof that the oracle of tasks sees: it notices each mutant.

The switches exist here only: a mutant replaces small methods or functions of the product, or guards of the
engine's contract, while the seeds of a profile are scanned, from seed 0 on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rebalanser.core.tasks import claims as claiming
from rebalanser.core.tasks import clocks, dependencies, rules
from rebalanser.core.tasks import owner as owner_module
from rebalanser.core.tasks import worker as execution
from rebalanser.core.tasks.claims import (
    IndexRequests,
    OwnedIndex,
    PartitionClaims,
    PausableClaims,
    PendingClaim,
)
from rebalanser.core.tasks.clocks import ForeignTerms
from rebalanser.core.tasks.dispensing import Dispensing
from rebalanser.core.tasks.failures import LoopFailures
from rebalanser.core.tasks.ids import partition_of_id
from rebalanser.core.tasks.model import CLOSED_UNDONE, OPEN, ClaimState, Status, Stored, TaskState
from rebalanser.core.tasks.owner import PartitionOwner
from rebalanser.core.tasks.ready_index import ClaimableTasks, RateState
from rebalanser.core.tasks.retention import Components, Marks, Retention
from rebalanser.core.tasks.rules import Reason, Refused
from rebalanser.core.tasks.slots import Arrival, OwnSlots, SlotDecisions
from rebalanser.core.tasks.store import OutboxTally, UsedSlot
from rebalanser.core.tasks.ticking import Ticking
from rebalanser.core.tasks.worker import ClaimLife, Execution
from rebalanser.core.tasks.writes import Batches, PendingMove, Settlement
from rebalanser.tasks.pauses import Pause
from simulation.kernel.mutants import Caught, Mutant, Switch, always, edited, instead, scan
from simulation.tasks import PROFILES, producing, run_seed, working
from simulation.tasks import engine as engine_module
from simulation.tasks.engine import SimulatedEngine
from simulation.tasks.indexing import IndexedEngine
from simulation.tasks.working import SimulatedWorker, Working

pytestmark = pytest.mark.full_size


def _whoever_has_that_number(_: Any) -> Any:
    """What Skuld itself did: two claims of one number are one."""

    def is_mine(self: PendingClaim, stored: Stored) -> bool:
        claim, before = stored.state.claim, self._offered.state.claim
        return claim is not None and claim.number == (0 if before is None else before.number + 1)

    return is_mine


def _found_is_taken_for_mine(original: Callable[..., Any]) -> Any:
    """A pending claim that finds a claim of its number there takes it for its own."""

    def claimed(self: PendingClaim, stored: Stored) -> Any:
        if stored.revision != self._offered.revision and self.is_mine(stored):
            return stored.state if stored.state.status is Status.CLAIMED else Refused(Reason.ENDED)
        return original(self, stored)

    return claimed


def _whoever_asks(_: Any) -> Any:
    def current(state: TaskState, held: Any) -> ClaimState | Refused:
        return state.claim if state.status is Status.CLAIMED and state.claim else Refused(Reason.ENDED)

    return current


def _gaps_are_skipped(_: Any) -> Any:
    def update(state: TaskState, held: Any, sequence: int, content: bytes, written: bytes | None) -> Any:
        current = rules._current(state, held)
        if isinstance(current, Refused):
            return current
        if sequence < current.updates:
            return state if written == content else Refused(Reason.OTHER_CONTENT)
        return replace(state, claim=replace(current, updates=sequence + 1))

    return update


def _by_its_id(_: Any) -> Any:
    return lambda head, partitions: partition_of_id(head.id, partitions)


def _only_in_its_time(original: Callable[..., bool]) -> Any:
    return lambda task, other, unique_for_s, _status: original(task, other, unique_for_s, None)


def _only_while_it_is_open(original: Callable[..., bool]) -> Any:
    return lambda task, other, _unique_for_s, status: original(task, other, 0.0, status)


def _by_the_others_clock(_: Any) -> Any:
    return lambda claim, _now, _clock, buffer_s: claim.term.ends_at_s + buffer_s


def _over_when_read(_: Any) -> Any:
    return lambda _claim, now, _clock, _buffer_s: now


def _any_of_them(_: Any) -> Any:
    """Each closed task may go, whatever depends on it."""
    return lambda self: iter([{task: where} for task, where in self._closed.items()])


def _by_an_older_mark(_: Any) -> Any:
    return lambda self, revision: max((mark.wall for mark in self if mark.revision <= revision), default=None)


def _as_complete(_: Any) -> Any:
    return lambda self, status: None if status in OPEN else self.completed_s


def _not_looked_at(_: Any) -> Any:
    return lambda self, task, after, after_failure: False


def _as_if_complete(original: Callable[..., bool]) -> Callable[..., bool]:
    def waits_no_more(self: dependencies.Dependencies, task: Any, needed: Any, status: Any) -> bool:
        if status in CLOSED_UNDONE:
            self._complete.add(needed)
        return original(self, task, needed, status)

    return waits_no_more


def _counted_from_arrival(_: Any) -> Any:
    """A claim for a slot seems to begin when its worker hears of it."""
    return lambda self, published_at: self.now


def _without_epoch(original: Callable[..., Any]) -> Any:
    def pending_claim(*given: Any, **named: Any) -> PendingClaim:
        pending = original(*given, **named)
        pending._epoch = None
        return pending  # type: ignore[no-any-return] # the original's

    return pending_claim


def _told_twice_is_used_twice(_: Any) -> Any:
    def used(self: OwnSlots, slot: UsedSlot, _now: float) -> bool:
        self.arrived.append(Arrival(slot, self.offered.pop(slot.holder, None)))
        return True

    return used


def _whatever_came_since(_: Any) -> Any:
    return lambda self, stored: stored.head.id in self._engine.over


_KEPT_HOLDERS = "holders = self._unused[:number]"
_UNUSED_HOLDERS = "self._unused += [each for each in holders if each not in used] if used else holders"
_DROP_USED = "self._unused = [each for each in self._unused if each not in used]"
INDEX = "claims from an index"
_TOLD_AS_FAILURE = "return fail_all([pending for pending, _ in writes], RegistryUnavailable('away'))"
_ANY_REVISION = Switch(SimulatedEngine, "_is_unchanged", always(True))
_ALSO_COMPLETE = instead(OPEN | {Status.COMPLETED})  # type: ignore[arg-type] # a constant, not a function

MUTANTS = (
    Mutant(
        "state's revision",
        "a state is replaced only if it is still the one that was read",
        (_ANY_REVISION,),
        frozenset({"SK-6", "SK-7", "SK-9", "SK-10", "SK-13"}),
    ),
    Mutant(
        "epoch",
        "an owner that was followed by another claims nothing",
        (Switch(SimulatedEngine, "_is_in_epoch", always(True)),),
        frozenset({"SK-13"}),
        "zombies",
    ),
    Mutant(
        "holder of a claim",
        "a claim of the same number is not one's own",
        (
            Switch(PendingClaim, "is_mine", _whoever_has_that_number),
            Switch(PendingClaim, "_claimed", _found_is_taken_for_mine),
        ),
        frozenset({"SK-6"}),
        "zombies",
    ),
    Mutant(
        "current claim",
        "who asks for a change must hold the current claim",
        (Switch(rules, "_current", _whoever_asks),),  # type: ignore[arg-type]
        frozenset({"SK-7", "SK-10", "SK-9"}),
        "stale workers",
    ),
    Mutant(
        "next update",
        "an update is the next one of its claim",
        (Switch(rules, "update", _gaps_are_skipped),),  # type: ignore[arg-type]
        frozenset({"SK-9"}),
        "lost requests",
    ),
    Mutant(
        "complete for good",
        "a completed task is not claimed again",
        (Switch(rules, "OPEN", _ALSO_COMPLETE),),  # type: ignore[arg-type]
        frozenset({"SK-10"}),
        second_line=(Switch(owner_module, "OPEN", _ALSO_COMPLETE),),  # type: ignore[arg-type]
    ),
    Mutant(
        "one's own clock",
        "the time of a claim is not compared with the clock of another host",
        (Switch(owner_module, "over_at", _by_the_others_clock),),
        frozenset({"SK-8"}),
    ),
    Mutant(
        "claims that a new owner has read",
        "whoever takes over waits until they are over",
        (Switch(owner_module, "over_at", _over_when_read),),
        frozenset({"SK-8"}),
    ),
    Mutant(
        "from before the request",
        "a worker counts its claim's time from before it asked",
        (Switch(Working, "counted_from", instead(lambda self, asked_at: self.worker.now)),),
        frozenset({"SK-8"}),
        "stale workers",
    ),
    Mutant(
        "slot that is free",
        "a claim for a slot that was used, withdrawn or ended with its worker is not written",
        (Switch(SimulatedEngine, "_is_free", always(True)),),
        frozenset({"SK-20"}),
    ),
    Mutant(
        "from before the publication",
        "a worker counts the time of a claim for its slot from before it published that",
        (Switch(SimulatedWorker, "counted_from", _counted_from_arrival),),
        frozenset({"SK-8"}),
        "stale workers",
    ),
    Mutant(
        "epoch of claims for slots",
        "a claim for a slot carries the owner's epoch",
        (Switch(claiming, "pending_claim", _without_epoch),),
        frozenset({"SK-13"}),
    ),
    Mutant(
        "a slot told twice",
        "a worker works once on what was claimed for its slot",
        (Switch(OwnSlots, "used", _told_twice_is_used_twice),),
        frozenset({"SK-6"}),
    ),
    Mutant(
        "holder of a slot's claim",
        "a worker works on no claim that was not made for its slot",
        (Switch(SimulatedWorker, "is_of_slot", always(True)),),
        frozenset({"SK-6"}),
        second_line=(Switch(working, "is_fresh", always(True)),),
    ),
    Mutant(
        "unknown outcome",
        "a claim whose answer was lost is read back, not made again",
        (Switch(Settlement, "_write", edited("return error", _TOLD_AS_FAILURE)),),
        frozenset({"SK-9"}),
        "lost requests",
    ),
    Mutant(
        "neighbours of what is collected",
        "what is connected is collected together, once all of it is complete",
        (Switch(Components, "collectable", _any_of_them),),
        frozenset({"SK-14"}),
        "collection",
        second_line=(Switch(SimulatedEngine, "_has_dependents", always(False)),),
    ),
    Mutant(
        "time of closing",
        "a task was closed when a mark that is not older says so, and not when an older one does",
        (Switch(Marks, "closed_at", _by_an_older_mark),),
        frozenset({"SK-22"}),
        "collection",
    ),
    Mutant(
        "dead ones are kept longer",
        "each status has a time of its own",
        (Switch(Retention, "seconds", _as_complete),),
        frozenset({"SK-22"}),
        "collection",
    ),
    Mutant(
        "dependents that came meanwhile",
        "the store collects nothing on which a task depends that is not collected with it",
        (Switch(SimulatedEngine, "_has_dependents", always(False)),),
        frozenset({"SK-14"}),
        "collection",
    ),
    Mutant(
        "one task by one id",
        "enqueueing an id that is taken writes nothing",
        (Switch(SimulatedEngine, "_taken", always(None)),),
        frozenset({"SK-3"}),
    ),
    Mutant(
        "one task by one unique key",
        "enqueueing with the unique key of a task that keeps others out writes nothing",
        (Switch(SimulatedEngine, "_duplicate", always(None)),),
        frozenset({"SK-23"}),
    ),
    Mutant(
        "a unique task that is open",
        "a task keeps others out while it is open, also after its time",
        (Switch(engine_module, "is_duplicate", _only_in_its_time),),  # type: ignore[arg-type]
        frozenset({"SK-23"}),
    ),
    Mutant(
        "the time of a unique task",
        "a task keeps others out for its time, also once it is closed",
        (Switch(engine_module, "is_duplicate", _only_while_it_is_open),),  # type: ignore[arg-type]
        frozenset({"SK-23"}),
    ),
    Mutant(
        "claims that count for a limit",
        "a task is held back while as many of its limit are claimed as that allows",
        (Switch(ClaimableTasks, "count", always(None)),),
        frozenset({"SK-23"}),
    ),
    Mutant(
        "room that is made",
        "what a limit held back is claimed once there is room",
        (Switch(ClaimableTasks, "uncount", always(False)),),
        frozenset({"SK-17"}),
    ),
    Mutant(
        "place of limited tasks",
        "all tasks of one limit lie in one partition",
        (Switch(producing, "partition_of_task", _by_its_id),),  # type: ignore[arg-type]
        frozenset({"SK-23"}),
    ),
    Mutant(
        "starts that count for a rate",
        "a start keeps the next one of its rate limit waiting",
        (Switch(RateState, "start", edited("rate_of(head.rate_limit).every_s", "0.0")),),
        frozenset({"SK-23"}),
    ),
    Mutant(
        "burst of a rate",
        "no more than the burst of a rate limit starts at once",
        (Switch(RateState, "room_at", edited("(rate.burst - 1)", "rate.burst")),),
        frozenset({"SK-23"}),
    ),
    Mutant(
        "rest of a rate",
        "however long a rate limit has rested, it allows its burst and no more",
        (
            Switch(
                RateState,
                "start",
                edited("max(now if self._full_at is None else self._full_at, now)", "self._full_at"),
            ),
        ),
        frozenset({"SK-23"}),
    ),
    Mutant(
        "mark of a rate",
        "a new owner of a rate limit counts the starts before it",
        (Switch(RateState, "learn", edited("full_at(mark, now, clock)", "now")),),
        frozenset({"SK-23"}),
    ),
    Mutant(
        "start whose outcome is not known",
        "after it the mark of the rate limit is read",
        (Switch(RateState, "ended", edited("self._full_at = None", "pass")),),
        frozenset({"SK-17"}),
        "lost requests",
        first=190,
    ),
    Mutant(
        "room in time",
        "what a rate limit holds back is claimed once its time has come",
        (Switch(ClaimableTasks, "wake", edited("self._rooms.pop_due(now)", "()")),),
        frozenset({"SK-17"}),
    ),
    Mutant(
        "count of an outbox",
        "what an outbox has forwarded is not taken again, even once it was collected",
        (Switch(OutboxTally, "refusal", always(None)),),
        frozenset({"SK-4"}),
        "outboxes",
        first=150,
    ),
    Mutant(
        "dependencies",
        "a task is claimed once all is complete that it depends on",
        (Switch(owner_module.Dependencies, "add", _not_looked_at),),
        frozenset({"SK-5"}),
    ),
    Mutant(
        "failed dependencies",
        "a task that fails with a dependency is not claimed",
        (Switch(owner_module, "fails", always(False)),),  # type: ignore[arg-type]
        frozenset({"SK-5"}),
    ),
    Mutant(
        "dead is not for ever",
        "a dependency that was dead once is waited for again by what comes later",
        (Switch(dependencies.Dependencies, "_waits_no_more", _as_if_complete),),
        frozenset({"SK-5"}),
    ),
    Mutant(
        "end of dependencies",
        "that a task is dead or cancelled is learnt by what does not wait for it",
        (Switch(dependencies.Dependencies, "learn_unfinished", always(False)),),
        frozenset({"SK-17"}),
    ),
    Mutant(
        "neighbours in a batch",
        "what the engine can't take fails alone",
        (Switch(Settlement, "_write_apart", edited("if len(writes) == 1:", "if writes:")),),
        frozenset({"SK-19"}),
        "refused writes",
    ),
    Mutant(
        "lasting writes",
        "the end of a claim is kept until the store takes it",
        (Switch(Batches, "keep", always([])),),
        frozenset({"SK-19"}),
        "refused writes",
    ),
    Mutant(
        "places of what is kept",
        "what is kept is written before what follows of the same task",
        (Switch(Batches, "keep", edited("extendleft(reversed(kept))", "extend(reversed(kept))")),),
        frozenset({"SK-9"}),
        "refused writes",
    ),
    Mutant(
        "an outage after a lost answer",
        "what may have happened is not told as what did not",
        (Switch(Settlement, "script", edited("raise lost or error from error", "raise")),),
        frozenset({"SK-9"}),
        "refused writes",
    ),
    Mutant(
        "a read that fails after a lost answer",
        "what could not be read back is unknown",
        (Switch(Settlement, "_read_back", edited("raise lost or error from error", "raise")),),
        frozenset({"SK-9"}),
        "refused writes",
    ),
    Mutant(
        "one batch about a task",
        "two batches in flight are not about one task",
        (Switch(Batches, "take", edited("or pending.task in blocked", "")),),
        frozenset({"SK-9"}),
        "lost requests",
    ),
    Mutant(
        "tasks of a batch that has ended",
        "what was written keeps no other write of its task",
        (
            Switch(
                Batches,
                "land",
                edited("self._busy.difference_update(pending.task for pending in batch)", "pass"),
            ),
        ),
        frozenset({"SK-17"}),
    ),
    Mutant(
        "the state that is found",
        "what is written again follows from what is there now",
        (Switch(PendingMove, "found", edited("self._stored = stored", "pass")),),
        frozenset({"SK-17", "SK-19"}),
    ),
    Mutant(
        "a claim whose outcome is not known",
        "a task whose claim failed is read, then offered again",
        (Switch(PartitionClaims, "settled", edited("self.owner.conflicted(pending.task, now)\n", "pass\n")),),
        frozenset({"SK-17"}),
        "refused writes",
    ),
    Mutant(
        "changes that were missed",
        "an owner whose watch was broken reads its partitions again",
        (Switch(OwnedIndex, "schedule_full_read", always(None)),),
        frozenset({"SK-17"}),
    ),
    Mutant(
        "all pages of a partition",
        "a new owner reads all open tasks",
        (Switch(OwnedIndex, "read", edited("if after is None:", "if True:")),),
        frozenset({"SK-17"}),
    ),
    Mutant(
        "dependencies in other partitions",
        "that a task is complete is told to all owners",
        (
            Switch(
                OwnedIndex,
                "wants",
                edited(
                    "|= owner.completed",
                    "|= owner.partition == change.partition and owner.completed",
                ),
            ),
        ),
        frozenset({"SK-17"}),
    ),
    Mutant(
        "the best of all partitions",
        "the best task of all partitions is claimed first",
        (
            Switch(
                OwnedIndex,
                "_best_first",
                edited("number, claiming = offers[0]", "number, claiming = offers[-1]"),
            ),
        ),
        frozenset({"SK-5"}),
    ),
    Mutant(
        "owner of a claim for a slot",
        "a claim for a slot belongs to the slot's worker, not to the claimant that is served",
        (Switch(OwnedIndex, "_settled", edited(" or pending.slot is not None", "")),),
        frozenset({"SK-6"}),
    ),
    Mutant(
        "the state that was offered",
        "a claim takes the state of a task that was offered, and no other",
        (Switch(PendingClaim, "_claimed", edited("stored.revision != self._offered.revision", "False")),),
        frozenset({"SK-5", "SK-6", "SK-8"}),
        "refused writes",
        first=240,
    ),
    Mutant(
        "numbers of claims",
        "a claim has the next number",
        (Switch(rules, "claim", edited("before.number + 1", "before.number")),),
        frozenset({"SK-6", "SK-7"}),
    ),
    Mutant(
        "numbers after a failure",
        "the numbers of claims go on after a try that failed",
        (Switch(rules, "fail", edited("status=Status.WAITING,", "status=Status.WAITING, claim=None,")),),
        frozenset({"SK-6"}),
    ),
    Mutant(
        "numbers after a claim is given back",
        "the numbers of claims go on after one that was given back",
        (Switch(rules, "release", edited("status=Status.WAITING,", "status=Status.WAITING, claim=None,")),),
        frozenset({"SK-6"}),
    ),
    Mutant(
        "number of updates",
        "an update is counted",
        (Switch(rules, "update", edited("updates=sequence + 1", "updates=sequence")),),
        frozenset({"SK-9"}),
    ),
    Mutant(
        "completed twice by one claim",
        "a completion that is sent again changes nothing",
        (Switch(rules, "complete", edited("_is_of(state, held)", "False")),),
        frozenset({"SK-10"}),
    ),
    Mutant(
        "complete tasks are not cancelled",
        "a complete task stays complete whatever an operator asks",
        (Switch(rules, "cancel", edited("if state.status is Status.COMPLETED:", "if False:")),),
        frozenset({"SK-10"}),
    ),
    Mutant(
        "complete tasks are not requeued",
        "a complete task is not tried again",
        (Switch(rules, "requeue", edited("if state.status is Status.COMPLETED:", "if False:")),),
        frozenset({"SK-10"}),
    ),
    Mutant(
        "older news",
        "an owner keeps the newest state that it knows",
        (
            Switch(
                PartitionOwner,
                "_learn",
                edited(
                    "if stored.revision < known:",
                    "if False:",
                    ("OPEN:\n        if stored.revision > known:", "OPEN:\n        if True:"),
                ),
            ),
            Switch(PartitionOwner, "knows", lambda _: lambda _self, _task, _revision: False),
        ),
        frozenset({"SK-11"}),
    ),
    Mutant(
        "claims ahead of a slow body",
        "a claim ahead that has not begun is given back",
        (Switch(Execution, "look", edited("self._take_late()", "[]")),),
        frozenset({"SK-20"}),
        "workers",
    ),
    Mutant(
        "tries that have ended",
        "a body that has ended leaves its place",
        (Switch(Execution, "ended", edited("self._forget(held)", "pass")),),
        frozenset({"SK-17", "SK-20"}),
        "busy workers",
    ),
    Mutant(
        "claims given back before a thread was free",
        "what was given back is not begun",
        (
            Switch(Execution, "begin", edited("return False", "pass")),
            Switch(Execution, "may_run", always(True)),
        ),
        frozenset({"SK-7"}),
        "busy workers",
    ),
    Mutant(
        "bodies whose claim's time is up",
        "a body is asked to stop in time, whatever the store does",
        (Switch(execution, "_due_at", edited("else min(at, deadline)", "else at")),),
        frozenset({"SK-8"}),
        "workers",
    ),
    Mutant(
        "asking bodies to stop",
        "a body whose claim's time is up is asked to stop",
        (Switch(Execution, "due_steps", edited("held.claim.deadline <= now", "False")),),
        frozenset({"SK-8"}),
        "workers",
    ),
    Mutant(
        "timeouts",
        "a body that takes too long has failed",
        (Switch(Execution, "limit_time", always(None)),),
        frozenset({"SK-15"}),
        "workers",
    ),
    Mutant(
        "renewals",
        "a claim is renewed as long as its body runs",
        (
            Switch(
                Execution,
                "due_steps",
                edited("held.renew_at <= now + EARLY_RENEWAL_RATIO", "0 > now + EARLY_RENEWAL_RATIO"),
            ),
        ),
        frozenset({"SK-7", "SK-17"}),
        "workers",
    ),
    Mutant(
        "news of claims that are held",
        "a worker hears at once that a claim is over",
        (Switch(Execution, "learn_change", edited("return self.claim_of.get(change.task)", "return None")),),
        frozenset({"SK-7"}),
        "busy workers",
        first=11,
    ),
    Mutant(
        "the time of a renewal",
        "a renewed claim lasts for its time, counted from before the renewal was written",
        (Switch(ClaimLife, "renewed", edited("written_at + ttl_s", "written_at + 2 * ttl_s")),),
        frozenset({"SK-8"}),
        "workers",
    ),
    Mutant(
        "payloads that can't be read",
        "a claim whose payload can't be read now is given back",
        (Switch(Execution, "_hand_out", edited("yield GiveBack(tries)\n        raise", "raise")),),
        frozenset({"SK-17"}),
        "workers",
    ),
    Mutant(
        "leaving: what still runs",
        "a worker that leaves keeps no claim",
        (Switch(Execution, "leave", edited("yield Abandon(remaining)", "pass")),),
        frozenset({"SK-20"}),
        "workers",
        first=10,
    ),
    Mutant(
        "troubles that are over",
        "a loop that works again has no trouble",
        (Switch(LoopFailures, "ended", always(None)),),
        frozenset({"SK-19"}),
        "workers",
    ),
    Mutant(
        "pauses of loops",
        "a loop tries again soon",
        (Switch(LoopFailures, "failed", edited("failing.delay.after(0.0)", "3600.0")),),
        frozenset({"SK-17", "SK-19", "SK-20"}),
        "workers",
    ),
    Mutant(
        "claims for slots that arrive",
        "a claim that has arrived is taken once",
        (Switch(SlotDecisions, "arrived", edited("self.own.take_arrived(len(used) - len(kept))", "pass")),),
        frozenset({"SK-6"}),
        "workers",
    ),
    Mutant(
        "slots that a watch has missed",
        "slots are read again once changes may have been missed",
        (
            Switch(
                SlotDecisions,
                "learn",
                edited("self.lost = True\n", "pass\n"),
            ),
        ),
        frozenset({"SK-17", "SK-20"}),
        "workers",
    ),
    Mutant(
        "slots that could not be published",
        "slots that were refused are published again",
        (
            Switch(
                SlotDecisions,
                "_publish",
                edited("self.own.gone([each.holder for each in slots])\n        raise", "raise"),
            ),
        ),
        frozenset({"SK-17", "SK-20"}),
        "workers",
    ),
    Mutant(
        "slots of a lease that has ended",
        "slots that ended with their lease are published anew",
        (Switch(SlotDecisions, "_lease_ended", edited("self.own.lease_ended()", "pass")),),
        frozenset({"SK-17", "SK-20"}),
        "workers",
    ),
    Mutant(
        "room that is offered",
        "a change of the room is published soon",
        (Switch(SlotDecisions, "offer", edited("due is not None and due < self._looks_at", "False")),),
        frozenset({"SK-17", "SK-20"}),
        "workers",
    ),
    Mutant(
        "room for other functions",
        "each set of functions has slots of its own",
        (
            Switch(
                OwnSlots,
                "offer",
                edited("_bounded(rooms)", "_bounded({names: rooms[names] for names in [*rooms][:1]})"),
            ),
        ),
        frozenset({"SK-17", "SK-20"}),
        "workers",
    ),
    Mutant(
        "slots ahead and rate limits",
        "a task with a rate limit is claimed for no slot ahead",
        (Switch(OwnedIndex, "_claims_for_others", edited("slot.ahead and claiming", "False and claiming")),),
        frozenset({"SK-23"}),
        "workers",
    ),
    Mutant(
        "holders of a claim whose outcome is not known",
        "a request for claims from the index names no holder of one that has failed",
        (
            Switch(
                IndexRequests,
                "_new_holders",
                edited("holders, self._unused = self._unused[:number], self._unused[number:]", _KEPT_HOLDERS),
            ),
            Switch(IndexRequests, "claim", edited(_UNUSED_HOLDERS, _DROP_USED)),
        ),
        frozenset({"SK-6"}),
        INDEX,
        first=20,
    ),
    Mutant(
        "time of a claim from the index",
        "the time of a claim from the index counts from before it was requested",
        (Switch(IndexRequests, "claim", edited("sent_at, payload)", "self._now(), payload)")),),
        frozenset({"SK-8"}),
        INDEX,
    ),
    Mutant(
        "tasks that are due later",
        "the index is looked at again once a task is due",
        (Switch(IndexRequests, "claim", edited("[sent_at + answer.next_due - wall]", "[]")),),
        frozenset({"SK-17", "SK-20"}),
        INDEX,
    ),
    Mutant(
        "claims that are over later",
        "the index is looked at again once a claim is over",
        (Switch(IndexRequests, "claim", edited("[answer.next_over]", "[]")),),
        frozenset({"SK-17", "SK-20"}),
        INDEX,
    ),
    Mutant(
        "pause that a claim has found",
        "a worker whose claim is answered by a pause keeps nothing ahead",
        (Switch(IndexRequests, "claim", edited("self.pause = answer.pause", "pass")),),
        frozenset({"SK-23"}),
        INDEX,
    ),
    Mutant(
        "pause of a worker without room",
        "a worker that has no room reads the pause, too",
        (Switch(IndexRequests, "claim", edited("yield from self.read_pause()", "pass")),),
        frozenset({"SK-23"}),
        INDEX,
    ),
    Mutant(
        "terms of other clocks",
        "a claim that counts on another clock is over once its whole time has passed here",
        (Switch(ForeignTerms, "learn", edited('over_at(claim, now, "", buffer_s)', "now")),),
        frozenset({"SK-8"}),
        INDEX,
    ),
    Mutant(
        "renewals by other clocks",
        "the time of a renewed claim that counts on another clock begins anew",
        (Switch(clocks, "is_same_term", always(True)),),
        frozenset({"SK-8"}),
        INDEX,
        first=15,
    ),
    Mutant(
        "renewals of what was found over",
        "a claim that was renewed after it was found over is not claimed again",
        (Switch(IndexedEngine, "_is_known_over", _whatever_came_since),),
        frozenset({"SK-8"}),
        INDEX,
    ),
    Mutant(
        "claims ahead in a pause",
        "claims ahead are given back once the queue is paused",
        (Switch(Execution, "look", edited("if is_paused and", "if False and")),),
        frozenset({"SK-23"}),
        "pauses",
        first=36,
    ),
    Mutant(
        "claims of clients that hang up",
        "what a client got that hangs up before it is answered is given back",
        (Switch(Dispensing, "forget", edited("return self._take_back(client)", "return []")),),
        frozenset({"SK-20"}),
        "servers",
    ),
    Mutant(
        "clients that hang up as a claim is made",
        "what is claimed for a client that hangs up meanwhile is given back",
        (Switch(Dispensing, "_hand_out", edited("or client.has_hung_up", "")),),
        frozenset({"SK-20"}),
        "servers",
    ),
    Mutant(
        "clients that hung up as nothing was found",
        "nothing is claimed for a client that has hung up",
        (
            Switch(
                Dispensing,
                "_serve_all",
                edited("[each for each in unserved if not each.has_hung_up]", "unserved"),
            ),
        ),
        frozenset({"SK-20"}),
        "servers",
    ),
    Mutant(
        "payloads that a server can't read",
        "claims whose payloads a server can't read are given back",
        (
            Switch(
                Dispensing,
                "_claim",
                edited("for each in claimed:\n            yield ReleaseClaim(each)\n        raise", "raise"),
            ),
        ),
        frozenset({"SK-20"}),
        "servers",
    ),
    Mutant(
        "results that don't fit a task",
        "a claim that no worker can run has failed",
        (Switch(Dispensing, "_claim", edited("else FailClaim(each, error)", "else ReportClaims(None)")),),
        frozenset({"SK-20"}),
        "servers",
    ),
    Mutant(
        "long polls that are over",
        "a client that has waited for its time is answered",
        (Switch(Dispensing, "_answer_late", edited("if each.deadline <= now", "if False")),),
        frozenset({"SK-16"}),
        "servers",
    ),
    Mutant(
        "time of long polls",
        "a server wakes up once a client has waited for its time",
        (Switch(Dispensing, "_pause_s", edited("[each.deadline for each in self.clients]", "[]")),),
        frozenset({"SK-16"}),
        "servers",
    ),
    Mutant(
        "clients that are told of an error",
        "a client whose claims fail is told so",
        (Switch(Dispensing, "_serve", edited("yield RefuseClient(client, error)", "pass")),),
        frozenset({"SK-16"}),
        "servers",
    ),
    Mutant(
        "order of clients",
        "the client that came first is served first",
        (Switch(Dispensing, "_serve_all", edited("self.clients[:0] =", "self.clients +=")),),
        frozenset({"SK-16"}),
        "servers",
    ),
    Mutant(
        "clients of a server that stops",
        "a server that stops answers all who wait",
        (Switch(Dispensing, "stop", edited("while self.clients", "while False and self.clients")),),
        frozenset({"SK-16"}),
        "servers",
    ),
    Mutant(
        "time that a client has waited",
        "a client counts its claim's time from before that was requested",
        (Switch(Dispensing, "with_payloads", edited("each.sent_at - client", "self._now() - client")),),
        frozenset({"SK-8"}),
        "servers",
    ),
    Mutant(
        "room of clients",
        "the room of waiting clients is offered to the owners of partitions",
        (
            Switch(
                Dispensing,
                "_offer",
                edited("room[None if each.names is None else frozenset(each.names)] += each.limit", "pass"),
            ),
        ),
        frozenset({"SK-17", "SK-20"}),
        "servers",
    ),
    Mutant(
        "claims that fail",
        "a server offers room again once tasks can be claimed",
        (Switch(Dispensing, "_claims_work", edited("self._claims_fail_for_s = None", "pass")),),
        frozenset({"SK-17", "SK-19", "SK-20"}),
        "servers",
    ),
    Mutant(
        "ticks in a pause of their schedule",
        "a tick in a pause of its schedule is missed",
        (Switch(Ticking, "tick", edited("name not in pauses or not pauses[name].covers(tick)", "True")),),
        frozenset({"SK-23"}),
        "ticks",
    ),
    Mutant(
        "ticks after a pause of their schedule",
        "a tick after the end of a pause comes",
        (Switch(Pause, "covers", edited("<= tick <= ended", "<= tick")),),
        frozenset({"SK-15"}),
        "ticks",
    ),
    Mutant(
        "ticks that could not be enqueued",
        "a tick is enqueued once the store takes it",
        (
            Switch(
                Ticking, "_enqueue_once", edited("OUTAGE:\n            raise", "OUTAGE:\n            return")
            ),
        ),
        frozenset({"SK-15"}),
        "ticks",
    ),
    Mutant(
        "ticks of a clock that was set back",
        "a clock that was set back holds no tick up",
        (Switch(Ticking, "_counts_since", edited("if wall < self._since[schedule]:", "if False:")),),
        frozenset({"SK-15"}),
        "ticks",
    ),
    Mutant(
        "all or none",
        "tasks that are enqueued together are made together",
        (Switch(SimulatedEngine, "_refusal", always(None)),),
        frozenset({"SK-3"}),
        "tasks together",
    ),
    Mutant(
        "the rest of tasks that exist in part",
        "what does not exist yet is enqueued though another one exists",
        (Switch(producing, "enqueue_together", edited("yield ReadTasks(list(left))", "{}; return")),),
        frozenset({"SK-3"}),
        "tasks together",
    ),
    Mutant(
        "tasks that exist",
        "a task that exists is not enqueued once more with the rest",
        (Switch(producing, "enqueue_together", edited("if task not in present}", "}")),),
        frozenset({"SK-17"}),
        "tasks together",
    ),
    Mutant(
        "store of a paused queue",
        "nothing is claimed once a pause is stored",
        (Switch(SimulatedEngine, "_is_paused", always(False)),),
        frozenset({"SK-23"}),
        "pauses",
    ),
    Mutant(
        "room in a pause",
        "no room is offered while the queue is paused",
        (Switch(PausableClaims, "rooms", edited("rooms if self.pause is None else {}", "rooms")),),
        frozenset({"SK-23"}),
        "pauses",
    ),
    Mutant(
        "news of pauses",
        "a pause is read again once it has changed",
        (Switch(PausableClaims, "changed", always(None)),),
        frozenset({"SK-17", "SK-20", "SK-23"}),
        "pauses",
    ),
    Mutant(
        "a pause that could not be read",
        "a pause that could not be read is read again",
        (Switch(PausableClaims, "_read", edited("self._changed = True", "pass")),),
        frozenset({"SK-17", "SK-20", "SK-23"}),
        "pauses",
        first=122,
    ),
)

LIMIT = 600
"""How many seeds may be needed at most."""


@pytest.mark.lesson(12)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_oracle_sees_every_mutant(mutant: Mutant, caught: Callable[[Caught], None]) -> None:
    found = scan(mutant, run_seed, PROFILES, LIMIT)
    assert found is not None, f"{LIMIT} seeds, and no check of these rules saw it: {sorted(mutant.rules)}"
    caught(found)
