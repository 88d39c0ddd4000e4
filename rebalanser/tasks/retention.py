"""Retention: closed tasks, with all that they are connected to, are deleted in time (SK-14, SK-22).

A task does not store when it was closed, but its revision shows it: a state was written before any later
revision of the store was read. So a worker notes from time to time the store's revision, as a *mark*, and a
task counts as closed at the first mark that is not older than its state. That is never too early. It is late
by a tenth of the time at most, or by the time without a worker. A closed task costs nothing for that. Tasks
that were closed before the first mark, as by an earlier version, count as closed then.

Marks are in the note of the queue, with the name of the worker that sweeps now: one at a time. If a worker
dies, another one follows after ``LEASE_S``. Two at a time, whose clocks differ, do no harm: the store deletes
nothing that has changed.

A sweep reads the tasks that were enqueued longer ago than the shortest time, in the order of their ids. It
finds the tasks to delete, and those that stay: open ones, those that are kept longer, and all that are
connected to these. It takes small steps and rests longer than it works.

**Collection** deletes closed tasks with all that they are connected to by dependencies. The tasks of a queue
are read page by page, once for their dependencies and once for their states. Tasks without dependencies and
dependents are collected as they are met. The connections of the others are kept in memory until the end, so
that the memory grows with the number of dependencies, not of tasks. The store decides: it refuses to delete a
task whose state has changed since, or on which another task depends by now.
"""

from __future__ import annotations

import base64
import json
import os
import random
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from rebalanser.core.tasks.ids import created_at
from rebalanser.core.tasks.model import CLOSED_UNDONE, OPEN, Status, Stored, TaskId
from rebalanser.core.tasks.retention import (
    SHORTEST_INTERVAL_S,
    Collected,
    Components,
    Mark,
    Marks,
    Retention,
    StoredAt,
)
from rebalanser.core.tasks.store import Applied, Collect, QueueNote
from rebalanser.errors import QuotaExceeded, RequestTooLarge, UnusableFolder
from rebalanser.folders import make_file
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks.context import Context
from rebalanser.tasks.loops import Loop

_log = get_logger()


TASKS_AT_ONCE: Final = 500
"""Default number of tasks that a collection reads or deletes at once."""


def collect(
    context: Context,
    tasks: Callable[[], Iterator[Stored]],
    may_go: Callable[[Stored], bool],
    archive: TaskArchive | None = None,
    at_once: int = TASKS_AT_ONCE,
) -> Iterator[Collected]:
    """Collect the closed tasks that may go; yield the counts after each step, which reads or deletes
    ``at_once`` tasks.

    ``tasks`` reads tasks of the queue, each time anew: all that could depend on one another and may go. With
    an ``archive`` each is written there first.

    Raises:
        RetryLater: the engine was away; collected tasks stay so, and another call continues.
    """
    connected: set[TaskId] = set()
    for page in _pages(tasks(), at_once):
        for stored in page:
            if stored.head.after:
                connected.update((stored.head.id, *stored.head.after))
        yield Collected(looked_at=len(page))
    components = Components()
    undone: dict[TaskId, Status] = {}
    """Tasks of the component that were dead or cancelled."""
    for page in _pages(tasks(), at_once):
        going = {each.head.id for each in page if each.state.status not in OPEN and may_go(each)}
        for stored in (each for each in page if each.head.id in connected):
            components.add(stored, keep=stored.head.id not in going)
        undone |= _undone(each for each in page if each.head.id in going and each.head.id in connected)
        alone = [each for each in page if each.head.id in going and each.head.id not in connected]
        yield _delete(context, [_lone_component(each) for each in alone], _undone(alone), archive)
    for parts in _filled(components.collectable(), at_once):
        yield _delete(context, parts, undone, archive)


def _pages(tasks: Iterator[Stored], size: int) -> Iterator[list[Stored]]:
    while page := list(islice(tasks, size)):
        yield page


def _filled(parts: Iterator[dict[TaskId, StoredAt]], size: int) -> Iterator[list[dict[TaskId, StoredAt]]]:
    """Group components in lists of about ``size`` tasks; a larger one is alone."""
    filled: list[dict[TaskId, StoredAt]] = []
    tasks = 0
    for part in parts:
        if filled and tasks + len(part) > size:
            yield filled
            filled, tasks = [], 0
        filled.append(part)
        tasks += len(part)
    if filled:
        yield filled


def _undone(tasks: Iterable[Stored]) -> dict[TaskId, Status]:
    return {each.head.id: each.state.status for each in tasks if each.state.status in CLOSED_UNDONE}


def _lone_component(stored: Stored) -> dict[TaskId, StoredAt]:
    """Return the component of a task without dependencies and dependents."""
    return {stored.head.id: (stored.partition, stored.revision)}


