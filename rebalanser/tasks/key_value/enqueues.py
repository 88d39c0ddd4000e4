"""The steps that add a task, or several.

A task may depend on others. A guard on each makes sure that it still exists when the task is added. A task
that the same transaction adds needs no guard: it exists afterwards if the guards under which it is added
hold, so the new task is added under these too.

Each dependency gets two keys: one names the new task, so that a collection of the dependency finds it; the
other is only put, so that a collection that has read already finds a change. No dependency may be marked by a
collection, which would not find the new task.

If there are more dependencies than one transaction can guard, a *witness* is put first: a key that every
collection deletes. Then the dependencies are read and get their keys, in several transactions. Then the task
is added under the guard that the witness still exists: nothing was collected in between, so all dependencies
still exist. If the task is never added, its keys stay until the dependency is collected; the collection finds
no such task and ignores them.

A task with a unique key is put as the last of that key, under guards that the previous one is still the last
and is closed (``LastOfKey``).

An entry of an outbox is taken once (SK-4): its outbox's tally is read first, guarded in the transaction that
adds the task, and counts the entry. Tallies never go back, so a tally that counts the entry is final.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rebalanser.core.tasks.model import Head, TaskId
from rebalanser.core.tasks.rules import is_duplicate
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
from rebalanser.errors import RequestTooLarge
from rebalanser.registry.contract import (
    Absent,
    Created,
    Get,
    Guard,
    KeyValue,
    Outcome,
    Put,
    Transaction,
    Unchanged,
)
from rebalanser.tasks.key_value.keys import QueueKeys
from rebalanser.tasks.key_value.steps import (
    SPARE_BYTES,
    EngineCall,
    NotShared,
    Planned,
    Read,
    ReadItems,
    SizeLimits,
    WriteStep,
    bytes_of,
    check_bytes,
    read_item,
)
from rebalanser.tasks.key_value.values import (
    Last,
    dump_head,
    dump_last,
    dump_place,
    dump_state,
    dump_tally,
    dump_task,
    is_short,
    load_last,
    load_mark,
    load_place,
    load_tally,
    load_task,
    status_of,
)

TASKS_AT_ONCE: Final = 50


@dataclass(frozen=True, slots=True)
class DependencyGuards:
    """Guards under which to add a task; or the missing tasks, or the collection that has marked one."""

    guards: tuple[Guard, ...] = ()
    missing: tuple[TaskId, ...] = ()
    mark: str | None = None


def guard_dependencies(
    call: EngineCall, keys: QueueKeys, task: TaskId, after: Sequence[TaskId], *, existing: bool
) -> DependencyGuards | None:
    """Put keys at the tasks ``after`` for a new dependent ``task``; None if one was marked meanwhile.

    With ``existing`` all of them must exist.
    """
    witness = _witness(call, keys)
    missing: list[TaskId] = []
    for start in range(0, len(after), TASKS_AT_ONCE):
        group = after[start : start + TASKS_AT_ONCE]
        items = call.get([*map(keys.payload, group), *map(keys.mark, group)])
        marks = [items[key] for key in map(keys.mark, group) if key in items]
        if marks:
            return DependencyGuards(mark=load_mark(marks[0]))
        if existing:
            missing += [each for each in group if keys.payload(each) not in items]
        if not missing and not call.execute(_notices(keys, task, group)).succeeded:
            return None
    return DependencyGuards((Created(keys.witness, witness.create_revision),), tuple(missing))


def _notices(keys: QueueKeys, task: TaskId, group: Sequence[TaskId]) -> Transaction:
    dependents = (Put(keys.dependent(each, task), b"") for each in group)
    news = (Put(keys.news(each), b"") for each in group)
    return Transaction(tuple(Absent(keys.mark(each)) for each in group), (*dependents, *news))


def _witness(call: EngineCall, keys: QueueKeys) -> KeyValue:
    """Return the key that the next collection deletes; put it if it does not exist."""
    key = keys.witness
    outcome = call.execute(Transaction((Absent(key),), (Put(key, b""),), (Get(key),)))
    item = read_item(outcome.results[0])
    return item or KeyValue(key, b"", outcome.revision, outcome.revision)


class EntryOfOutbox:
    """Entry of an outbox that a step counts."""

    def __init__(self, entry: Forwarded, keys: QueueKeys) -> None:
        self.key = keys.tally(entry.outbox)
        self._entry = entry

    def follows(self, other: EntryOfOutbox) -> bool:
        """True if this entry follows another one of the same outbox."""
        return self.key == other.key and self._entry.number == other._entry.number + 1

    def tally(self, items: Mapping[str, KeyValue]) -> OutboxTally:
        """Return the tally as it was read."""
        return load_tally(items[self.key]) if self.key in items else OutboxTally()

    def refusal(self, items: Mapping[str, KeyValue]) -> Taken | WriteConflict | None:
        """Return why the entry may not be counted, by the tally as read; None if it may."""
        return self.tally(items).refusal(self._entry)

    def is_skipped(self, items: Mapping[str, KeyValue]) -> bool:
        """True if the tally as read says that this entry was skipped."""
        return self.tally(items).has_skipped(self._entry)

    def guard(self, items: Mapping[str, KeyValue]) -> Guard:
        """Guard that the tally is unchanged since it was read."""
        item = items.get(self.key)
        return Absent(self.key) if item is None else Unchanged(self.key, item.mod_revision)

    def count(self, *, skipped: bool = False) -> Put:
        """Return the put that counts the entry."""
        return Put(self.key, dump_tally(OutboxTally(self._entry.number, skipped)))


class SkipStep(WriteStep):
    """Counts an entry without adding its task."""

    def __init__(self, write: Skip, keys: QueueKeys) -> None:
        self.keys = keys
        self._entry = EntryOfOutbox(write.entry, keys)

    def wanted(self) -> Sequence[Read]:
        """Return the read of the tally."""
        return (Get(self._entry.key),)

    def plan(self, found: ReadItems) -> Planned:
        """Count the entry if it is the next one and the tally is still the one that was read."""
        if self._entry.is_skipped(found.items):
            return Applied(found.items[self._entry.key].mod_revision)
        refusal = self._entry.refusal(found.items)
        if refusal is not None:
            return refusal
        return Transaction((self._entry.guard(found.items),), (self._entry.count(skipped=True),))

    def answer(self, outcome: Outcome) -> Answer | None:
        """Return Applied; None if the tally has changed, to plan it again."""
        return Applied(outcome.revision) if outcome.succeeded else None


MAX_GUARDED: Final = 16
"""Maximum dependencies of one task that have a guard each."""
MAX_GUARDED_TOGETHER: Final = 8
"""Maximum dependencies of tasks that are added together that have a guard each."""


class LastOfKey:
    """Finds out if a new task is a duplicate of the last one with its unique key (SK-23).

    Once the last one's time is over its state counts too, which a second look reads.
    """

    def __init__(self, head: Head, partition: int, keys: QueueKeys) -> None:
        self._keys = keys
        self._head = head
        self._key = keys.unique(head.name, head.unique_key)
        self._state_key = ""
        self.put = Put(self._key, dump_last(Last(head.id, partition, head.unique_for_s)))
        """Put that makes the new task the last one."""
        self.duplicate: Duplicate | None = None
        """Answer if the new task is a duplicate, by what was read."""
        self.guards: tuple[Guard, ...] = ()
        """Guards under which the task may be added."""

    def reads(self) -> tuple[Get, ...]:
        """Return the reads that ``look`` needs."""
        return (Get(self._key), Get(self._state_key)) if self._state_key else (Get(self._key),)

    def look(self, items: Mapping[str, KeyValue]) -> bool:
        """Decide by what was read; False if more must be read first."""
        self.duplicate = None
        item = items.get(self._key)
        if item is None:
            self.guards = (Absent(self._key),)
            return True
        last = load_last(item)
        self.guards = (Unchanged(self._key, item.mod_revision),)
        status = None
        if not is_duplicate(self._head.id, last.task, last.unique_for_s, None):
            state_key = self._keys.state(last.partition, last.task)
            if state_key != self._state_key:
                self._state_key = state_key
                return False
            state = items.get(state_key)
            if state is None:
                self.guards += (Absent(state_key),)
                return True
            self.guards += (Unchanged(state_key, state.mod_revision),)
            status = status_of(state_key, state.value)
        if is_duplicate(self._head.id, last.task, last.unique_for_s, status):
            self.duplicate = Duplicate(last.task)
        return True

    def look_alone(self, call: EngineCall) -> None:
        """Read until it is decided."""
        while not self.look(call.get(each.key for each in self.reads())):
            pass


class EnqueueStep(WriteStep):
    """Adds a task."""

    def __init__(self, write: Enqueue, keys: QueueKeys, limits: SizeLimits) -> None:
        self.keys = keys
        self._write = write
        self._id = write.task.head.id
        self._partition = write.partition
        self.adds = self._payload_key = keys.payload(self._id)
        self._after = tuple(dict.fromkeys(write.task.head.after))
        self._missing: tuple[TaskId, ...] = ()
        self.entry = None if write.forwarded is None else EntryOfOutbox(write.forwarded, keys)
        self._tally_guards: tuple[Guard, ...] = ()
        head = write.task.head
        self._last = LastOfKey(head, write.partition, keys) if head.unique_key else None
        self._puts = self._task_puts = self._made_puts(limits)
        if self._last is not None:
            self._puts += (self._last.put,)
        if self.entry is not None:
            self._puts += (self.entry.count(),)
        if len(self._after) <= MAX_GUARDED:
            self.news = tuple(map(keys.news, self._after))
            self._puts += tuple(Put(keys.dependent(task, self._id), b"") for task in self._after)

    @property
    def is_alone(self) -> bool:
        """True if the task has neither dependencies nor a unique key."""
        return not self._after and self._last is None

    def addition_alone(self) -> Transaction:
        """Return the transaction that adds the task if it is alone, without the outbox's tally."""
        return Transaction((Absent(self._payload_key),), self._task_puts)

    def _made_puts(self, limits: SizeLimits) -> tuple[Put, ...]:
        write = self._write
        task, state = write.task, write.state
        head, state_text = dump_head(task.head), dump_state(state)
        check_bytes("a payload", len(task.payload), limits.payload)
        check_bytes("a result", len(state.result or b""), limits.update)
        check_bytes("a state", len(state_text), limits.state)
        check_bytes("the names of a task and of those that it depends on", len(head), limits.head)
        check_bytes("a task", len(task.payload) + len(head) + len(state_text), limits.task)
        puts = (
            Put(self.keys.state(write.partition, self._id), dump_task(state.status, head, state_text)),
            Put(self._payload_key, dump_place(write.partition, task.payload)),
        )
        if is_short(task.payload):
            return puts
        return (*puts, Put(self.keys.long_payload(self._id), task.payload))

    @property
    def write(self) -> Enqueue:
        """The write of this step."""
        return self._write

    def existing(self, call: EngineCall) -> Answer | None:
        """Return the answer if the id is taken; None if it no longer is."""
        outcome = call.execute(self._refusal())
        return None if outcome.succeeded else self.answer(outcome)

    def wanted(self) -> Sequence[Read]:
        """Return reads of the outbox's tally, the last task of its key, its dependencies and their marks."""
        if len(self._after) > MAX_GUARDED:
            return ()
        tally: tuple[Get, ...] = () if self.entry is None else (Get(self.entry.key),)
        if self._last is not None:
            tally += self._last.reads()
        marks = (Get(self.keys.mark(task)) for task in self._after)
        if self._write.waits_for_unknown:
            return (*tally, *marks)
        return (*tally, *(Get(self.keys.payload(task)) for task in self._after), *marks)

    def plan(self, found: ReadItems) -> Planned:
        """Put the task if its id is free and all dependencies still exist."""
        if len(self._after) > MAX_GUARDED:
            return NotShared.ALONE
        refusal = self._refused_by_tally(found.items)
        if refusal is not None:
            return refusal
        if self._last is not None:
            if not self._last.look(found.items):
                return NotShared.READ
            if self._last.duplicate is not None:
                return self._refusal()
        return self._planned_among(found)

    def _planned_among(self, found: ReadItems) -> Planned:
        """Plan the task by its dependencies as read."""
        for task in self._after:
            if (mark := found.items.get(self.keys.mark(task))) is not None:
                self.mark = load_mark(mark)
                return NotShared.AGAIN
        missing = [task for task in self._after if not self._exists(task, found)]
        if any(self.keys.payload(task) in found.unread for task in missing):
            return NotShared.LATER
        self._missing = tuple(missing)
        if missing:
            return self._refusal()
        guarded = (*self._tally_guards, *self._dependency_guards(found))
        if self._last is not None:  # dependents go into a later transaction: this may be a duplicate
            return self._addition((*self._last.guards, *guarded))
        found.added[self._payload_key] = guarded
        return self._addition(guarded)

    def carry_out_alone(self, call: EngineCall) -> Answer | None:
        """Put keys at all dependencies, then add the task under a guard on the witness."""
        refusal = self._refused_by_tally({} if self.entry is None else call.get([self.entry.key]))
        if refusal is not None:
            return refusal
        unique_guards: tuple[Guard, ...] = ()
        if self._last is not None:
            self._last.look_alone(call)
            if self._last.duplicate is not None:
                return self.answer(call.execute(self._refusal()))
            unique_guards = self._last.guards
        existing = not self._write.waits_for_unknown
        guarded = guard_dependencies(call, self.keys, self._id, self._after, existing=existing)
        if guarded is None:
            return None
        self._missing = guarded.missing
        self.mark = guarded.mark
        if self.mark is not None:
            return None
        guards = (*self._tally_guards, *unique_guards, *guarded.guards)
        nested = self._refusal() if self._missing else self._addition(guards)
        return self.answer(call.execute(nested))

    def answer(self, outcome: Outcome) -> Answer | None:
        """Return the answer by the outcome of the transaction; None to plan it again."""
        if outcome.succeeded:
            if self._last is not None and self._last.duplicate is not None:
                return self._last.duplicate
            return Unknown(self._missing) if self._missing else Applied(outcome.revision)
        state, place, long_payload, *tally = map(read_item, outcome.results)
        refusal = self._refused_by_tally({item.key: item for item in tally if item is not None})
        if refusal is not None:
            return refusal
        if place is None:
            return None
        self._partition = load_place(place).partition
        payload = load_place(place).payload
        if payload is None and long_payload is not None:
            payload = long_payload.value
        if state is None or payload is None:
            return None
        partition, task = self.keys.partition_and_task(state.key)
        entry = load_task(self.keys.queue, partition, task, state.key, state.value, state.mod_revision)
        return Exists(entry.stored, payload)

    def _addition(self, guarded: Sequence[Guard]) -> Transaction:
        return Transaction((Absent(self._payload_key), *guarded), self._puts, self._reads())

    def _refusal(self) -> Transaction:
        """Return the transaction of a refused task, which reads the task that may have its id."""
        return Transaction((Absent(self._payload_key), *self._tally_guards), (), self._reads())

    def _reads(self) -> tuple[Get, ...]:
        state_key = self.keys.state(self._partition, self._id)
        tally = () if self.entry is None else (Get(self.entry.key),)
        return (Get(state_key), Get(self._payload_key), Get(self.keys.long_payload(self._id)), *tally)

    def _refused_by_tally(self, items: Mapping[str, KeyValue]) -> Taken | WriteConflict | None:
        """Return why the entry may not be taken, by the tally as read; None if it may, under a guard."""
        if self.entry is None:
            return None
        self._tally_guards = (self.entry.guard(items),)
        return self.entry.refusal(items)

    def _exists(self, task: TaskId, found: ReadItems) -> bool:
        key = self.keys.payload(task)
        return self._write.waits_for_unknown or key in found.added or key in found.items

    def _dependency_guards(self, found: ReadItems) -> tuple[Guard, ...]:
        """Return guards that hold if all dependencies exist unmarked when the task is added."""
        guards: dict[Guard, None] = {}
        for task in self._after:
            guards[Absent(self.keys.mark(task))] = None
            key = self.keys.payload(task)
            if key in found.added:
                guards |= dict.fromkeys(found.added[key])
            elif not self._write.waits_for_unknown:
                guards[Created(key, found.items[key].create_revision)] = None
        return tuple(guards)


