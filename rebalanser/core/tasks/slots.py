"""Free slots: idle threads of workers, for which the owners of partitions claim tasks (SK-20). Pure.

A worker with an idle thread publishes a *slot* in the store: the functions that it knows, the time of a
claim, and the *holder*, a name that no other claim has. An owner that has a ready task and no room for it in
its own process claims the task for such a slot. One write puts the claim, by the slot's holder, and the
task's id in the place of the slot, if the task, the owner's epoch and the slot are unchanged. So a slot
serves one claim at most, however many owners try, and none once it is withdrawn.

**The end of such a claim** (SK-8). The owner writes the claim after the worker has sent the slot to the
store. So the worker counts the claim's time from before it sent the slot, on its own monotonic clock. If the
slot is old, too little of that time is left: the worker renews the claim first, and counts from before it
sent the renewal.

**Slots ahead.** While its slots are used, a worker with quick bodies publishes more slots than it has idle
threads, as it claims tasks ahead. That saves a round trip to the store per task. Such slots are marked. They
are used only if no thread is known to be idle, and for no task with a rate limit: a claim that is given back
because a body is slow would count, too. Once a thread is idle for a while, its slot replaces one ahead.

**Several sets of functions.** A server offers room for each set of functions that its clients wait for. Each
set has its own slots, so that no client waits for the functions of another one.

**The end of a slot.** It is used, its worker withdraws it, or the worker's lease ends, which deletes all its
slots.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from rebalanser.core.tasks import rules
from rebalanser.core.tasks.model import ClaimTerm, Status, Stored, TaskId
from rebalanser.core.tasks.rules import ClaimKey, Decision
from rebalanser.core.tasks.store import ChangesLost, FreeSlot, GoneSlot, Names, SlotNews, UsedSlot
from rebalanser.core.tasks.writes import Await, PendingMove, ReadTasks, ResultT, Submit
from rebalanser.errors import LeaseNotFound, OutcomeUnknown, RebalanserError

MAX_OFFERED: Final = 32
"""Maximum slots that one worker has in the store; each set of functions has one at least."""
AHEAD_FOR_S: Final = 1.0
"""Seconds after the use of a slot for which its worker publishes slots ahead."""
SETTLE_S: Final = 0.01
"""Seconds between a change of a worker's room and the write that follows it."""
FRESH_RATIO: Final = 0.25
"""Maximum age of a slot, in parts of its claim's time, at which its claim need not be renewed first."""
MAX_USED_SLOTS: Final = 8192
"""Maximum used slots that a worker remembers, so that a change reported twice changes nothing."""


@dataclass(frozen=True, slots=True)
class WorkerRoom:
    """Number of ``idle`` threads, and of ``tasks`` to take, which is greater if the worker claims ahead."""

    idle: int
    tasks: int


NO_ROOM: Final = WorkerRoom(0, 0)
Rooms: TypeAlias = Mapping[Names, WorkerRoom]
"""Room for tasks, by the functions that can run there."""


