"""Common options of the commands on tasks, and the opening of a queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from rebalanser.cli.face import Face
from rebalanser.errors import UnknownQueue
from rebalanser.registry.urls import REGISTRY_VARIABLE
from rebalanser.settings import Settings
from rebalanser.tasks.model import Status
from rebalanser.tasks.queue import Queue

QueueArgument = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.", show_default=False)]
TaskArgument = Annotated[str, typer.Argument(metavar="ID", help="The task's id.", show_default=False)]
TasksArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="The tasks' ids.", show_default=False)
]
StatusOption = Annotated[
    list[Status] | None,
    typer.Option("--status", show_default="any", help="Only tasks in this status; repeatable."),
]
LimitOption = Annotated[
    int | None, typer.Option(min=1, metavar="NUMBER", show_default="all", help="Maximum number of tasks.")
]
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
