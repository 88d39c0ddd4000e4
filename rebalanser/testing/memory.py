"""A registry in this process: ``memory://NAME``, and the store beneath it for simulators.

``MemoryStore`` is deterministic: the same calls at the same times of its clock give the same answers, lease
ids, revisions and watch events. It holds no thread. Sinks are called inside the call that made the change;
leases end inside ``MemoryStore.expire``, with which every ``MemoryStore.execute`` begins. It refuses what any
backend refuses: it is a ``KeyValueStore``.

``MemoryRegistry`` is a connection to such a store that keeps the whole contract of a registry, with a thread
for each watch.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rebalanser import forks
from rebalanser.core.clock import Clock
from rebalanser.errors import Forked, InvalidUrl, OutcomeUnknown, RegistryUnavailable
from rebalanser.registry.contract import (
    Capabilities,
    Changed,
    Done,
    Grant,
    Granted,
    HistoryLost,
    KeepAlive,
    KeyValue,
    LeaseAge,
    Registry,
    Reply,
    Request,
    Revoke,
    Sink,
    Target,
    Transaction,
    Watch,
    WatchEvent,
)
from rebalanser.registry.store import ChangeHistory, KeyValueStore, Lease
from rebalanser.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rebalanser.registry.urls import RegistryUrl

MEMORY_CAPABILITIES: Final = Capabilities(
    max_operations=128,
    max_request_bytes=1_000_000,
    min_lease_ttl_s=0.1,
    lease_detection_s=0.1,
    survives_process=False,
    shared_between_hosts=False,
)
PASSING: Final = "~"
"""Prefix of the name of a store that is dropped once its last connection is closed."""
MAX_HISTORY: Final = 10_000
"""Maximum changes that a store remembers for watches, and maximum events that wait for a slow sink."""


@dataclass(slots=True)
class _Lease(Lease):
    ends_at: float


@dataclass(slots=True, eq=False)
class _Stream:
    """A watch of a store: closing it removes it from the store's set."""

    target: Target
    from_revision: int
    sink: Sink
    streams: dict[_Stream, None]
    lock: threading.RLock

    def close(self) -> None:
        with self.lock:
            self.streams.pop(self, None)

    def deliver(self, events: Sequence[WatchEvent]) -> None:
        if self in self.streams:
            self.sink(events)

    def select(self, changes: Sequence[Changed]) -> list[Changed]:
        if changes[-1].revision < self.from_revision:
            return []
        key = self.target.key
        if self.target.prefix:
            return [change for change in changes if change.key.startswith(key)]
        return [change for change in changes if change.key == key]


