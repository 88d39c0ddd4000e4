"""The simulated engine: the writes and reads of the contract, in memory, one at a time.

Every guard of the contract is a small method, so that a test can remove it and see which check notices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from rebalanser.core.tasks.model import OPEN, Head, LimitId, RateMark, Stored, TaskId, TaskState, Update
from rebalanser.core.tasks.rules import ClaimKey, is_duplicate
from rebalanser.core.tasks.store import (
    Answer,
    Applied,
    Collect,
    Duplicate,
    Enqueue,
    EnqueueAll,
    Exists,
    Forwarded,
    FreeSlot,
    GoneSlot,
    Move,
    OutboxTally,
    Paused,
    RateMoved,
    RateStart,
    Skip,
    SlotGone,
    SlotNews,
    Taken,
    TakeOver,
    Unknown,
    UsedSlot,
    Write,
    WriteConflict,
)
from rebalanser.tasks.pauses import QUEUE as QUEUE_PAUSE
from simulation.tasks.oracle import Oracle
from simulation.tasks.scenario import MAX_CONTENT_BYTES

Follower = Callable[[Stored], None]
SlotFollower = Callable[[SlotNews], None]


class SimulatedEngine:
    """A store of one queue's tasks; ``oracle`` judges each write that takes effect."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.revision = 0
        self.tasks: dict[TaskId, Stored] = {}
        self.payloads: dict[TaskId, bytes] = {}
        self.logs: dict[TaskId, dict[tuple[int, int], bytes]] = {}
        self.epochs: dict[int, int] = {}
        self.tallies: dict[str, OutboxTally] = {}
        self.rates: dict[LimitId, RateMark] = {}
        self.followers: list[Follower] = []
        self.pauses: dict[str, bytes] = {}
        self.pause_followers: list[Callable[[], None]] = []
        self.slots: dict[str, FreeSlot | UsedSlot] = {}
        self.slot_followers: list[SlotFollower] = []
        self.leases: dict[int, int] = {}
        """Leases of slots, each with its number of renewals; -1 once it has ended."""
        self._lease_of: dict[str, int] = {}
        self.over: dict[TaskId, int] = {}
        """Revisions of the claims that the index knows to be over, by task."""
        self._holders: set[str] = set()
        self._last_of_key: dict[tuple[str, str], TaskId] = {}

    def apply(self, write: Write, author: ClaimKey | None) -> Answer:
        """Carry out one write; ``author`` is the claim that requests it, for the oracle only."""
        self.oracle.arrives(write)
        answer = self._apply(write, author)
        if isinstance(answer, Applied):
            self.oracle.applied(write)
        return answer

    def decided(self, before: Stored, state: TaskState) -> Stored:
        """Write the index's decision about a task; return the task as it is then."""
        self.revision += 1
        after = replace(before, state=state, revision=self.revision)
        self.oracle.moved(before, after, None, None)
        self._put(after)
        return after

    def is_too_large(self, write: Write) -> bool:
        """True if the update or the result of a write is over the limit."""
        if not isinstance(write, Move):
            return False
        contents = (write.state.result, None if write.update is None else write.update.content)
        return any(content is not None and len(content) > MAX_CONTENT_BYTES for content in contents)

    def _apply(self, write: Write, author: ClaimKey | None) -> Answer:
        match write:
            case Enqueue():
                return self._enqueue(write)
            case EnqueueAll():
                return self._enqueue_all(write)
            case Skip():
                return self._skip(write.entry)
            case Move():
                return self._move(write, author)
            case TakeOver():
                return self._take_over(write)
            case Collect():
                return self._collect(write)

    def read(self, ids: Iterable[TaskId]) -> Mapping[TaskId, Stored]:
        """Read tasks; return those that exist."""
        return {task: self.tasks[task] for task in ids if task in self.tasks}

    def page(self, partition: int | None, after: TaskId, limit: int, *, is_open: bool) -> Sequence[Stored]:
        """Return a page of tasks in the order of their ids."""
        found = (
            stored
            for task, stored in sorted(self.tasks.items())
            if task > after
            and partition in (None, stored.partition)
            and (not is_open or stored.state.status in OPEN)
        )
        return [stored for stored, _ in zip(found, range(limit), strict=False)]

    def update_at(self, task: TaskId, claim: int, sequence: int) -> bytes | None:
        """Return an entry of a log; None if there is none."""
        return self.logs.get(task, {}).get((claim, sequence))

    def read_rates(self, limits: Iterable[LimitId]) -> Mapping[LimitId, RateMark]:
        """Read the marks of rate limits; return those that exist."""
        return {limit: self.rates[limit] for limit in limits if limit in self.rates}

    def put_pause(self, schedule: str, pause: bytes | None) -> None:
        """Put a pause, of the queue if the name is empty; None deletes it."""
        if pause is None:
            self.pauses.pop(schedule, None)
        else:
            self.pauses[schedule] = pause
        if schedule == QUEUE_PAUSE:
            self.oracle.paused(is_paused=pause is not None)
        for follower in list(self.pause_followers):
            follower()

    def publish(self, slot: FreeSlot) -> None:
        """Publish a slot; a holder is published once."""
        if slot.holder not in self._holders:
            self._holders.add(slot.holder)
            self.revision += 1
            self._put_slot(replace(slot, revision=self.revision))

    def withdraw(self, holders: Iterable[str]) -> list[UsedSlot]:
        """Delete the free slots; return the used ones."""
        found = [self.slots[holder] for holder in holders if holder in self.slots]
        for each in found:
            if isinstance(each, FreeSlot):
                self._delete_slot(each)
        return [each for each in found if isinstance(each, UsedSlot)]

    def end_slots(self, process: str) -> None:
        """End the lease of a worker's slots."""
        for each in list(self.slots.values()):
            if each.process == process:
                self._delete_slot(each)

    def grant(self, ttl_s: float, after: Callable[[float, Callable[[], None]], None]) -> int:
        """Grant a lease for slots; ``after`` calls a function some seconds later."""
        lease = len(self.leases) + 1
        self.keep(lease, ttl_s, after, is_new=True)
        return lease

    def keep(
        self,
        lease: int,
        ttl_s: float,
        after: Callable[[float, Callable[[], None]], None],
        *,
        is_new: bool = False,
    ) -> bool:
        """Keep a lease; False if it has ended."""
        if not is_new and not self._is_lease(lease):
            return False
        kept = self.leases[lease] = self.leases.get(lease, 0) + 1
        after(ttl_s, lambda: self.end_lease(lease) if self.leases[lease] == kept else None)
        return True

    def end_lease(self, lease: int) -> None:
        """End a lease, with its slots."""
        self.leases[lease] = -1
        for each in list(self.slots.values()):
            if self._lease_of.get(each.holder) == lease:
                self._delete_slot(each)

    def publish_all(self, slots: Iterable[FreeSlot], used: Iterable[UsedSlot]) -> bool:
        """Publish slots and delete used ones; False if the lease has ended."""
        for slot in slots:
            if not self._is_lease(slot.lease):
                return False
        for each in used:
            if isinstance(self.slots.get(each.holder), UsedSlot):
                self._delete_slot(self.slots[each.holder])
        for slot in slots:
            self._lease_of[slot.holder] = slot.lease
            self.publish(slot)
        return True

    def withdraw_of(self, process: str, holders: Iterable[str] | None) -> list[UsedSlot]:
        """Delete the free slots of a process, by holder or all; return the used ones."""
        mine = [holder for holder, each in self.slots.items() if each.process == process]
        return self.withdraw(mine if holders is None else holders)

    def _is_lease(self, lease: int) -> bool:
        return self.leases.get(lease, -1) > 0

    def _put_slot(self, slot: FreeSlot | UsedSlot) -> None:
        self.slots[slot.holder] = slot
        self._tell_slot(slot)

    def _delete_slot(self, slot: FreeSlot | UsedSlot) -> None:
        del self.slots[slot.holder]
        self.oracle.slot_ended(slot.holder)
        self._tell_slot(GoneSlot(slot.holder, slot.process))

    def _tell_slot(self, news: SlotNews) -> None:
        for follower in list(self.slot_followers):
            follower(news)

    def _enqueue(self, write: Enqueue) -> Answer:
        entry = write.forwarded
        if entry is None:
            return self._add(write)
        refusal = self._tally(entry).refusal(entry)
        if isinstance(refusal, Taken):
            self.oracle.counts["forwarded again"] += 1
        answer = refusal or self._add(write)
        if isinstance(answer, Applied):
            self.tallies[entry.outbox] = OutboxTally(entry.number)
        return answer

    def _enqueue_all(self, write: EnqueueAll) -> Answer:
        self.oracle.counts["enqueued together"] += 1
        refusal = self._refusal(write)
        if refusal is not None:
            self.oracle.counts["refused together"] += 1
            return refusal
        answers = [self._add(each) for each in write.enqueues]
        return next((each for each in answers if not isinstance(each, Applied)), answers[-1])

    def _refusal(self, write: EnqueueAll) -> Answer | None:
        """Return why the first of these tasks that can't be added is refused; None if all can be added."""
        coming: set[TaskId] = set()
        for each in write.enqueues:
            taken = self._taken(each.task.head.id)
            if taken is not None:
                return Exists(taken, self.payloads[each.task.head.id])
            known = coming | self.tasks.keys()
            unknown = tuple(needed for needed in each.task.head.after if needed not in known)
            if unknown and not each.waits_for_unknown:
                return Unknown(unknown)
            coming.add(each.task.head.id)
        return None

    def _skip(self, entry: Forwarded) -> Answer:
        tally = self._tally(entry)
        if not tally.has_skipped(entry):
            refusal = tally.refusal(entry)
            if refusal is not None:
                return refusal
            self.tallies[entry.outbox] = OutboxTally(entry.number, skipped=True)
        self.revision += 1
        return Applied(self.revision)

    def _tally(self, entry: Forwarded) -> OutboxTally:
        return self.tallies.get(entry.outbox, OutboxTally())

    def _add(self, write: Enqueue) -> Answer:
        task = write.task.head.id
        taken = self._taken(task)
        if taken is not None:
            return Exists(taken, self.payloads[task])
        duplicate = self._duplicate(write.task.head)
        if duplicate is not None:
            return Duplicate(duplicate)
        unknown = tuple(needed for needed in write.task.head.after if needed not in self.tasks)
        if unknown and not write.waits_for_unknown:
            return Unknown(unknown)
        self.revision += 1
        self.oracle.enqueued(write.task, self.revision, unknown, write.forwarded)
        self.payloads[task] = write.task.payload
        self._last_of_key[write.task.head.name, write.task.head.unique_key] = task
        self._put(Stored(write.task.head, write.state, self.revision, write.partition))
        return Applied(self.revision)

    def _move(self, write: Move, author: ClaimKey | None) -> Answer:
        if write.slot is not None and not self._is_free(write.slot):
            return SlotGone()
        if self._is_paused(write):
            self.oracle.counts["refused: paused"] += 1
            return Paused()
        before = self.tasks.get(write.id)
        if before is None or not self._is_unchanged(before, write) or not self._is_in_epoch(write):
            return WriteConflict()
        if write.start is not None and not self._is_next(write.start):
            self.oracle.counts["refused: rate moved"] += 1
            return RateMoved()
        self.revision += 1
        if write.start is not None:
            self.rates[write.start.limit] = replace(write.start.mark, revision=self.revision)
        after = replace(before, state=write.state, revision=self.revision)
        self.oracle.moved(before, after, write, author)
        if write.update is not None:
            self._log(write.id, write.update)
        self._put(after)
        if write.slot is not None:
            self.oracle.slot_used(write.slot.holder, after)
            self._put_slot(UsedSlot(write.slot.holder, write.slot.process, write.id))
        return Applied(self.revision, self.payloads[write.id] if write.with_payload else None)

    def _log(self, task: TaskId, update: Update) -> None:
        self.logs.setdefault(task, {})[update.claim, update.sequence] = update.content

    def _take_over(self, write: TakeOver) -> Answer:
        epoch = write.epoch
        if epoch.token < self.epochs.get(epoch.partition, 0):
            return WriteConflict()
        self.epochs[epoch.partition] = epoch.token
        self.oracle.taken_over(epoch)
        self.revision += 1
        return Applied(self.revision)

    def _collect(self, write: Collect) -> Answer:
        for task, (_, revision) in write.tasks.items():
            stored = self.tasks.get(task)
            if stored is None or stored.revision != revision:
                return WriteConflict()
        if self._has_dependents(write):
            return WriteConflict()
        self.revision += 1
        self.oracle.collected([self.tasks[task] for task in write.tasks], self.tasks.values())
        for task in write.tasks:
            del self.tasks[task], self.payloads[task]
            self.logs.pop(task, None)
        return Applied(self.revision)

    def _put(self, stored: Stored) -> None:
        self.tasks[stored.head.id] = stored
        for follower in list(self.followers):
            follower(stored)

    def _taken(self, task: TaskId) -> Stored | None:
        return self.tasks.get(task)

    def _duplicate(self, head: Head) -> TaskId | None:
        """Return the task by whose unique key a new one is a duplicate."""
        last = self._last_of_key.get((head.name, head.unique_key))
        if not head.unique_key or last not in self.tasks:
            return None
        of = self.tasks[last]
        keeps_out = is_duplicate(head.id, last, of.head.unique_for_s, of.state.status)
        return last if keeps_out else None

    def _is_unchanged(self, before: Stored, write: Move) -> bool:
        return before.revision == write.revision

    def _is_paused(self, write: Move) -> bool:
        return write.epoch is not None and QUEUE_PAUSE in self.pauses

    def _is_in_epoch(self, write: Move) -> bool:
        return write.epoch is None or self.epochs.get(write.epoch.partition) == write.epoch.token

    def _is_next(self, start: RateStart) -> bool:
        mark = self.rates.get(start.limit)
        return start.before == (0 if mark is None else mark.revision)

    def _is_free(self, slot: FreeSlot) -> bool:
        return self.slots.get(slot.holder) == slot

    def _has_dependents(self, write: Collect) -> bool:
        return any(
            needed in write.tasks
            for task, stored in self.tasks.items()
            if task not in write.tasks
            for needed in stored.head.after
        )
