"""The writer of a simulated process: batches and settlements are the product's, requests the world's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Final

from rebalanser.errors import OutcomeUnknown, RebalanserError, RegistryUnavailable, RequestTooLarge
from rebalanser.runtime.workers import GrowingDelay
from rebalanser.tasks.engine import Enqueue, Move, TakeOver, Write
from rebalanser.tasks.loops import LONGEST_PAUSE_S, SHORTEST_PAUSE_S
from rebalanser.tasks.model import TaskId
from rebalanser.tasks.rules import Held
from rebalanser.tasks.writes.batches import Batches, Settlement, fail_all
from rebalanser.tasks.writes.pending import Ask, TakeOverAsk
from rebalanser.tasks.writes.script import Apply, ReadTasks, Request, RequestT, Sleep
from rebalanser.testing.simulation.oracle import Violation
from rebalanser.testing.tasks_simulation.network import TIMEOUT_S, Unanswered
from rebalanser.testing.tasks_simulation.process import Process, Resume, Script, Wish

if TYPE_CHECKING:
    from rebalanser.testing.tasks_simulation.world import World

WRITE_TIMEOUT_S: Final = 2 * TIMEOUT_S
"""Seconds for which an engine that is away is asked again for the same batch."""


def driven(script: Generator[RequestT, Any, Any], perform: Callable[[RequestT], Script]) -> Script:
    """Run a script of the product in the world; its result."""
    try:
        request = next(script)
        while True:
            try:
                answer = yield from perform(request)
            except Exception as error:
                request = script.throw(error)
            else:
                request = script.send(answer)
    except StopIteration as ended:
        return ended.value


class Writer:
    """The one writer of a process.

    It sees that no ask suffers from another, that what is lasting is written, and the order of a task's asks
    (SK-19).
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world: World = process.world
        self._batches = Batches(self._world.random.randint(1, 3))
        self._authors: dict[int, Held | None] = {}
        """By the identity of an ask, in whose name it is."""
        self._order: dict[TaskId, deque[Ask[Any]]] = {}
        self._delay = GrowingDelay(SHORTEST_PAUSE_S, LONGEST_PAUSE_S)
        self._rests = False
        self._sent: dict[int, list[Write]] = {}
        """By the identity of an ask, the writes that were sent for it."""
        self._found: list[Violation] = []

    def submit_all(self, asks: Sequence[Ask[Any]], author: Held | None = None) -> None:
        """Have all of these written."""
        for ask in asks:
            self._authors[id(ask)] = author
            self._order.setdefault(ask.task, deque()).append(ask)
            ask.future.add_done_callback(lambda _, ask=ask: self._settled(ask))  # type: ignore[misc]
        self._batches.add(asks)
        self._write_all()

    def settled(self, asks: Sequence[Ask[Any]]) -> Wish:
        """Go on once all of these are settled."""

        def wish(resume: Resume) -> None:
            left = {id(ask) for ask in asks}

            def done(ask: Ask[Any]) -> None:
                left.discard(id(ask))
                if not left:
                    self._world.after(0.0, lambda: resume(None))

            if not asks:
                self._world.after(0.0, lambda: resume(None))
            for ask in asks:
                ask.future.add_done_callback(lambda _, ask=ask: done(ask))  # type: ignore[misc]

        return wish

    def written(self, ask: Ask[Any], author: Held | None = None) -> Script:
        """Have something written, and wait for the outcome; raises what the ask's future does."""
        self.submit_all([ask], author)
        yield self.settled([ask])
        return ask.future.result(timeout=0)

    def _write_all(self) -> None:
        while not self._rests:
            batch: list[Ask[Any]] = []
            if not self._batches.take(batch):
                return
            self._world.oracle.counts["batches"] += 1
            if len(batch) > 1:
                self._world.oracle.counts["batches of several"] += 1
            self._process.spawn(self._write(batch))

    def _write(self, batch: list[Ask[Any]]) -> Script:
        asks = {ask.task: ask for ask in batch}
        settlement = Settlement(batch, WRITE_TIMEOUT_S, lambda: self._process.now)
        try:
            yield from driven(settlement.script(), lambda request: self._perform(request, asks))
        except RebalanserError as error:
            kept = self._batches.keep(batch, error)
            fail_all((ask for ask in batch if ask not in kept), error)
            if kept:
                self._world.oracle.counts["kept"] += len(kept)
                self._rest()
        else:
            self._delay = GrowingDelay(SHORTEST_PAUSE_S, LONGEST_PAUSE_S)
        self._batches.land(batch)
        for ask in batch:
            if ask.settled:
                self._authors.pop(id(ask), None)
                self._sent.pop(id(ask), None)
        self._raise_found()
        self._write_all()

    def _rest(self) -> None:
        """Pause before what was kept is tried again."""

        def go_on() -> None:
            self._rests = False
            self._write_all()

        self._rests = True
        self._world.after(self._delay.after(0.0), lambda: self._process.received(go_on))

    def _perform(self, request: Request, asks: dict[TaskId, Ask[Any]]) -> Script:
        network = self._world.network
        match request:
            case Apply(writes=writes):
                authors: list[Held | None] = []
                for write in writes:
                    ask = asks[_task_of(write)]
                    self._sent.setdefault(id(ask), []).append(write)
                    authors.append(self._authors[id(ask)])
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

    def _settled(self, ask: Ask[Any]) -> None:
        """Note whether an ask is settled in the order of asks about its task, and by its own doing."""
        order = self._order[ask.task]
        if order[0] is not ask:
            self._found.append(
                Violation("SK-9", f"a write about {ask.task} is settled before an earlier one")
            )
        order.remove(ask)
        error = ask.future.exception()
        if error is None:
            return
        oracle, sent = self._world.oracle, self._sent.pop(id(ask), [])
        oracle.counts[f"failed writes: {type(error).__name__}"] += 1
        is_too_large = isinstance(error, RequestTooLarge)
        if is_too_large and not any(map(self._world.engine.is_too_large, sent)):
            self._found.append(Violation("SK-19", f"a write about {ask.task} fails for the size of another"))
        if ask.lasting and not is_too_large:
            self._found.append(Violation("SK-19", f"a lasting write about {ask.task} is lost: {error!r}"))
        # That a partition has a newer owner is no failure of the store.
        if not isinstance(error, OutcomeUnknown) and not isinstance(ask, TakeOverAsk):
            try:
                for write in sent:
                    oracle.denied(write)
            except Violation as violation:
                self._found.append(violation)

    def _raise_found(self) -> None:
        """Raise what was noted, as a future's callbacks can't."""
        if self._found:
            raise self._found[0]


def _task_of(write: Write) -> TaskId:
    """The name that the ask of a write has."""
    match write:
        case Move(id=task):
            return task
        case Enqueue(task=task):
            return task.head.id
        case TakeOver(queue=queue, epoch=epoch):
            return f"{queue} {epoch.partition}"
        case _:
            raise TypeError(f"no ask writes {write!r}")
