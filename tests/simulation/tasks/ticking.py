"""Tickers of owners. The product decides what they enqueue at each tick of a schedule."""

from __future__ import annotations

from typing import Final

from rebalanser.core.tasks.ids import partition_of_id
from rebalanser.core.tasks.model import Head, Task, TaskId, TaskState
from rebalanser.core.tasks.store import Enqueue, enqueued
from rebalanser.core.tasks.ticking import EnqueueTick, FindTicks, LeaveOut, ReadPauses, Ticking, TickRequest
from rebalanser.core.tasks.writes import PendingEnqueue
from rebalanser.errors import RebalanserError
from rebalanser.tasks.pauses import Pause
from rebalanser.tasks.periodic import Schedule
from simulation.kernel.reports import Violation
from simulation.tasks.network import Unanswered
from simulation.tasks.owning import OwnerProcess
from simulation.tasks.process import Script, Surroundings
from simulation.tasks.producing import EPOCH_S
from simulation.tasks.working import PLAIN
from simulation.tasks.writing import Writer, driven

QUEUE: Final = "q"
SCHEDULE: Final = Schedule(QUEUE, PLAIN, "* * * * * */2")
LOOKS_EVERY_S: Final = 0.5


def tick_of(seconds: float) -> int:
    """Return the last tick at or before this true time."""
    return SCHEDULE.last_tick(EPOCH_S + seconds)


class SimulatedTicker:
    """The ticker of an owner: it enqueues the ticks in the owner's partitions."""

    def __init__(self, process: OwnerProcess) -> None:
        self._process = process
        self._world: Surroundings = process.world
        self._writer = Writer(process)
        self._ticking = Ticking([SCHEDULE], lambda: EPOCH_S + process.wall, self._is_mine)
        process.spawn(self._run())

    def _is_mine(self, task: TaskId) -> bool:
        return partition_of_id(task, self._world.scenario.partitions) in self._process.index

    def _run(self) -> Script:
        while self._world.is_ticking:
            yield self._process.sleep(LOOKS_EVERY_S)
            try:
                yield from driven(self._ticking.tick(), self._perform)
            except RebalanserError:
                self._world.oracle.counts["ticks that failed"] += 1

    def _perform(self, request: TickRequest) -> Script:
        engine, network = self._world.engine, self._world.network
        match request:
            case FindTicks(ids=ids):
                answer = yield network.read(self._process, list(ids))
            case ReadPauses():
                answer = yield network.request(self._process, lambda: dict(engine.pauses))
                if not isinstance(answer, Unanswered):
                    return {name: Pause.of(content) for name, content in answer.items()}
            case EnqueueTick(name=name, task=task):
                return (yield from self._enqueue(name, task))
            case LeaveOut(name=name, error=error):
                raise Violation("SK-15", f"a tick of {name} is left out: {error!r}")
        if isinstance(answer, Unanswered):
            raise answer.error
        return answer

    def _enqueue(self, name: str, task: TaskId) -> Script:
        found = yield self._world.network.read(self._process, [task])
        if isinstance(found, Unanswered):
            raise found.error
        if found:
            return
        self._world.oracle.counts["ticks"] += 1
        key = "tick" if self._world.is_without_overlap else ""
        head = Head(task, QUEUE, name, unique_key=key)
        enqueue = Enqueue(
            Task(head, b""), partition_of_id(task, self._world.scenario.partitions), TaskState()
        )
        answer = yield from self._writer.written(PendingEnqueue(enqueue))
        if enqueued(enqueue, answer) != task:
            self._world.oracle.counts["ticks left out"] += 1
            self._world.left_out.add(task)
