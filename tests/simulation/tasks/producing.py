"""Producers spool tasks, then forward them until the engine has answered (SK-4).

As in the product, entries are numbered and forwarded strictly in order, some at once. The engine counts each,
so it recognises one that is sent again. An entry that is refused for good is noted on the producer's disk,
then skipped in the engine, and only then forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rebalanser.core.tasks.ids import Generator, partition_of_id, partition_of_task
from rebalanser.core.tasks.model import AfterFailure, Head, Task, TaskId, TaskState
from rebalanser.core.tasks.store import (
    Answer,
    Applied,
    Duplicate,
    Enqueue,
    Exists,
    Forwarded,
    OutboxTally,
    Skip,
    Taken,
    Unknown,
    WriteConflict,
)
from rebalanser.core.tasks.writes import Await, ReadPayloads, ReadTasks, Request, Submit, enqueue_together
from rebalanser.errors import InternalError, RebalanserError, UnknownTask
from simulation.kernel.reports import Violation
from simulation.tasks.network import Unanswered
from simulation.tasks.owning import QUEUE
from simulation.tasks.process import Host, Process, Script, Surroundings
from simulation.tasks.working import KILLER, PLAIN, POISON
from simulation.tasks.writing import Writer, driven

_EPOCH_MS = 1_700_000_000_000
EPOCH_S: Final = _EPOCH_MS / 1000
"""Start of a world, in seconds since 1970."""
_TIMEOUT_S: Final = 0.5
"""Time limit of the bodies of some tasks, in seconds."""
_BATCH: Final = 3
"""Maximum entries that are sent at once."""


@dataclass
class Entry:
    """A task in an outbox."""

    write: Enqueue
    is_refused: bool = False

    @property
    def forwarded(self) -> Forwarded:
        """Its number in the outbox."""
        assert self.write.forwarded is not None
        return self.write.forwarded


class Outbox:
    """State that survives a producer: its spooled tasks, and the lower bound of its ids."""

    def __init__(self, number: int, to_make: int) -> None:
        self.number = number
        self.name = f"outbox {number}"
        self.to_make = to_make
        self.spooled: list[Entry] = []
        self.floor = 0
        self._last = 0

    def spool(self, enqueue: Enqueue) -> None:
        """Keep a task until the engine has it."""
        self._last += 1
        place = Forwarded(self.name, self._last)
        self.spooled.append(Entry(replace(enqueue, forwarded=place)))

    def is_coming(self, task: TaskId, counted: Mapping[str, OutboxTally]) -> bool:
        """True if an entry that the engine has not counted yet enqueues the task."""
        last = counted.get(self.name, OutboxTally()).number
        return any(
            entry.write.task.head.id == task and entry.forwarded.number > last for entry in self.spooled
        )


class Producer(Process):
    """A process that makes the tasks planned for its outbox, and forwards them."""

    def __init__(self, world: Surroundings, name: str, host: Host, outbox: Outbox) -> None:
        super().__init__(world, name, host)
        self.outbox = outbox
        self.enqueueing = 0
        """Number of calls under way that enqueue several tasks."""
        self._flakes = Generator(
            lambda: _EPOCH_MS + int(1000 * self.wall), host.number, outbox.number, outbox.floor
        )
        self.spawn(self._make())
        self.spawn(self._forward())

    def make(self, count: int) -> None:
        """Make some more tasks."""
        self.outbox.to_make += count
        self.spawn(self._make())

    def make_together(self) -> None:
        """Enqueue some tasks at once, without an outbox; later ones depend on earlier ones."""
        tasks: list[Enqueue] = []
        for _ in range(self.world.random.randint(2, 4)):
            after = tuple(each.task.head.id for each in tasks[-1:])
            tasks.append(self._enqueue(self._next_id(), after))
        if self.world.random.random() < 0.2:
            tasks.append(self._enqueue(self._next_id(), (self._next_id(),)))
        some = self.world.random.randint(0, len(tasks) - 1)
        self.spawn(self._enqueue_parts(tasks, some))

    def _enqueue_parts(self, tasks: Sequence[Enqueue], some: int) -> Script:
        """Enqueue the first of these tasks, then all of them, until they are known to exist."""
        self.enqueueing += 1
        if some:
            yield from self._enqueue_together(tasks[:some], 0)
        yield from self._enqueue_together(tasks, some)
        self.enqueueing -= 1

    def _enqueue_together(self, tasks: Sequence[Enqueue], known: int) -> Script:
        """Enqueue tasks until they are known to exist, as the first ``known`` ones are."""
        writer = Writer(self)
        error: Exception | None = None
        while True:
            try:
                yield from driven(enqueue_together(tasks), lambda request: self._perform(request, writer))
            except RebalanserError as raised:
                error = raised
            else:
                error = None
            self.world.oracle.told_together([each.task.head.id for each in tasks[known:]], error)
            if error is None or isinstance(error, UnknownTask):
                return
            yield self.sleep(0.2)

    def _perform(self, request: Request, writer: Writer) -> Script:
        """Make a request of tasks that are enqueued together."""
        network, engine = self.world.network, self.world.engine
        match request:
            case Submit(pending_writes=pending_writes):
                writer.submit_all(pending_writes)
                return None
            case Await(pending_writes=pending_writes):
                answer = yield writer.settled(pending_writes)
            case ReadTasks(ids=ids):
                answer = yield network.read(self, list(ids))
            case ReadPayloads(ids=ids):
                known = engine.payloads
                answer = yield network.request(
                    self, lambda: {each: known[each] for each in ids if each in known}
                )
            case _:
                raise InternalError(f"a producer makes no request {request!r}")
        if isinstance(answer, Unanswered):
            raise answer.error
        return answer

    def _make(self) -> Script:
        outbox, random = self.outbox, self.world.random
        pace_s = 0.7 * self.world.scenario.chaos_s / self.world.scenario.tasks
        while outbox.to_make > 0:
            yield self.sleep(random.expovariate(1.0) * pace_s)
            outbox.to_make -= 1
            for enqueue in self._made():
                self.world.oracle.spooled(enqueue.task.head.id)
                outbox.spool(enqueue)

    def _made(self) -> list[Enqueue]:
        """Return a task to enqueue; sometimes with a dependent one, twice, or with other content."""
        random = self.world.random
        after, waits_for_unknown, later = self._after(), False, []
        if random.random() < 0.2:
            unknown = self._next_id()
            after, waits_for_unknown = (*after, unknown), random.random() < 0.8
            if random.random() < 0.7:
                later = [self._enqueue(unknown, ())]
        enqueue = replace(self._enqueue(self._next_id(), after), waits_for_unknown=waits_for_unknown)
        if random.random() < 0.4:
            enqueue = self._limited(enqueue)
        self.world.ids.append(enqueue.task.head.id)
        if random.random() < 0.2:
            later.append(enqueue)
        if random.random() < 0.1:
            later.append(replace(enqueue, task=replace(enqueue.task, payload=b"other")))
        if random.random() < 0.3:
            later.append(self._unique())
        return [enqueue, *later]

    def _limited(self, enqueue: Enqueue) -> Enqueue:
        """Return the same task with a limit or a rate limit."""
        key = self.world.random.choice("abcd")
        most = {"a": 1, "b": 2, "c": 0, "d": 1}[key]
        rate = {"c": "4/s burst 3", "d": "2/s"}.get(key, "")
        head = replace(enqueue.task.head, limit_key=key, max_running=most, rate_limit=rate)
        partition = partition_of_task(head, self.world.scenario.partitions)
        return replace(enqueue, task=replace(enqueue.task, head=head), partition=partition)

    def _unique(self) -> Enqueue:
        """Return a task with a unique key, which no other depends on: as a duplicate it is not made."""
        random = self.world.random
        enqueue = self._enqueue(self._next_id(), ())
        head = replace(
            enqueue.task.head, unique_key=random.choice("ab"), unique_for_s=random.choice((0.0, 0.5))
        )
        return replace(enqueue, task=replace(enqueue.task, head=head))

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
            timeout_s=_TIMEOUT_S if self.world.scenario.pools and random.random() < 0.1 else None,
            priority=random.choice((0, 0, 0, 5, -3)),
            after=after,
            retries=random.randint(0, 4),
            after_failure=random.choice(tuple(AfterFailure)) if after else AfterFailure.WAIT,
        )
        due = self.world.now + random.uniform(0.0, 2.0) if random.random() < 0.2 else 0.0
        return Enqueue(
            Task(head, b"payload of " + task[:24].encode()),
            partition_of_id(task, self.world.scenario.partitions),
            TaskState(due=due),
        )

    def _forward(self) -> Script:
        spooled = self.outbox.spooled
        while True:
            if not spooled:
                yield self.sleep(0.2)
            elif spooled[0].is_refused:
                yield from self._skip(spooled[0])
            else:
                yield from self._send()

    def _send(self) -> Script:
        """Send the next entries, up to one that is known to be refused."""
        entries: list[Entry] = []
        for entry in self.outbox.spooled[:_BATCH]:
            if entry.is_refused:
                break
            entries.append(entry)
        answers = yield self.world.network.apply(self, [entry.write for entry in entries])
        if isinstance(answers, Unanswered):
            yield self.sleep(0.2)
        else:
            self._settle(entries, answers)

    def _settle(self, entries: Sequence[Entry], answers: Sequence[Answer]) -> None:
        """Take in the answers, up to the first error; later entries were not applied."""
        for position, (entry, answer) in enumerate(zip(entries, answers, strict=True)):
            if isinstance(answer, Applied | Taken):
                self._taken(entry)
                self.outbox.spooled.remove(entry)
                continue
            if isinstance(answer, WriteConflict) and not position:
                raise Violation("SK-4", f"{entry.forwarded} is not the next for the engine, and is")
            if not isinstance(answer, WriteConflict):
                entry.is_refused = True
                self._refused(entry.write, answer)
            return

    def _skip(self, entry: Entry) -> Script:
        """Skip an entry in the engine, which counts it without a task."""
        answer = yield self.world.network.write(self, Skip(QUEUE, entry.forwarded))
        if isinstance(answer, Unanswered):
            yield self.sleep(0.2)
        elif isinstance(answer, WriteConflict):
            raise Violation("SK-4", f"{entry.forwarded} can't be skipped, as it is not the next")
        else:
            self.outbox.spooled.remove(entry)

    def _taken(self, entry: Entry) -> None:
        oracle, task = self.world.oracle, entry.write.task
        if not oracle.exists(task.head.id):
            raise Violation("SK-4", f"{entry.forwarded} is said to be enqueued and is not")
        if not oracle.is_same(task):
            raise Violation("SK-3", f"{entry.forwarded} is said to be enqueued and is another")

    def _refused(self, enqueue: Enqueue, answer: Answer) -> None:
        oracle = self.world.oracle
        match answer:
            case Exists(stored=stored, payload=payload) if Task(stored.head, payload) == enqueue.task:
                oracle.counts["enqueued twice"] += 1
            case Exists():
                oracle.counts["refused: other content"] += 1
            case Duplicate():
                oracle.counts["refused: duplicate"] += 1
                oracle.refused(enqueue.task.head.id)
            case Unknown():
                oracle.counts["refused: unknown dependency"] += 1
                oracle.refused(enqueue.task.head.id)
