"""Writes what many threads ask for, in few transactions, and sees each of it through to a known outcome.

One thread takes all that waits, lets the engine apply it in one call, and reads back what was lost or did not
hold. While it does so the next batch gathers, so that batches grow with the load by themselves. That thread
is the ledger's own, or a caller that waits for the outcome and finds nothing else to be written. An engine
for which requests travel takes several batches at the same time.

What is written together, and how it is settled, is decided by :mod:`~rebalanser.tasks.batches`. While the
engine is away, or takes nothing, callers hear of it within ``timeout_s``; what is lasting is kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

from rebalanser.errors import Forked, InternalError, InvalidState
from rebalanser.tasks.asks import Ask
from rebalanser.tasks.batches import Batches, Settlement, fail_all
from rebalanser.tasks.engine import Engine
from rebalanser.tasks.loops import ErrorKind, ErrorPolicy, Loop, kind_of
from rebalanser.tasks.script import Apply, Pause, ReadTasks, Request, run_script

NAME: Final = "ledger"
"""Name of all its loops: what one of them could not write may be written by another."""

ResultT = TypeVar("ResultT")


class Ledger:
    """The one writer of a process to an engine's queue. May be called from any thread.

    ``timeout_s`` is how long one request to the engine may take, and how long it is tried again while the
    engine is away. What is lasting is tried again for any time, as ``errors`` say. At most ``max_in_flight``
    batches are written at the same time; never two that are about one task.
    """

    def __init__(
        self, engine: Engine, queue: str, timeout_s: float, errors: ErrorPolicy, max_in_flight: int = 1
    ) -> None:
        self._engine = engine
        self._queue = queue
        self._timeout_s = timeout_s
        self._errors = errors
        self._more = threading.Condition()
        self._batches = Batches(max_in_flight)
        self._is_inherited = False
        self._loops = [Loop(NAME, self._step, errors) for _ in range(max_in_flight)]
        for loop in self._loops:
            loop.start()

    def submit(self, ask: Ask[ResultT]) -> Future[ResultT]:
        """Have it written; asks about one task are written in the order in which they came.

        The future raises :class:`~rebalanser.errors.OutcomeUnknown` or
        :class:`~rebalanser.errors.RegistryUnavailable` if the engine stayed away for too long.

        Raises:
            InvalidState: the ledger is closed.
            Forked: it is the parent's, whose thread writes.
        """
        self.submit_all([ask])
        return ask.future

    def submit_all(self, asks: Sequence[Ask[ResultT]]) -> None:
        """Have all of these written, if it can be in one batch; raises what :meth:`submit` does."""
        with self._more:
            self._add(asks)
            self._more.notify()

    def write_all(self, asks: Sequence[Ask[ResultT]]) -> None:
        """Do what :meth:`submit_all` does, for a caller that waits for the outcomes.

        If nothing else waits, the first batch is written by the calling thread: handing it over to another
        thread takes longer than SQLite takes to commit it.
        """
        batch: list[Ask[object]] = []
        try:
            with self._more:
                is_idle = not self._batches.has_waiting
                self._add(asks)
                if is_idle:
                    self._take(batch)
                if self._batches.has_waiting:
                    self._more.notify()
            if batch:
                self._write_here(batch)
        finally:  # also where the caller was interrupted: what is in flight for ever stops all others
            self._land(batch)

    def flush(self) -> None:
        """Wait until all that was submitted so far is settled, or the engine stays away.

        What its futures call has returned then, and what these have submitted is settled too. Nothing is kept
        meanwhile: what is lasting fails, as all else does.
        """
        with self._more:
            self._batches.flushes += 1
            try:
                for _ in range(2):  # the second time for what follows from the first
                    asked = set(self._batches.unsettled())
                    self._more.wait_for(partial(self._is_settled, asked))
            finally:  # also where the caller was interrupted: else nothing lasting would be kept any more
                self._batches.flushes -= 1

    def _is_settled(self, asked: set[Ask[object]]) -> bool:
        return asked.isdisjoint(self._batches.unsettled())

    def forked(self) -> None:
        """Refuse all writes, in a forked child: no thread is here to write them."""
        self._more = threading.Condition()
        self._batches.forget_flights()
        self._is_inherited = True

    def close(self) -> None:
        """See through what was submitted, then end. Closing twice does nothing."""
        with self._more:
            self._batches.is_closing = True
            self._more.notify_all()
        for loop in self._loops:
            loop.hurry()
        for loop in self._loops:
            loop.join()
        with self._more:
            self._more.wait_for(lambda: not self._batches.are_in_flight)

    def _add(self, asks: Sequence[Ask[ResultT]]) -> None:
        """Append asks to those that wait. The lock is held."""
        if self._batches.is_closing:
            raise InvalidState(f"the queue {self._queue!r} is closed")
        if self._is_inherited:
            raise Forked(f"the writes of queue {self._queue!r} are the parent's of this process")
        self._batches.add(asks)

    def _write_here(self, batch: list[Ask[object]]) -> None:
        """Write a batch in the calling thread; what goes wrong counts as an error of the loop."""
        try:
            self._carry_out(batch)
        except Exception as error:
            self._loops[0].failed(error)
        else:
            self._errors.worked(NAME)

    def _step(self) -> bool:
        batch: list[Ask[object]] = []
        with self._more:
            while not self._take(batch):
                if self._batches.is_closing and not self._batches.has_waiting:
                    return False
                self._more.wait()
        try:
            self._carry_out(batch)
        finally:
            self._land(batch)
        return True

    def _carry_out(self, batch: Sequence[Ask[object]]) -> None:
        try:
            run_script(Settlement(batch, self._timeout_s, time.monotonic).script(), self._perform)
        except BaseException as error:  # whoever waits must be told, whatever it is
            with self._more:
                kept = self._batches.keep(batch, error)
            fail_all((ask for ask in batch if ask not in kept), error)
            if kept or kind_of(error) is ErrorKind.BUG:
                raise

    def _take(self, batch: list[Ask[object]]) -> bool:
        """Fill the next batch; False if there is nothing for it. The lock is held."""
        has_taken = self._batches.take(batch)
        if has_taken and self._batches.has_waiting:
            self._more.notify()
        return has_taken

    def _land(self, batch: list[Ask[object]]) -> None:
        """Let others write about the tasks of a batch; does nothing if it is in flight no more."""
        with self._more:
            self._batches.land(batch)
            if self._batches.is_closing or self._batches.flushes:
                self._more.notify_all()
            elif self._batches.has_waiting:
                self._more.notify()

    def _perform(self, request: Request) -> object:
        """Make one request of a batch's script."""
        match request:
            case Apply(writes=writes):
                return self._engine.apply(writes, self._timeout_s)
            case ReadTasks(ids=ids):
                return self._engine.read(self._queue, ids, self._timeout_s)
            case Pause(seconds=seconds):
                self._loops[0].pause(seconds)
                return None
            case _:
                raise InternalError(f"a batch makes no request {request!r}")
