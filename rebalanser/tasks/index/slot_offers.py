"""Publishes this process's free slots, and follows those of other processes (SK-20).

``core.tasks.slots`` decides. One thread publishes, withdraws and keeps the slots. Claims that owners make for
them arrive by the watch.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from rebalanser.core.tasks.slots import (
    LEASE_S,
    ArrivedClaim,
    EndLease,
    FollowSlots,
    GrantLease,
    KeepLease,
    PublishSlots,
    ReadSlots,
    Rooms,
    SlotDecisions,
    SlotRequest,
    WakeClaimant,
    WithdrawSlots,
)
from rebalanser.core.tasks.store import FreeSlot, Lost, Names, SlotNews
from rebalanser.core.tasks.writes import Await, ReadTasks, Submit, run_script
from rebalanser.errors import InternalError
from rebalanser.tasks.batcher import await_all
from rebalanser.tasks.context import Context
from rebalanser.tasks.engine import SharesSlots, Watch
from rebalanser.tasks.loops import Loop


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
