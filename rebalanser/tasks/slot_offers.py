"""Offers this process's free slots in the store, and follows those of other processes (SK-20).

One thread publishes, withdraws and keeps what :class:`~rebalanser.tasks.free_slots.OwnSlots` decides. The
claims that others make for the slots arrive by the watch.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from rebalanser.errors import LeaseNotFound, OutcomeUnknown, RebalanserError
from rebalanser.tasks import rules
from rebalanser.tasks.asks import MoveAsk
from rebalanser.tasks.context import Context
from rebalanser.tasks.engine import Lost, SharesSlots, Watch
from rebalanser.tasks.free_slots import (
    FreeSlot,
    FreeSlots,
    OwnSlots,
    SlotNews,
    UsedSlot,
    is_fresh,
)
from rebalanser.tasks.loops import Loop
from rebalanser.tasks.model import Status, Stored, Term
from rebalanser.tasks.rules import Decision, Held

LEASE_S: Final = 5.0
"""Seconds after which the slots of a worker that was killed are gone."""
KEEPS: Final = 3
"""How many times a lease is kept in its time."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A claim that an owner has made for this process, and from when on its time counts (SK-8)."""

    stored: Stored
    held: Held
    sent_at: float


class SlotOffers:
    """The free slots of a queue as one process sees them. May be used from any thread.

    ``wake`` is called when a claim has arrived, or when there is one more slot to claim for.
    """

    def __init__(self, context: Context, engine: SharesSlots, worker: str, wake: Callable[[], None]) -> None:
        self.process = secrets.token_hex(8)
        self._context = context
        self._engine = engine
        self._worker = worker
        self._wake = wake
        self._lock = threading.Lock()
        self._others = FreeSlots(self.process)
        self._own = OwnSlots()
        self._changed = threading.Event()
        self._due_in_s: float | None = 0.0
        self._looks_at = -math.inf
        """When the thread looks for writes that are due, in seconds of the context's clock."""
        self._lost = True
        self._watch: Watch | None = None
        self._lease: int | None = None
        self._keep_at = 0.0
        self._ending = False
        self._loop = Loop("slots", self._step, context.errors)

    def start(self) -> None:
        """Begin to follow slots. Starting twice does nothing."""
        with self._lock:
            if self._ending or self._loop.has_begun:
                return
            self._loop.start()

    def offer(self, idle: int, room: int, names: Collection[str]) -> None:
        """This process has idle threads, and room for so many tasks; see :meth:`OwnSlots.offer`."""
        now = self._context.clock.now()
        with self._lock:
            self._own.offer(idle, room, names, now)
            due = self._own.next_wakeup(now)
            if due is not None and due < self._looks_at:
                self._changed.set()

    def groups(self) -> list[frozenset[str]]:
        """The sets of functions for which other processes have free slots."""
        if not self._others:
            return []
        with self._lock:
            return self._others.groups()

    def take(self, names: frozenset[str]) -> FreeSlot | None:
        """Take another process's slot of these functions to claim for; None if there is none."""
        with self._lock:
            return self._others.take(names)

    def settled(self, slot: FreeSlot, *, is_free: bool, is_known: bool) -> None:
        """The claim for a slot is settled: it was used, or may have been, unless it ``is_free`` still.

        Unless the outcome ``is_known`` all slots are read: one that is free brings no news, and would not be
        used any more.
        """
        with self._lock:
            if is_free:
                self._others.put_back(slot)
            else:
                self._others.drop(slot)
        if not is_known:
            self._lost = True
            self._changed.set()

    def arrived(self, limit: int) -> list[Arrived]:
        """The claims that others have made for this process since the last call, at most ``limit``.

        Those beyond that are given back at once: the threads of their slots have begun something else
        meanwhile.

        Raises:
            RebalanserError: the engine was away; the next call answers them.
        """
        with self._lock:
            used = list(self._own.arrived)
        if not used:
            return []
        mine = self._mine([slot for slot, _ in used])
        now, ttl_s = self._context.clock.now(), self._context.ttl_s
        arrived: list[Arrived] = []
        old: list[tuple[Stored, Held]] = []
        for slot, published_at in used:
            if slot.holder not in mine:
                continue
            if len(arrived) + len(old) >= limit:
                self._release(*mine[slot.holder])
            elif published_at is not None and is_fresh(published_at, now, ttl_s):
                arrived.append(Arrived(*mine[slot.holder], published_at))
            else:
                old.append(mine[slot.holder])
        arrived += self._renewed(old) if old else []
        with self._lock:
            self._own.take_arrived(len(used))
        return arrived

    def retire(self) -> None:
        """Offer no more slots, and give back what was claimed for them and not taken.

        It takes little longer than slots last, also while the engine is away.

        Raises:
            RebalanserError: the engine was away: the slots end with their lease, claims for them in time.
        """
        with self._lock:
            if self._ending:
                return
            self._ending = True
        self._changed.set()
        self._loop.hurry()
        self._loop.join(LEASE_S)
        if self._lease is not None:
            self._withdraw(None, LEASE_S)
        self._give_back()  # what was used before a lease ended, too
        if self._lease is not None:
            self._engine.end_slots(self._lease, LEASE_S)

    def close(self) -> None:
        """Follow no more. Closing twice does nothing."""
        with self._lock:
            self._ending = True
        self._changed.set()
        self._loop.hurry()
        self._loop.join(self._context.timeout_s)
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _step(self) -> bool:
        self._changed.wait(self._due_in_s)
        self._changed.clear()
        if self._ending:
            return False
        self._due_in_s, self._looks_at = 0.0, -math.inf  # until the step has succeeded
        if self._lost:
            self._read_all()
        self._keep()
        self._carry_out()
        self._due_in_s = self._pause_s()
        return True

    def _pause_s(self) -> float | None:
        now = self._context.clock.now()
        with self._lock:
            times = [self._own.next_wakeup(now), None if self._lease is None else self._keep_at]
            self._looks_at = min((at for at in times if at is not None), default=math.inf)
        return None if self._looks_at == math.inf else max(0.001, self._looks_at - now)

    def _read_all(self) -> None:
        """Read all slots: at first, and once changes may have been missed."""
        self._lost = False
        try:
            slots, revision = self._engine.slots(self._context.queue, self._context.timeout_s)
            with self._lock:
                self._others.replace(slots, revision)
                mine = [each for each in slots if each.process == self.process]
                self._own.replace(mine, self._context.clock.now())
            if self._watch is None:
                self._watch = self._engine.watch_slots(self._context.queue, revision, self._told)
        except BaseException:
            self._lost = True
            raise
        self._wake()

    def _told(self, news: Sequence[SlotNews] | Lost) -> None:
        try:
            self._learn(news)
        except Exception as error:  # to a watch nothing may be raised
            self._context.errors.ignored("a watch", error)
            self._lost = True
            self._changed.set()

    def _learn(self, news: Sequence[SlotNews] | Lost) -> None:
        if isinstance(news, Lost):
            self._lost = True
            self._changed.set()
            return
        is_news = changes = False
        now = self._context.clock.now()
        with self._lock:
            for each in news:
                if each.process == self.process:
                    changes = True
                    is_news |= self._own.learn(each, now)
                else:
                    is_news |= self._others.learn(each)
        if changes:
            self._changed.set()
        if is_news:
            self._wake()

    def _carry_out(self) -> None:
        """Make the writes that are due."""
        with self._lock:
            plan = self._own.plan(self._context.clock.now())
        if plan.withdraw:
            self._withdraw(plan.withdraw, self._context.timeout_s)
        if plan.publish or plan.forget:
            self._publish(
                plan.publish, plan.ahead, [UsedSlot(each, self.process, "") for each in plan.forget]
            )

    def _withdraw(self, holders: Collection[str] | None, timeout_s: float) -> None:
        used = self._engine.withdraw_slots(self._context.queue, self.process, holders, timeout_s)
        with self._lock:
            for each in used:
                self._own.used(each, self._context.clock.now())
            self._own.gone(list(self._own.offered) if holders is None else holders)
        if used:
            self._wake()

    def _publish(self, count: int, ahead: int, used: Sequence[UsedSlot]) -> None:
        """Publish slots by new holders, the last ``ahead`` of them as such, and delete used ones."""
        context = self._context
        if self._lease is None:
            self._keep_at = context.clock.now() + LEASE_S / KEEPS
            self._lease = self._engine.grant_slots(LEASE_S, context.timeout_s)
        with self._lock:
            slots = [self._slot(self._lease, ahead=number >= count - ahead) for number in range(count)]
            # Counted from before the request is sent: an owner can't have used it earlier (SK-8).
            self._own.published([each.holder for each in slots], context.clock.now())
        try:
            self._engine.publish_slots(context.queue, slots, used, context.timeout_s)
        except OutcomeUnknown:
            self._lost = True
            raise
        except LeaseNotFound:
            self._lease_ended()
        except RebalanserError:
            with self._lock:
                self._own.gone([each.holder for each in slots])
            raise
        else:
            with self._lock:
                self._own.forgotten([each.holder for each in used])

    def _slot(self, lease: int, *, ahead: bool) -> FreeSlot:
        holder, ttl_s = secrets.token_hex(8), self._context.ttl_s
        return FreeSlot(holder, self.process, self._worker, self._own.names, ttl_s, lease, ahead)

    def _keep(self) -> None:
        now = self._context.clock.now()
        if self._lease is None or now < self._keep_at:
            return
        try:
            self._engine.keep_slots(self._lease, self._context.timeout_s)
        except LeaseNotFound:
            self._lease_ended()
        self._keep_at = now + LEASE_S / KEEPS

    def _lease_ended(self) -> None:
        """The store has deleted the slots, as this process was paused or cut off."""
        self._lease = None
        with self._lock:
            self._own.lease_ended()

    def _mine(self, used: Sequence[UsedSlot]) -> dict[str, tuple[Stored, Held]]:
        """Those of the claims made for slots that are current, by holder."""
        found = self._context.read([each.task for each in used])
        mine: dict[str, tuple[Stored, Held]] = {}
        for each in used:
            stored = found.get(each.task)
            claim = None if stored is None else stored.state.claim
            if stored is None or claim is None or stored.state.status is not Status.CLAIMED:
                continue
            if claim.holder == each.holder:
                mine[each.holder] = stored, Held(claim.number, claim.holder)
        return mine

    def _renewed(self, claims: Sequence[tuple[Stored, Held]]) -> list[Arrived]:
        """Renew claims of old slots; those that are current still."""
        sent_at, term = self._context.clock.now(), self._context.term()
        asks = [(held, MoveAsk(stored, partial(_renewed, held=held, term=term))) for stored, held in claims]
        self._context.ledger.submit_all([ask for _, ask in asks])
        settled = [(held, ask.future.result()) for held, ask in asks]
        return [Arrived(stored, held, sent_at) for held, stored in settled if isinstance(stored, Stored)]

    def _give_back(self) -> None:
        """Release what was claimed for this process and not taken: the try is not counted."""
        with self._lock:
            used = [slot for slot, _ in self._own.arrived]
            self._own.take_arrived(len(used))
        for stored, held in self._mine(used).values() if used else ():
            self._release(stored, held)

    def _release(self, stored: Stored, held: Held) -> None:
        self._context.submit(MoveAsk(stored, partial(_released, held=held), lasting=True))


def _released(stored: Stored, held: Held) -> Decision:
    return rules.release(stored.state, held)


def _renewed(stored: Stored, held: Held, term: Term) -> Decision:
    return rules.renew(stored.state, held, term)
