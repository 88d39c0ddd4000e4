"""A step: one write of a batch on its way to being one nested transaction.

A step says what must be read before, plans its transaction from that, and tells what the transaction's
outcome means. It may be planned more than once, as long as it has had no effect.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

from rebalanser.errors import InternalError, RequestTooLarge
from rebalanser.registry.contract import (
    Get,
    Guard,
    KeyValue,
    Operation,
    Outcome,
    Put,
    Range,
    Result,
    Transaction,
)
from rebalanser.tasks.engine import Answer, Epoch
from rebalanser.tasks.key_value.keys import QueueKeys
from rebalanser.tasks.key_value.visits import Visit

Read: TypeAlias = Get | Range


@dataclass(frozen=True, slots=True)
class Found:
    """What was read before a transaction was planned, and what the same transaction adds so far.

    ``unread`` are keys that were not looked at, because an earlier step of the batch may put them. ``added``
    has the keys of payloads of new tasks, and the guards under which these are added: after the transaction
    such a task exists if its guards hold, because it was added or because it was there.
    """

    items: Mapping[str, KeyValue]
    ranges: Mapping[str, Sequence[KeyValue]]
    unread: AbstractSet[str]
    added: dict[str, tuple[Guard, ...]] = field(default_factory=dict)


class Otherwise(Enum):
    """Why a step has no transaction to stand in with others."""

    ALONE = auto()
    """It takes more than one transaction: it is carried out by itself."""
    LATER = auto()
    """What it depends on is decided by the transaction that is being planned: it stands in the next one."""
    AGAIN = auto()
    """A collection stands in its way, which must be settled first."""


Planned: TypeAlias = Transaction | Answer | Otherwise


class Step(ABC):
    """One write of a batch."""

    keys: QueueKeys
    mark: str | None = None
    """The collection that has marked a task of this step, once one was met."""
    adds: str | None = None
    """The key that exists afterwards, whether the step put it or found it, if its guards hold."""
    collects: bool = False
    """Whether the witness must be deleted along with it."""
    moves: bool = False
    """Whether it only puts, and is nearly never refused."""
    news: tuple[str, ...] = ()
    """Keys that are put along with it, whether it succeeds or not."""

    def wanted(self) -> Sequence[Read]:
        """What must be read before it can be planned."""
        return ()

    @abstractmethod
    def plan(self, found: Found) -> Planned:
        """Its transaction, or what it is answered as things stand."""

    def carry_out_alone(self, visit: Visit) -> Answer | None:
        """Carry it out in several transactions; None: plan it again."""
        raise InternalError(f"{self!r} does not fit into a transaction ({visit.max_operations} operations)")

    @abstractmethod
    def answer(self, outcome: Outcome) -> Answer | None:
        """What the outcome of its transaction means; None: plan it again."""


class Epochs:
    """The revisions at which epochs were written, as far as they are known here. For any threads.

    Only a greater token is written over an epoch, so a token has one revision, and what is known of it stays
    true for as long as a guard on it holds.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int]] = {}

    def revision(self, key: str, epoch: Epoch) -> int | None:
        """At which revision the epoch was written, if that is known."""
        token, revision = self._known.get(key, (None, 0))
        return revision if token == epoch.token else None

    def learn(self, key: str, token: int, revision: int) -> None:
        """The epoch of this key has the token since the revision."""
        self._known[key] = (token, revision)

    def forget(self, key: str) -> None:
        """The epoch may have been taken over."""
        self._known.pop(key, None)


def read_item(result: Result) -> KeyValue | None:
    """The result of a :class:`~rebalanser.registry.contract.Get`."""
    return result if isinstance(result, KeyValue) else None


def parts_of(transaction: Transaction) -> tuple[Guard | Operation, ...]:
    """All guards and operations of a transaction."""
    return (*transaction.guards, *transaction.then, *transaction.otherwise)


def bytes_of(transaction: Transaction) -> int:
    """Keys and values of a transaction that nests no other."""
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
    """Raises :class:`~rebalanser.errors.RequestTooLarge` if ``size`` bytes are over the limit."""
    if size > limit:
        raise RequestTooLarge(f"{what} of {size} bytes; the limit is {limit}")
