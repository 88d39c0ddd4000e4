"""``rebalanser tasks``: enqueues, shows, runs and serves tasks."""

from __future__ import annotations

import json as json_text
import time
from itertools import chain, islice
from typing import Annotated, Final

import typer
from pydantic import ValidationError
from pydantic_core import from_json

from rebalanser.cli import tasks_changing, tasks_outbox, tasks_running
from rebalanser.cli.arguments import parse_seconds
from rebalanser.cli.options import JsonOption, RegistryOption
from rebalanser.cli.output import Face, counted
from rebalanser.cli.tasks_lines import shown, status_lines, task_line, update_line
from rebalanser.cli.tasks_options import (
    CreateOption,
    NameOption,
    OlderThanOption,
    OutboxOption,
    QueueArgument,
    Selection,
    StatusOption,
    TaskArgument,
    opened,
)
from rebalanser.core.tasks.ids import is_task_id
from rebalanser.core.tasks.model import AfterFailure, EnqueueAnswer
from rebalanser.errors import InvalidTask
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks.checking import Check
from rebalanser.tasks.documents import FullTaskDocument, TaskDocument, UpdateDocument
from rebalanser.tasks.functions import EnqueueOptions, TaskOptions, problems_of
from rebalanser.tasks.operator import MAX_ROOMS
from rebalanser.tasks.producer import MAX_SHOWN, RETRIES
from rebalanser.tasks.queue import Queue
from rebalanser.tasks.results import Source, with_sources

NEWEST: Final = 100
"""Number of tasks that are listed with the newest first, unless it is given."""
LOOKED_AT: Final = 1000
"""Maximum number of tasks whose functions are compared with that of a new one."""

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Enqueue, show and run tasks, and serve them over HTTP.",
)
app.command()(tasks_running.worker)
app.command()(tasks_running.serve)
app.command()(tasks_running.schedules)
app.command()(tasks_running.trigger)
app.command()(tasks_outbox.outbox)
app.command()(tasks_changing.cancel)
app.command()(tasks_changing.requeue)
app.command()(tasks_changing.delete)
app.command()(tasks_changing.collect)
app.command()(tasks_changing.pause)
app.command()(tasks_changing.resume)


@app.command()
def enqueue(
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
            help="Whether to `wait`, `run` or `fail` once a task that it comes after is dead or cancelled.",
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
    priority: Annotated[int, typer.Option(metavar="NUMBER", help="Higher first.")] = 0,
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
            help="Make no task while one of this name and key is open: print that one's id.",
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
        typer.Option(metavar="KEY", show_default=False, help="By what limits per key count."),
    ] = None,
    max_running: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            show_default="any",
            help="Maximum of tasks of this name that are claimed at once.",
        ),
    ] = None,
    max_running_per_key: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", show_default="any", help="Maximum of those with the same --key."),
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
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """Enqueue a task, and print its id once it is durably stored.

    With --outbox also print whether it is `committed` to the engine or only `spooled` to the folder. The next
    process that opens the queue with this outbox forwards spooled tasks. A duplicate is said to be one.
    """
    if key is not None and max_running_per_key is None and rate_limit_per_key is None:
        raise typer.BadParameter(
            "--key means nothing without --max-running-per-key or --rate-limit-per-key: give one of them"
        )
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
    face = Face.of(registry, json)
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
    queue: QueueArgument,
    status: StatusOption = None,
    name: NameOption = None,
    older_than: OlderThanOption = None,
    newest: Annotated[bool, typer.Option("--newest", help="The newest first.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="NUMBER",
            show_default=f"all; {NEWEST} with --newest",
            help="Maximum number of tasks.",
        ),
    ] = None,
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """List the tasks in the order of their ids, as they are read; with --json an object per line."""
    face = Face.of(registry, json)
    chosen = Selection.of(status, name, older_than)
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
            face.remark("no such tasks" if chosen != Selection.of(None, None, None) else "no tasks")


@app.command()
def show(
    queue: QueueArgument, task: TaskArgument, registry: RegistryOption = None, json: JsonOption = False
) -> None:
    """Show a task with its payload and state."""
    face = Face.of(registry, json)
    with opened(face, queue) as tasks:
        ((stored, blockers),) = tasks.with_blockers([tasks.get(task)])
        room = tasks.rooms([stored]).get(task)
        document = FullTaskDocument.with_payload(stored, tasks.payload(task), blockers, room)
    face.answer(document, *shown(document, time.time()))


@app.command()
def log(
    queue: QueueArgument, task: TaskArgument, registry: RegistryOption = None, json: JsonOption = False
) -> None:
    """Show the updates of a task's claims, the earliest first; with --json an object per line."""
    face = Face.of(registry, json)
    with opened(face, queue) as tasks:
        document = None
        for update in tasks.log(task):
            document = UpdateDocument.of(update)
            face.answer(document, update_line(document))
        if document is None:
            face.remark("no updates")


@app.command()
def count(queue: QueueArgument, registry: RegistryOption = None, json: JsonOption = False) -> None:
    """Count the tasks in each status."""
    face = Face.of(registry, json)
    with opened(face, queue) as tasks:
        found = tasks.count()
    counts = {status.value: number for status, number in found.items()}
    face.answer(
        {"queue": queue, "counts": counts}, *(f"{status}: {number:,}" for status, number in counts.items())
    )


@app.command()
def status(queue: QueueArgument, registry: RegistryOption = None, json: JsonOption = False) -> None:
    """Show the tasks by status, the oldest ready one's age, what is paused, the workers, and what fails.

    A worker or server says every 10 seconds that it is there, and within a second what newly fails in it.
    """
    face = Face.of(registry, json)
    with opened(face, queue) as tasks:
        found = tasks.status()
    face.answer(found, *status_lines(found, time.time()))


@app.command()
def check(queue: QueueArgument, registry: RegistryOption = None, json: JsonOption = False) -> None:
    """Check that the store is consistent; exit with 1 if not.

    Checks that every claim's log is complete, that every status has the fields it needs, that dependencies
    exist, have no cycles and are neither dead nor cancelled, that ids and partitions are valid, and that the
    counts are right. Workers may run meanwhile. With --json an object per line, the last one with the sum.
    """
    face = Face.of(registry, json)
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
        raise InvalidTask(f"--result {text!r} is no FIELD=ID, nor FIELD=ID,ID")
    if wrong := [each for each in ids.split(",") if each and not is_task_id(each)]:
        raise InvalidTask(
            f"--result {text!r}: {wrong[0]!r} is no id of a task, which has 40 hexadecimal digits"
        )
    return field, tuple(filter(None, ids.split(","))) if "," in ids else ids


def _refuse_word(word: str) -> None:
    raise ValueError(f"{word} is not a number in JSON")
