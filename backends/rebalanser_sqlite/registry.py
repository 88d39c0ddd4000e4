"""The registry in one SQLite file; see ``rebalanser_sqlite`` for how it works."""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from rebalanser.errors import LeaseNotFound, RegistryUnavailable
from rebalanser.registry.contract import (
    Capabilities,
    Done,
    Grant,
    KeepAlive,
    LeaseAge,
    Outcome,
    Registry,
    Reply,
    Request,
    Revoke,
    Sink,
    Target,
    Transaction,
    Watch,
)
from rebalanser.registry.store import check_transaction
from rebalanser_sqlite import history, leases, transactions
from rebalanser_sqlite.clock import HostClock, MonotonicClock, host_boot_id
from rebalanser_sqlite.location import file_mode_from, file_of
from rebalanser_sqlite.store import Deadline, Store
from rebalanser_sqlite.watcher import Watcher

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rebalanser.registry.urls import RegistryUrl

CAPABILITIES = Capabilities(
    max_operations=transactions.MAX_OPERATIONS,
    max_request_bytes=transactions.MAX_REQUEST_BYTES,
    min_lease_ttl_s=leases.MIN_TTL_S,
    lease_detection_s=0.05,
    survives_process=True,
    shared_between_hosts=False,
)
OPEN_TIMEOUT_S = 10.0


def open_sqlite(url: RegistryUrl, timeout_s: float) -> Registry:
    """Open the registry at ``sqlite:///relative`` or ``sqlite:////absolute``; create it if it is new.

    Raises:
        InvalidUrl: the URL names no file, or has an unknown option.
        UnusableStore: the place can't have a registry; the message says why and what to do.
        QuotaExceeded: the disk is full.
        RegistryUnavailable: other processes kept the file locked for ``timeout_s`` seconds.
    """
    return SqliteRegistry(file_of(url), timeout_s, file_mode=file_mode_from(url))


