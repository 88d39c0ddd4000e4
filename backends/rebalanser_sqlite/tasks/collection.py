"""Collection of a great many tasks in steps, each a transaction of its own (SK-14).

All tasks are marked first, then one write decides, then they are deleted. A crash before the decision leaves
marks without effect. After a crash behind it, the next large collection deletes the remaining tasks, or the
first write that meets one does. Until the decision, any write that changes a marked task, or makes another
depend on it, gives the collection up (``rebalanser_sqlite.tasks.writer.Writing``). A file has one collection
at a time: the next one gives up an undecided one, and finishes a decided one.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from rebalanser.core.tasks.model import OPEN
from rebalanser.core.tasks.store import Answer, Applied, Collect, WriteConflict
from rebalanser.errors import OutcomeUnknown, RebalanserError
from rebalanser_sqlite.tasks.rows import id_bytes
from rebalanser_sqlite.tasks.schema import STATUSES
from rebalanser_sqlite.tasks.writer import STEP, Writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any

    from rebalanser.core.tasks.model import TaskId

_UNDER_WAY = "SELECT number, decided FROM skuld_collections"
_BEGIN = "INSERT INTO skuld_collections (number, decided) VALUES (?, 0)"
_GIVE_UP = "DELETE FROM skuld_collections"
_DECIDE = "UPDATE skuld_collections SET decided = 1 WHERE number = ?"
_FIND = "SELECT number, status FROM skuld_tasks WHERE queue = ? AND id = ? AND partition = ? AND revision = ?"
_MARK = "INSERT INTO skuld_collected (task) VALUES (?)"
_MARKED = "SELECT task, queue, status FROM skuld_collected LEFT JOIN skuld_tasks ON number = task LIMIT ?"
_UNMARK = "DELETE FROM skuld_collected WHERE task = ?"
_UNMARK_SOME = "DELETE FROM skuld_collected WHERE task IN (SELECT task FROM skuld_collected LIMIT ?)"

ItemT = TypeVar("ItemT")


def collect(write: Collect, commit: Callable[[Callable[[Writing], Any]], Any]) -> Answer:
    """Collect closed tasks, all or none; ``commit`` executes each step in a transaction.

    Raises:
        OutcomeUnknown: the collection is decided, but not all tasks are deleted yet.
        RebalanserError: an error of ``commit`` before the decision; no effect.
    """
    number = None
    while number is None:
        number = commit(partial(_begin, queue=write.queue))
    marked: set[int] = set()
    for tasks in _parts(write.tasks.items()):
        found = commit(partial(_mark, number=number, queue=write.queue, tasks=tasks))
        if found is None:
            return WriteConflict()
        marked.update(found)
    for ids in _parts(write.tasks):
        if commit(partial(_others_depend, queue=write.queue, tasks=ids, marked=marked)):
            return WriteConflict()
    decided = commit(partial(_decide, number=number, queue=write.queue))
    if decided is None:
        return WriteConflict()
    try:
        while commit(_sweep):
            pass
    except RebalanserError as error:
        raise OutcomeUnknown(
            f"the collection has taken effect, but not all is deleted yet: {error}"
        ) from error
    return Applied(decided)


def _begin(writing: Writing, queue: str) -> int | None:
    """Begin a collection and return its number; None if a final step of another one was done instead."""
    under_way = _under_way(writing)
    if under_way is not None and under_way[1]:
        _sweep(writing)
        return None
    writing.cursor.execute(_GIVE_UP)
    if writing.cursor.execute(_UNMARK_SOME, (STEP,)).rowcount:
        return None
    number = writing.changes(writing.queue(queue))
    writing.cursor.execute(_BEGIN, (number,))
    return number


def _under_way(writing: Writing) -> tuple[int, int] | None:
    row: tuple[int, int] | None = writing.cursor.execute(_UNDER_WAY).fetchone()
    return row


def _mark(
    writing: Writing, number: int, queue: str, tasks: Sequence[tuple[TaskId, tuple[int, int]]]
) -> list[int] | None:
    """Mark tasks and return their numbers; None if one has changed or is open, or the collection was given
    up."""
    if _under_way(writing) != (number, 0):
        return None
    cursor, queue_number = writing.cursor, writing.queue(queue)
    marked: list[int] = []
    for task, (partition, revision) in tasks:
        row = cursor.execute(_FIND, (queue_number, id_bytes(task), partition, revision)).fetchone()
        if row is None or STATUSES[row[1]] in OPEN:
            return None
        marked.append(row[0])
    cursor.executemany(_MARK, ((each,) for each in marked))
    return marked


def _others_depend(writing: Writing, queue: str, tasks: Sequence[TaskId], marked: set[int]) -> bool:
    queue_number = writing.queue(queue)
    return any(writing.others_depend(queue_number, task, marked) for task in tasks)


def _decide(writing: Writing, number: int, queue: str) -> int | None:
    """Decide that all marked tasks are deleted, and return the revision; None if it was given up."""
    if not writing.cursor.execute(_DECIDE, (number,)).rowcount:
        return None
    return writing.changes(writing.queue(queue))


def _sweep(writing: Writing) -> bool:
    """Delete some tasks of the decided collection; True if there may be more."""
    found = writing.cursor.execute(_MARKED, (STEP,)).fetchall()
    for number, queue, status in found:
        if queue is None:  # a process of an earlier version has deleted it
            writing.cursor.execute(_UNMARK, (number,))
        else:
            writing.forget(queue, number, status)
    if len(found) == STEP:
        return True
    writing.cursor.execute(_GIVE_UP)
    return False


def _parts(items: Iterable[ItemT]) -> Iterator[list[ItemT]]:
    iterator = iter(items)
    while part := list(islice(iterator, STEP)):
        yield part
