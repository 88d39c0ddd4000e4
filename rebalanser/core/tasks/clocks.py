"""Clocks of other hosts (SK-18), the ends of claims that are counted on them (SK-8), and timers."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from rebalanser.core.tasks.ids import created_at, is_task_id
from rebalanser.core.tasks.model import ClaimState, Head, RateMark, TaskId, rate_of

_MIN_GARBAGE: Final = 64


class Timers:
    """Finds the task whose time comes first, in logarithmic time. Postponing a time is free.

    The heap may hold outdated entries, at most about as many as there are tasks. An entry that comes too
    early goes back with its new time; one whose task is gone is dropped.
    """

    __slots__ = ("_heap", "_times")

    def __init__(self) -> None:
        self._times: dict[TaskId, float] = {}
        self._heap: list[tuple[float, TaskId]] = []

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, task: TaskId) -> bool:
        return task in self._times

    def __getitem__(self, task: TaskId) -> float:
        return self._times[task]

    def set(self, task: TaskId, at: float) -> None:
        """Set the time of a task, in place of an earlier one."""
        before = self._times.get(task)
        self._times[task] = at
        if before is None or at < before:
            heapq.heappush(self._heap, (at, task))
            self._clean()

    def drop(self, task: TaskId) -> None:
        """Remove a task, if it is there."""
        if self._times.pop(task, None) is not None:
            self._clean()

    def pop_due(self, now: float) -> list[TaskId]:
        """Return the tasks whose time has come, the earliest first, and remove their times."""
        due = []
        while (first := self.next()) is not None and first <= now:
            _, task = heapq.heappop(self._heap)
            del self._times[task]
            due.append(task)
        return due

    def next(self) -> float | None:
        """Return the first time; None if there is none."""
        heap, times = self._heap, self._times
        while heap:
            at, task = heap[0]
            holds = times.get(task)
            if holds == at:
                return at
            if holds is None or holds < at:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (holds, task))
        return None

    def _clean(self) -> None:
        if len(self._heap) > 2 * len(self._times) + _MIN_GARBAGE:
            self._heap = [(at, task) for task, at in self._times.items()]
            heapq.heapify(self._heap)


READ_PAUSE_S: Final = 0.001
"""Seconds between two reads of claims, for each claim that is read."""
KeyT = TypeVar("KeyT", bound=Hashable)


def over_at(claim: ClaimState, now: float, clock: str, buffer_s: float) -> float:
    """Return when a claim whose term is learnt ``now`` is over, in seconds of the clock of this name.

    Its end counts only if it is of that clock, which has a name. Otherwise ``ttl_s`` counts from now, which
    is later than when its holder began to count.
    """
    latest = now + claim.term.ttl_s
    if clock and claim.term.clock == clock:
        latest = min(latest, claim.term.ends_at_s)
    return latest + buffer_s


def full_at(mark: RateMark | None, now: float, clock: str) -> float:
    """Return when a rate limit allows its whole burst again, in seconds of the clock of this name (SK-23).

    ``now`` is when the mark was learnt. Only the clock that the mark counts on is compared. On any other the
    debt counts from now, which is later than when it began: so no difference of clocks makes it shorter.
    """
    if mark is None:
        return now
    latest = now + mark.debt_s
    return min(latest, mark.at_s + mark.debt_s) if clock and mark.clock == clock else latest


def room_at(head: Head, mark: RateMark | None) -> float:
    """Return when a task's rate has room by the mark's wall clock, in seconds since 1970, for people only."""
    if mark is None or not head.rate_limit:
        return 0.0
    rate = rate_of(head.rate_limit)
    return mark.wall - (rate.burst - 1) * rate.every_s


def is_same_term(claim: ClaimState, other: ClaimState | None) -> bool:
    """True if a claim was not renewed. Each renewal changes the term; an update does not."""
    return other is not None and (claim.number, claim.holder, claim.term) == (
        other.number,
        other.holder,
        other.term,
    )


class ForeignTerms(Generic[KeyT]):
    """Claims of a queue that count on other clocks, with the time at which their terms were learnt.

    For one thread at a time. Reads take about 1 % of the time, whatever the number of claims.
    """

    def __init__(self) -> None:
        self._known: dict[KeyT, tuple[ClaimState, float]] = {}
        self._look_at = 0.0
        self._skipped = False

    def skips(self, now: float) -> bool:
        """True if they were read a moment ago; ``next_over`` gives the time of the next read."""
        self._skipped = now < self._look_at
        return self._skipped

    def learn(self, claims: Mapping[KeyT, ClaimState], now: float, buffer_s: float) -> list[KeyT]:
        """Learn the claims, as read before ``now``; return those that are over."""
        before, self._known = self._known, {}
        for key, claim in claims.items():
            known = before.get(key)
            if known is not None and is_same_term(claim, known[0]):
                self._known[key] = known
            else:
                self._known[key] = (claim, over_at(claim, now, "", buffer_s))
        self._look_at = now + READ_PAUSE_S * len(claims)
        return [key for key, (_, at) in self._known.items() if at <= now]

    def next_over(self) -> float | None:
        """Return when a claim may be over, or the next read is due; None without claims."""
        times = [at for _, at in self._known.values()] + ([self._look_at] if self._skipped else [])
        return min(times, default=None)


MAX_SKEW_S: Final = 30.0
"""Maximum seconds between two clocks without a warning."""
MAX_SPREAD_S: Final = 5.0
"""Maximum seconds by which the delays of a process's ids differ if its clock is behind."""
MIN_SPAN_S: Final = 30.0
"""Minimum seconds between two late ids of a process whose clock is reported as behind."""
WARNING_INTERVAL_S: Final = 600.0
"""Minimum seconds between two warnings about one host."""
MAX_HOSTS: Final = 1024
"""Maximum number of processes, and of hosts, that are remembered."""
_HOST_AT: Final = 24
_PROCESS_AT: Final = 36

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class SkewedClock:
    """A host whose clock is ``ahead_s`` seconds ahead of this one's, or behind where that is negative.

    ``host`` is its 12 digits in the ids that it makes, such as ``task``, and ``process`` the 4 digits of the
    process. Ids of ticks have digits of the queue and the function there instead.
    """

    task: TaskId
    host: str
    process: str
    ahead_s: float


