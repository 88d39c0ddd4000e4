"""All watches of one registry connection, on one stream that is reopened whenever it breaks.

A watch resumes after the last revision that it reported, on any endpoint. If etcd has compacted the next
revisions, the watch reports lost history up to the current revision, and continues after that. etcd's
progress notifications are not used: before 3.5.8 they can run ahead of events.

etcd serves a watch that begins in the past only every 100 ms until the watch has caught up. A *scout* bridges
that time: a second watch of the same target that begins now. A change that the scout sees is reported at once
as lost history, so that the client reads again; the watch itself then reports every change, in order, and the
scout ends. If the target is one key, a change before the scout began is reported as lost history too. For a
prefix, reading all keys would take longer than the 100 ms, and would be useless if other clients write to the
same etcd. A resumed watch has no scout: after a broken stream, 100 ms more do not matter.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import tenacity
from etcd3 import etcdrpc

from rebalanser.errors import RebalanserError, RegistryRefused
from rebalanser.registry.contract import Changed, HistoryLost, Sink, Target, Watch, WatchEvent
from rebalanser_etcd.codec import to_watch_request
from rebalanser_etcd.endpoints import CallFailed, Endpoint, Endpoints

READY_TIMEOUT_S: Final = 5.0
CLOSE_TIMEOUT_S: Final = 5.0
FIRST_WAIT_S: Final = 0.02
LONGEST_WAIT_S: Final = 1.0
CAUGHT_UP_AFTER_S: Final = 0.5
NOW: Final = 0
PUT: Final = 0
"""The type of an event that put a key; the other one deleted it."""

_log = logging.getLogger("rebalanser.etcd")


class EtcdWatch:
    """One watch; ``resume_at`` is the revision from which on its sink has got no events."""

    def __init__(self, target: Target, resume_at: int, sink: Sink, stream: WatchStream) -> None:
        self.target = target
        self.resume_at = resume_at
        self.sink = sink
        self.closed = False
        self.scouted = False
        self._stream = stream

    def deliver(self, events: Sequence[WatchEvent]) -> None:
        """Pass events to the sink. An error in it affects no other watch."""
        try:
            self.sink(events)
        except Exception:
            _log.exception(
                "a change listener raised for %s", self.target.key, extra={"action": "sink_failed"}
            )

    def close(self) -> None:
        """Stop the watch. Events under way may still arrive. Closing twice does nothing."""
        self._stream.remove(self)


class _Broken(Exception):
    """The stream has ended, or can't serve a watch."""


@dataclass(frozen=True, slots=True)
class _Served:
    """A watch of etcd's, with its number: one of ours, or its scout."""

    watch: EtcdWatch
    scout: bool
    since: float


class _Session:
    """One stream on one endpoint, until it ends."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.by_id: dict[int, _Served] = {}
        self.creating: deque[tuple[EtcdWatch, bool]] = deque()
        """Unconfirmed watches in the order of their requests, in which etcd confirms them."""
        self.answered = False
        self.call: Any = None
        self._ids: dict[tuple[EtcdWatch, bool], int] = {}
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def requests(self) -> Iterator[Any]:
        """Yield the requests for gRPC's sending thread, until the session ends."""
        return iter(self._outbox.get, None)

    def create(self, watch: EtcdWatch, scout: bool = False) -> None:
        """Request a watch, or its scout, without waiting for the answer."""
        self.creating.append((watch, scout))
        self._outbox.put(to_watch_request(watch.target, NOW if scout else max(1, watch.resume_at)))

    def confirm(self, watch_id: int) -> _Served:
        """Handle etcd's confirmation, which has the number of the oldest unconfirmed watch."""
        watch, scout = self.creating.popleft()
        served = self.by_id[watch_id] = _Served(watch, scout, time.monotonic())
        self._ids[watch, scout] = watch_id
        if watch.closed:
            self.cancel(watch)
        return served

    def forget(self, watch_id: int) -> _Served | None:
        """Handle etcd's end of the watch with this number, and return the watch."""
        served = self.by_id.pop(watch_id, None)
        if served is not None:
            self._ids.pop((served.watch, served.scout), None)
        return served

    def cancel(self, watch: EtcdWatch) -> None:
        """Cancel a watch, now or once etcd has confirmed it, and ignore its further events."""
        self._cancel(watch, scout=False)
        self.dismiss(watch)

    def dismiss(self, watch: EtcdWatch) -> None:
        """Cancel a watch's scout, if it has one."""
        self._cancel(watch, scout=True)

    def _cancel(self, watch: EtcdWatch, scout: bool) -> None:
        watch_id = self._ids.pop((watch, scout), None)
        if watch_id is None:
            return
        self._outbox.put(etcdrpc.WatchRequest(cancel_request=etcdrpc.WatchCancelRequest(watch_id=watch_id)))

    def end(self) -> None:
        """End the stream from this side, from any thread."""
        self._outbox.put(None)
        if self.call is not None:
            self.call.cancel()


