"""The contract of a registry: what a store must offer so that a group can live in it.

A registry is a small key-value store with leases, guarded transactions, ranges and watches. Keys are
printable ASCII text, not empty, ordered by their bytes; values are bytes.

**What is atomic.** A :class:`Transaction` is all or nothing and linearizable: it takes effect at one point
between its sending and its answer, it sees every transaction answered before it was sent, and all that it
reads and writes belongs to one revision. The end of a lease (by time or by :class:`Revoke`) deletes all its
keys in one transaction.

**What is ordered.** Every transaction that changes something gets a revision, an integer greater than every
earlier one. A key's ``create_revision`` is the revision that put it where it was absent, its
``mod_revision`` the one that put it last. Several keys put by one transaction share the revision. Revisions
never go back, not even when the registry restarts. Once another store, or an older copy, is in the place of
the one that a connection was opened with, it answers nothing but
:class:`~rebalanser.errors.RegistryRefused`.

**What an outcome is.** ``execute`` returns, and then the request took effect as answered; or raises
:class:`~rebalanser.errors.OutcomeUnknown`, and then it took effect, or will a little later, or never; or
raises any other error, and then it had and will have no effect.

**Leases.** A lease ends when its time to live has passed on the registry's clock without a
:class:`KeepAlive`; never earlier, and as soon afterwards as the registry notices (its
``lease_detection_s``). An answered keep-alive does not prove that the lease lives; a later transaction that
sees a key of the lease at its create revision does. Nor does it prove that the lease was renewed: it may
come from a leader of the store that was deposed and does not know it yet. A store that has leaders says
with each answer in which ``term`` it was given; a keep-alive renewed the lease only if a later transaction
was answered in the same term. A keep-alive may carry that transaction as its ``proof``. A store that can
renew and prove in one atomic step answers with the proof's :class:`Outcome`, as seen after the renewal; any
other answers :class:`Done`, and then the caller sends the proof itself.

**Watches.** A watch tells what changed, in the order of revisions, from the revision asked for on: each
change at least once, or :class:`HistoryLost`, which means "read again: changes up to this revision may be
missing". After it the watch goes on with everything later. A watch is never proof of anything; it is a
wake-up. The conformance suite for all of this is :mod:`rebalanser.testing.registry_suite`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from rebalanser.errors import InternalError
from rebalanser.protocol.types import record


@record
class KeyValue:
    """A key as stored; ``lease`` is 0 where it belongs to none."""

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
    """Write a key, under a lease unless ``lease`` is 0. A transaction may write a key once only."""

    key: str
    value: bytes
    lease: int = 0


@record
class Delete:
    """Delete a key; deleting an absent one does nothing."""

    key: str


@record
class Get:
    """Read one key: a :class:`KeyValue`, with ``keys_only`` one whose value is empty; or None."""

    key: str
    keys_only: bool = False


@record
class Range:
    """Read all keys with this prefix, in key order, as of the transaction's revision.

    Of these only the keys greater than ``after``, and of those the first ``limit`` where it is not 0: so a
    long range is read in pages, each ``after`` the last key of the one before.
    """

    prefix: str
    after: str = ""
    limit: int = 0


@record
class Stat:
    """Read how many keys have this prefix and the newest ``mod_revision`` among them: :class:`Stats`."""

    prefix: str


@record
class Stats:
    """The answer to :class:`Stat`; ``newest`` is 0 where there is no key."""

    count: int
    newest: int


@record
class Transaction:
    """If every guard holds do ``then``, else ``otherwise``; in order, seeing one's own earlier writes or not.

    An operation may itself be a transaction, one level deep; its guards see the state before the outer
    transaction. The longest of a transaction's three lists counts against ``Capabilities.max_operations``,
    and the longest list of a nested one counts on top of it. Reading a key that the same transaction writes
    gives an unspecified answer. Putting under a lease that does not exist raises
    :class:`~rebalanser.errors.LeaseNotFound`.
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
    """Renew a lease to its full time; raises :class:`~rebalanser.errors.LeaseNotFound` if it has ended.

    A ``proof`` only reads: one that writes raises :class:`~rebalanser.errors.InternalError` at once. One that
    the store refuses renews nothing.
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
    """The new lease's id, never 0, and the time to live that it got, at least the one asked for."""

    lease: int
    ttl_s: float


