"""The contract of a registry, a store that can keep groups.

A registry is a small key-value store with leases, guarded transactions, ranges and watches. Keys are
printable ASCII text, not empty, ordered by their bytes; values are bytes.

**Atomicity.** A ``Transaction`` is all or nothing and linearizable: it takes effect at one point between
its sending and its answer, it sees every transaction answered before it was sent, and all that it reads and
writes belongs to one revision. The end of a lease (by time or by ``Revoke``) deletes all its keys in one
transaction.

**Order.** Every transaction that changes something gets a revision, an integer greater than every earlier
one. A key's ``create_revision`` is the revision that put it where it was absent, its ``mod_revision`` the one
that put it last. Several keys put by one transaction share the revision. Revisions never go back, not even
when the registry restarts. If another store, or an older copy, replaces the one that a connection was opened
with, every request on the connection raises ``RegistryRefused``.

**Outcomes.** If ``execute`` returns, the request took effect as answered. If it raises
``OutcomeUnknown``, the request took effect, or will take effect a little later, or
never. If it raises any other error, the request had no effect and will have none.

**Leases.** A lease ends when its time to live has passed on the registry's clock without a
``KeepAlive``; never earlier, and while the registry is healthy at most ``lease_detection_s`` later. An
answered keep-alive does not prove that the lease lives; a later transaction that sees a key of the lease at
its create revision does. Nor
does it prove that the lease was renewed: the answer may come from a leader of the store that was deposed and
does not know it yet. A store with leaders adds to each answer the ``term`` in which it was given; a
keep-alive renewed the lease only if a later transaction was answered in the same term. A keep-alive may carry
that transaction as its ``proof``. A store that can renew and prove in one atomic step answers with the
proof's ``Outcome``, as seen after the renewal. Any other answers ``Done``, and the caller sends the
proof itself.

**Watches.** A watch reports changes in the order of revisions, from a given revision on: each change at least
once, or ``HistoryLost``, which means "read again: changes up to this revision may be missing". After
that the watch continues with all later changes. A watch never proves anything; it is a wake-up. The
conformance suite for all of this is ``rebalanser.testing.registry_suite``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from rebalanser.core.group.types import record
from rebalanser.errors import InternalError


@record
class KeyValue:
    """A key as stored; ``lease`` is 0 if it belongs to none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


@record
class Absent:
    """Guard: the key does not exist."""

    key: str


@record
class Created:
    """Guard: the key exists and was created at this revision."""

    key: str
    revision: int


@record
class Unchanged:
    """Guard: the key exists and was last put at this revision."""

    key: str
    revision: int


Guard: TypeAlias = Absent | Created | Unchanged


@record
class Put:
    """Write a key, under a lease unless ``lease`` is 0. A transaction may write a key only once."""

    key: str
    value: bytes
    lease: int = 0


@record
class Delete:
    """Delete a key; deleting an absent one does nothing."""

    key: str


@record
class Get:
    """Read one key. The result is a ``KeyValue``, with ``keys_only`` an empty value, or None."""

    key: str
    keys_only: bool = False


@record
class Range:
    """Read the keys with this prefix that are greater than ``after``, in key order, at one revision.

    A ``limit`` above 0 is the maximum number of keys. So a long range can be read in pages, each ``after``
    the last key of the previous page.

    With ``modified_after`` the result has only those of the keys that were last put after this revision.
    Deleted keys are never in a result. A ``Stat`` beside the range tells whether there were any.
    """

    prefix: str
    after: str = ""
    limit: int = 0
    modified_after: int = 0


@record
class Stat:
    """Count the keys with this prefix and find their newest ``mod_revision``: ``Stats``."""

    prefix: str


@record
class Stats:
    """The answer to ``Stat``; ``newest`` is 0 if there is no key."""

    count: int
    newest: int


@record
class Transaction:
    """Run ``then`` in order if every guard holds, else ``otherwise``.

    An operation may itself be a transaction, one level deep; its guards see the state before the outer
    transaction. The longest of a transaction's three lists counts against ``Capabilities.max_operations``,
    and the longest list of a nested one counts on top of it. The result of reading a key that the same
    transaction writes is unspecified. Putting under a lease that does not exist raises
    ``LeaseNotFound``.
    """

    guards: tuple[Guard, ...] = ()
    then: tuple[Operation, ...] = ()
    otherwise: tuple[Operation, ...] = ()

    @property
    def writes(self) -> bool:
        """True if either branch has a put or a delete."""
        return any(
            operation.writes if isinstance(operation, Transaction) else isinstance(operation, Put | Delete)
            for operation in (*self.then, *self.otherwise)
        )

    @property
    def length(self) -> int:
        """The number that counts against ``Capabilities.max_operations``."""
        nested = [each.length for each in (*self.then, *self.otherwise) if isinstance(each, Transaction)]
        return max(len(self.guards), len(self.then), len(self.otherwise)) + max(nested, default=0)


Operation: TypeAlias = Put | Delete | Get | Range | Stat | Transaction


