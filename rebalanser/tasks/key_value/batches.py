"""A batch: writes in as few transactions as the registry's limits allow, each with an answer of its own.

A transaction takes the next steps of the batch, in order, each as a nested transaction, until one does not
fit: there are too many, they are too large, or it touches a key that an earlier one writes. So all guards and
reads of a transaction hold after its earlier steps as before them.

Moves are rarely refused. So the moves of one transaction are first tried flat: one list of guards and one of
puts, all or none. That costs the registry and this process half as much as nested transactions. If a guard
does not hold, they are carried out again as nested transactions.

No two steps of one transaction may write the same key. All entries of an outbox write its tally, so each
would need its own transaction. Entries without dependencies therefore share a transaction under one guard on
the tally, which then counts the last entry. If that transaction fails, as an id or an entry is taken, they
are carried out one by one.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Final

import tenacity

from rebalanser.core.tasks.store import Answer, Applied
from rebalanser.errors import InternalError, OutcomeUnknown, RebalanserError, RegistryUnavailable
from rebalanser.registry.contract import (
    Delete,
    Get,
    Guard,
    KeyValue,
    Operation,
    Outcome,
    Put,
    Range,
    Stat,
    Transaction,
)
from rebalanser.tasks.key_value.collection import settle
from rebalanser.tasks.key_value.enqueues import EnqueueStep, EntryOfOutbox
from rebalanser.tasks.key_value.steps import (
    SPARE_BYTES,
    EngineCall,
    NotShared,
    Read,
    ReadItems,
    WriteStep,
    bytes_of,
    parts_of,
)


class OutboxBatch:
    """Steps that are carried out shared, or one by one."""

    def __init__(self, call: EngineCall) -> None:
        self.steps: list[WriteStep] = []
        self._call = call
        self._first: EntryOfOutbox | None = None
        self._last: EntryOfOutbox | None = None
        self._guards: list[Guard] = []
        self._puts: dict[str, Put] = {}
        self._free_bytes = call.max_request_bytes - SPARE_BYTES

    def try_add(self, step: WriteStep) -> bool:
        """Add a step, if it fits those that are there; True if it was added."""
        if isinstance(step, EnqueueStep) and step.entry is not None and step.is_alone:
            return self._try_add_entry(step, step.entry)
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
        return StepBatch(self._call, self.steps).answers()

    def _try_add_entry(self, step: EnqueueStep, entry: EntryOfOutbox) -> bool:
        if self.steps and (self._last is None or not entry.follows(self._last)):
            return False
        addition = step.addition_alone()
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


def outbox_batches(call: EngineCall, steps: Sequence[WriteStep]) -> Iterator[OutboxBatch]:
    """Split steps, in order, into runs of entries that fit shared and the steps between them."""
    batch = OutboxBatch(call)
    for step in steps:
        if not batch.try_add(step):
            yield batch
            batch = OutboxBatch(call)
            batch.try_add(step)
    if batch.steps:
        yield batch


MAX_TRIES: Final = 20
"""Maximum plans of a step whose guards failed without giving an answer."""


class _Flat:
    """The guards and puts of moves that are tried shared, all or none."""

    def __init__(self) -> None:
        self.guards: dict[str, Guard] = {}
        self.puts: list[Operation] = []

    def try_add(self, move: Transaction, max_operations: int) -> bool:
        """Add a move, if it fits. Moves of one partition share the guard on its epoch."""
        guards = self.guards
        new: list[Guard] = []
        for each in move.guards:
            known = guards.get(each.key)
            if known is None:
                new.append(each)
            elif known is not each and known != each:  # one of the two does not hold
                return False
        if max(len(guards) + len(new), len(self.puts) + len(move.then)) > max_operations:
            return False
        for each in new:
            guards[each.key] = each
        self.puts += move.then
        return True


class SharedTransaction:
    """The steps of one transaction."""

    def __init__(self, max_operations: int, max_bytes: int) -> None:
        self.steps: list[tuple[int, WriteStep]] = []
        """Steps, each with its index in the batch."""
        self._nested: list[Transaction] = []
        self._max_operations = max_operations
        self._free_bytes = max_bytes
        self._longest = 0
        self._touched: set[str] = set()
        self._written: set[str] = set()
        self._witnesses: set[str] = set()
        self._news: set[str] = set()
        self._flat: _Flat | None = _Flat()
        """Guards and puts while all steps are moves; None once one is not."""

    def changes(self, reads: Sequence[Read], added: Container[str]) -> bool:
        """True if a step may write a key that was read for another, other than by adding a task."""
        return any(
            isinstance(read, Get)
            and (read.key in self._news or (read.key in self._written and read.key not in added))
            for read in reads
        )

    def try_add(self, index: int, step: WriteStep, nested: Transaction) -> bool:
        """Add a step's transaction if it fits and touches no key that the others write."""
        if self._flat is not None and step.moves:
            return self._try_add_move(self._flat, index, step, nested)
        longest = max(self._longest, len(nested.guards), len(nested.then), len(nested.otherwise))
        witnesses = self._witnesses | {step.keys.witness} if step.collects else self._witnesses
        added = step.news if nested.then else ()
        news = self._news.union(added)
        size = bytes_of(nested) + sum(map(len, added))
        written, touched = _keys_of(nested)
        if self._flat is not None:
            for each in self._nested:
                self._touched.update(*_keys_of(each))
        if self.steps and (
            len(self.steps) + 1 + len(witnesses) + len(news) + longest > self._max_operations
            or size > self._free_bytes
            or not self._written.isdisjoint(touched)
            or not self._touched.isdisjoint(written)
            or not self._news.isdisjoint(touched)
            or not self._touched.isdisjoint(added)
        ):
            return False
        self.steps.append((index, step))
        self._nested.append(nested)
        self._flat = None
        self._longest = longest
        self._free_bytes -= size
        self._written |= written
        self._touched |= touched
        self._witnesses = witnesses
        self._news = news
        return True

    def _try_add_move(self, flat: _Flat, index: int, step: WriteStep, nested: Transaction) -> bool:
        """Add a move to moves only, as ``try_add`` does, but faster: most batches are moves only."""
        longest = max(self._longest, len(nested.guards), len(nested.then))
        size, written = 0, self._written
        for each in nested.guards:
            key = each.key
            if key in written:  # the task's own is among them
                return False
            size += 2 * len(key)  # a guard that does not hold is read
        puts = [put for put in nested.then if isinstance(put, Put)]
        for put in puts:
            size += len(put.key) + len(put.value)
        if self.steps and (len(self.steps) + 1 + longest > self._max_operations or size > self._free_bytes):
            return False
        if not flat.try_add(nested, self._max_operations):
            return False
        self.steps.append((index, step))
        self._nested.append(nested)
        self._longest = longest
        self._free_bytes -= size
        for put in puts:
            written.add(put.key)
        return True

    def flat(self) -> Transaction | None:
        """Return one transaction for all or none, if they are moves and more than one; else None."""
        if self._flat is None or len(self.steps) < 2:
            return None
        return Transaction(tuple(self._flat.guards.values()), tuple(self._flat.puts))

    def alone(self) -> Transaction | None:
        """Return the only transaction, if nothing is put or deleted along with it; else None."""
        return self._nested[0] if len(self.steps) == 1 and not self._news and not self._witnesses else None

    def transaction(self) -> Transaction:
        """Return a transaction that nests all of them."""
        news = (Put(key, b"") for key in sorted(self._news))
        return Transaction(then=(*self._nested, *news, *map(Delete, sorted(self._witnesses))))


