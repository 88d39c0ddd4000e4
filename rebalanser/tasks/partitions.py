"""The partitions that this process owns: what it reads of them, follows, and claims from them (SK-13)."""

from __future__ import annotations

import concurrent.futures
import heapq
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from rebalanser.protocol import Fact, FactKind
from rebalanser.runtime.logs import get_logger
from rebalanser.runtime.owned import Owned
from rebalanser.tasks.asks import TakeOverAsk
from rebalanser.tasks.claim_source import MAX_CLAIMS, Claimed, ClaimSource, warn_of_clock
from rebalanser.tasks.claiming import Asker, ClaimAsk, Claiming, ask_of, claim_for, keeps_slot
from rebalanser.tasks.clocks import FarClock, FarClocks
from rebalanser.tasks.context import Context
from rebalanser.tasks.engine import Change, Epoch, Lost, SharesSlots, TakeOver, Watch
from rebalanser.tasks.loops import ErrorKind, kind_of
from rebalanser.tasks.model import OPEN, Status, Stored, TaskId
from rebalanser.tasks.owner import Owner
from rebalanser.tasks.pauses import QUEUE
from rebalanser.tasks.rules import Held
from rebalanser.tasks.slot_offers import SlotOffers

TAKE_OVER: Final = "take-over"
"""Name of the trouble of partitions that could not be taken over."""
PAGE: Final = 1000
ASIDE_S: Final = 60.0
"""Seconds before a task is offered again whose claim alone can't be written."""
_log = get_logger()