class WatchStream:
    """Serves watches in another thread, which starts with the first watch."""

    def __init__(self, endpoints: Endpoints, read_revision: Callable[[], int]) -> None:
        self._endpoints = endpoints
        self._read_revision = read_revision
        self._lock = threading.Lock()
        self._watches: dict[EtcdWatch, None] = {}
        self._session: _Session | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        endpoints.on_rest(self._leave)

    def add(self, target: Target, from_revision: int, sink: Sink) -> Watch:
        """Begin a watch; returns without waiting for etcd."""
        watch = EtcdWatch(target, from_revision, sink, self)
        with self._lock:
            if self._closed.is_set():
                watch.closed = True
                return watch
            self._watches[watch] = None
            if self._session is not None:
                self._session.create(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="etcd-watches", daemon=True)
                self._thread.start()
        return watch

    def remove(self, watch: EtcdWatch) -> None:
        """End a watch; ending it twice does nothing."""
        with self._lock:
            watch.closed = True
            if watch not in self._watches:
                return
            del self._watches[watch]
            if self._session is not None:
                self._session.cancel(watch)

    def close(self) -> None:
        """End all watches, without waiting for the thread."""
        self._closed.set()
        with self._lock:
            for watch in self._watches:
                watch.closed = True
            self._watches.clear()
            if self._session is not None:
                self._session.end()

    def join(self) -> None:
        """Wait until the thread has ended, but not for a sink that blocks."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_TIMEOUT_S)

    def _leave(self, endpoint: Endpoint) -> None:
        """Handle an endpoint that is set aside: a stream on it might be silent for ever."""
        with self._lock:
            if self._session is not None and self._session.endpoint is endpoint:
                self._session.end()

    def _run(self) -> None:
        while not self._closed.is_set():
            # Replace a session at once if it was answered before it broke, else after a pause.
            retrying = tenacity.Retrying(
                retry=tenacity.retry_if_exception_type(_Broken),
                stop=tenacity.stop_when_event_set(self._closed),
                wait=tenacity.wait_exponential(FIRST_WAIT_S, max=LONGEST_WAIT_S),
                sleep=tenacity.sleep_using_event(self._closed),
                retry_error_callback=lambda _state: None,
            )
            retrying(self._serve_one_session)

    def _serve_one_session(self) -> None:
        try:
            session = self._open_session()
            try:
                for response in session.call:
                    self._handle(session, response)
                    session.answered = True
            except grpc.RpcError as error:
                if not session.answered:
                    raise _Broken(error.details()) from error
            finally:
                with self._lock:
                    self._session = None
                session.end()
                self._endpoints.doubt(session.endpoint)
        except _Broken:
            raise
        except Exception as error:  # the watches must go on after any error: this is their only thread
            _log.exception("the watches begin again", extra={"action": "watches_failed"})
            raise _Broken(str(error)) from error

    def _open_session(self) -> _Session:
        try:
            endpoint, metadata = self._endpoints.ready(READY_TIMEOUT_S)
            session = _Session(endpoint)
            session.call = endpoint.watch(session.requests(), metadata=metadata)
        except (CallFailed, RebalanserError, ValueError) as error:
            raise _Broken(str(error)) from error
        with self._lock:
            self._session = session
            if self._closed.is_set() or not endpoint.proven:  # closed or set aside just now
                session.end()
            for watch in self._watches:
                session.create(watch)
        return session

    def _handle(self, session: _Session, response: Any) -> None:
        try:
            self._endpoints.check_store(session.endpoint, response.header)
        except RegistryRefused as refused:
            raise _Broken(str(refused)) from refused
        if response.created:
            self._begin(session, response)
        if response.canceled:
            self._handle_cancelled(session, response)
        elif response.events:
            self._deliver(session, response)

    def _begin(self, session: _Session, response: Any) -> None:
        with self._lock:
            served = session.confirm(response.watch_id)
            watch = served.watch
            behind = response.header.revision >= watch.resume_at
            first = not (watch.scouted or watch.closed or response.canceled)
            watch.scouted = True
            if behind and first:
                session.create(watch, scout=True)
        if behind and served.scout and not watch.target.prefix and not watch.closed:
            watch.deliver([HistoryLost(response.header.revision)])

    def _deliver(self, session: _Session, response: Any) -> None:
        served = session.by_id.get(response.watch_id)
        if served is None or served.watch.closed:
            return
        watch = served.watch
        changes = [_changed(event, event.kv) for event in response.events]
        if served.scout:
            self._scouted(session, served, changes[-1].revision)
            return
        watch.resume_at = changes[-1].revision + 1
        with self._lock:
            session.dismiss(watch)
        watch.deliver(changes)

    def _scouted(self, session: _Session, served: _Served, revision: int) -> None:
        """Report a change that a scout saw; the watch itself reports it once it has caught up."""
        watch = served.watch
        if time.monotonic() > served.since + CAUGHT_UP_AFTER_S:
            with self._lock:
                session.dismiss(watch)
        elif revision >= watch.resume_at:
            watch.deliver([HistoryLost(revision)])

    def _handle_cancelled(self, session: _Session, response: Any) -> None:
        with self._lock:
            served = session.forget(response.watch_id)
        if served is None or served.scout or served.watch.closed:
            return
        watch = served.watch
        if response.compact_revision == 0:
            self._endpoints.doubt(session.endpoint, token=True)
            _log.warning(
                "etcd refuses a watch at %s: %s",
                session.endpoint.address,
                response.cancel_reason,
                extra={"action": "watch_refused"},
            )
            raise _Broken(response.cancel_reason)
        try:
            revision = max(self._read_revision(), watch.resume_at)
        except RebalanserError as error:
            raise _Broken(str(error)) from error
        watch.resume_at = revision + 1
        watch.deliver([HistoryLost(revision)])
        with self._lock:
            if watch in self._watches and self._session is session:
                session.create(watch)


def _changed(event: Any, item: Any) -> Changed:
    # Each access to `event.kv` makes a new object, and arguments by name take a third longer.
    key = item.key.decode("utf-8", "surrogateescape")
    return Changed(key, item.mod_revision, item.value if event.type == PUT else None)
