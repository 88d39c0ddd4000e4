"""Operators, who cancel and requeue, and retention."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from rebalanser.core.tasks import rules
from rebalanser.core.tasks.model import Status, Stored, TaskId
from rebalanser.core.tasks.retention import Components, Mark, Marks
from rebalanser.core.tasks.store import Collect
from rebalanser.core.tasks.writes import PendingMove
from rebalanser.errors import RebalanserError
from rebalanser.tasks.pauses import QUEUE as QUEUE_PAUSE
from rebalanser.tasks.pauses import Pause
from simulation.tasks.network import Unanswered
from simulation.tasks.owning import QUEUE
from simulation.tasks.process import Host, Process, Script, Surroundings
from simulation.tasks.producing import EPOCH_S
from simulation.tasks.scenario import RETENTION
from simulation.tasks.working import PLAIN
from simulation.tasks.writing import Writer

_PAGE = 8


class Operator(Process):
    """An operator with a command line."""

    def __init__(self, world: Surroundings, name: str, host: Host) -> None:
        super().__init__(world, name, host)
        self._writer = Writer(self)

    def cancel(self, task: TaskId) -> None:
        """Cancel a task."""
        self.spawn(self._ask(task, lambda stored: rules.cancel(stored.state)))

    def requeue(self, task: TaskId) -> None:
        """Requeue a task."""
        self.spawn(self._ask(task, lambda stored: rules.requeue(stored.state)))

    def pause(self, seconds: float, schedule: str = QUEUE_PAUSE) -> None:
        """Pause the queue or a schedule for some time, or until another operator resumes it."""
        self.spawn(self._pause(seconds, schedule))

    def resume(self) -> None:
        """Resume the queue and schedules; repeat while a late request pauses one."""
        self.spawn(self._resume())

    def _pause(self, seconds: float, schedule: str) -> Script:
        pause = Pause(since=EPOCH_S + self.wall, by="operator")
        put = self.world.engine.put_pause
        yield self.world.network.request(self, partial(put, schedule, pause.model_dump_json().encode()))
        yield self.sleep(seconds)
        ended = pause.model_copy(update={"ended": EPOCH_S + self.wall}) if schedule else None
        content = None if ended is None else ended.model_dump_json().encode()
        yield self.world.network.request(self, partial(put, schedule, content))

    def _resume(self) -> Script:
        while not self.world.is_quiet:
            for schedule in list(self.world.engine.pauses):
                put = partial(self.world.engine.put_pause, schedule, None)
                yield self.world.network.request(self, put)
            yield self.sleep(0.2)

    def requeue_for_ever(self) -> None:
        """Requeue, from now on, all tasks that could have succeeded."""
        self.spawn(self._requeue_for_ever())

    def _ask(self, task: TaskId, rule: Any) -> Script:
        found = yield self.world.network.read(self, [task])
        if not isinstance(found, Unanswered) and task in found:
            with suppress(RebalanserError):
                yield from self._writer.written(PendingMove(found[task], rule))

    def _requeue_for_ever(self) -> Script:
        while True:
            yield self.sleep(0.5)
            for task, stored in list(self.world.engine.tasks.items()):
                is_closed = stored.state.status in {Status.DEAD, Status.CANCELLED}
                if is_closed and stored.head.name == PLAIN:
                    yield from self._ask(task, lambda found: rules.requeue(found.state))


class Collector(Process):
    """A worker's retention: deletes closed tasks once their time has passed, connected ones together."""

    def __init__(self, world: Surroundings, name: str, host: Host) -> None:
        super().__init__(world, name, host)
        self._marks = Marks()
        self.spawn(self._run())

    def _run(self) -> Script:
        while True:
            yield self.sleep(0.8)
            revision: Any = yield self.world.network.request(self, lambda: self.world.engine.revision)
            if isinstance(revision, Unanswered):
                continue
            self._marks = self._marks.with_mark(Mark(self.now, revision), RETENTION.longest_s)
            components = Components()
            yield from self._read_into(components)
            # The time to move them to a file.
            yield self.sleep(self.world.random.uniform(0.0, 0.5))
            for component in components.collectable():
                yield self.world.network.write(self, Collect(QUEUE, component))

    def _read_into(self, components: Components) -> Script:
        after: TaskId = ""
        while True:
            page: Any = yield self.world.network.request(
                self, partial(self.world.engine.page, None, after, _PAGE, is_open=False)
            )
            if isinstance(page, Unanswered):
                yield self.sleep(0.1)
                continue
            for stored in page:
                components.add(stored, keep=self._is_kept(stored))
            if len(page) < _PAGE:
                return
            after = page[-1].head.id

    def _is_kept(self, stored: Stored) -> bool:
        kept_s = RETENTION.seconds(stored.state.status)
        closed_at = self._marks.closed_at(stored.revision)
        if kept_s is None or closed_at is None or self.world.is_coming(stored.head.id):
            return True
        return self.now - closed_at < kept_s * self.host.rate
