"""The step that adds a task.

A task may depend on others. What makes sure that these still exist when the task is added is a guard on each
of them; where they are many (:mod:`~rebalanser.tasks.key_value.foundations`), it is one on the witness. A
task that the same transaction adds needs no guard of its own: it exists afterwards if the guards under which
it is added hold, so the new task is added under these too.

Each of them is told by two keys: one names the new task, so that it is found whoever collects what it
depends on; the other is only put, so that a collection that has looked already finds it changed. And none of
them may be marked by a collection, which could not find the new task any more.

A task that an outbox forwards is added under a guard on the outbox's tally, and counted there
(:mod:`~rebalanser.tasks.key_value.tallies`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rebalanser.registry.contract import Absent, Created, Get, Guard, KeyValue, Outcome, Put, Transaction
from rebalanser.tasks.engine import Answer, Applied, Conflict, Enqueue, Exists, Taken, Unknown
from rebalanser.tasks.key_value.foundations import lay_foundation
from rebalanser.tasks.key_value.keys import QueueKeys
from rebalanser.tasks.key_value.limits import Limits
from rebalanser.tasks.key_value.steps import Found, Otherwise, Planned, Read, Step, check_bytes, read_item
from rebalanser.tasks.key_value.tallies import EntryOfOutbox
from rebalanser.tasks.key_value.values import (
    dump_head,
    dump_place,
    dump_state,
    dump_task,
    is_short,
    load_mark,
    load_place,
    load_task,
)
from rebalanser.tasks.key_value.visits import Visit
from rebalanser.tasks.model import TaskId

FEW: Final = 16
"""So many tasks that one depends on are guarded one by one."""


class EnqueueStep(Step):
    """A new task."""

    def __init__(self, write: Enqueue, keys: QueueKeys, limits: Limits) -> None:
        self.keys = keys
        self._write = write
        self._id = write.task.head.id
        self._lies_in = write.partition
        self.adds = self._payload_key = keys.payload(self._id)
        self._after = tuple(dict.fromkeys(write.task.head.after))
        self._missing: tuple[TaskId, ...] = ()
        self.entry = None if write.forwarded is None else EntryOfOutbox(write.forwarded, keys)
        self._tally_guards: tuple[Guard, ...] = ()
        self._puts = self._task_puts = self._made_puts(limits)
        if self.entry is not None:
            self._puts += (self.entry.count(),)
        if len(self._after) <= FEW:
            self.news = tuple(map(keys.news, self._after))
            self._puts += tuple(Put(keys.dependent(task, self._id), b"") for task in self._after)

    @property
    def is_alone(self) -> bool:
        """Whether the task depends on no other."""
        return not self._after

    def lone_addition(self) -> Transaction:
        """What adds the task, if it depends on no other; the outbox's tally aside."""
        return Transaction((Absent(self._payload_key),), self._task_puts)

    def _made_puts(self, limits: Limits) -> tuple[Put, ...]:
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

    def wanted(self) -> Sequence[Read]:
        """The outbox's tally, what it depends on, and whether that is marked."""
        if len(self._after) > FEW:
            return ()
        tally = () if self.entry is None else (Get(self.entry.key),)
        marks = (Get(self.keys.mark(task)) for task in self._after)
        if self._write.waits_for_unknown:
            return (*tally, *marks)
        return (*tally, *(Get(self.keys.payload(task)) for task in self._after), *marks)

    def plan(self, found: Found) -> Planned:
        """Put the task where its id is not taken, if all that it depends on is there still."""
        if len(self._after) > FEW:
            return Otherwise.ALONE
        refusal = self._refused_by_tally(found.items)
        if refusal is not None:
            return refusal
        for task in self._after:
            if (mark := found.items.get(self.keys.mark(task))) is not None:
                self.mark = load_mark(mark)
                return Otherwise.AGAIN
        missing = [task for task in self._after if not self._exists(task, found)]
        if any(self.keys.payload(task) in found.unread for task in missing):
            return Otherwise.LATER
        self._missing = tuple(missing)
        if missing:
            return self._refusal()
        foundation = (*self._tally_guards, *self._foundation(found))
        found.added[self._payload_key] = foundation
        return self._addition(foundation)

    def carry_out_alone(self, visit: Visit) -> Answer | None:
        """Tell all that it depends on, then add it; see :mod:`~rebalanser.tasks.key_value.foundations`."""
        refusal = self._refused_by_tally({} if self.entry is None else visit.get([self.entry.key]))
        if refusal is not None:
            return refusal
        existing = not self._write.waits_for_unknown
        foundation = lay_foundation(visit, self.keys, self._id, self._after, existing=existing)
        if foundation is None:
            return None
        self._missing = foundation.missing
        self.mark = foundation.mark
        if self.mark is not None:
            return None
        guards = (*self._tally_guards, *foundation.guards)
        nested = self._refusal() if self._missing else self._addition(guards)
        return self.answer(visit.execute(nested))

    def answer(self, outcome: Outcome) -> Answer | None:
        """Applied, taken, or without what it depends on; None where that changed in the meantime."""
        if outcome.succeeded:
            return Unknown(self._missing) if self._missing else Applied(outcome.revision)
        state, place, long_payload, *tally = map(read_item, outcome.results)
        refusal = self._refused_by_tally({item.key: item for item in tally if item is not None})
        if refusal is not None:
            return refusal
        if place is None:
            return None
        self._lies_in = load_place(place).partition
        payload = load_place(place).payload
        if payload is None and long_payload is not None:
            payload = long_payload.value
        if state is None or payload is None:
            return None
        partition, task = self.keys.partition_and_task(state.key)
        entry = load_task(self.keys.queue, partition, task, state.key, state.value, state.mod_revision)
        return Exists(entry.stored, payload)

    def _addition(self, foundation: Sequence[Guard]) -> Transaction:
        return Transaction((Absent(self._payload_key), *foundation), self._puts, self._reads())

    def _refusal(self) -> Transaction:
        """It depends on what is not there; but if its id is taken, that is the answer."""
        return Transaction((Absent(self._payload_key), *self._tally_guards), (), self._reads())

    def _reads(self) -> tuple[Get, ...]:
        state_key = self.keys.state(self._lies_in, self._id)
        tally = () if self.entry is None else (Get(self.entry.key),)
        return (Get(state_key), Get(self._payload_key), Get(self.keys.long_payload(self._id)), *tally)

    def _refused_by_tally(self, items: Mapping[str, KeyValue]) -> Taken | Conflict | None:
        """Why the entry may not be taken as the tally was read; if it may, that is guarded from now on."""
        if self.entry is None:
            return None
        self._tally_guards = (self.entry.guard(items),)
        return self.entry.refusal(items)

    def _exists(self, task: TaskId, found: Found) -> bool:
        key = self.keys.payload(task)
        return self._write.waits_for_unknown or key in found.added or key in found.items

    def _foundation(self, found: Found) -> tuple[Guard, ...]:
        """Guards that hold only if all that it depends on exists unmarked when it is added."""
        guards: dict[Guard, None] = {}
        for task in self._after:
            guards[Absent(self.keys.mark(task))] = None
            key = self.keys.payload(task)
            if key in found.added:
                guards |= dict.fromkeys(found.added[key])
            elif not self._write.waits_for_unknown:
                guards[Created(key, found.items[key].create_revision)] = None
        return tuple(guards)
