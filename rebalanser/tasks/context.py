"""Context of a queue in one process: its opening, engine, write batcher, clock, history and metrics."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Self, TypeAlias, TypeVar

from rebalanser import forks
from rebalanser.core.clock import Clock
from rebalanser.core.tasks import rules
from rebalanser.core.tasks.model import ClaimTerm, Stored, TaskId, TaskState, Update
from rebalanser.core.tasks.rules import ClaimKey, Decision, Reason, Refused
from rebalanser.core.tasks.store import Change, ChangeFilter, ChangesLost, Move, WriteConflict
from rebalanser.core.tasks.writes import PendingWrite, WriteFuture
from rebalanser.errors import Forked, InternalError, InvalidState, RegistryUnavailable, RetryLater
from rebalanser.history import Event, Journal, Protocol, SkuldKind, author_here, open_sinks
from rebalanser.history.sinks import HistorySink
from rebalanser.registry.urls import RegistryUrl, load_opener, parse_url
from rebalanser.settings import Settings
from rebalanser.tasks.ancestry import Ancestry
from rebalanser.tasks.batcher import WriteBatcher, result_of
from rebalanser.tasks.claim import LOG_PAGE, check_content, read_log
from rebalanser.tasks.engine import ClaimsFromIndex, Engine, EngineWatch, MovesInTransactions, Sink
from rebalanser.tasks.loops import ErrorPolicy
from rebalanser.tasks.metrics import TaskMetrics

if TYPE_CHECKING:
    import sqlite3

ENTRY_POINT_GROUP: Final = "rebalanser.engines"

EngineOpener: TypeAlias = Callable[[RegistryUrl, float], Engine]
"""``open(url, timeout_s)``: returns an engine that has answered once within that time, or raises an error
that says what was tried: RegistryUnavailable if it did not answer, UnusableStore if no store of tasks can be
there."""


def load_engine(url: str) -> tuple[RegistryUrl, EngineOpener]:
    """Parse a URL, and load the opener of its engine.

    Raises:
        InvalidUrl: it is no URL.
        UnknownScheme: no engine has this scheme; the message names the known ones.
        MissingExtra: its packages are not installed; the message names the extra.
    """
    parsed = parse_url(url)
    opener: EngineOpener = load_opener(parsed.scheme, ENTRY_POINT_GROUP, "tasks")
    return parsed, opener


@dataclass(frozen=True, slots=True)
class OpenedQueue:
    """A queue at an engine that has answered, with the number of its partitions."""

    context: Context
    partitions: int
    ancestry: Ancestry
    """Known dependencies of its tasks."""


class QueueOpener:
    """Opens a queue's engine when it is first needed, and keeps it. May be used from any thread."""

    def __init__(self, open_queue: Callable[[float | None], OpenedQueue]) -> None:
        self._open_queue = open_queue
        self._lock = threading.Lock()
        self._opened: OpenedQueue | None = None
        self._closed = False

    def opened(self, timeout_s: float | None = None) -> OpenedQueue:
        """Return the opened queue, within ``timeout_s`` seconds, or the queue's timeout.

        Raises what opening raises; the next call tries again.

        Raises:
            InvalidState: it is closed.
            RegistryUnavailable: another thread opens it, and has not yet after ``timeout_s`` seconds.
        """
        opened = self._opened
        if opened is not None:
            return opened
        began_at = time.monotonic()
        if not self._lock.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            raise too_slow(timeout_s or 0.0)
        try:
            if self._closed:
                raise InvalidState("the queue is closed; make another one")
            if self._opened is None:
                waited_s = time.monotonic() - began_at
                left_s = None if timeout_s is None else max(0.0, timeout_s - waited_s)
                self._opened = self._open_queue(left_s)
            return self._opened
        finally:
            self._lock.release()

    def close(self) -> None:
        """Finish pending writes and close the engine, if it was opened. Closing twice does nothing."""
        with self._lock:
            opened, self._opened, self._closed = self._opened, None, True
        if opened is not None:
            opened.context.close()


CLOSE_TIMEOUT_S: Final = 2.0
"""Maximum seconds to write out the history at the end."""


