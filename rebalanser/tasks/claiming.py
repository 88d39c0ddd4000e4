"""How an owner hands out claims: who asks is given the best task, and the store decides (SK-5, SK-6)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rebalanser.tasks import rules
from rebalanser.tasks.asks import MoveAsk
from rebalanser.tasks.engine import Epoch
from rebalanser.tasks.free_slots import FreeSlot
from rebalanser.tasks.model import Status, Stored, TaskId, Term
from rebalanser.tasks.owner import Owner
from rebalanser.tasks.rules import Decision, FailedDependency, Reason, Refused


@dataclass(frozen=True, slots=True)
class Asker:
    """Somebody who asks for a claim; ``holder`` is his alone and for this one time."""

    holder: str
    worker: str
    term: Term


class ClaimAsk(MoveAsk):
    """The claim of a task as it was offered: it takes no other state of it, unless that is this very claim.

    What the owner knows, that the task is due, what it depends on complete and an earlier claim over, it
    knows of the revision that it offered. So where the store has another one, the claim is refused, not made
    anew. With a ``slot`` it is made for that, by its holder (SK-20). With a ``failed`` dependency it makes
    the task dead.
    """

    def __init__(
        self,
        offered: Stored,
        asker: Asker,
        epoch: Epoch,
        *,
        over: bool,
        slot: FreeSlot | None = None,
        failed: FailedDependency | None = None,
    ) -> None:
        super().__init__(offered, self._claimed, epoch=epoch, slot=slot)
        self.asker = asker
        self.slot = slot
        self._offered = offered
        self._over = over
        self._failed = failed

    def is_mine(self, stored: Stored) -> bool:
        """Whether the task's last claim is this one, whatever became of it."""
        return stored.state.claim is not None and stored.state.claim.holder == self.asker.holder

    @property
    def seen(self) -> Stored:
        """The task as it was last read."""
        return self._stored

    @property
    def fails(self) -> bool:
        """Whether it makes no claim, as a dependency failed."""
        return self._failed is not None

    @property
    def is_paused(self) -> bool:
        """True if it is settled, and was refused as the queue is paused (SK-23)."""
        if self.future.exception() is not None:
            return False
        outcome = self.future.result()
        return isinstance(outcome, Refused) and outcome.reason is Reason.PAUSED

    @property
    def buries(self) -> bool:
        """Whether it makes no claim but the task dead: its last try was cut off, or a dependency failed."""
        decision = self._claimed(self._offered)
        return not isinstance(decision, Refused) and decision.status is Status.DEAD

    def _claimed(self, stored: Stored) -> Decision:
        if stored.revision != self._offered.revision and not self.is_mine(stored):
            return Refused(Reason.HELD)
        asker = self.asker
        return rules.claim(
            stored.head,
            stored.state,
            asker.holder,
            asker.worker,
            asker.term,
            over=self._over,
            failed=self._failed,
        )


def ask_of(owner: Owner, task: TaskId, asker: Asker, slot: FreeSlot | None = None) -> ClaimAsk:
    """The claim of a task that an owner offers; it is not offered again until the claim is settled."""
    failed = owner.failed_dependency(task)
    stored, over = owner.taken(task)
    return ClaimAsk(stored, asker, Epoch(owner.partition, owner.token), over=over, slot=slot, failed=failed)


def claim_for(slot: FreeSlot, clock_name: str, now: float) -> Asker:
    """The asker of a slot, for a claim that is written from ``now`` on, in seconds of ``clock_name``'s."""
    return Asker(slot.holder, slot.worker, Term(slot.ttl_s, clock_name, now + slot.ttl_s))


def keeps_slot(ask: ClaimAsk) -> bool:
    """True if it is certain that the slot of a settled ask is free still."""
    if ask.future.exception() is not None:
        return False
    outcome = ask.future.result()
    if isinstance(outcome, Refused):
        return outcome.reason is not Reason.NO_SLOT
    return outcome.state.claim is None or not ask.is_mine(outcome)


class Claiming:
    """Pairs who asks with what an owner offers. Pure, as the owner is; times are those of it."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.deposed = False
        """Whether the store has refused a claim as a later owner's epoch stands there (SK-13)."""

    def asks(self, askers: Sequence[Asker], now: float, wall: float) -> list[ClaimAsk]:
        """The writes to make, in their order: a claim for each who asks, as long as there are tasks.

        What :meth:`~rebalanser.tasks.asks.MoveAsk.write` and the engine make of each is told by
        :meth:`settled`. One that :attr:`~ClaimAsk.buries` a task serves nobody.
        """
        made: list[ClaimAsk] = []
        waiting = deque(askers)
        while waiting and (best := self.owner.best(now, wall)) is not None:
            _, task = best
            ask = ask_of(self.owner, task, waiting[0])
            made.append(ask)
            if not ask.buries:
                waiting.popleft()
        return made

    def settled(self, ask: ClaimAsk, now: float) -> Stored | None:
        """Take the outcome of an ask whose future was done not later than ``now``; the claim, if it is one.

        Raises:
            RebalanserError: what the future raised, as the engine stayed away. Nothing is known of the task
                then: it is not offered again before it has been read.
        """
        try:
            outcome = ask.future.result(timeout=0)
        except BaseException:
            self.owner.conflicted(ask.task, now)
            raise
        if isinstance(outcome, Refused):
            self._refused(ask, outcome.reason, now)
            return None
        self.owner.settled(outcome, now)
        return outcome if outcome.state.status is Status.CLAIMED and ask.is_mine(outcome) else None

    def _refused(self, ask: ClaimAsk, reason: Reason, now: float) -> None:
        self.deposed |= reason is Reason.DEPOSED
        if reason is Reason.GONE:
            self.owner.forget(ask.task)
        elif reason in {Reason.NO_SLOT, Reason.PAUSED}:
            self.owner.put_back(ask.task, now)
        else:
            self.owner.conflicted(ask.task, now)
            self.owner.learn(ask.seen, now)
