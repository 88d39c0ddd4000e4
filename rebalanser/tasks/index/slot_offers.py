"""Publishes this process's free slots, and follows those of other processes (SK-20).

``SlotDecisions`` decides; it is pure, and the simulator runs it too. One thread publishes, withdraws and
keeps the slots. Claims that owners make for them arrive by the watch.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from rebalanser.core.tasks import rules
from rebalanser.core.tasks.model import Status, Stored, TaskId, Term
from rebalanser.core.tasks.rules import ClaimKey, Decision
from rebalanser.core.tasks.slots import (
    Arrival,
    FreeSlot,
    FreeSlots,
    Names,
    NewSlots,
    OwnSlots,
    Rooms,
    SlotNews,
    UsedSlot,
    is_fresh,
)
from rebalanser.core.tasks.store import Lost
from rebalanser.core.tasks.writes import Await, PendingMove, ReadTasks, ResultT, Submit, run_script
from rebalanser.errors import InternalError, LeaseNotFound, OutcomeUnknown, RebalanserError
from rebalanser.tasks.batcher import await_all
from rebalanser.tasks.context import Context
from rebalanser.tasks.engine import SharesSlots, Watch
from rebalanser.tasks.loops import Loop

LEASE_S: Final = 5.0
"""Seconds after which the slots of a worker that was killed are gone."""
RENEWALS_PER_LEASE: Final = 3
"""Renewals per lease TTL."""


@dataclass(frozen=True, slots=True)
class ArrivedClaim:
    """A claim that an owner has made for this process; its time counts from ``sent_at`` (SK-8)."""

    stored: Stored
    held: ClaimKey
    sent_at: float


@dataclass(frozen=True, slots=True)
class ReadSlots:
    """Read all slots; the answer has them, and the revision."""


@dataclass(frozen=True, slots=True)
class FollowSlots:
    """Watch slots from a revision on; no-op if they are watched already."""

    revision: int


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Grant a lease for slots; the answer is its number."""


@dataclass(frozen=True, slots=True)
class KeepLease:
    """Keep a lease."""

    lease: int


@dataclass(frozen=True, slots=True)
class EndLease:
    """End a lease, with its slots."""

    lease: int


@dataclass(frozen=True, slots=True)
class PublishSlots:
    """Publish slots, and delete used ones."""

    slots: Sequence[FreeSlot]
    used: Sequence[UsedSlot]


@dataclass(frozen=True, slots=True)
class WithdrawSlots:
    """Delete the free slots of these holders, None for all; the answer has the used ones."""

    holders: Collection[str] | None


@dataclass(frozen=True, slots=True)
class WakeClaimant:
    """Wake the thread that claims: a claim has arrived, or there is one more slot to claim for."""


SlotRequest: TypeAlias = (
    ReadSlots
    | FollowSlots
    | GrantLease
    | KeepLease
    | EndLease
    | PublishSlots
    | WithdrawSlots
    | WakeClaimant
    | ReadTasks
    | Submit
    | Await
)
SlotScript: TypeAlias = Generator[SlotRequest, Any, ResultT]


