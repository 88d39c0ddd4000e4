"""Collection: in one transaction if it fits, else by marking and then sweeping (SK-14)."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import islice
from typing import Final, TypeAlias, TypeVar

from rebalanser.core.tasks.model import TaskId
from rebalanser.core.tasks.store import Answer, Applied, Collect, WriteConflict
from rebalanser.errors import OutcomeUnknown, RebalanserError
from rebalanser.registry.contract import (
    Absent,
    Delete,
    Get,
    Guard,
    KeyValue,
    Operation,
    Outcome,
    Put,
    Range,
    Result,
    Transaction,
    Unchanged,
)
from rebalanser.tasks.key_value.keys import QueueKeys
from rebalanser.tasks.key_value.steps import (
    EngineCall,
    NotShared,
    Planned,
    Read,
    ReadItems,
    SizeLimits,
    WriteStep,
    check_bytes,
)
from rebalanser.tasks.key_value.values import (
    Collection,
    Phase,
    RegistryTask,
    dump_collection,
    dump_mark,
    load_collection,
    load_last,
    load_task,
    marked,
    unmarked,
)

TASKS_AT_ONCE: Final = 50
"""Maximum number of tasks that one transaction marks, deletes or restores."""
LISTED_AT_ONCE: Final = 50
"""Maximum number of dependents or updates that one range reads."""
RECORDS_AT_ONCE: Final = 10
"""Maximum number of unfinished collections that a new one finishes first."""

Replaced: TypeAlias = tuple[KeyValue, bytes]
"""An item as it is, and its new value."""

ItemT = TypeVar("ItemT")


def collect(call: EngineCall, keys: QueueKeys, write: Collect) -> Answer:
    """Collect all of the tasks, or none."""
    return _MarkAndSweep(call, keys, uuid.uuid4().hex).collect(write)


def settle(call: EngineCall, keys: QueueKeys, name: str) -> None:
    """Settle a collection: as it has decided, else without effect."""
    _MarkAndSweep(call, keys, name).settle()


class _MarkAndSweep:
    """One collection, carried on by its collector or by another process."""

    def __init__(self, call: EngineCall, keys: QueueKeys, name: str) -> None:
        self._call = call
        self._keys = keys
        self._name = name
        self._record = keys.collection(name)

    def collect(self, write: Collect) -> Answer:
        self._finish_others()
        marking = Collection(
            Phase.MARKING, [(partition, task) for task, (partition, _) in write.tasks.items()]
        )
        began = self._call.execute(
            Transaction((Absent(self._record),), (Put(self._record, dump_collection(marking)),))
        )
        if self._mark(write, began.revision) and not self._others_depend(set(write.tasks)):
            decided = self._enter(Phase.SWEEPING, marking, began.revision)
            if decided:
                self._finish(marking, decided)
                return Applied(decided)
        self.settle()
        return WriteConflict()

    def _finish_others(self) -> None:
        """Finish collections whose collectors died after they had decided."""
        (records,) = self._call.read_all([Range(self._keys.collections, limit=RECORDS_AT_ONCE)])
        assert isinstance(records, tuple)
        for record in records:
            if load_collection(record).phase is not Phase.MARKING:
                _MarkAndSweep(self._call, self._keys, self._keys.collection_of(record.key)).settle()

    def _finish(self, collection: Collection, decided: int) -> None:
        try:
            self._sweep(collection.tasks, decided)
        except RebalanserError as error:
            raise OutcomeUnknown(
                f"the collection has taken effect, but not all is deleted yet: {error}"
            ) from error

    def settle(self) -> None:
        record = self._call.get([self._record]).get(self._record)
        if record is None:
            return
        collection = load_collection(record)
        if collection.phase is Phase.SWEEPING:
            self._sweep(collection.tasks, record.mod_revision)
        elif collection.phase is Phase.RESTORING:
            self._restore(collection.tasks, record.mod_revision)
        elif restoring := self._enter(Phase.RESTORING, collection, record.mod_revision):
            self._restore(collection.tasks, restoring)
        else:  # another process has decided meanwhile, and a decision is final
            self.settle()

    def _enter(self, phase: Phase, collection: Collection, revision: int) -> int | None:
        """Enter a phase; return its revision, None if the record has changed since ``revision``."""
        put = Put(self._record, dump_collection(replace(collection, phase=phase)))
        outcome = self._call.execute(Transaction((Unchanged(self._record, revision),), (put,)))
        return outcome.revision if outcome.succeeded else None

    def _mark(self, write: Collect, marking: int) -> bool:
        """Mark all tasks; False if one has changed, or the record has left the phase."""
        for group in _groups(write.tasks.items()):
            revisions = {self._keys.state(partition, task): rev for task, (partition, rev) in group}
            items = self._call.get(revisions)
            for key, revision in revisions.items():
                if key not in items or not self._may_mark(items[key], revision):
                    return False
            values = [(item, marked(item, self._name)) for item in items.values()]
            if not all(self._put(part, marking, self._put_mark) for part in self._parts(values)):
                return False
        return True

    def _others_depend(self, tasks: AbstractSet[TaskId]) -> bool:
        """True if another task depends on one of these, which are all marked."""
        self._call.execute(Transaction(then=(Delete(self._keys.witness),)))
        for group in _groups(tasks):
            ranges = [Range(self._keys.dependents(task), limit=LISTED_AT_ONCE) for task in group]
            for listing, result in zip(ranges, self._call.read_all(ranges), strict=True):
                if self._one_exists(listing, result, tasks):
                    return True
        return False

    def _one_exists(self, listing: Range, listed: Result, but: AbstractSet[TaskId]) -> bool:
        """True if one of the dependents exists, listed or further ones, apart from ``but``."""
        while isinstance(listed, tuple) and listed:
            others = {self._keys.task_that_depends(item.key) for item in listed} - but
            if others and self._call.get(map(self._keys.payload, others)):
                return True
            if len(listed) < listing.limit:
                return False
            (listed,) = self._call.read_all([replace(listing, after=listed[-1].key)])
        return False

    def _may_mark(self, item: KeyValue, revision: int) -> bool:
        entry = self._load(item)
        if entry.stored.revision == revision and entry.mark:
            settle(self._call, self._keys, entry.mark)
        return item.mod_revision == revision

    def _put_mark(self, item: KeyValue) -> Operation:
        return Put(self._mark_key(item), dump_mark(self._name))

    def _delete_mark(self, item: KeyValue) -> Operation:
        return Delete(self._mark_key(item))

    def _mark_key(self, item: KeyValue) -> str:
        return self._keys.mark(self._task(item))

    def _put(self, values: Sequence[Replaced], phase: int, beside: Callable[[KeyValue], Operation]) -> bool:
        """Replace the values of items, all or none, while the record is in its phase."""
        guards = [Unchanged(item.key, item.mod_revision) for item, _ in values]
        operations = [each for item, value in values for each in (Put(item.key, value), beside(item))]
        transaction = Transaction((Unchanged(self._record, phase), *guards), tuple(operations))
        return self._call.execute(transaction).succeeded

    def _restore(self, tasks: Sequence[tuple[int, TaskId]], phase: int) -> None:
        for group in _groups(tasks):
            values = [(item, unmarked(item)) for item in self._marked(group)]
            for part in self._parts(values):
                if not self._put(part, phase, self._delete_mark):
                    self._restore_each(part)
        self._forget(phase)

    def _restore_each(self, values: Sequence[Replaced]) -> None:
        """Restore the items that no other process has restored yet."""
        steps = (
            Transaction(
                (Unchanged(item.key, item.mod_revision),), (Put(item.key, value), self._delete_mark(item))
            )
            for item, value in values
        )
        self._call.execute(Transaction(then=tuple(steps)))

    def _sweep(self, tasks: Sequence[tuple[int, TaskId]], phase: int) -> None:
        for group in _groups(tasks):
            items = self._marked(group)
            ranges = [(item, listing) for item in items for listing in self._listings(item)]
            results = self._call.read_all([listing for _, listing in ranges])
            for (item, listing), listed in zip(ranges, results, strict=True):
                self._delete(item, listing, listed)
            self._forget_keys(items)
            steps = (
                Transaction((Unchanged(item.key, item.mod_revision),), self._deletions(item))
                for item in items
            )
            self._call.execute(Transaction(then=tuple(steps)))
        self._forget(phase)

    def _forget_keys(self, items: Sequence[KeyValue]) -> None:
        """Delete the keys that name these tasks as the last of their unique keys."""
        heads = (self._load(item).stored.head for item in items)
        keys = {self._keys.unique(head.name, head.unique_key) for head in heads if head.unique_key}
        if not keys:
            return
        of_tasks = {self._task(item): item for item in items}
        lasts = [(last, of_tasks.get(load_last(last).task)) for last in self._call.get(keys).values()]
        steps = tuple(
            Transaction(
                (Unchanged(item.key, item.mod_revision), Unchanged(last.key, last.mod_revision)),
                (Delete(last.key),),
            )
            for last, item in lasts
            if item is not None
        )
        if steps:
            self._call.execute(Transaction(then=steps))

    def _listings(self, item: KeyValue) -> tuple[Range, Range]:
        """Return the ranges of a task's dependents and updates, which may be many."""
        task = self._task(item)
        dependents, log = self._keys.dependents(task), self._keys.log(task)
        return Range(dependents, limit=LISTED_AT_ONCE), Range(log, limit=LISTED_AT_ONCE)

    def _delete(self, item: KeyValue, listing: Range, listed: Result) -> None:
        """Delete the listed keys and those after them, while the task has the mark."""
        while isinstance(listed, tuple) and listed:
            deletions = tuple(Delete(each.key) for each in listed)
            guards = (Unchanged(item.key, item.mod_revision),)
            if not self._call.execute(Transaction(guards, deletions)).succeeded:
                return
            (listed,) = self._call.read_all([listing])

    def _deletions(self, item: KeyValue) -> tuple[Delete, ...]:
        task, keys = self._task(item), self._keys
        return tuple(
            Delete(key)
            for key in (
                item.key, keys.payload(task), keys.long_payload(task), keys.news(task), keys.mark(task)
            )
        )  # fmt: skip

    def _task(self, item: KeyValue) -> TaskId:
        return self._keys.partition_and_task(item.key)[1]

    def _forget(self, phase: int) -> None:
        self._call.execute(Transaction((Unchanged(self._record, phase),), (Delete(self._record),)))

    def _marked(self, tasks: Iterable[tuple[int, TaskId]]) -> list[KeyValue]:
        """Read the tasks that have this collection's mark."""
        items = self._call.get(self._keys.state(partition, task) for partition, task in tasks)
        return [item for item in items.values() if self._load(item).mark == self._name]

    def _load(self, item: KeyValue) -> RegistryTask:
        partition, task = self._keys.partition_and_task(item.key)
        return load_task(self._keys.queue, partition, task, item.key, item.value, item.mod_revision)

    def _parts(self, values: Sequence[Replaced]) -> Iterator[list[Replaced]]:
        """Split values into lists that fit a request."""
        part: list[Replaced] = []
        size = 0
        for item, value in values:
            needed = 2 * len(item.key) + len(value)
            if part and size + needed > self._call.max_request_bytes // 2:
                yield part
                part, size = [], 0
            part.append((item, value))
            size += needed
        if part:
            yield part


