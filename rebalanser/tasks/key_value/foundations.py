"""What a task stands on that depends on more tasks than one transaction can guard.

First the *witness* is put, a key that every collection deletes. Then all that the task depends on is looked
at and told of the task, in as many transactions as that takes; and then the task is added under the guard
that the witness is still there: nothing was collected in between, so all that existed exists.

If the task is never added, what was told of it stays until what it would have depended on is collected.
Whoever collects that finds no such task and takes no notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rebalanser.registry.contract import Absent, Created, Get, Guard, KeyValue, Put, Transaction
from rebalanser.tasks.key_value.keys import QueueKeys
from rebalanser.tasks.key_value.steps import read_item
from rebalanser.tasks.key_value.values import load_mark
from rebalanser.tasks.key_value.visits import Visit
from rebalanser.tasks.model import TaskId

TASKS_AT_ONCE: Final = 50


@dataclass(frozen=True, slots=True)
class Foundation:
    """The guards to add a task under; or what is missing, or the collection that stands in the way."""

    guards: tuple[Guard, ...] = ()
    missing: tuple[TaskId, ...] = ()
    mark: str | None = None


def lay_foundation(
    visit: Visit, keys: QueueKeys, task: TaskId, after: Sequence[TaskId], *, existing: bool
) -> Foundation | None:
    """Tell the tasks ``after`` that ``task`` is going to depend on them; None if one was marked meanwhile.

    ``existing`` says that all of them must exist.
    """
    witness = _witness(visit, keys)
    missing: list[TaskId] = []
    for start in range(0, len(after), TASKS_AT_ONCE):
        group = after[start : start + TASKS_AT_ONCE]
        items = visit.get([*map(keys.payload, group), *map(keys.mark, group)])
        marks = [items[key] for key in map(keys.mark, group) if key in items]
        if marks:
            return Foundation(mark=load_mark(marks[0]))
        if existing:
            missing += [each for each in group if keys.payload(each) not in items]
        if not missing and not visit.execute(_telling(keys, task, group)).succeeded:
            return None
    return Foundation((Created(keys.witness, witness.create_revision),), tuple(missing))


def _telling(keys: QueueKeys, task: TaskId, group: Sequence[TaskId]) -> Transaction:
    dependents = (Put(keys.dependent(each, task), b"") for each in group)
    news = (Put(keys.news(each), b"") for each in group)
    return Transaction(tuple(Absent(keys.mark(each)) for each in group), (*dependents, *news))


def _witness(visit: Visit, keys: QueueKeys) -> KeyValue:
    """The key that the next collection deletes, put now if it is not there."""
    key = keys.witness
    outcome = visit.execute(Transaction((Absent(key),), (Put(key, b""),), (Get(key),)))
    item = read_item(outcome.results[0])
    return item or KeyValue(key, b"", outcome.revision, outcome.revision)