class SlotDecisions:
    """Decisions about the free slots of a queue, as one process sees them. Pure.

    ``now`` returns seconds of a monotonic clock, ``term`` the term of a claim made now, ``new_holder`` a
    unique name for a claim. Not thread-safe: one script of each method may run at a time, and other methods
    may be called while it waits for an answer.
    """

    def __init__(
        self,
        process: str,
        worker: str,
        ttl_s: float,
        now: Callable[[], float],
        term: Callable[[], Term],
        new_holder: Callable[[], str],
        lease_s: float = LEASE_S,
    ) -> None:
        self.process = process
        self.others = FreeSlots(process)
        self.own = OwnSlots()
        self.lost = True
        """True if changes may have been missed."""
        self.lease: int | None = None
        self._worker = worker
        self._ttl_s = ttl_s
        self._now = now
        self._term = term
        self._new_holder = new_holder
        self._lease_s = lease_s
        self._keep_at = 0.0
        self._looks_at = -math.inf
        """Time at which the next step begins, in seconds of ``now``."""

    def offer(self, rooms: Rooms) -> bool:
        """Offer this room for tasks only; True if the next step comes sooner.

        See ``offer``.
        """
        now = self._now()
        self.own.offer(rooms, now)
        due = self.own.next_wakeup(now)
        return due is not None and due < self._looks_at

    def groups(self) -> list[Names]:
        """Return the sets of functions for which other processes have free slots."""
        return self.others.groups()

    def take(self, names: Names) -> FreeSlot | None:
        """Take another process's slot of these functions to claim for; None if there is none."""
        return self.others.take(names)

    def settled(self, slot: FreeSlot, *, is_free: bool, is_known: bool) -> None:
        """Settle the claim for a slot; see ``SlotOffers.settled``."""
        if is_free:
            self.others.put_back(slot)
        else:
            self.others.drop(slot)
        self.lost |= not is_known

    def learn(self, news: Sequence[SlotNews] | Lost) -> tuple[bool, bool]:
        """Take changes of slots; True if a step is due, and True if there may be something to claim."""
        if isinstance(news, Lost):
            self.lost = True
            return True, False
        changes = is_news = False
        now = self._now()
        for each in news:
            if each.process == self.process:
                changes = True
                is_news |= self.own.learn(each, now)
            else:
                is_news |= self.others.learn(each)
        return changes, is_news

    def step(self) -> SlotScript[float | None]:
        """Make the reads and writes that are due; return the seconds until the next step, None until news.

        Raises:
            RebalanserError: the engine is away or takes nothing; the next step retries.
        """
        self._looks_at = -math.inf  # until the step has succeeded
        if self.lost:
            yield from self._read_all()
        yield from self._keep()
        plan = self.own.plan(self._now())
        if plan.withdraw:
            yield from self._withdraw(plan.withdraw)
        if plan.publish or plan.forget:
            used = [UsedSlot(each, self.process, "") for each in plan.forget]
            yield from self._publish(plan.publish, used)
        now = self._now()
        times = [self.own.next_wakeup(now), None if self.lease is None else self._keep_at]
        self._looks_at = min((at for at in times if at is not None), default=math.inf)
        return None if self._looks_at == math.inf else max(0.001, self._looks_at - now)

    def arrived(
        self, limit: int, names: Collection[str] | None = None, *, keeps: bool = False
    ) -> SlotScript[list[ArrivedClaim]]:
        """Take the claims that others have made for this process; see ``SlotOffers.arrived``."""
        used = list(self.own.arrived)
        if not used:
            return []
        mine = yield from self._current_claims([each.slot for each in used])
        kept: list[Arrival] = []
        now = self._now()
        arrived: list[ArrivedClaim] = []
        old: list[tuple[Stored, ClaimKey]] = []
        for arrival in used:
            holder = arrival.slot.holder
            if holder not in mine:
                continue
            stored, _ = mine[holder]
            fits = names is None or stored.head.name in names
            if not fits or len(arrived) + len(old) >= limit:
                if keeps:
                    kept.append(arrival)
                else:
                    yield Submit([_release(*mine[holder])])
            elif arrival.offered is not None and is_fresh(arrival.offered.sent_at, now, self._ttl_s):
                arrived.append(ArrivedClaim(*mine[holder], arrival.offered.sent_at))
            else:
                old.append(mine[holder])
        if old:
            arrived += yield from self._renewed(old)
        self.own.arrived[: len(used)] = [*(each for each in used if each not in kept), *kept]
        self.own.take_arrived(len(used) - len(kept))
        return arrived

    def retire(self) -> SlotScript[None]:
        """Withdraw all slots, and give back claims for them that were not taken."""
        if self.lease is not None:
            yield from self._withdraw(None)
        used = [each.slot for each in self.own.arrived]  # also those used before a lease ended
        self.own.take_arrived(len(used))
        if used:
            mine = yield from self._current_claims(used)
            yield Submit([_release(*each) for each in mine.values()])
        if self.lease is not None:
            yield EndLease(self.lease)

    def _read_all(self) -> SlotScript[None]:
        """Read all slots: at first, and whenever changes may have been missed."""
        self.lost = False
        try:
            slots, revision = yield ReadSlots()
            self.others.replace(slots, revision)
            self.own.replace([each for each in slots if each.process == self.process], self._now())
            yield FollowSlots(revision)
        except BaseException:
            self.lost = True
            raise
        yield WakeClaimant()

    def _keep(self) -> SlotScript[None]:
        now = self._now()
        if self.lease is None or now < self._keep_at:
            return
        try:
            yield KeepLease(self.lease)
        except LeaseNotFound:
            self._lease_ended()
        self._keep_at = now + self._lease_s / RENEWALS_PER_LEASE

    def _withdraw(self, holders: Collection[str] | None) -> SlotScript[None]:
        used: Sequence[UsedSlot] = yield WithdrawSlots(holders)
        for each in used:
            self.own.used(each, self._now())
        self.own.gone(list(self.own.offered) if holders is None else holders)
        if used:
            yield WakeClaimant()

    def _publish(self, new: Sequence[NewSlots], used: Sequence[UsedSlot]) -> SlotScript[None]:
        """Publish slots with new holders; delete used ones."""
        if self.lease is None:
            self._keep_at = self._now() + self._lease_s / RENEWALS_PER_LEASE
            self.lease = yield GrantLease()
        assert self.lease is not None
        slots = [
            self._slot(self.lease, each.names, ahead=number >= each.count - each.ahead)
            for each in new
            for number in range(each.count)
        ]
        # Counted from before the request is sent: an owner can't have used it earlier (SK-8).
        self.own.published(slots, self._now())
        try:
            yield PublishSlots(slots, used)
        except OutcomeUnknown:
            self.lost = True
            raise
        except LeaseNotFound:
            self._lease_ended()
        except RebalanserError:
            self.own.gone([each.holder for each in slots])
            raise
        else:
            self.own.forgotten([each.holder for each in used])

    def _slot(self, lease: int, names: Names, *, ahead: bool) -> FreeSlot:
        return FreeSlot(self._new_holder(), self.process, self._worker, names, self._ttl_s, lease, ahead)

    def _lease_ended(self) -> None:
        """Forget the lease: the store has deleted its slots, as this process was paused or cut off."""
        self.lease = None
        self.own.lease_ended()

    def _current_claims(self, used: Sequence[UsedSlot]) -> SlotScript[dict[str, tuple[Stored, ClaimKey]]]:
        """Read the current claims among those made for slots, by holder."""
        found: Mapping[TaskId, Stored] = yield ReadTasks([each.task for each in used])
        mine: dict[str, tuple[Stored, ClaimKey]] = {}
        for each in used:
            stored = found.get(each.task)
            claim = None if stored is None else stored.state.claim
            if stored is None or claim is None or stored.state.status is not Status.CLAIMED:
                continue
            if claim.holder == each.holder:
                mine[each.holder] = stored, ClaimKey(claim.number, claim.holder)
        return mine

    def _renewed(self, claims: Sequence[tuple[Stored, ClaimKey]]) -> SlotScript[list[ArrivedClaim]]:
        """Renew claims of old slots; return those that are still current."""
        sent_at, term = self._now(), self._term()
        pending_writes = [
            (held, PendingMove(stored, partial(_renewed, held=held, term=term))) for stored, held in claims
        ]
        yield Submit([pending for _, pending in pending_writes])
        yield Await([pending for _, pending in pending_writes])
        settled = [(held, pending.future.result()) for held, pending in pending_writes]
        return [ArrivedClaim(stored, held, sent_at) for held, stored in settled if isinstance(stored, Stored)]