class EnqueueAllStep(WriteStep):
    """Adds tasks in one transaction, all or none.

    Dependencies among them need no guard. Each id has a guard, and so has each other dependency; if these are
    many, there is one guard on the witness instead.
    """

    def __init__(self, enqueues: Sequence[Enqueue], keys: QueueKeys, limits: SizeLimits) -> None:
        self.keys = keys
        self._steps = [EnqueueStep(each, keys, limits) for each in enqueues]
        size = sum(bytes_of(step.addition_alone()) for step in self._steps)
        check_bytes(f"{len(enqueues)} tasks that are enqueued together", size, limits.task)

    def plan(self, found: ReadItems) -> Planned:  # noqa: ARG002
        """Return that its transaction takes no other step."""
        return NotShared.ALONE

    def answer(self, outcome: Outcome) -> Answer | None:
        """Return Applied; None to plan it again."""
        return Applied(outcome.revision) if outcome.succeeded else None

    def carry_out_alone(self, call: EngineCall) -> Answer | None:
        """Read all tasks concerned, then add the new ones under guards that nothing has changed."""
        outer = self._outer()
        needed = dict.fromkeys(task for tasks in outer.values() for task in tasks)
        own = [self.keys.payload(step.write.task.head.id) for step in self._steps]
        items = call.get([*own, *map(self.keys.payload, needed), *map(self.keys.mark, needed)])
        for step, key in zip(self._steps, own, strict=True):
            if key in items:
                return step.existing(call)
            existing = () if step.write.waits_for_unknown else outer[step.write.task.head.id]
            missing = tuple(task for task in existing if self.keys.payload(task) not in items)
            if missing:
                return Unknown(missing)
        marks = [items[key] for key in map(self.keys.mark, needed) if key in items]
        if marks:
            self.mark = load_mark(marks[0])
            return None
        if len(needed) <= MAX_GUARDED_TOGETHER:
            guards, puts = self._guards(outer, items), [Put(self.keys.news(task), b"") for task in needed]
        else:
            found = self._witness_guards(call, outer)
            if found is None:
                return None
            guards, puts = found, []
        return self.answer(call.execute(self._addition(call, guards, puts)))

    def _outer(self) -> dict[TaskId, tuple[TaskId, ...]]:
        """Return the dependencies of each task that are not added before it."""
        added: set[TaskId] = set()
        outer: dict[TaskId, tuple[TaskId, ...]] = {}
        for step in self._steps:
            head = step.write.task.head
            outer[head.id] = tuple(task for task in dict.fromkeys(head.after) if task not in added)
            added.add(head.id)
        return outer

    def _guards(
        self, outer: Mapping[TaskId, Sequence[TaskId]], items: Mapping[str, KeyValue]
    ) -> dict[Guard, None]:
        """Return guards that hold while all dependencies exist unmarked."""
        guards: dict[Guard, None] = {}
        for step in self._steps:
            for task in outer[step.write.task.head.id]:
                guards[Absent(self.keys.mark(task))] = None
                if not step.write.waits_for_unknown:
                    key = self.keys.payload(task)
                    guards[Created(key, items[key].create_revision)] = None
        return guards

    def _witness_guards(
        self, call: EngineCall, outer: Mapping[TaskId, Sequence[TaskId]]
    ) -> dict[Guard, None] | None:
        """Put keys at all dependencies, and return the guards on the witness; None to look again."""
        guards: dict[Guard, None] = {}
        for step in self._steps:
            task = step.write.task.head.id
            if outer[task]:
                existing = not step.write.waits_for_unknown
                guarded = guard_dependencies(call, self.keys, task, outer[task], existing=existing)
                if guarded is None or guarded.missing or guarded.mark is not None:
                    return None
                guards |= dict.fromkeys(guarded.guards)
        return guards

    def _addition(self, call: EngineCall, guards: dict[Guard, None], puts: Sequence[Put]) -> Transaction:
        """Return the transaction that adds all; its puts are nested if they don't fit one list."""
        put = {each.key: each for each in puts}
        for step in self._steps:
            addition, task = step.addition_alone(), step.write.task.head
            guards |= dict.fromkeys(addition.guards)
            put |= {each.key: each for each in addition.then if isinstance(each, Put)}
            dependents = (Put(self.keys.dependent(needed, task.id), b"") for needed in task.after)
            put |= {each.key: each for each in dependents}
        limit, lists = call.max_operations, max(len(guards), call.max_operations // 2)
        operations = tuple(put.values())
        flat = Transaction(tuple(guards), operations)
        what = f"{len(self._steps)} tasks that are enqueued together"
        check_bytes(what, bytes_of(flat), call.max_request_bytes - SPARE_BYTES)
        if flat.length <= limit:
            return flat
        length = max(0, limit - lists)
        if lists * length < len(operations):
            raise RequestTooLarge(f"{what} need {len(operations)} operations; the limit is {lists * length}")
        nested = (operations[start : start + length] for start in range(0, len(operations), length))
        return Transaction(tuple(guards), tuple(Transaction(then=each) for each in nested))