class TaskHistory:
    """Writes the history of one process's claims; never blocks it and never fails it."""

    def __init__(
        self, queue: str, label: str, sink: HistorySink | None, clock: Clock, *, fenced: bool = False
    ) -> None:
        self._process = uuid.uuid4().hex
        self._fenced = fenced
        self._journal = (
            None
            if sink is None
            else Journal(
                author_here(Protocol.SKULD, queue, self._process, label),
                sink,
                wall=clock.wall,
                monotonic=clock.now,
            )
        )

    @classmethod
    def opened(cls, queue: str, label: str, settings: Settings, clock: Clock) -> Self:
        """Open the history at the settings' ``history_dir`` or ``history_topic``; without both, write none.

        Raises:
            InvalidUrl: the topic is not a URL.
            MissingExtra: the package that the topic needs is not installed.
        """
        if settings.history_dir is None and settings.history_topic is None:
            return cls(queue, label, None, clock)
        sink = open_sinks(
            settings.history_dir,
            settings.history_topic,
            queue,
            label,
            settings.history_max_bytes,
            settings.history_file_mode,
        )
        return cls(queue, label, sink, clock, fenced=settings.fenced)

    @property
    def is_written(self) -> bool:
        """True if history is written."""
        return self._journal is not None

    def write(
        self,
        kind: SkuldKind,
        task: TaskId,
        token: int,
        *,
        revision: int | None = None,
        value: int | None = None,
    ) -> None:
        """Write an event of the claim of a task with this token."""
        if self._journal is None:
            return
        self._journal.write(
            Event(
                kind,
                self._process,
                resource=task,
                token=token,
                revision=revision,
                value=value,
                fenced=self._fenced,
            )
        )

    def close(self) -> None:
        """Write out all events, in two seconds at most."""
        if self._journal is not None:
            self._journal.close(CLOSE_TIMEOUT_S)


ResultT = TypeVar("ResultT")


