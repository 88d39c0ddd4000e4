"""The writer of a simulated process: the product's batches and settlements, the world's requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

from rebalanser.core.clock import GrowingDelay
from rebalanser.core.tasks.failures import LONGEST_PAUSE_S, SHORTEST_PAUSE_S
from rebalanser.core.tasks.model import TaskId
from rebalanser.core.tasks.rules import ClaimKey
from rebalanser.core.tasks.store import Enqueue, EnqueueAll, Move, TakeOver, Write
from rebalanser.core.tasks.writes import (
    Apply,
    Batches,
    PendingTakeOver,
    PendingWrite,
    ReadTasks,
    Request,
    RequestT,
    Settlement,
    Sleep,
    fail_all,
)
from rebalanser.errors import OutcomeUnknown, RebalanserError, RegistryUnavailable, RequestTooLarge
from simulation.kernel.reports import Violation
from simulation.tasks.network import TIMEOUT_S, Resume, Unanswered, Wish
from simulation.tasks.process import Process, Script, Surroundings

WRITE_TIMEOUT_S: Final = 2 * TIMEOUT_S
"""Seconds for which a batch is retried while the engine is away."""


def driven(script: Generator[RequestT, Any, Any], perform: Callable[[RequestT], Script]) -> Script:
    """Run a script of the product in the world, return its result, and raise violations past it."""
    try:
        request = next(script)
        while True:
            try:
                answer = yield from perform(request)
            except Violation:
                raise
            except Exception as error:
                request = script.throw(error)
            else:
                request = script.send(answer)
    except StopIteration as ended:
        return ended.value


class Writer:
    """The only writer of a process.

    It judges that pending writes do not affect each other, that lasting ones are written, and that those of
    one task are written in order (SK-19).
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world: Surroundings = process.world
        self._batches = Batches(self._world.random.randint(1, 3))
        self._authors: dict[int, ClaimKey | None] = {}
        """Authors of pending writes, by the identity of these."""
        self._order: dict[TaskId, deque[PendingWrite[Any]]] = {}
        self._delay = GrowingDelay(SHORTEST_PAUSE_S, LONGEST_PAUSE_S)
        self._rests = False
        self._sent: dict[int, list[Write]] = {}
        """Writes sent for pending writes, by the identity of these."""
        self._found: list[Violation] = []

    def submit_all(self, pending_writes: Sequence[PendingWrite[Any]], author: ClaimKey | None = None) -> None:
        """Submit pending writes."""
        for pending in pending_writes:
            self._authors[id(pending)] = author
            self._order.setdefault(pending.task, deque()).append(pending)
            pending.future.add_done_callback(lambda _, pending=pending: self._settled(pending))  # type: ignore[misc]
        self._batches.add(pending_writes)
        self._write_all()

    def settled(self, pending_writes: Sequence[PendingWrite[Any]]) -> Wish:
        """Wish to resume once all of these are settled."""

        def wish(resume: Resume) -> None:
            left = {id(pending) for pending in pending_writes}

            def done(pending: PendingWrite[Any]) -> None:
                left.discard(id(pending))
                if not left:
                    self._world.after(0.0, lambda: resume(None))

            if not pending_writes:
                self._world.after(0.0, lambda: resume(None))
            for pending in pending_writes:
                pending.future.add_done_callback(lambda _, pending=pending: done(pending))  # type: ignore[misc]

        return wish

    def written(self, pending: PendingWrite[Any], author: ClaimKey | None = None) -> Script:
        """Submit a pending write, and return or raise its outcome."""
        self.submit_all([pending], author)
        yield self.settled([pending])
        return pending.future.result()

    def _write_all(self) -> None:
        while not self._rests:
            batch: list[PendingWrite[Any]] = []
            if not self._batches.take(batch):
                return
            self._world.oracle.counts["batches"] += 1
            if len(batch) > 1:
                self._world.oracle.counts["batches of several"] += 1
            self._process.spawn(self._write(batch))

    def _write(self, batch: list[PendingWrite[Any]]) -> Script:
        pending_writes = {pending.task: pending for pending in batch}
        settlement = Settlement(batch, WRITE_TIMEOUT_S, lambda: self._process.now)
        try:
            yield from driven(settlement.script(), lambda request: self._perform(request, pending_writes))
        except RebalanserError as error:
            kept = self._batches.keep(batch, error)
            fail_all((pending for pending in batch if pending not in kept), error)
            if kept:
                self._world.oracle.counts["kept"] += len(kept)
                self._rest()
        else:
            self._delay = GrowingDelay(SHORTEST_PAUSE_S, LONGEST_PAUSE_S)
        self._batches.land(batch)
        for pending in batch:
            if pending.settled:
                self._authors.pop(id(pending), None)
                self._sent.pop(id(pending), None)
        self._raise_found()
        self._write_all()

    def _rest(self) -> None:
        """Pause before kept writes are retried."""

        def go_on() -> None:
            self._rests = False
            self._write_all()

        self._rests = True
        self._world.after(self._delay.after(0.0), lambda: self._process.received(go_on))

    def _perform(self, request: Request, pending_writes: dict[TaskId, PendingWrite[Any]]) -> Script:
        network = self._world.network
        match request:
            case Apply(writes=writes):
                authors: list[ClaimKey | None] = []
                for write in writes:
                    pending = pending_writes[_task_of(write)]
                    self._sent.setdefault(id(pending), []).append(write)
                    authors.append(self._authors[id(pending)])
                answer = yield network.apply(self._process, writes, authors)
                if isinstance(answer, Unanswered):
                    raise answer.error
            case ReadTasks(ids=ids):
                answer = yield network.read(self._process, list(ids))
                if isinstance(answer, Unanswered):
                    raise RegistryUnavailable(answer.name)
            case Sleep(seconds=seconds):
                answer = yield self._process.sleep(seconds)
            case _:
                raise TypeError(f"a batch makes no request {request!r}")
        return answer

    def _settled(self, pending: PendingWrite[Any]) -> None:
        """Check that writes of one task settle in order, each by its own answer."""
        order = self._order[pending.task]
        if order[0] is not pending:
            self._found.append(
                Violation("SK-9", f"a write about {pending.task} is settled before an earlier one")
            )
        order.remove(pending)
        error = pending.future.exception()
        if error is None:
            return
        oracle, sent = self._world.oracle, self._sent.pop(id(pending), [])
        oracle.counts[f"failed writes: {type(error).__name__}"] += 1
        is_too_large = isinstance(error, RequestTooLarge)
        if is_too_large and not any(map(self._world.engine.is_too_large, sent)):
            self._found.append(
                Violation("SK-19", f"a write about {pending.task} fails for the size of another")
            )
        if pending.lasting and not is_too_large:
            self._found.append(Violation("SK-19", f"a lasting write about {pending.task} is lost: {error!r}"))
        # A newer owner of a partition is no failure of the store.
        if not isinstance(error, OutcomeUnknown) and not isinstance(pending, PendingTakeOver):
            try:
                for write in sent:
                    oracle.denied(write)
            except Violation as violation:
                self._found.append(violation)

    def _raise_found(self) -> None:
        """Raise the violations that were noted, as callbacks of futures can't."""
        if self._found:
            raise self._found[0]


def _task_of(write: Write) -> TaskId:
    """Return the task of a write."""
    match write:
        case Move(id=task):
            return task
        case Enqueue(task=task):
            return task.head.id
        case EnqueueAll(enqueues=enqueues):
            return enqueues[0].task.head.id
        case TakeOver(queue=queue, epoch=epoch):
            return f"{queue} {epoch.partition}"
        case _:
            raise TypeError(f"no pending write writes {write!r}")
