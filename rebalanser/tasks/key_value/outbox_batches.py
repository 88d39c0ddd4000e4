"""Batches of consecutive entries of one outbox, taken in one transaction, all or none.

Each step of a batch has a nested transaction of its own, and no two steps may write one key. All entries of
an outbox write its tally, so each would need a transaction of its own. Entries without dependencies therefore
share a transaction under one guard on the tally, which then counts the last entry. If that transaction fails,
because an id or an entry is taken, they are carried out one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rebalanser.registry.contract import Guard, Put, Transaction
from rebalanser.tasks.engine import Answer, Applied
from rebalanser.tasks.key_value.batches import Batch
from rebalanser.tasks.key_value.enqueues import EnqueueStep, EntryOfOutbox
from rebalanser.tasks.key_value.steps import SPARE_BYTES, EngineCall, Step, bytes_of


class OutboxBatch:
    """Steps that are carried out together, or one by one."""

    def __init__(self, call: EngineCall) -> None:
        self.steps: list[Step] = []
        self._call = call
        self._first: EntryOfOutbox | None = None
        self._last: EntryOfOutbox | None = None
        self._guards: list[Guard] = []
        self._puts: dict[str, Put] = {}
        self._free_bytes = call.max_request_bytes - SPARE_BYTES

    def takes(self, step: Step) -> bool:
        """Add a step, if it fits those that are there; True if it was added."""
        if isinstance(step, EnqueueStep) and step.entry is not None and step.is_alone:
            return self._takes_entry(step, step.entry)
        if self._last is not None:
            return False
        self.steps.append(step)
        return True

    def answers(self) -> list[Answer]:
        """Carry out the steps, and return their answers."""
        if self._first is not None and len(self.steps) > 1:
            revision = self._carry_out(self._first)
            if revision is not None:
                return [Applied(revision)] * len(self.steps)
        return Batch(self._call, self.steps).answers()

    def _takes_entry(self, step: EnqueueStep, entry: EntryOfOutbox) -> bool:
        if self.steps and (self._last is None or not entry.follows(self._last)):
            return False
        addition = step.lone_addition()
        puts = {each.key: each for each in addition.then if isinstance(each, Put)}
        size = bytes_of(addition)
        longest = max(len(self._guards) + len(addition.guards), len(self._puts) + len(puts))
        if self.steps and (
            longest >= self._call.max_operations
            or size > self._free_bytes
            or not self._puts.keys().isdisjoint(puts)
        ):
            return False
        self._free_bytes -= size
        self._guards += addition.guards
        self._puts |= puts
        self._first, self._last = self._first or entry, entry
        self.steps.append(step)
        return True

    def _carry_out(self, first: EntryOfOutbox) -> int | None:
        """Take all entries in one transaction, and return its revision; None if that was refused."""
        assert self._last is not None
        tally = self._call.get([first.key])
        if first.refusal(tally) is not None:
            return None
        transaction = Transaction(
            (first.guard(tally), *self._guards), (*self._puts.values(), self._last.count())
        )
        outcome = self._call.execute(transaction)
        return outcome.revision if outcome.succeeded else None


def outbox_batches(call: EngineCall, steps: Sequence[Step]) -> Iterator[OutboxBatch]:
    """Split steps, in order, into runs of entries that fit together and the steps between them."""
    batch = OutboxBatch(call)
    for step in steps:
        if not batch.takes(step):
            yield batch
            batch = OutboxBatch(call)
            batch.takes(step)
    if batch.steps:
        yield batch