def _keys_of(nested: Transaction) -> tuple[set[str], set[str]]:
    """Return the keys that a transaction may write, and all keys that it names."""
    written: set[str] = set()
    touched: set[str] = set()
    for part in parts_of(nested):
        if isinstance(part, Put | Delete):
            written.add(part.key)
        elif not isinstance(part, Range | Stat | Transaction):
            touched.add(part.key)
    return written, touched | written


class StepBatch:
    """Steps that are carried out in order, each until it has an answer."""

    def __init__(self, call: EngineCall, steps: Sequence[WriteStep]) -> None:
        self._call = call
        self._steps = steps
        self._answers: list[Answer | None] = [None] * len(steps)
        self._wrote = False

    def answers(self) -> list[Answer]:
        """Carry out the steps, and return their answers.

        Raises:
            OutcomeUnknown: also if the registry refused a transaction after others had taken effect.
        """
        try:
            if self._carry_out() and self._carry_out_again():
                raise RegistryUnavailable(f"others were quicker {MAX_TRIES} times")
        except OutcomeUnknown:
            raise
        except RebalanserError as error:
            if self._wrote:
                raise OutcomeUnknown(f"a part of the batch took effect, the rest did not: {error}") from error
            raise
        return [answer for answer in self._answers if answer is not None]

    def _carry_out_again(self) -> bool:
        """Carry out the unanswered steps a few times more; True if some are still unanswered."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_result(bool),
            stop=tenacity.stop_after_attempt(MAX_TRIES - 1),
            retry_error_callback=lambda _state: True,
        )
        return bool(retrying(self._carry_out))

    def _unanswered(self) -> list[int]:
        return [index for index, answer in enumerate(self._answers) if answer is None]

    def _carry_out(self) -> bool:
        """Carry out each unanswered step once; True if some are still unanswered."""
        pending = self._unanswered()
        while pending:
            pending = pending[self._advance(pending[: self._call.max_operations]) :]
        return bool(self._unanswered())

    def _advance(self, window: Sequence[int]) -> int:
        """Carry out the first of these steps in one transaction; return their number, 0 to read more."""
        wants = [self._steps[index].wanted() for index in window]
        found = self._look(window, wants)
        shared = SharedTransaction(self._call.max_operations, self._call.max_request_bytes - SPARE_BYTES)
        planned = self._plan(window, wants, found, shared)
        if planned is None:
            return 0
        if planned:
            self._execute(shared)
            self._settle(window[:planned])
            return planned
        self._carry_out_alone(window[0])
        return 1

    def _look(self, window: Sequence[int], wants: Sequence[Sequence[Read]]) -> ReadItems:
        items: dict[str, KeyValue] = {}
        ranges: dict[str, tuple[KeyValue, ...]] = {}
        reads, unread = self._reads_of(window, wants)
        for read, result in zip(reads, self._call.read_all(reads), strict=True):
            if isinstance(result, KeyValue):
                items[result.key] = result
            elif isinstance(read, Range) and isinstance(result, tuple):
                ranges[read.prefix] = result
        return ReadItems(items, ranges, unread)

    def _reads_of(
        self, window: Sequence[int], wants: Sequence[Sequence[Read]]
    ) -> tuple[list[Read], set[str]]:
        """Return the reads of the steps, and the keys not read, as an earlier step decides them."""
        reads: dict[Read, None] = {}
        added: set[str] = set()
        unread: set[str] = set()
        for index, want in zip(window, wants, strict=True):
            for read in want:
                if isinstance(read, Get) and read.key in added:
                    unread.add(read.key)
                else:
                    reads[read] = None
            adds = self._steps[index].adds
            if adds is not None:
                added.add(adds)
        return list(reads), unread - {read.key for read in reads if isinstance(read, Get)}

    def _plan(
        self,
        window: Sequence[int],
        wants: Sequence[Sequence[Read]],
        found: ReadItems,
        shared: SharedTransaction,
    ) -> int | None:
        """Plan steps while they fit shared; return their number.

        0 if the first must be carried out alone, None if it must read more.
        """
        for count, index in enumerate(window):
            if wants[count] and shared.changes(wants[count], found.added):
                return count
            step = self._steps[index]
            planned = step.plan(found)
            if planned is NotShared.ALONE or planned is NotShared.LATER:
                return count
            if planned is NotShared.READ:
                return count or None
            if isinstance(planned, Transaction):
                if not shared.try_add(index, step, planned):
                    return count
            elif planned is not NotShared.AGAIN:
                self._answers[index] = planned
        return len(window)

    def _execute(self, shared: SharedTransaction) -> None:
        if not shared.steps:
            return
        for (index, step), outcome in zip(shared.steps, self._outcomes(shared), strict=True):
            answer = self._answers[index] = step.answer(outcome)
            self._wrote |= isinstance(answer, Applied)

    def _outcomes(self, shared: SharedTransaction) -> Sequence[Outcome]:
        """Execute the transaction, and return the outcome of each step."""
        if (alone := shared.alone()) is not None:
            return [self._call.execute(alone)]
        if (flat := shared.flat()) is not None:
            outcome = self._call.execute(flat)
            if outcome.succeeded:
                return [outcome] * len(shared.steps)
        nested = self._call.execute(shared.transaction()).results[: len(shared.steps)]
        if not all(isinstance(each, Outcome) for each in nested):
            raise InternalError(f"nested transactions were answered {nested!r}")
        return [each for each in nested if isinstance(each, Outcome)]

    def _settle(self, window: Sequence[int]) -> None:
        """Settle the collections that had marked tasks of these steps."""
        steps = [self._steps[index] for index in window]
        for keys, mark in {(step.keys, step.mark) for step in steps}:
            if mark is not None:
                settle(self._call, keys, mark)
        for step in steps:
            step.mark = None

    def _carry_out_alone(self, index: int) -> None:
        step = self._steps[index]
        answer = self._answers[index] = step.carry_out_alone(self._call)
        self._wrote |= isinstance(answer, Applied)
        self._settle([index])
