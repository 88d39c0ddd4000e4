"""Batches of writes: selects the asks to write together, and settles each of them. Pure.

An ask that the engine can't take fails alone: a refused batch is split in halves until that ask is found. A
write whose answer was lost is read back, then repeated if it is not in the store. While the engine is away,
or takes nothing, an ask fails after ``timeout_s``. A *lasting* ask, such as the end of a claim, keeps its
place instead until it can be written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, TypeVar

from rebalanser.errors import OutcomeUnknown, RebalanserError, RegistryUnavailable
from rebalanser.runtime.workers import GrowingDelay
from rebalanser.tasks.engine import Answer, Write
from rebalanser.tasks.loops import ErrorKind, kind_of
from rebalanser.tasks.model import Stored, TaskId
from rebalanser.tasks.writes.pending import Ask
from rebalanser.tasks.writes.script import Apply, ReadTasks, Request, Script, Sleep

MAX_BATCH: Final = 512
MAX_ROUNDS: Final = 50
"""Maximum rounds of writing a batch and reading it back before its asks fail."""
QUICK_LOSSES: Final = 3
"""Maximum lost answers that are retried whatever the time: a broken connection is replaced at once."""
_SHORTEST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.5

ResultT = TypeVar("ResultT")


class Batches:
    """The asks of a process that wait or are being written. Not thread-safe.

    At most ``max_in_flight`` batches are written at the same time, and never two with one task.
    """

    def __init__(self, max_in_flight: int = 1) -> None:
        self.flushes = 0
        """Number of callers that wait until all is settled. Nothing is kept while there are any."""
        self.is_closing = False
        self._max_in_flight = max_in_flight
        self._waiting: deque[Ask[object]] = deque()
        self._in_flight: list[list[Ask[object]]] = []
        self._busy: set[str] = set()
        """Tasks of the batches in flight."""

    @property
    def has_waiting(self) -> bool:
        """True if asks wait."""
        return bool(self._waiting)

    @property
    def are_in_flight(self) -> bool:
        """True if a batch is being written."""
        return bool(self._in_flight)

    def unsettled(self) -> Iterator[Ask[object]]:
        """Iterate over the asks that wait or are being written."""
        return chain(*self._in_flight, self._waiting)

    def add(self, asks: Sequence[Ask[ResultT]]) -> None:
        """Append asks to those that wait."""
        self._waiting.extend(asks)  # type: ignore[arg-type] # results are not looked at here

    def take(self, batch: list[Ask[object]]) -> bool:
        """Fill the next batch, if one may be written now; False if there is nothing for it.

        A batch has at most one ask of each task. It has none of a task that is in flight, or that comes after
        one in flight. The other asks keep their places.
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
        return bool(batch)

    def land(self, batch: list[Ask[object]]) -> None:
        """Allow further writes of the tasks of a batch; no-op if it is not in flight."""
        self._in_flight = [each for each in self._in_flight if each is not batch]
        self._busy.difference_update(ask.task for ask in batch)

    def keep(self, batch: Sequence[Ask[object]], error: BaseException) -> list[Ask[object]]:
        """Put back, in their places, the lasting asks of a batch that ended with an error."""
        if self.is_closing or self.flushes or kind_of(error) is ErrorKind.POISON:
            return []
        kept = [ask for ask in batch if ask.lasting and not ask.settled]
        self._waiting.extendleft(reversed(kept))
        return kept

    def forget_flights(self) -> None:
        """Forget what is in flight: the parent of this process writes it."""
        self._in_flight = []


