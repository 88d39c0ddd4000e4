"""Tallies: what makes sure that an entry of an outbox is taken once (SK-4).

The tally is read before, and guarded in the transaction that counts the entry. A tally that was read and has
the entry counted is the last word, as tallies never go back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rebalanser.registry.contract import Absent, Get, Guard, KeyValue, Outcome, Put, Transaction, Unchanged
from rebalanser.tasks.engine import Answer, Applied, Conflict, Forwarded, Skip, Taken, Tally
from rebalanser.tasks.key_value.keys import QueueKeys
from rebalanser.tasks.key_value.steps import Found, Planned, Read, Step
from rebalanser.tasks.key_value.values import dump_tally, load_tally


class EntryOfOutbox:
    """The entry that a step has to count."""

    def __init__(self, entry: Forwarded, keys: QueueKeys) -> None:
        self.key = keys.tally(entry.outbox)
        self._entry = entry

    def follows(self, other: EntryOfOutbox) -> bool:
        """Whether this is the entry after another of the same outbox."""
        return self.key == other.key and self._entry.number == other._entry.number + 1

    def tally(self, items: Mapping[str, KeyValue]) -> Tally:
        """The tally as it was read."""
        return load_tally(items[self.key]) if self.key in items else Tally()

    def refusal(self, items: Mapping[str, KeyValue]) -> Taken | Conflict | None:
        """Why the entry may not be counted, as the tally was read."""
        return self.tally(items).refusal(self._entry)

    def is_skipped(self, items: Mapping[str, KeyValue]) -> bool:
        """Whether the tally that was read says that this entry was skipped."""
        return self.tally(items).has_skipped(self._entry)

    def guard(self, items: Mapping[str, KeyValue]) -> Guard:
        """That the tally is still as it was read."""
        item = items.get(self.key)
        return Absent(self.key) if item is None else Unchanged(self.key, item.mod_revision)

    def count(self, *, skipped: bool = False) -> Put:
        """Count the entry."""
        return Put(self.key, dump_tally(Tally(self._entry.number, skipped)))


class SkipStep(Step):
    """An entry that is counted without a task."""

    def __init__(self, write: Skip, keys: QueueKeys) -> None:
        self.keys = keys
        self._entry = EntryOfOutbox(write.entry, keys)

    def wanted(self) -> Sequence[Read]:
        """The tally as it is."""
        return (Get(self._entry.key),)

    def plan(self, found: Found) -> Planned:
        """Count the entry if it is the next one and the tally is still the one that was read."""
        if self._entry.is_skipped(found.items):
            return Applied(found.items[self._entry.key].mod_revision)
        refusal = self._entry.refusal(found.items)
        if refusal is not None:
            return refusal
        return Transaction((self._entry.guard(found.items),), (self._entry.count(skipped=True),))

    def answer(self, outcome: Outcome) -> Answer | None:
        """Applied, or to be planned again because the tally has changed."""
        return Applied(outcome.revision) if outcome.succeeded else None
