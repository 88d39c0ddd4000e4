"""The pure core of a registry in memory: keys, leases and guarded transactions.

``KeyValueStore`` is deterministic: the same calls give the same answers and the same changes. It has no
thread and no clock, so it never ends a lease by itself. A subclass chooses the revisions: it counts them
(``rebalanser.testing.memory``) or takes them from a log. The store refuses what any backend refuses, so
that code which works here does not meet another limit elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Generic, TypeAlias, TypeVar

from rebalanser.errors import InternalError, LeaseNotFound, RequestTooLarge
from rebalanser.registry.contract import (
    Absent,
    Capabilities,
    Changed,
    Created,
    Delete,
    Get,
    Guard,
    KeyValue,
    Operation,
    Outcome,
    Put,
    Range,
    Result,
    Stat,
    Stats,
    Transaction,
)


@dataclass(slots=True)
class _Branch:
    """The operations of a transaction whose guards are decided."""

    succeeded: bool
    steps: tuple[_Step, ...]


_AFTER_ANY = "\x7f"
"""Greater than every character of a key."""

_Step: TypeAlias = Put | Delete | Get | Range | Stat | _Branch


def _writes(branch: _Branch) -> Iterator[Put | Delete]:
    for step in branch.steps:
        if isinstance(step, (Put, Delete)):
            yield step
        elif isinstance(step, _Branch):
            yield from _writes(step)


def _parts(transaction: Transaction) -> Iterator[Guard | Operation]:
    """Yield every guard and operation, nested ones too."""
    yield from transaction.guards
    for operation in (*transaction.then, *transaction.otherwise):
        yield operation
        if isinstance(operation, Transaction):
            yield from _parts(operation)


def _check_depth(transaction: Transaction) -> None:
    for operation in (*transaction.then, *transaction.otherwise):
        if isinstance(operation, Transaction) and any(
            isinstance(inner, Transaction) for inner in (*operation.then, *operation.otherwise)
        ):
            raise InternalError("a nested transaction holds another: one level deep is the limit")


def _check_parts(transaction: Transaction, capabilities: Capabilities) -> None:
    texts: list[str] = []
    size = 0
    for part in _parts(transaction):
        if isinstance(part, Transaction):
            continue
        if isinstance(part, (Range, Stat)):
            texts.append(part.prefix)
        elif not part.key:
            raise InternalError("a key must not be empty")
        else:
            texts.append(part.key)
            if isinstance(part, Put):
                size += len(part.value)
    together = "".join(texts)
    if not (together.isascii() and together.isprintable()):
        wrong = next(text for text in texts if not (text.isascii() and text.isprintable()))
        raise InternalError(f"a key must be printable ASCII: {wrong!r}")
    size += len(together)
    if transaction.length > capabilities.max_operations:
        raise RequestTooLarge(
            f"{transaction.length} guards or operations in one list; "
            f"the limit is {capabilities.max_operations}"
        )
    if size > capabilities.max_request_bytes:
        raise RequestTooLarge(
            f"{size} bytes in one transaction; the limit is {capabilities.max_request_bytes}"
        )


def _check_written_once(operations: Sequence[Operation]) -> set[str]:
    """Return all keys that the list may write in any branch; refuse two operations that share one."""
    written: set[str] = set()
    for operation in operations:
        if isinstance(operation, (Put, Delete)):
            keys = {operation.key}
        elif isinstance(operation, Transaction):
            keys = _check_written_once(operation.then) | _check_written_once(operation.otherwise)
        else:
            continue
        if not written.isdisjoint(keys):
            raise InternalError(f"written twice in one transaction: {sorted(written & keys)}")
        written |= keys
    return written


def check_transaction(transaction: Transaction, capabilities: Capabilities) -> None:
    """Refuse a transaction that the contract does not allow, whatever the store contains.

    Raises:
        RequestTooLarge: it is over a limit of ``capabilities``.
        InternalError: it nests too deeply, writes a key twice, or a key is empty or not printable ASCII.
    """
    _check_depth(transaction)
    _check_parts(transaction, capabilities)
    _check_written_once(transaction.then)
    _check_written_once(transaction.otherwise)


@dataclass(slots=True)
class Lease:
    """A granted lease and its keys. The store does not know when it ends."""

    ttl_s: float
    keys: set[str] = field(default_factory=set, kw_only=True)


LeaseT = TypeVar("LeaseT", bound=Lease)


class KeyValueStore(ABC, Generic[LeaseT]):
    """Keys and leases. A subclass chooses the revisions and is notified of every change.

    ``_committed`` is called after each transaction that changed something, and after each end of a lease
    with keys; its changes are in key order.
    """

    def __init__(self, capabilities: Capabilities, revision: int) -> None:
        self.capabilities = capabilities
        self._items: dict[str, KeyValue] = {}
        self._order: list[str] = []
        self._revision = revision
        self._leases: dict[int, LeaseT] = {}

    @abstractmethod
    def _next_revision(self) -> int:
        """Return the revision for the next change."""

    @abstractmethod
    def _committed(self, changes: tuple[Changed, ...]) -> None:
        """Handle changes that are in place."""

    def _check(self, transaction: Transaction) -> None:
        """Refuse a transaction that the contract does not allow."""
        check_transaction(transaction, self.capabilities)

    @property
    def revision(self) -> int:
        """The revision of the last change, or the initial one before any change."""
        return self._revision

    @property
    def leases(self) -> Mapping[int, LeaseT]:
        """All leases by id."""
        return self._leases

    def items(
        self, prefix: str = "", after: str = "", limit: int = 0, modified_after: int = 0
    ) -> tuple[KeyValue, ...]:
        """Return what a ``Range`` with these fields reads."""
        items = self._items
        if not modified_after:
            return tuple([items[key] for key in self._keys(prefix, after, limit)])
        found = (items[key] for key in self._keys(prefix, after, 0))
        later = (item for item in found if item.mod_revision > modified_after)
        return tuple(islice(later, limit or None))

    def get(self, key: str) -> KeyValue | None:
        """Return one key, or None if it is absent."""
        return self._items.get(key)

    def load(self, items: Iterable[KeyValue], leases: Mapping[int, LeaseT], revision: int) -> None:
        """Replace the content by that of another store at ``revision``. The leases come without keys."""
        self._revision = revision
        self._leases = dict(leases)
        self._items = {item.key: item for item in items}
        self._order = sorted(self._items)
        for item in self._items.values():
            if item.lease:
                self._leases[item.lease].keys.add(item.key)

    def grant(self, lease: int, granted: LeaseT) -> None:
        """Create a lease with an id that was never used, and is not 0."""
        self._leases[lease] = granted

    def lease(self, lease: int) -> LeaseT:
        """Return the lease with this id.

        Raises:
            LeaseNotFound: the lease does not exist (any more).
        """
        held = self._leases.get(lease)
        if held is None:
            raise LeaseNotFound(f"lease {lease} does not exist (any more)")
        return held

    def end(self, lease: int) -> None:
        """End an existing lease and delete its keys."""
        keys = self._leases.pop(lease).keys
        if keys:
            for key in keys:
                self._remove(key)
            self._commit(dict.fromkeys(keys))

    def transact(self, transaction: Transaction) -> Outcome:
        """Execute a transaction.

        Raises:
            LeaseNotFound: the lease of a put does not exist; nothing was changed.
            RequestTooLarge: it is over a limit; nothing was changed.
            InternalError: the contract does not allow it; nothing was changed.
        """
        self._check(transaction)
        branch = self._choose(transaction)
        changes: dict[str, bytes | None] = {}
        for write in _writes(branch):
            if isinstance(write, Put):
                if write.lease:
                    self.lease(write.lease)
                changes[write.key] = write.value
            elif write.key in self._items:
                changes[write.key] = None
        outcome = self._perform(branch, self._next_revision() if changes else self._revision)
        if changes:
            self._commit(changes)
        return outcome

    def _keys(self, prefix: str, after: str, limit: int) -> list[str]:
        order = self._order
        start = bisect_left(order, prefix)
        if after > prefix:
            start = bisect_right(order, after, start)
        end = bisect_left(order, prefix + _AFTER_ANY, start)
        return order[start : min(end, start + limit) if limit else end]

    def _choose(self, transaction: Transaction) -> _Branch:
        succeeded = all(self._holds(guard) for guard in transaction.guards)
        operations = transaction.then if succeeded else transaction.otherwise
        return _Branch(
            succeeded,
            tuple([self._choose(each) if isinstance(each, Transaction) else each for each in operations]),
        )

    def _holds(self, guard: Guard) -> bool:
        item = self._items.get(guard.key)
        if isinstance(guard, Absent):
            return item is None
        if isinstance(guard, Created):
            return item is not None and item.create_revision == guard.revision
        return item is not None and item.mod_revision == guard.revision

    def _perform(self, branch: _Branch, revision: int) -> Outcome:
        results = tuple([self._perform_step(step, revision) for step in branch.steps])
        return Outcome(branch.succeeded, revision, results)

    def _perform_step(self, step: _Step, revision: int) -> Result:
        match step:
            case Get(key=key, keys_only=keys_only):
                item = self._items.get(key)
                return replace(item, value=b"") if item is not None and keys_only else item
            case Put():
                self._put(step, revision)
                return None
            case Delete(key=key):
                self._remove(key)
                return None
            case Range(prefix=prefix, after=after, limit=limit, modified_after=modified_after):
                return self.items(prefix, after, limit, modified_after)
            case Stat(prefix=prefix):
                revisions = [item.mod_revision for item in self.items(prefix)]
                return Stats(len(revisions), max(revisions, default=0))
            case _Branch():
                return self._perform(step, revision)

    def _put(self, put: Put, revision: int) -> None:
        before = self._items.get(put.key)
        if before is None:
            insort(self._order, put.key)
        elif before.lease:
            self._leases[before.lease].keys.discard(put.key)
        if put.lease:
            self._leases[put.lease].keys.add(put.key)
        created = revision if before is None else before.create_revision
        self._items[put.key] = KeyValue(put.key, put.value, created, revision, put.lease)

    def _remove(self, key: str) -> None:
        item = self._items.pop(key, None)
        if item is None:
            return
        del self._order[bisect_left(self._order, key)]
        if item.lease in self._leases:
            self._leases[item.lease].keys.discard(key)

    def _commit(self, changes: Mapping[str, bytes | None]) -> None:
        self._revision = self._next_revision()
        self._committed(tuple(Changed(key, self._revision, changes[key]) for key in sorted(changes)))


class ChangeHistory:
    """The latest changes, at most ``max_changes``, for watches that begin in the past."""

    def __init__(self, max_changes: int) -> None:
        self._max_changes = max_changes
        self._commits: deque[tuple[Changed, ...]] = deque(maxlen=max_changes)
        self._size = 0
        self._oldest = 0

    @property
    def oldest(self) -> int:
        """The earliest revision from which on every change is kept."""
        return self._oldest

    def append(self, changes: tuple[Changed, ...]) -> None:
        """Keep the changes of one commit; forget the oldest ones if there are too many."""
        while self._commits and self._size + len(changes) > self._max_changes:
            self.forget(self._commits[0][0].revision + 1)
        if len(changes) > self._max_changes:
            self.forget(changes[0].revision + 1)
            return
        self._commits.append(changes)
        self._size += len(changes)

    def forget(self, revision: int) -> None:
        """Forget the changes before ``revision``."""
        self._oldest = max(self._oldest, revision)
        while self._commits and self._commits[0][0].revision < self._oldest:
            self._size -= len(self._commits.popleft())

    def __iter__(self) -> Iterator[tuple[Changed, ...]]:
        """Iterate over the kept changes, commit by commit, oldest first."""
        return iter(self._commits)