@record
class Grant:
    """Create a lease that ends ``ttl_s`` seconds after its last keep-alive."""

    ttl_s: float


@record
class KeepAlive:
    """Renew a lease to its full time; raises ``LeaseNotFound`` if it has ended.

    A ``proof`` only reads: one that writes raises ``InternalError`` at once. If the
    store refuses the proof, it renews nothing.
    """

    lease: int
    proof: Transaction | None = None

    def __post_init__(self) -> None:
        if self.proof is not None and self.proof.writes:
            raise InternalError("the proof of a keep-alive only reads")


@record
class Revoke:
    """End a lease now, deleting its keys. Revoking a lease that does not exist does nothing."""

    lease: int


Request: TypeAlias = Transaction | Grant | KeepAlive | Revoke


@record
class Granted:
    """The new lease's id, never 0, and its time to live, which is at least the requested one."""

    lease: int
    ttl_s: float


@record
class LeaseAge:
    """Minimum seconds since a lease was renewed last, and its time to live."""

    age_s: float
    ttl_s: float


@record
class Done:
    """The answer to ``Revoke`` and to a ``KeepAlive``; ``term`` as for ``Outcome``."""

    term: int = field(default=0, compare=False)


@record
class Outcome:
    """The answer to a transaction: the branch that ran, the revision, and a result for each operation.

    ``revision`` is the transaction's own if it changed something, else the registry's latest when it read.
    Results are None for ``Put`` and ``Delete``. ``term`` is that of the store's leader as far as
    the answering server knew it; 0 for a store without leaders.
    """

    succeeded: bool
    revision: int
    results: tuple[Result, ...]
    term: int = field(default=0, compare=False)


Result: TypeAlias = KeyValue | tuple[KeyValue, ...] | Stats | Outcome | None
Reply: TypeAlias = Granted | Done | Outcome


@record
class Target:
    """The keys of a watch: one key, or every key with a prefix."""

    key: str
    prefix: bool = False

    def covers(self, key: str) -> bool:
        """Return True if the watch includes ``key``."""
        return key.startswith(self.key) if self.prefix else key == self.key


@record
class Changed:
    """A key was put (``value`` is set) or deleted (``value`` is None) at this revision."""

    key: str
    revision: int
    value: bytes | None


@record
class HistoryLost:
    """Changes up to and including ``revision`` may be missing: read again. Later changes will follow."""

    revision: int


WatchEvent: TypeAlias = Changed | HistoryLost
Sink: TypeAlias = Callable[[Sequence[WatchEvent]], None]


class Watch(Protocol):
    """A running watch."""

    def close(self) -> None:
        """Stop the watch. Events under way may still arrive. Closing twice does nothing."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities and limits of a registry."""

    max_operations: int
    """Maximum ``Transaction.length``; at least 10, to read a group.

    It may shrink while a connection is open, if a server with a lower limit joins.
    """
    max_request_bytes: int
    """Maximum size of keys and values of one transaction together."""
    min_lease_ttl_s: float
    """Shortest time to live; a shorter lease gets this one."""
    lease_detection_s: float
    """Maximum seconds after its end until a lease's keys are deleted, while the registry is healthy."""
    survives_process: bool
    """True if keys outlive the process that wrote them."""
    shared_between_hosts: bool
    """True if processes on different hosts can use it."""
    unsafe_reasons: tuple[str, ...] = ()
    """Known faults of this server's version that weaken a promise, one sentence each; shown at start."""


@runtime_checkable
class Settles(Protocol):
    """A store in this process, which knows when its watches have told everything."""

    def settle(self) -> None:
        """Wait until the watches of this connection have told all changes so far. Not called by a sink."""


class Registry(ABC):
    """A connection to a registry. Every method may be called from any thread."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Abilities and limits of this registry; known once it is open."""

    @abstractmethod
    def execute(self, request: Request, timeout_s: float) -> Reply:
        """Carry out one request within ``timeout_s`` seconds, and return its answer.

        A long range may take longer as long as the registry goes on answering, so that a large group stays
        readable.

        Raises:
            RegistryUnavailable: no effect, may be tried again.
            OutcomeUnknown: the time ran out, or the connection broke, after the request was sent.
            LeaseNotFound: the lease of a keep-alive or of a put does not exist.
            RegistryRefused: no effect, trying again will not help.
        """

    @abstractmethod
    def watch(self, target: Target, from_revision: int, sink: Sink) -> Watch:
        """Call ``sink``, in another thread, with every change of ``target`` at ``from_revision`` or later.

        Returns without waiting. ``sink`` must neither block nor raise.
        """

    def lease_ages(self, leases: Sequence[int], timeout_s: float) -> Mapping[int, LeaseAge]:  # noqa: ARG002
        """Return the ages of live leases, for display, without writing; empty if the store can't know them.

        Raises:
            RetryLater: the store did not answer within ``timeout_s`` seconds.
        """
        return {}

    @abstractmethod
    def close(self) -> None:
        """Close the connection and all watches, but no leases. Closing twice does nothing."""
