"""``rebalanser tasks cancel``, ``requeue``, ``delete``, ``collect``, ``pause`` and ``resume``."""

from __future__ import annotations

import getpass
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Final

import typer

from rebalanser.cli.arguments import parse_span
from rebalanser.cli.options import JsonOption, RegistryOption
from rebalanser.cli.output import Face, counted, printable
from rebalanser.cli.tasks_lines import pause_line
from rebalanser.cli.tasks_options import (
    NameOption,
    OlderThanOption,
    QueueArgument,
    Selection,
    StatusOption,
    TasksArgument,
    YesOption,
    opened,
)
from rebalanser.core.tasks.model import OPEN, Status, Stored, TaskId
from rebalanser.errors import UnknownTask
from rebalanser.tasks.queue import Queue

CLOSED: Final = frozenset(Status) - OPEN
READ_AT_ONCE: Final = 1000
MAX_NAMES: Final = 10
"""Maximum number of functions that are named in an error."""


def cancel(
    queue: QueueArgument,
    tasks: TasksArgument = None,
    status: StatusOption = None,
    name: NameOption = None,
    older_than: OlderThanOption = None,
    yes: YesOption = False,
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """Cancel tasks: what a worker still writes for them is refused. Completed tasks stay complete.

    With --status, --name or --older-than those that match are counted first; waiting and claimed ones unless
    a status is given.
    """
    face = Face.of(registry, json)
    chosen = _chosen(tasks, Selection.of(status, name, older_than), OPEN)
    with opened(face, queue) as opened_queue:
        _change(face, opened_queue, tasks, chosen, yes, Queue.cancel_all, ("cancel", "cancelled", "complete"))


def requeue(
    queue: QueueArgument,
    tasks: TasksArgument = None,
    all_dead: Annotated[bool, typer.Option("--all-dead", help="All tasks whose last try failed.")] = False,
    status: StatusOption = None,
    name: NameOption = None,
    older_than: OlderThanOption = None,
    yes: YesOption = False,
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """Try dead or cancelled tasks again, with all their tries.

    With --status, --name or --older-than those that match are counted first; dead ones unless a status is
    given.
    """
    face = Face.of(registry, json)
    selection = Selection.of(status, name, older_than)
    dead = frozenset({Status.DEAD})
    if all_dead:
        if tasks or selection != Selection.of(None, None, None):
            raise typer.BadParameter("--all-dead goes with no other choice of tasks")
        selection = Selection(dead, None, 0.0)
    chosen = _chosen(tasks, selection, dead)
    with opened(face, queue) as opened_queue:
        words = ("requeue", "requeued", "neither dead nor cancelled")
        _change(face, opened_queue, tasks, chosen, yes or all_dead, Queue.requeue_all, words)


def delete(
    queue: QueueArgument,
    status: StatusOption = None,
    name: NameOption = None,
    older_than: OlderThanOption = None,
    yes: YesOption = False,
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """Delete complete, dead and cancelled tasks that match; they are counted first.

    A task stays as long as one that it is connected to by dependencies does not match. Cancel open tasks
    before. A deleted task's id is forgotten: enqueued again it is a new task.
    """
    if status and not CLOSED.issuperset(status):
        raise typer.BadParameter("open tasks are not deleted: cancel them first")
    face = Face.of(registry, json)
    chosen = _chosen(None, Selection.of(status, name, older_than), CLOSED, takes_ids=False)
    with opened(face, queue) as tasks:
        given = sum(1 for _ in chosen.tasks(tasks))
        _ask(face, yes, "delete", given)
        statuses = chosen.statuses or CLOSED
        done = tasks.collect(chosen.older_than_s, statuses=statuses, name=chosen.name)
    rest = max(0, given - done.tasks)
    face.answer(
        {"queue": queue, "given": given, "deleted": done.tasks},
        f"deleted {counted(done.tasks, 'task')}"
        + (f"; {rest:,} changed or {'is' if rest == 1 else 'are'} connected to others" if rest else ""),
    )


def collect(
    queue: QueueArgument,
    older_than: Annotated[
        float,
        typer.Option(
            parser=parse_span,
            metavar="SPAN",
            help="Only tasks enqueued longer ago than this, such as 90s, 15m, 2h, 3d or 1w.",
        ),
    ] = "1d",  # type: ignore[assignment] # typer parses the default too
    archive: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Append each task to this file first, a JSON object per line, with payload and log.",
        ),
    ] = None,
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """Delete complete tasks whose connected tasks (by dependencies) are all complete too.

    A task stays if it changed meanwhile or another one came to depend on it. Producers and workers may run
    meanwhile. A deleted task's id is forgotten: enqueued again it is a new task.
    """
    face = Face.of(registry, json)
    with opened(face, queue) as tasks:
        done = tasks.collect(older_than, archive)
    face.answer(
        {"queue": queue, "collected": done.tasks, "changed": done.changed},
        f"collected {counted(done.tasks, 'task')}"
        + (f"; {done.changed:,} changed meanwhile and stayed" if done.changed else ""),
    )


def _chosen(
    tasks: list[str] | None, selection: Selection, statuses: frozenset[Status], *, takes_ids: bool = True
) -> Selection:
    """Refuse a choice of none, or of both ids and others; return what it selects by itself."""
    is_given = selection != Selection.of(None, None, None)
    if tasks and is_given:
        raise typer.BadParameter(
            "ids of tasks go with no other choice: leave out --status, --name, --older-than"
        )
    if not tasks and not is_given:
        ids = "give ids of tasks, or " if takes_ids else ""
        raise typer.BadParameter(f"{ids}choose some with --status, --name or --older-than")
    return Selection(selection.statuses or statuses, selection.name, selection.older_than_s)


def _change(
    face: Face,
    queue: Queue,
    ids: list[str] | None,
    chosen: Selection,
    yes: bool,
    change: Callable[[Queue, Iterable[Stored]], int],
    words: tuple[str, str, str],
) -> None:
    """Change tasks by their ids, or those that are chosen once they are counted."""
    verb, participle, refused = words
    if ids:
        found = _found(queue, ids)
        given, changed = len(ids), change(queue, found)
    else:
        given = sum(1 for _ in chosen.tasks(queue))
        _ask(face, yes, verb, given)
        changed = change(queue, chosen.tasks(queue))
    rest = max(0, given - changed)
    face.answer(
        {"queue": queue.name, "given": given, participle: changed},
        f"{participle} {counted(changed, 'task')}"
        + (f"; {rest:,} {'was' if rest == 1 else 'were'} {refused}" if rest else ""),
    )


def _ask(face: Face, yes: bool, verb: str, given: int) -> None:
    """Ask the user for confirmation.

    Raises:
        typer.BadParameter: there is no terminal to ask at.
        typer.Abort: the user refuses.
    """
    if yes or not given:
        return
    if face.json or not sys.stdin.isatty():
        raise typer.BadParameter(f"{counted(given, 'task')} would be chosen to {verb}: give --yes")
    typer.confirm(f"{verb} {counted(given, 'task')}?", abort=True, err=True)


def _found(queue: Queue, ids: list[TaskId]) -> list[Stored]:
    """Read tasks; refuse the command if one does not exist, before any is changed."""
    tasks: list[Stored] = []
    for start in range(0, len(ids), READ_AT_ONCE):
        some = ids[start : start + READ_AT_ONCE]
        found = queue.context.read(some)
        if missing := [task for task in some if task not in found]:
            raise UnknownTask(f"there is no task {missing[0]} in queue {queue.name!r}; nothing was changed")
        tasks += [found[task] for task in some]
    return tasks


ScheduleOption = Annotated[
    str | None,
    typer.Option(
        "--schedule", metavar="NAME", show_default="the queue", help="The schedule of a periodic function."
    ),
]


def pause(
    queue: QueueArgument,
    schedule: ScheduleOption = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", show_default=False, help="Why, for people.")] = "",
    yes: YesOption = False,
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """Let workers claim no more tasks of a queue until it is resumed, also after restarts.

    Running tasks go on, and tasks can be enqueued. With --schedule only a periodic function is paused, and
    its ticks meanwhile are missed. One of which the queue has no task yet needs --yes: its name may be
    misspelt.
    """
    face = Face.of(registry, json)
    with opened(face, queue) as tasks:
        if schedule is not None and not yes:
            _refuse_misspelt(tasks, schedule)
        present = tasks.pause(reason, schedule=schedule, by=_person())
    document = {"queue": queue, "schedule": schedule, "pause": present.model_dump()}
    face.answer(document, pause_line(_paused(queue, schedule), present, time.time()))


def resume(
    queue: QueueArgument,
    schedule: ScheduleOption = None,
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """Resume a paused queue or schedule.

    The name of a schedule that was never paused and has no task is refused: it may be misspelt.
    """
    face = Face.of(registry, json)
    with opened(face, queue) as tasks:
        ended = tasks.resume(schedule=schedule)
    document = {"queue": queue, "schedule": schedule, "pause": None if ended is None else ended.model_dump()}
    what = "is resumed" if ended is not None else "is not paused"
    face.answer(document, f"{_paused(queue, schedule)} {what}")


def _paused(queue: str, schedule: str | None) -> str:
    return f"queue {queue}" if schedule is None else f"schedule {printable(schedule)} of queue {queue}"


def _person() -> str:
    """Return the user and the host, for people."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container whose user has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _refuse_misspelt(queue: Queue, name: str) -> None:
    """Refuse a schedule without a task among the oldest and the newest ones of a queue.

    Raises:
        typer.BadParameter: there is none.
    """
    names = queue.seen_names()
    if name not in names:
        known = f"; there are tasks of: {', '.join(sorted(names)[:MAX_NAMES])}" if names else ""
        raise typer.BadParameter(
            f"--schedule {name}: queue {queue.name} has no task of this function{known}. Is the name "
            "misspelt? Give --yes to pause a schedule that has had no tick yet"
        )
