"""``rebalanser tasks collect``: deletes complete tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rebalanser.cli.face import Face, JsonOption, RegistryOption
from rebalanser.cli.lines import counted
from rebalanser.cli.tasks_options import QueueArgument, opened
from rebalanser.cli.times import parse_span


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
