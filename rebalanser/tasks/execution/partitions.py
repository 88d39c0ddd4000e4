"""The partitions that this process owns: reads, watches and claims from them (SK-13).

``SlotOffers`` publishes this process's free slots, and follows those of other processes (SK-20). One thread
publishes, withdraws and keeps the slots. Claims that owners make for them arrive by the watch.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from rebalanser.core.group import Fact, FactKind
from rebalanser.core.tasks.claims import (
    ASIDE_S,
    Claimed,
    ClaimOwned,
    ClaimRequest,
    OwnedIndex,
    PausableClaims,
    ReadPause,
    TakeArrived,
)
from rebalanser.core.tasks.model import OPEN, Stored, TaskId
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
from rebalanser.core.tasks.store import Change, ChangesLost, FreeSlot, Names, OwnerEpoch, SlotNews, TakeOver
from rebalanser.core.tasks.writes import (
    Await,
    PendingTakeOver,
    ReadPage,
    ReadPayloads,
    ReadRates,
    ReadTasks,
    Request,
    Script,
    Submit,
    WriteHere,
    run_script,
)
from rebalanser.errors import InternalError
from rebalanser.runtime.logs import get_logger
from rebalanser.runtime.owned import Owned
from rebalanser.tasks.batcher import await_all
from rebalanser.tasks.context import Context
from rebalanser.tasks.engine import EngineWatch, SharesSlots
from rebalanser.tasks.execution.claim_source import ClaimSource, warn_of_skewed_clock
from rebalanser.tasks.loops import Loop
from rebalanser.tasks.pauses import QUEUE, Pause

TAKE_OVER: Final = "take-over"
"""Name of the trouble if partitions can't be taken over."""
READS: Final = "reads"
"""Name of the loop that reads partitions that were taken over."""
_log = get_logger()

ResultT = TypeVar("ResultT")


def _next_holder(prefix: str, numbers: Iterator[int]) -> str:
    """Return a holder that no other claim has, by a prefix that is unique to the process."""
    return f"{prefix}{next(numbers)}"


class _GivenUp(Exception):
    """A partition was given up while it was read."""


