"""Common options of the commands on tasks, and the opening of a queue."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import typer
from typer.models import OptionInfo

from rebalanser.cli.arguments import parse_span
from rebalanser.cli.output import Face
from rebalanser.core.tasks.model import Status, Stored
from rebalanser.errors import UnknownQueue
from rebalanser.registry.urls import REGISTRY_VARIABLE
from rebalanser.settings import Settings
from rebalanser.tasks.queue import Queue
from rebalanser.tasks.retention import Retention

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
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
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
class Selection:
    """The tasks that options select, by status, function and age in seconds."""

    statuses: frozenset[Status] | None
    name: str | None
    older_than_s: float

    @classmethod
    def of(cls, statuses: list[Status] | None, name: str | None, older_than_s: float | None) -> Selection:
        """Make a selection from options; those that are not given select all."""
        return cls(frozenset(statuses) if statuses else None, name, older_than_s or 0.0)

    def tasks(self, queue: Queue, page: int = 1000) -> Iterator[Stored]:
        """Read the tasks in the order of their ids."""
        return queue.tasks(self.statuses, page=page, name=self.name, older_than_s=self.older_than_s)

    def newest(self, queue: Queue, limit: int) -> list[Stored]:
        """Return the newest tasks, the newest first."""
        return queue.newest(limit, self.statuses, name=self.name, older_than_s=self.older_than_s)


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
            f"{error}; say with --registry or {REGISTRY_VARIABLE} where the queue is"
        ) from error
    with queue:
        yield queue
