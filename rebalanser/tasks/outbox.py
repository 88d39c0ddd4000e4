"""The outbox: a folder on the producer's disk that keeps tasks until the engine has them (SK-4).

.. code-block:: text

    enqueue ──► Spool (SQLite, synced) ──► answered `spooled`, if the engine is away or slow
                  │
                  └─► Forwarder, a loop: one of the host at a time, by a lock on a file
                        └─► Engine, whose tally takes each entry once ──► answered `committed`

Every enqueue goes through the spool, so that no task overtakes one that waits there.

The forwarder sends entries strictly in their order. It deletes an entry once the engine has answered it; an
entry whose answer was lost, or whose forwarder died, is sent again, and the engine's tally says if it was
taken. A refused entry is handled in an order that loses no refusal: it is noted in the spool, then skipped in
the engine, and only then taken out of the spool's order.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

from tenacity import (
    Retrying,
    retry_if_not_result,
    sleep_using_event,
    stop_after_delay,
    stop_when_event_set,
    wait_random_exponential,
)

from rebalanser.core.tasks.ids import partition_of_task
from rebalanser.core.tasks.model import EnqueueAnswer, Head, Task, TaskId
from rebalanser.core.tasks.store import (
    Answer,
    Applied,
    Duplicate,
    Enqueue,
    Skip,
    Taken,
    WriteConflict,
    enqueued,
)
from rebalanser.errors import (
    DependencyCycle,
    InternalError,
    InvalidState,
    InvalidTask,
    RebalanserError,
    RegistryUnavailable,
    RequestTooLarge,
    TaskExists,
    UnknownTask,
    UnusableFolder,
)
from rebalanser.folders import make_folder
from rebalanser.registry.urls import RegistryUrl
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks.context import OpenedQueue, QueueOpener
from rebalanser.tasks.loops import ErrorPolicy, Loop
from rebalanser.tasks.results import redirect_sources
from rebalanser.tasks.spool import DUPLICATE, Spool, SpoolEntry, SpoolName, SpoolRefusal, forwarded, placed

MAX_BATCH: Final = 60
"""Maximum entries in one request."""
_log = get_logger()

Report: TypeAlias = Callable[[int, RebalanserError | Duplicate | None], bool]
"""Reports that an entry was forwarded (None), or why it was not; True if a caller waited for it."""


class Forwarding:
    """Forwards the entries of a spool. At most one at a time may do so for a spool."""

    def __init__(self, spool: Spool, opened: OpenedQueue, report: Report) -> None:
        self._spool = spool
        self._context = opened.context
        self._ancestry = opened.ancestry
        self._partitions = opened.partitions
        self._report = report

    def forward(self) -> bool:
        """Forward the next entries; False if there are none.

        Raises:
            RebalanserError: the engine is away. A retry forwards no entry twice.
        """
        entries = self._spool.first(MAX_BATCH)
        if not entries:
            return False
        head = entries[0]
        if head.refusal is not None:
            self._skip(head)
            return True
        ready = self._ready(self._without_duplicates(entries))
        if ready:
            self._send(ready)
        else:
            self._refuse(head, DependencyCycle(f"task {head.head.id} would wait for itself"))
        return True

    def _without_duplicates(self, entries: Sequence[SpoolEntry]) -> Sequence[SpoolEntry]:
        """Return the entries; dependencies on dropped duplicates become dependencies on the existing tasks.

        The caller got the duplicate's id, as it was spooled, and depended on that.
        """
        if not any(entry.head.after for entry in entries):
            return entries
        duplicates = self._spool.duplicates()
        return [
            entry if duplicates.keys().isdisjoint(entry.head.after) else _redirected(entry, duplicates)
            for entry in entries
        ]

    def _ready(self, entries: Sequence[SpoolEntry]) -> list[SpoolEntry]:
        """Return the first entries, up to one that is refused already or would wait for itself."""
        ready: list[SpoolEntry] = []
        coming: dict[TaskId, Head] = {}
        for entry in entries:
            if entry.refusal is not None:
                break
            try:
                self._ancestry.refuse_cycle(entry.head, coming)
            except DependencyCycle:
                break
            ready.append(entry)
            coming[entry.head.id] = entry.head
        return ready

    def _send(self, entries: Sequence[SpoolEntry]) -> None:
        identity = self._spool.identity()
        writes = [placed(each, partition_of_task(each.head, self._partitions), identity) for each in entries]
        try:
            answers = self._context.engine.apply(writes, self._context.timeout_s)
        except RequestTooLarge as error:
            if len(entries) > 1:
                self._send(entries[:1])
            else:
                self._refuse(entries[0], error)
            return
        self._settle(entries, writes, answers)

    def _settle(
        self, entries: Sequence[SpoolEntry], writes: Sequence[Enqueue], answers: Sequence[Answer]
    ) -> None:
        """Settle the entries up to the first that was not taken; those after it were not taken either."""
        taken = 0
        for answer in answers:
            if not isinstance(answer, Applied | Taken):
                break
            taken += 1
        self._done(entries[:taken])
        if taken == len(entries):
            return
        entry, answer = entries[taken], answers[taken]
        if not isinstance(answer, WriteConflict):
            self._refused_or_there(entry, writes[taken], answer)
        elif taken == 0:
            self._renew(entry)

    def _done(self, entries: Sequence[SpoolEntry]) -> None:
        """Report entries to their callers, then delete them from the spool."""
        if entries:
            for entry in entries:
                self._report(entry.number, None)
            self._spool.forward(entries[0].number, entries[-1].number)

    def _refused_or_there(self, entry: SpoolEntry, write: Enqueue, answer: Answer) -> None:
        """Settle an entry whose task exists, is a duplicate, or depends on an unknown task."""
        if isinstance(answer, Duplicate):
            self._spool.refuse(entry.number, SpoolRefusal(DUPLICATE, answer.id))
            self._skip(entry, answer)
            return
        try:
            enqueued(write, answer)
        except InvalidTask as error:
            self._refuse(entry, error)
        else:
            self._count(entry)
            self._done([entry])

    def _refuse(self, entry: SpoolEntry, error: RebalanserError) -> None:
        self._spool.refuse(entry.number, SpoolRefusal(type(error).__name__, str(error)))
        self._skip(entry, error)

    def _skip(self, entry: SpoolEntry, error: RebalanserError | Duplicate | None = None) -> None:
        """Count a refused entry; then report it to its waiting caller, or keep it for others."""
        if not self._count(entry):
            self._done([entry])
        elif error is not None and self._report(entry.number, error):
            self._spool.forward(entry.number, entry.number)
        else:
            self._spool.keep(entry.number)
            if isinstance(error, Duplicate) or (entry.refusal and entry.refusal.kind == DUPLICATE):
                return
            reason = str(error) if entry.refusal is None else entry.refusal.reason
            _log.warning(
                "a spooled task was refused",
                action="task_refused",
                queue=entry.head.queue,
                task=entry.head.id,
                reason=reason,
            )

    def _count(self, entry: SpoolEntry) -> bool:
        """Count an entry as skipped in the engine; False if an earlier, unanswered try has made its task."""
        write = Skip(entry.head.queue, forwarded(entry, self._spool.identity()))
        (answer,) = self._context.engine.apply([write], self._context.timeout_s)
        if isinstance(answer, Applied | Taken):
            return isinstance(answer, Applied)
        if isinstance(answer, WriteConflict):
            self._renew(entry)
            return self._count(entry)
        raise InternalError(f"a skip was answered {answer!r}")

    def _renew(self, entry: SpoolEntry) -> None:
        """Begin a new outbox: the engine was restored or replaced, and has lost its tally."""
        _log.warning(
            "the engine has lost what it had taken from this outbox before",
            action="outbox_renewed",
            queue=entry.head.queue,
            outbox=str(self._spool.path),
            next=entry.number,
        )
        self._spool.renew(entry.number)


def _redirected(entry: SpoolEntry, duplicates: Mapping[TaskId, TaskId]) -> SpoolEntry:
    task = entry.enqueue.task
    after = tuple(dict.fromkeys(duplicates.get(each, each) for each in task.head.after))
    changed = Task(replace(task.head, after=after), redirect_sources(task.payload, duplicates))
    return replace(entry, enqueue=replace(entry.enqueue, task=changed))


LOOK_S: Final = 5.0
"""Seconds between two looks of an idle forwarder for entries of other processes."""
_ERRORS: Final = {each.__name__: each for each in (DependencyCycle, RequestTooLarge, TaskExists, UnknownTask)}


def engine_name(url: RegistryUrl) -> str:
    """Name an engine by its URL: without credentials, a file by its absolute path.

    Spools on disk are found by this name, so its form never changes.
    """
    if url.hosts:
        hosts = ",".join(sorted(f"{host}:{port}" for host, port in url.hosts))
        return f"{url.scheme}://{hosts}/{url.root}"
    return f"{url.scheme}:///{Path(url.path[1:]).resolve()}"


class Outbox:
    """The outbox of a queue, and the loop that forwards its entries. May be used from any thread.

    ``timeout_s`` is the maximum seconds that ``enqueue`` waits for the engine, and for other processes
    that write the spool. ``errors`` is the policy of the loop: while it fails, tasks wait.

    Raises:
        UnusableFolder: the folder can't be made or written.
        UnusableStore: the spool is of a newer version.
        RegistryUnavailable: other processes kept it locked.
    """

    def __init__(
        self,
        folder: Path,
        queue: str,
        url: RegistryUrl,
        opening: QueueOpener,
        timeout_s: float,
        errors: ErrorPolicy,
    ) -> None:
        name = SpoolName.of(queue, engine_name(url))
        path = name.file_in(_made(folder))
        self._spool = Spool(path, name, timeout_s)
        self._timeout_s = timeout_s
        self._waiting = WaitingCallers(self._spool)
        self._forwarder = Forwarder(self._spool, _lock_file(path), opening, self._waiting, timeout_s, errors)

    def start(self, *, is_away: bool) -> None:
        """Begin to forward entries, also those that an earlier process has left."""
        if is_away:
            self._waiting.give_up()
        self._forwarder.start()

    def enqueue(self, tasks: Sequence[Enqueue]) -> list[EnqueueAnswer | Duplicate | RebalanserError]:
        """Spool tasks, all or none, and wait for the engine as long as it answers; return each outcome.

        Raises:
            UnusableFolder: they can't be written; none was enqueued.
            RegistryUnavailable: other processes kept the spool locked; none was enqueued.
            OutcomeUnknown: the disk failed while they were synced.
            InvalidState: the queue is closed; none was enqueued.
        """
        if self._forwarder.has_ended:
            raise InvalidState("the queue is closed")
        futures = self._waiting.enter(self._spool.add(tasks))
        self._forwarder.wake()
        deadline = time.monotonic() + self._timeout_s
        return [_outcome(future, deadline - time.monotonic()) for future in futures]

    def close(self) -> None:
        """Stop forwarding; entries stay in the spool. Closing twice does nothing."""
        self._forwarder.stop()
        self._waiting.give_up()
        self._spool.close()


class WaitingCallers:
    """Callers that wait for entries of the spool to be forwarded."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._lock = threading.Lock()
        self._futures: dict[int, Future[EnqueueAnswer | Duplicate]] = {}
        self._is_away = False

    def enter(self, numbers: Sequence[int]) -> list[Future[EnqueueAnswer | Duplicate]]:
        """Wait for these entries, unless the engine is known to be away."""
        futures: list[Future[EnqueueAnswer | Duplicate]] = [Future() for _ in numbers]
        with self._lock:
            self._futures.update(zip(numbers, futures, strict=True))
            if self._is_away:
                self._answer_spooled()
        return futures

    def report(self, number: int, error: RebalanserError | Duplicate | None) -> bool:
        """Report that an entry was forwarded (None), or why it was not; True if a caller waited for it."""
        with self._lock:
            future = self._futures.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return False
        if error is None:
            future.set_result(EnqueueAnswer.COMMITTED)
        elif isinstance(error, Duplicate):
            future.set_result(error)
        else:
            future.set_exception(error)
        return True

    def look(self) -> None:
        """Answer callers whose entries another process has forwarded or has seen refused."""
        with self._lock:
            numbers = sorted(self._futures)
        if not numbers:
            return
        left = self._spool.left(numbers[0], numbers[-1])
        for number in numbers:
            if number not in left:
                refusal = self._spool.refusal(number)
                error = None if refusal is None else _error_of(refusal)
                if self.report(number, error) and error is not None:
                    self._spool.forget(number)

    def give_up(self) -> None:
        """Answer all callers, also those to come, that their tasks are spooled: the engine is away."""
        with self._lock:
            self._is_away = True
            self._answer_spooled()

    def is_back(self) -> bool:
        """Note that the engine answers; True if it was away."""
        with self._lock:
            was_away, self._is_away = self._is_away, False
        return was_away

    def _answer_spooled(self) -> None:
        for future in self._futures.values():
            if future.set_running_or_notify_cancel():
                future.set_result(EnqueueAnswer.SPOOLED)
        self._futures.clear()