class TaskArchive:
    """A file of collected tasks, one JSON object a line: the task, its state, its payload and its log.

    A task that could not be deleted after it was written is written again once it is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, context: Context, ids: Sequence[TaskId]) -> None:
        """Append tasks, synced to the disk before they are deleted.

        Raises:
            UnusableFolder: they can't be written there.
        """
        found = context.read(ids)
        payloads = context.engine.payloads(context.queue, ids, context.timeout_s)
        present = [task for task in ids if task in found and task in payloads]
        lines = [json.dumps(_document(context, found[task], payloads[task])) for task in present]
        make_file(self._path)
        try:
            with self._path.open("a") as file:
                file.writelines(line + "\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UnusableFolder(
                f"collected tasks can't be written to {self._path}: {error.strerror}"
            ) from error


def _document(context: Context, stored: Stored, payload: bytes) -> Mapping[str, Any]:
    claims = 0 if stored.state.claim is None else stored.state.claim.number + 1
    log = [asdict(update) for update in context.log(stored.head.id, claims)]
    document = asdict(stored) | {"payload": payload, "log": log}
    return json.loads(json.dumps(document, default=_as_text))  # type: ignore[no-any-return]


def _as_text(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{value!r} has no place in a line of JSON")


def _delete(
    context: Context,
    parts: Sequence[dict[TaskId, StoredAt]],
    undone: Mapping[TaskId, Status],
    archive: TaskArchive | None,
) -> Collected:
    """Delete each component as a whole, or not at all if a task of it has changed.

    A component that is too large for a request of the engine is kept.
    """
    if not parts:
        return Collected()
    if archive is not None:
        archive.write(context, [task for part in parts for task in part])
    try:
        answers = context.engine.apply([Collect(context.queue, part) for part in parts], context.timeout_s)
    except RequestTooLarge as error:
        if len(parts) > 1:
            return sum((_delete(context, [part], undone, None) for part in parts), Collected())
        _log.error(
            f"{len(parts[0])} tasks that depend on each other are too many to be deleted together: they stay",
            action="tasks_not_collected",
            queue=context.queue,
            task=min(parts[0]),
            error=str(error),
        )
        return Collected()
    gone = [
        task
        for part, answer in zip(parts, answers, strict=True)
        if isinstance(answer, Applied)
        for task in part
    ]
    were = Counter(undone[task] for task in gone if task in undone)
    changed = sum(map(len, parts)) - len(gone)
    return Collected(len(gone), changed, were[Status.DEAD], were[Status.CANCELLED])


MIN_AGE_S: Final = 300.0
"""Minimum age of a deleted task, so that an enqueue that is repeated within this time finds it (SK-3)."""
FIRST_SWEEP_WITHIN_S: Final = 10.0
"""Maximum seconds between the start of a worker and its first sweep."""
TASKS_PER_STEP: Final = 100
"""Number of tasks that a step of a sweep reads or deletes."""
REST_RATIO: Final = 3.0
"""Rest after each step of a sweep, relative to the time of the step."""
IDLE_PAUSE_RATIO: Final = 20.0
"""Minimum pause after a sweep that found little to delete, relative to the time of that sweep."""
STOP_TIMEOUT_S: Final = 2.0
"""Maximum seconds that a stopping worker waits for its sweep."""
LEASE_S: Final = 60.0
"""Seconds after which another worker may sweep, unless the sweeper has renewed its record."""


class RetentionRecord(BaseModel):
    """Retention state that the workers of a queue share, in the queue's note."""

    model_config = ConfigDict(frozen=True)

    marks: tuple[Mark, ...] = ()
    sweeper: str = ""
    """The worker that sweeps, until ``until``; empty if none does."""
    until: float = 0.0
    next_at: float = 0.0
    """Time of the next sweep."""
    swept_at: float = 0.0
    """End of the last sweep; times are in seconds since 1970."""
    deleted: int = 0
    """Number of tasks that the last sweep deleted."""
    deleted_ever: int = 0

    @classmethod
    def of(cls, note: QueueNote) -> RetentionRecord:
        """Return the record in a note; an empty one if there is none, or this version can't read it."""
        try:
            return cls.model_validate_json(note.content)
        except ValidationError:
            return cls()

    def wait_s(self, now: float, sweeper: str) -> float:
        """Seconds before a worker may sweep; 0 also after a clock was set back."""
        if self.sweeper not in {"", sweeper} and now < self.until <= now + LEASE_S:
            return self.until - now
        return self.next_at - now if self.swept_at <= now < self.next_at else 0.0


