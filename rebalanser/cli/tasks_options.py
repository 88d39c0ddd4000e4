"""The options of the commands on tasks, the opening of a queue, and tasks as lines of text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer
from typer.models import OptionInfo

from rebalanser.cli.arguments import parse_span
from rebalanser.cli.options import YesOption
from rebalanser.cli.output import Face, printable
from rebalanser.core.tasks.ids import created_at, is_task_id
from rebalanser.core.tasks.model import AfterFailure, Status, Stored
from rebalanser.core.tasks.retention import Retention
from rebalanser.errors import UnknownQueue
from rebalanser.registry.urls import REGISTRY_VARIABLE
from rebalanser.settings import Settings
from rebalanser.tasks.documents import Content, FullTaskDocument, TaskDocument, UpdateDocument
from rebalanser.tasks.pauses import Pause
from rebalanser.tasks.queue import Queue
from rebalanser.tasks.status import QueueStatus

FOREVER: Final = "forever"


def _parse_keep(text: str) -> float:
    return math.inf if text == FOREVER else parse_span(text)


def _keep_option(option: str, status: str, default: str) -> OptionInfo:
    return typer.Option(  # type: ignore[no-any-return]
        option,
        parser=_parse_keep,
        metavar=f"SPAN|{FOREVER}",
        show_default=f"that of the queue, or {default}",
        help=f"How long {status} tasks are kept, such as 12h or 4w.",
    )


def retained(
    retention: Retention | None, completed_s: float | None, dead_s: float | None, cancelled_s: float | None
) -> Retention | None:
    """Return a retention with what the command line says instead."""
    given = {"completed_s": completed_s, "dead_s": dead_s, "cancelled_s": cancelled_s}
    chosen = {key: None if value == math.inf else value for key, value in given.items() if value is not None}
    if not chosen:
        return retention
    base = retention or Retention(completed_s=None, dead_s=None, cancelled_s=None)
    return replace(base, **chosen)


QueueArgument = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.", show_default=False)]
TaskArgument = Annotated[str, typer.Argument(metavar="ID", help="The task's id.", show_default=False)]
TasksArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="The tasks' ids.", show_default=False)
]
StatusOption = Annotated[
    list[Status] | None,
    typer.Option("--status", show_default="any", help="Only tasks in this status; repeatable."),
]
NameOption = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", show_default="any", help="Only tasks of this function."),
]
OlderThanOption = Annotated[
    float | None,
    typer.Option(
        "--older-than",
        parser=parse_span,
        metavar="SPAN",
        show_default="any",
        help="Only tasks enqueued longer ago than this, such as 90s, 15m, 2h, 3d or 1w.",
    ),
]
KeepCompletedOption = Annotated[float | None, _keep_option("--keep-completed", "complete", "7d")]
KeepDeadOption = Annotated[float | None, _keep_option("--keep-dead", "dead", "30d")]
KeepCancelledOption = Annotated[float | None, _keep_option("--keep-cancelled", "cancelled", "7d")]
CreateOption = Annotated[bool, typer.Option("--create", help="Create the queue if it does not exist.")]


OutboxOption = Annotated[
    Path | None,
    typer.Option(
        "--outbox",
        metavar="FOLDER",
        show_default=False,
        help="A folder on this host's disk that takes tasks while the engine is away.",
    ),
]


@dataclass(frozen=True, slots=True)
class SelectionOptions:
    """The options that select tasks, by status, function and age in seconds."""

    status: StatusOption = None
    name: NameOption = None
    older_than: OlderThanOption = None

    @property
    def takes_all(self) -> bool:
        """True if no option was given."""
        return not self.status and self.name is None and not self.older_than

    @property
    def statuses(self) -> frozenset[Status] | None:
        """The statuses of the tasks; None for all."""
        return frozenset(self.status) if self.status else None

    def tasks(self, queue: Queue, page: int = 1000) -> Iterator[Stored]:
        """Read the tasks in the order of their ids."""
        return queue.tasks(self.statuses, page=page, name=self.name, older_than_s=self.older_than or 0.0)

    def newest(self, queue: Queue, limit: int) -> list[Stored]:
        """Return the newest tasks, the newest first."""
        return queue.newest(limit, self.statuses, name=self.name, older_than_s=self.older_than or 0.0)


@dataclass(frozen=True, slots=True)
class ChangeOptions(SelectionOptions):
    """The options that select the tasks to change."""

    yes: YesOption = False


@contextmanager
def opened(
    face: Face,
    name: str,
    *,
    create: bool = False,
    claim_ttl_s: float = 30.0,
    outbox: Path | None = None,
) -> Iterator[Queue]:
    """Open an existing queue, or create it; wait at most ``connect_timeout_s`` for the engine."""
    settings = Settings()
    try:
        with face.patience(settings):
            queue = Queue(
                name,
                face.url,
                claim_ttl_s=claim_ttl_s,
                settings=settings,
                timeout_s=settings.connect_timeout_s,
                create=create,
                outbox=outbox,
            )
    except UnknownQueue as error:
        raise UnknownQueue(
            f"{error}; say with --registry or {REGISTRY_VARIABLE} the registry of the queue"
        ) from error
    with queue:
        yield queue


def task_line(task: TaskDocument, wall: float) -> str:
    """Return a task in one line; ``wall`` is seconds since 1970."""
    parts: list[str] = [task.status]
    if task.priority:
        parts.append(f"priority {task.priority}")
    if task.claim is not None:
        parts.append(f"claim {task.claim.number} of {printable(task.claim.worker)}")
    if task.failures:
        parts.append(f"failed {task.failures} of {task.retries + 1} tries")
    if task.after:
        parts.append(f"after {len(task.after)}{_choice(task)}")
    parts += _room(task, wall)
    if task.blocked_by:
        first, *more = task.blocked_by
        others = f", and {len(more)} more" if more else ""
        parts.append(f"waits for {first.id}, which is {first.status}{others}")
    return f"{task.id} {printable(task.name)}: {', '.join(parts)}"


def shown(task: FullTaskDocument, wall: float) -> Iterator[str]:
    """Return a task in several lines; ``wall`` is seconds since 1970."""
    yield task_line(task, wall)
    if is_task_id(task.id):
        yield f"enqueued: {_time(created_at(task.id))}, by the clock of the host that made the id"
    if task.due:
        yield f"waits until: {_time(task.due)}"
    if task.timeout_s is not None:
        yield f"timeout: {task.timeout_s:g} s a try"
    yield from _limits(task)
    for each in task.after:
        yield f"after: {each}{_choice(task)}"
    for blocker in task.blocked_by:
        advice = "requeue that one, or cancel this one"
        if task.after_failure is AfterFailure.FAIL and blocker.id in task.after:
            advice = "a worker that has its function makes it dead"
        yield f"waits for {blocker.id} {printable(blocker.name)}, which is {blocker.status}: {advice}"
    yield f"payload: {_text(task.payload)}"
    yield from _gets(task)
    if task.claim is not None:
        yield f"last claim: {task.claim.number}, {task.claim.updates} updates"
    if task.result is not None:
        yield f"result: {_text(task.result)}"
    for number, line in enumerate(task.error.splitlines()):
        yield f"{'  ' if number else 'last error: '}{printable(line)}"


def update_line(update: UpdateDocument) -> str:
    """Return an update of a log in one line."""
    return f"claim {update.claim}, update {update.sequence}: {_text(update.content)}"


def _gets(task: FullTaskDocument) -> Iterator[str]:
    for field, source in task.results.items():
        got = f"the result of {source}" if isinstance(source, str) else f"the results of {', '.join(source)}"
        yield f"gets as {printable(field)}: {got}"


def _choice(task: TaskDocument) -> str:
    waits = task.after_failure is AfterFailure.WAIT
    return "" if waits else f", else {task.after_failure}"


def _limit(task: TaskDocument) -> str:
    of_key = f" with key {printable(task.limit_key)}" if task.limit_key else ""
    return f"{task.max_running:,} of its name{of_key}"


def _room(task: TaskDocument, wall: float) -> Iterator[str]:
    """Yield the limits that keep a waiting task."""
    room = task.room
    if task.status is not Status.WAITING or not (task.max_running or task.rate_limit):
        return
    is_full = bool(task.max_running) and (room is None or room.running >= task.max_running)
    if is_full:
        yield f"held back while {_limit(task)} run"
    if room is not None and room.at > wall:
        yield f"held back by its rate limit for {room.at - wall:.1f} s"
    elif room is not None and not is_full:
        yield "its limit has room"


def _limits(task: TaskDocument) -> Iterator[str]:
    if task.unique_key:
        period = f", and for {task.unique_for_s:g} s from when it was enqueued" if task.unique_for_s else ""
        yield f"unique key: {printable(task.unique_key)}, while it is open{period}"
    if task.max_running:
        yield f"limit: at most {_limit(task)} run at once"
    if task.rate_limit:
        of_key = f" with key {printable(task.limit_key)}" if task.limit_key else ""
        yield f"rate limit: {task.rate_limit} of its name{of_key}"


def _text(content: Content) -> str:
    if content.base64 is not None:
        return f"base64 {content.base64}"
    return json.dumps(content.value, ensure_ascii=True)


def status_lines(status: QueueStatus, wall: float) -> Iterator[str]:
    """Return the status of a queue in several lines."""
    for each, number in status.counts.items():
        yield f"{each}: {number:,}"
    oldest_s = status.oldest_ready_s
    yield f"oldest ready: {'none' if oldest_s is None else f'waits for {_age(oldest_s)}'}"
    if status.swept is not None:
        yield f"deleted by retention: {status.deleted:,}, looked {_age(wall - status.swept)} ago"
    if status.pauses.queue is not None:
        yield pause_line("the queue", status.pauses.queue, wall)
    for name, pause in sorted(status.pauses.schedules.items()):
        yield pause_line(f"schedule {printable(name)}", pause, wall)
    yield f"workers: {len(status.workers)}"
    for worker in status.workers:
        runs = "serves" if worker.concurrency is None else f"runs {worker.running} of {worker.concurrency}"
        silent = ", SILENT" if worker.is_silent(wall) else ""
        yield (
            f"  {printable(worker.worker)} on {printable(worker.host)}, pid {worker.pid}: {runs}, "
            f"seen {_age(wall - worker.seen)} ago{silent}"
        )
        for trouble in worker.troubles:
            yield (
                f"    {printable(trouble.loop)}: {trouble.kind} for {_age(wall - trouble.since)}, "
                f"{trouble.attempts:,} failed: {printable(trouble.error)}"
            )


def pause_line(what: str, pause: Pause, wall: float) -> str:
    """Return since when and by whom something is paused, and why."""
    reason = f": {printable(pause.reason)}" if pause.reason else ""
    return f"{what} is PAUSED for {_age(wall - pause.since)} by {printable(pause.by)}{reason}"


def _age(seconds: float) -> str:
    """A duration in its largest unit, rounded down."""
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{int(seconds // unit_s)} {unit}"
    return f"{max(0, int(seconds))} s"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds")
