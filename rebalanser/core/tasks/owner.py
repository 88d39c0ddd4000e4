"""The owner of a partition: its open tasks in memory, and the next one to claim (SK-5, SK-13).

Pure: no clock, no store. The driver reports what it has read or written, with the time, and takes candidates.
Nothing here makes a claim safe: the store does. News may come late, twice or out of order: the owner keeps
the greatest revision.

Every open task is in exactly one place:

==========  ==========================================================================================
place       tasks in it
==========  ==========================================================================================
scheduled   not due yet, by the wall clock
blocked     a dependency is not settled, in this or another partition
ready       to be offered: waiting and due, or claimed and over, or to become dead with a dependency
running     claimed; the claim is over when its time and the buffer have passed
held back   ready, but its limit has no room
taken       a claim is being written
aside       a claim can't be written; the task is offered again at a stated time
doubtful    the state must be read, as the store has refused a claim
==========  ==========================================================================================

**Limits** (SK-23). All tasks of one limit are in one partition, and only its owner claims them. The owner
counts tasks that are claimed, being claimed, or doubtful. Once it has read the whole partition after taking
it over, that count is never too low; until then it offers no limited task. For a rate limit it reads the mark
that the last start left in the store, and each start replaces that very mark.

**The end of a claim** (SK-8, SK-18). If its term was counted on this host's boot clock, the claim is over at
the end of the term. Any other clock is not compared: then ``ttl_s`` is counted from when the owner learnt of
the term, which is later than when the holder began to count. In both cases the stated buffer is added.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Container
from typing import Final

from rebalanser.core.tasks.clocks import Timers, is_same_term, over_at
from rebalanser.core.tasks.dependencies import Completions, Dependencies
from rebalanser.core.tasks.ids import ready_since
from rebalanser.core.tasks.model import (
    OPEN,
    AfterFailure,
    ClaimState,
    Head,
    LimitId,
    RateMark,
    Status,
    Stored,
    TaskId,
    TaskState,
)
from rebalanser.core.tasks.ready_index import ClaimableTasks, Rank
from rebalanser.core.tasks.rules import FailedDependency, fails
from rebalanser.core.tasks.store import RateStart

_NEW: Final = TaskState()
MAX_CLOSED: Final = 65_536
"""Maximum number of closed tasks whose revision is kept, so that late news of them change nothing."""


MAX_TEMPLATES: Final = 1024
"""Maximum number of different heads, ids aside, of tasks that are kept packed."""


class OpenTasks:
    """Open tasks by id. A new task whose head others have too takes one number: its head, and its revision.

    That is a task that was never claimed and has no due time, dependency, unique key or limit. Each read
    makes it anew.
    """

    __slots__ = ("_last", "_numbers", "_partition", "_tasks", "_templates")

    def __init__(self, partition: int) -> None:
        self._partition = partition
        self._tasks: dict[TaskId, Stored | int] = {}
        self._templates: list[tuple[str, str, int, int, float | None, AfterFailure]] = []
        self._numbers: dict[tuple[str, str, int, int, float | None, AfterFailure], int] = {}
        self._last = 0
        """The last number: tasks of one transaction have one number, and share the object."""

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, task: TaskId) -> Stored:
        return self._unpacked(task, self._tasks[task])

    def get(self, task: TaskId) -> Stored | None:
        """Return a task; None if it is not open."""
        found = self._tasks.get(task)
        return None if found is None else self._unpacked(task, found)

    def revision(self, task: TaskId) -> int | None:
        """Return the revision of a task; None if it is not open."""
        found = self._tasks.get(task)
        if isinstance(found, int):
            return found // MAX_TEMPLATES
        return None if found is None else found.revision

    def claim(self, task: TaskId) -> ClaimState | None:
        """Return the current claim of a task; None if it is not claimed."""
        found = self._tasks.get(task)
        return _running_claim(found) if isinstance(found, Stored) else None

    def has_rate(self, task: TaskId) -> bool:
        """True if an open task has a rate limit."""
        found = self._tasks[task]
        return isinstance(found, Stored) and bool(found.head.rate_limit)

    def put(self, stored: Stored) -> None:
        """Store a task, replacing its earlier state."""
        self._tasks[stored.head.id] = self._packed(stored)

    def pop(self, task: TaskId) -> Stored | None:
        """Remove a task, and return it; None if it is not open."""
        found = self._tasks.pop(task, None)
        return None if found is None else self._unpacked(task, found)

    def _packed(self, stored: Stored) -> Stored | int:
        head = stored.head
        if stored.state != _NEW or head.after or head.unique_key or head.is_limited or head.limit_key:
            return stored
        if stored.partition != self._partition or head.unique_for_s:
            return stored
        template = (head.queue, head.name, head.priority, head.retries, head.timeout_s, head.after_failure)
        number = self._numbers.get(template)
        if number is None:
            number = len(self._templates)
            if number == MAX_TEMPLATES:
                return stored
            self._templates.append(template)
            self._numbers[template] = number
        packed = stored.revision * MAX_TEMPLATES + number
        if packed != self._last:
            self._last = packed
        return self._last

    def _unpacked(self, task: TaskId, found: Stored | int) -> Stored:
        if isinstance(found, Stored):
            return found
        revision, number = divmod(found, MAX_TEMPLATES)
        queue, name, priority, retries, timeout_s, after_failure = self._templates[number]
        head = Head(task, queue, name, priority, (), retries, timeout_s, after_failure)
        return Stored(head, _NEW, revision, self._partition)


class PartitionOwner:
    """The index of one partition, owned with this fencing ``token`` (SK-13).

    ``now`` is always seconds of one monotonic clock; ``clock`` is its name in a
    ``ClaimTerm``, empty if it has none. ``wall`` is seconds since 1970.
    ``buffer_s`` is the seconds added to a claim's time (SK-8): more than clocks drift apart in that time.
    ``complete`` has the completed tasks that all owners of a process share.
    """

    def __init__(
        self,
        partition: int,
        token: int,
        *,
        buffer_s: float = 0.0,
        clock: str = "",
        complete: Completions | None = None,
    ) -> None:
        self.partition = partition
        self.token = token
        self._buffer_s = buffer_s
        self._clock = clock
        self._open = OpenTasks(partition)
        self._closed: OrderedDict[TaskId, int] = OrderedDict()
        self._over_at: dict[TaskId, float] = {}
        self._ready = ClaimableTasks(clock)
        self._scheduled = Timers()
        self._running = Timers()
        self._blocked = Dependencies(complete)
        self._failed: dict[TaskId, FailedDependency] = {}
        """Failed dependencies of ready tasks that become dead."""
        self._taken: dict[TaskId, int] = {}
        self._doubtful: dict[TaskId, None] = {}
        self._aside = Timers()

    def __len__(self) -> int:
        """Number of open tasks."""
        return len(self._open)

    def get(self, task: TaskId) -> Stored | None:
        """Return an open task as it is known here; None if it is not."""
        return self._open.get(task)

    def learn(self, stored: Stored, now: float) -> None:
        """Learn a task that was read, or reported by a watch, not later than ``now``.

        Older news change nothing (SK-11). For a task in another partition only its status matters.
        """
        self._learn(stored, now)

    def _learn(self, stored: Stored, now: float, *, was_taken: bool = False) -> None:
        task = stored.head.id
        if stored.partition != self.partition:
            self._learn_status(task, stored.state.status)
            return
        before = self._open.revision(task)
        known = self._closed.get(task, -1) if before is None else before
        if stored.revision < known:
            return
        if stored.state.status in OPEN:
            if stored.revision > known:
                self._keep(stored, now)
            self._doubtful.pop(task, None)
            self._place(task, now, was_taken=was_taken)
            self.learn_unfinished(task, stored.state.status)
        elif stored.revision > known:
            self._close(task, stored.revision)
            self._learn_status(task, stored.state.status)

    def completed(self, task: TaskId, partition: int, revision: int) -> bool:
        """Learn that a task of any partition is complete; True if another task may be claimed now."""
        if partition == self.partition:
            before = self._open.revision(task)
            known = self._closed.get(task, -1) if before is None else before
            if revision <= known:
                return False
            has_room = self._close(task, revision)
            return self._free(task) or has_room
        return self._free(task)

    def knows(self, task: TaskId, revision: int) -> bool:
        """True if news of an open task as of this revision, or older ones, change nothing."""
        known = self._open.revision(task)
        return known is not None and known >= revision and task not in self._doubtful

    def is_taken(self, task: TaskId) -> bool:
        """True if a claim of the task is being written: its outcome gives the newest state."""
        return task in self._taken

    def learn_unfinished(self, task: TaskId, status: Status) -> bool:
        """Take news of a task of any partition that is not complete; True if the driver must read it."""
        return self._blocked.learn_unfinished(task, status)

    def learn_dependency(self, task: TaskId, status: Status | None) -> None:
        """Learn the status that was read of an unknown dependency; None if it does not exist.

        Until it is complete, a watch that began before that read must report its changes. If the watch has
        lost changes, the driver calls ``doubt_dependencies``.
        """
        freed = self._blocked.answered(task, status)
        for each in freed:
            head = self._open[each].head
            if status is not None and fails(status, head.after_failure):
                self._failed[each] = FailedDependency(task, status)
            self._ready.add(head)

    def unknown_dependencies(self, limit: int | None = None) -> list[TaskId]:
        """List dependencies that the driver must read, at most ``limit``."""
        return self._blocked.unknown(limit)

    def ask_dependencies(self, limit: int | None = None) -> list[TaskId]:
        """List ``unknown_dependencies`` for a read that begins now.

        Its answers, given to ``learn_dependency``, say nothing of later changes.
        """
        return self._blocked.ask(limit)

    def failed_dependency(self, task: TaskId) -> FailedDependency | None:
        """Return the failed dependency by which an offered task becomes dead; None if there is none."""
        return self._failed.get(task)

    @property
    def awaited(self) -> Container[TaskId]:
        """The tasks that others of this partition wait for; a live view."""
        return self._blocked.awaited

    def doubt_dependencies(self) -> None:
        """Mark as unknown all that tasks wait for, as changes may have been missed.

        That includes the claimed tasks that limited tasks wait for.
        """
        self._blocked.doubt()
        for task in self._ready.counted():
            if task not in self._taken:
                self._leave(task, self._open.get(task))
                self._doubtful[task] = None

    def offer_limited(self) -> None:
        """Offer limited tasks from now on, as the whole partition has been read since the take-over."""
        self._ready.open()

    def best(self, now: float, wall: float, names: Collection[str] | None = None) -> Rank | None:
        """Return the task of these functions to claim next (SK-5, SK-8); None if there is none.

        ``names`` None is all functions. The task stays the same until it is ``take`` or news arrives.
        The cost grows with the number of names, and with the logarithm of the number of tasks.
        """
        self._wake(now, wall)
        return self._ready.best(names)

    def next_best(self, names: Collection[str] | None = None) -> Rank | None:
        """Return the task to claim after that of ``best`` was taken, at the same time; None for none."""
        return self._ready.best(names)

    def names(self) -> set[str]:
        """Return the functions that have tasks to claim."""
        return set(self._ready.names())

    def ready_since(self, wall: float) -> float | None:
        """Return since when the oldest ready task waits, in seconds since 1970; None if there is none."""
        oldest, due = self._ready.oldest(), self._scheduled.next()
        times = [] if due is None or due > wall else [due]
        if oldest is not None:
            times.append(ready_since(oldest, self._open[oldest].state.due, wall))
        return min(times, default=None)

    def has_rate(self, task: TaskId) -> bool:
        """True if an open task has a rate limit."""
        return self._open.has_rate(task)

    def take(self, task: TaskId) -> tuple[Stored, bool]:
        """Take a task whose claim is about to be written: it is not offered until the outcome is known.

        Return the task, and True if it replaces a claim that is over.
        """
        stored = self._open[task]
        self._ready.count(stored.head)
        self._leave(task, stored)
        self._taken[task] = stored.revision
        return stored, stored.state.status is Status.CLAIMED

    def start(self, task: TaskId, wall: float) -> RateStart | None:
        """Count a start of a ``take`` task for its rate limit, at the time of ``best``.

        ``start_ended`` must follow.
        """
        return self._ready.start(self._open[task].head, wall)

    def start_ended(self, head: Head, revision: int | None) -> None:
        """End a start: its claim was written at this revision, or None for any other outcome.

        After None no task of its rate limit is offered before the mark was read.
        """
        self._ready.start_ended(head, revision)

    def unread_rates(self, limit: int) -> list[LimitId]:
        """List rate limits whose marks the driver must read for ``learn_rate``, at most ``limit``."""
        return self._ready.unread_rates(limit)

    def learn_rate(self, limit: LimitId, mark: RateMark | None, now: float) -> None:
        """Take the mark of a rate limit as read not later than ``now``; None if there is none."""
        self._ready.wake(now)
        self._ready.learn_rate(limit, mark)

    def settled(self, stored: Stored, now: float) -> None:
        """Learn the task as a write has left it, not later than ``now``."""
        was_taken = self._taken.pop(stored.head.id, None) is not None
        self._learn(stored, now, was_taken=was_taken)
        known = self._open.revision(stored.head.id)
        if known is not None and known > stored.revision:
            self._place(stored.head.id, now)

    def conflicted(self, task: TaskId, now: float) -> None:
        """Doubt a task whose claim the store refused, unless newer news has come since."""
        revision = self._taken.pop(task, None)
        if revision is not None and self._open.revision(task) == revision:
            self._doubtful[task] = None
        self._place(task, now)

    def put_back(self, task: TaskId, now: float) -> None:
        """Offer a task again whose claim was not written, and will not be."""
        self._taken.pop(task, None)
        self._place(task, now)

    def set_aside(self, task: TaskId, until: float) -> None:
        """Set a task aside ``until`` a time or news of it: its claim can't be written, and had no effect.

        Meanwhile it takes no room in its limit, unless an earlier claim of it does (SK-23).
        """
        self._taken.pop(task, None)
        stored = self._open.get(task)
        if stored is not None:
            self._leave(task, stored)
            self._aside.set(task, until)
            if stored.state.status is not Status.CLAIMED:
                self._ready.uncount(stored.head)

    def forget(self, task: TaskId) -> None:
        """Forget a task that no longer exists."""
        self._taken.pop(task, None)
        self._drop(task)

    def doubtful(self) -> list[TaskId]:
        """List tasks that the driver must read and ``learn``, or ``forget``."""
        return list(self._doubtful)

    def next_wakeup(self, now: float, wall: float, names: Collection[str] | None = None) -> float | None:
        """Return when there may be something of these functions to offer, in seconds of ``now``'s clock.

        None if only news can bring it.
        """
        if self._ready.has(names):
            return now
        due = self._scheduled.next()
        found = (self._running.next(), self._aside.next(), self._ready.next_room())
        times = [] if due is None else [now + max(due - wall, 0.0)]
        times += [at for at in found if at is not None]
        return max(now, min(times)) if times else None

    def _wake(self, now: float, wall: float) -> None:
        self._ready.wake(now)
        for task in self._aside.pop_due(now):
            self._place(task, now)
        for task in self._scheduled.pop_due(wall):
            self._unblock(self._open[task])
        for task in self._running.pop_due(now):
            self._ready.add_claimed(self._open[task].head)

    def _keep(self, stored: Stored, now: float) -> None:
        task = stored.head.id
        before = self._open.claim(task)
        self._open.put(stored)
        self._closed.pop(task, None)
        claim = _running_claim(stored)
        if claim is None:
            self._over_at.pop(task, None)
        elif before is None or not is_same_term(claim, before):
            self._over_at[task] = over_at(claim, now, self._clock, self._buffer_s)

    def _place(self, task: TaskId, now: float, *, was_taken: bool = False) -> None:
        """Put a task in its place; one that was taken has none to leave."""
        stored = self._open.get(task)
        if stored is None or task in self._taken or task in self._doubtful:
            return
        if not was_taken:
            self._leave(task, stored)
        if stored.state.status is Status.CLAIMED:
            self._ready.count(stored.head)
            if self._over_at[task] > now:
                self._running.set(task, self._over_at[task])
            else:
                self._ready.add_claimed(stored.head)
            return
        if stored.state.due > 0:
            self._scheduled.set(task, stored.state.due)
        else:
            self._unblock(stored)
        self._ready.uncount(stored.head)

    def _unblock(self, stored: Stored) -> None:
        """Offer or block a due task. If it was claimed before, its dependencies were settled then."""
        is_claimed_before = stored.state.claim is not None
        head = stored.head
        if is_claimed_before or not self._blocked.add(head.id, head.after, head.after_failure):
            self._ready.add(head)

    def _leave(self, task: TaskId, stored: Stored | None) -> None:
        if stored is not None:
            self._ready.drop(stored.head)
        self._scheduled.drop(task)
        self._running.drop(task)
        self._aside.drop(task)
        self._blocked.drop(task)
        self._failed.pop(task, None)

    def _close(self, task: TaskId, revision: int) -> bool:
        """Close a task; True if its limit now has room for a task that it held back."""
        has_room = self._drop(task)
        self._closed[task] = revision
        if len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)
        return has_room

    def _drop(self, task: TaskId) -> bool:
        stored = self._open.pop(task)
        self._leave(task, stored)
        self._over_at.pop(task, None)
        self._doubtful.pop(task, None)
        return stored is not None and self._ready.uncount(stored.head)

    def _learn_status(self, task: TaskId, status: Status) -> None:
        if status is Status.COMPLETED:
            self._free(task)
        else:
            self.learn_unfinished(task, status)

    def _free(self, completed: TaskId) -> bool:
        """Offer the tasks that waited for this one only; True if there are any."""
        freed = self._blocked.completed(completed)
        for each in freed:
            self._ready.add(self._open[each].head)
        return bool(freed)


def _running_claim(stored: Stored) -> ClaimState | None:
    return stored.state.claim if stored.state.status is Status.CLAIMED else None
