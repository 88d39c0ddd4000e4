"""Steps: each turns one write of a batch into a nested transaction. Moves and takeovers are here.

A step names the reads that it needs, plans its transaction from them, and turns the outcome into an answer.
It may be planned more than once, until it has an effect.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, TypeAlias

from rebalanser.core.tasks.store import (
    Answer,
    Applied,
    Move,
    OwnerEpoch,
    Paused,
    RateMoved,
    SlotGone,
    TakeOver,
    WriteConflict,
)
from rebalanser.errors import InternalError, RegistryUnavailable, RequestTooLarge, UnusableStore
from rebalanser.registry.contract import (
    Absent,
    Capabilities,
    Get,
    Guard,
    KeyValue,
    Operation,
    Outcome,
    Put,
    Range,
    Registry,
    Result,
    Transaction,
    Unchanged,
)
from rebalanser.tasks.key_value.keys import QueueKeys
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

KEYS_BYTES: Final = 16_384
"""Bytes kept free in each transaction for the keys of one write."""
STATE_BYTES: Final = 65_536
"""Maximum bytes of a state without its result: the names of holder and worker, the last error."""
LARGEST_UPDATE_BYTES: Final = 131_072
"""Maximum bytes of an update or result, whatever the registry takes: a page has hundreds of states."""


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """Limits in bytes. Any state fits beside a head and an update, so that any task can be moved."""

    payload: int
    update: int
    state: int
    head: int
    """Head as text, which is mostly the ids of dependencies."""
    task: int
    """Payload, head and first state together."""


def size_limits_of(capabilities: Capabilities) -> SizeLimits:
    """Return the limits that follow from a registry's."""
    request = capabilities.max_request_bytes - KEYS_BYTES
    update = min(LARGEST_UPDATE_BYTES, (request - 2 * STATE_BYTES) * 3 // 10)
    state = update * 4 // 3 + STATE_BYTES
    return SizeLimits(
        payload=request - STATE_BYTES,
        update=update,
        state=state,
        head=request - state - update,
        task=request,
    )


READS_AT_ONCE: Final = 128
"""Maximum keys or ranges that one transaction reads; fewer if the registry's limit is lower."""


class EngineCall:
    """Transactions of one call of the engine, which take at most ``timeout_s`` seconds in all."""

    def __init__(self, registry: Registry, timeout_s: float, at_least: int = 0) -> None:
        """``at_least`` is a revision that the registry must have seen."""
        self._registry = registry
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._at_least = at_least
        self._capabilities = registry.capabilities
        self.seen = 0
        """Revision of the first answer: all reads have seen it."""

    @property
    def max_operations(self) -> int:
        """Maximum length of a list of a transaction."""
        return self._capabilities.max_operations

    @property
    def max_request_bytes(self) -> int:
        """Maximum bytes of a transaction."""
        return self._capabilities.max_request_bytes

    def execute(self, transaction: Transaction) -> Outcome:
        """Carry out a transaction in the time that is left.

        Raises:
            RegistryUnavailable: no time is left, or as the registry says.
            UnusableStore: the registry has not seen the revision that it must have seen (SK-11).
        """
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise RegistryUnavailable(f"the {self._timeout_s:g} s for this call are over")
        outcome = self._registry.execute(transaction, left_s)
        if not isinstance(outcome, Outcome):
            raise InternalError(f"a transaction was answered {outcome!r}")
        if outcome.revision < self._at_least:
            raise UnusableStore(
                f"the registry is at revision {outcome.revision}, but {self._at_least} was seen before: "
                "it was restored from a backup, or is another one"
            )
        self.seen = self.seen or outcome.revision
        return outcome

    def read_all(self, operations: Sequence[Operation]) -> list[Result]:
        """Return the results of reading operations, in few transactions."""
        results: list[Result] = []
        step = min(READS_AT_ONCE, self.max_operations)
        for start in range(0, len(operations), step):
            results += self.execute(Transaction(then=tuple(operations[start : start + step]))).results
        return results

    def get(self, keys: Iterable[str]) -> dict[str, KeyValue]:
        """Read keys; the result has those that exist."""
        found = self.read_all([Get(key) for key in dict.fromkeys(keys)])
        return {item.key: item for item in found if isinstance(item, KeyValue)}


Read: TypeAlias = Get | Range
SPARE_BYTES: Final = 4096
"""Bytes for the keys that a transaction has beside its steps."""


@dataclass(frozen=True, slots=True)
class ReadItems:
    """Items that were read before a transaction is planned, and the tasks that it adds so far.

    ``unread`` are keys that were not read, because an earlier step of the batch may put them. ``added`` has
    the payload keys of new tasks, with the guards under which these are added: if the guards hold, such a
    task exists after the transaction, new or old.
    """

    items: Mapping[str, KeyValue]
    ranges: Mapping[str, Sequence[KeyValue]]
    unread: AbstractSet[str]
    added: dict[str, tuple[Guard, ...]] = field(default_factory=dict)


class NotShared(Enum):
    """Reasons why a step can't share a transaction with others now."""

    ALONE = auto()
    """The step takes more than one transaction: it is carried out alone."""
    LATER = auto()
    """The step depends on the transaction that is being planned: it goes into the next one."""
    READ = auto()
    """More must be read before it can be planned, as ``wanted`` now says."""
    AGAIN = auto()
    """A collection has marked its task, and must be settled first."""


Planned: TypeAlias = Transaction | Answer | NotShared


class WriteStep(ABC):
    """One write of a batch."""

    keys: QueueKeys
    mark: str | None = None
    """Collection that was found to have marked a task of this step."""
    adds: str | None = None
    """The key that exists afterwards, whether the step put it or found it, if its guards hold."""
    collects: bool = False
    """True if the witness must be deleted along with it."""
    moves: bool = False
    """True if it only puts, and is nearly never refused."""
    news: tuple[str, ...] = ()
    """Keys that are put along with it, whether it succeeds or not."""

    def wanted(self) -> Sequence[Read]:
        """Return the reads that ``plan`` needs."""
        return ()

    @abstractmethod
    def plan(self, found: ReadItems) -> Planned:
        """Return its transaction or its answer, or the reason why it has neither yet."""

    def carry_out_alone(self, call: EngineCall) -> Answer | None:
        """Carry it out in several transactions; None to plan it again."""
        raise InternalError(f"{self!r} does not fit into a transaction ({call.max_operations} operations)")

    @abstractmethod
    def answer(self, outcome: Outcome) -> Answer | None:
        """Return the answer by the outcome of its transaction; None to plan it again."""


class Epochs:
    """Caches the revisions at which epochs were written. May be used from any thread.

    Only a greater token overwrites an epoch, so each token has one revision.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int]] = {}
        self._guards: dict[str, Unchanged] = {}

    def revision(self, key: str, epoch: OwnerEpoch) -> int | None:
        """Return the revision at which an epoch was written, if known."""
        token, revision = self._known.get(key, (None, 0))
        return revision if token == epoch.token else None

    def learn(self, key: str, token: int, revision: int) -> None:
        """Store the token of a key's epoch, and the revision of its write."""
        self._known[key] = (token, revision)

    def guard(self, key: str, revision: int) -> Unchanged:
        """Return the guard on an epoch; the same object for all moves of a partition."""
        guard = self._guards.get(key)
        if guard is None or guard.revision != revision:
            guard = self._guards[key] = Unchanged(key, revision)
        return guard

    def forget(self, key: str) -> None:
        """Drop an epoch that may have been replaced."""
        self._known.pop(key, None)


def read_item(result: Result) -> KeyValue | None:
    """Return the item of a ``Get``; None if it does not exist."""
    return result if isinstance(result, KeyValue) else None


def parts_of(transaction: Transaction) -> tuple[Guard | Operation, ...]:
    """Return all guards and operations of a transaction."""
    return (*transaction.guards, *transaction.then, *transaction.otherwise)


def bytes_of(transaction: Transaction) -> int:
    """Return the bytes of keys and values of a transaction that nests no other."""
    size = 0
    for part in parts_of(transaction):
        if isinstance(part, Put):
            size += len(part.key) + len(part.value)
        elif isinstance(part, Range):
            size += len(part.prefix) + len(part.after)
        elif not isinstance(part, Transaction):
            size += len(getattr(part, "key", ""))
    return size


def check_bytes(what: str, size: int, limit: int) -> None:
    """Raises ``RequestTooLarge`` if ``size`` bytes are over the limit."""
    if size > limit:
        raise RequestTooLarge(f"{what} of {size} bytes; the limit is {limit}")


class MoveStep(WriteStep):
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
                return WriteConflict()
            self._head = head_text(item.key, item.value)
        guards: tuple[Guard, ...] = (Unchanged(self._state_key, self._write.revision),)
        reads: tuple[Get, ...] = (Get(self._state_key),)
        if self._epoch_key is not None:
            revision = self._written_at(self._epoch_key, found)
            if revision is None:
                return WriteConflict()
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
        """Return Applied, SlotGone, Paused, RateMoved or WriteConflict; notes a collection's mark."""
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
        return WriteConflict()

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


class TakeOverStep(WriteStep):
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
            return WriteConflict()
        if token == self._token:
            return Applied(item.mod_revision)
        return Transaction((Unchanged(self._key, item.mod_revision),), (put,))

    def answer(self, outcome: Outcome) -> Answer | None:
        """Return Applied; None to plan it again, as another owner was quicker."""
        if not outcome.succeeded:
            return None
        self._epochs.learn(self._key, self._token, outcome.revision)
        return Applied(outcome.revision)