class Partitions(ClaimSource):
    """The indexes of all partitions that this process owns.

    ``worker`` is a label for people, ``buffer_s`` is waited beyond a claim's time (SK-8), ``wake`` is called
    whenever there may be something to claim. ``count`` is the number of the queue's partitions. ``take``
    and ``give_up`` are OnStart and OnStop of the group; the others are for the one thread that claims.

    If the engine shares slots, other processes claim tasks for this one, and this one for them (SK-20): see
    ``core.tasks.slots``.
    """

    def __init__(
        self, context: Context, worker: str, buffer_s: float, wake: Callable[[], None], count: int = 0
    ) -> None:
        super().__init__(context)
        self._worker = worker
        self._wake = wake
        self._count = count
        engine = context.engine
        self._slots = SlotOffers(context, engine, worker, wake) if isinstance(engine, SharesSlots) else None
        self._lock = threading.Lock()
        self._index = OwnedIndex(
            worker,
            context.clock,
            context.clock_name,
            context.ttl_s,
            buffer_s,
            partial(_next_holder, f"{secrets.token_hex(8)}-", itertools.count()),
            self._slots,
        )
        self._watch: EngineWatch | None = None
        self._claims: PausableClaims[Pause] = PausableClaims()
        self._pauses_watch: EngineWatch | None = None
        self._taken = threading.Condition(self._lock)
        self._unread: dict[int, int] = {}
        """Partitions that have not been read yet, with their tokens."""
        self._is_closed = False
        self._reads = Loop(READS, self._read_next, context.errors)

    def take(self, owned: Sequence[Owned]) -> None:
        """Take over partitions: from now on no earlier owner can claim in them.

        Another thread reads their tasks in pages, while they can be claimed. So a process can give a deep
        partition up at once to one that joins.

        A failure is a trouble until the node has left the group, joined it again, and owns its share.

        Raises:
            RetryLater: the engine was away, or a partition has a newer owner already.
        """
        try:
            self._take_all(owned)
        except Exception as error:
            self._context.errors.failed(TAKE_OVER, error)
            raise

    def on_fact(self, fact: Fact) -> None:
        """End the trouble once this process owns its whole share, also an empty one."""
        if fact.kind is FactKind.ACKNOWLEDGED:
            self._context.errors.worked(TAKE_OVER)

    def _take_all(self, owned: Sequence[Owned]) -> None:
        if self._slots is not None:
            self._slots.start()
        for each in owned:
            partition = int(each.resource)
            self._take(partition, each.token)
            with self._lock:
                self._unread[partition] = each.token
                self._taken.notify()
        with self._lock:
            if not self._reads.has_begun:
                self._reads.start()
        self._wake()

    def _read_next(self) -> bool:
        """Read the next partition that was taken over; False if there is none.

        The loop repeats a failed read after the others. The read of a partition that was given up ends.
        """
        with self._lock:
            self._taken.wait_for(lambda: self._unread or self._is_closed)
            if self._is_closed:
                return False
            partition, token = next(iter(self._unread.items()))
        try:
            run_script(self._index.read(partition), partial(self._perform_read, partition, token), self._lock)
        except _GivenUp:
            return True
        except BaseException:
            with self._lock:
                if self._unread.get(partition) == token:
                    self._unread[partition] = self._unread.pop(partition)
            raise
        finally:
            self._report()
        with self._lock:
            if self._unread.get(partition) == token:
                del self._unread[partition]
        return True

    def take_all(self) -> None:
        """Take over all partitions without a group, in a store that only this process uses.

        The revision is greater than all earlier tokens, so no earlier owner can claim.

        Raises:
            RetryLater: a partition has a newer owner already.
        """
        token = self._context.engine.page(self._context.queue, self._context.timeout_s, limit=1).revision
        for partition in range(self._count):
            self._take(partition, token)
            self._run(self._index.read(partition))

    def _take(self, partition: int, token: int) -> None:
        self._context.write(PendingTakeOver(TakeOver(self._context.queue, OwnerEpoch(partition, token))))
        with self._lock:
            self._index.add(partition, token)
        self._follow()

    def give_up(self, owned: Sequence[Owned]) -> None:
        """Claim no more in these partitions; claims that were made last on."""
        with self._lock:
            for each in owned:
                self._index.remove(int(each.resource))
                self._unread.pop(int(each.resource), None)
        self._wake()  # a worker that owned all partitions may have room for others now

    def owns(self, partition: int) -> bool:
        """True if this process owns a partition, as far as it knows."""
        with self._lock:
            return partition in self._index

    def ready_since(self, wall: float) -> float | None:
        """See ``ready_since``: from memory."""
        with self._lock:
            return self._index.ready_since(wall)

    def offer(self, rooms: Rooms) -> None:
        """Offer room for which ``claim`` finds no task in the own partitions.

        ``claim`` returns the claims that other owners make for it.
        """
        if self._slots is None:
            return
        with self._lock:
            owns_all = len(self._index) == self._count
        if not owns_all:
            self._slots.start()
        self._slots.offer({} if owns_all else self._claims.rooms(rooms))

    def retire(self) -> None:
        """Withdraw the room, and give back the claims for this process that ``claim`` did not return."""
        if self._slots is not None:
            try:
                self._slots.retire()
            except Exception as error:  # the slots end by themselves, and so do the claims
                self._context.errors.ignored("free slots", error)

    def close(self) -> None:
        """Stop reading and following changes."""
        self._context.errors.ended(TAKE_OVER)
        with self._lock:
            self._is_closed = True
            self._unread.clear()
            self._taken.notify()
        self._reads.end_soon()
        self._reads.join()
        if self._slots is not None:
            self._slots.close()
        for watch in (self._watch, self._pauses_watch):
            if watch is not None:
                watch.close()
        self._watch = self._pauses_watch = None

    def claim(
        self, limit: int, names: Collection[str] | None, worker: str | None = None, ahead: int = 0
    ) -> list[Claimed]:
        """Claim the best tasks of all partitions, at most ``limit``, that are of these functions (SK-5).

        ``names`` None is all functions. ``worker`` is the label of the claimant if it is not this process.
        The last ``ahead`` claims have no free thread yet. If other owners have made claims for the offered
        room, only those are returned. Ready tasks beyond ``limit`` are claimed for other processes.

        A claim that can't be written does not prevent others, and its task is offered again later.

        Raises:
            RebalanserError: the engine was away or takes no writes, and no claim is known. Unknown claims end
                with their time.
        """
        return run_script(self._claims.claim(limit, names, worker, ahead), self._perform_claim)

    def _perform_claim(self, request: ClaimRequest) -> list[Claimed] | Pause | None:
        match request:
            case ReadPause():
                return self._read_pause()
            case TakeArrived(limit=limit, names=names, keeps=keeps):
                arrived = [] if self._slots is None else self._slots.arrived(limit, names, keeps=keeps)
                return [Claimed(each.stored, each.held, each.sent_at) for each in arrived]
            case ClaimOwned(limit=limit, names=names, worker=worker, ahead=ahead):
                with self._lock:
                    has_nobody = limit <= 0 and not self._index.groups()
                return [] if has_nobody else self._run(self._index.claim(limit, names, worker, ahead))

    def claim_for_others(self) -> None:
        """Claim ready tasks for other processes that have room; raises what ``claim`` does."""
        self.claim(0, ())

    def report_unknown(self, names: Collection[str]) -> None:
        """Log once, for each function that is not one of these, that its tasks wait for another worker."""
        with self._lock:
            waiting = self._index.ready_names()
        self._report_unknown(waiting.difference(names))

    def next_wakeup(self, names: Collection[str] | None = None) -> float | None:
        """See ``next_wakeup``."""
        return self._claims.next_wakeup(self._context.clock.now(), lambda: self._next_task(names))

    def _next_task(self, names: Collection[str] | None) -> float | None:
        with self._lock:
            return self._index.next_wakeup(names)

    def _read_pause(self) -> Pause | None:
        """Read the queue's pause, and follow its changes."""
        context = self._context
        if self._pauses_watch is None:
            revision = context.engine.page(context.queue, context.timeout_s, limit=1).revision
            self._pauses_watch = context.engine.watch_pauses(
                context.queue, revision, self._mark_pauses_changed
            )
        self._learn_pause(context.engine.pauses(context.queue, context.timeout_s).get(QUEUE))
        return self.pause

    def _mark_pauses_changed(self) -> None:
        self._claims.changed()
        self._wake()

    def _follow(self) -> None:
        if self._watch is None:
            self._watch = self._context.watch(self._receive, self._wants)

    def _wants(self, change: Change) -> bool:
        """True if the task of a change must be read; see ``OwnedIndex.wants``."""
        try:
            with self._lock:
                wants = self._index.wants(change)
            self._report()
        except Exception as error:
            self._missed(error)
            return False
        return wants

    def _receive(self, news: Sequence[Stored] | ChangesLost) -> None:
        try:
            with self._lock:
                if isinstance(news, ChangesLost):
                    self._index.schedule_full_read()
                else:
                    self._index.learn(news)
            self._report()
        except Exception as error:
            self._missed(error)

    def _missed(self, error: Exception) -> None:
        """Schedule a full read after an error: a watch takes no exception."""
        self._context.errors.ignored("a watch", error)
        with self._lock:
            self._index.schedule_full_read()
        self._report()

    def _run(self, script: Script[ResultT]) -> ResultT:
        """Run a script of the index, and report its news before each request and at the end."""
        try:
            return run_script(script, self._perform, self._lock)
        finally:
            self._report()

    def _perform_read(self, partition: int, token: int, request: Request) -> object:
        """Make one request of a partition's read; raise if the partition was given up."""
        with self._lock:
            if self._unread.get(partition) != token:
                raise _GivenUp
        return self._perform(request)

    def _perform(self, request: Request) -> object:
        """Make one request of a script."""
        self._report()
        context = self._context
        match request:
            case ReadTasks(ids=ids):
                return context.read(ids)
            case ReadPage(partition=partition, after=after, limit=limit):
                return context.engine.page(
                    context.queue,
                    context.timeout_s,
                    partition=partition,
                    statuses=OPEN,
                    after=after,
                    limit=limit,
                )
            case ReadRates(limits=limits):
                return context.engine.rates(context.queue, limits, context.timeout_s)
            case ReadPayloads(ids=ids):
                return self._payloads(ids)
            case WriteHere(pending_writes=pending_writes):
                context.batcher.write_all(pending_writes)
                return None
            case Submit(pending_writes=pending_writes):
                context.batcher.submit_all(pending_writes)
                return None
            case Await(pending_writes=pending_writes):
                await_all(pending_writes)
                return None
            case _:
                raise InternalError(f"an index makes no request {request!r}")

    def _payloads(self, tasks: Sequence[TaskId]) -> Mapping[TaskId, bytes]:
        """Read the payloads of tasks whose claims are being written; empty if they can't be read.

        The claims must be settled whatever happens here. The next read of the payloads reports the error.
        """
        try:
            return self._context.engine.payloads(self._context.queue, tasks, self._context.timeout_s)
        except Exception:
            return {}

    def _report(self) -> None:
        """Wake and log as the index's news say."""
        if not self._index.has_news:
            return
        with self._lock:
            news = self._index.take_news()
        if news.is_paused:
            self._claims.changed()
        if news.wakes:
            self._wake()
        for each in news.skewed_clocks:
            warn_of_skewed_clock(each, self._context.queue, self._worker)
        for task, error in news.set_aside:
            _log.error(
                "a task can't be claimed and is skipped for a while",
                action="task_set_aside",
                queue=self._context.queue,
                task=task,
                pause_s=ASIDE_S,
                exc_info=error,
            )


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
        self._watch: EngineWatch | None = None
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

    def _receive(self, news: Sequence[SlotNews] | ChangesLost) -> None:
        try:
            self._learn(news)
        except Exception as error:  # a callback of a watch may not raise
            self._context.errors.ignored("a watch", error)
            self.offering.lost = True
            self._changed.set()

    def _learn(self, news: Sequence[SlotNews] | ChangesLost) -> None:
        with self._lock:
            is_due, wakes = self.offering.learn(news)
        if is_due:
            self._changed.set()
        if wakes:
            self._wake()
