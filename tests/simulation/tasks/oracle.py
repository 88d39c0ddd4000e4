"""The oracle: judges what takes effect in the store against the rules, by true time.

It does not rely on the state of any actor. It sees each write that takes effect, its sender, each claim that
is handed out, and each access of a body to the world outside.

**Access within the claim's time** (SK-8). A body that checks its own clock, finds its claim current and
accesses something at that instant is never later than the next claim, unless an operator ended its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rebalanser.core.tasks.ids import created_at
from rebalanser.core.tasks.model import (
    CLOSED_UNDONE,
    OPEN,
    AfterFailure,
    ClaimState,
    Head,
    LimitId,
    Status,
    Stored,
    Task,
    TaskId,
    Update,
    rate_of,
)
from rebalanser.core.tasks.rules import ClaimKey
from rebalanser.core.tasks.store import Forwarded, Move, OwnerEpoch, Write
from rebalanser.errors import OutcomeUnknown
from simulation.kernel.reports import Violation
from simulation.tasks.scenario import DRIFT_RATIO, RETENTION

_KEPT_S = {status: RETENTION.seconds(status) for status in Status}
_ROUNDED_S = 1e-6


@dataclass
class Oracle:
    """Judges every write when it takes effect."""

    now: Callable[[], float]
    """True time, in seconds."""
    counts: Counter[str] = field(default_factory=Counter)
    completed: dict[TaskId, int] = field(default_factory=dict)
    """Tasks that were ever completed, with the revision."""
    closed_gone: set[TaskId] = field(default_factory=set)
    """Tasks that were deleted when they were dead or cancelled."""
    hopeless: set[TaskId] = field(default_factory=set)
    """Tasks that wait for ever, as a dependency was collected before they were enqueued."""
    _closed_at: dict[TaskId, float] = field(default_factory=dict)
    """True time at which each closed task was closed."""
    paused_at: float | None = None
    """True time at which the queue's pause began; None if it is not paused."""
    _running: dict[LimitId, set[TaskId]] = field(default_factory=dict)
    """Claimed tasks of each limit."""
    _requested_at: dict[tuple[TaskId, str], float] = field(default_factory=dict)
    """True time of the last request of a claim, by task and holder: a slot may be tried again."""
    _full_at: dict[LimitId, float] = field(default_factory=dict)
    """True time at which a rate limit allows its whole burst again."""
    _gone: set[TaskId] = field(default_factory=set)
    """Tasks that were deleted."""
    _last_of_key: dict[tuple[str, str], Head] = field(default_factory=dict)
    """The last task enqueued with each unique key."""
    _failed_until: dict[TaskId, float] = field(default_factory=dict)
    """Revision at which a dead or cancelled task was requeued; infinity while it is dead or cancelled."""
    _contents: dict[TaskId, Task] = field(default_factory=dict)
    _holders: dict[tuple[TaskId, int], str] = field(default_factory=dict)
    _granted: set[tuple[TaskId, int]] = field(default_factory=set)
    _used: set[str] = field(default_factory=set)
    """Holders of claims that the engine's index has made."""
    _slots_over: set[str] = field(default_factory=set)
    """Holders of slots that were used, withdrawn, or ended with their worker."""
    _updates: dict[tuple[TaskId, int], list[bytes]] = field(default_factory=dict)
    _taken_from: dict[tuple[TaskId, int], float] = field(default_factory=dict)
    _epochs: dict[int, int] = field(default_factory=dict)
    _spooled: set[TaskId] = field(default_factory=set)
    _refused: set[TaskId] = field(default_factory=set)
    _taken: set[Forwarded] = field(default_factory=set)
    _applied: dict[int, Write] = field(default_factory=dict)
    """The writes that took effect, by their identity."""
    _denied: dict[int, Write] = field(default_factory=dict)
    """The writes that were reported to have no effect, by their identity."""
    _copied: set[int] = field(default_factory=set)

    def arrives(self, write: Write) -> None:
        """Note that a write arrives at the engine; a second copy of an applied one is answered as refused."""
        if id(write) in self._applied:
            self._copied.add(id(write))

    def applied(self, write: Write) -> None:
        """Note that a write takes effect."""
        self._applied[id(write)] = write
        self._is_honest(write)

    def denied(self, write: Write) -> None:
        """Note that a write's sender gets the answer that it has no effect."""
        self._denied[id(write)] = write
        self._is_honest(write)

    def _is_honest(self, write: Write) -> None:
        is_both = id(write) in self._applied and id(write) in self._denied
        if is_both and id(write) not in self._copied:
            raise Violation("SK-9", f"{write} took effect, and is told as a failure")

    def enqueued(
        self, task: Task, revision: int, unknown: tuple[TaskId, ...], entry: Forwarded | None
    ) -> None:
        """Note a new task; of its ``unknown`` dependencies some may have been collected.

        ``entry`` is the entry of an outbox that makes it, even if the task was collected before.
        """
        if entry in self._taken:
            raise Violation("SK-4", f"{entry} has made {_short(task.head.id)} before, and makes it again")
        if entry is not None:
            self._taken.add(entry)
        if any(needed in self.completed or needed in self.closed_gone for needed in unknown):
            self.counts["waits for what was collected"] += 1
            self.hopeless.add(task.head.id)
        self.counts["enqueued"] += 1
        if task.head.id in self._contents:
            raise Violation("SK-3", f"{_short(task.head.id)} is enqueued again, at revision {revision}")
        self._contents[task.head.id] = task
        self._judge_unique(task.head)

    def _count_running(self, after: Stored) -> None:
        """Judge that no more tasks of a limit are claimed than it allows (SK-23)."""
        head = after.head
        if not head.max_running:
            return
        running = self._running.setdefault(head.limit, set())
        if after.state.status is not Status.CLAIMED:
            running.discard(head.id)
            return
        running.add(head.id)
        self.counts["claims of limited tasks"] += 1
        if len(running) > head.max_running:
            raise Violation("SK-23", f"{_told(after)} is claimed as number {len(running)} of its limit")

    def requested(self, claims: Iterable[tuple[TaskId, str]]) -> None:
        """Note the tasks and holders of claims that are requested now."""
        self._requested_at.update(dict.fromkeys(claims, self.now()))

    def used(self, task: TaskId, holder: str) -> None:
        """Note that the engine's index claims a task for this holder, which no claim may have yet (SK-6)."""
        if holder in self._used:
            raise Violation("SK-6", f"the holder {holder} gets a second claim, of {_short(task)}")
        self._used.add(holder)
        self.counts["claims from the index"] += 1
        self.requested([(task, holder)])

    def _judge_rate(self, after: Stored, claim: ClaimState) -> None:
        """Judge that a rate limit allows a start when it was requested, by the fastest clock (SK-23)."""
        head = after.head
        if not head.rate_limit:
            return
        rate = rate_of(head.rate_limit)
        every_s = rate.every_s / (1 + 2 * DRIFT_RATIO)
        at = self._requested_at[head.id, claim.holder]
        full_at = max(self._full_at.get(head.limit, at), at)
        self.counts["starts of rate limits"] += 1
        if full_at - at > (rate.burst - 1) * every_s + _ROUNDED_S:
            raise Violation("SK-23", f"{_told(after)} starts {full_at - at:.3f} s too soon for its rate")
        self._full_at[head.limit] = full_at + every_s

    def _judge_unique(self, head: Head) -> None:
        """Judge that a new task is no duplicate of an open task, or of one within its time (SK-23)."""
        if not head.unique_key:
            return
        key = (head.name, head.unique_key)
        last, self._last_of_key[key] = self._last_of_key.get(key), head
        if last is None or last.id in self._gone:
            return
        self.counts["follows one with its unique key"] += 1
        if last.id not in self._closed_at:
            raise Violation("SK-23", f"{_short(head.id)} is a duplicate of {_short(last.id)}, which is open")
        if created_at(head.id) < created_at(last.id) + last.unique_for_s:
            raise Violation("SK-23", f"{_short(head.id)} comes too soon after {_short(last.id)}")

    def exists(self, task: TaskId) -> bool:
        """True if a task was ever enqueued."""
        return task in self._contents

    def tasks(self) -> Iterable[TaskId]:
        """Return all tasks that were ever enqueued."""
        return self._contents

    def task(self, task: TaskId) -> Task:
        """Return a task as it was enqueued."""
        return self._contents[task]

    def is_same(self, task: Task) -> bool:
        """True if this task was enqueued with this id."""
        return self._contents.get(task.head.id) == task

    def spooled(self, task: TaskId) -> None:
        """Note that a producer has put a task into its outbox."""
        self._spooled.add(task)

    def told_together(self, tasks: Sequence[TaskId], error: Exception | None) -> None:
        """Judge an answer to a producer: the new tasks exist, or none of them was made (SK-3)."""
        made = [task for task in tasks if task in self._contents]
        self.counts["told of tasks together"] += 1
        if error is None and len(made) < len(tasks):
            raise Violation("SK-3", f"{len(made)} of {len(tasks)} tasks are there that are said to be")
        if 0 < len(made) < len(tasks) and not isinstance(error, OutcomeUnknown):
            raise Violation("SK-3", f"{len(made)} of {len(tasks)} tasks are there, all or none should be")

    def refused(self, task: TaskId) -> None:
        """Note that a spooled task is refused, as a dependency is missing."""
        self._refused.add(task)

    def are_spooled_made(self) -> None:
        """Judge at the end that each spooled task was made, unless it was refused (SK-4)."""
        lost = self._spooled - self._refused - self._contents.keys()
        if lost:
            raise Violation("SK-4", f"{_short(min(lost))} was spooled, and never made")

    def taken_over(self, epoch: OwnerEpoch) -> None:
        """Note that an owner takes over a partition."""
        self.counts["take-overs"] += 1
        self._epochs[epoch.partition] = max(epoch.token, self._epochs.get(epoch.partition, 0))

    def moved(self, before: Stored, after: Stored, write: Move | None, author: ClaimKey | None) -> None:
        """Judge a change of a task's state; without a write the engine's index made it."""
        if after.state.status not in OPEN and after.state.status is not before.state.status:
            self._closed_at[after.head.id] = self.now()
        elif after.state.status in OPEN:
            self._closed_at.pop(after.head.id, None)
        if before.state.status is Status.COMPLETED:
            raise Violation("SK-10", f"{_told(after)} after it was complete")
        self._count_running(after)
        if _claim_number(after) != _claim_number(before):
            self._claims(before, after, write)
        elif after.state.claim != before.state.claim:
            self._is_of_author(before, author, "SK-7")
        if after.state.status in CLOSED_UNDONE:
            self._failed_until[after.head.id] = math.inf
        elif before.state.status in CLOSED_UNDONE:
            self._failed_until[after.head.id] = after.revision
        if after.state.status is Status.DEAD and after.state.claim is None:
            self._fails(before, after)
        if after.state.status is Status.COMPLETED:
            self._is_of_author(before, author, "SK-10")
            self.counts["completed"] += 1
            self.completed[after.head.id] = after.revision
        self._logged(before, after, None if write is None else write.update)

    def granted(self, task: TaskId, held: ClaimKey) -> None:
        """Judge a claim that a worker gets."""
        self.counts["granted"] += 1
        key = (task, held.number)
        if key in self._granted:
            raise Violation("SK-6", f"claim {held.number} of {_short(task)} is granted a second time")
        self._granted.add(key)
        if self._holders.get(key) != held.holder:
            raise Violation("SK-6", f"claim {held.number} of {_short(task)} is granted, and another's")

    def updated(self, task: TaskId, held: ClaimKey, sequence: int, content: bytes) -> None:
        """Judge the answer to a body that an update is written."""
        if self._updates.get((task, held.number), [])[sequence : sequence + 1] != [content]:
            raise Violation(
                "SK-9", f"update {sequence} of claim {held.number} of {_short(task)} is not there"
            )

    def paused(self, *, is_paused: bool) -> None:
        """Note that the queue is paused or resumed."""
        self.counts["pauses"] += is_paused
        if not is_paused:
            self.paused_at = None
        elif self.paused_at is None:
            self.paused_at = self.now()

    def slot_used(self, holder: str, stored: Stored) -> None:
        """Judge a claim of a task for a free slot."""
        self.counts["claims for slots"] += 1
        if holder in self._slots_over:
            raise Violation("SK-20", f"{_told(stored)} is claimed for the slot {holder}, which is not free")
        self._slots_over.add(holder)

    def slot_ended(self, holder: str) -> None:
        """Note that a slot is withdrawn, or ends with its worker's lease."""
        self._slots_over.add(holder)

    def accesses(self, task: TaskId, held: ClaimKey, *, in_time: bool) -> None:
        """Judge a body's access to the world outside; ``in_time`` if its clock finds the claim current."""
        self.counts["accesses"] += 1
        since = self._taken_from.get((task, held.number))
        if since is None:
            return
        self.counts["stale accesses"] += 1
        if in_time:
            raise Violation(
                "SK-8",
                f"claim {held.number} of {_short(task)} lasts for its holder, and was over at {since:.3f}",
            )

    def chose(self, chosen: Stored, better: Stored | None) -> None:
        """Judge an owner that claims a task although it knows a better one that could be claimed."""
        self.counts["chosen"] += 1
        if better is not None:
            raise Violation("SK-5", f"{_told(chosen)} is chosen, {_told(better)} comes first")

    def read(self, before: Stored | None, after: Stored) -> None:
        """Judge an owner's knowledge of a task before and after news."""
        if before is not None and after.revision < before.revision:
            raise Violation("SK-11", f"{_told(after)} is taken for newer than {_told(before)}")

    def collected(self, tasks: list[Stored], stored: Iterable[Stored]) -> None:
        """Judge that tasks are deleted; ``stored`` has all tasks before."""
        self.counts["collected"] += len(tasks)
        ids = {each.head.id for each in tasks}
        for each in tasks:
            kept_s = _KEPT_S[each.state.status]
            if kept_s is None:
                raise Violation("SK-14", f"{_told(each)} is collected")
            lasted_s = self.now() - self._closed_at[each.head.id]
            if lasted_s < kept_s - _ROUNDED_S:
                raise Violation("SK-22", f"{_told(each)} is deleted {lasted_s:.3f} s after it was closed")
        self._gone |= ids
        self.closed_gone |= ids - self.completed.keys()
        self.counts["dead or cancelled ones deleted"] += len(ids - self.completed.keys())
        for other in stored:
            if other.head.id in ids or other.state.status is Status.COMPLETED:
                continue
            gone = ids.intersection(other.head.after)
            if gone:
                raise Violation("SK-14", f"{_told(other)} waits, {_short(min(gone))} is collected")
        for each in tasks:
            lost = [
                needed
                for needed in each.head.after
                if not (needed in self.completed or needed in self.closed_gone)
            ]
            if lost and each.state.status is Status.COMPLETED:
                raise Violation("SK-14", f"{_told(each)} is collected before {_short(lost[0])}")

    def _claims(self, before: Stored, after: Stored, write: Move | None) -> None:
        number, expected = _claim_number(after), _claim_number(before) + 1
        key = (after.head.id, number)
        if number != expected or key in self._holders or after.state.claim is None:
            raise Violation("SK-6", f"{_told(after)} is claimed by number {number} after {expected - 1}")
        epoch = None if write is None else write.epoch
        if write is not None and (epoch is None or epoch.token < self._epochs.get(after.partition, 0)):
            raise Violation("SK-13", f"{_told(after)} is claimed by an owner that was followed by another")
        missing = [needed for needed in after.head.after if needed not in self.completed]
        if missing and after.head.after_failure is AfterFailure.RUN:
            self.counts["runs after a failure"] += not number
            # A task that was claimed before has run after it already.
            missing = [] if number else [each for each in missing if not self._has_failed(each, before)]
        if missing:
            raise Violation("SK-5", f"{_told(after)} is claimed before {_short(missing[0])} is settled")
        if self.paused_at is not None:
            raise Violation("SK-23", f"{_told(after)} is claimed, and the queue is paused")
        if write is not None and write.slot is not None and write.slot.ahead and after.head.rate_limit:
            raise Violation("SK-23", f"{_told(after)} has a rate limit, and is claimed for a slot ahead")
        self._holders[key] = after.state.claim.holder
        self._judge_rate(after, after.state.claim)
        self.counts["claims"] += 1
        if before.state.status is Status.CLAIMED:
            self.counts["claims of what was over"] += 1
            self._taken_from[after.head.id, number - 1] = self.now()

    def _fails(self, before: Stored, after: Stored) -> None:
        """Judge that a task becomes dead that was never claimed."""
        self.counts["fails with a dependency"] += 1
        head = before.head
        if head.after_failure is not AfterFailure.FAIL or before.state.status is not Status.WAITING:
            raise Violation("SK-5", f"{_told(after)} is dead, and was {_told(before)}")
        if not any(self._has_failed(each, before) for each in head.after):
            raise Violation("SK-5", f"{_told(after)} is dead, and nothing that it depends on has failed")

    def _has_failed(self, needed: TaskId, dependent: Stored) -> bool:
        """True if a task was dead or cancelled at any time since its dependent began to wait."""
        return self._failed_until.get(needed, -1.0) > dependent.revision

    def _is_of_author(self, before: Stored, author: ClaimKey | None, rule: str) -> None:
        claim = before.state.claim
        current = None if claim is None else ClaimKey(claim.number, claim.holder)
        if before.state.status is not Status.CLAIMED or author is None or current != author:
            raise Violation(rule, f"{_told(before)} is written by {author}, whose claim is not current")

    def _logged(self, before: Stored, after: Stored, update: Update | None) -> None:
        claim = after.state.claim
        if update is None:
            if _updates(after) != (_updates(before) if _claim_number(before) == _claim_number(after) else 0):
                raise Violation("SK-9", f"{_told(after)} counts updates that are not there")
            return
        self.counts["updates"] += 1
        log = self._updates.setdefault((after.head.id, update.claim), [])
        if claim is None or update.claim != claim.number or update.sequence != len(log):
            raise Violation("SK-9", f"{_told(after)} gets update {update.sequence} after {len(log)} of them")
        log.append(update.content)
        if claim.updates != len(log):
            raise Violation("SK-9", f"{_told(after)} counts {claim.updates} updates of {len(log)}")

    def are_logs_whole(
        self, tasks: Iterable[TaskId], read: Callable[[TaskId, int, int], bytes | None]
    ) -> None:
        """Judge at the end that each update ever written is still there, also of earlier claims (SK-9)."""
        known = set(tasks)
        for (task, claim), log in self._updates.items():
            for sequence, content in enumerate(log):
                if task in known and read(task, claim, sequence) != content:
                    raise Violation("SK-9", f"update {sequence} of claim {claim} of {_short(task)} is lost")


def _claim_number(stored: Stored) -> int:
    return -1 if stored.state.claim is None else stored.state.claim.number


def _updates(stored: Stored) -> int:
    claim: ClaimState | None = stored.state.claim
    return 0 if claim is None else claim.updates


def _short(task: TaskId) -> str:
    """Return a short form of an id of a simulated world: its milliseconds, counter and process."""
    return f"{int(task[:16], 16)}.{int(task[16:24], 16)}.{int(task[36:], 16)}"


def _told(stored: Stored) -> str:
    claim = "" if stored.state.claim is None else f" {stored.state.claim.number}"
    return f"task {_short(stored.head.id)} ({stored.state.status}{claim} at {stored.revision})"
