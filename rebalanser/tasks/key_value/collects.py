"""The step that collects tasks in one transaction, where they fit into one.

It has guards on all states, and that nothing else depends on the tasks; and deletions only, so that a
registry that is over its quota can still be emptied. What does not fit is left to
:mod:`~rebalanser.tasks.key_value.sweeping`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rebalanser.registry.contract import Absent, Delete, Get, Guard, Outcome, Range, Transaction, Unchanged
from rebalanser.tasks.engine import Answer, Applied, Collect, Conflict
from rebalanser.tasks.key_value.keys import QueueKeys
from rebalanser.tasks.key_value.limits import Limits
from rebalanser.tasks.key_value.steps import Found, Otherwise, Planned, Read, Step, check_bytes
from rebalanser.tasks.key_value.sweeping import collect
from rebalanser.tasks.key_value.values import Collection, Phase, dump_collection, load_task
from rebalanser.tasks.key_value.visits import Visit
from rebalanser.tasks.model import TaskId

KEYS_OF_A_TASK: Final = 3
"""That are deleted in any case."""
LOOKED_AT: Final = 50
"""A task with so many updates, or dependents, is not collected in one transaction."""


class CollectStep(Step):
    """Some tasks that are deleted, all or none."""

    collects = True

    def __init__(self, write: Collect, keys: QueueKeys, limits: Limits, max_operations: int) -> None:
        """``max_operations`` is how many deletions or guards fit into one nested transaction at most."""
        self.keys = keys
        self._write = write
        self._max_operations = max_operations
        self._fits = KEYS_OF_A_TASK * len(write.tasks) <= max_operations
        record = Collection(
            Phase.RESTORING, [(partition, task) for task, (partition, _) in write.tasks.items()]
        )
        check_bytes("the names of the tasks to collect", len(dump_collection(record)), limits.task)

    def wanted(self) -> Sequence[Read]:
        """The states, for their marks, what depends on them, and the first updates."""
        return tuple(self._reads()) if self._fits else ()

    def plan(self, found: Found) -> Planned:
        """Delete all if no state has changed; alone where that is too much for one transaction."""
        if not self._fits:
            return Otherwise.ALONE
        guards: dict[Guard, None] = {}
        deletions: list[Delete] = []
        for task in self._write.tasks:
            if not self._stands(task, found):
                return Conflict()
            guards |= dict.fromkeys(self._guards(task, found))
            deletions += self._deletions(task, found)
        if max(len(guards), len(deletions)) > self._max_operations:
            return Otherwise.ALONE
        if any(len(items) >= LOOKED_AT for items in self._listed(found)):
            return Otherwise.ALONE
        return Transaction(tuple(guards), tuple(deletions))

    def carry_out_alone(self, visit: Visit) -> Answer:
        """Mark and sweep."""
        return collect(visit, self.keys, self._write)

    def answer(self, outcome: Outcome) -> Answer:
        """Applied, or a conflict."""
        return Applied(outcome.revision) if outcome.succeeded else Conflict()

    def _reads(self) -> Iterator[Read]:
        for task, (partition, _) in self._write.tasks.items():
            yield Get(self.keys.state(partition, task))
            yield Get(self.keys.news(task))
            yield Range(self.keys.dependents(task), limit=LOOKED_AT)
            yield Range(self.keys.log(task), limit=LOOKED_AT)

    def _listed(self, found: Found) -> Iterator[Sequence[object]]:
        for task in self._write.tasks:
            yield found.ranges[self.keys.dependents(task)]
            yield found.ranges[self.keys.log(task)]

    def _guards(self, task: TaskId, found: Found) -> Iterator[Guard]:
        partition, revision = self._write.tasks[task]
        yield Unchanged(self.keys.state(partition, task), revision)
        news = found.items.get(self.keys.news(task))
        yield Absent(self.keys.news(task)) if news is None else Unchanged(news.key, news.mod_revision)
        for item in found.ranges[self.keys.dependents(task)]:
            dependent = self.keys.task_that_depends(item.key)
            if dependent not in self._write.tasks:
                yield Absent(self.keys.payload(dependent))

    def _deletions(self, task: TaskId, found: Found) -> Iterator[Delete]:
        partition, _ = self._write.tasks[task]
        yield Delete(self.keys.state(partition, task))
        yield Delete(self.keys.payload(task))
        yield Delete(self.keys.long_payload(task))
        if self.keys.news(task) in found.items:
            yield Delete(self.keys.news(task))
        for item in (*found.ranges[self.keys.dependents(task)], *found.ranges[self.keys.log(task)]):
            yield Delete(item.key)

    def _stands(self, task: TaskId, found: Found) -> bool:
        """Whether the task's state is that of its revision and bears no mark; notes a mark."""
        partition, revision = self._write.tasks[task]
        item = found.items.get(self.keys.state(partition, task))
        if item is None:
            return False
        entry = load_task(self._write.queue, partition, task, item.key, item.value, item.mod_revision)
        if entry.stored.revision != revision:
            return False
        self.mark = entry.mark
        return entry.mark is None