class Forwarder:
    """Forwards a spool whenever it has entries and the engine answers.

    Its errors follow the one policy (``tasks.loops``), except that none ends the process: it
    is a producer's, and its entries are safe on disk.
    """

    def __init__(
        self,
        spool: Spool,
        lock_file: Path,
        opening: QueueOpener,
        waiting: WaitingCallers,
        timeout_s: float,
        errors: ErrorPolicy,
    ) -> None:
        self._spool = spool
        self._lock_file = lock_file
        self._opening = opening
        self._waiting = waiting
        self._timeout_s = timeout_s
        self._errors = errors
        self._woken = threading.Event()
        self._ending = threading.Event()
        self._woken.set()  # the first look comes at once
        self._loop = Loop("outbox", self._step, errors, ends_process=False)

    @property
    def has_ended(self) -> bool:
        """True once it was stopped."""
        return self._ending.is_set()

    def start(self) -> None:
        """Start the loop."""
        self._loop.start()

    def wake(self) -> None:
        """Look at the spool now."""
        self._woken.set()

    def stop(self) -> None:
        """End once the current request to the engine is answered. Stopping twice does nothing."""
        self._ending.set()
        self._woken.set()
        self._loop.end_soon()
        self._loop.join()

    def _step(self) -> bool:
        self._woken.wait(LOOK_S)
        self._woken.clear()
        # Read after clearing: stop() sets both in the other order.
        if self.has_ended:
            return False
        try:
            self._forward_all()
        except BaseException:
            self._woken.set()  # else entries would wait for the next look
            self._waiting.give_up()
            if self.has_ended:
                return False
            raise
        return True

    def _forward_all(self) -> None:
        """Forward until nothing is left."""
        opened = self._opening.opened()
        if self._spool.first(1):
            with self._alone():
                forwarding = Forwarding(self._spool, opened, self._waiting.report)
                while not self.has_ended and forwarding.forward():
                    self._engine_is_back()
        self._engine_is_back()
        self._waiting.look()

    def _engine_is_back(self) -> None:
        self._errors.worked("outbox")
        if self._waiting.is_back():
            waiting, refused = self._spool.counts()
            _log.info(
                "the outbox is forwarded",
                action="outbox_forwards",
                outbox=str(self._spool.path),
                left=waiting,
                refused=refused,
            )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of the one forwarder of the host, which forwards the entries of all its processes.

        Raises:
            RegistryUnavailable: another process held the lock for too long.
            UnusableFolder: the lock's file can't be opened.
        """
        try:
            descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnusableFolder(f"{self._lock_file} can't be opened: {error.strerror}") from error
        try:
            if not self._patiently(lambda: self._locked(descriptor)):
                raise RegistryUnavailable(f"another process kept {self._lock_file} locked")
            yield
        finally:
            # By name: a child that was forked meanwhile has the file open too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _locked(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._waiting.look()
            return False
        return True

    def _patiently(self, attempt: Callable[[], bool]) -> bool:
        return Retrying(
            retry=retry_if_not_result(bool),
            wait=wait_random_exponential(multiplier=0.002, max=0.05),
            sleep=sleep_using_event(self._ending),
            stop=stop_after_delay(self._timeout_s) | stop_when_event_set(self._ending),
            retry_error_callback=lambda _state: False,
        )(attempt)


def _error_of(refusal: SpoolRefusal) -> RebalanserError | Duplicate:
    """Return the error, or the duplicate, that another process noted of an entry."""
    if refusal.kind == DUPLICATE:
        return Duplicate(refusal.reason)
    return _ERRORS.get(refusal.kind, UnknownTask)(refusal.reason)


def _outcome(
    future: Future[EnqueueAnswer | Duplicate], left_s: float
) -> EnqueueAnswer | Duplicate | RebalanserError:
    """Wait for a future in the time that is left; a task without an outcome by then is spooled."""
    wait([future], max(0.0, left_s))
    if future.cancel():
        return EnqueueAnswer.SPOOLED
    error = future.exception()
    return error if isinstance(error, RebalanserError) else future.result()


def _made(folder: Path) -> Path:
    try:
        make_folder(folder)
    except OSError as error:
        raise UnusableFolder(f"the outbox {folder} can't be made: {error.strerror}") from error
    return folder


def _lock_file(path: Path) -> Path:
    return path.with_suffix(".lock")
