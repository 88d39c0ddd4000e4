"""Steps: each turns one write of a batch into a nested transaction.

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

from rebalanser.core.tasks.store import Answer, Epoch
from rebalanser.errors import InternalError, RegistryUnavailable, RequestTooLarge, UnusableStore
from rebalanser.registry.contract import (
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
                "it was put back from a backup, or is another one"
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


class Step(ABC):
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

    def revision(self, key: str, epoch: Epoch) -> int | None:
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
