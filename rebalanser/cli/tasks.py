"""``rebalanser tasks``: enqueues, shows, changes, runs and serves tasks."""

from __future__ import annotations

import getpass
import json as json_text
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Final

import typer
from pydantic import ValidationError
from pydantic_core import from_json

from rebalanser.cli import tasks_running
from rebalanser.cli.arguments import parse_seconds, parse_span
from rebalanser.cli.commands import Commands
from rebalanser.cli.options import JsonOption, RegistryOptions, YesOption
from rebalanser.cli.output import Face, counted, printable
from rebalanser.cli.tasks_options import (
    ChangeOptions,
    CreateOption,
    OutboxOption,
    QueueArgument,
    SelectionOptions,
    TaskArgument,
    TasksArgument,
    opened,
    pause_line,
    shown,
    status_lines,
    task_line,
    update_line,
)
from rebalanser.core.tasks.ids import created_at, is_task_id
from rebalanser.core.tasks.model import OPEN, AfterFailure, EnqueueAnswer, Status, Stored, TaskId
from rebalanser.errors import InvalidTask, UnknownTask, UnusableFolder
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks.checking import Check
from rebalanser.tasks.documents import (
    FullTaskDocument,
    SpoolDocument,
    SpooledDocument,
    TaskDocument,
    UpdateDocument,
)
from rebalanser.tasks.functions import EnqueueOptions, TaskOptions, problems_of
from rebalanser.tasks.operator import MAX_ROOMS
from rebalanser.tasks.producer import MAX_SHOWN, RETRIES
from rebalanser.tasks.queue import Queue
from rebalanser.tasks.results import Source, with_sources
from rebalanser.tasks.spool import SUFFIX, Spool

NEWEST: Final = 100
"""Number of tasks that are listed with the newest first, unless it is given."""
LOOKED_AT: Final = 1000
"""Maximum number of tasks whose functions are compared with that of a new one."""
SPOOL_TIMEOUT_S: Final = 10.0
"""Maximum seconds to wait for the file of an outbox."""
CLOSED: Final = frozenset(Status) - OPEN
READ_AT_ONCE: Final = 1000
MAX_NAMES: Final = 10
"""Maximum number of functions that are named in an error."""

ScheduleOption = Annotated[
    str | None,
    typer.Option(
        "--schedule", metavar="NAME", show_default="the queue", help="The schedule of a periodic function."
    ),
]

app = Commands("Enqueue, show and run tasks, and serve them over HTTP.")
app.command()(tasks_running.worker)
app.command()(tasks_running.serve)
app.command()(tasks_running.schedules)
app.command()(tasks_running.trigger)