def _groups(items: Iterable[ItemT]) -> Iterator[list[ItemT]]:
    iterator = iter(items)
    while group := list(islice(iterator, TASKS_AT_ONCE)):
        yield group


KEYS_PER_TASK: Final = 3
"""Minimum number of keys that are deleted for each task."""
MAX_LISTED: Final = 50
"""Number of updates or dependents of a task that are too many to collect it in one transaction."""


class CollectStep(WriteStep):
    """Deletes tasks, all or none."""

    collects = True

    def __init__(self, write: Collect, keys: QueueKeys, limits: SizeLimits, max_operations: int) -> None:
        """``max_operations`` is the maximum of deletions, and of guards, in one nested transaction."""
        self.keys = keys
        self._write = write
        self._max_operations = max_operations
        self._asked: set[Get] = set()
        self._last_keys: dict[TaskId, str] = {}
        """Keys that name the last tasks of these tasks' unique keys, once they are known."""
        self._fits = KEYS_PER_TASK * len(write.tasks) <= max_operations
        record = Collection(
            Phase.RESTORING, [(partition, task) for task, (partition, _) in write.tasks.items()]
        )
        check_bytes("the names of the tasks to collect", len(dump_collection(record)), limits.task)

    def wanted(self) -> Sequence[Read]:
        """Return reads of states, dependents, first updates, and the last tasks of their unique keys."""
        self._asked = {Get(key) for key in self._last_keys.values()}
        return (*self._reads(), *self._asked) if self._fits else ()

    def plan(self, found: ReadItems) -> Planned:
        """Delete all if no state has changed; alone if that is too much for one transaction."""
        if not self._fits:
            return NotShared.ALONE
        guards: dict[Guard, None] = {}
        deletions: list[Delete] = []
        for task in self._write.tasks:
            if not self._is_unchanged(task, found):
                return WriteConflict()
            guards |= dict.fromkeys(self._guards(task, found))
            deletions += self._deletions(task, found)
        if not {Get(key) for key in self._last_keys.values()} <= self._asked:
            return NotShared.READ
        if max(len(guards), len(deletions)) > self._max_operations:
            return NotShared.ALONE
        if any(len(items) >= MAX_LISTED for items in self._listed(found)):
            return NotShared.ALONE
        return Transaction(tuple(guards), tuple(deletions))

    def carry_out_alone(self, call: EngineCall) -> Answer:
        """Collect by marking and sweeping."""
        return collect(call, self.keys, self._write)

    def answer(self, outcome: Outcome) -> Answer:
        """Return Applied, or WriteConflict."""
        return Applied(outcome.revision) if outcome.succeeded else WriteConflict()

    def _reads(self) -> Iterator[Read]:
        for task, (partition, _) in self._write.tasks.items():
            yield Get(self.keys.state(partition, task))
            yield Get(self.keys.news(task))
            yield Range(self.keys.dependents(task), limit=MAX_LISTED)
            yield Range(self.keys.log(task), limit=MAX_LISTED)

    def _listed(self, found: ReadItems) -> Iterator[Sequence[object]]:
        for task in self._write.tasks:
            yield found.ranges[self.keys.dependents(task)]
            yield found.ranges[self.keys.log(task)]

    def _guards(self, task: TaskId, found: ReadItems) -> Iterator[Guard]:
        partition, revision = self._write.tasks[task]
        yield Unchanged(self.keys.state(partition, task), revision)
        news = found.items.get(self.keys.news(task))
        yield Absent(self.keys.news(task)) if news is None else Unchanged(news.key, news.mod_revision)
        if (last := self._last(task, found)) is not None:
            yield Unchanged(last.key, last.mod_revision)
        for item in found.ranges[self.keys.dependents(task)]:
            dependent = self.keys.task_that_depends(item.key)
            if dependent not in self._write.tasks:
                yield Absent(self.keys.payload(dependent))

    def _deletions(self, task: TaskId, found: ReadItems) -> Iterator[Delete]:
        partition, _ = self._write.tasks[task]
        yield Delete(self.keys.state(partition, task))
        yield Delete(self.keys.payload(task))
        yield Delete(self.keys.long_payload(task))
        if self.keys.news(task) in found.items:
            yield Delete(self.keys.news(task))
        if (last := self._last(task, found)) is not None:
            yield Delete(last.key)
        for item in (*found.ranges[self.keys.dependents(task)], *found.ranges[self.keys.log(task)]):
            yield Delete(item.key)

    def _last(self, task: TaskId, found: ReadItems) -> KeyValue | None:
        """Return the item that names the task as the last of its unique key, if any."""
        item = found.items.get(self._last_keys.get(task, ""))
        return item if item is not None and load_last(item).task == task else None

    def _is_unchanged(self, task: TaskId, found: ReadItems) -> bool:
        """True if the task's state is unchanged and unmarked; notes its mark and its unique key."""
        partition, revision = self._write.tasks[task]
        item = found.items.get(self.keys.state(partition, task))
        if item is None:
            return False
        entry = load_task(self._write.queue, partition, task, item.key, item.value, item.mod_revision)
        if entry.stored.revision != revision:
            return False
        head = entry.stored.head
        if head.unique_key:
            self._last_keys[task] = self.keys.unique(head.name, head.unique_key)
        self.mark = entry.mark
        return entry.mark is None
