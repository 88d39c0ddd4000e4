"""Hands out claims of the partitions that a server owns, to whoever asks, in the order of asking."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from rebalanser.errors import RetryLater
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks import rules
from rebalanser.tasks.asks import MoveAsk
from rebalanser.tasks.context import Context
from rebalanser.tasks.http.problems import TOO_MANY, Refusal
from rebalanser.tasks.http.telling import Telling
from rebalanser.tasks.model import TaskId
from rebalanser.tasks.partitions import Claimed, Partitions

SHORTEST_PAUSE_S: Final = 0.001
_log = get_logger()


@dataclass(frozen=True, slots=True)
class Lent:
    """A claim for somebody who asked, ``waited_s`` seconds before the claim was asked for."""

    claimed: Claimed
    payload: bytes
    waited_s: float


@dataclass(slots=True, eq=False)
class Asker:
    """Somebody who asks for claims and waits until ``deadline``, seconds of the context's clock.

    ``names`` are the functions that he knows, None for any.
    """

    worker: str
    limit: int
    asked_at: float
    deadline: float
    names: Collection[str] | None
    future: Future[list[Lent]] = field(default_factory=Future)


class Dispenser:
    """The one thread of a server that claims. All methods may be called from any thread.

    At most ``max_waiting`` clients wait for a task, so that there are connections for the others.
    """

    def __init__(self, context: Context, max_waiting: float = math.inf) -> None:
        self._context = context
        self._max_waiting = max_waiting
        self._woken = threading.Event()
        self.telling = Telling(context, self._woken.set)
        """What writes the history of the claims handed out."""
        self._partitions: Partitions | None = None
        self._lock = threading.Lock()
        self._askers: list[Asker] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rebalanser-tasks-dispenser", daemon=True)

    def start(self, partitions: Partitions) -> None:
        """Begin to hand out claims of these partitions.

        Raises:
            RegistryUnavailable: the engine did not answer in time.
        """
        self.telling.follow()
        self._partitions = partitions
        self._thread.start()

    def wake(self) -> None:
        """There may be something to claim."""
        self._woken.set()

    def owned(self, partitions: int) -> int:
        """How many of the queue's ``partitions`` partitions claims are handed out of now."""
        held = self._partitions
        return 0 if held is None else sum(held.owns(number) for number in range(partitions))

    def stop(self) -> None:
        """Hand out no more: who waits is answered with nothing. Stopping twice does nothing."""
        with self._lock:
            self._stopping = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()
        self.telling.close()
        with self._lock:
            askers, self._askers = self._askers, []
        for each in askers:
            each.future.set_result([])

    def ask(self, worker: str, limit: int, wait_s: float, names: Collection[str] | None = None) -> Asker:
        """Ask for at most ``limit`` claims of these functions, waiting for at most ``wait_s`` seconds.

        The asker's future gets them, or the error of an engine that is away.

        Raises:
            RetryLater: the server stops.
            Refusal: too many wait already.
        """
        now = self._context.clock.now()
        asker = Asker(worker, limit, now, now + wait_s, names)
        with self._lock:
            if self._stopping:
                raise RetryLater("the server stops; ask another")
            if wait_s > 0 and len(self._askers) >= self._max_waiting:
                raise Refusal(TOO_MANY, f"{self._max_waiting} wait for a task already")
            self._askers.append(asker)
        self._woken.set()
        return asker

    def forget(self, asker: Asker) -> None:
        """Whoever asked is gone: what was claimed for him is given back."""
        with self._lock:
            is_waiting = asker in self._askers
            if is_waiting:
                self._askers.remove(asker)
        if not is_waiting:
            asker.future.add_done_callback(self._give_back_all)

    def _run(self) -> None:
        while not self._stopping:
            self._woken.clear()
            self._serve_all()
            self._answer_late()
            self._woken.wait(self._pause_s(self.telling.end_over()))

    def _serve_all(self) -> None:
        """Serve who waits, the first first, as long as there is something to claim for him."""
        unserved: list[Asker] = []
        while (asker := self._first()) is not None:
            try:
                lent = self._claim(asker)
            except Exception as error:  # whoever waits must be told, whatever it is
                self._log_away(error)
                asker.future.set_exception(error)
                continue
            if lent:
                asker.future.set_result(lent)
                continue
            unserved.append(asker)
            if asker.names is None:
                break
        with self._lock:
            self._askers[:0] = unserved

    def _first(self) -> Asker | None:
        """Take the first who waits out of the line, so that he can't be forgotten while he is served."""
        with self._lock:
            return self._askers.pop(0) if self._askers and not self._stopping else None

    def _answer_late(self) -> None:
        """Who has waited for his time gets nothing."""
        now = self._context.clock.now()
        with self._lock:
            late = [each for each in self._askers if each.deadline <= now]
            self._askers = [each for each in self._askers if each.deadline > now]
        for each in late:
            each.future.set_result([])

    def _claim(self, asker: Asker) -> list[Lent]:
        if self._partitions is None:
            return []
        claimed = self._partitions.claim(asker.limit, asker.names, asker.worker)
        if not claimed:
            return []
        for each in claimed:
            self.telling.claimed(each)
        try:
            payloads = self._partitions.payloads(claimed)
        except RetryLater:
            for each in claimed:
                self._give_back(each)
            raise
        return [
            Lent(each, payloads[each.stored.head.id], max(0.0, each.sent_at - asker.asked_at))
            for each in claimed
        ]

    def _pause_s(self, end_at: float | None) -> float | None:
        """How long nobody can be served and no claim ends, if nobody wakes; None for ever."""
        with self._lock:
            deadlines = [each.deadline for each in self._askers]
            asked = [each.names for each in self._askers]
        times = [*deadlines, *([] if end_at is None else [end_at])]
        if deadlines and self._partitions is not None:
            wakeup = self._partitions.next_wakeup(_all_of(asked))
            times += [] if wakeup is None else [wakeup]
        return max(SHORTEST_PAUSE_S, min(times) - self._context.clock.now()) if times else None

    def _give_back_all(self, future: Future[list[Lent]]) -> None:
        lent: Sequence[Lent] = [] if future.exception() is not None else future.result()
        for each in lent:
            self._give_back(each.claimed)

    def _give_back(self, claimed: Claimed) -> None:
        """Release a claim that nobody has: its try is not counted."""
        task: TaskId = claimed.stored.head.id
        self.telling.ended(task, claimed.held)
        ask = MoveAsk(claimed.stored, lambda stored: rules.release(stored.state, claimed.held))
        _log.info("a claim was given back: who asked is gone", action="task_given_back", task=task)
        self._context.submit(ask)

    def _log_away(self, error: Exception) -> None:
        _log.warning(
            "nothing was claimed for who asked",
            action="tasks_engine_away",
            queue=self._context.queue,
            error=repr(error),
        )


def _all_of(asked: Sequence[Collection[str] | None]) -> set[str] | None:
    """The functions that somebody asks for; None where somebody takes any."""
    named = [names for names in asked if names is not None]
    return None if len(named) < len(asked) else {name for names in named for name in names}