class Partitions(ClaimSource):
    """The indexes of all partitions that this process owns.

    ``worker`` is a label for people, ``buffer_s`` is waited beyond a claim's time (SK-8), ``wake`` is called
    whenever there may be something to claim. ``count`` is the number of the queue's partitions. :meth:`take`
    and :meth:`give_up` are OnStart and OnStop of the group; the others are for the one thread that claims.

    Where the engine shares slots, other processes claim for this one what it has room for, and this one for
    them (SK-20): see :mod:`~rebalanser.tasks.free_slots`.
    """

    def __init__(
        self, context: Context, worker: str, buffer_s: float, wake: Callable[[], None], count: int = 0
    ) -> None:
        super().__init__(context)
        self._worker = worker
        self._buffer_s = buffer_s
        self._wake = wake
        self._count = count
        engine = context.engine
        self._slots = SlotOffers(context, engine, worker, wake) if isinstance(engine, SharesSlots) else None
        self._lock = threading.Lock()
        self._owners: dict[int, Claiming] = {}
        self._far_clocks = FarClocks()
        self._aside: dict[TaskId, float] = {}
        """When each of these tasks, whose claims can't be written, is offered again."""
        self._lost = False
        self._watch: Watch | None = None
        self._pauses_changed = True
        self._pauses_watch: Watch | None = None

    def take(self, owned: Sequence[Owned]) -> None:
        """Take over partitions: from now on no earlier owner can claim in them.

        A failure is a trouble until the node, which leaves the group and joins it again, owns its share.

        Raises:
            RetryLater: the engine was away, or somebody newer owns a partition already.
        """
        try:
            self._take_all(owned)
        except Exception as error:
            self._context.errors.failed(TAKE_OVER, error)
            raise

    def heard(self, fact: Fact) -> None:
        """End the trouble once this process owns all of its share, of whatever size."""
        if fact.kind is FactKind.ACKNOWLEDGED:
            self._context.errors.worked(TAKE_OVER)

    def _take_all(self, owned: Sequence[Owned]) -> None:
        if self._slots is not None:
            self._slots.start()
        for each in owned:
            self._take(int(each.resource), each.token)
        self._wake()

    def take_all(self) -> None:
        """Take over all partitions without a group, in a store that only this process uses.

        A revision is greater than each token before it, so that an owner before this one can't claim.

        Raises:
            RetryLater: somebody newer owns a partition already.
        """
        token = self._context.engine.page(self._context.queue, self._context.timeout_s, limit=1).revision
        for partition in range(self._count):
            self._take(partition, token)

    def _take(self, partition: int, token: int) -> None:
        self._context.write(TakeOverAsk(TakeOver(self._context.queue, Epoch(partition, token))))
        owner = Owner(partition, token, buffer_s=self._buffer_s, clock=self._context.clock_name)
        with self._lock:
            self._owners[partition] = Claiming(owner)
        self._follow()
        self._read(partition)

    def give_up(self, owned: Sequence[Owned]) -> None:
        """Claim no more in these partitions; claims that were made last on."""
        with self._lock:
            for each in owned:
                self._owners.pop(int(each.resource), None)
        self._wake()  # a worker that owned all partitions may have room for others now

    def owns(self, partition: int) -> bool:
        """Whether this process owns a partition, as far as it knows."""
        with self._lock:
            return partition in self._owners

    def ready_since(self, wall: float) -> float | None:
        """See :meth:`~rebalanser.tasks.claim_source.ClaimSource.ready_since`: from memory."""
        with self._lock:
            found = [each.owner.ready_since(wall) for each in self._owners.values()]
        return min((since for since in found if since is not None), default=None)

    def offer(self, idle: int, room: int, names: Collection[str]) -> None:
        """This process has ``idle`` threads that find nothing of these functions in its own partitions.

        ``room`` says how many tasks it takes, which is more where it claims ahead. What other owners claim
        for it is answered by :meth:`claim`.
        """
        if self._slots is None:
            return
        if self.pause is not None:
            idle = room = 0
        with self._lock:
            owns_all = len(self._owners) == self._count
        if not owns_all:
            self._slots.start()
        self._slots.offer(0 if owns_all else idle, 0 if owns_all else room, names)

    def retire(self) -> None:
        """Offer no more room, and give back what was claimed for this process and not answered."""
        if self._slots is not None:
            try:
                self._slots.retire()
            except Exception as error:  # the slots end by themselves, and so do the claims
                self._context.errors.ignored("free slots", error)

    def close(self) -> None:
        """Follow no changes any more."""
        self._context.errors.ended(TAKE_OVER)
        if self._slots is not None:
            self._slots.close()
        for watch in (self._watch, self._pauses_watch):
            if watch is not None:
                watch.close()
        self._watch = self._pauses_watch = None

    def claim(self, limit: int, names: Collection[str] | None, worker: str | None = None) -> list[Claimed]:
        """Claim the best tasks of all partitions, at most ``limit``, that are of these functions (SK-5).

        Of any function where ``names`` is None; the others stay for who asks for them. ``worker`` is the
        label of who claims, where it is not this process. What others have claimed for the room that was
        offered comes first, and by itself. What is ready beyond ``limit`` is claimed for other processes.

        A claim that can't be written keeps no other from being made, nor its task from being offered later.

        Raises:
            RebalanserError: the engine was away or takes nothing, and nothing is known to be claimed; what
                was is over in time.
        """
        self._look_at_pause()
        if self.pause is not None:
            self._arrived(0)  # gives them back
            return []
        if arrived := self._arrived(limit):
            return arrived
        if limit <= 0 and not self._groups():
            return []
        self._catch_up()
        sent_at = self._context.clock.now()
        asks = self._asks(min(limit, MAX_CLAIMS), names, worker or self._worker)
        asks += self._asks_for_others(MAX_CLAIMS - len(asks))
        if not asks:
            return []
        self._context.ledger.submit_all([ask for _, ask in asks])
        # A payload never changes (SK-2), so it need not be read after the claim is known.
        payloads = self._payloads([ask.task for _, ask in asks if ask.slot is None])
        claimed: list[Claimed] = []
        failed: list[Exception] = []
        # All are settled, whatever became of one: a task whose claim is not would never be offered again.
        for claiming, ask in asks:
            try:
                made = self._settled(claiming, ask, sent_at)
            except Exception as error:
                failed.append(error)
            else:
                claimed += [] if made is None else [replace(made, payload=payloads.get(ask.task))]
            if ask.slot is not None and self._slots is not None:
                is_known = ask.future.exception() is None
                self._slots.settled(ask.slot, is_free=keeps_slot(ask), is_known=is_known)
        if failed and not claimed:
            raise failed[0]
        return claimed

    def lend(self) -> None:
        """Claim what is ready for other processes that have room; raises what :meth:`claim` does."""
        self.claim(0, ())

    def report_strange(self, names: Collection[str]) -> None:
        """Log once, for each function that is not one of these, that its tasks wait for another worker."""
        with self._lock:
            waiting = {name for each in self._owners.values() for name in each.owner.names()}
        self._report_strange(waiting.difference(names))

    def next_wakeup(self, names: Collection[str] | None = None) -> float | None:
        """When there may be something of these functions to claim, None being all, in seconds of the clock.

        Or something to claim for other processes that have room. None if only news can bring it.
        """
        now, wall = self._context.clock.now(), self._context.clock.wall()
        if self._pauses_changed:
            return now
        if self.pause is not None:
            return None
        groups = self._groups()
        wanted: list[Collection[str] | None] = [*groups]
        if names is None or names:
            wanted.append(names)
        if not wanted:
            return None
        with self._lock:
            # Each step asks for some of the dependencies only: others may be those that are complete.
            if self._lost or any(each.owner.unknown_dependencies(1) for each in self._owners.values()):
                return now
            owners = [each.owner for each in self._owners.values()]
            wakeups = [owner.next_wakeup(now, wall, each) for owner in owners for each in wanted]
            wakeups += self._aside.values()
        return min((at for at in wakeups if at is not None), default=None)

    def _look_at_pause(self) -> None:
        """Read whether the queue is paused, if that may have changed since it was read."""
        context = self._context
        if self._pauses_watch is None:
            revision = context.engine.page(context.queue, context.timeout_s, limit=1).revision
            self._pauses_watch = context.engine.watch_pauses(context.queue, revision, self._pauses_told)
        if not self._pauses_changed:
            return
        self._pauses_changed = False
        try:
            self._learn_pause(context.engine.pauses(context.queue, context.timeout_s).get(QUEUE))
        except BaseException:
            self._pauses_changed = True
            raise

    def _pauses_told(self) -> None:
        self._pauses_changed = True
        self._wake()

    def _follow(self) -> None:
        if self._watch is None:
            revision = self._context.engine.page(
                self._context.queue, self._context.timeout_s, limit=1
            ).revision
            self._watch = self._context.engine.watch(self._context.queue, revision, self._told, self._wants)

    def _wants(self, change: Change) -> bool:
        """Whether the task of a change must be read: not if nothing more is to be learnt from it.

        That a task is complete is all that matters of it, here or in other partitions; one that is dead or
        cancelled is read if something here waits for it and must not. And a claim that is being written here
        is told of by its outcome.
        """
        try:
            return self._is_wanted(change)
        except Exception as error:
            self._missed(error)
            return False

    def _missed(self, error: Exception) -> None:
        """A change was told and not learnt: all is read again. To a watch nothing may be raised."""
        self._context.errors.ignored("a watch", error)
        with self._lock:
            self._lost = True
        self._wake()

    def _is_wanted(self, change: Change) -> bool:
        is_news = wakes = False
        with self._lock:
            if change.status is Status.COMPLETED:
                for each in self._owners.values():
                    wakes |= each.owner.completed(change.task, change.partition, change.revision)
            else:
                for each in self._owners.values():
                    wakes |= each.owner.heard(change.task, change.status)
                claiming = self._owners.get(change.partition)
                is_news = claiming is not None and not (
                    change.status is Status.CLAIMED and claiming.owner.is_taken(change.task)
                )
        if wakes:
            self._wake()
        return is_news

    def _told(self, news: Sequence[Stored] | Lost) -> None:
        try:
            self._learn_all(news)
        except Exception as error:
            self._missed(error)

    def _learn_all(self, news: Sequence[Stored] | Lost) -> None:
        now = self._context.clock.now()
        far: list[FarClock] = []
        with self._lock:
            if isinstance(news, Lost):
                self._lost = True
            else:
                for stored in news:
                    self._learn(stored, now)
                far = self._look_at_clocks([each for each in news if _is_new(each)], are_new=True)
        self._wake()
        self._warn(far)

    def _learn(self, stored: Stored, now: float) -> None:
        """Tell the owner of its partition; that a task is complete may matter to every owner."""
        claiming = self._owners.get(stored.partition)
        is_complete = stored.state.status is Status.COMPLETED
        for each in self._owners.values() if is_complete else () if claiming is None else (claiming,):
            each.owner.learn(stored, now)

    def _read(self, partition: int) -> None:
        """Read the open tasks of a partition, page by page; what changes meanwhile is told by the watch.

        What is read can be claimed at once, while the rest of a deep queue is read.
        """
        after: TaskId | None = None
        while True:
            page = self._context.engine.page(
                self._context.queue,
                self._context.timeout_s,
                partition=partition,
                statuses=OPEN,
                after=after,
                limit=PAGE,
            )
            now = self._context.clock.now()
            with self._lock:
                for stored in page.items:
                    self._learn(stored, now)
                far = self._look_at_clocks(page.items, are_new=False)
            self._warn(far)
            if page.items:
                self._wake()
            after = page.next
            if after is None:
                return

    def _catch_up(self) -> None:
        """Read what must be read before anything can be said of it."""
        with self._lock:
            lost, self._lost = self._lost, False
            partitions = list(self._owners)
            if lost:
                for each in self._owners.values():
                    each.owner.doubt_dependencies()
        try:
            for partition in partitions if lost else ():
                self._read(partition)
        except BaseException:
            self._lost = True
            raise
        with self._lock:
            owners = [each.owner for each in self._owners.values()]
            now = self._context.clock.now()
            self._aside = {task: until for task, until in self._aside.items() if until > now}
            doubtful = {
                task: owner for owner in owners for task in owner.doubtful() if task not in self._aside
            }
            needed = {task for owner in owners for task in owner.ask_dependencies(PAGE)}
        if not doubtful and not needed:
            return
        found = self._context.read([*doubtful, *needed])
        now = self._context.clock.now()
        with self._lock:
            for task, owner in doubtful.items():
                stored = found.get(task)
                if stored is None:
                    owner.forget(task)
                else:
                    owner.learn(stored, now)
            for task in needed:
                stored = found.get(task)
                for owner in owners:
                    owner.learn_dependency(task, None if stored is None else stored.state.status)

    def _arrived(self, limit: int) -> list[Claimed]:
        """The claims that other owners have made for this process, at most ``limit``."""
        arrived = [] if self._slots is None else self._slots.arrived(limit)
        return [Claimed(each.stored, each.held, each.sent_at) for each in arrived]

    def _groups(self) -> list[frozenset[str]]:
        """The sets of functions for which other processes have room, if there is something to claim."""
        return [] if self._slots is None or not self._owners else self._slots.groups()

    def _asks(
        self, limit: int, names: Collection[str] | None, worker: str
    ) -> list[tuple[Claiming, ClaimAsk]]:
        """Claims of the best candidates of all partitions; what becomes dead on the way takes no room."""
        asks: list[tuple[Claiming, ClaimAsk]] = []
        with self._lock:
            for claiming, task in self._best_first(names) if limit > 0 else ():
                asker = Asker(secrets.token_hex(8), worker, self._context.term())
                ask = ask_of(claiming.owner, task, asker)
                asks.append((claiming, ask))
                limit -= not ask.fails
                if limit == 0 or len(asks) == MAX_CLAIMS:
                    break
        return asks

    def _asks_for_others(self, limit: int) -> list[tuple[Claiming, ClaimAsk]]:
        """Claims of what is ready still, for the free slots of other processes."""
        asks: list[tuple[Claiming, ClaimAsk]] = []
        if self._slots is None:
            return asks
        for names in self._groups():
            with self._lock:
                for claiming, task in self._best_first(names) if len(asks) < limit else ():
                    slot = self._slots.take(names)
                    if slot is None:
                        break
                    asker = claim_for(slot, self._context.clock_name, self._context.clock.now())
                    asks.append((claiming, ask_of(claiming.owner, task, asker, slot)))
                    if len(asks) == limit:
                        break
        return asks

    def _best_first(self, names: Collection[str] | None) -> Iterator[tuple[Claiming, TaskId]]:
        """The best candidates of all partitions; each must be taken before the next one is asked for."""
        now, wall = self._context.clock.now(), self._context.clock.wall()
        offers = [
            (best, number, claiming)
            for number, claiming in self._owners.items()
            if (best := claiming.owner.best(now, wall, names)) is not None
        ]
        heapq.heapify(offers)
        while offers:
            (_, task), number, claiming = offers[0]
            yield claiming, task
            if (best := claiming.owner.best(now, wall, names)) is not None:
                heapq.heapreplace(offers, (best, number, claiming))
            else:
                heapq.heappop(offers)

    def _payloads(self, tasks: Sequence[TaskId]) -> Mapping[TaskId, bytes]:
        """The payloads of tasks whose claims are being written; none where they can't be read.

        The claims must be settled whatever happens here: what is wrong is told when they are read again.
        """
        try:
            return self._context.engine.payloads(self._context.queue, tasks, self._context.timeout_s)
        except Exception:
            return {}

    def _look_at_clocks(self, tasks: Sequence[Stored], *, are_new: bool) -> list[FarClock]:
        """The hosts to warn of, by the ids of tasks in partitions of this process."""
        now, wall = self._context.clock.now(), self._context.clock.wall()
        mine = (each for each in tasks if each.partition in self._owners)
        seen = (self._far_clocks.saw(each.head.id, now, wall, is_new=are_new) for each in mine)
        return [each for each in seen if each is not None]

    def _warn(self, far: Sequence[FarClock]) -> None:
        for each in far:
            warn_of_clock(each, self._context.queue, self._worker)

    def _settled(self, claiming: Claiming, ask: ClaimAsk, sent_at: float) -> Claimed | None:
        """What became of a claim, once that is known; the index is told."""
        concurrent.futures.wait([ask.future])
        error = ask.future.exception()
        if error is not None and kind_of(error) is not ErrorKind.OUTAGE:
            self._set_aside(ask.task, error)
        with self._lock:
            stored = claiming.settled(ask, self._context.clock.now())
            if ask.is_paused:
                self._pauses_changed = True
            partition = claiming.owner.partition
            if claiming.deposed and self._owners.get(partition) is claiming:
                del self._owners[partition]
        if stored is None or stored.state.claim is None or ask.slot is not None:
            return None
        return Claimed(stored, Held(stored.state.claim.number, ask.asker.holder), sent_at)

    def _set_aside(self, task: TaskId, error: BaseException) -> None:
        with self._lock:
            self._aside[task] = self._context.clock.now() + ASIDE_S
        _log.error(
            "a task can't be claimed and is left aside for a while",
            action="task_set_aside",
            queue=self._context.queue,
            task=task,
            pause_s=ASIDE_S,
            exc_info=error,
        )


def _is_new(stored: Stored) -> bool:
    """Whether nothing has become of a task yet."""
    state = stored.state
    return state.status is Status.WAITING and state.claim is None and not state.failures