class MemoryStore(KeyValueStore[_Lease]):
    """A deterministic store with leases on ``clock``. Every method may be called from any thread.

    Sinks are called inside the call that made the change, in the order of revisions, all that concerns a
    watch of one transaction at once and in key order. A sink may call the store: its changes are delivered
    after the present change has reached all sinks.
    """

    proves_renewals = True
    """True if a keep-alive is answered with its proof; False to answer as a store that takes two steps."""

    def __init__(
        self,
        clock: Clock,
        capabilities: Capabilities = MEMORY_CAPABILITIES,
        max_history: int = MAX_HISTORY,
    ) -> None:
        super().__init__(capabilities, revision=1)
        self._clock = clock
        self._lock = threading.RLock()
        self._lease_granted = threading.Condition(self._lock)
        self._last_lease = 0
        self._history = ChangeHistory(max_history)
        self._streams: dict[_Stream, None] = {}
        self._undelivered: deque[tuple[_Stream, tuple[WatchEvent, ...]]] = deque()
        self._notifying = False

    @property
    def revision(self) -> int:
        """The revision of the last change; 1 before the first."""
        with self._lock:
            return self._revision

    def items(
        self, prefix: str = "", after: str = "", limit: int = 0, modified_after: int = 0
    ) -> tuple[KeyValue, ...]:
        """Return what a ``Range`` with these fields reads, without ending any lease first."""
        with self._lock:
            return super().items(prefix, after, limit, modified_after)

    def execute(self, request: Request) -> Reply:
        """End the leases that are over, then carry out the request.

        Raises:
            LeaseNotFound: the lease of a keep-alive or of a put does not exist.
            RequestTooLarge: the transaction is over a limit.
            InternalError: the transaction is not one that the contract allows.
        """
        with self._lock:
            self.expire()
            return self.carry_out(request)

    def carry_out(self, request: Request) -> Reply:
        """Carry out a request as ``execute`` does, without ending leases first."""
        with self._lock:
            match request:
                case Transaction():
                    return self.transact(request)
                case Grant(ttl_s=ttl_s):
                    return self._grant(ttl_s)
                case KeepAlive(lease=lease, proof=proof):
                    held = self.lease(lease)
                    outcome = self.transact(proof) if proof and self.proves_renewals else None
                    held.ends_at = self._clock.now() + held.ttl_s
                    if outcome is not None:
                        return outcome
                case Revoke(lease=lease):
                    if lease in self._leases:
                        self.end(lease)
            return Done()

    def lease_ages(self, leases: Sequence[int]) -> dict[int, LeaseAge]:
        """The ages of live leases among these."""
        with self._lock:
            now = self._clock.now()
            held = [(lease, self._leases[lease]) for lease in leases if lease in self._leases]
            return {
                lease: LeaseAge(now + each.ttl_s - each.ends_at, each.ttl_s)
                for lease, each in held
                if each.ends_at > now
            }

    def watch(self, target: Target, from_revision: int, sink: Sink) -> Watch:
        """Deliver every change of ``target`` at ``from_revision`` or later to ``sink``, past ones at once."""
        with self._lock:
            stream = _Stream(target, from_revision, sink, self._streams, self._lock)
            self._streams[stream] = None
            if from_revision < self._history.oldest:
                self._undelivered.append((stream, (HistoryLost(self._history.oldest - 1),)))
            for changes in self._history:
                self._queue(stream, changes)
            self._notify()
            return stream

    def expire(self) -> None:
        """End every lease whose time is over, in the order of their ends; each end is one transaction."""
        with self._lock:
            now = self._clock.now()
            over = [(held.ends_at, lease) for lease, held in self._leases.items() if held.ends_at <= now]
            for _, lease in sorted(over):
                if lease in self._leases:
                    self.end(lease)

    def next_expiry(self) -> float | None:
        """The instant of the clock at which the next lease ends, or None without leases."""
        with self._lock:
            return min((held.ends_at for held in self._leases.values()), default=None)

    def compact(self, revision: int) -> None:
        """Forget the changes before ``revision``: a watch from before it gets ``HistoryLost``."""
        with self._lock:
            self._history.forget(min(revision, self._revision + 1))

    def restart(self) -> None:
        """Act as a restarted server: leases have their full time again, watches must read again."""
        with self._lock:
            now = self._clock.now()
            for held in self._leases.values():
                held.ends_at = now + held.ttl_s
            self._undelivered.extend((stream, (HistoryLost(self._revision),)) for stream in self._streams)
            self._notify()

    def end_leases(self, stopped: threading.Event) -> None:
        """Block and end each lease at its time, until ``stopped`` is set and ``wake`` called."""
        with self._lease_granted:
            while not stopped.is_set():
                self.expire()
                following = self.next_expiry()
                remaining = math.inf if following is None else following - self._clock.now()
                self._lease_granted.wait(min(remaining, threading.TIMEOUT_MAX))

    def wake(self) -> None:
        """Wake the thread in ``end_leases``."""
        with self._lease_granted:
            self._lease_granted.notify_all()

    def _grant(self, ttl_s: float) -> Granted:
        ttl_s = max(self.capabilities.min_lease_ttl_s, ttl_s)
        self._last_lease += 1
        self.grant(self._last_lease, _Lease(ttl_s, self._clock.now() + ttl_s))
        self._lease_granted.notify_all()
        return Granted(self._last_lease, ttl_s)

    def _next_revision(self) -> int:
        return self._revision + 1

    def _committed(self, changes: tuple[Changed, ...]) -> None:
        self._history.append(changes)
        changed = {change.key for change in changes}
        for stream in self._streams:
            target = stream.target
            if target.prefix or target.key in changed:
                self._queue(stream, changes)
        self._notify()

    def _queue(self, stream: _Stream, changes: Sequence[Changed]) -> None:
        selected = stream.select(changes)
        if selected:
            self._undelivered.append((stream, tuple(selected)))

    def _notify(self) -> None:
        if self._notifying:
            return
        self._notifying = True
        try:
            while self._undelivered:
                stream, events = self._undelivered.popleft()
                stream.deliver(events)
        finally:
            self._notifying = False


class _Mailbox:
    """Delivers the events of a watch in a thread of its own; an overflow is reported as lost history."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._changed = threading.Condition()
        self._waiting: list[WatchEvent] = []
        self._closed = False
        self._telling = False
        threading.Thread(target=self._run, name="rebalanser-memory-watch", daemon=True).start()

    def settle(self) -> None:
        """Wait until the sink has returned from all posted events, or the watch is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not (self._waiting or self._telling))

    def post(self, events: Sequence[WatchEvent]) -> None:
        with self._changed:
            self._waiting.extend(events)
            if len(self._waiting) > MAX_HISTORY:
                self._waiting = [HistoryLost(self._waiting[-1].revision)]
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._telling = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                events, self._waiting = self._waiting, []
                self._telling = True
            self._sink(events)


