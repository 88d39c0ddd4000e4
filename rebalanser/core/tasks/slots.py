"""Free slots: idle threads of workers, for which the owners of partitions claim tasks (SK-20). Pure.

A worker with an idle thread publishes a *slot* in the store: the functions that it knows, the time of a
claim, and the *holder*, a name that no other claim has. An owner that has a ready task and no room for it in
its own process claims the task for such a slot. That is one write: it puts the claim, by the slot's holder,
and the task's id in the slot's place, if the task, the owner's epoch and the slot are as they were. So a slot
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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from rebalanser.core.tasks.model import TaskId

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

Names: TypeAlias = frozenset[str] | None
"""The functions of a slot; None for any, for example if a client over HTTP names none."""


@dataclass(frozen=True, slots=True)
class Room:
    """Number of ``idle`` threads, and of ``tasks`` to take, which is greater if the worker claims ahead."""

    idle: int
    tasks: int


NO_ROOM: Final = Room(0, 0)
Rooms: TypeAlias = Mapping[Names, Room]
"""Room for tasks, by the functions that can run there."""


@dataclass(frozen=True, slots=True)
class FreeSlot:
    """An idle thread of the process ``process``, published at ``revision``.

    ``worker`` is a label for people. ``names`` are the functions that it knows, None for any. ``ttl_s`` is
    the seconds that a claim lasts. ``lease`` is the lease whose end deletes the slot. A slot that is
    ``ahead`` has no idle thread yet.
    """

    holder: str
    process: str
    worker: str
    names: Names
    ttl_s: float
    lease: int
    ahead: bool = False
    revision: int = 0


@dataclass(frozen=True, slots=True)
class UsedSlot:
    """A slot for which a task was claimed."""

    holder: str
    process: str
    task: TaskId


@dataclass(frozen=True, slots=True)
class GoneSlot:
    """A slot that was deleted: withdrawn, used and forgotten, or ended with its lease."""

    holder: str
    process: str


SlotNews: TypeAlias = FreeSlot | UsedSlot | GoneSlot


class FreeSlots:
    """The free slots of other processes, as an owner's process knows them.

    Slots of idle threads are taken before slots ahead. Otherwise the order differs from ``process`` to
    process, so that two owners seldom try the same slot.
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
        """Offer a slot again that was not used, unless it is known to be gone."""
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

    room: Room = NO_ROOM
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
        self.room = Room(max(0, self.room.idle - count), max(0, self.room.tasks - count))


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
    bounded: dict[Names, Room] = {}
    left = MAX_OFFERED
    for sets, (names, room) in enumerate(sorted(rooms.items(), key=lambda item: item[1].tasks)):
        tasks = max(0, min(max(room.idle, room.tasks), max(1, left // (len(rooms) - sets))))
        bounded[names] = Room(max(0, min(room.idle, tasks)), tasks)
        left -= tasks
    return bounded


def _is_due(since: float | None, now: float) -> bool:
    return since is not None and now >= since + SETTLE_S


def is_fresh(published_at: float, now: float, ttl_s: float) -> bool:
    """True if enough is left of a claim's time, counted from the publication of its slot (SK-8)."""
    return now - published_at <= FRESH_RATIO * ttl_s
