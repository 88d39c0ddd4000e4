"""Convoys: entries of one outbox that follow each other, taken in one transaction, all or none.

The steps of a batch stand each in a nested transaction of its own, and no two of them may write one key. As
all entries of an outbox write its tally, each would be a transaction by itself; so those that depend on
nothing are put into one transaction together, under one guard on the tally, which then counts the last. Where
that does not succeed, because an id is taken or an entry was taken before, they are carried out one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rebalanser.registry.contract import Guard, Put, Transaction
from rebalanser.tasks.engine import Answer, Applied
from rebalanser.tasks.key_value.batches import Batch
from rebalanser.tasks.key_value.enqueues import EnqueueStep, EntryOfOutbox
from rebalanser.tasks.key_value.steps import SPARE_BYTES, Step, Visit, bytes_of


class Convoy:
    """Steps that are carried out together, or one by one."""

    def __init__(self, visit: Visit) -> None:
        self.steps: list[Step] = []
        self._visit = visit
        self._first: EntryOfOutbox | None = None
        self._last: EntryOfOutbox | None = None
        self._guards: list[Guard] = []
        self._puts: dict[str, Put] = {}
        self._free_bytes = visit.max_request_bytes - SPARE_BYTES

    def takes(self, step: Step) -> bool:
        """Add a step, if it may stand together with those that there are."""
        if isinstance(step, EnqueueStep) and step.entry is not None and step.is_alone:
            return self._takes_entry(step, step.entry)
        if self._last is not None:
            return False
        self.steps.append(step)
        return True

    def answers(self) -> list[Answer]:
        """Carry them out; an answer for each."""
        if self._first is not None and len(self.steps) > 1:
            revision = self._carry_out(self._first)
            if revision is not None:
                return [Applied(revision)] * len(self.steps)
        return Batch(self._visit, self.steps).answers()

    def _takes_entry(self, step: EnqueueStep, entry: EntryOfOutbox) -> bool:
        if self.steps and (self._last is None or not entry.follows(self._last)):
            return False
        addition = step.lone_addition()
        puts = {each.key: each for each in addition.then if isinstance(each, Put)}
        size = bytes_of(addition)
        longest = max(len(self._guards) + len(addition.guards), len(self._puts) + len(puts))
        if self.steps and (
            longest >= self._visit.max_operations
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
        """The revision at which all were taken, None if they can't be in one transaction as things stand."""
        assert self._last is not None
        tally = self._visit.get([first.key])
        if first.refusal(tally) is not None:
            return None
        transaction = Transaction(
            (first.guard(tally), *self._guards), (*self._puts.values(), self._last.count())
        )
        outcome = self._visit.execute(transaction)
        return outcome.revision if outcome.succeeded else None


def convoys(visit: Visit, steps: Sequence[Step]) -> Iterator[Convoy]:
    """The steps in their order: runs of entries that may stand together, and all the others between them."""
    convoy = Convoy(visit)
    for step in steps:
        if not convoy.takes(step):
            yield convoy
            convoy = Convoy(visit)
            convoy.takes(step)
    if convoy.steps:
        yield convoy