class Settlement:
    """Writes the asks of a batch until each is settled. ``now`` gives seconds of a monotonic clock.

    An engine that is away is asked again for ``timeout_s`` seconds.
    """

    def __init__(self, asks: Sequence[Ask[object]], timeout_s: float, now: Callable[[], float]) -> None:
        self._asks = asks
        self._timeout_s = timeout_s
        self._now = now

    def script(self) -> Script[None]:
        """Write all asks, and read back the unsettled ones, until all are settled.

        Raises:
            OutcomeUnknown: answers were lost until the time was up.
            RegistryUnavailable: the engine stayed away, or others changed the task each time; no effect.
        """
        asks = self._asks
        gives_up_at = self._now() + self._timeout_s
        delay = GrowingDelay(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S)
        losses = 0
        lost: OutcomeUnknown | None = None
        for _ in range(MAX_ROUNDS):
            writes = _writes_of(asks, lost)
            if not writes:
                return
            try:
                newly_lost = yield from self._write(writes)
            except RebalanserError as error:
                raise lost or error from error
            lost = newly_lost or lost
            asks = [ask for ask, _ in writes if not ask.settled]
            if asks:
                yield from self._read_back(asks, lost)
                asks = [ask for ask in asks if not ask.settled]
            if asks and newly_lost is not None:
                losses += 1
                if losses > QUICK_LOSSES and self._now() >= gives_up_at:
                    break
                yield Sleep(delay.after(0.0))
        if asks:
            # A write that may take effect must not be reported as one without effect.
            raise lost or RegistryUnavailable("others changed the task again and again; try again")

    def _write(self, writes: Sequence[tuple[Ask[object], Write]]) -> Script[OutcomeUnknown | None]:
        """Write once; the error if the outcome is unknown."""
        try:
            answers: Sequence[Answer] = yield from self._patiently(Apply([write for _, write in writes]))
        except OutcomeUnknown as error:
            return error
        except Exception as error:
            if kind_of(error) is ErrorKind.OUTAGE:
                raise
            return (yield from self._write_apart(writes, error))
        for (ask, _), answer in zip(writes, answers, strict=True):
            _of_one(ask, partial(ask.answered, answer))
        return None

    def _write_apart(
        self, writes: Sequence[tuple[Ask[object], Write]], error: Exception
    ) -> Script[OutcomeUnknown | None]:
        """Write a refused batch in halves, to find the ask that the engine can't take."""
        if len(writes) == 1:
            fail_all([ask for ask, _ in writes], error)
            return None
        middle = len(writes) // 2
        first = yield from self._write(writes[:middle])
        try:
            second = yield from self._write(writes[middle:])
        except RebalanserError as outage:
            raise first or outage from outage
        return first or second

    def _read_back(self, asks: Sequence[Ask[object]], lost: OutcomeUnknown | None) -> Script[None]:
        try:
            found: Mapping[TaskId, Stored] = yield from self._patiently(ReadTasks([ask.task for ask in asks]))
        except RegistryUnavailable as error:
            raise lost or error from error
        for ask in asks:
            _of_one(ask, partial(ask.found, found.get(ask.task)))

    def _patiently(self, request: Request) -> Script[Any]:
        """Make a request; retry it while the engine is away."""
        gives_up_at = self._now() + self._timeout_s
        delay = GrowingDelay(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            try:
                return (yield request)
            except RegistryUnavailable:
                if self._now() >= gives_up_at:
                    raise
            yield Sleep(delay.after(0.0))


def fail_all(asks: Iterable[Ask[object]], error: BaseException) -> None:
    """Set an error on the futures of all unsettled asks."""
    for ask in asks:
        ask.fail(error)


def _writes_of(asks: Iterable[Ask[object]], lost: OutcomeUnknown | None) -> list[tuple[Ask[object], Write]]:
    writes: list[tuple[Ask[object], Write]] = []
    for ask in asks:
        write = _of_one(ask, ask.write, lost)
        if write is not None:
            writes.append((ask, write))
    return writes


def _of_one(
    ask: Ask[object], part: Callable[[], ResultT], lost: OutcomeUnknown | None = None
) -> ResultT | None:
    """Run one ask's own code; what it raises fails that ask only.

    If the error is an outage, the ask fails with ``lost``, as its earlier write may take effect.
    """
    try:
        return part()
    except Exception as error:
        unknown = lost if kind_of(error) is ErrorKind.OUTAGE else None
        ask.fail(unknown or error)
        return None
