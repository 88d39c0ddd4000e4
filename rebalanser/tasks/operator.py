"""The operator of a queue: looks at tasks, cancels, requeues, pauses and deletes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path
from typing import Final

from rebalanser.core.tasks import rules
from rebalanser.core.tasks.clocks import room_at
from rebalanser.core.tasks.ids import created_at, lowest_id_at
from rebalanser.core.tasks.model import LimitRoom, Status, Stored, TaskId, Update, is_seconds
from rebalanser.core.tasks.retention import Collected
from rebalanser.core.tasks.rules import Decision, Refused
from rebalanser.core.tasks.writes import PendingMove
from rebalanser.errors import InvalidArgument, InvalidTask, UnknownTask
from rebalanser.tasks import pauses
from rebalanser.tasks.ancestry import with_blockers
from rebalanser.tasks.batcher import result_of
from rebalanser.tasks.functions import is_count, require_id, require_revision
from rebalanser.tasks.open_queue import OpenQueue
from rebalanser.tasks.pauses import Pause
from rebalanser.tasks.retention import RetentionRecord, TaskArchive, collect
from rebalanser.tasks.status import QueueStatus, workers_of

MAX_ROOMS: Final = 500
"""Maximum number of listed tasks, the first ones, that show the room that their limits leave."""
SEEN: Final = 1000
"""Maximum number of tasks whose functions are compared with a name that may be misspelt."""
MAX_NEAR: Final = 3
"""Maximum number of close names in an error."""
CHANGED_AT_ONCE: Final = 500
"""Number of tasks that are cancelled or requeued together."""
FIRST_LOOK_BACK_S: Final = 1.0
"""Seconds before now in which the newest tasks are searched first."""
LOOK_BACK_RATIO: Final = 8.0
"""Factor by which that time grows at each further look."""


class Operator(OpenQueue):
    """Operations that read and change the tasks of a queue."""

    def payload(self, task: TaskId) -> bytes:
        """Return a task's payload as it was enqueued.

        Raises:
            UnknownTask: there is no task of this id.
        """
        require_id(task)
        found = self.context.engine.payloads(self.name, [task], self._timeout_s)
        if task not in found:
            raise UnknownTask(f"there is no task {task} in queue {self.name!r}")
        return found[task]

    def log(self, task: TaskId) -> Iterator[Update]:
        """Iterate over the updates of a task's claims, the earliest first, read page by page (SK-9)."""
        claim = self.get(task).state.claim
        if claim is not None:
            yield from self.context.log(task, claim.number + 1)

    def tasks(
        self,
        statuses: frozenset[Status] | None = None,
        *,
        page: int = 1000,
        after: TaskId | None = None,
        at_least: int = 0,
        name: str | None = None,
        older_than_s: float = 0.0,
    ) -> Iterator[Stored]:
        """Iterate over tasks by id, from the one after ``after`` on, read page by page (SK-12).

        With a ``name`` only over tasks of this function. With ``older_than_s`` only over those that were
        enqueued more than this many seconds ago, by the clocks of the hosts that made their ids. Each page is
        as of revision ``at_least`` or later (SK-11).

        Raises:
            InvalidArgument: ``statuses`` names an unknown one; ``older_than_s`` is no number of seconds from
                0; or another option is of a wrong type.
        """
        before = self._enqueued_before(older_than_s)
        if not is_count(page, 1):
            raise InvalidArgument(f"page is {page!r}: give a number of tasks from 1")
        require_revision(at_least)
        for option, text in (("after", after), ("name", name)):
            if text is not None and not isinstance(text, str):
                raise InvalidArgument(f"{option} is {text!r}: give a text, or None")
        if statuses is not None:
            statuses = _known(statuses)
        while True:
            found = self.context.engine.page(
                self.name, self._timeout_s, statuses=statuses, after=after, limit=page, at_least=at_least
            )
            for each in found.items:
                if created_at(each.head.id) > before:
                    return
                if name is None or each.head.name == name:
                    yield each
            after = found.next
            if after is None:
                return

    def _enqueued_before(self, older_than_s: float) -> float:
        """Return the wall time before which tasks of an age were enqueued; infinity for an age of 0."""
        if not is_seconds(older_than_s):  # also NaN, which would choose all tasks
            raise InvalidArgument(f"older_than_s is {older_than_s!r}: give seconds from 0")
        return self._clock.wall() - older_than_s if older_than_s else math.inf

    def newest(
        self,
        limit: int,
        statuses: frozenset[Status] | None = None,
        *,
        name: str | None = None,
        older_than_s: float = 0.0,
    ) -> list[Stored]:
        """Read at most ``limit`` of the tasks that ``tasks`` reads: the newest ones, the newest first.

        Reads back from the present, ever farther until there are enough.

        Raises:
            InvalidArgument: ``limit`` or ``older_than_s`` is below 0, or as ``tasks``.
        """
        given: object = limit
        if not is_count(given):
            raise InvalidArgument(f"limit is {limit!r}: give a number of tasks from 0")
        self._enqueued_before(older_than_s)
        now, back_s = self._clock.wall() - older_than_s, FIRST_LOOK_BACK_S
        while True:
            first = lowest_id_at(now - back_s)
            tasks = self.tasks(statuses, after=first, name=name, older_than_s=older_than_s)
            found = deque(tasks, maxlen=limit)
            if len(found) == limit or back_s >= now:
                return list(reversed(found))
            back_s *= LOOK_BACK_RATIO

    def with_blockers(self, tasks: Iterable[Stored]) -> Iterator[tuple[Stored, tuple[Stored, ...]]]:
        """Pair tasks with the dead and cancelled ones that they wait for, directly or not; at most 10 each.

        Such a task waits until those are requeued and complete, or until it is cancelled.
        """
        return with_blockers(tasks, self.context.read)

    def rooms(self, tasks: Iterable[Stored]) -> dict[TaskId, LimitRoom]:
        """Find the room that limits leave to those of these tasks that wait, as it is now (SK-23).

        A task is missing if it has no limit, or, on etcd, if its partition has more tasks than are counted.
        """
        limited = [each for each in tasks if each.head.is_limited and each.state.status is Status.WAITING]
        limits = {each.head.limit for each in limited}
        if not limits:
            return {}
        engine = self.context.engine
        running = engine.running(self.name, limits, self._timeout_s)
        marks = engine.rates(self.name, limits, self._timeout_s)
        return {
            each.head.id: LimitRoom(running[limit], room_at(each.head, marks.get(limit)))
            for each in limited
            if (limit := each.head.limit) in running
        }

    def count(self) -> dict[Status, int]:
        """Count the tasks in each status, also those that no task is in (SK-12)."""
        counted = self.context.engine.count(self.name, self._timeout_s)
        return {status: counted.get(status, 0) for status in Status}

    def status(self) -> QueueStatus:
        """Read the counts by status, the age of the oldest task that waits for a worker, and the workers.

        On etcd it reads all tasks, page by page.

        Raises:
            RegistryUnavailable: the engine did not answer in time.
        """
        engine, wall = self.context.engine, self._clock.wall()
        since = engine.ready_since(self.name, wall, self._timeout_s)
        workers = workers_of(engine.workers(self.name, self._timeout_s))
        retained = self.retained()
        return QueueStatus(
            queue=self.name,
            counts=self.count(),
            oldest_ready_s=None if since is None else wall - since,
            workers=tuple(sorted(workers, key=lambda each: (each.worker, each.started))),
            pauses=self.pauses(),
            deleted=retained.deleted_ever,
            swept=retained.swept_at or None,
        )

    def pause(self, reason: str = "", *, schedule: str | None = None, by: str | None = None) -> Pause:
        """Claim no more tasks of the queue, in any process, until ``resume``, also after restarts.

        Once this has returned, nothing is claimed (SK-23). Running bodies continue; claims that have not
        begun are given back, and their tries are not counted. Tasks can still be enqueued. With ``schedule``,
        the name of a periodic function, only its ticks stop; ticks during the pause are missed.

        ``by`` is the author, the label of this process if None. If it is paused already, the present pause is
        returned unchanged.

        Raises:
            InvalidTask: this process has schedules, and none of that name.
            InvalidArgument: ``reason`` or ``by`` is over 1,000 characters.
            RegistryUnavailable: the engine is away; nothing was paused.
            OutcomeUnknown: it may be paused; pause it again.
        """
        self._refuse_unknown_schedule(schedule)
        return pauses.pause(self.context, schedule, self._label if by is None else by, reason)

    def resume(self, *, schedule: str | None = None) -> Pause | None:
        """End the pause of the queue, or of a schedule; return it, None if there was none (SK-23).

        Idle workers begin to claim at once. A schedule continues with its next tick.

        Raises what ``pause`` does, and

        Raises:
            InvalidTask: no schedule has the name: none was ever paused, and there is no task of it.
        """
        self._refuse_unknown_schedule(schedule)
        ended = pauses.resume(self.context, schedule)
        if ended is None and schedule is not None:
            self._refuse_unseen_schedule(schedule)
        return ended

    def seen_names(self) -> set[str]:
        """Return the names of the functions of the oldest and the newest tasks, ``SEEN`` of each."""
        looked_at = chain(islice(self.tasks(), SEEN), self.newest(SEEN))
        return {each.head.name for each in looked_at}

    def _refuse_unseen_schedule(self, name: str) -> None:
        if name in self.functions:
            return
        known = pauses.read_pauses(self.context).keys() | self.seen_names()
        if name not in known:
            near = get_close_matches(name, known, MAX_NEAR)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise InvalidTask(
                f"no schedule of queue {self.name!r} has the name {name!r}: none was paused by it, and there "
                f"is no task of it{hint}"
            )

    def _refuse_unknown_schedule(self, name: str | None) -> None:
        names = [each.name for each in self._schedules]
        if name is not None and names and name not in names:
            raise InvalidTask(f"no periodic function {name!r} is registered; there are: {', '.join(names)}")

    def cancel(self, task: TaskId) -> Status:
        """Cancel a task, unless it is complete; return its status."""
        return self._change(task, lambda stored: rules.cancel(stored.state))

    def requeue(self, task: TaskId) -> Status:
        """Requeue a dead or cancelled task, with all its tries (SK-15); return its status."""
        return self._change(task, lambda stored: rules.requeue(stored.state))

    def cancel_all(self, tasks: Iterable[Stored]) -> int:
        """Cancel tasks as ``cancel`` does, many at once; return the number of cancelled ones.

        Raises:
            InvalidArgument: ``tasks`` has something else than tasks, such as ids.
        """
        return self._change_all(tasks, lambda stored: rules.cancel(stored.state))

    def requeue_all(self, tasks: Iterable[Stored]) -> int:
        """Requeue tasks as ``requeue`` does, many at once; return the number of requeued ones.

        Raises:
            InvalidArgument: ``tasks`` has something else than tasks, such as ids.
        """
        return self._change_all(tasks, lambda stored: rules.requeue(stored.state))

    def _change(self, task: TaskId, rule: Callable[[Stored], Decision]) -> Status:
        settled = self.context.write(PendingMove(self.get(task), rule))
        return self.get(task).state.status if isinstance(settled, Refused) else settled.state.status

    def _change_all(self, tasks: Iterable[Stored], rule: Callable[[Stored], Decision]) -> int:
        given: object = tasks
        if not isinstance(given, Iterable):
            raise InvalidArgument(f"{given!r} is no list of tasks: give what tasks() returns")
        changed, rest = 0, iter(tasks)
        while batch := list(islice(rest, CHANGED_AT_ONCE)):
            _require_tasks(batch)
            pending_writes = [PendingMove(stored, rule) for stored in batch]
            self.context.batcher.write_all(pending_writes)
            changed += sum(not isinstance(result_of(pending), Refused) for pending in pending_writes)
        return changed

    def collect(
        self,
        older_than_s: float = 86_400.0,
        archive: Path | None = None,
        *,
        statuses: frozenset[Status] = frozenset({Status.COMPLETED}),
        name: str | None = None,
    ) -> Collected:
        """Delete complete tasks that were enqueued longer ago, each with all that it is connected to (SK-14).

        A task is deleted only together with all tasks that it is connected to by dependencies, once all of
        them have one of ``statuses``, and are of the function ``name`` if one is given. Open tasks are never
        deleted. With ``archive`` each task is first appended to that file, with its payload and its log. If
        ``older_than_s`` is 0, tasks whose ids have a time in the future are deleted too.

        Raises:
            InvalidArgument: as ``tasks``.
            RetryLater: the engine was away; another call continues.
            UnusableFolder: the archive can't be written.
        """
        before, statuses = self._enqueued_before(older_than_s), _known(statuses)
        if archive is not None and not isinstance(archive, Path):
            raise InvalidArgument(f"archive is {archive!r}: give a file as pathlib.Path, or None")

        def may_go(stored: Stored) -> bool:
            head = stored.head
            return (
                stored.state.status in statuses
                and (name is None or head.name == name)
                and created_at(head.id) <= before
            )

        steps = collect(self.context, self.tasks, may_go, None if archive is None else TaskArchive(archive))
        return sum(steps, Collected())

    def retained(self) -> RetentionRecord:
        """Read the time of the last sweep, and the numbers of tasks that sweeps deleted (SK-22)."""
        return RetentionRecord.of(self.context.engine.note(self.name, self._timeout_s))


def _require_tasks(given: Iterable[object]) -> None:
    for each in given:
        if not isinstance(each, Stored):
            raise InvalidArgument(f"{each!r} is not a task: give what tasks() or get(ID) returns")


def _known(statuses: Iterable[Status]) -> frozenset[Status]:
    """Return statuses that a caller has given, also as text.

    Raises:
        InvalidArgument: one of them is unknown.
    """
    try:
        given = (statuses,) if isinstance(statuses, str) else tuple(statuses)
        return frozenset(Status(each) for each in given)
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"statuses are {statuses!r}: give a set of some of {', '.join(Status)}, or None for all"
        ) from None
