"""Writes what many threads ask for, in few transactions, and sees each of it through to a known outcome.

One thread takes all that waits, lets the engine apply it in one call, and reads back what was lost or did not
hold. While it does so the next batch gathers, so that batches grow with the load by themselves. That thread
is the ledger's own, or a caller that waits for the outcome and finds nothing else to be written. An engine
for which requests travel takes several batches at the same time.

Nothing that is wrong with one ask concerns another: a batch that the engine refuses is written in halves,
down to the ask that it can't take, which alone fails. While the engine is away, or takes nothing, callers
hear of it within ``timeout_s``; what is lasting, such as the end of a claim, is kept until it can be written.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Final, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from rebalanser.errors import Forked, InvalidState, OutcomeUnknown, RegistryUnavailable
from rebalanser.runtime.workers import GrowingDelay
from rebalanser.tasks.asks import Ask
from rebalanser.tasks.engine import Answer, Engine, Write
from rebalanser.tasks.loops import ErrorKind, ErrorPolicy, Loop, kind_of

NAME: Final = "ledger"
"""Name of all its loops: what one of them could not write may be written by another."""
MAX_BATCH: Final = 512
_MAX_ROUNDS: Final = 50
"""How often a batch is read back and written again before its asks are told to come back later."""

_QUICK_LOSSES: Final = 3
"""How often an answer may be lost before the time counts: a connection that broke is there again at once."""
_SHORTEST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.5

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
        self._waiting: deque[Ask[object]] = deque()
        self._in_flight: list[list[Ask[object]]] = []
        self._max_in_flight = max_in_flight
        self._busy: set[str] = set()
        """Tasks of the batches in flight."""
        self._closing = False
        self._is_inherited = False
        self._flushing = 0
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
                is_idle = not self._waiting
                self._add(asks)
                if is_idle:
                    self._take(batch)
                if self._waiting:
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
            self._flushing += 1
            try:
                for _ in range(2):  # the second time for what follows from the first
                    asked = set(self._unsettled())
                    self._more.wait_for(partial(self._is_settled, asked))
            finally:  # also where the caller was interrupted: else nothing lasting would be kept any more
                self._flushing -= 1

    def _is_settled(self, asked: set[Ask[object]]) -> bool:
        return asked.isdisjoint(self._unsettled())

    def _unsettled(self) -> Iterator[Ask[object]]:
        """What waits or is being written. The lock is held."""
        return chain(*self._in_flight, self._waiting)

    def forked(self) -> None:
        """Refuse all writes, in a forked child: no thread is here to write them."""
        self._more = threading.Condition()
        self._in_flight = []
        self._is_inherited = True

    def close(self) -> None:
        """See through what was submitted, then end. Closing twice does nothing."""
        with self._more:
            self._closing = True
            self._more.notify_all()
        for loop in self._loops:
            loop.hurry()
        for loop in self._loops:
            loop.join()
        with self._more:
            self._more.wait_for(lambda: not self._in_flight)

    def _add(self, asks: Sequence[Ask[ResultT]]) -> None:
        """Append asks to those that wait. The lock is held."""
        if self._closing:
            raise InvalidState(f"the queue {self._queue!r} is closed")
        if self._is_inherited:
            raise Forked(f"the writes of queue {self._queue!r} are the parent's of this process")
        self._waiting.extend(asks)  # type: ignore[arg-type] # the result is the asker's business

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
                if self._closing and not self._waiting:
                    return False
                self._more.wait()
        try:
            self._carry_out(batch)
        finally:
            self._land(batch)
        return True

    def _carry_out(self, batch: Sequence[Ask[object]]) -> None:
        try:
            self._see_through(batch)
        except BaseException as error:  # whoever waits must be told, whatever it is
            kept = self._kept(batch, error)
            _fail((ask for ask in batch if ask not in kept), error)
            if kept or kind_of(error) is ErrorKind.BUG:
                raise

    def _take(self, batch: list[Ask[object]]) -> bool:
        """Fill the next batch, if one may be written now; False if there is nothing for it. The lock is held.

        A batch has at most one ask for each task, and none about a task that is in flight or that comes after
        such a one. The others keep their places.
        """
        if not self._waiting or len(self._in_flight) >= self._max_in_flight:
            return False
        self._in_flight.append(batch)
        taken: set[str] = set()
        kept: deque[Ask[object]] = deque()
        blocked = self._busy.copy()
        while self._waiting and len(batch) < MAX_BATCH:
            ask = self._waiting.popleft()
            if ask.task in taken or ask.task in blocked or (blocked and not blocked.isdisjoint(ask.after)):
                kept.append(ask)
                blocked.add(ask.task)
            else:
                batch.append(ask)
                taken.add(ask.task)
        self._waiting.extendleft(reversed(kept))
        self._busy |= taken
        if not batch:
            self._in_flight.pop()
        elif self._waiting:
            self._more.notify()
        return bool(batch)

    def _land(self, batch: list[Ask[object]]) -> None:
        """Let others write about the tasks of a batch; does nothing if it is in flight no more."""
        with self._more:
            self._in_flight = [each for each in self._in_flight if each is not batch]
            self._busy.difference_update(ask.task for ask in batch)
            if self._closing or self._flushing:
                self._more.notify_all()
            elif self._waiting:
                self._more.notify()

    def _kept(self, batch: Sequence[Ask[object]], error: BaseException) -> list[Ask[object]]:
        """Put back, in their places, the lasting asks of a batch that could not be written at all."""
        with self._more:
            if self._closing or self._flushing or kind_of(error) is ErrorKind.POISON:
                return []
            kept = [ask for ask in batch if ask.lasting and not ask.settled]
            self._waiting.extendleft(reversed(kept))
            return kept

    def _see_through(self, asks: Sequence[Ask[object]]) -> None:
        """Write, and read back what is not settled by that, until all is.

        Raises:
            OutcomeUnknown: an answer was lost, and so were those of the next writes until the time was up.
            RegistryUnavailable: the engine stayed away, or others were quicker each time; no effect.
        """
        gives_up_at = time.monotonic() + self._timeout_s
        delay = GrowingDelay(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S)
        losses = 0
        lost: OutcomeUnknown | None = None
        for _ in range(_MAX_ROUNDS):
            writes: list[tuple[Ask[object], Write]] = []
            for ask in asks:
                write = _of_one(ask, ask.write, lost)
                if write is not None:
                    writes.append((ask, write))
            if not writes:
                return
            newly_lost = self._write(writes)
            lost = newly_lost or lost
            asks = [ask for ask, _ in writes if not ask.settled]
            if asks:
                self._read_back(asks, lost)
                asks = [ask for ask in asks if not ask.settled]
            if asks and newly_lost is not None:
                losses += 1
                if losses > _QUICK_LOSSES and time.monotonic() >= gives_up_at:
                    break
                self._loops[0].pause(delay.after(0.0))
        if asks:
            # What may have happened, now or later, must not be told as what did not.
            raise lost or RegistryUnavailable("others changed the task again and again; try again")

    def _write(self, writes: Sequence[tuple[Ask[object], Write]]) -> OutcomeUnknown | None:
        """Write once; the error if nobody knows what became of it."""
        try:
            answers: Sequence[Answer] = self._patiently(
                lambda: self._engine.apply([write for _, write in writes], self._timeout_s)
            )
        except OutcomeUnknown as error:
            return error
        except Exception as error:
            if kind_of(error) is ErrorKind.OUTAGE:
                raise
            return self._write_apart(writes, error)
        for (ask, _), answer in zip(writes, answers, strict=True):
            _of_one(ask, partial(ask.answered, answer))
        return None

    def _write_apart(
        self, writes: Sequence[tuple[Ask[object], Write]], error: Exception
    ) -> OutcomeUnknown | None:
        """Write in halves what the engine refused as a whole, as one of them it can't take."""
        if len(writes) == 1:
            _fail([ask for ask, _ in writes], error)
            return None
        middle = len(writes) // 2
        lost = [self._write(half) for half in (writes[:middle], writes[middle:])]
        return lost[0] or lost[1]

    def _read_back(self, asks: Sequence[Ask[object]], lost: OutcomeUnknown | None) -> None:
        try:
            found = self._patiently(
                lambda: self._engine.read(self._queue, [ask.task for ask in asks], self._timeout_s)
            )
        except RegistryUnavailable as error:
            raise lost or error from error
        for ask in asks:
            _of_one(ask, partial(ask.found, found.get(ask.task)))

    def _patiently(self, request: Callable[[], ResultT]) -> ResultT:
        """Make a request, again and again while the engine is away."""
        gives_up_at = time.monotonic() + self._timeout_s
        try:
            return request()
        except RegistryUnavailable:
            left_s = gives_up_at - time.monotonic()
            if left_s <= 0:
                raise
        return Retrying(
            retry=retry_if_exception_type(RegistryUnavailable),
            wait=wait_random_exponential(multiplier=0.01, max=0.5),
            stop=stop_after_delay(left_s),
            reraise=True,
        )(request)


def _of_one(
    ask: Ask[object], part: Callable[[], ResultT], lost: OutcomeUnknown | None = None
) -> ResultT | None:
    """Do an ask's own part; whatever that raises is its own failure, and no other's.

    An ask whose rule could not read the store is still one whose earlier write may have been ``lost``.
    """
    try:
        return part()
    except Exception as error:
        told = lost if kind_of(error) is ErrorKind.OUTAGE else None
        _fail([ask], told or error)
        return None


def _fail(asks: Iterable[Ask[object]], error: BaseException) -> None:
    for ask in asks:
        if not ask.settled:
            with suppress(InvalidStateError):  # whoever waited has cancelled it meanwhile
                ask.future.set_exception(error)