@dataclass(slots=True)
class _Late:
    """Ids of one process that were equally late, and the time of the first."""

    first_created: float
    least_s: float
    most_s: float


@dataclass(slots=True)
class ClockSkewDetector:
    """Finds hosts whose clocks are off, by the ids of the tasks that this process sees.

    For one thread at a time. ``now`` is seconds of a monotonic clock, ``wall`` seconds since 1970.
    """

    _late: OrderedDict[str, _Late] = field(default_factory=OrderedDict)
    _reported_at: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def check(self, task: TaskId, now: float, wall: float, *, is_new: bool) -> SkewedClock | None:
        """Look at the id of a task that was read or, if ``is_new``, reported by a watch just now.

        Returns the host to warn of; None if there is none, or it was returned lately.
        """
        if not is_task_id(task):
            return None
        host, process = task[_HOST_AT:_PROCESS_AT], task[_PROCESS_AT:]
        created = created_at(task)
        late_s = wall - created
        if late_s >= 0:
            late_s = self._behind_s(host + process, created, late_s) if is_new else 0.0
        if (
            abs(late_s) <= MAX_SKEW_S
            or now - self._reported_at.get(host, -WARNING_INTERVAL_S) < WARNING_INTERVAL_S
        ):
            return None
        _keep(self._reported_at, host, now)
        return SkewedClock(task, host, process, -late_s)

    def _behind_s(self, maker: str, created: float, late_s: float) -> float:
        """Return the seconds that the clock of an id is known to be behind."""
        if late_s <= MAX_SKEW_S:
            self._late.pop(maker, None)
            return 0.0
        known = self._late.get(maker, _Late(created, late_s, late_s))
        least_s, most_s = min(known.least_s, late_s), max(known.most_s, late_s)
        if most_s - least_s > MAX_SPREAD_S:
            known = _Late(created, late_s, late_s)
        else:
            known = _Late(min(known.first_created, created), least_s, most_s)
        _keep(self._late, maker, known)
        return known.least_s if created - known.first_created >= MIN_SPAN_S else 0.0


def _keep(kept: OrderedDict[str, ValueT], key: str, value: ValueT) -> None:
    """Add an entry as the latest, and drop the oldest if there are too many."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > MAX_HOSTS:
        kept.popitem(last=False)