class FreeSlots:
    """The free slots of other processes, as an owner's process knows them.

    Slots of idle threads are taken before slots ahead. Otherwise the order differs from ``process`` to
    process, so that two owners rarely try the same slot.
    """

    def __init__(self, process: str) -> None:
        self._process = process
        self._free: dict[str, FreeSlot] = {}
        self._heaps: dict[Names, list[tuple[bool, int, str]]] = {}
        self._trying: dict[str, FreeSlot] = {}

    def __len__(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def learn(self, news: SlotNews) -> bool:
        """Take a change; True if there is one more slot to claim for."""
        if not isinstance(news, FreeSlot):
            self._free.pop(news.holder, None)
            self._trying.pop(news.holder, None)
            return False
        if news.process == self._process or news.holder in self._trying:
            return False
        is_new = news.holder not in self._free
        self._free[news.holder] = news
        if is_new:
            order = zlib.crc32(f"{self._process} {news.holder}".encode())
            heapq.heappush(self._heaps.setdefault(news.names, []), (news.ahead, order, news.holder))
        return is_new

    def replace(self, slots: Sequence[SlotNews], revision: int) -> None:
        """Replace all slots by those of a revision, as changes may have been missed; newer ones stay."""
        newer = [slot for slot in self._free.values() if slot.revision > revision]
        self._free.clear()
        self._heaps.clear()
        self._trying.clear()
        for slot in (*slots, *newer):
            self.learn(slot)

    def groups(self) -> list[Names]:
        """Return the sets of functions that have slots."""
        return [names for names in list(self._heaps) if self._first(names) is not None]

    def take(self, names: Names) -> FreeSlot | None:
        """Take a slot of exactly these functions, for a claim; None if there is none.

        ``learn`` ends it once it is used; else ``put_back`` or ``drop`` must follow.
        """
        holder = self._first(names)
        if holder is None:
            return None
        heapq.heappop(self._heaps[names])
        slot = self._trying[holder] = self._free.pop(holder)
        return slot

    def put_back(self, slot: FreeSlot) -> None:
        """Offer an unused slot again, unless it is known to be gone."""
        if self._trying.pop(slot.holder, None) is not None:
            self.learn(slot)

    def drop(self, slot: FreeSlot) -> None:
        """Forget a slot that was used, or may have been, or is gone."""
        self._trying.pop(slot.holder, None)

    def _first(self, names: Names) -> str | None:
        heap = self._heaps.get(names, [])
        while heap and heap[0][-1] not in self._free:
            heapq.heappop(heap)
        if not heap:
            self._heaps.pop(names, None)
            return None
        return heap[0][-1]


@dataclass(frozen=True, slots=True)
class NewSlots:
    """``count`` slots of these functions to publish, the last ``ahead`` of them ahead."""

    names: Names
    count: int
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Writes to make: slots to publish, holders to withdraw if they are not used, used slots to delete."""

    publish: tuple[NewSlots, ...] = ()
    withdraw: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Offered:
    """A slot that was published. Its publication was sent just after ``sent_at``."""

    names: Names
    sent_at: float
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Arrival:
    """A used slot that the worker has not taken yet; ``offered`` is None if its publication is not known."""

    slot: UsedSlot
    offered: Offered | None


@dataclass(slots=True)
class _Share:
    """Room for the tasks of one set of functions."""

    room: WorkerRoom = NO_ROOM
    used_at: float = -math.inf
    lacks_since: float | None = None
    exceeds_since: float | None = None
    idles_since: float | None = None
    """Time since which an idle thread has only a slot ahead; None if none has."""
    held: int = 0
    """Number of slots that are offered, or were used just now."""
    ahead: int = 0
    """Number of slots ahead among them."""

    def is_wanted(self, now: float) -> bool:
        """True if a slot was used lately."""
        return now < self.used_at + AHEAD_FOR_S

    def excess(self, now: float) -> int:
        """Return the number of slots that are too many; below 0 if there are too few."""
        return self.held - (self.room.tasks if self.is_wanted(now) else self.room.idle)

    def unserved(self) -> int:
        """Return the number of idle threads that have no slot but one ahead."""
        return max(0, self.room.idle - self.held + self.ahead)

    def note(self, now: float) -> None:
        """Note since when there are too many or too few slots, or slots ahead in place of others."""
        excess = self.excess(now)
        if excess < 0 and self.lacks_since is None:
            self.lacks_since = now
        if excess > 0 and self.exceeds_since is None:
            self.exceeds_since = now
        if not self.ahead or not self.unserved():
            self.idles_since = None
        elif self.idles_since is None:
            self.idles_since = now

    def taken(self, count: int) -> None:
        """Note that the worker has taken ``count`` tasks, which leaves less room."""
        self.room = WorkerRoom(max(0, self.room.idle - count), max(0, self.room.tasks - count))


@dataclass(slots=True)
class OwnSlots:
    """The slots of one worker process: those it offers, and those it should offer.

    Times are in seconds of one monotonic clock. ``offered`` has the published slots by their holders,
    ``arrived`` the used slots that the worker has not taken yet.
    """

    offered: dict[str, Offered] = field(default_factory=dict)
    arrived: list[Arrival] = field(default_factory=list)
    _shares: dict[Names, _Share] = field(default_factory=dict)
    _to_forget: list[str] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)
    _seen_order: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_USED_SLOTS))

    def offer(self, rooms: Rooms, now: float) -> None:
        """Offer room for tasks of these sets of functions only."""
        bounded = _bounded(rooms)
        for names, share in [*self._shares.items()]:
            share.room = bounded.get(names, NO_ROOM)
            if names not in bounded and not share.held and not share.is_wanted(now):
                del self._shares[names]
        new = {names: _Share(room) for names, room in bounded.items() if names not in self._shares}
        if new:
            self._shares |= new
            self._count()
        self._note(now)

    def published(self, slots: Sequence[FreeSlot], sent_at: float) -> None:
        """Note slots whose publication is about to be sent: from now on they may be used."""
        for each in slots:
            self.offered[each.holder] = Offered(each.names, sent_at, each.ahead)
            self._share(each.names).lacks_since = None
        self._count()

    def gone(self, holders: Collection[str]) -> None:
        """Forget slots that are no longer in the store, and were not used."""
        for holder in holders:
            self.offered.pop(holder, None)
        self._count()

    def used(self, slot: UsedSlot, now: float) -> bool:
        """Note that a task was claimed for a slot; True if that is news. ``take_arrived`` takes it.

        The next slot is published as soon as there is room, as more tasks are waiting.
        """
        if slot.holder in self._seen:
            return False
        if len(self._seen_order) == MAX_USED_SLOTS:
            self._seen.discard(self._seen_order[0])
        self._seen_order.append(slot.holder)
        self._seen.add(slot.holder)
        arrival = Arrival(slot, self.offered.pop(slot.holder, None))
        self.arrived.append(arrival)
        self._to_forget.append(slot.holder)
        for share in self._shares_of(arrival):
            share.lacks_since = -math.inf
            share.used_at = now
        self._count()
        return True

    def learn(self, news: SlotNews, now: float) -> bool:
        """Take a change of an own slot; True if a claim has arrived."""
        if isinstance(news, UsedSlot):
            return self.used(news, now)
        if isinstance(news, GoneSlot):
            self.gone([news.holder])
        elif news.holder not in self._seen:
            # A request whose outcome was not known may have published it late.
            self._found(news)
        return False

    def replace(self, slots: Sequence[SlotNews], now: float) -> None:
        """Replace the own slots by those in the store, as changes may have been missed."""
        free = [each for each in slots if isinstance(each, FreeSlot) and each.holder not in self._seen]
        holders = {each.holder for each in free}
        self.gone([holder for holder in self.offered if holder not in holders])
        for each in free:
            self._found(each)
        for used in slots:
            if not isinstance(used, UsedSlot) or self.used(used, now):
                continue
            if used.holder not in self._to_forget:
                self._to_forget.append(used.holder)

    def take_arrived(self, count: int) -> None:
        """Take the first ``count`` claims that arrived; that leaves the worker less room."""
        for arrival in self.arrived[:count]:
            for share in self._shares_of(arrival):
                share.taken(1)
        del self.arrived[:count]
        self._count()

    def forgotten(self, holders: Collection[str]) -> None:
        """Note used slots that were deleted from the store."""
        self._to_forget = [each for each in self._to_forget if each not in holders]

    def lease_ended(self) -> None:
        """Forget all published slots; claims for used ones still arrive."""
        self.gone(list(self.offered))
        self._to_forget.clear()

    def plan(self, now: float) -> SlotPlan:
        """Return the writes that are due. A change of room undone within ``SETTLE_S`` needs none."""
        self._note(now)
        publish: list[NewSlots] = []
        withdraw: list[str] = []
        for names, share in self._shares.items():
            excess, unserved = share.excess(now), share.unserved()
            fewer = 0
            if _is_due(share.exceeds_since, now):
                share.exceeds_since = None
                fewer = max(0, excess)
            if excess < 0 and _is_due(share.lacks_since, now):
                publish.append(NewSlots(names, -excess, max(0, -excess - unserved)))
            elif _is_due(share.idles_since, now):
                share.idles_since = None
                swapped = min(unserved, share.ahead)
                fewer += swapped
                publish.append(NewSlots(names, swapped))
            withdraw += self._last(names, fewer)
        return SlotPlan(tuple(publish), tuple(withdraw), tuple(self._to_forget))

    def next_wakeup(self, now: float) -> float | None:
        """Return when a write is due; None if only a change of the room can bring one."""
        self._note(now)
        times: list[float] = []
        for share in self._shares.values():
            lacks_since = share.lacks_since if share.excess(now) < 0 else None
            changes = (share.exceeds_since, lacks_since, share.idles_since)
            times += [each + SETTLE_S for each in changes if each is not None]
            if share.held > share.room.idle and share.is_wanted(now):
                times.append(share.used_at + AHEAD_FOR_S)
        return min(times, default=None)

    def _share(self, names: Names) -> _Share:
        return self._shares.setdefault(names, _Share())

    def _shares_of(self, arrival: Arrival) -> list[_Share]:
        """Return the shares whose room a claim takes; all if its slot is unknown."""
        if arrival.offered is None:
            return list(self._shares.values())
        return [self._share(arrival.offered.names)]

    def _found(self, slot: FreeSlot) -> None:
        """Note a slot in the store; if its publication is not known, it may be of any age."""
        self.offered.setdefault(slot.holder, Offered(slot.names, -math.inf, slot.ahead))
        self._share(slot.names)
        self._count()

    def _count(self) -> None:
        """Count the slots of each set of functions."""
        for share in self._shares.values():
            share.held = share.ahead = 0
        for each in self.offered.values():
            share = self._shares[each.names]
            share.held += 1
            share.ahead += each.ahead
        for arrival in self.arrived:
            for share in self._shares_of(arrival):
                share.held += 1

    def _last(self, names: Names, count: int) -> list[str]:
        """Return the slots of these functions to withdraw first: those ahead, the newest of them first."""
        ranked = sorted(
            (each.ahead, number, holder)
            for number, (holder, each) in enumerate(self.offered.items())
            if each.names == names
        )
        return [holder for _, _, holder in ranked[len(ranked) - count :]]

    def _note(self, now: float) -> None:
        for share in self._shares.values():
            share.note(now)


def _bounded(rooms: Rooms) -> Rooms:
    """Return the room to publish slots for: ``MAX_OFFERED`` in all, but at least one for each set."""
    bounded: dict[Names, WorkerRoom] = {}
    left = MAX_OFFERED
    for sets, (names, room) in enumerate(sorted(rooms.items(), key=lambda item: item[1].tasks)):
        tasks = max(0, min(max(room.idle, room.tasks), max(1, left // (len(rooms) - sets))))
        bounded[names] = WorkerRoom(max(0, min(room.idle, tasks)), tasks)
        left -= tasks
    return bounded


def _is_due(since: float | None, now: float) -> bool:
    return since is not None and now >= since + SETTLE_S


def is_fresh(published_at: float, now: float, ttl_s: float) -> bool:
    """True if enough is left of a claim's time, counted from the publication of its slot (SK-8)."""
    return now - published_at <= FRESH_RATIO * ttl_s


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
        term: Callable[[], ClaimTerm],
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

    def learn(self, news: Sequence[SlotNews] | ChangesLost) -> tuple[bool, bool]:
        """Take changes of slots; True if a step is due, and True if there may be something to claim."""
        if isinstance(news, ChangesLost):
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


def _release(stored: Stored, held: ClaimKey) -> PendingMove:
    return PendingMove(stored, partial(_released, held=held), lasting=True)


def _released(stored: Stored, held: ClaimKey) -> Decision:
    return rules.release(stored.state, held)


def _renewed(stored: Stored, held: ClaimKey, term: ClaimTerm) -> Decision:
    return rules.renew(stored.state, held, term)
