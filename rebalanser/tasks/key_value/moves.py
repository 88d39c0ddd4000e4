"""Moves and takeovers: the steps of owners and workers."""

from __future__ import annotations

from collections.abc import Sequence

from rebalanser.core.tasks.store import Answer, Applied, Conflict, Move, Paused, RateMoved, SlotGone, TakeOver
from rebalanser.errors import UnusableStore
from rebalanser.registry.contract import Absent, Get, Guard, KeyValue, Outcome, Put, Transaction, Unchanged
from rebalanser.tasks.key_value.keys import QueueKeys
from rebalanser.tasks.key_value.steps import (
    Epochs,
    Planned,
    Read,
    ReadItems,
    SizeLimits,
    Step,
    check_bytes,
    read_item,
)
from rebalanser.tasks.key_value.values import (
    dump_head,
    dump_rate,
    dump_state,
    dump_task,
    dump_token,
    dump_used_slot,
    head_text,
    load_place,
    load_task,
    load_token,
)


class MoveStep(Step):
    """Replaces the state of a task."""

    moves = True

    def __init__(
        self, write: Move, keys: QueueKeys, epochs: Epochs, limits: SizeLimits, rate_lease: int = 0
    ) -> None:
        """``rate_lease`` is the lease of the mark of a rate limit, if the move puts one."""
        self.keys = keys
        self._write = write
        self._epochs = epochs
        self._state_key = keys.state(write.partition, write.id)
        self._epoch_key = None if write.epoch is None else keys.epoch(write.epoch.partition)
        self._epoch_revision: int | None = None
        """Revision at which this move's epoch was written, as known when ``wanted`` was called."""
        slot = write.slot
        self._slot_key = None if slot is None else keys.slot(slot.process, slot.holder)
        self._rate_key = None if write.start is None else keys.rate(write.start.limit)
        self._rate_lease = rate_lease
        self._head = None if write.head is None else dump_head(write.head)
        self._state = dump_state(write.state)
        if write.state.result is not None:
            check_bytes("a result", len(write.state.result), limits.update)
        check_bytes("a state", len(self._state), limits.state)
        if write.update is not None:
            check_bytes("an update", len(write.update.content), limits.update)

    def wanted(self) -> Sequence[Read]:
        """Return the reads of the head if it was not given, and of the epoch if it is not known."""
        reads: list[Read] = []
        if self._head is None:
            reads.append(Get(self._state_key))
        if self._epoch_key is not None and self._write.epoch is not None:
            self._epoch_revision = self._epochs.revision(self._epoch_key, self._write.epoch)
            if self._epoch_revision is None:
                reads.append(Get(self._epoch_key))
        return reads

    def plan(self, found: ReadItems) -> Planned:
        """Put the state if neither task, epoch, mark nor slot has changed, and it may be claimed."""
        if self._head is None:
            item = found.items.get(self._state_key)
            if item is None or self._meets_other(item.value, item.mod_revision):
                return Conflict()
            self._head = head_text(item.key, item.value)
        guards: tuple[Guard, ...] = (Unchanged(self._state_key, self._write.revision),)
        reads: tuple[Get, ...] = (Get(self._state_key),)
        if self._epoch_key is not None:
            revision = self._written_at(self._epoch_key, found)
            if revision is None:
                return Conflict()
            guards = (*guards, self._epochs.guard(self._epoch_key, revision), self.keys.unpaused)
            reads = (*reads, self.keys.pause_read)
        if self._write.start is not None and self._rate_key is not None:
            before = self._write.start.before
            guards = (*guards, Unchanged(self._rate_key, before) if before else Absent(self._rate_key))
            reads = (*reads, Get(self._rate_key, keys_only=True))
        if self._write.slot is not None and self._slot_key is not None:
            guards = (*guards, Unchanged(self._slot_key, self._write.slot.revision))
            reads = (*reads, Get(self._slot_key, keys_only=True))
        payload = (Get(self.keys.payload(self._write.id)),) if self._write.with_payload else ()
        return Transaction(guards, (*self._puts(self._head), *payload), reads)

    def answer(self, outcome: Outcome) -> Answer:
        """Return Applied, SlotGone, Paused, RateMoved or Conflict; notes a collection's mark."""
        if outcome.succeeded:
            return Applied(outcome.revision, self._payload(outcome) if self._write.with_payload else None)
        if self._write.slot is not None:
            slot = read_item(outcome.results[-1])
            if slot is None or slot.mod_revision != self._write.slot.revision:
                return SlotGone()
        if self._epoch_key is not None and read_item(outcome.results[1]) is not None:
            return Paused()
        if self._write.start is not None:
            mark = read_item(outcome.results[1 if self._epoch_key is None else 2])
            if (0 if mark is None else mark.mod_revision) != self._write.start.before:
                return RateMoved()
        item = read_item(outcome.results[0])
        if item is not None:
            self._meets_other(item.value, item.mod_revision)
        if self._epoch_key is not None:
            self._epochs.forget(self._epoch_key)
        return Conflict()

    def _payload(self, outcome: Outcome) -> bytes | None:
        """Return the payload that was read along; None if it is long, or can't be read: the claim is made."""
        key = self.keys.payload(self._write.id)
        items = (each for each in outcome.results if isinstance(each, KeyValue))
        place = next((each for each in items if each.key == key), None)
        try:
            return None if place is None else load_place(place).payload
        except UnusableStore:
            return None

    def _puts(self, head: str) -> tuple[Put, ...]:
        write = self._write
        puts = [Put(self._state_key, dump_task(write.state.status, head, self._state))]
        if write.update is not None:
            update = write.update
            puts.append(Put(self.keys.update(write.id, update.claim, update.sequence), update.content))
        if write.start is not None and self._rate_key is not None:
            puts.append(Put(self._rate_key, dump_rate(write.start.mark), self._rate_lease))
        if write.slot is not None and self._slot_key is not None:
            puts.append(Put(self._slot_key, dump_used_slot(write.id), write.slot.lease))
        return tuple(puts)

    def _written_at(self, epoch_key: str, found: ReadItems) -> int | None:
        """Return the revision at which this move's epoch was written; None if another epoch is stored.

        The cache is not read again: a concurrent batch may have dropped an epoch that is still valid.
        """
        item = found.items.get(epoch_key)
        if item is None:
            return self._epoch_revision
        token = load_token(item)
        self._epochs.learn(epoch_key, token, item.mod_revision)
        epoch = self._write.epoch
        return item.mod_revision if epoch is not None and token == epoch.token else None

    def _meets_other(self, value: bytes, revision: int) -> bool:
        """True if the task is at another revision than this move's; notes its mark."""
        if revision == self._write.revision:
            return False
        write = self._write
        entry = load_task(write.queue, write.partition, write.id, self._state_key, value, revision)
        if entry.stored.revision == write.revision:
            self.mark = entry.mark
        return True


class TakeOverStep(Step):
    """Replaces the epoch of a partition by a greater one."""

    def __init__(self, write: TakeOver, keys: QueueKeys, epochs: Epochs) -> None:
        self.keys = keys
        self._token = write.epoch.token
        self._key = keys.epoch(write.epoch.partition)
        self._epochs = epochs

    def wanted(self) -> Sequence[Read]:
        """Return the read of the epoch."""
        return (Get(self._key),)

    def plan(self, found: ReadItems) -> Planned:
        """Put the epoch if the one that was read is lesser and unchanged."""
        item = found.items.get(self._key)
        put = Put(self._key, dump_token(self._token))
        if item is None:
            return Transaction((Absent(self._key),), (put,))
        token = load_token(item)
        self._epochs.learn(self._key, token, item.mod_revision)
        if token > self._token:
            return Conflict()
        if token == self._token:
            return Applied(item.mod_revision)
        return Transaction((Unchanged(self._key, item.mod_revision),), (put,))

    def answer(self, outcome: Outcome) -> Answer | None:
        """Return Applied; None to plan it again, as another owner was quicker."""
        if not outcome.succeeded:
            return None
        self._epochs.learn(self._key, self._token, outcome.revision)
        return Applied(outcome.revision)