class SqliteRegistry(Registry):
    """A registry in one file, shared by the processes of one host.

    Args:
        path: the file; created if it does not exist. Its folder must exist.
        timeout_s: maximum seconds to wait while other processes keep it locked.
        clock: the clock for leases; the host's unless a test passes another.
        boot_id: the id of the clock's run.
        file_mode: the mode of the file, if it is created, and of those beside it.
    """

    def __init__(
        self,
        path: Path,
        timeout_s: float = OPEN_TIMEOUT_S,
        *,
        clock: MonotonicClock | None = None,
        boot_id: str | None = None,
        file_mode: int = 0o600,
    ) -> None:
        self._path = path.absolute()
        self._clock = clock or HostClock()
        self._boot_id = boot_id or host_boot_id()
        self._file_mode = file_mode
        self._lock = threading.Lock()
        self._bulk_lock = threading.Lock()
        self._closed = False
        self._store = self._open(timeout_s)
        with ExitStack() as stack:
            stack.callback(self._store.close)
            self._bulk = self._open(timeout_s)
            stack.pop_all()
        self._watcher = Watcher(self._path, lambda: self._open(OPEN_TIMEOUT_S))

    def _open(self, timeout_s: float) -> Store:
        return Store(self._path, self._clock, self._boot_id, Deadline.after(timeout_s), self._file_mode)

    @property
    def capabilities(self) -> Capabilities:
        """Abilities and limits of this registry, with warnings about its place."""
        return replace(CAPABILITIES, unsafe_reasons=self._store.unsafe_reasons)

    def execute(self, request: Request, timeout_s: float) -> Reply:
        """Execute one request; see ``rebalanser.registry.contract.Registry.execute``.

        Raises:
            RegistryUnavailable: other processes kept the file locked until the time limit, or the registry
                is closed; no effect.
            OutcomeUnknown: the disk failed during the commit.
            LeaseNotFound: the lease of a keep-alive or of a put does not exist.
            QuotaExceeded: the disk is full except for the room that heartbeats need; no effect.
            UnusableStore: the file or one beside it was removed, replaced or damaged while in use; no effect.
            RequestTooLarge: more operations or bytes than the capabilities say; no effect.
            InternalError: the request is not well formed; no effect.
        """
        deadline = Deadline.after(timeout_s)
        transaction = request.proof if isinstance(request, KeepAlive) else request
        if isinstance(transaction, Transaction):
            check_transaction(transaction, CAPABILITIES)
        if isinstance(request, Transaction) and not request.writes:
            return self._read(request, deadline)
        with self._alone(self._lock, deadline):
            return history.with_room(self._store, lambda: self._write(request, deadline), deadline)

    def lease_ages(self, asked: Sequence[int], timeout_s: float) -> Mapping[int, LeaseAge]:
        """Return the ages of live leases, as of one snapshot; see the contract."""
        deadline = Deadline.after(timeout_s)
        with self._alone(self._bulk_lock, deadline), self._bulk.reading(deadline):
            return leases.ages(self._bulk, asked)

    def watch(self, target: Target, from_revision: int, sink: Sink) -> Watch:
        """Call ``sink`` in the registry's thread with every change of ``target`` from a revision on."""
        if self._closed:
            raise RegistryUnavailable("this connection to the registry is closed")
        return self._watcher.add(target, from_revision, sink)

    def close(self) -> None:
        """Close the file and all watches, but no leases. Closing twice does nothing."""
        self._watcher.close()
        with self._bulk_lock, self._lock:
            if not self._closed:
                self._closed = True
                self._bulk.close()
                self._store.close()

    def wake(self) -> None:
        """Let the watches look at the file now, as after a step of a test's clock."""
        self._watcher.wake()

    def forget_history(self, before_revision: int, timeout_s: float = OPEN_TIMEOUT_S) -> None:
        """Delete the changes before a revision; an earlier watch gets ``HistoryLost`` (RB-28).

        Raises:
            RegistryUnavailable: other processes kept the file locked until the time limit.
        """
        deadline = Deadline.after(timeout_s)
        with self._alone(self._lock, deadline), self._store.writing(deadline):
            history.forget(self._store, before_revision - 1)

    @contextmanager
    def _alone(self, lock: threading.Lock, deadline: Deadline) -> Iterator[None]:
        if not lock.acquire(timeout=deadline.left_s):
            raise RegistryUnavailable(f"other threads kept {self._path} busy until the timeout; try again")
        try:
            if self._closed:
                raise RegistryUnavailable("this connection to the registry is closed")
            yield
        finally:
            lock.release()

    def _read(self, request: Transaction, deadline: Deadline) -> Outcome:
        """Answer from a snapshot, after ending the leases that are over in it.

        A range may be long, so it is read on a second connection and outside of the write lock: no heartbeat
        waits for it.
        """
        bulk = transactions.has_range(request)
        store, lock = (self._bulk, self._bulk_lock) if bulk else (self._store, self._lock)
        while True:
            with self._alone(lock, deadline):
                outcome = self._snapshot(store, request, deadline)
            if outcome is not None:
                return outcome
            with self._alone(self._lock, deadline):
                self._end_leases(deadline)

    def _snapshot(self, store: Store, request: Transaction, deadline: Deadline) -> Outcome | None:
        """Answer from a snapshot; None if a lease in it is over."""
        with store.reading(deadline) as revision:
            # Read the clock after taking the snapshot: a lease that is not over by then was alive in it.
            if leases.any_over(store):
                return None
            chosen = transactions.choose(store.connection, request)
            return transactions.answer(store.connection, chosen, revision)

    def _end_leases(self, deadline: Deadline) -> None:
        with self._store.writing(deadline):
            keys_went = leases.end_those_over(self._store)
            history.trim(self._store)
        if keys_went:
            self._store.ring()

    def _write(self, request: Request, deadline: Deadline) -> Reply:
        with self._store.writing(deadline):
            before = self._store.revision()
            leases.end_those_over(self._store)
            may_grow = isinstance(request, Transaction | Grant)
            pages = self._store.pages() if may_grow else 0
            # Raise only after the commit: the ended leases stay ended, and nothing else was written.
            reply = self._reply(request)
            if may_grow:
                self._store.check_room(pages)
            after = self._store.revision()
            if after > before:
                history.trim(self._store)
        if after > before or isinstance(request, Grant):
            self._store.ring()
        self._store.checkpoint_if_due()
        if isinstance(reply, LeaseNotFound):
            raise reply
        return reply

    def _reply(self, request: Request) -> Reply | LeaseNotFound:
        try:
            match request:
                case Transaction():
                    return self._carry_out(request)
                case Grant(ttl_s):
                    return leases.grant(self._store, ttl_s)
                case KeepAlive(lease, proof):
                    leases.keep_alive(self._store, lease)
                    if proof is not None:
                        return self._carry_out(proof)
                case Revoke(lease):
                    leases.end(self._store, lease)
            return Done()
        except LeaseNotFound as error:
            return error

    def _carry_out(self, request: Transaction) -> Outcome:
        connection = self._store.connection
        chosen = transactions.choose(connection, request)
        writes = transactions.writes_of(connection, chosen)
        revision = self._store.revision() + bool(writes)
        outcome = transactions.answer(connection, chosen, revision)
        if writes:
            transactions.write(connection, writes, revision)
            history.record_size(self._store, revision, writes.size)
        return outcome