@record
class LeaseAge:
    """Seconds since a lease was renewed last, at least, and the time to live that it was renewed for."""

    age_s: float
    ttl_s: float


@record
class Done:
    """The answer to :class:`Revoke` and to a :class:`KeepAlive`; ``term`` as for :class:`Outcome`."""

    term: int = field(default=0, compare=False)


@record
class Outcome:
    """The answer to a transaction: which branch ran, at which revision, and a result for each operation.

    ``revision`` is the transaction's own if it changed something, else the registry's latest at the point
    where it read. Results are None for :class:`Put` and :class:`Delete`. ``term`` is that of the
    store's leader, as far as whoever answered knew; 0 where a store has no leaders.
    """

    succeeded: bool
    revision: int
    results: tuple[Result, ...]
    term: int = field(default=0, compare=False)


Result: TypeAlias = KeyValue | tuple[KeyValue, ...] | Stats | Outcome | None
Reply: TypeAlias = Granted | Done | Outcome


@record
class Target:
    """What a watch looks at: one key, or every key with a prefix."""

    key: str
    prefix: bool = False

    def covers(self, key: str) -> bool:
        """Whether a change of ``key`` concerns this watch."""
        return key.startswith(self.key) if self.prefix else key == self.key


@record
class Changed:
    """A key was put (``value`` is set) or deleted (``value`` is None) at this revision."""

    key: str
    revision: int
    value: bytes | None


@record
class HistoryLost:
    """Changes up to and including ``revision`` may be missing: read again. Later changes will be told."""

    revision: int


WatchEvent: TypeAlias = Changed | HistoryLost
Sink: TypeAlias = Callable[[Sequence[WatchEvent]], None]


class Watch(Protocol):
    """A running watch."""

    def close(self) -> None:
        """Stop it. Events already under way may still be told. Closing twice does nothing."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a registry can do and where its limits are; nothing that lacks is skipped in silence."""

    max_operations: int
    """Maximum :attr:`Transaction.length`; at least 10, to read a group.

    It may become less while a connection is open, if a server joins that takes less than the others.
    """
    max_request_bytes: int
    """Keys and values of one transaction together."""
    min_lease_ttl_s: float
    """A shorter lease is granted for this long."""
    lease_detection_s: float
    """How long after its end a lease's keys may still be seen while the registry is healthy."""
    survives_process: bool
    """Whether keys outlive the process that wrote them."""
    shared_between_hosts: bool
    """Whether processes on different hosts can use it."""
    unsafe_reasons: tuple[str, ...] = ()
    """Known faults of this very server that weaken a promise, one sentence each; shown at start."""


class Registry(ABC):
    """A connection to a registry. Every method may be called from any thread."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this registry can do; known once it is open."""

    @abstractmethod
    def execute(self, request: Request, timeout_s: float) -> Reply:
        """Carry out one request within ``timeout_s`` seconds, and answer it.

        A long range may take longer, as long as the registry goes on answering: a group that has grown large
        must stay readable.

        Raises:
            RegistryUnavailable: no effect, may be tried again.
            OutcomeUnknown: the time ran out, or the connection broke, after sending.
            LeaseNotFound: the lease of a keep-alive or of a put does not exist.
            RegistryRefused: no effect, trying again will not help.
        """

    @abstractmethod
    def watch(self, target: Target, from_revision: int, sink: Sink) -> Watch:
        """Tell ``sink`` every change of ``target`` at ``from_revision`` or later, from a thread of its own.

        Returns without waiting. ``sink`` must not block and must not raise.
        """

    def lease_ages(self, leases: Sequence[int], timeout_s: float) -> Mapping[int, LeaseAge]:  # noqa: ARG002
        """The ages of those leases that live, for people; nothing is written. Empty if the store can't tell.

        Raises:
            RetryLater: it could not be asked within ``timeout_s`` seconds.
        """
        return {}

    @abstractmethod
    def close(self) -> None:
        """Close the connection and all watches; leases are left alone. Closing twice does nothing."""