class Sweeper:
    """Deletes closed tasks whose time is over, whenever no other worker of the queue does; in a thread.

    ``tasks`` reads all tasks of the queue in the order of their ids, each time anew, ``worker`` is a label.
    """

    def __init__(
        self, context: Context, tasks: Callable[[], Iterator[Stored]], retention: Retention, worker: str
    ) -> None:
        self._context = context
        self._tasks = tasks
        self._retention = retention
        self._name = f"{worker}-{secrets.token_hex(4)}"
        self._ending = threading.Event()
        self._pause_s = random.uniform(0.0, min(retention.interval_s, FIRST_SWEEP_WITHIN_S))  # noqa: S311 - no secret
        self._loop = Loop("retention", self._step, context.errors)

    def start(self) -> None:
        """Start the thread."""
        self._loop.start()

    def stop(self) -> None:
        """End after the present step, and wait for that if it is short; another worker continues."""
        self._ending.set()
        self._loop.end_soon()
        self._loop.join(STOP_TIMEOUT_S)

    def sweep(self) -> float:
        """Delete tasks whose time is over, unless another worker does or has just done so; return the seconds
        until the next look.

        Raises:
            RegistryUnavailable: the engine is away; deleted tasks stay so.
        """
        context, clock = self._context, self._context.clock
        record = self._record()
        if wait_s := record.wait_s(clock.wall(), self._name):
            return min(wait_s, self._retention.interval_s)
        revision = context.engine.page(context.queue, context.timeout_s, limit=1).revision
        mark = Mark(clock.wall(), revision)
        marks = Marks(record.marks).with_mark(mark, self._retention.longest_s)
        if not self._put(lambda record: record.model_copy(update={"marks": tuple(marks)})):
            return SHORTEST_INTERVAL_S
        began = clock.now()
        done = self._delete(marks)
        took_s = clock.now() - began
        if done.tasks:
            self._log(done, took_s)
        if self._ending.is_set():
            self._put(partial(_ended, wall=clock.wall(), next_s=0.0, done=done))
            return 0.0
        interval_s = self._retention.interval_s
        if 0 < done.looked_at <= 2 * done.tasks:  # more may be done than one sweep in that time deletes
            next_s = max(interval_s - took_s, SHORTEST_INTERVAL_S)
        else:
            next_s = max(interval_s, IDLE_PAUSE_RATIO * took_s)
        self._put(partial(_ended, wall=clock.wall(), next_s=next_s, done=done))
        return next_s

    def _delete(self, marks: Marks) -> Collected:
        """Delete in small steps, and rest after each; end early if another worker has taken over."""
        clock, done, kept_at = self._context.clock, Collected(), self._context.clock.now()
        steps = self._steps(marks)
        while not self._ending.is_set():
            began = clock.now()
            step = next(steps, None)
            if step is None:
                break
            done += step
            self._ending.wait(REST_RATIO * (clock.now() - began))
            if clock.now() - kept_at > LEASE_S / 3:
                kept_at = clock.now()
                if not self._put(lambda record: record):
                    break
        return done

    def _steps(self, marks: Marks) -> Iterator[Collected]:
        retention, now = self._retention, self._context.clock.wall()
        assert retention.shortest_s is not None
        before = now - max(retention.shortest_s, MIN_AGE_S)

        def old() -> Iterator[Stored]:
            return takewhile(lambda stored: created_at(stored.head.id) <= before, self._tasks())

        def may_go(stored: Stored) -> bool:
            kept_s, closed_at = retention.seconds(stored.state.status), marks.closed_at(stored.revision)
            if kept_s is None or closed_at is None or now - closed_at < kept_s:
                return False
            if stored.head.unique_key and now < created_at(stored.head.id) + stored.head.unique_for_s:
                return False
            return all(created_at(task) <= before for task in stored.head.after)

        return collect(self._context, old, may_go, at_once=TASKS_PER_STEP)

    def _record(self) -> RetentionRecord:
        return RetentionRecord.of(self._context.engine.note(self._context.queue, self._context.timeout_s))

    def _put(self, change: Callable[[RetentionRecord], RetentionRecord]) -> bool:
        """Put the record, changed, as that of this sweeper; False if another one sweeps.

        A full store takes no note, and has to be emptied nevertheless.
        """
        context = self._context
        note = context.engine.note(context.queue, context.timeout_s)
        record = RetentionRecord.of(note)
        now = context.clock.wall()
        if record.sweeper != self._name and record.wait_s(now, self._name):
            return False
        taken = record.model_copy(update={"sweeper": self._name, "until": now + LEASE_S})
        content = change(taken).model_dump_json().encode()
        try:
            return context.engine.put_note(context.queue, content, note.version, context.timeout_s)
        except QuotaExceeded:
            return True

    def _log(self, done: Collected, took_s: float) -> None:
        _log.info(
            "deleted tasks whose time was over",
            action="tasks_deleted",
            queue=self._context.queue,
            completed=done.tasks - done.dead - done.cancelled,
            dead=done.dead,
            cancelled=done.cancelled,
            changed=done.changed,
            took_s=round(took_s, 3),
        )

    def _step(self) -> bool:
        if self._ending.wait(self._pause_s):
            return False
        self._pause_s = 0.0  # if this fails, the loop pauses
        self._pause_s = self.sweep() + random.uniform(0.0, SHORTEST_INTERVAL_S)  # noqa: S311
        return not self._ending.is_set()


def _ended(record: RetentionRecord, *, wall: float, next_s: float, done: Collected) -> RetentionRecord:
    """Return the record after a sweep."""
    return record.model_copy(
        update={
            "sweeper": "",
            "until": 0.0,
            "next_at": wall + next_s,
            "swept_at": wall,
            "deleted": done.tasks,
            "deleted_ever": record.deleted_ever + done.tasks,
        }
    )
