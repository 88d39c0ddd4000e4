"""Writes what many threads ask for, in few transactions, and sees each of it through to a known outcome.

One thread takes all that waits, lets the engine apply it in one call, and reads back what was lost or did not
hold. While it does so the next batch gathers, so that batches grow with the load by themselves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Final, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from rebalanser.errors import InvalidState, OutcomeUnknown, RegistryUnavailable
from rebalanser.tasks.asks import Ask
from rebalanser.tasks.engine import Answer, Engine, Write

MAX_BATCH: Final = 512
_MAX_ROUNDS: Final = 50
"""How often a batch is read back and written again before its asks are told to come back later."""

ResultT = TypeVar("ResultT")


class Ledger:
    """The one writer of a process to an engine's queue. May be called from any thread.

    ``timeout_s`` is how long one request to the engine may take, and how long it is tried again while the
    engine is away.
    """

    def __init__(self, engine: Engine, queue: str, timeout_s: float) -> None:
        self._engine = engine
        self._queue = queue
        self._timeout_s = timeout_s
        self._more = threading.Condition()
        self._waiting: deque[Ask[object]] = deque()
        self._written: Sequence[Ask[object]] = ()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rebalanser-tasks-ledger", daemon=True)
        self._thread.start()

    def submit(self, ask: Ask[ResultT]) -> Future[ResultT]:
        """Have it written; asks about one task are written in the order in which they came.

        The future raises :class:`~rebalanser.errors.OutcomeUnknown` or
        :class:`~rebalanser.errors.RegistryUnavailable` if the engine stayed away for too long.

        Raises:
            InvalidState: the ledger is closed.
        """
        self.submit_all([ask])
        return ask.future

    def submit_all(self, asks: Sequence[Ask[ResultT]]) -> None:
        """Have all of these written, if it can be in one batch; raises what :meth:`submit` does."""
        with self._more:
            if self._closing:
                raise InvalidState(f"the queue {self._queue!r} is closed")
            self._waiting.extend(asks)  # type: ignore[arg-type] # the result is the asker's business
            self._more.notify()

    def flush(self) -> None:
        """Wait until the outcome of all that was submitted so far is known."""
        with self._more:
            asked = [ask.future for ask in (*self._written, *self._waiting)]
        wait(asked)

    def close(self) -> None:
        """See through what was submitted, then end. Closing twice does nothing."""
        with self._more:
            self._closing = True
            self._more.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._taken():
            try:
                self._see_through(batch)
            except Exception as error:  # whoever waits must be told, whatever it is
                _fail(batch, error)

    def _taken(self) -> Sequence[Ask[object]]:
        """The next batch: at most one ask for each task, the rest keeping their places. Empty at the end."""
        with self._more:
            self._written = ()
            self._more.wait_for(lambda: self._waiting or self._closing)
            batch: dict[str, Ask[object]] = {}
            kept: deque[Ask[object]] = deque()
            while self._waiting and len(batch) < MAX_BATCH:
                ask = self._waiting.popleft()
                if ask.task in batch:
                    kept.append(ask)
                else:
                    batch[ask.task] = ask
            self._waiting.extendleft(reversed(kept))
            self._written = list(batch.values())
            return self._written

    def _see_through(self, asks: Sequence[Ask[object]]) -> None:
        for _ in range(_MAX_ROUNDS):
            writes = [(ask, write) for ask in asks if (write := ask.write()) is not None]
            if not writes:
                return
            lost = self._write(writes)
            asks = [ask for ask, _ in writes if not ask.settled]
            if asks:
                self._read_back(asks, lost)
                asks = [ask for ask in asks if not ask.settled]
        _fail(asks, RegistryUnavailable("others changed the task again and again; try again"))

    def _write(self, writes: Sequence[tuple[Ask[object], Write]]) -> OutcomeUnknown | None:
        """Write once; the error if nobody knows what became of it."""
        try:
            answers: Sequence[Answer] = self._patiently(
                lambda: self._engine.apply([write for _, write in writes], self._timeout_s)
            )
        except OutcomeUnknown as error:
            return error
        for (ask, _), answer in zip(writes, answers, strict=True):
            ask.answered(answer)
        return None

    def _read_back(self, asks: Sequence[Ask[object]], lost: OutcomeUnknown | None) -> None:
        try:
            found = self._patiently(
                lambda: self._engine.read(self._queue, [ask.task for ask in asks], self._timeout_s)
            )
        except RegistryUnavailable as error:
            # What may have happened must not be told as what did not.
            raise lost or error from error
        for ask in asks:
            ask.found(found.get(ask.task))

    def _patiently(self, request: Callable[[], ResultT]) -> ResultT:
        return Retrying(
            retry=retry_if_exception_type(RegistryUnavailable),
            wait=wait_random_exponential(multiplier=0.01, max=0.5),
            stop=stop_after_delay(self._timeout_s),
            reraise=True,
        )(request)


def _fail(asks: Sequence[Ask[object]], error: Exception) -> None:
    for ask in asks:
        if not ask.settled:
            ask.future.set_exception(error)
