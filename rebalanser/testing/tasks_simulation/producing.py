"""Producers: what they enqueue is first spooled, then forwarded until the engine has answered (SK-4)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rebalanser.tasks.engine import Applied, Enqueue, Exists, Unknown
from rebalanser.tasks.flakes import Generator, partition_of
from rebalanser.tasks.model import Head, State, Task, TaskId
from rebalanser.testing.simulation.oracle import Violation
from rebalanser.testing.tasks_simulation.network import Unanswered
from rebalanser.testing.tasks_simulation.owning import QUEUE
from rebalanser.testing.tasks_simulation.process import Host, Process, Script
from rebalanser.testing.tasks_simulation.working import KILLER, PLAIN, POISON

if TYPE_CHECKING:
    from rebalanser.testing.tasks_simulation.world import World

_EPOCH_MS = 1_700_000_000_000


class Outbox:
    """What survives a producer: what it has spooled, and above what its ids must be."""

    def __init__(self, number: int, to_make: int) -> None:
        self.number = number
        self.to_make = to_make
        self.spooled: list[Enqueue] = []
        self.floor = 0


class Producer(Process):
    """A process that makes tasks as long as its outbox says so, and forwards them."""

    def __init__(self, world: World, name: str, host: Host, outbox: Outbox) -> None:
        super().__init__(world, name, host)
        self.outbox = outbox
        self._flakes = Generator(
            lambda: _EPOCH_MS + int(1000 * self.wall), host.number, outbox.number, outbox.floor
        )
        self.spawn(self._make())
        self.spawn(self._forward())

    def _make(self) -> Script:
        outbox, random = self.outbox, self.world.random
        pace_s = 0.7 * self.world.scenario.chaos_s / self.world.scenario.tasks
        while outbox.to_make > 0:
            yield self.sleep(random.expovariate(1.0) * pace_s)
            outbox.to_make -= 1
            outbox.spooled.extend(self._spooled())

    def _spooled(self) -> list[Enqueue]:
        """A task to enqueue; now and then with another that comes after, twice, or with other content."""
        random = self.world.random
        after, waits_for_unknown, later = self._after(), False, []
        if random.random() < 0.2:
            unknown = self._next_id()
            after, waits_for_unknown = (*after, unknown), random.random() < 0.8
            if random.random() < 0.7:
                later = [self._enqueue(unknown, ())]
        enqueue = replace(self._enqueue(self._next_id(), after), waits_for_unknown=waits_for_unknown)
        self.world.ids.append(enqueue.task.head.id)
        if random.random() < 0.2:
            later.append(enqueue)
        if random.random() < 0.1:
            later.append(replace(enqueue, task=replace(enqueue.task, payload=b"other")))
        return [enqueue, *later]

    def _next_id(self) -> TaskId:
        task = self._flakes.next()
        self.outbox.floor = self._flakes.floor
        return task

    def _after(self) -> tuple[TaskId, ...]:
        random, known = self.world.random, self.world.ids
        if not known or random.random() > self.world.scenario.dependent_ratio:
            return ()
        return tuple(sorted({random.choice(known) for _ in range(random.randint(1, 2))}))

    def _enqueue(self, task: TaskId, after: tuple[TaskId, ...]) -> Enqueue:
        random = self.world.random
        head = Head(
            task,
            QUEUE,
            random.choices((PLAIN, POISON, KILLER), (20, 1, 1))[0],
            priority=random.choice((0, 0, 0, 5, -3)),
            after=after,
            retries=random.randint(0, 4),
        )
        due = self.world.now + random.uniform(0.0, 2.0) if random.random() < 0.2 else 0.0
        return Enqueue(
            Task(head, b"payload of " + task[:24].encode()),
            partition_of(task, self.world.scenario.partitions),
            State(due=due),
        )

    def _forward(self) -> Script:
        outbox = self.outbox
        while True:
            while not outbox.spooled:
                yield self.sleep(0.2)
            enqueue = outbox.spooled[0]
            answer = yield self.world.network.write(self, enqueue)
            if isinstance(answer, Unanswered):
                yield self.sleep(0.2)
                continue
            outbox.spooled.remove(enqueue)
            self._settled(enqueue, answer)

    def _settled(self, enqueue: Enqueue, answer: object) -> None:
        oracle = self.world.oracle
        match answer:
            case Exists(stored=stored, payload=payload) if Task(stored.head, payload) == enqueue.task:
                oracle.counts["enqueued twice"] += 1
            case Exists():
                oracle.counts["refused: other content"] += 1
            case Unknown():
                oracle.counts["refused: unknown dependency"] += 1
                return
            case Applied() if not oracle.is_same(enqueue.task):
                raise Violation("SK-3", "a task is said to be enqueued that is another")
        if not oracle.exists(enqueue.task.head.id):
            raise Violation("SK-4", "a task is said to be enqueued that is not")