@app.command()
def outbox(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", show_default=False, help="The outbox of the producers.")
    ],
    forget_refused: Annotated[
        bool, typer.Option("--forget-refused", help="Delete refused tasks after showing them.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show the tasks that wait in an outbox for the engine, and those that it has refused, with the reasons.

    Producers may run meanwhile. With --json an object per line, the sums of each queue after its tasks.
    """
    face = Face.of("", json)
    spools = _spools(folder)
    if not spools:
        face.answer({"queue": None, "waiting": 0, "refused": 0}, f"no queue has used {folder}")
    for path in spools:
        with closing(Spool(path, None, SPOOL_TIMEOUT_S)) as spool:
            _show(face, spool, forget_refused=forget_refused)


def _spools(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UnusableFolder(f"there is no folder {folder}")
    try:
        return sorted(folder.glob(f"*{SUFFIX}"))
    except OSError as error:
        raise UnusableFolder(f"{folder} can't be read: {error.strerror}") from error


def _show(face: Face, spool: Spool, *, forget_refused: bool) -> None:
    waiting = refused = 0
    for entry in spool.waiting():
        waiting += 1
        document = SpooledDocument.of(entry.enqueue.task, "", "")
        face.answer(document, *_lines(document))
    for entry in spool.refused():
        refused += 1
        kind, reason = ("", "") if entry.refusal is None else (entry.refusal.kind, entry.refusal.reason)
        document = SpooledDocument.of(entry.enqueue.task, kind, reason)
        face.answer(document, *_lines(document))
        if forget_refused:
            spool.forget(entry.number)
    name = spool.name()
    summary = SpoolDocument(queue=name.queue, engine=name.engine, waiting=waiting, refused=refused)
    face.answer(
        summary,
        f"queue {printable(name.queue)} at {printable(name.engine)}: {counted(waiting, 'task')} "
        f"{'waits' if waiting == 1 else 'wait'}, {refused:,} {'was' if refused == 1 else 'were'} refused",
    )


def _lines(task: SpooledDocument) -> Iterator[str]:
    """Return a task in one or two lines."""
    created = ""
    if is_task_id(task.id):
        at = datetime.fromtimestamp(created_at(task.id), UTC)
        created = f", of {at.isoformat(sep=' ', timespec='seconds')}"
    yield f"{task.id} {printable(task.name)}: {task.status}{created}"
    if task.reason:
        yield f"  {task.kind}: {printable(task.reason)}"


@app.command()
def cancel(
    change: ChangeOptions, on: RegistryOptions, queue: QueueArgument, tasks: TasksArgument = None
) -> None:
    """Cancel tasks: what a worker still writes for them is refused. Completed tasks stay complete.

    With --status, --name or --older-than the tasks that match are counted, and you are asked first. Without
    --status these are waiting and claimed ones.
    """
    face = on.face()
    chosen = _chosen(tasks, change, OPEN)
    words = ("cancel", "cancelled", "complete")
    with opened(face, queue) as opened_queue:
        _change(face, opened_queue, tasks, chosen, change.yes, Queue.cancel_all, words)


@app.command()
def requeue(
    change: ChangeOptions,
    on: RegistryOptions,
    queue: QueueArgument,
    tasks: TasksArgument = None,
    all_dead: Annotated[bool, typer.Option("--all-dead", help="All tasks whose last try failed.")] = False,
) -> None:
    """Try dead or cancelled tasks again, with all their tries.

    With --status, --name or --older-than the tasks that match are counted, and you are asked first. Without
    --status these are dead ones.
    """
    face = on.face()
    if all_dead and (tasks or not change.takes_all):
        raise typer.BadParameter("--all-dead can't be combined with ids, --status, --name or --older-than")
    dead = frozenset({Status.DEAD})
    chosen = SelectionOptions([*dead]) if all_dead else _chosen(tasks, change, dead)
    with opened(face, queue) as opened_queue:
        words = ("requeue", "requeued", "neither dead nor cancelled")
        _change(face, opened_queue, tasks, chosen, change.yes or all_dead, Queue.requeue_all, words)


@app.command()
def delete(change: ChangeOptions, on: RegistryOptions, queue: QueueArgument) -> None:
    """Delete complete, dead and cancelled tasks that match; they are counted first.

    A task stays while a task that dependencies connect to it does not match. Cancel open tasks first. A
    deleted task's id is forgotten: enqueued again it is a new task.
    """
    if change.status and not CLOSED.issuperset(change.status):
        raise typer.BadParameter("open tasks are not deleted: cancel them first")
    face = on.face()
    chosen = _chosen(None, change, CLOSED, takes_ids=False)
    with opened(face, queue) as tasks:
        given = sum(1 for _ in chosen.tasks(tasks))
        _ask(face, change.yes, "delete", given)
        statuses = chosen.statuses or CLOSED
        done = tasks.collect(chosen.older_than or 0.0, statuses=statuses, name=chosen.name)
    rest = max(0, given - done.tasks)
    face.answer(
        {"queue": queue, "given": given, "deleted": done.tasks},
        f"deleted {counted(done.tasks, 'task')}"
        + (f"; {rest:,} changed or {'is' if rest == 1 else 'are'} connected to others" if rest else ""),
    )


@app.command()
def collect(
    on: RegistryOptions,
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
) -> None:
    """Delete complete tasks whose connected tasks (by dependencies) are all complete too.

    A task stays if it changed meanwhile or another one came to depend on it. Producers and workers may run
    meanwhile. A deleted task's id is forgotten: enqueued again it is a new task.
    """
    face = on.face()
    with opened(face, queue) as tasks:
        done = tasks.collect(older_than, archive)
    face.answer(
        {"queue": queue, "collected": done.tasks, "changed": done.changed},
        f"collected {counted(done.tasks, 'task')}"
        + (f"; {done.changed:,} changed meanwhile and stayed" if done.changed else ""),
    )


def _chosen(
    tasks: list[str] | None,
    selection: SelectionOptions,
    statuses: frozenset[Status],
    *,
    takes_ids: bool = True,
) -> SelectionOptions:
    """Return the selection, with ``statuses`` unless a status is given.

    Raises:
        typer.BadParameter: nothing selects tasks, or both ids and options do.
    """
    is_given = not selection.takes_all
    if tasks and is_given:
        raise typer.BadParameter(
            "ids can't be combined with --status, --name or --older-than: leave one of them out"
        )
    if not tasks and not is_given:
        ids = "give ids of tasks, or " if takes_ids else ""
        raise typer.BadParameter(f"{ids}choose some with --status, --name or --older-than")
    return SelectionOptions(list(selection.statuses or statuses), selection.name, selection.older_than)


def _change(
    face: Face,
    queue: Queue,
    ids: list[str] | None,
    chosen: SelectionOptions,
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
        raise typer.BadParameter(f"this would {verb} {counted(given, 'task')}: give --yes to confirm")
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


@app.command()
def pause(
    on: RegistryOptions,
    queue: QueueArgument,
    schedule: ScheduleOption = None,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", show_default=False, help="The reason, which tasks status shows.")
    ] = "",
    yes: YesOption = False,
) -> None:
    """Let workers claim no more tasks of a queue until it is resumed, also after restarts.

    Running tasks go on, and tasks can be enqueued. With --schedule only a periodic function is paused, and
    its ticks meanwhile are missed. A schedule of which the queue has no task yet needs --yes, as its name may
    be misspelt.
    """
    face = on.face()
    with opened(face, queue) as tasks:
        if schedule is not None and not yes:
            _refuse_misspelt(tasks, schedule)
        present = tasks.pause(reason, schedule=schedule, by=_person())
    document = {"queue": queue, "schedule": schedule, "pause": present.model_dump()}
    face.answer(document, pause_line(_paused(queue, schedule), present, time.time()))


@app.command()
def resume(on: RegistryOptions, queue: QueueArgument, schedule: ScheduleOption = None) -> None:
    """Resume a paused queue or schedule.

    The name of a schedule that was never paused and has no task is refused: it may be misspelt.
    """
    face = on.face()
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


@app.command()
def enqueue(
    on: RegistryOptions,
    queue: QueueArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="The function's name.")],
    arguments: Annotated[
        str,
        typer.Argument(
            metavar="JSON",
            help="The arguments; for a Python function an object with its arguments by name.",
        ),
    ] = "{}",
    delay: Annotated[
        float,
        typer.Option(
            parser=parse_seconds,
            metavar="SPAN",
            help="Minimum time before it runs, in seconds, or such as 15m or 2h.",
        ),
    ] = "0",  # type: ignore[assignment] # typer parses the default too
    after: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID", show_default=False, help="A task that must be complete first; repeatable."
        ),
    ] = None,
    after_failure: Annotated[
        AfterFailure,
        typer.Option(
            metavar="CHOICE",
            help="Reaction once a task of --after is dead or cancelled: `wait`, `run` or `fail`.",
        ),
    ] = AfterFailure.WAIT,
    result: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=ID",
            show_default=False,
            help="An argument that is the result of a task, or with `FIELD=ID,ID` a list of results; "
            "repeatable. The task waits for these.",
        ),
    ] = None,
    priority: Annotated[
        int, typer.Option(metavar="NUMBER", help="Tasks with a higher number run first.")
    ] = 0,
    retries: Annotated[
        int, typer.Option(metavar="NUMBER", help="Maximum number of tries after the first one.")
    ] = RETRIES,
    timeout: Annotated[
        float | None,
        typer.Option(
            parser=parse_seconds,
            metavar="SPAN",
            show_default="any time",
            help="Maximum time of one try, in seconds, or such as 15m.",
        ),
    ] = None,
    task_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            show_default="a new one",
            help="The task's id; enqueueing it twice makes one task.",
        ),
    ] = None,
    unique_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            show_default=False,
            help="Enqueue nothing while a task of this name and key is open; print the id of that task.",
        ),
    ] = None,
    unique_for: Annotated[
        float | None,
        typer.Option(
            parser=parse_seconds,
            metavar="SPAN",
            show_default=False,
            help="Nor for this long from when it was enqueued, in seconds or such as 2h; without a key, the "
            "arguments are the key.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="KEY", show_default=False, help="The key for the limits per key."),
    ] = None,
    max_running: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            show_default="any",
            help="Maximum number of tasks of this name that are claimed at once.",
        ),
    ] = None,
    max_running_per_key: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER", show_default="any", help="Maximum number of those with the same --key."
        ),
    ] = None,
    rate_limit: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            show_default="any",
            help="Maximum rate at which tasks of this name are claimed, such as 10/s or '100/m burst 20'.",
        ),
    ] = None,
    rate_limit_per_key: Annotated[
        str | None,
        typer.Option(metavar="RATE", show_default="any", help="Maximum rate of those with the same --key."),
    ] = None,
    create: CreateOption = False,
    outbox: OutboxOption = None,
) -> None:
    """Enqueue a task, and print its id once it is durably stored.

    With --outbox also print whether it is `committed` to the engine or only `spooled` to the folder. The next
    process that opens the queue with this outbox forwards spooled tasks. For a duplicate print `duplicate`.
    """
    if key is not None and max_running_per_key is None and rate_limit_per_key is None:
        raise typer.BadParameter("--key needs --max-running-per-key or --rate-limit-per-key")
    payload = with_sources(_payload(arguments), dict(map(_result, result or ())))
    try:
        options = EnqueueOptions(
            delay_s=delay,
            after=tuple(after or ()),
            after_failure=after_failure,
            priority=priority,
            task_id=task_id,
            unique_key=unique_key,
            unique_for_s=unique_for,
            key=key,
        )
        tried = TaskOptions(retries=retries, timeout_s=timeout)
    except ValidationError as error:
        raise InvalidTask(problems_of(error)) from error
    face = on.face()
    with opened(face, queue, create=create, outbox=outbox) as tasks:
        if outbox is None:
            _warn_of_name(tasks, name)
        made = tasks.build_raw_enqueue(
            name,
            payload,
            options,
            retries=tried.retries,
            timeout_s=tried.timeout_s,
            max_running=max_running,
            max_running_per_key=max_running_per_key,
            rate_limit=rate_limit,
            rate_limit_per_key=rate_limit_per_key,
        )
        enqueued = tasks.commit_one(made)
    says_where = outbox is not None or enqueued.answer is EnqueueAnswer.DUPLICATE
    lines = (enqueued, enqueued.answer) if says_where else (enqueued,)
    face.answer({"queue": queue, "id": enqueued, "answer": enqueued.answer}, *lines)


@app.command("list")
def list_tasks(
    chosen: SelectionOptions,
    on: RegistryOptions,
    queue: QueueArgument,
    newest: Annotated[bool, typer.Option("--newest", help="Show the newest first.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="NUMBER",
            show_default=f"all; {NEWEST} with --newest",
            help="Maximum number of tasks.",
        ),
    ] = None,
) -> None:
    """List the tasks in the order of their ids, as they are read; with --json an object per line."""
    face = on.face()
    with opened(face, queue) as tasks:
        _warn_of_pause(tasks)
        page = 1000 if limit is None else min(limit, 1000)
        found = chosen.newest(tasks, limit or NEWEST) if newest else islice(chosen.tasks(tasks, page), limit)
        document = None
        left = iter(found)
        first = list(islice(left, MAX_ROOMS))
        rooms = tasks.rooms(first)
        for stored, blockers in tasks.with_blockers(chain(first, left)):
            document = TaskDocument.of(stored, blockers, rooms.get(stored.head.id))
            face.answer(document, task_line(document, time.time()))
        if document is None:
            face.remark("no tasks" if chosen.takes_all else "no such tasks")


@app.command()
def show(on: RegistryOptions, queue: QueueArgument, task: TaskArgument) -> None:
    """Show a task with its payload and state."""
    face = on.face()
    with opened(face, queue) as tasks:
        ((stored, blockers),) = tasks.with_blockers([tasks.get(task)])
        room = tasks.rooms([stored]).get(task)
        document = FullTaskDocument.with_payload(stored, tasks.payload(task), blockers, room)
    face.answer(document, *shown(document, time.time()))


@app.command()
def log(on: RegistryOptions, queue: QueueArgument, task: TaskArgument) -> None:
    """Show the updates of a task's claims, the earliest first; with --json an object per line."""
    face = on.face()
    with opened(face, queue) as tasks:
        document = None
        for update in tasks.log(task):
            document = UpdateDocument.of(update)
            face.answer(document, update_line(document))
        if document is None:
            face.remark("no updates")


@app.command()
def count(on: RegistryOptions, queue: QueueArgument) -> None:
    """Count the tasks in each status."""
    face = on.face()
    with opened(face, queue) as tasks:
        found = tasks.count()
    counts = {status.value: number for status, number in found.items()}
    face.answer(
        {"queue": queue, "counts": counts}, *(f"{status}: {number:,}" for status, number in counts.items())
    )


@app.command()
def status(on: RegistryOptions, queue: QueueArgument) -> None:
    """Show the tasks by status, the oldest ready one's age, what is paused, the workers, and what fails.

    Workers and servers report every 10 seconds that they are alive, and within a second what newly fails in
    them.
    """
    face = on.face()
    with opened(face, queue) as tasks:
        found = tasks.status()
    face.answer(found, *status_lines(found, time.time()))


@app.command()
def check(on: RegistryOptions, queue: QueueArgument) -> None:
    """Check that the store is consistent; exit with 1 if not.

    Checks that every claim's log is complete, that every status has the fields it needs, that dependencies
    exist, have no cycles and are neither dead nor cancelled, that ids and partitions are valid, and that the
    counts are right. Workers may run meanwhile. With --json an object per line, the last one with the sum.
    """
    face = on.face()
    faults = 0
    with opened(face, queue) as tasks:
        looked = Check(tasks.context.engine, queue, tasks.partition_count, tasks.context.timeout_s)
        for finding in looked.findings():
            faults += 1
            document = {"fault": finding.fault.value, "task": finding.task, "message": finding.message}
            place = f"task {finding.task}" if finding.task else f"queue {queue}"
            face.answer(document, f"{finding.fault}: {place}: {finding.message}")
    summary = {"queue": queue, "checked": looked.checked, "findings": faults}
    uncounted = "" if looked.counts_compared else "; its counts changed too fast to be compared"
    face.answer(
        {**summary, "counts_compared": looked.counts_compared},
        f"checked {counted(looked.checked, 'task')}: {counted(faults, 'finding')}{uncounted}",
    )
    if faults:
        raise typer.Exit(1)


def _warn_of_pause(queue: Queue) -> None:
    present = queue.pauses().queue
    if present is not None:
        get_logger().warning(
            f"the queue is {present.describe(time.time())}", action="queue_paused", queue=queue.name
        )


def _warn_of_name(queue: Queue, name: str) -> None:
    """Warn of a name that no other task has: the task would wait for ever if that is misspelt."""
    known = {each.head.name for each in islice(queue.tasks(page=LOOKED_AT), LOOKED_AT)}
    if known and name not in known:
        get_logger().warning(
            "the queue has no other task of this function: it waits until a worker has one; is it misspelt?",
            action="task_name_unknown",
            queue=queue.name,
            name=name,
            known=", ".join(sorted(known)[:MAX_SHOWN]),
        )


def _payload(text: str) -> bytes:
    try:
        from_json(text)  # reads as many levels as a worker does
        json_text.loads(text, parse_constant=_refuse_word)
    except ValueError as error:
        raise InvalidTask(f"the arguments are not JSON: {error}") from error
    return text.encode()


def _result(text: str) -> tuple[str, Source]:
    field, _, ids = text.partition("=")
    if not field or not ids:
        raise InvalidTask(f"--result {text!r}: write FIELD=ID or FIELD=ID,ID")
    if wrong := [each for each in ids.split(",") if each and not is_task_id(each)]:
        raise InvalidTask(
            f"--result {text!r}: {wrong[0]!r} is not a task's id, which has 40 hexadecimal digits"
        )
    return field, tuple(filter(None, ids.split(","))) if "," in ids else ids


def _refuse_word(word: str) -> None:
    raise ValueError(f"{word} is not a number in JSON")
