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
threads, as it claims tasks ahead. That saves a round trip to the store per task. Such slots are marked, and
are used only if no thread is known to be idle.

**The end of a slot.** It is used, its worker withdraws it, or the worker's lease ends, which deletes all its
slots.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from rebalanser.tasks.model import TaskId

MAX_OFFERED: Final = 32
"""Maximum slots that one worker has in the store."""
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

        :meth:`learn` ends it once it is used; else :meth:`put_back` or :meth:`drop` must follow.
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
class SlotPlan:
    """Writes to make: slots to publish, holders to withdraw if they are not used, used slots to delete.

    ``ahead`` of the ``publish`` slots are slots ahead.
    """

    publish: int = 0
    ahead: int = 0
    withdraw: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()


@dataclass(slots=True)
class OwnSlots:
    """The slots of one worker process: those it offers, and those it should.

    Times are in seconds of one monotonic clock. ``offered`` has the published slots, each with the time just
    before its publication was sent; ``arrived`` has the used slots that the worker has not taken yet.
    """

    offered: dict[str, float] = field(default_factory=dict)
    arrived: list[tuple[UsedSlot, float | None]] = field(default_factory=list)
    names: Names = frozenset()
    """The functions that the worker knows; None for any."""
    _idle: int = 0
    _room: int = 0
    _used_at: float = -math.inf
    _offered_names: Names = frozenset()
    _lacks_since: float | None = None
    _exceeds_since: float | None = None
    _to_forget: list[str] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)
    _seen_order: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_USED_SLOTS))

    def offer(self, idle: int, room: int, names: Collection[str] | None, now: float) -> None:
        """Offer ``idle`` threads, and room for ``room`` tasks: more than that if the worker claims ahead."""
        self._idle = max(0, min(idle, MAX_OFFERED))
        self._room = max(self._idle, min(room, MAX_OFFERED))
        self.names = None if names is None else frozenset(names)
        self._note(now)

    def published(self, holders: Sequence[str], sent_at: float) -> None:
        """Note slots whose publication is about to be sent: from now on they may be used."""
        self.offered.update(dict.fromkeys(holders, sent_at))
        self._lacks_since = None

    def gone(self, holders: Collection[str]) -> None:
        """Forget slots that are no longer in the store, and were not used."""
        for holder in holders:
            self.offered.pop(holder, None)

    def used(self, slot: UsedSlot, now: float) -> bool:
        """Note that a task was claimed for a slot; True if that is news. :meth:`take_arrived` takes it.

        The next slot is published as soon as there is room, as more tasks are waiting.
        """
        if slot.holder in self._seen:
            return False
        if len(self._seen_order) == MAX_USED_SLOTS:
            self._seen.discard(self._seen_order[0])
        self._seen_order.append(slot.holder)
        self._seen.add(slot.holder)
        self.arrived.append((slot, self.offered.pop(slot.holder, None)))
        self._to_forget.append(slot.holder)
        self._lacks_since = -math.inf
        self._used_at = now
        return True

    def learn(self, news: SlotNews, now: float) -> bool:
        """Take a change of an own slot; True if a claim has arrived."""
        if isinstance(news, UsedSlot):
            return self.used(news, now)
        if isinstance(news, GoneSlot):
            self.gone([news.holder])
        elif news.holder not in self._seen:
            # A request whose outcome was not known may have published it late.
            self.offered.setdefault(news.holder, -math.inf)
        return False

    def replace(self, slots: Sequence[SlotNews], now: float) -> None:
        """Replace the own slots by those in the store, as changes may have been missed."""
        free = [each.holder for each in slots if isinstance(each, FreeSlot) and each.holder not in self._seen]
        self.offered = {holder: self.offered.get(holder, -math.inf) for holder in free}
        for each in slots:
            if isinstance(each, UsedSlot) and not self.used(each, now) and each.holder not in self._to_forget:
                self._to_forget.append(each.holder)

    def take_arrived(self, count: int) -> None:
        """Take the first ``count`` claims that arrived; that leaves the worker less room."""
        del self.arrived[:count]
        self._idle = max(0, self._idle - count)
        self._room = max(0, self._room - count)

    def forgotten(self, holders: Collection[str]) -> None:
        """Note used slots that were deleted from the store."""
        self._to_forget = [each for each in self._to_forget if each not in holders]

    def lease_ended(self) -> None:
        """Forget all published slots; claims for used ones still arrive."""
        self.gone(list(self.offered))
        self._to_forget.clear()

    def plan(self, now: float) -> SlotPlan:
        """Return the writes that are due. A change of room undone within :data:`SETTLE_S` needs none."""
        self._note(now)
        forget = tuple(self._to_forget)
        if self._offered_names != self.names and self.offered:
            return SlotPlan(withdraw=tuple(self.offered), forget=forget)
        self._offered_names = self.names
        excess = self._excess(now)
        withdraw: tuple[str, ...] = ()
        if _is_due(self._exceeds_since, now):
            self._exceeds_since = None
            withdraw = tuple(self.offered)[-excess:] if excess > 0 else ()
        if excess >= 0 or not _is_due(self._lacks_since, now):
            return SlotPlan(0, 0, withdraw, forget)
        idle = max(0, self._idle - self._held)
        return SlotPlan(-excess, max(0, -excess - idle), withdraw, forget)

    def next_wakeup(self, now: float) -> float | None:
        """Return when a write is due; None if only a change of the room can bring one."""
        self._note(now)
        since = [self._exceeds_since, self._lacks_since if self._excess(now) < 0 else None]
        times = [each + SETTLE_S for each in since if each is not None]
        if self._held > self._idle and self._is_wanted(now):
            times.append(self._used_at + AHEAD_FOR_S)
        return min(times, default=None)

    @property
    def _held(self) -> int:
        return len(self.offered) + len(self.arrived)

    def _is_wanted(self, now: float) -> bool:
        """True if a slot was used lately."""
        return now < self._used_at + AHEAD_FOR_S

    def _excess(self, now: float) -> int:
        return self._held - (self._room if self._is_wanted(now) else self._idle)

    def _note(self, now: float) -> None:
        excess = self._excess(now)
        if excess < 0 and self._lacks_since is None:
            self._lacks_since = now
        if excess > 0 and self._exceeds_since is None:
            self._exceeds_since = now


def _is_due(since: float | None, now: float) -> bool:
    return since is not None and now >= since + SETTLE_S


def is_fresh(published_at: float, now: float, ttl_s: float) -> bool:
    """True if enough is left of a claim's time, counted from the publication of its slot (SK-8)."""
    return now - published_at <= FRESH_RATIO * ttl_s
