"""The owner of a partition: what one partition holds in memory, and what of it may be claimed (SK-5, SK-13).

Pure: no clock, no store. The driver tells what it has read or written and when that was, and asks for
candidates; nothing here makes a claim safe, which is the store's part. Whatever is told late, twice or in
another order than it happened, the owner keeps what has the greatest revision.

Every open task is in exactly one place:

==========  ==========================================================================================
place       what it is there for
==========  ==========================================================================================
scheduled   waiting until it is due, by the wall clock
blocked     waiting until all that it depends on is settled, here or in other partitions
ready       to be offered: waiting and due, or claimed and over, or to become dead with a dependency
running     claimed; it will be over when its time and the buffer have passed
held back   ready, but as many tasks are claimed, or have just been, as its limit allows
taken       a claim of it is being written
aside       a claim of it can't be written; it is offered again at a stated time
doubtful    what its state is must be read, as a claim of it was refused by the store
==========  ==========================================================================================

**Limits** (SK-23). All tasks of one limit lie in one partition, and only its owner claims them. So what an
owner knows to be claimed, being claimed, or doubtful is never less than what is claimed, once it has read
the whole partition after it took that over: until then no limited task is offered. Of a rate limit it reads
the mark that the last start has left in the store, and each start replaces that very mark.

**When a claim is over** (SK-8, SK-18). Where its term was counted on this host's boot clock, at its end. Any
other clock is not compared: then ``ttl_s`` is counted from when the owner learnt of the term, which is later
than when its holder began to count. In both cases the stated buffer comes on top.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Container
from typing import Final

from rebalanser.tasks.clocks import Timers, is_same_term, over_at
from rebalanser.tasks.engine import RateStart
from rebalanser.tasks.ids import ready_since
from rebalanser.tasks.index.dependencies import Completions, Dependencies
from rebalanser.tasks.index.ready_index import Offers, Rank
from rebalanser.tasks.model import (
    OPEN,
    ClaimState,
    Head,
    LimitId,
    RateMark,
    Status,
    Stored,
    TaskId,
)
from rebalanser.tasks.rules import FailedDependency, fails

REMEMBERED: Final = 65_536
"""Maximum number of closed tasks whose revision is kept, so that late news of them change nothing."""


class Owner:
    """The index of one partition, for whoever owns it with this fencing ``token`` (SK-13).

    ``now`` is always seconds of one monotonic clock; ``clock`` is its name as it stands in a
    :class:`~rebalanser.tasks.model.Term`, empty where it has none. ``wall`` is seconds since 1970.
    ``buffer_s`` is what is waited beyond a claim's time (SK-8): more than clocks drift apart in that time.
    ``complete`` is what the owners of a process have in common.
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
        self._open: dict[TaskId, Stored] = {}
        self._closed: OrderedDict[TaskId, int] = OrderedDict()
        self._over_at: dict[TaskId, float] = {}
        self._ready = Offers(clock)
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
        """An open task as it is known here."""
        return self._open.get(task)

    def learn(self, stored: Stored, now: float) -> None:
        """Learn a task that was read, or reported by a watch, not later than ``now``. Older news change
        nothing (SK-11).

        Of tasks in other partitions it matters only whether they are complete, dead or cancelled.
        """
        task = stored.head.id
        if stored.partition != self.partition:
            self._heard(task, stored.state.status)
            return
        before = self._open.get(task)
        known = self._closed.get(task, -1) if before is None else before.revision
        if stored.revision < known:
            return
        if stored.state.status in OPEN:
            if stored.revision > known:
                self._keep(stored, before, now)
            self._doubtful.pop(task, None)
            self._place(task, now)
            self.heard(task, stored.state.status)
        elif stored.revision > known:
            self._close(task, stored.revision)
            self._heard(task, stored.state.status)

    def completed(self, task: TaskId, partition: int, revision: int) -> bool:
        """As :meth:`learn` of a complete task of any partition; whether another may be claimed now."""
        if partition == self.partition:
            before = self._open.get(task)
            known = self._closed.get(task, -1) if before is None else before.revision
            if revision <= known:
                return False
            has_room = self._close(task, revision)
            return self._free(task) or has_room
        return self._free(task)

    def knows(self, task: TaskId, revision: int) -> bool:
        """True if news of an open task as of this revision, or older ones, change nothing."""
        known = self._open.get(task)
        return known is not None and known.revision >= revision and task not in self._doubtful

    def is_taken(self, task: TaskId) -> bool:
        """True if a claim of the task is being written, whose outcome tells what has become of it."""
        return task in self._taken

    def heard(self, task: TaskId, status: Status) -> bool:
        """Take news of a task of any partition that is not complete; True if the driver must ask about it."""
        return self._blocked.heard(task, status)

    def learn_dependency(self, task: TaskId, status: Status | None) -> None:
        """Learn what a read answered of an unknown dependency; None if it does not exist.

        While it is not complete, changes of it must be learnt from a watch that has run since before that
        read; where the watch has lost changes, the driver calls :meth:`doubt_dependencies`.
        """
        freed = self._blocked.answered(task, status)
        for each in freed:
            head = self._open[each].head
            if status is not None and fails(status, head.after_failure):
                self._failed[each] = FailedDependency(task, status)
            self._ready.add(head)

    def unknown_dependencies(self, limit: int | None = None) -> list[TaskId]:
        """Tasks that the driver must ask the engine about, at most ``limit`` of them."""
        return self._blocked.unknown(limit)

    def ask_dependencies(self, limit: int | None = None) -> list[TaskId]:
        """As :meth:`unknown_dependencies`, for a read that is sent from now on.

        Its answers, given to :meth:`learn_dependency`, tell nothing of what has changed meanwhile.
        """
        return self._blocked.ask(limit)

    def failed_dependency(self, task: TaskId) -> FailedDependency | None:
        """Return the failed dependency by which an offered task becomes dead; None if there is none."""
        return self._failed.get(task)

    @property
    def awaited(self) -> Container[TaskId]:
        """The tasks that others here wait for; it follows every change."""
        return self._blocked.awaited

    def doubt_dependencies(self) -> None:
        """Changes may have been missed: ask again about everything that is waited for.

        That is also what limited tasks wait for: those that are claimed.
        """
        self._blocked.doubt()
        for task in self._ready.counted():
            if task not in self._taken:
                self._leave(task)
                self._doubtful[task] = None

    def knows_all(self) -> None:
        """The whole partition was read after it was taken over: limited tasks may be offered."""
        self._ready.open()

    def best(self, now: float, wall: float, names: Collection[str] | None = None) -> Rank | None:
        """The task to claim next (SK-5, SK-8), of these functions, None being all; None if there is none.

        The same until it is :meth:`taken` or more is known. The cost grows with the number of names, and with
        the logarithm of the number of tasks.
        """
        self._wake(now, wall)
        return self._ready.best(names)

    def names(self) -> set[str]:
        """The functions of which there are tasks that may be claimed."""
        return set(self._ready.names())

    def ready_since(self, wall: float) -> float | None:
        """Return since when the oldest ready task waits, in seconds since 1970; None if there is none."""
        oldest, due = self._ready.oldest(), self._scheduled.next()
        times = [] if due is None or due > wall else [due]
        if oldest is not None:
            times.append(ready_since(oldest, self._open[oldest].state.due, wall))
        return min(times, default=None)

    def taken(self, task: TaskId) -> tuple[Stored, bool]:
        """A claim of the task is being written: it is not offered until it is known what became of that.

        The task, and whether a claim of it was made before that is over.
        """
        stored = self._open[task]
        self._ready.count(stored.head)
        self._leave(task)
        self._taken[task] = stored.revision
        return stored, stored.state.status is Status.CLAIMED

    def start(self, task: TaskId, wall: float) -> RateStart | None:
        """Count a start of a :meth:`taken` task for its rate limit, at the time of :meth:`best`.

        :meth:`start_ended` must follow.
        """
        return self._ready.start(self._open[task].head, wall)

    def start_ended(self, head: Head, revision: int | None) -> None:
        """The claim of a task is settled: it was written at this revision; None for anything else.

        Then no task of its rate limit is offered before the mark of that was read.
        """
        self._ready.start_ended(head, revision)

    def unread_rates(self, most: int) -> list[LimitId]:
        """Return rate limits whose marks the driver must read for :meth:`learn_rate`, at most this number."""
        return self._ready.unread_rates(most)

    def learn_rate(self, limit: LimitId, mark: RateMark | None, now: float) -> None:
        """Take the mark of a rate limit as read not later than ``now``; None if there is none."""
        self._ready.wake(now)
        self._ready.learn_rate(limit, mark)

    def settled(self, stored: Stored, now: float) -> None:
        """The write was carried out not later than ``now``: this is the task since then."""
        self._taken.pop(stored.head.id, None)
        self.learn(stored, now)
        known = self._open.get(stored.head.id)
        if known is not None and known.revision > stored.revision:
            self._place(stored.head.id, now)

    def conflicted(self, task: TaskId, now: float) -> None:
        """The store refused the claim: the task is offered again once more is known of it than then."""
        revision = self._taken.pop(task, None)
        known = self._open.get(task)
        if revision is not None and known is not None and known.revision == revision:
            self._doubtful[task] = None
        self._place(task, now)

    def put_back(self, task: TaskId, now: float) -> None:
        """The claim was not written, and will not be."""
        self._taken.pop(task, None)
        self._place(task, now)

    def set_aside(self, task: TaskId, until: float) -> None:
        """The claim can't be written, and had no effect: the task is offered again ``until`` then or news.

        Meanwhile it takes no room in its limit, unless an earlier claim of it does (SK-23).
        """
        self._taken.pop(task, None)
        stored = self._open.get(task)
        if stored is not None:
            self._leave(task)
            self._aside.set(task, until)
            if stored.state.status is not Status.CLAIMED:
                self._ready.uncount(stored.head)

    def forget(self, task: TaskId) -> None:
        """A read found that there is no such task any more."""
        self._taken.pop(task, None)
        self._drop(task)

    def doubtful(self) -> list[TaskId]:
        """Tasks that the driver must read and :meth:`learn`, or :meth:`forget`."""
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
            self._unblock(task)
        for task in self._running.pop_due(now):
            self._ready.add_claimed(self._open[task].head)

    def _keep(self, stored: Stored, before: Stored | None, now: float) -> None:
        task = stored.head.id
        self._open[task] = stored
        self._closed.pop(task, None)
        claim = _running_claim(stored)
        if claim is None:
            self._over_at.pop(task, None)
        elif before is None or not is_same_term(claim, _running_claim(before)):
            self._over_at[task] = over_at(claim, now, self._clock, self._buffer_s)

    def _place(self, task: TaskId, now: float) -> None:
        """Put a task where it belongs by what is known of it."""
        stored = self._open.get(task)
        if stored is None or task in self._taken or task in self._doubtful:
            return
        self._leave(task)
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
            self._unblock(task)
        self._ready.uncount(stored.head)

    def _unblock(self, task: TaskId) -> None:
        """A task is due. Of one that was claimed before, all that it depends on was settled then."""
        stored = self._open[task]
        is_claimed_before = stored.state.claim is not None
        head = stored.head
        if is_claimed_before or not self._blocked.add(task, head.after, head.after_failure):
            self._ready.add(stored.head)

    def _leave(self, task: TaskId) -> None:
        stored = self._open.get(task)
        if stored is not None:
            self._ready.drop(stored.head)
        self._scheduled.drop(task)
        self._running.drop(task)
        self._aside.drop(task)
        self._blocked.drop(task)
        self._failed.pop(task, None)

    def _close(self, task: TaskId, revision: int) -> bool:
        """True if the limit of the task has room for another one that waits for that."""
        has_room = self._drop(task)
        self._closed[task] = revision
        if len(self._closed) > REMEMBERED:
            self._closed.popitem(last=False)
        return has_room

    def _drop(self, task: TaskId) -> bool:
        self._leave(task)
        stored = self._open.pop(task, None)
        self._over_at.pop(task, None)
        self._doubtful.pop(task, None)
        return stored is not None and self._ready.uncount(stored.head)

    def _heard(self, task: TaskId, status: Status) -> None:
        if status is Status.COMPLETED:
            self._free(task)
        else:
            self.heard(task, status)

    def _free(self, completed: TaskId) -> bool:
        """True if something waited for nothing else."""
        freed = self._blocked.completed(completed)
        for each in freed:
            self._ready.add(self._open[each].head)
        return bool(freed)


def _running_claim(stored: Stored) -> ClaimState | None:
    return stored.state.claim if stored.state.status is Status.CLAIMED else None