class Beginning:
    """A watch that one thread begins for all that want it.

    ``timeout_s`` is the maximum seconds that it waits for the engine.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._watch: Future[EngineWatch] = Future()

    def succeed(self, watch: EngineWatch) -> None:
        """Pass the watch on to the threads that wait."""
        self._watch.set_result(watch)

    def fail(self, error: BaseException) -> None:
        """Pass an error on to the threads that wait; after an interrupt, let one of them begin."""
        if isinstance(error, Exception):
            self._watch.set_exception(error)
        else:
            self._watch.cancel()

    @property
    def watch(self) -> EngineWatch:
        """The watch, once it has begun."""
        return self._watch.result()

    def has_begun(self, timeout_s: float) -> bool:
        """Wait until another thread has begun the watch; False if this one should try itself.

        It should if that thread was interrupted, or had less time than this one.

        Raises:
            RegistryUnavailable: the engine is away, or has not answered within ``timeout_s`` seconds.
        """
        try:
            self._watch.result(min(timeout_s, threading.TIMEOUT_MAX))
        except CancelledError:
            return False
        except TimeoutError:
            raise too_slow(timeout_s) from None
        except RetryLater:
            if timeout_s <= self.timeout_s:
                raise
            return False
        return True


def too_slow(timeout_s: float) -> RegistryUnavailable:
    """Return the error of an engine that has not answered within ``timeout_s`` seconds."""
    return RegistryUnavailable(f"the engine has not answered within {timeout_s:.3g} s")


class SharedWatch:
    """Passes the changes of a queue on to all sinks of a process, by one watch while there are any.

    May be used from any thread.
    """

    def __init__(self, engine: Engine, queue: str, timeout_s: float, errors: ErrorPolicy) -> None:
        self._engine = engine
        self._queue = queue
        self._timeout_s = timeout_s
        self._errors = errors
        self._lock = threading.Lock()
        self._feed = _Feed(errors)

    def join(self, sink: Sink, wants: ChangeFilter | None, timeout_s: float = math.inf) -> EngineWatch:
        """Report all changes to a sink from now on; raises what the engine does.

        It takes ``timeout_s`` seconds at most, and no more than the queue's timeout.
        """
        reader = _WatchReader(self, sink, wants)
        left_s = timeout_s = min(timeout_s, self._timeout_s)
        ends_at = time.monotonic() + timeout_s
        while not self._has_joined(reader, left_s):
            left_s = max(0.0, ends_at - time.monotonic())
        return reader

    def _has_joined(self, reader: _WatchReader, timeout_s: float) -> bool:
        """Join the watch; False if the thread that was to begin it could not, and this one should."""
        mine = Beginning(timeout_s)
        with self._lock:
            feed = self._feed
            feed.readers = (*feed.readers, reader)
            beginning = feed.beginning = feed.beginning or mine
        if beginning is mine:
            self._begin(feed, mine)
            return True
        try:
            return beginning.has_begun(timeout_s)
        except BaseException:
            self.leave(reader)
            raise

    def _begin(self, feed: _Feed, beginning: Beginning) -> None:
        """Begin the watch of a feed. No lock is held meanwhile."""
        try:
            revision = self._engine.page(self._queue, beginning.timeout_s, limit=1).revision
            watch = self._engine.watch(self._queue, revision, feed.receive, feed.wants)
        except BaseException as error:
            with self._lock:
                self._feed = _Feed(self._errors)
            beginning.fail(error)
            raise
        beginning.succeed(watch)

    def leave(self, reader: _WatchReader) -> None:
        """Stop reporting to a sink; a report under way may still come."""
        with self._lock:
            feed = self._feed
            feed.readers = tuple(each for each in feed.readers if each is not reader)
            if feed.readers or feed.beginning is None:
                return
            # The thread of a watch may report for another moment, beside that of the next one.
            self._feed = _Feed(self._errors)
        feed.beginning.watch.close()


class _Feed:
    """The readers of one watch of the engine, which reports from one thread at a time."""

    def __init__(self, errors: ErrorPolicy) -> None:
        self.readers: tuple[_WatchReader, ...] = ()
        self.beginning: Beginning | None = None
        """The watch, or who begins it; None as long as there is no reader."""
        self._errors = errors

    def wants(self, change: Change) -> bool:
        """True if a reader wants the task of a change."""
        wanted = False
        for each in self.readers:
            try:
                if each.wants is None or each.wants(change):
                    each.wanted.add(change.task)
                    wanted = True
            except Exception as error:  # the other sinks must get the change
                self._errors.ignored("a watch", error)
                self._report(each, ChangesLost(change.revision))
        return wanted

    def receive(self, news: Sequence[Stored] | ChangesLost) -> None:
        """Pass each reader the news that it wants."""
        for each in self.readers:
            theirs = (
                news if isinstance(news, ChangesLost) else [one for one in news if one.head.id in each.wanted]
            )
            each.wanted.clear()
            if theirs:
                self._report(each, theirs)

    def _report(self, reader: _WatchReader, news: Sequence[Stored] | ChangesLost) -> None:
        try:
            reader.sink(news)
        except Exception as error:
            self._errors.ignored("a watch", error)


@dataclass(eq=False, slots=True)
class _WatchReader:
    """One sink of a shared watch. ``wanted`` are the tasks that it gets next."""

    shared: SharedWatch
    sink: Sink
    wants: ChangeFilter | None
    wanted: set[TaskId] = field(default_factory=set)

    def close(self) -> None:
        """Stop reporting to the sink. Closing twice does nothing."""
        self.shared.leave(self)


class Context:
    """One queue in one process. May be used from any thread, but not in a forked child.

    ``clock_name`` names the run of the clock; empty if unknown. ``ttl_s`` is the seconds that a claim lasts
    without a renewal, ``timeout_s`` the maximum seconds of one request to the engine. ``errors`` handles the
    errors of its loops, ``metrics`` counts its tasks.
    """

    def __init__(
        self,
        engine: Engine,
        queue: str,
        *,
        clock: Clock,
        clock_name: str,
        ttl_s: float,
        timeout_s: float,
        history: TaskHistory,
        errors: ErrorPolicy,
        metrics: TaskMetrics,
    ) -> None:
        self.engine = engine
        self.queue = queue
        self.clock = clock
        self.clock_name = clock_name
        self.ttl_s = ttl_s
        self.timeout_s = timeout_s
        self.history = history
        self.errors = errors
        self.metrics = metrics
        self.batcher = WriteBatcher(engine, queue, timeout_s, errors, engine.capabilities.max_in_flight)
        self.max_bytes = engine.capabilities.max_update_bytes
        """Maximum bytes of an update or a result, by the engine."""
        self.is_inherited = False
        """True in a forked child, whose claims are the parent's."""
        self._changes = SharedWatch(engine, queue, timeout_s, errors)
        forks.in_child(self._forked)

    def refuse_fork(self) -> None:
        """Refuse use in a forked child.

        Raises:
            Forked: the context was opened by the parent of this process.
        """
        if self.is_inherited:
            raise Forked(
                f"a claim of queue {self.queue!r} is held by the parent of this process: use it there, and "
                "the queue itself here"
            )

    def _forked(self) -> None:
        self.is_inherited = True
        self.batcher.forked()

    def term(self) -> ClaimTerm:
        """Return the term of a claim that a request from now on makes or renews."""
        return ClaimTerm(self.ttl_s, self.clock_name, self.clock.now() + self.ttl_s)

    def submit(self, pending: PendingWrite[ResultT]) -> WriteFuture[ResultT]:
        """Submit a pending write; see ``submit``."""
        return self.batcher.submit(pending)

    def write(self, pending: PendingWrite[ResultT]) -> ResultT:
        """Write it, and return its result; raises what its future does."""
        self.batcher.write_all([pending])
        return result_of(pending)

    def check(self, what: str, content: object) -> bytes:
        """Check the content of an update or a result; see ``check_content``."""
        return check_content(what, content, self.max_bytes)

    def read(self, ids: Sequence[TaskId]) -> Mapping[TaskId, Stored]:
        """Read tasks; the result has those that exist."""
        self.refuse_fork()
        return self.engine.read(self.queue, ids, self.timeout_s)

    def log(self, task: TaskId, claims: int) -> Iterator[Update]:
        """Read all updates of a task's first ``claims`` claims, page by page (SK-9)."""
        return read_log(partial(self.updates, task), claims)

    def updates(
        self, task: TaskId, claim: int | None = None, first: int = 0, limit: int = LOG_PAGE
    ) -> Sequence[Update]:
        """Read a part of a task's log (SK-9)."""
        self.refuse_fork()
        return self.engine.updates(self.queue, task, self.timeout_s, claim=claim, first=first, limit=limit)

    def watch(
        self, sink: Sink, wants: ChangeFilter | None = None, timeout_s: float = math.inf
    ) -> EngineWatch:
        """Watch the queue from now on; see ``watch``.

        It takes ``timeout_s`` seconds at most, and no more than the queue's timeout.

        A read after this returns has all changes that the sink does not get. The watches of a process share
        one watch of the engine, as etcd sends every state of the queue to each. An engine with an index has
        one feed for all watches anyway, and reads only the wanted tasks.

        Raises:
            RegistryUnavailable: the engine did not answer in time.
        """
        if not isinstance(self.engine, ClaimsFromIndex):
            return self._changes.join(sink, wants, timeout_s)
        timeout_s = min(timeout_s, self.timeout_s)
        revision = self.engine.page(self.queue, timeout_s, limit=1).revision
        return self.engine.watch(self.queue, revision, sink, wants)

    def complete_in(
        self, connection: sqlite3.Connection, stored: Stored, held: ClaimKey, result: bytes | None
    ) -> TaskState | Refused:
        """Complete a task within the transaction that ``connection`` has begun."""
        engine = self.engine
        if not isinstance(engine, MovesInTransactions):
            raise InvalidState("complete_in needs a queue on SQLite, whose transactions it can join")
        while True:
            decision = rules.complete(stored.state, held, result)
            if isinstance(decision, Refused):
                return decision
            head = stored.head
            move = Move(head.id, head.queue, stored.partition, stored.revision, decision, head=head)
            if not isinstance(engine.move_in(connection, move), WriteConflict):
                return decision
            # The revision may be a renewal or an update of this very claim, not yet answered. From here on
            # the transaction holds the write lock, so the next read stays valid.
            found = self.read([head.id]).get(head.id)
            if found is None or found.revision == stored.revision:
                return Refused(Reason.GONE if found is None else Reason.SUPERSEDED)
            stored = found

    def close(self) -> None:
        """Settle all pending writes, then close the history and the engine."""
        if self.is_inherited:
            return
        self.batcher.close()
        self.history.close()
        self.engine.close()

    def decide_update(self, stored: Stored, held: ClaimKey, sequence: int, content: bytes) -> Decision:
        """Decide about an update (SK-9); if one of this number is written, it is read to compare them."""
        claim = stored.state.claim
        is_written = claim is not None and claim.number == held.number and claim.updates > sequence
        written = self._read_update(stored.head.id, held, sequence) if is_written else None
        return rules.update(stored.state, held, sequence, content, written)

    def _read_update(self, task: TaskId, held: ClaimKey, sequence: int) -> bytes | None:
        """Read one update of a claim's log; None if there is none of this number."""
        found = self.updates(task, held.number, sequence, 1)
        if not found:
            return None
        if found[0].sequence != sequence:
            raise InternalError(f"the log of task {task} has no update {sequence} of claim {held.number}")
        return found[0].content