class SlotOffers:
    """The free slots of a queue as one process sees them. May be used from any thread.

    ``wake`` is called when a claim has arrived, or when there is one more slot to claim for.
    """

    def __init__(self, context: Context, engine: SharesSlots, worker: str, wake: Callable[[], None]) -> None:
        self.offering = SlotDecisions(
            secrets.token_hex(8),
            worker,
            context.ttl_s,
            context.clock.now,
            context.term,
            lambda: secrets.token_hex(8),
        )
        self._context = context
        self._engine = engine
        self._wake = wake
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._due_in_s: float | None = 0.0
        self._watch: Watch | None = None
        self._ending = False
        self._loop = Loop("slots", self._step, context.errors)

    @property
    def process(self) -> str:
        """Name of this process's slots."""
        return self.offering.process

    def start(self) -> None:
        """Begin to publish and watch slots. Starting twice does nothing."""
        with self._lock:
            if self._ending or self._loop.has_begun:
                return
            self._loop.start()

    def offer(self, rooms: Rooms) -> None:
        """Offer room for tasks; see ``SlotDecisions.offer``."""
        with self._lock:
            if self.offering.offer(rooms):
                self._changed.set()

    def groups(self) -> list[Names]:
        """Return the sets of functions for which other processes have free slots."""
        if not self.offering.others:
            return []
        with self._lock:
            return self.offering.groups()

    def take(self, names: Names) -> FreeSlot | None:
        """Take another process's slot of these functions to claim for; None if there is none."""
        with self._lock:
            return self.offering.take(names)

    def settled(self, slot: FreeSlot, *, is_free: bool, is_known: bool) -> None:
        """Settle the claim for a slot: it was used, or may have been, unless it ``is_free``.

        Unless the outcome ``is_known``, all slots are read again: no news comes of a slot that is still free,
        and it would never be used.
        """
        with self._lock:
            self.offering.settled(slot, is_free=is_free, is_known=is_known)
        if not is_known:
            self._changed.set()

    def arrived(
        self, limit: int, names: Collection[str] | None = None, *, keeps: bool = False
    ) -> list[ArrivedClaim]:
        """Take at most ``limit`` claims that others have made for this process, of these functions.

        ``names`` None is all functions. The other claims are given back at once, as the threads of their
        slots have begun something else meanwhile, unless this ``keeps`` them for the next call.

        Raises:
            RebalanserError: the engine was away; the next call returns them.
        """
        script = self.offering.arrived(limit, names, keeps=keeps)
        return run_script(script, self._perform, self._lock)

    def retire(self) -> None:
        """Withdraw the slots, and give back claims for them that were not taken.

        It takes little longer than slots last, even while the engine is away.

        Raises:
            RebalanserError: the engine was away: the slots end with their lease, claims for them in time.
        """
        with self._lock:
            if self._ending:
                return
            self._ending = True
        self._changed.set()
        self._loop.end_soon()
        self._loop.join(LEASE_S)
        run_script(self.offering.retire(), partial(self._perform, timeout_s=LEASE_S), self._lock)

    def close(self) -> None:
        """Stop watching slots. Closing twice does nothing."""
        with self._lock:
            self._ending = True
        self._changed.set()
        self._loop.end_soon()
        self._loop.join(self._context.timeout_s)
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _step(self) -> bool:
        self._changed.wait(self._due_in_s)
        self._changed.clear()
        if self._ending:
            return False
        self._due_in_s = 0.0  # until the step has succeeded
        self._due_in_s = run_script(self.offering.step(), self._perform, self._lock)
        return True

    def _perform(self, request: SlotRequest, timeout_s: float | None = None) -> Any:
        """Make one request of a script. The lock is not held."""
        context = self._context
        timeout_s = context.timeout_s if timeout_s is None else timeout_s
        match request:
            case ReadSlots():
                return self._engine.slots(context.queue, timeout_s)
            case FollowSlots(revision=revision):
                if self._watch is None:
                    self._watch = self._engine.watch_slots(context.queue, revision, self._receive)
            case WakeClaimant():
                self._wake()
            case ReadTasks(ids=ids):
                return context.read(ids)
            case Submit(pending_writes=pending_writes):
                context.batcher.submit_all(pending_writes)
            case Await(pending_writes=pending_writes):
                await_all(pending_writes)
            case _:
                return self._write(request, timeout_s)
        return None

    def _write(self, request: SlotRequest, timeout_s: float) -> Any:
        match request:
            case GrantLease():
                return self._engine.grant_slots(LEASE_S, timeout_s)
            case KeepLease(lease=lease):
                self._engine.keep_slots(lease, timeout_s)
            case EndLease(lease=lease):
                self._engine.end_slots(lease, timeout_s)
            case PublishSlots(slots=slots, used=used):
                self._engine.publish_slots(self._context.queue, slots, used, timeout_s)
            case WithdrawSlots(holders=holders):
                return self._engine.withdraw_slots(self._context.queue, self.process, holders, timeout_s)
            case _:
                raise InternalError(f"slots make no request {request!r}")
        return None

    def _receive(self, news: Sequence[SlotNews] | Lost) -> None:
        try:
            self._learn(news)
        except Exception as error:  # a callback of a watch may not raise
            self._context.errors.ignored("a watch", error)
            self.offering.lost = True
            self._changed.set()

    def _learn(self, news: Sequence[SlotNews] | Lost) -> None:
        with self._lock:
            is_due, wakes = self.offering.learn(news)
        if is_due:
            self._changed.set()
        if wakes:
            self._wake()


def _release(stored: Stored, held: ClaimKey) -> PendingMove:
    return PendingMove(stored, partial(_released, held=held), lasting=True)


def _released(stored: Stored, held: ClaimKey) -> Decision:
    return rules.release(stored.state, held)


def _renewed(stored: Stored, held: ClaimKey, term: Term) -> Decision:
    return rules.renew(stored.state, held, term)
