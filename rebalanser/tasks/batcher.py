"""Writes of many threads in few transactions, each retried until its outcome is known.

One thread takes all pending writes, applies them in one call of the engine, and reads back those whose answer
was lost or whose condition failed. Meanwhile the next batch gathers, so batches grow with the load. That
thread is the batcher's own, or a caller that waits for the outcome while nothing else waits. A remote engine
takes several batches at the same time. A task that is enqueued while nothing else is written goes to the
engine at once.

``core.tasks.writes`` selects the pending writes of a batch and settles them. While the
engine is away, or takes nothing, callers get an error within ``timeout_s``; lasting writes are kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from rebalanser.core.tasks.failures import ErrorKind, kind_of
from rebalanser.core.tasks.store import Answer, Enqueue
from rebalanser.core.tasks.writes import (
    Apply,
    Batches,
    FirstError,
    PendingEnqueue,
    PendingWrite,
    ReadTasks,
    Request,
    Settlement,
    Sleep,
    WriteFuture,
    fail_all,
    run_script,
)
from rebalanser.errors import Forked, InternalError, InvalidState
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks.engine import Engine
from rebalanser.tasks.loops import ErrorPolicy, Loop

LOOP_NAME: Final = "writer"
"""Name of all loops of a batcher, which share their failures: each may write for another."""

ResultT = TypeVar("ResultT")
_log = get_logger()


class WriteBatcher:
    """The only writer of a process to an engine's queue. May be called from any thread.

    ``timeout_s`` limits one request to the engine, and its retries while the engine is away. Lasting writes
    are retried without limit, as ``errors`` say. At most ``max_in_flight`` batches are written at the same
    time, and never two with one task.
    """

    def __init__(
        self, engine: Engine, queue: str, timeout_s: float, errors: ErrorPolicy, max_in_flight: int = 1
    ) -> None:
        self._engine = engine
        self._queue = queue
        self._timeout_s = timeout_s
        self._errors = errors
        self._lock = threading.RLock()
        self._more = threading.Condition(self._lock)
        self._batches = Batches(max_in_flight)
        self._is_inherited = False
        self._loops = [Loop(LOOP_NAME, self._step, errors) for _ in range(max_in_flight)]
        for loop in self._loops:
            loop.start()

    def submit(self, pending: PendingWrite[ResultT]) -> WriteFuture[ResultT]:
        """Submit a pending write; those of one task are written in the order of their submission.

        Its future raises ``OutcomeUnknown`` or
        ``RegistryUnavailable`` if the engine stayed away for too long.

        Raises:
            InvalidState: the batcher is closed.
            Forked: the batcher belongs to the parent process.
        """
        self.submit_all([pending])
        return pending.future

    def submit_all(self, pending_writes: Sequence[PendingWrite[ResultT]]) -> None:
        """Submit pending writes, to be written in one batch if possible; raises what ``submit`` does."""
        with self._lock:
            self._add(pending_writes)
            if self._batches.can_take:
                self._more.notify()

    def write_all(self, pending_writes: Sequence[PendingWrite[ResultT]]) -> None:
        """Submit pending writes for a caller that waits for their outcomes; raises what ``submit`` does.

        If nothing else waits, the first batch is written by the calling thread: handing it over to another
        thread takes longer than SQLite takes to commit it.
        """
        batch: list[PendingWrite[object]] = []
        try:
            with self._lock:
                is_idle = not self._batches.has_waiting
                self._add(pending_writes)
                if is_idle:
                    self._take(batch)
                if self._batches.can_take:
                    self._more.notify()
            if batch:
                self._write_here(batch)
        finally:  # also if the caller was interrupted: a batch in flight for ever blocks all others
            try:
                self._land(batch)
            except BaseException:
                self._land(batch)
                raise

    def enqueue(self, write: Enqueue) -> Answer:
        """Write an enqueue for a caller that waits; return the answer, or raise what its future would.

        If nothing else waits or is being written, the engine gets it from the calling thread at once: the
        script of a batch takes longer than SQLite takes to write one task. The script goes on after an error.

        Raises:
            InvalidState: the batcher is closed.
            Forked: the batcher belongs to the parent process.
        """
        pending = PendingEnqueue(write)
        batch: list[PendingWrite[object]] = []
        try:
            with self._lock:
                self._refuse_ended()
                is_alone = self._batches.take_alone(pending, batch)
            if not is_alone:
                self.write_all([pending])
                return result_of(pending)
            began_at = time.monotonic()
            try:
                (answer,) = self._engine.apply([write], self._timeout_s)
            except Exception as error:
                failed = FirstError(error, began_at)
            else:
                self._errors.worked(LOOP_NAME)
                return answer
            self._write_here(batch, failed)
            return result_of(pending)
        finally:  # as in write_all
            try:
                self._land(batch)
            except BaseException:
                self._land(batch)
                raise

    def flush(self) -> None:
        """Wait until all pending writes that were submitted so far are settled, or the engine stays away.

        The callbacks of their futures have returned then, and the pending writes that these submitted are
        settled too. Nothing is kept meanwhile: lasting writes fail as others do.
        """
        with self._lock:
            self._batches.flushes += 1
            try:
                for _ in range(2):  # the second time for writes that callbacks of the first have submitted
                    pending_writes = set(self._batches.unsettled())
                    self._more.wait_for(partial(self._are_settled, pending_writes))
            finally:  # also if the caller was interrupted: else no lasting write would be kept any more
                self._batches.flushes -= 1

    def _are_settled(self, pending_writes: set[PendingWrite[object]]) -> bool:
        return pending_writes.isdisjoint(self._batches.unsettled())

    def forked(self) -> None:
        """Refuse all writes, in a forked child, which has no thread for them."""
        self._lock = threading.RLock()
        self._more = threading.Condition(self._lock)
        self._batches.forget_flights()
        self._is_inherited = True

    def close(self) -> None:
        """Settle all submitted pending writes, then end. Closing twice does nothing."""
        with self._lock:
            self._batches.is_closing = True
            self._more.notify_all()
        for loop in self._loops:
            loop.end_soon()
        for loop in self._loops:
            loop.join()
        with self._lock:
            self._more.wait_for(lambda: not self._batches.are_in_flight)

    def _add(self, pending_writes: Sequence[PendingWrite[ResultT]]) -> None:
        """Append pending writes to those that wait. The caller holds the lock."""
        self._refuse_ended()
        self._batches.add(pending_writes)

    def _refuse_ended(self) -> None:
        if self._batches.is_closing:
            raise InvalidState(f"the queue {self._queue!r} is closed")
        if self._is_inherited:
            raise Forked(f"the writes of queue {self._queue!r} are the parent's of this process")

    def _write_here(self, batch: list[PendingWrite[object]], failed: FirstError | None = None) -> None:
        """Write a batch in the calling thread; its errors count as those of the loop."""
        try:
            self._carry_out(batch, failed)
        except Exception as error:
            self._loops[0].failed(error)
        else:
            self._errors.worked(LOOP_NAME)

    def _step(self) -> bool:
        batch: list[PendingWrite[object]] = []
        with self._lock:
            while not self._take(batch):
                if self._batches.is_closing and not self._batches.has_waiting:
                    return False
                self._more.wait()
        try:
            self._carry_out(batch)
        finally:
            self._land(batch)
        return True

    def _carry_out(self, batch: Sequence[PendingWrite[object]], failed: FirstError | None = None) -> None:
        settlement = Settlement(batch, self._timeout_s, time.monotonic)
        try:
            run_script(settlement.script(failed), self._perform)
        except BaseException as error:  # callers wait for these futures, whatever the error is
            with self._lock:
                kept = self._batches.keep(batch, error)
            fail_all((pending for pending in batch if pending not in kept), error)
            if kept or kind_of(error) is ErrorKind.BUG:
                raise

    def _take(self, batch: list[PendingWrite[object]]) -> bool:
        """Fill the next batch; False if there is nothing for it. The caller holds the lock."""
        has_taken = self._batches.take(batch)
        if has_taken and self._batches.can_take:
            self._more.notify()
        return has_taken

    def _land(self, batch: list[PendingWrite[object]]) -> None:
        """Allow further writes of the tasks of a batch. May be called again if it was interrupted."""
        with self._lock:
            self._batches.land(batch)
            if self._batches.is_closing or self._batches.flushes:
                self._more.notify_all()
            elif self._batches.can_take:
                self._more.notify()

    def _perform(self, request: Request) -> object:
        """Make one request of a batch's script."""
        match request:
            case Apply(writes=writes):
                return self._engine.apply(writes, self._timeout_s)
            case ReadTasks(ids=ids):
                return self._engine.read(self._queue, ids, self._timeout_s)
            case Sleep(seconds=seconds):
                self._loops[0].pause(seconds)
                return None
            case _:
                raise InternalError(f"a batch makes no request {request!r}")