@dataclass(frozen=True, slots=True, eq=False)
class _MemoryWatch:
    stream: Watch
    mailbox: _Mailbox
    siblings: dict[_MemoryWatch, None]

    def close(self) -> None:
        self.stream.close()
        self.mailbox.close()
        self.siblings.pop(self, None)


class MemoryRegistry(Registry):
    """A connection to a ``MemoryStore``; several of them are like several processes.

    ``on_close`` is called once, when it is closed.
    """

    loses_answers = False
    """True to carry out requests and answer none, as if the network were cut."""

    def __init__(self, store: MemoryStore, on_close: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._on_close = on_close
        self._lock = threading.Lock()
        self._watches: dict[_MemoryWatch, None] = {}
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        """The abilities of the store."""
        return self._store.capabilities

    def execute(self, request: Request, timeout_s: float) -> Reply:  # noqa: ARG002 - it never waits
        """Carry out one request at once; errors as ``Registry.execute`` says."""
        self._check_open()
        reply = self._store.execute(request)
        if self.loses_answers:
            raise OutcomeUnknown("the answer was lost")
        return reply

    def lease_ages(self, leases: Sequence[int], timeout_s: float) -> Mapping[int, LeaseAge]:  # noqa: ARG002
        """The ages of live leases among these."""
        self._check_open()
        return self._store.lease_ages(leases)

    def watch(self, target: Target, from_revision: int, sink: Sink) -> Watch:
        """Deliver changes of ``target`` at ``from_revision`` or later to ``sink``, in a thread of its own."""
        with self._lock:
            self._check_open()
            mailbox = _Mailbox(sink)
            stream = self._store.watch(target, from_revision, mailbox.post)
            watch = _MemoryWatch(stream, mailbox, self._watches)
            self._watches[watch] = None
            return watch

    def settle(self) -> None:
        """Wait until this connection's watches have delivered all changes so far. Not called by a sink."""
        for watch in list(self._watches):
            watch.mailbox.settle()

    def close(self) -> None:
        """Close the connection and its watches; the store and its leases stay. Closing twice does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for watch in list(self._watches):
            watch.close()
        self._on_close()

    def _check_open(self) -> None:
        if self._closed:
            raise RegistryUnavailable("this connection to the registry is closed")


class _SharedStores:
    """The stores of ``memory://`` by name, and a thread for each one in use that ends its leases."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: dict[str, MemoryStore] = {}
        self._users: dict[str, int] = {}
        self._stops: dict[str, threading.Event] = {}
        self._inherited: set[str] = set()
        forks.in_child(self._forked)

    def _forked(self) -> None:
        """Refuse the parent's stores in a forked child: no other process reads writes to a copy."""
        self._lock = threading.Lock()
        self._inherited |= self._stores.keys()

    def open(self, name: str) -> MemoryRegistry:
        if name in self._inherited:
            raise Forked(
                f"memory://{name} is in the memory of this process's parent, of which this is a copy; "
                "use sqlite:/// to share a store between processes"
            )
        with self._lock:
            store = self._stores.setdefault(name, MemoryStore(SystemClock()))
            self._users[name] = self._users.get(name, 0) + 1
            if self._users[name] == 1:
                stopped = self._stops[name] = threading.Event()
                threading.Thread(
                    target=store.end_leases, args=(stopped,), name="rebalanser-memory-leases", daemon=True
                ).start()
        return MemoryRegistry(store, on_close=lambda: self._leave(name))

    def _leave(self, name: str) -> None:
        with self._lock:
            self._users[name] -= 1
            if self._users[name] == 0:
                self._stops.pop(name).set()
                self._stores[name].wake()
                if name.startswith(PASSING):
                    del self._stores[name], self._users[name]


_SHARED: Final = _SharedStores()


def open_memory(url: RegistryUrl, timeout_s: float) -> Registry:  # noqa: ARG001 - the signature of openers
    """Open ``memory://NAME``: one store for each name in this process, kept until the process ends.

    One whose name begins with ``PASSING`` is kept while it is open.

    Raises:
        InvalidUrl: it has no name, or an option.
        Forked: it was opened in the parent of this process.
    """
    name = "".join(url.addresses) + url.path
    if not name:
        raise InvalidUrl("memory:// has no name; write for example memory://test")
    for option in url.options:
        raise InvalidUrl(f"memory:// has no option {option!r}; it has none")
    return _SHARED.open(name)