def result_of(pending: PendingWrite[ResultT], timeout_s: float | None = None) -> ResultT:
    """Wait until a pending write is settled, and return its result, or raise its error.

    Raises:
        TimeoutError: it was not settled in time.
    """
    _await(pending, timeout_s)
    return pending.future.result()


def await_all(pending_writes: Sequence[PendingWrite[Any]]) -> None:
    """Wait until all pending writes are settled, also those that fail."""
    for pending in reversed(pending_writes):  # once the last of a batch is settled, so are the others
        _await(pending, None)


def _await(pending: PendingWrite[Any], timeout_s: float | None) -> None:
    if pending.settled:
        return
    settled = threading.Lock()
    settled.acquire()
    pending.future.add_done_callback(lambda _: settled.release())
    if not settled.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
        raise TimeoutError(f"a write was not settled within {timeout_s:g} s")


def on_settled(future: WriteFuture[ResultT], callback: Callable[[WriteFuture[ResultT]], object]) -> None:
    """Call ``callback`` once a write is settled, now if it is. Its errors are logged: other writes go on."""
    future.add_done_callback(partial(_call, callback))


def _call(callback: Callable[[WriteFuture[ResultT]], object], future: WriteFuture[ResultT]) -> None:
    try:
        callback(future)
    except Exception as error:
        _log.error("a callback of a write raised", action="write_callback_failed", exc_info=error)
